//! Topics: whether they can be used, their size limits, and creating them where that was asked for.
//!
//! Promises: nothing is created unless `create_topics` is on. A topic is sent to only when the
//! broker's metadata shows it with a leader of a partition, and with as many copies in sync in
//! every partition as a producer that waits for all of them needs (R16, R19).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rdkafka::admin::{NewTopic, ResourceSpecifier, TopicReplication};
use rdkafka::error::RDKafkaErrorCode;
use rdkafka::metadata::{Metadata, MetadataPartition, MetadataTopic};

use super::blocking::{self, Admin, Asker};
use super::client::{self, Sizes};
use super::config::KafkaConfig;
use super::errors;
use crate::broker::{Subscription, TopicState};
use crate::error::BrokerError;
use crate::inbox::rules::horizon::TopicRetention;

// Above the broker's default limit (1,048,588), so that a session need not start anew for it.
const MESSAGE_MAX_FLOOR: usize = 2 << 20;
const BATCH_MAX: usize = 1_000_000;
// Batches become no smaller than this where a topic refuses them and its limit is not known.
const BATCH_MIN: usize = 16 << 10;
/// Up to so many topics are asked for by name; for more, one request asks for all topics.
const ASKED_ONE_BY_ONE: usize = 8;

pub(super) type TopicSettings = BTreeMap<String, String>;

/// What the broker told about a topic; `None` for what it did not tell.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Limits {
    /// `max.message.bytes`, the most bytes of a batch as the broker counts them.
    pub(super) message_max: Option<usize>,
    /// `min.insync.replicas`, how many copies must be in sync.
    pub(super) in_sync_min: Option<usize>,
}

impl Limits {
    fn of(settings: &TopicSettings) -> Self {
        let number = |name: &str| settings.get(name)?.parse().ok();
        Self { message_max: number("max.message.bytes"), in_sync_min: number("min.insync.replicas") }
    }
}

/// The limits of the topics that were seen; all sessions of a process share them.
#[derive(Debug, Default)]
pub(super) struct TopicLimits {
    known: Mutex<BTreeMap<String, Limits>>,
    partitions: Mutex<HashMap<String, Counted>>,
    /// The id of each topic, where the broker tells it. Only a topic that was deleted and made anew
    /// gets another one.
    ids: Mutex<HashMap<String, String>>,
    /// Topics that were made anew, and of which nobody told yet.
    made_anew: Mutex<Vec<String>>,
    /// The largest batch, once a topic whose limit is not known has refused a larger one.
    batch_max: Mutex<Option<usize>>,
}

/// How many partitions a topic had.
#[derive(Debug, Clone, Copy)]
struct Counted {
    /// When it was seen last.
    last: usize,
    /// The most that it ever had: a broker that has not heard of a change yet still tells fewer.
    most: usize,
    /// True where the topic was made anew since: fewer are no lagging answer then.
    made_anew: bool,
}

/// A topic that got partitions since it was seen last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Grown {
    pub(super) topic: String,
    pub(super) before: usize,
    pub(super) now: usize,
}

impl TopicLimits {
    /// Notes how many partitions a topic has, 0 where it does not exist. Where they have become
    /// more, returns this once.
    pub(super) fn saw_partitions(&self, topic: &str, now: usize) -> Option<Grown> {
        let mut partitions = self.partitions.lock();
        if now == 0 {
            // One that is made anew later has no messages from before.
            partitions.remove(topic);
            return None;
        }
        let Some(counted) = partitions.get_mut(topic) else {
            partitions.insert(topic.to_owned(), Counted { last: now, most: now, made_anew: false });
            return None;
        };
        let before = counted.most;
        let most = if counted.made_anew { now } else { now.max(before) };
        *counted = Counted { last: now, most, made_anew: false };
        (before < now).then(|| Grown { topic: topic.to_owned(), before, now })
    }

    /// Notes the id of a topic. Another id than before is a topic that was made anew while messages
    /// of its keys may be on their way: it is told once for all sessions of a process (R19).
    pub(super) fn saw_id(&self, topic: &str, id: &str) {
        let known = self.ids.lock().insert(topic.to_owned(), id.to_owned());
        if known.is_none_or(|known| known == id) {
            return;
        }
        if let Some(counted) = self.partitions.lock().get_mut(topic) {
            // The number that was told last may be that of the new topic already.
            *counted = Counted { most: counted.last, made_anew: true, ..*counted };
        }
        self.made_anew.lock().push(topic.to_owned());
    }

    /// Takes the topics that were made anew since the last call.
    pub(super) fn take_made_anew(&self) -> Vec<String> {
        std::mem::take(&mut self.made_anew.lock())
    }

    /// The topics among these that the broker was not asked about.
    fn unknown<'a>(&self, topics: &[&'a str]) -> BTreeSet<&'a str> {
        let known = self.known.lock();
        topics.iter().copied().filter(|topic| !known.contains_key(*topic)).collect()
    }

    /// Asks the broker, in one request, about topics that it was not asked about. Where it does not
    /// tell, the defaults are used.
    pub(super) fn learn(&self, config: &KafkaConfig, topics: &[&str]) {
        let unknown = self.unknown(topics);
        if unknown.is_empty() {
            return;
        }
        let found = settings(config, &unknown).unwrap_or_else(|error| {
            // Access is denied, or this broker does not know the request.
            tracing::debug!(%error, "settings of topics cannot be read");
            BTreeMap::new()
        });
        let mut known = self.known.lock();
        for topic in unknown {
            known.insert(topic.to_owned(), found.get(topic).map(Limits::of).unwrap_or_default());
        }
    }

    /// The largest message that a topic takes; `None` where that is not known.
    pub(super) fn message_max(&self, topic: &str) -> Option<usize> {
        self.known.lock().get(topic)?.message_max
    }

    /// Notes that a topic refused a batch of a session whose batches have at most so many bytes.
    /// Where the broker does not tell the topic's limit, as to a user without that right, the
    /// batches of later sessions are half as large: otherwise the topic would refuse them for ever.
    pub(super) fn refused_batch(&self, topic: &str, batch_max: usize) {
        if self.message_max(topic).is_some() {
            return;
        }
        let half = (batch_max / 2).max(BATCH_MIN);
        let mut known = self.batch_max.lock();
        *known = Some(known.map_or(half, |known| known.min(half)));
    }

    /// Forgets the limits of a topic, so that the broker is asked again.
    pub(super) fn forget(&self, topic: &str) {
        self.known.lock().remove(topic);
    }

    pub(super) fn sizes(&self) -> Sizes {
        let batch_max = self.batch_max.lock().unwrap_or(BATCH_MAX);
        let known = self.known.lock();
        let known = known.values().filter_map(|limits| limits.message_max);
        known.fold(Sizes { message_max: MESSAGE_MAX_FLOOR, batch_max }, |sizes, max| Sizes {
            message_max: sizes.message_max.max(max),
            batch_max: sizes.batch_max.min(max),
        })
    }

    /// Why an existing topic takes no messages: too few copies of a partition are in sync. Never
    /// requires more copies than the partition has: Kafka 4 does the same, and an older broker
    /// answers for itself when it gets the message.
    pub(super) fn short_of_copies(&self, topic: &MetadataTopic) -> Option<String> {
        let wanted = self.known.lock().get(topic.name())?.in_sync_min?;
        let copies = |partition: &MetadataPartition| Copies {
            partition: partition.id(),
            in_sync: partition.isr().len(),
            all: partition.replicas().len(),
        };
        short_of_copies(wanted, topic.partitions().iter().map(copies))
    }
}

#[derive(Debug, Clone, Copy)]
struct Copies {
    partition: i32,
    in_sync: usize,
    all: usize,
}

/// Describes the first partition that has fewer copies in sync than wanted. A partition with fewer
/// copies than wanted needs all of them in sync.
fn short_of_copies(wanted: usize, mut partitions: impl Iterator<Item = Copies>) -> Option<String> {
    let Copies { partition, in_sync, .. } = partitions.find(|copies| copies.in_sync < wanted.min(copies.all))?;
    Some(format!("partition {partition} has {in_sync} in-sync replicas, and `min.insync.replicas` is {wanted}"))
}

/// Asks for the metadata of topics, with as few requests as are worth it.
pub(super) fn asked(
    topics: &[&str],
    ask: impl Fn(Option<&str>) -> Result<Metadata, BrokerError>,
) -> Result<Vec<Metadata>, BrokerError> {
    if topics.len() > ASKED_ONE_BY_ONE {
        return Ok(vec![ask(None)?]);
    }
    topics.iter().map(|topic| ask(Some(*topic))).collect()
}

pub(super) fn by_name(answers: &[Metadata]) -> HashMap<&str, &MetadataTopic> {
    answers.iter().flat_map(Metadata::topics).map(|topic| (topic.name(), topic)).collect()
}

pub(super) fn find<'a>(metadata: &'a Metadata, name: &str) -> Option<&'a MetadataTopic> {
    metadata.topics().iter().find(|topic| topic.name() == name)
}

/// Whether a topic can be used, from its metadata.
pub(super) fn state(topic: Option<&MetadataTopic>) -> TopicState {
    let Some(topic) = topic else {
        return TopicState::NotReady("the topic does not exist".to_owned());
    };
    match topic_error(topic) {
        Some(code) => TopicState::NotReady(errors::topic_trouble(code)),
        None if topic.partitions().iter().any(has_leader) => TopicState::Ready,
        None => TopicState::NotReady("no partition has a leader".to_owned()),
    }
}

pub(super) fn has_leader(partition: &MetadataPartition) -> bool {
    partition.leader() >= 0
}

/// How many partitions a topic has: 0 where it does not exist, `None` where that is not told.
pub(super) fn partitions(topic: Option<&MetadataTopic>) -> Option<usize> {
    use RDKafkaErrorCode::{UnknownTopic, UnknownTopicOrPartition};
    let Some(topic) = topic else { return Some(0) };
    match topic_error(topic) {
        None => Some(topic.partitions().len()),
        Some(UnknownTopic | UnknownTopicOrPartition) => Some(0),
        Some(_) => None,
    }
}

fn topic_error(topic: &MetadataTopic) -> Option<RDKafkaErrorCode> {
    topic.error().map(RDKafkaErrorCode::from)
}

/// The settings of topics. A topic whose settings cannot be read is left out.
pub(super) fn settings(
    config: &KafkaConfig,
    topics: &BTreeSet<&str>,
) -> Result<BTreeMap<String, TopicSettings>, BrokerError> {
    let resources: Vec<_> = topics.iter().map(|topic| ResourceSpecifier::Topic(topic)).collect();
    let answer = Admin::new(config)?
        .ask("settings of kafka topics", async |admin, options| admin.describe_configs(&resources, options).await)?;
    let mut found = BTreeMap::new();
    // The answers have the order of the questions.
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

/// How long a topic keeps its records; `None` where its settings do not tell.
pub(super) fn kept(settings: &TopicSettings) -> Option<TopicRetention> {
    if settings.get("cleanup.policy").is_some_and(|policy| policy.contains("compact")) {
        return Some(TopicRetention::Compacted);
    }
    let kept = settings.get("retention.ms")?.parse::<i64>().ok()?;
    Some(u64::try_from(kept).map_or(TopicRetention::Unlimited, |kept| TopicRetention::For(Duration::from_millis(kept))))
}

/// The longest retention of these topics. A topic whose settings cannot be read is left out, and
/// the log says so.
pub(super) async fn retention(
    config: &Arc<KafkaConfig>,
    topics: &[String],
) -> Result<Option<TopicRetention>, BrokerError> {
    let (config, topics) = (Arc::clone(config), topics.to_vec());
    blocking::run(move || {
        let settings = settings(&config, &topics.iter().map(String::as_str).collect())?;
        for topic in topics.iter().filter(|topic| !settings.contains_key(*topic)) {
            tracing::warn!(
                topic,
                "the settings of this topic cannot be read: whether it keeps messages longer than the horizon is not known"
            );
        }
        Ok(settings.values().filter_map(kept).reduce(TopicRetention::or_longer))
    })
    .await
}

/// The command with which an operator creates a topic.
pub(super) fn how_to_create(config: &KafkaConfig, topic: &str) -> String {
    let (servers, partitions) = (config.bootstrap(), config.partitions);
    let copies = match config.replication {
        -1 => "--replication-factor 3 --config min.insync.replicas=2".to_owned(),
        copies if copies >= 3 => format!("--replication-factor {copies} --config min.insync.replicas=2"),
        copies => format!("--replication-factor {copies}"),
    };
    let by_itself = match config.create_topics {
        true => "`publisher` and `consumer` try to create it when they start",
        false => "`[broker.kafka] create_topics = true`",
    };
    format!(
        "`kafka-topics.sh --bootstrap-server {servers} --create --topic {topic} --partitions {partitions} {copies}`, \
         or {by_itself}"
    )
}

/// Creates the topics that are missing, where `create_topics` is on.
pub(super) async fn declare(config: &Arc<KafkaConfig>, topics: &[String]) -> Result<(), BrokerError> {
    if !config.create_topics || topics.is_empty() {
        return Ok(());
    }
    // A set, because a name that is given twice makes librdkafka answer without a result, and
    // rdkafka 0.39 crashes on that.
    let (config, topics) = (Arc::clone(config), topics.iter().cloned().collect::<BTreeSet<_>>());
    blocking::run(move || create_missing(&config, &topics)).await
}

fn create_missing(config: &KafkaConfig, topics: &BTreeSet<String>) -> Result<(), BrokerError> {
    let asker = Asker::new(config)?;
    let topics: Vec<&str> = topics.iter().map(String::as_str).collect();
    let missing: Vec<&str> = not_ready(&asker, &topics)?.into_iter().map(|(topic, _)| topic).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let wanted = missing.iter().map(|topic| {
        let wanted = NewTopic::new(topic, config.partitions, TopicReplication::Fixed(config.replication));
        // With three copies, two must have a message, so that one copy may be lost.
        if config.replication >= 3 { wanted.set("min.insync.replicas", "2") } else { wanted }
    });
    let wanted: Vec<_> = wanted.collect();
    let answer = Admin::new(config)?
        .ask("creating kafka topics", async |admin, options| admin.create_topics(&wanted, options).await)?;
    let mut refused: BTreeMap<String, RDKafkaErrorCode> = BTreeMap::new();
    for created in answer {
        match created {
            Ok(topic) => tracing::info!(topic, partitions = config.partitions, "kafka topic created"),
            Err((_, RDKafkaErrorCode::TopicAlreadyExists)) => {}
            Err((topic, code)) => _ = refused.insert(topic, code),
        }
    }
    // A refused topic does not stop the others.
    let made: Vec<&str> = missing.into_iter().filter(|topic| !refused.contains_key(*topic)).collect();
    wait_until_ready(&asker, made)?;
    refused.pop_first().map_or(Ok(()), |(topic, code)| Err(creation_error(&topic, code)))
}

/// The topics among these that are not ready, each with the reason.
fn not_ready<'a>(asker: &Asker, topics: &[&'a str]) -> Result<Vec<(&'a str, String)>, BrokerError> {
    let answers = asked(topics, |topic| asker.metadata(topic))?;
    let all = by_name(&answers);
    let not_ready = topics.iter().filter_map(|topic| match state(all.get(topic).copied()) {
        TopicState::Ready => None,
        TopicState::NotReady(why) => Some((*topic, why)),
    });
    Ok(not_ready.collect())
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

pub(super) async fn remove(config: &Arc<KafkaConfig>, subscriptions: &[Subscription]) -> Result<(), BrokerError> {
    let topics: BTreeSet<String> = subscriptions.iter().flat_map(|subscription| subscription.topics.clone()).collect();
    let groups: BTreeSet<String> = subscriptions.iter().map(|subscription| subscription.group().to_owned()).collect();
    let config = Arc::clone(config);
    blocking::run(move || {
        let topics: Vec<&str> = topics.iter().map(String::as_str).collect();
        let groups: Vec<&str> = groups.iter().map(String::as_str).collect();
        let admin = Admin::new(&config)?;
        if !topics.is_empty() {
            let gone = admin
                .ask("deleting kafka topics", async |admin, options| admin.delete_topics(&topics, options).await)?;
            removed(gone)?;
        }
        // A member that was killed stays in its group until its session ends. The broker that
        // coordinates a group may still load it, or hand it to another broker.
        let end = Instant::now() + config.session_timeout + client::ASK_DEADLINE;
        for group in groups {
            loop {
                let gone = admin.ask("deleting a kafka group", async |admin, options| {
                    admin.delete_groups(&[group], options).await
                })?;
                match gone.first() {
                    Some(Err((_, code))) if passes(*code) && Instant::now() < end => {
                        std::thread::sleep(Duration::from_millis(100));
                    }
                    _ => break removed(gone)?,
                }
            }
        }
        Ok(())
    })
    .await
}

/// Whether a group that cannot be deleted now can be deleted a little later.
fn passes(code: RDKafkaErrorCode) -> bool {
    use RDKafkaErrorCode::{CoordinatorLoadInProgress, CoordinatorNotAvailable, NonEmptyGroup, NotCoordinator};
    matches!(code, NonEmptyGroup | CoordinatorLoadInProgress | CoordinatorNotAvailable | NotCoordinator)
}

fn removed(answers: Vec<Result<String, (String, RDKafkaErrorCode)>>) -> Result<(), BrokerError> {
    use RDKafkaErrorCode::{GroupIdNotFound, UnknownTopicOrPartition};
    let faults = answers.into_iter().filter_map(Result::err);
    match faults.into_iter().find(|(_, code)| !matches!(code, UnknownTopicOrPartition | GroupIdNotFound)) {
        None => Ok(()),
        Some((name, code)) => Err(BrokerError::Unavailable(format!("deleting `{name}` from kafka: {code}"))),
    }
}

// The controller answers the creation; the brokers learn of it a little later.
fn wait_until_ready(asker: &Asker, topics: Vec<&str>) -> Result<(), BrokerError> {
    let end = Instant::now() + client::ASK_DEADLINE;
    let mut left = topics;
    loop {
        let not_ready = not_ready(asker, &left)?;
        match not_ready.first() {
            None => return Ok(()),
            Some((topic, reason)) if Instant::now() >= end => {
                return Err(BrokerError::Destination(format!(
                    "kafka topic `{topic}` was created, but is not ready: {reason}"
                )));
            }
            Some(_) => left = not_ready.into_iter().map(|(topic, _)| topic).collect(),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shown by: comparing with `wanted` alone (a topic of one copy under
    /// `min.insync.replicas=2` is short then, and Kafka 4 takes messages to it).
    #[test]
    fn a_topic_is_short_of_copies_where_a_partition_has_fewer_in_sync_than_are_wanted_and_there() {
        let short = |wanted, partitions: &[(usize, usize)]| {
            let copies = |(partition, (in_sync, all)): (i32, &(usize, usize))| Copies {
                partition,
                in_sync: *in_sync,
                all: *all,
            };
            short_of_copies(wanted, (0..).zip(partitions).map(copies))
        };
        assert_eq!(short(2, &[(3, 3), (2, 3)]), None);
        assert_eq!(short(2, &[(1, 1)]), None);
        assert_eq!(short(1, &[(1, 3)]), None);
        let why = short(2, &[(3, 3), (1, 3), (0, 3)]);
        assert_eq!(why.as_deref(), Some("partition 1 has 1 in-sync replicas, and `min.insync.replicas` is 2"));
        assert!(short(3, &[(2, 3)]).is_some());
        assert!(short(1, &[(0, 1)]).is_some());
        assert_eq!(short(2, &[]), None);
    }

    /// Shown by: keeping the most that the old topic had; taking the number of a lagging broker.
    #[test]
    fn growth_is_told_of_a_topic_that_was_made_anew_with_fewer_partitions_than_it_ever_had() {
        let grown = |before, now| Some(Grown { topic: "t".to_owned(), before, now });
        // Its id is seen before its number of partitions, or behind it.
        for is_first in [true, false] {
            let limits = TopicLimits::default();
            limits.saw_id("t", "one");
            limits.saw_id("u", "other");
            assert_eq!(limits.saw_partitions("t", 6), None);
            if is_first {
                limits.saw_id("t", "two");
            }
            assert_eq!(limits.saw_partitions("t", 2), None);
            if !is_first {
                limits.saw_id("t", "two");
            }
            limits.saw_id("t", "two");
            assert_eq!(limits.saw_partitions("t", 4), grown(2, 4), "{is_first}");
            assert_eq!(limits.saw_partitions("t", 2), None);
            assert_eq!(limits.saw_partitions("t", 4), None, "a broker lagged");
        }
    }

    #[test]
    fn a_topic_that_got_partitions_is_told_once_and_one_that_was_away_is_not() {
        let limits = TopicLimits::default();
        assert_eq!(limits.saw_partitions("t", 3), None);
        assert_eq!(limits.saw_partitions("t", 3), None);
        let grown = Grown { topic: "t".to_owned(), before: 3, now: 6 };
        assert_eq!(limits.saw_partitions("t", 6), Some(grown));
        assert_eq!(limits.saw_partitions("t", 3), None);
        assert_eq!(limits.saw_partitions("t", 6), None);
        assert_eq!(limits.saw_partitions("u", 9), None);
        assert_eq!(limits.saw_partitions("t", 0), None);
        assert_eq!(limits.saw_partitions("t", 12), None);
    }

    #[test]
    fn r19_batches_follow_the_smallest_topic_and_messages_the_largest() {
        let limits = TopicLimits::default();
        let first = limits.sizes();
        let learn = |topic: &str, message_max| {
            limits.known.lock().insert(topic.to_owned(), Limits { message_max, in_sync_min: None });
        };
        learn("usual", Some(1_048_588));
        learn("unknown", None);
        assert!(first.covers(limits.sizes()));
        learn("small", Some(20_000));
        assert_eq!(limits.sizes(), Sizes { message_max: MESSAGE_MAX_FLOOR, batch_max: 20_000 });
        assert!(!first.covers(limits.sizes()));
        learn("large", Some(5_000_000));
        assert_eq!(limits.sizes(), Sizes { message_max: 5_000_000, batch_max: 20_000 });
        assert_eq!(limits.unknown(&["unknown", "other"]), BTreeSet::from(["other"]));
        limits.forget("small");
        assert_eq!(limits.sizes(), Sizes { message_max: 5_000_000, batch_max: BATCH_MAX });
        // One that tells its limit is asked for it again.
        limits.refused_batch("large", BATCH_MAX);
        assert_eq!(limits.sizes().batch_max, BATCH_MAX);
        for batch_max in [BATCH_MAX, BATCH_MAX, BATCH_MAX / 2] {
            limits.refused_batch("unknown", batch_max);
        }
        assert_eq!(limits.sizes().batch_max, BATCH_MAX / 4);
        limits.refused_batch("unknown", 1);
        assert_eq!(limits.sizes().batch_max, BATCH_MIN);
    }
}
