//! A write transaction: waits for its turn at the file (`flock`: one writer of all processes at a
//! time), runs `BEGIN IMMEDIATE`, and ends with a whole COMMIT or ROLLBACK.
//!
//! Guarantees: a caller that is cancelled does not cancel BEGIN, which sqlx would not survive; the
//! turn is given back only after the transaction ended, also when a [`Write`] is dropped; a
//! connection whose transaction did not end so is not used again (see `connect`). No transaction
//! begins in a file that was deleted or replaced.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sqlx::sqlite::SqliteConnection;
use sqlx::{Sqlite, Transaction};

use super::SqliteStore;
use super::connect::BUSY_TIMEOUT;
use crate::error::StoreError;
use crate::flock;
use crate::store::base::Base;
use crate::task;

/// SQLite asks after so many steps of its virtual machine, about ten microseconds, whether the
/// statement may go on.
const PROGRESS_OPS: i32 = 1_000;

/// A transaction that holds SQLite's write lock. Dropped without commit, it rolls back.
#[derive(Debug)]
pub(super) struct Write {
    open: Option<Open>,
}

#[derive(Debug)]
struct Open {
    transaction: Transaction<'static, Sqlite>,
    guard: Option<Arc<Guard>>,
    turn: flock::Held,
}

/// What the hooks of a connection ask while a handler's code runs on it.
#[derive(Debug, Default)]
struct Guard {
    /// Set once the transaction has ended. From then on the hooks allow everything, for the next
    /// user of the connection.
    ended: AtomicBool,
    /// Set by [`Write::commit`]. Every other commit is refused: a raw COMMIT of the handler, or the
    /// commit of a single statement after the handler ended the transaction.
    committing: AtomicBool,
    /// Set when a commit was refused.
    refused: AtomicBool,
    /// Set by our rollback. SQLite then interrupts the running statement: it may belong to a
    /// handler that was cancelled, and it holds the write lock of the whole file.
    interrupted: AtomicBool,
}

impl Guard {
    /// Says whether a commit may pass, and remembers one that was refused.
    fn check_commit(&self) -> bool {
        let may = self.ended.load(Ordering::SeqCst) || self.committing.load(Ordering::SeqCst);
        if !may {
            self.refused.store(true, Ordering::SeqCst);
        }
        may
    }

    fn may_go_on(&self) -> bool {
        self.ended.load(Ordering::SeqCst) || !self.interrupted.load(Ordering::SeqCst)
    }
}

impl SqliteStore {
    /// Waits for the turn and begins a transaction.
    pub(super) async fn write(&self) -> Result<Write, StoreError> {
        self.check_there()?;
        let store = self.clone();
        // If the caller is dropped, the beginning still completes, and its transaction is rolled
        // back.
        to_its_end(async move {
            let turn = store.take_turn(BUSY_TIMEOUT).await.map_err(sqlx::Error::Io)?;
            store.check_file()?;
            let transaction = store.pool().begin_with("BEGIN IMMEDIATE").await?;
            Ok::<_, StoreError>(Write { open: Some(Open { transaction, guard: None, turn }) })
        })
        .await
    }
}

impl Write {
    /// The connection, with the transaction open.
    pub(super) fn connection(&mut self) -> &mut SqliteConnection {
        match &mut self.open {
            Some(open) => &mut open.transaction,
            None => unreachable!("a statement was run after the transaction was ended by `undo`"),
        }
    }

    /// From now on only [`Write::commit`] commits: SQLite turns any other commit on this connection
    /// into a rollback. A rollback by us interrupts a running statement.
    pub(super) async fn guard(&mut self) -> Result<(), StoreError> {
        let guard = Arc::new(Guard::default());
        let mut handle = self.connection().lock_handle().await?;
        let asked = Arc::clone(&guard);
        handle.set_commit_hook(move || asked.check_commit());
        let asked = Arc::clone(&guard);
        handle.set_progress_handler(PROGRESS_OPS, move || asked.may_go_on());
        drop(handle);
        if let Some(open) = &mut self.open {
            open.guard = Some(guard);
        }
        Ok(())
    }

    /// Whether a commit by the handler's code was refused.
    pub(super) fn was_commit_refused(&self) -> bool {
        let guard = self.open.as_ref().and_then(|open| open.guard.as_ref());
        guard.is_some_and(|guard| guard.refused.load(Ordering::SeqCst))
    }

    /// Commits, and gives the turn back.
    pub(super) async fn commit(mut self) -> Result<(), StoreError> {
        match self.open.take() {
            Some(open) => to_its_end(open.commit()).await,
            None => Err(sqlx::Error::Protocol("a transaction was committed after `undo` had ended it".into()).into()),
        }
    }

    /// Rolls back, and gives the turn back.
    pub(super) async fn rollback(mut self) -> Result<(), StoreError> {
        self.undo().await
    }

    /// Rolls back in place, and gives the turn back. A second call does nothing; no statement may
    /// be run afterwards.
    pub(super) async fn undo(&mut self) -> Result<(), StoreError> {
        match self.open.take() {
            Some(open) => to_its_end(open.rollback()).await,
            None => Ok(()),
        }
    }
}

/// Runs the work in a task of its own, so that a caller that is cancelled does not stop it.
async fn to_its_end<T: Send + 'static>(
    work: impl Future<Output = Result<T, StoreError>> + Send + 'static,
) -> Result<T, StoreError> {
    task::spawn(work).await.map_err(|error| sqlx::Error::Io(std::io::Error::other(error)))?
}

impl Open {
    async fn commit(self) -> Result<(), StoreError> {
        if let Some(guard) = &self.guard {
            guard.committing.store(true, Ordering::SeqCst);
        }
        let outcome = self.transaction.commit().await.map_err(crate::outbox::enqueue::commit_error);
        end(self.guard);
        drop(self.turn);
        outcome
    }

    async fn rollback(self) -> Result<(), StoreError> {
        if let Some(guard) = &self.guard {
            guard.interrupted.store(true, Ordering::SeqCst);
        }
        let outcome = self.transaction.rollback().await;
        // The hooks work until now: statements of a cancelled handler may have waited in the queue
        // of the connection's thread, and must be interrupted too.
        end(self.guard);
        drop(self.turn);
        match outcome {
            // The interrupted statement has rolled the transaction back. Its connection is not used
            // again (see `connect`).
            Err(sqlx::Error::Database(error)) if error.message().contains("no transaction is active") => Ok(()),
            outcome => Ok(outcome?),
        }
    }
}

impl Drop for Write {
    fn drop(&mut self) {
        let Some(open) = self.open.take() else { return };
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => {
                runtime.spawn(task::boxed(async move {
                    if let Err(error) = open.rollback().await {
                        tracing::debug!(%error, "the rollback of a dropped transaction failed, its connection is closed");
                    }
                }));
            }
            // Without a runtime nobody uses the pool again; the connection's thread rolls back, and
            // another process waits for SQLite's own lock until then.
            Err(_) => drop(open),
        }
    }
}

/// Lets the hooks allow everything: the connection returns to the pool, and its next user may
/// commit.
fn end(guard: Option<Arc<Guard>>) {
    if let Some(guard) = guard {
        guard.ended.store(true, Ordering::SeqCst);
    }
}
