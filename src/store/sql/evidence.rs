//! What was observed of operations: of their effects in phases, and of late runs.
//!
//! Guarantees: a row of evidence is never changed, and the database sets its time. Of the answers
//! about one effect that ask to wait only the last one is kept.
//!
//! Not here: what evidence proves (`operation::rules`), and when it is deleted (`expiry`, `phases`,
//! `records`).

use uuid::Uuid;

use super::{Row, Session, SqlStore, Statement, sql};
use crate::error::StoreError;
use crate::operation::port::evidence::{NewEvidence, Sealed, StoredEvidence};

/// The evidence of an operation, with its columns in the order of [`evidence_of`].
pub(in crate::store) const EVIDENCE: &str = "\
    select operation_id, effect, epoch, send, kind, verdict, status, bytes, bytes_kid, {micros observed_at} \
      from oncebox.operation_evidence where operation_id = :id order by evidence_id";

const APPEND: &str = "insert into oncebox.operation_evidence \
      (operation_id, effect, epoch, send, kind, verdict, status, bytes, bytes_kid, observed_at) \
    values (:id, :effect, :epoch, :send, :kind, :verdict, :status, :bytes, :kid, {clock})";

/// Keeps only the last answer that asks to wait: a provider that asks for it all day leaves one
/// row. None of these answers proves anything.
const FORGET_WAITS: &str = "delete from oncebox.operation_evidence \
    where operation_id = :id and effect = :effect and verdict = 'wait' and evidence_id < \
     (select last from (select max(evidence_id) as last from oncebox.operation_evidence \
                         where operation_id = :id and effect = :effect and verdict = 'wait') w)";

fn appended(evidence: &NewEvidence) -> Statement {
    sql(APPEND)
        .bind("id", evidence.operation_id)
        .bind("effect", &evidence.effect)
        .bind("epoch", evidence.epoch)
        .bind("send", i64::from(evidence.send).min(i64::from(i32::MAX)))
        .bind("kind", &evidence.kind)
        .bind("verdict", &evidence.verdict)
        .bind("status", evidence.status.map(i64::from))
        .bind("bytes", &evidence.bytes.bytes[..])
        .bind("kid", evidence.bytes.kid.as_deref())
}

/// Appends one row of evidence; the server sets its time.
pub(super) async fn append(session: &mut dyn Session, evidence: &NewEvidence) -> Result<(), StoreError> {
    session.run(appended(evidence)).await.map(drop)
}

/// Appends evidence in a transaction of its own, as `Phases::observe` says.
pub(super) async fn observe(store: &dyn SqlStore, evidence: &NewEvidence) -> Result<(), StoreError> {
    if !evidence.asks_to_wait() {
        return store.run_alone(appended(evidence)).await.map(drop);
    }
    let mut transaction = store.begin_sql().await?;
    let session = transaction.session();
    append(session, evidence).await?;
    let forget = sql(FORGET_WAITS).bind("id", evidence.operation_id).bind("effect", &evidence.effect);
    session.run(forget).await?;
    transaction.commit().await
}

/// What was observed of an operation, oldest first.
pub(super) async fn read(session: &mut dyn Session, operation_id: Uuid) -> Result<Vec<StoredEvidence>, StoreError> {
    let rows = session.rows(sql(EVIDENCE).bind("id", operation_id)).await?;
    rows.iter().map(|row| evidence_of(&**row)).collect()
}

/// A row of [`EVIDENCE`].
fn evidence_of(row: &dyn Row) -> Result<StoredEvidence, StoreError> {
    let evidence = NewEvidence {
        operation_id: row.get(0)?,
        effect: row.get(1)?,
        epoch: row.get(2)?,
        send: row.get(3)?,
        kind: row.get(4)?,
        verdict: row.get(5)?,
        status: row.get_opt(6)?,
        bytes: Sealed { bytes: row.get(7)?, kid: row.get_opt(8)? },
    };
    Ok(StoredEvidence { evidence, at: row.get(9)? })
}
