//! Exactly-once *effects* over at-least-once brokers.
//!
//! A service writes its business rows and a message in one database transaction; the relay carries
//! committed messages to a broker, in order per key; the consumer runs handlers inside a
//! transaction that also holds their inbox row, so that an effect commits once whatever is
//! redelivered, raced, crashed or rebalanced.
//!
//! Rooms import only downwards (a test reads the sources and refuses anything else):
//!
//! | room | for |
//! |---|---|
//! | [`http`] (feature `http`) | the doors for requests with an `Idempotency-Key` |
//! | [`app`], [`cli`] | what people and processes touch (feature `programs`) |
//! | `grpc`, `client` | the same operations over gRPC, and who calls them (features `grpc`, `client`) |
//! | [`runtime`] | relay, consumer, retries, e-mail sender: who does the work |
//! | [`store`] and [`broker`] | where state lives, and how bytes leave and arrive; they never see each other |
//! | [`observe`] | every metric name, once |
//! | `flock` | turns at a file between processes |
//! | [`message`], [`policy`], [`error`] | what travels and what to decide: pure, no I/O, no clock |

// What the adapters share, and what the programs do with one, has no user where none of them is
// built.
#![cfg_attr(not(any(feature = "postgres", feature = "mysql", feature = "sqlite")), allow(unused))]

#[cfg(feature = "programs")]
pub mod app;
pub mod broker;
#[cfg(feature = "programs")]
pub mod cli;
#[cfg(feature = "client")]
pub mod client;
pub mod error;
#[cfg(any(feature = "embedded", feature = "sqlite"))]
mod flock;
#[cfg(feature = "grpc")]
pub mod grpc;
#[cfg(any(feature = "programs", feature = "http"))]
pub mod http;
pub mod message;
pub mod observe;
pub mod policy;
pub mod runtime;
pub mod store;

pub use async_trait::async_trait;
pub use error::{BrokerError, HandlerError, LimitError, StoreError};
pub use message::{Message, NewMessage};
pub use runtime::{BatchMessageHandler, HandlerTx, Handlers, MessageHandler};
pub use sqlx;
pub use store::Store;

/// The code of the README, compiled with the documentation tests.
#[cfg(all(doctest, feature = "postgres", feature = "programs", feature = "http", feature = "client"))]
#[doc = include_str!("../README.md")]
struct Readme;

/// The code of the client's guide.
#[cfg(all(doctest, feature = "client"))]
#[doc = include_str!("../docs/reference/client.md")]
struct ClientGuide;

/// The code of the guides. That of the axum service is an example of its own, which a test runs.
#[cfg(all(doctest, feature = "programs", feature = "postgres", feature = "http", feature = "client"))]
#[doc = include_str!("../docs/guides/recovery-worker.md")]
#[doc = include_str!("../docs/guides/regions.md")]
#[doc = include_str!("../docs/guides/webhooks.md")]
#[doc = include_str!("../docs/reference/settings.md")]
struct Guides;

/// The code of the guide to the gRPC door.
#[cfg(all(doctest, feature = "postgres", feature = "grpc"))]
#[doc = include_str!("../docs/guides/grpc.md")]
struct GrpcGuide;

/// The code of the guide to the guard.
#[cfg(all(doctest, feature = "http", feature = "redis"))]
#[doc = include_str!("../docs/guides/redis-guard.md")]
struct GuardGuide;
