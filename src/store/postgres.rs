//! The store on PostgreSQL 14 or later: a cursor that tracks gaps over an insert-only outbox, and
//! an inbox whose rows prove which transaction inserted them.
//!
//! Guarantees:
//!
//! * No committed row is lost, none is sent before its writer's commit is durable, and a long
//!   transaction elsewhere stalls nothing (R1 to R9; the state machine is
//!   `crate::outbox::rules::gaps`).
//! * Messages are enqueued by functions of the database (the *SQL doors*). Rust calls the same
//!   functions as any other language, so no limit depends on the language.
//! * An effect commits together with its inbox row, and only in the transaction that inserted it
//!   (R23, R24).
//!
//! Not here: brokers, decisions (the `rules` of each subject), and transaction poolers. Sessions
//! set what the promises need, and a pooler that changes the server between statements would lose
//! these settings: [`Schema::check`](crate::store::schema::Schema::check) refuses one.

mod check;
mod connect;
#[cfg(feature = "duties")]
mod diverted;
mod door;
#[cfg(feature = "duties")]
mod inbox;
#[cfg(feature = "duties")]
mod mend;
#[cfg(feature = "operations")]
mod operations;
#[cfg(feature = "duties")]
mod operator;
#[cfg(feature = "duties")]
mod partitions;
#[cfg(feature = "operations")]
mod phases;
#[cfg(feature = "duties")]
mod read;
#[cfg(feature = "duties")]
mod relay;
mod schema;
#[cfg(feature = "duties")]
mod sql;
#[cfg(feature = "duties")]
mod statements;
#[cfg(feature = "duties")]
mod text;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use parking_lot::Mutex;
use sqlx::Postgres;
use sqlx::postgres::PgPool;

use super::bounded::BoundedPool;
use crate::error::StoreError;
use crate::store::base::{Base, StoreOptions};
#[cfg(feature = "duties")]
use crate::store::{Duties, Store};
#[cfg(feature = "operations")]
use crate::store::{KeyOperator, OperationStore};

/// The store on PostgreSQL: outbox, inbox and operations. Cheap to clone.
#[derive(Debug, Clone)]
pub struct PostgresStore {
    pool: BoundedPool<Postgres>,
    /// How long a handler may run. The server's timeouts are a little longer (R28).
    handler_timeout: Duration,
    /// The time of the next look at the inbox partitions.
    inbox_look_at: Arc<Mutex<Option<Instant>>>,
    /// True while ranges are made beside a large DEFAULT partition.
    attaches: Arc<AtomicBool>,
}

/// The SQLSTATE of a server error.
fn code(error: &sqlx::Error) -> Option<String> {
    error.as_database_error()?.code().map(|code| code.into_owned())
}

#[async_trait]
impl Base for PostgresStore {
    type Db = sqlx::Postgres;

    const NAME: &'static str = "postgres";

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

#[cfg(feature = "duties")]
impl Store for PostgresStore {
    fn into_duties(self) -> Arc<dyn Duties> {
        Arc::new(self)
    }
}

#[cfg(feature = "operations")]
impl OperationStore for PostgresStore {
    fn into_operator(self) -> Arc<dyn KeyOperator> {
        Arc::new(self)
    }
}
