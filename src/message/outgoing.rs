//! A message on its way out: an outbox row as the relay hands it to a broker.

use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::{Headers, TraceContext};

/// A committed message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutgoingMessage {
    /// The message id.
    pub id: Uuid,
    /// Topic.
    pub topic: String,
    /// Key.
    pub key: Option<String>,
    /// Kind.
    pub kind: String,
    /// Headers of the application.
    pub headers: Headers,
    /// Payload bytes, unchanged.
    pub payload: Vec<u8>,
    /// Content type.
    pub content_type: String,
    /// Trace context.
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
