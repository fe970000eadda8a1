//! Statements of the sql handler on MySQL and MariaDB.
//!
//! Values keep their digits. The server does not know the type of a parameter, and treats text in
//! arithmetic as a float. So a whole number of up to 64 bits is bound as an integer, signed or
//! unsigned, and any other number as its digits, cast to a DECIMAL of exactly that scale; one with
//! more digits than a DECIMAL has is bound as text. A time is bound as a time, because no column
//! accepts the form that it has in a payload.
//!
//! For several messages their statements stand one after another in a block, which MariaDB runs in
//! one round trip with the parameters of all of them. The text of the block is a parameter too, of
//! a statement that stays prepared: so the server reads the block anew each time, and sees a view
//! or a table as it is now. A block that is prepared and closed each time would wait 40 ms for an
//! acknowledgement, because sqlx leaves Nagle's algorithm on. A block runs under the `sql_mode`
//! that its connection had when it first ran a block of this size. MySQL has no such block.
//!
//! A table without transactions that a statement names is refused when the handler is prepared: its
//! row would stay when the inbox row is rolled back, and be written again at the redelivery. What
//! stands behind a view or a trigger is not looked at, nor a table with a sign such as `-` in its
//! quoted name.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::Arc;

use sqlx::error::BoxDynError;
use sqlx::mysql::MySqlArguments;
use sqlx::{Arguments, AssertSqlSafe, MySql, MySqlConnection, QueryBuilder};

use super::{MySqlStore, number, without_transactions};
use crate::error::StoreError;
use crate::store::bounded::{Ask, Bounded};
use crate::store::statements::{Dialect, Piece, SqlValue, Statements, names, set_if_read, split, written};

/// The most digits of a DECIMAL, and the most of them after the point.
const DIGITS_MAX: usize = 65;
const SCALE_MAX: usize = 30;

/// A statement, split at its parameters.
#[derive(Debug)]
pub struct MySqlStatement {
    /// The text with a `?` for each parameter.
    plain: Arc<str>,
    pieces: Vec<Piece>,
}

/// The sizes of blocks: few, because each is a prepared statement. Where there are fewer messages,
/// spare parameters fill the rest.
const BLOCKS: [usize; 4] = [64, 16, 4, 1];
/// A block of several messages is at most so long, with its values. With TLS, what is longer than
/// 16 KiB goes out in two pieces, and the second one waits for the first to be acknowledged.
const BLOCK_BYTES: usize = 15 << 10;
/// What a spare parameter takes: its place in the text, its type, and its bit among the nulls.
const SPARE_BYTES: usize = 5;

/// Errors of a statement that was interrupted or ran too long. In a block they tell of no message,
/// because the time is that of all its messages.
const OUT_OF_TIME: [u16; 3] = [1317, 1969, 3024];

/// The statements of a handler as they stand in a block.
#[derive(Debug)]
pub struct MySqlSet {
    statements: Vec<Vec<Piece>>,
    /// The parameters of one message.
    parameters: usize,
    /// The bytes of one message in a block, without its values.
    bytes: usize,
    /// The statement that runs a block of each size.
    runners: [Arc<str>; BLOCKS.len()],
}

impl MySqlSet {
    fn new(statements: Vec<Vec<Piece>>) -> Self {
        let pieces = || statements.iter().flatten();
        let parameters = statements.iter().flat_map(|pieces| names(pieces)).count();
        let texts: usize = pieces().map(|piece| if let Piece::Text(text) = piece { text.len() } else { 0 }).sum();
        let bytes = texts + statements.len() * "\n;\n".len() + "set @oncebox_at = 63;\n".len();
        let runner = |size: usize| {
            let places = vec!["?"; size * parameters + 1].join(",");
            format!("begin not atomic execute immediate ? using {places}; end").into()
        };
        Self { parameters, bytes, runners: BLOCKS.map(runner), statements }
    }

    /// The end of the messages, at least one, that go into one block.
    fn end_of_block(&self, values: &[BTreeMap<String, SqlValue>], from: usize) -> usize {
        let (mut bytes, mut messages) = (0, 0);
        for values in values[from..].iter().take(BLOCKS[0]) {
            bytes += self.bytes;
            for name in self.statements.iter().flat_map(|pieces| names(pieces)) {
                bytes += place_in_block(values.get(name)).len() + bytes_of(values.get(name));
            }
            let (_, spare) = self.runner(messages + 1);
            if messages > 0 && bytes + spare * SPARE_BYTES > BLOCK_BYTES {
                break;
            }
            messages += 1;
        }
        from + messages
    }

    /// The statement that runs a block of so many messages, and how many parameters are spare then.
    fn runner(&self, messages: usize) -> (&Arc<str>, usize) {
        let fits = BLOCKS.iter().rposition(|size| *size >= messages).unwrap_or(0);
        (&self.runners[fits], (BLOCKS[fits] - messages) * self.parameters + 1)
    }
}

impl Statements for MySqlStore {
    type Statement = MySqlStatement;
    type Set = MySqlSet;

    fn dialect() -> Dialect {
        Dialect::MySql
    }

    async fn prepare(&self, sql: &str) -> Result<MySqlStatement, StoreError> {
        let pieces = split(sql, Dialect::MySql);
        let plain: Arc<str> = written(&pieces, |_, _| "?").into();
        let mut connection = self.pool.acquire().await?;
        connection.prepare(AssertSqlSafe(Arc::clone(&plain))).await?;
        refuse_tables_without_transactions(&mut connection, &plain).await?;
        Ok(MySqlStatement { plain, pieces })
    }

    async fn execute(
        connection: &mut MySqlConnection,
        statement: &MySqlStatement,
        values: &BTreeMap<String, SqlValue>,
    ) -> Result<(), StoreError> {
        let mut arguments = MySqlArguments::default();
        bind(&mut arguments, &statement.pieces, values)?;
        let is_cast = |name: &String| place(values.get(name)) != "?";
        let sql = if names(&statement.pieces).any(is_cast) {
            written(&statement.pieces, |_, name| place(values.get(name))).into()
        } else {
            Arc::clone(&statement.plain)
        };
        sqlx::query_with(AssertSqlSafe(sql), arguments).execute(connection).await?;
        Ok(())
    }

    async fn prepare_set(&self, statements: &[MySqlStatement]) -> Result<Option<MySqlSet>, StoreError> {
        let statements: Vec<Vec<Piece>> = statements.iter().map(|statement| of_block(&statement.pieces)).collect();
        let set = MySqlSet::new(statements);
        let mut connection = self.pool.acquire().await?;
        let trial = block(&set.statements, &[BTreeMap::new(), BTreeMap::new()], 1);
        set_if_read(set, connection.prepare(AssertSqlSafe(trial)).await.map(drop))
    }

    async fn execute_set(
        connection: &mut MySqlConnection,
        set: &MySqlSet,
        values: &[BTreeMap<String, SqlValue>],
    ) -> Result<(), (Option<usize>, StoreError)> {
        let mut from = 0;
        while from < values.len() {
            let part = &values[from..set.end_of_block(values, from)];
            let (runner, spare) = set.runner(part.len());
            let mut arguments = MySqlArguments::default();
            let of_none = |error| (None::<usize>, corrupt(&error));
            arguments.add(block(&set.statements, part, spare)).map_err(of_none)?;
            for (at, values) in part.iter().enumerate() {
                for pieces in &set.statements {
                    let bound = bind(&mut arguments, pieces, values);
                    bound.map_err(|error| (Some(from + at), error))?;
                }
            }
            for _ in 0..spare {
                arguments.add(None::<String>).map_err(of_none)?;
            }
            let sql = AssertSqlSafe(Arc::clone(runner));
            if let Err(error) = sqlx::query_with(sql, arguments).execute(&mut *connection).await {
                let tells = !out_of_time(&error);
                let error = StoreError::from(error);
                // A server that is away does not answer this either.
                let at = sqlx::query_scalar(AT).fetch_one(connection).await;
                let at = at.ok().and_then(|at: Option<i64>| usize::try_from(at?).ok());
                let at = at.filter(|at| tells && *at < part.len()).map(|at| from + at);
                return Err((at, error));
            }
            from += part.len();
        }
        Ok(())
    }
}

/// A statement as it stands in a block: without a semicolon of its own.
fn of_block(pieces: &[Piece]) -> Vec<Piece> {
    let mut pieces = pieces.to_vec();
    if let Some(Piece::Text(last)) = pieces.last_mut() {
        last.truncate(last.trim_end_matches(|c: char| c == ';' || c.is_whitespace()).len());
    }
    pieces
}

/// A block that runs the statements for these messages, and notes in a variable of the session
/// which message it is at. It takes `spare` parameters more, at least one, and ignores them.
fn block(statements: &[Vec<Piece>], messages: &[BTreeMap<String, SqlValue>], spare: usize) -> String {
    let mut block = "begin not atomic\n".to_owned();
    for (message, values) in messages.iter().enumerate() {
        let _ = writeln!(block, "set @oncebox_at = {message};");
        for pieces in statements {
            // The line break ends a comment at the end of the statement.
            let _ = writeln!(block, "{}\n;", written(pieces, |_, name| place_in_block(values.get(name))));
        }
    }
    let _ = write!(block, "set @oncebox_at = null;\ndo {};\nend", vec!["?"; spare].join(","));
    block
}

/// Reads at which message of a block its statement failed, and forgets it.
const AT: &str = "select cast(@oncebox_at as signed), (@oncebox_at := null)";

fn out_of_time(error: &sqlx::Error) -> bool {
    number(error).is_some_and(|number| OUT_OF_TIME.contains(&number))
}

/// What stands in place of a parameter. A number with a point is a DECIMAL of exactly its scale.
fn place(value: Option<&SqlValue>) -> Cow<'static, str> {
    match value {
        Some(SqlValue::Number(digits)) => match Exact::of(digits) {
            Exact::Decimal { scale, .. } => format!("cast(? as decimal({DIGITS_MAX},{scale}))").into(),
            Exact::Signed(_) | Exact::Unsigned(_) | Exact::Beyond => "?".into(),
        },
        _ => "?".into(),
    }
}

/// What stands in place of a parameter in a block. A null is a text there, as it is where the
/// statement runs alone: one that comes through `using` has no type.
fn place_in_block(value: Option<&SqlValue>) -> Cow<'static, str> {
    match value {
        // Not a cast, which would make a mix of collations illegal that is legal alone.
        None | Some(SqlValue::Null) => "ifnull(nullif('', ''), ?)".into(),
        value => place(value),
    }
}

/// Binds the parameters of a statement in their order.
fn bind(
    arguments: &mut MySqlArguments,
    pieces: &[Piece],
    values: &BTreeMap<String, SqlValue>,
) -> Result<(), StoreError> {
    for name in names(pieces) {
        let added = match values.get(name) {
            None | Some(SqlValue::Null) => arguments.add(None::<String>),
            Some(SqlValue::Bool(value)) => arguments.add(i64::from(*value)),
            Some(SqlValue::Number(digits)) => match Exact::of(digits) {
                Exact::Signed(number) => arguments.add(number),
                Exact::Unsigned(number) => arguments.add(number),
                Exact::Decimal { digits, .. } => arguments.add(digits),
                Exact::Beyond => arguments.add(digits.clone()),
            },
            Some(SqlValue::Time(time)) => arguments.add(*time),
            Some(SqlValue::Text(text) | SqlValue::Json(text)) => arguments.add(text.clone()),
            Some(SqlValue::Bytes(bytes)) => arguments.add(bytes.clone()),
        };
        added.map_err(|error| corrupt(&error))?;
    }
    Ok(())
}

/// The error of a value that cannot be written as a parameter.
fn corrupt(error: &BoxDynError) -> StoreError {
    StoreError::Corrupt(error.to_string())
}

/// How many bytes a value takes in a packet: its type, its length and itself. It is a bound for all
/// but numbers with an exponent, whose digits are written out.
fn bytes_of(value: Option<&SqlValue>) -> usize {
    match value {
        Some(SqlValue::Number(text)) => 4 + text.len().max(8),
        Some(SqlValue::Text(text) | SqlValue::Json(text)) => 6 + text.len(),
        Some(SqlValue::Bytes(bytes)) => 6 + bytes.len(),
        None | Some(SqlValue::Null) => 3,
        Some(SqlValue::Bool(_) | SqlValue::Time(_)) => 14,
    }
}

/// Takes each word of the statement for a possible table name, in any database that this account
/// sees. So a table named only inside a string literal is refused too.
async fn refuse_tables_without_transactions(
    connection: &mut Bounded<MySql>,
    statement: &str,
) -> Result<(), StoreError> {
    let words: BTreeSet<&str> = statement
        .split(|c: char| !(c.is_alphanumeric() || matches!(c, '_' | '$')))
        .filter(|word| !word.is_empty())
        .collect();
    let mut find = QueryBuilder::new(concat!(
        "select concat(table_schema, '.', table_name), engine from information_schema.tables \
              where table_schema not in ('mysql', 'sys', 'performance_schema') and ",
        without_transactions!(),
        " and table_name in ("
    ));
    let mut names = find.separated(", ");
    for word in words {
        names.push_bind(word);
    }
    find.push(") order by 1 limit 1");
    let found: Option<(String, String)> = find.build_query_as().optional(connection).await?;
    match found {
        None => Ok(()),
        Some((table, engine)) => Err(StoreError::Refused(format!(
            "a word of the statement is the name of a table: the table {table} stands in {engine}, which has no transactions: what \
             is written there is not undone with the inbox row, and would come twice; run `alter table {table} engine = InnoDB`"
        ))),
    }
}

/// A number in the form that the server holds without loss.
#[derive(Debug, PartialEq, Eq)]
enum Exact {
    Signed(i64),
    Unsigned(u64),
    /// Plain digits, and how many of them are after the point.
    Decimal {
        digits: String,
        scale: usize,
    },
    /// More digits than a DECIMAL has: bound as text, which the column converts.
    Beyond,
}

impl Exact {
    /// Parses the text of a JSON number.
    fn of(text: &str) -> Self {
        if let Ok(number) = text.parse() {
            return Self::Signed(number);
        }
        if let Ok(number) = text.parse() {
            return Self::Unsigned(number);
        }
        decimal(text).unwrap_or(Self::Beyond)
    }
}

fn decimal(text: &str) -> Option<Exact> {
    let (mantissa, exponent) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
    let exponent: i64 = exponent.parse().ok().filter(|exponent: &i64| exponent.unsigned_abs() <= DIGITS_MAX as u64)?;
    let (sign, mantissa) = mantissa.strip_prefix('-').map_or(("", mantissa), |mantissa| ("-", mantissa));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let mut digits = format!("{whole}{fraction}");
    // The place of the point in `digits`.
    let mut point = i64::try_from(whole.len()).ok()? + exponent;
    if point < 1 {
        let zeros = usize::try_from(1 - point).ok()?;
        digits.insert_str(0, &"0".repeat(zeros));
        point = 1;
    }
    let point = usize::try_from(point).ok()?;
    digits.extend(std::iter::repeat_n('0', point.saturating_sub(digits.len())));
    let (whole, fraction) = digits.split_at(point);
    let whole = whole.trim_start_matches('0');
    if fraction.len() > SCALE_MAX || whole.len() + fraction.len() > DIGITS_MAX {
        return None;
    }
    let whole = if whole.is_empty() { "0" } else { whole };
    let digits = if fraction.is_empty() { format!("{sign}{whole}") } else { format!("{sign}{whole}.{fraction}") };
    Some(Exact::Decimal { digits, scale: fraction.len() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(text: &str) -> String {
        match Exact::of(text) {
            Exact::Signed(number) => format!("i {number}"),
            Exact::Unsigned(number) => format!("u {number}"),
            Exact::Decimal { digits, scale } => format!("{scale} {digits}"),
            Exact::Beyond => "beyond".to_owned(),
        }
    }

    #[test]
    fn numbers_keep_their_digits() {
        for (text, wanted) in [
            ("-9223372036854775808", "i -9223372036854775808"),
            ("9007199254740993", "i 9007199254740993"),
            ("18446744073709551615", "u 18446744073709551615"),
            ("18446744073709551616", "0 18446744073709551616"),
            ("12345678901234567890.10", "2 12345678901234567890.10"),
            ("-0.5", "1 -0.5"),
            ("0.10", "2 0.10"),
            ("1.5e3", "0 1500"),
            ("1.2345e2", "2 123.45"),
            ("-12E-4", "4 -0.0012"),
            ("0e0", "0 0"),
            ("1e64", &format!("0 1{}", "0".repeat(64))),
            ("1e65", "beyond"),
            ("1e-31", "beyond"),
            ("1e400", "beyond"),
            ("1e99999999999999999999", "beyond"),
        ] {
            assert_eq!(shown(text), wanted, "{text}");
        }
        assert_eq!(shown(&format!("{}.{}", "9".repeat(35), "9".repeat(30))).split(' ').next(), Some("30"));
        assert_eq!(shown(&format!("{}.{}", "9".repeat(36), "9".repeat(30))), "beyond");
    }
}
