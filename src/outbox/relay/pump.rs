//! One session of a relay: read, checkpoint, send, settle, mark, until a stop, emptiness or a
//! doubt.
//!
//! Promise: a batch is sent only after a synchronous commit that began after its read (R5). The
//! oldest batch is marked only when every row of it is proven or diverted. After a doubt nothing
//! more is sent, and the caller gets the doubt. A topic whose rows are neither taken nor refused
//! delays other rows for one second, or for five if no row that was sent later was settled and the
//! row was not sent alone.

mod bounds;
mod release;
mod sending;
mod silence;

use std::collections::{HashSet, VecDeque};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::ending::{Doubt, End, Ending, Of};
use super::trial::Trials;
use super::window::{Unsent, Window};
use super::{Memory, Relay};
use crate::broker::{Publisher, Settled};
use crate::error::{BrokerError, StoreError};
use crate::observe::{self, PartState, Trouble};
use crate::outbox::port::{OpenGaps, RelaySession};
use crate::outbox::rules::diversion::Diversion as DivertedRows;
use crate::time::lease::Lease;
use release::Release;
use sending::renewing;
use silence::LOOK_EVERY;

/// State of one relay session: its lease, its publisher, and the rows between them.
pub(super) struct Pump<'a> {
    relay: &'a Relay,
    session: Box<dyn RelaySession>,
    publisher: Box<dyn Publisher>,
    memory: &'a mut Memory,
    window: Window,
    unsent: VecDeque<Unsent>,
    /// The tag of the row that is in flight alone: nothing else is sent until it is settled.
    alone: Option<u64>,
    diverted: DivertedRows,
    /// Rows that are diverted in the window and not yet stored as dead or held.
    unmarked: HashSet<i64>,
    ready_topics: HashSet<String>,
    release: Release,
    trials: Trials,
    ending: Option<Ending>,
    /// The clock for rows in flight. It counts only time in which this loop ran and the broker was
    /// not blocked, so that a freeze of this process, its machine or the database is not taken for
    /// silence of the broker.
    clock: Duration,
    turned_at: Instant,
    looked_at: Duration,
    settled: Vec<Settled>,
    checkpoint_at: Instant,
    read_at: Instant,
    /// When a read last found something.
    found_at: Instant,
    /// True where what was found last was announced by a hint.
    found_by_hint: bool,
    /// True where a hint came since the last read.
    hinted: bool,
    rows_max: usize,
    tidied_at: Instant,
    /// True where the last read found nothing, and no row is left that no read has seen.
    empty: bool,
    /// True where there are more dead and held rows than `held_rows_max`. A row that is not loaded
    /// could be overtaken, so nothing is read until all are loaded.
    not_loaded: bool,
    /// True where `dead_rows_max` is reached; looked at from time to time.
    too_many_dead: bool,
    /// True where rows have left the dead and held table since it was loaded.
    some_left: bool,
    /// True while the health may show that this part waits.
    shown_waiting: bool,
    shown_gaps: bool,
    /// Since when the broker says that it takes nothing.
    blocked_since: Option<Instant>,
    /// Since when the oldest batches are done and not marked.
    done_since: Option<Instant>,
    /// True while the health may show that no topic takes messages. It begins as true, because an
    /// earlier session may have shown it.
    shown_blocked: bool,
}

/// How long a checkpoint may wait after a read without rows, which needs it for gaps or for rows of
/// other shards.
const QUIET_CHECKPOINT: Duration = Duration::from_millis(800);
const TIDY: Duration = Duration::from_secs(5);
/// The part of a stop's grace that is kept for the last mark.
const MARK_KEPT: Duration = Duration::from_secs(2);
/// A longer step is shown in the health: the database or the broker's client does not answer.
const STEP_SHOWN: Duration = Duration::from_secs(1);
/// What is shown of such a step of a session.
const NO_ANSWER: &str = "the database or the broker's client does not answer";

impl<'a> Pump<'a> {
    pub(super) fn new(
        relay: &'a Relay,
        session: Box<dyn RelaySession>,
        publisher: Box<dyn Publisher>,
        memory: &'a mut Memory,
    ) -> Self {
        let now = Instant::now();
        let trials = Trials::new(&relay.broker, &relay.options);
        Self {
            relay,
            session,
            publisher,
            memory,
            window: Window::default(),
            unsent: VecDeque::new(),
            alone: None,
            diverted: DivertedRows::default(),
            unmarked: HashSet::new(),
            ready_topics: HashSet::new(),
            release: Release::new(now),
            trials,
            ending: None,
            clock: Duration::ZERO,
            turned_at: now,
            looked_at: Duration::ZERO,
            settled: Vec::new(),
            checkpoint_at: now,
            read_at: now,
            found_at: now,
            found_by_hint: false,
            hinted: false,
            rows_max: relay.options.batch_rows.clamp(1, 100),
            tidied_at: now,
            empty: false,
            not_loaded: false,
            too_many_dead: false,
            some_left: false,
            shown_waiting: false,
            shown_gaps: false,
            blocked_since: None,
            done_since: None,
            shown_blocked: true,
        }
    }

    pub(super) async fn run(mut self, stop: &CancellationToken) -> End {
        match self.work(stop).await {
            Ok(end) => {
                // A client that still holds rows must end first: it could send them beside the next
                // owner. One that holds none may take its time.
                if self.window.in_flight() > 0 {
                    self.publisher.close().await;
                    give_back(self.session).await;
                } else {
                    give_back(self.session).await;
                    self.publisher.close().await;
                }
                end
            }
            Err(doubt) => {
                // A doubt about the broker takes nothing back of what it has proven.
                let is_proven = self.window.has_something_done() && !self.window.has_decision_done();
                let mut is_sound = !matches!(doubt, Doubt::Store(_));
                let mark = (is_proven && is_sound).then(|| self.window.take_done());
                // Closed first: the client must send nothing more of what it holds.
                self.publisher.close().await;
                if let Some(mark) = mark {
                    match self.session.checkpoint(mark).await {
                        Ok(()) => (self.memory.doubts, self.memory.refused) = (0, false),
                        Err(error @ StoreError::Fenced(_)) => return End::Doubt(error.into()),
                        Err(error) => {
                            is_sound = false;
                            tracing::warn!(%error, "the last mark was not made: its rows are sent again");
                        }
                    }
                }
                if is_sound && stop.is_cancelled() {
                    give_back(self.session).await;
                }
                End::Doubt(doubt)
            }
        }
    }

    async fn work(&mut self, stop: &CancellationToken) -> Result<End, Doubt> {
        let (loaded, late) = shown(self.relay, NO_ANSWER, self.load()).await;
        self.shown_waiting |= late;
        loaded?;
        loop {
            self.relay.health.beat(&self.relay.part);
            self.turn();
            self.hear_what_is_there()?;
            if self.ending.is_some() {
                self.drain().await?;
                continue;
            }
            if stop.is_cancelled() {
                return self.finish().await;
            }
            let (stepped, late) = shown(self.relay, NO_ANSWER, self.step()).await;
            self.shown_waiting |= late;
            let moved = stepped?;
            if self.relay.options.until_empty && self.empty && self.nothing_left() {
                self.checkpoint().await?;
                // A row that was only just stored as held may have to be sent alone.
                if self.nothing_left() {
                    return Ok(End::Empty);
                }
            }
            if !moved {
                self.wait(stop).await?;
            }
        }
    }

    /// One round of work. Returns false where there was nothing to do.
    async fn step(&mut self) -> Result<bool, Doubt> {
        let mut moved = self.send_unsent().await?;
        if self.not_loaded && self.some_left && self.nothing_under_way() {
            self.load().await?;
            self.release.reloaded(Instant::now());
        }
        moved |= self.look_after_released().await?;
        if self.may_read() {
            moved |= self.read().await?;
        } else {
            if self.unsent.is_empty() && self.alone.is_none() {
                // There is no read for the rows sent alone to wait for.
                self.release.was_read();
            }
            if self.mark_is_due() {
                self.checkpoint().await?;
                moved = true;
            }
        }
        if self.checkpoint_at.elapsed() >= Lease::renewed_after(self.relay.options.lease) {
            self.checkpoint().await?;
        }
        if self.tidied_at.elapsed() >= TIDY {
            self.tidied_at = Instant::now();
            self.tidy().await?;
            self.show_gaps().await?;
            self.look_at_dead().await?;
        }
        moved |= self.send_unsent().await?;
        Ok(moved)
    }

    /// Whether the oldest batches get a commit of their own now. Otherwise the checkpoint of the
    /// next rows carries their mark: these rows need not wait for two commits, and a steady trickle
    /// costs one commit a batch. What was decided of a row (diverted, released, changed, discarded)
    /// is stored at once, and so is a mark that the next read waits for.
    fn mark_is_due(&mut self) -> bool {
        if !self.window.has_something_done() {
            self.done_since = None;
            return false;
        }
        let since = *self.done_since.get_or_insert_with(Instant::now);
        since.elapsed() >= self.relay.options.mark_after
            || self.relay.options.until_empty
            || !self.has_room()
            || self.window.has_decision_done()
    }

    fn may_read(&mut self) -> bool {
        if !self.has_room() || self.release.pauses_reading() || Instant::now() < self.read_at {
            return false;
        }
        if let Some(why) = self.full() {
            self.relay.health.set(&self.relay.part, PartState::Waiting(why));
            self.shown_waiting = true;
            return false;
        }
        if self.shown_waiting && self.memory.may_be_ready() && self.publisher.blocked().is_none() {
            self.shown_waiting = false;
            self.relay.health.set(&self.relay.part, PartState::Ready);
        }
        true
    }

    /// Whether the next read fits into the window: a full one, or an eighth of the window.
    /// Otherwise many small reads would follow each other, each with a commit of its own.
    fn has_room(&self) -> bool {
        let options = &self.relay.options;
        let portion = self.rows_max.min(options.window_rows / 8).max(1);
        self.unsent.is_empty()
            && self.alone.is_none()
            && self.room() >= portion
            && self.window.bytes() < options.window_bytes
    }

    /// How many more rows may be read before the oldest unmarked ones are marked.
    fn room(&self) -> usize {
        self.relay.options.window_rows.max(1).saturating_sub(self.window.span())
    }

    fn nothing_under_way(&self) -> bool {
        self.window.is_empty()
            && self.unsent.is_empty()
            && self.alone.is_none()
            && self.unmarked.is_empty()
            && self.diverted.on_way() == 0
    }

    async fn read(&mut self) -> Result<bool, Doubt> {
        // A power of two where the window is nearly full, because PostgreSQL plans a read of each
        // other number of rows anew.
        let room = self.room();
        let rows_max = if room < self.rows_max { 1 << room.max(1).ilog2() } else { self.rows_max };
        let read = self.session.read(rows_max).await?;
        self.release.was_read();
        if read.rows.is_empty() && read.saw_all && self.window.is_proven() {
            // All rows were seen, so every blocked topic has its rows in the table by now.
            self.memory.blocked.clear();
            // Rows that wait for their mark are no progress yet: perhaps no mark can be written.
            if self.window.is_empty() {
                self.gets_on();
            }
        }
        let rows = read.rows;
        let found = rows.len();
        let weight: usize = rows.iter().map(|row| row.message.weight()).sum();
        self.fit_batch(found, weight);
        self.empty = found == 0 && read.saw_all;
        let now = Instant::now();
        let hinted = std::mem::take(&mut self.hinted);
        if found == 0 && !read.more {
            self.read_at = now + self.pause(now.saturating_duration_since(self.found_at));
        } else {
            (self.found_at, self.found_by_hint) = (now, hinted);
        }
        let batch = self.window.open(Some(read.batch), found);
        // A read without rows needs no checkpoint, unless there are gaps to fence or rows of other
        // shards to pass: then within a second. Its batch is marked with the next checkpoint.
        let due = read.needs_checkpoint && self.checkpoint_at.elapsed() >= QUIET_CHECKPOINT;
        if found > 0 || due || self.mark_is_due() {
            self.checkpoint().await?;
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

    /// The pause after a read that found nothing. It grows with the time that was quiet so far: so
    /// a quiet outbox is read rarely, and rows that no hint announces wait for about a quarter of
    /// the time since the ones before them. After rows that a hint announced it is the whole of
    /// that time: where hints come, a read costs more than it finds.
    fn pause(&self, quiet: Duration) -> Duration {
        let options = &self.relay.options;
        let pause = if self.found_by_hint { quiet.max(5 * options.poll_min) } else { quiet / 4 };
        pause.max(options.poll_min).min(options.poll_max)
    }

    /// Adapts the number of rows of a read to their size, so that a read stays near an eighth of
    /// the window's bytes.
    fn fit_batch(&mut self, rows: usize, weight: usize) {
        let target = (self.relay.options.window_bytes / 8).max(1);
        if rows == self.rows_max && weight < target {
            self.rows_max = (self.rows_max * 2).min(self.relay.options.batch_rows).max(1);
        } else if weight > 2 * target {
            self.rows_max = (self.rows_max / 2).max(1);
        }
    }

    /// Tidies the outbox. A failure that does not pass by itself keeps no message from being sent,
    /// so the session goes on; the failure is shown until a tidy succeeds.
    async fn tidy(&mut self) -> Result<(), Doubt> {
        let trouble = match self.session.tidy().await {
            Ok(()) => None,
            Err(error @ (StoreError::Other(_) | StoreError::Corrupt(_) | StoreError::Refused(_))) => {
                Some(Trouble::Stops(format!("the outbox could not be tidied: {error}")))
            }
            Err(error) => return Err(error.into()),
        };
        self.relay.health.trouble(&self.relay.part, super::HOUSEKEEPING, trouble);
        Ok(())
    }

    /// Shows open gaps, whose number is bounded (R9): a warning from half of the bound on, and not
    /// ready at the bound, where nothing new is read.
    async fn show_gaps(&mut self) -> Result<(), Doubt> {
        let gaps = self.session.open_gaps().await?;
        let trouble = gaps.map(|OpenGaps { open, max, held_by }| {
            let by = held_by.map_or_else(String::new, |by| format!("; the oldest that may still write is {by}"));
            if open >= max {
                Trouble::Stops(format!(
                    "{open} gaps are open, and no more may be: nothing new is read until they close{by}"
                ))
            } else {
                Trouble::Shown(format!("{open} of {max} gaps are open: at {max} nothing new is read{by}"))
            }
        });
        if let Some(Trouble::Shown(why)) = &trouble
            && !self.shown_gaps
        {
            tracing::warn!(shard = self.relay.options.shard, %why, "many gaps in the outbox");
        }
        self.shown_gaps = trouble.is_some();
        self.relay.health.trouble(&self.relay.part, super::GAPS, trouble);
        Ok(())
    }

    /// Commits synchronously, with the mark of the oldest batches that are done, and updates this
    /// session's state by what the mark did.
    async fn checkpoint(&mut self) -> Result<(), Doubt> {
        let mark = self.window.take_done();
        let gone: Vec<i64> = mark.released.iter().chain(&mark.discarded).copied().collect();
        let stored: Vec<i64> = mark.diverted.iter().map(|(position, _)| *position).collect();
        let changed: Vec<i64> = mark.changed.iter().map(|(position, _)| *position).collect();
        let says_something = !mark.is_empty();
        if let Err(error) = self.session.checkpoint(mark).await {
            // The mark may have been made, and these rows be dead already. Their verdicts are
            // forgotten, so that a row is judged anew when an operator redrives it.
            if matches!(error, StoreError::CommitUnknown(_)) {
                stored.iter().chain(&changed).for_each(|position| _ = self.memory.verdicts.remove(position));
            }
            return Err(error.into());
        }
        self.done_since = None;
        self.checkpoint_at = Instant::now();
        if says_something {
            self.gets_on();
        }
        self.some_left |= !gone.is_empty();
        for position in changed {
            self.memory.verdicts.remove(&position);
            self.release.stored(position);
        }
        gone.into_iter().for_each(|position| self.left(position));
        for position in stored {
            self.unmarked.remove(&position);
            self.memory.verdicts.remove(&position);
            self.release.look_again();
        }
        Ok(())
    }

    /// Forgets earlier doubts and refusals: something was marked, or there is nothing to do.
    fn gets_on(&mut self) {
        self.shown_waiting |= std::mem::take(&mut self.memory.doubts) > 0;
        self.shown_waiting |= std::mem::take(&mut self.memory.refused);
    }

    fn nothing_left(&self) -> bool {
        self.window.is_empty()
            && self.unsent.is_empty()
            && self.diverted.on_way() == 0
            && self.release.is_idle()
            && !self.owes_a_trial()
    }

    /// Takes the outcomes that the broker has ready, without waiting.
    fn hear_what_is_there(&mut self) -> Result<(), Doubt> {
        let outcome = self.publisher.settle(&mut self.settled).now_or_never();
        self.heard(outcome.unwrap_or(Ok(())))
    }

    /// Handles the outcomes, and after them the error that ended the broker's session, if any.
    fn heard(&mut self, outcome: Result<(), BrokerError>) -> Result<(), Doubt> {
        let mut settled = std::mem::take(&mut self.settled);
        let mut proven = 0;
        let mut refusals = Vec::new();
        for Settled { tag, outcome } in settled.drain(..) {
            match outcome {
                Ok(_) => proven += u64::from(self.proven(tag)),
                Err(refusal) => refusals.push((tag, refusal)),
            }
        }
        self.settled = settled;
        if proven > 0 {
            observe::published(self.relay.broker.name(), proven);
        }
        if !refusals.is_empty() {
            self.refused(refusals);
        }
        outcome.map_err(|error| self.broken(&error))?;
        self.silence()
    }

    /// The doubt after the broker's session was lost. It blames the rows that were refused before.
    /// Without any it blames the first unproven row, unless the broker is away.
    fn broken(&mut self, error: &BrokerError) -> Doubt {
        match self.ending.take() {
            Some(mut ending) => ending.doubt(),
            // The cause was found already: no other row is suspected.
            None if self.memory.progress => Doubt::Held(error.to_string()),
            None => {
                // A broker that is away is no reason to suspect a row.
                let is_away = matches!(error, BrokerError::Unavailable(_));
                let row = if is_away { None } else { self.window.first_unproven() };
                Doubt::Lost { row, why: error.to_string() }
            }
        }
    }

    /// Waits for outcomes of rows in flight while the session is ending. If only diverted rows are
    /// the cause and no row of their keys is in flight any more, the session goes on.
    async fn drain(&mut self) -> Result<(), Doubt> {
        let Some(ending) = &mut self.ending else { return Ok(()) };
        let until = ending.until;
        if ending.refused.iter().all(|refused| refused.of != Of::Session)
            && self.window.in_flight_of(&ending.keys()).is_empty()
        {
            self.ending = None;
            return Ok(());
        }
        if self.window.in_flight() == 0 || Instant::now() >= until {
            return Err(ending.doubt());
        }
        let outcome = tokio::time::timeout_at(until, self.publisher.settle(&mut self.settled)).await;
        self.heard(outcome.unwrap_or(Ok(())))
    }

    /// Waits for the first of: an outcome, the answer of a trial, a hint that a row was enqueued,
    /// the next poll, the stop.
    async fn wait(&mut self, stop: &CancellationToken) -> Result<(), Doubt> {
        let mut until = Instant::now() + LOOK_EVERY;
        if self.has_room() && !self.release.pauses_reading() && self.full().is_none() {
            until = until.min(self.read_at);
        }
        if let Some(since) = self.done_since {
            until = until.min(since + self.relay.options.mark_after);
        }
        let in_flight = self.window.in_flight() > 0;
        // Every branch is cancel safe: `settle` by its contract, the others by theirs.
        let outcome = tokio::select! {
            outcome = self.publisher.settle(&mut self.settled), if in_flight => outcome,
            () = self.trials.answered() => Ok(()),
            () = crate::outbox::hint::hinted() => {
                (self.read_at, self.hinted) = (Instant::now(), true);
                Ok(())
            }
            () = tokio::time::sleep_until(until) => Ok(()),
            () = stop.cancelled() => Ok(()),
        };
        self.heard(outcome)
    }

    /// Stops: sends nothing new, waits for rows in flight within the grace, and marks.
    async fn finish(&mut self) -> Result<End, Doubt> {
        let grace = self.relay.options.shutdown_grace;
        let deadline = Instant::now() + grace - MARK_KEPT.min(grace / 4);
        while self.window.in_flight() > 0 && (self.ending.is_some() || Instant::now() < deadline) {
            // The broker may still take a row behind a refused one of its key. So the refusal is
            // not marked while the client has that row.
            if self.ending.is_some() {
                self.drain().await?;
                continue;
            }
            let settling = tokio::time::timeout_at(deadline, self.publisher.settle(&mut self.settled));
            let lease = self.relay.options.lease;
            match renewing(self.session.as_mut(), &mut self.checkpoint_at, lease, settling).await? {
                Ok(Ok(())) => self.heard(Ok(()))?,
                // Rows that are not proven are sent again by the next session.
                Ok(Err(_)) | Err(_) => break,
            }
        }
        self.checkpoint().await?;
        Ok(End::Stopped)
    }
}

/// Gives the lease back, so that a standby need not wait for its end.
async fn give_back(session: Box<dyn RelaySession>) {
    if let Err(error) = session.release().await {
        tracing::debug!(%error, "the lease was not given back; it runs out");
    }
}

/// Runs a step, and returns its result. Where the step takes longer than [`STEP_SHOWN`], the health
/// shows `why` from then on, and the flag that is returned is true.
pub(super) async fn shown<T>(relay: &Relay, why: &str, step: impl Future<Output = T>) -> (T, bool) {
    let mut late = false;
    let mut step = std::pin::pin!(step);
    loop {
        match tokio::time::timeout(STEP_SHOWN, step.as_mut()).await {
            Ok(done) => return (done, late),
            Err(_) => {
                late = true;
                relay.health.set(&relay.part, PartState::Waiting(why.to_owned()));
            }
        }
    }
}
