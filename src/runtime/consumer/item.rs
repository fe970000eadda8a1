//! A delivery on its way through lane and batch, and the source it came from.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use crate::broker::{Delivery, PartitionId};
use crate::message::{ContentHash, Message};

use super::options::ConsumerOptions;

/// One assignment, as lanes see it.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) id: PartitionId,
    /// Given up: start nothing more of it.
    revoked: AtomicBool,
    /// How many deliveries that the inbox does not know still run alone, because the last owner did not end cleanly (R26).
    suspects: AtomicI64,
}

impl Source {
    pub(super) fn new(id: PartitionId, suspects: i64) -> Arc<Self> {
        Arc::new(Self { id, revoked: AtomicBool::new(false), suspects: AtomicI64::new(suspects) })
    }

    pub(super) fn revoke(&self) {
        self.revoked.store(true, Ordering::Release);
    }

    pub(super) fn is_revoked(&self) -> bool {
        self.revoked.load(Ordering::Acquire)
    }

    /// True while deliveries of this source are to be looked up before they run.
    pub(super) fn is_suspicious(&self) -> bool {
        self.suspects.load(Ordering::Relaxed) > 0
    }

    /// Takes one from the number of suspects; false where none is left.
    pub(super) fn take_suspect(&self) -> bool {
        self.suspects.fetch_sub(1, Ordering::Relaxed) > 0
    }
}

/// One delivery, identified.
#[derive(Debug)]
pub(super) struct Item {
    pub(super) message: Message,
    pub(super) hash: ContentHash,
    /// Why it has no usable id, where it has none.
    pub(super) unusable: Option<String>,
    pub(super) source: Arc<Source>,
    pub(super) sequence: i64,
    pub(super) redelivered: bool,
}

impl Item {
    pub(super) fn identify(delivery: Delivery, source: Arc<Source>, options: &ConsumerOptions, is_log: bool) -> Self {
        let Delivery { sequence, redelivered, arrived, .. } = delivery;
        let (message, unusable) = match Message::identify(arrived, &options.id_rule, &options.id_epoch, is_log) {
            Ok(message) => (message, None),
            Err(unusable) => (unusable.message, Some(unusable.reason)),
        };
        let hash = message.content_hash();
        Self { message, hash, unusable, source, sequence, redelivered }
    }

    /// Which of `lanes` it belongs to: one key, one lane.
    pub(super) fn lane(&self, lanes: usize) -> usize {
        let bytes = self.message.lane_id().unwrap_or_else(|| self.message.id.bytes());
        // The last bytes: the first ones of a v7 id are its time.
        let number =
            u64::from_be_bytes([bytes[8], bytes[9], bytes[10], bytes[11], bytes[12], bytes[13], bytes[14], bytes[15]]);
        usize::try_from(number % lanes.max(1) as u64).unwrap_or(0)
    }
}

/// What a lane tells the intake of one delivery.
#[derive(Debug)]
pub(super) struct Done {
    pub(super) source: PartitionId,
    pub(super) sequence: i64,
    /// True where it is committed and may be acknowledged; false where it was left alone (revoked, stop).
    pub(super) committed: bool,
}
