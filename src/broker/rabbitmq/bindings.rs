//! Keeps the queues of a running consumer bound.
//!
//! Why: an exchange that is deleted takes its bindings with it, and the server tells no consumer.
//! Once it is declared again, by anybody, its messages go to the queues that are bound again. Each
//! other consumer would get nothing, and no error would show it.
//!
//! All consumers make their rounds at the same moments of the clock. So where a message is routed
//! to one of them again, the others are bound within a second or so, if their clocks agree.
//!
//! Guarantees: nothing here ends the consumer. Queues that are drained for another number of
//! partitions are not bound.
//!
//! Not here: what was published while a queue was not bound.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::config::Known;
use super::repartition;
use super::socket::Link;
use super::topology::Topology;
use crate::broker::Subscription;

/// The longest time between two rounds. It is not shorter because the look whether queues are
/// drained leaves a line in the log of the server.
const PAUSE_MAX: Duration = Duration::from_secs(120);

/// Declares the exchange where it is missing and binds the queues again, round after round, until
/// the connection ends.
pub(super) async fn keep(link: Arc<Link>, config: Arc<Known>, subscription: Subscription) {
    let consumer = &*subscription.consumer;
    let mut topics = subscription.topics.clone();
    loop {
        next_round((config.quiet_check * 4).min(PAUSE_MAX)).await;
        if let Err(error) = Topology::new(&link, &config).exchange_where_missing().await {
            if !link.is_connected() {
                return;
            }
            let (exchange, why) = (&config.exchange, error.to_string());
            let what = "the exchange cannot be looked for or declared; if it is missing, declare it";
            tracing::warn!(consumer, exchange, why, "{what}");
            continue;
        }
        let mut bound = Vec::with_capacity(topics.len());
        for topic in topics {
            // The server closes the channel of a refused request, so each topic has its own.
            let mut topology = Topology::new(&link, &config);
            if let Err(error) = repartition::bind_again(&subscription, &topic, &mut topology).await {
                if !link.is_connected() {
                    return;
                }
                let why = error.to_string();
                let what = "the queues cannot be bound again; see `rabbitmqctl list_bindings`";
                tracing::warn!(consumer, topic, why, "{what}");
            }
            // Where the user has no right to bind, an operator does it: that is not tried again.
            if topology.may_bind {
                bound.push(topic);
            }
        }
        topics = bound;
    }
}

/// Waits for the next multiple of `pause` since the epoch.
async fn next_round(pause: Duration) {
    let pause = pause.as_nanos();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let left = u64::try_from(pause - now % pause).unwrap_or(u64::MAX);
    tokio::time::sleep(Duration::from_nanos(left)).await;
}
