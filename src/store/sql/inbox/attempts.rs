//! Attempts of messages: counted in transactions of their own (R26), and deleted once the message
//! has its inbox row.

use uuid::Uuid;

use crate::error::StoreError;
use crate::inbox::port::ConsumerId;
use crate::message::MessageId;
use crate::store::sql::message::error_text;
use crate::store::sql::{Session, SqlStore, Statement, sql};

/// The table of the rows `a` of the messages `:ids`; on MySQL joined with the list of ids.
macro_rules! rows {
    () => {
        "{my: json_table(:ids, '$[*]' columns (id varchar(32) path '$')) j straight_join oncebox.attempt a force index (primary) \
           on a.consumer_id = :consumer and a.message_id = unhex(j.id)}{pg lite: oncebox.attempt as a}"
    };
}

/// Which rows of `rows!` are of the messages `:ids`. On MySQL the join has found only these.
macro_rules! are_meant {
    () => {
        "{my: true}{pg lite: a.consumer_id = :consumer and a.message_id {in ids :ids}}"
    };
}

/// Behind FROM: the rows `a` of the messages `:ids`; further conditions follow.
macro_rules! of_ids {
    () => {
        concat!(rows!(), " where ", are_meant!())
    };
}

const COUNT: &str = "insert into oncebox.attempt (consumer_id, message_id, attempts, history, updated_at) \
    values (:consumer, :id, :counts, '[]', {clock}) \
    {or update consumer_id, message_id} \
    attempts = oncebox.attempt.attempts + :counts, updated_at = {clock}";

const NOTE: &str = "update oncebox.attempt set history = {history history attempts} \
    where consumer_id = :consumer and message_id = :id";

const COUNTED: &str = "select attempts from oncebox.attempt where consumer_id = :consumer and message_id = :id";

const COUNT_FIRST: &str = "insert into oncebox.attempt (consumer_id, message_id, attempts, history, updated_at) \
    select :consumer, {pg: l.id}{my: unhex(l.id)}{lite: unhex(l.value)}, 1, '[]'{pg: ::jsonb}, {clock} \
      from {pg: unnest(:ids) l (id)}{my: json_table(:ids, '$[*]' columns (id varchar(32) path '$')) l}{lite: json_each(:ids) l} \
     where true \
    {or update consumer_id, message_id} \
    attempts = {greatest}(oncebox.attempt.attempts, 1)";

const TAKE_BACK: &str = concat!(
    "{pg: /* planned anew */ }update ",
    rows!(),
    " set attempts = a.attempts - 1, updated_at = {clock} where ",
    are_meant!(),
    " and a.attempts > 0"
);

/// Deletes rows without a counted try and without an error. Otherwise only the success of a counted
/// try would delete them.
const FORGET_EMPTY: &str = concat!(
    "{pg: /* planned anew */ }delete {my: a} from ",
    of_ids!(),
    " and a.attempts = 0 and {pg lite: a.history = '[]'}{my: json_length(a.history) = 0}"
);

const COUNTED_OF: &str =
    concat!("{pg: /* planned anew */ }select a.message_id, a.attempts from ", of_ids!(), " and a.attempts > 0");

const HANDLED: &str = "{pg: /* planned anew */ }select a.message_id from oncebox.attempt a {my: straight_join}{pg lite: join} oncebox.inbox i \
      {my: force index (primary)} on i.consumer_id = a.consumer_id and i.message_id = a.message_id \
    where a.consumer_id = :consumer limit :most";

/// Deletes exact rows: a range would wait for a transaction that is counting a try.
const DELETE: &str = concat!("{pg: /* planned anew */ }delete {my: a} from ", of_ids!());

fn of_one(text: &'static str, consumer: ConsumerId, id: MessageId) -> Statement {
    sql(text).bind("consumer", consumer).bind("id", id.uuid())
}

fn of_many(text: &'static str, consumer: ConsumerId, ids: &[MessageId]) -> Statement {
    let mut ids: Vec<Uuid> = ids.iter().map(|id| id.uuid()).collect();
    // Sorted: two processes with the same ids wait for each other instead of deadlocking; and one
    // statement cannot change a row twice.
    ids.sort_unstable();
    ids.dedup();
    sql(text).bind("consumer", consumer).bind("ids", ids)
}

/// Counts a try, or stores its error, or both; returns how many tries are counted.
pub(super) async fn count(
    store: &dyn SqlStore,
    consumer: ConsumerId,
    id: MessageId,
    counts: bool,
    error: Option<&str>,
) -> Result<u32, StoreError> {
    let mut transaction = store.begin_sql().await?;
    let session = transaction.session();
    session.run(of_one(COUNT, consumer, id).bind("counts", i64::from(counts))).await?;
    if let Some(error) = error {
        session.run(of_one(NOTE, consumer, id).bind("error", error_text(error))).await?;
    }
    let attempts = session.one(of_one(COUNTED, consumer, id)).await?;
    transaction.commit().await?;
    Ok(attempts)
}

/// Counts the first try of each message that has none counted.
pub(super) async fn count_first(
    store: &dyn SqlStore,
    consumer: ConsumerId,
    ids: &[MessageId],
) -> Result<(), StoreError> {
    if !ids.is_empty() {
        store.run_alone(of_many(COUNT_FIRST, consumer, ids)).await?;
    }
    Ok(())
}

/// Takes back one try of each of these messages.
pub(super) async fn take_back(store: &dyn SqlStore, consumer: ConsumerId, ids: &[MessageId]) -> Result<(), StoreError> {
    if ids.is_empty() {
        return Ok(());
    }
    let mut transaction = store.begin_sql().await?;
    for text in [TAKE_BACK, FORGET_EMPTY] {
        transaction.session().run(of_many(text, consumer, ids)).await?;
    }
    transaction.commit().await
}

/// Those of these messages that have counted tries, with their number.
pub(super) async fn counted(
    store: &dyn SqlStore,
    consumer: ConsumerId,
    ids: &[MessageId],
) -> Result<Vec<(MessageId, u32)>, StoreError> {
    if ids.is_empty() {
        return Ok(Vec::new());
    }
    let rows = store.reader().await?.rows(of_many(COUNTED_OF, consumer, ids)).await?;
    rows.iter().map(|row| Ok((MessageId::from_uuid(row.get(0)?), row.get(1)?))).collect()
}

/// Deletes up to `rows_max` attempt rows whose message has its inbox row; returns how many.
pub(super) async fn forget(store: &dyn SqlStore, consumer: ConsumerId, rows_max: usize) -> Result<u64, StoreError> {
    let handled = sql(HANDLED).bind("consumer", consumer).bind("most", rows_max);
    let handled: Vec<Uuid> = store.reader().await?.column(handled).await?;
    if handled.is_empty() {
        return Ok(0);
    }
    let ids: Vec<MessageId> = handled.into_iter().map(MessageId::from_uuid).collect();
    store.run_alone(of_many(DELETE, consumer, &ids)).await
}

/// Deletes the attempt rows of messages that are handled or stored.
pub(in crate::store) async fn clear(
    session: &mut dyn Session,
    consumer: ConsumerId,
    ids: &[MessageId],
) -> Result<(), StoreError> {
    if !ids.is_empty() {
        session.run(of_many(DELETE, consumer, ids)).await?;
    }
    Ok(())
}
