//! Records that cannot be read: their checksum is wrong, or they cannot be unpacked.
//!
//! Promises: finds the partitions that stand at such a record, so that the poller stops these
//! alone.
//!
//! The error of the group's client names no partition. So another client, which joins no group,
//! reads on from where each partition stands, with a queue for each: the next record of the
//! partition gives the same error there. The group's client itself is not split into queues,
//! because waiting on many queues costs every message.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::config::FromClientConfigAndContext;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

use super::assignment::Position;
use super::client;
use super::config::KafkaConfig;
use super::context::AskContext;

/// How long the search for the partition may take. The group's client is not polled meanwhile.
const PATIENCE: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(10);

/// Whether an error is about a record that cannot be read.
///
/// `MessageSizeTooLarge` does not belong here: a broker sends the first record whole, whatever its
/// size, and the client reports it of batches that compaction has emptied.
pub(super) fn is_meant(error: &KafkaError) -> bool {
    use RDKafkaErrorCode as Code;
    !matches!(error, KafkaError::MessageConsumptionFatal(_))
        && matches!(error.rdkafka_error_code(), Some(Code::BadMessage | Code::BadCompression | Code::NotImplemented))
}

/// Those of these partitions whose next record cannot be read, with the client's reason. `None`
/// where not all of them answered, or where `is_over` says that nobody waits for it any more.
pub(super) fn find(
    config: &KafkaConfig,
    partitions: &[Position],
    is_over: impl Fn() -> bool,
) -> Option<Vec<(Position, String)>> {
    if partitions.is_empty() {
        return Some(Vec::new());
    }
    let context = AskContext::default();
    let reports = Arc::clone(&context.reports);
    let reader = Arc::new(BaseConsumer::from_config_and_context(&client::next_reader(config), context).ok()?);
    let mut list = TopicPartitionList::with_capacity(partitions.len());
    let mut open = Vec::with_capacity(partitions.len());
    for position in partitions {
        let (topic, partition, next) = position;
        list.add_partition_offset(topic, *partition, Offset::Offset(*next)).ok()?;
        // Before `assign`, so that nothing of the partition arrives on the common queue.
        open.push((position, reader.split_partition_queue(topic, *partition)?));
    }
    reader.assign(&list).ok()?;
    let mut found = Vec::new();
    let end = Instant::now() + PATIENCE;
    while !open.is_empty() {
        if Instant::now() >= end || is_over() {
            return None;
        }
        // Serves the client's own reports.
        drop(reader.poll(POLL));
        open.retain(|(position, queue)| match queue.poll(Duration::ZERO) {
            None => true,
            Some(Err(error)) if is_meant(&error) => {
                let reason = reports.take_last().unwrap_or_else(|| error.to_string());
                found.push(((*position).clone(), reason));
                false
            }
            // A record, the end, or another error: it is not this partition.
            Some(_) => false,
        });
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::cell::Cell;

    use super::*;

    /// Shown by: searching until the patience is over. A stop then waits for it, beside all else
    /// that it must wait for.
    #[test]
    fn a_search_ends_at_once_when_the_subscriber_closes() {
        let config = KafkaConfig::from_url("kafka://127.0.0.1:1").unwrap();
        let asked = Cell::new(0);
        let is_over = || {
            asked.set(asked.get() + 1);
            true
        };
        assert_eq!(find(&config, &[("t".into(), 0, 0)], is_over), None);
        assert_eq!(asked.get(), 1);
    }
}
