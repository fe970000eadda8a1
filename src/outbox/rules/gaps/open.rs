//! Pure: no I/O, no clock.
//! The open gaps in memory: each range with its fence, its age and the state of its lock holders.
//!
//! Guarantees:
//!
//! * A range is never joined with another, so a fence holds for exactly its own positions.
//! * A row taken out of a range splits it; both parts keep the fence.

use std::collections::BTreeMap;

use super::{GapSet, Range};

/// What is known about the transactions that could still fill a gap (R6).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Holders {
    /// The lock holders were not listed yet.
    Unasked,
    /// The lock holders are being listed or watched.
    Watched,
    /// All lock holders ended before the current read began.
    Gone,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Fence {
    xid: u64,
    /// In milliseconds since the session began.
    taken_at: u64,
}

#[derive(Debug, Clone, Copy)]
struct Gap {
    to: i64,
    /// The number of the read that found it.
    found: u64,
    fence: Option<Fence>,
    holders: Holders,
}

#[derive(Debug, Default)]
pub(super) struct OpenGaps {
    gaps: BTreeMap<i64, Gap>,
}

impl OpenGaps {
    /// The gaps at the start of a session. The transaction that took the lease fences them.
    pub(super) fn fenced(gaps: &GapSet, xid: u64) -> Self {
        let fence = Some(Fence { xid, taken_at: 0 });
        let gap = |range: Range| Gap { to: range.to, found: 0, fence, holders: Holders::Unasked };
        Self { gaps: gaps.iter().map(|range| (range.from, gap(range))).collect() }
    }

    pub(super) fn len(&self) -> usize {
        self.gaps.len()
    }

    pub(super) fn ranges(&self) -> impl Iterator<Item = Range> + '_ {
        self.gaps.iter().map(|(&from, gap)| Range { from, to: gap.to })
    }

    pub(super) fn contains(&self, position: i64) -> bool {
        self.gaps.range(..=position).next_back().is_some_and(|(_, gap)| position < gap.to)
    }

    /// Adds a range that a read found missing. It has no fence yet.
    pub(super) fn found(&mut self, range: Range, read: u64) {
        let gap = Gap { to: range.to, found: read, fence: None, holders: Holders::Unasked };
        self.gaps.insert(range.from, gap);
    }

    /// Removes a position from its range, because its row appeared.
    pub(super) fn take_row(&mut self, position: i64) {
        let Some((&from, &gap)) = self.gaps.range(..=position).next_back() else {
            return;
        };
        if position >= gap.to {
            return;
        }
        self.gaps.remove(&from);
        if from < position {
            self.gaps.insert(from, Gap { to: position, ..gap });
        }
        if position + 1 < gap.to {
            self.gaps.insert(position + 1, gap);
        }
    }

    /// Sets the transaction of a checkpoint, which began after read number `reads`, as the fence of
    /// all gaps that were found up to that read and have none.
    pub(super) fn fence(&mut self, reads: u64, xid: u64, now: u64) {
        for gap in self.gaps.values_mut().filter(|gap| gap.fence.is_none() && gap.found <= reads) {
            gap.fence = Some(Fence { xid, taken_at: now });
        }
    }

    pub(super) fn unfenced(&self) -> bool {
        self.gaps.values().any(|gap| gap.fence.is_none())
    }

    /// Closes and returns the positions of which a read proves that no row will come: their fence
    /// is at or below `xmin`, or their lock holders are gone. Every transaction with an id below
    /// `xmin` had ended at the read. If the LIMIT was reached, the read says nothing about
    /// positions from `below` on.
    pub(super) fn close(&mut self, xmin: u64, below: Option<i64>) -> Vec<Range> {
        let certain = |gap: &Gap| gap.holders == Holders::Gone || gap.fence.is_some_and(|fence| fence.xid <= xmin);
        let mut closed = Vec::new();
        let end = below.unwrap_or(i64::MAX);
        let froms: Vec<i64> = self.gaps.range(..end).filter(|(_, gap)| certain(gap)).map(|(&from, _)| from).collect();
        for from in froms {
            let Some(gap) = self.gaps.remove(&from) else {
                continue;
            };
            closed.push(Range { from, to: gap.to.min(end) });
            if end < gap.to {
                self.gaps.insert(end, gap);
            }
        }
        closed
    }

    /// Marks all stale gaps as watched and returns how many ranges that is: those whose fence was
    /// taken `age` milliseconds ago or before that, and whose lock holders were not asked for.
    pub(super) fn watch_stale(&mut self, now: u64, age: u64) -> usize {
        let is_old = |fence: Fence| now.saturating_sub(fence.taken_at) >= age;
        let is_stale = |gap: &&mut Gap| gap.holders == Holders::Unasked && gap.fence.is_some_and(is_old);
        let mut count = 0;
        for gap in self.gaps.values_mut().filter(is_stale) {
            gap.holders = Holders::Watched;
            count += 1;
        }
        count
    }

    /// All lock holders of the watched gaps have ended, and a read begins now that sees their rows.
    pub(super) fn holders_gone(&mut self) {
        for gap in self.gaps.values_mut().filter(|gap| gap.holders == Holders::Watched) {
            gap.holders = Holders::Gone;
        }
    }
}
