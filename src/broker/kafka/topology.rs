//! Topics: whether they are there, how much they take, and making them where that was asked for.
//!
//! Promises: nothing is created unless `create_topics` is on; a topic counts as there only when the broker's metadata shows
//! it with a leader (R16, R19).
//!
//! Not here: what is worth a warning (`check`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rdkafka::admin::{NewTopic, ResourceSpecifier, TopicReplication};
use rdkafka::error::RDKafkaErrorCode;
use rdkafka::metadata::{Metadata, MetadataTopic};

use super::blocking::{self, Admin, Asker};
use super::client;
use super::config::KafkaConfig;
use super::errors;
use crate::broker::TopicState;
use crate::error::BrokerError;

// Above what a broker takes by default (1,048,588), so that a session need not start anew for it.
const MESSAGE_MAX_FLOOR: usize = 2 << 20;
const BATCH_MAX: usize = 1_000_000;

/// Settings of a topic by name.
pub(super) type TopicSettings = BTreeMap<String, String>;

/// What a producer must be told for the topics it serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sizes {
    /// The largest message that any topic takes.
    pub(super) message_max: usize,
    /// The largest batch that every topic takes.
    pub(super) batch_max: usize,
}

impl Sizes {
    /// True where a producer made for `self` is also right for `other`.
    pub(super) fn covers(self, other: Self) -> bool {
        self.message_max >= other.message_max && self.batch_max <= other.batch_max
    }
}

/// `max.message.bytes` of the topics that were seen, where the broker told it.
#[derive(Debug, Default)]
pub(super) struct TopicSizes(Mutex<BTreeMap<String, Option<usize>>>);

impl TopicSizes {
    /// Whether this topic was asked about.
    pub(super) fn knows(&self, topic: &str) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).contains_key(topic)
    }

    /// Keeps what a topic takes; nothing where the broker does not tell.
    pub(super) fn learn(&self, topic: &str, max: Option<usize>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(topic.to_owned(), max);
    }

    /// What fits all topics known.
    pub(super) fn sizes(&self) -> Sizes {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = known.values().flatten().copied();
        known.fold(Sizes { message_max: MESSAGE_MAX_FLOOR, batch_max: BATCH_MAX }, |sizes, max| Sizes {
            message_max: sizes.message_max.max(max),
            batch_max: sizes.batch_max.min(max),
        })
    }
}

/// What metadata says of a topic.
pub(super) fn state(metadata: &Metadata, name: &str) -> TopicState {
    let Some(topic) = metadata.topics().iter().find(|topic| topic.name() == name) else {
        return TopicState::NotReady("it does not exist".to_owned());
    };
    match topic_error(topic) {
        Some(code) => TopicState::NotReady(errors::topic_trouble(code)),
        None if topic.partitions().iter().any(|partition| partition.leader() >= 0) => TopicState::Ready,
        None => TopicState::NotReady("no partition has a leader".to_owned()),
    }
}

fn topic_error(topic: &MetadataTopic) -> Option<RDKafkaErrorCode> {
    topic.error().map(RDKafkaErrorCode::from)
}

/// The settings of topics. Topics that cannot be read are left out.
pub(super) fn settings(
    config: &KafkaConfig,
    topics: &BTreeSet<&str>,
) -> Result<BTreeMap<String, TopicSettings>, BrokerError> {
    let resources: Vec<_> = topics.iter().map(|topic| ResourceSpecifier::Topic(topic)).collect();
    let answer = Admin::new(config)?
        .ask("settings of kafka topics", async |admin, options| admin.describe_configs(&resources, options).await)?;
    let mut found = BTreeMap::new();
    // The answers stand in the order of the questions.
    for (topic, resource) in topics.iter().zip(answer) {
        match resource {
            Ok(resource) => {
                let entries = resource.entries.into_iter();
                let entries = entries.filter_map(|entry| Some((entry.name, entry.value?)));
                found.insert((*topic).to_owned(), entries.collect());
            }
            Err(code) => tracing::debug!(topic, %code, "settings of the topic cannot be read"),
        }
    }
    Ok(found)
}

/// The command that creates a topic.
pub(super) fn how_to_create(config: &KafkaConfig, topic: &str) -> String {
    let (servers, partitions) = (config.bootstrap(), config.partitions);
    let copies = match config.replication {
        -1 => "--replication-factor 3 --config min.insync.replicas=2".to_owned(),
        copies if copies >= 3 => format!("--replication-factor {copies} --config min.insync.replicas=2"),
        copies => format!("--replication-factor {copies}"),
    };
    format!(
        "`kafka-topics.sh --bootstrap-server {servers} --create --topic {topic} --partitions {partitions} {copies}`, or          `[broker.kafka] create_topics = true`"
    )
}

/// Creates the topics that are missing, where `create_topics` is on.
pub(super) async fn declare(config: &Arc<KafkaConfig>, topics: &[String]) -> Result<(), BrokerError> {
    if !config.create_topics || topics.is_empty() {
        return Ok(());
    }
    // A set: a name given twice makes librdkafka answer without a result, on which rdkafka 0.39 crashes.
    let (config, topics) = (Arc::clone(config), topics.iter().cloned().collect::<BTreeSet<_>>());
    blocking::run(move || create_missing(&config, &topics)).await
}

fn create_missing(config: &KafkaConfig, topics: &BTreeSet<String>) -> Result<(), BrokerError> {
    let asker = Asker::new(config)?;
    let mut missing = Vec::new();
    for topic in topics {
        if state(&asker.metadata(Some(topic))?, topic) != TopicState::Ready {
            missing.push(topic.as_str());
        }
    }
    if missing.is_empty() {
        return Ok(());
    }
    let wanted = missing.iter().map(|topic| {
        let wanted = NewTopic::new(topic, config.partitions, TopicReplication::Fixed(config.replication));
        // With three copies two must have a message before it counts, so that one may be lost.
        if config.replication >= 3 { wanted.set("min.insync.replicas", "2") } else { wanted }
    });
    let wanted: Vec<_> = wanted.collect();
    let answer = Admin::new(config)?
        .ask("creating kafka topics", async |admin, options| admin.create_topics(&wanted, options).await)?;
    for created in answer {
        match created {
            Ok(topic) => tracing::info!(topic, partitions = config.partitions, "kafka topic created"),
            Err((_, RDKafkaErrorCode::TopicAlreadyExists)) => {}
            Err((topic, code)) => return Err(creation_error(&topic, code)),
        }
    }
    wait_until_ready(&asker, &missing)
}

fn creation_error(topic: &str, code: RDKafkaErrorCode) -> BrokerError {
    use RDKafkaErrorCode as Code;
    let text = format!("creating kafka topic `{topic}`: {code}");
    match code {
        Code::TopicAuthorizationFailed | Code::ClusterAuthorizationFailed => BrokerError::Destination(text),
        Code::InvalidTopic
        | Code::InvalidPartitions
        | Code::InvalidReplicationFactor
        | Code::InvalidConfig
        | Code::PolicyViolation => BrokerError::Refused(text),
        _ => BrokerError::Unavailable(text),
    }
}

// Creation is answered by the controller; brokers hear of it a little later.
fn wait_until_ready(asker: &Asker, topics: &[&str]) -> Result<(), BrokerError> {
    let end = Instant::now() + client::ASK_DEADLINE;
    for topic in topics {
        while let TopicState::NotReady(reason) = state(&asker.metadata(Some(topic))?, topic) {
            if Instant::now() >= end {
                return Err(BrokerError::Destination(format!("kafka topic `{topic}` was created, but {reason}")));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r19_batches_follow_the_smallest_topic_and_messages_the_largest() {
        let sizes = TopicSizes::default();
        let first = sizes.sizes();
        sizes.learn("usual", Some(1_048_588));
        sizes.learn("unknown", None);
        assert!(first.covers(sizes.sizes()));
        sizes.learn("small", Some(20_000));
        assert_eq!(sizes.sizes(), Sizes { message_max: MESSAGE_MAX_FLOOR, batch_max: 20_000 });
        assert!(!first.covers(sizes.sizes()));
        sizes.learn("large", Some(5_000_000));
        assert_eq!(sizes.sizes(), Sizes { message_max: 5_000_000, batch_max: 20_000 });
        assert!(sizes.knows("unknown") && !sizes.knows("other"));
    }
}
