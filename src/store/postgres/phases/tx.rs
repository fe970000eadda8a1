//! The transaction of a phase (O1, O5, O9).

use std::any::Any;

use async_trait::async_trait;
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Postgres, Row, query};
use uuid::Uuid;

use super::super::PostgresStore;
use super::super::connect::BEGIN;
use super::super::operations::{Held, Within, finish, proved_by, staked, undo};
use super::{evidence, follow, is_ours, leave_in, ours};
use crate::error::StoreError;
use crate::policy::operation::Mode;
use crate::policy::operation::flow::Stage;
use crate::policy::operation::retention::Retention;
use crate::store::bounded::{Ask, Bounded};
use crate::store::operations::RecordFence;
use crate::store::phases::{Settled, end_stage, may_advance, no_effect, no_record, twice};
use crate::store::sql::pieces::HAS_CONFLICT;
use crate::store::sql::words;
use crate::store::{
    Basis, Begun, Dialect, Driven, FIRST_POINT, Fenced, Leave, NewIntent, NewOperation, Outcome, PhaseTx, Proof, Run,
    StoredEvidence,
};

/// A transaction in which one phase runs.
#[derive(Debug)]
pub(in crate::store) struct PostgresPhaseTx {
    held: Held,
    driven: Driven,
    record: RecordFence,
    settled: Settled,
}

/// Moves the operation, where this is the transaction that the phase began in: says whether it is,
/// and whether it moved.
macro_rules! moves {
    ($set:literal) => {
        concat!(
            "with moved as (update oncebox.operation o set ",
            $set,
            " from (select clock_timestamp() as at) n where ",
            is_ours!(),
            " and o.point = $4 and $5 = pg_current_xact_id_if_assigned()::text returning 1), \
             unmarked as (delete from oncebox.operation_phase p using moved where p.operation_id = $1 and p.epoch = $2) \
             select coalesce($5 = pg_current_xact_id_if_assigned()::text, false), exists (select 1 from moved)"
        )
    };
}

const ADVANCE: &str = moves!("point = $7, state = $6, updated_at = n.at");
const END: &str = moves!(
    "state = $6, owner = null, lease_until = null, lease_seconds = null, due_at = null, updated_at = n.at, outcome_at = n.at, \
     expires_at = n.at + $7 * interval '1 second'"
);

/// Claims, and inserts the operation.
pub(super) async fn begin_first(
    store: &PostgresStore,
    new: &NewOperation,
    basis: Basis<'_>,
) -> Result<Begun<PostgresPhaseTx>, StoreError> {
    new.claim.requires(&[Mode::Phased])?;
    let owned = new.claim.owned(basis);
    let (mut tx, token) = match staked(store, &new.claim, basis, &owned).await? {
        Begun::Claimed(claimed) => claimed,
        Begun::Existing(record) => return Ok(Begun::Existing(record)),
        Begun::Locked => return Ok(Begun::Locked),
    };
    if let Basis::Anew(seen) = basis
        && !has_conflict(&mut tx, seen.operation_id).await?
    {
        forget(&mut tx, seen.operation_id, false).await?;
    }
    let driven = Driven { operation_id: owned.operation_id, owner: Uuid::now_v7(), epoch: 1 };
    let record = RecordFence { unknown: true, ..RecordFence::from(&owned) };
    let insert = query(
        "insert into oncebox.operation (operation_id, epoch, owner, key_digest, flow, flow_version, point, state, command, \
           command_kid, lease_until, lease_seconds, due_at, created_at, updated_at) \
         select $1, $2, $3, $4, $5, $6, $7, 'RECEIVED', $8, $9, n.at + $10 * interval '1 second', $10, n.at, n.at, n.at \
           from (select clock_timestamp() as at) n",
    );
    ours(insert, &driven)
        .bind(record.digest.clone())
        .bind(&new.flow)
        .bind(i32::try_from(new.flow_version).map_err(|_| too_large(new.flow_version))?)
        .bind(FIRST_POINT)
        .bind(&new.command.bytes)
        .bind(&new.command.kid)
        .bind(new.claim.lease.as_secs_f64())
        .run(&mut tx)
        .await?;
    let held = Held::new(tx, token).await?;
    Ok(Begun::Claimed(PostgresPhaseTx { held, driven, record, settled: Settled::default() }))
}

/// Whether a person must look at it first.
async fn has_conflict(tx: &mut Bounded<Postgres>, operation_id: Uuid) -> Result<bool, StoreError> {
    let conflict = query(words(HAS_CONFLICT, Dialect::Postgres));
    Ok(conflict.bind(operation_id).optional(tx).await?.is_some())
}

/// Takes away what was kept of an operation whose key is used anew, or forgotten; `but_late_runs`:
/// not that a run succeeded.
pub(in crate::store::postgres) async fn forget(
    tx: &mut Bounded<Postgres>,
    operation_id: Uuid,
    but_late_runs: bool,
) -> Result<(), StoreError> {
    let evidence = if but_late_runs {
        "delete from oncebox.operation_evidence where operation_id = $1 and not (kind = 'run' and verdict = 'success')"
    } else {
        "delete from oncebox.operation_evidence where operation_id = $1"
    };
    for statement in [
        "delete from oncebox.operation where operation_id = $1",
        "delete from oncebox.operation_intent where operation_id = $1",
        evidence,
        "delete from oncebox.operation_phase where operation_id = $1",
    ] {
        query(statement).bind(operation_id).run(&mut *tx).await?;
    }
    Ok(())
}

fn too_large(version: u32) -> StoreError {
    StoreError::Refused(format!("the version {version} is larger than {}", i32::MAX))
}

/// A transaction that is ending ends in this time, mostly; another one may never end, and must not
/// cost a connection until then.
const SHORT_WAIT: &str = "set local lock_timeout = '100ms'";
/// A lock did not come in time.
const LOCKED: &str = "55P03";

/// Begins a phase: what fences the record, the id of the transaction, and whether it has its mark.
macro_rules! begins {
    ($has_mark:literal) => {
        concat!(
            "select r.key_digest, r.epoch, pg_current_xact_id()::text, ",
            $has_mark,
            " from oncebox.operation o join oncebox.idempotency_request r using (key_digest, operation_id) \
             where o.operation_id = $1 and r.mode = 'phased'"
        )
    };
}

const BEGIN_PHASE: &str = begins!("false");
/// Another transaction that has a mark and has not ended stands in its way.
const BEGIN_RUN: &str = concat!(
    "with marked as (insert into oncebox.operation_phase (operation_id, epoch) values ($1, $2) on conflict do nothing returning 1) ",
    begins!("exists (select 1 from marked)")
);

pub(super) async fn begin_phase(store: &PostgresStore, driven: &Driven) -> Result<PostgresPhaseTx, StoreError> {
    let mut tx = store.transaction().await?;
    let row = query(BEGIN_PHASE).bind(driven.operation_id).optional(&mut tx).await?;
    held("", tx, row, driven).await
}

pub(super) async fn begin_run(
    store: &PostgresStore,
    driven: &Driven,
    point: &str,
) -> Result<Run<PostgresPhaseTx>, StoreError> {
    let mut tx = store.pool.begin(AssertSqlSafe(format!("{BEGIN}; {SHORT_WAIT}"))).await?;
    let begin = query(BEGIN_RUN).bind(driven.operation_id).bind(driven.epoch);
    let row = match begin.optional(&mut tx).await {
        Err(sqlx::Error::Database(error)) if error.code().as_deref() == Some(LOCKED) => {
            tx.rollback().await?;
            return Ok(Run::Unended);
        }
        row => row?,
    };
    let marked = row.as_ref().map(|row| row.try_get(3)).transpose()?;
    if marked == Some(false) {
        tx.rollback().await?;
        return Ok(Run::Marked);
    }
    // What handlers were promised, whatever one before has left in the session.
    let usual_wait = format!("set local lock_timeout = '{}ms'; ", store.server_timeout().as_millis());
    let mut run = held(&usual_wait, tx, row, driven).await?;
    if run.still_stands(point).await? {
        return Ok(Run::Begun(run));
    }
    Box::new(run).rollback().await?;
    Ok(Run::Overtaken)
}

/// From what [`begins`] says, behind a first statement.
async fn held(
    first: &str,
    mut tx: Bounded<Postgres>,
    row: Option<PgRow>,
    driven: &Driven,
) -> Result<PostgresPhaseTx, StoreError> {
    let Some(row) = row else {
        tx.rollback().await?;
        return Err(StoreError::Fenced(format!("there is no operation {}", driven.operation_id)));
    };
    let record = RecordFence { digest: row.try_get(0)?, epoch: row.try_get(1)?, owner: None, unknown: true };
    let held = Held::behind(first, tx, row.try_get(2)?).await?;
    Ok(PostgresPhaseTx { held, driven: driven.clone(), record, settled: Settled::default() })
}

/// Writes the outcome of an operation to its record; with `token`, only in the transaction of that
/// id.
pub(in crate::store::postgres) async fn end_record(
    tx: &mut Bounded<Postgres>,
    operation_id: Uuid,
    record: &RecordFence,
    (outcome, retention): (&Outcome, &Retention),
    token: Option<&str>,
) -> Result<(), StoreError> {
    if finish(tx, record, outcome, retention, token.map(Within::token)).await? != Fenced::Done {
        return Err(no_record(operation_id));
    }
    // One time for both, though each statement has read the clock (O3).
    let same = query(
        "update oncebox.operation o set outcome_at = r.outcome_at, expires_at = r.expires_at \
           from oncebox.idempotency_request r \
          where o.operation_id = $1 and r.key_digest = o.key_digest and r.operation_id = o.operation_id",
    );
    same.bind(operation_id).run(tx).await?;
    Ok(())
}

impl PostgresPhaseTx {
    /// Whether the operation is where its driver saw it, and nobody else has driven it since. A
    /// statement of its own: it sees what was committed while the mark was waited for. Whoever
    /// takes it up from now on waits for our mark before it runs.
    async fn still_stands(&mut self, point: &str) -> Result<bool, StoreError> {
        let stands = query(
            "select 1 from oncebox.operation where operation_id = $1 and epoch = $2 and point = $3 and parked is null and outcome_at is null",
        );
        let stands = stands.bind(self.driven.operation_id).bind(self.driven.epoch).bind(point);
        Ok(stands.optional(&mut self.held.tx).await?.is_some())
    }

    /// What a statement of [`moves`] says.
    async fn moved(&mut self, statement: super::Query<'_>) -> Result<(Proof, Fenced), StoreError> {
        match statement.one(&mut self.held.tx).await.map_err(StoreError::from) {
            Ok(row) if row.try_get::<bool, _>(0)? => Ok((Proof::Same, Fenced::rows(row.try_get::<bool, _>(1)?.into()))),
            Ok(_) => Ok((Proof::Ended, Fenced::LostOwnership)),
            Err(error) => Ok((proved_by(&mut self.held, error).await?, Fenced::LostOwnership)),
        }
    }

    async fn settle_effects(&mut self) -> Result<(), StoreError> {
        for (effect, outcome) in self.settled.iter() {
            let settle = query(
                "update oncebox.operation_intent set outcome = $3, settled_at = clock_timestamp() \
                  where operation_id = $1 and effect = $2",
            );
            let settle =
                settle.bind(self.driven.operation_id).bind(effect).bind(outcome).run(&mut self.held.tx).await?;
            if settle.rows_affected() == 0 {
                return Err(no_effect(effect));
            }
        }
        Ok(())
    }

    async fn insert_intent(&mut self, intent: &NewIntent) -> Result<(), StoreError> {
        let insert = query(
            "insert into oncebox.operation_intent (operation_id, effect, strategy, provider_key, request, request_kid, adapter, \
               adapter_version, undoes, first_sent_at, last_sent_at) select $1, $2, $3, $4, $5, $6, $7, $8, $9, n.at, n.at \
               from (select clock_timestamp() as at) n on conflict do nothing",
        );
        let insert = insert
            .bind(self.driven.operation_id)
            .bind(&intent.effect)
            .bind(&intent.strategy)
            .bind(&intent.provider_key)
            .bind(&intent.request.bytes)
            .bind(&intent.request.kid)
            .bind(&intent.adapter)
            .bind(i32::try_from(intent.adapter_version).map_err(|_| too_large(intent.adapter_version))?)
            .bind(&intent.undoes);
        if insert.run(&mut self.held.tx).await?.rows_affected() == 0 {
            return Err(twice(intent));
        }
        Ok(())
    }
}

#[async_trait]
impl PhaseTx for PostgresPhaseTx {
    fn driven(&self) -> &Driven {
        &self.driven
    }

    fn any_connection(&mut self) -> &mut (dyn Any + Send) {
        self.held.tx.lend()
    }

    async fn undo_effects(&mut self) -> Result<Proof, StoreError> {
        undo(&mut self.held).await
    }

    async fn evidence(&mut self) -> Result<Vec<StoredEvidence>, StoreError> {
        evidence(&mut self.held.tx, self.driven.operation_id).await
    }

    async fn settle(&mut self, effect: &str, outcome: &str) -> Result<(), StoreError> {
        self.settled.add(effect, outcome)
    }

    async fn advance(
        &mut self,
        from: &str,
        to: &str,
        stage: Stage,
        intents: &[NewIntent],
    ) -> Result<(Proof, Fenced), StoreError> {
        may_advance(stage, intents)?;
        let advance = ours(query(ADVANCE), &self.driven).bind(from.to_owned()).bind(self.held.token.clone());
        let moved = self.moved(advance.bind(stage.as_str()).bind(to.to_owned())).await?;
        if moved != (Proof::Same, Fenced::Done) {
            return Ok(moved);
        }
        follow(&mut self.held.tx, self.driven.operation_id, stage).await?;
        self.settle_effects().await?;
        for intent in intents {
            self.insert_intent(intent).await?;
        }
        Ok(moved)
    }

    async fn finish(
        &mut self,
        from: &str,
        outcome: &Outcome,
        retention: &Retention,
    ) -> Result<(Proof, Fenced), StoreError> {
        let stage = end_stage(outcome)?;
        let end = ours(query(END), &self.driven).bind(from.to_owned()).bind(self.held.token.clone());
        let moved = self.moved(end.bind(stage.as_str()).bind(retention.ttl.as_secs_f64())).await?;
        if moved != (Proof::Same, Fenced::Done) {
            return Ok(moved);
        }
        let token = Some(self.held.token.as_str());
        let id = self.driven.operation_id;
        end_record(&mut self.held.tx, id, &self.record, (outcome, retention), token).await?;
        self.settle_effects().await?;
        Ok(moved)
    }

    async fn park(&mut self, reason: &str) -> Result<Fenced, StoreError> {
        leave_in(&mut self.held.tx, &self.driven, Leave::Park(reason)).await
    }

    async fn commit(mut self: Box<Self>) -> Result<(), StoreError> {
        self.held.tx.commit().await
    }

    async fn rollback(mut self: Box<Self>) -> Result<(), StoreError> {
        Ok(self.held.tx.rollback().await?)
    }
}
