//! A row of an answer, read by position, as every database gives it.
//!
//! Guarantee: a value that is null where none may be, or out of the range of its type, is an error
//! that names its column.

use std::fmt::{Debug, Display};

use chrono::{DateTime, Utc};
use uuid::Uuid;

use crate::error::StoreError;
use crate::time::db_time::DbTime;

/// A row, read by position.
pub(in crate::store) trait Row: Debug + Send + Sync {
    /// The name of a column, for errors.
    fn column_name(&self, at: usize) -> &str;

    fn get_int(&self, at: usize) -> Result<Option<i64>, StoreError>;

    fn get_text(&self, at: usize) -> Result<Option<String>, StoreError>;

    fn get_bytes(&self, at: usize) -> Result<Option<Vec<u8>>, StoreError>;

    fn get_bool(&self, at: usize) -> Result<Option<bool>, StoreError> {
        Ok(self.get_int(at)?.map(|value| value != 0))
    }

    /// A column that holds a [`Value::Id`](super::Value::Id).
    fn get_id(&self, at: usize) -> Result<Option<Uuid>, StoreError> {
        let id = |bytes: Vec<u8>| Uuid::from_slice(&bytes).map_err(|error| self.wrong(at, &error));
        self.get_bytes(at)?.map(id).transpose()
    }

    /// A column that holds a time as tables store times.
    fn get_time(&self, at: usize) -> Result<Option<DateTime<Utc>>, StoreError>;

    /// A column that holds a [`Value::SentAt`](super::Value::SentAt).
    fn get_sent_at(&self, at: usize) -> Result<Option<DateTime<Utc>>, StoreError> {
        self.get_time(at)
    }

    /// A column that holds a [`Value::Foreign`](super::Value::Foreign).
    fn get_foreign(&self, at: usize) -> Result<Option<String>, StoreError> {
        self.get_text(at)
    }

    /// A column that holds [`Value::Headers`](super::Value::Headers); on PostgreSQL two: names and
    /// values.
    fn get_headers(&self, at: usize) -> Result<Vec<(String, Vec<u8>)>, StoreError>;

    /// The error of a column that holds something else than it must.
    fn wrong(&self, at: usize, why: &dyn Display) -> StoreError {
        StoreError::Corrupt(format!("column {at} (`{}`) of a row: {why}", self.column_name(at)))
    }
}

/// The rows of an answer, as each database reads them.
pub(in crate::store) fn boxed(rows: Vec<impl Row + 'static>) -> super::Rows {
    rows.into_iter().map(|row| Box::new(row) as Box<dyn Row>).collect()
}

/// A type that a column is read as.
pub(in crate::store) trait Column: Sized {
    /// The value, where it is not null.
    fn read(row: &dyn Row, at: usize) -> Result<Option<Self>, StoreError>;
}

impl dyn Row + '_ {
    /// A column that is never null.
    pub(in crate::store) fn get<T: Column>(&self, at: usize) -> Result<T, StoreError> {
        self.get_opt(at)?.ok_or_else(|| self.null(at))
    }

    /// A column that holds a [`Value::Foreign`](super::Value::Foreign) and is never null.
    pub(super) fn foreign(&self, at: usize) -> Result<String, StoreError> {
        self.get_foreign(at)?.ok_or_else(|| self.null(at))
    }

    /// A column that may be null.
    pub(in crate::store) fn get_opt<T: Column>(&self, at: usize) -> Result<Option<T>, StoreError> {
        T::read(self, at).map_err(|error| match error {
            StoreError::Other(sqlx::Error::ColumnDecode { source, .. }) => self.wrong(at, &source),
            error => error,
        })
    }

    fn null(&self, at: usize) -> StoreError {
        self.wrong(at, &"null")
    }
}

macro_rules! columns {
    ($($of:ty => $get:path;)*) => {
        $(
            impl Column for $of {
                fn read(row: &dyn Row, at: usize) -> Result<Option<Self>, StoreError> {
                    $get(row, at)
                }
            }
        )*
    };
}

columns! {
    i64 => Row::get_int;
    String => Row::get_text;
    Vec<u8> => Row::get_bytes;
    bool => Row::get_bool;
    Uuid => Row::get_id;
    DateTime<Utc> => Row::get_time;
}

macro_rules! narrow_columns {
    ($($of:ty)*) => {
        $(
            impl Column for $of {
                fn read(row: &dyn Row, at: usize) -> Result<Option<Self>, StoreError> {
                    let number = |value| {
                        Self::try_from(value).map_err(|_| row.wrong(at, &format!("{value} is out of range")))
                    };
                    row.get_int(at)?.map(number).transpose()
                }
            }
        )*
    };
}

narrow_columns! { u8 u16 u32 u64 usize i32 }

impl Column for DbTime {
    /// A time that `{micros ..}` gave.
    fn read(row: &dyn Row, at: usize) -> Result<Option<Self>, StoreError> {
        Ok(row.get_int(at)?.map(|micros| Self { micros }))
    }
}
