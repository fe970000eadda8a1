//! Limits how many operations run at once that hold a connection: from beginning to end, or, in
//! phases, until the first phase is opened.
//!
//! Promises:
//!
//! * An operation begins only when a connection can carry it. Part of the pool stays free for
//!   reads, heartbeats and outcomes, unless it has two connections or fewer. A request that finds
//!   no free place waits for one for at most [`WAIT`]. If no place was given or returned for that
//!   long, it is refused at once, because the operations that run are slow.
//! * In an engine with several operations that need places, one operation cannot take all places: a
//!   quarter stays for the others, where there are more than two.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::operation::rules::OperationName;

/// How long an operation waits for its place, and how long no place may change hands before new
/// requests are refused at once.
const WAIT: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Admission {
    all: Places,
    count: Option<u32>,
    shares: Mutex<HashMap<OperationName, Places>>,
}

/// A number of places, and the time at which one was last given or returned.
#[derive(Debug, Clone)]
struct Places {
    free: Arc<Semaphore>,
    turns: Arc<Mutex<Instant>>,
}

/// The place of one operation. Dropping it returns the place.
#[derive(Debug)]
pub(super) struct Place {
    _of_share: Option<Held>,
    _of_all: Held,
}

#[derive(Debug)]
struct Held {
    turns: Arc<Mutex<Instant>>,
    _permit: OwnedSemaphorePermit,
}

impl Admission {
    /// `connections`: the size of the pool; `None` means no limit.
    pub(super) fn new(connections: Option<u32>) -> Self {
        let count = connections.map(places);
        let all = Places::new(count.map_or(Semaphore::MAX_PERMITS, |count| count as usize));
        Self { all, count, shares: Mutex::default() }
    }

    /// Gives an operation its share. The second operation reduces the share of the first one.
    pub(super) fn shared_by(&self, operation: &OperationName) {
        let Some(count) = self.count else { return };
        let mut shares = self.shares.lock();
        if shares.contains_key(operation) {
            return;
        }
        let left = left_to_others(count);
        let share = if shares.is_empty() { count } else { count - left };
        // The first one gets a new share too: places in use cannot be taken from its old one.
        if shares.len() == 1 {
            shares.values_mut().for_each(|first| *first = Places::new(share as usize));
        }
        shares.insert(operation.clone(), Places::new(share as usize));
    }

    fn share(&self, operation: &OperationName) -> Option<Places> {
        self.shares.lock().get(operation).cloned()
    }

    pub(super) fn at_once(&self, operation: &OperationName) -> Option<Place> {
        let of_share = match self.share(operation) {
            Some(share) => Some(share.at_once()?),
            None => None,
        };
        Some(Place { _of_share: of_share, _of_all: self.all.at_once()? })
    }

    /// Waits for a place. `None`: the caller answers that there is no room.
    pub(super) async fn place(&self, operation: &OperationName) -> Option<Place> {
        let until = Instant::now() + WAIT;
        let of_share = match self.share(operation) {
            Some(share) => Some(share.place(until).await?),
            None => None,
        };
        Some(Place { _of_share: of_share, _of_all: self.all.place(until).await? })
    }
}

impl Places {
    fn new(count: usize) -> Self {
        Self { free: Arc::new(Semaphore::new(count)), turns: Arc::new(Mutex::new(Instant::now())) }
    }

    fn at_once(&self) -> Option<Held> {
        let permit = Arc::clone(&self.free).try_acquire_owned().ok()?;
        Some(self.given(permit))
    }

    async fn place(&self, until: Instant) -> Option<Held> {
        if let Some(held) = self.at_once() {
            return Some(held);
        }
        if self.turns.lock().elapsed() >= WAIT {
            return None;
        }
        let wait = tokio::time::timeout_at(until.into(), Arc::clone(&self.free).acquire_owned());
        Some(self.given(wait.await.ok()?.ok()?))
    }

    fn given(&self, permit: OwnedSemaphorePermit) -> Held {
        *self.turns.lock() = Instant::now();
        Held { turns: Arc::clone(&self.turns), _permit: permit }
    }
}

/// How many of a pool's connections operations may hold: all but one and a tenth (8 of 10, 89 of
/// 100). The others serve short statements. A pool of two has none to spare.
fn places(connections: u32) -> u32 {
    connections.saturating_sub(1 + connections / 10).max(connections.min(2))
}

/// How many places one operation leaves to the others: a quarter; of two places, none.
fn left_to_others(places: u32) -> u32 {
    if places < 3 { 0 } else { (places / 4).max(1) }
}

impl Drop for Held {
    fn drop(&mut self) {
        *self.turns.lock() = Instant::now();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use futures_util::FutureExt;

    use super::*;

    // Shown by: all connections as places; one place at a pool of two, which one slow operation
    // takes.
    #[test]
    fn a_pool_keeps_connections_for_what_is_short() {
        assert_eq!([1, 2, 3, 4, 10, 20, 100].map(places), [1, 2, 2, 3, 8, 17, 89]);
    }

    // Shown by: a place that is not given back; waiting where nothing turns.
    #[tokio::test]
    async fn who_finds_no_place_waits_while_places_turn_and_not_where_none_does() {
        let (admission, one) = (Admission::new(Some(1)), "one".parse().unwrap());
        admission.shared_by(&one);
        let first = admission.place(&one).await.unwrap();
        let (second, ()) = tokio::join!(admission.place(&one), async move { drop(first) });
        let second = second.unwrap();
        let asked = Instant::now();
        assert!(admission.place(&one).await.is_none() && asked.elapsed() >= WAIT);
        assert!(matches!(admission.place(&one).now_or_never(), Some(None)), "it waits though none turns");
        drop(second);
        assert!(admission.place(&one).await.is_some());
    }

    // Shown by: no shares; a share of the first operation that stays as it was, or loses only the
    // places that are free.
    #[tokio::test]
    async fn of_several_operations_none_takes_all_places() {
        let admission = Admission::new(Some(10));
        let [one, two] = ["one", "two"].map(|name| name.parse::<OperationName>().unwrap());
        admission.shared_by(&one);
        let alone: Vec<Place> = std::iter::from_fn(|| admission.at_once(&one)).collect();
        assert_eq!(alone.len(), 8, "alone it has them all");
        admission.shared_by(&two);
        drop(alone);
        let slow: Vec<Place> = std::iter::from_fn(|| admission.at_once(&one)).collect();
        let others: Vec<Place> = std::iter::from_fn(|| admission.at_once(&two)).collect();
        assert_eq!((slow.len(), others.len()), (6, 2));
        drop(slow);
        assert!(admission.at_once(&two).is_some());
        assert_eq!([1, 2, 3, 8, 17].map(left_to_others), [0, 0, 1, 2, 4]);
    }
}
