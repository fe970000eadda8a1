//! One text of SQL for three databases: what is not on the hot path is written once, against this
//! port. Each database's folder says how it runs a text (`sql.rs` there).
//!
//! A text is SQL that all three know, with these words of ours:
//!
//! | in the text | becomes |
//! |---|---|
//! | `oncebox.TABLE` | the table: in a schema on PostgreSQL, with a prefix elsewhere |
//! | `:name` | a bound value, [`Statement::bind`]; it may stand more than once |
//! | `{now}` | the database's clock when the statement began, as tables store times |
//! | `{span :name}` | a bound [`Value::Span`], to be added to a time |
//! | `{lock free}` | locks what a SELECT finds, without what others have locked |
//! | `{pg: ..}`, `{my: ..}`, `{lite: ..}` | words of one database only |
//!
//! Guarantees:
//!
//! * Values are bound, never spliced; a text is `'static`, so a server keeps prepared no more
//!   statements than there are texts.
//! * On SQLite everything that writes runs in a transaction that begins with the write lock.
//!
//! Not here: statements of the hot path (the relay's read and claim, admission to the inbox, the
//! doors, claim and outcome of an operation), which are each database's own.

pub(in crate::store) mod mailbox;

use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::Duration;

use futures::future::BoxFuture;
use uuid::Uuid;

use super::Dialect;
use crate::error::StoreError;

/// A value to bind; a missing one is a null of its type.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::store) enum Value {
    Bool(bool),
    Int(Option<i64>),
    Text(Option<String>),
    /// 16 bytes: a UUID on PostgreSQL, bytes elsewhere.
    Id(Option<Uuid>),
    /// A length of time, only inside `{span :name}`.
    Span(Option<Duration>),
}

macro_rules! values_from {
    ($($from:ty => $value:ident $with:expr;)*) => {
        $(
            impl From<$from> for Value {
                fn from(value: $from) -> Self {
                    let with: fn($from) -> _ = $with;
                    Self::$value(Some(with(value)))
                }
            }

            impl From<Option<$from>> for Value {
                fn from(value: Option<$from>) -> Self {
                    let with: fn($from) -> _ = $with;
                    Self::$value(value.map(with))
                }
            }
        )*
    };
}

values_from! {
    i64 => Int |value| value;
    String => Text |value| value;
    &str => Text str::to_owned;
    Uuid => Id |value| value;
    Duration => Span |value| value;
}

impl From<bool> for Value {
    fn from(value: bool) -> Self {
        Self::Bool(value)
    }
}

/// A text and its values.
#[derive(Debug, Clone)]
pub(in crate::store) struct Statement {
    text: &'static str,
    values: Vec<(&'static str, Value)>,
}

/// A text, to which values are bound.
pub(in crate::store) fn sql(text: &'static str) -> Statement {
    Statement { text, values: Vec::new() }
}

impl Statement {
    /// Binds what stands as `:name` in the text.
    #[must_use]
    pub(in crate::store) fn bind(mut self, name: &'static str, value: impl Into<Value>) -> Self {
        self.values.push((name, value.into()));
        self
    }

    /// The text in the words of a database, and the values in the order of its placeholders.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`] where the text names a value that was not bound.
    pub(in crate::store) fn in_words_of(&self, dialect: Dialect) -> Result<(&'static str, Vec<&Value>), StoreError> {
        let written = written(self.text, dialect);
        let value = |name: &str| {
            let found = self.values.iter().find(|(bound, _)| *bound == name);
            found.map(|(_, value)| value).ok_or_else(|| StoreError::Corrupt(format!("`:{name}` has no value")))
        };
        let values = written.names.iter().map(|name| value(name)).collect::<Result<_, _>>()?;
        Ok((written.text, values))
    }
}

/// A text in the words of one database.
#[derive(Debug)]
struct Written {
    text: &'static str,
    /// The value of each placeholder, in order.
    names: Vec<&'static str>,
}

/// Texts as they were written for a database: each is made once, and lives as long as the program,
/// as sqlx wants it of what it keeps prepared.
static WRITTEN: LazyLock<Mutex<WrittenTexts>> = LazyLock::new(Mutex::default);

/// By text and database.
type WrittenTexts = HashMap<(&'static str, u8), Arc<Written>>;

fn written(text: &'static str, dialect: Dialect) -> Arc<Written> {
    let mut all = WRITTEN.lock().unwrap_or_else(PoisonError::into_inner);
    Arc::clone(all.entry((text, dialect as u8)).or_insert_with(|| {
        let (text, names) = write(text, dialect);
        Arc::new(Written { text: String::leak(text), names })
    }))
}

/// Writes a text in the words of a database.
fn write(text: &'static str, dialect: Dialect) -> (String, Vec<&'static str>) {
    let (mut out, mut names) = (String::with_capacity(text.len() + 64), Vec::new());
    write_on(text, dialect, &mut out, &mut names);
    (out, names)
}

fn write_on(text: &'static str, dialect: Dialect, out: &mut String, names: &mut Vec<&'static str>) {
    let mut rest = text;
    while let Some(at) = rest.find(['{', ':', '\'', 'o']) {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let is_inside_a_name = out.ends_with(|before: char| before.is_ascii_alphanumeric() || before == '_');
        if let Some(quoted) = rest.strip_prefix('\'') {
            let end = quoted.find('\'').map_or(rest.len(), |end| end + 2);
            out.push_str(&rest[..end]);
            rest = &rest[end..];
        } else if let Some(inside) = rest.strip_prefix('{') {
            let end = closing(inside);
            word(&inside[..end], dialect, out, names);
            rest = &inside[(end + 1).min(inside.len())..];
        } else if let Some(table) = rest.strip_prefix("oncebox.").filter(|_| !is_inside_a_name) {
            out.push_str(if dialect == Dialect::Postgres { "oncebox." } else { "oncebox_" });
            rest = table;
        } else if let Some(name) = rest.strip_prefix(':').filter(|name| !out.ends_with(':') && begins_name(name)) {
            let end = name.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).unwrap_or(name.len());
            placeholder(&name[..end], dialect, out, names);
            rest = &name[end..];
        } else {
            out.push_str(&rest[..1]);
            rest = &rest[1..];
        }
    }
    out.push_str(rest);
}

fn begins_name(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_lowercase())
}

/// Where the brace that was opened before this is closed.
fn closing(inside: &str) -> usize {
    let mut depth = 0;
    for (at, c) in inside.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => return at,
            '}' => depth -= 1,
            _ => {}
        }
    }
    inside.len()
}

/// What a word in braces becomes.
fn word(word: &'static str, dialect: Dialect, out: &mut String, names: &mut Vec<&'static str>) {
    let mut push = |text| write_on(text, dialect, out, names);
    let own = [("pg:", Dialect::Postgres), ("my:", Dialect::MySql), ("lite:", Dialect::Sqlite)];
    if let Some((prefix, of)) = own.into_iter().find(|(prefix, _)| word.starts_with(prefix)) {
        if of == dialect {
            push(word[prefix.len()..].trim_start());
        }
    } else if let Some(name) = word.strip_prefix("span ") {
        let (before, after) = match dialect {
            Dialect::Postgres => ("", " * interval '1 microsecond'"),
            Dialect::MySql => ("interval ", " microsecond"),
            Dialect::Sqlite => ("", ""),
        };
        push(before);
        push(name);
        push(after);
    } else {
        push(match (word, dialect) {
            // Of the statement: compared with the clock itself, no index is read by a time.
            ("now", Dialect::Postgres) => "statement_timestamp()",
            ("now", Dialect::MySql) => "utc_timestamp(6)",
            ("now", Dialect::Sqlite) => "cast(round(unixepoch('subsec') * 1000) as integer)",
            ("lock free", Dialect::Postgres | Dialect::MySql) => "for update skip locked",
            // The transaction has the write lock of the whole file.
            ("lock free", Dialect::Sqlite) => "",
            // A test writes every text for every database.
            _ => "{unknown word}",
        });
    }
}

fn placeholder(name: &'static str, dialect: Dialect, out: &mut String, names: &mut Vec<&'static str>) {
    let known = names.iter().position(|known| *known == name);
    let number = match (dialect, known) {
        (Dialect::Postgres | Dialect::Sqlite, Some(at)) => at + 1,
        _ => {
            names.push(name);
            names.len()
        }
    };
    match dialect {
        Dialect::Postgres => out.push_str(&format!("${number}")),
        Dialect::Sqlite => out.push_str(&format!("?{number}")),
        Dialect::MySql => out.push('?'),
    }
}

/// A row, read by position.
pub(in crate::store) trait Row: Debug + Send + Sync {
    /// A column that holds a whole number.
    fn get_int(&self, at: usize) -> Result<Option<i64>, StoreError>;

    /// A column that holds text.
    fn get_text(&self, at: usize) -> Result<Option<String>, StoreError>;
}

/// A type that a column is read as.
pub(in crate::store) trait Column: Sized {
    /// The value, where it is not null.
    fn read(row: &dyn Row, at: usize) -> Result<Option<Self>, StoreError>;
}

impl dyn Row + '_ {
    /// A column that is never null.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`] with the column where it is null or something else.
    pub(in crate::store) fn get<T: Column>(&self, at: usize) -> Result<T, StoreError> {
        T::read(self, at)?.ok_or_else(|| StoreError::Corrupt(format!("column {at} of a row is null")))
    }
}

impl Column for i64 {
    fn read(row: &dyn Row, at: usize) -> Result<Option<Self>, StoreError> {
        row.get_int(at)
    }
}

impl Column for u32 {
    fn read(row: &dyn Row, at: usize) -> Result<Option<Self>, StoreError> {
        let number = |value| {
            let wrong = |_| StoreError::Corrupt(format!("column {at} of a row: {value} is out of range"));
            Self::try_from(value).map_err(wrong)
        };
        row.get_int(at)?.map(number).transpose()
    }
}

impl Column for String {
    fn read(row: &dyn Row, at: usize) -> Result<Option<Self>, StoreError> {
        row.get_text(at)
    }
}

/// The rows of an answer.
pub(in crate::store) type Rows = Vec<Box<dyn Row>>;

/// A connection on which statements run.
pub(in crate::store) trait Session: Send {
    /// The rows of an answer.
    fn rows(&mut self, statement: Statement) -> BoxFuture<'_, Result<Rows, StoreError>>;

    /// How many rows were changed.
    fn run(&mut self, statement: Statement) -> BoxFuture<'_, Result<u64, StoreError>>;
}

impl dyn Session + '_ {
    /// The first column of the only row of an answer.
    pub(in crate::store) async fn one<T: Column>(&mut self, statement: Statement) -> Result<T, StoreError> {
        let rows = self.rows(statement).await?;
        rows.first().ok_or(StoreError::Other(sqlx::Error::RowNotFound))?.get(0)
    }
}

/// A transaction of our own. Dropped without commit, it rolls back.
pub(in crate::store) trait Transaction: Send {
    /// The connection, inside the transaction.
    fn session(&mut self) -> &mut dyn Session;

    /// Commits.
    ///
    /// # Errors
    /// [`StoreError::CommitUnknown`] where the answer was lost.
    fn commit(self: Box<Self>) -> BoxFuture<'static, Result<(), StoreError>>;
}

/// A database that these texts run on.
pub(in crate::store) trait SqlStore: Send + Sync {
    /// A connection, to read.
    fn reader(&self) -> BoxFuture<'_, Result<Box<dyn Session>, StoreError>>;

    /// A transaction, to write.
    fn begin_sql(&self) -> BoxFuture<'_, Result<Box<dyn Transaction>, StoreError>>;

    /// One statement that writes, in a transaction of its own.
    fn run_alone(&self, statement: Statement) -> BoxFuture<'_, Result<u64, StoreError>>;
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "select 'it''s :not {one}' from oncebox.email t where t.claim = :claim \
        and (:only is null or t.email_id = :only) and t.due_at < {now} + {span :after} \
        {pg: and t.body::text <> :claim }order by 1 limit :limit {lock free}";

    #[test]
    fn a_text_is_written_in_the_words_of_each_database() {
        assert_eq!(
            write(TEXT, Dialect::Postgres),
            (
                "select 'it''s :not {one}' from oncebox.email t \
                 where t.claim = $1 and ($2 is null or t.email_id = $2) \
                 and t.due_at < statement_timestamp() + $3 * interval '1 microsecond' \
                 and t.body::text <> $1 order by 1 limit $4 for update skip locked"
                    .to_owned(),
                vec!["claim", "only", "after", "limit"]
            )
        );
        assert_eq!(
            write(TEXT, Dialect::MySql),
            (
                "select 'it''s :not {one}' \
                 from oncebox_email t where t.claim = ? and (? is null or t.email_id = ?) \
                 and t.due_at < utc_timestamp(6) + interval ? microsecond order by 1 limit ? for update skip locked"
                    .to_owned(),
                vec!["claim", "only", "only", "after", "limit"]
            )
        );
        assert_eq!(
            write(TEXT, Dialect::Sqlite),
            (
                "select 'it''s :not {one}' from oncebox_email t where t.claim = ?1 \
                 and (?2 is null or t.email_id = ?2) and t.due_at < cast(round(unixepoch('subsec') * 1000) as integer) + ?3 \
                 order by 1 limit ?4 "
                    .to_owned(),
                vec!["claim", "only", "after", "limit"]
            )
        );
    }

    #[test]
    fn a_value_that_is_missing_is_named() {
        let error = sql("select :one").in_words_of(Dialect::Sqlite).expect_err("it is not bound");
        assert!(error.to_string().contains("`:one` has no value"), "{error}");
    }
}
