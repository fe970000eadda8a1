//! Tries of messages, counted in transactions of their own (R26), and forgotten once their message
//! has its inbox row.

use sqlx::MySql;

use super::super::{HISTORY_MAX, START};
use super::id_list;
use crate::error::StoreError;
use crate::message::MessageId;
use crate::store::ConsumerId;
use crate::store::bounded::{Ask, BoundedPool};
use crate::store::operator::kept_error;

/// By exact rows: a range would wait for whoever counts a try.
pub(super) const DELETE: &str = "\
delete a from json_table(?, '$[*]' columns (id varchar(32) path '$')) j \
  straight_join oncebox_attempt a force index (primary) on a.consumer_id = ? and a.message_id = unhex(j.id)";

/// Counts a try, or notes its error, or both; gives how many were counted.
pub(super) async fn count(
    pool: &BoundedPool<MySql>,
    consumer: ConsumerId,
    id: MessageId,
    counts: bool,
    error: Option<&str>,
) -> Result<u32, StoreError> {
    let mut transaction = pool.begin(START).await?;
    sqlx::query(
        "insert into oncebox_attempt (consumer_id, message_id, attempts, history, updated_at) \
         values (?, ?, ?, '[]', utc_timestamp(6)) \
         on duplicate key update attempts = attempts + ?, updated_at = utc_timestamp(6)",
    )
    .bind(consumer.0)
    .bind(id.uuid())
    .bind(u32::from(counts))
    .bind(u32::from(counts))
    .run(&mut transaction)
    .await?;
    if let Some(error) = error {
        sqlx::query(
            "update oncebox_attempt set history = json_array_append( \
               if(json_length(history) >= ?, json_remove(history, '$[0]'), history), '$', json_object( \
                 'at', date_format(utc_timestamp(6), '%Y-%m-%dT%H:%i:%s.%fZ'), 'attempt', attempts, 'error', ?)) \
             where consumer_id = ? and message_id = ?",
        )
        .bind(HISTORY_MAX)
        .bind(kept_error(error))
        .bind(consumer.0)
        .bind(id.uuid())
        .run(&mut transaction)
        .await?;
    }
    let attempts = sqlx::query_scalar("select attempts from oncebox_attempt where consumer_id = ? and message_id = ?")
        .bind(consumer.0)
        .bind(id.uuid())
        .one(&mut transaction)
        .await?;
    transaction.commit().await?;
    Ok(attempts)
}

/// Up to `rows_max` of those whose message has its inbox row; gives how many.
pub(super) async fn forget(
    pool: &BoundedPool<MySql>,
    consumer: ConsumerId,
    rows_max: usize,
) -> Result<u64, StoreError> {
    let known: Vec<uuid::Uuid> = sqlx::query_scalar(
        "select a.message_id from oncebox_attempt a straight_join oncebox_inbox i force index (primary) \
           on i.consumer_id = a.consumer_id and i.message_id = a.message_id where a.consumer_id = ? limit ?",
    )
    .bind(consumer.0)
    .bind(i64::try_from(rows_max).unwrap_or(i64::MAX))
    .all(pool)
    .await?;
    let known: Vec<MessageId> = known.into_iter().map(MessageId::from_uuid).collect();
    if known.is_empty() {
        return Ok(0);
    }
    Ok(sqlx::query(DELETE).bind(id_list(&known)).bind(consumer.0).run(pool).await?.rows_affected())
}

/// Takes back a try that was not made.
pub(super) async fn take_back(
    pool: &BoundedPool<MySql>,
    consumer: ConsumerId,
    id: MessageId,
) -> Result<(), StoreError> {
    // A row that says nothing any more goes: only the success of a counted try would delete it.
    for statement in [
        "update oncebox_attempt set attempts = attempts - 1, updated_at = utc_timestamp(6) \
         where consumer_id = ? and message_id = ? and attempts > 0",
        "delete from oncebox_attempt where consumer_id = ? and message_id = ? and attempts = 0 and json_length(history) = 0",
    ] {
        sqlx::query(statement).bind(consumer.0).bind(id.uuid()).run(pool).await?;
    }
    Ok(())
}

/// Of these messages those with counted tries.
pub(super) async fn counted(
    pool: &BoundedPool<MySql>,
    consumer: ConsumerId,
    ids: &[MessageId],
) -> Result<Vec<(MessageId, u32)>, StoreError> {
    if ids.is_empty() {
        return Ok(Vec::new());
    }
    let found = sqlx::query_as(
        "select a.message_id, a.attempts from json_table(?, '$[*]' columns (id varchar(32) path '$')) j \
         straight_join oncebox_attempt a force index (primary) on a.consumer_id = ? and a.message_id = unhex(j.id) where a.attempts > 0",
    )
    .bind(id_list(ids))
    .bind(consumer.0)
    .all(pool)
    .await?;
    Ok(found.into_iter().map(|(id, attempts)| (MessageId::from_uuid(id), attempts)).collect())
}
