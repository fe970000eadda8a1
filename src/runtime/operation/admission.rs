//! How many operations run at once that hold a connection from their beginning to their end.
//!
//! Promise: an operation begins when a connection can carry it to its end, and as much of the pool
//! is left as looks, heartbeats and outcomes need. Whoever finds no place waits for one for
//! [`WAIT`] at most; where none has turned for so long, he is refused at once, for those who run
//! are slow.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// How long an operation waits for its place.
const WAIT: Duration = Duration::from_secs(1);

/// The places of an engine.
#[derive(Debug)]
pub(super) struct Admission {
    places: Arc<Semaphore>,
    turns: Arc<Mutex<Instant>>,
}

/// The place of one operation; given back when dropped.
#[derive(Debug)]
pub(super) struct Place {
    turns: Arc<Mutex<Instant>>,
    _permit: OwnedSemaphorePermit,
}

impl Admission {
    /// `connections`: how many the pool has; none: no bound.
    pub(super) fn new(connections: Option<u32>) -> Self {
        let places = connections.map_or(Semaphore::MAX_PERMITS, |connections| places(connections) as usize);
        Self { places: Arc::new(Semaphore::new(places)), turns: Arc::new(Mutex::new(Instant::now())) }
    }

    /// A place, where one is free.
    pub(super) fn at_once(&self) -> Option<Place> {
        let permit = Arc::clone(&self.places).try_acquire_owned().ok()?;
        Some(self.given(permit))
    }

    /// A place; none: answer that there is no room.
    pub(super) async fn place(&self) -> Option<Place> {
        if let Some(place) = self.at_once() {
            return Some(place);
        }
        if turned(&self.turns).elapsed() >= WAIT {
            return None;
        }
        let permit = tokio::time::timeout(WAIT, Arc::clone(&self.places).acquire_owned()).await.ok()?.ok()?;
        Some(self.given(permit))
    }

    fn given(&self, permit: OwnedSemaphorePermit) -> Place {
        *turned(&self.turns) = Instant::now();
        Place { turns: Arc::clone(&self.turns), _permit: permit }
    }
}

/// Of ten connections eight: the others are for what is short. A pool of two has none to spare.
fn places(connections: u32) -> u32 {
    connections.saturating_sub(1 + connections / 10).max(connections.min(2))
}

fn turned(turns: &Mutex<Instant>) -> std::sync::MutexGuard<'_, Instant> {
    turns.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Place {
    fn drop(&mut self) {
        *turned(&self.turns) = Instant::now();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
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
        let admission = Admission::new(Some(1));
        let first = admission.place().await.unwrap();
        let (second, ()) = tokio::join!(admission.place(), async move { drop(first) });
        let second = second.unwrap();
        let asked = Instant::now();
        assert!(admission.place().await.is_none() && asked.elapsed() >= WAIT);
        let asked = Instant::now();
        assert!(admission.place().await.is_none() && asked.elapsed() < WAIT);
        drop(second);
        assert!(admission.place().await.is_some());
    }
}
