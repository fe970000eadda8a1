//! The cursor over a PostgreSQL outbox: reads in position order, at once, and forgets no row that commits late.
//!
//! A sequence hands out positions in one order and transactions commit in another, so a position that is missing
//! today may stand there tomorrow. The cursor keeps every missing position as a *gap* until its row appears or until
//! it is certain that it never will.
//!
//! Guarantees (rules R2 to R6 and R9):
//!
//! * A committed position at or below the persisted `scanned_to` is proven, dead, held, discarded, or in the
//!   persisted gaps. A crash at any instruction forgets nothing.
//! * A row is read in an order that keeps every causal order: had its writer committed before another row was
//!   enqueued, it comes first.
//! * A long transaction elsewhere delays nothing but the closing of gaps.
//!
//! The steps of a session, and what each must wait for:
//!
//! | step | call | rule |
//! |---|---|---|
//! | take the lease | [`GapCursor::start`] | one synchronous transaction; its id is the first fence |
//! | read | [`begin_read`](GapCursor::begin_read), then [`on_read`](GapCursor::on_read) | one statement over all ranges and the tail |
//! | claim | [`begin_claim`](GapCursor::begin_claim), then [`on_claim`](GapCursor::on_claim) | a synchronous transaction begun after the read |
//! | send | [`may_send`](GapCursor::may_send) | only a claimed batch, in position order |
//! | mark | [`mark`](GapCursor::mark), then [`on_marked`](GapCursor::on_marked) | the oldest batch, wholly proven, dead or held |
//! | close by locks | [`begin_lock_watch`](GapCursor::begin_lock_watch) and following | ids of transactions, nothing else |
//!
//! Any doubt (an error from here, a lost connection, a fenced write that touched no row) ends the session: drop the
//! cursor and start a new one from what is persisted. Nothing else survives.
//!
//! Not here: the statements (`store::postgres`), which rows belong to a shard, what was proven by the broker, and the
//! epoch and revision that fence every write ([`lease`](crate::policy::lease)).

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

/// Joins the persisted gaps of two shards that are being merged (R18), or `None` while their `scanned_to` differ.
///
/// The union it must be: a gap of one is a row that this one has not sent, whatever the other did with it.
#[must_use]
pub fn join(one: (i64, &GapSet), other: (i64, &GapSet)) -> Option<GapSet> {
    (one.0 == other.0).then(|| one.1.union(other.1))
}

#[cfg(test)]
mod tests;
