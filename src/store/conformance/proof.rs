//! Cases of the check before COMMIT (R23): whatever a handler does to its transaction, its effects never stand without the
//! inbox row that keeps them from being done again.

use super::trial::{Tx, effect, new_entry};
use super::{Connection, Fixture, Trial};
use crate::store::{Inbox, InboxTx, Proof};

/// Runs SQL as a careless handler does: an error is swallowed.
async fn careless<F: Fixture>(connection: &mut Connection<F>, sql: &str) {
    let _ = F::run(connection, sql).await;
}

/// What came of a handler that wrote `before`, ran the statements, wrote `after`, and returned Ok.
struct End {
    proof: Proof,
    before: i64,
    after: i64,
    known: bool,
}

async fn handler<F: Fixture>(trial: &Trial<F>, statements: &[&str]) -> End {
    let consumer = trial.consumer("c").await;
    let entry = new_entry();
    let mut tx: Tx<F> = trial.store.begin(consumer).await.unwrap();
    assert_eq!(tx.admit(&[entry]).await.unwrap().known, vec![None]);
    effect::<F>(tx.connection(), "before", "").await.unwrap();
    for statement in statements {
        careless::<F>(tx.connection(), statement).await;
    }
    let _ = effect::<F>(tx.connection(), "after", "").await;
    // Then what the runtime does: commit only what is proven.
    let proof = tx.prove().await.unwrap();
    if proof == Proof::Same {
        tx.commit().await.unwrap();
    } else {
        // A transaction that was ended may have nothing to roll back.
        let _ = tx.rollback().await;
    }
    let known = trial.store.known(consumer, &[entry.id]).await.unwrap().contains(&entry.id);
    let end = End { proof, before: trial.effects("before").await, after: trial.effects("after").await, known };
    if end.proof == Proof::Same {
        assert!(end.known, "a proven transaction has its inbox row");
        assert_eq!(end.before, 1, "a proven transaction has all effects");
    }
    assert!(end.known || end.before + end.after == 0, "an effect without an inbox row would be done again");
    still_works(trial).await;
    end
}

/// No connection of the pool was left in a state of its own.
async fn still_works<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    for round in 0..12 {
        let (entry, note) = (new_entry(), round.to_string());
        let mut tx = trial.store.begin(consumer).await.unwrap();
        assert_eq!(tx.admit(&[entry]).await.unwrap().known, vec![None]);
        effect::<F>(tx.connection(), "works", &note).await.unwrap();
        assert_eq!(tx.prove().await.unwrap(), Proof::Same);
        if round % 2 == 0 {
            tx.commit().await.unwrap();
        } else {
            tx.rollback().await.unwrap();
        }
        let known = trial.store.known(consumer, &[entry.id]).await.unwrap().len();
        assert_eq!(known, if round % 2 == 0 { 1 } else { 0 });
        trial.run("update effect set note = 'seen' where message = 'works'").await;
    }
    assert_eq!(trial.effects("works").await, 6);
}

/// Either the database goes on, and all is there, or nothing is.
pub async fn r23_an_error_that_was_swallowed_never_commits_half<F: Fixture>(trial: &Trial<F>) {
    let end = handler(trial, &["insert into no_such_table (a) values (1)"]).await;
    match end.proof {
        Proof::Same => assert_eq!((end.before, end.after), (1, 1)),
        Proof::Aborted => assert_eq!((end.before, end.after), (0, 0)),
        Proof::Ended => panic!("nothing ended this transaction"),
    }
}

/// It is never taken for the transaction that was begun.
pub async fn r23_a_commit_of_the_handler_is_found_out<F: Fixture>(trial: &Trial<F>) {
    let end = handler(trial, &["commit"]).await;
    assert_ne!(end.proof, Proof::Same);
    assert_eq!(end.known, end.before == 1, "what was committed, was committed with its inbox row");
    if end.known {
        assert_eq!(end.proof, Proof::Ended, "so that the runtime looks, and does not take it for a duplicate");
    }
}

/// A fresh transaction in place of the old one.
pub async fn r23_a_commit_with_a_new_begin_is_found_out<F: Fixture>(trial: &Trial<F>) {
    let end = handler(trial, &["commit", "begin"]).await;
    assert_ne!(end.proof, Proof::Same);
    assert_eq!(end.known, end.before == 1);
    assert_eq!(end.after, 0, "what came after is rolled back");
}

/// A fresh transaction in place of the old one, which then fails: what was committed before is not hidden by it.
pub async fn r23_a_commit_with_a_new_begin_that_fails_is_found_out<F: Fixture>(trial: &Trial<F>) {
    let end = handler(trial, &["commit", "begin", "insert into no_such_table (a) values (1)"]).await;
    assert_ne!(end.proof, Proof::Same);
    assert_eq!((end.known, end.after), (end.before == 1, 0));
    if end.known {
        assert_eq!(end.proof, Proof::Ended, "so that the runtime looks, and does not take it for a duplicate");
    }
}

/// Nothing stays of what came before; nor of what came after, unless the database commits that by itself.
pub async fn r23_a_rollback_of_the_handler_is_found_out<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    let entry = new_entry();
    let mut tx = trial.store.begin(consumer).await.unwrap();
    tx.admit(&[entry]).await.unwrap();
    effect::<F>(tx.connection(), "before", "").await.unwrap();
    careless::<F>(tx.connection(), "rollback").await;
    let _ = effect::<F>(tx.connection(), "after", "").await;
    let proof = tx.prove().await.unwrap();
    assert_ne!(proof, Proof::Same);
    let _ = tx.rollback().await;
    assert!(trial.store.known(consumer, &[entry.id]).await.unwrap().is_empty());
    assert_eq!(trial.effects("before").await, 0);
    if F::UNDOES_WHAT_FOLLOWS {
        assert_eq!(trial.effects("after").await, 0);
    } else {
        assert_eq!(proof, Proof::Ended, "loud, for the effect stands without its inbox row");
    }
    still_works(trial).await;
}

/// A fresh transaction without our inbox rows.
pub async fn r23_a_rollback_with_a_new_begin_is_found_out<F: Fixture>(trial: &Trial<F>) {
    let end = handler(trial, &["rollback", "begin"]).await;
    assert_ne!(end.proof, Proof::Same);
    assert_eq!((end.before, end.after, end.known), (0, 0, false));
}

/// A warning, an error, or a commit of the first: each is either harmless or found out.
pub async fn r23_a_second_begin_never_splits_the_transaction<F: Fixture>(trial: &Trial<F>) {
    let end = handler(trial, &["start transaction", "begin"]).await;
    match end.proof {
        Proof::Same => assert_eq!((end.before, end.after), (1, 1)),
        Proof::Aborted => assert_eq!((end.before, end.after), (0, 0)),
        Proof::Ended => assert_eq!(end.after, 0, "what came after is rolled back"),
    }
}

/// DDL commits on some databases and is part of the transaction on others.
pub async fn r23_a_table_made_by_the_handler_never_splits_the_transaction<F: Fixture>(trial: &Trial<F>) {
    let end = handler(trial, &["create table made_by_handler (a int)"]).await;
    match end.proof {
        Proof::Same => assert_eq!((end.before, end.after), (1, 1)),
        Proof::Aborted => assert_eq!((end.before, end.after), (0, 0)),
        Proof::Ended => assert!(end.known && end.after == 0, "committed with its inbox row, the rest rolled back"),
    }
}

/// Savepoints, released or rolled back to, are no reason for an alarm.
pub async fn r23_savepoints_of_the_handler_are_its_own<F: Fixture>(trial: &Trial<F>) {
    let insert = "insert into effect (message, note) values ('inner', '')";
    let end = handler(
        trial,
        &["savepoint mine", insert, "rollback to savepoint mine", "savepoint other", insert, "release savepoint other"],
    )
    .await;
    assert_eq!((end.proof, end.before, end.after), (Proof::Same, 1, 1));
    assert_eq!(trial.effects("inner").await, 1);
}
