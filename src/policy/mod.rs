//! The pure rules that decide what relay, consumer and operations do next. A version without one of
//! these rules lost, doubled or reordered something.
//!
//! Guarantees:
//!
//! * Nothing here reads a clock, a file, a socket or the environment, awaits, or draws a random
//!   number. Time and chance are arguments, so a test can run each rule thousands of times.
//! * Nothing here imports another top-level module. The adapters and the runtime call this module.
//!
//! | module | decides | rules |
//! |---|---|---|
//! | [`gaps`] | which outbox positions may still appear, and what a relay persists | R2 to R6, R9, R18 |
//! | [`isolate`] | whether one message makes a relay's sessions end | R16 |
//! | [`diversion`] | which rows go to the held table instead of the broker | R17 |
//! | [`lease`] | who owns a lease, and whether a session still holds it | R7, R22 |
//! | [`watermark`] | up to where a consumer may commit offsets or acknowledge | R29 |
//! | [`position`] | the offset at which a consumer begins to read a partition | |
//! | [`retry`] | when a failed message is tried again, and when it is dead | R25 |
//! | [`suspicion`] | which deliveries run with the attempt written first, and which of them alone | R26 |
//! | [`split`] | how a failed batch is run again | R27 |
//! | `hosts` | which servers a URL with several hosts names | |
//! | [`horizon`] | what is too old or from the future, and how long the inbox must remember | R31 |
//! | [`hex`] | how hashes, ids and tokens stand in text | |
//! | [`breaker`] | when an outside place is left alone for a while | M110 |
//! | [`operation`] | what a second request is, and what becomes of it | O1 to O29 |
//!
//! Not here: SQL, brokers, tasks and timers (`store`, `broker`, `runtime`), and the words for
//! metrics (`observe`).

pub(crate) mod breaker;
pub mod db_time;
pub mod diversion;
pub mod gaps;
pub mod hex;
pub mod horizon;
#[cfg(any(feature = "postgres", feature = "mysql", feature = "rabbitmq"))]
pub(crate) mod hosts;
pub mod isolate;
pub mod lease;
pub(crate) mod operation;
pub mod position;
pub(crate) mod retry;
pub(crate) mod split;
pub(crate) mod suspicion;
pub(crate) mod watermark;

#[cfg(test)]
#[path = "../../tests/policy/gap_model/main.rs"]
mod gap_model;
#[cfg(test)]
#[path = "../../tests/policy/properties/main.rs"]
mod properties;
