//! One transaction: insert inbox rows, find blocked keys and messages that are out of time, run
//! handlers in order, prove, commit (R23, R24, R31).
//!
//! Promise: inbox rows and effects of the batch commit together, or nothing of it stays. The normal
//! path uses no savepoint.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::Shared;
use super::admission::{Fate, admit};
use super::calls::{self, Call, Failure, Wanted, call};
use super::item::Item;
use super::options::Unhandled;
use super::settle::{self, dead};
use crate::error::StoreError;
use crate::inbox::port::{ConsumerId, InboxTx, ParkAs, Parked, Proof, Undone};
use crate::message::{Message, MessageId};
use crate::observe::{DeliveryOutcome, Trouble};
use crate::time::pace::Pace;

/// How a batch ended. Except for `Done`, nothing of it was committed by the consumer.
#[derive(Debug)]
pub(super) enum BatchEnd {
    /// Committed; one outcome per item.
    Done(Vec<DeliveryOutcome>),
    /// A handler, or the transaction, failed.
    Failed(Failure),
    /// A handler ended the transaction and so committed inbox rows: these items are dead as
    /// `transaction-ended`.
    Ended(Vec<usize>),
}

/// The result of the work inside the transaction.
enum Body {
    Commit {
        outcomes: Vec<DeliveryOutcome>,
        handled: Vec<usize>,
    },
    /// Every item was known, and nothing was written.
    Known(Vec<DeliveryOutcome>),
    Rollback(BatchEnd),
}

/// What the handlers have done with the transaction so far.
#[derive(Default)]
struct Handlers {
    /// The items whose inbox rows a handler may have committed although they were not finished.
    /// Empty until the first handler is called.
    owed: Vec<usize>,
    enqueued: bool,
}

/// Runs the items in one transaction. `attempt` is the number of the try if it was counted. Until
/// `give_up` it returns only when the end of the transaction is known.
///
/// # Errors
/// A transient error or another error of the database: the caller runs the same items again later.
pub(super) async fn run(
    shared: &Arc<Shared>,
    consumer: ConsumerId,
    items: &[Item],
    attempt: Option<u32>,
    give_up: &CancellationToken,
) -> Result<BatchEnd, StoreError> {
    let mut tx = shared.store.begin(consumer).await?;
    let mut handlers = Handlers::default();
    let end = match body(shared, tx.as_mut(), items, attempt, &mut handlers).await {
        Ok(Body::Commit { outcomes, handled }) => match tx.commit().await {
            Ok(()) => {
                if handlers.enqueued {
                    crate::outbox::enqueue::hint();
                }
                return Ok(BatchEnd::Done(outcomes));
            }
            // A deferred constraint fails only at the commit. That is the handler's failure: the
            // same batch would fail again for ever.
            Err(error @ StoreError::Other(_)) if !handled.is_empty() => {
                return Ok(BatchEnd::Failed(Failure::of_all(&handled, &format!("the commit was refused: {error}"))));
            }
            Err(error) => return Err(error),
        },
        // Nobody waits for the end of a transaction that wrote nothing.
        Ok(Body::Known(outcomes)) => {
            drop(tokio::spawn(roll_back(tx)));
            return Ok(BatchEnd::Done(outcomes));
        }
        Ok(Body::Rollback(end)) => Ok(end),
        Err(error) => Err(error),
    };
    if handlers.owed.is_empty() {
        roll_back(tx).await;
        return end;
    }
    match (undo(shared, tx.as_mut(), give_up).await?, end) {
        (Undone::Committed, _) => Ok(BatchEnd::Ended(handlers.owed)),
        (Undone::Lost, Ok(BatchEnd::Failed(failure))) => Ok(BatchEnd::Failed(failure.lost(handlers.owed[0]))),
        (_, end) => end,
    }
}

async fn body(
    shared: &Arc<Shared>,
    tx: &mut dyn InboxTx,
    items: &[Item],
    attempt: Option<u32>,
    handlers: &mut Handlers,
) -> Result<Body, StoreError> {
    let fates = admit(tx, items).await?;
    if attempt.is_none() && fates.iter().all(|fate| *fate == Fate::Duplicate) {
        return Ok(Body::Known(vec![DeliveryOutcome::Duplicate; items.len()]));
    }
    let mut outcomes = Vec::with_capacity(items.len());
    let mut parked = Vec::new();
    let mut wanted = Vec::new();
    for (index, (item, fate)) in items.iter().zip(&fates).enumerate() {
        let outcome = match fate {
            Fate::Duplicate => DeliveryOutcome::Duplicate,
            Fate::Mismatch => {
                parked.push(settle::id_reused(&shared.options.name, item));
                DeliveryOutcome::Mismatch
            }
            Fate::OutOfTime(reason) => {
                parked.push(settle::out_of_time(&shared.options.name, item, reason));
                DeliveryOutcome::Dead
            }
            Fate::New | Fate::Behind if item.unusable.is_some() => {
                parked.push(dead(item, "no-usable-id", item.unusable.as_deref().unwrap_or_default(), false));
                DeliveryOutcome::Dead
            }
            // A message without a handler has no effect that could come too early, so it does not
            // wait behind its key.
            Fate::Behind if shared.handlers.find(&item.message.kind).is_some() => {
                let message = item.message.clone();
                parked.push(Parked { message, park_as: ParkAs::Behind, attempts: 0, error: None });
                DeliveryOutcome::Retried
            }
            Fate::New | Fate::Behind => match shared.handlers.find(&item.message.kind) {
                None if shared.options.unhandled == Unhandled::Acknowledge => DeliveryOutcome::Unhandled,
                None => {
                    let error = format!("no handler takes the kind `{}`", item.message.kind);
                    parked.push(dead(item, "unhandled", &error, false));
                    DeliveryOutcome::Unhandled
                }
                Some((number, handler)) => {
                    let (in_sets, lane) = (handler.takes_sets(), item.lane_id);
                    wanted.push(Wanted { item: index, handler: number, in_sets, lane });
                    DeliveryOutcome::Processed
                }
            },
        };
        outcomes.push(outcome);
    }
    let handled: Vec<usize> = wanted.iter().map(|wanted| wanted.item).collect();
    if !handled.is_empty() {
        handlers.owed = owed(shared, items, &fates);
    }
    for Call { handler, items: called } in calls::plan(wanted) {
        let messages: Vec<&Message> = called.iter().map(|index| &items[*index].message).collect();
        let enqueued = &mut handlers.enqueued;
        let result = call(shared, shared.handlers.get(handler), &messages, attempt, tx, enqueued).await;
        let Err(error) = result else { continue };
        return Ok(Body::Rollback(BatchEnd::Failed(Failure::of_call(&called, error))));
    }
    // The proof comes before our own statements: in an aborted transaction these would fail and
    // hide the cause.
    let failed = |handled: &[usize], why| Body::Rollback(BatchEnd::Failed(Failure::of_all(handled, why)));
    if !handled.is_empty() {
        match tx.prove().await? {
            Proof::Same => {}
            Proof::Aborted => return Ok(failed(&handled, SWALLOWED)),
            Proof::Ended => {
                return Ok(failed(&handled, "the handler ended the transaction it was given"));
            }
        }
    }
    if !parked.is_empty() {
        tx.park(&parked).await?;
    }
    if attempt.is_some() {
        let ids: Vec<MessageId> = items.iter().map(|item| item.message.id).collect();
        tx.clear_attempts(&ids).await?;
    }
    Ok(Body::Commit { outcomes, handled })
}

/// The new items that are unfinished if the transaction ends too early, including items that no
/// handler has seen yet or that were to be stored: their inbox rows were inserted together, so they
/// were committed together.
fn owed(shared: &Arc<Shared>, items: &[Item], fates: &[Fate]) -> Vec<usize> {
    let is_done = |item: &Item| {
        item.unusable.is_none()
            && shared.options.unhandled == Unhandled::Acknowledge
            && shared.handlers.find(&item.message.kind).is_none()
    };
    let is_new = |fate: &Fate| matches!(fate, Fate::New | Fate::Behind);
    let new = items.iter().zip(fates).enumerate().filter(|(_, (item, fate))| is_new(fate) && !is_done(item));
    new.map(|(index, _)| index).collect()
}

/// Ends a transaction in which a handler ran, and finds out whether the handler had committed it.
/// Asks until the database answers, because a second try would find inbox rows that the handler
/// committed and treat its messages as duplicates.
///
/// # Errors
/// The last error, if `give_up` came first.
pub(super) async fn undo(
    shared: &Shared,
    tx: &mut dyn InboxTx,
    give_up: &CancellationToken,
) -> Result<Undone, StoreError> {
    let mut pace = Pace::new(Duration::from_millis(100), Duration::from_secs(5));
    let mut unknown = None;
    loop {
        let error = match tx.undo().await {
            Ok(undone) => return Ok(undone),
            Err(error) => error,
        };
        let why = format!("the database does not say what became of a transaction: {error}");
        unknown.get_or_insert_with(|| Unknown::new(shared)).says(why);
        if !pace.wait(give_up).await {
            tracing::error!(consumer = %shared.options.name, %error, "what became of a transaction is not known at the stop; if a handler committed it by itself, its messages come again as duplicates");
            return Err(error);
        }
    }
}

/// Shows a trouble while the end of a transaction is unknown; dropping it ends the trouble.
struct Unknown<'a> {
    shared: &'a Shared,
    number: u64,
}

impl<'a> Unknown<'a> {
    const NAME: &'static str = "transaction";

    fn new(shared: &'a Shared) -> Self {
        static NUMBERS: AtomicU64 = AtomicU64::new(1);
        Self { shared, number: NUMBERS.fetch_add(1, Ordering::Relaxed) }
    }

    fn says(&self, why: String) {
        let health = &self.shared.health;
        health.trouble_of(&self.shared.part, Self::NAME, self.number, Some(Trouble::Stops(why)));
    }
}

impl Drop for Unknown<'_> {
    fn drop(&mut self) {
        self.shared.health.trouble_of(&self.shared.part, Self::NAME, self.number, None);
    }
}

pub(super) const SWALLOWED: &str =
    "a statement failed, and the handler went on as if it had not: the transaction is aborted";

/// Rolls back, within a time limit, a transaction that no handler has used.
pub(super) async fn roll_back(tx: Box<dyn InboxTx>) {
    match tokio::time::timeout(Duration::from_secs(5), tx.rollback()).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "a rollback failed; the connection is given up"),
        Err(_) => tracing::warn!("a rollback took longer than 5 s; the connection is given up"),
    }
}
