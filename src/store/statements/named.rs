//! Finds `:name` in SQL, and only where it is a parameter: not in strings, names, comments, dollar
//! quotes, or after `:`.
//!
//! Promise: the pieces joined again, with `:name` for each parameter, are the statement as written.
//! Not here: the binding of values, which each database does.

use super::Dialect;

/// A piece of a statement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Piece {
    /// A part of the SQL, exactly as written.
    Text(String),
    /// A parameter by name.
    Param(String),
}

/// Splits a statement into its text and its parameters.
#[must_use]
pub(crate) fn split(sql: &str, dialect: Dialect) -> Vec<Piece> {
    let bytes = sql.as_bytes();
    let mut pieces = Vec::new();
    let (mut from, mut at) = (0, 0);
    while at < bytes.len() {
        if bytes[at] == b':' && starts_name(bytes, at + 1) && (at == 0 || bytes[at - 1] != b':') {
            let end = end_of_name(bytes, at + 1);
            if from < at {
                pieces.push(Piece::Text(sql[from..at].to_owned()));
            }
            pieces.push(Piece::Param(sql[at + 1..end].to_owned()));
            (from, at) = (end, end);
        } else {
            at = end_of_token(bytes, at, dialect);
        }
    }
    if from < bytes.len() {
        pieces.push(Piece::Text(sql[from..].to_owned()));
    }
    pieces
}

/// The names of the parameters, in order; a name that stands twice comes twice.
pub(crate) fn names(pieces: &[Piece]) -> impl Iterator<Item = &String> {
    pieces.iter().filter_map(|piece| match piece {
        Piece::Param(name) => Some(name),
        Piece::Text(_) => None,
    })
}

/// The statement, with what `parameter` returns in place of each parameter. `parameter` gets the
/// number, counted from 1, and the name.
pub(crate) fn written<T: AsRef<str>>(pieces: &[Piece], mut parameter: impl FnMut(usize, &str) -> T) -> String {
    let (mut sql, mut number) = (String::new(), 0);
    for piece in pieces {
        match piece {
            Piece::Text(text) => sql.push_str(text),
            Piece::Param(name) => {
                number += 1;
                sql.push_str(parameter(number, name).as_ref());
            }
        }
    }
    sql
}

/// The first words of a statement that ends the transaction that it runs in, or begins another one,
/// by command or because the database commits before it runs the statement. None where there is no
/// such statement; savepoints are allowed. A procedure that commits inside is not detected.
#[must_use]
pub(crate) fn ends_transaction(sql: &str, dialect: Dialect) -> Option<String> {
    statements(sql, dialect).into_iter().find_map(|words| {
        let word = |at: usize| words.get(at).map_or("", String::as_str);
        let ends = match (word(0), word(1)) {
            ("ROLLBACK", "TO") => false,
            ("ROLLBACK", "WORK" | "TRANSACTION") => word(2) != "TO",
            ("COMMIT" | "ROLLBACK" | "BEGIN" | "START" | "END" | "ABORT", _) | ("PREPARE", "TRANSACTION") => true,
            (first, second) => dialect == Dialect::MySql && commits_by_itself(first, second, &words),
        };
        ends.then(|| words.iter().take(2).cloned().collect::<Vec<_>>().join(" "))
    })
}

/// The first word of a statement, in capitals.
#[must_use]
pub(crate) fn first_word(sql: &str, dialect: Dialect) -> Option<String> {
    statements(sql, dialect).into_iter().next()?.into_iter().next()
}

/// Whether MySQL and MariaDB commit before they run this statement.
fn commits_by_itself(first: &str, second: &str, words: &[String]) -> bool {
    match (first, second) {
        ("SET", "PASSWORD") => true,
        ("SET", _) => words.iter().any(|word| word == "AUTOCOMMIT"),
        ("CREATE" | "DROP", "TEMPORARY") => false,
        // MariaDB also analyses a query, which commits nothing.
        ("ANALYZE" | "OPTIMIZE" | "REPAIR" | "CHECK", _) => {
            matches!(second, "TABLE" | "TABLES" | "LOCAL" | "NO_WRITE_TO_BINLOG" | "VIEW")
        }
        ("LOAD", second) => second == "INDEX",
        (first, _) => matches!(
            first,
            "ALTER"
                | "CACHE"
                | "CHANGE"
                | "CREATE"
                | "DROP"
                | "FLUSH"
                | "GRANT"
                | "IMPORT"
                | "INSTALL"
                | "LOCK"
                | "PURGE"
                | "RENAME"
                | "RESET"
                | "REVOKE"
                | "STOP"
                | "TRUNCATE"
                | "UNINSTALL"
                | "UNLOCK"
                | "XA"
        ),
    }
}

/// The words of each statement, in capitals. Strings, quoted names and comments are left out,
/// except comments that MySQL executes (`/*! .. */`).
fn statements(sql: &str, dialect: Dialect) -> Vec<Vec<String>> {
    let bytes = sql.as_bytes();
    let (mut all, mut words, mut at) = (Vec::new(), Vec::new(), 0);
    while at < bytes.len() {
        let runs = dialect == Dialect::MySql && (bytes[at..].starts_with(b"/*!") || bytes[at..].starts_with(b"/*M!"));
        if runs {
            let opened = find(bytes, at, b"!");
            at = opened + bytes[opened..].iter().take_while(|byte| byte.is_ascii_digit()).count();
            continue;
        }
        let end = end_of_token(bytes, at, dialect);
        match bytes[at] {
            b';' => all.push(std::mem::take(&mut words)),
            byte if byte.is_ascii_alphanumeric() || byte == b'_' => words.push(sql[at..end].to_ascii_uppercase()),
            _ => {}
        }
        at = end;
    }
    all.push(words);
    all
}

fn starts_name(bytes: &[u8], at: usize) -> bool {
    bytes.get(at).is_some_and(|byte| byte.is_ascii_alphabetic() || *byte == b'_')
}

fn end_of_name(bytes: &[u8], at: usize) -> usize {
    let word = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
    at + bytes[at..].iter().take_while(|byte| word(byte)).count()
}

/// The end of the token that begins here: a whole string, name, comment or word, otherwise one
/// byte.
fn end_of_token(bytes: &[u8], at: usize, dialect: Dialect) -> usize {
    let next = bytes.get(at + 1).copied();
    match bytes[at] {
        b'\'' => end_of_quoted(bytes, at, b'\'', dialect == Dialect::MySql || is_escape_string(bytes, at, dialect)),
        b'"' => end_of_quoted(bytes, at, b'"', dialect == Dialect::MySql),
        b'`' if dialect != Dialect::Postgres => end_of_quoted(bytes, at, b'`', false),
        b'[' if dialect == Dialect::Sqlite => find(bytes, at + 1, b"]"),
        b'-' if next == Some(b'-') => find(bytes, at, b"\n"),
        b'#' if dialect == Dialect::MySql => find(bytes, at, b"\n"),
        b'/' if next == Some(b'*') => end_of_comment(bytes, at, dialect == Dialect::Postgres),
        b'$' if dialect == Dialect::Postgres => end_of_dollar_quote(bytes, at),
        byte if byte.is_ascii_alphanumeric() || byte == b'_' => end_of_word(bytes, at),
        _ => at + 1,
    }
}

/// A word may hold `$` (PostgreSQL names), which then begins no dollar quote.
fn end_of_word(bytes: &[u8], at: usize) -> usize {
    let word = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(*byte, b'_' | b'$');
    at + bytes[at..].iter().take_while(|byte| word(byte)).count()
}

/// `E'..'`, where the `E` is a word of its own.
fn is_escape_string(bytes: &[u8], at: usize, dialect: Dialect) -> bool {
    dialect == Dialect::Postgres
        && at > 0
        && bytes[at - 1].eq_ignore_ascii_case(&b'e')
        && (at == 1 || !(bytes[at - 2].is_ascii_alphanumeric() || bytes[at - 2] == b'_'))
}

fn end_of_quoted(bytes: &[u8], at: usize, quote: u8, backslash: bool) -> usize {
    let mut at = at + 1;
    while at < bytes.len() {
        if backslash && bytes[at] == b'\\' {
            at += 2;
        } else if bytes[at] == quote {
            if bytes.get(at + 1) == Some(&quote) {
                at += 2;
            } else {
                return at + 1;
            }
        } else {
            at += 1;
        }
    }
    bytes.len()
}

fn find(bytes: &[u8], at: usize, end: &[u8]) -> usize {
    let found = bytes[at..].windows(end.len()).position(|window| window == end);
    found.map_or(bytes.len(), |found| at + found + end.len())
}

fn end_of_comment(bytes: &[u8], at: usize, nested: bool) -> usize {
    let (mut at, mut depth) = (at + 2, 1);
    while at < bytes.len() {
        match &bytes[at..bytes.len().min(at + 2)] {
            b"*/" => {
                depth -= 1;
                at += 2;
                if depth == 0 {
                    return at;
                }
            }
            b"/*" if nested => {
                depth += 1;
                at += 2;
            }
            _ => at += 1,
        }
    }
    bytes.len()
}

fn end_of_dollar_quote(bytes: &[u8], at: usize) -> usize {
    let tag_end = end_of_name(bytes, at + 1);
    let is_tag = bytes.get(tag_end) == Some(&b'$') && !bytes.get(at + 1).is_some_and(u8::is_ascii_digit);
    if is_tag { find(bytes, tag_end + 1, &bytes[at..=tag_end]) } else { at + 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(sql: &str, dialect: Dialect) -> Vec<String> {
        super::names(&split(sql, dialect)).cloned().collect()
    }

    #[test]
    fn a_parameter_is_found_only_where_it_is_one() {
        let sql = "insert into t values (:a, ':b', \":c\", :d::int /* :f */) -- :g\n, :h";
        assert_eq!(names(sql, Dialect::Postgres), ["a", "d", "h"]);
        assert_eq!(names("select $$ :a $$, $t$ :b $t$, :c, a$b, '::' || :d", Dialect::Postgres), ["c", "d"]);
        assert_eq!(names(r"select E'\' :a', 'x\', :b", Dialect::Postgres), ["b"]);
        assert_eq!(names("select /* /* :a */ :b */ :c", Dialect::Postgres), ["c"]);
        assert_eq!(names(r"select '\' :a', `:b`, :c # :d", Dialect::MySql), ["c"]);
        assert_eq!(names("select [:a], `:b`, :c -- :d", Dialect::Sqlite), ["c"]);
        assert_eq!(names("select '12:30', a::text, :x_1, 'it''s :y'", Dialect::Sqlite), ["x_1"]);
    }

    #[test]
    fn a_statement_that_ends_its_transaction_is_told_by_its_first_words() {
        let all = [Dialect::Postgres, Dialect::MySql, Dialect::Sqlite];
        for (sql, words) in [
            ("commit", "COMMIT"),
            ("  -- a note\n/* and one */ Rollback;", "ROLLBACK"),
            ("begin immediate", "BEGIN IMMEDIATE"),
            ("start transaction read only", "START TRANSACTION"),
            ("END", "END"),
            ("abort", "ABORT"),
            ("prepare transaction 'x'", "PREPARE TRANSACTION"),
            ("insert into t values (:a); commit", "COMMIT"),
            ("commit and chain", "COMMIT AND"),
            ("rollback work", "ROLLBACK WORK"),
        ] {
            for dialect in all {
                assert_eq!(ends_transaction(sql, dialect).as_deref(), Some(words), "{sql} {dialect:?}");
            }
        }
        for sql in [
            "insert into begin_of (commit, text) values (:commit, 'commit; rollback')",
            "update t set \"end\" = 1 -- commit\n where a = :a",
            "select case when a then 1 end from t",
            "savepoint s",
            "rollback to savepoint s",
            "rollback transaction to s",
            "release savepoint s",
            "prepare p as select 1",
            "with a as (select 1) insert into t select * from a",
            "",
        ] {
            for dialect in all {
                assert_eq!(ends_transaction(sql, dialect), None, "{sql} {dialect:?}");
            }
        }
        assert_eq!(ends_transaction("select $$ x; commit $$", Dialect::Postgres), None);
        assert_eq!(ends_transaction("do $$ begin end $$", Dialect::Postgres), None);
    }

    #[test]
    fn what_mysql_commits_by_itself_ends_a_transaction_there_and_nowhere_else() {
        for sql in [
            "truncate table t",
            "create table t (a int)",
            "alter table t add b int",
            "drop table t",
            "lock tables t write",
            "unlock tables",
            "set autocommit = 1",
            "set session autocommit = 0",
            "set @@autocommit = 0",
            "set password = 'x'",
            "/*!40000 commit */",
            "/*M!100100 truncate t */",
            "analyze table t",
            "xa begin 'a'",
            "grant select on t to u",
        ] {
            assert!(ends_transaction(sql, Dialect::MySql).is_some(), "{sql}");
        }
        for sql in [
            "create temporary table t (a int)",
            "drop temporary table t",
            "set @autocommitted = 1",
            "set names utf8mb4",
            "analyze select 1",
            "load data infile 'x' into table t",
            "replace into t (a) values (:a)",
            "/* commit */ delete from t",
            "call p(:a)",
        ] {
            assert_eq!(ends_transaction(sql, Dialect::MySql), None, "{sql}");
        }
        for sql in ["truncate t", "create table t (a int)", "lock table t in share mode"] {
            assert_eq!(ends_transaction(sql, Dialect::Postgres), None, "{sql}");
        }
    }

    #[test]
    fn the_pieces_are_the_statement() {
        let sql = "update ä set b = :b where c = ':x' and d = :d;";
        assert_eq!(written(&split(sql, Dialect::Sqlite), |_, name| format!(":{name}")), sql);
    }
}
