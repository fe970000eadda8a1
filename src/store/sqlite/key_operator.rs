//! What an operator sees and does of keys and operations.
//!
//! Guarantee: a change, the operator's words and the audit row are one transaction.

use sqlx::sqlite::SqliteConnection;
use sqlx::{query, query_scalar};
use uuid::Uuid;

use super::connect::SqliteStore;
use super::operations::{finish, look_columns, none_late};
use super::phases::end_record;
use super::write::Write;
use super::{millis, now_ms};
use crate::error::StoreError;
use crate::policy::operation::versions::Announced;
use crate::policy::operation::{Record, State};
use crate::store::key_operator::{Audit, judged, judgement, nothing_known, overruled};
use crate::store::operations::RecordFence;
use crate::store::operations::stored::look_of;
use crate::store::phases::no_record;
use crate::store::sql::announced::live;
use crate::store::sql::phases::{append, fence_of, follow, forget, read};
use crate::store::{
    ActContext, Base, Fenced, FoundOperations, KeyChange, KeyFilter, KeyOperator, Look, OperationChange,
    OperationFilter, StoredOperation,
};

/// As [`look_of`] reads it.
const KEYS: &str = concat!(
    "select ",
    look_columns!(),
    " from oncebox_idempotency_request as r join (select ",
    now_ms!(),
    " as at) as n \
     left join oncebox_idempotency_purge as p on p.operation = r.operation \
     left join oncebox_operation as o on r.mode = 'phased' and o.operation_id = r.operation_id \
     where r.key_digest between ?1 and ?2 and (?3 is null or r.tenant = ?3) and (?4 is null or r.operation = ?4) \
       and (?5 is null or r.state = ?5) and (not ?6 or r.expires_at < n.at) and (?7 is null or r.created_at < n.at - ?7) \
       and (not ?8 or (r.outcome_at is not null \
            and not exists (select 1 from oncebox_operation_intent as i where i.operation_id = r.operation_id) \
            and (r.state = 'COMPLETED' or not exists (select 1 from oncebox_operation_evidence as e \
                 where e.operation_id = r.operation_id and e.kind = 'run' and e.verdict = 'success')))) \
     order by r.created_at, r.key_digest limit ?9"
);

/// Whether the operation `o` has a conflict that no person has judged: evidence of an effect says
/// another thing than what was decided, or the operation failed with an effect that stands. Such an
/// operation is listed, and is kept until it is judged. A mismatch went to an operator by itself,
/// whose word about it is that judgement. That a duplicate was declined which an operator accepted
/// says nothing of the send that it repeats. For evidence alone it is
/// [`Evidence::contradicts`](crate::policy::operation::provider::Evidence::contradicts).
macro_rules! conflict {
    () => {
        "(o.outcome_at is not null and (exists (select 1 from oncebox_operation_evidence e \
            join oncebox_operation_intent i on i.operation_id = e.operation_id and i.effect = e.effect \
            where e.operation_id = o.operation_id and e.kind <> 'operator' and (e.verdict = 'mismatch' or e.verdict = \
              case when coalesce(i.outcome, case o.state when 'SUCCEEDED' then 'succeeded' else 'failed' end) = 'succeeded' \
                   then 'failure' else 'success' end) \
              and not exists (select 1 from oncebox_operation_evidence w \
                   where w.operation_id = e.operation_id and w.evidence_id > e.evidence_id and w.kind = 'operator' \
                     and w.effect in (e.effect, '') and (w.verdict = 'indefinite' or (e.verdict = 'mismatch' and w.verdict <> 'waived'))) \
              and not (e.verdict = 'failure' and e.send > 0 and exists (select 1 from oncebox_operation_evidence v \
                   where v.operation_id = e.operation_id and v.effect = e.effect and v.kind = 'operator' and v.verdict = 'waived' and v.send > 0 \
                     and not exists (select 1 from oncebox_operation_evidence n where n.operation_id = v.operation_id \
                          and n.effect = v.effect and n.send = v.send and n.verdict = 'not-sent')))) \
          or (o.state = 'FAILED' and exists (select 1 from oncebox_operation_intent i \
            where i.operation_id = o.operation_id and i.outcome = 'succeeded' and i.undoes is null and i.strategy <> 'repeatable' \
              and not exists (select 1 from oncebox_operation_intent u \
                   where u.operation_id = i.operation_id and u.undoes = i.effect and u.outcome = 'succeeded') \
              and not exists (select 1 from oncebox_operation_evidence w \
                   where w.operation_id = i.operation_id and w.kind = 'operator' and w.verdict = 'indefinite' \
                     and w.effect in (i.effect, ''))))))"
    };
}
pub(super) use conflict;

/// Whether what is known of the operation of the record `r` outlives it: a conflict of its own, or
/// a run that succeeded after its lease while the record says that it failed.
macro_rules! outlives {
    () => {
        concat!(
            "(exists (select 1 from oncebox_operation o where o.operation_id = r.operation_id and ",
            $crate::store::sqlite::key_operator::conflict!(),
            ") or (r.state in ('FAILED_REPLAYABLE', 'FAILED_RETRYABLE') and exists (select 1 from oncebox_operation_evidence e \
                where e.operation_id = r.operation_id and e.kind = 'run' and e.verdict = 'success')))"
        )
    };
}
pub(super) use outlives;

/// Evidence of something that happened, of which neither operation nor record is left that says so.
const ORPHANS: &str = "select distinct e.operation_id from oncebox_operation_evidence e \
    where e.kind <> 'operator' and e.verdict in ('success', 'mismatch') \
      and not exists (select 1 from oncebox_operation o where o.operation_id = e.operation_id) \
      and not exists (select 1 from oncebox_idempotency_request r where r.operation_id = e.operation_id \
            and r.state not in ('FAILED_REPLAYABLE', 'FAILED_RETRYABLE')) \
      and (?1 is null or e.operation_id = ?1) \
    order by e.operation_id limit ?2";

const OPERATIONS: &str = concat!(
    "select o.operation_id from oncebox_operation as o left join oncebox_idempotency_request as r on r.operation_id = o.operation_id \
     where (?1 is null or o.operation_id = ?1) and (?2 is null or o.flow = ?2) and (?3 is null or r.tenant = ?3) \
       and (?4 is null or o.state = ?4) and (not ?5 or o.parked is not null) \
       and (?6 is null or o.created_at < ",
    now_ms!(),
    " - ?6) \
       and (not ?7 or ",
    conflict!(),
    ") order by o.parked is null, o.outcome_at is not null, o.created_at, o.operation_id limit ?8"
);

impl KeyOperator for SqliteStore {
    async fn keys(&self, filter: &KeyFilter) -> Result<Vec<Look>, StoreError> {
        let ((least, greatest), (state, expired)) = (filter.digests(), filter.stored_state());
        let rows = query(KEYS)
            .bind(least)
            .bind(greatest)
            .bind(filter.tenant.as_ref().map(|tenant| tenant.as_bytes().to_vec()))
            .bind(filter.operation.as_ref().map(|operation| operation.as_str().as_bytes().to_vec()))
            .bind(state)
            .bind(expired)
            .bind(filter.older_than.map(millis))
            .bind(filter.forgettable)
            .bind(filter.limit)
            .fetch_all(self.pool())
            .await?;
        rows.iter().map(look_of).collect()
    }

    async fn operations(&self, filter: &OperationFilter) -> Result<FoundOperations, StoreError> {
        let ids = query_scalar::<_, Vec<u8>>(OPERATIONS)
            .bind(filter.operation_id.map(|id| id.as_bytes().to_vec()))
            .bind(filter.flow.clone())
            .bind(filter.tenant.as_ref().map(|tenant| tenant.as_bytes().to_vec()))
            .bind(filter.stage.map(|stage| stage.as_str()))
            .bind(filter.parked)
            .bind(filter.older_than.map(millis))
            .bind(filter.conflicts)
            .bind(filter.limit);
        let mut connection = self.pool().acquire().await?;
        let mut found = FoundOperations::default();
        for id in ids.fetch_all(&mut *connection).await? {
            let id = Uuid::from_slice(&id).map_err(|error| StoreError::Corrupt(error.to_string()))?;
            found.add(id, read(&mut connection, id).await)?;
        }
        if filter.is_of_all_conflicts() {
            found.orphans = orphans(&mut connection, None, filter.limit).await?;
        }
        Ok(found)
    }

    async fn judge(&self, operation_id: Uuid, context: &ActContext) -> Result<(), StoreError> {
        let mut write = self.write().await?;
        let seen = read(write.connection(), operation_id).await?;
        if seen.is_none() && orphans(write.connection(), Some(operation_id), 1).await?.is_empty() {
            return Err(nothing_known(operation_id));
        }
        let word = seen.as_ref().map(|seen| judgement(seen, context)).transpose()?;
        match word.filter(|_| seen.as_ref().is_some_and(|seen| seen.identity.is_some())) {
            Some(word) => {
                append(write.connection(), &word).await?;
            }
            // Its record is gone, and no purge comes for it any more.
            None => forget(write.connection(), operation_id, false).await?,
        }
        end(write, Fenced::Done, judged(operation_id, seen.as_ref()), context).await.map(drop)
    }

    async fn live_versions(&self) -> Result<Vec<Announced>, StoreError> {
        live(self).await
    }

    async fn change_key(&self, seen: &Record, change: &KeyChange, context: &ActContext) -> Result<Fenced, StoreError> {
        let mut write = self.write().await?;
        let fenced = match change {
            KeyChange::Release { against_evidence } => forget_key(write.connection(), seen, *against_evidence).await?,
            KeyChange::Purge { against_evidence } => {
                let fenced = forget_key(write.connection(), seen, *against_evidence).await?;
                if let (Fenced::Done, Some(at)) = (fenced, seen.identity.key().time()) {
                    let bound = query(
                        "insert into oncebox_idempotency_purge (operation, purged_below) values (?1, ?2) \
                         on conflict (operation) do update set purged_below = max(purged_below, excluded.purged_below)",
                    );
                    let bound = bound.bind(seen.identity.operation().as_str().as_bytes().to_vec());
                    // Above the time that the key carries.
                    bound.bind(at.millis() + 1).execute(write.connection()).await?;
                }
                fenced
            }
            KeyChange::Resolve { outcome, retention, against_evidence } => {
                if *against_evidence {
                    append(write.connection(), &overruled(seen, outcome, context)).await?;
                }
                let digest = seen.identity.digest().to_vec();
                let fence = RecordFence { digest, epoch: seen.epoch, owner: None, unknown: true };
                finish(write.connection(), &fence, outcome, retention).await?
            }
        };
        end(write, fenced, change.audit(seen), context).await
    }

    async fn change_operation(
        &self,
        seen: &StoredOperation,
        change: &OperationChange,
        context: &ActContext,
    ) -> Result<Fenced, StoreError> {
        let mut write = self.write().await?;
        let fenced = change_operation(write.connection(), seen, change).await?;
        end(write, fenced, change.audit(seen), context).await
    }
}

async fn orphans(connection: &mut SqliteConnection, only: Option<Uuid>, limit: u32) -> Result<Vec<Uuid>, StoreError> {
    let only = only.map(|only| only.as_bytes().to_vec());
    let ids: Vec<Uuid> = query_scalar(ORPHANS).bind(only).bind(limit).fetch_all(connection).await?;
    Ok(ids)
}

async fn forget_key(
    connection: &mut SqliteConnection,
    seen: &Record,
    against_evidence: bool,
) -> Result<Fenced, StoreError> {
    let digest = seen.identity.digest().to_vec();
    let delete = query(concat!(
        "delete from oncebox_idempotency_request where key_digest = ? and epoch = ? and outcome_at is not null \
         and not exists (select 1 from oncebox_operation_intent as i where i.operation_id = oncebox_idempotency_request.operation_id) \
         and (? or ",
        none_late!("'success'"),
        ")"
    ));
    let delete = delete.bind(&digest).bind(seen.epoch).bind(against_evidence || seen.state == State::Completed);
    let fenced = Fenced::rows(delete.execute(&mut *connection).await?.rows_affected());
    if fenced == Fenced::Done {
        query("delete from oncebox_idempotency_body where key_digest = ?")
            .bind(digest)
            .execute(&mut *connection)
            .await?;
        forget(connection, seen.operation_id, seen.state != State::Completed && !against_evidence).await?;
    }
    Ok(fenced)
}

async fn change_operation(
    connection: &mut SqliteConnection,
    seen: &StoredOperation,
    change: &OperationChange,
) -> Result<Fenced, StoreError> {
    let stage = change.stage()?;
    let update = query(concat!(
        "update oncebox_operation set epoch = epoch + 1, state = coalesce(?5, state), owner = null, lease_until = null, \
           lease_ms = null, parked = null, attempts = 0, due_at = iif(?6, null, n.at), outcome_at = iif(?6, n.at, null), \
           expires_at = iif(?6, n.at, null), updated_at = n.at from (select ",
        now_ms!(),
        " as at) as n where operation_id = ?1 and epoch = ?2 and outcome_at is null \
           and (?3 or owner is null or lease_until <= n.at or lease_until > lease_ms + n.at) \
           and (select count(*) from oncebox_operation_evidence where operation_id = ?1) = ?4"
    ));
    let update = update
        .bind(seen.operation_id.as_bytes().to_vec())
        .bind(seen.epoch)
        .bind(change.takes_over())
        .bind(i64::try_from(seen.evidence.len()).unwrap_or(i64::MAX))
        .bind(stage.map(|stage| stage.as_str()))
        .bind(change.ends());
    if update.execute(&mut *connection).await?.rows_affected() == 0 {
        return Ok(Fenced::LostOwnership);
    }
    match change {
        OperationChange::GoOn { evidence, .. } => {
            if let Some(stage) = stage {
                follow(connection, seen.operation_id, stage).await?;
            }
            for row in evidence {
                append(&mut *connection, row).await?;
            }
        }
        OperationChange::End { outcome, retention, evidence, .. } => {
            let record = fence_of(connection, seen.operation_id).await?;
            let record = record.ok_or_else(|| no_record(seen.operation_id))?;
            end_record(connection, seen.operation_id, &record, outcome, retention).await?;
            append(connection, evidence).await?;
        }
    }
    Ok(Fenced::Done)
}

/// Writes the audit row of what was done, and commits, or takes a dry run back.
async fn end(mut write: Write, fenced: Fenced, audit: Audit<'_>, context: &ActContext) -> Result<Fenced, StoreError> {
    let insert = query(concat!(
        "insert into oncebox_audit (at, actor, reason, act, place, number, message_id, detail) values (",
        now_ms!(),
        ", ?, ?, ?, ?, lower(hex(?)), ?, ?)"
    ));
    let insert = insert.bind(&context.actor).bind(&context.reason).bind(audit.act).bind(audit.place);
    let insert = insert.bind(audit.digest.map_or_else(Vec::new, Vec::from)).bind(audit.operation_id.to_string());
    insert.bind(&audit.detail).execute(write.connection()).await?;
    if context.dry_run || fenced != Fenced::Done {
        write.rollback().await?;
    } else {
        write.commit().await?;
    }
    Ok(fenced)
}
