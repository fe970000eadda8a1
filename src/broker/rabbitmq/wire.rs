//! CloudEvents over AMQP 0.9.1: from a message to properties and headers, and back.
//!
//! Guarantees: payload bytes are never changed. The application's headers are sent as long strings.
//! A header of any type from another publisher is received as bytes: text and byte arrays as they
//! are, any other type as readable text.
//!
//! Source: CloudEvents AMQP binding 1.0.2 with the prefix `cloudEvents_`, here as headers of AMQP
//! 0.9.1.

use chrono::{DateTime, SecondsFormat, Utc};
use lapin::BasicProperties;
use lapin::message::Delivery;
use lapin::types::{AMQPValue, FieldTable, ShortString};

use crate::message::{Arrived, Coordinates, OutgoingMessage, wire};

/// The properties and headers that a message is published with. The error says what AMQP cannot
/// carry: a header name, kind, source or content type longer than 255 bytes.
pub(super) fn properties(message: &OutgoingMessage, source: &str) -> Result<BasicProperties, String> {
    let id = message.id.to_string();
    let mut headers = FieldTable::default();
    let mut put = |name: &str, value: &str| -> Result<(), String> {
        headers.insert(short("a header name", name)?, AMQPValue::LongString(value.into()));
        Ok(())
    };
    for (name, value) in &message.headers {
        put(name, value)?;
    }
    put(wire::AMQP.spec_version, wire::SPEC_VERSION)?;
    put(wire::AMQP.id, &id)?;
    put(wire::AMQP.kind, &message.kind)?;
    put(wire::AMQP.source, source)?;
    put(wire::AMQP.time, &wire::format_time(message.created_at))?;
    if let Some(key) = &message.key {
        put(wire::AMQP.partition_key, key)?;
    }
    put(wire::ONCEBOX_HASH, &message.hash_value())?;
    if let Some(trace) = &message.trace {
        put(wire::TRACEPARENT, &trace.traceparent)?;
        if let Some(state) = &trace.tracestate {
            put(wire::TRACESTATE, state)?;
        }
    }
    Ok(BasicProperties::default()
        .with_message_id(id.into())
        .with_type(short("the kind", &message.kind)?)
        .with_app_id(short("the source", source)?)
        .with_content_type(short("the content type", &message.content_type)?)
        .with_timestamp(u64::try_from(message.created_at.timestamp()).unwrap_or_default())
        // Persistent: it survives a restart of the server.
        .with_delivery_mode(2)
        .with_headers(headers))
}

/// Converts text to an AMQP short string; an error where it is longer than 255 bytes.
pub(super) fn short(what: &str, text: &str) -> Result<ShortString, String> {
    ShortString::try_new(text).map_err(|_| format!("{what} has {} bytes, AMQP carries at most 255", text.len()))
}

/// Converts a delivery. For id and kind a property counts before a header, for source and time the
/// header. The `offset` is the delivery tag, which is valid on its channel only.
pub(super) fn arrived(delivery: Delivery, queue: &str) -> Arrived {
    let properties = delivery.properties;
    let headers: Vec<(String, Vec<u8>)> = properties
        .headers()
        .as_ref()
        .map(|table| table.inner().iter().map(|(name, value)| (name.to_string(), bytes(value))).collect())
        .unwrap_or_default();
    let header = |name: &str| headers.iter().find(|(other, _)| other == name).map(|(_, value)| value.clone());
    let text = |name: &str| header(name).and_then(|value| String::from_utf8(value).ok());
    let property =
        |value: &Option<ShortString>| value.as_ref().map(ToString::to_string).filter(|text| !text.is_empty());
    let stamp = properties.timestamp().and_then(|seconds| DateTime::from_timestamp(i64::try_from(seconds).ok()?, 0));
    Arrived {
        topic: delivery.routing_key.to_string(),
        key: header(wire::AMQP.partition_key),
        id: property(properties.message_id()).or_else(|| text(wire::AMQP.id)),
        kind: property(properties.kind()).or_else(|| text(wire::AMQP.kind)),
        source: text(wire::AMQP.source).or_else(|| property(properties.app_id())),
        time: text(wire::AMQP.time).and_then(|text| wire::parse_time(&text)).or(stamp),
        content_type: property(properties.content_type()),
        payload: Some(delivery.data),
        coordinates: Coordinates {
            place: queue.to_owned(),
            partition: 0,
            offset: i64::try_from(delivery.delivery_tag).unwrap_or(i64::MAX),
        },
        headers,
    }
}

/// Converts a header value to bytes: text and byte arrays unchanged, numbers in decimal, times in
/// RFC 3339, tables and arrays as JSON.
fn bytes(value: &AMQPValue) -> Vec<u8> {
    match value {
        AMQPValue::LongString(text) => text.as_bytes().to_vec(),
        AMQPValue::ShortString(text) => text.as_str().as_bytes().to_vec(),
        AMQPValue::ByteArray(bytes) => bytes.as_slice().to_vec(),
        AMQPValue::Void => Vec::new(),
        AMQPValue::Timestamp(seconds) => instant(*seconds).into_bytes(),
        AMQPValue::FieldArray(_) | AMQPValue::FieldTable(_) => json(value).to_string().into_bytes(),
        other => match json(other) {
            serde_json::Value::String(text) => text.into_bytes(),
            plain => plain.to_string().into_bytes(),
        },
    }
}

fn json(value: &AMQPValue) -> serde_json::Value {
    use serde_json::{Number, Value};
    let float = |number: f64| Number::from_f64(number).map_or_else(|| Value::from(number.to_string()), Value::Number);
    match value {
        AMQPValue::Boolean(flag) => Value::from(*flag),
        AMQPValue::ShortShortInt(number) => Value::from(*number),
        AMQPValue::ShortShortUInt(number) => Value::from(*number),
        AMQPValue::ShortInt(number) => Value::from(*number),
        AMQPValue::ShortUInt(number) => Value::from(*number),
        AMQPValue::LongInt(number) => Value::from(*number),
        AMQPValue::LongUInt(number) => Value::from(*number),
        AMQPValue::LongLongInt(number) => Value::from(*number),
        // Through text: a float 1.1 stays 1.1 and does not become 1.10000002384.
        AMQPValue::Float(number) => number.to_string().parse().map_or_else(|_| float(f64::from(*number)), float),
        AMQPValue::Double(number) => float(*number),
        AMQPValue::DecimalValue(decimal) => Value::from(decimal_text(decimal.value, decimal.scale)),
        AMQPValue::ShortString(text) => Value::from(text.as_str()),
        AMQPValue::LongString(text) => Value::from(String::from_utf8_lossy(text.as_bytes()).into_owned()),
        AMQPValue::ByteArray(bytes) => Value::from(String::from_utf8_lossy(bytes.as_slice()).into_owned()),
        AMQPValue::Timestamp(seconds) => Value::from(instant(*seconds)),
        AMQPValue::FieldArray(values) => Value::Array(values.as_slice().iter().map(json).collect()),
        AMQPValue::FieldTable(table) => {
            Value::Object(table.inner().iter().map(|(name, value)| (name.to_string(), json(value))).collect())
        }
        AMQPValue::Void => Value::Null,
    }
}

fn decimal_text(value: u32, scale: u8) -> String {
    let digits = format!("{value:0>width$}", width = usize::from(scale) + 1);
    let (whole, fraction) = digits.split_at(digits.len() - usize::from(scale));
    if fraction.is_empty() { whole.to_owned() } else { format!("{whole}.{fraction}") }
}

fn instant(seconds: u64) -> String {
    let time: Option<DateTime<Utc>> =
        i64::try_from(seconds).ok().and_then(|seconds| DateTime::from_timestamp(seconds, 0));
    time.map_or_else(|| seconds.to_string(), |time| time.to_rfc3339_opts(SecondsFormat::Secs, true))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use lapin::types::{ByteArray, DecimalValue, FieldArray};
    use uuid::Uuid;

    use super::*;

    fn outgoing() -> OutgoingMessage {
        OutgoingMessage {
            id: Uuid::from_u128(0x0197_a1b2_c3d4_7e5f_8a9b_0c1d_2e3f_4a5b),
            headers: vec![("tenant".into(), "t1".into())],
            created_at: DateTime::from_timestamp(1_700_000_000, 250_000_000).unwrap(),
            ..OutgoingMessage::sample("payments", Some("acc-7"))
        }
    }

    fn delivered(properties: BasicProperties) -> Arrived {
        let mut delivery = Delivery::mock(9, "oncebox".into(), "payments".into(), false, b"{}".to_vec());
        delivery.properties = properties;
        arrived(delivery, "payments.ledger")
    }

    #[test]
    fn the_wire_is_what_the_interface_says_and_comes_back_as_it_went() {
        let properties = properties(&outgoing(), "shop").unwrap();
        let id = "0197a1b2-c3d4-7e5f-8a9b-0c1d2e3f4a5b";
        assert_eq!(properties.message_id().as_ref().unwrap().as_str(), id);
        assert_eq!(properties.kind().as_ref().unwrap().as_str(), "payment.created");
        assert_eq!(properties.app_id().as_ref().unwrap().as_str(), "shop");
        assert_eq!(properties.content_type().as_ref().unwrap().as_str(), "application/json");
        assert_eq!((*properties.timestamp(), *properties.delivery_mode()), (Some(1_700_000_000), Some(2)));
        let table = properties.headers().clone().unwrap();
        let want = [
            ("cloudEvents_id", id),
            ("cloudEvents_partitionkey", "acc-7"),
            ("cloudEvents_source", "shop"),
            ("cloudEvents_specversion", "1.0"),
            ("cloudEvents_time", "2023-11-14T22:13:20.250000Z"),
            ("cloudEvents_type", "payment.created"),
            ("oncebox-hash", "acc-7"),
            ("tenant", "t1"),
            ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
            ("tracestate", "a=b"),
        ];
        assert_eq!(table.inner().len(), want.len());
        for (name, value) in want {
            assert_eq!(table.inner().get(name), Some(&AMQPValue::LongString(value.into())), "{name}");
        }
        let back = delivered(properties);
        assert_eq!(
            (back.topic.as_str(), back.id.as_deref(), back.key.as_deref()),
            ("payments", Some(id), Some(&b"acc-7"[..]))
        );
        assert_eq!(back.time, Some(outgoing().created_at));
        assert_eq!(back.source.as_deref(), Some("shop"));
        assert_eq!((back.coordinates.place.as_str(), back.coordinates.offset), ("payments.ledger", 9));
    }

    #[test]
    fn a_message_without_a_key_has_its_id_as_hash_and_no_key() {
        let mut message = outgoing();
        message.key = None;
        let properties = properties(&message, "s").unwrap();
        let table = properties.headers().clone().unwrap();
        let id = AMQPValue::LongString(message.id.to_string().into());
        assert_eq!(table.inner().get("oncebox-hash"), Some(&id));
        assert_eq!(delivered(properties).key, None);
    }

    #[test]
    fn a_foreign_message_gives_what_it_has() {
        let nothing = delivered(BasicProperties::default());
        assert_eq!((nothing.id, nothing.kind, nothing.source, nothing.time), (None, None, None, None));
        let properties = BasicProperties::default().with_app_id("legacy".into()).with_timestamp(1_700_000_000);
        let some = delivered(properties);
        assert_eq!(some.source.as_deref(), Some("legacy"));
        assert_eq!(some.time.unwrap().timestamp(), 1_700_000_000);
    }

    #[test]
    fn any_type_of_header_becomes_readable_bytes() {
        let mut table = FieldTable::default();
        table.insert("n".into(), AMQPValue::LongLongInt(-3));
        let array: FieldArray = vec![AMQPValue::Boolean(true), AMQPValue::FieldTable(table)].into();
        let cases = [
            (AMQPValue::Boolean(true), "true"),
            (AMQPValue::ShortShortInt(-1), "-1"),
            (AMQPValue::LongUInt(4_000_000_000), "4000000000"),
            (AMQPValue::Float(1.1), "1.1"),
            (AMQPValue::Double(f64::NAN), "NaN"),
            (AMQPValue::DecimalValue(DecimalValue { scale: 2, value: 5 }), "0.05"),
            (AMQPValue::Timestamp(0), "1970-01-01T00:00:00Z"),
            (AMQPValue::ByteArray(ByteArray::from(&b"raw"[..])), "raw"),
            (AMQPValue::Void, ""),
            (AMQPValue::FieldArray(array), r#"[true,{"n":-3}]"#),
        ];
        for (value, want) in cases {
            assert_eq!(String::from_utf8(bytes(&value)).unwrap(), want, "{value:?}");
        }
    }

    #[test]
    fn what_amqp_cannot_carry_is_said_not_panicked_over() {
        let mut message = outgoing();
        message.kind = "k".repeat(256);
        assert!(properties(&message, "s").unwrap_err().contains("255"));
    }
}
