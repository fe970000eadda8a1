//! The Kafka client alone: it sends the headers of a row, without session, window or order. `bench`
//! compares oncebox with it.
//!
//! Promise: it uses the settings that a careful user would take (idempotence, all replicas). It
//! does no warm-up: a caller that measures time sends one message before.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rdkafka::ClientContext;
use rdkafka::config::FromClientConfigAndContext;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::DeliveryResult;
use rdkafka::producer::{BaseProducer, BaseRecord, Producer, ProducerContext};

use super::topology::TopicLimits;
use super::{KafkaBroker, blocking, client, properties, wire};
use crate::broker::Raw;
use crate::error::BrokerError;
use crate::message::OutgoingMessage;

// How long the broker may be silent, once the client has all messages, before it is an error.
const PATIENCE: Duration = Duration::from_secs(60);
// Polling after each message would cost more than the rest; the client's own examples do the same.
const POLL_EVERY: usize = 256;
// How long a wait for reports takes at a time. With whole milliseconds it would never pause (see
// `POLL` of the publisher), and take a core from the broker beside it.
const WAIT: Duration = Duration::from_micros(1_050);

#[derive(Default)]
struct Counts {
    delivered: AtomicU64,
    failed: AtomicU64,
}

struct Counting(Arc<Counts>);

impl ClientContext for Counting {}

impl ProducerContext for Counting {
    type DeliveryOpaque = ();

    fn delivery(&self, result: &DeliveryResult<'_>, (): ()) {
        let counter = if result.is_ok() { &self.0.delivered } else { &self.0.failed };
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// A producer without any of oncebox's guarantees.
struct RawProducer {
    producer: BaseProducer<Counting>,
    counts: Arc<Counts>,
    source: String,
}

impl KafkaBroker {
    /// A producer without any of oncebox's guarantees, for `bench`. The function that it returns
    /// sends messages as fast as the client takes them, and waits until all are delivered. The
    /// client waits for more messages, up to `linger`, before it sends a batch.
    ///
    /// # Errors
    /// [`BrokerError::Refused`] names a setting that the client does not take. The function fails
    /// where a message is refused, or where the broker is silent for a minute at the end.
    pub fn raw(&self, linger: Duration) -> Result<Raw, BrokerError> {
        let sizes = TopicLimits::default().sizes();
        let mut settings = client::producer(&self.config, sizes);
        settings
            .set("linger.ms", linger.as_millis().to_string())
            .set("queue.buffering.max.messages", "1000000")
            .set("queue.buffering.max.kbytes", "1048576")
            .remove("debug");
        let counts = Arc::new(Counts::default());
        let producer = BaseProducer::from_config_and_context(&settings, Counting(Arc::clone(&counts)))
            .map_err(|error| properties::refused(&error))?;
        let raw = Arc::new(RawProducer { producer, counts, source: self.config.source.clone() });
        Ok(Box::new(move |messages| {
            let raw = Arc::clone(&raw);
            Box::pin(blocking::run(move || send_all(&raw, &messages)))
        }))
    }
}

fn send_all(raw: &RawProducer, messages: &[OutgoingMessage]) -> Result<(), BrokerError> {
    let RawProducer { producer, counts, source } = raw;
    let before = counts.delivered.load(Ordering::Relaxed);
    for (at, message) in messages.iter().enumerate() {
        let mut record = BaseRecord::<[u8], [u8]>::to(&message.topic)
            .payload(&message.payload)
            .headers(wire::headers(message, source));
        if let Some(key) = &message.key {
            record = record.key(key.as_bytes());
        }
        while let Err((error, back)) = producer.send(record) {
            if !matches!(error, KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull)) {
                return Err(BrokerError::Session(format!("the raw producer: {error}")));
            }
            producer.poll(WAIT);
            record = back;
        }
        if at % POLL_EVERY == POLL_EVERY - 1 {
            producer.poll(Duration::ZERO);
        }
    }
    let (mut last, mut moved) = (before, Instant::now());
    loop {
        let delivered = counts.delivered.load(Ordering::Relaxed);
        if counts.failed.load(Ordering::Relaxed) > 0 {
            return Err(BrokerError::Session("the broker refused a message of the raw producer".to_owned()));
        }
        if delivered - before >= messages.len() as u64 {
            return Ok(());
        }
        if delivered != last {
            (last, moved) = (delivered, Instant::now());
        }
        if moved.elapsed() > PATIENCE {
            return Err(BrokerError::Unavailable("the broker says nothing to the raw producer".to_owned()));
        }
        producer.poll(WAIT);
    }
}

impl Drop for RawProducer {
    fn drop(&mut self) {
        let _ = self.producer.flush(Duration::from_secs(1));
    }
}
