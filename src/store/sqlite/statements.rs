//! Statements of the sql handler on SQLite.
//!
//! Values keep their digits: a whole number that fits is bound as an integer, any other number as
//! its text. No value passes through a float here. SQLite itself has no decimal type, so a column
//! that must keep more than fifteen digits is declared TEXT.

use std::collections::BTreeMap;
use std::convert::Infallible;

use sqlx::sqlite::SqliteArguments;
use sqlx::{Arguments, Executor, SqliteConnection};

use super::SqliteStore;
use crate::error::StoreError;
use crate::message::wire;
use crate::store::base::Base;
use crate::store::statements::{Dialect, SqlValue, Statements, names, split, written};

/// A statement with a `?` for each parameter, in order.
#[derive(Debug)]
pub struct SqliteStatement {
    // Interned for the life of the program: a handler has few statements, and sqlx caches only
    // `'static` texts as prepared.
    sql: &'static str,
    names: Vec<String>,
}

impl Statements for SqliteStore {
    type Statement = SqliteStatement;
    /// A statement is a call of a function here: there is no round trip to save.
    type Set = Infallible;

    fn dialect() -> Dialect {
        Dialect::Sqlite
    }

    async fn prepare(&self, sql: &str) -> Result<SqliteStatement, StoreError> {
        let pieces = split(sql, Dialect::Sqlite);
        let sql: &'static str = String::leak(written(&pieces, |_, _| "?"));
        let mut connection = self.pool().acquire().await?;
        (&mut *connection).prepare(sqlx::SqlSafeStr::into_sql_str(sql)).await?;
        Ok(SqliteStatement { sql, names: names(&pieces).cloned().collect() })
    }

    async fn execute(
        connection: &mut SqliteConnection,
        statement: &SqliteStatement,
        values: &BTreeMap<String, SqlValue>,
    ) -> Result<(), StoreError> {
        let mut arguments = SqliteArguments::default();
        for name in &statement.names {
            let added = match values.get(name) {
                None | Some(SqlValue::Null) => arguments.add(None::<String>),
                Some(SqlValue::Bool(value)) => arguments.add(i64::from(*value)),
                Some(SqlValue::Number(digits)) => match digits.parse::<i64>() {
                    Ok(number) => arguments.add(number),
                    Err(_) => arguments.add(digits.clone()),
                },
                Some(SqlValue::Time(time)) => arguments.add(wire::format_time(*time)),
                Some(SqlValue::Text(text) | SqlValue::Json(text)) => arguments.add(text.clone()),
                Some(SqlValue::Bytes(bytes)) => arguments.add(bytes.clone()),
            };
            added.map_err(|error| StoreError::Corrupt(error.to_string()))?;
        }
        sqlx::query_with(statement.sql, arguments).execute(connection).await?;
        Ok(())
    }

    async fn prepare_set(&self, _: &[SqliteStatement]) -> Result<Option<Infallible>, StoreError> {
        Ok(None)
    }

    async fn execute_set(
        _: &mut SqliteConnection,
        set: &Infallible,
        _: &[BTreeMap<String, SqlValue>],
    ) -> Result<(), (Option<usize>, StoreError)> {
        match *set {}
    }
}
