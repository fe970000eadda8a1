//! Messages of SQLite that wait for a retry, ordered per key (R25).
//!
//! A claim is a token in the row and a due time pushed to the claim's end; whoever comes after that
//! takes it over. One writer at a time means that heads need no locks: what the statement sees is
//! what is.

use std::time::Duration;

use async_trait::async_trait;
use sqlx::sqlite::{SqliteConnection, SqliteRow};
use sqlx::{Row, query, query_as, query_scalar};
use uuid::Uuid;

use super::connect::SqliteStore;
use super::inbox::add_error;
use super::message::{arrived_from_json, sixteen};
use super::{millis, now_ms};
use crate::error::StoreError;
use crate::message::{Coordinates, Message, MessageId, TraceContext, wire};
use crate::store::operator::kept_error;
use crate::store::{Base, CLAIM_MAX, Claim, ClaimedMessage, ConsumerId, Scope, Waiting};

/// True for a row `w` of the waiting table that no older one of its lane blocks.
macro_rules! is_head {
    () => {
        "(w.lane_id is null or not exists (select 1 from oncebox_waiting as o where o.consumer_id = w.consumer_id \
         and o.lane_id = w.lane_id and o.blocks = 1 and o.sequence < w.sequence))"
    };
}

/// True for a row `w` of the consumer ?1 within a scope: JSON arrays ?2 of topics, ?3 of places, ?4
/// of kinds or null.
macro_rules! in_scope {
    () => {
        "(w.topic in (select value from json_each(?2)) or w.place in (select value from json_each(?3))) \
         and (?4 is null or w.kind in (select value from json_each(?4)))"
    };
}

/// The columns of a claimed message, as [`claimed_message`] reads them.
macro_rules! claimed_columns {
    () => {
        "sequence, claim, message_id, attempts, id_text, topic, key, kind, headers, payload, tombstone, content_type, source, \
         message_time, traceparent, tracestate, place, partition_no, offset_no"
    };
}

/// The head that is due first, and whether the last claim of it ran out.
pub(super) const DUE_HEAD: &str = concat!(
    "select w.sequence, w.claim is not null from oncebox_waiting as w where w.consumer_id = ?1 and w.due_at <= ",
    now_ms!(),
    " and ",
    in_scope!(),
    " and ",
    is_head!(),
    " order by w.due_at, w.sequence limit 1"
);

/// What stands behind a head, and whether it was never tried and is in the scope.
pub(super) const BEHIND: &str = "\
select sequence, state = 'waiting' and attempts = 0 and claim is null and due_at is null \
       and (?4 is null or kind in (select value from json_each(?4))) \
  from oncebox_waiting where consumer_id = ?1 and lane_id = ?2 and blocks = 1 and sequence > ?3 order by sequence limit ?5";

/// `returning` gives the rows in no order.
pub(super) const CLAIM: &str = concat!(
    "update oncebox_waiting set claim = ?2, due_at = ?3 + ",
    now_ms!(),
    " where sequence in (select value from json_each(?1)) returning ",
    claimed_columns!()
);

/// The heads without a due time: a loose scan over the lanes of the index, then the first row of
/// each.
pub(super) const LOST_HEADS: &str = "\
with recursive lanes(lane_id) as (
    select min(lane_id) from oncebox_waiting where consumer_id = ?1 and blocks = 1
    union all
    select (select min(w.lane_id) from oncebox_waiting as w where w.consumer_id = ?1 and w.blocks = 1 and w.lane_id > lanes.lane_id)
      from lanes where lanes.lane_id is not null),
heads(sequence) as (
    select (select w.sequence from oncebox_waiting as w
             where w.consumer_id = ?1 and w.blocks = 1 and w.lane_id = lanes.lane_id order by w.sequence limit 1)
      from lanes where lanes.lane_id is not null)
select w.sequence from heads join oncebox_waiting as w using (sequence) where w.state = 'waiting' and w.due_at is null";

/// How many milliseconds until the first head is due.
pub(super) const NEXT_DUE: &str = concat!(
    "select max(0, w.due_at - ",
    now_ms!(),
    ") from oncebox_waiting as w where w.consumer_id = ?1 and w.due_at is not null and ",
    in_scope!(),
    " and ",
    is_head!(),
    " order by w.due_at limit 1"
);

pub(super) const CLAIMED_TOO_LONG: &str = concat!(
    "select sequence from oncebox_waiting where consumer_id = ?1 and due_at > ",
    now_ms!(),
    " + ?2 and claim is not null"
);

/// Makes the first row of a lane due, if it waits without a due time.
pub(super) const WAKE_NEXT: &str = concat!(
    "update oncebox_waiting set due_at = ",
    now_ms!(),
    " where sequence = (select sequence from oncebox_waiting where consumer_id = ? and lane_id = ? and blocks = 1 ",
    "order by sequence limit 1) and state = 'waiting' and due_at is null"
);

#[async_trait]
impl Waiting for SqliteStore {
    async fn claim_due(
        &self,
        consumer: ConsumerId,
        scope: &Scope,
        claim: &Claim,
    ) -> Result<Option<ClaimedMessage>, StoreError> {
        // Most questions find nothing: they need no turn.
        if self.next_due(consumer, scope).await?.is_none_or(|due| !due.is_zero()) {
            return Ok(None);
        }
        let mut write = self.write().await?;
        let head = query_as::<_, (i64, bool)>(DUE_HEAD).bind(consumer.0);
        let head = head.bind(names(&scope.topics)).bind(names(&scope.places)).bind(scope.kinds.as_deref().map(names));
        let Some((head, suspect)) = head.fetch_optional(write.connection()).await? else {
            write.rollback().await?;
            return Ok(None);
        };
        let claimed = claim_rows(write.connection(), &[head], claim).await?.pop();
        write.commit().await?;
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
        let mut write = self.write().await?;
        let next = query_as::<_, (i64, bool)>(BEHIND).bind(consumer.0).bind(lane.to_vec()).bind(head.sequence);
        let next = next.bind(scope.kinds.as_deref().map(names)).bind(i64::try_from(limit).unwrap_or(i64::MAX));
        let next = next.fetch_all(write.connection()).await?;
        let run: Vec<i64> = next.into_iter().take_while(|(_, fits)| *fits).map(|(sequence, _)| sequence).collect();
        let claimed = if run.is_empty() { Vec::new() } else { claim_rows(write.connection(), &run, claim).await? };
        write.commit().await?;
        Ok(claimed)
    }

    async fn count_try(&self, claimed: &ClaimedMessage) -> Result<bool, StoreError> {
        let mut write = self.write().await?;
        let count = query("update oncebox_waiting set attempts = ?3 where sequence = ?1 and claim = ?2");
        let count = count.bind(claimed.sequence).bind(claimed.claim.as_bytes().to_vec());
        let done = count.bind(claimed.message.attempt).execute(write.connection()).await?.rows_affected();
        write.commit().await?;
        Ok(done == 1)
    }

    async fn next_due(&self, consumer: ConsumerId, scope: &Scope) -> Result<Option<Duration>, StoreError> {
        let next = query_scalar::<_, i64>(NEXT_DUE).bind(consumer.0);
        let next = next.bind(names(&scope.topics)).bind(names(&scope.places)).bind(scope.kinds.as_deref().map(names));
        let next = next.fetch_optional(self.pool()).await?;
        Ok(next.map(|left| Duration::from_millis(left.unsigned_abs())))
    }

    async fn postpone(&self, claimed: &ClaimedMessage, after: Duration, error: &str) -> Result<bool, StoreError> {
        let mut write = self.write().await?;
        let postpone = query(concat!(
            "update oncebox_waiting set claim = null, attempts = ?5, due_at = ?3 + ",
            now_ms!(),
            ", history = ",
            add_error!("history", "?5", "?4"),
            " where sequence = ?1 and claim = ?2"
        ));
        let postpone = postpone.bind(claimed.sequence).bind(claimed.claim.as_bytes().to_vec());
        let postpone = postpone.bind(millis(after)).bind(kept_error(error)).bind(claimed.message.attempt);
        let done = postpone.execute(write.connection()).await?.rows_affected();
        write.commit().await?;
        Ok(done == 1)
    }

    async fn give_back(&self, consumer: ConsumerId, claimed: &[ClaimedMessage]) -> Result<u64, StoreError> {
        let Some(first) = claimed.first() else { return Ok(0) };
        let mut write = self.write().await?;
        let mut given_back = 0;
        for one in claimed {
            // What stands behind a head has no due time; the head gets it back.
            let back = query(concat!(
                "update oncebox_waiting set claim = null, attempts = ?3, due_at = iif(lane_id is null, ",
                now_ms!(),
                ", null) where sequence = ?1 and claim = ?2"
            ));
            let back = back.bind(one.sequence).bind(one.claim.as_bytes().to_vec()).bind(one.tries);
            given_back += back.execute(write.connection()).await?.rows_affected();
        }
        wake_next(write.connection(), consumer.0, first.message.lane_id().map(|lane| lane.to_vec())).await?;
        write.commit().await?;
        Ok(given_back)
    }

    async fn give_back_all(&self, consumer: ConsumerId, claim: &Claim) -> Result<u64, StoreError> {
        let mut write = self.write().await?;
        let back = query_scalar::<_, Option<Vec<u8>>>(concat!(
            "update oncebox_waiting set claim = null, due_at = iif(lane_id is null, ",
            now_ms!(),
            ", null) where consumer_id = ?1 and due_at is not null and claim = ?2 returning lane_id"
        ));
        let back = back.bind(consumer.0).bind(claim.token.as_bytes().to_vec());
        let lanes = back.fetch_all(write.connection()).await?;
        if let Some(lane) = lanes.iter().flatten().next() {
            wake_next(write.connection(), consumer.0, Some(lane.clone())).await?;
        }
        write.commit().await?;
        Ok(lanes.len() as u64)
    }

    async fn bury(&self, claimed: &ClaimedMessage, reason: &str, error: &str, holds: bool) -> Result<bool, StoreError> {
        let mut write = self.write().await?;
        // An older dead row of the same content says the same: it makes room.
        let bury = query(concat!(
            "update or replace oncebox_waiting set state = 'dead', claim = null, due_at = null, reason = ?3, dead_at = ",
            now_ms!(),
            ", blocks = (?5 and lane_id is not null), attempts = ?6, history = ",
            add_error!("history", "?6", "?4"),
            " where sequence = ?1 and claim = ?2 returning consumer_id, lane_id"
        ));
        let bury = bury.bind(claimed.sequence).bind(claimed.claim.as_bytes().to_vec());
        let bury = bury.bind(reason).bind(kept_error(error)).bind(holds).bind(claimed.message.attempt);
        let buried = bury.fetch_optional(write.connection()).await?;
        if let Some(row) = &buried {
            wake_next(write.connection(), row.try_get(0)?, row.try_get(1)?).await?;
        }
        write.commit().await?;
        Ok(buried.is_some())
    }

    async fn wake(&self, consumer: ConsumerId, lanes: &[[u8; 16]]) -> Result<(), StoreError> {
        let mut write = self.write().await?;
        for lane in lanes {
            wake_next(write.connection(), consumer.0, Some(lane.to_vec())).await?;
        }
        write.commit().await
    }

    async fn sweep(&self, consumer: ConsumerId) -> Result<u64, StoreError> {
        Ok(self.end_claims(consumer).await? + self.wake_lost_heads(consumer).await?)
    }
}

impl SqliteStore {
    /// Ends claims that end later than any claim can: the clock went back (R22).
    async fn end_claims(&self, consumer: ConsumerId) -> Result<u64, StoreError> {
        let too_late: Vec<i64> =
            query_scalar(CLAIMED_TOO_LONG).bind(consumer.0).bind(millis(CLAIM_MAX)).fetch_all(self.pool()).await?;
        if too_late.is_empty() {
            return Ok(0);
        }
        let mut write = self.write().await?;
        let end = query(concat!(
            "update oncebox_waiting set due_at = ",
            now_ms!(),
            " where sequence in (select value from json_each(?)) and claim is not null"
        ));
        let end = end.bind(serde_json::Value::from(too_late).to_string());
        let ended = end.execute(write.connection()).await?.rows_affected();
        write.commit().await?;
        Ok(ended)
    }

    async fn wake_lost_heads(&self, consumer: ConsumerId) -> Result<u64, StoreError> {
        let lost: Vec<i64> = query_scalar(LOST_HEADS).bind(consumer.0).fetch_all(self.pool()).await?;
        if lost.is_empty() {
            return Ok(0);
        }
        let mut write = self.write().await?;
        let wake = query(concat!(
            "update oncebox_waiting as w set due_at = ",
            now_ms!(),
            " where w.sequence in (select value from json_each(?)) and w.state = 'waiting' and w.due_at is null and ",
            is_head!()
        ));
        let lost = serde_json::Value::from(lost).to_string();
        let woken = wake.bind(lost).execute(write.connection()).await?.rows_affected();
        write.commit().await?;
        Ok(woken)
    }
}

/// Takes the rows into the claim and gives their messages, in order.
async fn claim_rows(
    connection: &mut SqliteConnection,
    rows: &[i64],
    claim: &Claim,
) -> Result<Vec<ClaimedMessage>, StoreError> {
    let rows = query(CLAIM).bind(serde_json::Value::from(rows).to_string()).bind(claim.token.as_bytes().to_vec());
    let rows = rows.bind(millis(claim.length)).fetch_all(connection).await?;
    let mut claimed = rows.iter().map(claimed_message).collect::<Result<Vec<_>, _>>()?;
    claimed.sort_unstable_by_key(|claimed| claimed.sequence);
    Ok(claimed)
}

/// A JSON array for `json_each`.
fn names(names: &[String]) -> String {
    serde_json::Value::from(names).to_string()
}

/// Makes the first row of a lane due, if it waits without a due time.
pub(super) async fn wake_next(
    connection: &mut SqliteConnection,
    consumer: i32,
    lane: Option<Vec<u8>>,
) -> Result<(), StoreError> {
    let wake = query(WAKE_NEXT);
    wake.bind(consumer).bind(lane).execute(connection).await?;
    Ok(())
}

fn claimed_message(row: &SqliteRow) -> Result<ClaimedMessage, StoreError> {
    let uuid = |bytes: Vec<u8>| sixteen(&bytes).map(Uuid::from_bytes);
    let time: Option<String> = row.try_get("message_time")?;
    let parent: Option<String> = row.try_get("traceparent")?;
    let state: Option<String> = row.try_get("tracestate")?;
    let tries: u32 = row.try_get("attempts")?;
    Ok(ClaimedMessage {
        sequence: row.try_get("sequence")?,
        claim: uuid(row.try_get("claim")?)?,
        tries,
        suspect: false,
        message: Message {
            id: MessageId::from_uuid(uuid(row.try_get("message_id")?)?),
            id_text: row.try_get("id_text")?,
            topic: row.try_get("topic")?,
            key: row.try_get("key")?,
            kind: row.try_get("kind")?,
            headers: arrived_from_json(&row.try_get::<String, _>("headers")?)?,
            payload: row.try_get("payload")?,
            tombstone: row.try_get("tombstone")?,
            content_type: row.try_get("content_type")?,
            source: row.try_get("source")?,
            time: time.as_deref().and_then(wire::parse_time),
            trace: parent.and_then(|parent| TraceContext::parse(&parent, state.as_deref())),
            coordinates: Coordinates {
                place: row.try_get("place")?,
                partition: row.try_get("partition_no")?,
                offset: row.try_get("offset_no")?,
            },
            attempt: tries + 1,
        },
    })
}
