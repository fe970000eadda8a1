//! Cases of the wire: bytes, envelope and headers arrive as sent, under the binding's names.
//!
//! Shown to fail on adapters that turn a missing key into an empty one, write a partition key
//! without a key, or keep only some of the headers.

use std::collections::BTreeMap;

use chrono::{DateTime, SecondsFormat};

use super::Fixture;
use super::harness::{Case, assert_exactly, assert_order, row, rows};
use oncebox::message::{Arrived, IdRule, Message, MessageId, OutgoingMessage, TraceContext, content_hash};

/// Messages whose parts are as small or as large as allowed.
fn edges(topic: &str) -> Vec<OutgoingMessage> {
    let base = || row(topic, Some("acc-7"), 0);
    let trace = TraceContext {
        traceparent: "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".to_owned(),
        tracestate: Some("vendor=1,other=2".to_owned()),
    };
    let header = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    vec![
        OutgoingMessage { payload: Vec::new(), ..base() },
        OutgoingMessage { payload: vec![0], ..base() },
        OutgoingMessage {
            payload: (0..=255).cycle().take(200_000).collect(),
            content_type: "application/octet-stream".to_owned(),
            ..base()
        },
        OutgoingMessage { key: None, ..base() },
        OutgoingMessage { key: None, payload: Vec::new(), ..base() },
        OutgoingMessage { key: Some("Schlüssel / ключ ✓".to_owned()), ..base() },
        OutgoingMessage { key: Some("k".repeat(1_024)), ..base() },
        OutgoingMessage { kind: "k".repeat(255), ..base() },
        OutgoingMessage { kind: "ä ✓".to_owned(), ..base() },
        OutgoingMessage { content_type: "application/vnd.x+json; charset=utf-8".to_owned(), ..base() },
        OutgoingMessage { trace: Some(trace.clone()), ..base() },
        OutgoingMessage { trace: Some(TraceContext { tracestate: None, ..trace }), ..base() },
        OutgoingMessage {
            headers: vec![header("tenant", "t1"), header("Empty", ""), header("unicode", "grüße ✓ \"quoted\" \\")],
            ..base()
        },
        OutgoingMessage {
            headers: (0..64).map(|n| header(&format!("header-{n:03}"), &"v".repeat(900))).collect(),
            ..base()
        },
    ]
}

async fn exchange(case: &Case<'_>, label: &str) -> Vec<(OutgoingMessage, Arrived)> {
    let (topic, subscription) = case.topic(label).await;
    let mut sent: BTreeMap<String, OutgoingMessage> =
        edges(&topic).into_iter().map(|message| (message.id.to_string(), message)).collect();
    case.publish(sent.values().cloned().collect()).await;
    let mut reader = case.reader(&subscription).await;
    while reader.got.len() < sent.len() {
        let event = reader.next().await;
        reader.take(event, true).await;
    }
    let arrived: Vec<Arrived> = reader.got.drain(..).map(|delivery| delivery.arrived).collect();
    reader.close().await;
    let mut pairs = Vec::new();
    for arrived in arrived {
        let id = arrived.id.clone().expect("every message has its id");
        let message = sent.remove(&id).expect("a message that was sent, once");
        pairs.push((message, arrived));
    }
    assert!(sent.is_empty());
    pairs
}

/// Payload bytes, key, kind, id, source, time, content type, trace and headers arrive as they were
/// sent, at the limits of what is allowed.
pub async fn a_message_arrives_as_it_was_sent(fixture: &dyn Fixture) {
    let case = Case::new(fixture).await;
    for (sent, arrived) in exchange(&case, "edges").await {
        let id = sent.id;
        assert_eq!(arrived.topic, sent.topic, "{id}");
        assert_eq!(arrived.key, sent.key.clone().map(String::into_bytes), "{id}: a missing key stays missing");
        assert_eq!(arrived.payload.as_ref(), Some(&sent.payload), "{id}: payload bytes are never touched");
        assert_eq!(arrived.kind.as_deref(), Some(sent.kind.as_str()), "{id}");
        assert_eq!(arrived.source.as_deref(), Some("oncebox"), "{id}");
        assert_eq!(arrived.time, Some(sent.created_at), "{id}");
        assert_eq!(arrived.content_type.as_deref(), Some(sent.content_type.as_str()), "{id}");

        let (message, unusable) = Message::identify(arrived, &IdRule::Envelope, "", false);
        assert_eq!(unusable, None, "{id}");
        assert_eq!(message.id, MessageId::from(id));
        assert_eq!(message.trace, sent.trace, "{id}");
        let mut headers = message.headers.clone();
        let mut expected: Vec<(String, Vec<u8>)> =
            sent.headers.iter().map(|(name, value)| (name.clone(), value.clone().into_bytes())).collect();
        headers.sort_unstable();
        expected.sort_unstable();
        assert_eq!(headers, expected, "{id}");
        let hash = content_hash(
            &sent.topic,
            sent.key.as_deref().map(str::as_bytes),
            &sent.kind,
            Some(&sent.content_type),
            &sent.payload,
            sent.headers.iter().map(|(name, value)| (name.as_str(), value.as_bytes())),
        );
        assert_eq!(message.content_hash(), hash, "{id}: the content hash is that of what was sent (G7)");
    }
}

/// A consumer without oncebox finds the CloudEvents envelope under the names of the binding.
pub async fn the_envelope_stands_under_its_names_on_the_wire(fixture: &dyn Fixture) {
    let case = Case::new(fixture).await;
    for (sent, arrived) in exchange(&case, "envelope").await {
        let text = |name: &str| {
            let found = arrived.headers.iter().filter(|(other, _)| other == name).collect::<Vec<_>>();
            assert!(found.len() <= 1, "header `{name}` stands there {} times", found.len());
            found.first().map(|(_, value)| String::from_utf8(value.clone()).expect("text"))
        };
        let of_envelope = |name: &str| text(&format!("{}{name}", case.can.envelope));
        assert_eq!(of_envelope("specversion").as_deref(), Some("1.0"));
        assert_eq!(of_envelope("id"), Some(sent.id.to_string()));
        assert_eq!(of_envelope("type").as_ref(), Some(&sent.kind));
        assert_eq!(of_envelope("source").as_deref(), Some("oncebox"));
        assert_eq!(of_envelope("partitionkey"), sent.key);
        let time = of_envelope("time").expect("a time");
        assert_eq!(DateTime::parse_from_rfc3339(&time).expect("a time of RFC 3339"), sent.created_at);
        assert_eq!(time, sent.created_at.to_rfc3339_opts(SecondsFormat::Micros, true));
        let trace = sent.trace.as_ref();
        assert_eq!(text("traceparent").as_ref(), trace.map(|trace| &trace.traceparent));
        assert_eq!(text("tracestate").as_ref(), trace.and_then(|trace| trace.tracestate.as_ref()));
        let hashed = || sent.key.clone().unwrap_or_else(|| sent.id.to_string());
        assert_eq!(text("oncebox-hash"), case.can.hash_header.then(hashed), "R20");
    }
}

/// `read_all` needs no group, returns what was published after the tap, and takes nothing away.
pub async fn read_all_gives_everything_that_was_published_since_the_tap(fixture: &dyn Fixture) {
    let case = Case::new(fixture).await;
    let (topic, subscription) = case.topic("tap").await;
    case.within("the tap", case.broker.tap(&topic)).await.expect("a tap");
    case.publish(rows(&topic, 5, 0, 300)).await;
    case.within("everything to be read", async {
        loop {
            let all = case.broker.read_all(&topic).await.expect("everything");
            if all.len() >= 300 {
                assert_exactly(&all, 0..300);
                assert_order(&all);
                break;
            }
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    })
    .await;
    // Reading all messages removed none.
    let mut reader = case.reader(&subscription).await;
    reader.read(300, true).await;
    reader.close().await;
}
