//! Cases of the lives of records: every statement changes a record only as the state machine
//! allows, and each part is removed at its time (O3, O23, M31, M98, M100). No case waits: it sets
//! the times in the tables back.

use std::time::{Duration, SystemTime};

use super::keys::{
    PATIENCE, again, claim, completed, failed, of_operation, outcome, record, retryable, run, take, timed,
};
use super::keys_machine::{self, Before, OUTCOMES, basis, read_states};
use super::machine::{Event, allowed};
use super::phases::{local, new_operation};
use super::trial::{context, moved};
use super::{Fixture, Trial};
use oncebox::adapter::{Age, Bounds, Verdict, judge};
use oncebox::operation::{Mode, Record, Retention, State};
use oncebox::store::{
    Base, Basis, Begun, Fenced, KeyChange, KeyClaim, KeyOperator, Keys, Operations, Owned, Proof, RunOutcome,
};

const fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Lifetimes that are longer than a case runs.
const RETENTION: Retention = Retention { ttl: seconds(10_000), body: seconds(5_000), metadata: seconds(20_000) };

/// Sets these columns of all records back by this number of seconds.
async fn set_back<F: Fixture>(trial: &Trial<F>, columns: &[&str], by: i64) {
    let set: Vec<String> = columns.iter().map(|column| format!("{column} = {}", moved::<F>(column, -by))).collect();
    trial.run(&format!("update {} set {}", trial.table("idempotency_request"), set.join(", "))).await;
}

/// Ages all records and bodies by this number of seconds.
async fn go_by<F: Fixture>(trial: &Trial<F>, by: i64) {
    set_back(trial, &["created_at", "updated_at", "outcome_at", "expires_at", "body_expires_at"], by).await;
    if <F::Store as Base>::NAME == "sqlite" {
        let back = moved::<F>("expires_at", -by);
        trial.run(&format!("update {} set expires_at = {back}", trial.table("idempotency_body"))).await;
    }
}

async fn ended<F: Fixture>(trial: &Trial<F>, key: &str, outcome: &RunOutcome, retention: &Retention) -> KeyClaim {
    let claim = claim(Mode::Edge, key, 1);
    run(trial, &claim, outcome, retention).await;
    claim
}

async fn purged<F: Fixture>(trial: &Trial<F>, claim: &KeyClaim, retention: &Retention) -> u64 {
    trial.store.purge_keys(claim.identity.operation(), retention, seconds(60), 100).await.unwrap()
}

async fn state<F: Fixture>(trial: &Trial<F>, claim: &KeyClaim) -> Option<State> {
    keys_machine::state(trial, claim).await.map(|(state, _)| state)
}

/// Each lifetime counts from the outcome, also three days after the claim. Shown by: lifetimes that
/// count from the claim.
pub async fn o3_every_lifetime_counts_from_the_outcome<F: Fixture>(trial: &Trial<F>) {
    let claim = claim(Mode::Edge, "recovered", 1);
    let owner = take(trial, &claim).await;
    set_back(trial, &["created_at", "updated_at"], 259_200).await;
    assert_eq!(trial.store.finish(&owner, &completed(), &RETENTION).await.unwrap(), Fenced::Done);
    for (after, bodies, records, seen) in [
        (0, 0, 0, Some(State::Completed)),
        (4_900, 0, 0, Some(State::Completed)),
        (200, 1, 0, Some(State::Completed)),
        (4_800, 0, 0, Some(State::Completed)),
        (200, 0, 0, Some(State::Expired)),
        (9_800, 0, 0, Some(State::Expired)),
        (200, 0, 1, None),
    ] {
        go_by(trial, after).await;
        assert_eq!(trial.store.expire_bodies(100).await.unwrap(), bodies, "{after} s later");
        assert_eq!(purged(trial, &claim, &RETENTION).await, records, "{after} s later");
        assert_eq!(state(trial, &claim).await, seen, "{after} s later");
    }
}

/// A record stays until the promised time, also when shorter lifetimes are set later. Shown by: a
/// purge by `metadata` alone.
pub async fn m98_a_time_that_was_promised_holds_when_the_settings_are_shortened<F: Fixture>(trial: &Trial<F>) {
    let claim = ended(trial, "promised", &completed(), &RETENTION).await;
    let shortened = Retention { ttl: seconds(10), body: seconds(10), metadata: seconds(20) };
    go_by(trial, 9_800).await;
    assert_eq!((purged(trial, &claim, &shortened).await, state(trial, &claim).await), (0, Some(State::Completed)));
    go_by(trial, 400).await;
    assert_eq!((purged(trial, &claim, &shortened).await, state(trial, &claim).await), (1, None));
}

/// A record without an outcome is never purged. Shown by: a purge by age alone.
pub async fn m100_only_a_terminal_record_is_ever_cleaned_whatever_its_age<F: Fixture>(trial: &Trial<F>) {
    let running = claim(Mode::Edge, "running", 1);
    take(trial, &running).await;
    let bridged = claim(Mode::Bridged, "bridged", 1);
    take(trial, &bridged).await;
    let unknown = ended(trial, "unknown", &RunOutcome::Unknown, &RETENTION).await;
    let mut gone = Vec::new();
    for (key, outcome) in [("completed", completed()), ("failed", failed()), ("retryable", retryable())] {
        gone.push(ended(trial, key, &outcome, &RETENTION).await);
    }
    go_by(trial, 1_000_000_000).await;
    assert_eq!(purged(trial, &running, &RETENTION).await, 3);
    for one in &gone {
        assert_eq!(state(trial, one).await, None);
    }
    for (one, seen) in
        [(running, State::InProgress), (bridged, State::InProgress), (unknown, State::UnknownRequiresRecovery)]
    {
        assert_eq!(state(trial, &one).await, Some(seen));
    }
}

/// Once a record is gone, a late retry of its key is too old. It must never look new.
///
/// Shown by: a bound without the skew; a bound that is too low.
pub async fn o23_a_key_whose_record_was_purged_is_too_old_for_ever<F: Fixture>(trial: &Trial<F>) {
    let skew = seconds(60);
    // Only the skew raises the bound above the time of the key: the outcome is older than the
    // lifetime of the metadata, the key is not.
    let past: u32 = 20_030;
    // The clock of the client is ahead by the whole skew, and the outcome comes at the claim.
    let claim = timed(SystemTime::now() - seconds(past.into()) + skew);
    run(trial, &claim, &completed(), &RETENTION).await;
    let age = || async {
        let look = trial.store.find(&claim.identity).await.unwrap();
        assert_eq!(look.record, None);
        let bounds = Bounds { purged_below: look.purged_below, now: look.now, id_skew: skew };
        (judge(Age::InId(claim.identity.key().time().unwrap()), bounds), look.purged_below)
    };
    go_by(trial, past.into()).await;
    assert_eq!(purged(trial, &claim, &RETENTION).await, 1);
    let (first, bound) = age().await;
    assert_eq!(first, Verdict::TooOld);
    // A later purge with longer lifetimes never lowers the bound.
    let other = ended(trial, "other", &completed(), &RETENTION).await;
    go_by(trial, 90_000).await;
    assert_eq!(purged(trial, &other, &Retention { metadata: seconds(80_000), ..RETENTION }).await, 1);
    let (later, raised) = age().await;
    assert!(later == Verdict::TooOld && raised >= bound, "{later:?} {raised:?}");
}

/// Of all claims without an outcome, those are found whose lease is over, each once, by operation
/// and in pages, the longest unchanged first whatever its mode: what a sweep ends. A claim of mode
/// `same_tx` has no lease, and is never committed without an outcome unless its handler ended the
/// transaction.
///
/// Shown by: a page without the operation, the state, the lease or the limit; one that asks for
/// leases alone; one that is full of one mode before it looks at the next.
pub async fn o11_what_nobody_drives_any_more_is_found_by_operation_and_in_pages<F: Fixture>(trial: &Trial<F>) {
    let (edge, bridged, ended_tx) =
        (claim(Mode::Edge, "edge", 1), claim(Mode::Bridged, "bridged", 1), claim(Mode::Bridged, "same_tx", 1));
    let others = of_operation("another_operation", claim(Mode::Edge, "others", 1));
    for one in [&edge, &bridged, &ended_tx, &others] {
        take(trial, one).await;
    }
    let phased = new_operation("phased", seconds(600));
    local(trial, &phased).await;
    let stale = async |limit| trial.store.stale(edge.identity.operation(), limit).await.unwrap();
    // Less than half a lease ago: its owner may still be there and renew it.
    set_back(trial, &["lease_until"], 610).await;
    assert_eq!(stale(100).await, []);
    set_back(trial, &["lease_until"], 2_990).await;
    let earlier = moved::<F>("lease_until", -3_600);
    trial.run(&format!("update {} set lease_until = {earlier}", trial.table("operation"))).await;
    let length = if F::Store::NAME == "sqlite" { "lease_ms" } else { "lease_seconds" };
    let of_tx = match F::Store::NAME {
        "postgres" => format!("operation_id = '{}'", ended_tx.operation_id),
        _ => format!("hex(operation_id) = upper('{}')", ended_tx.operation_id.simple()),
    };
    let set = format!("mode = 'same_tx', owner = null, lease_until = null, {length} = null");
    trial.run(&format!("update {} set {set} where {of_tx}", trial.table("idempotency_request"))).await;
    take(trial, &claim(Mode::Edge, "lives", 1)).await;
    ended(trial, "done", &completed(), &RETENTION).await;
    ended(trial, "unknown", &RunOutcome::Unknown, &RETENTION).await;
    let mut modes = [("edge", &edge), ("bridged", &bridged), ("same_tx", &ended_tx)];
    for _ in 0..modes.len() {
        let mut expected = Vec::new();
        for (hours, (mode, one)) in (1..).zip(modes) {
            let changed = moved::<F>("created_at", -3_600 * hours);
            let set = format!("updated_at = {changed} where mode = '{mode}'");
            trial.run(&format!("update {} set {set}", trial.table("idempotency_request"))).await;
            expected.insert(0, record(trial, one).await);
        }
        assert_eq!(stale(100).await, expected, "whole");
        assert_eq!(stale(2).await, expected[..2], "left alone for longest");
        modes.rotate_left(1);
    }
    assert_eq!(trial.store.stale(others.identity.operation(), 9).await.unwrap().len(), 1);
    assert_eq!(trial.store.mark_unknown(&record(trial, &edge).await).await.unwrap(), Fenced::Done);
    assert_eq!(stale(100).await.len(), 2);
}

/// An act on a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Act {
    Claim,
    TakeOver,
    Reclaim,
    Anew,
    Heartbeat,
    Finish(State),
    Release,
    MarkUnknown,
    InsertUnknown,
    Purge,
    ForgetByHand,
    PurgeByHand,
    Resolve(State),
    /// A transactional operation: claim and outcome in one commit, for this event and state.
    DoorA(Event, State),
    Time,
}

/// Makes a record in this state. Returns the claim, the owner (or the last one), and the record.
async fn prepare<F: Fixture>(trial: &Trial<F>, key: &str, from: Before) -> (KeyClaim, Owned, Option<Record>) {
    let claim = claim(from.mode(), key, 1);
    if from == Before::Nothing {
        return (claim.clone(), claim.owned(Basis::New), None);
    }
    let owner = take(trial, &claim).await;
    match from {
        Before::Stale(_) => set_back(trial, &["lease_until"], 3_600).await,
        Before::Ended(state) => drop(trial.store.finish(&owner, &outcome(state), &RETENTION).await.unwrap()),
        Before::Expired(state) => {
            trial.store.finish(&owner, &outcome(state), &RETENTION).await.unwrap();
            go_by(trial, 30_000).await;
        }
        Before::Nothing | Before::Owned(_) => {}
    }
    let seen = record(trial, &claim).await;
    (claim, owner, Some(seen))
}

/// Does the act, which may be refused. Returns the events by which it may change a record.
async fn act<F: Fixture>(
    trial: &Trial<F>,
    act: Act,
    (claim, owner, seen): (&KeyClaim, &Owned, Option<&Record>),
) -> Vec<Event> {
    let store = &trial.store;
    let again = again(claim);
    let basis = |event: Event| basis(event, seen);
    match act {
        Act::Claim => drop(store.claim(&again, Basis::New).await.unwrap()),
        Act::TakeOver => drop(store.claim(&again, basis(Event::TakeOver)).await.unwrap()),
        Act::Reclaim => drop(store.claim(&again, basis(Event::Reclaim)).await.unwrap()),
        Act::Anew => drop(store.claim(&again, basis(Event::ExecuteAsNew)).await.unwrap()),
        Act::Heartbeat => drop(store.heartbeat(owner, claim.lease).await.unwrap()),
        Act::Finish(state) => drop(store.finish(owner, &outcome(state), &RETENTION).await.unwrap()),
        Act::Release => drop(store.release(owner).await.unwrap()),
        Act::MarkUnknown => {
            if let Some(seen) = seen {
                store.mark_unknown(seen).await.unwrap();
            }
        }
        Act::InsertUnknown => drop(store.insert_unknown(&again).await.unwrap()),
        Act::Purge => drop(purged(trial, claim, &RETENTION).await),
        Act::ForgetByHand | Act::PurgeByHand | Act::Resolve(_) => {
            let change = match act {
                Act::ForgetByHand => KeyChange::Release { against_evidence: false },
                Act::Resolve(state) => KeyChange::Resolve {
                    outcome: Box::new(outcome(state)),
                    retention: RETENTION,
                    against_evidence: false,
                },
                _ => KeyChange::Purge { against_evidence: false },
            };
            if let Some(seen) = seen {
                // Runs the statement without the check before it, because the statement alone must
                // follow the state machine.
                drop(store.change_key(seen, &change, &context()).await);
            }
        }
        Act::DoorA(event, state) => {
            let claim = KeyClaim { mode: Mode::Transactional, ..again };
            if let Begun::Claimed(mut tx) = store.begin_operation(&claim, basis(event), PATIENCE).await.unwrap() {
                match tx.complete(Vec::new(), &outcome(state), &RETENTION).await {
                    Ok(Proof::Same) => tx.commit().await.unwrap(),
                    _ => tx.rollback().await.unwrap(),
                }
            }
        }
        Act::Time => go_by(trial, 30_000).await,
    }
    match act {
        Act::Claim => vec![Event::Claim],
        Act::TakeOver => vec![Event::TakeOver, Event::Claim],
        Act::Reclaim => vec![Event::Reclaim, Event::Claim],
        Act::Anew => vec![Event::ExecuteAsNew, Event::Claim],
        Act::Heartbeat => vec![Event::Heartbeat],
        Act::Finish(_) => vec![Event::Finish],
        Act::Release => vec![Event::Release],
        Act::MarkUnknown | Act::InsertUnknown => vec![Event::Lose],
        Act::Purge => vec![Event::Purge],
        Act::ForgetByHand | Act::PurgeByHand => vec![Event::Forget],
        Act::Resolve(_) => vec![Event::Resolve],
        Act::DoorA(event, _) => vec![event, Event::Claim],
        Act::Time => vec![Event::Time],
    }
}

/// Does each act on a record in each state, by its owner or by a former owner. The state machine
/// must allow each change, and each change that the machine allows for these events must be seen.
///
/// Shown by: a `finish` that does not check the state; a purge of an unknown record; a release by
/// somebody who is not the owner; a take-over of a record with an outcome.
pub async fn m31_every_statement_changes_a_record_as_the_machine_is_drawn<F: Fixture>(trial: &Trial<F>) {
    let mut acts = vec![Act::Claim, Act::TakeOver, Act::Reclaim, Act::Anew, Act::Heartbeat, Act::Release];
    acts.extend([Act::MarkUnknown, Act::InsertUnknown, Act::Purge, Act::ForgetByHand, Act::PurgeByHand, Act::Time]);
    acts.extend(OUTCOMES.map(Act::Finish));
    acts.extend(OUTCOMES[..3].iter().map(|state| Act::Resolve(*state)));
    for event in [Event::Claim, Event::TakeOver, Event::Reclaim, Event::ExecuteAsNew] {
        acts.extend(OUTCOMES.map(|state| Act::DoorA(event, state)));
    }
    let mut seen_changes = Vec::new();
    for (row, from) in Before::all().into_iter().enumerate() {
        for (column, one) in acts.iter().enumerate() {
            let (claim, owner, seen) = prepare(trial, &format!("r{row}c{column}"), from).await;
            let before = keys_machine::state(trial, &claim).await;
            let events = act(trial, *one, (&claim, &owner, seen.as_ref())).await;
            let after = keys_machine::state(trial, &claim).await;
            // Only this record counts. The act may age the other records of the case.
            if before == after {
                continue;
            }
            let (before, after) = (before.map(|(state, _)| state), after.map(|(state, _)| state));
            let by_transactional = matches!(one, Act::DoorA(..));
            let step = events.iter().find(|event| {
                if by_transactional {
                    let claimed = Some(State::InProgress);
                    allowed(before, **event, claimed) && allowed(claimed, Event::Finish, after)
                } else {
                    allowed(before, **event, after)
                }
            });
            let step =
                step.unwrap_or_else(|| panic!("{from:?}, {one:?}: {before:?} became {after:?}, which is not drawn"));
            if !by_transactional {
                seen_changes.push((before, *step, after));
            }
        }
    }
    // Conversely, each change that the machine allows is made by some statement.
    let states = read_states();
    for (before, after) in states.iter().flat_map(|before| states.iter().map(move |after| (*before, *after))) {
        for event in Event::ALL {
            // A heartbeat changes only a time. Recovery writes through `finish`, as the new owner.
            let is_seen = seen_changes.contains(&(before, event, after));
            let elsewhere = matches!(event, Event::Heartbeat | Event::Recover);
            assert!(
                is_seen || elsewhere || !allowed(before, event, after),
                "{before:?} {event:?} {after:?} is drawn, and no statement does it"
            );
        }
    }
}
