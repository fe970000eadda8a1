//! The client against servers that drop connections, delay, redirect and lie.
#![cfg(all(feature = "client", feature = "encrypt"))]
#![allow(clippy::unwrap_used)]

mod journal;
mod middleware;
mod outcome;
#[path = "../support/process.rs"]
mod process;
mod server;
#[path = "../support/mod.rs"]
mod support;
mod waiting;
