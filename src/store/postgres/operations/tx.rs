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
    held: Held,
    owned: Owned,
}

/// A transaction that must still be there when its outcome is written.
#[derive(Debug)]
pub(in crate::store::postgres) struct Held {
    pub(in crate::store::postgres) tx: Bounded<Postgres>,
    /// The id of the transaction that holds the claim: the witness of R23.
    pub(in crate::store::postgres) token: String,
    /// Set right after the claim.
    savepoint: String,
}

impl Held {
    /// Sets the savepoint.
    pub(in crate::store::postgres) async fn new(mut tx: Bounded<Postgres>, token: String) -> Result<Self, StoreError> {
        let savepoint = format!("oncebox_{}", Uuid::now_v7().simple());
        raw_sql(AssertSqlSafe(format!("savepoint {savepoint}"))).run(&mut tx).await?;
        Ok(Self { tx, token, savepoint })
    }
}

/// Try-lock, claim, savepoint. Where the claim is refused, the transaction ends before the answer.
pub(super) async fn begin(
    store: &PostgresStore,
    claim: &KeyClaim,
    basis: Basis<'_>,
) -> Result<Begun<PostgresOperationTx>, StoreError> {
    let owned = claim.owned(basis);
    Ok(match staked(store, claim, basis, &owned).await? {
        Begun::Claimed((tx, token)) => Begun::Claimed(PostgresOperationTx { held: Held::new(tx, token).await?, owned }),
        Begun::Existing(record) => Begun::Existing(record),
        Begun::Locked => Begun::Locked,
    })
}

/// A transaction in which the claim stands, and its id.
pub(in crate::store::postgres) async fn staked(
    store: &PostgresStore,
    claim: &KeyClaim,
    basis: Basis<'_>,
    owned: &Owned,
) -> Result<Begun<(Bounded<Postgres>, String)>, StoreError> {
    let mut tx = store.transaction().await?;
    let lock = claim.identity.lock_number();
    let (locked, token): (bool, Option<String>) = match renewal(basis) {
        None => {
            let row = insert(LOCK_AND_INSERT, claim, owned).bind(lock).one(&mut tx).await?;
            (row.try_get(0)?, row.try_get(1)?)
        }
        Some(holds) => {
            let statement = format!(
                "{RENEW}{holds} and (select pg_try_advisory_xact_lock($11)) returning pg_current_xact_id()::text"
            );
            let row = renew(&statement, claim, owned).bind(lock).optional(&mut tx).await?;
            (true, row.map(|row| row.try_get(0)).transpose()?)
        }
    };
    if let Some(token) = token {
        return Ok(Begun::Claimed((tx, token)));
    }
    // A statement of its own: it sees what was committed meanwhile.
    let found = if locked { find(&mut tx, &claim.identity).await?.record } else { None };
    tx.rollback().await?;
    Ok(found.map_or(Begun::Locked, |record| Begun::Existing(Box::new(record))))
}

/// Takes everything back to the savepoint, where it is still there.
pub(in crate::store::postgres) async fn undo(held: &mut Held) -> Result<Proof, StoreError> {
    let undo = AssertSqlSafe(format!("rollback to savepoint {}", held.savepoint));
    match raw_sql(undo).run(&mut held.tx).await {
        Ok(_) => Ok(Proof::Same),
        // No such savepoint; no transaction; an aborted one of which this savepoint is no part.
        Err(sqlx::Error::Database(error)) if matches!(error.code().as_deref(), Some("3B001" | "25P01" | "25P02")) => {
            Ok(Proof::Ended)
        }
        Err(error) => Err(error.into()),
    }
}

/// What the error of a statement proves. 25P02: a statement failed before, and its error was swallowed; COMMIT would roll back
/// and say nothing. Which transaction is aborted, our savepoint knows: a handler may have ended ours, written what was
/// committed at once, and begun another (O1).
pub(in crate::store::postgres) async fn aborted(held: &mut Held, error: StoreError) -> Result<Proof, StoreError> {
    match &error {
        StoreError::Other(sqlx::Error::Database(database)) if database.code().as_deref() == Some("25P02") => {}
        _ => return Err(error),
    }
    Ok(match undo(held).await? {
        Proof::Same => Proof::Aborted,
        ended => ended,
    })
}

impl OperationTx for PostgresOperationTx {
    type Db = Postgres;

    fn owned(&self) -> &Owned {
        &self.owned
    }

    fn connection(&mut self) -> &mut PgConnection {
        self.held.tx.plain()
    }

    async fn undo_effects(&mut self) -> Result<Proof, StoreError> {
        undo(&mut self.held).await
    }

    async fn complete(&mut self, outcome: &Outcome, retention: &Retention) -> Result<Proof, StoreError> {
        let token = Some(self.held.token.as_str());
        match finish(&mut self.held.tx, &(&self.owned).into(), outcome, retention, token).await {
            Ok(Fenced::Done) => Ok(Proof::Same),
            Ok(Fenced::LostOwnership) => Ok(Proof::Ended),
            Err(error) => aborted(&mut self.held, error).await,
        }
    }

    async fn commit(mut self) -> Result<(), StoreError> {
        self.held.tx.commit().await
    }

    async fn rollback(mut self) -> Result<(), StoreError> {
        Ok(self.held.tx.rollback().await?)
    }
}
