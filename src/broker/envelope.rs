//! The CloudEvents envelope of a log: which headers a message is stored with, under the names that
//! Kafka's binding uses, and how a message is read back from them.
//!
//! Promise: what [`headers`] writes, [`arrive`] reads back unchanged. Headers of other producers
//! are kept as they are and cause no error.
//!
//! Not here: writing Kafka's own records, and AMQP properties (see their adapters).

use chrono::{DateTime, Utc};

use crate::message::wire::{self, CONTENT_TYPE, KAFKA, SPEC_VERSION, TRACEPARENT, TRACESTATE};
use crate::message::{Arrived, Coordinates, OutgoingMessage};

/// The headers of a message, envelope first.
pub fn headers(message: &OutgoingMessage, source: &str) -> Vec<(String, String)> {
    let mut headers = Vec::with_capacity(message.headers.len() + 9);
    let mut add = |name: &str, value: String| headers.push((name.to_owned(), value));
    add(KAFKA.spec_version, SPEC_VERSION.to_owned());
    add(KAFKA.id, message.id.to_string());
    add(KAFKA.kind, message.kind.clone());
    add(KAFKA.source, source.to_owned());
    add(KAFKA.time, wire::format_time(message.created_at));
    if let Some(key) = &message.key {
        add(KAFKA.partition_key, key.clone());
    }
    add(CONTENT_TYPE, message.content_type.clone());
    if let Some(trace) = &message.trace {
        add(TRACEPARENT, trace.traceparent.clone());
        if let Some(state) = &trace.tracestate {
            add(TRACESTATE, state.clone());
        }
    }
    headers.extend(message.headers.iter().cloned());
    headers
}

/// A message as it stood in a log, with the envelope taken from its headers.
pub fn arrive(
    key: Option<Vec<u8>>,
    headers: Vec<(String, Vec<u8>)>,
    payload: Option<Vec<u8>>,
    appended_at: Option<DateTime<Utc>>,
    coordinates: Coordinates,
) -> Arrived {
    let text = |name: &str| {
        let found = headers.iter().find(|(other, _)| other.eq_ignore_ascii_case(name))?;
        std::str::from_utf8(&found.1).ok().map(str::to_owned)
    };
    Arrived {
        topic: coordinates.place.clone(),
        id: text(KAFKA.id),
        kind: text(KAFKA.kind),
        source: text(KAFKA.source),
        time: text(KAFKA.time).and_then(|time| wire::parse_time(&time)).or(appended_at),
        content_type: text(CONTENT_TYPE),
        key,
        headers,
        payload,
        coordinates,
    }
}
