//! Marks a run that ended its own transaction as unknown, in the background, when that failed
//! during the request.
//!
//! Promises: the write is retried until it succeeds or its time is over, which is logged as an
//! error. A drain of the engine waits for it. While it is retried, other requests for the key in
//! this process are answered that it runs.
//!
//! What remains possible: another process that gets the key before the write succeeds executes it
//! again, and so does this process after the time is over.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::engine::Core;
use super::front::Begin;
use crate::error::StoreError;

/// How long the write is retried, and the pause between two attempts.
const TRIED_FOR: Duration = Duration::from_secs(60);
const AGAIN: Duration = Duration::from_millis(250);

/// Retries `stand` after the request was answered. `stand` writes the row if the record is still as
/// the claim saw it. A retry of the client that runs before that is a second effect (O1).
pub(super) fn mark_unknown_later<F: Future<Output = Result<(), StoreError>> + Send + 'static>(
    engine: &Core,
    begin: &Begin,
    stand: impl Fn() -> F + Send + 'static,
) {
    let (place, operation) = (Arc::clone(&begin.entry), begin.claim.operation_id);
    let until = Instant::now() + TRIED_FOR;
    engine.spawn(async move {
        while Instant::now() < until {
            tokio::time::sleep(AGAIN).await;
            match stand().await {
                Ok(()) => return,
                Err(error) => {
                    tracing::debug!(%operation, %error, "an operation that ended its transaction is not marked as unknown yet")
                }
            }
        }
        tracing::error!(%operation, "an operation that ended its transaction could not be marked as unknown within a minute: the same key may run again");
        drop(place);
    });
}
