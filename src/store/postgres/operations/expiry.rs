//! Removes expired large bodies by whole partitions.
//!
//! Guarantee: it waits for locks only as short as `partitions::attempt` does, so that it does not
//! stop those who write bodies (R8). What cannot be done now is done by a later call.
//!
//! Not here: removal in batches (`sql::expiry`).

use std::time::Duration;

use sqlx::Row;

use super::super::PostgresStore;
use super::super::partitions::{attempt, dropping};
use crate::error::StoreError;
use crate::store::bounded::Ask;

/// Ranges are made at least so many days ahead.
const DAYS_AHEAD: i64 = 33;

/// A day less than that. A body that is kept longer is in the row of its claim, however large it
/// is. In DEFAULT it would be in the way of the range of its day, and no range would follow.
pub(super) const IN_RANGES_MAX: Duration = Duration::from_secs(32 * 86_400);

/// The ranges of bodies: name, end in seconds, whether the end has passed, whether the range is
/// empty.
const RANGES: &str = r"
select c.relname::text, extract(epoch from bound[1]::timestamptz)::bigint, bound[1]::timestamptz < clock_timestamp(),
       pg_relation_size(c.oid) = 0
  from pg_inherits i
  join pg_class c on c.oid = i.inhrelid
 cross join lateral regexp_match(pg_get_expr(c.relpartbound, c.oid), 'TO \(''([^'']+)''\)') bound
 where i.inhparent = 'oncebox.idempotency_body'::regclass and bound is not null
 order by 2";

/// Empties and drops partitions whose time is over, makes ranges ahead, and deletes expired bodies
/// from DEFAULT; returns the number of these.
pub(super) async fn free_bodies(store: &PostgresStore, limit: u32) -> Result<u64, StoreError> {
    let mut connection = store.pool.dedicated().await?;
    let mut top = 0;
    for row in sqlx::query(RANGES).all(&mut connection).await? {
        let (name, end): (String, i64) = (row.try_get(0)?, row.try_get(1)?);
        let (is_over, is_empty): (bool, bool) = (row.try_get(2)?, row.try_get(3)?);
        top = top.max(end);
        if is_over && !is_empty {
            attempt(&mut connection, &format!("truncate oncebox.{name}")).await?;
        } else if is_over {
            attempt(&mut connection, &dropping("idempotency_body", &name)).await?;
        }
    }
    let day = 86_400;
    let now: i64 =
        sqlx::query_scalar("select extract(epoch from clock_timestamp())::bigint").one(&mut connection).await?;
    // Begins above whatever a running statement may write.
    let mut from = top.max((now / day + DAYS_AHEAD) * day);
    while from <= now + (DAYS_AHEAD + 1) * day {
        let attach = format!("select oncebox.attach_body_range(to_timestamp({from}), to_timestamp({}))", from + day);
        if !attempt(&mut connection, &attach).await? {
            break;
        }
        from += day;
    }
    let gone = sqlx::query(
        "delete from oncebox.idempotency_body_default b using ( \
           select key_digest, epoch, expires_at from oncebox.idempotency_body_default \
            where expires_at < (select clock_timestamp()) order by expires_at limit $1 for update skip locked) old \
          where b.key_digest = old.key_digest and b.epoch = old.epoch and b.expires_at = old.expires_at",
    )
    .bind(i64::from(limit))
    .run(&mut connection)
    .await?;
    connection.close().await;
    Ok(gone.rows_affected())
}

/// A range was attached while our body was on its way to DEFAULT: a transient error (R8, R27).
pub(super) fn attached(error: sqlx::Error) -> StoreError {
    match &error {
        sqlx::Error::Database(database)
            if database.code().as_deref() == Some("23514")
                && database.table().is_some_and(|table| table.starts_with("idempotency_body")) =>
        {
            StoreError::Busy(error)
        }
        _ => error.into(),
    }
}
