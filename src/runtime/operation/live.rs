//! What this process says of the fingerprints that it reads and writes (O21).
//!
//! Promise: nothing waits for it and nothing fails by it; it is said at most once in [`SAID_EVERY`], and again where an operation came.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::Instant;

use uuid::Uuid;

use crate::policy::operation::versions::{SAID_EVERY, Versions};
use crate::store::Keys;

/// Who this process is, and when it last said what it reads.
#[derive(Debug)]
pub(super) struct Live {
    process: Uuid,
    said: Mutex<Option<(Instant, usize)>>,
}

impl Live {
    pub(super) fn new() -> Self {
        Self { process: Uuid::now_v7(), said: Mutex::new(None) }
    }

    /// Says it, where its time has come.
    pub(super) async fn announce(&self, store: &impl Keys, versions: &[Versions]) {
        if !self.is_due(versions.len()) {
            return;
        }
        if let Err(error) = store.announce(self.process, versions).await {
            tracing::warn!(%error, "which fingerprints this process reads could not be written down: `oncebox doctor` does not see it");
        }
    }

    fn is_due(&self, operations: usize) -> bool {
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if said.is_some_and(|(at, of)| of == operations && now < at + SAID_EVERY) {
            return false;
        }
        *said = Some((now, operations));
        true
    }
}
