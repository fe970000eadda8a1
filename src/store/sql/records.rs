//! Idempotency records on every database.
//!
//! Guarantees: before a change that depends on evidence, a statement of its own locks the record.
//! So the change sees everything that was committed until then, and the current time. Every change
//! compares the epoch that was read before (O4).
//!
//! Not here: the transaction of a claim and, on PostgreSQL, its statement; the outcome (`outcome`,
//! and in the folder of PostgreSQL); the purge (`expiry`).

use std::time::Duration;

use async_trait::async_trait;
use uuid::Uuid;

use super::forgotten::forget_former;
use super::{Row, Session, SqlStore, Statement, Transaction, evidence, expiry, live, sql};
use crate::error::StoreError;
use crate::operation::port::evidence::{NewEvidence, StoredEvidence};
use crate::operation::port::stored::{body_of, corrupt, unpack};
use crate::operation::port::{
    Basis, Fenced, KeptBody, KeyClaim, Keys, Look, OperationStats, Owned, RecordFence, RunOutcome,
};
use crate::operation::rules::record::{Resource, StoredAnswer, StoredBody};
use crate::operation::rules::retention::Retention;
use crate::operation::rules::route::Durability;
use crate::operation::rules::versions::Versions;
use crate::operation::rules::{Identity, Mode, OperationName, Record, State};
use crate::store::base::Base;
use crate::time::db_time::{DbTime, micros_of};
use crate::time::lease::Lease;

/// The record of a key, as [`look_of`] reads it, and its body where that is in the row.
const FIND: &str = "select {piece look}\
    {pg my: , r.body_headers, r.body_bytes, r.body_format, r.body_kid}{lite: , null, null, null, null} from (select {clock} as at) as n \
    left join oncebox.idempotency_purge as p on p.operation = :operation \
    left join oncebox.idempotency_request as r on r.key_digest = :digest \
    left join oncebox.operation as o on r.mode = 'phased' and o.operation_id = r.operation_id";

const BODY: &str = "{pg my: select body_headers, body_bytes, body_format, body_kid from oncebox.idempotency_request \
      where key_digest = :digest and epoch = :epoch and body_expires_at > {now} and body_format is not null \
    union all }\
    select b.headers, b.bytes, b.format, b.kid from oncebox.idempotency_request as r \
      join oncebox.idempotency_body as b on b.key_digest = r.key_digest and b.epoch = r.epoch \
        {pg: and b.expires_at = r.body_expires_at} \
     where r.key_digest = :digest and r.epoch = :epoch and r.body_expires_at > {now}";

/// Locks the row by a statement of its own. The next statement sees what was committed until then,
/// and the current time; a statement that waited for the lock itself would not.
const LOCK: &str = "select epoch from oncebox.idempotency_request where key_digest = :digest {lock}";

const HEARTBEAT: &str = "update oncebox.idempotency_request \
    set lease_until = {clock} + {span :lease}, {lease} = {lease :lease}, updated_at = {clock} \
    where key_digest = :digest and epoch = :epoch and owner = :owner and state = 'IN_PROGRESS'";

const RELEASE: &str = "delete from oncebox.idempotency_request \
    where key_digest = :digest and epoch = :epoch and owner = :owner and state = 'IN_PROGRESS' and {piece no late end}";

const MARK_UNKNOWN: &str = "update oncebox.idempotency_request \
    set state = 'UNKNOWN_REQUIRES_RECOVERY', epoch = epoch + 1, owner = null, lease_until = null, \
      {lease} = null, updated_at = {clock} \
    where key_digest = :digest and epoch = :epoch and state = 'IN_PROGRESS' \
      and (mode = 'same_tx' or (mode = 'edge' and {piece lease is over}))";

/// Open records of one operation, state and mode for which a condition holds, the longest unchanged
/// first. An index has its entries in this order, so reading ends at the limit, however many
/// records are open. PostgreSQL does not count `is null` among equalities: it sorts unless the
/// order names that column too.
macro_rules! open_of_mode {
    ($state:literal, $mode:literal, $holds:literal) => {
        concat!(
            "select * from (select key_digest, updated_at from oncebox.idempotency_request \
               {my: force index (idempotency_request_purge)}{lite: indexed by oncebox_idempotency_request_open} \
               where operation = :operation and outcome_at is null and state = '",
            $state,
            "' and mode = '",
            $mode,
            "' and ",
            $holds,
            " order by {pg: outcome_at, }updated_at limit :limit) as m"
        )
    };
}

/// The page is found first, among the records of the operation without an outcome. Each of its
/// records is then read by its key. It has abandoned claims; with `:unknown`, records whose outcome
/// is unknown and that are due to be asked for. Whoever asks changes the record, so the last change
/// is the last time that it was asked for. The pause after it is as long as the time from the claim
/// of the key to that change, within the bounds `:least` and `:most`. A page also reads records
/// that it does not return, but only such as run, or with `:unknown` changed within the longest
/// pause.
///
/// The record that was left alone for longest comes first: without an order the same records would
/// fill each page, and the others would never be reached. A change that lies ahead of the clock was
/// written before the clock went back; the distance counts in both directions, so that such a
/// record is not left alone until the clock has caught up (R22).
const OPEN_PAGE: &str = concat!(
    "{pg: /* planned anew */ }select {piece look} from (select {clock} as at) as n cross join \
    (select key_digest from ({unless unknown: ",
    open_of_mode!("IN_PROGRESS", "edge", "{piece lease is over}"),
    " union all ",
    open_of_mode!("IN_PROGRESS", "bridged", "{piece lease is over}"),
    " union all ",
    open_of_mode!("IN_PROGRESS", "same_tx", "true"),
    "}{if unknown: ",
    open_of_mode!(
        "UNKNOWN_REQUIRES_RECOVERY",
        "edge",
        "abs({age updated_at}) >= :least \
         and (abs({age updated_at}) >= {micros updated_at} - {micros created_at} or abs({age updated_at}) >= :most)"
    ),
    "}) as found order by updated_at limit :limit) as s \
    {my: straight_join}{pg: join}{lite: cross join} oncebox.idempotency_request as r on r.key_digest = s.key_digest \
    left join oncebox.idempotency_purge as p on p.operation = r.operation \
    left join oncebox.operation as o on r.mode = 'phased' and o.operation_id = r.operation_id \
    order by r.updated_at"
);

const OPEN_OF_TENANT: &str =
    "{pg: /* planned anew */ }select count(*) from {piece requests} where {piece open} and r.tenant = :tenant";

/// On MySQL the index of open records also has the records with an outcome: their first column is
/// null, then come state and tenant.
pub(in crate::store) const KEPT_OF_TENANT: &str = "select cast(coalesce(sum(kept_bytes), 0) as {my: signed}{pg lite: bigint}) \
    from oncebox.idempotency_request {my: force index (idempotency_request_open)} \
    where {my: open_since is null and state in ('COMPLETED', 'FAILED_REPLAYABLE') and }tenant = :tenant \
      and {pg lite: kept_bytes is not null and }body_expires_at > {now}";

const STATS: &str = "{pg: /* planned anew */ }select count(case when r.state = 'IN_PROGRESS' then 1 end), \
    {micros min(case when r.state = 'IN_PROGRESS' then r.{my: open_since}{pg lite: created_at} end)}, {micros {now}}, \
    count(case when r.state = 'UNKNOWN_REQUIRES_RECOVERY' then 1 end) from {piece requests} where {piece open}";

/// Claims a key that has no record; on MySQL a record that is there is an error. With `:at_once`,
/// which [`stake`] sets, it does not wait for a lock on MariaDB. MySQL has no such clause: there it
/// waits for the second to which the session's lock wait was set before (O17).
const INSERT: &str = "{if at_once: {my: /*M! set statement innodb_lock_wait_timeout = 0 for */ }}\
    insert into oncebox.idempotency_request (key_digest, tenant, operation, {key}, principal, fingerprint, mode, state, owner, \
      lease_until, {lease}, operation_id{my: , epoch, generation, attempts}{my lite: , created_at, updated_at}) \
    values (:digest, :tenant, :name, :key, :principal, :fingerprint, :mode, :state, :owner, \
      {clock} + {span :lease}, {lease :lease}, :operation{my: , 1, 1, 1}{my lite: , {clock}, {clock}}) \
    {pg lite: on conflict do nothing}";

/// Claims a record that was read before, where the condition still holds. `created_at` comes before
/// `outcome_at`, whose former value it needs: MySQL sets from left to right. With `:lock`, on
/// PostgreSQL, it also tries the advisory lock of the key, and returns the id of the transaction.
macro_rules! renew {
    ($holds:literal) => {
        concat!(
            "update oncebox.idempotency_request \
             set principal = :principal, fingerprint = :fingerprint, mode = :mode, state = 'IN_PROGRESS', epoch = :epoch, \
               owner = :owner, lease_until = {clock} + {span :lease}, {lease} = {lease :lease}, generation = :generation, \
               operation_id = :operation, attempts = :attempts, \
               created_at = case when outcome_at is null then created_at else {clock} end, updated_at = {clock}, \
               outcome_at = null, expires_at = null, answer_status = null, schema_version = null, body = null, \
               body_expires_at = null, {pg my: body_headers = null, body_bytes = null, body_format = null, body_kid = null,} \
               kept_bytes = null, resource_kind = null, resource_id = null, resource_location = null, error_code = null \
             where key_digest = :digest and epoch = :epoch - 1 and ",
            $holds,
            "{pg: {if lock: and (select pg_try_advisory_xact_lock(:lock)) returning pg_current_xact_id()::text}}"
        )
    };
}

/// A transaction of our own that can end a record.
#[async_trait]
pub(in crate::store) trait OutcomeTransaction: Transaction {
    /// Writes an outcome to a record, if the fence holds.
    async fn finish_record(
        &mut self,
        fence: &RecordFence,
        outcome: &RunOutcome,
        retention: &Retention,
    ) -> Result<Fenced, StoreError>;
}

/// The part of idempotency records that each database implements itself, under the promises of
/// [`Keys`].
#[async_trait]
pub(in crate::store) trait KeyStore: SqlStore + Base {
    /// A transaction of our own in which an outcome can be written.
    async fn begin_outcome(&self) -> Result<Box<dyn OutcomeTransaction>, StoreError>;

    /// Keeps the promises of [`Keys::finish`].
    async fn end_claim(
        &self,
        owned: &Owned,
        outcome: &RunOutcome,
        retention: &Retention,
    ) -> Result<Fenced, StoreError> {
        let mut transaction = self.begin_outcome().await?;
        let fenced = transaction.finish_record(&owned.into(), outcome, retention).await?;
        transaction.commit().await?;
        Ok(fenced)
    }

    /// Frees large bodies by their partitions, where the database has partitions, and returns how
    /// many it deleted otherwise.
    async fn free_bodies(&self, _limit: u32) -> Result<u64, StoreError> {
        Ok(0)
    }
}

#[async_trait]
impl<S: KeyStore> Keys for S {
    fn durability(&self) -> Durability {
        Durability::Durable
    }

    async fn sign_of_life(&self) -> Result<(), StoreError> {
        self.ping().await
    }

    fn connections_max(&self) -> Option<u32> {
        Some(self.pool().options().get_max_connections())
    }

    async fn find(&self, identity: &Identity) -> Result<Look, StoreError> {
        find(&mut *self.reader().await?, identity).await
    }

    async fn find_settled(&self, identity: &Identity) -> Result<Look, StoreError> {
        let mut reader = self.reader().await?;
        lock(&mut *reader, identity).await?;
        find(&mut *reader, identity).await
    }

    async fn body(&self, record: &Record) -> Result<Option<KeptBody>, StoreError> {
        let body = sql(BODY).bind("digest", &record.identity.digest()[..]).bind("epoch", record.epoch);
        self.reader().await?.first(body).await?.map(|row| body_at(&*row, 0)).transpose()
    }

    async fn claim(&self, claim: &KeyClaim, basis: Basis<'_>) -> Result<Option<Owned>, StoreError> {
        claim.requires(&[Mode::Bridged, Mode::Edge])?;
        let owned = claim.owned(basis);
        let is_claimed = match renewal(claim, basis, &owned) {
            None => is_inserted(self.run_alone(insertion(claim, State::InProgress, &owned)).await)?,
            Some(renewal) => renew(self, claim, basis, renewal).await?,
        };
        Ok(is_claimed.then_some(owned))
    }

    async fn heartbeat(&self, owned: &Owned, lease: Duration) -> Result<Fenced, StoreError> {
        Ok(Fenced::rows(self.run_alone(owned_by(HEARTBEAT, owned).bind("lease", lease)).await?))
    }

    async fn finish(&self, owned: &Owned, outcome: &RunOutcome, retention: &Retention) -> Result<Fenced, StoreError> {
        self.end_claim(owned, outcome, retention).await
    }

    async fn release(&self, owned: &Owned) -> Result<Fenced, StoreError> {
        run_locked(self, locking(&owned.identity), owned_by(RELEASE, owned)).await
    }

    async fn mark_unknown(&self, seen: &Record) -> Result<Fenced, StoreError> {
        let mark = sql(MARK_UNKNOWN).bind("digest", &seen.identity.digest()[..]).bind("epoch", seen.epoch);
        run_locked(self, locking(&seen.identity), mark).await
    }

    async fn stale(&self, operation: &OperationName, limit: u32) -> Result<Vec<Record>, StoreError> {
        open(self, operation, None, limit).await
    }

    async fn unknown_due(
        &self,
        operation: &OperationName,
        pauses: (Duration, Duration),
        limit: u32,
    ) -> Result<Vec<Record>, StoreError> {
        open(self, operation, Some(pauses), limit).await
    }

    async fn expire_bodies(&self, limit: u32) -> Result<u64, StoreError> {
        let expired = expiry::expire_bodies(self, limit).await?;
        // It looks at all partitions, so not with each full page.
        Ok(if expired < u64::from(limit) { expired + self.free_bodies(limit).await? } else { expired })
    }

    async fn purge_keys(
        &self,
        operation: &OperationName,
        retention: &Retention,
        id_skew: Duration,
        limit: u32,
    ) -> Result<u64, StoreError> {
        expiry::purge(self, operation, retention, id_skew, limit).await
    }

    async fn open_of_tenant(&self, tenant: &str) -> Result<u64, StoreError> {
        self.reader().await?.one(sql(OPEN_OF_TENANT).bind("tenant", tenant.as_bytes())).await
    }

    async fn stored_of_tenant(&self, tenant: &str) -> Result<u64, StoreError> {
        self.reader().await?.one(sql(KEPT_OF_TENANT).bind("tenant", tenant.as_bytes())).await
    }

    async fn observe_run(&self, evidence: &NewEvidence) -> Result<(), StoreError> {
        evidence::observe(self, evidence).await
    }

    async fn runs_of(&self, operation_id: Uuid) -> Result<Vec<StoredEvidence>, StoreError> {
        let mut seen = evidence::read(&mut *self.reader().await?, operation_id).await?;
        seen.retain(|row| row.evidence.is_of_run());
        Ok(seen)
    }

    async fn announce(&self, process: Uuid, versions: &[Versions]) -> Result<(), StoreError> {
        live::announce(self, process, versions).await
    }

    async fn operation_stats(&self) -> Result<OperationStats, StoreError> {
        let row = self.reader().await?.only(sql(STATS)).await?;
        let (oldest, now): (Option<DbTime>, DbTime) = (row.get_opt(1)?, row.get(2)?);
        Ok(OperationStats {
            in_progress: row.get(0)?,
            oldest_in_progress: oldest.map(|oldest| oldest.until(now)),
            unknown: row.get(3)?,
        })
    }
}

/// The statement of a claim that renews a record; none for one that inserts it.
pub(in crate::store) fn renewal(claim: &KeyClaim, basis: Basis<'_>, owned: &Owned) -> Option<Statement> {
    let text = match basis {
        Basis::New => return None,
        Basis::TakeOver(_) | Basis::Reconcile(_) => renew!(
            "((state = 'IN_PROGRESS' and mode in ('bridged', 'edge') and {piece lease is over}) \
              or (state = 'UNKNOWN_REQUIRES_RECOVERY' and mode = 'edge')) "
        ),
        Basis::Reclaim(_) => {
            renew!("state = 'FAILED_RETRYABLE' and expires_at >= {clock} and {piece no late end} ")
        }
        Basis::Late(_) => renew!("state = 'FAILED_RETRYABLE' and expires_at >= {clock} "),
        Basis::Anew(_) => renew!("expires_at < {clock} "),
    };
    let renewal = of_claim(text, claim, owned).bind("epoch", owned.epoch);
    Some(renewal.bind("generation", owned.generation).bind("attempts", owned.attempts))
}

/// A statement with the values bound that every claim has.
pub(in crate::store) fn of_claim(text: &'static str, claim: &KeyClaim, owned: &Owned) -> Statement {
    let identity = &claim.identity;
    sql(text)
        .bind("digest", &identity.digest()[..])
        .bind("tenant", identity.tenant().as_bytes())
        .bind("name", identity.operation().as_str().as_bytes())
        .bind("key", identity.key().as_str().as_bytes())
        .bind("principal", claim.principal.to_string())
        .bind("fingerprint", claim.fingerprint.to_string())
        .bind("mode", claim.mode.as_str())
        .bind("owner", owned.owner)
        // Without an owner the transaction itself owns the claim, and needs no lease.
        .bind("lease", owned.owner.map(|_| claim.lease))
        .bind("operation", owned.operation_id)
}

fn insertion(claim: &KeyClaim, state: State, owned: &Owned) -> Statement {
    of_claim(INSERT, claim, owned).bind("state", state.as_str())
}

/// Whether a record was inserted; false where the key has one.
fn is_inserted(done: Result<u64, StoreError>) -> Result<bool, StoreError> {
    match done {
        Err(StoreError::Other(sqlx::Error::Database(error))) if error.is_unique_violation() => Ok(false),
        done => Ok(done? == 1),
    }
}

/// Inserts or renews the claim of a transaction that has begun. Returns false where the key has a
/// record, or must not be renewed.
pub(in crate::store) async fn stake(
    session: &mut dyn Session,
    claim: &KeyClaim,
    basis: Basis<'_>,
    owned: &Owned,
) -> Result<bool, StoreError> {
    let Some(renewal) = renewal(claim, basis, owned) else {
        return is_inserted(session.run(insertion(claim, State::InProgress, owned).bind("at_once", true)).await);
    };
    if session.run(renewal).await? == 0 {
        return Ok(false);
    }
    forget_former(session, basis).await?;
    Ok(true)
}

/// Keeps the promises of [`Operations::insert_unknown`](crate::operation::port::Operations).
pub(in crate::store) async fn insert_unknown(store: &dyn SqlStore, claim: &KeyClaim) -> Result<Fenced, StoreError> {
    let unowned = Owned { owner: None, ..claim.owned(Basis::New) };
    let insert = insertion(claim, State::UnknownRequiresRecovery, &unowned);
    Ok(Fenced::rows(is_inserted(store.run_alone(insert).await)?.into()))
}

/// Renews a record in a transaction of its own; false where it has changed. The row is locked
/// first, so that the condition sees the lease and the evidence of late runs as they are.
async fn renew(
    store: &dyn SqlStore,
    claim: &KeyClaim,
    basis: Basis<'_>,
    renewal: Statement,
) -> Result<bool, StoreError> {
    let mut transaction = store.begin_sql().await?;
    let session = transaction.session();
    lock(session, &claim.identity).await?;
    if session.run(renewal).await? == 0 {
        transaction.rollback().await?;
        return Ok(false);
    }
    forget_former(session, basis).await?;
    transaction.commit().await?;
    Ok(true)
}

/// How many columns the piece `look` has.
pub(super) const LOOK_COLUMNS: usize = 27;

/// Reads a row of the piece `look`. From the third column on it is null where there is no record.
pub(super) fn look_of(row: &dyn Row) -> Result<Look, StoreError> {
    let now: DbTime = row.get(0)?;
    let purged_below = row.get_opt(1)?;
    let Some(tenant) = row.get_opt::<Vec<u8>>(2)? else {
        return Ok(Look { now, purged_below, record: None, body: None });
    };
    let (operation, key): (Vec<u8>, Vec<u8>) = (row.get(3)?, row.get(4)?);
    let lease = match (row.get_opt(10)?, row.get_opt::<u64>(11)?) {
        (Some(until), Some(micros)) => Some(Lease { until, length: Duration::from_micros(micros) }),
        _ => None,
    };
    let record = Record {
        identity: Identity::from_stored(&tenant, &operation, &key).map_err(corrupt)?,
        principal: row.get::<String>(5)?.parse().map_err(corrupt)?,
        fingerprint: row.get::<String>(6)?.parse().map_err(corrupt)?,
        mode: row.get::<String>(7)?.parse().map_err(corrupt)?,
        state: row.get::<String>(8)?.parse().map_err(corrupt)?,
        epoch: row.get(9)?,
        lease,
        generation: row.get(12)?,
        operation_id: row.get(13)?,
        attempts: row.get(14)?,
        parked: row.get(15)?,
        created_at: row.get(16)?,
        outcome_at: row.get_opt(17)?,
        expires_at: row.get_opt(18)?,
        answer: row.get_opt(19)?.map(|status| answer_of(row, status, now)).transpose()?,
        error_code: row.get_opt(26)?,
    };
    Ok(Look { now, purged_below, record: Some(record), body: None })
}

fn answer_of(row: &dyn Row, status: u16, now: DbTime) -> Result<StoredAnswer, StoreError> {
    let body_until = row.get_opt::<DbTime>(22)?;
    let body = body_of(&row.get::<String>(21)?, body_until, now)?;
    let resource = match row.get_opt(23)? {
        Some(kind) => Some(Resource { kind, id: row.get(24)?, location: row.get_opt(25)? }),
        None => None,
    };
    Ok(StoredAnswer { status, schema_version: row.get(20)?, body, body_until, resource })
}

/// Reads the record of a key, with its body where that is in the row.
pub(in crate::store) async fn find(session: &mut dyn Session, identity: &Identity) -> Result<Look, StoreError> {
    let operation = identity.operation().as_str().as_bytes();
    let find = sql(FIND).bind("operation", operation).bind("digest", &identity.digest()[..]);
    let row = session.only(find).await?;
    let mut look = look_of(&*row)?;
    let answer = look.record.as_ref().and_then(|record| record.answer.as_ref());
    if answer.is_some_and(|answer| answer.body == StoredBody::Kept) && row.get_int(LOOK_COLUMNS + 2)?.is_some() {
        look.body = Some(body_at(&*row, LOOK_COLUMNS)?);
    }
    Ok(look)
}

/// Reads a body from four columns: headers, bytes, format, key id.
fn body_at(row: &dyn Row, first: usize) -> Result<KeptBody, StoreError> {
    Ok(KeptBody {
        headers: unpack(&row.get::<Vec<u8>>(first)?)?,
        bytes: row.get(first + 1)?,
        format: row.get(first + 2)?,
        kid: row.get_opt(first + 3)?,
    })
}

/// Locks the record of a key, where there is one.
pub(super) async fn lock(session: &mut dyn Session, identity: &Identity) -> Result<(), StoreError> {
    session.rows(locking(identity)).await.map(drop)
}

fn locking(identity: &Identity) -> Statement {
    sql(LOCK).bind("digest", &identity.digest()[..])
}

/// Runs a statement on a row that `lock` locks before, in a transaction of its own.
pub(super) async fn run_locked(
    store: &dyn SqlStore,
    lock: Statement,
    statement: Statement,
) -> Result<Fenced, StoreError> {
    let mut transaction = store.begin_sql().await?;
    let session = transaction.session();
    session.rows(lock).await?;
    let fenced = Fenced::rows(session.run(statement).await?);
    transaction.commit().await?;
    Ok(fenced)
}

/// A statement of the owner of a claim, with the values bound that name it.
fn owned_by(text: &'static str, owned: &Owned) -> Statement {
    let digest = owned.identity.digest();
    sql(text).bind("digest", &digest[..]).bind("epoch", owned.epoch).bind("owner", owned.owner)
}

/// The statement for the abandoned claims of an operation; with `pauses`, the shortest and the
/// longest, for its records that are due to be asked for.
pub(in crate::store) fn open_of(
    operation: &OperationName,
    pauses: Option<(Duration, Duration)>,
    limit: u32,
) -> Statement {
    let of = sql(OPEN_PAGE).bind("operation", operation.as_str().as_bytes()).bind("limit", limit);
    let of = of.bind("unknown", pauses.is_some());
    of.bind("least", pauses.map(|(least, _)| micros_of(least))).bind("most", pauses.map(|(_, most)| micros_of(most)))
}

/// Whether a lease ended so short a time ago that its owner may still renew it: a store that was
/// away for longer than the lease is back for the sweep and for the heartbeat at the same moment.
fn is_fresh(lease: Option<Lease>, now: DbTime) -> bool {
    lease.is_some_and(|lease| lease.until <= now && lease.until.until(now) < lease.length / 2)
}

/// The records that [`open_of`] finds. Nobody changes those that cannot be read, so they stand
/// first in every page. They hide no others, because the page is then read again with more room.
async fn open(
    store: &dyn SqlStore,
    operation: &OperationName,
    pauses: Option<(Duration, Duration)>,
    limit: u32,
) -> Result<Vec<Record>, StoreError> {
    let mut reader = store.reader().await?;
    let mut room = 0;
    loop {
        let page = limit.saturating_add(room);
        let rows = reader.rows(open_of(operation, pauses, page)).await?;
        let (mut found, mut unreadable) = (Vec::new(), Vec::new());
        for row in &rows {
            match look_of(&**row) {
                Ok(look) => found.extend(look.record.filter(|record| !is_fresh(record.lease, look.now))),
                Err(error) => unreadable.push(error),
            }
        }
        if unreadable.len() <= room as usize || rows.len() < page as usize {
            for error in unreadable {
                tracing::error!(%operation, %error, "a record without an outcome cannot be read");
            }
            found.truncate(limit as usize);
            return Ok(found);
        }
        room = u32::try_from(unreadable.len()).unwrap_or(u32::MAX).saturating_mul(2);
    }
}
