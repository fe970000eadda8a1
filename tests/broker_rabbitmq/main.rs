//! The RabbitMQ adapter against a real server (`ONCEBOX_TEST_RABBITMQ`): each test has an exchange
//! and queues of its own.
#![cfg(feature = "rabbitmq")]
#![allow(clippy::unwrap_used)]

#[cfg(feature = "sqlite")]
#[path = "../support/outbox.rs"]
mod outbox;
#[cfg(feature = "sqlite")]
#[path = "../support/proxy.rs"]
mod proxy;
#[path = "../support/mod.rs"]
mod support;

mod conformance;
#[cfg(feature = "sqlite")]
mod consumer;
mod faults;
mod fixture;
mod handover;
mod private;
mod publish;
mod queues;
mod reach;
#[cfg(feature = "sqlite")]
mod relay;
mod repartition;
