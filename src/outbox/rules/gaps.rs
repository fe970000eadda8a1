//! Pure: no I/O, no clock.
//! The cursor over a PostgreSQL outbox. It reads rows in position order without waiting for open
//! transactions, and it does not miss a row that commits late.
//!
//! A sequence gives out positions in one order, and transactions commit in another. So a position
//! that is missing now may get its row later. The cursor keeps each missing position as a *gap*
//! until the row appears, or until it is certain that no row will appear.
//!
//! Guarantees (rules R2 to R6 and R9):
//!
//! * A committed position at or below the persisted `scanned_to` is proven, dead, held, discarded,
//!   or in the persisted gaps. A crash at any instruction forgets nothing.
//! * The order of reads keeps every causal order: when the writer of one row committed before
//!   another row was enqueued, the first row is read first.
//! * A long transaction on other tables delays only the closing of gaps.
//!
//! The steps of a session, and the condition of each step:
//!
//! | step | call | rule |
//! |---|---|---|
//! | take the lease | [`GapCursor::start`] | one synchronous transaction; its id is the first fence |
//! | read | [`begin_read`](GapCursor::begin_read), then [`on_read`](GapCursor::on_read) | one statement over all ranges and the tail |
//! | checkpoint | [`begin_checkpoint`], then [`on_checkpoint`] | a synchronous transaction, begun after the read |
//! | send | only while [`needs_checkpoint`] returns false | the batches, in position order |
//! | mark | [`mark_through`](GapCursor::mark_through), then [`on_marked`](GapCursor::on_marked) | the oldest batches, wholly proven, dead or held |
//! | close gaps by locks | [`begin_lock_watch`](GapCursor::begin_lock_watch) and following | transaction ids only |
//!
//! [`begin_checkpoint`]: GapCursor::begin_checkpoint
//! [`on_checkpoint`]: GapCursor::on_checkpoint
//! [`needs_checkpoint`]: GapCursor::needs_checkpoint
//!
//! An error from here, a lost connection, or a fenced write that changed no row ends the session:
//! drop the cursor and start a new one from what is persisted. Nothing in memory is used again.
//!
//! Not here: the statements (`store::postgres`), which rows belong to a shard, which rows are
//! proven, and the epoch and revision that fence every write ([`lease`](crate::time::lease)).

mod cursor;
mod open;
mod plan;
mod set;
mod window;

pub(crate) use self::cursor::{GapCursor, RANGES_MAX};
pub(crate) use self::plan::{CheckpointTicket, Mark, ReadOutcome, ReadPlan};
pub(crate) use self::set::{GapSet, Range};

#[cfg(test)]
mod tests;
