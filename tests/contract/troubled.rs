//! The broker in memory, whose client has troubles that no switch of the broker makes.

use std::sync::atomic::{AtomicU32, Ordering};

use async_trait::async_trait;
use oncebox::BrokerError;
use oncebox::broker::{Broker, Publisher, Subscriber, Subscription};
use oncebox::observe::Finding;
use oncebox_testkit::memory::MemoryBroker;
use tokio::sync::Semaphore;

/// What becomes of an order to create the topic `stuck`, alone or among others.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Creation {
    Works,
    Fails,
    Hangs,
}

#[derive(Debug)]
pub(crate) struct Troubled {
    pub(crate) broker: MemoryBroker,
    /// How many sessions were asked for, those of trials too.
    pub(crate) sessions: AtomicU32,
    /// Each session takes a permit, and waits for it.
    pub(crate) gate: Semaphore,
    /// What the client says to the session of this number, from 0; it may panic.
    pub(crate) opening: fn(u32) -> Result<(), BrokerError>,
    pub(crate) creation: Creation,
}

impl Troubled {
    /// A client that has no troubles yet.
    pub(crate) fn new(broker: &MemoryBroker) -> Self {
        Self {
            broker: broker.clone(),
            sessions: AtomicU32::new(0),
            gate: Semaphore::new(Semaphore::MAX_PERMITS),
            opening: |_| Ok(()),
            creation: Creation::Works,
        }
    }

    pub(crate) fn asked_for(&self) -> u32 {
        self.sessions.load(Ordering::SeqCst)
    }
}

#[async_trait]
impl Broker for Troubled {
    fn name(&self) -> &'static str {
        "memory"
    }

    async fn publisher(&self) -> Result<Box<dyn Publisher>, BrokerError> {
        (self.opening)(self.sessions.fetch_add(1, Ordering::SeqCst))?;
        self.gate.acquire().await.unwrap().forget();
        self.broker.publisher().await
    }

    async fn subscriber(&self, subscription: &Subscription) -> Result<Box<dyn Subscriber>, BrokerError> {
        self.broker.subscriber(subscription).await
    }

    async fn check(&self, subscriptions: &[Subscription]) -> Result<Vec<Finding>, BrokerError> {
        self.broker.check(subscriptions).await
    }

    async fn declare(&self, topics: &[String]) -> Result<(), BrokerError> {
        if topics.iter().any(|topic| topic == "stuck") {
            match self.creation {
                Creation::Works => {}
                Creation::Fails => return Err(BrokerError::Unavailable("no room for topics".to_owned())),
                Creation::Hangs => std::future::pending::<()>().await,
            }
        }
        self.broker.declare(topics).await
    }
}
