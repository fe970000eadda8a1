//! Redis as a guard for requests that may run twice (O25, M55, M58): it suppresses duplicates while
//! one primary keeps its data.
//!
//! Promises:
//!
//! * Every change is one script: claim, fence and outcome see no half of another's. The owner's
//!   token, 128 random bits, and the epoch are compared in each; the token alone takes back a claim
//!   whose answer was lost.
//! * The lease is a field, judged by the server's `TIME`; a claim never goes away because its lease
//!   is over, and what runs or is unknown has no time to live. With an outcome a record lives as
//!   long as the retention says.
//! * Epochs come from one counter without a time to live, and no number is given twice while the
//!   data is kept. They are a promise to nobody outside.
//! * A server that may evict keys, or is a replica, is refused at start. A server that is away is
//!   no duplicate: it is [`StoreError::Unavailable`](crate::error::StoreError::Unavailable), and
//!   nothing runs.
//!
//! A failover that loses a write loses a claim: so only routes of mode `edge` whose effects are
//! declared repeatable are taken ([`Route::validate`](crate::policy::operation::Route::validate)).
//! One primary, not a cluster: the scripts name keys of several slots.
//!
//! Not here: memory of an outcome that must not be lost (`postgres`, `mysql`, `sqlite`).

mod connect;
mod operations;
mod scripts;

pub use connect::{RedisKeys, RedisOptions};
