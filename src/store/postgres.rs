//! PostgreSQL 14 or later: a gap-tracking cursor over an insert-only outbox, and an inbox that is
//! its own proof.
//!
//! Guarantees:
//!
//! * No committed row is lost, none is sent before its writer's commit is durable, and a long
//!   transaction elsewhere stalls nothing (R1 to R9; the state machine is [`crate::policy::gaps`]).
//! * The doors are functions of the database; the Rust door calls the same ones, so no limit
//!   depends on the language.
//! * An effect commits together with its inbox row, and only in the transaction that inserted it
//!   (R23, R24).
//!
//! Not here: brokers, decisions (room `policy`), and anything that a transaction pooler could take
//! away: sessions set what they rest on, and [`Schema::check`](super::Schema::check) refuses a
//! pooler that hands out another server between statements.

mod check;
mod connect;
mod diverted;
mod door;
mod inbox;
mod mailbox;
mod mend;
mod operations;
mod operator;
mod partitions;
mod phases;
mod read;
mod relay;
mod schema;
mod sql;
mod statements;
mod text;

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sqlx::Postgres;
use sqlx::postgres::PgPool;

pub use statements::PostgresStatement;

use super::bounded::BoundedPool;
use super::{Base, StoreOptions};
use crate::error::StoreError;

/// The store on PostgreSQL.
#[derive(Debug, Clone)]
pub struct PostgresStore {
    pool: BoundedPool<Postgres>,
    /// How long a handler may run: server-side timeouts stand just above it (R28).
    handler_timeout: Duration,
    /// When the inbox partitions are to be looked at again.
    inbox_look_at: Arc<Mutex<Option<Instant>>>,
    /// Ranges are being made beside a large DEFAULT partition.
    attaches: Arc<AtomicBool>,
}

impl Base for PostgresStore {
    type Db = sqlx::Postgres;

    const NAME: &'static str = "postgres";

    /// Connects once, to find out what is wrong at once, and makes the pool.
    ///
    /// # Errors
    /// [`StoreError::Refused`] where the URL cannot be used, [`StoreError::Unavailable`] where the
    /// server is not there yet.
    ///
    /// # Cancel safety
    /// Nothing is left behind.
    async fn connect(options: &StoreOptions) -> Result<Self, StoreError> {
        connect::connect(options).await
    }

    fn pool(&self) -> &PgPool {
        self.pool.plain()
    }

    async fn close(&self) {
        self.pool.close().await;
    }
}
