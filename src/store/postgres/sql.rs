//! How PostgreSQL runs the texts of [`crate::store::sql`].

use chrono::{DateTime, Utc};
use futures::future::BoxFuture;
use sqlx::postgres::{PgArguments, PgConnection, PgRow};
use sqlx::{Postgres, query};
use uuid::Uuid;

use super::PostgresStore;
use crate::error::StoreError;
use crate::store::Dialect;
use crate::store::bounded::{Ask, Bounded};
use crate::store::sql::{Row, Rows, Session, SqlStore, Statement, Transaction, Value};

impl Row for PgRow {
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
}

/// The statement of sqlx.
fn bound(statement: &Statement) -> Result<sqlx::query::Query<'static, Postgres, PgArguments>, StoreError> {
    let (text, values) = statement.in_words_of(Dialect::Postgres)?;
    Ok(values.into_iter().fold(query(text), |query, value| match value {
        Value::Bool(value) => query.bind(*value),
        Value::Int(value) => query.bind(*value),
        Value::Text(value) => query.bind(value.clone()),
        Value::Id(value) => query.bind(*value),
        Value::Bytes(value) => query.bind(value.clone()),
        Value::Time(value) => query.bind(*value),
        Value::Span(value) => query.bind(value.map(|span| i64::try_from(span.as_micros()).unwrap_or(i64::MAX))),
        Value::Ints(list) => query.bind(list.clone()),
        Value::Ids(list) => query.bind(list.clone()),
        Value::ManyBytes(list) => query.bind(list.clone()),
        Value::Texts(list) => query.bind(list.clone()),
    }))
}

/// A connection of the application.
impl Session for PgConnection {
    fn rows(&mut self, statement: Statement) -> BoxFuture<'_, Result<Rows, StoreError>> {
        Box::pin(async move { Ok(boxed(bound(&statement)?.fetch_all(self).await?)) })
    }

    fn run(&mut self, statement: Statement) -> BoxFuture<'_, Result<u64, StoreError>> {
        Box::pin(async move { Ok(bound(&statement)?.execute(self).await?.rows_affected()) })
    }
}

fn boxed(rows: Vec<PgRow>) -> Rows {
    rows.into_iter().map(|row| Box::new(row) as Box<dyn Row>).collect()
}

impl Session for Bounded<Postgres> {
    fn rows(&mut self, statement: Statement) -> BoxFuture<'_, Result<Rows, StoreError>> {
        Box::pin(async move { Ok(boxed(bound(&statement)?.all(self).await?)) })
    }

    fn run(&mut self, statement: Statement) -> BoxFuture<'_, Result<u64, StoreError>> {
        Box::pin(async move { Ok(bound(&statement)?.run(self).await?.rows_affected()) })
    }
}

impl Transaction for Bounded<Postgres> {
    fn session(&mut self) -> &mut dyn Session {
        self
    }

    fn commit(mut self: Box<Self>) -> BoxFuture<'static, Result<(), StoreError>> {
        Box::pin(async move { Self::commit(&mut self).await })
    }

    fn rollback(mut self: Box<Self>) -> BoxFuture<'static, Result<(), StoreError>> {
        Box::pin(async move { Ok(Self::rollback(&mut self).await?) })
    }
}

impl SqlStore for PostgresStore {
    fn reader(&self) -> BoxFuture<'_, Result<Box<dyn Session>, StoreError>> {
        Box::pin(async move { Ok(Box::new(self.pool.acquire().await?) as Box<dyn Session>) })
    }

    fn begin_sql(&self) -> BoxFuture<'_, Result<Box<dyn Transaction>, StoreError>> {
        Box::pin(async move { Ok(Box::new(self.transaction().await?) as Box<dyn Transaction>) })
    }

    fn run_alone(&self, statement: Statement) -> BoxFuture<'_, Result<u64, StoreError>> {
        Box::pin(async move { Ok(bound(&statement)?.run(&self.pool).await?.rows_affected()) })
    }
}
