//! Holds an operation: renews its lease while it is driven, and knows the time that is left by the
//! clocks of this process (O5, O9).
//!
//! Promises: the lease is counted from the moment before the statement that granted it was sent, so
//! the time left is never overestimated. A lost lease is a flag: it prevents new work and cancels
//! nothing that runs (O8). No statement is dropped before its answer.
//!
//! Not here: the fence, which is part of every statement.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::operation::port::Fenced;
use crate::operation::port::phases::{Driven, Phases};
use crate::task;
use crate::time::lease::Lease;
use crate::time::pace::sleep_unless;
use crate::time::since::Since;

/// A lease that is renewed until it is lost, the operation is left, or this value is dropped.
#[derive(Debug)]
pub(super) struct Hold {
    shared: Arc<HeldLease>,
    _done: DropGuard,
}

#[derive(Debug)]
struct HeldLease {
    store: Arc<dyn Phases>,
    driven: Driven,
    lease: Duration,
    granted: Mutex<Since>,
    lost: CancellationToken,
    done: CancellationToken,
}

impl Hold {
    /// Holds a lease that a statement sent at `asked` has granted.
    pub(super) fn new(store: Arc<dyn Phases>, driven: Driven, lease: Duration, asked: Since) -> Self {
        let (lost, done) = (CancellationToken::new(), CancellationToken::new());
        let guard = done.clone().drop_guard();
        let shared = Arc::new(HeldLease { store, driven, lease, granted: Mutex::new(asked), lost, done });
        task::spawn(Arc::clone(&shared).renew_until_done());
        Self { shared, _done: guard }
    }

    /// The operation that is held, with the token and epoch of its owner.
    pub(super) fn driven(&self) -> &Driven {
        &self.shared.driven
    }

    /// The time that is left at least; zero if the lease is lost.
    pub(super) fn left(&self) -> Duration {
        if self.is_lost() {
            return Duration::ZERO;
        }
        let granted = *self.shared.granted.lock();
        self.shared.lease.saturating_sub(granted.elapsed())
    }

    pub(super) fn is_lost(&self) -> bool {
        self.shared.lost.is_cancelled()
    }

    pub(super) async fn renew(&self) {
        self.shared.renew().await;
    }

    /// Stops the renewals: the operation was released or has its outcome.
    pub(super) fn drop_lease_watch(&self) {
        self.shared.done.cancel();
    }
}

impl HeldLease {
    async fn renew(&self) {
        let asked = Since::now();
        match self.store.drive_on(&self.driven, self.lease).await {
            Ok(Fenced::Done) => *self.granted.lock() = asked,
            Ok(Fenced::LostOwnership) if self.done.is_cancelled() => {}
            Ok(Fenced::LostOwnership) => {
                tracing::warn!(operation = %self.driven.operation_id, "the lease of an operation was lost");
                self.lost.cancel();
            }
            Err(error) => tracing::warn!(operation = %self.driven.operation_id, %error, "a lease was not renewed"),
        }
    }

    async fn renew_until_done(self: Arc<Self>) {
        while !self.lost.is_cancelled() && sleep_unless(&self.done, Lease::renewed_after(self.lease)).await {
            self.renew().await;
        }
    }
}
