//! The transaction of a transactional operation: claim, effects, outcome (O1, O15).

use std::any::Any;

use async_trait::async_trait;
use sqlx::{AssertSqlSafe, Postgres, Row, raw_sql};

use super::super::connect::BEGIN;
use super::super::door::checked;
use super::super::{PostgresStore, code};
use super::{CLAIM, Within, finish};
use crate::error::StoreError;
use crate::inbox::port::Proof;
use crate::message::NewMessage;
use crate::operation::port::{Basis, Begun, Fenced, KeyClaim, OperationTx, Owned, RunOutcome};
use crate::operation::rules::Mode;
use crate::operation::rules::retention::Retention;
use crate::store::bounded::{Ask, Bounded};
use crate::store::sql::forgotten::{Former, forget_former};
use crate::store::sql::{Session, Statement, records, savepoint_name, sql};

/// A transaction in which one claim stands.
#[derive(Debug)]
pub(in crate::store) struct PostgresOperationTx {
    held: Held,
    owned: Owned,
    claim: KeyClaim,
    /// The statement that renewed a record, where the claim did so; see [`records::renewal`].
    renewal: Option<Statement>,
    /// What the claim deleted, because the key was used anew.
    former: Option<Former>,
}

/// A transaction, and what proves later that it has not ended.
#[derive(Debug)]
pub(in crate::store::postgres) struct Held {
    pub(in crate::store::postgres) tx: Bounded<Postgres>,
    /// The id of the transaction that holds the claim. The outcome is written only in the
    /// transaction of this id (R23).
    pub(in crate::store::postgres) token: String,
    /// The name of the savepoint, made from a new UUID v7.
    savepoint: String,
}

impl Held {
    /// Wraps a transaction in which only our own statements ran; the handler runs after
    /// [`Self::hold`].
    pub(in crate::store::postgres) fn new(tx: Bounded<Postgres>) -> Self {
        Self { tx, token: String::new(), savepoint: savepoint_name() }
    }

    /// Runs the statement `first`, sets the savepoint, and reads the id of the transaction, all in
    /// one message. `first` is empty or ends with `;`.
    pub(in crate::store::postgres) async fn hold(&mut self, first: &str) -> Result<(), StoreError> {
        let hold = format!("{first}savepoint {}; select pg_current_xact_id()::text", self.savepoint);
        self.token = raw_sql(AssertSqlSafe(hold)).one(&mut self.tx).await?.try_get(0)?;
        Ok(())
    }

    /// Rolls back to the savepoint. Returns `Ended` where the savepoint is gone.
    pub(in crate::store::postgres) async fn undo(&mut self) -> Result<Proof, StoreError> {
        let undo = AssertSqlSafe(format!("rollback to savepoint {}", self.savepoint));
        match raw_sql(undo).run(&mut self.tx).await {
            Ok(_) => Ok(Proof::Same),
            // No such savepoint; no transaction; or an aborted transaction without this savepoint.
            Err(error) if matches!(code(&error).as_deref(), Some("3B001" | "25P01" | "25P02")) => Ok(Proof::Ended),
            Err(error) => Err(error.into()),
        }
    }

    /// Finds out what an error of our own statement proves. The error may have come before the
    /// statement compared the transaction's id. The savepoint tells whether the transaction is
    /// still there: a handler may have ended it, run statements that committed at once, and begun
    /// another (O1).
    ///
    /// # Errors
    /// The given error where the transaction is still ours. Where the check fails too, the given
    /// error if it is transient, else that of the check. 25P02 with the savepoint in place is no
    /// error but [`Proof::Aborted`]: an earlier statement failed and the handler swallowed its
    /// error, so COMMIT would roll back without an error.
    pub(in crate::store::postgres) async fn proved_by(&mut self, error: StoreError) -> Result<Proof, StoreError> {
        let swallowed = matches!(&error, StoreError::Other(error) if code(error).as_deref() == Some("25P02"));
        match self.undo().await {
            Ok(Proof::Same) if swallowed => Ok(Proof::Aborted),
            Ok(Proof::Same) => Err(error),
            Ok(ended) => Ok(ended),
            // Nothing is proven, so the failure is not the handler's.
            Err(lost) => Err(if error.is_transient() { error } else { lost }),
        }
    }
}

/// Begins with a savepoint, tries the advisory lock of the key, and claims. Where the claim is
/// refused, the transaction is ended before this returns.
///
/// The savepoint is sent in one message with BEGIN, so it stands before the claim. A rollback to it
/// takes the claim back too, so `undo_effects` claims again.
pub(super) async fn begin(
    store: &PostgresStore,
    claim: &KeyClaim,
    basis: Basis<'_>,
) -> Result<Begun<PostgresOperationTx>, StoreError> {
    let (owned, savepoint) = (claim.owned(basis), savepoint_name());
    let tx = store.pool.begin(AssertSqlSafe(format!("{BEGIN}; savepoint {savepoint}"))).await?;
    let begun = staked_in(tx, claim, basis, &owned).await?;
    let renewal = records::renewal(claim, basis, &owned);
    Ok(begun.map(|(tx, token)| {
        let held = Held { tx, token, savepoint };
        PostgresOperationTx { held, owned, claim: claim.clone(), renewal, former: Former::of(basis) }
    }))
}

/// As `begin`, for a key that was not looked up before. Returns none where the claim is refused;
/// the caller then looks the key up.
pub(super) async fn begin_unseen(
    store: &PostgresStore,
    claim: &KeyClaim,
) -> Result<Option<PostgresOperationTx>, StoreError> {
    let (owned, savepoint) = (claim.owned(Basis::New), savepoint_name());
    let mut tx = store.pool.begin(AssertSqlSafe(format!("{BEGIN}; savepoint {savepoint}"))).await?;
    let Some(token) = stake(&mut tx, claim, None, &owned).await? else {
        tx.rollback().await?;
        return Ok(None);
    };
    let held = Held { tx, token, savepoint };
    Ok(Some(PostgresOperationTx { held, owned, claim: claim.clone(), renewal: None, former: None }))
}

/// Begins a transaction without a savepoint and claims. Returns it with its id.
pub(in crate::store::postgres) async fn staked(
    store: &PostgresStore,
    claim: &KeyClaim,
    basis: Basis<'_>,
    owned: &Owned,
) -> Result<Begun<(Bounded<Postgres>, String)>, StoreError> {
    staked_in(store.pool.begin(BEGIN).await?, claim, basis, owned).await
}

/// Locks the record. Returns no row where another transaction has locked it, or it is gone.
const LOCK_FREE: &str = "select epoch from oncebox.idempotency_request where key_digest = :digest {lock free}";

async fn staked_in(
    mut tx: Bounded<Postgres>,
    claim: &KeyClaim,
    basis: Basis<'_>,
    owned: &Owned,
) -> Result<Begun<(Bounded<Postgres>, String)>, StoreError> {
    // A late run of another mode may have left evidence, which is read under the lock of the row.
    // Where that lock is not free, nothing is claimed: a statement that waited for it would not see
    // the evidence that came meanwhile.
    let needs_lock = matches!(basis, Basis::Reclaim(seen) if seen.mode != Mode::Transactional);
    let is_free =
        !needs_lock || !tx.rows(sql(LOCK_FREE).bind("digest", &claim.identity.digest()[..])).await?.is_empty();
    if is_free && let Some(token) = stake(&mut tx, claim, records::renewal(claim, basis, owned), owned).await? {
        forget_former(&mut tx, basis).await?;
        return Ok(Begun::Claimed((tx, token)));
    }
    // A new statement sees what was committed meanwhile.
    let found = records::find(&mut tx, &claim.identity).await?.record;
    tx.rollback().await?;
    Ok(found.map_or(Begun::Locked, |record| Begun::Existing(Box::new(record))))
}

/// Tries the advisory lock of the key and claims. Returns the id of the transaction where the claim
/// succeeded; none where the lock is not free, or the record is not what the claim expects.
async fn stake(
    tx: &mut Bounded<Postgres>,
    claim: &KeyClaim,
    renewal: Option<Statement>,
    owned: &Owned,
) -> Result<Option<String>, StoreError> {
    let claimed = renewal.unwrap_or_else(|| records::of_claim(CLAIM, claim, owned));
    let rows = tx.rows(claimed.bind("lock", claim.identity.lock_number())).await?;
    rows.first().map(|row| row.get(0)).transpose()
}

#[async_trait]
impl OperationTx for PostgresOperationTx {
    fn owned(&self) -> &Owned {
        &self.owned
    }

    fn any_connection(&mut self) -> &mut (dyn Any + Send) {
        self.held.tx.lend()
    }

    async fn undo_effects(&mut self) -> Result<Proof, StoreError> {
        let proof = self.held.undo().await?;
        if proof != Proof::Same {
            return Ok(proof);
        }
        // The rollback took the claim and its lock back too, and another transaction may have
        // claimed.
        match stake(&mut self.held.tx, &self.claim, self.renewal.clone(), &self.owned).await? {
            Some(token) if token == self.held.token => {
                if let Some(former) = self.former {
                    former.forget(&mut self.held.tx).await?;
                }
                Ok(Proof::Same)
            }
            _ => Err(StoreError::Busy(sqlx::Error::Protocol("the key could not be claimed again".into()))),
        }
    }

    async fn complete(
        &mut self,
        messages: Vec<NewMessage>,
        outcome: &RunOutcome,
        retention: &Retention,
    ) -> Result<Proof, StoreError> {
        let messages = match checked(messages) {
            Ok(messages) => messages,
            Err(error) => return self.held.proved_by(error).await,
        };
        let within = Within { token: &self.held.token, messages: &messages };
        match finish(&mut self.held.tx, &(&self.owned).into(), outcome, retention, Some(within)).await {
            Ok(Fenced::Done) => Ok(Proof::Same),
            Ok(Fenced::LostOwnership) => Ok(Proof::Ended),
            Err(error) => self.held.proved_by(error).await,
        }
    }

    async fn commit(mut self: Box<Self>) -> Result<(), StoreError> {
        self.held.tx.commit().await
    }

    async fn rollback(mut self: Box<Self>) -> Result<(), StoreError> {
        Ok(self.held.tx.rollback().await?)
    }
}
