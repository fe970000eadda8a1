//! Idempotency records, and the transaction of door A.
//!
//! Guarantees: the primary key decides who executes, and one writer at a time makes every fenced
//! statement see what is. Door A has no IN_PROGRESS: a duplicate waits its turn and finds the
//! outcome (O18). A handler cannot commit by itself, and the savepoint set after the claim must
//! still be there when the outcome is written (O1, R23).

mod expiry;
mod tx;

use std::time::Duration;

use async_trait::async_trait;
use sqlx::sqlite::{SqliteArguments, SqliteConnection};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, Row, query};
use uuid::Uuid;

pub(super) use self::tx::{Savepoint, staked};

use super::connect::SqliteStore;
use super::{millis, now_ms};
use crate::error::StoreError;
use crate::policy::operation::retention::Retention;
use crate::policy::operation::route::Durability;
use crate::policy::operation::versions::Versions;
use crate::policy::operation::{Identity, Mode, OperationName, Record, State};
use crate::store::operations::RecordFence;
use crate::store::operations::stored::{Columns, body_of, look_of, pack};
use crate::store::sql::announced::announce;
use crate::store::sql::phases::evidence;
use crate::store::{
    Base, Basis, Begun, Bridged, Claimed, Fenced, KeptBody, KeyClaim, Keys, Look, NewEvidence, OperationStats,
    OperationTx, Operations, Outcome, Owned, Phases, StoredEvidence,
};

/// The columns that [`look_of`] reads. The lease of a phased record is that of its operation (O9).
macro_rules! look_columns {
    () => {
        "n.at * 1000, p.purged_below * 1000, r.tenant, r.operation, r.key, r.principal, r.fingerprint, r.mode, r.state, r.epoch, \
         coalesce(r.lease_until, o.lease_until) * 1000, coalesce(r.lease_ms, o.lease_ms) * 1000, r.generation, r.operation_id, \
         r.attempts, o.parked is not null, r.created_at * 1000, r.outcome_at * 1000, r.expires_at * 1000, r.answer_status, \
         r.schema_version, r.body, r.body_expires_at * 1000, r.resource_kind, r.resource_id, r.resource_location"
    };
}
pub(super) use look_columns;

const FIND: &str = concat!(
    "select ",
    look_columns!(),
    " from (select ",
    now_ms!(),
    " as at) as n \
     left join oncebox_idempotency_purge as p on p.operation = ?2 \
     left join oncebox_idempotency_request as r on r.key_digest = ?1 \
     left join oncebox_operation as o on r.mode = 'phased' and o.operation_id = r.operation_id"
);

/// A lease that is over, also one that was written before the clock went back (R22).
macro_rules! lease_is_over {
    () => {
        concat!("(lease_until <= ", now_ms!(), " or lease_until > lease_ms + ", now_ms!(), ")")
    };
}

/// Whether no run that lost its lease, of the record that is changed, has said that it ended so:
/// then something did happen. A word of an operator overrules those before it.
macro_rules! none_late {
    ($verdicts:literal) => {
        concat!(
            "not exists (select 1 from oncebox_operation_evidence e where e.operation_id = oncebox_idempotency_request.operation_id \
           and e.kind = 'run' and e.verdict in (", $verdicts, ") \
           and not exists (select 1 from oncebox_operation_evidence w \
                where w.operation_id = e.operation_id and w.evidence_id > e.evidence_id and w.kind = 'operator'))"
        )
    };
}
pub(super) use none_late;

/// Inserts a claim in the given state.
macro_rules! insert {
    ($state:literal) => {
        concat!(
            "insert into oncebox_idempotency_request (key_digest, tenant, operation, key, principal, fingerprint, mode, state, owner, \
               lease_until, lease_ms, operation_id, created_at, updated_at) \
             values (?1, ?2, ?3, ?4, ?5, ?6, ?7, '",
            $state,
            "', ?8, ?9 + ",
            now_ms!(),
            ", ?9, ?10, ",
            now_ms!(),
            ", ",
            now_ms!(),
            ") on conflict do nothing"
        )
    };
}

/// A claim on a record that was seen; what must still hold follows.
const RENEW: &str = concat!(
    "update oncebox_idempotency_request \
     set principal = ?2, fingerprint = ?3, mode = ?4, state = 'IN_PROGRESS', epoch = ?5, owner = ?6, lease_until = ?7 + ",
    now_ms!(),
    ", lease_ms = ?7, generation = ?8, operation_id = ?9, attempts = ?10, updated_at = ",
    now_ms!(),
    ", outcome_at = null, expires_at = null, answer_status = null, schema_version = null, body = null, body_expires_at = null, \
     kept_bytes = null, resource_kind = null, resource_id = null, resource_location = null, error_code = null \
     where key_digest = ?1 and epoch = ?5 - 1 and "
);

const FORGET_RUNS: &str = "delete from oncebox_operation_evidence where operation_id = ? and kind = 'run'";

const FINISH: &str = concat!(
    "update oncebox_idempotency_request \
     set state = ?4, owner = null, lease_until = null, lease_ms = null, updated_at = n.at, \
         outcome_at = case when ?5 is not null then n.at end, expires_at = n.at + ?5, answer_status = ?6, schema_version = ?7, \
         body = ?8, body_expires_at = n.at + ?9, resource_kind = ?10, resource_id = ?11, resource_location = ?12, error_code = ?13, \
         kept_bytes = ?15 \
     from (select ",
    now_ms!(),
    " as at) as n where key_digest = ?1 and epoch = ?2 and owner is ?3 \
       and (state = 'IN_PROGRESS' or (?14 and state = 'UNKNOWN_REQUIRES_RECOVERY'))"
);

/// What is kept for a tenant.
pub(super) const KEPT_OF_TENANT: &str = concat!(
    "select coalesce(sum(kept_bytes), 0) from oncebox_idempotency_request \
     where tenant = ? and kept_bytes is not null and body_expires_at > ",
    now_ms!()
);

#[async_trait]
impl Keys for SqliteStore {
    fn durability(&self) -> Durability {
        Durability::Durable
    }

    fn connections_max(&self) -> Option<u32> {
        Some(self.pool().options().get_max_connections())
    }

    async fn find(&self, identity: &Identity) -> Result<Look, StoreError> {
        find(&mut *self.pool().acquire().await?, identity).await
    }

    async fn body(&self, record: &Record) -> Result<Option<KeptBody>, StoreError> {
        let body = query(concat!(
            "select b.headers, b.bytes, b.format, b.kid from oncebox_idempotency_request as r \
             join oncebox_idempotency_body as b on b.key_digest = r.key_digest and b.epoch = r.epoch \
             where r.key_digest = ? and r.epoch = ? and r.body_expires_at > ",
            now_ms!()
        ));
        let body = body.bind(record.identity.digest().to_vec()).bind(record.epoch);
        body.fetch_optional(self.pool()).await?.as_ref().map(body_of).transpose()
    }

    async fn claim(&self, claim: &KeyClaim, basis: Basis<'_>) -> Result<Claimed, StoreError> {
        claim.requires(&[Mode::Bridged, Mode::Edge])?;
        let owned = claim.owned(basis);
        let mut write = self.write().await?;
        if stake(write.connection(), claim, basis, &owned).await? {
            // Of a run that the record agreed with nothing stays where the key is used anew.
            if let Basis::Anew(seen) = basis
                && seen.state == State::Completed
            {
                let forget = query(FORGET_RUNS).bind(seen.operation_id.as_bytes().to_vec());
                forget.execute(write.connection()).await?;
            }
            write.commit().await?;
            return Ok(Claimed::Owned(owned));
        }
        let found = find(write.connection(), &claim.identity).await?.record;
        write.rollback().await?;
        Ok(found.map_or(Claimed::Vanished, |record| Claimed::Existing(Box::new(record))))
    }

    async fn heartbeat(&self, owned: &Owned, lease: Duration) -> Result<Fenced, StoreError> {
        let beat = query(concat!(
            "update oncebox_idempotency_request set lease_until = ?4 + ",
            now_ms!(),
            ", lease_ms = ?4, updated_at = ",
            now_ms!(),
            " where key_digest = ?1 and epoch = ?2 and owner = ?3 and state = 'IN_PROGRESS'"
        ));
        self.fenced(fence(beat, owned).bind(millis(lease))).await
    }

    async fn finish(&self, owned: &Owned, outcome: &Outcome, retention: &Retention) -> Result<Fenced, StoreError> {
        let mut write = self.write().await?;
        let fenced = finish(write.connection(), &owned.into(), outcome, retention).await?;
        write.commit().await?;
        Ok(fenced)
    }

    async fn release(&self, owned: &Owned) -> Result<Fenced, StoreError> {
        let release = query(concat!(
            "delete from oncebox_idempotency_request where key_digest = ?1 and epoch = ?2 and owner = ?3 and state = 'IN_PROGRESS' and ",
            none_late!("'success', 'failure'")
        ));
        self.fenced(fence(release, owned)).await
    }

    async fn mark_unknown(&self, seen: &Record) -> Result<Fenced, StoreError> {
        let mark = query(concat!(
            "update oncebox_idempotency_request set state = 'UNKNOWN_REQUIRES_RECOVERY', epoch = epoch + 1, owner = null, \
             lease_until = null, lease_ms = null, updated_at = ",
            now_ms!(),
            " where key_digest = ? and epoch = ? and state = 'IN_PROGRESS' and (mode = 'same_tx' or (mode = 'edge' and ",
            lease_is_over!(),
            "))"
        ));
        self.fenced(mark.bind(seen.identity.digest().to_vec()).bind(seen.epoch)).await
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
        let open: i64 = sqlx::query_scalar(
            "select count(*) from oncebox_idempotency_request where outcome_at is null and tenant = ?",
        )
        .bind(tenant.as_bytes())
        .fetch_one(self.pool())
        .await?;
        Ok(open.unsigned_abs())
    }

    async fn stored_of_tenant(&self, tenant: &str) -> Result<u64, StoreError> {
        let kept: i64 = sqlx::query_scalar(KEPT_OF_TENANT).bind(tenant.as_bytes()).fetch_one(self.pool()).await?;
        Ok(kept.unsigned_abs())
    }

    async fn observe_run(&self, evidence: &NewEvidence) -> Result<(), StoreError> {
        self.observe(evidence).await
    }

    async fn runs_of(&self, operation_id: Uuid) -> Result<Vec<StoredEvidence>, StoreError> {
        let mut seen = evidence(&mut *self.pool().acquire().await?, operation_id).await?;
        seen.retain(|row| row.evidence.is_of_run());
        Ok(seen)
    }

    async fn announce(&self, process: Uuid, versions: &[Versions]) -> Result<(), StoreError> {
        announce(self, process, versions).await
    }

    async fn operation_stats(&self) -> Result<OperationStats, StoreError> {
        let stats = query(concat!(
            "select count(*) filter (where state = 'IN_PROGRESS'), ",
            now_ms!(),
            " - min(created_at) filter (where state = 'IN_PROGRESS'), count(*) filter (where state = 'UNKNOWN_REQUIRES_RECOVERY') \
             from oncebox_idempotency_request where outcome_at is null"
        ));
        let row = stats.fetch_one(self.pool()).await?;
        let age: Option<i64> = row.try_get(1)?;
        Ok(OperationStats {
            in_progress: row.try_get::<i64, _>(0)?.unsigned_abs(),
            oldest_in_progress: age.map(|age| Duration::from_millis(age.max(0).unsigned_abs())),
            unknown: row.try_get::<i64, _>(2)?.unsigned_abs(),
        })
    }
}

impl Bridged for SqliteConnection {
    async fn finish_in(
        &mut self,
        owned: &Owned,
        outcome: &Outcome,
        retention: &Retention,
    ) -> Result<Fenced, StoreError> {
        // Two statements, which stand or fall together whatever the caller does with an error.
        let mut both = self.begin().await?;
        let fenced = finish(&mut both, &owned.into(), outcome, retention).await?;
        both.commit().await?;
        Ok(fenced)
    }

    async fn stands(&mut self) -> Result<(), StoreError> {
        // Here a savepoint would begin a transaction of its own.
        // BEGIN inside a transaction fails, and changes nothing.
        if sqlx::raw_sql("begin").execute(&mut *self).await.is_err() {
            return Ok(());
        }
        sqlx::raw_sql("rollback").execute(self).await?;
        Err(StoreError::Fenced("the transaction has ended before its commit".to_owned()))
    }
}

#[async_trait]
impl Operations for SqliteStore {
    async fn find_afresh(&self, identity: &Identity) -> Result<Look, StoreError> {
        let mut connection = self.pool().connect_options().connect().await?;
        let found = find(&mut connection, identity).await;
        connection.close().await?;
        found
    }

    async fn insert_unknown(&self, claim: &KeyClaim) -> Result<Fenced, StoreError> {
        let unowned = Owned { owner: None, ..claim.owned(Basis::New) };
        self.fenced(insert(insert!("UNKNOWN_REQUIRES_RECOVERY"), claim, &unowned)).await
    }

    async fn begin_operation(
        &self,
        claim: &KeyClaim,
        basis: Basis<'_>,
        patience: Duration,
    ) -> Result<Begun<Box<dyn OperationTx>>, StoreError> {
        claim.requires(&[Mode::SameTx])?;
        Ok(tx::begin(self, claim, basis, patience).await?.map(|tx| Box::new(tx) as Box<dyn OperationTx>))
    }
}

type Query<'q> = sqlx::query::Query<'q, sqlx::Sqlite, SqliteArguments>;

impl SqliteStore {
    /// Runs a fenced statement in a transaction of its own.
    async fn fenced(&self, statement: Query<'_>) -> Result<Fenced, StoreError> {
        let mut write = self.write().await?;
        let changed = statement.execute(write.connection()).await?.rows_affected();
        write.commit().await?;
        Ok(Fenced::rows(changed))
    }
}

fn fence<'q>(statement: Query<'q>, owned: &Owned) -> Query<'q> {
    bind(statement, &owned.into())
}

fn bind<'q>(statement: Query<'q>, fence: &RecordFence) -> Query<'q> {
    statement.bind(fence.digest.clone()).bind(fence.epoch).bind(fence.owner.map(|owner| owner.as_bytes().to_vec()))
}

fn owner(owned: &Owned) -> Option<Vec<u8>> {
    owned.owner.map(|owner| owner.as_bytes().to_vec())
}

async fn find(connection: &mut SqliteConnection, identity: &Identity) -> Result<Look, StoreError> {
    let find = query(FIND).bind(identity.digest().to_vec()).bind(identity.operation().as_str().as_bytes().to_vec());
    look_of(&find.fetch_one(connection).await?)
}

/// Inserts or renews the claim; false where something else stands there.
async fn stake(
    connection: &mut SqliteConnection,
    claim: &KeyClaim,
    basis: Basis<'_>,
    owned: &Owned,
) -> Result<bool, StoreError> {
    let holds = match basis {
        Basis::New => {
            return Ok(insert(insert!("IN_PROGRESS"), claim, owned).execute(connection).await?.rows_affected() == 1);
        }
        Basis::TakeOver(_) => concat!(
            "((state = 'IN_PROGRESS' and mode in ('bridged', 'edge') and ",
            lease_is_over!(),
            ") or (state = 'UNKNOWN_REQUIRES_RECOVERY' and mode = 'edge'))"
        ),
        Basis::Reclaim(_) => {
            concat!(
                "state = 'FAILED_RETRYABLE' and expires_at >= ",
                now_ms!(),
                " and ",
                none_late!("'success', 'failure'")
            )
        }
        Basis::Late(_) => concat!("state = 'FAILED_RETRYABLE' and expires_at >= ", now_ms!()),
        Basis::Anew(_) => concat!("expires_at < ", now_ms!()),
    };
    let renew = query(AssertSqlSafe(format!("{RENEW}{holds}")))
        .bind(claim.identity.digest().to_vec())
        .bind(claim.principal.to_string())
        .bind(claim.fingerprint.to_string())
        .bind(claim.mode.as_str())
        .bind(owned.epoch)
        .bind(owner(owned))
        .bind(lease(claim, owned))
        .bind(owned.generation)
        .bind(owned.operation_id.as_bytes().to_vec())
        .bind(owned.attempts);
    Ok(renew.execute(connection).await?.rows_affected() == 1)
}

/// The lease; none where the claim has no owner but its transaction.
fn lease(claim: &KeyClaim, owned: &Owned) -> Option<i64> {
    owned.owner.map(|_| millis(claim.lease))
}

fn insert<'q>(statement: &'static str, claim: &KeyClaim, owned: &Owned) -> Query<'q> {
    let identity = &claim.identity;
    query(statement)
        .bind(identity.digest().to_vec())
        .bind(identity.tenant().as_bytes().to_vec())
        .bind(identity.operation().as_str().as_bytes().to_vec())
        .bind(identity.key().as_str().as_bytes().to_vec())
        .bind(claim.principal.to_string())
        .bind(claim.fingerprint.to_string())
        .bind(claim.mode.as_str())
        .bind(owner(owned))
        .bind(lease(claim, owned))
        .bind(owned.operation_id.as_bytes().to_vec())
}

/// Writes the outcome, then the body.
pub(super) async fn finish(
    connection: &mut SqliteConnection,
    fence: &RecordFence,
    outcome: &Outcome,
    retention: &Retention,
) -> Result<Fenced, StoreError> {
    let columns = Columns::of(outcome, retention);
    let done = bind(query(FINISH), fence)
        .bind(columns.state.as_str())
        .bind(columns.ttl.map(millis))
        .bind(columns.status)
        .bind(columns.schema_version)
        .bind(columns.body)
        .bind(columns.body_ttl.map(millis))
        .bind(columns.resource.map(|resource| resource.kind.clone()))
        .bind(columns.resource.map(|resource| resource.id.clone()))
        .bind(columns.resource.and_then(|resource| resource.location.clone()))
        .bind(columns.error_code.map(str::to_owned))
        .bind(fence.unknown)
        .bind(columns.kept_bytes())
        .execute(&mut *connection)
        .await?;
    let fenced = Fenced::rows(done.rows_affected());
    if let (Fenced::Done, Some(kept)) = (fenced, columns.kept) {
        let keep = query(
            "insert into oncebox_idempotency_body (key_digest, epoch, expires_at, headers, bytes, format, kid) \
             select key_digest, epoch, body_expires_at, ?2, ?3, ?4, ?5 from oncebox_idempotency_request where key_digest = ?1",
        );
        let keep = keep.bind(fence.digest.clone()).bind(pack(&kept.headers)).bind(kept.bytes.clone());
        keep.bind(kept.format).bind(kept.kid.clone()).execute(connection).await?;
    }
    Ok(fenced)
}
