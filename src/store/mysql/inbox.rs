//! The inbox and the transaction around a handler.
//!
//! Guarantees:
//!
//! * The unique key, over fixed binary values, decides what is new, and a random token marks the
//!   rows that a batch inserted (R24). Every row is read back, and warnings are read, to detect a
//!   server that shortens or changes a value under `insert ignore`.
//! * The connection of a handler has `autocommit = 0`: after DDL, a raw COMMIT, a second START
//!   TRANSACTION or a swallowed deadlock, the next statements are still in a transaction that we
//!   roll back. A savepoint with a random name, set after the insert, must release without error:
//!   it exists exactly as long as the transaction (R23).
//!
//! Not here: what does not run for every batch ([`crate::store::sql::inbox`]), and waiting messages
//! ([`crate::store::sql::waiting`]).

use std::any::Any;
use std::collections::{HashMap, HashSet};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use sqlx::mysql::{MySqlQueryResult, MySqlRow};
use sqlx::{AssertSqlSafe, Either, MySql, Row, raw_sql};
use uuid::Uuid;

use super::{MySqlStore, hex, hex_list, is_locked, number, sixteen};
use crate::error::StoreError;
use crate::inbox::port::waiting::LeasedMessage;
use crate::inbox::port::{ConsumerId, InboxEntry, InboxTx, LOOKS, Parked, Proof, ROLLBACK_MAX, Standing, Undone};
use crate::inbox::rules::horizon::Bounds;
use crate::message::{ContentHash, MessageId};
use crate::store::bounded::{AnyQuery, Ask, Bounded, BoundedPool};
use crate::store::sql::inbox::{OwnInbox, clear_attempts, no_consumer};
use crate::store::sql::message::park;
use crate::store::sql::savepoint_name;
use crate::store::sql::waiting::{self, Buried};
use crate::time::db_time::DbTime;

/// Sets `autocommit = 0`, until the pool sets the connection up again.
pub(super) const START_HANDLER: &str = "set session autocommit = 0; start transaction";

/// The number of a warning: the inbox has the row already.
const DUPLICATE: i64 = 1062;
/// The error number: the savepoint does not exist, so its transaction has ended.
pub(super) const NO_SAVEPOINT: u16 = 1305;

/// The transaction around a handler.
#[derive(Debug)]
pub(super) struct MySqlInboxTx {
    transaction: Bounded<MySql>,
    /// Used to ask about `transaction` where its own connection does not answer.
    pool: BoundedPool<MySql>,
    consumer: ConsumerId,
    /// Marks the rows of this batch.
    token: [u8; 16],
    savepoint: Option<String>,
    session: Option<ServerSession>,
    began: Instant,
    /// The time at which our rows were received.
    received: Option<DbTime>,
    /// The ids whose rows this transaction inserted.
    ours: Vec<MessageId>,
    buried: Buried,
    /// An inbox row without a message, inserted by [`InboxTx::bury`] as proof of the commit: a dead
    /// row would not tell whose handler committed it, and an operator may have acted on it.
    mark: Option<MessageId>,
    /// Set when the server was seen executing a statement of this transaction during `undo`.
    works: bool,
}

/// The number of a connection and the server that gave it. Another server counts its own.
#[derive(Debug)]
struct ServerSession {
    id: u64,
    server: String,
}

impl ServerSession {
    /// The two columns that [`Self::of`] reads.
    const COLUMNS: &str = "connection_id(), concat_ws('/', @@hostname, @@port, @@server_id)";

    fn of(row: &MySqlRow, first: usize) -> Result<Self, StoreError> {
        Ok(Self { id: row.try_get(first)?, server: row.try_get_unchecked(first + 1)? })
    }

    /// Whether this number may belong to another connection: the server is another one, or it has
    /// been up (`up`) no longer than the time since the transaction began (`begun`).
    fn is_of_another(&self, server: &str, up: Duration, begun: Duration) -> bool {
        self.server != server || up <= begun
    }
}

/// Whether the server executes a statement of this connection, and does not wait for its client. No
/// row where the connection has ended.
const WORKS: &str = "\
select command <> 'Sleep' and coalesce(state, '') not in ('Writing to net', 'Sending to client', 'Reading from net') \
  from information_schema.processlist where id = ?";

/// From `from` on: the rows `i` of some ids, each found by the primary key.
macro_rules! of_ids {
    () => {
        "json_table(?, '$[*]' columns (id varchar(32) path '$')) j \
         straight_join oncebox_inbox i force index (primary) on i.consumer_id = ? and i.message_id = unhex(j.id)"
    };
}

#[async_trait]
impl OwnInbox for MySqlStore {
    const PURGES_BY_KEY: bool = false;

    async fn begin_batch(&self, consumer: ConsumerId) -> Result<Box<dyn InboxTx>, StoreError> {
        let (wait, most) = (self.lock_wait.as_secs().max(1), self.statement_max.as_secs());
        // Only MariaDB can end a writing statement by a time limit. Without it, the statement of a
        // killed process would keep its locks until it is done.
        let start = format!(
            "set session innodb_lock_wait_timeout = {wait} /*M! , max_statement_time = {most} */; {START_HANDLER}"
        );
        let (transaction, pool) = (self.pool.begin(AssertSqlSafe(start)).await?, self.pool.clone());
        Ok(Box::new(MySqlInboxTx {
            transaction,
            pool,
            consumer,
            token: Uuid::now_v7().into_bytes(),
            savepoint: None,
            session: None,
            began: Instant::now(),
            received: None,
            ours: Vec::new(),
            buried: Buried::default(),
            mark: None,
            works: false,
        }))
    }

    async fn known_ids(&self, consumer: ConsumerId, ids: &[MessageId]) -> Result<HashSet<MessageId>, StoreError> {
        if ids.is_empty() {
            return Ok(HashSet::new());
        }
        let found: Vec<Uuid> = sqlx::query_scalar(concat!("select i.message_id from ", of_ids!()))
            .bind(id_list(ids))
            .bind(consumer.0)
            .all(&mut self.pool.acquire().await?)
            .await?;
        Ok(found.into_iter().map(MessageId::from).collect())
    }

    async fn are_contested(&self, consumer: ConsumerId, ids: &[MessageId]) -> Result<bool, StoreError> {
        let locked = sqlx::query(concat!("select 1 from ", of_ids!(), " for update nowait"))
            .bind(id_list(ids))
            .bind(consumer.0)
            .all(&mut self.pool.acquire().await?)
            .await;
        match locked {
            Ok(_) => Ok(false),
            Err(error) if is_locked(&error) => Ok(true),
            Err(error) => Err(error.into()),
        }
    }

    async fn bounds_now(&self, consumer: ConsumerId) -> Result<Bounds, StoreError> {
        Ok(standing(&mut self.pool.acquire().await?, consumer, &[]).await?.bounds)
    }
}

fn id_list(ids: &[MessageId]) -> String {
    hex_list(ids.iter().map(|id| id.bytes()))
}

#[async_trait]
impl InboxTx for MySqlInboxTx {
    fn any_connection(&mut self) -> &mut (dyn Any + Send) {
        self.transaction.lend()
    }

    async fn admit_and_look(
        &mut self,
        entries: &[InboxEntry],
        lanes: &[[u8; 16]],
    ) -> Result<(Vec<Option<ContentHash>>, Option<Standing>), StoreError> {
        if entries.is_empty() {
            self.set_savepoint(None).await?;
            return Ok((Vec::new(), None));
        }
        // Sorted, so that two batches with the same ids wait for each other and do not deadlock.
        let mut sorted = entries.to_vec();
        sorted.sort_unstable_by_key(|entry| entry.id);
        let savepoint = savepoint_name();
        let answers = self.run_all(admit_statements(self.consumer, &sorted, self.token, &savepoint)).await?;
        let [_, inserted, warned, warnings, rows, bounds, _] = answers.as_slice() else {
            let count = answers.len();
            return Err(StoreError::Corrupt(format!("seven statements of the inbox gave {count} answers")));
        };
        self.savepoint = Some(savepoint);
        self.session = rows.rows.first().map(|row| ServerSession::of(row, 4)).transpose()?;
        only_duplicates(entries.len(), inserted.changed, warned, warnings)?;

        let mut found = HashMap::with_capacity(rows.rows.len());
        for row in &rows.rows {
            let id: Uuid = row.try_get(0)?;
            let hash = sixteen("content_hash", row.try_get::<&[u8], _>(1)?)?;
            let is_new = row.try_get::<&[u8], _>(2)? == self.token;
            if is_new {
                self.received = Some(DbTime { micros: row.try_get(3)? });
                self.ours.push(MessageId::from(id));
            }
            found.insert(MessageId::from(id), (hash, is_new));
        }
        let answer = |entry: &InboxEntry| match found.get(&entry.id) {
            Some((hash, true)) if *hash == entry.hash => Ok(None),
            Some((hash, false)) => Ok(Some(*hash)),
            Some(_) => Err(StoreError::Corrupt(format!("the inbox changed the content hash of {}", entry.id))),
            // The row that made the message a duplicate was purged in between: a transient error,
            // so the batch runs again.
            None => Err(StoreError::Busy(sqlx::Error::Protocol(format!("the inbox row of {} went away", entry.id)))),
        };
        let known = entries.iter().map(answer).collect::<Result<_, _>>()?;
        if self.received.is_none() {
            return Ok((known, None));
        }
        let first = bounds.rows.first().ok_or_else(|| no_consumer(self.consumer))?;
        let standing = match first.try_get::<i64, _>(3)? {
            0 => self.at_receipt(Standing { blocked: HashSet::new(), bounds: bounds_of(first)? }),
            _ => self.standing(lanes).await?,
        };
        Ok((known, Some(standing)))
    }

    async fn standing(&mut self, lanes: &[[u8; 16]]) -> Result<Standing, StoreError> {
        let standing = standing(&mut self.transaction, self.consumer, lanes).await?;
        Ok(self.at_receipt(standing))
    }

    async fn park(&mut self, parked: &[Parked]) -> Result<(), StoreError> {
        park(&mut self.transaction, self.consumer, parked).await
    }

    async fn forget(&mut self, ids: &[MessageId]) -> Result<(), StoreError> {
        if ids.is_empty() {
            return Ok(());
        }
        sqlx::query(concat!("delete i from ", of_ids!(), " where i.batch_token = ?"))
            .bind(id_list(ids))
            .bind(self.consumer.0)
            .bind(self.token.as_slice())
            .run(&mut self.transaction)
            .await?;
        self.ours.retain(|id| !ids.contains(id));
        Ok(())
    }

    async fn bury(
        &mut self,
        leased: &[LeasedMessage],
        reason: &str,
        error: &str,
        holds: bool,
    ) -> Result<bool, StoreError> {
        let buried = waiting::bury(&mut self.transaction, self.consumer, leased, reason, error, holds).await?;
        let Some(buried) = buried else { return Ok(false) };
        self.set_savepoint(Some(MessageId::new())).await?;
        self.buried = buried;
        Ok(true)
    }

    async fn finish(&mut self) -> Result<bool, StoreError> {
        waiting::finish(&mut self.transaction, self.consumer, &self.buried).await
    }

    async fn wake(&mut self, lanes: &[[u8; 16]]) -> Result<(), StoreError> {
        waiting::wake(&mut self.transaction, self.consumer, lanes).await
    }

    async fn clear_attempts(&mut self, ids: &[MessageId]) -> Result<(), StoreError> {
        clear_attempts(&mut self.transaction, self.consumer, ids).await
    }

    async fn prove(&mut self) -> Result<Proof, StoreError> {
        let Some(savepoint) = self.savepoint.take() else { return Ok(Proof::Same) };
        let release = raw_sql(AssertSqlSafe(format!("release savepoint {savepoint}")));
        let released = release.run(&mut self.transaction).await;
        match released {
            Ok(_) => Ok(Proof::Same),
            Err(error) if number(&error) == Some(NO_SAVEPOINT) => Ok(Proof::Ended),
            Err(error) => Err(error.into()),
        }
    }

    async fn undo(&mut self) -> Result<Undone, StoreError> {
        let rolled_back = matches!(tokio::time::timeout(ROLLBACK_MAX, self.transaction.rollback()).await, Ok(Ok(())));
        let stands = self.stands();
        if rolled_back && let Ok(is_committed) = stands.ask(&mut self.transaction).await {
            return Ok(if is_committed { Undone::Committed } else { Undone::Whole });
        }
        self.transaction.give_up();
        let mut other = self.pool.fresh().await?;
        let undone = self.end_from(&mut other, &stands).await;
        other.close().await;
        undone
    }

    async fn commit(mut self: Box<Self>) -> Result<(), StoreError> {
        self.transaction.commit().await
    }

    async fn rollback(mut self: Box<Self>) -> Result<(), StoreError> {
        self.transaction.rollback().await.map_err(StoreError::from)
    }
}

/// The result of one of several statements in a packet.
struct Answer {
    rows: Vec<MySqlRow>,
    changed: u64,
}

/// Identifies a transaction that may have been committed, by an inbox row that only this
/// transaction could insert.
struct Stands {
    consumer: ConsumerId,
    token: [u8; 16],
    inserted: Option<MessageId>,
}

impl Stands {
    async fn ask(&self, connection: &mut Bounded<MySql>) -> Result<bool, StoreError> {
        let Some(id) = self.inserted else { return Ok(false) };
        let rows: i64 = sqlx::query_scalar(
            "select count(*) from oncebox_inbox where consumer_id = ? and message_id = ? and batch_token = ?",
        )
        .bind(self.consumer.0)
        .bind(id.uuid())
        .bind(self.token.as_slice())
        .one(connection)
        .await?;
        Ok(rows > 0)
    }
}

impl MySqlInboxTx {
    /// Ages are judged by the time at which our rows were received.
    fn at_receipt(&self, mut standing: Standing) -> Standing {
        if let Some(received) = self.received {
            standing.bounds.now = received;
        }
        standing
    }

    fn stands(&self) -> Stands {
        let inserted = self.ours.first().copied().or(self.mark);
        Stands { consumer: self.consumer, token: self.token, inserted }
    }

    /// Kills our connection from another one, waits until it has ended, and then reads whether it
    /// committed.
    async fn end_from(&mut self, other: &mut Bounded<MySql>, stands: &Stands) -> Result<Undone, StoreError> {
        let (looks, pause) = LOOKS;
        for _ in 0..looks {
            match self.works_still(other).await? {
                Some(works) => self.works |= works,
                None if stands.ask(other).await? => return Ok(Undone::Committed),
                None if self.works => return Ok(Undone::Whole),
                None => return Ok(Undone::Lost),
            }
            // The connection may have ended meanwhile, so an error of `kill` counts only where it
            // is transient.
            let id = self.session.as_ref().map(|session| session.id).unwrap_or_default();
            let killed = raw_sql(AssertSqlSafe(format!("kill {id}"))).run(&mut *other).await;
            if let Err(error) = killed.map_err(StoreError::from)
                && error.is_transient()
            {
                return Err(error);
            }
            tokio::time::sleep(pause).await;
        }
        let why = format!("{:?} was told to end and has not ended yet", self.session);
        Err(StoreError::Busy(sqlx::Error::Protocol(why)))
    }

    /// Whether the server executes a statement of our connection; none where the connection has
    /// ended. It has ended too where the server was restarted or replaced since: its number may
    /// belong to another connection there.
    async fn works_still(&self, other: &mut Bounded<MySql>) -> Result<Option<bool>, StoreError> {
        let Some(session) = &self.session else { return Ok(None) };
        let row = raw_sql("show global status like 'Uptime'").one(&mut *other).await?;
        let up = Duration::from_secs(row.try_get_unchecked::<String, _>(1)?.parse().unwrap_or_default());
        let columns = AssertSqlSafe(format!("select {}", ServerSession::COLUMNS));
        let here = ServerSession::of(&raw_sql(columns).one(&mut *other).await?, 0)?;
        if session.is_of_another(&here.server, up, self.began.elapsed()) {
            return Ok(None);
        }
        let works: Option<i64> = sqlx::query_scalar(WORKS).bind(session.id).optional(other).await?;
        Ok(works.map(|works| works != 0))
    }

    /// Inserts `mark`, an inbox row that only this transaction has, and sets the savepoint. Without
    /// a mark, an existing savepoint stays. The savepoint proves all that was written before it.
    async fn set_savepoint(&mut self, mark: Option<MessageId>) -> Result<(), StoreError> {
        if self.savepoint.is_some() && mark.is_none() {
            return Ok(());
        }
        let (consumer, token) = (self.consumer.0, hex(&self.token));
        let insert = mark.map(|mark| {
            let mark = hex(&mark.bytes());
            format!(
                "insert into oncebox_inbox (consumer_id, message_id, content_hash, batch_token, received_at) \
                 values ({consumer}, x'{mark}', x'{token}', x'{token}', utc_timestamp(6)); "
            )
        });
        let name = self.savepoint.take().unwrap_or_else(savepoint_name);
        let text = format!("{}savepoint {name}; select {}", insert.unwrap_or_default(), ServerSession::COLUMNS);
        let row = raw_sql(AssertSqlSafe(text)).one(&mut self.transaction).await?;
        (self.session, self.savepoint, self.mark) = (Some(ServerSession::of(&row, 0)?), Some(name), mark);
        Ok(())
    }

    /// Runs several statements in one packet, and returns the result of each.
    async fn run_all(&mut self, statements: String) -> Result<Vec<Answer>, StoreError> {
        let mut answers = Vec::new();
        let mut rows = Vec::new();
        let mut take = |part: Either<MySqlQueryResult, MySqlRow>| {
            match part {
                Either::Left(done) => {
                    answers.push(Answer { rows: std::mem::take(&mut rows), changed: done.rows_affected() });
                }
                Either::Right(row) => rows.push(row),
            }
            ControlFlow::Continue(())
        };
        self.transaction.parts(AnyQuery::of(raw_sql(AssertSqlSafe(statements))), &mut take).await?;
        Ok(answers)
    }
}

/// Reads which of some lanes are blocked, and the times by which ages are judged.
async fn standing(
    connection: &mut Bounded<MySql>,
    consumer: ConsumerId,
    lanes: &[[u8; 16]],
) -> Result<Standing, StoreError> {
    let rows = sqlx::query(
        "select b.purged, b.now, b.skew, l.lane_id from \
           (select timestampdiff(microsecond, '1970-01-01', c.purged_below) as purged, \
                   timestampdiff(microsecond, '1970-01-01', utc_timestamp(6)) as now, \
                   cast((select value from oncebox_limits where name = 'id_skew_seconds') as signed) as skew \
              from oncebox_consumer c where c.consumer_id = ?) b \
         left join (select unhex(j.lane_id) as lane_id from json_table(?, '$[*]' columns (lane_id varchar(32) path '$')) j \
           where (select w.sequence from oncebox_waiting w where w.consumer_id = ? and w.lane_id = unhex(j.lane_id) limit 1) is not null) l \
           on true",
    )
    .bind(consumer.0)
    .bind(hex_list(lanes.iter().copied()))
    .bind(consumer.0)
    .all(connection)
    .await?;
    let bounds = bounds_of(rows.first().ok_or_else(|| no_consumer(consumer))?)?;
    let lanes = rows.iter().filter_map(|row| row.try_get::<Option<&[u8]>, _>(3).transpose());
    let blocked = lanes.map(|lane| sixteen("lane_id", lane?)).collect::<Result<_, _>>()?;
    Ok(Standing { blocked, bounds })
}

fn bounds_of(row: &MySqlRow) -> Result<Bounds, StoreError> {
    Ok(Bounds {
        purged_below: row.try_get::<Option<i64>, _>(0)?.map(|micros| DbTime { micros }),
        now: DbTime { micros: row.try_get(1)? },
        id_skew: Duration::from_secs(row.try_get::<i64, _>(2)?.unsigned_abs()),
    })
}

/// Insert, warnings, rows, bounds of ages, whether any key is blocked at all, and savepoint in one
/// packet. The text contains only numbers and hexadecimal digits from outside.
///
/// It is short: with TLS, what is longer than 16 KiB goes out in two pieces. The second one waits
/// for the server to acknowledge the first, 40 ms on Linux, because sqlx leaves Nagle's algorithm
/// on. So the token and the time stand once, and the lanes are not in it.
fn admit_statements(consumer: ConsumerId, sorted: &[InboxEntry], token: [u8; 16], savepoint: &str) -> String {
    let (consumer, token) = (consumer.0, hex(&token));
    let value = |entry: &InboxEntry| {
        format!("({consumer},x'{}',x'{}',@oncebox_t,@oncebox_n)", hex(&entry.id.bytes()), hex(&entry.hash))
    };
    let values: Vec<String> = sorted.iter().map(value).collect();
    let ids: Vec<String> = sorted.iter().map(|entry| format!("x'{}'", hex(&entry.id.bytes()))).collect();
    format!(
        "set @oncebox_t = x'{token}', @oncebox_n = utc_timestamp(6); \
         insert ignore into oncebox_inbox (consumer_id, message_id, content_hash, batch_token, received_at) values {}; \
         show count(*) warnings; show warnings; \
         select message_id, content_hash, batch_token, timestampdiff(microsecond, '1970-01-01', received_at), {} \
            from oncebox_inbox where consumer_id = {consumer} and message_id in ({}); \
         select timestampdiff(microsecond, '1970-01-01', c.purged_below), timestampdiff(microsecond, '1970-01-01', utc_timestamp(6)), \
            cast((select value from oncebox_limits where name = 'id_skew_seconds') as signed), \
            exists (select 1 from oncebox_waiting w where w.consumer_id = {consumer} and w.lane_id is not null) \
            from oncebox_consumer c where c.consumer_id = {consumer}; \
         savepoint {savepoint}",
        values.join(","),
        ServerSession::COLUMNS,
        ids.join(",")
    )
}

/// Checks for one warning per existing row, and none of another kind (R24). A server keeps only the
/// first warnings (`max_error_count`), but counts them all.
fn only_duplicates(entries: usize, inserted: u64, warned: &Answer, warnings: &Answer) -> Result<(), StoreError> {
    for row in &warnings.rows {
        let code = row.try_get_unchecked::<i64, _>("Code")?;
        if code != DUPLICATE {
            let message: String = row.try_get_unchecked("Message")?;
            return Err(StoreError::Corrupt(format!("the inbox answered with a warning: {code} {message}")));
        }
    }
    let count = match warned.rows.first() {
        Some(row) => row.try_get_unchecked::<i64, _>(0)?,
        None => return Err(StoreError::Corrupt("the server does not count its warnings".to_owned())),
    };
    let known = i64::try_from(entries).unwrap_or(i64::MAX) - i64::try_from(inserted).unwrap_or(i64::MAX);
    if count != known {
        return Err(StoreError::Corrupt(format!(
            "the inbox knew {known} of {entries} messages, but answered with {count} warnings"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_packet_of_a_batch_of_a_hundred_is_one_record_of_tls() {
        let entries: Vec<_> = (0..100).map(|_| InboxEntry { id: MessageId::new(), hash: [7; 16] }).collect();
        let text = admit_statements(ConsumerId(i32::MAX), &entries, [7; 16], &savepoint_name());
        assert!(text.len() < 1 << 14, "{}", text.len());
    }

    // Shown to fail by comparing only the uptime: after a failover to a replica that had been up
    // for months, `kill` hit another connection with the same number.
    #[test]
    fn a_connection_of_another_server_or_of_before_a_restart_is_not_looked_for() {
        let session = ServerSession { id: 7, server: "db1/3306/1".to_owned() };
        let (long, short) = (Duration::from_secs(9_000), Duration::from_secs(3));
        assert!(!session.is_of_another("db1/3306/1", long, short));
        assert!(session.is_of_another("db1/3306/1", short, long), "the server began later");
        for other in ["db2/3306/1", "db1/3307/1", "db1/3306/2"] {
            assert!(session.is_of_another(other, long, short), "{other}");
        }
    }
}
