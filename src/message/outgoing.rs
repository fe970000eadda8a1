//! A message on its way out: an outbox row as the relay hands it to a broker.

use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::{Headers, TraceContext};

/// A committed outbox message, ready to be published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutgoingMessage {
    /// The message id, the same each time the message is published.
    pub id: Uuid,
    /// Where it goes: the Kafka topic, the routing key on RabbitMQ.
    pub topic: String,
    /// The key that its order is kept by; `None`: it has no order.
    pub key: Option<String>,
    /// What happened, for example `payment.created`.
    pub kind: String,
    /// Headers of the application.
    pub headers: Headers,
    /// The payload, byte for byte as it was enqueued.
    pub payload: Vec<u8>,
    /// The media type of the payload, for example `application/json`.
    pub content_type: String,
    /// The trace that the message belongs to; `None` where it was enqueued without one.
    pub trace: Option<TraceContext>,
    /// When it was enqueued, by the database's clock.
    pub created_at: DateTime<Utc>,
}

impl OutgoingMessage {
    /// What this message weighs in memory and in the publish window, in bytes.
    #[must_use]
    pub fn weight(&self) -> usize {
        self.payload.len()
            + self.key.as_ref().map_or(0, String::len)
            + self.headers.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>()
            + 200
    }

    /// What the header `oncebox-hash` carries: the key, else the message id (R20).
    #[must_use]
    pub fn hash_value(&self) -> String {
        self.key.clone().unwrap_or_else(|| self.id.to_string())
    }
}
