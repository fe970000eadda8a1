//! One transaction: insert inbox rows, find blocked keys and messages that are out of time, run
//! handlers in order, prove, commit (R23, R24, R31).
//!
//! Promise: inbox rows and effects of the batch commit together, or nothing of it stays. The normal
//! path uses no savepoint.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use super::Shared;
use super::admission::{Fate, admit};
use super::calls::{Failure, Wanted};
use super::handlers::Handler;
use super::item::Item;
use super::options::Unhandled;
use super::transaction::{NotCommitted, commit, handle, roll_back, undo, unless};
use super::verdict::{dead, id_reused, out_of_time, say_dead};
use crate::error::StoreError;
use crate::inbox::port::{ConsumerId, InboxTx, ParkAs, Parked};
use crate::message::{Message, MessageId};
use crate::observe::{self, DeliveryOutcome};
use crate::task;

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
        parked: Vec<Parked>,
    },
    /// Every item was known, and nothing was written.
    Known(Vec<DeliveryOutcome>),
    Failed(Failure),
}

/// What the handlers have done with the transaction so far.
#[derive(Default)]
struct Handlers {
    /// The items whose inbox rows a handler may have committed although they were not finished.
    /// Empty until the first handler is called.
    owed: Vec<usize>,
    enqueued: bool,
}

/// Runs the items in one transaction. `attempt` is the number of the try if it was counted. Returns
/// only when the end of the transaction is known; `None` where the grace of a stop ended first and
/// nothing of the transaction stays.
///
/// # Errors
/// A transient error or another error of the database: the caller runs the same items again later.
pub(super) async fn run(
    shared: &Arc<Shared>,
    consumer: ConsumerId,
    items: &[Item],
    attempt: Option<u32>,
    give_up: &CancellationToken,
) -> Result<Option<BatchEnd>, StoreError> {
    let Some(tx) = unless(give_up, shared.store.begin(consumer)).await else { return Ok(None) };
    let mut tx = tx?;
    let mut handlers = Handlers::default();
    let why = match unless(give_up, body(shared, tx.as_mut(), items, attempt, &mut handlers)).await {
        Some(Ok(Body::Commit { outcomes, handled, parked })) => {
            let committed = commit(tx, &handled, handlers.enqueued).await;
            // Also where nobody knows whether it is stored: the next try would find it done, and
            // count a duplicate.
            let is_unknown = matches!(committed, Err(StoreError::CommitUnknown(_)));
            if is_unknown || matches!(committed, Ok(None)) {
                for parked in &parked {
                    if say_dead(&shared.options.name, parked) && is_unknown {
                        observe::delivered(&shared.options.name, DeliveryOutcome::Dead, 1);
                    }
                }
            }
            return Ok(Some(committed?.map_or(BatchEnd::Done(outcomes), BatchEnd::Failed)));
        }
        // Nobody waits for the end of a transaction that wrote nothing.
        Some(Ok(Body::Known(outcomes))) => {
            drop(task::spawn(roll_back(tx)));
            return Ok(Some(BatchEnd::Done(outcomes)));
        }
        Some(Ok(Body::Failed(failure))) => Ok(Some(failure)),
        Some(Err(error)) if handlers.owed.is_empty() => {
            roll_back(tx).await;
            return Err(error);
        }
        Some(Err(error)) => Err(error),
        // No handler ran: dropping the transaction is enough.
        None if handlers.owed.is_empty() => return Ok(None),
        None => Ok(None),
    };
    let first = handlers.owed.first().copied().unwrap_or_default();
    Ok(match undo(shared, tx.as_mut(), why, first, give_up).await? {
        NotCommitted::Failed(failure) => Some(BatchEnd::Failed(failure)),
        NotCommitted::Ended => Some(BatchEnd::Ended(handlers.owed)),
        NotCommitted::Abandoned => None,
    })
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
                parked.push(id_reused(item));
                DeliveryOutcome::Mismatch
            }
            Fate::OutOfTime(reason) => {
                parked.push(out_of_time(item, reason));
                DeliveryOutcome::Dead
            }
            Fate::New | Fate::Behind => match handler_of(shared, item) {
                // A message without a handler has no effect that could come too early, so it does
                // not wait behind its key.
                None => {
                    parked.extend(refused(shared, item));
                    if item.unusable.is_some() { DeliveryOutcome::Dead } else { DeliveryOutcome::Unhandled }
                }
                Some(_) if *fate == Fate::Behind => {
                    let message = item.message.clone();
                    parked.push(Parked { message, park_as: ParkAs::Behind, attempts: 0, error: None });
                    DeliveryOutcome::Retried
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
    let messages: Vec<&Message> = items.iter().map(|item| &item.message).collect();
    if let Some(failure) = handle(shared, tx, wanted, &messages, attempt, &mut handlers.enqueued).await? {
        return Ok(Body::Failed(failure));
    }
    if !parked.is_empty() {
        tx.park(&parked).await?;
    }
    if attempt.is_some() {
        let ids: Vec<MessageId> = items.iter().map(|item| item.message.id).collect();
        tx.clear_attempts(&ids).await?;
    }
    Ok(Body::Commit { outcomes, handled, parked })
}

/// The handler that takes the item, and its number; `None` without a usable id.
pub(super) fn handler_of<'a>(shared: &'a Shared, item: &Item) -> Option<(usize, &'a dyn Handler)> {
    if item.unusable.is_some() { None } else { shared.handlers.find(&item.message.kind) }
}

/// The stored form of an item that no handler takes; `None` if it is acknowledged only.
pub(super) fn refused(shared: &Shared, item: &Item) -> Option<Parked> {
    if let Some(why) = &item.unusable {
        return Some(dead(item, "no-usable-id", why, false));
    }
    let error = || format!("no handler takes the kind `{}`", item.message.kind);
    (shared.options.unhandled == Unhandled::Dead).then(|| dead(item, "unhandled", &error(), false))
}

/// The new items that are unfinished if the transaction ends too early, including items that no
/// handler has seen yet or that were to be stored: their inbox rows were inserted together, so they
/// were committed together.
fn owed(shared: &Arc<Shared>, items: &[Item], fates: &[Fate]) -> Vec<usize> {
    let is_owed = |item: &Item| handler_of(shared, item).is_some() || refused(shared, item).is_some();
    let is_new = |fate: &Fate| matches!(fate, Fate::New | Fate::Behind);
    let new = items.iter().zip(fates).enumerate().filter(|(_, (item, fate))| is_new(fate) && is_owed(item));
    new.map(|(index, _)| index).collect()
}
