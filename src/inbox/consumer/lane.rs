//! A lane runs the messages of its keys in order, in batches of the messages that are there. It
//! adds no delay when idle.
//!
//! A message that fails is separated: the messages before it run again, then the failed one runs
//! alone under the retry policy, then the rest, so a lane never reorders a key.
//! [`crate::inbox::rules::split`] decides the parts; [`crate::inbox::rules::suspicion`] decides
//! which messages are suspect.

mod alone;
mod settle;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing::field::display;

use super::Shared;
use super::aside::Aside;
use super::batch::{self, BatchEnd};
use super::blame::Blame;
use super::calls::Failure;
use super::item::{Done, End, Item};
use crate::error::{HandlerError, StoreError};
use crate::inbox::port::ConsumerId;
use crate::inbox::rules::split::{self, Part, TransientFault};
use crate::inbox::rules::suspicion::Run;
use crate::message::MessageId;
use crate::observe::{self, DeliveryOutcome, Trouble};
use crate::time::pace::sleep_unless;
use alone::Why;

/// The name of the trouble of a lane that waits for the database.
pub(super) const DATABASE: &str = "database";

struct Lane {
    number: usize,
    shared: Arc<Shared>,
    consumer: ConsumerId,
    done: mpsc::UnboundedSender<Done>,
    stop: CancellationToken,
    /// The grace of a stop is over: work that still runs is dropped.
    abandon: CancellationToken,
    /// Counts transient failures in a row, whatever the lane was doing.
    fault: TransientFault,
    aside: Aside,
    /// How often the batch that was taken last, or a part of it, waited for a lock in vain.
    lock_waits: u32,
}

/// A piece of work on the stack of a lane: the last one added is done first.
enum Work {
    Batch(Vec<Item>, Tries),
    /// The flag says whether its try in a batch was counted before.
    Alone(Box<Item>, Why, bool),
}

/// The state of the tries of a batch.
#[derive(Debug, Clone)]
enum Tries {
    /// It was not checked yet whether a message is suspect.
    Unjudged,
    /// No message is suspect: no try is counted before the batch runs.
    Free,
    /// The tries of these messages must be counted before the batch runs. Where the answer was
    /// lost, they may be counted already.
    Due { ids: Vec<MessageId>, may_be_counted: bool },
    /// The first try of each message is counted.
    Counted,
}

impl Tries {
    /// Whether this process has counted tries, or may have.
    fn may_be_counted(&self) -> bool {
        matches!(self, Self::Due { may_be_counted: true, .. } | Self::Counted)
    }
}

/// After more waits for a lock than this, a lane stops its search for the message that waits, and
/// stores the messages. Halving finds one message among a hundred, the usual size of a batch, in so
/// many steps.
const LOCK_WAITS_MAX: u32 = 7;

/// How long a stop waits to take tries back. If the database is away, they stay counted until this
/// process subscribes again.
const TAKE_BACK: Duration = Duration::from_secs(3);

/// Runs until its channel is closed.
pub(super) async fn run(
    shared: Arc<Shared>,
    consumer: ConsumerId,
    number: usize,
    mut items: mpsc::UnboundedReceiver<Item>,
    done: mpsc::UnboundedSender<Done>,
    stop: CancellationToken,
    abandon: CancellationToken,
) {
    let batch_max = shared.options.batch_max.max(1);
    let (fault, aside) = (TransientFault::default(), Aside::default());
    let mut lane = Lane { number, shared, consumer, done, stop, abandon, fault, aside, lock_waits: 0 };
    loop {
        let first = tokio::select! {
            biased;
            () = lane.aside.is_due() => {
                lane.look_aside().await;
                continue;
            }
            first = items.recv() => first,
        };
        let Some(first) = first else { break };
        let mut batch = vec![first];
        while batch.len() < batch_max {
            let Ok(next) = items.try_recv() else { break };
            batch.push(next);
        }
        lane.work(batch).await;
    }
    for item in lane.aside.take() {
        lane.report(&item, End::Left);
    }
}

impl Lane {
    async fn work(&mut self, items: Vec<Item>) {
        self.lock_waits = 0;
        let mut stack = vec![Work::Batch(items, Tries::Unjudged)];
        while let Some(work) = stack.pop() {
            match work {
                Work::Batch(items, tries) => {
                    let items = self.leave_revoked(items, &tries).await;
                    let items = self.leave_aside(items, &tries).await;
                    if !items.is_empty() {
                        self.batch(items, tries, &mut stack).await;
                    }
                }
                Work::Alone(item, _, counted) if self.is_left(&item) => self.leave(&[*item], counted).await,
                Work::Alone(item, _, counted) if self.aside.is_before(&item) => {
                    self.set_aside(vec![*item], counted).await;
                }
                Work::Alone(item, why, counted) => alone::run(self, *item, why, counted).await,
            }
        }
        // Everything is done or left for later, so the lane waits for nothing.
        self.waits_no_more();
    }

    async fn batch(&mut self, mut items: Vec<Item>, mut tries: Tries, stack: &mut Vec<Work>) {
        if matches!(tries, Tries::Unjudged) {
            match self.judge(&mut items).await {
                Ok((of_first, None)) => tries = of_first,
                Ok((of_first, Some(alone))) => {
                    stack.push(Work::Batch(items.split_off(alone + 1), Tries::Unjudged));
                    stack.extend(items.pop().map(|item| Work::Alone(Box::new(item), Why::Suspect, false)));
                    return stack.push(Work::Batch(items, of_first));
                }
                Err(error) => {
                    self.wait_out(&error).await;
                    return stack.push(Work::Batch(items, tries));
                }
            }
        }
        if let Tries::Due { ids, may_be_counted } = &mut tries {
            // Some messages may have left the batch since.
            ids.retain(|id| items.iter().any(|item| item.message.id == *id));
            let (store, consumer) = (&self.shared.store, self.consumer);
            let counted = match store.is_contested(consumer, ids).await {
                // Another process, perhaps frozen, works on one of them: do not wait for it.
                Ok(true) => return self.part_contested(items, &tries, stack).await,
                Ok(false) => {
                    *may_be_counted = true;
                    self.shared.unspent.add(ids, 0);
                    store.begin_first_attempts(consumer, ids).await
                }
                Err(error) => Err(error),
            };
            if let Err(error) = counted {
                self.wait_out(&error).await;
                return stack.push(Work::Batch(items, tries));
            }
            tries = Tries::Counted;
        }
        let aside: Vec<_> = items.iter().filter(|item| item.is_aside).map(|item| item.message.id).collect();
        if matches!(tries, Tries::Free) && !aside.is_empty() {
            match self.shared.store.is_contested(self.consumer, &aside).await {
                Ok(true) => return self.part_contested(items, &tries, stack).await,
                Ok(false) => {}
                Err(error) => {
                    self.wait_out(&error).await;
                    return stack.push(Work::Batch(items, tries));
                }
            }
        }
        let counted = matches!(tries, Tries::Counted);
        let whole = 0..items.len();
        let end = {
            let _together = self.shared.solo.together().await;
            self.transaction(&items, counted.then_some(1)).await
        };
        let Some(end) = end else { return self.leave(&items, counted).await };
        let waited = matches!(&end, Ok(BatchEnd::Failed(Failure::Of(_, error) | Failure::Locked(error)))
            if error.is_transient() && error.is_late());
        self.lock_waits += u32::from(waited);
        match end {
            Ok(BatchEnd::Done(outcomes)) => {
                self.went_well();
                self.wake_parked(&items, &outcomes).await;
                items.iter().for_each(|item| self.report(item, End::Committed));
                let mut counts: HashMap<DeliveryOutcome, u64> = HashMap::new();
                outcomes.into_iter().for_each(|outcome| *counts.entry(outcome).or_default() += 1);
                for (outcome, count) in counts {
                    observe::delivered(&self.shared.options.name, outcome, count);
                }
            }
            Ok(BatchEnd::Failed(Failure::Of(index, error))) if error.is_transient() && !error.is_late() => {
                self.again(items, tries, &error.message, Some(index), stack).await;
            }
            Ok(BatchEnd::Failed(Failure::Of(_, error) | Failure::Locked(error)))
                if waited && self.lock_waits > LOCK_WAITS_MAX =>
            {
                self.all_wait(items, &error, tries, stack);
            }
            Ok(BatchEnd::Failed(Failure::Of(index, error))) => {
                stack_up(items, split::around(whole, index), &tries, Some(error), stack);
            }
            Ok(BatchEnd::Failed(Failure::InSet(index, why))) => {
                tracing::warn!(consumer = %self.shared.options.name, id = %items[index].message.id, messages = items.len(), %why, "a batch failed at this message; it runs alone");
                stack_up(items, split::around(whole, index), &tries, None, stack);
            }
            Ok(BatchEnd::Failed(Failure::Locked(error))) => {
                let why = &error.message;
                tracing::warn!(consumer = %self.shared.options.name, messages = items.len(), %why, "a batch waited for a lock; its halves run");
                stack_up(items, split::without_blame(whole), &tries, None, stack);
            }
            Ok(BatchEnd::Failed(Failure::Unclear(why))) => {
                tracing::warn!(consumer = %self.shared.options.name, messages = items.len(), %why, "a batch failed as a whole; its halves run");
                stack_up(items, split::without_blame(whole), &tries, None, stack);
            }
            Ok(BatchEnd::Ended(committed)) => {
                // In order: the message that is stored first becomes the head of its key (R25).
                let mut rest = Vec::new();
                for (index, item) in items.into_iter().enumerate() {
                    if committed.contains(&index) {
                        settle::transaction_ended(self, item).await;
                    } else {
                        rest.push(item);
                    }
                }
                stack.push(Work::Batch(rest, tries));
            }
            // One message alone shows to whom the failure belongs.
            Err(error) if items.len() > 1 && error.may_be_its_own() => {
                self.wait_out(&error).await;
                stack_up(items, split::without_blame(whole), &tries, None, stack);
            }
            Err(error) => self.again(items, tries, &error.to_string(), None, stack).await,
        }
    }

    /// Wakes keys of messages that were stored behind their head: a retrier may have removed the
    /// head meanwhile.
    async fn wake_parked(&self, items: &[Item], outcomes: &[DeliveryOutcome]) {
        let parked = items.iter().zip(outcomes).filter(|(_, outcome)| **outcome == DeliveryOutcome::Retried);
        let lanes: HashSet<[u8; 16]> = parked.filter_map(|(item, _)| item.lane_id).collect();
        if lanes.is_empty() {
            return;
        }
        let lanes: Vec<_> = lanes.into_iter().collect();
        if let Err(error) = self.shared.store.wake(self.consumer, &lanes).await {
            tracing::debug!(consumer = %self.shared.options.name, %error, "keys were not looked at again; a sweep does it");
        }
        self.shared.parked.notify_one();
    }

    /// Runs the items in one transaction. `None`: the grace of a stop ended first, and nothing of
    /// the transaction stays.
    async fn transaction(&self, items: &[Item], attempt: Option<u32>) -> Option<Result<BatchEnd, StoreError>> {
        batch::run(&self.shared, self.consumer, items, attempt, &self.abandon).await.transpose()
    }

    /// After a transient failure, reported by the handler of message `of` if that is set, runs the
    /// same batch or its parts again (R27). A failure that lasts is judged when its message runs
    /// alone.
    async fn again(&mut self, items: Vec<Item>, tries: Tries, why: &str, of: Option<usize>, stack: &mut Vec<Work>) {
        let again = self.fault.again(0..items.len(), of, fastrand::f64());
        self.say_waiting(why);
        sleep_unless(&self.stop, again.pause).await;
        stack_up(items, again.parts, &tries, None, stack);
    }

    /// More than one message waits for a lock, perhaps each of them for the same one. The lane
    /// would stand as long as all their waits take together. So what a handler takes is stored as
    /// waiting, untried: the retriers find out which of them can run.
    fn all_wait(&self, items: Vec<Item>, error: &HandlerError, tries: Tries, stack: &mut Vec<Work>) {
        let counted = matches!(tries, Tries::Counted);
        let is_handled = |item: &Item| batch::handler_of(&self.shared, item).is_some();
        let (waiting, others): (Vec<_>, Vec<_>) = items.into_iter().partition(is_handled);
        tracing::warn!(consumer = %self.shared.options.name, messages = waiting.len(), %error, "too many messages wait for a lock; they are stored");
        stack.push(Work::Batch(others, tries));
        for item in waiting.into_iter().rev() {
            let why = Why::WaitedForALock(HandlerError::transient(error));
            stack.push(Work::Alone(Box::new(item), why, counted));
        }
    }

    /// Decides how the items run (R26). Returns the tries of the items before the first one that
    /// must run alone, and the index of that one. Only messages that the inbox does not know can be
    /// suspect; items behind the one that runs alone are not judged yet.
    async fn judge(&self, items: &mut [Item]) -> Result<(Tries, Option<usize>), StoreError> {
        if !items.iter().any(Item::is_suspicious) {
            return Ok((Tries::Free, None));
        }
        let (store, consumer) = (&self.shared.store, self.consumer);
        let ids: Vec<_> = items.iter().map(|item| item.message.id).collect();
        let known = store.known(consumer, &ids).await?;
        let tried: HashSet<_> = store.attempts(consumer, &ids).await?.into_iter().map(|(id, _)| id).collect();
        let spares_none = !self.shared.options.retry.allows(2);
        let (mut due, mut suspects) = (Vec::new(), false);
        for (index, item) in items.iter_mut().enumerate() {
            let id = item.message.id;
            let is_known = known.contains(&id);
            match item.judge(is_known, spares_none || tried.contains(&id)) {
                Run::Alone => return Ok((to_count(due, suspects), Some(index))),
                // Its try was counted before, so counting must go on from there.
                Run::InBatch if !is_known && tried.contains(&id) => return Ok((to_count(due, suspects), Some(index))),
                run => suspects |= run == Run::Counted,
            }
            // All of the batch: if one kills the process, it cannot be told from the others.
            due.extend((!is_known).then_some(id));
        }
        Ok((to_count(due, suspects), None))
    }

    /// Checks one message that is set aside. If it is free, all of them run, and those that are not
    /// free are set aside again.
    async fn look_aside(&mut self) {
        let items = self.aside.take();
        for item in self.leave_revoked(items, &Tries::Unjudged).await {
            self.aside.put(item);
        }
        let Some(id) = self.aside.look().map(|item| item.message.id) else { return self.waits_no_more() };
        match self.shared.store.is_contested(self.consumer, &[id]).await {
            Ok(true) => self.went_well(),
            Ok(false) => {
                let mut items = self.aside.take().into_iter().peekable();
                while items.peek().is_some() {
                    let batch = items.by_ref().take(self.shared.options.batch_max.max(1)).collect();
                    self.work(batch).await;
                }
            }
            Err(away) => self.wait_out(&away).await,
        }
        self.aside.rest();
    }

    /// Sets aside the messages that follow one of their key that is set aside.
    async fn leave_aside(&mut self, items: Vec<Item>, tries: &Tries) -> Vec<Item> {
        let (behind, free): (Vec<_>, Vec<_>) = items.into_iter().partition(|item| self.aside.is_before(item));
        self.set_aside(behind, tries.may_be_counted()).await;
        free
    }

    /// Another process's open transaction may hold inbox rows of these items: splits them in halves
    /// until only the items that it holds are set aside.
    async fn part_contested(&mut self, mut items: Vec<Item>, tries: &Tries, stack: &mut Vec<Work>) {
        match items.pop() {
            Some(only) if items.is_empty() => self.set_aside(vec![only], tries.may_be_counted()).await,
            last => {
                items.extend(last);
                let second = items.split_off(items.len() / 2);
                for half in [second, items] {
                    // The first half runs first. If a message of it is set aside, those of its key
                    // leave the second half.
                    stack.push(Work::Batch(half, tries.clone()));
                }
            }
        }
    }

    /// Whether the item must not be started: its partition is revoked, or a stop came, after which
    /// an older message of the key may be left between two of its tries.
    fn is_left(&self, item: &Item) -> bool {
        item.source.is_revoked() || self.stop.is_cancelled()
    }

    async fn leave_revoked(&self, items: Vec<Item>, tries: &Tries) -> Vec<Item> {
        let (left, kept): (Vec<_>, Vec<_>) = items.into_iter().partition(|item| self.is_left(item));
        self.leave(&left, tries.may_be_counted()).await;
        kept
    }

    /// Leaves items for later. Where their try was `counted`, it is taken back, because it was not
    /// made.
    async fn leave(&self, items: &[Item], counted: bool) {
        if counted {
            self.uncount(items).await;
        }
        items.iter().for_each(|item| self.report(item, End::Left));
    }

    /// Takes back one try of each item. Another process may have the items by now: what it counted
    /// stays. Where the database is away, that is done before the consumer subscribes again.
    async fn uncount(&self, items: &[Item]) {
        if items.is_empty() || self.shared.silence.is_on() {
            return;
        }
        let ids: Vec<MessageId> = items.iter().map(|item| item.message.id).collect();
        let taken_back = self.shared.store.take_back_attempts(self.consumer, &ids);
        let why = match tokio::time::timeout(TAKE_BACK, taken_back).await {
            Ok(Ok(())) => return self.shared.unspent.remove(&ids),
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("the database did not answer within {TAKE_BACK:?}"),
        };
        let first = items.first().map(|item| &item.message);
        let (id, sent_id) = (first.map(|first| display(first.id)), first.map(|first| display(&first.id_text)));
        tracing::warn!(consumer = %self.shared.options.name, messages = ids.len(), id, sent_id, %why, "tries that were not made are still counted; they are taken back when this process subscribes again");
    }

    fn report(&self, item: &Item, end: End) {
        let (source, sequence, was_aside) = (item.source.id.clone(), item.sequence, item.is_aside);
        if end == End::Committed {
            self.shared.unspent.remove(&[item.message.id]);
        }
        // The intake is gone only if the subscriber is gone: then the message comes again.
        let _ = self.done.send(Done { source, sequence, end, was_aside });
    }

    /// Sets aside messages that another process's transaction holds, or that follow such a message.
    /// Where their try was `counted`, it is taken back.
    async fn set_aside(&mut self, items: Vec<Item>, counted: bool) {
        if counted {
            self.uncount(&items).await;
        }
        for mut item in items {
            if !item.is_aside {
                self.report(&item, End::Aside);
                item.is_aside = true;
            }
            self.aside.put(item);
        }
    }

    fn went_well(&mut self) {
        if self.fault.times() > 0 {
            self.fault.reset();
            self.waits_no_more();
        }
    }

    fn waits_no_more(&self) {
        self.shared.health.trouble_of(&self.shared.part, DATABASE, self.name(), None);
    }

    fn name(&self) -> String {
        format!("lane {}", self.number)
    }

    /// Waits before the next try of one message. The database works for others, so no trouble is
    /// shown, and earlier failures do not make the pause longer.
    async fn pause(&self, blame: &Blame) {
        sleep_unless(&self.stop, blame.pause()).await;
    }

    /// Waits for a database that is away or returned a transient error.
    async fn wait_out(&mut self, why: &(impl std::fmt::Display + Sync)) {
        let pause = self.fault.pause(fastrand::f64());
        self.say_waiting(&why.to_string());
        sleep_unless(&self.stop, pause).await;
    }

    /// The same for work that a stop must not leave undone. Returns false if the grace is over.
    async fn wait_out_a_stop(&mut self, why: &(impl std::fmt::Display + Sync)) -> bool {
        let pause = self.fault.pause(fastrand::f64());
        self.say_waiting(&why.to_string());
        sleep_unless(&self.abandon, pause).await
    }

    fn say_waiting(&self, why: &str) {
        // Single deadlocks are normal; only a failure that lasts is shown as waiting.
        if self.fault.times() > split::TIMES_BEFORE_HALVING {
            let waits = Trouble::Stops(why.to_owned());
            self.shared.health.trouble_of(&self.shared.part, DATABASE, self.name(), Some(waits));
        } else {
            tracing::debug!(consumer = %self.shared.options.name, %why, "a batch runs again");
        }
    }
}

fn to_count(ids: Vec<MessageId>, suspects: bool) -> Tries {
    if suspects { Tries::Due { ids, may_be_counted: false } } else { Tries::Free }
}

/// Puts the parts of a plan on the stack, so that the first part is next. The error belongs to the
/// message that runs alone.
fn stack_up(
    mut items: Vec<Item>,
    plan: Vec<Part>,
    tries: &Tries,
    mut error: Option<HandlerError>,
    stack: &mut Vec<Work>,
) {
    let counted = matches!(tries, Tries::Counted);
    for part in plan.into_iter().rev() {
        let mut taken = items.split_off(part.messages.start);
        match taken.pop() {
            Some(item) if part.alone => {
                let why = match error.take() {
                    None => Why::Transient,
                    Some(error) if error.is_transient() => Why::WaitedForALock(error),
                    Some(error) => Why::Failed(error),
                };
                stack.push(Work::Alone(Box::new(item), why, counted));
            }
            last => {
                taken.extend(last);
                stack.push(Work::Batch(taken, tries.clone()));
            }
        }
    }
}

#[cfg(all(test, feature = "sqlite", feature = "embedded"))]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::atomic::{AtomicUsize, Ordering};

    use async_trait::async_trait;
    use tokio::sync::Notify;

    use super::*;
    use crate::inbox::consumer::Handlers;
    use crate::inbox::consumer::fixture::{Parts, options, parts, two};
    use crate::inbox::handler::{HandlerTx, MessageHandler};
    use crate::inbox::port::waiting::Waiting;
    use crate::inbox::port::{Inbox, InboxEntry, ParkAs, Parked};
    use crate::message::Message;
    use crate::store::sqlite::SqliteStore;

    /// A handler that fails each time and counts its runs.
    struct Fails(Arc<(AtomicUsize, Notify)>);

    #[async_trait]
    impl MessageHandler<SqliteStore> for Fails {
        async fn handle(&self, _: &Message, _: &mut HandlerTx<'_, SqliteStore>) -> Result<(), HandlerError> {
            self.0.0.fetch_add(1, Ordering::Relaxed);
            self.0.1.notify_one();
            Err(HandlerError::retryable("not today"))
        }
    }

    /// Two messages of one key; the first is between two tries in place when the stop comes, before
    /// its source is revoked. Shown by: leaving only what is revoked; the second ran.
    #[tokio::test]
    async fn a_stop_between_two_tries_in_place_starts_no_later_message_of_the_key() {
        let ran = Arc::new((AtomicUsize::new(0), Notify::new()));
        let mut options = options();
        (options.retry.in_place, options.retry.in_place_delay) = (5, Duration::from_secs(600));
        let parts = parts(options, Handlers::all(Fails(Arc::clone(&ran)))).await;
        let (consumer, shared) = (parts.register().await, Arc::clone(&parts.shared));
        let (sender, items) = mpsc::unbounded_channel();
        let (done, mut ends) = mpsc::unbounded_channel();
        for item in two(&shared) {
            assert!(sender.send(item).is_ok());
        }
        let stop = CancellationToken::new();
        let lane = tokio::spawn(run(shared, consumer, 0, items, done, stop.clone(), CancellationToken::new()));
        ran.1.notified().await;
        stop.cancel();
        drop(sender);
        tokio::time::timeout(Duration::from_secs(60), lane).await.unwrap().unwrap();
        assert_eq!(ran.0.load(Ordering::Relaxed), 1, "the second message did not run");
        for _ in 0..2 {
            assert_eq!(ends.recv().await.unwrap().end, End::Left);
        }
    }

    /// A lane that has nothing to do, and what it reports.
    pub(super) async fn lane(handlers: Handlers<SqliteStore>) -> (Parts, Lane, mpsc::UnboundedReceiver<Done>) {
        let parts = parts(options(), handlers).await;
        let (consumer, shared) = (parts.register().await, Arc::clone(&parts.shared));
        let (done, ends) = mpsc::unbounded_channel();
        let (stop, abandon) = (CancellationToken::new(), CancellationToken::new());
        let (fault, aside) = (TransientFault::default(), Aside::default());
        (parts, Lane { number: 0, shared, consumer, done, stop, abandon, fault, aside, lock_waits: 0 }, ends)
    }

    /// As if a retrier had removed the head of the key while the second message was stored behind
    /// it: what is the first one now has no due time. Only a wake, or a sweep, which nobody makes
    /// here, gives it one.
    async fn wakes_its_key(stores: impl AsyncFnOnce(&mut Lane, Item)) {
        let (parts, mut lane, mut ends) = lane(Handlers::all(Fails(Arc::default()))).await;
        let consumer = lane.consumer;
        let [first, second] = two(&lane.shared);
        let mut tx = parts.store.begin(consumer).await.unwrap();
        tx.admit(&[InboxEntry { id: first.message.id, hash: first.hash }]).await.unwrap();
        let (message, park_as) = (first.message.clone(), ParkAs::Behind);
        tx.park(&[Parked { message, park_as, attempts: 0, error: None }]).await.unwrap();
        tx.commit().await.unwrap();
        let due = || parts.store.next_due(consumer, &parts.shared.scope);
        assert_eq!(due().await.unwrap(), None);
        stores(&mut lane, second).await;
        assert_eq!(ends.recv().await.unwrap().end, End::Committed);
        assert_eq!(due().await.unwrap(), Some(Duration::ZERO));
    }

    /// Shown by: storing it and no more.
    #[tokio::test]
    async fn r25_a_message_that_is_stored_after_its_tries_wakes_its_key() {
        wakes_its_key(async |lane: &mut Lane, item: Item| {
            let error = HandlerError::retryable("not today");
            settle::park(lane, item, ParkAs::Due(Duration::ZERO), (1, false), &error).await;
        })
        .await;
    }

    /// Shown by: waking keys after a batch only.
    #[tokio::test]
    async fn r25_a_message_that_runs_alone_and_is_stored_behind_its_key_wakes_it() {
        wakes_its_key(async |lane: &mut Lane, item: Item| alone::run(lane, item, Why::Transient, false).await).await;
    }

    /// The next owner of a message has counted a try of its own. Shown by: deleting the counts,
    /// also where this lane had counted none; setting a message aside with its try counted.
    #[tokio::test]
    async fn r26_a_lane_that_leaves_a_message_takes_back_its_own_try_only() {
        let (parts, mut lane, mut ends) = lane(Handlers::new()).await;
        let (store, consumer) = (&parts.store, lane.consumer);
        let due = |may_be_counted| Tries::Due { ids: Vec::new(), may_be_counted };
        let counted = [(Tries::Counted, 1), (due(true), 1), (due(false), 2)];
        for ((tries, stay), end) in counted.iter().flat_map(|one| [(one, End::Left), (one, End::Aside)]) {
            let [item, _] = two(&lane.shared);
            let id = item.message.id;
            store.begin_first_attempts(consumer, &[id]).await.unwrap();
            assert_eq!(store.begin_attempt(consumer, id).await.unwrap(), 2);
            if end == End::Aside {
                lane.part_contested(vec![item], tries, &mut Vec::new()).await;
            } else {
                item.source.revoke();
                assert!(lane.leave_revoked(vec![item], tries).await.is_empty());
            }
            assert_eq!(ends.recv().await.unwrap().end, end);
            assert_eq!(store.attempts(consumer, &[id]).await.unwrap(), [(id, *stay)], "{tries:?}, {end:?}");
            for _ in 0..*stay {
                store.take_back_attempts(consumer, &[id]).await.unwrap();
            }
        }
    }
}
