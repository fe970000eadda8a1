//! Idempotency records, and the transaction of a transactional operation.
//!
//! Guarantees: the primary key decides who executes, and with one writer at a time every fenced
//! statement sees the current state. A transactional operation is never seen IN_PROGRESS: a
//! duplicate waits for its turn and then finds the outcome (O18). A handler cannot commit by
//! itself, and the savepoint set after the claim must still exist when the outcome is written (O1,
//! R23).

mod tx;

use std::time::Duration;

use async_trait::async_trait;
use sqlx::sqlite::{SqliteArguments, SqliteConnection};
use sqlx::{ConnectOptions, Connection, query};

pub(super) use self::tx::staked;

use super::connect::SqliteStore;
use super::write::Write;
use super::{millis, now_ms};
use crate::error::StoreError;
use crate::operation::port::{
    Basis, Begun, Bridged, Fenced, KeyClaim, Look, OperationTx, Operations, Owned, RecordFence, RunOutcome,
};
use crate::operation::rules::retention::Retention;
use crate::operation::rules::{Identity, Mode};
use crate::store::base::Base;
use crate::store::sql::records::{self, KeyStore, OutcomeTransaction};
use crate::store::sql::{Session, outcome};
use crate::store::statements::Dialect;

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

#[async_trait]
impl OutcomeTransaction for Write {
    async fn finish_record(
        &mut self,
        fence: &RecordFence,
        outcome: &RunOutcome,
        retention: &Retention,
    ) -> Result<Fenced, StoreError> {
        outcome::finish(self, Dialect::Sqlite, fence, outcome, retention).await
    }
}

#[async_trait]
impl KeyStore for SqliteStore {
    async fn insert_claim(&self, claim: &KeyClaim, owned: &Owned) -> Result<bool, StoreError> {
        Ok(self.run_insert(insert(insert!("IN_PROGRESS"), claim, owned)).await? == 1)
    }

    async fn begin_outcome(&self) -> Result<Box<dyn OutcomeTransaction>, StoreError> {
        Ok(Box::new(self.write().await?))
    }
}

impl SqliteStore {
    /// Runs the insert of a claim in a transaction of its own, and returns how many rows it
    /// inserted.
    async fn run_insert(&self, insert: Query<'_>) -> Result<u64, StoreError> {
        let mut write = self.write().await?;
        let done = insert.execute(write.connection()).await?;
        write.commit().await?;
        Ok(done.rows_affected())
    }
}

impl Bridged for SqliteConnection {
    async fn finish_in(
        &mut self,
        owned: &Owned,
        outcome: &RunOutcome,
        retention: &Retention,
    ) -> Result<Fenced, StoreError> {
        // A nested transaction, so that both statements take effect together or not at all, even if
        // the caller ignores an error.
        let mut both = self.begin().await?;
        let fenced = outcome::finish(&mut *both, Dialect::Sqlite, &owned.into(), outcome, retention).await?;
        both.commit().await?;
        Ok(fenced)
    }

    async fn stands(&mut self) -> Result<(), StoreError> {
        // Tries BEGIN, which fails inside a transaction and changes nothing. A savepoint is no test
        // here: outside of a transaction it would begin one.
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
        let found = records::find(&mut connection, identity).await;
        connection.close().await?;
        found
    }

    async fn insert_unknown(&self, claim: &KeyClaim) -> Result<Fenced, StoreError> {
        let unowned = Owned { owner: None, ..claim.owned(Basis::New) };
        let insert = insert(insert!("UNKNOWN_REQUIRES_RECOVERY"), claim, &unowned);
        Ok(Fenced::rows(self.run_insert(insert).await?))
    }

    async fn begin_operation(
        &self,
        claim: &KeyClaim,
        basis: Basis<'_>,
        patience: Duration,
    ) -> Result<Begun<Box<dyn OperationTx>>, StoreError> {
        claim.requires(&[Mode::Transactional])?;
        Ok(tx::begin(self, claim, basis, patience).await?.map(|tx| Box::new(tx) as Box<dyn OperationTx>))
    }
}

type Query<'q> = sqlx::query::Query<'q, sqlx::Sqlite, SqliteArguments>;

/// Inserts or renews the claim. Returns false where the key has a record, or must not be renewed.
async fn stake(write: &mut Write, claim: &KeyClaim, basis: Basis<'_>, owned: &Owned) -> Result<bool, StoreError> {
    let changed = match records::renewal(claim, basis, owned) {
        Some(renewal) => Session::run(write, renewal).await?,
        None => insert(insert!("IN_PROGRESS"), claim, owned).execute(write.connection()).await?.rows_affected(),
    };
    Ok(changed == 1)
}

/// The lease in milliseconds. None where the transaction itself owns the claim.
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
        .bind(owned.owner)
        .bind(lease(claim, owned))
        .bind(owned.operation_id)
}
