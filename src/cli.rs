//! The command lines: parse, wire, run. Data goes to stdout, the rest to stderr.

#[macro_use]
mod common;
mod act;
mod answer;
mod audit;
mod bench;
mod config;
mod consumers;
mod dead;
mod demo;
mod doctor;
mod ground;
mod keys;
mod migrate;
mod oncebox;
mod operations;
mod place;
mod progress;
mod queues;
#[cfg(feature = "email")]
mod sender;
mod status;
mod stuck;

pub use oncebox::oncebox_main;
