//! Deletes expired bodies and records of operations in bounded batches: bodies by the end of their
//! own time, records by the time of their outcome.
//!
//! Guarantees: a batch deletes exact rows and no range (R11), and skips records that others have
//! locked. Only records with an outcome are deleted, and the same transaction records the bound of
//! the purge (O23). An operation with a conflict that nobody has judged stays, with its evidence.
//! Evidence that arrives while its record is deleted stays too (O8).
//!
//! Not here: the partitions with which PostgreSQL frees large bodies.

use std::collections::HashSet;
use std::time::Duration;

use chrono::DateTime;
use uuid::Uuid;

use super::{Session, SqlStore, Statement, sql};
use crate::error::StoreError;
use crate::operation::rules::OperationName;
use crate::operation::rules::retention::Retention;
use crate::store::statements::Dialect;
use crate::time::db_time::DbTime;

const OLD_BODIES: &str =
    "select key_digest from oncebox.idempotency_body where expires_at < {now} order by expires_at limit :limit";

const EXPIRE_BODIES: &str = "delete {my: b }from {each idempotency_body b bytes key_digest :digests primary} \
    and b.expires_at < {now}";

/// Records with an expired body that is in the row of the claim, as small ones are.
const OLD_SMALL: &str = "select key_digest from oncebox.idempotency_request \
    where {pg: body_format is not null and body_expires_at}{my: body_end} < {now} \
    order by {pg: body_expires_at}{my: body_end} limit :limit {lock free}";

const EXPIRE_SMALL: &str = "update {pg: oncebox.idempotency_request }\
    {my: json_table(:digests, '$[*]' columns (v varchar(64) path '$')) v straight_join \
      oncebox.idempotency_request r force index (primary) on r.key_digest = unhex(v.v) }\
    set body_headers = null, body_bytes = null, body_format = null, body_kid = null, kept_bytes = null \
    {pg: where key_digest {in bytes :digests}}";

const OLD: &str = "select r.key_digest, r.operation_id, r.mode = 'phased' from oncebox.idempotency_request r \
    where r.operation = :operation and r.outcome_at < {now} - {span :kept} and r.expires_at < {now} \
    order by r.outcome_at limit :limit {lock free}";

const EVIDENCE: &str = "select e.evidence_id, e.operation_id \
    from {each operation_evidence e ids operation_id :operations operation_evidence_operation_id}";

const OUTLIVING: &str = "select r.operation_id from {each idempotency_request r bytes key_digest :digests primary} \
    and {piece outlives}";

const DELETE_RECORDS: &str = "delete {my: r }from {each idempotency_request r bytes key_digest :digests primary}";
const DELETE_BODIES: &str = "delete {my: b }from {each idempotency_body b bytes key_digest :digests primary}";
pub(super) const DELETE_EVIDENCE: &str =
    "delete {my: e }from {each operation_evidence e ints evidence_id :rows primary}";
const DELETE_OPERATIONS: &str = "delete {my: o }from {each operation o ids operation_id :operations primary}";
const DELETE_INTENTS: &str = "delete {my: i }from {each operation_intent i ids operation_id :operations primary}";
const DELETE_PHASES: &str = "delete {my: p }from {each operation_phase p ids operation_id :operations primary}";

/// Records the bound of a purge, which is never lowered.
const BOUND: &str = "insert into oncebox.idempotency_purge (operation, purged_below) \
    values (:operation, {if kept: {now} - {span :kept} + {span :skew}}{if at: :at}) \
    {or update operation} \
      purged_below = {greatest}(oncebox.idempotency_purge.purged_below, {new purged_below})";

/// Deletes one batch of bodies whose time is over, and returns their number. Large bodies are in a
/// table of their own, which PostgreSQL frees by partitions. On SQLite all bodies are in that
/// table.
pub(super) async fn expire_bodies(store: &dyn SqlStore, limit: u32) -> Result<u64, StoreError> {
    Ok(match store.dialect() {
        Dialect::Postgres => expire_small(store, limit).await?,
        Dialect::MySql => expire_large(store, limit).await? + expire_small(store, limit).await?,
        Dialect::Sqlite => expire_large(store, limit).await?,
    })
}

async fn expire_large(store: &dyn SqlStore, limit: u32) -> Result<u64, StoreError> {
    let digests: Vec<Vec<u8>> = store.reader().await?.column(sql(OLD_BODIES).bind("limit", limit)).await?;
    if digests.is_empty() {
        return Ok(0);
    }
    store.run_alone(sql(EXPIRE_BODIES).bind("digests", digests)).await
}

async fn expire_small(store: &dyn SqlStore, limit: u32) -> Result<u64, StoreError> {
    let mut transaction = store.begin_sql().await?;
    let session = transaction.session();
    let digests: Vec<Vec<u8>> = session.column(sql(OLD_SMALL).bind("limit", limit)).await?;
    if digests.is_empty() {
        transaction.rollback().await?;
        return Ok(0);
    }
    let gone = session.run(sql(EXPIRE_SMALL).bind("digests", digests)).await?;
    transaction.commit().await?;
    Ok(gone)
}

/// Records that keys of an operation below this time may have been purged.
pub(super) async fn raise_bound(
    session: &mut dyn Session,
    operation: &OperationName,
    below: DbTime,
) -> Result<(), StoreError> {
    let below = DateTime::from_timestamp_micros(below.micros);
    let below = below.ok_or_else(|| StoreError::Refused("the time in the key is out of range".to_owned()))?;
    let bound = sql(BOUND).bind("operation", operation.as_str().as_bytes()).bind("at", below);
    session.run(bound).await.map(drop)
}

#[derive(Default)]
struct Batch {
    digests: Vec<Vec<u8>>,
    operations: Vec<Uuid>,
    /// Those of the operations that ran in phases.
    phased: Vec<Uuid>,
}

/// Purges one batch of records of an operation, and returns their number.
pub(super) async fn purge(
    store: &dyn SqlStore,
    operation: &OperationName,
    retention: &Retention,
    id_skew: Duration,
    limit: u32,
) -> Result<u64, StoreError> {
    let name = operation.as_str().as_bytes();
    let mut transaction = store.begin_sql().await?;
    let session = transaction.session();
    let old = sql(OLD).bind("operation", name).bind("kept", retention.metadata).bind("limit", limit);
    let mut batch = Batch::default();
    for row in session.rows(old).await? {
        let id: Uuid = row.get(1)?;
        batch.digests.push(row.get(0)?);
        batch.operations.push(id);
        batch.phased.extend(row.get::<bool>(2)?.then_some(id));
    }
    if batch.digests.is_empty() {
        transaction.rollback().await?;
        return Ok(0);
    }
    let gone = forget(session, store.dialect(), &batch).await?;
    let bound = sql(BOUND).bind("operation", name).bind("kept", retention.metadata).bind("skew", id_skew);
    session.run(bound).await?;
    transaction.commit().await?;
    Ok(gone)
}

/// Deletes records that are locked, with their bodies, operations and evidence.
async fn forget(session: &mut dyn Session, dialect: Dialect, batch: &Batch) -> Result<u64, StoreError> {
    let of_operations = |text, ids: &[Uuid]| sql(text).bind("operations", ids.to_vec());
    let of_keys = |text| sql(text).bind("digests", batch.digests.clone());
    // The evidence is listed first, and only listed rows are deleted, so evidence that arrives
    // later stays. Whether an operation has a conflict is read after that, so evidence that arrives
    // between the two reads is considered too.
    let mut evidence: Vec<(i64, Uuid)> = Vec::new();
    for row in session.rows(of_operations(EVIDENCE, &batch.operations)).await? {
        evidence.push((row.get(0)?, row.get(1)?));
    }
    let outliving: Vec<Uuid> = session.column(of_keys(OUTLIVING)).await?;
    let outliving: HashSet<Uuid> = outliving.into_iter().collect();
    let settled: Vec<Uuid> = batch.phased.iter().copied().filter(|id| !outliving.contains(id)).collect();
    let rows: Vec<i64> = evidence.iter().filter(|(_, id)| !outliving.contains(id)).map(|(row, _)| *row).collect();

    let gone = session.run(of_keys(DELETE_RECORDS)).await?;
    let mut more: Vec<Statement> = Vec::new();
    // Bodies are deleted even if their time is not over: the next run of the key begins at the same
    // epoch again, and would find the old body. PostgreSQL looks a body up by its end too, so it
    // can leave the body to its partition.
    if dialect != Dialect::Postgres {
        more.push(of_keys(DELETE_BODIES));
    }
    if !batch.phased.is_empty() {
        more.push(of_operations(DELETE_OPERATIONS, &settled));
        more.push(of_operations(DELETE_INTENTS, &settled));
        // SQLite has no marks of phases, because it has one writer.
        if dialect != Dialect::Sqlite {
            more.push(of_operations(DELETE_PHASES, &batch.phased));
        }
    }
    if !rows.is_empty() {
        more.push(sql(DELETE_EVIDENCE).bind("rows", rows));
    }
    for statement in more {
        session.run(statement).await?;
    }
    Ok(gone)
}
