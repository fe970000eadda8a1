//! The transaction of a phase (O1, O5, O9).

use std::any::Any;

use async_trait::async_trait;
use sqlx::{AssertSqlSafe, MySql, Row, query, raw_sql};
use uuid::Uuid;

use super::super::inbox::START_HANDLER;
use super::super::operations::{DUPLICATE, Held, SHORT_WAIT, USUAL_WAIT, finish, is_locked, staked};
use super::super::schema::number;
use super::super::{MySqlStore, micros};
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

/// A transaction in which one phase runs, with `autocommit = 0`.
#[derive(Debug)]
pub(in crate::store) struct MySqlPhaseTx {
    held: Held,
    driven: Driven,
    record: RecordFence,
    settled: Settled,
}

/// By which InnoDB ends a transaction that its owner did not: a lock that did not come (where the
/// server is set so), a deadlock, also of XA and of group replication, a record that changed since
/// it was read (MariaDB).
const ENDING: [u32; 5] = [1205, 1213, 1614, 3101, 1020];

/// Claims, and inserts the operation.
pub(super) async fn begin_first(
    store: &MySqlStore,
    new: &NewOperation,
    basis: Basis<'_>,
) -> Result<Begun<MySqlPhaseTx>, StoreError> {
    new.claim.requires(&[Mode::Phased])?;
    let owned = new.claim.owned(basis);
    let mut transaction = match staked(store, &new.claim, basis, &owned).await? {
        Begun::Claimed(transaction) => transaction,
        Begun::Existing(record) => return Ok(Begun::Existing(record)),
        Begun::Locked => return Ok(Begun::Locked),
    };
    if let Basis::Anew(seen) = basis
        && !has_conflict(&mut transaction, seen.operation_id).await?
    {
        forget(&mut transaction, seen.operation_id, false).await?;
    }
    let driven = Driven { operation_id: owned.operation_id, owner: Uuid::now_v7(), epoch: 1 };
    let record = RecordFence { unknown: true, ..RecordFence::from(&owned) };
    let insert = query(
        "insert into oncebox_operation (operation_id, epoch, owner, key_digest, flow, flow_version, point, state, command, \
           command_kid, attempts, lease_until, lease_seconds, due_at, created_at, updated_at) \
         values (?, ?, ?, ?, ?, ?, ?, 'RECEIVED', ?, ?, 0, utc_timestamp(6) + interval ? microsecond, ? / 1000000, \
           utc_timestamp(6), utc_timestamp(6), utc_timestamp(6))",
    );
    ours(insert, &driven)
        .bind(record.digest.clone())
        .bind(new.flow.as_bytes())
        .bind(new.flow_version)
        .bind(FIRST_POINT.as_bytes())
        .bind(&new.command.bytes)
        .bind(&new.command.kid)
        .bind(micros(new.claim.lease))
        .bind(micros(new.claim.lease))
        .run(&mut transaction)
        .await?;
    let held = Held::new(transaction).await?;
    Ok(Begun::Claimed(MySqlPhaseTx { held, driven, record, settled: Settled::default() }))
}

/// Whether a person must look at it first.
async fn has_conflict(transaction: &mut Bounded<MySql>, operation_id: Uuid) -> Result<bool, StoreError> {
    let conflict = query(words(HAS_CONFLICT, Dialect::MySql));
    Ok(conflict.bind(operation_id.as_bytes().to_vec()).optional(transaction).await?.is_some())
}

/// Takes away what was kept of an operation whose key is used anew, or forgotten; `but_late_runs`:
/// not that a run succeeded.
pub(in crate::store::mysql) async fn forget(
    transaction: &mut Bounded<MySql>,
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
        "delete from oncebox_operation_phase where operation_id = ?",
    ] {
        query(statement).bind(operation_id.as_bytes().to_vec()).run(&mut *transaction).await?;
    }
    Ok(())
}

pub(super) async fn begin_phase(store: &MySqlStore, driven: &Driven) -> Result<MySqlPhaseTx, StoreError> {
    let mut transaction = store.pool.begin(START_HANDLER).await?;
    let Some(record) = fence_of(&mut transaction, driven.operation_id).await? else {
        return Err(missing(transaction, driven).await?);
    };
    held("", transaction, record, driven).await
}

pub(super) async fn begin_run(
    store: &MySqlStore,
    driven: &Driven,
    point: &str,
) -> Result<Run<MySqlPhaseTx>, StoreError> {
    let mut transaction = store.pool.begin(AssertSqlSafe(format!("{SHORT_WAIT}; {START_HANDLER}"))).await?;
    let refused = match mark(&mut transaction, driven).await {
        Ok(true) => None,
        Ok(false) => Some(Run::Marked),
        Err(error) if is_locked(&error) => Some(Run::Unended),
        Err(error) => return Err(error.into()),
    };
    if let Some(refused) = refused {
        transaction.rollback().await?;
        return Ok(refused);
    }
    let Some((record, stands)) = standing(&mut transaction, driven, point).await? else {
        return Err(missing(transaction, driven).await?);
    };
    if stands {
        return Ok(Run::Begun(held(&format!("{USUAL_WAIT}; "), transaction, record, driven).await?));
    }
    transaction.rollback().await?;
    Ok(Run::Overtaken)
}

/// Whether the mark is ours. Of a transaction that has one and has not ended the first statement
/// says so at once, which MySQL knows no other way to do; what comes between the two is waited for
/// as long as [`SHORT_WAIT`] says.
async fn mark(transaction: &mut Bounded<MySql>, driven: &Driven) -> Result<bool, sqlx::Error> {
    let id = driven.operation_id.as_bytes().to_vec();
    let there = query("select 1 from oncebox_operation_phase where operation_id = ? for update nowait");
    if there.bind(&id).optional(&mut *transaction).await?.is_some() {
        return Ok(false);
    }
    let mark =
        query("insert into oncebox_operation_phase (operation_id, epoch, began_at) values (?, ?, utc_timestamp(6))");
    match mark.bind(&id).bind(driven.epoch).run(transaction).await {
        Ok(_) => Ok(true),
        Err(error) if number(&error) == Some(DUPLICATE) => Ok(false),
        Err(error) => Err(error),
    }
}

/// What fences the record, and whether the operation is where its driver saw it, and nobody else
/// has driven it since: asked under the mark. Whoever takes it up from now on finds our mark before
/// it runs.
async fn standing(
    transaction: &mut Bounded<MySql>,
    driven: &Driven,
    point: &str,
) -> Result<Option<(RecordFence, bool)>, StoreError> {
    let standing = query(
        "select r.key_digest, r.epoch, \
           cast(coalesce(o.epoch = ? and o.point = ? and o.parked is null and o.outcome_at is null, false) as signed) \
         from oncebox_idempotency_request r left join oncebox_operation o on o.operation_id = r.operation_id \
         where r.operation_id = ? and r.mode = 'phased'",
    );
    let standing = standing.bind(driven.epoch).bind(point.as_bytes().to_vec());
    let row = standing.bind(driven.operation_id.as_bytes().to_vec()).optional(transaction).await?;
    let Some(row) = row else { return Ok(None) };
    let record = RecordFence { digest: row.try_get(0)?, epoch: row.try_get(1)?, owner: None, unknown: true };
    Ok(Some((record, row.try_get::<i64, _>(2)? != 0)))
}

async fn missing(mut transaction: Bounded<MySql>, driven: &Driven) -> Result<StoreError, StoreError> {
    transaction.rollback().await?;
    Ok(StoreError::Fenced(format!("there is no operation {}", driven.operation_id)))
}

async fn held(
    first: &str,
    transaction: Bounded<MySql>,
    record: RecordFence,
    driven: &Driven,
) -> Result<MySqlPhaseTx, StoreError> {
    let held = Held::behind(first, transaction).await?;
    Ok(MySqlPhaseTx { held, driven: driven.clone(), record, settled: Settled::default() })
}

/// What fences the record of an operation.
pub(in crate::store::mysql) async fn fence_of(
    transaction: &mut Bounded<MySql>,
    operation_id: Uuid,
) -> Result<Option<RecordFence>, StoreError> {
    let record = sqlx::query_as(
        "select key_digest, epoch from oncebox_idempotency_request where operation_id = ? and mode = 'phased'",
    );
    let record: Option<(Vec<u8>, i64)> = record.bind(operation_id.as_bytes().to_vec()).optional(transaction).await?;
    Ok(record.map(|(digest, epoch)| RecordFence { digest, epoch, owner: None, unknown: true }))
}

/// Writes the outcome of an operation to its record.
pub(in crate::store::mysql) async fn end_record(
    transaction: &mut Bounded<MySql>,
    operation_id: Uuid,
    record: &RecordFence,
    outcome: &Outcome,
    retention: &Retention,
) -> Result<(), StoreError> {
    if finish(transaction, record, outcome, retention).await? != Fenced::Done {
        return Err(no_record(operation_id));
    }
    // One time for both, though each statement has read the clock (O3).
    let same = query(
        "update oncebox_operation o join oncebox_idempotency_request r on r.operation_id = o.operation_id \
         set o.outcome_at = r.outcome_at, o.expires_at = r.expires_at where o.operation_id = ?",
    );
    same.bind(operation_id.as_bytes().to_vec()).run(transaction).await?;
    Ok(())
}

impl MySqlPhaseTx {
    fn id(&self) -> Vec<u8> {
        self.driven.operation_id.as_bytes().to_vec()
    }

    /// What the last statement failed with, where by that InnoDB may have ended the transaction: a
    /// deadlock above all. Asked before any other statement, which would be the last one then; and
    /// of the server, because a handler may hide it in an error of its own.
    async fn noted(&mut self) -> Result<Option<String>, StoreError> {
        let warnings = raw_sql("show warnings").all(&mut self.held.transaction).await?;
        for row in warnings {
            let (code, message): (u32, String) = (row.try_get(1)?, row.try_get(2)?);
            if ENDING.contains(&code) {
                return Ok(Some(message));
            }
        }
        Ok(None)
    }

    /// It moves on: a mark that is left says that it did not.
    async fn unmark(&mut self) -> Result<(), StoreError> {
        let unmark = query("delete from oncebox_operation_phase where operation_id = ? and epoch = ?");
        unmark.bind(self.id()).bind(self.driven.epoch).run(&mut self.held.transaction).await?;
        Ok(())
    }

    async fn settle_effects(&mut self) -> Result<(), StoreError> {
        let id = self.id();
        for (effect, outcome) in self.settled.iter() {
            let settle = query(
                "update oncebox_operation_intent set outcome = ?, settled_at = utc_timestamp(6) \
                 where operation_id = ? and effect = ?",
            );
            let settle = settle.bind(outcome).bind(&id).bind(effect.as_bytes());
            if settle.run(&mut self.held.transaction).await?.rows_affected() == 0 {
                return Err(no_effect(effect));
            }
        }
        Ok(())
    }

    async fn insert_intent(&mut self, intent: &NewIntent) -> Result<(), StoreError> {
        let insert = query(
            "insert into oncebox_operation_intent (operation_id, effect, strategy, provider_key, request, request_kid, adapter, \
               adapter_version, undoes, first_sent_at, last_sent_at, sends) \
             values (?, ?, ?, ?, ?, ?, ?, ?, ?, utc_timestamp(6), utc_timestamp(6), 1)",
        );
        let insert = insert
            .bind(self.id())
            .bind(intent.effect.as_bytes())
            .bind(&intent.strategy)
            .bind(intent.provider_key.as_bytes())
            .bind(&intent.request.bytes)
            .bind(&intent.request.kid)
            .bind(intent.adapter.as_bytes())
            .bind(intent.adapter_version)
            .bind(intent.undoes.as_ref().map(|undoes| undoes.as_bytes().to_vec()));
        match insert.run(&mut self.held.transaction).await {
            Ok(_) => Ok(()),
            Err(error) if number(&error) == Some(DUPLICATE) => Err(twice(intent)),
            Err(error) => Err(error.into()),
        }
    }
}

fn unproven(error: StoreError) -> StoreError {
    match error {
        StoreError::Busy(error) => StoreError::Unavailable(error),
        other => other,
    }
}

#[async_trait]
impl PhaseTx for MySqlPhaseTx {
    fn driven(&self) -> &Driven {
        &self.driven
    }

    fn any_connection(&mut self) -> &mut (dyn Any + Send) {
        self.held.transaction.lend()
    }

    async fn undo_effects(&mut self) -> Result<Proof, StoreError> {
        // A question that is cut off, as by KILL QUERY, proves nothing: it is no `Busy`.
        let noted = self.noted().await.map_err(unproven)?;
        let proof = self.held.prove("rollback to").await.map_err(unproven)?;
        if proof != Proof::Ended {
            return Ok(proof);
        }
        match (self.held.nothing_committed().await.map_err(unproven)?, noted) {
            (true, Some(error)) => Err(StoreError::Busy(sqlx::Error::Protocol(error))),
            // What ran after it waits for a COMMIT, which does not come.
            (true, None) => Ok(Proof::Aborted),
            (false, _) => Ok(proof),
        }
    }

    async fn evidence(&mut self) -> Result<Vec<StoredEvidence>, StoreError> {
        evidence(&mut self.held.transaction, self.driven.operation_id).await
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
        let proof = self.held.prove("release").await?;
        if proof != Proof::Same {
            return Ok((proof, Fenced::LostOwnership));
        }
        let advance = query(concat!(
            "update oncebox_operation set point = ?, state = ?, updated_at = utc_timestamp(6) where ",
            is_ours!(),
            " and point = ?"
        ));
        let advance = ours(advance.bind(to.as_bytes().to_vec()).bind(stage.as_str()), &self.driven);
        let moved = advance.bind(from.as_bytes().to_vec()).run(&mut self.held.transaction).await?;
        if moved.rows_affected() == 0 {
            return Ok((proof, Fenced::LostOwnership));
        }
        follow(&mut self.held.transaction, self.driven.operation_id, stage).await?;
        self.unmark().await?;
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
        let proof = self.held.prove("release").await?;
        if proof != Proof::Same {
            return Ok((proof, Fenced::LostOwnership));
        }
        let end = query(concat!(
            "update oncebox_operation set state = ?, owner = null, lease_until = null, lease_seconds = null, due_at = null, \
               updated_at = utc_timestamp(6), outcome_at = utc_timestamp(6), expires_at = utc_timestamp(6) + interval ? microsecond \
             where ",
            is_ours!(),
            " and point = ?"
        ));
        let end = ours(end.bind(stage.as_str()).bind(micros(retention.ttl)), &self.driven);
        if end.bind(from.as_bytes().to_vec()).run(&mut self.held.transaction).await?.rows_affected() == 0 {
            return Ok((proof, Fenced::LostOwnership));
        }
        end_record(&mut self.held.transaction, self.driven.operation_id, &self.record, outcome, retention).await?;
        self.unmark().await?;
        self.settle_effects().await?;
        Ok((proof, Fenced::Done))
    }

    async fn park(&mut self, reason: &str) -> Result<Fenced, StoreError> {
        leave_in(&mut self.held.transaction, &self.driven, Leave::Park(reason)).await
    }

    async fn commit(mut self: Box<Self>) -> Result<(), StoreError> {
        self.held.transaction.commit().await
    }

    async fn rollback(mut self: Box<Self>) -> Result<(), StoreError> {
        self.held.transaction.rollback().await.map_err(StoreError::from)
    }
}
