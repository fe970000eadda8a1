//! The operator's acts and views that SQLite has in a way of its own. The others are in
//! [`crate::store::sql::operator`].

mod mend;

use std::time::Duration;

use async_trait::async_trait;

use super::SqliteStore;
use crate::error::StoreError;
use crate::operator::{ActContext, LockWait};
use crate::store::sql::operator::OperatorSql;

#[async_trait]
impl OperatorSql for SqliteStore {
    /// None: SQLite does not tell who has the file locked. A waiting statement gives up after the
    /// busy timeout.
    async fn waits(&self, _: Duration) -> Result<Vec<LockWait>, StoreError> {
        Ok(Vec::new())
    }

    async fn mend_positions(&self, context: &ActContext) -> Result<Vec<String>, StoreError> {
        let mut write = self.write().await?;
        let mended = mend::sequence(write.connection(), context).await?;
        if context.dry_run {
            write.rollback().await?;
        } else {
            write.commit().await?;
        }
        Ok(mended)
    }
}
