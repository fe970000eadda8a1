//! Values as text, the same for stores, brokers and clients.
//!
//! | module | for |
//! |---|---|
//! | [`hex`] | how hashes, ids and tokens stand in text |
//! | `hosts` | which servers a URL with several hosts names |
//! | `panic` | what a panic said |

pub(crate) mod hex;
#[cfg(any(feature = "postgres", feature = "mysql", feature = "rabbitmq"))]
pub(crate) mod hosts;
#[cfg(any(feature = "consumer", feature = "operations"))]
pub(crate) mod panic;
