//! What an operator sees and does of keys and operations, on every database.
//!
//! Guarantees: a change, the operator's evidence and the audit row are one transaction. Before a
//! row is changed, a statement of its own locks it, so that the change sees what was committed
//! until then, and the current time.

use async_trait::async_trait;
use uuid::Uuid;

use super::audit::Act;
use super::evidence::append;
use super::forgotten::{forget_evidence, forget_operation};
use super::phases::{fence_of, follow, lock, read, same_times};
use super::records::{KeyStore, OutcomeTransaction};
use super::{Session, Transaction, expiry, live, records, sql};
use crate::error::StoreError;
use crate::operation::port::phases::{Phases, StoredOperation, no_record};
use crate::operation::port::{Fenced, RecordFence};
use crate::operation::rules::versions::Announced;
use crate::operation::rules::{Record, State};
use crate::operator::ActContext;
use crate::operator::keys::{
    Audit, FoundKeys, FoundOperations, KeyChange, KeyFilter, KeyOperator, OperationChange, OperationFilter, judged,
    judgement, nothing_known, overruled, readable, still_stands,
};
use crate::text::hex::hex;
use crate::time::db_time::DbTime;

const KEYS: &str = "select {piece look}, r.key_digest from (select {clock} as at) as n \
    cross join {if open: {piece requests}}{unless open: oncebox.idempotency_request as r} \
    left join oncebox.idempotency_purge as p on p.operation = r.operation \
    left join oncebox.operation as o on r.mode = 'phased' and o.operation_id = r.operation_id \
    where r.key_digest between :least and :greatest {if after: and r.key_digest > :after} {if open: and {piece open}} \
      {if tenant: and r.tenant = :tenant} {if operation: and r.operation = :operation} {if state: and r.state = :state} \
      {if expired: and r.expires_at < n.at} {if older: and r.created_at < n.at - {span :older}} \
      {if forgettable: and r.outcome_at is not null \
        and not exists (select 1 from oncebox.operation_intent i where i.operation_id = r.operation_id) \
        and (r.state = 'COMPLETED' or not exists (select 1 from oncebox.operation_evidence e \
             where e.operation_id = r.operation_id and e.kind = 'run' and e.verdict = 'success'))} \
    order by {unless after: r.created_at,} r.key_digest limit :limit";

const OPERATIONS: &str = "select o.operation_id from oncebox.operation as o \
    {if tenant: join oncebox.idempotency_request as r on r.key_digest = o.key_digest and r.operation_id = o.operation_id \
      and r.tenant = :tenant} \
    where 1 = 1 {if only: and o.operation_id = :only} \
      {if flow: and o.flow = {pg lite: :flow}{my: cast(:flow as binary)}} \
      {if stage: and o.state = :stage} {if parked: and o.parked is not null} \
      {if older: and o.created_at < {now} - {span :older}} {if conflicts: and {piece conflict}} \
    order by o.parked is null, o.outcome_at is not null, o.created_at, o.operation_id limit :limit";

/// Operations of which only evidence says that something happened: there is no operation row, and
/// the record is gone or says that it failed.
const ORPHANS: &str = "select distinct e.operation_id from oncebox.operation_evidence e \
    where e.kind <> 'operator' and e.verdict in ('success', 'mismatch') \
      and not exists (select 1 from oncebox.operation o where o.operation_id = e.operation_id) \
      and not exists (select 1 from oncebox.idempotency_request r where r.operation_id = e.operation_id \
            and r.state not in ('FAILED_REPLAYABLE', 'FAILED_RETRYABLE')) \
      {if only: and e.operation_id = :only} order by e.operation_id limit :limit";

const EVIDENCE_ROWS: &str = "select evidence_id from oncebox.operation_evidence where operation_id = :id";

const RECORD_OF: &str = "select key_digest, state from oncebox.idempotency_request where operation_id = :operation";

/// Whether the record is of this run. A key that was forgotten begins again at epoch 1, so the
/// epoch alone does not tell its runs apart.
const IS_OF_RUN: &str =
    "select 1 from oncebox.idempotency_request where key_digest = :digest and operation_id = :operation";

const FORGET_RECORD: &str = "delete from oncebox.idempotency_request \
    where key_digest = :digest and epoch = :epoch and outcome_at is not null \
      and not exists (select 1 from oncebox.operation_intent i \
           where i.operation_id = oncebox.idempotency_request.operation_id) \
      {if asks_runs: and {piece no late success}}";

const FORGET_BODIES: &str = "delete from oncebox.idempotency_body where key_digest = :digest";

const CHANGE_OPERATION: &str = "update oncebox.operation set epoch = epoch + 1, {if stage: state = :stage,} owner = null, \
      lease_until = null, {lease} = null, parked = null, attempts = 0, \
      {if ends: due_at = null, outcome_at = {now}, expires_at = {now},}{unless ends: due_at = {now},} updated_at = {now} \
    where operation_id = :operation and epoch = :epoch and outcome_at is null and coalesce(parked, '') = :parked \
      {if respects_lease: and (owner is null or {piece lease is over})} \
      and (select count(*) from oncebox.operation_evidence e where e.operation_id = :operation) = :evidence";

#[async_trait]
impl<S: KeyStore + Phases> KeyOperator for S {
    async fn keys(&self, filter: &KeyFilter) -> Result<FoundKeys, StoreError> {
        let ((least, greatest), (state, expired)) = (filter.digests(), filter.stored_state());
        let keys = sql(KEYS)
            .bind("open", filter.is_of_open_state())
            .bind("least", least)
            .bind("greatest", greatest)
            .bind("tenant", filter.tenant.as_ref().map(|tenant| tenant.as_bytes()))
            .bind("operation", filter.operation.as_ref().map(|operation| operation.as_str().as_bytes()))
            .bind("state", state)
            .bind("expired", expired)
            .bind("older", filter.older_than)
            .bind("forgettable", filter.forgettable)
            .bind("after", filter.after.clone())
            .bind("limit", filter.limit);
        let mut found = FoundKeys::default();
        for row in self.reader().await?.rows(keys).await? {
            // The digest stands behind the columns of the record.
            let digest: Vec<u8> = row.get(records::LOOK_COLUMNS)?;
            found.keys.extend(readable(records::look_of(&*row), digest, &mut found.unreadable)?);
        }
        Ok(found)
    }

    async fn operations(&self, filter: &OperationFilter) -> Result<FoundOperations, StoreError> {
        let operations = sql(OPERATIONS)
            .bind("tenant", filter.tenant.as_ref().map(|tenant| tenant.as_bytes()))
            .bind("only", filter.operation_id)
            .bind("flow", filter.flow.as_ref())
            .bind("stage", filter.stage.map(|stage| stage.as_str()))
            .bind("parked", filter.parked)
            .bind("older", filter.older_than)
            .bind("conflicts", filter.conflicts)
            .bind("limit", filter.limit);
        let mut found = FoundOperations::default();
        let mut reader = self.reader().await?;
        let rows = reader.rows(operations).await?;
        if filter.is_of_all_conflicts() {
            found.orphans = orphans(&mut *reader, None, filter.limit).await?;
        }
        // The pool may have only one connection, and each read below takes one.
        drop(reader);
        for row in rows {
            let id = row.get(0)?;
            let read = self.operation(id).await;
            found.operations.extend(readable(read, id, &mut found.unreadable)?.flatten());
        }
        Ok(found)
    }

    async fn judge(&self, operation_id: Uuid, context: &ActContext) -> Result<(), StoreError> {
        let mut transaction = self.begin_sql().await?;
        let session = transaction.session();
        // Only evidence that is listed before the judgement is deleted after it: what arrives
        // between the two is not judged.
        let rows: Vec<i64> = session.column(sql(EVIDENCE_ROWS).bind("id", operation_id)).await?;
        let seen = read(session, operation_id).await?;
        if seen.is_none() {
            if orphans(session, Some(operation_id), 1).await?.is_empty() {
                return Err(nothing_known());
            }
            // The evidence keeps the key from being run again, so it stays as long as the record.
            if let Some(record) = session.first(sql(RECORD_OF).bind("operation", operation_id)).await? {
                return Err(still_stands(&record.get::<Vec<u8>>(0)?, &record.get::<String>(1)?));
            }
        }
        let word = seen.as_ref().map(|seen| judgement(seen, context)).transpose()?;
        match word.filter(|_| seen.as_ref().is_some_and(|seen| seen.identity.is_some())) {
            Some(word) => append(session, &word).await?,
            // Its record is gone, so no purge would delete its rows later.
            None => {
                forget_operation(session, operation_id).await?;
                session.run(sql(expiry::DELETE_EVIDENCE).bind("rows", rows)).await?;
            }
        }
        end(transaction, Fenced::Done, judged(operation_id, seen.as_ref()), context).await.map(drop)
    }

    async fn live_versions(&self) -> Result<Vec<Announced>, StoreError> {
        live::live(self).await
    }

    async fn change_key(&self, seen: &Record, change: &KeyChange, context: &ActContext) -> Result<Fenced, StoreError> {
        let mut transaction = self.begin_outcome().await?;
        let fenced = match change {
            _ if !is_locked(transaction.session(), seen).await? => Fenced::LostOwnership,
            KeyChange::Release { against_evidence } => {
                forget_key(transaction.session(), seen, *against_evidence).await?
            }
            KeyChange::Purge { against_evidence } => {
                let fenced = forget_key(transaction.session(), seen, *against_evidence).await?;
                if let (Fenced::Done, Some(at)) = (fenced, seen.identity.key().time()) {
                    // The bound is exclusive, so it is just above the time in the key.
                    let above = DbTime::from_millis(at.millis() + 1);
                    expiry::raise_bound(transaction.session(), seen.identity.operation(), above).await?;
                }
                fenced
            }
            KeyChange::Resolve { outcome, retention, against_evidence } => {
                if *against_evidence {
                    append(transaction.session(), &overruled(seen, outcome, context)).await?;
                }
                let digest = seen.identity.digest().to_vec();
                let fence = RecordFence { digest, epoch: seen.epoch, owner: None, unknown: true };
                transaction.finish_record(&fence, outcome, retention).await?
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
        let mut transaction = self.begin_outcome().await?;
        let fenced = change_operation(&mut *transaction, seen, change).await?;
        end(transaction, fenced, change.audit(seen), context).await
    }
}

async fn orphans(session: &mut dyn Session, only: Option<Uuid>, limit: u32) -> Result<Vec<Uuid>, StoreError> {
    session.column(sql(ORPHANS).bind("only", only).bind("limit", limit)).await
}

/// Locks the record of a key. Returns false where it is gone, or of another run than was seen.
async fn is_locked(session: &mut dyn Session, seen: &Record) -> Result<bool, StoreError> {
    records::lock(session, &seen.identity).await?;
    let is_of_run = sql(IS_OF_RUN).bind("digest", &seen.identity.digest()[..]).bind("operation", seen.operation_id);
    Ok(session.first(is_of_run).await?.is_some())
}

/// Deletes the record of a key, which is locked, with all that belongs to it.
async fn forget_key(session: &mut dyn Session, seen: &Record, against_evidence: bool) -> Result<Fenced, StoreError> {
    let asks_runs = seen.state != State::Completed && !against_evidence;
    let digest = seen.identity.digest();
    let delete = sql(FORGET_RECORD).bind("digest", &digest[..]).bind("epoch", seen.epoch).bind("asks_runs", asks_runs);
    let fenced = Fenced::rows(session.run(delete).await?);
    if fenced == Fenced::Done {
        session.run(sql(FORGET_BODIES).bind("digest", &digest[..])).await?;
        forget_operation(session, seen.operation_id).await?;
        forget_evidence(session, seen.operation_id, asks_runs).await?;
    }
    Ok(fenced)
}

async fn change_operation(
    transaction: &mut dyn OutcomeTransaction,
    seen: &StoredOperation,
    change: &OperationChange,
) -> Result<Fenced, StoreError> {
    let (stage, ends) = (change.stage()?, change.ends());
    let (id, session) = (seen.operation_id, transaction.session());
    lock(session, id).await?;
    let update = sql(CHANGE_OPERATION)
        .bind("operation", id)
        .bind("epoch", seen.epoch)
        .bind("parked", seen.parked.as_deref().unwrap_or_default())
        .bind("stage", stage.map(|stage| stage.as_str()))
        .bind("ends", ends)
        .bind("respects_lease", !change.takes_over())
        .bind("evidence", seen.evidence.len());
    if session.run(update).await? == 0 {
        return Ok(Fenced::LostOwnership);
    }
    match change {
        OperationChange::GoOn { evidence, .. } => {
            if let Some(stage) = stage {
                follow(session, id, stage).await?;
            }
            for row in evidence {
                append(session, row).await?;
            }
        }
        OperationChange::End { outcome, retention, evidence, .. } => {
            let record = fence_of(transaction.session(), id).await?.ok_or_else(|| no_record(id))?;
            let finished = transaction.finish_record(&record, outcome, retention).await?;
            same_times(transaction.session(), id, finished).await?;
            append(transaction.session(), evidence).await?;
        }
    }
    Ok(Fenced::Done)
}

/// Writes the audit row, then commits; rolls back for a dry run, or where the fence refused the
/// change.
async fn end(
    mut transaction: Box<dyn Transaction>,
    fenced: Fenced,
    audit: Audit<'_>,
    context: &ActContext,
) -> Result<Fenced, StoreError> {
    let number = audit.digest.map_or_else(String::new, |digest| hex(&digest));
    let act = Act {
        name: audit.act,
        place: audit.place.into(),
        topic: None,
        number: &number,
        message_id: audit.operation_id,
        new_id: None,
        document: serde_json::json!({ "was": audit.detail }),
        detail: audit.detail,
    };
    super::audit::write(transaction.session(), act, context).await?;
    if context.dry_run || fenced != Fenced::Done {
        transaction.rollback().await?;
    } else {
        transaction.commit().await?;
    }
    Ok(fenced)
}
