//! How a driver releases its operation: to be continued later, with an unknown outcome, or to an
//! operator. Also what it still does for an operation that it lost (O8, O9, O13).
//!
//! Promises:
//!
//! * An operation with an open effect is parked only in a transaction that finds no proof in the
//!   evidence, unless the operation cannot be driven here or its evidence cannot be read or stored.
//!   A driver that stores proof later unparks it (O8).
//! * An operation that a request took over before it was due keeps its due time, so clients that
//!   ask often do not delay it.

use std::time::Duration;

use super::{Came, Driver, End, Next};
use crate::error::{HandlerError, StoreError};
use crate::operation::phased::effect::Declared;
use crate::operation::phased::evidence;
use crate::operation::port::Fenced;
use crate::operation::port::evidence::StoredEvidence;
use crate::operation::port::phases::{Due, Leave, StoredIntent, StoredOperation};
use crate::operation::rules::provider::Sends;
use crate::time::bound::LONGEST;
use crate::time::pace::Pace;
use crate::time::retry;

impl Driver {
    /// Ends a drive after an error. An error that is not transient counts as an attempt and makes
    /// the operation UNKNOWN after an intent; after the last attempt the operation is parked (O9,
    /// O13).
    pub(super) async fn broken_off(&mut self, error: StoreError) -> Result<End, StoreError> {
        if matches!(error, StoreError::Fenced(_)) {
            return Err(error);
        }
        if error.is_transient() {
            // Best effort: if the release fails, the lease expires.
            let grace_is_over = self.phased.grace_is_over(&self.stop);
            tokio::select! {
                biased;
                _ = self.release(self.pause(0), false) => {}
                () = grace_is_over => {}
            }
            return Err(error);
        }
        tracing::error!(operation = %self.driven.operation_id, %error, "an operation was broken off");
        let end = match self.phased.store.operation(self.driven.operation_id).await {
            Ok(Some(stored)) if stored.attempts >= self.phased.settings.attempts_max => {
                self.drive_failed(&stored).await
            }
            Ok(Some(stored)) if stored.stage.has_intents() => {
                self.release_unknown_outcome(self.pause(stored.attempts), true).await
            }
            Ok(Some(stored)) => self.release(self.pause(stored.attempts), true).await,
            // The operation cannot be read, so it is not known whether it has an intent.
            _ => self.release(self.phased.settings.backoff_max, true).await,
        };
        // The first error says more than the error of the release.
        end.map_err(|_| error)
    }

    async fn drive_failed(&mut self, stored: &StoredOperation) -> Result<End, StoreError> {
        const REASON: &str = "drive-failed";
        let Some((effect, intent)) = self.open_effect(stored) else { return self.park(REASON).await };
        match self.park_unless_proven(&effect, &intent, REASON).await {
            Ok(Next::End(end)) => Ok(end),
            // The next drive settles it.
            Ok(Next::Again) => self.release(Duration::ZERO, false).await,
            // Perhaps the evidence is what cannot be read.
            Err(_) => self.park(REASON).await,
        }
    }

    /// Parks an operation with an open effect, or continues if proof has arrived.
    pub(super) async fn park_unless_proven(
        &mut self,
        effect: &Declared,
        intent: &StoredIntent,
        reason: &str,
    ) -> Result<Next, StoreError> {
        let mut tx = self.phased.store.begin_phase(&self.driven).await?;
        // This locks the row. A driver that stores evidence not seen here waits for the end of this
        // transaction, and then finds the operation parked.
        if tx.park(reason).await? == Fenced::LostOwnership {
            tx.rollback().await?;
            return Ok(Next::End(End::Lost));
        }
        if self.is_proven(effect, intent, &tx.evidence().await?)? {
            tx.rollback().await?;
            return Ok(Next::Again);
        }
        tx.commit().await?;
        self.hold.drop_lease_watch();
        Ok(Next::End(End::Parked))
    }

    /// Unparks the operation if it needs no operator: another driver may have taken it over, found
    /// no proof and parked it before this driver stored its proof (O8). After a stop it tries as
    /// long as the grace lasts.
    pub(super) async fn speak_up(&self) {
        tokio::select! {
            biased;
            () = self.unpark_proven() => {}
            () = self.phased.grace_is_over(&self.stop) => {
                tracing::error!(operation = %self.driven.operation_id,
                    "this process stops, and whether an operation with proof is parked could not be seen: `oncebox operations list --parked` shows it");
            }
        }
    }

    async fn unpark_proven(&self) {
        let mut pace = Pace::new(Duration::from_millis(20), Duration::from_secs(1));
        let operation = self.driven.operation_id;
        loop {
            match self.unpark_if_proven().await {
                Ok(true) => {
                    tracing::warn!(%operation, "proof came of an operation that was left to an operator: it goes on");
                    self.phased.wake.notify_one();
                }
                Ok(false) => {}
                Err(error) if error.is_transient() => {
                    tracing::debug!(%operation, %error, "whether an operation with proof is parked could not be seen");
                    tokio::time::sleep(pace.next_wait()).await;
                    continue;
                }
                Err(error) => tracing::error!(%operation, %error, "proof came of an operation that may be parked"),
            }
            return;
        }
    }

    async fn unpark_if_proven(&self) -> Result<bool, StoreError> {
        let store = &self.phased.store;
        let Some(stored) = store.operation(self.driven.operation_id).await? else { return Ok(false) };
        if stored.epoch == self.driven.epoch {
            return Ok(false);
        }
        let Some((effect, intent)) = self.open_effect(&stored) else { return Ok(false) };
        // `unpark` checks under the lock of the row whether the operation is parked.
        Ok(self.is_proven(&effect, &intent, &stored.evidence)?
            && store.unpark(stored.operation_id).await? == Fenced::Done)
    }

    fn open_effect(&self, stored: &StoredOperation) -> Option<(Declared, StoredIntent)> {
        let effect = self.member.flow.effect_at(&stored.point)?;
        let intent = stored.intents.iter().find(|one| one.intent.effect == effect.name && one.outcome.is_none())?;
        Some((effect.clone(), intent.clone()))
    }

    fn is_proven(&self, effect: &Declared, intent: &StoredIntent, seen: &[StoredEvidence]) -> Result<bool, StoreError> {
        let sends = Sends { first_sent_at: Some(intent.first_sent_at), begun: intent.sends };
        Ok(evidence::evidence(&self.phased.sealer, seen, effect.name)?.settled(sends).is_some())
    }

    /// Handles a phase that failed and was rolled back. After a transient error it runs again at
    /// once, at most [`TRIES`](super::TRIES) times, else later. The operation is parked after a
    /// terminal error, or when its attempts are used up.
    pub(super) async fn phase_failed(
        &mut self,
        stored: &StoredOperation,
        error: &HandlerError,
    ) -> Result<Next, StoreError> {
        let (operation, point) = (self.driven.operation_id, stored.point.as_str());
        tracing::warn!(%operation, point, %error, "a phase failed");
        if error.is_transient() && self.once_more().await {
            return Ok(Next::Again);
        }
        let counts = !error.is_transient();
        if error.terminal || counts && stored.attempts >= self.phased.settings.attempts_max {
            return self.park_for_operator("phase-failed").await;
        }
        let after = error.retry_after.unwrap_or_else(|| self.pause(stored.attempts));
        if stored.stage.has_intents() {
            return Ok(Next::End(self.release_unknown_outcome(after, counts).await?));
        }
        Ok(Next::End(self.release(after, counts).await?))
    }

    pub(super) fn pause(&self, attempts: u32) -> Duration {
        let settings = &self.phased.settings;
        retry::pause(settings.backoff_first, settings.backoff_max, attempts.saturating_add(1), fastrand::f64())
    }

    /// Releases the operation until later, without counting an attempt.
    pub(super) async fn release_with_backoff(&mut self, attempts: u32) -> Result<Next, StoreError> {
        Ok(Next::End(self.release(self.pause(attempts), false).await?))
    }

    /// Parks the operation, whatever the evidence says: it cannot be driven here.
    pub(super) async fn park_for_operator(&mut self, reason: &str) -> Result<Next, StoreError> {
        Ok(Next::End(self.park(reason).await?))
    }

    /// Releases the operation as UNKNOWN. `counts`: as an attempt, if the operation was due.
    pub(super) async fn release_unknown_outcome(&mut self, after: Duration, counts: bool) -> Result<End, StoreError> {
        self.leave(Leave::Doubt(self.due(after, counts))).await
    }

    /// Releases the operation in its stage. `counts` as in [`Self::release_unknown_outcome`].
    pub(super) async fn release(&mut self, after: Duration, counts: bool) -> Result<End, StoreError> {
        self.leave(Leave::HandBack(self.due(after, counts))).await
    }

    pub(super) async fn park(&mut self, reason: &str) -> Result<End, StoreError> {
        self.leave(Leave::Park(reason)).await
    }

    fn due(&self, after: Duration, counts: bool) -> Due {
        // Beyond this a database refuses the release, and the operation keeps its lease.
        let after = after.min(LONGEST);
        Due { after: (self.came != Came::Early).then_some(after), attempt: counts && self.came == Came::Due }
    }

    async fn leave(&mut self, leave: Leave<'_>) -> Result<End, StoreError> {
        self.hold.drop_lease_watch();
        let fenced = self.phased.store.leave(&self.driven, leave).await?;
        Ok(match (fenced, leave) {
            (Fenced::LostOwnership, _) => End::Lost,
            (Fenced::Done, Leave::Park(_)) => End::Parked,
            (Fenced::Done, Leave::HandBack(_) | Leave::Doubt(_)) => End::Later,
        })
    }
}
