//! Pure: no I/O, no clock.
//! The state machine of one relay session over one shard: which positions to read, which gaps are
//! open or closed, and what a mark persists (R2).
//!
//! Guarantees:
//!
//! * The API does not allow two wrong steps: a checkpoint fences only gaps that were found before
//!   it began ([`CheckpointTicket`]), and the end of the lock holders closes a gap only at a read
//!   that begins after that end ([`GapCursor::begin_read`]).
//! * A call that returns an error changes nothing that a later mark would persist.
//!
//! Not here: time. The caller supplies a counter that never goes back; an age is a difference of
//! two of its values.

use super::open::OpenGaps;
use super::window::UnmarkedReads;
use super::{CheckpointTicket, GapSet, Mark, Range, ReadOutcome, ReadPlan};

/// The maximum number of ranges of open gaps (R9). A range adds about 20 us to a read, so a read
/// over this many ranges takes less than a tenth of a second.
pub(crate) const RANGES_MAX: usize = 4_096;

/// The cursor of one session; see the [module](super) for the steps.
#[derive(Debug)]
pub(crate) struct GapCursor {
    ranges_max: usize,
    /// Both fields are stored in the shard's row.
    scanned_to: i64,
    persisted: GapSet,
    /// The fields from here on exist only in memory.
    read_to: i64,
    open: OpenGaps,
    window: UnmarkedReads,
    plan: Option<ReadPlan>,
    reads: u64,
    /// The number of the last read that needs a checkpoint, and of the last read that one followed.
    checkpoint_due: u64,
    checkpointed: u64,
    xmin: u64,
    fence: u64,
    watch: Watch,
}

/// The state of the watch over the transactions that hold a lock on the outbox (R6).
#[derive(Debug, PartialEq, Eq)]
enum Watch {
    Idle,
    Listing,
    Watching(Vec<u64>),
    Gone,
}

impl GapCursor {
    /// Starts a session from what is persisted. `fence` is the id of the synchronous transaction
    /// that took the lease and raised the epoch. `ranges_max` is the maximum number of ranges of
    /// open gaps, normally [`RANGES_MAX`].
    pub(crate) fn start(scanned_to: i64, gaps: &GapSet, fence: u64, ranges_max: usize) -> Self {
        // A gap above `scanned_to` is read again as part of the tail.
        let persisted = gaps.cut_at(scanned_to);
        Self {
            ranges_max,
            scanned_to,
            read_to: scanned_to,
            open: OpenGaps::fenced(&persisted, fence),
            persisted,
            window: UnmarkedReads::default(),
            plan: None,
            reads: 0,
            checkpoint_due: 0,
            checkpointed: 0,
            xmin: 0,
            fence,
            watch: Watch::Idle,
        }
    }

    /// The highest position that this session has read.
    pub(crate) fn read_to(&self) -> i64 {
        self.read_to
    }

    /// How many more ranges fit under the maximum. A row adds at most one range, so this number
    /// also bounds the LIMIT of a read.
    pub(crate) fn room(&self) -> usize {
        self.ranges_max.saturating_sub(self.open.len())
    }

    pub(crate) fn open_gaps(&self) -> usize {
        self.open.len()
    }

    /// The LIMIT for the next read when `rows` are wanted: 1 to [`room`](Self::room), and 1 where
    /// there is no room.
    pub(crate) fn row_limit(&self, rows: usize) -> usize {
        rows.min(self.room()).max(1)
    }

    /// Whether the sequence is behind this cursor (R7). New rows would then get positions that
    /// count as scanned.
    pub(crate) fn is_ahead_of(&self, last_value: i64) -> bool {
        last_value < self.read_to
    }

    /// Begins a read and returns what it must cover. Call this before the statement is sent. A
    /// second call replaces the plan of the first.
    pub(crate) fn begin_read(&mut self) -> ReadPlan {
        if self.watch == Watch::Gone {
            self.open.holders_gone();
            self.watch = Watch::Idle;
        }
        // At the maximum, reads cover gaps only, until some of them close (R9).
        let tail_from = (self.room() > 0).then(|| self.read_to.saturating_add(1));
        let plan = ReadPlan { ranges: self.open.ranges().collect(), tail_from };
        self.plan = Some(plan.clone());
        plan
    }

    /// Takes the result of the statement: `pg_snapshot_xmin`, the positions of **all** rows in the
    /// order in which they came, and whether their number reached the LIMIT. `passes` means that
    /// none of these rows is of this shard and that no mark is under way. Such reads join one
    /// batch, so any number of them needs no more memory than one. Any error ends the session: the
    /// server on which it began cannot give such an answer.
    pub(crate) fn on_read(
        &mut self,
        xmin: u64,
        positions: &[i64],
        limit_reached: bool,
        passes: bool,
    ) -> Result<ReadOutcome, String> {
        let plan = self.plan.take().ok_or("a read was reported that had not begun")?;
        self.verify(&plan, xmin, positions)?;
        self.xmin = xmin;
        self.reads += 1;

        let ranges_before = self.open.len();
        let mut gap_rows = GapSet::new();
        let in_gaps = positions.partition_point(|&position| position <= self.read_to);
        let (at_gaps, in_tail) = positions.split_at(in_gaps);
        for &position in at_gaps {
            self.open.take_row(position);
            gap_rows.insert(position);
        }
        for &position in in_tail {
            let missing = Range { from: self.read_to + 1, to: position };
            if !missing.is_empty() {
                self.open.found(missing, self.reads);
            }
            self.read_to = position;
        }
        debug_assert!(self.open.len() <= ranges_before + positions.len());

        // With the LIMIT reached, the read says nothing about positions from the last row on.
        let below = limit_reached.then(|| positions.last().copied().unwrap_or(i64::MIN));
        let closed = self.open.close(xmin, below);
        let batch = (!positions.is_empty()).then(|| {
            self.checkpoint_due = self.reads;
            if passes { self.window.pass(self.read_to) } else { self.window.push(self.read_to, gap_rows, false) }
        });
        debug_assert_eq!(self.check(), Ok(()));
        Ok(ReadOutcome { batch, closed })
    }

    fn verify(&self, plan: &ReadPlan, xmin: u64, positions: &[i64]) -> Result<(), String> {
        if xmin < self.xmin {
            // Another server answers.
            return Err(format!("the oldest running transaction went back from {} to {xmin}", self.xmin));
        }
        if let Some(pair) = positions.windows(2).find(|pair| pair[0] >= pair[1]) {
            // The database did not execute the read with the expected plan.
            return Err(format!("positions do not ascend: {} came after {}", pair[1], pair[0]));
        }
        let expected = |position: i64| {
            let in_tail = plan.tail_from.is_some_and(|from| position >= from && position < i64::MAX);
            in_tail || self.open.contains(position)
        };
        match positions.iter().find(|&&position| !expected(position)) {
            Some(position) => Err(format!("position {position} is neither an open gap nor beyond what was read")),
            None => Ok(()),
        }
    }

    /// Whether a checkpoint is due: rows were read since the last one began. Send no batch before
    /// it returned (R5). Make one within a second even when no row was of this shard.
    pub(crate) fn needs_checkpoint(&self) -> bool {
        self.checkpoint_due > self.checkpointed
    }

    /// Begins a checkpoint. Call this before its transaction begins.
    #[must_use]
    pub(crate) fn begin_checkpoint(&self) -> CheckpointTicket {
        CheckpointTicket { reads: self.reads }
    }

    /// The synchronous commit of the checkpoint returned. Its transaction id becomes the fence of
    /// the gaps that were found before the checkpoint began and have no fence yet. An id that is
    /// not above the last fence ends the session.
    pub(crate) fn on_checkpoint(&mut self, ticket: CheckpointTicket, xid: u64, now: u64) -> Result<(), String> {
        if xid <= self.fence {
            return Err(format!("the transaction id of a checkpoint went back from {} to {xid}", self.fence));
        }
        self.fence = xid;
        self.checkpointed = self.checkpointed.max(ticket.reads);
        self.open.fence(ticket.reads, xid, now);
        Ok(())
    }

    /// What to persist for all batches up to this one. The caller makes sure that every row of them
    /// is proven, dead or held. `None` if the window does not hold this batch.
    #[must_use]
    pub(crate) fn mark_through(&self, batch: u64) -> Option<Mark> {
        let scanned_to = self.window.get(batch)?.read_to;
        // Rows at gaps of later batches have left `open` and are not proven yet. Without them in
        // the mark, a crash would lose them.
        let mut gaps: GapSet = self.open.ranges().collect();
        gaps.extend(self.window.gap_rows_after(batch));
        Some(Mark { batch, scanned_to, gaps: gaps.cut_at(scanned_to) })
    }

    /// What to persist while the window is empty, if gaps have closed since the last mark. A
    /// partition can be freed only when its gaps are closed on disk too (R8).
    #[must_use]
    pub(crate) fn mark_idle(&self) -> Option<Mark> {
        if self.window.oldest().is_some() {
            return None;
        }
        let gaps: GapSet = self.open.ranges().collect();
        (gaps != self.persisted).then(|| Mark { batch: self.window.marked(), scanned_to: self.read_to, gaps })
    }

    /// The transaction of a mark committed. Marks must commit in the order in which they were made.
    pub(crate) fn on_marked(&mut self, mark: Mark) {
        debug_assert!(mark.scanned_to >= self.scanned_to, "a mark goes back");
        self.window.drop_through(mark.batch);
        self.scanned_to = mark.scanned_to;
        self.persisted = mark.gaps;
        debug_assert_eq!(self.check(), Ok(()));
    }

    /// Begins a watch over the lock holders of the stale gaps and returns how many ranges it
    /// covers; 0 if a watch already runs. Call this before the holders are listed.
    pub(crate) fn begin_lock_watch(&mut self, now: u64, age: u64) -> usize {
        if self.watch != Watch::Idle {
            return 0;
        }
        let count = self.open.watch_stale(now, age);
        if count > 0 {
            self.watch = Watch::Listing;
        }
        count
    }

    /// Takes the **transaction ids** of all holders of a RowExclusiveLock on the outbox, those of
    /// prepared transactions included. Never pass pids or virtual transaction ids: PREPARE and a
    /// restart change them (R6).
    pub(crate) fn on_lock_holders(&mut self, holders: Vec<u64>) {
        if self.watch == Watch::Listing {
            self.watch = if holders.is_empty() { Watch::Gone } else { Watch::Watching(holders) };
        }
    }

    /// The transaction ids that must still be watched; `None` when no watch waits for any.
    pub(crate) fn lock_watch(&self) -> Option<&[u64]> {
        match &self.watch {
            Watch::Watching(holders) => Some(holders),
            Watch::Idle | Watch::Listing | Watch::Gone => None,
        }
    }

    /// Takes the watched ids that still hold their `transactionid` lock. When none is left, the
    /// next read that begins and does not find the row closes the gap.
    pub(crate) fn on_still_holding(&mut self, still: &[u64]) {
        if let Watch::Watching(holders) = &mut self.watch {
            holders.retain(|holder| still.contains(holder));
            if holders.is_empty() {
                self.watch = Watch::Gone;
            }
        }
    }

    /// Checks the invariants of the state, for tests and debug assertions. The error is a sentence
    /// that names the broken one.
    pub(crate) fn check(&self) -> Result<(), String> {
        let ensure = |holds: bool, what: &str| {
            if holds { Ok(()) } else { Err(format!("{what}: {self:?}")) }
        };
        ensure(
            self.persisted.last().is_none_or(|last| last <= self.scanned_to),
            "a persisted gap is above scanned_to",
        )?;
        let mut end = i64::MIN;
        for range in self.open.ranges() {
            ensure(!range.is_empty() && range.from >= end, "open gaps overlap")?;
            ensure(range.to <= self.read_to, "an open gap is above read_to")?;
            end = range.to;
        }
        let (mut number, mut read_to) = (self.window.marked(), self.scanned_to);
        for batch in self.window.iter() {
            ensure(batch.number == number + 1, "a batch is missing")?;
            ensure(batch.read_to >= read_to, "read_to went back")?;
            let gap_rows_left = batch.gap_rows.iter().all(|range| !self.open.contains(range.from));
            ensure(gap_rows_left, "a row in the window is still an open gap")?;
            (number, read_to) = (batch.number, batch.read_to);
        }
        ensure(read_to == self.read_to, "the last batch does not end at read_to")?;
        ensure(self.needs_checkpoint() || !self.open.unfenced(), "a gap has no fence and no checkpoint is due")
    }
}
