//! Cases of a connection that is lost in the inbox transaction (R27, G12): every statement then
//! fails with a transient error, and the outcome of a commit is unknown.

use super::trial::{LEASE, Tx, due, effect, everything, message, new_entry, new_message, parked};
use super::{Connection, Fixture, Trial};
use oncebox::error::{HandlerError, StoreError};
use oncebox::message::Message;
use oncebox::store::{Inbox, InboxEntry, ParkAs, Proof, RowLease, Waiting};

const STATEMENTS: [&str; 11] =
    ["admit", "blocked", "park", "forget", "bury", "finish", "wake", "clear attempts", "handler", "enqueue", "prove"];

async fn bury<F: Fixture>(trial: &Trial<F>, tx: &mut Tx) -> Result<(), StoreError> {
    // The lease uses another connection, which is not lost.
    let consumer = trial.consumer("c").await;
    let leased = trial.store.lease_due(consumer, &everything(), &RowLease::new(LEASE)).await.unwrap().unwrap();
    tx.bury(&[leased], "transaction-ended", "lost", true).await.map(drop)
}

/// Runs one statement of the transaction. Returns whether its error is transient, with its text, or
/// None where it did not fail.
async fn run<F: Fixture>(
    trial: &Trial<F>,
    tx: &mut Tx,
    statement: &str,
    entry: InboxEntry,
    waiting: &Message,
) -> Option<(bool, String)> {
    let lane = waiting.lane_id().unwrap();
    let outcome = match statement {
        "admit" => tx.admit(&[entry]).await.map(drop),
        "blocked" => tx.standing(&[lane]).await.map(drop),
        "park" => tx.park(&[parked(&message("other", "1"), ParkAs::Behind)]).await,
        "forget" => tx.forget(&[entry.id]).await,
        "bury" => bury(trial, tx).await,
        "finish" => tx.finish().await.map(drop),
        "wake" => tx.wake(&[lane]).await,
        "clear attempts" => tx.clear_attempts(&[entry.id]).await,
        "handler" => {
            // A handler that uses `?` returns its error in this form.
            let error = HandlerError::from(effect::<F>(tx.connection().unwrap(), "m", "").await.err()?);
            return Some((error.is_transient(), error.to_string()));
        }
        "enqueue" => oncebox::store::enqueue::<Connection<F>>(tx.connection().unwrap(), new_message("k", "follow-up"))
            .await
            .map(drop),
        _ => tx.prove().await.map(drop),
    };
    outcome.err().map(|error| (error.is_transient(), error.to_string()))
}

/// Each statement runs on a connection that was ended just before, and fails with a transient
/// error. Nothing is written, and the next connection works.
pub async fn r27_a_lost_connection_in_any_statement_of_the_inbox_transaction_is_a_transient_failure<F: Fixture>(
    trial: &Trial<F>,
) {
    let case = "r27_a_lost_connection_in_any_statement_of_the_inbox_transaction_is_a_transient_failure";
    let consumer = trial.consumer("c").await;
    let waiting = message("k", "1");
    trial.park(consumer, &waiting, due()).await;
    trial.park(consumer, &message("k2", "1"), due()).await;
    for statement in STATEMENTS {
        let entry = new_entry();
        let mut tx = trial.store.begin(consumer).await.unwrap();
        if statement != "admit" {
            tx.admit(&[entry]).await.unwrap();
            effect::<F>(tx.connection().unwrap(), "m", "").await.unwrap();
        }
        if statement == "finish" && F::KILL.is_some() {
            // It runs a statement only where something was made dead.
            bury(trial, &mut tx).await.unwrap();
        }
        if !trial.end_connection(case, tx.connection().unwrap()).await {
            return tx.rollback().await.unwrap();
        }
        match run(trial, &mut tx, statement, entry, &waiting).await {
            Some((true, _)) => {}
            Some((false, error)) => panic!("{statement}: {error}"),
            None => panic!("{statement}: worked on a connection that was ended"),
        }
        let _ = tx.rollback().await;
        assert!(trial.store.known(consumer, &[entry.id]).await.unwrap().is_empty(), "{statement}");
        assert_eq!(trial.effects("m").await, 0, "{statement}");
    }
}

/// The COMMIT did not reach the server, but the client cannot know that: the error is
/// `CommitUnknown`, which is transient. A second try finds that nothing was written.
pub async fn g12_a_commit_on_a_lost_connection_is_unknown_and_not_an_error<F: Fixture>(trial: &Trial<F>) {
    let case = "g12_a_commit_on_a_lost_connection_is_unknown_and_not_an_error";
    let consumer = trial.consumer("c").await;
    let entry = new_entry();
    for lost in [true, false] {
        let mut tx = trial.store.begin(consumer).await.unwrap();
        assert_eq!(tx.admit(&[entry]).await.unwrap(), vec![None]);
        effect::<F>(tx.connection().unwrap(), "m", "").await.unwrap();
        assert_eq!(tx.prove().await.unwrap(), Proof::Same);
        if !lost {
            tx.commit().await.unwrap();
        } else if trial.end_connection(case, tx.connection().unwrap()).await {
            let outcome = tx.commit().await;
            assert!(
                matches!(&outcome, Err(error @ StoreError::CommitUnknown(_)) if error.is_transient()),
                "{outcome:?}"
            );
        } else {
            tx.rollback().await.unwrap();
        }
    }
    assert_eq!(trial.effects("m").await, 1);
}
