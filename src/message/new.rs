//! A message as the application hands it over.

use uuid::Uuid;

use super::{Headers, TraceContext};
use crate::error::LimitError;

/// A message to enqueue. Built by [`NewMessage::json`] or [`NewMessage::bytes`], then the `with_`
/// methods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewMessage {
    /// Given id; a UUID v7 is made where there is none. The same id twice is published twice.
    pub id: Option<Uuid>,
    /// Where it goes: the Kafka topic, the routing key on RabbitMQ.
    pub topic: String,
    /// Order is kept per (topic, key); a message without a key has no order and holds nothing.
    pub key: Option<String>,
    /// What happened, for example `payment.created`.
    pub kind: String,
    /// Headers of the application. `traceparent` and `tracestate` among them become the trace
    /// context.
    pub headers: Headers,
    /// The bytes, never looked into.
    pub payload: Vec<u8>,
    /// `application/json` for text, `application/octet-stream` for bytes, unless given.
    pub content_type: Option<String>,
    /// The trace this message belongs to; without it the current span's is taken where the feature
    /// `otel` is on.
    pub trace: Option<TraceContext>,
}

impl NewMessage {
    /// A message whose payload is text, by default JSON, kept byte for byte.
    pub fn text(topic: impl Into<String>, kind: impl Into<String>, payload: impl Into<String>) -> Self {
        Self {
            id: None,
            topic: topic.into(),
            key: None,
            kind: kind.into(),
            headers: Headers::new(),
            payload: payload.into().into_bytes(),
            content_type: Some("application/json".to_owned()),
            trace: None,
        }
    }

    /// A message whose payload is a value serialised as JSON.
    ///
    /// # Errors
    /// What `serde_json` says of the value.
    pub fn json(
        topic: impl Into<String>,
        kind: impl Into<String>,
        payload: &impl serde::Serialize,
    ) -> Result<Self, serde_json::Error> {
        Ok(Self::text(topic, kind, serde_json::to_string(payload)?))
    }

    /// A message whose payload is bytes.
    pub fn bytes(topic: impl Into<String>, kind: impl Into<String>, payload: impl Into<Vec<u8>>) -> Self {
        Self {
            payload: payload.into(),
            content_type: Some("application/octet-stream".to_owned()),
            ..Self::text(topic, kind, "")
        }
    }

    /// Sets the key: messages of one topic and key keep their order.
    #[must_use]
    pub fn with_key(mut self, key: impl Into<String>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// Adds a header; a header of the same name stays, and two of one name are refused at enqueue.
    #[must_use]
    pub fn with_header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    /// Sets the content type.
    #[must_use]
    pub fn with_content_type(mut self, content_type: impl Into<String>) -> Self {
        self.content_type = Some(content_type.into());
        self
    }

    /// Sets the message id, instead of a new UUID v7.
    #[must_use]
    pub fn with_id(mut self, id: Uuid) -> Self {
        self.id = Some(id);
        self
    }

    /// Moves `traceparent` and `tracestate` out of the headers into the trace context, and takes
    /// the current span's context where neither was given. Every Rust door calls it once before it
    /// checks limits.
    ///
    /// # Errors
    /// The limit `trace` where a given `traceparent` is not of the W3C form, `header_twice` where
    /// it is given twice.
    pub fn settle_trace(&mut self) -> Result<(), LimitError> {
        for wanted in ["traceparent", "tracestate"] {
            if self.headers.iter().filter(|(name, _)| name.eq_ignore_ascii_case(wanted)).count() > 1 {
                return Err(LimitError::new("header_twice", format!("the header `{wanted}` is given twice")));
            }
        }
        let mut take = |wanted: &str| {
            let at = self.headers.iter().position(|(name, _)| name.eq_ignore_ascii_case(wanted))?;
            Some(self.headers.remove(at).1)
        };
        let (parent, state) = (take("traceparent"), take("tracestate"));
        if let Some(parent) = parent {
            let trace = TraceContext::parse(&parent, state.as_deref());
            self.trace = Some(trace.ok_or_else(|| {
                LimitError::new("trace", format!("the header `traceparent` is not of the W3C form: `{parent}`"))
            })?);
        }
        #[cfg(feature = "otel")]
        if self.trace.is_none() {
            self.trace = super::current_span();
        }
        Ok(())
    }
}
