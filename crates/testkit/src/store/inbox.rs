//! Cases of the inbox: which messages are new, known or waiting (R24, R26, R31, R32, G7).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use uuid::Uuid;

use super::trial::{
    arrived, dead, due, effect, entry, everything, message, new_entry, new_message, parked, payloads, read_nothing,
    read_rows, spec,
};
use super::{Connection, Fixture, Trial};
use oncebox::adapter::Position;
use oncebox::error::StoreError;
use oncebox::message::{ContentHash, MessageId, identity};
use oncebox::store::{ConsumerSpec, Holding, Inbox, InboxEntry, Opened, Operator, Proof};

/// A consumer is registered once. Its id rule changes only if the operator accepts that (R31).
pub async fn a_consumer_keeps_its_number_and_its_id_rule<F: Fixture>(trial: &Trial<F>) {
    let number = trial.consumer("ledger").await;
    assert_ne!(trial.consumer("email").await, number);
    assert_eq!(trial.consumer("ledger").await, number);
    let changed = ConsumerSpec { id_rule: "header:event-id".into(), ..spec("ledger") };
    let refused = trial.store.register(&changed).await;
    assert!(matches!(&refused, Err(StoreError::Refused(why)) if why.contains("--accept")), "{refused:?}");
    // Who only looks gets the same answer.
    let looked = trial.store.check_registration(&changed).await;
    assert!(matches!(&looked, Err(StoreError::Refused(why)) if why.contains("--accept")), "{looked:?}");
    for name in ["ledger", "never-started"] {
        assert!(!trial.store.check_registration(&spec(name)).await.unwrap().is_zero());
    }
    let started = trial.store.status().await.unwrap().consumers;
    assert!(started.iter().all(|one| one.name != "never-started"), "looking registers nobody: {started:?}");
    let accepted = ConsumerSpec { accept: true, ..changed.clone() };
    assert_eq!(trial.store.register(&accepted).await.unwrap(), number);
    assert_eq!(trial.store.register(&changed).await.unwrap(), number, "the new rule stands");
    let mut starting = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let store = trial.store.clone();
        starting.spawn(async move { store.register(&spec("many")).await.unwrap() });
    }
    let numbers = starting.join_all().await;
    assert!(numbers.iter().all(|number| *number == numbers[0]), "{numbers:?}");
}

/// Answers come in the order of the entries, not of the ids.
pub async fn r24_the_unique_key_decides_what_is_new<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    let mut entries: Vec<InboxEntry> = (0..50).map(|_| new_entry()).collect();
    entries.reverse();
    let mut tx = trial.store.begin(consumer).await.unwrap();
    let admission = tx.admit(&entries[10..30]).await.unwrap();
    assert_eq!(admission, vec![None; 20]);
    assert_eq!(tx.prove().await.unwrap(), Proof::Same);
    tx.commit().await.unwrap();
    let mut tx = trial.store.begin(consumer).await.unwrap();
    let admission = tx.admit(&entries).await.unwrap();
    for (number, known) in admission.iter().enumerate() {
        let is_known = (10..30).contains(&number);
        assert_eq!(*known, is_known.then_some([7; 16]), "entry {number}");
    }
    tx.rollback().await.unwrap();
    let ids: Vec<MessageId> = entries.iter().map(|entry| entry.id).collect();
    let known = trial.store.known(consumer, &ids).await.unwrap();
    assert_eq!(known, ids[10..30].iter().copied().collect());
    assert!(trial.store.known(consumer, &[]).await.unwrap().is_empty());
    let mut tx = trial.store.begin(consumer).await.unwrap();
    assert!(tx.admit(&[]).await.unwrap().is_empty());
    tx.commit().await.unwrap();
}

/// An id is contested exactly while another open transaction has inserted it.
pub async fn an_id_that_another_open_transaction_inserted_is_contested<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    let other = trial.consumer("other").await;
    let untimed = InboxEntry { id: identity("shop", "1"), hash: [7; 16] };
    for entry in [new_entry(), untimed] {
        assert!(!trial.store.is_contested(consumer, &[entry.id]).await.unwrap(), "nobody has it");
        let mut tx = trial.store.begin(consumer).await.unwrap();
        assert_eq!(tx.admit(&[entry]).await.unwrap(), vec![None], "asking changed nothing");
        if F::CONCURRENT_WRITERS {
            assert!(trial.store.is_contested(consumer, &[entry.id]).await.unwrap());
            assert!(!trial.store.is_contested(consumer, &[new_entry().id]).await.unwrap(), "another id");
            assert!(!trial.store.is_contested(other, &[entry.id]).await.unwrap(), "another consumer");
        }
        tx.commit().await.unwrap();
        assert!(!trial.store.is_contested(consumer, &[entry.id]).await.unwrap(), "it is known, and waits for nobody");
    }
}

/// Two transactions admit one id. The second waits until the first has ended, which `settled`
/// shows. Returns the answer of the second.
async fn concurrent<F: Fixture>(trial: &Trial<F>, commit: bool) -> Option<ContentHash> {
    let consumer = trial.consumer("c").await;
    let entry = new_entry();
    let mut first = trial.store.begin(consumer).await.unwrap();
    assert_eq!(first.admit(&[entry]).await.unwrap(), vec![None]);
    let settled = Arc::new(AtomicBool::new(false));
    let (store, seen) = (trial.store.clone(), Arc::clone(&settled));
    let second = tokio::spawn(async move {
        let mut tx = store.begin(consumer).await.unwrap();
        let answer = tx.admit(&[entry]).await.unwrap()[0];
        assert!(seen.load(Ordering::SeqCst), "the second was answered before the first had ended");
        tx.commit().await.unwrap();
        answer
    });
    if F::CONCURRENT_WRITERS {
        trial.locks_wait(1).await;
    } else {
        // Here nobody sees that it waits. If it is slower, the case proves less, but does not fail.
        tokio::time::sleep(Duration::from_millis(150)).await;
    }
    settled.store(true, Ordering::SeqCst);
    if commit {
        first.commit().await.unwrap();
    } else {
        first.rollback().await.unwrap();
    }
    let answer = second.await.unwrap();
    assert_eq!(trial.store.known(consumer, &[entry.id]).await.unwrap().len(), 1);
    answer
}

/// The first transaction commits, so the second finds a duplicate.
pub async fn r24_a_concurrent_duplicate_waits_and_is_known_after_the_commit<F: Fixture>(trial: &Trial<F>) {
    assert_eq!(concurrent(trial, true).await, Some([7; 16]));
}

/// The first transaction rolls back, so the message is new to the second.
pub async fn r24_a_concurrent_duplicate_is_new_after_the_rollback<F: Fixture>(trial: &Trial<F>) {
    assert_eq!(concurrent(trial, false).await, None);
}

/// The adapter sorts the ids, so that two batches insert them in the same order. Both begin while a
/// third transaction has an id in the middle: with their own orders each would then have what the
/// other one needs.
pub async fn r24_batches_that_overlap_do_not_deadlock<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    for _ in 0..3 {
        let forth: Vec<InboxEntry> = (0..40).map(|_| new_entry()).collect();
        let back: Vec<InboxEntry> = forth.iter().rev().copied().collect();
        let mut third = None;
        if F::CONCURRENT_WRITERS {
            let mut tx = trial.store.begin(consumer).await.unwrap();
            tx.admit(&forth[20..21]).await.unwrap();
            third = Some(tx);
        }
        let mut batches = tokio::task::JoinSet::new();
        for entries in [forth.clone(), back] {
            let store = trial.store.clone();
            batches.spawn(async move {
                let mut tx = store.begin(consumer).await.unwrap();
                let known = tx.admit(&entries).await.unwrap();
                tx.commit().await.unwrap();
                known.iter().filter(|known| known.is_none()).count()
            });
        }
        if let Some(third) = third {
            trial.locks_wait(2).await;
            third.rollback().await.unwrap();
        }
        let new: usize = batches.join_all().await.into_iter().sum();
        assert_eq!(new, 40, "each id is new to exactly one of them");
    }
}

/// The unique key is (consumer, message id): the same id is new to each consumer.
pub async fn consumers_do_not_share_their_inboxes<F: Fixture>(trial: &Trial<F>) {
    let entry = new_entry();
    for name in ["ledger", "email"] {
        let consumer = trial.consumer(name).await;
        assert_eq!(trial.admit(consumer, &[entry]).await, [None], "{name}");
    }
}

/// The content hash of the first message is kept, and every later one is compared with it.
pub async fn g7_another_content_under_the_same_id_is_seen<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    let first = new_entry();
    trial.admit(consumer, &[first]).await;
    for _ in 0..2 {
        let other = InboxEntry { hash: [8; 16], ..first };
        assert_eq!(trial.admit(consumer, &[other]).await, [Some([7; 16])]);
    }
}

/// No collation, padding or truncation makes two ids one.
pub async fn r32_ids_that_differ_only_in_spelling_are_different<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    let long = "x".repeat(1_000);
    let texts = ["Abc", "abc", "abc ", "ábc", "a\0bc", "", &long, &format!("{long}y")];
    let mut ids: Vec<MessageId> = texts.iter().map(|text| identity("shop", text)).collect();
    // The first and last bytes that a fixed-size column might pad or cut.
    ids.extend([[0; 16], [32; 16], [255; 16]].map(|bytes| MessageId::from(uuid::Uuid::from_bytes(bytes))));
    let mut trailing = [32; 16];
    trailing[15] = 0;
    ids.push(MessageId::from(uuid::Uuid::from_bytes(trailing)));
    for id in &ids {
        let known = trial.admit(consumer, &[InboxEntry { id: *id, hash: [0; 16] }]).await;
        assert_eq!(known, [None], "{id}");
    }
    assert_eq!(trial.store.known(consumer, &ids).await.unwrap().len(), ids.len());
}

/// A waiting message and a dead one with `holds` block their key. A dead one without `holds` does
/// not.
pub async fn a_parked_message_blocks_its_key_and_no_other<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    let cases = [("due", due(), true), ("holding", dead(true), true), ("skipped", dead(false), false)];
    for (key, park_as, blocks) in cases {
        let parked = message(key, "1");
        trial.park(consumer, &parked, park_as).await;
        let other = arrived(Some("other"), "1", "other").lane_id().unwrap();
        let lane = parked.lane_id().unwrap();
        let mut tx = trial.store.begin(consumer).await.unwrap();
        tx.admit(&[new_entry()]).await.unwrap();
        let blocked = tx.standing(&[other, lane]).await.unwrap().blocked;
        assert_eq!(blocked.contains(&lane), blocks, "{key}");
        assert!(!blocked.contains(&other));
        assert!(tx.standing(&[]).await.unwrap().blocked.is_empty());
        tx.rollback().await.unwrap();
    }
    let elsewhere = trial.consumer("another").await;
    let mut tx = trial.store.begin(elsewhere).await.unwrap();
    let lane = message("due", "1").lane_id().unwrap();
    assert!(tx.standing(&[lane]).await.unwrap().blocked.is_empty(), "another consumer's keys are its own");
    tx.rollback().await.unwrap();
}

/// The waiting row and the inbox row commit together: a redelivery is a duplicate exactly if the
/// message waits.
pub async fn what_is_parked_goes_with_its_inbox_row<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    let parked_message = message("k", "1");
    let mut tx = trial.store.begin(consumer).await.unwrap();
    tx.admit(&[entry(&parked_message)]).await.unwrap();
    tx.park(&[parked(&parked_message, due())]).await.unwrap();
    tx.rollback().await.unwrap();
    assert!(trial.store.known(consumer, &[parked_message.id]).await.unwrap().is_empty());
    assert_eq!(oncebox::store::Waiting::next_due(&trial.store, consumer, &everything()).await.unwrap(), None);
    trial.park(consumer, &parked_message, due()).await;
    assert_eq!(trial.store.known(consumer, &[parked_message.id]).await.unwrap().len(), 1);
    assert!(oncebox::store::Waiting::next_due(&trial.store, consumer, &everything()).await.unwrap().is_some());
}

/// `forget` removes the inbox rows that this transaction inserted, for messages that are too old or
/// from the future. Rows that others inserted stay.
pub async fn r31_a_forgotten_id_is_new_again<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    let (kept, taken_back, old) = (new_entry(), new_entry(), new_entry());
    trial.admit(consumer, &[old]).await;
    let mut tx = trial.store.begin(consumer).await.unwrap();
    tx.admit(&[kept, taken_back, old]).await.unwrap();
    tx.forget(&[taken_back.id, old.id]).await.unwrap();
    tx.forget(&[]).await.unwrap();
    tx.commit().await.unwrap();
    let known = trial.store.known(consumer, &[kept.id, taken_back.id, old.id]).await.unwrap();
    assert_eq!(known, [kept.id, old.id].into_iter().collect());
}

/// Counted tries stay when the handler's transaction rolls back, and are removed when it succeeds.
pub async fn r26_tries_are_counted_outside_the_handlers_transaction<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    let (entry, other) = (new_entry(), new_entry());
    let store = &trial.store;
    assert!(store.attempts(consumer, &[entry.id]).await.unwrap().is_empty());
    for number in 1..=3 {
        assert_eq!(store.begin_attempt(consumer, entry.id).await.unwrap(), number);
        let mut tx = store.begin(consumer).await.unwrap();
        tx.admit(&[entry]).await.unwrap();
        tx.rollback().await.unwrap();
    }
    assert_eq!(store.failed_attempt(consumer, entry.id, "no", false).await.unwrap(), 3, "this one was counted before");
    assert_eq!(store.failed_attempt(consumer, entry.id, "no \0 'x' ä😀", true).await.unwrap(), 4);
    assert_eq!(store.failed_attempt(consumer, other.id, "no", true).await.unwrap(), 1);
    let attempts = store.attempts(consumer, &[other.id, entry.id, new_entry().id]).await.unwrap();
    let attempts: std::collections::HashMap<_, _> = attempts.into_iter().collect();
    assert_eq!(attempts, [(entry.id, 4), (other.id, 1)].into_iter().collect());
    let mut tx = store.begin(consumer).await.unwrap();
    tx.admit(&[entry]).await.unwrap();
    tx.clear_attempts(&[entry.id]).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(store.attempts(consumer, &[entry.id, other.id]).await.unwrap(), [(other.id, 1)]);
}

/// The first tries of a batch of suspects are counted before it runs. A message that was counted
/// before keeps its count. Shown to fail: PostgreSQL refused a batch with the same id twice, again
/// and again.
pub async fn r26_the_first_tries_of_a_batch_are_counted_together_and_once<F: Fixture>(trial: &Trial<F>) {
    let (consumer, other) = (trial.consumer("c").await, trial.consumer("other").await);
    let ids: Vec<_> = (0..3).map(|_| new_entry().id).collect();
    let store = &trial.store;
    for _ in 0..2 {
        store.begin_attempt(consumer, ids[0]).await.unwrap();
    }
    // A message whose only try was taken back, but which has an error in its history.
    store.failed_attempt(consumer, ids[1], "no", true).await.unwrap();
    store.take_back_attempts(consumer, &[ids[1]]).await.unwrap();
    // A message that came twice is in a batch twice.
    let twice: Vec<_> = ids.iter().chain(&ids).copied().collect();
    for batch in [&ids, &twice] {
        store.begin_first_attempts(consumer, batch).await.unwrap();
    }
    store.begin_first_attempts(consumer, &[]).await.unwrap();
    let attempts: std::collections::HashMap<_, _> = store.attempts(consumer, &ids).await.unwrap().into_iter().collect();
    assert_eq!(attempts, [(ids[0], 2), (ids[1], 1), (ids[2], 1)].into_iter().collect());
    assert!(store.attempts(other, &ids).await.unwrap().is_empty());
}

/// A try that was taken back counts as if it had never been made. The errors of failed tries stay.
pub async fn r26_a_try_that_was_not_made_is_taken_back<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    let (entry, other) = (new_entry(), new_entry());
    let store = &trial.store;
    store.begin_attempt(consumer, entry.id).await.unwrap();
    store.begin_attempt(consumer, other.id).await.unwrap();
    store.take_back_attempts(consumer, &[entry.id]).await.unwrap();
    store.take_back_attempts(consumer, &[entry.id]).await.unwrap();
    assert_eq!(store.attempts(consumer, &[entry.id, other.id]).await.unwrap(), [(other.id, 1)]);
    assert_eq!(trial.rows("attempt").await, 1, "nothing is left of it");
    assert_eq!(store.failed_attempt(consumer, entry.id, "no", true).await.unwrap(), 1);
    assert_eq!(store.begin_attempt(consumer, entry.id).await.unwrap(), 2);
    store.take_back_attempts(consumer, &[entry.id]).await.unwrap();
    assert_eq!(store.attempts(consumer, &[entry.id]).await.unwrap(), [(entry.id, 1)]);
    assert_eq!(store.begin_attempt(consumer, entry.id).await.unwrap(), 2);
}

/// A process that lost a partition takes its tries back late. What the next owner of the messages
/// counted meanwhile stays.
pub async fn r26_tries_are_taken_back_without_those_that_the_next_owner_counted<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    let store = &trial.store;
    let ids: Vec<_> = (0..3).map(|_| new_entry().id).collect();
    store.begin_first_attempts(consumer, &ids).await.unwrap();
    assert_eq!(store.begin_attempt(consumer, ids[0]).await.unwrap(), 2, "the next owner");
    store.take_back_attempts(consumer, &ids).await.unwrap();
    assert_eq!(store.attempts(consumer, &ids).await.unwrap(), [(ids[0], 1)]);
    assert_eq!(trial.rows("attempt").await, 1);
    store.take_back_attempts(consumer, &[]).await.unwrap();
}

/// An assignment that is still open shows that its last owner died: the next owner treats the
/// messages that it finds as suspects.
pub async fn an_assignment_found_open_was_not_closed<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    let store = &trial.store;
    let was_open = async |consumer, holding: &Holding| store.open_assignment(consumer, holding).await.unwrap().was_open;
    assert!(!was_open(consumer, &holding("payments", 0)).await, "the first time nobody was there");
    let second = holding("payments", 0);
    assert!(was_open(consumer, &second).await);
    assert!(!was_open(consumer, &holding("payments", 1)).await, "another partition");
    assert!(!was_open(consumer, &holding("refunds", 0)).await, "another topic");
    store.close_assignment(consumer, &second, None).await.unwrap();
    assert!(!was_open(consumer, &holding("payments", 0)).await);
    let other = trial.consumer("another").await;
    assert!(!was_open(other, &holding("payments", 0)).await);
    store.close_assignment(other, &holding("never", 9), None).await.unwrap();
}

/// An owner that was frozen or slow closes its assignment late. It changes nothing, because the row
/// belongs to the next owner.
pub async fn an_owner_that_lost_a_partition_changes_nothing_of_the_next_ones_row<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    let store = &trial.store;
    let (old, new) = (holding("payments", 0), holding("payments", 0));
    store.open_assignment(consumer, &old).await.unwrap();
    store.open_assignment(consumer, &new).await.unwrap();
    let both = [(new.clone(), position("a", 7)), (old.clone(), position("a", 5))];
    assert_eq!(
        store.keep_positions(consumer, &both).await.unwrap(),
        std::slice::from_ref(&old),
        "whose row was not changed"
    );
    assert_eq!(store.keep_positions(consumer, &both[..1]).await.unwrap(), [], "the same position again");
    assert!(!store.close_assignment(consumer, &old, Some(&position("a", 6))).await.unwrap());
    for also_from_an_owner in [false, true] {
        let back = store.take_back_assignment(consumer, &old, &position("a", 6), also_from_an_owner).await.unwrap();
        assert!(!back, "it is not as far");
    }
    let opened = store.open_assignment(consumer, &holding("payments", 0)).await.unwrap();
    assert_eq!(opened, Opened { was_open: true, position: Some(position("a", 7)), has_new_ids: false });
}

/// A process that was frozen goes on, takes the row of a partition that it has lost, and closes it
/// or dies. The owner takes the row back with its position. A row that is further is another one's.
pub async fn a_row_that_was_taken_is_taken_back_unless_it_is_further<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    let store = &trial.store;
    let [owner, thawed] = [(); 2].map(|()| holding("payments", 0));
    let takes = async |position, also| store.take_back_assignment(consumer, &owner, &position, also).await.unwrap();
    let takes_back = async |position| takes(position, false).await;
    assert!(!takes(position("a", 1), true).await, "there is no row");
    store.open_assignment(consumer, &owner).await.unwrap();
    store.open_assignment(consumer, &holding("payments", 1)).await.unwrap();
    store.open_assignment(consumer, &thawed).await.unwrap();
    assert!(!takes_back(position("a", 1)).await, "the other process may be the owner");
    assert!(takes(position("a", 1), true).await, "it has no position yet");
    assert_eq!(store.keep_positions(consumer, &[(owner.clone(), position("a", 5))]).await.unwrap(), []);
    let opened = store.open_assignment(consumer, &thawed).await.unwrap();
    assert_eq!(opened, Opened { was_open: true, position: Some(position("a", 5)), has_new_ids: false });
    assert!(store.close_assignment(consumer, &thawed, None).await.unwrap());
    assert!(!takes_back(position("a", 4)).await, "the row is further");
    assert!(!takes_back(position("b", 9)).await, "the row is of another topic");
    assert!(!takes_back(Position { topic_id: None, next: 9 }).await, "nobody knows of which topic");
    assert!(takes_back(position("a", 5)).await, "the row is as far");
    let on = [(owner.clone(), position("a", 6))];
    assert_eq!(store.keep_positions(consumer, &on).await.unwrap(), [], "and then it goes on");
    assert!(!store.close_assignment(consumer, &thawed, None).await.unwrap(), "it is the owner's again");
    let other = store.open_assignment(consumer, &holding("payments", 1)).await.unwrap();
    assert_eq!(other.position, None, "another partition");
    let opened = store.open_assignment(consumer, &thawed).await.unwrap();
    assert_eq!(opened, Opened { was_open: true, position: Some(position("a", 6)), has_new_ids: false });
    // Brokers that do not tell the ids of topics.
    let [owner, thawed] = [(); 2].map(|()| holding("refunds", 0));
    let without_id = |next| Position { topic_id: None, next };
    store.open_assignment(consumer, &owner).await.unwrap();
    store.keep_positions(consumer, &[(owner.clone(), without_id(3))]).await.unwrap();
    store.open_assignment(consumer, &thawed).await.unwrap();
    assert!(store.take_back_assignment(consumer, &owner, &without_id(4), true).await.unwrap());
}

/// Closing an assignment stores the last position too. Closing it without one keeps the stored
/// position.
pub async fn a_position_is_remembered_until_a_later_one_is_told<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    let store = &trial.store;
    let [first, second, third] = [(); 3].map(|()| holding("payments", 0));
    let beside = holding("payments", 1);
    assert_eq!(store.open_assignment(consumer, &first).await.unwrap().position, None);
    store.open_assignment(consumer, &beside).await.unwrap();
    let both = [(first.clone(), position("a", 5)), (beside, Position { topic_id: None, next: 9 })];
    store.keep_positions(consumer, &both).await.unwrap();
    store.close_assignment(consumer, &first, Some(&position("a", 6))).await.unwrap();
    let opened = store.open_assignment(consumer, &second).await.unwrap();
    assert_eq!(opened, Opened { was_open: false, position: Some(position("a", 6)), has_new_ids: false });
    store.close_assignment(consumer, &second, None).await.unwrap();
    assert_eq!(store.open_assignment(consumer, &third).await.unwrap().position, Some(position("a", 6)));
    let beside = store.open_assignment(consumer, &holding("payments", 1)).await.unwrap();
    assert_eq!(beside.position, Some(Position { topic_id: None, next: 9 }));
    // A topic made anew begins at its start.
    store.keep_positions(consumer, &[(third, position("b", 0))]).await.unwrap();
    let opened = store.open_assignment(consumer, &holding("payments", 0)).await.unwrap();
    assert_eq!(opened.position, Some(position("b", 0)));
    // A broker that does not give the id of the topic in time does not erase it.
    let late = holding("payments", 0);
    let without_id = |next| Position { topic_id: None, next };
    store.open_assignment(consumer, &late).await.unwrap();
    store.keep_positions(consumer, &[(late.clone(), without_id(7))]).await.unwrap();
    let opened = store.open_assignment(consumer, &late).await.unwrap();
    assert_eq!(opened.position, Some(position("b", 7)));
    store.close_assignment(consumer, &late, Some(&without_id(8))).await.unwrap();
    let opened = store.open_assignment(consumer, &holding("payments", 0)).await.unwrap();
    assert_eq!(opened.position, Some(position("b", 8)));
}

/// The id rule of the stored position shows whether offsets that are given again are new ids. Only
/// then may such a partition be consumed.
pub async fn a_position_knows_under_which_id_rule_it_was_kept<F: Fixture>(trial: &Trial<F>) {
    let store = &trial.store;
    let under = async |id_rule: &str| {
        let spec = ConsumerSpec { name: "c".into(), id_rule: id_rule.into(), accept: true };
        store.register(&spec).await.unwrap()
    };
    let has_new_ids = async |holding: &Holding| {
        let opened = store.open_assignment(under("coordinates@1").await, holding).await.unwrap();
        let consumer = under("coordinates@2").await;
        let accepted = store.open_assignment(consumer, holding).await.unwrap();
        (opened.has_new_ids, accepted.has_new_ids)
    };
    let holding = holding("payments", 0);
    assert_eq!(has_new_ids(&holding).await, (false, false), "there is no position yet");
    let consumer = under("coordinates@1").await;
    store.keep_positions(consumer, &[(holding.clone(), position("a", 5))]).await.unwrap();
    assert_eq!(has_new_ids(&holding).await, (false, true));
    let consumer = under("coordinates@2").await;
    assert!(store.open_assignment(consumer, &holding).await.unwrap().has_new_ids, "until a position is kept under it");
    store.keep_positions(consumer, &[(holding.clone(), position("b", 0))]).await.unwrap();
    assert_eq!(has_new_ids(&holding).await, (true, false));
}

fn holding(topic: &str, partition: i32) -> Holding {
    Holding { topic: topic.into(), partition, owner: Uuid::now_v7() }
}

fn position(topic_id: &str, next: i64) -> Position {
    Position { topic_id: Some(topic_id.to_owned()), next }
}

/// A dropped transaction leaves nothing, also where its future is dropped in the middle of a
/// statement. The store works afterwards.
pub async fn a_transaction_that_is_dropped_leaves_nothing<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    let entry = new_entry();
    for round in 0..30 {
        let store = trial.store.clone();
        let work = async move {
            let mut tx = store.begin(consumer).await.unwrap();
            tx.admit(&[entry]).await.unwrap();
            effect::<F>(tx.connection().unwrap(), "m", "1").await.unwrap();
            tx.prove().await.unwrap();
            std::future::pending::<()>().await;
        };
        // Dropped at another point each time.
        let _ = tokio::time::timeout(Duration::from_micros(300 * round), work).await;
    }
    // On a slow machine no round gets past the begin: these points are met on every one.
    for steps in 0..4 {
        let mut tx = trial.store.begin(consumer).await.unwrap();
        if steps > 0 {
            assert_eq!(tx.admit(&[entry]).await.unwrap(), vec![None]);
        }
        if steps > 1 {
            effect::<F>(tx.connection().unwrap(), "m", "1").await.unwrap();
        }
        if steps > 2 {
            assert_eq!(tx.prove().await.unwrap(), Proof::Same);
        }
        drop(tx);
    }
    let mut tx = trial.store.begin(consumer).await.unwrap();
    assert_eq!(tx.admit(&[entry]).await.unwrap(), vec![None]);
    effect::<F>(tx.connection().unwrap(), "m", "2").await.unwrap();
    assert_eq!(tx.prove().await.unwrap(), Proof::Same);
    tx.commit().await.unwrap();
    assert_eq!(trial.effects("m").await, 1);
    assert_eq!(trial.store.known(consumer, &[entry.id]).await.unwrap().len(), 1);
}

/// A message that a handler enqueues exists exactly if the effect of the handler does.
pub async fn effects_of_an_enqueue_go_with_the_transaction<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    let mut session = trial.session("a").await;
    for commit in [false, true] {
        let mut tx = trial.store.begin(consumer).await.unwrap();
        tx.admit(&[new_entry()]).await.unwrap();
        oncebox::store::enqueue::<Connection<F>>(tx.connection().unwrap(), new_message("k", "follow-up"))
            .await
            .unwrap();
        assert_eq!(tx.prove().await.unwrap(), Proof::Same);
        if commit {
            tx.commit().await.unwrap();
            assert_eq!(payloads(&read_rows(&mut session, 1).await.0), ["follow-up"]);
        } else {
            tx.rollback().await.unwrap();
            read_nothing(&mut session).await;
        }
    }
}
