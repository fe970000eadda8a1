//! The adapter for Kafka, built on librdkafka.
//!
//! Guarantees:
//! - a row is settled by its delivery report only, with `enable.idempotence`, `acks=all` and no
//!   message timeout; any setting that would break this is refused by name ([`KafkaConfig`]);
//! - nothing is produced to a topic that was not seen in the broker's metadata (R19);
//! - an offset is committed only after the runtime acknowledged it, for the assignment it was
//!   delivered under;
//! - no executor thread waits for librdkafka: its blocking calls run on threads of their own.
//!
//! Not here: Kafka transactions (effects commit in the database, so they are not needed), a schema
//! registry, regular expressions as topics.

mod assignment;
mod blocking;
mod check;
mod client;
mod config;
mod context;
mod errors;
mod opening;
mod poller;
mod properties;
mod publisher;
mod raw;
mod reader;
mod subscriber;
mod topology;
mod unread;
mod unreadable;
mod window;
mod wire;

use std::sync::Arc;

use async_trait::async_trait;

pub use self::config::{KafkaConfig, SaslMechanism};

use super::{Broker, Publisher, Subscriber, Subscription};
use crate::error::BrokerError;
use crate::inbox::rules::horizon::TopicRetention;
use crate::message::Arrived;
use crate::observe::Finding;
use topology::TopicLimits;

/// A configured Kafka. Cheap: only its sessions make connections.
#[derive(Debug, Clone)]
pub struct KafkaBroker {
    config: Arc<KafkaConfig>,
    // The size limits of topics, learned by one session and used by the next ones (R19).
    limits: Arc<TopicLimits>,
}

impl KafkaBroker {
    /// Checks the configuration, without any connection.
    ///
    /// # Errors
    /// [`BrokerError::Refused`] names the setting that is wrong, breaks a promise, or needs a cargo
    /// feature.
    pub fn new(config: KafkaConfig) -> Result<Self, BrokerError> {
        config.validate()?;
        Ok(Self { config: Arc::new(config), limits: Arc::new(TopicLimits::default()) })
    }
}

#[async_trait]
impl Broker for KafkaBroker {
    fn name(&self) -> &'static str {
        "kafka"
    }

    async fn publisher(&self) -> Result<Box<dyn Publisher>, BrokerError> {
        Ok(Box::new(publisher::KafkaPublisher::open(&self.config, &self.limits).await?))
    }

    async fn subscriber(&self, subscription: &Subscription) -> Result<Box<dyn Subscriber>, BrokerError> {
        Ok(Box::new(subscriber::KafkaSubscriber::open(&self.config, subscription).await?))
    }

    async fn retention(&self, topics: &[String]) -> Result<Option<TopicRetention>, BrokerError> {
        topology::retention(&self.config, topics).await
    }

    async fn declare(&self, topics: &[String]) -> Result<(), BrokerError> {
        topology::declare(&self.config, topics).await
    }

    async fn check(&self, subscriptions: &[Subscription]) -> Result<Vec<Finding>, BrokerError> {
        check::check(&self.config, subscriptions).await
    }

    async fn read_all(&self, topic: &str) -> Result<Vec<Arrived>, BrokerError> {
        reader::read_all(&self.config, topic).await
    }

    async fn remove(&self, subscriptions: &[Subscription]) -> Result<(), BrokerError> {
        topology::remove(&self.config, subscriptions).await
    }
}
