//! Runs the statements of [`crate::store::sql`] on SQLite. A writing transaction holds the write
//! lock from its beginning.

use chrono::{DateTime, Utc};
use futures_util::future::BoxFuture;
use sqlx::pool::PoolConnection;
use sqlx::query::Query;
use sqlx::sqlite::{SqliteArguments, SqliteConnection, SqliteRow};
use sqlx::{Sqlite, query};

use super::SqliteStore;
use super::message::{arrived_from_json, arrived_to_json};
use super::millis;
use super::write::Write;
use crate::error::StoreError;
use crate::message::wire;
use crate::store::base::Base;
use crate::store::sql::{Row, Rows, Session, SqlStore, Statement, Transaction, Value, boxed};
use crate::store::statements::Dialect;

impl Row for SqliteRow {
    fn column_name(&self, at: usize) -> &str {
        sqlx::Column::name(sqlx::Row::column(self, at))
    }

    fn get_int(&self, at: usize) -> Result<Option<i64>, StoreError> {
        Ok(sqlx::Row::try_get(self, at)?)
    }

    fn get_text(&self, at: usize) -> Result<Option<String>, StoreError> {
        Ok(sqlx::Row::try_get(self, at)?)
    }

    fn get_bytes(&self, at: usize) -> Result<Option<Vec<u8>>, StoreError> {
        Ok(sqlx::Row::try_get(self, at)?)
    }

    fn get_time(&self, at: usize) -> Result<Option<DateTime<Utc>>, StoreError> {
        let time = |millis| {
            DateTime::from_timestamp_millis(millis).ok_or_else(|| self.wrong(at, &format!("{millis} is no time")))
        };
        self.get_int(at)?.map(time).transpose()
    }

    fn get_sent_at(&self, at: usize) -> Result<Option<DateTime<Utc>>, StoreError> {
        Ok(self.get_text(at)?.as_deref().and_then(wire::parse_time))
    }

    fn get_headers(&self, at: usize) -> Result<Vec<(String, Vec<u8>)>, StoreError> {
        arrived_from_json(sqlx::Row::try_get(self, at)?)
    }
}

/// Binds the values of a statement for sqlx.
fn bound(statement: &Statement) -> Result<Query<'static, Sqlite, SqliteArguments>, StoreError> {
    let (text, values) = statement.in_words_of(Dialect::Sqlite)?;
    Ok(values.into_iter().fold(query(text), |query, value| match value {
        Value::Bool(value) => query.bind(*value),
        Value::Int(value) => query.bind(*value),
        Value::Text(value) | Value::Foreign(value) | Value::Name(value) => query.bind(value.clone()),
        Value::SentAt(value) => query.bind(value.map(wire::format_time)),
        Value::Headers(headers) => query.bind(arrived_to_json(headers)),
        Value::Foreigns(list) => query.bind(serde_json::json!(list).to_string()),
        Value::Id(value) => query.bind(*value),
        Value::RowId(value) => query.bind(value.map(|id| id.to_string())),
        Value::Bytes(value) => query.bind(value.clone()),
        Value::Time(value) => query.bind(value.map(|time| time.timestamp_millis())),
        Value::Span(value) => query.bind(value.map(millis)),
        list @ (Value::Ints(_) | Value::Ids(_) | Value::ManyBytes(_)) => query.bind(list.as_json_list()),
    }))
}

/// Runs statements on a connection of the pool, or of a transaction.
impl Session for SqliteConnection {
    fn rows(&mut self, statement: Statement) -> BoxFuture<'_, Result<Rows, StoreError>> {
        Box::pin(async move { Ok(boxed(bound(&statement)?.fetch_all(self).await?)) })
    }

    fn run(&mut self, statement: Statement) -> BoxFuture<'_, Result<u64, StoreError>> {
        Box::pin(async move {
            if statement.in_words_of(Dialect::Sqlite)?.0.is_empty() {
                return Ok(0);
            }
            Ok(bound(&statement)?.execute(self).await?.rows_affected())
        })
    }
}

impl Session for PoolConnection<Sqlite> {
    fn rows(&mut self, statement: Statement) -> BoxFuture<'_, Result<Rows, StoreError>> {
        Session::rows(&mut **self, statement)
    }

    fn run(&mut self, statement: Statement) -> BoxFuture<'_, Result<u64, StoreError>> {
        Session::run(&mut **self, statement)
    }
}

impl Session for Write {
    fn rows(&mut self, statement: Statement) -> BoxFuture<'_, Result<Rows, StoreError>> {
        Session::rows(self.connection(), statement)
    }

    fn run(&mut self, statement: Statement) -> BoxFuture<'_, Result<u64, StoreError>> {
        Session::run(self.connection(), statement)
    }
}

impl Transaction for Write {
    fn session(&mut self) -> &mut dyn Session {
        self
    }

    fn commit(self: Box<Self>) -> BoxFuture<'static, Result<(), StoreError>> {
        Box::pin(Self::commit(*self))
    }

    fn rollback(self: Box<Self>) -> BoxFuture<'static, Result<(), StoreError>> {
        Box::pin(Self::rollback(*self))
    }
}

impl SqlStore for SqliteStore {
    fn dialect(&self) -> Dialect {
        Dialect::Sqlite
    }

    fn reader(&self) -> BoxFuture<'_, Result<Box<dyn Session>, StoreError>> {
        Box::pin(async move {
            match self.pool().acquire().await {
                Ok(connection) => Ok(Box::new(connection) as Box<dyn Session>),
                Err(error) => self.check_there().and(Err(error.into())),
            }
        })
    }

    fn begin_sql(&self) -> BoxFuture<'_, Result<Box<dyn Transaction>, StoreError>> {
        Box::pin(async move { Ok(Box::new(self.write().await?) as Box<dyn Transaction>) })
    }

    fn run_alone(&self, statement: Statement) -> BoxFuture<'_, Result<u64, StoreError>> {
        Box::pin(async move {
            let mut write = self.write().await?;
            let changed = Session::run(&mut write, statement).await?;
            write.commit().await?;
            Ok(changed)
        })
    }
}
