//! RabbitMQ: quorum queues behind a topic exchange, confirms and returns, one unconfirmed publish
//! per key.
//!
//! | file | for |
//! |---|---|
//! | `config` | settings, the URL taken apart |
//! | `socket` | a connection whose socket we own (R29), TLS |
//! | `publisher`, `confirms`, `lanes` | the session, its task, whose turn it is (R20, R21) |
//! | `subscriber` | deliveries and acknowledgements (R29) |
//! | `topology`, `version` | exchange, queues, bindings (R30) |
//! | `repartition` | another number of queues, without a message out of order |
//! | `check`, `tap` | what an operator should know; reading all for demo, bench and tests |
//! | `raw` | the client library alone, for comparison in `bench` |
//! | `wire`, `error` | CloudEvents over AMQP 0.9.1; what reply codes mean |
//!
//! Guarantees: a row is published by an ack **and** no return; order per key holds through nacks;
//! publishing and consuming use connections of their own; every wait for the server has a deadline,
//! except confirms while it says that it is blocked.
//!
//! Not here: SQL, decisions on refusals, retries over sessions; policies of the server, which are
//! an operator's.

mod check;
mod config;
mod confirms;
mod error;
mod lanes;
mod publisher;
mod raw;
mod repartition;
mod socket;
mod subscriber;
mod tap;
mod topology;
mod version;
mod wire;

use std::sync::Arc;

use async_trait::async_trait;
use tokio::sync::OnceCell;

pub use config::RabbitConfig;
pub use raw::RawPublisher;
pub use repartition::Repartition;

use self::publisher::RabbitPublisher;
use self::socket::Link;
use self::subscriber::RabbitSubscriber;
use self::tap::Taps;
use self::topology::Topology;
use self::version::ServerVersion;
use super::{Broker, BrokerFinding, Publisher, Subscriber, Subscription};
use crate::error::BrokerError;
use crate::message::Arrived;

/// RabbitMQ as configured. Clones share the taps.
#[derive(Debug, Clone)]
pub struct RabbitBroker {
    config: RabbitConfig,
    version: Arc<OnceCell<ServerVersion>>,
    taps: Arc<Taps>,
}

impl RabbitBroker {
    /// Takes the settings; connects to nothing.
    ///
    /// # Errors
    /// [`BrokerError::Refused`] where a setting or the URL cannot be meant.
    pub fn new(config: RabbitConfig) -> Result<Self, BrokerError> {
        config.validate()?;
        Ok(Self { config, version: Arc::new(OnceCell::new()), taps: Arc::new(Taps::default()) })
    }

    /// Takes the next step from the queues that a consumer's topic has to the configured number of
    /// them, and says what is left to do; call it again until it is [`Repartition::Done`].
    /// Repeating it, also after it was broken off, is safe.
    ///
    /// # Errors
    /// [`BrokerError::Refused`] from several queues to several others: they have the same names, so
    /// 1 stands between them. Else what the server answered.
    pub async fn repartition(&self, subscription: &Subscription, topic: &str) -> Result<Repartition, BrokerError> {
        let unlimited = self.version().await?.limits_deliveries();
        let link = Link::open(&self.config, "oncebox queues").await?;
        let mut topology = Topology::new(&link, &self.config);
        let stepped = repartition::step(&self.config, subscription, topic, unlimited, &mut topology).await;
        link.close(self.config.close_deadline).await;
        stepped
    }

    async fn version(&self) -> Result<&ServerVersion, BrokerError> {
        self.version.get_or_try_init(|| version::ask(&self.config)).await
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
        let queues = |topic: &String| topology::queues(&self.config, subscription, topic);
        subscription.topics.iter().flat_map(queues).map(|queue| queue.name).collect()
    }

    async fn publisher(&self) -> Result<Box<dyn Publisher>, BrokerError> {
        Ok(Box::new(RabbitPublisher::open(&self.config).await?))
    }

    async fn subscriber(&self, subscription: &Subscription) -> Result<Box<dyn Subscriber>, BrokerError> {
        let unlimited = self.version().await?.limits_deliveries();
        Ok(Box::new(RabbitSubscriber::open(&self.config, subscription, unlimited).await?))
    }

    async fn declare(&self, _topics: &[String]) -> Result<(), BrokerError> {
        let link = Link::open(&self.config, "oncebox declare").await?;
        Topology::new(&link, &self.config).exchange(&self.config).await?;
        link.close(self.config.close_deadline).await;
        Ok(())
    }

    async fn check(&self, subscriptions: &[Subscription]) -> Result<Vec<BrokerFinding>, BrokerError> {
        check::check(&self.config, self.version().await?, subscriptions).await
    }

    async fn read_all(&self, topic: &str) -> Result<Vec<Arrived>, BrokerError> {
        self.taps.read(&self.config, topic).await
    }

    async fn tap(&self, topic: &str) -> Result<(), BrokerError> {
        self.taps.open(&self.config, topic).await
    }

    async fn remove(&self, subscriptions: &[Subscription]) -> Result<(), BrokerError> {
        let link = Link::open(&self.config, "oncebox remove").await?;
        let removed = Topology::new(&link, &self.config).remove(&self.config, subscriptions).await;
        link.close(self.config.close_deadline).await;
        removed
    }
}
