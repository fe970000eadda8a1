//! Reads new outbox rows for a relay session: all in one statement, so in one snapshot (R2, R4,
//! R9).
//!
//! It reads the *gaps* (positions that were missing so far: their transactions may still commit)
//! and the *tail* (every position above the last one that was seen), in position order.
//!
//! Guarantees:
//!
//! * With the rows come this snapshot's oldest running transaction (`xmin`: a gap whose *fence* is
//!   not above it is closed), and the epoch and revision of the shard, by which the session sees
//!   whether another process has taken the shard over.
//! * Positions of all shards are returned, content only of this one.
//! * PostgreSQL does not sort: each range is an ordered index scan of its own, and the outer query
//!   has a LIMIT and no ORDER BY.
//! * A read is bounded by rows and by bytes, and so is its memory (G11).

use std::collections::HashMap;
use std::ops::ControlFlow;

use chrono::{DateTime, Utc};
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Either, Postgres, Row};

use crate::error::StoreError;
use crate::message::{OutgoingMessage, TraceContext};
use crate::outbox::port::OutboxRow;
use crate::outbox::rules::gaps::{GapSet, ReadPlan};
use crate::store::bounded::{AnyQuery, Ask, Bounded};
use crate::store::headers::parse_headers;
use crate::time::lease::Fence;

/// The columns of a message, in the order that [`message_of`] reads.
pub(super) const CONTENT: [&str; 10] = [
    "message_id",
    "topic",
    "key",
    "kind",
    "headers",
    "payload",
    "content_type",
    "traceparent",
    "tracestate",
    "created_at",
];

/// The range of buckets that this shard serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Buckets {
    pub(super) from: i16,
    pub(super) to: i16,
}

impl Buckets {
    fn are_all(self) -> bool {
        self.from <= 0 && self.to >= 255
    }

    /// The first and the last one.
    pub(super) fn bounds(self) -> (i64, i64) {
        (self.from.into(), self.to.into())
    }

    fn contain(self, bucket: i16) -> bool {
        self.from <= bucket && bucket <= self.to
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Bounds {
    pub(super) rows: usize,
    pub(super) bytes: usize,
}

impl Bounds {
    /// A message larger than this comes without headers and payload; a second statement fetches
    /// them for the messages that were taken. Otherwise one read could load a thousand of the
    /// largest messages.
    fn share(self) -> usize {
        (self.bytes / self.rows.max(1)).clamp(1, 1 << 30)
    }
}

#[derive(Debug)]
pub(super) struct NewRows {
    pub(super) xmin: u64,
    pub(super) fence: Fence,
    pub(super) last_value: i64,
    /// Positions of all shards, in the order of the answer.
    pub(super) positions: Vec<i64>,
    /// The rows of this shard.
    pub(super) rows: Vec<OutboxRow>,
    /// There may be rows beyond the last one.
    pub(super) more: bool,
    /// Rows that came without headers and payload, by their place in `rows`.
    large: Vec<usize>,
    bytes: usize,
}

/// Builds the statement. Limit and share are literals, so that a generic plan cannot assume a large
/// limit; a session uses only a few different values. The length of a payload is read without its
/// value.
pub(super) fn statement(buckets: Buckets, bounds: Bounds) -> String {
    let (limit, share) = (bounds.rows, bounds.share());
    let weight = "octet_length(payload) + coalesce(octet_length(headers::text), 0)";
    let ours = match buckets.are_all() {
        true => "true".to_owned(),
        false => format!("bucket between {} and {}", buckets.from, buckets.to),
    };
    let mut content = format!(", case when {ours} and {weight} > {share} then {weight} end as large");
    for column in CONTENT {
        let when = match column {
            "headers" | "payload" => format!("{ours} and {weight} <= {share}"),
            _ => ours.clone(),
        };
        content.push_str(&format!(", case when {when} then {column} end as {column}"));
    }
    format!(
        "with st as materialized (
           select pg_snapshot_xmin(pg_current_snapshot())::text::bigint as xmin, s.epoch, s.revision,
                  (select q.last_value from oncebox.outbox_position_seq q) as last_value
             from oncebox.shard s where s.shard_id = $1)
         select st.xmin, st.epoch, st.revision, st.last_value, r.*
           from st left join (
             select o.* from (
               select lower(g) as lo, upper(g) as hi from unnest($2::text::int8multirange) g
               union all
               select $3::bigint, 9223372036854775807 where $3::bigint is not null) z
             cross join lateral (
               select position, bucket{content} from oncebox.outbox
                where position >= z.lo and position < z.hi order by position limit {limit}) o
              limit {limit}) r on true"
    )
}

/// Fetches what was left out. Rows never change, and an unproven row is never deleted, so a later
/// snapshot shows the same.
const LARGE: &str = "select position, headers, payload from oncebox.outbox where position = any($1)";

/// Runs the statement. Returns none where the shard does not exist.
pub(super) async fn read(
    connection: &mut Bounded<Postgres>,
    shard: i32,
    buckets: Buckets,
    plan: &ReadPlan,
    bounds: Bounds,
) -> Result<Option<NewRows>, StoreError> {
    let gaps: GapSet = plan.ranges.iter().copied().collect();
    let query =
        sqlx::query(AssertSqlSafe(statement(buckets, bounds))).bind(shard).bind(gaps.to_string()).bind(plan.tail_from);
    let mut outcome = Ok(());
    let mut found: Option<NewRows> = None;
    let mut take = |part: Either<_, PgRow>| {
        if let (Either::Right(row), Ok(())) = (part, &outcome) {
            outcome = add(&mut found, &row, buckets, bounds);
        }
        ControlFlow::Continue(())
    };
    connection.parts(AnyQuery::of(query), &mut take).await?;
    outcome?;
    let Some(mut found) = found else { return Ok(None) };
    found.more |= found.positions.len() >= bounds.rows;
    complete(connection, &mut found).await?;
    Ok(Some(found))
}

/// Adds a row, unless earlier rows have reached the limit of bytes. A row that is not added counts
/// as not read: which positions are missing is known only below the last position that was added.
fn add(found: &mut Option<NewRows>, row: &PgRow, buckets: Buckets, bounds: Bounds) -> Result<(), StoreError> {
    let found = match found {
        Some(found) => found,
        None => found.insert(NewRows {
            xmin: row.try_get_unchecked::<i64, _>(0)?.unsigned_abs(),
            fence: Fence { epoch: row.try_get_unchecked(1)?, revision: row.try_get_unchecked(2)? },
            last_value: row.try_get_unchecked(3)?,
            positions: Vec::with_capacity(bounds.rows.min(1_024)),
            rows: Vec::new(),
            more: false,
            large: Vec::new(),
            bytes: 0,
        }),
    };
    let Some(position) = row.try_get_unchecked::<Option<i64>, _>(4)? else { return Ok(()) };
    found.more |= found.bytes >= bounds.bytes;
    if found.more {
        return Ok(());
    }
    let bucket: i16 = row.try_get_unchecked(5)?;
    found.positions.push(position);
    if buckets.contain(bucket) {
        let message = message_of(row, 7)?;
        found.bytes += message.weight();
        if let Some(large) = row.try_get_unchecked::<Option<i32>, _>(6)? {
            found.bytes += usize::try_from(large).unwrap_or(usize::MAX);
            found.large.push(found.rows.len());
        }
        found.rows.push(OutboxRow { position, bucket: u8::try_from(bucket).unwrap_or(u8::MAX), message });
    }
    Ok(())
}

/// Fetches headers and payloads of the messages that came without them.
async fn complete(connection: &mut Bounded<Postgres>, found: &mut NewRows) -> Result<(), StoreError> {
    if found.large.is_empty() {
        return Ok(());
    }
    let positions: Vec<i64> = found.large.iter().map(|place| found.rows[*place].position).collect();
    let rows = sqlx::query(LARGE).bind(&positions).all(connection).await?;
    let mut values = HashMap::with_capacity(rows.len());
    for row in &rows {
        let headers = row.try_get_unchecked::<Option<&str>, _>(1)?.map(parse_headers).transpose()?;
        values.insert(row.try_get::<i64, _>(0)?, (headers.unwrap_or_default(), row.try_get::<Vec<u8>, _>(2)?));
    }
    for place in &found.large {
        let row = &mut found.rows[*place];
        let Some((headers, payload)) = values.remove(&row.position) else {
            return Err(StoreError::Corrupt(format!(
                "the message at position {} disappeared after it was read",
                row.position
            )));
        };
        (row.message.headers, row.message.payload) = (headers, payload);
    }
    Ok(())
}

/// A message whose columns begin at `at`, in the order of [`CONTENT`]. Its payload is empty where
/// it was left out.
pub(super) fn message_of(row: &PgRow, at: usize) -> Result<OutgoingMessage, StoreError> {
    let headers = match row.try_get_unchecked::<Option<&str>, _>(at + 4)? {
        Some(json) => parse_headers(json)?,
        None => Vec::new(),
    };
    let parent: Option<String> = row.try_get_unchecked(at + 7)?;
    let trace = match parent {
        Some(traceparent) => Some(TraceContext { traceparent, tracestate: row.try_get_unchecked(at + 8)? }),
        None => None,
    };
    Ok(OutgoingMessage {
        id: row.try_get_unchecked(at)?,
        topic: row.try_get_unchecked(at + 1)?,
        key: row.try_get_unchecked(at + 2)?,
        kind: row.try_get_unchecked(at + 3)?,
        headers,
        payload: row.try_get_unchecked::<Option<Vec<u8>>, _>(at + 5)?.unwrap_or_default(),
        content_type: row.try_get_unchecked(at + 6)?,
        trace,
        created_at: row.try_get_unchecked::<DateTime<Utc>, _>(at + 9)?,
    })
}
