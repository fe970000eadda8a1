//! The transaction of a transactional operation: claim, effects, outcome (O1, O15, O17).

use std::any::Any;

use async_trait::async_trait;
use sqlx::{AssertSqlSafe, MySql, raw_sql};

use super::super::MySqlStore;
use super::super::inbox::{NO_SAVEPOINT, START_HANDLER, savepoint_name};
use super::super::schema::number;
use super::{INSERT_AT_ONCE, find, finish, stake};
use crate::error::StoreError;
use crate::message::NewMessage;
use crate::policy::operation::retention::Retention;
use crate::store::bounded::{Ask, Bounded};
use crate::store::{Basis, Begun, Fenced, KeyClaim, OperationTx, Outcome, Owned, Proof};

/// A row that somebody holds, and nobody waits for: 1205 on MariaDB, 3572 on MySQL.
const LOCKED: [u16; 2] = [1205, 3572];

/// Whether somebody holds a row for which this did not wait longer.
pub(in crate::store::mysql) fn is_locked(error: &sqlx::Error) -> bool {
    number(error).is_some_and(|number| LOCKED.contains(&number))
}

/// MySQL has no wait of a statement's own: its shortest one of a session, until the claim stands.
/// MariaDB has one, and does the same: what only MySQL did would be tested nowhere. A claim that is
/// refused need not take it back, for its connection goes back to the pool, which sets it up anew
/// ([`connect`](super::super::connect)); so the usual wait is never 1 here.
pub(in crate::store::mysql) const SHORT_WAIT: &str =
    "set @oncebox_lock_wait = @@session.innodb_lock_wait_timeout, session innodb_lock_wait_timeout = 1";
/// What handlers were promised.
pub(in crate::store::mysql) const USUAL_WAIT: &str = "set session innodb_lock_wait_timeout = @oncebox_lock_wait";

/// How many statements this session has run that may commit: all but those that are known not to,
/// by the server's own count, of which statements inside procedures are part. InnoDB says nothing
/// of a transaction that it has ended, so this is the only proof that nothing was committed.
macro_rules! may_have_committed {
    () => {
        "(select sum(variable_value) from /*M! information_schema.session_status */ /*!80000 performance_schema.session_status */ \
          where left(variable_name, 4) = 'COM_' and substr(variable_name, 5) not in ('SELECT', 'INSERT', 'INSERT_SELECT', 'UPDATE', \
            'UPDATE_MULTI', 'DELETE', 'DELETE_MULTI', 'REPLACE', 'REPLACE_SELECT', 'DO', 'CALL_PROCEDURE', 'SAVEPOINT', \
            'RELEASE_SAVEPOINT', 'ROLLBACK_TO_SAVEPOINT', 'ROLLBACK', 'SHOW_WARNINGS', 'STMT_PREPARE', 'STMT_REPREPARE', \
            'STMT_EXECUTE', 'STMT_CLOSE', 'STMT_RESET', 'STMT_FETCH', 'STMT_SEND_LONG_DATA'))"
    };
}

/// From here on the handler's statements count.
const COUNT: &str = concat!("set @oncebox_committed = ", may_have_committed!());
const NOTHING_COMMITTED: &str =
    concat!("select cast(coalesce(@oncebox_committed = ", may_have_committed!(), ", false) as signed)");

/// A transaction in which one claim stands, with `autocommit = 0`.
#[derive(Debug)]
pub(in crate::store) struct MySqlOperationTx {
    held: Held,
    owned: Owned,
}

/// A transaction that must still be there when its outcome is written.
#[derive(Debug)]
pub(in crate::store::mysql) struct Held {
    pub(in crate::store::mysql) transaction: Bounded<MySql>,
    /// Set right after the claim: effects are taken back to it, and it must be there when the
    /// outcome is written.
    savepoint: String,
}

/// Locks without waiting, claims, and sets the savepoint.
pub(super) async fn begin_operation(
    store: &MySqlStore,
    claim: &KeyClaim,
    basis: Basis<'_>,
) -> Result<Begun<MySqlOperationTx>, StoreError> {
    let owned = claim.owned(basis);
    Ok(match staked_at_once(store, claim, basis, &owned).await? {
        Begun::Claimed(transaction) => {
            let mut held = Held::new(transaction);
            held.hold(USUAL_WAIT).await?;
            Begun::Claimed(MySqlOperationTx { held, owned })
        }
        Begun::Existing(record) => Begun::Existing(record),
        Begun::Locked => Begun::Locked,
    })
}

/// A transaction in which the claim stands. Where the claim is refused, it ends before the answer.
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

/// The same, and statements wait for locks no longer than for the claim.
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
            let found = find(&mut transaction, &claim.identity).await?.record;
            transaction.rollback().await?;
            Ok(found.map_or(Begun::Locked, |record| Begun::Existing(Box::new(record))))
        }
        Err(error) if is_locked(&error) => {
            // Only the statement was rolled back (R27).
            transaction.rollback().await?;
            Ok(Begun::Locked)
        }
        Err(error) => Err(error.into()),
    }
}

async fn try_claim(
    connection: &mut Bounded<MySql>,
    claim: &KeyClaim,
    basis: Basis<'_>,
    owned: &Owned,
) -> Result<bool, sqlx::Error> {
    let there: Option<i64> =
        sqlx::query_scalar("select epoch from oncebox_idempotency_request where key_digest = ? for update nowait")
            .bind(claim.identity.digest().to_vec())
            .optional(&mut *connection)
            .await?;
    if there.is_some() && matches!(basis, Basis::New) {
        return Ok(false);
    }
    stake(connection, INSERT_AT_ONCE, claim, basis, owned).await
}

impl Held {
    /// A transaction in which only our own statements ran, until [`Self::hold`].
    pub(in crate::store::mysql) fn new(transaction: Bounded<MySql>) -> Self {
        Self { transaction, savepoint: savepoint_name() }
    }

    /// Sets the savepoint behind another statement, where there is one, and counts from there; one
    /// packet.
    pub(in crate::store::mysql) async fn hold(&mut self, first: &str) -> Result<(), StoreError> {
        let first = if first.is_empty() { String::new() } else { format!("{first}; ") };
        let hold = AssertSqlSafe(format!("{first}{COUNT}; savepoint {}", self.savepoint));
        raw_sql(hold).run(&mut self.transaction).await?;
        Ok(())
    }

    /// Whether it is proven that nothing was committed since; see
    /// [`OperationTx::nothing_committed`].
    pub(in crate::store::mysql) async fn nothing_committed(&mut self) -> Result<bool, StoreError> {
        let proven: i64 = sqlx::query_scalar(NOTHING_COMMITTED).one(&mut self.transaction).await?;
        Ok(proven != 0)
    }

    /// Runs `rollback to` or `release`: whether the savepoint is still there.
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
        outcome: &Outcome,
        retention: &Retention,
    ) -> Result<Proof, StoreError> {
        let proof = self.held.prove("release").await?;
        if proof != Proof::Same {
            return Ok(proof);
        }
        self.held.transaction.enqueue(messages).await?;
        Ok(match finish(&mut self.held.transaction, &(&self.owned).into(), outcome, retention).await? {
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
