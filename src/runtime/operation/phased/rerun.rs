//! What follows a later phase that did not move its operation on: it runs again, or an operator has
//! it (O1, O9, R23).
//!
//! Promise: a phase runs again only where it is proven that nothing of its run before was
//! committed: the transaction itself says so, or, where nobody heard how that one ended, its mark
//! is not there.
//!
//! Not here: when it runs again ([`leaving`](super::leaving)), what may run again
//! ([`doubt`](crate::policy::operation::doubt)), and the first phase ([`opening`](super::opening)).

use std::time::Duration;

use super::driver::{Driver, End, Next};
use crate::error::{HandlerError, StoreError};
use crate::observe::Noted;
use crate::policy::operation::doubt::Trace;
use crate::policy::operation::flow::PhaseEnd;
use crate::runtime::pace::Pace;
use crate::store::{PhaseTx, Proof, Run, StoredOperation};

/// Why a phase failed that said it had not.
const SWALLOWED: &str = "the phase swallowed an error by which its transaction was taken back";

/// How often it is looked what became of a commit of this driver's whose answer was lost.
const OWN_COMMIT_EVERY: Duration = Duration::from_millis(100);

impl Driver {
    /// Begins a phase whose code is a handler's, if no run before was committed, or may still be.
    /// As long as the server has one, the operation is looked at now and then, however long that
    /// lasts: nothing counts, and no connection is kept for it.
    pub(super) async fn begin(
        &mut self,
        stored: &StoredOperation,
    ) -> Result<Result<Box<dyn PhaseTx>, Next>, StoreError> {
        let point = stored.point.as_str();
        let run = self.phased.store.begin_run(&self.driven, point).await?;
        let trace = if matches!(run, Run::Begun(_)) { Trace::Unmarked } else { Trace::Marked };
        match run {
            Run::Begun(tx) if trace.may_run_again() => Ok(Ok(tx)),
            // The next look says who has it, and where.
            Run::Overtaken => Ok(Err(Next::Again)),
            // It is this driver's own commit, whose answer was lost, that the server is at: what
            // that intends nobody else may send first.
            Run::Unended if self.fresh.is_some() && !self.hold.left().is_zero() => {
                tokio::time::sleep(OWN_COMMIT_EVERY).await;
                Ok(Err(Next::Again))
            }
            Run::Unended => {
                tracing::warn!(operation = %self.driven.operation_id, point,
                    "the server still has a run of a phase whose connection was lost: the phase waits until that ends");
                Ok(Err(self.release_with_backoff(stored.attempts).await?))
            }
            Run::Begun(_) | Run::Marked => Ok(Err(self.ended_by_itself().await?)),
        }
    }

    /// The transaction of a phase that says it succeeded is not there any more. Where it is proven
    /// that nothing was committed, the phase has failed as any other: it swallowed an error by
    /// which the database took its transaction back (R23).
    pub(super) async fn gone(&mut self, tx: Box<dyn PhaseTx>, proof: Proof) -> Result<Next, StoreError> {
        let trace = match take_back(tx).await {
            Err(error @ StoreError::Busy(_)) => return Err(error),
            Ok(Proof::Aborted) => Trace::Undone,
            // It was aborted before, perhaps before the connection was lost.
            _ if proof == Proof::Aborted => Trace::Undone,
            Ok(Proof::Same | Proof::Ended) | Err(_) => Trace::Ended,
        };
        if !trace.may_run_again() {
            return self.ended_by_itself().await;
        }
        match self.phased.store.operation(self.driven.operation_id).await? {
            Some(stored) => self.phase_failed(&stored, &HandlerError::retryable(SWALLOWED)).await,
            None => Ok(Next::End(End::Lost)),
        }
    }

    /// A phase failed: it is rolled back, if its transaction is still the one that began.
    pub(super) async fn failed(
        &mut self,
        tx: Box<dyn PhaseTx>,
        stored: &StoredOperation,
        error: &HandlerError,
    ) -> Result<Next, StoreError> {
        let trace = match take_back(tx).await? {
            // Aborted: not by us, and nothing stands.
            Proof::Same | Proof::Aborted => Trace::Undone,
            Proof::Ended => Trace::Ended,
        };
        if trace.may_run_again() { self.phase_failed(stored, error).await } else { self.ended_by_itself().await }
    }

    /// What the handler committed by itself is there, and its point was not moved: only a person
    /// can say what it did. It is tried for as long as the lease keeps others away: where the
    /// handler took its mark back, nothing else says that it must not run again.
    async fn ended_by_itself(&mut self) -> Result<Next, StoreError> {
        let operation = self.driven.operation_id;
        tracing::error!(%operation, "a phase ended its transaction by itself");
        self.note(Noted::TransactionEnded);
        let mut pace = Pace::new(Duration::from_millis(20), Duration::from_secs(1));
        loop {
            match self.park_for_operator("phase-ended-its-transaction").await {
                Err(error) if error.is_transient() && !self.hold.left().is_zero() => {
                    tracing::debug!(%operation, %error, "an operation that ended its transaction was not left to an operator yet");
                    tokio::time::sleep(pace.next_wait()).await;
                }
                // Not to be begun again in this drive.
                Err(StoreError::Busy(error)) => return Err(StoreError::Unavailable(error)),
                end => return end,
            }
        }
    }

    /// A phase ended as it cannot here: nothing was committed.
    pub(super) async fn impossible(&mut self, tx: Box<dyn PhaseTx>, end: PhaseEnd) -> Result<Next, StoreError> {
        tx.rollback().await?;
        tracing::error!(operation = %self.driven.operation_id, ?end, "a phase names a point or effect that its flow does not have");
        self.park_for_operator("phase-ended-impossibly").await
    }
}

/// Takes back all that a phase wrote, and says whether its transaction was still the one that
/// began.
pub(super) async fn take_back(mut tx: Box<dyn PhaseTx>) -> Result<Proof, StoreError> {
    let proof = tx.undo_effects().await;
    // A connection that does not answer is closed, and the server rolls back.
    let _ = tx.rollback().await;
    proof
}
