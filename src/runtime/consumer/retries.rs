//! The retrier: due heads of waiting keys, one after the other (R25, R26).
//!
//! Promise: only the oldest waiting messages of a key run; they leave the table in the handler's transaction, only while the
//! claim stands, and the next of the key becomes due with them. What was tried before, or whose last claim ran out, runs alone,
//! its try counted when its turn comes. What was never tried runs in batches, so a key is drained as fast as it was filled.
//!
//! Not here: when the next try is (`policy::retry`), and what the database does for it (`store::waiting`).

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Shared;
use super::batch::{SWALLOWED, roll_back, undo};
use super::blame::Blame;
use super::calls::{self, Call, Wanted, call};
use super::handlers::Handler;
use super::settle::{self, KILLS};
use crate::error::{HandlerError, StoreError};
use crate::message::{Message, MessageId};
use crate::observe::{self, Outcome};
use crate::policy::retry::{Death, Decision};
use crate::policy::split::{NobodysFault, TIMES_BEFORE_HALVING};
use crate::runtime::pace::{Pace, sleep_unless};
use crate::store::{Claim, ClaimedMessage, ConsumerId, InboxTx, Proof, Store, Undone};

/// What a claim lasts longer than a handler may run.
const CLAIM_SPARE: Duration = Duration::from_secs(10);
/// Other processes' messages become due without a hint to this one.
const POLL: Duration = Duration::from_millis(500);
/// After so many failures of nobody's a head is given back: others may be luckier with theirs.
const FAULTS_MAX: u32 = 5;
/// How often heads are looked for that a race left without a due time.
const SWEEP: Duration = Duration::from_secs(5);

/// The retrier of one consumer, and what it still owes the database. That stays until it is written: a database that went away in
/// the middle must not leave a message claimed for nothing, or an alarm unheard (G10).
struct Retrier<S: Store> {
    shared: Arc<Shared<S>>,
    consumer: ConsumerId,
    stop: CancellationToken,
    /// What still runs is dropped: the grace of a stop is nearly over.
    abandon: CancellationToken,
    /// A claim whose answer was lost.
    in_doubt: Option<Claim>,
    owed: Option<Owed>,
    swept: Instant,
}

/// What follows a run that is not done.
enum Owed {
    /// Nothing happened, or nothing that counts.
    GiveBack(Vec<ClaimedMessage>),
    /// The try failed; the next one is after this time.
    Postpone(Box<ClaimedMessage>, Duration, HandlerError),
    /// No further try.
    Bury(Box<ClaimedMessage>, &'static str, HandlerError),
    /// A handler committed by itself, and their rows went with that commit; whether their effects are whole is not known.
    StoreAsEnded(VecDeque<ClaimedMessage>),
}

/// How a transaction ended; unless it is `Done`, nothing of it stayed.
enum RunEnd {
    Done,
    /// The handler of this message failed.
    Failed(usize, HandlerError),
    /// Something went wrong in a handler, and it cannot be told with which message.
    Unclear(String),
    ClaimLost,
    /// A handler committed the transaction by itself.
    Ended,
}

pub(super) async fn run<S: Store>(
    shared: Arc<Shared<S>>,
    consumer: ConsumerId,
    stop: CancellationToken,
    abandon: CancellationToken,
) {
    let swept = Instant::now();
    let mut pace = Pace::new(Duration::from_millis(100), Duration::from_secs(5));
    let mut retrier = Retrier { shared, consumer, stop: stop.clone(), abandon, in_doubt: None, owed: None, swept };
    while !stop.is_cancelled() {
        match retrier.step().await {
            Ok(wait) => {
                pace.worked();
                tokio::select! {
                    () = stop.cancelled() => {}
                    () = retrier.shared.parked.notified() => {}
                    () = tokio::time::sleep(wait) => {}
                }
            }
            Err(error) => {
                tracing::debug!(consumer = %retrier.shared.options.name, %error, "the retrier waits for the database");
                pace.wait(&stop).await;
            }
        }
    }
    // What nothing else knows of is written if the database comes back within the grace.
    let mut pace = Pace::new(Duration::from_millis(100), Duration::from_secs(5));
    while let Err(error) = retrier.settle_up().await {
        let Some(Owed::StoreAsEnded(run)) = &retrier.owed else {
            tracing::warn!(consumer = %retrier.shared.options.name, %error, "a claim was not given back; it runs out");
            break;
        };
        if !pace.wait(&retrier.abandon).await {
            run.iter().for_each(|ended| settle::say_lost(&retrier.shared.options.name, &ended.message, &error));
            break;
        }
    }
}

impl<S: Store> Retrier<S> {
    /// Runs what is due first; gives how long to wait for the next.
    async fn step(&mut self) -> Result<Duration, StoreError> {
        self.settle_up().await?;
        let (shared, consumer) = (Arc::clone(&self.shared), self.consumer);
        if self.swept.elapsed() >= SWEEP {
            shared.store.sweep(consumer).await?;
            self.swept = Instant::now();
        }
        // A cheap look first: claiming is a write, and most of the time nothing is due.
        match shared.store.next_due(consumer, &shared.scope).await? {
            Some(due) if due.is_zero() => {}
            Some(due) => return Ok(due.clamp(Duration::from_millis(1), POLL)),
            None => return Ok(POLL),
        }
        let claim = Claim::new(shared.options.handler_timeout + CLAIM_SPARE);
        self.in_doubt = Some(claim);
        let Some(head) = shared.store.claim_due(consumer, &shared.scope, &claim).await? else {
            self.in_doubt = None;
            // Somebody else has what is due.
            return Ok(Duration::from_millis(50));
        };
        let alone = head.suspect || head.tries > 0;
        let mut run = vec![head];
        if !alone && let Some(head) = run.first() {
            let limit = shared.options.batch_max.saturating_sub(1);
            let behind = shared.store.claim_behind(consumer, head, &shared.scope, limit, &claim).await?;
            run.extend(behind);
        }
        self.in_doubt = None;
        self.run(run, alone).await?;
        self.settle_up().await?;
        Ok(Duration::ZERO)
    }

    /// Runs claimed messages of one key; notes what is owed for those that are not done.
    async fn run(&mut self, mut run: Vec<ClaimedMessage>, alone: bool) -> Result<(), StoreError> {
        let (mut fault, mut blame) = (NobodysFault::default(), Blame::default());
        loop {
            let Some(end) = self.attempt(&run, alone).await else { return self.owes(Owed::GiveBack(run)) };
            match end {
                Ok(RunEnd::Done) => {
                    observe::delivered(&self.shared.options.name, Outcome::Processed, run.len() as u64);
                    return self.wake_next(&run).await;
                }
                Ok(RunEnd::ClaimLost) => return self.owes(Owed::GiveBack(run)),
                Ok(RunEnd::Ended) => return self.owes(Owed::StoreAsEnded(run.into())),
                Ok(RunEnd::Failed(at, error)) if !error.is_nobodys() => {
                    let rest = run.split_off(at.max(1));
                    self.give_back(&mut run, rest).await?;
                    if at == 0 {
                        return self.failed(run, error);
                    }
                }
                Ok(RunEnd::Unclear(_)) if run.len() > 1 => {
                    let rest = run.split_off(run.len() / 2);
                    self.give_back(&mut run, rest).await?;
                }
                Ok(RunEnd::Unclear(why)) => return self.failed(run, HandlerError::retryable(why)),
                Ok(RunEnd::Failed(_, error)) if self.is_to_blame(&mut blame, &run, error.may_be_its_own()).await => {
                    return self.failed(run, HandlerError::retryable(error));
                }
                Err(error) if self.is_to_blame(&mut blame, &run, error.may_be_its_own()).await => {
                    return self.failed(run, HandlerError::retryable(error));
                }
                Ok(RunEnd::Failed(..)) | Err(_) => {
                    let (at, may_be_its_own) = match &end {
                        Ok(RunEnd::Failed(at, error)) => (*at, error.may_be_its_own()),
                        Err(error) => (run.len() / 2, error.may_be_its_own()),
                        Ok(_) => (run.len() / 2, false),
                    };
                    let pause = fault.again(0..1, fastrand::f64()).pause;
                    let lasts = fault.times() > FAULTS_MAX && !(may_be_its_own && run.len() > 1);
                    if lasts || !sleep_unless(&self.stop, pause).await {
                        self.owes(Owed::GiveBack(run))?;
                        return end.map(|_| ());
                    }
                    // Whose it is, is found out with one alone.
                    if run.len() > 1 && (may_be_its_own || fault.times() > TIMES_BEFORE_HALVING) {
                        let rest = run.split_off(at.max(1));
                        self.give_back(&mut run, rest).await?;
                    }
                }
            }
        }
    }

    /// One try; none where a stop came first, or its grace is over.
    async fn attempt(&self, run: &[ClaimedMessage], alone: bool) -> Option<Result<RunEnd, StoreError>> {
        let (shared, consumer) = (&self.shared, self.consumer);
        let together = async {
            let _together = shared.solo.read().await;
            in_transaction(shared, consumer, run, &self.abandon).await
        };
        let by_itself = async {
            let Some(head) = run.first().filter(|head| shared.options.retry.allows(head.message.attempt)) else {
                return Some(Ok(RunEnd::Failed(0, HandlerError::retryable(KILLS))));
            };
            let _alone = tokio::select! {
                biased;
                () = self.stop.cancelled() => return None,
                alone = shared.solo.write() => alone,
            };
            Some(match shared.store.count_try(head).await {
                Ok(true) => in_transaction(shared, consumer, run, &self.abandon).await,
                Ok(false) => Ok(RunEnd::ClaimLost),
                Err(error) => Err(error),
            })
        };
        tokio::select! {
            biased;
            () = self.abandon.cancelled() => None,
            end = by_itself, if alone => end,
            end = together, if !alone => Some(end),
        }
    }

    /// Whether a failure that looks like the database's is that of the only message that ran.
    async fn is_to_blame(&self, blame: &mut Blame, run: &[ClaimedMessage], may_be_its_own: bool) -> bool {
        run.len() == 1 && blame.falls(&self.shared, self.consumer, may_be_its_own).await
    }

    /// The first of these failed on its own account: what follows is for the policy to say.
    fn failed(&mut self, run: Vec<ClaimedMessage>, error: HandlerError) -> Result<(), StoreError> {
        let Some(mut head) = run.into_iter().next() else { return Ok(()) };
        let options = &self.shared.options;
        if !options.retry.allows(head.message.attempt) {
            // Its tries were counted and never came to an end; this one was not made.
            head.message.attempt = head.tries;
            return self.owes(Owed::Bury(Box::new(head), Death::Attempts.reason(), HandlerError::retryable(KILLS)));
        }
        tracing::warn!(consumer = %options.name, id = %head.message.id, sent_id = %head.message.id_text, attempt = head.message.attempt, %error, "a handler failed");
        let owed = match settle::decide(&options.retry, &error, head.message.attempt) {
            Decision::Dead(death) => Owed::Bury(Box::new(head), death.reason(), error),
            Decision::InPlace(after) | Decision::Wait(after) => {
                observe::delivered(&options.name, Outcome::Retried, 1);
                Owed::Postpone(Box::new(head), after, error)
            }
        };
        self.owes(owed)
    }

    fn owes(&mut self, owed: Owed) -> Result<(), StoreError> {
        self.owed = Some(owed);
        Ok(())
    }

    /// Writes what is owed.
    async fn settle_up(&mut self) -> Result<(), StoreError> {
        let (shared, consumer) = (&self.shared, self.consumer);
        match &mut self.owed {
            None => {}
            Some(Owed::GiveBack(run)) => {
                shared.store.give_back(consumer, run).await?;
            }
            Some(Owed::Postpone(head, after, error)) => {
                shared.store.postpone(head, *after, error.message()).await?;
            }
            Some(Owed::Bury(head, reason, error)) => {
                let holds = shared.options.holds();
                if shared.store.bury(head, reason, error.message(), holds).await? {
                    tracing::error!(consumer = %shared.options.name, id = %head.message.id, sent_id = %head.message.id_text, topic = %head.message.topic, reason, holds, %error, "a message is dead");
                    observe::delivered(&shared.options.name, Outcome::Dead, 1);
                }
            }
            Some(Owed::StoreAsEnded(run)) => {
                while let Some(ended) = run.front() {
                    settle::store_ended(shared, consumer, &ended.message, ended.message.attempt).await?;
                    run.pop_front();
                }
            }
        }
        self.owed = None;
        if let Some(claim) = &self.in_doubt {
            shared.store.give_back_all(consumer, claim).await?;
            self.in_doubt = None;
        }
        Ok(())
    }

    /// Gives back those that this try leaves out; where that fails, all of them are owed.
    async fn give_back(&mut self, run: &mut Vec<ClaimedMessage>, rest: Vec<ClaimedMessage>) -> Result<(), StoreError> {
        let given_back = self.shared.store.give_back(self.consumer, &rest).await;
        if given_back.is_err() {
            run.extend(rest);
            self.owes(Owed::GiveBack(std::mem::take(run)))?;
        }
        given_back.map(|_| ())
    }

    /// Something may have come to stand behind them while they ran.
    async fn wake_next(&self, run: &[ClaimedMessage]) -> Result<(), StoreError> {
        let lane = run.first().and_then(|head| head.message.lane_id());
        match lane {
            Some(lane) => self.shared.store.wake(self.consumer, &[lane]).await,
            None => Ok(()),
        }
    }
}

async fn in_transaction<S: Store>(
    shared: &Arc<Shared<S>>,
    consumer: ConsumerId,
    run: &[ClaimedMessage],
    give_up: &CancellationToken,
) -> Result<RunEnd, StoreError> {
    let mut tx = shared.store.begin(consumer).await?;
    let mut enqueued = false;
    match body(shared, &mut tx, run, &mut enqueued).await {
        Ok(RunEnd::Done) => match tx.commit().await {
            Ok(()) => {
                if enqueued {
                    crate::store::hint();
                }
                Ok(RunEnd::Done)
            }
            // A deferred constraint speaks only now.
            Err(error @ StoreError::Other(_)) => Ok(whose(run, &format!("the commit was refused: {error}"))),
            Err(error) => Err(error),
        },
        Ok(RunEnd::ClaimLost) => {
            roll_back(tx).await;
            Ok(RunEnd::ClaimLost)
        }
        // A handler may have committed by itself, and the waiting rows with it.
        end => match (undo(shared, &mut tx, give_up).await?, end) {
            (Undone::Committed, _) => Ok(RunEnd::Ended),
            (Undone::Lost, Ok(RunEnd::Failed(at, error))) => {
                Ok(RunEnd::Failed(at, HandlerError::lost_connection(error)))
            }
            (Undone::Lost, Ok(RunEnd::Unclear(why))) => Ok(RunEnd::Failed(0, HandlerError::lost_connection(why))),
            (_, end) => end,
        },
    }
}

async fn body<S: Store>(
    shared: &Arc<Shared<S>>,
    tx: &mut S::Tx,
    run: &[ClaimedMessage],
    enqueued: &mut bool,
) -> Result<RunEnd, StoreError> {
    // Removed first: it is what the proof counts, and what fences a claim that was lost.
    if !tx.finish(run).await? {
        return Ok(RunEnd::ClaimLost);
    }
    let mut wanted = Vec::with_capacity(run.len());
    for (item, ClaimedMessage { message, .. }) in run.iter().enumerate() {
        let Some((handler, takes)) = shared.handlers.find(&message.kind) else {
            // Claimed by kind; a message that waits was accepted once, so it is never acknowledged as unhandled.
            return Err(StoreError::Corrupt(format!("claimed a message of the kind `{}`", message.kind)));
        };
        wanted.push(Wanted { item, handler, in_sets: matches!(takes, Handler::Batch(_)), lane: message.lane_id() });
    }
    for Call { handler, items } in calls::plan(wanted) {
        let messages: Vec<&Message> = items.iter().map(|item| &run[*item].message).collect();
        let Err(error) = call(shared, shared.handlers.get(handler), &messages, None, tx, enqueued).await else {
            continue;
        };
        return Ok(match items.as_slice() {
            [only] => RunEnd::Failed(*only, error),
            [first, ..] if error.is_nobodys() => RunEnd::Failed(*first, error),
            _ => RunEnd::Unclear(error.message().to_owned()),
        });
    }
    match tx.prove().await? {
        Proof::Same => {}
        Proof::Aborted => return Ok(whose(run, SWALLOWED)),
        Proof::Ended => return Ok(whose(run, "the handler ended the transaction it was given")),
    }
    let ids: Vec<MessageId> = run.iter().map(|one| one.message.id).collect();
    tx.clear_attempts(&ids).await?;
    Ok(RunEnd::Done)
}

/// A failure of the transaction as a whole: of its only message, else it is found out in halves.
fn whose(run: &[ClaimedMessage], why: &str) -> RunEnd {
    match run {
        [_] => RunEnd::Failed(0, HandlerError::retryable(why)),
        _ => RunEnd::Unclear(why.to_owned()),
    }
}
