//! Idempotency records, and the transaction of door A.
//!
//! Guarantees: the primary key decides who executes; every other write is one statement that
//! compares the epoch it saw (O4); an outcome is written only in the transaction that holds the
//! claim, compared by its id inside that statement (O1, R23); door A never waits for another claim
//! of its key: an advisory lock is tried first (O15).

mod expiry;
mod finish;
mod tx;

use std::time::Duration;

use async_trait::async_trait;
use sqlx::postgres::PgArguments;
use sqlx::{AssertSqlSafe, PgConnection, Row};
use uuid::Uuid;

pub(super) use self::finish::{Within, finish};
pub(super) use self::tx::{Held, proved_by, staked, undo};

use super::PostgresStore;
use crate::error::StoreError;
use crate::policy::operation::retention::Retention;
use crate::policy::operation::route::Durability;
use crate::policy::operation::versions::Versions;
use crate::policy::operation::{Identity, Mode, OperationName, Record, State};
use crate::store::bounded::{Ask, Bounded};
use crate::store::operations::stored::{body_of, look_of};
use crate::store::sql::announced::announce;
use crate::store::sql::phases::evidence;
use crate::store::{
    Basis, Begun, Bridged, Claimed, Fenced, KeptBody, KeyClaim, Keys, Look, NewEvidence, OperationStats, OperationTx,
    Operations, Outcome, Owned, Phases, StoredEvidence,
};

/// Microseconds since 1970, exact.
macro_rules! micros {
    ($time:literal) => {
        concat!("(extract(epoch from ", $time, ") * 1000000)::bigint")
    };
}

pub(super) use micros;

/// The columns that [`look_of`] reads. The lease of a phased record is that of its operation (O9).
macro_rules! look_columns {
    () => {
        concat!(
            $crate::store::postgres::operations::micros!("n.at"),
            ", ",
            $crate::store::postgres::operations::micros!("p.purged_below"),
            ", r.tenant, r.operation, r.key, r.principal, r.fingerprint, r.mode, r.state, r.epoch, ",
            $crate::store::postgres::operations::micros!("coalesce(r.lease_until, o.lease_until)"),
            ", (coalesce(r.lease_seconds, o.lease_seconds) * 1000000)::bigint, r.generation, uuid_send(r.operation_id), r.attempts::bigint, \
             (o.parked is not null)::int::bigint, ",
            $crate::store::postgres::operations::micros!("r.created_at"),
            ", ",
            $crate::store::postgres::operations::micros!("r.outcome_at"),
            ", ",
            $crate::store::postgres::operations::micros!("r.expires_at"),
            ", r.answer_status::bigint, r.schema_version, r.body, ",
            $crate::store::postgres::operations::micros!("r.body_expires_at"),
            ", r.resource_kind, r.resource_id, r.resource_location"
        )
    };
}
pub(super) use look_columns;

const FIND: &str = concat!(
    "select ",
    look_columns!(),
    ", r.body_headers, r.body_bytes, r.body_format::bigint, r.body_kid from (select clock_timestamp() as at) n \
     left join oncebox.idempotency_purge p on p.operation = $2 \
     left join oncebox.idempotency_request r on r.key_digest = $1 \
     left join oncebox.operation o on r.mode = 'phased' and o.operation_id = r.operation_id"
);

/// The records without an outcome. They stand behind those that have one in the index by operation
/// and time of the outcome, which is entered once for each operation: an index of their own would
/// cost every claim an entry that is of no use milliseconds later.
///
/// From the last operation to the first, so that each is entered where they stand: at its front
/// stand the entries of what was purged, until a vacuum.
macro_rules! open_requests {
    () => {
        "(with recursive operations (operation) as ( \
            (select r.operation from oncebox.idempotency_request r order by r.operation desc limit 1) \
            union all \
            select (select r.operation from oncebox.idempotency_request r where r.operation < o.operation order by r.operation desc limit 1) \
              from operations o where o.operation is not null) \
          select r.* from operations o join oncebox.idempotency_request r on r.operation = o.operation and r.outcome_at is null)"
    };
}
pub(super) use open_requests;

/// A lease that is over, also one that was written before the clock went back (R22).
macro_rules! lease_is_over {
    () => {
        "(r.lease_until <= clock_timestamp() or r.lease_until > clock_timestamp() + r.lease_seconds * interval '1 second')"
    };
}

/// Whether no run of the record `r` that lost its lease has said that it ended so: then something
/// did happen. A word of an operator overrules those before it.
macro_rules! none_late {
    ($verdicts:literal) => {
        concat!(
            "not exists (select 1 from oncebox.operation_evidence e where e.operation_id = r.operation_id \
           and e.kind = 'run' and e.verdict in (",
            $verdicts,
            ") \
           and not exists (select 1 from oncebox.operation_evidence w \
                where w.operation_id = e.operation_id and w.evidence_id > e.evidence_id and w.kind = 'operator'))"
        )
    };
}
pub(super) use none_late;

/// The row is locked by a statement of its own: the next one sees what was committed until then,
/// which the statement that waited would not.
pub(super) const LOCK: &str = "select from oncebox.idempotency_request where key_digest = $1 for update";

/// Inserts a claim in the given state, in a transaction of its own.
macro_rules! insert {
    ($state:literal) => {
        concat!(
            "insert into oncebox.idempotency_request (key_digest, tenant, operation, key, principal, fingerprint, mode, operation_id, \
               state, owner, lease_until, lease_seconds) \
             values ($1, $2, $3, $4, $5, $6, $7, $8, '",
            $state,
            "', $9, clock_timestamp() + $10 * interval '1 second', $10) on conflict do nothing"
        )
    };
}

const INSERT: &str = insert!("IN_PROGRESS");
const INSERT_UNKNOWN: &str = insert!("UNKNOWN_REQUIRES_RECOVERY");

/// Look, try-lock and insert in one statement, in the order of O15, which CASE keeps: a record that
/// is seen takes no lock, and an insert that would wait for whoever changes that record just then
/// is not begun. Which of them refused, the look that follows says.
///
/// Its transaction owns it, so it has no lease. No value but a default is volatile: the plan needs
/// one projection less.
const CLAIM: &str = "insert into oncebox.idempotency_request (key_digest, tenant, operation, key, principal, fingerprint, mode, operation_id, state) \
     select $1, $2, $3, $4, $5, $6, $7, $8, 'IN_PROGRESS' \
      where case when exists (select from oncebox.idempotency_request r where r.key_digest = $1) then false \
                 else pg_try_advisory_xact_lock($9) end \
     on conflict do nothing returning pg_current_xact_id()::text";

/// A claim on a record that was seen; what must still hold follows.
const RENEW: &str = "update oncebox.idempotency_request r \
    set principal = $2, fingerprint = $3, mode = $4, state = 'IN_PROGRESS', epoch = $5, owner = $6, \
        lease_until = clock_timestamp() + $7 * interval '1 second', lease_seconds = $7, generation = $8, operation_id = $9, \
        attempts = $10, updated_at = clock_timestamp(), outcome_at = null, expires_at = null, answer_status = null, \
        schema_version = null, body = null, body_expires_at = null, body_headers = null, body_bytes = null, body_format = null, \
        body_kid = null, kept_bytes = null, resource_kind = null, resource_id = null, resource_location = null, error_code = null \
  where r.key_digest = $1 and r.epoch = $5 - 1 and ";

const FORGET_RUNS: &str = "delete from oncebox.operation_evidence where operation_id = $1 and kind = 'run'";

/// The time as a value of its own: compared with the clock itself, each entry would be read.
const KEPT_OF_TENANT: &str = "select coalesce(sum(kept_bytes), 0)::bigint from oncebox.idempotency_request \
    where tenant = $1 and kept_bytes is not null and body_expires_at > (select clock_timestamp())";

#[async_trait]
impl Keys for PostgresStore {
    fn durability(&self) -> Durability {
        Durability::Durable
    }

    async fn sign_of_life(&self) -> Result<(), StoreError> {
        Ok(self.pool.sign_of_life().await?)
    }

    fn connections_max(&self) -> Option<u32> {
        Some(self.pool.plain().options().get_max_connections())
    }

    async fn find(&self, identity: &Identity) -> Result<Look, StoreError> {
        find(&mut self.pool.acquire().await?, identity).await
    }

    async fn find_settled(&self, identity: &Identity) -> Result<Look, StoreError> {
        let mut connection = self.pool.acquire().await?;
        sqlx::query(LOCK).bind(identity.digest().as_slice()).optional(&mut connection).await?;
        find(&mut connection, identity).await
    }

    async fn body(&self, record: &Record) -> Result<Option<KeptBody>, StoreError> {
        let row = sqlx::query(
            "select body_headers, body_bytes, body_format::bigint, body_kid from oncebox.idempotency_request \
              where key_digest = $1 and epoch = $2 and body_expires_at > clock_timestamp() and body_format is not null \
             union all \
             select b.headers, b.bytes, b.format::bigint, b.kid from oncebox.idempotency_request r \
               join oncebox.idempotency_body b on b.key_digest = r.key_digest and b.epoch = r.epoch and b.expires_at = r.body_expires_at \
              where r.key_digest = $1 and r.epoch = $2 and r.body_expires_at > clock_timestamp()",
        )
        .bind(record.identity.digest().as_slice())
        .bind(record.epoch)
        .optional(&self.pool)
        .await?;
        row.as_ref().map(body_of).transpose()
    }

    async fn claim(&self, claim: &KeyClaim, basis: Basis<'_>) -> Result<Claimed, StoreError> {
        claim.requires(&[Mode::Bridged, Mode::Edge])?;
        let owned = claim.owned(basis);
        if let Basis::Reclaim(_) | Basis::Anew(_) = basis {
            return self.claim_locked(claim, basis, owned).await;
        }
        let mut connection = self.pool.acquire().await?;
        let changed = match renewal(basis) {
            None => {
                insert(INSERT, claim, &owned)
                    .bind(owned.owner)
                    .bind(seconds(claim, &owned))
                    .run(&mut connection)
                    .await?
            }
            Some(holds) => renew(&format!("{RENEW}{holds}"), claim, &owned).run(&mut connection).await?,
        };
        if changed.rows_affected() == 1 {
            return Ok(Claimed::Owned(owned));
        }
        // A statement of its own: it sees what a transaction that we waited for has committed
        // (pitfall 3).
        let found = find(&mut connection, &claim.identity).await?.record;
        Ok(found.map_or(Claimed::Vanished, |record| Claimed::Existing(Box::new(record))))
    }

    async fn heartbeat(&self, owned: &Owned, lease: Duration) -> Result<Fenced, StoreError> {
        let done = sqlx::query(
            "update oncebox.idempotency_request set lease_until = clock_timestamp() + $4 * interval '1 second', lease_seconds = $4, \
               updated_at = clock_timestamp() where key_digest = $1 and epoch = $2 and owner = $3 and state = 'IN_PROGRESS'",
        )
        .bind(owned.identity.digest().as_slice())
        .bind(owned.epoch)
        .bind(owned.owner)
        .bind(lease.as_secs_f64())
        .run(&self.pool)
        .await?;
        Ok(Fenced::rows(done.rows_affected()))
    }

    async fn finish(&self, owned: &Owned, outcome: &Outcome, retention: &Retention) -> Result<Fenced, StoreError> {
        finish(&mut self.pool.acquire().await?, &owned.into(), outcome, retention, None).await
    }

    async fn release(&self, owned: &Owned) -> Result<Fenced, StoreError> {
        let digest = owned.identity.digest();
        let mut tx = self.transaction().await?;
        sqlx::query(LOCK).bind(digest.as_slice()).optional(&mut tx).await?;
        let done = sqlx::query(concat!(
            "delete from oncebox.idempotency_request r where key_digest = $1 and epoch = $2 and owner = $3 and state = 'IN_PROGRESS' and ",
            none_late!("'success', 'failure'")
        ))
        .bind(digest.as_slice())
        .bind(owned.epoch)
        .bind(owned.owner)
        .run(&mut tx)
        .await?;
        tx.commit().await?;
        Ok(Fenced::rows(done.rows_affected()))
    }

    async fn mark_unknown(&self, seen: &Record) -> Result<Fenced, StoreError> {
        let done = sqlx::query(concat!(
            "update oncebox.idempotency_request r set state = 'UNKNOWN_REQUIRES_RECOVERY', epoch = r.epoch + 1, owner = null, \
               lease_until = null, lease_seconds = null, updated_at = clock_timestamp() \
             where r.key_digest = $1 and r.epoch = $2 and r.state = 'IN_PROGRESS' \
               and (r.mode = 'same_tx' or (r.mode = 'edge' and ",
            lease_is_over!(),
            "))"
        ))
        .bind(seen.identity.digest().as_slice())
        .bind(seen.epoch)
        .run(&self.pool)
        .await?;
        Ok(Fenced::rows(done.rows_affected()))
    }

    async fn expire_bodies(&self, limit: u32) -> Result<u64, StoreError> {
        expiry::expire_bodies(self, limit).await
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
        let open: i64 =
            sqlx::query_scalar(concat!("select count(*) from ", open_requests!(), " r where r.tenant = $1"))
                .persistent(false)
                .bind(tenant.as_bytes())
                .one(&self.pool)
                .await?;
        Ok(open.unsigned_abs())
    }

    async fn stored_of_tenant(&self, tenant: &str) -> Result<u64, StoreError> {
        let kept: i64 = sqlx::query_scalar(KEPT_OF_TENANT).bind(tenant.as_bytes()).one(&self.pool).await?;
        Ok(kept.unsigned_abs())
    }

    async fn observe_run(&self, evidence: &NewEvidence) -> Result<(), StoreError> {
        self.observe(evidence).await
    }

    async fn runs_of(&self, operation_id: Uuid) -> Result<Vec<StoredEvidence>, StoreError> {
        let mut seen = evidence(&mut self.pool.acquire().await?, operation_id).await?;
        seen.retain(|row| row.evidence.is_of_run());
        Ok(seen)
    }

    async fn announce(&self, process: Uuid, versions: &[Versions]) -> Result<(), StoreError> {
        announce(self, process, versions).await
    }

    async fn operation_stats(&self) -> Result<OperationStats, StoreError> {
        let row = sqlx::query(concat!(
            "select count(*) filter (where r.state = 'IN_PROGRESS'), \
                    extract(epoch from clock_timestamp() - min(r.created_at) filter (where r.state = 'IN_PROGRESS'))::float8, \
                    count(*) filter (where r.state = 'UNKNOWN_REQUIRES_RECOVERY') from ",
            open_requests!(),
            " r"
        ))
        // Planned anew: a plan for tables that are still empty would read all there is, until they
        // are analyzed.
        .persistent(false)
        .one(&self.pool)
        .await?;
        let age: Option<f64> = row.try_get(1)?;
        Ok(OperationStats {
            in_progress: row.try_get::<i64, _>(0)?.unsigned_abs(),
            oldest_in_progress: age.map(|seconds| Duration::try_from_secs_f64(seconds).unwrap_or_default()),
            unknown: row.try_get::<i64, _>(2)?.unsigned_abs(),
        })
    }
}

impl PostgresStore {
    /// Reads what late runs have said under the lock of the row. Of a run that the record agreed
    /// with nothing stays where the key is used anew: there is no conflict.
    async fn claim_locked(&self, claim: &KeyClaim, basis: Basis<'_>, owned: Owned) -> Result<Claimed, StoreError> {
        let mut tx = self.transaction().await?;
        sqlx::query(LOCK).bind(claim.identity.digest().as_slice()).optional(&mut tx).await?;
        let renew = renew(&format!("{RENEW}{}", renewal(basis).unwrap_or("false")), claim, &owned);
        if renew.run(&mut tx).await?.rows_affected() == 1 {
            if let Basis::Anew(seen) = basis
                && seen.state == State::Completed
            {
                let forget = sqlx::query(FORGET_RUNS).bind(seen.operation_id);
                forget.run(&mut tx).await?;
            }
            tx.commit().await?;
            return Ok(Claimed::Owned(owned));
        }
        let found = find(&mut tx, &claim.identity).await?.record;
        tx.rollback().await?;
        Ok(found.map_or(Claimed::Vanished, |record| Claimed::Existing(Box::new(record))))
    }
}

impl Bridged for PgConnection {
    async fn finish_in(
        &mut self,
        owned: &Owned,
        outcome: &Outcome,
        retention: &Retention,
    ) -> Result<Fenced, StoreError> {
        let done = finish::finishing(&owned.into(), outcome, retention, None).build().execute(self).await;
        Ok(Fenced::rows(done.map_err(expiry::attached)?.rows_affected()))
    }

    async fn stands(&mut self) -> Result<(), StoreError> {
        let set = sqlx::raw_sql("savepoint oncebox_stands").execute(&mut *self).await;
        set.map_err(|error| match error.as_database_error().and_then(|error| error.code()).as_deref() {
            // No transaction.
            Some("25P01") => StoreError::Fenced("the transaction has ended before its commit".to_owned()),
            _ => error.into(),
        })?;
        sqlx::raw_sql("release savepoint oncebox_stands").execute(self).await?;
        Ok(())
    }
}

#[async_trait]
impl Operations for PostgresStore {
    fn claims_unseen(&self) -> bool {
        true
    }

    async fn find_afresh(&self, identity: &Identity) -> Result<Look, StoreError> {
        let mut connection = self.pool.fresh().await?;
        let found = find(&mut connection, identity).await;
        connection.close().await;
        found
    }

    async fn insert_unknown(&self, claim: &KeyClaim) -> Result<Fenced, StoreError> {
        let owned = claim.owned(Basis::New);
        let done = insert(INSERT_UNKNOWN, claim, &owned).bind(None::<Uuid>).bind(None::<f64>).run(&self.pool).await?;
        Ok(Fenced::rows(done.rows_affected()))
    }

    async fn begin_operation(
        &self,
        claim: &KeyClaim,
        basis: Basis<'_>,
        _: Duration,
    ) -> Result<Begun<Box<dyn OperationTx>>, StoreError> {
        claim.requires(&[Mode::SameTx])?;
        Ok(tx::begin(self, claim, basis).await?.map(|tx| Box::new(tx) as Box<dyn OperationTx>))
    }

    async fn begin_unseen(&self, claim: &KeyClaim) -> Result<Option<Box<dyn OperationTx>>, StoreError> {
        claim.requires(&[Mode::SameTx])?;
        Ok(tx::begin_unseen(self, claim).await?.map(|tx| Box::new(tx) as Box<dyn OperationTx>))
    }
}

type Query<'q> = sqlx::query::Query<'q, sqlx::Postgres, PgArguments>;

async fn find(connection: &mut Bounded<sqlx::Postgres>, identity: &Identity) -> Result<Look, StoreError> {
    let row = sqlx::query(FIND)
        .bind(identity.digest().as_slice())
        .bind(identity.operation().as_str().as_bytes())
        .one(connection)
        .await?;
    look_of(&row)
}

/// What must still hold of a record that was seen; none for a claim that inserts.
fn renewal(basis: Basis<'_>) -> Option<&'static str> {
    Some(match basis {
        Basis::New => return None,
        Basis::TakeOver(_) => concat!(
            "((r.state = 'IN_PROGRESS' and r.mode in ('bridged', 'edge') and ",
            lease_is_over!(),
            ") or (r.state = 'UNKNOWN_REQUIRES_RECOVERY' and r.mode = 'edge'))"
        ),
        Basis::Reclaim(_) => {
            concat!(
                "r.state = 'FAILED_RETRYABLE' and r.expires_at >= clock_timestamp() and ",
                none_late!("'success', 'failure'")
            )
        }
        Basis::Late(_) => "r.state = 'FAILED_RETRYABLE' and r.expires_at >= clock_timestamp()",
        Basis::Anew(_) => "r.expires_at < clock_timestamp()",
    })
}

/// Seconds of the lease; none where the claim has no owner but its transaction.
fn seconds(claim: &KeyClaim, owned: &Owned) -> Option<f64> {
    owned.owner.map(|_| claim.lease.as_secs_f64())
}

/// The values that every claim has; more may follow.
fn insert<'q>(statement: &'static str, claim: &'q KeyClaim, owned: &Owned) -> Query<'q> {
    let identity = &claim.identity;
    sqlx::query(statement)
        .bind(identity.digest().to_vec())
        .bind(identity.tenant().as_bytes())
        .bind(identity.operation().as_str().as_bytes())
        .bind(identity.key().as_str().as_bytes())
        .bind(claim.principal.to_string())
        .bind(claim.fingerprint.to_string())
        .bind(claim.mode.as_str())
        .bind(owned.operation_id)
}

fn renew<'q>(statement: &str, claim: &'q KeyClaim, owned: &Owned) -> Query<'q> {
    sqlx::query(AssertSqlSafe(statement.to_owned()))
        .bind(claim.identity.digest().to_vec())
        .bind(claim.principal.to_string())
        .bind(claim.fingerprint.to_string())
        .bind(claim.mode.as_str())
        .bind(owned.epoch)
        .bind(owned.owner)
        .bind(seconds(claim, owned))
        .bind(owned.generation)
        .bind(owned.operation_id)
        .bind(i32::try_from(owned.attempts).unwrap_or(i32::MAX))
}
