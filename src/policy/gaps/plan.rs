//! What passes between the cursor and the adapter that runs its statements.
//!
//! Guarantee: plain values; a [`ClaimTicket`] can only be made by the cursor, because its whole
//! meaning is *when*.
//!
//! Not here: rows and payloads, which the cursor never sees.

use super::{GapSet, Range};

/// What the next read must cover, in one statement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadPlan {
    /// Every open gap, ascending.
    pub ranges: Vec<Range>,
    /// Where the tail begins, the last range of the read; `None` at the cap on gaps, where only
    /// gaps are read (R9). An upper end of the tail, while shards are merged, is the caller's to
    /// choose.
    pub tail_from: Option<i64>,
}

/// What a read changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadOutcome {
    /// The batch that its rows form, if there were any, counted from 1 in each session.
    pub batch: Option<u64>,
    /// How many of its rows stood at gaps.
    pub gap_rows: usize,
    /// How many new ranges of missing positions it found.
    pub new_gaps: usize,
    /// The positions that will never have a row: their transactions ended without one.
    pub closed: Vec<Range>,
}

/// Proof that a claim began after the reads that it speaks for. Take it before `BEGIN`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClaimTicket {
    pub(super) reads: u64,
}

/// What the marking transaction persists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mark {
    /// The last batch that it marks; all before it are marked too.
    pub batch: u64,
    /// The new value of `scanned_to` in the shard's row.
    pub scanned_to: i64,
    /// The new gaps, all at or below `scanned_to`.
    pub gaps: GapSet,
}
