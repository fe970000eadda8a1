//! Cases of operations that go to an operator, or back, and of proof that comes meanwhile (O8, O9,
//! O22).

use std::time::Duration;

use uuid::Uuid;

use super::keys::{LONG, record};
use super::phases::{AT_ONCE, new_operation, observed, outstanding, stored, taken};
use super::trial::eventually;
use super::{Fixture, Trial};
use oncebox::operation::{Stage, State};
use oncebox::store::{Driven, Due, Fenced, KeyOperator, Leave, OperationFilter, Phases};

/// An operation that cannot be read is parked, and the others are taken. An operation without its
/// record can still be parked.
///
/// Shown by: a query that fails at the first unreadable operation, so that all three stay for ever;
/// one that does not take an operation without its record; a list that fails in the same way.
pub async fn o22_an_operation_that_cannot_be_read_is_parked_and_the_others_are_taken<F: Fixture>(trial: &Trial<F>) {
    let mut due = Vec::new();
    for key in ["corrupt", "gone", "sound"] {
        let driven = outstanding(trial, &new_operation(key, LONG)).await;
        assert_eq!(trial.store.hand_back(&driven, AT_ONCE).await.unwrap(), Fenced::Done);
        due.push(driven);
    }
    trial.store.observe(&observed(&due[0], "wait")).await.unwrap();
    trial.run(&format!("update {} set status = 70000", trial.table("operation_evidence"))).await;
    let due_now = trial.store.take_due("create_charge", &[2], 10, LONG, &[]).await.unwrap();
    let ids: Vec<Uuid> = due_now.iter().map(|(driven, _)| driven.operation_id).collect();
    assert_eq!(ids, [due[1].operation_id, due[2].operation_id]);
    assert!(matches!(trial.store.operation(due[0].operation_id).await, Err(oncebox::StoreError::Corrupt(_))));
    let aside = "parked = 'unreadable: unexpected data: column 6 (`status`) of a row: 70000 is out of range' and owner is null and due_at is null";
    assert_eq!(trial.number(&format!("select count(*) from {} where {aside}", trial.table("operation"))).await, 1);
    let parked = OperationFilter { parked: true, limit: 10, ..OperationFilter::default() };
    let found = trial.store.operations(&parked).await.unwrap();
    assert_eq!((found.operations, found.unreadable.len(), found.unreadable[0].0), (vec![], 1, due[0].operation_id));
    assert_eq!(record(trial, &new_operation("corrupt", LONG).claim).await.state, State::UnknownRequiresRecovery);
    assert!(trial.store.take_due("create_charge", &[2], 10, LONG, &[]).await.unwrap().is_empty());
    let delete = format!("delete from {} where state = 'IN_PROGRESS'", trial.table("idempotency_request"));
    assert_eq!(trial.run(&delete).await, 2);
    for (driven, _) in &due_now {
        assert_eq!(trial.store.park(driven, "record-gone").await.unwrap(), Fenced::Done);
        assert_eq!(stored(trial, driven).await.parked.as_deref(), Some("record-gone"));
    }
}

/// The transaction that parks reads all evidence that came before. Evidence that comes later is
/// stored at once, and `unpark` then waits for that transaction and takes the operation back.
///
/// Shown by: `unpark` without a lock on the row (on PostgreSQL the operation stayed parked).
pub async fn o8_who_brings_proof_is_seen_by_a_parking_or_finds_it<F: Fixture>(trial: &Trial<F>) {
    let driven = outstanding(trial, &new_operation("k", LONG)).await;
    assert_eq!(trial.store.unpark(driven.operation_id).await.unwrap(), Fenced::LostOwnership, "it is not parked");
    trial.store.observe(&observed(&driven, "wait")).await.unwrap();
    let mut tx = trial.store.begin_phase(&driven).await.unwrap();
    assert_eq!(tx.park("no").await.unwrap(), Fenced::Done);
    assert_eq!(tx.evidence().await.unwrap().len(), 1);
    let (store, id, late) = (trial.store.clone(), driven.operation_id, observed(&driven, "success"));
    let mut brings = tokio::spawn(async move {
        store.observe(&late).await.unwrap();
        store.unpark(id).await.unwrap()
    });
    if F::CONCURRENT_WRITERS {
        // Evidence is stored without waiting for the lock (O8).
        eventually("evidence beside the parking", || async {
            (stored(trial, &driven).await.evidence.len() == 2).then_some(())
        })
        .await;
    }
    let waits = tokio::time::timeout(Duration::from_millis(200), &mut brings).await;
    assert!(waits.is_err(), "it waits for the parking");
    tx.commit().await.unwrap();
    assert_eq!(brings.await.unwrap(), Fenced::Done);
    let found = stored(trial, &driven).await;
    assert_eq!((found.parked, found.stage, found.lease_until), (None, Stage::Unknown, None));
    let (next, found) = taken(trial, driven.operation_id).await;
    assert_eq!((next.epoch, found.evidence.len()), (2, 2));
    let lost = Driven { epoch: 1, ..driven };
    let mut tx = trial.store.begin_phase(&lost).await.unwrap();
    assert_eq!(tx.park("no").await.unwrap(), Fenced::LostOwnership);
    tx.rollback().await.unwrap();
}

/// An operation that is handed back without a new time keeps its due time (O9).
///
/// Shown by: making it due at once where no time is given (PostgreSQL).
pub async fn o9_what_is_left_as_it_was_due_is_due_when_it_was<F: Fixture>(trial: &Trial<F>) {
    let driven = outstanding(trial, &new_operation("k", LONG)).await;
    trial.store.hand_back(&driven, Due { after: Some(LONG), attempt: false }).await.unwrap();
    let due = stored(trial, &driven).await.due_at;
    let as_before = Due { after: None, attempt: false };
    for leave in [Leave::HandBack(as_before), Leave::Doubt(as_before)] {
        let (driven, _) = taken(trial, driven.operation_id).await;
        let left = trial.store.leave(&driven, leave).await.unwrap();
        assert_eq!((left, stored(trial, &driven).await.due_at), (Fenced::Done, due));
    }
}
