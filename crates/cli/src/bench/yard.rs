//! What a benchmark needs of a database besides the store: the plain SQL of a simple solution.
//!
//! Not here: the relay and the consumer, which are compared with this.

use crate::ground::Ground;
use oncebox::StoreError;
use oncebox::app::AppError;
use oncebox::message::{NewMessage, OutgoingMessage};
use oncebox::store::Base;

/// Accounts of the business table.
pub(super) const ACCOUNTS: i64 = 1_000;
/// The first balance of an account that pays: enough for every payment.
pub(super) const BALANCE: i64 = 1_000_000_000_000_000;

/// How a batch that is handled by hand writes its effects.
#[derive(Debug, Clone, Copy)]
pub(super) enum Effects {
    /// All in one statement.
    Together,
    /// A statement each, which is awaited before the next: all that a handler of single messages
    /// can do.
    Each,
}

/// The connection of sqlx that leads to a database of this store.
pub(super) type Connection<S> = <<S as Base>::Db as sqlx::Database>::Connection;

/// A store that can be measured.
pub(super) trait Yard: Ground {
    /// The number of writers that make sense at once: SQLite has one.
    const WRITERS: usize;

    /// Makes the business table and the inbox of the simple solution.
    fn make_tables(&self) -> impl Future<Output = Result<(), AppError>> + Send;

    /// The rows after a position, as a plain reader gets them: whole, in position order, at most a
    /// thousand.
    fn read_plainly(&self, after: i64) -> impl Future<Output = Result<Vec<(i64, OutgoingMessage)>, StoreError>> + Send;

    /// Copies the last rows of the outbox into a table with a status column.
    fn copy_with_status(&self, rows: usize) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// The first hundred rows of the copied table that are not marked.
    fn read_unmarked(&self) -> impl Future<Output = Result<Vec<(i64, OutgoingMessage)>, StoreError>> + Send;

    /// Marks one row of the copied table, in its own transaction.
    fn mark(&self, position: i64) -> impl Future<Output = Result<(), StoreError>> + Send;

    fn business(connection: &mut Connection<Self>, account: i64)
    -> impl Future<Output = Result<(), StoreError>> + Send;

    /// The least that a message costs when it is written by hand: its row, into a table that
    /// nothing else uses.
    fn append_by_hand(
        connection: &mut Connection<Self>,
        id: uuid::Uuid,
        message: NewMessage,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// How many business writes were ever committed.
    fn effects(&self) -> impl Future<Output = Result<usize, StoreError>> + Send;

    /// A payment, by the four statements of `POST /payments` of the example service: insert its
    /// row, unless its reference exists; read that row; insert the account, unless it exists; debit
    /// it, where it has enough.
    fn pay(
        connection: &mut Connection<Self>,
        id: uuid::Uuid,
        account: i64,
        amount: i64,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// The least that a claim costs when it is written by hand: a row with nothing but the id.
    fn claim_by_hand(
        connection: &mut Connection<Self>,
        id: uuid::Uuid,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Stores the answer in the row of the claim.
    fn answer_by_hand(
        connection: &mut Connection<Self>,
        id: uuid::Uuid,
        answer: Vec<u8>,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Handles a message by hand in its own transaction: begin, id, effect, commit, each awaited.
    fn handle_by_hand(&self, id: uuid::Uuid, account: i64) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Handles messages by hand, all in one transaction: begin, the ids in one statement, the
    /// effects, commit. None of them may have come before.
    fn handle_all_by_hand(
        &self,
        batch: &[(uuid::Uuid, i64)],
        effects: Effects,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Empties the inbox by hand, for the next side that handles the same messages.
    fn forget_by_hand(&self) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// One business write for each account of the list, in one statement: writes to the same
    /// account are added up.
    fn business_all(
        connection: &mut Connection<Self>,
        accounts: &[i64],
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Stores old, finished keys, numbered from `from` to before `to`.
    fn fill_keys(&self, from: u64, to: u64) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Stores ids that this consumer has handled, with times of the last hour, numbered from `from`
    /// to before `to`.
    fn fill_inbox(&self, consumer: &str, from: u64, to: u64) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Bytes of log written so far, where the database tells.
    fn log_written(&self) -> impl Future<Output = Result<Option<f64>, StoreError>> + Send {
        async { Ok(None) }
    }

    /// Row versions that updates and deletes left behind so far, where the database tells. Waits
    /// until closed connections have reported theirs.
    fn left_behind(&self) -> impl Future<Output = Result<Option<f64>, StoreError>> + Send {
        async { Ok(None) }
    }
}
