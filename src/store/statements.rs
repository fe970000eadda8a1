//! Duty: statements of the sql handler. A tokenizer for the dialect finds each `:name`; values are
//! bound, never spliced.

mod named;

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::future::Future;

use chrono::{DateTime, Utc};

use crate::error::StoreError;
use crate::store::base::Base;

#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) use named::Piece;
#[cfg(feature = "consumer")]
pub(crate) use named::ends_transaction;
#[cfg(feature = "postgres")]
pub(crate) use named::first_word;
pub(crate) use named::{names, split, written};

/// How a database writes strings, names and comments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// `E'..'` escapes, dollar quotes, nested comments, `::` casts.
    Postgres,
    /// Backslash escapes, backquotes, `#` comments.
    MySql,
    /// `[..]` and backquotes as names.
    Sqlite,
}

/// A value to bind.
#[derive(Clone, PartialEq, Eq)]
pub enum SqlValue {
    /// The SQL null, for a value that is absent or JSON `null`.
    Null,
    /// A truth value; MySQL and SQLite get it as 1 or 0.
    Bool(bool),
    /// A number with the digits it was written with.
    Number(String),
    /// A text, bound as it is.
    Text(String),
    /// The text of a JSON object or array.
    Json(String),
    /// A point in time, in UTC.
    Time(DateTime<Utc>),
    /// Bytes, such as the payload of the message.
    Bytes(Vec<u8>),
}

// Values come from payloads: only their kind is shown.
impl Debug for SqlValue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Null => "Null",
            Self::Bool(_) => "Bool",
            Self::Number(_) => "Number",
            Self::Text(_) => "Text",
            Self::Json(_) => "Json",
            Self::Time(_) => "Time",
            Self::Bytes(_) => "Bytes",
        })
    }
}

/// Duty: preparing and running the statements that a user wrote for the sql handler.
pub trait Statements: Base {
    /// A statement that the server has prepared without an error.
    type Statement: Debug + Send + Sync + 'static;

    /// The statements of a handler in the form that runs them for several messages.
    type Set: Debug + Send + Sync + 'static;

    /// The dialect in which strings, comments and names are written.
    fn dialect() -> Dialect;

    /// Prepares a statement, in which a parameter is `:name`, on the server. So an error in it is
    /// found at start and not at the first message.
    fn prepare(&self, sql: &str) -> impl Future<Output = Result<Self::Statement, StoreError>> + Send;

    /// Runs a statement in the caller's transaction.
    fn execute(
        connection: &mut <Self::Db as sqlx::Database>::Connection,
        statement: &Self::Statement,
        values: &BTreeMap<String, SqlValue>,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Makes one text of the statements of a handler, which runs them for several messages. None
    /// where the server cannot run them so, or where it gains nothing.
    fn prepare_set(
        &self,
        statements: &[Self::Statement],
    ) -> impl Future<Output = Result<Option<Self::Set>, StoreError>> + Send;

    /// Runs the statements for each message in order, as [`Statements::execute`] would one after
    /// another, in a few round trips. `values` has the values of each message.
    ///
    /// # Errors
    /// The error of the server, and the index of the message whose statement failed, where the
    /// server tells it.
    fn execute_set(
        connection: &mut <Self::Db as sqlx::Database>::Connection,
        set: &Self::Set,
        values: &[BTreeMap<String, SqlValue>],
    ) -> impl Future<Output = Result<(), (Option<usize>, StoreError)>> + Send;
}

/// The result of [`Statements::prepare_set`] once the server was asked to read the set: none where
/// it refuses the statements in this form.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(super) fn set_if_read<S>(set: S, read: sqlx::Result<()>) -> Result<Option<S>, StoreError> {
    match read.map_err(StoreError::from) {
        Ok(()) => Ok(Some(set)),
        Err(error) if error.is_transient() => Err(error),
        Err(error) => {
            tracing::debug!(%error, "the statements of a handler run message by message");
            Ok(None)
        }
    }
}
