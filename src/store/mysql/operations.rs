//! Idempotency records, and the transaction of a transactional operation.
//!
//! Guarantees: the primary key, of fixed binary values, decides who executes (O16, R24); every
//! other write is one statement that compares the epoch it saw; a transactional operation does not
//! wait for another claim of its key (O17), except for one second on MySQL, which has no shorter
//! lock wait; its outcome is written only while the savepoint set after the claim exists (O1, R23).

mod tx;

use std::time::Duration;

use async_trait::async_trait;
use sqlx::{MySql, MySqlConnection};

pub(super) use self::tx::{Held, SHORT_WAIT, USUAL_WAIT, staked};

use super::inbox::NO_SAVEPOINT;
use super::{MySqlStore, START, number};
use crate::error::StoreError;
use crate::operation::port::{
    Basis, Begun, Bridged, Fenced, KeyClaim, Look, OperationTx, Operations, Owned, RecordFence, RunOutcome, ended,
};
use crate::operation::rules::retention::Retention;
use crate::operation::rules::{Identity, Mode};
use crate::store::bounded::Bounded;
use crate::store::sql::outcome;
use crate::store::sql::records::{self, KeyStore, OutcomeTransaction};
use crate::store::statements::Dialect;

#[async_trait]
impl OutcomeTransaction for Bounded<MySql> {
    async fn finish_record(
        &mut self,
        fence: &RecordFence,
        outcome: &RunOutcome,
        retention: &Retention,
    ) -> Result<Fenced, StoreError> {
        outcome::finish(self, Dialect::MySql, fence, outcome, retention).await
    }
}

#[async_trait]
impl KeyStore for MySqlStore {
    async fn begin_outcome(&self) -> Result<Box<dyn OutcomeTransaction>, StoreError> {
        Ok(Box::new(self.pool.begin(START).await?))
    }
}

impl Bridged for MySqlConnection {
    async fn finish_in(
        &mut self,
        owned: &Owned,
        outcome: &RunOutcome,
        retention: &Retention,
    ) -> Result<Fenced, StoreError> {
        outcome::finish(self, Dialect::MySql, &owned.into(), outcome, retention).await
    }

    async fn stands(&mut self) -> Result<(), StoreError> {
        sqlx::raw_sql("savepoint oncebox_stands").execute(&mut *self).await?;
        match sqlx::raw_sql("release savepoint oncebox_stands").execute(self).await {
            Ok(_) => Ok(()),
            // Without a transaction, the savepoint ended together with its own statement.
            Err(error) if number(&error) == Some(NO_SAVEPOINT) => Err(ended()),
            Err(error) => Err(error.into()),
        }
    }
}

#[async_trait]
impl Operations for MySqlStore {
    async fn find_afresh(&self, identity: &Identity) -> Result<Look, StoreError> {
        let mut connection = self.pool.fresh().await?;
        let found = records::find(&mut connection, identity).await;
        connection.close().await;
        found
    }

    async fn insert_unknown(&self, claim: &KeyClaim) -> Result<Fenced, StoreError> {
        records::insert_unknown(self, claim).await
    }

    async fn begin_operation(
        &self,
        claim: &KeyClaim,
        basis: Basis<'_>,
        _: Duration,
    ) -> Result<Begun<Box<dyn OperationTx>>, StoreError> {
        claim.requires(&[Mode::Transactional])?;
        Ok(tx::begin_operation(self, claim, basis).await?.map(|tx| Box::new(tx) as Box<dyn OperationTx>))
    }
}
