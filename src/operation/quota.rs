//! Limits how many bytes of answers a tenant may have stored; asks the store from time to time.
//!
//! Promises: for each tenant, the store is asked at most once in [`EVERY`], by one request at a
//! time, and for at most a twentieth of the time; after a query that failed, the next request asks.
//! The number of tenants that are remembered is bounded. Between two queries a tenant can exceed
//! its quota by what it stores meanwhile.
//!
//! Cancel safety: if a request is dropped while it asks, the next request may ask.

use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::Mutex as Turn;

use crate::error::StoreError;

/// How long the result of a query stays valid, at least.
const EVERY: Duration = Duration::from_secs(5);
/// The result of a slow query stays valid for this many times its duration: such queries take at
/// most a twentieth of the time.
const PAUSE: u32 = 19;
const TENANTS_MAX: usize = 4_096;

#[derive(Debug)]
pub(super) struct StoredQuota {
    bytes_max: u64,
    every: Duration,
    tenants: Mutex<HashMap<String, Arc<Tenant>>>,
}

#[derive(Debug, Default)]
struct Tenant {
    known: Mutex<Option<Known>>,
    /// The request that asks the store holds this lock.
    turn: Turn<()>,
}

#[derive(Debug, Clone, Copy)]
struct Known {
    bytes: u64,
    until: Instant,
}

impl StoredQuota {
    pub(super) fn new(bytes_max: u64) -> Self {
        Self { bytes_max, every: EVERY, tenants: Mutex::default() }
    }

    /// Whether a tenant has reached the limit, by the last result of `ask`.
    pub(super) async fn is_reached<F>(&self, tenant: &str, ask: impl FnOnce() -> F) -> Result<bool, StoreError>
    where
        F: Future<Output = Result<u64, StoreError>>,
    {
        Ok(self.stored(tenant, ask).await? >= self.bytes_max)
    }

    async fn stored<F>(&self, tenant: &str, ask: impl FnOnce() -> F) -> Result<u64, StoreError>
    where
        F: Future<Output = Result<u64, StoreError>>,
    {
        let tenant = self.tenant(tenant);
        let known = tenant.known();
        let _turn = match (known, tenant.turn.try_lock()) {
            (Some(known), _) if Instant::now() < known.until => return Ok(known.bytes),
            (_, Ok(turn)) => turn,
            // Another request asks now: the last result is good enough meanwhile.
            (Some(known), Err(_)) => return Ok(known.bytes),
            (None, Err(_)) => tenant.turn.lock().await,
        };
        // The request that had the turn before may have asked.
        if let Some(known) = tenant.known().filter(|known| Instant::now() < known.until) {
            return Ok(known.bytes);
        }
        let asked = Instant::now();
        let bytes = ask().await?;
        let until = Instant::now() + self.pause(asked.elapsed());
        *tenant.known.lock() = Some(Known { bytes, until });
        Ok(bytes)
    }

    /// How long the result of a query that took this long stays valid.
    fn pause(&self, look: Duration) -> Duration {
        self.every.max(look * PAUSE)
    }

    fn tenant(&self, name: &str) -> Arc<Tenant> {
        let mut tenants = self.tenants.lock();
        if let Some(tenant) = tenants.get(name) {
            return Arc::clone(tenant);
        }
        if tenants.len() >= TENANTS_MAX {
            let now = Instant::now();
            tenants.retain(|_, tenant| tenant.known().is_some_and(|known| now < known.until));
        }
        if tenants.len() >= TENANTS_MAX
            && let Some(any) = tenants.keys().next().cloned()
        {
            tenants.remove(&any);
        }
        Arc::clone(tenants.entry(name.to_owned()).or_default())
    }
}

impl Tenant {
    fn known(&self) -> Option<Known> {
        *self.known.lock()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::atomic::{AtomicU32, Ordering};

    use tokio::sync::Notify;

    use super::*;

    /// A limit of 100 bytes, whose results stay valid until [`forget`].
    fn patient() -> StoredQuota {
        StoredQuota { every: Duration::from_secs(86_400), ..StoredQuota::new(100) }
    }

    fn forget(quota: &StoredQuota, tenant: &str) {
        let tenant = quota.tenant(tenant);
        let known = tenant.known().unwrap();
        *tenant.known.lock() = Some(Known { until: Instant::now(), ..known });
    }

    // Shown by: asking each time; never asking again; one memory for all tenants.
    #[tokio::test]
    async fn a_tenant_is_asked_for_once_until_its_time_is_over() {
        let (quota, asked) = (patient(), AtomicU32::new(0));
        let says = |bytes| {
            asked.fetch_add(1, Ordering::SeqCst);
            async move { Ok(bytes) }
        };
        assert!(!quota.is_reached("t1", || says(99)).await.unwrap());
        assert!(!quota.is_reached("t1", || says(100)).await.unwrap());
        assert!(quota.is_reached("t2", || says(100)).await.unwrap());
        assert_eq!(asked.load(Ordering::SeqCst), 2);
        forget(&quota, "t1");
        assert!(quota.is_reached("t1", || says(100)).await.unwrap());
        assert_eq!(asked.load(Ordering::SeqCst), 3);
    }

    // Shown by: remembering a failure.
    #[tokio::test]
    async fn a_look_that_failed_is_nothing_known() {
        let quota = patient();
        let away = || async { Err(StoreError::Unavailable(sqlx::Error::PoolTimedOut)) };
        quota.is_reached("t1", away).await.unwrap_err();
        assert!(!quota.is_reached("t1", || async { Ok(1) }).await.unwrap());
        forget(&quota, "t1");
        quota.is_reached("t1", away).await.unwrap_err();
    }

    // Shown by: waiting for the request that asks, although a result was known; asking beside it,
    // although none was.
    #[tokio::test]
    async fn one_request_asks_while_others_go_by_what_was_known_or_wait_for_it() {
        let (quota, going) = (Arc::new(patient()), Arc::new(Notify::new()));
        let begun = Arc::new(Notify::new());
        let slow = |bytes| {
            let (quota, going, begun) = (Arc::clone(&quota), Arc::clone(&going), Arc::clone(&begun));
            tokio::spawn(async move {
                let ask = || async move {
                    begun.notify_one();
                    going.notified().await;
                    Ok(bytes)
                };
                quota.is_reached("t1", ask).await.unwrap()
            })
        };
        let first = slow(1);
        begun.notified().await;
        let second = tokio::spawn({
            let quota = Arc::clone(&quota);
            async move { quota.is_reached("t1", || async { panic!("two ask at once") }).await.unwrap() }
        });
        tokio::task::yield_now().await;
        going.notify_one();
        assert!(!first.await.unwrap() && !second.await.unwrap());
        forget(&quota, "t1");
        let third = slow(100);
        begun.notified().await;
        assert!(!quota.is_reached("t1", || async { panic!("two ask at once") }).await.unwrap());
        going.notify_one();
        assert!(third.await.unwrap());
        // A request that is dropped while it asks lets the next one ask.
        forget(&quota, "t1");
        let dropped = slow(100);
        begun.notified().await;
        dropped.abort();
        assert!(dropped.await.unwrap_err().is_cancelled());
        assert!(!quota.is_reached("t1", || async { Ok(1) }).await.unwrap());
    }

    // Shown by: no bound.
    #[tokio::test]
    async fn what_is_remembered_is_bounded() {
        let quota = patient();
        for tenant in 0..TENANTS_MAX + 10 {
            quota.is_reached(&format!("t{tenant}"), || async { Ok(1) }).await.unwrap();
        }
        assert_eq!(quota.tenants.lock().len(), TENANTS_MAX);
    }

    // Shown by: a pause of the same length after a slow query.
    #[test]
    fn a_slow_look_is_made_less_often() {
        let quota = StoredQuota::new(100);
        assert_eq!(quota.pause(Duration::from_millis(20)), EVERY);
        assert_eq!(quota.pause(Duration::from_secs(1)), Duration::from_secs(19));
    }
}
