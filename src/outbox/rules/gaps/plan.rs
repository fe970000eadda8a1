//! Pure: no I/O, no clock.
//! The values that the cursor and the adapter that runs its statements exchange.
//!
//! Guarantee: these are plain values. Only the cursor can make a [`CheckpointTicket`], because the
//! ticket records the moment at which it was made.

use super::{GapSet, Range};

/// What the next read must cover, in one statement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ReadPlan {
    /// Every open gap, ascending.
    pub ranges: Vec<Range>,
    /// Where the tail begins, which is the last range of the read. `None` when the maximum of open
    /// gaps is reached: the read then covers gaps only (R9). The caller may choose an upper end of
    /// the tail, for example while shards are merged.
    pub tail_from: Option<i64>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ReadOutcome {
    /// The number of the batch that the rows of this read belong to, counted from 1 in each
    /// session. `None` if the read returned no row.
    pub batch: Option<u64>,
    /// The positions that will never have a row: their transactions ended without one.
    pub closed: Vec<Range>,
}

/// Proof that a checkpoint began after the reads that it covers. Take it before `BEGIN`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CheckpointTicket {
    pub(super) reads: u64,
}

/// What the marking transaction persists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mark {
    /// The last batch that this marks; all batches before it are marked too.
    pub batch: u64,
    /// The new value of `scanned_to` in the shard's row.
    pub scanned_to: i64,
    /// The new gaps, all at or below `scanned_to`.
    pub gaps: GapSet,
}
