//! One step of a purge: a page of rows, those of it that may go, and the bound, in one transaction
//! (R31).
//!
//! Guarantees: a page is read without the write lock; rows go by exact id, and only while they are
//! still those of the past; the bound is there when the first of them is gone.

use sqlx::{query, query_as};

use super::{bytes_of, message_id};
use crate::error::StoreError;
use crate::message::MessageId;
use crate::policy::db_time::DbTime;
use crate::policy::horizon::purge_row;
use crate::store::inbox::KeyRange;
use crate::store::sqlite::{SqliteStore, parts};
use crate::store::{Base, ConsumerId, Purged, time_in_id};

/// A page by the key, and of each row whether its message still waits or is dead.
const PAGE: &str = "\
select message_id, received_at, message_id in (select message_id from oncebox_waiting where consumer_id = ?1) \
  from oncebox_inbox where consumer_id = ?1 and message_id > ?2 and message_id < ?3 order by message_id limit ?4";

const TAKE: &str = concat!(
    "with recursive ",
    parts!("?2", 16),
    " delete from oncebox_inbox where consumer_id = ?1 and received_at < ?3 ",
    "and message_id in (select substr(?2, 1 + i * 16, 16) from n)"
);

const RECORD: &str = "update oncebox_consumer set purged_below = ?2 where consumer_id = ?1 \
                      and (purged_below is null or purged_below < ?2)";

pub(super) async fn step(
    store: &SqliteStore,
    consumer: ConsumerId,
    below: DbTime,
    after: Option<MessageId>,
    rows_max: usize,
) -> Result<Purged, StoreError> {
    let range = KeyRange::of(below, after);
    let page = query_as::<_, (Vec<u8>, i64, bool)>(PAGE)
        .bind(consumer.0)
        .bind(range.after.bytes().to_vec())
        .bind(range.before.bytes().to_vec())
        .bind(i64::try_from(rows_max).unwrap_or(i64::MAX))
        .fetch_all(store.pool())
        .await?;
    let (mut past, mut bound, mut last) = (Vec::new(), None, None);
    for (id, received, is_kept) in &page {
        let id = message_id(id)?;
        let of_row = purge_row(time_in_id(id), DbTime::from_millis(*received), below);
        if let (Some(of_row), false) = (of_row, *is_kept) {
            past.push(id);
            bound = bound.max(Some(of_row));
        }
        last = Some(id);
    }
    let next = if page.len() >= rows_max { last } else { range.then };
    let Some(bound) = bound else { return Ok(Purged { rows: 0, next }) };
    let mut write = store.write().await?;
    query(RECORD).bind(consumer.0).bind(bound.millis()).execute(write.connection()).await?;
    let take = query(TAKE).bind(consumer.0).bind(bytes_of(&past)).bind(below.millis());
    let rows = take.execute(write.connection()).await?.rows_affected();
    write.commit().await?;
    Ok(Purged { rows, next })
}
