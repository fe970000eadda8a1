//! Redis as a guard: the suite of keys, and what only Redis has (O25).
#![cfg(feature = "redis")]
#![allow(clippy::unwrap_used)]

#[path = "store_redis/guard.rs"]
mod guard;
#[path = "store_redis/prefix.rs"]
mod prefix;
#[path = "support/proxy.rs"]
mod proxy;
#[path = "support/mod.rs"]
mod support;

oncebox_testkit::keys_conformance!(prefix::Prefix);
