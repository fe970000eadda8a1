//! The transaction of a phase, on every database (O1, O5, O9).

use std::any::Any;
use std::time::Duration;

use async_trait::async_trait;
use uuid::Uuid;

use super::{HeldPhase, PhaseStore, follow, is_ours, leave_in, ours};
use crate::error::StoreError;
use crate::inbox::port::Proof;
use crate::operation::port::evidence::StoredEvidence;
use crate::operation::port::phases::{
    Driven, FIRST_POINT, Leave, NewIntent, NewOperation, PhaseTx, Run, end_stage, may_advance, no_record, twice,
};
use crate::operation::port::{Basis, Begun, Fenced, RecordFence, RunOutcome};
use crate::operation::rules::flow::Stage;
use crate::operation::rules::provider::Settled;
use crate::operation::rules::retention::Retention;
use crate::store::sql::{Session, Statement, evidence, sql};

#[derive(Debug)]
pub(super) struct SqlPhaseTx {
    held: Box<dyn HeldPhase>,
    driven: Driven,
    record: RecordFence,
    /// What is proven of effects and not written yet.
    settled: Vec<(String, Settled)>,
}

const BEGIN: &str = "insert into oncebox.operation (operation_id, epoch, owner, key_digest, flow, flow_version, point, \
      state, command, command_kid, attempts, lease_until, {lease}, due_at, created_at, updated_at) \
    select :id, :epoch, :owner, :digest, :flow, :version, :point, 'RECEIVED', :command, :kid, 0, \
       n.at + {span :lease}, {lease :lease}, n.at, n.at, n.at from (select {clock} as at) n";

/// The fence of the record, and the epoch and point of its operation. PostgreSQL compares their ids
/// with `is not distinct from`: with `=` it would look for the record by its id, for which it has
/// no index.
const STANDING: &str = "\
    select r.key_digest, r.epoch, o.epoch, o.point, o.parked is null and o.outcome_at is null \
      from oncebox.operation o \
      join oncebox.idempotency_request r on r.key_digest = o.key_digest \
       and {pg: r.operation_id is not distinct from o.operation_id}{my lite: r.operation_id = o.operation_id} \
     where o.operation_id = :id and r.mode = 'phased'";

/// The operation is at the point that its driver read, and this is the transaction that the phase
/// began in.
macro_rules! from_here {
    () => {
        concat!(is_ours!(), " and o.point = :from {pg: and :token = pg_current_xact_id_if_assigned()::text}")
    };
}

const ADVANCE: &str =
    concat!("update oncebox.operation as o set point = :to, state = :state, updated_at = {clock} where ", from_here!());

const END: &str = concat!(
    "update oncebox.operation as o set state = :state, owner = null, lease_until = null, {lease} = null, due_at = null, \
       updated_at = {clock}, outcome_at = {clock}, expires_at = {clock} + {span :ttl} where ",
    from_here!()
);

/// Deletes the mark when the operation moves on, because a mark that is left says that it did not.
const UNMARK: &str = "{pg my: delete from oncebox.operation_phase where operation_id = :id and epoch = :epoch}";

const SETTLE: &str = "update oncebox.operation_intent set outcome = :outcome, settled_at = {clock} \
    where operation_id = :id and effect = :effect";

const INTEND: &str = "insert into oncebox.operation_intent (operation_id, effect, strategy, provider_key, request, \
      request_kid, adapter, adapter_version, undoes, first_sent_at, last_sent_at, sends) \
    select :id, :effect, :strategy, :provider_key, :request, :kid, :adapter, :version, :undoes, n.at, n.at, 1 \
      from (select {clock} as at) n";

const SAME_TIMES: &str = "update oncebox.operation as o set \
      outcome_at = (select r.outcome_at from oncebox.idempotency_request r \
                     where r.key_digest = o.key_digest and r.operation_id = o.operation_id), \
      expires_at = (select r.expires_at from oncebox.idempotency_request r \
                     where r.key_digest = o.key_digest and r.operation_id = o.operation_id) \
    where o.operation_id = :id";

/// A version as the tables store it; refused where it is larger than an `i32`.
fn storable(version: u32) -> Result<i32, StoreError> {
    let refused = |_| StoreError::Refused(format!("the version {version} is larger than {}", i32::MAX));
    i32::try_from(version).map_err(refused)
}

/// Claims the key, and inserts the operation.
pub(super) async fn begin_first(
    store: &dyn PhaseStore,
    new: &NewOperation,
    basis: Basis<'_>,
    patience: Duration,
) -> Result<Begun<Box<dyn PhaseTx>>, StoreError> {
    let version = storable(new.flow_version)?;
    let owned = new.claim.owned(basis);
    let mut held = match store.stake(&new.claim, basis, &owned, patience).await? {
        Begun::Claimed(held) => held,
        Begun::Existing(record) => return Ok(Begun::Existing(record)),
        Begun::Locked => return Ok(Begun::Locked),
    };
    let driven = Driven { operation_id: owned.operation_id, owner: Uuid::now_v7(), epoch: 1 };
    let record = RecordFence { unknown: true, ..RecordFence::from(&owned) };
    let begin = ours(BEGIN, &driven)
        .bind("digest", &record.digest[..])
        .bind("flow", &new.flow)
        .bind("version", version)
        .bind("point", FIRST_POINT)
        .bind("command", &new.command.bytes[..])
        .bind("kid", new.command.kid.as_deref())
        .bind("lease", new.claim.lease);
    held.session().run(begin).await?;
    held.hold().await?;
    Ok(Begun::Claimed(Box::new(SqlPhaseTx { held, driven, record, settled: Vec::new() })))
}

/// Point and epoch of an operation, and the fence of its record.
struct Standing {
    record: RecordFence,
    epoch: i64,
    point: String,
    /// Neither parked, nor with its outcome.
    is_open: bool,
}

async fn standing(session: &mut dyn Session, operation_id: Uuid) -> Result<Option<Standing>, StoreError> {
    let Some(row) = session.first(sql(STANDING).bind("id", operation_id)).await? else { return Ok(None) };
    let record = RecordFence { digest: row.get(0)?, epoch: row.get(1)?, owner: None, unknown: true };
    Ok(Some(Standing { record, epoch: row.get(2)?, point: row.get(3)?, is_open: row.get(4)? }))
}

/// The fence of an operation's record; none where operation or record is gone.
pub(in crate::store) async fn fence_of(
    session: &mut dyn Session,
    operation_id: Uuid,
) -> Result<Option<RecordFence>, StoreError> {
    Ok(standing(session, operation_id).await?.map(|standing| standing.record))
}

/// After the outcome of a record was written, copies its times to the operation: each statement has
/// read the clock itself, but both must have the same times (O3).
pub(in crate::store::sql) async fn same_times(
    session: &mut dyn Session,
    operation_id: Uuid,
    finished: Fenced,
) -> Result<(), StoreError> {
    if finished != Fenced::Done {
        return Err(no_record(operation_id));
    }
    session.run(sql(SAME_TIMES).bind("id", operation_id)).await.map(drop)
}

impl SqlPhaseTx {
    /// A later phase in a transaction that has begun.
    pub(super) async fn later(mut held: Box<dyn HeldPhase>, driven: &Driven) -> Result<Self, StoreError> {
        let Some(record) = fence_of(held.session(), driven.operation_id).await? else {
            return Err(missing(held, driven).await?);
        };
        Self::held(held, driven, record).await
    }

    /// Begins the run of a handler in a transaction that has inserted its mark. Then a statement of
    /// its own reads whether the operation is still at the point and epoch that its driver read; it
    /// also sees what was committed while the insert of the mark waited. A process that takes the
    /// operation up later finds our mark, or waits for it, before it runs the phase.
    pub(super) async fn run(
        mut held: Box<dyn HeldPhase>,
        driven: &Driven,
        point: &str,
    ) -> Result<Run<Box<dyn PhaseTx>>, StoreError> {
        let Some(standing) = standing(held.session(), driven.operation_id).await? else {
            return Err(missing(held, driven).await?);
        };
        if !standing.is_open || standing.epoch != driven.epoch || standing.point != point {
            held.into_transaction().rollback().await?;
            return Ok(Run::Overtaken);
        }
        Ok(Run::Begun(Box::new(Self::held(held, driven, standing.record).await?)))
    }

    async fn held(mut held: Box<dyn HeldPhase>, driven: &Driven, record: RecordFence) -> Result<Self, StoreError> {
        held.hold().await?;
        Ok(Self { held, driven: driven.clone(), record, settled: Vec::new() })
    }

    /// Runs the statement that moves the operation, where this is the transaction that the phase
    /// began in. Returns whether it is that transaction, and whether the operation was moved.
    async fn moved(&mut self, statement: Statement) -> Result<(Proof, Fenced), StoreError> {
        let proof = self.held.prove().await?;
        if proof != Proof::Same {
            return Ok((proof, Fenced::LostOwnership));
        }
        let statement = statement.bind("token", self.held.token());
        let failed = match self.held.session().run(statement).await {
            Ok(0) => None,
            Ok(_) => return Ok((proof, Fenced::Done)),
            Err(error) => Some(error),
        };
        Ok((self.held.judge(failed).await?, Fenced::LostOwnership))
    }

    /// Deletes the mark, and writes the proven outcomes of effects.
    async fn settle_effects(&mut self) -> Result<(), StoreError> {
        let id = self.driven.operation_id;
        let session = self.held.session();
        session.run(sql(UNMARK).bind("id", id).bind("epoch", self.driven.epoch)).await?;
        for (effect, settled) in &self.settled {
            let settle = sql(SETTLE).bind("id", id).bind("effect", effect).bind("outcome", settled.as_str());
            if session.run(settle).await? == 0 {
                return Err(StoreError::Refused(format!("there is no effect `{effect}` to settle")));
            }
        }
        Ok(())
    }

    async fn insert_intent(&mut self, intent: &NewIntent) -> Result<(), StoreError> {
        let insert = sql(INTEND)
            .bind("id", self.driven.operation_id)
            .bind("effect", &intent.effect)
            .bind("strategy", &intent.strategy)
            .bind("provider_key", &intent.provider_key)
            .bind("request", &intent.request.bytes[..])
            .bind("kid", intent.request.kid.as_deref())
            .bind("adapter", &intent.adapter)
            .bind("version", storable(intent.adapter_version)?)
            .bind("undoes", intent.undoes.as_deref());
        match self.held.session().run(insert).await {
            Err(StoreError::Other(sqlx::Error::Database(error))) if error.is_unique_violation() => Err(twice(intent)),
            inserted => inserted.map(drop),
        }
    }
}

async fn missing(held: Box<dyn HeldPhase>, driven: &Driven) -> Result<StoreError, StoreError> {
    held.into_transaction().rollback().await?;
    Ok(StoreError::Fenced(format!("there is no operation {} with its record", driven.operation_id)))
}

#[async_trait]
impl PhaseTx for SqlPhaseTx {
    fn driven(&self) -> &Driven {
        &self.driven
    }

    fn any_connection(&mut self) -> &mut (dyn Any + Send) {
        self.held.lend()
    }

    async fn undo_effects(&mut self) -> Result<Proof, StoreError> {
        self.held.undo().await
    }

    async fn evidence(&mut self) -> Result<Vec<StoredEvidence>, StoreError> {
        evidence::read(self.held.session(), self.driven.operation_id).await
    }

    fn settle(&mut self, effect: &str, settled: Settled) {
        self.settled.push((effect.to_owned(), settled));
    }

    async fn advance(
        &mut self,
        from: &str,
        to: &str,
        stage: Stage,
        intents: &[NewIntent],
    ) -> Result<(Proof, Fenced), StoreError> {
        may_advance(stage, intents)?;
        let advance = ours(ADVANCE, &self.driven).bind("from", from).bind("to", to).bind("state", stage.as_str());
        let moved = self.moved(advance).await?;
        if moved != (Proof::Same, Fenced::Done) {
            return Ok(moved);
        }
        follow(self.held.session(), self.driven.operation_id, stage).await?;
        self.settle_effects().await?;
        for intent in intents {
            self.insert_intent(intent).await?;
        }
        Ok(moved)
    }

    async fn finish(
        &mut self,
        from: &str,
        outcome: &RunOutcome,
        retention: &Retention,
    ) -> Result<(Proof, Fenced), StoreError> {
        let stage = end_stage(outcome)?;
        let end = ours(END, &self.driven).bind("from", from).bind("state", stage.as_str()).bind("ttl", retention.ttl);
        let moved = self.moved(end).await?;
        if moved != (Proof::Same, Fenced::Done) {
            return Ok(moved);
        }
        let finished = self.held.end_record(&self.record, outcome, retention).await?;
        same_times(self.held.session(), self.driven.operation_id, finished).await?;
        self.settle_effects().await?;
        Ok(moved)
    }

    async fn park(&mut self, reason: &str) -> Result<Fenced, StoreError> {
        leave_in(self.held.session(), &self.driven, Leave::Park(reason)).await
    }

    async fn commit(self: Box<Self>) -> Result<(), StoreError> {
        self.held.into_transaction().commit().await
    }

    async fn rollback(self: Box<Self>) -> Result<(), StoreError> {
        self.held.into_transaction().rollback().await
    }
}
