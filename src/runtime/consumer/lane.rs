//! A lane: the messages of its keys, in order, in batches of what is there; no delay is added when idle.
//!
//! A failing message is taken out: the part before it runs again, then it alone under the retry policy, then the rest, so
//! that a lane never reorders a key.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::batch::{self, BatchEnd};
use super::item::{Done, Item};
use super::{Shared, alone, settle};
use crate::error::{HandlerError, StoreError};
use crate::observe::{self, PartState};
use crate::runtime::pace::Pace;
use crate::store::{ConsumerId, Store};

/// One lane's hands.
pub(super) struct Lane<S: Store> {
    pub(super) shared: Arc<Shared<S>>,
    pub(super) consumer: ConsumerId,
    pub(super) done: mpsc::UnboundedSender<Done>,
    pub(super) stop: CancellationToken,
    pub(super) pace: Pace,
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
) {
    let pace = Pace::new(Duration::from_millis(20), Duration::from_secs(5));
    let batch_max = shared.options.batch_max.max(1);
    let mut lane = Lane { shared, consumer, done, stop, pace };
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
        match self.first_suspect(&items).await {
            Ok(Some(suspect)) => return take_out(items, suspect, None, stack),
            Ok(None) => {}
            Err(error) => {
                self.wait_out(&error).await;
                return stack.push(Work::Batch(items));
            }
        }
        let end = {
            let _together = self.shared.solo.read().await;
            batch::run(&self.shared, self.consumer, &items, None).await
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
                self.again(items, error.message().to_owned(), stack).await;
            }
            Ok(BatchEnd::Failed(index, error)) => take_out(items, index, Some(error), stack),
            Ok(BatchEnd::Unclear(why)) => {
                tracing::warn!(consumer = %self.shared.options.name, messages = items.len(), %why, "each message of a batch runs alone");
                stack.extend(items.into_iter().rev().map(|item| Work::Alone(Box::new(item), None)));
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
            Err(error) => self.again(items, error.to_string(), stack).await,
        }
    }

    /// Nobody's failure: the same batch again with jitter, halved after the third time (R27).
    async fn again(&mut self, mut items: Vec<Item>, why: String, stack: &mut Vec<Work>) {
        self.say_waiting(&why);
        self.pace.wait(&self.stop).await;
        if self.pace.failures() > 3 && items.len() > 1 {
            let rest = items.split_off(items.len() / 2);
            stack.push(Work::Batch(rest));
        }
        stack.push(Work::Batch(items));
    }

    /// The first item that is to run alone, with its try counted first (R26): only those that the inbox does not know.
    async fn first_suspect(&self, items: &[Item]) -> Result<Option<usize>, StoreError> {
        if !items.iter().any(|item| item.redelivered || item.source.is_suspicious()) {
            return Ok(None);
        }
        let ids: Vec<_> = items.iter().map(|item| item.message.id).collect();
        let known = self.shared.store.known(self.consumer, &ids).await?;
        let suspect = |item: &Item| {
            !known.contains(&item.message.id)
                && (item.redelivered || (item.source.is_suspicious() && item.source.take_suspect()))
        };
        Ok(items.iter().position(suspect))
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
        if self.pace.failures() > 0 {
            self.pace.worked();
            self.shared.health.set(&self.shared.part, PartState::Ready);
        }
    }

    pub(super) async fn wait_out(&mut self, error: &StoreError) {
        self.say_waiting(&error.to_string());
        self.pace.wait(&self.stop).await;
    }

    fn say_waiting(&self, why: &str) {
        // A deadlock or two is daily life; only what lasts is shown as waiting.
        if self.pace.failures() >= 3 {
            self.shared.health.set(&self.shared.part, PartState::Waiting(format!("database: {why}")));
        } else {
            tracing::debug!(consumer = %self.shared.options.name, %why, "a batch runs again");
        }
    }
}

/// The part before, then the one alone, then the rest.
fn take_out(mut items: Vec<Item>, index: usize, error: Option<HandlerError>, stack: &mut Vec<Work>) {
    let rest = items.split_off(index + 1);
    let taken = items.pop();
    if !rest.is_empty() {
        stack.push(Work::Batch(rest));
    }
    if let Some(taken) = taken {
        stack.push(Work::Alone(Box::new(taken), error));
    }
    if !items.is_empty() {
        stack.push(Work::Batch(items));
    }
}
