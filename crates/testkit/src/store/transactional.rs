//! Cases of a transactional operation: claim, effects and outcome in one transaction (O1, O15, O17
//! to O19, O29, M50). Whatever a handler does to its transaction, no outcome stands without its
//! effects, and no effect without a record that keeps it from being done again.

use std::time::Duration;

use super::keys::{KEPT, PATIENCE, answer, claim, completed, failed, record, retryable};
use super::trial::{careless, effect, eventually, new_message, payloads, read_nothing, read_rows};
use super::{Connection, Fixture, Trial};
use oncebox::adapter;
use oncebox::operation::{Mode, State};
use oncebox::store::{
    Answer, AnswerBody, Basis, Begun, Fenced, KeptBody, KeyClaim, Keys, OperationTx, Operations, Proof, RunOutcome,
};

type Tx = Box<dyn OperationTx>;

async fn begin<F: Fixture>(trial: &Trial<F>, claim: &KeyClaim) -> Tx {
    match trial.store.begin_operation(claim, Basis::New, PATIENCE).await.unwrap() {
        Begun::Claimed(tx) => tx,
        Begun::Existing(record) => panic!("a record is there: {record:?}"),
        Begun::Locked => panic!("somebody holds it"),
    }
}

/// After the commit everything is there. The attempt that was rolled back left nothing (O29).
pub async fn m50_claim_effects_messages_and_answer_commit_together<F: Fixture>(trial: &Trial<F>) {
    let mut session = trial.session("a").await;
    let claim = claim(Mode::Transactional, "k", 1);
    for commit in [false, true] {
        let mut tx = begin(trial, &claim).await;
        assert_eq!((tx.owned().operation_id, tx.owned().owner), (claim.operation_id, None));
        effect::<F>(tx.connection().unwrap(), "payment", "1").await.unwrap();
        oncebox::store::enqueue::<Connection<F>>(tx.connection().unwrap(), new_message("k", "payment.created"))
            .await
            .unwrap();
        assert_eq!(tx.complete(Vec::new(), &completed(), &KEPT).await.unwrap(), Proof::Same);
        if commit {
            tx.commit().await.unwrap();
            break;
        }
        tx.rollback().await.unwrap();
        assert_eq!(trial.store.find(&claim.identity).await.unwrap().record, None, "a rollback leaves no row");
        assert_eq!(trial.effects("payment").await, 0);
        read_nothing(&mut session).await;
    }
    let found = record(trial, &claim).await;
    assert_eq!((found.state, found.mode, found.lease, found.epoch), (State::Completed, Mode::Transactional, None, 1));
    let AnswerBody::Kept(body) = answer().body else { panic!("a kept body") };
    assert_eq!(trial.store.body(&found).await.unwrap(), Some(body));
    assert_eq!(trial.effects("payment").await, 1);
    assert_eq!(payloads(&read_rows(&mut session, 1).await.0), ["payment.created"]);
    match trial.store.begin_operation(&claim, Basis::New, PATIENCE).await.unwrap() {
        Begun::Existing(record) => assert_eq!(*record, found),
        other => panic!("a finished key was claimed again: {other:?}"),
    }
    assert_eq!(trial.store.find_after_lost_commit(&claim, Basis::New).await, adapter::Look::Ours(State::Completed));
}

/// Messages that are given with the outcome come after those of the handler, in order, and exist
/// only with the outcome. This also holds beside a body too large for the row of the claim.
///
/// Shown by: writing them before the proof (MySQL); leaving them out beside a large body
/// (PostgreSQL).
pub async fn m50_messages_given_with_the_outcome_commit_with_it<F: Fixture>(trial: &Trial<F>) {
    let mut session = trial.session("a").await;
    let large = KeptBody { headers: Vec::new(), bytes: vec![7; 5_000], format: 1, kid: None };
    let large = RunOutcome::Completed(Answer { body: AnswerBody::Kept(large), ..answer() });
    for (name, outcome) in [("small", completed()), ("large", large)] {
        for count in 0..3_u8 {
            let key = format!("{name}{count}");
            let last = || (0..count).map(|n| new_message(&key, format!("last{n}"))).collect::<Vec<_>>();
            let claim = claim(Mode::Transactional, &key, 1);
            let mut tx = begin(trial, &claim).await;
            careless::<F>(tx.connection().unwrap(), "rollback").await;
            // On a database that has this setting, each later statement commits at once.
            careless::<F>(tx.connection().unwrap(), "set autocommit = 1").await;
            assert_ne!(tx.complete(last(), &outcome, &KEPT).await.unwrap_or(Proof::Ended), Proof::Same);
            let _ = tx.rollback().await;
            for commits in [false, true] {
                let mut tx = begin(trial, &claim).await;
                oncebox::store::enqueue::<Connection<F>>(tx.connection().unwrap(), new_message(&key, "first"))
                    .await
                    .unwrap();
                assert_eq!(tx.complete(last(), &outcome, &KEPT).await.unwrap(), Proof::Same);
                if commits {
                    tx.commit().await.unwrap();
                } else {
                    tx.rollback().await.unwrap();
                }
            }
            let expected: Vec<String> =
                std::iter::once("first".to_owned()).chain((0..count).map(|n| format!("last{n}"))).collect();
            assert_eq!(payloads(&read_rows(&mut session, expected.len()).await.0), expected, "{key}");
            read_nothing(&mut session).await;
            assert_eq!(record(trial, &claim).await.state, State::Completed);
        }
    }
    still_works(trial).await;
}

/// The operation is dropped at another point each time, also in the middle of a statement. The
/// store works afterwards.
pub async fn o29_a_dropped_operation_leaves_nothing<F: Fixture>(trial: &Trial<F>) {
    let claim = claim(Mode::Transactional, "k", 1);
    for round in 0..20 {
        let (store, claim) = (trial.store.clone(), claim.clone());
        let work = async move {
            if let Begun::Claimed(mut tx) = store.begin_operation(&claim, Basis::New, PATIENCE).await.unwrap() {
                effect::<F>(tx.connection().unwrap(), "payment", "1").await.unwrap();
                tx.complete(Vec::new(), &completed(), &KEPT).await.unwrap();
                std::future::pending::<()>().await;
            }
        };
        let _ = tokio::time::timeout(Duration::from_micros(400 * round), work).await;
    }
    let free = async || {
        eventually("the last dropped one is rolled back", || async {
            match trial.store.begin_operation(&claim, Basis::New, PATIENCE).await.unwrap() {
                Begun::Claimed(tx) => Some(tx),
                Begun::Locked => None,
                Begun::Existing(record) => panic!("a dropped one was committed: {record:?}"),
            }
        })
        .await
    };
    // On a slow machine no round gets past the claim: these points are met on every one.
    for steps in 0..3 {
        let mut tx = free().await;
        if steps > 0 {
            effect::<F>(tx.connection().unwrap(), "payment", "1").await.unwrap();
        }
        if steps > 1 {
            assert_eq!(tx.complete(Vec::new(), &completed(), &KEPT).await.unwrap(), Proof::Same);
        }
        drop(tx);
    }
    let mut tx = free().await;
    effect::<F>(tx.connection().unwrap(), "payment", "2").await.unwrap();
    assert_eq!(tx.complete(Vec::new(), &completed(), &KEPT).await.unwrap(), Proof::Same);
    tx.commit().await.unwrap();
    assert_eq!(trial.effects("payment").await, 1);
}

/// A duplicate is answered while the first one is still open. Another key does not wait (O15, O17,
/// O18).
pub async fn o15_a_duplicate_of_an_open_operation_is_locked_and_does_not_wait<F: Fixture>(trial: &Trial<F>) {
    let first = claim(Mode::Transactional, "k", 1);
    let mut tx = begin(trial, &first).await;
    effect::<F>(tx.connection().unwrap(), "payment", "1").await.unwrap();
    for command in [1, 2] {
        let again = claim(Mode::Transactional, "k", command);
        let patience = Duration::from_millis(100);
        let begins = trial.store.begin_operation(&again, Basis::New, patience);
        // Less than the usual lock wait of a server.
        let began = tokio::time::timeout(PATIENCE, begins).await.unwrap().unwrap();
        assert!(matches!(began, Begun::Locked), "{began:?}");
    }
    if F::CONCURRENT_WRITERS {
        let mut other = begin(trial, &claim(Mode::Transactional, "other", 1)).await;
        assert_eq!(other.complete(Vec::new(), &completed(), &KEPT).await.unwrap(), Proof::Same);
        other.commit().await.unwrap();
    }
    assert_eq!(tx.complete(Vec::new(), &completed(), &KEPT).await.unwrap(), Proof::Same);
    tx.commit().await.unwrap();
    assert!(matches!(
        trial.store.begin_operation(&first, Basis::New, PATIENCE).await.unwrap(),
        Begun::Existing(record) if record.state == State::Completed
    ));
}

async fn unseen<F: Fixture>(trial: &Trial<F>, claim: &KeyClaim) -> Option<Tx> {
    trial.store.begin_unseen(claim).await.unwrap()
}

/// On a store that can claim without a SELECT before it, `begin_unseen` answers None where the key
/// has a record or is locked. Otherwise its transaction is as any other (O1, O15, O29).
pub async fn o15_a_key_that_is_claimed_unseen_is_looked_for_all_the_same<F: Fixture>(trial: &Trial<F>) {
    assert!(trial.store.begin_unseen(&claim(Mode::Edge, "k", 1)).await.is_err() || !trial.store.claims_unseen());
    let first = claim(Mode::Transactional, "k", 1);
    for commit in [false, true] {
        let Some(mut tx) = unseen(trial, &first).await else {
            assert!(!trial.store.claims_unseen(), "a new key was refused");
            return;
        };
        assert_eq!((tx.owned().operation_id, tx.owned().epoch), (first.operation_id, 1));
        effect::<F>(tx.connection().unwrap(), "payment", "1").await.unwrap();
        assert!(unseen(trial, &claim(Mode::Transactional, "k", 2)).await.is_none(), "somebody holds it");
        assert_eq!(tx.complete(Vec::new(), &completed(), &KEPT).await.unwrap(), Proof::Same);
        if commit {
            tx.commit().await.unwrap();
        } else {
            tx.rollback().await.unwrap();
            assert_eq!(trial.store.find(&first.identity).await.unwrap().record, None, "a rollback leaves no row");
        }
    }
    assert_eq!((record(trial, &first).await.state, trial.effects("payment").await), (State::Completed, 1));
    assert!(unseen(trial, &first).await.is_none(), "a record is there");

    let rejected = claim(Mode::Transactional, "rejected", 1);
    let mut tx = unseen(trial, &rejected).await.unwrap();
    effect::<F>(tx.connection().unwrap(), "payment", "2").await.unwrap();
    assert_eq!(tx.undo_effects().await.unwrap(), Proof::Same);
    assert_eq!(tx.complete(Vec::new(), &completed(), &KEPT).await.unwrap(), Proof::Same);
    tx.commit().await.unwrap();
    assert_eq!((record(trial, &rejected).await.epoch, trial.effects("payment").await), (1, 1));

    let ended = claim(Mode::Transactional, "ended", 1);
    let mut tx = unseen(trial, &ended).await.unwrap();
    careless::<F>(tx.connection().unwrap(), "rollback").await;
    assert_ne!(tx.complete(Vec::new(), &completed(), &KEPT).await.unwrap(), Proof::Same);
    tx.rollback().await.unwrap();
    assert_eq!(trial.store.find(&ended.identity).await.unwrap().record, None);
}

/// Of many requests at once one has its effect. The others see its outcome, or that it runs.
pub async fn m41_of_many_at_once_one_has_its_effect<F: Fixture>(trial: &Trial<F>) {
    for round in 0..3 {
        let message = format!("race{round}");
        let mut racing = tokio::task::JoinSet::new();
        for _ in 0..20 {
            let (store, message) = (trial.store.clone(), message.clone());
            let claim = claim(Mode::Transactional, &message, 1);
            racing.spawn(async move {
                match store.begin_operation(&claim, Basis::New, PATIENCE).await.unwrap() {
                    Begun::Claimed(mut tx) => {
                        effect::<F>(tx.connection().unwrap(), &message, "1").await.unwrap();
                        assert_eq!(tx.complete(Vec::new(), &completed(), &KEPT).await.unwrap(), Proof::Same);
                        tx.commit().await.unwrap();
                        true
                    }
                    Begun::Existing(record) => {
                        assert_eq!(
                            record.state,
                            State::Completed,
                            "nobody sees an open claim of a transactional operation"
                        );
                        false
                    }
                    Begun::Locked => false,
                }
            });
        }
        assert_eq!(racing.join_all().await.into_iter().filter(|won| *won).count(), 1);
        assert_eq!(trial.effects(&message).await, 1);
    }
}

/// A final rejection undoes the effects and keeps the failure with its answer (pitfall 18), also
/// after an error that the handler ignored.
pub async fn o1_a_rejection_is_remembered_without_its_effects<F: Fixture>(trial: &Trial<F>) {
    for (key, swallows) in [("plain", false), ("swallowed", true)] {
        let claim = claim(Mode::Transactional, key, 1);
        let mut tx = begin(trial, &claim).await;
        effect::<F>(tx.connection().unwrap(), key, "1").await.unwrap();
        if swallows {
            careless::<F>(tx.connection().unwrap(), "insert into no_such_table (a) values (1)").await;
        }
        assert_eq!(tx.undo_effects().await.unwrap(), Proof::Same);
        assert_eq!(tx.complete(Vec::new(), &failed(), &KEPT).await.unwrap(), Proof::Same);
        tx.commit().await.unwrap();
        let found = record(trial, &claim).await;
        assert_eq!((found.state, trial.effects(key).await), (State::FailedReplayable, 0));
        let AnswerBody::Kept(body) = answer().body else { panic!("a kept body") };
        assert_eq!(trial.store.body(&found).await.unwrap(), Some(body));
    }
}

/// A handler ends its transaction in every way that it can, with and without an undo of its
/// effects. It never completes.
///
/// Shown by: not comparing the transaction id; taking a lost savepoint for proof.
pub async fn o1_a_handler_that_ends_its_transaction_never_completes<F: Fixture>(trial: &Trial<F>) {
    let ends: [&[&str]; 6] = [
        &["commit"],
        &["commit", "begin"],
        &["rollback"],
        &["rollback", "begin"],
        &["commit", "start transaction"],
        &["rollback", "commit"],
    ];
    for (number, statements) in ends.into_iter().enumerate() {
        for undo in [false, true] {
            let key = format!("end{number}{undo}");
            let claim = claim(Mode::Transactional, &key, 1);
            let mut tx = begin(trial, &claim).await;
            effect::<F>(tx.connection().unwrap(), &key, "before").await.unwrap();
            for statement in statements {
                careless::<F>(tx.connection().unwrap(), statement).await;
            }
            let proof = if undo {
                tx.undo_effects().await.unwrap()
            } else {
                let _ = effect::<F>(tx.connection().unwrap(), &key, "after").await;
                tx.complete(Vec::new(), &completed(), &KEPT).await.unwrap()
            };
            assert_ne!(proof, Proof::Same, "{statements:?}");
            // After the handler ended the transaction, there may be nothing to roll back.
            let _ = tx.rollback().await;
            let committed = statements[0] == "commit" && F::CONCURRENT_WRITERS;
            let stands = trial.effects(&key).await > 0;
            assert!(stands || !committed, "{statements:?}");
            assert!(proof == Proof::Ended || !stands, "{statements:?}: `Aborted` says that nothing stands");
            let look = trial.store.find_after_lost_commit(&claim, Basis::New).await;
            if committed {
                // The claim was committed without an outcome. It is found, marked unknown, and
                // never executed again.
                assert_eq!(look, adapter::Look::Ours(State::InProgress), "{statements:?}");
                let seen = record(trial, &claim).await;
                assert_eq!(trial.store.mark_unknown(&seen).await.unwrap(), Fenced::Done);
            } else {
                assert_eq!(look, adapter::Look::Nothing, "{statements:?}");
                assert_eq!(trial.store.insert_unknown(&claim).await.unwrap(), Fenced::Done);
            }
            assert_eq!(trial.store.insert_unknown(&claim).await.unwrap(), Fenced::LostOwnership);
            let found = record(trial, &claim).await;
            assert_eq!((found.state, found.operation_id), (State::UnknownRequiresRecovery, claim.operation_id));
            assert_eq!(
                trial.store.find_after_lost_commit(&claim, Basis::New).await,
                adapter::Look::Ours(State::UnknownRequiresRecovery)
            );
            for basis in [Basis::New, Basis::TakeOver(&found), Basis::Reclaim(&found), Basis::Anew(&found)] {
                let again = trial.store.begin_operation(&claim, basis, PATIENCE).await.unwrap();
                assert!(matches!(again, Begun::Existing(_)), "{basis:?}: {again:?}");
            }
        }
    }
    still_works(trial).await;
}

/// A failed statement in a transaction that the handler began does not hide what the handler
/// committed before.
///
/// Shown by: taking an aborted transaction for ours without asking for the savepoint (PostgreSQL).
pub async fn o1_what_was_committed_behind_an_aborted_transaction_is_never_called_undone<F: Fixture>(trial: &Trial<F>) {
    for (key, ends) in [("rolled-back", "rollback"), ("committed", "commit")] {
        let claim = claim(Mode::Transactional, key, 1);
        let mut tx = begin(trial, &claim).await;
        effect::<F>(tx.connection().unwrap(), key, "inside").await.unwrap();
        careless::<F>(tx.connection().unwrap(), ends).await;
        let _ = effect::<F>(tx.connection().unwrap(), key, "outside").await;
        careless::<F>(tx.connection().unwrap(), "begin").await;
        careless::<F>(tx.connection().unwrap(), "insert into no_such_table (a) values (1)").await;
        let proof = tx.complete(Vec::new(), &completed(), &KEPT).await.unwrap();
        assert_ne!(proof, Proof::Same, "{ends}");
        let _ = tx.rollback().await;
        let stands = trial.effects(key).await > 0;
        assert!(stands || !F::CONCURRENT_WRITERS, "{ends}: only SQLite takes back what was outside");
        assert!(proof == Proof::Ended || !stands, "{ends}: something stands");
    }
    still_works(trial).await;
}

/// Asserts that no connection of the pool kept a changed state.
pub(super) async fn still_works<F: Fixture>(trial: &Trial<F>) {
    for round in 0..12 {
        let claim = claim(Mode::Transactional, &format!("works{round}"), 1);
        let mut tx = begin(trial, &claim).await;
        effect::<F>(tx.connection().unwrap(), "works", "1").await.unwrap();
        assert_eq!(tx.complete(Vec::new(), &completed(), &KEPT).await.unwrap(), Proof::Same);
        if round % 2 == 0 {
            tx.commit().await.unwrap();
        } else {
            tx.rollback().await.unwrap();
        }
        trial.run("update effect set note = 'seen' where message = 'works'").await;
    }
    assert_eq!(trial.effects("works").await, 6);
}

/// The handler ignores the error of a statement. Either the database goes on and all effects are
/// there, or none is.
pub async fn o1_an_error_that_was_swallowed_never_commits_half<F: Fixture>(trial: &Trial<F>) {
    let claim = claim(Mode::Transactional, "k", 1);
    let mut tx = begin(trial, &claim).await;
    effect::<F>(tx.connection().unwrap(), "before", "").await.unwrap();
    careless::<F>(tx.connection().unwrap(), "insert into no_such_table (a) values (1)").await;
    let _ = effect::<F>(tx.connection().unwrap(), "after", "").await;
    match tx.complete(Vec::new(), &completed(), &KEPT).await.unwrap() {
        Proof::Same => {
            tx.commit().await.unwrap();
            assert_eq!((trial.effects("before").await, trial.effects("after").await), (1, 1));
            assert_eq!(record(trial, &claim).await.state, State::Completed);
        }
        Proof::Aborted => {
            tx.rollback().await.unwrap();
            assert_eq!((trial.effects("before").await, trial.effects("after").await), (0, 0));
            assert_eq!(trial.store.find_after_lost_commit(&claim, Basis::New).await, adapter::Look::Nothing);
        }
        Proof::Ended => panic!("nothing ended this transaction"),
    }
    still_works(trial).await;
}

/// DDL commits on some databases and is part of the transaction on others.
pub async fn o1_a_table_made_by_the_handler_never_splits_the_transaction<F: Fixture>(trial: &Trial<F>) {
    let claim = claim(Mode::Transactional, "k", 1);
    let mut tx = begin(trial, &claim).await;
    effect::<F>(tx.connection().unwrap(), "before", "").await.unwrap();
    careless::<F>(tx.connection().unwrap(), "create table made_by_handler (a int)").await;
    let _ = effect::<F>(tx.connection().unwrap(), "after", "").await;
    if tx.complete(Vec::new(), &completed(), &KEPT).await.unwrap() == Proof::Same {
        tx.commit().await.unwrap();
        assert_eq!((trial.effects("before").await, trial.effects("after").await), (1, 1));
    } else {
        let _ = tx.rollback().await;
        let is_known = trial.store.find_after_lost_commit(&claim, Basis::New).await != adapter::Look::Nothing;
        assert_eq!(is_known, trial.effects("before").await == 1, "an effect without a record would be done again");
        assert_eq!(trial.effects("after").await, 0, "what came after is rolled back");
    }
    still_works(trial).await;
}

/// A failure that may be tried again runs again in a transactional operation. The claim is fenced
/// by the record that was seen (O4, O29).
pub async fn o4_door_a_runs_again_what_it_may<F: Fixture>(trial: &Trial<F>) {
    let first = claim(Mode::Transactional, "k", 1);
    let mut tx = begin(trial, &first).await;
    assert_eq!(tx.complete(Vec::new(), &retryable(), &KEPT).await.unwrap(), Proof::Same);
    tx.commit().await.unwrap();
    let seen = record(trial, &first).await;
    let anew = KeyClaim { operation_id: uuid::Uuid::now_v7(), ..first.clone() };
    for commit in [false, true] {
        let again = trial.store.begin_operation(&anew, Basis::Reclaim(&seen), PATIENCE).await.unwrap();
        let Begun::Claimed(mut tx) = again else { panic!("not claimed: {again:?}") };
        assert_eq!((tx.owned().attempts, tx.owned().operation_id), (2, first.operation_id));
        if F::CONCURRENT_WRITERS {
            let other = trial.store.begin_operation(&anew, Basis::Reclaim(&seen), PATIENCE).await.unwrap();
            assert!(!matches!(other, Begun::Claimed(_)), "two run at once");
        }
        assert_eq!(tx.complete(Vec::new(), &completed(), &KEPT).await.unwrap(), Proof::Same);
        if commit {
            tx.commit().await.unwrap();
        } else {
            tx.rollback().await.unwrap();
            assert_eq!(record(trial, &first).await, seen);
        }
    }
    let late = trial.store.begin_operation(&anew, Basis::Reclaim(&seen), PATIENCE).await.unwrap();
    assert!(matches!(late, Begun::Existing(record) if record.state == State::Completed));
}

/// The record of such an operation would have a wrong mode.
pub async fn o2_an_operation_of_another_mode_is_refused_at_door_a<F: Fixture>(trial: &Trial<F>) {
    for mode in [Mode::Edge, Mode::Bridged, Mode::Phased] {
        let claim = claim(mode, "k", 1);
        assert!(trial.store.begin_operation(&claim, Basis::New, PATIENCE).await.is_err(), "{mode}");
    }
}
