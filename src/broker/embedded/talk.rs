//! What a subscriber and the task of its membership say to each other.
//!
//! Guarantees: both sides may speak at any time and wait for nobody. What the runtime said is kept
//! until the task notes it, and the task is woken for it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::broker::{Event, PartitionId};
use crate::error::BrokerError;
use crate::inbox::rules::position::BrokerOffsets;

/// What the task tells the subscriber; with new sources, what the file has of each. Nothing of them
/// is read before `begin` has set where they begin.
pub(super) type Told = Result<(Event, Vec<BrokerOffsets>), BrokerError>;

/// What the runtime said and the task has not noted yet.
#[derive(Debug, Default)]
pub(super) struct Said {
    /// The first offset to deliver, by source; `None` for a source that is not to be read.
    pub(super) begun: HashMap<PartitionId, Option<i64>>,
    /// The next offset to be handled, by source.
    pub(super) acknowledged: HashMap<PartitionId, i64>,
    /// Deliveries that are not acknowledged but finished (false) or set aside (true).
    pub(super) no_longer_in_flight: Vec<(PartitionId, i64, bool)>,
}

#[derive(Debug, Default)]
pub(super) struct MemberState {
    said: Mutex<Said>,
    wake: Notify,
    paused: AtomicBool,
    /// The number of batches that wait for `next`.
    queued: AtomicUsize,
    /// True where this member has no partition because live members own all of them.
    others_hold_all: AtomicBool,
}

/// What the subscriber says and asks.
impl MemberState {
    fn say(&self, say: impl FnOnce(&mut Said)) {
        say(&mut self.said.lock());
        self.wake.notify_one();
    }

    /// Sets the first offset to deliver of a source; `None` where it is not to be read.
    pub(super) fn begin(&self, source: &PartitionId, at: Option<i64>) {
        self.say(|said| _ = said.begun.insert(source.clone(), at));
    }

    pub(super) fn acknowledge(&self, source: &PartitionId, through: i64) {
        self.say(|said| {
            let next = said.acknowledged.entry(source.clone()).or_insert(0);
            *next = through.saturating_add(1).max(*next);
        });
    }

    /// Reports deliveries as finished (false) or set aside (true).
    pub(super) fn no_longer_in_flight(&self, source: &PartitionId, sequences: &[i64], is_aside: bool) {
        let these = sequences.iter().map(|sequence| (source.clone(), *sequence, is_aside));
        self.say(|said| said.no_longer_in_flight.extend(these));
    }

    pub(super) fn pause(&self, paused: bool) {
        self.paused.store(paused, Ordering::Release);
        self.wake.notify_one();
    }

    pub(super) fn took_batch(&self) {
        self.queued.fetch_sub(1, Ordering::AcqRel);
        self.wake.notify_one();
    }

    pub(super) fn others_hold_all(&self) -> bool {
        self.others_hold_all.load(Ordering::Acquire)
    }
}

/// What the task notes and asks.
impl MemberState {
    pub(super) async fn woken(&self) {
        self.wake.notified().await;
    }

    pub(super) fn take_said(&self) -> Said {
        std::mem::take(&mut *self.said.lock())
    }

    /// Whether the subscriber takes a batch now: it is not paused, and fewer than this many wait.
    pub(super) fn takes_a_batch(&self, queued_max: usize) -> bool {
        !self.paused.load(Ordering::Acquire) && self.queued.load(Ordering::Acquire) < queued_max
    }

    pub(super) fn queued_batch(&self) {
        self.queued.fetch_add(1, Ordering::AcqRel);
    }

    pub(super) fn note_that_others_hold_all(&self, all: bool) {
        self.others_hold_all.store(all, Ordering::Release);
    }
}
