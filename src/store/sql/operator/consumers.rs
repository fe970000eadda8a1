//! Forgets a consumer that is gone: changes its name, then deletes its rows, and last itself.

use uuid::Uuid;

use crate::error::StoreError;
use crate::operator::{ActContext, COUNTED_MAX, Forgotten};
use crate::store::sql::audit::{self, Act};
use crate::store::sql::{Session, SqlStore, name as as_stored, sql};

const CONSUMER: &str = "select consumer_id, {age seen_at} from oncebox.consumer where name = :name {if locks: {lock}}";

/// Its messages and inbox rows, each counted up to a bound: to count all of a large inbox takes
/// longer than a statement may.
const COUNTS: &str = "\
select (select count(*) from (select 1 from oncebox.waiting where consumer_id = :consumer and state = 'waiting' limit :max) w) \
     + (select count(*) from (select 1 from oncebox.waiting where consumer_id = :consumer and state = 'dead' limit :max) d), \
       (select count(*) from (select 1 from oncebox.inbox where consumer_id = :consumer limit :max) i)";

/// Also sets an id rule that no process can have. The row stands until the inbox is deleted. A
/// process that still runs under this number learns from the rule that it is forgotten, when it
/// next records that it is there.
const RENAME: &str = "update oncebox.consumer set name = :name, id_rule = '(forgotten)' where consumer_id = :consumer";

/// Deletes what it counted and had assigned.
const DELETES: [&str; 2] = [
    "delete from oncebox.attempt where consumer_id = :consumer",
    "delete from oncebox.assignment where consumer_id = :consumer",
];

/// Deletes a page of its messages. Each state has an index of its own. In the order of an index a
/// page does not read again what the pages before it deleted.
macro_rules! page_of_messages {
    ($state:literal) => {
        concat!(
            "delete from oncebox.waiting where consumer_id = :consumer and state = '",
            $state,
            "' {my: limit 1000}{pg lite: and sequence in (select sequence from oncebox.waiting \
               where consumer_id = :consumer and state = '",
            $state,
            "' order by sequence limit 1000)}"
        )
    };
}

/// Deletes a page of its inbox, in the order of its key. On PostgreSQL it has two tables.
macro_rules! page_of_inbox {
    ($table:literal) => {
        concat!(
            "delete from oncebox.inbox",
            $table,
            " where consumer_id = :consumer {my: limit 10000}{pg lite: and message_id in (select message_id from oncebox.inbox",
            $table,
            " where consumer_id = :consumer order by message_id limit 10000)}"
        )
    };
}

const PAGES: [&str; 4] = [
    page_of_messages!("waiting"),
    page_of_messages!("dead"),
    page_of_inbox!("{pg: _timed}"),
    page_of_inbox!("{pg: _untimed}"),
];

const LAST: &str = "delete from oncebox.consumer where consumer_id = :consumer";

/// Forgets a consumer; for a dry run only counts its rows.
pub(super) async fn forget(store: &dyn SqlStore, name: &str, context: &ActContext) -> Result<Forgotten, StoreError> {
    let mut reader = store.reader().await?;
    let consumer = gone(&mut *reader, name, false).await?;
    let counts = reader.only(sql(COUNTS).bind("consumer", consumer).bind("max", COUNTED_MAX)).await?;
    let bound = COUNTED_MAX.unsigned_abs();
    let forgotten = Forgotten { messages: counts.get::<u64>(0)?.min(bound), inbox_rows: counts.get(1)? };
    // The pool may have only one connection.
    drop(reader);
    if context.dry_run {
        return Ok(forgotten);
    }
    let mut transaction = store.begin_sql().await?;
    let session = transaction.session();
    let consumer = gone(session, name, true).await?;
    let of = |text| sql(text).bind("consumer", consumer);
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
    // Messages and inbox are deleted in pages: one transaction over all of them would block every
    // other writer on SQLite, and hold back vacuum on PostgreSQL. If the process stops here, the
    // list of consumers shows the changed name, and the operator forgets that one.
    for page in PAGES {
        while store.run_alone(of(page)).await? > 0 {}
    }
    store.run_alone(of(LAST)).await?;
    Ok(forgotten)
}

/// The number of a consumer that is known and gone; with `locks`, its row is locked.
async fn gone(session: &mut dyn Session, name: &str, locks: bool) -> Result<i32, StoreError> {
    let row = session.first(sql(CONSUMER).bind("name", as_stored(name)).bind("locks", locks)).await?;
    let row = row.ok_or_else(|| Forgotten::unknown(name))?;
    Forgotten::check(name, super::status::seconds(row.get(1)?))?;
    row.get(0)
}
