//! Connecting to a SQLite file with the settings that the promises need.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use sqlx::pool::PoolOptions;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqliteSynchronous};
use sqlx::{Connection, Pool, Sqlite, query_scalar, raw_sql};

use super::SqliteStore;
use crate::error::StoreError;
use crate::flock::{FileId, Held, Turn, is_read_only};
use crate::store::base::{Base, StoreOptions};
#[cfg(feature = "duties")]
use crate::store::{Duties, Store};
#[cfg(feature = "operations")]
use crate::store::{KeyOperator, OperationStore};

/// How long a statement waits for the write lock, and a transaction for its turn.
pub(super) const BUSY_TIMEOUT: Duration = Duration::from_secs(30);

/// What a handler may leave on a connection: temporary tables and triggers (which hide ours),
/// attached files, settings.
const STATE: &str = "\
select (select count(*) from sqlite_temp_schema) || ' ' || \
  (select count(*) from pragma_database_list where name not in ('main', 'temp')) || ' ' || \
  (select * from pragma_foreign_keys) || ' ' || (select * from pragma_defer_foreign_keys) || ' ' || \
  (select * from pragma_ignore_check_constraints) || ' ' || (select * from pragma_query_only) || ' ' || \
  (select * from pragma_recursive_triggers) || ' ' || (select * from pragma_reverse_unordered_selects) || ' ' || \
  (select * from pragma_read_uncommitted) || ' ' || (select * from pragma_synchronous) || ' ' || (select * from pragma_busy_timeout) || ' ' || \
  (select * from pragma_trusted_schema) || ' ' || (select * from pragma_writable_schema) || ' ' || (select * from pragma_temp_store) || ' ' || \
  (select * from pragma_locking_mode) || ' ' || (select * from pragma_max_page_count)";

/// What all clones of a store share.
#[derive(Debug)]
pub(super) struct Database {
    pool: Pool<Sqlite>,
    path: PathBuf,
    create: bool,
    /// Opened at the first write, so that a look at a missing database creates no lock file.
    turn: OnceLock<Turn>,
    /// The file that the first connection opened.
    opened: Arc<OnceLock<FileId>>,
}

impl SqliteStore {
    /// The path of the database file, as the URL named it.
    #[must_use]
    pub(crate) fn path(&self) -> &Path {
        &self.shared.path
    }

    /// Waits for this store's turn to write, by the lock files `<database>.oncebox-lock` and
    /// `<database>.oncebox-lock-next` (R14).
    pub(super) async fn take_turn(&self, patience: Duration) -> std::io::Result<Held> {
        let turn = match self.shared.turn.get() {
            Some(turn) => turn,
            None => {
                // The lock files are beside the real file, also where the path is a symbolic link.
                let database = self.shared.path.canonicalize().unwrap_or_else(|_| self.shared.path.clone());
                let mut path = database.into_os_string();
                path.push(".oncebox-lock");
                let opened = Turn::open(PathBuf::from(path))?;
                self.shared.turn.get_or_init(|| opened)
            }
        };
        turn.take(patience).await
    }

    /// Whether the file exists, or may be created.
    pub(super) fn can_open(&self) -> bool {
        self.shared.create || self.shared.path.exists()
    }

    /// Fails where the file is not there and may not be created.
    pub(super) fn check_there(&self) -> Result<(), StoreError> {
        if self.can_open() {
            return Ok(());
        }
        let path = std::path::absolute(self.path()).unwrap_or_else(|_| self.path().to_owned());
        Err(StoreError::SchemaMissing(format!("the file {} is not there", path.display())))
    }

    /// Fails where the path names another file than when this process opened it. SQLite does not
    /// notice: what is written to the old file is lost, and what is enqueued in the new one not
    /// seen. Only a restart helps, because what is in memory belongs to the old file.
    pub(super) fn check_file(&self) -> Result<(), sqlx::Error> {
        if self.shared.opened.get().is_none_or(|opened| opened.is_still_at(&self.shared.path)) {
            return Ok(());
        }
        Err(sqlx::Error::Io(std::io::Error::other(format!(
            "the database file {} was deleted or replaced while this process had it open: restart the process",
            self.shared.path.display()
        ))))
    }
}

#[async_trait]
impl Base for SqliteStore {
    type Db = Sqlite;

    const NAME: &'static str = "sqlite";
    const HAS_ONE_WRITER: bool = true;

    /// Opens nothing yet: the file is opened with the first statement. A missing file is not
    /// created (unless `options.create` is set), and is reported as
    /// [`crate::store::schema::SchemaState::Missing`].
    async fn connect(options: &StoreOptions) -> Result<Self, StoreError> {
        let url = &options.url;
        let parsed = SqliteConnectOptions::from_str(url)
            .map_err(|error| StoreError::Refused(format!("`{url}` is no URL of a SQLite file: {error}")))?;
        if url.contains(":memory:") || url.contains("mode=memory") {
            return Err(StoreError::Refused(format!(
                "`{url}`: every connection to a database in memory has a database of its own; name a file"
            )));
        }
        if url.contains("cache=shared") {
            return Err(StoreError::Refused(format!("`{url}`: a shared cache does not wait for locks; leave it out")));
        }
        if url.contains("mode=ro") || url.contains("immutable=") {
            return Err(StoreError::Refused(format!("`{url}`: oncebox has to write to the database")));
        }
        let path = parsed.get_filename().to_owned();
        if path.as_os_str().is_empty() || path.is_dir() {
            return Err(StoreError::Refused(format!("`{url}` names no file: write `sqlite://FILE`")));
        }
        let directory = path.parent().filter(|directory| !directory.as_os_str().is_empty());
        if let Some(missing) = directory.filter(|directory| !directory.is_dir()) {
            return Err(StoreError::Refused(format!("`{url}`: there is no directory {}", missing.display())));
        }
        let connect_options = parsed
            .create_if_missing(options.create)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .busy_timeout(BUSY_TIMEOUT)
            // How many rows the thread of a connection reads ahead of its reader; 50 by default.
            .row_buffer_size(256);
        let (fresh, opened) = (Arc::new(OnceLock::new()), Arc::new(OnceLock::new()));
        let (at_first, file, at) = (Arc::clone(&fresh), Arc::clone(&opened), path.clone());
        let pool = PoolOptions::new()
            .max_connections(options.connections_max)
            .test_before_acquire(false)
            // With one of these, sqlx starts a task that can spin (see `bounded::rest`). A file
            // ends no connection.
            .idle_timeout(None)
            .max_lifetime(None)
            .after_connect(move |connection: &mut sqlx::SqliteConnection, _| {
                let fresh = Arc::clone(&at_first);
                if let Ok(now) = FileId::of(&at) {
                    file.get_or_init(|| now);
                }
                Box::pin(async move {
                    let state: String = query_scalar(STATE).fetch_one(&mut *connection).await?;
                    fresh.get_or_init(|| state);
                    // `query_only` changes the state, so `after_release` closes the connection.
                    if is_read_only(connection, BUSY_TIMEOUT).await? {
                        raw_sql("pragma query_only = on").execute(connection).await?;
                    }
                    Ok(())
                })
            })
            .after_release(move |connection: &mut sqlx::SqliteConnection, _| {
                let fresh = Arc::clone(&fresh);
                Box::pin(async move {
                    // Waits until a rollback in the queue of the connection's thread has run.
                    connection.ping().await?;
                    // If a handler ended the transaction by SQL, sqlx still counts it as open: such
                    // a connection is not used again.
                    if connection.is_in_transaction() {
                        return Ok(false);
                    }
                    // Nor is a connection whose state a handler changed: the next user would
                    // inherit it.
                    let state: String = query_scalar(STATE).fetch_one(connection).await?;
                    Ok(fresh.get() == Some(&state))
                })
            })
            .connect_lazy_with(connect_options);
        if path.exists() {
            pool.acquire().await?;
        }
        let turn = OnceLock::new();
        Ok(Self { shared: Arc::new(Database { pool, path, create: options.create, turn, opened }) })
    }

    fn pool(&self) -> &Pool<Sqlite> {
        &self.shared.pool
    }

    async fn close(&self) {
        self.shared.pool.close().await;
    }
}

#[cfg(feature = "duties")]
impl Store for SqliteStore {
    fn into_duties(self) -> Arc<dyn Duties> {
        Arc::new(self)
    }
}

#[cfg(feature = "operations")]
impl OperationStore for SqliteStore {
    fn into_operator(self) -> Arc<dyn KeyOperator> {
        Arc::new(self)
    }
}
