//! One session of a relay: read, claim, send, settle, mark, until a stop, emptiness or doubt.
//!
//! Promise: a batch is sent only after a synchronous commit that began after its read (R5); the oldest batch is marked only
//! when it is wholly proven or diverted; a doubt changes nothing more and is told to the caller.

use std::collections::{HashSet, VecDeque};
use std::time::Duration;

use futures::FutureExt;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::release::Release;
use super::sending::Unsent;
use super::window::Window;
use super::{Memory, Relay};
use crate::broker::{Publisher, Settled};
use crate::error::{BrokerError, StoreError};
use crate::observe::{self, PartState};
use crate::policy::diversion::{Diversion as Diverted, DivertedRow as Row};
use crate::policy::isolate::Cause;
use crate::policy::lease::Lease;
use crate::store::{Mark, RelaySession, Store};

/// How a session ended.
#[derive(Debug)]
pub(super) enum End {
    Stopped,
    Empty,
    Doubt(Doubt),
}

/// Why a session cannot be trusted any more.
#[derive(Debug)]
pub(super) struct Doubt {
    /// The row at which it ended: the one the broker named, else the first unproven.
    pub(super) row: Option<i64>,
    pub(super) cause: Cause,
    pub(super) why: String,
    /// Set where the database is the reason.
    pub(super) store: Option<StoreError>,
}

impl From<StoreError> for Doubt {
    fn from(error: StoreError) -> Self {
        Self { row: None, cause: Cause::NothingSent, why: error.to_string(), store: Some(error) }
    }
}

/// The hands of one session.
pub(super) struct Pump<'a, S: Store> {
    pub(super) relay: &'a Relay<S>,
    pub(super) session: S::Session,
    pub(super) publisher: Box<dyn Publisher>,
    pub(super) memory: &'a mut Memory,
    pub(super) window: Window,
    pub(super) unsent: VecDeque<Unsent>,
    /// The row that is in flight alone: nothing else is sent until it is settled.
    pub(super) alone: Option<u64>,
    pub(super) diverted: Diverted,
    /// Diverted in the window, not yet in the table.
    pub(super) unmarked: HashSet<i64>,
    pub(super) ready_topics: HashSet<String>,
    pub(super) release: Release,
    settled: Vec<Settled>,
    heard_at: Instant,
    claimed_at: Instant,
    read_at: Instant,
    poll: Duration,
    rows_max: usize,
    tidied_at: Instant,
    /// A read that found nothing, with nothing in the window.
    empty: bool,
    /// More stands in the dead and held table than `held_rows_max`: what is not loaded could be overtaken, so nothing is
    /// read until all of it is known.
    not_loaded: bool,
    /// Rows left the table since it was loaded.
    some_left: bool,
    /// The health says that this part waits.
    shown_waiting: bool,
}

/// The claim of a read without rows of ours may wait this long (R2.5).
const QUIET_CLAIM: Duration = Duration::from_millis(800);
const TIDY: Duration = Duration::from_secs(5);

impl<'a, S: Store> Pump<'a, S> {
    pub(super) fn new(
        relay: &'a Relay<S>,
        session: S::Session,
        publisher: Box<dyn Publisher>,
        memory: &'a mut Memory,
    ) -> Self {
        let now = Instant::now();
        Self {
            relay,
            session,
            publisher,
            memory,
            window: Window::default(),
            unsent: VecDeque::new(),
            alone: None,
            diverted: Diverted::default(),
            unmarked: HashSet::new(),
            ready_topics: HashSet::new(),
            release: Release::new(now),
            settled: Vec::new(),
            heard_at: now,
            claimed_at: now,
            read_at: now,
            poll: relay.options.poll_min,
            rows_max: relay.options.batch_rows.clamp(1, 100),
            tidied_at: now,
            empty: false,
            not_loaded: false,
            some_left: false,
            shown_waiting: false,
        }
    }

    pub(super) async fn run(mut self, stop: &CancellationToken) -> End {
        match self.work(stop).await {
            Ok(end) => {
                if let Err(error) = self.session.release().await {
                    tracing::debug!(%error, "the lease was not given back; it runs out");
                }
                self.publisher.close().await;
                end
            }
            Err(mut doubt) => {
                if doubt.row.is_none() && doubt.store.is_none() {
                    doubt.row = self.window.first_unproven();
                    if doubt.row.is_none() && doubt.cause == Cause::Lost {
                        doubt.cause = Cause::NothingSent;
                    }
                }
                self.publisher.close().await;
                End::Doubt(doubt)
            }
        }
    }

    async fn work(&mut self, stop: &CancellationToken) -> Result<End, Doubt> {
        self.load().await?;
        loop {
            self.relay.health.beat(&self.relay.part);
            self.hear_what_is_there()?;
            if stop.is_cancelled() {
                return self.finish().await;
            }
            let moved = self.step().await?;
            if self.relay.options.until_empty && self.empty && self.nothing_left() {
                let mark = self.window.take_done();
                self.claim(mark).await?;
                return Ok(End::Empty);
            }
            if !moved {
                self.wait(stop).await?;
            }
        }
    }

    /// The dead and held rows as they stand.
    async fn load(&mut self) -> Result<(), Doubt> {
        let limit = self.relay.options.held_rows_max.saturating_add(1);
        let rows = self.session.diverted(limit).await?;
        self.not_loaded = rows.len() >= limit;
        self.some_left = false;
        self.diverted = Diverted::load(rows.into_iter().filter_map(|row| {
            let why = super::release::why(&row.diversion)?;
            Some(Row { position: row.position, topic: row.topic, key: row.key, why })
        }));
        Ok(())
    }

    /// One round; false where there was nothing to do.
    async fn step(&mut self) -> Result<bool, Doubt> {
        let mut moved = self.send_unsent().await?;
        if self.not_loaded && self.some_left && self.nothing_under_way() {
            self.load().await?;
            self.release.reloaded(Instant::now());
        }
        moved |= self.look_after_released().await?;
        if self.may_read() {
            moved |= self.read().await?;
        } else if self.window.has_something_done() {
            let mark = self.window.take_done();
            self.claim(mark).await?;
            moved = true;
        }
        if self.claimed_at.elapsed() >= Lease::renewed_after(self.relay.options.lease) {
            let mark = self.window.take_done();
            self.claim(mark).await?;
        }
        if self.tidied_at.elapsed() >= TIDY {
            self.tidied_at = Instant::now();
            self.session.tidy().await?;
        }
        moved |= self.send_unsent().await?;
        Ok(moved)
    }

    fn may_read(&mut self) -> bool {
        let options = &self.relay.options;
        let room = self.unsent.is_empty()
            && self.alone.is_none()
            && self.window.rows() < options.window_rows
            && self.window.bytes() < options.window_bytes;
        if !room || self.release.pauses_reading() || Instant::now() < self.read_at {
            return false;
        }
        if self.not_loaded || self.diverted.len() >= options.held_rows_max {
            let held = self.diverted.len();
            let why = format!("{held} dead and held messages, `held_rows_max` reached: nothing more is read");
            self.relay.health.set(&self.relay.part, PartState::Waiting(why));
            self.shown_waiting = true;
            return false;
        }
        if self.shown_waiting && !self.memory.refused && self.publisher.blocked().is_none() {
            self.shown_waiting = false;
            self.relay.health.set(&self.relay.part, PartState::Ready);
        }
        true
    }

    fn nothing_under_way(&self) -> bool {
        self.window.is_empty()
            && self.unsent.is_empty()
            && self.alone.is_none()
            && self.unmarked.is_empty()
            && self.release.in_flight.is_empty()
    }

    async fn read(&mut self) -> Result<bool, Doubt> {
        let read = self.session.read(self.rows_max).await?;
        self.shown_waiting |= std::mem::take(&mut self.memory.refused);
        let rows = read.rows;
        let found = rows.len();
        let weight: usize = rows.iter().map(|row| row.message.weight()).sum();
        self.fit_batch(found, weight);
        self.empty = found == 0 && !read.more;
        if self.empty {
            self.read_at = Instant::now() + self.poll;
            self.poll = (self.poll * 2).min(self.relay.options.poll_max);
        } else {
            self.poll = self.relay.options.poll_min;
        }
        let batch = self.window.open(Some(read.batch), found);
        // A read that found no row writes nothing, unless there are gaps to fence or rows of others to pass: then within a
        // second. Its batch is marked with the next claim.
        let due = read.needs_claim && self.claimed_at.elapsed() >= QUIET_CLAIM;
        if found > 0 || due || self.window.has_something_done() {
            let mark = self.window.take_done();
            self.claim(mark).await?;
        }
        for row in rows {
            self.unsent.push_back(Unsent {
                position: row.position,
                batch,
                message: row.message,
                is_release: false,
                alone: false,
            });
        }
        Ok(found > 0 || read.more)
    }

    /// Batches grow while rows are small and shrink when they are large: a read stays near a fraction of the window's bytes.
    fn fit_batch(&mut self, rows: usize, weight: usize) {
        let target = (self.relay.options.window_bytes / 8).max(1);
        if rows == self.rows_max && weight < target {
            self.rows_max = (self.rows_max * 2).min(self.relay.options.batch_rows).max(1);
        } else if weight > 2 * target {
            self.rows_max = (self.rows_max / 2).max(1);
        }
    }

    /// Commits synchronously, with the mark, and takes over what the mark did.
    pub(super) async fn claim(&mut self, mark: Mark) -> Result<(), Doubt> {
        let gone: Vec<i64> = mark.released.iter().chain(&mark.discarded).copied().collect();
        let stored: Vec<i64> = mark.diverted.iter().map(|(position, _)| *position).collect();
        let changed: Vec<i64> = mark.changed.iter().map(|(position, _)| *position).collect();
        self.session.claim(mark).await?;
        self.claimed_at = Instant::now();
        self.some_left |= !gone.is_empty();
        for position in changed {
            self.memory.verdicts.remove(&position);
            self.release.changed(position);
        }
        for position in gone {
            self.diverted.leave(position);
            self.release.left(position);
        }
        for position in stored {
            self.unmarked.remove(&position);
            self.memory.verdicts.remove(&position);
            self.release.look_again();
        }
        Ok(())
    }

    fn nothing_left(&self) -> bool {
        self.window.is_empty() && self.unsent.is_empty() && self.release.is_idle()
    }

    /// Takes what the broker has said, without waiting.
    fn hear_what_is_there(&mut self) -> Result<(), Doubt> {
        let mut settled = std::mem::take(&mut self.settled);
        let outcome = self.publisher.settle(&mut settled).now_or_never();
        self.settled = settled;
        if let Some(outcome) = outcome {
            outcome.map_err(|error| doubt_of(&error))?;
        }
        self.heard()
    }

    /// Deals with what the broker said.
    fn heard(&mut self) -> Result<(), Doubt> {
        if self.settled.is_empty() {
            return self.stalled();
        }
        self.heard_at = Instant::now();
        let mut settled = std::mem::take(&mut self.settled);
        let mut proven = 0;
        let mut outcome = Ok(());
        for one in settled.drain(..) {
            match self.settle(one) {
                Ok(was_proven) => proven += u64::from(was_proven),
                Err(doubt) => {
                    outcome = Err(doubt);
                    break;
                }
            }
        }
        self.settled = settled;
        if proven > 0 {
            observe::published(self.relay.broker.name(), proven);
        }
        outcome
    }

    /// Silence of the broker while messages are in flight.
    fn stalled(&mut self) -> Result<(), Doubt> {
        if self.window.in_flight() == 0 {
            self.heard_at = Instant::now();
            return Ok(());
        }
        if let Some(why) = self.publisher.blocked() {
            // No failure: it takes nothing for now, and says so.
            self.heard_at = Instant::now();
            self.shown_waiting = true;
            self.relay.health.set(&self.relay.part, PartState::Waiting(format!("the broker is blocked: {why}")));
            return Ok(());
        }
        let silence = self.heard_at.elapsed();
        if silence < self.relay.options.publish_stall {
            return Ok(());
        }
        Err(Doubt {
            row: self.window.first_unproven(),
            cause: Cause::Stalled { broker_answers: false },
            why: format!("the broker has not answered for {} s", silence.as_secs()),
            store: None,
        })
    }

    /// Waits for whatever comes first: an answer of the broker, a hint, the next poll, a duty, the stop.
    async fn wait(&mut self, stop: &CancellationToken) -> Result<(), Doubt> {
        let reads = self.unsent.is_empty() && self.alone.is_none() && !self.release.pauses_reading();
        let mut until = Instant::now() + Duration::from_millis(200);
        if reads && self.window.rows() < self.relay.options.window_rows {
            until = until.min(self.read_at);
        }
        let in_flight = self.window.in_flight() > 0;
        let mut settled = std::mem::take(&mut self.settled);
        // Every branch is cancel safe: `settle` by its contract, the others by theirs.
        let outcome = tokio::select! {
            outcome = self.publisher.settle(&mut settled), if in_flight => outcome,
            () = crate::store::enqueued() => {
                self.read_at = Instant::now();
                Ok(())
            }
            () = tokio::time::sleep_until(until) => Ok(()),
            () = stop.cancelled() => Ok(()),
        };
        self.settled = settled;
        outcome.map_err(|error| doubt_of(&error))?;
        self.heard()
    }

    /// A stop: nothing new is sent; what is in flight is waited for, within the grace, and marked.
    async fn finish(&mut self) -> Result<End, Doubt> {
        let deadline = Instant::now() + self.relay.options.shutdown_grace;
        while self.window.in_flight() > 0 && Instant::now() < deadline {
            let mut settled = std::mem::take(&mut self.settled);
            let outcome = tokio::time::timeout_at(deadline, self.publisher.settle(&mut settled)).await;
            self.settled = settled;
            match outcome {
                Ok(Ok(())) => self.heard()?,
                // What is not proven is sent again by the next session.
                Ok(Err(_)) | Err(_) => break,
            }
        }
        let mark = self.window.take_done();
        self.claim(mark).await?;
        Ok(End::Stopped)
    }
}

pub(super) fn doubt_of(error: &BrokerError) -> Doubt {
    Doubt { row: None, cause: Cause::Lost, why: error.to_string(), store: None }
}
