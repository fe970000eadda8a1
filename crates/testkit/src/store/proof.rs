//! Cases of the check before COMMIT (R23): whatever a handler does to its transaction, its effects
//! never stand without the inbox row that keeps them from being done again.

use std::time::Duration;

use super::trial::{ENDED, LEASE, Tx, careless, due, effect, eventually, everything, message, new_entry};
use super::{Fixture, Trial};
use oncebox::store::{Inbox, Proof, RowLease, Undone, Waiting};

/// The state after a handler that wrote `before`, ran the statements, wrote `after`, and returned
/// Ok.
struct End {
    proof: Proof,
    before: i64,
    after: i64,
    known: bool,
}

async fn handler<F: Fixture>(trial: &Trial<F>, statements: &[&str]) -> End {
    let consumer = trial.consumer("c").await;
    let entry = new_entry();
    let mut tx: Tx = trial.store.begin(consumer).await.unwrap();
    assert_eq!(tx.admit(&[entry]).await.unwrap(), vec![None]);
    effect::<F>(tx.connection().unwrap(), "before", "").await.unwrap();
    for statement in statements {
        careless::<F>(tx.connection().unwrap(), statement).await;
    }
    let _ = effect::<F>(tx.connection().unwrap(), "after", "").await;
    // The runtime then commits only a proven transaction. It undoes any other, and `undo` returns
    // what became of it.
    let proof = tx.prove().await.unwrap();
    if proof == Proof::Same {
        tx.commit().await.unwrap();
    } else {
        let undone = tx.undo().await.unwrap();
        let known = trial.store.known(consumer, &[entry.id]).await.unwrap().contains(&entry.id);
        assert_eq!(undone, if known { Undone::Committed } else { Undone::Whole }, "{statements:?}");
        drop(tx);
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

/// Asserts that no connection of the pool kept a changed state.
async fn still_works<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    for round in 0..12 {
        let (entry, note) = (new_entry(), round.to_string());
        let mut tx = trial.store.begin(consumer).await.unwrap();
        assert_eq!(tx.admit(&[entry]).await.unwrap(), vec![None]);
        effect::<F>(tx.connection().unwrap(), "works", &note).await.unwrap();
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

/// The handler ignores the error of a statement. Either the database goes on and all effects are
/// there, or none is.
pub async fn r23_an_error_that_was_swallowed_never_commits_half<F: Fixture>(trial: &Trial<F>) {
    let end = handler(trial, &["insert into no_such_table (a) values (1)"]).await;
    match end.proof {
        Proof::Same => assert_eq!((end.before, end.after), (1, 1)),
        Proof::Aborted => assert_eq!((end.before, end.after), (0, 0)),
        Proof::Ended => panic!("nothing ended this transaction"),
    }
}

/// The proof never accepts what follows the handler's COMMIT as the transaction that was begun.
pub async fn r23_a_commit_of_the_handler_is_found_out<F: Fixture>(trial: &Trial<F>) {
    let end = handler(trial, &[F::COMMIT]).await;
    assert_eq!(end.known, F::CONCURRENT_WRITERS, "SQLite refuses it");
    assert_ne!(end.proof, Proof::Same);
    assert_eq!(end.known, end.before == 1, "what was committed, was committed with its inbox row");
}

/// The handler commits and begins a new transaction. The proof does not accept the new one.
pub async fn r23_a_commit_with_a_new_begin_is_found_out<F: Fixture>(trial: &Trial<F>) {
    let end = handler(trial, &[F::COMMIT, "begin"]).await;
    assert_ne!(end.proof, Proof::Same);
    assert_eq!(end.known, end.before == 1);
    assert_eq!(end.after, 0, "what came after is rolled back");
}

/// The new transaction of the handler fails. This does not hide what the handler committed before.
pub async fn r23_a_commit_with_a_new_begin_that_fails_is_found_out<F: Fixture>(trial: &Trial<F>) {
    let end = handler(trial, &[F::COMMIT, "begin", "insert into no_such_table (a) values (1)"]).await;
    assert_ne!(end.proof, Proof::Same);
    assert_eq!((end.known, end.after), (end.before == 1, 0));
}

/// Effects from before the handler's ROLLBACK are gone. Effects after it are gone too, unless the
/// database commits each such statement by itself; then the proof answers `Ended`.
pub async fn r23_a_rollback_of_the_handler_is_found_out<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    let entry = new_entry();
    let mut tx = trial.store.begin(consumer).await.unwrap();
    tx.admit(&[entry]).await.unwrap();
    effect::<F>(tx.connection().unwrap(), "before", "").await.unwrap();
    careless::<F>(tx.connection().unwrap(), "rollback").await;
    let _ = effect::<F>(tx.connection().unwrap(), "after", "").await;
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

/// The handler rolls back and begins a new transaction, which does not have our inbox rows.
pub async fn r23_a_rollback_with_a_new_begin_is_found_out<F: Fixture>(trial: &Trial<F>) {
    let end = handler(trial, &["rollback", "begin"]).await;
    assert_ne!(end.proof, Proof::Same);
    assert_eq!((end.before, end.after, end.known), (0, 0, false));
}

/// A second BEGIN is a warning, an error, or a commit of the first transaction. In each case no
/// effect is left without its inbox row.
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

/// A handler may release its savepoints or roll back to them: the transaction is still proven.
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

/// A transaction with one new id and one effect, in which a handler then ran `statement`.
async fn after<F: Fixture>(trial: &Trial<F>, statement: &str) -> (Tx, oncebox::store::InboxEntry) {
    let consumer = trial.consumer("c").await;
    let entry = new_entry();
    let mut tx = trial.store.begin(consumer).await.unwrap();
    tx.admit(&[entry]).await.unwrap();
    effect::<F>(tx.connection().unwrap(), "before", "").await.unwrap();
    careless::<F>(tx.connection().unwrap(), statement).await;
    (tx, entry)
}

/// The connection was lost after the handler's COMMIT: `undo` still answers `Committed`. Without
/// that COMMIT it answers `Lost`, a transient failure.
pub async fn what_a_handler_committed_is_told_although_its_connection_is_lost<F: Fixture>(trial: &Trial<F>) {
    let case = "what_a_handler_committed_is_told_although_its_connection_is_lost";
    let consumer = trial.consumer("c").await;
    for (statement, expected) in [(F::COMMIT, Undone::Committed), ("select 1", Undone::Lost)] {
        let (mut tx, entry) = after(trial, statement).await;
        if !trial.end_connection(case, tx.connection().unwrap()).await {
            return tx.rollback().await.unwrap();
        }
        assert_eq!(tx.undo().await.unwrap(), expected, "{statement}");
        let known = trial.store.known(consumer, &[entry.id]).await.unwrap();
        assert_eq!(known.len(), usize::from(expected == Undone::Committed), "{statement}");
    }
}

/// A statement of the handler still runs when `undo` is called. It ends with the transaction, so
/// that its locks are free for others.
pub async fn what_a_handler_committed_is_told_while_a_statement_of_it_runs<F: Fixture>(trial: &Trial<F>) {
    if !F::CONCURRENT_WRITERS {
        return; // With a single writer, no statement waits for the lock of another transaction.
    }
    let consumer = trial.consumer("c").await;
    trial.run("create table held (id int primary key, by_whom varchar(9))").await;
    trial.run("insert into held (id) values (1)").await;
    for (statement, expected) in [(F::COMMIT, Undone::Committed), ("select 1", Undone::Whole)] {
        let mut holder = trial.begin().await;
        F::run(&mut holder, "update held set by_whom = 'first' where id = 1").await.unwrap();
        let (mut tx, entry) = after(trial, statement).await;
        let waits = F::run(tx.connection().unwrap(), "update held set by_whom = 'second' where id = 1");
        // The runtime drops a handler that runs out of time in the same way.
        assert!(tokio::time::timeout(Duration::from_millis(300), waits).await.is_err());
        assert_eq!(tx.undo().await.unwrap(), expected, "{statement}");
        holder.commit().await.unwrap();
        assert_eq!(trial.number("select count(*) from held where by_whom = 'second'").await, 0, "{statement}");
        let mut again = trial.store.begin(consumer).await.unwrap();
        let known = again.admit(&[entry]).await.unwrap()[0].is_some();
        assert_eq!(known, expected == Undone::Committed, "{statement}");
        again.rollback().await.unwrap();
    }
}

/// The handler's own COMMIT left the head dead. The answer `Committed` of `undo` tells of it.
pub async fn a_head_that_a_handler_committed_is_told<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    for statement in ["select 1", F::COMMIT] {
        trial.park(consumer, &message(statement, ""), due()).await;
        let head = trial.store.lease_due(consumer, &everything(), &RowLease::new(LEASE)).await.unwrap().unwrap();
        let mut tx = trial.store.begin(consumer).await.unwrap();
        assert!(tx.bury(std::slice::from_ref(&head), ENDED, "no", true).await.unwrap());
        careless::<F>(tx.connection().unwrap(), statement).await;
        let undone = tx.undo().await.unwrap();
        drop(tx);
        let stands = trial.store.give_back(consumer, &[head]).await.unwrap() == 1;
        assert_eq!(undone, if stands { Undone::Whole } else { Undone::Committed }, "{statement}");
        assert_eq!(stands, statement != F::COMMIT || !F::CONCURRENT_WRITERS, "{statement}: SQLite refuses a commit");
    }
}

/// The connection was lost for longer than the lease, or the handler rolled back, and another
/// process handled the message meanwhile. `undo` must not answer `Committed`: the message would be
/// reported as dead. Shown to fail where a row that is gone counts as committed by the handler.
pub async fn a_head_that_another_process_finished_is_not_told_as_committed<F: Fixture>(trial: &Trial<F>) {
    if !F::CONCURRENT_WRITERS {
        return; // With a single writer, no peer writes before this transaction is undone.
    }
    let case = "a_head_that_another_process_finished_is_not_told_as_committed";
    let consumer = trial.consumer("c").await;
    for end in ["its connection", "rollback"] {
        trial.park(consumer, &message(end, ""), due()).await;
        let lease = RowLease::new(Duration::from_millis(1));
        let head = trial.store.lease_due(consumer, &everything(), &lease).await.unwrap().unwrap();
        let mut tx = trial.store.begin(consumer).await.unwrap();
        assert!(tx.bury(std::slice::from_ref(&head), ENDED, "no", true).await.unwrap());
        match end {
            "rollback" => careless::<F>(tx.connection().unwrap(), end).await,
            // The server frees the row once it has noticed the lost connection. The peer waits for
            // that.
            _ if trial.end_connection(case, tx.connection().unwrap()).await => {}
            _ => {
                tx.rollback().await.unwrap();
                trial.run(&format!("delete from {}", trial.table("waiting"))).await;
                continue;
            }
        }
        let all = everything();
        let again = eventually("the head is due again", async || {
            trial.store.lease_due(consumer, &all, &RowLease::new(LEASE)).await.unwrap()
        })
        .await;
        let mut peer = trial.store.begin(consumer).await.unwrap();
        assert!(peer.bury(std::slice::from_ref(&again), ENDED, "no", true).await.unwrap());
        assert!(peer.finish().await.unwrap());
        peer.commit().await.unwrap();
        let undone = tx.undo().await.unwrap();
        assert_eq!(undone, if end == "rollback" { Undone::Whole } else { Undone::Lost }, "{end}");
    }
}

/// A handler removed the row of its message. Then nothing that it wrote may stay. Shown by: not
/// counting what is removed after it.
pub async fn a_head_that_its_handler_changed_is_not_finished<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    trial.park(consumer, &message("k", ""), due()).await;
    let head = trial.store.lease_due(consumer, &everything(), &RowLease::new(LEASE)).await.unwrap().unwrap();
    for is_changed in [true, false] {
        let mut tx = trial.store.begin(consumer).await.unwrap();
        assert!(tx.bury(std::slice::from_ref(&head), ENDED, "no", true).await.unwrap());
        let delete = format!("delete from {} where sequence = {}", trial.table("waiting"), head.sequence);
        if is_changed {
            assert_eq!(F::run(tx.connection().unwrap(), &delete).await.unwrap(), 1);
        }
        assert_eq!(tx.prove().await.unwrap(), Proof::Same);
        assert_eq!(tx.finish().await.unwrap(), !is_changed);
        assert_eq!(tx.undo().await.unwrap(), Undone::Whole);
    }
    assert_eq!(trial.store.give_back(consumer, &[head]).await.unwrap(), 1);
}
