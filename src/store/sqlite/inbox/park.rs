//! Storing a message as waiting or dead, whole, with the history of its tries.

use sqlx::query;
use sqlx::sqlite::SqliteConnection;

use super::add_error;
use crate::error::StoreError;
use crate::message::wire;
use crate::store::operator::kept_error;
use crate::store::sqlite::message::arrived_to_json;
use crate::store::sqlite::{millis, now_ms};
use crate::store::{ConsumerId, ParkAs, Parked};

/// The history is that of the attempt row; what the last try said is added where it does not stand
/// there.
const STORE: &str = concat!(
    "with e(history) as (select coalesce((select history from oncebox_attempt where consumer_id = ?1 and message_id = ?2), '[]')) ",
    "insert into oncebox_waiting (consumer_id, message_id, content_hash, lane_id, state, blocks, due_at, attempts, history, reason, ",
    "stored_at, dead_at, id_text, topic, key, kind, headers, payload, tombstone, content_type, source, message_time, traceparent, ",
    "tracestate, place, partition_no, offset_no) ",
    "select ?1, ?2, ?3, ?4, ?5, ?6, ?7 + ",
    now_ms!(),
    ", ?8, case when ?9 is null or json_extract(history, '$[#-1].error') is ?9 then history else ",
    add_error!("history", "?8", "?9"),
    " end, ?10, ",
    now_ms!(),
    ", case when ?5 = 'dead' then ",
    now_ms!(),
    " end, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19, ?20, ?21, ?22, ?23, ?24, ?25 from e where true ",
    "on conflict (consumer_id, message_id, content_hash) where state = 'dead' do nothing"
);

pub(super) async fn store(
    connection: &mut SqliteConnection,
    consumer: ConsumerId,
    parked: &Parked,
) -> Result<(), StoreError> {
    let message = &parked.message;
    let lane = message.lane_id().map(|lane| lane.to_vec());
    let keyed = lane.is_some();
    let (state, blocks, due_in, reason) = match &parked.park_as {
        ParkAs::Due(after) => ("waiting", keyed, Some(millis(*after)), None),
        ParkAs::Behind => ("waiting", keyed, None, None),
        ParkAs::Dead { reason, holds } => ("dead", *holds && keyed, None, Some(reason.as_str())),
    };
    let trace = message.trace.as_ref();
    let insert = query(STORE)
        .bind(consumer.0)
        .bind(message.id.bytes().to_vec())
        .bind(message.content_hash().to_vec())
        .bind(lane)
        .bind(state)
        .bind(blocks)
        .bind(due_in)
        .bind(parked.attempts)
        .bind(parked.error.as_deref().map(kept_error))
        .bind(reason)
        .bind(&message.id_text)
        .bind(&message.topic)
        .bind(&message.key)
        .bind(&message.kind)
        .bind(arrived_to_json(&message.headers)?)
        .bind(&message.payload)
        .bind(message.tombstone)
        .bind(&message.content_type)
        .bind(&message.source)
        .bind(message.time.map(wire::format_time))
        .bind(trace.map(|trace| &trace.traceparent))
        .bind(trace.and_then(|trace| trace.tracestate.as_ref()))
        .bind(&message.coordinates.place)
        .bind(message.coordinates.partition)
        .bind(message.coordinates.offset);
    insert.execute(connection).await?;
    Ok(())
}
