//! Stores operations in phases, on every database: takes them up, moves them on, keeps what was
//! sent and observed, and gives them up.
//!
//! Guarantees: of many processes that take an operation up, one raises its epoch, under the lock of
//! its row. A phase moves its operation on only in the transaction that it began in, and from the
//! point and epoch that it began with (O1, O9). Record and operation change together.
//!
//! Not here, but in the folder of each database ([`PhaseStore`], [`HeldPhase`]): the claim of the
//! record; the mark of a run; and the proof that a transaction is still the one that began.

mod stored;
mod tx;

use std::any::Any;
use std::fmt::Debug;
use std::time::Duration;

use async_trait::async_trait;
use uuid::Uuid;

use self::stored::{intent_of, operation_of};
use self::tx::SqlPhaseTx;
pub(super) use self::tx::{fence_of, same_times};
use super::records::run_locked;
use super::{Session, SqlStore, Statement, Transaction, evidence, sql};
use crate::error::StoreError;
use crate::inbox::port::Proof;
use crate::operation::port::evidence::NewEvidence;
use crate::operation::port::phases::{
    Driven, Leave, NewOperation, PhaseTx, Phases, Run, StoredOperation, Taken, follows, no_record, unreadable,
};
use crate::operation::port::{Basis, Begun, Fenced, KeyClaim, Operations, Owned, RecordFence, RunOutcome};
use crate::operation::rules::Mode;
use crate::operation::rules::flow::Stage;
use crate::operation::rules::retention::Retention;

/// The part of operations in phases that each database implements itself.
#[async_trait]
pub(in crate::store) trait PhaseStore: SqlStore {
    /// Claims the record of a first phase, as for a transactional operation.
    async fn stake(
        &self,
        claim: &KeyClaim,
        basis: Basis<'_>,
        owned: &Owned,
        patience: Duration,
    ) -> Result<Begun<Box<dyn HeldPhase>>, StoreError>;

    /// Begins the transaction of a later phase in which no handler runs.
    async fn begin_held(&self) -> Result<Box<dyn HeldPhase>, StoreError>;

    /// Begins the transaction of a later phase whose code is a handler's. It holds the mark of the
    /// run, where the database has marks.
    async fn begin_marked(&self, driven: &Driven) -> Result<Run<Box<dyn HeldPhase>>, StoreError>;
}

/// The transaction of a phase, as its database holds it. Dropped without commit, it rolls back.
#[async_trait]
pub(in crate::store) trait HeldPhase: Debug + Send {
    /// The connection, for statements of ours.
    fn session(&mut self) -> &mut dyn Session;

    /// The sqlx connection, for statements of a handler.
    fn lend(&mut self) -> &mut (dyn Any + Send);

    /// Prepares the connection for the handler: sets the savepoint to which effects are taken back,
    /// and the lock timeout that handlers were promised.
    async fn hold(&mut self) -> Result<(), StoreError>;

    /// Takes effects back, as [`PhaseTx::undo_effects`] says.
    async fn undo(&mut self) -> Result<Proof, StoreError>;

    /// Proves, before the operation is moved on, that this is still the transaction that began. A
    /// database that compares [`Self::token`] in the statement that moves the operation runs no
    /// statement here.
    async fn prove(&mut self) -> Result<Proof, StoreError>;

    /// The id of the transaction, which the statement that moves the operation compares as `:token`
    /// where the database has one.
    fn token(&self) -> Option<&str> {
        None
    }

    /// Called where the statement that moves the operation changed no row, or failed with this
    /// error. Returns whether the transaction is still ours. If it is, and the statement failed,
    /// returns the given error. A database without a token learns nothing new here:
    /// [`Self::prove`] has looked before.
    async fn judge(&mut self, failed: Option<StoreError>) -> Result<Proof, StoreError> {
        failed.map_or(Ok(Proof::Same), Err)
    }

    /// Writes the outcome to the record, if the fence holds.
    async fn end_record(
        &mut self,
        record: &RecordFence,
        outcome: &RunOutcome,
        retention: &Retention,
    ) -> Result<Fenced, StoreError>;

    /// The transaction, to end it.
    fn into_transaction(self: Box<Self>) -> Box<dyn Transaction>;
}

/// An operation with its columns in the order of [`operation_of`].
pub(in crate::store) const OPERATION: &str = "\
    select {micros n.at}, o.operation_id, r.tenant, r.operation, r.{key}, o.flow, o.flow_version, o.point, o.state, \
       o.command, o.command_kid, o.epoch, \
       case when o.lease_until > n.at and o.lease_until <= n.at + {lease of o} then {micros o.lease_until} end, \
       o.attempts, {micros o.due_at}, o.parked, {micros o.created_at}, {micros o.outcome_at} \
      from (select {clock} as at) n join oncebox.operation o on o.operation_id = :id \
      left join oncebox.idempotency_request r on r.key_digest = o.key_digest \
       and {pg: r.operation_id is not distinct from o.operation_id}{my lite: r.operation_id = o.operation_id}";

/// The intents of an operation, with their columns in the order of [`intent_of`].
pub(in crate::store) const INTENTS: &str = "\
    select effect, strategy, provider_key, request, request_kid, adapter, adapter_version, {micros first_sent_at}, \
       {micros last_sent_at}, sends, outcome, undoes \
      from oncebox.operation_intent where operation_id = :id order by first_sent_at, effect";

/// No process drives the operation, and one may take it up.
macro_rules! is_free {
    () => {
        "o.parked is null and o.outcome_at is null and (o.owner is null or {piece lease is over})"
    };
}

/// The fence of every statement of a driver. A parked operation has no owner, and neither has one
/// with an outcome.
macro_rules! is_ours {
    () => {
        "o.operation_id = :id and o.epoch = :epoch and o.owner = :owner"
    };
}
use is_ours;

/// The row is locked by a statement of its own. On MySQL a statement that waited for a lock still
/// uses the time at which it began, so a lease granted meanwhile would seem to end later than it
/// can (R22). On PostgreSQL the next statement sees what the other transaction committed.
const LOCK: &str = "select o.epoch from oncebox.operation o where o.operation_id = :id {lock}";

/// Operations that are due, the longest due first. With `locks` it locks their rows, and skips
/// those of which another transaction has the lock. The statement that takes a row checks its
/// conditions again.
const DUE: &str = concat!(
    "select o.operation_id, o.epoch from oncebox.operation o {my: force index (operation_due)} \
      where o.flow = :flow and o.due_at <= {now} and o.flow_version {in ints :versions} and ",
    is_free!(),
    " {if tenants: and not (coalesce((select r.tenant from oncebox.idempotency_request r \
        where r.key_digest = o.key_digest), {pg my: ''}{lite: x''}) {in bytes :tenants})} \
      order by o.due_at limit :limit {if locks: {lock free}}"
);

/// Takes up a free operation. Where an owner is still named, its lease ended under it, which counts
/// as an attempt. `attempts` is set first, because it needs the old owner: MySQL sets from left to
/// right.
pub(in crate::store) const TAKE: &str = concat!(
    "update oncebox.operation as o set attempts = o.attempts + case when o.owner is not null then 1 else 0 end, \
       epoch = o.epoch + 1, owner = :owner, lease_until = {clock} + {span :lease}, {lease} = {lease :lease}, \
       updated_at = {clock} where o.operation_id = :id and ",
    is_free!()
);

const DRIVE_ON: &str = concat!(
    "update oncebox.operation as o set lease_until = {clock} + {span :lease}, {lease} = {lease :lease}, \
       updated_at = {clock} where ",
    is_ours!()
);

/// Gives up an operation. Without `:after` it is due when it was due before; parked it is not due.
const LEAVE: &str = concat!(
    "update oncebox.operation as o set state = coalesce(:state, o.state), owner = null, lease_until = null, \
       {lease} = null, attempts = o.attempts + :attempts, parked = :parked, updated_at = {clock}, \
       due_at = case when :parked is null then coalesce({clock} + {span :after}, o.due_at) end where ",
    is_ours!()
);

/// Counts a send, only while the driver's lease stands: a driver that lost it must send nothing.
const BEGIN_SEND: &str = concat!(
    "update oncebox.operation_intent as i set sends = i.sends + 1, \
       last_sent_at = {greatest}(i.last_sent_at, {clock}) \
     where i.operation_id = :id and i.effect = :effect and i.outcome is null \
       and exists (select 1 from oncebox.operation o where ",
    is_ours!(),
    " and o.lease_until > {clock} and o.lease_until <= {clock} + {lease of o})"
);

const SENDS: &str = "select sends from oncebox.operation_intent where operation_id = :id and effect = :effect";

/// Takes back the last send, but never the first, which began with the intent.
const TAKE_BACK_SEND: &str = concat!(
    "update oncebox.operation_intent as i set sends = i.sends - 1 \
     where i.operation_id = :id and i.effect = :effect and i.outcome is null and i.sends = :send and i.sends > 1 \
       and exists (select 1 from oncebox.operation o where ",
    is_ours!(),
    ")"
);

const UNPARK: &str = "update oncebox.operation set parked = null, due_at = {clock}, updated_at = {clock} \
    where operation_id = :id and parked is not null";

/// Deletes the mark of a run. On SQLite a run has none.
const UNMARK: &str = "{pg my: delete from oncebox.operation_phase where operation_id = :id}";

/// Most steps keep the state of the record. Then its row keeps its time too, because a new one
/// costs entries of indexes. `updated_at` first: MySQL sets from left to right.
const FOLLOW: &str = "update oncebox.idempotency_request as r \
    set updated_at = case when r.state = :state then r.updated_at else {clock} end, state = :state \
    where r.key_digest = (select o.key_digest from oncebox.operation o where o.operation_id = :id) \
      and r.operation_id = :id and r.mode = 'phased' and r.outcome_at is null";

#[async_trait]
impl<S: PhaseStore + Operations> Phases for S {
    async fn begin_first(
        &self,
        new: &NewOperation,
        basis: Basis<'_>,
        patience: Duration,
    ) -> Result<Begun<Box<dyn PhaseTx>>, StoreError> {
        new.claim.requires(&[Mode::Phased])?;
        tx::begin_first(self, new, basis, patience).await
    }

    async fn begin_phase(&self, driven: &Driven) -> Result<Box<dyn PhaseTx>, StoreError> {
        Ok(Box::new(SqlPhaseTx::later(self.begin_held().await?, driven).await?))
    }

    async fn begin_run(&self, driven: &Driven, point: &str) -> Result<Run<Box<dyn PhaseTx>>, StoreError> {
        match self.begin_marked(driven).await? {
            Run::Begun(held) => SqlPhaseTx::run(held, driven, point).await,
            Run::Marked => Ok(Run::Marked),
            Run::Unended => Ok(Run::Unended),
            Run::Overtaken => Ok(Run::Overtaken),
        }
    }

    async fn take_operation(&self, operation_id: Uuid, lease: Duration) -> Result<Taken, StoreError> {
        let mut transaction = self.begin_sql().await?;
        let session = transaction.session();
        let driven = match lock(session, operation_id).await? {
            Some(epoch) => take(session, operation_id, epoch, lease).await?,
            None => None,
        };
        let found = read(session, operation_id).await?;
        transaction.commit().await?;
        Ok(Taken::of(driven, found))
    }

    async fn take_due(
        &self,
        flow: &str,
        versions: &[u32],
        limit: u32,
        lease: Duration,
        but: &[Vec<u8>],
    ) -> Result<Vec<(Driven, StoredOperation)>, StoreError> {
        // Most polls find nothing, and one statement without a transaction is enough for them.
        if self.reader().await?.rows(due(flow, versions, 1, but)).await?.is_empty() {
            return Ok(Vec::new());
        }
        take_due(self, due(flow, versions, limit, but).bind("locks", true), lease).await
    }

    async fn drive_on(&self, driven: &Driven, lease: Duration) -> Result<Fenced, StoreError> {
        Ok(Fenced::rows(self.run_alone(ours(DRIVE_ON, driven).bind("lease", lease)).await?))
    }

    async fn begin_send(&self, driven: &Driven, effect: &str) -> Result<Option<u32>, StoreError> {
        let mut transaction = self.begin_sql().await?;
        let session = transaction.session();
        lock(session, driven.operation_id).await?;
        let mut send = None;
        if session.run(ours(BEGIN_SEND, driven).bind("effect", effect)).await? == 1 {
            let sends = sql(SENDS).bind("id", driven.operation_id).bind("effect", effect);
            send = Some(session.one(sends).await?);
        }
        transaction.commit().await?;
        Ok(send)
    }

    async fn take_back_send(&self, driven: &Driven, effect: &str, send: u32) -> Result<Fenced, StoreError> {
        let back = ours(TAKE_BACK_SEND, driven).bind("effect", effect).bind("send", send);
        run_locked(self, locking(driven.operation_id), back).await
    }

    async fn observe(&self, evidence: &NewEvidence) -> Result<(), StoreError> {
        evidence::observe(self, evidence).await
    }

    async fn leave(&self, driven: &Driven, leave: Leave<'_>) -> Result<Fenced, StoreError> {
        let mut transaction = self.begin_sql().await?;
        let fenced = leave_in(transaction.session(), driven, leave).await?;
        transaction.commit().await?;
        Ok(fenced)
    }

    async fn operation(&self, operation_id: Uuid) -> Result<Option<StoredOperation>, StoreError> {
        read(&mut *self.reader().await?, operation_id).await
    }

    async fn unpark(&self, operation_id: Uuid) -> Result<Fenced, StoreError> {
        run_locked(self, locking(operation_id), sql(UNPARK).bind("id", operation_id)).await
    }

    async fn deployment(&self) -> Result<Uuid, StoreError> {
        self.reader().await?.one(sql("select deployment_id from oncebox.deployment")).await
    }
}

/// The statement for at most `limit` operations of a flow that are due, without those of these
/// tenants.
pub(in crate::store) fn due(flow: &str, versions: &[u32], limit: u32, tenants: &[Vec<u8>]) -> Statement {
    let versions: Vec<i64> = versions.iter().copied().map(i64::from).collect();
    sql(DUE).bind("flow", flow).bind("versions", versions).bind("limit", limit).bind("tenants", tenants.to_vec())
}

async fn take_due(
    store: &dyn SqlStore,
    due: Statement,
    lease: Duration,
) -> Result<Vec<(Driven, StoredOperation)>, StoreError> {
    let mut transaction = store.begin_sql().await?;
    let session = transaction.session();
    let mut taken = Vec::new();
    for row in session.rows(due).await? {
        let Some(driven) = take(session, row.get(0)?, row.get(1)?, lease).await? else { continue };
        match read(session, driven.operation_id).await {
            Ok(found) => taken.extend(found.map(|found| (driven, found))),
            Err(error @ StoreError::Corrupt(_)) => {
                let reason = unreadable(driven.operation_id, &error);
                leave_in(session, &driven, Leave::Park(&reason)).await?;
            }
            Err(error) => return Err(error),
        }
    }
    transaction.commit().await?;
    Ok(taken)
}

/// A statement of a driver, with the values bound that [`is_ours`] compares.
fn ours(text: &'static str, driven: &Driven) -> Statement {
    sql(text).bind("id", driven.operation_id).bind("epoch", driven.epoch).bind("owner", driven.owner)
}

/// Locks the row of an operation, if there is one, and gives its epoch.
pub(in crate::store) async fn lock(session: &mut dyn Session, operation_id: Uuid) -> Result<Option<i64>, StoreError> {
    let locked = session.first(locking(operation_id)).await?;
    locked.map(|row| row.get(0)).transpose()
}

fn locking(operation_id: Uuid) -> Statement {
    sql(LOCK).bind("id", operation_id)
}

/// Takes an operation whose row is locked at this epoch; none where it is not free.
async fn take(
    session: &mut dyn Session,
    operation_id: Uuid,
    epoch: i64,
    lease: Duration,
) -> Result<Option<Driven>, StoreError> {
    let driven = Driven { operation_id, owner: Uuid::now_v7(), epoch: epoch + 1 };
    let take = sql(TAKE).bind("id", operation_id).bind("owner", driven.owner).bind("lease", lease);
    Ok((session.run(take).await? == 1).then_some(driven))
}

/// Gives up an operation as `Phases::leave` says, also where its record is gone.
async fn leave_in(session: &mut dyn Session, driven: &Driven, leave: Leave<'_>) -> Result<Fenced, StoreError> {
    let (stage, due, parked) = leave.columns();
    let left = ours(LEAVE, driven)
        .bind("state", stage.map(Stage::as_str))
        .bind("attempts", i64::from(due.is_some_and(|due| due.attempt)))
        .bind("after", due.and_then(|due| due.after))
        .bind("parked", parked);
    let fenced = Fenced::rows(session.run(left).await?);
    if let (Fenced::Done, Some(stage)) = (fenced, stage) {
        follows(follow(session, driven.operation_id, stage).await)?;
    }
    if fenced == Fenced::Done && leave.takes_the_mark() {
        session.run(sql(UNMARK).bind("id", driven.operation_id)).await?;
    }
    Ok(fenced)
}

/// Sets the state of the record to that of its operation's new stage.
pub(in crate::store) async fn follow(
    session: &mut dyn Session,
    operation_id: Uuid,
    stage: Stage,
) -> Result<(), StoreError> {
    let follow = sql(FOLLOW).bind("id", operation_id).bind("state", stage.record().as_str());
    if session.run(follow).await? == 0 {
        return Err(no_record(operation_id));
    }
    Ok(())
}

/// An operation with its intents and evidence.
pub(in crate::store) async fn read(
    session: &mut dyn Session,
    operation_id: Uuid,
) -> Result<Option<StoredOperation>, StoreError> {
    let Some(row) = session.first(sql(OPERATION).bind("id", operation_id)).await? else { return Ok(None) };
    let intents = session.rows(sql(INTENTS).bind("id", operation_id)).await?;
    let intents = intents.iter().map(|row| intent_of(&**row)).collect::<Result<_, _>>()?;
    let evidence = evidence::read(session, operation_id).await?;
    operation_of(&*row, intents, evidence).map(Some)
}
