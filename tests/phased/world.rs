//! A database with the tables of a small service, and what tests ask it.

use std::path::Path;
use std::time::Duration;

use oncebox::async_trait;
use oncebox::sqlx::{self, AssertSqlSafe, Database, Transaction, raw_sql};
use oncebox::store::OperationStore;
use oncebox::store::mysql::MySqlStore;
use oncebox::store::postgres::PostgresStore;
use oncebox::store::sqlite::SqliteStore;
use oncebox::store::{Base, Schema, StoreOptions};

pub(crate) type Connection<S> = <<S as Base>::Db as Database>::Connection;

/// Long enough for a busy machine; a condition that holds ends the wait at once.
pub(crate) const SOON: Duration = Duration::from_secs(60);

const TABLES: &str =
    "create table payment (id varchar(36) primary key, reference varchar(64), amount bigint, state varchar(16));
    create table step (name varchar(64)); create table place (name varchar(10) primary key, n int not null)";

/// What tests need of a database beyond the traits.
#[async_trait]
pub(crate) trait Rows: OperationStore {
    const PREFIX: &'static str;

    async fn run(connection: &mut Connection<Self>, sql: String) -> Result<(), sqlx::Error>;
    async fn write(&self, sql: &str);
    async fn number(&self, sql: &str) -> i64;
    async fn texts(&self, sql: &str) -> Vec<String>;
    /// A transaction of the application's.
    async fn transaction(&self) -> Transaction<'static, Self::Db>;

    /// The first day of this year, as columns of oncebox have it.
    fn year(year: u32) -> String {
        match Self::NAME {
            "sqlite" => format!("strftime('%s', '{year}-01-01') * 1000"),
            _ => format!("timestamp '{year}-01-01 00:00:00'"),
        }
    }

    /// The ids of all operations.
    async fn operation_ids(&self) -> Vec<uuid::Uuid> {
        let column = if Self::NAME == "postgres" { "operation_id::text" } else { "hex(operation_id)" };
        let ids = self.texts(&format!("select {column} from {}", Self::table("operation"))).await;
        ids.iter().map(|id| id.parse().unwrap()).collect()
    }

    /// A table of oncebox.
    fn table(name: &str) -> String {
        format!("{}{name}", Self::PREFIX)
    }
}

macro_rules! rows {
    ($store:ty, $prefix:literal) => {
        #[async_trait]
        impl Rows for $store {
            const PREFIX: &'static str = $prefix;

            async fn run(connection: &mut Connection<Self>, sql: String) -> Result<(), sqlx::Error> {
                raw_sql(AssertSqlSafe(sql)).execute(connection).await.map(|_| ())
            }

            async fn write(&self, sql: &str) {
                raw_sql(AssertSqlSafe(sql.to_owned())).execute(self.pool()).await.unwrap();
            }

            async fn number(&self, sql: &str) -> i64 {
                sqlx::query_scalar(AssertSqlSafe(sql.to_owned())).fetch_one(self.pool()).await.unwrap()
            }

            async fn texts(&self, sql: &str) -> Vec<String> {
                sqlx::query_scalar(AssertSqlSafe(sql.to_owned())).fetch_all(self.pool()).await.unwrap()
            }

            async fn transaction(&self) -> Transaction<'static, Self::Db> {
                self.pool().begin().await.unwrap()
            }
        }
    };
}

rows!(SqliteStore, "oncebox_");
rows!(PostgresStore, "oncebox.");
rows!(MySqlStore, "oncebox_");

pub(crate) async fn sqlite(directory: &Path) -> SqliteStore {
    let url = format!("sqlite://{}", directory.join("phased.db").display());
    let store = SqliteStore::connect(&StoreOptions { create: true, ..StoreOptions::new(url) }).await.unwrap();
    store.migrate().await.unwrap();
    prepared(store).await
}

pub(crate) async fn prepared<S: Rows>(store: S) -> S {
    store.write(TABLES).await;
    store
}
