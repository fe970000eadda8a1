//! An outbox in a SQLite file, and a relay from it to a real broker.

use std::sync::Arc;
use std::time::Duration;

use oncebox::NewMessage;
use oncebox::broker::Broker;
use oncebox::observe::Health;
use oncebox::runtime::relay::RelayError;
use oncebox::runtime::{Relay, RelayEnd, RelayOptions};
use oncebox::store::sqlite::SqliteStore;
use oncebox::store::{Base, Door, Operator, Schema, Status, StoreOptions};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::support::{eventually, unique};

pub(crate) struct Outbox {
    store: SqliteStore,
    pub(crate) health: Health,
    _directory: tempfile::TempDir,
}

/// A relay that runs.
pub(crate) struct Running {
    stop: CancellationToken,
    task: JoinHandle<Result<RelayEnd, RelayError>>,
}

impl Running {
    pub(crate) async fn end(self) {
        self.stop.cancel();
        tokio::time::timeout(Duration::from_secs(60), self.task).await.expect("it stops").unwrap().unwrap();
    }
}

impl Outbox {
    pub(crate) async fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let url = format!("sqlite://{}", directory.path().join("outbox.db").display());
        let store = SqliteStore::connect(&StoreOptions { create: true, ..StoreOptions::new(url) }).await.unwrap();
        store.migrate().await.unwrap();
        Self { store, health: Health::default(), _directory: directory }
    }

    /// Messages of one transaction: topic, key and payload of each.
    pub(crate) async fn enqueue(&self, messages: Vec<(String, String, String)>) {
        let messages = messages.into_iter();
        let messages = messages.map(|(topic, key, payload)| NewMessage::text(topic, "made", payload).with_key(key));
        let mut tx = self.store.pool().begin_with("BEGIN IMMEDIATE").await.unwrap();
        Door::write(&mut *tx, messages.collect::<Vec<_>>()).await.unwrap();
        oncebox::store::commit(tx).await.unwrap();
    }

    pub(crate) fn relay(&self, broker: impl Broker + 'static, options: RelayOptions) -> Running {
        let relay = Relay::new(self.store.clone(), Arc::new(broker), options, self.health.clone());
        let stop = CancellationToken::new();
        let token = stop.clone();
        Running { stop, task: tokio::spawn(async move { relay.run(token).await }) }
    }

    pub(crate) async fn status(&self) -> Status {
        self.store.status().await.unwrap()
    }

    pub(crate) async fn until(&self, what: &str, holds: impl Fn(&Status) -> bool) -> Status {
        eventually(what, Duration::from_secs(90), || async { Some(self.status().await).filter(|status| holds(status)) })
            .await
    }
}

/// Quick about trials; a lease that a busy machine does not lose.
pub(crate) fn options() -> RelayOptions {
    RelayOptions {
        lease: Duration::from_secs(20),
        poll_max: Duration::from_millis(5),
        probe: Duration::from_millis(200),
        ..RelayOptions::new(unique("relay"))
    }
}
