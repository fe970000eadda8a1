//! What a relay asks of the outbox, where the databases differ in words only.
//!
//! Not here: the read, the checkpoint and the mark, which are each database's own.

use std::time::Duration;

use uuid::Uuid;

use super::audit::{self, Act};
use super::{Row, Session, SqlStore, Statement, Value, foreign, sql};
use crate::error::StoreError;
use crate::operator::ActContext;
use crate::outbox::port::{Diversion, DivertedRow, LeaseAnswer, LeaseRequest, OperatorRequest};
use crate::time::db_time::DbTime;
use crate::time::lease::{Fence, Lease};

/// The buckets of a database that has one shard only.
#[cfg(any(feature = "mysql", feature = "sqlite"))]
pub(in crate::store) const ALL_BUCKETS: (i64, i64) = (0, 255);

/// Dead and held rows without their messages. Dead rows that hold nothing are left out. SQLite has
/// state and cause in one column: `dead`, `held-behind`, `held-destination`.
const DIVERTED: &str = "\
select position, topic, {key}, {pg my: cause}{lite: case state when 'dead' then 'refused' else substr(state, 6) end}, reason, holds \
  from oncebox.outbox_dead \
 where {pg: bucket between :from and :to and }(state <> 'dead' or holds) order by position limit :limit";

/// Requests of operators that are still to be carried out.
const REQUESTS: &str = "\
select position, topic, {key}, requested from oncebox.outbox_dead \
 where {pg lite: requested is not null}{my: requested in ('redrive', 'discard')} \
   {pg: and bucket between :from and :to} and position > :after order by position limit :limit";

/// The row is locked by a statement of its own. On MySQL a statement that waited for a lock still
/// uses the time at which it began, so a lease taken meanwhile would seem to end later than its
/// full length from "now", and would count as expired (R22).
const LOCK: &str = "select shard_id from oncebox.shard where shard_id = :shard {lock}";

const LEASE: &str = "\
select epoch, revision, scanned_to, owner, {age lease_until}, \
       {my: cast(lease_seconds * 1000000 as signed)}{lite: lease_length * 1000} \
  from oncebox.shard where shard_id = :shard";

const TAKE: &str = "\
update oncebox.shard set epoch = epoch + 1, revision = revision + 1, owner = :owner, \
       {my: lease_seconds}{lite: lease_length} = {lease :length}, lease_until = {now} + {span :length} \
 where shard_id = :shard";

/// Takes the lease on MySQL and SQLite; its own owner gets it again at once. Returns the new fence
/// and the cursor, or the answer that another owner has the lease or that there is no such shard.
pub(in crate::store) async fn take(
    store: &dyn SqlStore,
    request: &LeaseRequest,
) -> Result<Result<(Fence, i64), LeaseAnswer>, StoreError> {
    let of = |text| sql(text).bind("shard", request.shard);
    let mut transaction = store.begin_sql().await?;
    let session = transaction.session();
    if session.rows(of(LOCK)).await?.is_empty() {
        transaction.rollback().await?;
        return Ok(Err(LeaseAnswer::NoShard));
    }
    let row = session.only(of(LEASE)).await?;
    let fence = Fence { epoch: row.get::<i64>(0)? + 1, revision: row.get::<i64>(1)? + 1 };
    let (scanned_to, age): (i64, Option<i64>) = (row.get(2)?, row.get_opt(4)?);
    // Times are counted from the database's now.
    let (now, length) = (DbTime { micros: 0 }, Duration::from_micros(row.get_opt(5)?.unwrap_or(0)));
    let lease = Lease { until: DbTime { micros: -age.unwrap_or(0) }, length };
    let other = row.get_opt::<String>(3)?.filter(|owner| *owner != request.owner && !lease.is_expired(now));
    if let Some(owner) = other {
        transaction.rollback().await?;
        return Ok(Err(LeaseAnswer::HeldBy { owner, left: lease.remaining(now) }));
    }
    session.run(of(TAKE).bind("owner", &request.owner).bind("length", request.length)).await?;
    transaction.commit().await?;
    Ok(Ok((fence, scanned_to)))
}

const RELEASE: &str = "\
update oncebox.shard set revision = revision + 1, owner = null, lease_until = {pg my: null, lease_seconds = null}{lite: 0} \
 where shard_id = :shard and epoch = :epoch and revision = :revision";

/// The statement that gives the lease of a shard back. It changes no row where another owner wrote.
pub(in crate::store) fn release(shard: i32, fence: Fence) -> Statement {
    sql(RELEASE).bind("shard", shard).bind("epoch", fence.epoch).bind("revision", fence.revision)
}

/// A dead message after `:skipped` others, if there are so many. It reads entries of an index. With
/// this order PostgreSQL reads that index, because any other plan would have to sort all rows.
pub(in crate::store) const HAS_DEAD: &str = "\
select 1 from oncebox.outbox_dead {my: force index (outbox_dead_state)} \
 where {pg: state between 'dead' and 'dead' order by state, cause, position}{my lite: state = 'dead'} \
 limit 1 offset :skipped";

/// Whether at least so many messages of the outbox are dead.
pub(in crate::store) async fn has_dead(session: &mut dyn Session, rows: usize) -> Result<bool, StoreError> {
    Ok(!session.rows(sql(HAS_DEAD).bind("skipped", skipped(rows))).await?.is_empty())
}

/// The dead and held rows that hold others, or are held, in position order. On PostgreSQL those of
/// these buckets; the other databases have one shard.
pub(in crate::store) async fn diverted(
    session: &mut dyn Session,
    (from, to): (i64, i64),
    limit: usize,
) -> Result<Vec<DivertedRow>, StoreError> {
    let diverted = sql(DIVERTED).bind("from", from).bind("to", to).bind("limit", limit);
    let rows = session.rows(diverted).await?;
    rows.iter().map(|row| diverted_row(&**row)).collect()
}

fn diverted_row(row: &dyn Row) -> Result<DivertedRow, StoreError> {
    let reason: String = row.get_opt(4)?.unwrap_or_default();
    let diversion = match row.get::<String>(3)?.as_str() {
        "refused" => Diversion::Dead { reason, holds: row.get(5)? },
        "behind" => Diversion::HeldBehind,
        "destination" => Diversion::HeldDestination { reason },
        other => return Err(StoreError::Corrupt(format!("a dead or held row has the cause `{other}`"))),
    };
    Ok(DivertedRow { position: row.get(0)?, topic: row.get(1)?, key: row.get_opt(2)?, diversion })
}

/// State, cause, reason, and whether later rows of its key are held: what [`diverted`] reads back.
pub(in crate::store) fn columns(diversion: &Diversion) -> (&'static str, &'static str, Option<&str>, bool) {
    match diversion {
        Diversion::Dead { reason, holds } => ("dead", "refused", Some(reason.as_str()), *holds),
        Diversion::HeldBehind => ("held", "behind", None, false),
        Diversion::HeldDestination { reason } => ("held", "destination", Some(reason.as_str()), false),
    }
}

/// The first requests of operators beyond a position, about rows of these buckets, in position
/// order.
pub(in crate::store) async fn requests(
    session: &mut dyn Session,
    (from, to): (i64, i64),
    after: i64,
    limit: usize,
) -> Result<Vec<OperatorRequest>, StoreError> {
    let requests = sql(REQUESTS).bind("from", from).bind("to", to).bind("after", after).bind("limit", limit);
    let rows = session.rows(requests).await?;
    rows.iter().map(|row| request(&**row)).collect()
}

fn request(row: &dyn Row) -> Result<OperatorRequest, StoreError> {
    let discard = match row.get::<String>(3)?.as_str() {
        "redrive" => false,
        "discard" => true,
        other => return Err(StoreError::Corrupt(format!("a dead or held row has the request `{other}`"))),
    };
    Ok(OperatorRequest { position: row.get(0)?, topic: row.get(1)?, key: row.get_opt(2)?, discard })
}

const TO_DISCARD: &str = "\
select position, {pg my: message_id}{lite: unhex(replace(message_id, '-', ''))}, topic from oncebox.outbox_dead \
 where position {in ints :positions} and requested = 'discard'";

/// Messages that were sent although an operator asked to discard them: position and id.
#[derive(Debug, Default)]
pub(in crate::store) struct SentNotDiscarded(Vec<(i64, Uuid)>);

/// Finds released rows whose discard was asked for too late, and writes an audit row for each.
/// Without it the audit would only say `discard`. Call it in the transaction of the mark, while
/// these rows are still there. Before it, the other released rows must be deleted or locked, so
/// that none of them can still get such a request.
pub(in crate::store) async fn sent_not_discarded(
    session: &mut dyn Session,
    released: &[i64],
) -> Result<SentNotDiscarded, StoreError> {
    let asked = sql(TO_DISCARD).bind("positions", Value::Ints(released.to_vec()));
    let context =
        ActContext { actor: "relay".to_owned(), reason: SENT.to_owned(), dry_run: false, redrive_age_max: None };
    let mut sent = Vec::new();
    for row in session.rows(asked).await? {
        let (position, message_id, topic): (i64, Uuid, String) = (row.get(0)?, row.get(1)?, row.get(2)?);
        let act = Act {
            name: "release",
            place: foreign("outbox"),
            topic: Some(&topic),
            number: &format!("o{position}"),
            message_id,
            new_id: None,
            detail: "sent, not discarded".to_owned(),
            document: serde_json::json!({ "outcome": "sent, not discarded" }),
        };
        audit::write(session, act, &context).await?;
        sent.push((position, message_id));
    }
    Ok(SentNotDiscarded(sent))
}

/// Whether a statement about so many rows found each of them.
pub(in crate::store) fn are_all(found: u64, rows: usize) -> bool {
    usize::try_from(found) == Ok(rows)
}

/// Fails where a mark did not find each row that it diverts or changes: the broker has not taken
/// that message, and it would be lost.
pub(in crate::store) fn check_all(found: u64, rows: &[(i64, Diversion)]) -> Result<(), StoreError> {
    if are_all(found, rows.len()) {
        return Ok(());
    }
    let positions: Vec<i64> = rows.iter().map(|(position, _)| *position).collect();
    Err(StoreError::Corrupt(format!("of the messages at {positions:?} only {found} are still where they were read")))
}

/// Why an operator's discard had no effect, for audit and log.
const SENT: &str = "sent before its discard could be carried out";

impl SentNotDiscarded {
    /// Says so in the log. To be called once the mark is committed.
    pub(in crate::store) fn warn(self) {
        for (position, id) in self.0 {
            tracing::warn!(position, %id, "a message was {SENT}: the broker has it");
        }
    }
}

/// How many rows to skip, so that the next one shows that there are at least so many.
pub(super) fn skipped(rows: usize) -> i64 {
    i64::try_from(rows.saturating_sub(1)).unwrap_or(i64::MAX).min(i64::MAX - 1)
}
