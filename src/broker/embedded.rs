//! The embedded broker: a durable topic log in one SQLite file for the processes of one machine.
//!
//! Topics have partitions (by hash of the key), partitions have offsets without holes, and a group
//! has one lease row with an epoch for each partition. The broker needs no server. The first
//! command of the README runs it.
//!
//! Guarantees: an appended row is on disk (WAL, `synchronous=FULL`) before it is settled. The rows
//! of a key are in one partition, in the order in which they were sent. An offset is committed only
//! under the epoch of its lease (G9), so that a process that lost a partition changes nothing. The
//! partitions of a process that died go to others when its lease ends.
//!
//! Not here: the user's database (another file, never attached); more than one machine (SQLite over
//! a network file system loses data: use Kafka or RabbitMQ).
//!
//! ```no_run
//! # async fn run() -> Result<(), oncebox::BrokerError> {
//! use oncebox::broker::Broker;
//! use oncebox::broker::embedded::{EmbeddedBroker, EmbeddedConfig};
//!
//! let broker = EmbeddedBroker::open(EmbeddedConfig::new("broker.db")).await?;
//! broker.declare(&["payments".to_owned()]).await?;
//! # Ok(())
//! # }
//! ```

mod config;
mod group;
mod log;
mod member;
mod publisher;
mod record;
mod retention;
mod subscriber;
mod talk;
mod topology;

use std::sync::Arc;

use async_trait::async_trait;

pub use self::config::EmbeddedConfig;
use self::log::Log;
use self::publisher::EmbeddedPublisher;
use self::subscriber::EmbeddedSubscriber;
use super::{Broker, Publisher, Subscriber, Subscription};
use crate::error::BrokerError;
use crate::inbox::rules::horizon::TopicRetention;
use crate::message::Arrived;
use crate::observe::Finding;

/// A broker whose topics are in one SQLite file.
#[derive(Debug, Clone)]
pub struct EmbeddedBroker {
    log: Arc<Log>,
}

impl EmbeddedBroker {
    /// Opens the file, and creates it where it is missing. Topics are data, so there is nothing to
    /// migrate.
    ///
    /// # Errors
    /// [`BrokerError::Refused`] where the directory is missing, the lock file cannot be opened, the
    /// file is damaged, no topic log or of a newer version, or a setting is invalid.
    /// [`BrokerError::Unavailable`] where the file is in use or read-only, or its disk is full.
    pub async fn open(config: EmbeddedConfig) -> Result<Self, BrokerError> {
        Ok(Self { log: Arc::new(Log::open(config).await?) })
    }
}

#[async_trait]
impl Broker for EmbeddedBroker {
    fn name(&self) -> &'static str {
        "embedded"
    }

    async fn publisher(&self) -> Result<Box<dyn Publisher>, BrokerError> {
        Ok(Box::new(EmbeddedPublisher::open(Arc::clone(&self.log)).await?))
    }

    async fn subscriber(&self, subscription: &Subscription) -> Result<Box<dyn Subscriber>, BrokerError> {
        Ok(Box::new(EmbeddedSubscriber::join(Arc::clone(&self.log), subscription).await?))
    }

    async fn retention(&self, _topics: &[String]) -> Result<Option<TopicRetention>, BrokerError> {
        Ok(Some(self.log.config.retention.map_or(TopicRetention::Unlimited, TopicRetention::For)))
    }

    async fn declare(&self, topics: &[String]) -> Result<(), BrokerError> {
        topology::declare(&self.log, topics).await
    }

    async fn check(&self, subscriptions: &[Subscription]) -> Result<Vec<Finding>, BrokerError> {
        topology::check(&self.log, subscriptions).await
    }

    async fn read_all(&self, topic: &str) -> Result<Vec<Arrived>, BrokerError> {
        topology::read_all(&self.log, topic).await
    }

    async fn remove(&self, subscriptions: &[Subscription]) -> Result<(), BrokerError> {
        topology::remove(&self.log, subscriptions).await
    }
}
