//! The suite that every store passes, on MariaDB.

use oncebox::store::mysql::MySqlStore;
use oncebox::store::{Base, StoreOptions};
use oncebox_testkit::store::Fixture;
use sqlx::{AssertSqlSafe, MySql, MySqlConnection, Transaction};

use crate::fixture::Db;

pub(crate) struct MariaDb {
    db: Db,
}

impl Fixture for MariaDb {
    type Store = MySqlStore;

    const PREFIX: &'static str = "oncebox_";
    const CONCURRENT_WRITERS: bool = true;
    const KILL: Option<(&'static str, &'static str)> =
        Some(("select cast(connection_id() as signed)", "kill connection {}"));

    async fn empty() -> Option<Self> {
        Some(Self { db: Db::empty("the store suite").await? })
    }

    async fn connect(&self) -> MySqlStore {
        MySqlStore::connect(&StoreOptions::new(self.db.url.as_str())).await.unwrap()
    }

    // As an application begins it that knows nothing of isolation levels.
    async fn begin(store: &MySqlStore) -> Transaction<'static, MySql> {
        let begin = "set transaction isolation level repeatable read; start transaction";
        store.pool().begin_with(begin).await.unwrap()
    }

    async fn run(connection: &mut MySqlConnection, sql: &str) -> Result<u64, sqlx::Error> {
        Ok(sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(connection).await?.rows_affected())
    }

    async fn number(connection: &mut MySqlConnection, sql: &str) -> Result<i64, sqlx::Error> {
        sqlx::query_scalar(AssertSqlSafe(sql.to_owned())).fetch_one(connection).await
    }

    async fn set_lease_end(store: &MySqlStore, seconds: i64) {
        sqlx::query(
            "update oncebox_shard set lease_until = utc_timestamp(6) + interval ? second where lease_until is not null",
        )
        .bind(seconds)
        .execute(store.pool())
        .await
        .unwrap();
    }

    async fn remove(self) {
        self.db.store.close().await;
    }
}

oncebox_testkit::store_conformance!(MariaDb);
