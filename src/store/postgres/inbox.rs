//! Inbox rows, and the transaction that holds them together with the effects of a handler.
//!
//! Guarantees: the unique key decides what is new, in one sorted insert (R24); the check before
//! COMMIT proves that it is still the transaction that wrote our rows (R23), and the server refuses
//! a COMMIT of the handler. Ids that contain a time go to a range-partitioned table, other ids to a
//! second table (R31).

mod fate;

use std::any::Any;
use std::collections::{HashMap, HashSet};
use std::time::Duration;

use async_trait::async_trait;
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Postgres, Row};
use uuid::Uuid;

use self::fate::Written;
use super::connect::synchronous;
use super::{PostgresStore, code};
use crate::error::StoreError;
use crate::inbox::port::waiting::LeasedMessage;
use crate::inbox::port::{ConsumerId, InboxEntry, InboxTx, Parked, Proof, ROLLBACK_MAX, Standing, Undone};
use crate::inbox::rules::horizon::Bounds;
use crate::message::{ContentHash, MessageId};
use crate::store::bounded::{Ask, Bounded, BoundedPool, lock_wait};
use crate::store::sql::inbox::{OwnInbox, clear_attempts, no_consumer};
use crate::store::sql::message::park;
use crate::store::sql::waiting::{self, Buried};
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

/// Reads the witness; runs after a statement that wrote.
const WITNESS: &str = concat!("select ", witness!("pg_current_xact_id()"));

/// Inserts ids, and reads what stands in the way of the new ones and the witness, in one call. The
/// insert assigns the transaction id that the proof before COMMIT compares (R23).
const ADMIT: &str = "\
select old_ids, old_hashes, blocked, purged_until, began_at, id_skew, witness \
  from oncebox.admit($1, $2, $3, $4, $5, $6)";

/// The end of a statement, from the word `from` on: the rows of some ids without time. Each id is
/// one index lookup: a plan for `= any` that was made while the table was empty, or without
/// statistics, reads all of it when it is large.
macro_rules! untimed {
    ($ids:literal) => {
        concat!(
            " from unnest($",
            $ids,
            "::uuid[]) g (id) cross join lateral (select i.message_id from oncebox.inbox_untimed i \
               where i.consumer_id = $1 and i.message_id = g.id limit 1) i"
        )
    };
}

const KNOWN_TIMED: &str = "select message_id from oncebox.timed_rows($1, $2)";
const KNOWN_UNTIMED: &str = concat!("select message_id", untimed!("2"));

/// Reads which transaction this is and counts our rows, in one statement (R23). The server's own
/// counters of a transaction would be cheaper and are no proof: a table that was emptied in an open
/// savepoint, or exchanged, leaves them as they were. The statement also sets `synchronous_commit`
/// back where a handler changed it: what is acknowledged must survive a crash. It ends the guard
/// against a COMMIT, which must not refuse ours.
const PROVE: &str = concat!(
    "select ",
    witness!("pg_current_xact_id_if_assigned()"),
    ", (select count(*) from oncebox.timed_rows($1, $2)) + (select count(*)",
    untimed!("3"),
    "), (",
    synchronous!("true"),
    "), oncebox.permit_commit()"
);

/// Opens the guard against a COMMIT of the handler. The server runs the query of a held cursor at
/// COMMIT, before anything is committed, and this query raises.
const GUARD: &str = "declare oncebox_open no scroll cursor with hold for select oncebox.refuse_commit()";

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
        let tx = self.pool.begin(AssertSqlSafe(format!("begin; set local lock_timeout = {wait}; {GUARD}"))).await?;
        let pool = self.pool.clone();
        let (witness, is_guarded, works) = (None, true, false);
        let (ours, buried) = (Ids::default(), Buried::default());
        Ok(Box::new(PostgresTx { tx, pool, consumer, witness, is_guarded, ours, buried, works }))
    }

    async fn known_ids(&self, consumer: ConsumerId, ids: &[MessageId]) -> Result<HashSet<MessageId>, StoreError> {
        let mut connection = self.pool.acquire().await?;
        let ids = Ids::of(ids.iter().copied());
        let mut known = HashSet::with_capacity(ids.len());
        for (statement, ids) in [(KNOWN_TIMED, &ids.timed), (KNOWN_UNTIMED, &ids.untimed)] {
            if !ids.is_empty() {
                let found = sqlx::query_scalar(statement).bind(consumer.0).bind(ids);
                let found: Vec<Uuid> = found.all(&mut connection).await?;
                known.extend(found.into_iter().map(MessageId::from));
            }
        }
        Ok(known)
    }

    async fn are_contested(&self, consumer: ConsumerId, ids: &[MessageId]) -> Result<bool, StoreError> {
        // A row that is not committed is invisible, but an insert of the same id waits for it. The
        // wait is short because the caller asks for each message of a batch that a frozen process
        // holds.
        let mut tx = self.pool.begin("begin; set local lock_timeout = '2ms'").await?;
        let entries: Vec<_> = ids.iter().map(|id| InboxEntry { id: *id, hash: id.bytes() }).collect();
        let waits = match admit(&mut tx, consumer, &entries, &[]).await {
            Ok(_) => false,
            Err(error) if code(&error).as_deref() == Some("55P03") => true,
            Err(error) => return Err(admit_error(error)),
        };
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

/// Ids by the table that they belong to, each list sorted, as `oncebox.timed_rows` takes them.
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
    /// Whether the server refuses a COMMIT: until the proof.
    is_guarded: bool,
    ours: Ids,
    buried: Buried,
    /// Set when the server was seen executing a statement of this transaction during `undo`.
    works: bool,
}

#[async_trait]
impl InboxTx for PostgresTx {
    fn any_connection(&mut self) -> &mut (dyn Any + Send) {
        self.tx.lend()
    }

    async fn admit_and_look(
        &mut self,
        entries: &[InboxEntry],
        lanes: &[[u8; 16]],
    ) -> Result<(Vec<Option<ContentHash>>, Option<Standing>), StoreError> {
        if entries.is_empty() {
            return Ok((Vec::new(), None));
        }
        let row = admit(&mut self.tx, self.consumer, entries, lanes).await.map_err(admit_error)?;
        let stood: HashMap<Uuid, Option<Uuid>> = match row.try_get::<Option<Vec<Uuid>>, _>(0)? {
            Some(ids) => ids.into_iter().zip(row.try_get::<Vec<Option<Uuid>>, _>(1)?).collect(),
            None => HashMap::new(),
        };
        let known = entries.iter().map(|entry| {
            // Without a hash the row was purged between the two statements. It was there a moment
            // ago, so the message is a duplicate; its own hash is returned, because the stored one
            // is gone.
            let hash = |stored: &Option<Uuid>| stored.map_or(entry.hash, Uuid::into_bytes);
            stood.get(&entry.id.uuid()).map(hash)
        });
        let known: Vec<_> = known.collect();
        if stood.len() == entries.len() {
            return Ok((known, None));
        }
        self.ours = Ids::of(entries.iter().map(|entry| entry.id).filter(|id| !stood.contains_key(&id.uuid())));
        self.witness = row.try_get(6)?;
        let began_at: Option<i64> = row.try_get(4)?;
        let began_at = began_at.ok_or_else(|| no_consumer(self.consumer))?;
        let standing = standing_of(row.try_get(2)?, row.try_get(3)?, began_at, row.try_get(5)?);
        Ok((known, Some(standing)))
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

    async fn bury(
        &mut self,
        leased: &[LeasedMessage],
        reason: &str,
        error: &str,
        holds: bool,
    ) -> Result<bool, StoreError> {
        let buried = waiting::bury(&mut self.tx, self.consumer, leased, reason, error, holds).await?;
        let Some(buried) = buried else { return Ok(false) };
        self.witness = sqlx::query_scalar(WITNESS).one(&mut self.tx).await?;
        self.buried = buried;
        Ok(true)
    }

    async fn finish(&mut self) -> Result<bool, StoreError> {
        waiting::finish(&mut self.tx, self.consumer, &self.buried).await
    }

    async fn wake(&mut self, lanes: &[[u8; 16]]) -> Result<(), StoreError> {
        waiting::wake(&mut self.tx, self.consumer, lanes).await
    }

    async fn clear_attempts(&mut self, ids: &[MessageId]) -> Result<(), StoreError> {
        clear_attempts(&mut self.tx, self.consumer, ids).await
    }

    async fn prove(&mut self) -> Result<Proof, StoreError> {
        let query = sqlx::query(PROVE).bind(self.consumer.0).bind(&self.ours.timed).bind(&self.ours.untimed);
        let row = match query.one(&mut self.tx).await {
            Ok(row) => row,
            // A statement failed and the handler swallowed its error. COMMIT would roll back
            // without an error.
            Err(error) if code(&error).as_deref() == Some("25P02") => return Ok(Proof::Aborted),
            Err(error) => return Err(error.into()),
        };
        self.is_guarded = false;
        let now: Option<String> = row.try_get(0)?;
        if self.witness.is_some() && now != self.witness {
            return Ok(Proof::Ended);
        }
        // It is the same transaction, but a handler may have deleted rows of ours: then nothing
        // that the handler wrote may stay. (What was buried is counted by `finish`.)
        let is_whole = usize::try_from(row.try_get::<i64, _>(1)?) == Ok(self.ours.len());
        Ok(if is_whole { Proof::Same } else { Proof::Aborted })
    }

    async fn undo(&mut self) -> Result<Undone, StoreError> {
        let rolled_back = matches!(tokio::time::timeout(ROLLBACK_MAX, self.tx.rollback()).await, Ok(Ok(())));
        let Some(witness) = self.witness.clone() else {
            return Ok(if rolled_back { Undone::Whole } else { Undone::Lost });
        };
        let (ours, buried) = (self.ours.clone(), self.buried.rows.clone());
        let written = Written { witness, consumer: self.consumer, ours, buried };
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
        // No handler ran where nothing was proven.
        if self.is_guarded {
            sqlx::query("close oncebox_open").run(&mut self.tx).await?;
        }
        self.tx.commit().await
    }

    async fn rollback(mut self: Box<Self>) -> Result<(), StoreError> {
        Ok(self.tx.rollback().await?)
    }
}

/// Runs [`ADMIT`] with the ids sorted, so that two transactions insert in the same order.
async fn admit(
    tx: &mut Bounded<Postgres>,
    consumer: ConsumerId,
    entries: &[InboxEntry],
    lanes: &[[u8; 16]],
) -> sqlx::Result<PgRow> {
    let (timed, untimed): (Vec<_>, Vec<_>) = entries.iter().partition(|entry| entry.id.unix_millis().is_some());
    let sorted = |entries: Vec<&InboxEntry>| -> (Vec<Uuid>, Vec<Uuid>) {
        let pair = |entry: &InboxEntry| (entry.id.uuid(), Uuid::from_bytes(entry.hash));
        let mut pairs: Vec<_> = entries.into_iter().map(pair).collect();
        pairs.sort_unstable();
        pairs.into_iter().unzip()
    };
    let ((timed, timed_hashes), (untimed, untimed_hashes)) = (sorted(timed), sorted(untimed));
    let lanes: Vec<Uuid> = lanes.iter().map(|lane| Uuid::from_bytes(*lane)).collect();
    let query = sqlx::query(ADMIT).bind(consumer.0).bind(timed).bind(timed_hashes);
    query.bind(untimed).bind(untimed_hashes).bind(lanes).one(tx).await
}

fn standing_of(blocked: Vec<Uuid>, purged_below: Option<i64>, now: i64, id_skew: i64) -> Standing {
    Standing {
        blocked: blocked.into_iter().map(Uuid::into_bytes).collect(),
        bounds: Bounds {
            purged_below: purged_below.map(|micros| DbTime { micros }),
            now: DbTime { micros: now },
            id_skew: Duration::from_secs(id_skew.unsigned_abs()),
        },
    }
}

/// A range was attached while our insert was on its way to DEFAULT: a transient error (R8,
/// R27).
fn admit_error(error: sqlx::Error) -> StoreError {
    if code(&error).as_deref() == Some("23514") { StoreError::Busy(error) } else { error.into() }
}

async fn standing(
    connection: &mut Bounded<Postgres>,
    consumer: ConsumerId,
    lanes: &[[u8; 16]],
) -> Result<Standing, StoreError> {
    let lanes: Vec<Uuid> = lanes.iter().map(|lane| Uuid::from_bytes(*lane)).collect();
    let row = sqlx::query(STANDING).bind(consumer.0).bind(lanes).optional(connection).await?;
    let row = row.ok_or_else(|| no_consumer(consumer))?;
    Ok(standing_of(row.try_get(0)?, row.try_get(1)?, row.try_get(2)?, row.try_get(3)?))
}
