//! The retriers: they run the due heads of waiting keys, one key at a time each (R25, R26).
//!
//! Promise: only the oldest waiting messages of a key run. They leave the table in the handler's
//! transaction, and only while the lease holds; the next message of the key becomes due with that.
//! While their handlers run they are dead in that transaction (`transaction-ended`), and they are
//! removed after the proof. So a handler that commits by itself leaves them dead, and they are not
//! lost, also where the process dies then. A head whose last lease expired may have killed its
//! process: it runs with no message beside it for its first second, and its try is counted before.
//! Its lease is renewed while it waits for that turn. A message that failed before runs alone in
//! its transaction, beside other messages, and its try is counted when it fails. Messages that were
//! never tried run in batches, so a key is drained as fast as it was filled. A failure that lasts
//! while the database works for others postpones its message again and again and counts nothing.
//!
//! Not here: when the next try is (`time::retry`), and the statements (`store::sql::waiting`).

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Shared;
use super::blame::{self, Blame, Fault};
use super::calls::{Failure, Wanted};
use super::failing::Failing;
use super::transaction::{NotCommitted, commit, handle, roll_back, undo, unless};
use super::verdict::{self, KILLS};
use crate::error::{HandlerError, StoreError};
use crate::inbox::port::waiting::{LeasedMessage, RowLease};
use crate::inbox::port::{ConsumerId, InboxTx};
use crate::inbox::rules::split::{TIMES_BEFORE_HALVING, TransientFault};
use crate::message::{Message, MessageId};
use crate::observe::{self, DeliveryOutcome, Trouble};
use crate::time::pace::{Pace, sleep_unless};
use crate::time::retry::{ATTEMPTS, Decision};

/// How much longer a lease lasts than a handler may run.
const LEASE_SPARE: Duration = Duration::from_secs(10);
/// The longest pause between two searches: messages of other processes become due without a signal.
const POLL: Duration = Duration::from_millis(500);
/// After more transient failures than this a head is released, so that other keys are tried.
const FAULTS_MAX: u32 = 5;
/// The pause between two searches for heads that a race left without a due time.
const SWEEP: Duration = Duration::from_secs(5);
/// A retrier that has waited this long for its turn to search is in no trouble: another one
/// searches.
const IN_PEACE: Duration = Duration::from_secs(1);

/// For how many messages the number of postponements in a row is kept. At the limit all numbers are
/// cleared.
const LASTING_MAX: usize = 10_000;

/// The state that the retriers of one consumer share.
#[derive(Debug)]
pub(super) struct Desk {
    /// The retrier that holds this lock searches for due messages; the others run what they found.
    /// So an idle consumer asks the database only as often as one retrier would. The value is the
    /// time of the last search for heads that a race left.
    look: Mutex<Instant>,
    /// How often in a row each message was postponed without a counted try, by its row.
    lasting: parking_lot::Mutex<HashMap<i64, u32>>,
}

impl Desk {
    pub(super) fn new() -> Self {
        Self { look: Mutex::new(Instant::now()), lasting: parking_lot::Mutex::default() }
    }

    /// Counts one more postponement of a message; returns how many in a row.
    fn lasts(&self, sequence: i64) -> u32 {
        let mut lasting = self.lasting.lock();
        if lasting.len() >= LASTING_MAX && !lasting.contains_key(&sequence) {
            lasting.clear();
        }
        let times = lasting.entry(sequence).or_default();
        *times = times.saturating_add(1);
        *times
    }

    fn is_over(&self, run: &[LeasedMessage]) {
        let mut lasting = self.lasting.lock();
        if !lasting.is_empty() {
            run.iter().for_each(|one| {
                lasting.remove(&one.sequence);
            });
        }
    }
}

/// One retrier, and what it still has to write. That is kept until it is written, so that an outage
/// of the database leaves no message leased without need, and no alarm unreported (G10).
struct Retrier {
    shared: Arc<Shared>,
    consumer: ConsumerId,
    stop: CancellationToken,
    /// The grace of a stop is nearly over: work that still runs is dropped.
    abandon: CancellationToken,
    /// A lease of which the answer was lost.
    in_doubt: Option<RowLease>,
    owed: Option<Owed>,
    desk: Arc<Desk>,
    failing: Failing,
}

/// What must be written after a run that is not done.
enum Owed {
    /// No try is counted: the messages become due again.
    GiveBack(Vec<LeasedMessage>),
    /// The message is due again after this time, with the number of tries in its `attempt`.
    Postpone(Box<LeasedMessage>, Duration, HandlerError),
    /// No further try: the message is stored as dead with this reason and this error.
    Bury(Box<LeasedMessage>, &'static str, HandlerError),
}

/// How a transaction ended. Except for `Done`, nothing of it was committed by the retrier.
enum RetryEnd {
    Done,
    /// A handler, or the transaction, failed.
    Failed(Failure),
    LeaseLost,
    /// All allowed tries were counted, and none came to an end; the handler did not run again.
    Exhausted,
    /// A handler committed the transaction by itself, and so its messages as dead.
    Ended,
}

/// The result of a search for due messages.
enum Due {
    Run(Vec<LeasedMessage>, Busy),
    NothingFor(Duration),
}

/// Counts a retrier as busy, from before it leases messages until it is dropped.
struct Busy(Arc<Shared>);

impl Busy {
    fn of(shared: &Arc<Shared>) -> Self {
        shared.retrying.fetch_add(1, Ordering::AcqRel);
        Self(Arc::clone(shared))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.retrying.fetch_sub(1, Ordering::AcqRel);
    }
}

pub(super) async fn run(
    shared: Arc<Shared>,
    consumer: ConsumerId,
    stop: CancellationToken,
    abandon: CancellationToken,
    desk: Arc<Desk>,
    number: usize,
) {
    let mut pace = Pace::new(Duration::from_millis(100), Duration::from_secs(5));
    let (stopped, in_doubt, owed) = (stop.clone(), None, None);
    let failing = Failing::new(&shared, "retries", format!("retrier {number}"));
    let mut retrier = Retrier { shared, consumer, stop: stopped, abandon, in_doubt, owed, desk, failing };
    while !stop.is_cancelled() {
        match retrier.step().await {
            Ok(()) => {
                pace.worked();
                retrier.failing.is_well();
            }
            Err(error) => {
                retrier.fails(&error);
                pace.wait(&stop).await;
            }
        }
    }
    if let Err(error) = retrier.settle_up().await {
        tracing::warn!(consumer = %retrier.shared.options.name, %error, "what follows a try was not written before the stop; its lease runs out, and the message then runs as suspect");
    }
}

impl Retrier {
    fn fails(&mut self, error: &StoreError) {
        tracing::debug!(consumer = %self.shared.options.name, %error, "the retrier waits for the database");
        self.failing.fails(Trouble::Stops(format!("messages that wait are not tried again: {error}")));
    }

    /// Waits for due messages and runs them.
    async fn step(&mut self) -> Result<(), StoreError> {
        self.settle_up().await?;
        let desk = Arc::clone(&self.desk);
        let mut swept = loop {
            tokio::select! {
                biased;
                () = self.stop.cancelled() => return Ok(()),
                swept = desk.look.lock() => break swept,
                // This retrier has no work, and another one searches.
                () = tokio::time::sleep(IN_PEACE) => self.failing.is_well(),
            }
        };
        let (run, _busy) = loop {
            match self.look(&mut swept).await? {
                Due::Run(run, busy) => break (run, busy),
                Due::NothingFor(time) => {
                    self.failing.is_well();
                    tokio::select! {
                        biased;
                        () = self.stop.cancelled() => return Ok(()),
                        () = self.shared.parked.notified() => {}
                        () = tokio::time::sleep(time) => {}
                    }
                }
            }
        };
        drop(swept);
        self.run(run).await?;
        self.settle_up().await?;
        // The messages behind them are due now.
        self.shared.parked.notify_one();
        Ok(())
    }

    /// Leases the head that is due first, and those behind it that were never tried if it was not
    /// tried either.
    async fn look(&mut self, swept: &mut Instant) -> Result<Due, StoreError> {
        let (shared, consumer) = (Arc::clone(&self.shared), self.consumer);
        if swept.elapsed() >= SWEEP {
            shared.store.sweep(consumer).await?;
            *swept = Instant::now();
        }
        // A cheap read first: a lease is a write, and most of the time nothing is due.
        match shared.store.next_due(consumer, &shared.scope).await? {
            Some(due) if due.is_zero() => {}
            Some(due) => return Ok(Due::NothingFor(due.clamp(Duration::from_millis(1), POLL))),
            None => return Ok(Due::NothingFor(POLL)),
        }
        let busy = Busy::of(&shared);
        let lease = new_lease(&shared);
        self.in_doubt = Some(lease);
        let Some(head) = shared.store.lease_due(consumer, &shared.scope, &lease).await? else {
            self.in_doubt = None;
            // Another process has leased what is due.
            return Ok(Due::NothingFor(Duration::from_millis(50)));
        };
        let mut run = vec![head];
        if let Some(head) = run.first().filter(|head| !head.suspect && head.tries == 0) {
            let limit = shared.options.batch_max.saturating_sub(1);
            let behind = shared.store.lease_behind(consumer, head, &shared.scope, limit, &lease).await?;
            run.extend(behind);
        }
        self.in_doubt = None;
        Ok(Due::Run(run, busy))
    }

    /// Runs leased messages of one key, and keeps what must be written for those that are not
    /// done.
    async fn run(&mut self, mut run: Vec<LeasedMessage>) -> Result<(), StoreError> {
        let (mut fault, mut blame) = (TransientFault::default(), Blame::default());
        let mut suspect = run.first().is_some_and(|head| head.suspect);
        loop {
            let Some(end) = self.attempt(&run, suspect).await else { return self.owes(Owed::GiveBack(run)) };
            // If its handler came to an end, the process survived it.
            suspect &= end.is_err();
            let (at, may_be_its_own, error) = match end {
                Ok(RetryEnd::Done) => {
                    self.desk.is_over(&run);
                    observe::delivered(&self.shared.options.name, DeliveryOutcome::Processed, run.len() as u64);
                    return self.wake_next(&run).await;
                }
                Ok(RetryEnd::LeaseLost) => return self.owes(Owed::GiveBack(run)),
                Ok(RetryEnd::Ended) => {
                    self.desk.is_over(&run);
                    let (name, holds) = (&self.shared.options.name, self.shared.options.holds());
                    run.iter().for_each(|one| verdict::ended(name, &one.message, holds, one.message.attempt));
                    return self.wake_next(&run).await;
                }
                Ok(RetryEnd::Exhausted) => return self.exhausted(run.swap_remove(0)),
                Ok(RetryEnd::Failed(Failure::Of(at, error))) if !error.is_transient() || error.is_late() => {
                    self.give_back(&mut run, at.max(1)).await?;
                    match at {
                        0 if error.is_transient() => return self.lasts(run.swap_remove(0), &error.message),
                        0 => return self.failed(run.swap_remove(0), error),
                        _ => continue,
                    }
                }
                // These come of several messages only: what fails with one message is its own.
                Ok(RetryEnd::Failed(Failure::InSet(at, why))) => {
                    tracing::warn!(consumer = %self.shared.options.name, id = %run[at].message.id, messages = run.len(), %why, "waiting messages failed at this one; it runs alone");
                    self.give_back(&mut run, at.max(1)).await?;
                    continue;
                }
                Ok(RetryEnd::Failed(Failure::Unclear(_) | Failure::Locked(_))) => {
                    let half = run.len() / 2;
                    self.give_back(&mut run, half).await?;
                    continue;
                }
                Ok(RetryEnd::Failed(Failure::Of(at, error))) => (at, error.may_be_its_own(), Ok(error)),
                Err(error) => (run.len() / 2, error.may_be_its_own(), Err(error)),
            };
            let said = error.as_ref().map_or_else(ToString::to_string, ToString::to_string);
            let is_one = run.len() == 1;
            let found =
                if is_one { blame.of(&self.shared, self.consumer, may_be_its_own).await } else { Fault::Transient };
            match found {
                Fault::Its => return self.failed(run.swap_remove(0), HandlerError::retryable(said)),
                Fault::Lasting => return self.lasts(run.swap_remove(0), &said),
                Fault::Transient => {}
            }
            let pause = fault.pause(fastrand::f64());
            let is_open = if is_one { blame.is_open() } else { may_be_its_own };
            if (fault.times() > FAULTS_MAX && !is_open) || !sleep_unless(&self.stop, pause).await {
                self.owes(Owed::GiveBack(run))?;
                return error.map(|_| ());
            }
            // One message alone shows to whom the failure belongs.
            if !is_one && (may_be_its_own || fault.times() >= TIMES_BEFORE_HALVING) {
                self.give_back(&mut run, at.max(1)).await?;
            }
        }
    }

    /// Makes one try. `None`: a stop came first, or its grace is over; nothing of the try stays.
    async fn attempt(&self, run: &[LeasedMessage], suspect: bool) -> Option<Result<RetryEnd, StoreError>> {
        let (shared, consumer, abandon) = (&self.shared, self.consumer, &self.abandon);
        if !suspect {
            let _beside_others = unless(abandon, shared.solo.together()).await?;
            return in_transaction(shared, consumer, run, abandon).await.transpose();
        }
        let Some(head) = run.first().filter(|head| shared.options.retry.allows(head.message.attempt)) else {
            return Some(Ok(RetryEnd::Exhausted));
        };
        let alone = tokio::select! {
            biased;
            () = self.stop.cancelled() => return None,
            alone = shared.solo.alone() => alone,
            () = keep_leased(shared, head) => return Some(Ok(RetryEnd::LeaseLost)),
        };
        match unless(abandon, shared.store.count_try(head)).await? {
            Ok(true) => alone.run(in_transaction(shared, consumer, run, abandon)).await.transpose(),
            Ok(false) => Some(Ok(RetryEnd::LeaseLost)),
            Err(error) => Some(Err(error)),
        }
    }

    /// The message failed by itself: the retry policy decides what follows.
    fn failed(&mut self, head: LeasedMessage, error: HandlerError) -> Result<(), StoreError> {
        self.desk.is_over(std::slice::from_ref(&head));
        let options = &self.shared.options;
        verdict::failed(&options.name, &head.message, head.message.attempt, &error);
        let owed = match verdict::decide(&options.retry, &error, head.message.attempt) {
            Decision::Dead(reason) => Owed::Bury(Box::new(head), reason, error),
            Decision::InPlace(after) | Decision::Wait(after) => {
                observe::delivered(&options.name, DeliveryOutcome::Retried, 1);
                Owed::Postpone(Box::new(head), after, error)
            }
        };
        self.owes(owed)
    }

    /// Its tries were counted and none came to an end; the handler did not run again.
    fn exhausted(&mut self, mut head: LeasedMessage) -> Result<(), StoreError> {
        head.message.attempt = head.tries;
        self.owes(Owed::Bury(Box::new(head), ATTEMPTS, HandlerError::retryable(KILLS)))
    }

    /// The code of the failure is transient, but it lasts while the database works for others: the
    /// message waits longer each time with its reason visible, and no try is counted.
    fn lasts(&mut self, mut head: LeasedMessage, said: &str) -> Result<(), StoreError> {
        let options = &self.shared.options;
        let after = options.retry.wait(self.desk.lasts(head.sequence), fastrand::f64());
        let error = HandlerError::transient(blame::lasting(&said));
        tracing::warn!(consumer = %options.name, id = %head.message.id, sent_id = %head.message.id_text, ?after, %error, "a message waits on");
        observe::delivered(&options.name, DeliveryOutcome::Retried, 1);
        head.message.attempt = head.tries;
        self.owes(Owed::Postpone(Box::new(head), after, error))
    }

    fn owes(&mut self, owed: Owed) -> Result<(), StoreError> {
        self.owed = Some(owed);
        Ok(())
    }

    async fn settle_up(&mut self) -> Result<(), StoreError> {
        let (shared, consumer) = (&self.shared, self.consumer);
        match &self.owed {
            None => {}
            Some(Owed::GiveBack(run)) => {
                shared.store.give_back(consumer, run).await?;
            }
            Some(Owed::Postpone(head, after, error)) => {
                shared.store.postpone(head, *after, &error.message).await?;
            }
            Some(Owed::Bury(head, reason, error)) => {
                let holds = shared.options.holds();
                let buried = shared.store.bury(head, reason, &error.message, holds).await;
                // Also where nobody knows whether it is stored: the next try would find it done,
                // and say nothing.
                if matches!(buried, Ok(true) | Err(StoreError::CommitUnknown(_))) {
                    let (name, message) = (&shared.options.name, &head.message);
                    verdict::is_dead(name, message, reason, holds, message.attempt, &error.message);
                    observe::delivered(name, DeliveryOutcome::Dead, 1);
                }
                buried?;
            }
        }
        self.owed = None;
        if let Some(lease) = &self.in_doubt {
            shared.store.give_back_all(consumer, lease).await?;
            self.in_doubt = None;
        }
        Ok(())
    }

    /// Releases the messages from this index on, which the next try leaves out. If that fails, the
    /// release of all is kept for later.
    async fn give_back(&mut self, run: &mut Vec<LeasedMessage>, from: usize) -> Result<(), StoreError> {
        let rest = run.split_off(from);
        let given_back = self.shared.store.give_back(self.consumer, &rest).await;
        if given_back.is_err() {
            run.extend(rest);
            self.owes(Owed::GiveBack(std::mem::take(run)))?;
        }
        given_back.map(|_| ())
    }

    /// Wakes the key: other messages may have been stored behind these while they ran.
    async fn wake_next(&self, run: &[LeasedMessage]) -> Result<(), StoreError> {
        let lane = run.first().and_then(|head| head.message.lane_id());
        match lane {
            Some(lane) => self.shared.store.wake(self.consumer, &[lane]).await,
            None => Ok(()),
        }
    }
}

fn new_lease(shared: &Shared) -> RowLease {
    RowLease::new(shared.options.handler_timeout + LEASE_SPARE)
}

/// Renews the lease of a message that waits for its turn, and returns when it is lost. Otherwise
/// another retrier would lease the message, also one of this process, and would wait as well.
async fn keep_leased(shared: &Shared, head: &LeasedMessage) {
    let RowLease { length, .. } = new_lease(shared);
    loop {
        tokio::time::sleep(length / 2).await;
        // Where the database is away, the count of the try tells whether the lease is still ours.
        if let Ok(false) = shared.store.renew(head, length).await {
            return;
        }
    }
}

/// Runs the messages in one transaction, and returns only when its end is known; `None` where the
/// grace of a stop ended first and nothing of the transaction stays.
async fn in_transaction(
    shared: &Arc<Shared>,
    consumer: ConsumerId,
    run: &[LeasedMessage],
    give_up: &CancellationToken,
) -> Result<Option<RetryEnd>, StoreError> {
    let Some(tx) = unless(give_up, shared.store.begin(consumer)).await else { return Ok(None) };
    let mut tx = tx?;
    let mut enqueued = false;
    let why = match unless(give_up, body(shared, tx.as_mut(), run, &mut enqueued)).await {
        Some(Ok(RetryEnd::Done)) => {
            let handled: Vec<usize> = (0..run.len()).collect();
            let failure = commit(tx, &handled, enqueued).await?;
            return Ok(Some(failure.map_or(RetryEnd::Done, RetryEnd::Failed)));
        }
        Some(Ok(RetryEnd::Failed(failure))) => Ok(Some(failure)),
        // The lease is lost, and no handler ran.
        Some(Ok(end)) => {
            roll_back(tx).await;
            return Ok(Some(end));
        }
        Some(Err(error)) => Err(error),
        None => Ok(None),
    };
    // A handler may have committed by itself, and so its messages as dead.
    Ok(match undo(shared, tx.as_mut(), why, 0, give_up).await? {
        NotCommitted::Failed(failure) => Some(RetryEnd::Failed(failure)),
        NotCommitted::Ended => Some(RetryEnd::Ended),
        NotCommitted::Abandoned => None,
    })
}

async fn body(
    shared: &Arc<Shared>,
    tx: &mut dyn InboxTx,
    run: &[LeasedMessage],
    enqueued: &mut bool,
) -> Result<RetryEnd, StoreError> {
    // Before the handler: no handler runs without the lease, and one that commits by itself commits
    // its messages as dead.
    if !tx.bury(run, verdict::ENDED, verdict::WHY_ENDED, shared.options.holds()).await? {
        return Ok(RetryEnd::LeaseLost);
    }
    let mut wanted = Vec::with_capacity(run.len());
    for (item, LeasedMessage { message, .. }) in run.iter().enumerate() {
        let Some((handler, takes)) = shared.handlers.find(&message.kind) else {
            // Messages are leased by kind. A waiting message was accepted once, so it is never
            // acknowledged as unhandled.
            return Err(StoreError::Corrupt(format!("leased a message of the kind `{}`", message.kind)));
        };
        wanted.push(Wanted { item, handler, in_sets: takes.takes_sets(), lane: message.lane_id() });
    }
    let messages: Vec<&Message> = run.iter().map(|one| &one.message).collect();
    if let Some(failure) = handle(shared, tx, wanted, &messages, None, enqueued).await? {
        return Ok(RetryEnd::Failed(failure));
    }
    if !tx.finish().await? {
        let all: Vec<usize> = (0..run.len()).collect();
        return Ok(RetryEnd::Failed(Failure::of_all(&all, "a handler changed the rows of messages that wait")));
    }
    if let Some(lane) = run.first().and_then(|head| head.message.lane_id()) {
        tx.wake(&[lane]).await?;
    }
    let ids: Vec<MessageId> = run.iter().map(|one| one.message.id).collect();
    tx.clear_attempts(&ids).await?;
    Ok(RetryEnd::Done)
}

#[cfg(all(test, feature = "sqlite", feature = "embedded"))]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::pin::pin;

    use async_trait::async_trait;

    use super::*;
    use crate::inbox::consumer::Handlers;
    use crate::inbox::consumer::fixture::{options, parts, two};
    use crate::inbox::handler::{HandlerTx, MessageHandler};
    use crate::inbox::port::waiting::Waiting;
    use crate::inbox::port::{Inbox, InboxEntry, ParkAs, Parked};
    use crate::store::sqlite::SqliteStore;

    struct Done;

    #[async_trait]
    impl MessageHandler<SqliteStore> for Done {
        async fn handle(&self, _: &Message, _: &mut HandlerTx<'_, SqliteStore>) -> Result<(), HandlerError> {
            Ok(())
        }
    }

    /// Shown to fail: without the renewal its time only ran down, and the next retrier leased it.
    #[tokio::test]
    async fn r26_a_suspect_that_waits_for_its_turn_stays_leased() {
        let mut options = options();
        options.handler_timeout = Duration::from_millis(500);
        let parts = parts(options, Handlers::all(Done)).await;
        let (consumer, shared, store) = (parts.register().await, &parts.shared, &parts.store);
        let [item, _] = two(shared);
        let mut tx = store.begin(consumer).await.unwrap();
        tx.admit(&[InboxEntry { id: item.message.id, hash: item.hash }]).await.unwrap();
        let (message, park_as) = (item.message, ParkAs::Due(Duration::ZERO));
        tx.park(&[Parked { message, park_as, attempts: 0, error: None }]).await.unwrap();
        tx.commit().await.unwrap();
        let lease = new_lease(shared);
        let run = [store.lease_due(consumer, &shared.scope, &lease).await.unwrap().unwrap()];
        let (stop, abandon) = (CancellationToken::new(), CancellationToken::new());
        let (shared, desk) = (Arc::clone(shared), Arc::new(Desk::new()));
        let failing = Failing::new(&shared, "retries", String::new());
        let retrier = Retrier { shared, consumer, stop, abandon, in_doubt: None, owed: None, desk, failing };
        let ends_in = async || store.next_due(consumer, &parts.shared.scope).await.unwrap().unwrap();
        let renewed = async {
            let mut before = ends_in().await;
            loop {
                tokio::time::sleep(Duration::from_millis(10)).await;
                let now = ends_in().await;
                if now > before {
                    break;
                }
                before = now;
            }
        };
        let others = parts.shared.solo.together().await;
        let mut attempt = pin!(retrier.attempt(&run, true));
        tokio::select! {
            _ = &mut attempt => panic!("it does not wait for its turn"),
            renewed = tokio::time::timeout(Duration::from_secs(60), renewed) => renewed.unwrap(),
        }
        drop(others);
        assert!(matches!(attempt.await, Some(Ok(RetryEnd::Done))));
    }
}
