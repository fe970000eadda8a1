//! The CloudEvents envelope of a log: which headers a message is stored with, under the names that
//! Kafka's binding uses, and how a message is read back from them.
//!
//! Promise: what [`headers`] writes, [`arrive`] reads back unchanged. Headers of other producers
//! are kept as they are and cause no error.
//!
//! Not here: AMQP properties (see their adapter).

use chrono::{DateTime, Utc};

use crate::message::wire::{self, CONTENT_TYPE, KAFKA, SPEC_VERSION, TRACEPARENT, TRACESTATE};
use crate::message::{Arrived, Coordinates, OutgoingMessage};

/// The headers of a message, envelope first.
pub fn headers(message: &OutgoingMessage, source: &str) -> Vec<(String, String)> {
    let (id, time) = (message.id.to_string(), wire::format_time(message.created_at));
    each(message, source, &id, &time).map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// The same headers borrowed: `id` and `time` are the message's own as text.
pub(super) fn each<'a>(
    message: &'a OutgoingMessage,
    source: &'a str,
    id: &'a str,
    time: &'a str,
) -> impl Iterator<Item = (&'a str, &'a str)> {
    let trace = message.trace.as_ref();
    let envelope = [
        (KAFKA.spec_version, Some(SPEC_VERSION)),
        (KAFKA.id, Some(id)),
        (KAFKA.source, Some(source)),
        (KAFKA.kind, Some(message.kind.as_str())),
        (KAFKA.time, Some(time)),
        (CONTENT_TYPE, Some(message.content_type.as_str())),
        (KAFKA.partition_key, message.key.as_deref()),
        (TRACEPARENT, trace.map(|trace| trace.traceparent.as_str())),
        (TRACESTATE, trace.and_then(|trace| trace.tracestate.as_deref())),
    ];
    let own = message.headers.iter().map(|(name, value)| (name.as_str(), value.as_str()));
    envelope.into_iter().filter_map(|(name, value)| Some((name, value?))).chain(own)
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
