//! A prefix of its own on the shared server.

use oncebox::store::conformance::KeysFixture;
use oncebox::store::redis::{RedisKeys, RedisOptions};
use redis::AsyncCommands;
use redis::aio::MultiplexedConnection;

use super::support::{service, unique};

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
        let options = RedisOptions { prefix: prefix.clone(), ..RedisOptions::new(url.as_str()) };
        let store = RedisKeys::connect(options).await.unwrap();
        let connection = redis::Client::open(url).unwrap().get_multiplexed_async_connection().await.unwrap();
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
