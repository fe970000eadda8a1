//! A write transaction: waits for the turn, runs `BEGIN IMMEDIATE`, and ends in order.
//!
//! Guarantees: the beginning is never cancelled inside sqlx, even if the caller is (R28); the turn
//! is given back only after the transaction ended, also when this is dropped; a connection whose
//! transaction did not end in order is not used again (see `connect`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sqlx::sqlite::SqliteConnection;
use sqlx::{Sqlite, Transaction};

use super::connect::{BUSY_TIMEOUT, SqliteStore};
use crate::error::StoreError;
use crate::flock;
use crate::store::base::Base;

/// The number of steps of SQLite's virtual machine between two checks whether a statement may go
/// on: about ten microseconds.
const PROGRESS_OPS: i32 = 1_000;

/// A transaction that holds SQLite's write lock. Dropped without commit, it rolls back.
#[derive(Debug)]
pub(super) struct Write {
    held: Option<Held>,
}

#[derive(Debug)]
struct Held {
    transaction: Transaction<'static, Sqlite>,
    guard: Option<Arc<Guard>>,
    turn: flock::Held,
}

/// Controls a connection while foreign code runs on it.
#[derive(Debug, Default)]
struct Guard {
    /// Set once the transaction has ended. From then on the hooks allow everything, for the next
    /// user of the connection.
    ended: AtomicBool,
    /// Set by [`Write::commit`]. Every other commit is refused: a raw COMMIT, or a statement that
    /// commits by itself because the transaction was ended before it.
    committing: AtomicBool,
    /// Set when a commit was refused.
    refused: AtomicBool,
    /// Set by a rollback: a running statement is interrupted. It may belong to a handler that was
    /// given up, and it holds the write lock of the whole file (R28).
    interrupted: AtomicBool,
}

impl Guard {
    fn may_commit(&self) -> bool {
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
        if !self.can_open() {
            return Err(StoreError::SchemaMissing(format!("the file {} is not there", self.path().display())));
        }
        let store = self.clone();
        // If the caller is dropped, the beginning still completes, and its transaction is rolled
        // back.
        to_its_end(async move {
            let turn = store.take_turn(BUSY_TIMEOUT).await.map_err(sqlx::Error::Io)?;
            let transaction = store.pool().begin_with("BEGIN IMMEDIATE").await?;
            Ok::<_, StoreError>(Write { held: Some(Held { transaction, guard: None, turn }) })
        })
        .await
    }
}

impl Write {
    /// The connection, with the transaction open.
    pub(super) fn connection(&mut self) -> &mut SqliteConnection {
        match &mut self.held {
            Some(held) => &mut held.transaction,
            None => unreachable!("`held` is taken only by what consumes or drops this"),
        }
    }

    /// From now on only [`Write::commit`] commits: SQLite turns any other commit on this connection
    /// into a rollback. A rollback by us interrupts a running statement.
    pub(super) async fn guard(&mut self) -> Result<(), StoreError> {
        let guard = Arc::new(Guard::default());
        let mut handle = self.connection().lock_handle().await?;
        let asked = Arc::clone(&guard);
        handle.set_commit_hook(move || asked.may_commit());
        let asked = Arc::clone(&guard);
        handle.set_progress_handler(PROGRESS_OPS, move || asked.may_go_on());
        drop(handle);
        if let Some(held) = &mut self.held {
            held.guard = Some(guard);
        }
        Ok(())
    }

    /// Whether a commit of foreign code was refused.
    pub(super) fn was_commit_refused(&self) -> bool {
        let guard = self.held.as_ref().and_then(|held| held.guard.as_ref());
        guard.is_some_and(|guard| guard.refused.load(Ordering::SeqCst))
    }

    /// Commits, and gives the turn back.
    pub(super) async fn commit(mut self) -> Result<(), StoreError> {
        match self.held.take() {
            Some(held) => to_its_end(held.commit()).await,
            None => Ok(()),
        }
    }

    /// Rolls back, and gives the turn back.
    pub(super) async fn rollback(mut self) -> Result<(), StoreError> {
        self.undo().await
    }

    /// Rolls back, and gives the turn back. Afterwards this value must not be used for statements.
    pub(super) async fn undo(&mut self) -> Result<(), StoreError> {
        match self.held.take() {
            Some(held) => to_its_end(held.rollback()).await,
            None => Ok(()),
        }
    }
}

/// Runs the work in a task of its own, so that a cancelled caller leaves no connection half way.
async fn to_its_end<T: Send + 'static>(
    work: impl Future<Output = Result<T, StoreError>> + Send + 'static,
) -> Result<T, StoreError> {
    tokio::spawn(work).await.map_err(|error| sqlx::Error::Io(std::io::Error::other(error)))?
}

impl Held {
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
        // The guard ends only here: statements of a handler that was given up may have waited in
        // the queue of the connection's thread.
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
        let Some(held) = self.held.take() else { return };
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => {
                runtime.spawn(async move {
                    if let Err(error) = held.rollback().await {
                        tracing::debug!(%error, "the rollback of a dropped transaction failed, its connection is closed");
                    }
                });
            }
            // Without a runtime nobody uses the pool again; the connection's thread rolls back.
            Err(_) => drop(held),
        }
    }
}

/// Ends the guard: the connection returns to the pool, and its next user may commit.
fn end(guard: Option<Arc<Guard>>) {
    if let Some(guard) = guard {
        guard.ended.store(true, Ordering::SeqCst);
    }
}
