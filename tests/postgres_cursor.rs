//! The gap cursor against the real thing: scripted histories of transactions, a relay that dies at
//! every step, a server that is killed, partitions under load, and what a relayed row costs.
#![cfg(feature = "postgres")]
#![allow(clippy::unwrap_used)]

#[path = "support/postgres.rs"]
mod postgres;
mod support;

#[path = "postgres_cursor/cost.rs"]
mod cost;
#[path = "postgres_cursor/deaths.rs"]
mod deaths;
#[path = "postgres_cursor/decisions.rs"]
mod decisions;
#[path = "postgres_cursor/fences.rs"]
mod fences;
#[path = "postgres_cursor/histories.rs"]
mod histories;
#[path = "postgres_cursor/partitions.rs"]
mod partitions;
#[path = "postgres_cursor/relay.rs"]
mod relay;
