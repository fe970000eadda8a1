//! The purge: deletes inbox rows older than the horizon, page by page (R31).
//!
//! Promise: a horizon within which a duplicate can still come is refused at start, as far as the
//! times that it must exceed are known, and later too no purge uses it. A purge makes pauses, so
//! that it does not delay handlers.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::{ConsumerOptions, Shared};
use crate::broker::Broker;
use crate::error::RunError;
use crate::inbox::port::ConsumerId;
use crate::inbox::rules::horizon::{HorizonTooShort, Sources, purge_bound};
use crate::observe;
use crate::store::Duties;
use crate::time::pace::{Pace, in_pages, sleep_unless};

/// The number of rows that one transaction reads.
const PAGE: usize = 1_000;
const BETWEEN: Duration = Duration::from_millis(20);

/// Purges at start and at every interval until the stop. If the inbox forgets nothing, only counted
/// tries of handled messages are removed.
pub(super) async fn run(shared: Arc<Shared>, consumer: ConsumerId, stop: CancellationToken) {
    let mut pace = Pace::new(Duration::from_millis(100), Duration::from_secs(60));
    let name = &shared.options.name;
    while !stop.is_cancelled() {
        let next = match round(&shared, consumer, &stop).await {
            Ok(rows) => {
                pace.worked();
                tracing::debug!(consumer = %name, rows, "purged the inbox");
                shared.options.purge_every
            }
            Err(error) if error.is_away() => {
                tracing::debug!(consumer = %name, %error, "the purge waits");
                pace.next_wait()
            }
            Err(error) => {
                tracing::error!(consumer = %name, %error, "the inbox is not purged");
                shared.options.purge_every
            }
        };
        sleep_unless(&stop, next).await;
    }
}

/// Deletes all rows older than the horizon; returns how many.
async fn round(shared: &Shared, consumer: ConsumerId, stop: &CancellationToken) -> Result<u64, RunError> {
    let forget = || shared.store.forget_attempts(consumer, PAGE);
    in_pages(PAGE as u64, forget, || sleep_unless(stop, BETWEEN)).await?;
    // Checked again: since then, a topic may have been made, or its retention may be longer.
    check(shared, consumer).await?;
    let Some(horizon) = shared.options.horizon else { return Ok(0) };
    let below = purge_bound(horizon, shared.store.bounds(consumer).await?.now);
    let (mut rows, mut after) = (0, None);
    loop {
        let purged = shared.store.purge(consumer, below, after, PAGE).await?;
        observe::purged(&shared.options.name, purged.rows);
        rows += purged.rows;
        after = purged.next;
        if after.is_none() || !sleep_unless(stop, BETWEEN).await {
            return Ok(rows);
        }
    }
}

/// Refuses a horizon within which a duplicate can still come.
pub(super) async fn check(shared: &Shared, consumer: ConsumerId) -> Result<(), RunError> {
    if shared.options.horizon.is_none() {
        return Ok(());
    }
    let skew = shared.store.bounds(consumer).await?.id_skew;
    check_horizon(&*shared.store, &*shared.broker, &shared.options, skew).await
}

/// Like [`check`], also for a consumer that never started. `skew` is that of the database.
pub(super) async fn check_horizon(
    store: &dyn Duties,
    broker: &dyn Broker,
    options: &ConsumerOptions,
    skew: Duration,
) -> Result<(), RunError> {
    let Some(horizon) = options.horizon else { return Ok(()) };
    let sources = Sources {
        skew,
        topic: broker.retention(&options.topics).await?,
        outbox: store.proven_kept().await?,
        waiting: options.retry.longest(),
        dead: options.redrive_age_max,
    };
    let refused = |why: HorizonTooShort| RunError::Horizon { consumer: options.name.clone(), why: why.to_string() };
    sources.check(horizon).map_err(refused)
}
