//! One step of a purge: a page of rows, those of it that may go, and the bound, in one transaction
//! (R31).
//!
//! Guarantees: a page is bounded, and read by the primary key; rows go by exact id (R11); the bound
//! is there when the first of them is gone.

use sqlx::{MySql, Row};

use super::super::{START, hex_list};
use crate::error::StoreError;
use crate::message::MessageId;
use crate::policy::db_time::DbTime;
use crate::policy::horizon::purge_row;
use crate::store::bounded::{Ask, Bounded, BoundedPool};
use crate::store::inbox::KeyRange;
use crate::store::{ConsumerId, Purged, time_in_id};

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
    let range = KeyRange::of(below, after);
    let rows = sqlx::query(
        "select i.message_id, timestampdiff(microsecond, '1970-01-01', i.received_at), \
           exists (select 1 from oncebox_waiting w where w.message_id = i.message_id and w.consumer_id = i.consumer_id) \
           from oncebox_inbox i force index (primary) \
          where i.consumer_id = ? and i.message_id > ? and i.message_id < ? order by i.message_id limit ?",
    )
    .bind(consumer.0)
    .bind(range.after.uuid())
    .bind(range.before.uuid())
    .bind(i64::try_from(rows_max).unwrap_or(i64::MAX))
    .all(&mut *connection)
    .await?;
    let (mut past, mut bound, mut last) = (Vec::new(), None, None);
    for row in &rows {
        let id = MessageId::from_uuid(row.try_get(0)?);
        let of_row = purge_row(time_in_id(id), DbTime::from_micros(row.try_get(1)?), below);
        if let (Some(of_row), 0) = (of_row, row.try_get::<i64, _>(2)?) {
            past.push(id.bytes());
            bound = bound.max(Some(of_row));
        }
        last = Some(id);
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
    let next = if rows.len() >= rows_max { last } else { range.then };
    Ok(Purged { rows: gone, next })
}
