//! An outbox row as the relay passes it to a broker. Promise: its content is what was enqueued. Not
//! here: the mapping to Kafka and AMQP (`broker`).

use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::{Headers, TraceContext};

/// A committed outbox message, ready to be published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutgoingMessage {
    /// The message id, the same each time the message is published.
    pub id: Uuid,
    /// The destination: the Kafka topic, or the routing key on RabbitMQ.
    pub topic: String,
    /// The key by which order is kept; `None` for a message without order.
    pub key: Option<String>,
    /// What happened, for example `payment.created`.
    pub kind: String,
    /// Headers of the application.
    pub headers: Headers,
    /// The payload, byte for byte as it was enqueued.
    pub payload: Vec<u8>,
    /// The media type of the payload, for example `application/json`.
    pub content_type: String,
    /// The trace of the message; `None` if it was enqueued without one.
    pub trace: Option<TraceContext>,
    /// When it was enqueued, by the database's clock.
    pub created_at: DateTime<Utc>,
}

impl OutgoingMessage {
    /// The size of this message in memory and in the publish window, in bytes.
    #[must_use]
    pub fn weight(&self) -> usize {
        self.payload.len()
            + self.key.as_ref().map_or(0, String::len)
            + self.headers.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>()
            + 200
    }

    /// The value of the header `oncebox-hash`, which hash exchanges use: the key, or the message id
    /// if there is no key (R20).
    #[must_use]
    pub(crate) fn hash_value(&self) -> String {
        self.key.clone().unwrap_or_else(|| self.id.to_string())
    }
}

#[cfg(test)]
impl OutgoingMessage {
    /// A message for unit tests, with an id of its own.
    pub(crate) fn sample(topic: &str, key: Option<&str>) -> Self {
        Self {
            id: Uuid::now_v7(),
            topic: topic.to_owned(),
            key: key.map(str::to_owned),
            kind: "payment.created".to_owned(),
            headers: Vec::new(),
            payload: b"{}".to_vec(),
            content_type: "application/json".to_owned(),
            trace: TraceContext::parse("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", Some("a=b")),
            created_at: DateTime::UNIX_EPOCH,
        }
    }
}
