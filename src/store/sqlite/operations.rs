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
use sqlx::sqlite::SqliteConnection;
use sqlx::{ConnectOptions, Connection};

pub(super) use self::tx::staked;

use super::SqliteStore;
use super::write::Write;
use crate::error::StoreError;
use crate::operation::port::{
    Basis, Begun, Bridged, Fenced, KeyClaim, Look, OperationTx, Operations, Owned, RecordFence, RunOutcome, ended,
};
use crate::operation::rules::retention::Retention;
use crate::operation::rules::{Identity, Mode};
use crate::store::base::Base;
use crate::store::sql::outcome;
use crate::store::sql::records::{self, KeyStore, OutcomeTransaction};
use crate::store::statements::Dialect;

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
    async fn begin_outcome(&self) -> Result<Box<dyn OutcomeTransaction>, StoreError> {
        Ok(Box::new(self.write().await?))
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
        Err(ended())
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
        records::insert_unknown(self, claim).await
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
