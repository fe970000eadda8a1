//! The transaction of a transactional operation: claim, effects, outcome (O1, O15, O17).

use std::any::Any;

use async_trait::async_trait;
use sqlx::{AssertSqlSafe, MySql, raw_sql};

use super::super::inbox::{NO_SAVEPOINT, START_HANDLER};
use super::super::{MySqlStore, is_locked, number};
use crate::error::StoreError;
use crate::inbox::port::Proof;
use crate::message::NewMessage;
use crate::operation::port::{Basis, Begun, Fenced, KeyClaim, OperationTx, Owned, RunOutcome};
use crate::operation::rules::retention::Retention;
use crate::store::bounded::{Ask, Bounded};
use crate::store::sql::records::OutcomeTransaction;
use crate::store::sql::{records, savepoint_name};

/// MySQL has no lock wait for a single statement, so the session gets the shortest one (1 s) until
/// the claim is made. MariaDB has one, by which a new transactional claim does not wait at all, and
/// gets this one too, so that tests on MariaDB cover it. A refused claim does not restore the
/// value: its connection goes back to the pool, which sets it up again
/// ([`connect`](super::super::connect)). So the saved value is never 1.
pub(in crate::store::mysql) const SHORT_WAIT: &str =
    "set @oncebox_lock_wait = @@session.innodb_lock_wait_timeout, session innodb_lock_wait_timeout = 1";
/// Restores the lock wait that handlers were promised.
pub(in crate::store::mysql) const USUAL_WAIT: &str = "set session innodb_lock_wait_timeout = @oncebox_lock_wait";

/// The number of statements of this session that may have committed: all kinds except those known
/// not to. It is the server's own count, which includes statements inside procedures. InnoDB does
/// not report that it ended a transaction, so this is the only proof that nothing was committed.
macro_rules! may_have_committed {
    () => {
        "(select sum(variable_value) from /*M! information_schema.session_status */ /*!80000 performance_schema.session_status */ \
          where left(variable_name, 4) = 'COM_' and substr(variable_name, 5) not in ('SELECT', 'INSERT', 'INSERT_SELECT', 'UPDATE', \
            'UPDATE_MULTI', 'DELETE', 'DELETE_MULTI', 'REPLACE', 'REPLACE_SELECT', 'DO', 'CALL_PROCEDURE', 'SAVEPOINT', \
            'RELEASE_SAVEPOINT', 'ROLLBACK_TO_SAVEPOINT', 'ROLLBACK', 'SHOW_WARNINGS', 'STMT_PREPARE', 'STMT_REPREPARE', \
            'STMT_EXECUTE', 'STMT_CLOSE', 'STMT_RESET', 'STMT_FETCH', 'STMT_SEND_LONG_DATA'))"
    };
}

/// Stores the count; the handler's statements come after it.
const COUNT: &str = concat!("set @oncebox_committed = ", may_have_committed!());
const NOTHING_COMMITTED: &str =
    concat!("select cast(coalesce(@oncebox_committed = ", may_have_committed!(), ", false) as signed)");

/// A transaction in which one claim stands, with `autocommit = 0`.
#[derive(Debug)]
pub(in crate::store) struct MySqlOperationTx {
    held: Held,
    owned: Owned,
}

/// A transaction, and the savepoint that proves later that it has not ended.
#[derive(Debug)]
pub(in crate::store::mysql) struct Held {
    pub(in crate::store::mysql) transaction: Bounded<MySql>,
    /// Set right after the claim. Effects are rolled back to it, and it must exist when the outcome
    /// is written.
    savepoint: String,
}

/// Takes the lock without waiting, claims, and sets the savepoint.
pub(super) async fn begin_operation(
    store: &MySqlStore,
    claim: &KeyClaim,
    basis: Basis<'_>,
) -> Result<Begun<MySqlOperationTx>, StoreError> {
    let owned = claim.owned(basis);
    let mut begun = staked_at_once(store, claim, basis, &owned).await?.map(Held::new);
    if let Begun::Claimed(held) = &mut begun {
        held.hold(USUAL_WAIT).await?;
    }
    Ok(begun.map(|held| MySqlOperationTx { held, owned }))
}

/// Begins a transaction that holds the claim. Where the claim is refused, the transaction is ended
/// before this returns.
pub(in crate::store::mysql) async fn staked(
    store: &MySqlStore,
    claim: &KeyClaim,
    basis: Basis<'_>,
    owned: &Owned,
) -> Result<Begun<Bounded<MySql>>, StoreError> {
    let mut begun = staked_at_once(store, claim, basis, owned).await?;
    if let Begun::Claimed(transaction) = &mut begun {
        raw_sql(USUAL_WAIT).run(transaction).await?;
    }
    Ok(begun)
}

/// As `staked`, but the short lock wait stays set.
async fn staked_at_once(
    store: &MySqlStore,
    claim: &KeyClaim,
    basis: Basis<'_>,
    owned: &Owned,
) -> Result<Begun<Bounded<MySql>>, StoreError> {
    let mut transaction = store.pool.begin(AssertSqlSafe(format!("{SHORT_WAIT}; {START_HANDLER}"))).await?;
    match try_claim(&mut transaction, claim, basis, owned).await {
        Ok(true) => Ok(Begun::Claimed(transaction)),
        Ok(false) => {
            let found = records::find(&mut transaction, &claim.identity).await?.record;
            transaction.rollback().await?;
            Ok(found.map_or(Begun::Locked, |record| Begun::Existing(Box::new(record))))
        }
        Err(StoreError::Busy(error) | StoreError::Other(error)) if is_locked(&error) => {
            // Only the statement was rolled back, so the transaction is ended here (R27).
            transaction.rollback().await?;
            Ok(Begun::Locked)
        }
        Err(error) => Err(error),
    }
}

async fn try_claim(
    connection: &mut Bounded<MySql>,
    claim: &KeyClaim,
    basis: Basis<'_>,
    owned: &Owned,
) -> Result<bool, StoreError> {
    let there: Option<i64> =
        sqlx::query_scalar("select epoch from oncebox_idempotency_request where key_digest = ? for update nowait")
            .bind(claim.identity.digest().to_vec())
            .optional(&mut *connection)
            .await?;
    if there.is_some() && matches!(basis, Basis::New) {
        return Ok(false);
    }
    records::stake(connection, claim, basis, owned).await
}

impl Held {
    /// Wraps a transaction in which only our own statements ran; the handler runs after
    /// [`Self::hold`].
    pub(in crate::store::mysql) fn new(transaction: Bounded<MySql>) -> Self {
        Self { transaction, savepoint: savepoint_name() }
    }

    /// Runs the statement `first`, if any, stores the count and sets the savepoint, all in one
    /// packet.
    pub(in crate::store::mysql) async fn hold(&mut self, first: &str) -> Result<(), StoreError> {
        let first = if first.is_empty() { String::new() } else { format!("{first}; ") };
        let hold = AssertSqlSafe(format!("{first}{COUNT}; savepoint {}", self.savepoint));
        raw_sql(hold).run(&mut self.transaction).await?;
        Ok(())
    }

    /// Whether it is proven that nothing was committed since `hold`; see
    /// [`OperationTx::nothing_committed`].
    pub(in crate::store::mysql) async fn nothing_committed(&mut self) -> Result<bool, StoreError> {
        let proven: i64 = sqlx::query_scalar(NOTHING_COMMITTED).one(&mut self.transaction).await?;
        Ok(proven != 0)
    }

    /// Runs `rollback to` or `release` on the savepoint. Returns `Ended` where it is gone.
    pub(in crate::store::mysql) async fn prove(&mut self, statement: &str) -> Result<Proof, StoreError> {
        let prove = AssertSqlSafe(format!("{statement} savepoint {}", self.savepoint));
        match raw_sql(prove).run(&mut self.transaction).await {
            Ok(_) => Ok(Proof::Same),
            Err(error) if number(&error) == Some(NO_SAVEPOINT) => Ok(Proof::Ended),
            Err(error) => Err(error.into()),
        }
    }
}

#[async_trait]
impl OperationTx for MySqlOperationTx {
    fn owned(&self) -> &Owned {
        &self.owned
    }

    fn any_connection(&mut self) -> &mut (dyn Any + Send) {
        self.held.transaction.lend()
    }

    async fn undo_effects(&mut self) -> Result<Proof, StoreError> {
        self.held.prove("rollback to").await
    }

    async fn nothing_committed(&mut self) -> Result<bool, StoreError> {
        self.held.nothing_committed().await
    }

    async fn complete(
        &mut self,
        messages: Vec<NewMessage>,
        outcome: &RunOutcome,
        retention: &Retention,
    ) -> Result<Proof, StoreError> {
        let proof = self.held.prove("release").await?;
        if proof != Proof::Same {
            return Ok(proof);
        }
        self.held.transaction.enqueue(messages).await?;
        Ok(match self.held.transaction.finish_record(&(&self.owned).into(), outcome, retention).await? {
            Fenced::Done => Proof::Same,
            Fenced::LostOwnership => Proof::Ended,
        })
    }

    async fn commit(mut self: Box<Self>) -> Result<(), StoreError> {
        self.held.transaction.commit().await
    }

    async fn rollback(mut self: Box<Self>) -> Result<(), StoreError> {
        self.held.transaction.rollback().await.map_err(StoreError::from)
    }
}
