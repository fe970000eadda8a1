//! The part of the inbox that does not run for every batch, on every database.
//!
//! Guarantees:
//!
//! * A consumer keeps its number, and its id rule changes only when an operator accepts that (R31).
//! * Tries are counted in transactions of their own (R26), and their rows are deleted once the
//!   message has its inbox row.
//! * Only the current owner of a partition changes its position or closes its row. An owner that
//!   lost the row takes it back only if the row is not further than its position.
//!
//! Not here: what runs for every batch, which each database implements itself ([`OwnInbox`]).

pub(in crate::store) mod purge;

use std::collections::HashSet;
use std::fmt::Debug;
use std::time::Duration;

use async_trait::async_trait;
use uuid::Uuid;

use super::message::error_text;
use super::outbox::skipped;
use super::{Session, SqlStore, Statement, foreign, sql};
use crate::error::StoreError;
use crate::inbox::port::{ConsumerId, ConsumerSpec, Holding, Inbox, InboxTx, Opened, Purged};
use crate::inbox::rules::horizon::Bounds;
use crate::inbox::rules::position::Position;
use crate::message::MessageId;
use crate::time::db_time::DbTime;

/// The part of [`Inbox`] that each database implements itself. `begin_batch`, `known_ids`,
/// `are_contested` and `bounds_now` keep the promises of its `begin`, `known`, `is_contested` and
/// `bounds`.
#[async_trait]
pub(in crate::store) trait OwnInbox: SqlStore + Debug {
    /// Whether the purge finds ids that carry a time by the key. Otherwise it finds all ids by
    /// their time of receipt.
    const PURGES_BY_KEY: bool;

    async fn begin_batch(&self, consumer: ConsumerId) -> Result<Box<dyn InboxTx>, StoreError>;

    async fn known_ids(&self, consumer: ConsumerId, ids: &[MessageId]) -> Result<HashSet<MessageId>, StoreError>;

    async fn are_contested(&self, consumer: ConsumerId, ids: &[MessageId]) -> Result<bool, StoreError>;

    async fn bounds_now(&self, consumer: ConsumerId) -> Result<Bounds, StoreError>;

    /// Makes the partitions that inbox rows will need, where the database has partitions.
    async fn make_room(&self) -> Result<(), StoreError> {
        Ok(())
    }
}

const FIND: &str = "select consumer_id, id_rule from oncebox.consumer where name = :name {if locks: {lock}}";

const SKEW: &str = "select value from oncebox.limits where name = 'id_skew_seconds'";

const REGISTER: &str = "insert into oncebox.consumer (name, id_rule, registered_at, seen_at) \
    values (:name, :rule, {clock}, {clock}) {pg lite: on conflict (name) do nothing}{my: on duplicate key update name = name}";

/// A consumer that starts counts as seen. An operator's act that forgets it waits for the lock of
/// this row, and is then refused.
const START: &str = "update oncebox.consumer set id_rule = :rule, seen_at = {clock} where consumer_id = :consumer";

const SEEN: &str = "update oncebox.consumer set seen_at = {clock} where consumer_id = :consumer and id_rule = :rule";

/// A dead message after `:skipped` others, if there are so many; with `all`, a waiting or dead one.
/// It reads entries of indexes, of each state at most one more than `:skipped`. On PostgreSQL the
/// order, with a range of one consumer, makes any other plan sort all rows of the consumer.
pub(in crate::store) const STORED: &str = "\
{pg: /* planned anew */ }select 1 from \
{pg: (select * from (select 1 from oncebox.waiting where consumer_id between :consumer and :consumer and state = 'dead' \
        order by consumer_id, message_id, content_hash limit :skipped + 1) d \
      {if all: union all \
      select * from (select 1 from oncebox.waiting where consumer_id between :consumer and :consumer and state = 'waiting' \
        order by consumer_id, sequence limit :skipped + 1) w}) s}\
{my: oncebox.waiting force index (waiting_state) where consumer_id = :consumer and state in ('dead'{if all: , 'waiting'})}\
{lite: (select 1 from oncebox.waiting where consumer_id = :consumer and state = 'dead' \
        {if all: union all select 1 from oncebox.waiting where consumer_id = :consumer and state = 'waiting'}) s} \
 limit 1 offset :skipped";

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

/// On MySQL the join finds only the rows of these messages, so only the others need the condition.
const TAKE_BACK: &str = "{pg: /* planned anew */ }update \
    {my: json_table(:ids, '$[*]' columns (id varchar(32) path '$')) j straight_join oncebox.attempt a force index (primary) \
      on a.consumer_id = :consumer and a.message_id = unhex(j.id)}{pg lite: oncebox.attempt as a} \
    set attempts = a.attempts - 1, updated_at = {clock} \
    where {pg lite: a.consumer_id = :consumer and a.message_id {in ids :ids} and} a.attempts > 0";

/// Deletes rows without a counted try and without an error. Otherwise they would stay until a
/// purge, because the success of a try that was not counted deletes nothing here.
const FORGET_EMPTY: &str = "{pg: /* planned anew */ }delete {my: a} from \
    {each attempt a ids message_id :ids primary} and a.consumer_id = :consumer \
    and a.attempts = 0 and {pg lite: a.history = '[]'}{my: json_length(a.history) = 0}";

const COUNTED_OF: &str = "{pg: /* planned anew */ }select a.message_id, a.attempts from \
    {each attempt a ids message_id :ids primary} and a.consumer_id = :consumer and a.attempts > 0";

/// The messages with counted tries, in pages. No join with the inbox: on PostgreSQL it would lock
/// all partitions of it.
const ATTEMPTED: &str = "select message_id from oncebox.attempt \
    where consumer_id = :consumer and message_id > :after order by message_id limit :most";

/// Deletes exact rows: a range would wait for a transaction that is counting a try.
const FORGET: &str = "{pg: /* planned anew */ }delete {my: a} from \
    {each attempt a ids message_id :ids primary} and a.consumer_id = :consumer";

/// Inserts the row, closed and without an owner, if it is not there. Of two processes the second
/// waits here for the first, and then reads what that wrote.
const KNOW: &str = "insert into oncebox.assignment (consumer_id, topic, partition_no, state, changed_at) \
    values (:consumer, :topic, :partition, 'closed', {clock}) \
    {pg lite: on conflict (consumer_id, topic, partition_no) do nothing}{my: on duplicate key update state = state}";

const STOOD: &str = "select a.state = 'open', a.topic_id, a.next_offset, \
      coalesce(a.id_rule <> (select c.id_rule from oncebox.consumer c where c.consumer_id = a.consumer_id), false) \
    from oncebox.assignment a where a.consumer_id = :consumer and a.topic = :topic and a.partition_no = :partition {lock}";

const OPEN: &str = "update oncebox.assignment set state = 'open', owner = :owner, changed_at = {clock} \
    where consumer_id = :consumer and topic = :topic and partition_no = :partition";

/// A broker that does not give the id of the topic in time does not erase the one that is known: a
/// topic that was made anew is recognised by it.
const KEEP: &str = "update oncebox.assignment set topic_id = coalesce(:topic_id, topic_id), next_offset = :next, changed_at = {clock}, \
      id_rule = (select c.id_rule from oncebox.consumer c where c.consumer_id = :consumer) \
    where consumer_id = :consumer and topic = :topic and partition_no = :partition and owner = :owner";

const TAKE_BACK_ROW: &str = "update oncebox.assignment set state = 'open', owner = :owner, \
      topic_id = :topic_id, next_offset = :next, changed_at = {clock}, \
      id_rule = (select c.id_rule from oncebox.consumer c where c.consumer_id = :consumer) \
    where consumer_id = :consumer and topic = :topic and partition_no = :partition \
      {if unowned: and owner is null} \
      and (next_offset is null or next_offset <= :next \
      and topic_id {pg: is not distinct from}{my: <=>}{lite: is} :topic_id)";

const CLOSE: &str = "update oncebox.assignment set state = 'closed', owner = null, changed_at = {clock} \
      {if next: , topic_id = coalesce(:topic_id, topic_id), next_offset = :next} \
    where consumer_id = :consumer and topic = :topic and partition_no = :partition and owner = :owner";

async fn has_stored<S: OwnInbox>(store: &S, consumer: ConsumerId, rows: usize, all: bool) -> Result<bool, StoreError> {
    let last = sql(STORED).bind("consumer", consumer).bind("skipped", skipped(rows)).bind("all", all);
    Ok(!store.reader().await?.rows(last).await?.is_empty())
}

#[async_trait]
impl<S: OwnInbox> Inbox for S {
    async fn register(&self, spec: &ConsumerSpec) -> Result<ConsumerId, StoreError> {
        let mut transaction = self.begin_sql().await?;
        let consumer = register(transaction.session(), spec).await?;
        transaction.commit().await?;
        self.make_room().await?;
        Ok(consumer)
    }

    async fn check_registration(&self, spec: &ConsumerSpec) -> Result<Duration, StoreError> {
        let mut session = self.reader().await?;
        if let Some(row) = session.first(find(spec).bind("locks", false)).await? {
            spec.check(&row.get::<String>(1)?)?;
        }
        let skew = session.first(sql(SKEW)).await?;
        let skew = skew.ok_or_else(|| StoreError::Corrupt("the limit `id_skew_seconds` has no row".to_owned()))?;
        Ok(Duration::from_secs(skew.get::<i64>(0)?.unsigned_abs()))
    }

    async fn sign_of_life(&self) -> Result<(), StoreError> {
        self.ping().await
    }

    async fn seen(&self, consumer: ConsumerId, id_rule: &str) -> Result<bool, StoreError> {
        Ok(self.run_alone(sql(SEEN).bind("consumer", consumer).bind("rule", id_rule)).await? == 1)
    }

    async fn begin(&self, consumer: ConsumerId) -> Result<Box<dyn InboxTx>, StoreError> {
        self.begin_batch(consumer).await
    }

    async fn known(&self, consumer: ConsumerId, ids: &[MessageId]) -> Result<HashSet<MessageId>, StoreError> {
        self.known_ids(consumer, ids).await
    }

    async fn is_contested(&self, consumer: ConsumerId, ids: &[MessageId]) -> Result<bool, StoreError> {
        self.are_contested(consumer, ids).await
    }

    async fn bounds(&self, consumer: ConsumerId) -> Result<Bounds, StoreError> {
        self.bounds_now(consumer).await
    }

    async fn forget_attempts(&self, consumer: ConsumerId, rows_max: usize) -> Result<u64, StoreError> {
        let (mut after, mut forgotten) = (Uuid::nil(), 0);
        while forgotten < rows_max as u64 {
            let page = sql(ATTEMPTED).bind("consumer", consumer).bind("after", after).bind("most", rows_max);
            let page: Vec<Uuid> = self.reader().await?.column(page).await?;
            let Some(last) = page.last().copied() else { break };
            let ids: Vec<MessageId> = page.into_iter().map(MessageId::from).collect();
            let handled: Vec<MessageId> = self.known_ids(consumer, &ids).await?.into_iter().collect();
            if !handled.is_empty() {
                forgotten += self.run_alone(of_many(FORGET, consumer, &handled)).await?;
            }
            after = last;
        }
        Ok(forgotten)
    }

    async fn has_dead(&self, consumer: ConsumerId, rows: usize) -> Result<bool, StoreError> {
        has_stored(self, consumer, rows, false).await
    }

    async fn has_stored(&self, consumer: ConsumerId, rows: usize) -> Result<bool, StoreError> {
        has_stored(self, consumer, rows, true).await
    }

    async fn purge(
        &self,
        consumer: ConsumerId,
        below: DbTime,
        after: Option<MessageId>,
        rows_max: usize,
    ) -> Result<Purged, StoreError> {
        purge::step(self, consumer, below, after, rows_max).await
    }

    async fn begin_attempt(&self, consumer: ConsumerId, id: MessageId) -> Result<u32, StoreError> {
        count(self, consumer, id, true, None).await
    }

    async fn begin_first_attempts(&self, consumer: ConsumerId, ids: &[MessageId]) -> Result<(), StoreError> {
        if !ids.is_empty() {
            self.run_alone(of_many(COUNT_FIRST, consumer, ids)).await?;
        }
        Ok(())
    }

    async fn take_back_attempts(&self, consumer: ConsumerId, ids: &[MessageId]) -> Result<(), StoreError> {
        if ids.is_empty() {
            return Ok(());
        }
        let mut transaction = self.begin_sql().await?;
        for text in [TAKE_BACK, FORGET_EMPTY] {
            transaction.session().run(of_many(text, consumer, ids)).await?;
        }
        transaction.commit().await
    }

    async fn failed_attempt(
        &self,
        consumer: ConsumerId,
        id: MessageId,
        error: &str,
        counted: bool,
    ) -> Result<u32, StoreError> {
        count(self, consumer, id, counted, Some(error)).await
    }

    async fn attempts(&self, consumer: ConsumerId, ids: &[MessageId]) -> Result<Vec<(MessageId, u32)>, StoreError> {
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let rows = self.reader().await?.rows(of_many(COUNTED_OF, consumer, ids)).await?;
        rows.iter().map(|row| Ok((MessageId::from(row.get::<Uuid>(0)?), row.get(1)?))).collect()
    }

    async fn open_assignment(&self, consumer: ConsumerId, holding: &Holding) -> Result<Opened, StoreError> {
        let mut transaction = self.begin_sql().await?;
        let session = transaction.session();
        session.run(of_partition(KNOW, consumer, holding)).await?;
        let stood = session.only(of_partition(STOOD, consumer, holding)).await?;
        let (topic_id, next): (_, Option<i64>) = (stood.get_opt(1)?, stood.get_opt(2)?);
        let position = next.map(|next| Position { topic_id, next });
        let opened = Opened { was_open: stood.get(0)?, position, has_new_ids: stood.get(3)? };
        session.run(of_partition(OPEN, consumer, holding)).await?;
        transaction.commit().await?;
        Ok(opened)
    }

    async fn keep_positions(
        &self,
        consumer: ConsumerId,
        positions: &[(Holding, Position)],
    ) -> Result<Vec<Holding>, StoreError> {
        let mut not_kept = Vec::new();
        if positions.is_empty() {
            return Ok(not_kept);
        }
        let mut transaction = self.begin_sql().await?;
        for (holding, position) in positions {
            let keep = at(of_partition(KEEP, consumer, holding), Some(position));
            if transaction.session().run(keep).await? == 0 {
                not_kept.push(holding.clone());
            }
        }
        transaction.commit().await?;
        Ok(not_kept)
    }

    async fn take_back_assignment(
        &self,
        consumer: ConsumerId,
        holding: &Holding,
        position: &Position,
        also_from_an_owner: bool,
    ) -> Result<bool, StoreError> {
        let take_back = at(of_partition(TAKE_BACK_ROW, consumer, holding), Some(position));
        Ok(self.run_alone(take_back.bind("unowned", !also_from_an_owner)).await? == 1)
    }

    async fn close_assignment(
        &self,
        consumer: ConsumerId,
        holding: &Holding,
        position: Option<&Position>,
    ) -> Result<bool, StoreError> {
        Ok(self.run_alone(at(of_partition(CLOSE, consumer, holding), position)).await? == 1)
    }
}

/// The error where a consumer that has its number has no row.
pub(in crate::store) fn no_consumer(consumer: ConsumerId) -> StoreError {
    StoreError::Corrupt(format!("there is no consumer {}", consumer.0))
}

fn find(spec: &ConsumerSpec) -> Statement {
    sql(FIND).bind("name", &spec.name)
}

async fn register(session: &mut dyn Session, spec: &ConsumerSpec) -> Result<ConsumerId, StoreError> {
    let mut found = session.first(find(spec).bind("locks", true)).await?;
    if found.is_none() {
        // Of two processes the second waits here for the first, and then finds its row.
        session.run(sql(REGISTER).bind("name", &spec.name).bind("rule", &spec.id_rule)).await?;
        found = session.first(find(spec).bind("locks", true)).await?;
    }
    let vanished = || StoreError::Corrupt(format!("consumer `{}` vanished", spec.name));
    let row = found.ok_or_else(vanished)?;
    let (consumer, rule) = (ConsumerId(row.get(0)?), row.get::<String>(1)?);
    spec.check(&rule)?;
    session.run(sql(START).bind("consumer", consumer).bind("rule", &spec.id_rule)).await?;
    Ok(consumer)
}

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
async fn count(
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

/// Deletes the attempt rows of messages that are handled or stored.
pub(in crate::store) async fn clear_attempts(
    session: &mut dyn Session,
    consumer: ConsumerId,
    ids: &[MessageId],
) -> Result<(), StoreError> {
    if !ids.is_empty() {
        session.run(of_many(FORGET, consumer, ids)).await?;
    }
    Ok(())
}

fn of_partition(text: &'static str, consumer: ConsumerId, holding: &Holding) -> Statement {
    sql(text)
        .bind("consumer", consumer)
        .bind("topic", foreign(&holding.topic))
        .bind("partition", holding.partition)
        .bind("owner", holding.owner)
}

fn at(statement: Statement, position: Option<&Position>) -> Statement {
    let topic_id = position.and_then(|position| position.topic_id.as_ref());
    statement.bind("topic_id", topic_id).bind("next", position.map(|position| position.next))
}
