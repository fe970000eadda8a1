//! The retrier: due heads of waiting keys, one after the other, each try counted before its handler runs (R25, R26).
//!
//! Promise: only the oldest waiting message of a key is tried; it leaves the table in the handler's transaction, only while
//! the claim stands; the next of its key becomes due with it, so a key is drained until it is empty or its head fails.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Shared;
use super::batch::{roll_back, whose_failure};
use super::calls::call;
use super::options::Unhandled;
use super::settle::{self, KILLS};
use crate::error::{HandlerError, StoreError};
use crate::observe::{self, Outcome};
use crate::policy::retry::{Death, Decision};
use crate::policy::split::NobodysFault;
use crate::runtime::pace::{Pace, sleep_unless};
use crate::store::{Claim, ClaimedMessage, ConsumerId, InboxTx, ParkAs, Parked, Proof, Store};

/// Heads claimed at once: few, because a claim that is not reached in time is lost to somebody else.
const HEADS_MAX: usize = 8;
/// Other processes' messages become due without a hint to this one.
const POLL: Duration = Duration::from_millis(500);
/// After so many failures of nobody's a head is given back: others may be luckier with theirs.
const FAULTS_MAX: u32 = 5;
/// How often heads are looked for that a race left without a due time.
const SWEEP: Duration = Duration::from_secs(5);

/// What a retrier has in its hands. Heads stay there until they are dealt with: a database that went away in the middle must not
/// leave them counted and unreachable until their claims run out (G10).
struct Hand {
    claimed: VecDeque<ClaimedMessage>,
    /// A claim whose answer was lost.
    in_doubt: Option<Claim>,
    swept: Instant,
}

pub(super) async fn run<S: Store>(shared: Arc<Shared<S>>, consumer: ConsumerId, stop: CancellationToken) {
    let mut pace = Pace::new(Duration::from_millis(100), Duration::from_secs(5));
    let mut hand = Hand { claimed: VecDeque::new(), in_doubt: None, swept: Instant::now() };
    while !stop.is_cancelled() {
        let step = step(&shared, consumer, &stop, &mut hand).await;
        match step {
            Ok(wait) => {
                pace.worked();
                tokio::select! {
                    () = stop.cancelled() => {}
                    () = shared.parked.notified() => {}
                    () = tokio::time::sleep(wait) => {}
                }
            }
            Err(error) => {
                tracing::debug!(consumer = %shared.options.name, %error, "the retrier waits for the database");
                pace.wait(&stop).await;
            }
        }
    }
    for head in hand.claimed {
        if let Err(error) = shared.store.give_back(&head).await {
            tracing::debug!(consumer = %shared.options.name, %error, "a claim was not given back; it runs out");
        }
    }
}

/// Runs what is due; gives how long to wait for the next.
async fn step<S: Store>(
    shared: &Arc<Shared<S>>,
    consumer: ConsumerId,
    stop: &CancellationToken,
    hand: &mut Hand,
) -> Result<Duration, StoreError> {
    try_heads(shared, consumer, stop, &mut hand.claimed).await?;
    if let Some(claim) = &hand.in_doubt {
        shared.store.give_back_all(consumer, claim).await?;
        hand.in_doubt = None;
    }
    if hand.swept.elapsed() >= SWEEP {
        shared.store.sweep(consumer).await?;
        hand.swept = Instant::now();
    }
    // A cheap look first: claiming is a write, and most of the time nothing is due.
    match shared.store.next_due(consumer).await? {
        Some(due) if due.is_zero() => {}
        Some(due) => return Ok(due.clamp(Duration::from_millis(1), POLL)),
        None => return Ok(POLL),
    }
    let heads = HEADS_MAX;
    // Long enough for all claimed heads, one after the other.
    let claim_for = shared.options.handler_timeout * u32::try_from(heads).unwrap_or(8) + Duration::from_secs(10);
    let claim = Claim::new(claim_for);
    hand.in_doubt = Some(claim);
    hand.claimed.extend(shared.store.claim_due(consumer, heads, &claim).await?);
    hand.in_doubt = None;
    if hand.claimed.is_empty() {
        // Somebody else has what is due.
        return Ok(Duration::from_millis(50));
    }
    try_heads(shared, consumer, stop, &mut hand.claimed).await?;
    Ok(Duration::ZERO)
}

async fn try_heads<S: Store>(
    shared: &Arc<Shared<S>>,
    consumer: ConsumerId,
    stop: &CancellationToken,
    claimed: &mut VecDeque<ClaimedMessage>,
) -> Result<(), StoreError> {
    // A head that was given back in the meantime is found to be claimed no more.
    while let Some(head) = claimed.front().filter(|_| !stop.is_cancelled()) {
        try_head(shared, consumer, head.clone(), stop).await?;
        claimed.pop_front();
    }
    Ok(())
}

async fn try_head<S: Store>(
    shared: &Arc<Shared<S>>,
    consumer: ConsumerId,
    head: ClaimedMessage,
    stop: &CancellationToken,
) -> Result<(), StoreError> {
    let tries = head.message.attempt;
    if !shared.options.retry.allows(tries) {
        let error = HandlerError::retryable(KILLS);
        return bury(shared, &head, Death::Attempts.reason(), &error).await.map(|_| ());
    }
    let mut fault = NobodysFault::default();
    let mut ended = false;
    let error = loop {
        let end = {
            let _alone = shared.solo.write().await;
            in_transaction(shared, consumer, &head).await
        };
        match end {
            Ok(HeadEnd::Done(outcome)) => {
                observe::delivered(&shared.options.name, outcome, 1);
                return Ok(());
            }
            Ok(HeadEnd::ClaimLost) => return Ok(()),
            Ok(HeadEnd::Failed(error)) if !error.is_nobodys() => break error,
            Ok(HeadEnd::Ended) => {
                ended = true;
                break HandlerError::retryable("the handler ended the transaction it was given");
            }
            Ok(HeadEnd::Failed(_)) | Err(_) => {
                let pause = fault.again(0..1, fastrand::f64()).pause;
                if fault.times() > FAULTS_MAX || !sleep_unless(stop, pause).await {
                    shared.store.give_back(&head).await?;
                    return end.map(|_| ());
                }
            }
        }
    };
    tracing::warn!(consumer = %shared.options.name, id = %head.message.id, attempt = tries, %error, "a handler failed");
    let stands = match settle::decide(&shared.options.retry, &error, tries) {
        Decision::Dead(death) => bury(shared, &head, death.reason(), &error).await?,
        Decision::InPlace(after) | Decision::Wait(after) => {
            observe::delivered(&shared.options.name, Outcome::Retried, 1);
            shared.store.postpone(&head, after, error.message()).await?
        }
    };
    if ended && !stands {
        // The handler committed on its own, and the waiting row went with that commit: stored anew as dead (R23).
        store_as_ended(shared, consumer, &head, &error).await?;
    }
    Ok(())
}

enum HeadEnd {
    Done(Outcome),
    Failed(HandlerError),
    ClaimLost,
    Ended,
}

async fn in_transaction<S: Store>(
    shared: &Arc<Shared<S>>,
    consumer: ConsumerId,
    head: &ClaimedMessage,
) -> Result<HeadEnd, StoreError> {
    let mut tx = shared.store.begin(consumer).await?;
    let mut enqueued = false;
    let body = async {
        // Removed first: it is what the proof counts, and what fences a claim that was lost.
        if !tx.finish(head).await? {
            return Ok(HeadEnd::ClaimLost);
        }
        let outcome = match shared.handlers.find(&head.message.kind) {
            Some((_, handler)) => {
                let tries = Some(head.message.attempt);
                if let Err(error) = call(shared, handler, &[&head.message], tries, &mut tx, &mut enqueued).await {
                    let (error, ended) = whose_failure(&mut tx, error).await;
                    return Ok(if ended { HeadEnd::Ended } else { HeadEnd::Failed(error) });
                }
                Outcome::Processed
            }
            None if shared.options.unhandled == Unhandled::Acknowledge => Outcome::Unhandled,
            None => {
                let why = format!("no handler takes the kind `{}`", head.message.kind);
                return Ok(HeadEnd::Failed(HandlerError::terminal(why)));
            }
        };
        match tx.prove().await? {
            Proof::Same => {}
            Proof::Aborted => {
                return Ok(HeadEnd::Failed(HandlerError::retryable(
                    "a statement failed, and the handler went on as if it had not: the transaction is aborted",
                )));
            }
            Proof::Ended => return Ok(HeadEnd::Ended),
        }
        tx.clear_attempts(&[head.message.id]).await?;
        Ok(HeadEnd::Done(outcome))
    }
    .await;
    match body {
        Ok(HeadEnd::Done(outcome)) => {
            match tx.commit().await {
                Ok(()) => {}
                // A deferred constraint speaks only now.
                Err(error @ StoreError::Other(_)) => {
                    let why = format!("the commit was refused: {error}");
                    return Ok(HeadEnd::Failed(HandlerError::retryable(why)));
                }
                Err(error) => return Err(error),
            }
            if enqueued {
                crate::store::hint();
            }
            Ok(HeadEnd::Done(outcome))
        }
        other => {
            roll_back(tx).await;
            other
        }
    }
}

/// False where the row is not ours any more.
async fn bury<S: Store>(
    shared: &Arc<Shared<S>>,
    head: &ClaimedMessage,
    reason: &str,
    error: &HandlerError,
) -> Result<bool, StoreError> {
    let holds = shared.options.holds();
    tracing::error!(consumer = %shared.options.name, id = %head.message.id, topic = %head.message.topic, reason, holds, %error, "a message is dead");
    let buried = shared.store.bury(head, reason, error.message(), holds).await?;
    if buried {
        observe::delivered(&shared.options.name, Outcome::Dead, 1);
    }
    Ok(buried)
}

async fn store_as_ended<S: Store>(
    shared: &Arc<Shared<S>>,
    consumer: ConsumerId,
    head: &ClaimedMessage,
    error: &HandlerError,
) -> Result<(), StoreError> {
    tracing::error!(consumer = %shared.options.name, id = %head.message.id, %error, "a message is dead");
    let mut tx = shared.store.begin(consumer).await?;
    let park_as = ParkAs::Dead { reason: "transaction-ended".to_owned(), holds: shared.options.holds() };
    let (message, attempts) = (head.message.clone(), head.message.attempt);
    let parked = Parked { message, park_as, attempts, error: Some(error.message().to_owned()) };
    match tx.park(&[parked]).await {
        Ok(()) => {
            observe::delivered(&shared.options.name, Outcome::Dead, 1);
            tx.commit().await
        }
        Err(error) => {
            roll_back(tx).await;
            Err(error)
        }
    }
}
