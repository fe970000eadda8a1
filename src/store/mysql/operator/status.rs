//! How things stand: shards, counts, ages.

use sqlx::mysql::MySqlRow;
use sqlx::{MySql, Row};

use super::super::text;
use super::count_of;
use crate::error::StoreError;
use crate::store::bounded::{Ask, Bounded};
use crate::store::{ConsumerStatus, ShardStatus, Status};

/// Rows that are counted one by one; more are estimated.
const COUNT_MAX: i64 = 100_000;

/// Everything but the e-mails.
pub(super) async fn read(connection: &mut Bounded<MySql>) -> Result<Status, StoreError> {
    let shards = sqlx::query(SHARDS).all(&mut *connection).await?;
    let diverted: Vec<(String, i64)> =
        sqlx::query_as("select state, count(*) from oncebox_outbox_dead group by state").all(&mut *connection).await?;
    let of_state =
        |wanted: &str| diverted.iter().find(|(state, _)| state == wanted).map_or(0, |(_, count)| count_of(*count));
    let oldest: Option<i64> = sqlx::query_scalar(
        "select timestampdiff(microsecond, created_at, utc_timestamp(6)) from oncebox_outbox order by position limit 1",
    )
    .optional(&mut *connection)
    .await?;
    Ok(Status {
        shards: shards.iter().map(shard_status).collect::<Result<_, _>>()?,
        pending: counted(connection, "oncebox_outbox", "select 1 from oncebox_outbox limit ?", None).await?,
        oldest_pending_age_seconds: oldest.map_or(0.0, seconds),
        held: of_state("held"),
        dead: of_state("dead"),
        consumers: consumers(connection).await?,
        emails_pending: 0,
    })
}

const SHARDS: &str = "\
select shard_id, bucket_from, bucket_to, scanned_to, epoch, owner, lease_seconds, \
       timestampdiff(microsecond, utc_timestamp(6), lease_until) as left_micros, \
       timestampdiff(microsecond, updated_at, utc_timestamp(6)) as age_micros \
  from oncebox_shard order by shard_id";

fn shard_status(row: &MySqlRow) -> Result<ShardStatus, StoreError> {
    let length: Option<f64> = row.try_get("lease_seconds")?;
    // A lease that ends later than its length from now was taken before the clock went back: nobody holds it (R22).
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

async fn consumers(connection: &mut Bounded<MySql>) -> Result<Vec<ConsumerStatus>, StoreError> {
    let names: Vec<(i32, Vec<u8>)> =
        sqlx::query_as("select consumer_id, name from oncebox_consumer order by name").all(&mut *connection).await?;
    let mut consumers = Vec::with_capacity(names.len());
    for (id, name) in names {
        let row = sqlx::query(
            "select (select count(*) from oncebox_waiting where state = 'waiting' and consumer_id = ?) as waiting, \
                    (select count(*) from oncebox_waiting where state = 'dead' and consumer_id = ?) as dead, \
                    (select count(*) from (select distinct lane from oncebox_waiting \
                       where state = 'dead' and consumer_id = ? and lane is not null) d \
                     straight_join oncebox_waiting w force index (waiting_lane) on w.consumer_id = ? and w.lane = d.lane \
                     where w.state = 'waiting') as held",
        )
        .bind(id)
        .bind(id)
        .bind(id)
        .bind(id)
        .one(&mut *connection)
        .await?;
        let (waiting, held): (i64, i64) = (row.try_get("waiting")?, row.try_get("held")?);
        let inbox = "select 1 from oncebox_inbox where consumer_id = ? limit ?";
        consumers.push(ConsumerStatus {
            name: text("name", name)?,
            // What stands behind a dead one is held: no retry is due to it.
            waiting: count_of(waiting - held),
            held: count_of(held),
            dead: count_of(row.try_get("dead")?),
            inbox_rows: counted(connection, "oncebox_inbox", inbox, Some(id)).await?,
        });
    }
    Ok(consumers)
}

/// Counts up to [`COUNT_MAX`]; above it, what the server estimates for the table.
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
    let count: i64 = query.bind(COUNT_MAX + 1).one(&mut *connection).await?;
    if count <= COUNT_MAX {
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
