//! Rows of the outbox that the broker refused (dead) or that wait behind such a row or for their
//! topic (held), and the decisions about their positions (R17, R18).
//!
//! Guarantees: a row is copied whole into `outbox_dead`, and deleted from it, only in the
//! transaction of a checkpoint, which a session whose shard was taken over cannot commit. A
//! decision about a position is kept until the row's place in the outbox is freed, so that nothing
//! is sent again when the cursor is set back.

use std::collections::HashSet;

use sqlx::{Postgres, Row};

use super::read::message_of;
use crate::error::StoreError;
use crate::outbox::port::{Diversion, Mark, OutboxRow, first_within};
use crate::store::bounded::{Ask, Bounded};
use crate::store::sql::message::error_text;
use crate::store::sql::outbox::{self, SentNotDiscarded};

/// Copies rows of the outbox. A row that is here already (after a cursor was set back) gets the new
/// state; its history stays.
const DIVERT: &str = "
insert into oncebox.outbox_dead as t (position, bucket, message_id, topic, key, kind, headers, payload, content_type, traceparent,
  tracestate, created_at, state, cause, reason, holds, history)
select o.position, o.bucket, o.message_id, o.topic, o.key, o.kind, o.headers, o.payload, o.content_type, o.traceparent,
  o.tracestate, o.created_at, d.state, d.cause, d.reason, d.holds,
  case when d.reason is null then '[]'
       else jsonb_build_array(jsonb_build_object('at', clock_timestamp(), 'attempt', 1, 'error', d.reason)) end
  from unnest($1::bigint[], $2::text[], $3::text[], $4::text[], $5::boolean[]) d (position, state, cause, reason, holds)
  join oncebox.outbox o on o.position = d.position
on conflict (position) do update set state = excluded.state, cause = excluded.cause, reason = excluded.reason,
  holds = excluded.holds, requested = null, requested_at = null, requested_by = null, diverted_at = clock_timestamp()";

/// Changes a row that was to be sent again and stays here. An operator's request to send it is
/// done, so it is cleared; one to discard it stands, because a change does not carry it out. Of the
/// history the last 50 entries are kept (`- 0` takes out the first one).
const CHANGE: &str = "
update oncebox.outbox_dead t
   set state = d.state, cause = d.cause, reason = d.reason, holds = d.holds, attempts = t.attempts + 1,
       requested = case when t.requested = 'discard' then t.requested end,
       requested_at = case when t.requested = 'discard' then t.requested_at end,
       requested_by = case when t.requested = 'discard' then t.requested_by end, diverted_at = clock_timestamp(),
       history = case when d.reason is null then t.history
         else case when jsonb_array_length(t.history) >= 50 then t.history - 0 else t.history end
           || jsonb_build_object('at', clock_timestamp(), 'attempt', t.attempts + 1, 'error', d.reason) end
  from unnest($1::bigint[], $2::text[], $3::text[], $4::text[], $5::boolean[]) d (position, state, cause, reason, holds)
 where t.position = d.position";

const DECIDE: &str = "
insert into oncebox.decision (position, decision) select position, $2 from unnest($1::bigint[]) position
on conflict (position) do update set decision = excluded.decision, decided_at = clock_timestamp()";

/// Deletes rows that were sent; those whose discard was asked for only where `$2` says so.
const RELEASE: &str = "
with gone as (delete from oncebox.outbox_dead where position = any($1) and ($2 or requested is distinct from 'discard')
  returning position, edited)
insert into oncebox.decision (position, decision) select position, case when edited then 'edited' else 'released' end from gone
on conflict (position) do update set decision = excluded.decision, decided_at = clock_timestamp()";

const DISCARD: &str = "
with gone as (delete from oncebox.outbox_dead where position = any($1) returning position)
insert into oncebox.decision (position, decision) select position, 'discarded' from gone
on conflict (position) do update set decision = excluded.decision, decided_at = clock_timestamp()";

/// The columns of several [`Diversion`], for `unnest`.
#[derive(Default)]
struct Columns {
    positions: Vec<i64>,
    states: Vec<&'static str>,
    causes: Vec<&'static str>,
    reasons: Vec<Option<String>>,
    holds: Vec<bool>,
}

impl Columns {
    fn of(rows: &[(i64, Diversion)]) -> Self {
        let mut columns = Self::default();
        for (position, diversion) in rows {
            let (state, cause, reason, holds) = outbox::columns(diversion);
            columns.positions.push(*position);
            columns.states.push(state);
            columns.causes.push(cause);
            columns.reasons.push(reason.map(error_text));
            columns.holds.push(holds);
        }
        columns
    }
}

/// Writes what a mark says of dead and held rows, in the transaction of the mark. Returns the
/// highest position that it names, or 0, and which messages were sent and not discarded.
pub(super) async fn write(
    connection: &mut Bounded<Postgres>,
    mark: &Mark,
) -> Result<(i64, SentNotDiscarded), StoreError> {
    for (statement, rows) in [(DIVERT, &mark.diverted), (CHANGE, &mark.changed)] {
        if rows.is_empty() {
            continue;
        }
        let columns = Columns::of(rows);
        let done = sqlx::query(statement)
            .bind(&columns.positions)
            .bind(&columns.states)
            .bind(&columns.causes)
            .bind(&columns.reasons)
            .bind(&columns.holds)
            .run(&mut *connection)
            .await?;
        outbox::check_all(done.rows_affected(), rows)?;
    }
    let skipped: Vec<i64> = mark
        .diverted
        .iter()
        .filter(|(_, diversion)| matches!(diversion, Diversion::Dead { holds: false, .. }))
        .map(|(position, _)| *position)
        .collect();
    if !skipped.is_empty() {
        sqlx::query(DECIDE).bind(&skipped).bind("skipped").run(&mut *connection).await?;
    }
    let sent = release(connection, &mark.released).await?;
    if !mark.discarded.is_empty() {
        sqlx::query(DISCARD).bind(&mark.discarded).run(&mut *connection).await?;
    }
    let named = mark.diverted.iter().chain(&mark.changed).map(|(position, _)| position);
    Ok((named.chain(&mark.released).chain(&mark.discarded).copied().max().unwrap_or(0), sent))
}

/// Deletes rows that were sent. A row whose discard was asked for is deleted last, so that a
/// request is either seen here or finds no row: a look before the deletion could miss one.
async fn release(connection: &mut Bounded<Postgres>, positions: &[i64]) -> Result<SentNotDiscarded, StoreError> {
    let delete = |all: bool| sqlx::query(RELEASE).bind(positions).bind(all);
    if positions.is_empty()
        || outbox::are_all(delete(false).run(&mut *connection).await?.rows_affected(), positions.len())
    {
        return Ok(SentNotDiscarded::default());
    }
    let sent = outbox::sent_not_discarded(connection, positions).await?;
    delete(true).run(connection).await?;
    Ok(sent)
}

/// Returns those of the positions that were decided or stand in the dead and held table.
pub(super) async fn decided(connection: &mut Bounded<Postgres>, positions: &[i64]) -> Result<HashSet<i64>, StoreError> {
    let found: Vec<i64> = sqlx::query_scalar(
        "select position from oncebox.decision where position = any($1)
         union all select position from oncebox.outbox_dead where position = any($1)",
    )
    .bind(positions)
    .all(connection)
    .await?;
    Ok(found.into_iter().collect())
}

const WEIGHTS: &str = "
select position, (octet_length(payload) + coalesce(octet_length(headers::text), 0))::bigint
  from oncebox.outbox_dead where position = any($1) order by position";

/// Whole rows at these positions, dead or held, in position order, up to the limit of bytes, but at
/// least one. A row that no longer exists is left out.
pub(super) async fn held(
    connection: &mut Bounded<Postgres>,
    positions: &[i64],
    bytes_max: usize,
) -> Result<Vec<OutboxRow>, StoreError> {
    let weights: Vec<(i64, i64)> = sqlx::query_as(WEIGHTS).bind(positions).all(&mut *connection).await?;
    let rows = sqlx::query(
        "select position, bucket, message_id, topic, key, kind, headers, payload, content_type, traceparent, tracestate, created_at
           from oncebox.outbox_dead where position = any($1) order by position",
    )
    .bind(first_within(weights, bytes_max))
    .all(connection)
    .await?;
    rows.iter()
        .map(|row| {
            Ok(OutboxRow {
                position: row.try_get(0)?,
                bucket: u8::try_from(row.try_get::<i16, _>(1)?).unwrap_or(u8::MAX),
                message: message_of(row, 2)?,
            })
        })
        .collect()
}
