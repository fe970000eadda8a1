//! One message alone: after a failed try, or under suspicion. Its tries are counted outside the handler's transaction, before
//! the handler runs, so that a handler that kills the process is counted too (R26).
//!
//! Promise: a try is counted when nothing but the handler stands between it and its end; one that a stop or a revocation
//! prevented, or that was nobody's failure, is taken back where the message is left for later.

use std::sync::Arc;

use super::batch::BatchEnd;
use super::blame::Blame;
use super::item::Item;
use super::lane::{Lane, TAKE_BACK};
use super::settle;
use crate::error::{HandlerError, StoreError};
use crate::observe::{self, Outcome};
use crate::policy::retry::{Death, Decision};
use crate::runtime::pace::sleep_unless;
use crate::store::{ParkAs, Store};

/// Runs it until it is done, waiting, dead, or left for later. `was_counted` where its try in the batch was counted before.
pub(super) async fn run<S: Store>(
    lane: &mut Lane<S>,
    item: Item,
    mut failure: Option<HandlerError>,
    was_counted: bool,
) {
    if failure.is_none() {
        // Whoever runs alone holds up the whole process: not for somebody else's transaction.
        match lane.shared.store.is_contested(lane.consumer, &[item.message.id]).await {
            Ok(true) => {
                if was_counted {
                    lane.uncount(std::slice::from_ref(&item)).await;
                }
                return lane.aside.put(item);
            }
            Ok(false) => {}
            Err(away) => {
                if leave(lane, &item, &away, was_counted).await {
                    return;
                }
            }
        }
    }
    // The try in the batch already failed: it is counted after the fact, which is enough, for the process lived to say so.
    let mut counted = u32::from(was_counted);
    if let Some(error) = failure.as_ref().filter(|_| was_counted) {
        note(lane, &item, error).await;
    } else if failure.is_some() {
        let Some(tries) = count(lane, &item, failure.as_ref(), counted).await else { return };
        counted = tries;
    }
    // A try is counted that has not come to an end: it is not counted again, and taken back where none follows.
    let mut unspent = was_counted && failure.is_none();
    let shared = Arc::clone(&lane.shared);
    let mut blame = Blame::default();
    loop {
        if let Some(error) = failure.take() {
            match settle::decide(&lane.shared.options.retry, &error, counted) {
                Decision::InPlace(pause) => {
                    observe::delivered(&lane.shared.options.name, Outcome::Retried, 1);
                    if !sleep_unless(&lane.stop, pause).await {
                        return lane.report(&item, false);
                    }
                }
                Decision::Wait(after) => return settle::park(lane, item, ParkAs::Due(after), counted, &error).await,
                Decision::Dead(death) => {
                    let park_as = dies(lane, death);
                    return settle::park(lane, item, park_as, counted, &error).await;
                }
            }
        }
        let alone = tokio::select! {
            biased;
            () = lane.stop.cancelled() => None,
            alone = shared.solo.write() => Some(alone),
        };
        if alone.is_none() || item.source.is_revoked() {
            return leave_for_later(lane, &item, unspent).await;
        }
        if !unspent {
            let Some(this) = count(lane, &item, None, counted).await else { return };
            counted = this;
        }
        unspent = true;
        if !shared.options.retry.allows(counted) {
            drop(alone);
            let error = HandlerError::retryable(settle::KILLS);
            let park_as = dies(lane, Death::Attempts);
            return settle::park(lane, item, park_as, counted - 1, &error).await;
        }
        let Some(end) = lane.transaction(std::slice::from_ref(&item), Some(counted)).await else {
            return leave_for_later(lane, &item, unspent).await;
        };
        drop(alone);
        match end {
            Ok(BatchEnd::Done(outcomes)) => {
                lane.went_well();
                for outcome in outcomes {
                    observe::delivered(&lane.shared.options.name, outcome, 1);
                }
                return lane.report(&item, true);
            }
            Ok(BatchEnd::Failed(_, error))
                if error.is_nobodys() && !blame.falls(&shared, lane.consumer, error.may_be_its_own()).await =>
            {
                lane.wait_out(&error).await;
            }
            Ok(BatchEnd::Failed(_, error)) => {
                unspent = false;
                let error = if error.is_nobodys() { HandlerError::retryable(error) } else { error };
                tracing::warn!(consumer = %lane.shared.options.name, id = %item.message.id, sent_id = %item.message.id_text, attempt = counted, %error, "a handler failed");
                note(lane, &item, &error).await;
                failure = Some(error);
            }
            Ok(BatchEnd::Unclear(why)) => {
                unspent = false;
                failure = Some(HandlerError::retryable(why));
            }
            Ok(BatchEnd::Ended(_)) => return settle::transaction_ended(lane, item).await,
            Err(error) if blame.falls(&shared, lane.consumer, error.may_be_its_own()).await => {
                unspent = false;
                failure = Some(HandlerError::retryable(error));
            }
            Err(away) => {
                if leave(lane, &item, &away, unspent).await {
                    return;
                }
            }
        }
    }
}

/// Notes what a try said that is counted.
async fn note<S: Store>(lane: &Lane<S>, item: &Item, error: &HandlerError) {
    let noted = lane.shared.store.failed_attempt(lane.consumer, item.message.id, error.message(), false).await;
    if let Err(away) = noted {
        tracing::debug!(error = %away, "the text of a failure was not stored");
    }
}

/// Counts a try, of a failure after the fact. Where the answer was lost, the try may be counted: that is found out before it is
/// counted again, so that a database that goes away burns none (G10). None where the message is left for later.
async fn count<S: Store>(lane: &mut Lane<S>, item: &Item, failure: Option<&HandlerError>, counted: u32) -> Option<u32> {
    let mut in_doubt = false;
    loop {
        let (store, consumer, id) = (&lane.shared.store, lane.consumer, item.message.id);
        let tries = async {
            if in_doubt
                && let Some((_, stored)) = store.attempts(consumer, &[id]).await?.first().filter(|(_, n)| *n > counted)
            {
                return Ok(*stored);
            }
            match failure {
                Some(error) => store.failed_attempt(consumer, id, error.message(), true).await,
                None => store.begin_attempt(consumer, id).await,
            }
        };
        match tries.await {
            Ok(tries) => return Some(tries),
            Err(away) if leave(lane, item, &away, false).await => return None,
            Err(_) => in_doubt = true,
        }
    }
}

fn dies<S: Store>(lane: &Lane<S>, death: Death) -> ParkAs {
    ParkAs::Dead { reason: death.reason().to_owned(), holds: lane.shared.options.holds() }
}

/// Waits for a database that is away; true where the stop or a revocation came, and the message is left for later.
async fn leave<S: Store>(lane: &mut Lane<S>, item: &Item, away: &StoreError, unspent: bool) -> bool {
    lane.wait_out(away).await;
    let leaves = lane.stop.is_cancelled() || item.source.is_revoked();
    if leaves {
        leave_for_later(lane, item, unspent).await;
    }
    leaves
}

async fn leave_for_later<S: Store>(lane: &Lane<S>, item: &Item, unspent: bool) {
    if unspent {
        let taken_back = lane.shared.store.take_back_attempt(lane.consumer, item.message.id);
        match tokio::time::timeout(TAKE_BACK, taken_back).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::warn!(id = %item.message.id, sent_id = %item.message.id_text, %error, "a try that was not made stays counted");
            }
            Err(_) => {
                tracing::warn!(id = %item.message.id, sent_id = %item.message.id_text, "a try that was not made stays counted")
            }
        }
    }
    lane.report(item, false);
}
