//! How the demo reads and writes its tables, on each store.

use sqlx::AssertSqlSafe;

use crate::ground::Ground;
use oncebox::StoreError;
use oncebox::store::Base;

/// A row of payments or ledger: payment, message id (of the ledger the payment again), account,
/// number, amount.
pub(super) type MoneyRow = (String, String, String, i64, i64);

/// What a store must do for the tables of the demo.
pub(super) trait Tables: Ground {
    /// The SQL of a key column that numbers its rows.
    const ENTRY_ID: &'static str;
    /// The table of the e-mail rows.
    const EMAIL_TABLE: &'static str;
    /// The SQL of the unique key of an e-mail row, as text.
    const EMAIL_KEY: &'static str;

    fn rows(&self, sql: &str) -> impl Future<Output = Result<Vec<MoneyRow>, StoreError>> + Send;
    fn texts(&self, sql: &str) -> impl Future<Output = Result<Vec<String>, StoreError>> + Send;
    fn number(&self, sql: &str) -> impl Future<Output = Result<i64, StoreError>> + Send;
    fn run(&self, sql: &str) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// The unique keys of e-mail rows with this beginning.
    fn email_keys(&self, prefix: &str) -> impl Future<Output = Result<Vec<String>, StoreError>> + Send {
        let sql = format!(
            "select {key} from {} where substr({key}, 1, {}) = '{prefix}'",
            Self::EMAIL_TABLE,
            prefix.len(),
            key = Self::EMAIL_KEY
        );
        async move { self.texts(&sql).await }
    }
}

macro_rules! tables {
    ($store:path, $entry_id:literal, $emails:literal, $email_key:literal) => {
        impl Tables for $store {
            const ENTRY_ID: &'static str = $entry_id;
            const EMAIL_TABLE: &'static str = $emails;
            const EMAIL_KEY: &'static str = $email_key;

            async fn rows(&self, sql: &str) -> Result<Vec<MoneyRow>, StoreError> {
                Ok(sqlx::query_as(AssertSqlSafe(sql.to_owned())).fetch_all(Base::pool(self)).await?)
            }

            async fn texts(&self, sql: &str) -> Result<Vec<String>, StoreError> {
                Ok(sqlx::query_scalar(AssertSqlSafe(sql.to_owned())).fetch_all(Base::pool(self)).await?)
            }

            async fn number(&self, sql: &str) -> Result<i64, StoreError> {
                Ok(sqlx::query_scalar(AssertSqlSafe(sql.to_owned())).fetch_one(Base::pool(self)).await?)
            }

            async fn run(&self, sql: &str) -> Result<(), StoreError> {
                sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(Base::pool(self)).await?;
                Ok(())
            }
        }
    };
}

#[cfg(feature = "sqlite")]
tables!(
    oncebox::store::sqlite::SqliteStore,
    "entry_id integer primary key autoincrement",
    "oncebox_email",
    "unique_key"
);
#[cfg(feature = "postgres")]
tables!(
    oncebox::store::postgres::PostgresStore,
    "entry_id bigint generated always as identity primary key",
    "oncebox.email",
    "unique_key"
);
#[cfg(feature = "mysql")]
tables!(
    oncebox::store::mysql::MySqlStore,
    "entry_id bigint auto_increment primary key",
    "oncebox_email",
    "convert(unique_key using utf8mb4)"
);
