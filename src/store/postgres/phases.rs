//! Operations in phases.
//!
//! Guarantees: of many that take an operation up one raises its epoch; a phase moves its operation
//! on only in the transaction that it began in, compared by its id inside the statement, and from
//! the point and epoch that it knew (O1, O9); record and operation change together.

mod tx;

use std::time::Duration;

use async_trait::async_trait;
use sqlx::Row;
use uuid::Uuid;

pub(super) use self::tx::{end_record, forget};

use super::PostgresStore;
use super::operations::{Query, micros};
use crate::error::StoreError;
use crate::policy::operation::flow::Stage;
use crate::store::bounded::{Ask, Bounded};
use crate::store::phases::stored::{evidence_of, intent_of, operation_of};
use crate::store::phases::{follows, no_record, unreadable};
use crate::store::{
    Basis, Begun, Driven, Fenced, Leave, NewEvidence, NewOperation, PhaseTx, Phases, Run, StoredEvidence,
    StoredOperation, Taken,
};

/// As [`operation_of`] reads it.
const OPERATION: &str = concat!(
    "select ",
    micros!("n.at"),
    ", uuid_send(o.operation_id), r.tenant, r.operation, r.key, o.flow, o.flow_version::bigint, o.point, o.state, o.command, \
     o.command_kid, o.epoch, \
     case when o.lease_until > n.at and o.lease_until <= n.at + o.lease_seconds * interval '1 second' then ",
    micros!("o.lease_until"),
    " end, o.attempts::bigint, ",
    micros!("o.due_at"),
    ", o.parked, ",
    micros!("o.created_at"),
    ", ",
    micros!("o.outcome_at"),
    " from (select clock_timestamp() as at) n join oncebox.operation o on o.operation_id = $1 \
      left join oncebox.idempotency_request r on r.key_digest = o.key_digest and r.operation_id = o.operation_id"
);

/// As [`intent_of`] reads it.
const INTENTS: &str = concat!(
    "select effect, strategy, provider_key, request, request_kid, adapter, adapter_version::bigint, ",
    micros!("first_sent_at"),
    ", ",
    micros!("last_sent_at"),
    ", sends::bigint, outcome, undoes from oncebox.operation_intent where operation_id = $1 order by first_sent_at, effect"
);

/// As [`evidence_of`] reads it.
const EVIDENCE: &str = concat!(
    "select uuid_send(operation_id), effect, epoch, send::bigint, kind, verdict, status::bigint, bytes, bytes_kid, ",
    micros!("observed_at"),
    " from oncebox.operation_evidence where operation_id = $1 order by evidence_id"
);

/// Nobody drives it, and somebody may; a lease that was written before the clock went back is over
/// (R22).
macro_rules! is_free {
    () => {
        "o.parked is null and o.outcome_at is null and (o.owner is null or o.lease_until <= clock_timestamp() \
         or o.lease_until > clock_timestamp() + o.lease_seconds * interval '1 second')"
    };
}

/// What every statement of a driver is fenced by; a parked operation, and one with its outcome, has
/// no owner.
macro_rules! is_ours {
    () => {
        "o.operation_id = $1 and o.epoch = $2 and o.owner = $3"
    };
}
use is_ours;

/// Takes what the condition names: owner and lease are `$1` and `$2`.
macro_rules! take {
    ($which:expr) => {
        concat!(
            "update oncebox.operation o set epoch = o.epoch + 1, attempts = o.attempts + (o.owner is not null)::int, owner = $1, \
               lease_until = clock_timestamp() + $2 * interval '1 second', lease_seconds = $2, updated_at = clock_timestamp() ",
            $which,
            " returning o.operation_id, o.epoch"
        )
    };
}

const TAKE_ONE: &str = take!(concat!("where o.operation_id = $3 and ", is_free!()));

/// The time is asked for once, or the index could not be read by it.
const TAKE_DUE: &str = concat!(
    "with due as materialized (select o.operation_id from oncebox.operation o \
       where o.flow = $3 and o.flow_version = any($4) and o.due_at <= (select clock_timestamp()) and ",
    is_free!(),
    " and (cardinality($6::bytea[]) = 0 or coalesce((select r.tenant from oncebox.idempotency_request r \
        where r.key_digest = o.key_digest), '') <> all ($6)) order by o.due_at limit $5 for update skip locked) ",
    take!("from due where o.operation_id = due.operation_id")
);

const LEAVE: &str = concat!(
    "update oncebox.operation o set state = coalesce($4, o.state), owner = null, lease_until = null, lease_seconds = null, \
       attempts = o.attempts + $5, parked = $7, updated_at = clock_timestamp(), \
       due_at = case when $7::text is null then coalesce(clock_timestamp() + $6 * interval '1 second', o.due_at) end \
     where ",
    is_ours!()
);

const BEGIN_SEND: &str = concat!(
    "with ours as materialized (select 1 from oncebox.operation o where ",
    is_ours!(),
    " and o.lease_until > clock_timestamp() and o.lease_until <= clock_timestamp() + o.lease_seconds * interval '1 second' \
      for share) \
     update oncebox.operation_intent i set sends = i.sends + 1, last_sent_at = greatest(i.last_sent_at, clock_timestamp()) \
       from ours where i.operation_id = $1 and i.effect = $4 and i.outcome is null returning i.sends::bigint"
);

const TAKE_BACK_SEND: &str = concat!(
    "with ours as materialized (select 1 from oncebox.operation o where ",
    is_ours!(),
    " for share) \
     update oncebox.operation_intent i set sends = i.sends - 1 \
       from ours where i.operation_id = $1 and i.effect = $4 and i.outcome is null and i.sends = $5 and i.sends > 1"
);

#[async_trait]
impl Phases for PostgresStore {
    async fn begin_first(
        &self,
        new: &NewOperation,
        basis: Basis<'_>,
        _: Duration,
    ) -> Result<Begun<Box<dyn PhaseTx>>, StoreError> {
        Ok(tx::begin_first(self, new, basis).await?.map(|tx| Box::new(tx) as Box<dyn PhaseTx>))
    }

    async fn begin_phase(&self, driven: &Driven) -> Result<Box<dyn PhaseTx>, StoreError> {
        Ok(Box::new(tx::begin_phase(self, driven).await?))
    }

    async fn begin_run(&self, driven: &Driven, point: &str) -> Result<Run<Box<dyn PhaseTx>>, StoreError> {
        Ok(tx::begin_run(self, driven, point).await?.map(|tx| Box::new(tx) as Box<dyn PhaseTx>))
    }

    async fn take_operation(&self, operation_id: Uuid, lease: Duration) -> Result<Taken, StoreError> {
        let owner = Uuid::now_v7();
        let mut connection = self.pool.acquire().await?;
        let take = sqlx::query(TAKE_ONE).bind(owner).bind(lease.as_secs_f64()).bind(operation_id);
        let row = take.optional(&mut connection).await?;
        let epoch: Option<i64> = row.map(|row| row.try_get(1)).transpose()?;
        // A statement of its own: it sees what a transaction that we waited for has committed.
        let found = read(&mut connection, operation_id).await?;
        Ok(Taken::of(epoch.map(|epoch| Driven { operation_id, owner, epoch }), found))
    }

    async fn take_due_but(
        &self,
        flow: &str,
        versions: &[u32],
        limit: u32,
        lease: Duration,
        tenants: &[Vec<u8>],
    ) -> Result<Vec<(Driven, StoredOperation)>, StoreError> {
        let owner = Uuid::now_v7();
        let versions: Vec<i32> = versions.iter().filter_map(|version| i32::try_from(*version).ok()).collect();
        let mut connection = self.pool.acquire().await?;
        let due = sqlx::query(TAKE_DUE).bind(owner).bind(lease.as_secs_f64()).bind(flow).bind(versions);
        let due = due.bind(i64::from(limit)).bind(tenants).all(&mut connection).await?;
        let (mut taken, mut unread) = (Vec::new(), Vec::new());
        for row in due {
            let driven = Driven { operation_id: row.try_get(0)?, owner, epoch: row.try_get(1)? };
            match read(&mut connection, driven.operation_id).await {
                Ok(found) => taken.extend(found.map(|found| (driven, found))),
                Err(error @ StoreError::Corrupt(_)) => unread.push((driven, error)),
                Err(error) => return Err(error),
            }
        }
        drop(connection);
        for (driven, error) in unread {
            self.park(&driven, &unreadable(driven.operation_id, &error)).await?;
        }
        taken.sort_by_key(|(_, found)| found.due_at);
        Ok(taken)
    }

    async fn drive_on(&self, driven: &Driven, lease: Duration) -> Result<Fenced, StoreError> {
        let beat = sqlx::query(concat!(
            "update oncebox.operation o set lease_until = clock_timestamp() + $4 * interval '1 second', lease_seconds = $4, \
               updated_at = clock_timestamp() where ",
            is_ours!()
        ));
        let done = ours(beat, driven).bind(lease.as_secs_f64()).run(&self.pool).await?;
        Ok(Fenced::rows(done.rows_affected()))
    }

    async fn begin_send(&self, driven: &Driven, effect: &str) -> Result<Option<u32>, StoreError> {
        let row = ours(sqlx::query(BEGIN_SEND), driven).bind(effect).optional(&self.pool).await?;
        let send: Option<i64> = row.map(|row| row.try_get(0)).transpose()?;
        Ok(send.map(|send| u32::try_from(send).unwrap_or(u32::MAX)))
    }

    async fn take_back_send(&self, driven: &Driven, effect: &str, send: u32) -> Result<Fenced, StoreError> {
        let send = i32::try_from(send).unwrap_or(i32::MAX);
        let done = ours(sqlx::query(TAKE_BACK_SEND), driven).bind(effect).bind(send).run(&self.pool).await?;
        Ok(Fenced::rows(done.rows_affected()))
    }

    async fn observe(&self, evidence: &NewEvidence) -> Result<(), StoreError> {
        if !evidence.asks_to_wait() {
            append(evidence).run(&self.pool).await?;
            return Ok(());
        }
        let mut tx = self.transaction().await?;
        append(evidence).run(&mut tx).await?;
        let forget = sqlx::query(FORGET_WAITS).bind(evidence.operation_id).bind(evidence.effect.clone());
        forget.run(&mut tx).await?;
        Ok(tx.commit().await?)
    }

    async fn leave(&self, driven: &Driven, leave: Leave<'_>) -> Result<Fenced, StoreError> {
        let mut tx = self.transaction().await?;
        let fenced = leave_in(&mut tx, driven, leave).await?;
        tx.commit().await?;
        Ok(fenced)
    }

    async fn operation(&self, operation_id: Uuid) -> Result<Option<StoredOperation>, StoreError> {
        read(&mut self.pool.acquire().await?, operation_id).await
    }

    async fn unpark(&self, operation_id: Uuid) -> Result<Fenced, StoreError> {
        let mut tx = self.transaction().await?;
        // A statement of its own: the next one sees what it waited for.
        let lock = sqlx::query("select 1 from oncebox.operation where operation_id = $1 for update");
        lock.bind(operation_id).optional(&mut tx).await?;
        let unpark = sqlx::query(
            "update oncebox.operation set parked = null, due_at = clock_timestamp(), updated_at = clock_timestamp() \
              where operation_id = $1 and parked is not null",
        );
        let done = unpark.bind(operation_id).run(&mut tx).await?;
        tx.commit().await?;
        Ok(Fenced::rows(done.rows_affected()))
    }

    async fn deployment(&self) -> Result<Uuid, StoreError> {
        Ok(sqlx::query_scalar("select deployment_id from oncebox.deployment").one(&self.pool).await?)
    }
}

/// What asks to wait is said by the last answer alone: a provider that asks for it all day leaves
/// one row. None of them proves anything.
const FORGET_WAITS: &str = "delete from oncebox.operation_evidence where operation_id = $1 and effect = $2 and verdict = 'wait' and evidence_id < \
     (select last from (select max(evidence_id) as last from oncebox.operation_evidence \
                         where operation_id = $1 and effect = $2 and verdict = 'wait') w)";

/// The statement that appends one row of evidence; the server sets its time.
pub(super) fn append<'q>(evidence: &NewEvidence) -> Query<'q> {
    let insert = sqlx::query(
        "insert into oncebox.operation_evidence (operation_id, effect, epoch, send, kind, verdict, status, bytes, bytes_kid) \
         values ($1, $2, $3, $4, $5, $6, $7, $8, $9)",
    );
    insert
        .bind(evidence.operation_id)
        .bind(evidence.effect.clone())
        .bind(evidence.epoch)
        .bind(i32::try_from(evidence.send).unwrap_or(i32::MAX))
        .bind(evidence.kind.clone())
        .bind(evidence.verdict.clone())
        .bind(evidence.status.map(i32::from))
        .bind(evidence.bytes.bytes.clone())
        .bind(evidence.bytes.kid.clone())
}

/// Binds what [`is_ours`] compares.
fn ours<'q>(statement: Query<'q>, driven: &Driven) -> Query<'q> {
    statement.bind(driven.operation_id).bind(driven.epoch).bind(driven.owner)
}

/// Gives an operation out of our hands; also where its record is gone.
async fn leave_in(tx: &mut Bounded<sqlx::Postgres>, driven: &Driven, leave: Leave<'_>) -> Result<Fenced, StoreError> {
    let (stage, due, parked) = leave.columns();
    let left = ours(sqlx::query(LEAVE), driven)
        .bind(stage.map(Stage::as_str))
        .bind(i32::from(due.is_some_and(|due| due.attempt)))
        .bind(due.and_then(|due| due.after).map(|after| after.as_secs_f64()))
        .bind(parked);
    let fenced = Fenced::rows(left.run(&mut *tx).await?.rows_affected());
    if let (Fenced::Done, Some(stage)) = (fenced, stage) {
        follows(follow(&mut *tx, driven.operation_id, stage).await)?;
    }
    if fenced == Fenced::Done && leave.takes_the_mark() {
        let unmark = sqlx::query("delete from oncebox.operation_phase where operation_id = $1");
        unmark.bind(driven.operation_id).run(tx).await?;
    }
    Ok(fenced)
}

/// Brings the record after its operation.
pub(super) async fn follow(
    tx: &mut Bounded<sqlx::Postgres>,
    operation_id: Uuid,
    stage: Stage,
) -> Result<(), StoreError> {
    let follow = sqlx::query(
        "update oncebox.idempotency_request r set state = $2, updated_at = clock_timestamp() from oncebox.operation o \
          where o.operation_id = $1 and r.key_digest = o.key_digest and r.operation_id = o.operation_id \
            and r.mode = 'phased' and r.outcome_at is null",
    );
    if follow.bind(operation_id).bind(stage.record().as_str()).run(tx).await?.rows_affected() == 0 {
        return Err(no_record(operation_id));
    }
    Ok(())
}

pub(super) async fn read(
    connection: &mut Bounded<sqlx::Postgres>,
    operation_id: Uuid,
) -> Result<Option<StoredOperation>, StoreError> {
    let Some(row) = sqlx::query(OPERATION).bind(operation_id).optional(&mut *connection).await? else {
        return Ok(None);
    };
    let intents = sqlx::query(INTENTS).bind(operation_id).all(&mut *connection).await?;
    let intents = intents.iter().map(intent_of).collect::<Result<_, _>>()?;
    let evidence = evidence(connection, operation_id).await?;
    operation_of(&row, intents, evidence).map(Some)
}

pub(super) async fn evidence(
    connection: &mut Bounded<sqlx::Postgres>,
    operation_id: Uuid,
) -> Result<Vec<StoredEvidence>, StoreError> {
    let rows = sqlx::query(EVIDENCE).bind(operation_id).all(connection).await?;
    rows.iter().map(evidence_of).collect()
}
