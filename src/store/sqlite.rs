//! The SQLite store: one file, one writer, no server.
//!
//! Guarantees:
//!
//! * WAL, `synchronous = FULL`, `BEGIN IMMEDIATE` around every write: what was committed survives,
//!   and no transaction is upgraded half way (which fails at once, whatever the busy timeout).
//! * Processes of oncebox take turns at the file and leave room for others (R14).
//! * One writer at a time means that positions commit in order: a plain cursor is exact. One shard,
//!   bucket 0.
//! * The limits of a message are triggers (R13), so that a plain insert is the same door as
//!   [`crate::store::enqueue`].
//!
//! Text in the database must be UTF-8. A statement that runs inside a handler holds the write lock
//! of the whole file: keep handlers short. Applications that write on their own begin with
//! `BEGIN IMMEDIATE` too.
//!
//! Not here: the embedded broker, which is another file with its own turns.

mod check;
mod connect;
mod door;
mod inbox;
mod mailbox;
mod message;
mod operations;
mod operator;
mod phases;
#[cfg(test)]
mod plans;
mod relay;
mod schema;
mod sql;
mod statements;
mod write;

pub use connect::SqliteStore;

/// Milliseconds since 1970 by the database's clock, as SQL.
macro_rules! now_ms {
    () => {
        "cast(round(unixepoch('subsec') * 1000) as integer)"
    };
}
/// The rows `i` = 0, 1, ... of a bound blob of fixed-size parts, as a common table expression named
/// `n`: how a statement takes many ids at once. `$blob` is the parameter, `$size` the size of a
/// part. An empty blob gives one part that matches nothing.
macro_rules! parts {
    ($blob:literal, $size:literal) => {
        concat!("n(i) as (select 0 union all select i + 1 from n where (i + 2) * ", $size, " <= length(", $blob, "))")
    };
}
use {now_ms, parts};

/// A duration in whole milliseconds, as the tables have it.
fn millis(duration: std::time::Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX / 4).min(i64::MAX / 4)
}
