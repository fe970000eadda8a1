//! The three programs as a person or script sees them from outside: exit codes, what is said where,
//! what is refused by name, and that no password is ever shown.
//!
//! Most tests run on a SQLite file and the embedded broker; `servers`, `stuck`, `unreachable` and
//! single tests of other files run on the real ones.
#![cfg(all(
    feature = "postgres",
    feature = "mysql",
    feature = "sqlite",
    feature = "kafka",
    feature = "rabbitmq",
    feature = "embedded",
    feature = "email"
))]
#![allow(clippy::unwrap_used)]

#[path = "../../../../tests/support/postgres.rs"]
mod postgres;
#[path = "../../../../tests/support/standstill.rs"]
mod standstill;
#[path = "../../../../tests/support/mod.rs"]
mod support;

#[path = "../../../../tests/support/proxy.rs"]
mod proxy;

mod broker;
mod database;
mod dead;
mod doctor;
mod help;
mod keys;
mod kit;
mod limits;
mod logs;
mod messages;
mod outside;
mod own_world;
mod processes;
mod readme;
mod schema;
mod servers;
mod settings;
mod show;
mod stuck;
mod unreachable;
mod urls;
