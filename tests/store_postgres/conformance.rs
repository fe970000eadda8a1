//! The suite of all stores.

use oncebox::sqlx::postgres::PgConnection;
use oncebox::sqlx::{self, AssertSqlSafe, Connection, Executor, Postgres, Row, Transaction};
use oncebox::store::postgres::PostgresStore;
use oncebox::store::{Base, StoreOptions};
use oncebox_testkit::store::Fixture;

use crate::postgres::{empty_database, migrated_database, with_path};
use crate::support::service;

struct OnPostgres {
    server: String,
    name: String,
}

fn server() -> Option<String> {
    service("the suite of stores on PostgreSQL", "ONCEBOX_TEST_POSTGRES")
}

impl Fixture for OnPostgres {
    type Store = PostgresStore;

    const PREFIX: &'static str = "oncebox.";
    const CONCURRENT_WRITERS: bool = true;
    // It waits until the connection is gone.
    const KILL: Option<(&'static str, &'static str)> =
        Some(("select pg_backend_pid()", "select pg_terminate_backend({}, 10000)"));
    const UNDOES_WHAT_FOLLOWS: bool = false;
    const COMMIT: &'static str = "close all; commit";

    async fn empty() -> Option<Self> {
        let server = server()?;
        Some(Self { name: empty_database(&server).await, server })
    }

    async fn migrated() -> Option<Self> {
        let server = server()?;
        Some(Self { name: migrated_database(&server).await, server })
    }

    async fn connect(&self) -> PostgresStore {
        PostgresStore::connect(&StoreOptions::new(with_path(&self.server, &self.name))).await.unwrap()
    }

    async fn begin(store: &PostgresStore) -> Transaction<'static, Postgres> {
        store.pool().begin().await.unwrap()
    }

    async fn run(connection: &mut PgConnection, sql: &str) -> Result<u64, sqlx::Error> {
        sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(connection).await.map(|done| done.rows_affected())
    }

    async fn number(connection: &mut PgConnection, sql: &str) -> Result<i64, sqlx::Error> {
        let sql = format!("select ({sql})::bigint");
        connection.fetch_one(AssertSqlSafe(sql)).await?.try_get(0)
    }

    async fn set_lease_end(store: &PostgresStore, seconds: i64) {
        sqlx::query(
            "update oncebox.shard set lease_until = clock_timestamp() + $1 * interval '1 second' where shard_id = 0 and owner is not null",
        )
        .bind(seconds)
        .execute(store.pool())
        .await
        .unwrap();
    }

    async fn remove(self) {
        if let Ok(mut admin) = PgConnection::connect(&self.server).await {
            let _ = admin.execute(AssertSqlSafe(format!("drop database if exists {} with (force)", self.name))).await;
        }
    }
}

oncebox_testkit::store_conformance!(OnPostgres);
