//! Cases of operations in phases over their lives: parked, recovered late, purged, used anew (O3,
//! O4, O9, O22, M100).

use std::time::Duration;

use uuid::Uuid;

use super::key_operator::really;
use super::keys::{KEPT, answer, completed, record};
use super::phases::{AT_ONCE, LONG, MOVED, PATIENCE, SHORT, new_operation, observed, outstanding, run_ended, stored};
use super::trial::eventually;
use super::{Fixture, Trial};
use oncebox::operation::{OperationName, Retention, Stage, State};
use oncebox::store::{
    Base, Basis, Begun, FIRST_POINT, Fenced, KeyOperator, Keys, OperationFilter, Phases, RunOutcome, Taken,
};

/// No worker takes a parked operation, and its key shows that it is parked. Its stage is UNKNOWN,
/// and its record UNKNOWN_REQUIRES_RECOVERY.
///
/// Shown by: not checking `parked` in `take_operation` or `take_due`.
pub async fn o9_a_parked_operation_waits_for_an_operator<F: Fixture>(trial: &Trial<F>) {
    let new = new_operation("k", LONG);
    let driven = outstanding(trial, &new).await;
    assert!(!record(trial, &new.claim).await.parked);
    assert_eq!(trial.store.park(&driven, "two answers").await.unwrap(), Fenced::Done);
    let found = stored(trial, &driven).await;
    assert_eq!((found.stage, found.parked.as_deref()), (Stage::Unknown, Some("two answers")));
    assert_eq!((found.due_at, found.lease_until), (None, None));
    assert!(matches!(trial.store.take_operation(driven.operation_id, LONG).await.unwrap(), Taken::Not(_)));
    assert!(trial.store.take_due("create_charge", &[2], 10, LONG, &[]).await.unwrap().is_empty());
    let seen = record(trial, &new.claim).await;
    assert_eq!((seen.parked, seen.state), (true, State::UnknownRequiresRecovery));
    assert_eq!(trial.store.operation_stats().await.unwrap().unknown, 1);
    assert_eq!(trial.store.hand_back(&driven, AT_ONCE).await.unwrap(), Fenced::LostOwnership, "it is nobody's");
}

/// An operation that is recovered on the third day is remembered from that time (O3). One without
/// an outcome is never purged (M100).
///
/// Shown by: lifetimes that count from the claim.
pub async fn o3_what_is_recovered_late_is_remembered_from_its_outcome<F: Fixture>(trial: &Trial<F>) {
    let operation: OperationName = "create_payment".parse().unwrap();
    let gone = Retention { ttl: SHORT, body: SHORT, metadata: SHORT };
    let new = new_operation("k", LONG);
    let driven = outstanding(trial, &new).await;
    let open = outstanding(trial, &new_operation("open", LONG)).await;
    let parked = outstanding(trial, &new_operation("parked", LONG)).await;
    trial.store.park(&parked, "no").await.unwrap();
    let ago = match F::Store::NAME {
        "sqlite" => "created_at - 259200000",
        "mysql" => "created_at - interval 3 day",
        _ => "created_at - interval '3 days'",
    };
    for table in ["idempotency_request", "operation"] {
        trial.run(&format!("update {} set created_at = {ago}, updated_at = {ago}", trial.table(table))).await;
    }
    assert_eq!(trial.store.purge_keys(&operation, &gone, Duration::ZERO, 100).await.unwrap(), 0);
    let mut tx = trial.store.begin_phase(&driven).await.unwrap();
    assert_eq!(tx.finish("SENT", &completed(), &KEPT).await.unwrap(), MOVED);
    tx.commit().await.unwrap();
    assert_eq!(trial.store.purge_keys(&operation, &KEPT, Duration::ZERO, 100).await.unwrap(), 0);
    let look = trial.store.find(&new.claim.identity).await.unwrap();
    let seen = look.record.unwrap();
    assert_eq!(seen.state_at(look.now), State::Completed);
    assert_eq!(seen.expires_at, seen.outcome_at.map(|at| at.after(KEPT.ttl)));
    assert!(trial.store.body(&seen).await.unwrap().is_some());
    // A purge removes an operation with everything that belongs to it, in batches, and nothing of
    // other operations.
    let more = outstanding(trial, &new_operation("more", LONG)).await;
    for done in [&more, &driven] {
        trial.store.observe(&observed(done, "success")).await.unwrap();
    }
    let mut tx = trial.store.begin_phase(&more).await.unwrap();
    assert_eq!(tx.finish("SENT", &completed(), &gone).await.unwrap(), MOVED);
    tx.commit().await.unwrap();
    let rows = |table: &'static str| async move {
        trial.number(&format!("select count(*) from {}", trial.table(table))).await
    };
    eventually("its time is over", || async {
        (trial.store.purge_keys(&operation, &gone, Duration::ZERO, 1).await.unwrap() == 1).then_some(())
    })
    .await;
    assert_eq!(trial.store.operation(more.operation_id).await.unwrap(), None);
    let left = (rows("operation").await, rows("operation_intent").await, rows("operation_evidence").await);
    assert_eq!(left, (3, 3, 1));
    for kept in [&open, &parked, &driven] {
        assert!(trial.store.operation(kept.operation_id).await.unwrap().is_some());
    }
}

/// A key that is used anew changes its record in one fenced UPDATE and gets a new operation.
/// Nothing of the old operation is left.
pub async fn o4_a_key_used_anew_gets_a_new_operation<F: Fixture>(trial: &Trial<F>) {
    let gone = Retention { ttl: SHORT, body: SHORT, metadata: LONG };
    let first = new_operation("k", LONG);
    let driven = outstanding(trial, &first).await;
    trial.store.observe(&observed(&driven, "success")).await.unwrap();
    let mut tx = trial.store.begin_phase(&driven).await.unwrap();
    assert_eq!(tx.finish("SENT", &completed(), &gone).await.unwrap(), MOVED);
    tx.commit().await.unwrap();
    let seen = eventually("its time is over", || async {
        let look = trial.store.find(&first.claim.identity).await.unwrap();
        let record = look.record.unwrap();
        (record.state_at(look.now) == State::Expired).then_some(record)
    })
    .await;
    let second = new_operation("k", LONG);
    let Begun::Claimed(mut tx) = trial.store.begin_first(&second, Basis::Anew(&seen), PATIENCE).await.unwrap() else {
        panic!("not claimed anew")
    };
    let anew = tx.driven().clone();
    assert_eq!(anew.operation_id, second.claim.operation_id);
    assert_eq!(tx.advance(FIRST_POINT, "LOCAL", Stage::Local, &[]).await.unwrap(), MOVED);
    tx.commit().await.unwrap();
    assert_eq!(trial.store.operation(driven.operation_id).await.unwrap(), None);
    let left = format!(
        "select (select count(*) from {}) + (select count(*) from {})",
        trial.table("operation_intent"),
        trial.table("operation_evidence")
    );
    assert_eq!(trial.number(&left).await, 0);
    let found = record(trial, &first.claim).await;
    assert_eq!((found.generation, found.operation_id, found.state), (2, anew.operation_id, State::InProgress));
    let mut tx = trial.store.begin_phase(&anew).await.unwrap();
    assert_eq!(tx.finish("LOCAL", &completed(), &KEPT).await.unwrap(), MOVED);
    tx.commit().await.unwrap();
    let found = record(trial, &first.claim).await;
    assert!(trial.store.body(&found).await.unwrap().is_some(), "the body of the new run");
}

/// The provider took the money, and the operation ended as failed. Neither the purge nor a client
/// that uses the key anew removes the evidence before a person has judged it.
///
/// Shown by: a purge, or a new use of the key, that removes the evidence with its record.
pub async fn a_conflict_outlives_its_record_until_it_is_judged<F: Fixture>(trial: &Trial<F>) {
    let operation: OperationName = "create_payment".parse().unwrap();
    let gone = Retention { ttl: SHORT, body: SHORT, metadata: SHORT };
    let failed = RunOutcome::FailedReplayable { answer: answer(), error_code: None };
    let (purged, used_anew) = (new_operation("purged", LONG), new_operation("anew", LONG));
    let mut ids = Vec::new();
    for new in [&purged, &used_anew] {
        let driven = outstanding(trial, new).await;
        let mut tx = trial.store.begin_phase(&driven).await.unwrap();
        tx.settle("charge", "failed").await.unwrap();
        assert_eq!(tx.finish("SENT", &failed, &gone).await.unwrap(), MOVED);
        tx.commit().await.unwrap();
        // This evidence comes from a driver that had lost its lease.
        trial.store.observe(&observed(&driven, "success")).await.unwrap();
        ids.push(driven.operation_id);
    }
    let seen = eventually("its time is over", || async {
        let look = trial.store.find(&used_anew.claim.identity).await.unwrap();
        look.record.filter(|record| record.state_at(look.now) == State::Expired)
    })
    .await;
    let second = new_operation("anew", LONG);
    let Begun::Claimed(tx) = trial.store.begin_first(&second, Basis::Anew(&seen), PATIENCE).await.unwrap() else {
        panic!("not claimed anew")
    };
    tx.commit().await.unwrap();
    eventually("it is purged", || async {
        (trial.store.purge_keys(&operation, &gone, Duration::ZERO, 100).await.unwrap() == 1).then_some(())
    })
    .await;
    assert_eq!(trial.store.find(&purged.claim.identity).await.unwrap().record, None);
    // An edge run that ended late, of which only the evidence is left.
    let late = run_ended(Uuid::now_v7(), "success");
    trial.store.observe_run(&late).await.unwrap();
    let filter = OperationFilter { conflicts: true, limit: 100, ..OperationFilter::default() };
    let conflicts = || async {
        let found = trial.store.operations(&filter).await.unwrap();
        let mut listed: Vec<Uuid> = found.operations.iter().map(|one| one.operation_id).collect();
        listed.sort_unstable();
        (listed, found.orphans)
    };
    ids.sort_unstable();
    assert_eq!(conflicts().await, (ids.clone(), vec![late.operation_id]));
    for id in &ids {
        let kept = trial.store.operation(*id).await.unwrap().expect("it is kept");
        assert_eq!((kept.identity, kept.intents.len(), kept.evidence.len()), (None, 1, 1));
    }
    for id in ids.iter().chain([&late.operation_id]) {
        trial.store.judge(*id, &really()).await.unwrap();
    }
    assert_eq!(conflicts().await, (vec![], vec![]));
    for id in ids {
        assert_eq!(trial.store.operation(id).await.unwrap(), None, "judged, and without a record: gone");
    }
}

/// The deployment id exists and stays the same.
pub async fn o22_the_deployment_is_the_databases<F: Fixture>(trial: &Trial<F>) {
    let made = trial.store.deployment().await.unwrap();
    assert!(!made.is_nil());
    assert_eq!(trial.store.deployment().await.unwrap(), made);
}
