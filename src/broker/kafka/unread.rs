//! The records that a group has not acknowledged, and whether it makes progress with them.
//!
//! Promise: a check changes nothing and does not join the group.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use chrono::Utc;
use rdkafka::config::FromClientConfigAndContext;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::message::Message;
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

use super::client::{self, ASK_DEADLINE};
use super::config::KafkaConfig;
use super::context::AskContext;
use super::{topology, unreadable};
use crate::broker::{BETWEEN_LOOKS, Subscription};

const POLL: Duration = Duration::from_millis(100);

/// A partition with records that the group has not acknowledged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Unread {
    topic: String,
    partition: i32,
    from: i64,
    end: i64,
}

impl std::fmt::Display for Unread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { topic, partition, from, end } = self;
        write!(f, "{} record(s) of partition {partition} of topic {topic}", end - from)
    }
}

/// A client that examines one group.
pub(super) struct Looker<'a> {
    reader: BaseConsumer<AskContext>,
    topics: &'a [String],
}

impl<'a> Looker<'a> {
    pub(super) fn new(config: &KafkaConfig, subscription: &'a Subscription) -> Option<Self> {
        let client = client::group_reader(config, subscription.group());
        let reader = BaseConsumer::from_config_and_context(&client, AskContext::default()).ok()?;
        Some(Self { reader, topics: &subscription.topics })
    }

    /// Partitions with records that are not acknowledged; `None` where the broker does not tell.
    /// Partitions without a leader are left out, because nobody can tell of them: they have a
    /// finding of their own.
    pub(super) fn unread(&self) -> Option<Vec<Unread>> {
        let mut list = TopicPartitionList::new();
        for topic in self.topics {
            let metadata = self.reader.fetch_metadata(Some(topic), ASK_DEADLINE).ok()?;
            let partitions = topology::find(&metadata, topic).map_or(&[][..], |found| found.partitions());
            for partition in partitions.iter().filter(|partition| topology::has_leader(partition)) {
                list.add_partition(topic, partition.id());
            }
        }
        let committed = self.reader.committed_offsets(list, ASK_DEADLINE).ok()?;
        let unread = committed.elements().into_iter().map(|place| {
            let (topic, partition) = (place.topic().to_owned(), place.partition());
            let (first, end) = self.reader.fetch_watermarks(&topic, partition, ASK_DEADLINE).ok()?;
            let from = match place.offset() {
                Offset::Offset(offset) => offset.max(first),
                _ => first,
            };
            Some((end > from).then_some(Unread { topic, partition, from, end }))
        });
        Some(unread.collect::<Option<Vec<_>>>()?.into_iter().flatten().collect())
    }

    /// Describes the first partition with a readable record, or else one whose record cannot be
    /// read, if none of these partitions made progress since `before` was taken. Returns `None`
    /// where one made progress.
    pub(super) fn stands(&self, before: &[Unread]) -> Option<String> {
        let until = Instant::now() + BETWEEN_LOOKS;
        let mut places = TopicPartitionList::with_capacity(before.len());
        for Unread { topic, partition, from, .. } in before {
            places.add_partition_offset(topic, *partition, Offset::Offset(*from)).ok()?;
        }
        self.reader.assign(&places).ok()?;
        // After the last message there may be only markers of transactions, which no consumer
        // acknowledges.
        let (mut written, mut damaged) = (BTreeMap::new(), None);
        while Instant::now() < until {
            match self.reader.poll(POLL) {
                Some(Ok(record)) => {
                    let place = (record.topic().to_owned(), record.partition());
                    written.entry(place).or_insert(record.timestamp().to_millis());
                }
                Some(Err(error)) if unreadable::is_meant(&error) => damaged = Some(error),
                Some(Err(_)) | None => {}
            }
            if written.len() == before.len() {
                std::thread::sleep(until.saturating_duration_since(Instant::now()));
            }
        }
        self.reader.unassign().ok()?;
        let after = self.unread()?;
        let got_on = |one: &Unread| {
            !after.iter().any(|then| (&then.topic, then.partition, then.from) == (&one.topic, one.partition, one.from))
        };
        if before.iter().any(got_on) {
            return None;
        }
        let now = Utc::now().timestamp_millis();
        let stuck = before.iter().find_map(|one| {
            let written = *written.get(&(one.topic.clone(), one.partition))?;
            let age = written.map(|millis| now.saturating_sub(millis)).filter(|age| *age >= 0);
            let age = age.map(|age| format!(", the first written {} s ago", age / 1_000)).unwrap_or_default();
            Some(format!("{one} are not acknowledged{age}"))
        });
        stuck.or_else(|| {
            let unread = before.iter().find(|one| !written.contains_key(&(one.topic.clone(), one.partition)))?;
            Some(format!("{unread} are not acknowledged: a record cannot be read ({})", damaged?))
        })
    }
}
