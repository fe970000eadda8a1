//! What a team implements: a handler that writes through the transaction it is given, message by
//! message or in sets.

use std::fmt;

use async_trait::async_trait;
use uuid::Uuid;

use crate::error::{HandlerError, StoreError};
use crate::message::{Message, NewMessage};
use crate::store::{Base, Enqueue, InboxTx, NewEmail, Store};

/// The sqlx connection of a store.
type Connection<S> = <<S as Base>::Db as sqlx::Database>::Connection;

/// The transaction of one message or batch: it also holds the inbox row, so what is written through
/// it commits exactly once.
///
/// It has no commit and no rollback: returning `Ok` or `Err` decides.
pub struct HandlerTx<'t, S: Store> {
    connection: &'t mut Connection<S>,
    enqueued: &'t mut bool,
}

impl<'t, S: Store> HandlerTx<'t, S> {
    /// Of a transaction that this store began; an error where another kind of store did.
    pub(crate) fn new(tx: &'t mut dyn InboxTx, enqueued: &'t mut bool) -> Result<Self, StoreError> {
        Ok(Self { connection: tx.connection()?, enqueued })
    }

    /// The sqlx connection, inside the transaction. Statements that end the transaction (COMMIT,
    /// DDL on MySQL) are found out before the commit and make the message dead or tried again.
    pub fn connection(&mut self) -> &mut <<S as Base>::Db as sqlx::Database>::Connection {
        self.connection
    }

    /// Enqueues a follow-up message in the same transaction.
    ///
    /// # Errors
    /// As [`crate::store::enqueue`].
    pub async fn enqueue(&mut self, message: NewMessage) -> Result<Uuid, StoreError> {
        *self.enqueued = true;
        crate::store::enqueue(self.connection, message).await
    }

    /// Stores an e-mail row in the same transaction; false where the unique key is already there.
    ///
    /// # Errors
    /// What the database says.
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
    /// Does the work of one message through `tx`.
    ///
    /// # Errors
    /// Any error is retried under the policy of the consumer unless it is
    /// [`HandlerError::terminal`]; nothing that was written through `tx` stays.
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
    /// Does the work of all of them through `tx`: at least one message, in the order of delivery,
    /// so that those of a key stand in its order. A retry brings one message.
    ///
    /// # Errors
    /// Nothing that was written through `tx` stays. Of several messages none is to blame yet: the
    /// batch runs again in halves, until the one that fails is alone; what is said of that one
    /// counts, as in [`MessageHandler::handle`].
    async fn handle_batch(&self, messages: &[&Message], tx: &mut HandlerTx<'_, S>) -> Result<(), HandlerError>;
}

/// What a panic says.
pub(super) fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
