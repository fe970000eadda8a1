//! Extends the lease of an edge claim while its handler lives, and while its outcome is written
//! (O12).
//!
//! Promise: a lost lease is counted in metrics; it never ends the handler.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio_util::sync::{CancellationToken, DropGuard};

use crate::observe::{self, Noted};
use crate::operation::front::Front;
use crate::operation::port::{Fenced, Owned};
use crate::time::lease::Lease;

/// Renews a lease until it is dropped or has lost the lease, or until the outcome is written.
#[derive(Debug)]
pub(super) struct Heart {
    /// The end of the lease, by the local monotonic clock.
    ours_until: Arc<Mutex<Instant>>,
    _stop: DropGuard,
}

impl Heart {
    /// Whoever writes the outcome cancels `stop`: the outcome ends the claim, and the next
    /// heartbeat would count the ended claim as a lost lease.
    pub(super) fn start(front: &Front, owned: Owned, stop: CancellationToken) -> Self {
        let (engine, lease) = (front.engine().clone(), front.endpoint().route().lease);
        let (operation, key) = (front.endpoint().operation().clone(), front.short_key());
        let ours_until = Arc::new(Mutex::new(Instant::now() + lease));
        let (stopped, until) = (stop.clone(), Arc::clone(&ours_until));
        engine.clone().spawn(async move {
            let beats = Lease::renewed_after(lease);
            let mut pause = beats;
            while stopped.run_until_cancelled(tokio::time::sleep(pause)).await.is_some() {
                let asked = Instant::now();
                match engine.store().heartbeat(&owned, lease).await {
                    Ok(Fenced::Done) => {
                        *until.lock().unwrap_or_else(PoisonError::into_inner) = asked + lease;
                        pause = beats;
                    }
                    Ok(Fenced::LostOwnership) => {
                        if !stopped.is_cancelled() {
                            observe::noted(operation.as_str(), &key, Noted::HeartbeatLost);
                        }
                        return;
                    }
                    Err(error) => {
                        tracing::debug!(%operation, key, %error, "a heartbeat failed");
                        pause = (beats / 4).max(Duration::from_millis(20));
                    }
                }
            }
        });
        Self { ours_until, _stop: stop.drop_guard() }
    }

    /// Whether the lease is certainly still held.
    pub(super) fn is_ours(&self) -> bool {
        Instant::now() < *self.ours_until.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
