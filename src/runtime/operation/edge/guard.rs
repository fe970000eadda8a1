//! What a handler behind the layer may hold: how far its run came, and the way to commit its
//! outcome with its effects (O2).

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sqlx::Transaction;
use tokio::time::timeout;
use uuid::Uuid;

use crate::error::StoreError;
use crate::policy::operation::classify::Reached;
use crate::policy::operation::{Fingerprint, State};
use crate::runtime::operation::codec::{Kept, SealError, error_code};
use crate::runtime::operation::endpoint::Registered;
use crate::runtime::operation::engine::Engine;
use crate::runtime::operation::reply::Reply;
use crate::store::{self, Base, Bridged, Fenced, KeyClaim, Keys, Operations, Outcome, Owned};

/// How long a commit that was lost sight of is looked for (O29).
const LOOK_FOR: Duration = Duration::from_secs(1);
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// How far a run came (O10). Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Progress(Arc<Far>);

#[derive(Debug, Default)]
struct Far {
    met: AtomicBool,
    started: AtomicBool,
    committed: Mutex<Committed>,
}

#[derive(Debug, Default)]
enum Committed {
    #[default]
    No,
    Undone,
    Unknown,
    Yes(Reply),
}

impl Progress {
    /// A wrapper around the extractor of the body was met: from here on it is known whether the
    /// operation has started.
    pub fn met_extractor(&self) {
        self.0.met.store(true, Ordering::Release);
    }

    /// The request was accepted: the operation's own code begins.
    pub fn started(&self) {
        self.0.started.store(true, Ordering::Release);
    }

    pub(super) fn reached(&self) -> Reached {
        match *self.committed() {
            Committed::Yes(_) => return Reached::Committed,
            Committed::Unknown => return Reached::CommitUnknown,
            Committed::Undone => return Reached::Undone,
            Committed::No => {}
        }
        if self.0.started.load(Ordering::Acquire) {
            Reached::Started
        } else if self.0.met.load(Ordering::Acquire) {
            Reached::NotStarted
        } else {
            Reached::Called
        }
    }

    /// What the guard has stored.
    pub(super) fn stored(&self) -> Option<Reply> {
        match &*self.committed() {
            Committed::Yes(reply) => Some(reply.clone()),
            _ => None,
        }
    }

    fn committed(&self) -> std::sync::MutexGuard<'_, Committed> {
        self.0.committed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The claim of the request that a handler works for.
pub struct Guard<S: Keys> {
    engine: Engine<S>,
    endpoint: Registered,
    fingerprint: Fingerprint,
    owned: Owned,
    progress: Progress,
}

/// Why a guard did not commit.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GuardError {
    /// Another owner may have executed: everything was rolled back.
    #[error("the claim is not this run's any more: everything was rolled back")]
    LostOwnership,
    /// The guard has committed already, or does not know whether it has.
    #[error("the guard has committed before")]
    Again,
    /// The answer could not be sealed: everything was rolled back.
    #[error(transparent)]
    Seal(#[from] SealError),
    /// What the database said. [`StoreError::CommitUnknown`]: the answer is 503, and the retry
    /// finds out.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl<S: Keys> Guard<S> {
    pub(super) fn new(engine: Engine<S>, endpoint: Registered, claim: &KeyClaim, owned: Owned) -> Self {
        let fingerprint = claim.fingerprint.clone();
        Self { engine, endpoint, fingerprint, owned, progress: Progress::default() }
    }

    /// The identity of this run: make downstream identities from it, never from the client's key.
    #[must_use]
    pub fn operation_id(&self) -> Uuid {
        self.owned.operation_id
    }

    /// How far the run came.
    #[must_use]
    pub fn progress(&self) -> &Progress {
        &self.progress
    }
}

impl<S: Operations + Base> Guard<S> {
    /// Writes the outcome into the handler's own transaction and commits both together; gives the
    /// answer back. Statuses below 400 are a success, others a failure that is replayed.
    ///
    /// From here on this answer is the outcome, whatever other layers make of it. A success that is
    /// answered without it is no success: its key becomes UNKNOWN, and the answer is 500
    /// `IDEMPOTENCY_TRANSACTION_ENDED`, because a handler that commits by itself would be executed
    /// again after a kill. So is a failure or a panic before it, unless the handler says by
    /// [`Outcome::Retryable`](crate::policy::operation::Outcome::Retryable) that it has committed
    /// nothing.
    ///
    /// A transaction above READ COMMITTED may be refused by the database here (SQLSTATE 40001,
    /// [`StoreError::Busy`]): where another one stands in its way, and where the lease of the claim
    /// was extended after its first statement, as happens while a handler runs for longer than a
    /// third of its lease. Answered with 503, the same key runs again.
    ///
    /// # Errors
    /// [`GuardError`]; of all but [`StoreError::CommitUnknown`] the transaction was rolled back.
    /// Each of its three steps, a look at the transaction, the outcome and COMMIT, may take the
    /// route's completion budget.
    ///
    /// # Cancel safety
    /// None: a dropped commit has an unknown outcome. The layer does not drop handlers.
    pub async fn commit(&self, mut tx: Transaction<'_, S::Db>, reply: Reply) -> Result<Reply, GuardError> {
        {
            let mut committed = self.progress.committed();
            if !matches!(*committed, Committed::No | Committed::Undone) {
                return Err(GuardError::Again);
            }
            // Until it is known, also where this future is dropped.
            *committed = Committed::Unknown;
        }
        let undone = |error: GuardError| {
            *self.progress.committed() = Committed::Undone;
            Err(error)
        };
        let kept = Kept::Whole(reply.clone());
        let answer = match self.engine.encode(&self.endpoint, &self.owned.identity, &self.fingerprint, &kept) {
            Ok(answer) => answer,
            Err(error) => return undone(error.into()),
        };
        let outcome = if reply.status < 400 {
            Outcome::Completed(answer)
        } else {
            Outcome::FailedReplayable { answer, error_code: error_code(self.endpoint.endpoint(), &reply) }
        };
        let route = self.endpoint.route();
        // A savepoint stands only inside a transaction: one that a swallowed deadlock or a raw
        // ROLLBACK has ended would store the outcome by itself, without the effects (O2, R23). A
        // raw COMMIT ends it too, so nothing is known of the effects then.
        match timeout(route.completion_budget, tx.stands()).await {
            Ok(Ok(())) => {}
            Ok(Err(error @ StoreError::Fenced(_))) => {
                *self.progress.committed() = Committed::No;
                return Err(error.into());
            }
            Ok(Err(error)) => return undone(error.into()),
            Err(_) => return undone(StoreError::Unavailable(silent(route.completion_budget)).into()),
        }
        let finish = tx.finish_in(&self.owned, &outcome, &route.retention);
        // The connection is the application's: nothing else bounds what is asked on it (R28).
        let finished = timeout(route.completion_budget, finish).await;
        match finished.unwrap_or_else(|_| Err(StoreError::Unavailable(silent(route.completion_budget)))) {
            Ok(Fenced::Done) => {}
            Ok(Fenced::LostOwnership) => return undone(GuardError::LostOwnership),
            Err(error) => return undone(error.into()),
        }
        let committed = timeout(route.completion_budget, store::commit(tx)).await;
        match committed.unwrap_or_else(|_| Err(StoreError::CommitUnknown(silent(route.completion_budget)))) {
            Ok(()) => {}
            Err(StoreError::CommitUnknown(_)) if self.is_there().await => {}
            Err(error @ StoreError::CommitUnknown(_)) => return Err(error.into()),
            Err(error) => return undone(error.into()),
        }
        *self.progress.committed() = Committed::Yes(reply.clone());
        Ok(reply)
    }

    /// Whether a fresh connection finds the outcome.
    async fn is_there(&self) -> bool {
        let looks = async {
            loop {
                let look = self.engine.store().find_afresh(&self.owned.identity).await;
                let record = look.ok().and_then(|look| look.record);
                let ours = |record: &crate::policy::operation::Record| {
                    record.epoch == self.owned.epoch && record.operation_id == self.owned.operation_id
                };
                if record.is_some_and(|record| ours(&record) && record.state != State::InProgress) {
                    return;
                }
                tokio::time::sleep(LOOK_EVERY).await;
            }
        };
        timeout(LOOK_FOR, looks).await.is_ok()
    }
}

fn silent(limit: Duration) -> sqlx::Error {
    let what = format!("the database has said nothing for {}", humantime::format_duration(limit));
    sqlx::Error::Io(std::io::Error::new(std::io::ErrorKind::TimedOut, what))
}

impl<S: Keys> Clone for Guard<S> {
    fn clone(&self) -> Self {
        Self {
            engine: self.engine.clone(),
            endpoint: self.endpoint.clone(),
            fingerprint: self.fingerprint.clone(),
            owned: self.owned.clone(),
            progress: self.progress.clone(),
        }
    }
}

impl<S: Keys> fmt::Debug for Guard<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard").field("owned", &self.owned).field("progress", &self.progress).finish_non_exhaustive()
    }
}
