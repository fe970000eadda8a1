//! What an operator sees and does, on every database.
//!
//! Guarantees: an act and its audit row commit together; on the outbox only a request is written,
//! which the owner of the shard carries out (R17); a message of a consumer that is redriven has its
//! inbox row, so that a second copy is a duplicate (R31). What is counted is counted up to a bound.
//!
//! Not here: who waits for a lock, and how positions are mended, which only the database knows.

mod act;
mod audit;
mod consumers;
mod headers;
pub(in crate::store) mod list;
mod status;

use std::borrow::Cow;
use std::time::Duration;

use futures::future::BoxFuture;
use uuid::Uuid;

use super::{SqlStore, Value};
use crate::error::StoreError;
use crate::store::{
    ActContext, AuditEntry, Base, DeadFilter, DeadMessage, Dialect, Forgotten, LockWait, Mailbox, Operator,
    OperatorAct, OperatorOutcome, Status,
};

/// How a database keeps text and ids that operators ask for.
#[derive(Debug, Clone, Copy)]
pub(in crate::store) struct Texts {
    pub(in crate::store) dialect: Dialect,
    /// Text of a message that arrived, as the database can hold it.
    pub(in crate::store) stored: fn(&str) -> Cow<'_, str>,
    /// The inverse of `stored`.
    pub(in crate::store) restored: fn(String) -> String,
}

impl Texts {
    /// Of a database that holds any text.
    pub(in crate::store) const fn any(dialect: Dialect) -> Self {
        Self { dialect, stored: as_it_is, restored: as_it_stands }
    }

    /// A name, as it is compared: MySQL keeps them as bytes.
    fn name(self, name: &str) -> Value {
        if self.dialect == Dialect::MySql { name.as_bytes().into() } else { name.into() }
    }

    /// A name that came with a message.
    fn arrived(self, name: &str) -> Value {
        self.name(&(self.stored)(name))
    }

    /// An id of an outbox row or of an audit row, which SQLite keeps as text.
    fn id(self, id: Uuid) -> Value {
        if self.dialect == Dialect::Sqlite { id.to_string().into() } else { id.into() }
    }
}

fn as_it_is(text: &str) -> Cow<'_, str> {
    Cow::Borrowed(text)
}

fn as_it_stands(text: String) -> String {
    text
}

/// For `{if name: ..}`: a missing value is not given.
fn optional(value: Option<Value>) -> Value {
    value.unwrap_or(Value::Bool(false))
}

/// How many rows a list has at most.
fn rows_max(limit: usize) -> i64 {
    i64::try_from(limit).unwrap_or(i64::MAX)
}

/// What of it is each database's own.
pub(in crate::store) trait OperatorSql: SqlStore + Base + Mailbox {
    /// How this database keeps text and ids.
    const TEXTS: Texts;

    /// What [`Operator::lock_waits`] gives here.
    fn waits(&self, longer_than: Duration) -> BoxFuture<'_, Result<Vec<LockWait>, StoreError>>;

    /// What [`Operator::mend`] does and gives.
    fn mend_positions<'a>(&'a self, context: &'a ActContext) -> BoxFuture<'a, Result<Vec<String>, StoreError>>;
}

impl<S: OperatorSql> Operator for S {
    async fn status(&self) -> Result<Status, StoreError> {
        // The next question takes a connection of its own, which may be the only one.
        let status = status::read(&mut *self.reader().await?).await?;
        Ok(Status { emails_pending: self.emails_pending().await?, ..status })
    }

    async fn lock_waits(&self, longer_than: Duration) -> Result<Vec<LockWait>, StoreError> {
        self.waits(longer_than).await
    }

    async fn audit(&self, id: Option<Uuid>, limit: usize) -> Result<Vec<AuditEntry>, StoreError> {
        audit::read(&mut *self.reader().await?, S::TEXTS, id, limit).await
    }

    async fn forget_consumer(&self, name: &str, context: &ActContext) -> Result<Forgotten, StoreError> {
        consumers::forget(self, S::TEXTS, name, context).await
    }

    async fn dead(&self, filter: &DeadFilter) -> Result<Vec<DeadMessage>, StoreError> {
        let found = list::find(&mut *self.reader().await?, S::TEXTS, filter).await?;
        Ok(found.into_iter().map(|found| found.message).collect())
    }

    async fn mend(&self, context: &ActContext) -> Result<Vec<String>, StoreError> {
        self.mend_positions(context).await
    }

    async fn act(
        &self,
        filter: &DeadFilter,
        act: &OperatorAct,
        context: &ActContext,
    ) -> Result<OperatorOutcome, StoreError> {
        let mut transaction = self.begin_sql().await?;
        let outcome = act::act(transaction.session(), S::TEXTS, filter, act, context).await?;
        if context.dry_run {
            transaction.rollback().await?;
        } else {
            transaction.commit().await?;
        }
        Ok(outcome)
    }
}
