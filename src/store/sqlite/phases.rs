//! Operations in phases.
//!
//! Guarantees: one writer at a time makes every fenced statement see what is; a phase moves its
//! operation on in the transaction that it began in, proven by the savepoint set at its beginning,
//! and from the point and epoch that it knew (O1, O9); record and operation change together.

mod tx;

use std::time::Duration;

use async_trait::async_trait;
use sqlx::sqlite::SqliteConnection;
use sqlx::{Row, query, query_scalar};
use uuid::Uuid;

pub(super) use self::tx::{end_record, forget};

use super::connect::SqliteStore;
use super::operations::Query;
use super::{millis, now_ms};
use crate::error::StoreError;
use crate::policy::operation::flow::Stage;
use crate::store::phases::stored::{evidence_of, intent_of, operation_of};
use crate::store::phases::{follows, no_record, unreadable};
use crate::store::{
    Base, Basis, Begun, Driven, Fenced, Leave, NewEvidence, NewOperation, PhaseTx, Phases, Run, StoredEvidence,
    StoredOperation, Taken,
};

/// As [`operation_of`] reads it.
pub(super) const OPERATION: &str = concat!(
    "select n.at * 1000, o.operation_id, r.tenant, r.operation, r.key, o.flow, o.flow_version, o.point, o.state, o.command, \
     o.command_kid, o.epoch, case when o.lease_until > n.at and o.lease_until <= n.at + o.lease_ms then o.lease_until * 1000 end, \
     o.attempts, o.due_at * 1000, o.parked, o.created_at * 1000, o.outcome_at * 1000 from (select ",
    now_ms!(),
    " as at) as n join oncebox_operation as o on o.operation_id = ? \
     left join oncebox_idempotency_request as r on r.key_digest = o.key_digest and r.operation_id = o.operation_id"
);

/// As [`intent_of`] reads it.
pub(super) const INTENTS: &str = "select effect, strategy, provider_key, request, request_kid, adapter, adapter_version, \
    first_sent_at * 1000, last_sent_at * 1000, sends, outcome, undoes from oncebox_operation_intent where operation_id = ? \
    order by first_sent_at, effect";

/// As [`evidence_of`] reads it.
pub(super) const EVIDENCE: &str = "select operation_id, effect, epoch, send, kind, verdict, status, bytes, bytes_kid, observed_at * 1000 \
    from oncebox_operation_evidence where operation_id = ? order by evidence_id";

/// Nobody drives it, and somebody may; a lease that was written before the clock went back is over
/// (R22).
macro_rules! is_free {
    () => {
        concat!(
            "parked is null and outcome_at is null and (owner is null or lease_until <= ",
            now_ms!(),
            " or lease_until > lease_ms + ",
            now_ms!(),
            ")"
        )
    };
}

/// What every statement of a driver is fenced by; a parked operation, and one with its outcome, has
/// no owner.
macro_rules! is_ours {
    () => {
        "operation_id = ?1 and epoch = ?2 and owner = ?3"
    };
}
use is_ours;

pub(super) const TAKE: &str = concat!(
    "update oncebox_operation set epoch = epoch + 1, attempts = attempts + (owner is not null), owner = ?2, lease_until = ?3 + ",
    now_ms!(),
    ", lease_ms = ?3, updated_at = ",
    now_ms!(),
    " where operation_id = ?1 and ",
    is_free!(),
    " returning epoch"
);

/// The longest due first.
pub(super) const DUE: &str = concat!(
    "select operation_id from oncebox_operation where flow = ?1 and due_at <= ",
    now_ms!(),
    " and flow_version in (select value from json_each(?2)) and ",
    is_free!(),
    " and (?4 = '[]' or coalesce((select hex(r.tenant) from oncebox_idempotency_request r \
        where r.key_digest = oncebox_operation.key_digest), '') not in (select value from json_each(?4))) \
      order by due_at limit ?3"
);

const LEAVE: &str = concat!(
    "update oncebox_operation set state = coalesce(?4, state), owner = null, lease_until = null, lease_ms = null, \
       attempts = attempts + ?5, parked = ?7, due_at = case when ?7 is null then coalesce(?6 + ",
    now_ms!(),
    ", due_at) end, updated_at = ",
    now_ms!(),
    " where ",
    is_ours!()
);

#[async_trait]
impl Phases for SqliteStore {
    async fn begin_first(
        &self,
        new: &NewOperation,
        basis: Basis<'_>,
        patience: Duration,
    ) -> Result<Begun<Box<dyn PhaseTx>>, StoreError> {
        Ok(tx::begin_first(self, new, basis, patience).await?.map(|tx| Box::new(tx) as Box<dyn PhaseTx>))
    }

    async fn begin_phase(&self, driven: &Driven) -> Result<Box<dyn PhaseTx>, StoreError> {
        Ok(Box::new(tx::begin_phase(self, driven).await?))
    }

    /// There is no mark: no transaction of a phase is committed but by us.
    async fn begin_run(&self, driven: &Driven, point: &str) -> Result<Run<Box<dyn PhaseTx>>, StoreError> {
        let mut tx = Box::new(tx::begin_phase(self, driven).await?);
        if tx.still_stands(point).await? {
            return Ok(Run::Begun(tx));
        }
        tx.rollback().await?;
        Ok(Run::Overtaken)
    }

    async fn take_operation(&self, operation_id: Uuid, lease: Duration) -> Result<Taken, StoreError> {
        let mut write = self.write().await?;
        let driven = take(write.connection(), operation_id, lease).await?;
        let found = read(write.connection(), operation_id).await?;
        write.commit().await?;
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
        let mut write = self.write().await?;
        let due = query_scalar::<_, Vec<u8>>(DUE);
        let tenants: Vec<String> =
            tenants.iter().map(|tenant| crate::policy::hex::hex(tenant).to_uppercase()).collect();
        let due = due
            .bind(flow)
            .bind(format!("{versions:?}"))
            .bind(limit)
            .bind(format!("{tenants:?}"))
            .fetch_all(write.connection())
            .await?;
        let mut taken = Vec::new();
        for id in due {
            let id = Uuid::from_slice(&id).map_err(|error| StoreError::Corrupt(error.to_string()))?;
            let Some(driven) = take(write.connection(), id, lease).await? else { continue };
            match read(write.connection(), id).await {
                Ok(found) => taken.extend(found.map(|found| (driven, found))),
                Err(error @ StoreError::Corrupt(_)) => {
                    let reason = unreadable(id, &error);
                    leave_in(write.connection(), &driven, Leave::Park(&reason)).await?;
                }
                Err(error) => return Err(error),
            }
        }
        write.commit().await?;
        Ok(taken)
    }

    async fn drive_on(&self, driven: &Driven, lease: Duration) -> Result<Fenced, StoreError> {
        let beat = query(concat!(
            "update oncebox_operation set lease_until = ?4 + ",
            now_ms!(),
            ", lease_ms = ?4, updated_at = ",
            now_ms!(),
            " where ",
            is_ours!()
        ));
        self.fenced(ours(beat, driven).bind(millis(lease))).await
    }

    async fn begin_send(&self, driven: &Driven, effect: &str) -> Result<Option<u32>, StoreError> {
        let mut write = self.write().await?;
        let begin = query(concat!(
            "update oncebox_operation_intent set sends = sends + 1, last_sent_at = max(last_sent_at, ",
            now_ms!(),
            ") where operation_id = ?1 and effect = ?4 and outcome is null and exists (select 1 from oncebox_operation where ",
            is_ours!(),
            " and lease_until > ",
            now_ms!(),
            " and lease_until <= lease_ms + ",
            now_ms!(),
            ") returning sends"
        ));
        let row = ours(begin, driven).bind(effect.to_owned()).fetch_optional(write.connection()).await?;
        let send = row.map(|row| row.try_get(0)).transpose()?;
        write.commit().await?;
        Ok(send)
    }

    async fn take_back_send(&self, driven: &Driven, effect: &str, send: u32) -> Result<Fenced, StoreError> {
        let back = query(concat!(
            "update oncebox_operation_intent set sends = sends - 1 where operation_id = ?1 and effect = ?4 and outcome is null \
             and sends = ?5 and sends > 1 and exists (select 1 from oncebox_operation where ",
            is_ours!(),
            ")"
        ));
        self.fenced(ours(back, driven).bind(effect.to_owned()).bind(send)).await
    }

    async fn observe(&self, evidence: &NewEvidence) -> Result<(), StoreError> {
        if !evidence.asks_to_wait() {
            return self.fenced(append(evidence)).await.map(|_| ());
        }
        let mut write = self.write().await?;
        append(evidence).execute(write.connection()).await?;
        let forget = query(FORGET_WAITS).bind(evidence.operation_id.as_bytes().to_vec()).bind(evidence.effect.clone());
        forget.execute(write.connection()).await?;
        write.commit().await
    }

    async fn leave(&self, driven: &Driven, leave: Leave<'_>) -> Result<Fenced, StoreError> {
        let mut write = self.write().await?;
        let fenced = leave_in(write.connection(), driven, leave).await?;
        write.commit().await?;
        Ok(fenced)
    }

    async fn operation(&self, operation_id: Uuid) -> Result<Option<StoredOperation>, StoreError> {
        read(&mut *self.pool().acquire().await?, operation_id).await
    }

    async fn unpark(&self, operation_id: Uuid) -> Result<Fenced, StoreError> {
        let unpark = query(concat!(
            "update oncebox_operation set parked = null, due_at = ",
            now_ms!(),
            ", updated_at = ",
            now_ms!(),
            " where operation_id = ? and parked is not null"
        ));
        self.fenced(unpark.bind(operation_id.as_bytes().to_vec())).await
    }

    async fn deployment(&self) -> Result<Uuid, StoreError> {
        let id: Vec<u8> = query_scalar("select deployment_id from oncebox_deployment").fetch_one(self.pool()).await?;
        Uuid::from_slice(&id).map_err(|error| StoreError::Corrupt(format!("the id of the deployment: {error}")))
    }
}

/// What asks to wait is said by the last answer alone: a provider that asks for it all day leaves
/// one row. None of them proves anything.
const FORGET_WAITS: &str = "delete from oncebox_operation_evidence where operation_id = ?1 and effect = ?2 and verdict = 'wait' and evidence_id < \
     (select last from (select max(evidence_id) as last from oncebox_operation_evidence \
                         where operation_id = ?1 and effect = ?2 and verdict = 'wait') w)";

/// The statement that appends one row of evidence; the database sets its time.
pub(super) fn append<'q>(evidence: &NewEvidence) -> Query<'q> {
    let insert = query(concat!(
        "insert into oncebox_operation_evidence (operation_id, effect, epoch, send, kind, verdict, status, bytes, bytes_kid, \
           observed_at) values (?, ?, ?, ?, ?, ?, ?, ?, ?, ",
        now_ms!(),
        ")"
    ));
    insert
        .bind(evidence.operation_id.as_bytes().to_vec())
        .bind(evidence.effect.clone())
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

async fn take(
    connection: &mut SqliteConnection,
    operation_id: Uuid,
    lease: Duration,
) -> Result<Option<Driven>, StoreError> {
    let owner = Uuid::now_v7();
    let take = query_scalar(TAKE).bind(operation_id.as_bytes().to_vec()).bind(owner.as_bytes().to_vec());
    let epoch: Option<i64> = take.bind(millis(lease)).fetch_optional(connection).await?;
    Ok(epoch.map(|epoch| Driven { operation_id, owner, epoch }))
}

/// Gives an operation out of our hands; also where its record is gone.
async fn leave_in(connection: &mut SqliteConnection, driven: &Driven, leave: Leave<'_>) -> Result<Fenced, StoreError> {
    let (stage, due, parked) = leave.columns();
    let left = ours(query(LEAVE), driven)
        .bind(stage.map(Stage::as_str))
        .bind(due.is_some_and(|due| due.attempt))
        .bind(due.and_then(|due| due.after).map(millis))
        .bind(parked.map(str::to_owned));
    let fenced = Fenced::rows(left.execute(&mut *connection).await?.rows_affected());
    if let (Fenced::Done, Some(stage)) = (fenced, stage) {
        follows(follow(connection, driven.operation_id, stage).await)?;
    }
    Ok(fenced)
}

/// Brings the record after its operation.
pub(super) async fn follow(
    connection: &mut SqliteConnection,
    operation_id: Uuid,
    stage: Stage,
) -> Result<(), StoreError> {
    let follow = query(concat!(
        "update oncebox_idempotency_request set state = ?2, updated_at = ",
        now_ms!(),
        " where operation_id = ?1 and mode = 'phased' and outcome_at is null"
    ));
    let follow = follow.bind(operation_id.as_bytes().to_vec()).bind(stage.record().as_str());
    if follow.execute(connection).await?.rows_affected() == 0 {
        return Err(no_record(operation_id));
    }
    Ok(())
}

pub(super) async fn read(
    connection: &mut SqliteConnection,
    operation_id: Uuid,
) -> Result<Option<StoredOperation>, StoreError> {
    let id = operation_id.as_bytes().to_vec();
    let Some(row) = query(OPERATION).bind(&id).fetch_optional(&mut *connection).await? else { return Ok(None) };
    let intents = query(INTENTS).bind(&id).fetch_all(&mut *connection).await?;
    let intents = intents.iter().map(intent_of).collect::<Result<_, _>>()?;
    let evidence = evidence(connection, operation_id).await?;
    operation_of(&row, intents, evidence).map(Some)
}

pub(super) async fn evidence(
    connection: &mut SqliteConnection,
    operation_id: Uuid,
) -> Result<Vec<StoredEvidence>, StoreError> {
    let rows = query(EVIDENCE).bind(operation_id.as_bytes().to_vec()).fetch_all(connection).await?;
    rows.iter().map(evidence_of).collect()
}
