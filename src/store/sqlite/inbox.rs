//! The inbox of SQLite: consumers, tries, assignments, and the transaction around a handler.
//!
//! Guarantees: the ids of a batch go in with one statement, sorted, and the unique key answers
//! which are new (R24). A handler cannot commit by itself: SQLite refuses every commit but ours on
//! its connection, and a savepoint of a random name that must still be there proves before COMMIT
//! that the transaction is the one that was begun (R23).

mod park;
pub(super) mod purge;

use std::any::Any;
use std::collections::HashSet;
use std::time::Duration;

use async_trait::async_trait;
use sqlx::sqlite::SqliteConnection;
use sqlx::{AssertSqlSafe, query, query_as, query_scalar, raw_sql};

use super::connect::SqliteStore;
use super::message::sixteen;
use super::write::Write;
use super::{now_ms, parts};
use crate::error::StoreError;
use crate::message::MessageId;
use crate::policy::db_time::DbTime;
use crate::policy::horizon::Bounds;
use crate::policy::position::Position;
use crate::store::operator::kept_error;
use crate::store::{
    Admission, Base, ClaimedMessage, ConsumerId, ConsumerSpec, Holding, Inbox, InboxEntry, InboxTx, Known, Opened,
    Parked, Proof, Purged, Standing, Undone,
};

/// Adds an error to a history of at most 20: `$errors` the JSON array, `$attempt` the number of the
/// try, `$error` its text.
macro_rules! add_error {
    ($errors:literal, $attempt:literal, $error:literal) => {
        concat!(
            "json_insert(case when json_array_length(",
            $errors,
            ") >= 50 then json_remove(",
            $errors,
            ", '$[0]') else ",
            $errors,
            " end, '$[#]', json_object('at', strftime('%Y-%m-%dT%H:%M:%fZ', 'now'), 'attempt', ",
            $attempt,
            ", 'error', ",
            $error,
            "))"
        )
    };
}
pub(super) use add_error;

/// How long a rollback is waited for.
const UNDO_MAX: Duration = Duration::from_secs(5);

/// Which of these ids stand in the inbox.
pub(super) const KNOWN: &str = concat!(
    "with recursive ",
    parts!("?2", 16),
    " select message_id from n join oncebox_inbox on consumer_id = ?1 and message_id = substr(?2, 1 + i * 16, 16)"
);

/// Inserts ids and hashes, and gives the ids that were new.
pub(super) const ADMIT: &str = concat!(
    "with recursive ",
    parts!("?2", 32),
    " insert into oncebox_inbox (consumer_id, message_id, content_hash, received_at) \
             select ?1, substr(?2, 1 + i * 32, 16), substr(?2, 17 + i * 32, 16), ",
    now_ms!(),
    " from n where length(?2) > 0 on conflict do nothing returning message_id, received_at"
);

/// Purge bound, now, skew.
const BOUNDS: &str = concat!(
    "select purged_below, ",
    now_ms!(),
    ", (select value from oncebox_limits where name = 'id_skew_seconds') from oncebox_consumer where consumer_id = ?"
);

/// Which of these lanes have a message that blocks.
pub(super) const BLOCKED: &str = concat!(
    "with recursive ",
    parts!("?2", 16),
    " select substr(?2, 1 + i * 16, 16) from n where exists (select 1 from oncebox_waiting \
             where consumer_id = ?1 and lane_id = substr(?2, 1 + i * 16, 16) and blocks = 1)"
);

/// Ids behind each other, as `parts` takes them apart.
fn bytes_of(ids: &[MessageId]) -> Vec<u8> {
    ids.iter().flat_map(|id| id.bytes()).collect()
}

fn message_id(bytes: &[u8]) -> Result<MessageId, StoreError> {
    Ok(MessageId::from_uuid(uuid::Uuid::from_bytes(sixteen(bytes)?)))
}

#[async_trait]
impl Inbox for SqliteStore {
    async fn register(&self, spec: &ConsumerSpec) -> Result<ConsumerId, StoreError> {
        let mut write = self.write().await?;
        let insert = query(concat!(
            "insert into oncebox_consumer (name, id_rule, registered_at, seen_at) values (?, ?, ",
            now_ms!(),
            ", ",
            now_ms!(),
            ") on conflict (name) do nothing"
        ));
        insert.bind(&spec.name).bind(&spec.id_rule).execute(write.connection()).await?;
        let stored = query_as("select consumer_id, id_rule from oncebox_consumer where name = ?").bind(&spec.name);
        let (id, id_rule): (i32, String) = stored.fetch_one(write.connection()).await?;
        if spec.changes(&id_rule)? {
            let accept = query("update oncebox_consumer set id_rule = ? where consumer_id = ?");
            accept.bind(&spec.id_rule).bind(id).execute(write.connection()).await?;
        }
        write.commit().await?;
        Ok(ConsumerId(id))
    }

    async fn seen(&self, consumer: ConsumerId, id_rule: &str) -> Result<bool, StoreError> {
        let seen =
            concat!("update oncebox_consumer set seen_at = ", now_ms!(), " where consumer_id = ? and id_rule = ?");
        Ok(query(seen).bind(consumer.0).bind(id_rule).execute(self.pool()).await?.rows_affected() == 1)
    }

    async fn begin(&self, consumer: ConsumerId) -> Result<Box<dyn InboxTx>, StoreError> {
        let mut write = self.write().await?;
        write.guard().await?;
        let savepoint = format!("oncebox_{}", uuid::Uuid::now_v7().simple());
        raw_sql(AssertSqlSafe(format!("savepoint {savepoint}"))).execute(write.connection()).await?;
        Ok(Box::new(SqliteInboxTx { write, consumer, savepoint, admitted: None, received: None }))
    }

    async fn known(&self, consumer: ConsumerId, ids: &[MessageId]) -> Result<HashSet<MessageId>, StoreError> {
        let known = query_scalar::<_, Vec<u8>>(KNOWN);
        let known = known.bind(consumer.0).bind(bytes_of(ids)).fetch_all(self.pool()).await?;
        known.iter().map(|id| message_id(id)).collect()
    }

    /// There is one writer at a time: nobody waits for a row.
    async fn is_contested(&self, _: ConsumerId, _: &[MessageId]) -> Result<bool, StoreError> {
        Ok(false)
    }

    async fn bounds(&self, consumer: ConsumerId) -> Result<Bounds, StoreError> {
        bounds(&mut *self.pool().acquire().await?, consumer).await
    }

    async fn forget_attempts(&self, consumer: ConsumerId, rows_max: usize) -> Result<u64, StoreError> {
        let forget = query(
            "delete from oncebox_attempt where consumer_id = ?1 and message_id in (
               select a.message_id from oncebox_attempt as a join oncebox_inbox as i using (consumer_id, message_id)
                where a.consumer_id = ?1 limit ?2)",
        );
        let mut write = self.write().await?;
        let forget = forget.bind(consumer.0).bind(i64::try_from(rows_max).unwrap_or(i64::MAX));
        let forgotten = forget.execute(write.connection()).await?.rows_affected();
        write.commit().await?;
        Ok(forgotten)
    }

    async fn has_dead(&self, consumer: ConsumerId, rows: usize) -> Result<bool, StoreError> {
        let last = "select 1 from oncebox_waiting where state = 'dead' and consumer_id = ? limit 1 offset ?";
        let skipped = i64::try_from(rows.saturating_sub(1)).unwrap_or(i64::MAX);
        let found = query_scalar::<_, i64>(last).bind(consumer.0).bind(skipped).fetch_optional(self.pool()).await?;
        Ok(found.is_some())
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
        let mut write = self.write().await?;
        let count = query_scalar::<_, u32>(concat!(
            "insert into oncebox_attempt (consumer_id, message_id, attempts, updated_at) values (?1, ?2, 1, ",
            now_ms!(),
            ") on conflict do update set attempts = attempts + 1, updated_at = excluded.updated_at returning attempts"
        ));
        let attempts = count.bind(consumer.0).bind(id.bytes().to_vec()).fetch_one(write.connection()).await?;
        write.commit().await?;
        Ok(attempts)
    }

    async fn begin_first_attempts(&self, consumer: ConsumerId, ids: &[MessageId]) -> Result<(), StoreError> {
        if ids.is_empty() {
            return Ok(());
        }
        let mut write = self.write().await?;
        let count = query(concat!(
            "with recursive ",
            parts!("?2", 16),
            " insert into oncebox_attempt (consumer_id, message_id, attempts, updated_at) select ?1, substr(?2, 1 + i * 16, 16), 1, ",
            now_ms!(),
            " from n where true on conflict do update set attempts = max(attempts, 1)"
        ));
        count.bind(consumer.0).bind(bytes_of(ids)).execute(write.connection()).await?;
        write.commit().await
    }

    async fn take_back_attempt(&self, consumer: ConsumerId, id: MessageId) -> Result<(), StoreError> {
        let mut write = self.write().await?;
        // A row that says nothing any more goes: only the success of a counted try would delete it.
        for statement in [
            "update oncebox_attempt set attempts = attempts - 1 where consumer_id = ? and message_id = ? and attempts > 0",
            "delete from oncebox_attempt where consumer_id = ? and message_id = ? and attempts = 0 and history = '[]'",
        ] {
            query(statement).bind(consumer.0).bind(id.bytes().to_vec()).execute(write.connection()).await?;
        }
        write.commit().await
    }

    async fn failed_attempt(
        &self,
        consumer: ConsumerId,
        id: MessageId,
        error: &str,
        counted: bool,
    ) -> Result<u32, StoreError> {
        let mut write = self.write().await?;
        let count = query(concat!(
            "insert into oncebox_attempt (consumer_id, message_id, attempts, updated_at) values (?1, ?2, ?3, ",
            now_ms!(),
            ") on conflict do update set attempts = attempts + ?3, updated_at = excluded.updated_at"
        ));
        let count = count.bind(consumer.0).bind(id.bytes().to_vec()).bind(i64::from(counted));
        count.execute(write.connection()).await?;
        let note = query_scalar::<_, u32>(concat!(
            "update oncebox_attempt set history = ",
            add_error!("history", "attempts", "?3"),
            " where consumer_id = ?1 and message_id = ?2 returning attempts"
        ));
        let note = note.bind(consumer.0).bind(id.bytes().to_vec()).bind(kept_error(error));
        let attempts = note.fetch_one(write.connection()).await?;
        write.commit().await?;
        Ok(attempts)
    }

    async fn attempts(&self, consumer: ConsumerId, ids: &[MessageId]) -> Result<Vec<(MessageId, u32)>, StoreError> {
        let counted = query_as::<_, (Vec<u8>, u32)>(concat!(
            "with recursive ",
            parts!("?2", 16),
            " select message_id, attempts from n join oncebox_attempt on consumer_id = ?1 \
             and message_id = substr(?2, 1 + i * 16, 16) where attempts > 0"
        ));
        let counted = counted.bind(consumer.0).bind(bytes_of(ids)).fetch_all(self.pool()).await?;
        counted.iter().map(|(id, attempts)| Ok((message_id(id)?, *attempts))).collect()
    }

    async fn open_assignment(&self, consumer: ConsumerId, holding: &Holding) -> Result<Opened, StoreError> {
        let mut write = self.write().await?;
        let stood = query_as::<_, (String, Option<String>, Option<i64>, bool)>(
            "select a.state, a.topic_id, a.next_offset, coalesce(a.id_rule <> c.id_rule, false) \
               from oncebox_assignment a join oncebox_consumer c using (consumer_id) \
              where a.consumer_id = ? and a.topic = ? and a.partition_no = ?",
        );
        let stood = stood.bind(consumer.0).bind(&*holding.topic).bind(holding.partition);
        let stood = stood.fetch_optional(write.connection()).await?;
        query(concat!(
            "insert into oncebox_assignment (consumer_id, topic, partition_no, state, owner, changed_at) \
             values (?, ?, ?, 'open', ?, ",
            now_ms!(),
            ") on conflict do update set state = 'open', owner = excluded.owner, changed_at = excluded.changed_at"
        ))
        .bind(consumer.0)
        .bind(&*holding.topic)
        .bind(holding.partition)
        .bind(holding.owner)
        .execute(write.connection())
        .await?;
        write.commit().await?;
        Ok(match stood {
            None => Opened { was_open: false, position: None, has_new_ids: false },
            Some((state, topic_id, next, has_new_ids)) => {
                let position = next.map(|next| Position { topic_id, next });
                Opened { was_open: state == "open", position, has_new_ids }
            }
        })
    }

    async fn keep_positions(&self, consumer: ConsumerId, positions: &[(Holding, Position)]) -> Result<(), StoreError> {
        let mut write = self.write().await?;
        for (holding, position) in positions {
            query(concat!(
                "update oncebox_assignment set topic_id = ?, next_offset = ?, changed_at = ",
                now_ms!(),
                ", id_rule = (select c.id_rule from oncebox_consumer c \
                              where c.consumer_id = oncebox_assignment.consumer_id) \
                 where consumer_id = ? and topic = ? and partition_no = ? and owner = ?"
            ))
            .bind(&position.topic_id)
            .bind(position.next)
            .bind(consumer.0)
            .bind(&*holding.topic)
            .bind(holding.partition)
            .bind(holding.owner)
            .execute(write.connection())
            .await?;
        }
        write.commit().await
    }

    async fn close_assignment(
        &self,
        consumer: ConsumerId,
        holding: &Holding,
        position: Option<&Position>,
    ) -> Result<(), StoreError> {
        let mut write = self.write().await?;
        query(concat!(
            "update oncebox_assignment set state = 'closed', owner = null, changed_at = ",
            now_ms!(),
            ", topic_id = iif(?1 is null, topic_id, ?2), next_offset = coalesce(?1, next_offset) \
             where consumer_id = ?3 and topic = ?4 and partition_no = ?5 and owner = ?6"
        ))
        .bind(position.map(|position| position.next))
        .bind(position.and_then(|position| position.topic_id.as_deref()))
        .bind(consumer.0)
        .bind(&*holding.topic)
        .bind(holding.partition)
        .bind(holding.owner)
        .execute(write.connection())
        .await?;
        write.commit().await
    }
}

async fn bounds(connection: &mut SqliteConnection, consumer: ConsumerId) -> Result<Bounds, StoreError> {
    let found = query_as::<_, (Option<i64>, i64, i64)>(BOUNDS).bind(consumer.0).fetch_optional(connection).await?;
    let (purged, now, skew) =
        found.ok_or_else(|| StoreError::Corrupt(format!("there is no consumer {}", consumer.0)))?;
    Ok(Bounds {
        purged_below: purged.map(DbTime::from_millis),
        now: DbTime::from_millis(now),
        id_skew: Duration::from_secs(skew.unsigned_abs()),
    })
}

/// The transaction around a handler. It holds the turn and the write lock of the file.
#[derive(Debug)]
pub(super) struct SqliteInboxTx {
    write: Write,
    consumer: ConsumerId,
    /// Set right after BEGIN, so it covers the inbox rows, and what `finish` removes, whichever
    /// comes first.
    savepoint: String,
    /// Which ids were new.
    admitted: Option<HashSet<MessageId>>,
    /// When their rows were received.
    received: Option<DbTime>,
}

#[async_trait]
impl InboxTx for SqliteInboxTx {
    fn any_connection(&mut self) -> &mut (dyn Any + Send) {
        self.write.connection()
    }

    async fn admit(&mut self, entries: &[InboxEntry]) -> Result<Admission, StoreError> {
        if self.admitted.is_some() {
            return Err(StoreError::Corrupt("ids were admitted twice in one transaction".to_owned()));
        }
        let mut sorted: Vec<&InboxEntry> = entries.iter().collect();
        sorted.sort_unstable_by_key(|entry| entry.id);
        let rows: Vec<u8> = sorted.iter().flat_map(|entry| entry.id.bytes().into_iter().chain(entry.hash)).collect();
        let insert = query_as::<_, (Vec<u8>, i64)>(ADMIT);
        let rows = insert.bind(self.consumer.0).bind(rows).fetch_all(self.write.connection()).await?;
        let new = rows.iter().map(|(id, _)| message_id(id)).collect::<Result<HashSet<_>, _>>()?;
        self.received = rows.first().map(|(_, received)| DbTime::from_millis(*received));
        let old: Vec<MessageId> = entries.iter().map(|entry| entry.id).filter(|id| !new.contains(id)).collect();
        let hashes = self.hashes(&old).await?;
        let known = |entry: &InboxEntry| match hashes.iter().find(|(id, _)| *id == entry.id) {
            Some((_, hash)) => Ok(Some(Known { hash: *hash })),
            None if new.contains(&entry.id) => Ok(None),
            None => Err(StoreError::Corrupt(format!("message {} is neither new nor known", entry.id))),
        };
        let known = entries.iter().map(known).collect::<Result<_, _>>()?;
        self.admitted = Some(new);
        Ok(Admission { known })
    }

    async fn standing(&mut self, lanes: &[[u8; 16]]) -> Result<Standing, StoreError> {
        let blocked = query_scalar::<_, Vec<u8>>(BLOCKED);
        let blocked = blocked.bind(self.consumer.0).bind(lanes.concat()).fetch_all(self.write.connection()).await?;
        let mut bounds = bounds(self.write.connection(), self.consumer).await?;
        if let Some(received) = self.received {
            bounds.now = received;
        }
        Ok(Standing { blocked: blocked.iter().map(|lane| sixteen(lane)).collect::<Result<_, _>>()?, bounds })
    }

    async fn park(&mut self, parked: &[Parked]) -> Result<(), StoreError> {
        for parked in parked {
            park::store(self.write.connection(), self.consumer, parked).await?;
        }
        Ok(())
    }

    async fn forget(&mut self, ids: &[MessageId]) -> Result<(), StoreError> {
        let new = self.admitted.iter().flatten().copied().collect::<HashSet<_>>();
        let ids: Vec<MessageId> = ids.iter().copied().filter(|id| new.contains(id)).collect();
        let delete = query(concat!(
            "with recursive ",
            parts!("?2", 16),
            " delete from oncebox_inbox where consumer_id = ?1 and message_id in (select substr(?2, 1 + i * 16, 16) from n)"
        ));
        delete.bind(self.consumer.0).bind(bytes_of(&ids)).execute(self.write.connection()).await?;
        Ok(())
    }

    async fn finish(&mut self, claimed: &[ClaimedMessage]) -> Result<bool, StoreError> {
        let Some(first) = claimed.first() else { return Ok(false) };
        let delete = query(
            "delete from oncebox_waiting where sequence in (select value from json_each(?1)) and claim = ?2 and consumer_id = ?3",
        );
        let sequences: Vec<i64> = claimed.iter().map(|one| one.sequence).collect();
        let delete = delete.bind(serde_json::Value::from(sequences).to_string());
        let delete = delete.bind(first.claim.as_bytes().to_vec()).bind(self.consumer.0);
        let deleted = delete.execute(self.write.connection()).await?.rows_affected();
        if usize::try_from(deleted) != Ok(claimed.len()) {
            return Ok(false);
        }
        let lane = first.message.lane_id().map(|lane| lane.to_vec());
        super::waiting::wake_next(self.write.connection(), self.consumer.0, lane).await?;
        Ok(true)
    }

    async fn clear_attempts(&mut self, ids: &[MessageId]) -> Result<(), StoreError> {
        let delete = query(concat!(
            "with recursive ",
            parts!("?2", 16),
            " delete from oncebox_attempt where consumer_id = ?1 and message_id in (select substr(?2, 1 + i * 16, 16) from n)"
        ));
        delete.bind(self.consumer.0).bind(bytes_of(ids)).execute(self.write.connection()).await?;
        Ok(())
    }

    async fn prove(&mut self) -> Result<Proof, StoreError> {
        let release = raw_sql(AssertSqlSafe(format!("release {}", self.savepoint)));
        let Err(error) = release.execute(self.write.connection()).await else { return Ok(Proof::Same) };
        let error = StoreError::from(error);
        if error.is_transient() {
            return Err(error);
        }
        // A refused commit was rolled back, so nothing of this transaction can be committed.
        Ok(if self.write.was_commit_refused() { Proof::Aborted } else { Proof::Ended })
    }

    /// Nobody but us can commit on this connection, and there is no server that could be away: a
    /// statement that still runs is interrupted, and a connection that will not roll back is not
    /// used again.
    async fn undo(&mut self) -> Result<Undone, StoreError> {
        match tokio::time::timeout(UNDO_MAX, self.write.undo()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!(%error, "a rollback failed; its connection is closed"),
            Err(_) => tracing::warn!("a rollback took longer than {UNDO_MAX:?}; it goes on by itself"),
        }
        Ok(Undone::Whole)
    }

    async fn commit(self: Box<Self>) -> Result<(), StoreError> {
        self.write.commit().await
    }

    async fn rollback(self: Box<Self>) -> Result<(), StoreError> {
        self.write.rollback().await
    }
}

impl SqliteInboxTx {
    /// The hashes that stand in the inbox for ids that are not new.
    async fn hashes(&mut self, ids: &[MessageId]) -> Result<Vec<(MessageId, [u8; 16])>, StoreError> {
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let stored = query_as::<_, (Vec<u8>, Vec<u8>)>(concat!(
            "with recursive ",
            parts!("?2", 16),
            " select message_id, content_hash from n join oncebox_inbox on consumer_id = ?1 \
             and message_id = substr(?2, 1 + i * 16, 16)"
        ));
        let stored = stored.bind(self.consumer.0).bind(bytes_of(ids)).fetch_all(self.write.connection()).await?;
        stored.iter().map(|(id, hash)| Ok((message_id(id)?, sixteen(hash)?))).collect()
    }
}
