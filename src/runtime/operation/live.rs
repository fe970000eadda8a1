//! What this process says of the fingerprints that it reads and writes (O21).
//!
//! Promise: nothing waits for it longer than a second, and nothing fails by it; it is said once in
//! [`SAID_EVERY`], again where an operation came, and tried again at the next turn where it failed.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use uuid::Uuid;

use crate::policy::operation::versions::{SAID_EVERY, Versions};
use crate::store::Keys;

/// How long it may take to say it.
const AT_MOST: Duration = Duration::from_secs(1);

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
    pub(super) async fn announce(&self, store: &dyn Keys, versions: &[Versions]) {
        if !self.is_due(versions.len()) {
            return;
        }
        // Whoever asks for gauges, or whether the service is ready, waits for no lock and no
        // connection because of this.
        let failed = match tokio::time::timeout(AT_MOST, store.announce(self.process, versions)).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("not done within {AT_MOST:?}"),
        };
        *self.said.lock().unwrap_or_else(PoisonError::into_inner) = None;
        tracing::warn!(
            error = failed,
            "which fingerprints this process reads could not be written down: `oncebox doctor` may not see it"
        );
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
