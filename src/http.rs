//! The parts of the library that serve HTTP.

#[cfg(feature = "programs")]
mod health;
#[cfg(feature = "http")]
pub mod idempotency;

#[cfg(feature = "programs")]
pub(crate) use health::health_routes;
