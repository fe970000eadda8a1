//! The transaction of a transactional operation: claim, effects, outcome (O1, O18).

use std::any::Any;
use std::time::Duration;

use async_trait::async_trait;

use super::super::SqliteStore;
use super::super::savepoint::Savepoint;
use super::super::write::Write;
use crate::error::StoreError;
use crate::inbox::port::Proof;
use crate::message::NewMessage;
use crate::operation::port::{Basis, Begun, Fenced, KeyClaim, OperationTx, Owned, RunOutcome};
use crate::operation::rules::retention::Retention;
use crate::outbox::enqueue::enqueue_all;
use crate::store::sql::records::{self, OutcomeTransaction};

/// A transaction that holds one claim, the turn, and the write lock of the file.
#[derive(Debug)]
pub(in crate::store) struct SqliteOperationTx {
    write: Write,
    owned: Owned,
    savepoint: Savepoint,
}

/// Waits for the turn, then claims and sets the savepoint.
pub(super) async fn begin(
    store: &SqliteStore,
    claim: &KeyClaim,
    basis: Basis<'_>,
    patience: Duration,
) -> Result<Begun<SqliteOperationTx>, StoreError> {
    let owned = claim.owned(basis);
    let savepoint = Savepoint::new();
    let mut begun = staked(store, claim, basis, &owned, patience).await?;
    if let Begun::Claimed(write) = &mut begun {
        savepoint.set(write).await?;
    }
    Ok(begun.map(|write| SqliteOperationTx { write, owned, savepoint }))
}

/// Begins a guarded transaction that holds the claim. Returns `Locked` where the turn did not come
/// within `patience`.
pub(in crate::store::sqlite) async fn staked(
    store: &SqliteStore,
    claim: &KeyClaim,
    basis: Basis<'_>,
    owned: &Owned,
    patience: Duration,
) -> Result<Begun<Write>, StoreError> {
    // After a timeout the beginning goes on in its own task, and is rolled back.
    let Ok(write) = tokio::time::timeout(patience, store.write()).await else { return Ok(Begun::Locked) };
    let mut write = write?;
    write.guard().await?;
    if records::stake(&mut write, claim, basis, owned).await? {
        return Ok(Begun::Claimed(write));
    }
    let found = records::find(write.connection(), &claim.identity).await?.record;
    write.rollback().await?;
    Ok(found.map_or(Begun::Locked, |record| Begun::Existing(Box::new(record))))
}

#[async_trait]
impl OperationTx for SqliteOperationTx {
    fn owned(&self) -> &Owned {
        &self.owned
    }

    fn any_connection(&mut self) -> &mut (dyn Any + Send) {
        self.write.connection()
    }

    async fn undo_effects(&mut self) -> Result<Proof, StoreError> {
        self.savepoint.prove(&mut self.write, "rollback to").await
    }

    /// Always true: under the guard only our own commit succeeds.
    async fn nothing_committed(&mut self) -> Result<bool, StoreError> {
        Ok(true)
    }

    async fn complete(
        &mut self,
        messages: Vec<NewMessage>,
        outcome: &RunOutcome,
        retention: &Retention,
    ) -> Result<Proof, StoreError> {
        let proof = self.savepoint.prove(&mut self.write, "release").await?;
        if proof != Proof::Same {
            return Ok(proof);
        }
        enqueue_all(self.write.connection(), messages).await?;
        Ok(match self.write.finish_record(&(&self.owned).into(), outcome, retention).await? {
            Fenced::Done => Proof::Same,
            Fenced::LostOwnership => Proof::Ended,
        })
    }

    async fn commit(self: Box<Self>) -> Result<(), StoreError> {
        self.write.commit().await
    }

    async fn rollback(self: Box<Self>) -> Result<(), StoreError> {
        self.write.rollback().await
    }
}
