//! A message that is not handled now is stored: waiting with a due time, behind its key, or dead. Its inbox row is inserted in
//! the same transaction (R24), so that a redelivery finds it known.

use super::batch::roll_back;
use super::item::Item;
use super::lane::Lane;
use crate::error::{HandlerError, StoreError};
use crate::observe::{self, Outcome};
use crate::store::{InboxEntry, InboxTx, ParkAs, Parked, Store};

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
        let admission = tx.admit(&[InboxEntry { id: item.message.id, hash: item.hash }]).await?;
        if admission.known.first().is_some_and(Option::is_some) {
            return Ok(false);
        }
        let mut parked = parked.clone();
        if let (Some(lane), ParkAs::Due(_)) = (item.message.lane_id(), &parked.park_as)
            && !tx.blocked(&[lane]).await?.is_empty()
        {
            // An older message of its key came to wait in the meantime: it is the head, this one stands behind it.
            parked.park_as = ParkAs::Behind;
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
                if lane.stop.is_cancelled() && lane.pace.failures() > 5 {
                    return lane.report(&item, false);
                }
            }
        }
    }
}
