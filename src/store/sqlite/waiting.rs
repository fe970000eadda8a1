//! Messages of SQLite that wait for a retry, ordered per key (R25).
//!
//! A claim is a token in the row and a due time pushed to the claim's end; whoever comes after that takes it over. One writer at
//! a time means that heads need no locks: what the statement sees is what is.

use std::time::Duration;

use sqlx::sqlite::{SqliteConnection, SqliteRow};
use sqlx::{Row, query, query_scalar};
use uuid::Uuid;

use super::connect::SqliteStore;
use super::inbox::{add_error, shorten};
use super::message::{arrived_from_json, sixteen};
use super::{millis, now_ms};
use crate::error::StoreError;
use crate::message::{Coordinates, Message, MessageId, TraceContext, wire};
use crate::store::{Base, Claim, ClaimedMessage, ConsumerId, Waiting};

/// True for a row `w` of the waiting table that no older one of its lane blocks.
macro_rules! is_head {
    () => {
        "(w.lane is null or not exists (select 1 from oncebox_waiting as o where o.consumer_id = w.consumer_id \
         and o.lane = w.lane and o.blocks = 1 and o.sequence < w.sequence))"
    };
}

/// Heads come by due time; `returning` gives them in no order.
pub(super) const CLAIM: &str = concat!(
    "update oncebox_waiting set claim = ?4, attempts = attempts + 1, due_at = ?3 + ",
    now_ms!(),
    " where sequence in (select w.sequence from oncebox_waiting as w where w.consumer_id = ?1 and w.due_at <= ",
    now_ms!(),
    " and ",
    is_head!(),
    " order by w.due_at, w.sequence limit ?2) ",
    "returning sequence, claim, message_id, attempts, id_text, topic, key, kind, headers, payload, tombstone, content_type, ",
    "source, time, traceparent, tracestate, place, partition, \"offset\""
);

/// The heads without a due time: a loose scan over the lanes of the index, then the first row of each.
pub(super) const LOST_HEADS: &str = "\
with recursive lanes(lane) as (
    select min(lane) from oncebox_waiting where consumer_id = ?1 and blocks = 1
    union all
    select (select min(w.lane) from oncebox_waiting as w where w.consumer_id = ?1 and w.blocks = 1 and w.lane > lanes.lane)
      from lanes where lanes.lane is not null),
heads(sequence) as (
    select (select w.sequence from oncebox_waiting as w
             where w.consumer_id = ?1 and w.blocks = 1 and w.lane = lanes.lane order by w.sequence limit 1)
      from lanes where lanes.lane is not null)
select w.sequence from heads join oncebox_waiting as w using (sequence) where w.state = 'waiting' and w.due_at is null";

/// How many milliseconds until the first head is due.
pub(super) const NEXT_DUE: &str = concat!(
    "select max(0, w.due_at - ",
    now_ms!(),
    ") from oncebox_waiting as w where w.consumer_id = ? and w.due_at is not null and ",
    is_head!(),
    " order by w.due_at limit 1"
);

/// Makes the first row of a lane due, if it waits without a due time.
pub(super) const WAKE_NEXT: &str = concat!(
    "update oncebox_waiting set due_at = ",
    now_ms!(),
    " where sequence = (select sequence from oncebox_waiting where consumer_id = ? and lane = ? and blocks = 1 ",
    "order by sequence limit 1) and state = 'waiting' and due_at is null"
);

impl Waiting for SqliteStore {
    async fn claim_due(
        &self,
        consumer: ConsumerId,
        limit: usize,
        claim: &Claim,
    ) -> Result<Vec<ClaimedMessage>, StoreError> {
        // Most questions find nothing: they need no turn.
        if self.next_due(consumer).await?.is_none_or(|due| !due.is_zero()) {
            return Ok(Vec::new());
        }
        let mut write = self.write().await?;
        let heads = query(CLAIM).bind(consumer.0).bind(i64::try_from(limit).unwrap_or(i64::MAX));
        let heads = heads.bind(millis(claim.length)).bind(claim.token.as_bytes().to_vec());
        let rows = heads.fetch_all(write.connection()).await?;
        let mut claimed = rows.iter().map(claimed_message).collect::<Result<Vec<_>, _>>()?;
        write.commit().await?;
        claimed.sort_unstable_by_key(|claimed| claimed.sequence);
        Ok(claimed)
    }

    async fn next_due(&self, consumer: ConsumerId) -> Result<Option<Duration>, StoreError> {
        let next = query_scalar::<_, i64>(NEXT_DUE);
        let next = next.bind(consumer.0).fetch_optional(self.pool()).await?;
        Ok(next.map(|left| Duration::from_millis(left.unsigned_abs())))
    }

    async fn postpone(&self, claimed: &ClaimedMessage, after: Duration, error: &str) -> Result<bool, StoreError> {
        let mut write = self.write().await?;
        let postpone = query(concat!(
            "update oncebox_waiting set claim = null, due_at = ?3 + ",
            now_ms!(),
            ", errors = ",
            add_error!("errors", "attempts", "?4"),
            " where sequence = ?1 and claim = ?2"
        ));
        let postpone = postpone.bind(claimed.sequence).bind(claimed.claim.as_bytes().to_vec());
        let postpone = postpone.bind(millis(after)).bind(shorten(error));
        let done = postpone.execute(write.connection()).await?.rows_affected();
        write.commit().await?;
        Ok(done == 1)
    }

    async fn give_back(&self, claimed: &ClaimedMessage) -> Result<bool, StoreError> {
        let mut write = self.write().await?;
        let back = query(concat!(
            "update oncebox_waiting set claim = null, attempts = attempts - 1, due_at = ",
            now_ms!(),
            " where sequence = ?1 and claim = ?2"
        ));
        let back = back.bind(claimed.sequence).bind(claimed.claim.as_bytes().to_vec());
        let done = back.execute(write.connection()).await?.rows_affected();
        write.commit().await?;
        Ok(done == 1)
    }

    async fn give_back_all(&self, consumer: ConsumerId, claim: &Claim) -> Result<u64, StoreError> {
        let mut write = self.write().await?;
        let give_back = query(concat!(
            "update oncebox_waiting set claim = null, attempts = max(attempts - 1, 0), due_at = ",
            now_ms!(),
            " where consumer_id = ?1 and due_at is not null and claim = ?2"
        ));
        let give_back = give_back.bind(consumer.0).bind(claim.token.as_bytes().to_vec());
        let given_back = give_back.execute(write.connection()).await?.rows_affected();
        write.commit().await?;
        Ok(given_back)
    }

    async fn bury(&self, claimed: &ClaimedMessage, reason: &str, error: &str, holds: bool) -> Result<bool, StoreError> {
        let mut write = self.write().await?;
        // An older dead row of the same content says the same: it makes room.
        let bury = query(concat!(
            "update or replace oncebox_waiting set state = 'dead', claim = null, due_at = null, reason = ?3, dead_at = ",
            now_ms!(),
            ", blocks = (?5 and lane is not null), errors = ",
            add_error!("errors", "attempts", "?4"),
            " where sequence = ?1 and claim = ?2 returning consumer_id, lane"
        ));
        let bury = bury.bind(claimed.sequence).bind(claimed.claim.as_bytes().to_vec());
        let buried = bury.bind(reason).bind(shorten(error)).bind(holds).fetch_optional(write.connection()).await?;
        if let Some(row) = &buried {
            wake_next(write.connection(), row.try_get(0)?, row.try_get(1)?).await?;
        }
        write.commit().await?;
        Ok(buried.is_some())
    }

    async fn sweep(&self, consumer: ConsumerId) -> Result<u64, StoreError> {
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
    let time: Option<String> = row.try_get("time")?;
    let parent: Option<String> = row.try_get("traceparent")?;
    let state: Option<String> = row.try_get("tracestate")?;
    Ok(ClaimedMessage {
        sequence: row.try_get("sequence")?,
        claim: uuid(row.try_get("claim")?)?,
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
                partition: row.try_get("partition")?,
                offset: row.try_get("offset")?,
            },
            attempt: row.try_get("attempts")?,
        },
    })
}
