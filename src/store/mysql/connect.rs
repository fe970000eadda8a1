//! Connections: TLS, session settings, and their state when they come back to the pool.
//!
//! Guarantees: a host that is not loopback is verified unless the URL names another mode (sqlx
//! alone would continue in plain text); every connection runs READ COMMITTED, strict, in UTC, with
//! server-side timeouts a little above the handler's (R28); a connection that returns to the pool
//! is rolled back and set up again, so that nothing of one handler reaches the next (R23). User
//! variables are what stays: no statement of either server forgets them.

use std::str::FromStr;
use std::time::Duration;

use sqlx::mysql::{MySqlConnectOptions, MySqlConnection, MySqlSslMode};
use sqlx::{AssertSqlSafe, Executor, MySql};

use super::MySqlStore;
use crate::error::{StoreError, redact};
use crate::store::base::StoreOptions;
use crate::store::bounded::hosts::Hosts;
use crate::store::bounded::rest::RESTS_MAX;
use crate::store::bounded::{BoundedPool, lock_wait, pool_options};
use crate::text::hosts::each;
use crate::text::loopback::is_loopback;

/// Connects once, and makes the pool.
pub(super) async fn connect(options: &StoreOptions) -> Result<MySqlStore, StoreError> {
    options.check()?;
    let mut hosts = hosts(options)?;
    let connect_options = hosts.choose().await?.clone();
    let are_several = hosts.are_several();
    let timeouts = Timeouts::above(options.handler_timeout);
    let answer_timeout = options.answer_timeout.unwrap_or(timeouts.answer);
    let session = session_settings(&timeouts);
    let (at_connect, at_release) = (format!("{session}{REMEMBER_ROLE}"), format!("rollback; {session}"));
    let reset = reset(&connect_options);
    let pool = pool_options(options.connections_max, answer_timeout, Some(at_release), &hosts)
        .after_connect(move |connection: &mut MySqlConnection, _| {
            let session = at_connect.clone();
            Box::pin(async move {
                connection.execute(AssertSqlSafe(session)).await?;
                Hosts::<MySql>::refuse_standby(are_several, connection).await
            })
        })
        .connect_lazy_with(connect_options);
    let lock_wait = lock_wait(options.handler_timeout);
    let statement_max = timeouts.statement;
    Ok(MySqlStore {
        pool: BoundedPool::new(pool, answer_timeout, timeouts.rests(), reset, hosts),
        lock_wait,
        statement_max,
    })
}

/// Reads the hosts out of the URL.
fn hosts(options: &StoreOptions) -> Result<Hosts<MySql>, StoreError> {
    let shown = redact(&options.url);
    let mut hosts = Vec::new();
    for url in each(&options.url).map_err(|why| StoreError::Refused(format!("`{shown}`: {why}")))? {
        let one = connect_options(&shown, &url, options)?;
        let name = url::Url::parse(&url)
            .ok()
            .and_then(|url| Some(format!("{}:{}", url.host_str()?, url.port().unwrap_or(3306))));
        hosts.push((name.unwrap_or_default(), one));
    }
    Ok(Hosts::new(hosts))
}

/// The options to reach one of the hosts. `shown` is the URL of all, without the password.
fn connect_options(shown: &str, text: &str, options: &StoreOptions) -> Result<MySqlConnectOptions, StoreError> {
    let refused = |what: String| StoreError::Refused(what);
    let url = url::Url::parse(text).map_err(|error| refused(format!("`{shown}` is no URL: {error}")))?;
    if url.scheme() != "mysql" {
        return Err(refused(format!("`{shown}` is no mysql:// URL")));
    }
    if url.path().trim_matches('/').is_empty() {
        return Err(refused(format!("`{shown}` names no database: mysql://USER@HOST/DATABASE")));
    }
    // The error of sqlx may contain a part of the URL, so it is not shown.
    let mut found = MySqlConnectOptions::from_str(text)
        .map_err(|_| refused(format!("`{shown}` has an option that is not understood")))?
        // The SQL mode stays the server's, with strict mode added: see `session_settings`.
        .pipes_as_concat(false)
        .no_engine_substitution(false)
        .timezone(Some("+00:00".to_owned()));
    let says = url.query_pairs().find(|(name, _)| matches!(&**name, "ssl-mode" | "sslmode")).map(|(_, mode)| mode);
    if says.is_none() && (!is_local(&url) || options.ca_file.is_some()) {
        found = found.ssl_mode(MySqlSslMode::VerifyIdentity);
    }
    if let Some(file) = &options.ca_file {
        if says.is_some_and(|mode| !mode.to_ascii_uppercase().starts_with("VERIFY_")) {
            return Err(refused(format!(
                "`{shown}` verifies no certificate: `ca_file` is for ssl-mode=VERIFY_IDENTITY"
            )));
        }
        found = found.ssl_ca(file);
    }
    Ok(found)
}

/// Whether nothing lies between us and the server: a loopback host, or a socket file.
fn is_local(url: &url::Url) -> bool {
    url.query_pairs().any(|(name, _)| name == "socket") || url.host_str().is_none_or(is_loopback)
}

/// Timeouts in ascending order. The server drops the connection of a frozen process, and so its
/// locks, before others give up waiting for these locks; and those give up before they conclude
/// that the server does not answer (R28).
struct Timeouts {
    /// How long a statement in a consumer's handler may run, where the server can end it (MariaDB).
    /// Longer than the handler, so that the handler's own timeout comes first and is reported.
    statement: Duration,
    /// How long the server waits for the next statement.
    wait: Duration,
    /// How long a statement waits for a lock.
    lock_wait: Duration,
    /// The answer timeout, unless the options set one.
    answer: Duration,
}

impl Timeouts {
    fn above(handler_timeout: Duration) -> Self {
        let handler = handler_timeout.max(Duration::from_secs(1));
        let seconds = |more| handler + Duration::from_secs(more);
        Self { statement: seconds(5), wait: seconds(15), lock_wait: seconds(30), answer: seconds(35) }
    }

    /// How long a connection rests in the pool: neither the server nor a firewall takes it for
    /// dead.
    fn rests(&self) -> Duration {
        (self.wait / 2).min(RESTS_MAX)
    }
}

/// The settings of every connection, in one packet. They override the server's defaults and the
/// changes of a handler.
fn session_settings(timeouts: &Timeouts) -> String {
    let (wait, lock_wait) = (timeouts.wait.as_secs(), timeouts.lock_wait.as_secs());
    format!(
        "set session transaction isolation level read committed; \
         set session autocommit = 1, completion_type = 0, time_zone = '+00:00', \
         sql_mode = (select concat(@@global.sql_mode, ',STRICT_ALL_TABLES')), \
         wait_timeout = {wait}, innodb_lock_wait_timeout = {lock_wait}, lock_wait_timeout = {lock_wait} \
         /*M! , max_statement_time = default */"
    )
}

/// MariaDB cannot return to the default role of a user, only to a role by its name; MySQL can do
/// neither where the server makes all roles active.
const REMEMBER_ROLE: &str = "; set @oncebox_role = current_role()";

/// Undoes what a handler changed of its session besides the settings above. The last statement
/// fails where something stays that cannot be undone: a temporary table hides the table of its
/// name from every handler that comes after, and neither server can list those of a session; and
/// which roles a login of MySQL makes active, no statement can repeat. Then the connection is
/// closed.
fn reset(options: &MySqlConnectOptions) -> String {
    let database = options.get_database().unwrap_or_default().replace('`', "``");
    let collation = options.get_collation().map(|name| format!(" collate {name}")).unwrap_or_default();
    let charset = options.get_charset();
    format!(
        "use `{database}`; set names {charset}{collation}; \
         set session foreign_key_checks = default, unique_checks = default, sql_select_limit = default, \
         sql_safe_updates = default, sql_big_selects = default, group_concat_max_len = default, timestamp = default, \
         div_precision_increment = default, default_week_format = default, lc_time_names = default, \
         auto_increment_increment = default, auto_increment_offset = default; \
         /*M! set session check_constraint_checks = default */ /*!80000 do 0 */; \
         set session transaction read write; \
         /*M! execute immediate concat('set role ', ifnull(concat('`', replace(@oncebox_role, '`', '``'), '`'), 'none')) */ \
         /*!80000 do 0 */; \
         do release_all_locks(); unlock tables; \
         select (select 1 union all select 2 from \
         /*M! information_schema.session_status where variable_name = 'Com_create_temporary_table' */ \
         /*!80000 performance_schema.session_status where variable_name = 'Com_create_table' */ \
         and variable_value <> '0' \
         /*!80000 union all select 3 from dual where not (current_role() <=> @oncebox_role) */)"
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use sqlx::ConnectOptions;

    use super::*;

    fn of(options: &StoreOptions) -> Result<MySqlConnectOptions, StoreError> {
        connect_options(&redact(&options.url), &options.url, options)
    }

    fn ssl_mode(url: &str) -> String {
        mode_of(&StoreOptions::new(url)).unwrap()
    }

    fn mode_of(options: &StoreOptions) -> Result<String, StoreError> {
        let url = of(options)?.to_url_lossy();
        Ok(url.query_pairs().find(|(name, _)| name == "ssl-mode").map(|(_, value)| value.into_owned()).unwrap())
    }

    // The server's timeouts are the handler's and some seconds. Shown by: no check (the addition
    // panics).
    #[tokio::test]
    async fn a_timeout_that_no_instant_reaches_is_refused_by_its_name() {
        let handler_timeout = Duration::MAX;
        let options = StoreOptions { handler_timeout, ..StoreOptions::new("mysql://localhost/x") };
        let error = connect(&options).await.unwrap_err().to_string();
        assert!(error.contains("`handler_timeout` must be at most 100 years"), "{error}");
    }

    // Shown by: half of `wait` alone, which is half an hour for handlers of an hour.
    #[test]
    fn r28_a_connection_rests_for_three_minutes_at_most_however_long_handlers_may_run() {
        let rests = |handler_timeout| Timeouts::above(Duration::from_secs(handler_timeout)).rests();
        assert_eq!((rests(30), rests(3_600)), (Duration::from_millis(22_500), RESTS_MAX));
    }

    // Shown to fail by keeping the TLS mode where the host is loopback: then the authority was not
    // used.
    #[test]
    fn an_authority_is_given_to_be_verified() {
        let with_ca = |url: &str| mode_of(&StoreOptions { ca_file: Some("ca.pem".into()), ..StoreOptions::new(url) });
        assert_eq!(with_ca("mysql://app@localhost/x").unwrap(), "VERIFY_IDENTITY");
        assert_eq!(with_ca("mysql://app@h/x?ssl-mode=verify_ca").unwrap(), "VERIFY_CA");
        for mode in ["DISABLED", "PREFERRED", "REQUIRED"] {
            let error = with_ca(&format!("mysql://app@h/x?ssl-mode={mode}")).unwrap_err().to_string();
            assert!(error.contains("verifies no certificate"), "{error}");
        }
    }

    #[test]
    fn hosts_that_cannot_be_meant_are_refused() {
        for url in ["mysql://app:s3cret@a,,b/x", "mysql://app:s3cret@a:1,b:x/x"] {
            let error = hosts(&StoreOptions::new(url)).err().unwrap().to_string();
            assert!(error.starts_with("refused") && !error.contains("s3cret"), "{error}");
        }
        assert!(hosts(&StoreOptions::new("mysql://a,b:1/x")).unwrap().are_several());
    }

    #[test]
    fn s1_a_host_that_is_not_loopback_is_verified_unless_the_url_says_otherwise() {
        assert_eq!(ssl_mode("mysql://app:x@db.example/app"), "VERIFY_IDENTITY");
        assert_eq!(ssl_mode("mysql://app:x@192.0.2.1:3306/app"), "VERIFY_IDENTITY");
        assert_eq!(ssl_mode("mysql://app:x@db.example/app?ssl-mode=VERIFY_CA"), "VERIFY_CA");
        for host in ["localhost", "LocalHost", "127.0.0.1", "127.8.8.8", "[::1]"] {
            assert_eq!(ssl_mode(&format!("mysql://app:x@{host}/app")), "PREFERRED", "{host}");
        }
    }

    #[test]
    fn a_url_that_cannot_be_used_is_refused_without_its_password() {
        for url in ["mysql://app:s3cret@h", "mysql://app:s3cret@h/db?ssl-mode=s3cret", "postgres://app:s3cret@h/db"] {
            let error = of(&StoreOptions::new(url)).unwrap_err().to_string();
            assert!(!error.contains("s3cret@") && error.starts_with("refused"), "{error}");
        }
    }
}
