//! Pure: no I/O, no clock.
//! The values that the cursor and the adapter that runs its statements exchange.
//!
//! Guarantee: these are plain values. Only `gaps` can make a [`CheckpointTicket`]: it counts the
//! reads that had ended when it was made.

use super::{GapSet, Range};

/// What the next read must cover, in one statement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ReadPlan {
    /// Every open gap, ascending.
    pub ranges: Vec<Range>,
    /// Where the tail begins, which is the last range of the read. `None` when there are as many
    /// open gaps as allowed: the read then covers gaps only (R9).
    pub tail_from: Option<i64>,
}

/// What a read has found, beside its rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ReadOutcome {
    /// The number of the batch that the rows of this read belong to, counted from 1 in each
    /// session. `None` if the read returned no row.
    pub batch: Option<u64>,
    /// The positions that this read found to have no row for ever: their transactions ended without
    /// one.
    pub closed: Vec<Range>,
}

/// The reads that a checkpoint covers, if the ticket is taken before its `BEGIN`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CheckpointTicket {
    pub(super) reads: u64,
}

/// What the transaction that marks messages as published stores with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mark {
    /// The last batch that this marks; all batches before it are marked too.
    pub batch: u64,
    /// The new value of `scanned_to` in the shard's row.
    pub scanned_to: i64,
    /// All gaps that are open then, none above `scanned_to`.
    pub gaps: GapSet,
}
