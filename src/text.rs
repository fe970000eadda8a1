//! Values as text, the same for stores, brokers and clients.
//!
//! | module | for |
//! |---|---|
//! | [`hex`] | how hashes, ids and tokens stand in text |
//! | `hosts` | which servers a URL with several hosts names |
//! | `loopback` | whether a host is this machine |
//! | `panic` | what a panic said |
//! | `percent` | parts of a URL that are percent-encoded |

pub(crate) mod hex;
#[cfg(any(feature = "postgres", feature = "mysql", feature = "rabbitmq"))]
pub(crate) mod hosts;
#[cfg(any(feature = "postgres", feature = "mysql", feature = "kafka", feature = "rabbitmq"))]
pub(crate) mod loopback;
#[cfg(any(feature = "consumer", feature = "operations"))]
pub(crate) mod panic;
#[cfg(any(feature = "kafka", feature = "rabbitmq", feature = "email"))]
pub(crate) mod percent;
