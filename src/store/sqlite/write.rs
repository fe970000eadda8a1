//! A write transaction: the turn, `BEGIN IMMEDIATE`, and the way out.
//!
//! Guarantees: beginning is never cancelled inside sqlx, even if the caller is (R28); the turn is given back only after the
//! transaction ended, also when this is dropped; a connection whose transaction did not end as it should is not used again
//! (see `connect`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sqlx::sqlite::SqliteConnection;
use sqlx::{Sqlite, Transaction};

use super::connect::SqliteStore;
use super::turn::Turn;
use crate::error::StoreError;
use crate::store::Base;

/// A transaction that holds SQLite's write lock. Dropped without commit, it rolls back.
#[derive(Debug)]
pub(super) struct Write {
    held: Option<Held>,
}

#[derive(Debug)]
struct Held {
    transaction: Transaction<'static, Sqlite>,
    guard: Option<Arc<CommitGuard>>,
    turn: Turn,
}

/// Refuses every commit on a connection that is not [`Write::commit`]: a raw COMMIT, or a statement that commits by itself
/// because something ended the transaction before.
#[derive(Debug, Default)]
struct CommitGuard {
    open: AtomicBool,
    refused: AtomicBool,
}

impl SqliteStore {
    /// Takes the turn and begins.
    pub(super) async fn write(&self) -> Result<Write, StoreError> {
        if !self.can_open() {
            return Err(StoreError::SchemaMissing(format!("the file {} is not there", self.path().display())));
        }
        let store = self.clone();
        // A task of its own: a dropped caller leaves it to finish, and its result rolls back.
        let begun = tokio::spawn(async move {
            let turn = store.turns().take().await.map_err(sqlx::Error::Io)?;
            let transaction = store.pool().begin_with("BEGIN IMMEDIATE").await?;
            Ok::<_, StoreError>(Write { held: Some(Held { transaction, guard: None, turn }) })
        });
        begun.await.map_err(|error| sqlx::Error::Io(std::io::Error::other(error)))?
    }
}

impl Write {
    /// The connection, inside the transaction.
    pub(super) fn connection(&mut self) -> &mut SqliteConnection {
        match &mut self.held {
            Some(held) => &mut held.transaction,
            None => unreachable!("`held` is taken only by what consumes or drops this"),
        }
    }

    /// From now on only [`Write::commit`] commits: SQLite turns any other commit on this connection into a rollback.
    pub(super) async fn guard_commits(&mut self) -> Result<(), StoreError> {
        let guard = Arc::new(CommitGuard::default());
        let asked = Arc::clone(&guard);
        self.connection().lock_handle().await?.set_commit_hook(move || {
            let open = asked.open.load(Ordering::SeqCst);
            if !open {
                asked.refused.store(true, Ordering::SeqCst);
            }
            open
        });
        if let Some(held) = &mut self.held {
            held.guard = Some(guard);
        }
        Ok(())
    }

    /// Whether a commit was refused.
    pub(super) fn was_commit_refused(&self) -> bool {
        let guard = self.held.as_ref().and_then(|held| held.guard.as_ref());
        guard.is_some_and(|guard| guard.refused.load(Ordering::SeqCst))
    }

    /// Commits, and gives the turn back.
    pub(super) async fn commit(mut self) -> Result<(), StoreError> {
        let Some(Held { transaction, guard, turn }) = self.held.take() else { return Ok(()) };
        open(guard);
        let outcome = transaction.commit().await.map_err(crate::store::door::commit_error);
        drop(turn);
        outcome
    }

    /// Rolls back, and gives the turn back.
    pub(super) async fn rollback(mut self) -> Result<(), StoreError> {
        match self.held.take() {
            Some(held) => held.rollback().await,
            None => Ok(()),
        }
    }
}

impl Held {
    async fn rollback(self) -> Result<(), StoreError> {
        let outcome = self.transaction.rollback().await;
        // Only now: statements of a handler that was given up may have stood in the queue of the connection's thread.
        open(self.guard);
        drop(self.turn);
        Ok(outcome?)
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

/// The connection goes back to the pool, where its next user may commit.
fn open(guard: Option<Arc<CommitGuard>>) {
    if let Some(guard) = guard {
        guard.open.store(true, Ordering::SeqCst);
    }
}
