//! Duty: operations in phases: where each stands, who drives it, what was sent, what was
//! observed (O5 to O9, O22).
//!
//! The idempotency record of a phased operation has no lease of its own; the operation row has the
//! only one (O9). Every transaction of a phase moves the row from the point and epoch that it began
//! with, or changes nothing; the record's state is that of the operation's stage
//! ([`Stage::record`]), written in the same transaction.
//!
//! Evidence is the exception: it is appended by anybody at any time, because it is a fact (O8).
//!
//! A committed RECEIVED is an alarm, as a committed claim of a transactional operation is (O1): a
//! handler ended the transaction of its first phase, and what it did before may be done. Whoever
//! takes such an operation up parks it, and runs no phase. The same after a [`Proof`] other than
//! [`Proof::Same`] in a later phase: what the handler committed is there, and its point was not
//! moved; unless the proof is [`Proof::Aborted`], or [`PhaseTx::undo_effects`] then says so:
//! nothing was committed, and the phase has failed.
//!
//! Where nobody hears how a later phase ended (its connection was lost, its process died), its mark
//! tells: a row that the phase's transaction inserts when it begins, and deletes when it moves on.
//! So no committed transaction of ours leaves one, and one that is seen says that a run was
//! committed by somebody else ([`Phases::begin_run`]). While the server still has the other
//! transaction it says nothing, and nobody waits for that with a connection in hand. On SQLite no
//! commit but ours succeeds, and there is none. A handler that rolls back, writes on and commits
//! that by itself takes its own mark away: it is found out where the phase ends, and not where its
//! connection is lost before.
//!
//! Errors and cancel safety as in [`Keys`](super::Keys).
//!
//! Not here: what evidence proves ([`provider`](crate::policy::operation::provider)), which stage
//! follows which ([`flow`](crate::policy::operation::flow)), and encryption of the bytes.

#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
pub(super) mod stored;

use std::any::Any;
use std::fmt::Debug;
use std::time::Duration;

use async_trait::async_trait;
use uuid::Uuid;

use super::operations::{Begun, Fenced, KeyClaim, Operations, Outcome};
use super::{Basis, Proof, of_type};
use crate::error::StoreError;
use crate::policy::db_time::DbTime;
use crate::policy::operation::Identity;
use crate::policy::operation::flow::Stage;
use crate::policy::operation::retention::Retention;

/// The point that an operation stands at until its first phase is committed; `from` of the first
/// phase's end.
pub const FIRST_POINT: &str = "RECEIVED";

/// How the reason ends for which an operation is parked whose handler ended a phase's transaction.
pub(super) const ENDED: &str = "ended-its-transaction";

/// Bytes as they are stored: plain, or encrypted under the key of this id.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Sealed {
    /// The bytes as they are stored; the ciphertext where `kid` is set.
    pub bytes: Vec<u8>,
    /// The id of the key that encrypted them.
    pub kid: Option<String>,
}

/// What begins a phased operation.
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
    /// Until when somebody drives it. None if nobody does at `now`.
    pub lease_until: Option<DbTime>,
    /// How often it was driven in vain: given back so ([`Due::attempt`]), or left behind by a
    /// driver that died. A provider that is away counts none (G10).
    pub attempts: u32,
    /// When a worker may take it up.
    pub due_at: Option<DbTime>,
    /// Why only an operator can go on with it.
    pub parked: Option<String>,
    /// When the operation began, by database time.
    pub created_at: DbTime,
    /// When its outcome became known.
    pub outcome_at: Option<DbTime>,
    /// What was sent, by effect.
    pub intents: Vec<StoredIntent>,
    /// What was observed, oldest first.
    pub evidence: Vec<StoredEvidence>,
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
    /// Sends begun by anybody.
    pub sends: u32,
    /// `succeeded`, `failed` or `not-sent` once it is proven.
    pub outcome: Option<String>,
}

/// What was observed of an effect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewEvidence {
    /// The id of the operation that was observed.
    pub operation_id: Uuid,
    /// The name of the effect; empty where the evidence is of no single effect.
    pub effect: String,
    /// The epoch of the observer.
    pub epoch: i64,
    /// The send that it answers, from 1; 0 for what answers none.
    pub send: u32,
    /// `answer`, `query`, `error`, `operator` or `run`.
    pub kind: String,
    /// The word of a [`Verdict`](crate::policy::operation::provider::Verdict::word); of an operator
    /// `success`, `failure` or `waived`, of a run `success`, `failure`, `not-sent` or `indefinite`.
    pub verdict: String,
    /// The status of the provider's answer.
    pub status: Option<u16>,
    /// What was observed, as its reader wrote it; never a secret in plain.
    pub bytes: Sealed,
}

impl NewEvidence {
    /// Whether it is of a run that lost its lease, or an operator's of the run as a whole.
    pub(super) fn is_of_run(&self) -> bool {
        self.kind == "run" || (self.kind == "operator" && self.effect.is_empty())
    }

    /// Whether it asks to come again later, and says nothing else.
    pub(super) fn asks_to_wait(&self) -> bool {
        self.verdict == "wait"
    }
}

/// Evidence as it is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredEvidence {
    /// As it was written.
    pub evidence: NewEvidence,
    /// Database time of the row.
    pub at: DbTime,
}

/// What came of taking an operation up.
#[derive(Debug)]
pub enum Taken {
    /// It is ours, read after the epoch was raised.
    Driven(Driven, Box<StoredOperation>),
    /// Somebody drives it, or it is parked, or it has its outcome.
    Not(Box<StoredOperation>),
    /// There is no operation with this id.
    Missing,
}

impl Taken {
    /// From who took it, and what was read then.
    pub(super) fn of(driven: Option<Driven>, found: Option<StoredOperation>) -> Self {
        match (driven, found.map(Box::new)) {
            (_, None) => Self::Missing,
            (Some(driven), Some(found)) => Self::Driven(driven, found),
            (None, Some(found)) => Self::Not(found),
        }
    }
}

/// How an operation goes out of its driver's hands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leave<'a> {
    /// Due again then. Its stage stays.
    HandBack(Due),
    /// Stage and record become UNKNOWN, and it is due again then.
    Doubt(Due),
    /// Stage and record become UNKNOWN, and it waits for an operator, for this reason.
    Park(&'a str),
}

impl<'a> Leave<'a> {
    /// The stage that it gets, when it is due, and why it is parked.
    pub(super) fn columns(self) -> (Option<Stage>, Option<Due>, Option<&'a str>) {
        match self {
            Self::HandBack(due) => (None, Some(due), None),
            Self::Doubt(due) => (Some(Stage::Unknown), Some(due), None),
            Self::Park(reason) => (Some(Stage::Unknown), None, Some(reason)),
        }
    }

    /// Whether the reason says from now on what the mark of a phase said. For any other reason the
    /// mark stays: an operator who lets the operation go on has not heard of it.
    pub(super) fn takes_the_mark(self) -> bool {
        matches!(self, Self::Park(reason) if reason.ends_with(ENDED))
    }
}

/// What came of beginning a phase whose code is not ours.
#[derive(Debug)]
pub enum Run<T> {
    /// It runs in this transaction, which holds its mark.
    Begun(T),
    /// The mark of an earlier run stands: that run was committed, and not by us.
    Marked,
    /// The server still has an earlier run, as one whose connection was lost while a statement went
    /// on: what it comes to is not known yet.
    Unended,
    /// The operation is another driver's by now, or stands elsewhere: this run would be one too
    /// many.
    Overtaken,
}

/// How long after which attempt an operation is due again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Due {
    /// From now. None: when it was due before it was taken up.
    pub after: Option<Duration>,
    /// Whether this counts as an attempt.
    pub attempt: bool,
}

/// Refuses what a phase that moves on cannot lead to.
pub(super) fn may_advance(stage: Stage, intents: &[NewIntent]) -> Result<(), StoreError> {
    if stage.record().is_terminal() {
        return Err(StoreError::Refused(format!("a phase moves on to {}: that is an outcome", stage.as_str())));
    }
    if !intents.is_empty() && !stage.has_intents() {
        return Err(StoreError::Refused(format!("an intent at stage {}, which has none", stage.as_str())));
    }
    Ok(())
}

/// The stage that an outcome ends an operation at.
pub(super) fn end_stage(outcome: &Outcome) -> Result<Stage, StoreError> {
    match outcome {
        Outcome::Completed(_) => Ok(Stage::Succeeded),
        Outcome::FailedReplayable { .. } => Ok(Stage::Failed),
        Outcome::FailedRetryable { .. } | Outcome::Unknown => {
            Err(StoreError::Refused("an operation in phases ends with what it did, or with a failure".to_owned()))
        }
    }
}

/// What a phase says of an effect, until it is written.
#[derive(Debug, Default)]
pub(super) struct Settled(Vec<(String, &'static str)>);

impl Settled {
    /// Takes a word that the table knows.
    pub(super) fn add(&mut self, effect: &str, outcome: &str) -> Result<(), StoreError> {
        let known = ["succeeded", "failed", "not-sent"].into_iter().find(|word| *word == outcome);
        let known = known.ok_or_else(|| StoreError::Refused(format!("`{outcome}` is no outcome of an effect")))?;
        self.0.push((effect.to_owned(), known));
        Ok(())
    }

    /// The effects with what was said of each: `succeeded`, `failed` or `not-sent`.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &'static str)> {
        self.0.iter().map(|(effect, outcome)| (effect.as_str(), *outcome))
    }
}

/// An effect was to be settled that is not there.
pub(super) fn no_effect(effect: &str) -> StoreError {
    StoreError::Refused(format!("there is no effect `{effect}` to settle"))
}

/// Of an intent that the tables refused: the effect, or the key that its provider sees, is there
/// already (O5).
pub(super) fn twice(intent: &NewIntent) -> StoreError {
    StoreError::Refused(format!(
        "the effect `{}`, or its key at the adapter `{}`, is there already",
        intent.effect, intent.adapter
    ))
}

/// Why an operation is parked that cannot be read.
pub(super) fn unreadable(operation_id: Uuid, error: &StoreError) -> String {
    tracing::error!(operation = %operation_id, %error, "an operation cannot be read: it is left to an operator");
    format!("unreadable: {error}")
}

/// Whether the record came after its operation; one that is gone keeps nobody from leaving the
/// operation to others.
pub(super) fn follows(followed: Result<(), StoreError>) -> Result<(), StoreError> {
    match followed {
        Err(StoreError::Corrupt(error)) => {
            tracing::error!(%error, "an operation is left to others without its record");
            Ok(())
        }
        followed => followed,
    }
}

/// The record of an operation is not as its operation says.
pub(super) fn no_record(operation_id: Uuid) -> StoreError {
    StoreError::Corrupt(format!("the record of the operation {operation_id} is gone or has another outcome"))
}

impl std::fmt::Debug for Sealed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Sealed({} bytes, {:?})", self.bytes.len(), self.kid)
    }
}

/// Duty: operations in phases.
#[async_trait]
pub trait Phases: Operations {
    /// Begins the first phase: try-lock, claim and operation row (stage RECEIVED, driven by us) in
    /// one transaction, as [`Operations::begin_operation`] does for a transactional one. It stands
    /// at [`FIRST_POINT`]. What `basis` allows is as there; a record used anew gets a new
    /// operation, and what was kept of the old one goes.
    ///
    /// # Errors
    /// [`StoreError::Refused`] for a claim of another mode. [`StoreError::Busy`]: the same again
    /// (R27).
    async fn begin_first(
        &self,
        new: &NewOperation,
        basis: Basis<'_>,
        patience: Duration,
    ) -> Result<Begun<Box<dyn PhaseTx>>, StoreError>;

    /// Begins a later phase of an operation that is ours, in which no code but ours runs. The fence
    /// is compared when the phase moves on.
    ///
    /// # Errors
    /// [`StoreError::Fenced`] where there is no such operation any more.
    async fn begin_phase(&self, driven: &Driven) -> Result<Box<dyn PhaseTx>, StoreError>;

    /// Begins a later phase whose code is a handler's. Where the server still has another run of
    /// the operation's, as one whose connection was lost, or that of a driver before, it begins
    /// none, and holds no connection until that ends: it says so after a second at most (on SQLite,
    /// where one writes at a time, it waits its turn). Else it asks, under its mark, whether the
    /// operation is still at `point` in its epoch: a driver that stood still while another ran the
    /// phase begins none. Statements of the handler wait for locks as long as in any other phase.
    ///
    /// # Errors
    /// As in [`Self::begin_phase`].
    async fn begin_run(&self, driven: &Driven, point: &str) -> Result<Run<Box<dyn PhaseTx>>, StoreError>;

    /// Takes up an operation that nobody drives, due or not, by one fenced UPDATE that raises the
    /// epoch: of twenty that try, one wins. A parked one is not taken up. A lease that its driver
    /// let end counts as an attempt.
    async fn take_operation(&self, operation_id: Uuid, lease: Duration) -> Result<Taken, StoreError>;

    /// Takes up at most `limit` operations of a flow and these versions that are due and that
    /// nobody drives, the longest due first; in one transaction, and twenty workers get different
    /// ones. One that cannot be read is parked, with the reason, and the others are taken.
    async fn take_due(
        &self,
        flow: &str,
        versions: &[u32],
        limit: u32,
        lease: Duration,
    ) -> Result<Vec<(Driven, StoredOperation)>, StoreError> {
        self.take_due_but(flow, versions, limit, lease, &[]).await
    }

    /// As [`Phases::take_due`], and none of these tenants.
    async fn take_due_but(
        &self,
        flow: &str,
        versions: &[u32],
        limit: u32,
        lease: Duration,
        tenants: &[Vec<u8>],
    ) -> Result<Vec<(Driven, StoredOperation)>, StoreError>;

    /// Extends the lease, from now.
    async fn drive_on(&self, driven: &Driven, lease: Duration) -> Result<Fenced, StoreError>;

    /// Commits that another send of an effect begins, and gives its number. None: the operation is
    /// not ours any more or our lease is over, or the effect is settled or not there; send nothing.
    async fn begin_send(&self, driven: &Driven, effect: &str) -> Result<Option<u32>, StoreError>;

    /// Takes back that a send began, which is known not to have left us: its number is free again,
    /// and a provider that is away for a day leaves no row for each try. Only while it is the last
    /// one begun, and not the first, whose beginning is its intent. [`Fenced::LostOwnership`]:
    /// nothing was changed. After an error it may have been: then its number says nothing any more.
    async fn take_back_send(&self, driven: &Driven, effect: &str, send: u32) -> Result<Fenced, StoreError>;

    /// Appends evidence. Never fenced, always allowed (O8). Of the answers of an effect that ask to
    /// wait, which prove nothing, the last one stands for all.
    async fn observe(&self, evidence: &NewEvidence) -> Result<(), StoreError>;

    /// Gives an operation out of our hands.
    async fn leave(&self, driven: &Driven, leave: Leave<'_>) -> Result<Fenced, StoreError>;

    /// Gives the operation back as it stands, to be due again: [`Leave::HandBack`].
    async fn hand_back(&self, driven: &Driven, due: Due) -> Result<Fenced, StoreError> {
        self.leave(driven, Leave::HandBack(due)).await
    }

    /// Sets stage and record to UNKNOWN and makes it due again: [`Leave::Doubt`].
    async fn doubt(&self, driven: &Driven, due: Due) -> Result<Fenced, StoreError> {
        self.leave(driven, Leave::Doubt(due)).await
    }

    /// Sets stage and record to UNKNOWN and leaves it to an operator: [`Leave::Park`].
    async fn park(&self, driven: &Driven, reason: &str) -> Result<Fenced, StoreError> {
        self.leave(driven, Leave::Park(reason)).await
    }

    /// An operation with its intents and evidence.
    async fn operation(&self, operation_id: Uuid) -> Result<Option<StoredOperation>, StoreError>;

    /// Makes a parked operation due at once: proof came of what an operator was to find out (O8).
    /// It waits for a transaction that parks it just now, so who appended evidence before either is
    /// seen by that transaction or finds it parked. [`Fenced::LostOwnership`] where it is not
    /// parked.
    async fn unpark(&self, operation_id: Uuid) -> Result<Fenced, StoreError>;

    /// The id of this deployment; a clone of the database has it too, the configuration of the
    /// clone's services has not (O22).
    async fn deployment(&self) -> Result<Uuid, StoreError>;
}

/// The transaction of a phase. Dropped without commit, it rolls back.
///
/// As in a transactional operation, what moves the operation on is written only in the transaction
/// that began the phase: anything but [`Proof::Same`] from [`Self::advance`] or [`Self::finish`]:
/// roll back.
#[async_trait]
pub trait PhaseTx: Debug + Send {
    /// The operation that this phase belongs to, with the token and epoch of its driver.
    fn driven(&self) -> &Driven;

    /// The sqlx connection, inside the transaction: `tx.connection()` gives it with its type.
    fn any_connection(&mut self) -> &mut (dyn Any + Send);

    /// Takes back all effects of this phase; the claim of a first phase stays, and what
    /// [`Self::settle`] was told. [`Proof::Aborted`]: the transaction is not there any more, and it
    /// is proven that nothing was committed since it began, but what may still be open and
    /// [`Self::rollback`] takes back. It may be asked behind an [`Self::advance`] or a
    /// [`Self::finish`] that found no transaction.
    ///
    /// # Errors
    /// [`StoreError::Busy`]: the database itself has ended the transaction, as it does with a
    /// deadlock's victim, and nothing was committed: roll back, and run the phase again (O17, R27).
    async fn undo_effects(&mut self) -> Result<Proof, StoreError>;

    /// The evidence of the operation, read in this transaction: what decides is read where it is
    /// decided (O8).
    async fn evidence(&mut self) -> Result<Vec<StoredEvidence>, StoreError>;

    /// Records what is proven of an effect: `succeeded`, `failed` or `not-sent`. It is written when
    /// the phase moves on, under the same proof and fence.
    ///
    /// # Errors
    /// [`StoreError::Refused`] for another word.
    async fn settle(&mut self, effect: &str, outcome: &str) -> Result<(), StoreError>;

    /// Moves from point `from` to `to`, at this stage, with these intents (their first send counts
    /// as begun). Once; after it, commit. [`Fenced::LostOwnership`]: roll back. It means nothing
    /// where the proof is not [`Proof::Same`].
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
    /// SUCCEEDED for [`Outcome::Completed`], FAILED for [`Outcome::FailedReplayable`]. Once; after
    /// it, commit. The rest as in [`Self::advance`].
    ///
    /// # Errors
    /// [`StoreError::Refused`] for another outcome.
    async fn finish(
        &mut self,
        from: &str,
        outcome: &Outcome,
        retention: &Retention,
    ) -> Result<(Proof, Fenced), StoreError>;

    /// [`Leave::Park`], in this transaction. Its row is locked until the end: evidence that is read
    /// after this is all that came before. Once; after it, commit or roll back.
    async fn park(&mut self, reason: &str) -> Result<Fenced, StoreError>;

    /// Commits.
    ///
    /// # Errors
    /// [`StoreError::CommitUnknown`] where the connection was lost: read the operation.
    async fn commit(self: Box<Self>) -> Result<(), StoreError>;

    /// Rolls back, explicitly; an error of it closes the connection.
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
