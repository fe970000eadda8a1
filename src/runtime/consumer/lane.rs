//! A lane: the messages of its keys, in order, in batches of what is there; no delay is added when idle.
//!
//! A failing message is taken out: the part before it runs again, then it alone under the retry policy, then the rest, so
//! that a lane never reorders a key. Which parts those are is decided by [`crate::policy::split`], which messages are under
//! suspicion by [`crate::policy::suspicion`].

use std::sync::Arc;

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::batch::{self, BatchEnd};
use super::item::{Done, Item};
use super::{Shared, alone, settle};
use crate::error::{HandlerError, StoreError};
use crate::observe::{self, PartState};
use crate::policy::split::{self, NobodysFault, Part};
use crate::runtime::pace::sleep_unless;
use crate::store::{ConsumerId, Store};

/// One lane's hands.
pub(super) struct Lane<S: Store> {
    pub(super) shared: Arc<Shared<S>>,
    pub(super) consumer: ConsumerId,
    pub(super) done: mpsc::UnboundedSender<Done>,
    pub(super) stop: CancellationToken,
    /// The grace of a stop is over: what runs is dropped.
    pub(super) abandon: CancellationToken,
    /// Failures in a row that were nobody's, whatever this lane was doing.
    pub(super) fault: NobodysFault,
}

/// What is to be done next, last in, first out.
enum Work {
    Batch(Vec<Item>),
    Alone(Box<Item>, Option<HandlerError>),
}

/// Runs until its channel is closed.
pub(super) async fn run<S: Store>(
    shared: Arc<Shared<S>>,
    consumer: ConsumerId,
    mut items: mpsc::UnboundedReceiver<Item>,
    done: mpsc::UnboundedSender<Done>,
    stop: CancellationToken,
    abandon: CancellationToken,
) {
    let batch_max = shared.options.batch_max.max(1);
    let mut lane = Lane { shared, consumer, done, stop, abandon, fault: NobodysFault::default() };
    while let Some(first) = items.recv().await {
        let mut batch = vec![first];
        while batch.len() < batch_max {
            let Ok(next) = items.try_recv() else { break };
            batch.push(next);
        }
        lane.work(batch).await;
    }
}

impl<S: Store> Lane<S> {
    async fn work(&mut self, items: Vec<Item>) {
        let mut stack = vec![Work::Batch(items)];
        while let Some(work) = stack.pop() {
            match work {
                Work::Batch(items) => {
                    let items = self.leave_revoked(items);
                    if !items.is_empty() {
                        self.batch(items, &mut stack).await;
                    }
                }
                Work::Alone(item, error) if item.source.is_revoked() => {
                    drop(error);
                    self.report(&item, false);
                }
                Work::Alone(item, error) => alone::run(self, *item, error).await,
            }
        }
    }

    async fn batch(&mut self, items: Vec<Item>, stack: &mut Vec<Work>) {
        let whole = 0..items.len();
        match self.first_suspect(&items).await {
            Ok(Some(suspect)) => return stack_up(items, split::around(whole, suspect), None, stack),
            Ok(None) => {}
            Err(error) => {
                self.wait_out(&error).await;
                return stack.push(Work::Batch(items));
            }
        }
        let end = {
            let _together = self.shared.solo.read().await;
            self.transaction(&items, None).await
        };
        let Some(end) = end else {
            return items.iter().for_each(|item| self.report(item, false));
        };
        match end {
            Ok(BatchEnd::Done(outcomes)) => {
                self.went_well();
                for (item, outcome) in items.iter().zip(outcomes) {
                    observe::delivered(&self.shared.options.name, outcome, 1);
                    self.report(item, true);
                }
            }
            Ok(BatchEnd::Failed(_, error)) if error.is_nobodys() => {
                self.again(items, error.message(), stack).await;
            }
            Ok(BatchEnd::Failed(index, error)) => stack_up(items, split::around(whole, index), Some(error), stack),
            Ok(BatchEnd::Unclear(why)) => {
                tracing::warn!(consumer = %self.shared.options.name, messages = items.len(), %why, "a batch failed as a whole; its halves run");
                stack_up(items, split::without_blame(whole), None, stack);
            }
            Ok(BatchEnd::Ended(committed)) => {
                // In order: what is stored first is the head of its key (R25).
                let mut rest = Vec::new();
                for (index, item) in items.into_iter().enumerate() {
                    if committed.contains(&index) {
                        settle::transaction_ended(self, item).await;
                    } else {
                        rest.push(item);
                    }
                }
                stack.push(Work::Batch(rest));
            }
            Err(error) => self.again(items, &error.to_string(), stack).await,
        }
    }

    /// Runs the items in one transaction; none where the grace of a stop ended first: then nothing of it stays.
    pub(super) async fn transaction(
        &self,
        items: &[Item],
        attempt: Option<u32>,
    ) -> Option<Result<BatchEnd, StoreError>> {
        tokio::select! {
            biased;
            () = self.abandon.cancelled() => None,
            end = batch::run(&self.shared, self.consumer, items, attempt) => Some(end),
        }
    }

    /// Nobody's failure: the same batch again, or its halves (R27).
    async fn again(&mut self, items: Vec<Item>, why: &str, stack: &mut Vec<Work>) {
        let again = self.fault.again(0..items.len(), fastrand::f64());
        self.say_waiting(why);
        sleep_unless(&self.stop, again.pause).await;
        let parts = again.parts.into_iter().map(|messages| Part { messages, alone: false });
        stack_up(items, parts.collect(), None, stack);
    }

    /// The first item that is to run alone, with its try counted first (R26): only those that the inbox does not know.
    async fn first_suspect(&self, items: &[Item]) -> Result<Option<usize>, StoreError> {
        if !items.iter().any(Item::is_suspicious) {
            return Ok(None);
        }
        let ids: Vec<_> = items.iter().map(|item| item.message.id).collect();
        let known = self.shared.store.known(self.consumer, &ids).await?;
        Ok(items.iter().position(|item| item.runs_alone(known.contains(&item.message.id))))
    }

    fn leave_revoked(&self, items: Vec<Item>) -> Vec<Item> {
        let (left, kept): (Vec<_>, Vec<_>) = items.into_iter().partition(|item| item.source.is_revoked());
        for item in &left {
            self.report(item, false);
        }
        kept
    }

    pub(super) fn report(&self, item: &Item, committed: bool) {
        let done = Done { source: item.source.id.clone(), sequence: item.sequence, committed };
        // The intake is gone only when the subscriber is: then the message comes again.
        let _ = self.done.send(done);
    }

    pub(super) fn went_well(&mut self) {
        if self.fault.times() > 0 {
            self.fault.is_over();
            self.shared.health.set(&self.shared.part, PartState::Ready);
        }
    }

    /// Waits for a database that is away, or asks to try again.
    pub(super) async fn wait_out(&mut self, why: &(impl std::fmt::Display + Sync)) {
        let again = self.fault.again(0..1, fastrand::f64());
        self.say_waiting(&why.to_string());
        sleep_unless(&self.stop, again.pause).await;
    }

    fn say_waiting(&self, why: &str) {
        // A deadlock or two is daily life; only what lasts is shown as waiting.
        if self.fault.times() > split::TIMES_BEFORE_HALVING {
            self.shared.health.set(&self.shared.part, PartState::Waiting(format!("database: {why}")));
        } else {
            tracing::debug!(consumer = %self.shared.options.name, %why, "a batch runs again");
        }
    }
}

/// Lays the parts of a plan on the stack, so that the first of them is next. The error belongs to the message to blame.
fn stack_up(mut items: Vec<Item>, plan: Vec<Part>, mut error: Option<HandlerError>, stack: &mut Vec<Work>) {
    for part in plan.into_iter().rev() {
        let mut taken = items.split_off(part.messages.start);
        match taken.pop() {
            Some(item) if part.alone => stack.push(Work::Alone(Box::new(item), error.take())),
            last => {
                taken.extend(last);
                stack.push(Work::Batch(taken));
            }
        }
    }
}
