//! Cases of later phases with an unknown outcome: their driver died, or its connection was lost
//! (O1, O9).

use std::time::Duration;

use uuid::Uuid;

use super::key_operator::really;
use super::keys::{KEPT, LONG, PATIENCE, SHORT, completed};
use super::phases::{MOVED, local, new_operation, step, stored, taken};
use super::trial::{effect, eventually};
use super::{Fixture, Trial};
use oncebox::operation::Stage;
use oncebox::store::{Driven, Fenced, KeyOperator, PhaseTx, Phases, Proof, Run};

type Tx = Box<dyn PhaseTx>;

/// Begins a run of a phase. The server may take a moment to end a dropped connection, so this asks
/// again while an earlier run has not ended.
async fn run<F: Fixture>(trial: &Trial<F>, driven: &Driven, point: &str) -> Run<Tx> {
    eventually("every run before has ended", || async {
        Some(trial.store.begin_run(driven, point).await.unwrap()).filter(|run| !matches!(run, Run::Unended))
    })
    .await
}

async fn begun<F: Fixture>(trial: &Trial<F>, driven: &Driven, point: &str) -> Tx {
    match run(trial, driven, point).await {
        Run::Begun(tx) => tx,
        Run::Marked => panic!("nothing of it was committed"),
        Run::Unended => panic!("every run before has ended"),
        Run::Overtaken => panic!("nobody else has driven it"),
    }
}

async fn is_marked<F: Fixture>(trial: &Trial<F>, driven: &Driven) -> bool {
    matches!(run(trial, driven, "LOCAL").await, Run::Marked)
}

async fn is_overtaken<F: Fixture>(trial: &Trial<F>, driven: &Driven, point: &str) -> bool {
    matches!(run(trial, driven, point).await, Run::Overtaken)
}

/// Parks the operation for this reason. An operator then retries it, and another driver takes it.
async fn goes_on<F: Fixture>(trial: &Trial<F>, driven: &Driven, reason: &str, accept_duplicate: bool) -> Driven {
    assert_eq!(trial.store.park(driven, reason).await.unwrap(), Fenced::Done);
    trial.store.retry(&stored(trial, driven).await, accept_duplicate, false, &really()).await.unwrap();
    taken(trial, driven.operation_id).await.0
}

/// A handler committed the transaction of its phase, and so its mark. The mark stays: also for
/// another driver, behind another point, and after parking for a reason that says nothing of the
/// phase. Parking for the reason that tells an operator of it removes it: from then on only one who
/// accepts a duplicate lets the operation go on.
///
/// Shown by: no mark; a mark that every reason removes, that a phase of another epoch removes, or
/// that no reason removes.
pub async fn o1_a_phase_that_somebody_else_committed_is_not_begun_again<F: Fixture>(trial: &Trial<F>) {
    let old = local(trial, &new_operation("k", LONG)).await;
    let mut tx = begun(trial, &old, "LOCAL").await;
    effect::<F>(tx.connection().unwrap(), "ran", "1").await.unwrap();
    let committed = F::run(tx.connection().unwrap(), "commit").await.is_ok();
    assert_eq!(committed, F::CONCURRENT_WRITERS, "SQLite refuses it");
    // The process of the driver dies.
    drop(tx);
    assert_eq!(trial.store.drive_on(&old, SHORT).await.unwrap(), Fenced::Done);
    let (mut driven, _) = taken(trial, old.operation_id).await;
    assert_eq!(trial.effects("ran").await, i64::from(committed));
    if committed {
        assert!(is_marked(trial, &driven).await);
        step(trial, &driven, "LOCAL", "LOCAL", Stage::Local, &[]).await;
        assert!(is_marked(trial, &driven).await, "a phase of ours says nothing of it");
        driven = goes_on(trial, &driven, "phase-failed", false).await;
        assert!(is_marked(trial, &driven).await, "nobody was told");
        driven = goes_on(trial, &driven, "phase-ended-its-transaction", true).await;
    }
    let mut tx = begun(trial, &driven, "LOCAL").await;
    effect::<F>(tx.connection().unwrap(), "ran", "2").await.unwrap();
    assert_eq!(tx.advance("LOCAL", "NEXT", Stage::Local, &[]).await.unwrap(), MOVED);
    tx.commit().await.unwrap();
    assert_eq!(trial.effects("ran").await, 1 + i64::from(committed));
    begun(trial, &driven, "NEXT").await.rollback().await.unwrap();
}

/// A run that was lost or failed leaves no mark, so the phase is begun again. A run that moved on
/// removes its mark, so the next phase is begun.
///
/// Shown by: a phase that moves on without removing its mark.
pub async fn o9_a_phase_of_which_nothing_was_committed_is_begun_again<F: Fixture>(trial: &Trial<F>) {
    let driven = local(trial, &new_operation("k", LONG)).await;
    for _ in 0..2 {
        let mut lost = begun(trial, &driven, "LOCAL").await;
        effect::<F>(lost.connection().unwrap(), "ran", "lost").await.unwrap();
    }
    let mut failed = begun(trial, &driven, "LOCAL").await;
    effect::<F>(failed.connection().unwrap(), "ran", "failed").await.unwrap();
    assert_eq!(failed.undo_effects().await.unwrap(), Proof::Same);
    failed.rollback().await.unwrap();
    for (from, to) in [("LOCAL", "NEXT"), ("NEXT", "LOCAL"), ("LOCAL", "LAST")] {
        let mut tx = begun(trial, &driven, from).await;
        effect::<F>(tx.connection().unwrap(), "ran", to).await.unwrap();
        assert_eq!(tx.advance(from, to, Stage::Local, &[]).await.unwrap(), MOVED);
        tx.commit().await.unwrap();
    }
    let mut tx = begun(trial, &driven, "LAST").await;
    assert_eq!(tx.finish("LAST", &completed(), &KEPT).await.unwrap(), MOVED);
    tx.commit().await.unwrap();
    assert_eq!(trial.effects("ran").await, 3);
    assert!(is_overtaken(trial, &driven, "LAST").await, "no mark is left, and it has its outcome");
    let unknown = Driven { operation_id: Uuid::now_v7(), ..driven };
    assert!(trial.store.begin_run(&unknown, "LOCAL").await.is_err());
}

/// The outcome of the earlier run is not known, because its COMMIT may still be on its way.
/// `Unended` is answered before the server's usual lock wait is over. On a store with a single
/// writer, the new run waits for the earlier one.
///
/// Shown by: a SELECT of committed marks in place of the INSERT of one; the usual lock wait at that
/// INSERT.
pub async fn o9_a_phase_is_not_begun_beside_a_run_that_has_not_ended<F: Fixture>(trial: &Trial<F>) {
    for commits in [false, true] {
        let driven = local(trial, &new_operation(&format!("k{commits}"), LONG)).await;
        let mut old = begun(trial, &driven, "LOCAL").await;
        effect::<F>(old.connection().unwrap(), "ran", "1").await.unwrap();
        let begins = async || trial.store.begin_run(&driven, "LOCAL").await.unwrap();
        if F::CONCURRENT_WRITERS {
            for _ in 0..2 {
                let begun = tokio::time::timeout(PATIENCE, begins()).await.unwrap();
                assert!(matches!(begun, Run::Unended), "{begun:?}");
            }
        } else {
            let waits = tokio::time::timeout(Duration::from_millis(200), begins()).await;
            assert!(waits.is_err(), "it waits for the run before");
        }
        if commits {
            assert_eq!(F::run(old.connection().unwrap(), "commit").await.is_ok(), F::CONCURRENT_WRITERS);
        }
        drop(old);
        assert_eq!(is_marked(trial, &driven).await, commits && F::CONCURRENT_WRITERS);
    }
}

/// A driver read the operation and then froze. Meanwhile another driver ran the phase, its handler
/// committed, and the operation was parked; or it moved on; or the frozen driver's own COMMIT,
/// whose answer was lost, took effect.
///
/// Shown by: not reading the operation again under the mark (a handler that commits by itself did
/// so twice).
pub async fn o9_a_driver_that_was_overtaken_begins_no_run<F: Fixture>(trial: &Trial<F>) {
    let old = local(trial, &new_operation("k", SHORT)).await;
    let (new, _) = taken(trial, old.operation_id).await;
    assert!(is_overtaken(trial, &old, "LOCAL").await, "another has it");
    let mut tx = begun(trial, &new, "LOCAL").await;
    effect::<F>(tx.connection().unwrap(), "ran", "1").await.unwrap();
    let committed = F::run(tx.connection().unwrap(), "commit").await.is_ok();
    drop(tx);
    assert_eq!(committed, F::CONCURRENT_WRITERS);
    assert_eq!(trial.store.park(&new, "phase-ended-its-transaction").await.unwrap(), Fenced::Done);
    assert!(is_overtaken(trial, &old, "LOCAL").await, "an operator has it");
    assert!(is_overtaken(trial, &new, "LOCAL").await, "an operator has it");

    let driven = local(trial, &new_operation("l", LONG)).await;
    let mut tx = begun(trial, &driven, "LOCAL").await;
    assert_eq!(tx.advance("LOCAL", "NEXT", Stage::Local, &[]).await.unwrap(), MOVED);
    tx.commit().await.unwrap();
    assert!(is_overtaken(trial, &driven, "LOCAL").await, "it stands elsewhere");
}
