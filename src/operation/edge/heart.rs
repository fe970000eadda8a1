//! Extends the lease of an edge claim while its handler lives, and while its outcome is written
//! (O12).
//!
//! Promise: a lost lease is counted in metrics; it never ends the handler.

use std::time::Duration;

use tokio_util::sync::{CancellationToken, DropGuard};

use crate::observe::{self, Noted};
use crate::operation::front::Front;
use crate::operation::port::{Fenced, Owned};
use crate::time::lease::Lease;
use crate::time::pace::sleep_unless;

/// Renews the lease until the result is dropped, the lease is lost, or the outcome is written.
///
/// Whoever writes the outcome cancels `stop`: the outcome ends the claim, and the next heartbeat
/// would count the ended claim as a lost lease.
pub(super) fn renew(front: &Front, owned: Owned, stop: CancellationToken) -> DropGuard {
    let (engine, lease) = (front.engine.clone(), front.endpoint.route().lease);
    let (operation, key) = (front.endpoint.operation().clone(), front.short_key());
    let stopped = stop.clone();
    engine.clone().spawn(async move {
        let beats = Lease::renewed_after(lease);
        let mut pause = beats;
        while sleep_unless(&stopped, pause).await {
            match engine.store().heartbeat(&owned, lease).await {
                Ok(Fenced::Done) => pause = beats,
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
    stop.drop_guard()
}
