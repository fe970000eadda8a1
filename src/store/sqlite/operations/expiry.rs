//! What is forgotten, in bounded batches (M99 to M101): bodies by their own end, records by their
//! outcome (O23).

use std::time::Duration;

use sqlx::{query, query_as};

use super::super::connect::SqliteStore;
use super::super::key_operator::outlives;
use super::super::{millis, now_ms};
use crate::error::StoreError;
use crate::policy::operation::OperationName;
use crate::policy::operation::retention::Retention;

/// Deletes one batch of bodies whose life is over; gives how many went.
pub(super) async fn expire_bodies(store: &SqliteStore, limit: u32) -> Result<u64, StoreError> {
    let mut write = store.write().await?;
    let delete = query(concat!(
        "delete from oncebox_idempotency_body where rowid in (select rowid from oncebox_idempotency_body where expires_at < ",
        now_ms!(),
        " order by expires_at limit ?)"
    ));
    let gone = delete.bind(limit).execute(write.connection()).await?.rows_affected();
    write.commit().await?;
    Ok(gone)
}

/// One batch of one operation.
pub(super) async fn purge(
    store: &SqliteStore,
    operation: &OperationName,
    retention: &Retention,
    id_skew: Duration,
    limit: u32,
) -> Result<u64, StoreError> {
    let mut write = store.write().await?;
    let name = operation.as_str().as_bytes().to_vec();
    let old = query_as::<_, (Vec<u8>, Vec<u8>, bool)>(concat!(
        "select key_digest, operation_id, ",
        outlives!(),
        " from oncebox_idempotency_request as r where operation = ?1 and outcome_at < ",
        now_ms!(),
        " - ?2 and expires_at < ",
        now_ms!(),
        " order by outcome_at limit ?3"
    ));
    let old = old.bind(&name).bind(millis(retention.metadata)).bind(limit).fetch_all(write.connection()).await?;
    for (digest, operation_id, outlives) in &old {
        // The body too, whatever is left of its life: the next run of the key begins at the same
        // epoch again.
        for statement in [
            "delete from oncebox_idempotency_request where key_digest = ?",
            "delete from oncebox_idempotency_body where key_digest = ?",
        ] {
            query(statement).bind(digest).execute(write.connection()).await?;
        }
        // What is known of a conflict that nobody has judged stays behind (O8).
        if *outlives {
            continue;
        }
        for statement in [
            "delete from oncebox_operation where operation_id = ?",
            "delete from oncebox_operation_intent where operation_id = ?",
            "delete from oncebox_operation_evidence where operation_id = ?",
        ] {
            query(statement).bind(operation_id).execute(write.connection()).await?;
        }
    }
    if !old.is_empty() {
        let bound = query(concat!(
            "insert into oncebox_idempotency_purge (operation, purged_below) values (?1, ",
            now_ms!(),
            " - ?2) on conflict (operation) do update set purged_below = max(purged_below, excluded.purged_below)"
        ));
        let below = millis(retention.metadata) - millis(id_skew);
        bound.bind(&name).bind(below).execute(write.connection()).await?;
    }
    write.commit().await?;
    Ok(u64::try_from(old.len()).unwrap_or(u64::MAX))
}
