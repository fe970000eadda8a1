//! What an operator sees and does, on every database.
//!
//! Guarantees: an act and its audit row commit together. An act on the outbox only writes a
//! request, which the owner of the shard carries out (R17). A redriven message of a consumer has
//! its inbox row, so a second copy is a duplicate (R31). Counts are bounded.
//!
//! Not here: lock waits and the mending of positions, which each database implements itself.

mod act;
mod consumers;
pub(in crate::store) mod list;
pub(in crate::store) mod status;
mod unattended;

use std::time::Duration;

use async_trait::async_trait;
use uuid::Uuid;

use super::{Session, SqlStore, audit, sql};
use crate::email::port::Mailbox;
use crate::error::StoreError;
use crate::operator::{
    ActContext, AuditEntry, DeadFilter, DeadMessage, Forgotten, LockWait, Operator, OperatorAct, OperatorOutcome,
    Status,
};
use crate::store::base::Base;
use crate::store::statements::Dialect;

/// The part of the operator's duty that each database implements itself.
#[async_trait]
pub(in crate::store) trait OperatorSql: SqlStore + Base + Mailbox {
    /// What [`Operator::lock_waits`] gives here.
    async fn waits(&self, longer_than: Duration) -> Result<Vec<LockWait>, StoreError>;

    /// What [`Operator::mend`] does and gives.
    async fn mend_positions(&self, context: &ActContext) -> Result<Vec<String>, StoreError>;
}

async fn read_status<S: OperatorSql>(store: &S, earlier: Option<&Status>) -> Result<Status, StoreError> {
    let dialect = store.dialect();
    // The connection is given back first: the next query takes one of its own, and the pool may
    // have only one.
    let status = if dialect == Dialect::Postgres {
        let mut transaction = store.begin_sql().await?;
        transaction.session().rows(sql(status::PLANS)).await?;
        let status = read_by(transaction.session(), dialect, earlier).await?;
        transaction.rollback().await?;
        status
    } else {
        read_by(&mut *store.reader().await?, dialect, earlier).await?
    };
    Ok(Status { emails_pending: store.emails_pending().await?, ..status })
}

/// Reads the status except how many e-mails are pending. What is unattended is copied from an
/// `earlier` status.
async fn read_by(session: &mut dyn Session, dialect: Dialect, earlier: Option<&Status>) -> Result<Status, StoreError> {
    let unattended = match earlier {
        Some(earlier) => earlier.unattended.clone(),
        None => unattended::read(session).await?,
    };
    Ok(Status { unattended, ..status::read(session, dialect, earlier).await? })
}

#[async_trait]
impl<S: OperatorSql> Operator for S {
    async fn status(&self) -> Result<Status, StoreError> {
        read_status(self, None).await
    }

    async fn status_since(&self, earlier: &Status) -> Result<Status, StoreError> {
        read_status(self, Some(earlier)).await
    }

    async fn lock_waits(&self, longer_than: Duration) -> Result<Vec<LockWait>, StoreError> {
        self.waits(longer_than).await
    }

    async fn audit(&self, id: Option<Uuid>, limit: usize) -> Result<Vec<AuditEntry>, StoreError> {
        audit::read(&mut *self.reader().await?, id, limit).await
    }

    async fn forget_consumer(&self, name: &str, context: &ActContext) -> Result<Forgotten, StoreError> {
        consumers::forget(self, name, context).await
    }

    async fn dead(&self, filter: &DeadFilter) -> Result<Vec<DeadMessage>, StoreError> {
        let found = list::find(&mut *self.reader().await?, filter).await?;
        Ok(found.into_iter().map(|found| found.message).collect())
    }

    async fn dead_numbers(&self, filter: &DeadFilter) -> Result<Vec<String>, StoreError> {
        list::numbers(&mut *self.reader().await?, filter).await
    }

    async fn held_topics(&self, limit: usize) -> Result<Vec<DeadMessage>, StoreError> {
        let found = list::held_topics(&mut *self.reader().await?, limit).await?;
        Ok(found.into_iter().map(|found| found.message).collect())
    }

    async fn mend(&self, context: &ActContext) -> Result<Vec<String>, StoreError> {
        self.mend_positions(context).await
    }

    async fn act(
        &self,
        filter: &DeadFilter,
        act: &OperatorAct,
        context: &ActContext,
    ) -> Result<OperatorOutcome, StoreError> {
        let mut transaction = self.begin_sql().await?;
        let outcome = act::act(transaction.session(), filter, act, context).await?;
        if context.dry_run {
            transaction.rollback().await?;
        } else {
            transaction.commit().await?;
        }
        Ok(outcome)
    }
}
