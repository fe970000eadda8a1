//! The outbox of SQLite for its relay.
//!
//! There is one writer at a time, so positions commit in order and a plain cursor is exact. A
//! proven row is deleted, by its exact position, in the transaction that moves the cursor past it
//! (R11), so the table holds only unproven rows.
//!
//! Guarantees: every write checks epoch and revision; a checkpoint is a commit of our own with
//! `synchronous = FULL`, begun after the read, so that the rows about to be sent are on disk even
//! if their writer did not sync (R5).
//!
//! Not here: gaps (SQLite has none), and what a mark writes (`mark`).

mod mark;

#[cfg(test)]
pub(super) use mark::DELETE;

use std::collections::VecDeque;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::{StreamExt, TryStreamExt};
use sqlx::sqlite::SqliteRow;
use sqlx::{Row, query, query_scalar};

use self::mark::positions_json;
use super::SqliteStore;
use super::message::{headers_from_json, uuid_from_text};
use crate::error::StoreError;
use crate::message::OutgoingMessage;
use crate::outbox::port::{
    DivertedRow, LeaseAnswer, LeaseRequest, Mark, OperatorRequest, Outbox, OutboxRow, ReadBatch, RelaySession,
};
use crate::store::base::Base;
use crate::store::sql::{self, SqlStore, outbox};
use crate::time::lease::Fence;

/// The bytes of a row, as `OutgoingMessage::weight` counts them. Lengths are read without
/// the payloads.
macro_rules! weight {
    ($of:literal) => {
        concat!(
            "octet_length(",
            $of,
            "payload) + octet_length(",
            $of,
            "headers) + coalesce(octet_length(",
            $of,
            "key), 0) + 200"
        )
    };
}

/// The fence and the next rows, each with its bytes, in one snapshot. The outer join returns the
/// fence even where there is no row. The statement ends behind the row that reaches the bound of
/// bytes, because the thread of the connection copies many rows ahead of their reader. The running
/// sum costs three times as much as the rows themselves, so it is made only where all of them
/// together reach the bound.
pub(super) const READ: &str = concat!(
    "select s.epoch, s.revision, coalesce((select seq from sqlite_sequence where name = 'oncebox_outbox'), 0), \
             s.scanned_to, o.position, o.bucket, o.message_id, o.topic, o.key, o.kind, o.headers, o.payload, o.content_type, \
             o.created_at, ",
    weight!("o."),
    " from oncebox_shard as s left join oncebox_outbox as o on o.position > ?1 and o.position <= case \
             when (select sum(weight) from (select ",
    weight!(""),
    " as weight from oncebox_outbox where position > ?1 order by position limit ?3)) < ?4 then 9223372036854775807 \
             else coalesce((select position from (select position, row_number() over first as rows, sum(",
    weight!(""),
    ") over first as bytes \
                 from oncebox_outbox where position > ?1 window first as (order by position rows unbounded preceding)) \
               where rows >= ?3 or bytes >= ?4 limit 1 offset 1), 9223372036854775807) end \
             where s.shard_id = ?2 order by o.position limit ?3"
);

/// Held rows, in order, up to the bound of bytes.
const HELD: &str = concat!(
    "select position, bucket, message_id, topic, key, kind, headers, payload, content_type, created_at \
             from oncebox_outbox_dead where position in (select value from json_each(?1)) \
             and position <= coalesce((select position from (select position, sum(",
    weight!(""),
    ") over (order by position) as bytes \
               from oncebox_outbox_dead where position in (select value from json_each(?1))) \
               where bytes >= ?2 limit 1), 9223372036854775807) order by position"
);

/// One session: it owns the only shard.
#[derive(Debug)]
pub(super) struct SqliteSession {
    store: SqliteStore,
    shard: i32,
    owner: String,
    length: Duration,
    /// Epoch and revision as this session wrote them last.
    fence: Fence,
    read_bytes: i64,
    read_to: i64,
    batches: u64,
    /// Batches that are read and not marked, oldest first. Batches without rows are left out.
    window: VecDeque<Batch>,
}

#[derive(Debug)]
struct Batch {
    number: u64,
    positions: Vec<i64>,
}

#[async_trait]
impl Outbox for SqliteStore {
    async fn open(&self, request: &LeaseRequest) -> Result<LeaseAnswer, StoreError> {
        let (fence, read_to) = match outbox::take(self, request).await? {
            Ok(taken) => taken,
            Err(refused) => return Ok(refused),
        };
        Ok(LeaseAnswer::Taken(Box::new(SqliteSession {
            store: self.clone(),
            shard: request.shard,
            owner: request.owner.clone(),
            length: request.length,
            fence,
            read_bytes: i64::try_from(request.read_bytes).unwrap_or(i64::MAX),
            read_to,
            batches: 0,
            window: VecDeque::new(),
        })))
    }

    async fn proven_kept(&self) -> Result<Duration, StoreError> {
        // Proven rows are not kept: the mark deletes them.
        Ok(Duration::ZERO)
    }

    async fn shards(&self) -> Result<Vec<i32>, StoreError> {
        let shards = query_scalar("select shard_id from oncebox_shard order by shard_id");
        Ok(shards.fetch_all(self.pool()).await?)
    }
}

impl SqliteSession {
    fn fenced(&self, what: &str) -> StoreError {
        let Self { owner, fence: Fence { epoch, revision }, .. } = self;
        StoreError::Fenced(format!("{what}: the lease of `{owner}` (epoch {epoch}, revision {revision}) is gone"))
    }

    /// Checks the first row of an answer: the shard must be as this session left it, and the
    /// sequence of positions not behind the cursor.
    fn check_fence(&self, row: &SqliteRow) -> Result<(), StoreError> {
        let seen = Fence { epoch: row.try_get(0)?, revision: row.try_get(1)? };
        self.fence.check(seen).map_err(|lost| self.fenced(&lost))?;
        let (last, scanned_to): (i64, i64) = (row.try_get(2)?, row.try_get(3)?);
        if last < scanned_to {
            return Err(StoreError::Refused(format!(
                "sequence behind cursor: the outbox has given positions up to {last}, but the relay has passed {scanned_to}; \
                 messages enqueued now are refused; run `oncebox doctor --fix`"
            )));
        }
        Ok(())
    }
}

#[async_trait]
impl RelaySession for SqliteSession {
    fn epoch(&self) -> i64 {
        self.fence.epoch
    }

    async fn read(&mut self, rows_max: usize) -> Result<ReadBatch, StoreError> {
        // One row more than asked for tells whether there are more.
        let limit = i64::try_from(rows_max).unwrap_or(i64::MAX - 1) + 1;
        let read = query(READ).bind(self.read_to).bind(self.shard).bind(limit).bind(self.read_bytes);
        let mut rows = Vec::new();
        let (mut bytes, mut more, mut seen) = (0, false, false);
        {
            let mut stream = read.fetch(self.store.pool());
            while let Some(row) = stream.try_next().await? {
                if !seen {
                    self.check_fence(&row)?;
                    seen = true;
                }
                if row.try_get::<Option<i64>, _>(4)?.is_none() {
                    break;
                }
                if rows.len() == rows_max || bytes >= self.read_bytes {
                    more = true;
                    break;
                }
                bytes += row.try_get::<i64, _>(14)?;
                rows.push(outbox_row(&row, 4)?);
            }
        }
        if !seen {
            return Err(self.fenced("the shard is gone"));
        }
        self.batches += 1;
        if let Some(last) = rows.last() {
            self.read_to = last.position;
            let positions = rows.iter().map(|row| row.position).collect();
            self.window.push_back(Batch { number: self.batches, positions });
        }
        Ok(ReadBatch { batch: self.batches, rows, more, saw_all: !more, needs_checkpoint: false })
    }

    async fn checkpoint(&mut self, mark: Mark) -> Result<(), StoreError> {
        self.write_mark(&mark).await
    }

    async fn diverted(&mut self, limit: usize) -> Result<Vec<DivertedRow>, StoreError> {
        outbox::diverted(&mut *self.store.reader().await?, outbox::ALL_BUCKETS, limit).await
    }

    async fn has_dead(&mut self, rows: usize) -> Result<bool, StoreError> {
        outbox::has_dead(&mut *self.store.reader().await?, rows).await
    }

    async fn requests(&mut self, after: i64, limit: usize) -> Result<Vec<OperatorRequest>, StoreError> {
        outbox::requests(&mut *self.store.reader().await?, outbox::ALL_BUCKETS, after, limit).await
    }

    async fn held(&mut self, positions: &[i64]) -> Result<Vec<OutboxRow>, StoreError> {
        let stored = query(HELD).bind(positions_json(positions)).bind(self.read_bytes);
        stored.fetch(self.store.pool()).map(|row| outbox_row(&row?, 0)).try_collect().await
    }

    async fn release(self: Box<Self>) -> Result<(), StoreError> {
        match self.store.run_alone(outbox::release(self.shard, self.fence)).await? {
            1 => Ok(()),
            _ => Err(self.fenced("release")),
        }
    }
}

/// A row whose columns from `at` on are position, bucket, message_id, topic, key, kind, headers,
/// payload, content_type and created_at.
fn outbox_row(row: &SqliteRow, at: usize) -> Result<OutboxRow, StoreError> {
    let (headers, trace) = headers_from_json(&row.try_get::<Vec<u8>, _>(at + 6)?)?;
    Ok(OutboxRow {
        position: row.try_get(at)?,
        bucket: row.try_get(at + 1)?,
        message: OutgoingMessage {
            id: uuid_from_text(&row.try_get::<String, _>(at + 2)?)?,
            topic: row.try_get(at + 3)?,
            key: row.try_get(at + 4)?,
            kind: row.try_get(at + 5)?,
            headers,
            payload: row.try_get(at + 7)?,
            content_type: row.try_get(at + 8)?,
            trace,
            created_at: (row as &dyn sql::Row).get(at + 9)?,
        },
    })
}
