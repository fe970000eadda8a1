//! Exactly-once *effects* over at-least-once brokers.
//!
//! A service writes its business rows and a message in one database transaction; the relay carries
//! committed messages to a broker, in order per key; the consumer runs handlers inside a
//! transaction that also holds their inbox row, so that an effect commits once whatever is
//! redelivered, raced, crashed or rebalanced. The same engine serves requests with an
//! `Idempotency-Key` and calls of outside providers.
//!
//! # A message goes with your transaction
//!
//! ```no_run
//! # #[cfg(feature = "sqlite")] {
//! use oncebox::{NewMessage, sqlx};
//!
//! async fn place(pool: &sqlx::SqlitePool, order: &str) -> Result<(), Box<dyn std::error::Error>> {
//!     let mut tx = pool.begin().await?;
//!     sqlx::query("insert into customer_order (order_id) values ($1)").bind(order).execute(&mut *tx).await?;
//!     let message = NewMessage::json("orders", "order.placed", &order)?.with_key(order);
//!     oncebox::enqueue(&mut *tx, message).await?;
//!     oncebox::commit(tx).await?; // as `tx.commit()`; a lost answer is told apart
//!     Ok(())
//! }
//! # }
//! ```
//!
//! # Its effect commits once
//!
//! ```no_run
//! # #[cfg(all(feature = "sqlite", feature = "programs"))] {
//! use oncebox::app::HandlersByConsumer;
//! use oncebox::store::sqlite::SqliteStore;
//! use oncebox::{HandlerError, HandlerTx, Handlers, Message, MessageHandler, async_trait, sqlx};
//!
//! struct Shipping;
//!
//! #[async_trait]
//! impl MessageHandler<SqliteStore> for Shipping {
//!     async fn handle(&self, message: &Message, tx: &mut HandlerTx<'_, SqliteStore>) -> Result<(), HandlerError> {
//!         let order: String = message.json()?;
//!         sqlx::query("insert into shipment (order_id) values ($1)").bind(order).execute(tx.connection()).await?;
//!         Ok(()) // commits, together with the inbox row
//!     }
//! }
//!
//! fn main() -> std::process::ExitCode {
//!     let handlers = Handlers::new().on("order.placed", Shipping);
//!     oncebox::app::consumer(HandlersByConsumer::new().consumer("shipping", ["orders"], handlers))
//! }
//! # }
//! ```
//!
//! # Where to go on
//!
//! | you want to | see |
//! |---|---|
//! | enqueue in a transaction | [`enqueue`], [`enqueue_all`], [`NewMessage`] |
//! | handle messages | [`MessageHandler`], [`BatchMessageHandler`], [`Handlers`] |
//! | run the relay or a consumer as your own `main` | `app::publisher`, `app::consumer` (feature `programs`) |
//! | serve requests with an `Idempotency-Key` | `http::idempotency` (feature `http`), `grpc` (feature `grpc`) |
//! | call a provider in phases that recover | `operation` (feature `operations`) |
//! | send requests again until their end is known | `client` (feature `client`) |
//! | write an adapter of your own | the traits of [`store`] (feature `duties`) and [`broker`], and their suites in the package `oncebox-testkit` |
//!
//! # Features
//!
//! A store (`postgres`, `mysql`, `sqlite`) and a broker (`kafka`, `kafka-tls`, `rabbitmq`,
//! `embedded`) each; `tls` to databases, unless a service gives its sqlx another one; `relay` and
//! `consumer`, inside a service; `operations`, and on top of them `http`, `openapi`, `grpc`,
//! `client`, `email`, `redis`, `compress`, `encrypt`; `metrics`, `otel` for what their names say;
//! `programs` for settings and a `main` of one's own. `relay`, `consumer` and `operations` bring
//! `duties`: what a store does for them. Only an adapter of one's own names it. A service that only
//! enqueues on PostgreSQL, checks its schema and migrates needs none of these four:
//! `oncebox = { version = "0.1", default-features = false, features = ["postgres", "tls"] }`.
//!
//! # Rooms
//!
//! They import only downwards; a test reads the sources, refuses anything else, and compares this
//! table with `ARCHITECTURE.md`. What begins with `crates/` is a package of its own.
//!
//! | rooms | for |
//! |---|---|
//! | `crates/cli`, `crates/testkit` | publisher, consumer, oncebox: the commands parse, wire and run; suites for adapters, a broker and keys in memory |
//! | `app` | processes: programs, settings, connections by URL, signals, listener |
//! | `http`, `grpc`, `client` | operations served and sent |
//! | `operation` | the engine, its three kinds of operations, and their names for users |
//! | `outbox`, `inbox`, `email` | the work of one subject each: relay; consumer, retries, handlers; e-mail sender |
//! | `store/postgres`, `store/mysql`, `store/sqlite`, `store/redis`, `broker/kafka`, `broker/rabbitmq`, `broker/embedded` → `store/sql` → `store/bounded`, `store/headers` | adapters, and what those of databases share; only `app` names an adapter |
//! | `store`, `broker` | the names of all ports of databases; the port of brokers: they never see each other |
//! | `operator` → `store/schema`, `store/statements` → `store/base` → `outbox/enqueue`, `operation/port` → `outbox/hint` → `outbox/port`, `email/port` → `inbox/port` | ports: what the work needs of a database |
//! | `outbox/rules`, `operation/rules` → `inbox/rules` | what each subject decides: pure, no I/O, no clock |
//! | `observe`, `flock`, `time`, `text`, `message` → `task`, `error` | metric names and health; turns at a SQLite file; instants, leases, retries; hex and hosts; what travels; tasks of the runtime; failures |

#![cfg_attr(docsrs, feature(doc_cfg))]
// What is dead is judged with all features on: a smaller set leaves out callers of what is shared.
#![cfg_attr(
    not(all(
        feature = "postgres",
        feature = "mysql",
        feature = "sqlite",
        feature = "kafka",
        feature = "rabbitmq",
        feature = "embedded",
        feature = "email",
        feature = "grpc",
        feature = "http",
        feature = "client",
        feature = "otel",
        feature = "programs",
    )),
    allow(dead_code)
)]
// Without any store the code that stores share, and that programs run on a store, is not used.
#![cfg_attr(
    all(feature = "duties", not(any(feature = "postgres", feature = "mysql", feature = "sqlite"))),
    allow(unused)
)]

#[cfg(feature = "programs")]
pub mod app;
pub mod broker;
#[cfg(feature = "client")]
pub mod client;
mod email;
pub mod error;
#[cfg(any(feature = "embedded", feature = "sqlite"))]
mod flock;
#[cfg(feature = "grpc")]
pub mod grpc;
#[cfg(any(feature = "programs", feature = "http"))]
pub mod http;
mod inbox;
pub mod message;
pub mod observe;
#[cfg(feature = "operations")]
pub mod operation;
#[cfg(feature = "duties")]
mod operator;
mod outbox;
pub mod store;
mod task;
mod text;
mod time;

#[cfg(all(test, feature = "operations"))]
#[path = "../tests/rules/properties/main.rs"]
mod properties;

/// Code that adapters share. It is for `oncebox-testkit` and for authors of adapters, not for
/// services, and may change with every version.
#[doc(hidden)]
pub mod adapter {
    #[cfg(feature = "programs")]
    pub use crate::app::gauges::keep_gauges;
    #[cfg(feature = "duties")]
    pub use crate::time::lease::Lease;
    pub use crate::{
        broker::envelope::{arrive, headers},
        broker::share::{Seat, Share, share},
        inbox::rules::horizon::{Age, Bounds, Verdict, judge},
        inbox::rules::position::{Break, BrokerOffsets, Position, start},
        text::hex::hex,
        time::db_time::DbTime,
    };
    #[cfg(feature = "operations")]
    pub use crate::{
        operation::port::stored::Columns,
        operation::rules::doubt::Look,
        operation::rules::versions::{Announced, Versions, unreadable},
    };
}

pub use self::{
    error::{BrokerError, HandlerError, LimitError, RunEnd, RunError, StoreError},
    inbox::rules::horizon::TopicRetention,
    message::{Message, NewMessage},
    outbox::enqueue::{commit, enqueue, enqueue_all},
    time::breaker::BreakerOptions,
    time::pace,
    time::retry::RetryPolicy,
};
#[cfg(feature = "duties")]
pub use self::{outbox::hint::announce, outbox::rules::policy::DeadPolicy, store::Store};
pub use async_trait::async_trait;
#[cfg(feature = "email")]
pub use email::sender;
#[cfg(feature = "consumer")]
pub use inbox::{
    consumer::{Consumer, ConsumerOptions, Handlers, Unhandled},
    handler::{BatchMessageHandler, HandlerTx, MessageHandler},
    sql_handler::{SqlHandler, SqlSpec},
};
#[cfg(feature = "relay")]
pub use outbox::relay::{Relay, RelayOptions};
pub use sqlx;

/// The code of the README, compiled with the documentation tests.
#[cfg(all(doctest, feature = "postgres", feature = "programs", feature = "http", feature = "client"))]
#[doc = include_str!("../README.md")]
struct Readme;

/// The code of the client's guide.
#[cfg(all(doctest, feature = "client", feature = "grpc"))]
#[doc = include_str!("../docs/reference/client.md")]
struct ClientGuide;

/// The code of the guides. The code of the axum service is an example of its own, which a test
/// runs.
#[cfg(all(doctest, feature = "programs", feature = "postgres", feature = "http", feature = "client"))]
#[doc = include_str!("../docs/guides/recovery-worker.md")]
#[doc = include_str!("../docs/guides/regions.md")]
#[doc = include_str!("../docs/guides/webhooks.md")]
#[doc = include_str!("../docs/reference/settings.md")]
struct Guides;

/// The code of the guides for writers of messages and of handlers. The test of the second one
/// runs in `tests/contract/guide.rs`.
#[cfg(all(doctest, feature = "programs", feature = "postgres", feature = "sqlite", feature = "embedded"))]
#[doc = include_str!("../docs/guides/write-messages.md")]
#[doc = include_str!("../docs/guides/write-a-consumer.md")]
struct WritersGuides;

/// The code of the guide to gRPC.
#[cfg(all(doctest, feature = "postgres", feature = "grpc"))]
#[doc = include_str!("../docs/guides/grpc.md")]
struct GrpcGuide;

/// The code of the guide to the guard.
#[cfg(all(doctest, feature = "http", feature = "redis"))]
#[doc = include_str!("../docs/guides/redis-guard.md")]
struct GuardGuide;
