//! Another number of queues for a consumer's topic, without a message out of order.
//!
//! Why: a key has its place in one queue. Where the number of queues changes while messages wait,
//! later messages of a key would stand in another queue than the earlier ones, and run first. So
//! all that waits in the old queues is handled before anything is read from the new ones:
//!
//! 1. the new queues are bound, then the old ones are unbound: from here on the old ones only get
//!    shorter. What came in between stands in both, and the inbox knows it the second time;
//! 2. the consumers of the old number go on until nothing is left, and are stopped;
//! 3. the old queues are deleted; only then does a consumer of the new number get in.
//!
//! Guarantees: each step may be repeated, and the whole may be broken off and begun again; a queue
//! is deleted only after it was seen twice without a message and without a consumer; a consumer of
//! any other number is refused all the while.
//!
//! Not here: who waits, and for how long (`oncebox queues repartition`).

use std::time::Duration;

use lapin::options::{ExchangeDeclareOptions, ExchangeUnbindOptions};
use lapin::types::FieldTable;

use super::config::RabbitConfig;
use super::error::within;
use super::topology::{QueueName, Topology, hash_exchange, queues};
use crate::broker::Subscription;
use crate::error::BrokerError;

/// Between the two looks that must both find nothing.
const BETWEEN_LOOKS: Duration = Duration::from_secs(1);

/// How far a change of the number of queues is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Repartition {
    /// The queues are those of the number that is configured, and nothing else is there.
    Done,
    /// The old queues get nothing more. They must be read empty by consumers of the old number,
    /// which must then end.
    Draining {
        /// The number of old queues.
        from: usize,
        /// Messages ready in the old queues.
        ready: u64,
        /// Consumers on the old queues.
        consumers: u64,
    },
}

/// The queues of another number that are there: none where the configured layout, or nothing, is.
pub(super) async fn other_layout(
    config: &RabbitConfig,
    subscription: &Subscription,
    topic: &str,
    topology: &mut Topology<'_>,
) -> Result<Vec<QueueName>, BrokerError> {
    let numbered = numbered(subscription, topic, topology).await?;
    if config.partitions == 1 {
        return Ok(numbered);
    }
    let plain = QueueName { topic: topic.to_owned(), name: subscription.queue(topic) };
    if topology.queue_as_it_stands(&plain.name).await?.is_some() {
        return Ok(vec![plain]);
    }
    let wanted = config.partitions as usize;
    // The hash exchange is declared after all its queues: fewer of them without it are a start that
    // was broken off.
    let is_other = match numbered.len() {
        0 => false,
        fewer if fewer < wanted => topology.exchange_exists(&hash_exchange(subscription, topic)).await?,
        more => more > wanted,
    };
    Ok(if is_other { numbered } else { Vec::new() })
}

/// The numbered queues that are there, in the order of their numbers.
async fn numbered(
    subscription: &Subscription,
    topic: &str,
    topology: &mut Topology<'_>,
) -> Result<Vec<QueueName>, BrokerError> {
    let queue = subscription.queue(topic);
    let mut found = Vec::new();
    loop {
        let name = format!("{queue}.{}", found.len());
        if topology.queue_as_it_stands(&name).await?.is_none() {
            return Ok(found);
        }
        found.push(QueueName { topic: topic.to_owned(), name });
    }
}

/// The exchange that stands while queues of this number are drained. Nothing is ever routed by it:
/// that it is there tells consumers of the old number to read on, and not to bind their queues
/// again.
pub(super) fn draining(subscription: &Subscription, topic: &str, from: usize) -> String {
    format!("{}.draining.{from}", subscription.queue(topic))
}

/// Why a consumer of the configured number does not get in.
pub(super) fn refused(config: &RabbitConfig, topic: &str, other: &[QueueName], ready: u64) -> BrokerError {
    BrokerError::Refused(format!(
        "{}, but partitions = {}: nobody would read what stands there, and later messages of the same keys would run first; \
         set partitions = {} again, or change the number with `oncebox queues repartition`",
        described(topic, other, ready),
        config.partitions,
        other.len()
    ))
}

/// The queues of another number, for people.
pub(super) fn described(topic: &str, other: &[QueueName], ready: u64) -> String {
    let names: Vec<String> = other.iter().map(|queue| format!("`{}`", queue.name)).collect();
    let (what, names) = (if names.len() == 1 { "queue" } else { "queues" }, names.join(", "));
    format!("topic `{topic}` has the {what} {names} of partitions = {} with {ready} ready messages", other.len())
}

/// Takes the next step towards the configured number of queues, and says what is left.
pub(super) async fn step(
    config: &RabbitConfig,
    subscription: &Subscription,
    topic: &str,
    unlimited: bool,
    topology: &mut Topology<'_>,
) -> Result<Repartition, BrokerError> {
    let old = other_layout(config, subscription, topic, topology).await?;
    if old.is_empty() {
        return Ok(Repartition::Done);
    }
    if old.len() > 1 && config.partitions > 1 {
        return Err(BrokerError::Refused(format!(
            "topic `{topic}` has {} queues and partitions = {}: both numbers use the same names; go to partitions = 1 first, \
             then to {}",
            old.len(),
            config.partitions,
            config.partitions
        )));
    }
    if is_draining(config, subscription, topic, topology).await? {
        return Err(BrokerError::Refused(format!(
            "topic `{topic}` is on its way from partitions = {} to {}; finish that first",
            config.partitions,
            old.len()
        )));
    }
    let marker = draining(subscription, topic, old.len());
    let durable = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
    topology.declare_exchange(&marker, lapin::ExchangeKind::Fanout, durable, FieldTable::default()).await?;
    topology.bind_layout(config, subscription, topic, unlimited).await?;
    unbind(config, subscription, topic, &old, topology).await?;
    for look in 0..2 {
        if look > 0 {
            tokio::time::sleep(BETWEEN_LOOKS).await;
        }
        let (ready, consumers) = left(&old, topology).await?;
        if ready + consumers > 0 {
            return Ok(Repartition::Draining { from: old.len(), ready, consumers });
        }
    }
    for queue in &old {
        topology.delete_queue(&queue.name).await?;
    }
    if old.len() > 1 {
        topology.delete_exchange(&hash_exchange(subscription, topic)).await?;
    }
    topology.delete_exchange(&marker).await?;
    Ok(Repartition::Done)
}

/// From here on the old queues get nothing more.
async fn unbind(
    config: &RabbitConfig,
    subscription: &Subscription,
    topic: &str,
    old: &[QueueName],
    topology: &mut Topology<'_>,
) -> Result<(), BrokerError> {
    let channel = topology.channel().await?;
    let (exchange, nothing) = (config.exchange.as_str(), FieldTable::default());
    if config.partitions > 1 {
        let queue = old[0].name.as_str();
        let unbound = channel.queue_unbind(queue.into(), exchange.into(), topic.into(), nothing);
        return Ok(within(config.connect_deadline, "queue.unbind", unbound).await?);
    }
    let hash = hash_exchange(subscription, topic);
    if !topology.exchange_exists(&hash).await? {
        return Ok(());
    }
    let channel = topology.channel().await?;
    let options = ExchangeUnbindOptions::default();
    let unbound = channel.exchange_unbind(hash.as_str().into(), exchange.into(), topic.into(), options, nothing);
    Ok(within(config.connect_deadline, "exchange.unbind", unbound).await?)
}

/// Messages that are ready and consumers, over all these queues.
pub(super) async fn left(queues: &[QueueName], topology: &mut Topology<'_>) -> Result<(u64, u64), BrokerError> {
    let (mut ready, mut consumers) = (0, 0);
    for queue in queues {
        if let Some(found) = topology.queue_as_it_stands(&queue.name).await? {
            ready += u64::from(found.ready);
            consumers += u64::from(found.consumers);
        }
    }
    Ok((ready, consumers))
}

/// Whether queues of the configured number are being drained by a change to another one.
pub(super) async fn is_draining(
    config: &RabbitConfig,
    subscription: &Subscription,
    topic: &str,
    topology: &mut Topology<'_>,
) -> Result<bool, BrokerError> {
    let marker = draining(subscription, topic, queues(config, subscription, topic).len());
    Ok(topology.exchange_exists(&marker).await?)
}
