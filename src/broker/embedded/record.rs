//! Rows of the log: their positions, and how they are written and read.
//!
//! Guarantees: a position has partition and offset in one number, so that a partition is one range
//! of one tree. A read is bounded in rows and bytes, however large the rows are.

use std::sync::Arc;

use chrono::DateTime;
use futures_util::{StreamExt, TryStreamExt};
use sha2::{Digest, Sha256};
use sqlx::Row;
use sqlx::sqlite::{SqliteConnection, SqliteRow};

use crate::broker::envelope;
use crate::message::{Arrived, Coordinates, OutgoingMessage};

/// The low 40 bits of a position are the offset; the bits above are the partition's id.
const OFFSET_BITS: u32 = 40;
/// Rows per statement. Statements of the first size take most rows of a large batch.
const CHUNKS: [usize; 3] = [100, 10, 1];

pub(super) fn position(partition_id: i64, offset: i64) -> i64 {
    partition_id << OFFSET_BITS | offset
}

/// The hash that selects the partition of a message: of its key, or of its id where it has no key.
/// It is always the same for a key.
pub(super) fn partition_hash(message: &OutgoingMessage) -> u32 {
    let digest = match &message.key {
        Some(key) => Sha256::digest(key.as_bytes()),
        None => Sha256::digest(message.id.as_bytes()),
    };
    u32::from_be_bytes([digest[0], digest[1], digest[2], digest[3]])
}

#[derive(Debug)]
pub(super) struct NewRecord {
    pub(super) position: i64,
    pub(super) key: Option<Vec<u8>>,
    pub(super) headers: String,
    pub(super) payload: Vec<u8>,
}

impl NewRecord {
    /// Makes a row of a message. The transaction sets its position.
    pub(super) fn of(message: OutgoingMessage, source: &str) -> Self {
        let headers = envelope::headers(&message, source);
        Self {
            position: 0,
            headers: serde_json::Value::from_iter(headers.into_iter().map(|(name, value)| vec![name, value]))
                .to_string(),
            key: message.key.map(String::into_bytes),
            payload: message.payload,
        }
    }
}

/// Inserts rows whose positions are set.
pub(super) async fn insert(
    connection: &mut SqliteConnection,
    records: &[NewRecord],
    now: i64,
) -> Result<(), sqlx::Error> {
    let mut left = records.iter();
    while left.len() > 0 {
        let size = CHUNKS.into_iter().find(|size| *size <= left.len()).unwrap_or(1);
        let mut statement = sqlx::query(insert_sql(size));
        for record in left.by_ref().take(size) {
            let (key, headers, payload) = (record.key.as_deref(), record.headers.as_str(), record.payload.as_slice());
            statement = statement.bind(record.position).bind(key).bind(headers).bind(payload).bind(now);
        }
        statement.execute(&mut *connection).await?;
    }
    Ok(())
}

/// The statement for so many rows, built once: sqlx keeps prepared statements by their text.
fn insert_sql(rows: usize) -> sqlx::AssertSqlSafe<Arc<str>> {
    use std::sync::OnceLock;
    static BUILT: [OnceLock<Arc<str>>; CHUNKS.len()] = [const { OnceLock::new() }; CHUNKS.len()];
    let index = CHUNKS.iter().position(|size| *size == rows).unwrap_or(CHUNKS.len() - 1);
    let sql = BUILT[index].get_or_init(|| {
        let values = vec!["(?, ?, ?, ?, ?)"; CHUNKS[index]].join(", ");
        format!("insert into record (position, key, headers, payload, appended_at) values {values}").into()
    });
    sqlx::AssertSqlSafe(Arc::clone(sql))
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Range<'a> {
    pub(super) topic: &'a str,
    pub(super) partition_id: i64,
    pub(super) number: i32,
    /// The first offset to read.
    pub(super) from: i64,
    /// The first offset that is not read.
    pub(super) to: i64,
}

/// The bytes of a record as `Arrived::weight` counts them. Lengths are read without the payloads.
macro_rules! weight {
    () => {
        "octet_length(payload) + octet_length(headers) + coalesce(octet_length(key), 0) + 200"
    };
}

/// Reads a range: at most `rows_max` rows, and none after the row that reaches `bytes_max`.
pub(super) async fn read(
    connection: &mut SqliteConnection,
    range: Range<'_>,
    rows_max: usize,
    bytes_max: usize,
) -> Result<Vec<Arrived>, sqlx::Error> {
    // The statement ends at the bound itself, because the thread of the connection copies many rows
    // ahead of their reader. A running sum is dear, so it is made only where all rows together
    // reach the bound.
    let rows = sqlx::query(
        concat!(
            "select position, key, headers, payload, appended_at from record where position >= ?1 and position <= case \
             when (select sum(weight) from (select ",
            weight!(),
            " as weight from record where position >= ?1 and position < ?2 order by position limit ?3)) < ?4 then ?2 - 1 \
             else coalesce((select position from (select position, sum(",
            weight!(),
            ") over (order by position rows unbounded preceding) as bytes from record where position >= ?1 and position < ?2) \
               where bytes >= ?4 limit 1), ?2 - 1) end \
             order by position limit ?3"
        ),
    )
    .bind(position(range.partition_id, range.from))
    .bind(position(range.partition_id, range.to))
    .bind(i64::try_from(rows_max).unwrap_or(i64::MAX))
    .bind(i64::try_from(bytes_max).unwrap_or(i64::MAX))
    .fetch(connection);
    rows.map(|row| arrive(&row?, range)).try_collect().await
}

fn arrive(row: &SqliteRow, range: Range<'_>) -> Result<Arrived, sqlx::Error> {
    let headers: Vec<(String, String)> =
        serde_json::from_str(row.try_get::<&str, _>(2)?).map_err(|error| sqlx::Error::Decode(Box::new(error)))?;
    let position: i64 = row.try_get(0)?;
    Ok(envelope::arrive(
        row.try_get(1)?,
        headers.into_iter().map(|(name, value)| (name, value.into_bytes())).collect(),
        Some(row.try_get(3)?),
        DateTime::from_timestamp_millis(row.try_get(4)?),
        Coordinates {
            place: range.topic.to_owned(),
            partition: range.number,
            offset: position & ((1 << OFFSET_BITS) - 1),
        },
    ))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::atomic::{AtomicU64, Ordering};

    use sqlx::Connection;

    use super::*;

    #[test]
    fn a_partition_is_one_range_of_positions() {
        assert!(position(1, (1 << OFFSET_BITS) - 1) < position(2, 0));
        assert_eq!(position(7, 5) & ((1 << OFFSET_BITS) - 1), 5);
    }

    #[test]
    fn every_size_of_batch_is_made_of_known_statements() {
        for size in CHUNKS {
            assert_eq!(insert_sql(size).0.matches("(?, ?, ?, ?, ?)").count(), size);
        }
    }

    /// Shown by: a statement that walks on behind its bounds.
    #[tokio::test]
    async fn g11_a_read_takes_no_row_beyond_its_bounds_out_of_the_file() {
        let mut file = SqliteConnection::connect("sqlite::memory:").await.unwrap();
        sqlx::raw_sql(include_str!("schema.sql")).execute(&mut file).await.unwrap();
        let rows = "with recursive o (n) as (select 0 union all select n + 1 from o where n < 999) \
                    insert into record select 1 << 40 | n, x'6b', '[]', zeroblob(1000), 0 from o";
        sqlx::raw_sql(rows).execute(&mut file).await.unwrap();
        let steps = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&steps);
        file.lock_handle().await.unwrap().set_progress_handler(1, move || {
            counted.fetch_add(1, Ordering::Relaxed);
            true
        });
        let range = Range { topic: "t", partition_id: 1, number: 0, from: 5, to: 900 };
        // A row has 1,203 bytes: payload, key, headers, and what is not counted one by one.
        for (rows_max, bytes_max, read_rows) in [(100, 2_406, 2), (100, 2_407, 3), (4, usize::MAX, 4), (100, 1, 1)] {
            let before = steps.load(Ordering::Relaxed);
            let read = read(&mut file, range, rows_max, bytes_max).await.unwrap();
            let offsets: Vec<i64> = read.iter().map(|row| row.coordinates.offset).collect();
            assert_eq!(offsets, (5..5 + read_rows).collect::<Vec<_>>());
            // The answer shows that the thread has ended the read.
            file.ping().await.unwrap();
            let steps = steps.load(Ordering::Relaxed) - before;
            // The lengths of 100 rows are looked at, and not those of all 895.
            assert!(steps < 5_000, "{steps} steps");
        }
        assert_eq!(read(&mut file, range, 2_000, usize::MAX).await.unwrap().len(), 895);
    }
}
