//! The memory that bodies in flight may fill, in the whole process (`body_memory_max`, O29).
//!
//! Promise: what is reserved is given back when its holder is dropped; nobody waits for memory, because a queue of requests
//! would hold as much again.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The budget.
#[derive(Debug, Clone)]
pub(super) struct BodyMemory(Arc<Semaphore>);

/// Bytes of the budget; given back when dropped.
#[derive(Debug)]
pub struct BodyPermit {
    _permit: Option<OwnedSemaphorePermit>,
}

impl BodyMemory {
    pub(super) fn new(bytes: usize) -> Self {
        Self(Arc::new(Semaphore::new(bytes.min(Semaphore::MAX_PERMITS))))
    }

    /// Reserves; none where it is full.
    pub(super) fn reserve(&self, bytes: usize) -> Option<BodyPermit> {
        let bytes = u32::try_from(bytes).ok()?;
        let permit = Arc::clone(&self.0).try_acquire_many_owned(bytes).ok()?;
        Some(BodyPermit { _permit: Some(permit) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Shown by: dropping the permit in `reserve`.
    #[test]
    fn o29_bodies_in_flight_are_bounded_and_given_back() {
        let memory = BodyMemory::new(100);
        let first = memory.reserve(60);
        assert!(first.is_some() && memory.reserve(41).is_none());
        assert!(memory.reserve(40).is_some());
        drop(first);
        assert!(memory.reserve(100).is_some() && memory.reserve(101).is_none());
    }
}
