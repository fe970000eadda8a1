//! The way back of dead and held rows (R17): decided by the reader between two reads, in position order, under the same
//! window rules, removed in the marking transaction.
//!
//! A row is on its way back when it is held, its key has no older dead row, and its destination is open: an operator's
//! redrive turns a dead row into such a one, a discard takes it away, a probe opens a topic. The first row of a topic that was
//! blocked goes alone: it is the trial.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use tokio::time::Instant;

use super::pump::{Doubt, Pump, doubt_of};
use super::sending::Unsent;
use crate::broker::TopicState;
use crate::policy::diversion::{Diverted, DivertedRow};
use crate::store::{Diversion, RelaySession, RequestedAct, Store};

/// How often operators' requests are looked for while something is dead.
const REQUESTS: Duration = Duration::from_millis(500);

/// What is known of a topic that was blocked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Opening {
    /// The broker knows it: its first row goes alone.
    Trial,
    /// The trial went through.
    Open,
}

/// The state of releasing in one session.
#[derive(Debug)]
pub(super) struct Release {
    topics: HashMap<String, Opening>,
    /// Rows of the table that are in flight.
    pub(super) in_flight: HashSet<i64>,
    /// Rows an operator wants sent again.
    redriven: HashSet<i64>,
    pauses_reading: bool,
    /// Something changed: look for rows on their way back.
    look: bool,
    requests_at: Instant,
    probe_at: Instant,
    pub(super) alone_topic: Option<String>,
    pub(super) alone_key: Option<String>,
}

impl Release {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            topics: HashMap::new(),
            in_flight: HashSet::new(),
            redriven: HashSet::new(),
            pauses_reading: false,
            look: true,
            requests_at: now,
            probe_at: now,
            alone_topic: None,
            alone_key: None,
        }
    }

    /// True while less than a batch of rows is on its way back: then they come first, so that the key or topic is free again.
    pub(super) fn pauses_reading(&self) -> bool {
        self.pauses_reading
    }

    pub(super) fn is_idle(&self) -> bool {
        self.in_flight.is_empty() && !self.pauses_reading && !self.look
    }

    pub(super) fn look_again(&mut self) {
        self.look = true;
    }

    /// A row left the table.
    pub(super) fn left(&mut self, position: i64) {
        self.in_flight.remove(&position);
        self.redriven.remove(&position);
        self.look = true;
    }

    /// True where the destination is blocked and no probe has opened it.
    pub(super) fn is_closed(&self, topic: &str, diverted: &crate::policy::diversion::Diversion) -> bool {
        !self.topics.contains_key(topic) && diverted.blocked_topics().any(|blocked| blocked == topic)
    }

    /// The trial of a topic went through.
    pub(super) fn opened(&mut self, topic: &str) {
        if let Some(opening) = self.topics.get_mut(topic) {
            *opening = Opening::Open;
        }
        self.look = true;
    }

    /// A row on its way back was refused: its topic is closed until the next probe.
    pub(super) fn refused(&mut self, topic: &str, position: i64) {
        self.topics.remove(topic);
        self.in_flight.remove(&position);
        self.look = true;
    }

    /// The change of a row is stored, and with it the request that led there is done. Not earlier: until then the request
    /// still stands in the table and would be taken a second time.
    pub(super) fn changed(&mut self, position: i64) {
        self.redriven.remove(&position);
        self.look = true;
    }

    /// The table is loaded anew, requests with it.
    pub(super) fn reloaded(&mut self, now: Instant) {
        self.redriven.clear();
        self.requests_at = now;
        self.look = true;
    }
}

/// Why a row is diverted, in the words of the policy; none for a dead row under policy `skip`, which holds nothing.
pub(super) fn why(diversion: &Diversion) -> Option<Diverted> {
    match diversion {
        Diversion::Dead { holds: true, .. } => Some(Diverted::Dead),
        Diversion::Dead { holds: false, .. } => None,
        Diversion::HeldBehind => Some(Diverted::BehindDead),
        Diversion::HeldDestination { .. } => Some(Diverted::Destination),
    }
}

impl<S: Store> Pump<'_, S> {
    /// Requests, probes, and rows on their way back; false where nothing moved.
    pub(super) async fn look_after_released(&mut self) -> Result<bool, Doubt> {
        let now = Instant::now();
        if now >= self.release.requests_at {
            self.release.requests_at = now + REQUESTS;
            self.take_requests().await?;
        }
        if self.diverted.is_empty() {
            self.release.pauses_reading = false;
            self.release.look = false;
            return Ok(false);
        }
        if now >= self.release.probe_at {
            self.release.probe_at = now + self.relay.options.probe;
            self.probe().await?;
        }
        if !self.release.look || self.alone.is_some() || !self.unsent.is_empty() {
            return Ok(false);
        }
        self.send_released().await
    }

    async fn take_requests(&mut self) -> Result<(), Doubt> {
        for request in self.session.requests().await? {
            match request.act {
                RequestedAct::Redrive if self.release.redriven.insert(request.position) => {
                    let (position, topic, key) = (request.position, request.topic, request.key);
                    tracing::info!(position, %topic, "an operator redrives a dead message");
                    self.diverted.divert(DivertedRow { position, topic, key, why: Diverted::BehindDead });
                    self.release.look = true;
                }
                RequestedAct::Discard if self.release.in_flight.insert(request.position) => {
                    tracing::info!(position = request.position, topic = %request.topic, "an operator discards a message");
                    let batch = self.window.open(None, 0);
                    self.window.discard(batch, request.position);
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Asks whether blocked destinations are there by now.
    async fn probe(&mut self) -> Result<(), Doubt> {
        let blocked: Vec<String> = self.diverted.blocked_topics().map(str::to_owned).collect();
        self.release.topics.retain(|topic, _| blocked.contains(topic));
        for topic in blocked {
            if self.release.topics.contains_key(&topic) {
                continue;
            }
            if self.publisher.topic(&topic).await.map_err(|error| doubt_of(&error))? == TopicState::Ready {
                self.release.topics.insert(topic, Opening::Trial);
                self.release.look = true;
            }
        }
        Ok(())
    }

    async fn send_released(&mut self) -> Result<bool, Doubt> {
        let batch_rows = self.relay.options.batch_rows;
        let blocked: HashSet<String> = self.diverted.blocked_topics().map(str::to_owned).collect();
        let topics = &self.release.topics;
        let is_open = |topic: &str| !blocked.contains(topic) || topics.contains_key(topic);
        let mut trial = None;
        let mut positions = Vec::new();
        let mut more = false;
        for row in self.diverted.releasable(is_open) {
            if self.unmarked.contains(&row.position) {
                // Not in the table yet, and later ones must not overtake it.
                more = true;
                break;
            }
            if self.release.in_flight.contains(&row.position) {
                continue;
            }
            if blocked.contains(&row.topic) && topics.get(&row.topic) == Some(&Opening::Trial) {
                trial.get_or_insert((row.position, row.topic.clone()));
                continue;
            }
            if positions.len() == batch_rows {
                more = true;
                break;
            }
            positions.push(row.position);
        }
        let alone = positions.is_empty() && trial.is_some();
        if let (true, Some((position, _))) = (alone, trial.clone()) {
            positions.push(position);
        }
        // Less than a batch is left: reading waits until it is proven, so that nothing new is diverted behind it for ever.
        let under_way = !positions.is_empty() || !self.release.in_flight.is_empty() || more;
        self.release.pauses_reading = under_way && positions.len() < batch_rows;
        if positions.is_empty() {
            self.release.look = more && self.window.is_empty();
            return Ok(false);
        }
        if alone && self.window.in_flight() > 0 {
            return Ok(false);
        }
        self.release.look = more || trial.is_some();
        let rows = self.session.held(&positions).await?;
        // Large ones come a few at a time: the others are looked for when these have left.
        let batch = self.window.open(None, rows.len());
        for row in rows {
            self.release.in_flight.insert(row.position);
            self.unsent.push_back(Unsent {
                position: row.position,
                batch,
                message: row.message,
                is_release: true,
                // A redriven row was refused once: it must not take others down with it.
                alone: alone || self.release.redriven.contains(&row.position),
            });
        }
        Ok(true)
    }
}
