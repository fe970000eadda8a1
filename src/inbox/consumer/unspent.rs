//! The tries that this process has counted and not made yet.
//!
//! The try of a suspect message is counted before it runs, so that a message that kills its process
//! is found (R26). Where the process lives and the try is not made, the count is taken back. While
//! the database is silent that cannot be done. So the ids are kept here, and the counts are taken
//! back before the consumer subscribes again.
//!
//! Promise: tries add up only where a handler failed or a process ended, however often the database
//! goes away (G10).

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::Shared;
use crate::error::StoreError;
use crate::inbox::port::ConsumerId;
use crate::message::MessageId;

/// The messages of which one try is counted and not made.
#[derive(Debug, Default)]
pub(super) struct Unspent(Mutex<HashSet<MessageId>>);

impl Unspent {
    fn lock(&self) -> MutexGuard<'_, HashSet<MessageId>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Called before the try is counted, because the answer to that may be lost.
    pub(super) fn add(&self, ids: &[MessageId]) {
        self.lock().extend(ids);
    }

    /// The tries were made, or their counts are taken back.
    pub(super) fn remove(&self, ids: &[MessageId]) {
        let mut unspent = self.lock();
        for id in ids {
            unspent.remove(id);
        }
    }
}

impl Shared {
    /// Takes back what lanes that are gone have left counted. Called while no lane runs.
    pub(super) async fn take_back_unspent(&self, consumer: ConsumerId) -> Result<(), StoreError> {
        let ids: Vec<_> = self.unspent.lock().iter().copied().collect();
        if !ids.is_empty() {
            self.store.take_back_attempts(consumer, &ids).await?;
            self.unspent.remove(&ids);
        }
        Ok(())
    }
}
