//! A message that is not handled now is stored: waiting with a due time, behind its key, or dead. Its inbox row is inserted in
//! the same transaction (R24), so that a redelivery finds it known.

use super::admission::{Fate, admit};
use super::batch::roll_back;
use super::item::Item;
use super::lane::Lane;
use crate::error::{HandlerError, StoreError};
use crate::observe::{self, Outcome};
use crate::policy::retry::{Asked, Decision, RetryPolicy};
use crate::store::{InboxTx, ParkAs, Parked, Store};

/// What is said of a message whose tries were counted and never came to an end.
pub(super) const KILLS: &str = "every try ended with the process: the handler kills it";

/// What follows a failed try, `counted` being its number.
pub(super) fn decide(retry: &RetryPolicy, error: &HandlerError, counted: u32) -> Decision {
    let asked = match error.after() {
        _ if error.is_terminal() => Asked::NoRetry,
        Some(after) => Asked::After(after),
        None => Asked::Nothing,
    };
    retry.next(counted, asked, fastrand::f64())
}

/// A message as it is stored when it is dead before any try.
pub(super) fn dead(item: &Item, reason: &str, error: &str, holds: bool) -> Parked {
    let park_as = ParkAs::Dead { reason: reason.to_owned(), holds };
    Parked { message: item.message.clone(), park_as, attempts: 0, error: Some(error.to_owned()) }
}

/// The id of another message: an alarm (G7). A verdict holds nothing.
pub(super) fn id_reused(consumer: &str, item: &Item) -> Parked {
    tracing::error!(consumer, id = %item.message.id, id_text = %item.message.id_text, place = %item.message.coordinates, "the same message id with different content");
    dead(item, "id-reused", "the same id stands in the inbox with different content", false)
}

/// Too old, or from the future (R31). A verdict holds nothing.
pub(super) fn out_of_time(consumer: &str, item: &Item, reason: &str) -> Parked {
    tracing::error!(consumer, id = %item.message.id, topic = %item.message.topic, reason, "a message is dead");
    let why = "what could tell whether it was handled is not there any more, or will not be for long; redrive it if it was not";
    dead(item, reason, why, false)
}

/// Stores the message until it works, then reports it as committed.
pub(super) async fn park<S: Store>(lane: &mut Lane<S>, item: Item, park_as: ParkAs, tries: u32, error: &HandlerError) {
    let outcome = if matches!(park_as, ParkAs::Dead { .. }) { Outcome::Dead } else { Outcome::Retried };
    match &park_as {
        ParkAs::Dead { reason, holds } => {
            tracing::error!(consumer = %lane.shared.options.name, id = %item.message.id, topic = %item.message.topic, tries, reason, holds, %error, "a message is dead");
        }
        _ => {
            tracing::warn!(consumer = %lane.shared.options.name, id = %item.message.id, tries, %error, "a message waits for a retry");
        }
    }
    let parked =
        Parked { message: item.message.clone(), park_as, attempts: tries, error: Some(error.message().to_owned()) };
    loop {
        match store(lane, &item, &parked).await {
            Ok(stored) => {
                lane.went_well();
                let outcome = if stored { outcome } else { Outcome::Duplicate };
                observe::delivered(&lane.shared.options.name, outcome, 1);
                lane.shared.parked.notify_one();
                return lane.report(&item, true);
            }
            Err(away) => {
                lane.wait_out(&away).await;
                if lane.stop.is_cancelled() || item.source.is_revoked() {
                    return lane.report(&item, false);
                }
            }
        }
    }
}

/// True where it was stored; false where somebody else was done with it in the meantime.
async fn store<S: Store>(lane: &Lane<S>, item: &Item, parked: &Parked) -> Result<bool, StoreError> {
    let mut tx = lane.shared.store.begin(lane.consumer).await?;
    let body = async {
        let mut parked = parked.clone();
        match admit(&mut tx, std::slice::from_ref(item)).await?.first() {
            None | Some(Fate::Duplicate) => return Ok(false),
            Some(Fate::New) => {}
            // An older message of its key came to wait in the meantime: it is the head, this one stands behind it.
            Some(Fate::Behind) => {
                if matches!(parked.park_as, ParkAs::Due(_)) {
                    parked.park_as = ParkAs::Behind;
                }
            }
            Some(Fate::Mismatch) => parked = id_reused(&lane.shared.options.name, item),
            Some(Fate::OutOfTime(reason)) => parked = out_of_time(&lane.shared.options.name, item, reason),
        }
        tx.park(std::slice::from_ref(&parked)).await?;
        tx.clear_attempts(&[item.message.id]).await?;
        Ok(true)
    }
    .await;
    match body {
        Ok(true) => tx.commit().await.map(|()| true),
        Ok(false) => {
            roll_back(tx).await;
            Ok(false)
        }
        Err(error) => {
            roll_back(tx).await;
            Err(error)
        }
    }
}

/// The handler ended its transaction and so committed the inbox row: dead, loudly, never acknowledged as a duplicate (R23).
pub(super) async fn transaction_ended<S: Store>(lane: &mut Lane<S>, item: Item) {
    const WHY: &str = "the handler ended the transaction it was given; whether its effects are whole is not known";
    tracing::error!(consumer = %lane.shared.options.name, id = %item.message.id, "{WHY}");
    let parked = Parked {
        message: item.message.clone(),
        park_as: ParkAs::Dead { reason: "transaction-ended".to_owned(), holds: lane.shared.options.holds() },
        attempts: 1,
        error: Some(WHY.to_owned()),
    };
    loop {
        let stored = async {
            let mut tx = lane.shared.store.begin(lane.consumer).await?;
            match tx.park(std::slice::from_ref(&parked)).await {
                Ok(()) => tx.commit().await,
                Err(error) => {
                    roll_back(tx).await;
                    Err(error)
                }
            }
        }
        .await;
        match stored {
            Ok(()) => {
                lane.went_well();
                observe::delivered(&lane.shared.options.name, Outcome::Dead, 1);
                return lane.report(&item, true);
            }
            // Even at a stop this is tried on: a redelivery would look like a duplicate and the alarm would be lost.
            Err(away) => {
                lane.wait_out(&away).await;
                if lane.stop.is_cancelled() && lane.fault.times() > 5 {
                    return lane.report(&item, false);
                }
            }
        }
    }
}
