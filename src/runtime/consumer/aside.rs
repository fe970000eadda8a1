//! Messages whose inbox rows somebody else's open transaction holds, and the later ones of their
//! keys: they stand aside, so that a process that froze in the middle of its work stops its own
//! keys and no other.
//!
//! Promise: what stands here is older than whatever of its key comes later, and leaves in the order
//! in which it came.

use std::collections::{HashSet, VecDeque};
use std::time::Duration;

use tokio::time::Instant;

use super::item::Item;

/// How long they stand before one of them is looked at again.
const AGAIN: Duration = Duration::from_millis(250);

/// What stands aside of one lane. Bounded by `aside_max` and `in_flight_max` of the consumer.
#[derive(Default)]
pub(super) struct Aside {
    items: VecDeque<Item>,
    /// Which of them are the oldest of their keys, or have none: only these can be free.
    heads: Vec<usize>,
    keys: HashSet<[u8; 16]>,
    again: Option<Instant>,
    turn: usize,
}

impl Aside {
    pub(super) fn put(&mut self, item: Item) {
        if item.message.lane_id().is_none_or(|lane| self.keys.insert(lane)) {
            self.heads.push(self.items.len());
        }
        self.items.push_back(item);
        self.again.get_or_insert_with(|| Instant::now() + AGAIN);
    }

    /// Whether an older message of its key stands here.
    pub(super) fn is_before(&self, item: &Item) -> bool {
        !self.keys.is_empty() && item.message.lane_id().is_some_and(|lane| self.keys.contains(&lane))
    }

    /// Returns when it is time to look again; never where nothing stands here.
    pub(super) async fn is_due(&self) {
        match self.again {
            Some(at) => tokio::time::sleep_until(at).await,
            None => std::future::pending().await,
        }
    }

    /// One of the oldest of their keys, another each time; the next look is later.
    pub(super) fn look(&mut self) -> Option<&Item> {
        self.turn = self.turn.wrapping_add(1);
        self.again = (!self.items.is_empty()).then(|| Instant::now() + AGAIN);
        self.heads.get(self.turn % self.heads.len().max(1)).and_then(|head| self.items.get(*head))
    }

    /// All of them, in order.
    pub(super) fn take(&mut self) -> Vec<Item> {
        let items = std::mem::take(&mut self.items);
        *self = Self { turn: self.turn, ..Self::default() };
        items.into()
    }
}
