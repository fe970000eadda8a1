//! Duty: operations, the memory of the operation engine (M29, M37, M54, O1 to O29).
//!
//! A record says for what a key was first used, in what state that is, who owns it, and what is
//! answered. Its primary key is the arbiter: whoever inserts it executes. Every other change is one
//! statement fenced by the epoch that it saw, so of twenty that try, one wins. Leases and expiries
//! are the database's clock at the statement.
//!
//! Two ways to claim:
//!
//! * [`Keys::claim`] commits the claim, the handler runs, [`Keys::finish`] commits the outcome
//!   (modes `edge` and `bridged`; a bridged handler calls [`Operations::finish_in`] in its own
//!   transaction instead, O2).
//! * [`Operations::begin_operation`] begins the transaction that holds claim, effects and outcome
//!   together (mode `same_tx`). Dropped or rolled back, nothing stays.
//!
//! Errors, everywhere: [`StoreError::Busy`], [`StoreError::Unavailable`] and other errors of a
//! single statement are definite: nothing was changed. [`StoreError::CommitUnknown`], and an error
//! of a statement that commits by itself over a connection that was lost, are indefinite: look
//! again, do not guess. A fenced statement may be repeated; if the first one hit, the second
//! answers [`Fenced::LostOwnership`], and a look shows why.
//!
//! Cancel safety: a call that is dropped has happened or not, wholly; look again.
//!
//! Not here: what is decided from a record ([`decide`](crate::policy::operation::decide())), and
//! encryption of bodies.

pub(crate) mod stored;

use std::any::Any;
use std::fmt::Debug;
use std::future::Future;
use std::time::Duration;

use async_trait::async_trait;
use sha2::{Digest, Sha256};
use uuid::Uuid;

use super::{NewEvidence, Proof, StoredEvidence, of_type};
use crate::error::StoreError;
use crate::message::NewMessage;
use crate::policy::db_time::DbTime;
use crate::policy::operation::doubt;
use crate::policy::operation::record::{Resource, Tombstone};
use crate::policy::operation::retention::Retention;
use crate::policy::operation::route::Durability;
use crate::policy::operation::versions::Versions;
use crate::policy::operation::{Fingerprint, Identity, Mode, OperationName, PrincipalMark, Record};

/// How long a fresh connection looks for a commit that was lost sight of (O29).
const LOOK_AFTER: Duration = Duration::from_secs(1);
/// Between the first two looks; each makes a connection, so each pause is twice the last one.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// What a request wants to own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyClaim {
    /// Tenant, operation and key.
    pub identity: Identity,
    /// The principal that sends the request, as a mark.
    pub principal: PrincipalMark,
    /// The fingerprint of the command: another one under the key is a conflict.
    pub fingerprint: Fingerprint,
    /// By which door. [`Keys::claim`] takes `bridged` and `edge`, [`Operations::begin_operation`]
    /// `same_tx`, [`Phases::begin_first`](super::Phases::begin_first) `phased`.
    pub mode: Mode,
    /// The identity of the run, if the record is new or used anew; else the record keeps its own.
    pub operation_id: Uuid,
    /// The token of the owner, if this claim succeeds: made before it is sent, so that a claim
    /// whose answer was lost can still be released. A new one for each claim: [`Self::new_owner`].
    pub owner: Uuid,
    /// How long it is owned without a heartbeat; meaningless in mode `same_tx`, which has no lease.
    /// In mode `phased` it is the operation's.
    pub lease: Duration,
}

/// What must be there for a claim to succeed: nothing, or a record exactly as it was seen.
#[derive(Debug, Clone, Copy)]
pub enum Basis<'a> {
    /// No record: insert first.
    New,
    /// A claim of mode `bridged` or `edge` whose lease is over by database time, or an UNKNOWN of
    /// mode `edge`. Who is allowed to execute it again is decided before (O2, O11).
    TakeOver(&'a Record),
    /// FAILED_RETRYABLE, its time not over: attempts are raised. Refused where a run of it that
    /// lost its lease has said that it ended ([`Keys::observe_run`]), and no operator has overruled
    /// that: what happened is not executed again.
    Reclaim(&'a Record),
    /// The same, to write what such a run has said: whoever claims on it executes nothing.
    Late(&'a Record),
    /// A terminal state whose time is over: the generation is raised, the operation id is a new one
    /// (O4).
    Anew(&'a Record),
}

/// A claim that this process owns. Its epoch and token fence everything that it writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owned {
    /// Which record this process owns: tenant, operation and key.
    pub identity: Identity,
    /// Token of this owner; none in mode `same_tx`, where the transaction is the owner, and in mode
    /// `phased`, where the operation row has it (O9).
    pub owner: Option<Uuid>,
    /// The epoch it raised.
    pub epoch: i64,
    /// Raised when the key is used anew after its time was over; from 1.
    pub generation: i64,
    /// The identity of the run.
    pub operation_id: Uuid,
    /// Which attempt this is, from 1.
    pub attempts: u32,
}

/// What fences the outcome of a record.
#[derive(Debug, Clone)]
pub(super) struct RecordFence {
    /// The digest of its identity.
    pub(super) digest: Vec<u8>,
    /// The epoch that the record must still have.
    pub(super) epoch: i64,
    /// The token of its owner, where it has one of its own.
    pub(super) owner: Option<Uuid>,
    /// Whether an UNKNOWN gets its outcome too: by recovery, or by an operator.
    pub(super) unknown: bool,
}

impl From<&Owned> for RecordFence {
    fn from(owned: &Owned) -> Self {
        Self { digest: owned.identity.digest().to_vec(), epoch: owned.epoch, owner: owned.owner, unknown: false }
    }
}

/// What came of a claim.
#[derive(Debug)]
pub enum Claimed {
    /// The claim succeeded, and this process owns the record.
    Owned(Owned),
    /// Another record stands there, or the one that was seen has changed: decide again from this
    /// one.
    Existing(Box<Record>),
    /// What refused the claim is gone. Nothing is owned: look again (pitfall 12).
    Vanished,
}

/// What came of beginning a transactional operation.
#[derive(Debug)]
pub enum Begun<T> {
    /// The claim stands in this transaction, and nobody else's can.
    Claimed(T),
    /// A committed record; the transaction is rolled back and its connection given back.
    Existing(Box<Record>),
    /// Another transaction holds the claim, uncommitted, or its turn did not come in time. Look
    /// again (O15 step 4).
    Locked,
}

impl<T> Begun<T> {
    /// With the transaction put behind its trait.
    pub(super) fn map<U>(self, change: impl FnOnce(T) -> U) -> Begun<U> {
        match self {
            Self::Claimed(tx) => Begun::Claimed(change(tx)),
            Self::Existing(record) => Begun::Existing(record),
            Self::Locked => Begun::Locked,
        }
    }
}

/// What stands under a key, read by one statement without a lock (O15 step 1).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Look {
    /// Database time of the statement.
    pub now: DbTime,
    /// How far records of this operation were purged; none: never (O23).
    pub purged_below: Option<DbTime>,
    /// The record. Its identity is to be compared with the request's (O16).
    pub record: Option<Record>,
    /// The body of its answer, where that stands beside it; else [`Keys::body`] reads it.
    pub body: Option<KeptBody>,
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// It succeeded, and this is its answer.
    Completed(Answer),
    /// It failed for good.
    FailedReplayable {
        /// The answer that a repeated request gets.
        answer: Answer,
        /// The code of the failure.
        error_code: Option<String>,
    },
    /// It failed with no effect outstanding (O3).
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
}

/// What is kept of an answer's body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AnswerBody {
    /// Headers and bytes of the body, complete.
    Kept(KeptBody),
    /// Nothing, for this reason.
    Tombstone(Tombstone),
    /// Where the result is.
    Reference(Resource),
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

/// Whether a fenced statement hit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fenced {
    /// The fence held, and the change is made.
    Done,
    /// Nothing was changed: the record is another's by now, or has its outcome.
    LostOwnership,
}

impl Fenced {
    /// From the number of rows that a statement with the whole fence changed.
    pub(super) fn rows(rows: u64) -> Self {
        if rows == 0 { Self::LostOwnership } else { Self::Done }
    }
}

/// How much is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OperationStats {
    /// Committed records IN_PROGRESS. Those of transactional operations are not among them: nobody
    /// sees them before their commit (pitfall 6).
    pub in_progress: u64,
    /// The age of the oldest of them, by database time.
    pub oldest_in_progress: Option<Duration>,
    /// Records in state UNKNOWN_REQUIRES_RECOVERY: nobody knows whether they happened.
    pub unknown: u64,
}

impl KeyClaim {
    /// A token for [`Self::owner`]: 128 random bits (O25), of two UUIDs v7, whose 148 nobody can
    /// guess.
    #[must_use]
    pub fn new_owner() -> Uuid {
        let chance = Sha256::new().chain_update(Uuid::now_v7()).chain_update(Uuid::now_v7()).finalize();
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&chance[..16]);
        Uuid::from_bytes(bytes)
    }

    /// What this claim owns if it succeeds on a basis.
    #[must_use]
    pub fn owned(&self, basis: Basis<'_>) -> Owned {
        let owner = matches!(self.mode, Mode::Bridged | Mode::Edge).then_some(self.owner);
        let (epoch, generation, operation_id, attempts) = match basis {
            Basis::New => (1, 1, self.operation_id, 1),
            Basis::TakeOver(seen) | Basis::Reclaim(seen) | Basis::Late(seen) => {
                (seen.epoch + 1, seen.generation, seen.operation_id, seen.attempts.saturating_add(1))
            }
            Basis::Anew(seen) => (seen.epoch + 1, seen.generation + 1, self.operation_id, 1),
        };
        Owned { identity: self.identity.clone(), owner, epoch, generation, operation_id, attempts }
    }

    /// Refuses a mode that this way of claiming would break a promise of.
    ///
    /// # Errors
    /// Refused, with the mode of the claim.
    pub fn requires(&self, modes: &[Mode]) -> Result<(), StoreError> {
        if modes.contains(&self.mode) {
            return Ok(());
        }
        Err(StoreError::Refused(format!("a claim of mode {} cannot be made here", self.mode)))
    }
}

/// What runs that lost their lease have said, the last one first, of what [`Keys::runs_of`] gave; a
/// word of an operator overrules those before it.
pub(crate) fn late_runs(said: &[StoredEvidence]) -> impl Iterator<Item = &NewEvidence> {
    said.iter().rev().map(|row| &row.evidence).take_while(|row| row.kind != "operator").filter(|row| row.kind == "run")
}

/// Duty: idempotency records that are claimed and finished by statements of their own. A store
/// without transactions of the application's can keep them too (O25).
///
/// The engine is compiled once, for any store: a call costs a boxed future beside its round trip.
#[async_trait]
pub trait Keys: Debug + Send + Sync + 'static {
    /// Whether it remembers every outcome.
    fn durability(&self) -> Durability;

    /// Asks the server for a sign of life, on a connection that nothing else uses: a pool that is
    /// used up is no outage. A store without a server is there.
    ///
    /// # Cancel safety
    /// Dropped, its connection is closed; the next call makes a new one.
    async fn sign_of_life(&self) -> Result<(), StoreError> {
        Ok(())
    }

    /// How many connections the pool has that operations hold while they run; none: they need none.
    fn connections_max(&self) -> Option<u32> {
        None
    }

    /// What stands under a key: one plain SELECT. The lease of a phased record is that of its
    /// operation row, read in the same statement (O9).
    async fn find(&self, identity: &Identity) -> Result<Look, StoreError>;

    /// The same after whoever changes the record just now has ended: a run that has said by
    /// evidence how it ended looks by this. Whoever frees a key locks its record before it reads
    /// the evidence, so it reads the evidence, or what it did is seen here.
    async fn find_settled(&self, identity: &Identity) -> Result<Look, StoreError> {
        self.find(identity).await
    }

    /// The body of a record's answer; none where its life is over.
    async fn body(&self, record: &Record) -> Result<Option<KeptBody>, StoreError>;

    /// Claims in a transaction of its own, modes `bridged` and `edge`.
    ///
    /// # Errors
    /// [`StoreError::Refused`] for another mode: a committed claim of it would never be completed.
    async fn claim(&self, claim: &KeyClaim, basis: Basis<'_>) -> Result<Claimed, StoreError>;

    /// Extends the lease, from now, by this length.
    async fn heartbeat(&self, owned: &Owned, lease: Duration) -> Result<Fenced, StoreError>;

    /// Writes the outcome and keeps the answer, in a transaction of its own. Every lifetime counts
    /// from now (O3).
    async fn finish(&self, owned: &Owned, outcome: &Outcome, retention: &Retention) -> Result<Fenced, StoreError>;

    /// Takes the claim away: nothing happened, and nothing is to be remembered. Only while it is
    /// IN_PROGRESS and ours, and while no run of the same operation id has said that it ended
    /// ([`Self::observe_run`]): then something did happen, unless an operator has overruled it.
    async fn release(&self, owned: &Owned) -> Result<Fenced, StoreError>;

    /// The same of a claim whose answer was lost, by what was sent. [`Fenced::LostOwnership`] also
    /// where it has not arrived.
    async fn take_back(&self, claim: &KeyClaim, basis: Basis<'_>) -> Result<Fenced, StoreError> {
        self.release(&claim.owned(basis)).await
    }

    /// Makes a claim UNKNOWN whose outcome was lost sight of: of mode `edge` once its lease is over
    /// (O11), of mode `same_tx` at once (O1). The epoch is raised: whoever owned it changes nothing
    /// more.
    async fn mark_unknown(&self, seen: &Record) -> Result<Fenced, StoreError>;

    /// Takes away at most about `limit` bodies whose life is over, and gives their number; the
    /// records stay (M99). On PostgreSQL large ones go by whole partitions, counted as none.
    async fn expire_bodies(&self, limit: u32) -> Result<u64, StoreError>;

    /// Takes away at most `limit` records of an operation whose metadata's time is over, terminal
    /// ones only (M100), and records how far in the same transaction (O23). Gives their number.
    async fn purge_keys(
        &self,
        operation: &OperationName,
        retention: &Retention,
        id_skew: Duration,
        limit: u32,
    ) -> Result<u64, StoreError>;

    /// How many records of a tenant are committed and have no outcome: IN_PROGRESS or UNKNOWN. A
    /// guard counts none.
    async fn open_of_tenant(&self, tenant: &str) -> Result<u64, StoreError>;

    /// How many bytes the answers of a tenant take whose body is kept and whose life is not over:
    /// headers and body, as they stand, wherever they stand. One read of an index that leads by
    /// tenant, of one entry for each such answer.
    ///
    /// # Errors
    /// [`StoreError::Refused`] of a store that cannot tell: a guard.
    async fn stored_of_tenant(&self, tenant: &str) -> Result<u64, StoreError>;

    /// Appends what became of a run that lost its lease: evidence, never fenced (O8, O12).
    ///
    /// # Errors
    /// [`StoreError::Refused`] of a store that keeps no evidence: a guard.
    async fn observe_run(&self, evidence: &NewEvidence) -> Result<(), StoreError>;

    /// What runs that lost their lease have said of this operation id, and operators of the run as
    /// a whole, oldest first; nothing in a store that keeps no evidence.
    async fn runs_of(&self, operation_id: Uuid) -> Result<Vec<StoredEvidence>, StoreError>;

    /// Writes down which fingerprints this process reads and writes now (O21), and forgets
    /// processes that have said nothing for a day.
    /// [`KeyOperator::live_versions`](super::KeyOperator::live_versions) shows it. A store that no
    /// operator looks at keeps nothing.
    async fn announce(&self, process: Uuid, versions: &[Versions]) -> Result<(), StoreError> {
        let _ = (process, versions);
        Ok(())
    }

    /// How much is open.
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
        outcome: &Outcome,
        retention: &Retention,
    ) -> impl Future<Output = Result<Fenced, StoreError>> + Send;

    /// Whether a transaction of the application's own is open on this connection (R23): fails where
    /// it has ended. A savepoint is set and released; outside a transaction its release fails, or
    /// on PostgreSQL setting it.
    ///
    /// # Errors
    /// [`StoreError::Fenced`]: it has ended, by COMMIT or by ROLLBACK. Else what the database said:
    /// it was not committed.
    fn stands(&mut self) -> impl Future<Output = Result<(), StoreError>> + Send;
}

/// Duty: outcomes in the transaction of the effects: a transactional operation.
#[async_trait]
pub trait Operations: Keys {
    /// Whether [`Self::begin_unseen`] asks for fewer steps than a look and a claim.
    fn claims_unseen(&self) -> bool {
        false
    }

    /// As [`Keys::find`], on a connection of its own, which is closed behind it: where a commit was
    /// lost sight of, neither the dead connections of a pool decide, nor those who stand in line
    /// for it (O29).
    async fn find_afresh(&self, identity: &Identity) -> Result<Look, StoreError>;

    /// Writes the record of a run as UNKNOWN where there is none (O1). [`Fenced::LostOwnership`]
    /// where there is one: look again.
    async fn insert_unknown(&self, claim: &KeyClaim) -> Result<Fenced, StoreError>;

    /// Begins a transactional operation, mode `same_tx`: the try-lock, then the claim, insert first
    /// (O15 steps 2 to 4). It never waits for another claim of the key; `patience` bounds the wait
    /// for a turn where there is one writer at a time (O18).
    ///
    /// # Errors
    /// [`StoreError::Refused`] for another mode. [`StoreError::Busy`]: the same again (R27).
    async fn begin_operation(
        &self,
        claim: &KeyClaim,
        basis: Basis<'_>,
        patience: Duration,
    ) -> Result<Begun<Box<dyn OperationTx>>, StoreError>;

    /// The look of O15 and [`Self::begin_operation`] on [`Basis::New`] in one statement, for a key
    /// that is probably new. In the same order: where it sees a record, it takes no lock and waits
    /// for nobody. None: a record stands there, or somebody holds the key; the transaction is
    /// rolled back and its connection given back. What this gives up on is looked for as ever, so
    /// an adapter may always refuse, which is what the default does.
    ///
    /// # Errors
    /// As [`Self::begin_operation`].
    async fn begin_unseen(&self, _claim: &KeyClaim) -> Result<Option<Box<dyn OperationTx>>, StoreError> {
        Ok(None)
    }

    /// Makes a run UNKNOWN that left no record of its own (O1): inserts it, or renews the record
    /// that it began from. Where another run has claimed since, nothing is changed.
    async fn stand_unknown(&self, claim: &KeyClaim, basis: Basis<'_>, patience: Duration) -> Result<(), StoreError> {
        {
            let seen = match basis {
                Basis::New => return self.insert_unknown(claim).await.map(drop),
                Basis::TakeOver(seen) | Basis::Reclaim(seen) | Basis::Late(seen) | Basis::Anew(seen) => seen,
            };
            match self.begin_operation(claim, basis, patience).await? {
                Begun::Claimed(mut tx) => {
                    let kept = Retention::default();
                    match tx.complete(Vec::new(), &Outcome::Unknown, &kept).await? {
                        Proof::Same => tx.commit().await,
                        Proof::Aborted | Proof::Ended => tx.rollback().await,
                    }
                }
                // Its time of being retried may be over by now, which renewing as this asks for.
                Begun::Existing(record) if record.epoch == seen.epoch => {
                    Err(StoreError::Busy(sqlx::Error::Protocol("the record stands as it was seen".into())))
                }
                Begun::Existing(_) => Ok(()),
                Begun::Locked => {
                    Err(StoreError::Busy(sqlx::Error::Protocol("another transaction holds the key".into())))
                }
            }
        }
    }

    /// Looks for the record of a run whose transaction was lost sight of, on fresh connections, for
    /// a second (O29). The record that the run began from, unchanged, is none of its own: nothing.
    async fn find_after_lost_commit(&self, claim: &KeyClaim, basis: Basis<'_>) -> doubt::Look {
        let before = match basis {
            Basis::New => None,
            Basis::TakeOver(seen) | Basis::Reclaim(seen) | Basis::Late(seen) | Basis::Anew(seen) => Some(seen.epoch),
        };
        {
            let deadline = tokio::time::Instant::now() + LOOK_AFTER;
            let mut seen = doubt::Look::NoAnswer;
            let mut pause = LOOK_AGAIN;
            loop {
                match tokio::time::timeout_at(deadline, self.find_afresh(&claim.identity)).await {
                    Ok(Ok(Look { record: Some(record), .. })) if Some(record.epoch) == before => {
                        seen = doubt::Look::Nothing;
                    }
                    Ok(Ok(Look { record: Some(record), .. })) if record.operation_id == claim.operation_id => {
                        return doubt::Look::Ours(record.state);
                    }
                    Ok(Ok(Look { record: Some(_), .. })) => return doubt::Look::Anothers,
                    // The commit may still be on its way.
                    Ok(Ok(Look { record: None, .. })) => seen = doubt::Look::Nothing,
                    Ok(Err(error)) => tracing::debug!(%error, "looking for a lost commit"),
                    Err(_) => return seen,
                }
                if tokio::time::Instant::now() + pause >= deadline {
                    return seen;
                }
                tokio::time::sleep(pause).await;
                pause *= 2;
            }
        }
    }
}

/// The transaction of a transactional operation: claim, effects, outcome. Dropped without commit,
/// it rolls back.
///
/// The proof (O1, R23): what is written as an outcome is written only in the transaction that holds
/// the claim. A handler that ended it by raw SQL, or swallowed an error that rolled it back, is
/// found out. Anything but [`Proof::Same`]: roll back, then [`Operations::find_after_lost_commit`]
/// and [`Doubt`](doubt::Doubt) say what follows.
#[async_trait]
pub trait OperationTx: Debug + Send {
    /// What is owned, if this commits.
    fn owned(&self) -> &Owned;

    /// The sqlx connection, inside the transaction: `tx.connection()` gives it with its type.
    fn any_connection(&mut self) -> &mut (dyn Any + Send);

    /// Takes back all effects since the claim, which stays: for a rejection that is to be
    /// remembered (pitfall 18). It also mends a transaction that a swallowed error aborted.
    async fn undo_effects(&mut self) -> Result<Proof, StoreError>;

    /// Where the transaction is not there any more after a transient failure, such as a
    /// deadlock by which the database itself may have ended it: whether it is proven that nothing
    /// was committed on the connection since the claim, but what may still be open and
    /// [`Self::rollback`] takes back. Then the unit may run again (R27).
    ///
    /// # Errors
    /// Nothing is proven.
    async fn nothing_committed(&mut self) -> Result<bool, StoreError> {
        Ok(false)
    }

    /// Writes the messages, in order, and the outcome, and keeps the answer. Once; after it,
    /// commit.
    ///
    /// # Errors
    /// Also that of a message. An error comes only of a transaction that is shown to be ours, or of
    /// a connection that is lost: roll back, and nothing is there.
    async fn complete(
        &mut self,
        messages: Vec<NewMessage>,
        outcome: &Outcome,
        retention: &Retention,
    ) -> Result<Proof, StoreError>;

    /// Commits.
    ///
    /// # Errors
    /// [`StoreError::CommitUnknown`] where the connection was lost:
    /// [`Operations::find_after_lost_commit`].
    async fn commit(self: Box<Self>) -> Result<(), StoreError>;

    /// Rolls back, explicitly; an error of it closes the connection.
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
