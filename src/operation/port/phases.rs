//! Duty: operations in phases. For each operation the tables hold its point, its driver, what was
//! sent and what was observed (O5 to O9, O22).
//!
//! The idempotency record of a phased operation has no lease of its own; the operation row has the
//! only one (O9). The transaction of a phase moves the row only from the point and epoch that the
//! phase began with; otherwise it changes nothing. The same transaction sets the state of the
//! record to that of the new stage ([`Stage::record`]).
//!
//! Evidence is the exception: any process may append it at any time, because it is a fact (O8).
//!
//! A committed RECEIVED is an alarm, as a committed claim of a transactional operation is (O1): the
//! handler ended the transaction of the first phase, so its writes may be committed. A process that
//! takes up such an operation parks it and runs no phase. An operation is also parked after a
//! [`Proof`] other than [`Proof::Same`] in a later phase: the handler's writes are committed, but
//! the point was not moved. The exception is [`Proof::Aborted`], from the proof or from
//! [`PhaseTx::undo_effects`] after it: nothing was committed, and the phase has failed.
//!
//! Where the end of a later phase is not known (its connection was lost, or its process died), its
//! mark tells. The mark is a row that the transaction of the phase inserts when it begins and
//! deletes when it moves the operation on. So a transaction that we commit leaves no mark, and a
//! mark that can be read proves that a handler committed its run by itself ([`Phases::begin_run`]).
//! As long as the server still has the other transaction, nothing is known, and nothing waits for
//! its end with a connection in hand. SQLite has no marks, because no commit but ours succeeds
//! there. A handler that rolls back, writes again and commits by itself also removes its mark. That
//! is detected at the end of the phase, but not if the connection is lost before.
//!
//! Errors and cancel safety as in [`Keys`](super::Keys).
//!
//! Not here: what evidence proves ([`provider`](crate::operation::rules::provider)), the stages
//! ([`flow`](crate::operation::rules::flow)), and encryption of the bytes.

use std::any::Any;
use std::collections::BTreeSet;
use std::fmt::Debug;
use std::time::Duration;

use async_trait::async_trait;
use uuid::Uuid;

use crate::error::StoreError;
use crate::inbox::port::{Proof, of_type};
use crate::operation::port::evidence::{NewEvidence, Sealed, StoredEvidence};
use crate::operation::port::{Basis, Begun, Fenced, KeyClaim, Operations, RunOutcome};
use crate::operation::rules::Identity;
use crate::operation::rules::delivery::Delivery;
use crate::operation::rules::flow::Stage;
use crate::operation::rules::provider::{Settled, Verdict};
use crate::operation::rules::retention::Retention;
use crate::time::db_time::DbTime;

/// The point of an operation until its first phase is committed. The first phase gives it as `from`
/// when it ends.
pub const FIRST_POINT: &str = "RECEIVED";

/// An operation is parked with a reason that ends like this when its handler ended the transaction
/// of a phase.
pub(crate) const ENDED: &str = "ended-its-transaction";

/// The reason of an operation that is parked because the database refused to keep what a provider
/// said. It is the only copy.
pub(crate) fn unstored(effect: &str, send: u32, verdict: Verdict, status: Option<u16>) -> String {
    let status = status.map(|status| format!(" {status}")).unwrap_or_default();
    format!("{UNSTORED}{effect} send {send}: {}{status}", verdict.name())
}

const UNSTORED: &str = "evidence-not-stored: ";

/// The values that a phased operation begins with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewOperation {
    /// The claim of the key, of mode `phased`. Its lease is that of the operation row.
    pub claim: KeyClaim,
    /// The name under which its phases are registered.
    pub flow: String,
    /// The version of its phases.
    pub flow_version: u32,
    /// The canonical command that the operation carries out, plain or encrypted.
    pub command: Sealed,
}

/// A phased operation that this process drives. Epoch and token fence everything but evidence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Driven {
    /// The id of the operation that is driven.
    pub operation_id: Uuid,
    /// The token of this driver.
    pub owner: Uuid,
    /// The epoch that it raised.
    pub epoch: i64,
}

/// A phased operation as it is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredOperation {
    /// Database time of the read.
    pub now: DbTime,
    /// The id of the operation.
    pub operation_id: Uuid,
    /// The identity of its record. None if the record is gone.
    pub identity: Option<Identity>,
    /// The name under which its phases are registered.
    pub flow: String,
    /// The version of its phases.
    pub flow_version: u32,
    /// The recovery point reached last.
    pub point: String,
    /// The stage of that point.
    pub stage: Stage,
    /// The canonical command that the operation carries out, plain or encrypted.
    pub command: Sealed,
    /// Raised when a driver or an operator takes the operation; fenced writes compare it.
    pub epoch: i64,
    /// The end of its driver's lease. None if no process drives it at `now`.
    pub lease_until: Option<DbTime>,
    /// How many attempts to drive it failed: its driver gave it back and counted one
    /// ([`Due::attempt`]), or died. A provider that is away counts none (G10).
    pub attempts: u32,
    /// When a worker may take it up.
    pub due_at: Option<DbTime>,
    /// Why only an operator can go on with it.
    pub parked: Option<String>,
    /// When the operation began, by database time.
    pub created_at: DbTime,
    /// When its outcome became known.
    pub outcome_at: Option<DbTime>,
    /// Its intents, in the order of their first sends.
    pub intents: Vec<StoredIntent>,
    /// What was observed, oldest first.
    pub evidence: Vec<StoredEvidence>,
}

impl StoredOperation {
    /// The effect and the verdict in the reason of its parking, where [`unstored`] wrote them: no
    /// row of evidence has them.
    pub(crate) fn unstored(&self) -> Option<(&str, Verdict)> {
        let said = self.parked.as_deref()?.strip_prefix(UNSTORED)?;
        let (send, verdict) = said.rsplit_once(": ")?;
        let (effect, _) = send.rsplit_once(" send ")?;
        let name = verdict.split(' ').next()?;
        Some((effect, Verdict::from_row(name, Duration::ZERO)?))
    }

    /// How the first effect stands, of an operation that sends a webhook or an e-mail; `None`
    /// before its intent.
    #[must_use]
    pub fn delivery(&self) -> Option<Delivery> {
        let intent = self.intents.first()?;
        let of_it = self.evidence.iter().filter(|row| row.evidence.effect == intent.intent.effect);
        // A row that was written twice counts once.
        let not_sent: BTreeSet<u32> =
            of_it.filter(|row| row.evidence.verdict == "not-sent").map(|row| row.evidence.send).collect();
        let not_sent = u32::try_from(not_sent.len()).unwrap_or(u32::MAX);
        // An operator who ends the operation leaves its effect without an outcome of its own.
        let settled = intent.settled().or((self.stage == Stage::Succeeded).then_some(Settled::Succeeded));
        let given_up = self.parked.is_some() || self.stage == Stage::Failed;
        Some(Delivery::of(settled, given_up, intent.sends.saturating_sub(not_sent)))
    }
}

/// An effect that is committed before its first send (O5).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewIntent {
    /// The name of the effect within its operation.
    pub effect: String,
    /// How its provider is asked: `key`, `query`, `key_and_query`, `none` or `repeatable`.
    pub strategy: String,
    /// The key that the provider sees; it never changes.
    pub provider_key: String,
    /// The exact bytes that are sent, each time.
    pub request: Sealed,
    /// Which adapter made them.
    pub adapter: String,
    /// The version of the adapter that made the bytes of the request.
    pub adapter_version: u32,
    /// The effect of the same operation that this one takes back.
    pub undoes: Option<String>,
}

/// An intent as it is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredIntent {
    /// As it was committed.
    pub intent: NewIntent,
    /// Database time of its first send.
    pub first_sent_at: DbTime,
    /// Database time of its last send.
    pub last_sent_at: DbTime,
    /// How many sends have begun, by any driver.
    pub sends: u32,
    /// `succeeded` or `failed` once it is proven.
    pub outcome: Option<String>,
}

impl StoredIntent {
    /// What is proven of the effect; none while it is open.
    pub(crate) fn settled(&self) -> Option<Settled> {
        let outcome = self.outcome.as_deref()?;
        Some(if outcome == Settled::Succeeded.as_str() { Settled::Succeeded } else { Settled::Failed })
    }
}

/// The result of `Phases::take_operation`.
#[derive(Debug)]
pub enum Taken {
    /// This process drives it; it was read after the epoch was raised.
    Driven(Driven, Box<StoredOperation>),
    /// Another process drives it, or it is parked, or it has its outcome.
    Not(Box<StoredOperation>),
    /// There is no operation with this id.
    Missing,
}

impl Taken {
    /// Builds the result from the driver, where it was taken, and from what was read after that.
    pub(crate) fn of(driven: Option<Driven>, found: Option<StoredOperation>) -> Self {
        match (driven, found.map(Box::new)) {
            (_, None) => Self::Missing,
            (Some(driven), Some(found)) => Self::Driven(driven, found),
            (None, Some(found)) => Self::Not(found),
        }
    }
}

/// How a driver gives up an operation that has not ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leave<'a> {
    /// It is due again at that time. Its stage stays.
    HandBack(Due),
    /// Stage and record become UNKNOWN, and it is due again at that time.
    Doubt(Due),
    /// Stage and record become UNKNOWN, and it waits for an operator, for this reason.
    Park(&'a str),
}

impl<'a> Leave<'a> {
    /// The new stage (none: it stays), when it is due again, and the reason for which it is parked.
    pub(crate) fn columns(self) -> (Option<Stage>, Option<Due>, Option<&'a str>) {
        match self {
            Self::HandBack(due) => (None, Some(due), None),
            Self::Doubt(due) => (Some(Stage::Unknown), Some(due), None),
            Self::Park(reason) => (Some(Stage::Unknown), None, Some(reason)),
        }
    }

    /// Whether the mark of the phase is deleted: the reason now tells the operator what the mark
    /// told. With any other reason the mark stays, because an operator who lets the operation go on
    /// does not know of it.
    pub(crate) fn takes_the_mark(self) -> bool {
        matches!(self, Self::Park(reason) if reason.ends_with(ENDED))
    }
}

/// The result of `Phases::begin_run`, which begins a phase with a handler's code.
#[derive(Debug)]
pub enum Run<T> {
    /// It runs in this transaction, which holds its mark.
    Begun(T),
    /// The mark of an earlier run is there: a handler committed that run by itself.
    Marked,
    /// The server still has the transaction of an earlier run, for example because its connection
    /// was lost while a statement ran. How it ends is not known yet.
    Unended,
    /// Another driver has the operation by now, or it is at another point: the phase must not run
    /// again.
    Overtaken,
}

/// When an operation is due again, and whether an attempt is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Due {
    /// From now. None: when it was due before it was taken up.
    pub after: Option<Duration>,
    /// Whether this counts as an attempt.
    pub attempt: bool,
}

/// Refuses a stage that is an outcome, and intents at a stage that has none.
pub(crate) fn may_advance(stage: Stage, intents: &[NewIntent]) -> Result<(), StoreError> {
    if stage.record().is_terminal() {
        return Err(StoreError::Refused(format!("a phase moves on to {}: that is an outcome", stage.as_str())));
    }
    if !intents.is_empty() && !stage.has_intents() {
        return Err(StoreError::Refused(format!("an intent at stage {}, which has none", stage.as_str())));
    }
    Ok(())
}

/// The stage that an outcome ends an operation at.
pub(crate) fn end_stage(outcome: &RunOutcome) -> Result<Stage, StoreError> {
    match outcome {
        RunOutcome::Completed(_) => Ok(Stage::Succeeded),
        RunOutcome::FailedReplayable { .. } => Ok(Stage::Failed),
        RunOutcome::FailedRetryable { .. } | RunOutcome::Unknown => {
            Err(StoreError::Refused("an operation in phases ends with what it did, or with a failure".to_owned()))
        }
    }
}

/// The error for an intent that breaks a unique key: the effect, or the key that its provider sees,
/// is there already (O5).
pub(crate) fn twice(intent: &NewIntent) -> StoreError {
    StoreError::Refused(format!(
        "the effect `{}`, or its key at the adapter `{}`, is there already",
        intent.effect, intent.adapter
    ))
}

/// Logs that an operation cannot be read, and returns the reason for which it is parked.
pub(crate) fn unreadable(operation_id: Uuid, error: &StoreError) -> String {
    tracing::error!(operation = %operation_id, %error, "an operation cannot be read: it is left to an operator");
    format!("unreadable: {error}")
}

/// Ignores, after logging it, that the record of an operation is gone: its driver can give the
/// operation up all the same. Other errors are returned.
pub(crate) fn follows(followed: Result<(), StoreError>) -> Result<(), StoreError> {
    match followed {
        Err(StoreError::Corrupt(error)) => {
            tracing::error!(%error, "an operation is left to others without its record");
            Ok(())
        }
        followed => followed,
    }
}

/// The error where the record of an operation is gone or has another outcome.
pub(crate) fn no_record(operation_id: Uuid) -> StoreError {
    StoreError::Corrupt(format!("the record of the operation {operation_id} is gone or has another outcome"))
}

/// Duty: operations in phases.
#[async_trait]
pub trait Phases: Operations {
    /// Begins the first phase: try-lock, claim and operation row (stage RECEIVED, driven by us) in
    /// one transaction, as [`Operations::begin_operation`] does for a transactional one. The
    /// operation is at [`FIRST_POINT`]. `basis` means the same as there. A record that is used anew
    /// gets a new operation, and what was kept of the old one is deleted, unless it has a conflict
    /// that nobody has judged.
    ///
    /// # Errors
    /// [`StoreError::Refused`] for a claim of another mode. [`StoreError::Busy`]: a transient
    /// error; repeat the call (R27).
    async fn begin_first(
        &self,
        new: &NewOperation,
        basis: Basis<'_>,
        patience: Duration,
    ) -> Result<Begun<Box<dyn PhaseTx>>, StoreError>;

    /// Begins a later phase of an operation that this process drives, in which no handler runs. The
    /// fence is compared when the phase moves on.
    ///
    /// # Errors
    /// [`StoreError::Fenced`] where there is no such operation any more.
    async fn begin_phase(&self, driven: &Driven) -> Result<Box<dyn PhaseTx>, StoreError>;

    /// Begins a later phase whose code is a handler's. Where the server still has the transaction
    /// of another run of this operation (one whose connection was lost, or one of an earlier
    /// driver), it returns `Run::Unended` after a second at most and holds no connection. On
    /// SQLite, with one writer at a time, it waits for its turn. Otherwise it inserts its mark, and
    /// checks that the operation is still at `point` in its epoch. A driver that was frozen while
    /// another one ran the phase gets `Run::Overtaken`. Statements of the handler wait for locks
    /// as long as in any other phase.
    ///
    /// # Errors
    /// As in [`Self::begin_phase`].
    async fn begin_run(&self, driven: &Driven, point: &str) -> Result<Run<Box<dyn PhaseTx>>, StoreError>;

    /// Takes up an operation that no process drives, due or not: raises its epoch under the lock of
    /// its row, so of twenty processes that try, one wins. A parked operation is not taken up. A
    /// lease that ended while its driver had the operation counts as an attempt.
    async fn take_operation(&self, operation_id: Uuid, lease: Duration) -> Result<Taken, StoreError>;

    /// Takes up at most `limit` operations of a flow, in these versions, that are due and that no
    /// process drives, the longest due first, but none of the tenants in `but`. It does so in one
    /// transaction, and twenty workers get different operations. An operation that cannot be read
    /// is parked with the reason, and the others are taken.
    async fn take_due(
        &self,
        flow: &str,
        versions: &[u32],
        limit: u32,
        lease: Duration,
        but: &[Vec<u8>],
    ) -> Result<Vec<(Driven, StoredOperation)>, StoreError>;

    /// Extends the lease, from now.
    async fn drive_on(&self, driven: &Driven, lease: Duration) -> Result<Fenced, StoreError>;

    /// Commits that another send of an effect begins, and returns its number. None: this process no
    /// longer drives the operation, or its lease is over, or the effect is settled or does not
    /// exist. Then send nothing.
    async fn begin_send(&self, driven: &Driven, effect: &str) -> Result<Option<u32>, StoreError>;

    /// Takes back the beginning of a send that is known not to have left this process. Its number
    /// is free again, so a provider that is away for a day does not leave a row for each try. Only
    /// the send that began last can be taken back, and never the first, because the intent itself
    /// is its beginning. [`Fenced::LostOwnership`]: nothing was changed. After an error the number
    /// may or may not be taken back: rely on it no more.
    async fn take_back_send(&self, driven: &Driven, effect: &str, send: u32) -> Result<Fenced, StoreError>;

    /// Appends evidence. Never fenced, always allowed (O8). Of the answers of an effect that only
    /// ask to wait, and so prove nothing, only the last one is kept.
    async fn observe(&self, evidence: &NewEvidence) -> Result<(), StoreError>;

    /// Gives up an operation that this process drives, in one of the ways of `Leave`.
    async fn leave(&self, driven: &Driven, leave: Leave<'_>) -> Result<Fenced, StoreError>;

    /// Gives the operation back without a change of its stage, to be due again:
    /// [`Leave::HandBack`].
    async fn hand_back(&self, driven: &Driven, due: Due) -> Result<Fenced, StoreError> {
        self.leave(driven, Leave::HandBack(due)).await
    }

    /// Sets stage and record to UNKNOWN and leaves it to an operator: [`Leave::Park`].
    async fn park(&self, driven: &Driven, reason: &str) -> Result<Fenced, StoreError> {
        self.leave(driven, Leave::Park(reason)).await
    }

    /// An operation with its intents and evidence.
    async fn operation(&self, operation_id: Uuid) -> Result<Option<StoredOperation>, StoreError>;

    /// Makes a parked operation due at once, because evidence arrived that may prove what an
    /// operator was to find out (O8). It waits for a transaction that is parking the operation. So
    /// evidence that was appended before this call is either read by that transaction, or this call
    /// finds the operation parked. [`Fenced::LostOwnership`] where it is not parked.
    async fn unpark(&self, operation_id: Uuid) -> Result<Fenced, StoreError>;

    /// The id of this deployment. A clone of the database has the same id, but the configuration of
    /// the clone's services does not (O22).
    async fn deployment(&self) -> Result<Uuid, StoreError>;
}

/// The transaction of a phase. Dropped without commit, it rolls back.
///
/// As in a transactional operation, the operation is moved on only in the transaction that began
/// the phase. Roll back where [`Self::advance`] or [`Self::finish`] returns anything but
/// [`Proof::Same`].
#[async_trait]
pub trait PhaseTx: Debug + Send {
    /// The operation that this phase belongs to, with the token and epoch of its driver.
    fn driven(&self) -> &Driven;

    /// The sqlx connection, inside the transaction: `tx.connection()` gives it with its type.
    fn any_connection(&mut self) -> &mut (dyn Any + Send);

    /// Takes back all writes of this phase. The claim of a first phase stays, and so does what was
    /// given to [`Self::settle`]. [`Proof::Aborted`]: the transaction no longer exists, and it is
    /// proven that nothing was committed since it began. Something may still be open:
    /// [`Self::rollback`] takes it back. It may be called after an [`Self::advance`] or a
    /// [`Self::finish`] that found no transaction.
    ///
    /// # Errors
    /// [`StoreError::Busy`]: the database itself has ended the transaction, as it does with the
    /// victim of a deadlock, and nothing was committed. Roll back, and run the phase again (O17,
    /// R27).
    async fn undo_effects(&mut self) -> Result<Proof, StoreError>;

    /// The evidence of the operation, read in this transaction: the transaction that decides also
    /// reads what it decides from (O8).
    async fn evidence(&mut self) -> Result<Vec<StoredEvidence>, StoreError>;

    /// Records what is proven of an effect. It is written when the phase moves on, under the same
    /// proof and fence.
    fn settle(&mut self, effect: &str, settled: Settled);

    /// Moves from point `from` to `to`, at this stage, with these intents (their first send counts
    /// as begun). Call it once, then commit. [`Fenced::LostOwnership`]: roll back. The `Fenced`
    /// has a meaning only where the proof is [`Proof::Same`].
    ///
    /// # Errors
    /// [`StoreError::Refused`]: an outcome ([`Self::finish`] writes those); intents at a stage that
    /// has none; an effect or provider key that is there already; an effect settled that is not
    /// there. Roll back.
    async fn advance(
        &mut self,
        from: &str,
        to: &str,
        stage: Stage,
        intents: &[NewIntent],
    ) -> Result<(Proof, Fenced), StoreError>;

    /// Writes the outcome to operation and record, both with their lifetimes from now (O3):
    /// SUCCEEDED for [`RunOutcome::Completed`], FAILED for [`RunOutcome::FailedReplayable`]. Call
    /// it once, then commit. Everything else is as in [`Self::advance`].
    ///
    /// # Errors
    /// [`StoreError::Refused`] for another outcome.
    async fn finish(
        &mut self,
        from: &str,
        outcome: &RunOutcome,
        retention: &Retention,
    ) -> Result<(Proof, Fenced), StoreError>;

    /// [`Leave::Park`], in this transaction. The row of the operation stays locked until the
    /// transaction ends: evidence that is read after this call includes everything that was
    /// appended before it. Call it once, then commit or roll back.
    async fn park(&mut self, reason: &str) -> Result<Fenced, StoreError>;

    /// Commits.
    ///
    /// # Errors
    /// [`StoreError::CommitUnknown`] where the connection was lost: read the operation again.
    async fn commit(self: Box<Self>) -> Result<(), StoreError>;

    /// Rolls back. If that fails, the connection is closed.
    async fn rollback(self: Box<Self>) -> Result<(), StoreError>;
}

impl dyn PhaseTx + '_ {
    /// The sqlx connection, inside the transaction: what handlers write through.
    ///
    /// # Errors
    /// [`StoreError::Refused`] where it is a connection of another kind of database.
    pub fn connection<C: Any>(&mut self) -> Result<&mut C, StoreError> {
        of_type(self.any_connection())
    }
}
