//! One publishing session: one idempotent producer.
//!
//! Guarantees: a row is settled by its delivery report only; rows go out in the order of `send`, to topics that were seen
//! (R19), and nothing goes out behind a refusal (R15). Opening waits until the producer has its id, so that the first
//! message does not. Dropping it purges what the client holds and waits for nothing.
//!
//! Not here: bounds and reports (`window`), retries over sessions (room `runtime`).

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use rdkafka::config::FromClientConfigAndContext;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::producer::{BaseProducer, BaseRecord, Producer, PurgeConfig};
use tokio::sync::oneshot;

use super::blocking;
use super::client::{self, ASK_DEADLINE, OPEN_DEADLINE};
use super::config::KafkaConfig;
use super::context::Reports;
use super::properties;
use super::topology::{self, Sizes, TopicSizes};
use super::window::{PublishContext, Window};
use super::{errors, wire};
use crate::broker::{Publisher, Settled, TopicState};
use crate::error::BrokerError;
use crate::message::OutgoingMessage;

// How often a session that opens looks whether it failed for good.
const WARM_LOOK: Duration = Duration::from_millis(50);
const CLOSE_DEADLINE: Duration = Duration::from_secs(5);
// Rows handed over between two chances for other tasks: about 3 us each.
const ROWS_PER_TURN: usize = 128;

/// A session of [`super::KafkaBroker`].
pub(super) struct KafkaPublisher {
    config: Arc<KafkaConfig>,
    sizes: Arc<TopicSizes>,
    session: Session,
    ready: HashSet<String>,
    sent: bool,
}

/// A producer and the thread that polls it.
struct Session {
    producer: Arc<BaseProducer<PublishContext>>,
    window: Arc<Window>,
    reports: Arc<Reports>,
    sizes: Sizes,
    stopped: Option<oneshot::Receiver<()>>,
    // Dropped after `producer`, so that the thread is the one that lets go of it last.
    _stop: StopOnDrop,
}

/// Tells the polling thread to end.
struct StopOnDrop(Arc<AtomicBool>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl KafkaPublisher {
    /// Opens a session and waits until its first message would not wait.
    pub(super) async fn open(config: &Arc<KafkaConfig>, sizes: &Arc<TopicSizes>) -> Result<Self, BrokerError> {
        let session = Session::open(config, sizes.sizes()).await?;
        Ok(Self { config: Arc::clone(config), sizes: Arc::clone(sizes), session, ready: HashSet::new(), sent: false })
    }

    fn doubt(&self) -> Option<BrokerError> {
        self.session.fatal().map(|reason| BrokerError::Session(format!("the kafka producer ended: {reason}")))
    }

    /// Makes the producer fit a topic that was not seen before (R19).
    async fn fit(&mut self, topic: &str) -> Result<(), BrokerError> {
        if !self.sizes.knows(topic) {
            let (config, name) = (Arc::clone(&self.config), topic.to_owned());
            let found = blocking::run(move || topology::settings(&config, &[name.as_str()].into())).await;
            let max = match &found {
                Ok(found) => found.get(topic).and_then(|settings| settings.get("max.message.bytes")?.parse().ok()),
                // Not allowed, or not spoken by this broker: the defaults serve.
                Err(error) => {
                    tracing::debug!(topic, %error, "max.message.bytes cannot be read");
                    None
                }
            };
            self.sizes.learn(topic, max);
        }
        let needed = self.sizes.sizes();
        if self.session.sizes.covers(needed) {
            return Ok(());
        }
        if self.sent {
            return Err(BrokerError::Session(format!(
                "kafka topic `{topic}` takes other sizes than the topics before it: the session starts anew with batches of \
                 {} bytes and messages up to {} bytes",
                needed.batch_max, needed.message_max
            )));
        }
        self.session = Session::open(&self.config, needed).await?;
        Ok(())
    }

    /// Gives one row to the client; `Some` gives the slot back where the client's own queue is full.
    fn produce(&self, message: &OutgoingMessage, slot: usize) -> Option<usize> {
        let record: BaseRecord<'_, [u8], [u8], usize> = BaseRecord {
            topic: &message.topic,
            partition: None,
            payload: Some(&message.payload),
            key: message.key.as_deref().map(str::as_bytes),
            // The time of the row, by the database's clock: the clock of this process decides nothing.
            timestamp: Some(message.created_at.timestamp_millis()),
            headers: Some(wire::headers(message, &self.config.source)),
            delivery_opaque: slot,
        };
        match self.session.producer.send(record) {
            Ok(()) => None,
            Err((KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull), _)) => Some(slot),
            Err((error, _)) => {
                let refusal = errors::refusal(&message.topic, &error);
                let key = message.key.as_deref().map(str::as_bytes);
                self.session.window.settle(slot, &message.topic, key, Err(refusal));
                None
            }
        }
    }

    /// A topic that was refused must be seen again before it is used.
    fn distrust_refused_topics(&mut self) {
        for refused in self.session.window.refused_topics() {
            self.ready.remove(&refused);
        }
    }

    async fn reserve(&self, tag: u64, weight: usize) -> Result<usize, BrokerError> {
        loop {
            if let Some(slot) = self.session.window.reserve(tag, weight) {
                return Ok(slot);
            }
            self.session.window.changed().await;
            if let Some(doubt) = self.doubt() {
                return Err(doubt);
            }
        }
    }
}

#[async_trait]
impl Publisher for KafkaPublisher {
    async fn topic(&mut self, topic: &str) -> Result<TopicState, BrokerError> {
        self.distrust_refused_topics();
        if self.ready.contains(topic) {
            return Ok(TopicState::Ready);
        }
        let state = self.session.ask(topic).await?;
        if state == TopicState::Ready {
            self.fit(topic).await?;
            // The producer may be another one now: it must have seen the topic itself.
            if self.session.ask(topic).await? == TopicState::Ready {
                self.ready.insert(topic.to_owned());
            }
        }
        Ok(state)
    }

    async fn send(&mut self, rows: Vec<(u64, OutgoingMessage)>) -> Result<(), BrokerError> {
        self.distrust_refused_topics();
        self.session.window.forget_refusals_when_settled();
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
                // R19: whoever sends without asking first must not find out by reordering.
                if let TopicState::NotReady(reason) = self.topic(&message.topic).await? {
                    let reason = format!("kafka topic `{}`: {reason}", message.topic);
                    self.session.window.refuse_topic(tag, &message.topic, reason);
                    continue;
                }
            }
            let mut slot = self.reserve(tag, message.weight()).await?;
            self.sent = true;
            while let Some(back) = self.produce(&message, slot) {
                slot = back;
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
        self.doubt().map_or(Ok(()), Err)
    }

    async fn settle(&mut self, settled: &mut Vec<Settled>) -> Result<(), BrokerError> {
        loop {
            if self.session.window.take(settled) {
                return Ok(());
            }
            if let Some(doubt) = self.doubt() {
                return Err(doubt);
            }
            self.session.window.changed().await;
        }
    }

    fn blocked(&self) -> Option<String> {
        self.session.reports.all_down()
    }

    async fn close(mut self: Box<Self>) {
        let stopped = self.session.stopped.take();
        drop(self);
        if let Some(stopped) = stopped
            && tokio::time::timeout(CLOSE_DEADLINE, stopped).await.is_err()
        {
            tracing::warn!("the kafka producer did not end within {CLOSE_DEADLINE:?}; it is left to itself");
        }
    }
}

impl Session {
    async fn open(config: &Arc<KafkaConfig>, sizes: Sizes) -> Result<Self, BrokerError> {
        let window = Arc::new(Window::new(config.publish_rows_max, config.publish_bytes_max));
        let reports = Arc::new(Reports::default());
        let context = PublishContext { window: Arc::clone(&window), reports: Arc::clone(&reports) };
        let producer = BaseProducer::from_config_and_context(&client::producer(config, sizes), context)
            .map_err(|error| BrokerError::Refused(format!("kafka settings: {}", properties::reason(&error))))?;
        let producer = Arc::new(producer);
        let stop = StopOnDrop(Arc::new(AtomicBool::new(false)));
        let stopped = poll_on_a_thread(&producer, &stop.0)?;
        let session = Self { producer, window, reports, sizes, stopped: Some(stopped), _stop: stop };
        session.warm().await?;
        Ok(session)
    }

    /// Without its id an idempotent producer keeps its first message back for 0.5 s.
    async fn warm(&self) -> Result<(), BrokerError> {
        let (producer, reports) = (Arc::clone(&self.producer), Arc::clone(&self.reports));
        blocking::run(move || blocking::reach(producer.client(), &reports, OPEN_DEADLINE, || {})).await?;
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

    /// Why the producer is of no use any more, where that is so.
    fn fatal(&self) -> Option<String> {
        self.producer.client().fatal_error().map(|(_, reason)| reason)
    }

    /// Asks the broker, through this producer, so that it knows the topic when the first row comes.
    async fn ask(&self, topic: &str) -> Result<TopicState, BrokerError> {
        let (producer, reports, name) = (Arc::clone(&self.producer), Arc::clone(&self.reports), topic.to_owned());
        blocking::run(move || {
            let metadata = blocking::metadata(producer.client(), &reports, Some(&name), ASK_DEADLINE, || {})?;
            Ok(topology::state(&metadata, &name))
        })
        .await
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // What the client still holds belongs to a session that ended: the next one sends it.
        self.producer.purge(PurgeConfig::default().queue().inflight().non_blocking());
    }
}

/// The thread holds the producer to the end, because destroying one waits: for its broker threads, and up to 0.5 s for
/// reports of what was purged.
fn poll_on_a_thread(
    producer: &Arc<BaseProducer<PublishContext>>,
    stop: &Arc<AtomicBool>,
) -> Result<oneshot::Receiver<()>, BrokerError> {
    let (producer, stop) = (Arc::clone(producer), Arc::clone(stop));
    let (ended, stopped) = oneshot::channel();
    let run = move || {
        while !stop.load(Ordering::Relaxed) {
            producer.poll(Duration::from_millis(50));
        }
        // Somebody may still be asking through it: then the last one to let go destroys it, on a thread that may wait.
        drop(producer);
        let _nobody_waits = ended.send(());
    };
    std::thread::Builder::new()
        .name("kafka producer".to_owned())
        .spawn(run)
        .map(|_| stopped)
        .map_err(|error| BrokerError::Session(format!("a thread for the kafka producer: {error}")))
}

impl fmt::Debug for KafkaPublisher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KafkaPublisher")
            .field("ready", &self.ready)
            .field("in_flight", &self.session.window.in_flight())
            .finish_non_exhaustive()
    }
}
