//! The sweep of an engine: deletes expired data, and ends abandoned claims: their process died, and
//! no client sends the request again. Without the sweep these claims would stay open for ever and
//! count in the quota of their tenant (O11).
//!
//! Guarantees: the sweep never calls a handler. Every write is fenced, so if several sweeps and
//! requests end the same claim, one of them does. The end is what a repeated request would get:
//!
//! | mode of the claim | its end |
//! |---|---|
//! | `edge` | the reconciliation of the route decides, if it has one; otherwise UNKNOWN |
//! | `bridged` | deleted, because nothing took effect; what its run has reported meanwhile is stored |
//! | `same_tx` | UNKNOWN, with an alarm: only a handler that commits by itself leaves such a claim |
//!
//! A claim that runs in this process is left alone. So is one whose lease ended less than half its
//! length ago, which the store does not return: after an outage its process may renew it yet. (A
//! request under the key does not wait so long: it judges the claim as soon as its lease is over.
//! If the run goes on all the same, one of mode `edge` writes its outcome into the UNKNOWN record,
//! and one of mode `bridged` is rolled back.)
//!
//! Where the route can reconcile, a sweep also reconciles records that are UNKNOWN already: those
//! whose outcome could not be found out yet, and those that a handler left unknown. The pauses
//! between these attempts grow.
//!
//! Not here: phased operations, which recovery workers continue, and the answer to a request
//! ([`Front`](super::Front)).

use std::collections::HashSet;
use std::future::ready;
use std::time::Duration;

use futures_util::future::join_all;
use futures_util::{StreamExt, stream};
use tokio::time::{Instant, sleep};

use super::endpoint::Registered;
use super::engine::Core;
use super::reconcile;
use crate::error::StoreError;
use crate::observe::{self, Forgotten, Noted};
use crate::operation::port::{Basis, Fenced};
use crate::operation::rules::{Mode, Record};
use crate::time::pace::in_pages;

const RECONCILED_AT_ONCE: usize = 8;
/// How long one sweep starts reconciliations of a route; the next sweep continues. It waits for
/// those that it has started, each of which takes at most the lease less the completion budget.
const STARTS_FOR: Duration = Duration::from_secs(10);
/// How long one sweep begins further batches of what has expired. With a smaller bound, or one
/// batch a sweep, a busy service would store more than its sweeps delete.
const DELETES_FOR: Duration = Duration::from_secs(10);
/// The pause between two batches, in which requests have their turn.
const BETWEEN: Duration = Duration::from_millis(20);
/// The longest pause between two reconciliations of a record that stays UNKNOWN. The shortest is
/// the lease of the route.
const PAUSE_MAX: Duration = Duration::from_secs(3_600);

impl Core {
    /// Deletes expired bodies, then the expired records of every protected operation, in batches of
    /// about `limit`, each a transaction (M101). It makes batch after batch while they are full,
    /// for at most ten seconds in all; each operation gets one at least. Returns how many it
    /// deleted. Call it regularly, in as many processes as you like.
    ///
    /// It also ends claims whose process died and whose client does not return, at most `limit` of
    /// each operation. After its lease a claim of mode `bridged` is deleted, because without an
    /// outcome nothing took effect (O2); one of mode `edge` is reconciled where its route can, and
    /// otherwise becomes UNKNOWN (O11). A record that stays UNKNOWN is reconciled again where its
    /// route can, after pauses that double from a lease up to an hour. No handler is called.
    ///
    /// # Errors
    /// The error of the store; what was deleted or ended before it stays so.
    pub async fn sweep(&self, limit: u32) -> Result<u64, StoreError> {
        self.announce().await;
        let until = Instant::now() + DELETES_FOR;
        let goes_on = || async move {
            sleep(BETWEEN).await;
            Instant::now() < until
        };
        let expire = || async {
            self.store().expire_bodies(limit).await.inspect(|bodies| observe::forgotten(Forgotten::Bodies, *bodies))
        };
        let (mut forgotten, mut ended) = match in_pages(limit.into(), expire, goes_on).await {
            Err(error @ StoreError::Unavailable(_)) => return Err(error),
            Err(error) => (0, Err(error)),
            Ok(bodies) => (bodies, Ok(())),
        };
        let protected = self.protected();
        let (mut swept, mut asks) = (HashSet::new(), Vec::new());
        for endpoint in protected.iter().filter(|endpoint| swept.insert(endpoint.operation().clone())) {
            let route = endpoint.route();
            let purge = || async {
                let purged =
                    self.store().purge_keys(endpoint.operation(), &route.retention, route.id_skew, limit).await;
                purged.inspect(|keys| observe::forgotten(Forgotten::Keys, *keys))
            };
            let purged = in_pages(limit.into(), purge, goes_on).await;
            if let Err(error @ StoreError::Unavailable(_)) = purged {
                return Err(error);
            }
            // A record that somebody has locked, for example, does not hold up other operations.
            ended = ended.and(purged.map(|keys| forgotten += keys));
            let mut of_route = Vec::new();
            match end(self, endpoint, limit, &mut of_route).await {
                Err(error @ StoreError::Unavailable(_)) => return Err(error),
                other => ended = ended.and(other),
            }
            asks.push(ask(self, endpoint, of_route));
        }
        // Last, and all routes at once: what one of them waits for, a provider that does not answer
        // for example, holds up neither the purge nor the others.
        join_all(asks).await;
        ended.map(|()| forgotten)
    }
}

/// Reads at most `limit` abandoned claims of an operation and ends them. Adds to `asks` those that
/// are to be reconciled, and if the claims were fewer than `limit`, also records that are UNKNOWN,
/// up to that number. Where one claim cannot be ended, for example because its record is locked,
/// the others are ended all the same.
///
/// # Errors
/// The first error of the store, after all claims were tried; at once if the store is away.
async fn end(engine: &Core, endpoint: &Registered, limit: u32, asks: &mut Vec<Record>) -> Result<(), StoreError> {
    let mut all = Ok(());
    let stale = engine.store().stale(endpoint.operation(), limit).await?;
    let room = limit.saturating_sub(u32::try_from(stale.len()).unwrap_or(limit));
    // After an outage the next heartbeat of a run may come later than this sweep.
    let runs_here = |record: &Record| engine.inner.running.get(&record.identity.digest()).is_some();
    for record in stale {
        if runs_here(&record) {
            continue;
        }
        let ended = match record.mode {
            Mode::Edge if endpoint.route().reconciles => {
                asks.push(record);
                continue;
            }
            Mode::Edge | Mode::Transactional => mark_unknown(engine, endpoint, &record).await,
            Mode::Bridged => free(engine, endpoint, &record).await,
            // `stale` returns no phased claim.
            Mode::Phased => continue,
        };
        if let Err(error) = &ended {
            let key = record.identity.short_hash();
            tracing::warn!(operation = %endpoint.operation(), key, %error, "an abandoned claim could not be ended; the next sweep tries again");
        }
        if let Err(StoreError::Unavailable(_)) = ended {
            return ended;
        }
        all = all.and(ended);
    }
    if endpoint.route().reconciles && room > 0 {
        let pauses = (endpoint.route().lease, PAUSE_MAX);
        let due = engine.store().unknown_due(endpoint.operation(), pauses, room).await;
        all = all.and(due.map(|due| asks.extend(due.into_iter().filter(|record| !runs_here(record)))));
    }
    all
}

/// Reconciles these records of an operation. One that fails is only logged: a later sweep starts it
/// again.
async fn ask(engine: &Core, endpoint: &Registered, asks: Vec<Record>) {
    let until = Instant::now() + STARTS_FOR;
    let asks = stream::iter(asks).take_while(|_| ready(Instant::now() < until));
    asks.for_each_concurrent(RECONCILED_AT_ONCE, |record| async move {
        let Some(task) = reconcile::wake(engine, endpoint, &record) else { return };
        if let Err(error) = task.await {
            let key = record.identity.short_hash();
            tracing::error!(operation = %endpoint.operation(), key, %error, "a reconciliation panicked; it is repeated when its lease ends");
        }
    })
    .await;
}

async fn mark_unknown(engine: &Core, endpoint: &Registered, record: &Record) -> Result<(), StoreError> {
    if engine.store().mark_unknown(record).await? == Fenced::LostOwnership {
        return Ok(());
    }
    let (operation, key) = (endpoint.operation().as_str(), record.identity.short_hash());
    if record.mode == Mode::Transactional {
        observe::noted(operation, &key, Noted::TransactionEnded);
    }
    tracing::warn!(operation, key, mode = %record.mode, "an abandoned claim was marked: its outcome is unknown");
    Ok(())
}

/// Deletes a bridged claim. Its effects are committed together with its outcome (O2), so without an
/// outcome nothing took effect. It is taken over first, because only an owner may delete it.
async fn free(engine: &Core, endpoint: &Registered, record: &Record) -> Result<(), StoreError> {
    let claim = reconcile::claim_of(endpoint, record);
    let Some(owned) = engine.store().claim(&claim, Basis::Reconcile(record)).await? else { return Ok(()) };
    if reconcile::free(engine, endpoint, record, &owned).await? {
        let (operation, key) = (endpoint.operation(), record.identity.short_hash());
        tracing::info!(%operation, key, "an abandoned bridged claim was deleted: nothing took effect, and its key is free");
    }
    Ok(())
}
