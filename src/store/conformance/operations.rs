//! Cases of outcomes in the application's own transaction (O2).

use super::keys::{KEPT, SHORT, claim, completed, record, take};
use super::phases::run_ended;
use super::trial::{effect, eventually};
use super::{Fixture, Trial};
use crate::policy::operation::retention::Retention;
use crate::policy::operation::{Mode, State};
use crate::store::{Bridged, Fenced, KeyClaim, Keys};

/// The completion stands in the handler's transaction, or not at all; fenced out, it rolls back.
pub async fn o2_a_bridged_outcome_goes_with_the_handlers_transaction<F: Fixture>(trial: &Trial<F>) {
    let claim = KeyClaim { lease: SHORT, ..claim(Mode::Bridged, "k", 1) };
    let old = take(trial, &claim).await;
    for commit in [false, true] {
        let mut tx = trial.begin().await;
        effect::<F>(&mut tx, "bridged", "1").await.unwrap();
        assert_eq!(tx.finish_in(&old, &completed(), &KEPT).await.unwrap(), Fenced::Done);
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
    let late = tx.finish_in(&old, &completed(), &KEPT).await.unwrap();
    tx.rollback().await.unwrap();
    assert_eq!(late, Fenced::LostOwnership);
}

/// A body may outlive its record: the next run of the key, at the same epoch again, keeps a body of
/// its own.
///
/// Shown by: a purge that leaves the body (MariaDB, SQLite): the outcome cannot be written.
pub async fn m100_a_purge_takes_the_bodies_of_its_records<F: Fixture>(trial: &Trial<F>) {
    let gone = Retention { ttl: SHORT, metadata: SHORT, ..KEPT };
    let claim = claim(Mode::Edge, "k", 1);
    let owner = take(trial, &claim).await;
    assert_eq!(trial.store.finish(&owner, &completed(), &gone).await.unwrap(), Fenced::Done);
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

/// A run that lost its lease and ended after all has said so by evidence: its key is not free,
/// whatever was found out elsewhere.
///
/// Shown by: a release that does not look at the evidence.
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
            assert_eq!(
                trial.store.finish(&owner, &completed(), &KEPT).await.unwrap(),
                Fenced::Done,
                "it is still ours"
            );
        }
    }
}
