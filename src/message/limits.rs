//! The limits of a message, by name. Their values are stored in the database and are the same for
//! every way to enqueue.
//!
//! Promise: every broker with its default settings can take a message that passes the default
//! limits. The fields have the names of the rows in the limits table. Not here: reading that
//! table (`store`).

use std::borrow::Cow;

use super::NewMessage;
use crate::error::LimitError;

/// Limits that can be raised or lowered in the database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// `topic_length_max`: the longest topic, in characters; at most 249, the limit of Kafka.
    pub topic_length_max: usize,
    /// `key_bytes_max`: the longest key, in bytes of UTF-8.
    pub key_bytes_max: usize,
    /// `kind_bytes_max`: the longest kind, in bytes; at most 255, an AMQP short string.
    pub kind_bytes_max: usize,
    /// `headers_max`: the largest number of headers.
    pub headers_max: usize,
    /// `header_name_bytes_max`: the longest name of a header, in bytes; at most 255.
    pub header_name_bytes_max: usize,
    /// `headers_bytes_max`: names and values of all headers together; at most 65,536, because an
    /// AMQP frame has 128 KiB.
    pub headers_bytes_max: usize,
    /// `content_type_bytes_max`: the longest content type, in bytes; at most 255.
    pub content_type_bytes_max: usize,
    /// `message_bytes_max`: key, headers and payload together.
    pub message_bytes_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            topic_length_max: 249,
            key_bytes_max: 1_024,
            kind_bytes_max: 255,
            headers_max: 64,
            header_name_bytes_max: 128,
            headers_bytes_max: 65_536,
            content_type_bytes_max: 255,
            message_bytes_max: 900_000,
        }
    }
}

impl Limits {
    /// How many limits there are, each with a row in the limits table.
    pub(crate) const COUNT: usize = 8;

    /// Sets a limit by the name of its row. False for an unknown name, from a newer schema.
    pub(crate) fn set(&mut self, name: &str, value: usize) -> bool {
        match name {
            "topic_length_max" => self.topic_length_max = value.min(249),
            "key_bytes_max" => self.key_bytes_max = value,
            "kind_bytes_max" => self.kind_bytes_max = value.min(255),
            "headers_max" => self.headers_max = value,
            "header_name_bytes_max" => self.header_name_bytes_max = value.min(255),
            "headers_bytes_max" => self.headers_bytes_max = value.min(65_536),
            "content_type_bytes_max" => self.content_type_bytes_max = value.min(255),
            "message_bytes_max" => self.message_bytes_max = value,
            _ => return false,
        }
        true
    }

    /// Checks a message before it is enqueued. `traceparent` and `tracestate` move from its headers
    /// into its trace context; a message that has none then gets that of the current span, where
    /// the feature `otel` is on. To check a message again changes nothing.
    ///
    /// # Errors
    /// The first broken limit by name: `trace`, `topic`, `key`, `kind`, `headers_max`,
    /// `header_name`, `header_reserved`, `header_twice`, `header_value`, `headers_bytes_max`,
    /// `content_type`, `message_bytes_max`.
    pub fn check(&self, message: &mut NewMessage) -> Result<(), LimitError> {
        message.settle_trace()?;
        self.check_topic(&message.topic)?;
        if let Some(key) = &message.key {
            self.check_text("key", key, self.key_bytes_max)?;
        }
        self.check_text("kind", &message.kind, self.kind_bytes_max)?;
        let header_bytes = self.check_headers(message)?;
        if let Some(content_type) = &message.content_type {
            check_printable("content_type", content_type, self.content_type_bytes_max)?;
        }
        let bytes = message.key.as_ref().map_or(0, String::len) + header_bytes + message.payload.len();
        if bytes > self.message_bytes_max {
            return broken(
                "message_bytes_max",
                format!("key, headers and payload have {bytes} bytes, at most {} are allowed", self.message_bytes_max),
            );
        }
        Ok(())
    }

    pub(crate) fn check_topic(&self, topic: &str) -> Result<(), LimitError> {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
        if topic.is_empty() || topic.len() > self.topic_length_max || !topic.bytes().all(allowed) {
            let max = self.topic_length_max;
            return broken("topic", format!("a topic has 1 to {max} characters of A-Z, a-z, 0-9, `.`, `_`, `-`"));
        }
        if topic == "." || topic == ".." {
            return broken("topic", "a topic is not `.` or `..`".to_owned());
        }
        Ok(())
    }

    fn check_text(&self, limit: &'static str, text: &str, max: usize) -> Result<(), LimitError> {
        if text.is_empty() || text.len() > max {
            return broken(limit, format!("has {} bytes, 1 to {max} are allowed", text.len()));
        }
        if text.contains('\0') {
            return broken(limit, "contains NUL".to_owned());
        }
        Ok(())
    }

    fn check_headers(&self, message: &NewMessage) -> Result<usize, LimitError> {
        if message.headers.len() > self.headers_max {
            let (has, max) = (message.headers.len(), self.headers_max);
            return broken("headers_max", format!("{has} headers, at most {max} are allowed"));
        }
        let mut bytes = 0;
        for (index, (name, value)) in message.headers.iter().enumerate() {
            self.check_text("header_name", name, self.header_name_bytes_max)?;
            if is_reserved(name) {
                return broken("header_reserved", format!("the header name `{name}` is reserved"));
            }
            if message.headers[..index].iter().any(|(other, _)| other.eq_ignore_ascii_case(name)) {
                return broken("header_twice", format!("the header `{name}` is given twice"));
            }
            if value.contains('\0') {
                return broken("header_value", format!("the value of header `{name}` contains NUL"));
            }
            bytes += name.len() + value.len();
        }
        if bytes > self.headers_bytes_max {
            let max = self.headers_bytes_max;
            return broken("headers_bytes_max", format!("headers have {bytes} bytes, at most {max} are allowed"));
        }
        Ok(bytes)
    }
}

/// Checks for printable ASCII of 1 to `max` bytes, for content types and sources.
pub(crate) fn check_printable(limit: &'static str, text: &str, max: usize) -> Result<(), LimitError> {
    if text.is_empty() || text.len() > max || !text.bytes().all(|byte| (0x20..=0x7e).contains(&byte)) {
        return broken(limit, format!("1 to {max} bytes of printable ASCII are allowed"));
    }
    Ok(())
}

/// Whether oncebox, CloudEvents or a broker uses this header name itself, in any case of letters.
pub(crate) fn is_reserved(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    name.starts_with("ce_")
        || name.starts_with("cloudevents")
        || name.starts_with("oncebox-")
        || BROKER_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
        || BROKER_NAMES.contains(&name.as_str())
        || matches!(name.as_str(), "content-type" | "cc" | "bcc")
}

/// Headers that RabbitMQ and its plugins (federation, shovel, interceptors of incoming messages)
/// write or read. Two copies of one message that took different ways differ in these headers. Any
/// other name with `x-` is the application's.
const BROKER_NAMES: [&str; 10] = [
    "x-death",
    "x-delivery-count",
    "x-acquired-count",
    "x-match",
    "x-priority",
    "x-received-from",
    "x-original-exchange",
    "x-original-routing-key",
    "x-routed-by",
    "timestamp_in_ms",
];
const BROKER_PREFIXES: [&str; 5] = ["x-first-death-", "x-last-death-", "x-opt-", "x-stream-", "x-shovelled"];

fn broken<T>(limit: impl Into<Cow<'static, str>>, detail: String) -> Result<T, LimitError> {
    Err(LimitError::new(limit, detail))
}
