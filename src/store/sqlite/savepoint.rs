//! The savepoint that shows whether a handler's transaction still stands.

use sqlx::{AssertSqlSafe, raw_sql};

use super::write::Write;
use crate::error::StoreError;
use crate::inbox::port::Proof;
use crate::store::sql::savepoint_name;

/// A savepoint with a unique name. It is set before the handler runs: effects are rolled back to
/// it, and before the commit it must still exist (O1, R23).
#[derive(Debug)]
pub(super) struct Savepoint(String);

impl Savepoint {
    pub(super) fn new() -> Self {
        Self(savepoint_name())
    }

    pub(super) async fn set(&self, write: &mut Write) -> Result<(), StoreError> {
        raw_sql(AssertSqlSafe(format!("savepoint {}", self.0))).execute(write.connection()).await?;
        Ok(())
    }

    /// Runs `rollback to` or `release` on the savepoint. Returns `Aborted` where it is gone.
    pub(super) async fn prove(&self, write: &mut Write, statement: &str) -> Result<Proof, StoreError> {
        let prove = raw_sql(AssertSqlSafe(format!("{statement} {}", self.0)));
        let Err(error) = prove.execute(write.connection()).await else { return Ok(Proof::Same) };
        let error = StoreError::from(error);
        if error.is_transient() {
            return Err(error);
        }
        // The transaction was rolled back, by a raw ROLLBACK or by SQLite itself (a full disk,
        // `raise(rollback)`). Under the guard only our commit succeeds, so nothing that ran later
        // can take effect.
        Ok(Proof::Aborted)
    }
}
