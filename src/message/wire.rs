//! CloudEvents 1.0, binary mode: the names of headers and properties, once.
//!
//! Sources: CloudEvents specification 1.0.2; its Kafka protocol binding 3.2 (`ce_` headers); its
//! AMQP binding (`cloudEvents_` prefix), here as AMQP 0.9.1 headers.

use chrono::{DateTime, SecondsFormat, Utc};

/// The value of `specversion`.
pub const SPEC_VERSION: &str = "1.0";
/// Content type on Kafka.
pub const CONTENT_TYPE: &str = "content-type";
/// The header with the W3C trace context: trace id, parent span and flags.
pub const TRACEPARENT: &str = "traceparent";
/// W3C trace context, vendor state.
pub const TRACESTATE: &str = "tracestate";
/// What hash exchanges use: the key, else the message id.
pub const ONCEBOX_HASH: &str = "oncebox-hash";

/// Header names of one binding.
#[derive(Debug, Clone, Copy)]
pub struct Names {
    /// The header that carries the message id.
    pub id: &'static str,
    /// The header that carries the kind of the message (`type` in CloudEvents).
    pub kind: &'static str,
    /// The header that names who published the message.
    pub source: &'static str,
    /// When it was enqueued.
    pub time: &'static str,
    /// The version of CloudEvents.
    pub spec_version: &'static str,
    /// The header that carries the key of the message.
    pub partition_key: &'static str,
}

/// Kafka, and the embedded broker, which keeps what Kafka would.
pub const KAFKA: Names = Names {
    id: "ce_id",
    kind: "ce_type",
    source: "ce_source",
    time: "ce_time",
    spec_version: "ce_specversion",
    partition_key: "ce_partitionkey",
};

/// Names of the headers on RabbitMQ, as AMQP 0.9.1 has them.
pub const AMQP: Names = Names {
    id: "cloudEvents_id",
    kind: "cloudEvents_type",
    source: "cloudEvents_source",
    time: "cloudEvents_time",
    spec_version: "cloudEvents_specversion",
    partition_key: "cloudEvents_partitionkey",
};

/// A time as it stands on the wire: RFC 3339, microseconds, UTC.
#[must_use]
pub fn format_time(time: DateTime<Utc>) -> String {
    time.to_rfc3339_opts(SecondsFormat::Micros, true)
}

/// A time from the wire, or nothing.
#[must_use]
pub fn parse_time(text: &str) -> Option<DateTime<Utc>> {
    DateTime::parse_from_rfc3339(text).ok().map(|time| time.with_timezone(&Utc))
}

/// True for headers that are envelope, not the application's: they are left out of
/// [`super::Message::headers`].
#[must_use]
pub fn is_envelope(name: &str) -> bool {
    super::limits::is_reserved(name) || name.eq_ignore_ascii_case(TRACEPARENT) || name.eq_ignore_ascii_case(TRACESTATE)
}
