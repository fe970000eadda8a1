//! A relay that is stopped while its client has rows that the broker may still take.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use oncebox::broker::{Broker, Publisher, Refusal, Settled, Subscriber, Subscription, TopicState};
use oncebox::message::OutgoingMessage;
use oncebox::observe::Finding;
use oncebox::store::sqlite::SqliteStore;
use oncebox::store::{Operator, Status};
use oncebox::{BrokerError, Relay, RelayOptions};
use oncebox_testkit::memory::MemoryBroker;
use tokio_util::sync::CancellationToken;

use super::kit::{Running, SOON, relay_options, sqlite};
use super::support::eventually;

/// A broker that says nothing before the stop. Then it refuses the first row, where told, and says
/// nothing of the others. In all else it is the broker in memory.
#[derive(Debug, Clone)]
struct Late {
    broker: MemoryBroker,
    store: SqliteStore,
    refuses: bool,
    sent: Arc<AtomicUsize>,
    /// Who had the lease when the client was closed.
    owner_at_close: Arc<OnceLock<Option<String>>>,
    stop: CancellationToken,
}

struct LatePublisher {
    first: Option<u64>,
    has_refused: bool,
    broker: Late,
}

#[async_trait]
impl Publisher for LatePublisher {
    async fn topics(&mut self, topics: &[String]) -> Result<Vec<TopicState>, BrokerError> {
        Ok(vec![TopicState::Ready; topics.len()])
    }

    async fn send(&mut self, rows: Vec<(u64, OutgoingMessage)>) -> Result<(), BrokerError> {
        self.first = self.first.or(rows.first().map(|(tag, _)| *tag));
        self.broker.sent.fetch_add(rows.len(), Ordering::SeqCst);
        Ok(())
    }

    async fn settle(&mut self, settled: &mut Vec<Settled>) -> Result<(), BrokerError> {
        self.broker.stop.cancelled().await;
        // The answer takes a moment: the relay, which does not wait so long in its turns, gets it
        // when it waits for what is in flight at its stop.
        tokio::time::sleep(Duration::from_millis(100)).await;
        if let Some(tag) = self.first.filter(|_| self.broker.refuses && !self.has_refused) {
            self.has_refused = true;
            settled.push(Settled { tag, outcome: Err(Refusal::Message("too large".to_owned())) });
            return Ok(());
        }
        std::future::pending().await
    }

    async fn close(self: Box<Self>) {
        let owner = self.broker.store.status().await.unwrap().shards[0].owner.clone();
        self.broker.owner_at_close.set(owner).unwrap();
    }
}

#[async_trait]
impl Broker for Late {
    fn name(&self) -> &'static str {
        "memory"
    }

    async fn publisher(&self) -> Result<Box<dyn Publisher>, BrokerError> {
        Ok(Box::new(LatePublisher { first: None, has_refused: false, broker: self.clone() }))
    }

    async fn subscriber(&self, subscription: &Subscription) -> Result<Box<dyn Subscriber>, BrokerError> {
        self.broker.subscriber(subscription).await
    }

    async fn check(&self, subscriptions: &[Subscription]) -> Result<Vec<Finding>, BrokerError> {
        self.broker.check(subscriptions).await
    }

    async fn declare(&self, topics: &[String]) -> Result<(), BrokerError> {
        self.broker.declare(topics).await
    }
}

/// A stop while two messages of a key are in flight. Returns what the status is after it.
async fn stopped(refuses: bool, shutdown_grace: Duration) -> Status {
    let world = sqlite().await;
    let broker = Late {
        broker: world.broker.clone(),
        store: world.store.clone(),
        refuses,
        sent: Arc::default(),
        owner_at_close: Arc::default(),
        stop: CancellationToken::new(),
    };
    let options = RelayOptions { publish_stall: 10 * SOON, shutdown_grace, ..relay_options() };
    let owner = options.owner.clone();
    let relay = Relay::new(world.store.clone(), Arc::new(broker.clone()), options, world.health.clone());
    let stop = broker.stop.clone();
    let relay = Running { stop: stop.clone(), task: tokio::spawn(async move { relay.run(stop).await }) };
    // In two batches: the first one is settled when its only row is refused.
    for (count, name) in [(1, "a1"), (2, "a2")] {
        world.enqueue("t", &[name]).await;
        eventually("it is sent", SOON, || async { (broker.sent.load(Ordering::SeqCst) == count).then_some(()) }).await;
    }
    relay.end().await;
    assert_eq!(broker.owner_at_close.get(), Some(&Some(owner)), "the client ended before another relay may send");
    world.status().await
}

/// Shown by: marking at once what is known at the stop. Then a1 is held, although the client may
/// still send a2, and nobody hears that the broker took it before a1.
#[tokio::test]
async fn g3_a_stop_does_not_hold_a_message_while_the_client_has_a_later_one_of_its_key() {
    let status = stopped(true, SOON).await;
    assert_eq!((status.held, status.pending), (0, 2));
    assert_eq!(status.shards[0].owner, None, "the lease was given back");
}

/// Shown by: giving the lease back first, also where the broker has not answered within the grace.
#[tokio::test]
async fn g3_a_stop_ends_the_client_before_another_relay_may_send_what_is_in_flight() {
    let status = stopped(false, Duration::from_secs(8)).await;
    assert_eq!((status.held, status.pending), (0, 2));
    assert_eq!(status.shards[0].owner, None, "the lease was given back");
}
