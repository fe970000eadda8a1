//! Cases of waiting messages: order per key, claims, retries, death (R25).

use std::time::Duration;

use super::trial::{arrived, due, entry, eventually, message, parked};
use super::{Fixture, Trial};
use crate::message::Message;
use crate::store::{Claim, ClaimedMessage, ConsumerId, DeadFilter, Inbox, InboxTx, Operator, ParkAs, Waiting};

const CLAIM: Duration = Duration::from_secs(600);

fn payloads(claimed: &[ClaimedMessage]) -> Vec<String> {
    claimed.iter().map(|claimed| String::from_utf8_lossy(&claimed.message.payload).into_owned()).collect()
}

async fn claim<F: Fixture>(trial: &Trial<F>, consumer: ConsumerId) -> Vec<ClaimedMessage> {
    trial.store.claim_due(consumer, 100, &Claim::new(CLAIM)).await.unwrap()
}

/// Finishes a claimed message as the retrier does.
async fn finish<F: Fixture>(trial: &Trial<F>, consumer: ConsumerId, claimed: &ClaimedMessage) -> bool {
    let mut tx = trial.store.begin(consumer).await.unwrap();
    let finished = tx.finish(claimed).await.unwrap();
    if finished {
        tx.commit().await.unwrap();
    } else {
        tx.rollback().await.unwrap();
    }
    finished
}

/// A head and two behind it, for each key.
async fn three_of_each<F: Fixture>(trial: &Trial<F>, consumer: ConsumerId, keys: &[&str]) {
    for number in 1..=3 {
        for key in keys {
            let park_as = if number == 1 { due() } else { ParkAs::Behind };
            trial.park(consumer, &message(key, &format!("{key}{number}")), park_as).await;
        }
    }
}

/// Never two of a key at once.
pub async fn r25_only_the_head_of_a_key_is_claimed<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    let other = trial.consumer("other").await;
    three_of_each(trial, consumer, &["a", "b"]).await;
    // Even one that was given a due time, by whatever way.
    trial.park(consumer, &message("a", "a4"), due()).await;
    assert!(claim(trial, other).await.is_empty(), "another consumer's");
    assert_eq!(trial.store.claim_due(consumer, 1, &Claim::new(CLAIM)).await.unwrap().len(), 1);
    let rest = claim(trial, consumer).await;
    assert_eq!(rest.len(), 1);
    assert!(claim(trial, consumer).await.is_empty());
}

/// Twenty claimers, three keys.
pub async fn r25_a_head_is_claimed_once_by_many_at_once<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    three_of_each(trial, consumer, &["a", "b", "c"]).await;
    let mut claimers = tokio::task::JoinSet::new();
    for _ in 0..20 {
        let store = trial.store.clone();
        claimers.spawn(async move { store.claim_due(consumer, 2, &Claim::new(CLAIM)).await.unwrap() });
    }
    let mut claimed = payloads(&claimers.join_all().await.concat());
    // Locked heads are skipped, so that a claimer may have come away with less than there was.
    claimed.extend(payloads(&claim(trial, consumer).await));
    claimed.sort_unstable();
    assert_eq!(claimed, ["a1", "b1", "c1"]);
}

/// In the same transaction, and only when it commits.
pub async fn r25_finishing_makes_the_next_of_the_key_due<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    three_of_each(trial, consumer, &["a"]).await;
    let head = claim(trial, consumer).await.remove(0);
    let mut tx = trial.store.begin(consumer).await.unwrap();
    assert!(tx.finish(&head).await.unwrap());
    tx.rollback().await.unwrap();
    assert!(claim(trial, consumer).await.is_empty(), "it was not finished");
    let mut order = Vec::new();
    let mut head = Some(head);
    while let Some(claimed) = head {
        order.extend(payloads(std::slice::from_ref(&claimed)));
        assert!(finish(trial, consumer, &claimed).await);
        assert!(!finish(trial, consumer, &claimed).await, "it is gone");
        head = claim(trial, consumer).await.pop();
    }
    assert_eq!(order, ["a1", "a2", "a3"]);
    assert_eq!(trial.store.next_due(consumer).await.unwrap(), None);
}

/// Every part, any bytes.
pub async fn a_message_comes_back_from_waiting_as_it_was<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    let usual = message("k", r#"{"n":1}"#);
    let mut strange = arrived(Some("x"), "", "an id as text \0 ä");
    strange.key = Some(vec![0, 255, 32]);
    strange.payload = vec![0, 255, 128, 10];
    strange.headers = vec![("a".into(), vec![0, 255]), ("a".into(), Vec::new()), ("ä \"".into(), b"'\\".to_vec())];
    strange.trace =
        crate::message::TraceContext::parse("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", Some("a=b"));
    let mut bare = arrived(None, "", &uuid::Uuid::now_v7().to_string());
    (bare.tombstone, bare.time, bare.content_type) = (true, None, None);
    (bare.kind, bare.source) = (String::new(), String::new());
    bare.headers.clear();
    for given in [usual, strange, bare] {
        trial.park(consumer, &given, due()).await;
        let claimed = claim(trial, consumer).await.remove(0);
        assert_eq!(claimed.message, Message { attempt: 2, ..given.clone() });
        assert_eq!(claimed.message.content_hash(), given.content_hash());
        assert!(finish(trial, consumer, &claimed).await);
    }
}

/// And then it is.
pub async fn a_message_is_not_due_before_its_time<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    assert_eq!(trial.store.next_due(consumer).await.unwrap(), None);
    trial.park(consumer, &message("late", "late"), ParkAs::Due(Duration::from_secs(3_600))).await;
    assert!(claim(trial, consumer).await.is_empty());
    let due_in = trial.store.next_due(consumer).await.unwrap().unwrap();
    assert!(due_in > Duration::from_secs(3_500) && due_in <= Duration::from_secs(3_600), "{due_in:?}");
    trial.park(consumer, &message("soon", "soon"), ParkAs::Due(Duration::from_millis(50))).await;
    let claimed = eventually("it is due", || async { claim(trial, consumer).await.pop() }).await;
    assert_eq!(payloads(&[claimed]), ["soon"]);
    trial.park(consumer, &message("now", "now"), due()).await;
    let due_in = eventually("its due time has come", || async {
        trial.store.next_due(consumer).await.unwrap().filter(Duration::is_zero)
    })
    .await;
    assert_eq!(due_in, Duration::ZERO);
}

/// A process froze: its try stays counted, its effects cannot commit.
pub async fn a_claim_that_ended_is_taken_over_and_the_old_one_finishes_nothing<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    trial.park(consumer, &message("k", "1"), due()).await;
    let frozen = trial.store.claim_due(consumer, 1, &Claim::new(Duration::from_millis(50))).await.unwrap().remove(0);
    assert_eq!(frozen.message.attempt, 2);
    let second = eventually("the claim has ended", || async { claim(trial, consumer).await.pop() }).await;
    assert_eq!(second.message.attempt, 3);
    assert_ne!(second.claim, frozen.claim);
    assert!(!finish(trial, consumer, &frozen).await);
    assert!(!trial.store.postpone(&frozen, Duration::ZERO, "no").await.unwrap());
    assert!(!trial.store.give_back(&frozen).await.unwrap());
    assert!(!trial.store.bury(&frozen, "attempts", "no", true).await.unwrap());
    assert!(finish(trial, consumer, &second).await);
    assert!(trial.store.dead(&DeadFilter::default()).await.unwrap().is_empty());
}

/// Nobody's failure costs nothing.
pub async fn a_postponed_message_keeps_its_tries_and_a_returned_one_does_not<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    trial.park(consumer, &message("k", "1"), due()).await;
    let first = claim(trial, consumer).await.remove(0);
    assert_eq!(first.message.attempt, 2);
    assert!(trial.store.give_back(&first).await.unwrap());
    let second = claim(trial, consumer).await.remove(0);
    assert_eq!(second.message.attempt, 2);
    assert!(trial.store.postpone(&second, Duration::from_secs(3_600), "no").await.unwrap());
    assert!(claim(trial, consumer).await.is_empty());
    assert!(!trial.store.postpone(&second, Duration::ZERO, "again").await.unwrap(), "the claim is gone");
}

/// The database went away, and what it claimed is not known to anybody: the token gives it back.
pub async fn g10_a_claim_whose_answer_was_lost_is_given_back_uncounted<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    three_of_each(trial, consumer, &["a", "b"]).await;
    let (lost, other) = (Claim::new(CLAIM), Claim::new(CLAIM));
    assert_eq!(trial.store.give_back_all(consumer, &lost).await.unwrap(), 0, "nothing was claimed yet");
    let attempts = |heads: &[ClaimedMessage]| heads.iter().map(|head| head.message.attempt).collect::<Vec<_>>();
    let first = trial.store.claim_due(consumer, 1, &lost).await.unwrap();
    let second = trial.store.claim_due(consumer, 1, &other).await.unwrap();
    assert_eq!((attempts(&first), attempts(&second)), (vec![2], vec![2]));
    assert_eq!(trial.store.give_back_all(consumer, &lost).await.unwrap(), 1);
    assert!(!finish(trial, consumer, &first[0]).await, "the claim is gone");
    let again = claim(trial, consumer).await;
    assert_eq!((attempts(&again), again[0].sequence), (vec![2], first[0].sequence), "due at once, and uncounted");
    assert!(finish(trial, consumer, &second[0]).await, "another claim is not touched");
}

/// Hold is for order, skip for going on.
pub async fn a_buried_message_holds_its_key_or_lets_it_go<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    three_of_each(trial, consumer, &["hold", "skip"]).await;
    for claimed in claim(trial, consumer).await {
        let holds = claimed.message.key_text() == Some("hold");
        assert!(trial.store.bury(&claimed, "attempts", "no", holds).await.unwrap());
        assert!(!trial.store.bury(&claimed, "attempts", "no", holds).await.unwrap());
        assert!(!finish(trial, consumer, &claimed).await);
    }
    assert_eq!(payloads(&claim(trial, consumer).await), ["skip2"]);
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

/// Two transactions that did not see each other may leave a key without a due time.
pub async fn r25_a_head_that_a_race_left_behind_is_swept_up<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    for key in ["a", "b"] {
        trial.park(consumer, &message(key, &format!("{key}1")), ParkAs::Behind).await;
        trial.park(consumer, &message(key, &format!("{key}2")), ParkAs::Behind).await;
    }
    three_of_each(trial, consumer, &["healthy"]).await;
    assert_eq!(payloads(&claim(trial, consumer).await), ["healthy1"]);
    assert_eq!(trial.store.sweep(consumer).await.unwrap(), 2);
    assert_eq!(trial.store.sweep(consumer).await.unwrap(), 0);
    let mut claimed = payloads(&claim(trial, consumer).await);
    claimed.sort_unstable();
    assert_eq!(claimed, ["a1", "b1"]);
}

/// Each on its own.
pub async fn messages_without_a_key_wait_for_nobody<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    for number in 1..=3 {
        let keyless = arrived(None, &number.to_string(), &uuid::Uuid::now_v7().to_string());
        trial.park(consumer, &keyless, due()).await;
    }
    let claimed = claim(trial, consumer).await;
    assert_eq!(claimed.len(), 3);
    assert!(trial.store.bury(&claimed[0], "terminal", "no", true).await.unwrap());
    assert!(finish(trial, consumer, &claimed[1]).await);
    assert!(trial.store.postpone(&claimed[2], Duration::ZERO, "no").await.unwrap());
    let again = eventually("it is due again", || async { claim(trial, consumer).await.pop() }).await;
    assert_eq!(again.sequence, claimed[2].sequence);
}

/// A verdict leaves no inbox row, so the same delivery may come to it many times.
pub async fn dead_deliveries_are_stored_once<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    let mut message = message("k", "1");
    let dead = || ParkAs::Dead { reason: "too-old".into(), holds: false };
    for _ in 0..3 {
        let mut tx = trial.store.begin(consumer).await.unwrap();
        tx.admit(&[entry(&message)]).await.unwrap();
        tx.forget(&[message.id]).await.unwrap();
        tx.park(&[parked(&message, dead())]).await.unwrap();
        tx.commit().await.unwrap();
    }
    assert_eq!(trial.store.dead(&DeadFilter::default()).await.unwrap().len(), 1);
    message.payload = b"2".to_vec();
    let mut tx = trial.store.begin(consumer).await.unwrap();
    tx.park(&[parked(&message, dead())]).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(trial.store.dead(&DeadFilter::default()).await.unwrap().len(), 2, "another content is another one");
}
