//! Runs the statements of [`crate::store::sql`] on MySQL and MariaDB.

use chrono::{DateTime, NaiveDateTime, Utc};
use futures_util::future::BoxFuture;
use sqlx::mysql::{MySqlArguments, MySqlRow};
use sqlx::{MySql, query};

use super::message::{arrived_from_json, arrived_to_json};
use super::{MySqlStore, START};
use crate::error::StoreError;
use crate::store::bounded::{Ask, Bounded};
use crate::store::sql::{Row, Rows, Session, SqlStore, Statement, Transaction, Value, boxed};
use crate::store::statements::Dialect;
use crate::time::db_time::micros_of;

impl Row for MySqlRow {
    fn column_name(&self, at: usize) -> &str {
        sqlx::Column::name(sqlx::Row::column(self, at))
    }

    fn get_int(&self, at: usize) -> Result<Option<i64>, StoreError> {
        use sqlx::{Row as _, TypeInfo, ValueRef};
        if !self.try_get_raw(at)?.type_info().name().ends_with("UNSIGNED") {
            return Ok(self.try_get(at)?);
        }
        let number: Option<u64> = self.try_get(at)?;
        let wrong = |number: u64| self.wrong(at, &format!("{number} is out of range"));
        number.map(|number| i64::try_from(number).map_err(|_| wrong(number))).transpose()
    }

    /// Reads columns of bytes too, because names and keys are stored as bytes.
    fn get_text(&self, at: usize) -> Result<Option<String>, StoreError> {
        let bytes: Option<Vec<u8>> = sqlx::Row::try_get_unchecked(self, at)?;
        bytes.map(|bytes| super::text(self.column_name(at), bytes)).transpose()
    }

    fn get_bytes(&self, at: usize) -> Result<Option<Vec<u8>>, StoreError> {
        Ok(sqlx::Row::try_get(self, at)?)
    }

    fn get_time(&self, at: usize) -> Result<Option<DateTime<Utc>>, StoreError> {
        let time: Option<NaiveDateTime> = sqlx::Row::try_get(self, at)?;
        Ok(time.map(|time| time.and_utc()))
    }

    fn get_headers(&self, at: usize) -> Result<Vec<(String, Vec<u8>)>, StoreError> {
        arrived_from_json(sqlx::Row::try_get(self, at)?)
    }
}

/// Binds the values of a statement for sqlx.
fn bound(statement: &Statement) -> Result<sqlx::query::Query<'static, MySql, MySqlArguments>, StoreError> {
    let (text, values) = statement.in_words_of(Dialect::MySql)?;
    Ok(values.into_iter().fold(query(text), |query, value| match value {
        Value::Bool(value) => query.bind(*value),
        Value::Int(value) => query.bind(*value),
        Value::Text(value) => query.bind(value.clone()),
        Value::Id(value) | Value::RowId(value) => query.bind(*value),
        Value::Bytes(value) => query.bind(value.clone()),
        Value::Time(value) | Value::SentAt(value) => query.bind(value.map(|time| time.naive_utc())),
        Value::Foreign(value) | Value::Name(value) => query.bind(value.clone().map(String::into_bytes)),
        Value::Headers(headers) => query.bind(arrived_to_json(headers)),
        Value::Foreigns(list) => {
            let list = list.iter().cloned().map(String::into_bytes).collect();
            query.bind(Value::ManyBytes(list).as_json_list())
        }
        Value::Span(value) => query.bind(value.map(micros_of)),
        list @ (Value::Ints(_) | Value::Ids(_) | Value::ManyBytes(_)) => query.bind(list.as_json_list()),
    }))
}

impl Session for Bounded<MySql> {
    fn rows(&mut self, statement: Statement) -> BoxFuture<'_, Result<Rows, StoreError>> {
        Box::pin(async move { Ok(boxed(bound(&statement)?.all(self).await?)) })
    }

    fn run(&mut self, statement: Statement) -> BoxFuture<'_, Result<u64, StoreError>> {
        Box::pin(async move { Ok(bound(&statement)?.run(self).await?.rows_affected()) })
    }
}

/// Runs statements on the connection of a handler. The caller bounds their time.
#[cfg(feature = "operations")]
impl Session for sqlx::MySqlConnection {
    fn rows(&mut self, statement: Statement) -> BoxFuture<'_, Result<Rows, StoreError>> {
        Box::pin(async move { Ok(boxed(bound(&statement)?.fetch_all(self).await?)) })
    }

    fn run(&mut self, statement: Statement) -> BoxFuture<'_, Result<u64, StoreError>> {
        Box::pin(async move { Ok(bound(&statement)?.execute(self).await?.rows_affected()) })
    }
}

impl SqlStore for MySqlStore {
    fn dialect(&self) -> Dialect {
        Dialect::MySql
    }

    fn ping(&self) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move { Ok(self.pool.sign_of_life().await?) })
    }

    fn reader(&self) -> BoxFuture<'_, Result<Box<dyn Session>, StoreError>> {
        Box::pin(async move { Ok(Box::new(self.pool.acquire().await?) as Box<dyn Session>) })
    }

    fn begin_sql(&self) -> BoxFuture<'_, Result<Box<dyn Transaction>, StoreError>> {
        Box::pin(async move { Ok(Box::new(self.pool.begin(START).await?) as Box<dyn Transaction>) })
    }

    fn run_alone(&self, statement: Statement) -> BoxFuture<'_, Result<u64, StoreError>> {
        Box::pin(async move { Ok(bound(&statement)?.run(&mut self.pool.acquire().await?).await?.rows_affected()) })
    }
}
