//! Messages that wait for a retry, one table for waiting and dead ones (R25).
//!
//! Guarantees: only heads are claimed, so two messages of one key never run at once; rows behind have no due time, so an empty
//! poll touches none of them; whoever removes a head makes the next of its key due in the same statement.

use std::time::Duration;

use sqlx::postgres::PgRow;
use sqlx::{Postgres, Row};
use uuid::Uuid;

use super::PostgresStore;
use super::text::{error_text, restored, stored};
use crate::error::StoreError;
use crate::message::{Coordinates, Message, MessageId, TraceContext};
use crate::store::bounded::{Ask, Bounded};
use crate::store::{Claim, ClaimedMessage, ConsumerId, ParkAs, Parked, Waiting};

/// The columns of a message, in the order that [`message_of`] reads.
macro_rules! message_columns {
    () => {
        "w.sequence, w.claim, w.attempts, w.message_id, w.id_text, w.topic, w.key, w.kind, w.header_names, w.header_values, \
         w.payload, w.tombstone, w.content_type, w.source, w.message_time, w.traceparent, w.tracestate, w.place, w.partition, \
         w.offset_at"
    };
}

/// A row that nothing older of its key blocks. Only heads are locked: plain order took two messages of a key at once.
const CLAIM: &str = concat!(
    "with head as (
       select w.sequence from oncebox.waiting w
        where w.consumer_id = $1 and w.due_at <= statement_timestamp() and w.state = 'waiting'
          and not exists (select 1 from oncebox.waiting o
                           where o.consumer_id = w.consumer_id and o.lane_id = w.lane_id and o.sequence < w.sequence
                             and (o.state = 'waiting' or o.holds))
        order by w.due_at limit $2 for update of w skip locked)
     update oncebox.waiting w
        set claim = $4, attempts = w.attempts + 1, due_at = statement_timestamp() + $3 * interval '1 second'
       from head where w.sequence = head.sequence
     returning ",
    message_columns!()
);

/// One row, as [`message_of`] reads it.
pub(super) const ROW: &str = concat!("select ", message_columns!(), " from oncebox.waiting w where w.sequence = $1");

/// What follows the end of a head: the next of its key, unless that one is dead and holds, becomes due.
macro_rules! next_is_due {
    () => {
        "next as (
           select n.sequence from ended e cross join lateral (
             select w.sequence from oncebox.waiting w
              where w.consumer_id = e.consumer_id and w.lane_id = e.lane_id and w.sequence <> e.sequence
                and (w.state = 'waiting' or w.holds)
              order by w.sequence limit 1) n),
         due as (
           update oncebox.waiting w set due_at = statement_timestamp() from next
            where w.sequence = next.sequence and w.state = 'waiting' and w.due_at is null)"
    };
}

const FINISH: &str = concat!(
    "with ended as (
       delete from oncebox.waiting where sequence = $1 and claim = $2 returning consumer_id, lane_id, sequence), ",
    next_is_due!(),
    " select pg_current_xact_id()::text from ended"
);

/// A try that ended: its error joins the history, which is kept to the newest 50.
macro_rules! history_with {
    ($error:literal) => {
        concat!(
            "case when jsonb_array_length(w.history) >= 50 then w.history - 0 else w.history end
             || jsonb_build_object('at', clock_timestamp(), 'attempt', w.attempts, 'error', ",
            $error,
            "::text)"
        )
    };
}

const POSTPONE: &str = concat!(
    "update oncebox.waiting w set claim = null, due_at = statement_timestamp() + $3 * interval '1 second', error = $4, history = ",
    history_with!("$4"),
    " where w.sequence = $1 and w.claim = $2"
);

/// The same delivery may be dead already: then this one leaves, for the two are one (`waiting_dead_once`).
const BURY: &str = concat!(
    "update oncebox.waiting w set state = 'dead', claim = null, due_at = null, reason = $3, error = $4,
            holds = $5 and w.lane_id is not null, dead_at = clock_timestamp(), history = ",
    history_with!("$4"),
    " where w.sequence = $1 and w.claim = $2
        and not exists (select 1 from oncebox.waiting d where d.state = 'dead' and d.consumer_id = w.consumer_id
                           and d.message_id = w.message_id and d.content_hash = w.content_hash)"
);

const PARK: &str = "
insert into oncebox.waiting (consumer_id, lane_id, state, due_at, holds, attempts, reason, error, history, message_id, content_hash,
  id_text, topic, key, kind, header_names, header_values, payload, tombstone, content_type, source, message_time, traceparent,
  tracestate, place, partition, offset_at, dead_at)
values ($1, $2, $3, clock_timestamp() + $4 * interval '1 second', $5, $6, $7, $8,
  coalesce((select a.history from oncebox.attempt a where a.consumer_id = $1 and a.message_id = $9 and a.history <> '[]'),
           case when $8::text is null then '[]'
                else jsonb_build_array(jsonb_build_object('at', clock_timestamp(), 'attempt', greatest($6, 1), 'error', $8::text)) end),
  $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22, $23, $24, $25, $26,
  case when $3 = 'dead' then clock_timestamp() end)
on conflict (consumer_id, message_id, content_hash) where state = 'dead' do nothing";

/// Heads without a due time, found by a loose index scan over the keys: as many steps as there are keys, not rows.
const SWEEP: &str = "
with recursive lane as (
  (select w.lane_id from oncebox.waiting w
    where w.consumer_id = $1 and w.lane_id is not null and (w.state = 'waiting' or w.holds)
    order by w.lane_id limit 1)
  union all
  select (select w.lane_id from oncebox.waiting w
           where w.consumer_id = $1 and w.lane_id > l.lane_id and (w.state = 'waiting' or w.holds)
           order by w.lane_id limit 1)
    from lane l where l.lane_id is not null),
head as (
  select (select w.sequence from oncebox.waiting w
           where w.consumer_id = $1 and w.lane_id = l.lane_id and (w.state = 'waiting' or w.holds)
           order by w.sequence limit 1) as sequence
    from lane l where l.lane_id is not null)
update oncebox.waiting w set due_at = statement_timestamp() from head
 where w.sequence = head.sequence and w.state = 'waiting' and w.due_at is null";

impl Waiting for PostgresStore {
    async fn claim_due(
        &self,
        consumer: ConsumerId,
        limit: usize,
        claim: &Claim,
    ) -> Result<Vec<ClaimedMessage>, StoreError> {
        let rows = sqlx::query(CLAIM)
            .bind(consumer.0)
            .bind(i64::try_from(limit).unwrap_or(i64::MAX))
            .bind(claim.length.as_secs_f64())
            .bind(claim.token)
            .all(&self.pool)
            .await?;
        let mut claimed = rows.iter().map(claimed_of).collect::<Result<Vec<_>, _>>()?;
        claimed.sort_unstable_by_key(|claimed| claimed.sequence);
        Ok(claimed)
    }

    async fn next_due(&self, consumer: ConsumerId) -> Result<Option<Duration>, StoreError> {
        let row = sqlx::query(
            "select extract(epoch from w.due_at - statement_timestamp())::float8 from oncebox.waiting w
              where w.consumer_id = $1 and w.due_at is not null order by w.due_at limit 1",
        )
        .bind(consumer.0)
        .optional(&self.pool)
        .await?;
        let seconds = row.map(|row| row.try_get::<f64, _>(0)).transpose()?;
        Ok(seconds.map(|seconds| Duration::try_from_secs_f64(seconds).unwrap_or_default()))
    }

    async fn postpone(&self, claimed: &ClaimedMessage, after: Duration, error: &str) -> Result<bool, StoreError> {
        let done = sqlx::query(POSTPONE)
            .bind(claimed.sequence)
            .bind(claimed.claim)
            .bind(after.as_secs_f64())
            .bind(error_text(error))
            .run(&self.pool)
            .await?;
        Ok(done.rows_affected() == 1)
    }

    async fn give_back(&self, claimed: &ClaimedMessage) -> Result<bool, StoreError> {
        let done = sqlx::query(
            "update oncebox.waiting set claim = null, attempts = greatest(attempts - 1, 0), due_at = statement_timestamp()
              where sequence = $1 and claim = $2",
        )
        .bind(claimed.sequence)
        .bind(claimed.claim)
        .run(&self.pool)
        .await?;
        Ok(done.rows_affected() == 1)
    }

    async fn give_back_all(&self, consumer: ConsumerId, claim: &Claim) -> Result<u64, StoreError> {
        let done = sqlx::query(
            "update oncebox.waiting set claim = null, attempts = greatest(attempts - 1, 0), due_at = statement_timestamp()
              where consumer_id = $1 and due_at is not null and claim = $2",
        )
        .bind(consumer.0)
        .bind(claim.token)
        .run(&self.pool)
        .await?;
        Ok(done.rows_affected())
    }

    async fn bury(&self, claimed: &ClaimedMessage, reason: &str, error: &str, holds: bool) -> Result<bool, StoreError> {
        let mut tx = self.transaction().await?;
        let buried = sqlx::query(BURY)
            .bind(claimed.sequence)
            .bind(claimed.claim)
            .bind(reason)
            .bind(error_text(error))
            .bind(holds)
            .run(&mut tx)
            .await?;
        let done = if buried.rows_affected() == 0 {
            finish(&mut tx, claimed).await?.is_some()
        } else {
            if !holds {
                next_is_due(&mut tx, claimed.sequence).await?;
            }
            true
        };
        tx.commit().await?;
        Ok(done)
    }

    async fn sweep(&self, consumer: ConsumerId) -> Result<u64, StoreError> {
        self.make_inbox_ranges().await?;
        Ok(sqlx::query(SWEEP).bind(consumer.0).run(&self.pool).await?.rows_affected())
    }
}

/// Stores a message as waiting or dead.
pub(super) async fn park(
    connection: &mut Bounded<Postgres>,
    consumer: ConsumerId,
    parked: &Parked,
) -> Result<(), StoreError> {
    let message = &parked.message;
    let lane = message.lane_id().map(Uuid::from_bytes);
    let (state, after, holds, reason) = match &parked.park_as {
        ParkAs::Due(after) => ("waiting", Some(after.as_secs_f64()), false, None),
        // Without a key there is nothing to stand behind.
        ParkAs::Behind => ("waiting", lane.is_none().then_some(0.0), false, None),
        ParkAs::Dead { reason, holds } => ("dead", None, *holds && lane.is_some(), Some(reason.as_str())),
    };
    let (names, values): (Vec<_>, Vec<_>) =
        message.headers.iter().map(|(name, value)| (stored(name), value.as_slice())).unzip();
    sqlx::query(PARK)
        .bind(consumer.0)
        .bind(lane)
        .bind(state)
        .bind(after)
        .bind(holds)
        .bind(i32::try_from(parked.attempts).unwrap_or(i32::MAX))
        .bind(reason)
        .bind(parked.error.as_deref().map(error_text))
        .bind(message.id.uuid())
        .bind(Uuid::from_bytes(message.content_hash()))
        .bind(stored(&message.id_text))
        .bind(stored(&message.topic))
        .bind(&message.key)
        .bind(stored(&message.kind))
        .bind(names)
        .bind(values)
        .bind(&message.payload)
        .bind(message.tombstone)
        .bind(message.content_type.as_deref().map(stored))
        .bind(stored(&message.source))
        .bind(message.time)
        .bind(message.trace.as_ref().map(|trace| &trace.traceparent))
        .bind(message.trace.as_ref().and_then(|trace| trace.tracestate.as_deref()).map(stored))
        .bind(stored(&message.coordinates.place))
        .bind(message.coordinates.partition)
        .bind(message.coordinates.offset)
        .run(connection)
        .await?;
    Ok(())
}

/// Removes a claimed row and makes the next of its key due; the answer is the id of this transaction, none where the claim is
/// not ours any more.
pub(super) async fn finish(
    connection: &mut Bounded<Postgres>,
    claimed: &ClaimedMessage,
) -> Result<Option<String>, StoreError> {
    let row = sqlx::query(FINISH).bind(claimed.sequence).bind(claimed.claim).optional(connection).await?;
    Ok(row.map(|row| row.try_get(0)).transpose()?)
}

/// Makes the first of a key due, after the row `sequence` of it stopped blocking.
pub(super) async fn next_is_due(connection: &mut Bounded<Postgres>, sequence: i64) -> Result<(), StoreError> {
    const NEXT: &str = concat!(
        "with ended as (select consumer_id, lane_id, sequence from oncebox.waiting where sequence = $1), ",
        next_is_due!(),
        " select 1"
    );
    sqlx::query(NEXT).bind(sequence).run(connection).await?;
    Ok(())
}

fn claimed_of(row: &PgRow) -> Result<ClaimedMessage, StoreError> {
    Ok(ClaimedMessage { sequence: row.try_get(0)?, claim: row.try_get(1)?, message: message_of(row)? })
}

/// A message as it was parked; its `attempt` is the number of tries counted.
pub(super) fn message_of(row: &PgRow) -> Result<Message, StoreError> {
    let names: Vec<String> = row.try_get(8)?;
    let values: Vec<Vec<u8>> = row.try_get(9)?;
    let parent: Option<String> = row.try_get(15)?;
    let state: Option<String> = row.try_get(16)?;
    Ok(Message {
        attempt: row.try_get::<i32, _>(2)?.unsigned_abs(),
        id: MessageId::from_uuid(row.try_get(3)?),
        id_text: restored(row.try_get(4)?),
        topic: restored(row.try_get(5)?),
        key: row.try_get(6)?,
        kind: restored(row.try_get(7)?),
        headers: names.into_iter().map(restored).zip(values).collect(),
        payload: row.try_get(10)?,
        tombstone: row.try_get(11)?,
        content_type: row.try_get::<Option<String>, _>(12)?.map(restored),
        source: restored(row.try_get(13)?),
        time: row.try_get(14)?,
        trace: parent.map(|traceparent| TraceContext { traceparent, tracestate: state.map(restored) }),
        coordinates: Coordinates {
            place: restored(row.try_get(17)?),
            partition: row.try_get(18)?,
            offset: row.try_get(19)?,
        },
    })
}
