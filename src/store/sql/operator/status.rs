//! Reads what `status` and `/metrics` show. Counts are exact up to a bound; beyond it they are that
//! bound or an estimate.
//!
//! Promises: what `/metrics` asks, every two seconds at most, costs no more than a fixed amount for
//! each shard and consumer, at any backlog. On PostgreSQL its statements read by an index whatever
//! the statistics say: [`PLANS`] switches the other plans off, and where there is an `order by`,
//! only one index gives its order.

use std::collections::HashMap;
use std::time::Duration;

use crate::error::StoreError;
use crate::operator::{COUNTED_MAX, ConsumerStatus, ShardStatus, Status, waiting_and_held};
use crate::store::sql::{Row, Rows, Session, sql};
use crate::store::statements::Dialect;

/// Settings of the planner for this transaction. Without them PostgreSQL may read a whole table,
/// because it made its plan when the table was small. `jit` is off: PostgreSQL estimates a high
/// cost for the statement of many consumers, and would take half a second to compile it.
pub(super) const PLANS: &str = "{pg: select set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true), \
    set_config('enable_sort', 'off', true), set_config('jit', 'off', true), set_config('plan_cache_mode', 'force_generic_plan', true)}";

/// The shards. Only PostgreSQL has gaps.
const SHARDS: &str = "\
select shard_id, {pg: bucket_from::integer, bucket_to::integer}{my lite: bucket_from, bucket_to}, scanned_to, \
       {pg: (select count(*) from unnest(gaps))}{my lite: 0}, epoch, owner, {age lease_until}, \
       {pg: (lease_seconds * 1000000)::bigint}{my: cast(lease_seconds * 1000000 as signed)}{lite: lease_length * 1000}, \
       {age updated_at} \
  from oncebox.shard order by shard_id";

/// The outbox rows at gaps, or above the cursor. The columns: how many were committed at positions
/// that the cursor keeps as gaps; how many stand above the cursor, both up to a bound; an estimate
/// of the second beyond the bound; the age of the oldest.
///
/// PostgreSQL answers with one line for each shard. It reads rows of all shards up to the bound and
/// counts those of this shard; the estimate applies their share to all positions above the cursor.
/// If none of them is of this shard, the next 100,000 rows are searched for one; it counts as one.
/// The other databases answer with one line for the whole outbox.
const PENDING: &str = "\
{pg: select g.own, t.own, \
       case when t.looked < :beyond then t.own \
            else greatest((t.own * (greatest(q.last_value, t.last) - s.scanned_to)::float8 / (t.last - s.scanned_to))::bigint, \
                          (n.created_at is not null)::integer) end, \
       {age least(g.first, t.first, n.created_at)} \
  from oncebox.shard s \
 cross join oncebox.outbox_position_seq q \
 cross join lateral ( \
   select count(*) as own, min(o.created_at) as first \
     from (select o.bucket, o.created_at from unnest(s.gaps) g \
            cross join lateral (select o.bucket, o.created_at from oncebox.outbox o \
                                 where o.position >= lower(g) and o.position < upper(g) order by o.position limit :beyond) o \
            limit :beyond) o \
    where o.bucket between s.bucket_from and s.bucket_to) g \
 cross join lateral ( \
   select count(*) as looked, max(o.position) as last, \
          count(*) filter (where o.bucket between s.bucket_from and s.bucket_to) as own, \
          min(o.created_at) filter (where o.bucket between s.bucket_from and s.bucket_to) as first \
     from (select o.position, o.bucket, o.created_at from oncebox.outbox o \
            where o.position > s.scanned_to order by o.position limit :beyond) o) t \
  left join lateral ( \
   select o.created_at \
     from (select o.position, o.bucket, o.created_at from oncebox.outbox o \
            where t.looked = :beyond and t.own = 0 and o.position > t.last order by o.position limit 100000) o \
    where o.bucket between s.bucket_from and s.bucket_to order by o.position limit 1) n on true}\
{my lite: select 0, (select count(*) from (select 1 from oncebox.outbox limit :beyond) c), null, \
       {age (select created_at from oncebox.outbox order by position limit 1)}}";

/// An estimate of all rows of the outbox, for MySQL and SQLite, of which [`PENDING`] has none.
/// SQLite has a subquery for `max` and one for `min`: with both in one it reads all rows.
const PENDING_ESTIMATE: &str = "\
{my: select coalesce((select cast(table_rows as signed) from information_schema.tables \
                       where table_schema = database() and table_name = 'oncebox_outbox'), 0)}\
{lite: select coalesce((select max(position) from oncebox.outbox) - (select min(position) from oncebox.outbox) + 1, 0)}";

/// How many rows are held and dead, and the age of the first held one. PostgreSQL and SQLite look
/// for it once for each cause, because in their index the cause stands before the position.
const DIVERTED: &str = "\
select (select count(*) from (select 1 from oncebox.outbox_dead \
          where {pg: state between 'held' and 'held' order by state, cause, position}{my: state = 'held'}{lite: state > 'dead'} \
          limit :max) h), \
       (select count(*) from (select 1 from oncebox.outbox_dead \
          where {pg: state between 'dead' and 'dead' order by state, cause, position}{my lite: state = 'dead'} limit :max) d), \
       {age ({pg: select min(first.created_at) from (values ('behind'), ('destination')) why (cause) \
                  cross join lateral (select d.state, d.cause, d.created_at from oncebox.outbox_dead d \
                                       where (d.state, d.cause) >= ('held', why.cause) \
                                       order by d.state, d.cause, d.position limit 1) first \
                  where first.state = 'held' and first.cause = why.cause}\
             {my: select created_at from oncebox.outbox_dead where state = 'held' order by position limit 1}\
             {lite: select min(created_at) from ( \
               select * from (select created_at from oncebox.outbox_dead where state = 'held-behind' order by position limit 1) \
               union all \
               select * from (select created_at from oncebox.outbox_dead where state = 'held-destination' order by position limit 1))})}";

const CONSUMERS: &str = "select consumer_id, name, {age seen_at} from oncebox.consumer order by name";

/// The consumers that have rows in `waiting`: as many steps as there are such consumers, however
/// many rows or other consumers there are.
const ACTIVE: &str = "\
{pg: with recursive active (id) as ( \
   select least((select w.consumer_id from oncebox.waiting w where w.state = 'waiting' or w.holds \
                  order by w.consumer_id, w.lane_id, w.sequence limit 1), \
                (select w.consumer_id from oncebox.waiting w where w.state = 'dead' \
                  order by w.consumer_id, w.message_id, w.content_hash limit 1)) \
   union all \
   select least((select w.consumer_id from oncebox.waiting w where (w.state = 'waiting' or w.holds) and w.consumer_id > a.id \
                  order by w.consumer_id, w.lane_id, w.sequence limit 1), \
                (select w.consumer_id from oncebox.waiting w where w.state = 'dead' and w.consumer_id > a.id \
                  order by w.consumer_id, w.message_id, w.content_hash limit 1)) \
     from active a where a.id is not null) \
 select id from active where id is not null}\
{my: select distinct consumer_id from oncebox.waiting force index (waiting_lane)}\
{lite: with recursive active (id) as ( \
   select min(consumer_id) from ( \
     select * from (select consumer_id from oncebox.waiting where state = 'waiting' order by consumer_id limit 1) union all \
     select * from (select consumer_id from oncebox.waiting where state = 'dead' order by consumer_id limit 1)) \
   union all \
   select (select min(consumer_id) from ( \
     select * from (select consumer_id from oncebox.waiting where state = 'waiting' and consumer_id > a.id order by consumer_id limit 1) union all \
     select * from (select consumer_id from oncebox.waiting where state = 'dead' and consumer_id > a.id order by consumer_id limit 1))) \
     from active a where a.id is not null) \
 select id from active where id is not null}";

/// The counts of consumers: on PostgreSQL of many, elsewhere of one. Held rows are counted from the
/// dead rows that hold, which are few: those behind the first dead one of their lane. PostgreSQL
/// counts the index entries from there on and subtracts those of the dead rows, so it reads no row
/// of the table. `between` and `<=` instead of `=` make it use the right index also where few rows
/// are there, and so does `cross join` on SQLite. MySQL cannot begin at a row in a join: it reads
/// waiting rows of these lanes up to the bound. Where more than that wait before the dead ones, it
/// counts fewer than are held.
const OF_CONSUMERS: &str = "\
select {pg: a.id}{my lite: :of}, \
       (select count(*) from (select 1 from oncebox.waiting where state = 'waiting' and \
          {pg: consumer_id between a.id and a.id order by consumer_id, sequence}{my lite: consumer_id = :of} limit :max) a), \
       (select count(*) from ( \
          {pg: select 1 from (select d.lane_id, min(d.sequence) as first_dead, count(*) as dead from ( \
                   select d.lane_id, d.sequence from oncebox.waiting d \
                    where d.state = 'dead' and d.consumer_id between a.id and a.id and d.holds \
                    order by d.consumer_id, d.message_id, d.content_hash limit :max) d group by d.lane_id) d \
           cross join lateral (select 1 from oncebox.waiting w where w.consumer_id = a.id \
                                  and (w.lane_id, w.sequence) >= (d.lane_id, d.first_dead) and w.lane_id <= d.lane_id \
                                  and (w.state = 'waiting' or w.holds) \
                                order by w.lane_id, w.sequence offset d.dead limit :max) w}\
          {my: select 1 from (select w.sequence > d.first_dead as is_held from ( \
                 select lane_id, min(sequence) as first_dead from (select lane_id, sequence from oncebox.waiting \
                   where state = 'dead' and consumer_id = :of and lane_id is not null limit :max) l group by lane_id) d \
               straight_join oncebox.waiting w force index (waiting_lane) on w.consumer_id = :of and w.lane_id = d.lane_id \
               where w.state = 'waiting' limit :max) w where w.is_held}\
          {lite: select 1 from (select lane_id, min(sequence) as first_dead from (select lane_id, sequence from oncebox.waiting as d \
                   where d.consumer_id = :of and d.state = 'dead' and d.blocks = 1 limit :max) group by lane_id) as walls \
                 cross join oncebox.waiting as w on w.consumer_id = :of and w.lane_id = walls.lane_id and w.sequence > walls.first_dead \
                  and w.blocks = 1 and w.state = 'waiting'} limit :max) b), \
       (select count(*) from (select 1 from oncebox.waiting where due_at is not null and \
          {pg: consumer_id between a.id and a.id order by consumer_id, due_at}{my lite: consumer_id = :of} limit :max) c), \
       (select count(*) from (select 1 from oncebox.waiting where state = 'dead' and \
          {pg: consumer_id between a.id and a.id order by consumer_id, message_id, content_hash}{my lite: consumer_id = :of} limit :max) d), \
       {age (select stored_at from oncebox.waiting where state = 'waiting' and \
          {pg: consumer_id between a.id and a.id order by consumer_id, sequence}{my lite: consumer_id = :of order by sequence} limit 1)} \
  {pg: from unnest(:all) a (id)}";

/// The inbox rows of consumers. SQLite counts no further than the bound, because it has no
/// estimate.
const INBOX_ROWS: &str = "\
select {pg: a.id}{my lite: :of}, (select count(*) from ( \
   select 1 from oncebox.inbox i where i.consumer_id = {pg: a.id limit :beyond}{my: :of limit :beyond}{lite: :of limit :max}) e) \
  {pg: from unnest(:all) a (id)}";

/// An estimate of the inbox rows of all consumers together. SQLite has none, and never asks: it
/// counts no further than the bound ([`INBOX_ROWS`]).
const INBOX_ESTIMATE: &str = "\
{pg: select greatest(sum(greatest(c.reltuples, 0)), 0)::bigint from pg_class c \
 where c.oid = 'oncebox.inbox_untimed'::regclass \
    or c.oid in (select relid from pg_partition_tree('oncebox.inbox_timed') where isleaf)}\
{my: select coalesce((select cast(table_rows as signed) from information_schema.tables \
                       where table_schema = database() and table_name = 'oncebox_inbox'), 0)}";

/// Reads everything of the status except the e-mails and what is unattended. With an `earlier`
/// status the counts of inbox rows are copied from it, because counting them takes long.
pub(in crate::store) async fn read(
    session: &mut dyn Session,
    dialect: Dialect,
    earlier: Option<&Status>,
) -> Result<Status, StoreError> {
    let shards = session.rows(sql(SHARDS)).await?;
    let shards = shards.iter().map(|row| shard(&**row)).collect::<Result<Vec<_>, _>>()?;
    let mut status = Status { shards, ..Status::default() };
    let most = COUNTED_MAX / i64::try_from(status.shards.len().max(1)).unwrap_or(COUNTED_MAX);
    for row in session.rows(sql(PENDING).bind("beyond", most + 1)).await? {
        let (in_gaps, mut rows): (i64, i64) = (row.get(0)?, row.get(1)?);
        rows = match row.get_opt(2)? {
            Some(estimate) => estimate,
            None if rows > most => rows.max(session.one(sql(PENDING_ESTIMATE)).await?),
            None => rows,
        };
        status.pending += in_gaps.saturating_add(rows).unsigned_abs();
        let age = seconds(row.get_opt(3)?.unwrap_or(0));
        status.oldest_pending_age_seconds = status.oldest_pending_age_seconds.max(age);
    }
    let row = session.only(sql(DIVERTED).bind("max", COUNTED_MAX)).await?;
    (status.held, status.dead) = (row.get(0)?, row.get(1)?);
    status.oldest_held_age_seconds = seconds(row.get_opt(2)?.unwrap_or(0));
    status.consumers = consumers(session, dialect, earlier).await?;
    Ok(status)
}

fn shard(row: &dyn Row) -> Result<ShardStatus, StoreError> {
    // A lease has more time left than its length only if the clock of the database went back. It is
    // shown as ended then, as whoever takes the shard treats it (R22).
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

async fn consumers(
    session: &mut dyn Session,
    dialect: Dialect,
    earlier: Option<&Status>,
) -> Result<Vec<ConsumerStatus>, StoreError> {
    let (mut ids, mut consumers) = (Vec::new(), Vec::new());
    for row in session.rows(sql(CONSUMERS)).await? {
        ids.push(row.get::<i64>(0)?);
        let seen_seconds_ago = seconds(row.get(2)?);
        consumers.push(ConsumerStatus { name: row.get(1)?, seen_seconds_ago, ..ConsumerStatus::default() });
    }
    let places: HashMap<i64, usize> = ids.iter().copied().zip(0..).collect();
    let active: Vec<i64> = session.column(sql(ACTIVE)).await?;
    for row in counted(session, dialect, OF_CONSUMERS, &active).await? {
        let Some(place) = places.get(&row.get(0)?) else { continue };
        let consumer = &mut consumers[*place];
        (consumer.waiting, consumer.held) = waiting_and_held(row.get(1)?, row.get(2)?, row.get(3)?);
        consumer.dead = row.get(4)?;
        consumer.oldest_waiting_age_seconds = seconds(row.get_opt(5)?.unwrap_or(0));
    }
    if let Some(earlier) = earlier {
        let rows: HashMap<&str, u64> =
            earlier.consumers.iter().map(|one| (one.name.as_str(), one.inbox_rows)).collect();
        for consumer in &mut consumers {
            consumer.inbox_rows = rows.get(consumer.name.as_str()).copied().unwrap_or(0);
        }
        return Ok(consumers);
    }
    for row in counted(session, dialect, INBOX_ROWS, &ids).await? {
        if let Some(place) = places.get(&row.get(0)?) {
            consumers[*place].inbox_rows = row.get(1)?;
        }
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

/// The rows of a text that counts for consumers: by one statement on PostgreSQL, elsewhere by one
/// for each, because a subquery with a limit cannot name a column of the outer one there.
async fn counted(
    session: &mut dyn Session,
    dialect: Dialect,
    text: &'static str,
    consumers: &[i64],
) -> Result<Rows, StoreError> {
    let at_once = if dialect == Dialect::Postgres { consumers.len().max(1) } else { 1 };
    let mut rows = Rows::new();
    for some in consumers.chunks(at_once) {
        let counts = sql(text).bind("all", some.to_vec()).bind("of", some[0]);
        rows.extend(session.rows(counts.bind("max", COUNTED_MAX).bind("beyond", COUNTED_MAX + 1)).await?);
    }
    Ok(rows)
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
