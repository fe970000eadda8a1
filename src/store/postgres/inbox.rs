//! Inbox rows, and the transaction that holds them together with the effects of a handler.
//!
//! Guarantees: the unique key decides what is new, in one sorted insert (R24); the check before
//! COMMIT proves that it is still the transaction that inserted our rows (R23). Ids that contain a
//! time go to a range-partitioned table, other ids to a second table (R31).

mod fate;

use std::any::Any;
use std::collections::{HashMap, HashSet};
use std::time::Duration;

use async_trait::async_trait;
use sqlx::{AssertSqlSafe, Postgres, Row};
use uuid::Uuid;

use self::fate::Written;
use super::PostgresStore;
use super::connect::synchronous;
use crate::error::StoreError;
use crate::inbox::port::waiting::ClaimedMessage;
use crate::inbox::port::{
    Admission, ConsumerId, InboxEntry, InboxTx, Known, Parked, Proof, ROLLBACK_MAX, Standing, Undone, lock_wait,
};
use crate::inbox::rules::horizon::Bounds;
use crate::message::MessageId;
use crate::store::bounded::{Ask, Bounded, BoundedPool};
use crate::store::sql::inbox::{OwnInbox, clear_attempts};
use crate::store::sql::message::park;
use crate::store::sql::waiting;
use crate::time::db_time::DbTime;

/// The start time of the server. After a restart it differs, and process ids may repeat.
macro_rules! server_start {
    () => {
        "(extract(epoch from pg_postmaster_start_time()) * 1000000)::bigint"
    };
}
pub(super) use server_start;

/// Identifies a transaction: its id, the process id of its backend, and the start time of the
/// server. All three are needed: after a crash a transaction id may be given again, and after a
/// restart a process id may be.
macro_rules! witness {
    ($xact_id:literal) => {
        concat!($xact_id, " || ' ' || pg_backend_pid() || ' ' || ", crate::store::postgres::inbox::server_start!())
    };
}

/// Inserts new ids. The sub-select runs once, after the insert of the first row, so a transaction
/// id is assigned by then. This id is the witness of R23.
macro_rules! admit {
    ($table:literal, $ids:literal, $hashes:literal) => {
        concat!(
            "insert into oncebox.",
            $table,
            " (message_id, content_hash, consumer_id)
             select g.id, g.hash, $1 from unnest($",
            $ids,
            "::uuid[], $",
            $hashes,
            "::uuid[]) g (id, hash)
             on conflict do nothing
             returning message_id, (select ",
            witness!("pg_current_xact_id_if_assigned()"),
            ")"
        )
    };
}
/// Reads the witness; runs after a statement that wrote.
const WITNESS: &str = concat!("select ", witness!("pg_current_xact_id()"));

const ADMIT_TIMED: &str = admit!("inbox_timed", "2", "3");
const ADMIT_UNTIMED: &str = admit!("inbox_untimed", "2", "3");
const ADMIT_BOTH: &str = concat!(
    "with timed as (",
    admit!("inbox_timed", "2", "3"),
    "), untimed as (",
    admit!("inbox_untimed", "4", "5"),
    ") select * from timed union all select * from untimed"
);

/// From `from` on: the rows `i` of some ids. Each id is one index lookup: a plan for `= any` that
/// was made while the table was empty, or without statistics, reads all of it when it is large.
macro_rules! of_ids {
    ($table:literal, $ids:literal) => {
        concat!(
            " from unnest($",
            $ids,
            "::uuid[]) g (id) cross join lateral (select i.message_id, i.content_hash from oncebox.",
            $table,
            " i where i.consumer_id = $1 and i.message_id = g.id limit 1) i"
        )
    };
}

const HASHES_TIMED: &str = concat!("select i.message_id, i.content_hash", of_ids!("inbox_timed", "2"));
const HASHES_UNTIMED: &str = concat!("select i.message_id, i.content_hash", of_ids!("inbox_untimed", "2"));

/// Counts our rows and compares the transaction, in one statement (R23). It also sets
/// `synchronous_commit` back where a handler changed it: what is acknowledged must survive a crash.
const PROVE: &str = concat!(
    "select ",
    witness!("pg_current_xact_id_if_assigned()"),
    ", (select count(*)",
    of_ids!("inbox_timed", "2"),
    ") + (select count(*)",
    of_ids!("inbox_untimed", "3"),
    "), exists (select 1 from oncebox.waiting where sequence = $4), (",
    synchronous!("true"),
    ")"
);

/// Reads which of some lanes are blocked, and the times by which ages are judged. Each lane is one
/// index lookup, however many rows it has. The `order by` is needed: without it the plan for a lane
/// without rows reads the whole table. `now()` is when the transaction began, before any row of it
/// was received.
const STANDING: &str = "
select array(select l.lane_id from unnest($2::uuid[]) l (lane_id)
              cross join lateral (select 1 from oncebox.waiting w
                where w.consumer_id = $1 and w.lane_id between l.lane_id and l.lane_id and (w.state = 'waiting' or w.holds)
                order by w.lane_id limit 1) stands),
       (extract(epoch from c.purged_below) * 1000000)::bigint, (extract(epoch from now()) * 1000000)::bigint,
       (select value from oncebox.limits where name = 'id_skew_seconds')
  from oncebox.consumer c where c.consumer_id = $1";

#[async_trait]
impl OwnInbox for PostgresStore {
    const PURGES_BY_KEY: bool = true;

    async fn begin_batch(&self, consumer: ConsumerId) -> Result<Box<dyn InboxTx>, StoreError> {
        let wait = lock_wait(self.handler_timeout).as_millis();
        let tx = self.pool.begin(AssertSqlSafe(format!("begin; set local lock_timeout = {wait}"))).await?;
        let pool = self.pool.clone();
        let (ours, works) = (Ids::default(), false);
        Ok(Box::new(PostgresTx { tx, pool, consumer, witness: None, ours, finished: None, works }))
    }

    async fn known_ids(&self, consumer: ConsumerId, ids: &[MessageId]) -> Result<HashSet<MessageId>, StoreError> {
        let mut connection = self.pool.acquire().await?;
        Ok(hashes(&mut connection, consumer, &Ids::of(ids.iter().copied())).await?.into_keys().collect())
    }

    async fn are_contested(&self, consumer: ConsumerId, ids: &[MessageId]) -> Result<bool, StoreError> {
        // A row that is not committed is invisible, but an insert of the same id waits for it. The
        // wait is short because the caller asks for each message of a batch that a frozen process
        // holds.
        let mut tx = self.pool.begin("begin; set local lock_timeout = '2ms'").await?;
        let ids = Ids::of(ids.iter().copied());
        let mut waits = false;
        for (statement, ids) in [(ADMIT_TIMED, &ids.timed), (ADMIT_UNTIMED, &ids.untimed)] {
            if waits || ids.is_empty() {
                continue;
            }
            match sqlx::query(statement).bind(consumer.0).bind(ids).bind(ids).all(&mut tx).await {
                Ok(_) => {}
                Err(sqlx::Error::Database(error)) if error.code().as_deref() == Some("55P03") => waits = true,
                Err(error) => return Err(admit_error(error)),
            }
        }
        tx.rollback().await?;
        Ok(waits)
    }

    async fn bounds_now(&self, consumer: ConsumerId) -> Result<Bounds, StoreError> {
        Ok(standing(&mut self.pool.acquire().await?, consumer, &[]).await?.bounds)
    }

    async fn make_room(&self) -> Result<(), StoreError> {
        self.make_inbox_ranges().await
    }
}

/// Ids by the table they belong to, sorted, so that two transactions insert in the same order.
#[derive(Debug, Clone, Default)]
struct Ids {
    timed: Vec<Uuid>,
    untimed: Vec<Uuid>,
}

impl Ids {
    fn of(ids: impl Iterator<Item = MessageId>) -> Self {
        let (timed, untimed): (Vec<_>, Vec<_>) = ids.partition(|id| id.unix_millis().is_some());
        let sorted = |ids: Vec<MessageId>| {
            let mut ids: Vec<Uuid> = ids.into_iter().map(MessageId::uuid).collect();
            ids.sort_unstable();
            ids
        };
        Self { timed: sorted(timed), untimed: sorted(untimed) }
    }

    fn len(&self) -> usize {
        self.timed.len() + self.untimed.len()
    }
}

/// The transaction around a handler.
#[derive(Debug)]
pub(super) struct PostgresTx {
    tx: Bounded<Postgres>,
    /// Used to ask about `tx` where its own connection does not answer.
    pool: BoundedPool<Postgres>,
    consumer: ConsumerId,
    /// The witness of the transaction that wrote our rows: see `witness!`.
    witness: Option<String>,
    ours: Ids,
    finished: Option<i64>,
    /// Set when the server was seen executing a statement of this transaction during `undo`.
    works: bool,
}

#[async_trait]
impl InboxTx for PostgresTx {
    fn any_connection(&mut self) -> &mut (dyn Any + Send) {
        self.tx.lend()
    }

    async fn admit(&mut self, entries: &[InboxEntry]) -> Result<Admission, StoreError> {
        let (timed, untimed): (Vec<_>, Vec<_>) = entries.iter().partition(|entry| entry.id.unix_millis().is_some());
        let sorted = |entries: Vec<&InboxEntry>| -> (Vec<Uuid>, Vec<Uuid>) {
            let mut pairs: Vec<_> =
                entries.into_iter().map(|entry| (entry.id.uuid(), Uuid::from_bytes(entry.hash))).collect();
            pairs.sort_unstable();
            pairs.into_iter().unzip()
        };
        let ((timed, timed_hashes), (untimed, untimed_hashes)) = (sorted(timed), sorted(untimed));
        let ids = Ids { timed, untimed };
        let query = match (ids.timed.is_empty(), ids.untimed.is_empty()) {
            (true, true) => return Ok(Admission { known: Vec::new() }),
            (false, true) => sqlx::query(ADMIT_TIMED).bind(self.consumer.0).bind(&ids.timed).bind(timed_hashes),
            (true, false) => sqlx::query(ADMIT_UNTIMED).bind(self.consumer.0).bind(&ids.untimed).bind(untimed_hashes),
            (false, false) => sqlx::query(ADMIT_BOTH)
                .bind(self.consumer.0)
                .bind(&ids.timed)
                .bind(timed_hashes)
                .bind(&ids.untimed)
                .bind(untimed_hashes),
        };
        let rows = query.all(&mut self.tx).await.map_err(admit_error)?;
        let mut new = HashSet::with_capacity(rows.len());
        for row in &rows {
            new.insert(row.try_get::<Uuid, _>(0)?);
            self.witness = row.try_get(1)?;
        }
        self.ours = Ids::of(entries.iter().map(|entry| entry.id).filter(|id| new.contains(&id.uuid())));
        let stood = if new.len() == entries.len() {
            HashMap::new()
        } else {
            // A statement of its own: it sees what a transaction that we waited for has committed.
            let others = Ids::of(entries.iter().map(|entry| entry.id).filter(|id| !new.contains(&id.uuid())));
            hashes(&mut self.tx, self.consumer, &others).await?
        };
        let known = entries.iter().map(|entry| {
            // The row was purged between the two statements. It was there a moment ago, so the
            // message is a duplicate; its own hash is returned, because the stored one is gone.
            let hash = || stood.get(&entry.id).copied().unwrap_or(entry.hash);
            (!new.contains(&entry.id.uuid())).then(|| Known { hash: hash() })
        });
        Ok(Admission { known: known.collect() })
    }

    async fn standing(&mut self, lanes: &[[u8; 16]]) -> Result<Standing, StoreError> {
        standing(&mut self.tx, self.consumer, lanes).await
    }

    async fn park(&mut self, parked: &[Parked]) -> Result<(), StoreError> {
        park(&mut self.tx, self.consumer, parked).await
    }

    async fn forget(&mut self, ids: &[MessageId]) -> Result<(), StoreError> {
        // Deletes only rows that this transaction inserted: an older row must stay.
        let mut gone = Ids::of(ids.iter().copied());
        gone.timed.retain(|id| self.ours.timed.contains(id));
        gone.untimed.retain(|id| self.ours.untimed.contains(id));
        for (statement, ids) in [
            ("delete from oncebox.inbox_timed where consumer_id = $1 and message_id = any($2)", &gone.timed),
            ("delete from oncebox.inbox_untimed where consumer_id = $1 and message_id = any($2)", &gone.untimed),
        ] {
            if !ids.is_empty() {
                // A plan that is kept would read the table from end to end once it is large.
                let delete = sqlx::query(statement).persistent(false).bind(self.consumer.0).bind(ids);
                delete.run(&mut self.tx).await?;
            }
        }
        self.ours.timed.retain(|id| !gone.timed.contains(id));
        self.ours.untimed.retain(|id| !gone.untimed.contains(id));
        Ok(())
    }

    async fn finish(&mut self, claimed: &[ClaimedMessage]) -> Result<bool, StoreError> {
        if !waiting::finish(&mut self.tx, self.consumer, claimed).await? {
            return Ok(false);
        }
        self.witness = sqlx::query_scalar(WITNESS).one(&mut self.tx).await?;
        self.finished = claimed.first().map(|first| first.sequence);
        Ok(true)
    }

    async fn clear_attempts(&mut self, ids: &[MessageId]) -> Result<(), StoreError> {
        clear_attempts(&mut self.tx, self.consumer, ids).await
    }

    async fn prove(&mut self) -> Result<Proof, StoreError> {
        let found = sqlx::query(PROVE)
            .bind(self.consumer.0)
            .bind(&self.ours.timed)
            .bind(&self.ours.untimed)
            .bind(self.finished)
            .one(&mut self.tx)
            .await;
        let row = match found {
            Ok(row) => row,
            // A statement failed and the handler swallowed its error. COMMIT would roll back
            // without an error.
            Err(sqlx::Error::Database(error)) if error.code().as_deref() == Some("25P02") => {
                return Ok(Proof::Aborted);
            }
            Err(error) => return Err(error.into()),
        };
        let now: Option<String> = row.try_get(0)?;
        if self.witness.is_some() && now != self.witness {
            return Ok(Proof::Ended);
        }
        let count: i64 = row.try_get(1)?;
        let row_is_back: bool = row.try_get(2)?;
        // It is the same transaction, but a handler deleted rows of ours (or brought the finished
        // row back): nothing that the handler wrote may stay.
        let whole = usize::try_from(count) == Ok(self.ours.len()) && !row_is_back;
        Ok(if whole { Proof::Same } else { Proof::Aborted })
    }

    async fn undo(&mut self) -> Result<Undone, StoreError> {
        let rolled_back = matches!(tokio::time::timeout(ROLLBACK_MAX, self.tx.rollback()).await, Ok(Ok(())));
        let Some(witness) = self.witness.clone() else {
            return Ok(if rolled_back { Undone::Whole } else { Undone::Lost });
        };
        let written = Written { witness, consumer: self.consumer, ours: self.ours.clone(), finished: self.finished };
        if rolled_back && let Ok(stands) = written.stands(&mut self.tx).await {
            return Ok(if stands { Undone::Committed } else { Undone::Whole });
        }
        self.tx.give_up();
        let mut other = self.pool.fresh().await?;
        let undone = written.end_from(&mut other, &mut self.works).await;
        other.close().await;
        undone
    }

    async fn commit(mut self: Box<Self>) -> Result<(), StoreError> {
        self.tx.commit().await
    }

    async fn rollback(mut self: Box<Self>) -> Result<(), StoreError> {
        Ok(self.tx.rollback().await?)
    }
}

/// A range was attached while our insert was on its way to DEFAULT: a transient error (R8,
/// R27).
fn admit_error(error: sqlx::Error) -> StoreError {
    match &error {
        sqlx::Error::Database(database) if database.code().as_deref() == Some("23514") => StoreError::Busy(error),
        _ => error.into(),
    }
}

async fn standing(
    connection: &mut Bounded<Postgres>,
    consumer: ConsumerId,
    lanes: &[[u8; 16]],
) -> Result<Standing, StoreError> {
    let lanes: Vec<Uuid> = lanes.iter().map(|lane| Uuid::from_bytes(*lane)).collect();
    let row = sqlx::query(STANDING).bind(consumer.0).bind(lanes).optional(connection).await?;
    let row = row.ok_or_else(|| StoreError::Corrupt(format!("there is no consumer {}", consumer.0)))?;
    let blocked: Vec<Uuid> = row.try_get(0)?;
    Ok(Standing {
        blocked: blocked.into_iter().map(Uuid::into_bytes).collect(),
        bounds: Bounds {
            purged_below: row.try_get::<Option<i64>, _>(1)?.map(DbTime::from_micros),
            now: DbTime::from_micros(row.try_get(2)?),
            id_skew: Duration::from_secs(row.try_get::<i64, _>(3)?.unsigned_abs()),
        },
    })
}

/// Content hashes of the inbox rows of these ids.
async fn hashes(
    connection: &mut Bounded<Postgres>,
    consumer: ConsumerId,
    ids: &Ids,
) -> Result<HashMap<MessageId, [u8; 16]>, StoreError> {
    let mut found = HashMap::with_capacity(ids.len());
    for (statement, ids) in [(HASHES_TIMED, &ids.timed), (HASHES_UNTIMED, &ids.untimed)] {
        if ids.is_empty() {
            continue;
        }
        for row in sqlx::query(statement).bind(consumer.0).bind(ids).all(&mut *connection).await? {
            found.insert(MessageId::from_uuid(row.try_get(0)?), row.try_get::<Uuid, _>(1)?.into_bytes());
        }
    }
    Ok(found)
}
