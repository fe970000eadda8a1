//! The acts of an operator on messages: redrive, redrive under a new id, try now, bury, discard.

use std::time::Duration;

use uuid::Uuid;

use super::list::{self, ConsumerRow, FoundMessage, FoundRow};
use crate::error::StoreError;
use crate::inbox::port::ConsumerId;
use crate::inbox::port::waiting::LEASE_END_MAX;
use crate::inbox::rules::horizon::Verdict;
use crate::message::{Headers, MessageId, content_hash, lane_id};
use crate::operator::{
    ActContext, BURIED, DeadFilter, DeadMessage, DeadPlace, OperatorAct, OperatorOutcome, Redriven, redriven,
};
use crate::store::headers::headers_json;
use crate::store::sql::audit::{self, Act};
use crate::store::sql::waiting::wake;
use crate::store::sql::{Session, Value, foreign, name, sql};

/// The header with the id that the message had before.
const CAUSATION: &str = "oncebox-causation-id";

/// Another copy of the message that is dead. There is only one dead row for a message id and
/// content hash.
const DEAD_COPY: &str = "\
select d.sequence, d.reason from oncebox.waiting w join oncebox.waiting d on d.consumer_id = w.consumer_id \
   and d.message_id = w.message_id and d.content_hash = w.content_hash and d.state = 'dead' \
 where w.sequence = :sequence";

const DELETE_COPY: &str = "delete from oncebox.waiting where sequence = :sequence and state = 'dead'";

const BURY: &str = "\
update oncebox.waiting set state = 'dead', dead_at = {now}, reason = :reason, due_at = null, \
       {pg: holds = lane_id is not null, }{my: dead_hash = content_hash, }lease = null \
 where sequence = :sequence and state = 'waiting' \
   and (lease is null or due_at <= {now} or due_at > {now} + {span :lease_max})";

/// Writes a request, unless an earlier one is there: the first request is carried out.
const REQUEST: &str = "\
update oncebox.outbox_dead set requested = :requested, requested_at = {now}\
       {pg my: , requested_by = :actor}{pg: {if new_id: , edited = true}}\
       {if new_id: , message_id = :new_id, payload = coalesce(:payload, payload), headers = :headers{pg: ::json}} \
 where position = :position and (state = 'dead' or :requested = 'discard') and requested is null";

const DEAD: &str = "\
select consumer_id, content_hash from oncebox.waiting where sequence = :sequence and state = 'dead' {lock}";

const RENAME: &str = "\
update oncebox.waiting set message_id = :new_id, id_text = :id_text, content_hash = :hash, \
       {if payload: payload = :payload, tombstone = {pg: false, }{my lite: 0, }}\
       {pg: header_names = array(select h.pair ->> 0 from json_array_elements(:headers::json) with ordinality as h (pair, at) \
              order by h.at), \
            header_values = array(select decode(h.pair ->> 1, 'hex') \
              from json_array_elements(:headers::json) with ordinality as h (pair, at) order by h.at)}\
       {my lite: headers = :headers} \
 where sequence = :sequence";

/// Inserts the inbox row; without it a second copy would be new. (On MySQL `ignore` hides no other
/// error here: the values have fixed lengths.)
const INBOX_ROW: &str = "\
insert {my: ignore }into oncebox.inbox{pg: {if is_timed: _timed}{unless is_timed: _untimed}} \
       (consumer_id, message_id, content_hash{my: , batch_token}{my lite: , received_at}) \
values (:consumer, :message_id, :hash{my: , :token}{my lite: , {now}}) {pg lite: on conflict do nothing}";

const IS_SAME: &str = "\
select content_hash = :hash from oncebox.inbox where consumer_id = :consumer and message_id = :message_id";

const MAKE_DUE: &str = "\
update oncebox.waiting set state = 'waiting', reason = null, dead_at = null, lease = null, attempts = 0, \
       {pg: holds = false, }{my: dead_hash = null, lane_id = :lane, }{lite: blocks = lane_id is not null, }\
       due_at = {unless is_behind: {now}}{if is_behind: null} \
 where sequence = :sequence";

/// The first row of a key that orders it (waiting, or dead and holding), optionally before or after
/// another row.
const OF_LANE: &str = "\
select sequence from oncebox.waiting {my: force index (waiting_lane)} \
 where consumer_id = :consumer and lane_id = :lane {pg: and (state = 'waiting' or holds)}{lite: and blocks = 1} \
   {if before: and sequence < :before }{if after: and sequence > :after }\
 order by sequence limit 1";

const NOT_DUE: &str = "\
update oncebox.waiting set due_at = null where sequence = :sequence and state = 'waiting' and lease is null";

const DELETE: &str = "delete from oncebox.waiting where sequence = :sequence";

/// Acts on the messages that the filter finds. The caller commits, or rolls back a dry run.
pub(super) async fn act(
    session: &mut dyn Session,
    filter: &DeadFilter,
    act: &OperatorAct,
    context: &ActContext,
) -> Result<OperatorOutcome, StoreError> {
    let all = list::find(session, filter).await?;
    if let (OperatorAct::RedriveAs { .. }, count @ 2..) = (act, all.len()) {
        return Err(StoreError::Refused(format!(
            "a new id is for one message, and {count} are meant; name one by its number"
        )));
    }
    let mut outcome = OperatorOutcome { dry_run: context.dry_run, ..OperatorOutcome::default() };
    for found in &all {
        refuse_too_old(found, act, context)?;
        if act.buries(&found.message)? && !bury(session, found).await? {
            return Err(OperatorAct::runs_now(&found.message));
        }
        let done = match &found.row {
            FoundRow::Outbox { position, headers, .. } => {
                let message = &found.message;
                request(session, *position, message, headers, act, context).await?.then_some(Redriven::Waits)
            }
            FoundRow::Consumer(_) if *act == OperatorAct::Bury => Some(Redriven::Waits),
            FoundRow::Consumer(row) => row.carry_out(session, &found.message, act).await?,
        };
        // The row changed since it was found, or has a request already: it is left out of the
        // result.
        let Some(done) = done else { continue };
        outcome.add(&found.message, done);
        audit(session, &found.message, act, done, context).await?;
    }
    Ok(outcome)
}

/// Refuses to redrive a message under its own id where it is older than inboxes may remember: it
/// could run twice (R31).
fn refuse_too_old(found: &FoundMessage, act: &OperatorAct, context: &ActContext) -> Result<(), StoreError> {
    match (&found.row, act, context.redrive_age_max) {
        (FoundRow::Outbox { age, .. }, OperatorAct::Redrive, Some(max)) if *age > max => {
            Err(StoreError::Refused(format!(
                "{} is {} old, and an inbox may have forgotten it: redrive it with `--new-id`, or raise `redrive_age_max` ({})",
                found.message.number,
                humantime::format_duration(Duration::from_secs(age.as_secs())),
                humantime::format_duration(max)
            )))
        }
        _ => Ok(()),
    }
}

/// Makes a consumer's message dead. A copy that was refused makes room for it (`refused`). False
/// where a process has its lease, or where another copy is dead.
async fn bury(session: &mut dyn Session, found: &FoundMessage) -> Result<bool, StoreError> {
    let FoundRow::Consumer(row) = &found.row else { return Ok(false) };
    if let Some(copy) = session.first(sql(DEAD_COPY).bind("sequence", row.sequence)).await? {
        let (copy, reason): (i64, String) = (copy.get(0)?, copy.get(1)?);
        if !Verdict::left_no_inbox_row(&reason) {
            return Ok(false);
        }
        session.run(sql(DELETE_COPY).bind("sequence", copy)).await?;
    }
    // A lease that ends later than any lease can was written while the clock was ahead (R22).
    let bury = sql(BURY).bind("reason", name(BURIED)).bind("sequence", row.sequence).bind("lease_max", LEASE_END_MAX);
    Ok(session.run(bury).await? == 1)
}

/// Writes a request for the owner of the shard. False where the row is not dead any more, or has a
/// request already.
async fn request(
    session: &mut dyn Session,
    position: i64,
    message: &DeadMessage,
    headers: &Headers,
    act: &OperatorAct,
    context: &ActContext,
) -> Result<bool, StoreError> {
    let (requested, new_id, payload) = match act {
        OperatorAct::Redrive => ("redrive", None, None),
        OperatorAct::RedriveAs { id, payload } => ("redrive", Some(*id), payload.as_deref()),
        OperatorAct::Bury | OperatorAct::Discard => ("discard", None, None),
    };
    let headers = caused_by(headers, message.message_id.to_string());
    let request = sql(REQUEST)
        .bind("requested", requested)
        .bind("actor", &context.actor)
        .bind("new_id", Value::RowId(new_id))
        .bind("payload", payload)
        .bind("headers", headers_json(&headers))
        .bind("position", position);
    Ok(session.run(request).await? == 1)
}

/// Headers that name the id which the message had before.
fn caused_by<T: Clone>(headers: &[(String, T)], id: T) -> Vec<(String, T)> {
    let others = headers.iter().filter(|(name, _)| name != CAUSATION).cloned();
    others.chain([(CAUSATION.to_owned(), id)]).collect()
}

impl ConsumerRow {
    /// Carries out the act at once; none where the row is not dead any more.
    async fn carry_out(
        &self,
        session: &mut dyn Session,
        message: &DeadMessage,
        act: &OperatorAct,
    ) -> Result<Option<Redriven>, StoreError> {
        let Some(row) = session.first(sql(DEAD).bind("sequence", self.sequence)).await? else { return Ok(None) };
        let (consumer, own) = (ConsumerId(row.get(0)?), row.get(1)?);
        let lane = self.key.as_deref().map(|key| Uuid::from_bytes(lane_id(&message.topic, key)));
        let (id, hash) = match act {
            OperatorAct::Bury | OperatorAct::Discard => {
                self.discard(session, consumer, lane).await?;
                return Ok(Some(Redriven::Waits));
            }
            OperatorAct::Redrive => (message.message_id, own),
            OperatorAct::RedriveAs { id, payload } => {
                (*id, self.rename(session, message, *id, payload.as_deref()).await?)
            }
        };
        let redriven = redriven(message, act, inbox_row(session, consumer, id, hash).await?)?;
        match redriven {
            Redriven::Waits => self.make_due(session, consumer, lane).await?,
            Redriven::AlreadyHandled => self.discard(session, consumer, lane).await?,
        }
        Ok(Some(redriven))
    }

    /// Deletes the row, and makes the next one of its key due.
    async fn discard(
        &self,
        session: &mut dyn Session,
        consumer: ConsumerId,
        lane: Option<Uuid>,
    ) -> Result<(), StoreError> {
        session.run(sql(DELETE).bind("sequence", self.sequence)).await?;
        wake(session, consumer, lane.map(Uuid::into_bytes).as_slice()).await
    }

    /// Makes the row wait again, with no tries counted. Only the first row of a key has a due time
    /// (R25). So this row is due now if no row is before it, and then the next row loses its due
    /// time, unless it is leased. One that is leased is running now: under the policy `skip` a dead
    /// row holds nothing, so the redriven message may run beside it.
    async fn make_due(
        &self,
        session: &mut dyn Session,
        consumer: ConsumerId,
        lane: Option<Uuid>,
    ) -> Result<(), StoreError> {
        let is_behind = of_lane(session, consumer, lane, Some(self.sequence), None).await?.is_some();
        let due = sql(MAKE_DUE).bind("is_behind", is_behind);
        session.run(due.bind("lane", lane).bind("sequence", self.sequence)).await?;
        if !is_behind && let Some(next) = of_lane(session, consumer, lane, None, Some(self.sequence)).await? {
            session.run(sql(NOT_DUE).bind("sequence", next)).await?;
        }
        Ok(())
    }

    /// Gives the row a new id and perhaps a new payload; returns its new content hash.
    async fn rename(
        &self,
        session: &mut dyn Session,
        message: &DeadMessage,
        id: Uuid,
        payload: Option<&[u8]>,
    ) -> Result<Uuid, StoreError> {
        let headers = caused_by(&self.headers, message.message_id.to_string().into_bytes());
        let hash = Uuid::from_bytes(content_hash(
            &message.topic,
            self.key.as_deref(),
            &message.kind,
            message.content_type.as_deref(),
            payload.unwrap_or(&message.payload),
            headers.iter().map(|(name, value)| (name.as_str(), value.as_slice())),
        ));
        let rename = sql(RENAME)
            .bind("new_id", id)
            .bind("id_text", id.to_string())
            .bind("hash", hash)
            .bind("payload", payload)
            .bind("headers", Value::Headers(headers))
            .bind("sequence", self.sequence);
        session.run(rename).await?;
        Ok(hash)
    }
}

/// Runs `OF_LANE`; none for a message without a key.
async fn of_lane(
    session: &mut dyn Session,
    consumer: ConsumerId,
    lane: Option<Uuid>,
    before: Option<i64>,
    after: Option<i64>,
) -> Result<Option<i64>, StoreError> {
    let Some(lane) = lane else { return Ok(None) };
    let asked = sql(OF_LANE).bind("consumer", consumer).bind("lane", lane).bind("before", before).bind("after", after);
    session.first(asked).await?.map(|row| row.get(0)).transpose()
}

/// Inserts the inbox row of a message that is redriven, so that a second copy is a duplicate (R31).
/// A message that was too old or from the future has no inbox row, nor has a new id. Returns none
/// where the row was inserted, otherwise whether the row that is there has the same content hash.
async fn inbox_row(
    session: &mut dyn Session,
    consumer: ConsumerId,
    id: Uuid,
    hash: Uuid,
) -> Result<Option<bool>, StoreError> {
    let is_timed = MessageId::from(id).unix_millis().is_some();
    let of = |text| sql(text).bind("consumer", consumer).bind("message_id", id).bind("hash", hash);
    let insert = of(INBOX_ROW).bind("is_timed", is_timed).bind("token", Uuid::now_v7());
    if session.run(insert).await? == 1 {
        return Ok(None);
    }
    Ok(Some(session.one(of(IS_SAME)).await?))
}

async fn audit(
    session: &mut dyn Session,
    message: &DeadMessage,
    act: &OperatorAct,
    done: Redriven,
    context: &ActContext,
) -> Result<(), StoreError> {
    let (new_id, is_edited) = match act {
        OperatorAct::RedriveAs { id, payload } => (Some(*id), payload.is_some()),
        _ => (None, false),
    };
    let place = match &message.place {
        DeadPlace::Outbox => "outbox",
        DeadPlace::Consumer(name) => name,
    };
    let detail = done.detail(&message.reason);
    let mut document = serde_json::json!({ "reasonBefore": detail });
    if let Some(id) = new_id {
        document["newId"] = id.to_string().into();
    }
    if is_edited {
        document["editedPayload"] = true.into();
    }
    let (place, topic) = (foreign(place), Some(message.topic.as_str()));
    let (name, number, message_id) = (act.name(), message.number.as_str(), message.message_id);
    audit::write(session, Act { name, place, topic, number, message_id, new_id, detail, document }, context).await
}
