//! The read of a relay session: one statement, one snapshot, all open gaps and the tail, in position order (R2, R4, R9).
//!
//! Guarantees: the fence of this snapshot, epoch and revision come with the rows; positions of all shards are returned, content
//! only of this one; the plan has no Sort, because every range is an ordered index scan of its own and the outer query has a
//! LIMIT and no ORDER BY. Memory is bounded by bytes too, not only by rows.

use chrono::{DateTime, Utc};
use futures::TryStreamExt;
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, PgConnection, Row};

use super::door::parse_headers;
use crate::error::StoreError;
use crate::message::{OutgoingMessage, TraceContext};
use crate::policy::gaps::{GapSet, ReadPlan};
use crate::store::OutboxRow;

/// A read stops taking rows beyond this weight; what it left is read again.
pub(super) const READ_BYTES_MAX: usize = 32 << 20;

/// Content columns, in the order that [`message_of`] reads.
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

/// Which buckets are this shard's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Buckets {
    pub(super) from: i16,
    pub(super) to: i16,
}

impl Buckets {
    fn are_all(self) -> bool {
        self.from <= 0 && self.to >= 255
    }

    fn contain(self, bucket: i16) -> bool {
        self.from <= bucket && bucket <= self.to
    }
}

/// What one statement gave.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) xmin: u64,
    pub(super) epoch: i64,
    pub(super) revision: i64,
    pub(super) last_value: i64,
    /// Of all shards, as they came.
    pub(super) positions: Vec<i64>,
    /// Of this shard.
    pub(super) rows: Vec<OutboxRow>,
    /// There may be rows beyond the last one.
    pub(super) more: bool,
    /// Bytes of the rows taken.
    pub(super) bytes: usize,
}

/// The statement. The limit is a literal, so that no generic plan can think it large; there are few of them in a session.
pub(super) fn statement(buckets: Buckets, limit: usize) -> String {
    let mut content = String::new();
    for column in CONTENT {
        content.push_str(&if buckets.are_all() {
            format!(", {column}")
        } else {
            format!(", case when bucket between {} and {} then {column} end as {column}", buckets.from, buckets.to)
        });
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

/// Runs the statement; none where there is no such shard.
pub(super) async fn read(
    connection: &mut PgConnection,
    shard: i32,
    buckets: Buckets,
    plan: &ReadPlan,
    limit: usize,
) -> Result<Option<Found>, StoreError> {
    let gaps: GapSet = plan.ranges.iter().copied().collect();
    let mut stream = sqlx::query(AssertSqlSafe(statement(buckets, limit)))
        .bind(shard)
        .bind(gaps.to_string())
        .bind(plan.tail_from)
        .fetch(connection);
    let mut found: Option<Found> = None;
    while let Some(row) = stream.try_next().await? {
        let found = match &mut found {
            Some(found) => found,
            None => found.insert(Found {
                xmin: row.try_get_unchecked::<i64, _>(0)?.unsigned_abs(),
                epoch: row.try_get_unchecked(1)?,
                revision: row.try_get_unchecked(2)?,
                last_value: row.try_get_unchecked(3)?,
                positions: Vec::with_capacity(limit.min(1_024)),
                rows: Vec::new(),
                more: false,
                bytes: 0,
            }),
        };
        let Some(position) = row.try_get_unchecked::<Option<i64>, _>(4)? else { break };
        let bucket: i16 = row.try_get_unchecked(5)?;
        found.positions.push(position);
        if buckets.contain(bucket) {
            let message = message_of(&row, 6)?;
            found.bytes += message.weight();
            found.rows.push(OutboxRow { position, bucket: u8::try_from(bucket).unwrap_or(u8::MAX), message });
        }
        if found.bytes >= READ_BYTES_MAX {
            // What was not taken counts as not read: absence is known only below the last position taken.
            found.more = true;
            break;
        }
    }
    if let Some(found) = &mut found {
        found.more |= found.positions.len() >= limit;
    }
    Ok(found)
}

/// A message, its columns beginning at `at` in the order of [`CONTENT`].
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
        payload: row.try_get_unchecked(at + 5)?,
        content_type: row.try_get_unchecked(at + 6)?,
        trace,
        created_at: row.try_get_unchecked::<DateTime<Utc>, _>(at + 9)?,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use sqlx::{Connection, Executor};

    use super::*;
    use crate::store::postgres::{PostgresStore, relay};
    use crate::store::{Base, Schema, StoreOptions};

    /// Shown by an `order by` on the outer query: a Sort appears, and all rows are read for the first few.
    #[tokio::test]
    async fn r9_the_read_is_ordered_index_scans_and_no_sort() {
        let Some(server) = std::env::var("ONCEBOX_TEST_POSTGRES").ok().filter(|url| !url.is_empty()) else {
            assert!(std::env::var("ONCEBOX_TEST_STRICT").as_deref() != Ok("1"), "needs ONCEBOX_TEST_POSTGRES");
            eprintln!("SKIPPED: r9_the_read_is_ordered_index_scans_and_no_sort (no ONCEBOX_TEST_POSTGRES)");
            return;
        };
        let name = format!("oncebox_plan_{}", uuid::Uuid::now_v7().simple());
        let mut admin = PgConnection::connect(&server).await.unwrap();
        admin.execute(AssertSqlSafe(format!("create database {name} template template0"))).await.unwrap();
        let mut url = url::Url::parse(&server).unwrap();
        url.set_path(&name);
        let plans = plans(url.as_str()).await;
        admin.execute(AssertSqlSafe(format!("drop database {name} with (force)"))).await.unwrap();
        for plan in plans {
            let shown = plan.join("\n");
            let nodes: Vec<&str> = plan.iter().map(|line| line.trim_start_matches([' ', '-', '>'])).collect();
            assert!(
                !nodes.iter().any(|node| node.starts_with("Sort (") || node.starts_with("Incremental Sort (")),
                "{shown}"
            );
            let scanned = |node: &&str| node.starts_with("Seq Scan on outbox") && !node.contains("outbox_position_seq");
            assert!(!nodes.iter().any(|node| scanned(node)), "{shown}");
            assert!(nodes.iter().any(|node| node.starts_with("Index Scan using outbox_p")), "{shown}");
            // Of 2,000 rows in the tail no more are read than the limit lets through.
            let most = nodes
                .iter()
                .filter(|node| node.starts_with("Index Scan using outbox_p"))
                .filter_map(|node| node.split("actual rows=").nth(1)?.split([' ', '.']).next()?.parse::<u32>().ok());
            assert!(most.max().unwrap() <= 100, "{shown}");
        }
    }

    /// The plan of the statement in a session, for a whole and for a part of the buckets.
    async fn plans(url: &str) -> Vec<Vec<String>> {
        let store = PostgresStore::connect(&StoreOptions::new(url)).await.unwrap();
        store.migrate().await.unwrap();
        let mut session = store.dedicated().await.unwrap();
        session.execute(AssertSqlSafe(relay::settings(std::time::Duration::from_secs(30)))).await.unwrap();
        // Rows on both sides of a bound between partitions, with holes.
        session
            .execute(
                "select setval('oncebox.outbox_position_seq', 999000);
                 insert into oncebox.outbox (bucket, message_id, topic, kind, payload, content_type)
                 select i % 256, gen_random_uuid(), 't', 'k', repeat('x', 300)::bytea, 'c' from generate_series(1, 3000) i;
                 delete from oncebox.outbox where position % 10 = 0;
                 analyze oncebox.outbox",
            )
            .await
            .unwrap();
        let mut plans = Vec::new();
        for buckets in [Buckets { from: 0, to: 255 }, Buckets { from: 0, to: 127 }] {
            let statement = statement(buckets, 100);
            let explain = format!(
                "deallocate all; prepare read (int, text, bigint) as {statement};
                 explain (analyze, costs off, timing off, summary off) execute read (0, '{{[999010,999011),[999020,999021),[1000010,1000011)}}', 1000100)"
            );
            let rows = sqlx::raw_sql(AssertSqlSafe(explain)).fetch_all(&mut session).await.unwrap();
            plans.push(rows.iter().map(|row| row.get::<String, _>(0)).collect());
        }
        session.close().await.unwrap();
        store.close().await;
        plans
    }
}
