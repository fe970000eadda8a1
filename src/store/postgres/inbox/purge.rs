//! One step of a purge: a page of rows, those of it that may go, and the bound, in one transaction
//! (R31).
//!
//! Guarantees: a page is bounded, and found by an index that begins with what may go: timed ids by
//! the key, others by the time of receipt; rows go by exact id; the bound is there when the first
//! of them is gone.
//!
//! Not here: whole partitions at once, which is for all consumers together.

use sqlx::{Postgres, Row};
use uuid::Uuid;

use super::PostgresStore;
use crate::error::StoreError;
use crate::message::MessageId;
use crate::policy::db_time::DbTime;
use crate::policy::horizon::purge_row;
use crate::store::bounded::{Ask, Bounded};
use crate::store::{ConsumerId, Purged, time_in_id};

const RECORD: &str = "
update oncebox.consumer set purged_below = timestamptz 'epoch' + $2 * interval '1 microsecond'
 where consumer_id = $1 and (purged_below is null or purged_below < timestamptz 'epoch' + $2 * interval '1 microsecond')";

/// Id, time of receipt, and whether its message still waits or is dead.
macro_rules! page {
    ($table:literal) => {
        concat!(
            "select i.message_id, (extract(epoch from i.received_at) * 1000000)::bigint,
                    exists (select 1 from oncebox.waiting w where w.message_id = i.message_id and w.consumer_id = i.consumer_id)
               from oncebox.",
            $table,
            " i where i.consumer_id = $1 and i.message_id > $2"
        )
    };
}

/// Timed ids of the past only: the others are in later partitions, which no page touches.
const PAGE_TIMED: &str = concat!(
    page!("inbox_timed"),
    " and i.message_id < oncebox.uuid_bound(timestamptz 'epoch' + $4 * interval '1 microsecond') order by i.message_id limit $3"
);
/// What was received first. Only rows that are kept are passed over by their place; what may go is
/// gone with its page.
const PAGE_UNTIMED: &str = "
select i.message_id, (extract(epoch from i.received_at) * 1000000)::bigint,
       exists (select 1 from oncebox.waiting w where w.message_id = i.message_id and w.consumer_id = i.consumer_id)
  from oncebox.inbox_untimed i
 where i.consumer_id = $1 and i.received_at < timestamptz 'epoch' + $4 * interval '1 microsecond'
   and (i.received_at, i.message_id) > (coalesce(
         (select k.received_at from oncebox.inbox_untimed k where k.consumer_id = $1 and k.message_id = $2), '-infinity'), $2)
 order by i.received_at, i.message_id limit $3";

/// Only while they are still the rows of the page.
macro_rules! take {
    ($table:literal) => {
        concat!(
            "delete from oncebox.",
            $table,
            " i where i.consumer_id = $1 and i.message_id = any($2) and i.received_at < timestamptz 'epoch' + $3 * interval '1 microsecond'"
        )
    };
}

pub(super) async fn step(
    store: &PostgresStore,
    consumer: ConsumerId,
    below: DbTime,
    after: Option<MessageId>,
    rows_max: usize,
) -> Result<Purged, StoreError> {
    let mut tx = store.transaction().await?;
    // Timed ids come first; behind the last of them the id of nobody stands for the beginning of
    // the others.
    let is_timed = after.is_none_or(|after| after.unix_millis().is_some());
    let after = after.map_or(Uuid::nil(), MessageId::uuid);
    let purged = page(&mut tx, consumer, below, after, rows_max, is_timed).await?;
    tx.commit().await?;
    Ok(match purged.next {
        None if is_timed => Purged { next: Some(MessageId::from_uuid(Uuid::nil())), ..purged },
        _ => purged,
    })
}

async fn page(
    connection: &mut Bounded<Postgres>,
    consumer: ConsumerId,
    below: DbTime,
    after: Uuid,
    rows_max: usize,
    is_timed: bool,
) -> Result<Purged, StoreError> {
    let (select, delete) = match is_timed {
        true => (PAGE_TIMED, take!("inbox_timed")),
        false => (PAGE_UNTIMED, take!("inbox_untimed")),
    };
    let query = sqlx::query(select).bind(consumer.0).bind(after);
    let query = query.bind(i64::try_from(rows_max).unwrap_or(i64::MAX)).bind(below.micros());
    let rows = query.all(&mut *connection).await?;
    let (mut past, mut bound, mut last) = (Vec::new(), None, Some(MessageId::from_uuid(after)).filter(|_| !is_timed));
    for row in &rows {
        let id = MessageId::from_uuid(row.try_get(0)?);
        let of_row = purge_row(time_in_id(id), DbTime::from_micros(row.try_get(1)?), below);
        let is_kept: bool = row.try_get(2)?;
        if let (Some(of_row), false) = (of_row, is_kept) {
            past.push(id.uuid());
            bound = bound.max(Some(of_row));
        }
        if is_timed || is_kept {
            last = Some(id);
        }
    }
    let mut gone = 0;
    if let Some(bound) = bound {
        sqlx::query(RECORD).bind(consumer.0).bind(bound.micros()).run(&mut *connection).await?;
        let delete = sqlx::query(delete).bind(consumer.0).bind(past).bind(below.micros());
        gone = delete.run(connection).await?.rows_affected();
    }
    Ok(Purged { rows: gone, next: last.filter(|_| rows.len() >= rows_max) })
}
