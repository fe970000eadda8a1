//! A broker with a stopwatch: it notes when the first session was open and the last message proven,
//! and when the first message was delivered and the last acknowledged. It can keep the messages of
//! one topic back.
//!
//! Promise: it times the adapter that the programs use. A note costs one reading of the time and
//! the CPU time for each call; for each message only `Watched::each` notes anything.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use uuid::Uuid;

use super::usage::cpu_time;
use crate::common::AnyBroker;
use oncebox::adapter::Position;
use oncebox::broker::{Begun, Broker, Event, PartitionId, Publisher, Settled, Subscriber, Subscription, TopicState};
use oncebox::error::BrokerError;
use oncebox::message::OutgoingMessage;
use oncebox::observe::Finding;

/// A moment: the time, and the CPU time of this process until then.
#[derive(Debug, Clone, Copy)]
pub(super) struct Moment {
    pub(super) at: Instant,
    pub(super) cpu: Duration,
}

impl Moment {
    fn now() -> Self {
        Self { at: Instant::now(), cpu: cpu_time() }
    }
}

/// What the watched broker has noted: times, and numbers of messages.
#[derive(Debug, Default)]
pub(super) struct Notes {
    /// When the first publishing session was open.
    pub(super) warm: Option<Moment>,
    pub(super) last_proof: Option<Moment>,
    pub(super) proven: usize,
    pub(super) refused: usize,
    pub(super) first_delivery: Option<Moment>,
    pub(super) last_acknowledged: Option<Moment>,
    pub(super) deliveries: usize,
    /// When each message was first proven and when acknowledged. Filled only where each message is
    /// followed.
    pub(super) proven_at: HashMap<Uuid, Instant>,
    pub(super) acknowledged_at: HashMap<String, Instant>,
}

/// The broker, with the notes about it.
#[derive(Debug, Clone)]
pub(super) struct Watched {
    broker: AnyBroker,
    notes: Arc<Mutex<Notes>>,
    each: bool,
    silent: Option<Arc<str>>,
}

impl Watched {
    pub(super) fn new(broker: AnyBroker) -> Self {
        Self { broker, notes: Arc::default(), each: false, silent: None }
    }

    /// Keeps the messages of this topic back and never settles them.
    pub(super) fn silent_of(self, topic: &str) -> Self {
        Self { silent: Some(topic.into()), ..self }
    }

    /// Follows each message, at the cost of an entry in a map.
    pub(super) fn each(broker: AnyBroker) -> Self {
        Self { each: true, ..Self::new(broker) }
    }

    pub(super) fn look<T>(&self, look: impl FnOnce(&Notes) -> T) -> T {
        look(&self.notes.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn note(&self, note: impl FnOnce(&mut Notes)) {
        note(&mut self.notes.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

#[async_trait]
impl Broker for Watched {
    fn name(&self) -> &'static str {
        self.broker.name()
    }

    fn is_log(&self) -> bool {
        self.broker.is_log()
    }

    fn places(&self, subscription: &Subscription) -> Vec<String> {
        self.broker.places(subscription)
    }

    async fn publisher(&self) -> Result<Box<dyn Publisher>, BrokerError> {
        let publisher = self.broker.publisher().await?;
        self.note(|notes| {
            notes.warm.get_or_insert_with(Moment::now);
        });
        Ok(Box::new(WatchedPublisher { publisher, watched: self.clone(), ids: HashMap::new(), keeps: false }))
    }

    async fn subscriber(&self, subscription: &Subscription) -> Result<Box<dyn Subscriber>, BrokerError> {
        let subscriber = self.broker.subscriber(subscription).await?;
        Ok(Box::new(WatchedSubscriber { subscriber, watched: self.clone(), open: HashMap::new() }))
    }

    async fn declare(&self, topics: &[String]) -> Result<(), BrokerError> {
        self.broker.declare(topics).await
    }

    async fn check(&self, subscriptions: &[Subscription]) -> Result<Vec<Finding>, BrokerError> {
        self.broker.check(subscriptions).await
    }
}

struct WatchedPublisher {
    publisher: Box<dyn Publisher>,
    watched: Watched,
    ids: HashMap<u64, Uuid>,
    /// Messages of the silent topic were kept back.
    keeps: bool,
}

#[async_trait]
impl Publisher for WatchedPublisher {
    async fn topics(&mut self, topics: &[String]) -> Result<Vec<TopicState>, BrokerError> {
        self.publisher.topics(topics).await
    }

    async fn send(&mut self, mut rows: Vec<(u64, OutgoingMessage)>) -> Result<(), BrokerError> {
        if let Some(silent) = &self.watched.silent {
            let all = rows.len();
            rows.retain(|(_, row)| row.topic != **silent);
            self.keeps |= rows.len() < all;
        }
        if self.watched.each {
            self.ids.extend(rows.iter().map(|(tag, row)| (*tag, row.id)));
        }
        self.publisher.send(rows).await
    }

    async fn settle(&mut self, settled: &mut Vec<Settled>) -> Result<(), BrokerError> {
        let before = settled.len();
        self.publisher.settle(settled).await?;
        let news = &settled[before..];
        if news.is_empty() {
            if self.keeps {
                // The broker does not know the messages that are kept back here, so its `settle`
                // returns at once.
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            return Ok(());
        }
        let proven = news.iter().filter(|one| one.outcome.is_ok()).count();
        let now = Moment::now();
        self.watched.note(|notes| {
            notes.proven += proven;
            notes.refused += news.len() - proven;
            notes.last_proof = Some(now);
            if self.watched.each {
                // Only the first proof counts: a later session may send a message again.
                for id in news.iter().filter(|one| one.outcome.is_ok()).filter_map(|one| self.ids.remove(&one.tag)) {
                    notes.proven_at.entry(id).or_insert(now.at);
                }
            }
        });
        Ok(())
    }

    fn blocked(&self) -> Option<String> {
        self.publisher.blocked()
    }

    async fn close(self: Box<Self>) {
        self.publisher.close().await;
    }
}

struct WatchedSubscriber {
    subscriber: Box<dyn Subscriber>,
    watched: Watched,
    open: HashMap<PartitionId, Vec<(i64, String)>>,
}

#[async_trait]
impl Subscriber for WatchedSubscriber {
    async fn next(&mut self) -> Result<Event, BrokerError> {
        let event = self.subscriber.next().await?;
        if let Event::Deliveries(deliveries) = &event {
            let now = Moment::now();
            self.watched.note(|notes| {
                notes.first_delivery.get_or_insert(now);
                notes.deliveries += deliveries.len();
            });
            if self.watched.each {
                for delivery in deliveries {
                    let id = delivery.arrived.id.clone().unwrap_or_default();
                    self.open.entry(delivery.source.clone()).or_default().push((delivery.sequence, id));
                }
            }
        }
        Ok(event)
    }

    async fn begin(&mut self, remembered: Vec<(PartitionId, Option<Position>)>) -> Result<Vec<Begun>, BrokerError> {
        self.subscriber.begin(remembered).await
    }

    fn away(&self) -> Option<String> {
        self.subscriber.away()
    }

    fn has_no_share(&self) -> bool {
        self.subscriber.has_no_share()
    }

    async fn acknowledge(&mut self, source: &PartitionId, through: i64) -> Result<(), BrokerError> {
        let now = Moment::now();
        self.watched.note(|notes| {
            notes.last_acknowledged = Some(now);
            if let Some(open) = self.open.get_mut(source) {
                let done = open.partition_point(|(sequence, _)| *sequence <= through);
                notes.acknowledged_at.extend(open.drain(..done).map(|(_, id)| (id, now.at)));
            }
        });
        self.subscriber.acknowledge(source, through).await
    }

    async fn finished(&mut self, source: &PartitionId, sequences: &[i64]) {
        self.subscriber.finished(source, sequences).await;
    }

    fn set_aside(&mut self, source: &PartitionId, sequence: i64) {
        self.subscriber.set_aside(source, sequence);
    }

    fn pause(&mut self, paused: bool) {
        self.subscriber.pause(paused);
    }

    async fn caught_up(&mut self) -> Result<bool, BrokerError> {
        self.subscriber.caught_up().await
    }

    async fn close(self: Box<Self>) {
        self.subscriber.close().await;
    }
}
