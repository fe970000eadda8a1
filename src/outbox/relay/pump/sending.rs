//! What becomes of each row at the moment of sending (sent, dead, held, or sent alone), and the
//! handling of the broker's answer for it.
//!
//! Promise: the decision is made when a row's turn comes, so that a refusal that has just arrived
//! counts for the next row of its key. Rows of a topic that is not ready are diverted before any is
//! sent (R19). A refusal for the destination holds its topic and the session goes on, unless the
//! broker may still take a later row of the same key.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use tokio::time::Instant;

use super::{Pump, release};
use crate::broker::{Refusal, TopicState};
use crate::error::StoreError;
use crate::observe::{self, FailureClass};
use crate::outbox::port::{Diversion, Mark, RelaySession};
use crate::outbox::relay::ending::{Doubt, Ending, Of, Refused};
use crate::outbox::relay::trial;
use crate::outbox::relay::window::Unsent;
use crate::outbox::rules::diversion::{Diverted, DivertedRow};
use crate::time::lease::Lease;

/// How long a session that is ending waits for rows in flight.
const DRAIN_MAX: Duration = Duration::from_millis(500);

/// A row that goes to the dead and held table, or stays there.
#[derive(Debug)]
struct Aside {
    position: i64,
    batch: u64,
    topic: String,
    key: Option<String>,
    is_release: bool,
}

impl Pump<'_> {
    /// Sends the rows that may be sent. Returns false where nothing happened.
    pub(super) async fn send_unsent(&mut self) -> Result<bool, Doubt> {
        if self.unsent.is_empty() || self.ending.is_some() {
            return Ok(false);
        }
        let not_ready = self.see_topics().await?;
        let now = self.clock;
        let mut out = Vec::with_capacity(self.unsent.len());
        let mut moved = false;
        while self.alone.is_none() {
            let Some(row) = self.unsent.front() else { break };
            if row.is_release && !self.still_released(row) {
                self.diverted.stays(row.position);
                self.release.look_again();
                self.window.leave(row.batch);
                self.unsent.pop_front();
                moved = true;
                continue;
            }
            let alone = row.alone || self.memory.isolation.alone() == Some(row.position);
            if alone && (self.window.in_flight() > 0 || !out.is_empty()) {
                // All rows before it must be settled first.
                break;
            }
            let Some(row) = self.unsent.pop_front() else { break };
            moved = true;
            if let Some(diversion) = self.diversion_of(&row, &not_ready) {
                self.divert(row, diversion);
                continue;
            }
            let tag = self.window.send(&row, now);
            if alone {
                self.alone = Some(tag);
            }
            out.push((tag, row.message));
        }
        if !out.is_empty() {
            let limit = self.relay.options.publish_stall;
            let sending = tokio::time::timeout(limit, self.publisher.send(out));
            let lease = self.relay.options.lease;
            let sent = renewing(self.session.as_mut(), &mut self.checkpoint_at, lease, sending).await?;
            let Ok(sent) = sent else {
                let why = format!("the broker's client has been full for {}", humantime::format_duration(limit));
                let topics = self.may_fill_the_client().into_iter().map(|(topic, _)| (topic, why.clone())).collect();
                return Err(Doubt::Silent { topics, overtaken: self.window.is_overtaken(), why });
            };
            sent.map_err(|error| self.broken(&error))?;
        }
        Ok(moved)
    }

    /// Asks for the state of the waiting rows' topics that this session has not seen, in one call.
    /// Returns the topics that are not ready, with the reason.
    async fn see_topics(&mut self) -> Result<HashMap<String, String>, Doubt> {
        let mut unknown = BTreeSet::new();
        for row in &self.unsent {
            let topic = &row.message.topic;
            let is_known = self.ready_topics.contains(topic) || self.memory.blocked.contains_key(topic);
            if !is_known && (row.is_release || !self.diverted.blocks(topic)) {
                unknown.insert(topic.clone());
            }
        }
        if unknown.is_empty() {
            return Ok(HashMap::new());
        }
        let unknown: Vec<String> = unknown.into_iter().collect();
        let (broker, declare) = (self.relay.broker.as_ref(), self.relay.options.declare_topics);
        let seeing = trial::see(broker, self.publisher.as_mut(), &unknown, declare);
        let lease = self.relay.options.lease;
        let states = renewing(self.session.as_mut(), &mut self.checkpoint_at, lease, seeing).await?;
        let mut not_ready = HashMap::new();
        for (topic, state) in unknown.into_iter().zip(states.map_err(|error| self.broken(&error))?) {
            match state {
                TopicState::Ready => _ = self.ready_topics.insert(topic),
                TopicState::NotReady(why) => _ = not_ready.insert(topic, why),
            }
        }
        Ok(not_ready)
    }

    /// Whether a row may still be released: the row before it may just have been refused again.
    fn still_released(&self, row: &Unsent) -> bool {
        self.diverted.is_free(row.position) && self.goes_back(&row.message.topic)
    }

    /// The diversion of a row that must not be sent now; `None` where it may be sent.
    fn diversion_of(&self, row: &Unsent, not_ready: &HashMap<String, String>) -> Option<Diversion> {
        let (topic, key) = (&row.message.topic, row.message.key.as_deref());
        // A verdict also applies to a row under release: otherwise the row would end every session,
        // and no other key would be served (G3).
        if let Some(verdict) = self.memory.verdicts.get(&row.position) {
            let holds = self.relay.options.holds(topic);
            return Some(match verdict.clone() {
                Diversion::Dead { reason, .. } => Diversion::Dead { reason, holds },
                other => other,
            });
        }
        if !row.is_release && self.memory.alone.contains(&row.position) {
            return Some(Diversion::HeldBehind);
        }
        if !row.is_release && !self.diverted.is_empty() {
            match self.diverted.decide(topic, key) {
                None => {}
                Some(Diverted::Destination) => {
                    let reason = format!("the topic `{topic}` is blocked");
                    return Some(Diversion::HeldDestination { reason });
                }
                Some(Diverted::BehindDead | Diverted::Dead) => return Some(Diversion::HeldBehind),
            }
        }
        let blocked = self.memory.blocked.get(topic).or_else(|| not_ready.get(topic));
        blocked.map(|reason| Diversion::HeldDestination { reason: reason.clone() })
    }

    fn divert(&mut self, row: Unsent, diversion: Diversion) {
        self.memory.isolation.on_settled(row.position);
        match &diversion {
            Diversion::Dead { reason, holds } => {
                observe::publish_failed(self.relay.broker.name(), FailureClass::Message);
                tracing::error!(position = row.position, id = %row.message.id, topic = %row.message.topic, reason, holds, "a message is dead: it cannot be sent");
            }
            Diversion::HeldDestination { reason } if !self.diverted.blocks(&row.message.topic) => {
                self.blocked(&row.message.topic, reason);
            }
            _ => {}
        }
        let Unsent { position, batch, message, is_release, .. } = row;
        let row = Aside { position, batch, topic: message.topic, key: message.key, is_release };
        self.stand_aside(row, diversion);
    }

    /// Diverts a row into the dead and held table. A row under release stays there with another
    /// reason. A redriven row whose topic is blocked is then held for its destination: otherwise it
    /// would be tried without end, and reading would wait for it.
    fn stand_aside(&mut self, row: Aside, diversion: Diversion) {
        let Aside { position, batch, topic, key, is_release } = row;
        if is_release {
            self.diverted.stays(position);
            self.release.stays();
        }
        if let Diversion::HeldDestination { reason } = &diversion {
            self.release.says(&topic, position, reason);
            if is_release {
                self.release.close(&topic);
            }
        }
        match release::why(&diversion) {
            Some(why) => self.diverted.divert(DivertedRow { position, topic, key, why }),
            // Dead under policy `skip`: the row holds no other row.
            None => self.diverted.leave(position),
        }
        if is_release {
            self.window.change(batch, position, diversion);
        } else {
            self.unmarked.insert(position);
            self.window.divert(batch, position, diversion);
        }
    }

    fn blocked(&self, topic: &str, reason: &str) {
        observe::publish_failed(self.relay.broker.name(), FailureClass::Destination);
        tracing::warn!(topic, reason, "the destination is blocked; its messages are held and released by themselves");
    }

    /// Handles a proof of the broker. Returns false for a tag that is not in flight.
    pub(super) fn proven(&mut self, tag: u64) -> bool {
        let Some(sent) = self.window.get(tag) else { return false };
        let (position, id) = (sent.position, sent.id);
        if let Some(ending) = &self.ending {
            let key = (self.window.topic(sent), sent.key.as_deref());
            let is_before = |refused: &&Refused| refused.position < position;
            let of_key = |refused: &Refused| (refused.topic.as_str(), refused.key.as_deref()) == key;
            if key.1.is_some() && ending.refused.iter().filter(is_before).any(of_key) {
                observe::order_incident(self.relay.broker.name());
                tracing::error!(position, %id, "order incident: taken after an earlier message of its key was refused");
            }
        }
        if sent.is_release {
            self.release.proven(self.relay.options.batch_rows);
        }
        if self.goes_in_turn() {
            self.window.turns(tag, self.clock);
        }
        self.window.prove(tag);
        self.memory.isolation.on_settled(position);
        if self.alone == Some(tag) {
            self.alone = None;
        }
        true
    }

    /// Handles the broker's refusals, after everything that it proved at the same time. A refusal
    /// for the destination holds the topic. A refusal for the message holds its key until the
    /// message was sent alone. Any other refusal ends the session, once the other rows have had
    /// time to be settled.
    pub(super) fn refused(&mut self, refusals: Vec<(u64, Refusal)>) {
        let mut all = Vec::new();
        for (tag, refusal) in refusals {
            let Some(sent) = self.window.get(tag) else { continue };
            let after = self.window.proven_after(tag);
            if !after.is_empty() {
                observe::order_incident(self.relay.broker.name());
                tracing::error!(position = sent.position, id = %sent.id, later = ?after, ?refusal, "order incident: refused after later messages of its key were taken");
            }
            let alone = self.alone == Some(tag);
            let Some(sent) = self.window.refuse(tag) else { continue };
            let topic = self.window.topic(&sent).to_owned();
            let (position, batch, is_release) = (sent.position, sent.batch, sent.is_release);
            let row = Aside { position, batch, topic, key: sent.key.map(String::from), is_release };
            let refused = |of, why| Refused { position, topic: row.topic.clone(), key: row.key.clone(), of, why };
            match refusal {
                Refusal::Destination(reason) => {
                    if !self.diverted.blocks(&row.topic) {
                        self.blocked(&row.topic, &reason);
                    }
                    self.memory.isolation.on_settled(position);
                    self.memory.blocked.insert(row.topic.clone(), reason.clone());
                    self.memory.progress = true;
                    self.ready_topics.remove(&row.topic);
                    self.release.close(&row.topic);
                    all.push(refused(Of::Destination, reason.clone()));
                    self.stand_aside(row, Diversion::HeldDestination { reason });
                }
                Refusal::Message(reason) if alone => self.dead(row, reason),
                Refusal::Message(reason) => {
                    tracing::warn!(position, topic = %row.topic, %reason, "the broker refused a message that was sent with others; sending it alone");
                    self.memory.isolation.on_settled(position);
                    self.memory.alone.insert(position);
                    self.memory.progress = true;
                    all.push(refused(Of::Message, reason));
                    self.stand_aside(row, Diversion::HeldBehind);
                }
                Refusal::Behind(_) => self.stand_aside(row, Diversion::HeldBehind),
                Refusal::Session(why) => {
                    observe::publish_failed(self.relay.broker.name(), FailureClass::Session);
                    all.push(refused(Of::Session, why));
                }
            }
            if alone {
                self.alone = None;
            }
        }
        self.ends_over(all);
    }

    /// Ends the session where nothing is known of a refused row, or where a later row of its key is
    /// in flight. After a refusal for the destination that later row may be refused too, so its
    /// outcome is awaited. Otherwise the client must not send it, and the session ends at once.
    fn ends_over(&mut self, mut refused: Vec<Refused>) {
        let in_flight = self.window.in_flight_of(&refused.iter().map(Refused::key).collect());
        let at_once = refused.iter().any(|one| one.of != Of::Destination && in_flight.contains(&one.key()));
        refused.retain(|one| one.of == Of::Session || in_flight.contains(&one.key()));
        if refused.is_empty() {
            return;
        }
        let until = Instant::now() + if at_once { Duration::ZERO } else { DRAIN_MAX };
        let ending = self.ending.get_or_insert_with(|| Ending { until, refused: Vec::new() });
        ending.until = ending.until.min(until);
        ending.refused.extend(refused);
    }

    /// True where the broker gets one row of a key at a time (R20), because it is no log that keeps
    /// them in order by itself.
    pub(super) fn goes_in_turn(&self) -> bool {
        !self.relay.broker.is_log()
    }

    /// Declares a row dead. It was in flight alone: nothing is reordered, the session goes on.
    fn dead(&mut self, row: Aside, reason: String) {
        let position = row.position;
        self.memory.isolation.on_settled(position);
        observe::publish_failed(self.relay.broker.name(), FailureClass::Message);
        tracing::error!(position, topic = %row.topic, %reason, "a message is dead: the broker refused it, sent alone");
        let holds = self.relay.options.holds(&row.topic);
        let diversion = Diversion::Dead { reason, holds };
        // Kept until it is marked, so that a session that ends before need not find it out again.
        self.memory.verdicts.insert(position, diversion.clone());
        self.memory.alone.remove(&position);
        self.memory.progress = true;
        self.stand_aside(row, diversion);
    }
}

/// Waits for the broker's client, and renews the lease meanwhile. Otherwise a client that is full,
/// or answers late, would cost the lease, and the next owner would wait for the same broker.
pub(super) async fn renewing<T>(
    session: &mut dyn RelaySession,
    checkpoint_at: &mut Instant,
    lease: Duration,
    client: impl Future<Output = T>,
) -> Result<T, StoreError> {
    let mut client = std::pin::pin!(client);
    loop {
        let renewal = *checkpoint_at + Lease::renewed_after(lease);
        if let Ok(done) = tokio::time::timeout_at(renewal, client.as_mut()).await {
            return Ok(done);
        }
        session.checkpoint(Mark::default()).await?;
        *checkpoint_at = Instant::now();
    }
}
