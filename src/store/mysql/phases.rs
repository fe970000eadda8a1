//! The part of phased operations that is specific to MySQL. A phase is moved on only while the
//! savepoint set at its beginning exists (O1). A transaction that InnoDB itself ended is told apart
//! from one that was committed.

use std::any::Any;
use std::time::Duration;

use async_trait::async_trait;
use sqlx::{AssertSqlSafe, MySql, Row, query, raw_sql};

use super::inbox::START_HANDLER;
use super::operations::{Held, SHORT_WAIT, USUAL_WAIT, staked};
use super::{MySqlStore, inserted, is_locked};
use crate::error::StoreError;
use crate::inbox::port::Proof;
use crate::operation::port::phases::{Driven, Run};
use crate::operation::port::{Basis, Begun, Fenced, KeyClaim, Owned, RecordFence, RunOutcome};
use crate::operation::rules::retention::Retention;
use crate::store::bounded::{Ask, Bounded};
use crate::store::sql::phases::{HeldPhase, PhaseStore};
use crate::store::sql::records::OutcomeTransaction;
use crate::store::sql::{Session, Transaction};

/// Errors after which InnoDB may have ended the transaction by itself: a lock timeout (where the
/// server is set so), a deadlock (also of XA and of group replication), a record that changed since
/// it was read (MariaDB).
const ENDING: [u32; 5] = [1205, 1213, 1614, 3101, 1020];

/// The transaction of a phase, with `autocommit = 0`.
#[derive(Debug)]
struct MySqlPhase {
    held: Held,
    /// The statement by which `hold` gives handlers the lock wait that they were promised; empty
    /// where the session has it.
    first: &'static str,
}

impl MySqlPhase {
    fn boxed(transaction: Bounded<MySql>, first: &'static str) -> Box<dyn HeldPhase> {
        Box::new(Self { held: Held::new(transaction), first })
    }

    /// The error of the last statement, where InnoDB may have ended the transaction because of it
    /// (most often a deadlock). Call this before any other statement, which would replace the
    /// warnings. The server is asked because a handler may return another error in its place.
    async fn noted(&mut self) -> Result<Option<String>, StoreError> {
        let warnings = raw_sql("show warnings").all(&mut self.held.transaction).await?;
        for row in warnings {
            let (code, message): (u32, String) = (row.try_get(1)?, row.try_get(2)?);
            if ENDING.contains(&code) {
                return Ok(Some(message));
            }
        }
        Ok(None)
    }
}

#[async_trait]
impl PhaseStore for MySqlStore {
    async fn stake(
        &self,
        claim: &KeyClaim,
        basis: Basis<'_>,
        owned: &Owned,
        _: Duration,
    ) -> Result<Begun<Box<dyn HeldPhase>>, StoreError> {
        Ok(staked(self, claim, basis, owned).await?.map(|transaction| MySqlPhase::boxed(transaction, "")))
    }

    async fn begin_held(&self) -> Result<Box<dyn HeldPhase>, StoreError> {
        Ok(MySqlPhase::boxed(self.pool.begin(START_HANDLER).await?, ""))
    }

    async fn begin_marked(&self, driven: &Driven) -> Result<Run<Box<dyn HeldPhase>>, StoreError> {
        let mut transaction = self.pool.begin(AssertSqlSafe(format!("{SHORT_WAIT}; {START_HANDLER}"))).await?;
        let refused = match mark(&mut transaction, driven).await {
            Ok(true) => return Ok(Run::Begun(MySqlPhase::boxed(transaction, USUAL_WAIT))),
            Ok(false) => Run::Marked,
            Err(error) if is_locked(&error) => Run::Unended,
            Err(error) => return Err(error.into()),
        };
        transaction.rollback().await?;
        Ok(refused)
    }
}

/// Writes the mark. Returns false where the phase has a committed mark. The first statement fails
/// at once where another transaction has a mark and has not ended; MySQL has no other way to learn
/// this. A mark made between the two statements is waited for as long as [`SHORT_WAIT`] says.
async fn mark(transaction: &mut Bounded<MySql>, driven: &Driven) -> Result<bool, sqlx::Error> {
    let id = driven.operation_id.as_bytes().to_vec();
    let there = query("select 1 from oncebox_operation_phase where operation_id = ? for update nowait");
    if there.bind(&id).optional(&mut *transaction).await?.is_some() {
        return Ok(false);
    }
    let mark =
        query("insert into oncebox_operation_phase (operation_id, epoch, began_at) values (?, ?, utc_timestamp(6))");
    inserted(mark.bind(&id).bind(driven.epoch).run(transaction).await)
}

/// The error of a query of `undo`. One that was interrupted, as by KILL QUERY, proves nothing of
/// the transaction: its `Busy`, which says that nothing happened, becomes `Unavailable`.
fn unproven(error: StoreError) -> StoreError {
    match error {
        StoreError::Busy(error) => StoreError::Unavailable(error),
        other => other,
    }
}

#[async_trait]
impl HeldPhase for MySqlPhase {
    fn session(&mut self) -> &mut dyn Session {
        &mut self.held.transaction
    }

    fn lend(&mut self) -> &mut (dyn Any + Send) {
        self.held.transaction.lend()
    }

    async fn hold(&mut self) -> Result<(), StoreError> {
        self.held.hold(self.first).await
    }

    async fn undo(&mut self) -> Result<Proof, StoreError> {
        let noted = self.noted().await.map_err(unproven)?;
        let proof = self.held.prove("rollback to").await.map_err(unproven)?;
        if proof != Proof::Ended {
            return Ok(proof);
        }
        match (self.held.nothing_committed().await.map_err(unproven)?, noted) {
            (true, Some(error)) => Err(StoreError::Busy(sqlx::Error::Protocol(error))),
            // Statements after the end of the transaction need a COMMIT to take effect, and none
            // comes.
            (true, None) => Ok(Proof::Aborted),
            (false, _) => Ok(proof),
        }
    }

    async fn prove(&mut self) -> Result<Proof, StoreError> {
        self.held.prove("release").await
    }

    async fn end_record(
        &mut self,
        record: &RecordFence,
        outcome: &RunOutcome,
        retention: &Retention,
    ) -> Result<Fenced, StoreError> {
        self.held.transaction.finish_record(record, outcome, retention).await
    }

    fn into_transaction(self: Box<Self>) -> Box<dyn Transaction> {
        Box::new(self.held.transaction)
    }
}
