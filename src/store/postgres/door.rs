//! The Rust door: calls the functions that every language calls, so that limits, ids, buckets and time are the database's (R1).

use sqlx::{PgConnection, Row};
use uuid::Uuid;

use crate::error::StoreError;
use crate::message::{Headers, Limits, NewMessage};
use crate::store::Door;

/// What no setting of the database allows, and what PostgreSQL would refuse without naming a limit (a NUL in text).
const WIDEST: Limits = Limits {
    topic_length_max: 249,
    key_bytes_max: usize::MAX,
    kind_bytes_max: 255,
    headers_max: usize::MAX,
    header_name_bytes_max: 255,
    headers_bytes_max: 65_536,
    content_type_bytes_max: 255,
    message_bytes_max: usize::MAX,
};

const ONE: &str = "select oncebox.enqueue_message($1, $2, $3, $4, $5::text::json, $6, $7, $8, $9)";
const MANY: &str = "select oncebox.enqueue_all($1, $2, $3, $4, $5::text[]::json[], $6, $7, $8, $9)";

impl Door for PgConnection {
    async fn write(&mut self, mut messages: Vec<NewMessage>) -> Result<Vec<Uuid>, StoreError> {
        for message in &mut messages {
            message.settle_trace()?;
            WIDEST.check(message)?;
        }
        match messages.as_slice() {
            [] => Ok(Vec::new()),
            [message] => write_one(self, message).await.map(|id| vec![id]),
            many => write_many(self, many).await,
        }
    }
}

async fn write_one(connection: &mut PgConnection, message: &NewMessage) -> Result<Uuid, StoreError> {
    let row = sqlx::query(ONE)
        .bind(&message.topic)
        .bind(&message.kind)
        .bind(&message.payload)
        .bind(&message.key)
        .bind(headers_json(&message.headers))
        .bind(&message.content_type)
        .bind(message.id)
        .bind(message.trace.as_ref().map(|trace| &trace.traceparent))
        .bind(message.trace.as_ref().and_then(|trace| trace.tracestate.as_ref()))
        .fetch_one(connection)
        .await?;
    Ok(row.try_get(0)?)
}

async fn write_many(connection: &mut PgConnection, messages: &[NewMessage]) -> Result<Vec<Uuid>, StoreError> {
    fn column<'a, T>(messages: &'a [NewMessage], of: impl Fn(&'a NewMessage) -> T) -> Vec<T> {
        messages.iter().map(of).collect()
    }
    let trace = |message: &NewMessage| message.trace.as_ref().map(|trace| trace.traceparent.clone());
    let state = |message: &NewMessage| message.trace.as_ref().and_then(|trace| trace.tracestate.clone());
    let row = sqlx::query(MANY)
        .bind(column(messages, |message| message.topic.as_str()))
        .bind(column(messages, |message| message.kind.as_str()))
        .bind(column(messages, |message| message.payload.as_slice()))
        .bind(column(messages, |message| message.key.as_deref()))
        .bind(unless_all_none(column(messages, |message| headers_json(&message.headers))))
        .bind(column(messages, |message| message.content_type.as_deref()))
        .bind(unless_all_none(column(messages, |message| message.id)))
        .bind(unless_all_none(column(messages, trace)))
        .bind(unless_all_none(column(messages, state)))
        .fetch_one(connection)
        .await?;
    let ids: Vec<Uuid> = row.try_get(0)?;
    if ids.len() != messages.len() {
        return Err(StoreError::Corrupt(format!(
            "{} messages were given, {} ids came back",
            messages.len(),
            ids.len()
        )));
    }
    Ok(ids)
}

/// A null array stands for nulls throughout, and costs nothing.
fn unless_all_none<T>(column: Vec<Option<T>>) -> Option<Vec<Option<T>>> {
    column.iter().any(Option::is_some).then_some(column)
}

/// Headers as a JSON object in the order given; none where there are none.
pub(super) fn headers_json(headers: &Headers) -> Option<String> {
    use std::fmt::Write as _;

    if headers.is_empty() {
        return None;
    }
    let mut json = String::with_capacity(headers.iter().map(|(name, value)| name.len() + value.len() + 6).sum());
    for (index, (name, value)) in headers.iter().enumerate() {
        json.push(if index == 0 { '{' } else { ',' });
        // Display of a JSON string is the string, quoted and escaped; writing into a String cannot fail.
        let _ = write!(json, "{}:{}", serde_json::Value::from(name.as_str()), serde_json::Value::from(value.as_str()));
    }
    json.push('}');
    Some(json)
}

/// The inverse of [`headers_json`], which also reads what other languages wrote.
pub(super) fn parse_headers(json: &str) -> Result<Headers, StoreError> {
    struct Pairs;

    impl<'de> serde::de::Visitor<'de> for Pairs {
        type Value = Headers;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("an object of strings")
        }

        fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Headers, A::Error> {
            let mut headers = Headers::new();
            while let Some(pair) = map.next_entry()? {
                headers.push(pair);
            }
            Ok(headers)
        }
    }

    let mut json = serde_json::Deserializer::from_str(json);
    serde::Deserializer::deserialize_map(&mut json, Pairs)
        .map_err(|error| StoreError::Corrupt(format!("headers are not an object of strings: {error}")))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn headers_keep_their_order_and_every_character() {
        let headers: Headers =
            [("z", "1"), ("a\"\\", "\u{1}\n ü \u{2028}"), ("m", "")].map(|(a, b)| (a.to_owned(), b.to_owned())).into();
        assert_eq!(parse_headers(&headers_json(&headers).unwrap()).unwrap(), headers);
        assert_eq!(headers_json(&Vec::new()), None);
        assert_eq!(parse_headers("{ \"b\" : \"1\", \"a\":\"2\" }").unwrap().len(), 2);
        assert!(parse_headers("{\"a\":1}").is_err());
    }
}
