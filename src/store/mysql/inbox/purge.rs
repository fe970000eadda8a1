//! One step of a purge: a page of rows, those of it that may go, and the bound, in one transaction
//! (R31).
//!
//! Guarantees: a page is bounded, and found by an index that begins with what was received first;
//! rows go by exact id (R11); the bound is there when the first of them is gone.

use sqlx::{MySql, Row};

use super::super::{START, hex_list};
use crate::error::StoreError;
use crate::message::MessageId;
use crate::policy::db_time::DbTime;
use crate::policy::horizon::purge_row;
use crate::store::bounded::{Ask, Bounded, BoundedPool};
use crate::store::{ConsumerId, Purged, time_in_id};

const RECEIVED: &str = "\
select timestampdiff(microsecond, '1970-01-01', received_at) from oncebox_inbox where consumer_id = ? and message_id = ?";

/// Id, time of receipt, and whether its message still waits or is dead.
const PAGE: &str = "\
select i.message_id, timestampdiff(microsecond, '1970-01-01', i.received_at), \
       exists (select 1 from oncebox_waiting w where w.message_id = i.message_id and w.consumer_id = i.consumer_id) \
  from oncebox_inbox i force index (inbox_received) \
 where i.consumer_id = ? and i.received_at < timestampadd(microsecond, ?, '1970-01-01') \
   and i.received_at >= timestampadd(microsecond, ?, '1970-01-01') \
   and (i.received_at > timestampadd(microsecond, ?, '1970-01-01') or i.message_id > ?) \
 order by i.received_at, i.message_id limit ?";

pub(super) async fn step(
    pool: &BoundedPool<MySql>,
    consumer: ConsumerId,
    below: DbTime,
    after: Option<MessageId>,
    rows_max: usize,
) -> Result<Purged, StoreError> {
    let mut transaction = pool.begin(START).await?;
    let purged = page(&mut transaction, consumer, below, after, rows_max).await?;
    transaction.commit().await?;
    Ok(purged)
}

async fn page(
    connection: &mut Bounded<MySql>,
    consumer: ConsumerId,
    below: DbTime,
    after: Option<MessageId>,
    rows_max: usize,
) -> Result<Purged, StoreError> {
    // Only rows that are kept are passed over by their place; what may go is gone with its page.
    let from: Option<i64> = match after {
        None => None,
        Some(after) => {
            sqlx::query_scalar(RECEIVED).bind(consumer.0).bind(after.uuid()).optional(&mut *connection).await?
        }
    };
    let from_id = after.filter(|_| from.is_some()).map_or(uuid::Uuid::nil(), MessageId::uuid);
    let rows = sqlx::query(PAGE)
        .bind(consumer.0)
        .bind(below.micros())
        .bind(from.unwrap_or(0))
        .bind(from.unwrap_or(0))
        .bind(from_id)
        .bind(i64::try_from(rows_max).unwrap_or(i64::MAX))
        .all(&mut *connection)
        .await?;
    let (mut past, mut bound, mut last) = (Vec::new(), None, after.unwrap_or(MessageId::from_uuid(uuid::Uuid::nil())));
    for row in &rows {
        let id = MessageId::from_uuid(row.try_get(0)?);
        let of_row = purge_row(time_in_id(id), DbTime::from_micros(row.try_get(1)?), below);
        match (of_row, row.try_get::<i64, _>(2)?) {
            (Some(of_row), 0) => {
                past.push(id.bytes());
                bound = bound.max(Some(of_row));
            }
            _ => last = id,
        }
    }
    let mut gone = 0;
    if let Some(bound) = bound {
        sqlx::query(
            "update oncebox_consumer set purged_below = timestampadd(microsecond, ?, '1970-01-01') where consumer_id = ? \
             and (purged_below is null or purged_below < timestampadd(microsecond, ?, '1970-01-01'))",
        )
        .bind(bound.micros())
        .bind(consumer.0)
        .bind(bound.micros())
        .run(&mut *connection)
        .await?;
        // Only while they are still the rows of the page.
        gone = sqlx::query(
            "delete i from json_table(?, '$[*]' columns (id varchar(32) path '$')) j \
             straight_join oncebox_inbox i force index (primary) on i.consumer_id = ? and i.message_id = unhex(j.id) \
              where i.received_at < timestampadd(microsecond, ?, '1970-01-01')",
        )
        .bind(hex_list(past.iter().map(<[u8; 16]>::as_slice)))
        .bind(consumer.0)
        .bind(below.micros())
        .run(connection)
        .await?
        .rows_affected();
    }
    Ok(Purged { rows: gone, next: Some(last).filter(|_| rows.len() >= rows_max) })
}
