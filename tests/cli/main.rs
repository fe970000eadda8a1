//! The three programs as a person or script sees them from outside: exit codes, what is said where,
//! what is refused by name, and that no password is ever shown.
//!
//! Most tests run on a SQLite file and the embedded broker; `servers` and `unreachable` on the real
//! ones.
#![cfg(all(
    feature = "programs",
    feature = "postgres",
    feature = "mysql",
    feature = "sqlite",
    feature = "kafka",
    feature = "rabbitmq",
    feature = "embedded",
    feature = "email",
    feature = "testing"
))]
#![allow(clippy::unwrap_used)]

#[path = "../support/postgres.rs"]
mod postgres;
#[path = "../support/standstill.rs"]
mod standstill;
#[path = "../support/mod.rs"]
mod support;

#[path = "../support/proxy.rs"]
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
