//! The work of the library: relay, consumer, retries, operations and the e-mail sender.
//!
//! Guarantees: no lock and no transaction is held across a call to the broker. Every wait has a
//! bound or a stop. A task that must finish is never cancelled in the middle of a statement.
//!
//! Not here: the decisions (`policy`), and the statements and protocols of databases and brokers
//! (`store` and `broker`).

#[cfg(feature = "email")]
mod carriage;
pub(crate) mod consumer;
mod handler;
pub(crate) mod operation;
pub mod pace;
pub(crate) mod relay;
#[cfg(feature = "email")]
pub mod sender;
mod sql_handler;

pub use consumer::{Consumer, ConsumerEnd, ConsumerOptions, DeadPolicy, Handlers, Unhandled};
pub use handler::{BatchMessageHandler, HandlerTx, MessageHandler};
pub use relay::{Relay, RelayEnd, RelayOptions};
pub use sql_handler::{SqlHandler, SqlSpec, SqlSpecError};
