//! What an operator sees and does of keys and operations.
//!
//! Guarantee: a change, the operator's words and the audit row are one transaction.

use sqlx::{MySql, query, query_scalar};
use uuid::Uuid;

use super::operations::{LOCK, finish, look_columns, none_late};
use super::phases::end_record;
use super::{MySqlStore, START, sixteen};
use crate::error::StoreError;
use crate::policy::hex::hex;
use crate::policy::operation::versions::Announced;
use crate::policy::operation::{Record, State};
use crate::store::bounded::{Ask, Bounded};
use crate::store::key_operator::{Audit, judged, judgement, nothing_known, overruled};
use crate::store::operations::RecordFence;
use crate::store::operations::stored::look_of;
use crate::store::phases::no_record;
use crate::store::sql::announced::live;
use crate::store::sql::phases::{append, fence_of, follow, forget, lock, read};
use crate::store::{
    ActContext, Fenced, FoundOperations, KeyChange, KeyFilter, KeyOperator, Look, OperationChange, OperationFilter,
    StoredOperation,
};

/// As [`look_of`] reads it.
const KEYS: &str = concat!(
    "select ",
    look_columns!(),
    " from oncebox_idempotency_request r join (select utc_timestamp(6) as at) n \
     left join oncebox_idempotency_purge p on p.operation = r.operation \
     left join oncebox_operation o on r.mode = 'phased' and o.operation_id = r.operation_id \
     where r.key_digest between ? and ? and (? is null or r.tenant = ?) and (? is null or r.operation = ?) \
       and (not ? or r.open_since is not null) and (? is null or r.state = ?) and (not ? or r.expires_at < n.at) \
       and (? is null or r.created_at < n.at - interval ? microsecond) \
       and (not ? or (r.outcome_at is not null \
            and not exists (select 1 from oncebox_operation_intent i where i.operation_id = r.operation_id) \
            and (r.state = 'COMPLETED' or not exists (select 1 from oncebox_operation_evidence e \
                 where e.operation_id = r.operation_id and e.kind = 'run' and e.verdict = 'success')))) \
     order by r.created_at, r.key_digest limit ?"
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
            $crate::store::mysql::key_operator::conflict!(),
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
      and (? is null or e.operation_id = ?) \
    order by e.operation_id limit ?";

const OPERATIONS: &str = concat!(
    "select o.operation_id from oncebox_operation o \
     left join oncebox_idempotency_request r on r.operation_id = o.operation_id \
     where (? is null or o.operation_id = ?) and (? is null or o.flow = ?) and (? is null or r.tenant = ?) \
       and (? is null or o.state = ?) and (not ? or o.parked is not null) \
       and (? is null or o.created_at < utc_timestamp(6) - interval ? microsecond) \
       and (not ? or ",
    conflict!(),
    ") order by o.parked is null, o.outcome_at is not null, o.created_at, o.operation_id limit ?"
);

/// Binds a value that is compared only where it is given.
macro_rules! if_given {
    ($statement:expr, $value:expr) => {{
        let value = $value;
        $statement.bind(value.clone()).bind(value)
    }};
}

impl KeyOperator for MySqlStore {
    async fn keys(&self, filter: &KeyFilter) -> Result<Vec<Look>, StoreError> {
        let ((least, greatest), (state, expired)) = (filter.digests(), filter.stored_state());
        let keys = query(KEYS).bind(least).bind(greatest);
        let keys = if_given!(keys, filter.tenant.as_ref().map(|tenant| tenant.as_bytes().to_vec()));
        let operation = filter.operation.as_ref().map(|operation| operation.as_str().as_bytes().to_vec());
        let keys = if_given!(keys, operation);
        // The index of what has no outcome begins with this column.
        let keys = keys.bind(filter.is_of_open_state());
        let keys = if_given!(keys, state).bind(expired);
        let keys = if_given!(keys, filter.older_than.map(super::micros)).bind(filter.forgettable).bind(filter.limit);
        keys.all(&self.pool).await?.iter().map(look_of).collect()
    }

    async fn operations(&self, filter: &OperationFilter) -> Result<FoundOperations, StoreError> {
        let ids = query_scalar::<_, Vec<u8>>(OPERATIONS);
        let ids = if_given!(ids, filter.operation_id.map(|id| id.as_bytes().to_vec()));
        let ids = if_given!(ids, filter.flow.as_ref().map(|flow| flow.as_bytes().to_vec()));
        let ids = if_given!(ids, filter.tenant.as_ref().map(|tenant| tenant.as_bytes().to_vec()));
        let ids = if_given!(ids, filter.stage.map(|stage| stage.as_str())).bind(filter.parked);
        let ids = if_given!(ids, filter.older_than.map(super::micros)).bind(filter.conflicts).bind(filter.limit);
        let mut connection = self.pool.acquire().await?;
        let mut found = FoundOperations::default();
        for id in ids.all(&mut connection).await? {
            let id = Uuid::from_bytes(sixteen("operation_id", &id)?);
            found.add(id, read(&mut connection, id).await)?;
        }
        if filter.is_of_all_conflicts() {
            found.orphans = orphans(&mut connection, None, filter.limit).await?;
        }
        Ok(found)
    }

    async fn judge(&self, operation_id: Uuid, context: &ActContext) -> Result<(), StoreError> {
        let mut transaction = self.pool.begin(START).await?;
        let seen = read(&mut transaction, operation_id).await?;
        if seen.is_none() && orphans(&mut transaction, Some(operation_id), 1).await?.is_empty() {
            return Err(nothing_known(operation_id));
        }
        let word = seen.as_ref().map(|seen| judgement(seen, context)).transpose()?;
        match word.filter(|_| seen.as_ref().is_some_and(|seen| seen.identity.is_some())) {
            Some(word) => {
                append(&mut transaction, &word).await?;
            }
            // Its record is gone, and no purge comes for it any more.
            None => forget(&mut transaction, operation_id, false).await?,
        }
        end(transaction, Fenced::Done, judged(operation_id, seen.as_ref()), context).await.map(drop)
    }

    async fn live_versions(&self) -> Result<Vec<Announced>, StoreError> {
        live(self).await
    }

    async fn change_key(&self, seen: &Record, change: &KeyChange, context: &ActContext) -> Result<Fenced, StoreError> {
        let mut transaction = self.pool.begin(START).await?;
        let fenced = match change {
            KeyChange::Release { against_evidence } => forget_key(&mut transaction, seen, *against_evidence).await?,
            KeyChange::Purge { against_evidence } => {
                let fenced = forget_key(&mut transaction, seen, *against_evidence).await?;
                if let (Fenced::Done, Some(at)) = (fenced, seen.identity.key().time()) {
                    let bound = query(
                        "insert into oncebox_idempotency_purge (operation, purged_below) \
                         values (?, timestamp'1970-01-01 00:00:00' + interval ? microsecond) \
                         on duplicate key update purged_below = greatest(purged_below, values(purged_below))",
                    );
                    let bound = bound.bind(seen.identity.operation().as_str().as_bytes().to_vec());
                    // Above the time that the key carries.
                    bound.bind(at.micros() + 1).run(&mut transaction).await?;
                }
                fenced
            }
            KeyChange::Resolve { outcome, retention, against_evidence } => {
                if *against_evidence {
                    append(&mut transaction, &overruled(seen, outcome, context)).await?;
                }
                let digest = seen.identity.digest().to_vec();
                let fence = RecordFence { digest, epoch: seen.epoch, owner: None, unknown: true };
                finish(&mut transaction, &fence, outcome, retention).await?
            }
        };
        end(transaction, fenced, change.audit(seen), context).await
    }

    async fn change_operation(
        &self,
        seen: &StoredOperation,
        change: &OperationChange,
        context: &ActContext,
    ) -> Result<Fenced, StoreError> {
        let mut transaction = self.pool.begin(START).await?;
        let fenced = change_operation(&mut transaction, seen, change).await?;
        end(transaction, fenced, change.audit(seen), context).await
    }
}

async fn orphans(connection: &mut Bounded<MySql>, only: Option<Uuid>, limit: u32) -> Result<Vec<Uuid>, StoreError> {
    let only = only.map(|only| only.as_bytes().to_vec());
    let ids = query_scalar::<_, Vec<u8>>(ORPHANS).bind(only.clone()).bind(only).bind(limit).all(connection).await?;
    ids.iter().map(|id| Ok(Uuid::from_bytes(sixteen("operation_id", id)?))).collect()
}

async fn forget_key(
    transaction: &mut Bounded<MySql>,
    seen: &Record,
    against_evidence: bool,
) -> Result<Fenced, StoreError> {
    let digest = seen.identity.digest().to_vec();
    query(LOCK).bind(&digest).optional(&mut *transaction).await?;
    let delete = query(concat!(
        "delete from oncebox_idempotency_request where key_digest = ? and epoch = ? and outcome_at is not null \
         and not exists (select 1 from oncebox_operation_intent i where i.operation_id = oncebox_idempotency_request.operation_id) \
         and (? or ",
        none_late!("'success'"),
        ")"
    ));
    let delete = delete.bind(&digest).bind(seen.epoch).bind(against_evidence || seen.state == State::Completed);
    let fenced = Fenced::rows(delete.run(&mut *transaction).await?.rows_affected());
    if fenced == Fenced::Done {
        query("delete from oncebox_idempotency_body where key_digest = ?").bind(digest).run(&mut *transaction).await?;
        forget(transaction, seen.operation_id, seen.state != State::Completed && !against_evidence).await?;
    }
    Ok(fenced)
}

async fn change_operation(
    transaction: &mut Bounded<MySql>,
    seen: &StoredOperation,
    change: &OperationChange,
) -> Result<Fenced, StoreError> {
    let stage = change.stage()?;
    // A statement that waited for a lock would go on with the time at which it began.
    lock(transaction, seen.operation_id).await?;
    let update = query(
        "update oncebox_operation set epoch = epoch + 1, state = coalesce(?, state), \
           due_at = if(?, null, utc_timestamp(6)), outcome_at = if(?, utc_timestamp(6), null), \
           expires_at = if(?, utc_timestamp(6), null), owner = null, lease_until = null, lease_seconds = null, parked = null, \
           attempts = 0, updated_at = utc_timestamp(6) \
         where operation_id = ? and epoch = ? and outcome_at is null \
           and (? or owner is null or lease_until <= utc_timestamp(6) \
                or lease_until > utc_timestamp(6) + interval round(lease_seconds * 1000000) microsecond) \
           and (select count(*) from oncebox_operation_evidence e where e.operation_id = ?) = ?",
    );
    let id = seen.operation_id.as_bytes().to_vec();
    let update = update
        .bind(stage.map(|stage| stage.as_str()))
        .bind(change.ends())
        .bind(change.ends())
        .bind(change.ends())
        .bind(&id)
        .bind(seen.epoch)
        .bind(change.takes_over())
        .bind(&id)
        .bind(i64::try_from(seen.evidence.len()).unwrap_or(i64::MAX));
    if update.run(&mut *transaction).await?.rows_affected() == 0 {
        return Ok(Fenced::LostOwnership);
    }
    match change {
        OperationChange::GoOn { evidence, .. } => {
            if let Some(stage) = stage {
                follow(transaction, seen.operation_id, stage).await?;
            }
            for row in evidence {
                append(&mut *transaction, row).await?;
            }
        }
        OperationChange::End { outcome, retention, evidence, .. } => {
            let record = fence_of(transaction, seen.operation_id).await?;
            let record = record.ok_or_else(|| no_record(seen.operation_id))?;
            end_record(transaction, seen.operation_id, &record, outcome, retention).await?;
            append(transaction, evidence).await?;
        }
    }
    Ok(Fenced::Done)
}

/// Writes the audit row of what was done, and commits, or takes a dry run back.
async fn end(
    mut transaction: Bounded<MySql>,
    fenced: Fenced,
    audit: Audit<'_>,
    context: &ActContext,
) -> Result<Fenced, StoreError> {
    query(
        "insert into oncebox_audit (at, actor, reason, act, place, number, message_id, detail) \
         values (utc_timestamp(6), ?, ?, ?, ?, ?, ?, ?)",
    )
    .bind(&context.actor)
    .bind(&context.reason)
    .bind(audit.act)
    .bind(audit.place.as_bytes())
    .bind(audit.digest.map_or_else(String::new, |digest| hex(&digest)))
    .bind(audit.operation_id)
    .bind(audit.detail)
    .run(&mut transaction)
    .await?;
    if context.dry_run || fenced != Fenced::Done {
        transaction.rollback().await?;
    } else {
        transaction.commit().await?;
    }
    Ok(fenced)
}
