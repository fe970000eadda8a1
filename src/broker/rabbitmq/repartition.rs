//! Changes the number of queues of a consumer's topic, without reordering messages, and admits the
//! consumers that fit the number.
//!
//! Why: all messages of a key are in one queue. If the number of queues changed while messages
//! wait, later messages of a key would be in another queue than the earlier ones, and could be
//! handled first. So everything in the old queues is handled before the new ones are read:
//!
//! 1. the new queues are bound, then the old ones are unbound. From then on the old ones only get
//!    shorter. A message that came in between is in both; the inbox knows it the second time;
//! 2. consumers of the old number go on until the old queues are empty, and are stopped;
//! 3. the old queues are deleted. Only then are consumers of the new number admitted.
//!
//! Guarantees: each step may be repeated, and the change may be interrupted and begun again. A
//! queue is deleted only after two looks found no ready message and no consumer. During the change
//! only consumers of the old number are admitted.
//!
//! Not here: who waits, and how long (`oncebox queues repartition`).

use std::time::Duration;

use lapin::options::ExchangeUnbindOptions;
use lapin::types::FieldTable;

use super::config::RabbitConfig;
use super::topology::{QueueState, Topology, durable, hash_exchange, queues};
use crate::broker::Subscription;
use crate::error::BrokerError;

/// The pause between the two looks that must both find the old queues empty.
const SECOND_LOOK_AFTER: Duration = Duration::from_secs(1);

/// The progress of a change of the number of queues.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Repartition {
    /// Only queues of the configured number exist.
    Done,
    /// The old queues get no more messages. Consumers of the old number must empty them and must
    /// then be stopped.
    Draining {
        /// The number of partitions with which consumers read the old queues.
        from: usize,
        /// Messages that are ready in the old queues. Those that are delivered and not acknowledged
        /// are not among them: AMQP does not tell their number.
        ready: u64,
        /// Consumers that are connected to the old queues.
        consumers: u64,
    },
}

/// Declares what a subscription needs for one topic, and returns the queues in order. Refuses where
/// queues of another number of partitions exist.
pub(super) async fn admit(
    subscription: &Subscription,
    topic: &str,
    unlimited: bool,
    topology: &mut Topology<'_>,
) -> Result<Vec<(String, QueueState)>, BrokerError> {
    let queue = subscription.queue(topic);
    let other = other_layout(&queue, topology).await?;
    if other.is_empty() {
        return topology.bind_layout(subscription, topic, unlimited).await;
    }
    if !is_draining(&queue, topology).await? {
        let (ready, _) = left(&other, topology).await?;
        return Err(refused(topology.config, &queue, topic, &other, ready));
    }
    topology.declare_queues(&queue, unlimited).await
}

/// Binds the queues of a running consumer again, unless they are drained: then new messages go to
/// the new queues only.
pub(super) async fn bind_again(
    subscription: &Subscription,
    topic: &str,
    topology: &mut Topology<'_>,
) -> Result<(), BrokerError> {
    if is_draining(&subscription.queue(topic), topology).await? {
        return Ok(());
    }
    topology.bind_queues(subscription, topic).await
}

/// The existing queues of another number. Empty if there are none.
pub(super) async fn other_layout(queue: &str, topology: &mut Topology<'_>) -> Result<Vec<String>, BrokerError> {
    let numbered = numbered(queue, topology).await?;
    let wanted = topology.config.partitions as usize;
    if wanted == 1 {
        return Ok(numbered);
    }
    if topology.queue_as_it_stands(queue).await?.is_some() {
        return Ok(vec![queue.to_owned()]);
    }
    // The hash exchange is declared after all its queues. Fewer queues without it are the rest of a
    // start that was interrupted.
    let is_other = match numbered.len() {
        0 => false,
        fewer if fewer < wanted => topology.exchange_exists(&hash_exchange(queue)).await?,
        more => more > wanted,
    };
    Ok(if is_other { numbered } else { Vec::new() })
}

/// The numbered queues that exist, in the order of their numbers.
async fn numbered(queue: &str, topology: &mut Topology<'_>) -> Result<Vec<String>, BrokerError> {
    let mut found = Vec::new();
    loop {
        let name = format!("{queue}.{}", found.len());
        if topology.queue_as_it_stands(&name).await?.is_none() {
            return Ok(found);
        }
        found.push(name);
    }
}

/// The number of partitions with which consumers read these queues. A numbered queue that stands
/// alone is the rest of several: consumers with partitions = 1 read the queue without a number.
fn number(queue: &str, old: &[String]) -> usize {
    if old[0] == queue { 1 } else { old.len().max(2) }
}

/// The name of the exchange that exists while queues of this number are drained. It routes nothing:
/// its existence tells consumers of the old number to go on and not to bind their queues again.
fn draining(queue: &str, from: usize) -> String {
    format!("{queue}.draining.{from}")
}

fn refused(config: &RabbitConfig, queue: &str, topic: &str, other: &[String], ready: u64) -> BrokerError {
    BrokerError::Refused(format!(
        "{}, but partitions = {}: nobody would read what stands there, and later messages of the same keys would run first; {}",
        described(queue, topic, other, ready),
        config.partitions,
        remedy(queue, other)
    ))
}

/// What to do where queues of another number exist.
pub(super) fn remedy(queue: &str, other: &[String]) -> String {
    let number = number(queue, other);
    format!("set partitions = {number} again, or change the number with `oncebox queues repartition`")
}

pub(super) fn described(queue: &str, topic: &str, other: &[String], ready: u64) -> String {
    let names: Vec<String> = other.iter().map(|queue| format!("`{queue}`")).collect();
    let (what, names) = (if names.len() == 1 { "queue" } else { "queues" }, names.join(", "));
    let number = number(queue, other);
    format!("topic `{topic}` has the {what} {names} of partitions = {number} with {ready} ready messages")
}

/// Takes the next step towards the configured number of queues, and returns what is left to do.
pub(super) async fn step(
    subscription: &Subscription,
    topic: &str,
    unlimited: bool,
    topology: &mut Topology<'_>,
) -> Result<Repartition, BrokerError> {
    let (queue, wanted) = (subscription.queue(topic), topology.config.partitions);
    let old = other_layout(&queue, topology).await?;
    if old.is_empty() {
        return Ok(Repartition::Done);
    }
    // Also where one of several queues is left: the hash exchange still routes to it.
    if wanted > 1 && old[0] != queue {
        return Err(BrokerError::Refused(format!(
            "topic `{topic}` has queues with names that partitions = {wanted} would use again ({}); go to partitions = \
             1 first, then to {wanted}",
            old.join(", ")
        )));
    }
    let from = number(&queue, &old);
    if is_draining(&queue, topology).await? {
        return Err(BrokerError::Refused(format!(
            "topic `{topic}` is on its way from partitions = {wanted} to {from}; finish that first"
        )));
    }
    // A change that was interrupted in an older version could leave this marker behind. Once the
    // new queues exist, it would say that they are drained.
    topology.delete_exchange(&draining(&queue, wanted as usize)).await?;
    let marker = draining(&queue, from);
    topology.declare_exchange(&marker, lapin::ExchangeKind::Fanout, durable(), FieldTable::default()).await?;
    topology.bind_layout(subscription, topic, unlimited).await?;
    unbind(topic, &queue, topology).await?;
    for look in 0..2 {
        if look > 0 {
            tokio::time::sleep(SECOND_LOOK_AFTER).await;
        }
        let (ready, consumers) = left(&old, topology).await?;
        if ready + consumers > 0 {
            return Ok(Repartition::Draining { from, ready, consumers });
        }
    }
    // If this is broken off, the next step must find what is left. It finds the old queues, and
    // counts them from the first one: so they are deleted last, and the first one at the very end.
    topology.delete_exchange(&marker).await?;
    if wanted == 1 {
        topology.delete_exchange(&hash_exchange(&queue)).await?;
    }
    for one in old.iter().rev() {
        topology.delete_queue(one).await?;
    }
    Ok(Repartition::Done)
}

/// Unbinds the old queues, so that they get no more messages.
async fn unbind(topic: &str, queue: &str, topology: &mut Topology<'_>) -> Result<(), BrokerError> {
    let channel = topology.channel().await?;
    let (exchange, nothing) = (topology.config.exchange.as_str(), FieldTable::default());
    if topology.config.partitions > 1 {
        let unbound = channel.queue_unbind(queue.into(), exchange.into(), topic.into(), nothing);
        return Ok(topology.link.ask("queue.unbind", unbound).await?);
    }
    let hash = hash_exchange(queue);
    if !topology.exchange_exists(&hash).await? {
        return Ok(());
    }
    let channel = topology.channel().await?;
    let options = ExchangeUnbindOptions::default();
    let unbound = channel.exchange_unbind(hash.as_str().into(), exchange.into(), topic.into(), options, nothing);
    Ok(topology.link.ask("exchange.unbind", unbound).await?)
}

/// The sums of ready messages and of consumers over these queues.
pub(super) async fn left(queues: &[String], topology: &mut Topology<'_>) -> Result<(u64, u64), BrokerError> {
    let (mut ready, mut consumers) = (0, 0);
    for queue in queues {
        if let Some(found) = topology.queue_as_it_stands(queue).await? {
            ready += u64::from(found.ready);
            consumers += u64::from(found.consumers);
        }
    }
    Ok((ready, consumers))
}

/// Whether queues of the configured number are drained for a change to another number. A marker
/// without queues is the rest of a change that was broken off after it had deleted them.
async fn is_draining(queue: &str, topology: &mut Topology<'_>) -> Result<bool, BrokerError> {
    let first = &queues(topology.config, queue)[0];
    let marker = draining(queue, topology.config.partitions as usize);
    Ok(topology.queue_as_it_stands(first).await?.is_some() && topology.exchange_exists(&marker).await?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shown by counting the queues: partitions = 1 was refused with the advice to set it to 1.
    #[test]
    fn a_numbered_queue_that_is_left_alone_is_told_as_one_of_several() {
        let (rest, plain) = (["t.ledger.0".to_owned()], ["t.ledger".to_owned()]);
        let told =
            |other: &[String]| format!("{}; {}", described("t.ledger", "t", other, 3), remedy("t.ledger", other));
        assert!(told(&rest).contains("of partitions = 2 with 3") && told(&rest).contains("set partitions = 2 again"));
        assert!(told(&plain).contains("of partitions = 1 with 3") && told(&plain).contains("set partitions = 1 again"));
    }
}
