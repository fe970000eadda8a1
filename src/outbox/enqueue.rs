//! Enqueues messages and queues e-mails from Rust, in the caller's own transaction.
//!
//! Guarantees: one statement writes all messages of a call, or none where one breaks a limit; the
//! limits are those of the SQL doors; a message or an e-mail exists exactly when the caller's
//! transaction committed (G1). Not here: the statements of each database (`store`).

use sqlx::{Database, Transaction};
use uuid::Uuid;

use super::hint::hint;
use crate::error::StoreError;
use crate::error::classify::is_commit_undone;
use crate::message::NewMessage;

/// An e-mail to be sent once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewEmail {
    /// Unique: for example `receipt_payment_pay_789`.
    pub unique_key: String,
    /// The address that the e-mail goes to.
    pub recipient: String,
    /// The subject line of the e-mail.
    pub subject: String,
    /// The body of the e-mail, as plain text.
    pub body: String,
}

/// A connection of sqlx that leads to an outbox.
pub trait Enqueue: Send {
    /// Writes the messages in one statement and returns their ids, in order.
    ///
    /// # Errors
    /// [`StoreError::Limit`] with the name of the limit, before anything is written; otherwise the
    /// error of the database.
    ///
    /// # Cancel safety
    /// If it is dropped before it returns, the statement may or may not have run: roll the
    /// transaction back.
    fn write(&mut self, messages: Vec<NewMessage>) -> impl Future<Output = Result<Vec<Uuid>, StoreError>> + Send;

    /// Stores an e-mail in the caller's transaction. A second one with the same unique key changes
    /// nothing and returns false.
    ///
    /// # Errors
    /// [`StoreError::Refused`] on MySQL where a text is too long; otherwise the database's error.
    ///
    /// # Cancel safety
    /// As [`Enqueue::write`].
    fn queue_email(&mut self, email: &NewEmail) -> impl Future<Output = Result<bool, StoreError>> + Send;
}

/// Enqueues one message in the caller's transaction and returns its id.
///
/// The message comes after every message of its key whose transaction had committed before. Two
/// transactions that write to one key at the same time have the order in which they enqueued: where
/// that matters, lock a common row first, such as the account's.
///
/// # Errors
/// [`StoreError::Limit`] where the message breaks a limit; [`StoreError::SchemaMissing`] where the
/// database has no outbox; otherwise the error of the database. Roll the transaction back.
///
/// # Cancel safety
/// As [`Enqueue::write`].
pub async fn enqueue<C: Enqueue>(connection: &mut C, message: NewMessage) -> Result<Uuid, StoreError> {
    let ids = connection.write(vec![message]).await.map_err(StoreError::or_schema_missing)?;
    ids.first().copied().ok_or_else(|| StoreError::Corrupt("the outbox returned no id".to_owned()))
}

/// Enqueues many messages with one statement and returns their ids, in order.
///
/// # Errors
/// As [`enqueue`]; one message that breaks a limit refuses all.
///
/// # Cancel safety
/// As [`Enqueue::write`].
pub async fn enqueue_all<C: Enqueue>(connection: &mut C, messages: Vec<NewMessage>) -> Result<Vec<Uuid>, StoreError> {
    if messages.is_empty() {
        return Ok(Vec::new());
    }
    connection.write(messages).await.map_err(StoreError::or_schema_missing)
}

/// Commits, and gives a hint to a relay in this process, and to those of other processes where a
/// task announces it. So they need not wait for their next poll.
///
/// # Errors
/// [`StoreError::CommitUnknown`] where the connection was lost during COMMIT: read whether your
/// rows are there, do not guess.
///
/// # Cancel safety
/// None: a dropped commit has an unknown outcome.
pub async fn commit<Db: Database>(transaction: Transaction<'_, Db>) -> Result<(), StoreError> {
    let outcome = transaction.commit().await.map_err(commit_error);
    if outcome.is_ok() {
        hint();
    }
    outcome
}

/// Converts an error of COMMIT: after a lost connection the outcome is unknown. Where SQLite found
/// its disk full, or may not write to its file, it is known: nothing was changed.
pub(crate) fn commit_error(error: sqlx::Error) -> StoreError {
    match StoreError::from(error) {
        StoreError::Unavailable(error) if !is_commit_undone(&error) => StoreError::CommitUnknown(error),
        other => other,
    }
}
