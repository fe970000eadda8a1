//! The example service over HTTP: killed at every point with a request in flight, and asked again.
#![allow(clippy::unwrap_used)]

mod api;
mod charges;
mod kills;
mod ledgers;
#[path = "../store_mysql/fixture.rs"]
#[allow(dead_code)]
mod mysql;
/// The points of the example.
#[path = "../../examples/payments_api/points.rs"]
#[allow(dead_code)]
mod points;
#[path = "../support/postgres.rs"]
mod postgres;
#[path = "../support/provider.rs"]
mod provider;
#[path = "../support/mod.rs"]
mod support;
mod worker;
