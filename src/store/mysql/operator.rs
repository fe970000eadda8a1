//! What an operator sees and does.
//!
//! Guarantees: an act and its audit row commit together; a dead outbox row gets a request that only
//! the owner of the outbox carries out (R17); a dead delivery changes at once. Counts of large
//! tables are estimates of the server.

mod act;
mod find;
mod forget;
mod status;

use std::time::Duration;

use sqlx::Row;
use uuid::Uuid;

use super::{MySqlStore, START, text};
use crate::error::StoreError;
use crate::store::bounded::Ask;
use crate::store::{
    ActContext, AuditEntry, DeadFilter, DeadMessage, Forgotten, LockWait, Mailbox, Operator, OperatorAct,
    OperatorOutcome, Status,
};

impl Operator for MySqlStore {
    async fn status(&self) -> Result<Status, StoreError> {
        let mut status = status::read(&mut self.pool.acquire().await?).await?;
        status.emails_pending = self.emails_pending().await?;
        Ok(status)
    }

    async fn lock_waits(&self, longer_than: Duration) -> Result<Vec<LockWait>, StoreError> {
        status::lock_waits(&mut self.pool.acquire().await?, longer_than).await
    }

    async fn mend(&self, context: &ActContext) -> Result<Vec<String>, StoreError> {
        super::check::positions::mend(&self.pool, context).await
    }

    async fn audit(&self, id: Option<Uuid>, limit: usize) -> Result<Vec<AuditEntry>, StoreError> {
        let rows = sqlx::query(
            "select at, actor, act, reason, place, number, message_id, detail from oncebox_audit \
              where ? is null or message_id = ? order by audit_id desc limit ?",
        );
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let rows = rows.bind(id).bind(id).bind(limit).all(&self.pool).await?;
        rows.iter()
            .map(|row| {
                Ok(AuditEntry {
                    at: row.try_get("at")?,
                    actor: row.try_get("actor")?,
                    act: row.try_get("act")?,
                    reason: row.try_get("reason")?,
                    place: text("place", row.try_get("place")?)?,
                    number: row.try_get("number")?,
                    message_id: row.try_get("message_id")?,
                    detail: row.try_get("detail")?,
                })
            })
            .collect()
    }

    async fn forget_consumer(&self, name: &str, context: &ActContext) -> Result<Forgotten, StoreError> {
        forget::forget(&self.pool, name, context).await
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
        let mut outcome = OperatorOutcome { dry_run: context.dry_run, ..OperatorOutcome::default() };
        for found in &found {
            act::refuse_too_old(found, act, context)?;
            if let Some(done) = act::act_on(&mut transaction, found, act, context).await? {
                outcome.add(&found.dead, done);
            }
        }
        if context.dry_run {
            transaction.rollback().await?;
        } else {
            transaction.commit().await?;
        }
        Ok(outcome)
    }
}

fn count_of(count: i64) -> u64 {
    u64::try_from(count).unwrap_or(0)
}
