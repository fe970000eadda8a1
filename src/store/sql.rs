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
//! | `{clock}` | the clock at this moment, where a database has one; else as `{now}` |
//! | `{micros EXPRESSION}` | a time as microseconds since 1970 |
//! | `{span :name}` | a bound [`Value::Span`], to be added to a time |
//! | `{lease}`, `{lease :name}` | the column with the length of a lease, and what it is set to |
//! | `{lease of ALIAS}` | the length of a lease that is stored, to be added to a time |
//! | `{key}` | the column of that name, which is a word of MySQL's |
//! | `{in ints :name}` | is one of a bound list; also `ids`, `bytes`, `texts` |
//! | `{lock}`, `{lock free}` | locks what a SELECT finds; `free`: without what others have locked |
//! | `{if name: ..}` | only where the value is true, or there |
//! | `{pg: ..}`, `{my: ..}`, `{lite: ..}` | words of one database only; `{pg lite: ..}` of two |
//!
//! Lists are arrays on PostgreSQL, and a JSON array elsewhere, ids and bytes in hexadecimal: a text
//! may also read `:name` by `json_table` or `json_each`.
//!
//! A text that has no words for a database does nothing there.
//!
//! Guarantees:
//!
//! * Values are bound, never spliced; a text is `'static`, so a server keeps prepared no more
//!   statements than there are texts.
//! * On SQLite everything that writes runs in a transaction that begins with the write lock.
//!
//! Not here: statements of the hot path (the relay's read and claim, admission to the inbox, the
//! doors, claim and outcome of an operation), which are each database's own.

pub(in crate::store) mod announced;
pub(in crate::store) mod mailbox;
pub(in crate::store) mod phases;

use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::Duration;

use chrono::{DateTime, Utc};
use futures::future::BoxFuture;
use uuid::Uuid;

use super::Dialect;
use crate::error::StoreError;
use crate::policy::db_time::DbTime;
use crate::policy::hex::hex;

/// A value to bind; a missing one is a null of its type.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::store) enum Value {
    Bool(bool),
    Int(Option<i64>),
    Text(Option<String>),
    /// 16 bytes: a UUID on PostgreSQL, bytes elsewhere.
    Id(Option<Uuid>),
    Bytes(Option<Vec<u8>>),
    /// A point in time, as tables store times.
    Time(Option<DateTime<Utc>>),
    /// A length of time, only inside `{span :name}`.
    Span(Option<Duration>),
    /// Lists, for `{in .. :name}`.
    Ints(Vec<i64>),
    Ids(Vec<Uuid>),
    ManyBytes(Vec<Vec<u8>>),
    Texts(Vec<String>),
}

impl Value {
    /// Whether `{if name: ..}` is written.
    fn is_given(&self) -> bool {
        match self {
            Self::Bool(value) => *value,
            Self::Int(value) => value.is_some(),
            Self::Text(value) => value.is_some(),
            Self::Id(value) => value.is_some(),
            Self::Bytes(value) => value.is_some(),
            Self::Time(value) => value.is_some(),
            Self::Span(value) => value.is_some(),
            Self::Ints(list) => !list.is_empty(),
            Self::Ids(list) => !list.is_empty(),
            Self::ManyBytes(list) => !list.is_empty(),
            Self::Texts(list) => !list.is_empty(),
        }
    }

    /// A list as a JSON array; none for other values.
    pub(in crate::store) fn as_json_list(&self) -> Option<String> {
        let hexes = |bytes: &mut dyn Iterator<Item = &[u8]>| bytes.map(hex).collect::<Vec<_>>();
        Some(match self {
            Self::Ints(list) => serde_json::json!(list).to_string(),
            Self::Ids(list) => serde_json::json!(hexes(&mut list.iter().map(|id| &id.as_bytes()[..]))).to_string(),
            Self::ManyBytes(list) => serde_json::json!(hexes(&mut list.iter().map(Vec::as_slice))).to_string(),
            Self::Texts(list) => serde_json::json!(list).to_string(),
            _ => return None,
        })
    }
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
    &String => Text |value: &String| value.clone();
    Uuid => Id |value| value;
    Vec<u8> => Bytes |value| value;
    &[u8] => Bytes <[u8]>::to_vec;
    DateTime<Utc> => Time |value| value;
    Duration => Span |value| value;
}

impl From<bool> for Value {
    fn from(value: bool) -> Self {
        Self::Bool(value)
    }
}

macro_rules! lists_from {
    ($($from:ty => $value:ident;)*) => {
        $(
            impl From<Vec<$from>> for Value {
                fn from(list: Vec<$from>) -> Self {
                    Self::$value(list)
                }
            }
        )*
    };
}

lists_from! {
    i64 => Ints;
    Uuid => Ids;
    Vec<u8> => ManyBytes;
    String => Texts;
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
        let written = written(self, dialect);
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

/// By text, database, and which values are given, in the order in which they were bound.
type WrittenTexts = HashMap<(&'static str, u8, u64), Arc<Written>>;

fn written(statement: &Statement, dialect: Dialect) -> Arc<Written> {
    let given = |bits, (_, value): &(_, Value)| bits << 1 | u64::from(value.is_given());
    // What makes no difference to the text is no part of the key.
    let given = if statement.text.contains("{if ") { statement.values.iter().fold(0, given) } else { 0 };
    let mut all = WRITTEN.lock().unwrap_or_else(PoisonError::into_inner);
    let written = all.entry((statement.text, dialect as u8, given)).or_insert_with(|| {
        let (text, names) = write(statement, dialect);
        Arc::new(Written { text: String::leak(text), names })
    });
    Arc::clone(written)
}

/// Writes a text in the words of a database.
fn write(statement: &Statement, dialect: Dialect) -> (String, Vec<&'static str>) {
    let text = String::with_capacity(statement.text.len() + 64);
    let mut writing = Writing { dialect, values: &statement.values, text, names: Vec::new() };
    writing.write(statement.text);
    (writing.text, writing.names)
}

/// A text that is being written.
struct Writing<'a> {
    dialect: Dialect,
    values: &'a [(&'static str, Value)],
    text: String,
    names: Vec<&'static str>,
}

impl Writing<'_> {
    fn write(&mut self, text: &'static str) {
        let mut rest = text;
        while let Some(at) = rest.find(['{', ':', '\'', 'o']) {
            self.text.push_str(&rest[..at]);
            rest = &rest[at..];
            let is_inside_a_name = self.text.ends_with(|before: char| before.is_ascii_alphanumeric() || before == '_');
            if let Some(quoted) = rest.strip_prefix('\'') {
                let end = quoted.find('\'').map_or(rest.len(), |end| end + 2);
                self.text.push_str(&rest[..end]);
                rest = &rest[end..];
            } else if let Some(inside) = rest.strip_prefix('{') {
                let end = closing(inside);
                self.word(&inside[..end]);
                rest = &inside[(end + 1).min(inside.len())..];
            } else if let Some(table) = rest.strip_prefix("oncebox.").filter(|_| !is_inside_a_name) {
                self.text.push_str(if self.dialect == Dialect::Postgres { "oncebox." } else { "oncebox_" });
                rest = table;
            } else if let Some(name) =
                rest.strip_prefix(':').filter(|name| !self.text.ends_with(':') && begins_name(name))
            {
                let end = name.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).unwrap_or(name.len());
                self.placeholder(&name[..end]);
                rest = &name[end..];
            } else {
                self.text.push_str(&rest[..1]);
                rest = &rest[1..];
            }
        }
        self.text.push_str(rest);
    }

    /// What a word in braces becomes.
    fn word(&mut self, word: &'static str) {
        use Dialect::{MySql, Postgres, Sqlite};
        if let Some((of, inside)) = word.split_once(':').filter(|(of, _)| of.split(' ').all(is_a_database)) {
            let own = match self.dialect {
                Postgres => "pg",
                MySql => "my",
                Sqlite => "lite",
            };
            if of.split(' ').any(|of| of == own) {
                self.write(inside.trim_start());
            }
        } else if let Some((name, inside)) = word.strip_prefix("if ").and_then(|word| word.split_once(':')) {
            if self.values.iter().any(|(bound, value)| *bound == name && value.is_given()) {
                self.write(inside.trim_start());
            }
        } else if let Some(name) = word.strip_prefix("span ") {
            match self.dialect {
                Postgres => self.around("", name, " * interval '1 microsecond'"),
                MySql => self.around("interval ", name, " microsecond"),
                Sqlite => self.write(name),
            }
        } else if let Some(alias) = word.strip_prefix("lease of ") {
            match self.dialect {
                Postgres => self.around("", alias, ".lease_seconds * interval '1 second'"),
                MySql => self.around("interval round(", alias, ".lease_seconds * 1000000) microsecond"),
                Sqlite => self.around("", alias, ".lease_ms"),
            }
        } else if let Some(name) = word.strip_prefix("lease ") {
            self.around("", name, if self.dialect == Sqlite { "" } else { " / 1e6" });
        } else if let Some(time) = word.strip_prefix("micros ") {
            match self.dialect {
                Postgres => self.around("(extract(epoch from ", time, ") * 1000000)::bigint"),
                MySql => self.around("timestampdiff(microsecond, timestamp'1970-01-01 00:00:00', ", time, ")"),
                Sqlite => self.around("(", time, ") * 1000"),
            }
        } else if let Some((of, list)) = word.strip_prefix("in ").and_then(|word| word.split_once(' ')) {
            self.one_of(of, list);
        } else {
            self.write(match (word, self.dialect) {
                // Of the statement: compared with the clock itself, no index is read by a time.
                ("now", Postgres) => "statement_timestamp()",
                ("clock", Postgres) => "clock_timestamp()",
                ("now" | "clock", MySql) => "utc_timestamp(6)",
                ("now" | "clock", Sqlite) => "cast(round(unixepoch('subsec') * 1000) as integer)",
                ("lease", Postgres | MySql) => "lease_seconds",
                ("lease", Sqlite) => "lease_ms",
                ("key", MySql) => "`key`",
                ("key", _) => "key",
                ("lock", Postgres | MySql) => "for update",
                ("lock free", Postgres | MySql) => "for update skip locked",
                // The transaction has the write lock of the whole file.
                ("lock" | "lock free", Sqlite) => "",
                // A test writes every text for every database.
                _ => "{unknown word}",
            });
        }
    }

    fn around(&mut self, before: &'static str, inside: &'static str, after: &'static str) {
        self.text.push_str(before);
        self.write(inside);
        self.text.push_str(after);
    }

    /// That what stands before is in a list.
    fn one_of(&mut self, of: &str, list: &'static str) {
        let is_hex = matches!(of, "ids" | "bytes");
        match self.dialect {
            Dialect::Postgres => self.around("= any(", list, ")"),
            Dialect::MySql => {
                self.text.push_str(if is_hex {
                    "in (select unhex(v.v) from json_table("
                } else {
                    "in (select v.v from json_table("
                });
                self.write(list);
                self.text.push_str(match of {
                    "ints" => ", '$[*]' columns (v bigint path '$')) v)",
                    _ => ", '$[*]' columns (v varchar(1024) path '$')) v)",
                });
            }
            Dialect::Sqlite if is_hex => self.around("in (select unhex(value) from json_each(", list, "))"),
            Dialect::Sqlite => self.around("in (select value from json_each(", list, "))"),
        }
    }

    fn placeholder(&mut self, name: &'static str) {
        let known = self.names.iter().position(|known| *known == name);
        let number = match (self.dialect, known) {
            (Dialect::Postgres | Dialect::Sqlite, Some(at)) => at + 1,
            _ => {
                self.names.push(name);
                self.names.len()
            }
        };
        match self.dialect {
            Dialect::Postgres => self.text.push_str(&format!("${number}")),
            Dialect::Sqlite => self.text.push_str(&format!("?{number}")),
            Dialect::MySql => self.text.push('?'),
        }
    }
}

fn is_a_database(word: &str) -> bool {
    matches!(word, "pg" | "my" | "lite")
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

/// A row, read by position.
pub(in crate::store) trait Row: Debug + Send + Sync {
    /// A column that holds a whole number.
    fn get_int(&self, at: usize) -> Result<Option<i64>, StoreError>;

    /// A column that holds text.
    fn get_text(&self, at: usize) -> Result<Option<String>, StoreError>;

    /// A column that holds bytes.
    fn get_bytes(&self, at: usize) -> Result<Option<Vec<u8>>, StoreError>;

    /// A column that holds a truth value.
    fn get_bool(&self, at: usize) -> Result<Option<bool>, StoreError>;

    /// A column that holds a [`Value::Id`].
    fn get_id(&self, at: usize) -> Result<Option<Uuid>, StoreError>;

    /// A column that holds a time as tables store times.
    fn get_time(&self, at: usize) -> Result<Option<DateTime<Utc>>, StoreError>;
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
        self.get_opt(at)?.ok_or_else(|| StoreError::Corrupt(format!("column {at} of a row is null")))
    }

    /// A column that may be null.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`] with the column where it is something else.
    pub(in crate::store) fn get_opt<T: Column>(&self, at: usize) -> Result<Option<T>, StoreError> {
        T::read(self, at)
    }
}

macro_rules! columns {
    ($($of:ty => $get:ident;)*) => {
        $(
            impl Column for $of {
                fn read(row: &dyn Row, at: usize) -> Result<Option<Self>, StoreError> {
                    row.$get(at)
                }
            }
        )*
    };
}

columns! {
    i64 => get_int;
    String => get_text;
    Vec<u8> => get_bytes;
    bool => get_bool;
    Uuid => get_id;
    DateTime<Utc> => get_time;
}

macro_rules! narrow_columns {
    ($($of:ty)*) => {
        $(
            impl Column for $of {
                fn read(row: &dyn Row, at: usize) -> Result<Option<Self>, StoreError> {
                    let number = |value| {
                        let wrong = |_| StoreError::Corrupt(format!("column {at} of a row: {value} is out of range"));
                        Self::try_from(value).map_err(wrong)
                    };
                    row.get_int(at)?.map(number).transpose()
                }
            }
        )*
    };
}

narrow_columns! { u16 u32 u64 usize }

impl Column for DbTime {
    /// Of `{micros ..}`.
    fn read(row: &dyn Row, at: usize) -> Result<Option<Self>, StoreError> {
        Ok(row.get_int(at)?.map(Self::from_micros))
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
            write(&sql(TEXT), Dialect::Postgres),
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
            write(&sql(TEXT), Dialect::MySql),
            (
                "select 'it''s :not {one}' \
                 from oncebox_email t where t.claim = ? and (? is null or t.email_id = ?) \
                 and t.due_at < utc_timestamp(6) + interval ? microsecond order by 1 limit ? for update skip locked"
                    .to_owned(),
                vec!["claim", "only", "only", "after", "limit"]
            )
        );
        assert_eq!(
            write(&sql(TEXT), Dialect::Sqlite),
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
    fn what_is_only_for_a_given_value_is_written_only_with_it() {
        let text = |statement: Statement, dialect| statement.in_words_of(dialect).expect("all is bound").0;
        let of = |only: Option<i64>| {
            sql("select {key} from t where {if only: n = :only and }{pg lite: 1 = 1}{my: true}").bind("only", only)
        };
        assert_eq!(text(of(Some(1)), Dialect::Postgres), "select key from t where n = $1 and 1 = 1");
        assert_eq!(text(of(None), Dialect::Postgres), "select key from t where 1 = 1");
        assert_eq!(text(of(None), Dialect::MySql), "select `key` from t where true");
        assert_eq!(text(of(Some(1)), Dialect::Sqlite), "select key from t where n = ?1 and 1 = 1");
    }

    #[test]
    fn lists_are_arrays_or_json() {
        let text =
            |dialect| sql("id {in ids :of}").bind("of", vec![Uuid::nil()]).in_words_of(dialect).expect("bound").0;
        assert_eq!(text(Dialect::Postgres), "id = any($1)");
        assert_eq!(
            text(Dialect::MySql),
            "id in (select unhex(v.v) from json_table(?, '$[*]' columns (v varchar(1024) path '$')) v)"
        );
        assert_eq!(text(Dialect::Sqlite), "id in (select unhex(value) from json_each(?1))");
        let list = Value::from(vec![Uuid::nil()]).as_json_list();
        assert_eq!(list.as_deref(), Some("[\"00000000000000000000000000000000\"]"));
    }

    #[test]
    fn a_lease_has_its_length_in_the_unit_of_its_column() {
        let text = |dialect| {
            let set = sql("set {lease} = {lease :lease} where t > {lease of o}").bind("lease", Duration::ZERO);
            set.in_words_of(dialect).expect("bound").0
        };
        assert_eq!(
            text(Dialect::Postgres),
            "set lease_seconds = $1 / 1e6 where t > o.lease_seconds * interval '1 second'"
        );
        assert_eq!(
            text(Dialect::MySql),
            "set lease_seconds = ? / 1e6 where t > interval round(o.lease_seconds * 1000000) microsecond"
        );
        assert_eq!(text(Dialect::Sqlite), "set lease_ms = ?1 where t > o.lease_ms");
    }

    #[test]
    fn a_value_that_is_missing_is_named() {
        let error = sql("select :one").in_words_of(Dialect::Sqlite).expect_err("it is not bound");
        assert!(error.to_string().contains("`:one` has no value"), "{error}");
    }
}
