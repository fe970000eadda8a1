//! The file of the log: opening it, creating it, and writing to it in turns.
//!
//! Guarantees: WAL, and `synchronous=FULL` for rows. Every write transaction is `BEGIN IMMEDIATE`
//! inside a turn (R14), and into the file that has the path: one that was deleted or replaced gets
//! no more rows. A file that is no topic log, or that a newer version wrote, stays unchanged.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection, SqliteSynchronous};
use sqlx::{ConnectOptions, Connection, Sqlite, Transaction};
use tokio::sync::watch;

use super::config::EmbeddedConfig;
use crate::error::{BrokerError, classify};
use crate::flock::{FileId, Held, Turn, is_read_only};

/// The value of `pragma application_id` that marks a topic log: "onbx" in ASCII.
const APPLICATION_ID: i32 = 0x6f6e_6278;
/// The value of `pragma user_version`: the version of the tables in the file.
const SCHEMA_VERSION: i32 = 1;
const SCHEMA: &str = include_str!("schema.sql");
/// The WAL is truncated to this size when it starts anew.
const WAL_BYTES_KEPT: u32 = 64 * 1024 * 1024;

/// An open log file, with the state that a process shares.
#[derive(Debug)]
pub(super) struct Log {
    pub(super) config: EmbeddedConfig,
    turn: Turn,
    /// Counts the appends of this process: its own subscribers need not wait for their next poll.
    pub(super) appended: watch::Sender<u64>,
}

#[derive(Debug)]
pub(super) struct LogConnection {
    pub(super) sqlite: SqliteConnection,
    file: FileId,
}

impl LogConnection {
    pub(super) async fn close(self) -> Result<(), sqlx::Error> {
        self.sqlite.close().await
    }
}

/// A write transaction in its turn. Dropping it rolls back.
#[derive(Debug)]
pub(super) struct WriteTx<'c> {
    pub(super) tx: Transaction<'c, Sqlite>,
    // The last field, so that the turn is released after the transaction is dropped.
    held: Held,
}

impl Log {
    pub(super) async fn open(config: EmbeddedConfig) -> Result<Self, BrokerError> {
        config.validate()?;
        let directory = match config.path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        if !directory.is_dir() {
            return Err(BrokerError::Refused(format!(
                "the directory `{}` of the broker file does not exist; make it, or set another path",
                directory.display()
            )));
        }
        let turn = Turn::open(lock_file(&config.path)).map_err(|error| match error.kind() {
            ErrorKind::ReadOnlyFilesystem | ErrorKind::StorageFull => BrokerError::Unavailable(error.to_string()),
            _ => BrokerError::Refused(error.to_string()),
        })?;
        let log = Self { config, turn, appended: watch::Sender::new(0) };
        let connection = log.connect_with(SqliteSynchronous::Full, true).await?;
        connection.close().await.map_err(|error| log.failed("close", &error))?;
        Ok(log)
    }

    /// Opens a connection, which has a thread of its own. Its commits are on disk when they return.
    pub(super) async fn connect(&self) -> Result<LogConnection, BrokerError> {
        self.connect_with(SqliteSynchronous::Full, false).await
    }

    /// Opens a connection for reading, offsets and heartbeats. Its commits survive a crash of the
    /// process; a power failure may lose those since the last sync. Messages whose acknowledgement
    /// was lost are delivered again, and the inbox knows them.
    pub(super) async fn connect_for_offsets(&self) -> Result<LogConnection, BrokerError> {
        self.connect_with(SqliteSynchronous::Normal, false).await
    }

    /// Creates a missing file only where told, at the start. If it is missing later, a person is
    /// replacing it: a file that we created meanwhile would be open when theirs is written over it.
    async fn connect_with(&self, synchronous: SqliteSynchronous, create: bool) -> Result<LogConnection, BrokerError> {
        let options = SqliteConnectOptions::new()
            .filename(&self.config.path)
            .create_if_missing(create)
            .busy_timeout(self.config.busy_timeout)
            .synchronous(synchronous)
            .pragma("journal_size_limit", WAL_BYTES_KEPT.to_string())
            .row_buffer_size(256)
            .thread_name(|number| format!("oncebox-broker-{number}"))
            .disable_statement_logging();
        // In a turn, because the change to WAL takes an exclusive lock without a busy timeout.
        let held = self.take().await?;
        let mut sqlite = options.connect().await.map_err(|error| self.failed("open", &error))?;
        let file = FileId::of(&self.config.path).map_err(|error| self.failed("open", &error.into()))?;
        self.ensure_schema(&mut sqlite).await?;
        let failed = |error: sqlx::Error| self.failed("open", &error);
        if is_read_only(&mut sqlite, self.config.busy_timeout).await.map_err(failed)? {
            sqlite.close().await.map_err(failed)?;
            return Err(BrokerError::Unavailable(format!(
                "the broker file `{}` can only be read: make its disk writable",
                self.config.path.display()
            )));
        }
        drop(held);
        Ok(LogConnection { sqlite, file })
    }

    async fn ensure_schema(&self, connection: &mut SqliteConnection) -> Result<(), BrokerError> {
        let path = self.config.path.display();
        let failed = |error: sqlx::Error| self.failed("read the version of", &error);
        let application: i32 =
            sqlx::query_scalar("pragma application_id").fetch_one(&mut *connection).await.map_err(failed)?;
        let version: i32 =
            sqlx::query_scalar("pragma user_version").fetch_one(&mut *connection).await.map_err(failed)?;
        let tables: i64 = sqlx::query_scalar("select count(*) from sqlite_schema")
            .fetch_one(&mut *connection)
            .await
            .map_err(failed)?;
        let is_new = match (application, version) {
            (APPLICATION_ID, SCHEMA_VERSION) => false,
            (0, 0) if tables == 0 => true,
            (APPLICATION_ID, newer) if newer > SCHEMA_VERSION => {
                return Err(BrokerError::Refused(format!(
                    "the broker file `{path}` is of version {newer}, this program knows up to {SCHEMA_VERSION}; \
                     update the program"
                )));
            }
            _ => {
                return Err(BrokerError::Refused(format!(
                    "`{path}` is a SQLite file of something else; give the broker a file of its own"
                )));
            }
        };
        // Not before the file is known to be ours: this changes its header for good.
        sqlx::raw_sql("pragma journal_mode = wal").execute(&mut *connection).await.map_err(failed)?;
        if is_new { self.create_schema(connection).await } else { Ok(()) }
    }

    async fn create_schema(&self, connection: &mut SqliteConnection) -> Result<(), BrokerError> {
        let failed = |error: sqlx::Error| self.failed("make", &error);
        let mut tx = connection.begin_with("BEGIN IMMEDIATE").await.map_err(failed)?;
        sqlx::raw_sql(SCHEMA).execute(&mut *tx).await.map_err(failed)?;
        let stamp = format!("pragma application_id = {APPLICATION_ID}; pragma user_version = {SCHEMA_VERSION}");
        sqlx::raw_sql(sqlx::AssertSqlSafe(stamp)).execute(&mut *tx).await.map_err(failed)?;
        tx.commit().await.map_err(failed)
    }

    /// Begins a write transaction in a turn.
    ///
    /// # Cancel safety
    /// Not cancel safe: call it in tasks that are not cancelled. A cancelled transaction is rolled
    /// back, but maybe after its turn was released.
    pub(super) async fn begin<'c>(&self, connection: &'c mut LogConnection) -> Result<WriteTx<'c>, BrokerError> {
        let held = self.take().await?;
        if !connection.file.is_still_at(&self.config.path) {
            return Err(BrokerError::Session(format!(
                "the broker file `{}` was deleted or replaced while it was open; the session starts anew with the file \
                 that is there, once there is one",
                self.config.path.display()
            )));
        }
        let tx =
            connection.sqlite.begin_with("BEGIN IMMEDIATE").await.map_err(|error| self.failed("write to", &error))?;
        Ok(WriteTx { tx, held })
    }

    pub(super) async fn commit(&self, write: WriteTx<'_>) -> Result<(), BrokerError> {
        let WriteTx { tx, held } = write;
        let committed = tx.commit().await;
        drop(held);
        committed.map_err(|error| self.failed("write to", &error))
    }

    async fn take(&self) -> Result<Held, BrokerError> {
        self.turn.take(self.config.busy_timeout).await.map_err(|error| BrokerError::Unavailable(error.to_string()))
    }

    pub(super) fn failed(&self, doing: &str, error: &sqlx::Error) -> BrokerError {
        let path = self.config.path.display();
        let words = crate::error::words(error);
        let code = error.as_database_error().and_then(|error| error.code()?.parse::<i32>().ok());
        match code.map(|code| code & 0xff) {
            // SQLITE_NOTADB, SQLITE_CORRUPT
            Some(26) => BrokerError::Refused(format!("`{path}` is no SQLite file; give the broker a file of its own")),
            Some(11) => BrokerError::Refused(format!(
                "the broker file `{path}` is damaged ({words}); restore it, or save what `.recover` of sqlite3 finds"
            )),
            _ if classify::is_transient(error) => {
                BrokerError::Unavailable(format!("could not {doing} the broker file `{path}`: {words}"))
            }
            _ => BrokerError::Session(format!("could not {doing} the broker file `{path}`: {words}")),
        }
    }
}

fn lock_file(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    PathBuf::from(name)
}
