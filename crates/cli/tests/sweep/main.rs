//! The example service over HTTP: killed at every point with a request in flight, and asked again.
#![allow(clippy::unwrap_used)]

mod api;
mod charges;
mod kills;
mod ledgers;
#[path = "../../../../tests/store_mysql/fixture.rs"]
#[allow(dead_code)]
mod mysql;
/// The points of the example.
#[path = "../../../../examples/payments_api/points.rs"]
#[allow(dead_code)]
mod points;
#[path = "../../../../tests/support/postgres.rs"]
mod postgres;
#[path = "../../../../tests/support/process.rs"]
mod process;
#[path = "../../../../tests/support/provider.rs"]
mod provider;
#[path = "../../../../tests/support/mod.rs"]
mod support;
mod worker;
