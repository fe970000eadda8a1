//! Records that cannot be read: their checksum is wrong, or they cannot be unpacked.
//!
//! Promises: nothing that stands behind such a record in its partition is delivered. Where it is
//! known which partition that is, the others are read on; otherwise the subscriber ends.
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
use super::poller::PollerState;
use crate::error::BrokerError;

/// How long the search for the partition takes. Nothing is polled meanwhile.
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

/// Stops the partition that this error is about, before its next record. The client may leave that
/// record out and go on behind it, or ask for it again for ever. So the subscriber ends where the
/// partition is not found.
pub(super) fn stop(config: &KafkaConfig, shared: &PollerState, error: &KafkaError) {
    let reason = shared.reports.take_last().unwrap_or_else(|| error.to_string());
    let nexts = shared.assignment().nexts(false);
    let found = find(config, &nexts).unwrap_or_default();
    // Another partition with such a record does not explain this error.
    if !found.iter().any(|(_, why)| *why == reason) {
        tracing::error!(reason, "a kafka record cannot be read, and its partition is not known");
        shared.tell(Err(BrokerError::Session(format!(
            "a kafka record cannot be read: {reason}; nothing behind it in its partition is consumed before it can be \
             read or is deleted"
        ))));
        return;
    }
    for ((topic, partition, _), reason) in found {
        tracing::error!(topic = &*topic, partition, reason, "a kafka record cannot be read: its partition stands");
        shared.assignment().stop_before_next(&topic, partition, reason);
    }
}

/// Why the partitions that stand at such a record should be tried again; `None` while all of them
/// still do, or where that is not known.
pub(super) fn is_over(config: &KafkaConfig, shared: &PollerState) -> Option<String> {
    let stopped = shared.assignment().nexts(true);
    let found = find(config, &stopped)?;
    let (topic, partition, _) = stopped.iter().find(|one| !found.iter().any(|(still, _)| still == *one))?;
    Some(format!("a record of {topic}/{partition} that could not be read can be read now, or is deleted"))
}

/// Those of these partitions whose next record cannot be read, with the client's reason. `None`
/// where not all of them answered.
fn find(config: &KafkaConfig, partitions: &[Position]) -> Option<Vec<(Position, String)>> {
    if partitions.is_empty() {
        return Some(Vec::new());
    }
    let context = AskContext::default();
    let reports = Arc::clone(&context.reports);
    let reader = Arc::new(BaseConsumer::from_config_and_context(&client::reader(config), context).ok()?);
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
        if Instant::now() >= end {
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
    use super::*;

    /// Shown by: only logging these errors. The subscriber then gets what stands behind the record,
    /// or nothing more of its partition, and looks well.
    #[test]
    fn g2_a_record_that_cannot_be_read_ends_the_subscriber_where_its_partition_is_not_known() {
        use RDKafkaErrorCode as Code;
        let config = KafkaConfig::from_url("kafka://b:1").unwrap();
        for code in [Code::BadMessage, Code::BadCompression, Code::NotImplemented] {
            let (sender, mut events) = tokio::sync::mpsc::unbounded_channel();
            let shared = PollerState::new(sender, 10, 1_000, Duration::ZERO);
            let error = KafkaError::MessageConsumption(code);
            assert!(is_meant(&error), "{code}");
            shared.reports.error(&error, "MessageSet at offset 5 is damaged");
            stop(&config, &shared, &error);
            let told = events.try_recv();
            let is_told = matches!(&told, Ok(Err(BrokerError::Session(why))) if why.contains("at offset 5"));
            assert!(is_told, "{code}: {told:?}");
        }
    }
}
