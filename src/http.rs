//! The parts of the library that serve HTTP.
//!
//! Not here: the engine behind the routes ([`operation`](crate::operation)),
//! binding addresses and installing recorders (`app`).

#[cfg(feature = "programs")]
mod health;
#[cfg(feature = "http")]
pub mod idempotency;

#[cfg(feature = "programs")]
pub(crate) use health::health_routes;
