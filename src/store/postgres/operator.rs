//! What an operator sees of dead messages and does with them; every act writes an audit row in its
//! own transaction.
//!
//! Guarantees: on the outbox only a request is written, which the owner of the shard carries out
//! (R17); a message of a consumer that is redriven has its inbox row, so that a second copy is a
//! duplicate (R31).

mod heads;

use std::time::Duration;

use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Postgres, Row};
use uuid::Uuid;

use super::PostgresStore;
use super::door::{headers_json, parse_headers};
use super::text::{restored, stored};
use crate::error::StoreError;
use crate::message::MessageId;
use crate::store::bounded::{Ask, Bounded};
use crate::store::operator::{BURIED, Redriven, firsts, redriven};
use crate::store::sql::message::whole;
use crate::store::sql::waiting::wake;
use crate::store::{
    ActContext, AuditEntry, ConsumerId, DeadFilter, DeadMessage, DeadPlace, DeadState, Forgotten, HistoryEntry,
    LockWait, Operator, OperatorAct, OperatorOutcome, Status,
};

/// The header of a message that was redriven under a new id: the id it had.
const CAUSATION: &str = "oncebox-causation-id";
/// What a list shows unless told otherwise.
const LIMIT: usize = 100;

/// Rows of the outbox in one state. Only what holds others is asked how many stand behind it, up to
/// `COUNTED_MAX`.
macro_rules! outbox_in {
    ($state:literal) => {
        concat!(
            "select t.position, t.message_id, t.topic, t.key, t.kind, coalesce(t.reason, 'stands behind another one of its key'),
                    t.reason, t.attempts, t.diverted_at,
                    case when t.holds then (select count(*) from (select from oncebox.outbox_dead h where h.topic = t.topic
                        and left(h.key, 512) = left(t.key, 512) and h.key = t.key and h.position > t.position and h.state = 'held'
                        limit 10000) b) else 0 end,
                    t.requested, t.history::text, t.headers::text, t.payload, t.content_type,
                    extract(epoch from clock_timestamp() - t.created_at)::float8, t.cause
               from oncebox.outbox_dead t
              where t.state = '", $state, "'
                and ($1::bigint is null or t.position = $1) and ($2::uuid is null or t.message_id = $2)
                and ($3::text is null or t.topic = $3) and ($4::text is null or t.key = $4) and ($5::text is null or t.reason = $5)
              order by t.position limit $6"
        )
    };
}

/// Rows of consumers that meet a condition.
macro_rules! of_consumers_where {
    ($condition:literal) => {
        concat!(
            "select w.sequence, w.message_id, w.topic, w.key, w.kind, w.reason, w.error, w.attempts, coalesce(w.dead_at, w.stored_at),
                    case when w.holds or w.due_at is not null then (select count(*) from (select from oncebox.waiting h
                        where h.consumer_id = w.consumer_id and h.lane_id = w.lane_id and h.sequence > w.sequence
                          and h.state = 'waiting' limit 10000) b) else 0 end,
                    w.history::text, w.header_names, w.header_values, w.payload, w.content_type, c.name, w.id_text, w.due_at
               from oncebox.waiting w join oncebox.consumer c on c.consumer_id = w.consumer_id
              where ", $condition, "
                and ($1::bigint is null or w.sequence = $1) and ($2::uuid is null or w.message_id = $2)
                and ($3::text is null or w.topic = $3) and ($4::bytea is null or w.key = $4) and ($5::text is null or w.reason = $5)
                and ($7::text is null or c.name = $7)
              order by w.sequence limit $6"
        )
    };
}

/// Of rows that were found by what has a due time, which no row has behind a dead one: to ask each
/// row that stands whether one is before it costs the more, the more are held.
const WAITING_OF_HEADS: &str = of_consumers_where!("w.state = 'waiting' and w.sequence = any($8)");

fn outbox_sql(state: DeadState) -> Option<&'static str> {
    match state {
        DeadState::Dead => Some(outbox_in!("dead")),
        DeadState::Held => Some(outbox_in!("held")),
        DeadState::Waiting => None,
    }
}

fn consumers_sql(state: DeadState) -> &'static str {
    match state {
        DeadState::Dead => of_consumers_where!("w.state = 'dead'"),
        DeadState::Held => of_consumers_where!(
            "w.state = 'waiting' and exists (select 1 from oncebox.waiting d
               where d.consumer_id = w.consumer_id and d.lane_id = w.lane_id and d.holds)"
        ),
        DeadState::Waiting => of_consumers_where!(
            "w.state = 'waiting' and not exists (select 1 from oncebox.waiting d
               where d.consumer_id = w.consumer_id and d.lane_id = w.lane_id and d.holds)"
        ),
    }
}

const LOCK_WAITS: &str = "
select w.pid::text, left(w.query, 100), extract(epoch from clock_timestamp() - coalesce(l.since, w.query_start))::float8,
       array(select format('connection %s%s, %s', b.pid, coalesce(' of ' || nullif(b.application_name, ''), ''), coalesce(b.state, 'unknown'))
               from pg_stat_activity b where b.pid = any (pg_blocking_pids(w.pid)))
  from pg_stat_activity w
 cross join lateral (select min(k.waitstart) as since from pg_locks k where k.pid = w.pid and not k.granted) l
 where w.datname = current_database() and w.wait_event_type = 'Lock'
   and coalesce(l.since, w.query_start) < clock_timestamp() - $1 * interval '1 second'
 order by 3 desc limit 20";

impl Operator for PostgresStore {
    async fn status(&self) -> Result<Status, StoreError> {
        super::status::status(self).await
    }

    async fn lock_waits(&self, longer_than: Duration) -> Result<Vec<LockWait>, StoreError> {
        let rows = sqlx::query(LOCK_WAITS).bind(longer_than.as_secs_f64()).all(&self.pool).await?;
        rows.iter()
            .map(|row| {
                Ok(LockWait {
                    connection: row.try_get(0)?,
                    statement: row.try_get(1)?,
                    seconds: row.try_get(2)?,
                    holders: row.try_get(3)?,
                })
            })
            .collect()
    }

    async fn mend(&self, context: &ActContext) -> Result<Vec<String>, StoreError> {
        super::mend::sequence(self, context).await
    }

    async fn audit(&self, id: Option<Uuid>, limit: usize) -> Result<Vec<AuditEntry>, StoreError> {
        let rows = sqlx::query(
            "select at, actor, act, reason, topic, number, message_id, detail::text from oncebox.audit
              where $1::uuid is null or message_id = $1 order by audit_id desc limit $2",
        );
        let rows = rows.bind(id).bind(i64::try_from(limit).unwrap_or(i64::MAX)).all(&self.pool).await?;
        rows.iter()
            .map(|row| {
                Ok(AuditEntry {
                    at: row.try_get(0)?,
                    actor: row.try_get(1)?,
                    act: row.try_get(2)?,
                    reason: row.try_get(3)?,
                    place: restored(row.try_get(4)?),
                    number: row.try_get(5)?,
                    message_id: row.try_get(6)?,
                    detail: row.try_get(7)?,
                })
            })
            .collect()
    }

    async fn forget_consumer(&self, name: &str, context: &ActContext) -> Result<Forgotten, StoreError> {
        let mut tx = self.transaction().await?;
        let found = sqlx::query(
            "select c.consumer_id, extract(epoch from clock_timestamp() - c.seen_at)::float8,
                    (select count(*) from oncebox.waiting w where w.consumer_id = c.consumer_id),
                    (select count(*) from oncebox.inbox i where i.consumer_id = c.consumer_id)
               from oncebox.consumer c where c.name = $1 for update of c",
        );
        let row = found.bind(name).optional(&mut tx).await?.ok_or_else(|| Forgotten::unknown(name))?;
        let consumer: i32 = row.try_get(0)?;
        Forgotten::check(name, row.try_get(1)?)?;
        let (messages, inbox_rows) = (row.try_get::<i64, _>(2)?, row.try_get::<i64, _>(3)?);
        let forgotten = Forgotten { messages: messages.unsigned_abs(), inbox_rows: inbox_rows.unsigned_abs() };
        if context.dry_run {
            tx.rollback().await?;
            return Ok(forgotten);
        }
        for table in ["waiting", "attempt", "assignment"] {
            let delete = format!("delete from oncebox.{table} where consumer_id = $1");
            sqlx::query(AssertSqlSafe(delete)).bind(consumer).run(&mut tx).await?;
        }
        let rename = "update oncebox.consumer set name = $2 where consumer_id = $1";
        sqlx::query(rename).bind(consumer).bind(Forgotten::name(consumer)).run(&mut tx).await?;
        sqlx::query(
            "insert into oncebox.audit (actor, act, reason, number, message_id, topic, detail)
             values ($1, 'forget', $2, '', $3, $4, jsonb_build_object('messages', $5::bigint, 'inboxRows', $6::bigint))",
        )
        .bind(&context.actor)
        .bind(&context.reason)
        .bind(Uuid::nil())
        .bind(name)
        .bind(messages)
        .bind(inbox_rows)
        .run(&mut tx)
        .await?;
        tx.commit().await?;
        // Its inbox goes in pages: a transaction over all of it would hold vacuum back. Whoever is
        // stopped here finds the name that it has now in the list, and forgets that.
        for table in ["inbox_timed", "inbox_untimed"] {
            let page = format!(
                "delete from oncebox.{table} where consumer_id = $1 and message_id in (
                   select message_id from oncebox.{table} where consumer_id = $1 limit 10000)"
            );
            while sqlx::query(AssertSqlSafe(page.clone())).bind(consumer).run(&self.pool).await?.rows_affected() > 0 {}
        }
        sqlx::query("delete from oncebox.consumer where consumer_id = $1").bind(consumer).run(&self.pool).await?;
        Ok(forgotten)
    }

    async fn dead(&self, filter: &DeadFilter) -> Result<Vec<DeadMessage>, StoreError> {
        let mut connection = self.pool.acquire().await?;
        let found = find(&mut connection, filter).await?;
        Ok(found.into_iter().map(|(message, _)| message).collect())
    }

    async fn act(
        &self,
        filter: &DeadFilter,
        act: &OperatorAct,
        context: &ActContext,
    ) -> Result<OperatorOutcome, StoreError> {
        let mut tx = self.transaction().await?;
        let found = find(&mut tx, filter).await?;
        refuse_unsafe(&found, act, context)?;
        let mut outcome = OperatorOutcome { dry_run: context.dry_run, ..OperatorOutcome::default() };
        for (message, _) in &found {
            if act.buries(message)? && !bury(&mut tx, message).await? {
                return Err(OperatorAct::runs_now(message));
            }
            let done = match (&message.place, number_of(message, 'o'), number_of(message, 'c')) {
                (DeadPlace::Outbox, Some(position), _) => request(&mut tx, position, message, act, context).await?,
                (DeadPlace::Consumer(_), ..) if *act == OperatorAct::Bury => Some(Redriven::Waits),
                (DeadPlace::Consumer(_), _, Some(sequence)) => carry_out(&mut tx, sequence, message, act).await?,
                _ => None,
            };
            let Some(done) = done else { continue };
            outcome.add(message, done);
            audit(&mut tx, message, act, done, context).await?;
        }
        if context.dry_run {
            tx.rollback().await?;
        } else {
            tx.commit().await?;
        }
        Ok(outcome)
    }
}

/// Messages of both sides, oldest first, with the age of the message where it is the outbox's.
async fn find(
    connection: &mut Bounded<Postgres>,
    filter: &DeadFilter,
) -> Result<Vec<(DeadMessage, Option<Duration>)>, StoreError> {
    let limit = if filter.limit == 0 { LIMIT } else { filter.limit };
    let (outbox_number, consumer_number) = match filter.number.as_deref() {
        None => (None, None),
        Some(number) => match (parse_number(number, 'o'), parse_number(number, 'c')) {
            (None, None) => {
                return Err(StoreError::Refused(format!(
                    "`{number}` is no number of a dead message: use `o17` or `c9`, as `oncebox dead list` shows them"
                )));
            }
            numbers => numbers,
        },
    };
    let only_outbox = outbox_number.is_some() || filter.consumer.as_deref() == Some("outbox");
    let only_consumers = consumer_number.is_some() || filter.consumer.as_deref().is_some_and(|name| name != "outbox");
    let rows_max = i64::try_from(limit).unwrap_or(i64::MAX);
    let mut found = Vec::new();
    for state in filter.states() {
        if let Some(sql) = outbox_sql(*state).filter(|_| !only_consumers) {
            let rows = sqlx::query(sql)
                .bind(outbox_number)
                .bind(filter.message_id)
                .bind(&filter.topic)
                .bind(&filter.key)
                .bind(&filter.reason)
                .bind(rows_max)
                .all(&mut *connection)
                .await?;
            let is_held_for_destination =
                |row: &PgRow| row.try_get::<&str, _>(16).is_ok_and(|cause| cause == "destination");
            let topics = rows.iter().map(|row| row.try_get::<&str, _>(2).ok().filter(|_| is_held_for_destination(row)));
            let firsts = firsts(topics);
            for (at, row) in rows.iter().enumerate() {
                let age = Duration::try_from_secs_f64(row.try_get(15)?).unwrap_or_default();
                let mut message = outbox_message(row, *state)?;
                if firsts.contains(&at) {
                    message.behind = heads::held_of_topic(connection, &message.topic, row.try_get(0)?).await?;
                }
                found.push((message, Some(age)));
            }
        }
        if !only_outbox {
            let of_heads = *state == DeadState::Waiting && consumer_number.is_none() && filter.message_id.is_none();
            let waiting = if of_heads { heads::waiting(connection, filter, rows_max).await? } else { Vec::new() };
            let sql = if of_heads { WAITING_OF_HEADS } else { consumers_sql(*state) };
            let query = sqlx::query(sql)
                .bind(consumer_number)
                .bind(filter.message_id)
                .bind(filter.topic.as_deref().map(stored))
                .bind(filter.key.as_ref().map(String::as_bytes))
                .bind(&filter.reason)
                .bind(rows_max)
                .bind(&filter.consumer);
            let query = if of_heads { query.bind(waiting) } else { query };
            let rows = query.all(&mut *connection).await?;
            for row in &rows {
                found.push((consumer_message(row, *state)?, None));
            }
        }
    }
    found.sort_by_key(|(message, _)| message.dead_at);
    found.truncate(limit);
    Ok(found)
}

fn parse_number(number: &str, place: char) -> Option<i64> {
    number.strip_prefix(place)?.parse().ok()
}

fn number_of(message: &DeadMessage, place: char) -> Option<i64> {
    parse_number(&message.number, place)
}

fn outbox_message(row: &PgRow, state: DeadState) -> Result<DeadMessage, StoreError> {
    let headers = row.try_get::<Option<&str>, _>(12)?.map(parse_headers).transpose()?;
    Ok(DeadMessage {
        number: format!("o{}", row.try_get::<i64, _>(0)?),
        state,
        place: DeadPlace::Outbox,
        message_id: row.try_get(1)?,
        sent_id: None,
        topic: row.try_get(2)?,
        key: row.try_get(3)?,
        kind: row.try_get(4)?,
        reason: row.try_get(5)?,
        error: row.try_get(6)?,
        attempts: row.try_get::<i32, _>(7)?.unsigned_abs(),
        dead_at: row.try_get(8)?,
        next_try: None,
        behind: row.try_get::<i64, _>(9)?.unsigned_abs(),
        requested: row.try_get(10)?,
        history: history(row.try_get(11)?)?,
        headers: headers.unwrap_or_default(),
        payload: row.try_get(13)?,
        content_type: row.try_get(14)?,
    })
}

fn consumer_message(row: &PgRow, state: DeadState) -> Result<DeadMessage, StoreError> {
    let key: Option<Vec<u8>> = row.try_get(3)?;
    let names: Vec<String> = row.try_get(11)?;
    let values: Vec<Vec<u8>> = row.try_get(12)?;
    let shown = values.into_iter().map(|value| String::from_utf8_lossy(&value).into_owned());
    let message_id = row.try_get(1)?;
    let (reason, next_try): (Option<String>, Option<_>) = (row.try_get(5)?, row.try_get(17)?);
    Ok(DeadMessage {
        number: format!("c{}", row.try_get::<i64, _>(0)?),
        state,
        place: DeadPlace::Consumer(row.try_get(15)?),
        message_id,
        sent_id: DeadMessage::sent_id(message_id, restored(row.try_get(16)?)),
        topic: restored(row.try_get(2)?),
        key: key.and_then(|key| String::from_utf8(key).ok()),
        kind: restored(row.try_get(4)?),
        reason: reason.unwrap_or_else(|| state.reason_of_consumer(next_try.is_some()).to_owned()),
        error: row.try_get(6)?,
        attempts: row.try_get::<i32, _>(7)?.unsigned_abs(),
        dead_at: row.try_get(8)?,
        next_try,
        behind: row.try_get::<i64, _>(9)?.unsigned_abs(),
        requested: None,
        history: history(row.try_get(10)?)?,
        headers: names.into_iter().map(restored).zip(shown).collect(),
        payload: row.try_get(13)?,
        content_type: row.try_get::<Option<String>, _>(14)?.map(restored),
    })
}

fn history(json: &str) -> Result<Vec<HistoryEntry>, StoreError> {
    serde_json::from_str(json).map_err(|error| StoreError::Corrupt(format!("an error history: {error}")))
}

fn refuse_unsafe(
    found: &[(DeadMessage, Option<Duration>)],
    act: &OperatorAct,
    context: &ActContext,
) -> Result<(), StoreError> {
    if matches!(act, OperatorAct::RedriveAs { .. }) && found.len() > 1 {
        return Err(StoreError::Refused(format!(
            "a new id is for one message, {} match; name one by its number",
            found.len()
        )));
    }
    let Some(age_max) = context.redrive_age_max.filter(|_| *act == OperatorAct::Redrive) else { return Ok(()) };
    match found.iter().find(|(_, age)| age.is_some_and(|age| age > age_max)) {
        None => Ok(()),
        Some((message, _)) => Err(StoreError::Refused(format!(
            "message {} was enqueued more than {} ago: inboxes may have purged its id, and would run it again or call it too \
             old; redrive it with `--new-id`",
            message.number,
            humantime::format_duration(age_max)
        ))),
    }
}

/// No more tries for a consumer's message. False where a process has its claim, or the same
/// delivery is dead already.
async fn bury(connection: &mut Bounded<Postgres>, message: &DeadMessage) -> Result<bool, StoreError> {
    let buried = sqlx::query(
        "update oncebox.waiting w
            set state = 'dead', claim = null, due_at = null, reason = $2, holds = w.lane_id is not null, dead_at = clock_timestamp()
          where w.sequence = $1 and w.state = 'waiting' and (w.claim is null or w.due_at <= statement_timestamp())
            and not exists (select 1 from oncebox.waiting d where d.state = 'dead' and d.consumer_id = w.consumer_id
                               and d.message_id = w.message_id and d.content_hash = w.content_hash)",
    );
    let buried = buried.bind(number_of(message, 'c')).bind(BURIED).run(connection).await?;
    Ok(buried.rows_affected() == 1)
}

/// Writes a request; none where the row is not dead any more or something was asked for it already.
async fn request(
    connection: &mut Bounded<Postgres>,
    position: i64,
    message: &DeadMessage,
    act: &OperatorAct,
    context: &ActContext,
) -> Result<Option<Redriven>, StoreError> {
    let (requested, id, payload) = match act {
        OperatorAct::Redrive => ("redrive", None, None),
        OperatorAct::RedriveAs { id, payload } => ("redrive", Some(*id), payload.as_deref()),
        OperatorAct::Bury | OperatorAct::Discard => ("discard", None, None),
    };
    let headers = id.and_then(|_| {
        let mut headers = message.headers.clone();
        headers.retain(|(name, _)| name != CAUSATION);
        headers.push((CAUSATION.to_owned(), message.message_id.to_string()));
        headers_json(&headers)
    });
    let done = sqlx::query(
        "update oncebox.outbox_dead
            set requested = $2, requested_at = clock_timestamp(), requested_by = $3, edited = edited or $4::uuid is not null,
                message_id = coalesce($4, message_id), payload = coalesce($5, payload), headers = coalesce($6::text::json, headers)
          where position = $1 and (state = 'dead' or $2 = 'discard') and requested is null",
    )
    .bind(position)
    .bind(requested)
    .bind(&context.actor)
    .bind(id)
    .bind(payload)
    .bind(headers)
    .run(connection)
    .await?;
    Ok((done.rows_affected() == 1).then_some(Redriven::Waits))
}

/// Changes a consumer's row at once; none where it is not dead any more.
async fn carry_out(
    connection: &mut Bounded<Postgres>,
    sequence: i64,
    message: &DeadMessage,
    act: &OperatorAct,
) -> Result<Option<Redriven>, StoreError> {
    let dead = sqlx::query(
        "select consumer_id, content_hash from oncebox.waiting where sequence = $1 and state = 'dead' for update",
    )
    .bind(sequence)
    .optional(&mut *connection)
    .await?;
    let Some(row) = dead else { return Ok(None) };
    let (consumer, own): (i32, Uuid) = (row.try_get(0)?, row.try_get(1)?);
    let (id, hash) = match act {
        OperatorAct::Bury | OperatorAct::Discard => {
            discard(connection, sequence).await?;
            return Ok(Some(Redriven::Waits));
        }
        OperatorAct::Redrive => (message.message_id, own),
        OperatorAct::RedriveAs { id, payload } => {
            (*id, rename(connection, sequence, message, *id, payload.as_deref()).await?)
        }
    };
    let redriven = redriven(message, act, inbox_row(connection, consumer, id, hash).await?)?;
    match redriven {
        Redriven::Waits => make_due(connection, sequence).await?,
        Redriven::AlreadyHandled => discard(connection, sequence).await?,
    }
    Ok(Some(redriven))
}

async fn discard(connection: &mut Bounded<Postgres>, sequence: i64) -> Result<(), StoreError> {
    let gone: Option<(i32, Option<Uuid>)> =
        sqlx::query_as("delete from oncebox.waiting where sequence = $1 returning consumer_id, lane_id")
            .bind(sequence)
            .optional(&mut *connection)
            .await?;
    let Some((consumer, lane)) = gone else { return Ok(()) };
    wake(connection, ConsumerId(consumer), lane.map(Uuid::into_bytes).as_slice()).await
}

/// Waiting again, tries counted from nothing; due now unless an older row of its key stands before
/// it.
async fn make_due(connection: &mut Bounded<Postgres>, sequence: i64) -> Result<(), StoreError> {
    sqlx::query(
        "update oncebox.waiting w
            set state = 'waiting', reason = null, dead_at = null, holds = false, attempts = 0,
                due_at = case when w.lane_id is null or not exists (
                  select 1 from oncebox.waiting o where o.consumer_id = w.consumer_id and o.lane_id = w.lane_id
                     and o.sequence < w.sequence and (o.state = 'waiting' or o.holds)) then clock_timestamp() end
          where w.sequence = $1",
    )
    .bind(sequence)
    .run(connection)
    .await?;
    Ok(())
}

/// Inserts the inbox row of a message that is redriven, so that a second copy is a duplicate (a
/// verdict left none, a new id has none: R31). None where it was inserted, else whether the row
/// that stood there has this content.
async fn inbox_row(
    connection: &mut Bounded<Postgres>,
    consumer: i32,
    id: Uuid,
    hash: Uuid,
) -> Result<Option<bool>, StoreError> {
    let is_timed = MessageId::from_uuid(id).unix_millis().is_some();
    let insert = match is_timed {
        true => {
            "insert into oncebox.inbox_timed (message_id, content_hash, consumer_id) values ($1, $2, $3) on conflict do nothing"
        }
        false => {
            "insert into oncebox.inbox_untimed (message_id, content_hash, consumer_id) values ($1, $2, $3) on conflict do nothing"
        }
    };
    let done = sqlx::query(insert).bind(id).bind(hash).bind(consumer).run(&mut *connection).await?;
    if done.rows_affected() == 1 {
        return Ok(None);
    }
    let row = sqlx::query("select content_hash = $3 from oncebox.inbox where message_id = $1 and consumer_id = $2")
        .bind(id)
        .bind(consumer)
        .bind(hash)
        .one(connection)
        .await?;
    Ok(Some(row.try_get(0)?))
}

/// Gives a consumer's row a new id and perhaps a new payload; the answer is its new content hash.
async fn rename(
    connection: &mut Bounded<Postgres>,
    sequence: i64,
    message: &DeadMessage,
    id: Uuid,
    payload: Option<&[u8]>,
) -> Result<Uuid, StoreError> {
    let mut whole = whole(connection, sequence).await?;
    whole.headers.retain(|(name, _)| name != CAUSATION);
    whole.headers.push((CAUSATION.to_owned(), message.message_id.to_string().into_bytes()));
    if let Some(payload) = payload {
        whole.payload = payload.to_vec();
        whole.tombstone = false;
    }
    let hash = Uuid::from_bytes(whole.content_hash());
    let (names, values): (Vec<_>, Vec<_>) =
        whole.headers.iter().map(|(name, value)| (stored(name), value.as_slice())).unzip();
    sqlx::query(
        "update oncebox.waiting set message_id = $2, id_text = $3, content_hash = $4, header_names = $5, header_values = $6,
                payload = $7, tombstone = $8 where sequence = $1",
    )
    .bind(sequence)
    .bind(id)
    .bind(id.to_string())
    .bind(hash)
    .bind(names)
    .bind(values)
    .bind(&whole.payload)
    .bind(whole.tombstone)
    .run(connection)
    .await?;
    Ok(hash)
}

async fn audit(
    connection: &mut Bounded<Postgres>,
    message: &DeadMessage,
    act: &OperatorAct,
    done: Redriven,
    context: &ActContext,
) -> Result<(), StoreError> {
    let (new_id, edited) = match act {
        OperatorAct::RedriveAs { id, payload } => (Some(*id), payload.is_some()),
        _ => (None, false),
    };
    sqlx::query(
        "insert into oncebox.audit (actor, act, reason, number, message_id, topic, detail)
         values ($1, $2, $3, $4, $5, $6, jsonb_strip_nulls(jsonb_build_object('newId', $7::uuid, 'editedPayload', nullif($8, false),
           'deadReason', $9::text)))",
    )
    .bind(&context.actor)
    .bind(act.name())
    .bind(&context.reason)
    .bind(&message.number)
    .bind(message.message_id)
    .bind(stored(&message.topic))
    .bind(new_id)
    .bind(edited)
    .bind(done.detail(&message.reason))
    .run(connection)
    .await?;
    Ok(())
}
