//! The store on PostgreSQL: the suite that every store must pass, and what only PostgreSQL has.
#![cfg(feature = "postgres")]
#![allow(clippy::unwrap_used)]

#[path = "support/another_name.rs"]
mod another_name;
#[path = "support/observed.rs"]
#[allow(dead_code)]
mod observed;
#[path = "support/postgres.rs"]
mod postgres;
#[path = "support/proxy.rs"]
mod proxy;
mod support;

#[path = "store_postgres/bodies.rs"]
mod bodies;
#[path = "store_postgres/conformance.rs"]
mod conformance;
#[path = "store_postgres/connections.rs"]
mod connections;
#[path = "store_postgres/doors.rs"]
mod doors;
#[path = "store_postgres/operator.rs"]
mod operator;
#[path = "store_postgres/plans.rs"]
mod plans;
#[path = "store_postgres/schema.rs"]
mod schema;
#[path = "store_postgres/turns.rs"]
mod turns;
