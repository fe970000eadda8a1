//! Dead, held and waiting messages on both sides, as a list.

use sqlx::sqlite::{SqliteConnection, SqliteRow};
use sqlx::{QueryBuilder, Row, Sqlite, query_scalar};
use uuid::Uuid;

use crate::error::StoreError;
use crate::store::operator::firsts;
use crate::store::sqlite::message::{arrived_from_json, headers_from_json, sixteen, time_from_millis, uuid_from_text};
use crate::store::{DeadFilter, DeadMessage, DeadPlace, DeadState, HistoryEntry};

/// A number of `dead list`, taken apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Number {
    Outbox(i64),
    Consumer(i64),
}

impl Number {
    pub(super) fn parse(text: &str) -> Result<Self, StoreError> {
        let number = |digits: &str| digits.parse().ok().filter(|number| *number > 0);
        let parsed = match text.split_at_checked(1) {
            Some(("o", digits)) => number(digits).map(Self::Outbox),
            Some(("c", digits)) => number(digits).map(Self::Consumer),
            _ => None,
        };
        parsed.ok_or_else(|| {
            StoreError::Refused(format!(
                "`{text}` is no number of a dead message; `oncebox dead list` shows them: o17, c9"
            ))
        })
    }
}

/// Oldest first, both sides together.
pub(in crate::store::sqlite) async fn list(
    connection: &mut SqliteConnection,
    filter: &DeadFilter,
) -> Result<Vec<DeadMessage>, StoreError> {
    let number = filter.number.as_deref().map(Number::parse).transpose()?;
    let limit = if filter.limit == 0 { 100 } else { filter.limit };
    let wants_outbox =
        !matches!(number, Some(Number::Consumer(_))) && filter.consumer.as_deref().is_none_or(|name| name == "outbox");
    let wants_consumers = !matches!(number, Some(Number::Outbox(_))) && filter.consumer.as_deref() != Some("outbox");
    let mut messages = Vec::new();
    for state in filter.states() {
        if wants_outbox && *state != DeadState::Waiting {
            let rows = outbox(filter, *state, number, limit).build().fetch_all(&mut *connection).await?;
            let mut found = rows.iter().map(|row| outbox_message(row, *state)).collect::<Result<Vec<_>, _>>()?;
            let stands = rows.iter().map(|row| Ok(row.try_get::<String, _>("stands")? == "held-destination"));
            let is_held_for_destination = stands.collect::<Result<Vec<_>, StoreError>>()?;
            let topics = found.iter().zip(&is_held_for_destination);
            for first in firsts(topics.map(|(message, is_held)| is_held.then_some(message.topic.as_str()))) {
                let position: i64 = rows[first].try_get("number")?;
                let behind = query_scalar::<_, i64>(HELD_OF_TOPIC).bind(found[first].topic.clone()).bind(position);
                found[first].behind = behind.fetch_one(&mut *connection).await?.unsigned_abs();
            }
            messages.extend(found);
        }
        if wants_consumers {
            let of_heads = *state == DeadState::Waiting && number.is_none() && filter.message_id.is_none();
            let heads = if of_heads { Some(waiting_of_heads(connection, filter, limit).await?) } else { None };
            let rows = consumers(filter, *state, number, heads, limit).build().fetch_all(&mut *connection).await?;
            messages.extend(rows.iter().map(|row| consumer_message(row, *state)).collect::<Result<Vec<_>, _>>()?);
        }
    }
    messages.sort_by_key(|message| message.dead_at);
    messages.truncate(limit);
    Ok(messages)
}

/// How many of a topic are held from a position on.
const HELD_OF_TOPIC: &str = "\
select count(*) from (select 1 from oncebox_outbox_dead where topic = ?1 and position > ?2 and state <> 'dead' limit 10000)";

const BEHIND_A_HEAD: &str = "\
select sequence from oncebox_waiting where consumer_id = ?1 and lane_id = ?2 and blocks = 1 and sequence > ?3 \
  and state = 'waiting' order by sequence limit ?4";

/// Those that are tried next, and what stands behind them: to ask each row that stands whether a
/// dead one is before it costs the more, the more are held.
async fn waiting_of_heads(
    connection: &mut SqliteConnection,
    filter: &DeadFilter,
    limit: usize,
) -> Result<Vec<i64>, StoreError> {
    let mut heads = QueryBuilder::<Sqlite>::new(
        "select w.sequence, w.consumer_id, case when w.blocks = 1 then w.lane_id end \
         from oncebox_waiting as w indexed by oncebox_waiting_due join oncebox_consumer as c using (consumer_id) \
         where w.due_at is not null",
    );
    if let Some(key) = &filter.key {
        heads.push(" and w.key = ").push_bind(key.clone().into_bytes());
    }
    if let Some(consumer) = &filter.consumer {
        heads.push(" and c.name = ").push_bind(consumer.clone());
    }
    of_both(&mut heads, filter, "w");
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    heads.push(" order by w.due_at, w.sequence limit ").push_bind(limit);
    let heads: Vec<(i64, i64, Option<Vec<u8>>)> = heads.build_query_as().fetch_all(&mut *connection).await?;
    let mut found: Vec<i64> = heads.iter().map(|(sequence, ..)| *sequence).collect();
    for (sequence, consumer, lane) in heads {
        let left = limit - i64::try_from(found.len()).unwrap_or(limit);
        let Some(lane) = lane.filter(|_| left > 0) else { continue };
        let behind = query_scalar::<_, i64>(BEHIND_A_HEAD).bind(consumer).bind(lane).bind(sequence).bind(left);
        found.extend(behind.fetch_all(&mut *connection).await?);
    }
    Ok(found)
}

fn outbox(filter: &DeadFilter, state: DeadState, number: Option<Number>, limit: usize) -> QueryBuilder<Sqlite> {
    let mut query = QueryBuilder::new(
        "select d.position as number, d.message_id, d.topic, d.key, d.kind, d.reason, d.diverted_at, d.requested, d.headers, d.state as stands, \
         d.payload, d.content_type, case when d.state = 'dead' then (select count(*) from (select 1 from oncebox_outbox_dead as h \
         where h.topic = d.topic and h.key = d.key and h.position > d.position and h.state <> 'dead' limit 10000)) else 0 end as behind \
         from oncebox_outbox_dead as d where ",
    );
    query.push(if state == DeadState::Held { "d.state <> 'dead'" } else { "d.state = 'dead'" });
    if let Some(Number::Outbox(position)) = number {
        query.push(" and d.position = ").push_bind(position);
    }
    if let Some(id) = filter.message_id {
        query.push(" and d.message_id = ").push_bind(id.to_string());
    }
    if let Some(key) = &filter.key {
        query.push(" and d.key = ").push_bind(key.clone());
    }
    of_both(&mut query, filter, "d");
    query.push(" order by d.diverted_at, d.position limit ").push_bind(i64::try_from(limit).unwrap_or(i64::MAX));
    query
}

fn consumers(
    filter: &DeadFilter,
    state: DeadState,
    number: Option<Number>,
    heads: Option<Vec<i64>>,
    limit: usize,
) -> QueryBuilder<Sqlite> {
    let mut query = QueryBuilder::new(
        "select w.sequence as number, c.name, w.message_id, w.topic, w.key, w.kind, w.reason, w.attempts, \
         coalesce(w.dead_at, w.stored_at) as dead_at, w.history, w.id_text, w.due_at, \
         w.headers, w.payload, w.content_type, case when w.blocks = 1 and (w.state = 'dead' or w.due_at is not null) then (select count(*) from (select 1 from oncebox_waiting as b \
         where b.consumer_id = w.consumer_id and b.lane_id = w.lane_id and b.blocks = 1 and b.sequence > w.sequence \
         and b.state = 'waiting' limit 10000)) else 0 end as behind \
         from oncebox_waiting as w join oncebox_consumer as c using (consumer_id) where ",
    );
    let behind_a_dead_one = "exists (select 1 from oncebox_waiting as d \
                             where d.consumer_id = w.consumer_id and d.lane_id = w.lane_id and d.blocks = 1 and d.state = 'dead')";
    match state {
        DeadState::Dead => query.push("w.state = 'dead'"),
        DeadState::Held => query.push("w.state = 'waiting' and ").push(behind_a_dead_one),
        DeadState::Waiting => query.push("w.state = 'waiting' and not ").push(behind_a_dead_one),
    };
    if let Some(heads) = heads {
        let list: Vec<String> = heads.iter().map(i64::to_string).collect();
        query.push(format!(" and w.sequence in ({})", list.join(",")));
    }
    if let Some(Number::Consumer(sequence)) = number {
        query.push(" and w.sequence = ").push_bind(sequence);
    }
    if let Some(id) = filter.message_id {
        query.push(" and w.message_id = ").push_bind(id.as_bytes().to_vec());
    }
    if let Some(key) = &filter.key {
        query.push(" and w.key = ").push_bind(key.clone().into_bytes());
    }
    if let Some(consumer) = &filter.consumer {
        query.push(" and c.name = ").push_bind(consumer.clone());
    }
    of_both(&mut query, filter, "w");
    query.push(" order by w.dead_at, w.sequence limit ").push_bind(i64::try_from(limit).unwrap_or(i64::MAX));
    query
}

fn of_both(query: &mut QueryBuilder<Sqlite>, filter: &DeadFilter, table: &str) {
    for (column, wanted) in [("topic", &filter.topic), ("reason", &filter.reason)] {
        if let Some(wanted) = wanted {
            query.push(format!(" and {table}.{column} = ")).push_bind(wanted.clone());
        }
    }
}

fn outbox_message(row: &SqliteRow, state: DeadState) -> Result<DeadMessage, StoreError> {
    let (headers, trace) = headers_from_json(&row.try_get::<Vec<u8>, _>("headers")?)?;
    let trace = trace.into_iter().map(|trace| ("traceparent".to_owned(), trace.traceparent));
    let reason: Option<String> = row.try_get("reason")?;
    Ok(DeadMessage {
        number: format!("o{}", row.try_get::<i64, _>("number")?),
        state,
        sent_id: None,
        next_try: None,
        place: DeadPlace::Outbox,
        message_id: uuid_from_text(&row.try_get::<String, _>("message_id")?)?,
        topic: row.try_get("topic")?,
        key: row.try_get("key")?,
        kind: row.try_get("kind")?,
        error: reason.clone(),
        reason: reason.unwrap_or_else(|| "stands behind another one of its key".to_owned()),
        attempts: 0,
        dead_at: time_from_millis(row.try_get("diverted_at")?)?,
        behind: row.try_get::<i64, _>("behind")?.unsigned_abs(),
        requested: row.try_get("requested")?,
        history: Vec::new(),
        headers: headers.into_iter().chain(trace).collect(),
        payload: row.try_get("payload")?,
        content_type: row.try_get("content_type")?,
    })
}

fn consumer_message(row: &SqliteRow, state: DeadState) -> Result<DeadMessage, StoreError> {
    let history: Vec<HistoryEntry> = serde_json::from_str(&row.try_get::<String, _>("history")?)
        .map_err(|error| StoreError::Corrupt(format!("the history of a dead message: {error}")))?;
    let headers = arrived_from_json(&row.try_get::<String, _>("headers")?)?;
    let shown = |(name, value): (String, Vec<u8>)| (name, String::from_utf8_lossy(&value).into_owned());
    let key: Option<Vec<u8>> = row.try_get("key")?;
    let message_id = Uuid::from_bytes(sixteen(&row.try_get::<Vec<u8>, _>("message_id")?)?);
    let next_try = row.try_get::<Option<i64>, _>("due_at")?.map(time_from_millis).transpose()?;
    let reason: Option<String> = row.try_get("reason")?;
    Ok(DeadMessage {
        number: format!("c{}", row.try_get::<i64, _>("number")?),
        state,
        place: DeadPlace::Consumer(row.try_get("name")?),
        message_id,
        sent_id: DeadMessage::sent_id(message_id, row.try_get("id_text")?),
        next_try,
        topic: row.try_get("topic")?,
        key: key.and_then(|key| String::from_utf8(key).ok()),
        kind: row.try_get("kind")?,
        reason: reason.unwrap_or_else(|| state.reason_of_consumer(next_try.is_some()).to_owned()),
        error: history.last().map(|entry| entry.error.clone()),
        attempts: row.try_get("attempts")?,
        dead_at: time_from_millis(row.try_get("dead_at")?)?,
        behind: row.try_get::<i64, _>("behind")?.unsigned_abs(),
        requested: None,
        history,
        headers: headers.into_iter().map(shown).collect(),
        payload: row.try_get("payload")?,
        content_type: row.try_get("content_type")?,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_number_names_its_side() {
        assert_eq!(Number::parse("o17").unwrap(), Number::Outbox(17));
        assert_eq!(Number::parse("c9").unwrap(), Number::Consumer(9));
        for bad in ["", "17", "o", "o-1", "o0", "x1", "ö1", "o1x"] {
            assert!(matches!(Number::parse(bad), Err(StoreError::Refused(_))), "{bad}");
        }
    }
}
