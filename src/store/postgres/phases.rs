//! The part of phased operations that is specific to PostgreSQL: a phase is moved on only in the
//! transaction whose id it had when it began, compared inside the statement (O1).

use std::any::Any;
use std::time::Duration;

use async_trait::async_trait;
use sqlx::{AssertSqlSafe, Postgres, query, query_scalar};

use super::connect::BEGIN;
use super::operations::{Held, Within, finish, staked};
use super::{PostgresStore, code};
use crate::error::StoreError;
use crate::inbox::port::Proof;
use crate::operation::port::phases::{Driven, Run};
use crate::operation::port::{Basis, Begun, Fenced, KeyClaim, Owned, RecordFence, RunOutcome};
use crate::operation::rules::retention::Retention;
use crate::store::bounded::{Ask, Bounded};
use crate::store::sql::phases::{HeldPhase, PhaseStore};
use crate::store::sql::{Session, Transaction};

/// A transaction that is about to end usually ends within this time. Another one may never end, and
/// must not occupy a connection until then.
const SHORT_WAIT: &str = "set local lock_timeout = '100ms'";
/// The SQLSTATE of a lock timeout.
const LOCKED: &str = "55P03";

#[derive(Debug)]
struct PostgresPhase {
    held: Held,
    /// A statement that restores the lock timeout promised to handlers; empty where none is needed.
    usual_wait: String,
}

impl PostgresPhase {
    fn boxed(tx: Bounded<Postgres>, usual_wait: String) -> Box<dyn HeldPhase> {
        Box::new(Self { held: Held::new(tx), usual_wait })
    }
}

#[async_trait]
impl PhaseStore for PostgresStore {
    async fn stake(
        &self,
        claim: &KeyClaim,
        basis: Basis<'_>,
        owned: &Owned,
        _: Duration,
    ) -> Result<Begun<Box<dyn HeldPhase>>, StoreError> {
        Ok(staked(self, claim, basis, owned).await?.map(|(tx, _)| PostgresPhase::boxed(tx, String::new())))
    }

    async fn begin_held(&self) -> Result<Box<dyn HeldPhase>, StoreError> {
        Ok(PostgresPhase::boxed(self.pool.begin(BEGIN).await?, String::new()))
    }

    /// Returns `Unended` where another transaction holds a mark and has not ended.
    async fn begin_marked(&self, driven: &Driven) -> Result<Run<Box<dyn HeldPhase>>, StoreError> {
        let mut tx = self.pool.begin(AssertSqlSafe(format!("{BEGIN}; {SHORT_WAIT}"))).await?;
        let mark =
            query("insert into oncebox.operation_phase (operation_id, epoch) values ($1, $2) on conflict do nothing");
        let refused = match mark.bind(driven.operation_id).bind(driven.epoch).run(&mut tx).await {
            Ok(marked) if marked.rows_affected() == 1 => {
                // The short wait holds until the transaction ends, and is not for the handler.
                let usual_wait = format!("set local lock_timeout = '{}ms'; ", self.server_timeout().as_millis());
                return Ok(Run::Begun(PostgresPhase::boxed(tx, usual_wait)));
            }
            Ok(_) => Run::Marked,
            Err(error) if code(&error).as_deref() == Some(LOCKED) => Run::Unended,
            Err(error) => return Err(error.into()),
        };
        tx.rollback().await?;
        Ok(refused)
    }
}

#[async_trait]
impl HeldPhase for PostgresPhase {
    fn session(&mut self) -> &mut dyn Session {
        &mut self.held.tx
    }

    fn lend(&mut self) -> &mut (dyn Any + Send) {
        self.held.tx.lend()
    }

    async fn hold(&mut self) -> Result<(), StoreError> {
        self.held.hold(&self.usual_wait).await
    }

    async fn undo(&mut self) -> Result<Proof, StoreError> {
        self.held.undo().await
    }

    /// Always `Same`: the statement that moves the operation compares the id itself.
    async fn prove(&mut self) -> Result<Proof, StoreError> {
        Ok(Proof::Same)
    }

    fn token(&self) -> Option<&str> {
        Some(&self.held.token)
    }

    async fn judge(&mut self, failed: Option<StoreError>) -> Result<Proof, StoreError> {
        if let Some(error) = failed {
            return self.held.proved_by(error).await;
        }
        let same = query_scalar("select coalesce($1 = pg_current_xact_id_if_assigned()::text, false)");
        let is_same: bool = same.bind(self.held.token.clone()).one(&mut self.held.tx).await?;
        Ok(if is_same { Proof::Same } else { Proof::Ended })
    }

    async fn end_record(
        &mut self,
        record: &RecordFence,
        outcome: &RunOutcome,
        retention: &Retention,
    ) -> Result<Fenced, StoreError> {
        let within = Some(Within { token: &self.held.token, messages: &[] });
        finish(&mut self.held.tx, record, outcome, retention, within).await
    }

    fn into_transaction(self: Box<Self>) -> Box<dyn Transaction> {
        Box::new(self.held.tx)
    }
}
