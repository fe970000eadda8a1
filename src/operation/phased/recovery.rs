//! The recovery worker: takes over operations that no process drives, and drives them through the
//! same phases (M80, M83, O22).
//!
//! Promises: one statement takes the lease, so only one of many workers has an operation. A worker
//! takes only the flows and versions of this process, and nothing if the database belongs to
//! another deployment. At a stop it takes nothing more, lets calls in flight end, stores what they
//! proved, releases what it holds, and returns. While the database is away, it tries to store that
//! for [`DriveSettings::shutdown_grace`](crate::operation::DriveSettings::shutdown_grace) at most.
//! It also sets the gauges of what is open and unknown (M103).

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::driver::{Came, Ended};
use super::engine::PhasedEngine;
use super::registry::Phased;
use super::taken::taken;
use crate::error::StoreError;
use crate::observe::{Health, PartState};
use crate::task;
use crate::time::pace::{Pace, rest_after, sleep_unless};
use crate::time::since::Since;

const PART: &str = "recovery";
/// The pause after the worker has seen that the database belongs to another deployment.
const FOREIGN: Duration = Duration::from_secs(30);

/// The shortest pause between two counts of what is open and unknown.
const MEASURED_EVERY: Duration = Duration::from_secs(2);

/// Settings of a recovery worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecoveryOptions {
    /// How many operations are driven at once. Default 8.
    pub concurrency: u32,
    /// How many of these may belong to one tenant, so that a slow tenant does not delay the others
    /// for long. Default 6. A service with one tenant may set the same number as for `concurrency`.
    pub per_tenant: u32,
    /// The pause between two searches when nothing was due. Default 500 ms.
    pub every: Duration,
}

impl Default for RecoveryOptions {
    fn default() -> Self {
        Self { concurrency: 8, per_tenant: 6, every: Duration::from_millis(500) }
    }
}

/// A recovery worker for the operations of one engine.
#[derive(Debug)]
pub struct Recovery {
    phased: Arc<Phased>,
    options: RecoveryOptions,
    health: Health,
    driven_of: DrivenOf,
}

#[derive(Debug, Clone, Default)]
struct DrivenOf(Arc<Mutex<HashMap<Vec<u8>, u32>>>);

impl DrivenOf {
    /// Counts one operation of a tenant until the returned value is dropped.
    fn one(&self, tenant: Vec<u8>) -> One {
        *self.0.lock().entry(tenant.clone()).or_default() += 1;
        One { of: self.clone(), tenant }
    }

    /// Returns the tenants that are at the limit, and how many more operations every other tenant
    /// may have.
    fn full(&self, per_tenant: u32) -> (Vec<Vec<u8>>, u32) {
        let driven = self.0.lock();
        let full = driven.iter().filter(|(_, count)| **count >= per_tenant).map(|(tenant, _)| tenant.clone()).collect();
        let most = driven.values().filter(|count| **count < per_tenant).max().copied().unwrap_or(0);
        (full, per_tenant - most)
    }
}

struct One {
    of: DrivenOf,
    tenant: Vec<u8>,
}

impl Drop for One {
    fn drop(&mut self) {
        let mut driven = self.of.0.lock();
        if let Some(count) = driven.get_mut(&self.tenant) {
            *count -= 1;
            if *count == 0 {
                driven.remove(&self.tenant);
            }
        }
    }
}

impl Recovery {
    /// A worker for the operations of an engine.
    #[must_use]
    pub fn new(engine: &PhasedEngine, options: RecoveryOptions, health: Health) -> Self {
        Self { phased: Arc::clone(&engine.phased), options, health, driven_of: DrivenOf::default() }
    }

    /// Runs until `stop` is cancelled.
    ///
    /// # Errors
    /// None at present: after an error of the database it tries again and reports the error in its
    /// health.
    ///
    /// # Cancel safety
    /// If the future is dropped, the leases expire, and other workers take the operations over.
    pub fn run(self, stop: CancellationToken) -> BoxFuture<'static, Result<(), StoreError>> {
        // Boxed, so that this code is compiled with the library and not again in each program.
        Box::pin(async move {
            tokio::select! {
                worked = self.recover(stop) => worked,
                never = self.measure() => match never {},
            }
        })
    }

    /// Sets the gauges of what is open and unknown from time to time: the process of a worker may
    /// have nothing else that does. They keep their values while the store is away.
    async fn measure(&self) -> Infallible {
        loop {
            let began = Instant::now();
            let measured = self.phased.engine.measure().await;
            if let Err(error) = &measured {
                tracing::debug!(%error, "what is open and unknown could not be counted");
            }
            tokio::time::sleep(rest_after(&measured, began.elapsed(), MEASURED_EVERY)).await;
        }
    }

    async fn recover(&self, stop: CancellationToken) -> Result<(), StoreError> {
        let mut pace = Pace::new(Duration::from_millis(200), Duration::from_secs(5));
        let mut driven: JoinSet<Result<Ended, StoreError>> = JoinSet::new();
        let mut first = 0;
        while !stop.is_cancelled() {
            let round = tokio::select! {
                biased;
                round = self.round(first, &mut driven, &stop) => round,
                // What it may have taken is taken up again when its lease is over.
                () = self.phased.grace_is_over(&stop) => break,
            };
            match round {
                // The database is not ours: the health says so, until it is.
                Ok(None) => pace.worked(),
                Ok(Some(worked)) => {
                    pace.worked();
                    self.health.set(PART, PartState::Ready);
                    self.pause(&mut driven, worked, &stop).await;
                }
                // One row or flow that cannot be read must not stop the others: the next round
                // begins with another flow.
                Err(error) => {
                    if !error.is_transient() {
                        tracing::error!(%error, "due operations were not taken up");
                    }
                    self.health.set(PART, PartState::Waiting(format!("database: {error}")));
                    pace.wait(&stop).await;
                }
            }
            first += 1;
        }
        while let Some(end) = driven.join_next().await {
            note(end);
        }
        Ok(())
    }

    /// Takes up what is due; returns whether anything was. `None`: the database belongs to another
    /// deployment.
    async fn round(
        &self,
        first: usize,
        driven: &mut JoinSet<Result<Ended, StoreError>>,
        stop: &CancellationToken,
    ) -> Result<Option<bool>, StoreError> {
        while let Some(end) = driven.try_join_next() {
            note(end);
        }
        if !self.phased.is_ours().await? {
            self.health.set(PART, PartState::Waiting("this database belongs to another deployment".to_owned()));
            sleep_unless(stop, FOREIGN).await;
            return Ok(None);
        }
        let mut worked = false;
        let mut flows = self.phased.flows();
        let count = flows.len();
        flows.rotate_left(first % count.max(1));
        for (at, (flow, versions, lease)) in flows.into_iter().enumerate() {
            let free = self.options.concurrency.saturating_sub(u32::try_from(driven.len()).unwrap_or(u32::MAX));
            if free == 0 || stop.is_cancelled() {
                break;
            }
            // Each flow gets a share, so that a busy one leaves room for the others. What a flow
            // does not use goes to those after it.
            let share = free.div_ceil(u32::try_from(count - at).unwrap_or(u32::MAX));
            let (full, more) = self.driven_of.full(self.options.per_tenant.max(1));
            let store = &self.phased.store;
            let asked = Since::now();
            for (held, stored) in store.take_due(flow, &versions, share.min(more), lease, &full).await? {
                worked = true;
                let tenant = stored.identity.as_ref().map(|identity| identity.tenant().as_bytes().to_vec());
                let one = self.driven_of.one(tenant.unwrap_or_default());
                tracing::info!(operation = %stored.operation_id, flow, stage = stored.stage.as_str(), "an operation is recovered");
                let (phased, stop) = (Arc::clone(&self.phased), stop.clone());
                driven.spawn(task::boxed(async move {
                    let _one = one;
                    taken(phased, held, stored, (asked, lease), Came::Due, stop).await
                }));
            }
        }
        Ok(Some(worked))
    }

    /// Returns at once if something was due and there is room. Otherwise waits for room, or for the
    /// next search, or until proof made a parked operation due.
    async fn pause(&self, driven: &mut JoinSet<Result<Ended, StoreError>>, worked: bool, stop: &CancellationToken) {
        if worked && driven.len() < self.options.concurrency as usize {
            return;
        }
        let full = driven.len() >= self.options.concurrency as usize;
        tokio::select! {
            () = stop.cancelled() => {}
            Some(end) = driven.join_next(), if full => note(end),
            () = self.phased.wake.notified(), if !full => {}
            () = tokio::time::sleep(self.options.every), if !full => {}
        }
    }
}

fn note(end: Result<Result<Ended, StoreError>, tokio::task::JoinError>) {
    match end {
        Ok(Ok(ended)) => tracing::debug!(end = ?ended.end, "a recovery ended"),
        Ok(Err(error)) => tracing::warn!(%error, "a recovery was broken off: the operation is taken up again"),
        Err(error) => tracing::error!(%error, "a recovery died: its lease runs out"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_has_its_share_until_one_of_its_operations_ends() {
        let driven = DrivenOf::default();
        let of = |tenant: &str| driven.one(tenant.into());
        assert_eq!(driven.full(2), (Vec::new(), 2));
        let (first, _second, _other) = (of("a"), of("a"), of("b"));
        assert_eq!(driven.full(2), (vec![b"a".to_vec()], 1), "and b may have one more");
        drop(first);
        assert_eq!(driven.full(2), (Vec::new(), 1));
    }
}
