//! What the commands share with the programs, and how data is printed.

use clap::builder::TypedValueParser;
use serde_json::Value;

use super::table::laid_out;
use oncebox::StoreError;
use oncebox::app::config::Settings;
pub(super) use oncebox::app::{AnyBroker, CommonArgs, run};
use oncebox::app::{AppError, say};
use oncebox::error::redact;
use oncebox::store::Schema;

/// Prints a line of data to stdout. If that fails, the command returns the error.
macro_rules! data {
    ($($argument:tt)*) => {{
        use std::io::Write as _;
        $crate::common::written(writeln!(std::io::stdout(), $($argument)*))?
    }};
}

/// Opens the store that the settings name, checks its schema, and runs a command on the object that
/// the second argument makes of it:
/// `on_store!(common, Store::into_duties, |store, settings| work(&*store, &settings).await)`.
macro_rules! on_store {
    ($common:expr, $object:expr, |$store:ident, $settings:ident| $body:expr) => {{
        let $settings = $common.load(None)?.settings;
        oncebox::with_store!(&$settings, None, |named| {
            $crate::common::require_schema(&named, &$settings).await?;
            let $store = $object(named.clone());
            let done = $body;
            oncebox::store::Base::close(&named).await;
            done
        })
    }};
}

/// Checks that the schema is the one that this program was built with.
pub(super) async fn require_schema<S: Schema>(store: &S, settings: &Settings) -> Result<(), AppError> {
    let required = store.require_schema().await;
    required.map_err(|error| {
        let is_missing = matches!(error, StoreError::SchemaMissing(_));
        let mut error = AppError::from(error).on(&redact(&settings.database.url.0));
        if is_missing {
            error.message +=
                "\nhint: if another database is meant, name it: --database, ONCEBOX_DATABASE__URL or [database] url";
        }
        error
    })
}

/// Returns the result of a printed line. That the reader is gone (`oncebox dead list | head`) is no
/// error: the command goes on, and its exit code is that of its work.
pub(super) fn written(line: std::io::Result<()>) -> Result<(), AppError> {
    match line {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(AppError::failed(format!("stdout cannot be written: {error}")))
        }
        _ => Ok(()),
    }
}

/// What is neither an error of a database nor of a broker, as the error of a command.
pub(super) fn failed(error: impl std::fmt::Display) -> AppError {
    AppError::failed(error.to_string())
}

/// How data is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub(super) enum Output {
    /// For people, as a table
    #[default]
    Table,
    /// For machines, as JSON
    Json,
}

/// Reads a `--limit`. It is at least 1, because 0 could mean nothing or everything.
pub(super) fn limit<T: TryFrom<u64> + Clone + Send + Sync + 'static>() -> impl TypedValueParser<Value = T> {
    |text: &str| {
        let number = text.parse::<u64>().ok().filter(|number| *number > 0);
        number.and_then(|number| T::try_from(number).ok()).ok_or("give a number, at least 1")
    }
}

/// Says that there may be more, where a list is as long as its limit.
pub(super) fn hint_of_more(found: usize, limit: usize) {
    if found >= limit {
        say("INFO", "hint: there may be more; see `--limit`");
    }
}

/// Shortens a list to its limit, and says how many of its entries were left out.
pub(super) fn bound<T>(list: &mut Vec<T>, limit: usize, of: &str) {
    if list.len() > limit {
        say("INFO", &format!("hint: {} more {of}; see `--limit`", list.len() - limit));
        list.truncate(limit);
    }
}

/// A text with its control characters escaped. A key, an id or an error comes from somebody else,
/// and must neither begin a line nor steer the terminal.
pub(super) fn printable(text: &str) -> String {
    escaped(text, |_| false)
}

/// The same for a text of several lines.
pub(super) fn printable_lines(text: &str) -> String {
    escaped(text, |c| matches!(c, '\n' | '\t'))
}

fn escaped(text: &str, stays: impl Fn(char) -> bool) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() && !stays(c) {
            shown.extend(c.escape_default());
        } else {
            shown.push(c);
        }
    }
    shown
}

/// Prints a list as JSON, or as a table with these rows.
pub(super) fn listed<const COLUMNS: usize>(
    output: Output,
    as_json: &Value,
    header: [&str; COLUMNS],
    rows: impl Iterator<Item = [String; COLUMNS]>,
) -> Result<(), AppError> {
    if output == Output::Table {
        return tabled(header, rows);
    }
    data!("{as_json}");
    Ok(())
}

/// Prints a table of texts that may come from anybody, as wide as the terminal; elsewhere every row
/// is one line.
pub(super) fn tabled<const COLUMNS: usize>(
    header: [&str; COLUMNS],
    rows: impl Iterator<Item = [String; COLUMNS]>,
) -> Result<(), AppError> {
    let rows: Vec<Vec<String>> = rows.map(|row| row.map(|cell| printable(&cell)).into()).collect();
    // An error means that it is no terminal, and 0 columns that it does not say how wide it is.
    let size = rustix::termios::tcgetwinsize(std::io::stdout());
    let width = size.ok().map(|size| usize::from(size.ws_col)).filter(|width| *width > 0);
    data!("{}", laid_out(&header, &rows, width));
    Ok(())
}

/// A value of JSON for people.
pub(super) fn plain(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => printable(text),
        other => other.to_string(),
    }
}
