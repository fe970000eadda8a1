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

#[cfg(feature = "kafka")]
pub use connect::kafka_config;
#[cfg(feature = "rabbitmq")]
pub use connect::rabbit_config;
pub use connect::{AnyBroker, open_broker, open_store, open_store_with, require_schema, store_kind};
pub use consumer::{ConsumerStart, HandlersByConsumer, run_consumers, run_consumers_with};
pub use exit::{AppError, Exit};
pub use listen::listen;
pub use logging::{LogFormat, say, speak, start_logging};
pub use program::{COMMON_OPTIONS, CommonArgs, run};
pub use programs::{
    ConsumerArgs, PublisherArgs, configured_consumer, consumer, plain_publisher, program_commands, publisher,
};
pub use publisher::{run_publisher, run_publisher_with};
pub use signals::stop_on_signals;
