//! A broker in memory, for tests of code that uses a broker: a log with a switch for each fault.
//!
//! Guarantees: it is deterministic (nothing random; the time of day only stamps records). It does
//! what the conformance suite asks of every broker: order per key, offsets without holes, groups
//! with fenced offsets, redelivery of what was not acknowledged. Every fault is a switch in
//! [`Faults`]; without one nothing fails.
//!
//! Not here: durability, other processes.
//!
//! ```
//! # async fn run() -> Result<(), oncebox::BrokerError> {
//! use oncebox::broker::Broker;
//! use oncebox_testkit::memory::{Fault, MemoryBroker, matching};
//!
//! let broker = MemoryBroker::new();
//! broker.faults().on_publish(Fault::RefuseMessage("too large".into()), matching::nth(3));
//! let publisher = broker.publisher().await?;
//! # drop(publisher);
//! # Ok(())
//! # }
//! ```

mod groups;
pub mod matching;
mod publisher;
mod state;
mod subscriber;
mod topics;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use async_trait::async_trait;

use self::publisher::MemoryPublisher;
use self::state::BrokerState;
pub use self::state::faults::{Fault, Faults};
use self::subscriber::MemorySubscriber;
use self::topics::Record;
use oncebox::TopicRetention;
use oncebox::broker::{Broker, Publisher, Subscriber, Subscription};
use oncebox::error::BrokerError;
use oncebox::message::Arrived;
use oncebox::observe::Finding;

/// A broker in memory. A clone is a handle to the same broker.
#[derive(Debug, Clone)]
pub struct MemoryBroker {
    shared: Arc<BrokerState>,
}

impl Default for MemoryBroker {
    fn default() -> Self {
        Self::new()
    }
}

impl MemoryBroker {
    /// A broker whose topics have four partitions and are created at their first use.
    #[must_use]
    pub fn new() -> Self {
        Self::with_partitions(4)
    }

    /// A broker whose topics have this number of partitions.
    #[must_use]
    pub fn with_partitions(partitions: usize) -> Self {
        Self { shared: Arc::new(BrokerState::new(partitions.max(1))) }
    }

    /// The fault switches of this broker; all clones of the broker share them.
    #[must_use]
    pub fn faults(&self) -> Faults {
        Faults::new(Arc::clone(&self.shared))
    }

    /// Appends a message of another producer unchanged: no envelope is added, and a payload of
    /// `None` is a tombstone. Returns partition and offset.
    pub fn append(
        &self,
        topic: &str,
        key: Option<&[u8]>,
        headers: &[(&str, &[u8])],
        payload: Option<&[u8]>,
    ) -> (i32, i64) {
        let record = Record {
            key: key.map(<[u8]>::to_vec),
            headers: headers.iter().map(|(name, value)| ((*name).to_owned(), value.to_vec())).collect(),
            payload: payload.map(<[u8]>::to_vec),
            appended_at: chrono::Utc::now(),
        };
        self.shared.change(|state| {
            state.ensure_topic(topic);
            state.append(topic, key.unwrap_or_default(), record)
        })
    }

    /// How often relays asked whether this broker is blocked: at least once in each turn.
    #[must_use]
    pub fn relay_turns(&self) -> u64 {
        self.shared.turns.load(Ordering::Relaxed)
    }

    /// The next offset that a group must handle.
    #[must_use]
    pub fn committed(&self, group: &str, topic: &str, partition: i32) -> i64 {
        self.shared.look(|state| state.committed(group, topic, partition))
    }
}

#[async_trait]
impl Broker for MemoryBroker {
    fn name(&self) -> &'static str {
        "memory"
    }

    async fn publisher(&self) -> Result<Box<dyn Publisher>, BrokerError> {
        Ok(Box::new(MemoryPublisher::open(Arc::clone(&self.shared))?))
    }

    async fn subscriber(&self, subscription: &Subscription) -> Result<Box<dyn Subscriber>, BrokerError> {
        Ok(Box::new(MemorySubscriber::join(Arc::clone(&self.shared), subscription)?))
    }

    async fn retention(&self, _topics: &[String]) -> Result<Option<TopicRetention>, BrokerError> {
        self.shared.look(|state| state.faults.available().map(|()| state.faults.retention))
    }

    async fn declare(&self, topics: &[String]) -> Result<(), BrokerError> {
        self.shared.change(|state| {
            state.faults.available()?;
            topics.iter().for_each(|topic| state.ensure_topic(topic));
            Ok(())
        })
    }

    async fn check(&self, _subscriptions: &[Subscription]) -> Result<Vec<Finding>, BrokerError> {
        Ok(Vec::new())
    }

    async fn read_all(&self, topic: &str) -> Result<Vec<Arrived>, BrokerError> {
        Ok(self.shared.look(|state| state.all(topic)))
    }

    async fn remove(&self, subscriptions: &[Subscription]) -> Result<(), BrokerError> {
        self.shared.change(|state| subscriptions.iter().for_each(|subscription| state.remove(subscription)));
        Ok(())
    }
}
