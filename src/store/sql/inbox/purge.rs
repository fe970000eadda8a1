//! One step of a purge: a page of rows, and in one transaction the bound and those that may go
//! (R31).
//!
//! Guarantees: a page is bounded, read without a lock, and found by an index that begins with what
//! may go: ids that carry a time by the key where a database has them apart, others by the time of
//! receipt; rows go by exact id (R11), and only while they are still those of the past; the bound
//! is there when the first of them is gone.
//!
//! Not here: whole partitions at once, which is for all consumers together.

use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::OwnInbox;
use crate::error::StoreError;
use crate::message::MessageId;
use crate::policy::db_time::DbTime;
use crate::policy::horizon::purge_row;
use crate::store::inbox::first_id_at;
use crate::store::sql::{Statement, sql};
use crate::store::{ConsumerId, Purged, time_in_id};

/// The inbox; on PostgreSQL ids that carry a time stand apart.
macro_rules! inbox {
    () => {
        "oncebox.inbox{pg: {if timed: _timed}{if untimed: _untimed}}"
    };
}

/// On SQLite an id that carries no time: as the index says it, word for word.
macro_rules! untimed {
    () => {
        "(substr(message_id, 7, 1) not between x'70' and x'7f' or substr(message_id, 9, 1) not between x'80' and x'bf')"
    };
}

/// Id, time of receipt, and whether its message still waits or is dead.
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

/// Timed ids of the past only: on PostgreSQL the others are in later partitions, which no page
/// touches.
pub(in crate::store) const PAGE_TIMED: &str = page!(concat!(
    "i.message_id > :after and i.message_id < :first {lite: and not ",
    untimed!(),
    "} order by i.message_id"
));

/// What was received first. Only rows that are kept are passed over by their place; what may go is
/// gone with its page.
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
    DateTime::from_timestamp_micros(time.micros()).unwrap_or_default()
}

/// What of the rows of a page may go.
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
    // Timed ids come first; behind the last of them the id of nobody stands for the beginning of
    // the others.
    let nobody = MessageId::from_uuid(Uuid::nil());
    let is_timed = S::PURGES_BY_KEY && after.is_none_or(|after| time_in_id(after).is_some());
    let of = |text| {
        let statement: Statement =
            sql(text).bind("consumer", consumer).bind("timed", is_timed).bind("untimed", !is_timed);
        statement.bind("below", time(below))
    };
    let mut last = after.unwrap_or(nobody);
    let mut reader = store.reader().await?;
    let mut page = of(if is_timed { PAGE_TIMED } else { PAGE_RECEIVED }).bind("after", last.uuid());
    if is_timed {
        page = page.bind("first", first_id_at(below).uuid());
    } else {
        let stood = reader.rows(of(RECEIVED).bind("after", last.uuid())).await?;
        let from = stood.first().map(|row| row.get::<DateTime<Utc>>(0)).transpose()?;
        page = page.bind("from", from);
    }
    let rows = reader.rows(page.bind("most", i64::try_from(rows_max).unwrap_or(i64::MAX))).await?;
    // The transaction below needs a connection of its own, perhaps the only one.
    drop(reader);
    let mut past = Past::default();
    for row in &rows {
        let id = MessageId::from_uuid(row.get(0)?);
        let of_row = purge_row(time_in_id(id), row.get(1)?, below);
        let is_kept: bool = row.get(2)?;
        if let (Some(of_row), false) = (of_row, is_kept) {
            past.ids.push(id.uuid());
            past.bound = past.bound.max(Some(of_row));
        }
        // What was received long ago may have an id of the present: it stays, and is passed over.
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
