//! What an operator sees and does of keys and operations.
//!
//! Guarantee: a change, the operator's words and the audit row are one transaction.

use sqlx::{Postgres, Row, query, query_scalar};
use uuid::Uuid;

use super::PostgresStore;
use super::operations::{LOCK, finish, look_columns, none_late, open_requests};
use super::phases::end_record;
use crate::error::StoreError;
use crate::policy::operation::versions::Announced;
use crate::policy::operation::{Record, State};
use crate::store::bounded::{Ask, Bounded};
use crate::store::key_operator::{Audit, judged, judgement, nothing_known, overruled};
use crate::store::operations::RecordFence;
use crate::store::operations::stored::look_of;
use crate::store::phases::no_record;
use crate::store::sql::announced::live;
use crate::store::sql::phases::{append, follow, forget, read};
use crate::store::{
    ActContext, Fenced, FoundOperations, KeyChange, KeyFilter, KeyOperator, Look, OperationChange, OperationFilter,
    StoredOperation,
};

/// Records of a source, as [`look_of`] reads them.
macro_rules! keys {
    ($source:expr) => {
        concat!(
            "select ",
            look_columns!(),
            " from (select clock_timestamp() as at) n cross join ",
            $source,
            " r left join oncebox.idempotency_purge p on p.operation = r.operation \
             left join oncebox.operation o on r.mode = 'phased' and o.operation_id = r.operation_id \
             where r.key_digest between $1 and $2 and ($3::bytea is null or r.tenant = $3) and ($4::bytea is null or r.operation = $4) \
               and ($5::text is null or r.state = $5) and (not $6 or r.expires_at < n.at) \
               and ($7::float8 is null or r.created_at < n.at - $7 * interval '1 second') \
               and (not $8 or (r.outcome_at is not null \
                    and not exists (select 1 from oncebox.operation_intent i where i.operation_id = r.operation_id) \
                    and (r.state = 'COMPLETED' or not exists (select 1 from oncebox.operation_evidence e \
                         where e.operation_id = r.operation_id and e.kind = 'run' and e.verdict = 'success')))) \
             order by r.created_at, r.key_digest limit $9"
        )
    };
}

const KEYS: &str = keys!("oncebox.idempotency_request");
const OPEN_KEYS: &str = keys!(open_requests!());

/// Whether the operation `o` has a conflict that no person has judged: evidence of an effect says
/// another thing than what was decided, or the operation failed with an effect that stands. Such an
/// operation is listed, and is kept until it is judged. A mismatch went to an operator by itself,
/// whose word about it is that judgement. That a duplicate was declined which an operator accepted
/// says nothing of the send that it repeats. For evidence alone it is
/// [`Evidence::contradicts`](crate::policy::operation::provider::Evidence::contradicts).
macro_rules! conflict {
    () => {
        "(o.outcome_at is not null and (exists (select 1 from oncebox.operation_evidence e \
            join oncebox.operation_intent i on i.operation_id = e.operation_id and i.effect = e.effect \
            where e.operation_id = o.operation_id and e.kind <> 'operator' and (e.verdict = 'mismatch' or e.verdict = \
              case when coalesce(i.outcome, case o.state when 'SUCCEEDED' then 'succeeded' else 'failed' end) = 'succeeded' \
                   then 'failure' else 'success' end) \
              and not exists (select 1 from oncebox.operation_evidence w \
                   where w.operation_id = e.operation_id and w.evidence_id > e.evidence_id and w.kind = 'operator' \
                     and w.effect in (e.effect, '') and (w.verdict = 'indefinite' or (e.verdict = 'mismatch' and w.verdict <> 'waived'))) \
              and not (e.verdict = 'failure' and e.send > 0 and exists (select 1 from oncebox.operation_evidence v \
                   where v.operation_id = e.operation_id and v.effect = e.effect and v.kind = 'operator' and v.verdict = 'waived' and v.send > 0 \
                     and not exists (select 1 from oncebox.operation_evidence n where n.operation_id = v.operation_id \
                          and n.effect = v.effect and n.send = v.send and n.verdict = 'not-sent')))) \
          or (o.state = 'FAILED' and exists (select 1 from oncebox.operation_intent i \
            where i.operation_id = o.operation_id and i.outcome = 'succeeded' and i.undoes is null and i.strategy <> 'repeatable' \
              and not exists (select 1 from oncebox.operation_intent u \
                   where u.operation_id = i.operation_id and u.undoes = i.effect and u.outcome = 'succeeded') \
              and not exists (select 1 from oncebox.operation_evidence w \
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
            "(exists (select 1 from oncebox.operation o where o.operation_id = r.operation_id and ",
            $crate::store::postgres::key_operator::conflict!(),
            ") or (r.state in ('FAILED_REPLAYABLE', 'FAILED_RETRYABLE') and exists (select 1 from oncebox.operation_evidence e \
                where e.operation_id = r.operation_id and e.kind = 'run' and e.verdict = 'success')))"
        )
    };
}
pub(super) use outlives;

/// Evidence of something that happened, of which neither operation nor record is left that says so.
const ORPHANS: &str = "select distinct e.operation_id from oncebox.operation_evidence e \
    where e.kind <> 'operator' and e.verdict in ('success', 'mismatch') \
      and not exists (select 1 from oncebox.operation o where o.operation_id = e.operation_id) \
      and not exists (select 1 from oncebox.idempotency_request r where r.operation_id = e.operation_id \
            and r.state not in ('FAILED_REPLAYABLE', 'FAILED_RETRYABLE')) \
      and ($1::uuid is null or e.operation_id = $1) \
    order by e.operation_id limit $2";

const OPERATIONS: &str = concat!(
    "select o.operation_id from oncebox.operation o \
     left join oncebox.idempotency_request r on r.key_digest = o.key_digest and r.operation_id = o.operation_id \
     where ($1::uuid is null or o.operation_id = $1) and ($2::text is null or o.flow = $2) \
       and ($3::bytea is null or r.tenant = $3) and ($4::text is null or o.state = $4) and (not $5 or o.parked is not null) \
       and ($6::float8 is null or o.created_at < clock_timestamp() - $6 * interval '1 second') \
       and (not $7 or ",
    conflict!(),
    ") order by o.parked is null, o.outcome_at is not null, o.created_at, o.operation_id limit $8"
);

impl KeyOperator for PostgresStore {
    async fn keys(&self, filter: &KeyFilter) -> Result<Vec<Look>, StoreError> {
        let ((least, greatest), (state, expired)) = (filter.digests(), filter.stored_state());
        let is_open = filter.state.is_some_and(|state| !state.is_terminal());
        let rows = query(if is_open { OPEN_KEYS } else { KEYS })
            .bind(least)
            .bind(greatest)
            .bind(filter.tenant.as_ref().map(|tenant| tenant.as_bytes().to_vec()))
            .bind(filter.operation.as_ref().map(|operation| operation.as_str().as_bytes().to_vec()))
            .bind(state)
            .bind(expired)
            .bind(filter.older_than.map(|age| age.as_secs_f64()))
            .bind(filter.forgettable)
            .bind(i64::from(filter.limit))
            .all(&self.pool)
            .await?;
        rows.iter().map(look_of).collect()
    }

    async fn operations(&self, filter: &OperationFilter) -> Result<FoundOperations, StoreError> {
        let ids = query_scalar::<_, Uuid>(OPERATIONS)
            .bind(filter.operation_id)
            .bind(filter.flow.clone())
            .bind(filter.tenant.as_ref().map(|tenant| tenant.as_bytes().to_vec()))
            .bind(filter.stage.map(|stage| stage.as_str()))
            .bind(filter.parked)
            .bind(filter.older_than.map(|age| age.as_secs_f64()))
            .bind(filter.conflicts)
            .bind(i64::from(filter.limit));
        let mut connection = self.pool.acquire().await?;
        let mut found = FoundOperations::default();
        for id in ids.all(&mut connection).await? {
            found.add(id, read(&mut connection, id).await)?;
        }
        if filter.is_of_all_conflicts() {
            found.orphans = orphans(&mut connection, None, filter.limit).await?;
        }
        Ok(found)
    }

    async fn judge(&self, operation_id: Uuid, context: &ActContext) -> Result<(), StoreError> {
        let mut tx = self.transaction().await?;
        let seen = read(&mut tx, operation_id).await?;
        if seen.is_none() && orphans(&mut tx, Some(operation_id), 1).await?.is_empty() {
            return Err(nothing_known(operation_id));
        }
        let word = seen.as_ref().map(|seen| judgement(seen, context)).transpose()?;
        match word.filter(|_| seen.as_ref().is_some_and(|seen| seen.identity.is_some())) {
            Some(word) => {
                append(&mut tx, &word).await?;
            }
            // Its record is gone, and no purge comes for it any more.
            None => forget(&mut tx, operation_id, false).await?,
        }
        end(tx, Fenced::Done, judged(operation_id, seen.as_ref()), context).await.map(drop)
    }

    async fn live_versions(&self) -> Result<Vec<Announced>, StoreError> {
        live(self).await
    }

    async fn change_key(&self, seen: &Record, change: &KeyChange, context: &ActContext) -> Result<Fenced, StoreError> {
        let mut tx = self.transaction().await?;
        let fenced = match change {
            KeyChange::Release { against_evidence } => forget_key(&mut tx, seen, *against_evidence).await?,
            KeyChange::Purge { against_evidence } => {
                let fenced = forget_key(&mut tx, seen, *against_evidence).await?;
                if let (Fenced::Done, Some(at)) = (fenced, seen.identity.key().time()) {
                    let bound = query(
                        "insert into oncebox.idempotency_purge (operation, purged_below) \
                         values ($1, timestamptz '1970-01-01 00:00:00+00' + $2 * interval '1 microsecond') \
                         on conflict (operation) do update \
                           set purged_below = greatest(oncebox.idempotency_purge.purged_below, excluded.purged_below)",
                    );
                    let bound = bound.bind(seen.identity.operation().as_str().as_bytes());
                    // Above the time that the key carries.
                    bound.bind(at.micros() + 1).run(&mut tx).await?;
                }
                fenced
            }
            KeyChange::Resolve { outcome, retention, against_evidence } => {
                if *against_evidence {
                    append(&mut tx, &overruled(seen, outcome, context)).await?;
                }
                let digest = seen.identity.digest().to_vec();
                let fence = RecordFence { digest, epoch: seen.epoch, owner: None, unknown: true };
                finish(&mut tx, &fence, outcome, retention, None).await?
            }
        };
        end(tx, fenced, change.audit(seen), context).await
    }

    async fn change_operation(
        &self,
        seen: &StoredOperation,
        change: &OperationChange,
        context: &ActContext,
    ) -> Result<Fenced, StoreError> {
        let mut tx = self.transaction().await?;
        let fenced = change_operation(&mut tx, seen, change).await?;
        end(tx, fenced, change.audit(seen), context).await
    }
}

async fn orphans(connection: &mut Bounded<Postgres>, only: Option<Uuid>, limit: u32) -> Result<Vec<Uuid>, StoreError> {
    Ok(query_scalar(ORPHANS).bind(only).bind(i64::from(limit)).all(connection).await?)
}

async fn forget_key(tx: &mut Bounded<Postgres>, seen: &Record, against_evidence: bool) -> Result<Fenced, StoreError> {
    let digest = seen.identity.digest().to_vec();
    query(LOCK).bind(&digest).optional(&mut *tx).await?;
    let delete = query(concat!(
        "delete from oncebox.idempotency_request r where key_digest = $1 and epoch = $2 and outcome_at is not null \
           and not exists (select 1 from oncebox.operation_intent i where i.operation_id = r.operation_id) and ($3 or ",
        none_late!("'success'"),
        ")"
    ));
    let delete = delete.bind(&digest).bind(seen.epoch).bind(against_evidence || seen.state == State::Completed);
    let fenced = Fenced::rows(delete.run(&mut *tx).await?.rows_affected());
    if fenced == Fenced::Done {
        query("delete from oncebox.idempotency_body where key_digest = $1").bind(digest).run(&mut *tx).await?;
        forget(tx, seen.operation_id, seen.state != State::Completed && !against_evidence).await?;
    }
    Ok(fenced)
}

async fn change_operation(
    tx: &mut Bounded<Postgres>,
    seen: &StoredOperation,
    change: &OperationChange,
) -> Result<Fenced, StoreError> {
    let stage = change.stage()?;
    let update = query(
        "update oncebox.operation o set epoch = o.epoch + 1, state = coalesce($5, o.state), owner = null, lease_until = null, \
           lease_seconds = null, parked = null, attempts = 0, due_at = case when not $6 then n.at end, \
           outcome_at = case when $6 then n.at end, expires_at = case when $6 then n.at end, updated_at = n.at \
           from (select clock_timestamp() as at) n where o.operation_id = $1 and o.epoch = $2 and o.outcome_at is null \
            and ($3 or o.owner is null or o.lease_until <= clock_timestamp() \
                 or o.lease_until > clock_timestamp() + o.lease_seconds * interval '1 second') \
            and (select count(*) from oncebox.operation_evidence e where e.operation_id = $1) = $4",
    );
    let update = update
        .bind(seen.operation_id)
        .bind(seen.epoch)
        .bind(change.takes_over())
        .bind(i64::try_from(seen.evidence.len()).unwrap_or(i64::MAX))
        .bind(stage.map(|stage| stage.as_str()))
        .bind(change.ends());
    if update.run(&mut *tx).await?.rows_affected() == 0 {
        return Ok(Fenced::LostOwnership);
    }
    match change {
        OperationChange::GoOn { evidence, .. } => {
            if let Some(stage) = stage {
                follow(tx, seen.operation_id, stage).await?;
            }
            for row in evidence {
                append(&mut *tx, row).await?;
            }
        }
        OperationChange::End { outcome, retention, evidence, .. } => {
            let record = query(
                "select r.key_digest, r.epoch from oncebox.operation o \
                   join oncebox.idempotency_request r using (key_digest, operation_id) where o.operation_id = $1",
            );
            let row = record.bind(seen.operation_id).optional(&mut *tx).await?;
            let row = row.ok_or_else(|| no_record(seen.operation_id))?;
            let record = RecordFence { digest: row.try_get(0)?, epoch: row.try_get(1)?, owner: None, unknown: true };
            end_record(tx, seen.operation_id, &record, (outcome, retention), None).await?;
            append(tx, evidence).await?;
        }
    }
    Ok(Fenced::Done)
}

/// Writes the audit row of what was done, and commits, or takes a dry run back.
async fn end(
    mut tx: Bounded<Postgres>,
    fenced: Fenced,
    audit: Audit<'_>,
    context: &ActContext,
) -> Result<Fenced, StoreError> {
    query(
        "insert into oncebox.audit (actor, act, reason, number, message_id, topic, detail) \
         values ($1, $2, $3, encode($4, 'hex'), $5, $6, jsonb_build_object('was', $7::text))",
    )
    .bind(&context.actor)
    .bind(audit.act)
    .bind(&context.reason)
    .bind(audit.digest.map_or_else(Vec::new, Vec::from))
    .bind(audit.operation_id)
    .bind(audit.place)
    .bind(audit.detail)
    .run(&mut tx)
    .await?;
    if context.dry_run || fenced != Fenced::Done {
        tx.rollback().await?;
    } else {
        tx.commit().await?;
    }
    Ok(fenced)
}
