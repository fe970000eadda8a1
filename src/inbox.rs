//! The inbox: a consumer runs handlers in a transaction that also holds the inbox row of each
//! message, so that its effect commits once.
//!
//! | module | for |
//! |---|---|
//! | `handler`, `sql_handler` | what a team writes: code, or statements in a file |
//! | `rules` | pure: what is too old, what runs alone, how a failed batch is halved |
//! | `port` | what a consumer needs of a database; `port::waiting`: messages that wait for a retry |
//! | `consumer` | the work: intake, lanes, batches, retries |
//!
//! Guarantees: no lock and no transaction is held across a call to the broker. Every wait has a
//! bound or a stop. A task that must finish is never cancelled in the middle of a statement.
//!
//! Not here: the statements (`store`), and the protocols of brokers (`broker`).

#[cfg(feature = "consumer")]
pub(crate) mod consumer;
#[cfg(feature = "consumer")]
pub(crate) mod handler;
#[cfg(feature = "duties")]
pub(crate) mod port;
pub(crate) mod rules;
#[cfg(feature = "consumer")]
pub(crate) mod sql_handler;
