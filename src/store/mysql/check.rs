//! Checks settings of server and schema that the promises need, before a program starts and in
//! `oncebox doctor`.
//!
//! Functions over plain values judge the server's version and variables, so that tests also cover
//! servers which they cannot have.

pub(super) mod positions;

use std::collections::HashMap;

use sqlx::MySql;

use super::without_transactions;
use crate::error::{StoreError, classify, words};
use crate::observe::Finding;
use crate::store::bounded::{Ask, Bounded};
use crate::store::schema::LOST_AT_FAILOVER;

/// Above what the largest message of the default limits needs: 900,000 bytes go out as 1.2 MB of
/// base64, with their envelope.
const PACKET_BYTES_MIN: u64 = 4 * 1024 * 1024;
/// Old row versions that the server has not purged yet; each costs the read of the relay a little
/// (R11).
const PURGE_LAG_MAX: i64 = 250_000;

/// Which routines of the SQL door exist.
#[derive(Debug, Clone, Copy)]
pub(super) struct Routines {
    pub(super) procedure: bool,
    pub(super) function: bool,
}

impl Routines {
    pub(super) async fn read(connection: &mut Bounded<MySql>) -> Result<Self, StoreError> {
        let (procedures, functions): (i64, i64) = sqlx::query_as(
            "select count(case when routine_type = 'PROCEDURE' and routine_name = 'oncebox_enqueue_p' then 1 end), \
                    count(case when routine_type = 'FUNCTION' and routine_name = 'oncebox_enqueue' then 1 end) \
               from information_schema.routines where routine_schema = database()",
        )
        .one(connection)
        .await?;
        Ok(Self { procedure: procedures > 0, function: functions > 0 })
    }
}

/// Checks the server, also before the schema exists, and returns one finding for each subject.
pub(super) async fn of_server(connection: &mut Bounded<MySql>) -> Result<Vec<Finding>, StoreError> {
    let version: String = sqlx::query_scalar("select version()").one(&mut *connection).await?;
    let global = Variables::read(connection, "show global variables").await?;
    let session = Variables::read(connection, "show session variables").await?;
    let mut findings = vec![
        server(&version),
        isolation(&session),
        binlog(&global, &session),
        increment(&global, &session),
        galera(&global),
        strict(&session),
        durability(&global),
        binlog_durability(&global),
        packet(&global),
        read_only(&global),
    ];
    let readers: i64 =
        sqlx::query_scalar("select count(*) from information_schema.processlist where command like 'Binlog Dump%'")
            .one(&mut *connection)
            .await?;
    findings.push(replicas(&global, readers));
    findings.extend(purge_lag(connection).await);
    Ok(findings)
}

/// Checks what is in the database of a schema that exists.
pub(super) async fn of_schema(connection: &mut Bounded<MySql>, routines: Routines) -> Result<Vec<Finding>, StoreError> {
    let mut findings = engines(connection).await?;
    findings.push(rights(connection).await?);
    findings.push(door(routines));
    findings.push(triggers(connection).await?);
    findings.push(positions::look(connection).await?);
    Ok(findings)
}

/// The server's variables by lower-case name. Names differ between servers and versions.
struct Variables(HashMap<String, String>);

impl Variables {
    async fn read(connection: &mut Bounded<MySql>, statement: &'static str) -> Result<Self, StoreError> {
        let rows: Vec<(String, String)> = sqlx::query_as(statement).all(connection).await?;
        Ok(Self(rows.into_iter().map(|(name, value)| (name.to_lowercase(), value)).collect()))
    }

    fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    fn is_on(&self, name: &str) -> bool {
        self.get(name).is_some_and(|value| !matches!(value, "OFF" | "0"))
    }
}

fn server(version: &str) -> Finding {
    let numbers: Vec<u32> = version.split(|c: char| !c.is_ascii_digit()).take(3).flat_map(str::parse).collect();
    let is_mariadb = version.to_lowercase().contains("mariadb");
    let (name, needed) = if is_mariadb { ("MariaDB", &[10, 6][..]) } else { ("MySQL", &[8, 0, 19][..]) };
    if numbers.as_slice() >= needed {
        return Finding::ok("server version", format!("{name} {version}"));
    }
    Finding::refused(
        "server version",
        format!("{name} {version} lacks JSON_TABLE, SKIP LOCKED or DROP CONSTRAINT"),
        "use MySQL 8.0.19 or later, or MariaDB 10.6 or later",
    )
}

fn isolation(session: &Variables) -> Finding {
    let level = session.get("transaction_isolation").or_else(|| session.get("tx_isolation")).unwrap_or("unknown");
    if level == "READ-COMMITTED" {
        return Finding::ok("isolation", "READ COMMITTED");
    }
    Finding::refused(
        "isolation",
        format!("the session runs at {level}; at REPEATABLE READ the relay blocks the application's inserts"),
        "let no proxy change `transaction isolation level` of the sessions of oncebox",
    )
}

fn binlog(global: &Variables, session: &Variables) -> Finding {
    if !global.is_on("log_bin") {
        return Finding::ok("binary log", "off");
    }
    for (scope, variables) in [("global", global), ("session", session)] {
        if variables.get("binlog_format") == Some("STATEMENT") {
            return Finding::refused(
                "binary log",
                format!("binlog_format is STATEMENT ({scope}): READ COMMITTED cannot write under it"),
                "set global binlog_format = 'ROW' (or 'MIXED'), also in the server's configuration",
            );
        }
    }
    Finding::ok("binary log", global.get("binlog_format").unwrap_or("ROW"))
}

fn increment(global: &Variables, session: &Variables) -> Finding {
    for (scope, variables) in [("global", global), ("session", session)] {
        let increment = variables.get("auto_increment_increment").unwrap_or("1");
        if increment != "1" {
            return Finding::refused(
                "auto_increment",
                format!("auto_increment_increment is {increment} ({scope}): positions are not in the order of time"),
                "set global auto_increment_increment = 1; more than one writing server is not supported",
            );
        }
    }
    let mode = global.get("innodb_autoinc_lock_mode").unwrap_or("unknown");
    Finding::ok(
        "auto_increment",
        format!("increment 1, innodb_autoinc_lock_mode {mode}: every mode draws positions in order"),
    )
}

fn galera(global: &Variables) -> Finding {
    if global.is_on("wsrep_on") {
        return Finding::refused(
            "replication",
            "wsrep_on: a Galera cluster can lose committed transactions and draws positions on several servers",
            "use a single primary server with asynchronous or semi-synchronous replicas",
        );
    }
    Finding::ok("replication", "one primary server")
}

/// Asynchronous replicas: one that is promoted lacks the primary's last commits. `readers` counts
/// those that this account may see.
fn replicas(global: &Variables, readers: i64) -> Finding {
    if global.is_on("rpl_semi_sync_source_enabled") || global.is_on("rpl_semi_sync_master_enabled") {
        return Finding::ok("replicas", "semi-synchronous");
    }
    if readers == 0 {
        return Finding::ok(
            "replicas",
            "none that this account sees is connected (with the right PROCESS it sees all)",
        );
    }
    Finding::warning(
        "replicas",
        format!("{readers} connected, asynchronous: {LOST_AT_FAILOVER}"),
        "switch semi-synchronous replication on, with a timeout that is longer than any failover",
    )
}

fn strict(session: &Variables) -> Finding {
    let mode = session.get("sql_mode").unwrap_or_default();
    if mode.split(',').any(|mode| mode == "STRICT_ALL_TABLES") {
        return Finding::ok("sql_mode", mode.to_owned());
    }
    Finding::refused(
        "sql_mode",
        format!("the session is not strict (`{mode}`): a value that is too long is shortened without a word"),
        "let no proxy change `sql_mode` of the sessions of oncebox",
    )
}

fn durability(global: &Variables) -> Finding {
    match global.get("innodb_flush_log_at_trx_commit") {
        Some("1") => Finding::ok("durability", "innodb_flush_log_at_trx_commit = 1"),
        other => Finding::warning(
            "durability",
            format!(
                "innodb_flush_log_at_trx_commit is {}: after a crash a message may have been published whose transaction is gone",
                other.unwrap_or("unknown")
            ),
            "set global innodb_flush_log_at_trx_commit = 1",
        ),
    }
}

fn binlog_durability(global: &Variables) -> Finding {
    let sync = global.get("sync_binlog").unwrap_or("1");
    if !global.is_on("log_bin") || sync == "1" {
        return Finding::ok("binary log durability", "commits survive a crash of the machine");
    }
    Finding::warning(
        "binary log durability",
        format!(
            "sync_binlog is {sync}: after a crash of the machine, commits that the binary log misses are rolled back"
        ),
        "set global sync_binlog = 1",
    )
}

fn packet(global: &Variables) -> Finding {
    let bytes = global.get("max_allowed_packet").and_then(|bytes| bytes.parse().ok()).unwrap_or(0_u64);
    if bytes >= PACKET_BYTES_MIN {
        return Finding::ok("max_allowed_packet", format!("{bytes} bytes"));
    }
    Finding::warning(
        "max_allowed_packet",
        format!("{bytes} bytes: a message of the largest size, or many in one call, may not fit"),
        format!("set global max_allowed_packet = {PACKET_BYTES_MIN} or more"),
    )
}

fn read_only(global: &Variables) -> Finding {
    if global.is_on("read_only") || global.is_on("super_read_only") {
        return Finding::warning(
            "read_only",
            "the server takes no writes; everything waits",
            "connect to the primary server, or set global read_only = off",
        );
    }
    Finding::ok("read_only", "off")
}

/// A user that may only read cannot start a program. The statement changes no row.
async fn rights(connection: &mut Bounded<MySql>) -> Result<Finding, StoreError> {
    match sqlx::query("update oncebox_shard set shard_id = shard_id where 1 = 0").run(connection).await {
        Ok(_) => Ok(Finding::ok("rights", "the tables of oncebox may be written")),
        Err(error) if classify::needs_a_person(&error) => Ok(Finding::refused(
            "rights",
            words(&error),
            "grant all privileges on the database to this user (docs/guides/production.md, Rights)",
        )),
        // The finding `read_only` says that.
        Err(error) if classify::is_read_only(&error) => {
            Ok(Finding::ok("rights", "not tried: the server takes no writes"))
        }
        Err(error) => Err(error.into()),
    }
}

fn door(routines: Routines) -> Finding {
    if !routines.procedure {
        return Finding::warning(
            "SQL door",
            "the procedure oncebox_enqueue_p is not there, or this user may not see it: no service can enqueue by SQL",
            "run `oncebox migrate up`, which makes it again; a dump has it only with `mysqldump --routines`",
        );
    }
    if routines.function {
        return Finding::ok("SQL door", "the procedure oncebox_enqueue_p and the function oncebox_enqueue");
    }
    Finding::warning(
        "SQL door",
        "only the procedure oncebox_enqueue_p; the function oncebox_enqueue is not there",
        "where the function is wanted: set global log_bin_trust_function_creators = 1, then run `oncebox migrate up` again",
    )
}

async fn engines(connection: &mut Bounded<MySql>) -> Result<Vec<Finding>, StoreError> {
    let tables: Vec<(String, Option<String>)> = sqlx::query_as(
        "select table_name, engine from information_schema.tables \
         where table_schema = database() and left(table_name, 8) = 'oncebox_' and table_type = 'BASE TABLE' and engine <> 'InnoDB'",
    )
    .all(&mut *connection)
    .await?;
    let refuse = |(table, engine): (String, Option<String>)| {
        let engine = engine.unwrap_or_default();
        Finding::refused(
            "storage engine",
            format!("the table {table} stands in {engine}, which has no transactions"),
            format!("alter table {table} engine = InnoDB"),
        )
    };
    let mut findings: Vec<Finding> = match tables.is_empty() {
        true => vec![Finding::ok("storage engine", "InnoDB")],
        false => tables.into_iter().map(refuse).collect(),
    };
    let others: Vec<String> = sqlx::query_scalar(concat!(
        "select table_name from information_schema.tables \
             where table_schema = database() and left(table_name, 8) <> 'oncebox_' and ",
        without_transactions!(),
        " order by 1 limit 5"
    ))
    .all(connection)
    .await?;
    if !others.is_empty() {
        findings.push(Finding::warning(
            "tables without transactions",
            format!(
                "what a handler writes there is not undone with its inbox row, and may come twice: {}",
                others.join(", ")
            ),
            "alter table .. engine = InnoDB, for those that handlers write to",
        ));
    }
    Ok(findings)
}

/// Triggers on the tables of oncebox, which has none itself: they run in the transactions of the
/// relay and the consumers.
async fn triggers(connection: &mut Bounded<MySql>) -> Result<Finding, StoreError> {
    let found: Vec<String> = sqlx::query_scalar(
        "select trigger_name from information_schema.triggers \
         where event_object_schema = database() and left(event_object_table, 8) = 'oncebox_'",
    )
    .all(connection)
    .await?;
    Ok(match found.is_empty() {
        true => Finding::ok("triggers", "none on the tables of oncebox"),
        false => Finding::warning(
            "triggers",
            format!("somebody made triggers on the tables of oncebox: {}", found.join(", ")),
            "drop them: they run inside the relay's and the consumers' transactions",
        ),
    })
}

/// The purge lag, where this account may see it (PROCESS); else none.
async fn purge_lag(connection: &mut Bounded<MySql>) -> Option<Finding> {
    let lag: i64 = sqlx::query_scalar(
        "select cast(`count` as signed) from information_schema.innodb_metrics where name = 'trx_rseg_history_len'",
    )
    .optional(connection)
    .await
    .ok()
    .flatten()?;
    let detail = format!("{lag} old row versions wait to be purged");
    Some(match lag <= PURGE_LAG_MAX {
        true => Finding::ok("purge lag", detail),
        false => Finding::warning(
            "purge lag",
            format!("{detail}: every read of the relay passes over those of the outbox"),
            "end transactions that have been open for long (information_schema.innodb_trx), or raise innodb_purge_threads",
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::Severity;

    fn variables(pairs: &[(&str, &str)]) -> Variables {
        Variables(pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect())
    }

    #[test]
    fn r10_servers_that_are_too_old_are_refused() {
        for version in ["5.7.44-log", "8.0.18", "10.5.28-MariaDB-log", "5.5.5-10.4.1-MariaDB"] {
            assert_eq!(server(version).severity, Severity::Refused, "{version}");
        }
        for version in
            ["8.0.19", "8.0.36", "8.4.0", "9.1.0", "10.6.4-MariaDB", "10.11.19-MariaDB-0+deb12u1-log", "11.8.6-MariaDB"]
        {
            assert_eq!(server(version).severity, Severity::Ok, "{version}");
        }
    }

    #[test]
    fn asynchronous_replicas_are_told_with_what_a_failover_costs() {
        let on = variables(&[("rpl_semi_sync_master_enabled", "ON")]);
        let severities =
            [(&on, 2), (&variables(&[]), 0), (&variables(&[]), 1)].map(|(set, count)| replicas(set, count).severity);
        assert_eq!(severities, [Severity::Ok, Severity::Ok, Severity::Warning]);
    }

    #[test]
    fn r10_a_setting_that_breaks_the_cursor_is_refused_with_its_remedy() {
        let good = variables(&[("binlog_format", "ROW"), ("log_bin", "ON"), ("auto_increment_increment", "1")]);
        let statement = variables(&[("binlog_format", "STATEMENT"), ("log_bin", "ON")]);
        let two = variables(&[("auto_increment_increment", "2")]);
        let repeatable = variables(&[("transaction_isolation", "REPEATABLE-READ")]);
        let old_name = variables(&[("tx_isolation", "READ-COMMITTED")]);
        for finding in [
            binlog(&statement, &good),
            binlog(&good, &statement),
            increment(&two, &good),
            increment(&good, &two),
            isolation(&repeatable),
            strict(&variables(&[("sql_mode", "NO_ENGINE_SUBSTITUTION")])),
            galera(&variables(&[("wsrep_on", "ON")])),
        ] {
            assert_eq!(finding.severity, Severity::Refused, "{finding:?}");
            assert!(finding.remedy.is_some(), "{finding:?}");
        }
        for finding in [binlog(&good, &good), increment(&good, &good), isolation(&old_name), galera(&good)] {
            assert_eq!(finding.severity, Severity::Ok, "{finding:?}");
        }
    }

    #[test]
    fn r05_commits_that_a_crash_can_undo_are_reported() {
        let weak = variables(&[("innodb_flush_log_at_trx_commit", "2"), ("log_bin", "ON"), ("sync_binlog", "0")]);
        assert_eq!(durability(&weak).severity, Severity::Warning);
        assert_eq!(binlog_durability(&weak).severity, Severity::Warning);
        let strong = variables(&[("innodb_flush_log_at_trx_commit", "1"), ("log_bin", "ON"), ("sync_binlog", "1")]);
        assert_eq!(durability(&strong).severity, Severity::Ok);
        assert_eq!(binlog_durability(&strong).severity, Severity::Ok);
    }
}
