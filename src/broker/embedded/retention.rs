//! Deletes rows that are old and that every group has handled, at most [`ROWS_MAX`] of each
//! partition in one transaction.
//!
//! Guarantees: only the beginning of a partition is deleted, so that offsets stay without holes. A
//! row that a known group has not handled is never deleted. A partition without a group keeps
//! everything, because publisher and consumer may start in any order.
//!
//! Not here: returning space to the file system. The file keeps its free pages and uses them again.

use std::time::Duration;

use sqlx::sqlite::SqliteConnection;

use super::record::position;

/// Most rows that one call of `trim` deletes from one partition.
const ROWS_MAX: i64 = 1_000;

/// Deletes a batch of each partition in the caller's transaction. Returns the number of deleted
/// rows.
pub(super) async fn trim(tx: &mut SqliteConnection, age: Duration) -> Result<u64, sqlx::Error> {
    let partitions: Vec<(i64, i64, i64)> = sqlx::query_as(
        "select p.partition_id, p.first_offset, min(l.committed) from topic_partition p join lease l using (partition_id) \
         group by p.partition_id having min(l.committed) > p.first_offset",
    )
    .fetch_all(&mut *tx)
    .await?;
    let age = i64::try_from(age.as_millis()).unwrap_or(i64::MAX);
    let mut deleted = 0;
    for (partition_id, first, handled) in partitions {
        let rows: Vec<(i64, bool)> = sqlx::query_as(
            "select position, appended_at <= cast(unixepoch('subsec') * 1000 as integer) - ? from record \
             where position >= ? and position < ? order by position limit ?",
        )
        .bind(age)
        .bind(position(partition_id, first))
        .bind(position(partition_id, handled))
        .bind(ROWS_MAX)
        .fetch_all(&mut *tx)
        .await?;
        let Some((last, _)) = rows.iter().take_while(|(_, is_old)| *is_old).last() else { continue };
        let gone = sqlx::query("delete from record where position >= ? and position <= ?")
            .bind(position(partition_id, first))
            .bind(last)
            .execute(&mut *tx)
            .await?;
        sqlx::query("update topic_partition set first_offset = ? where partition_id = ?")
            .bind(last - position(partition_id, 0) + 1)
            .bind(partition_id)
            .execute(&mut *tx)
            .await?;
        deleted += gone.rows_affected();
    }
    Ok(deleted)
}
