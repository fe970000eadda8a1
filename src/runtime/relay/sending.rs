//! Row by row, at the moment of sending: broker, dead, held, or alone; and what the broker says of each.
//!
//! Promise: the decision is made when a row's turn comes, so a refusal that was just heard already counts for the next row of
//! its key; a topic that was not seen is diverted before anything of it is produced (R19).

use std::hash::{DefaultHasher, Hash, Hasher};

use super::pump::{Doubt, Pump, doubt_of};
use super::window::Sent;
use crate::broker::{Refusal, Settled, TopicState};
use crate::error::BrokerError;
use crate::message::OutgoingMessage;
use crate::observe::{self, FailureClass};
use crate::policy::diversion::{Behind, DivertedRow, Way};
use crate::policy::isolate::{Cause, Mode};
use crate::store::{Diversion, Store};

/// A row that was read and claimed, and is not yet sent.
#[derive(Debug)]
pub(super) struct Unsent {
    pub(super) position: i64,
    pub(super) batch: u64,
    pub(super) message: OutgoingMessage,
    /// It comes from the dead and held table.
    pub(super) is_release: bool,
    /// Nothing else is in flight with it.
    pub(super) alone: bool,
}

impl<S: Store> Pump<'_, S> {
    /// Sends what may be sent; false where nothing moved.
    pub(super) async fn send_unsent(&mut self) -> Result<bool, Doubt> {
        if self.unsent.is_empty() {
            return Ok(false);
        }
        let mut out = Vec::with_capacity(self.unsent.len());
        let mut moved = false;
        while self.alone.is_none() {
            let Some(row) = self.unsent.front() else { break };
            if row.is_release && !self.still_released(row) {
                self.release.in_flight.remove(&row.position);
                self.window.leave(row.batch);
                self.unsent.pop_front();
                moved = true;
                continue;
            }
            let alone = row.alone || self.memory.isolation.mode() == Mode::Alone(row.position);
            if alone && (self.window.in_flight() > 0 || !out.is_empty()) {
                // Everything before it is proven first.
                break;
            }
            let Some(row) = self.unsent.pop_front() else { break };
            moved = true;
            if let Some(diversion) = self.diversion_of(&row, alone).await? {
                self.divert(row, diversion);
                continue;
            }
            let sent = Sent {
                position: row.position,
                batch: row.batch,
                key_hash: key_hash(&row.message),
                weight: row.message.weight(),
                is_release: row.is_release,
                settled: false,
            };
            let tag = self.window.send(sent);
            if alone {
                self.alone = Some(tag);
                self.release.alone_topic = Some(row.message.topic.clone());
                self.release.alone_key = row.message.key.clone();
            }
            out.push((tag, row.message));
        }
        if !out.is_empty() {
            self.publisher.send(out).await.map_err(|error| doubt_of(&error))?;
        }
        Ok(moved)
    }

    /// Whether a row on its way back still is: the one before it may just have been refused again.
    fn still_released(&self, row: &Unsent) -> bool {
        self.diverted.is_free(row.position) && !self.release.is_closed(&row.message.topic, &self.diverted)
    }

    /// Whether the row leaves the way to the broker, and as what.
    async fn diversion_of(&mut self, row: &Unsent, alone: bool) -> Result<Option<Diversion>, Doubt> {
        let (topic, key) = (&row.message.topic, row.message.key.as_deref());
        // Also for a row on its way back: without its verdict it would end every session, and nothing else would flow (G3).
        if let Some(verdict) = self.memory.verdicts.get(&row.position) {
            let holds = self.relay.options.holds(topic);
            return Ok(Some(match verdict.clone() {
                Diversion::Dead { reason, .. } => Diversion::Dead { reason, holds },
                other => other,
            }));
        }
        if !row.is_release && !self.diverted.is_empty() {
            match self.diverted.decide(topic, key) {
                Way::Send => {}
                Way::Hold(Behind::Dead) => return Ok(Some(Diversion::HeldBehind)),
                Way::Hold(Behind::Destination) => {
                    let reason = format!("the topic `{topic}` is blocked");
                    return Ok(Some(Diversion::HeldDestination { reason }));
                }
            }
        }
        let probe = alone && self.memory.isolation.needs_probe();
        if probe || !self.ready_topics.contains(topic) {
            let mut state = self.publisher.topic(topic).await.map_err(|error| doubt_of(&error))?;
            if state != TopicState::Ready && self.relay.options.declare_topics {
                state = self.declare(topic).await?;
            }
            match state {
                TopicState::Ready => {
                    if probe {
                        self.memory.isolation.on_probe_succeeded();
                    }
                    self.ready_topics.insert(topic.clone());
                }
                TopicState::NotReady(reason) => return Ok(Some(Diversion::HeldDestination { reason })),
            }
        }
        Ok(None)
    }

    /// Makes a topic that is not there; what stands in the way is the topic's trouble, not the session's.
    async fn declare(&mut self, topic: &str) -> Result<TopicState, Doubt> {
        match self.relay.broker.declare(&[topic.to_owned()]).await {
            Ok(()) => self.publisher.topic(topic).await.map_err(|error| doubt_of(&error)),
            Err(BrokerError::Refused(why) | BrokerError::Destination(why)) => Ok(TopicState::NotReady(why)),
            Err(error) => Err(doubt_of(&error)),
        }
    }

    fn divert(&mut self, row: Unsent, diversion: Diversion) {
        self.memory.isolation.on_settled(row.position);
        match &diversion {
            Diversion::Dead { reason, holds } => {
                observe::publish_failed(self.relay.broker.name(), FailureClass::Message);
                tracing::error!(position = row.position, id = %row.message.id, topic = %row.message.topic, reason, holds, "a message is dead: it cannot be sent");
            }
            Diversion::HeldDestination { reason }
                if !self.diverted.blocked_topics().any(|topic| topic == row.message.topic) =>
            {
                observe::publish_failed(self.relay.broker.name(), FailureClass::Destination);
                tracing::warn!(topic = %row.message.topic, reason, "the destination is blocked; its messages are held and released by themselves");
            }
            _ => {}
        }
        let Unsent { position, batch, message, is_release, .. } = row;
        self.stand_aside(position, batch, message.topic, message.key, is_release, diversion);
    }

    /// The row goes to the dead and held table; one on its way back stays there, for another reason. A redriven row whose
    /// topic is blocked is held for its destination from then on: left as it was, it would be tried without end, and reading
    /// would wait for it.
    fn stand_aside(
        &mut self,
        position: i64,
        batch: u64,
        topic: String,
        key: Option<String>,
        is_release: bool,
        diversion: Diversion,
    ) {
        if is_release {
            self.release.refused(&topic, position);
        }
        match super::release::why(&diversion) {
            Some(why) => self.diverted.divert(DivertedRow { position, topic, key, why }),
            // Dead under policy `skip`: it holds nothing.
            None => drop(self.diverted.leave(position)),
        }
        if is_release {
            self.window.change(batch, position, diversion);
        } else {
            self.unmarked.insert(position);
            self.window.divert(batch, position, diversion);
        }
    }

    /// Takes the broker's word on one row; true where it is proven.
    pub(super) fn settle(&mut self, settled: Settled) -> Result<bool, Doubt> {
        let Some(sent) = self.window.get(settled.tag) else { return Ok(false) };
        let alone = self.alone == Some(settled.tag);
        let Err(refusal) = settled.outcome else {
            self.window.prove(settled.tag);
            self.memory.isolation.on_settled(sent.position);
            if alone {
                self.alone = None;
                if let Some(topic) = self.release.alone_topic.take() {
                    self.release.opened(&topic);
                }
            }
            return Ok(true);
        };
        let (class, cause, why) = match refusal {
            Refusal::Message(why) => (FailureClass::Message, Cause::Message, why),
            Refusal::Destination(why) => (FailureClass::Destination, Cause::Destination, why),
            Refusal::Session(why) => (FailureClass::Session, Cause::Nack, why),
        };
        let after = self.window.proven_after(settled.tag);
        if !after.is_empty() {
            observe::order_incident(self.relay.broker.name());
            tracing::error!(position = sent.position, later = ?after, %why, "order incident: refused after later messages of its key were taken");
        }
        if !alone || cause == Cause::Nack {
            observe::publish_failed(self.relay.broker.name(), class);
            return Err(Doubt { row: Some(sent.position), cause, why, store: None });
        }
        self.refused_alone(settled.tag, sent, cause, why);
        Ok(false)
    }

    /// Nothing else was in flight, so nothing may have been reordered: the session goes on.
    fn refused_alone(&mut self, tag: u64, sent: Sent, cause: Cause, why: String) {
        self.alone = None;
        self.window.settle(tag);
        self.memory.isolation.on_settled(sent.position);
        let topic = self.release.alone_topic.take().unwrap_or_default();
        let key = self.release.alone_key.take();
        let dead = cause == Cause::Message;
        observe::publish_failed(
            self.relay.broker.name(),
            if dead { FailureClass::Message } else { FailureClass::Destination },
        );
        let diversion = if dead {
            tracing::error!(position = sent.position, %topic, %why, "a message is dead: the broker refused it, sent alone");
            let holds = self.relay.options.holds(&topic);
            Diversion::Dead { reason: why, holds }
        } else {
            tracing::warn!(%topic, %why, "the destination is blocked; its messages are held and released by themselves");
            Diversion::HeldDestination { reason: why }
        };
        // Remembered until it is marked: where the next bad row of the batch ends the session first, this one must not be found
        // out anew, or n bad rows of one batch take sessions without end.
        self.memory.verdicts.insert(sent.position, diversion.clone());
        // The next bad row must not wait as if the broker were away.
        self.memory.progress = true;
        self.stand_aside(sent.position, sent.batch, topic, key, sent.is_release, diversion);
    }
}

fn key_hash(message: &OutgoingMessage) -> u64 {
    let Some(key) = &message.key else { return 0 };
    let mut hasher = DefaultHasher::new();
    (&message.topic, key).hash(&mut hasher);
    hasher.finish().max(1)
}
