//! The audit of operators: one row for each act, written in the transaction of the act.

use uuid::Uuid;

use super::{Row, Session, Value, foreign, name, sql};
use crate::error::StoreError;
use crate::operator::{ActContext, AuditEntry};
use crate::store::statements::Dialect;

const READ: &str = "\
select at, actor, act, reason, {pg: topic}{my lite: place}, number, \
       {pg my: message_id}{lite: unhex(replace(message_id, '-', ''))}, {pg: detail::text}{my lite: detail} \
  from oncebox.audit {if id: where message_id = :id }order by audit_id desc limit :limit";

const WRITE: &str = "\
insert into oncebox.audit (actor, act, reason, number, message_id, \
       {pg: topic, detail}{my lite: place, at, new_id, detail}) \
values (:actor, :act, :reason, :number, :message_id, \
       {pg: {if topic: :topic}{unless topic: :place}, :document::jsonb}{my lite: :place, {now}, :new_id, :detail})";

/// The audit rows, newest first.
pub(super) async fn read(
    session: &mut dyn Session,
    of: Option<Uuid>,
    limit: usize,
) -> Result<Vec<AuditEntry>, StoreError> {
    let rows = session.rows(sql(READ).bind("id", Value::RowId(of)).bind("limit", limit)).await?;
    let entry = |row: &dyn Row| {
        Ok(AuditEntry {
            at: row.get(0)?,
            actor: row.get(1)?,
            act: row.get(2)?,
            reason: row.get(3)?,
            place: row.foreign(4)?,
            number: row.get(5)?,
            message_id: row.get(6)?,
            detail: row.get(7)?,
        })
    };
    rows.iter().map(|row| entry(&**row)).collect()
}

pub(super) struct Act<'a> {
    pub(super) name: &'static str,
    /// What the act was on: `outbox`, a consumer or an operation.
    pub(super) place: Value,
    /// The topic of a message, which PostgreSQL keeps instead of the place.
    pub(super) topic: Option<&'a str>,
    pub(super) number: &'a str,
    pub(super) message_id: Uuid,
    pub(super) new_id: Option<Uuid>,
    /// The detail as text, for MySQL and SQLite.
    pub(super) detail: String,
    /// The detail as JSON, for PostgreSQL.
    pub(super) document: serde_json::Value,
}

pub(super) async fn write(session: &mut dyn Session, act: Act<'_>, context: &ActContext) -> Result<(), StoreError> {
    let write = sql(WRITE)
        .bind("actor", &context.actor)
        .bind("act", act.name)
        .bind("reason", &context.reason)
        .bind("place", act.place)
        .bind("topic", act.topic.map_or(Value::Foreign(None), foreign))
        .bind("number", act.number)
        .bind("message_id", Value::RowId(Some(act.message_id)))
        .bind("new_id", Value::RowId(act.new_id))
        .bind("detail", act.detail)
        .bind("document", act.document.to_string());
    session.run(write).await.map(drop)
}

/// Writes the row of a repair of positions.
pub(in crate::store) async fn mended(
    session: &mut dyn Session,
    dialect: Dialect,
    mended: &str,
    context: &ActContext,
) -> Result<(), StoreError> {
    let is_postgres = dialect == Dialect::Postgres;
    let (place, number) = if is_postgres { ("", "outbox_position_seq") } else { ("outbox", "position") };
    let act = Act {
        name: "mend-sequence",
        place: name(place),
        topic: None,
        number,
        message_id: Uuid::nil(),
        new_id: None,
        detail: mended.to_owned(),
        document: serde_json::json!({ "mended": mended }),
    };
    write(session, act, context).await
}
