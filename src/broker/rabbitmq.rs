//! RabbitMQ: quorum queues behind a topic exchange, confirms and returns, one unconfirmed publish
//! per key.
//!
//! Guarantees: a row is proven by an ack **and** no return. The order of a key holds also after a
//! nack. Publishing and consuming use separate connections. Every wait for the server has a
//! deadline, except the wait for confirms: the relay bounds it while the server is not blocked.
//!
//! Not here: SQL, decisions about refusals, retries across sessions; policies of the server, which
//! an operator sets.

mod bindings;
mod check;
mod config;
mod confirms;
mod cuts;
mod error;
mod lanes;
mod publisher;
mod raw;
mod repartition;
mod socket;
mod subscriber;
mod tap;
mod topology;
mod unsettled;
mod version;
mod wire;

use std::sync::Arc;

use async_trait::async_trait;

pub use self::{config::RabbitConfig, repartition::Repartition};

use self::config::Known;
use self::cuts::Cuts;
use self::publisher::RabbitPublisher;
use self::socket::Link;
use self::subscriber::RabbitSubscriber;
use self::tap::Taps;
use self::topology::Topology;
use super::{Broker, Publisher, Subscriber, Subscription};
use crate::error::BrokerError;
use crate::message::Arrived;
use crate::observe::Finding;

/// A configured RabbitMQ. Clones share the taps, and what was learned of consumers.
#[derive(Debug, Clone)]
pub struct RabbitBroker {
    config: Arc<Known>,
    taps: Arc<Taps>,
    cuts: Arc<Cuts>,
}

impl RabbitBroker {
    /// Takes the settings; connects to nothing.
    ///
    /// # Errors
    /// [`BrokerError::Refused`] where a setting or the URL is invalid.
    pub fn new(config: RabbitConfig) -> Result<Self, BrokerError> {
        config.validate()?;
        let (taps, cuts) = (Arc::new(Taps::default()), Arc::new(Cuts::default()));
        Ok(Self { config: Known::new(config), taps, cuts })
    }

    /// Takes the next step from the queues that a consumer's topic has now to the configured number
    /// of queues, and returns what is left to do. Call it again until it returns
    /// [`Repartition::Done`]. A repeated call is safe, also after an interrupted one.
    ///
    /// # Errors
    /// [`BrokerError::Refused`] for a change from several queues to another number of several
    /// queues: they have the same names, so first change to 1. Otherwise the server's error.
    pub async fn repartition(&self, subscription: &Subscription, topic: &str) -> Result<Repartition, BrokerError> {
        let unlimited = version::ask(&self.config).await?.limits_deliveries();
        let link = Link::open(&self.config, "oncebox queues").await?;
        let mut topology = Topology::new(&link, &self.config);
        let stepped = repartition::step(subscription, topic, unlimited, &mut topology).await;
        link.close().await;
        stepped
    }
}

#[async_trait]
impl Broker for RabbitBroker {
    fn name(&self) -> &'static str {
        "rabbitmq"
    }

    fn is_log(&self) -> bool {
        false
    }

    fn places(&self, subscription: &Subscription) -> Vec<String> {
        let queues = |topic: &String| topology::queues(&self.config, &subscription.queue(topic));
        subscription.topics.iter().flat_map(queues).collect()
    }

    async fn publisher(&self) -> Result<Box<dyn Publisher>, BrokerError> {
        let opened = RabbitPublisher::open(&self.config, &self.cuts).await;
        Ok(Box::new(opened.inspect_err(|_| self.cuts.forget())?))
    }

    async fn subscriber(&self, subscription: &Subscription) -> Result<Box<dyn Subscriber>, BrokerError> {
        // Asked each time: the server may have been updated since.
        let unlimited = version::ask(&self.config).await?.limits_deliveries();
        Ok(Box::new(RabbitSubscriber::open(&self.config, subscription, unlimited).await?))
    }

    async fn declare(&self, _topics: &[String]) -> Result<(), BrokerError> {
        let link = Link::open(&self.config, "oncebox declare").await?;
        Topology::new(&link, &self.config).exchange().await?;
        link.close().await;
        Ok(())
    }

    async fn check(&self, subscriptions: &[Subscription]) -> Result<Vec<Finding>, BrokerError> {
        check::check(&self.config, &version::ask(&self.config).await?, subscriptions).await
    }

    async fn read_all(&self, topic: &str) -> Result<Vec<Arrived>, BrokerError> {
        self.taps.read(&self.config, topic).await
    }

    async fn tap(&self, topic: &str) -> Result<(), BrokerError> {
        self.taps.open(&self.config, topic).await
    }

    async fn remove(&self, subscriptions: &[Subscription]) -> Result<(), BrokerError> {
        let link = Link::open(&self.config, "oncebox remove").await?;
        let mut topology = Topology::new(&link, &self.config);
        let removed = async {
            topology.remove(subscriptions).await?;
            for tap in self.taps.forget(subscriptions).await {
                topology.delete_queue(&tap).await?;
            }
            Ok(())
        }
        .await;
        link.close().await;
        removed
    }
}
