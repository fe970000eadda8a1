//! The outbox: a message is written in the transaction of the caller, and a relay carries it to the
//! broker, in order for each key.
//!
//! | module | for |
//! |---|---|
//! | `enqueue` | what a service calls in its transaction |
//! | `hint` | that messages were committed, for relays here and in other processes |
//! | `rules` | pure: which positions may still appear, whose fault a failure is, who is held |
//! | `port` | what a relay needs of a database |
//! | `relay` | the work: leases, reads, sends, marks |
//!
//! Not here: the statements (`store`), and the protocols of brokers (`broker`).

pub(crate) mod enqueue;
pub(crate) mod hint;
#[cfg(feature = "duties")]
pub(crate) mod port;
#[cfg(feature = "relay")]
pub(crate) mod relay;
#[cfg(feature = "duties")]
pub(crate) mod rules;
