//! The examples, as real processes: what they teach holds when it is run.
#![allow(clippy::unwrap_used)]

mod answers;
#[cfg(all(feature = "http", feature = "sqlite"))]
mod axum_service;
#[path = "../../../../tests/store_mysql/fixture.rs"]
#[allow(dead_code)]
mod mysql;
mod payments;
mod plain_sql;
#[path = "../../../../tests/support/postgres.rs"]
mod postgres;
#[path = "../../../../tests/support/process.rs"]
mod process;
/// The outside provider, the same that the example has: it is no part of what is tested.
#[path = "../../../../examples/payments/provider.rs"]
mod provider;
mod smallest;
mod stage;
#[path = "../../../../tests/support/mod.rs"]
mod support;
