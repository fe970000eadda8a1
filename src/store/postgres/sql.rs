//! Runs the statements of [`crate::store::sql`] on PostgreSQL.

use chrono::{DateTime, Utc};
use futures_util::future::BoxFuture;
use sqlx::postgres::{PgArguments, PgRow};
use sqlx::{Postgres, query};
use uuid::Uuid;

use super::PostgresStore;
use super::connect::BEGIN;
use super::text::{restored, stored};
use crate::error::StoreError;
use crate::store::bounded::{Ask, Bounded};
use crate::store::sql::{Row, Rows, Session, SqlStore, Statement, Transaction, Value, boxed};
use crate::store::statements::Dialect;
use crate::text::hex::hex;
use crate::time::db_time::micros_of;

impl Row for PgRow {
    fn column_name(&self, at: usize) -> &str {
        sqlx::Column::name(sqlx::Row::column(self, at))
    }

    fn get_int(&self, at: usize) -> Result<Option<i64>, StoreError> {
        use sqlx::{Row as _, TypeInfo, ValueRef};
        let is_short = self.try_get_raw(at)?.type_info().name() == "INT4";
        Ok(if is_short { self.try_get::<Option<i32>, _>(at)?.map(i64::from) } else { self.try_get(at)? })
    }

    fn get_text(&self, at: usize) -> Result<Option<String>, StoreError> {
        Ok(sqlx::Row::try_get(self, at)?)
    }

    fn get_bytes(&self, at: usize) -> Result<Option<Vec<u8>>, StoreError> {
        Ok(sqlx::Row::try_get(self, at)?)
    }

    fn get_bool(&self, at: usize) -> Result<Option<bool>, StoreError> {
        Ok(sqlx::Row::try_get(self, at)?)
    }

    fn get_id(&self, at: usize) -> Result<Option<Uuid>, StoreError> {
        Ok(sqlx::Row::try_get(self, at)?)
    }

    fn get_time(&self, at: usize) -> Result<Option<DateTime<Utc>>, StoreError> {
        Ok(sqlx::Row::try_get(self, at)?)
    }

    fn get_foreign(&self, at: usize) -> Result<Option<String>, StoreError> {
        Ok(self.get_text(at)?.map(restored))
    }

    /// Reads two columns, names and values.
    fn get_headers(&self, at: usize) -> Result<Vec<(String, Vec<u8>)>, StoreError> {
        let (names, values): (Vec<String>, Vec<Vec<u8>>) =
            (sqlx::Row::try_get(self, at)?, sqlx::Row::try_get(self, at + 1)?);
        Ok(names.into_iter().map(restored).zip(values).collect())
    }
}

/// A text with this prefix is planned for each run. A cached plan that was made while the tables
/// were empty would scan them whole until they are analyzed. Texts of `store/sql` write the prefix
/// out: keep both equal.
const PLANNED_ANEW: &str = "/* planned anew */";

/// Binds the values of a statement for sqlx.
fn bound(statement: &Statement) -> Result<sqlx::query::Query<'static, Postgres, PgArguments>, StoreError> {
    let (text, values) = statement.in_words_of(Dialect::Postgres)?;
    let empty = query(text).persistent(!text.starts_with(PLANNED_ANEW));
    Ok(values.into_iter().fold(empty, |query, value| match value {
        Value::Bool(value) => query.bind(*value),
        Value::Int(value) => query.bind(*value),
        Value::Text(value) | Value::Name(value) => query.bind(value.clone()),
        Value::Id(value) | Value::RowId(value) => query.bind(*value),
        Value::Bytes(value) => query.bind(value.clone()),
        Value::Time(value) | Value::SentAt(value) => query.bind(*value),
        Value::Foreign(value) => query.bind(value.as_deref().map(stored)),
        Value::Headers(headers) => query.bind(json_of(headers)),
        Value::Span(value) => query.bind(value.map(micros_of)),
        Value::Ints(list) => query.bind(list.clone()),
        Value::Ids(list) => query.bind(list.clone()),
        Value::ManyBytes(list) => query.bind(list.clone()),
        Value::Foreigns(list) => query.bind(list.iter().map(|text| stored(text)).collect::<Vec<_>>()),
    }))
}

/// Pairs of name and value as JSON, the value in hexadecimal digits.
fn json_of(headers: &[(String, Vec<u8>)]) -> String {
    let pairs: Vec<[String; 2]> = headers.iter().map(|(name, value)| [stored(name), hex(value)]).collect();
    serde_json::json!(pairs).to_string()
}

impl Session for Bounded<Postgres> {
    fn rows(&mut self, statement: Statement) -> BoxFuture<'_, Result<Rows, StoreError>> {
        Box::pin(async move { Ok(boxed(bound(&statement)?.all(self).await?)) })
    }

    fn run(&mut self, statement: Statement) -> BoxFuture<'_, Result<u64, StoreError>> {
        Box::pin(async move { Ok(bound(&statement)?.run(self).await?.rows_affected()) })
    }
}

impl SqlStore for PostgresStore {
    fn dialect(&self) -> Dialect {
        Dialect::Postgres
    }

    fn ping(&self) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move { Ok(self.pool.sign_of_life().await?) })
    }

    fn reader(&self) -> BoxFuture<'_, Result<Box<dyn Session>, StoreError>> {
        Box::pin(async move { Ok(Box::new(self.pool.acquire().await?) as Box<dyn Session>) })
    }

    fn begin_sql(&self) -> BoxFuture<'_, Result<Box<dyn Transaction>, StoreError>> {
        Box::pin(async move { Ok(Box::new(self.pool.begin(BEGIN).await?) as Box<dyn Transaction>) })
    }

    fn run_alone(&self, statement: Statement) -> BoxFuture<'_, Result<u64, StoreError>> {
        Box::pin(async move { Ok(bound(&statement)?.run(&mut self.pool.acquire().await?).await?.rows_affected()) })
    }
}
