//! One transaction: admit, see blocked keys, run handlers in order, prove, commit (R23, R24).
//!
//! Promise: either everything of this batch commits together, inbox rows and effects, or nothing of it stays. No savepoint on
//! the good path.

use std::collections::{HashMap, HashSet};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::FutureExt;

use super::Shared;
use super::item::Item;
use super::options::Unhandled;
use crate::error::{HandlerError, StoreError};
use crate::message::{Message, MessageId};
use crate::observe::{self, Outcome};
use crate::runtime::{HandlerTx, MessageHandler};
use crate::store::{ConsumerId, InboxEntry, InboxTx, ParkAs, Parked, Proof, Store};

/// How a batch ended; unless it is `Done`, nothing of it stayed.
#[derive(Debug)]
pub(super) enum BatchEnd {
    /// Committed; one outcome per item.
    Done(Vec<Outcome>),
    /// The handler of this item failed.
    Failed(usize, HandlerError),
    /// Something went wrong in a handler, and it cannot be told which: each item alone.
    Unclear(String),
    /// A handler ended the transaction and so committed inbox rows: these items are dead as `transaction-ended`.
    Ended(Vec<usize>),
}

/// What the body of the transaction came to.
enum Body {
    Commit(Vec<Outcome>),
    Rollback(BatchEnd),
    TransactionEnded { handled: Vec<usize> },
}

/// Runs the items in one transaction. `attempt` is the number of the try where it was counted.
///
/// # Errors
/// Nobody's failure, or the database's: the same items again, later.
pub(super) async fn run<S: Store>(
    shared: &Arc<Shared<S>>,
    consumer: ConsumerId,
    items: &[Item],
    attempt: Option<u32>,
) -> Result<BatchEnd, StoreError> {
    let mut tx = shared.store.begin(consumer).await?;
    let mut enqueued = false;
    match body(shared, &mut tx, items, attempt, &mut enqueued).await {
        Ok(Body::Commit(outcomes)) => {
            tx.commit().await?;
            if enqueued {
                crate::store::hint();
            }
            Ok(BatchEnd::Done(outcomes))
        }
        Ok(Body::Rollback(end)) => {
            roll_back(tx).await;
            Ok(end)
        }
        Ok(Body::TransactionEnded { handled }) => {
            roll_back(tx).await;
            look_after_ended(shared, consumer, items, handled).await
        }
        Err(error) => {
            roll_back(tx).await;
            Err(error)
        }
    }
}

async fn body<S: Store>(
    shared: &Arc<Shared<S>>,
    tx: &mut S::Tx,
    items: &[Item],
    attempt: Option<u32>,
    enqueued: &mut bool,
) -> Result<Body, StoreError> {
    let fates = admit(tx, items).await?;
    let lanes: Vec<[u8; 16]> = {
        let new = items.iter().zip(&fates).filter(|(_, fate)| **fate == Fate::New);
        let lanes: HashSet<_> = new.filter_map(|(item, _)| item.message.lane_id()).collect();
        lanes.into_iter().collect()
    };
    let blocked = if lanes.is_empty() { HashSet::new() } else { tx.blocked(&lanes).await? };
    let mut outcomes = Vec::with_capacity(items.len());
    let mut parked = Vec::new();
    let mut handled = Vec::new();
    for (index, (item, fate)) in items.iter().zip(&fates).enumerate() {
        let outcome = match fate {
            Fate::Duplicate => Outcome::Duplicate,
            Fate::Mismatch => {
                tracing::error!(consumer = %shared.options.name, id = %item.message.id, id_text = %item.message.id_text, place = %item.message.coordinates, "the same message id with different content");
                parked.push(dead(item, "id-reused", "the same id stands in the inbox with different content", false));
                Outcome::Mismatch
            }
            Fate::New if item.unusable.is_some() => {
                parked.push(dead(item, "no-usable-id", item.unusable.as_deref().unwrap_or_default(), false));
                Outcome::Dead
            }
            Fate::New if item.message.lane_id().is_some_and(|lane| blocked.contains(&lane)) => {
                let message = item.message.clone();
                parked.push(Parked { message, park_as: ParkAs::Behind, attempts: 0, error: None });
                Outcome::Retried
            }
            Fate::New => match shared.handlers.find(&item.message.kind) {
                None if shared.options.unhandled == Unhandled::Acknowledge => Outcome::Unhandled,
                None => {
                    let error = format!("no handler takes the kind `{}`", item.message.kind);
                    parked.push(dead(item, "unhandled", &error, false));
                    Outcome::Unhandled
                }
                Some(handler) => {
                    handled.push(index);
                    if let Err(error) = call(shared, handler, &item.message, attempt, tx, enqueued).await {
                        return Ok(Body::Rollback(BatchEnd::Failed(index, error)));
                    }
                    Outcome::Processed
                }
            },
        };
        outcomes.push(outcome);
    }
    // The proof comes before our own statements: in an aborted transaction they would only fail and hide whose fault it was.
    if !handled.is_empty() {
        match tx.prove().await? {
            Proof::Same => {}
            Proof::Aborted => return Ok(Body::Rollback(aborted(&handled))),
            Proof::Ended => return Ok(Body::TransactionEnded { handled }),
        }
    }
    if !parked.is_empty() {
        tx.park(&parked).await?;
    }
    if attempt.is_some() {
        let ids: Vec<MessageId> = items.iter().map(|item| item.message.id).collect();
        tx.clear_attempts(&ids).await?;
    }
    Ok(Body::Commit(outcomes))
}

/// What the inbox says of one item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    New,
    Duplicate,
    Mismatch,
}

/// Inserts the ids, first; inside the batch the first delivered wins, and hashes are compared in memory too (R32).
async fn admit<T: InboxTx>(tx: &mut T, items: &[Item]) -> Result<Vec<Fate>, StoreError> {
    let mut first: HashMap<MessageId, usize> = HashMap::with_capacity(items.len());
    let mut entries = Vec::with_capacity(items.len());
    for (index, item) in items.iter().enumerate() {
        if let std::collections::hash_map::Entry::Vacant(vacant) = first.entry(item.message.id) {
            vacant.insert(index);
            entries.push(InboxEntry { id: item.message.id, hash: item.hash });
        }
    }
    let admission = tx.admit(&entries).await?;
    if admission.known.len() != entries.len() {
        return Err(StoreError::Corrupt(format!(
            "the inbox answered {} of {} ids",
            admission.known.len(),
            entries.len()
        )));
    }
    let known: HashMap<MessageId, _> = entries.iter().map(|entry| entry.id).zip(admission.known).collect();
    let fate = |(index, item): (usize, &Item)| {
        let winner = first[&item.message.id];
        let standing = match known[&item.message.id] {
            Some(known) => known.hash,
            None if winner == index => return Fate::New,
            None => items[winner].hash,
        };
        if standing == item.hash { Fate::Duplicate } else { Fate::Mismatch }
    };
    Ok(items.iter().enumerate().map(fate).collect())
}

/// Runs a handler: a panic and a timeout are failures like any other.
pub(super) async fn call<S: Store>(
    shared: &Arc<Shared<S>>,
    handler: &Arc<dyn MessageHandler<S>>,
    message: &Message,
    attempt: Option<u32>,
    tx: &mut S::Tx,
    enqueued: &mut bool,
) -> Result<(), HandlerError> {
    let numbered;
    let message = match attempt {
        Some(attempt) => {
            numbered = Message { attempt, ..message.clone() };
            &numbered
        }
        None => message,
    };
    let limit = shared.options.handler_timeout;
    let began = Instant::now();
    let mut handler_tx = HandlerTx::new(tx, enqueued);
    let run = AssertUnwindSafe(handler.handle(message, &mut handler_tx)).catch_unwind();
    let result = match tokio::time::timeout(limit, run).await {
        Ok(Ok(result)) => result,
        Ok(Err(panic)) => Err(HandlerError::retryable(format!("the handler panicked: {}", panic_text(panic.as_ref())))),
        Err(_) => Err(HandlerError::retryable(format!("the handler ran longer than {limit:?}"))),
    };
    observe::handled(&shared.options.name, began.elapsed());
    result
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

fn aborted(handled: &[usize]) -> BatchEnd {
    const SWALLOWED: &str = "a statement failed, and the handler went on as if it had not: the transaction is aborted";
    match handled {
        [only] => BatchEnd::Failed(*only, HandlerError::retryable(SWALLOWED)),
        _ => BatchEnd::Unclear(SWALLOWED.to_owned()),
    }
}

/// A handler ended the transaction. Where that committed inbox rows, the items are dead, loudly: whether their effects are
/// whole nobody knows. Where it did not, it is a failure like any other.
async fn look_after_ended<S: Store>(
    shared: &Arc<Shared<S>>,
    consumer: ConsumerId,
    items: &[Item],
    handled: Vec<usize>,
) -> Result<BatchEnd, StoreError> {
    const ENDED: &str = "the handler ended the transaction it was given";
    let ids: Vec<MessageId> = handled.iter().map(|index| items[*index].message.id).collect();
    let known = shared.store.known(consumer, &ids).await?;
    let committed: Vec<usize> =
        handled.iter().copied().filter(|index| known.contains(&items[*index].message.id)).collect();
    Ok(match handled.as_slice() {
        _ if !committed.is_empty() => BatchEnd::Ended(committed),
        [only] => BatchEnd::Failed(*only, HandlerError::retryable(ENDED)),
        _ => BatchEnd::Unclear(ENDED.to_owned()),
    })
}

/// Rolls back within a deadline: a handler that timed out may have left a statement running.
pub(super) async fn roll_back<T: InboxTx>(tx: T) {
    match tokio::time::timeout(Duration::from_secs(5), tx.rollback()).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "a rollback failed; the connection is given up"),
        Err(_) => tracing::warn!("a rollback took longer than 5 s; the connection is given up"),
    }
}

pub(super) fn dead(item: &Item, reason: &str, error: &str, holds: bool) -> Parked {
    Parked {
        message: item.message.clone(),
        park_as: ParkAs::Dead { reason: reason.to_owned(), holds },
        attempts: 0,
        error: Some(error.to_owned()),
    }
}
