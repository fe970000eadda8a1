//! The tries that this process has counted and not made yet.
//!
//! The try of a suspect message is counted before it runs, so that a message that kills its process
//! is found (R26). Where the process lives and the try is not made, the count is taken back. While
//! the database is silent that cannot be done. So the ids are kept here, and the counts are taken
//! back before the consumer subscribes again.
//!
//! Promise: tries add up only where a handler failed, a lane panicked or a process ended, however
//! often the database goes away (G10). A count that never arrived, or is taken back already, takes
//! no older one with it.

use std::collections::HashMap;

use parking_lot::Mutex;

use super::Shared;
use crate::error::StoreError;
use crate::inbox::port::ConsumerId;
use crate::message::MessageId;

/// The messages of which one try is counted and not made, each with its count before that.
#[derive(Debug, Default)]
pub(super) struct Unspent(Mutex<HashMap<MessageId, u32>>);

impl Unspent {
    /// Called before the try is counted, because the answer to that may be lost.
    pub(super) fn add(&self, ids: &[MessageId], before: u32) {
        self.0.lock().extend(ids.iter().map(|id| (*id, before)));
    }

    /// The tries were made, or their counts are taken back.
    pub(super) fn remove(&self, ids: &[MessageId]) {
        let mut unspent = self.0.lock();
        for id in ids {
            unspent.remove(id);
        }
    }

    /// Forgets all of them: what was counted stays counted.
    pub(super) fn clear(&self) {
        self.0.lock().clear();
    }
}

impl Shared {
    /// Takes back what lanes that are gone have left counted. Called while no lane runs.
    pub(super) async fn take_back_unspent(&self, consumer: ConsumerId) -> Result<(), StoreError> {
        let unspent = self.unspent.0.lock().clone();
        if unspent.is_empty() {
            return Ok(());
        }
        let ids: Vec<_> = unspent.keys().copied().collect();
        let mut counted = self.store.attempts(consumer, &ids).await?;
        counted.retain(|(id, now)| unspent.get(id).is_some_and(|before| now > before));
        let counted: Vec<_> = counted.into_iter().map(|(id, _)| id).collect();
        self.store.take_back_attempts(consumer, &counted).await?;
        self.unspent.clear();
        Ok(())
    }
}

#[cfg(all(test, feature = "sqlite", feature = "embedded"))]
mod tests {
    #![allow(clippy::unwrap_used)]
    use crate::inbox::consumer::Handlers;
    use crate::inbox::consumer::fixture::{options, parts, two};
    use crate::inbox::port::Inbox;

    /// Each of the messages has killed a process before. Shown by: taking one count of each back.
    #[tokio::test]
    async fn r26_a_count_that_never_arrived_takes_no_older_one_with_it() {
        let parts = parts(options(), Handlers::new()).await;
        let (consumer, shared, store) = (parts.register().await, &parts.shared, &parts.store);
        let ids = two(shared).map(|item| item.message.id);
        store.begin_first_attempts(consumer, &ids).await.unwrap();
        shared.unspent.add(&ids, 1);
        assert_eq!(store.begin_attempt(consumer, ids[0]).await.unwrap(), 2);
        for _ in 0..2 {
            shared.take_back_unspent(consumer).await.unwrap();
            let mut counted = store.attempts(consumer, &ids).await.unwrap();
            counted.sort();
            assert_eq!(counted, ids.map(|id| (id, 1)));
        }
    }
}
