//! What an operator does with dead messages: each change and its audit row in one transaction.

use std::time::Duration;

use sqlx::MySql;

use super::super::door::headers_to_json;
use super::super::schema::number;
use super::super::{token, waiting};
use super::find::{Found, FoundRow};
use crate::error::StoreError;
use crate::message::{Message, MessageId, bucket};
use crate::store::bounded::{Ask, Bounded};
use crate::store::{ActContext, ConsumerId, DeadMessage, DeadPlace, OperatorAct};

/// The header that names the id an edited message had before.
const CAUSATION: &str = "oncebox-causation-id";
/// The verdict on an id that came with another content.
const ID_REUSED: &str = "id-reused";
/// Verdicts that left no inbox row: a redrive inserts it (R31).
const WITHOUT_INBOX_ROW: [&str; 2] = ["too-old", "from-the-future"];

/// False where the row changed since it was found.
pub(super) async fn act_on(
    connection: &mut Bounded<MySql>,
    found: &Found,
    act: &OperatorAct,
    context: &ActContext,
) -> Result<bool, StoreError> {
    let changed = match &found.row {
        FoundRow::Outbox { position, .. } => request(connection, *position, &found.dead, act, context).await?,
        FoundRow::Consumer { sequence, consumer, holds, message } => match act {
            OperatorAct::Discard => discard(connection, *sequence, *consumer, *holds, message).await?,
            OperatorAct::Redrive => {
                let reason = found.dead.reason.as_str();
                if reason == ID_REUSED {
                    return Err(StoreError::Refused(format!(
                        "{} has the id of another message, which the inbox knows: redrive it with `--new-id`",
                        found.dead.number
                    )));
                }
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
                    return Err(StoreError::Refused(format!("the id {id} is in the inbox already; give another one")));
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

async fn request(
    connection: &mut Bounded<MySql>,
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

/// False where the id is in the inbox already.
async fn insert_inbox_row(
    connection: &mut Bounded<MySql>,
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
    .run(connection)
    .await;
    match inserted {
        Ok(_) => Ok(true),
        Err(error) if number(&error) == Some(1062) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Waiting again, tries counted from nothing; due now unless an older row of its key stands before it.
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
           lane = ?, due_at = utc_timestamp(6) where sequence = ? and state = 'dead'",
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
        .bind(waiting::headers_to_json(&renewed.headers))
        .bind(&renewed.payload)
        .bind(renewed.tombstone)
        .bind(sequence)
        .run(&mut *connection)
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
        .all(&mut *connection)
        .await?;
        let first: Option<i64> = sqlx::query_scalar(
            "select sequence from oncebox_waiting where consumer_id = ? and lane = ? order by sequence limit 1",
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
        waiting::next_of_lane(connection, consumer, message.lane_id()).await?;
    }
    Ok(true)
}

async fn audit(
    connection: &mut Bounded<MySql>,
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
    .run(connection)
    .await?;
    Ok(())
}
