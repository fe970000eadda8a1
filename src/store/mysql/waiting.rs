//! Messages of a consumer that wait for a retry, or behind one, and dead ones.
//!
//! Guarantees: within a key only the oldest row that orders it is claimed, and only its row is locked (R25); the rows behind it have
//! no due time, so they cost a poll nothing; whoever removes a head makes the next one due in the same transaction, and a sweep
//! finds the head that a race left without. `lane` is null for rows that order nothing: without a key, or dead without holding it.
//!
//! Not here: which retry comes when (`policy::retry`), acts of operators ([`super::operator`]).

use std::collections::HashMap;
use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::mysql::MySqlRow;
use sqlx::{MySql, QueryBuilder, Row};
use uuid::Uuid;

use super::schema::number;
use super::{HISTORY_MAX, MySqlStore, START, hex_list, micros, number_list, shortened, text};
use crate::error::StoreError;
use crate::message::{Coordinates, Message, MessageId, TraceContext};
use crate::policy::hex::{hex, unhex};
use crate::store::bounded::{Ask, Bounded};
use crate::store::{Claim, ClaimedMessage, ConsumerId, ParkAs, Parked, Waiting};

/// Rows of one insert: well below what a prepared statement can bind.
const PARK_ROWS_MAX: usize = 500;
/// Heads that one sweep makes due.
const SWEEP_MAX: i64 = 1_000;

impl Waiting for MySqlStore {
    async fn claim_due(
        &self,
        consumer: ConsumerId,
        limit: usize,
        claim: &Claim,
    ) -> Result<Vec<ClaimedMessage>, StoreError> {
        let mut transaction = self.pool.begin(START).await?;
        let heads: Vec<i64> = sqlx::query_scalar(DUE_HEADS)
            .bind(consumer.0)
            .bind(i64::try_from(limit).unwrap_or(i64::MAX))
            .all(&mut transaction)
            .await?;
        if heads.is_empty() {
            transaction.rollback().await?;
            return Ok(Vec::new());
        }
        let list = number_list(heads);
        sqlx::query(
            "update json_table(?, '$[*]' columns (sequence bigint path '$')) j \
             straight_join oncebox_waiting w force index (primary) on w.sequence = j.sequence \
             set w.claim = ?, w.attempts = w.attempts + 1, w.due_at = utc_timestamp(6) + interval ? microsecond",
        )
        .bind(&list)
        .bind(claim.token)
        .bind(micros(claim.length))
        .run(&mut transaction)
        .await?;
        let rows = sqlx::query(CLAIMED).bind(&list).all(&mut transaction).await?;
        let claimed = rows.iter().map(|row| claimed_message(row, claim.token)).collect::<Result<Vec<_>, _>>()?;
        transaction.commit().await?;
        Ok(claimed)
    }

    async fn next_due(&self, consumer: ConsumerId) -> Result<Option<Duration>, StoreError> {
        let left: Option<i64> = sqlx::query_scalar(
            "select timestampdiff(microsecond, utc_timestamp(6), min(due_at)) from oncebox_waiting \
             where consumer_id = ? and due_at is not null",
        )
        .bind(consumer.0)
        .one(&self.pool)
        .await?;
        Ok(left.map(|left| Duration::from_micros(u64::try_from(left).unwrap_or(0))))
    }

    async fn postpone(&self, claimed: &ClaimedMessage, after: Duration, error: &str) -> Result<bool, StoreError> {
        let written = sqlx::query(
            "update oncebox_waiting set due_at = utc_timestamp(6) + interval ? microsecond, claim = null, error = ?, \
               history = json_array_append(if(json_length(history) >= ?, json_remove(history, '$[0]'), history), '$', \
                 json_object('at', date_format(utc_timestamp(6), '%Y-%m-%dT%H:%i:%s.%fZ'), 'attempt', attempts, 'error', ?)) \
             where sequence = ? and claim = ?",
        )
        .bind(micros(after))
        .bind(shortened(error))
        .bind(HISTORY_MAX)
        .bind(shortened(error))
        .bind(claimed.sequence)
        .bind(claimed.claim)
        .run(&self.pool)
        .await?;
        Ok(written.rows_affected() == 1)
    }

    async fn give_back(&self, claimed: &ClaimedMessage) -> Result<bool, StoreError> {
        let written = sqlx::query(
            "update oncebox_waiting set due_at = utc_timestamp(6), claim = null, attempts = if(attempts > 0, attempts - 1, 0) \
             where sequence = ? and claim = ?",
        )
        .bind(claimed.sequence)
        .bind(claimed.claim)
        .run(&self.pool)
        .await?;
        Ok(written.rows_affected() == 1)
    }

    async fn give_back_all(&self, consumer: ConsumerId, claim: &Claim) -> Result<u64, StoreError> {
        let claimed: Vec<i64> = sqlx::query_scalar(
            "select sequence from oncebox_waiting force index (waiting_due) \
             where consumer_id = ? and due_at is not null and claim = ?",
        )
        .bind(consumer.0)
        .bind(claim.token)
        .all(&self.pool)
        .await?;
        // By exact rows: an update that searched would wait for every open writer (R11).
        let given_back = sqlx::query(
            "update json_table(?, '$[*]' columns (sequence bigint path '$')) j \
             straight_join oncebox_waiting w force index (primary) on w.sequence = j.sequence \
             set w.due_at = utc_timestamp(6), w.claim = null, w.attempts = if(w.attempts > 0, w.attempts - 1, 0) where w.claim = ?",
        )
        .bind(number_list(claimed))
        .bind(claim.token)
        .run(&self.pool)
        .await?;
        Ok(given_back.rows_affected())
    }

    async fn bury(&self, claimed: &ClaimedMessage, reason: &str, error: &str, holds: bool) -> Result<bool, StoreError> {
        let mut transaction = self.pool.begin(START).await?;
        let Some(consumer) = claimed_by(&mut transaction, claimed).await? else {
            transaction.rollback().await?;
            return Ok(false);
        };
        let buried = sqlx::query(
            "update oncebox_waiting set state = 'dead', dead_hash = content_hash, dead_at = utc_timestamp(6), reason = ?, \
               due_at = null, claim = null, lane = if(?, lane, null), error = ?, \
               history = json_array_append(if(json_length(history) >= ?, json_remove(history, '$[0]'), history), '$', \
                 json_object('at', date_format(utc_timestamp(6), '%Y-%m-%dT%H:%i:%s.%fZ'), 'attempt', attempts, 'error', ?)) \
             where sequence = ?",
        )
        .bind(reason.as_bytes())
        .bind(holds)
        .bind(shortened(error))
        .bind(HISTORY_MAX)
        .bind(shortened(error))
        .bind(claimed.sequence)
        .run(&mut transaction)
        .await;
        match buried {
            Ok(_) => {}
            // The same delivery is dead already: one row is enough.
            Err(error) if number(&error) == Some(1062) => {
                sqlx::query("delete from oncebox_waiting where sequence = ?")
                    .bind(claimed.sequence)
                    .run(&mut transaction)
                    .await?;
            }
            Err(error) => return Err(error.into()),
        }
        if !holds {
            next_of_lane(&mut transaction, consumer, claimed.message.lane_id()).await?;
        }
        transaction.commit().await?;
        Ok(true)
    }

    async fn sweep(&self, consumer: ConsumerId) -> Result<u64, StoreError> {
        let mut transaction = self.pool.begin(START).await?;
        let left: Vec<i64> =
            sqlx::query_scalar(HEADS_WITHOUT_DUE_TIME).bind(consumer.0).bind(SWEEP_MAX).all(&mut transaction).await?;
        if left.is_empty() {
            transaction.rollback().await?;
            return Ok(0);
        }
        sqlx::query(
            "update json_table(?, '$[*]' columns (sequence bigint path '$')) j \
             straight_join oncebox_waiting w force index (primary) on w.sequence = j.sequence \
             set w.due_at = utc_timestamp(6) where w.state = 'waiting' and w.due_at is null",
        )
        .bind(number_list(left.iter().copied()))
        .run(&mut transaction)
        .await?;
        transaction.commit().await?;
        Ok(left.len() as u64)
    }
}

/// Only heads are locked, and those that somebody else is about to claim are passed over.
const DUE_HEADS: &str = "\
select w.sequence from oncebox_waiting w force index (waiting_due) \
 where w.consumer_id = ? and w.due_at <= utc_timestamp(6) and w.state = 'waiting' \
   and (w.lane is null or not exists (select 1 from oncebox_waiting o \
        where o.consumer_id = w.consumer_id and o.lane = w.lane and o.sequence < w.sequence)) \
 order by w.due_at, w.sequence limit ? for update skip locked";

/// The first row of each key, by a loose scan of the index, then those that should be due and are not.
const HEADS_WITHOUT_DUE_TIME: &str = "\
select w.sequence from \
  (select min(sequence) as sequence from oncebox_waiting force index (waiting_lane) where consumer_id = ? \
    group by consumer_id, lane) h \
  straight_join oncebox_waiting w force index (primary) on w.sequence = h.sequence \
 where w.lane is not null and w.state = 'waiting' and w.due_at is null limit ?";

const CLAIMED: &str = "\
select w.sequence, w.message_id, w.id_text, w.topic, w.`key`, w.kind, w.headers, w.payload, w.tombstone, w.content_type, w.source, \
       w.message_time, w.traceparent, w.tracestate, w.place, w.partition_no, w.offset_no, w.attempts \
  from json_table(?, '$[*]' columns (o for ordinality, sequence bigint path '$')) j \
  straight_join oncebox_waiting w force index (primary) on w.sequence = j.sequence order by j.o";

/// The consumer of a row that is still claimed by us; locks it.
async fn claimed_by(
    connection: &mut Bounded<MySql>,
    claimed: &ClaimedMessage,
) -> Result<Option<ConsumerId>, StoreError> {
    let found =
        sqlx::query_scalar("select consumer_id from oncebox_waiting where sequence = ? and claim = ? for update")
            .bind(claimed.sequence)
            .bind(claimed.claim)
            .optional(connection)
            .await?;
    Ok(found.map(ConsumerId))
}

/// Removes a claimed row and makes the next one of its key due. False where the claim is not ours any more.
pub(super) async fn finish(
    connection: &mut Bounded<MySql>,
    consumer: ConsumerId,
    claimed: &ClaimedMessage,
) -> Result<bool, StoreError> {
    let deleted = sqlx::query("delete from oncebox_waiting where sequence = ? and claim = ? and consumer_id = ?")
        .bind(claimed.sequence)
        .bind(claimed.claim)
        .bind(consumer.0)
        .run(&mut *connection)
        .await?;
    if deleted.rows_affected() != 1 {
        return Ok(false);
    }
    next_of_lane(connection, consumer, claimed.message.lane_id()).await?;
    Ok(true)
}

/// The first row of a key is due now, unless it is due already, or dead and holding.
pub(super) async fn next_of_lane(
    connection: &mut Bounded<MySql>,
    consumer: ConsumerId,
    lane: Option<[u8; 16]>,
) -> Result<(), StoreError> {
    let Some(lane) = lane else { return Ok(()) };
    let next: Option<i64> = sqlx::query_scalar(
        "select sequence from oncebox_waiting force index (waiting_lane) where consumer_id = ? and lane = ? \
         order by sequence limit 1",
    )
    .bind(consumer.0)
    .bind(lane.as_slice())
    .optional(&mut *connection)
    .await?;
    if let Some(next) = next {
        sqlx::query(
            "update oncebox_waiting set due_at = utc_timestamp(6) where sequence = ? and state = 'waiting' and due_at is null",
        )
        .bind(next)
        .run(connection)
        .await?;
    }
    Ok(())
}

/// Stores messages as waiting or dead, in order. A dead delivery that is there already stays as it is.
pub(super) async fn park(
    connection: &mut Bounded<MySql>,
    consumer: ConsumerId,
    parked: &[Parked],
) -> Result<(), StoreError> {
    let histories = histories(connection, consumer, parked).await?;
    for chunk in parked.chunks(PARK_ROWS_MAX) {
        let mut insert: QueryBuilder<MySql> = QueryBuilder::new(
            "insert into oncebox_waiting (consumer_id, state, lane, due_at, message_id, id_text, content_hash, dead_hash, topic, \
             `key`, kind, headers, payload, tombstone, content_type, source, message_time, traceparent, tracestate, place, partition_no, \
             offset_no, attempts, reason, error, history, stored_at, dead_at) ",
        );
        insert.push_values(chunk, |mut row, parked| {
            let message = &parked.message;
            let hash = message.content_hash().to_vec();
            let (state, reason, lane) = match &parked.park_as {
                ParkAs::Due(_) | ParkAs::Behind => ("waiting", None, message.lane_id()),
                ParkAs::Dead { reason, holds } => {
                    ("dead", Some(reason.clone().into_bytes()), message.lane_id().filter(|_| *holds))
                }
            };
            let due_after = match &parked.park_as {
                ParkAs::Due(after) => Some(micros(*after)),
                // Without a key there is nothing to stand behind.
                ParkAs::Behind if lane.is_none() => Some(0),
                ParkAs::Behind | ParkAs::Dead { .. } => None,
            };
            row.push_bind(consumer.0).push_bind(state).push_bind(lane.map(|lane| lane.to_vec()));
            row.push("utc_timestamp(6) + interval ").push_bind_unseparated(due_after).push_unseparated(" microsecond");
            row.push_bind(message.id.uuid())
                .push_bind(message.id_text.clone())
                .push_bind(hash.clone())
                .push_bind(reason.is_some().then_some(hash))
                .push_bind(message.topic.clone().into_bytes())
                .push_bind(message.key.clone())
                .push_bind(message.kind.clone().into_bytes())
                .push_bind(headers_to_json(&message.headers))
                .push_bind(message.payload.clone())
                .push_bind(message.tombstone)
                .push_bind(message.content_type.clone().map(String::into_bytes))
                .push_bind(message.source.clone().into_bytes())
                .push_bind(message.time)
                .push_bind(message.trace.as_ref().map(|trace| trace.traceparent.clone()))
                .push_bind(message.trace.as_ref().and_then(|trace| trace.tracestate.clone()))
                .push_bind(message.coordinates.place.clone().into_bytes())
                .push_bind(message.coordinates.partition)
                .push_bind(message.coordinates.offset)
                .push_bind(parked.attempts);
            let is_dead = reason.is_some();
            row.push_bind(reason).push_bind(parked.error.as_deref().map(shortened).map(str::to_owned));
            match (histories.get(&message.id), &parked.error) {
                (Some(history), _) => {
                    row.push_bind(history.clone());
                }
                (None, Some(error)) => {
                    row.push("json_array(json_object('at', date_format(utc_timestamp(6), '%Y-%m-%dT%H:%i:%s.%fZ'), 'attempt', ")
                        .push_bind_unseparated(parked.attempts)
                        .push_unseparated(", 'error', ")
                        .push_bind_unseparated(shortened(error).to_owned())
                        .push_unseparated("))");
                }
                (None, None) => {
                    row.push("'[]'");
                }
            }
            row.push("utc_timestamp(6)").push(if is_dead { "utc_timestamp(6)" } else { "null" });
        });
        // Only the key of dead deliveries can be there already; nothing is read from the count of rows.
        insert.push(" on duplicate key update sequence = sequence");
        insert.build().persistent(false).run(&mut *connection).await?;
    }
    Ok(())
}

/// What the tries that were counted under suspicion said.
async fn histories(
    connection: &mut Bounded<MySql>,
    consumer: ConsumerId,
    parked: &[Parked],
) -> Result<HashMap<MessageId, String>, StoreError> {
    let suspects: Vec<[u8; 16]> =
        parked.iter().filter(|parked| parked.attempts > 0).map(|parked| parked.message.id.bytes()).collect();
    if suspects.is_empty() {
        return Ok(HashMap::new());
    }
    let found: Vec<(Uuid, String)> = sqlx::query_as(
        "select a.message_id, a.history from json_table(?, '$[*]' columns (id varchar(32) path '$')) j \
         straight_join oncebox_attempt a force index (primary) on a.consumer_id = ? and a.message_id = unhex(j.id) where a.history <> '[]'",
    )
    .bind(hex_list(suspects.iter().map(<[u8; 16]>::as_slice)))
    .bind(consumer.0)
    .all(connection)
    .await?;
    Ok(found.into_iter().map(|(id, history)| (MessageId::from_uuid(id), history)).collect())
}

fn claimed_message(row: &MySqlRow, claim: Uuid) -> Result<ClaimedMessage, StoreError> {
    Ok(ClaimedMessage { sequence: row.try_get("sequence")?, claim, message: message(row)? })
}

/// The message of a row, whole.
pub(super) fn message(row: &MySqlRow) -> Result<Message, StoreError> {
    let content_type: Option<Vec<u8>> = row.try_get("content_type")?;
    let traceparent: Option<String> = row.try_get("traceparent")?;
    let tracestate: Option<String> = row.try_get("tracestate")?;
    let time: Option<DateTime<Utc>> = row.try_get("message_time")?;
    Ok(Message {
        id: MessageId::from_uuid(row.try_get("message_id")?),
        id_text: row.try_get("id_text")?,
        topic: text("topic", row.try_get("topic")?)?,
        key: row.try_get("key")?,
        kind: text("kind", row.try_get("kind")?)?,
        headers: headers_from_json(row.try_get("headers")?)?,
        payload: row.try_get("payload")?,
        tombstone: row.try_get("tombstone")?,
        content_type: content_type.map(|found| text("content_type", found)).transpose()?,
        source: text("source", row.try_get("source")?)?,
        time,
        trace: traceparent.map(|traceparent| TraceContext { traceparent, tracestate }),
        coordinates: Coordinates {
            place: text("place", row.try_get("place")?)?,
            partition: row.try_get("partition_no")?,
            offset: row.try_get("offset_no")?,
        },
        attempt: row.try_get("attempts")?,
    })
}

/// Headers that arrived may have any bytes, and a name twice: pairs, with a third member where the value is not text.
pub(super) fn headers_to_json(headers: &[(String, Vec<u8>)]) -> String {
    let pair = |(name, value): &(String, Vec<u8>)| match std::str::from_utf8(value) {
        Ok(value) => serde_json::json!([name, value]),
        Err(_) => serde_json::json!([name, hex(value), "hex"]),
    };
    serde_json::Value::Array(headers.iter().map(pair).collect()).to_string()
}

fn headers_from_json(json: &str) -> Result<Vec<(String, Vec<u8>)>, StoreError> {
    let corrupt = || StoreError::Corrupt("the headers of a waiting row are no list of pairs".to_owned());
    let pairs: Vec<Vec<String>> = serde_json::from_str(json).map_err(|_| corrupt())?;
    let header = |pair: Vec<String>| match <[String; 2]>::try_from(pair) {
        Ok([name, value]) => Ok((name, value.into_bytes())),
        Err(pair) => match <[String; 3]>::try_from(pair) {
            Ok([name, digits, _]) => Ok((name, unhex(&digits).ok_or_else(corrupt)?)),
            Err(_) => Err(corrupt()),
        },
    };
    pairs.into_iter().map(header).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn headers_keep_any_bytes_their_order_and_names_given_twice() {
        let headers =
            vec![("z".to_owned(), vec![0xff, 0x00]), ("a".to_owned(), "ä\"".into()), ("a".to_owned(), Vec::new())];
        assert_eq!(headers_from_json(&headers_to_json(&headers)).unwrap(), headers);
        assert!(headers_from_json("{}").is_err());
        assert!(headers_from_json(r#"[["a"]]"#).is_err());
    }
}
