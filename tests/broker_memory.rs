//! The broker in memory: the conformance suite, and its switches.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use oncebox::BrokerError;
use oncebox::broker::{Broker, Event, Publisher, Receipt, Refusal, Settled, Subscription, TopicState};
use oncebox::message::OutgoingMessage;
use oncebox_testkit::broker::{Capabilities, Fixture};
use oncebox_testkit::memory::{Fault, MemoryBroker, matching};
use uuid::Uuid;

struct Memory {
    broker: MemoryBroker,
}

#[async_trait]
impl Fixture for Memory {
    fn capabilities(&self) -> Capabilities {
        Capabilities { patience: Duration::from_secs(90), ..Capabilities::log() }
    }

    async fn broker(&self) -> Arc<dyn Broker> {
        Arc::new(self.broker.clone())
    }
}

async fn fixture(_case: &str) -> Option<Memory> {
    let broker = MemoryBroker::new();
    broker.faults().topics_must_exist(true);
    Some(Memory { broker })
}

oncebox_testkit::broker_conformance!(fixture);

fn message(key: Option<&str>, payload: &str) -> OutgoingMessage {
    OutgoingMessage {
        id: Uuid::now_v7(),
        topic: "t".to_owned(),
        key: key.map(str::to_owned),
        kind: "k".to_owned(),
        headers: Vec::new(),
        payload: payload.as_bytes().to_vec(),
        content_type: "text/plain".to_owned(),
        trace: None,
        created_at: chrono::Utc::now(),
    }
}

fn messages(key: &str, count: usize) -> Vec<OutgoingMessage> {
    (0..count).map(|n| message(Some(key), &n.to_string())).collect()
}

/// Sends rows and takes outcomes until there are no more, or the session ends.
async fn send(publisher: &mut dyn Publisher, rows: Vec<OutgoingMessage>) -> (Vec<Settled>, Option<BrokerError>) {
    publisher.send((0..).zip(rows).collect()).await.unwrap();
    let mut settled = Vec::new();
    loop {
        let before = settled.len();
        match publisher.settle(&mut settled).await {
            Ok(()) if settled.len() == before => return (settled, None),
            Ok(()) => {}
            Err(error) => return (settled, Some(error)),
        }
    }
}

async fn payloads(broker: &MemoryBroker) -> Vec<String> {
    let all = broker.read_all("t").await.unwrap();
    all.into_iter().map(|arrived| String::from_utf8(arrived.payload.unwrap()).unwrap()).collect()
}

#[tokio::test]
async fn a_refusal_meets_the_nth_row_and_takes_the_rest_of_its_key_with_it() {
    let broker = MemoryBroker::with_partitions(1);
    broker.faults().on_publish(Fault::RefuseMessage("too large".into()), matching::nth(2));
    let mut publisher = broker.publisher().await.unwrap();
    let rows = vec![message(Some("a"), "1"), message(Some("a"), "2"), message(Some("b"), "3"), message(Some("a"), "4")];
    let (settled, _) = send(publisher.as_mut(), rows).await;
    assert!(matches!(settled[0].outcome, Ok(Receipt::Offset { offset: 0, .. })));
    assert_eq!(settled[1].outcome, Err(Refusal::Message("too large".into())));
    assert!(settled[2].outcome.is_ok());
    assert!(matches!(settled[3].outcome, Err(Refusal::Behind(_))));
    assert_eq!(payloads(&broker).await, ["1", "3"]);

    // As Kafka does it, once that is switched on.
    let faults = broker.faults();
    faults.clear_on_publish();
    faults.accept_after_refusal(true);
    faults.on_publish(Fault::RefuseDestination("denied".into()), matching::nth(1));
    let mut publisher = broker.publisher().await.unwrap();
    let (settled, _) = send(publisher.as_mut(), messages("c", 2)).await;
    assert_eq!(settled[0].outcome, Err(Refusal::Destination("denied".into())));
    assert!(settled[1].outcome.is_ok());
}

#[tokio::test]
async fn a_session_breaks_before_or_after_a_row_and_takes_nothing_more() {
    for (fault, kept) in [(Fault::BreakBefore, 2), (Fault::BreakAfter, 3)] {
        let broker = MemoryBroker::new();
        broker.faults().on_publish(fault, matching::nth(3));
        let mut publisher = broker.publisher().await.unwrap();
        let (settled, error) = send(publisher.as_mut(), messages("a", 5)).await;
        assert_eq!(settled.len(), 2, "the outcome of the third is unknown");
        assert!(matches!(error, Some(BrokerError::Session(_))));
        assert_eq!(payloads(&broker).await.len(), kept);
        let mut next = broker.publisher().await.unwrap();
        assert_eq!(send(next.as_mut(), messages("b", 3)).await.0.len(), 3, "the next session stands");
    }
}

#[tokio::test]
async fn a_row_is_appended_twice_as_often_as_the_switch_says() {
    let broker = MemoryBroker::new();
    broker.faults().on_publish(Fault::AppendTwice, matching::times(2, matching::every(2)));
    let mut publisher = broker.publisher().await.unwrap();
    let (settled, _) = send(publisher.as_mut(), messages("a", 6)).await;
    assert_eq!(settled.len(), 6);
    assert_eq!(payloads(&broker).await, ["0", "1", "1", "2", "3", "3", "4", "5"]);
}

#[tokio::test]
async fn a_blocked_broker_says_so_and_takes_the_rows_once_it_is_not() {
    let broker = MemoryBroker::new();
    broker.faults().block(Some("memory alarm"));
    let mut publisher = broker.publisher().await.unwrap();
    publisher.send((0..).zip(messages("a", 3)).collect()).await.unwrap();
    assert_eq!(publisher.blocked().as_deref(), Some("memory alarm"));
    let mut settled = Vec::new();
    tokio::select! {
        biased;
        _ = publisher.settle(&mut settled) => panic!("nothing settles while the broker is blocked"),
        () = tokio::task::yield_now() => {}
    }
    let faults = broker.faults();
    let unblock = tokio::spawn(async move { faults.block(None) });
    publisher.settle(&mut settled).await.unwrap();
    unblock.await.unwrap();
    assert_eq!((settled.len(), publisher.blocked()), (3, None));
}

#[tokio::test]
async fn receipts_can_be_held_while_rows_are_appended() {
    let broker = MemoryBroker::new();
    broker.faults().hold_receipts(true);
    let mut publisher = broker.publisher().await.unwrap();
    publisher.send((0..).zip(messages("a", 3)).collect()).await.unwrap();
    assert_eq!(payloads(&broker).await.len(), 3);
    let mut settled = Vec::new();
    assert!(futures_util::FutureExt::now_or_never(publisher.settle(&mut settled)).is_none(), "receipts are held");
    let faults = broker.faults();
    let release = tokio::spawn(async move { faults.hold_receipts(false) });
    publisher.settle(&mut settled).await.unwrap();
    release.await.unwrap();
    assert_eq!(settled.len(), 3);
}

#[tokio::test]
async fn a_broker_that_is_away_ends_sessions_and_opens_none() {
    let broker = MemoryBroker::new();
    let mut publisher = broker.publisher().await.unwrap();
    let mut subscriber = broker.subscriber(&Subscription::new("c", vec!["t".into()])).await.unwrap();
    broker.faults().away(Some("no route"));
    assert!(matches!(publisher.topic("t").await, Err(BrokerError::Unavailable(_))));
    assert!(matches!(subscriber.next().await, Err(BrokerError::Unavailable(_))));
    assert!(matches!(broker.publisher().await, Err(BrokerError::Unavailable(_))));
    let again = Subscription::new("c", vec!["t".into()]);
    assert!(matches!(broker.subscriber(&again).await, Err(BrokerError::Unavailable(_))));
    broker.faults().away(None);
    assert!(matches!(publisher.topic("t").await, Err(BrokerError::Session(_))), "the old session stays ended");
    broker.publisher().await.unwrap();
}

#[tokio::test]
async fn a_topic_can_go_missing_and_come_back() {
    let broker = MemoryBroker::new();
    let mut publisher = broker.publisher().await.unwrap();
    assert_eq!(publisher.topic("t").await.unwrap(), TopicState::Ready);
    broker.faults().missing_topic("t", true);
    assert!(matches!(publisher.topic("t").await.unwrap(), TopicState::NotReady(_)));
    let (settled, _) = send(publisher.as_mut(), messages("a", 1)).await;
    assert!(matches!(settled[0].outcome, Err(Refusal::Destination(_))));
    broker.faults().missing_topic("t", false);
    assert_eq!(publisher.topic("t").await.unwrap(), TopicState::Ready);
}

#[tokio::test]
async fn lost_acknowledgements_and_expired_leases_bring_rows_again() {
    let broker = MemoryBroker::with_partitions(1);
    for n in 0..4 {
        broker.append("t", Some(b"k"), &[], Some(n.to_string().as_bytes()));
    }
    let mut subscriber = broker.subscriber(&Subscription::new("c", vec!["t".into()])).await.unwrap();
    let mut sequences = Vec::new();
    let mut lost = 0;
    for acknowledged in [1, 3] {
        // The acknowledgement of the first two rows is lost, that of all four arrives.
        broker.faults().lose_acknowledgements(acknowledged == 1);
        loop {
            match subscriber.next().await.unwrap() {
                Event::Assigned(_) => {}
                Event::Revoked { lost: true, .. } => lost += 1,
                Event::Revoked { .. } => panic!("nobody else is there"),
                Event::Deliveries(deliveries) => {
                    sequences.extend(deliveries.iter().map(|delivery| delivery.sequence));
                    subscriber.acknowledge(&deliveries[0].source, acknowledged).await.unwrap();
                    break;
                }
            }
        }
        broker.faults().expire_leases("c");
    }
    assert_eq!(sequences, [0, 1, 2, 3, 0, 1, 2, 3]);
    assert_eq!(lost, 1);
    assert_eq!(broker.committed("c", "t", 0), 4);
}

#[tokio::test]
async fn g9_an_acknowledgement_after_the_lease_was_lost_changes_nothing() {
    let broker = MemoryBroker::with_partitions(1);
    broker.append("t", Some(b"k"), &[], Some(b"1"));
    let mut subscriber = broker.subscriber(&Subscription::new("c", vec!["t".into()])).await.unwrap();
    let source = loop {
        if let Event::Deliveries(deliveries) = subscriber.next().await.unwrap() {
            break deliveries[0].source.clone();
        }
    };
    broker.faults().expire_leases("c");
    subscriber.acknowledge(&source, 0).await.unwrap();
    assert_eq!(broker.committed("c", "t", 0), 0);
}

#[tokio::test]
async fn messages_of_others_stand_as_they_were_appended() {
    let broker = MemoryBroker::new();
    let (partition, offset) = broker.append("t", None, &[("event-id", b"e-1"), ("raw", &[0xff])], None);
    let all = broker.read_all("t").await.unwrap();
    assert_eq!((all[0].coordinates.partition, all[0].coordinates.offset), (partition, offset));
    assert_eq!((&all[0].id, &all[0].key, &all[0].payload), (&None, &None, &None));
    assert_eq!(all[0].headers[1], ("raw".to_owned(), vec![0xff]));
    assert!(all[0].time.is_some(), "the broker's own time");
}
