//! The part of phased operations that is specific to SQLite. A phase is moved on only while the
//! savepoint set at its beginning exists (O1). Its transaction holds the turn and the write lock of
//! the file, and only we can commit it, so no mark is needed.

use std::any::Any;
use std::time::Duration;

use async_trait::async_trait;

use super::SqliteStore;
use super::operations::staked;
use super::savepoint::Savepoint;
use super::write::Write;
use crate::error::StoreError;
use crate::inbox::port::Proof;
use crate::operation::port::phases::{Driven, Run};
use crate::operation::port::{Basis, Begun, Fenced, KeyClaim, Owned, RecordFence, RunOutcome};
use crate::operation::rules::retention::Retention;
use crate::store::sql::phases::{HeldPhase, PhaseStore};
use crate::store::sql::records::OutcomeTransaction;
use crate::store::sql::{Session, Transaction};

#[derive(Debug)]
struct SqlitePhase {
    write: Write,
    savepoint: Savepoint,
}

impl SqlitePhase {
    fn boxed(write: Write) -> Box<dyn HeldPhase> {
        Box::new(Self { write, savepoint: Savepoint::new() })
    }
}

#[async_trait]
impl PhaseStore for SqliteStore {
    async fn stake(
        &self,
        claim: &KeyClaim,
        basis: Basis<'_>,
        owned: &Owned,
        patience: Duration,
    ) -> Result<Begun<Box<dyn HeldPhase>>, StoreError> {
        Ok(staked(self, claim, basis, owned, patience).await?.map(SqlitePhase::boxed))
    }

    async fn begin_held(&self) -> Result<Box<dyn HeldPhase>, StoreError> {
        let mut write = self.write().await?;
        write.guard().await?;
        Ok(SqlitePhase::boxed(write))
    }

    async fn begin_marked(&self, _: &Driven) -> Result<Run<Box<dyn HeldPhase>>, StoreError> {
        Ok(Run::Begun(self.begin_held().await?))
    }
}

#[async_trait]
impl HeldPhase for SqlitePhase {
    fn session(&mut self) -> &mut dyn Session {
        &mut self.write
    }

    fn lend(&mut self) -> &mut (dyn Any + Send) {
        self.write.connection()
    }

    async fn hold(&mut self) -> Result<(), StoreError> {
        self.savepoint.set(&mut self.write).await
    }

    async fn undo(&mut self) -> Result<Proof, StoreError> {
        self.savepoint.prove(&mut self.write, "rollback to").await
    }

    async fn prove(&mut self) -> Result<Proof, StoreError> {
        self.savepoint.prove(&mut self.write, "release").await
    }

    async fn end_record(
        &mut self,
        record: &RecordFence,
        outcome: &RunOutcome,
        retention: &Retention,
    ) -> Result<Fenced, StoreError> {
        self.write.finish_record(record, outcome, retention).await
    }

    fn into_transaction(self: Box<Self>) -> Box<dyn Transaction> {
        Box::new(self.write)
    }
}
