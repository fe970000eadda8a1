//! What a benchmark asks of a database besides the store: the plain SQL that a first version has.
//!
//! Not here: anything of the relay or the consumer; this is what they are compared with.

use std::future::Future;

use crate::ground::Ground;
use oncebox::StoreError;
use oncebox::app::AppError;
use oncebox::message::OutgoingMessage;

/// Accounts of the business table.
pub(super) const ACCOUNTS: i64 = 1_000;
/// What an account that pays has at first: enough for every payment.
pub(super) const BALANCE: i64 = 1_000_000_000_000_000;

/// A store that can be measured.
pub(super) trait Yard: Ground {
    /// Writers that make sense at once: SQLite has one.
    const WRITERS: usize;

    /// Makes the business table and an inbox of one's own.
    fn make_tables(&self) -> impl Future<Output = Result<(), AppError>> + Send;

    /// The rows behind a position, as a plain reader has them: whole, in position order, at most a
    /// thousand.
    fn read_plainly(&self, after: i64) -> impl Future<Output = Result<Vec<(i64, OutgoingMessage)>, StoreError>> + Send;

    /// Copies the first rows of the outbox into a table with a status column.
    fn copy_with_status(&self, rows: usize) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// The first hundred rows of that table that are not marked.
    fn read_unmarked(&self) -> impl Future<Output = Result<Vec<(i64, OutgoingMessage)>, StoreError>> + Send;

    /// Marks one of them, in a transaction of its own.
    fn mark(&self, position: i64) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// One business write in a transaction.
    fn business(
        connection: &mut <Self::Db as sqlx::Database>::Connection,
        account: i64,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// How many of these writes were ever committed.
    fn effects(&self) -> impl Future<Output = Result<usize, StoreError>> + Send;

    /// A payment, by the four statements of `POST /payments` of the example service: its row,
    /// unless one of its reference stands; that one; the account, unless it is there; its debit,
    /// where it has enough (O14).
    fn pay(
        connection: &mut <Self::Db as sqlx::Database>::Connection,
        id: uuid::Uuid,
        account: i64,
        amount: i64,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// The least that a request under a key costs: its row, by hand, with nothing but the id.
    fn claim_by_hand(
        connection: &mut <Self::Db as sqlx::Database>::Connection,
        id: uuid::Uuid,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// And its answer in that row.
    fn answer_by_hand(
        connection: &mut <Self::Db as sqlx::Database>::Connection,
        id: uuid::Uuid,
        answer: Vec<u8>,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// A message handled in a transaction of its own, by hand: begin, id, effect, commit, each
    /// awaited.
    fn handle_by_hand(&self, id: uuid::Uuid, account: i64) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Puts finished keys of long ago into the store, numbered from the first to before the second.
    fn fill_keys(&self, from: u64, to: u64) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Bytes of log written so far, where the database tells.
    fn log_written(&self) -> impl Future<Output = Result<Option<f64>, StoreError>> + Send;

    /// Row versions that updates and deletes left behind so far, where the database tells. Waits
    /// until closed connections have reported theirs.
    fn left_behind(&self) -> impl Future<Output = Result<Option<f64>, StoreError>> + Send;
}
