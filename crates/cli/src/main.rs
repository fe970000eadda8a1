//! The program `oncebox`: the commands for people and scripts, such as `demo`, `migrate`, `status`,
//! `doctor` and `dead`. Data goes to stdout, everything else to stderr.

// Without a store, parts of the commands are not used.
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
mod sending;
mod status;
mod stuck;
mod table;

use std::process::ExitCode;

fn main() -> ExitCode {
    commands::run_named()
}
