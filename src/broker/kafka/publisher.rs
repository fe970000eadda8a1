//! One publishing session: one idempotent producer.
//!
//! Guarantees: a row is settled by its delivery report only. Rows are sent in the order of `send`,
//! only to topics that were seen in the metadata (R19), and no later row of a refused key or topic
//! is sent (R15). Opening waits until the producer has its id, so that the first message does not
//! wait for it. Dropping the session purges what the client holds and waits for nothing.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use rdkafka::config::FromClientConfigAndContext;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::metadata::MetadataTopic;
use rdkafka::producer::{BaseProducer, BaseRecord, Producer, PurgeConfig};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::blocking;
use super::client::{self, ASK_DEADLINE, Sizes};
use super::config::KafkaConfig;
use super::context::Reports;
use super::opening::Place;
use super::properties;
use super::topology::{self, Grown, TopicLimits};
use super::window::{PublishContext, PublishWindow};
use super::{errors, wire};
use crate::broker::{Publisher, Settled, TopicState};
use crate::error::BrokerError;
use crate::message::OutgoingMessage;
use crate::observe;

// How often a session that is opening checks for a fatal error.
const WARM_LOOK: Duration = Duration::from_millis(50);
// How long after the client's own queue was full it is tried again.
const FULL_LOOK: Duration = Duration::from_millis(1);
// How long a session waits in all for the first rows of partitions: what the relay allows a topic
// to keep others waiting.
const PATIENCE: Duration = Duration::from_secs(1);
// How long an error that ended the producer waits for the report of the message that caused it.
const REPORT_DEADLINE: Duration = Duration::from_millis(250);
const CLOSE_DEADLINE: Duration = Duration::from_secs(5);
// How long the thread waits for reports at a time, and so for its stop. rdkafka cuts what is left
// of the time to whole milliseconds and asks without a pause in the last one: with 50 ms a thread
// that had nothing to do took 1.2 % of a core. The 50 us are what the wait is late by anyway.
const POLL: Duration = Duration::from_micros(100_050);
// Rows sent before other tasks get a turn: about 3 us each.
const ROWS_PER_TURN: usize = 128;

pub(super) struct KafkaPublisher {
    config: Arc<KafkaConfig>,
    limits: Arc<TopicLimits>,
    session: Session,
    ready: HashSet<String>,
    /// Rows that have a slot and wait for the first row of their partition (`opening`).
    waiting: HashMap<Place, VecDeque<(usize, OutgoingMessage)>>,
    /// How long `send` may still wait for first rows. Once it is used up, rows that wait are put
    /// aside, and the calls of `send` and `settle` hand them over.
    patience: Duration,
}

struct Session {
    producer: Arc<BaseProducer<PublishContext>>,
    window: Arc<PublishWindow>,
    reports: Arc<Reports>,
    sizes: Sizes,
    /// Cancelled when the thread has ended, also by a panic: nothing is sent or reported then.
    ended: CancellationToken,
    /// Since when the session is in doubt. The time is kept from one call of `settle` to the next,
    /// because the relay may give up a call before `REPORT_DEADLINE` is over.
    doubted_at: Option<Instant>,
    // Tells the thread to end. Dropped after `producer`, so that the thread's reference to the
    // producer is the last one.
    _stop: DropGuard,
}

impl KafkaPublisher {
    /// Opens a session. Returns when a first message would be sent without delay, or when the
    /// producer has got no id within `ASK_DEADLINE`.
    pub(super) async fn open(config: &Arc<KafkaConfig>, limits: &Arc<TopicLimits>) -> Result<Self, BrokerError> {
        let session = Session::open(config, limits, limits.sizes()).await?;
        let (config, limits) = (Arc::clone(config), Arc::clone(limits));
        Ok(Self { config, limits, session, ready: HashSet::new(), waiting: HashMap::new(), patience: PATIENCE })
    }

    fn doubt(&self) -> Option<BrokerError> {
        let ended = || self.session.fatal().map(|reason| format!("the kafka producer ended: {reason}"));
        let unpolled = || self.session.ended.is_cancelled().then(|| "nobody polls the kafka producer".to_owned());
        self.session.window.stale().or_else(ended).or_else(unpolled).map(BrokerError::Session)
    }

    /// Waits until there may be an outcome or room, or the thread has ended.
    async fn changed(&self) {
        self.session.ended.run_until_cancelled(self.session.window.changed()).await;
    }

    /// Makes the producer's sizes fit topics that were not seen before (R19). Returns true where it
    /// had to open another producer.
    async fn fit(&mut self, topics: &[String]) -> Result<bool, BrokerError> {
        let needed = self.limits.sizes();
        if self.session.sizes.covers(needed) {
            return Ok(false);
        }
        // Another producer has another window: rows in flight and outcomes that the relay did not
        // take would be lost with this one.
        if !self.session.window.is_unused() {
            return Err(BrokerError::Session(format!(
                "kafka topics take other sizes than those before them ({}): the session starts anew with batches of {} bytes \
                 and messages up to {} bytes",
                topics.join(", "),
                needed.batch_max,
                needed.message_max
            )));
        }
        self.session = Session::open(&self.config, &self.limits, needed).await?;
        // The new producer has seen no topic, and its window knows no partition.
        self.ready.clear();
        Ok(true)
    }

    /// The reason why a message certainly does not fit its topic, so that it is refused before it
    /// is sent. If the broker refused it, later messages of its key would already be in the client,
    /// which would send them: the order of the key would be lost. With compression the message may
    /// still fit, and the broker decides.
    fn too_large(&self, message: &OutgoingMessage) -> Option<String> {
        let bytes = message.payload.len() + message.key.as_ref().map_or(0, String::len);
        if bytes <= self.session.sizes.batch_max || self.config.compresses() {
            return None;
        }
        let max = self.limits.message_max(&message.topic).filter(|max| bytes > *max)?;
        let topic = &message.topic;
        Some(format!("the message has {bytes} bytes, and kafka topic `{topic}` takes {max} (`max.message.bytes`)"))
    }

    /// Passes one row to the client. Returns the slot where the client's own queue is full, so that
    /// the caller tries again.
    fn produce(&self, message: &OutgoingMessage, slot: usize) -> Option<usize> {
        let record: BaseRecord<'_, [u8], [u8], usize> = BaseRecord {
            topic: &message.topic,
            partition: None,
            payload: Some(&message.payload),
            key: message.key.as_deref().map(str::as_bytes),
            // The row's time, from the database's clock, not from this process.
            timestamp: Some(message.created_at.timestamp_millis()),
            headers: Some(wire::headers(message, &self.config.source)),
            delivery_opaque: slot,
        };
        match self.session.producer.send(record) {
            Ok(()) => None,
            Err((KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull), _)) => Some(slot),
            // The producer has ended, which says nothing about this row: `doubt` tells why.
            Err((KafkaError::MessageProduction(RDKafkaErrorCode::Fatal), _)) => None,
            Err((error, _)) => {
                let refusal = errors::refusal(&message.topic, &error);
                let key = message.key.as_deref().map(str::as_bytes);
                self.session.window.settle(slot, &message.topic, key, Err(refusal));
                None
            }
        }
    }

    /// Forgets topics that changed: each must be seen in the metadata again before it is used, with
    /// its limits and partitions. So the next message that is too large is refused before it is
    /// sent. Called also when the session is dropped: the sessions of a process share what they
    /// know about limits.
    fn distrust_changed_topics(&mut self) {
        tell_of_topics_made_anew(&self.limits);
        if let Some(topic) = self.session.window.take_refused_batch() {
            self.limits.refused_batch(&topic, self.session.sizes.batch_max);
        }
        for topic in self.session.window.changed_topics() {
            if self.ready.remove(&topic) {
                self.limits.forget(&topic);
            }
        }
    }

    /// The partition for which this row must wait: for its first row, or behind rows that wait.
    fn waits_for(&self, slot: usize, topic: &str, key: &[u8]) -> Option<i32> {
        let window = &self.session.window;
        let behind = |partition: &i32| self.waiting.contains_key(&(topic.to_owned(), *partition));
        if !self.waiting.is_empty()
            && let Some(partition) = window.partition_of(topic, key).filter(behind)
        {
            return Some(partition);
        }
        window.waits_for(slot, topic, key)
    }

    /// Waits until the row may be sent. Returns the partition where it has to be put aside.
    async fn wait_for_first(&mut self, slot: usize, topic: &str, key: &[u8]) -> Option<i32> {
        loop {
            let partition = self.waits_for(slot, topic, key)?;
            if self.patience.is_zero() || self.doubt().is_some() {
                return Some(partition);
            }
            let began = Instant::now();
            if self.session.window.wakes_when_opened() {
                let _changed_or_time = tokio::time::timeout(self.patience, self.changed()).await;
            }
            if !self.go_on() {
                tokio::time::sleep(FULL_LOOK).await;
            }
            self.patience = self.patience.saturating_sub(began.elapsed());
        }
    }

    /// Sends the rows whose wait has ended, or settles them where an earlier row of their key was
    /// refused. Returns false where the client's own queue is full, so that the caller tries again.
    fn go_on(&mut self) -> bool {
        let window = &self.session.window;
        let mut opened = window.take_opened().into_iter();
        while let Some(place) = opened.next() {
            let Some(mut rows) = self.waiting.remove(&place) else { continue };
            let topic = place.0.as_str();
            while let Some((slot, message)) = rows.pop_front() {
                let key = message.key.as_deref().unwrap_or_default().as_bytes();
                if let Some(refusal) = window.stands_behind(topic, Some(key)) {
                    window.settle(slot, topic, Some(key), Err(refusal));
                    continue;
                }
                if let Some(partition) = window.waits_for(slot, topic, key) {
                    // Another one than before where the topic has got partitions since.
                    let at = (topic.to_owned(), partition);
                    let waiting = self.waiting.entry(at).or_default();
                    waiting.push_back((slot, message));
                    if partition == place.1 {
                        waiting.append(&mut rows);
                    }
                    continue;
                }
                if let Some(slot) = self.produce(&message, slot) {
                    rows.push_front((slot, message));
                    self.waiting.insert(place.clone(), rows);
                    window.open_again(std::iter::once(place).chain(opened));
                    return false;
                }
            }
        }
        true
    }

    async fn reserve(&mut self, tag: u64, weight: usize) -> Result<usize, BrokerError> {
        loop {
            if let Some(slot) = self.session.window.reserve(tag, weight) {
                return Ok(slot);
            }
            // Asked before the wait: a producer that has ended settles no row and makes no room.
            if let Some(doubt) = self.doubt() {
                return Err(doubt);
            }
            self.changed().await;
            if !self.go_on() {
                tokio::time::sleep(FULL_LOOK).await;
            }
        }
    }
}

#[async_trait]
impl Publisher for KafkaPublisher {
    async fn topics(&mut self, topics: &[String]) -> Result<Vec<TopicState>, BrokerError> {
        // Before a refusal is forgiven: it also settles what waits behind the refused row.
        self.go_on();
        self.distrust_changed_topics();
        self.session.window.forgive_topics(topics);
        let mut unseen: Vec<String> = topics.iter().filter(|topic| !self.ready.contains(*topic)).cloned().collect();
        if unseen.is_empty() {
            return Ok(vec![TopicState::Ready; topics.len()]);
        }
        let mut states = self.session.ask(&unseen, &self.limits, &self.config).await?;
        if self.fit(&unseen).await? {
            // The producer is new: it must see the topics in its own metadata, also those that were
            // ready before.
            unseen = topics.to_vec();
            states = self.session.ask(&unseen, &self.limits, &self.config).await?;
        }
        // Their partitions may be others now.
        let places = self.waiting.keys().filter(|(topic, _)| unseen.contains(topic)).cloned();
        self.session.window.open_again(places);
        for (topic, state) in unseen.iter().zip(&states) {
            if *state == TopicState::Ready {
                self.ready.insert(topic.clone());
            } else {
                // The limits are read again: fewer copies may suffice once settings change.
                self.limits.forget(topic);
            }
        }
        let seen: HashMap<&String, TopicState> = unseen.iter().zip(states).collect();
        Ok(topics.iter().map(|topic| seen.get(topic).cloned().unwrap_or(TopicState::Ready)).collect())
    }

    async fn send(&mut self, rows: Vec<(u64, OutgoingMessage)>) -> Result<(), BrokerError> {
        self.go_on();
        self.distrust_changed_topics();
        self.session.window.forget_what_is_known();
        for (at, (tag, message)) in rows.into_iter().enumerate() {
            if at % ROWS_PER_TURN == ROWS_PER_TURN - 1 {
                tokio::task::yield_now().await;
            }
            let key = message.key.as_deref().map(str::as_bytes);
            if let Some(refusal) = self.session.window.stands_behind(&message.topic, key) {
                self.session.window.settle_unsent(tag, refusal);
                continue;
            }
            if !self.ready.contains(&message.topic) {
                // A row for a topic that was not asked about: ask now, because the broker's refusal
                // would come after later rows were sent and would reorder them (R19).
                if let TopicState::NotReady(reason) = self.topic(&message.topic).await? {
                    let reason = format!("kafka topic `{}`: {reason}", message.topic);
                    self.session.window.refuse_topic(tag, &message.topic, reason);
                    continue;
                }
            }
            if let Some(reason) = self.too_large(&message) {
                self.session.window.refuse_message(tag, &message.topic, key, reason);
                continue;
            }
            let mut slot = self.reserve(tag, message.weight()).await?;
            if let Some(key) = key
                && let Some(partition) = self.wait_for_first(slot, &message.topic, key).await
            {
                let place = (message.topic.clone(), partition);
                self.waiting.entry(place).or_default().push_back((slot, message));
                continue;
            }
            // An earlier row of its key may have been refused while this one waited, also for room.
            if let Some(refusal) = self.session.window.stands_behind(&message.topic, key) {
                self.session.window.settle(slot, &message.topic, key, Err(refusal));
                continue;
            }
            while let Some(back) = self.produce(&message, slot) {
                slot = back;
                tokio::time::sleep(FULL_LOOK).await;
                if let Some(doubt) = self.doubt() {
                    return Err(doubt);
                }
            }
        }
        // What ended the session meanwhile is told by `settle`, after the outcomes: one of these
        // rows may have done it.
        Ok(())
    }

    async fn settle(&mut self, settled: &mut Vec<Settled>) -> Result<(), BrokerError> {
        loop {
            self.go_on();
            tell_of_topics_made_anew(&self.limits);
            // A refusal that came before any doubt is not the cause of a later one. If the guilty
            // report comes between this check and `take`, it costs one wait at most.
            if self.session.window.has_refused() && self.doubt().is_none() {
                self.session.window.forget_refusal();
            }
            if self.session.window.take(settled) {
                return Ok(());
            }
            if let Some(doubt) = self.doubt() {
                // If one message ended the producer, its delivery report follows at once.
                let named = self.session.window.has_refused();
                let until = *self.session.doubted_at.get_or_insert_with(Instant::now) + REPORT_DEADLINE;
                if !named && tokio::time::timeout_at(until.into(), self.session.window.changed()).await.is_ok() {
                    continue;
                }
                // An outcome may have come since: it is returned before the error. A report may
                // have come that tells more than this doubt, for example that the topic takes
                // smaller batches: then that is the error.
                return if self.session.window.take(settled) { Ok(()) } else { Err(self.doubt().unwrap_or(doubt)) };
            }
            self.changed().await;
        }
    }

    fn blocked(&self) -> Option<String> {
        self.session.reports.all_down()
    }

    async fn close(self: Box<Self>) {
        let ended = self.session.ended.clone();
        drop(self);
        if tokio::time::timeout(CLOSE_DEADLINE, ended.cancelled()).await.is_err() {
            tracing::warn!("the kafka producer did not end within {CLOSE_DEADLINE:?}; it is left to itself");
        }
    }
}

impl Session {
    async fn open(config: &Arc<KafkaConfig>, limits: &Arc<TopicLimits>, sizes: Sizes) -> Result<Self, BrokerError> {
        let window = Arc::new(PublishWindow::new(config.publish_rows_max, config.publish_bytes_max, sizes.batch_max));
        let reports = Arc::new(Reports::default());
        let limits = Arc::clone(limits);
        let context = PublishContext { window: Arc::clone(&window), reports: Arc::clone(&reports), limits };
        let producer = BaseProducer::from_config_and_context(&client::producer(config, sizes), context)
            .map_err(|error| properties::refused(&error))?;
        let producer = Arc::new(producer);
        let stop = CancellationToken::new();
        let ended = poll_on_a_thread(&producer, stop.clone())?;
        let session = Self { producer, window, reports, sizes, ended, doubted_at: None, _stop: stop.drop_guard() };
        session.warm().await?;
        Ok(session)
    }

    /// Waits for the producer's id: without it the first message is delayed by 0.5 s.
    async fn warm(&self) -> Result<(), BrokerError> {
        let (producer, reports) = (Arc::clone(&self.producer), Arc::clone(&self.reports));
        blocking::run(move || blocking::reach(producer.client(), &reports, || {})).await?;
        let end = Instant::now() + ASK_DEADLINE;
        let mut producer_id = self.reports.producer_id();
        loop {
            let assigned = producer_id.wait_for(|assigned| *assigned);
            if tokio::time::timeout(WARM_LOOK, assigned).await.is_ok() {
                return Ok(());
            }
            if let Some(reason) = self.fatal() {
                return Err(BrokerError::Unauthorised(format!("an idempotent kafka producer: {reason}")));
            }
            if Instant::now() >= end {
                tracing::debug!("the kafka producer has no id yet; its first messages will wait for it");
                return Ok(());
            }
        }
    }

    fn fatal(&self) -> Option<String> {
        self.producer.client().fatal_error().map(|(_, reason)| reason)
    }

    /// Asks the broker through this producer, which then knows the topics before their first rows.
    async fn ask(
        &self,
        topics: &[String],
        limits: &Arc<TopicLimits>,
        config: &Arc<KafkaConfig>,
    ) -> Result<Vec<TopicState>, BrokerError> {
        let (producer, reports, topics) = (Arc::clone(&self.producer), Arc::clone(&self.reports), topics.to_vec());
        let (limits, config, window) = (Arc::clone(limits), Arc::clone(config), Arc::clone(&self.window));
        let (states, grown) = blocking::run(move || {
            let names: Vec<&str> = topics.iter().map(String::as_str).collect();
            let ask = |name: Option<&str>| blocking::metadata(producer.client(), &reports, name, || {});
            let answers = topology::asked(&names, ask)?;
            let all = topology::by_name(&answers);
            let found: Vec<_> = topics.iter().map(|topic| all.get(topic.as_str()).copied()).collect();
            let mut states: Vec<TopicState> = found.iter().map(|topic| topology::state(*topic)).collect();
            let there = found.iter().zip(&states).filter(|(_, state)| **state == TopicState::Ready);
            let there: Vec<&MetadataTopic> = there.filter_map(|(topic, _)| *topic).collect();
            there.iter().for_each(|topic| window.learn_partitions(topic.name(), topic.partitions().len()));
            let seen = topics.iter().zip(&found);
            let seen = seen.filter_map(|(name, topic)| Some((name, topology::partitions(*topic)?)));
            let grown: Vec<Grown> = seen.filter_map(|(name, count)| limits.saw_partitions(name, count)).collect();
            limits.learn(&config, &there.iter().map(|topic| topic.name()).collect::<Vec<_>>());
            for (topic, state) in found.into_iter().zip(&mut states) {
                if *state == TopicState::Ready
                    && let Some(short) = topic.and_then(|topic| limits.short_of_copies(topic))
                {
                    *state = TopicState::NotReady(short);
                }
            }
            Ok((states, grown))
        })
        .await?;
        grown.iter().for_each(tell_of_growth);
        Ok(states)
    }
}

/// Logs and counts topics that were deleted and made anew while a publisher knew them.
fn tell_of_topics_made_anew(limits: &TopicLimits) {
    for topic in limits.take_made_anew() {
        observe::order_incident("kafka");
        tracing::warn!(
            topic,
            "a kafka topic was deleted and made anew while a publisher ran: messages that were sent before may be gone, and \
             later ones of a key may be handled before earlier ones; the next time, stop the publisher first"
        );
    }
}

/// Logs and counts a topic that got partitions while messages of its keys may be on their way.
fn tell_of_growth(Grown { topic, before, now }: &Grown) {
    observe::order_incident("kafka");
    tracing::warn!(
        topic,
        before,
        now,
        "a kafka topic got more partitions: later messages of a key may go to another partition, and be handled before \
         earlier ones; the next time, stop the publisher and let the consumers finish first"
    );
}

impl Drop for KafkaPublisher {
    fn drop(&mut self) {
        self.distrust_changed_topics();
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // What the client still holds is purged: the next session sends it.
        self.producer.purge(PurgeConfig::default().queue().inflight().non_blocking());
    }
}

/// The thread holds the producer to the end, because destroying it waits: for its broker threads,
/// and up to 0.5 s for reports of purged messages.
fn poll_on_a_thread(
    producer: &Arc<BaseProducer<PublishContext>>,
    stop: CancellationToken,
) -> Result<CancellationToken, BrokerError> {
    let producer = Arc::clone(producer);
    blocking::on_a_thread("kafka producer", move || {
        while !stop.is_cancelled() {
            producer.poll(POLL);
        }
        // A question may still run on another thread that may wait. Then that thread holds the last
        // reference and destroys the producer.
        drop(producer);
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::used_underscore_binding)]
    use futures_util::FutureExt;
    use rdkafka::mocking::MockCluster;
    use rdkafka::producer::DefaultProducerContext;
    use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};

    use super::*;
    use crate::broker::Refusal;

    type Mock = MockCluster<'static, DefaultProducerContext>;

    /// A session on a mock cluster that has the topics `t` and `u`.
    async fn opened() -> (Mock, KafkaPublisher) {
        let mock = Mock::new(1).unwrap();
        ["t", "u"].iter().for_each(|topic| mock.create_topic(topic, 1, 1).unwrap());
        let config = KafkaConfig::from_url(&format!("kafka://{}", mock.bootstrap_servers())).unwrap();
        let publisher = KafkaPublisher::open(&Arc::new(config), &Arc::default()).await.unwrap();
        (mock, publisher)
    }

    /// Takes what ends the polling thread when it is dropped.
    fn thread_of(publisher: &mut KafkaPublisher) -> DropGuard {
        std::mem::replace(&mut publisher.session._stop, CancellationToken::new().drop_guard())
    }

    /// Shown by: waiting for the window alone (`settle` waits for ever).
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_session_that_nobody_polls_any_more_ends_soon() {
        let (mock, mut publisher) = opened().await;
        assert_eq!(publisher.topic("t").await.unwrap(), TopicState::Ready);
        mock.broker_round_trip_time(1, Duration::from_secs(60)).unwrap();
        publisher.send(vec![(0, OutgoingMessage::sample("t", None))]).await.unwrap();
        let stop = thread_of(&mut publisher);
        let mut settled = Vec::new();
        let ends = async {
            drop(stop);
            publisher.settle(&mut settled).await
        };
        let ended = tokio::time::timeout(Duration::from_secs(10), ends).await.expect("it ends");
        assert!(matches!(ended, Err(BrokerError::Session(why)) if why.contains("nobody polls")));
        Box::new(publisher).close().await;
    }

    /// It fails where `fit` keeps `ready`: the new producer then sends to a topic that it has not
    /// seen, and keeps nothing behind the first row of a partition.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn r19_another_producer_sees_every_topic_again() {
        let (_mock, mut publisher) = opened().await;
        assert_eq!(publisher.topic("t").await.unwrap(), TopicState::Ready);
        assert!(publisher.session.window.partition_of("t", b"k").is_some());
        // As of a session that was opened for smaller messages.
        publisher.session.sizes.message_max = 1;
        assert_eq!(publisher.topic("u").await.unwrap(), TopicState::Ready);
        assert!(publisher.session.sizes.message_max > 1, "another producer");
        assert_eq!(publisher.topic("t").await.unwrap(), TopicState::Ready);
        assert!(publisher.session.window.partition_of("t", b"k").is_some());
        Box::new(publisher).close().await;
    }

    /// Shown by: batches of the usual size in every session (the topic refuses them for ever). It
    /// fails twice in twelve runs where the reason of the end is the one that was known before the
    /// report of the batch.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn r19_a_topic_that_refused_a_batch_and_does_not_tell_its_limit_gets_smaller_ones() {
        let (mock, mut publisher) = opened().await;
        assert_eq!(publisher.topic("t").await.unwrap(), TopicState::Ready);
        let limits = Arc::clone(&publisher.limits);
        assert_eq!(limits.message_max("t"), None, "the mock cluster does not tell it");
        let before = limits.sizes().batch_max;
        mock.request_errors(RDKafkaApiKey::Produce, &[RDKafkaRespErr::RD_KAFKA_RESP_ERR_MSG_SIZE_TOO_LARGE]);
        let rows = [0, 1].map(|tag| (tag, OutgoingMessage::sample("t", None)));
        // What the client gets while its server is away goes as one batch.
        mock.broker_down(1).unwrap();
        publisher.send(rows.into()).await.unwrap();
        mock.broker_up(1).unwrap();
        let ended = publisher.settle(&mut Vec::new()).await;
        assert!(matches!(&ended, Err(BrokerError::Session(why)) if why.contains("smaller batches")), "{ended:?}");
        Box::new(publisher).close().await;
        assert_eq!(limits.sizes().batch_max, before / 2);
    }

    /// It fails where an earlier refusal is not forgotten: it is then taken for the cause, and the
    /// session ends before the report of the row that ended it.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn r16_a_session_that_ends_waits_for_the_report_of_its_cause_also_after_an_earlier_refusal() {
        let (_mock, mut publisher) = opened().await;
        let (window, ended) = (Arc::clone(&publisher.session.window), publisher.session.ended.clone());
        let [early, cause, _other] = [1, 2, 3].map(|tag| window.reserve(tag, 1).unwrap());
        let refused = || Err(Refusal::Message("too large".to_owned()));
        let mut settled = Vec::new();
        window.settle(early, "t", None, refused());
        publisher.settle(&mut settled).await.unwrap();
        drop(thread_of(&mut publisher));
        ended.cancelled().await;
        {
            let mut settling = publisher.settle(&mut settled);
            assert!((&mut settling).now_or_never().is_none(), "it waits for the report");
            window.settle(cause, "t", None, refused());
            settling.await.unwrap();
        }
        assert_eq!(settled.iter().map(|row| row.tag).collect::<Vec<_>>(), [1, 2]);
        Box::new(publisher).close().await;
    }
}
