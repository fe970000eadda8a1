//! Statements of the sql handler on MySQL and MariaDB.
//!
//! Values keep their digits: a whole number that fits is bound as an integer, any other number as its text, which the server
//! turns into the column's type exactly (DECIMAL) or refuses (strict mode). Nothing passes through a float on the way.

use std::collections::BTreeMap;

use sqlx::mysql::MySqlArguments;
use sqlx::{Arguments, MySqlConnection};

use super::MySqlStore;
use crate::error::StoreError;
use crate::store::{Dialect, Piece, SqlValue, Statements};

/// A statement with a `?` for each parameter, in order.
#[derive(Debug)]
pub struct MySqlStatement {
    // Interned for the life of the program: a handler's statements are few, and sqlx keeps prepared what is `'static`.
    sql: &'static str,
    names: Vec<String>,
}

impl Statements for MySqlStore {
    type Statement = MySqlStatement;

    fn dialect() -> Dialect {
        Dialect::MySql
    }

    async fn prepare(&self, pieces: &[Piece]) -> Result<MySqlStatement, StoreError> {
        let (mut sql, mut names) = (String::new(), Vec::new());
        for piece in pieces {
            match piece {
                Piece::Text(text) => sql.push_str(text),
                Piece::Param(name) => {
                    sql.push('?');
                    names.push(name.clone());
                }
            }
        }
        let sql: &'static str = String::leak(sql);
        self.pool.acquire().await?.prepare(sql).await?;
        Ok(MySqlStatement { sql, names })
    }

    async fn execute(
        connection: &mut MySqlConnection,
        statement: &MySqlStatement,
        values: &BTreeMap<String, SqlValue>,
    ) -> Result<u64, StoreError> {
        let mut arguments = MySqlArguments::default();
        for name in &statement.names {
            let added = match values.get(name) {
                None | Some(SqlValue::Null) => arguments.add(None::<String>),
                Some(SqlValue::Bool(value)) => arguments.add(i64::from(*value)),
                Some(SqlValue::Number(digits)) => match digits.parse::<i64>() {
                    Ok(number) => arguments.add(number),
                    Err(_) => arguments.add(digits.clone()),
                },
                Some(SqlValue::Text(text) | SqlValue::Json(text)) => arguments.add(text.clone()),
                Some(SqlValue::Bytes(bytes)) => arguments.add(bytes.clone()),
            };
            added.map_err(|error| StoreError::Corrupt(error.to_string()))?;
        }
        Ok(sqlx::query_with(statement.sql, arguments).execute(connection).await?.rows_affected())
    }
}
