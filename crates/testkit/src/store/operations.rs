//! Cases of outcomes in the application's own transaction (O2), of what runs said that had lost
//! their lease (O8), and of bodies that a purge takes (M100).

use super::key_operator::{conflicts, really};
use super::keys::{KEPT, LONG, SHORT, again, claim, completed, failed, over, record, retryable, run, take};
use super::phases::run_ended;
use super::trial::{effect, eventually};
use super::{Fixture, Trial};
use oncebox::StoreError;
use oncebox::operation::{Mode, Retention, State};
use oncebox::store::{Basis, Bridged, Fenced, KeyChange, KeyClaim, KeyOperator, Keys, Owned, RunOutcome};
use uuid::Uuid;

/// The outcome commits or rolls back with the handler's transaction. No outcome is rewritten, and
/// an owner whose claim was taken over writes none while the new owner runs.
pub async fn o2_a_bridged_outcome_goes_with_the_handlers_transaction<F: Fixture>(trial: &Trial<F>) {
    let claim = KeyClaim { lease: SHORT, ..claim(Mode::Bridged, "k", 1) };
    let owner = take(trial, &claim).await;
    for commit in [false, true] {
        let mut tx = trial.begin().await;
        effect::<F>(&mut tx, "bridged", "1").await.unwrap();
        assert_eq!(tx.finish_in(&owner, &completed(), &KEPT).await.unwrap(), Fenced::Done);
        if commit {
            tx.commit().await.unwrap();
        } else {
            tx.rollback().await.unwrap();
            assert_eq!((record(trial, &claim).await.state, trial.effects("bridged").await), (State::InProgress, 0));
        }
    }
    let found = record(trial, &claim).await;
    assert_eq!((found.state, trial.effects("bridged").await), (State::Completed, 1));
    assert!(trial.store.body(&found).await.unwrap().is_some());
    let mut tx = trial.begin().await;
    let late = tx.finish_in(&owner, &completed(), &KEPT).await.unwrap();
    tx.rollback().await.unwrap();
    assert_eq!(late, Fenced::LostOwnership);
    let claim = KeyClaim { lease: SHORT, ..super::keys::claim(Mode::Bridged, "taken-over", 1) };
    let old = take(trial, &claim).await;
    let stale = over(trial, &claim).await;
    let next = KeyClaim { lease: LONG, owner: Uuid::now_v7(), ..claim.clone() };
    let new = trial.store.claim(&next, Basis::TakeOver(&stale)).await.unwrap().unwrap();
    // The others are forged: one has the new epoch, the other the new token.
    for owner in [old.clone(), Owned { epoch: new.epoch, ..old.clone() }, Owned { owner: new.owner, ..old }] {
        let mut tx = trial.begin().await;
        assert_eq!(tx.finish_in(&owner, &completed(), &KEPT).await.unwrap(), Fenced::LostOwnership);
        tx.commit().await.unwrap();
        assert_eq!(record(trial, &claim).await.state, State::InProgress);
    }
}

/// A purge removes the body of a record, which may live longer than the record. The next run of the
/// key starts at the same epoch and stores its own body.
///
/// Shown by: a purge that leaves the body (MariaDB, SQLite): the outcome cannot be written.
pub async fn m100_a_purge_takes_the_bodies_of_its_records<F: Fixture>(trial: &Trial<F>) {
    let gone = Retention { ttl: SHORT, metadata: SHORT, ..KEPT };
    let claim = claim(Mode::Edge, "k", 1);
    run(trial, &claim, &completed(), &gone).await;
    eventually("it is purged", || async {
        let purged = trial.store.purge_keys(claim.identity.operation(), &gone, SHORT, 10).await.unwrap();
        (purged == 1).then_some(())
    })
    .await;
    let owner = take(trial, &claim).await;
    assert_eq!(owner.epoch, 1);
    assert_eq!(trial.store.finish(&owner, &completed(), &KEPT).await.unwrap(), Fenced::Done);
    assert!(trial.store.body(&record(trial, &claim).await).await.unwrap().is_some());
}

/// A run that lost its lease has reported by evidence that it ended. Its key is not released, even
/// if something else was found out elsewhere.
///
/// Shown by: a release that does not check the evidence.
pub async fn a_claim_is_not_released_where_a_run_of_it_said_that_it_ended<F: Fixture>(trial: &Trial<F>) {
    for (key, ended, released) in [
        ("indefinite", "indefinite", Fenced::Done),
        ("nothing", "not-sent", Fenced::Done),
        ("success", "success", Fenced::LostOwnership),
        ("failure", "failure", Fenced::LostOwnership),
    ] {
        let claim = claim(Mode::Edge, key, 1);
        let owner = take(trial, &claim).await;
        let run = run_ended(owner.operation_id, ended);
        trial.store.observe_run(&run).await.unwrap();
        assert_eq!(trial.store.release(&owner).await.unwrap(), released, "{ended}");
        let said = trial.store.runs_of(owner.operation_id).await.unwrap();
        assert_eq!(said.iter().map(|row| &row.evidence).collect::<Vec<_>>(), [&run]);
        if released == Fenced::LostOwnership {
            let finished = trial.store.finish(&owner, &completed(), &KEPT).await.unwrap();
            assert_eq!(finished, Fenced::Done, "it is still ours");
        }
    }
}

/// A run lost its lease, its key was given up as failed, and then the run succeeded. A retry does
/// not execute the key again, and the key is not released, unless an operator overrules the
/// evidence.
///
/// Shown by: a retry, or a release by an operator, that does not check the evidence.
pub async fn a_failed_run_is_not_reclaimed_where_a_late_one_succeeded<F: Fixture>(trial: &Trial<F>) {
    let store = &trial.store;
    for (key, ended, runs_again, is_released) in [
        ("indefinite", "indefinite", true, true),
        ("nothing", "not-sent", true, true),
        ("failure", "failure", false, true),
        ("success", "success", false, false),
    ] {
        for by in ["retry", "late", "release"] {
            let claim = claim(Mode::Edge, &format!("{key}-{by}"), 1);
            let owner = run(trial, &claim, &retryable(), &KEPT).await;
            let seen = record(trial, &claim).await;
            store.observe_run(&run_ended(owner.operation_id, ended)).await.unwrap();
            let release = |against_evidence| KeyChange::Release { against_evidence };
            match by {
                "retry" => {
                    let again = KeyClaim { owner: Uuid::now_v7(), ..claim };
                    let claimed = store.claim(&again, Basis::Reclaim(&seen)).await.unwrap();
                    assert_eq!(claimed.is_some(), runs_again, "{ended}");
                }
                "late" => {
                    let again = KeyClaim { owner: Uuid::now_v7(), ..claim };
                    let Some(late) = store.claim(&again, Basis::Late(&seen)).await.unwrap() else {
                        panic!("it may write its outcome: {ended}")
                    };
                    assert_eq!((late.operation_id, late.epoch), (seen.operation_id, seen.epoch + 1));
                }
                _ => {
                    let released = store.act_on_key(&seen, &release(false), &really()).await;
                    assert_eq!(released.is_ok(), is_released, "{ended}");
                    if !is_released {
                        // The statement alone refuses it, too.
                        let released = store.change_key(&seen, &release(false), &really()).await.unwrap();
                        assert_eq!(released, Fenced::LostOwnership);
                        store.act_on_key(&seen, &release(true), &really()).await.unwrap();
                    }
                    assert_eq!(store.find(&seen.identity).await.unwrap().record, None);
                }
            }
        }
    }
    // Evidence that an operator overruled stops nothing.
    let claim = claim(Mode::Edge, "overruled", 1);
    let owner = run(trial, &claim, &RunOutcome::Unknown, &KEPT).await;
    store.observe_run(&run_ended(owner.operation_id, "success")).await.unwrap();
    let unknown = record(trial, &claim).await;
    let resolve = KeyChange::Resolve { outcome: Box::new(retryable()), retention: KEPT, against_evidence: true };
    store.act_on_key(&unknown, &resolve, &really()).await.unwrap();
    let seen = record(trial, &claim).await;
    let again = KeyClaim { owner: Uuid::now_v7(), ..claim.clone() };
    let Some(owner) = store.claim(&again, Basis::Reclaim(&seen)).await.unwrap() else {
        panic!("an operator said that it had not happened")
    };
    assert_eq!(store.release(&owner).await.unwrap(), Fenced::Done);
}

/// Evidence of a run after its lease is no conflict where the record says the same, also when the
/// key is used anew. Where the record says that the run failed, the evidence stays until a person
/// has judged it. It cannot be judged while that record stands: the key would be free to run again.
///
/// Shown by: a claim that keeps, or removes, the evidence in both cases; a judgement that removes
/// it while the record stands.
pub async fn a_late_run_is_an_orphan_of_a_key_used_anew_only_where_its_record_said_otherwise<F: Fixture>(
    trial: &Trial<F>,
) {
    let gone = Retention { ttl: SHORT, ..KEPT };
    let mut expected = Vec::new();
    for (key, outcome) in [("agrees", completed()), ("differs", retryable()), ("fails", failed())] {
        let claim = claim(Mode::Edge, key, 1);
        let owner = take(trial, &claim).await;
        trial.store.observe_run(&run_ended(owner.operation_id, "success")).await.unwrap();
        assert_eq!(trial.store.finish(&owner, &outcome, &gone).await.unwrap(), Fenced::Done);
        let judged = trial.store.judge(owner.operation_id, &really()).await;
        assert!(matches!(judged, Err(StoreError::Refused(_))), "{key}: {judged:?}");
        assert_eq!(trial.store.runs_of(owner.operation_id).await.unwrap().len(), 1, "{key}");
        let seen = over(trial, &claim).await;
        let claimed = trial.store.claim(&again(&claim), Basis::Anew(&seen)).await.unwrap();
        assert!(claimed.is_some(), "{key}");
        expected.extend((key != "agrees").then_some(seen.operation_id));
    }
    expected.sort_unstable();
    assert_eq!(conflicts(trial).await.1, expected);
    for id in expected {
        trial.store.judge(id, &really()).await.unwrap();
    }
    assert_eq!(conflicts(trial).await, (vec![], vec![]), "their records are gone");
}
