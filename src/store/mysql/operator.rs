//! What an operator sees and does.
//!
//! Guarantees: an act and its audit row commit together; a dead outbox row gets a request that only the owner of the outbox carries
//! out (R17); a dead delivery changes at once. Counts above [`COUNT_MAX`] are estimates of the server.

use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::mysql::MySqlRow;
use sqlx::{MySql, MySqlConnection, QueryBuilder, Row};

use super::door::{headers_from_json, headers_to_json};
use super::schema::number;
use super::{MySqlStore, START, begin, text, token, waiting};
use crate::error::StoreError;
use crate::message::{Message, MessageId, bucket};
use crate::store::door::commit_error;
use crate::store::{
    ActContext, ConsumerId, ConsumerStatus, DeadFilter, DeadMessage, DeadPlace, HistoryEntry, Mailbox, Operator,
    OperatorAct, OperatorOutcome, ShardStatus, Status,
};

/// Rows that are counted one by one; more are estimated.
const COUNT_MAX: i64 = 100_000;
/// How many a list shows unless told otherwise.
const LIST_DEFAULT: usize = 100;
/// The header that names the id an edited message had before.
const CAUSATION: &str = "oncebox-causation-id";
/// Verdicts that left no inbox row: a redrive inserts it (R31).
const WITHOUT_INBOX_ROW: [&str; 2] = ["too-old", "from-the-future"];

impl Operator for MySqlStore {
    async fn status(&self) -> Result<Status, StoreError> {
        let mut connection = self.pool.acquire().await?;
        let shards = sqlx::query(SHARDS).fetch_all(&mut *connection).await?;
        let diverted: Vec<(String, i64)> =
            sqlx::query_as("select state, count(*) from oncebox_outbox_dead group by state")
                .fetch_all(&mut *connection)
                .await?;
        let of_state =
            |wanted: &str| diverted.iter().find(|(state, _)| state == wanted).map_or(0, |(_, count)| count_of(*count));
        let oldest: Option<i64> = sqlx::query_scalar(
            "select timestampdiff(microsecond, created_at, utc_timestamp(6)) from oncebox_outbox order by position limit 1",
        )
        .fetch_optional(&mut *connection)
        .await?;
        let (held, dead) = (of_state("held"), of_state("dead"));
        let pending = counted(&mut connection, "oncebox_outbox", "select 1 from oncebox_outbox limit ?", None).await?;
        let consumers = consumers(&mut connection).await?;
        drop(connection);
        Ok(Status {
            shards: shards.iter().map(shard_status).collect::<Result<_, _>>()?,
            pending,
            oldest_pending_age_seconds: oldest.map_or(0.0, seconds),
            held,
            dead,
            consumers,
            emails_pending: self.emails_pending().await?,
        })
    }

    async fn dead(&self, filter: &DeadFilter) -> Result<Vec<DeadMessage>, StoreError> {
        let mut connection = self.pool.acquire().await?;
        let found = find(&mut connection, filter).await?;
        Ok(found.into_iter().map(|found| found.dead).collect())
    }

    async fn act(
        &self,
        filter: &DeadFilter,
        act: &OperatorAct,
        context: &ActContext,
    ) -> Result<OperatorOutcome, StoreError> {
        let mut transaction = begin(&self.pool, START).await?;
        let found = find(&mut transaction, filter).await?;
        if let OperatorAct::RedriveAs { .. } = act
            && found.len() > 1
        {
            let count = found.len();
            return Err(StoreError::Refused(format!(
                "a new id is for one message, and {count} are meant; name one by its number"
            )));
        }
        let mut numbers = Vec::with_capacity(found.len());
        for found in &found {
            if !context.dry_run && !self.act_on(&mut transaction, found, act, context).await? {
                continue;
            }
            if context.dry_run {
                refuse_too_old(found, act, context)?;
            }
            numbers.push(found.dead.number.clone());
        }
        if context.dry_run {
            transaction.rollback().await?;
        } else {
            transaction.commit().await.map_err(commit_error)?;
        }
        Ok(OperatorOutcome { numbers, dry_run: context.dry_run })
    }
}

/// A dead message and the row it stands in.
struct Found {
    dead: DeadMessage,
    row: FoundRow,
}

enum FoundRow {
    Outbox { position: i64, age: Duration },
    Consumer { sequence: i64, consumer: ConsumerId, holds: bool, message: Box<Message> },
}

impl MySqlStore {
    /// False where the row changed since it was found.
    async fn act_on(
        &self,
        connection: &mut MySqlConnection,
        found: &Found,
        act: &OperatorAct,
        context: &ActContext,
    ) -> Result<bool, StoreError> {
        let changed = match &found.row {
            FoundRow::Outbox { position, .. } => {
                refuse_too_old(found, act, context)?;
                request(connection, *position, &found.dead, act, context).await?
            }
            FoundRow::Consumer { sequence, consumer, holds, message } => match act {
                OperatorAct::Discard => discard(connection, *sequence, *consumer, *holds, message).await?,
                OperatorAct::Redrive => {
                    let reason = found.dead.reason.as_str();
                    if WITHOUT_INBOX_ROW.contains(&reason) && !insert_inbox_row(connection, *consumer, message).await? {
                        // A second copy was handled since: this one is a duplicate, and nothing is left to do.
                        discard(connection, *sequence, *consumer, *holds, message).await?
                    } else {
                        redrive(connection, *sequence, *consumer, message, None).await?
                    }
                }
                OperatorAct::RedriveAs { id, payload } => {
                    let mut renewed = (**message).clone();
                    renewed.id = MessageId::from_uuid(*id);
                    renewed.id_text = id.to_string();
                    if let Some(payload) = payload {
                        renewed.payload.clone_from(payload);
                        renewed.tombstone = false;
                    }
                    if !insert_inbox_row(connection, *consumer, &renewed).await? {
                        return Err(StoreError::Refused(format!(
                            "the id {id} is in the inbox already; give another one"
                        )));
                    }
                    renewed.headers.retain(|(name, _)| name != CAUSATION);
                    renewed.headers.push((CAUSATION.to_owned(), message.id.to_string().into_bytes()));
                    redrive(connection, *sequence, *consumer, &renewed, Some(&renewed)).await?
                }
            },
        };
        if changed {
            audit(connection, &found.dead, act, context).await?;
        }
        Ok(changed)
    }
}

/// A message with its own id that is older than the consumers' horizon may run twice (R31).
fn refuse_too_old(found: &Found, act: &OperatorAct, context: &ActContext) -> Result<(), StoreError> {
    match (&found.row, act, context.redrive_age_max) {
        (FoundRow::Outbox { age, .. }, OperatorAct::Redrive, Some(max)) if *age > max => {
            Err(StoreError::Refused(format!(
                "{} is {} old, and an inbox may have forgotten it: redrive it with `--new-id`, or raise `redrive_age_max` ({})",
                found.dead.number,
                humantime::format_duration(Duration::from_secs(age.as_secs())),
                humantime::format_duration(max)
            )))
        }
        _ => Ok(()),
    }
}

async fn request(
    connection: &mut MySqlConnection,
    position: i64,
    dead: &DeadMessage,
    act: &OperatorAct,
    context: &ActContext,
) -> Result<bool, StoreError> {
    let requested = match act {
        OperatorAct::Redrive | OperatorAct::RedriveAs { .. } => "redrive",
        OperatorAct::Discard => "discard",
    };
    let written = sqlx::query(
        "update oncebox_outbox_dead set requested = ?, requested_at = utc_timestamp(6), requested_by = ? \
         where position = ? and state = 'dead'",
    )
    .bind(requested)
    .bind(&context.actor)
    .bind(position)
    .execute(&mut *connection)
    .await?;
    if written.rows_affected() != 1 {
        return Ok(false);
    }
    if let OperatorAct::RedriveAs { id, payload } = act {
        let mut headers = dead.headers.clone();
        headers.retain(|(name, _)| name != CAUSATION);
        headers.push((CAUSATION.to_owned(), dead.message_id.to_string()));
        sqlx::query(
            "update oncebox_outbox_dead set message_id = ?, bucket = ?, headers = ?, payload = coalesce(?, payload) where position = ?",
        )
        .bind(id)
        .bind(bucket(dead.key.as_deref(), *id))
        .bind(headers_to_json(&headers))
        .bind(payload.as_deref())
        .bind(position)
        .execute(connection)
        .await?;
    }
    Ok(true)
}

/// False where the id is in the inbox already.
async fn insert_inbox_row(
    connection: &mut MySqlConnection,
    consumer: ConsumerId,
    message: &Message,
) -> Result<bool, StoreError> {
    let inserted = sqlx::query(
        "insert into oncebox_inbox (consumer_id, message_id, content_hash, batch_token, received_at) \
         values (?, ?, ?, ?, utc_timestamp(6))",
    )
    .bind(consumer.0)
    .bind(message.id.uuid())
    .bind(message.content_hash().as_slice())
    .bind(token().as_slice())
    .execute(connection)
    .await;
    match inserted {
        Ok(_) => Ok(true),
        Err(error) if number(&error) == Some(1062) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Waiting again, tries counted from nothing; due now unless an older row of its key stands before it.
async fn redrive(
    connection: &mut MySqlConnection,
    sequence: i64,
    consumer: ConsumerId,
    message: &Message,
    renewed: Option<&Message>,
) -> Result<bool, StoreError> {
    let lane = message.lane_id();
    let written = sqlx::query(
        "update oncebox_waiting set state = 'waiting', dead_hash = null, dead_at = null, reason = null, claim = null, attempts = 0, \
           lane = ?, due_at = utc_timestamp(6) where sequence = ? and state = 'dead'",
    )
    .bind(lane.as_ref().map(<[u8; 16]>::as_slice))
    .bind(sequence)
    .execute(&mut *connection)
    .await?;
    if written.rows_affected() != 1 {
        return Ok(false);
    }
    if let Some(renewed) = renewed {
        sqlx::query(
            "update oncebox_waiting set message_id = ?, id_text = ?, content_hash = ?, headers = ?, payload = ?, tombstone = ? \
             where sequence = ?",
        )
        .bind(renewed.id.uuid())
        .bind(&renewed.id_text)
        .bind(hash_without_causation(renewed).as_slice())
        .bind(waiting::headers_to_json(&renewed.headers))
        .bind(&renewed.payload)
        .bind(renewed.tombstone)
        .bind(sequence)
        .execute(&mut *connection)
        .await?;
    }
    if let Some(lane) = lane {
        // Only the first row of a key has a due time (R25): a later one that had it stands behind now, or this one does.
        let due: Vec<i64> = sqlx::query_scalar(
            "select sequence from oncebox_waiting where consumer_id = ? and lane = ? and due_at is not null and claim is null \
             order by sequence",
        )
        .bind(consumer.0)
        .bind(lane.as_slice())
        .fetch_all(&mut *connection)
        .await?;
        let first: Option<i64> = sqlx::query_scalar(
            "select sequence from oncebox_waiting where consumer_id = ? and lane = ? order by sequence limit 1",
        )
        .bind(consumer.0)
        .bind(lane.as_slice())
        .fetch_optional(&mut *connection)
        .await?;
        for behind in due.into_iter().filter(|due| Some(*due) != first) {
            sqlx::query("update oncebox_waiting set due_at = null where sequence = ? and claim is null")
                .bind(behind)
                .execute(&mut *connection)
                .await?;
        }
    }
    Ok(true)
}

/// The content hash covers what the application wrote, not what an operator's act adds.
fn hash_without_causation(message: &Message) -> [u8; 16] {
    let mut plain = message.clone();
    plain.headers.retain(|(name, _)| name != CAUSATION);
    plain.content_hash()
}

async fn discard(
    connection: &mut MySqlConnection,
    sequence: i64,
    consumer: ConsumerId,
    holds: bool,
    message: &Message,
) -> Result<bool, StoreError> {
    let written = sqlx::query("delete from oncebox_waiting where sequence = ? and state = 'dead'")
        .bind(sequence)
        .execute(&mut *connection)
        .await?;
    if written.rows_affected() != 1 {
        return Ok(false);
    }
    if holds {
        waiting::next_of_lane(connection, consumer, message.lane_id()).await?;
    }
    Ok(true)
}

async fn audit(
    connection: &mut MySqlConnection,
    dead: &DeadMessage,
    act: &OperatorAct,
    context: &ActContext,
) -> Result<(), StoreError> {
    let (name, new_id) = match act {
        OperatorAct::Redrive => ("redrive", None),
        OperatorAct::RedriveAs { id, .. } => ("redrive-as", Some(*id)),
        OperatorAct::Discard => ("discard", None),
    };
    let place = match &dead.place {
        DeadPlace::Outbox => "outbox",
        DeadPlace::Consumer(name) => name,
    };
    sqlx::query(
        "insert into oncebox_audit (at, actor, reason, act, place, number, message_id, new_id, detail) \
         values (utc_timestamp(6), ?, ?, ?, ?, ?, ?, ?, ?)",
    )
    .bind(&context.actor)
    .bind(&context.reason)
    .bind(name)
    .bind(place.as_bytes())
    .bind(&dead.number)
    .bind(dead.message_id)
    .bind(new_id)
    .bind(&dead.reason)
    .execute(connection)
    .await?;
    Ok(())
}

/// Dead messages of both places, oldest first.
async fn find(connection: &mut MySqlConnection, filter: &DeadFilter) -> Result<Vec<Found>, StoreError> {
    let limit = if filter.limit == 0 { LIST_DEFAULT } else { filter.limit };
    let (wants_outbox, wants_consumers) = match filter.consumer.as_deref() {
        None => (true, true),
        Some("outbox") => (true, false),
        Some(_) => (false, true),
    };
    let row_number = |prefix: char| match &filter.number {
        None => Some(None),
        Some(given) => given.strip_prefix(prefix).and_then(|digits| digits.parse::<i64>().ok()).map(Some),
    };
    let mut found = Vec::new();
    if let Some(position) = row_number('o').filter(|_| wants_outbox) {
        found.extend(find_in_outbox(connection, filter, position, limit).await?);
    }
    if let Some(sequence) = row_number('c').filter(|_| wants_consumers) {
        found.extend(find_of_consumers(connection, filter, sequence, limit).await?);
    }
    found.sort_by_key(|found| found.dead.dead_at);
    found.truncate(limit);
    Ok(found)
}

async fn find_in_outbox(
    connection: &mut MySqlConnection,
    filter: &DeadFilter,
    position: Option<i64>,
    limit: usize,
) -> Result<Vec<Found>, StoreError> {
    let mut query: QueryBuilder<MySql> = QueryBuilder::new(
        "select d.position, d.message_id, d.topic, d.`key`, d.kind, d.reason, d.attempts, d.diverted_at, d.requested, d.history, \
         d.headers, d.payload, d.content_type, timestampdiff(microsecond, d.created_at, utc_timestamp(6)) as age_micros, \
         if(d.holds, (select count(*) from oncebox_outbox_dead b \
           where b.lane = d.lane and b.position > d.position and b.state = 'held'), 0) as behind \
         from oncebox_outbox_dead d where d.state = 'dead'",
    );
    if let Some(position) = position {
        query.push(" and d.position = ").push_bind(position);
    }
    push_filter(&mut query, 'd', filter);
    if let Some(reason) = &filter.reason {
        query.push(" and d.reason = ").push_bind(reason.clone());
    }
    query.push(" order by d.diverted_at, d.position limit ").push_bind(i64::try_from(limit).unwrap_or(i64::MAX));
    let rows = query.build().persistent(false).fetch_all(connection).await?;
    rows.iter().map(found_in_outbox).collect()
}

async fn find_of_consumers(
    connection: &mut MySqlConnection,
    filter: &DeadFilter,
    sequence: Option<i64>,
    limit: usize,
) -> Result<Vec<Found>, StoreError> {
    let mut query: QueryBuilder<MySql> = QueryBuilder::new(
        "select w.sequence, w.consumer_id, c.name as consumer, w.lane is not null as holds, w.message_id, w.id_text, w.topic, w.`key`, \
         w.kind, w.headers, w.payload, w.tombstone, w.content_type, w.source, w.sent_at, w.traceparent, w.tracestate, w.place, \
         w.partition_no, w.offset_no, w.attempts, w.reason, w.error, w.history, w.dead_at, \
         if(w.lane is null, 0, (select count(*) from oncebox_waiting b \
           where b.consumer_id = w.consumer_id and b.lane = w.lane and b.sequence > w.sequence)) as behind \
         from oncebox_waiting w join oncebox_consumer c on c.consumer_id = w.consumer_id where w.state = 'dead'",
    );
    if let Some(sequence) = sequence {
        query.push(" and w.sequence = ").push_bind(sequence);
    }
    if let Some(consumer) = &filter.consumer {
        query.push(" and c.name = ").push_bind(consumer.clone().into_bytes());
    }
    push_filter(&mut query, 'w', filter);
    if let Some(reason) = &filter.reason {
        query.push(" and w.reason = ").push_bind(reason.clone().into_bytes());
    }
    query.push(" order by w.dead_at, w.sequence limit ").push_bind(i64::try_from(limit).unwrap_or(i64::MAX));
    let rows = query.build().persistent(false).fetch_all(connection).await?;
    rows.iter().map(found_of_consumer).collect()
}

fn push_filter(query: &mut QueryBuilder<MySql>, table: char, filter: &DeadFilter) {
    let mut equal = |column: &str, value: Vec<u8>| {
        query.push(format!(" and {table}.{column} = ")).push_bind(value);
    };
    if let Some(id) = filter.message_id {
        equal("message_id", id.into_bytes().to_vec());
    }
    if let Some(topic) = &filter.topic {
        equal("topic", topic.clone().into_bytes());
    }
    if let Some(key) = &filter.key {
        equal("`key`", key.clone().into_bytes());
    }
}

fn found_in_outbox(row: &MySqlRow) -> Result<Found, StoreError> {
    let position: i64 = row.try_get("position")?;
    let age: i64 = row.try_get("age_micros")?;
    let key: Option<Vec<u8>> = row.try_get("key")?;
    let reason: Option<String> = row.try_get("reason")?;
    let dead = DeadMessage {
        number: format!("o{position}"),
        place: DeadPlace::Outbox,
        message_id: row.try_get("message_id")?,
        topic: text("topic", row.try_get("topic")?)?,
        key: key.map(|key| text("key", key)).transpose()?,
        kind: text("kind", row.try_get("kind")?)?,
        error: reason.clone(),
        reason: reason.unwrap_or_default(),
        attempts: row.try_get("attempts")?,
        dead_at: row.try_get("diverted_at")?,
        behind: count_of(row.try_get("behind")?),
        requested: row.try_get("requested")?,
        history: history(row)?,
        headers: headers_from_json(row.try_get("headers")?)?,
        payload: row.try_get("payload")?,
        content_type: row.try_get("content_type")?,
    };
    let age = Duration::from_micros(u64::try_from(age).unwrap_or(0));
    Ok(Found { dead, row: FoundRow::Outbox { position, age } })
}

fn found_of_consumer(row: &MySqlRow) -> Result<Found, StoreError> {
    let sequence: i64 = row.try_get("sequence")?;
    let message = waiting::message(row)?;
    let lossy = |(name, value): &(String, Vec<u8>)| (name.clone(), String::from_utf8_lossy(value).into_owned());
    let dead = DeadMessage {
        number: format!("c{sequence}"),
        place: DeadPlace::Consumer(text("name", row.try_get("consumer")?)?),
        message_id: message.id.uuid(),
        topic: message.topic.clone(),
        key: message.key_text().map(str::to_owned),
        kind: message.kind.clone(),
        reason: text("reason", row.try_get("reason")?)?,
        error: row.try_get("error")?,
        attempts: row.try_get("attempts")?,
        dead_at: row.try_get::<DateTime<Utc>, _>("dead_at")?,
        behind: count_of(row.try_get("behind")?),
        requested: None,
        history: history(row)?,
        headers: message.headers.iter().map(lossy).collect(),
        payload: message.payload.clone(),
        content_type: message.content_type.clone(),
    };
    let consumer = ConsumerId(row.try_get("consumer_id")?);
    let holds: bool = row.try_get("holds")?;
    Ok(Found { dead, row: FoundRow::Consumer { sequence, consumer, holds, message: Box::new(message) } })
}

fn history(row: &MySqlRow) -> Result<Vec<HistoryEntry>, StoreError> {
    let json: String = row.try_get("history")?;
    serde_json::from_str(&json)
        .map_err(|error| StoreError::Corrupt(format!("the history of a row is not readable: {error}")))
}

const SHARDS: &str = "\
select shard_id, bucket_from, bucket_to, scanned_to, epoch, owner, \
       timestampdiff(microsecond, utc_timestamp(6), lease_until) as left_micros, \
       timestampdiff(microsecond, updated_at, utc_timestamp(6)) as age_micros \
  from oncebox_shard order by shard_id";

fn shard_status(row: &MySqlRow) -> Result<ShardStatus, StoreError> {
    let left: Option<i64> = row.try_get("left_micros")?;
    Ok(ShardStatus {
        shard: row.try_get("shard_id")?,
        buckets: (row.try_get("bucket_from")?, row.try_get("bucket_to")?),
        scanned_to: row.try_get("scanned_to")?,
        gaps: 0,
        epoch: row.try_get("epoch")?,
        owner: row.try_get::<Option<String>, _>("owner")?.filter(|_| left.is_some_and(|left| left > 0)),
        lease_seconds_left: left.map_or(0.0, seconds),
        cursor_age_seconds: seconds(row.try_get("age_micros")?),
    })
}

async fn consumers(connection: &mut MySqlConnection) -> Result<Vec<ConsumerStatus>, StoreError> {
    let names: Vec<(i32, Vec<u8>)> = sqlx::query_as("select consumer_id, name from oncebox_consumer order by name")
        .fetch_all(&mut *connection)
        .await?;
    let mut consumers = Vec::with_capacity(names.len());
    for (id, name) in names {
        let row = sqlx::query(
            "select (select count(*) from oncebox_waiting where state = 'waiting' and consumer_id = ?) as waiting, \
                    (select count(*) from oncebox_waiting where state = 'dead' and consumer_id = ?) as dead, \
                    (select count(*) from (select distinct lane from oncebox_waiting \
                       where state = 'dead' and consumer_id = ? and lane is not null) d \
                     straight_join oncebox_waiting w force index (waiting_lane) on w.consumer_id = ? and w.lane = d.lane \
                     where w.state = 'waiting') as held",
        )
        .bind(id)
        .bind(id)
        .bind(id)
        .bind(id)
        .fetch_one(&mut *connection)
        .await?;
        let inbox = "select 1 from oncebox_inbox where consumer_id = ? limit ?";
        consumers.push(ConsumerStatus {
            name: text("name", name)?,
            waiting: count_of(row.try_get("waiting")?),
            held: count_of(row.try_get("held")?),
            dead: count_of(row.try_get("dead")?),
            inbox_rows: counted(connection, "oncebox_inbox", inbox, Some(id)).await?,
        });
    }
    Ok(consumers)
}

/// Counts up to [`COUNT_MAX`]; above it, what the server estimates for the table.
async fn counted(
    connection: &mut MySqlConnection,
    table: &'static str,
    rows: &'static str,
    consumer: Option<i32>,
) -> Result<u64, StoreError> {
    let mut query = sqlx::query_scalar(sqlx::AssertSqlSafe(format!("select count(*) from ({rows}) some")));
    if let Some(consumer) = consumer {
        query = query.bind(consumer);
    }
    let count: i64 = query.bind(COUNT_MAX + 1).fetch_one(&mut *connection).await?;
    if count <= COUNT_MAX {
        return Ok(count_of(count));
    }
    let estimate: Option<i64> = sqlx::query_scalar(
        "select cast(table_rows as signed) from information_schema.tables where table_schema = database() and table_name = ?",
    )
    .bind(table)
    .fetch_one(connection)
    .await?;
    Ok(count_of(estimate.unwrap_or(0).max(count)))
}

fn count_of(count: i64) -> u64 {
    u64::try_from(count).unwrap_or(0)
}

fn seconds(micros: i64) -> f64 {
    // A clock that went back shows as nothing, not as a negative age.
    micros.max(0) as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_went_back_is_no_negative_age() {
        assert_eq!(seconds(-5), 0.0);
        assert_eq!(count_of(-1), 0);
    }
}
