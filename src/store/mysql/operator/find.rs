//! Dead messages of both places, as an operator names them.

use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::mysql::MySqlRow;
use sqlx::{MySql, QueryBuilder, Row};

use super::super::door::headers_from_json;
use super::super::{message, text};
use super::count_of;
use crate::error::StoreError;
use crate::message::Message;
use crate::store::bounded::{Ask, Bounded};
use crate::store::operator::firsts;
use crate::store::{ConsumerId, DeadFilter, DeadMessage, DeadPlace, DeadState, HistoryEntry};

/// How many a list shows unless told otherwise.
const LIST_DEFAULT: usize = 100;

/// Each counts up to `COUNTED_MAX`. (An inner query of a statement cannot be bounded here by a row
/// of the outer one.)
const HELD_OF_LANE: &str = "\
select count(*) from (select 1 from oncebox_outbox_dead where lane_id = ? and position > ? and state = 'held' limit 10000) b";
const HELD_OF_TOPIC: &str = "\
select count(*) from (select 1 from oncebox_outbox_dead where topic = ? and position > ? and state = 'held' limit 10000) b";
const BEHIND: &str = "\
select count(*) from (select 1 from oncebox_waiting where consumer_id = ? and lane_id = ? and sequence > ? limit 10000) b";

const BEHIND_A_HEAD: &str = "\
select sequence from oncebox_waiting force index (waiting_lane) \
 where consumer_id = ? and lane_id = ? and sequence > ? and state = 'waiting' order by sequence limit ?";

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
         d.cause, d.lane_id, d.holds \
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
    let rows = query.build().persistent(false).all(&mut *connection).await?;
    let mut found = rows.iter().map(|row| found_in_outbox(row, state)).collect::<Result<Vec<_>, _>>()?;
    let for_destination = rows.iter().map(|row| Ok(row.try_get::<String, _>("cause")? == "destination"));
    let for_destination = for_destination.collect::<Result<Vec<_>, StoreError>>()?;
    let topics = found.iter().zip(&for_destination);
    let firsts = firsts(topics.map(|(found, is_held)| is_held.then_some(found.dead.topic.as_str())));
    for (at, (found, row)) in found.iter_mut().zip(&rows).enumerate() {
        let position: i64 = row.try_get("position")?;
        let lane: Option<Vec<u8>> = row.try_get("lane_id")?;
        let behind = match (firsts.contains(&at), row.try_get::<bool, _>("holds")?) {
            (true, _) => sqlx::query_scalar(HELD_OF_TOPIC).bind(found.dead.topic.as_bytes()),
            (false, true) => sqlx::query_scalar(HELD_OF_LANE).bind(lane),
            (false, false) => continue,
        };
        found.dead.behind = count_of(behind.bind(position).one(&mut *connection).await?);
    }
    Ok(found)
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
         if(w.state = 'waiting' and w.due_at is null, null, w.lane_id) as lane_id \
         from oncebox_waiting w join oncebox_consumer c on c.consumer_id = w.consumer_id where ",
    );
    if state == DeadState::Waiting && sequence.is_none() && filter.message_id.is_none() {
        let waiting = waiting_of_heads(connection, filter, limit).await?;
        let list: Vec<String> = waiting.iter().map(i64::to_string).collect();
        query.push(format!("w.sequence in ({}) and ", if list.is_empty() { "0".to_owned() } else { list.join(",") }));
    }
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
    let rows = query.build().persistent(false).all(&mut *connection).await?;
    let mut found = rows.iter().map(|row| found_of_consumer(row, state)).collect::<Result<Vec<_>, _>>()?;
    for (found, row) in found.iter_mut().zip(&rows) {
        if let Some(lane) = row.try_get::<Option<Vec<u8>>, _>("lane_id")? {
            let (consumer, sequence): (i32, i64) = (row.try_get("consumer_id")?, row.try_get("sequence")?);
            let behind = sqlx::query_scalar(BEHIND).bind(consumer).bind(lane).bind(sequence);
            found.dead.behind = count_of(behind.one(&mut *connection).await?);
        }
    }
    Ok(found)
}

/// Those that are tried next, and what stands behind them: to ask each row that stands whether a
/// dead one is before it costs the more, the more are held.
async fn waiting_of_heads(
    connection: &mut Bounded<MySql>,
    filter: &DeadFilter,
    limit: usize,
) -> Result<Vec<i64>, StoreError> {
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let consumers = sqlx::query_scalar("select consumer_id from oncebox_consumer where ? is null or name = ?")
        .bind(filter.consumer.as_ref().map(|name| name.as_bytes()))
        .bind(filter.consumer.as_ref().map(|name| name.as_bytes()));
    let consumers: Vec<i32> = consumers.all(&mut *connection).await?;
    let mut found = Vec::new();
    for consumer in consumers {
        let mut heads: QueryBuilder<MySql> = QueryBuilder::new(
            "select w.sequence, w.lane_id from oncebox_waiting w force index (waiting_due) where w.due_at is not null and w.consumer_id = ",
        );
        heads.push_bind(consumer);
        push_filter(&mut heads, 'w', filter);
        heads.push(" order by w.due_at limit ").push_bind(limit);
        let heads = heads.build().persistent(false).all(&mut *connection).await?;
        let mut of_consumer =
            heads.iter().map(|head| Ok(head.try_get(0)?)).collect::<Result<Vec<i64>, StoreError>>()?;
        for head in &heads {
            let left = limit - i64::try_from(of_consumer.len()).unwrap_or(limit);
            let Some(lane) = head.try_get::<Option<Vec<u8>>, _>(1)?.filter(|_| left > 0) else { continue };
            let behind = sqlx::query_scalar(BEHIND_A_HEAD).bind(consumer).bind(lane);
            let behind: Vec<i64> = behind.bind(head.try_get::<i64, _>(0)?).bind(left).all(&mut *connection).await?;
            of_consumer.extend(behind);
        }
        found.extend(of_consumer);
    }
    Ok(found)
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
        behind: 0,
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
    let message = message::message(row)?;
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
        behind: 0,
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
