//! Cases of operations in phases over their lives: parked, recovered late, purged, used anew, in
//! conflict with their evidence (O3, O4, O8, O9, O22, M100).

use std::time::Duration;

use uuid::Uuid;

use super::key_operator::{conflicts, really};
use super::keys::{ENDED, GONE, KEPT, LONG, PATIENCE, claim, completed, failed, over, record, retryable, run};
use super::phases::{AT_ONCE, MOVED, end, new_operation, observed, outstanding, run_ended, stored};
use super::trial::{eventually, moved};
use super::{Fixture, Trial};
use oncebox::operation::provider::Settled;
use oncebox::operation::{Mode, OperationName, Record, Stage, State};
use oncebox::store::{
    Base, Basis, Begun, Due, FIRST_POINT, Fenced, KeyOperator, Keys, NewEvidence, Operations, Operator, Phases, Proof,
    RunOutcome, Taken,
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
    let new = new_operation("k", LONG);
    let driven = outstanding(trial, &new).await;
    let open = outstanding(trial, &new_operation("open", LONG)).await;
    let parked = outstanding(trial, &new_operation("parked", LONG)).await;
    trial.store.park(&parked, "no").await.unwrap();
    let ago = moved::<F>("created_at", -259_200);
    for table in ["idempotency_request", "operation"] {
        trial.run(&format!("update {} set created_at = {ago}, updated_at = {ago}", trial.table(table))).await;
    }
    assert_eq!(trial.store.purge_keys(&operation, &GONE, Duration::ZERO, 100).await.unwrap(), 0);
    end(trial, &driven, "SENT", &completed(), &KEPT).await;
    assert_eq!(trial.store.purge_keys(&operation, &KEPT, Duration::ZERO, 100).await.unwrap(), 0);
    let look = trial.store.find(&new.claim.identity).await.unwrap();
    let seen = look.record.unwrap();
    assert_eq!(seen.state_at(look.now), State::Completed);
    assert_eq!(seen.expires_at, seen.outcome_at.map(|at| at.after(KEPT.ttl)));
    assert!(trial.store.body(&seen).await.unwrap().is_some());
    // A purge removes an operation with everything that belongs to it, and nothing of others.
    let more = outstanding(trial, &new_operation("more", LONG)).await;
    for done in [&more, &driven] {
        trial.store.observe(&observed(done, "success")).await.unwrap();
    }
    end(trial, &more, "SENT", &completed(), &GONE).await;
    eventually("its time is over", || async {
        (trial.store.purge_keys(&operation, &GONE, Duration::ZERO, 1).await.unwrap() == 1).then_some(())
    })
    .await;
    assert_eq!(trial.store.operation(more.operation_id).await.unwrap(), None);
    let left =
        [trial.rows("operation").await, trial.rows("operation_intent").await, trial.rows("operation_evidence").await];
    assert_eq!(left, [3, 3, 1]);
    for kept in [&open, &parked, &driven] {
        assert!(trial.store.operation(kept.operation_id).await.unwrap().is_some());
    }
}

/// A key that is used anew changes its record in one fenced UPDATE and gets a new operation.
/// Nothing of the old operation is left.
pub async fn o4_a_key_used_anew_gets_a_new_operation<F: Fixture>(trial: &Trial<F>) {
    let first = new_operation("k", LONG);
    let driven = outstanding(trial, &first).await;
    trial.store.observe(&observed(&driven, "success")).await.unwrap();
    end(trial, &driven, "SENT", &completed(), &ENDED).await;
    let seen = over(trial, &first.claim).await;
    let second = new_operation("k", LONG);
    let Begun::Claimed(mut tx) = trial.store.begin_first(&second, Basis::Anew(&seen), PATIENCE).await.unwrap() else {
        panic!("not claimed anew")
    };
    let anew = tx.driven().clone();
    assert_eq!(anew.operation_id, second.claim.operation_id);
    assert_eq!(tx.advance(FIRST_POINT, "LOCAL", Stage::Local, &[]).await.unwrap(), MOVED);
    tx.commit().await.unwrap();
    assert_eq!(trial.store.operation(driven.operation_id).await.unwrap(), None);
    assert_eq!((trial.rows("operation_intent").await, trial.rows("operation_evidence").await), (0, 0));
    let found = record(trial, &first.claim).await;
    assert_eq!((found.generation, found.operation_id, found.state), (2, anew.operation_id, State::InProgress));
    end(trial, &anew, "LOCAL", &completed(), &KEPT).await;
    let found = record(trial, &first.claim).await;
    assert!(trial.store.body(&found).await.unwrap().is_some(), "the body of the new run");
}

/// Uses a key anew in this mode, and commits.
async fn anew_as<F: Fixture>(trial: &Trial<F>, mode: Mode, key: &str, seen: &Record) {
    let (again, basis) = (claim(mode, key, 1), Basis::Anew(seen));
    match mode {
        Mode::Phased => match trial.store.begin_first(&new_operation(key, LONG), basis, PATIENCE).await.unwrap() {
            Begun::Claimed(mut tx) => {
                assert_eq!(tx.advance(FIRST_POINT, "LOCAL", Stage::Local, &[]).await.unwrap(), MOVED);
                tx.commit().await.unwrap();
            }
            other => panic!("{key}: {other:?}"),
        },
        Mode::Transactional => match trial.store.begin_operation(&again, basis, PATIENCE).await.unwrap() {
            Begun::Claimed(mut tx) => {
                assert_eq!(tx.undo_effects().await.unwrap(), Proof::Same);
                assert_eq!(tx.complete(Vec::new(), &completed(), &KEPT).await.unwrap(), Proof::Same);
                tx.commit().await.unwrap();
            }
            other => panic!("{key}: {other:?}"),
        },
        _ => assert!(trial.store.claim(&again, basis).await.unwrap().is_some(), "{key}"),
    }
}

/// Whatever a key ended with, and whatever the mode of its route is now: nothing of its former
/// operation is left.
///
/// Shown by: a claim that keeps the evidence of keys that did not complete; one that keeps an
/// operation in phases.
pub async fn o4_nothing_is_left_of_an_operation_whose_key_is_used_anew<F: Fixture>(trial: &Trial<F>) {
    let modes = [Mode::Edge, Mode::Bridged, Mode::Transactional, Mode::Phased];
    for (number, after) in modes.into_iter().enumerate() {
        for (name, outcome) in [("completed", completed()), ("failed", failed()), ("retryable", retryable())] {
            let key = format!("{name}-{number}");
            let first = claim(Mode::Edge, &key, 1);
            let owner = run(trial, &first, &outcome, &ENDED).await;
            let said = run_ended(owner.operation_id, "indefinite");
            trial.store.observe_run(&said).await.unwrap();
            trial.store.observe_run(&NewEvidence { kind: "operator".to_owned(), ..said }).await.unwrap();
            let seen = over(trial, &first).await;
            anew_as(trial, after, &key, &seen).await;
            assert_eq!(trial.rows("operation_evidence").await, 0, "{key} {after}");
        }
        let key = format!("phased-{number}");
        let first = new_operation(&key, LONG);
        let driven = outstanding(trial, &first).await;
        trial.store.observe(&observed(&driven, "success")).await.unwrap();
        end(trial, &driven, "SENT", &completed(), &ENDED).await;
        let seen = over(trial, &first.claim).await;
        anew_as(trial, after, &key, &seen).await;
        assert_eq!(trial.store.operation(driven.operation_id).await.unwrap(), None, "{after}");
        let left = (trial.rows("operation_intent").await, trial.rows("operation_evidence").await);
        assert_eq!(left, (0, 0), "{after}");
    }
}

/// Evidence that arrives while a conflict is judged was seen by nobody: it stays, and is listed.
/// Here the record of the operation is gone, so the judgement deletes the evidence that it read.
///
/// Shown by: a judgement that deletes all evidence of its operation.
pub async fn o8_what_arrives_while_a_conflict_is_judged_is_not_judged_with_it<F: Fixture>(trial: &Trial<F>) {
    if !F::CONCURRENT_WRITERS {
        return;
    }
    let new = new_operation("k", LONG);
    let driven = outstanding(trial, &new).await;
    end(trial, &driven, "SENT", &failed(), &GONE).await;
    trial.store.observe(&observed(&driven, "success")).await.unwrap();
    let (id, operation) = (driven.operation_id, new.claim.identity.operation());
    eventually("it is purged", || async {
        (trial.store.purge_keys(operation, &GONE, Duration::ZERO, 100).await.unwrap() == 1).then_some(())
    })
    .await;
    assert_eq!(conflicts(trial).await, (vec![id], vec![]));
    let mut other = trial.begin().await;
    let lock = format!("update {} set attempts = attempts + 1", trial.table("operation"));
    F::run(&mut other, &lock).await.unwrap();
    let arrives = async {
        trial.locks_wait(1).await;
        trial.store.observe(&observed(&driven, "success")).await.unwrap();
        other.rollback().await.unwrap();
    };
    let (judged, ()) = futures_util::future::join(trial.store.judge(id, &really()), arrives).await;
    judged.unwrap();
    assert_eq!(trial.store.operation(id).await.unwrap(), None);
    assert_eq!(conflicts(trial).await, (vec![], vec![id]));
    trial.store.judge(id, &really()).await.unwrap();
    assert_eq!(conflicts(trial).await, (vec![], vec![]));
}

/// The provider took the money, and the operation ended as failed. Neither the purge nor a client
/// that uses the key anew removes the evidence before a person has judged it.
///
/// Shown by: a purge, or a new use of the key, that removes the evidence with its record.
pub async fn a_conflict_outlives_its_record_until_it_is_judged<F: Fixture>(trial: &Trial<F>) {
    let operation: OperationName = "create_payment".parse().unwrap();
    let (purged, used_anew) = (new_operation("purged", LONG), new_operation("anew", LONG));
    let in_another_mode = new_operation("another-mode", LONG);
    let mut ids = Vec::new();
    for new in [&purged, &used_anew, &in_another_mode] {
        let driven = outstanding(trial, new).await;
        let mut tx = trial.store.begin_phase(&driven).await.unwrap();
        tx.settle("charge", Settled::Failed);
        assert_eq!(tx.finish("SENT", &failed(), &GONE).await.unwrap(), MOVED);
        tx.commit().await.unwrap();
        // This evidence comes from a driver that had lost its lease.
        trial.store.observe(&observed(&driven, "success")).await.unwrap();
        ids.push(driven.operation_id);
    }
    let seen = over(trial, &used_anew.claim).await;
    let second = new_operation("anew", LONG);
    let Begun::Claimed(tx) = trial.store.begin_first(&second, Basis::Anew(&seen), PATIENCE).await.unwrap() else {
        panic!("not claimed anew")
    };
    tx.commit().await.unwrap();
    let seen = over(trial, &in_another_mode.claim).await;
    anew_as(trial, Mode::Edge, "another-mode", &seen).await;
    eventually("it is purged", || async {
        (trial.store.purge_keys(&operation, &GONE, Duration::ZERO, 100).await.unwrap() == 1).then_some(())
    })
    .await;
    assert_eq!(trial.store.find(&purged.claim.identity).await.unwrap().record, None);
    // An edge run that ended late, of which only the evidence is left.
    let late = run_ended(Uuid::now_v7(), "success");
    trial.store.observe_run(&late).await.unwrap();
    ids.sort_unstable();
    assert_eq!(conflicts(trial).await, (ids.clone(), vec![late.operation_id]));
    for id in &ids {
        let kept = trial.store.operation(*id).await.unwrap().expect("it is kept");
        assert_eq!((kept.identity, kept.intents.len(), kept.evidence.len()), (None, 1, 1));
    }
    for id in ids.iter().chain([&late.operation_id]) {
        trial.store.judge(*id, &really()).await.unwrap();
    }
    assert_eq!(conflicts(trial).await, (vec![], vec![]));
    for id in ids {
        assert_eq!(trial.store.operation(id).await.unwrap(), None, "judged, and without a record: gone");
    }
}

/// The deployment id exists, and another process reads the same.
pub async fn o22_the_deployment_is_the_databases<F: Fixture>(trial: &Trial<F>) {
    let made = trial.store.deployment().await.unwrap();
    assert!(!made.is_nil());
    assert_eq!(trial.store.deployment().await.unwrap(), made);
    let other = trial.fixture.connect().await;
    assert_eq!(other.deployment().await.unwrap(), made);
    other.close().await;
}

/// An operation whose process was killed, a parked one, and a key of unknown outcome are counted,
/// with the age of each. One that a process drives is not, nor one that is due later.
///
/// Shown by: counting every operation without an outcome; ages that begin with the operation.
pub async fn the_status_counts_operations_and_keys_that_nobody_carries_on<F: Fixture>(trial: &Trial<F>) {
    let unattended = || async { trial.store.status().await.unwrap().unattended };
    outstanding(trial, &new_operation("killed", LONG)).await;
    let (due, lease) = (moved::<F>("due_at", -3_600), moved::<F>("lease_until", -900));
    trial.run(&format!("update {} set due_at = {due}, lease_until = {lease}", trial.table("operation"))).await;
    let parked = outstanding(trial, &new_operation("parked", LONG)).await;
    trial.store.park(&parked, "not found").await.unwrap();
    let changed = moved::<F>("updated_at", -500);
    trial.run(&format!("update {} set updated_at = {changed}", trial.table("operation"))).await;
    outstanding(trial, &new_operation("driven", LONG)).await;
    let later = outstanding(trial, &new_operation("later", LONG)).await;
    trial.store.hand_back(&later, Due { after: Some(LONG), attempt: true }).await.unwrap();
    let seen = unattended().await;
    assert_eq!((seen.operations_parked, seen.operations_undriven, seen.keys_unknown), (1, 1, 0), "{seen:?}");
    assert!((500.0..600.0).contains(&seen.oldest_parked_age_seconds), "{seen:?}");
    assert!((300.0..400.0).contains(&seen.oldest_undriven_age_seconds), "since its lease was over: {seen:?}");
    assert_eq!(seen.oldest_unknown_age_seconds, 0.0);
    run(trial, &claim(Mode::Edge, "unknown", 1), &RunOutcome::Unknown, &KEPT).await;
    run(trial, &claim(Mode::Edge, "completed", 1), &completed(), &KEPT).await;
    let claimed = moved::<F>("created_at", -700);
    trial.run(&format!("update {} set created_at = {claimed}", trial.table("idempotency_request"))).await;
    let seen = unattended().await;
    assert_eq!((seen.operations_parked, seen.operations_undriven, seen.keys_unknown), (1, 1, 1), "{seen:?}");
    assert!((700.0..800.0).contains(&seen.oldest_unknown_age_seconds), "{seen:?}");
}
