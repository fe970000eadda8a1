//! What must come to stand after all, once its request has its answer: that a run is unknown which
//! ended its transaction by itself.
//!
//! Promises: it is tried on until it stands or the time is over, which is said in the log; a drain
//! of the engine waits for it. As long as it is tried, whoever comes with the key to this process
//! is told that it runs.
//!
//! What is left: another process that is asked before it stands, and this one when the time is
//! over, execute again.
//!
//! Not here: what is to stand, and whether ([`transactional`](super::transactional),
//! [`phased::opening`](super::phased)).

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::BoxFuture;

use super::engine::Core;
use super::front::Begin;
use crate::error::StoreError;
use crate::store::Basis;

/// How long it is tried where the store does not answer, and how often.
const TRIED_FOR: Duration = Duration::from_secs(60);
const AGAIN: Duration = Duration::from_millis(250);

/// Makes something stand on what the claim was to stand on.
pub(super) type Stand<S, T> = for<'a> fn(&'a S, &'a T, Basis<'a>, Duration) -> BoxFuture<'a, Result<(), StoreError>>;

/// Tries on behind the answer: a retry that runs before it stands would be a second effect (O1).
pub(super) fn mark_unknown_later<S: Send + Sync + ?Sized + 'static, T: Send + Sync + 'static>(
    engine: &Core,
    store: Arc<S>,
    begin: &Begin,
    what: T,
    patience: Duration,
    stand: Stand<S, T>,
) {
    let (engine, ground, operation) = (engine.clone(), begin.ground(), begin.claim.operation_id);
    let place = begin.place();
    let until = Instant::now() + TRIED_FOR;
    engine.clone().spawn(async move {
        while Instant::now() < until {
            tokio::time::sleep(AGAIN).await;
            match stand(&store, &what, ground.basis(), patience).await {
                Ok(()) => return,
                Err(error) => {
                    tracing::debug!(%operation, %error, "an operation that ended its transaction does not stand yet")
                }
            }
        }
        tracing::error!(%operation, "an operation that ended its transaction was never made to stand as unknown");
        drop(place);
    });
}
