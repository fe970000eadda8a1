//! What is served over HTTP.
//!
//! Not here: the engine that it translates for ([`runtime::operation`](crate::runtime::operation)),
//! binding addresses and installing recorders (room `app`).

#[cfg(feature = "programs")]
mod health;
#[cfg(feature = "http")]
pub mod idempotency;

#[cfg(feature = "programs")]
pub use health::health_routes;
