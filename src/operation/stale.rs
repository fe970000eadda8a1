//! Ends the claims that nobody drives any more: their process died, and their clients do not return
//! (O1, O2, O11).
//!
//! Promises: no handler runs. Each claim is ended by fenced calls, as the turn of a request would
//! end it, so of many sweeps and requests one does it:
//!
//! | mode of the claim | its end |
//! |---|---|
//! | `edge` | the route is asked, where it reconciles; otherwise UNKNOWN |
//! | `bridged` | nothing happened: the key is free |
//! | `same_tx` | UNKNOWN, with the alarm: a handler ended its transaction |
//!
//! A run of this process is left alone, and so is a claim whose lease ended less than half its
//! length ago: where the store was away, the heartbeats of its process may come again.
//!
//! Not here: operations in phases, which their workers take up, and what a request gets
//! ([`Front`](super::Front)).

use std::future::ready;
use std::time::Duration;

use futures::{StreamExt, stream};
use tokio::time::Instant;

use super::endpoint::Registered;
use super::engine::Core;
use super::reconcile;
use crate::error::StoreError;
use crate::observe::{self, Noted};
use crate::operation::port::{Basis, Claimed, Fenced};
use crate::operation::rules::{Mode, Record};

/// How many claims of a route are reconciled at once.
const AT_ONCE: usize = 8;
/// How long one sweep begins reconciliations of a route. The next sweep continues, so a route that
/// answers slowly does not hold a sweep up for long.
const BEGINS_FOR: Duration = Duration::from_secs(10);

/// Ends at most `limit` such claims of an operation. A record that somebody has locked for long
/// does not hold the others up.
///
/// # Errors
/// The first error of the store, after all others were ended; at once where the store is away.
pub(super) async fn end(engine: &Core, endpoint: &Registered, limit: u32) -> Result<(), StoreError> {
    let (mut asked, mut all) = (Vec::new(), Ok(()));
    for record in engine.store().stale(endpoint.operation(), limit).await? {
        // After an outage a heartbeat of this process may come later than this sweep.
        if engine.running().get(&record.identity.digest()).is_some() {
            continue;
        }
        let ended = match record.mode {
            Mode::Edge if endpoint.route().reconciles => {
                asked.push(record);
                continue;
            }
            Mode::Edge | Mode::Transactional => mark_unknown(engine, endpoint, &record).await,
            Mode::Bridged => free(engine, endpoint, &record).await,
            // The store returns none of these.
            Mode::Phased => continue,
        };
        if let Err(error) = &ended {
            let key = record.identity.key().short_hash();
            tracing::warn!(operation = %endpoint.operation(), key, %error, "a claim that nobody drives any more could not be ended");
        }
        if let Err(StoreError::Unavailable(_)) = ended {
            return ended;
        }
        all = all.and(ended);
    }
    let until = Instant::now() + BEGINS_FOR;
    let asks = stream::iter(asked).take_while(|_| ready(Instant::now() < until));
    asks.for_each_concurrent(AT_ONCE, |record| async move {
        let asking = reconcile::wake(engine, endpoint, &record);
        if let Some(Err(error)) = futures::future::OptionFuture::from(asking).await {
            tracing::error!(operation = %endpoint.operation(), %error, "a reconciliation died: its lease runs out");
        }
    })
    .await;
    all
}

async fn mark_unknown(engine: &Core, endpoint: &Registered, record: &Record) -> Result<(), StoreError> {
    if engine.store().mark_unknown(record).await? == Fenced::LostOwnership {
        return Ok(());
    }
    let (operation, key) = (endpoint.operation().as_str(), record.identity.key().short_hash());
    if record.mode == Mode::Transactional {
        observe::noted(operation, &key, Noted::TransactionEnded);
    }
    tracing::warn!(operation, key, mode = %record.mode, "nobody drives a claim any more: its outcome is unknown");
    Ok(())
}

/// Deletes a claim whose effects would have been committed together with its outcome (O2). The
/// former owner is fenced out before, because its token is not known here.
async fn free(engine: &Core, endpoint: &Registered, record: &Record) -> Result<(), StoreError> {
    let claim = reconcile::claim_of(endpoint, record);
    let Claimed::Owned(owned) = engine.store().claim(&claim, Basis::TakeOver(record)).await? else { return Ok(()) };
    if engine.store().release(&owned).await? == Fenced::Done {
        let (operation, key) = (endpoint.operation(), record.identity.key().short_hash());
        tracing::info!(%operation, key, "nobody drives a bridged claim any more, and nothing happened: its key is free");
        return Ok(());
    }
    // A run that lost its lease has said how it ended, so its key is not freed.
    let outcome = reconcile::ended(engine, endpoint, record).await?;
    engine.store().finish(&owned, &outcome, &endpoint.route().retention).await.map(drop)
}
