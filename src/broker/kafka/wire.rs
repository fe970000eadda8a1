//! CloudEvents 1.0 in binary mode on Kafka: from an outbox row to record headers, and from a record
//! to an [`Arrived`] message.
//!
//! Promises: payload and key bytes are unchanged; an absent key is null. No record can end the
//! program.

use std::panic::{AssertUnwindSafe, catch_unwind};

use chrono::DateTime;
use rdkafka::message::{BorrowedHeaders, BorrowedMessage, Header, Headers, Message, OwnedHeaders};

use crate::broker::envelope;
use crate::message::wire::format_time;
use crate::message::{Arrived, Coordinates, OutgoingMessage};

/// The headers of a row. librdkafka allocates once per header.
pub(super) fn headers(message: &OutgoingMessage, source: &str) -> OwnedHeaders {
    let mut id = [0; uuid::fmt::Hyphenated::LENGTH];
    let (id, time) = (&*message.id.hyphenated().encode_lower(&mut id), format_time(message.created_at));
    let room = OwnedHeaders::new_with_capacity(9 + message.headers.len());
    let all = envelope::each(message, source, id, &time);
    all.fold(room, |headers, (key, value)| headers.insert(Header { key, value: Some(value) }))
}

pub(super) fn arrived(record: &BorrowedMessage<'_>) -> Arrived {
    envelope::arrive(
        record.key().map(<[u8]>::to_vec),
        record.headers().map(read_headers).unwrap_or_default(),
        record.payload().map(<[u8]>::to_vec),
        record.timestamp().to_millis().and_then(DateTime::from_timestamp_millis),
        Coordinates { place: record.topic().to_owned(), partition: record.partition(), offset: record.offset() },
    )
}

fn read_headers(headers: &BorrowedHeaders) -> Vec<(String, Vec<u8>)> {
    // rdkafka panics on a header name that is not UTF-8, which any producer can send. Such a header
    // is left out.
    let all = catch_unwind(AssertUnwindSafe(|| (0..headers.count()).map(|at| read_header(headers, at)).collect()));
    all.unwrap_or_else(|_| {
        (0..headers.count()).filter_map(|at| catch_unwind(AssertUnwindSafe(|| read_header(headers, at))).ok()).collect()
    })
}

fn read_header(headers: &BorrowedHeaders, at: usize) -> (String, Vec<u8>) {
    let header = headers.get(at);
    (header.key.to_owned(), header.value.unwrap_or_default().to_vec())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn message() -> OutgoingMessage {
        OutgoingMessage {
            id: uuid::Uuid::from_u128(7),
            headers: vec![("tenant".into(), "t1".into()), ("empty".into(), String::new())],
            created_at: DateTime::from_timestamp_micros(1_795_232_880_000_001).unwrap(),
            ..OutgoingMessage::sample("payments", Some("acc-7"))
        }
    }

    fn shown(headers: &OwnedHeaders) -> Vec<String> {
        headers
            .iter()
            .map(|header| format!("{}={}", header.key, String::from_utf8_lossy(header.value.unwrap())))
            .collect()
    }

    #[test]
    fn a_row_carries_the_cloudevents_headers() {
        let keyed = shown(&headers(&message(), "oncebox"));
        assert_eq!(
            keyed,
            [
                "ce_specversion=1.0",
                "ce_id=00000000-0000-0000-0000-000000000007",
                "ce_source=oncebox",
                "ce_type=payment.created",
                "ce_time=2026-11-21T03:48:00.000001Z",
                "content-type=application/json",
                "ce_partitionkey=acc-7",
                "traceparent=00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
                "tracestate=a=b",
                "tenant=t1",
                "empty=",
            ]
        );
        let keyless = OutgoingMessage { key: None, trace: None, headers: vec![], ..message() };
        assert_eq!(shown(&headers(&keyless, "s")).len(), 6);
    }
}
