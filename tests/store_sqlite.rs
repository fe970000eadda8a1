//! The SQLite store: the suite, and what only SQLite has.
#![cfg(all(feature = "sqlite", feature = "testing"))]
#![allow(clippy::unwrap_used)]

#[path = "store_sqlite/fixture.rs"]
mod fixture;

oncebox::store_conformance!(fixture::SqliteFile);
