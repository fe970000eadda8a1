//! Redis as a guard for requests that may run twice (O25): it suppresses duplicates while one
//! primary keeps its data.
//!
//! Promises:
//!
//! * Every change is one script, so no script sees half of another's claim, fence or outcome. The
//!   scripts of the owner compare its token, 128 random bits, and the epoch. The token alone
//!   releases a claim whose answer was lost.
//! * The lease is a field, judged by the server's `TIME`. A claim does not disappear when its lease
//!   ends, and a record that runs or is unknown has no time to live. With an outcome, a record
//!   lives as long as the retention says.
//! * Epochs come from one counter without a time to live, so none is given twice while the data is
//!   kept. They mean nothing outside of this store.
//! * A server that may evict keys, or is a replica, is refused at start. A server that is away
//!   gives no answer about duplicates: the call fails with
//!   [`StoreError::Unavailable`](crate::error::StoreError::Unavailable), and nothing runs.
//!
//! A failover that loses a write loses a claim. So only routes of mode `edge` whose effects are
//! declared repeatable are accepted. It must be one primary, not a cluster: the scripts use keys of
//! several slots.
//!
//! Not here: outcomes that must not be lost (`postgres`, `mysql`, `sqlite`).

mod connect;
mod operations;
mod scripts;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use redis::Client;
use tokio::sync::Mutex;

use self::connect::Trusted;
use crate::error::redact;

/// How to reach Redis, and the prefix of its keys.
#[derive(Clone)]
pub struct RedisOptions {
    /// `redis://[user:password@]host:port[/database]`, `rediss://` for TLS, whose certificate is
    /// always verified.
    pub url: String,
    /// A PEM file of certificate authorities to trust instead of the system's.
    pub ca_file: Option<PathBuf>,
    /// The prefix of every key. Another prefix is another store. Default `oncebox`.
    pub prefix: String,
    /// How long the server may take to answer. Default 2 s.
    pub answer_timeout: Duration,
}

impl RedisOptions {
    /// Options with defaults for this URL.
    #[must_use]
    pub fn new(url: impl Into<String>) -> Self {
        let (url, prefix) = (url.into(), "oncebox".to_owned());
        Self { url, ca_file: None, prefix, answer_timeout: Duration::from_secs(2) }
    }
}

impl std::fmt::Debug for RedisOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RedisOptions({}, {})", redact(&self.url), self.prefix)
    }
}

/// Idempotency records in Redis. Clones share the connection.
#[derive(Clone)]
pub struct RedisKeys {
    client: Client,
    options: Arc<RedisOptions>,
    connection: Arc<Mutex<Option<Trusted>>>,
}

impl std::fmt::Debug for RedisKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RedisKeys({:?})", self.options)
    }
}
