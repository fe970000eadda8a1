//! Connections: verified TLS, and the session settings that the promise rests on.
//!
//! Guarantees: to a host that is not loopback the certificate and the name are verified unless the URL says otherwise; a frozen
//! process does not wedge others, because the server ends its transaction (R28). That a frozen server does not wedge this process
//! is the promise of [`crate::store::bounded`].

use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgSslMode};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, Executor, PgConnection, Postgres};

use super::PostgresStore;
use crate::error::{StoreError, redact};
use crate::store::StoreOptions;
use crate::store::bounded::{Bounded, BoundedPool, pool_options};

/// What the server-side timeouts stand above the handler timeout, and the answer timeout above them.
const MARGIN: Duration = Duration::from_secs(5);
/// Begins a transaction; the isolation is the session's.
pub(super) const BEGIN: &str = "begin";

/// How long the first connection may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Connects once, to find out what is wrong at once, and makes the pool: a pool asks a server that refuses connections again
/// and again for 30 s, and then says only that time is up.
pub(super) async fn connect(options: &StoreOptions) -> Result<PostgresStore, StoreError> {
    let connect = connect_options(options)?;
    let timed_out = |_| StoreError::Unavailable(sqlx::Error::PoolTimedOut);
    let connecting = async { connect.connect().await?.close().await };
    tokio::time::timeout(CONNECT_TIMEOUT, connecting).await.map_err(timed_out)??;
    let settings = session_settings(options.handler_timeout);
    let answer_timeout = options.answer_timeout.unwrap_or(options.handler_timeout + 2 * MARGIN);
    let reset = format!("{RESET} {settings}");
    let pool = pool_options(options.connections_max, answer_timeout)
        .after_connect(move |connection: &mut PgConnection, _| {
            let settings = settings.clone();
            Box::pin(async move { connection.execute(AssertSqlSafe(settings)).await.map(drop) })
        })
        .connect_lazy_with(connect);
    let pool = BoundedPool::new(pool, answer_timeout, Some(reset));
    Ok(PostgresStore {
        pool,
        handler_timeout: options.handler_timeout,
        inbox_look_at: Arc::default(),
        attaches: Arc::default(),
    })
}

impl PostgresStore {
    /// A connection inside a transaction.
    pub(super) async fn transaction(&self) -> Result<Bounded<Postgres>, StoreError> {
        Ok(self.pool.begin(BEGIN).await?)
    }

    /// A connection of its own, out of the pool: a relay session must not share it, nor give it back.
    pub(super) async fn dedicated(&self) -> Result<Bounded<Postgres>, StoreError> {
        Ok(self.pool.dedicated().await?)
    }

    /// How long the server lets a session be idle inside a transaction, or wait for a lock.
    pub(super) fn server_timeout(&self) -> Duration {
        self.handler_timeout + MARGIN
    }
}

fn connect_options(options: &StoreOptions) -> Result<PgConnectOptions, StoreError> {
    let url = &options.url;
    let refused = |why: String| StoreError::Refused(format!("the database URL {} {why}", redact(url)));
    if !(url.starts_with("postgres://") || url.starts_with("postgresql://")) {
        return Err(refused("is not of the form postgres://USER:PASSWORD@HOST:PORT/DATABASE".to_owned()));
    }
    let mut connect = PgConnectOptions::from_str(url).map_err(|error| refused(format!("cannot be read: {error}")))?;
    let says_tls = url::Url::parse(url)
        .is_ok_and(|url| url.query_pairs().any(|(name, _)| matches!(name.as_ref(), "sslmode" | "ssl-mode")));
    if !says_tls && connect.get_socket().is_none() && !is_loopback(connect.get_host()) {
        connect = connect.ssl_mode(PgSslMode::VerifyFull);
    }
    if let Some(file) = &options.ca_file {
        connect = connect.ssl_root_cert(file);
    }
    if connect.get_application_name().is_none() {
        connect = connect.application_name("oncebox");
    }
    Ok(connect.disable_statement_logging())
}

fn is_loopback(host: &str) -> bool {
    let address = host.trim_start_matches('[').trim_end_matches(']');
    host.starts_with('/')
        || host.eq_ignore_ascii_case("localhost")
        || address.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// What every pooled connection sets, in one round trip. Timeouts stand just above the handler timeout, so that a process that
/// froze inside a transaction, or whose host vanished, is ended by the server (R28).
fn session_settings(handler_timeout: Duration) -> String {
    let timeout = (handler_timeout + MARGIN).as_millis();
    let user_timeout = Duration::from_secs(30).min(handler_timeout + MARGIN).as_millis();
    format!(
        "set default_transaction_isolation = 'read committed';
         set default_transaction_read_only = off;
         set idle_in_transaction_session_timeout = {timeout};
         set lock_timeout = {timeout};
         set tcp_keepalives_idle = 10; set tcp_keepalives_interval = 5; set tcp_keepalives_count = 3;
         set tcp_user_timeout = {user_timeout};
         {CHECK_CLIENT}
         {SYNCHRONOUS}"
    )
}

/// What `discard all` does, except that it leaves prepared statements: sqlx remembers them.
const RESET: &str = "close all; reset session authorization; reset role; reset all; unlisten *;
    select pg_advisory_unlock_all(); discard temp; discard sequences;";

/// The server looks while a statement runs whether its client is still there, where its platform can: without it the statement of
/// a process that was killed goes on, with its locks.
const CHECK_CLIENT: &str = "do $$ begin
     perform set_config('client_connection_check_interval', '5s', false);
   exception when others then null; end $$;";

/// What is committed must survive a crash before anything is acknowledged for it; a stricter setting of the server stays.
pub(super) const SYNCHRONOUS: &str = "select set_config('synchronous_commit', 'on', false)
   where current_setting('synchronous_commit') not in ('on', 'remote_apply')";

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn ssl_mode(url: &str) -> PgSslMode {
        connect_options(&StoreOptions::new(url)).unwrap().get_ssl_mode()
    }

    #[test]
    fn s1_a_host_that_is_not_loopback_is_verified_unless_the_url_says_otherwise() {
        for url in
            ["postgres://app@db.example.com/x", "postgresql://app@10.0.0.1:5432/x", "postgres://app@[2001:db8::1]/x"]
        {
            assert!(matches!(ssl_mode(url), PgSslMode::VerifyFull), "{url}");
        }
        for url in ["postgres://app@localhost/x", "postgres://app@127.0.0.2/x", "postgres://app@[::1]/x"] {
            assert!(matches!(ssl_mode(url), PgSslMode::Prefer), "{url}");
        }
        assert!(matches!(ssl_mode("postgres://app@db.example.com/x?sslmode=require"), PgSslMode::Require));
    }

    #[test]
    fn a_url_that_cannot_be_read_is_refused_without_its_password() {
        for url in ["mysql://app:s3cret@localhost/x", "postgres://app:s3cret@localhost:port/x"] {
            let error = connect_options(&StoreOptions::new(url)).unwrap_err().to_string();
            assert!(error.contains("refused") && !error.contains("s3cret"), "{error}");
        }
    }
}
