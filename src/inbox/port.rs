//! Duty: the inbox and the transaction around a handler.
//!
//! The order is fixed (R24): begin, admit (insert first, sorted), read blocked keys and purge
//! bound, run handlers, prove (R23), commit. The unique key decides what is new; nothing is decided
//! from a SELECT. A purge records its bound before, or together with, its first deletion. So a
//! message whose row was purged seems new, but the same transaction finds it too old (R31, G8).

pub(crate) mod waiting;

use std::any::Any;
use std::collections::HashSet;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use uuid::Uuid;

use crate::error::StoreError;
use crate::inbox::rules::horizon::Bounds;
use crate::inbox::rules::position::Position;
use crate::message::{ContentHash, Message, MessageId};
use crate::time::db_time::DbTime;

/// Returns the connection of a transaction with its type; refused if that is of another database.
pub(crate) fn of_type<C: Any>(connection: &mut (dyn Any + Send)) -> Result<&mut C, StoreError> {
    let connection = connection.downcast_mut();
    connection.ok_or_else(|| StoreError::Refused("the handler writes through another kind of database".to_owned()))
}

/// A consumer's number in this database.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ConsumerId(pub i32);

/// How a consumer is registered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConsumerSpec {
    /// The name of the consumer, unique in the database.
    pub name: String,
    /// Its id rule as text, stored at the first start. Without `accept` another one is refused.
    pub id_rule: String,
    /// The operator accepts a changed id rule.
    pub accept: bool,
}

impl ConsumerSpec {
    /// Refuses an id rule that is not the stored one, unless `accept` is set.
    pub(crate) fn check(&self, stored: &str) -> Result<(), StoreError> {
        if stored == self.id_rule || self.accept {
            return Ok(());
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

/// What may keep new messages from running. It is read by a statement of its own after their inbox
/// rows were inserted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    /// Those of the given lanes that have a waiting message, or a dead one that holds.
    pub blocked: HashSet<[u8; 16]>,
    /// The bounds from which `rules::horizon` judges ages.
    pub bounds: Bounds,
}

/// The result of one step of a purge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Purged {
    /// How many rows were deleted.
    pub rows: u64,
    /// The id after which the next step goes on. None where this was the last step.
    pub next: Option<MessageId>,
}

/// In which state a message is stored that is not handled now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ParkAs {
    /// A head that is due after this time.
    Due(Duration),
    /// Behind another message of its key: no due time (R25).
    Behind,
    /// Dead; with `holds` later messages of its key are stored behind it.
    Dead {
        /// Short reason: `terminal`, `attempts`, `id-reused`, `no-usable-id`, `unhandled`,
        /// `too-old`, `from-the-future`, `transaction-ended`, `unstorable`.
        reason: String,
        /// True under the policy `hold`. False under `skip`, and for a message that no handler got.
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
    /// The error of the last try.
    pub error: Option<String>,
}

/// The result of the check before COMMIT (R23).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Proof {
    /// The same transaction; on PostgreSQL with all our inbox rows in it.
    Same,
    /// A statement failed and the handler swallowed it: the transaction is aborted. Treated as the
    /// handler's failure.
    Aborted,
    /// This is not the transaction that wrote our rows: the handler ended that one.
    /// [`InboxTx::undo`] tells whether the handler committed them. If so, the message is dead
    /// as `transaction-ended`; otherwise the batch is tried again.
    Ended,
}

/// How a transaction ended that we did not commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Undone {
    /// Nothing of it stays.
    Whole,
    /// Nothing of it stays. Its connection was lost while no statement ran for it on the server. An
    /// error that a handler got from it is transient.
    Lost,
    /// What `admit` or `bury` wrote is committed: the handler ended the transaction before it was
    /// undone. Its inbox rows say nothing about whether its messages were handled.
    Committed,
}

/// How long a rollback may take before the server is told, on another connection, to end this one.
/// A handler that ran out of time may have left a statement running.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) const ROLLBACK_MAX: Duration = Duration::from_secs(2);

/// How often [`InboxTx::undo`] checks whether the server has ended a transaction, and the pause
/// between two checks.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) const LOOKS: (u32, Duration) = (50, Duration::from_millis(100));

/// One partition as one assignment holds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holding {
    /// The topic that the partition belongs to.
    pub topic: Arc<str>,
    /// The number of the partition within its topic.
    pub partition: i32,
    /// A token unique to this assignment: an owner that lost the partition cannot change the row
    /// for the next owner.
    pub owner: Uuid,
}

/// The row of a partition as it was when the partition was assigned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Opened {
    /// Whether it was open, so that its last owner did not end cleanly (R26).
    pub was_open: bool,
    /// The stored position; none where none was kept.
    pub position: Option<Position>,
    /// Whether the position was stored under another id rule than the consumer has now: messages at
    /// the same coordinates then have other ids.
    pub has_new_ids: bool,
}

/// The time that an id carries.
pub(crate) fn time_in_id(id: MessageId) -> Option<DbTime> {
    id.unix_millis().map(|millis| DbTime::from_millis(i64::try_from(millis).unwrap_or(i64::MAX)))
}

/// The lower bound of the ids that carry this time: every smaller v7 id carries an earlier time.
pub(crate) fn first_id_at(time: DbTime) -> MessageId {
    // A v7 id begins with its milliseconds in 48 bits.
    MessageId::from(Uuid::from_u128(u128::try_from(time.millis()).unwrap_or(0).min((1 << 48) - 1) << 80))
}

/// Duty: consumers, inbox rows, attempts.
///
/// The consumer is compiled once, for any store: a call costs a boxed future beside its round trip.
#[async_trait]
pub trait Inbox: Debug + Send + Sync {
    /// Returns the number of a consumer, and registers it at its first start.
    ///
    /// # Errors
    /// [`StoreError::Refused`] where the stored id rule is another one.
    async fn register(&self, spec: &ConsumerSpec) -> Result<ConsumerId, StoreError>;

    /// Checks what [`Inbox::register`] checks, and changes nothing. A consumer that never started
    /// is not refused. Returns how far the time in an id may be from the clock of the database.
    ///
    /// # Errors
    /// [`StoreError::Refused`] where the stored id rule is another one.
    async fn check_registration(&self, spec: &ConsumerSpec) -> Result<Duration, StoreError>;

    /// Pings the server on a connection that nothing else uses, because a pool without a free
    /// connection is no outage. A store without a server returns `Ok`.
    ///
    /// # Cancel safety
    /// Dropped, its connection is closed; the next call makes a new one.
    async fn sign_of_life(&self) -> Result<(), StoreError>;

    /// Records that a process of this consumer is running. False where an operator has forgotten
    /// the consumer, or another id rule was accepted for it, since it was registered.
    async fn seen(&self, consumer: ConsumerId, id_rule: &str) -> Result<bool, StoreError>;

    /// Begins a transaction, READ COMMITTED, on a connection with the session settings that the
    /// promises need. If the call is dropped before it returns, no connection goes back to the pool
    /// inside a transaction (R28).
    async fn begin(&self, consumer: ConsumerId) -> Result<Box<dyn InboxTx>, StoreError>;

    /// Which of these ids have a committed inbox row: for suspicion (R26), never for deduplication.
    async fn known(&self, consumer: ConsumerId, ids: &[MessageId]) -> Result<HashSet<MessageId>, StoreError>;

    /// True where another transaction inserted one of these ids and has not ended: an `admit` of
    /// that id would wait for it. This call itself does not wait, and changes nothing.
    async fn is_contested(&self, consumer: ConsumerId, ids: &[MessageId]) -> Result<bool, StoreError>;

    /// The current bounds for ages, read outside any transaction. A purge begins with them.
    async fn bounds(&self, consumer: ConsumerId) -> Result<Bounds, StoreError>;

    /// Deletes attempt rows of messages that have their inbox row: a process that did not know of
    /// the attempts handled or stored them. Reads pages of `rows_max` rows, and ends once as many
    /// are deleted. Returns how many were.
    async fn forget_attempts(&self, consumer: ConsumerId, rows_max: usize) -> Result<u64, StoreError>;

    /// Whether this consumer has at least `rows` dead messages.
    async fn has_dead(&self, consumer: ConsumerId, rows: usize) -> Result<bool, StoreError>;

    /// Whether this consumer has at least `rows` messages that wait or are dead, together.
    async fn has_stored(&self, consumer: ConsumerId, rows: usize) -> Result<bool, StoreError>;

    /// One step of a purge up to `below`, in whole milliseconds. It reads up to `rows_max` inbox
    /// rows of this consumer after the id `after`, and deletes those that `rules::horizon` allows,
    /// unless their message waits or is dead. The bound of the deleted rows is recorded in the same
    /// transaction, and never lowered. Rows and bounds of other consumers do not change.
    async fn purge(
        &self,
        consumer: ConsumerId,
        below: DbTime,
        after: Option<MessageId>,
        rows_max: usize,
    ) -> Result<Purged, StoreError>;

    /// Counts a try in a transaction of its own, before the handler runs, and returns the number of
    /// this try (1 for the first).
    async fn begin_attempt(&self, consumer: ConsumerId, id: MessageId) -> Result<u32, StoreError>;

    /// Counts the first try of each of these messages, in one transaction of its own, before they
    /// run together. A message that has a try counted already is left as it is, so a repeated call
    /// counts nothing more.
    async fn begin_first_attempts(&self, consumer: ConsumerId, ids: &[MessageId]) -> Result<(), StoreError>;

    /// Takes back one try of each of these messages, which [`Inbox::begin_attempt`] or
    /// [`Inbox::begin_first_attempts`] counted and which was not made: a transient failure, or a
    /// stop. What others counted since stays.
    async fn take_back_attempts(&self, consumer: ConsumerId, ids: &[MessageId]) -> Result<(), StoreError>;

    /// Stores the error of a failed try, in a transaction of its own. It also counts the try where
    /// `counted` is set, for a try that [`Inbox::begin_attempt`] did not count. Returns the number
    /// of tries so far.
    async fn failed_attempt(
        &self,
        consumer: ConsumerId,
        id: MessageId,
        error: &str,
        counted: bool,
    ) -> Result<u32, StoreError>;

    /// Tries counted so far for these ids; ids without any are left out.
    async fn attempts(&self, consumer: ConsumerId, ids: &[MessageId]) -> Result<Vec<(MessageId, u32)>, StoreError>;

    /// Opens the row of a partition that was assigned, under this owner, and returns what the row
    /// was before.
    async fn open_assignment(&self, consumer: ConsumerId, holding: &Holding) -> Result<Opened, StoreError>;

    /// Stores the positions of partitions, each fenced by its owner; a partition that another owner
    /// has by now is not changed. It is called only after everything before the positions is
    /// committed, and uses a transaction of its own. So even if a database loses its last writes,
    /// no position is stored without the effects before it. Returns the holdings whose rows were
    /// not changed.
    async fn keep_positions(
        &self,
        consumer: ConsumerId,
        positions: &[(Holding, Position)],
    ) -> Result<Vec<Holding>, StoreError>;

    /// Opens the row of a partition again, under this owner and with this position. The row must
    /// have no owner, unless it may be taken also from one. It changes nothing and returns false
    /// where the row is further, where it is of another topic of this name, or where there is none:
    /// somebody else then went on with the partition. Check and change are one statement.
    async fn take_back_assignment(
        &self,
        consumer: ConsumerId,
        holding: &Holding,
        position: &Position,
        also_from_an_owner: bool,
    ) -> Result<bool, StoreError>;

    /// Closes the row of a partition in order, with the position where it is given, unless another
    /// owner has the partition. Returns whether the row was closed.
    async fn close_assignment(
        &self,
        consumer: ConsumerId,
        holding: &Holding,
        position: Option<&Position>,
    ) -> Result<bool, StoreError>;
}

/// A transaction that holds inbox rows and the handler's effects together. Dropped without commit,
/// it rolls back.
#[async_trait]
pub trait InboxTx: Send {
    /// The sqlx connection, inside the transaction: `tx.connection()` gives it with its type.
    fn any_connection(&mut self) -> &mut (dyn Any + Send);

    /// As [`InboxTx::admit_and_look`], without a look at lanes.
    async fn admit(&mut self, entries: &[InboxEntry]) -> Result<Vec<Option<ContentHash>>, StoreError> {
        Ok(self.admit_and_look(entries, &[]).await?.0)
    }

    /// Which of these lanes (see [`Message::lane_id`]) are blocked, and the bounds for ages. It is
    /// a statement of its own after the insert, so it sees what a transaction committed for which
    /// the insert waited.
    async fn standing(&mut self, lanes: &[[u8; 16]]) -> Result<Standing, StoreError>;

    /// Inserts the ids, first and sorted, in one statement (R24), and then gives
    /// [`InboxTx::standing`] for these lanes, unless no id is new. A database that can do so
    /// answers both in one trip. Ids must differ from each other. At most one call.
    ///
    /// Returns for each entry, in its order, the content hash of the inbox row that was there
    /// already: if the message has another one, that is an alarm. None where the id is new; its row
    /// is inserted now.
    async fn admit_and_look(
        &mut self,
        entries: &[InboxEntry],
        lanes: &[[u8; 16]],
    ) -> Result<(Vec<Option<ContentHash>>, Option<Standing>), StoreError>;

    /// Stores messages as waiting or dead. Their inbox rows were inserted by `admit` in this same
    /// transaction, except for verdicts that leave none. Dead deliveries are unique by (consumer,
    /// message id, content hash): a second one is ignored, unless the first was dead by such a
    /// verdict and the second is not. Then it replaces the first.
    async fn park(&mut self, parked: &[Parked]) -> Result<(), StoreError>;

    /// Takes back inbox rows inserted by `admit` (too old, from the future: R31).
    async fn forget(&mut self, ids: &[MessageId]) -> Result<(), StoreError>;

    /// Makes leased waiting messages of one key and one lease dead at their places, before their
    /// handlers run. False where the lease is not ours any more: then roll back. Call
    /// [`Self::finish`] after the proof. A handler that commits by itself commits the dead rows, so
    /// none of its messages is lost or runs again, and what stands behind them is not due. A dead
    /// copy with the same id and content that has no inbox row is deleted; where another dead copy
    /// is there, the message is removed instead. At most one call.
    async fn bury(
        &mut self,
        leased: &[crate::inbox::port::waiting::LeasedMessage],
        reason: &str,
        error: &str,
        holds: bool,
    ) -> Result<bool, StoreError>;

    /// Removes the messages that [`Self::bury`] made dead, after the proof. False where not all of
    /// them are there as it left them: then nothing of the transaction may stay.
    async fn finish(&mut self) -> Result<bool, StoreError>;

    /// Makes the first message of each of these keys due, if it waits without a due time.
    async fn wake(&mut self, lanes: &[[u8; 16]]) -> Result<(), StoreError>;

    /// Deletes the attempt rows of messages that are handled or stored.
    async fn clear_attempts(&mut self, ids: &[MessageId]) -> Result<(), StoreError>;

    /// Proves that this is still the transaction that `admit` (or `bury`) wrote in (R23).
    async fn prove(&mut self) -> Result<Proof, StoreError>;

    /// Ends the transaction without a commit, after a handler ran in it, and tells whether the
    /// handler had committed it before. If the connection does not answer, the server is told on a
    /// new connection to end what still runs for the old one. When this returns `Ok`, nothing of
    /// the transaction can be committed any more.
    ///
    /// # Errors
    /// The end of the transaction is not known yet: call it again. Until it succeeds the messages
    /// must not be tried again: inbox rows that the handler committed would make them duplicates.
    async fn undo(&mut self) -> Result<Undone, StoreError>;

    /// Commits.
    ///
    /// # Errors
    /// [`StoreError::CommitUnknown`] where the connection was lost: the redelivery shows whether it
    /// was committed.
    async fn commit(self: Box<Self>) -> Result<(), StoreError>;

    /// Rolls back; if that fails, the connection is closed. It is for a transaction in which no
    /// handler ran; after a handler call [`Self::undo`].
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
