//! One member of a consumer group, seen from async code.
//!
//! Guarantees: events come in the order they happened; `next` and its events lose nothing when dropped; closing commits what
//! was acknowledged and leaves the group; dropping does the same without waiting.
//!
//! Not here: polling and rebalances (`poller`).

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use rdkafka::config::FromClientConfigAndContext;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use tokio::sync::{mpsc, oneshot};

use super::blocking;
use super::client::{self, ASK_DEADLINE, OPEN_DEADLINE};
use super::config::KafkaConfig;
use super::poller::{self, MemberContext, Shared};
use super::{properties, topology};
use crate::broker::{Event, PartitionId, Subscriber, Subscription, TopicState};
use crate::error::BrokerError;

const CLOSE_DEADLINE: Duration = Duration::from_secs(10);

/// A subscription of [`super::KafkaBroker`].
pub(super) struct KafkaSubscriber {
    shared: Arc<Shared>,
    events: mpsc::UnboundedReceiver<Result<Event, BrokerError>>,
    // The thread owns it, because destroying a consumer waits.
    consumer: Weak<BaseConsumer<MemberContext>>,
    left: Option<oneshot::Receiver<()>>,
}

impl KafkaSubscriber {
    /// Connects, says which topics are missing, and starts to join the group.
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
        let shared = Arc::new(Shared::new(sender, rows_max, bytes_max, subscription.drain));
        let settings = client::member(config, subscription.group());
        let (config, context) = (Arc::clone(config), MemberContext(Arc::clone(&shared)));
        if let Err(error) = topology::declare(&config, &topics).await {
            tracing::warn!(%error, "kafka topics could not be created; the consumer waits for them");
        }
        let open = Arc::clone(&shared);
        let (ended, left) = oneshot::channel();
        let consumer = blocking::run(move || {
            let consumer = BaseConsumer::from_config_and_context(&settings, context)
                .map_err(|error| BrokerError::Refused(format!("kafka settings: {}", properties::reason(&error))))?;
            let serve = || poller::serve(&consumer, &open);
            blocking::reach(consumer.client(), &open.reports, OPEN_DEADLINE, serve)?;
            say_what_is_missing(&config, &consumer, &open, &topics)?;
            let names: Vec<&str> = topics.iter().map(String::as_str).collect();
            consumer.subscribe(&names).map_err(|error| BrokerError::Session(format!("subscribing: {error}")))?;
            let consumer = Arc::new(consumer);
            let weak = Arc::downgrade(&consumer);
            let run = move || {
                poller::run(consumer, &open);
                let _nobody_waits = ended.send(());
            };
            std::thread::Builder::new()
                .name("kafka consumer".to_owned())
                .spawn(run)
                .map_err(|error| BrokerError::Session(format!("a thread for the kafka consumer: {error}")))?;
            Ok(weak)
        })
        .await?;
        Ok(Self { shared, events, consumer, left: Some(left) })
    }
}

fn say_what_is_missing(
    config: &KafkaConfig,
    consumer: &BaseConsumer<MemberContext>,
    shared: &Shared,
    topics: &[String],
) -> Result<(), BrokerError> {
    for topic in topics {
        let serve = || poller::serve(consumer, shared);
        let metadata = blocking::metadata(consumer.client(), &shared.reports, Some(topic), ASK_DEADLINE, serve)?;
        if let TopicState::NotReady(reason) = topology::state(&metadata, topic) {
            let remedy = topology::how_to_create(config, topic);
            tracing::warn!(topic, reason, remedy, "a kafka topic cannot be consumed yet: waiting for it");
        }
    }
    Ok(())
}

#[async_trait]
impl Subscriber for KafkaSubscriber {
    async fn next(&mut self) -> Result<Event, BrokerError> {
        match self.events.recv().await {
            Some(event) => {
                if let Ok(Event::Deliveries(deliveries)) = &event {
                    let mut assignment = self.shared.assignment();
                    // They come in runs of one source, in order: the last one says it of all before.
                    for run in deliveries.chunk_by(|one, next| one.source == next.source) {
                        if let Some(last) = run.last() {
                            assignment.hand(&last.source, last.sequence);
                        }
                    }
                }
                event
            }
            None => Err(BrokerError::Session("the thread of the kafka consumer ended".to_owned())),
        }
    }

    async fn acknowledge(&mut self, source: &PartitionId, through: i64) -> Result<(), BrokerError> {
        // One of a past assignment is no loss: its new owner sees duplicates, which the inbox knows.
        if self.shared.assignment().acknowledge(source, through) {
            self.shared.wake();
        }
        Ok(())
    }

    fn pause(&mut self, paused: bool) {
        self.shared.pause(paused);
    }

    async fn caught_up(&mut self) -> Result<bool, BrokerError> {
        let unknown = self.shared.assignment().without_end();
        if !unknown.is_empty()
            && let Some(consumer) = self.consumer.upgrade()
        {
            match blocking::run(move || ends(&consumer, &unknown)).await {
                Ok(ends) => {
                    let mut assignment = self.shared.assignment();
                    for (source, start, end) in ends {
                        assignment.set_end(&source, start, end);
                    }
                }
                Err(error) => {
                    tracing::debug!(%error, "the ends of kafka partitions are not known yet");
                    return Ok(false);
                }
            }
        }
        Ok(self.shared.assignment().is_caught_up())
    }

    async fn close(mut self: Box<Self>) {
        let left = self.left.take();
        // Drops the receiver, and with it guards of revocations that nobody will drain.
        drop(self);
        if let Some(left) = left
            && tokio::time::timeout(CLOSE_DEADLINE, left).await.is_err()
        {
            tracing::warn!(
                "the kafka consumer did not leave its group within {CLOSE_DEADLINE:?}; it is left to itself"
            );
        }
    }
}

impl Drop for KafkaSubscriber {
    fn drop(&mut self) {
        self.shared.close();
    }
}

/// Where consumption of these partitions starts, and where they end.
fn ends(
    consumer: &BaseConsumer<MemberContext>,
    sources: &[PartitionId],
) -> Result<Vec<(PartitionId, Option<i64>, i64)>, BrokerError> {
    let failed = |error: rdkafka::error::KafkaError| BrokerError::Unavailable(format!("kafka offsets: {error}"));
    let all_at = |offset: Offset| {
        let mut list = TopicPartitionList::with_capacity(sources.len());
        for source in sources {
            list.add_partition_offset(&source.place, source.partition, offset).map_err(failed)?;
        }
        Ok::<_, BrokerError>(list)
    };
    let found = |list: &TopicPartitionList, source: &PartitionId| match list
        .find_partition(&source.place, source.partition)?
        .offset()
    {
        Offset::Offset(offset) => Some(offset),
        _ => None,
    };
    // A logical offset where a time is expected asks for that offset.
    let ends = consumer.offsets_for_times(all_at(Offset::End)?, ASK_DEADLINE).map_err(failed)?;
    let starts = consumer.offsets_for_times(all_at(Offset::Beginning)?, ASK_DEADLINE).map_err(failed)?;
    let committed = consumer.committed_offsets(all_at(Offset::Invalid)?, ASK_DEADLINE).map_err(failed)?;
    let known = sources.iter().filter_map(|source| {
        let start = found(&committed, source).or_else(|| found(&starts, source));
        Some((source.clone(), start, found(&ends, source)?))
    });
    Ok(known.collect())
}

impl fmt::Debug for KafkaSubscriber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KafkaSubscriber").field("assignment", &*self.shared.assignment()).finish_non_exhaustive()
    }
}
