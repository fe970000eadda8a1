//! The traits that a team implements: handlers that write through the transaction that they are
//! given, for single messages or for sets.

use std::fmt;

use async_trait::async_trait;
use uuid::Uuid;

use crate::error::{HandlerError, StoreError};
use crate::inbox::port::InboxTx;
use crate::message::{Message, NewMessage};
use crate::outbox::enqueue::{Enqueue, NewEmail};
use crate::store::Store;
use crate::store::base::Base;

type Connection<S> = <<S as Base>::Db as sqlx::Database>::Connection;

/// The transaction of one message or batch. It also holds the inbox row, so what is written through
/// it commits exactly once.
///
/// It has no commit and no rollback: returning `Ok` or `Err` decides.
///
/// A handler must not end the transaction by a statement of its own either (COMMIT, DDL on MySQL, a
/// procedure that commits). PostgreSQL and SQLite turn such a COMMIT into a rollback, and the try
/// fails. On MySQL and MariaDB the consumer finds out and stores the messages as dead.
/// Two limits remain. If the process dies there between that COMMIT and the dead rows, the messages
/// of a batch are lost: their inbox rows are committed, so they come again as duplicates, and
/// nothing tells of what the handler did not do. (A message that waited for its retry is dead
/// already. It is the same on PostgreSQL for a handler that says `close all` before its COMMIT.)
/// Under the policy `skip` the next message of the key may run while such a handler still runs.
pub struct HandlerTx<'t, S: Store> {
    connection: &'t mut Connection<S>,
    enqueued: &'t mut bool,
}

impl<'t, S: Store> HandlerTx<'t, S> {
    /// Wraps a transaction of the store `S`; an error if another kind of store began it.
    pub(crate) fn new(tx: &'t mut dyn InboxTx, enqueued: &'t mut bool) -> Result<Self, StoreError> {
        Ok(Self { connection: tx.connection()?, enqueued })
    }

    /// The sqlx connection, inside the transaction. Statements that end the transaction (COMMIT,
    /// DDL on MySQL) are refused, or detected before the commit. Then the message is tried again or
    /// is dead.
    pub fn connection(&mut self) -> &mut <<S as Base>::Db as sqlx::Database>::Connection {
        self.connection
    }

    /// Enqueues a follow-up message in the same transaction.
    pub async fn enqueue(&mut self, message: NewMessage) -> Result<Uuid, StoreError> {
        *self.enqueued = true;
        crate::outbox::enqueue::enqueue(self.connection, message).await
    }

    /// Stores an e-mail row in the same transaction. Returns false if its unique key exists.
    pub async fn queue_email(&mut self, email: &NewEmail) -> Result<bool, StoreError> {
        self.connection.queue_email(email).await
    }
}

impl<S: Store> fmt::Debug for HandlerTx<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HandlerTx").finish_non_exhaustive()
    }
}

/// Handles messages inside the inbox transaction.
#[async_trait]
pub trait MessageHandler<S: Store>: Send + Sync {
    /// Handles one message through `tx`.
    ///
    /// # Errors
    /// After any error nothing that was written through `tx` stays. The message is tried again
    /// under the retry policy of the consumer, except after [`HandlerError::terminal()`].
    async fn handle(&self, message: &Message, tx: &mut HandlerTx<'_, S>) -> Result<(), HandlerError>;
}

/// Handles the new messages of a batch at once, inside the inbox transaction: one statement for
/// hundreds of effects.
///
/// ```
/// # #[cfg(feature = "postgres")]
/// # mod on_postgres {
/// use oncebox::store::postgres::PostgresStore;
/// use oncebox::{BatchMessageHandler, HandlerError, HandlerTx, Message, async_trait, sqlx};
///
/// struct Ledger;
///
/// #[async_trait]
/// impl BatchMessageHandler<PostgresStore> for Ledger {
///     async fn handle_batch(
///         &self,
///         messages: &[&Message],
///         tx: &mut HandlerTx<'_, PostgresStore>,
///     ) -> Result<(), HandlerError> {
///         let read = messages.iter().map(|message| message.json::<(String, i64)>());
///         let (accounts, cents): (Vec<String>, Vec<i64>) = read.collect::<Result<Vec<_>, _>>()?.into_iter().unzip();
///         sqlx::query("insert into ledger (account, amount) select * from unnest($1::text[], $2::bigint[])")
///             .bind(accounts)
///             .bind(cents)
///             .execute(tx.connection())
///             .await?;
///         Ok(())
///     }
/// }
/// # }
/// ```
#[async_trait]
pub trait BatchMessageHandler<S: Store>: Send + Sync {
    /// Handles all messages through `tx`: at least one, in the order of delivery, so that messages
    /// of a key are in their order. A retry brings one message.
    ///
    /// # Errors
    /// Nothing that was written through `tx` stays. With several messages it is not known which one
    /// failed: the batch runs again in halves, until the failing message is alone. Its error then
    /// counts as in [`MessageHandler::handle`].
    async fn handle_batch(&self, messages: &[&Message], tx: &mut HandlerTx<'_, S>) -> Result<(), HandlerError>;
}
