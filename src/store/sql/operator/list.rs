//! The list of dead, held and waiting messages, of the outbox and of consumers.
//!
//! Guarantee: the cost of a list is bounded by its length, however many messages stand behind those
//! that it shows. A list by topic, key or reason, and one of the held messages of consumers, may
//! also read rows that do not match. A list of messages of consumers that wait or are held reads
//! all dead ones that hold. The numbers of all that match, and the topics that are held, read all
//! rows in their state.

use std::time::Duration;

use chrono::{DateTime, Utc};
use uuid::Uuid;

use crate::error::StoreError;
use crate::message::{Headers, lane_id, wire};
use crate::operator::{COUNTED_MAX, DeadFilter, DeadMessage, DeadPlace, DeadState, HistoryEntry, firsts};
use crate::store::headers::parse_headers;
use crate::store::sql::{Row, Session, Statement, Value, name, sql};

/// The length of a list whose filter has the limit 0.
const LIMIT: usize = 100;

/// Which rows of the outbox are meant: those in one state that match the filter.
macro_rules! of_outbox {
    () => {
        "from oncebox.outbox_dead t \
 where {if is_dead: t.state = 'dead'}{if is_held: {pg my: t.state = 'held'}{lite: t.state <> 'dead'}} \
   {if numbers: and t.position {in ints :numbers} }{if id: and t.message_id = :id }{if topic: and t.topic = :topic } \
   {if key: and t.{key} = :key }{if reason: and t.reason = :reason }"
    };
}

/// The rows of the outbox behind which later rows of their key are held.
macro_rules! holding_in_outbox {
    () => {
        "from oncebox.outbox_dead d where d.state = 'dead' and d.holds "
    };
}

/// Rows of the outbox in one state. The last column is the position of the dead row that holds the
/// row. Such a row waits for no destination, even if it was held for one. Headers are read as
/// bytes, because plain SQL on SQLite may have written text that is not UTF-8.
const OUTBOX: &str = concat!(
    "\
select t.position, {pg my: t.message_id}{lite: unhex(replace(t.message_id, '-', ''))}, t.topic, t.{key}, t.kind, t.reason, \
       {pg my: t.attempts}{lite: 0}, t.diverted_at, t.requested, {pg: t.history::text}{my: t.history}{lite: '[]'}, \
       {pg: convert_to(t.headers::text, 'UTF8')}{my: cast(t.headers as binary)}{lite: cast(t.headers as blob)}, \
       t.payload, t.content_type, {age t.created_at}, t.holds, \
       {pg my: t.cause = 'destination', t.traceparent, t.tracestate}{lite: t.state = 'held-destination', null, null}, \
       {unless is_held: null}{if is_held: (select d.position ",
    holding_in_outbox!(),
    "and {pg: d.topic = t.topic and left(d.key, 512) = left(t.key, 512) and d.key = t.key}\
         {my: d.lane_id = t.lane_id}{lite: d.topic = t.topic and d.key = t.key} \
        and d.position < t.position order by d.position limit 1)} ",
    of_outbox!(),
    " order by t.position limit :limit"
);

/// Position and time of the rows of the outbox that match and have no request of an operator.
const OUTBOX_NUMBERS: &str =
    concat!("select t.position, t.diverted_at ", of_outbox!(), " and t.requested is null order by t.position");

/// The first row of each topic that cannot be sent to. Left out are rows behind a dead row of their
/// key. That is a join, because to look before each row would cost more the more rows a key has.
const HELD_TOPICS: &str = concat!(
    "\
select min(t.position) from oncebox.outbox_dead t \
  left join (select {my: d.lane_id}{pg lite: d.topic, d.key}, min(d.position) first_dead ",
    holding_in_outbox!(),
    "group by {my: d.lane_id}{pg lite: d.topic, d.key}) h \
    on {my: h.lane_id = t.lane_id}{pg lite: h.topic = t.topic and h.key = t.key} and h.first_dead < t.position \
 where {pg my: t.state = 'held' and t.cause = 'destination'}{lite: t.state = 'held-destination'} and h.first_dead is null \
 group by t.topic order by 1 limit :limit"
);

/// How many rows of the same key are held behind a row of the outbox.
const HELD_OF_KEY: &str = "\
select count(*) from (select 1 from oncebox.outbox_dead \
  where {pg: topic = :topic and left(key, 512) = left(:key, 512) and key = :key and state = 'held'}\
        {my: lane_id = :lane and state = 'held'}{lite: topic = :topic and key = :key and state <> 'dead'} \
    and position > :position limit :max) b";

/// Counts the rows of a topic that are held behind a position, up to `:max`.
const HELD_OF_TOPIC: &str = "\
select count(*) from (select 1 from oncebox.outbox_dead \
  where topic = :topic and position > :position and {pg my: state = 'held'}{lite: state <> 'dead'} limit :max) b";

/// Which rows of consumers are meant: those in one state that match the filter. A row is held by
/// the first dead row of its key, if that stands before it: a message that was buried behind a
/// waiting one does not hold that one. This is a join, because to look before each row would cost
/// more the more rows a key has. The condition on it is no plain comparison: PostgreSQL would
/// expect that it holds for few rows, and read all of them where a list wants the first.
macro_rules! of_consumers {
    () => {
        "from oncebox.waiting w join oncebox.consumer c on c.consumer_id = w.consumer_id \
 {unless is_dead: left join (select d.consumer_id, d.lane_id, min(d.sequence) as first_dead from oncebox.waiting d \
      where d.state = 'dead' {pg: and d.holds }{my: and d.lane_id is not null }{lite: and d.blocks = 1 }\
      group by d.consumer_id, d.lane_id) h on h.consumer_id = w.consumer_id and h.lane_id = w.lane_id} \
 where {if is_dead: w.state = 'dead'}{unless is_dead: w.state = 'waiting'}\
   {if is_held: and coalesce(h.first_dead < w.sequence, false)}{if is_waiting: and not coalesce(h.first_dead < w.sequence, false)} \
   {if heads: and w.sequence {in ints :heads} }{if numbers: and w.sequence {in ints :numbers} }{if id: and w.message_id = :id }\
   {if topic: and w.topic = :topic }{if key: and w.{key} = :key }{if reason: and w.reason = :reason }\
   {if consumer: and c.name = :consumer }"
    };
}

/// Rows of consumers in one state, with their headers last. Before these is the dead row that holds
/// the row, and before that the lane, that is, the hash of topic and key, if other rows can wait
/// behind this one; otherwise null.
const CONSUMERS: &str = concat!(
    "\
select w.sequence, w.consumer_id, c.name, w.message_id, w.id_text, w.topic, w.{key}, w.kind, w.reason, \
       {pg my: w.error}{lite: null}, w.attempts, coalesce(w.dead_at, w.stored_at), w.due_at, \
       {pg: w.history::text}{my lite: w.history}, \
       w.payload, w.content_type, \
       case when (w.state = 'dead' or w.due_at is not null){pg: and (w.state = 'waiting' or w.holds)}{lite: and w.blocks = 1} \
            then w.lane_id end, \
       {unless is_held: null}{if is_held: h.first_dead}, \
       {pg: w.header_names, w.header_values}{my lite: w.headers} ",
    of_consumers!(),
    " order by w.sequence limit :limit"
);

/// The sequences of rows of consumers, and when each became dead or was stored.
const CONSUMERS_NUMBERS: &str =
    concat!("select w.sequence, coalesce(w.dead_at, w.stored_at) ", of_consumers!(), " order by w.sequence");

const CONSUMER_IDS: &str = "select consumer_id from oncebox.consumer {if consumer: where name = :consumer}";

/// The heads of a consumer: rows that have a next try, the earliest first. Other rows wait behind
/// them.
const HEADS: &str = "\
select w.sequence, w.due_at, w.lane_id \
  from oncebox.waiting w {my: force index (waiting_due)}{lite: indexed by oncebox_waiting_due} \
 where w.consumer_id = :of and w.due_at is not null {if topic: and w.topic = :topic }{if key: and w.{key} = :key }\
 order by w.due_at, w.sequence limit :limit";

/// The rows behind a head, in order, and whether each waits. One that does not is dead and holds
/// those behind it.
const BEHIND_A_HEAD: &str = "\
select sequence, state = 'waiting' from oncebox.waiting {my: force index (waiting_lane)} \
 where consumer_id = :of and lane_id = :lane and sequence > :head \
   {pg: and (state = 'waiting' or holds)}{lite: and blocks = 1} \
 order by sequence limit :left";

/// Counts the rows that wait behind a row of a consumer, up to `:max`.
const BEHIND: &str = "\
select count(*) from (select 1 from oncebox.waiting {my: force index (waiting_lane)} \
  where consumer_id = :of and lane_id = :lane and sequence > :sequence and state = 'waiting' {lite: and blocks = 1} \
  limit :max) b";

/// The number of a message, as `oncebox dead list` shows it: `o17` is a position of the outbox,
/// `c9` a sequence of a consumer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Number {
    Outbox(i64),
    Consumer(i64),
}

impl Number {
    fn parse(text: &str) -> Result<Self, StoreError> {
        let number = |digits: &str| digits.parse().ok().filter(|number| *number > 0);
        let parsed = match text.split_at_checked(1) {
            Some(("o", digits)) => number(digits).map(Self::Outbox),
            Some(("c", digits)) => number(digits).map(Self::Consumer),
            _ => None,
        };
        parsed.ok_or_else(|| {
            StoreError::Refused(format!(
                "`{text}` is not the number of a message: use `o17` or `c9`, as `oncebox dead list` shows them"
            ))
        })
    }
}

/// A message, and the values of its row that an act needs.
#[derive(Debug)]
pub(in crate::store) struct FoundMessage {
    pub(in crate::store) message: DeadMessage,
    pub(super) row: FoundRow,
}

#[derive(Debug)]
pub(super) enum FoundRow {
    Outbox { position: i64, age: Duration, headers: Headers },
    Consumer(ConsumerRow),
}

#[derive(Debug)]
pub(super) struct ConsumerRow {
    pub(super) sequence: i64,
    pub(super) key: Option<Vec<u8>>,
    pub(super) headers: Vec<(String, Vec<u8>)>,
}

struct Look<'a> {
    filter: &'a DeadFilter,
    /// The numbers of the filter: positions of the outbox, and sequences of consumers.
    positions: Vec<i64>,
    sequences: Vec<i64>,
    limit: usize,
}

/// Finds messages in the outbox and of consumers: those with the lowest numbers, sorted by the time
/// at which they became dead or were stored. Of those that wait, the ones that are due first.
pub(in crate::store) async fn find(
    session: &mut dyn Session,
    filter: &DeadFilter,
) -> Result<Vec<FoundMessage>, StoreError> {
    let look = Look::new(filter)?;
    let mut found = Vec::new();
    for state in filter.states() {
        if look.wants_outbox(*state) {
            found.extend(look.in_outbox(session, *state).await?);
        }
        if look.wants_consumers() {
            found.extend(look.of_consumers(session, *state).await?);
        }
    }
    found.sort_by_key(|found| found.message.since);
    found.truncate(look.limit);
    Ok(found)
}

/// The numbers of all messages that match, oldest first. Messages of the outbox with a request of
/// an operator are left out.
pub(super) async fn numbers(session: &mut dyn Session, filter: &DeadFilter) -> Result<Vec<String>, StoreError> {
    let look = Look::new(filter)?;
    let mut found: Vec<(DateTime<Utc>, String)> = Vec::new();
    for state in filter.states() {
        if look.wants_outbox(*state) {
            for row in session.rows(look.asks_outbox(OUTBOX_NUMBERS, *state)).await? {
                found.push((row.get(1)?, format!("o{}", row.get::<i64>(0)?)));
            }
        }
        if look.wants_consumers() {
            for row in session.rows(look.asks_consumers(CONSUMERS_NUMBERS, *state, Vec::new())).await? {
                found.push((row.get(1)?, format!("c{}", row.get::<i64>(0)?)));
            }
        }
    }
    found.sort_by_key(|(at, _)| *at);
    Ok(found.into_iter().map(|(_, number)| number).collect())
}

/// For each topic that cannot be sent to, its first held message.
pub(super) async fn held_topics(session: &mut dyn Session, limit: usize) -> Result<Vec<FoundMessage>, StoreError> {
    let mut numbers = Vec::new();
    for row in session.rows(sql(HELD_TOPICS).bind("limit", limit)).await? {
        numbers.push(format!("o{}", row.get::<i64>(0)?));
    }
    if numbers.is_empty() {
        return Ok(Vec::new());
    }
    find(session, &DeadFilter { states: vec![DeadState::Held], numbers, limit, ..DeadFilter::default() }).await
}

impl<'a> Look<'a> {
    fn new(filter: &'a DeadFilter) -> Result<Self, StoreError> {
        let limit = if filter.limit == 0 { LIMIT } else { filter.limit };
        let (mut positions, mut sequences) = (Vec::new(), Vec::new());
        for number in &filter.numbers {
            match Number::parse(number)? {
                Number::Outbox(position) => positions.push(position),
                Number::Consumer(sequence) => sequences.push(sequence),
            }
        }
        Ok(Self { filter, positions, sequences, limit })
    }

    fn wants_outbox(&self, state: DeadState) -> bool {
        state != DeadState::Waiting
            && (self.filter.numbers.is_empty() || !self.positions.is_empty())
            && self.filter.consumer.as_deref().is_none_or(|name| name == "outbox")
    }

    fn wants_consumers(&self) -> bool {
        (self.filter.numbers.is_empty() || !self.sequences.is_empty())
            && self.filter.consumer.as_deref() != Some("outbox")
    }

    /// A statement on the rows of the outbox that are meant.
    fn asks_outbox(&self, text: &'static str, state: DeadState) -> Statement {
        let filter = self.filter;
        sql(text)
            .bind("is_dead", state == DeadState::Dead)
            .bind("is_held", state == DeadState::Held)
            .bind("numbers", self.positions.clone())
            .bind("id", Value::RowId(filter.message_id))
            .bind("topic", name(filter.topic.as_deref()))
            .bind("key", name(filter.key.as_deref()))
            .bind("reason", filter.reason.as_deref())
            .bind("limit", self.limit)
    }

    /// A statement on the rows of consumers that are meant. If `heads` is not empty, only on these.
    fn asks_consumers(&self, text: &'static str, state: DeadState, heads: Vec<i64>) -> Statement {
        self.of_message(sql(text))
            .bind("is_dead", state == DeadState::Dead)
            .bind("is_held", state == DeadState::Held)
            .bind("is_waiting", state == DeadState::Waiting)
            .bind("heads", heads)
            .bind("numbers", self.sequences.clone())
            .bind("id", self.filter.message_id)
            .bind("reason", name(self.filter.reason.as_deref()))
            .bind("consumer", self.consumer())
    }

    async fn in_outbox(&self, session: &mut dyn Session, state: DeadState) -> Result<Vec<FoundMessage>, StoreError> {
        let rows = session.rows(self.asks_outbox(OUTBOX, state)).await?;
        let mut found = rows.iter().map(|row| in_outbox(&**row, state)).collect::<Result<Vec<_>, _>>()?;
        let for_destination = rows.iter().map(|row| row.get(15)).collect::<Result<Vec<bool>, _>>()?;
        let topics = found.iter().zip(&for_destination).map(|(found, is_held)| {
            (*is_held && found.message.held_by.is_none()).then_some(found.message.topic.as_str())
        });
        let firsts = firsts(topics);
        for (at, (found, row)) in found.iter_mut().zip(&rows).enumerate() {
            let message = &mut found.message;
            let behind = match (firsts.contains(&at), &message.key) {
                (true, _) => sql(HELD_OF_TOPIC),
                (false, Some(key)) if row.get(14)? => {
                    let lane = Uuid::from_bytes(lane_id(&message.topic, key.as_bytes()));
                    sql(HELD_OF_KEY).bind("lane", lane).bind("key", key)
                }
                (false, _) => continue,
            };
            let behind = behind.bind("topic", name(message.topic.as_str())).bind("position", row.get::<i64>(0)?);
            message.behind = session.one(behind.bind("max", COUNTED_MAX)).await?;
        }
        Ok(found)
    }

    async fn of_consumers(&self, session: &mut dyn Session, state: DeadState) -> Result<Vec<FoundMessage>, StoreError> {
        // Any number of rows may be held before one that waits. So waiting messages are found from
        // the heads, which have a due time.
        let is_named = !self.filter.numbers.is_empty() || self.filter.message_id.is_some();
        let of_heads = state == DeadState::Waiting && !is_named;
        let heads = if of_heads { self.waiting_of_heads(session).await? } else { Vec::new() };
        if of_heads && heads.is_empty() {
            return Ok(Vec::new());
        }
        let mut found = Vec::new();
        for row in session.rows(self.asks_consumers(CONSUMERS, state, heads)).await? {
            let mut one = of_consumer(&*row, state)?;
            if let Some(lane) = row.get_opt::<Uuid>(16)? {
                let behind = sql(BEHIND).bind("of", row.get::<i64>(1)?).bind("lane", lane);
                let behind = behind.bind("sequence", row.get::<i64>(0)?).bind("max", COUNTED_MAX);
                one.message.behind = session.one(behind).await?;
            }
            found.push(one);
        }
        Ok(found)
    }

    /// The sequences of the heads that are due first and, if there are fewer than the limit, of
    /// rows behind them.
    async fn waiting_of_heads(&self, session: &mut dyn Session) -> Result<Vec<i64>, StoreError> {
        let mut heads: Vec<(DateTime<Utc>, i64, i64, Option<Uuid>)> = Vec::new();
        for consumer in session.rows(sql(CONSUMER_IDS).bind("consumer", self.consumer())).await? {
            let consumer: i64 = consumer.get(0)?;
            for row in session.rows(self.of_message(sql(HEADS)).bind("of", consumer)).await? {
                heads.push((row.get(1)?, row.get(0)?, consumer, row.get_opt(2)?));
            }
        }
        heads.sort_unstable();
        heads.truncate(self.limit);
        let mut found: Vec<i64> = heads.iter().map(|(_, head, ..)| *head).collect();
        for (_, head, consumer, lane) in heads {
            let left = self.limit.saturating_sub(found.len());
            let Some(lane) = lane.filter(|_| left > 0) else { continue };
            let behind = sql(BEHIND_A_HEAD).bind("of", consumer).bind("lane", lane).bind("head", head);
            for row in session.rows(behind.bind("left", left)).await? {
                if !row.get::<bool>(1)? {
                    break;
                }
                found.push(row.get(0)?);
            }
        }
        Ok(found)
    }

    fn of_message(&self, asked: Statement) -> Statement {
        let filter = self.filter;
        asked
            .bind("topic", Value::Foreign(filter.topic.clone()))
            .bind("key", filter.key.as_deref().map(str::as_bytes))
            .bind("limit", self.limit)
    }

    fn consumer(&self) -> Value {
        name(self.filter.consumer.as_deref())
    }
}

fn in_outbox(row: &dyn Row, state: DeadState) -> Result<FoundMessage, StoreError> {
    let position: i64 = row.get(0)?;
    let held_by = row.get_opt::<i64>(18)?;
    let (age, reason): (i64, Option<String>) = (row.get(13)?, row.get_opt(5)?);
    let error = reason.filter(|_| held_by.is_none());
    let reason = error.clone().unwrap_or_else(|| match held_by {
        Some(_) => state.reason_unless_stored(false).to_owned(),
        None => "behind another message of its key, or to be sent alone".to_owned(),
    });
    // Bytes that are not UTF-8 become the replacement character. An error would make the row
    // invisible to operators.
    let headers = row.get_opt::<Vec<u8>>(10)?.map(|json| parse_headers(&String::from_utf8_lossy(&json)));
    let headers = headers.transpose()?.unwrap_or_default();
    let trace = |name: &str, value: Option<String>| value.map(|value| (name.to_owned(), value));
    let trace = trace(wire::TRACEPARENT, row.get_opt(16)?).into_iter().chain(trace(wire::TRACESTATE, row.get_opt(17)?));
    let message = DeadMessage {
        number: format!("o{position}"),
        state,
        place: DeadPlace::Outbox,
        message_id: row.get(1)?,
        sent_id: None,
        topic: row.get(2)?,
        key: row.get_opt(3)?,
        kind: row.get(4)?,
        reason,
        error,
        attempts: row.get(6)?,
        since: row.get(7)?,
        next_try: None,
        behind: 0,
        held_by: held_by.map(|position| format!("o{position}")),
        requested: row.get_opt(8)?,
        history: history(&row.get::<String>(9)?)?,
        headers: headers.iter().cloned().chain(trace).collect(),
        payload: row.get(11)?,
        content_type: row.get_opt(12)?,
    };
    let age = Duration::from_micros(u64::try_from(age).unwrap_or(0));
    Ok(FoundMessage { message, row: FoundRow::Outbox { position, age, headers } })
}

fn of_consumer(row: &dyn Row, state: DeadState) -> Result<FoundMessage, StoreError> {
    let sequence: i64 = row.get(0)?;
    let (message_id, key): (Uuid, Option<Vec<u8>>) = (row.get(3)?, row.get_opt(6)?);
    let (reason, next_try): (Option<String>, Option<_>) = (row.get_opt(8)?, row.get_opt(12)?);
    let history = history(&row.get::<String>(13)?)?;
    let headers = row.get_headers(18)?;
    let shown = |(name, value): &(String, Vec<u8>)| (name.clone(), String::from_utf8_lossy(value).into_owned());
    let message = DeadMessage {
        number: format!("c{sequence}"),
        state,
        place: DeadPlace::Consumer(row.get(2)?),
        message_id,
        sent_id: DeadMessage::sent_id(message_id, row.foreign(4)?),
        topic: row.foreign(5)?,
        key: key.clone().and_then(|key| String::from_utf8(key).ok()),
        kind: row.foreign(7)?,
        reason: reason.unwrap_or_else(|| state.reason_unless_stored(next_try.is_some()).to_owned()),
        error: row.get_opt(9)?.or_else(|| history.last().map(|entry| entry.error.clone())),
        attempts: row.get(10)?,
        since: row.get(11)?,
        next_try,
        behind: 0,
        held_by: row.get_opt::<i64>(17)?.map(|sequence| format!("c{sequence}")),
        requested: None,
        history,
        headers: headers.iter().map(shown).collect(),
        payload: row.get(14)?,
        content_type: row.get_foreign(15)?,
    };
    Ok(FoundMessage { message, row: FoundRow::Consumer(ConsumerRow { sequence, key, headers }) })
}

fn history(json: &str) -> Result<Vec<HistoryEntry>, StoreError> {
    serde_json::from_str(json)
        .map_err(|error| StoreError::Corrupt(format!("the history of a row is not readable: {error}")))
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
