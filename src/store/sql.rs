//! One SQL text for three databases: statements that are not on the hot path are written once,
//! against the traits here. The file `sql.rs` in the folder of each database runs them.
//!
//! A text is SQL that all three databases know, with these words of ours:
//!
//! | in the text | becomes |
//! |---|---|
//! | `oncebox.TABLE` | the table: in a schema on PostgreSQL, with a prefix elsewhere |
//! | `:name` | a bound value, [`Statement::bind`]; it may stand more than once |
//! | `{now}` | the database's clock when the statement began, as tables store times |
//! | `{clock}` | the clock at this moment, where a database has one; else as `{now}` |
//! | `{micros EXPRESSION}` | a time as microseconds since 1970 |
//! | `{age EXPRESSION}` | the microseconds since a time, by the clock at this moment |
//! | `{span :name}` | a bound [`Value::Span`], to be added to a time |
//! | `{lease}`, `{lease :name}` | the column with the length of a lease, and what it is set to |
//! | `{lease of ALIAS}` | the length of a lease that is stored, to be added to a time |
//! | `{key}` | the column `key`, in quotes on MySQL, where this word is reserved |
//! | `{in ints :name}` | is one of a bound list; also `ids`, `bytes`, `texts` |
//! | `{lock}`, `{lock free}` | locks the rows of a SELECT; `free` skips rows that others have locked |
//! | `{each TABLE ALIAS ints COLUMN :list INDEX}` | after FROM: the rows whose column is in a list |
//! | `{or update COLUMNS}`, `{new COLUMN}` | an upsert: updates the row that is there; the value that would be inserted |
//! | `{greatest}` | the function that returns its greatest argument |
//! | `{piece NAME}` | a text that several texts share, from [`pieces`] |
//! | `{history HISTORY ATTEMPT}` | a history with the error `:error` of a try appended |
//! | `{if name: ..}` | the words inside, if the value is true or not null or not empty |
//! | `{unless name: ..}` | the words inside, if it is not, or no value is bound |
//! | `{pg: ..}`, `{my: ..}`, `{lite: ..}` | words of one database only; `{pg lite: ..}` of two |
//!
//! A list is bound as an array on PostgreSQL. Elsewhere it is a JSON array, with ids and bytes in
//! hexadecimal, so a text may also read `:name` by `json_table` or `json_each`.
//!
//! On SQLite a text that is empty there changes nothing. PostgreSQL plans a text that begins with
//! `/* planned anew */` for each run, so that no cached plan comes from empty tables.
//!
//! Guarantees:
//!
//! * Values are bound, never spliced. A text is `'static`, so the number of prepared statements on
//!   a server is bounded.
//! * On SQLite everything that writes runs in a transaction that begins with the write lock.
//!
//! Not here: statements of the hot path, which each database has in its own folder: the relay's
//! read, checkpoint and mark, admission to the inbox, the doors; on PostgreSQL the claim of a
//! transactional operation, and the outcome.

pub(in crate::store) mod audit;
#[cfg(feature = "operations")]
pub(in crate::store) mod evidence;
#[cfg(feature = "operations")]
mod expiry;
#[cfg(feature = "operations")]
pub(in crate::store) mod forgotten;
mod history;
pub(in crate::store) mod inbox;
#[cfg(feature = "operations")]
mod key_operator;
#[cfg(feature = "operations")]
mod live;
pub(in crate::store) mod mailbox;
pub(in crate::store) mod message;
pub(in crate::store) mod operator;
pub(in crate::store) mod outbox;
#[cfg(all(feature = "operations", any(feature = "mysql", feature = "sqlite")))]
pub(in crate::store) mod outcome;
#[cfg(feature = "operations")]
pub(in crate::store) mod phases;
mod pieces;
#[cfg(feature = "operations")]
pub(in crate::store) mod records;
pub(in crate::store) mod refused;
mod row;
pub(in crate::store) mod waiting;

use std::collections::HashMap;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use chrono::{DateTime, Utc};
use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use uuid::Uuid;

pub(in crate::store) use self::row::{Column, Row, boxed};
use crate::error::StoreError;
use crate::inbox::port::ConsumerId;
#[cfg(any(feature = "mysql", feature = "postgres"))]
use crate::store::bounded::{Bounded, Remote};
use crate::store::statements::Dialect;
#[cfg(any(feature = "mysql", feature = "sqlite"))]
use crate::text::hex::hex;

/// A value to bind; `None` is a null of its type.
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
    /// The time that a message carries. It is exact, also in a database whose tables store other
    /// times less exactly.
    SentAt(Option<DateTime<Utc>>),
    /// Text that came with a message: it may have any characters, and is stored as bytes on MySQL.
    Foreign(Option<String>),
    /// A name as it is compared: MySQL keeps names as bytes.
    Name(Option<String>),
    /// An id of an outbox row or an audit row: SQLite keeps these as text.
    RowId(Option<Uuid>),
    /// Headers as they arrived, with any bytes: a JSON list of pairs.
    Headers(Vec<(String, Vec<u8>)>),
    /// A length of time, only inside `{span :name}`.
    Span(Option<Duration>),
    /// Lists, for `{in .. :name}`.
    Ints(Vec<i64>),
    Ids(Vec<Uuid>),
    ManyBytes(Vec<Vec<u8>>),
    /// A list of [`Value::Foreign`], in hexadecimal where these are bytes.
    Foreigns(Vec<String>),
}

/// A value for text that came with a message.
pub(in crate::store) fn foreign(text: &str) -> Value {
    Value::Foreign(Some(text.to_owned()))
}

fn name<'a>(name: impl Into<Option<&'a str>>) -> Value {
    Value::Name(name.into().map(str::to_owned))
}

impl Value {
    /// Whether `{if name: ..}` is written.
    fn is_given(&self) -> bool {
        match self {
            Self::Bool(value) => *value,
            Self::Int(value) => value.is_some(),
            Self::Text(value) | Self::Foreign(value) | Self::Name(value) => value.is_some(),
            Self::Id(value) | Self::RowId(value) => value.is_some(),
            Self::Bytes(value) => value.is_some(),
            Self::Time(value) | Self::SentAt(value) => value.is_some(),
            Self::Span(value) => value.is_some(),
            Self::Ints(list) => !list.is_empty(),
            Self::Ids(list) => !list.is_empty(),
            Self::ManyBytes(list) => !list.is_empty(),
            Self::Foreigns(list) => !list.is_empty(),
            Self::Headers(list) => !list.is_empty(),
        }
    }

    /// A list as a JSON array; none for other values. [`Value::Foreigns`] is none of them either: a
    /// database binds it as texts or as bytes, whichever it stores.
    #[cfg(any(feature = "mysql", feature = "sqlite"))]
    pub(in crate::store) fn as_json_list(&self) -> Option<String> {
        let hexes = |bytes: &mut dyn Iterator<Item = &[u8]>| bytes.map(hex).collect::<Vec<_>>();
        Some(match self {
            Self::Ints(list) => serde_json::json!(list).to_string(),
            Self::Ids(list) => serde_json::json!(hexes(&mut list.iter().map(|id| &id.as_bytes()[..]))).to_string(),
            Self::ManyBytes(list) => serde_json::json!(hexes(&mut list.iter().map(Vec::as_slice))).to_string(),
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
    i32 => Int i64::from;
    u32 => Int i64::from;
    usize => Int |value| i64::try_from(value).unwrap_or(i64::MAX);
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

impl From<ConsumerId> for Value {
    fn from(consumer: ConsumerId) -> Self {
        Self::Int(Some(i64::from(consumer.0)))
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
}

/// A text with the values that are bound to it.
#[derive(Debug, Clone)]
pub(in crate::store) struct Statement {
    text: &'static str,
    values: Vec<(&'static str, Value)>,
}

/// A statement of this text, without values yet.
pub(in crate::store) fn sql(text: &'static str) -> Statement {
    Statement { text, values: Vec::new() }
}

impl Statement {
    /// Binds the value of `:name` in the text.
    #[must_use]
    pub(in crate::store) fn bind(mut self, name: &'static str, value: impl Into<Value>) -> Self {
        self.values.push((name, value.into()));
        self
    }

    /// The text in the words of a database, and the values in the order of its placeholders.
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
    /// The name of the value for each placeholder, in order.
    names: Vec<&'static str>,
}

/// Texts as they were written for a database. Each is made once and lives as long as the program,
/// because sqlx requires that of statements that it keeps prepared.
static WRITTEN: LazyLock<Mutex<WrittenTexts>> = LazyLock::new(Mutex::default);

/// The key: the text, the database, and for each name that [`asked`] finds whether its value is
/// given. Other values change nothing in the text, so they are not in the key: messages decide
/// which of them are given, and each new key keeps memory for ever.
type WrittenTexts = HashMap<(&'static str, u8, u64), Arc<Written>>;

/// The names that stand in an `{if name: ..}` or an `{unless name: ..}`, in the order of the text.
fn asked(text: &'static str) -> impl Iterator<Item = &'static str> {
    text.split('{').skip(1).filter_map(|word| {
        let asks = word.strip_prefix("if ").or_else(|| word.strip_prefix("unless "))?;
        asks.split_once(':').map(|(name, _)| name)
    })
}

/// Returns a text in the words of a database from [`WRITTEN`], where its first use writes it.
fn written(statement: &Statement, dialect: Dialect) -> Arc<Written> {
    let given = |bits: u64, name: &str| bits << 1 | u64::from(is_given(&statement.values, name));
    let given = asked(statement.text).fold(0, given);
    let mut all = WRITTEN.lock();
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

/// The word of each [`Dialect`] for what only that database reads.
const DATABASES: [(&str, Dialect); 3] = [("pg", Dialect::Postgres), ("my", Dialect::MySql), ("lite", Dialect::Sqlite)];

struct Writing<'a> {
    dialect: Dialect,
    values: &'a [(&'static str, Value)],
    text: String,
    names: Vec<&'static str>,
}

impl Writing<'_> {
    /// Copies a text and replaces words in braces, names of tables, and `:name`. What stands in
    /// quotes is copied as it is, and so is a cast, such as `::text`.
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

    /// Writes what a word in braces becomes.
    fn word(&mut self, word: &'static str) {
        let is_a_database = |of: &str| DATABASES.iter().any(|(word, _)| *word == of);
        if let Some((of, inside)) = word.split_once(':').filter(|(of, _)| of.split(' ').all(is_a_database)) {
            if of.split(' ').any(|of| DATABASES.contains(&(of, self.dialect))) {
                self.write(inside.trim_start());
            }
        } else if let Some((name, inside)) = word.strip_prefix("if ").and_then(|word| word.split_once(':')) {
            if is_given(self.values, name) {
                self.write(inside.trim_start());
            }
        } else if let Some((name, inside)) = word.strip_prefix("unless ").and_then(|word| word.split_once(':')) {
            if !is_given(self.values, name) {
                self.write(inside.trim_start());
            }
        } else if let Some((of, list)) = word.strip_prefix("in ").and_then(|word| word.split_once(' ')) {
            self.one_of(of, list);
        } else if let Some((history, attempt)) = word.strip_prefix("history ").and_then(|word| word.rsplit_once(' ')) {
            self.history(history, attempt);
        } else if self.short_word(word).or_else(|| self.longer_word(word)).is_none() {
            // Found by a test, which writes every piece for every database.
            self.text.push_str("{unknown word}");
        }
    }

    fn around(&mut self, before: &'static str, inside: &'static str, after: &'static str) {
        self.text.push_str(before);
        self.write(inside);
        self.text.push_str(after);
    }

    /// Writes the condition that the expression before it is in a list.
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

    /// Writes the placeholder of a value. MySQL has no numbers in them, so a value that stands
    /// twice is bound twice there.
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

fn is_given(values: &[(&'static str, Value)], name: &str) -> bool {
    values.iter().any(|(bound, value)| *bound == name && value.is_given())
}

fn begins_name(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_lowercase())
}

/// The index of the brace that closes the one opened before this text.
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

pub(in crate::store) type Rows = Vec<Box<dyn Row>>;

/// A new name of a savepoint, which no handler can use by chance.
pub(in crate::store) fn savepoint_name() -> String {
    format!("oncebox_{}", Uuid::now_v7().simple())
}

/// A connection that runs statements.
pub(in crate::store) trait Session: Send {
    /// Runs a statement and returns all rows of its answer.
    fn rows(&mut self, statement: Statement) -> BoxFuture<'_, Result<Rows, StoreError>>;

    /// Runs a statement and returns how many rows it changed.
    fn run(&mut self, statement: Statement) -> BoxFuture<'_, Result<u64, StoreError>>;
}

impl dyn Session + '_ {
    /// The first row of an answer, where it has one.
    async fn first(&mut self, statement: Statement) -> Result<Option<Box<dyn Row>>, StoreError> {
        Ok(self.rows(statement).await?.into_iter().next())
    }

    /// The row of an answer that always has one.
    async fn only(&mut self, statement: Statement) -> Result<Box<dyn Row>, StoreError> {
        self.first(statement).await?.ok_or(StoreError::Other(sqlx::Error::RowNotFound))
    }

    /// The first column of the row of an answer that always has one.
    async fn one<T: Column>(&mut self, statement: Statement) -> Result<T, StoreError> {
        self.only(statement).await?.get(0)
    }

    /// The first column of each row of an answer.
    async fn column<T: Column>(&mut self, statement: Statement) -> Result<Vec<T>, StoreError> {
        self.rows(statement).await?.iter().map(|row| row.get(0)).collect()
    }
}

/// A transaction of our own. Dropped without commit, it rolls back.
pub(in crate::store) trait Transaction: Send {
    /// The connection, inside the transaction.
    fn session(&mut self) -> &mut dyn Session;

    /// Commits; [`StoreError::CommitUnknown`] where the answer was lost.
    fn commit(self: Box<Self>) -> BoxFuture<'static, Result<(), StoreError>>;

    /// Rolls back, and returns the connection to the pool.
    fn rollback(self: Box<Self>) -> BoxFuture<'static, Result<(), StoreError>>;
}

#[cfg(any(feature = "mysql", feature = "postgres"))]
impl<Db: Remote> Transaction for Bounded<Db>
where
    Self: Session,
{
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

/// A database that these texts run on.
pub(in crate::store) trait SqlStore: Send + Sync {
    fn dialect(&self) -> Dialect;

    /// Pings the server on a connection that nothing else uses. Dropped, its connection is closed;
    /// the next call makes a new one. A database without a server returns `Ok`.
    fn ping(&self) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async { Ok(()) })
    }

    /// A connection of the pool for statements that read; it begins no transaction.
    fn reader(&self) -> BoxFuture<'_, Result<Box<dyn Session>, StoreError>>;

    /// A transaction for writes.
    fn begin_sql(&self) -> BoxFuture<'_, Result<Box<dyn Transaction>, StoreError>>;

    /// Runs one statement that writes, in a transaction of its own, and returns how many rows it
    /// changed.
    fn run_alone(&self, statement: Statement) -> BoxFuture<'_, Result<u64, StoreError>>;
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "select 'it''s :not {one}' from oncebox.email t where t.lease = :lease \
        and (:only is null or t.email_id = :only) and t.due_at < {now} + {span :after} \
        {pg: and t.body::text <> :lease }order by 1 limit :limit {lock free}";

    #[test]
    fn a_text_is_written_in_the_words_of_each_database() {
        assert_eq!(
            write(&sql(TEXT), Dialect::Postgres),
            (
                "select 'it''s :not {one}' from oncebox.email t \
                 where t.lease = $1 and ($2 is null or t.email_id = $2) \
                 and t.due_at < statement_timestamp() + $3 * interval '1 microsecond' \
                 and t.body::text <> $1 order by 1 limit $4 for update skip locked"
                    .to_owned(),
                vec!["lease", "only", "after", "limit"]
            )
        );
        assert_eq!(
            write(&sql(TEXT), Dialect::MySql),
            (
                "select 'it''s :not {one}' \
                 from oncebox_email t where t.lease = ? and (? is null or t.email_id = ?) \
                 and t.due_at < utc_timestamp(6) + interval ? microsecond order by 1 limit ? for update skip locked"
                    .to_owned(),
                vec!["lease", "only", "only", "after", "limit"]
            )
        );
        assert_eq!(
            write(&sql(TEXT), Dialect::Sqlite),
            (
                "select 'it''s :not {one}' from oncebox_email t where t.lease = ?1 \
                 and (?2 is null or t.email_id = ?2) and t.due_at < cast(round(unixepoch('subsec') * 1000) as integer) + ?3 \
                 order by 1 limit ?4 "
                    .to_owned(),
                vec!["lease", "only", "after", "limit"]
            )
        );
    }

    #[test]
    fn what_is_only_for_a_given_value_is_written_only_with_it() {
        let text = |statement: Statement, dialect| statement.in_words_of(dialect).expect("all is bound").0;
        let of = |only: Option<i64>| {
            sql("select {key} from t where {if only: n = :only}{unless only: n is null} and {pg lite: 1 = 1}{my: true}")
                .bind("only", only)
        };
        assert_eq!(text(of(Some(1)), Dialect::Postgres), "select key from t where n = $1 and 1 = 1");
        assert_eq!(text(of(None), Dialect::Postgres), "select key from t where n is null and 1 = 1");
        assert_eq!(text(of(None), Dialect::MySql), "select `key` from t where n is null and true");
        assert_eq!(text(of(Some(1)), Dialect::Sqlite), "select key from t where n = ?1 and 1 = 1");
    }

    /// Shown to fail: by a key of one bit for each bound value.
    #[test]
    fn a_text_is_written_anew_where_it_asks_for_what_is_given_and_nowhere_else() {
        let text = |statement: Statement| statement.in_words_of(Dialect::Sqlite).expect("all is bound").0;
        let of = || sql("select {if one: 'one'}{if other: 'other'}");
        let one = text(of().bind("one", 1_i64));
        assert_eq!(one, "select 'one'");
        assert_eq!(text(of().bind("other", 2_i64)), "select 'other'");
        assert_eq!(text(of().bind("one", None::<i64>).bind("other", 2_i64)), "select 'other'");
        assert!(std::ptr::eq(one, text(of().bind("one", 1_i64).bind("limit", 3_i64))), "it was written twice");
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
    }

    #[cfg(any(feature = "mysql", feature = "sqlite"))]
    #[test]
    fn a_list_of_ids_is_a_json_list_of_hex() {
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
