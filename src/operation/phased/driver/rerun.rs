//! Handles a later phase that did not advance its operation: the phase runs again, or the operation
//! is parked (O1, O9, R23).
//!
//! Promise: a phase runs again only if it is proven that its earlier run committed nothing: the
//! transaction proves it, or, if the answer of its commit was lost, its mark is not in the
//! database.

use std::time::Duration;

use super::{Driver, End, Next, take_back};
use crate::error::{HandlerError, StoreError};
use crate::inbox::port::Proof;
use crate::observe::Noted;
use crate::operation::port::phases::{PhaseTx, Run, StoredOperation};
use crate::time::pace::Pace;

/// The reason for the failure of a phase that returned a success.
const SWALLOWED: &str = "the phase swallowed an error by which its transaction was taken back";

/// The pause between two checks of this driver's own commit whose answer was lost.
const OWN_COMMIT_EVERY: Duration = Duration::from_millis(100);

impl Driver {
    /// Begins the transaction of a phase, if no earlier run is committed or may still commit. While
    /// the server still has an earlier run, the operation is released with a backoff, however long
    /// that lasts; no attempt counts, and no connection is kept for it.
    pub(super) async fn begin(
        &mut self,
        stored: &StoredOperation,
    ) -> Result<Result<Box<dyn PhaseTx>, Next>, StoreError> {
        let point = stored.point.as_str();
        match self.phased.store.begin_run(&self.driven, point).await? {
            Run::Begun(tx) => Ok(Ok(tx)),
            // The next read shows who has the operation, and at which point.
            Run::Overtaken => Ok(Err(Next::Again)),
            // The server still works on this driver's own commit, whose answer was lost. Nobody
            // else may send first what that commit intends.
            Run::Unended if self.fresh.is_some() && !self.hold.left().is_zero() => {
                tokio::time::sleep(OWN_COMMIT_EVERY).await;
                Ok(Err(Next::Again))
            }
            Run::Unended => {
                tracing::warn!(operation = %self.driven.operation_id, point,
                    "the server still has a run of a phase whose connection was lost: the phase waits until that ends");
                Ok(Err(self.release_with_backoff(stored.attempts).await?))
            }
            Run::Marked => Ok(Err(self.ended_by_itself().await?)),
        }
    }

    /// The transaction of a phase that returned a success is gone. If it is proven that nothing was
    /// committed, the phase failed: it swallowed an error after which the database rolled its
    /// transaction back (R23).
    pub(super) async fn gone(&mut self, tx: Box<dyn PhaseTx>, proof: Proof) -> Result<Next, StoreError> {
        match take_back(tx).await {
            Err(error @ StoreError::Busy(_)) => return Err(error),
            Ok(Proof::Aborted) => {}
            // It was aborted before, perhaps before the connection was lost.
            _ if proof == Proof::Aborted => {}
            Ok(Proof::Same | Proof::Ended) | Err(_) => return self.ended_by_itself().await,
        }
        match self.phased.store.operation(self.driven.operation_id).await? {
            Some(stored) => self.phase_failed(&stored, &HandlerError::retryable(SWALLOWED)).await,
            None => Ok(Next::End(End::Lost)),
        }
    }

    /// Rolls back a phase that failed, if its transaction is still the one that began.
    pub(super) async fn failed(
        &mut self,
        tx: Box<dyn PhaseTx>,
        stored: &StoredOperation,
        error: &HandlerError,
    ) -> Result<Next, StoreError> {
        match take_back(tx).await? {
            // Aborted by the database, not by this driver: nothing was committed.
            Proof::Same | Proof::Aborted => self.phase_failed(stored, error).await,
            Proof::Ended => self.ended_by_itself().await,
        }
    }

    /// Parks an operation whose handler committed by itself without moving the point: only a person
    /// can find out what it did. If the handler rolled its mark back, nothing else tells other
    /// drivers not to run the phase again. So parking is retried, also after the lease, until it is
    /// done or another driver has the operation, and the operation is never released. After a stop
    /// it is tried as long as the grace lasts.
    async fn ended_by_itself(&mut self) -> Result<Next, StoreError> {
        let operation = self.driven.operation_id;
        tracing::error!(%operation, "a phase ended its transaction by itself");
        self.note(Noted::TransactionEnded);
        let grace_is_over = self.phased.grace_is_over(&self.stop);
        tokio::select! {
            biased;
            parked = self.park_patiently("phase-ended-its-transaction") => parked,
            () = grace_is_over => {
                tracing::error!(%operation,
                    "this process stops, and the database is away: an operation that ended its transaction could not be left to an operator, and its phase may run again");
                Ok(Next::End(End::Lost))
            }
        }
    }

    async fn park_patiently(&mut self, reason: &str) -> Result<Next, StoreError> {
        let operation = self.driven.operation_id;
        let mut pace = Pace::new(Duration::from_millis(20), Duration::from_secs(1));
        loop {
            match self.park_for_operator(reason).await {
                Err(error) if !matches!(error, StoreError::Fenced(_)) => {
                    tracing::warn!(%operation, reason, %error, "an operation could not be left to an operator yet");
                    tokio::time::sleep(pace.next_wait()).await;
                }
                end => return end,
            }
        }
    }

    /// A phase names a point or an effect that its flow does not have: rolls back and parks the
    /// operation.
    pub(super) async fn impossible(&mut self, tx: Box<dyn PhaseTx>, what: &str) -> Result<Next, StoreError> {
        tx.rollback().await?;
        tracing::error!(operation = %self.driven.operation_id, what, "a phase names a point or effect that its flow does not have");
        self.park_for_operator("phase-ended-impossibly").await
    }
}
