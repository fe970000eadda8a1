//! Redis as a guard: the suite of keys, and what only Redis has (O25).
#![cfg(all(feature = "redis", feature = "testing"))]
#![allow(clippy::unwrap_used)]

#[path = "store_redis/guard.rs"]
mod guard;
#[path = "store_redis/prefix.rs"]
mod prefix;
#[path = "support/mod.rs"]
mod support;

oncebox::keys_conformance!(prefix::Prefix);
