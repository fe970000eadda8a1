//! The transaction of a phase (O1, O5, O9).

use std::time::Duration;

use std::any::Any;

use async_trait::async_trait;
use sqlx::query;
use sqlx::sqlite::SqliteConnection;
use uuid::Uuid;

use super::super::connect::SqliteStore;
use super::super::operations::{Savepoint, finish, staked};
use super::super::write::Write;
use super::super::{millis, now_ms};
use super::{evidence, follow, is_ours, leave_in, ours};
use crate::error::StoreError;
use crate::policy::operation::Mode;
use crate::policy::operation::flow::Stage;
use crate::policy::operation::retention::Retention;
use crate::store::operations::RecordFence;
use crate::store::phases::{Settled, end_stage, may_advance, no_effect, no_record, twice};
use crate::store::sql::pieces::HAS_CONFLICT;
use crate::store::sql::words;
use crate::store::{
    Basis, Begun, Dialect, Driven, FIRST_POINT, Fenced, Leave, NewIntent, NewOperation, Outcome, PhaseTx, Proof, StoredEvidence,
};

/// A transaction in which one phase runs. It holds the turn and the write lock of the file.
#[derive(Debug)]
pub(in crate::store) struct SqlitePhaseTx {
    write: Write,
    driven: Driven,
    record: RecordFence,
    savepoint: Savepoint,
    settled: Settled,
}

/// Claims, and inserts the operation.
pub(super) async fn begin_first(
    store: &SqliteStore,
    new: &NewOperation,
    basis: Basis<'_>,
    patience: Duration,
) -> Result<Begun<SqlitePhaseTx>, StoreError> {
    new.claim.requires(&[Mode::Phased])?;
    let owned = new.claim.owned(basis);
    let mut write = match staked(store, &new.claim, basis, &owned, patience).await? {
        Begun::Claimed(write) => write,
        Begun::Existing(record) => return Ok(Begun::Existing(record)),
        Begun::Locked => return Ok(Begun::Locked),
    };
    if let Basis::Anew(seen) = basis
        && !has_conflict(write.connection(), seen.operation_id).await?
    {
        forget(write.connection(), seen.operation_id, false).await?;
    }
    let driven = Driven { operation_id: owned.operation_id, owner: Uuid::now_v7(), epoch: 1 };
    let record = RecordFence { unknown: true, ..RecordFence::from(&owned) };
    let insert = query(concat!(
        "insert into oncebox_operation (operation_id, epoch, owner, key_digest, flow, flow_version, point, state, command, \
           command_kid, lease_until, lease_ms, due_at, created_at, updated_at) \
         select ?1, ?2, ?3, ?4, ?5, ?6, ?7, 'RECEIVED', ?8, ?9, n.at + ?10, ?10, n.at, n.at, n.at from (select ",
        now_ms!(),
        " as at) as n"
    ));
    ours(insert, &driven)
        .bind(record.digest.clone())
        .bind(new.flow.clone())
        .bind(new.flow_version)
        .bind(FIRST_POINT)
        .bind(new.command.bytes.clone())
        .bind(new.command.kid.clone())
        .bind(millis(new.claim.lease))
        .execute(write.connection())
        .await?;
    let savepoint = Savepoint::set(&mut write).await?;
    Ok(Begun::Claimed(SqlitePhaseTx { write, driven, record, savepoint, settled: Settled::default() }))
}

/// Whether a person must look at it first.
async fn has_conflict(connection: &mut SqliteConnection, operation_id: Uuid) -> Result<bool, StoreError> {
    let conflict = query(words(HAS_CONFLICT, Dialect::Sqlite));
    Ok(conflict.bind(operation_id.as_bytes().to_vec()).fetch_optional(connection).await?.is_some())
}

/// Takes away what was kept of an operation whose key is used anew, or forgotten; `but_late_runs`:
/// not that a run succeeded.
pub(in crate::store::sqlite) async fn forget(
    connection: &mut SqliteConnection,
    operation_id: Uuid,
    but_late_runs: bool,
) -> Result<(), StoreError> {
    let evidence = if but_late_runs {
        "delete from oncebox_operation_evidence where operation_id = ? and not (kind = 'run' and verdict = 'success')"
    } else {
        "delete from oncebox_operation_evidence where operation_id = ?"
    };
    for statement in [
        "delete from oncebox_operation where operation_id = ?",
        "delete from oncebox_operation_intent where operation_id = ?",
        evidence,
    ] {
        query(statement).bind(operation_id.as_bytes().to_vec()).execute(&mut *connection).await?;
    }
    Ok(())
}

pub(super) async fn begin_phase(store: &SqliteStore, driven: &Driven) -> Result<SqlitePhaseTx, StoreError> {
    let mut write = store.write().await?;
    write.guard().await?;
    let Some(record) = fence_of(write.connection(), driven.operation_id).await? else {
        write.rollback().await?;
        return Err(StoreError::Fenced(format!("there is no operation {}", driven.operation_id)));
    };
    let savepoint = Savepoint::set(&mut write).await?;
    Ok(SqlitePhaseTx { write, driven: driven.clone(), record, savepoint, settled: Settled::default() })
}

/// What fences the record of an operation.
pub(in crate::store::sqlite) async fn fence_of(
    connection: &mut SqliteConnection,
    operation_id: Uuid,
) -> Result<Option<RecordFence>, StoreError> {
    let record = sqlx::query_as(
        "select key_digest, epoch from oncebox_idempotency_request where operation_id = ? and mode = 'phased'",
    );
    let record: Option<(Vec<u8>, i64)> =
        record.bind(operation_id.as_bytes().to_vec()).fetch_optional(connection).await?;
    Ok(record.map(|(digest, epoch)| RecordFence { digest, epoch, owner: None, unknown: true }))
}

/// Writes the outcome of an operation to its record.
pub(in crate::store::sqlite) async fn end_record(
    connection: &mut SqliteConnection,
    operation_id: Uuid,
    record: &RecordFence,
    outcome: &Outcome,
    retention: &Retention,
) -> Result<(), StoreError> {
    if finish(&mut *connection, record, outcome, retention).await? != Fenced::Done {
        return Err(no_record(operation_id));
    }
    // One time for both, though each statement has read the clock (O3).
    let same = query(
        "update oncebox_operation as o set outcome_at = r.outcome_at, expires_at = r.expires_at \
         from oncebox_idempotency_request as r where o.operation_id = ?1 and r.operation_id = ?1",
    );
    same.bind(operation_id.as_bytes().to_vec()).execute(connection).await?;
    Ok(())
}

impl SqlitePhaseTx {
    /// Whether the operation is where its driver saw it, and nobody else has driven it since.
    pub(super) async fn still_stands(&mut self, point: &str) -> Result<bool, StoreError> {
        let stands = query(
            "select 1 from oncebox_operation where operation_id = ?1 and epoch = ?2 and point = ?3 and parked is null and outcome_at is null",
        );
        let stands = stands.bind(self.id()).bind(self.driven.epoch).bind(point.to_owned());
        Ok(stands.fetch_optional(self.write.connection()).await?.is_some())
    }

    fn id(&self) -> Vec<u8> {
        self.driven.operation_id.as_bytes().to_vec()
    }

    async fn settle_effects(&mut self) -> Result<(), StoreError> {
        let id = self.id();
        for (effect, outcome) in self.settled.iter() {
            let settle = query(concat!(
                "update oncebox_operation_intent set outcome = ?3, settled_at = ",
                now_ms!(),
                " where operation_id = ?1 and effect = ?2"
            ));
            let settle = settle.bind(&id).bind(effect).bind(outcome).execute(self.write.connection()).await?;
            if settle.rows_affected() == 0 {
                return Err(no_effect(effect));
            }
        }
        Ok(())
    }

    async fn insert_intent(&mut self, intent: &NewIntent) -> Result<(), StoreError> {
        let insert = query(concat!(
            "insert into oncebox_operation_intent (operation_id, effect, strategy, provider_key, request, request_kid, adapter, \
               adapter_version, undoes, first_sent_at, last_sent_at) select ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, n.at, n.at from (select ",
            now_ms!(),
            " as at) as n where true on conflict do nothing"
        ));
        let insert = insert
            .bind(self.id())
            .bind(&intent.effect)
            .bind(&intent.strategy)
            .bind(&intent.provider_key)
            .bind(&intent.request.bytes)
            .bind(&intent.request.kid)
            .bind(&intent.adapter)
            .bind(intent.adapter_version)
            .bind(&intent.undoes);
        if insert.execute(self.write.connection()).await?.rows_affected() == 0 {
            return Err(twice(intent));
        }
        Ok(())
    }
}

#[async_trait]
impl PhaseTx for SqlitePhaseTx {
    fn driven(&self) -> &Driven {
        &self.driven
    }

    fn any_connection(&mut self) -> &mut (dyn Any + Send) {
        self.write.connection()
    }

    async fn undo_effects(&mut self) -> Result<Proof, StoreError> {
        self.savepoint.prove(&mut self.write, "rollback to").await
    }

    async fn evidence(&mut self) -> Result<Vec<StoredEvidence>, StoreError> {
        evidence(self.write.connection(), self.driven.operation_id).await
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
        let proof = self.savepoint.prove(&mut self.write, "release").await?;
        if proof != Proof::Same {
            return Ok((proof, Fenced::LostOwnership));
        }
        let advance = query(concat!(
            "update oncebox_operation set point = ?5, state = ?6, updated_at = ",
            now_ms!(),
            " where ",
            is_ours!(),
            " and point = ?4"
        ));
        let advance = ours(advance, &self.driven).bind(from.to_owned()).bind(to.to_owned()).bind(stage.as_str());
        if advance.execute(self.write.connection()).await?.rows_affected() == 0 {
            return Ok((proof, Fenced::LostOwnership));
        }
        follow(self.write.connection(), self.driven.operation_id, stage).await?;
        self.settle_effects().await?;
        for intent in intents {
            self.insert_intent(intent).await?;
        }
        Ok((proof, Fenced::Done))
    }

    async fn finish(
        &mut self,
        from: &str,
        outcome: &Outcome,
        retention: &Retention,
    ) -> Result<(Proof, Fenced), StoreError> {
        let stage = end_stage(outcome)?;
        let proof = self.savepoint.prove(&mut self.write, "release").await?;
        if proof != Proof::Same {
            return Ok((proof, Fenced::LostOwnership));
        }
        let end = query(concat!(
            "update oncebox_operation set state = ?5, owner = null, lease_until = null, lease_ms = null, due_at = null, \
               updated_at = n.at, outcome_at = n.at, expires_at = n.at + ?6 from (select ",
            now_ms!(),
            " as at) as n where ",
            is_ours!(),
            " and point = ?4"
        ));
        let end = ours(end, &self.driven).bind(from.to_owned()).bind(stage.as_str()).bind(millis(retention.ttl));
        if end.execute(self.write.connection()).await?.rows_affected() == 0 {
            return Ok((proof, Fenced::LostOwnership));
        }
        end_record(self.write.connection(), self.driven.operation_id, &self.record, outcome, retention).await?;
        self.settle_effects().await?;
        Ok((proof, Fenced::Done))
    }

    async fn park(&mut self, reason: &str) -> Result<Fenced, StoreError> {
        leave_in(self.write.connection(), &self.driven, Leave::Park(reason)).await
    }

    async fn commit(self: Box<Self>) -> Result<(), StoreError> {
        self.write.commit().await
    }

    async fn rollback(self: Box<Self>) -> Result<(), StoreError> {
        self.write.rollback().await
    }
}
