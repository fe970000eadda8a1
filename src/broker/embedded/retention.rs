//! Deletes rows that are old and that every group has handled, at most [`ROWS_MAX`] of them in
//! one transaction.
//!
//! Guarantees: only the beginning of a partition is deleted, so that offsets stay without holes. A
//! row that a known group has not handled is never deleted. A partition without a group keeps
//! everything, because publisher and consumer may start in any order. A look that finds nothing old
//! reads one row of each partition, because the time stands behind the payload.
//!
//! Not here: returning space to the file system. The file keeps its free pages and uses them again.

use std::time::Duration;

use sqlx::sqlite::SqliteConnection;

use super::record::position;

/// Most rows that one call of `trim` deletes. It is as many as one transaction appends, so that
/// deleting keeps up.
const ROWS_MAX: i64 = 5_000;

/// Deletes a batch of rows in the caller's transaction. Returns the number of deleted rows.
pub(super) async fn trim(tx: &mut SqliteConnection, age: Duration) -> Result<u64, sqlx::Error> {
    let partitions: Vec<(i64, i64, i64)> = sqlx::query_as(
        "select p.partition_id, p.first_offset, min(l.committed) from topic_partition p join lease l using (partition_id) \
         group by p.partition_id having min(l.committed) > p.first_offset",
    )
    .fetch_all(&mut *tx)
    .await?;
    let age = i64::try_from(age.as_millis()).unwrap_or(i64::MAX);
    let mut room = ROWS_MAX;
    for (partition_id, first, handled) in partitions {
        let end = handled.min(first + room);
        // It stops at the first young row.
        let young: Option<i64> = sqlx::query_scalar(
            "select position from record where position >= ? and position < ? \
             and appended_at > cast(unixepoch('subsec') * 1000 as integer) - ? order by position limit 1",
        )
        .bind(position(partition_id, first))
        .bind(position(partition_id, end))
        .bind(age)
        .fetch_optional(&mut *tx)
        .await?;
        let end = young.map_or(end, |young| young - position(partition_id, 0));
        if end == first {
            continue;
        }
        sqlx::query("delete from record where position >= ? and position < ?")
            .bind(position(partition_id, first))
            .bind(position(partition_id, end))
            .execute(&mut *tx)
            .await?;
        sqlx::query("update topic_partition set first_offset = ? where partition_id = ?")
            .bind(end)
            .bind(partition_id)
            .execute(&mut *tx)
            .await?;
        room -= end - first;
        if room == 0 {
            break;
        }
    }
    Ok(u64::try_from(ROWS_MAX - room).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use sqlx::Connection;

    use super::super::topology;
    use super::*;

    /// With a bound for each partition, the first transaction deleted all of them.
    #[tokio::test]
    async fn g11_one_transaction_deletes_a_bounded_number_of_rows_and_stops_at_the_first_young_one() {
        let mut file = SqliteConnection::connect("sqlite::memory:").await.unwrap();
        sqlx::raw_sql(include_str!("schema.sql")).execute(&mut file).await.unwrap();
        topology::ensure(&mut file, "t", 4).await.unwrap();
        // Of each partition 3,000 rows are handled. In the last one, all rows after the hundredth
        // are young, except one.
        let rows = "insert into consumer_group (name) values ('g'); \
                    insert into lease (group_id, partition_id, committed) select 1, partition_id, 3000 from topic_partition; \
                    update topic_partition set next_offset = 4000; \
                    with recursive o (n) as (select 0 union all select n + 1 from o where n < 3999) \
                    insert into record select partition_id << 40 | n, null, '[]', x'', \
                      case when number = 3 and n >= 100 and n <> 150 then 1 << 60 else 0 end from o, topic_partition";
        sqlx::raw_sql(rows).execute(&mut file).await.unwrap();
        let mut deleted = Vec::new();
        while deleted.last() != Some(&0) {
            deleted.push(trim(&mut file, Duration::from_secs(60)).await.unwrap());
        }
        assert_eq!(deleted, [5_000, 4_100, 0]);
        let first: Vec<(i64, i64)> = sqlx::query_as(
            "select first_offset, (select min(position) & 0xffffffffff from record where position >> 40 = partition_id) \
             from topic_partition order by number",
        )
        .fetch_all(&mut file)
        .await
        .unwrap();
        assert_eq!(first, [(3_000, 3_000), (3_000, 3_000), (3_000, 3_000), (100, 100)]);
    }
}
