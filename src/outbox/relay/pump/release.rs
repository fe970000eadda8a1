//! The release of dead and held rows (R17): how they return to the broker. The session decides
//! between two reads, in the order of positions and under the bounds of the window; the mark
//! removes released rows from the table.
//!
//! A row can be released when it is held, no older dead row of its key exists, and its destination
//! is open. An operator's redrive makes a dead row such a row; a discard removes it; a trial beside
//! the session opens a topic.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use tokio::time::Instant;

use super::Pump;
use crate::message::OutgoingMessage;
use crate::observe::{self, Trouble};
use crate::outbox::port::{Diversion, Mark, OperatorRequest, OutboxRow};
use crate::outbox::relay::TOPICS;
use crate::outbox::relay::ending::Doubt;
use crate::outbox::relay::trial::TrialResult;
use crate::outbox::relay::window::Unsent;
use crate::outbox::rules::diversion::{Diversion as DivertedRows, Diverted, DivertedRow};

/// How often the session looks for requests of operators.
const REQUESTS: Duration = Duration::from_millis(500);
/// How many requests are read at a time. A look goes on until it has read them all: requests that
/// cannot be carried out yet hide no other, and no row is released whose discard was asked for
/// together with that of a row before it.
const REQUESTS_MAX: usize = 1_000;

/// How many rows are released at first. Each one that is proven allows one more at a time, so that
/// the number doubles with each round of answers, up to a batch: the destination may still be
/// blocked, and then other rows have waited for a few rows only.
const FEW: usize = 16;
/// How long reading pauses until rows that were diverted behind released ones are stored, so that
/// they can be released too. Without the pause a topic that is never quiet would go through the
/// table for ever.
const PAUSE_MAX: Duration = Duration::from_millis(150);
/// The shortest time between two such pauses.
const PAUSE_EVERY: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Release {
    /// Blocked topics that a trial opened.
    open: HashSet<String>,
    /// Rows that an operator wants sent again.
    redriven: HashSet<i64>,
    /// How many rows may be under release at once.
    width: usize,
    /// Since when reading is paused.
    pause: Option<Instant>,
    pause_from: Instant,
    /// True where a row was sent alone and there was no read since.
    owes_a_read: bool,
    /// True where something changed: look for rows to release.
    look: bool,
    requests_at: Instant,
    /// For each blocked topic: the position of one of its held rows, and the reason of this row.
    reasons: HashMap<String, (i64, String)>,
}

impl Release {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            open: HashSet::new(),
            redriven: HashSet::new(),
            width: FEW,
            pause: None,
            pause_from: now,
            owes_a_read: false,
            look: true,
            requests_at: now,
            reasons: HashMap::new(),
        }
    }

    /// True while reading is paused, because rows that could follow the released ones are not
    /// stored yet.
    pub(super) fn pauses_reading(&self) -> bool {
        self.pause.is_some_and(|since| since.elapsed() < PAUSE_MAX)
    }

    fn pause(&mut self, wanted: bool) {
        let now = Instant::now();
        if !wanted {
            self.pause = None;
        } else if now >= self.pause_from {
            self.pause = Some(now);
            self.pause_from = now + PAUSE_EVERY;
        }
    }

    /// True where there is no reason to look for rows to release.
    pub(super) fn is_idle(&self) -> bool {
        !self.look
    }

    pub(super) fn look_again(&mut self) {
        self.look = true;
    }

    /// Notes a read, after which a row may be sent alone again.
    pub(super) fn was_read(&mut self) {
        self.owes_a_read = false;
    }

    /// Notes that the broker has proven a released row: one more may be under way.
    pub(super) fn proven(&mut self, batch_rows: usize) {
        self.width = (self.width + 1).min(batch_rows);
    }

    /// Notes that a released row goes back to the table: fewer may be under way.
    pub(super) fn stays(&mut self) {
        self.width = (self.width / 2).max(FEW);
        self.look = true;
    }

    /// Closes a topic until its next trial. Not to be called for a row that only stands behind held
    /// ones: these go on, and it follows them.
    pub(super) fn close(&mut self, topic: &str) {
        self.open.remove(topic);
    }

    /// Notes that this row is held for its destination, for this reason.
    pub(super) fn says(&mut self, topic: &str, position: i64, reason: &str) {
        let says = self.reasons.entry(topic.to_owned()).or_insert_with(|| (position, String::new()));
        if says.0 == position {
            reason.clone_into(&mut says.1);
        }
    }

    /// Notes that the database has stored a change of this row, or its removal from the table. That
    /// completes the request for the row. Not to be called earlier: until then the request is still
    /// in the table and would be taken twice.
    pub(super) fn stored(&mut self, position: i64) {
        self.redriven.remove(&position);
        self.look = true;
    }

    /// Notes that the table was loaded anew; requests are read again.
    pub(super) fn reloaded(&mut self, now: Instant) {
        self.redriven.clear();
        self.requests_at = now;
        self.look = true;
    }
}

/// The policy's reason for a diversion; `None` for a dead row under `skip`, which holds nothing.
pub(super) fn why(diversion: &Diversion) -> Option<Diverted> {
    match diversion {
        Diversion::Dead { holds: true, .. } => Some(Diverted::Dead),
        Diversion::Dead { holds: false, .. } => None,
        Diversion::HeldBehind => Some(Diverted::BehindDead),
        Diversion::HeldDestination { .. } => Some(Diverted::Destination),
    }
}

/// The position of the first row of each topic. It stops reading when it has found rows of that
/// many `topics`.
fn first_of_each<'a>(rows: impl Iterator<Item = &'a DivertedRow>, topics: usize) -> HashMap<&'a str, i64> {
    let mut first: HashMap<&str, i64> = HashMap::new();
    for row in rows {
        first.entry(&row.topic).or_insert(row.position);
        if first.len() == topics {
            break;
        }
    }
    first
}

impl Pump<'_> {
    pub(super) async fn load(&mut self) -> Result<(), Doubt> {
        let limit = self.relay.options.held_rows_max.saturating_add(1);
        let rows = self.session.diverted(limit).await?;
        self.not_loaded = rows.len() >= limit;
        self.some_left = false;
        self.release.reasons.clear();
        self.diverted = DivertedRows::load(rows.into_iter().filter_map(|row| {
            let why = why(&row.diversion)?;
            if let Diversion::HeldDestination { reason } = row.diversion {
                self.release.reasons.entry(row.topic.clone()).or_insert((row.position, reason));
            }
            Some(DivertedRow { position: row.position, topic: row.topic, key: row.key, why })
        }));
        self.look_at_dead().await
    }

    /// Handles operators' requests, trials, and rows to release. False where nothing happened.
    pub(super) async fn look_after_released(&mut self) -> Result<bool, Doubt> {
        if Instant::now() >= self.release.requests_at {
            self.take_requests().await?;
        }
        if self.diverted.is_empty() {
            self.release.pause(false);
            self.release.width = FEW;
            self.release.look = false;
            self.show_blocked(None);
            return Ok(false);
        }
        let tried = self.look_after_trials().await?;
        if !self.release.look || self.alone.is_some() || !self.unsent.is_empty() {
            return Ok(tried);
        }
        Ok(self.send_released().await? || tried)
    }

    /// Takes all requests, in the order of positions, before anything more is released. The pause
    /// after it grows with their number, so that many that cannot be carried out yet cost little.
    async fn take_requests(&mut self) -> Result<(), Doubt> {
        let mut after = Some(0);
        let mut pause = Duration::ZERO;
        while let Some(position) = after {
            let requests = self.session.requests(position, REQUESTS_MAX).await?;
            after = requests.last().filter(|_| requests.len() == REQUESTS_MAX).map(|last| last.position);
            pause += REQUESTS;
            self.take(requests);
        }
        self.release.requests_at = Instant::now() + pause;
        Ok(())
    }

    fn take(&mut self, requests: Vec<OperatorRequest>) {
        for request in requests {
            let OperatorRequest { position, topic, key, discard } = request;
            if discard {
                // Of a row that is on trial the request is read again when the trial is over. What
                // is discarded must not arrive.
                if !self.trials.has(position) && self.diverted.goes(position) {
                    tracing::info!(position, %topic, "an operator discards a message");
                    self.window.discard(position);
                }
            } else if self.release.redriven.insert(position) {
                tracing::info!(position, %topic, "an operator redrives a dead message");
                self.diverted.divert(DivertedRow { position, topic, key, why: Diverted::BehindDead });
                self.release.look = true;
            }
        }
    }

    /// Handles what trials found, and starts those that are due.
    async fn look_after_trials(&mut self) -> Result<bool, Doubt> {
        let mut moved = false;
        let mut told = HashMap::new();
        while let Some((lane, found)) = self.trials.found(&mut self.memory.pauses) {
            moved = true;
            match found {
                TrialResult::There(topics) => {
                    let rows = self.first_rows(&topics).await?;
                    self.trials.give(lane, rows);
                }
                TrialResult::Taken { topic, position } => {
                    tracing::info!(%topic, "the destination takes messages again; those that are held go there now");
                    // No row of the window: the other place that counts does not see it.
                    observe::published(self.relay.broker.name(), 1);
                    self.window.proven_beside(position);
                    self.diverted.goes(position);
                    self.opened(topic);
                }
                TrialResult::Message { topic, position } => {
                    self.memory.alone.insert(position);
                    self.opened(topic);
                }
                TrialResult::Blocked { topic, reason } => _ = told.insert(topic, reason),
            }
        }
        self.say_why(told);
        let blocked: HashSet<&str> = self.diverted.blocked_topics().collect();
        self.release.open.retain(|topic| blocked.contains(topic.as_str()));
        self.release.reasons.retain(|topic, _| blocked.contains(topic.as_str()));
        self.memory.pauses.keep(&blocked);
        let open = &self.release.open;
        self.trials.begin(&blocked, |topic| open.contains(topic), &mut self.memory.pauses);
        let is_all = self.ready_topics.is_empty() && open.is_empty();
        let first = if is_all { self.memory.pauses.all_in_vain(&blocked) } else { None };
        let why = first.map(|first| format!("no topic takes messages, {} blocked: {first}", blocked.len()));
        self.show_blocked(why);
        Ok(moved)
    }

    /// Whether a blocked topic was not tried yet in this session, although one of its rows could be
    /// sent. So a relay that ends when the outbox is empty tries each of them once before.
    pub(super) fn owes_a_trial(&self) -> bool {
        let untried = |topic: &str| !self.release.open.contains(topic) && !self.trials.was_tried(topic);
        let topics: HashSet<&str> = self.diverted.blocked_topics().filter(|topic| untried(topic)).collect();
        !topics.is_empty() && self.diverted.releasable(|topic| topics.contains(topic)).next().is_some()
    }

    /// Stores what trials told of topics: with the first row of each, unless a row of it says so
    /// already. What the rows say is known from the table, not from earlier trials: a mark may not
    /// have been made, and an operator may have discarded the row while its trial ran. One way
    /// through the rows serves all topics, because a broker that goes away or comes back changes
    /// what is told of each of them.
    fn say_why(&mut self, mut told: HashMap<String, String>) {
        let stays = |row: &DivertedRow| {
            row.why == Diverted::Destination
                && !self.diverted.is_on_way(row.position)
                && !self.unmarked.contains(&row.position)
        };
        told.retain(|topic, reason| {
            let known = self.release.reasons.get(topic).filter(|(_, known)| *known == *reason);
            !known.and_then(|(position, _)| self.diverted.get(*position)).is_some_and(stays)
        });
        if told.is_empty() {
            return;
        }
        let rows = self.diverted.releasable(|topic| told.contains_key(topic)).filter(|row| stays(row));
        let first = first_of_each(rows, told.len());
        for (topic, reason) in &told {
            tracing::info!(%topic, reason, "the destination is blocked still");
            let Some(position) = first.get(topic.as_str()).copied() else { continue };
            self.window.changed_beside(position, Diversion::HeldDestination { reason: reason.clone() });
            self.release.reasons.insert(topic.clone(), (position, reason.clone()));
        }
    }

    /// Shows in the health whether every topic with work is blocked: then the relay is not ready.
    /// While another topic takes messages, it is.
    fn show_blocked(&mut self, why: Option<String>) {
        if self.shown_blocked != why.is_some() {
            self.shown_blocked = why.is_some();
            self.relay.health.trouble(&self.relay.part, TOPICS, why.map(Trouble::Stops));
        }
    }

    fn opened(&mut self, topic: String) {
        self.memory.blocked.remove(&topic);
        self.release.open.insert(topic);
        self.release.width = FEW;
        self.release.look = true;
    }

    /// The first row of each of these topics, for its trial. Left out are topics whose first row is
    /// not stored yet or already under release, and the last ones where the rows exceed the bytes
    /// of a read.
    async fn first_rows(&mut self, topics: &[String]) -> Result<Vec<(i64, OutgoingMessage)>, Doubt> {
        let topics: HashSet<&str> = topics.iter().map(String::as_str).collect();
        let first = first_of_each(self.diverted.releasable(|topic| topics.contains(topic)), topics.len());
        let is_stored = |position: &i64| !self.unmarked.contains(position) && !self.diverted.is_on_way(*position);
        let mut first: Vec<i64> = first.into_values().filter(is_stored).collect();
        if first.is_empty() {
            return Ok(Vec::new());
        }
        first.sort_unstable();
        let rows = self.session.held(&first).await?;
        self.forget_what_is_gone(&first, &rows).await?;
        Ok(rows.into_iter().map(|row| (row.position, row.message)).collect())
    }

    /// Whether rows of this topic may be released.
    pub(super) fn goes_back(&self, topic: &str) -> bool {
        self.release.open.contains(topic) || !self.diverted.blocks(topic)
    }

    async fn send_released(&mut self) -> Result<bool, Doubt> {
        // At most half of a window; the other half is for rows that are read.
        let width = self.release.width.min(self.relay.options.window_rows / 2).max(1);
        let room = width.saturating_sub(self.diverted.on_way()).min(self.room());
        if room < width.div_ceil(2) || self.window.bytes() >= self.relay.options.window_bytes {
            // Wait until several fit: each look goes through the table from its beginning.
            return Ok(false);
        }
        let mut positions = Vec::new();
        let mut alone = false;
        let mut behind_unmarked = false;
        let mut more = false;
        for row in self.diverted.releasable(|topic| self.goes_back(topic)) {
            if self.diverted.is_on_way(row.position) {
                continue;
            }
            if self.unmarked.contains(&row.position) {
                // It is not stored yet, and later rows must not overtake it.
                behind_unmarked = true;
                break;
            }
            alone = self.memory.alone.contains(&row.position);
            if positions.len() == room || (alone && !positions.is_empty()) {
                alone = false;
                more = true;
                break;
            }
            positions.push(row.position);
            if alone {
                more = true;
                break;
            }
        }
        self.release.pause(behind_unmarked);
        if alone && self.release.owes_a_read && Instant::now() >= self.read_at {
            return Ok(false);
        }
        self.release.look = more || (behind_unmarked && self.window.is_empty());
        if positions.is_empty() {
            return Ok(false);
        }
        self.release.owes_a_read = alone;
        let rows = self.session.held(&positions).await?;
        self.forget_what_is_gone(&positions, &rows).await?;
        // Of large rows only a few are returned; the others are released when these have left.
        let batch = self.window.open(None, rows.len());
        for row in rows {
            self.diverted.goes(row.position);
            self.unsent.push_back(Unsent {
                position: row.position,
                batch,
                message: row.message,
                is_release: true,
                alone,
            });
        }
        Ok(true)
    }

    /// Forgets rows that somebody deleted from the table by hand. A row is missing if it was asked
    /// for and not returned although a later one was, or none at all was. It cannot be sent, and
    /// nothing must wait for it.
    ///
    /// The next owner of the shard deletes rows too, and only after it has taken the lease. So a
    /// checkpoint comes first. It fails where the lease is lost, and then no warning is logged.
    async fn forget_what_is_gone(&mut self, asked: &[i64], rows: &[OutboxRow]) -> Result<(), Doubt> {
        let last = rows.last().map(|row| row.position);
        let came: HashSet<i64> = rows.iter().map(|row| row.position).collect();
        let is_gone = |position: &i64| last.is_none_or(|last| *position < last) && !came.contains(position);
        let gone: Vec<i64> = asked.iter().copied().filter(is_gone).collect();
        if gone.is_empty() {
            return Ok(());
        }
        self.session.checkpoint(Mark::default()).await?;
        self.checkpoint_at = Instant::now();
        for position in gone {
            tracing::warn!(position, "a held message is gone from the table, and not by this program");
            self.left(position);
        }
        Ok(())
    }

    /// Forgets a row that has left the table.
    pub(super) fn left(&mut self, position: i64) {
        self.diverted.leave(position);
        self.memory.alone.remove(&position);
        self.memory.isolation.on_settled(position);
        self.release.stored(position);
    }
}
