//! Forgets a consumer that is gone: deletes its rows, and last its inbox and itself.

use uuid::Uuid;

use crate::error::StoreError;
use crate::operator::{ActContext, Forgotten};
use crate::store::sql::audit::{self, Act};
use crate::store::sql::{SqlStore, name as as_stored, sql};

const CONSUMER: &str = "select consumer_id, {age seen_at} from oncebox.consumer where name = :name {lock}";

const COUNTS: &str = "\
select (select count(*) from oncebox.waiting where consumer_id = :consumer), \
       (select count(*) from oncebox.inbox where consumer_id = :consumer)";

/// Deletes everything of the consumer except its inbox.
const DELETES: [&str; 3] = [
    "delete from oncebox.waiting where consumer_id = :consumer",
    "delete from oncebox.attempt where consumer_id = :consumer",
    "delete from oncebox.assignment where consumer_id = :consumer",
];

/// Also sets an id rule that no process can have. The row stands until the inbox is deleted. A
/// process that still runs under this number learns from the rule that it is forgotten, when it
/// next records that it is there.
const RENAME: &str = "update oncebox.consumer set name = :name, id_rule = '(forgotten)' where consumer_id = :consumer";

/// Deletes a page of its inbox, which is two tables on PostgreSQL.
const PAGE: &str = "\
{pg: delete from oncebox.inbox_{if is_timed: timed}{unless is_timed: untimed} where consumer_id = :consumer \
  and message_id in (select message_id from oncebox.inbox_{if is_timed: timed}{unless is_timed: untimed} \
                      where consumer_id = :consumer limit 10000)}\
{my: delete from oncebox.inbox where consumer_id = :consumer limit 10000}\
{lite: delete from oncebox.inbox where consumer_id = :consumer \
  and message_id in (select message_id from oncebox.inbox where consumer_id = :consumer limit 10000)}";

const LAST: &str = "delete from oncebox.consumer where consumer_id = :consumer";

/// Forgets a consumer; for a dry run only counts its rows.
pub(super) async fn forget(store: &dyn SqlStore, name: &str, context: &ActContext) -> Result<Forgotten, StoreError> {
    let mut transaction = store.begin_sql().await?;
    let session = transaction.session();
    let row = session.first(sql(CONSUMER).bind("name", as_stored(name))).await?;
    let row = row.ok_or_else(|| Forgotten::unknown(name))?;
    let (consumer, seen): (i32, i64) = (row.get(0)?, row.get(1)?);
    Forgotten::check(name, super::status::seconds(seen))?;
    let of = |text| sql(text).bind("consumer", consumer);
    let counts = session.only(of(COUNTS)).await?;
    let forgotten = Forgotten { messages: counts.get(0)?, inbox_rows: counts.get(1)? };
    if context.dry_run {
        transaction.rollback().await?;
        return Ok(forgotten);
    }
    for delete in DELETES {
        session.run(of(delete)).await?;
    }
    session.run(of(RENAME).bind("name", as_stored(Forgotten::name(consumer).as_str()))).await?;
    let act = Act {
        name: "forget",
        place: as_stored(name),
        topic: None,
        number: "",
        message_id: Uuid::nil(),
        new_id: None,
        detail: format!("{} messages, {} inbox rows", forgotten.messages, forgotten.inbox_rows),
        document: serde_json::json!({ "messages": forgotten.messages, "inboxRows": forgotten.inbox_rows }),
    };
    audit::write(session, act, context).await?;
    transaction.commit().await?;
    // The inbox is deleted in pages: one transaction over all of it would block every other writer
    // on SQLite, and hold back vacuum on PostgreSQL. If the process stops here, the list of
    // consumers shows the changed name, and the operator forgets that one.
    for is_timed in [true, false] {
        while store.run_alone(of(PAGE).bind("is_timed", is_timed)).await? > 0 {}
    }
    store.run_alone(of(LAST)).await?;
    Ok(forgotten)
}
