//! What an operator does with dead messages: each change and its audit row in one transaction.

use std::time::Duration;

use sqlx::MySql;

use super::super::door::headers_to_json;
use super::super::message::arrived_to_json;
use super::super::schema::number;
use super::super::token;
use super::find::{Found, FoundRow};
use crate::error::StoreError;
use crate::message::{Message, MessageId, bucket};
use crate::store::bounded::{Ask, Bounded};
use crate::store::operator::{BURIED, Redriven, redriven};
use crate::store::sql::waiting::wake;
use crate::store::{ActContext, ConsumerId, DeadMessage, DeadPlace, OperatorAct};

/// The header that names the id an edited message had before.
const CAUSATION: &str = "oncebox-causation-id";
/// None where the row changed since it was found.
pub(super) async fn act_on(
    connection: &mut Bounded<MySql>,
    found: &Found,
    act: &OperatorAct,
    context: &ActContext,
) -> Result<Option<Redriven>, StoreError> {
    if act.buries(&found.dead)? && !bury(connection, found).await? {
        return Err(OperatorAct::runs_now(&found.dead));
    }
    let (is_changed, done) = match &found.row {
        FoundRow::Outbox { position, .. } => {
            (request(connection, *position, &found.dead, act, context).await?, Redriven::Waits)
        }
        FoundRow::Consumer { .. } if *act == OperatorAct::Bury => (true, Redriven::Waits),
        FoundRow::Consumer { sequence, consumer, holds, message } => {
            let renewed = renewed(message, act);
            let done = match act {
                OperatorAct::Bury | OperatorAct::Discard => None,
                OperatorAct::Redrive | OperatorAct::RedriveAs { .. } => {
                    let stood = inbox_row(connection, *consumer, renewed.as_ref().unwrap_or(message)).await?;
                    Some(redriven(&found.dead, act, stood)?)
                }
            };
            let is_changed = match done {
                Some(Redriven::Waits) => redrive(connection, *sequence, *consumer, message, renewed.as_ref()).await?,
                Some(Redriven::AlreadyHandled) | None => {
                    discard(connection, *sequence, *consumer, *holds, message).await?
                }
            };
            (is_changed, done.unwrap_or(Redriven::Waits))
        }
    };
    if !is_changed {
        return Ok(None);
    }
    audit(connection, &found.dead, act, done, context).await?;
    Ok(Some(done))
}

/// No more tries for a consumer's message. False where a process has its claim, or the same
/// delivery is dead already.
async fn bury(connection: &mut Bounded<MySql>, found: &Found) -> Result<bool, StoreError> {
    let FoundRow::Consumer { sequence, .. } = &found.row else { return Ok(false) };
    let buried = sqlx::query(
        "update oncebox_waiting set state = 'dead', dead_hash = content_hash, dead_at = utc_timestamp(6), reason = ?, \
           due_at = null, claim = null \
         where sequence = ? and state = 'waiting' and (claim is null or due_at <= utc_timestamp(6))",
    );
    match buried.bind(BURIED.as_bytes()).bind(sequence).run(connection).await {
        Ok(done) => Ok(done.rows_affected() == 1),
        Err(error) if number(&error) == Some(1062) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// The message under its new id, perhaps edited. Its content hash covers what the application
/// wrote, not the header that is added.
fn renewed(message: &Message, act: &OperatorAct) -> Option<Message> {
    let OperatorAct::RedriveAs { id, payload } = act else { return None };
    let mut renewed = message.clone();
    renewed.id = MessageId::from_uuid(*id);
    renewed.id_text = id.to_string();
    if let Some(payload) = payload {
        renewed.payload.clone_from(payload);
        renewed.tombstone = false;
    }
    renewed.headers.retain(|(name, _)| name != CAUSATION);
    renewed.headers.push((CAUSATION.to_owned(), message.id.to_string().into_bytes()));
    Some(renewed)
}

/// A message with its own id that is older than the consumers' horizon may run twice (R31).
pub(super) fn refuse_too_old(found: &Found, act: &OperatorAct, context: &ActContext) -> Result<(), StoreError> {
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

/// Writes a request; false where the row is not dead any more or something was asked for it
/// already.
async fn request(
    connection: &mut Bounded<MySql>,
    position: i64,
    dead: &DeadMessage,
    act: &OperatorAct,
    context: &ActContext,
) -> Result<bool, StoreError> {
    let requested = match act {
        OperatorAct::Redrive | OperatorAct::RedriveAs { .. } => "redrive",
        OperatorAct::Bury | OperatorAct::Discard => "discard",
    };
    let written = sqlx::query(
        "update oncebox_outbox_dead set requested = ?, requested_at = utc_timestamp(6), requested_by = ? \
         where position = ? and (state = 'dead' or ? = 'discard') and requested is null",
    )
    .bind(requested)
    .bind(&context.actor)
    .bind(position)
    .bind(requested)
    .run(&mut *connection)
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
        .run(connection)
        .await?;
    }
    Ok(true)
}

/// The inbox row without which a second copy would be new. None where it was inserted, else whether
/// the row that stood there has this content (R31).
async fn inbox_row(
    connection: &mut Bounded<MySql>,
    consumer: ConsumerId,
    message: &Message,
) -> Result<Option<bool>, StoreError> {
    let hash = hash_without_causation(message);
    let inserted = sqlx::query(
        "insert into oncebox_inbox (consumer_id, message_id, content_hash, batch_token, received_at) \
         values (?, ?, ?, ?, utc_timestamp(6))",
    )
    .bind(consumer.0)
    .bind(message.id.uuid())
    .bind(hash.as_slice())
    .bind(token().as_slice())
    .run(&mut *connection)
    .await;
    match inserted {
        Ok(_) => return Ok(None),
        Err(error) if number(&error) == Some(1062) => {}
        Err(error) => return Err(error.into()),
    }
    let same: bool =
        sqlx::query_scalar("select content_hash = ? from oncebox_inbox where consumer_id = ? and message_id = ?")
            .bind(hash.as_slice())
            .bind(consumer.0)
            .bind(message.id.uuid())
            .one(connection)
            .await?;
    Ok(Some(same))
}

/// Waiting again, tries counted from nothing; due now unless an older row of its key stands before
/// it.
async fn redrive(
    connection: &mut Bounded<MySql>,
    sequence: i64,
    consumer: ConsumerId,
    message: &Message,
    renewed: Option<&Message>,
) -> Result<bool, StoreError> {
    let lane = message.lane_id();
    let written = sqlx::query(
        "update oncebox_waiting set state = 'waiting', dead_hash = null, dead_at = null, reason = null, claim = null, attempts = 0, \
           lane_id = ?, due_at = utc_timestamp(6) where sequence = ? and state = 'dead'",
    )
    .bind(lane.as_ref().map(<[u8; 16]>::as_slice))
    .bind(sequence)
    .run(&mut *connection)
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
        .bind(arrived_to_json(&renewed.headers))
        .bind(&renewed.payload)
        .bind(renewed.tombstone)
        .bind(sequence)
        .run(&mut *connection)
        .await?;
    }
    if let Some(lane) = lane {
        // Only the first row of a key has a due time (R25): a later one that had it stands behind
        // now, or this one does.
        let due: Vec<i64> = sqlx::query_scalar(
            "select sequence from oncebox_waiting where consumer_id = ? and lane_id = ? and due_at is not null and claim is null \
             order by sequence",
        )
        .bind(consumer.0)
        .bind(lane.as_slice())
        .all(&mut *connection)
        .await?;
        let first: Option<i64> = sqlx::query_scalar(
            "select sequence from oncebox_waiting where consumer_id = ? and lane_id = ? order by sequence limit 1",
        )
        .bind(consumer.0)
        .bind(lane.as_slice())
        .optional(&mut *connection)
        .await?;
        for behind in due.into_iter().filter(|due| Some(*due) != first) {
            sqlx::query("update oncebox_waiting set due_at = null where sequence = ? and claim is null")
                .bind(behind)
                .run(&mut *connection)
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
    connection: &mut Bounded<MySql>,
    sequence: i64,
    consumer: ConsumerId,
    holds: bool,
    message: &Message,
) -> Result<bool, StoreError> {
    let written = sqlx::query("delete from oncebox_waiting where sequence = ? and state = 'dead'")
        .bind(sequence)
        .run(&mut *connection)
        .await?;
    if written.rows_affected() != 1 {
        return Ok(false);
    }
    if holds {
        wake(connection, consumer, message.lane_id().as_slice()).await?;
    }
    Ok(true)
}

async fn audit(
    connection: &mut Bounded<MySql>,
    dead: &DeadMessage,
    act: &OperatorAct,
    done: Redriven,
    context: &ActContext,
) -> Result<(), StoreError> {
    let new_id = if let OperatorAct::RedriveAs { id, .. } = act { Some(*id) } else { None };
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
    .bind(act.name())
    .bind(place.as_bytes())
    .bind(&dead.number)
    .bind(dead.message_id)
    .bind(new_id)
    .bind(done.detail(&dead.reason))
    .run(connection)
    .await?;
    Ok(())
}
