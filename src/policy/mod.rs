//! What to decide: pure rules, each of which a reasonable version has broken once.
//!
//! Guarantees:
//!
//! * Nothing here reads a clock, a file, a socket or the environment, awaits, or draws a random
//!   number. Time and chance are arguments, so every rule can be run by the thousand in a test.
//! * Nothing here imports another room. The adapters and the runtime ask; this room answers.
//!
//! | module | decides | rules |
//! |---|---|---|
//! | [`gaps`] | which outbox positions may still appear, and what a relay persists | R2 to R6, R9, R18 |
//! | [`isolate`] | whether a failure speaks of the message, the destination or the connection | R16 |
//! | [`diversion`] | which rows go to the held table instead of the broker | R17 |
//! | [`lease`] | who owns, and whether the session is still the one that it was | R7, R22 |
//! | [`watermark`] | up to where a consumer may commit offsets or acknowledge | R29 |
//! | [`position`] | where a consumer begins in a partition | |
//! | [`retry`] | when a failed message is tried again, and when it is dead | R25 |
//! | [`suspicion`] | which deliveries run alone, with the attempt written first | R26 |
//! | [`split`] | how a failed batch is run again | R27 |
//! | `hosts` | which servers a URL with several hosts means | |
//! | [`horizon`] | what is too old or from the future, and how long the inbox must remember | R31 |
//! | [`hex`] | how hashes, ids and tokens stand in text | |
//! | [`breaker`] | when an outside place is left alone for a while | M110 |
//! | [`operation`] | what a second request is, and what becomes of it | O1 to O29 |
//!
//! Not here: SQL, brokers, tasks and timers (`store`, `broker`, `runtime`), and the words for
//! metrics (`observe`).

pub mod breaker;
pub mod db_time;
pub mod diversion;
pub mod gaps;
pub mod hex;
pub mod horizon;
#[cfg(any(feature = "postgres", feature = "mysql", feature = "rabbitmq"))]
pub(crate) mod hosts;
pub mod isolate;
pub mod lease;
pub mod operation;
pub mod position;
pub mod retry;
pub mod split;
pub mod suspicion;
pub mod watermark;
