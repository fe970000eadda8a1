//! Classifies errors of sqlx: the only place that decides which errors are transient (R27).
//!
//! Promise: an unknown code becomes `Other` (or `Limit` if a limit is broken), which the runtime
//! counts as a failure of the message. The codes in the lists below are transient. Sources:
//! PostgreSQL appendix A (SQLSTATE), MariaDB and MySQL server error reference, SQLite result codes.
//! Not here: errors of brokers (`broker`), and codes that one adapter asks for at one statement
//! (`store`).

use std::borrow::Cow;

use sqlx::error::DatabaseError;

use super::{LimitError, StoreError};

/// The two ways in which an error can be transient.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Transient {
    Busy,
    Unavailable,
}

/// The code by which a database says what happened.
#[allow(dead_code, reason = "a build knows the codes of its own databases only")]
enum Code<'a> {
    /// The SQLSTATE of PostgreSQL.
    State(&'a str),
    /// The error number of MySQL or MariaDB, which says more than their SQLSTATE.
    MySql(u16),
    Sqlite(i32),
}

fn code(error: &dyn DatabaseError) -> Option<Code<'_>> {
    #[cfg(feature = "mysql")]
    if let Some(error) = error.try_downcast_ref::<sqlx::mysql::MySqlDatabaseError>() {
        return Some(Code::MySql(error.number()));
    }
    #[cfg(any(feature = "sqlite", feature = "embedded"))]
    if error.try_downcast_ref::<sqlx::sqlite::SqliteError>().is_some() {
        return error.code()?.parse().ok().map(Code::Sqlite);
    }
    match error.code()? {
        Cow::Borrowed(state) => Some(Code::State(state)),
        Cow::Owned(_) => None,
    }
}

fn code_of(error: &sqlx::Error) -> Option<Code<'_>> {
    error.as_database_error().and_then(code)
}

/// An error of a database, as it stands in another error.
#[derive(Debug, Clone, Copy)]
pub(super) enum OfDatabase<'a> {
    Store(&'a StoreError),
    Sql(&'a sqlx::Error),
    /// What `#[error(transparent)]` leaves of an error of sqlx: its source, if a database sent it.
    Said(&'a dyn DatabaseError),
}

impl<'a> OfDatabase<'a> {
    /// The first error of a database among an error and its sources.
    pub(super) fn find(error: &'a (dyn std::error::Error + 'static)) -> Option<Self> {
        std::iter::successors(Some(error), |error| error.source()).find_map(|error| {
            let sql = || error.downcast_ref().map(Self::Sql);
            let said = || error.downcast_ref::<Box<dyn DatabaseError>>().map(|said| Self::Said(said.as_ref()));
            error.downcast_ref().map(Self::Store).or_else(sql).or_else(said)
        })
    }

    pub(super) fn is_transient(self) -> bool {
        match self {
            Self::Store(error) => error.is_transient(),
            Self::Sql(error) => is_transient(error),
            Self::Said(said) => of_database(said).is_some(),
        }
    }
}

/// Whether the error is transient: a deadlock, a lock timeout, a lost connection, or a database
/// that is away, full or read-only.
#[must_use]
pub(crate) fn is_transient(error: &sqlx::Error) -> bool {
    transient(error).is_some()
}

/// The error of a connection that needs TLS. `is_built` says whether sqlx was built with it, by a
/// feature of ours or by one that the service asks of its own sqlx.
pub(super) fn of_tls(said: String, is_built: bool) -> String {
    if is_built {
        said
    } else {
        format!("{said}; add the feature `tls` of oncebox, or one of the features `tls-*` of sqlx")
    }
}

/// Whether the database says that a table, a function or the schema of oncebox is not there. A
/// partition is not meant (its name ends with a digit): it may have gone since its name was read.
pub(crate) fn is_schema_missing(error: &sqlx::Error) -> bool {
    let Some(database) = error.as_database_error() else { return false };
    let message = database.message();
    match code(database) {
        // Of a table, and of a procedure or function: `'shop.oncebox_outbox'`.
        Some(Code::MySql(1146 | 1305)) => message.contains(".oncebox_"),
        Some(Code::Sqlite(_)) => {
            let table = message.strip_prefix("no such table: ");
            table.is_some_and(|table| table.trim_start_matches("main.").starts_with("oncebox_"))
        }
        Some(Code::State("3F000")) => message.contains("\"oncebox\""),
        Some(Code::State("42883")) => message.contains(" oncebox."),
        Some(Code::State("42P01")) => message
            .split('"')
            .nth(1)
            .is_some_and(|name| name.starts_with("oncebox.") && !name.ends_with(|last: char| last.is_ascii_digit())),
        _ => false,
    }
}

const RIGHT: &str = "give the user of [database] url this right (docs/guides/production.md, Rights)";
const DATABASE: &str = "create this database first";
const PASSWORD: &str = "correct the user or the password in [database] url";

/// What to do about an error of a server that a person mends: a right, a password or the database
/// is missing. `None` for any other.
pub(super) fn remedy(error: &dyn DatabaseError) -> Option<&'static str> {
    match code(error)? {
        // Of a database, a table, a column, a global privilege, a routine.
        Code::State("42501") | Code::MySql(1044 | 1142 | 1143 | 1227 | 1370) => Some(RIGHT),
        Code::State("3D000") | Code::MySql(1049) => Some(DATABASE),
        Code::State("28P01") | Code::MySql(1045 | 1698) => Some(PASSWORD),
        Code::State("28000") => Some("let the user of [database] url in at the server: its role, and pg_hba.conf"),
        _ => None,
    }
}

/// What to do about an error: its [`remedy`], or where to look while programs wait for its end.
pub(super) fn advice(error: &dyn DatabaseError) -> Option<&'static str> {
    match code(error)? {
        Code::Sqlite(code) if code & 0xff == 14 => {
            Some("SQLite writes files beside it: look whether its directory is there and its disk can be written")
        }
        _ => remedy(error),
    }
}

/// Whether a person must mend something at the server before this can succeed.
#[cfg(any(feature = "programs", feature = "mysql"))]
pub(crate) fn needs_a_person(error: &sqlx::Error) -> bool {
    matches!(error, sqlx::Error::Database(database) if remedy(database.as_ref()).is_some())
}

/// Whether the server, or the user's share of it, has no connection left.
#[cfg(all(feature = "duties", any(feature = "postgres", feature = "mysql")))]
pub(crate) fn is_without_connections(error: &sqlx::Error) -> bool {
    matches!(code_of(error), Some(Code::State("53300") | Code::MySql(1040 | 1203 | 1226)))
}

/// The message and the code of a database, as one text.
pub(super) fn message_and_code(error: &dyn DatabaseError) -> String {
    let message = error.message();
    match code(error) {
        Some(Code::MySql(number)) => format!("{message} (error {number})"),
        Some(Code::Sqlite(code)) => format!("{message} (SQLite code {code})"),
        Some(Code::State(state)) => format!("{message} (SQLSTATE {state})"),
        None => message.to_owned(),
    }
}

/// The same for a text that already contains an error of sqlx.
pub(super) fn without_frame(text: String) -> String {
    const FRAME: &str = "error returned from database: ";
    let Some((before, said)) = text.split_once(FRAME) else { return text };
    // The text of MySQL and MariaDB begins with a number, that of SQLite with its code. A line at
    // the end of such a text is a line of the statement, so it stays.
    let is_postgres = !said.starts_with("(code: ") && !said.starts_with(|first: char| first.is_ascii_digit());
    let said = match said.rsplit_once(" at line ") {
        Some((words, line)) if is_postgres && line.bytes().all(|byte| byte.is_ascii_digit()) => words,
        _ => said,
    };
    format!("{before}{said}")
}

/// Whether the certificate is not trusted, or TLS is required and not offered. A person must act.
pub(crate) fn is_untrusted(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Tls(_) => true,
        sqlx::Error::Io(error) => is_untrusted_io(error),
        _ => false,
    }
}

/// Whether rustls refused the certificate. Its words are compared and not its type, because a
/// service may bring the rustls of its own sqlx where the feature `tls` is off.
pub(super) fn is_untrusted_io(error: &std::io::Error) -> bool {
    error.to_string().starts_with("invalid peer certificate")
}

/// Whether the connection or the database is gone for now.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) fn is_unavailable(error: &sqlx::Error) -> bool {
    transient(error) == Some(Transient::Unavailable)
}

/// Whether a COMMIT that failed so has certainly changed nothing: SQLite finds no room in the file,
/// or may not write to it, before the transaction is in its log, and rolls back. After its other
/// errors the log may have the transaction, for example where it was written and the sync failed.
pub(crate) fn is_commit_undone(error: &sqlx::Error) -> bool {
    matches!(code_of(error), Some(Code::Sqlite(code)) if matches!(code & 0xff, 8 | 13)) // READONLY, FULL
}

/// Whether the database takes no writes: a server that was the primary before a failover, or a
/// SQLite file that can only be read.
pub(crate) fn is_read_only(error: &sqlx::Error) -> bool {
    match code_of(error) {
        Some(Code::Sqlite(code)) => code & 0xff == 8,
        said => matches!(said, Some(Code::State("25006") | Code::MySql(1290 | 1836))),
    }
}

/// Whether one statement may have caused an error that looks like a database that is away: the
/// statement needed more memory or space than the server grants to one, or its connection ended.
/// False for a full disk and for a server that starts, stops or has no connection left, because
/// these are the same for all statements.
#[cfg(feature = "consumer")]
pub(crate) fn may_be_caused_by_the_statement(error: &sqlx::Error) -> bool {
    match error.as_database_error() {
        Some(said) => may_be_of_a_statement(said),
        None => matches!(error, sqlx::Error::Io(_) | sqlx::Error::Protocol(_)),
    }
}

#[cfg(feature = "consumer")]
pub(super) fn may_be_of_a_statement(error: &dyn DatabaseError) -> bool {
    match code(error) {
        Some(Code::State(state)) => state.starts_with("08") || matches!(state, "53000" | "53200" | "53400"),
        Some(Code::MySql(number)) => {
            matches!(number, 1037 | 1038 | 1041 | 1030 | 1114 | 1152 | 1158..=1161 | 2006 | 2013)
        }
        Some(Code::Sqlite(_)) | None => false,
    }
}

/// Whether a statement gave up waiting for a lock. The next try may wait as long.
#[cfg(feature = "consumer")]
pub(crate) fn is_lock_wait(error: &sqlx::Error) -> bool {
    error.as_database_error().is_some_and(says_lock_wait)
}

#[cfg(feature = "consumer")]
pub(super) fn says_lock_wait(error: &dyn DatabaseError) -> bool {
    matches!(code(error), Some(Code::State("55P03") | Code::MySql(1205)))
}

fn transient(error: &sqlx::Error) -> Option<Transient> {
    match error {
        sqlx::Error::Io(_) | sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed | sqlx::Error::WorkerCrashed => {
            Some(Transient::Unavailable)
        }
        // sqlx reports a protocol error when the server vanished in the middle of a packet.
        sqlx::Error::Protocol(_) => Some(Transient::Unavailable),
        sqlx::Error::Database(database) => of_database(database.as_ref()),
        _ => None,
    }
}

fn of_database(error: &dyn DatabaseError) -> Option<Transient> {
    match code(error)? {
        Code::State(state) => of_sqlstate(state),
        Code::MySql(number) => of_mysql(number),
        Code::Sqlite(code) => of_sqlite(code),
    }
}

fn of_sqlstate(code: &str) -> Option<Transient> {
    match code {
        "40001" | "40P01" | "55P03" => Some(Transient::Busy),
        // Server starting, stopping or crashed; session ended by an administrator or an idle
        // timeout; read-only transaction.
        "57P01" | "57P02" | "57P03" | "57P05" | "25006" => Some(Transient::Unavailable),
        // The idle-in-transaction timeout ended the session.
        "25P03" => Some(Transient::Unavailable),
        _ if code.starts_with("08") || code.starts_with("53") || code == "58030" => Some(Transient::Unavailable),
        _ => None,
    }
}

fn of_mysql(number: u16) -> Option<Transient> {
    match number {
        // Lock wait timeout, deadlock (also of XA and of group replication), too many locks, record
        // has changed since last read (MariaDB), interrupted by an administrator.
        1205 | 1213 | 1614 | 3101 | 1206 | 1020 | 1317 => Some(Transient::Busy),
        // Too many connections, out of memory, threads or transactions; host blocked; server
        // shutdown.
        1037 | 1038 | 1040 | 1041 | 1053 | 1129 | 1135 | 1203 | 1226 | 1637 => Some(Transient::Unavailable),
        // Table or disk full, storage engine out of order, read-only.
        1021 | 1030 | 1114 | 1223 | 1290 | 1792 | 1836 => Some(Transient::Unavailable),
        // Connection aborted, killed, idle for too long, gone.
        1152 | 1158..=1161 | 1184 | 1927 | 2006 | 2013 | 4031 => Some(Transient::Unavailable),
        _ => None,
    }
}

fn of_sqlite(code: i32) -> Option<Transient> {
    match code & 0xff {
        5 | 6 => Some(Transient::Busy),                   // SQLITE_BUSY, SQLITE_LOCKED
        8 | 10 | 13 | 14 => Some(Transient::Unavailable), // READONLY, IOERR, FULL, CANTOPEN
        _ => None,
    }
}

impl From<sqlx::Error> for StoreError {
    fn from(error: sqlx::Error) -> Self {
        match transient(&error) {
            Some(Transient::Busy) => Self::Busy(error),
            Some(Transient::Unavailable) => Self::Unavailable(error),
            None => match limit_of(&error) {
                Some(limit) => Self::Limit(limit),
                None => Self::Other(error),
            },
        }
    }
}

/// The SQL functions, procedures and triggers raise a broken limit as `oncebox: limit NAME:
/// detail`. This turns it into the same error as in Rust.
fn limit_of(error: &sqlx::Error) -> Option<LimitError> {
    let message = match error {
        sqlx::Error::Database(database) => database.message(),
        _ => return None,
    };
    let rest = &message[message.find("oncebox: limit ")? + "oncebox: limit ".len()..];
    let (limit, detail) = rest.split_once(": ")?;
    Some(LimitError::new(limit.to_owned(), detail.trim_end().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::words;

    // Shown to fail: by leaving the text unchanged; by removing the end of every text as a line.
    #[test]
    fn what_sqlx_writes_around_the_words_of_a_database_is_left_out_of_a_text_too() {
        for (text, words) in [
            ("error returned from database: division by zero at line 884", "division by zero"),
            (
                "debit: error returned from database: relation \"t\" does not exist at line 1449",
                "debit: relation \"t\" does not exist",
            ),
            ("error returned from database: 1064 (42000): near 'x' at line 1", "1064 (42000): near 'x' at line 1"),
            ("error returned from database: (code: 1) no such table: t", "(code: 1) no such table: t"),
            ("expected a value at line 3", "expected a value at line 3"),
        ] {
            assert_eq!(without_frame(text.to_owned()), words);
        }
    }

    // Shown by: the words of sqlx alone.
    #[test]
    fn s1_a_build_without_tls_says_which_feature_is_missing() {
        let said = || "SQLx was built without TLS support enabled".to_owned();
        assert_eq!(of_tls(said(), true), said());
        let words = of_tls(said(), false);
        assert!(words.starts_with(&said()) && words.contains("the feature `tls` of oncebox"), "{words}");
    }

    // Shown by: comparing the type, which this crate knows with the feature `tls` only.
    #[test]
    fn s1_a_certificate_that_is_not_trusted_is_recognised_whoever_brings_tls() {
        let io = |said: String| sqlx::Error::Io(std::io::Error::new(std::io::ErrorKind::InvalidData, said));
        let refused = io("invalid peer certificate: UnknownIssuer".to_owned());
        assert!(is_untrusted(&refused) && words(&refused).contains("set `ca_file`"), "{}", words(&refused));
        assert!(!is_untrusted(&io("received corrupt message".to_owned())));
    }

    // Shown by: other words of rustls than those that are compared.
    #[cfg(feature = "tls")]
    #[test]
    fn s1_rustls_says_so_in_the_words_that_are_compared() {
        let refused = rustls::Error::InvalidCertificate(rustls::CertificateError::UnknownIssuer);
        let refused = std::io::Error::new(std::io::ErrorKind::InvalidData, refused);
        assert!(is_untrusted(&sqlx::Error::Io(refused)));
    }

    #[test]
    fn the_codes_of_r27_are_transient_and_a_constraint_is_not() {
        for code in ["40001", "40P01", "55P03", "08006", "53100", "53300", "57P01", "25006"] {
            assert!(of_sqlstate(code).is_some(), "{code}");
        }
        for code in ["23505", "22P02", "42P01", "23514", "57014"] {
            assert!(of_sqlstate(code).is_none(), "{code}");
        }
    }

    #[test]
    fn the_numbers_of_r27_are_transient_and_a_duplicate_is_not() {
        assert!([1213, 1205, 1040, 1114, 1290, 4031].into_iter().all(|number| of_mysql(number).is_some()));
        // A statement that exceeds the server's time limit is the handler's own failure.
        assert!([1062, 1406, 1146, 3024, 1969].into_iter().all(|number| of_mysql(number).is_none()));
    }

    #[test]
    fn the_sqlite_codes_of_r27_are_transient_also_extended() {
        assert!([5, 517, 8, 10, 13, 778].into_iter().all(|code| of_sqlite(code).is_some()));
        assert!([19, 2067, 1].into_iter().all(|code| of_sqlite(code).is_none()));
    }
}
