//! Messages that wait for a retry, one table for waiting and dead ones (R25).
//!
//! Guarantees: only heads are claimed, so two messages of one key never run at once; rows behind
//! have no due time, so an empty poll touches none of them; whoever removes a head makes the next
//! of its key due in the same statement.

use std::time::Duration;

use async_trait::async_trait;
use sqlx::postgres::{PgArguments, PgRow};
use sqlx::query::Query;
use sqlx::{Postgres, Row};
use uuid::Uuid;

use super::PostgresStore;
use super::inbox::witness;
use super::text::{error_text, restored, stored};
use crate::error::StoreError;
use crate::message::{Coordinates, Message, MessageId, TraceContext};
use crate::store::bounded::{Ask, Bounded};
use crate::store::{CLAIM_MAX, Claim, ClaimedMessage, ConsumerId, ParkAs, Parked, Scope, Waiting};

/// The columns of a message, in the order that [`message_of`] reads.
macro_rules! message_columns {
    () => {
        "w.sequence, w.claim, w.attempts, w.message_id, w.id_text, w.topic, w.key, w.kind, w.header_names, w.header_values, \
         w.payload, w.tombstone, w.content_type, w.source, w.message_time, w.traceparent, w.tracestate, w.place, w.partition_no, \
         w.offset_no"
    };
}

/// A row `w` of the consumer $1 that nothing older of its key blocks, within the scope $2 to $4.
macro_rules! is_head_in_scope {
    () => {
        "w.consumer_id = $1 and w.state = 'waiting'
          and (w.topic = any($2) or w.place = any($3)) and ($4::text[] is null or w.kind = any($4))
          and not exists (select 1 from oncebox.waiting o
                           where o.consumer_id = w.consumer_id and o.lane_id = w.lane_id and o.sequence < w.sequence
                             and (o.state = 'waiting' or o.holds))"
    };
}

/// Only heads are locked: plain order took two messages of a key at once.
const CLAIM: &str = concat!(
    "with head as (
       select w.sequence, w.claim is not null as suspect from oncebox.waiting w
        where w.due_at <= statement_timestamp() and ",
    is_head_in_scope!(),
    "   order by w.due_at limit 1 for update of w skip locked)
     update oncebox.waiting w set claim = $5, due_at = statement_timestamp() + $6 * interval '1 second'
       from head where w.sequence = head.sequence
     returning ",
    message_columns!(),
    ", head.suspect"
);

/// What was never tried behind a head, up to the first row that does not fit.
const CLAIM_BEHIND: &str = concat!(
    "with next as (
       select w.sequence, w.state = 'waiting' and w.attempts = 0 and w.claim is null and w.due_at is null
                          and ($4::text[] is null or w.kind = any($4)) as fits
         from oncebox.waiting w
        where w.consumer_id = $1 and w.lane_id = $2 and w.sequence > $3 and (w.state = 'waiting' or w.holds)
        order by w.sequence limit $7),
     run as (select n.sequence from (select sequence, bool_and(fits) over (order by sequence) as goes from next) n where n.goes)
     update oncebox.waiting w set claim = $5, due_at = statement_timestamp() + $6 * interval '1 second'
       from run where w.sequence = run.sequence and w.claim is null and w.state = 'waiting'
     returning ",
    message_columns!(),
    ", false"
);

const NEXT_DUE: &str = concat!(
    "select extract(epoch from w.due_at - statement_timestamp())::float8 from oncebox.waiting w
      where w.due_at is not null and ",
    is_head_in_scope!(),
    " order by w.due_at limit 1"
);

/// What follows the end of rows of one key: the next of it, unless that one is dead and holds,
/// becomes due.
macro_rules! next_is_due {
    () => {
        "next as (
           select n.sequence from (select distinct consumer_id, lane_id from ended) e cross join lateral (
             select w.sequence from oncebox.waiting w
              where w.consumer_id = e.consumer_id and w.lane_id = e.lane_id
                and w.sequence not in (select sequence from ended) and (w.state = 'waiting' or w.holds)
              order by w.sequence limit 1) n),
         due as (
           update oncebox.waiting w set due_at = statement_timestamp() from next
            where w.sequence = next.sequence and w.state = 'waiting' and w.due_at is null)"
    };
}

const FINISH: &str = concat!(
    "with ended as (
       delete from oncebox.waiting where sequence = any($1) and claim = $2 returning consumer_id, lane_id, sequence), ",
    next_is_due!(),
    " select ",
    witness!("pg_current_xact_id()"),
    ", (select count(*) from ended)"
);

/// A try that ended: its error joins the history, which is kept to the newest 50.
macro_rules! history_with {
    ($error:literal, $attempt:literal) => {
        concat!(
            "case when jsonb_array_length(w.history) >= 50 then w.history - 0 else w.history end
             || jsonb_build_object('at', clock_timestamp(), 'attempt', ",
            $attempt,
            "::integer, 'error', ",
            $error,
            "::text)"
        )
    };
}

const POSTPONE: &str = concat!(
    "update oncebox.waiting w set claim = null, due_at = statement_timestamp() + $3 * interval '1 second', error = $4,
            attempts = $5, history = ",
    history_with!("$4", "$5"),
    " where w.sequence = $1 and w.claim = $2"
);

/// The same delivery may be dead already: then this one leaves, for the two are one
/// (`waiting_dead_once`).
const BURY: &str = concat!(
    "update oncebox.waiting w set state = 'dead', claim = null, due_at = null, reason = $3, error = $4,
            holds = $5 and w.lane_id is not null, dead_at = clock_timestamp(), attempts = $6, history = ",
    history_with!("$4", "$6"),
    " where w.sequence = $1 and w.claim = $2
        and not exists (select 1 from oncebox.waiting d where d.state = 'dead' and d.consumer_id = w.consumer_id
                           and d.message_id = w.message_id and d.content_hash = w.content_hash)"
);

const PARK: &str = "
insert into oncebox.waiting (consumer_id, lane_id, state, due_at, holds, attempts, reason, error, history, message_id, content_hash,
  id_text, topic, key, kind, header_names, header_values, payload, tombstone, content_type, source, message_time, traceparent,
  tracestate, place, partition_no, offset_no, dead_at)
values ($1, $2, $3, clock_timestamp() + $4 * interval '1 second', $5, $6, $7, $8,
  coalesce((select a.history from oncebox.attempt a where a.consumer_id = $1 and a.message_id = $9 and a.history <> '[]'),
           case when $8::text is null then '[]'
                else jsonb_build_array(jsonb_build_object('at', clock_timestamp(), 'attempt', greatest($6, 1), 'error', $8::text)) end),
  $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22, $23, $24, $25, $26,
  case when $3 = 'dead' then clock_timestamp() end)
on conflict (consumer_id, message_id, content_hash) where state = 'dead' do nothing";

/// Given back: whether it is a head is asked of the rows as they stand.
macro_rules! due_if_head {
    () => {
        "case when exists (select 1 from oncebox.waiting o
                            where o.consumer_id = w.consumer_id and o.lane_id = w.lane_id and o.sequence < w.sequence
                              and (o.state = 'waiting' or o.holds)) then null else statement_timestamp() end"
    };
}

const GIVE_BACK: &str = concat!(
    "update oncebox.waiting w set claim = null, attempts = r.tries, due_at = ",
    due_if_head!(),
    " from unnest($1::bigint[], $2::integer[]) as r (sequence, tries) where w.sequence = r.sequence and w.claim = $3"
);

const GIVE_BACK_ALL: &str = concat!(
    "update oncebox.waiting w set claim = null, due_at = ",
    due_if_head!(),
    " where w.consumer_id = $1 and w.due_at is not null and w.claim = $2"
);

const WAKE: &str = "
update oncebox.waiting w set due_at = statement_timestamp()
  from (select (select n.sequence from oncebox.waiting n
                 where n.consumer_id = $1 and n.lane_id = l.lane_id and (n.state = 'waiting' or n.holds)
                 order by n.sequence limit 1) as sequence
          from unnest($2::uuid[]) as l (lane_id)) head
 where w.sequence = head.sequence and w.state = 'waiting' and w.due_at is null";

/// Claims that end later than any claim can: the clock went back (R22).
const END_CLAIMS: &str = "
update oncebox.waiting set due_at = statement_timestamp()
 where consumer_id = $1 and claim is not null and due_at > statement_timestamp() + $2 * interval '1 second'";

/// Heads without a due time, found by a loose index scan over the keys: as many steps as there are
/// keys, not rows.
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

#[async_trait]
impl Waiting for PostgresStore {
    async fn claim_due(
        &self,
        consumer: ConsumerId,
        scope: &Scope,
        claim: &Claim,
    ) -> Result<Option<ClaimedMessage>, StoreError> {
        let row = in_scope(CLAIM, consumer, scope)
            .bind(claim.token)
            .bind(claim.length.as_secs_f64())
            .optional(&self.pool)
            .await?;
        row.as_ref().map(claimed_of).transpose()
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
        let rows = sqlx::query(CLAIM_BEHIND)
            .bind(consumer.0)
            .bind(Uuid::from_bytes(lane))
            .bind(head.sequence)
            .bind(scope.kinds.as_deref().map(texts))
            .bind(claim.token)
            .bind(claim.length.as_secs_f64())
            .bind(i64::try_from(limit).unwrap_or(i64::MAX))
            .all(&self.pool)
            .await?;
        let mut claimed = rows.iter().map(claimed_of).collect::<Result<Vec<_>, _>>()?;
        claimed.sort_unstable_by_key(|claimed| claimed.sequence);
        Ok(claimed)
    }

    async fn count_try(&self, claimed: &ClaimedMessage) -> Result<bool, StoreError> {
        let done = sqlx::query("update oncebox.waiting set attempts = $3 where sequence = $1 and claim = $2")
            .bind(claimed.sequence)
            .bind(claimed.claim)
            .bind(count(claimed.message.attempt))
            .run(&self.pool)
            .await?;
        Ok(done.rows_affected() == 1)
    }

    async fn next_due(&self, consumer: ConsumerId, scope: &Scope) -> Result<Option<Duration>, StoreError> {
        let row = in_scope(NEXT_DUE, consumer, scope).optional(&self.pool).await?;
        let seconds = row.map(|row| row.try_get::<f64, _>(0)).transpose()?;
        Ok(seconds.map(|seconds| Duration::try_from_secs_f64(seconds).unwrap_or_default()))
    }

    async fn postpone(&self, claimed: &ClaimedMessage, after: Duration, error: &str) -> Result<bool, StoreError> {
        let done = sqlx::query(POSTPONE)
            .bind(claimed.sequence)
            .bind(claimed.claim)
            .bind(after.as_secs_f64())
            .bind(error_text(error))
            .bind(count(claimed.message.attempt))
            .run(&self.pool)
            .await?;
        Ok(done.rows_affected() == 1)
    }

    async fn give_back(&self, _: ConsumerId, claimed: &[ClaimedMessage]) -> Result<u64, StoreError> {
        let Some(first) = claimed.first() else { return Ok(0) };
        let done = sqlx::query(GIVE_BACK)
            .bind(claimed.iter().map(|one| one.sequence).collect::<Vec<_>>())
            .bind(claimed.iter().map(|one| count(one.tries)).collect::<Vec<_>>())
            .bind(first.claim)
            .run(&self.pool)
            .await?;
        Ok(done.rows_affected())
    }

    async fn give_back_all(&self, consumer: ConsumerId, claim: &Claim) -> Result<u64, StoreError> {
        let done = sqlx::query(GIVE_BACK_ALL).bind(consumer.0).bind(claim.token).run(&self.pool).await?;
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
            .bind(count(claimed.message.attempt))
            .run(&mut tx)
            .await?;
        let done = if buried.rows_affected() == 0 {
            finish(&mut tx, std::slice::from_ref(claimed)).await?.is_some()
        } else {
            if !holds {
                next_is_due(&mut tx, claimed.sequence).await?;
            }
            true
        };
        tx.commit().await?;
        Ok(done)
    }

    async fn wake(&self, consumer: ConsumerId, lanes: &[[u8; 16]]) -> Result<(), StoreError> {
        let lanes: Vec<Uuid> = lanes.iter().copied().map(Uuid::from_bytes).collect();
        sqlx::query(WAKE).bind(consumer.0).bind(lanes).run(&self.pool).await?;
        Ok(())
    }

    async fn sweep(&self, consumer: ConsumerId) -> Result<u64, StoreError> {
        self.make_inbox_ranges().await?;
        let ended = sqlx::query(END_CLAIMS).bind(consumer.0).bind(CLAIM_MAX.as_secs_f64()).run(&self.pool).await?;
        let woken = sqlx::query(SWEEP).bind(consumer.0).run(&self.pool).await?;
        Ok(ended.rows_affected() + woken.rows_affected())
    }
}

/// A statement whose first parameters are those of [`is_head_in_scope`].
fn in_scope(statement: &'static str, consumer: ConsumerId, scope: &Scope) -> Query<'static, Postgres, PgArguments> {
    sqlx::query(statement)
        .bind(consumer.0)
        .bind(texts(&scope.topics))
        .bind(texts(&scope.places))
        .bind(scope.kinds.as_deref().map(texts))
}

fn texts(texts: &[String]) -> Vec<String> {
    texts.iter().map(|text| stored(text).into_owned()).collect()
}

fn count(tries: u32) -> i32 {
    i32::try_from(tries).unwrap_or(i32::MAX)
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
        .bind(count(parked.attempts))
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

/// Removes claimed rows of a key and makes the next of it due; the answer is the id of this
/// transaction, none where the claim is not ours any more.
pub(super) async fn finish(
    connection: &mut Bounded<Postgres>,
    claimed: &[ClaimedMessage],
) -> Result<Option<String>, StoreError> {
    let Some(first) = claimed.first() else { return Ok(None) };
    let sequences: Vec<i64> = claimed.iter().map(|one| one.sequence).collect();
    let row = sqlx::query(FINISH).bind(sequences).bind(first.claim).one(connection).await?;
    let ended: i64 = row.try_get(1)?;
    Ok(if usize::try_from(ended) == Ok(claimed.len()) { Some(row.try_get(0)?) } else { None })
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
    let mut message = message_of(row)?;
    let tries = message.attempt;
    message.attempt += 1;
    Ok(ClaimedMessage { sequence: row.try_get(0)?, claim: row.try_get(1)?, tries, suspect: row.try_get(20)?, message })
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
