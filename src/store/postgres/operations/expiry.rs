//! What is forgotten: large bodies by whole partitions, small ones and records in bounded batches
//! (M99 to M101).
//!
//! Guarantees: no lock is waited for longer than the partitions' own wait (R8); only records with
//! an outcome go, and the bound of the purge is recorded in the statement that takes them (O23).
//! What is known of an operation with a conflict that nobody has judged stays behind (O8).

use std::time::Duration;

use sqlx::Row;

use super::super::PostgresStore;
use super::super::key_operator::outlives;
use super::super::partitions::attempt;
use crate::error::StoreError;
use crate::policy::operation::OperationName;
use crate::policy::operation::retention::Retention;
use crate::store::bounded::Ask;

/// Ranges reach at least so many days ahead; a body that is kept longer stands in DEFAULT.
const DAYS_AHEAD: i64 = 33;

/// The ranges of bodies: name, end in seconds, whether it is over, whether it is empty.
const RANGES: &str = r"
select c.relname::text, extract(epoch from bound[1]::timestamptz)::bigint, bound[1]::timestamptz < clock_timestamp(),
       pg_relation_size(c.oid) = 0
  from pg_inherits i
  join pg_class c on c.oid = i.inhrelid
 cross join lateral regexp_match(pg_get_expr(c.relpartbound, c.oid), 'TO \(''([^'']+)''\)') bound
 where i.inhparent = 'oncebox.idempotency_body'::regclass and bound is not null
 order by 2";

/// Small bodies, which stand in the rows of their claims. The time is a value of its own here and
/// below, where an index is read by it: compared with the clock itself, each entry of the index
/// would be read.
const EXPIRE_SMALL: &str = "
update oncebox.idempotency_request r set body_headers = null, body_bytes = null, body_format = null, body_kid = null,
  kept_bytes = null
  from (select key_digest, epoch from oncebox.idempotency_request
         where body_format is not null and body_expires_at < (select clock_timestamp())
         order by body_expires_at limit $1 for update skip locked) old
 where r.key_digest = old.key_digest and r.epoch = old.epoch";

const PURGE: &str = concat!("
with gone as (
  delete from oncebox.idempotency_request r using (
    select key_digest from oncebox.idempotency_request
     where operation = $1 and outcome_at < (select clock_timestamp() - $2 * interval '1 second') and expires_at < clock_timestamp()
     order by outcome_at limit $4 for update skip locked) old
   where r.key_digest = old.key_digest
  returning r.operation_id, r.mode, ", outlives!(), " as outlives,
            clock_timestamp() - ($2 - $3) * interval '1 second' as below),
bound as (
  insert into oncebox.idempotency_purge (operation, purged_below)
  select $1, max(g.below) from gone g having count(*) > 0
  on conflict (operation) do update set purged_below = greatest(oncebox.idempotency_purge.purged_below, excluded.purged_below)),
operations as (
  delete from oncebox.operation o using gone g where g.mode = 'phased' and not g.outlives and o.operation_id = g.operation_id),
intents as (
  delete from oncebox.operation_intent i using gone g where g.mode = 'phased' and not g.outlives and i.operation_id = g.operation_id),
evidence as (
  delete from oncebox.operation_evidence e using gone g where not g.outlives and e.operation_id = g.operation_id),
phases as (
  delete from oncebox.operation_phase p using gone g where g.mode = 'phased' and p.operation_id = g.operation_id)
select count(*) from gone");

/// Frees partitions whose time is over, makes ranges ahead, and takes rows out of DEFAULT and small
/// bodies out of their rows.
pub(super) async fn expire_bodies(store: &PostgresStore, limit: u32) -> Result<u64, StoreError> {
    let mut connection = store.dedicated().await?;
    let mut top = 0;
    for row in sqlx::query(RANGES).all(&mut connection).await? {
        let (name, end): (String, i64) = (row.try_get(0)?, row.try_get(1)?);
        let (is_over, is_empty): (bool, bool) = (row.try_get(2)?, row.try_get(3)?);
        top = top.max(end);
        if is_over && !is_empty {
            attempt(&mut connection, &format!("truncate oncebox.{name}")).await?;
        } else if is_over {
            let drop = format!(
                "set local lock_timeout = '50ms'; alter table oncebox.idempotency_body detach partition oncebox.{name}; \
                 drop table oncebox.{name}"
            );
            attempt(&mut connection, &drop).await?;
        }
    }
    let day = 86_400;
    let now: i64 =
        sqlx::query_scalar("select extract(epoch from clock_timestamp())::bigint").one(&mut connection).await?;
    // Above whatever a statement that runs now may write, unless it is in DEFAULT and stays there.
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
    let small = sqlx::query(EXPIRE_SMALL).bind(i64::from(limit)).run(&mut connection).await?;
    connection.close().await;
    Ok(gone.rows_affected() + small.rows_affected())
}

/// One batch of one operation.
pub(super) async fn purge(
    store: &PostgresStore,
    operation: &OperationName,
    retention: &Retention,
    id_skew: Duration,
    limit: u32,
) -> Result<u64, StoreError> {
    let gone: i64 = sqlx::query_scalar(PURGE)
        .bind(operation.as_str().as_bytes())
        .bind(retention.metadata.as_secs_f64())
        .bind(id_skew.as_secs_f64())
        .bind(i64::from(limit))
        .one(&store.pool)
        .await?;
    Ok(gone.unsigned_abs())
}

/// A range that was attached while our body was on its way to DEFAULT is a transient failure (R8,
/// R27).
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
