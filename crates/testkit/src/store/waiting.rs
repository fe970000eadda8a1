//! Cases of waiting messages: order per key, leases, retries, death (R25).

use std::time::Duration;

use super::trial::{ENDED, LEASE, arrived, dead, due, eventually, everything, message, moved, parked};
use super::{Fixture, Trial};
use oncebox::message::Message;
use oncebox::store::{
    ConsumerId, DeadFilter, Inbox, LeasedMessage, Operator, ParkAs, Proof, RowLease, Scope, Undone, Waiting,
};

pub(super) fn payloads(leased: &[LeasedMessage]) -> Vec<String> {
    leased.iter().map(|leased| String::from_utf8_lossy(&leased.message.payload).into_owned()).collect()
}

/// Leases one head after the other, until none is due.
pub(super) async fn lease<F: Fixture>(trial: &Trial<F>, consumer: ConsumerId) -> Vec<LeasedMessage> {
    let mut leased = Vec::new();
    while let Some(head) = lease_one(trial, consumer, LEASE).await {
        leased.push(head);
    }
    leased
}

async fn lease_one<F: Fixture>(trial: &Trial<F>, consumer: ConsumerId, length: Duration) -> Option<LeasedMessage> {
    trial.store.lease_due(consumer, &everything(), &RowLease::new(length)).await.unwrap()
}

/// Finishes messages that were leased together, in one transaction. Returns whether that
/// succeeded.
pub(super) async fn finish_run<F: Fixture>(trial: &Trial<F>, consumer: ConsumerId, run: &[LeasedMessage]) -> bool {
    let mut tx = trial.store.begin(consumer).await.unwrap();
    let buried = tx.bury(run, ENDED, "no", true).await.unwrap();
    if buried {
        assert!(tx.finish().await.unwrap());
        tx.wake(run[0].message.lane_id().as_slice()).await.unwrap();
        tx.commit().await.unwrap();
    } else {
        tx.rollback().await.unwrap();
    }
    buried
}

/// Finishes a leased message as the retrier does.
async fn finish<F: Fixture>(trial: &Trial<F>, consumer: ConsumerId, leased: &LeasedMessage) -> bool {
    finish_run(trial, consumer, std::slice::from_ref(leased)).await
}

/// Parks a head and two messages behind it, for each key.
async fn three_of_each<F: Fixture>(trial: &Trial<F>, consumer: ConsumerId, keys: &[&str]) {
    for number in 1..=3 {
        for key in keys {
            let park_as = if number == 1 { due() } else { ParkAs::Behind };
            trial.park(consumer, &message(key, &format!("{key}{number}")), park_as).await;
        }
    }
}

/// `lease_due` leases only heads of keys. A key whose head is leased gives it no other message.
pub async fn r25_only_the_head_of_a_key_is_leased<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    let other = trial.consumer("other").await;
    three_of_each(trial, consumer, &["a", "b"]).await;
    // Also a message behind the head that has a due time is not leased.
    trial.park(consumer, &message("a", "a4"), due()).await;
    assert!(lease(trial, other).await.is_empty(), "another consumer's");
    let mut heads = payloads(&lease(trial, consumer).await);
    heads.sort_unstable();
    assert_eq!(heads, ["a1", "b1"]);
    assert!(lease(trial, consumer).await.is_empty());
}

/// Twenty takers ask at once for the heads of three keys. Each head is leased once.
pub async fn r25_a_head_is_leased_once_by_many_at_once<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    three_of_each(trial, consumer, &["a", "b", "c"]).await;
    let mut takers = tokio::task::JoinSet::new();
    for _ in 0..20 {
        let store = trial.store.clone();
        takers.spawn(async move { store.lease_due(consumer, &everything(), &RowLease::new(LEASE)).await.unwrap() });
    }
    let mut leased = payloads(&takers.join_all().await.into_iter().flatten().collect::<Vec<_>>());
    // A lease skips locked heads, so some takers may have got none although one was due.
    leased.extend(payloads(&lease(trial, consumer).await));
    leased.sort_unstable();
    assert_eq!(leased, ["a1", "b1", "c1"]);
}

/// The transaction that finishes a head makes the next message of its key due, if it commits.
pub async fn r25_finishing_makes_the_next_of_the_key_due<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    three_of_each(trial, consumer, &["a"]).await;
    let head = lease(trial, consumer).await.remove(0);
    let mut tx = trial.store.begin(consumer).await.unwrap();
    assert!(tx.bury(std::slice::from_ref(&head), ENDED, "no", true).await.unwrap());
    assert!(tx.finish().await.unwrap());
    tx.rollback().await.unwrap();
    assert!(lease(trial, consumer).await.is_empty(), "it was not finished");
    let mut order = Vec::new();
    let mut head = Some(head);
    while let Some(leased) = head {
        order.extend(payloads(std::slice::from_ref(&leased)));
        assert!(finish(trial, consumer, &leased).await);
        assert!(!finish(trial, consumer, &leased).await, "it is gone");
        head = lease(trial, consumer).await.pop();
    }
    assert_eq!(order, ["a1", "a2", "a3"]);
    assert_eq!(trial.store.next_due(consumer, &everything()).await.unwrap(), None);
}

/// The head of a key that is due, and the message behind it, leased together.
async fn lease_two<F: Fixture>(trial: &Trial<F>, consumer: ConsumerId) -> [LeasedMessage; 2] {
    let lease = RowLease::new(LEASE);
    let head = trial.store.lease_due(consumer, &everything(), &lease).await.unwrap().unwrap();
    let mut behind = trial.store.lease_behind(consumer, &head, &everything(), 1, &lease).await.unwrap();
    [head, behind.remove(0)]
}

/// A handler commits by itself before `prove` was called. Its messages are dead then, each with its
/// own count of tries, and nobody has woken the key. With `holds` the key stays blocked.
pub async fn r23_what_is_committed_before_the_proof_is_dead_at_its_place<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    for (key, holds) in [("hold", true), ("skip", false)] {
        three_of_each(trial, consumer, &[key]).await;
        let run = lease_two(trial, consumer).await;
        let mut tx = trial.store.begin(consumer).await.unwrap();
        assert!(tx.bury(&run, ENDED, "its handler", holds).await.unwrap());
        tx.commit().await.unwrap();
        for one in &run {
            assert!(!finish(trial, consumer, one).await, "its lease is over");
        }
        assert_eq!(trial.store.next_due(consumer, &everything()).await.unwrap(), None, "nobody woke the key");
        trial.store.wake(consumer, run[0].message.lane_id().as_slice()).await.unwrap();
        let next = payloads(&lease(trial, consumer).await);
        assert_eq!(next, if holds { Vec::new() } else { vec!["skip3".to_owned()] });
        assert_eq!(trial.store.give_back(consumer, &run).await.unwrap(), 0, "they stay dead");
    }
    let dead = trial.store.dead(&DeadFilter::default()).await.unwrap();
    let mut dead: Vec<_> = dead
        .iter()
        .map(|dead| (std::str::from_utf8(&dead.payload).unwrap(), dead.attempts, dead.behind, dead.reason.as_str()))
        .collect();
    dead.sort_unstable();
    let expected = [("hold1", 2, 1), ("hold2", 1, 1), ("skip1", 2, 0), ("skip2", 1, 0)];
    assert_eq!(dead, expected.map(|(payload, attempts, behind)| (payload, attempts, behind, ENDED)));
}

/// A message has at most one dead row. If there is a dead copy when `bury` runs: one that was
/// refused has no inbox row and is deleted; with any other, the message is removed and the copy
/// stays. Neither fails, whatever the handler does then. Shown by: keeping the refused copy.
pub async fn a_message_with_a_dead_copy_is_dead_once<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    let cases: [(&str, &str, &[&str]); 4] = [
        ("too-old", "commits", &["commits1 transaction-ended", "commits2 transaction-ended"]),
        ("too-old", "done", &[]),
        ("unhandled", "commits", &["commits1 unhandled", "commits2 transaction-ended"]),
        ("unhandled", "done", &["done1 unhandled"]),
    ];
    for (copy, key, left) in cases {
        three_of_each(trial, consumer, &[key]).await;
        let run = lease_two(trial, consumer).await;
        let mut tx = trial.store.begin(consumer).await.unwrap();
        let dead = ParkAs::Dead { reason: copy.to_owned(), holds: false };
        tx.park(&[parked(&run[0].message, dead)]).await.unwrap();
        tx.commit().await.unwrap();
        for is_undone in [true, false] {
            let mut tx = trial.store.begin(consumer).await.unwrap();
            assert!(tx.bury(&run, ENDED, "its handler", true).await.unwrap());
            assert_eq!(tx.prove().await.unwrap(), Proof::Same);
            if is_undone {
                assert_eq!(tx.undo().await.unwrap(), Undone::Whole);
                continue;
            }
            if key == "done" {
                assert!(tx.finish().await.unwrap());
            }
            tx.commit().await.unwrap();
        }
        let waiting = trial.table("waiting");
        let rows = format!("select count(*) from {waiting} where state = 'waiting'");
        let dead = trial.store.dead(&DeadFilter::default()).await.unwrap();
        let mut dead: Vec<String> =
            dead.iter().map(|dead| format!("{} {}", String::from_utf8_lossy(&dead.payload), dead.reason)).collect();
        dead.sort_unstable();
        assert_eq!(dead, left, "{copy}");
        assert_eq!(trial.number(&rows).await, 1, "what stands behind them");
        trial.run(&format!("delete from {waiting}")).await;
    }
}

/// Every part of a message comes back unchanged, whatever its bytes are.
pub async fn a_message_comes_back_from_waiting_as_it_was<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    let usual = message("k", r#"{"n":1}"#);
    let mut strange = arrived(Some("x"), "", "an id as text \0 ä");
    strange.key = Some(vec![0, 255, 32]);
    strange.payload = vec![0, 255, 128, 10];
    strange.headers = vec![("a".into(), vec![0, 255]), ("a".into(), Vec::new()), ("ä \"".into(), b"'\\".to_vec())];
    strange.trace = Some(oncebox::message::TraceContext {
        traceparent: "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".to_owned(),
        tracestate: Some("a=b".to_owned()),
    });
    let mut bare = arrived(None, "", &uuid::Uuid::now_v7().to_string());
    (bare.tombstone, bare.time, bare.content_type) = (true, None, None);
    (bare.kind, bare.source) = (String::new(), String::new());
    bare.headers.clear();
    for given in [usual, strange, bare] {
        trial.park(consumer, &given, due()).await;
        let leased = lease(trial, consumer).await.remove(0);
        assert_eq!(leased.message, Message { attempt: 2, ..given.clone() });
        assert_eq!(leased.message.content_hash(), given.content_hash());
        assert!(finish(trial, consumer, &leased).await);
    }
}

/// A message is stored without its time where the time lies outside the years that every database
/// takes. Any client of a broker may give a message such a time.
pub async fn a_message_is_stored_whatever_its_time_is<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    for millis in [-210_866_803_200_000, 8_000_000_000_000_000] {
        let mut given = message("k", "at an odd time");
        given.time = chrono::DateTime::from_timestamp_millis(millis);
        assert!(given.time.is_some());
        trial.park(consumer, &given, due()).await;
        let leased = lease(trial, consumer).await.remove(0);
        assert_eq!(leased.message, Message { attempt: 2, time: None, ..given });
        assert!(finish(trial, consumer, &leased).await);
    }
}

/// A waiting message becomes due at its time, and `next_due` says how long that takes.
pub async fn a_message_is_not_due_before_its_time<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    assert_eq!(trial.store.next_due(consumer, &everything()).await.unwrap(), None);
    trial.park(consumer, &message("late", "late"), ParkAs::Due(Duration::from_secs(3_600))).await;
    assert!(lease(trial, consumer).await.is_empty());
    let due_in = trial.store.next_due(consumer, &everything()).await.unwrap().unwrap();
    assert!(due_in > Duration::from_secs(3_500) && due_in <= Duration::from_secs(3_600), "{due_in:?}");
    trial.park(consumer, &message("soon", "soon"), ParkAs::Due(Duration::from_millis(50))).await;
    let leased = eventually("it is due", || async { lease(trial, consumer).await.pop() }).await;
    assert_eq!(payloads(&[leased]), ["soon"]);
    trial.park(consumer, &message("now", "now"), due()).await;
    let due_in = eventually("its due time has come", || async {
        trial.store.next_due(consumer, &everything()).await.unwrap().filter(Duration::is_zero)
    })
    .await;
    assert_eq!(due_in, Duration::ZERO);
}

/// Two versions of a program run at the same time: each leases only the kinds that it has a handler
/// for. Two processes with different topics each lease only messages of their own.
pub async fn a_waiting_message_is_left_to_a_process_that_takes_its_kind_and_reads_its_topic<F: Fixture>(
    trial: &Trial<F>,
) {
    let consumer = trial.consumer("c").await;
    let of_kind = |key: &str, kind: &str| Message { kind: kind.to_owned(), ..message(key, key) };
    trial.park(consumer, &of_kind("a", "new"), due()).await;
    trial.park(consumer, &of_kind("a", "old"), ParkAs::Behind).await;
    // It must not go past the one before it.
    trial.park(consumer, &of_kind("a", "new"), ParkAs::Behind).await;
    trial.park(consumer, &of_kind("b", "old, too"), due()).await;
    let kinds = |kinds: &[&str]| Some(kinds.iter().map(|kind| (*kind).to_owned()).collect());
    let other_place = Scope { topics: vec!["refunds".into()], places: vec!["refunds.c".into()], kinds: None };
    for nothing in [
        Scope { kinds: kinds(&["old", "NEW", "ne"]), ..everything() },
        Scope { kinds: kinds(&[]), ..everything() },
        other_place.clone(),
        Scope::default(),
    ] {
        assert_eq!(trial.store.next_due(consumer, &nothing).await.unwrap(), None, "{nothing:?}");
        let leased = trial.store.lease_due(consumer, &nothing, &RowLease::new(LEASE)).await.unwrap();
        assert!(leased.is_none(), "{nothing:?}");
    }
    for (scope, key) in [
        (Scope { kinds: kinds(&["old", "old, too"]), ..everything() }, "b"),
        // A queue may hold a message that was sent with another routing key.
        (Scope { places: vec!["payments".into()], kinds: kinds(&["new"]), ..other_place }, "a"),
    ] {
        assert_eq!(trial.store.next_due(consumer, &scope).await.unwrap(), Some(Duration::ZERO));
        let lease = RowLease::new(LEASE);
        let head = trial.store.lease_due(consumer, &scope, &lease).await.unwrap().unwrap();
        assert!(trial.store.lease_behind(consumer, &head, &scope, 9, &lease).await.unwrap().is_empty(), "{scope:?}");
        assert_eq!(payloads(&[head]), [key], "{scope:?}");
    }
}

/// A later message has become due, but an older one of its key waits before it. `next_due` tells
/// the time of the older one.
pub async fn r25_only_a_head_is_due_next<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    trial.park(consumer, &message("a", "a1"), ParkAs::Due(Duration::from_secs(3_600))).await;
    trial.park(consumer, &message("a", "a2"), due()).await;
    let due_in = trial.store.next_due(consumer, &everything()).await.unwrap().unwrap();
    assert!(due_in > Duration::from_secs(3_500), "{due_in:?}");
    assert!(lease(trial, consumer).await.is_empty());
}

/// A process froze and its lease ended. Its try stays counted, and its effects cannot commit.
pub async fn a_lease_that_ended_is_taken_over_and_the_old_one_finishes_nothing<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    trial.park(consumer, &message("k", "1"), due()).await;
    let frozen = lease_one(trial, consumer, Duration::from_millis(50)).await.unwrap();
    assert_eq!((frozen.message.attempt, frozen.suspect), (2, false));
    assert!(trial.store.count_try(&frozen).await.unwrap());
    assert!(trial.store.count_try(&frozen).await.unwrap(), "asked twice, counted once");
    let second = eventually("the lease has ended", || async { lease(trial, consumer).await.pop() }).await;
    assert_eq!((second.tries, second.message.attempt, second.suspect), (2, 3, true));
    assert_ne!(second.lease, frozen.lease);
    assert!(!finish(trial, consumer, &frozen).await);
    assert!(!trial.store.postpone(&frozen, Duration::ZERO, "no").await.unwrap());
    assert!(!trial.store.count_try(&frozen).await.unwrap());
    assert!(trial.store.renew(&second, Duration::from_secs(300)).await.unwrap());
    assert!(!trial.store.renew(&frozen, Duration::from_secs(500)).await.unwrap());
    let ends_in = trial.store.next_due(consumer, &everything()).await.unwrap().unwrap();
    assert!((200..=300).contains(&ends_in.as_secs()), "{ends_in:?}");
    assert_eq!(trial.store.give_back(consumer, std::slice::from_ref(&frozen)).await.unwrap(), 0);
    assert!(!trial.store.bury(&frozen, "attempts", "no", true).await.unwrap());
    assert!(finish(trial, consumer, &second).await);
    assert!(trial.store.dead(&DeadFilter::default()).await.unwrap().is_empty());
}

/// A message that failed keeps its counted try. A message that was given back after a transient
/// failure does not.
pub async fn a_postponed_message_keeps_its_tries_and_a_returned_one_does_not<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    trial.park(consumer, &message("k", "1"), due()).await;
    let first = lease(trial, consumer).await.remove(0);
    assert_eq!(first.message.attempt, 2);
    assert!(trial.store.count_try(&first).await.unwrap());
    assert_eq!(trial.store.give_back(consumer, &[first]).await.unwrap(), 1);
    let second = lease(trial, consumer).await.remove(0);
    assert_eq!((second.message.attempt, second.suspect), (2, false));
    // `postpone` counts the try where `count_try` has not counted it.
    assert!(trial.store.postpone(&second, Duration::ZERO, "no").await.unwrap());
    let third = eventually("it is due again", || async { lease(trial, consumer).await.pop() }).await;
    assert_eq!(third.message.attempt, 3);
    assert!(trial.store.postpone(&third, Duration::from_secs(3_600), "no").await.unwrap());
    assert!(lease(trial, consumer).await.is_empty());
    assert!(!trial.store.postpone(&third, Duration::ZERO, "again").await.unwrap(), "the lease is gone");
}

/// Shown by: a bound in rows alone (each retrier held 100 messages of any size).
pub async fn g11_what_is_leased_behind_a_head_is_bounded_in_bytes<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    trial.park(consumer, &message("a", "a1"), due()).await;
    for _ in 0..4 {
        trial.park(consumer, &message("a", &"x".repeat(3 << 20)), ParkAs::Behind).await;
    }
    let lease = RowLease::new(LEASE);
    let head = trial.store.lease_due(consumer, &everything(), &lease).await.unwrap().unwrap();
    let behind = trial.store.lease_behind(consumer, &head, &everything(), 9, &lease).await.unwrap();
    assert_eq!(behind.len(), 2, "of 3 MiB each");
}

/// Messages that were never tried are leased together with the head of their key. They are
/// finished in one transaction, or given back in order.
pub async fn r25_what_was_never_tried_of_a_key_is_leased_with_its_head<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    three_of_each(trial, consumer, &["a", "b"]).await;
    for name in ["a4", "a5"] {
        trial.park(consumer, &message("a", name), ParkAs::Behind).await;
    }
    let run_of = |length: Duration| async move {
        let lease = RowLease::new(length);
        let head = trial.store.lease_due(consumer, &everything(), &lease).await.unwrap()?;
        let behind = trial.store.lease_behind(consumer, &head, &everything(), 3, &lease).await.unwrap();
        Some([vec![head], behind].concat())
    };
    let run = run_of(LEASE).await.unwrap();
    assert_eq!(payloads(&run), ["a1", "a2", "a3", "a4"], "as many as are asked for");
    assert_eq!(run.iter().map(|one| one.message.attempt).collect::<Vec<_>>(), [2, 1, 1, 1]);
    let other = run_of(LEASE).await.unwrap();
    assert_eq!(payloads(&other), ["b1", "b2", "b3"]);
    assert!(run_of(LEASE).await.is_none(), "all heads are leased");
    // The first two are finished and the others given back, so the next one of the key is due.
    assert_eq!(trial.store.give_back(consumer, &run[2..]).await.unwrap(), 2);
    assert!(run_of(LEASE).await.is_none(), "what stands behind a leased head is not due");
    assert!(!finish_run(trial, consumer, &run).await, "all of them or none");
    assert!(finish_run(trial, consumer, &run[..2]).await);
    let run = run_of(Duration::from_millis(30)).await.unwrap();
    assert_eq!(payloads(&run), ["a3", "a4", "a5"]);
    // The process that leased them died. Each of them is a suspect, and a suspect is leased
    // alone.
    let suspect = eventually("the lease has ended", || run_of(LEASE)).await;
    assert_eq!((payloads(&suspect), suspect[0].suspect, suspect[0].tries), (vec!["a3".to_owned()], true, 0));
    assert!(finish_run(trial, consumer, &suspect).await);
    let next = eventually("the next is due", || run_of(LEASE)).await;
    assert_eq!((payloads(&next), next[0].suspect), (vec!["a4".to_owned()], true));
    // A head that failed is leased alone. The messages behind it wait.
    assert!(trial.store.postpone(&next[0], Duration::ZERO, "no").await.unwrap());
    let again = eventually("it is due again", || run_of(LEASE)).await;
    assert_eq!((again[0].message.attempt, again[0].suspect), (2, false));
    assert_eq!(trial.store.give_back(consumer, &other).await.unwrap(), 3);
    assert_eq!(payloads(&run_of(LEASE).await.unwrap()), ["b1", "b2", "b3"]);
}

/// One transaction removed a head while another stored a message behind it. Both call `wake` after
/// their commit, so that the later call makes the new head due.
pub async fn r25_a_key_is_woken_when_its_head_went_while_one_came_to_stand_behind_it<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    let left = message("a", "a1");
    trial.park(consumer, &left, ParkAs::Behind).await;
    three_of_each(trial, consumer, &["b"]).await;
    assert_eq!(payloads(&lease(trial, consumer).await), ["b1"]);
    let lanes = [left.lane_id().unwrap(), message("b", "").lane_id().unwrap(), message("none", "").lane_id().unwrap()];
    trial.store.wake(consumer, &lanes).await.unwrap();
    assert_eq!(payloads(&lease(trial, consumer).await), ["a1"]);
}

/// The clock was a day ahead when the lease was made.
pub async fn r22_a_lease_that_ends_later_than_any_lease_can_is_over<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    trial.park(consumer, &message("a", "a1"), due()).await;
    trial.park(consumer, &message("b", "b1"), ParkAs::Due(Duration::from_secs(86_400))).await;
    let leased = lease_one(trial, consumer, LEASE).await.unwrap();
    assert_eq!(trial.store.sweep(consumer).await.unwrap(), 0, "the lease stands");
    let (waiting, later) = (trial.table("waiting"), moved::<F>("due_at", 86_400));
    trial.run(&format!("update {waiting} set due_at = {later} where sequence = {}", leased.sequence)).await;
    assert!(lease(trial, consumer).await.is_empty());
    assert_eq!(trial.store.sweep(consumer).await.unwrap(), 1);
    assert_eq!(payloads(&lease(trial, consumer).await), ["a1"], "what waits for a day goes on waiting");
}

/// The connection was lost and the answer with it, so the process does not know which rows it
/// leased. The token of the lease gives them back.
pub async fn g10_a_lease_whose_answer_was_lost_is_given_back_uncounted<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    three_of_each(trial, consumer, &["a", "b"]).await;
    let (lost, other) = (RowLease::new(LEASE), RowLease::new(LEASE));
    assert_eq!(trial.store.give_back_all(consumer, &lost).await.unwrap(), 0, "nothing was leased yet");
    let attempts = |heads: &[LeasedMessage]| heads.iter().map(|head| head.message.attempt).collect::<Vec<_>>();
    let first: Vec<_> = trial.store.lease_due(consumer, &everything(), &lost).await.unwrap().into_iter().collect();
    let second: Vec<_> = trial.store.lease_due(consumer, &everything(), &other).await.unwrap().into_iter().collect();
    assert_eq!((attempts(&first), attempts(&second)), (vec![2], vec![2]));
    assert_eq!(trial.store.give_back_all(consumer, &lost).await.unwrap(), 1);
    assert!(!finish(trial, consumer, &first[0]).await, "the lease is gone");
    let again = lease(trial, consumer).await;
    assert_eq!((attempts(&again), again[0].sequence), (vec![2], first[0].sequence), "due at once, and uncounted");
    assert!(finish(trial, consumer, &second[0]).await, "another lease is not touched");
}

/// A dead message with `holds` keeps later messages of its key waiting. One without it lets the key
/// go on.
pub async fn a_buried_message_holds_its_key_or_lets_it_go<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    three_of_each(trial, consumer, &["hold", "skip"]).await;
    for leased in lease(trial, consumer).await {
        let holds = leased.message.key_text() == Some("hold");
        assert!(trial.store.bury(&leased, "attempts", "no", holds).await.unwrap());
        assert!(!trial.store.bury(&leased, "attempts", "no", holds).await.unwrap());
        assert!(!finish(trial, consumer, &leased).await);
    }
    assert_eq!(payloads(&lease(trial, consumer).await), ["skip2"]);
    assert_eq!(trial.store.sweep(consumer).await.unwrap(), 0, "what stands behind a dead one is no head");
    let held = arrived(Some("hold"), "", "x").lane_id().unwrap();
    let mut tx = trial.store.begin(consumer).await.unwrap();
    assert!(tx.standing(&[held]).await.unwrap().blocked.contains(&held));
    tx.rollback().await.unwrap();
    let dead = trial.store.dead(&DeadFilter::default()).await.unwrap();
    let mut dead: Vec<_> = dead.into_iter().map(|dead| (dead.key.unwrap(), dead.reason, dead.behind)).collect();
    dead.sort();
    assert_eq!(dead, [("hold".into(), "attempts".into(), 2), ("skip".into(), "attempts".into(), 0)]);
}

/// Two transactions that did not see each other may leave a head without a due time. The sweep
/// makes it due.
pub async fn r25_a_head_that_a_race_left_behind_is_swept_up<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    for key in ["a", "b"] {
        trial.park(consumer, &message(key, &format!("{key}1")), ParkAs::Behind).await;
        trial.park(consumer, &message(key, &format!("{key}2")), ParkAs::Behind).await;
    }
    three_of_each(trial, consumer, &["healthy"]).await;
    assert_eq!(payloads(&lease(trial, consumer).await), ["healthy1"]);
    assert_eq!(trial.store.sweep(consumer).await.unwrap(), 2);
    assert_eq!(trial.store.sweep(consumer).await.unwrap(), 0);
    let mut leased = payloads(&lease(trial, consumer).await);
    leased.sort_unstable();
    assert_eq!(leased, ["a1", "b1"]);
}

/// Messages without a key are leased independently of each other.
pub async fn messages_without_a_key_wait_for_nobody<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    for number in 1..=3 {
        let keyless = arrived(None, &number.to_string(), &uuid::Uuid::now_v7().to_string());
        trial.park(consumer, &keyless, due()).await;
    }
    let leased = lease(trial, consumer).await;
    assert_eq!(leased.len(), 3);
    assert!(trial.store.bury(&leased[0], "terminal", "no", true).await.unwrap());
    assert!(finish(trial, consumer, &leased[1]).await);
    assert!(trial.store.postpone(&leased[2], Duration::ZERO, "no").await.unwrap());
    let again = eventually("it is due again", || async { lease(trial, consumer).await.pop() }).await;
    assert_eq!(again.sequence, leased[2].sequence);
}

/// A message that is dead by a verdict has no inbox row, so each redelivery reaches the verdict
/// again. It is stored once.
pub async fn dead_deliveries_are_stored_once<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    let mut message = message("k", "1");
    for _ in 0..3 {
        trial.refuse(consumer, &message, "too-old").await;
    }
    assert_eq!(trial.store.dead(&DeadFilter::default()).await.unwrap().len(), 1);
    message.payload = b"2".to_vec();
    let mut tx = trial.store.begin(consumer).await.unwrap();
    tx.park(&[parked(&message, ParkAs::Dead { reason: "too-old".into(), holds: false })]).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(trial.store.dead(&DeadFilter::default()).await.unwrap().len(), 2, "another content is another one");
}

/// The bounds at which a consumer stops taking messages count its own messages only: one the dead
/// ones, the other all that are stored, whether they are due, behind another one, or dead.
pub async fn g11_dead_and_waiting_messages_are_counted_up_to_a_bound<F: Fixture>(trial: &Trial<F>) {
    let (consumer, other) = (trial.consumer("ledger").await, trial.consumer("other").await);
    trial.park(consumer, &message("a", "1"), dead(true)).await;
    trial.park(consumer, &message("a", "2"), ParkAs::Behind).await;
    trial.park(other, &message("a", "1"), dead(true)).await;
    let store = &trial.store;
    for (rows, dead, stored) in [(1, true, true), (2, false, true), (3, false, false)] {
        let has = (store.has_dead(consumer, rows).await.unwrap(), store.has_stored(consumer, rows).await.unwrap());
        assert_eq!(has, (dead, stored), "at least {rows}");
    }
    trial.park(consumer, &message("b", "1"), dead(true)).await;
    assert!(store.has_dead(consumer, 2).await.unwrap());
    assert!(store.has_stored(consumer, 3).await.unwrap());
    trial.park(consumer, &message("c", "1"), ParkAs::Due(Duration::from_secs(60))).await;
    assert!(!store.has_dead(consumer, 3).await.unwrap());
    assert!(store.has_stored(consumer, 4).await.unwrap());
    assert!(!store.has_stored(consumer, 5).await.unwrap());
    assert!(!store.has_stored(trial.consumer("third").await, 1).await.unwrap());
}
