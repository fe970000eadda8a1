//! Statements of the sql handler on PostgreSQL.
//!
//! The server determines the type of each parameter. Values are sent as text and cast to that type
//! by the server, so a number keeps its digits whatever the column is, and `timestamptz`, `uuid`,
//! `jsonb`, enums and domains need no code here.

use std::collections::BTreeMap;

use sqlx::postgres::PgArguments;
use sqlx::{Arguments, AssertSqlSafe, Either, PgConnection, Row, Statement};

use super::PostgresStore;
use crate::error::StoreError;
use crate::message::wire;
use crate::store::bounded::Ask;
use crate::store::statements::{Dialect, Piece, SqlValue, Statements};
use crate::text::hex::hex;

/// A statement whose parameters are text, each cast to the type that the server determined.
#[derive(Debug)]
pub struct PostgresStatement {
    // Interned for the life of the program: a handler has few statements, and sqlx caches only
    // `'static` texts as prepared.
    sql: &'static str,
    /// Each occurrence of a parameter, and whether its type is `bytea`.
    parameters: Vec<(String, bool)>,
}

impl Statements for PostgresStore {
    type Statement = PostgresStatement;

    fn dialect() -> Dialect {
        Dialect::Postgres
    }

    async fn prepare(&self, pieces: &[Piece]) -> Result<PostgresStatement, StoreError> {
        // A dedicated connection: its prepared statements end with it, and nobody else gets them.
        let mut connection = self.dedicated().await?;
        let plain = numbered(pieces, |number| format!("${number}"));
        let prepared = connection.prepare(AssertSqlSafe(plain)).await?;
        let oids: Vec<_> = match prepared.parameters() {
            Some(Either::Left(types)) => types.iter().map(|one| one.oid()).collect(),
            _ => Vec::new(),
        };
        let mut types = Vec::with_capacity(oids.len());
        // The modifier -1 gives names without a length of one: a plain `character` or `bit` would
        // cut values down to one.
        for oid in oids {
            let name: String =
                sqlx::query("select format_type($1, -1)").bind(oid).one(&mut connection).await?.try_get(0)?;
            types.push(name);
        }
        let type_of = |number: usize| types.get(number - 1).map_or("text", String::as_str);
        let sql = numbered(pieces, |number| format!("(${number}::text::{})", type_of(number)));
        // The casts could change which operator is chosen, so the server checks the final text too.
        connection.prepare(AssertSqlSafe(sql.clone())).await?;
        let names = pieces.iter().filter_map(|piece| match piece {
            Piece::Param(name) => Some(name.clone()),
            Piece::Text(_) => None,
        });
        let parameters = names.enumerate().map(|(index, name)| (name, type_of(index + 1) == "bytea")).collect();
        Ok(PostgresStatement { sql: String::leak(sql), parameters })
    }

    async fn execute(
        connection: &mut PgConnection,
        statement: &PostgresStatement,
        values: &BTreeMap<String, SqlValue>,
    ) -> Result<u64, StoreError> {
        let mut arguments = PgArguments::default();
        for (name, wants_bytes) in &statement.parameters {
            let value = values.get(name).map_or(Ok(None), |value| text_of(name, value, *wants_bytes))?;
            arguments.add(value).map_err(|error| StoreError::Corrupt(error.to_string()))?;
        }
        Ok(sqlx::query_with(statement.sql, arguments).execute(connection).await?.rows_affected())
    }
}

/// The statement with a text in place of each parameter; occurrences are counted from 1.
fn numbered(pieces: &[Piece], parameter: impl Fn(usize) -> String) -> String {
    let mut sql = String::new();
    let mut number = 0;
    for piece in pieces {
        match piece {
            Piece::Text(text) => sql.push_str(text),
            Piece::Param(_) => {
                number += 1;
                sql.push_str(&parameter(number));
            }
        }
    }
    sql
}

/// A value as the text that the server casts.
fn text_of(name: &str, value: &SqlValue, wants_bytes: bool) -> Result<Option<String>, StoreError> {
    let text = match value {
        SqlValue::Null => return Ok(None),
        SqlValue::Bytes(bytes) if wants_bytes => return Ok(Some(bytea(bytes))),
        SqlValue::Bytes(bytes) => String::from_utf8(bytes.clone())
            .map_err(|_| StoreError::Corrupt(format!("the parameter `{name}` is bytes that are no text")))?,
        SqlValue::Bool(value) => value.to_string(),
        SqlValue::Time(time) => wire::format_time(*time),
        SqlValue::Number(text) | SqlValue::Text(text) | SqlValue::Json(text) => text.clone(),
    };
    if wants_bytes {
        return Ok(Some(bytea(text.as_bytes())));
    }
    if text.contains('\0') {
        return Err(StoreError::Corrupt(format!("the parameter `{name}` contains NUL, which PostgreSQL cannot hold")));
    }
    Ok(Some(text))
}

/// Bytes in the hexadecimal form of `bytea`.
fn bytea(bytes: &[u8]) -> String {
    format!("\\x{}", hex(bytes))
}
