//! An outbox in a SQLite file, and a relay from it to a real broker.

use std::sync::Arc;
use std::time::Duration;

use oncebox::broker::Broker;
use oncebox::observe::Health;
use oncebox::store::sqlite::SqliteStore;
use oncebox::store::{
    ActContext, Base, DeadFilter, Diversion, Enqueue, LeaseAnswer, LeaseRequest, Mark, Operator, OperatorAct,
    Outbox as _, Schema, Status, StoreOptions,
};
use oncebox::{NewMessage, Relay, RelayOptions, RunEnd, RunError};
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
    task: JoinHandle<Result<RunEnd, RunError>>,
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
        Enqueue::write(&mut *tx, messages.collect::<Vec<_>>()).await.unwrap();
        oncebox::store::commit(tx).await.unwrap();
    }

    pub(crate) fn relay(&self, broker: impl Broker + 'static, options: RelayOptions) -> Running {
        let relay = Relay::new(self.store.clone(), Arc::new(broker), options, self.health.clone());
        let stop = CancellationToken::new();
        let token = stop.clone();
        Running { stop, task: tokio::spawn(async move { relay.run(token).await }) }
    }

    /// Makes everything that is pending dead, as if each message had been refused.
    pub(crate) async fn all_are_dead(&self) {
        let request = LeaseRequest {
            shard: 0,
            owner: "the refuser".into(),
            length: Duration::from_secs(20),
            read_bytes: 4 << 20,
        };
        let LeaseAnswer::Taken(mut session) = self.store.open(&request).await.unwrap() else { panic!("it is free") };
        while self.status().await.pending > 0 {
            let read = session.read(1_000).await.unwrap();
            let dead = || Diversion::Dead { reason: "refused".to_owned(), holds: true };
            let diverted = read.rows.iter().map(|row| (row.position, dead())).collect();
            session.checkpoint(Mark { through: Some(read.batch), diverted, ..Mark::default() }).await.unwrap();
        }
        session.release().await.unwrap();
    }

    pub(crate) async fn redrive(&self) {
        let (actor, reason) = ("test".to_owned(), "because".to_owned());
        let context = ActContext { actor, reason, dry_run: false, redrive_age_max: None };
        let all = DeadFilter { limit: 100_000, ..DeadFilter::default() };
        self.store.act(&all, &OperatorAct::Redrive, &context).await.unwrap();
    }

    /// Messages to a topic that works, one after the other, until nothing is held or dead any more:
    /// how many the relay had sent while rows were on their way back.
    pub(crate) async fn flowing(&self, topic: &str) -> usize {
        let (mut all, mut beside) = (0, 0);
        let before = self.status().await;
        let before = before.held + before.dead;
        loop {
            self.enqueue(vec![(topic.to_owned(), format!("k{}", all % 7), all.to_string())]).await;
            let status = self.until("it is sent", |status| status.pending == 0).await;
            let left = status.held + status.dead;
            all += 1;
            beside += usize::from(left > 0 && left < before);
            assert!(all < 10_000, "{left} stay in the table");
            if left == 0 {
                return beside;
            }
        }
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
