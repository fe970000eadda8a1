//! The rules R2 to R6 and R9 a second time, position by position and without regard to cost, with a
//! switch for each mutant that breaks the cursor.

use std::collections::{BTreeMap, BTreeSet};

use crate::outbox::rules::gaps::{GapSet, Mark, Range, ReadPlan};

use super::mutant::Mutant;
use super::postgres::Snapshot;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Holders {
    Unasked,
    Watched,
    Gone,
}

#[derive(Debug, Clone, Copy)]
struct Gap {
    found: u64,
    fence: Option<(u64, u64)>,
    holders: Holders,
}

#[derive(Debug)]
struct Batch {
    number: u64,
    read: u64,
    read_to: i64,
    gap_rows: BTreeSet<i64>,
    passes: bool,
}

#[derive(Debug, PartialEq, Eq)]
enum Watch {
    Idle,
    Listing,
    Watching(Vec<u64>),
    Gone,
}

#[derive(Debug)]
pub(crate) struct Reference {
    mutant: Option<Mutant>,
    ranges_max: usize,
    read_to: i64,
    persisted: BTreeSet<i64>,
    open: BTreeMap<i64, Gap>,
    window: Vec<Batch>,
    batches: u64,
    marked: u64,
    reads: u64,
    checkpointed: u64,
    watch: Watch,
    /// R4 taken out: whether this read looks at gaps at all.
    gaps_skipped: bool,
}

impl Reference {
    pub(crate) fn start(scanned_to: i64, gaps: &GapSet, fence: u64, ranges_max: usize, mutant: Option<Mutant>) -> Self {
        let fence = if mutant == Some(Mutant::StartWithoutFence) { 0 } else { fence };
        let gap = Gap { found: 0, fence: Some((fence, 0)), holders: Holders::Unasked };
        let persisted: BTreeSet<i64> = gaps.iter().flat_map(|range| range.from..range.to).collect();
        Self {
            mutant,
            ranges_max,
            read_to: scanned_to,
            open: persisted.iter().map(|&position| (position, gap)).collect(),
            persisted,
            window: Vec::new(),
            batches: 0,
            marked: 0,
            reads: 0,
            checkpointed: 0,
            watch: Watch::Idle,
            gaps_skipped: false,
        }
    }

    fn is(&self, mutant: Mutant) -> bool {
        self.mutant == Some(mutant)
    }

    pub(crate) fn open(&self) -> GapSet {
        set(self.open.keys())
    }

    pub(crate) fn room(&self) -> usize {
        self.ranges_max.saturating_sub(self.open().iter().count())
    }

    pub(crate) fn begin_read(&mut self) -> ReadPlan {
        if self.watch == Watch::Gone && !self.is(Mutant::HoldersGoneDuringRead) {
            self.holders_gone();
        }
        self.gaps_skipped = self.is(Mutant::RecheckSeldom) && !self.reads.is_multiple_of(3);
        let ranges: Vec<Range> = if self.gaps_skipped { Vec::new() } else { self.open().iter().collect() };
        let tail_from = (self.room() > 0).then_some(self.read_to + 1);
        ReadPlan { ranges, tail_from }
    }

    fn holders_gone(&mut self) {
        for gap in self.open.values_mut().filter(|gap| gap.holders == Holders::Watched) {
            gap.holders = Holders::Gone;
        }
        self.watch = Watch::Idle;
    }

    /// Gives the number of the batch, and what closed.
    pub(crate) fn on_read(
        &mut self,
        seen: Snapshot,
        positions: &[i64],
        limit_reached: bool,
        passes: bool,
    ) -> (Option<u64>, GapSet) {
        if self.watch == Watch::Gone {
            // Only with the rule taken out: the plan of a read that began later has dealt with it.
            if self.is(Mutant::HoldersGoneDuringRead) {
                self.holders_gone();
            }
        }
        self.reads += 1;
        let mut gap_rows = BTreeSet::new();
        let first_tail = positions.iter().copied().find(|&position| position > self.read_to);
        for &position in positions {
            if position <= self.read_to {
                assert!(self.open.remove(&position).is_some(), "row {position} is at no gap");
                gap_rows.insert(position);
                continue;
            }
            let skipped = self.is(Mutant::NothingBeforeTheFirst) && Some(position) == first_tail;
            if !skipped && !self.is(Mutant::HighestSeen) {
                let fence = self.is(Mutant::XmaxIsTheFence).then_some((seen.xmax, 0));
                let gap = Gap { found: self.reads, fence, holders: Holders::Unasked };
                self.open.extend((self.read_to + 1..position).map(|missing| (missing, gap)));
            }
            self.read_to = position;
        }
        let limited = limit_reached && !self.is(Mutant::LimitIgnored);
        let below = if limited { positions.last().copied().unwrap_or(i64::MIN) } else { i64::MAX };
        let found_now = self.reads;
        let closed: Vec<i64> = self
            .open
            .iter()
            .filter(|&(&position, gap)| {
                let fenced_out = gap.found != found_now && gap.fence.is_some_and(|(xid, _)| xid <= seen.xmin);
                position < below && (fenced_out || gap.holders == Holders::Gone) && !self.gaps_skipped
            })
            .map(|(&position, _)| position)
            .collect();
        for position in &closed {
            self.open.remove(position);
        }
        let batch = (!positions.is_empty()).then(|| {
            let (read, read_to) = (self.reads, self.read_to);
            if let Some(last) = self.window.last_mut().filter(|last| passes && last.passes) {
                (last.read, last.read_to) = (read, read_to);
                return self.batches;
            }
            self.batches += 1;
            let gap_rows = if passes { BTreeSet::new() } else { gap_rows };
            let batch = Batch { number: self.batches, read, read_to, gap_rows, passes };
            self.window.push(batch);
            self.batches
        });
        (batch, set(closed.iter()))
    }

    pub(crate) fn reads(&self) -> u64 {
        self.reads
    }

    pub(crate) fn needs_checkpoint(&self) -> bool {
        self.window.iter().any(|batch| batch.read > self.checkpointed)
            || self.open.values().any(|gap| gap.fence.is_none())
    }

    /// A checkpoint committed that had begun after read number `began_after`.
    pub(crate) fn on_checkpoint(&mut self, began_after: u64, xid: u64, now: u64) {
        let fences = if self.is(Mutant::FenceBeforeRead) { self.reads } else { began_after };
        let releases = if self.is(Mutant::CheckpointBeforeRead) { self.reads } else { began_after };
        self.checkpointed = self.checkpointed.max(releases);
        if self.is(Mutant::NoFence) {
            return;
        }
        for gap in self.open.values_mut().filter(|gap| gap.fence.is_none() && gap.found <= fences) {
            gap.fence = Some((xid, now));
        }
    }

    pub(crate) fn may_send(&self, number: u64) -> bool {
        self.window.iter().any(|batch| batch.number == number && batch.read <= self.checkpointed)
    }

    pub(crate) fn mark_through(&self, number: u64) -> Option<Mark> {
        let batch = self.window.iter().find(|batch| batch.number == number)?;
        let mut gaps: BTreeSet<i64> = self.open.keys().copied().collect();
        if !self.is(Mutant::PersistMemoryAtMark) {
            let later = self.window.iter().filter(|batch| batch.number > number);
            gaps.extend(later.flat_map(|batch| batch.gap_rows.iter()));
        }
        let gaps = set(gaps.iter()).cut_at(batch.read_to);
        Some(Mark { batch: number, scanned_to: batch.read_to, gaps })
    }

    pub(crate) fn mark_idle(&self) -> Option<Mark> {
        let changed = self.window.is_empty() && set(self.persisted.iter()) != self.open();
        changed.then(|| Mark { batch: self.marked, scanned_to: self.read_to, gaps: self.open() })
    }

    pub(crate) fn on_marked(&mut self, mark: &Mark) {
        self.window.retain(|batch| batch.number > mark.batch);
        self.marked = self.marked.max(mark.batch);
        self.persisted = mark.gaps.iter().flat_map(|range| range.from..range.to).collect();
    }

    pub(crate) fn begin_lock_watch(&mut self, now: u64, age: u64) -> usize {
        if self.watch != Watch::Idle {
            return 0;
        }
        let covered: Vec<i64> = self
            .open
            .iter_mut()
            .filter(|(_, gap)| gap.holders == Holders::Unasked)
            .filter(|(_, gap)| gap.fence.is_some_and(|(_, at)| now.saturating_sub(at) >= age))
            .map(|(&position, gap)| {
                gap.holders = Holders::Watched;
                position
            })
            .collect();
        if !covered.is_empty() {
            self.watch = Watch::Listing;
        }
        set(covered.iter()).iter().count()
    }

    pub(crate) fn on_lock_holders(&mut self, holders: Vec<u64>) {
        if self.is(Mutant::HoldersForLaterGaps) {
            self.open.values_mut().for_each(|gap| gap.holders = Holders::Watched);
        }
        self.watch = if holders.is_empty() { Watch::Gone } else { Watch::Watching(holders) };
    }

    pub(crate) fn lock_watch(&self) -> Option<Vec<u64>> {
        match &self.watch {
            Watch::Watching(holders) => Some(holders.clone()),
            _ => None,
        }
    }

    pub(crate) fn on_still_holding(&mut self, still: &[u64]) {
        self.watch = if still.is_empty() { Watch::Gone } else { Watch::Watching(still.to_vec()) };
    }
}

fn set<'a>(positions: impl Iterator<Item = &'a i64>) -> GapSet {
    positions.map(|&position| Range::one(position)).collect()
}
