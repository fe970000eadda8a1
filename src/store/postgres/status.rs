//! How things stand: what `status` and `/metrics` show. Counts are bounded; beyond the bound they
//! are estimates.

use sqlx::{Postgres, Row};

use super::PostgresStore;
use crate::error::StoreError;
use crate::store::bounded::{Ask, Bounded};
use crate::store::operator::{COUNTED_MAX, waiting_and_held};
use crate::store::{ConsumerStatus, Mailbox, ShardStatus, Status};

const SHARDS: &str = "
select s.shard_id, s.bucket_from, s.bucket_to, s.scanned_to, (select count(*) from unnest(s.gaps)), s.epoch,
       case when l.stands then s.owner end,
       case when l.stands then extract(epoch from s.lease_until - clock_timestamp())::float8 end,
       extract(epoch from clock_timestamp() - s.updated_at)::float8
  from oncebox.shard s
 cross join lateral (select s.lease_until between clock_timestamp() and clock_timestamp() + s.lease_seconds * interval '1 second' as stands) l
 order by s.shard_id";

/// Rows above the cursor and at gaps, of this shard: how many, up to a bound, and the age of the
/// first.
const PENDING: &str = "
with shard as materialized (select * from oncebox.shard where shard_id = $1),
gap_rows as (
  select o.created_at, o.position from shard s, unnest(s.gaps) g
   cross join lateral (select created_at, position, bucket from oncebox.outbox where position >= lower(g) and position < upper(g)) o
   where o.bucket between s.bucket_from and s.bucket_to limit $2),
tail_rows as (
  select o.created_at, o.position from shard s
   cross join lateral (select created_at, position, bucket from oncebox.outbox
                        where position > s.scanned_to and bucket between s.bucket_from and s.bucket_to
                        order by position limit $2 + 1) o)
select (select count(*) from gap_rows), (select count(*) from tail_rows),
       greatest((select last_value from oncebox.outbox_position_seq) - (select scanned_to from shard), 0),
       extract(epoch from clock_timestamp() - (select min(created_at) from (
         select created_at from gap_rows union all (select created_at from tail_rows order by position limit 1)) first))::float8";

const DIVERTED: &str = "
select (select count(*) from (select 1 from oncebox.outbox_dead where state = 'held' limit $1) counted),
       (select count(*) from (select 1 from oncebox.outbox_dead where state = 'dead' limit $1) counted),
       (select extract(epoch from clock_timestamp() - min(first.created_at))::float8
          from (values ('behind'), ('destination')) why (cause)
         cross join lateral (select d.created_at from oncebox.outbox_dead d where d.state = 'held' and d.cause = why.cause
                              order by d.position limit 1) first)";

/// One consumer at a time: guessed for many, the cost has the server compile the statement, which
/// takes half a second. What is held is counted from the dead rows that hold; a lane that has none
/// is found out by the index, which only its order commends.
const CONSUMER: &str = "
select c.name,
       (select count(*) from (select 1 from oncebox.waiting w where w.consumer_id = c.consumer_id and w.state = 'waiting'
                               limit $1) counted),
       (select count(*) from (
          select 1 from (select distinct d.lane_id from (
                   select d.lane_id from oncebox.waiting d
                    where d.consumer_id = c.consumer_id and d.state = 'dead' and d.holds limit $1) d) d
           cross join lateral (select 1 from oncebox.waiting w where w.consumer_id = c.consumer_id
                                  and w.lane_id between d.lane_id and d.lane_id and w.state = 'waiting'
                                order by w.lane_id limit $1) w limit $1) counted),
       (select count(*) from (select 1 from oncebox.waiting w where w.consumer_id = c.consumer_id and w.due_at is not null
                               limit $1) counted),
       (select count(*) from (select 1 from oncebox.waiting w where w.consumer_id = c.consumer_id and w.state = 'dead'
                               limit $1) counted),
       (select count(*) from (select 1 from oncebox.inbox i where i.consumer_id = c.consumer_id limit $1 + 1) counted),
       (select extract(epoch from clock_timestamp() - w.stored_at)::float8 from oncebox.waiting w
         where w.consumer_id = c.consumer_id and w.state = 'waiting' order by w.sequence limit 1),
       extract(epoch from clock_timestamp() - c.seen_at)::float8
  from oncebox.consumer c where c.consumer_id = $2";

const INBOX_ESTIMATE: &str = "
select greatest(sum(greatest(c.reltuples, 0)), 0)::bigint from pg_class c
 where c.oid = 'oncebox.inbox_untimed'::regclass
    or c.oid in (select relid from pg_partition_tree('oncebox.inbox_timed') where isleaf)";

pub(super) async fn status(store: &PostgresStore) -> Result<Status, StoreError> {
    let mut connection = store.pool.acquire().await?;
    let mut status = Status { shards: shards(&mut connection).await?, ..Status::default() };
    for shard in &status.shards {
        let row = sqlx::query(PENDING).bind(shard.shard).bind(COUNTED_MAX).one(&mut connection).await?;
        let (gap_rows, tail_rows, drawn): (i64, i64, i64) = (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
        let tail_rows = if tail_rows > COUNTED_MAX { tail_rows.max(drawn) } else { tail_rows };
        status.pending += gap_rows.saturating_add(tail_rows).unsigned_abs();
        let age: Option<f64> = row.try_get(3)?;
        status.oldest_pending_age_seconds = status.oldest_pending_age_seconds.max(age.unwrap_or(0.0));
    }
    let row = sqlx::query(DIVERTED).bind(COUNTED_MAX).one(&mut connection).await?;
    status.held = row.try_get::<i64, _>(0)?.unsigned_abs();
    status.dead = row.try_get::<i64, _>(1)?.unsigned_abs();
    status.oldest_held_age_seconds = row.try_get::<Option<f64>, _>(2)?.unwrap_or(0.0).max(0.0);
    status.consumers = consumers(&mut connection).await?;
    // The next question takes a connection of its own, which may be the only one.
    drop(connection);
    status.emails_pending = store.emails_pending().await?;
    Ok(status)
}

async fn shards(connection: &mut Bounded<Postgres>) -> Result<Vec<ShardStatus>, StoreError> {
    let rows = sqlx::query(SHARDS).all(connection).await?;
    rows.iter()
        .map(|row| {
            let bucket = |at| Ok::<_, sqlx::Error>(u8::try_from(row.try_get::<i16, _>(at)?).unwrap_or(u8::MAX));
            Ok(ShardStatus {
                shard: row.try_get(0)?,
                buckets: (bucket(1)?, bucket(2)?),
                scanned_to: row.try_get(3)?,
                gaps: row.try_get::<i64, _>(4)?.unsigned_abs(),
                epoch: row.try_get(5)?,
                owner: row.try_get(6)?,
                lease_seconds_left: row.try_get::<Option<f64>, _>(7)?.unwrap_or(0.0),
                cursor_age_seconds: row.try_get(8)?,
            })
        })
        .collect()
}

async fn consumers(connection: &mut Bounded<Postgres>) -> Result<Vec<ConsumerStatus>, StoreError> {
    let ids = sqlx::query("select consumer_id from oncebox.consumer order by name").all(&mut *connection).await?;
    let mut consumers = Vec::with_capacity(ids.len());
    for id in &ids {
        let of_consumer = sqlx::query(CONSUMER).bind(COUNTED_MAX).bind(id.try_get::<i32, _>(0)?);
        // It may have been forgotten since.
        let Some(row) = of_consumer.optional(&mut *connection).await? else { continue };
        let (waiting, held) = waiting_and_held(row.try_get(1)?, row.try_get(2)?, row.try_get(3)?);
        let count = |at| Ok::<_, sqlx::Error>(row.try_get::<i64, _>(at)?.unsigned_abs());
        consumers.push(ConsumerStatus {
            name: row.try_get(0)?,
            waiting,
            held,
            dead: count(4)?,
            inbox_rows: count(5)?,
            seen_seconds_ago: row.try_get::<f64, _>(7)?.max(0.0),
            oldest_waiting_age_seconds: row.try_get::<Option<f64>, _>(6)?.unwrap_or(0.0).max(0.0),
        });
    }
    let beyond = |consumer: &ConsumerStatus| consumer.inbox_rows > COUNTED_MAX.unsigned_abs();
    let large = consumers.iter().filter(|consumer| beyond(consumer)).count();
    if large > 0 {
        // Partitions know how many rows they have, not whose: what the small ones leave is shared
        // out evenly.
        let all = sqlx::query(INBOX_ESTIMATE).one(connection).await?.try_get::<i64, _>(0)?.unsigned_abs();
        let small: u64 =
            consumers.iter().filter(|consumer| !beyond(consumer)).map(|consumer| consumer.inbox_rows).sum();
        let share = all.saturating_sub(small) / large as u64;
        for consumer in consumers.iter_mut().filter(|consumer| beyond(consumer)) {
            consumer.inbox_rows = consumer.inbox_rows.max(share);
        }
    }
    Ok(consumers)
}
