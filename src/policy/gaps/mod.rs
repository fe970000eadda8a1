//! The cursor over a PostgreSQL outbox: reads in position order, at once, and forgets no row that
//! commits late.
//!
//! A sequence hands out positions in one order and transactions commit in another, so a position
//! that is missing today may stand there tomorrow. The cursor keeps every missing position as a
//! *gap* until its row appears or until it is certain that it never will.
//!
//! Guarantees (rules R2 to R6 and R9):
//!
//! * A committed position at or below the persisted `scanned_to` is proven, dead, held, discarded,
//!   or in the persisted gaps. A crash at any instruction forgets nothing.
//! * A row is read in an order that keeps every causal order: had its writer committed before
//!   another row was enqueued, it comes first.
//! * A long transaction elsewhere delays nothing but the closing of gaps.
//!
//! The steps of a session, and what each must wait for:
//!
//! | step | call | rule |
//! |---|---|---|
//! | take the lease | [`GapCursor::start`] | one synchronous transaction; its id is the first fence |
//! | read | [`begin_read`](GapCursor::begin_read), then [`on_read`](GapCursor::on_read) | one statement over all ranges and the tail |
//! | claim | [`begin_claim`](GapCursor::begin_claim), then [`on_claim`](GapCursor::on_claim) | a synchronous transaction begun after the read |
//! | send | not while [`needs_claim`](GapCursor::needs_claim) | only a claimed batch, in position order |
//! | mark | [`mark_through`](GapCursor::mark_through), then [`on_marked`](GapCursor::on_marked) | the oldest batches, wholly proven, dead or held |
//! | close by locks | [`begin_lock_watch`](GapCursor::begin_lock_watch) and following | ids of transactions, nothing else |
//!
//! Any doubt (an error from here, a lost connection, a fenced write that touched no row) ends the
//! session: drop the cursor and start a new one from what is persisted. Nothing else survives.
//!
//! Not here: the statements (`store::postgres`), which rows belong to a shard, what was proven by
//! the broker, and the epoch and revision that fence every write ([`lease`](crate::policy::lease)).

mod cursor;
mod error;
mod open;
mod plan;
mod set;
mod window;

pub use self::cursor::{GapCursor, RANGES_MAX};
pub use self::error::CursorError;
pub use self::plan::{ClaimTicket, Mark, ReadOutcome, ReadPlan};
pub use self::set::{GapSet, ParseGapsError, Range};

#[cfg(test)]
mod tests;
