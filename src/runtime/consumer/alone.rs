//! One message alone: after a failed try, or under suspicion. Its tries are counted outside the handler's transaction, before
//! the handler runs, so that a handler that kills the process is counted too (R26).

use super::batch::{self, BatchEnd};
use super::item::Item;
use super::lane::Lane;
use super::settle;
use crate::error::{HandlerError, StoreError};
use crate::observe::{self, Outcome};
use crate::policy::retry::{Death, Decision};
use crate::runtime::pace::sleep_unless;
use crate::store::{ParkAs, Store};

/// Runs it until it is done, waiting, dead, or left for later.
pub(super) async fn run<S: Store>(lane: &mut Lane<S>, item: Item, mut failure: Option<HandlerError>) {
    // The try in the batch already failed: it is counted after the fact, which is enough, for the process lived to say so.
    let mut counted = 0;
    if failure.is_some() {
        let Some(tries) = count(lane, &item, failure.as_ref(), counted).await else { return };
        counted = tries;
    }
    // A try that was counted and then turned out to be nobody's failure is not counted again.
    let mut counted_in_vain = false;
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
                    let park_as =
                        ParkAs::Dead { reason: death.reason().to_owned(), holds: lane.shared.options.holds() };
                    return settle::park(lane, item, park_as, counted, &error).await;
                }
            }
        }
        if item.source.is_revoked() || lane.stop.is_cancelled() {
            return lane.report(&item, false);
        }
        if !counted_in_vain {
            let Some(this) = count(lane, &item, None, counted).await else { return };
            counted = this;
        }
        counted_in_vain = false;
        if !lane.shared.options.retry.allows(counted) {
            let error = HandlerError::retryable(settle::KILLS);
            let reason = Death::Attempts.reason().to_owned();
            let park_as = ParkAs::Dead { reason, holds: lane.shared.options.holds() };
            return settle::park(lane, item, park_as, counted - 1, &error).await;
        }
        let end = {
            let _alone = lane.shared.solo.write().await;
            batch::run(&lane.shared, lane.consumer, std::slice::from_ref(&item), Some(counted)).await
        };
        match end {
            Ok(BatchEnd::Done(outcomes)) => {
                lane.went_well();
                for outcome in outcomes {
                    observe::delivered(&lane.shared.options.name, outcome, 1);
                }
                return lane.report(&item, true);
            }
            Ok(BatchEnd::Failed(_, error)) if error.is_nobodys() => {
                counted_in_vain = true;
                lane.wait_out(&error).await;
            }
            Ok(BatchEnd::Failed(_, error)) => {
                tracing::warn!(consumer = %lane.shared.options.name, id = %item.message.id, attempt = counted, %error, "a handler failed");
                if let Err(away) =
                    lane.shared.store.failed_attempt(lane.consumer, item.message.id, error.message(), false).await
                {
                    tracing::debug!(error = %away, "the text of a failure was not stored");
                }
                failure = Some(error);
            }
            Ok(BatchEnd::Unclear(why)) => failure = Some(HandlerError::retryable(why)),
            Ok(BatchEnd::Ended(_)) => return settle::transaction_ended(lane, item).await,
            Err(away) => {
                counted_in_vain = true;
                if leave(lane, &item, &away).await {
                    return;
                }
            }
        }
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
            Err(away) if leave(lane, item, &away).await => return None,
            Err(_) => in_doubt = true,
        }
    }
}

/// Waits for a database that is away; true where the stop or a revocation came, and the message is left for later.
async fn leave<S: Store>(lane: &mut Lane<S>, item: &Item, away: &StoreError) -> bool {
    lane.wait_out(away).await;
    if lane.stop.is_cancelled() || item.source.is_revoked() {
        lane.report(item, false);
        return true;
    }
    false
}
