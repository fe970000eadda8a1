//! The guard that a handler behind the layer gets: it commits the outcome together with the
//! effects of the handler (O2). Beside it, how far a run has come: the layer judges a failure by
//! that (O10).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use sqlx::{Database, Transaction};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::error::StoreError;
use crate::operation::codec::{Kept, SealError, error_code};
use crate::operation::endpoint::Registered;
use crate::operation::engine::Engine;
use crate::operation::port::lost::{Changed, find_changed};
use crate::operation::port::{Bridged, Fenced, KeyClaim, Keys, Operations, Owned, RunOutcome};
use crate::operation::reply::Reply;
use crate::operation::rules::classify::Reached;
use crate::operation::rules::{Fingerprint, Record, State};
use crate::store::base::Base;

/// How far a run has come (O10). Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct Progress(Arc<Far>);

#[derive(Debug, Default)]
struct Far {
    /// The body has a wrapped extractor, which sets `started`.
    met: AtomicBool,
    started: AtomicBool,
    committed: Mutex<Committed>,
}

#[derive(Debug, Default)]
enum Committed {
    /// The guard was not used, or the handler had ended the transaction before.
    #[default]
    No,
    /// The guard rolled everything back. In mode `bridged` the same key may run again.
    Undone,
    /// The commit is under way, or its answer was lost.
    Unknown,
    /// The outcome is stored; this is its answer.
    Yes(Reply),
}

impl Progress {
    /// Notes that the extractor of the body is wrapped. From now on it is known whether the
    /// operation's own code has started.
    pub(crate) fn met_extractor(&self) {
        self.0.met.store(true, Ordering::Release);
    }

    /// Notes that the request was accepted and the operation's own code begins.
    pub(crate) fn started(&self) {
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

    pub(super) fn stored(&self) -> Option<Reply> {
        match &*self.committed() {
            Committed::Yes(reply) => Some(reply.clone()),
            _ => None,
        }
    }

    fn committed(&self) -> parking_lot::MutexGuard<'_, Committed> {
        self.0.committed.lock()
    }
}

/// The claim of the request that a handler serves, for one that commits its outcome with its
/// effects (O2). With the feature `http`, a handler behind the layer extracts it.
#[derive(Debug)]
pub struct Guard<S: Keys> {
    engine: Engine<S>,
    endpoint: Registered,
    fingerprint: Fingerprint,
    owned: Owned,
    progress: Progress,
    /// Ends the heartbeats of the claim.
    heart: CancellationToken,
}

/// Why a guard did not commit.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GuardError {
    /// Another owner may have executed the operation. Everything was rolled back.
    #[error("the claim is not this run's any more: everything was rolled back")]
    LostOwnership,
    /// The guard has committed already, or does not know whether it has.
    #[error("the guard has committed before")]
    Again,
    /// The answer could not be sealed. Everything was rolled back.
    #[error(transparent)]
    Seal(#[from] SealError),
    /// The answer is a stream, or its body failed or did not end within the route's completion
    /// budget, so the guard committed nothing. If the database confirms that the handler had not
    /// ended the transaction itself, everything was rolled back; otherwise the outcome is unknown.
    #[error("{0}: the guard committed nothing")]
    Unread(String),
    /// An error of the database. After [`StoreError::CommitUnknown`] the request gets 503, and the
    /// retry finds the outcome.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl<S: Keys> Guard<S> {
    pub(super) fn new(
        engine: Engine<S>,
        endpoint: Registered,
        claim: &KeyClaim,
        owned: Owned,
        heart: CancellationToken,
    ) -> Self {
        let fingerprint = claim.fingerprint.clone();
        Self { engine, endpoint, fingerprint, owned, progress: Progress::default(), heart }
    }

    /// The id of this run. Derive downstream ids from it, never from the client's key.
    #[must_use]
    pub fn operation_id(&self) -> Uuid {
        self.owned.operation_id
    }

    pub(crate) fn progress(&self) -> &Progress {
        &self.progress
    }
}

impl<S: Operations + Base<Db: Database<Connection: Bridged>>> Guard<S> {
    /// Writes the outcome in the handler's own transaction, commits both together, and returns the
    /// answer. A status below 400 is a success; any other is a failure that is replayed.
    ///
    /// From then on this answer is the outcome, even if other layers change the response. A handler
    /// that reports a success without this call has not succeeded: its key becomes UNKNOWN, and the
    /// request gets 500 `IDEMPOTENCY_TRANSACTION_ENDED`, because a handler that commits by itself
    /// would run again after a kill. A panic, or a status such as 500 that leaves the end open,
    /// makes the key UNKNOWN too, unless the handler returns
    /// [`Outcome::Retryable`](crate::operation::rules::Outcome::Retryable) to say that it has
    /// committed nothing. Refusals (4xx) are judged as on a route of mode `edge`.
    ///
    /// Above READ COMMITTED the database may refuse the transaction here ([`StoreError::Busy`]):
    /// when it conflicts with another one, or when the lease was extended after its first
    /// statement, as happens in a handler that runs longer than a third of its lease. Answer with
    /// 503 then, and the same key runs again.
    ///
    /// # Errors
    /// [`GuardError`]. The transaction was rolled back, except after [`StoreError::CommitUnknown`],
    /// and after [`StoreError::Fenced`]: the handler has ended the transaction itself. If it did,
    /// and the connection fails before the check, nothing can tell: the key runs again, and the
    /// effects may come twice. Each of the three steps (check of the transaction, outcome, COMMIT)
    /// may take the route's completion budget.
    ///
    /// # Cancel safety
    /// None: the outcome of a dropped commit is unknown. The layer does not drop handlers.
    pub async fn commit(&self, mut tx: Transaction<'_, S::Db>, reply: Reply) -> Result<Reply, GuardError> {
        {
            let mut committed = self.progress.committed();
            if !matches!(*committed, Committed::No | Committed::Undone) {
                return Err(GuardError::Again);
            }
            // Holds until the result is known, also if this future is dropped.
            *committed = Committed::Unknown;
        }
        let undone = |error: GuardError| {
            *self.progress.committed() = Committed::Undone;
            Err(error)
        };
        let route = self.endpoint.route();
        // A savepoint can be set only inside a transaction. If a swallowed deadlock or a raw
        // ROLLBACK ended the transaction, the outcome would be stored without the effects (O2,
        // R23). A raw COMMIT ends the transaction too, so nothing is known about the effects.
        match timeout(route.completion_budget, tx.stands()).await {
            Ok(Ok(())) => {}
            Ok(Err(error @ StoreError::Fenced(_))) => {
                // Not `Undone`: the handler may have committed by itself; the key becomes UNKNOWN.
                *self.progress.committed() = Committed::No;
                return Err(error.into());
            }
            // No answer does not tell a handler that committed from one whose connection failed.
            // The second is the usual one, at each failover, and its key must not wait for an
            // operator.
            Ok(Err(error)) => return undone(error.into()),
            Err(_) => return undone(StoreError::Unavailable(silent(route.completion_budget)).into()),
        }
        let kept = Kept::Whole(reply.clone());
        let answer = match self.engine.encode(&self.endpoint, &self.owned.identity, &self.fingerprint, &kept) {
            Ok(answer) => answer,
            Err(error) => return undone(error.into()),
        };
        let outcome = if reply.status < 400 {
            RunOutcome::Completed(answer)
        } else {
            RunOutcome::FailedReplayable { answer, error_code: error_code(self.endpoint.endpoint(), &reply) }
        };
        let finish = tx.finish_in(&self.owned, &outcome, &route.retention);
        // The connection belongs to the application, so no other timeout limits this statement
        // (R28).
        let finished = timeout(route.completion_budget, finish).await;
        match finished.unwrap_or_else(|_| Err(StoreError::Unavailable(silent(route.completion_budget)))) {
            Ok(Fenced::Done) => {}
            Ok(Fenced::LostOwnership) => return undone(GuardError::LostOwnership),
            Err(error) => return undone(error.into()),
        }
        let committed = timeout(route.completion_budget, crate::outbox::enqueue::commit(tx)).await;
        match committed.unwrap_or_else(|_| Err(StoreError::CommitUnknown(silent(route.completion_budget)))) {
            Ok(()) => {}
            Err(StoreError::CommitUnknown(_)) if self.is_there().await => {}
            Err(error @ StoreError::CommitUnknown(_)) => return Err(error.into()),
            Err(error) => return undone(error.into()),
        }
        // The claim has its outcome: a heartbeat would take that for a lost lease.
        self.heart.cancel();
        *self.progress.committed() = Committed::Yes(reply.clone());
        Ok(reply)
    }

    /// Reads the handler's answer within the completion budget, which `read` is given, and commits
    /// it as [`Self::commit`] does. If the answer cannot be read, rolls everything back, because a
    /// replay could not give that answer. The error of `read` says why.
    #[cfg(feature = "http")]
    pub(crate) async fn commit_read<R>(
        &self,
        mut tx: Transaction<'_, S::Db>,
        read: impl FnOnce(Duration) -> R,
    ) -> Result<Reply, GuardError>
    where
        R: Future<Output = Result<Reply, String>>,
    {
        let budget = self.endpoint.route().completion_budget;
        let why = match read(budget).await {
            Ok(reply) => return self.commit(tx, reply).await,
            Err(why) => why,
        };
        // A handler that has ended the transaction by itself may have committed its effects.
        let stands = timeout(budget, tx.stands()).await;
        drop(tx);
        // Where that cannot be asked, nobody knows. Both the answer and the connection have failed
        // then, which is rare, so the key waits for an operator.
        if matches!(stands, Ok(Ok(()))) {
            let mut committed = self.progress.committed();
            if matches!(*committed, Committed::No) {
                *committed = Committed::Undone;
            }
        }
        Err(GuardError::Unread(why))
    }

    /// Whether the outcome of a commit whose answer was lost is stored. The claim was committed
    /// before, so a record that is still IN_PROGRESS says nothing yet.
    async fn is_there(&self) -> bool {
        let ours = |record: &Record| record.epoch == self.owned.epoch && record.operation_id == self.owned.operation_id;
        let same = |record: &Record| ours(record) && record.state == State::InProgress;
        let found = find_changed(&**self.engine.store(), &self.owned.identity, same).await;
        matches!(found, Changed::To(record) if ours(&record))
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
            heart: self.heart.clone(),
        }
    }
}
