//! The outcome of a record, in one statement.
//!
//! Guarantees: fenced by epoch and owner, and in door A by the id of the transaction that holds the claim, compared in the UPDATE
//! itself (O1). What has no value is not written: a claim, also one that is used anew, has none of it yet.

use sqlx::encode::Encode;
use sqlx::postgres::PgArguments;
use sqlx::{Arguments, AssertSqlSafe, Postgres, Type};

use super::{Query, expiry};
use crate::error::StoreError;
use crate::policy::operation::retention::Retention;
use crate::store::bounded::{Ask, Bounded};
use crate::store::operations::RecordFence;
use crate::store::operations::stored::{Columns, pack};
use crate::store::{Fenced, Outcome};

/// Writes the outcome and the body; with `token`, only in the transaction of that id.
pub(in crate::store::postgres) async fn finish(
    connection: &mut Bounded<Postgres>,
    fence: &RecordFence,
    outcome: &Outcome,
    retention: &Retention,
    token: Option<&str>,
) -> Result<Fenced, StoreError> {
    let done = finishing(fence, outcome, retention, token)?.run(connection).await;
    Ok(Fenced::rows(done.map_err(expiry::attached)?.rows_affected()))
}

/// The statement, which changes as many rows as it writes records: with a body that has no room in the row of its claim, as many rows
/// of bodies.
///
/// Its time is that of the statement, which is earlier than the write by as long as the row is waited for, if an operator or a
/// heartbeat has it just then. It has no condition on the state that the index of open records could serve: before the tables are
/// analyzed that would be read from end to end.
pub(super) fn finishing(
    fence: &RecordFence,
    outcome: &Outcome,
    retention: &Retention,
    token: Option<&str>,
) -> Result<Query<'static>, StoreError> {
    let columns = Columns::of(outcome, retention);
    let mut update = Writing::default();
    update.push("update oncebox.idempotency_request r set state = ", columns.state.as_str())?;
    update.sql.push_str(", updated_at = statement_timestamp()");
    if let Some(ttl) = columns.ttl {
        update.sql.push_str(", outcome_at = statement_timestamp()");
        update.set_time("expires_at", ttl.as_secs_f64())?;
    }
    if let (Some(status), Some(version), Some(body)) = (columns.status, columns.schema_version, columns.body) {
        update.set("answer_status", status as i32)?;
        update.set("schema_version", version)?;
        update.set("body", body)?;
    }
    if let Some(ttl) = columns.body_ttl {
        update.set_time("body_expires_at", ttl.as_secs_f64())?;
        update.set("kept_bytes", columns.kept_bytes())?;
    }
    if let Some(resource) = columns.resource {
        update.set("resource_kind", resource.kind.as_str())?;
        update.set("resource_id", resource.id.as_str())?;
        update.set("resource_location", resource.location.as_deref())?;
    }
    if let Some(code) = columns.error_code {
        update.set("error_code", code)?;
    }
    if let Some(kept) = columns.small() {
        update.set("body_headers", pack(&kept.headers))?;
        update.set("body_bytes", kept.bytes.as_slice())?;
        update.set("body_format", i32::from(kept.format))?;
        if let Some(kid) = &kept.kid {
            update.set("body_kid", kid.as_str())?;
        }
    }
    if fence.owner.is_some() {
        update.sql.push_str(", owner = null, lease_until = null, lease_seconds = null");
    }
    update.sql.push_str(" where r.outcome_at is null");
    update.push(" and r.key_digest = ", fence.digest.as_slice())?;
    update.push(" and r.epoch = ", fence.epoch)?;
    match fence.owner {
        Some(owner) => update.push(" and r.owner = ", owner)?,
        None => update.sql.push_str(" and r.owner is null"),
    }
    if !fence.unknown {
        update.sql.push_str(" and r.state <> 'UNKNOWN_REQUIRES_RECOVERY'");
    }
    if let Some(token) = token {
        update.sql.push_str(" and pg_current_xact_id_if_assigned()::text");
        update.push(" = ", token)?;
    }
    if let Some(kept) = columns.large() {
        update.sql.insert_str(0, "with done as (");
        update.sql.push_str(
            " returning r.key_digest, r.epoch, r.body_expires_at) insert into oncebox.idempotency_body \
             (key_digest, epoch, expires_at, headers, bytes, format, kid) select d.key_digest, d.epoch, d.body_expires_at",
        );
        update.push(", ", pack(&kept.headers))?;
        update.push(", ", kept.bytes.as_slice())?;
        update.push(", ", i32::from(kept.format))?;
        update.push(", ", kept.kid.as_deref())?;
        update.sql.push_str(" from done d");
    }
    Ok(sqlx::query_with(AssertSqlSafe(update.sql), update.arguments))
}

/// A statement as it is written: its text is of our own words, and every value an argument.
#[derive(Default)]
struct Writing {
    sql: String,
    arguments: PgArguments,
}

impl Writing {
    /// Our words, and a value behind them.
    fn push<'v>(&mut self, words: &str, value: impl Encode<'v, Postgres> + Type<Postgres>) -> Result<(), StoreError> {
        self.arguments.add(value).map_err(sqlx::Error::Encode)?;
        self.sql.push_str(words);
        self.sql.push_str(&format!("${}", self.arguments.len()));
        Ok(())
    }

    fn set<'v>(&mut self, column: &str, value: impl Encode<'v, Postgres> + Type<Postgres>) -> Result<(), StoreError> {
        self.push(&format!(", {column} = "), value)
    }

    /// So many seconds from now.
    fn set_time(&mut self, column: &str, seconds: f64) -> Result<(), StoreError> {
        self.push(&format!(", {column} = statement_timestamp() + interval '1 second' * "), seconds)
    }
}
