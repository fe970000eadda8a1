//! Where state lives: the traits that a database adapter implements, one for each duty.
//!
//! Each adapter has one folder, with the same file names: `connect`, `door`, `schema`, `check`,
//! `relay`, `inbox`, `operations`. The suite in `oncebox-testkit` tests the promises of the traits
//! on any adapter.
//!
//! Guarantees: all times come from the clock of the database; every change of relay state is fenced
//! by an epoch; no statement decides from a SELECT what a unique key must decide.
//!
//! Not here: brokers (the relay and the consumer bring the two together), the decisions themselves
//! (room `policy`).

#[cfg(any(feature = "postgres", feature = "mysql"))]
mod bounded;
mod door;
#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
mod headers;
#[cfg(any(feature = "postgres", feature = "mysql"))]
mod hosts;
pub(crate) mod inbox;
pub(crate) mod key_operator;
mod mailbox;
pub(crate) mod operations;
mod operator;
mod phases;
mod relay;
mod schema;
#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
mod sql;
mod statements;
mod waiting;

#[cfg(feature = "mysql")]
pub mod mysql;
#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "redis")]
pub mod redis;
#[cfg(feature = "sqlite")]
pub mod sqlite;

use std::any::Any;
use std::fmt::Debug;
use std::future::Future;

use crate::error::StoreError;

pub use door::{Enqueue, commit, enqueue, enqueue_all, enqueued, hint};
pub(crate) use inbox::time_in_id;
pub use inbox::{
    Admission, ConsumerId, ConsumerSpec, Holding, Inbox, InboxEntry, InboxTx, Known, Opened, ParkAs, Parked, Proof,
    Purged, Standing, Undone,
};
pub use key_operator::{
    FoundOperations, KeyChange, KeyFilter, KeyOperator, OperationChange, OperationFilter, Resolution,
};
pub use mailbox::{EmailOutcome, EmailToSend, Mailbox, NewEmail};
pub(crate) use operations::late_runs;
pub(crate) use operations::stored::{pack as pack_headers, unpack as unpack_headers};
pub use operations::{
    Answer, AnswerBody, Basis, Begun, Bridged, Claimed, Fenced, KeptBody, KeyClaim, Keys, Look, OperationStats,
    OperationTx, Operations, Outcome, Owned,
};
pub use operator::{
    ActContext, AuditEntry, CONSUMER_PRESENT, ConsumerStatus, DeadFilter, DeadMessage, DeadPlace, DeadState, Forgotten,
    HistoryEntry, LockWait, Operator, OperatorAct, OperatorOutcome, ShardStatus, Status,
};
pub use phases::{
    Driven, Due, FIRST_POINT, Leave, NewEvidence, NewIntent, NewOperation, PhaseTx, Phases, Run, Sealed,
    StoredEvidence, StoredIntent, StoredOperation, Taken,
};
pub use relay::{
    Diversion, DivertedRow, LeaseAnswer, LeaseRequest, Mark, OpenGaps, OperatorRequest, Outbox, OutboxRow, ReadBatch,
    RelaySession, RequestedAct,
};
pub use schema::{AppliedMigration, Finding, MigrationText, Schema, SchemaState, Severity};
pub use statements::{
    Dialect, Piece, SetError, SqlValue, Statements, ends_transaction, first_word, split as split_named,
};
pub use waiting::{CLAIM_MAX, Claim, ClaimedMessage, Scope, Waiting};

/// Returns the connection of a transaction with its type; refused where the database is of another
/// kind.
fn of_type<C: Any>(connection: &mut (dyn Any + Send)) -> Result<&mut C, StoreError> {
    let connection = connection.downcast_mut();
    connection.ok_or_else(|| StoreError::Refused("the handler writes through another kind of database".to_owned()))
}

/// A connection pool to one kind of database, which every duty needs.
pub trait Base: Clone + Debug + Send + Sync + 'static {
    /// The sqlx database of this store; handlers get its connection.
    type Db: sqlx::Database<Connection: Enqueue + Bridged>;

    /// `postgres`, `mysql` or `sqlite`, as in URLs.
    const NAME: &'static str;

    /// Connects. Never migrates; a SQLite file that is missing is an error unless `create` is set.
    fn connect(options: &StoreOptions) -> impl Future<Output = Result<Self, StoreError>> + Send;

    /// The pool that all work of this process shares.
    fn pool(&self) -> &sqlx::Pool<Self::Db>;

    /// Closes the pool and waits until its connections are gone.
    fn close(&self) -> impl Future<Output = ()> + Send;
}

/// A database adapter: all duties together.
pub trait Store:
    Schema + Outbox + Inbox + Waiting + Operator + Mailbox + Operations + Phases + KeyOperator + Statements
{
}

impl<S: Schema + Outbox + Inbox + Waiting + Operator + Mailbox + Operations + Phases + KeyOperator + Statements> Store
    for S
{
}

/// How a store connects; the URL decides which adapter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreOptions {
    /// `postgres://`, `mysql://` or `sqlite://FILE`. Never printed as it is: see
    /// [`crate::error::redact`].
    pub url: String,
    /// How many connections the pool has at most.
    pub connections_max: u32,
    /// How long a handler may run; server-side timeouts are set just above it (R28).
    pub handler_timeout: std::time::Duration,
    /// How long a server may send nothing during a statement before its connection is given up.
    /// Absent: just above the server-side timeouts. SQLite has no server and ignores it.
    pub answer_timeout: Option<std::time::Duration>,
    /// Whether a missing SQLite file is created; only `migrate up` sets this.
    pub create: bool,
    /// A PEM file of certificate authorities to verify the server with, for verified TLS only.
    pub ca_file: Option<std::path::PathBuf>,
}

impl StoreOptions {
    /// Defaults around a URL: 10 connections, 30 s handlers.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            connections_max: 10,
            handler_timeout: std::time::Duration::from_secs(30),
            answer_timeout: None,
            create: false,
            ca_file: None,
        }
    }
}
