//! Where state lives: the databases, and the names of the duties that their adapters implement.
//!
//! A duty is a trait, the *port* of its subject: `outbox::port`, `inbox::port`, `operation::port`,
//! `operator`, `email::port`; what no subject owns is here, in `base`, `schema` and `statements`.
//! [`Base`] and [`Schema`] are always there: a service that only enqueues needs no more. The rest
//! comes with the feature `duties`, and what operations need with `operations`.
//!
//! Each adapter has one folder. Those of databases use the same file names: `connect`, `door`,
//! `schema`, `check`, `relay`, `inbox`, `operations`; `redis` keeps the records of operations only.
//! The suite in `oncebox-testkit` tests the promises of the traits on any adapter.
//!
//! Guarantees: all times come from the clock of the database; every change of relay state is fenced
//! by an epoch; no statement decides from a SELECT what a unique key must decide.
//!
//! Not here: brokers (the relay and the consumer bring the two together), the decisions themselves
//! (the `rules` of each subject).

#[cfg(feature = "duties")]
use std::sync::Arc;

#[cfg(feature = "operations")]
use sqlx::Database;

pub(crate) mod base;
#[cfg(any(feature = "postgres", feature = "mysql"))]
mod bounded;
#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
mod headers;
pub(crate) mod schema;
#[cfg(all(feature = "duties", any(feature = "mysql", feature = "postgres", feature = "sqlite")))]
mod sql;
#[cfg(feature = "duties")]
pub(crate) mod statements;

#[cfg(feature = "mysql")]
pub mod mysql;
#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "redis")]
pub mod redis;
#[cfg(feature = "sqlite")]
pub mod sqlite;

pub use self::{
    base::{Base, StoreOptions},
    schema::{AppliedMigration, Schema, SchemaState},
};
#[cfg(feature = "duties")]
pub use crate::{
    email::port::{EmailOutcome, EmailToSend, Mailbox},
    inbox::port::waiting::{LeasedMessage, RowLease, Scope, Waiting},
    inbox::port::{
        ConsumerId, ConsumerSpec, Holding, Inbox, InboxEntry, InboxTx, Opened, ParkAs, Parked, Proof, Purged, Standing,
        Undone,
    },
    operator::{
        ActContext, AuditEntry, ConsumerStatus, DeadFilter, DeadMessage, DeadPlace, DeadState, Forgotten, HistoryEntry,
        LockWait, Operator, OperatorAct, OperatorOutcome, ShardStatus, Status, Unattended,
    },
    outbox::port::{
        Diversion, DivertedRow, LeaseAnswer, LeaseRequest, Mark, OpenGaps, OperatorRequest, Outbox, OutboxRow,
        ReadBatch, RelaySession,
    },
    store::statements::{Dialect, SqlValue, Statements},
};
pub use crate::{
    observe::{Finding, Severity},
    outbox::enqueue::{Enqueue, NewEmail, commit, enqueue, enqueue_all},
    outbox::hint::hint,
};
#[cfg(feature = "operations")]
pub use crate::{
    operation::port::evidence::{NewEvidence, Sealed, StoredEvidence},
    operation::port::phases::{
        Driven, Due, FIRST_POINT, Leave, NewIntent, NewOperation, PhaseTx, Phases, Run, StoredIntent, StoredOperation,
        Taken,
    },
    operation::port::{
        Answer, AnswerBody, Basis, Begun, Bridged, Fenced, KeptBody, KeyClaim, Keys, Look, OperationStats, OperationTx,
        Operations, Owned, RunOutcome,
    },
    operator::keys::{
        FoundKeys, FoundOperations, KeyChange, KeyFilter, KeyOperator, OperationChange, OperationFilter, Resolution,
    },
};

/// A database adapter: all duties of messages together.
#[cfg(feature = "duties")]
pub trait Store: Schema + Statements + Duties {
    /// This store as an object. Its methods are compiled with the adapter; those of the type itself
    /// are compiled again in each program that names it.
    fn into_duties(self) -> Arc<dyn Duties>;
}

/// The duties that the relay, the consumer and the programs use of a database.
#[cfg(feature = "duties")]
pub trait Duties: Outbox + Inbox + Waiting + Operator + Mailbox {}

#[cfg(feature = "duties")]
impl<S: Outbox + Inbox + Waiting + Operator + Mailbox> Duties for S {}

/// A database adapter that serves operations too. It is a trait of its own, so that `Store` asks
/// the same of an adapter whichever features are on.
#[cfg(feature = "operations")]
pub trait OperationStore: Store + Base<Db: Database<Connection: Bridged>> + Operations + KeyOperator {
    /// This store as an object for those who operate it, as [`Store::into_duties`].
    fn into_operator(self) -> Arc<dyn KeyOperator>;
}
