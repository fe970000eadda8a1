//! Runs one message alone: after a failed try, as a suspect, or to find the cause of a failure.
//!
//! Promise: a suspect message has its try counted outside the handler's transaction, before the
//! handler runs, and no other message of the process's consumers runs beside it for the first
//! second, so that if the process dies, this message is counted and no other (R26). All other
//! messages that run alone in their transaction run beside other lanes: one that waits for a lock
//! delays only its own lane.
//!
//! Promise: the try of a suspect is counted right before its transaction begins. If a stop, a
//! revocation or a transient failure prevents the try, the count is taken back when the message is
//! left for later, also where it is left because it could not be stored.

use std::sync::Arc;
use std::time::Duration;

use super::{Lane, settle};
use crate::error::{HandlerError, StoreError};
use crate::inbox::consumer::batch::{self, BatchEnd};
use crate::inbox::consumer::blame::{self, Blame, Fault};
use crate::inbox::consumer::item::{End, Item};
use crate::inbox::consumer::verdict;
use crate::inbox::port::{ParkAs, Parked};
use crate::observe::{self, DeliveryOutcome};
use crate::time::pace::sleep_unless;
use crate::time::retry::{ATTEMPTS, Decision};

pub(super) enum Why {
    /// It may have killed its process.
    Suspect,
    /// Its try in a batch failed.
    Failed(HandlerError),
    /// Its batch failed, and no try is counted for that: alone it may succeed.
    Transient,
    /// In a batch it waited for a lock that somebody holds, until the statement's time was over.
    WaitedForALock(HandlerError),
}

/// Runs the message until it is done, waiting, dead, or left for later. `was_counted`: its try in
/// the batch was counted already.
pub(super) async fn run(lane: &mut Lane, item: Item, why: Why, was_counted: bool) {
    // `counted`: how many tries the database has counted, this one included where it is counted
    // before it runs. `unspent`: the last of them was not made yet, so leaving takes it back.
    let (mut counted, mut unspent) = (u32::from(was_counted), was_counted);
    let mut suspect = matches!(why, Why::Suspect);
    let mut failure = match why {
        Why::Failed(error) => {
            say_failed(lane, &item, 1, &error);
            Some(error)
        }
        Why::WaitedForALock(error) => return wait_behind_its_key(lane, item, &error, (counted, unspent)).await,
        Why::Suspect | Why::Transient => None,
    };
    if failure.is_none() {
        // Do not wait here for the transaction of another process: that would block the lane, and a
        // suspect would block the whole process.
        loop {
            match lane.shared.store.is_contested(lane.consumer, &[item.message.id]).await {
                Ok(true) => return lane.set_aside(vec![item], was_counted).await,
                Ok(false) => break,
                Err(away) => {
                    if leave(lane, &item, &away, was_counted).await {
                        return;
                    }
                }
            }
        }
    }
    let shared = Arc::clone(&lane.shared);
    let mut blame = Blame::default();
    loop {
        if let Some(error) = failure.take() {
            // The try of a suspect was counted before. Any other try is counted afterwards, which
            // is enough because the process has survived it.
            if std::mem::take(&mut unspent) {
                shared.unspent.remove(&[item.message.id]);
                note(lane, &item, &error).await;
            } else {
                let Some(tries) = count(lane, &item, Some(&error), counted).await else { return };
                counted = tries;
            }
            match verdict::decide(&lane.shared.options.retry, &error, counted) {
                Decision::InPlace(pause) => {
                    observe::delivered(&lane.shared.options.name, DeliveryOutcome::Retried, 1);
                    if !sleep_unless(&lane.stop, pause).await {
                        return lane.report(&item, End::Left);
                    }
                }
                Decision::Wait(after) => {
                    return settle::park(lane, item, ParkAs::Due(after), (counted, unspent), &error).await;
                }
                Decision::Dead(reason) => {
                    let park_as = dies(lane, reason);
                    return settle::park(lane, item, park_as, (counted, unspent), &error).await;
                }
            }
        }
        if lane.is_left(&item) {
            return lane.leave(&[item], unspent).await;
        }
        let end = if suspect {
            let alone = tokio::select! {
                biased;
                () = lane.stop.cancelled() => None,
                () = revoked(&item) => None,
                alone = shared.solo.alone() => Some(alone),
            };
            let Some(alone) = alone.filter(|_| !item.source.is_revoked()) else {
                return lane.leave(&[item], unspent).await;
            };
            if !unspent {
                let Some(this) = count(lane, &item, None, counted).await else { return };
                (counted, unspent) = (this, true);
            }
            if !shared.options.retry.allows(counted) {
                drop(alone);
                let error = HandlerError::retryable(verdict::KILLS);
                let park_as = dies(lane, ATTEMPTS);
                return settle::park(lane, item, park_as, (counted, unspent), &error).await;
            }
            alone.run(lane.transaction(std::slice::from_ref(&item), Some(counted))).await
        } else {
            let _beside_others = shared.solo.together().await;
            lane.transaction(std::slice::from_ref(&item), Some(counted + u32::from(!unspent))).await
        };
        let Some(end) = end else { return lane.leave(&[item], unspent).await };
        // If its handler came to an end, the process survived it.
        suspect &= end.is_err();
        let (may_be_its_own, error) = match end {
            Ok(BatchEnd::Done(outcomes)) => {
                lane.went_well();
                lane.wake_parked(std::slice::from_ref(&item), &outcomes).await;
                for outcome in outcomes {
                    observe::delivered(&lane.shared.options.name, outcome, 1);
                }
                return lane.report(&item, End::Committed);
            }
            Ok(BatchEnd::Ended(_)) => return settle::transaction_ended(lane, item).await,
            Ok(BatchEnd::Failed(failed)) => {
                let error = failed.into_error();
                if !error.is_transient() {
                    say_failed(lane, &item, counted + u32::from(!unspent), &error);
                    failure = Some(error);
                    continue;
                }
                if error.is_late() {
                    return wait_behind_its_key(lane, item, &error, (counted, unspent)).await;
                }
                (error.may_be_its_own(), error)
            }
            Err(away) => (away.may_be_its_own(), HandlerError::transient(away)),
        };
        let fault = blame.of(&shared, lane.consumer, may_be_its_own).await;
        if fault != Fault::Transient && batch::handler_of(&shared, &item).is_none() {
            // No retrier takes it, so as waiting it would hold its key for ever.
            let Some(Parked { park_as, error: why, .. }) = batch::refused(&shared, &item) else {
                lane.wait_out(&error).await;
                continue;
            };
            let why = HandlerError::retryable(why.unwrap_or_default());
            return settle::park(lane, item, park_as, (u32::from(unspent), unspent), &why).await;
        }
        match fault {
            Fault::Transient if blame.is_open() => lane.pause(&blame).await,
            Fault::Transient => lane.wait_out(&error).await,
            Fault::Lasting => return wait_behind_its_key(lane, item, &error, (counted, unspent)).await,
            Fault::Its => {
                let error = HandlerError::retryable(error);
                say_failed(lane, &item, counted + u32::from(!unspent), &error);
                failure = Some(error);
            }
        }
    }
}

/// Stores the message as waiting without counting a try: an operator sees it there, only its own
/// key waits, and the lane goes on.
async fn wait_behind_its_key(lane: &mut Lane, item: Item, error: &HandlerError, tries: (u32, bool)) {
    let after = lane.shared.options.retry.wait(1, fastrand::f64());
    let error = HandlerError::transient(blame::lasting(error));
    settle::park(lane, item, ParkAs::Due(after), tries, &error).await;
}

/// Returns within 50 ms after the partition of the item was revoked.
async fn revoked(item: &Item) {
    while !item.source.is_revoked() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn say_failed(lane: &Lane, item: &Item, attempt: u32, error: &HandlerError) {
    verdict::failed(&lane.shared.options.name, &item.message, attempt, error);
}

/// Stores the error text of a try that is already counted.
async fn note(lane: &Lane, item: &Item, error: &HandlerError) {
    let noted = lane.shared.store.failed_attempt(lane.consumer, item.message.id, &error.message, false).await;
    if let Err(away) = noted {
        tracing::debug!(error = %away, "the text of a failure was not stored");
    }
}

/// Counts a try; `failure` is set if the try has already failed. If an answer was lost, the stored
/// number is read before the try is counted again, so that an outage counts no try (G10). Before a
/// try it is also read at first: an earlier process may have counted some. `None`: the message is
/// left for later.
async fn count(lane: &mut Lane, item: &Item, failure: Option<&HandlerError>, counted: u32) -> Option<u32> {
    let (mut before, mut in_doubt) = (failure.map(|_| counted), false);
    loop {
        let (store, consumer, id) = (&lane.shared.store, lane.consumer, item.message.id);
        let tries = async {
            if in_doubt || before.is_none() {
                let stored = store.attempts(consumer, &[id]).await?.first().map_or(0, |(_, stored)| *stored);
                if before.is_some_and(|before| stored > before) {
                    return Ok(stored);
                }
                before.get_or_insert(stored);
            }
            match failure {
                Some(error) => store.failed_attempt(consumer, id, &error.message, true).await,
                None => {
                    lane.shared.unspent.add(&[id], before.unwrap_or(counted));
                    store.begin_attempt(consumer, id).await
                }
            }
        };
        match tries.await {
            Ok(tries) => return Some(tries),
            Err(away) if leave(lane, item, &away, false).await => return None,
            Err(_) => in_doubt = true,
        }
    }
}

fn dies(lane: &Lane, reason: &str) -> ParkAs {
    ParkAs::Dead { reason: reason.to_owned(), holds: lane.shared.options.holds() }
}

/// Waits for a database that is away. Returns true if a stop or revocation came and the message is
/// left for later. `unspent`: its last counted try was not made, so the count is taken back.
async fn leave(lane: &mut Lane, item: &Item, away: &StoreError, unspent: bool) -> bool {
    lane.wait_out(away).await;
    let leaves = lane.is_left(item);
    if leaves {
        lane.leave(std::slice::from_ref(item), unspent).await;
    }
    leaves
}

#[cfg(all(test, feature = "sqlite", feature = "embedded"))]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::tests::lane;
    use super::*;
    use crate::inbox::consumer::Handlers;
    use crate::inbox::consumer::fixture::two;
    use crate::inbox::consumer::lane::DATABASE;
    use crate::inbox::port::Inbox;
    use crate::observe::PartState;
    use crate::store::base::Base;

    /// The inbox refuses the message while it takes those of others. Shown by: judging it as one
    /// that a handler takes; it was stored as waiting, where no retrier looked for its kind.
    #[tokio::test]
    async fn r27_a_message_that_no_handler_takes_is_tried_until_it_is_acknowledged_and_never_waits() {
        let (parts, mut lane, mut ends) = lane(Handlers::new()).await;
        let (store, shared, consumer) = (&parts.store, &parts.shared, lane.consumer);
        let [item, _] = two(shared);
        let id = item.message.id;
        let refuses = "create trigger refuses before insert on oncebox_inbox when new.content_hash <> zeroblob(16)
            begin select raise(abort, 'no'); end";
        sqlx::query(refuses).execute(store.pool()).await.unwrap();
        shared.health.set(&shared.part, PartState::Ready);
        let shown = async {
            while !shared.health.lines().iter().any(|line| line.contains(DATABASE)) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            sqlx::query("drop trigger refuses").execute(store.pool()).await.unwrap();
        };
        let both = async { tokio::join!(run(&mut lane, item, Why::Transient, false), shown) };
        tokio::time::timeout(Duration::from_secs(60), both).await.unwrap();
        assert_eq!(ends.recv().await.unwrap().end, End::Committed);
        assert!(store.attempts(consumer, &[id]).await.unwrap().is_empty());
        assert!(!store.has_stored(consumer, 1).await.unwrap(), "it waits");
    }

    /// Shown by: a report alone. The next owner of the message found a try that nobody had made.
    #[tokio::test]
    async fn r26_a_message_that_is_left_because_it_cannot_be_stored_keeps_no_try_that_was_not_made() {
        let (parts, mut lane, mut ends) = lane(Handlers::new()).await;
        let (store, consumer) = (&parts.store, lane.consumer);
        let [item, _] = two(&lane.shared);
        let id = item.message.id;
        store.begin_first_attempts(consumer, &[id]).await.unwrap();
        sqlx::query("drop table oncebox_waiting").execute(store.pool()).await.unwrap();
        item.source.revoke();
        let why = Why::WaitedForALock(HandlerError::transient("locked"));
        run(&mut lane, item, why, true).await;
        assert_eq!(ends.recv().await.unwrap().end, End::Left);
        assert!(store.attempts(consumer, &[id]).await.unwrap().is_empty());
    }
}
