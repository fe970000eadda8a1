//! Partitions that never stop the application (R8).
//!
//! Guarantees: new ranges begin at least one whole range above what was drawn (inbox: above database time plus `id_skew`), so no
//! statement that began before the ATTACH can meet them; every lock is waited for at most [`LOCK_WAIT`] and tried again later;
//! space is given back by TRUNCATE of partitions that are wholly proven, without gaps, and older than the retention.
//!
//! Not here: what runs out of ranges meanwhile (the DEFAULT partitions take it), and the purge of inbox rows.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use sqlx::{AssertSqlSafe, Postgres, Row, raw_sql};

use super::PostgresStore;
use super::connect::BEGIN;
use crate::error::StoreError;
use crate::store::bounded::{Ask, Bounded};

/// No statement here waits longer for a lock; whoever queues behind it waits no longer either.
const LOCK_WAIT: &str = "set local lock_timeout = '150ms'; set local statement_timeout = '5s'";
/// Held by whoever makes or frees partitions of this database: two that make the same one at once would get errors of the
/// catalogue that say little (23505 and 42710 were seen), the second of two in a row gets 42P07.
const ONE_AT_A_TIME: &str = "select pg_advisory_xact_lock(x'6f6e636570617274'::bit(64)::bigint)";
/// How often the partitions are looked at while nothing is missing.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// After a lock was not to be had.
const AGAIN_AFTER: Duration = Duration::from_secs(1);
/// At most so many ranges are made or freed at a time: a look is bounded.
const AT_A_TIME: usize = 8;
/// Emptied partitions beyond this number are dropped: each costs every read a little.
const EMPTIED_MAX: usize = 32;
/// The DEFAULT partition is scanned at an ATTACH; beyond this size that would be felt.
const DEFAULT_BYTES_MAX: i64 = 64 << 20;

/// When the outbox partitions are to be looked at again, and how fast positions are drawn.
#[derive(Debug, Default)]
pub(super) struct Tidied {
    not_before: Option<Instant>,
    /// The position from which on ranges are missing.
    make_from: i64,
    drop_not_before: Option<Instant>,
    /// A position that was the last one drawn, and when.
    drawn: Option<(Instant, i64)>,
}

impl Tidied {
    /// Notes the last position drawn.
    pub(super) fn saw(&mut self, last_value: i64) {
        self.drawn.get_or_insert((Instant::now(), last_value));
    }

    /// Positions drawn a second since the last look; none while too little time has passed to say.
    fn rate(&mut self, last_value: i64) -> Option<i64> {
        let (since, from) = self.drawn?;
        let millis = i64::try_from(since.elapsed().as_millis()).unwrap_or(i64::MAX);
        if millis < 200 {
            return None;
        }
        self.drawn = Some((Instant::now(), last_value));
        Some(last_value.saturating_sub(from).max(0).saturating_mul(1_000) / millis)
    }
}

/// A range partition of the outbox.
#[derive(Debug, Clone, PartialEq, Eq)]
struct OutboxRange {
    name: String,
    from: i64,
    to: i64,
    is_empty: bool,
}

const OUTBOX_RANGES: &str = r"
select c.relname::text, bound[1]::bigint, bound[2]::bigint, pg_relation_size(c.oid) = 0
  from pg_inherits i
  join pg_class c on c.oid = i.inhrelid
 cross join lateral regexp_match(pg_get_expr(c.relpartbound, c.oid), 'FROM \(''?(-?\d+)''?\) TO \(''?(-?\d+)''?\)') bound
 where i.inhparent = 'oncebox.outbox'::regclass and bound is not null
 order by 2";

const OUTBOX_STATE: &str = "
select (select min(scanned_to) from oncebox.shard),
       (select value from oncebox.setting where name = 'outbox_range_rows'),
       (select value from oncebox.setting where name = 'outbox_ranges_ahead'),
       (select value from oncebox.setting where name = 'outbox_retention_seconds'),
       pg_relation_size('oncebox.outbox_default'),
       (select last_value from oncebox.outbox_position_seq)";

/// Makes ranges ahead and frees proven ones; a lock that is not to be had is no error.
pub(super) async fn tidy_outbox(
    connection: &mut Bounded<Postgres>,
    tidied: &mut Tidied,
    last_value: i64,
) -> Result<(), StoreError> {
    let waits = tidied.not_before.is_some_and(|until| Instant::now() < until);
    if waits && last_value < tidied.make_from {
        return Ok(());
    }
    let state = raw_sql(OUTBOX_STATE).one(&mut *connection).await?;
    let (scanned_to, rows, ahead) = (state.try_get(0)?, state.try_get::<i64, _>(1)?, state.try_get::<i64, _>(2)?);
    let (retention, default_bytes): (i64, i64) = (state.try_get(3)?, state.try_get(4)?);
    let last_value: i64 = state.try_get(5)?;
    let Some(rate) = tidied.rate(last_value) else { return Ok(()) };
    tidied.not_before = Some(Instant::now() + LOOK_EVERY);
    let ranges = outbox_ranges(connection).await?;
    let top = ranges.last().map_or(1, |range| range.to);
    let plan = Plan::new(top, last_value, rows, ahead, rate);
    tidied.make_from = plan.enough - plan.rows;
    if !plan.missing.is_empty() && default_bytes > DEFAULT_BYTES_MAX {
        tracing::warn!(
            default_bytes,
            "the DEFAULT partition of the outbox has grown too large to attach ranges beside it; they are made once it is proven and emptied"
        );
    } else {
        for (from, to) in plan.missing {
            let attach = format!("select oncebox.attach_outbox_range({from}, {to}, {})", plan.distance / 2);
            if !attempt(connection, &attach).await? {
                tidied.not_before = Some(Instant::now() + AGAIN_AFTER);
                tidied.make_from = i64::MAX;
                break;
            }
            tracing::debug!(from, to, "made an outbox partition");
        }
    }
    free_proven(connection, &ranges, scanned_to, retention).await?;
    drop_emptied(connection, tidied, &ranges, scanned_to).await
}

async fn outbox_ranges(connection: &mut Bounded<Postgres>) -> Result<Vec<OutboxRange>, StoreError> {
    let rows = raw_sql(OUTBOX_RANGES).all(connection).await?;
    rows.iter()
        .map(|row| {
            Ok(OutboxRange {
                name: row.try_get(0)?,
                from: row.try_get(1)?,
                to: row.try_get(2)?,
                is_empty: row.try_get(3)?,
            })
        })
        .collect()
}

/// Which ranges to make.
#[derive(Debug)]
struct Plan {
    /// Positions of a range: what is set, or what is drawn in ten seconds.
    rows: i64,
    /// A new range begins at least so far above what was drawn: a statement that began before the ATTACH has its rows routed
    /// to DEFAULT until it ends, and must not reach the range.
    distance: i64,
    /// Ranges up to here are enough.
    enough: i64,
    /// Their bounds.
    missing: Vec<(i64, i64)>,
}

impl Plan {
    fn new(top: i64, last_value: i64, rows: i64, ahead: i64, rate: i64) -> Self {
        // Ranges stay on the grid of what is set.
        let rows = rows.saturating_mul((rate.saturating_mul(10) / rows).max(1));
        let distance = rows.max(rate.saturating_mul(5));
        let safe = (last_value.saturating_add(distance) / rows + 1).saturating_mul(rows) + 1;
        let mut from = top.max(safe);
        let enough = last_value.saturating_add(distance).saturating_add(rows.saturating_mul(ahead.max(2)));
        let mut missing = Vec::new();
        while from <= enough && missing.len() < AT_A_TIME {
            // A range of another size stood before: come back to the grid.
            let to = ((from - 1) / rows + 1).saturating_mul(rows) + 1;
            missing.push((from, to));
            from = to;
        }
        Self { rows, distance, enough, missing }
    }
}

/// TRUNCATE of ranges whose rows are all proven and older than the retention. The trigger asks again (R7).
async fn free_proven(
    connection: &mut Bounded<Postgres>,
    ranges: &[OutboxRange],
    scanned_to: i64,
    retention: i64,
) -> Result<(), StoreError> {
    let full = ranges.iter().filter(|range| range.to <= scanned_to.saturating_add(1) && !range.is_empty);
    let full = full.map(|range| (range.name.as_str(), range.from, range.to)).take(AT_A_TIME);
    for (name, from, to) in full.chain([("outbox_default", 0, i64::MAX)]) {
        let may = format!(
            "select (select created_at < clock_timestamp() - {retention} * interval '1 second' and position <= {scanned_to}
                       from oncebox.{name} order by position desc limit 1)
                and not exists (select 1 from oncebox.shard s, unnest(s.gaps) g where lower(g) < {to} and upper(g) > {from})"
        );
        let may: Option<bool> = raw_sql(AssertSqlSafe(may)).one(&mut *connection).await?.try_get(0)?;
        if may != Some(true) {
            continue;
        }
        let decided = match name {
            // Decisions about positions that no range covers were about rows of this partition.
            "outbox_default" => {
                let covered: Vec<String> =
                    ranges.iter().map(|range| format!("[{},{})", range.from, range.to)).collect();
                let covered = covered.join(",");
                format!(
                    "; delete from oncebox.decision where position <= {scanned_to} and not position <@ '{{{covered}}}'::int8multirange"
                )
            }
            _ => format!("; delete from oncebox.decision where position >= {from} and position < {to}"),
        };
        if attempt(connection, &format!("truncate oncebox.{name}{decided}")).await? {
            tracing::debug!(name, "emptied a proven outbox partition");
        }
    }
    Ok(())
}

/// Drops the oldest emptied partition when there are many. DETACH needs a moment of the whole table, so it is rare and patient.
async fn drop_emptied(
    connection: &mut Bounded<Postgres>,
    tidied: &mut Tidied,
    ranges: &[OutboxRange],
    scanned_to: i64,
) -> Result<(), StoreError> {
    let emptied: Vec<_> = ranges.iter().filter(|range| range.is_empty && range.to <= scanned_to).collect();
    if emptied.len() <= EMPTIED_MAX || tidied.drop_not_before.is_some_and(|until| Instant::now() < until) {
        return Ok(());
    }
    let name = &emptied[0].name;
    let detach = format!(
        "set local lock_timeout = '50ms'; alter table oncebox.outbox detach partition oncebox.{name}; drop table oncebox.{name}"
    );
    if attempt(connection, &detach).await? {
        tracing::debug!(name, "dropped an emptied outbox partition");
    } else {
        tidied.drop_not_before = Some(Instant::now() + 60 * AGAIN_AFTER);
    }
    Ok(())
}

/// Runs statements in one transaction with short waits; false where something stood in the way, and nothing was changed.
pub(super) async fn attempt(connection: &mut Bounded<Postgres>, statements: &str) -> Result<bool, StoreError> {
    connection.begin(BEGIN).await?;
    match raw_sql(AssertSqlSafe(format!("{LOCK_WAIT}; {ONE_AT_A_TIME}; {statements}"))).run(&mut *connection).await {
        Ok(_) => {
            connection.commit().await?;
            Ok(true)
        }
        Err(error) => {
            connection.rollback().await?;
            let code = match &error {
                sqlx::Error::Database(database) => database.code().map(|code| code.into_owned()),
                _ => None,
            };
            match code.as_deref() {
                // Not now: a lock, a deadlock, a slow scan, unproven rows, a range that somebody else made, rows in DEFAULT.
                Some("55P03" | "40P01" | "57014" | "55000" | "42P07" | "42P17" | "23514") => {
                    tracing::debug!(%error, "partitions are left as they are for now");
                    Ok(false)
                }
                // A role that may not make tables: rows go to the DEFAULT partition, and `doctor` says so.
                Some("42501") => {
                    tracing::warn!(%error, "this role may not make partitions; run the publisher as the owner of the schema");
                    Ok(false)
                }
                _ => Err(error.into()),
            }
        }
    }
}

const INBOX_MISSING: &str = r"
with s as (
  select (select value from oncebox.setting where name = 'inbox_range_seconds') as span,
         (select value from oncebox.setting where name = 'inbox_ranges_ahead') as ahead,
         (select value from oncebox.limits where name = 'id_skew_seconds') as skew,
         extract(epoch from clock_timestamp())::bigint as now),
top as (
  select max(oncebox.uuid_v7_millis(bound[1]::uuid)) / 1000 as top
    from pg_inherits i
    join pg_class c on c.oid = i.inhrelid
   cross join lateral regexp_match(pg_get_expr(c.relpartbound, c.oid), 'TO \(''([0-9a-f-]+)''\)') bound
   where i.inhparent = 'oncebox.inbox_timed'::regclass and bound is not null)
select range_from, least(range_from + span, (range_from / span + 1) * span) from s, top,
  generate_series(greatest(coalesce(top, 0), ((now + skew) / span + 2) * span), now + skew + (ahead + 1) * span, span) range_from
 limit 8";

impl PostgresStore {
    /// Makes inbox ranges ahead, at most once a minute; without them ids go to the DEFAULT partition.
    pub(super) async fn make_inbox_ranges(&self) -> Result<(), StoreError> {
        {
            let mut look_at = self.inbox_look_at.lock().unwrap_or_else(PoisonError::into_inner);
            if look_at.is_some_and(|at| Instant::now() < at) {
                return Ok(());
            }
            *look_at = Some(Instant::now() + 6 * LOOK_EVERY);
        }
        let mut connection = self.dedicated().await?;
        let missing = raw_sql(INBOX_MISSING).all(&mut connection).await?;
        for row in missing {
            let (from, to): (i64, i64) = (row.try_get(0)?, row.try_get(1)?);
            let attach = format!("select oncebox.attach_inbox_range(to_timestamp({from}), to_timestamp({to}))");
            if !attempt(&mut connection, &attach).await? {
                break;
            }
        }
        connection.close().await;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r8_a_new_range_starts_at_least_one_whole_range_above_what_was_drawn() {
        for (rows, rate) in [(10, 0), (10, 700), (1_000, 0), (1_000, 99), (1_000, 50_000)] {
            for last_value in [1, 9, 10, 11, 5_000, 5_001] {
                for top in [1, 5_001, last_value + 3 * rows] {
                    let plan = Plan::new(top, last_value, rows, 4, rate);
                    assert!(plan.distance >= rows && plan.distance >= 5 * rate);
                    for (from, to) in &plan.missing {
                        assert!(*from > last_value + plan.distance, "{from} is too near to {last_value}");
                        assert!(*from >= top && from < to && to - from <= plan.rows);
                    }
                    assert!(plan.missing.windows(2).all(|pair| pair[0].1 == pair[1].0));
                    let covered = plan.missing.last().map_or(top, |range| range.1);
                    assert!(covered > plan.enough, "{covered} is not enough above {last_value}");
                }
            }
        }
    }
}
