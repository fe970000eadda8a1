//! How things stand: shards, counts, ages.

use std::time::Duration;

use sqlx::mysql::MySqlRow;
use sqlx::{MySql, Row};

use super::super::text;
use super::count_of;
use crate::error::StoreError;
use crate::store::bounded::{Ask, Bounded};
use crate::store::operator::{COUNTED_MAX, waiting_and_held};
use crate::store::{ConsumerStatus, LockWait, ShardStatus, Status};

/// Everything but the e-mails.
pub(super) async fn read(connection: &mut Bounded<MySql>) -> Result<Status, StoreError> {
    let shards = sqlx::query(SHARDS).all(&mut *connection).await?;
    let (held, dead): (i64, i64) = sqlx::query_as(
        "select (select count(*) from (select 1 from oncebox_outbox_dead where state = 'held' limit ?) c), \
                (select count(*) from (select 1 from oncebox_outbox_dead where state = 'dead' limit ?) c)",
    )
    .bind(COUNTED_MAX)
    .bind(COUNTED_MAX)
    .one(&mut *connection)
    .await?;
    let oldest: Option<i64> = sqlx::query_scalar(
        "select timestampdiff(microsecond, created_at, utc_timestamp(6)) from oncebox_outbox order by position limit 1",
    )
    .optional(&mut *connection)
    .await?;
    let oldest_held: Option<i64> = sqlx::query_scalar(
        "select timestampdiff(microsecond, created_at, utc_timestamp(6)) from oncebox_outbox_dead \
          where state = 'held' order by position limit 1",
    )
    .optional(&mut *connection)
    .await?;
    Ok(Status {
        shards: shards.iter().map(shard_status).collect::<Result<_, _>>()?,
        pending: counted(connection, "oncebox_outbox", "select 1 from oncebox_outbox limit ?", None).await?,
        oldest_pending_age_seconds: oldest.map_or(0.0, seconds),
        held: count_of(held),
        oldest_held_age_seconds: oldest_held.map_or(0.0, seconds),
        dead: count_of(dead),
        consumers: consumers(connection).await?,
        emails_pending: 0,
    })
}

const SHARDS: &str = "\
select shard_id, bucket_from, bucket_to, scanned_to, epoch, owner, lease_seconds, \
       timestampdiff(microsecond, utc_timestamp(6), lease_until) as left_micros, \
       timestampdiff(microsecond, updated_at, utc_timestamp(6)) as age_micros \
  from oncebox_shard order by shard_id";

/// Waits for a table, which every account sees of its own connections.
const TABLE_WAITS: &str = "\
select cast(id as char) as connection, coalesce(left(info, 100), '') as statement, cast(time as double) as seconds, \
       cast(state as char) as holder \
  from information_schema.processlist \
 where db = database() and state like 'Waiting for%lock%' and time >= ? order by time desc limit 20";

/// Waits for a row, which takes the right PROCESS to see.
const ROW_WAITS: &str = "\
select cast(t.trx_mysql_thread_id as char) as connection, coalesce(left(t.trx_query, 100), '') as statement, \
       cast(timestampdiff(second, t.trx_wait_started, now()) as double) as seconds, 'waits for a row' as holder \
  from information_schema.innodb_trx t join information_schema.processlist p on p.id = t.trx_mysql_thread_id \
 where t.trx_state = 'LOCK WAIT' and p.db = database() and timestampdiff(second, t.trx_wait_started, now()) >= ? \
 order by t.trx_wait_started limit 20";

/// Connections that wait for a lock; the server says for what, not always behind whom.
pub(super) async fn lock_waits(
    connection: &mut Bounded<MySql>,
    longer_than: Duration,
) -> Result<Vec<LockWait>, StoreError> {
    let mut waits = Vec::new();
    for sql in [TABLE_WAITS, ROW_WAITS] {
        let rows = match sqlx::query(sql).bind(longer_than.as_secs()).all(&mut *connection).await {
            Ok(rows) => rows,
            // Most accounts have not that right.
            Err(sqlx::Error::Database(_)) if sql == ROW_WAITS => Vec::new(),
            Err(error) => return Err(error.into()),
        };
        for row in &rows {
            waits.push(LockWait {
                connection: row.try_get("connection")?,
                statement: row.try_get("statement")?,
                seconds: row.try_get("seconds")?,
                holders: vec![row.try_get("holder")?],
            });
        }
    }
    Ok(waits)
}

fn shard_status(row: &MySqlRow) -> Result<ShardStatus, StoreError> {
    let length: Option<f64> = row.try_get("lease_seconds")?;
    // A lease that ends later than its length from now was taken before the clock went back: nobody
    // holds it (R22).
    let left: Option<f64> = row.try_get::<Option<i64>, _>("left_micros")?.map(seconds);
    let left = left.filter(|left| *left > 0.0 && *left <= length.unwrap_or(0.0));
    Ok(ShardStatus {
        shard: row.try_get("shard_id")?,
        buckets: (row.try_get("bucket_from")?, row.try_get("bucket_to")?),
        scanned_to: row.try_get("scanned_to")?,
        gaps: 0,
        epoch: row.try_get("epoch")?,
        owner: row.try_get::<Option<String>, _>("owner")?.filter(|_| left.is_some()),
        lease_seconds_left: left.unwrap_or(0.0),
        cursor_age_seconds: seconds(row.try_get("age_micros")?),
    })
}

/// What stands behind a dead row that holds is held: no retry is due to it.
const OF_CONSUMER: &str = "\
select (select count(*) from (select 1 from oncebox_waiting where state = 'waiting' and consumer_id = ? limit ?) c) as stand, \
       (select count(*) from (select 1 from oncebox_waiting where state = 'dead' and consumer_id = ? limit ?) c) as dead, \
       (select count(*) from (select 1 from oncebox_waiting where consumer_id = ? and due_at is not null limit ?) c) as due, \
       (select count(*) from (select 1 from (select distinct lane_id from (select lane_id from oncebox_waiting \
            where state = 'dead' and consumer_id = ? and lane_id is not null limit ?) l) d \
          straight_join oncebox_waiting w force index (waiting_lane) on w.consumer_id = ? and w.lane_id = d.lane_id \
          where w.state = 'waiting' limit ?) c) as held, \
       (select timestampdiff(microsecond, stored_at, utc_timestamp(6)) from oncebox_waiting \
         where state = 'waiting' and consumer_id = ? order by sequence limit 1) as oldest";

async fn consumers(connection: &mut Bounded<MySql>) -> Result<Vec<ConsumerStatus>, StoreError> {
    let names: Vec<(i32, Vec<u8>, i64)> = sqlx::query_as(
        "select consumer_id, name, timestampdiff(microsecond, seen_at, utc_timestamp(6)) from oncebox_consumer order by name",
    )
    .all(&mut *connection)
    .await?;
    let mut consumers = Vec::with_capacity(names.len());
    for (id, name, seen) in names {
        let row = sqlx::query(OF_CONSUMER)
            .bind(id)
            .bind(COUNTED_MAX)
            .bind(id)
            .bind(COUNTED_MAX)
            .bind(id)
            .bind(COUNTED_MAX)
            .bind(id)
            .bind(COUNTED_MAX)
            .bind(id)
            .bind(COUNTED_MAX)
            .bind(id)
            .one(&mut *connection)
            .await?;
        let (waiting, held) = waiting_and_held(row.try_get("stand")?, row.try_get("held")?, row.try_get("due")?);
        let inbox = "select 1 from oncebox_inbox where consumer_id = ? limit ?";
        consumers.push(ConsumerStatus {
            name: text("name", name)?,
            waiting,
            held,
            oldest_waiting_age_seconds: row.try_get::<Option<i64>, _>("oldest")?.map_or(0.0, seconds),
            dead: count_of(row.try_get("dead")?),
            seen_seconds_ago: seconds(seen),
            inbox_rows: counted(connection, "oncebox_inbox", inbox, Some(id)).await?,
        });
    }
    Ok(consumers)
}

/// Counts up to [`COUNTED_MAX`]; above it, what the server estimates for the table.
async fn counted(
    connection: &mut Bounded<MySql>,
    table: &'static str,
    rows: &'static str,
    consumer: Option<i32>,
) -> Result<u64, StoreError> {
    let mut query = sqlx::query_scalar(sqlx::AssertSqlSafe(format!("select count(*) from ({rows}) c")));
    if let Some(consumer) = consumer {
        query = query.bind(consumer);
    }
    let count: i64 = query.bind(COUNTED_MAX + 1).one(&mut *connection).await?;
    if count <= COUNTED_MAX {
        return Ok(count_of(count));
    }
    let estimate: Option<i64> = sqlx::query_scalar(
        "select cast(table_rows as signed) from information_schema.tables where table_schema = database() and table_name = ?",
    )
    .bind(table)
    .one(connection)
    .await?;
    Ok(count_of(estimate.unwrap_or(0).max(count)))
}

fn seconds(micros: i64) -> f64 {
    // A clock that went back shows as nothing, not as a negative age.
    micros.max(0) as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_went_back_is_no_negative_age() {
        assert_eq!(seconds(-5), 0.0);
        assert_eq!(count_of(-1), 0);
    }
}
