//! One member of a consumer group, for async code.
//!
//! Guarantees: events come in the order in which they happened. `next` loses no event when it is
//! dropped. `close` commits what was acknowledged and leaves the group; dropping the subscriber
//! does the same without waiting.

use std::collections::{BTreeSet, HashSet};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use rdkafka::config::FromClientConfigAndContext;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::assignment::UNKNOWN_END;
use super::blocking;
use super::client::{self, ASK_DEADLINE, OPEN_DEADLINE};
use super::config::KafkaConfig;
use super::poller::{self, MemberContext, PollerState};
use super::{properties, topology};
use crate::broker::{Begun, Event, PartitionId, Subscriber, Subscription, TopicState};
use crate::error::BrokerError;
use crate::inbox::rules::position::{BrokerOffsets, Position, start};
use crate::task;
use crate::time::pace::sleep_unless;

const CLOSE_DEADLINE: Duration = Duration::from_secs(10);
const ASK_AGAIN: Duration = Duration::from_millis(100);
/// How often it is asked whether each partition has a leader.
const ASK_LEADERS: Duration = Duration::from_secs(60);
/// The same while one has none, so that this is not shown for long once it has one.
const ASK_LEADERS_AGAIN: Duration = Duration::from_secs(5);

pub(super) struct KafkaSubscriber {
    _leaves: LeavesOnDrop,
    shared: Arc<PollerState>,
    events: mpsc::UnboundedReceiver<Result<Event, BrokerError>>,
    // The thread owns the consumer, because destroying it waits.
    consumer: Weak<BaseConsumer<MemberContext>>,
    /// Cancelled when the thread has ended, also by a panic.
    ended: CancellationToken,
    config: Arc<KafkaConfig>,
    // Assigned sources for which `begin` was not called yet.
    unbegun: Vec<PartitionId>,
}

impl KafkaSubscriber {
    /// Creates missing topics where `create_topics` is on, connects, logs which topics are missing,
    /// and starts to join the group.
    pub(super) async fn open(config: &Arc<KafkaConfig>, subscription: &Subscription) -> Result<Self, BrokerError> {
        let topics = subscription.topics.clone();
        if topics.is_empty() {
            return Err(BrokerError::Refused(format!("consumer `{}` names no topics", subscription.consumer)));
        }
        if let Some(topic) = topics.iter().find(|topic| topic.starts_with('^')) {
            return Err(BrokerError::Refused(format!("`{topic}` is no topic: patterns are not supported")));
        }
        let (sender, events) = mpsc::unbounded_channel();
        let (rows_max, bytes_max) = (subscription.in_flight_max, config.in_flight_bytes_max);
        let shared = Arc::new(PollerState::new(sender, rows_max, bytes_max, subscription.drain));
        let settings = client::member(config, subscription.group());
        let context = MemberContext(Arc::clone(&shared));
        if let Err(error) = topology::declare(config, &topics).await {
            tracing::warn!(%error, "kafka topics could not be created; the consumer waits for them");
        }
        let (open, asking) = (Arc::clone(&shared), Arc::clone(config));
        let leaves = LeavesOnDrop(Arc::clone(&shared));
        let (consumer, ended) = blocking::run(move || {
            let consumer = BaseConsumer::from_config_and_context(&settings, context)
                .map_err(|error| properties::refused(&error))?;
            let serve = || poller::serve(&consumer, &open);
            blocking::reach(consumer.client(), &open.reports, serve)?;
            say_what_is_missing(&asking, &consumer, &open, &topics)?;
            let names: Vec<&str> = topics.iter().map(String::as_str).collect();
            consumer.subscribe(&names).map_err(|error| BrokerError::Session(format!("subscribing: {error}")))?;
            let consumer = Arc::new(consumer);
            let weak = Arc::downgrade(&consumer);
            let ended = blocking::on_a_thread("kafka consumer", move || poller::run(consumer, &open, &asking))?;
            Ok((weak, ended))
        })
        .await?;
        drop(task::spawn(watch_leaders(Arc::clone(&shared), consumer.clone(), ended.clone())));
        let (config, unbegun) = (Arc::clone(config), Vec::new());
        Ok(Self { _leaves: leaves, shared, events, consumer, ended, config, unbegun })
    }
}

/// Makes the polling thread leave the group, also one whose caller did not wait for it to begin.
struct LeavesOnDrop(Arc<PollerState>);

impl Drop for LeavesOnDrop {
    fn drop(&mut self) {
        self.0.close();
    }
}

fn say_what_is_missing(
    config: &KafkaConfig,
    consumer: &BaseConsumer<MemberContext>,
    shared: &PollerState,
    topics: &[String],
) -> Result<(), BrokerError> {
    for topic in topics {
        let serve = || poller::serve(consumer, shared);
        let metadata = blocking::metadata(consumer.client(), &shared.reports, Some(topic), serve)?;
        if let TopicState::NotReady(reason) = topology::state(topology::find(&metadata, topic)) {
            let remedy = topology::how_to_create(config, topic);
            tracing::warn!(topic, reason, remedy, "a kafka topic cannot be consumed yet: waiting for it");
        }
    }
    Ok(())
}

#[async_trait]
impl Subscriber for KafkaSubscriber {
    async fn next(&mut self) -> Result<Event, BrokerError> {
        let unbegun: Vec<_> = self.unbegun.iter().map(|id| (id.clone(), None)).collect();
        self.begin(unbegun).await?;
        let event = tokio::select! {
            biased;
            Some(event) = self.events.recv() => event?,
            () = self.ended.cancelled() => {
                return Err(BrokerError::Session("the thread of the kafka consumer ended".to_owned()));
            }
        };
        match &event {
            Event::Assigned(sources) => self.unbegun.extend(sources.iter().cloned()),
            Event::Deliveries(deliveries) => {
                let mut assignment = self.shared.assignment();
                // Deliveries of one source stand together, in order: the last one covers the run.
                for run in deliveries.chunk_by(|one, next| one.source == next.source) {
                    if let Some(last) = run.last() {
                        assignment.hand(&last.source, last.sequence);
                    }
                }
            }
            Event::Revoked { .. } => {}
        }
        Ok(event)
    }

    async fn begin(&mut self, remembered: Vec<(PartitionId, Option<Position>)>) -> Result<Vec<Begun>, BrokerError> {
        if remembered.is_empty() {
            return Ok(Vec::new());
        }
        let (shared, config, consumer) = (Arc::clone(&self.shared), Arc::clone(&self.config), self.consumer.clone());
        let sources: Vec<PartitionId> = remembered.iter().map(|(source, _)| source.clone()).collect();
        let found = blocking::run(move || found(&config, &shared, &consumer, &sources)).await?;
        let mut assignment = self.shared.assignment();
        let begun = remembered.into_iter().zip(found).map(|((source, position), found)| {
            let start = start(position.as_ref(), &found);
            assignment.begin(&source, start.at, found.end);
            self.unbegun.retain(|unbegun| *unbegun != source);
            Begun { source, topic_id: found.topic_id, start }
        });
        let begun = begun.collect();
        drop(assignment);
        self.shared.wake();
        Ok(begun)
    }

    fn away(&self) -> Option<String> {
        let reports = &self.shared.reports;
        let denied = || reports.denied().map(|(_, why)| format!("a kafka topic may not be read: {why}"));
        reports.all_down().or_else(denied).or_else(|| {
            let assignment = self.shared.assignment();
            if let Some((count, PartitionId { place, partition, .. }, why)) = assignment.unreadable() {
                return Some(format!(
                    "kafka partitions with a record that cannot be read: {count}, {place}/{partition} among them: {why}; \
                     nothing behind it in its partition is consumed before it can be read, is deleted, or is skipped on \
                     purpose: see docs/reference/tables.md"
                ));
            }
            let (count, PartitionId { place, partition, .. }) = assignment.leaderless()?;
            Some(format!("kafka partitions without a leader: {count}, {place}/{partition} among them"))
        })
    }

    async fn acknowledge(&mut self, source: &PartitionId, through: i64) -> Result<(), BrokerError> {
        // False for an assignment that has ended. That loses nothing: the new owner gets
        // duplicates, which the inbox knows.
        if self.shared.assignment().acknowledge(source, through) {
            self.shared.wake();
        }
        Ok(())
    }

    async fn finished(&mut self, source: &PartitionId, sequences: &[i64]) {
        let mut assignment = self.shared.assignment();
        sequences.iter().for_each(|sequence| assignment.spare(source, *sequence, true));
        drop(assignment);
        self.shared.wake();
    }

    fn set_aside(&mut self, source: &PartitionId, sequence: i64) {
        self.shared.assignment().spare(source, sequence, false);
        self.shared.wake();
    }

    fn refuse(&mut self, source: &PartitionId) {
        self.shared.assignment().refuse(source);
        self.shared.wake();
    }

    fn pause(&mut self, paused: bool) {
        self.shared.pause(paused);
    }

    fn has_no_share(&self) -> bool {
        self.shared.assignment().has_no_share()
    }

    async fn caught_up(&mut self) -> Result<bool, BrokerError> {
        Ok(self.shared.assignment().is_caught_up())
    }

    async fn close(self: Box<Self>) {
        let ended = self.ended.clone();
        // Drops the receiver of events, with the guards of revocations in it.
        drop(self);
        if tokio::time::timeout(CLOSE_DEADLINE, ended.cancelled()).await.is_err() {
            tracing::warn!(
                "the kafka consumer did not leave its group within {CLOSE_DEADLINE:?}; it is left to itself"
            );
        }
    }
}

/// Asks until the subscriber ends which partitions have no leader. librdkafka waits for a leader by
/// itself, and says nothing.
async fn watch_leaders(
    shared: Arc<PollerState>,
    consumer: Weak<BaseConsumer<MemberContext>>,
    ended: CancellationToken,
) {
    let pause = || match shared.assignment().leaderless() {
        Some(_) => ASK_LEADERS_AGAIN,
        None => ASK_LEADERS,
    };
    while sleep_unless(&ended, pause()).await {
        let (consumer, shared) = (consumer.clone(), Arc::clone(&shared));
        if let Err(error) = blocking::run(move || look_for_leaders(&consumer, &shared)).await {
            tracing::debug!(%error, "it is not known which kafka partitions have a leader");
        }
    }
}

fn look_for_leaders(consumer: &Weak<BaseConsumer<MemberContext>>, shared: &PollerState) -> Result<(), BrokerError> {
    let begun = shared.assignment().begun();
    let Some(consumer) = consumer.upgrade() else { return Ok(()) };
    let away = leaderless(&consumer, &begun)?;
    shared.assignment().note_leaders(&begun, |source| !away.contains(source));
    Ok(())
}

/// The offsets that the broker has for these partitions, in their order. Retries up to a deadline,
/// because a leader may be under election. A partition that has none then does not stop the others.
fn found(
    config: &KafkaConfig,
    shared: &PollerState,
    consumer: &Weak<BaseConsumer<MemberContext>>,
    sources: &[PartitionId],
) -> Result<Vec<BrokerOffsets>, BrokerError> {
    let gone = || BrokerError::Session("the kafka consumer is closed".to_owned());
    let topics: BTreeSet<&str> = sources.iter().map(|source| &*source.place).collect();
    // Topics that were made after the consumer was opened: their ids are not known yet.
    let unknown: Vec<&str> = topics.into_iter().filter(|topic| shared.reports.topic_id(topic).is_none()).collect();
    if !unknown.is_empty() {
        for (topic, id) in blocking::topic_ids(config, &unknown)? {
            shared.reports.set_topic_id(&topic, &id);
        }
    }
    let deadline = Instant::now() + OPEN_DEADLINE;
    loop {
        let consumer = consumer.upgrade().ok_or_else(gone)?;
        match offsets(&consumer, shared, sources, &HashSet::new()) {
            Err(error) if Instant::now() < deadline => {
                tracing::debug!(%error, "the offsets of kafka partitions are not known yet");
                drop(consumer);
                std::thread::sleep(ASK_AGAIN);
            }
            Err(error) => {
                let away = leaderless(&consumer, sources)?;
                if away.is_empty() {
                    return Err(error);
                }
                tracing::warn!(partitions = away.len(), "kafka partitions have no leader; the others are read");
                return offsets(&consumer, shared, sources, &away);
            }
            known => return known,
        }
    }
}

fn leaderless<'a>(
    consumer: &BaseConsumer<MemberContext>,
    sources: &'a [PartitionId],
) -> Result<HashSet<&'a PartitionId>, BrokerError> {
    let mut away: HashSet<&PartitionId> = sources.iter().collect();
    for topic in sources.iter().map(|source| &*source.place).collect::<BTreeSet<&str>>() {
        let metadata = consumer
            .fetch_metadata(Some(topic), ASK_DEADLINE)
            .map_err(|error| BrokerError::Unavailable(format!("kafka topic `{topic}`: {error}")))?;
        let partitions = topology::find(&metadata, topic).map_or(&[][..], |found| found.partitions());
        let led: HashSet<i32> =
            partitions.iter().filter(|found| topology::has_leader(found)).map(|found| found.id()).collect();
        away.retain(|source| &*source.place != topic || !led.contains(&source.partition));
    }
    Ok(away)
}

/// The offsets of these partitions. Of those that are away the group's offset alone is known.
fn offsets(
    consumer: &BaseConsumer<MemberContext>,
    shared: &PollerState,
    sources: &[PartitionId],
    away: &HashSet<&PartitionId>,
) -> Result<Vec<BrokerOffsets>, BrokerError> {
    let failed = |error: rdkafka::error::KafkaError| BrokerError::Unavailable(format!("kafka offsets: {error}"));
    let of_all = |offset: Offset, but: &HashSet<&PartitionId>| {
        let mut list = TopicPartitionList::with_capacity(sources.len());
        for source in sources.iter().filter(|source| !but.contains(source)) {
            list.add_partition_offset(&source.place, source.partition, offset).map_err(failed)?;
        }
        Ok::<_, BrokerError>(list)
    };
    // A logical offset in place of a time asks for that offset. librdkafka refuses an empty list.
    let asked = |offset: Offset| match of_all(offset, away)? {
        none if none.count() == 0 => Ok(none),
        list => consumer.offsets_for_times(list, ASK_DEADLINE).map_err(failed),
    };
    let (ends, firsts) = (asked(Offset::End)?, asked(Offset::Beginning)?);
    let committed = of_all(Offset::Invalid, &HashSet::new())?;
    let committed = consumer.committed_offsets(committed, ASK_DEADLINE).map_err(failed)?;
    let of = |list: &TopicPartitionList, source: &PartitionId| {
        let element = list.find_partition(&source.place, source.partition)?;
        element.error().ok()?;
        if let Offset::Offset(offset) = element.offset() { Some(offset) } else { None }
    };
    let found = |source: &PartitionId| {
        let unknown = || {
            BrokerError::Unavailable(format!(
                "kafka does not tell the offsets of {}/{}",
                source.place, source.partition
            ))
        };
        let note = committed.find_partition(&source.place, source.partition).ok_or_else(unknown)?;
        note.error().map_err(failed)?;
        let (topic_id, committed) = (shared.reports.topic_id(&source.place), of(&committed, source));
        // It begins where the group or the database stands, else at the first record. Once it has a
        // leader, an offset that it does not have ends the session, and the next one finds out why.
        if away.contains(source) {
            return Ok(BrokerOffsets { topic_id, committed, first: 0, end: UNKNOWN_END });
        }
        Ok(BrokerOffsets {
            topic_id,
            committed,
            first: of(&firsts, source).ok_or_else(unknown)?,
            end: of(&ends, source).ok_or_else(unknown)?,
        })
    };
    sources.iter().map(found).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    // Shown by: the subscriber holding the other end of its own events. A panic in a callback of
    // librdkafka was not noticed then.
    #[tokio::test]
    async fn a_thread_that_ended_in_disorder_ends_the_subscriber() {
        let (sender, events) = mpsc::unbounded_channel();
        let shared = Arc::new(PollerState::new(sender, 10, 1_000, Duration::ZERO));
        let ended = CancellationToken::new();
        let thread = ended.clone().drop_guard();
        let config = Arc::new(KafkaConfig::from_url("kafka://b:1").expect("a URL"));
        let mut subscriber = KafkaSubscriber {
            _leaves: LeavesOnDrop(Arc::clone(&shared)),
            shared,
            events,
            consumer: Weak::new(),
            ended,
            config,
            unbegun: Vec::new(),
        };
        drop(thread);
        for _ in 0..2 {
            let heard = tokio::time::timeout(Duration::from_secs(1), subscriber.next()).await;
            assert!(matches!(heard, Ok(Err(BrokerError::Session(_)))), "{heard:?}");
        }
    }
}
