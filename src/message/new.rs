//! A message as the application enqueues it. Promise: the payload is kept byte for byte. Not here:
//! limits ([`limits`](super::limits)), and writing the row (`store`).

use uuid::Uuid;

use super::{Headers, TraceContext};
use crate::error::LimitError;

/// A message to enqueue. Make it with [`NewMessage::json`], [`NewMessage::text`] or
/// [`NewMessage::bytes`], then use the `with_` methods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewMessage {
    /// The id; without one a UUID v7 is made. Enqueued twice with one id, it is published twice.
    pub id: Option<Uuid>,
    /// The destination: the Kafka topic, or the routing key on RabbitMQ.
    pub topic: String,
    /// The key. Order is kept per topic and key; without a key there is no order.
    pub key: Option<String>,
    /// What happened, for example `payment.created`.
    pub kind: String,
    /// The headers of the application. `traceparent` and `tracestate` become the trace context.
    pub headers: Headers,
    /// The payload bytes, which are never parsed.
    pub payload: Vec<u8>,
    /// `application/json` for text, `application/octet-stream` for bytes, unless given.
    pub content_type: Option<String>,
    /// The trace. Without it, the current span's context is used if the feature `otel` is on.
    pub trace: Option<TraceContext>,
}

impl NewMessage {
    /// A message with a text as payload, kept byte for byte. The default content type is JSON.
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
    /// The error of `serde_json` if it cannot serialise the value.
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

    /// Adds a header. It replaces none: two headers of one name are refused at enqueue.
    #[must_use]
    pub fn with_header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    /// Sets the message id, instead of a new UUID v7.
    #[must_use]
    pub fn with_id(mut self, id: Uuid) -> Self {
        self.id = Some(id);
        self
    }

    /// Moves `traceparent` and `tracestate` from the headers into the trace context, and drops a
    /// `tracestate` without a `traceparent`. If no `traceparent` and no context was given, takes
    /// the context of the current span.
    ///
    /// # Errors
    /// The limit `trace` if `traceparent` is not in W3C form; `header_twice` if one is given twice.
    pub(crate) fn settle_trace(&mut self) -> Result<(), LimitError> {
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
