//! The operator's acts and views that only SQLite can answer. The others are in
//! [`crate::store::sql::operator`].

mod mend;

use std::time::Duration;

use futures_util::future::BoxFuture;

use super::connect::SqliteStore;
use crate::error::StoreError;
use crate::operator::{ActContext, LockWait};
use crate::store::sql::operator::OperatorSql;

impl OperatorSql for SqliteStore {
    fn waits(&self, _: Duration) -> BoxFuture<'_, Result<Vec<LockWait>, StoreError>> {
        // SQLite does not tell who has the file locked. A waiting statement gives up after the busy
        // timeout.
        Box::pin(async { Ok(Vec::new()) })
    }

    fn mend_positions<'a>(&'a self, context: &'a ActContext) -> BoxFuture<'a, Result<Vec<String>, StoreError>> {
        Box::pin(async move {
            let mut write = self.write().await?;
            let mended = mend::sequence(write.connection(), context).await?;
            if context.dry_run {
                write.rollback().await?;
            } else {
                write.commit().await?;
            }
            Ok(mended)
        })
    }
}
