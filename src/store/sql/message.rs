//! Messages of a consumer in the waiting table, on every database. They are stored whole, so that a
//! later try or an operator needs nothing else.
//!
//! Guarantees: a message is read back exactly as it was stored, with any bytes and characters,
//! except for a time outside the years 1000 to 9999. A dead message is stored once for its id and
//! content hash; one that was refused makes room for one that ran.

use std::collections::HashMap;
use std::ops::RangeInclusive;

use chrono::Datelike;
use uuid::Uuid;

use super::{Row, Session, Statement, Value, foreign, refused, sql};
use crate::error::StoreError;
use crate::inbox::port::{ConsumerId, ParkAs, Parked};
use crate::inbox::rules::horizon::Verdict;
use crate::message::{Coordinates, Message, MessageId, TraceContext};
use crate::operator::kept_error;

/// The columns of a message of the row `w`, as [`message_of`] reads them.
macro_rules! message_columns {
    () => {
        "w.attempts, w.message_id, w.id_text, w.topic, w.{key}, w.kind, w.payload, w.tombstone, w.content_type, w.source, \
         w.message_time, w.traceparent, w.tracestate, w.place, w.partition_no, w.offset_no, \
         {pg: w.header_names, w.header_values}{my lite: w.headers}"
    };
}
pub(super) use message_columns;

/// Reads a message from the columns that begin at `first`; its `attempt` is the number of tries
/// counted.
pub(in crate::store) fn message_of(row: &dyn Row, first: usize) -> Result<Message, StoreError> {
    let tracestate = row.get_foreign(first + 12)?;
    Ok(Message {
        attempt: row.get(first)?,
        id: MessageId::from(row.get::<Uuid>(first + 1)?),
        id_text: row.foreign(first + 2)?,
        topic: row.foreign(first + 3)?,
        key: row.get_opt(first + 4)?,
        kind: row.foreign(first + 5)?,
        payload: row.get(first + 6)?,
        tombstone: row.get(first + 7)?,
        content_type: row.get_foreign(first + 8)?,
        source: row.foreign(first + 9)?,
        time: row.get_sent_at(first + 10)?,
        trace: row.get_opt(first + 11)?.map(|traceparent| TraceContext { traceparent, tracestate }),
        coordinates: Coordinates {
            place: row.foreign(first + 13)?,
            partition: row.get(first + 14)?,
            offset: row.get(first + 15)?,
        },
        headers: row.get_headers(first + 16)?,
    })
}

/// The years that a stored time may have: those that MySQL takes. Any client of a broker may give a
/// message another time; it is left out, for it says nothing of the message.
const YEARS: RangeInclusive<i32> = 1000..=9999;

const HISTORIES: &str = "select a.message_id, a.history{pg: ::text} from \
    {each attempt a ids message_id :ids primary} and a.consumer_id = :consumer";

/// On MySQL a row that does not order its key has no lane id. A dead copy that is there already
/// stays. On PostgreSQL and SQLite a number that the server gave and that is taken is an error:
/// nothing else would store the message. MySQL ignores any conflict, but never gives a number that
/// is taken.
const PARK: &str = "insert into oncebox.waiting (consumer_id, message_id, content_hash, lane_id, state, due_at, attempts, reason, \
      history, stored_at, dead_at, id_text, topic, {key}, kind, payload, tombstone, content_type, source, message_time, \
      traceparent, tracestate, place, partition_no, offset_no, \
      {pg: header_names, header_values, holds, error}{my: headers, dead_hash, error}{lite: headers, blocks}) \
    values (:consumer, :id, :hash, {pg lite: :lane}{my: case when :orders then :lane end}, :state, {clock} + {span :after}, \
      :attempts, :reason, {if adds: {history :history{pg: ::jsonb} :attempts}}{unless adds: :history{pg: ::jsonb}}, {clock}, \
      case when :is_dead then {clock} end, :id_text, :topic, :key, :kind, :payload, :tombstone, :content_type, :source, :time, \
      :traceparent, :tracestate, :place, :partition, :offset, \
      {pg: coalesce((select array_agg(h.pair ->> 0 order by h.n) from jsonb_array_elements(:headers::jsonb) with ordinality h (pair, n)), '{}'), \
        coalesce((select array_agg(decode(h.pair ->> 1, 'hex') order by h.n) \
          from jsonb_array_elements(:headers::jsonb) with ordinality h (pair, n)), '{}'), :is_dead and :orders, :error}\
      {my: :headers, case when :is_dead then :hash end, :error}{lite: :headers, :orders}) \
    {pg lite: on conflict (consumer_id, message_id, content_hash) where state = 'dead' do nothing}\
    {my: on duplicate key update sequence = sequence}";

/// Stores messages as waiting or dead, in order. A dead copy that is there already stays as it is,
/// unless it was refused and this one has an inbox row.
pub(in crate::store) async fn park(
    session: &mut dyn Session,
    consumer: ConsumerId,
    parked: &[Parked],
) -> Result<(), StoreError> {
    if parked.is_empty() {
        return Ok(());
    }
    let ids: Vec<Uuid> = parked.iter().map(|parked| parked.message.id.uuid()).collect();
    let mut histories = HashMap::new();
    for row in session.rows(sql(HISTORIES).bind("consumer", consumer).bind("ids", ids)).await? {
        histories.insert(row.get::<Uuid>(0)?, row.get::<String>(1)?);
    }
    let dead = parked.iter().filter(|parked| match &parked.park_as {
        ParkAs::Dead { reason, .. } => !Verdict::left_no_inbox_row(reason),
        ParkAs::Due(_) | ParkAs::Behind => false,
    });
    let dead: Vec<&Message> = dead.map(|parked| &parked.message).collect();
    refused::make_room(session, consumer, &dead).await?;
    for parked in parked {
        let history = histories.get(&parked.message.id.uuid()).map_or("[]", String::as_str);
        session.run(stored(consumer, parked, history)).await?;
    }
    Ok(())
}

/// The statement that stores a message. `history` has the errors of counted tries; the last error
/// is appended where it is not in it.
fn stored(consumer: ConsumerId, parked: &Parked, history: &str) -> Statement {
    let message = &parked.message;
    let lane = message.lane_id().map(Uuid::from_bytes);
    let (reason, holds) = match &parked.park_as {
        ParkAs::Due(_) | ParkAs::Behind => (None, true),
        ParkAs::Dead { reason, holds } => (Some(reason), *holds),
    };
    let after = match &parked.park_as {
        ParkAs::Due(after) => Some(*after),
        // A message without a key stands behind no other, so it is due at once.
        ParkAs::Behind if lane.is_none() => Some(std::time::Duration::ZERO),
        ParkAs::Behind | ParkAs::Dead { .. } => None,
    };
    let error = parked.error.as_deref().map(error_text);
    let adds = error.as_deref().is_some_and(|error| last_error(history).as_deref() != Some(error));
    let trace = message.trace.as_ref();
    sql(PARK)
        .bind("consumer", consumer)
        .bind("id", message.id.uuid())
        .bind("hash", Uuid::from_bytes(message.content_hash()))
        .bind("lane", lane)
        .bind("orders", lane.is_some() && holds)
        .bind("state", if reason.is_some() { "dead" } else { "waiting" })
        .bind("is_dead", reason.is_some())
        .bind("after", after)
        .bind("attempts", parked.attempts)
        .bind("reason", reason)
        .bind("history", history)
        .bind("adds", adds)
        .bind("error", error)
        .bind("id_text", foreign(&message.id_text))
        .bind("topic", foreign(&message.topic))
        .bind("key", message.key.clone())
        .bind("kind", foreign(&message.kind))
        .bind("payload", message.payload.clone())
        .bind("tombstone", message.tombstone)
        .bind("content_type", Value::Foreign(message.content_type.clone()))
        .bind("source", foreign(&message.source))
        .bind("time", Value::SentAt(message.time.filter(|at| YEARS.contains(&at.year()))))
        .bind("traceparent", trace.map(|trace| &trace.traceparent))
        .bind("tracestate", Value::Foreign(trace.and_then(|trace| trace.tracestate.clone())))
        .bind("place", foreign(&message.coordinates.place))
        .bind("partition", message.coordinates.partition)
        .bind("offset", message.coordinates.offset)
        .bind("headers", Value::Headers(message.headers.clone()))
}

/// An error as it is stored: of bounded length, and without NUL, which PostgreSQL cannot store in
/// text.
pub(in crate::store) fn error_text(error: &str) -> String {
    kept_error(error).replace('\0', "\u{fffd}")
}

fn last_error(history: &str) -> Option<String> {
    let history: Vec<serde_json::Value> = serde_json::from_str(history).ok()?;
    Some(history.last()?.get("error")?.as_str()?.to_owned())
}
