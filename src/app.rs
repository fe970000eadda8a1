//! The building blocks of the programs: settings, connections by URL, the publisher and consumer as
//! programs, and their command lines.
//!
//! Guarantees: only this room reads the environment; a program never migrates by itself; secrets
//! are never printed.
//!
//! Not here: commands for people (`crates/cli`), the work itself (`outbox`, `inbox`, `operation`).

mod beside;
pub mod config;
mod connect;
mod consumer;
mod exit;
pub(crate) mod gauges;
mod listen;
mod logging;
mod program;
mod programs;
mod publisher;
mod signals;

pub use self::{
    connect::{AnyBroker, Waits, open_broker, open_store, open_store_with, store_kind},
    consumer::{HandlersByConsumer, run_consumers_with},
    exit::AppError,
    logging::{LogFormat, say, speak, start_logging},
    program::{COMMON_OPTIONS, CommonArgs, run},
    programs::{
        ConsumerArgs, PublisherArgs, configured_consumer, consumer, plain_publisher, program_commands, publisher, start,
    },
    publisher::{close, ready, run_publisher_with},
    signals::stop_on_signals,
};
