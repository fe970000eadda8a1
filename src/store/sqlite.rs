//! The SQLite store: one file, one writer, no server.
//!
//! Guarantees:
//!
//! * WAL, `synchronous = FULL`, and `BEGIN IMMEDIATE` around every write: what was committed
//!   survives, and no read transaction is upgraded to a write (which would fail at once, whatever
//!   the busy timeout).
//! * Processes of oncebox take turns at the file and leave time for other writers (R14).
//! * There is one writer at a time, so positions commit in order and a plain cursor is exact. There
//!   is one shard, with bucket 0.
//! * Triggers apply the limits of a message (R13), so a plain insert is checked like
//!   [`crate::outbox::enqueue::enqueue`].
//!
//! Text in the database must be UTF-8. A handler holds the write lock of the whole file while it
//! runs: keep handlers short. Applications that write on their own begin with `BEGIN IMMEDIATE`
//! too.
//!
//! Not here: the embedded broker, which is another file with its own turns.

mod check;
mod connect;
mod door;
#[cfg(feature = "duties")]
mod inbox;
mod message;
#[cfg(feature = "operations")]
mod operations;
#[cfg(feature = "duties")]
mod operator;
#[cfg(feature = "operations")]
mod phases;
#[cfg(all(test, feature = "operations"))]
mod plans;
#[cfg(feature = "duties")]
mod relay;
#[cfg(feature = "duties")]
mod savepoint;
mod schema;
#[cfg(feature = "duties")]
mod sql;
#[cfg(feature = "duties")]
mod statements;
mod write;

use std::sync::Arc;

/// The store on SQLite: a file with an outbox, an inbox and operations. Cheap to clone.
#[derive(Debug, Clone)]
pub struct SqliteStore {
    shared: Arc<connect::Database>,
}

/// Milliseconds since 1970 by the database's clock, as SQL.
macro_rules! now_ms {
    () => {
        "cast(round(unixepoch('subsec') * 1000) as integer)"
    };
}
/// A common table expression `n` whose rows `i` = 0, 1, ... number the fixed-size parts of a bound
/// blob: with it one statement takes many ids. `$blob` is the parameter, `$size` the size of a
/// part. An empty blob gives one part that matches nothing.
#[cfg(feature = "duties")]
macro_rules! parts {
    ($blob:literal, $size:literal) => {
        concat!("n(i) as (select 0 union all select i + 1 from n where (i + 2) * ", $size, " <= length(", $blob, "))")
    };
}
use now_ms;
#[cfg(feature = "duties")]
use parts;

/// A duration in whole milliseconds, as the tables store it.
fn millis(duration: std::time::Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX / 4).min(i64::MAX / 4)
}
