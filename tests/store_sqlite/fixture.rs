//! A SQLite file in a directory of its own.

use oncebox::sqlx::sqlite::SqliteConnection;
use oncebox::sqlx::{AssertSqlSafe, Sqlite, Transaction, query_scalar, raw_sql};
use oncebox::store::sqlite::SqliteStore;
use oncebox::store::{Base, StoreOptions};
use oncebox_testkit::store::Fixture;
use tempfile::TempDir;

/// Gone with its directory.
#[derive(Debug)]
pub(crate) struct SqliteFile {
    directory: TempDir,
}

impl SqliteFile {
    /// Where the database is.
    pub(crate) fn path(&self) -> std::path::PathBuf {
        self.directory.path().join("test.db")
    }

    /// Its URL.
    pub(crate) fn url(&self) -> String {
        format!("sqlite://{}", self.path().display())
    }
}

impl Fixture for SqliteFile {
    type Store = SqliteStore;

    const PREFIX: &'static str = "oncebox_";
    const CONCURRENT_WRITERS: bool = false;
    const KILL: Option<(&'static str, &'static str)> = None;

    async fn empty() -> Option<Self> {
        Some(Self { directory: tempfile::tempdir().unwrap() })
    }

    async fn connect(&self) -> SqliteStore {
        SqliteStore::connect(&StoreOptions { create: true, ..StoreOptions::new(self.url()) }).await.unwrap()
    }

    async fn begin(store: &SqliteStore) -> Transaction<'static, Sqlite> {
        store.pool().begin_with("BEGIN IMMEDIATE").await.unwrap()
    }

    async fn run(connection: &mut SqliteConnection, sql: &str) -> Result<u64, sqlx::Error> {
        Ok(raw_sql(AssertSqlSafe(sql.to_owned())).execute(connection).await?.rows_affected())
    }

    async fn number(connection: &mut SqliteConnection, sql: &str) -> Result<i64, sqlx::Error> {
        query_scalar(AssertSqlSafe(sql.to_owned())).fetch_one(connection).await
    }

    async fn set_lease_end(store: &SqliteStore, seconds: i64) {
        let set = sqlx::query("update oncebox_shard set lease_until = cast(unixepoch('subsec') * 1000 as integer) + ?");
        set.bind(seconds * 1_000).execute(store.pool()).await.unwrap();
    }

    async fn remove(self) {
        self.directory.close().unwrap();
    }
}
