//! What an operator sees of a SQLite store, and does.
//!
//! Guarantees: an act and its audit rows are one transaction; a dead outbox row is only asked for, its shard's owner acts (R17);
//! a redriven consumer message has an inbox row of its own content, so that a second copy is a duplicate (R31).

mod act;
mod dead;

use sqlx::{query_as, query_scalar};

use super::connect::SqliteStore;
use super::now_ms;
use crate::error::StoreError;
use crate::store::{
    ActContext, Base, ConsumerStatus, DeadFilter, DeadMessage, Mailbox, Operator, OperatorAct, OperatorOutcome,
    ShardStatus, Status,
};

/// Above this many the number of pending messages is an estimate.
const COUNT_MAX: i64 = 100_000;
/// Inbox rows are counted up to this many.
const INBOX_COUNT_MAX: i64 = 1_000_000;

/// shard_id, bucket_low, bucket_high, scanned_to, epoch, owner, what is left of the lease, age of the cursor.
type ShardRow = (i32, u8, u8, i64, i64, Option<String>, i64, i64);

impl Operator for SqliteStore {
    async fn status(&self) -> Result<Status, StoreError> {
        let (pending, oldest) = self.pending().await?;
        let (held, dead) = query_as::<_, (i64, i64)>(
            "select coalesce(sum(state <> 'dead'), 0), coalesce(sum(state = 'dead'), 0) from oncebox_outbox_dead",
        )
        .fetch_one(self.pool())
        .await?;
        Ok(Status {
            shards: self.shard_status().await?,
            pending,
            oldest_pending_age_seconds: seconds(oldest),
            held: held.unsigned_abs(),
            dead: dead.unsigned_abs(),
            consumers: self.consumer_status().await?,
            emails_pending: self.emails_pending().await?,
        })
    }

    async fn dead(&self, filter: &DeadFilter) -> Result<Vec<DeadMessage>, StoreError> {
        let mut connection = self.pool().acquire().await?;
        dead::list(&mut connection, filter).await
    }

    async fn act(
        &self,
        filter: &DeadFilter,
        act: &OperatorAct,
        context: &ActContext,
    ) -> Result<OperatorOutcome, StoreError> {
        let mut write = self.write().await?;
        let numbers = act::act(write.connection(), filter, act, context).await?;
        if context.dry_run {
            write.rollback().await?;
        } else {
            write.commit().await?;
        }
        Ok(OperatorOutcome { numbers, dry_run: context.dry_run })
    }
}

impl SqliteStore {
    /// How many messages are not proven, and how old the oldest is, in milliseconds.
    async fn pending(&self) -> Result<(u64, i64), StoreError> {
        let count = query_scalar::<_, i64>("select count(*) from (select 1 from oncebox_outbox limit ?)");
        let count = count.bind(COUNT_MAX + 1).fetch_one(self.pool()).await?;
        let span = concat!(
            "select coalesce(max(position) - min(position) + 1, 0), ",
            "coalesce((select ",
            now_ms!(),
            " - created_at from oncebox_outbox order by position limit 1), 0) from oncebox_outbox"
        );
        let (span, oldest): (i64, i64) = query_as(span).fetch_one(self.pool()).await?;
        let pending = if count > COUNT_MAX { span } else { count };
        Ok((pending.unsigned_abs(), oldest))
    }

    async fn shard_status(&self) -> Result<Vec<ShardStatus>, StoreError> {
        // A lease with more left than its length was written before the clock went back (R22).
        let shards = query_as::<_, ShardRow>(concat!(
            "select shard_id, bucket_low, bucket_high, scanned_to, epoch, owner, ",
            "case when lease_until - ",
            now_ms!(),
            " between 0 and lease_length then lease_until - ",
            now_ms!(),
            " else 0 end as left, ",
            now_ms!(),
            " - cursor_at as cursor_age from oncebox_shard order by shard_id"
        ));
        let shards = shards.fetch_all(self.pool()).await?;
        let status = |(shard, low, high, scanned_to, epoch, owner, left, cursor_age): ShardRow| ShardStatus {
            shard,
            buckets: (low, high),
            scanned_to,
            gaps: 0,
            epoch,
            owner: owner.filter(|_| left > 0),
            lease_seconds_left: seconds(left),
            cursor_age_seconds: seconds(cursor_age),
        };
        Ok(shards.into_iter().map(status).collect())
    }

    async fn consumer_status(&self) -> Result<Vec<ConsumerStatus>, StoreError> {
        // What stands behind a dead one is counted from the dead ones: they are few, the others may be many.
        let consumers = query_as::<_, (String, i64, i64, i64, i64)>(
            "with walls(consumer_id, lane, sequence) as (
                select consumer_id, lane, min(sequence) from oncebox_waiting
                 where state = 'dead' and blocks = 1 group by consumer_id, lane)
             select c.name,
                    (select count(*) from oncebox_waiting as w where w.consumer_id = c.consumer_id)
                  - (select count(*) from oncebox_waiting as w where w.consumer_id = c.consumer_id and w.state = 'dead'),
                    (select count(*) from walls join oncebox_waiting as w using (consumer_id, lane)
                      where consumer_id = c.consumer_id and w.blocks = 1 and w.sequence > walls.sequence
                        and w.state = 'waiting'),
                    (select count(*) from oncebox_waiting as w where w.consumer_id = c.consumer_id and w.state = 'dead'),
                    (select count(*) from (select 1 from oncebox_inbox as i where i.consumer_id = c.consumer_id limit ?))
               from oncebox_consumer as c order by c.name",
        )
        .bind(INBOX_COUNT_MAX);
        let status = |(name, waiting, held, dead, inbox): (String, i64, i64, i64, i64)| ConsumerStatus {
            name,
            waiting: (waiting - held).unsigned_abs(),
            held: held.unsigned_abs(),
            dead: dead.unsigned_abs(),
            inbox_rows: inbox.unsigned_abs(),
        };
        Ok(consumers.fetch_all(self.pool()).await?.into_iter().map(status).collect())
    }
}

/// Milliseconds as seconds.
#[expect(clippy::cast_precision_loss, reason = "a time span of the database has few digits")]
fn seconds(millis: i64) -> f64 {
    millis.max(0) as f64 / 1_000.0
}
