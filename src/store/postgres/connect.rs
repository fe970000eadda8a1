//! Connections: verified TLS, and the session settings that the promises need.
//!
//! Guarantees: to a host that is not loopback the certificate and the name are verified unless the
//! URL says otherwise; a frozen process does not block others for long, because the server ends its
//! transaction (R28). [`crate::store::bounded`] keeps a frozen server from blocking this process.

use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgSslMode};
use sqlx::{AssertSqlSafe, ConnectOptions, Executor, PgConnection, Postgres};

use super::PostgresStore;
use crate::error::{StoreError, redact};
use crate::store::base::StoreOptions;
use crate::store::bounded::hosts::Hosts;
use crate::store::bounded::rest::RESTS_MAX;
use crate::store::bounded::{BoundedPool, pool_options};
use crate::text::hosts::each;
use crate::text::loopback::is_loopback;

/// The server's timeouts are the handler timeout plus this. The answer timeout, unless it is set,
/// is the server's timeout plus this.
const MARGIN: Duration = Duration::from_secs(5);
/// Begins a transaction with the isolation of the session.
pub(super) const BEGIN: &str = "begin";

/// Connects once, and makes the pool.
pub(super) async fn connect(options: &StoreOptions) -> Result<PostgresStore, StoreError> {
    options.check()?;
    let mut hosts = hosts(options)?;
    let connect = hosts.choose().await?.clone();
    let are_several = hosts.are_several();
    let settings = session_settings(options.handler_timeout);
    let answer_timeout = options.answer_timeout.unwrap_or(server_timeout(options.handler_timeout) + MARGIN);
    let reset = format!("{RESET} {settings}");
    let pool = pool_options(options.connections_max, answer_timeout, None, &hosts)
        .after_connect(move |connection: &mut PgConnection, _| {
            let settings = settings.clone();
            Box::pin(async move {
                connection.execute(AssertSqlSafe(settings)).await?;
                Hosts::<Postgres>::refuse_standby(are_several, connection).await
            })
        })
        .connect_lazy_with(connect);
    let pool = BoundedPool::new(pool, answer_timeout, RESTS_MAX, reset, hosts);
    Ok(PostgresStore {
        pool,
        handler_timeout: options.handler_timeout,
        inbox_look_at: Arc::default(),
        attaches: Arc::default(),
    })
}

impl PostgresStore {
    /// How long the server lets a session be idle inside a transaction, or wait for a lock.
    pub(super) fn server_timeout(&self) -> Duration {
        server_timeout(self.handler_timeout)
    }
}

fn server_timeout(handler_timeout: Duration) -> Duration {
    handler_timeout + MARGIN
}

/// Reads the hosts out of the URL.
fn hosts(options: &StoreOptions) -> Result<Hosts<Postgres>, StoreError> {
    let refused = |why: &str| StoreError::Refused(format!("the database URL {}: {why}", redact(&options.url)));
    let mut hosts = Vec::new();
    for url in each(&options.url).map_err(refused)? {
        let one = connect_options(&options.url, &url, options)?;
        hosts.push((format!("{}:{}", one.get_host(), one.get_port()), one));
    }
    Ok(Hosts::new(hosts))
}

/// The parameters of a URL that sqlx reads, besides the mode of TLS.
const PARAMETERS: [&str; 16] = [
    "application_name",
    "dbname",
    "host",
    "hostaddr",
    "options",
    "password",
    "port",
    "ssl-ca",
    "ssl-cert",
    "ssl-key",
    "ssl-root-cert",
    "sslcert",
    "sslkey",
    "sslrootcert",
    "statement-cache-capacity",
    "user",
];

/// The options to reach one of the hosts. `shown` is the URL of all, for errors.
fn connect_options(shown: &str, url: &str, options: &StoreOptions) -> Result<PgConnectOptions, StoreError> {
    let refused = |why: String| StoreError::Refused(format!("the database URL {} {why}", redact(shown)));
    if !(url.starts_with("postgres://") || url.starts_with("postgresql://")) {
        return Err(refused("is not of the form postgres://USER:PASSWORD@HOST:PORT/DATABASE".to_owned()));
    }
    let mut connect = PgConnectOptions::from_str(url).map_err(|error| refused(format!("cannot be read: {error}")))?;
    let query = url::Url::parse(url).map_err(|error| refused(format!("cannot be read: {error}")))?;
    let mut says_tls = false;
    for (name, value) in query.query_pairs() {
        match &*name {
            "sslmode" | "ssl-mode" => says_tls = true,
            "host" | "hostaddr" | "port" if value.contains(',') => {
                return Err(refused(
                    "has several hosts in its query: write postgres://A:5432,B:5432/DATABASE".to_owned(),
                ));
            }
            // Of several hosts one that takes writes is used, whatever the URL says.
            "target_session_attrs" if matches!(&*value, "primary" | "read-write") => {}
            "target_session_attrs" => {
                return Err(refused(format!(
                    "asks for `{value}`: only a server that takes writes can be used; leave it out"
                )));
            }
            name if PARAMETERS.contains(&name) || name.starts_with("options[") => {}
            // Its value may be a secret.
            name => tracing::warn!(name, "a parameter of the database URL is not known, and does nothing"),
        }
    }
    let host = connect.get_host();
    let is_local = connect.get_socket().is_some() || host.starts_with('/') || is_loopback(host);
    if !says_tls && (!is_local || options.ca_file.is_some()) {
        connect = connect.ssl_mode(PgSslMode::VerifyFull);
    }
    if let Some(file) = &options.ca_file {
        if !matches!(connect.get_ssl_mode(), PgSslMode::VerifyCa | PgSslMode::VerifyFull) {
            return Err(refused(
                "verifies no certificate: `ca_file` needs sslmode=verify-full or verify-ca".to_owned(),
            ));
        }
        connect = connect.ssl_root_cert(file);
    }
    if connect.get_application_name().is_none() {
        connect = connect.application_name("oncebox");
    }
    Ok(connect.disable_statement_logging())
}

/// The settings of every pooled connection, in one round trip. The server's limits for an idle
/// transaction and for a lock are a little above the handler timeout, so that the server ends the
/// transaction of a process that froze or whose host vanished (R28). It gives up a connection that
/// acknowledges nothing after at most 30 seconds.
fn session_settings(handler_timeout: Duration) -> String {
    let server_timeout = server_timeout(handler_timeout);
    let timeout = server_timeout.as_millis();
    let user_timeout = Duration::from_secs(30).min(server_timeout).as_millis();
    format!(
        "set default_transaction_isolation = 'read committed';
         set default_transaction_read_only = off;
         set idle_in_transaction_session_timeout = {timeout};
         set lock_timeout = {timeout};
         {KEEPALIVE}
         set tcp_user_timeout = {user_timeout};
         {CHECK_CLIENT}
         {SYNCHRONOUS}"
    )
}

/// The server closes the connection of a host that vanished.
pub(super) const KEEPALIVE: &str =
    "set tcp_keepalives_idle = 10; set tcp_keepalives_interval = 5; set tcp_keepalives_count = 3;";

/// As `discard all`, but prepared statements and their plans stay, because sqlx remembers them.
const RESET: &str = "close all; reset session authorization; reset role; reset all; unlisten *;
    select pg_advisory_unlock_all(); discard temp; discard sequences;";

/// The server checks during a statement whether its client is still connected, where its platform
/// can. Without this, the statement of a killed process would go on and keep its locks.
const CHECK_CLIENT: &str = "do $$ begin
     perform set_config('client_connection_check_interval', '5s', false);
   exception when others then null; end $$;";

/// Makes commits durable, for the session or for the transaction.
macro_rules! synchronous {
    ($for_transaction:literal) => {
        concat!(
            "select set_config('synchronous_commit', 'on', ",
            $for_transaction,
            ") where current_setting('synchronous_commit') not in ('on', 'remote_apply')"
        )
    };
}
#[cfg(feature = "duties")]
pub(super) use synchronous;

/// Commits must survive a crash before anything is acknowledged for them. A stricter setting of the
/// server stays.
pub(super) const SYNCHRONOUS: &str = synchronous!("false");

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn of(url: &str) -> Result<PgConnectOptions, StoreError> {
        connect_options(url, url, &StoreOptions::new(url))
    }

    fn ssl_mode(url: &str) -> PgSslMode {
        of(url).unwrap().get_ssl_mode()
    }

    // The server's timeouts are the handler's and some seconds. Shown by: no check (the addition
    // panics).
    #[tokio::test]
    async fn a_timeout_that_no_instant_reaches_is_refused_by_its_name() {
        let handler_timeout = Duration::MAX;
        let options = StoreOptions { handler_timeout, ..StoreOptions::new("postgres://localhost/x") };
        let error = connect(&options).await.unwrap_err().to_string();
        assert!(error.contains("`handler_timeout` must be at most 100 years"), "{error}");
    }

    // Shown to fail by keeping the TLS mode where the host is loopback: then the CA file was not
    // used.
    #[test]
    fn a_ca_file_is_given_to_verify_with() {
        let with_ca = |url: &str| {
            let options = StoreOptions { ca_file: Some("ca.pem".into()), ..StoreOptions::new(url) };
            connect_options(url, url, &options)
        };
        assert!(matches!(with_ca("postgres://app@localhost/x").unwrap().get_ssl_mode(), PgSslMode::VerifyFull));
        assert!(matches!(with_ca("postgres://h/x?sslmode=verify-ca").unwrap().get_ssl_mode(), PgSslMode::VerifyCa));
        for mode in ["disable", "allow", "prefer", "require"] {
            let error = with_ca(&format!("postgres://app@h/x?sslmode={mode}")).unwrap_err().to_string();
            assert!(error.contains("verifies no certificate"), "{error}");
        }
    }

    #[test]
    fn hosts_that_cannot_be_meant_are_refused() {
        for (url, why) in [
            ("postgres://app:s3cret@a,,b/x", "a host between commas is empty"),
            ("postgres://app:s3cret@a:1,b:x/x", "invalid port number"),
            ("postgres://app:s3cret@h/x?host=a,b", "several hosts in its query"),
            ("postgres://app:s3cret@a,b/x?target_session_attrs=any", "only a server that takes writes"),
        ] {
            let error = hosts(&StoreOptions::new(url)).err().unwrap().to_string();
            assert!(error.contains(why) && !error.contains("s3cret"), "{error}");
        }
        assert!(hosts(&StoreOptions::new("postgres://a,b:1/x?target_session_attrs=read-write")).unwrap().are_several());
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
            let error = of(url).unwrap_err().to_string();
            assert!(error.contains("refused") && !error.contains("s3cret"), "{error}");
        }
    }
}
