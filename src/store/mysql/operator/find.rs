//! Dead messages of both places, as an operator names them.

use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::mysql::MySqlRow;
use sqlx::{MySql, QueryBuilder, Row};

use super::super::door::headers_from_json;
use super::super::{text, waiting};
use super::count_of;
use crate::error::StoreError;
use crate::message::Message;
use crate::store::bounded::{Ask, Bounded};
use crate::store::{ConsumerId, DeadFilter, DeadMessage, DeadPlace, DeadState, HistoryEntry};

/// How many a list shows unless told otherwise.
const LIST_DEFAULT: usize = 100;

/// A dead message and the row it stands in.
pub(super) struct Found {
    pub(super) dead: DeadMessage,
    pub(super) row: FoundRow,
}

pub(super) enum FoundRow {
    Outbox { position: i64, age: Duration },
    Consumer { sequence: i64, consumer: ConsumerId, holds: bool, message: Box<Message> },
}

/// Dead messages of both places, oldest first.
pub(super) async fn find(connection: &mut Bounded<MySql>, filter: &DeadFilter) -> Result<Vec<Found>, StoreError> {
    let limit = if filter.limit == 0 { LIST_DEFAULT } else { filter.limit };
    let (wants_outbox, wants_consumers) = match filter.consumer.as_deref() {
        None => (true, true),
        Some("outbox") => (true, false),
        Some(_) => (false, true),
    };
    let number = filter.number.as_deref().map(parse_number).transpose()?;
    let row_number = |prefix: char| match number {
        None => Some(None),
        Some((given, number)) => (given == prefix).then_some(Some(number)),
    };
    let mut found = Vec::new();
    for state in filter.states() {
        if let Some(position) = row_number('o').filter(|_| wants_outbox && *state != DeadState::Waiting) {
            found.extend(find_in_outbox(connection, filter, *state, position, limit).await?);
        }
        if let Some(sequence) = row_number('c').filter(|_| wants_consumers) {
            found.extend(find_of_consumers(connection, filter, *state, sequence, limit).await?);
        }
    }
    found.sort_by_key(|found| found.dead.dead_at);
    found.truncate(limit);
    Ok(found)
}

/// The number that a list shows.
fn parse_number(given: &str) -> Result<(char, i64), StoreError> {
    let parsed = ['o', 'c'].into_iter().find_map(|prefix| Some((prefix, given.strip_prefix(prefix)?.parse().ok()?)));
    parsed.ok_or_else(|| {
        StoreError::Refused(format!(
            "`{given}` is no number of a dead message: use `o17` or `c9`, as `oncebox dead list` shows them"
        ))
    })
}

async fn find_in_outbox(
    connection: &mut Bounded<MySql>,
    filter: &DeadFilter,
    state: DeadState,
    position: Option<i64>,
    limit: usize,
) -> Result<Vec<Found>, StoreError> {
    let mut query: QueryBuilder<MySql> = QueryBuilder::new(
        "select d.position, d.message_id, d.topic, d.`key`, d.kind, d.reason, d.attempts, d.diverted_at, d.requested, d.history, \
         d.headers, d.payload, d.content_type, timestampdiff(microsecond, d.created_at, utc_timestamp(6)) as age_micros, \
         if(d.holds, (select count(*) from oncebox_outbox_dead b \
           where b.lane_id = d.lane_id and b.position > d.position and b.state = 'held'), 0) as behind \
         from oncebox_outbox_dead d where d.state = ",
    );
    query.push(if state == DeadState::Held { "'held'" } else { "'dead'" });
    if let Some(position) = position {
        query.push(" and d.position = ").push_bind(position);
    }
    push_filter(&mut query, 'd', filter);
    if let Some(reason) = &filter.reason {
        query.push(" and d.reason = ").push_bind(reason.clone());
    }
    query.push(" order by d.position limit ").push_bind(i64::try_from(limit).unwrap_or(i64::MAX));
    let rows = query.build().persistent(false).all(connection).await?;
    rows.iter().map(|row| found_in_outbox(row, state)).collect()
}

async fn find_of_consumers(
    connection: &mut Bounded<MySql>,
    filter: &DeadFilter,
    state: DeadState,
    sequence: Option<i64>,
    limit: usize,
) -> Result<Vec<Found>, StoreError> {
    let mut query: QueryBuilder<MySql> = QueryBuilder::new(
        "select w.sequence, w.consumer_id, c.name as consumer, w.lane_id is not null as holds, w.message_id, w.id_text, w.topic, w.`key`, \
         w.kind, w.headers, w.payload, w.tombstone, w.content_type, w.source, w.message_time, w.traceparent, w.tracestate, w.place, \
         w.partition_no, w.offset_no, w.attempts, w.reason, w.error, w.history, coalesce(w.dead_at, w.stored_at) as dead_at, w.due_at, \
         if(w.lane_id is null or (w.state = 'waiting' and w.due_at is null), 0, (select count(*) from oncebox_waiting b \
           where b.consumer_id = w.consumer_id and b.lane_id = w.lane_id and b.sequence > w.sequence)) as behind \
         from oncebox_waiting w join oncebox_consumer c on c.consumer_id = w.consumer_id where ",
    );
    let behind_a_dead_one = "exists (select 1 from oncebox_waiting d \
                             where d.consumer_id = w.consumer_id and d.lane_id = w.lane_id and d.state = 'dead')";
    match state {
        DeadState::Dead => query.push("w.state = 'dead'"),
        DeadState::Held => query.push("w.state = 'waiting' and ").push(behind_a_dead_one),
        DeadState::Waiting => query.push("w.state = 'waiting' and not ").push(behind_a_dead_one),
    };
    if let Some(sequence) = sequence {
        query.push(" and w.sequence = ").push_bind(sequence);
    }
    if let Some(consumer) = &filter.consumer {
        query.push(" and c.name = ").push_bind(consumer.clone().into_bytes());
    }
    push_filter(&mut query, 'w', filter);
    if let Some(reason) = &filter.reason {
        query.push(" and w.reason = ").push_bind(reason.clone().into_bytes());
    }
    query.push(" order by w.sequence limit ").push_bind(i64::try_from(limit).unwrap_or(i64::MAX));
    let rows = query.build().persistent(false).all(connection).await?;
    rows.iter().map(|row| found_of_consumer(row, state)).collect()
}

fn push_filter(query: &mut QueryBuilder<MySql>, table: char, filter: &DeadFilter) {
    let mut equal = |column: &str, value: Vec<u8>| {
        query.push(format!(" and {table}.{column} = ")).push_bind(value);
    };
    if let Some(id) = filter.message_id {
        equal("message_id", id.into_bytes().to_vec());
    }
    if let Some(topic) = &filter.topic {
        equal("topic", topic.clone().into_bytes());
    }
    if let Some(key) = &filter.key {
        equal("`key`", key.clone().into_bytes());
    }
}

fn found_in_outbox(row: &MySqlRow, state: DeadState) -> Result<Found, StoreError> {
    let position: i64 = row.try_get("position")?;
    let age: i64 = row.try_get("age_micros")?;
    let key: Option<Vec<u8>> = row.try_get("key")?;
    let reason: Option<String> = row.try_get("reason")?;
    let dead = DeadMessage {
        number: format!("o{position}"),
        state,
        place: DeadPlace::Outbox,
        message_id: row.try_get("message_id")?,
        sent_id: None,
        topic: text("topic", row.try_get("topic")?)?,
        key: key.map(|key| text("key", key)).transpose()?,
        kind: text("kind", row.try_get("kind")?)?,
        error: reason.clone(),
        reason: reason.unwrap_or_else(|| "stands behind another one of its key".to_owned()),
        attempts: row.try_get("attempts")?,
        dead_at: row.try_get("diverted_at")?,
        next_try: None,
        behind: count_of(row.try_get("behind")?),
        requested: row.try_get("requested")?,
        history: history(row)?,
        headers: headers_from_json(row.try_get("headers")?)?,
        payload: row.try_get("payload")?,
        content_type: row.try_get("content_type")?,
    };
    let age = Duration::from_micros(u64::try_from(age).unwrap_or(0));
    Ok(Found { dead, row: FoundRow::Outbox { position, age } })
}

fn found_of_consumer(row: &MySqlRow, state: DeadState) -> Result<Found, StoreError> {
    let sequence: i64 = row.try_get("sequence")?;
    let message = waiting::message(row)?;
    let lossy = |(name, value): &(String, Vec<u8>)| (name.clone(), String::from_utf8_lossy(value).into_owned());
    let next_try: Option<DateTime<Utc>> = row.try_get("due_at")?;
    let reason: Option<Vec<u8>> = row.try_get("reason")?;
    let reason = reason.map(|reason| text("reason", reason)).transpose()?;
    let dead = DeadMessage {
        number: format!("c{sequence}"),
        state,
        place: DeadPlace::Consumer(text("name", row.try_get("consumer")?)?),
        message_id: message.id.uuid(),
        sent_id: DeadMessage::sent_id(message.id.uuid(), message.id_text.clone()),
        topic: message.topic.clone(),
        key: message.key_text().map(str::to_owned),
        kind: message.kind.clone(),
        reason: reason.unwrap_or_else(|| state.reason_of_consumer(next_try.is_some()).to_owned()),
        error: row.try_get("error")?,
        attempts: row.try_get("attempts")?,
        dead_at: row.try_get::<DateTime<Utc>, _>("dead_at")?,
        next_try,
        behind: count_of(row.try_get("behind")?),
        requested: None,
        history: history(row)?,
        headers: message.headers.iter().map(lossy).collect(),
        payload: message.payload.clone(),
        content_type: message.content_type.clone(),
    };
    let consumer = ConsumerId(row.try_get("consumer_id")?);
    let holds: bool = row.try_get("holds")?;
    Ok(Found { dead, row: FoundRow::Consumer { sequence, consumer, holds, message: Box::new(message) } })
}

fn history(row: &MySqlRow) -> Result<Vec<HistoryEntry>, StoreError> {
    let json: String = row.try_get("history")?;
    serde_json::from_str(&json)
        .map_err(|error| StoreError::Corrupt(format!("the history of a row is not readable: {error}")))
}
