//! The outcome of a record, in one statement.
//!
//! Guarantees: fenced by epoch and owner, and in a transactional operation by the id of the
//! transaction that holds the claim, compared in the UPDATE itself (O1). A column without a value
//! is not written: the claim, also one that renews a key, has left it null.

use sqlx::postgres::PgArguments;
use sqlx::{Arguments, Postgres, QueryBuilder};

use super::super::door::push_call;
use super::expiry;
use crate::error::StoreError;
use crate::message::NewMessage;
use crate::operation::port::stored::{Columns, pack};
use crate::operation::port::{Fenced, RecordFence, RunOutcome};
use crate::operation::rules::retention::Retention;
use crate::store::bounded::{Ask, Bounded};

/// Initial capacities for the text and the values of the statement, so that they rarely grow.
const TEXT_USUALLY: usize = 1_536;
const VALUES_USUALLY: usize = 32;
const VALUE_BYTES_USUALLY: usize = 2_048;

/// The only transaction that may write the outcome, and the messages to enqueue with it.
#[derive(Clone, Copy)]
pub(in crate::store::postgres) struct Within<'a> {
    /// The id of that transaction.
    pub(in crate::store::postgres) token: &'a str,
    /// The messages to enqueue, as [`checked`](super::super::door::checked) gave them.
    pub(in crate::store::postgres) messages: &'a [NewMessage],
}

/// Writes the outcome and the body.
pub(in crate::store::postgres) async fn finish(
    connection: &mut Bounded<Postgres>,
    fence: &RecordFence,
    outcome: &RunOutcome,
    retention: &Retention,
    within: Option<Within<'_>>,
) -> Result<Fenced, StoreError> {
    let done = finishing(fence, outcome, retention, within).build().run(connection).await;
    Ok(Fenced::rows(done.map_err(expiry::attached)?.rows_affected()))
}

/// Builds the statement. Its number of changed rows is 1, or 0 where the fence does not hold. With
/// a body that is not in the record's row, the rows of bodies are counted instead.
///
/// All times are the start of the statement. Where an operator or a heartbeat has the row locked,
/// this is earlier than the write by the time that the statement waits.
///
/// Messages are enqueued by an expression in the SET list: once where the outcome is written, and
/// not at all where it is not. PostgreSQL would evaluate the expression again, and enqueue twice,
/// if another transaction changed the row meanwhile. Here none can: our own transaction claimed it.
pub(super) fn finishing(
    fence: &RecordFence,
    outcome: &RunOutcome,
    retention: &Retention,
    within: Option<Within<'_>>,
) -> QueryBuilder<Postgres> {
    let columns = Columns::of(outcome, retention);
    let large = columns.large().filter(|_| retention.body <= expiry::IN_RANGES_MAX);
    let mut values = PgArguments::default();
    values.reserve(VALUES_USUALLY, VALUE_BYTES_USUALLY);
    let mut update = QueryBuilder::with_arguments(String::with_capacity(TEXT_USUALLY), values);
    if large.is_some() {
        update.push("with done as (");
    }
    update.push("update oncebox.idempotency_request r set state = ").push_bind(columns.state.as_str());
    match &within {
        Some(Within { messages, .. }) if !messages.is_empty() => {
            update.push(", updated_at = case when ");
            push_call(&mut update, messages);
            update.push(" is not null then statement_timestamp() end");
        }
        _ => {
            update.push(", updated_at = statement_timestamp()");
        }
    }
    if let Some(ttl) = columns.ttl {
        update.push(", outcome_at = statement_timestamp()");
        push_time(&mut update, "expires_at", ttl.as_secs_f64());
    }
    if let (Some(status), Some(version), Some(body)) = (columns.status, columns.schema_version, columns.body) {
        update.push(", answer_status = ").push_bind(status as i32);
        update.push(", schema_version = ").push_bind(version);
        update.push(", body = ").push_bind(body);
    }
    if let Some(ttl) = columns.body_ttl {
        push_time(&mut update, "body_expires_at", ttl.as_secs_f64());
        update.push(", kept_bytes = ").push_bind(columns.kept_bytes());
    }
    if let Some(resource) = columns.resource {
        update.push(", resource_kind = ").push_bind(resource.kind.as_str());
        update.push(", resource_id = ").push_bind(resource.id.as_str());
        update.push(", resource_location = ").push_bind(resource.location.as_deref());
    }
    if let Some(code) = columns.error_code {
        update.push(", error_code = ").push_bind(code);
    }
    if let Some(kept) = columns.kept.filter(|_| large.is_none()) {
        update.push(", body_headers = ").push_bind(pack(&kept.headers));
        update.push(", body_bytes = ").push_bind(kept.bytes.as_slice());
        update.push(", body_format = ").push_bind(i32::from(kept.format));
        if let Some(kid) = &kept.kid {
            update.push(", body_kid = ").push_bind(kid.as_str());
        }
    }
    if fence.owner.is_some() {
        update.push(", owner = null, lease_until = null, lease_seconds = null");
    }
    update.push(" where r.outcome_at is null and r.key_digest = ").push_bind(fence.digest.as_slice());
    update.push(" and r.epoch = ").push_bind(fence.epoch);
    match fence.owner {
        Some(owner) => update.push(" and r.owner = ").push_bind(owner),
        None => update.push(" and r.owner is null"),
    };
    if !fence.unknown {
        update.push(" and r.state <> 'UNKNOWN_REQUIRES_RECOVERY'");
    }
    if let Some(Within { token, .. }) = within {
        update.push(" and pg_current_xact_id_if_assigned()::text = ").push_bind(token);
    }
    if let Some(kept) = large {
        update.push(
            " returning r.key_digest, r.epoch, r.body_expires_at) insert into oncebox.idempotency_body \
             (key_digest, epoch, expires_at, headers, bytes, format, kid) select d.key_digest, d.epoch, d.body_expires_at, ",
        );
        update
            .separated(", ")
            .push_bind(pack(&kept.headers))
            .push_bind(kept.bytes.as_slice())
            .push_bind(i32::from(kept.format))
            .push_bind(kept.kid.as_deref());
        update.push(" from done d");
    }
    update
}

/// Sets a column to so many seconds from now.
fn push_time(update: &mut QueryBuilder<Postgres>, column: &str, seconds: f64) {
    update.push(format_args!(", {column} = statement_timestamp() + interval '1 second' * ")).push_bind(seconds);
}
