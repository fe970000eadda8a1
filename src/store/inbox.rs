//! Duty: the inbox and the transaction around a handler.
//!
//! The order is fixed (R24): begin, admit (insert first, sorted), blocked keys and purge bound,
//! handlers, prove (R23), commit. The unique key decides what is new; nothing is decided from a
//! SELECT. A purge records its bound before, or with, the first row it takes, so that whoever finds
//! such a message new finds it too old as well (R31, G8).

use std::any::Any;
use std::collections::HashSet;
use std::fmt::Debug;
use std::sync::Arc;
#[cfg(any(feature = "postgres", feature = "mysql"))]
use std::time::Duration;

use async_trait::async_trait;
use uuid::Uuid;

use super::of_type;
use crate::error::StoreError;
use crate::message::{ContentHash, Message, MessageId};
use crate::policy::db_time::DbTime;
use crate::policy::horizon::Bounds;
use crate::policy::position::Position;

/// A consumer's number in this database.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ConsumerId(pub i32);

/// How a consumer is registered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConsumerSpec {
    /// The name of the consumer, unique in the database.
    pub name: String,
    /// Its id rule as text, stored at the first start; another one is refused unless `accept` is
    /// set (R31).
    pub id_rule: String,
    /// The operator accepts a changed id rule.
    pub accept: bool,
}

impl ConsumerSpec {
    /// Whether the stored id rule is to be replaced by this one.
    ///
    /// # Errors
    /// [`StoreError::Refused`] where it is another one, and nobody accepted that.
    pub(crate) fn changes(&self, stored: &str) -> Result<bool, StoreError> {
        if stored == self.id_rule || self.accept {
            return Ok(stored != self.id_rule);
        }
        Err(StoreError::Refused(format!(
            "consumer `{}` started with the id rule `{stored}`, now it is `{}`: the inbox would not know old messages again, \
             and what comes again would run again; put the rule back, or start once with `consumer --accept`",
            self.name, self.id_rule
        )))
    }
}

/// One message to admit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InboxEntry {
    /// The id under which the message is deduplicated.
    pub id: MessageId,
    /// The hash of the content: the same id with another hash is a mismatch, not a duplicate.
    pub hash: ContentHash,
}

/// What the inbox already had for an id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Known {
    /// The hash that stands in the inbox: another one is an alarm.
    pub hash: ContentHash,
}

/// The answer of the inbox, in the order of the entries: none where the id is new (its row is
/// inserted now).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Admission {
    /// One answer per entry.
    pub known: Vec<Option<Known>>,
}

/// What may stand in the way of messages that are new, asked in a statement of its own after their
/// rows were inserted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    /// Of the lanes asked about, those with a waiting message or a dead one that holds.
    pub blocked: HashSet<[u8; 16]>,
    /// What `policy::horizon` judges ages by.
    pub bounds: Bounds,
}

/// What one step of a purge did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Purged {
    /// Rows that are gone.
    pub rows: u64,
    /// The last id that was looked at: the next step goes on behind it. None where this was the
    /// last step.
    pub next: Option<MessageId>,
}

/// As what a message is stored instead of being handled now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ParkAs {
    /// A head that is due after this time.
    Due(std::time::Duration),
    /// Behind another message of its key: no due time (R25).
    Behind,
    /// Dead; with `holds` later messages of its key are stored behind it.
    Dead {
        /// Short reason: `terminal`, `attempts`, `id-reused`, `no-usable-id`, `unhandled`,
        /// `too-old`, `from-the-future`, `transaction-ended`, `unstorable`.
        reason: String,
        /// Policy `hold` (true), or `skip` and verdicts.
        holds: bool,
    },
}

/// A message on its way into the waiting table.
#[derive(Debug, Clone)]
pub struct Parked {
    /// The whole message, as a later try or an operator needs it.
    pub message: Message,
    /// In which state it is stored: due, behind another message, or dead.
    pub park_as: ParkAs,
    /// Tries that were counted so far.
    pub attempts: u32,
    /// What the last try said.
    pub error: Option<String>,
}

/// What the check before COMMIT found (R23).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Proof {
    /// The same transaction, all our inbox rows in it.
    Same,
    /// A statement failed and the handler swallowed it: the transaction is aborted. Treated as the
    /// handler's failure.
    Aborted,
    /// The transaction is another one than the one that inserted our rows: the handler ended it.
    /// [`InboxTx::undo`] tells whether it committed them: if so the message is dead as
    /// `transaction-ended`, else the batch is tried again.
    Ended,
}

/// What became of a transaction that this program did not commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Undone {
    /// Nothing of it stays.
    Whole,
    /// Nothing of it stays. Its connection was lost while the server had nothing to do for it: a
    /// failure that a handler saw on it is transient.
    Lost,
    /// What `admit` or `finish` wrote is committed: the handler ended the transaction before it was
    /// undone. Its inbox rows say nothing about whether its messages were handled.
    Committed,
}

/// How long a connection may take to roll back before the server is asked on another one to end it:
/// a handler that ran out of time may have left a statement running.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) const ROLLBACK_MAX: std::time::Duration = std::time::Duration::from_secs(2);

/// How often [`InboxTx::undo`] looks whether the server has ended a transaction, and the pause
/// between two looks.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) const LOOKS: (u32, std::time::Duration) = (50, std::time::Duration::from_millis(100));

/// One partition as one assignment holds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holding {
    /// The topic that the partition belongs to.
    pub topic: Arc<str>,
    /// The number of the partition within its topic.
    pub partition: i32,
    /// A token of this assignment alone: an owner that lost the partition changes nothing of the
    /// next one's row.
    pub owner: Uuid,
}

/// What stood in the row of a partition when it was assigned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Opened {
    /// It was open, so its last owner did not end cleanly (R26).
    pub was_open: bool,
    /// Where the consumer stood, where a position was kept.
    pub position: Option<Position>,
    /// The position was kept under another id rule than the consumer has now: what has the same
    /// coordinates has another id.
    pub has_new_ids: bool,
}

/// The time that an id carries.
#[must_use]
pub fn time_in_id(id: MessageId) -> Option<DbTime> {
    id.unix_millis().map(|millis| DbTime::from_millis(i64::try_from(millis).unwrap_or(i64::MAX)))
}

/// The first id that can carry this time: what a v7 id before it carries is of the past.
#[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
pub(crate) fn first_id_at(time: DbTime) -> MessageId {
    // A v7 id begins with its milliseconds in 48 bits.
    MessageId::from_uuid(Uuid::from_u128(u128::try_from(time.millis()).unwrap_or(0).min((1 << 48) - 1) << 80))
}

/// How long a statement inside a handler's transaction waits for a lock: well below the handler's
/// time, so that a wait for somebody else's transaction ends as what it is, which counts no try.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(super) fn lock_wait(handler_timeout: Duration) -> Duration {
    // Of no time at all a server would make a wait without end.
    (handler_timeout / 2).clamp(Duration::from_millis(100), Duration::from_secs(5))
}

/// Duty: consumers, inbox rows, attempts.
///
/// The consumer is compiled once, for any store: a call costs a boxed future beside its round trip.
#[async_trait]
pub trait Inbox: Debug + Send + Sync {
    /// Registers a consumer at its first start and gives its number.
    ///
    /// # Errors
    /// [`StoreError::Refused`] where the stored id rule is another one.
    async fn register(&self, spec: &ConsumerSpec) -> Result<ConsumerId, StoreError>;

    /// Notes that a process of this consumer is there. False where an operator forgot the consumer
    /// meanwhile, or a process with another id rule was accepted for it.
    async fn seen(&self, consumer: ConsumerId, id_rule: &str) -> Result<bool, StoreError>;

    /// Begins a transaction, READ COMMITTED, on a connection with the session settings the promise
    /// needs. Dropped before it returns, it leaves no connection that is inside a transaction to
    /// anybody else (R28).
    async fn begin(&self, consumer: ConsumerId) -> Result<Box<dyn InboxTx>, StoreError>;

    /// Which of these ids have a committed inbox row: for suspicion (R26), never for deduplication.
    async fn known(&self, consumer: ConsumerId, ids: &[MessageId]) -> Result<HashSet<MessageId>, StoreError>;

    /// True where another transaction that has not ended inserted one of these ids: whoever admits
    /// it waits for that. Asked without waiting, and changes nothing.
    async fn is_contested(&self, consumer: ConsumerId, ids: &[MessageId]) -> Result<bool, StoreError>;

    /// What ages are judged by now, outside any transaction: where a purge begins.
    async fn bounds(&self, consumer: ConsumerId) -> Result<Bounds, StoreError>;

    /// Takes away up to `rows_max` tries of messages that have their inbox row: they were handled
    /// or stored by somebody who did not know of the tries. Gives how many.
    async fn forget_attempts(&self, consumer: ConsumerId, rows_max: usize) -> Result<u64, StoreError>;

    /// Whether at least so many dead messages of this consumer stand.
    async fn has_dead(&self, consumer: ConsumerId, rows: usize) -> Result<bool, StoreError>;

    /// One step of a purge up to `below`, in whole milliseconds: looks at up to `rows_max` inbox
    /// rows of this consumer behind the id `after` and takes those that `policy::horizon` lets go
    /// and whose message does not wait and is not dead. The bound of what it takes is recorded in
    /// the same transaction, and never lowered. Rows of other consumers, and their bounds, stay:
    /// what one of them remembers is its own affair.
    async fn purge(
        &self,
        consumer: ConsumerId,
        below: DbTime,
        after: Option<MessageId>,
        rows_max: usize,
    ) -> Result<Purged, StoreError>;

    /// Counts a try in a transaction of its own, before the handler runs, and gives the number of
    /// this try (1 for the first).
    async fn begin_attempt(&self, consumer: ConsumerId, id: MessageId) -> Result<u32, StoreError>;

    /// Counts the first try of each of these, in one transaction of its own, before they run
    /// together. One that has a try counted already is left as it is, so that asked twice it counts
    /// once.
    async fn begin_first_attempts(&self, consumer: ConsumerId, ids: &[MessageId]) -> Result<(), StoreError>;

    /// Takes back a try that [`Inbox::begin_attempt`] counted and that was not made: a transient
    /// failure, or a stop.
    async fn take_back_attempt(&self, consumer: ConsumerId, id: MessageId) -> Result<(), StoreError>;

    /// Notes what a failed try said, in a transaction of its own, and counts the try where
    /// `counted` is set (it was not counted by [`Inbox::begin_attempt`]); gives the number of tries
    /// so far.
    async fn failed_attempt(
        &self,
        consumer: ConsumerId,
        id: MessageId,
        error: &str,
        counted: bool,
    ) -> Result<u32, StoreError>;

    /// Tries counted so far for these ids; ids without any are left out.
    async fn attempts(&self, consumer: ConsumerId, ids: &[MessageId]) -> Result<Vec<(MessageId, u32)>, StoreError>;

    /// Notes that a partition was assigned, to be held under this owner from now on.
    async fn open_assignment(&self, consumer: ConsumerId, holding: &Holding) -> Result<Opened, StoreError>;

    /// Remembers where the consumer stands in partitions, each under its own owner; what another
    /// owner holds meanwhile is left alone. Called only after everything before the positions is
    /// committed, in transactions of its own: whatever part of its writes a database keeps, a
    /// position never stands there without the effects before it.
    async fn keep_positions(&self, consumer: ConsumerId, positions: &[(Holding, Position)]) -> Result<(), StoreError>;

    /// Notes a clean end, unless another owner has the partition, and the position where it is
    /// given.
    async fn close_assignment(
        &self,
        consumer: ConsumerId,
        holding: &Holding,
        position: Option<&Position>,
    ) -> Result<(), StoreError>;
}

/// A transaction that holds inbox rows and the handler's effects together. Dropped without commit,
/// it rolls back.
#[async_trait]
pub trait InboxTx: Send {
    /// The sqlx connection, inside the transaction: `tx.connection()` gives it with its type.
    fn any_connection(&mut self) -> &mut (dyn Any + Send);

    /// Inserts the ids, first and sorted, in one statement (R24). Ids must differ from each other.
    /// At most one call.
    async fn admit(&mut self, entries: &[InboxEntry]) -> Result<Admission, StoreError>;

    /// Which of these lanes (see [`Message::lane_id`]) are blocked, and what ages are judged by. A
    /// statement of its own, after the insert: it sees what whoever was waited for has committed.
    async fn standing(&mut self, lanes: &[[u8; 16]]) -> Result<Standing, StoreError>;

    /// Stores messages as waiting or dead. Their inbox rows were inserted by `admit` in this same
    /// transaction, except for verdicts that leave none. Dead deliveries are unique by (consumer,
    /// message id, content hash): a second one is ignored.
    async fn park(&mut self, parked: &[Parked]) -> Result<(), StoreError>;

    /// Takes back inbox rows inserted by `admit` (too old, from the future: R31).
    async fn forget(&mut self, ids: &[MessageId]) -> Result<(), StoreError>;

    /// Removes claimed waiting messages, those of one key and one claim, and makes the next of the
    /// key due. False where the claim is not ours any more: then roll back.
    async fn finish(&mut self, claimed: &[super::ClaimedMessage]) -> Result<bool, StoreError>;

    /// Deletes the attempt rows of messages that are done with.
    async fn clear_attempts(&mut self, ids: &[MessageId]) -> Result<(), StoreError>;

    /// Proves that this is still the transaction that `admit` (or `finish`) wrote in (R23).
    async fn prove(&mut self) -> Result<Proof, StoreError>;

    /// Ends the transaction without a commit, after code that is not ours ran in it, and tells
    /// whether that code had committed it before. Where its connection does not answer, the server
    /// is asked on a fresh one, and told to end what still runs for it: when this returns, nothing
    /// of the transaction can be committed any more.
    ///
    /// # Errors
    /// It is not known yet. Ask again: until then the messages must not be tried again, for inbox
    /// rows that the handler committed would make them duplicates.
    async fn undo(&mut self) -> Result<Undone, StoreError>;

    /// Commits.
    ///
    /// # Errors
    /// [`StoreError::CommitUnknown`] where the connection was lost: redelivery finds out.
    async fn commit(self: Box<Self>) -> Result<(), StoreError>;

    /// Rolls back, explicitly; an error of it closes the connection. For what only we wrote in;
    /// after a handler, [`Self::undo`].
    async fn rollback(self: Box<Self>) -> Result<(), StoreError>;
}

impl dyn InboxTx + '_ {
    /// The sqlx connection, inside the transaction: what handlers write through.
    ///
    /// # Errors
    /// [`StoreError::Refused`] where it is a connection of another kind of database.
    pub fn connection<C: Any>(&mut self) -> Result<&mut C, StoreError> {
        of_type(self.any_connection())
    }
}
