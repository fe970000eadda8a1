//! Operations in phases.
//!
//! Guarantees: of many that take an operation up one raises its epoch, under the lock of its row; a
//! phase moves its operation on only while the savepoint set at its beginning stands, and from the
//! point and epoch that it knew (O1, O9); record and operation change together.

mod tx;

use std::time::Duration;

use async_trait::async_trait;
use sqlx::MySql;
use uuid::Uuid;

pub(super) use self::tx::{end_record, forget};

use super::operations::{Query, micros};
use super::{MySqlStore, START, number_list};
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
    ", o.operation_id, r.tenant, r.operation, r.`key`, convert(o.flow using utf8mb4), cast(o.flow_version as signed), \
     convert(o.point using utf8mb4), o.state, o.command, o.command_kid, o.epoch, \
     if(o.lease_until > n.at and o.lease_until <= n.at + interval round(o.lease_seconds * 1000000) microsecond, ",
    micros!("o.lease_until"),
    ", null), cast(o.attempts as signed), ",
    micros!("o.due_at"),
    ", o.parked, ",
    micros!("o.created_at"),
    ", ",
    micros!("o.outcome_at"),
    " from (select utc_timestamp(6) as at) n join oncebox_operation o on o.operation_id = ? \
      left join oncebox_idempotency_request r on r.key_digest = o.key_digest and r.operation_id = o.operation_id"
);

/// As [`intent_of`] reads it.
const INTENTS: &str = concat!(
    "select convert(effect using utf8mb4), strategy, convert(provider_key using utf8mb4), request, request_kid, \
     convert(adapter using utf8mb4), cast(adapter_version as signed), ",
    micros!("first_sent_at"),
    ", ",
    micros!("last_sent_at"),
    ", cast(sends as signed), outcome, convert(undoes using utf8mb4) from oncebox_operation_intent where operation_id = ? order by first_sent_at, effect"
);

/// As [`evidence_of`] reads it.
const EVIDENCE: &str = concat!(
    "select operation_id, convert(effect using utf8mb4), epoch, cast(send as signed), kind, verdict, cast(status as signed), \
     bytes, bytes_kid, ",
    micros!("observed_at"),
    " from oncebox_operation_evidence where operation_id = ? order by evidence_id"
);

/// Nobody drives it, and somebody may; a lease that was written before the clock went back is over
/// (R22).
macro_rules! is_free {
    () => {
        "parked is null and outcome_at is null and (owner is null or lease_until <= utc_timestamp(6) \
         or lease_until > utc_timestamp(6) + interval round(lease_seconds * 1000000) microsecond)"
    };
}

/// What every statement of a driver is fenced by; a parked operation, and one with its outcome, has
/// no owner.
macro_rules! is_ours {
    () => {
        "operation_id = ? and epoch = ? and owner = ?"
    };
}
use is_ours;

/// The row is locked by a statement of its own: a statement that waits for a lock goes on with the
/// time at which it began, and a lease granted meanwhile would seem to end later than it can (R22).
const LOCK: &str = "select epoch from oncebox_operation where operation_id = ? for update";

/// Rows that somebody else is about to take are passed over; what they say is asked again when they
/// are taken.
const DUE: &str = concat!(
    "select operation_id, epoch from oncebox_operation force index (operation_due) \
      where flow = ? and due_at <= utc_timestamp(6) \
        and flow_version in (select v.version from json_table(?, '$[*]' columns (version bigint path '$')) v) and ",
    is_free!(),
    " and (json_length(?) = 0 or not json_contains(?, json_quote(lower(hex(coalesce((select r.tenant \
        from oncebox_idempotency_request r where r.key_digest = oncebox_operation.key_digest), '')))))) \
      order by due_at limit ? for update skip locked"
);

/// `attempts` first: MySQL sets from left to right.
const TAKE: &str = concat!(
    "update oncebox_operation set attempts = attempts + (owner is not null), epoch = epoch + 1, owner = ?, \
       lease_until = utc_timestamp(6) + interval ? microsecond, lease_seconds = ? / 1000000, updated_at = utc_timestamp(6) \
     where operation_id = ? and ",
    is_free!()
);

const LEAVE: &str = concat!(
    "update oncebox_operation set state = coalesce(?, state), owner = null, lease_until = null, lease_seconds = null, \
       attempts = attempts + ?, due_at = if(? is null, coalesce(utc_timestamp(6) + interval ? microsecond, due_at), null), \
       parked = ?, updated_at = utc_timestamp(6) where ",
    is_ours!()
);

#[async_trait]
impl Phases for MySqlStore {
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
        let mut transaction = self.pool.begin(START).await?;
        let driven = match lock(&mut transaction, operation_id).await? {
            Some(epoch) => take(&mut transaction, operation_id, epoch, lease).await?,
            None => None,
        };
        let found = read(&mut transaction, operation_id).await?;
        transaction.commit().await?;
        Ok(Taken::of(driven, found))
    }

    async fn take_due_but(
        &self,
        flow: &str,
        versions: &[u32],
        limit: u32,
        lease: Duration,
        tenants: &[Vec<u8>],
    ) -> Result<Vec<(Driven, StoredOperation)>, StoreError> {
        let tenants = super::hex_list(tenants.iter().map(Vec::as_slice));
        let mut transaction = self.pool.begin(START).await?;
        let due = sqlx::query_as(DUE)
            .bind(flow.as_bytes().to_vec())
            .bind(number_list(versions.iter().copied().map(i64::from)))
            .bind(tenants.clone())
            .bind(tenants)
            .bind(limit);
        let due: Vec<(Vec<u8>, i64)> = due.all(&mut transaction).await?;
        let mut taken = Vec::new();
        for (id, epoch) in due {
            let id = Uuid::from_bytes(super::sixteen("operation_id", &id)?);
            let Some(driven) = take(&mut transaction, id, epoch, lease).await? else { continue };
            match read(&mut transaction, id).await {
                Ok(found) => taken.extend(found.map(|found| (driven, found))),
                Err(error @ StoreError::Corrupt(_)) => {
                    let reason = unreadable(id, &error);
                    leave_in(&mut transaction, &driven, Leave::Park(&reason)).await?;
                }
                Err(error) => return Err(error),
            }
        }
        transaction.commit().await?;
        Ok(taken)
    }

    async fn drive_on(&self, driven: &Driven, lease: Duration) -> Result<Fenced, StoreError> {
        let beat = sqlx::query(concat!(
            "update oncebox_operation set lease_until = utc_timestamp(6) + interval ? microsecond, lease_seconds = ? / 1000000, \
               updated_at = utc_timestamp(6) where ",
            is_ours!()
        ));
        let beat = beat.bind(super::micros(lease)).bind(super::micros(lease));
        Ok(Fenced::rows(ours(beat, driven).run(&self.pool).await?.rows_affected()))
    }

    async fn begin_send(&self, driven: &Driven, effect: &str) -> Result<Option<u32>, StoreError> {
        let mut transaction = self.pool.begin(START).await?;
        lock(&mut transaction, driven.operation_id).await?;
        let still = sqlx::query(concat!(
            "select 1 from oncebox_operation where ",
            is_ours!(),
            " and lease_until > utc_timestamp(6) \
              and lease_until <= utc_timestamp(6) + interval round(lease_seconds * 1000000) microsecond"
        ));
        let still = ours(still, driven).optional(&mut transaction).await?;
        let (id, effect) = (driven.operation_id.as_bytes().to_vec(), effect.as_bytes().to_vec());
        let mut send = None;
        if still.is_some() {
            let begin = sqlx::query(
                "update oncebox_operation_intent set sends = sends + 1, last_sent_at = greatest(last_sent_at, utc_timestamp(6)) \
                 where operation_id = ? and effect = ? and outcome is null",
            );
            if begin.bind(&id).bind(&effect).run(&mut transaction).await?.rows_affected() == 1 {
                let count = sqlx::query_scalar(
                    "select sends from oncebox_operation_intent where operation_id = ? and effect = ?",
                );
                let count: i32 = count.bind(&id).bind(&effect).one(&mut transaction).await?;
                send = Some(count.unsigned_abs());
            }
        }
        transaction.commit().await?;
        Ok(send)
    }

    async fn take_back_send(&self, driven: &Driven, effect: &str, send: u32) -> Result<Fenced, StoreError> {
        let mut transaction = self.pool.begin(START).await?;
        lock(&mut transaction, driven.operation_id).await?;
        let back = sqlx::query(
            "update oncebox_operation_intent set sends = sends - 1 \
             where operation_id = ? and effect = ? and outcome is null and sends = ? and sends > 1 and exists (select 1 \
               from oncebox_operation o where o.operation_id = oncebox_operation_intent.operation_id and o.epoch = ? and o.owner = ?)",
        );
        let back = back.bind(driven.operation_id.as_bytes().to_vec()).bind(effect.as_bytes().to_vec()).bind(send);
        let back = back.bind(driven.epoch).bind(driven.owner.as_bytes().to_vec());
        let fenced = Fenced::rows(back.run(&mut transaction).await?.rows_affected());
        transaction.commit().await?;
        Ok(fenced)
    }

    async fn observe(&self, evidence: &NewEvidence) -> Result<(), StoreError> {
        if !evidence.asks_to_wait() {
            append(evidence).run(&self.pool).await?;
            return Ok(());
        }
        let mut transaction = self.pool.begin(START).await?;
        append(evidence).run(&mut transaction).await?;
        let (id, effect) = (evidence.operation_id.as_bytes().to_vec(), evidence.effect.as_bytes().to_vec());
        let forget = sqlx::query(FORGET_WAITS).bind(id.clone()).bind(effect.clone()).bind(id).bind(effect);
        forget.run(&mut transaction).await?;
        Ok(transaction.commit().await?)
    }

    async fn leave(&self, driven: &Driven, leave: Leave<'_>) -> Result<Fenced, StoreError> {
        let mut transaction = self.pool.begin(START).await?;
        let fenced = leave_in(&mut transaction, driven, leave).await?;
        transaction.commit().await?;
        Ok(fenced)
    }

    async fn operation(&self, operation_id: Uuid) -> Result<Option<StoredOperation>, StoreError> {
        read(&mut self.pool.acquire().await?, operation_id).await
    }

    async fn unpark(&self, operation_id: Uuid) -> Result<Fenced, StoreError> {
        let mut transaction = self.pool.begin(START).await?;
        lock(&mut transaction, operation_id).await?;
        let unpark = sqlx::query(
            "update oncebox_operation set parked = null, due_at = utc_timestamp(6), updated_at = utc_timestamp(6) \
             where operation_id = ? and parked is not null",
        );
        let done = unpark.bind(operation_id.as_bytes().to_vec()).run(&mut transaction).await?;
        transaction.commit().await?;
        Ok(Fenced::rows(done.rows_affected()))
    }

    async fn deployment(&self) -> Result<Uuid, StoreError> {
        let id: Vec<u8> = sqlx::query_scalar("select deployment_id from oncebox_deployment").one(&self.pool).await?;
        Ok(Uuid::from_bytes(super::sixteen("deployment_id", &id)?))
    }
}

/// What asks to wait is said by the last answer alone: a provider that asks for it all day leaves
/// one row. None of them proves anything.
const FORGET_WAITS: &str = "delete from oncebox_operation_evidence where operation_id = ? and effect = ? and verdict = 'wait' and evidence_id < \
     (select last from (select max(evidence_id) as last from oncebox_operation_evidence \
                         where operation_id = ? and effect = ? and verdict = 'wait') w)";

/// The statement that appends one row of evidence; the server sets its time.
pub(super) fn append<'q>(evidence: &NewEvidence) -> Query<'q> {
    let insert = sqlx::query(
        "insert into oncebox_operation_evidence (operation_id, effect, epoch, send, kind, verdict, status, bytes, bytes_kid, \
           observed_at) values (?, ?, ?, ?, ?, ?, ?, ?, ?, utc_timestamp(6))",
    );
    insert
        .bind(evidence.operation_id.as_bytes().to_vec())
        .bind(evidence.effect.as_bytes().to_vec())
        .bind(evidence.epoch)
        .bind(evidence.send)
        .bind(evidence.kind.clone())
        .bind(evidence.verdict.clone())
        .bind(evidence.status)
        .bind(evidence.bytes.bytes.clone())
        .bind(evidence.bytes.kid.clone())
}

/// Binds what [`is_ours`] compares.
fn ours<'q>(statement: Query<'q>, driven: &Driven) -> Query<'q> {
    statement.bind(driven.operation_id.as_bytes().to_vec()).bind(driven.epoch).bind(driven.owner.as_bytes().to_vec())
}

/// Locks the row of an operation, if there is one, and gives its epoch.
pub(super) async fn lock(transaction: &mut Bounded<MySql>, operation_id: Uuid) -> Result<Option<i64>, StoreError> {
    let lock = sqlx::query_scalar(LOCK).bind(operation_id.as_bytes().to_vec());
    Ok(lock.optional(transaction).await?)
}

/// Takes an operation whose row is locked at this epoch, if it is free.
async fn take(
    transaction: &mut Bounded<MySql>,
    operation_id: Uuid,
    epoch: i64,
    lease: Duration,
) -> Result<Option<Driven>, StoreError> {
    let driven = Driven { operation_id, owner: Uuid::now_v7(), epoch: epoch + 1 };
    let done = sqlx::query(TAKE)
        .bind(driven.owner.as_bytes().to_vec())
        .bind(super::micros(lease))
        .bind(super::micros(lease))
        .bind(operation_id.as_bytes().to_vec())
        .run(transaction)
        .await?;
    Ok((done.rows_affected() == 1).then_some(driven))
}

/// Gives an operation out of our hands; also where its record is gone.
async fn leave_in(transaction: &mut Bounded<MySql>, driven: &Driven, leave: Leave<'_>) -> Result<Fenced, StoreError> {
    let (stage, due, parked) = leave.columns();
    let left = sqlx::query(LEAVE)
        .bind(stage.map(Stage::as_str))
        .bind(due.is_some_and(|due| due.attempt))
        .bind(parked)
        .bind(due.and_then(|due| due.after).map(super::micros))
        .bind(parked);
    let fenced = Fenced::rows(ours(left, driven).run(&mut *transaction).await?.rows_affected());
    if let (Fenced::Done, Some(stage)) = (fenced, stage) {
        follows(follow(&mut *transaction, driven.operation_id, stage).await)?;
    }
    if fenced == Fenced::Done && leave.takes_the_mark() {
        let unmark = sqlx::query("delete from oncebox_operation_phase where operation_id = ?");
        unmark.bind(driven.operation_id.as_bytes().to_vec()).run(transaction).await?;
    }
    Ok(fenced)
}

/// Brings the record after its operation.
pub(super) async fn follow(
    transaction: &mut Bounded<MySql>,
    operation_id: Uuid,
    stage: Stage,
) -> Result<(), StoreError> {
    let follow = sqlx::query(
        "update oncebox_idempotency_request set state = ?, updated_at = utc_timestamp(6) \
         where operation_id = ? and mode = 'phased' and outcome_at is null",
    );
    let follow = follow.bind(stage.record().as_str()).bind(operation_id.as_bytes().to_vec());
    if follow.run(transaction).await?.rows_affected() == 0 {
        return Err(no_record(operation_id));
    }
    Ok(())
}

pub(super) async fn read(
    connection: &mut Bounded<MySql>,
    operation_id: Uuid,
) -> Result<Option<StoredOperation>, StoreError> {
    let id = operation_id.as_bytes().to_vec();
    let Some(row) = sqlx::query(OPERATION).bind(&id).optional(&mut *connection).await? else { return Ok(None) };
    let intents = sqlx::query(INTENTS).bind(&id).all(&mut *connection).await?;
    let intents = intents.iter().map(intent_of).collect::<Result<_, _>>()?;
    let evidence = evidence(connection, operation_id).await?;
    operation_of(&row, intents, evidence).map(Some)
}

pub(super) async fn evidence(
    connection: &mut Bounded<MySql>,
    operation_id: Uuid,
) -> Result<Vec<StoredEvidence>, StoreError> {
    let rows = sqlx::query(EVIDENCE).bind(operation_id.as_bytes().to_vec()).all(connection).await?;
    rows.iter().map(evidence_of).collect()
}
