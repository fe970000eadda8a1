//! The consumer's side: the subscriber that the runtime uses. A task (`member`) does the work of
//! the membership.
//!
//! Guarantees: events come in the order in which they happened. `next` may be dropped at any point.
//! An acknowledgement is noted at once and committed soon, together with others; all are committed
//! when the subscriber is closed.
//!
//! Not here: heartbeats and reading. They go on while the runtime is busy with a handler.

use std::collections::HashMap;
use std::sync::Arc;

use async_trait::async_trait;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::log::Log;
use super::member::Member;
use super::talk::{MemberState, Told};
use crate::broker::{Begun, Event, PartitionId, Subscriber, Subscription};
use crate::error::BrokerError;
use crate::inbox::rules::position::{BrokerOffsets, Position, start};
use crate::task;

#[derive(Debug)]
pub(super) struct EmbeddedSubscriber {
    events: mpsc::UnboundedReceiver<Told>,
    shared: Arc<MemberState>,
    /// By source: the next offset to deliver, and the end of the partition at its assignment.
    delivered: HashMap<PartitionId, (i64, i64)>,
    /// Assigned sources for which `begin` was not called yet.
    unbegun: HashMap<PartitionId, BrokerOffsets>,
    member: JoinHandle<()>,
    log: Arc<Log>,
}

impl EmbeddedSubscriber {
    pub(super) async fn join(log: Arc<Log>, subscription: &Subscription) -> Result<Self, BrokerError> {
        if subscription.topics.is_empty() {
            return Err(BrokerError::Refused(format!("consumer `{}` has no topics", subscription.consumer)));
        }
        let shared = Arc::new(MemberState::default());
        let (told, events) = mpsc::unbounded_channel();
        let member = Member::join(Arc::clone(&log), subscription, Arc::clone(&shared), told).await?;
        Ok(Self {
            events,
            shared,
            delivered: HashMap::new(),
            unbegun: HashMap::new(),
            member: task::spawn(member.run()),
            log,
        })
    }
}

#[async_trait]
impl Subscriber for EmbeddedSubscriber {
    async fn next(&mut self) -> Result<Event, BrokerError> {
        let unbegun: Vec<_> = self.unbegun.keys().map(|id| (id.clone(), None)).collect();
        self.begin(unbegun).await?;
        let told = self.events.recv().await;
        let ended = || Err(BrokerError::Session("the subscriber has ended".to_owned()));
        let (event, found) = told.unwrap_or_else(ended)?;
        match &event {
            Event::Assigned(sources) => self.unbegun.extend(sources.iter().cloned().zip(found)),
            Event::Deliveries(deliveries) => {
                self.shared.took_batch();
                for delivery in deliveries {
                    if let Some((next, _)) = self.delivered.get_mut(&delivery.source) {
                        *next = delivery.sequence + 1;
                    }
                }
            }
            Event::Revoked { sources, .. } => {
                self.delivered.retain(|id, _| !sources.contains(id));
                self.unbegun.retain(|id, _| !sources.contains(id));
            }
        }
        Ok(event)
    }

    async fn begin(&mut self, remembered: Vec<(PartitionId, Option<Position>)>) -> Result<Vec<Begun>, BrokerError> {
        let mut begun = Vec::new();
        for (source, position) in remembered {
            let Some(found) = self.unbegun.remove(&source) else { continue };
            let start = start(position.as_ref(), &found);
            self.delivered.insert(source.clone(), (start.at, found.end));
            self.shared.begin(&source, Some(start.at));
            begun.push(Begun { source, topic_id: found.topic_id, start });
        }
        Ok(begun)
    }

    async fn acknowledge(&mut self, source: &PartitionId, through: i64) -> Result<(), BrokerError> {
        self.shared.acknowledge(source, through);
        Ok(())
    }

    async fn finished(&mut self, source: &PartitionId, sequences: &[i64]) {
        self.shared.no_longer_in_flight(source, sequences, false);
    }

    fn set_aside(&mut self, source: &PartitionId, sequence: i64) {
        self.shared.no_longer_in_flight(source, &[sequence], true);
    }

    fn refuse(&mut self, source: &PartitionId) {
        if let Some((_, end)) = self.delivered.get_mut(source) {
            // Nothing of it is waited for.
            *end = 0;
            self.shared.begin(source, None);
        }
    }

    fn pause(&mut self, paused: bool) {
        self.shared.pause(paused);
    }

    fn has_no_share(&self) -> bool {
        self.shared.others_hold_all()
    }

    async fn caught_up(&mut self) -> Result<bool, BrokerError> {
        if self.delivered.is_empty() && self.unbegun.is_empty() {
            return Ok(self.shared.others_hold_all());
        }
        Ok(self.unbegun.is_empty() && self.delivered.values().all(|(next, end)| next >= end))
    }

    async fn close(self: Box<Self>) {
        let Self { events, member, log, .. } = *self;
        // When the receiver is dropped, the task commits what is acknowledged and leaves the group.
        drop(events);
        if tokio::time::timeout(log.config.busy_timeout, member).await.is_err() {
            tracing::warn!("the embedded subscriber did not leave its group in time");
        }
    }
}
