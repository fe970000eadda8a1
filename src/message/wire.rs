//! CloudEvents 1.0 in binary mode. Promise: this is the only place with the names of its headers.
//! Not here: writing and reading them (`broker`).
//!
//! Sources: CloudEvents specification 1.0.2; its Kafka protocol binding 3.2 (`ce_` headers); its
//! AMQP binding (`cloudEvents_` prefix), here as AMQP 0.9.1 headers.

use chrono::{DateTime, Datelike, SecondsFormat, Timelike, Utc};

pub(crate) const SPEC_VERSION: &str = "1.0";
pub(crate) const CONTENT_TYPE: &str = "content-type";
pub(crate) const TRACEPARENT: &str = "traceparent";
pub(crate) const TRACESTATE: &str = "tracestate";
/// What hash exchanges route by: the key, or the message id if there is no key.
pub(crate) const ONCEBOX_HASH: &str = "oncebox-hash";

/// The header names of the envelope in one protocol binding.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Names {
    pub(crate) id: &'static str,
    /// The kind of the message.
    pub(crate) kind: &'static str,
    /// Who has published the message.
    pub(crate) source: &'static str,
    /// When the message was enqueued.
    pub(crate) time: &'static str,
    pub(crate) spec_version: &'static str,
    /// The key of the message.
    pub(crate) partition_key: &'static str,
}

/// The names on Kafka, and on the embedded broker, which uses the same.
pub(crate) const KAFKA: Names = Names {
    id: "ce_id",
    kind: "ce_type",
    source: "ce_source",
    time: "ce_time",
    spec_version: "ce_specversion",
    partition_key: "ce_partitionkey",
};

/// The names on RabbitMQ, as headers of AMQP 0.9.1.
pub(crate) const AMQP: Names = Names {
    id: "cloudEvents_id",
    kind: "cloudEvents_type",
    source: "cloudEvents_source",
    time: "cloudEvents_time",
    spec_version: "cloudEvents_specversion",
    partition_key: "cloudEvents_partitionkey",
};

/// The text of a time in a header: RFC 3339, microseconds, UTC.
#[must_use]
pub(crate) fn format_time(time: DateTime<Utc>) -> String {
    // A `DateTime` computes its local time anew for each part that is read.
    let at = time.naive_utc();
    let (year, micros) = (at.year(), at.nanosecond() / 1_000);
    // A year without four digits, or a leap second.
    if !(1_000..10_000).contains(&year) || micros >= 1_000_000 {
        return time.to_rfc3339_opts(SecondsFormat::Micros, true);
    }
    // Writes digit by digit, from the last one of each part. That takes a tenth of the time of
    // chrono's formatter, and each message has such a text.
    let mut text = *b"0000-00-00T00:00:00.000000Z";
    let date = [(3, year.unsigned_abs()), (6, at.month()), (9, at.day())];
    let clock = [(12, at.hour()), (15, at.minute()), (18, at.second()), (25, micros)];
    for (last, mut number) in date.into_iter().chain(clock) {
        for digit in text[..=last].iter_mut().rev().take_while(|digit| **digit == b'0') {
            *digit = b'0' + (number % 10) as u8;
            number /= 10;
        }
    }
    String::from_utf8_lossy(&text).into_owned()
}

/// Reads a time from a header; `None` if it is not RFC 3339.
#[must_use]
pub(crate) fn parse_time(text: &str) -> Option<DateTime<Utc>> {
    DateTime::parse_from_rfc3339(text).ok().map(|time| time.with_timezone(&Utc))
}

/// Whether a header belongs to the envelope and not to the application. Such headers are left out
/// of [`super::Message::headers`].
pub(crate) fn is_envelope(name: &str) -> bool {
    super::limits::is_reserved(name) || name.eq_ignore_ascii_case(TRACEPARENT) || name.eq_ignore_ascii_case(TRACESTATE)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_time_is_written_as_chrono_does(micros in -70_000_000_000_000_000_i64..250_000_000_000_000_000) {
            let time = DateTime::from_timestamp_micros(micros).unwrap();
            prop_assert_eq!(format_time(time), time.to_rfc3339_opts(SecondsFormat::Micros, true));
        }
    }
}
