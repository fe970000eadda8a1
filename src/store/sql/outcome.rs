//! The outcome of a record, on MySQL and SQLite.
//!
//! Guarantee: it is written by one statement that compares epoch and owner (O4). A body that is not
//! in the row of the claim follows in a second one, and the caller's transaction holds both.
//!
//! Not here: the outcome on PostgreSQL, which is one statement with its body.

use super::{Session, Statement, sql};
use crate::error::StoreError;
use crate::operation::port::stored::{Columns, pack};
use crate::operation::port::{Fenced, KeptBody, RecordFence, RunOutcome};
use crate::operation::rules::retention::Retention;
use crate::store::statements::Dialect;

const FINISH: &str = "update oncebox.idempotency_request \
    set state = :state, owner = null, lease_until = null, {lease} = null, updated_at = {now}, \
      outcome_at = case when :ends then {now} end, expires_at = {now} + {span :ttl}, answer_status = :status, \
      schema_version = :version, body = :body, body_expires_at = {now} + {span :body_ttl}, resource_kind = :kind, \
      resource_id = :resource, resource_location = :location, error_code = :code, \
      {my: body_headers = :headers, body_bytes = :bytes, body_format = :format, body_kid = :kid,} kept_bytes = :kept \
    where key_digest = :digest and epoch = :epoch and owner {my: <=>}{lite: is} :owner \
      and (state = 'IN_PROGRESS' or (:unknown and state = 'UNKNOWN_REQUIRES_RECOVERY'))";

/// A body that is there already is of an earlier record of this key. That record was released, so
/// the key began at the first epoch again.
const KEEP: &str = "insert into oncebox.idempotency_body (key_digest, epoch, expires_at, headers, bytes, format, kid) \
    select key_digest, epoch, body_expires_at, :headers, :bytes, :format, :kid \
      from oncebox.idempotency_request where key_digest = :digest \
    {or update key_digest, epoch} expires_at = {new expires_at}, headers = {new headers}, bytes = {new bytes}, \
      format = {new format}, kid = {new kid}";

/// Writes the outcome and the body. On MySQL a small body is in the row of the claim.
pub(in crate::store) async fn finish(
    session: &mut dyn Session,
    dialect: Dialect,
    fence: &RecordFence,
    outcome: &RunOutcome,
    retention: &Retention,
) -> Result<Fenced, StoreError> {
    let columns = Columns::of(outcome, retention);
    let small = columns.small().filter(|_| dialect == Dialect::MySql);
    let finish = of_body(sql(FINISH), fence, small)
        .bind("state", columns.state.as_str())
        .bind("ends", columns.ttl.is_some())
        .bind("ttl", columns.ttl)
        .bind("status", columns.status)
        .bind("version", columns.schema_version)
        .bind("body", columns.body)
        .bind("body_ttl", columns.body_ttl)
        .bind("kind", columns.resource.map(|resource| &resource.kind))
        .bind("resource", columns.resource.map(|resource| &resource.id))
        .bind("location", columns.resource.and_then(|resource| resource.location.as_ref()))
        .bind("code", columns.error_code)
        .bind("kept", columns.kept_bytes())
        .bind("epoch", fence.epoch)
        .bind("owner", fence.owner)
        .bind("unknown", fence.unknown);
    let fenced = Fenced::rows(session.run(finish).await?);
    let beside = if small.is_some() { None } else { columns.kept };
    if let (Fenced::Done, Some(_)) = (fenced, beside) {
        session.run(of_body(sql(KEEP), fence, beside)).await?;
    }
    Ok(fenced)
}

fn of_body(statement: Statement, fence: &RecordFence, body: Option<&KeptBody>) -> Statement {
    statement
        .bind("digest", &fence.digest[..])
        .bind("headers", body.map(|kept| pack(&kept.headers)))
        .bind("bytes", body.map(|kept| &kept.bytes[..]))
        .bind("format", body.map(|kept| i64::from(kept.format)))
        .bind("kid", body.and_then(|kept| kept.kid.as_deref()))
}
