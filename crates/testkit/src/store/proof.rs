//! Cases of the check before COMMIT (R23): whatever a handler does to its transaction, its effects
//! never stand without the inbox row that keeps them from being done again.

use std::time::Duration;

use super::trial::{LEASE, Tx, due, effect, eventually, everything, message, new_entry};
use super::{Connection, Fixture, Trial};
use oncebox::store::{Claim, Inbox, Proof, Undone, Waiting};

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
    let mut tx: Tx = trial.store.begin(consumer).await.unwrap();
    assert_eq!(tx.admit(&[entry]).await.unwrap().known, vec![None]);
    effect::<F>(tx.connection().unwrap(), "before", "").await.unwrap();
    for statement in statements {
        careless::<F>(tx.connection().unwrap(), statement).await;
    }
    let _ = effect::<F>(tx.connection().unwrap(), "after", "").await;
    // Then what the runtime does: commit only what is proven, and look what became of the rest.
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

/// No connection of the pool was left in a state of its own.
async fn still_works<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    for round in 0..12 {
        let (entry, note) = (new_entry(), round.to_string());
        let mut tx = trial.store.begin(consumer).await.unwrap();
        assert_eq!(tx.admit(&[entry]).await.unwrap().known, vec![None]);
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
}

/// A fresh transaction in place of the old one.
pub async fn r23_a_commit_with_a_new_begin_is_found_out<F: Fixture>(trial: &Trial<F>) {
    let end = handler(trial, &["commit", "begin"]).await;
    assert_ne!(end.proof, Proof::Same);
    assert_eq!(end.known, end.before == 1);
    assert_eq!(end.after, 0, "what came after is rolled back");
}

/// A fresh transaction in place of the old one, which then fails: what was committed before is not
/// hidden by it.
pub async fn r23_a_commit_with_a_new_begin_that_fails_is_found_out<F: Fixture>(trial: &Trial<F>) {
    let end = handler(trial, &["commit", "begin", "insert into no_such_table (a) values (1)"]).await;
    assert_ne!(end.proof, Proof::Same);
    assert_eq!((end.known, end.after), (end.before == 1, 0));
}

/// Nothing stays of what came before; nor of what came after, unless the database commits that by
/// itself.
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

/// Also on a connection that nothing can be asked on any more. Else the failure is transient.
pub async fn what_a_handler_committed_is_told_although_its_connection_is_lost<F: Fixture>(trial: &Trial<F>) {
    let case = "what_a_handler_committed_is_told_although_its_connection_is_lost";
    let consumer = trial.consumer("c").await;
    for (statement, expected) in [("commit", Undone::Committed), ("select 1", Undone::Lost)] {
        let (mut tx, entry) = after(trial, statement).await;
        if !trial.end_connection(case, tx.connection().unwrap()).await {
            return tx.rollback().await.unwrap();
        }
        assert_eq!(tx.undo().await.unwrap(), expected, "{statement}");
        let known = trial.store.known(consumer, &[entry.id]).await.unwrap();
        assert_eq!(known.len(), usize::from(expected == Undone::Committed), "{statement}");
    }
}

/// And that statement ends with the transaction: what it waits for or holds is free for others.
pub async fn what_a_handler_committed_is_told_while_a_statement_of_it_runs<F: Fixture>(trial: &Trial<F>) {
    if !F::CONCURRENT_WRITERS {
        return;
    }
    let consumer = trial.consumer("c").await;
    trial.run("create table held (id int primary key, by_whom varchar(9))").await;
    trial.run("insert into held (id) values (1)").await;
    for (statement, expected) in [("commit", Undone::Committed), ("select 1", Undone::Whole)] {
        let mut holder = trial.begin().await;
        F::run(&mut holder, "update held set by_whom = 'first' where id = 1").await.unwrap();
        let (mut tx, entry) = after(trial, statement).await;
        let waits = F::run(tx.connection().unwrap(), "update held set by_whom = 'second' where id = 1");
        // As a handler that runs out of time is dropped.
        assert!(tokio::time::timeout(Duration::from_millis(300), waits).await.is_err());
        assert_eq!(tx.undo().await.unwrap(), expected, "{statement}");
        holder.commit().await.unwrap();
        assert_eq!(trial.number("select count(*) from held where by_whom = 'second'").await, 0, "{statement}");
        let mut again = trial.store.begin(consumer).await.unwrap();
        let known = again.admit(&[entry]).await.unwrap().known[0].is_some();
        assert_eq!(known, expected == Undone::Committed, "{statement}");
        again.rollback().await.unwrap();
    }
}

/// A head whose row is gone with the handler's own commit waits for nothing any more: only this
/// tells of it.
pub async fn a_head_that_a_handler_committed_away_is_told<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    for statement in ["select 1", "commit"] {
        trial.park(consumer, &message(statement, ""), due()).await;
        let head = trial.store.claim_due(consumer, &everything(), &Claim::new(LEASE)).await.unwrap().unwrap();
        let mut tx = trial.store.begin(consumer).await.unwrap();
        assert!(tx.finish(std::slice::from_ref(&head)).await.unwrap());
        careless::<F>(tx.connection().unwrap(), statement).await;
        let undone = tx.undo().await.unwrap();
        drop(tx);
        let stands = trial.store.give_back(consumer, &[head]).await.unwrap() == 1;
        assert_eq!(undone, if stands { Undone::Whole } else { Undone::Committed }, "{statement}");
        assert!(stands || statement == "commit");
    }
}

/// Not as the handler's own commit, which would make it dead: its connection was lost for longer
/// than its claim, or the handler rolled back, and another process handled the message meanwhile.
/// Shown to fail where a waiting row that is gone counts as committed away by the handler.
pub async fn a_head_that_another_process_finished_is_not_told_as_committed<F: Fixture>(trial: &Trial<F>) {
    if !F::CONCURRENT_WRITERS {
        return; // Nobody else writes before this transaction is undone.
    }
    let case = "a_head_that_another_process_finished_is_not_told_as_committed";
    let consumer = trial.consumer("c").await;
    for end in ["its connection", "rollback"] {
        trial.park(consumer, &message(end, ""), due()).await;
        let claim = Claim::new(Duration::from_millis(1));
        let head = trial.store.claim_due(consumer, &everything(), &claim).await.unwrap().unwrap();
        let mut tx = trial.store.begin(consumer).await.unwrap();
        assert!(tx.finish(std::slice::from_ref(&head)).await.unwrap());
        match end {
            "rollback" => careless::<F>(tx.connection().unwrap(), end).await,
            // The row is free once the server has seen it: the peer waits for that.
            _ if trial.end_connection(case, tx.connection().unwrap()).await => {}
            _ => {
                tx.rollback().await.unwrap();
                trial.run(&format!("delete from {}", trial.table("waiting"))).await;
                continue;
            }
        }
        let all = everything();
        let again = eventually("the head is due again", async || {
            trial.store.claim_due(consumer, &all, &Claim::new(LEASE)).await.unwrap()
        })
        .await;
        let mut peer = trial.store.begin(consumer).await.unwrap();
        assert!(peer.finish(std::slice::from_ref(&again)).await.unwrap());
        peer.commit().await.unwrap();
        let undone = tx.undo().await.unwrap();
        assert_eq!(undone, if end == "rollback" { Undone::Whole } else { Undone::Lost }, "{end}");
    }
}
