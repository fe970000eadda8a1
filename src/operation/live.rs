//! Records in the store which fingerprint versions this process reads and writes (O21).
//!
//! Promise: callers wait for it at most a second, and never fail because of it. It is written once
//! in [`SAID_EVERY`], again when an operation was added, and again at the next call after a
//! failure.

use std::time::{Duration, Instant};

use parking_lot::Mutex;
use uuid::Uuid;

use crate::operation::port::Keys;
use crate::operation::rules::versions::{SAID_EVERY, Versions};

const AT_MOST: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Live {
    process: Uuid,
    said: Mutex<Option<(Instant, usize)>>,
}

impl Live {
    pub(super) fn new() -> Self {
        Self { process: Uuid::now_v7(), said: Mutex::new(None) }
    }

    pub(super) async fn announce(&self, store: &dyn Keys, versions: &[Versions]) {
        if !self.is_due(versions.len()) {
            return;
        }
        // A caller that wants gauges or the readiness of the service must not wait for a lock or a
        // connection because of this.
        let failed = match tokio::time::timeout(AT_MOST, store.announce(self.process, versions)).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("not done within {AT_MOST:?}"),
        };
        *self.said.lock() = None;
        tracing::warn!(
            error = failed,
            "which fingerprints this process reads could not be written down: `oncebox doctor` may not see it"
        );
    }

    fn is_due(&self, operations: usize) -> bool {
        let mut said = self.said.lock();
        let now = Instant::now();
        if said.is_some_and(|(at, of)| of == operations && now < at + SAID_EVERY) {
            return false;
        }
        *said = Some((now, operations));
        true
    }
}
