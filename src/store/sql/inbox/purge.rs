//! One step of a purge of the inbox: reads a page of rows, then records the bound and deletes the
//! rows that may go, in one transaction (R31).
//!
//! Guarantees: a page is bounded, read without a lock, and found by an index that has the oldest
//! rows first: the one by time of receipt, but on PostgreSQL and SQLite the key for timed ids (ids
//! that carry a time). Rows are deleted by exact id (R11), and only if they were still received
//! before the bound. The bound is recorded before the first row is gone.
//!
//! Not here: dropping whole partitions, which purges all consumers together.

use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::OwnInbox;
use crate::error::StoreError;
use crate::inbox::port::{ConsumerId, Purged, first_id_at, time_in_id};
use crate::inbox::rules::horizon::purge_row;
use crate::message::MessageId;
use crate::store::sql::sql;
use crate::time::db_time::DbTime;

/// The table of the inbox. PostgreSQL has a second one for timed ids.
macro_rules! inbox {
    () => {
        "oncebox.inbox{pg: {if timed: _timed}{unless timed: _untimed}}"
    };
}

/// On SQLite an id that carries no time. It is the condition of the index, word for word, so that
/// SQLite uses that index.
macro_rules! untimed {
    () => {
        "(substr(message_id, 7, 1) not between x'70' and x'7f' or substr(message_id, 9, 1) not between x'80' and x'bf')"
    };
}

/// A page of rows: id, time of receipt, and whether the message still waits or is dead.
macro_rules! page {
    ($rest:expr) => {
        concat!(
            "select i.message_id, {micros i.received_at}, \
               {pg my: exists (select 1 from oncebox.waiting w where w.message_id = i.message_id and w.consumer_id = i.consumer_id)}\
               {lite: i.message_id in (select w.message_id from oncebox.waiting w where w.consumer_id = :consumer)} from ",
            inbox!(),
            " i {my: force index (inbox_received)} where i.consumer_id = :consumer and ",
            $rest,
            " limit :most"
        )
    };
}

/// Timed ids of the past only. On PostgreSQL the other timed ids are in later partitions, which no
/// page reads.
pub(in crate::store) const PAGE_TIMED: &str = page!(concat!(
    "i.message_id > :after and i.message_id < :first {lite: and not ",
    untimed!(),
    "} order by i.message_id"
));

/// The rows that were received first. Each page starts after the last row that was kept; rows that
/// may go were deleted with their page.
pub(in crate::store) const PAGE_RECEIVED: &str = page!(concat!(
    "i.received_at < :below {if from: and i.received_at >= :from and (i.received_at > :from or i.message_id > :after)} \
     {lite: and ",
    untimed!(),
    "} order by i.received_at, i.message_id"
));

const RECEIVED: &str =
    concat!("select received_at from ", inbox!(), " where consumer_id = :consumer and message_id = :after");

const RECORD: &str = "update oncebox.consumer set purged_below = :bound \
    where consumer_id = :consumer and (purged_below is null or purged_below < :bound)";

const TAKE: &str = concat!(
    "delete {my: i} from {my: json_table(:ids, '$[*]' columns (id varchar(32) path '$')) j straight_join }",
    inbox!(),
    " {my: i force index (primary) on i.consumer_id = :consumer and i.message_id = unhex(j.id)} \
     where {pg lite: consumer_id = :consumer and message_id {in ids :ids} and} received_at < :below"
);

fn time(time: DbTime) -> DateTime<Utc> {
    DateTime::from_timestamp_micros(time.micros).unwrap_or_default()
}

/// The rows of a page that may go, and the bound to record for them.
#[derive(Default)]
struct Past {
    ids: Vec<Uuid>,
    bound: Option<DbTime>,
}

pub(super) async fn step<S: OwnInbox>(
    store: &S,
    consumer: ConsumerId,
    below: DbTime,
    after: Option<MessageId>,
    rows_max: usize,
) -> Result<Purged, StoreError> {
    // Timed ids come first. After the last of them the nil id, which no message has, means the
    // beginning of the others.
    let nobody = MessageId::from(Uuid::nil());
    let is_timed = S::PURGES_BY_KEY && after.is_none_or(|after| time_in_id(after).is_some());
    let of = |text| sql(text).bind("consumer", consumer).bind("timed", is_timed).bind("below", time(below));
    let mut last = after.unwrap_or(nobody);
    let mut reader = store.reader().await?;
    let mut page = of(if is_timed { PAGE_TIMED } else { PAGE_RECEIVED }).bind("after", last.uuid());
    if is_timed {
        page = page.bind("first", first_id_at(below).uuid());
    } else {
        let stood = reader.first(of(RECEIVED).bind("after", last.uuid())).await?;
        let from = stood.map(|row| row.get::<DateTime<Utc>>(0)).transpose()?;
        page = page.bind("from", from);
    }
    let rows = reader.rows(page.bind("most", rows_max)).await?;
    // The transaction below needs a connection of its own, perhaps the only one.
    drop(reader);
    let mut past = Past::default();
    for row in &rows {
        let id = MessageId::from(row.get::<Uuid>(0)?);
        let of_row = purge_row(time_in_id(id), row.get(1)?, below);
        let is_kept: bool = row.get(2)?;
        if let (Some(of_row), false) = (of_row, is_kept) {
            past.ids.push(id.uuid());
            past.bound = past.bound.max(Some(of_row));
        }
        // A row that was received long ago may have an id of the present. It stays, and the next
        // page starts after it.
        if is_timed || is_kept || of_row.is_none() {
            last = id;
        }
    }
    let next = match rows.len() >= rows_max {
        true => Some(last),
        false => is_timed.then_some(nobody),
    };
    let Some(bound) = past.bound else { return Ok(Purged { rows: 0, next }) };
    let mut transaction = store.begin_sql().await?;
    transaction.session().run(sql(RECORD).bind("consumer", consumer).bind("bound", time(bound))).await?;
    let rows = transaction.session().run(of(TAKE).bind("ids", past.ids)).await?;
    transaction.commit().await?;
    Ok(Purged { rows, next })
}
