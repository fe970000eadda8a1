//! One step of a purge: a page of rows, those of it that may go, and the bound, in one transaction
//! (R31).
//!
//! Guarantees: a page is read without the write lock, and found by an index that begins with what
//! may go: timed ids by the key, others by the time of receipt; rows go by exact id, and only while
//! they are still those of the past; the bound is there when the first of them is gone.

use sqlx::{query, query_as};

use super::{bytes_of, message_id};
use crate::error::StoreError;
use crate::message::MessageId;
use crate::policy::db_time::DbTime;
use crate::policy::horizon::purge_row;
use crate::store::inbox::first_id_at;
use crate::store::sqlite::{SqliteStore, parts};
use crate::store::{Base, ConsumerId, Purged, time_in_id};

/// An id that carries no time: as the index says it, word for word.
macro_rules! untimed {
    () => {
        "(substr(message_id, 7, 1) not between x'70' and x'7f' or substr(message_id, 9, 1) not between x'80' and x'bf')"
    };
}

/// Id, time of receipt, and whether its message still waits or is dead.
macro_rules! page {
    ($rest:expr) => {
        concat!(
            "select message_id, received_at, message_id in (select message_id from oncebox_waiting where consumer_id = ?1) ",
            "from oncebox_inbox where consumer_id = ?1 and ",
            $rest
        )
    };
}

/// Timed ids of the past, by the key.
pub(in crate::store::sqlite) const PAGE_TIMED: &str =
    page!(concat!("message_id > ?2 and message_id < ?3 and not ", untimed!(), " order by message_id limit ?4"));

/// What was received first. Only rows that are kept are passed over by their place; what may go is
/// gone with its page.
pub(in crate::store::sqlite) const PAGE_UNTIMED: &str = page!(concat!(
    "received_at < ?3 and (received_at, message_id) > (coalesce((select k.received_at from oncebox_inbox as k ",
    "where k.consumer_id = ?1 and k.message_id = ?2), -1), ?2) and ",
    untimed!(),
    " order by received_at, message_id limit ?4"
));

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
    // Timed ids come first; behind the last of them the id of nobody stands for the beginning of
    // the others.
    let nobody = MessageId::from_uuid(uuid::Uuid::nil());
    let is_timed = after.is_none_or(|after| time_in_id(after).is_some());
    let page = query_as::<_, (Vec<u8>, i64, bool)>(if is_timed { PAGE_TIMED } else { PAGE_UNTIMED });
    let page = page.bind(consumer.0).bind(after.unwrap_or(nobody).bytes().to_vec());
    let page = match is_timed {
        true => page.bind(first_id_at(below).bytes().to_vec()),
        false => page.bind(below.millis()),
    };
    let page = page.bind(i64::try_from(rows_max).unwrap_or(i64::MAX)).fetch_all(store.pool()).await?;
    let (mut past, mut bound, mut last) = (Vec::new(), None, after.unwrap_or(nobody));
    for (id, received, is_kept) in &page {
        let id = message_id(id)?;
        let of_row = purge_row(time_in_id(id), DbTime::from_millis(*received), below);
        if let (Some(of_row), false) = (of_row, *is_kept) {
            past.push(id);
            bound = bound.max(Some(of_row));
        }
        if is_timed || *is_kept {
            last = id;
        }
    }
    let next = match page.len() >= rows_max {
        true => Some(last),
        false => is_timed.then_some(nobody),
    };
    let Some(bound) = bound else { return Ok(Purged { rows: 0, next }) };
    let mut write = store.write().await?;
    query(RECORD).bind(consumer.0).bind(bound.millis()).execute(write.connection()).await?;
    let take = query(TAKE).bind(consumer.0).bind(bytes_of(&past)).bind(below.millis());
    let rows = take.execute(write.connection()).await?.rows_affected();
    write.commit().await?;
    Ok(Purged { rows, next })
}
