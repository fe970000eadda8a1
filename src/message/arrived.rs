//! A message as it arrived from a broker, and as a handler sees it.
//!
//! Promise: no message that arrives can cause a panic here. A message without a usable id gets
//! another one, with the reason. Not here: reading from a broker (`broker`).

use std::fmt;

use chrono::{DateTime, Utc};

use super::hash::{ContentHash, content_hash, lane_id};
use super::identity::{IdRule, MessageId, identity};
use super::{TraceContext, pointer, wire};

/// Where a message stood in its broker.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Coordinates {
    /// The topic; on RabbitMQ the queue.
    pub place: String,
    /// The partition; 0 on RabbitMQ.
    pub partition: i32,
    /// The offset; on RabbitMQ the delivery tag, which is valid only on its channel.
    pub offset: i64,
}

impl fmt::Display for Coordinates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}@{}", self.place, self.partition, self.offset)
    }
}

/// A message as an adapter took it from the broker, with its envelope.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Arrived {
    /// The topic; on RabbitMQ the routing key.
    pub topic: String,
    /// The key: record key on Kafka, `cloudEvents_partitionkey` on RabbitMQ.
    pub key: Option<Vec<u8>>,
    /// All headers, with the names as they came.
    pub headers: Vec<(String, Vec<u8>)>,
    /// The payload; `None` for a Kafka tombstone.
    pub payload: Option<Vec<u8>>,
    /// `ce_id`; on RabbitMQ the property `message_id`, or the header `cloudEvents_id`.
    pub id: Option<String>,
    /// `ce_type`; on RabbitMQ the property `type`, or the header `cloudEvents_type`.
    pub kind: Option<String>,
    /// `ce_source`; on RabbitMQ the header `cloudEvents_source`, or the property `app_id`.
    pub source: Option<String>,
    /// `ce_time`, or the broker's record time; on RabbitMQ the header `cloudEvents_time`, or the
    /// property `timestamp`.
    pub time: Option<DateTime<Utc>>,
    /// The media type of the payload; `None` if the message has none.
    pub content_type: Option<String>,
    /// Where the message stood in the broker.
    pub coordinates: Coordinates,
}

impl Arrived {
    /// The bytes that a delivery weighs in memory, with 200 for all that is not counted one by one.
    pub(crate) fn weight(&self) -> usize {
        self.payload.as_ref().map_or(0, Vec::len)
            + self.key.as_ref().map_or(0, Vec::len)
            + self.headers.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>()
            + 200
    }
}

/// A message as a handler sees it.
#[derive(Clone, PartialEq, Eq)]
pub struct Message {
    /// The identity by which the message is deduplicated.
    pub id: MessageId,
    /// The id as it stood in the message, before it became 16 bytes.
    pub id_text: String,
    /// The topic it was published to; on RabbitMQ the routing key.
    pub topic: String,
    /// The key, which may be any bytes; [`Message::key_text`] gives it as text.
    pub key: Option<Vec<u8>>,
    /// The kind; empty if the message has none.
    pub kind: String,
    /// The headers of the application, without those of the envelope and the broker.
    pub headers: Vec<(String, Vec<u8>)>,
    /// The payload bytes, unchanged; empty for a tombstone.
    pub payload: Vec<u8>,
    /// True for a Kafka record with a null value.
    pub tombstone: bool,
    /// The media type of the payload; `None` if the message has none.
    pub content_type: Option<String>,
    /// The publisher: `ce_source`, or the property `app_id`; empty if the message has none.
    pub source: String,
    /// When the message was enqueued (`ce_time`); without that, the broker's record time.
    pub time: Option<DateTime<Utc>>,
    /// The trace of the message; `None` without a valid `traceparent` header.
    pub trace: Option<TraceContext>,
    /// Where it stood in the broker.
    pub coordinates: Coordinates,
    /// The number of this attempt, from 1. A try that was not counted, such as one that ended in a
    /// deadlock, does not raise it.
    pub attempt: u32,
}

impl Message {
    /// Applies the id rule of the consumer. `epoch` is the consumer's `id_epoch`: a part of each id
    /// from coordinates, which an operator changes when a topic was deleted and made anew.
    ///
    /// If the rule finds no id, also returns why. The message then has an id made from the
    /// coordinates, so that it is stored as dead only once. If coordinates are not stable
    /// (`stable_coordinates` is false on RabbitMQ), this id is made from the content.
    pub fn identify(arrived: Arrived, rule: &IdRule, epoch: &str, stable_coordinates: bool) -> (Self, Option<String>) {
        let source = arrived.source.clone().unwrap_or_default();
        let found = match rule {
            IdRule::Envelope => arrived.id.clone().ok_or_else(|| "the message has no id".to_owned()),
            IdRule::Header(name) => header_text(&arrived.headers, name)
                .map(str::to_owned)
                .ok_or_else(|| format!("the header `{name}`, which is to hold the id, is missing or not text")),
            IdRule::Payload(path) => pointer::text_at(arrived.payload.as_deref().unwrap_or_default(), path)
                .map_err(|error| format!("the payload has no id at `{path}`: {error}")),
            IdRule::Coordinates if stable_coordinates => Ok(format!("{epoch}:{}", arrived.coordinates)),
            IdRule::Coordinates => Err("coordinates are no identity on this broker".to_owned()),
        };
        let found = found.and_then(|id| match id.len() {
            0 => Err("the message id is empty".to_owned()),
            1..=1_024 => Ok(id),
            length => Err(format!("the message id has {length} bytes, at most 1024 are allowed")),
        });
        match found {
            Ok(id_text) => (Self::assemble(arrived, identity(&source, &id_text), id_text, source), None),
            Err(reason) => {
                let mut message = Self::assemble(arrived, MessageId::default(), String::new(), source);
                let stand_in = if stable_coordinates {
                    format!("coordinates:{epoch}:{}", message.coordinates)
                } else {
                    let hash = message.content_hash();
                    format!("content:{}", hash.map(|byte| format!("{byte:02x}")).concat())
                };
                message.id = identity("oncebox/no-usable-id", &stand_in);
                (message, Some(reason))
            }
        }
    }

    fn assemble(arrived: Arrived, id: MessageId, id_text: String, source: String) -> Self {
        let trace = header_text(&arrived.headers, wire::TRACEPARENT)
            .and_then(|parent| TraceContext::parse(parent, header_text(&arrived.headers, wire::TRACESTATE)));
        Self {
            id,
            id_text,
            topic: arrived.topic,
            key: arrived.key,
            kind: arrived.kind.unwrap_or_default(),
            headers: arrived.headers.into_iter().filter(|(name, _)| !wire::is_envelope(name)).collect(),
            tombstone: arrived.payload.is_none(),
            payload: arrived.payload.unwrap_or_default(),
            content_type: arrived.content_type,
            source,
            time: arrived.time,
            trace,
            coordinates: arrived.coordinates,
            attempt: 1,
        }
    }

    /// The key as text; `None` if it is not UTF-8.
    #[must_use]
    pub fn key_text(&self) -> Option<&str> {
        self.key.as_deref().and_then(|key| std::str::from_utf8(key).ok())
    }

    /// A header of the application as text. Names are compared without regard to case. `None` if it
    /// is missing or not UTF-8.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        header_text(&self.headers, name)
    }

    /// Reads the payload as JSON. An error is terminal, because a retry reads the same bytes.
    ///
    /// # Errors
    /// A terminal [`crate::HandlerError`] that names the message.
    pub fn json<'a, T: serde::Deserialize<'a>>(&'a self) -> Result<T, crate::HandlerError> {
        serde_json::from_slice(&self.payload).map_err(|error| {
            crate::HandlerError::terminal(format!(
                "the payload of message {} is not what is expected: {error}",
                self.id
            ))
        })
    }

    /// The hash of the content, without time, source and trace. Two messages with the same id and
    /// different hashes are an alarm (G7).
    #[must_use]
    pub fn content_hash(&self) -> ContentHash {
        content_hash(
            &self.topic,
            self.key.as_deref(),
            &self.kind,
            self.content_type.as_deref(),
            &self.payload,
            self.headers.iter().map(|(name, value)| (name.as_str(), value.as_slice())),
        )
    }

    /// The 16 bytes that stand for topic and key, by which order is kept; `None` without a key.
    #[must_use]
    pub fn lane_id(&self) -> Option<[u8; 16]> {
        self.key.as_deref().map(|key| lane_id(&self.topic, key))
    }
}

// A payload may hold data that must not be logged, so only its length is shown.
impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Message")
            .field("id", &self.id)
            .field("topic", &self.topic)
            .field("kind", &self.kind)
            .field("payload_bytes", &self.payload.len())
            .field("coordinates", &self.coordinates)
            .field("attempt", &self.attempt)
            .finish_non_exhaustive()
    }
}

fn header_text<'a>(headers: &'a [(String, Vec<u8>)], name: &str) -> Option<&'a str> {
    let found = headers.iter().find(|(other, _)| other.eq_ignore_ascii_case(name))?;
    std::str::from_utf8(&found.1).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arrived() -> Arrived {
        Arrived {
            topic: "payments".into(),
            key: Some(b"acc-7".to_vec()),
            headers: vec![("Event-Id".into(), b"e-1".to_vec()), ("ce_id".into(), b"x".to_vec())],
            payload: Some(br#"{"eventId":"e-2","n":1}"#.to_vec()),
            id: Some("x".into()),
            kind: None,
            source: None,
            time: None,
            content_type: None,
            coordinates: Coordinates { place: "payments".into(), partition: 0, offset: 4 },
        }
    }

    #[test]
    fn each_id_rule_finds_its_id() {
        for (rule, id) in [
            ("envelope", "x"),
            ("header:event-id", "e-1"),
            ("payload:/eventId", "e-2"),
            ("coordinates", "e1:payments/0@4"),
        ] {
            let (message, why) = Message::identify(arrived(), &rule.parse().expect("rule"), "e1", true);
            assert_eq!((message.id_text.as_str(), why), (id, None));
        }
    }

    #[test]
    fn a_message_without_a_usable_id_says_why_and_keeps_a_stable_stand_in() {
        let mut without = arrived();
        without.id = None;
        let stand_in = |arrived: &Arrived, stable_coordinates| {
            let (message, why) = Message::identify(arrived.clone(), &IdRule::Envelope, "e1", stable_coordinates);
            assert!(why.as_ref().is_some_and(|why| why.contains("no id")), "{why:?}");
            message.id
        };
        let first = stand_in(&without, true);
        assert_eq!(first, stand_in(&without, true));
        without.coordinates.offset = 5;
        let other = stand_in(&without, true);
        assert_ne!(first, other);
        assert_ne!(stand_in(&without, false), other);
    }

    // Shown by: counting headers of federation and shovel as the application's.
    #[test]
    fn a_copy_that_took_another_way_through_the_broker_has_the_same_content() {
        let direct = Message::identify(arrived(), &IdRule::Envelope, "", false).0;
        for name in ["x-received-from", "x-original-exchange", "x-shovelled", "x-shovelled-timestamp", "x-routed-by"] {
            let mut copy = arrived();
            copy.headers.push((name.to_owned(), b"elsewhere".to_vec()));
            let copy = Message::identify(copy, &IdRule::Envelope, "", false).0;
            assert_eq!(copy.content_hash(), direct.content_hash(), "{name}");
        }
        let mut other = arrived();
        other.headers.push(("x-tenant".to_owned(), b"t1".to_vec()));
        let other = Message::identify(other, &IdRule::Envelope, "", false).0;
        assert_ne!(other.content_hash(), direct.content_hash());
    }

    #[test]
    fn envelope_headers_are_not_the_applications() {
        let message = Message::identify(arrived(), &IdRule::Envelope, "", true).0;
        assert_eq!(message.headers.len(), 1);
        assert_eq!(message.header("event-id"), Some("e-1"));
    }
}
