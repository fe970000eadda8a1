//! The operations that run in this process: one entry for each key whose operation began here and
//! has not ended. That of a phased operation ends with its first phase, after which duplicates read
//! the record.
//!
//! Promises: an entry answers a duplicate (409, or 422 for another command) without a connection.
//! An entry never decides that something executes (O15, O19). Dropping its holder removes the
//! entry, also after a panic, and wakes all requests that wait for it. The number of requests that
//! wait for a key is bounded.
//!
//! Not here: the runs of other processes, which only the store knows.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use crate::operation::port::KeyClaim;
use crate::operation::rules::{Fingerprint, PrincipalMark};

#[derive(Debug)]
pub(super) struct Run {
    pub(super) principal: PrincipalMark,
    pub(super) fingerprint: Fingerprint,
    pub(super) since: Instant,
    pub(super) ended: CancellationToken,
    /// Cancelled once this is a run or has ended. Before that it is a claim without a read, which
    /// answers no duplicate.
    known: CancellationToken,
}

impl Run {
    /// Waits until the result of a claim without a read is known; such a claim is one statement.
    pub(super) async fn known(&self) {
        self.known.cancelled().await;
    }
}

#[derive(Debug, Default)]
struct Runs {
    by_key: HashMap<[u8; 32], Arc<Run>>,
    by_tenant: HashMap<String, u32>,
    /// How many duplicates wait, by key; also for runs of other processes.
    waiting: HashMap<[u8; 32], u32>,
}

#[derive(Debug, Clone, Default)]
pub(super) struct Running(Arc<Mutex<Runs>>);

#[derive(Debug)]
pub(super) struct Waiting {
    map: Running,
    digest: [u8; 32],
}

#[derive(Debug)]
pub(super) struct Entry {
    map: Running,
    digest: [u8; 32],
    tenant: String,
    run: Arc<Run>,
    left: AtomicBool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NotEntered {
    Runs,
    /// As many runs of the tenant are entered as may be.
    Full,
}

impl Running {
    /// Enters a run; with `tries`, a claim without a read, which may find that there is nothing to
    /// run. `at_most`: how many runs of the tenant there may be, this one included. They are
    /// counted under the lock that the entry is made under, so that requests that come at once do
    /// not all find the same free place.
    pub(super) fn enter(&self, claim: &KeyClaim, tries: bool, at_most: Option<u32>) -> Result<Entry, NotEntered> {
        let identity = &claim.identity;
        let digest = identity.digest();
        let mut runs = self.0.lock();
        if runs.by_key.contains_key(&digest) {
            return Err(NotEntered::Runs);
        }
        let of_tenant = runs.by_tenant.get(identity.tenant()).copied().unwrap_or(0);
        if at_most.is_some_and(|at_most| of_tenant >= at_most) {
            return Err(NotEntered::Full);
        }
        let run = Arc::new(Run {
            principal: claim.principal.clone(),
            fingerprint: claim.fingerprint.clone(),
            since: Instant::now(),
            ended: CancellationToken::new(),
            known: CancellationToken::new(),
        });
        if !tries {
            run.known.cancel();
        }
        runs.by_key.insert(digest, Arc::clone(&run));
        *runs.by_tenant.entry(identity.tenant().to_owned()).or_default() += 1;
        Ok(Entry { map: self.clone(), digest, tenant: identity.tenant().to_owned(), run, left: AtomicBool::new(false) })
    }

    pub(super) fn get(&self, digest: &[u8; 32]) -> Option<Arc<Run>> {
        self.0.lock().by_key.get(digest).cloned()
    }

    /// A place among the requests that wait for a key. `None`: `at_most` requests wait already.
    pub(super) fn wait(&self, digest: [u8; 32], at_most: u32) -> Option<Waiting> {
        let mut runs = self.0.lock();
        let waiting = runs.waiting.get(&digest).copied().unwrap_or(0);
        if waiting >= at_most {
            return None;
        }
        runs.waiting.insert(digest, waiting + 1);
        Some(Waiting { map: self.clone(), digest })
    }

    pub(super) fn of_tenant(&self, tenant: &str) -> u32 {
        self.0.lock().by_tenant.get(tenant).copied().unwrap_or(0)
    }

    pub(super) fn oldest(&self) -> Option<Duration> {
        self.0.lock().by_key.values().map(|run| run.since.elapsed()).max()
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let mut runs = self.map.0.lock();
        match runs.waiting.get_mut(&self.digest) {
            Some(waiting) if *waiting > 1 => *waiting -= 1,
            _ => drop(runs.waiting.remove(&self.digest)),
        }
    }
}

impl Entry {
    pub(super) fn ran(&self) -> Duration {
        self.run.since.elapsed()
    }

    /// Notes that the claim has succeeded: this is a run.
    pub(super) fn runs(&self) {
        self.run.known.cancel();
    }

    /// Removes the entry before the answer is given, so that a client that repeats the request
    /// after the answer is not told that it still runs.
    pub(super) fn leave(&self) {
        if self.left.swap(true, Ordering::Relaxed) {
            return;
        }
        let mut runs = self.map.0.lock();
        runs.by_key.remove(&self.digest);
        if let Some(count) = runs.by_tenant.get_mut(&self.tenant) {
            *count -= 1;
            if *count == 0 {
                runs.by_tenant.remove(&self.tenant);
            }
        }
        drop(runs);
        self.run.ended.cancel();
        self.run.known.cancel();
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.leave();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use uuid::Uuid;

    use super::*;
    use crate::operation::rules::{Identity, Mode};

    fn enter(map: &Running, key: &str, tries: bool, at_most: Option<u32>) -> Result<Entry, NotEntered> {
        let identity = Identity::from_stored(b"t1", b"nothing", key.as_bytes()).unwrap();
        let principal = format!("sha256:{}", "0".repeat(64)).parse().unwrap();
        let fingerprint = format!("1:sha256:{}", "0".repeat(64)).parse().unwrap();
        let (operation_id, owner, lease) = (Uuid::nil(), Uuid::nil(), Duration::ZERO);
        let claim = KeyClaim { identity, principal, fingerprint, mode: Mode::Edge, operation_id, owner, lease };
        map.enter(&claim, tries, at_most)
    }

    // Shown by: an entry that does not count the runs of the tenant.
    #[test]
    fn o29_so_many_runs_of_a_tenant_are_entered_and_a_place_is_free_when_one_ends() {
        let map = Running::default();
        let first = enter(&map, "key-0000000000000001", false, Some(2)).unwrap();
        let _second = enter(&map, "key-0000000000000002", false, Some(2)).unwrap();
        let refused = |key| enter(&map, key, false, Some(2)).unwrap_err();
        assert_eq!(refused("key-0000000000000003"), NotEntered::Full);
        assert_eq!(refused("key-0000000000000001"), NotEntered::Runs, "a duplicate is told of its run");
        first.leave();
        enter(&map, "key-0000000000000003", false, Some(2)).unwrap();
    }

    // Shown by: no bound; a place that its waiter keeps.
    #[test]
    fn m120_so_many_wait_for_a_key_and_a_place_is_free_when_its_waiter_goes() {
        let (map, one, other) = (Running::default(), [1; 32], [2; 32]);
        let first = map.wait(one, 2).unwrap();
        let second = map.wait(one, 2).unwrap();
        assert!(map.wait(one, 2).is_none() && map.wait(other, 2).is_some(), "each key has its own places");
        drop(first);
        let third = map.wait(one, 2).unwrap();
        assert!(map.wait(one, 2).is_none());
        drop((second, third));
        assert!(map.0.lock().waiting.is_empty());
    }

    // Shown by: a claim without a read that answers as a run does; one whose end wakes no request.
    #[tokio::test]
    async fn o15_who_meets_a_claim_without_a_look_waits_for_what_comes_of_it() {
        let map = Running::default();
        for runs in [true, false] {
            let entry = enter(&map, "key-0000000000000001", true, None).unwrap();
            let met = map.get(&entry.digest).unwrap();
            let mut known = std::pin::pin!(met.known());
            assert!(futures_util::poll!(known.as_mut()).is_pending());
            if runs {
                entry.runs();
            } else {
                entry.leave();
            }
            known.await;
            assert_eq!(met.ended.is_cancelled(), !runs);
        }
    }

    // Shown by: not removing the tenant's count; entering over a run that is there.
    #[test]
    fn o15_a_key_runs_once_and_its_entry_goes_with_its_holder() {
        let map = Running::default();
        let enter = |key| enter(&map, key, false, None).ok();
        let first = enter("key-0000000000000001").unwrap();
        assert!(enter("key-0000000000000001").is_none());
        let second = enter("key-0000000000000002").unwrap();
        assert_eq!((map.of_tenant("t1"), map.of_tenant("t2")), (2, 0));
        let ended = first.run.ended.clone();
        // The second call has no effect, not even on a new entry of the same key.
        first.leave();
        let again = enter("key-0000000000000001").unwrap();
        drop(first);
        assert!(enter("key-0000000000000001").is_none());
        drop((again, second));
        assert!(ended.is_cancelled());
        assert_eq!((map.of_tenant("t1"), map.oldest()), (0, None));
        assert!(enter("key-0000000000000001").is_some());
    }
}
