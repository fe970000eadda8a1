//! Cases of a redrive beside other messages of its key (R25, R31). In each of them the three stores
//! once did something else.

use uuid::Uuid;

use super::trial::{context, dead, due, message, moved};
use super::waiting::{finish_run, lease, payloads};
use super::{Fixture, Trial};
use oncebox::error::StoreError;
use oncebox::message::Message;
use oncebox::store::{
    DeadFilter, DeadMessage, DeadState, Inbox, LeasedMessage, Operator, OperatorAct, ParkAs, Waiting,
};

/// The only message of this consumer in the list with this payload.
async fn listed<F: Fixture>(trial: &Trial<F>, state: DeadState, payload: &str) -> DeadMessage {
    let all = trial.store.dead(&DeadFilter { states: vec![state], ..DeadFilter::default() }).await.unwrap();
    all.into_iter().find(|one| one.payload == payload.as_bytes()).unwrap()
}

async fn act<F: Fixture>(trial: &Trial<F>, found: &DeadMessage, act: OperatorAct) {
    let filter = DeadFilter { numbers: vec![found.number.clone()], states: vec![found.state], ..DeadFilter::default() };
    let outcome = trial.store.act(&filter, &act, &context()).await.unwrap();
    assert_eq!((outcome.numbers.len(), outcome.already_handled.len()), (1, 0), "{act:?}");
}

/// A message got a new id and died again. Its inbox row has the hash that was computed for the new
/// id, so a redrive that computed another one would be refused as another content.
pub async fn r31_a_message_with_a_new_id_is_redriven_again_under_that_id<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("ledger").await;
    let first = message("k", "1");
    trial.park(consumer, &first, dead(true)).await;
    let id = Uuid::now_v7();
    let renamed = OperatorAct::RedriveAs { id, payload: Some(b"edited".to_vec()) };
    act(trial, &listed(trial, DeadState::Dead, "1").await, renamed).await;
    for _ in 0..2 {
        let head = lease(trial, consumer).await.remove(0);
        assert!(trial.store.bury(&head, "attempts", "no", true).await.unwrap());
        act(trial, &listed(trial, DeadState::Dead, "edited").await, OperatorAct::Redrive).await;
    }
    let leased = lease(trial, consumer).await;
    let [LeasedMessage { message: Message { id: leased_id, payload, .. }, .. }] = &leased[..] else {
        panic!("{leased:?}")
    };
    assert_eq!((leased_id.uuid(), payload.as_slice()), (id, b"edited".as_slice()));
}

/// The clock was a day ahead when the lease was made. The message is handled by nobody, so it can
/// be buried, and then goes on by a redrive.
pub async fn r22_a_message_whose_lease_ends_later_than_any_lease_can_is_buried<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("ledger").await;
    trial.park(consumer, &message("k", "1"), due()).await;
    assert_eq!(lease(trial, consumer).await.len(), 1);
    let running = listed(trial, DeadState::Waiting, "1").await;
    let filter =
        DeadFilter { numbers: vec![running.number.clone()], states: vec![DeadState::Waiting], ..DeadFilter::default() };
    let refused = trial.store.act(&filter, &OperatorAct::Bury, &context()).await;
    assert!(matches!(refused, Err(StoreError::Refused(_))), "a process handles it: {refused:?}");
    trial.run(&format!("update {} set due_at = {}", trial.table("waiting"), moved::<F>("due_at", 86_400))).await;
    act(trial, &running, OperatorAct::Bury).await;
    act(trial, &listed(trial, DeadState::Dead, "1").await, OperatorAct::Redrive).await;
    assert_eq!(lease(trial, consumer).await.len(), 1);
}

/// What stands behind a dead message is what goes on when it is redriven or discarded. Another dead
/// message of the key does not go on by that.
pub async fn what_stands_behind_a_dead_message_counts_no_dead_ones<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("ledger").await;
    trial.park(consumer, &message("k", "1"), dead(true)).await;
    for payload in ["2", "3", "4"] {
        trial.park(consumer, &message("k", payload), ParkAs::Behind).await;
    }
    assert_eq!(listed(trial, DeadState::Dead, "1").await.behind, 3);
    act(trial, &listed(trial, DeadState::Held, "3").await, OperatorAct::Bury).await;
    assert_eq!(listed(trial, DeadState::Dead, "1").await.behind, 2);
    assert_eq!(listed(trial, DeadState::Dead, "3").await.behind, 1);
}

/// A dead message holds those behind it. One before it waits for its next try, and an act on all
/// that wait finds it. Shown by: counting each message of a key with a dead one as held; spending
/// the limit of a list on messages that are held.
pub async fn a_message_before_a_dead_one_of_its_key_waits_and_is_not_held<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("ledger").await;
    trial.park(consumer, &message("k", "1"), due()).await;
    for payload in ["2", "3", "4", "5"] {
        trial.park(consumer, &message("k", payload), ParkAs::Behind).await;
    }
    trial.park(consumer, &message("other", "6"), due()).await;
    trial.park(consumer, &message("other", "7"), ParkAs::Behind).await;
    act(trial, &listed(trial, DeadState::Waiting, "3").await, OperatorAct::Bury).await;
    let dead = listed(trial, DeadState::Dead, "3").await.number;

    for (payload, reason) in [("1", "retry"), ("2", "behind a waiting message of its key")] {
        let found = listed(trial, DeadState::Waiting, payload).await;
        assert_eq!((found.reason.as_str(), found.held_by), (reason, None), "{payload}");
    }
    for payload in ["4", "5"] {
        let found = listed(trial, DeadState::Held, payload).await;
        assert_eq!((found.next_try, found.held_by.as_ref()), (None, Some(&dead)), "{payload}");
    }
    for (state, payloads) in [(DeadState::Waiting, "1 2 6 7"), (DeadState::Held, "4 5")] {
        let filter = |limit| DeadFilter { states: vec![state], limit, ..DeadFilter::default() };
        for limit in [4, 10] {
            let found = trial.store.dead(&filter(limit)).await.unwrap();
            let found: Vec<_> = found.iter().map(|one| String::from_utf8_lossy(&one.payload)).collect();
            assert_eq!(found.join(" "), payloads, "{state:?} up to {limit}");
        }
        let numbers = trial.store.dead_numbers(&filter(1)).await.unwrap();
        assert_eq!(numbers.len(), payloads.split(' ').count(), "{state:?}");
    }
    let ledger = trial.store.status().await.unwrap().consumers.remove(0);
    assert_eq!((ledger.waiting, ledger.held, ledger.dead), (4, 2, 1));
}

/// Only the first message of a key has a due time. A redriven one that stands before a due one
/// takes its place, and one that stands behind waits for it.
pub async fn r25_after_a_redrive_only_the_first_of_its_key_is_due<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("ledger").await;
    trial.park(consumer, &message("before", "b1"), dead(false)).await;
    trial.park(consumer, &message("before", "b2"), due()).await;
    trial.park(consumer, &message("after", "a1"), due()).await;
    trial.park(consumer, &message("after", "a2"), dead(false)).await;
    for payload in ["b1", "a2"] {
        act(trial, &listed(trial, DeadState::Dead, payload).await, OperatorAct::Redrive).await;
    }
    let waiting = trial.table("waiting");
    let due = format!("select count(*) from {waiting} where due_at is not null");
    assert_eq!(trial.number(&due).await, 2, "one for each key");
    let mut heads = lease(trial, consumer).await;
    heads.sort_by(|one, other| one.message.payload.cmp(&other.message.payload));
    assert_eq!(payloads(&heads), ["a1", "b1"]);
    for head in heads {
        assert!(finish_run(trial, consumer, &[head]).await);
    }
    let mut next = lease(trial, consumer).await;
    next.sort_by(|one, other| one.message.payload.cmp(&other.message.payload));
    assert_eq!(payloads(&next), ["a2", "b2"]);
    assert!(finish_run(trial, consumer, &next[..1]).await);
}

/// A message was refused. A copy of it came later, ran, and failed for good: at once, after it
/// waited, or because an operator buried it. Its one dead row is that of the failure: it holds the
/// key, and a redrive runs it. Shown by: the refused row stayed, held nothing, and was discarded as
/// handled by its redrive; the act of the operator was refused.
pub async fn r31_what_was_refused_and_failed_since_is_dead_by_its_failure<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("ledger").await;
    let ways = ["at once", "after it waited", "buried"];
    for (reason, way) in ["too-old", "from-the-future"].into_iter().flat_map(|reason| ways.map(|way| (reason, way))) {
        let name = format!("{reason} {way}");
        let copy = message(&name, &name);
        trial.refuse(consumer, &copy, reason).await;
        if way == "at once" {
            trial.park(consumer, &copy, dead(true)).await;
        } else {
            trial.park(consumer, &copy, due()).await;
        }
        match way {
            "after it waited" => {
                let head = lease(trial, consumer).await.remove(0);
                assert!(trial.store.bury(&head, "terminal", "no", true).await.unwrap());
            }
            "buried" => act(trial, &listed(trial, DeadState::Waiting, &name).await, OperatorAct::Bury).await,
            _ => {}
        }
        let found = listed(trial, DeadState::Dead, &name).await;
        assert_eq!(found.reason, if way == "buried" { way } else { "terminal" }, "{name}");
        let lane = copy.lane_id().unwrap();
        let mut tx = trial.store.begin(consumer).await.unwrap();
        assert!(tx.standing(&[lane]).await.unwrap().blocked.contains(&lane), "{name}: it holds its key");
        tx.rollback().await.unwrap();
        act(trial, &found, OperatorAct::Redrive).await;
        let head = lease(trial, consumer).await;
        assert_eq!(payloads(&head), [name]);
        assert!(finish_run(trial, consumer, &head).await);
    }
    assert_eq!(trial.rows("waiting").await, 0);
}
