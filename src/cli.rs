//! The command lines: parse, wire, run. Data goes to stdout, the rest to stderr.

#[macro_use]
mod common;
mod act;
mod answer;
mod bench;
mod config;
mod dead;
mod demo;
mod doctor;
mod keys;
mod migrate;
mod oncebox;
mod operations;
mod place;
mod progress;
#[cfg(feature = "email")]
mod sender;
mod status;

pub use oncebox::oncebox_main;
