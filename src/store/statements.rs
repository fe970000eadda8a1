//! Duty: statements of the sql handler. A tokenizer for the dialect finds each `:name`; values are
//! bound, never spliced.

mod named;

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::future::Future;

use chrono::{DateTime, Utc};

use crate::error::StoreError;
use crate::store::base::Base;

pub use named::{Dialect, Piece, ends_transaction, split};

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

/// Duty: preparing and running a team's own statements.
pub trait Statements: Base {
    /// A statement that the server has prepared without an error.
    type Statement: Debug + Send + Sync + 'static;

    /// The dialect in which strings, comments and names are written.
    fn dialect() -> Dialect;

    /// Prepares a statement on the server, so that an error in it is found at start and not at the
    /// first message.
    fn prepare(&self, pieces: &[Piece]) -> impl Future<Output = Result<Self::Statement, StoreError>> + Send;

    /// Runs a statement in the caller's transaction; returns how many rows the database reports as
    /// affected.
    fn execute(
        connection: &mut <Self::Db as sqlx::Database>::Connection,
        statement: &Self::Statement,
        values: &BTreeMap<String, SqlValue>,
    ) -> impl Future<Output = Result<u64, StoreError>> + Send;
}
