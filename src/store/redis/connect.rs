//! The connection to Redis, and the checks of the server before it is used.
//!
//! Guarantees: a connection that failed, or did not answer in time, is never used again. The next
//! call makes a new one and checks its server again, which may be another one (failover, DNS).
//! In time is the answer timeout, or for a ping as long as its caller waits.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, FromRedisValue, RedisError, Script, TlsCertificates};

use super::{RedisKeys, RedisOptions};
use crate::error::{StoreError, redact};

/// A connection whose server was checked. Clones share it.
#[derive(Clone)]
pub(super) struct Trusted {
    connection: MultiplexedConnection,
    /// Set once it is not to be used again. Other calls may still wait for answers on it.
    is_left: Arc<AtomicBool>,
}

/// A ping that is not answered yet. Dropped, its connection is not used again.
struct Unanswered<'c>(&'c AtomicBool);

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl RedisKeys {
    /// Connects, and refuses a server that may lose keys while it runs.
    ///
    /// # Errors
    /// [`StoreError::Refused`]: its `maxmemory_policy` is not `noeviction`, it is a replica or a
    /// cluster, or the URL or the password is wrong. [`StoreError::Unavailable`]: it does not
    /// answer.
    ///
    /// # Cancel safety
    /// Safe: nothing was written.
    pub async fn connect(options: RedisOptions) -> Result<Self, StoreError> {
        let client = client(&options)?;
        let keys = Self { client, options: Arc::new(options), connection: Arc::default() };
        keys.connection().await?;
        Ok(keys)
    }

    /// Checks the server again. Call it at any time, because settings can change while the server
    /// runs.
    ///
    /// # Errors
    /// As [`RedisKeys::connect`].
    pub async fn check(&self) -> Result<(), StoreError> {
        self.with(async |used| self.trust(&mut used.connection).await).await?
    }

    /// Asks the server what it is. The inner error says why it is refused.
    async fn trust(&self, connection: &mut MultiplexedConnection) -> Result<Result<(), StoreError>, RedisError> {
        for (section, field, wanted, why) in [
            ("memory", "maxmemory_policy", "noeviction", "it may evict a claim while its request runs"),
            ("replication", "role", "master", "a replica's view is late, and it takes no writes"),
            ("cluster", "cluster_enabled", "0", "the scripts name keys of several slots"),
        ] {
            let info: String = redis::cmd("INFO").arg(section).query_async(connection).await?;
            let found = info.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
            if found != Some(wanted) {
                let (found, server) = (found.unwrap_or("nothing"), redact(&self.options.url));
                let why = format!("{server} says {field}:{found}, not {wanted}: {why}");
                return Ok(Err(StoreError::Refused(why)));
            }
        }
        Ok(Ok(()))
    }

    /// Pings the server. Dropped before the answer, the connection is not used again: TCP may need
    /// a quarter of an hour to notice that its server is gone.
    pub(super) async fn ping(&self) -> Result<(), StoreError> {
        self.with(async |used| {
            let unanswered = Unanswered(&used.is_left);
            let answer = redis::cmd("PING").query_async(&mut used.connection).await;
            std::mem::forget(unanswered);
            answer
        })
        .await
    }

    /// Runs a script on the server. After a lost connection it is unknown whether the script ran.
    pub(super) async fn call<T: FromRedisValue>(
        &self,
        script: &Script,
        keys: &[String],
        arguments: &[Vec<u8>],
    ) -> Result<T, StoreError> {
        let mut invocation = script.prepare_invoke();
        for key in keys {
            invocation.key(key);
        }
        for argument in arguments {
            invocation.arg(argument);
        }
        self.with(async |used| invocation.invoke_async(&mut used.connection).await).await
    }

    async fn with<T>(&self, work: impl AsyncFnOnce(&mut Trusted) -> Result<T, RedisError>) -> Result<T, StoreError> {
        let mut used = self.connection().await?;
        let done = work(&mut used).await;
        if done.as_ref().is_err_and(|error| is_lost(error) || error.code() == Some(REPLICA)) {
            used.is_left.store(true, Ordering::Relaxed);
        }
        done.map_err(|error| self.store_error(&error))
    }

    /// The connection of all calls, made anew where the last one was left.
    async fn connection(&self) -> Result<Trusted, StoreError> {
        let mut slot = self.connection.lock().await;
        slot.take_if(|kept| kept.is_left.load(Ordering::Relaxed));
        if let Some(kept) = &*slot {
            return Ok(kept.clone());
        }
        let timeout = Some(self.options.answer_timeout);
        let config = AsyncConnectionConfig::new().set_connection_timeout(timeout).set_response_timeout(timeout);
        let made = self.client.get_multiplexed_async_connection_with_config(&config).await;
        let mut connection = made.map_err(|error| self.store_error(&error))?;
        self.trust(&mut connection).await.map_err(|error| self.store_error(&error))??;
        Ok(slot.insert(Trusted { connection, is_left: Arc::default() }).clone())
    }

    /// Maps an error of Redis. After a lost connection it is unknown whether the script ran.
    fn store_error(&self, error: &RedisError) -> StoreError {
        /// The server is reachable but cannot serve now.
        const WAIT: [&str; 9] =
            [REPLICA, "LOADING", "MASTERDOWN", "OOM", "BUSY", "MISCONF", "NOREPLICAS", "TRYAGAIN", "CLUSTERDOWN"];
        let server = format!("Redis at {}", redact(&self.options.url));
        // The text of rustls; the client keeps nothing else of that error.
        if error.to_string().contains("invalid peer certificate") {
            return StoreError::Refused(format!(
                "the certificate of {server} is not trusted ({error}); set `ca_file` to its authority, and use the host \
                 name that stands in it"
            ));
        }
        // Redis says WRONGPASS, but the client does not pass it on.
        if error.kind() == redis::ErrorKind::AuthenticationFailed {
            return StoreError::Refused(format!(
                "{server} refuses the user or the password in the URL ({error}): correct them"
            ));
        }
        if matches!(error.kind(), redis::ErrorKind::UnexpectedReturnType | redis::ErrorKind::Parse) {
            return StoreError::Corrupt(format!("an answer of {server}: {error}"));
        }
        let said = format!("{server}: {error}");
        match error.code() {
            Some("NOAUTH") => StoreError::Refused(format!("{server} asks for a password: put it into the URL")),
            Some("WRONGPASS" | "NOPERM") => StoreError::Refused(said),
            Some(code) if WAIT.contains(&code) => StoreError::Unavailable(sqlx::Error::Io(std::io::Error::other(said))),
            _ if is_lost(error) => StoreError::Unavailable(sqlx::Error::Io(std::io::Error::other(said))),
            _ => StoreError::Other(sqlx::Error::Protocol(said)),
        }
    }
}

/// The client for the URL. With `ca_file`, the server must show a certificate of its authorities.
fn client(options: &RedisOptions) -> Result<Client, StoreError> {
    let url = options.url.as_str();
    let refused = |why: String| StoreError::Refused(format!("{}: {why}", redact(url)));
    let said = |error: RedisError| refused(error.to_string());
    let host = url.split(['/', '?', '#']).nth(2).unwrap_or_default();
    if host.rsplit('@').next().unwrap_or_default().contains(',') {
        return Err(refused(
            "one host is used, the primary; neither a cluster nor Sentinel is asked for it".to_owned(),
        ));
    }
    if url.ends_with("#insecure") {
        return Err(refused("`#insecure` would verify no certificate".to_owned()));
    }
    let Some(file) = &options.ca_file else { return Client::open(url).map_err(said) };
    if !url.starts_with("rediss://") {
        return Err(refused("`ca_file` is for TLS: use `rediss://` in the URL".to_owned()));
    }
    let unread = |error: std::io::Error| refused(format!("ca_file {}: {error}", file.display()));
    let tls = TlsCertificates { client_tls: None, root_cert: Some(std::fs::read(file).map_err(unread)?) };
    Client::build_with_tls(url, tls).map_err(said)
}

/// What a replica says to a write. A primary that becomes one keeps its connections, so without a
/// new connection the name would never lead to the new primary.
const REPLICA: &str = "READONLY";

/// Whether the connection cannot be used again.
fn is_lost(error: &RedisError) -> bool {
    error.is_io_error() || error.is_unrecoverable_error()
}
