//! Redrive, redrive under a new id, discard.

use std::time::Duration;

use sqlx::sqlite::SqliteConnection;
use sqlx::{query, query_as, query_scalar};
use uuid::Uuid;

use super::dead::{self, Number};
use crate::error::StoreError;
use crate::message::content_hash;
use crate::store::operator::{BURIED, Redriven, redriven};
use crate::store::sql::waiting::wake;
use crate::store::sqlite::message::{arrived_from_json, arrived_to_json, headers_from_json, headers_to_json};
use crate::store::sqlite::{millis, now_ms};
use crate::store::{ActContext, ConsumerId, DeadFilter, DeadMessage, DeadPlace, OperatorAct, OperatorOutcome};

/// The header that names the message which another one was made from.
const CAUSATION_ID: &str = "oncebox-causation-id";

/// Acts on what the filter finds and gives what became of it. The caller commits, or rolls a dry
/// run back.
pub(super) async fn act(
    connection: &mut SqliteConnection,
    filter: &DeadFilter,
    act: &OperatorAct,
    context: &ActContext,
) -> Result<OperatorOutcome, StoreError> {
    let messages = dead::list(&mut *connection, filter).await?;
    if matches!(act, OperatorAct::RedriveAs { .. }) && messages.len() > 1 {
        let found = messages.len();
        return Err(StoreError::Refused(format!(
            "{found} messages are meant, but a new id is for one: give its number"
        )));
    }
    let mut outcome = OperatorOutcome { dry_run: context.dry_run, ..OperatorOutcome::default() };
    for message in &messages {
        if act.buries(message)? && !bury(connection, message).await? {
            return Err(OperatorAct::runs_now(message));
        }
        let done = match Number::parse(&message.number)? {
            Number::Outbox(position) => {
                // Its owner does what was asked first.
                if message.requested.is_some() {
                    continue;
                }
                on_outbox(connection, position, message, act, context).await?;
                Redriven::Waits
            }
            Number::Consumer(_) if *act == OperatorAct::Bury => Redriven::Waits,
            Number::Consumer(sequence) => on_consumer(connection, sequence, message, act).await?,
        };
        outcome.add(message, done);
        audit(connection, message, act, done, context).await?;
    }
    Ok(outcome)
}

/// No more tries for a consumer's message. False where a process has its claim, or the same
/// delivery is dead already.
async fn bury(connection: &mut SqliteConnection, message: &DeadMessage) -> Result<bool, StoreError> {
    let Number::Consumer(sequence) = Number::parse(&message.number)? else { return Ok(false) };
    let bury = query(concat!(
        "update or ignore oncebox_waiting set state = 'dead', claim = null, due_at = null, reason = ?2, dead_at = ",
        now_ms!(),
        " where sequence = ?1 and state = 'waiting' and (claim is null or due_at <= ",
        now_ms!(),
        ")"
    ));
    Ok(bury.bind(sequence).bind(BURIED).execute(connection).await?.rows_affected() == 1)
}

/// Writes a request; the owner of the shard carries it out.
async fn on_outbox(
    connection: &mut SqliteConnection,
    position: i64,
    message: &DeadMessage,
    act: &OperatorAct,
    context: &ActContext,
) -> Result<(), StoreError> {
    let request = match act {
        OperatorAct::Redrive => {
            check_age(connection, position, context.redrive_age_max).await?;
            "redrive"
        }
        OperatorAct::RedriveAs { id, payload } => {
            let stored = query_scalar::<_, Vec<u8>>("select headers from oncebox_outbox_dead where position = ?");
            let stored = stored.bind(position).fetch_one(&mut *connection).await?;
            let (mut headers, trace) = headers_from_json(&stored)?;
            headers.retain(|(name, _)| name != CAUSATION_ID);
            headers.push((CAUSATION_ID.to_owned(), message.message_id.to_string()));
            let edit = query(
                "update oncebox_outbox_dead set message_id = ?2, headers = ?3, payload = coalesce(?4, payload) where position = ?1",
            );
            let edit = edit.bind(position).bind(id.to_string()).bind(headers_to_json(&headers, trace.as_ref())?);
            edit.bind(payload).execute(&mut *connection).await?;
            "redrive"
        }
        OperatorAct::Bury | OperatorAct::Discard => "discard",
    };
    let ask =
        concat!("update oncebox_outbox_dead set requested = ?, requested_at = ", now_ms!(), " where position = ?");
    query(ask).bind(request).bind(position).execute(connection).await?;
    Ok(())
}

/// A consumer may have purged what could answer whether it has handled an old message.
async fn check_age(connection: &mut SqliteConnection, position: i64, max: Option<Duration>) -> Result<(), StoreError> {
    let Some(max) = max else { return Ok(()) };
    let age = concat!("select ", now_ms!(), " - created_at from oncebox_outbox_dead where position = ?");
    let age: i64 = query_scalar(age).bind(position).fetch_one(connection).await?;
    if age <= millis(max) {
        return Ok(());
    }
    Err(StoreError::Refused(format!(
        "o{position} is {} s old, and only messages up to {} s (`redrive_age_max`) are sent again under their own id: \
         consumers may not know any more whether they handled it; use `--new-id`",
        age / 1_000,
        max.as_secs()
    )))
}

async fn on_consumer(
    connection: &mut SqliteConnection,
    sequence: i64,
    message: &DeadMessage,
    act: &OperatorAct,
) -> Result<Redriven, StoreError> {
    let place = query_as("select consumer_id, lane_id from oncebox_waiting where sequence = ?").bind(sequence);
    let (consumer, lane): (i32, Option<Uuid>) = place.fetch_one(&mut *connection).await?;
    if let OperatorAct::RedriveAs { id, payload } = act {
        change_identity(connection, sequence, message, *id, payload.as_deref()).await?;
    }
    let done = match act {
        OperatorAct::Bury | OperatorAct::Discard => Redriven::Waits,
        OperatorAct::Redrive | OperatorAct::RedriveAs { .. } => {
            redriven(message, act, own_inbox_row(connection, sequence).await?)?
        }
    };
    if *act == OperatorAct::Discard || done == Redriven::AlreadyHandled {
        let delete = query("delete from oncebox_waiting where sequence = ?").bind(sequence);
        delete.execute(&mut *connection).await?;
    } else {
        make_due(connection, sequence).await?;
    }
    let lane = lane.map(Uuid::into_bytes);
    wake(connection, ConsumerId(consumer), lane.as_slice()).await?;
    Ok(done)
}

/// The inbox row without which a second copy would be new. None where it was inserted, else whether
/// the row that stood there has this content (R31).
async fn own_inbox_row(connection: &mut SqliteConnection, sequence: i64) -> Result<Option<bool>, StoreError> {
    let insert = query(concat!(
        "insert into oncebox_inbox (consumer_id, message_id, content_hash, received_at) select consumer_id, message_id, content_hash, ",
        now_ms!(),
        " from oncebox_waiting where sequence = ? on conflict do nothing"
    ));
    if insert.bind(sequence).execute(&mut *connection).await?.rows_affected() == 1 {
        return Ok(None);
    }
    let same = query_scalar::<_, bool>(
        "select i.content_hash = w.content_hash from oncebox_waiting as w join oncebox_inbox as i using (consumer_id, message_id) \
         where w.sequence = ?",
    );
    Ok(Some(same.bind(sequence).fetch_one(connection).await?))
}

async fn make_due(connection: &mut SqliteConnection, sequence: i64) -> Result<(), StoreError> {
    // Behind another one of its key it stays without a due time until that one is gone (R25).
    let redrive = query(concat!(
        "update oncebox_waiting as w set state = 'waiting', blocks = lane_id is not null, reason = null, dead_at = null, ",
        "attempts = 0, due_at = case when lane_id is null or not exists (select 1 from oncebox_waiting as o ",
        "where o.consumer_id = w.consumer_id and o.lane_id = w.lane_id and o.blocks = 1 and o.sequence < w.sequence) then ",
        now_ms!(),
        " end where sequence = ?"
    ));
    redrive.bind(sequence).execute(connection).await?;
    Ok(())
}

async fn change_identity(
    connection: &mut SqliteConnection,
    sequence: i64,
    message: &DeadMessage,
    id: Uuid,
    payload: Option<&[u8]>,
) -> Result<(), StoreError> {
    let stored = query_as("select headers, key from oncebox_waiting where sequence = ?").bind(sequence);
    let (headers, key): (String, Option<Vec<u8>>) = stored.fetch_one(&mut *connection).await?;
    let mut headers = arrived_from_json(&headers)?;
    headers.retain(|(name, _)| name != CAUSATION_ID);
    headers.push((CAUSATION_ID.to_owned(), message.message_id.to_string().into_bytes()));
    let content_type = message.content_type.as_deref();
    let hash = content_hash(
        &message.topic,
        key.as_deref(),
        &message.kind,
        content_type,
        payload.unwrap_or(&message.payload),
        headers.iter().map(|(name, value)| (name.as_str(), value.as_slice())),
    );
    let edit = query(
        "update oncebox_waiting set message_id = ?2, id_text = ?3, content_hash = ?4, headers = ?5, \
         payload = coalesce(?6, payload), tombstone = tombstone and ?6 is null where sequence = ?1",
    );
    let edit = edit.bind(sequence).bind(id.as_bytes().to_vec()).bind(id.to_string()).bind(hash.to_vec());
    edit.bind(arrived_to_json(&headers)?).bind(payload).execute(connection).await?;
    Ok(())
}

async fn audit(
    connection: &mut SqliteConnection,
    message: &DeadMessage,
    act: &OperatorAct,
    done: Redriven,
    context: &ActContext,
) -> Result<(), StoreError> {
    let new_id = if let OperatorAct::RedriveAs { id, .. } = act { Some(id.to_string()) } else { None };
    let place = match &message.place {
        DeadPlace::Outbox => "outbox",
        DeadPlace::Consumer(name) => name,
    };
    let insert = query(concat!(
        "insert into oncebox_audit (at, actor, reason, act, place, number, message_id, new_id, detail) values (",
        now_ms!(),
        ", ?, ?, ?, ?, ?, ?, ?, ?)"
    ));
    let insert = insert.bind(&context.actor).bind(&context.reason).bind(act.name()).bind(place).bind(&message.number);
    let insert = insert.bind(message.message_id.to_string()).bind(new_id).bind(done.detail(&message.reason));
    insert.execute(connection).await?;
    Ok(())
}
