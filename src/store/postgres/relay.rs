//! A relay session: one ownership of one shard on one connection of its own.
//!
//! [`crate::outbox::rules::gaps`] decides the steps and what each must wait for (R2); this file
//! runs their statements. Guarantees: every write is fenced by epoch and revision in the statement
//! itself; a checkpoint commits synchronously, after the read (R5); another server, a set-back
//! sequence or rows out of order end the session (R7).

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use sqlx::postgres::PgListener;
use sqlx::{AssertSqlSafe, Executor, Postgres, Row, raw_sql};
use tokio::time::timeout;

use super::connect::{BEGIN, KEEPALIVE, SYNCHRONOUS};
use super::read::{Bounds, Buckets, read};
use super::{PostgresStore, diverted, partitions};
use crate::error::StoreError;
use crate::outbox::port::{
    DivertedRow, LeaseAnswer, LeaseRequest, Mark, OpenGaps, OperatorRequest, Outbox, OutboxRow, ReadBatch, RelaySession,
};
use crate::outbox::rules::gaps::{GapCursor, GapSet, RANGES_MAX};
use crate::store::bounded::{Ask, Bounded};
use crate::store::sql::{Session, outbox};
use crate::time::lease::Fence;

/// A gap that is still open this long after it got its fence is judged by the locks of its possible
/// writers (R6).
const STALE_GAP: Duration = Duration::from_secs(2);
/// How often the locks are read.
const WATCH_EVERY: Duration = Duration::from_millis(500);

/// Takes the lease and raises the epoch. A lease that ends later than now plus its own length
/// counts as expired (R22).
const TAKE: &str = "
update oncebox.shard set epoch = epoch + 1, revision = revision + 1, owner = $2, lease_seconds = $3,
       lease_until = clock_timestamp() + $3 * interval '1 second'
 where shard_id = $1
   and (owner is null or owner = $2 or lease_until <= clock_timestamp()
        or lease_until > clock_timestamp() + lease_seconds * interval '1 second')
returning epoch, revision, scanned_to, gaps::text, bucket_from, bucket_to, pg_current_xact_id()::text::bigint,
  greatest((select max(position) from oncebox.decision), (select max(position) from oncebox.outbox_dead), 0)";

/// Who has the lease, and the seconds that are left of it.
const HOLDER: &str = "
select owner, extract(epoch from lease_until - clock_timestamp())::float8 from oncebox.shard where shard_id = $1";

/// A checkpoint. Where something is marked, the cursor moves with it.
const CHECKPOINT: &str = "
update oncebox.shard set revision = revision + 1, lease_until = clock_timestamp() + lease_seconds * interval '1 second',
       updated_at = case when $4::bigint is null then updated_at else clock_timestamp() end,
       scanned_to = coalesce($4, scanned_to), gaps = coalesce($5::text::int8multirange, gaps)
 where shard_id = $1 and epoch = $2 and revision = $3
returning pg_current_xact_id()::text::bigint";

/// The transaction ids of all holders of a RowExclusiveLock on the outbox: only they can still
/// write at a gap (R6). A holder without an id has drawn no position, because the id is drawn first
/// (R1). Process ids and virtual transaction ids are of no use here: PREPARE changes them.
const LOCK_HOLDERS: &str = "
select distinct t.transactionid::text::bigint
  from pg_locks l
  join pg_locks t on t.virtualtransaction = l.virtualtransaction and t.locktype = 'transactionid' and t.mode = 'ExclusiveLock'
                 and t.granted
 where l.locktype = 'relation' and l.mode = 'RowExclusiveLock' and l.granted
   and l.database = (select oid from pg_database where datname = current_database())
   and l.relation in (select relid from pg_partition_tree('oncebox.outbox'))";

/// Describes the oldest of those transactions. A role that may not see other sessions gets no
/// duration.
const OLDEST_WRITER: &str = "
select coalesce('the prepared transaction `' || p.gid || '`', 'the transaction of process ' || coalesce(l.pid::text, '?'))
       || coalesce(', open for ' || round(extract(epoch from clock_timestamp() - coalesce(p.prepared, a.xact_start))) || ' s', '')
  from pg_locks l
  join pg_locks t on t.virtualtransaction = l.virtualtransaction and t.locktype = 'transactionid' and t.mode = 'ExclusiveLock'
                 and t.granted
  left join pg_prepared_xacts p on p.transaction = t.transactionid
  left join pg_stat_activity a on a.pid = l.pid
 where l.locktype = 'relation' and l.mode = 'RowExclusiveLock' and l.granted
   and l.database = (select oid from pg_database where datname = current_database())
   and l.relation in (select relid from pg_partition_tree('oncebox.outbox'))
 order by age(t.transactionid) desc limit 1";

/// Those of the transactions `$1` that have not ended.
const STILL_HOLDING: &str = "
select distinct transactionid::text::bigint from pg_locks
 where locktype = 'transactionid' and mode = 'ExclusiveLock' and granted and transactionid::text::bigint = any($1)";

/// The channel of the announcements that messages were committed.
macro_rules! channel {
    () => {
        "oncebox_outbox"
    };
}

/// How long a listener hears nothing before it asks whether the server is still there.
const SILENCE: Duration = Duration::from_secs(30);
/// How long it keeps one connection: after a failover the pool may have moved to another host.
const LISTENING: Duration = Duration::from_secs(300);
/// How long an answer may take.
const ANSWER: Duration = Duration::from_secs(10);

#[async_trait]
impl Outbox for PostgresStore {
    async fn open(&self, request: &LeaseRequest) -> Result<LeaseAnswer, StoreError> {
        let mut connection = self.pool.dedicated().await?;
        raw_sql(AssertSqlSafe(settings(self.server_timeout(), request.length))).run(&mut connection).await?;
        let taken = sqlx::query(TAKE)
            .bind(request.shard)
            .bind(&request.owner)
            .bind(request.length.as_secs_f64())
            .optional(&mut connection)
            .await?;
        let Some(row) = taken else {
            let holder: Option<(Option<String>, Option<f64>)> =
                sqlx::query_as(HOLDER).bind(request.shard).optional(&mut connection).await?;
            connection.close().await;
            let Some((owner, left)) = holder else { return Ok(LeaseAnswer::NoShard) };
            let left = Duration::try_from_secs_f64(left.unwrap_or(0.0));
            return Ok(LeaseAnswer::HeldBy { owner: owner.unwrap_or_default(), left: left.unwrap_or_default() });
        };
        let gaps: GapSet = row
            .try_get::<&str, _>(3)?
            .parse()
            .map_err(|error| StoreError::Corrupt(format!("the gaps of shard {}: {error}", request.shard)))?;
        let xact: i64 = row.try_get(6)?;
        Ok(LeaseAnswer::Taken(Box::new(PostgresSession {
            shard: request.shard,
            buckets: Buckets { from: row.try_get(4)?, to: row.try_get(5)? },
            fence: Fence { epoch: row.try_get(0)?, revision: row.try_get(1)? },
            cursor: GapCursor::start(row.try_get(2)?, &gaps, xact.unsigned_abs(), RANGES_MAX),
            decided_to: row.try_get(7)?,
            store: self.clone(),
            connection,
            began: Instant::now(),
            batches: VecDeque::new(),
            batch: 0,
            read_bytes: request.read_bytes,
            last_value: 0,
            watched: None,
            tidied: partitions::Tidied::default(),
        })))
    }

    async fn proven_kept(&self) -> Result<Duration, StoreError> {
        let kept = "select value from oncebox.setting where name = 'outbox_retention_seconds'";
        let seconds: Option<i64> = sqlx::query_scalar(kept).optional(&mut self.pool.acquire().await?).await?;
        Ok(Duration::from_secs(seconds.unwrap_or(0).unsigned_abs()))
    }

    async fn announce_commits(&self) -> Result<bool, StoreError> {
        raw_sql(concat!("notify ", channel!())).run(&mut self.pool.acquire().await?).await?;
        Ok(true)
    }

    async fn hear_commits(&self, heard: fn()) -> Result<(), StoreError> {
        let silent = |_| sqlx::Error::Protocol(format!("no answer within {ANSWER:?}"));
        // A connection beside the pool, which may have only one.
        let mut listener = PgListener::connect_with(&self.pool.single()).await?;
        listener.eager_reconnect(false);
        // The server closes the connection of a host that vanished, or of a process that takes
        // nothing, but not one that is only idle.
        let settings = AssertSqlSafe(format!("{KEEPALIVE} set tcp_user_timeout = '30s'; set idle_session_timeout = 0"));
        timeout(ANSWER, listener.execute(settings)).await.map_err(silent)??;
        timeout(ANSWER, listener.listen(channel!())).await.map_err(silent)??;
        // Commits from before it listened were not announced to it.
        heard();
        let began = Instant::now();
        while began.elapsed() < LISTENING {
            match timeout(SILENCE, listener.try_recv()).await {
                Ok(Ok(Some(_))) => heard(),
                Ok(Ok(None)) => return Err(sqlx::Error::Protocol("the listening connection ended".into()).into()),
                Ok(Err(error)) => return Err(error.into()),
                // A server that vanished says nothing for ever.
                Err(_) => {
                    timeout(ANSWER, listener.execute("select 1")).await.map_err(silent)??;
                }
            }
        }
        Ok(())
    }

    async fn shards(&self) -> Result<Vec<i32>, StoreError> {
        let shards = sqlx::query_scalar("select shard_id from oncebox.shard order by shard_id");
        Ok(shards.all(&mut self.pool.acquire().await?).await?)
    }
}

/// The settings that a relay session needs. Ordered index scans are the only good plan of the read,
/// so all others are switched off, whatever the statistics say.
///
/// The lock timeout is shorter than the statement timeout, because PostgreSQL reports the one that
/// ends first, and only a lock timeout is transient. A lock may stay taken for long: the
/// transaction of a former owner may hang in its COMMIT, for a synchronous standby for example.
///
/// A transaction that is idle for the length of a lease is ended, because it may have locked the
/// row of the lease: its owner is frozen, and the next one would wait for it.
fn settings(timeout: Duration, lease: Duration) -> String {
    let idle = lease.as_millis().max(1);
    let (timeout, lock) = (timeout.as_millis(), (timeout - timeout / 8).as_millis());
    format!(
        "{SYNCHRONOUS};
         set row_security = off;
         set plan_cache_mode = force_generic_plan;
         set enable_seqscan = off; set enable_bitmapscan = off; set enable_sort = off; set jit = off;
         set idle_in_transaction_session_timeout = {idle};
         set statement_timeout = {timeout}; set lock_timeout = {lock}"
    )
}

/// One session: it owns one shard; see [`RelaySession`].
#[derive(Debug)]
pub(super) struct PostgresSession {
    store: PostgresStore,
    connection: Bounded<Postgres>,
    shard: i32,
    buckets: Buckets,
    /// Epoch and revision as this session wrote them last.
    fence: Fence,
    cursor: GapCursor,
    began: Instant,
    /// The batches of this session that found rows of any shard, with their numbers in the cursor.
    batches: VecDeque<(u64, u64)>,
    batch: u64,
    read_bytes: usize,
    /// The last position drawn from the sequence, as the last read found it.
    last_value: i64,
    /// No decision and no dead or held row exists above this position.
    decided_to: i64,
    /// When the locks were read last.
    watched: Option<Instant>,
    tidied: partitions::Tidied,
}

#[async_trait]
impl RelaySession for PostgresSession {
    fn epoch(&self) -> i64 {
        self.fence.epoch
    }

    async fn read(&mut self, rows_max: usize) -> Result<ReadBatch, StoreError> {
        self.watch_locks().await?;
        let plan = self.cursor.begin_read();
        let bounds = Bounds { rows: self.limit(rows_max), bytes: self.read_bytes };
        let found = read(&mut self.connection, self.shard, self.buckets, &plan, bounds).await?;
        let found = found.ok_or_else(|| StoreError::Fenced(format!("shard {} is gone", self.shard)))?;
        self.fence.check(found.fence).map_err(|lost| StoreError::Fenced(format!("shard {}: {lost}", self.shard)))?;
        if self.cursor.is_ahead_of(found.last_value) {
            return Err(StoreError::Refused(format!(
                "sequence behind cursor: the last position drawn is {}, shard {} has read up to {}; new messages would never be \
                 read; run `oncebox doctor --fix`",
                found.last_value,
                self.shard,
                self.cursor.read_to()
            )));
        }
        self.last_value = found.last_value;
        self.tidied.saw(found.last_value);
        let passes = found.rows.is_empty();
        let outcome = self.cursor.on_read(found.xmin, &found.positions, found.more, passes);
        let outcome = outcome.map_err(StoreError::Corrupt)?;
        self.batch += 1;
        if let Some(number) = outcome.batch {
            // Where neither this read nor the last had a row of this shard, the cursor gives the
            // same number again: this entry replaces the last one.
            self.batches.pop_back_if(|(_, last)| *last == number);
            self.batches.push_back((self.batch, number));
        }
        let rows = self.undecided(found.rows).await?;
        Ok(ReadBatch {
            batch: self.batch,
            rows,
            more: found.more,
            // Without a tail only the gaps were read.
            saw_all: !found.more && plan.tail_from.is_some(),
            needs_checkpoint: self.cursor.needs_checkpoint(),
        })
    }

    async fn checkpoint(&mut self, mark: Mark) -> Result<(), StoreError> {
        let ticket = self.cursor.begin_checkpoint();
        // `None`: nothing is marked, and the checkpoint is written alone.
        let moved = match mark.through.and_then(|through| self.cursor_batch(through)) {
            Some(number) => self.cursor.mark_through(number),
            None => self.cursor.mark_idle(),
        };
        let query = sqlx::query(CHECKPOINT).bind(self.shard).bind(self.fence.epoch).bind(self.fence.revision);
        let query = query.bind(moved.as_ref().map(|moved| moved.scanned_to));
        let query = query.bind(moved.as_ref().map(|moved| moved.gaps.to_string()));
        let made = if mark.moves_rows() {
            self.connection.begin(BEGIN).await?;
            let made = query.optional(&mut self.connection).await?;
            if made.is_some() {
                let (decided_to, sent) = diverted::write(&mut self.connection, &mark).await?;
                self.connection.commit().await?;
                sent.warn();
                self.decided_to = self.decided_to.max(decided_to);
            }
            made
        } else {
            query.optional(&mut self.connection).await?
        };
        let Some(row) = made else {
            return Err(StoreError::Fenced(format!(
                "shard {} is not at epoch {} and revision {} any more",
                self.shard, self.fence.epoch, self.fence.revision
            )));
        };
        let xact: i64 = row.try_get(0)?;
        self.fence.revision += 1;
        let now = self.now();
        self.cursor.on_checkpoint(ticket, xact.unsigned_abs(), now).map_err(StoreError::Corrupt)?;
        if let Some(moved) = moved {
            while self.batches.front().is_some_and(|(_, number)| *number <= moved.batch) {
                self.batches.pop_front();
            }
            self.cursor.on_marked(moved);
        }
        Ok(())
    }

    async fn diverted(&mut self, limit: usize) -> Result<Vec<DivertedRow>, StoreError> {
        outbox::diverted(&mut self.connection, self.buckets.bounds(), limit).await
    }

    async fn has_dead(&mut self, rows: usize) -> Result<bool, StoreError> {
        outbox::has_dead(&mut self.connection, rows).await
    }

    async fn requests(&mut self, after: i64, limit: usize) -> Result<Vec<OperatorRequest>, StoreError> {
        outbox::requests(&mut self.connection, self.buckets.bounds(), after, limit).await
    }

    async fn held(&mut self, positions: &[i64]) -> Result<Vec<OutboxRow>, StoreError> {
        diverted::held(&mut self.connection, positions, self.read_bytes).await
    }

    async fn tidy(&mut self) -> Result<(), StoreError> {
        partitions::tidy_outbox(&self.store, &mut self.connection, &mut self.tidied, self.last_value).await
    }

    async fn open_gaps(&mut self) -> Result<Option<OpenGaps>, StoreError> {
        let (open, max) = (self.cursor.open_gaps(), RANGES_MAX);
        if open < max / 2 {
            return Ok(None);
        }
        let held_by: Option<String> = sqlx::query_scalar(OLDEST_WRITER).optional(&mut self.connection).await?;
        Ok(Some(OpenGaps { open, max, held_by }))
    }

    async fn release(mut self: Box<Self>) -> Result<(), StoreError> {
        let released = Session::run(&mut self.connection, outbox::release(self.shard, self.fence)).await?;
        self.connection.close().await;
        match released {
            1 => Ok(()),
            _ => Err(StoreError::Fenced(format!("shard {} has another owner", self.shard))),
        }
    }
}

impl PostgresSession {
    /// Milliseconds since this session began; ages of gaps are differences of them.
    fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// The last batch of the cursor that batches of this session up to `through` cover.
    fn cursor_batch(&self, through: u64) -> Option<u64> {
        self.batches.iter().take_while(|(batch, _)| *batch <= through).last().map(|(_, number)| *number)
    }

    /// The LIMIT of the next read: the number asked for, or the next lower power of two where the
    /// bound on gaps allows less, so that only few statements are prepared.
    fn limit(&self, rows_max: usize) -> usize {
        let allowed = self.cursor.row_limit(rows_max.clamp(1, 100_000));
        if allowed == rows_max { rows_max } else { 1 << allowed.ilog2() }
    }

    /// Leaves out rows whose position was decided, or that stand in the dead and held table: the
    /// cursor may have been set back (R18).
    async fn undecided(&mut self, mut rows: Vec<OutboxRow>) -> Result<Vec<OutboxRow>, StoreError> {
        let asked: Vec<i64> =
            rows.iter().map(|row| row.position).take_while(|position| *position <= self.decided_to).collect();
        if !asked.is_empty() {
            let decided = diverted::decided(&mut self.connection, &asked).await?;
            rows.retain(|row| !decided.contains(&row.position));
        }
        Ok(rows)
    }

    /// Closes gaps of transactions that ended without a row while a long transaction elsewhere
    /// holds `xmin` back (R6).
    async fn watch_locks(&mut self) -> Result<(), StoreError> {
        if self.watched.is_some_and(|last| last.elapsed() < WATCH_EVERY) {
            return Ok(());
        }
        self.watched = Some(Instant::now());
        if let Some(watched) = self.cursor.lock_watch() {
            let watched: Vec<i64> = watched.iter().map(|id| id.cast_signed()).collect();
            let still: Vec<i64> = sqlx::query_scalar(STILL_HOLDING).bind(watched).all(&mut self.connection).await?;
            self.cursor.on_still_holding(&unsigned(still));
        } else if self.cursor.begin_lock_watch(self.now(), u64::try_from(STALE_GAP.as_millis()).unwrap_or(u64::MAX)) > 0
        {
            let holders: Vec<i64> = sqlx::query_scalar(LOCK_HOLDERS).all(&mut self.connection).await?;
            self.cursor.on_lock_holders(unsigned(holders));
        }
        Ok(())
    }
}

/// Ids of transactions as the cursor knows them.
fn unsigned(ids: Vec<i64>) -> Vec<u64> {
    ids.into_iter().map(i64::unsigned_abs).collect()
}
