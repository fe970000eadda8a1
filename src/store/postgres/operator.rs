//! What an operator sees of dead messages and does with them; every act writes an audit row in its own transaction.
//!
//! Guarantees: on the outbox only a request is written, which the owner of the shard carries out (R17); a message of a consumer
//! that is redriven has its inbox row, so that a second copy is a duplicate (R31).

use std::time::Duration;

use sqlx::postgres::PgRow;
use sqlx::{Postgres, Row};
use uuid::Uuid;

use super::PostgresStore;
use super::door::{headers_json, parse_headers};
use super::text::{restored, stored};
use super::waiting::next_is_due;
use crate::error::StoreError;
use crate::message::MessageId;
use crate::store::bounded::{Ask, Bounded};
use crate::store::{
    ActContext, DeadFilter, DeadMessage, DeadPlace, HistoryEntry, Operator, OperatorAct, OperatorOutcome, Status,
};

/// The header of a message that was redriven under a new id: the id it had.
const CAUSATION: &str = "oncebox-causation-id";
/// What a list shows unless told otherwise.
const LIMIT: usize = 100;

const OUTBOX_DEAD: &str = "
select t.position, t.message_id, t.topic, t.key, t.kind, coalesce(t.reason, ''), t.reason, t.attempts, t.diverted_at,
       case when t.holds then (select count(*) from oncebox.outbox_dead h where h.topic = t.topic
           and left(h.key, 512) = left(t.key, 512) and h.key = t.key and h.position > t.position and h.state = 'held') else 0 end,
       t.requested, t.history::text, t.headers::text, t.payload, t.content_type,
       extract(epoch from clock_timestamp() - t.created_at)::float8
  from oncebox.outbox_dead t
 where t.state = 'dead'
   and ($1::bigint is null or t.position = $1) and ($2::uuid is null or t.message_id = $2)
   and ($3::text is null or t.topic = $3) and ($4::text is null or t.key = $4) and ($5::text is null or t.reason = $5)
 order by t.position limit $6";

const CONSUMER_DEAD: &str = "
select w.sequence, w.message_id, w.topic, w.key, w.kind, w.reason, w.error, w.attempts, w.dead_at,
       case when w.holds then (select count(*) from oncebox.waiting h where h.consumer_id = w.consumer_id
           and h.lane_id = w.lane_id and h.sequence > w.sequence and h.state = 'waiting') else 0 end,
       w.history::text, w.header_names, w.header_values, w.payload, w.content_type, c.name
  from oncebox.waiting w join oncebox.consumer c on c.consumer_id = w.consumer_id
 where w.state = 'dead'
   and ($1::bigint is null or w.sequence = $1) and ($2::uuid is null or w.message_id = $2)
   and ($3::text is null or w.topic = $3) and ($4::bytea is null or w.key = $4) and ($5::text is null or w.reason = $5)
   and ($7::text is null or c.name = $7)
 order by w.sequence limit $6";

impl Operator for PostgresStore {
    async fn status(&self) -> Result<Status, StoreError> {
        super::status::status(self).await
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
        let mut numbers = Vec::with_capacity(found.len());
        for (message, _) in &found {
            let done = context.dry_run
                || match (&message.place, number_of(message, 'o'), number_of(message, 'c')) {
                    (DeadPlace::Outbox, Some(position), _) => request(&mut tx, position, message, act, context).await?,
                    (DeadPlace::Consumer(_), _, Some(sequence)) => carry_out(&mut tx, sequence, message, act).await?,
                    _ => false,
                };
            if !done {
                continue;
            }
            numbers.push(message.number.clone());
            if !context.dry_run {
                audit(&mut tx, message, act, context).await?;
            }
        }
        tx.commit().await?;
        Ok(OperatorOutcome { numbers, dry_run: context.dry_run })
    }
}

/// Dead messages of both sides, oldest first, with the age of the message where it is the outbox's.
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
    if !only_consumers {
        let rows = sqlx::query(OUTBOX_DEAD)
            .bind(outbox_number)
            .bind(filter.message_id)
            .bind(&filter.topic)
            .bind(&filter.key)
            .bind(&filter.reason)
            .bind(rows_max)
            .all(&mut *connection)
            .await?;
        for row in &rows {
            let age = Duration::try_from_secs_f64(row.try_get(15)?).unwrap_or_default();
            found.push((outbox_message(row)?, Some(age)));
        }
    }
    if !only_outbox {
        let rows = sqlx::query(CONSUMER_DEAD)
            .bind(consumer_number)
            .bind(filter.message_id)
            .bind(filter.topic.as_deref().map(stored))
            .bind(filter.key.as_ref().map(String::as_bytes))
            .bind(&filter.reason)
            .bind(rows_max)
            .bind(&filter.consumer)
            .all(connection)
            .await?;
        for row in &rows {
            found.push((consumer_message(row)?, None));
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

fn outbox_message(row: &PgRow) -> Result<DeadMessage, StoreError> {
    let headers = row.try_get::<Option<&str>, _>(12)?.map(parse_headers).transpose()?;
    Ok(DeadMessage {
        number: format!("o{}", row.try_get::<i64, _>(0)?),
        place: DeadPlace::Outbox,
        message_id: row.try_get(1)?,
        topic: row.try_get(2)?,
        key: row.try_get(3)?,
        kind: row.try_get(4)?,
        reason: row.try_get(5)?,
        error: row.try_get(6)?,
        attempts: row.try_get::<i32, _>(7)?.unsigned_abs(),
        dead_at: row.try_get(8)?,
        behind: row.try_get::<i64, _>(9)?.unsigned_abs(),
        requested: row.try_get(10)?,
        history: history(row.try_get(11)?)?,
        headers: headers.unwrap_or_default(),
        payload: row.try_get(13)?,
        content_type: row.try_get(14)?,
    })
}

fn consumer_message(row: &PgRow) -> Result<DeadMessage, StoreError> {
    let key: Option<Vec<u8>> = row.try_get(3)?;
    let names: Vec<String> = row.try_get(11)?;
    let values: Vec<Vec<u8>> = row.try_get(12)?;
    let shown = values.into_iter().map(|value| String::from_utf8_lossy(&value).into_owned());
    Ok(DeadMessage {
        number: format!("c{}", row.try_get::<i64, _>(0)?),
        place: DeadPlace::Consumer(row.try_get(15)?),
        message_id: row.try_get(1)?,
        topic: restored(row.try_get(2)?),
        key: key.and_then(|key| String::from_utf8(key).ok()),
        kind: restored(row.try_get(4)?),
        reason: row.try_get(5)?,
        error: row.try_get(6)?,
        attempts: row.try_get::<i32, _>(7)?.unsigned_abs(),
        dead_at: row.try_get(8)?,
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

/// Writes a request; false where the row is not dead any more or something was asked for it already.
async fn request(
    connection: &mut Bounded<Postgres>,
    position: i64,
    message: &DeadMessage,
    act: &OperatorAct,
    context: &ActContext,
) -> Result<bool, StoreError> {
    let (requested, id, payload) = match act {
        OperatorAct::Redrive => ("redrive", None, None),
        OperatorAct::RedriveAs { id, payload } => ("redrive", Some(*id), payload.as_deref()),
        OperatorAct::Discard => ("discard", None, None),
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
          where position = $1 and state = 'dead' and requested is null",
    )
    .bind(position)
    .bind(requested)
    .bind(&context.actor)
    .bind(id)
    .bind(payload)
    .bind(headers)
    .run(connection)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// Changes a consumer's row at once; false where it is not dead any more.
async fn carry_out(
    connection: &mut Bounded<Postgres>,
    sequence: i64,
    message: &DeadMessage,
    act: &OperatorAct,
) -> Result<bool, StoreError> {
    if *act == OperatorAct::Discard {
        // What stands behind goes on first: the row is still there to tell its key.
        let mine = sqlx::query("select 1 from oncebox.waiting where sequence = $1 and state = 'dead' for update")
            .bind(sequence)
            .optional(&mut *connection)
            .await?;
        if mine.is_none() {
            return Ok(false);
        }
        next_is_due(connection, sequence).await?;
        sqlx::query("delete from oncebox.waiting where sequence = $1").bind(sequence).run(connection).await?;
        return Ok(true);
    }
    let revived = sqlx::query(
        "update oncebox.waiting w
            set state = 'waiting', reason = null, dead_at = null, holds = false, attempts = 0,
                due_at = case when w.lane_id is null or not exists (
                  select 1 from oncebox.waiting o where o.consumer_id = w.consumer_id and o.lane_id = w.lane_id
                     and o.sequence < w.sequence and (o.state = 'waiting' or o.holds)) then clock_timestamp() end
          where w.sequence = $1 and w.state = 'dead'
         returning w.consumer_id, w.content_hash",
    )
    .bind(sequence)
    .optional(&mut *connection)
    .await?;
    let Some(row) = revived else { return Ok(false) };
    let (consumer, mut hash): (i32, Uuid) = (row.try_get(0)?, row.try_get(1)?);
    let mut id = message.message_id;
    let mut is_new_id = false;
    if let OperatorAct::RedriveAs { id: new, payload } = act {
        (id, is_new_id) = (*new, true);
        hash = rename(connection, sequence, message, id, payload.as_deref()).await?;
    }
    let stands = inbox_row(connection, consumer, id, hash).await?;
    match stands {
        Some(other) if is_new_id || other != hash => Err(StoreError::Refused(format!(
            "the inbox of {} has the id {id} already, from another message: message {} would never run under it; choose another \
             by `--new-id`",
            where_of(message),
            message.number
        ))),
        _ => Ok(true),
    }
}

fn where_of(message: &DeadMessage) -> String {
    match &message.place {
        DeadPlace::Outbox => "the outbox".to_owned(),
        DeadPlace::Consumer(name) => format!("consumer `{name}`"),
    }
}

/// Inserts the inbox row of a message that is redriven, so that a second copy is a duplicate (a verdict left none, a new id has
/// none: R31); gives the content hash of the row that stood there before.
async fn inbox_row(
    connection: &mut Bounded<Postgres>,
    consumer: i32,
    id: Uuid,
    hash: Uuid,
) -> Result<Option<Uuid>, StoreError> {
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
    let row = sqlx::query("select content_hash from oncebox.inbox where message_id = $1 and consumer_id = $2")
        .bind(id)
        .bind(consumer)
        .optional(connection)
        .await?;
    Ok(row.map(|row| row.try_get(0)).transpose()?)
}

/// Gives a consumer's row a new id and perhaps a new payload; the answer is its new content hash.
async fn rename(
    connection: &mut Bounded<Postgres>,
    sequence: i64,
    message: &DeadMessage,
    id: Uuid,
    payload: Option<&[u8]>,
) -> Result<Uuid, StoreError> {
    let row = sqlx::query(super::waiting::ROW).bind(sequence).one(&mut *connection).await?;
    let mut whole = super::waiting::message_of(&row)?;
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
    context: &ActContext,
) -> Result<(), StoreError> {
    let (name, new_id, edited) = match act {
        OperatorAct::Redrive => ("redrive", None, false),
        OperatorAct::RedriveAs { id, payload } => ("redrive-as", Some(*id), payload.is_some()),
        OperatorAct::Discard => ("discard", None, false),
    };
    sqlx::query(
        "insert into oncebox.audit (actor, act, reason, number, message_id, topic, detail)
         values ($1, $2, $3, $4, $5, $6, jsonb_strip_nulls(jsonb_build_object('newId', $7::uuid, 'editedPayload', nullif($8, false),
           'deadReason', $9::text)))",
    )
    .bind(&context.actor)
    .bind(name)
    .bind(&context.reason)
    .bind(&message.number)
    .bind(message.message_id)
    .bind(stored(&message.topic))
    .bind(new_id)
    .bind(edited)
    .bind(&message.reason)
    .run(connection)
    .await?;
    Ok(())
}
