//! Messages of a consumer that wait for a retry, or behind one, and dead ones.
//!
//! Guarantees: within a key only the oldest row that orders it is claimed, and only its row is
//! locked (R25); the rows behind it have no due time, so they cost a poll nothing; whoever removes
//! a head makes the next one due in the same transaction, and a sweep finds the head that a race
//! left without. `lane` is null for rows that order nothing: without a key, or dead without holding
//! it.
//!
//! Not here: which retry comes when (`policy::retry`), acts of operators ([`super::operator`]).

use std::collections::HashMap;
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use sqlx::mysql::MySqlRow;
use sqlx::{MySql, QueryBuilder, Row};
use uuid::Uuid;

use super::schema::number;
use super::{HISTORY_MAX, MySqlStore, START, hex_list, micros, number_list, sixteen, text};
use crate::error::StoreError;
use crate::message::{Coordinates, Message, MessageId, TraceContext};
use crate::policy::hex::{hex, unhex};
use crate::store::bounded::{Ask, Bounded};
use crate::store::operator::kept_error;
use crate::store::{CLAIM_MAX, Claim, ClaimedMessage, ConsumerId, ParkAs, Parked, Scope, Waiting};

/// Rows of one insert: well below what a prepared statement can bind.
const PARK_ROWS_MAX: usize = 500;
/// Heads that one sweep makes due.
const SWEEP_MAX: i64 = 1_000;

#[async_trait]
impl Waiting for MySqlStore {
    async fn claim_due(
        &self,
        consumer: ConsumerId,
        scope: &Scope,
        claim: &Claim,
    ) -> Result<Option<ClaimedMessage>, StoreError> {
        let mut transaction = self.pool.begin(START).await?;
        let head: Option<(i64, bool)> = sqlx::query_as(DUE_HEAD)
            .bind(consumer.0)
            .bind(names(&scope.topics))
            .bind(names(&scope.places))
            .bind(scope.kinds.as_deref().map(names))
            .optional(&mut transaction)
            .await?;
        let Some((head, suspect)) = head else {
            transaction.rollback().await?;
            return Ok(None);
        };
        let claimed = claim_rows(&mut transaction, vec![head], claim).await?.pop();
        transaction.commit().await?;
        Ok(claimed.map(|claimed| ClaimedMessage { suspect, ..claimed }))
    }

    async fn claim_behind(
        &self,
        consumer: ConsumerId,
        head: &ClaimedMessage,
        scope: &Scope,
        limit: usize,
        claim: &Claim,
    ) -> Result<Vec<ClaimedMessage>, StoreError> {
        let Some(lane) = head.message.lane_id().filter(|_| limit > 0) else { return Ok(Vec::new()) };
        let mut transaction = self.pool.begin(START).await?;
        let next: Vec<(i64, bool)> = sqlx::query_as(BEHIND)
            .bind(scope.kinds.as_deref().map(names))
            .bind(consumer.0)
            .bind(lane.as_slice())
            .bind(head.sequence)
            .bind(i64::try_from(limit).unwrap_or(i64::MAX))
            .all(&mut transaction)
            .await?;
        let run: Vec<i64> = next.into_iter().take_while(|(_, fits)| *fits).map(|(sequence, _)| sequence).collect();
        let claimed = if run.is_empty() { Vec::new() } else { claim_rows(&mut transaction, run, claim).await? };
        transaction.commit().await?;
        Ok(claimed)
    }

    async fn count_try(&self, claimed: &ClaimedMessage) -> Result<bool, StoreError> {
        let written = sqlx::query("update oncebox_waiting set attempts = ? where sequence = ? and claim = ?")
            .bind(claimed.message.attempt)
            .bind(claimed.sequence)
            .bind(claimed.claim)
            .run(&self.pool)
            .await?;
        Ok(written.rows_affected() == 1)
    }

    async fn next_due(&self, consumer: ConsumerId, scope: &Scope) -> Result<Option<Duration>, StoreError> {
        let left: Option<i64> = sqlx::query_scalar(NEXT_DUE)
            .bind(consumer.0)
            .bind(names(&scope.topics))
            .bind(names(&scope.places))
            .bind(scope.kinds.as_deref().map(names))
            .optional(&self.pool)
            .await?;
        Ok(left.map(|left| Duration::from_micros(u64::try_from(left).unwrap_or(0))))
    }

    async fn postpone(&self, claimed: &ClaimedMessage, after: Duration, error: &str) -> Result<bool, StoreError> {
        let written = sqlx::query(
            "update oncebox_waiting set due_at = utc_timestamp(6) + interval ? microsecond, claim = null, attempts = ?, error = ?, \
               history = json_array_append(if(json_length(history) >= ?, json_remove(history, '$[0]'), history), '$', \
                 json_object('at', date_format(utc_timestamp(6), '%Y-%m-%dT%H:%i:%s.%fZ'), 'attempt', ?, 'error', ?)) \
             where sequence = ? and claim = ?",
        )
        .bind(micros(after))
        .bind(claimed.message.attempt)
        .bind(kept_error(error))
        .bind(HISTORY_MAX)
        .bind(claimed.message.attempt)
        .bind(kept_error(error))
        .bind(claimed.sequence)
        .bind(claimed.claim)
        .run(&self.pool)
        .await?;
        Ok(written.rows_affected() == 1)
    }

    async fn give_back(&self, consumer: ConsumerId, claimed: &[ClaimedMessage]) -> Result<u64, StoreError> {
        let Some(first) = claimed.first() else { return Ok(0) };
        let rows: Vec<(i64, u32)> = claimed.iter().map(|one| (one.sequence, one.tries)).collect();
        let mut transaction = self.pool.begin(START).await?;
        // What stands behind a head has no due time; the head gets it back.
        let given_back = sqlx::query(
            "update json_table(?, '$[*]' columns (sequence bigint path '$[0]', tries bigint path '$[1]')) j \
             straight_join oncebox_waiting w force index (primary) on w.sequence = j.sequence \
             set w.claim = null, w.attempts = j.tries, w.due_at = if(w.lane_id is null, utc_timestamp(6), null) where w.claim = ?",
        )
        .bind(serde_json::json!(rows).to_string())
        .bind(first.claim)
        .run(&mut transaction)
        .await?;
        next_of_lane(&mut transaction, consumer, first.message.lane_id()).await?;
        transaction.commit().await?;
        Ok(given_back.rows_affected())
    }

    async fn give_back_all(&self, consumer: ConsumerId, claim: &Claim) -> Result<u64, StoreError> {
        let claimed: Vec<(i64, Option<Vec<u8>>)> = sqlx::query_as(
            "select sequence, lane_id from oncebox_waiting force index (waiting_due) \
             where consumer_id = ? and due_at is not null and claim = ?",
        )
        .bind(consumer.0)
        .bind(claim.token)
        .all(&self.pool)
        .await?;
        let lane = claimed.iter().find_map(|(_, lane)| lane.as_deref());
        let lane = lane.map(|lane| sixteen("lane_id", lane)).transpose()?;
        let mut transaction = self.pool.begin(START).await?;
        // By exact rows: an update that searched would wait for every open writer (R11).
        let given_back = sqlx::query(
            "update json_table(?, '$[*]' columns (sequence bigint path '$')) j \
             straight_join oncebox_waiting w force index (primary) on w.sequence = j.sequence \
             set w.claim = null, w.due_at = if(w.lane_id is null, utc_timestamp(6), null) where w.claim = ?",
        )
        .bind(number_list(claimed.iter().map(|(sequence, _)| *sequence)))
        .bind(claim.token)
        .run(&mut transaction)
        .await?;
        next_of_lane(&mut transaction, consumer, lane).await?;
        transaction.commit().await?;
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
               due_at = null, claim = null, lane_id = if(?, lane_id, null), attempts = ?, error = ?, \
               history = json_array_append(if(json_length(history) >= ?, json_remove(history, '$[0]'), history), '$', \
                 json_object('at', date_format(utc_timestamp(6), '%Y-%m-%dT%H:%i:%s.%fZ'), 'attempt', ?, 'error', ?)) \
             where sequence = ?",
        )
        .bind(reason.as_bytes())
        .bind(holds)
        .bind(claimed.message.attempt)
        .bind(kept_error(error))
        .bind(HISTORY_MAX)
        .bind(claimed.message.attempt)
        .bind(kept_error(error))
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

    async fn wake(&self, consumer: ConsumerId, lanes: &[[u8; 16]]) -> Result<(), StoreError> {
        let heads: Vec<i64> = sqlx::query_scalar(HEADS_OF_LANES)
            .bind(hex_list(lanes.iter().map(<[u8; 16]>::as_slice)))
            .bind(consumer.0)
            .all(&self.pool)
            .await?;
        if !heads.is_empty() {
            sqlx::query(MAKE_DUE).bind(number_list(heads)).run(&self.pool).await?;
        }
        Ok(())
    }

    async fn sweep(&self, consumer: ConsumerId) -> Result<u64, StoreError> {
        let too_late: Vec<i64> = sqlx::query_scalar(CLAIMED_TOO_LONG)
            .bind(consumer.0)
            .bind(micros(CLAIM_MAX))
            .bind(SWEEP_MAX)
            .all(&self.pool)
            .await?;
        if !too_late.is_empty() {
            sqlx::query(
                "update json_table(?, '$[*]' columns (sequence bigint path '$')) j \
                 straight_join oncebox_waiting w force index (primary) on w.sequence = j.sequence \
                 set w.due_at = utc_timestamp(6) where w.claim is not null",
            )
            .bind(number_list(too_late.iter().copied()))
            .run(&self.pool)
            .await?;
        }
        let left: Vec<i64> =
            sqlx::query_scalar(HEADS_WITHOUT_DUE_TIME).bind(consumer.0).bind(SWEEP_MAX).all(&self.pool).await?;
        if !left.is_empty() {
            sqlx::query(MAKE_DUE).bind(number_list(left.iter().copied())).run(&self.pool).await?;
        }
        Ok((too_late.len() + left.len()) as u64)
    }
}

/// Takes the rows into the claim and gives their messages, in order.
async fn claim_rows(
    transaction: &mut Bounded<MySql>,
    rows: Vec<i64>,
    claim: &Claim,
) -> Result<Vec<ClaimedMessage>, StoreError> {
    let list = number_list(rows);
    sqlx::query(
        "update json_table(?, '$[*]' columns (sequence bigint path '$')) j \
         straight_join oncebox_waiting w force index (primary) on w.sequence = j.sequence \
         set w.claim = ?, w.due_at = utc_timestamp(6) + interval ? microsecond where w.state = 'waiting'",
    )
    .bind(&list)
    .bind(claim.token)
    .bind(micros(claim.length))
    .run(&mut *transaction)
    .await?;
    let rows = sqlx::query(CLAIMED).bind(&list).bind(claim.token).all(transaction).await?;
    rows.iter().map(|row| claimed_message(row, claim.token)).collect()
}

/// Only heads are locked, and those that somebody else is about to claim are passed over. A scope
/// is three lists of names, as [`names`] writes them.
const DUE_HEAD: &str = "\
select w.sequence, w.claim is not null from oncebox_waiting w force index (waiting_due) \
 where w.consumer_id = ? and w.state = 'waiting' and w.due_at <= utc_timestamp(6) \
   and (find_in_set(concat('x', hex(w.topic)), ?) > 0 or find_in_set(concat('x', hex(w.place)), ?) > 0) \
   and coalesce(find_in_set(concat('x', hex(w.kind)), ?), 1) > 0 \
   and (w.lane_id is null or not exists (select 1 from oncebox_waiting o \
        where o.consumer_id = w.consumer_id and o.lane_id = w.lane_id and o.sequence < w.sequence)) \
 order by w.due_at, w.sequence limit 1 for update skip locked";

/// The same heads, whether due or not.
const NEXT_DUE: &str = "\
select timestampdiff(microsecond, utc_timestamp(6), w.due_at) from oncebox_waiting w force index (waiting_due) \
 where w.consumer_id = ? and w.state = 'waiting' and w.due_at is not null \
   and (find_in_set(concat('x', hex(w.topic)), ?) > 0 or find_in_set(concat('x', hex(w.place)), ?) > 0) \
   and coalesce(find_in_set(concat('x', hex(w.kind)), ?), 1) > 0 \
   and (w.lane_id is null or not exists (select 1 from oncebox_waiting o \
        where o.consumer_id = w.consumer_id and o.lane_id = w.lane_id and o.sequence < w.sequence)) \
 order by w.due_at limit 1";

/// What stands behind a head, and whether it was never tried and is in the scope.
const BEHIND: &str = "\
select sequence, state = 'waiting' and attempts = 0 and claim is null and due_at is null \
       and coalesce(find_in_set(concat('x', hex(kind)), ?), 1) > 0 \
  from oncebox_waiting force index (waiting_lane) where consumer_id = ? and lane_id = ? and sequence > ? order by sequence limit ?";

/// The first row of each of some keys.
const HEADS_OF_LANES: &str = "\
select h.sequence from \
  (select (select w.sequence from oncebox_waiting w force index (waiting_lane) \
            where w.lane_id = unhex(j.lane_id) and w.consumer_id = c.consumer_id order by w.sequence limit 1) as sequence \
     from json_table(?, '$[*]' columns (lane_id varchar(32) path '$')) j \
     straight_join oncebox_consumer c on c.consumer_id = ?) h \
 where h.sequence is not null";

/// Claims that end later than any claim can: the clock went back (R22).
const CLAIMED_TOO_LONG: &str = "\
select sequence from oncebox_waiting force index (waiting_due) \
 where consumer_id = ? and due_at > utc_timestamp(6) + interval ? microsecond and claim is not null limit ?";

const MAKE_DUE: &str = "\
update json_table(?, '$[*]' columns (sequence bigint path '$')) j \
  straight_join oncebox_waiting w force index (primary) on w.sequence = j.sequence \
  set w.due_at = utc_timestamp(6) where w.state = 'waiting' and w.due_at is null";

/// Names for `find_in_set`: hexadecimal, so that no comma and no collation matters.
fn names(names: &[String]) -> String {
    names.iter().map(|name| format!("x{}", hex(name.as_bytes()).to_uppercase())).collect::<Vec<_>>().join(",")
}

/// The first row of each key, by a loose scan of the index, then those that should be due and are
/// not.
const HEADS_WITHOUT_DUE_TIME: &str = "\
select w.sequence from \
  (select min(sequence) as sequence from oncebox_waiting force index (waiting_lane) where consumer_id = ? \
    group by consumer_id, lane_id) h \
  straight_join oncebox_waiting w force index (primary) on w.sequence = h.sequence \
 where w.lane_id is not null and w.state = 'waiting' and w.due_at is null limit ?";

const CLAIMED: &str = "\
select w.sequence, w.message_id, w.id_text, w.topic, w.`key`, w.kind, w.headers, w.payload, w.tombstone, w.content_type, w.source, \
       w.message_time, w.traceparent, w.tracestate, w.place, w.partition_no, w.offset_no, w.attempts \
  from json_table(?, '$[*]' columns (o for ordinality, sequence bigint path '$')) j \
  straight_join oncebox_waiting w force index (primary) on w.sequence = j.sequence where w.claim = ? order by j.o";

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

/// Removes claimed rows of one key and makes the next of it due. False where the claim is not ours
/// any more.
pub(super) async fn finish(
    connection: &mut Bounded<MySql>,
    consumer: ConsumerId,
    claimed: &[ClaimedMessage],
) -> Result<bool, StoreError> {
    let Some(first) = claimed.first() else { return Ok(false) };
    let deleted = sqlx::query(
        "delete w from json_table(?, '$[*]' columns (sequence bigint path '$')) j \
         straight_join oncebox_waiting w force index (primary) on w.sequence = j.sequence \
         where w.claim = ? and w.consumer_id = ?",
    )
    .bind(number_list(claimed.iter().map(|one| one.sequence)))
    .bind(first.claim)
    .bind(consumer.0)
    .run(&mut *connection)
    .await?;
    if usize::try_from(deleted.rows_affected()) != Ok(claimed.len()) {
        return Ok(false);
    }
    next_of_lane(connection, consumer, first.message.lane_id()).await?;
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
        "select sequence from oncebox_waiting force index (waiting_lane) where consumer_id = ? and lane_id = ? \
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

/// Stores messages as waiting or dead, in order. A dead delivery that is there already stays as it
/// is.
pub(super) async fn park(
    connection: &mut Bounded<MySql>,
    consumer: ConsumerId,
    parked: &[Parked],
) -> Result<(), StoreError> {
    let histories = histories(connection, consumer, parked).await?;
    for chunk in parked.chunks(PARK_ROWS_MAX) {
        let mut insert: QueryBuilder<MySql> = QueryBuilder::new(
            "insert into oncebox_waiting (consumer_id, state, lane_id, due_at, message_id, id_text, content_hash, dead_hash, topic, \
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
            row.push_bind(reason).push_bind(parked.error.as_deref().map(kept_error).map(str::to_owned));
            match (histories.get(&message.id), &parked.error) {
                (Some(history), _) => {
                    row.push_bind(history.clone());
                }
                (None, Some(error)) => {
                    row.push("json_array(json_object('at', date_format(utc_timestamp(6), '%Y-%m-%dT%H:%i:%s.%fZ'), 'attempt', ")
                        .push_bind_unseparated(parked.attempts)
                        .push_unseparated(", 'error', ")
                        .push_bind_unseparated(kept_error(error).to_owned())
                        .push_unseparated("))");
                }
                (None, None) => {
                    row.push("'[]'");
                }
            }
            row.push("utc_timestamp(6)").push(if is_dead { "utc_timestamp(6)" } else { "null" });
        });
        // Only the key of dead deliveries can be there already; nothing is read from the count of
        // rows.
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
    let mut message = message(row)?;
    let tries = message.attempt;
    message.attempt += 1;
    Ok(ClaimedMessage { sequence: row.try_get("sequence")?, claim, tries, suspect: false, message })
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

/// Headers that arrived may have any bytes, and a name twice: pairs, with a third member where the
/// value is not text.
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
