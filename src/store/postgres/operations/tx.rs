//! The transaction of door A: claim, effects, outcome (O1, O15).

use sqlx::{AssertSqlSafe, PgConnection, Postgres, Row, raw_sql};
use uuid::Uuid;

use super::super::PostgresStore;
use super::{LOCK_AND_INSERT, RENEW, find, finish, insert, renew, renewal};
use crate::error::StoreError;
use crate::policy::operation::retention::Retention;
use crate::store::bounded::{Ask, Bounded};
use crate::store::{Basis, Begun, Fenced, KeyClaim, OperationTx, Outcome, Owned, Proof};

/// A transaction in which one claim stands.
#[derive(Debug)]
pub struct PostgresOperationTx {
    tx: Bounded<Postgres>,
    owned: Owned,
    /// The id of the transaction that holds the claim: the witness of R23.
    token: String,
    /// Set right after the claim.
    savepoint: String,
}

/// Try-lock, claim, savepoint. Where the claim is refused, the transaction ends before the answer.
pub(super) async fn begin(
    store: &PostgresStore,
    claim: &KeyClaim,
    basis: Basis<'_>,
) -> Result<Begun<PostgresOperationTx>, StoreError> {
    let owned = claim.owned(basis);
    let mut tx = store.transaction().await?;
    let lock = claim.identity.lock_number();
    let (locked, token): (bool, Option<String>) = match renewal(basis) {
        None => {
            let row = insert(LOCK_AND_INSERT, claim, &owned).bind(lock).one(&mut tx).await?;
            (row.try_get(0)?, row.try_get(1)?)
        }
        Some(holds) => {
            let statement = format!(
                "{RENEW}{holds} and (select pg_try_advisory_xact_lock($11)) returning pg_current_xact_id()::text"
            );
            let row = renew(&statement, claim, &owned).bind(lock).optional(&mut tx).await?;
            (true, row.map(|row| row.try_get(0)).transpose()?)
        }
    };
    if let Some(token) = token {
        let savepoint = format!("oncebox_{}", Uuid::now_v7().simple());
        raw_sql(AssertSqlSafe(format!("savepoint {savepoint}"))).run(&mut tx).await?;
        return Ok(Begun::Claimed(PostgresOperationTx { tx, owned, token, savepoint }));
    }
    // A statement of its own: it sees what was committed meanwhile.
    let found = if locked { find(tx.plain(), &claim.identity).await?.record } else { None };
    tx.rollback().await?;
    Ok(found.map_or(Begun::Locked, |record| Begun::Existing(Box::new(record))))
}

impl OperationTx for PostgresOperationTx {
    type Db = Postgres;

    fn owned(&self) -> &Owned {
        &self.owned
    }

    fn connection(&mut self) -> &mut PgConnection {
        self.tx.plain()
    }

    async fn undo_effects(&mut self) -> Result<Proof, StoreError> {
        let undo = AssertSqlSafe(format!("rollback to savepoint {}", self.savepoint));
        match raw_sql(undo).run(&mut self.tx).await {
            Ok(_) => Ok(Proof::Same),
            // No such savepoint; no transaction; an aborted one of which this savepoint is no part.
            Err(sqlx::Error::Database(error))
                if matches!(error.code().as_deref(), Some("3B001" | "25P01" | "25P02")) =>
            {
                Ok(Proof::Ended)
            }
            Err(error) => Err(error.into()),
        }
    }

    async fn complete(&mut self, outcome: &Outcome, retention: &Retention) -> Result<Proof, StoreError> {
        match finish(self.tx.plain(), &self.owned, outcome, retention, Some(&self.token)).await {
            Ok(Fenced::Done) => Ok(Proof::Same),
            Ok(Fenced::LostOwnership) => Ok(Proof::Ended),
            // A statement failed, its error was swallowed: COMMIT would roll back and say nothing.
            Err(StoreError::Other(sqlx::Error::Database(error))) if error.code().as_deref() == Some("25P02") => {
                Ok(Proof::Aborted)
            }
            Err(error) => Err(error),
        }
    }

    async fn commit(mut self) -> Result<(), StoreError> {
        self.tx.commit().await
    }

    async fn rollback(mut self) -> Result<(), StoreError> {
        Ok(self.tx.rollback().await?)
    }
}
