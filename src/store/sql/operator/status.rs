//! Reads what `status` and `/metrics` show. Counts are exact up to a bound; beyond it they are that
//! bound or an estimate.

use std::time::Duration;

use crate::error::StoreError;
use crate::operator::{COUNTED_MAX, ConsumerStatus, ShardStatus, Status, waiting_and_held};
use crate::store::sql::{Row, Session, sql};

/// The shards. Only PostgreSQL has gaps.
const SHARDS: &str = "\
select shard_id, {pg: bucket_from::integer, bucket_to::integer}{my lite: bucket_from, bucket_to}, scanned_to, \
       {pg: (select count(*) from unnest(gaps))}{my lite: 0}, epoch, owner, {age lease_until}, \
       {pg: (lease_seconds * 1000000)::bigint}{my: cast(lease_seconds * 1000000 as signed)}{lite: lease_length * 1000}, \
       {age updated_at} \
  from oncebox.shard order by shard_id";

/// The rows of a shard that are not proven: how many, up to a bound, and the age of the first. On
/// PostgreSQL these are the rows in gaps and above the cursor, elsewhere all rows.
const PENDING: &str = "\
{pg: with shard as materialized (select * from oncebox.shard where shard_id = :shard), \
gap_rows as ( \
  select o.created_at, o.position from shard s, unnest(s.gaps) g \
   cross join lateral (select created_at, position, bucket from oncebox.outbox where position >= lower(g) and position < upper(g)) o \
   where o.bucket between s.bucket_from and s.bucket_to limit :max), \
tail_rows as ( \
  select o.created_at, o.position from shard s \
   cross join lateral (select created_at, position, bucket from oncebox.outbox \
                        where position > s.scanned_to and bucket between s.bucket_from and s.bucket_to \
                        order by position limit :beyond) o) \
select (select count(*) from gap_rows), (select count(*) from tail_rows), \
       {age (select min(created_at) from ( \
         select created_at from gap_rows union all (select created_at from tail_rows order by position limit 1)) first)}}\
{my lite: select 0, (select count(*) from (select 1 from oncebox.outbox limit :beyond) c), \
       {age (select created_at from oncebox.outbox order by position limit 1)}}";

/// An estimate of the same number, for more rows than were counted.
const PENDING_ESTIMATE: &str = "\
{pg: select greatest((select last_value from oncebox.outbox_position_seq) \
                     - (select scanned_to from oncebox.shard where shard_id = :shard), 0)}\
{my: select coalesce((select cast(table_rows as signed) from information_schema.tables \
                       where table_schema = database() and table_name = 'oncebox_outbox'), 0)}\
{lite: select coalesce(max(position) - min(position) + 1, 0) from oncebox.outbox}";

/// How many rows are held and dead, and the age of the first held one. PostgreSQL finds it for each
/// cause, because its index begins with the cause.
const DIVERTED: &str = "\
select (select count(*) from (select 1 from oncebox.outbox_dead \
          where {pg my: state = 'held'}{lite: state <> 'dead'} limit :max) h), \
       (select count(*) from (select 1 from oncebox.outbox_dead where state = 'dead' limit :max) d), \
       {age ({pg: select min(first.created_at) from (values ('behind'), ('destination')) why (cause) \
                  cross join lateral (select d.created_at from oncebox.outbox_dead d where d.state = 'held' and d.cause = why.cause \
                                       order by d.position limit 1) first}\
             {my lite: select created_at from oncebox.outbox_dead \
                        where {my: state = 'held'}{lite: state <> 'dead'} order by position limit 1})}";

const CONSUMERS: &str = "select consumer_id, name, {age seen_at} from oncebox.consumer order by name";

/// The counts of one consumer. For many at once PostgreSQL would estimate a high cost and compile
/// the statement, which takes half a second. Held rows are counted from the dead rows that hold,
/// which are few. On PostgreSQL `between` and `order by` make the planner use the index by lane
/// also for a lane with no row behind. SQLite counts no further than the bound, because it has no
/// estimate.
const OF_CONSUMER: &str = "\
select (select count(*) from (select 1 from oncebox.waiting where consumer_id = :of and state = 'waiting' limit :max) a), \
       (select count(*) from ( \
          {pg: select 1 from (select distinct d.lane_id from ( \
                   select d.lane_id from oncebox.waiting d \
                    where d.consumer_id = :of and d.state = 'dead' and d.holds limit :max) d) d \
           cross join lateral (select 1 from oncebox.waiting w where w.consumer_id = :of \
                                  and w.lane_id between d.lane_id and d.lane_id and w.state = 'waiting' \
                                order by w.lane_id limit :max) w}\
          {my: select 1 from (select distinct lane_id from (select lane_id from oncebox.waiting \
                 where state = 'dead' and consumer_id = :of and lane_id is not null limit :max) l) d \
               straight_join oncebox.waiting w force index (waiting_lane) on w.consumer_id = :of and w.lane_id = d.lane_id \
               where w.state = 'waiting'}\
          {lite: select 1 from (select distinct lane_id from (select lane_id from oncebox.waiting as d \
                   where d.consumer_id = :of and d.state = 'dead' and d.blocks = 1 limit :max)) as walls \
                 join oncebox.waiting as w on w.consumer_id = :of and w.lane_id = walls.lane_id and w.blocks = 1 \
                  and w.state = 'waiting'} limit :max) b), \
       (select count(*) from (select 1 from oncebox.waiting where consumer_id = :of and due_at is not null limit :max) c), \
       (select count(*) from (select 1 from oncebox.waiting where consumer_id = :of and state = 'dead' limit :max) d), \
       (select count(*) from (select 1 from oncebox.inbox where consumer_id = :of limit {pg my: :beyond}{lite: :max}) e), \
       {age (select stored_at from oncebox.waiting where consumer_id = :of and state = 'waiting' order by sequence limit 1)}";

/// An estimate of the inbox rows of all consumers together.
const INBOX_ESTIMATE: &str = "\
{pg: select greatest(sum(greatest(c.reltuples, 0)), 0)::bigint from pg_class c \
 where c.oid = 'oncebox.inbox_untimed'::regclass \
    or c.oid in (select relid from pg_partition_tree('oncebox.inbox_timed') where isleaf)}\
{my: select coalesce((select cast(table_rows as signed) from information_schema.tables \
                       where table_schema = database() and table_name = 'oncebox_inbox'), 0)}\
{lite: select 0}";

/// Reads everything of the status except the e-mails.
pub(super) async fn read(session: &mut dyn Session) -> Result<Status, StoreError> {
    let shards = session.rows(sql(SHARDS)).await?;
    let shards = shards.iter().map(|row| shard(&**row)).collect::<Result<Vec<_>, _>>()?;
    let mut status = Status { shards, ..Status::default() };
    for shard in &status.shards {
        let of = |text| sql(text).bind("shard", i64::from(shard.shard));
        let rows = session.rows(of(PENDING).bind("max", COUNTED_MAX).bind("beyond", COUNTED_MAX + 1)).await?;
        let row = only(&rows)?;
        let (gap_rows, mut rows): (i64, i64) = (row.get(0)?, row.get(1)?);
        let age = seconds(row.get_opt(2)?.unwrap_or(0));
        if rows > COUNTED_MAX {
            rows = rows.max(session.one(of(PENDING_ESTIMATE)).await?);
        }
        status.pending += gap_rows.saturating_add(rows).unsigned_abs();
        status.oldest_pending_age_seconds = status.oldest_pending_age_seconds.max(age);
    }
    let rows = session.rows(sql(DIVERTED).bind("max", COUNTED_MAX)).await?;
    let row = only(&rows)?;
    (status.held, status.dead) = (row.get(0)?, row.get(1)?);
    status.oldest_held_age_seconds = seconds(row.get_opt(2)?.unwrap_or(0));
    status.consumers = consumers(session).await?;
    Ok(status)
}

fn only(rows: &[Box<dyn Row>]) -> Result<&dyn Row, StoreError> {
    rows.first().map(|row| &**row).ok_or(StoreError::Other(sqlx::Error::RowNotFound))
}

fn shard(row: &dyn Row) -> Result<ShardStatus, StoreError> {
    // A lease that ends later than its length from now was taken before the clock went back, and is
    // over (R22).
    let left = row.get_opt::<i64>(7)?.map(std::ops::Neg::neg);
    let length: i64 = row.get_opt(8)?.unwrap_or(0);
    let left = left.filter(|left| *left > 0 && *left <= length);
    Ok(ShardStatus {
        shard: row.get(0)?,
        buckets: (row.get(1)?, row.get(2)?),
        scanned_to: row.get(3)?,
        gaps: row.get(4)?,
        epoch: row.get(5)?,
        owner: row.get_opt(6)?.filter(|_| left.is_some()),
        lease_seconds_left: seconds(left.unwrap_or(0)),
        cursor_age_seconds: seconds(row.get(9)?),
    })
}

async fn consumers(session: &mut dyn Session) -> Result<Vec<ConsumerStatus>, StoreError> {
    let mut consumers = Vec::new();
    for consumer in session.rows(sql(CONSUMERS)).await? {
        let of_consumer = sql(OF_CONSUMER).bind("of", consumer.get::<i64>(0)?);
        let rows = session.rows(of_consumer.bind("max", COUNTED_MAX).bind("beyond", COUNTED_MAX + 1)).await?;
        let row = only(&rows)?;
        let (waiting, held) = waiting_and_held(row.get(0)?, row.get(1)?, row.get(2)?);
        consumers.push(ConsumerStatus {
            name: consumer.get(1)?,
            waiting,
            held,
            oldest_waiting_age_seconds: seconds(row.get_opt(5)?.unwrap_or(0)),
            dead: row.get(3)?,
            inbox_rows: row.get(4)?,
            seen_seconds_ago: seconds(consumer.get(2)?),
        });
    }
    let beyond = |consumer: &ConsumerStatus| consumer.inbox_rows > COUNTED_MAX.unsigned_abs();
    let large = consumers.iter().filter(|consumer| beyond(consumer)).count();
    if large > 0 {
        // The server estimates all rows together, not those of each consumer. What remains after
        // the exactly counted consumers is divided evenly among the large ones.
        let all: u64 = session.one(sql(INBOX_ESTIMATE)).await?;
        let small: u64 =
            consumers.iter().filter(|consumer| !beyond(consumer)).map(|consumer| consumer.inbox_rows).sum();
        let share = all.saturating_sub(small) / large as u64;
        for consumer in consumers.iter_mut().filter(|consumer| beyond(consumer)) {
            consumer.inbox_rows = consumer.inbox_rows.max(share);
        }
    }
    Ok(consumers)
}

/// Microseconds as seconds; a negative age, after a clock went back, is 0.
pub(super) fn seconds(micros: i64) -> f64 {
    Duration::from_micros(u64::try_from(micros).unwrap_or(0)).as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_went_back_is_no_negative_age() {
        assert_eq!(seconds(-5), 0.0);
        assert_eq!(seconds(1_500_000), 1.5);
    }
}
