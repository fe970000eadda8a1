//! What a person types: demo, migrate, status, doctor, dead, config, bench. Parse, wire, run: data
//! goes to stdout, the rest to stderr.

// What the commands do with a store has no user where none is built.
#![cfg_attr(not(any(feature = "postgres", feature = "mysql", feature = "sqlite")), allow(unused))]

#[macro_use]
mod common;
mod act;
mod answer;
mod audit;
mod bench;
mod commands;
mod config;
mod consumers;
mod dead;
mod demo;
mod doctor;
mod ground;
mod keys;
mod migrate;
mod operations;
mod place;
mod progress;
mod queues;
#[cfg(feature = "email")]
mod sender;
mod status;
mod stuck;

use std::process::ExitCode;

fn main() -> ExitCode {
    commands::run_named()
}
