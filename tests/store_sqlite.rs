//! The SQLite store: the suite, and what only SQLite has.
#![cfg(feature = "sqlite")]
#![allow(clippy::unwrap_used)]

#[path = "store_sqlite/durability.rs"]
mod durability;
#[path = "store_sqlite/fixture.rs"]
mod fixture;
#[path = "store_sqlite/handlers.rs"]
mod handlers;
#[path = "store_sqlite/plain_inserts.rs"]
mod plain_inserts;
#[path = "store_sqlite/processes.rs"]
mod processes;

oncebox_testkit::store_conformance!(fixture::SqliteFile);
