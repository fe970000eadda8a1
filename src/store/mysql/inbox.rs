//! The inbox and the transaction around a handler.
//!
//! Guarantees:
//!
//! * What is new is decided by the unique key of fixed binary values and told by a random token of the batch (R24); a server that
//!   shortens or changes a value under `insert ignore` is found out by reading every row back, and by its warnings.
//! * The connection of a handler has `autocommit = 0`: after DDL, a raw COMMIT, a second START TRANSACTION or a swallowed deadlock
//!   the next statements still stand in a transaction that we roll back. A savepoint of a random name, set after the insert, must
//!   release without error: it lives exactly as long as the transaction (R23).
//!
//! Not here: waiting messages ([`super::waiting`]), but for what happens to them inside the handler's transaction.

mod purge;

use std::collections::{HashMap, HashSet};
use std::ops::ControlFlow;
use std::time::Duration;

use sqlx::mysql::{MySqlQueryResult, MySqlRow};
use sqlx::{AssertSqlSafe, Either, MySql, MySqlConnection, Row, raw_sql};

use super::schema::number;
use super::{HISTORY_MAX, MySqlStore, START, hex, hex_list, shortened, sixteen, token, waiting};
use crate::error::StoreError;
use crate::message::MessageId;
use crate::policy::db_time::DbTime;
use crate::policy::horizon::Bounds;
use crate::store::bounded::{Ask, Bounded, BoundedPool};
use crate::store::{
    Admission, ClaimedMessage, ConsumerId, ConsumerSpec, Inbox, InboxEntry, InboxTx, Known, Parked, Proof, Purged,
    Standing,
};

/// `autocommit = 0` until the connection is back in the pool, which sets it up anew.
pub(super) const START_HANDLER: &str = "set session autocommit = 0; start transaction";

/// A row of the inbox was there already.
const DUPLICATE: u16 = 1062;
/// There is no such savepoint: the transaction it stood in has ended.
pub(super) const NO_SAVEPOINT: u16 = 1305;

/// The transaction around a handler.
#[derive(Debug)]
pub struct MySqlInboxTx {
    transaction: Bounded<MySql>,
    /// To ask about `transaction` where it does not answer.
    pool: BoundedPool<MySql>,
    consumer: ConsumerId,
    token: [u8; 16],
    savepoint: Option<String>,
    /// As the server counts connections.
    connection_id: Option<u64>,
    /// When our rows were received.
    received: Option<DbTime>,
}

/// Whether the server works for this connection, and waits neither for us to ask nor to listen.
const WORKS: &str = "\
select count(*) from information_schema.processlist \
 where id = ? and command <> 'Sleep' and coalesce(state, '') not in ('Writing to net', 'Sending to client', 'Reading from net')";

impl Inbox for MySqlStore {
    type Tx = MySqlInboxTx;

    async fn register(&self, spec: &ConsumerSpec) -> Result<ConsumerId, StoreError> {
        let inserted = sqlx::query(
            "insert into oncebox_consumer (name, id_rule, registered_at, purged_below) values (?, ?, utc_timestamp(6), null)",
        )
        .bind(spec.name.as_bytes())
        .bind(&spec.id_rule)
        .run(&self.pool)
        .await;
        match inserted {
            Ok(_) => {}
            Err(error) if number(&error) == Some(DUPLICATE) => {}
            Err(error) => return Err(error.into()),
        }
        let mut transaction = self.pool.begin(START).await?;
        let found = sqlx::query("select consumer_id, id_rule from oncebox_consumer where name = ? for update")
            .bind(spec.name.as_bytes())
            .one(&mut transaction)
            .await?;
        let (id, id_rule): (i32, String) = (found.try_get("consumer_id")?, found.try_get("id_rule")?);
        if id_rule != spec.id_rule {
            if !spec.accept {
                return Err(StoreError::Refused(format!(
                    "the consumer `{}` has taken its ids from `{id_rule}` so far, not `{}`: the same message would run again \
                     under another id; pass `--accept` if this is wanted",
                    spec.name, spec.id_rule
                )));
            }
            sqlx::query("update oncebox_consumer set id_rule = ? where consumer_id = ?")
                .bind(&spec.id_rule)
                .bind(id)
                .run(&mut transaction)
                .await?;
        }
        transaction.commit().await?;
        Ok(ConsumerId(id))
    }

    async fn begin(&self, consumer: ConsumerId) -> Result<MySqlInboxTx, StoreError> {
        let (transaction, pool) = (self.pool.begin(START_HANDLER).await?, self.pool.clone());
        let (savepoint, connection_id, received) = (None, None, None);
        Ok(MySqlInboxTx { transaction, pool, consumer, token: token(), savepoint, connection_id, received })
    }

    async fn known(&self, consumer: ConsumerId, ids: &[MessageId]) -> Result<HashSet<MessageId>, StoreError> {
        if ids.is_empty() {
            return Ok(HashSet::new());
        }
        let found = sqlx::query_scalar(
            "select i.message_id from json_table(?, '$[*]' columns (id varchar(32) path '$')) j \
             straight_join oncebox_inbox i force index (primary) on i.consumer_id = ? and i.message_id = unhex(j.id)",
        )
        .bind(id_list(ids))
        .bind(consumer.0)
        .all(&self.pool)
        .await?;
        Ok(found.into_iter().map(MessageId::from_uuid).collect())
    }

    async fn bounds(&self, consumer: ConsumerId) -> Result<Bounds, StoreError> {
        Ok(standing(&mut self.pool.acquire().await?, consumer, &[]).await?.bounds)
    }

    async fn purge(
        &self,
        consumer: ConsumerId,
        below: DbTime,
        after: Option<MessageId>,
        rows_max: usize,
    ) -> Result<Purged, StoreError> {
        purge::step(&self.pool, consumer, below, after, rows_max).await
    }

    async fn begin_attempt(&self, consumer: ConsumerId, id: MessageId) -> Result<u32, StoreError> {
        self.attempt(consumer, id, true, None).await
    }

    async fn take_back_attempt(&self, consumer: ConsumerId, id: MessageId) -> Result<(), StoreError> {
        // A row that says nothing any more goes: only the success of a counted try would delete it.
        for statement in [
            "update oncebox_attempt set attempts = attempts - 1, updated_at = utc_timestamp(6) \
             where consumer_id = ? and message_id = ? and attempts > 0",
            "delete from oncebox_attempt where consumer_id = ? and message_id = ? and attempts = 0 and json_length(history) = 0",
        ] {
            sqlx::query(statement).bind(consumer.0).bind(id.uuid()).run(&self.pool).await?;
        }
        Ok(())
    }

    async fn failed_attempt(
        &self,
        consumer: ConsumerId,
        id: MessageId,
        error: &str,
        counted: bool,
    ) -> Result<u32, StoreError> {
        self.attempt(consumer, id, counted, Some(error)).await
    }

    async fn attempts(&self, consumer: ConsumerId, ids: &[MessageId]) -> Result<Vec<(MessageId, u32)>, StoreError> {
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let found = sqlx::query_as(
            "select a.message_id, a.attempts from json_table(?, '$[*]' columns (id varchar(32) path '$')) j \
             straight_join oncebox_attempt a force index (primary) on a.consumer_id = ? and a.message_id = unhex(j.id) where a.attempts > 0",
        )
        .bind(id_list(ids))
        .bind(consumer.0)
        .all(&self.pool)
        .await?;
        Ok(found.into_iter().map(|(id, attempts)| (MessageId::from_uuid(id), attempts)).collect())
    }

    async fn open_assignment(&self, consumer: ConsumerId, topic: &str, partition: i32) -> Result<bool, StoreError> {
        let mut transaction = self.pool.begin(START).await?;
        // The insert decides who is first; whoever is second waits for its lock and sees what the first one wrote.
        let inserted = sqlx::query(
            "insert into oncebox_assignment (consumer_id, topic, partition_no, state, changed_at) \
             values (?, ?, ?, 'open', utc_timestamp(6))",
        )
        .bind(consumer.0)
        .bind(topic.as_bytes())
        .bind(partition)
        .run(&mut transaction)
        .await;
        let was_open = match inserted {
            Ok(_) => false,
            Err(error) if number(&error) == Some(DUPLICATE) => {
                let state: String = sqlx::query_scalar(
                    "select state from oncebox_assignment where consumer_id = ? and topic = ? and partition_no = ? for update",
                )
                .bind(consumer.0)
                .bind(topic.as_bytes())
                .bind(partition)
                .one(&mut transaction)
                .await?;
                set_assignment(&mut transaction, consumer, topic, partition, "open").await?;
                state == "open"
            }
            Err(error) => return Err(error.into()),
        };
        transaction.commit().await?;
        Ok(was_open)
    }

    async fn close_assignment(&self, consumer: ConsumerId, topic: &str, partition: i32) -> Result<(), StoreError> {
        set_assignment(&mut self.pool.acquire().await?, consumer, topic, partition, "closed").await
    }
}

impl MySqlStore {
    async fn attempt(
        &self,
        consumer: ConsumerId,
        id: MessageId,
        counts: bool,
        error: Option<&str>,
    ) -> Result<u32, StoreError> {
        let mut transaction = self.pool.begin(START).await?;
        sqlx::query(
            "insert into oncebox_attempt (consumer_id, message_id, attempts, history, updated_at) \
             values (?, ?, ?, '[]', utc_timestamp(6)) \
             on duplicate key update attempts = attempts + ?, updated_at = utc_timestamp(6)",
        )
        .bind(consumer.0)
        .bind(id.uuid())
        .bind(u32::from(counts))
        .bind(u32::from(counts))
        .run(&mut transaction)
        .await?;
        if let Some(error) = error {
            sqlx::query(
                "update oncebox_attempt set history = json_array_append( \
                   if(json_length(history) >= ?, json_remove(history, '$[0]'), history), '$', json_object( \
                     'at', date_format(utc_timestamp(6), '%Y-%m-%dT%H:%i:%s.%fZ'), 'attempt', attempts, 'error', ?)) \
                 where consumer_id = ? and message_id = ?",
            )
            .bind(HISTORY_MAX)
            .bind(shortened(error))
            .bind(consumer.0)
            .bind(id.uuid())
            .run(&mut transaction)
            .await?;
        }
        let attempts =
            sqlx::query_scalar("select attempts from oncebox_attempt where consumer_id = ? and message_id = ?")
                .bind(consumer.0)
                .bind(id.uuid())
                .one(&mut transaction)
                .await?;
        transaction.commit().await?;
        Ok(attempts)
    }
}

async fn set_assignment(
    connection: &mut Bounded<MySql>,
    consumer: ConsumerId,
    topic: &str,
    partition: i32,
    state: &str,
) -> Result<(), StoreError> {
    sqlx::query(
        "update oncebox_assignment set state = ?, changed_at = utc_timestamp(6) \
         where consumer_id = ? and topic = ? and partition_no = ?",
    )
    .bind(state)
    .bind(consumer.0)
    .bind(topic.as_bytes())
    .bind(partition)
    .run(connection)
    .await?;
    Ok(())
}

fn id_list(ids: &[MessageId]) -> String {
    let ids: Vec<[u8; 16]> = ids.iter().map(|id| id.bytes()).collect();
    hex_list(ids.iter().map(<[u8; 16]>::as_slice))
}

impl InboxTx for MySqlInboxTx {
    type Db = MySql;

    fn connection(&mut self) -> &mut MySqlConnection {
        self.transaction.plain()
    }

    async fn admit(&mut self, entries: &[InboxEntry]) -> Result<Admission, StoreError> {
        if entries.is_empty() {
            self.set_savepoint().await?;
            return Ok(Admission { known: Vec::new() });
        }
        // Sorted: two batches with the same ids wait for each other instead of deadlocking.
        let mut sorted = entries.to_vec();
        sorted.sort_unstable_by_key(|entry| entry.id);
        let savepoint = savepoint_name();
        let answers = self.run_all(admit_statements(self.consumer, &sorted, self.token, &savepoint)).await?;
        let [inserted, warned, warnings, rows, _] = answers.as_slice() else {
            let count = answers.len();
            return Err(StoreError::Corrupt(format!("five statements of the inbox gave {count} answers")));
        };
        self.savepoint = Some(savepoint);
        self.connection_id = rows.rows.first().map(|row| row.try_get(4)).transpose()?;
        only_duplicates(entries.len(), inserted.changed, warned, warnings)?;

        let mut found = HashMap::with_capacity(rows.rows.len());
        for row in &rows.rows {
            let id: uuid::Uuid = row.try_get(0)?;
            let hash = sixteen("content_hash", row.try_get::<&[u8], _>(1)?)?;
            let is_new = row.try_get::<&[u8], _>(2)? == self.token;
            if is_new {
                self.received = Some(DbTime::from_micros(row.try_get(3)?));
            }
            found.insert(MessageId::from_uuid(id), (hash, is_new));
        }
        let answer = |entry: &InboxEntry| match found.get(&entry.id) {
            Some((hash, true)) if *hash == entry.hash => Ok(None),
            Some((hash, false)) => Ok(Some(Known { hash: *hash })),
            Some(_) => Err(StoreError::Corrupt(format!("the inbox changed the content hash of {}", entry.id))),
            // The row that made it a duplicate was purged in between: nobody's failure, the batch comes again.
            None => Err(StoreError::Busy(sqlx::Error::Protocol(format!("the inbox row of {} went away", entry.id)))),
        };
        Ok(Admission { known: entries.iter().map(answer).collect::<Result<_, _>>()? })
    }

    async fn standing(&mut self, lanes: &[[u8; 16]]) -> Result<Standing, StoreError> {
        let mut standing = standing(&mut self.transaction, self.consumer, lanes).await?;
        if let Some(received) = self.received {
            standing.bounds.now = received;
        }
        Ok(standing)
    }

    async fn park(&mut self, parked: &[Parked]) -> Result<(), StoreError> {
        waiting::park(&mut self.transaction, self.consumer, parked).await
    }

    async fn forget(&mut self, ids: &[MessageId]) -> Result<(), StoreError> {
        if ids.is_empty() {
            return Ok(());
        }
        sqlx::query(
            "delete i from json_table(?, '$[*]' columns (id varchar(32) path '$')) j \
             straight_join oncebox_inbox i force index (primary) on i.consumer_id = ? and i.message_id = unhex(j.id) where i.batch_token = ?",
        )
        .bind(id_list(ids))
        .bind(self.consumer.0)
        .bind(self.token.as_slice())
        .run(&mut self.transaction)
        .await?;
        Ok(())
    }

    async fn finish(&mut self, claimed: &ClaimedMessage) -> Result<bool, StoreError> {
        let finished = waiting::finish(&mut self.transaction, self.consumer, claimed).await?;
        self.set_savepoint().await?;
        Ok(finished)
    }

    async fn clear_attempts(&mut self, ids: &[MessageId]) -> Result<(), StoreError> {
        if ids.is_empty() {
            return Ok(());
        }
        sqlx::query(
            "delete a from json_table(?, '$[*]' columns (id varchar(32) path '$')) j \
             straight_join oncebox_attempt a force index (primary) on a.consumer_id = ? and a.message_id = unhex(j.id)",
        )
        .bind(id_list(ids))
        .bind(self.consumer.0)
        .run(&mut self.transaction)
        .await?;
        Ok(())
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

    async fn is_lost(&mut self) -> bool {
        let works = async {
            let mut other = self.pool.fresh().await?;
            let works: sqlx::Result<i64> = sqlx::query_scalar(WORKS).bind(self.connection_id).one(&mut other).await;
            other.close().await;
            works
        };
        let is_lost = match works.await {
            Ok(works) => works == 0,
            Err(error) => StoreError::from(error).is_nobodys(),
        };
        if is_lost {
            self.transaction.give_up();
        }
        is_lost
    }

    async fn commit(mut self) -> Result<(), StoreError> {
        self.transaction.commit().await
    }

    async fn rollback(mut self) -> Result<(), StoreError> {
        self.transaction.rollback().await.map_err(StoreError::from)
    }
}

/// What one of several statements in a packet gave.
struct Answer {
    rows: Vec<MySqlRow>,
    changed: u64,
}

impl MySqlInboxTx {
    /// Once a transaction: what was written before it is proven with it.
    async fn set_savepoint(&mut self) -> Result<(), StoreError> {
        if self.savepoint.is_none() {
            let name = savepoint_name();
            let set = raw_sql(AssertSqlSafe(format!("savepoint {name}; select connection_id()")));
            self.connection_id = Some(set.one(&mut self.transaction).await?.try_get(0)?);
            self.savepoint = Some(name);
        }
        Ok(())
    }

    /// Several statements in one packet, and what each gave.
    async fn run_all(&mut self, statements: String) -> Result<Vec<Answer>, StoreError> {
        let mut answers = Vec::new();
        let mut rows = Vec::new();
        let take = |part: Either<MySqlQueryResult, MySqlRow>| {
            match part {
                Either::Left(done) => {
                    answers.push(Answer { rows: std::mem::take(&mut rows), changed: done.rows_affected() });
                }
                Either::Right(row) => rows.push(row),
            }
            ControlFlow::Continue(())
        };
        self.transaction.parts(raw_sql(AssertSqlSafe(statements)), take).await?;
        Ok(answers)
    }
}

/// The blocked ones of some lanes, and what ages are judged by.
async fn standing(
    connection: &mut Bounded<MySql>,
    consumer: ConsumerId,
    lanes: &[[u8; 16]],
) -> Result<Standing, StoreError> {
    let rows = sqlx::query(
        "select b.purged, b.now, b.skew, l.lane from \
           (select timestampdiff(microsecond, '1970-01-01', c.purged_below) as purged, \
                   timestampdiff(microsecond, '1970-01-01', utc_timestamp(6)) as now, \
                   cast((select value from oncebox_limits where name = 'id_skew_seconds') as signed) as skew \
              from oncebox_consumer c where c.consumer_id = ?) b \
         left join (select unhex(j.lane) as lane from json_table(?, '$[*]' columns (lane varchar(32) path '$')) j \
           where (select w.sequence from oncebox_waiting w where w.consumer_id = ? and w.lane = unhex(j.lane) limit 1) is not null) l \
           on true",
    )
    .bind(consumer.0)
    .bind(hex_list(lanes.iter().map(<[u8; 16]>::as_slice)))
    .bind(consumer.0)
    .all(connection)
    .await?;
    let first = rows.first().ok_or_else(|| StoreError::Corrupt(format!("there is no consumer {}", consumer.0)))?;
    let bounds = Bounds {
        purged_below: first.try_get::<Option<i64>, _>(0)?.map(DbTime::from_micros),
        now: DbTime::from_micros(first.try_get(1)?),
        id_skew: Duration::from_secs(first.try_get::<i64, _>(2)?.unsigned_abs()),
    };
    let lanes = rows.iter().filter_map(|row| row.try_get::<Option<&[u8]>, _>(3).transpose());
    let blocked = lanes.map(|lane| sixteen("lane", lane?)).collect::<Result<_, _>>()?;
    Ok(Standing { blocked, bounds })
}

/// A name that no handler can have by chance.
pub(super) fn savepoint_name() -> String {
    format!("oncebox_{}", hex(&token()))
}

/// Insert, warnings, rows and savepoint in one packet. Nothing but numbers and hexadecimal digits goes into the text.
fn admit_statements(consumer: ConsumerId, sorted: &[InboxEntry], token: [u8; 16], savepoint: &str) -> String {
    let (consumer, token) = (consumer.0, hex(&token));
    let value = |entry: &InboxEntry| {
        format!("({consumer},x'{}',x'{}',x'{token}',utc_timestamp(6))", hex(&entry.id.bytes()), hex(&entry.hash))
    };
    let values: Vec<String> = sorted.iter().map(value).collect();
    let ids: Vec<String> = sorted.iter().map(|entry| format!("x'{}'", hex(&entry.id.bytes()))).collect();
    format!(
        "insert ignore into oncebox_inbox (consumer_id, message_id, content_hash, batch_token, received_at) values {}; \
         show count(*) warnings; show warnings; \
         select message_id, content_hash, batch_token, timestampdiff(microsecond, '1970-01-01', received_at), connection_id() \
            from oncebox_inbox where consumer_id = {consumer} and message_id in ({}); \
         savepoint {savepoint}",
        values.join(","),
        ids.join(",")
    )
}

/// One warning for each row that was there, and none of another kind (R24). A server keeps only the first of many warnings
/// (`max_error_count`), but counts them all.
fn only_duplicates(entries: usize, inserted: u64, warned: &Answer, warnings: &Answer) -> Result<(), StoreError> {
    for row in &warnings.rows {
        let code = row.try_get_unchecked::<i64, _>("Code")?;
        if code != i64::from(DUPLICATE) {
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
