//! What an operator sees of a SQLite store, and does.
//!
//! Guarantees: an act and its audit rows are one transaction; a dead outbox row is only asked for,
//! its shard's owner acts (R17); a redriven consumer message has an inbox row of its own content,
//! so that a second copy is a duplicate (R31).

mod act;
pub(super) mod dead;
mod mend;

use std::time::Duration;

use sqlx::{AssertSqlSafe, query, query_as, query_scalar};
use uuid::Uuid;

use super::connect::SqliteStore;
use super::message::{time_from_millis, uuid_from_text};
use super::now_ms;
use crate::error::StoreError;
use crate::store::operator::{COUNTED_MAX, waiting_and_held};
use crate::store::{
    ActContext, AuditEntry, Base, ConsumerStatus, DeadFilter, DeadMessage, Forgotten, LockWait, Mailbox, Operator,
    OperatorAct, OperatorOutcome, ShardStatus, Status,
};

/// shard_id, bucket_from, bucket_to, scanned_to, epoch, owner, what is left of the lease, age of
/// the cursor.
type ShardRow = (i32, u8, u8, i64, i64, Option<String>, i64, i64);

/// name, rows that stand, held, due and dead ones, inbox rows, age of the oldest, time since it was
/// seen.
type ConsumerRow = (String, i64, i64, i64, i64, i64, i64, i64);
/// at, actor, act, reason, place, number, message_id, detail.
type AuditRow = (i64, String, String, String, String, String, String, String);

const FORGET_PAGE: &str = "\
delete from oncebox_inbox where consumer_id = ?1 \
  and message_id in (select message_id from oncebox_inbox where consumer_id = ?1 limit 10000)";

impl Operator for SqliteStore {
    async fn status(&self) -> Result<Status, StoreError> {
        let (pending, oldest) = self.pending().await?;
        let (held, dead, oldest_held) = query_as::<_, (i64, i64, i64)>(concat!(
            "select (select count(*) from (select 1 from oncebox_outbox_dead where state <> 'dead' limit ?1)), \
                    (select count(*) from (select 1 from oncebox_outbox_dead where state = 'dead' limit ?1)), \
             coalesce((select ",
            now_ms!(),
            " - created_at from oncebox_outbox_dead where state <> 'dead' order by position limit 1), 0)",
        ))
        .bind(COUNTED_MAX)
        .fetch_one(self.pool())
        .await?;
        Ok(Status {
            shards: self.shard_status().await?,
            pending,
            oldest_pending_age_seconds: seconds(oldest),
            held: held.unsigned_abs(),
            oldest_held_age_seconds: seconds(oldest_held),
            dead: dead.unsigned_abs(),
            consumers: self.consumer_status().await?,
            emails_pending: self.emails_pending().await?,
        })
    }

    async fn lock_waits(&self, _: Duration) -> Result<Vec<LockWait>, StoreError> {
        // A file does not tell who has it locked; whoever waits for it gives up after the busy
        // timeout.
        Ok(Vec::new())
    }

    async fn mend(&self, context: &ActContext) -> Result<Vec<String>, StoreError> {
        let mut write = self.write().await?;
        let mended = mend::sequence(write.connection(), context).await?;
        if context.dry_run {
            write.rollback().await?;
        } else {
            write.commit().await?;
        }
        Ok(mended)
    }

    async fn audit(&self, id: Option<Uuid>, limit: usize) -> Result<Vec<AuditEntry>, StoreError> {
        let rows = query_as::<_, AuditRow>(
            "select at, actor, act, reason, place, number, message_id, detail from oncebox_audit
              where ?1 is null or message_id = ?1 order by audit_id desc limit ?2",
        );
        let rows = rows.bind(id.map(|id| id.to_string())).bind(i64::try_from(limit).unwrap_or(i64::MAX));
        let entry = |(at, actor, act, reason, place, number, id, detail): AuditRow| {
            let (at, message_id) = (time_from_millis(at)?, uuid_from_text(&id)?);
            Ok(AuditEntry { at, actor, act, reason, place, number, message_id, detail })
        };
        rows.fetch_all(self.pool()).await?.into_iter().map(entry).collect()
    }

    async fn forget_consumer(&self, name: &str, context: &ActContext) -> Result<Forgotten, StoreError> {
        let mut write = self.write().await?;
        let found = query_as::<_, (i32, i64, i64, i64)>(concat!(
            "select c.consumer_id, ",
            now_ms!(),
            " - c.seen_at, (select count(*) from oncebox_waiting as w where w.consumer_id = c.consumer_id),
                    (select count(*) from oncebox_inbox as i where i.consumer_id = c.consumer_id)
               from oncebox_consumer as c where c.name = ?"
        ));
        let Some((consumer, seen, messages, inbox_rows)) = found.bind(name).fetch_optional(write.connection()).await?
        else {
            write.rollback().await?;
            return Err(Forgotten::unknown(name));
        };
        let forgotten = Forgotten { messages: messages.unsigned_abs(), inbox_rows: inbox_rows.unsigned_abs() };
        let checked = Forgotten::check(name, seconds(seen));
        if context.dry_run || checked.is_err() {
            write.rollback().await?;
            return checked.map(|()| forgotten);
        }
        for table in ["oncebox_waiting", "oncebox_attempt", "oncebox_assignment"] {
            let delete = format!("delete from {table} where consumer_id = ?");
            query(AssertSqlSafe(delete)).bind(consumer).execute(write.connection()).await?;
        }
        let rename = query("update oncebox_consumer set name = ? where consumer_id = ?");
        rename.bind(Forgotten::name(consumer)).bind(consumer).execute(write.connection()).await?;
        let audit = query(concat!(
            "insert into oncebox_audit (at, actor, reason, act, place, number, message_id, detail) values (",
            now_ms!(),
            ", ?, ?, 'forget', ?, '', ?, ?)"
        ));
        let detail = format!("{messages} messages, {inbox_rows} inbox rows");
        let audit =
            audit.bind(&context.actor).bind(&context.reason).bind(name).bind(Uuid::nil().to_string()).bind(detail);
        audit.execute(write.connection()).await?;
        write.commit().await?;
        // Its inbox goes in pages: nobody else could write meanwhile. Whoever is stopped here finds
        // the name that it has now in the list, and forgets that.
        loop {
            let mut write = self.write().await?;
            let page = query(FORGET_PAGE).bind(consumer).execute(write.connection()).await?.rows_affected();
            if page == 0 {
                let last = query("delete from oncebox_consumer where consumer_id = ?").bind(consumer);
                last.execute(write.connection()).await?;
            }
            write.commit().await?;
            if page == 0 {
                return Ok(forgotten);
            }
        }
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
        let outcome = act::act(write.connection(), filter, act, context).await?;
        if context.dry_run {
            write.rollback().await?;
        } else {
            write.commit().await?;
        }
        Ok(outcome)
    }
}

impl SqliteStore {
    /// How many messages are not proven, and how old the oldest is, in milliseconds.
    async fn pending(&self) -> Result<(u64, i64), StoreError> {
        let count = query_scalar::<_, i64>("select count(*) from (select 1 from oncebox_outbox limit ?)");
        let count = count.bind(COUNTED_MAX + 1).fetch_one(self.pool()).await?;
        let span = concat!(
            "select coalesce(max(position) - min(position) + 1, 0), ",
            "coalesce((select ",
            now_ms!(),
            " - created_at from oncebox_outbox order by position limit 1), 0) from oncebox_outbox"
        );
        let (span, oldest): (i64, i64) = query_as(span).fetch_one(self.pool()).await?;
        let pending = if count > COUNTED_MAX { span } else { count };
        Ok((pending.unsigned_abs(), oldest))
    }

    async fn shard_status(&self) -> Result<Vec<ShardStatus>, StoreError> {
        // A lease with more left than its length was written before the clock went back (R22).
        let shards = query_as::<_, ShardRow>(concat!(
            "select shard_id, bucket_from, bucket_to, scanned_to, epoch, owner, ",
            "case when lease_until - ",
            now_ms!(),
            " between 0 and lease_length then lease_until - ",
            now_ms!(),
            " else 0 end as left, ",
            now_ms!(),
            " - updated_at as cursor_age from oncebox_shard order by shard_id"
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
        // What stands behind a dead one is counted from the dead ones: they are few, the others may
        // be many.
        let consumers = query_as::<_, ConsumerRow>(concat!(
            "select c.name,
                    (select count(*) from (select 1 from oncebox_waiting as w
                      where w.consumer_id = c.consumer_id and w.state = 'waiting' limit ?1)),
                    (select count(*) from (select 1 from (
                        select distinct lane_id from (select lane_id from oncebox_waiting as d
                          where d.consumer_id = c.consumer_id and d.state = 'dead' and d.blocks = 1 limit ?1)) as walls
                      join oncebox_waiting as w on w.consumer_id = c.consumer_id and w.lane_id = walls.lane_id and w.blocks = 1
                       and w.state = 'waiting' limit ?1)),
                    (select count(*) from (select 1 from oncebox_waiting as w
                      where w.consumer_id = c.consumer_id and w.due_at is not null limit ?1)),
                    (select count(*) from (select 1 from oncebox_waiting as w
                      where w.consumer_id = c.consumer_id and w.state = 'dead' limit ?1)),
                    (select count(*) from (select 1 from oncebox_inbox as i where i.consumer_id = c.consumer_id limit ?1)),
                    coalesce((select ",
            now_ms!(),
            " - w.stored_at from oncebox_waiting as w
                      where w.consumer_id = c.consumer_id and w.state = 'waiting' order by w.sequence limit 1), 0),
                    ",
            now_ms!(),
            " - c.seen_at
               from oncebox_consumer as c order by c.name",
        ))
        .bind(COUNTED_MAX);
        let status = |row: ConsumerRow| {
            let (name, stand, held, due, dead, inbox, oldest, seen) = row;
            let (waiting, held) = waiting_and_held(stand, held, due);
            ConsumerStatus {
                name,
                waiting,
                held,
                dead: dead.unsigned_abs(),
                inbox_rows: inbox.unsigned_abs(),
                oldest_waiting_age_seconds: seconds(oldest),
                seen_seconds_ago: seconds(seen),
            }
        };
        Ok(consumers.fetch_all(self.pool()).await?.into_iter().map(status).collect())
    }
}

/// Turns milliseconds into seconds; a negative span becomes 0.
#[expect(clippy::cast_precision_loss, reason = "a time span of the database has few digits")]
fn seconds(millis: i64) -> f64 {
    millis.max(0) as f64 / 1_000.0
}
