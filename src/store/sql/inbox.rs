//! The part of the inbox that does not run for every batch, on every database: consumers and dead
//! messages here; attempts, assignments and the purge in files of their own.
//!
//! Guarantees: a consumer keeps its number, and its id rule changes only when an operator accepts
//! that (R31). Not here: what runs for every batch, which each database implements itself
//! ([`OwnInbox`]).

mod assignment;
mod attempts;
pub(in crate::store) mod purge;

use std::collections::HashSet;
use std::fmt::Debug;

use async_trait::async_trait;

pub(in crate::store) use self::attempts::clear as clear_attempts;
use super::outbox::skipped;
use super::{Session, SqlStore, sql};
use crate::error::StoreError;
use crate::inbox::port::{ConsumerId, ConsumerSpec, Holding, Inbox, InboxTx, Opened, Purged};
use crate::inbox::rules::horizon::Bounds;
use crate::inbox::rules::position::Position;
use crate::message::MessageId;
use crate::time::db_time::DbTime;

/// The part of the inbox that each database implements itself, under the promises of [`Inbox`].
#[async_trait]
pub(in crate::store) trait OwnInbox: SqlStore + Debug {
    /// Whether the purge finds ids that carry a time by the key. Otherwise it finds all ids by
    /// their time of receipt.
    const PURGES_BY_KEY: bool;

    /// Keeps the promises of [`Inbox::begin`].
    async fn begin_batch(&self, consumer: ConsumerId) -> Result<Box<dyn InboxTx>, StoreError>;

    /// Keeps the promises of [`Inbox::known`].
    async fn known_ids(&self, consumer: ConsumerId, ids: &[MessageId]) -> Result<HashSet<MessageId>, StoreError>;

    /// Keeps the promises of [`Inbox::is_contested`].
    async fn are_contested(&self, consumer: ConsumerId, ids: &[MessageId]) -> Result<bool, StoreError>;

    /// Keeps the promises of [`Inbox::bounds`].
    async fn bounds_now(&self, consumer: ConsumerId) -> Result<Bounds, StoreError>;

    /// Makes the partitions that inbox rows will need, where the database has partitions.
    async fn make_room(&self) -> Result<(), StoreError> {
        Ok(())
    }
}

const FIND: &str = "select consumer_id, id_rule from oncebox.consumer where name = :name {lock}";

const REGISTER: &str = "insert into oncebox.consumer (name, id_rule, registered_at, seen_at) \
    values (:name, :rule, {clock}, {clock}) {pg lite: on conflict (name) do nothing}{my: on duplicate key update name = name}";

const ACCEPT: &str = "update oncebox.consumer set id_rule = :rule where consumer_id = :consumer";

const SEEN: &str = "update oncebox.consumer set seen_at = {clock} where consumer_id = :consumer and id_rule = :rule";

/// A dead message after `:skipped` others, if there are so many; with `all`, a waiting or dead one.
/// It reads entries of indexes, and no more of them than that. On PostgreSQL the order, with a
/// range of one consumer, makes any other plan a sort of all of them.
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
        attempts::forget(self, consumer, rows_max).await
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
        attempts::count(self, consumer, id, true, None).await
    }

    async fn begin_first_attempts(&self, consumer: ConsumerId, ids: &[MessageId]) -> Result<(), StoreError> {
        attempts::count_first(self, consumer, ids).await
    }

    async fn take_back_attempts(&self, consumer: ConsumerId, ids: &[MessageId]) -> Result<(), StoreError> {
        attempts::take_back(self, consumer, ids).await
    }

    async fn failed_attempt(
        &self,
        consumer: ConsumerId,
        id: MessageId,
        error: &str,
        counted: bool,
    ) -> Result<u32, StoreError> {
        attempts::count(self, consumer, id, counted, Some(error)).await
    }

    async fn attempts(&self, consumer: ConsumerId, ids: &[MessageId]) -> Result<Vec<(MessageId, u32)>, StoreError> {
        attempts::counted(self, consumer, ids).await
    }

    async fn open_assignment(&self, consumer: ConsumerId, holding: &Holding) -> Result<Opened, StoreError> {
        assignment::open(self, consumer, holding).await
    }

    async fn keep_positions(&self, consumer: ConsumerId, positions: &[(Holding, Position)]) -> Result<(), StoreError> {
        assignment::keep_positions(self, consumer, positions).await
    }

    async fn close_assignment(
        &self,
        consumer: ConsumerId,
        holding: &Holding,
        position: Option<&Position>,
    ) -> Result<(), StoreError> {
        assignment::close(self, consumer, holding, position).await
    }
}

/// The error where a consumer that has its number has no row.
pub(in crate::store) fn no_consumer(consumer: ConsumerId) -> StoreError {
    StoreError::Corrupt(format!("there is no consumer {}", consumer.0))
}

async fn register(session: &mut dyn Session, spec: &ConsumerSpec) -> Result<ConsumerId, StoreError> {
    let find = || sql(FIND).bind("name", &spec.name);
    let mut found = session.first(find()).await?;
    if found.is_none() {
        // Of two processes the second waits here for the first, and then finds its row.
        session.run(sql(REGISTER).bind("name", &spec.name).bind("rule", &spec.id_rule)).await?;
        found = session.first(find()).await?;
    }
    let vanished = || StoreError::Corrupt(format!("consumer `{}` vanished", spec.name));
    let row = found.ok_or_else(vanished)?;
    let (consumer, rule) = (ConsumerId(row.get(0)?), row.get::<String>(1)?);
    if spec.changes(&rule)? {
        session.run(sql(ACCEPT).bind("consumer", consumer).bind("rule", &spec.id_rule)).await?;
    }
    Ok(consumer)
}
