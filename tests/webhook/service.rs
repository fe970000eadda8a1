//! A service with one operation that sends something, and a worker.

use std::time::Duration;

use oncebox::operation::phased::{Flow, PhasedEngine, Recovery, RecoveryOptions};
use oncebox::operation::{
    Answered, Delivery, DriveSettings, Endpoint, Engine, EngineOptions, IdempotentCommand, Key, KeyFormat, KeyGiven,
    Registered, Retention, Scope, Tombstone,
};
use oncebox::sqlx;
use oncebox::store::sqlite::SqliteStore;
use oncebox::store::{
    ActContext, Answer, AnswerBody, Base, KeyOperator, Phases, Resolution, RunOutcome, Schema, StoreOptions,
    StoredOperation,
};
use serde::Serialize;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::SOON;
use crate::support::eventually;

pub(crate) struct Service {
    store: SqliteStore,
    phased: PhasedEngine,
    endpoint: Registered,
    worker: JoinHandle<Result<(), oncebox::StoreError>>,
    _directory: tempfile::TempDir,
}

impl Drop for Service {
    fn drop(&mut self) {
        self.worker.abort();
    }
}

impl Service {
    pub(crate) async fn over(endpoint: Endpoint, flow: Flow<SqliteStore>, driving: DriveSettings) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let url = format!("sqlite://{}", directory.path().join("test.db").display());
        let store = SqliteStore::connect(&StoreOptions { create: true, ..StoreOptions::new(url) }).await.unwrap();
        store.migrate().await.unwrap();
        let engine = Engine::new(store.clone(), EngineOptions { driving, ..EngineOptions::default() });
        let endpoint = engine.protect(endpoint).unwrap();
        let deployment = store.deployment().await.unwrap();
        let phased = PhasedEngine::new(&engine, deployment, [(flow, &endpoint)]).unwrap();
        let every = RecoveryOptions { every: Duration::from_millis(20), ..RecoveryOptions::default() };
        let recovery = Recovery::new(&phased, every, oncebox::observe::Health::default());
        let worker = tokio::spawn(recovery.run(CancellationToken::new()));
        Self { store, phased, endpoint, worker, _directory: directory }
    }

    pub(crate) async fn ask<C>(&self, event: Uuid, command: C) -> Answered
    where
        C: IdempotentCommand + Serialize + Send + Sync + 'static,
    {
        let key = KeyGiven::Given(Key::parse(event.to_string().as_bytes(), KeyFormat::UuidV7).unwrap());
        let scope = Some(Scope::new("t1", "payments").unwrap());
        self.phased.execute_phased(&self.endpoint, scope, key, command, None, Duration::from_millis(10)).await
    }

    /// The status of its outcome, asked for until it is there.
    pub(crate) async fn outcome<C>(&self, event: Uuid, command: C) -> u16
    where
        C: IdempotentCommand + Clone + Serialize + Send + Sync + 'static,
    {
        eventually("an outcome", SOON, || async {
            match self.ask(event, command.clone()).await {
                Answered::Reply { reply, .. } => Some(reply.status),
                Answered::Problem(problem) => {
                    assert!(problem.code.retryable(), "{problem:?}");
                    None
                }
            }
        })
        .await
    }

    async fn operations(&self) -> Vec<StoredOperation> {
        let ids: Vec<Vec<u8>> = sqlx::query_scalar("select operation_id from oncebox_operation")
            .fetch_all(self.store.pool())
            .await
            .unwrap();
        let mut operations = Vec::new();
        for id in ids {
            operations.extend(self.store.operation(Uuid::from_slice(&id).unwrap()).await.unwrap());
        }
        operations
    }

    /// An operator says how the only operation ended.
    pub(crate) async fn resolve(&self, succeeded: bool) {
        let answer =
            Answer { status: 200, schema_version: 1, body: AnswerBody::Tombstone(Tombstone::Withheld), resource: None };
        let outcome = match succeeded {
            true => RunOutcome::Completed(answer),
            false => RunOutcome::FailedReplayable { answer, error_code: None },
        };
        let ended = Resolution::Ended(Box::new(outcome), Retention::default());
        let act = ActContext {
            actor: "ada".to_owned(),
            reason: "the receiver said so".to_owned(),
            dry_run: false,
            redrive_age_max: None,
        };
        let seen = self.operations().await.remove(0);
        self.store.resolve(&seen, &ended, false, false, &act).await.unwrap();
    }

    pub(crate) async fn state(&self) -> Option<Delivery> {
        for stored in self.operations().await {
            // One that was refused in its first phase intended nothing.
            if let Some(state) = stored.delivery() {
                return Some(state);
            }
        }
        None
    }

    pub(crate) async fn becomes(&self, what: &str, wanted: impl Fn(Delivery) -> bool) -> Delivery {
        eventually(what, SOON, || async { self.state().await.filter(|&state| wanted(state)) }).await
    }
}
