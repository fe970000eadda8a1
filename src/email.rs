//! E-mail: a row that commits with its effect, and the process that sends it.
//!
//! | module | for |
//! |---|---|
//! | `port` | what the sender needs of a database |
//! | `carriage` | an e-mail as bytes, and its way to a server or a file |
//! | `smtp` | one dialogue with a server |
//! | `wire` | the connection to a server, with TLS |
//! | `sender` | the work: leases rows, sends, records what became of each |

#[cfg(feature = "email")]
pub(crate) mod carriage;
#[cfg(feature = "duties")]
pub(crate) mod port;
#[cfg(feature = "email")]
pub mod sender;
#[cfg(feature = "email")]
pub(crate) mod smtp;
#[cfg(feature = "email")]
mod wire;
