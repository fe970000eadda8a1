//! Idempotency records, and the transaction of a transactional operation.
//!
//! Guarantees: the primary key decides who executes; every other write is one statement that
//! compares the epoch it saw (O4); an outcome is written only in the transaction that holds the
//! claim, compared by its id inside that statement (O1, R23); a transactional operation never waits
//! for another claim of its key: an advisory lock is tried first (O15).

mod expiry;
mod finish;
mod tx;

use std::time::Duration;

use async_trait::async_trait;
use sqlx::{PgConnection, Postgres};

pub(super) use self::finish::{Within, finish};
pub(super) use self::tx::{Held, staked};

use super::connect::BEGIN;
use super::{PostgresStore, code};
use crate::error::StoreError;
use crate::operation::port::{
    Basis, Begun, Bridged, Fenced, KeyClaim, Look, OperationTx, Operations, Owned, RecordFence, RunOutcome, ended,
};
use crate::operation::rules::retention::Retention;
use crate::operation::rules::{Identity, Mode};
use crate::store::bounded::Bounded;
use crate::store::sql::records::{self, KeyStore, OutcomeTransaction};

/// Looks the key up, tries the lock and inserts, in one statement. CASE keeps this order (O15):
/// where a record is seen, no lock is taken; where the lock is not free, no insert begins that
/// would wait for its holder. The caller's next read tells which of them refused.
///
/// The transaction owns the claim, so the claim has no lease. Times come from the columns'
/// defaults: a volatile expression in the SELECT list would cost the plan a projection.
const CLAIM: &str = "insert into oncebox.idempotency_request (key_digest, tenant, operation, key, principal, fingerprint, mode, \
       operation_id, state) \
     select :digest, :tenant, :name, :key, :principal, :fingerprint, :mode, :operation, 'IN_PROGRESS' \
      where case when exists (select from oncebox.idempotency_request r where r.key_digest = :digest) then false \
                 else pg_try_advisory_xact_lock(:lock) end \
     on conflict do nothing returning pg_current_xact_id()::text";

#[async_trait]
impl OutcomeTransaction for Bounded<Postgres> {
    async fn finish_record(
        &mut self,
        fence: &RecordFence,
        outcome: &RunOutcome,
        retention: &Retention,
    ) -> Result<Fenced, StoreError> {
        finish(self, fence, outcome, retention, None).await
    }
}

#[async_trait]
impl KeyStore for PostgresStore {
    async fn begin_outcome(&self) -> Result<Box<dyn OutcomeTransaction>, StoreError> {
        Ok(Box::new(self.pool.begin(BEGIN).await?))
    }

    async fn end_claim(
        &self,
        owned: &Owned,
        outcome: &RunOutcome,
        retention: &Retention,
    ) -> Result<Fenced, StoreError> {
        finish(&mut self.pool.acquire().await?, &owned.into(), outcome, retention, None).await
    }

    async fn free_bodies(&self, limit: u32) -> Result<u64, StoreError> {
        expiry::free_bodies(self, limit).await
    }
}

impl Bridged for PgConnection {
    async fn finish_in(
        &mut self,
        owned: &Owned,
        outcome: &RunOutcome,
        retention: &Retention,
    ) -> Result<Fenced, StoreError> {
        let done = finish::finishing(&owned.into(), outcome, retention, None).build().execute(self).await;
        Ok(Fenced::rows(done.map_err(expiry::attached)?.rows_affected()))
    }

    async fn stands(&mut self) -> Result<(), StoreError> {
        let set = sqlx::raw_sql("savepoint oncebox_stands").execute(&mut *self).await;
        set.map_err(|error| match code(&error).as_deref() {
            // There is no transaction (25P01).
            Some("25P01") => ended(),
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
        let found = records::find(&mut connection, identity).await;
        connection.close().await;
        found
    }

    async fn insert_unknown(&self, claim: &KeyClaim) -> Result<Fenced, StoreError> {
        records::insert_unknown(self, claim).await
    }

    async fn begin_operation(
        &self,
        claim: &KeyClaim,
        basis: Basis<'_>,
        _: Duration,
    ) -> Result<Begun<Box<dyn OperationTx>>, StoreError> {
        claim.requires(&[Mode::Transactional])?;
        Ok(tx::begin(self, claim, basis).await?.map(|tx| Box::new(tx) as Box<dyn OperationTx>))
    }

    async fn begin_unseen(&self, claim: &KeyClaim) -> Result<Option<Box<dyn OperationTx>>, StoreError> {
        claim.requires(&[Mode::Transactional])?;
        Ok(tx::begin_unseen(self, claim).await?.map(|tx| Box::new(tx) as Box<dyn OperationTx>))
    }
}
