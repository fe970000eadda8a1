//! What is forgotten, in bounded batches (M99 to M101): bodies by their own end, records by their
//! outcome (O23).
//!
//! A batch reads the exact rows first and deletes them through a join from the list: a range would
//! wait for every open writer (R11).

use std::time::Duration;

use super::super::key_operator::outlives;
use super::super::{MySqlStore, START, hex_list, micros};
use crate::error::StoreError;
use crate::policy::operation::OperationName;
use crate::policy::operation::retention::Retention;
use crate::store::bounded::Ask;

/// Deletes one batch of bodies whose life is over; gives how many went.
pub(super) async fn expire_bodies(store: &MySqlStore, limit: u32) -> Result<u64, StoreError> {
    let old: Vec<(Vec<u8>, i64)> = sqlx::query_as(
        "select key_digest, epoch from oncebox_idempotency_body where expires_at < utc_timestamp(6) order by expires_at limit ?",
    )
    .bind(limit)
    .all(&store.pool)
    .await?;
    let old: Vec<Vec<u8>> =
        old.into_iter().map(|(digest, epoch)| [&digest[..], &epoch.to_be_bytes()].concat()).collect();
    let gone = sqlx::query(
        "delete b from json_table(?, '$[*]' columns (id varchar(80) path '$')) j \
         straight_join oncebox_idempotency_body b force index (primary) \
         on b.key_digest = unhex(left(j.id, 64)) and b.epoch = cast(conv(substr(j.id, 65), 16, -10) as signed) \
         where b.expires_at < utc_timestamp(6)",
    )
    .bind(hex_list(old.iter().map(Vec::as_slice)))
    .run(&store.pool)
    .await?;
    Ok(gone.rows_affected() + expire_small(store, limit).await?)
}

/// Small bodies, which stand in the rows of their claims.
async fn expire_small(store: &MySqlStore, limit: u32) -> Result<u64, StoreError> {
    let old: Vec<(Vec<u8>,)> = sqlx::query_as(
        "select key_digest from oncebox_idempotency_request where body_end < utc_timestamp(6) order by body_end limit ?",
    )
    .bind(limit)
    .all(&store.pool)
    .await?;
    if old.is_empty() {
        return Ok(0);
    }
    let gone = sqlx::query(
        "update json_table(?, '$[*]' columns (id varchar(64) path '$')) j \
         straight_join oncebox_idempotency_request r force index (primary) on r.key_digest = unhex(j.id) \
         set r.body_headers = null, r.body_bytes = null, r.body_format = null, r.body_kid = null, r.kept_bytes = null \
         where r.body_end < utc_timestamp(6)",
    )
    .bind(hex_list(old.iter().map(|(digest,)| digest.as_slice())))
    .run(&store.pool)
    .await?;
    Ok(gone.rows_affected())
}

/// One batch of one operation.
pub(super) async fn purge(
    store: &MySqlStore,
    operation: &OperationName,
    retention: &Retention,
    id_skew: Duration,
    limit: u32,
) -> Result<u64, StoreError> {
    let name = operation.as_str().as_bytes().to_vec();
    let mut transaction = store.pool.begin(START).await?;
    let old: Vec<(Vec<u8>, Vec<u8>, bool)> = sqlx::query_as(concat!(
        "select key_digest, operation_id, ",
        outlives!(),
        " from oncebox_idempotency_request r \
         where operation = ? and outcome_at < utc_timestamp(6) - interval ? microsecond and expires_at < utc_timestamp(6) \
         order by outcome_at limit ?"
    ))
    .bind(&name)
    .bind(micros(retention.metadata))
    .bind(limit)
    .all(&mut transaction)
    .await?;
    if old.is_empty() {
        transaction.rollback().await?;
        return Ok(0);
    }
    // Of what was seen, only what is still so: a key that was used anew meanwhile stays.
    let gone = sqlx::query(
        "delete r from json_table(?, '$[*]' columns (id varchar(64) path '$')) j \
         straight_join oncebox_idempotency_request r force index (primary) on r.key_digest = unhex(j.id) \
         where r.outcome_at < utc_timestamp(6) - interval ? microsecond and r.expires_at < utc_timestamp(6)",
    )
    .bind(hex_list(old.iter().map(|(digest, ..)| digest.as_slice())))
    .bind(micros(retention.metadata))
    .run(&mut transaction)
    .await?
    .rows_affected();
    // Their bodies too, whatever is left of their life: the next run of a key begins at the same
    // epoch again.
    sqlx::query(
        "delete b from json_table(?, '$[*]' columns (id varchar(64) path '$')) j \
         straight_join oncebox_idempotency_body b force index (primary) on b.key_digest = unhex(j.id) \
         where not exists (select 1 from oncebox_idempotency_request r where r.key_digest = b.key_digest)",
    )
    .bind(hex_list(old.iter().map(|(digest, ..)| digest.as_slice())))
    .run(&mut transaction)
    .await?;
    // What is known of a conflict that nobody has judged stays behind (O8).
    let settled = old.iter().filter(|(.., outlives)| !outlives);
    let operations = hex_list(settled.map(|(_, operation_id, _)| operation_id.as_slice()));
    for statement in [
        "delete t from json_table(?, '$[*]' columns (id varchar(32) path '$')) j \
         straight_join oncebox_operation t force index (primary) on t.operation_id = unhex(j.id) \
         where not exists (select 1 from oncebox_idempotency_request r where r.operation_id = t.operation_id)",
        "delete t from json_table(?, '$[*]' columns (id varchar(32) path '$')) j \
         straight_join oncebox_operation_phase t force index (primary) on t.operation_id = unhex(j.id) \
         where not exists (select 1 from oncebox_idempotency_request r where r.operation_id = t.operation_id)",
        "delete t from json_table(?, '$[*]' columns (id varchar(32) path '$')) j \
         straight_join oncebox_operation_intent t force index (primary) on t.operation_id = unhex(j.id) \
         where not exists (select 1 from oncebox_idempotency_request r where r.operation_id = t.operation_id)",
        "delete t from json_table(?, '$[*]' columns (id varchar(32) path '$')) j \
         straight_join oncebox_operation_evidence t force index (operation_evidence_operation_id) on t.operation_id = unhex(j.id) \
         where not exists (select 1 from oncebox_idempotency_request r where r.operation_id = t.operation_id)",
    ] {
        sqlx::query(statement).bind(&operations).run(&mut transaction).await?;
    }
    sqlx::query(
        "insert into oncebox_idempotency_purge (operation, purged_below) \
         values (?, utc_timestamp(6) - interval ? microsecond + interval ? microsecond) \
         on duplicate key update purged_below = greatest(purged_below, values(purged_below))",
    )
    .bind(&name)
    .bind(micros(retention.metadata))
    .bind(micros(id_skew))
    .run(&mut transaction)
    .await?;
    transaction.commit().await?;
    Ok(gone)
}
