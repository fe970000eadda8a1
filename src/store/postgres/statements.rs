//! Statements of the sql handler on PostgreSQL.
//!
//! The server determines the type of each parameter. Values are sent as text and cast to that type
//! by the server, so a number keeps its digits whatever the column is, and `timestamptz`, `uuid`,
//! `jsonb`, enums and domains need no code here.
//!
//! For several messages the statements stand in the loop of a `DO` block, which runs them for one
//! message after the other, each as if it came alone. A block takes no parameters: a function of
//! ours puts the values, which are bound as arrays, into settings of the transaction, and runs the
//! block, whose loop reads them from there.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use sqlx::postgres::{PgArguments, PgDatabaseError};
use sqlx::{Arguments, AssertSqlSafe, Either, PgConnection, Row, Statement};

use super::PostgresStore;
use super::connect::BEGIN;
use crate::error::StoreError;
use crate::message::wire;
use crate::store::bounded::Ask;
use crate::store::statements::{Dialect, Piece, SqlValue, Statements, first_word, names, set_if_read, split, written};
use crate::text::hex::hex;

/// A statement whose parameters are text, each cast to the type that the server determined.
#[derive(Debug)]
pub struct PostgresStatement {
    // Interned for the life of the program: a handler has few statements, and sqlx caches only
    // `'static` texts as prepared.
    sql: &'static str,
    /// Each occurrence of a parameter, and whether its type is `bytea`.
    parameters: Vec<(String, bool)>,
    pieces: Vec<Piece>,
    /// The type of each occurrence, as the server names it.
    types: Vec<String>,
    returns_rows: bool,
}

/// The statements of a handler as a block, and the statement that hands over the values and runs
/// it. Both texts are interned as those of single statements are.
#[derive(Debug)]
pub struct PostgresSet {
    run: &'static str,
    block: &'static str,
    /// The values that a message has in the block, and whether each is for a `bytea`.
    parameters: Vec<(String, bool)>,
}

impl Statements for PostgresStore {
    type Statement = PostgresStatement;
    type Set = PostgresSet;

    fn dialect() -> Dialect {
        Dialect::Postgres
    }

    async fn prepare(&self, sql: &str) -> Result<PostgresStatement, StoreError> {
        let pieces = split(sql, Dialect::Postgres);
        // A dedicated connection: its prepared statements end with it, and nobody else gets them.
        let mut connection = self.pool.dedicated().await?;
        let plain = written(&pieces, |number, _| format!("${number}"));
        let prepared = connection.prepare(AssertSqlSafe(plain)).await?;
        let returns_rows = !prepared.columns().is_empty();
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
        let sql = written(&pieces, |number, _| format!("(${number}::text::{})", type_of(number)));
        // The casts could change which operator is chosen, so the server checks the final text too.
        connection.prepare(AssertSqlSafe(sql.clone())).await?;
        let names = names(&pieces).cloned().enumerate();
        let parameters: Vec<_> = names.map(|(index, name)| (name, type_of(index + 1) == "bytea")).collect();
        let types = (1..=parameters.len()).map(|number| type_of(number).to_owned()).collect();
        Ok(PostgresStatement { sql: String::leak(sql), parameters, pieces, types, returns_rows })
    }

    async fn execute(
        connection: &mut PgConnection,
        statement: &PostgresStatement,
        values: &BTreeMap<String, SqlValue>,
    ) -> Result<(), StoreError> {
        let mut arguments = PgArguments::default();
        for (name, wants_bytes) in &statement.parameters {
            let value = values.get(name).map_or(Ok(None), |value| text_of(name, value, *wants_bytes))?;
            arguments.add(value).map_err(|error| StoreError::Corrupt(error.to_string()))?;
        }
        sqlx::query_with(statement.sql, arguments).execute(connection).await?;
        Ok(())
    }

    async fn prepare_set(&self, statements: &[PostgresStatement]) -> Result<Option<PostgresSet>, StoreError> {
        let Some(set) = block(statements) else { return Ok(None) };
        let mut connection = self.pool.dedicated().await?;
        connection.begin(BEGIN).await?;
        // Without a message the block does nothing, but the server reads it.
        let block = sqlx::query(set.run).bind(set.block);
        let nobody = set.parameters.iter().fold(block, |query, _| query.bind(Vec::<String>::new()));
        set_if_read(set, nobody.run(&mut connection).await.map(drop))
    }

    async fn execute_set(
        connection: &mut PgConnection,
        set: &PostgresSet,
        values: &[BTreeMap<String, SqlValue>],
    ) -> Result<(), (Option<usize>, StoreError)> {
        let mut run = sqlx::query(set.run).bind(set.block);
        for (name, wants_bytes) in &set.parameters {
            let mut column = Vec::with_capacity(values.len());
            for (at, values) in values.iter().enumerate() {
                let value = values.get(name).map_or(Ok(None), |value| text_of(name, value, *wants_bytes));
                column.push(value.map_err(|error| (Some(at), error))?);
            }
            run = run.bind(column);
        }
        match run.execute(connection).await {
            Ok(_) => Ok(()),
            Err(error) => Err((at(&error), error.into())),
        }
    }
}

/// The statements of a handler in a loop over the messages. None where a statement has no place in
/// a block, such as SAVEPOINT, or where nothing of a message is used.
fn block(statements: &[PostgresStatement]) -> Option<PostgresSet> {
    let mut parameters: Vec<(String, bool)> = Vec::new();
    let mut body = String::new();
    for statement in statements {
        let mut number_of = |occurrence: usize| {
            let parameter = &statement.parameters[occurrence - 1];
            parameters.iter().position(|one| one == parameter).unwrap_or_else(|| {
                parameters.push(parameter.clone());
                parameters.len() - 1
            })
        };
        let sql = written(&statement.pieces, |occurrence, _| {
            format!("(oncebox_value_{}::text::{})", number_of(occurrence), statement.types[occurrence - 1])
        });
        let first = first_word(&sql, Dialect::Postgres)?;
        if !matches!(first.as_str(), "INSERT" | "UPDATE" | "DELETE" | "MERGE" | "SELECT" | "WITH" | "VALUES") {
            return None;
        }
        let sql = sql.trim_end_matches(|c: char| c == ';' || c.is_whitespace());
        // The line break ends a comment at the end of the statement. PL/pgSQL runs a SELECT without
        // a target in a loop only, also one without a column.
        if statement.returns_rows || first == "SELECT" {
            let _ = writeln!(body, "for oncebox_row in {sql}\nloop end loop;");
        } else {
            let _ = writeln!(body, "{sql}\n;");
        }
    }
    if parameters.is_empty() {
        return None;
    }
    let each =
        |one: &dyn Fn(usize) -> String, between: &str| (0..parameters.len()).map(one).collect::<Vec<_>>().join(between);
    let given = each(&|number| format!("${}::text[]::text", number + 2), ", ");
    let declared = each(&|number| format!("oncebox_value_{number} text;"), " ");
    let names = each(&|number| format!("oncebox_value_{number}"), ", ");
    let columns = each(&|number| format!("value_{number}"), ", ");
    let arrays = each(
        &|number| format!("pg_catalog.unnest(pg_catalog.current_setting('oncebox.values_{number}')::text[])"),
        ", ",
    );
    // Names of columns come before our variables. `RAISE` keeps what we show of an error, and the
    // hint tells the message; the handler of the block is one savepoint for all messages. A limit
    // of time is that of all messages: which of them was running says nothing, so it is not caught.
    let block = format!(
        "
#variable_conflict use_column
declare
  oncebox_at bigint := 0; {declared} oncebox_row record; oncebox_code text; oncebox_text text;
begin
  for oncebox_at, {names} in
    select place, {columns} from rows from ({arrays}) with ordinality given ({columns}, place) order by place
  loop
{body}  end loop;
exception when others or assert_failure then
  get stacked diagnostics oncebox_code = returned_sqlstate, oncebox_text = message_text;
  raise exception using errcode = oncebox_code, message = oncebox_text, hint = '{AT}' || oncebox_at;
end "
    );
    let quote = (0..).map(|number| format!("$oncebox{number}$")).find(|quote| !block.contains(quote))?;
    let (run, block) = (format!("select oncebox.run_block($1, array[{given}])"), format!("do {quote}{block}{quote}"));
    Some(PostgresSet { run: String::leak(run), block: String::leak(block), parameters })
}

/// Begins the hint of an error in a block; the number of the message follows, counted from 1.
const AT: &str = "oncebox message ";

/// The index of the message at which a block failed.
fn at(error: &sqlx::Error) -> Option<usize> {
    let error = error.as_database_error()?.try_downcast_ref::<PgDatabaseError>()?;
    error.hint()?.strip_prefix(AT)?.parse::<usize>().ok()?.checked_sub(1)
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
