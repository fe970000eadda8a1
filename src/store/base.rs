//! What every duty needs of a database: how it is connected to, and its pool of connections.

use std::fmt::Debug;

use async_trait::async_trait;

use crate::error::StoreError;
use crate::outbox::enqueue::Enqueue;
#[cfg(any(feature = "postgres", feature = "mysql"))]
use crate::time::bound;

/// A connection pool to one kind of database, which every duty needs.
#[async_trait]
pub trait Base: Clone + Debug + Send + Sync + 'static {
    /// The sqlx database of this store; handlers get its connection.
    type Db: sqlx::Database<Connection: Enqueue>;

    /// `postgres`, `mysql` or `sqlite`, as in URLs.
    const NAME: &'static str;

    /// Whether a transaction that writes keeps every other one waiting, as on SQLite. Consumers
    /// then run one handler at a time, and for a shorter time, unless their options say otherwise.
    const HAS_ONE_WRITER: bool = false;

    /// Connects once, so that errors show at once, and makes the pool. A file of SQLite that is not
    /// there is made, or missed, by the first statement. Never migrates.
    ///
    /// # Errors
    /// [`StoreError::Refused`] where the URL cannot be used, [`StoreError::Unavailable`] where the
    /// server is not there yet.
    ///
    /// # Cancel safety
    /// Nothing is left behind.
    async fn connect(options: &StoreOptions) -> Result<Self, StoreError>;

    /// The pool that all work of this process shares.
    fn pool(&self) -> &sqlx::Pool<Self::Db>;

    /// Closes the pool and waits until its connections are gone; for those to a server, at most for
    /// the answer timeout.
    async fn close(&self);
}

/// How a store connects; the URL decides which adapter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreOptions {
    /// `postgres://`, `mysql://` or `sqlite://FILE`. A password in it is never printed: see
    /// [`crate::error::redact`].
    pub url: String,
    /// How many connections the pool has at most.
    pub connections_max: u32,
    /// How long a handler may run; server-side timeouts are set just above it (R28).
    pub handler_timeout: std::time::Duration,
    /// How long a server may send nothing during a statement before its connection is given up.
    /// Absent: just above the server-side timeouts. SQLite has no server and ignores it.
    pub answer_timeout: Option<std::time::Duration>,
    /// Whether a missing SQLite file is created. Of our commands, `migrate up` and `demo` say so.
    pub create: bool,
    /// A PEM file of certificate authorities to verify the server with, for verified TLS only.
    pub ca_file: Option<std::path::PathBuf>,
}

impl StoreOptions {
    /// Defaults around a URL: 10 connections, 30 s handlers.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            connections_max: 10,
            handler_timeout: std::time::Duration::from_secs(30),
            answer_timeout: None,
            create: false,
            ca_file: None,
        }
    }

    /// Refuses a time that no instant reaches.
    #[cfg(any(feature = "postgres", feature = "mysql"))]
    pub(crate) fn check(&self) -> Result<(), StoreError> {
        bound::check([
            ("handler_timeout", self.handler_timeout),
            ("answer_timeout", self.answer_timeout.unwrap_or_default()),
        ])
        .map_err(|error| StoreError::Refused(error.to_string()))
    }
}
