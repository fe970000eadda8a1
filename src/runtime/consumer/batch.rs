//! One transaction: admit, see blocked keys and ages, run handlers in order, prove, commit (R23, R24, R31).
//!
//! Promise: either everything of this batch commits together, inbox rows and effects, or nothing of it stays. No savepoint on
//! the good path.

use std::sync::Arc;
use std::time::Duration;

use super::Shared;
use super::admission::{Fate, admit};
use super::calls::{self, Call, Wanted, call};
use super::handlers::Handler;
use super::item::Item;
use super::options::Unhandled;
use super::settle::{self, dead};
use crate::error::{HandlerError, StoreError};
use crate::message::{Message, MessageId};
use crate::observe::Outcome;
use crate::store::{ConsumerId, InboxTx, ParkAs, Parked, Proof, Store};

/// How a batch ended; unless it is `Done`, nothing of it stayed.
#[derive(Debug)]
pub(super) enum BatchEnd {
    /// Committed; one outcome per item.
    Done(Vec<Outcome>),
    /// The handler of this item failed.
    Failed(usize, HandlerError),
    /// Something went wrong in a handler, and it cannot be told with which item.
    Unclear(String),
    /// A handler ended the transaction and so committed inbox rows: these items are dead as `transaction-ended`.
    Ended(Vec<usize>),
}

/// What the body of the transaction came to.
enum Body {
    Commit {
        outcomes: Vec<Outcome>,
        handled: Vec<usize>,
    },
    Rollback(BatchEnd),
    /// A handler ended the transaction. `owed` are the items whose inbox rows it may have committed while something of them
    /// was still to be done; where it did not, the end is `otherwise`.
    TransactionEnded {
        owed: Vec<usize>,
        otherwise: BatchEnd,
    },
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
        Ok(Body::Commit { outcomes, handled }) => match tx.commit().await {
            Ok(()) => {
                if enqueued {
                    crate::store::hint();
                }
                Ok(BatchEnd::Done(outcomes))
            }
            // A deferred constraint speaks only now: it is the handler's failure, not the database's, and the same batch
            // again would fail for ever.
            Err(error @ StoreError::Other(_)) if !handled.is_empty() => {
                Ok(whose(&handled, &format!("the commit was refused: {error}")))
            }
            Err(error) => Err(error),
        },
        Ok(Body::Rollback(end)) => {
            roll_back(tx).await;
            Ok(end)
        }
        Ok(Body::TransactionEnded { owed, otherwise }) => {
            roll_back(tx).await;
            look_after_ended(shared, consumer, items, &owed, otherwise).await
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
    let mut outcomes = Vec::with_capacity(items.len());
    let mut parked = Vec::new();
    let mut wanted = Vec::new();
    for (index, (item, fate)) in items.iter().zip(&fates).enumerate() {
        let outcome = match fate {
            Fate::Duplicate => Outcome::Duplicate,
            Fate::Mismatch => {
                parked.push(settle::id_reused(&shared.options.name, item));
                Outcome::Mismatch
            }
            Fate::OutOfTime(reason) => {
                parked.push(settle::out_of_time(&shared.options.name, item, reason));
                Outcome::Dead
            }
            Fate::New | Fate::Behind if item.unusable.is_some() => {
                parked.push(dead(item, "no-usable-id", item.unusable.as_deref().unwrap_or_default(), false));
                Outcome::Dead
            }
            Fate::Behind => {
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
                Some((number, handler)) => {
                    let (in_sets, lane) = (matches!(handler, Handler::Batch(_)), item.message.lane_id());
                    wanted.push(Wanted { item: index, handler: number, in_sets, lane });
                    Outcome::Processed
                }
            },
        };
        outcomes.push(outcome);
    }
    let handled: Vec<usize> = wanted.iter().map(|wanted| wanted.item).collect();
    for Call { handler, items: called } in calls::plan(wanted) {
        let messages: Vec<&Message> = called.iter().map(|index| &items[*index].message).collect();
        let result = call(shared, shared.handlers.get(handler), &messages, attempt, tx, enqueued).await;
        let Err(error) = result else { continue };
        let (error, ended) = whose_failure(tx, error).await;
        let failed = match called.as_slice() {
            [only] => BatchEnd::Failed(*only, error),
            [first, ..] if error.is_nobodys() => BatchEnd::Failed(*first, error),
            _ => BatchEnd::Unclear(error.message().to_owned()),
        };
        return Ok(if ended {
            Body::TransactionEnded { owed: owed(shared, items, &fates), otherwise: failed }
        } else {
            Body::Rollback(failed)
        });
    }
    // The proof comes before our own statements: in an aborted transaction they would only fail and hide whose fault it was.
    if !handled.is_empty() {
        match tx.prove().await? {
            Proof::Same => {}
            Proof::Aborted => return Ok(Body::Rollback(whose(&handled, SWALLOWED))),
            Proof::Ended => {
                let otherwise = whose(&handled, "the handler ended the transaction it was given");
                return Ok(Body::TransactionEnded { owed: owed(shared, items, &fates), otherwise });
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

/// The new items of which something is still to be done when the transaction ends too early: also those that no handler has
/// seen yet, or that were to be stored. Their inbox rows were inserted together, and so committed together.
fn owed<S: Store>(shared: &Arc<Shared<S>>, items: &[Item], fates: &[Fate]) -> Vec<usize> {
    let is_done = |item: &Item| {
        item.unusable.is_none()
            && shared.options.unhandled == Unhandled::Acknowledge
            && shared.handlers.find(&item.message.kind).is_none()
    };
    let is_new = |fate: &Fate| matches!(fate, Fate::New | Fate::Behind);
    let new = items.iter().zip(fates).enumerate().filter(|(_, (item, fate))| is_new(fate) && !is_done(item));
    new.map(|(index, _)| index).collect()
}

/// After a handler's failure: nobody's where the connection is lost, whatever the handler made of that (R27), and true where the
/// handler ended the transaction before it failed (R23). Within a deadline, for a handler that timed out may have left a
/// statement running.
pub(super) async fn whose_failure<T: InboxTx>(tx: &mut T, error: HandlerError) -> (HandlerError, bool) {
    if error.is_nobodys() {
        return (error, false);
    }
    let lost = match tokio::time::timeout(Duration::from_secs(2), tx.prove()).await {
        Ok(Ok(proof)) => return (error, proof == Proof::Ended),
        Ok(Err(silence)) => silence.is_nobodys(),
        Err(_) => tx.is_lost().await,
    };
    let error = if lost { HandlerError::nobodys(format!("{error}; the connection is lost")) } else { error };
    (error, false)
}

const SWALLOWED: &str = "a statement failed, and the handler went on as if it had not: the transaction is aborted";

/// A failure of the transaction as a whole: of its only handler, else it is found out by running each alone.
fn whose(handled: &[usize], why: &str) -> BatchEnd {
    match handled {
        [only] => BatchEnd::Failed(*only, HandlerError::retryable(why)),
        _ => BatchEnd::Unclear(why.to_owned()),
    }
}

/// A handler ended the transaction. Where that committed inbox rows, the items are dead, loudly: whether their effects are
/// whole nobody knows. Where it did not, it is a failure like any other.
async fn look_after_ended<S: Store>(
    shared: &Arc<Shared<S>>,
    consumer: ConsumerId,
    items: &[Item],
    owed: &[usize],
    otherwise: BatchEnd,
) -> Result<BatchEnd, StoreError> {
    let ids: Vec<MessageId> = owed.iter().map(|index| items[*index].message.id).collect();
    let known = shared.store.known(consumer, &ids).await?;
    let committed: Vec<usize> =
        owed.iter().copied().filter(|index| known.contains(&items[*index].message.id)).collect();
    Ok(if committed.is_empty() { otherwise } else { BatchEnd::Ended(committed) })
}

/// Rolls back within a deadline: a handler that timed out may have left a statement running.
pub(super) async fn roll_back<T: InboxTx>(tx: T) {
    match tokio::time::timeout(Duration::from_secs(5), tx.rollback()).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "a rollback failed; the connection is given up"),
        Err(_) => tracing::warn!("a rollback took longer than 5 s; the connection is given up"),
    }
}
