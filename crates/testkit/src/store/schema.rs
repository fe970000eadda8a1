//! Cases of the schema: states, and migrations that run twice and at once.

use super::keys::identity;
use super::{Fixture, Trial};
use oncebox::StoreError;
use oncebox::store::{Base, Keys, Schema, SchemaState, Severity, enqueue, enqueue_all};

/// The versions that the program knows; none newer may be applied.
async fn versions<F: Fixture>(trial: &Trial<F>) -> Vec<i64> {
    trial.store.applied().await.unwrap().iter().map(|migration| migration.version).collect()
}

/// The newest of them.
async fn known<F: Fixture>(trial: &Trial<F>) -> i64 {
    *versions(trial).await.last().unwrap()
}

/// Asking for the state of the schema creates nothing.
pub async fn a_new_database_has_no_schema<F: Fixture>(trial: &Trial<F>) {
    assert_eq!(trial.store.schema().await.unwrap(), SchemaState::Missing);
    assert_eq!(trial.store.schema().await.unwrap(), SchemaState::Missing);
    assert!(trial.store.applied().await.unwrap().iter().all(|migration| !migration.applied));
    assert!(trial.store.schema().await.unwrap().require().is_err());
}

/// A service that enqueues, or reads a key, before anybody has migrated the database is told the
/// remedy. Shown by: the words of the database alone.
pub async fn a_new_database_has_no_schema_and_a_call_names_the_remedy<F: Fixture>(trial: &Trial<F>) {
    let mut transaction = trial.store.pool().begin().await.unwrap();
    let message = super::trial::new_message("k", "1");
    let refused = enqueue(&mut *transaction, message.clone()).await.unwrap_err();
    assert!(matches!(refused, StoreError::SchemaMissing(_)), "{refused:?}");
    assert!(refused.to_string().contains("run `oncebox migrate up`"), "{refused}");
    transaction.rollback().await.unwrap();
    let mut transaction = trial.store.pool().begin().await.unwrap();
    let refused = enqueue_all(&mut *transaction, vec![message.clone(), message]).await.unwrap_err();
    assert!(matches!(refused, StoreError::SchemaMissing(_)), "{refused:?}");
    transaction.rollback().await.unwrap();
    let unread = trial.store.find(&identity("t1", "k-0123456789abcdef")).await.unwrap_err();
    assert!(unread.to_string().contains("run `oncebox migrate up`"), "{unread}");
}

/// The second run applies no migration and keeps the rows.
pub async fn migrating_twice_changes_nothing<F: Fixture>(trial: &Trial<F>) {
    let (versions, known) = (versions(trial).await, known(trial).await);
    assert_eq!(versions, (1..=known).collect::<Vec<_>>());
    assert_eq!(trial.store.migrate().await.unwrap(), versions);
    assert_eq!(trial.store.schema().await.unwrap(), SchemaState::Current(known));
    assert!(trial.store.applied().await.unwrap().iter().all(|migration| migration.applied));
    trial.enqueue(vec![super::trial::new_message("k", "1")]).await;
    assert!(trial.store.migrate().await.unwrap().is_empty());
    assert_eq!(trial.rows("outbox").await, 1);
}

/// Several migrators run at once. Each migration is applied by exactly one of them.
pub async fn migrators_at_once_do_not_disturb_each_other<F: Fixture>(trial: &Trial<F>) {
    let mut migrators = tokio::task::JoinSet::new();
    for _ in 0..4 {
        let store = trial.fixture.connect().await;
        migrators.spawn(async move { store.migrate().await.unwrap() });
    }
    let mut applied: Vec<i64> = migrators.join_all().await.concat();
    applied.sort_unstable();
    assert_eq!(applied, versions(trial).await);
    assert_eq!(trial.store.schema().await.unwrap(), SchemaState::Current(known(trial).await));
}

/// The states `Old` and `Newer` stop a program that would use tables it does not know, or miss
/// tables.
pub async fn a_schema_that_is_older_or_newer_is_told_apart<F: Fixture>(trial: &Trial<F>) {
    let (table, known) = (trial.table("migration"), known(trial).await);
    trial.run(&format!("update {table} set version = 999, serves_from = 999 where version = {known}")).await;
    assert_eq!(trial.store.schema().await.unwrap(), SchemaState::Newer { found: 999, known });
    assert!(trial.store.migrate().await.is_err(), "a newer schema is not touched");
    trial.run(&format!("delete from {table} where version = 999")).await;
    let found = known - 1;
    assert_eq!(trial.store.schema().await.unwrap(), SchemaState::Old { found, needed: known });
    assert!(trial.store.schema().await.unwrap().require().unwrap_err().to_string().contains("oncebox migrate up"));
}

/// During a rolling update the schema is newer than some programs. A program that the new schema
/// still serves may end and start again.
pub async fn a_program_that_a_newer_schema_still_serves_starts<F: Fixture>(trial: &Trial<F>) {
    let (table, known) = (trial.table("migration"), known(trial).await);
    let newer = |version: i64, serves_from: i64| {
        format!("update {table} set version = {version}, serves_from = {serves_from} where version >= {known}")
    };
    trial.run(&newer(known + 1, known)).await;
    let state = trial.store.schema().await.unwrap();
    assert_eq!(state, SchemaState::Ahead { found: known + 1, known });
    state.require().unwrap();
    assert!(trial.store.migrate().await.is_err(), "a newer schema is not touched");
    trial.run(&newer(known + 1, known + 1)).await;
    let state = trial.store.schema().await.unwrap();
    assert_eq!(state, SchemaState::Newer { found: known + 1, known });
    assert!(state.require().is_err());
}

/// The check of a fresh database finds nothing of severity `Refused` or worse.
pub async fn a_sound_database_passes_its_check<F: Fixture>(trial: &Trial<F>) {
    let findings = trial.store.check().await.unwrap();
    assert!(!findings.is_empty());
    for finding in findings {
        assert!(finding.severity < Severity::Refused, "{finding:?}");
    }
}
