//! The outbox for its relay: a table that holds only unproven rows (R10).
//!
//! Guarantees:
//!
//! * A read takes the first rows in position order, without a lower bound. A row with a low
//!   position that commits late is recognised as new, because it is not in flight. Only the memory
//!   of the session knows which rows are in flight.
//! * A mark deletes exactly the positions that were read (R11). Most of them follow each other
//!   without a hole: such a run is deleted as a range, which holds no row that was not read. The
//!   range ends before the last row of the run, so the server locks only rows that we read. These
//!   last rows, and the rows of short runs, are looked up one by one, by a join from their list: a
//!   range or an IN list over them would wait for every open writer.
//! * Every write first updates the row of the shard, and ends where epoch and revision are not
//!   ours.
//! * Where the counter was set back, a new row at or below the position of an older dead or held
//!   row is refused when it is read, because the relay identifies and orders rows by position.
//! * A read stops with the row that reaches the limit of bytes, also where rows suddenly become
//!   larger (G11).
//!
//! Not here: gaps and fences, which this cursor does not need.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{ControlFlow, RangeInclusive};
use std::time::Duration;

use async_trait::async_trait;
use sqlx::mysql::{MySqlArguments, MySqlRow};
use sqlx::query::Query;
use sqlx::{Either, MySql, Row};

use super::{MySqlStore, START, is_duplicate, number_list, set_back, text};
use crate::error::StoreError;
use crate::message::{OutgoingMessage, TraceContext};
use crate::operator::kept_error;
use crate::outbox::port::{
    Diversion, DivertedRow, LeaseAnswer, LeaseRequest, Mark, OperatorRequest, Outbox, OutboxRow, ReadBatch,
    RelaySession, first_within,
};
use crate::store::bounded::{AnyQuery, Ask, Bounded, BoundedPool};
use crate::store::headers::parse_headers;
use crate::store::sql::Session;
use crate::store::sql::outbox::{self, SentNotDiscarded};
use crate::text::hex::hex;
use crate::time::db_time::micros_of;
use crate::time::lease::Fence;

/// Most positions in one statement: their list is shorter than 16 KiB while they have at most 11
/// digits. With TLS a longer one goes out in two pieces, and the second one waits 40 ms for the
/// first to be acknowledged.
const ROWS_MAX: usize = 1_300;

/// How many ranges of positions a statement can name. There is one text for all numbers of ranges,
/// so that it stays prepared. There are not more, because the server plans each range anew.
const RANGES_MAX: usize = 64;

/// A run of at least so many positions is deleted as a range.
const RUN_MIN: usize = 64;

/// One session: it owns the outbox.
#[derive(Debug)]
pub(super) struct MySqlSession {
    pool: BoundedPool<MySql>,
    /// Epoch and revision as this session wrote them last. Others in the row mean that another
    /// process wrote (R7).
    fence: Fence,
    length: Duration,
    /// The batches of the window that are not marked, each with its positions.
    window: BTreeMap<u64, Vec<i64>>,
    in_flight: BTreeSet<i64>,
    batches: u64,
    read_bytes: usize,
    /// The most rows of a read. Lowered while rows are so large that they reach the limit of bytes.
    rows_max: usize,
}

#[async_trait]
impl Outbox for MySqlStore {
    async fn open(&self, request: &LeaseRequest) -> Result<LeaseAnswer, StoreError> {
        let fence = match outbox::take(self, request).await? {
            Ok((fence, _)) => fence,
            Err(refused) => return Ok(refused),
        };
        Ok(LeaseAnswer::Taken(Box::new(MySqlSession {
            pool: self.pool.clone(),
            fence,
            length: request.length,
            window: BTreeMap::new(),
            in_flight: BTreeSet::new(),
            batches: 0,
            read_bytes: request.read_bytes,
            rows_max: usize::MAX,
        })))
    }

    async fn proven_kept(&self) -> Result<Duration, StoreError> {
        // Proven rows are not kept: the mark deletes them.
        Ok(Duration::ZERO)
    }

    async fn shards(&self) -> Result<Vec<i32>, StoreError> {
        Ok(vec![0])
    }
}

#[async_trait]
impl RelaySession for MySqlSession {
    fn epoch(&self) -> i64 {
        self.fence.epoch
    }

    async fn read(&mut self, rows_max: usize) -> Result<ReadBatch, StoreError> {
        let rows_max = rows_max.min(self.rows_max);
        let in_flight = runs(self.in_flight.iter().copied());
        let (rows, more) = if in_flight.len() < RANGES_MAX {
            self.read_between(&in_flight, rows_max).await?
        } else {
            self.read_listed(rows_max.min(ROWS_MAX)).await?
        };
        if rows.is_empty() {
            let fence = sqlx::query(FENCE).optional(&mut self.pool.acquire().await?).await?;
            self.is_ours(&fence.ok_or_else(|| self.fenced("the row of the shard is gone"))?)?;
        }
        let positions: Vec<i64> = rows.iter().map(|row| row.position).collect();

        self.batches += 1;
        if !positions.is_empty() {
            self.in_flight.extend(&positions);
            self.window.insert(self.batches, positions);
        }
        Ok(ReadBatch { batch: self.batches, rows, more, saw_all: !more, needs_checkpoint: false })
    }

    async fn checkpoint(&mut self, mark: Mark) -> Result<(), StoreError> {
        // The highest of them becomes `scanned_to`, which is only shown here.
        let proven: Vec<i64> = match mark.through {
            Some(through) => self.window.range(..=through).flat_map(|(_, positions)| positions).copied().collect(),
            None => Vec::new(),
        };
        let mut transaction = self.pool.begin(START).await?;
        // The row of the shard first: a fenced session waits for its lock, and then changes
        // nothing.
        let written = sqlx::query(
            "update oncebox_shard set revision = ?, lease_until = utc_timestamp(6) + interval ? microsecond, \
             scanned_to = greatest(scanned_to, ?), updated_at = if(?, utc_timestamp(6), updated_at) \
             where shard_id = 0 and epoch = ? and revision = ?",
        )
        .bind(self.fence.revision + 1)
        .bind(micros_of(self.length))
        .bind(proven.iter().copied().max().unwrap_or(0))
        .bind(mark.through.is_some())
        .bind(self.fence.epoch)
        .bind(self.fence.revision)
        .run(&mut transaction)
        .await?;
        if written.rows_affected() != 1 {
            return Err(self.fenced("another owner wrote"));
        }
        divert(&mut transaction, &mark.diverted).await?;
        change(&mut transaction, &mark.changed).await?;
        let sent = release(&mut transaction, &mark.released).await?;
        delete_diverted(&mut transaction, &mark.discarded).await?;
        delete_proven(&mut transaction, &proven).await?;
        transaction.commit().await?;
        sent.warn();

        self.fence.revision += 1;
        if let Some(through) = mark.through {
            self.window.retain(|batch, _| *batch > through);
            proven.iter().for_each(|position| {
                self.in_flight.remove(position);
            });
        }
        Ok(())
    }

    async fn diverted(&mut self, limit: usize) -> Result<Vec<DivertedRow>, StoreError> {
        outbox::diverted(&mut self.pool.acquire().await?, outbox::ALL_BUCKETS, limit).await
    }

    async fn has_dead(&mut self, rows: usize) -> Result<bool, StoreError> {
        outbox::has_dead(&mut self.pool.acquire().await?, rows).await
    }

    async fn requests(&mut self, after: i64, limit: usize) -> Result<Vec<OperatorRequest>, StoreError> {
        outbox::requests(&mut self.pool.acquire().await?, outbox::ALL_BUCKETS, after, limit).await
    }

    async fn held(&mut self, positions: &[i64]) -> Result<Vec<OutboxRow>, StoreError> {
        if positions.is_empty() {
            return Ok(Vec::new());
        }
        let list = number_list(positions.iter().copied());
        let weights: Vec<(i64, i64)> =
            sqlx::query_as(DIVERTED_WEIGHTS).bind(list).all(&mut self.pool.acquire().await?).await?;
        let list = number_list(first_within(weights, self.read_bytes));
        let found = sqlx::query(DIVERTED_ROWS).bind(list).all(&mut self.pool.acquire().await?).await?;
        found.iter().map(outbox_row).collect()
    }

    async fn release(self: Box<Self>) -> Result<(), StoreError> {
        match Session::run(&mut self.pool.acquire().await?, outbox::release(0, self.fence)).await? {
            1 => Ok(()),
            _ => Err(self.fenced("another owner wrote")),
        }
    }
}

impl MySqlSession {
    fn fenced(&self, why: &str) -> StoreError {
        StoreError::Fenced(format!("epoch {} of the outbox has ended: {why}", self.fence.epoch))
    }

    fn is_ours(&self, row: &MySqlRow) -> Result<(), StoreError> {
        let seen = Fence { epoch: row.try_get("epoch")?, revision: row.try_get("revision")? };
        self.fence.check(seen).map_err(|lost| self.fenced(&lost))
    }

    /// Reads the first rows outside these runs, which are in flight. Returns true where there may
    /// be more.
    async fn read_between(
        &mut self,
        in_flight: &[RangeInclusive<i64>],
        rows_max: usize,
    ) -> Result<(Vec<OutboxRow>, bool), StoreError> {
        let ends = std::iter::once(i64::MIN).chain(in_flight.iter().map(|run| *run.end()));
        let starts = in_flight.iter().map(|run| *run.start()).chain(std::iter::once(i64::MAX));
        let limit = i64::try_from(rows_max).unwrap_or(i64::MAX);
        let (rows, cut) = self.rows(in_ranges(sqlx::query(ROWS_IN_RANGES), ends.zip(starts)).bind(limit)).await?;
        let more = cut || rows.len() >= rows_max;
        Ok((rows, more))
    }

    /// The same where what is in flight has too many holes: reads all positions, and then the rows
    /// whose positions are new.
    async fn read_listed(&mut self, rows_max: usize) -> Result<(Vec<OutboxRow>, bool), StoreError> {
        let limit = self.in_flight.len() + rows_max;
        let found: Vec<(i64,)> = sqlx::query_as(POSITIONS)
            .bind(i64::try_from(limit).unwrap_or(i64::MAX))
            .all(&mut self.pool.acquire().await?)
            .await?;
        let new = found.iter().map(|(position,)| *position).filter(|position| !self.in_flight.contains(position));
        let positions: Vec<i64> = new.take(rows_max).collect();
        if positions.is_empty() {
            return Ok((Vec::new(), found.len() >= limit));
        }
        let (rows, cut) = self.rows(sqlx::query(ROWS).bind(number_list(positions.iter().copied()))).await?;
        // They were committed when their positions were read, and only this session deletes them.
        if rows.len() != positions.len() && !cut {
            let (read, there) = (positions.len(), rows.len());
            return Err(
                self.fenced(&format!("of {read} rows that were read {there} are left: somebody else deleted some"))
            );
        }
        let more = cut || found.len() >= limit;
        Ok((rows, more))
    }

    /// Reads rows until they reach the limit of bytes. Returns true where that was the end.
    async fn rows(&mut self, query: Query<'_, MySql, MySqlArguments>) -> Result<(Vec<OutboxRow>, bool), StoreError> {
        let (mut rows, mut bytes, bytes_max) = (Vec::new(), 0, self.read_bytes);
        let mut outcome = Ok(());
        let mut take = |part: Either<_, MySqlRow>| {
            let Either::Right(row) = part else { return ControlFlow::Continue(()) };
            let fence = if rows.is_empty() { self.is_ours(&row) } else { Ok(()) };
            match fence.and_then(|()| unused(&row)).and_then(|()| outbox_row(&row)) {
                Ok(row) => {
                    bytes += row.message.weight();
                    rows.push(row);
                }
                Err(error) => outcome = Err(error),
            }
            // The server sends all rows that were asked for; only the end of the connection stops
            // it.
            if outcome.is_err() || bytes >= bytes_max { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        self.pool.acquire().await?.parts(AnyQuery::of(query), &mut take).await?;
        outcome?;
        if rows.is_empty() {
            // It says nothing of the size of rows.
            return Ok((rows, false));
        }
        // The next read asks for as many rows as fitted, and for twice as many once much room is
        // left.
        let cut = bytes >= bytes_max;
        if cut {
            self.rows_max = rows.len();
        } else if bytes < bytes_max / 4 {
            self.rows_max = self.rows_max.saturating_mul(2);
        }
        Ok((rows, cut))
    }
}

const FENCE: &str = "select epoch, revision from oncebox_shard where shard_id = 0";

macro_rules! eight {
    ($text:expr) => {
        concat!($text, $text, $text, $text, $text, $text, $text, $text)
    };
}

/// Whether a position lies in one of [`RANGES_MAX`] ranges. Where there are fewer, the others go
/// from 0 to 0.
macro_rules! is_in_range {
    () => {
        concat!("(", eight!(eight!("o.position > ? and o.position < ? or ")), "false)")
    };
}

/// Rows with the fence, their messages, and the fault of their position, which [`unused`] reads.
macro_rules! rows {
    ($list:literal, $on:literal, $end:expr) => {
        concat!(
            "select s.epoch, s.revision, o.position, o.bucket, o.message_id, o.topic, o.`key`, o.kind, o.headers, o.payload, \
             o.content_type, o.traceparent, o.tracestate, o.created_at, case when d.position is not null then 2 when ",
            set_back!(),
            " then 1 else 0 end as fault from oncebox_shard s straight_join ",
            $list,
            "oncebox_outbox o force index (primary)",
            $on,
            " left join oncebox_outbox_dead d force index (primary) on d.position = o.position where s.shard_id = 0 ",
            $end
        )
    };
}

const ROWS_IN_RANGES: &str = rows!("", "", concat!("and ", is_in_range!(), " order by o.position limit ?"));

const POSITIONS: &str = "select position from oncebox_outbox force index (primary) order by position limit ?";

const ROWS: &str = rows!(
    "json_table(?, '$[*]' columns (position bigint path '$')) j straight_join ",
    " on o.position = j.position",
    "order by o.position"
);

/// Runs of positions that were all read. For a statement that needs the position alone the
/// optimizer scans the whole index, although it is forced, where the statistics say that the table
/// is nearly empty; and a scan waits for every open writer. They say so of many rows, too, while
/// most pages have deleted rows that are not purged yet. So the statement also needs a column that
/// is not in the key: every row has a bucket.
const DELETE_RANGES: &str =
    concat!("delete o from oncebox_outbox o force index (primary) where ", is_in_range!(), " and o.bucket is not null");

/// The plan is `eq_ref` by the primary key: only the rows themselves are locked (R11). A test reads
/// the plan. The index is forced because an optimizer prefers to scan a small table, and a scan
/// waits for every open writer.
pub(super) const DELETE_PROVEN: &str = "\
delete o from json_table(?, '$[*]' columns (position bigint path '$')) j \
  straight_join oncebox_outbox o force index (primary) on o.position = j.position";

const DELETE_DIVERTED: &str = "\
delete d from json_table(?, '$[*]' columns (position bigint path '$')) j \
  straight_join oncebox_outbox_dead d force index (primary) on d.position = j.position";

/// The same, without rows whose discard was asked for.
const DELETE_RELEASED: &str = "\
delete d from json_table(?, '$[*]' columns (position bigint path '$')) j \
  straight_join oncebox_outbox_dead d force index (primary) on d.position = j.position \
 where not d.requested <=> 'discard'";

const DIVERTED_WEIGHTS: &str = "\
select d.position, cast(length(d.payload) + coalesce(length(d.headers), 0) as signed) \
  from json_table(?, '$[*]' columns (position bigint path '$')) j straight_join oncebox_outbox_dead d force index (primary) on d.position = j.position \
 order by d.position";

const DIVERTED_ROWS: &str = "\
select d.position, d.bucket, d.message_id, d.topic, d.`key`, d.kind, d.headers, d.payload, d.content_type, d.traceparent, \
       d.tracestate, d.created_at \
  from json_table(?, '$[*]' columns (position bigint path '$')) j straight_join oncebox_outbox_dead d force index (primary) on d.position = j.position \
 order by d.position";

/// The lane id is computed as in `message::lane_id`: from the length of the topic in eight bytes,
/// the topic, and the key.
const DIVERT: &str = "\
insert into oncebox_outbox_dead \
  (position, bucket, message_id, topic, `key`, kind, headers, payload, content_type, traceparent, tracestate, created_at, lane_id, \
   state, cause, reason, holds, attempts, history, diverted_at) \
select o.position, o.bucket, o.message_id, o.topic, o.`key`, o.kind, o.headers, o.payload, o.content_type, o.traceparent, \
       o.tracestate, o.created_at, \
       unhex(left(sha2(concat(unhex(lpad(hex(length(o.topic)), 16, '0')), o.topic, o.`key`), 256), 32)), \
       j.state, j.cause, convert(unhex(j.reason) using utf8mb4), j.holds, 1, \
       if(j.reason is null, '[]', json_array(json_object( \
          'at', date_format(utc_timestamp(6), '%Y-%m-%dT%H:%i:%s.%fZ'), 'attempt', 1, \
          'error', convert(unhex(j.reason) using utf8mb4)))), \
       utc_timestamp(6) \
  from json_table(?, '$[*]' columns (position bigint path '$.p', state varchar(16) path '$.s', cause varchar(16) path '$.c', \
                                     reason longtext path '$.r', holds int path '$.h')) j \
  straight_join oncebox_outbox o force index (primary) on o.position = j.position";

const CHANGE: &str = "\
update json_table(?, '$[*]' columns (position bigint path '$.p', state varchar(16) path '$.s', cause varchar(16) path '$.c', \
                                     reason longtext path '$.r', holds int path '$.h')) j \
  straight_join oncebox_outbox_dead d force index (primary) on d.position = j.position \
   set d.history = if(j.reason is null, d.history, json_array_append( \
         if(json_length(d.history) >= 50, json_remove(d.history, '$[0]'), d.history), '$', json_object( \
           'at', date_format(utc_timestamp(6), '%Y-%m-%dT%H:%i:%s.%fZ'), 'attempt', d.attempts + 1, \
           'error', convert(unhex(j.reason) using utf8mb4)))), \
       d.attempts = d.attempts + 1, d.state = j.state, d.cause = j.cause, d.reason = convert(unhex(j.reason) using utf8mb4), \
       d.holds = j.holds, d.diverted_at = utc_timestamp(6), \
       d.requested_at = if(d.requested = 'discard', d.requested_at, null), \
       d.requested_by = if(d.requested = 'discard', d.requested_by, null), \
       d.requested = if(d.requested = 'discard', d.requested, null)";

async fn divert(connection: &mut Bounded<MySql>, diverted: &[(i64, Diversion)]) -> Result<(), StoreError> {
    if diverted.is_empty() {
        return Ok(());
    }
    let written = match sqlx::query(DIVERT).bind(diversion_list(diverted)).run(connection).await {
        Ok(done) => done.rows_affected(),
        Err(error) if is_duplicate(&error) => {
            return Err(used_twice("the position of a message that is to be held"));
        }
        Err(error) => return Err(error.into()),
    };
    outbox::check_all(written, diverted)
}

async fn change(connection: &mut Bounded<MySql>, changed: &[(i64, Diversion)]) -> Result<(), StoreError> {
    if changed.is_empty() {
        return Ok(());
    }
    let written = sqlx::query(CHANGE).bind(diversion_list(changed)).run(connection).await?.rows_affected();
    outbox::check_all(written, changed)
}

/// Deletes the rows at these positions, which are in ascending order within each batch.
async fn delete_proven(connection: &mut Bounded<MySql>, proven: &[i64]) -> Result<(), StoreError> {
    let (long, short): (Vec<_>, Vec<_>) =
        runs(proven.iter().copied()).into_iter().partition(|run| length(run) >= RUN_MIN);
    for part in long.chunks(RANGES_MAX) {
        // Behind each row that it deletes the server locks the next one, to see that the range has
        // ended. So the last row of a run stays out, and is what it finds there.
        let delete = in_ranges(sqlx::query(DELETE_RANGES), part.iter().map(|run| (run.start() - 1, *run.end())));
        delete.run(&mut *connection).await?;
    }
    let last: Vec<i64> = long.iter().map(|run| *run.end()).chain(short.into_iter().flatten()).collect();
    for part in last.chunks(ROWS_MAX) {
        sqlx::query(DELETE_PROVEN).bind(number_list(part.iter().copied())).run(&mut *connection).await?;
    }
    Ok(())
}

/// Splits positions into runs without a hole.
fn runs(positions: impl Iterator<Item = i64>) -> Vec<RangeInclusive<i64>> {
    let mut runs: Vec<RangeInclusive<i64>> = Vec::new();
    for position in positions {
        match runs.last_mut() {
            Some(run) if run.end().checked_add(1) == Some(position) => *run = *run.start()..=position,
            _ => runs.push(position..=position),
        }
    }
    runs
}

fn length(run: &RangeInclusive<i64>) -> usize {
    usize::try_from(run.end() - run.start() + 1).unwrap_or(usize::MAX)
}

/// Binds at most [`RANGES_MAX`] ranges, without their ends.
fn in_ranges<'q>(
    query: Query<'q, MySql, MySqlArguments>,
    ranges: impl Iterator<Item = (i64, i64)>,
) -> Query<'q, MySql, MySqlArguments> {
    let ranges = ranges.chain(std::iter::repeat((0, 0))).take(RANGES_MAX);
    ranges.fold(query, |query, (after, before)| query.bind(after).bind(before))
}

async fn delete_diverted(connection: &mut Bounded<MySql>, positions: &[i64]) -> Result<(), StoreError> {
    if !positions.is_empty() {
        sqlx::query(DELETE_DIVERTED).bind(number_list(positions.iter().copied())).run(connection).await?;
    }
    Ok(())
}

/// Deletes rows that were sent. A row whose discard was asked for is deleted last, so that a
/// request is either seen here or finds no row: a look before the deletion could miss one.
async fn release(connection: &mut Bounded<MySql>, positions: &[i64]) -> Result<SentNotDiscarded, StoreError> {
    if positions.is_empty() {
        return Ok(SentNotDiscarded::default());
    }
    let done = sqlx::query(DELETE_RELEASED).bind(number_list(positions.iter().copied())).run(&mut *connection).await?;
    if outbox::are_all(done.rows_affected(), positions.len()) {
        return Ok(SentNotDiscarded::default());
    }
    let sent = outbox::sent_not_discarded(connection, positions).await?;
    delete_diverted(connection, positions).await?;
    Ok(sent)
}

fn diversion_list(diverted: &[(i64, Diversion)]) -> String {
    let rows: Vec<String> = diverted
        .iter()
        .map(|(position, diversion)| {
            let (state, cause, reason, holds) = outbox::columns(diversion);
            let holds = u8::from(holds);
            // A member that is left out is read as null.
            let reason =
                reason.map(|reason| format!(r#","r":"{}""#, hex(kept_error(reason).as_bytes()))).unwrap_or_default();
            format!(r#"{{"p":{position},"s":"{state}","c":"{cause}","h":{holds}{reason}}}"#)
        })
        .collect();
    format!("[{}]", rows.join(","))
}

/// Refuses a row of the outbox whose position belongs to a dead or held row, or is below that of an
/// older one: it would be sent before older rows of its key.
fn unused(row: &MySqlRow) -> Result<(), StoreError> {
    let fault = row.try_get::<i64, _>("fault")?;
    if fault == 0 {
        return Ok(());
    }
    let position = format!("the position {} of a new message", row.try_get::<i64, _>("position")?);
    Err(match fault {
        1 => StoreError::Refused(format!(
            "sequence behind cursor: {position} is below that of an older dead or held one; run `oncebox doctor --fix`"
        )),
        _ => used_twice(&position),
    })
}

fn used_twice(position: &str) -> StoreError {
    StoreError::Refused(format!(
        "sequence behind cursor: {position} is that of a dead or held one, too; run `oncebox doctor --fix`"
    ))
}

/// A row of the outbox or of the dead and held table.
fn outbox_row(row: &MySqlRow) -> Result<OutboxRow, StoreError> {
    let key: Option<Vec<u8>> = row.try_get("key")?;
    let headers: Option<String> = row.try_get("headers")?;
    let traceparent: Option<String> = row.try_get("traceparent")?;
    let tracestate: Option<String> = row.try_get("tracestate")?;
    Ok(OutboxRow {
        position: row.try_get("position")?,
        bucket: row.try_get("bucket")?,
        message: OutgoingMessage {
            id: row.try_get("message_id")?,
            topic: text("topic", row.try_get("topic")?)?,
            key: key.map(|key| text("key", key)).transpose()?,
            kind: text("kind", row.try_get("kind")?)?,
            headers: headers.as_deref().map(parse_headers).transpose()?.unwrap_or_default(),
            payload: row.try_get("payload")?,
            content_type: row.try_get("content_type")?,
            trace: traceparent.map(|traceparent| TraceContext { traceparent, tracestate }),
            created_at: row.try_get("created_at")?,
        },
    })
}
