//! A delivery on its way through lane and batch, and the partition that it came from.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use crate::broker::{Delivery, PartitionId};
use crate::inbox::rules::suspicion::{Facts, Run, Suspicion};
use crate::message::{ContentHash, Message};

use super::options::ConsumerOptions;

/// One assignment of a partition, as lanes use it.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) id: PartitionId,
    /// The partition is revoked: start nothing more of it.
    revoked: AtomicBool,
    /// Suspicion about what the last owner had in flight, shared by the lanes (R26).
    suspicion: Mutex<Suspicion>,
}

impl Source {
    pub(super) fn new(id: PartitionId, suspicion: Suspicion) -> Arc<Self> {
        Arc::new(Self { id, revoked: AtomicBool::new(false), suspicion: Mutex::new(suspicion) })
    }

    pub(super) fn revoke(&self) {
        self.revoked.store(true, Ordering::Release);
    }

    pub(super) fn is_revoked(&self) -> bool {
        self.revoked.load(Ordering::Acquire)
    }

    fn with_suspicion<T>(&self, ask: impl FnOnce(&mut Suspicion) -> T) -> T {
        ask(&mut self.suspicion.lock())
    }
}

/// One delivery with its message, the hash of its content and the source it came from.
#[derive(Debug)]
pub(super) struct Item {
    pub(super) message: Message,
    pub(super) hash: ContentHash,
    /// The lane id of the message, which is a hash: made once. `None` without a key.
    pub(super) lane_id: Option<[u8; 16]>,
    /// Why the message has no usable id; `None` if it has one.
    pub(super) unusable: Option<String>,
    pub(super) source: Arc<Source>,
    pub(super) sequence: i64,
    /// Whether it may have been in the hands of a process that died (R26): the broker says that it
    /// was delivered before, or it was judged suspect.
    redelivered: bool,
    was_judged: bool,
    /// Whether the item was set aside once; it then does not count as in flight.
    pub(super) is_aside: bool,
}

impl Item {
    pub(super) fn identify(delivery: Delivery, source: Arc<Source>, options: &ConsumerOptions, is_log: bool) -> Self {
        let Delivery { sequence, redelivered, arrived, .. } = delivery;
        let (message, unusable) = Message::identify(arrived, &options.id_rule, &options.id_epoch, is_log);
        let (hash, lane_id) = (message.content_hash(), message.lane_id());
        let (was_judged, is_aside) = (false, false);
        Self { message, hash, lane_id, unusable, source, sequence, redelivered, was_judged, is_aside }
    }

    /// Whether the inbox must be read before this item runs.
    pub(super) fn is_suspicious(&self) -> bool {
        self.redelivered || self.source.with_suspicion(|suspicion| suspicion.is_active())
    }

    /// How the item is to run (R26). `known`: whether the inbox has it. An item that was set aside
    /// is judged again: it stays suspect, and takes no suspicion that others may need.
    pub(super) fn judge(&mut self, known: bool, may_not_be_blamed: bool) -> Run {
        let facts = Facts { known, redelivered: self.redelivered, may_not_be_blamed };
        let run = match self.was_judged {
            true => Suspicion::closed().judge(facts),
            false => self.source.with_suspicion(|suspicion| suspicion.judge(facts)),
        };
        (self.was_judged, self.redelivered) = (true, self.redelivered || run != Run::InBatch);
        run
    }

    /// The number of the lane for this item: all items of a key go to the same lane.
    pub(super) fn lane(&self, lanes: usize) -> usize {
        let bytes = self.lane_id.unwrap_or_else(|| self.message.id.bytes());
        // The last bytes, because a v7 id begins with its time.
        let number =
            u64::from_be_bytes([bytes[8], bytes[9], bytes[10], bytes[11], bytes[12], bytes[13], bytes[14], bytes[15]]);
        usize::try_from(number % lanes.max(1) as u64).unwrap_or(0)
    }
}

/// What a lane reports to the intake about one delivery.
#[derive(Debug)]
pub(super) struct Done {
    pub(super) source: PartitionId,
    pub(super) sequence: i64,
    pub(super) end: End,
    pub(super) was_aside: bool,
}

/// How a delivery ended in its lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// It is committed and may be acknowledged.
    Committed,
    /// It was not handled because of a revocation or a stop.
    Left,
    /// It has not ended: it was set aside for the first time.
    Aside,
}

#[cfg(all(test, feature = "sqlite", feature = "embedded"))]
mod tests {
    use super::*;
    use crate::inbox::consumer::Handlers;
    use crate::inbox::consumer::fixture::{options, parts, two};

    /// Shown by: judging each time anew. The second judgement took the suspicion of the other item.
    #[tokio::test]
    async fn r26_an_item_that_was_set_aside_stays_suspect_and_takes_no_suspicion_of_another() {
        let parts = parts(options(), Handlers::new()).await;
        let items = two(&parts.shared);
        let source = Source::new(items[0].source.id.clone(), Suspicion::found_open(2));
        let [mut first, mut second] = items.map(|item| Item { source: Arc::clone(&source), ..item });
        for judged in [&mut first, &mut second] {
            assert_eq!([judged.judge(false, false), judged.judge(false, false)], [Run::Counted; 2]);
        }
        assert_eq!(first.judge(false, true), Run::Alone, "its try was counted meanwhile");
        assert_eq!(first.judge(true, false), Run::InBatch, "the inbox knows it");
    }
}
