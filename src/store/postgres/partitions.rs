//! Partitions that never stop the application (R8).
//!
//! Guarantees: new ranges begin at least one whole range above the last position drawn (inbox:
//! above database time plus `id_skew`), so no statement that began before the ATTACH can meet them;
//! every wait for a lock that blocks writers or readers is at most [`LOCK_WAIT`], and the step is
//! tried again later; space is freed by TRUNCATE of partitions that are wholly proven, without
//! gaps, and older than the retention. Where a partition fills slowly, or is the DEFAULT partition
//! and never empty, its old rows are deleted page by page. Ranges are made beside a DEFAULT
//! partition of any size.
//!
//! Not here: where rows go while a range is missing (to the DEFAULT partitions), and the purge of
//! inbox rows.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use sqlx::{AssertSqlSafe, Postgres, Row, raw_sql};

use super::connect::BEGIN;
use super::{PostgresStore, code};
use crate::error::StoreError;
use crate::store::bounded::{Ask, Bounded};
use crate::task;

/// The longest wait for a lock that blocks others, and so their longest wait behind it.
const LOCK_WAIT: &str = "set local lock_timeout = '150ms'; set local statement_timeout = '5s'";
/// Taken by every process that makes or frees partitions of this database. Without it, two that
/// make the same partition at once would get unclear catalogue errors (23505 and 42710 were seen);
/// the second of two in a row gets 42P07.
const ONE_AT_A_TIME: &str = "select pg_advisory_xact_lock(x'6f6e636570617274'::bit(64)::bigint)";
/// The pause between two looks at the partitions while none is missing.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// The pause after a lock was not obtained.
const AGAIN_AFTER: Duration = Duration::from_secs(1);
/// At most so many ranges are made or freed in one look.
const AT_A_TIME: usize = 8;
/// Emptied partitions beyond this number are dropped: each costs every read a little.
const EMPTIED_MAX: usize = 32;
/// The DEFAULT partition is scanned at an ATTACH. One larger than this is scanned in the background
/// before, because the scan under the lock would be felt.
const DEFAULT_BYTES_MAX: i64 = 64 << 20;
/// The longest background scan. Its ranges lie so far ahead that no position of them is drawn
/// meanwhile.
const SCAN_MAX: Duration = Duration::from_secs(300);
/// Most rows that are deleted at a time.
const PAGE: i64 = 10_000;
/// The longest deletion of a page, because the relay sends nothing meanwhile. Of large payloads a
/// full page takes longer: then the next page is smaller.
const PAGE_MAX: Duration = Duration::from_secs(1);
/// An advisory lock of the process that makes ranges beside a large DEFAULT partition.
const BESIDE: &str = "x'6f6e636562657369'::bit(64)::bigint";

/// The time of the next look at the outbox partitions, and how fast positions are drawn.
#[derive(Debug, Default)]
pub(super) struct Tidied {
    not_before: Option<Instant>,
    /// Once this position is drawn, the next look does not wait for `not_before`.
    make_from: i64,
    drop_not_before: Option<Instant>,
    /// The last position drawn at an earlier time, and that time.
    drawn: Option<(Instant, i64)>,
    /// The rows of the next page, where a full page took too long.
    page: Option<i64>,
}

impl Tidied {
    /// Notes the last position drawn, where none is noted yet.
    pub(super) fn saw(&mut self, last_value: i64) {
        self.drawn.get_or_insert((Instant::now(), last_value));
    }

    /// Positions drawn per second since the last look; none where too little time has passed.
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
       (select last_value from oncebox.outbox_position_seq),
       exists (select 1 from pg_constraint where conname = 'outbox_default_ahead')";

/// Makes ranges ahead and frees proven ones. A lock that is not obtained is no error.
pub(super) async fn tidy_outbox(
    store: &PostgresStore,
    connection: &mut Bounded<Postgres>,
    tidied: &mut Tidied,
    last_value: i64,
) -> Result<(), StoreError> {
    let waits = tidied.not_before.is_some_and(|until| Instant::now() < until);
    if waits && last_value < tidied.make_from {
        return Ok(());
    }
    // If something below fails, the next call must try it again: a call that does nothing would
    // count as a success.
    tidied.not_before = None;
    let mut again = LOOK_EVERY;
    let state = raw_sql(OUTBOX_STATE).one(&mut *connection).await?;
    let (scanned_to, rows, ahead) = (state.try_get(0)?, state.try_get::<i64, _>(1)?, state.try_get::<i64, _>(2)?);
    let (retention, default_bytes): (i64, i64) = (state.try_get(3)?, state.try_get(4)?);
    let last_value: i64 = state.try_get(5)?;
    let Some(rate) = tidied.rate(last_value) else { return Ok(()) };
    let ranges = outbox_ranges(connection).await?;
    let top = ranges.last().map_or(1, |range| range.to);
    let plan = Plan::new(top, last_value, rows, ahead, rate);
    tidied.make_from = plan.enough - plan.rows;
    if state.try_get(6)? {
        attempt(connection, &let_in("outbox_default")).await?;
    }
    let attach =
        |from: i64, to: i64| format!("select oncebox.attach_outbox_range({from}, {to}, {})", plan.distance / 2);
    if !plan.missing.is_empty() && default_bytes > DEFAULT_BYTES_MAX {
        let far = plan.far(top, last_value, rate);
        let (from, to) = (far[0].0, far[far.len() - 1].1);
        let attach = far.iter().map(|(from, to)| attach(*from, *to)).collect::<Vec<_>>().join("; ");
        store.attach_beside("outbox_default", format!("position < {from} or position >= {to}"), attach);
    } else {
        for (from, to) in &plan.missing {
            if !attempt(connection, &attach(*from, *to)).await? {
                again = AGAIN_AFTER;
                tidied.make_from = i64::MAX;
                break;
            }
            tracing::debug!(from, to, "made an outbox partition");
        }
    }
    if free_proven(connection, tidied, &ranges, scanned_to, retention).await? {
        again = AGAIN_AFTER;
    }
    drop_emptied(connection, tidied, &ranges, scanned_to).await?;
    tidied.not_before = Some(Instant::now() + again);
    Ok(())
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

/// The ranges to make next, and the figures behind them.
#[derive(Debug)]
struct Plan {
    /// Positions of a range: as configured, or as many as are drawn in ten seconds.
    rows: i64,
    /// A new range begins at least so far above the last position drawn. A statement that began
    /// before the ATTACH sends its rows to DEFAULT until it ends, and must not reach the range.
    distance: i64,
    /// No ranges are needed above this position.
    enough: i64,
    /// The ranges to make: the first position of each, and the first one after it.
    missing: Vec<(i64, i64)>,
}

impl Plan {
    fn new(top: i64, last_value: i64, rows: i64, ahead: i64, rate: i64) -> Self {
        // Ranges are multiples of the configured size, and begin at such multiples.
        let rows = rows.saturating_mul((rate.saturating_mul(10) / rows).max(1));
        let distance = rows.max(rate.saturating_mul(5));
        let safe = (last_value.saturating_add(distance) / rows + 1).saturating_mul(rows) + 1;
        let mut from = top.max(safe);
        let enough = last_value.saturating_add(distance).saturating_add(rows.saturating_mul(ahead.max(2)));
        let mut missing = Vec::new();
        while from <= enough && missing.len() < AT_A_TIME {
            // The range before may have another size: this one ends at a multiple again.
            let to = ((from - 1) / rows + 1).saturating_mul(rows) + 1;
            missing.push((from, to));
            from = to;
        }
        Self { rows, distance, enough, missing }
    }

    /// Ranges so far above that no position of them is drawn while a large DEFAULT partition is
    /// scanned.
    fn far(&self, top: i64, last_value: i64, rate: i64) -> Vec<(i64, i64)> {
        let scan = i64::try_from(2 * SCAN_MAX.as_secs()).unwrap_or(i64::MAX);
        let distance = self.rows.saturating_mul(16).max(rate.saturating_mul(scan));
        let from = (last_value.saturating_add(distance) / self.rows + 1).saturating_mul(self.rows) + 1;
        let from = top.max(from);
        (0..4).map(|n| (from + n * self.rows, from + (n + 1) * self.rows)).collect()
    }
}

/// Truncates ranges whose rows are all proven and older than the retention; the trigger checks
/// again that they are proven (R7). The range that is being filled and the DEFAULT partition may
/// never reach that state, so a page of their old rows is deleted instead. Returns true where
/// another page may follow soon.
async fn free_proven(
    connection: &mut Bounded<Postgres>,
    tidied: &mut Tidied,
    ranges: &[OutboxRange],
    scanned_to: i64,
    retention: i64,
) -> Result<bool, StoreError> {
    let full = ranges.iter().filter(|range| range.to <= scanned_to.saturating_add(1) && !range.is_empty);
    let filling = ranges.iter().find(|range| !range.is_empty && range.from <= scanned_to && range.to > scanned_to + 1);
    let mut more = match filling {
        Some(range) => delete_page(connection, tidied, &range.name, scanned_to, retention).await?,
        None => false,
    };
    let full = full.map(|range| (range.name.as_str(), range.from, range.to)).take(AT_A_TIME);
    for (name, from, to) in full.chain([("outbox_default", 0, i64::MAX)]) {
        let may = format!(
            "select (select created_at < clock_timestamp() - {retention} * interval '1 second' and position <= {scanned_to}
                       from oncebox.{name} order by position desc limit 1)
                and not exists (select 1 from oncebox.shard s, unnest(s.gaps) g where lower(g) < {to} and upper(g) > {from})"
        );
        let may: Option<bool> = raw_sql(AssertSqlSafe(may)).one(&mut *connection).await?.try_get(0)?;
        let decided = match name {
            // Decisions about positions outside every range are about rows of this partition.
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
        // Where the transactions of its writers always overlap, DEFAULT is never free for TRUNCATE.
        if may == Some(true) && attempt(connection, &format!("truncate oncebox.{name}{decided}")).await? {
            tracing::debug!(name, "emptied a proven outbox partition");
        } else if name == "outbox_default" {
            more |= delete_page(connection, tidied, name, scanned_to, retention).await?;
        }
    }
    Ok(more)
}

/// Deletes a page of the oldest rows of a partition that are proven and older than the retention,
/// and the decisions about them. Returns true where another may follow: the page was full, or it
/// took too long and a smaller one is to be tried.
async fn delete_page(
    connection: &mut Bounded<Postgres>,
    tidied: &mut Tidied,
    name: &str,
    scanned_to: i64,
    retention: i64,
) -> Result<bool, StoreError> {
    let rows = tidied.page.unwrap_or(PAGE);
    let page = format!(
        "select max(position), count(*)
           from (select position, created_at from oncebox.{name}
                  where position <= {scanned_to}
                    and (select created_at < clock_timestamp() - {retention} * interval '1 second'
                           from oncebox.{name} order by position limit 1)
                  order by position limit {rows}) page
          where created_at < clock_timestamp() - {retention} * interval '1 second'"
    );
    let page = raw_sql(AssertSqlSafe(page)).one(&mut *connection).await?;
    let (Some(to), count) = (page.try_get::<Option<i64>, _>(0)?, page.try_get::<i64, _>(1)?) else { return Ok(false) };
    let delete = format!(
        "set local statement_timeout = {};
         with gone as (
           delete from oncebox.{name} o
            where position <= {to} and created_at < clock_timestamp() - {retention} * interval '1 second'
              and not exists (select 1 from oncebox.shard s where s.gaps @> o.position)
           returning position)
         delete from oncebox.decision d using gone where d.position = gone.position",
        PAGE_MAX.as_millis()
    );
    let began = Instant::now();
    if !attempt(connection, &delete).await? {
        // What failed sooner waited for a lock: a smaller page would not help.
        let is_slow = began.elapsed() >= PAGE_MAX;
        if is_slow {
            tidied.page = Some((count / 2).max(1));
        }
        return Ok(is_slow && count > 1);
    }
    if began.elapsed() < PAGE_MAX / 4 {
        tidied.page = Some(rows.saturating_mul(2)).filter(|more| *more < PAGE);
    }
    Ok(count == rows)
}

/// Drops the oldest emptied partition where there are more than [`EMPTIED_MAX`]: one in a look,
/// because it locks the whole table for a moment.
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
    if attempt(connection, &dropping("outbox", name)).await? {
        tracing::debug!(name, "dropped an emptied outbox partition");
    } else {
        tidied.drop_not_before = Some(Instant::now() + 60 * AGAIN_AFTER);
    }
    Ok(())
}

/// Drops a partition that was found empty. DETACH locks the whole table, so it waits only briefly.
/// A row may have come since the partition was found empty, so it is looked at again under the
/// lock.
pub(super) fn dropping(table: &str, partition: &str) -> String {
    format!(
        "set local lock_timeout = '50ms'; alter table oncebox.{table} detach partition oncebox.{partition};
         do $$ begin
           if exists (select 1 from oncebox.{partition}) then
             raise exception 'oncebox: {partition} is not empty any more' using errcode = 'object_not_in_prerequisite_state';
           end if;
         end $$;
         drop table oncebox.{partition}"
    )
}

/// Whether it was said that this role has no right to partitions: every look meets that again.
static DENIED: AtomicBool = AtomicBool::new(false);

/// Runs statements in one transaction with short lock waits. Returns false where they could not run
/// now; then nothing was changed.
pub(super) async fn attempt(connection: &mut Bounded<Postgres>, statements: &str) -> Result<bool, StoreError> {
    connection.begin(BEGIN).await?;
    match raw_sql(AssertSqlSafe(format!("{LOCK_WAIT}; {ONE_AT_A_TIME}; {statements}"))).run(&mut *connection).await {
        Ok(_) => {
            connection.commit().await?;
            Ok(true)
        }
        Err(error) => {
            let ended = connection.rollback().await;
            let said = crate::error::words(&error);
            match code(&error).as_deref() {
                // This role may not make tables, or the partition is another role's. Rows go to the
                // DEFAULT partition, and `doctor` reports it.
                Some("42501") if !DENIED.swap(true, Ordering::Relaxed) => tracing::warn!(
                    error = said,
                    "this role may not make or empty partitions; connect as the owner of the schema oncebox. Later ones are \
                     logged at debug"
                ),
                // To be tried later: a lock, a deadlock, a slow scan, unproven rows, a range that
                // another process made, rows in DEFAULT.
                Some("55P03" | "40P01" | "57014" | "55000" | "42P07" | "42P17" | "23514" | "42501") => {
                    tracing::debug!(error = said, "partitions are left as they are for now");
                }
                // Where the connection broke, this error says why, and the ROLLBACK's does not.
                _ => return Err(error.into()),
            }
            ended?;
            Ok(false)
        }
    }
}

/// Drops the CHECK that a process which ended left on a DEFAULT partition: it would refuse rows of
/// its ranges.
fn let_in(default: &str) -> String {
    format!(
        "do $$ begin
           if pg_try_advisory_xact_lock({BESIDE}) then
             alter table oncebox.{default} drop constraint if exists {default}_ahead;
           end if;
         end $$"
    )
}

/// The next inbox ranges, in seconds, and the part of each whose ids stand in the DEFAULT partition
/// already (redriven messages from the future). The ids are looked up in the index, consumer by
/// consumer.
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
   where i.inhparent = 'oncebox.inbox_timed'::regclass and bound is not null),
missing as (
  select range_from, least(range_from + span, (range_from / span + 1) * span) as range_to from s, top,
    generate_series(greatest(coalesce(top, 0), ((now + skew) / span + 2) * span), now + skew + (ahead + 1) * span, span) range_from
   limit 8)
select m.range_from, m.range_to, min(oncebox.uuid_v7_millis(first.message_id)) / 1000,
       max(oncebox.uuid_v7_millis(last.message_id)) / 1000 + 1
  from missing m
  left join oncebox.consumer c on true
  left join lateral (
    select d.message_id from oncebox.inbox_timed_default d
     where d.consumer_id = c.consumer_id and d.message_id >= oncebox.uuid_bound(to_timestamp(m.range_from))
       and d.message_id < oncebox.uuid_bound(to_timestamp(m.range_to))
     order by d.message_id limit 1) first on true
  left join lateral (
    select d.message_id from oncebox.inbox_timed_default d
     where d.consumer_id = c.consumer_id and d.message_id >= oncebox.uuid_bound(to_timestamp(m.range_from))
       and d.message_id < oncebox.uuid_bound(to_timestamp(m.range_to))
     order by d.message_id desc limit 1) last on true
 group by 1, 2 order by 1";

/// Ranges that ended at least two days ago, oldest first. The purge empties them row by row. Once a
/// range is dropped, an id of its time goes to the DEFAULT partition.
const INBOX_PAST: &str = r"
select c.relname::text
  from pg_inherits i
  join pg_class c on c.oid = i.inhrelid
 cross join lateral regexp_match(pg_get_expr(c.relpartbound, c.oid), 'TO \(''([0-9a-f-]+)''\)') bound
 where i.inhparent = 'oncebox.inbox_timed'::regclass and bound is not null
   and bound[1]::uuid <= oncebox.uuid_bound(clock_timestamp() - interval '2 days')
 order by bound[1]::uuid limit 64";

/// Drops the oldest past range that is empty. DETACH locks the whole table for a moment, so only
/// one is dropped at a time, with a short wait.
async fn drop_past(connection: &mut Bounded<Postgres>) -> Result<(), StoreError> {
    for row in raw_sql(INBOX_PAST).all(&mut *connection).await? {
        let name: String = row.try_get(0)?;
        let is_empty = format!("select not exists (select 1 from oncebox.{name})");
        if !raw_sql(AssertSqlSafe(is_empty)).one(&mut *connection).await?.try_get::<bool, _>(0)? {
            continue;
        }
        if attempt(connection, &dropping("inbox_timed", &name)).await? {
            tracing::debug!(name, "dropped an emptied inbox partition");
        }
        break;
    }
    Ok(())
}

const INBOX_STATE: &str = "
select pg_relation_size('oncebox.inbox_timed_default'),
       exists (select 1 from pg_constraint where conname = 'inbox_timed_default_ahead')";

impl PostgresStore {
    /// Makes inbox ranges ahead, at most once a minute; without them ids go to the DEFAULT
    /// partition. Rows that are in DEFAULT stay there, and the ranges are made around them.
    pub(super) async fn make_inbox_ranges(&self) -> Result<(), StoreError> {
        {
            let mut look_at = self.inbox_look_at.lock();
            if look_at.is_some_and(|at| Instant::now() < at) {
                return Ok(());
            }
            *look_at = Some(Instant::now() + 6 * LOOK_EVERY);
        }
        let mut connection = self.pool.dedicated().await?;
        let state = raw_sql(INBOX_STATE).one(&mut connection).await?;
        let (default_bytes, is_closed): (i64, bool) = (state.try_get(0)?, state.try_get(1)?);
        if is_closed {
            attempt(&mut connection, &let_in("inbox_timed_default")).await?;
        }
        let mut pieces = Vec::new();
        for row in raw_sql(INBOX_MISSING).all(&mut connection).await? {
            let (from, to): (i64, i64) = (row.try_get(0)?, row.try_get(1)?);
            let taken = row.try_get::<Option<i64>, _>(2)?.zip(row.try_get::<Option<i64>, _>(3)?);
            let (before, after) = taken.unwrap_or((to, to));
            pieces.extend([(from, before.max(from)), (after.min(to), to)].into_iter().filter(|(from, to)| from < to));
        }
        let attach =
            |from: i64, to: i64| format!("select oncebox.attach_inbox_range(to_timestamp({from}), to_timestamp({to}))");
        for (from, to) in pieces {
            if default_bytes > DEFAULT_BYTES_MAX {
                let bounds = format!(
                    "select oncebox.uuid_bound(to_timestamp({from}))::text, oncebox.uuid_bound(to_timestamp({to}))::text"
                );
                let bounds = raw_sql(AssertSqlSafe(bounds)).one(&mut connection).await?;
                let (low, high): (String, String) = (bounds.try_get(0)?, bounds.try_get(1)?);
                let outside = format!("message_id < '{low}' or message_id >= '{high}'");
                self.attach_beside("inbox_timed_default", outside, attach(from, to));
                break;
            }
            if !attempt(&mut connection, &attach(from, to)).await? {
                break;
            }
        }
        drop_past(&mut connection).await?;
        connection.close().await;
        Ok(())
    }

    /// Attaches ranges in the background where DEFAULT is too large to be scanned under the lock of
    /// an ATTACH. First a CHECK that DEFAULT holds only what is `outside` of them is validated
    /// while writers go on; then the ATTACH needs no scan. One task at a time in a process.
    fn attach_beside(&self, default: &'static str, outside: String, attach: String) {
        if self.attaches.swap(true, Ordering::SeqCst) {
            return;
        }
        let store = self.clone();
        let attaches = Attaches(Arc::clone(&self.attaches));
        task::spawn(async move {
            let _attaches = attaches;
            if let Err(error) = store.beside(default, &outside, &attach).await {
                tracing::warn!(default, %error, "ranges beside a large DEFAULT partition were not made; they are tried again");
            }
        });
    }

    async fn beside(&self, default: &str, outside: &str, attach: &str) -> Result<(), StoreError> {
        let mut connection = self.pool.dedicated().await?;
        let alone = format!("select pg_try_advisory_lock({BESIDE})");
        if !raw_sql(AssertSqlSafe(alone)).one(&mut connection).await?.try_get::<bool, _>(0)? {
            connection.close().await;
            return Ok(());
        }
        let let_in = let_in(default);
        let keep_out = format!(
            "{let_in}; alter table oncebox.{default} add constraint {default}_ahead check ({outside}) not valid"
        );
        if attempt(&mut connection, &keep_out).await? {
            // Writers and readers go on beside this lock, and beside a statement that waits for it.
            let validate = format!(
                "set lock_timeout = '10s'; set statement_timeout = '{}s';
                 alter table oncebox.{default} validate constraint {default}_ahead",
                SCAN_MAX.as_secs()
            );
            let scan = raw_sql(AssertSqlSafe(validate)).execute(connection.plain());
            let scanned = tokio::time::timeout(SCAN_MAX + 2 * LOOK_EVERY, scan).await;
            let attached = match &scanned {
                Ok(Ok(_)) => attempt(&mut connection, &format!("{attach}; {let_in}")).await?,
                Ok(Err(_)) | Err(_) => false,
            };
            tracing::debug!(default, ?scanned, attached, "ranges beside a large DEFAULT partition");
            while !attached && !attempt(&mut connection, &let_in).await? {
                tokio::time::sleep(AGAIN_AFTER).await;
            }
        }
        connection.close().await;
        Ok(())
    }
}

/// Marks that ranges are being attached. Its drop clears the mark, also where the task panics or
/// its runtime ends.
struct Attaches(Arc<AtomicBool>);

impl Drop for Attaches {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
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
