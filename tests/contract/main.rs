//! The contract, line by line: relay, consumer, retries, sender and sql handler on real stores,
//! with a broker whose faults can be switched.
//!
//! A name that begins with `g..` or `r..` cites a promise or a rule. Waits are for a condition and
//! have a deadline. Where nothing must happen, a test watches for a fixed time.
#![cfg(all(feature = "sqlite", feature = "postgres", feature = "mysql", feature = "email", feature = "embedded"))]
#![allow(clippy::unwrap_used)]

#[path = "../store_mysql/fixture.rs"]
#[allow(dead_code)]
mod mysql;
#[path = "../support/observed.rs"]
#[allow(dead_code)]
mod observed;
#[path = "../support/postgres.rs"]
mod postgres;
#[path = "../support/proxy.rs"]
mod proxy;
#[path = "../support/standstill.rs"]
mod standstill;
#[path = "../support/mod.rs"]
mod support;

mod aside;
mod away;
mod beside;
mod consumer;
mod failover;
mod guide;
mod hints;
mod horizon;
mod intake;
mod kills;
mod kit;
mod lost_commit;
mod misuse;
mod own;
mod ready;
mod relay;
mod relay_held;
mod relay_marks;
mod relay_room;
mod relay_stop;
mod relay_stuck;
mod retries;
mod sender;
mod sets;
mod smtp;
mod sql;
mod sql_sets;
mod stop;
mod troubled;
