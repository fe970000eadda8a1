//! How MySQL and MariaDB runs the texts of [`crate::store::sql`].

use futures::future::BoxFuture;
use sqlx::mysql::{MySqlArguments, MySqlRow};
use sqlx::{MySql, query};

use super::{MySqlStore, START};
use crate::error::StoreError;
use crate::store::Dialect;
use crate::store::bounded::{Ask, Bounded};
use crate::store::sql::{Row, Rows, Session, SqlStore, Statement, Transaction, Value};

impl Row for MySqlRow {
    fn get_int(&self, at: usize) -> Result<Option<i64>, StoreError> {
        use sqlx::{Row as _, TypeInfo, ValueRef};
        if !self.try_get_raw(at)?.type_info().name().ends_with("UNSIGNED") {
            return Ok(self.try_get(at)?);
        }
        let number: Option<u64> = self.try_get(at)?;
        let wrong = |_| StoreError::Corrupt(format!("number {at} of a row is too large"));
        number.map(|number| i64::try_from(number).map_err(wrong)).transpose()
    }

    /// Also from a column of bytes, which is how names and keys are kept.
    fn get_text(&self, at: usize) -> Result<Option<String>, StoreError> {
        let bytes: Option<Vec<u8>> = sqlx::Row::try_get_unchecked(self, at)?;
        bytes.map(|bytes| super::text(&format!("number {at} of a row"), bytes)).transpose()
    }
}

/// The statement of sqlx.
fn bound(statement: &Statement) -> Result<sqlx::query::Query<'static, MySql, MySqlArguments>, StoreError> {
    let (text, values) = statement.in_words_of(Dialect::MySql)?;
    Ok(values.into_iter().fold(query(text), |query, value| match value {
        Value::Bool(value) => query.bind(*value),
        Value::Int(value) => query.bind(*value),
        Value::Text(value) => query.bind(value.clone()),
        Value::Id(value) => query.bind(*value),
        Value::Span(value) => query.bind(value.map(super::micros)),
    }))
}

impl Session for Bounded<MySql> {
    fn rows(&mut self, statement: Statement) -> BoxFuture<'_, Result<Rows, StoreError>> {
        Box::pin(async move {
            let rows = bound(&statement)?.all(self).await?;
            Ok(rows.into_iter().map(|row| Box::new(row) as Box<dyn Row>).collect())
        })
    }

    fn run(&mut self, statement: Statement) -> BoxFuture<'_, Result<u64, StoreError>> {
        Box::pin(async move { Ok(bound(&statement)?.run(self).await?.rows_affected()) })
    }
}

impl Transaction for Bounded<MySql> {
    fn session(&mut self) -> &mut dyn Session {
        self
    }

    fn commit(mut self: Box<Self>) -> BoxFuture<'static, Result<(), StoreError>> {
        Box::pin(async move { Self::commit(&mut self).await })
    }
}

impl SqlStore for MySqlStore {
    fn reader(&self) -> BoxFuture<'_, Result<Box<dyn Session>, StoreError>> {
        Box::pin(async move { Ok(Box::new(self.pool.acquire().await?) as Box<dyn Session>) })
    }

    fn begin_sql(&self) -> BoxFuture<'_, Result<Box<dyn Transaction>, StoreError>> {
        Box::pin(async move { Ok(Box::new(self.pool.begin(START).await?) as Box<dyn Transaction>) })
    }

    fn run_alone(&self, statement: Statement) -> BoxFuture<'_, Result<u64, StoreError>> {
        Box::pin(async move { Ok(bound(&statement)?.run(&self.pool).await?.rows_affected()) })
    }
}
