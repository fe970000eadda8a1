//! A prefix of its own on the shared server.

use std::time::Duration;

use oncebox::store::redis::{RedisKeys, RedisOptions};
use oncebox_testkit::store::KeysFixture;
use redis::aio::MultiplexedConnection;
use redis::{AsyncCommands, AsyncConnectionConfig};

use super::support::{service, unique};

/// How long a server may take to answer: it syncs each write to a disk that it shares with all
/// other tests. The library's own bound, half a second, is too short for that.
pub(crate) const ANSWER_MAX: Duration = Duration::from_secs(30);

/// A connection beside the store's.
pub(crate) async fn connection(url: &str) -> redis::RedisResult<MultiplexedConnection> {
    let config =
        AsyncConnectionConfig::new().set_connection_timeout(Some(ANSWER_MAX)).set_response_timeout(Some(ANSWER_MAX));
    redis::Client::open(url)?.get_multiplexed_async_connection_with_config(&config).await
}

/// Keys under one prefix; deleted at the end.
pub(crate) struct Prefix {
    pub(crate) store: RedisKeys,
    pub(crate) connection: MultiplexedConnection,
    prefix: String,
}

impl Prefix {
    /// The names of the keys of a kind, all kinds where none is given.
    pub(crate) async fn keys(&self, kind: &str) -> Vec<String> {
        let mut connection = self.connection.clone();
        redis::cmd("KEYS").arg(format!("{}:{kind}*", self.prefix)).query_async(&mut connection).await.unwrap()
    }
}

impl KeysFixture for Prefix {
    type Store = RedisKeys;

    async fn start(case: &str) -> Option<Self> {
        let url = service(case, "ONCEBOX_TEST_REDIS")?;
        let prefix = unique("test");
        let options =
            RedisOptions { prefix: prefix.clone(), answer_timeout: ANSWER_MAX, ..RedisOptions::new(url.as_str()) };
        let store = RedisKeys::connect(options).await.unwrap();
        let connection = connection(&url).await.unwrap();
        Some(Self { store, connection, prefix })
    }

    fn store(&self) -> &RedisKeys {
        &self.store
    }

    fn forgets_by_itself(&self) -> bool {
        true
    }

    async fn shorten_leases(&self) {
        for key in self.keys("record:").await {
            let mut connection = self.connection.clone();
            let _: () = connection.hset(key, "lease_length", 1_000_000).await.unwrap();
        }
    }

    async fn records(&self) -> i64 {
        self.keys("record:").await.len().try_into().unwrap()
    }

    async fn bodies(&self) -> i64 {
        self.keys("body:").await.len().try_into().unwrap()
    }

    async fn end(self) {
        for key in self.keys("").await {
            let mut connection = self.connection.clone();
            let _: () = connection.del(key).await.unwrap();
        }
    }
}
