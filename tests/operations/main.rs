//! The operation engine through its doors: on real databases, over HTTP, and as two processes of
//! the example service.
//!
//! Names begin with `o..`, `r..`, `m..` or `pitfall_..` where they show one: a rule, an item of the
//! mission or a pitfall. Every wait is for a condition.
#![cfg(all(feature = "http", feature = "sqlite", feature = "postgres", feature = "mysql", feature = "programs"))]
#![allow(clippy::unwrap_used)]

#[path = "../support/observed.rs"]
#[allow(dead_code)] // its part
mod hearing;
#[path = "../store_mysql/fixture.rs"]
#[allow(dead_code)]
mod mysql;
#[path = "../support/postgres.rs"]
mod postgres;
#[path = "../support/process.rs"]
mod process;
#[path = "../support/provider.rs"]
mod provider;
#[path = "../support/proxy.rs"]
mod proxy;
#[path = "../support/standstill.rs"]
mod standstill;
#[path = "../support/mod.rs"]
mod support;

mod away;
mod between;
mod bodies;
mod choices;
#[cfg(feature = "compress")]
mod coding;
mod control;
mod crowd;
mod edges;
mod faulty;
#[cfg(feature = "openapi")]
mod fuzz;
mod gone;
mod isolation;
mod kept;
mod keyring;
mod kit;
mod late_runs;
mod layer;
mod layer_ends;
mod lock_wait;
mod lost;
mod observed;
mod outside;
mod policies;
mod quota;
mod regions;
#[cfg(feature = "embedded")]
mod relayed;
#[cfg(feature = "encrypt")]
mod sealed;
mod service;
mod services;
mod stale;
mod transactional;
