//! Duty: operations, the memory of the operation engine (M29, M37, M54, O1 to O29).
//!
//! A record holds the fingerprint of the command that a key was first used for, its state, its
//! owner and its answer. The primary key decides who executes: the process that inserts the record.
//! Every other change is one statement fenced by the epoch that was read before, so of twenty
//! processes that try, one wins. Leases and expiries use the database's clock at the statement.
//!
//! Two ways to claim:
//!
//! * [`Keys::claim`] commits the claim, the handler runs, [`Keys::finish`] commits the outcome
//!   (modes `edge` and `bridged`; a bridged handler calls `Bridged::finish_in` in its own
//!   transaction instead, O2).
//! * [`Operations::begin_operation`] begins the transaction that holds claim, effects and outcome
//!   together (mode `same_tx`). If it is dropped or rolled back, nothing of it stays.
//!
//! Errors of all methods: [`StoreError::Busy`] and other errors that the database returned for a
//! single statement are definite: nothing was changed. After [`StoreError::CommitUnknown`], and
//! after [`StoreError::Unavailable`] because a connection was lost during a statement that commits
//! by itself, the result is unknown: read the record again, do not guess. A fenced statement may be
//! repeated. If the first one took effect, the second returns [`Fenced::LostOwnership`], and
//! reading the record shows why.
//!
//! Cancel safety: a call that is dropped has happened completely or not at all; read the record
//! again.
//!
//! Not here: what is decided from a record ([`decide`](crate::operation::rules::decide())), and
//! encryption of bodies.

mod basis;
pub(crate) mod evidence;
pub(crate) mod lost;
pub(crate) mod phases;
pub(crate) mod stored;

use std::any::Any;
use std::fmt::Debug;
use std::future::Future;
use std::time::Duration;

use async_trait::async_trait;
use sha2::{Digest, Sha256};
use uuid::Uuid;

pub use self::basis::Basis;
use self::lost::Changed;
use crate::error::StoreError;
use crate::inbox::port::{Proof, of_type};
use crate::message::NewMessage;
use crate::operation::port::evidence::{NewEvidence, StoredEvidence};
use crate::operation::rules::record::{Resource, Tombstone};
use crate::operation::rules::retention::Retention;
use crate::operation::rules::route::Durability;
use crate::operation::rules::versions::Versions;
use crate::operation::rules::{Fingerprint, Identity, Mode, OperationName, PrincipalMark, Record, doubt};
use crate::time::db_time::DbTime;

/// The claim that a request wants to make on a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyClaim {
    /// Tenant, operation and key.
    pub identity: Identity,
    /// The principal that sends the request, as a mark.
    pub principal: PrincipalMark,
    /// The fingerprint of the command: another one under the key is a conflict.
    pub fingerprint: Fingerprint,
    /// The mode of the claim. [`Keys::claim`] takes `bridged` and `edge`,
    /// [`Operations::begin_operation`] `same_tx`,
    /// [`Phases::begin_first`](crate::operation::port::phases::Phases::begin_first) `phased`.
    pub mode: Mode,
    /// The id of the run, if the record is new or used anew; otherwise the record keeps its own.
    pub operation_id: Uuid,
    /// The token of the owner, if this claim succeeds. It is made before the claim is sent, so that
    /// a claim whose answer was lost can still be released. A new one for each claim, which nobody
    /// can guess.
    pub owner: Uuid,
    /// The length of the lease without a heartbeat. Mode `same_tx` has no lease and ignores it; in
    /// mode `phased` it is the lease of the operation row.
    pub lease: Duration,
}

/// A claim that this process owns. Its epoch and token fence everything that it writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owned {
    /// Which record this process owns: tenant, operation and key.
    pub identity: Identity,
    /// Token of this owner; none in mode `same_tx`, where the transaction is the owner, and in mode
    /// `phased`, where the operation row has it (O9).
    pub owner: Option<Uuid>,
    /// The epoch that this claim raised.
    pub epoch: i64,
    /// Raised when the key is used anew after its time was over; from 1.
    pub generation: i64,
    /// The id of the run.
    pub operation_id: Uuid,
    /// Which attempt this is, from 1.
    pub attempts: u32,
}

/// What fences the outcome of a record.
#[derive(Debug, Clone)]
pub(crate) struct RecordFence {
    pub(crate) digest: Vec<u8>,
    pub(crate) epoch: i64,
    /// The token of its owner, where it has one of its own.
    pub(crate) owner: Option<Uuid>,
    /// Whether a record in state UNKNOWN may get its outcome too, from recovery or an operator.
    pub(crate) unknown: bool,
}

impl From<&Owned> for RecordFence {
    fn from(owned: &Owned) -> Self {
        Self { digest: owned.identity.digest().to_vec(), epoch: owned.epoch, owner: owned.owner, unknown: false }
    }
}

/// The result of `Operations::begin_operation`.
#[derive(Debug)]
pub enum Begun<T> {
    /// This transaction holds the claim; no other one can have it at the same time.
    Claimed(T),
    /// A committed record is there; the transaction is rolled back and its connection is back in
    /// the pool.
    Existing(Box<Record>),
    /// Another transaction holds the claim and has not committed, or the turn to write did not come
    /// in time. Read again later (O15 step 4).
    Locked,
}

impl<T> Begun<T> {
    pub(crate) fn map<U>(self, change: impl FnOnce(T) -> U) -> Begun<U> {
        match self {
            Self::Claimed(tx) => Begun::Claimed(change(tx)),
            Self::Existing(record) => Begun::Existing(record),
            Self::Locked => Begun::Locked,
        }
    }

    /// The transaction that stores a run which left no record of its own. `None`: another run has
    /// claimed the key since, so nothing is to be stored.
    ///
    /// # Errors
    /// [`StoreError::Busy`]: try again.
    pub(crate) fn unless_overtaken(self, basis: Basis<'_>) -> Result<Option<T>, StoreError> {
        let busy = |why: &str| Err(StoreError::Busy(sqlx::Error::Protocol(why.to_owned())));
        match self {
            Self::Claimed(tx) => Ok(Some(tx)),
            // The record is as it was read, but the claim on it failed: `Reclaim`, for example,
            // requires that the record has not expired, and it may have expired since.
            Self::Existing(record) if basis.seen().is_some_and(|seen| seen.epoch == record.epoch) => {
                busy("the record stands as it was seen")
            }
            Self::Existing(_) => Ok(None),
            Self::Locked => busy("another transaction holds the key"),
        }
    }
}

/// The record of a key, read by one statement without a lock (O15 step 1).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Look {
    /// Database time of the statement.
    pub now: DbTime,
    /// The bound up to which records of this operation were purged; none where none were (O23).
    pub purged_below: Option<DbTime>,
    /// The record. The caller compares its identity with the request's (O16).
    pub record: Option<Record>,
    /// The body of its answer, where it is stored in the same row; otherwise [`Keys::body`] reads
    /// it.
    pub body: Option<KeptBody>,
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RunOutcome {
    /// It succeeded, and this is its answer.
    Completed(Answer),
    /// It failed for good.
    FailedReplayable {
        /// The answer that a repeated request gets.
        answer: Answer,
        /// The code of the failure.
        error_code: Option<String>,
    },
    /// It failed without an effect, so the same key may run again (O3).
    FailedRetryable {
        /// The code of the failure.
        error_code: Option<String>,
    },
    /// It is not known whether the operation happened: recovery or an operator finds out.
    Unknown,
}

/// An answer to keep.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The HTTP status, or the code of gRPC.
    pub status: u16,
    /// The version of the schema that the body is written in.
    pub schema_version: u32,
    /// What there is to replay.
    pub body: AnswerBody,
    /// The resource that holds the result, where one is named. It outlives the body.
    pub resource: Option<Resource>,
}

/// What is kept of an answer's body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AnswerBody {
    /// Headers and bytes of the body, complete.
    Kept(KeptBody),
    /// Nothing, for this reason.
    Tombstone(Tombstone),
    /// Only the resource that holds the result.
    Reference,
}

/// Headers and bytes of an answer, as they are stored: sanitised, perhaps compressed and encrypted.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct KeptBody {
    /// Names and values in order; a name may repeat (pitfall 21).
    pub headers: Vec<(String, Vec<u8>)>,
    /// The bytes of the body, written as `format` says, and encrypted where `kid` is set.
    pub bytes: Vec<u8>,
    /// How the bytes are written; 0: as they were.
    pub format: u16,
    /// The id of the key that encrypted them.
    pub kid: Option<String>,
}

impl std::fmt::Debug for KeptBody {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (headers, bytes) = (self.headers.len(), self.bytes.len());
        write!(f, "KeptBody({headers} headers, {bytes} bytes, format {}, {:?})", self.format, self.kid)
    }
}

/// Whether a fenced statement changed the row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fenced {
    /// The fence held, and the change is made.
    Done,
    /// Nothing was changed: the record has another owner by now, or has its outcome.
    LostOwnership,
}

impl Fenced {
    /// From the number of rows that a statement with the whole fence changed.
    pub(crate) fn rows(rows: u64) -> Self {
        if rows == 0 { Self::LostOwnership } else { Self::Done }
    }
}

/// How many records have no outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OperationStats {
    /// Committed records in state IN_PROGRESS. Records of transactional operations are not counted:
    /// they cannot be read before their commit (pitfall 6).
    pub in_progress: u64,
    /// The age of the oldest of them, by database time.
    pub oldest_in_progress: Option<Duration>,
    /// Records in state UNKNOWN_REQUIRES_RECOVERY: nobody knows whether they happened.
    pub unknown: u64,
}

impl KeyClaim {
    /// A token for [`Self::owner`] of 128 bits (O25): a hash of two UUIDs v7, which together have
    /// 148 random bits.
    pub(crate) fn new_owner() -> Uuid {
        let chance = Sha256::new().chain_update(Uuid::now_v7()).chain_update(Uuid::now_v7()).finalize();
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&chance[..16]);
        Uuid::from_bytes(bytes)
    }

    /// The ownership that this claim gets if it succeeds on this basis.
    #[must_use]
    pub fn owned(&self, basis: Basis<'_>) -> Owned {
        let owner = matches!(self.mode, Mode::Bridged | Mode::Edge).then_some(self.owner);
        let (epoch, generation, operation_id, attempts) = match basis {
            Basis::New => (1, 1, self.operation_id, 1),
            Basis::TakeOver(seen) | Basis::Reclaim(seen) => {
                (seen.epoch + 1, seen.generation, seen.operation_id, seen.attempts.saturating_add(1))
            }
            Basis::Reconcile(seen) | Basis::Late(seen) => {
                (seen.epoch + 1, seen.generation, seen.operation_id, seen.attempts)
            }
            Basis::Anew(seen) => (seen.epoch + 1, seen.generation + 1, self.operation_id, 1),
        };
        Owned { identity: self.identity.clone(), owner, epoch, generation, operation_id, attempts }
    }

    /// Refuses a mode for which this way of claiming would break a promise.
    ///
    /// # Errors
    /// `StoreError::Refused`, with the mode of the claim.
    pub fn requires(&self, modes: &[Mode]) -> Result<(), StoreError> {
        if modes.contains(&self.mode) {
            return Ok(());
        }
        Err(StoreError::Refused(format!("a claim of mode {} cannot be made here", self.mode)))
    }
}

/// The evidence of runs that lost their lease, newest first, from what [`Keys::runs_of`] returned.
/// Evidence of an operator overrules all that is older, so the iteration ends there.
pub(crate) fn late_runs(said: &[StoredEvidence]) -> impl Iterator<Item = &NewEvidence> {
    said.iter().rev().map(|row| &row.evidence).take_while(|row| row.kind != "operator").filter(|row| row.kind == "run")
}

/// Duty: idempotency records that are claimed and finished by statements of their own. So a store
/// that the application has no transactions in can keep them too (O25).
///
/// The engine is compiled once, for any store: a call costs a boxed future beside its round trip.
#[async_trait]
pub trait Keys: Debug + Send + Sync + 'static {
    /// Whether this store remembers every outcome.
    fn durability(&self) -> Durability;

    /// Pings the server on a connection that nothing else uses, because a pool without a free
    /// connection is no outage. A store without a server returns `Ok`.
    ///
    /// # Cancel safety
    /// Dropped, its connection is closed; the next call makes a new one.
    async fn sign_of_life(&self) -> Result<(), StoreError> {
        Ok(())
    }

    /// How many connections the pool has, where operations hold one while they run; none where they
    /// hold none.
    fn connections_max(&self) -> Option<u32> {
        None
    }

    /// Reads the record of a key by one plain SELECT. The lease of a phased record is that of its
    /// operation row, read in the same statement (O9).
    async fn find(&self, identity: &Identity) -> Result<Look, StoreError>;

    /// As `Self::find`, but first waits for a transaction that is changing the record. A run that
    /// has written evidence of how it ended reads the record in this way. A process that frees a
    /// key locks the record before it reads the evidence. So either that process reads the
    /// evidence, or this read sees its change.
    async fn find_settled(&self, identity: &Identity) -> Result<Look, StoreError> {
        self.find(identity).await
    }

    /// Reads the body of a record's answer; none where its time is over.
    async fn body(&self, record: &Record) -> Result<Option<KeptBody>, StoreError>;

    /// Claims a key in a transaction of its own, in the modes `bridged` and `edge`. None: another
    /// record is there, or the one that was read has changed or is gone. Read the key again, and
    /// decide from what is there then (pitfall 12).
    ///
    /// # Errors
    /// [`StoreError::Refused`] for another mode: a committed claim of it would never be completed.
    async fn claim(&self, claim: &KeyClaim, basis: Basis<'_>) -> Result<Option<Owned>, StoreError>;

    /// Renews the lease: it ends this length from now.
    async fn heartbeat(&self, owned: &Owned, lease: Duration) -> Result<Fenced, StoreError>;

    /// Writes the outcome and keeps the answer, in a transaction of its own. Every lifetime counts
    /// from now (O3).
    async fn finish(&self, owned: &Owned, outcome: &RunOutcome, retention: &Retention) -> Result<Fenced, StoreError>;

    /// Deletes the claim: nothing happened, and nothing has to be remembered. Only while the record
    /// is IN_PROGRESS and ours, and while no run of the same operation id has left evidence that it
    /// succeeded or failed ([`Self::observe_run`]). After such evidence something did happen,
    /// unless an operator has overruled it.
    async fn release(&self, owned: &Owned) -> Result<Fenced, StoreError>;

    /// Takes back a claim whose answer was lost, by the values that were sent. It is deleted,
    /// unless it repeats a run of unknown outcome: then the record becomes UNKNOWN again.
    /// [`Fenced::LostOwnership`] also where the claim never arrived.
    async fn take_back(&self, claim: &KeyClaim, basis: Basis<'_>) -> Result<Fenced, StoreError> {
        let owned = claim.owned(basis);
        if basis.repeats() {
            return self.finish(&owned, &RunOutcome::Unknown, &Retention::default()).await;
        }
        self.release(&owned).await
    }

    /// Makes a claim UNKNOWN whose outcome will not come: in mode `edge` once its lease is over
    /// (O11), in mode `same_tx` at once (O1). The epoch is raised, so the former owner changes
    /// nothing any more.
    async fn mark_unknown(&self, seen: &Record) -> Result<Fenced, StoreError>;

    /// The abandoned claims of an operation, at most `limit`: IN_PROGRESS in mode `bridged` or
    /// `edge` with a lease that ended at least half its length ago, and committed claims of mode
    /// `same_tx`, which have no lease (O1). Beside them it reads only what runs, however many
    /// records are open. Phased operations are left out: recovery workers continue them. A guard
    /// returns none: there a claim waits for the next request.
    async fn stale(&self, operation: &OperationName, limit: u32) -> Result<Vec<Record>, StoreError>;

    /// The records of mode `edge` whose outcome is unknown and that were not changed for a pause,
    /// at most `limit`, the oldest change first. The pause is as long as the time from
    /// [`Record::created_at`] to the last change of the record, so each reconciliation doubles it;
    /// `pauses` has the shortest and the longest. A guard returns none, as the default does.
    async fn unknown_due(
        &self,
        operation: &OperationName,
        pauses: (Duration, Duration),
        limit: u32,
    ) -> Result<Vec<Record>, StoreError> {
        let _ = (operation, pauses, limit);
        Ok(Vec::new())
    }

    /// Deletes about `limit` bodies at most whose time is over, and returns their number; the
    /// records stay (M99). On PostgreSQL large bodies are freed with their partitions and not
    /// counted.
    async fn expire_bodies(&self, limit: u32) -> Result<u64, StoreError>;

    /// Deletes at most `limit` records of an operation whose metadata has expired, only those with
    /// an outcome (M100), and stores the bound of the purge in the same transaction (O23). Returns
    /// their number.
    async fn purge_keys(
        &self,
        operation: &OperationName,
        retention: &Retention,
        id_skew: Duration,
        limit: u32,
    ) -> Result<u64, StoreError>;

    /// How many records of a tenant are committed and have no outcome: IN_PROGRESS or UNKNOWN. A
    /// guard returns 0.
    async fn open_of_tenant(&self, tenant: &str) -> Result<u64, StoreError>;

    /// How many bytes the kept answers of a tenant take, as stored: headers and bodies whose time
    /// is not over, in whichever table they are. It reads one index entry for each such answer.
    ///
    /// # Errors
    /// [`StoreError::Refused`] from a store that cannot tell: a guard.
    async fn stored_of_tenant(&self, tenant: &str) -> Result<u64, StoreError>;

    /// Appends how a run that lost its lease ended. It is evidence, so it is never fenced (O8,
    /// O12).
    ///
    /// # Errors
    /// [`StoreError::Refused`] from a store that keeps no evidence: a guard.
    async fn observe_run(&self, evidence: &NewEvidence) -> Result<(), StoreError>;

    /// The evidence of this operation id from runs that lost their lease, and from operators about
    /// the run as a whole, oldest first. Empty in a store that keeps no evidence.
    async fn runs_of(&self, operation_id: Uuid) -> Result<Vec<StoredEvidence>, StoreError>;

    /// Stores which fingerprints this process reads and writes now (O21), and deletes the rows of
    /// processes that have announced nothing for a day.
    /// [`KeyOperator::live_versions`](crate::operator::keys::KeyOperator::live_versions) shows
    /// them. A store without operator commands keeps nothing.
    async fn announce(&self, process: Uuid, versions: &[Versions]) -> Result<(), StoreError> {
        let _ = (process, versions);
        Ok(())
    }

    /// How many records have no outcome.
    async fn operation_stats(&self) -> Result<OperationStats, StoreError>;
}

/// A connection of sqlx on which an application's own transaction ends together with its outcome:
/// mode `bridged`.
pub trait Bridged: Send {
    /// [`Keys::finish`] inside the caller's transaction (mode `bridged`, O2). After
    /// [`Fenced::LostOwnership`], and after an error, roll back: another owner may have executed.
    fn finish_in(
        &mut self,
        owned: &Owned,
        outcome: &RunOutcome,
        retention: &Retention,
    ) -> impl Future<Output = Result<Fenced, StoreError>> + Send;

    /// Checks that the application's own transaction is still open on this connection (R23).
    /// PostgreSQL and MySQL set a savepoint and release it; outside a transaction one of the two
    /// fails. On SQLite a savepoint would begin a transaction there, so BEGIN is tried, which fails
    /// inside one.
    ///
    /// # Errors
    /// [`StoreError::Fenced`]: the transaction has ended, by COMMIT or by ROLLBACK. After any other
    /// error nobody knows whether it had ended. If it was still open, the database rolls it back.
    fn stands(&mut self) -> impl Future<Output = Result<(), StoreError>> + Send;
}

/// What [`Bridged::stands`] returns where the transaction has ended.
pub(crate) fn ended() -> StoreError {
    StoreError::Fenced("the handler ended the transaction before its outcome was committed".to_owned())
}

/// Duty: outcomes in the transaction of the effects: a transactional operation.
#[async_trait]
pub trait Operations: Keys {
    /// Whether [`Self::begin_unseen`] takes fewer round trips than a read and a claim.
    fn claims_unseen(&self) -> bool {
        false
    }

    /// As [`Keys::find`], on a new connection that is closed afterwards. It is for a commit whose
    /// reply was lost: dead connections of the pool, or requests that wait for the pool, must not
    /// delay the answer.
    async fn find_afresh(&self, identity: &Identity) -> Result<Look, StoreError>;

    /// Writes the record of a run as UNKNOWN where there is no record (O1).
    /// [`Fenced::LostOwnership`] where there is one: read it again.
    async fn insert_unknown(&self, claim: &KeyClaim) -> Result<Fenced, StoreError>;

    /// Begins a transactional operation, mode `same_tx`: the try-lock, then the claim, insert first
    /// (O15 steps 2 to 4). It never waits for another claim of the key; `patience` bounds the wait
    /// for a turn where there is one writer at a time (O18).
    ///
    /// # Errors
    /// [`StoreError::Refused`] for another mode. [`StoreError::Busy`]: a transient error; repeat
    /// the call (R27).
    async fn begin_operation(
        &self,
        claim: &KeyClaim,
        basis: Basis<'_>,
        patience: Duration,
    ) -> Result<Begun<Box<dyn OperationTx>>, StoreError>;

    /// Reads the record and begins the operation on [`Basis::New`] in one statement, for a key that
    /// is probably new. The order is that of O15: where a record is there, it takes no lock and
    /// does not wait. None: a record is there, or another transaction holds the key; the
    /// transaction is rolled back and its connection is back in the pool. The caller then goes the
    /// usual way, `Keys::find` and [`Self::begin_operation`]. So an adapter may always return
    /// none, as the default does.
    ///
    /// # Errors
    /// As [`Self::begin_operation`].
    async fn begin_unseen(&self, _claim: &KeyClaim) -> Result<Option<Box<dyn OperationTx>>, StoreError> {
        Ok(None)
    }

    /// Makes a run UNKNOWN that left no record of its own (O1): inserts a record, or changes the
    /// one that the run began from. Where another run has claimed the key since, nothing is
    /// changed.
    async fn stand_unknown(&self, claim: &KeyClaim, basis: Basis<'_>, patience: Duration) -> Result<(), StoreError> {
        if basis.seen().is_none() {
            return self.insert_unknown(claim).await.map(drop);
        }
        let begun = self.begin_operation(claim, basis, patience).await?;
        let Some(mut tx) = begun.unless_overtaken(basis)? else { return Ok(()) };
        match tx.complete(Vec::new(), &RunOutcome::Unknown, &Retention::default()).await? {
            Proof::Same => tx.commit().await,
            Proof::Aborted | Proof::Ended => tx.rollback().await,
        }
    }

    /// Reads on new connections, for a second, to learn whether a commit whose reply was lost took
    /// effect. The unchanged record that the run began from counts as `doubt::Look::Nothing`.
    async fn find_after_lost_commit(&self, claim: &KeyClaim, basis: Basis<'_>) -> doubt::Look {
        let same = |record: &Record| basis.seen().is_some_and(|seen| seen.epoch == record.epoch);
        match lost::find_changed(self, &claim.identity, same).await {
            Changed::NoAnswer => doubt::Look::NoAnswer,
            Changed::NotSeen => doubt::Look::Nothing,
            Changed::To(record) if record.operation_id == claim.operation_id => doubt::Look::Ours(record.state),
            Changed::To(_) => doubt::Look::Anothers,
        }
    }
}

/// The transaction of a transactional operation: claim, effects, outcome. Dropped without commit,
/// it rolls back.
///
/// The proof (O1, R23): an outcome is written only in the transaction that holds the claim. A
/// handler that ended it by raw SQL, or swallowed an error that rolled it back, is detected. After
/// any `Proof` but [`Proof::Same`], roll back; then [`Operations::find_after_lost_commit`] and
/// `Doubt` tell what follows.
#[async_trait]
pub trait OperationTx: Debug + Send {
    /// The ownership that this transaction gets if it commits.
    fn owned(&self) -> &Owned;

    /// The sqlx connection, inside the transaction: `tx.connection()` gives it with its type.
    fn any_connection(&mut self) -> &mut (dyn Any + Send);

    /// Takes back all effects since the claim; the claim stays. It is for a rejection that must be
    /// remembered (pitfall 18). It also repairs a transaction that a swallowed error aborted.
    /// PostgreSQL claims again here: [`StoreError::Busy`] if another transaction was faster.
    async fn undo_effects(&mut self) -> Result<Proof, StoreError>;

    /// For a transaction that no longer exists after a transient error, such as a deadlock, by
    /// which the database itself may have ended it. True where it is proven that nothing was
    /// committed on the connection since the claim: the operation may run again (R27). Something
    /// may still be open; [`Self::rollback`] takes it back.
    ///
    /// # Errors
    /// The check failed, so nothing is proven.
    async fn nothing_committed(&mut self) -> Result<bool, StoreError> {
        Ok(false)
    }

    /// Writes the messages, in order, and the outcome, and keeps the answer. Call it once, then
    /// commit.
    ///
    /// # Errors
    /// Also the error of a message. An error is returned only where the transaction is proven to be
    /// ours, or the connection is lost: roll back, and nothing of it stays.
    async fn complete(
        &mut self,
        messages: Vec<NewMessage>,
        outcome: &RunOutcome,
        retention: &Retention,
    ) -> Result<Proof, StoreError>;

    /// Commits.
    ///
    /// # Errors
    /// [`StoreError::CommitUnknown`] where the connection was lost: call
    /// [`Operations::find_after_lost_commit`].
    async fn commit(self: Box<Self>) -> Result<(), StoreError>;

    /// Rolls back. If that fails, the connection is closed.
    async fn rollback(self: Box<Self>) -> Result<(), StoreError>;
}

impl dyn OperationTx + '_ {
    /// The sqlx connection, inside the transaction: what handlers write through.
    ///
    /// # Errors
    /// [`StoreError::Refused`] where it is a connection of another kind of database.
    pub fn connection<C: Any>(&mut self) -> Result<&mut C, StoreError> {
        of_type(self.any_connection())
    }
}
