//! Cases of keys on any store: every call changes a record only as the state machine allows (M31),
//! and a key whose record is gone is too old (O23).

use std::time::{Duration, SystemTime};

use super::KeysFixture;
use super::keys::{ENDED, GONE, KEPT, LONG, SHORT, again, claim, completed, outcome, over, record, run, take, timed};
use super::machine::{Event, allowed};
use super::trial::eventually;
use oncebox::adapter::{Age, Bounds, Verdict, judge};
use oncebox::operation::{Mode, Record, State};
use oncebox::store::{Basis, KeyClaim, Keys};

/// The states that a run can leave a record in.
pub(super) const OUTCOMES: [State; 4] =
    [State::Completed, State::FailedReplayable, State::FailedRetryable, State::UnknownRequiresRecovery];

/// The state of a record before a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Before {
    Nothing,
    Owned(Mode),
    Stale(Mode),
    Ended(State),
    Expired(State),
}

impl Before {
    pub(super) fn all() -> Vec<Self> {
        let mut all = vec![Self::Nothing];
        all.extend([Mode::Edge, Mode::Bridged].into_iter().flat_map(|mode| [Self::Owned(mode), Self::Stale(mode)]));
        all.extend(OUTCOMES.map(Self::Ended));
        all.extend(OUTCOMES[..3].iter().map(|state| Self::Expired(*state)));
        all
    }

    pub(super) fn mode(self) -> Mode {
        if let Self::Owned(mode) | Self::Stale(mode) = self { mode } else { Mode::Edge }
    }
}

/// A call, with its event where there are several.
#[derive(Debug, Clone, Copy)]
enum Call {
    Claim(Event),
    Finish(State),
    Heartbeat,
    Release,
    MarkUnknown,
    Purge,
}

/// What a claim for this event requires. Without a record, each event becomes a claim of a new key.
pub(super) fn basis(event: Event, seen: Option<&Record>) -> Basis<'_> {
    match (event, seen) {
        (Event::TakeOver, Some(seen)) => Basis::TakeOver(seen),
        (Event::Reclaim, Some(seen)) => Basis::Reclaim(seen),
        (Event::ExecuteAsNew, Some(seen)) => Basis::Anew(seen),
        _ => Basis::New,
    }
}

/// The state of the record, as `find` returns it, and its epoch.
pub(super) async fn state<F: KeysFixture>(trial: &F, claim: &KeyClaim) -> Option<(State, i64)> {
    let look = trial.store().find(&claim.identity).await.unwrap();
    look.record.map(|record| (record.state_at(look.now), record.epoch))
}

/// The states that a record is read in, and none.
pub(super) fn read_states() -> Vec<Option<State>> {
    [None, Some(State::Expired)].into_iter().chain(State::STORED.map(Some)).collect()
}

/// Makes each call on a record in each state, by its owner or by a former owner. The state machine
/// must allow each change, and each change that the machine allows for these events must be seen.
/// Transactional operations, operators and time have a case of their own on stores whose times can
/// be set (`m31_every_statement_changes_a_record_as_the_machine_is_drawn`).
///
/// Shown by: a `finish` that does not check the state; a take-over of a record with an outcome.
pub async fn m31_every_call_changes_a_record_as_the_machine_is_drawn<F: KeysFixture>(trial: &F) {
    let mut calls = vec![Call::Heartbeat, Call::Release, Call::MarkUnknown, Call::Purge];
    calls.extend([Event::Claim, Event::TakeOver, Event::Reclaim, Event::ExecuteAsNew].map(Call::Claim));
    calls.extend(OUTCOMES.map(Call::Finish));
    let (store, mut changes) = (trial.store(), Vec::new());
    for (row, from) in Before::all().into_iter().enumerate() {
        for (column, call) in calls.iter().enumerate() {
            let lease = if matches!(from, Before::Stale(_)) { SHORT } else { LONG };
            let claim = KeyClaim { lease, ..claim(from.mode(), &format!("r{row}c{column}"), 1) };
            let mut owner = claim.owned(Basis::New);
            if from != Before::Nothing {
                owner = take(trial, &claim).await;
            }
            let seen = match from {
                Before::Nothing => None,
                Before::Owned(_) => Some(record(trial, &claim).await),
                Before::Stale(_) => Some(over(trial, &claim).await),
                Before::Ended(state) => {
                    store.finish(&owner, &outcome(state), &KEPT).await.unwrap();
                    Some(record(trial, &claim).await)
                }
                Before::Expired(state) => {
                    store.finish(&owner, &outcome(state), &ENDED).await.unwrap();
                    Some(over(trial, &claim).await)
                }
            };
            let before = state(trial, &claim).await;
            let event = match *call {
                Call::Claim(event) => {
                    let basis = basis(event, seen.as_ref());
                    drop(store.claim(&again(&claim), basis).await.unwrap());
                    if matches!(basis, Basis::New) { Event::Claim } else { event }
                }
                Call::Finish(state) => {
                    store.finish(&owner, &outcome(state), &KEPT).await.unwrap();
                    Event::Finish
                }
                Call::Heartbeat => {
                    store.heartbeat(&owner, LONG).await.unwrap();
                    Event::Heartbeat
                }
                Call::Release => {
                    store.release(&owner).await.unwrap();
                    Event::Release
                }
                Call::MarkUnknown => {
                    if let Some(seen) = &seen {
                        store.mark_unknown(seen).await.unwrap();
                    }
                    Event::Lose
                }
                Call::Purge => {
                    store.purge_keys(claim.identity.operation(), &GONE, SHORT, 1_000).await.unwrap();
                    Event::Purge
                }
            };
            let after = state(trial, &claim).await;
            if before != after {
                let (before, after) = (before.map(|(state, _)| state), after.map(|(state, _)| state));
                assert!(allowed(before, event, after), "{from:?}, {call:?}: {before:?} became {after:?}: not drawn");
                changes.push((before, event, after));
            }
        }
    }
    let states = read_states();
    for (before, after) in states.iter().flat_map(|before| states.iter().map(move |after| (*before, *after))) {
        for event in Event::ALL {
            let here = match event {
                Event::Claim | Event::TakeOver | Event::Reclaim | Event::ExecuteAsNew => true,
                Event::Finish | Event::Release => true,
                // Without a record, only a transactional operation has this event.
                Event::Lose => before.is_some(),
                Event::Purge => !trial.forgets_by_itself(),
                _ => false,
            };
            let is_seen = changes.contains(&(before, event, after));
            assert!(is_seen || !here || !allowed(before, event, after), "{before:?} {event:?} {after:?} is drawn only");
        }
    }
}

/// The clock of a client was ahead by more than the usual skew, but by no more than its route
/// allows. Once the record is gone, a late retry of the key is too old and does not look new.
///
/// Shown by: using the usual skew for all routes on Redis.
pub async fn o23_a_key_from_beyond_the_usual_skew_is_too_old_once_its_record_is_gone<F: KeysFixture>(trial: &F) {
    let (ahead, id_skew) = (Duration::from_secs(300), LONG);
    let claim = timed(SystemTime::now() + ahead);
    run(trial, &claim, &completed(), &GONE).await;
    let look = eventually("its record is gone", || async {
        trial.store().purge_keys(claim.identity.operation(), &GONE, id_skew, 10).await.unwrap();
        let look = trial.store().find(&claim.identity).await.unwrap();
        (look.record.is_none() && look.purged_below.is_some()).then_some(look)
    })
    .await;
    let bounds = Bounds { purged_below: look.purged_below, now: look.now, id_skew };
    let time = claim.identity.key().time().unwrap();
    assert_eq!(judge(Age::InId(time), bounds), Verdict::TooOld);
}
