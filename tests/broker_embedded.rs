//! The embedded broker against its promises: see `src/broker/embedded.rs`.
#![cfg(all(feature = "embedded", feature = "testing"))]
#![allow(clippy::unwrap_used)]

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use oncebox::broker::conformance::{Capabilities, Fixture};
use oncebox::broker::embedded::{EmbeddedBroker, EmbeddedConfig};
use oncebox::broker::{Broker, Event, Publisher, Receipt, Settled, Subscription};
use oncebox::message::OutgoingMessage;
use uuid::Uuid;

struct Embedded {
    directory: tempfile::TempDir,
}

#[async_trait]
impl Fixture for Embedded {
    fn capabilities(&self) -> Capabilities {
        Capabilities { missing_topics: false, patience: Duration::from_secs(30), ..Capabilities::log() }
    }

    async fn broker(&self) -> Arc<dyn Broker> {
        let config = EmbeddedConfig::new(self.directory.path().join("broker.db"));
        Arc::new(EmbeddedBroker::open(config).await.unwrap())
    }
}

async fn fixture(_case: &str) -> Option<Embedded> {
    Some(Embedded { directory: tempfile::tempdir().unwrap() })
}

oncebox::broker_conformance!(fixture);

fn message(topic: &str, key: Option<&str>, payload: &[u8]) -> OutgoingMessage {
    OutgoingMessage {
        id: Uuid::now_v7(),
        topic: topic.to_owned(),
        key: key.map(str::to_owned),
        kind: "test.happened".to_owned(),
        headers: vec![("tenant".to_owned(), "t1".to_owned())],
        payload: payload.to_vec(),
        content_type: "application/json".to_owned(),
        trace: None,
        created_at: chrono::Utc::now(),
    }
}

async fn publish(publisher: &mut dyn Publisher, rows: Vec<OutgoingMessage>) -> Vec<Settled> {
    let count = rows.len();
    publisher.send((0..).zip(rows).collect()).await.unwrap();
    let mut settled = Vec::new();
    while settled.len() < count {
        publisher.settle(&mut settled).await.unwrap();
    }
    settled
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_that_were_sent_are_read_once_in_order_of_their_keys_and_not_again_once_acknowledged() {
    let directory = tempfile::tempdir().unwrap();
    let broker = EmbeddedBroker::open(EmbeddedConfig::new(directory.path().join("b.db"))).await.unwrap();
    let mut publisher = broker.publisher().await.unwrap();
    let count = 20_000_usize;
    let rows = (0..count).map(|n| message("t", Some(&format!("k{}", n % 100)), n.to_string().as_bytes())).collect();
    let begun = Instant::now();
    let settled = publish(&mut *publisher, rows).await;
    eprintln!("published {:.0}/s", count as f64 / begun.elapsed().as_secs_f64());
    assert!(settled.iter().all(|settled| matches!(settled.outcome, Ok(Receipt::Offset { .. }))));
    publisher.close().await;

    let begun = Instant::now();
    let mut subscriber = broker.subscriber(&Subscription::new("c", vec!["t".into()])).await.unwrap();
    let mut last: HashMap<Vec<u8>, usize> = HashMap::new();
    let mut seen = 0;
    while seen < count {
        match tokio::time::timeout(Duration::from_secs(10), subscriber.next()).await.unwrap().unwrap() {
            Event::Deliveries(deliveries) => {
                for delivery in deliveries {
                    let n: usize = String::from_utf8(delivery.arrived.payload.unwrap()).unwrap().parse().unwrap();
                    let before = last.insert(delivery.arrived.key.unwrap(), n);
                    assert!(before.is_none_or(|before| before < n));
                    seen += 1;
                    subscriber.acknowledge(&delivery.source, delivery.sequence).await.unwrap();
                }
            }
            event => eprintln!("{event:?}"),
        }
    }
    eprintln!("consumed {:.0}/s", count as f64 / begun.elapsed().as_secs_f64());
    assert!(subscriber.caught_up().await.unwrap());
    subscriber.close().await;

    let mut again = broker.subscriber(&Subscription::new("c", vec!["t".into()])).await.unwrap();
    while !again.caught_up().await.unwrap() {
        let event = again.next().await.unwrap();
        assert!(matches!(event, Event::Assigned(_)), "{event:?}");
    }
    assert_eq!(broker.read_all("t").await.unwrap().len(), count);
}
