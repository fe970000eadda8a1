//! The Kafka adapter against a real Kafka, and against librdkafka's mock cluster for errors a real
//! one cannot be made to show. Every test makes topics and groups of its own.
#![cfg(feature = "kafka")]
#![allow(clippy::unwrap_used)]

#[cfg(feature = "programs")]
#[path = "../support/observed.rs"]
#[allow(dead_code)]
mod observed;
#[cfg(feature = "sqlite")]
#[path = "../support/outbox.rs"]
mod outbox;
#[cfg(feature = "sqlite")]
#[path = "../support/standstill.rs"]
mod standstill;
#[path = "../support/mod.rs"]
mod support;

mod conformance;
mod consume;
mod doctor;
mod errors;
#[cfg(feature = "programs")]
mod growth;
mod kit;
mod positions;
mod publish;
mod rebalance;
#[cfg(feature = "sqlite")]
mod relay;
mod security;
mod tools;
#[cfg(feature = "sqlite")]
mod wholesale;
