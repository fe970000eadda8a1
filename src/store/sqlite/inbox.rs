//! The inbox of SQLite: what runs for every batch, and the transaction around a handler.
//!
//! Guarantees: the ids of a batch are inserted with one sorted statement, and the unique key tells
//! which are new (R24). A handler cannot commit by itself: SQLite refuses every commit but ours on
//! its connection. A savepoint with a unique name proves before COMMIT that the transaction is the
//! one that was begun (R23).

use std::any::Any;
use std::collections::HashSet;
use std::time::Duration;

use async_trait::async_trait;
use sqlx::sqlite::SqliteConnection;
use sqlx::{query, query_as, query_scalar};

use super::SqliteStore;
use super::message::sixteen;
use super::savepoint::Savepoint;
use super::write::Write;
use super::{now_ms, parts};
use crate::error::StoreError;
use crate::inbox::port::waiting::LeasedMessage;
use crate::inbox::port::{ConsumerId, InboxEntry, InboxTx, Parked, Proof, Standing, Undone};
use crate::inbox::rules::horizon::Bounds;
use crate::message::{ContentHash, MessageId};
use crate::store::base::Base;
use crate::store::sql::inbox::{OwnInbox, clear_attempts, no_consumer};
use crate::store::sql::message::park;
use crate::store::sql::waiting::{self, Buried};
use crate::time::db_time::DbTime;

/// The longest wait for a rollback.
const UNDO_MAX: Duration = Duration::from_secs(5);

/// Reads which of these ids are in the inbox, with their hashes.
pub(super) const KNOWN: &str = concat!(
    "with recursive ",
    parts!("?2", 16),
    " select message_id, content_hash from n join oncebox_inbox \
      on consumer_id = ?1 and message_id = substr(?2, 1 + i * 16, 16)"
);

/// Inserts ids and hashes, and returns the ids that were new.
pub(super) const ADMIT: &str = concat!(
    "with recursive ",
    parts!("?2", 32),
    " insert into oncebox_inbox (consumer_id, message_id, content_hash, received_at) \
             select ?1, substr(?2, 1 + i * 32, 16), substr(?2, 17 + i * 32, 16), ",
    now_ms!(),
    " from n where length(?2) > 0 on conflict do nothing returning message_id, received_at"
);

/// Reads the purge bound, the time now, and the allowed skew of ids.
const BOUNDS: &str = concat!(
    "select purged_below, ",
    now_ms!(),
    ", (select value from oncebox_limits where name = 'id_skew_seconds') from oncebox_consumer where consumer_id = ?"
);

/// Reads which of these lanes have a blocking message.
pub(super) const BLOCKED: &str = concat!(
    "with recursive ",
    parts!("?2", 16),
    " select substr(?2, 1 + i * 16, 16) from n where exists (select 1 from oncebox_waiting \
             where consumer_id = ?1 and lane_id = substr(?2, 1 + i * 16, 16) and blocks = 1)"
);

/// Concatenates ids in the form that `parts` splits.
fn bytes_of(ids: &[MessageId]) -> Vec<u8> {
    ids.iter().flat_map(|id| id.bytes()).collect()
}

fn message_id(bytes: &[u8]) -> Result<MessageId, StoreError> {
    Ok(MessageId::from(uuid::Uuid::from_bytes(sixteen(bytes)?)))
}

#[async_trait]
impl OwnInbox for SqliteStore {
    const PURGES_BY_KEY: bool = true;

    async fn begin_batch(&self, consumer: ConsumerId) -> Result<Box<dyn InboxTx>, StoreError> {
        let mut write = self.write().await?;
        write.guard().await?;
        let savepoint = Savepoint::new();
        savepoint.set(&mut write).await?;
        let buried = Buried::default();
        Ok(Box::new(SqliteInboxTx { write, consumer, savepoint, admitted: HashSet::new(), received: None, buried }))
    }

    async fn known_ids(&self, consumer: ConsumerId, ids: &[MessageId]) -> Result<HashSet<MessageId>, StoreError> {
        let known = known(&mut *self.pool().acquire().await?, consumer, ids).await?;
        Ok(known.into_iter().map(|(id, _)| id).collect())
    }

    /// Always false: there is one writer at a time, so no row is locked by another transaction.
    async fn are_contested(&self, _: ConsumerId, _: &[MessageId]) -> Result<bool, StoreError> {
        Ok(false)
    }

    async fn bounds_now(&self, consumer: ConsumerId) -> Result<Bounds, StoreError> {
        bounds(&mut *self.pool().acquire().await?, consumer).await
    }
}

async fn known(
    connection: &mut SqliteConnection,
    consumer: ConsumerId,
    ids: &[MessageId],
) -> Result<Vec<(MessageId, [u8; 16])>, StoreError> {
    if ids.is_empty() {
        return Ok(Vec::new());
    }
    let known = query_as::<_, (Vec<u8>, Vec<u8>)>(KNOWN).bind(consumer.0).bind(bytes_of(ids));
    let known = known.fetch_all(connection).await?;
    known.iter().map(|(id, hash)| Ok((message_id(id)?, sixteen(hash)?))).collect()
}

async fn bounds(connection: &mut SqliteConnection, consumer: ConsumerId) -> Result<Bounds, StoreError> {
    let found = query_as::<_, (Option<i64>, i64, i64)>(BOUNDS).bind(consumer.0).fetch_optional(connection).await?;
    let (purged, now, skew) = found.ok_or_else(|| no_consumer(consumer))?;
    Ok(Bounds {
        purged_below: purged.map(DbTime::from_millis),
        now: DbTime::from_millis(now),
        id_skew: Duration::from_secs(skew.unsigned_abs()),
    })
}

/// The transaction around a handler. It holds the turn (a file lock: one writer of all processes at
/// a time) and the write lock of the file.
#[derive(Debug)]
pub(super) struct SqliteInboxTx {
    write: Write,
    consumer: ConsumerId,
    /// Set right after BEGIN, so that it covers the inbox rows and the rows that `bury` makes dead,
    /// in whichever order they are written.
    savepoint: Savepoint,
    /// The ids that were new.
    admitted: HashSet<MessageId>,
    /// The time at which their rows were received.
    received: Option<DbTime>,
    buried: Buried,
}

#[async_trait]
impl InboxTx for SqliteInboxTx {
    fn any_connection(&mut self) -> &mut (dyn Any + Send) {
        self.write.connection()
    }

    async fn admit_and_look(
        &mut self,
        entries: &[InboxEntry],
        lanes: &[[u8; 16]],
    ) -> Result<(Vec<Option<ContentHash>>, Option<Standing>), StoreError> {
        let mut sorted: Vec<&InboxEntry> = entries.iter().collect();
        sorted.sort_unstable_by_key(|entry| entry.id);
        let rows: Vec<u8> = sorted.iter().flat_map(|entry| entry.id.bytes().into_iter().chain(entry.hash)).collect();
        let insert = query_as::<_, (Vec<u8>, i64)>(ADMIT);
        let rows = insert.bind(self.consumer.0).bind(rows).fetch_all(self.write.connection()).await?;
        let new = rows.iter().map(|(id, _)| message_id(id)).collect::<Result<HashSet<_>, _>>()?;
        self.received = rows.first().map(|(_, received)| DbTime::from_millis(*received));
        let old: Vec<MessageId> = entries.iter().map(|entry| entry.id).filter(|id| !new.contains(id)).collect();
        let hashes = known(self.write.connection(), self.consumer, &old).await?;
        let known = |entry: &InboxEntry| match hashes.iter().find(|(id, _)| *id == entry.id) {
            Some((_, hash)) => Ok(Some(*hash)),
            None if new.contains(&entry.id) => Ok(None),
            None => Err(StoreError::Corrupt(format!("message {} is neither new nor known", entry.id))),
        };
        let known = entries.iter().map(known).collect::<Result<_, _>>()?;
        self.admitted = new;
        let standing = if self.admitted.is_empty() { None } else { Some(self.standing(lanes).await?) };
        Ok((known, standing))
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
        park(self.write.connection(), self.consumer, parked).await
    }

    async fn forget(&mut self, ids: &[MessageId]) -> Result<(), StoreError> {
        let ids: Vec<MessageId> = ids.iter().copied().filter(|id| self.admitted.contains(id)).collect();
        let delete = query(concat!(
            "with recursive ",
            parts!("?2", 16),
            " delete from oncebox_inbox where consumer_id = ?1 and message_id in (select substr(?2, 1 + i * 16, 16) from n)"
        ));
        delete.bind(self.consumer.0).bind(bytes_of(&ids)).execute(self.write.connection()).await?;
        Ok(())
    }

    async fn bury(
        &mut self,
        leased: &[LeasedMessage],
        reason: &str,
        error: &str,
        holds: bool,
    ) -> Result<bool, StoreError> {
        let session = self.write.connection();
        let Some(buried) = waiting::bury(session, self.consumer, leased, reason, error, holds).await? else {
            return Ok(false);
        };
        self.buried = buried;
        Ok(true)
    }

    async fn finish(&mut self) -> Result<bool, StoreError> {
        waiting::finish(self.write.connection(), self.consumer, &self.buried).await
    }

    async fn wake(&mut self, lanes: &[[u8; 16]]) -> Result<(), StoreError> {
        waiting::wake(self.write.connection(), self.consumer, lanes).await
    }

    async fn clear_attempts(&mut self, ids: &[MessageId]) -> Result<(), StoreError> {
        clear_attempts(self.write.connection(), self.consumer, ids).await
    }

    async fn prove(&mut self) -> Result<Proof, StoreError> {
        match self.savepoint.prove(&mut self.write, "release").await? {
            // Rolled back, and not because a commit of the handler was refused: by a ROLLBACK of
            // the handler, or by SQLite. The batch is tried again.
            Proof::Aborted if !self.write.was_commit_refused() => Ok(Proof::Ended),
            proof => Ok(proof),
        }
    }

    /// Always `Whole`: only we can commit on this connection, and no server can be away. A running
    /// statement is interrupted, and a connection that does not roll back is not used again.
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
