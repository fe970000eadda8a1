//! How messages of consumers stand in the tables: headers as JSON, names as bytes.

use chrono::{DateTime, Utc};
use sqlx::Row;
use sqlx::mysql::MySqlRow;

use super::text;
use crate::error::StoreError;
use crate::message::{Coordinates, Message, MessageId, TraceContext};
use crate::policy::hex::{hex, unhex};

/// The message of a row, whole.
pub(super) fn message(row: &MySqlRow) -> Result<Message, StoreError> {
    let content_type: Option<Vec<u8>> = row.try_get("content_type")?;
    let traceparent: Option<String> = row.try_get("traceparent")?;
    let tracestate: Option<String> = row.try_get("tracestate")?;
    let time: Option<DateTime<Utc>> = row.try_get("message_time")?;
    Ok(Message {
        id: MessageId::from_uuid(row.try_get("message_id")?),
        id_text: row.try_get("id_text")?,
        topic: text("topic", row.try_get("topic")?)?,
        key: row.try_get("key")?,
        kind: text("kind", row.try_get("kind")?)?,
        headers: arrived_from_json(row.try_get("headers")?)?,
        payload: row.try_get("payload")?,
        tombstone: row.try_get("tombstone")?,
        content_type: content_type.map(|found| text("content_type", found)).transpose()?,
        source: text("source", row.try_get("source")?)?,
        time,
        trace: traceparent.map(|traceparent| TraceContext { traceparent, tracestate }),
        coordinates: Coordinates {
            place: text("place", row.try_get("place")?)?,
            partition: row.try_get("partition_no")?,
            offset: row.try_get("offset_no")?,
        },
        attempt: row.try_get("attempts")?,
    })
}

/// Headers that arrived may have any bytes, and a name twice: pairs, with a third member where the
/// value is not text.
pub(super) fn arrived_to_json(headers: &[(String, Vec<u8>)]) -> String {
    let pair = |(name, value): &(String, Vec<u8>)| match std::str::from_utf8(value) {
        Ok(value) => serde_json::json!([name, value]),
        Err(_) => serde_json::json!([name, hex(value), "hex"]),
    };
    serde_json::Value::Array(headers.iter().map(pair).collect()).to_string()
}

pub(super) fn arrived_from_json(json: &str) -> Result<Vec<(String, Vec<u8>)>, StoreError> {
    let corrupt = || StoreError::Corrupt("the headers of a waiting row are no list of pairs".to_owned());
    let pairs: Vec<Vec<String>> = serde_json::from_str(json).map_err(|_| corrupt())?;
    let header = |pair: Vec<String>| match <[String; 2]>::try_from(pair) {
        Ok([name, value]) => Ok((name, value.into_bytes())),
        Err(pair) => match <[String; 3]>::try_from(pair) {
            Ok([name, digits, _]) => Ok((name, unhex(&digits).ok_or_else(corrupt)?)),
            Err(_) => Err(corrupt()),
        },
    };
    pairs.into_iter().map(header).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn headers_keep_any_bytes_their_order_and_names_given_twice() {
        let headers =
            vec![("z".to_owned(), vec![0xff, 0x00]), ("a".to_owned(), "ä\"".into()), ("a".to_owned(), Vec::new())];
        assert_eq!(arrived_from_json(&arrived_to_json(&headers)).unwrap(), headers);
        assert!(arrived_from_json("{}").is_err());
        assert!(arrived_from_json(r#"[["a"]]"#).is_err());
    }
}
