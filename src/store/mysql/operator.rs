//! What an operator sees and does.
//!
//! Guarantees: an act and its audit row commit together; a dead outbox row gets a request that only the owner of the outbox carries
//! out (R17); a dead delivery changes at once. Counts of large tables are estimates of the server.

mod act;
mod find;
mod status;

use super::{MySqlStore, START};
use crate::error::StoreError;
use crate::store::{ActContext, DeadFilter, DeadMessage, Mailbox, Operator, OperatorAct, OperatorOutcome, Status};

impl Operator for MySqlStore {
    async fn status(&self) -> Result<Status, StoreError> {
        let mut status = status::read(&mut self.pool.acquire().await?).await?;
        status.emails_pending = self.emails_pending().await?;
        Ok(status)
    }

    async fn dead(&self, filter: &DeadFilter) -> Result<Vec<DeadMessage>, StoreError> {
        let found = find::find(&mut self.pool.acquire().await?, filter).await?;
        Ok(found.into_iter().map(|found| found.dead).collect())
    }

    async fn act(
        &self,
        filter: &DeadFilter,
        act: &OperatorAct,
        context: &ActContext,
    ) -> Result<OperatorOutcome, StoreError> {
        let mut transaction = self.pool.begin(START).await?;
        let found = find::find(&mut transaction, filter).await?;
        if let (OperatorAct::RedriveAs { .. }, count @ 2..) = (act, found.len()) {
            return Err(StoreError::Refused(format!(
                "a new id is for one message, and {count} are meant; name one by its number"
            )));
        }
        let mut numbers = Vec::with_capacity(found.len());
        for found in &found {
            act::refuse_too_old(found, act, context)?;
            if context.dry_run || act::act_on(&mut transaction, found, act, context).await? {
                numbers.push(found.dead.number.clone());
            }
        }
        if context.dry_run {
            transaction.rollback().await?;
        } else {
            transaction.commit().await?;
        }
        Ok(OperatorOutcome { numbers, dry_run: context.dry_run })
    }
}

fn count_of(count: i64) -> u64 {
    u64::try_from(count).unwrap_or(0)
}
