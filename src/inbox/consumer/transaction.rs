//! What lanes and retriers do alike in the transaction of a handler: call the handlers, prove that
//! it is still the same transaction (R23), and end it.
//!
//! Promise: how a transaction ended in which a handler ran is found out before its messages are
//! tried again or left for later, also where the grace of a stop ends while the handler runs. A
//! COMMIT that was sent is waited for as long as its task lives, and its result counts.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::Shared;
use super::calls::{self, Call, Failure, Wanted, call};
use crate::error::StoreError;
use crate::inbox::port::{InboxTx, Proof, Undone};
use crate::message::Message;
use crate::observe::Trouble;
use crate::time::pace::Pace;

/// How long an answer is waited for after the grace of a stop.
const LAST_WORD: Duration = Duration::from_secs(3);

/// How a transaction ended that we did not commit.
pub(super) enum NotCommitted {
    /// Nothing of it stays: this failure prevented it.
    Failed(Failure),
    /// A handler had committed it.
    Ended,
    /// Nothing of it stays: the grace of a stop ended first.
    Abandoned,
}

/// Waits for the work; `None` where the grace of a stop ended first. If the work is done at the
/// same moment, its result counts.
pub(super) async fn unless<T>(give_up: &CancellationToken, work: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        biased;
        done = work => Some(done),
        () = give_up.cancelled() => None,
    }
}

/// Calls the handlers of the wanted messages in order, and then proves that this is still the same
/// transaction: in an aborted one our own statements would fail and hide the cause. Returns the
/// failure, if there is one. `messages` are all of the transaction, as `wanted` numbers them.
pub(super) async fn handle(
    shared: &Shared,
    tx: &mut dyn InboxTx,
    wanted: Vec<Wanted>,
    messages: &[&Message],
    attempt: Option<u32>,
    enqueued: &mut bool,
) -> Result<Option<Failure>, StoreError> {
    if wanted.is_empty() {
        return Ok(None);
    }
    let handled: Vec<usize> = wanted.iter().map(|wanted| wanted.item).collect();
    for Call { handler, items } in calls::plan(wanted) {
        let called: Vec<&Message> = items.iter().map(|item| messages[*item]).collect();
        let result = call(shared, shared.handlers.get(handler), &called, attempt, tx, enqueued).await;
        if let Err(error) = result {
            return Ok(Some(Failure::of_call(&items, error)));
        }
    }
    let why = match tx.prove().await? {
        Proof::Same => return Ok(None),
        Proof::Aborted => "a statement failed, and the handler went on as if it had not: the transaction is aborted",
        Proof::Ended => "the transaction was ended before its commit, by the handler or by the database",
    };
    Ok(Some(Failure::of_all(&handled, why)))
}

/// Commits. A deferred constraint fails only here. That is a failure of the messages that were
/// handled, because the same transaction would fail again for ever.
pub(super) async fn commit(
    tx: Box<dyn InboxTx>,
    handled: &[usize],
    enqueued: bool,
) -> Result<Option<Failure>, StoreError> {
    match tx.commit().await {
        Ok(()) => {
            if enqueued {
                crate::outbox::hint::hint();
            }
            Ok(None)
        }
        Err(error @ StoreError::Other(_)) if !handled.is_empty() => {
            Ok(Some(Failure::of_all(handled, &format!("the commit was refused: {error}"))))
        }
        Err(error) => Err(error),
    }
}

/// Ends a transaction in which a handler ran and that is not to be committed. `why` is the failure
/// that prevents it, or `None` where the grace of a stop ended. Where the connection was lost and
/// it is not known to whom the failure belongs, it is that of the item `first`.
///
/// # Errors
/// The error in `why`; or the last error of the database, if `give_up` came before it told how the
/// transaction ended.
pub(super) async fn undo(
    shared: &Shared,
    tx: &mut dyn InboxTx,
    why: Result<Option<Failure>, StoreError>,
    first: usize,
    give_up: &CancellationToken,
) -> Result<NotCommitted, StoreError> {
    match (ask(shared, tx, give_up).await?, why) {
        (Undone::Committed, _) => Ok(NotCommitted::Ended),
        (Undone::Lost, Ok(Some(failure))) => Ok(NotCommitted::Failed(failure.lost(first))),
        (_, Ok(Some(failure))) => Ok(NotCommitted::Failed(failure)),
        (_, Ok(None)) => Ok(NotCommitted::Abandoned),
        (_, Err(error)) => Err(error),
    }
}

/// Asks until the database tells how the transaction ended, because a second try would find inbox
/// rows that the handler committed and treat its messages as duplicates. It asks at least once. A
/// database that is silent is waited for until shortly after `give_up`.
async fn ask(shared: &Shared, tx: &mut dyn InboxTx, give_up: &CancellationToken) -> Result<Undone, StoreError> {
    let mut pace = Pace::new(Duration::from_millis(100), Duration::from_secs(5));
    let mut unknown = Unknown::new(shared);
    loop {
        let last = async {
            give_up.cancelled().await;
            tokio::time::sleep(LAST_WORD).await;
        };
        let error = tokio::select! {
            biased;
            undone = tx.undo() => match undone {
                Ok(undone) => {
                    unknown.why = None;
                    return Ok(undone);
                }
                Err(error) => error,
            },
            () = last => StoreError::Unavailable(sqlx::Error::Protocol(format!("no answer for {LAST_WORD:?}"))),
        };
        unknown.says(&error);
        if !pace.wait(give_up).await {
            return Err(error);
        }
    }
}

/// Shows a trouble while the end of a transaction is unknown. Dropped, also by an abort of its
/// task, it ends the trouble, and tells of a transaction whose end nobody will learn.
struct Unknown<'a> {
    shared: &'a Shared,
    number: u64,
    /// None where the end is known.
    why: Option<String>,
}

impl<'a> Unknown<'a> {
    const NAME: &'static str = "transaction";

    fn new(shared: &'a Shared) -> Self {
        static NUMBERS: AtomicU64 = AtomicU64::new(1);
        let why = Some("the database has not answered yet".to_owned());
        Self { shared, number: NUMBERS.fetch_add(1, Ordering::Relaxed), why }
    }

    fn says(&mut self, error: &StoreError) {
        let why = format!("the database does not say what became of a transaction: {error}");
        self.why = Some(error.to_string());
        self.show(Some(Trouble::Stops(why)));
    }

    fn show(&self, trouble: Option<Trouble>) {
        self.shared.health.trouble_of(&self.shared.part, Self::NAME, self.number, trouble);
    }
}

impl Drop for Unknown<'_> {
    fn drop(&mut self) {
        self.show(None);
        if let Some(error) = &self.why {
            tracing::error!(consumer = %self.shared.options.name, error, "what became of a transaction was not known when its task ended; if a handler committed it by itself, messages of a batch come again as duplicates, and those of a retry are dead");
        }
    }
}

/// Rolls back, within a time limit, a transaction that no handler has used.
pub(super) async fn roll_back(tx: Box<dyn InboxTx>) {
    match tokio::time::timeout(Duration::from_secs(5), tx.rollback()).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "a rollback failed; the connection is given up"),
        Err(_) => tracing::warn!("a rollback took longer than 5 s; the connection is given up"),
    }
}
