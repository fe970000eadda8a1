//! The MySQL / MariaDB store against a real server: the suite that every store passes, and what
//! only this one has to show.
//!
//! Each test has a database of its own. Settings that hold for a whole server (binary log,
//! durability, functions) are tested on a private server, which needs `mariadbd` on this machine.
#![cfg(feature = "mysql")]
#![allow(clippy::unwrap_used)]

mod support;

#[path = "support/another_name.rs"]
mod another_name;
#[path = "support/proxy.rs"]
mod proxy;

#[path = "store_mysql/check.rs"]
mod check;
#[path = "store_mysql/conformance.rs"]
mod conformance;
#[path = "store_mysql/door.rs"]
mod door;
#[path = "store_mysql/fixture.rs"]
mod fixture;
#[path = "store_mysql/inbox.rs"]
mod inbox;
#[path = "store_mysql/plans.rs"]
mod plans;
#[path = "store_mysql/relay.rs"]
mod relay;
#[path = "store_mysql/schema.rs"]
mod schema;
