//! Messages that are set aside: another process's open transaction holds their inbox rows, or they
//! follow such a message of their key. So a process that froze stops only the keys that it works
//! on.
//!
//! Promise: while a message is set aside, no later message of its key runs. Messages leave in the
//! order in which they came.

use std::collections::{HashSet, VecDeque};
use std::time::Duration;

use tokio::time::Instant;

use super::item::Item;

/// How long messages are set aside before one of them is checked again.
const AGAIN: Duration = Duration::from_millis(250);

/// The messages that one lane has set aside. Bounded by `aside_max` and `in_flight_max`.
#[derive(Default)]
pub(super) struct Aside {
    items: VecDeque<Item>,
    /// The oldest message of each key, and messages without a key: only these can be free.
    heads: Vec<usize>,
    keys: HashSet<[u8; 16]>,
    again: Option<Instant>,
    turn: usize,
}

impl Aside {
    pub(super) fn put(&mut self, item: Item) {
        if item.lane_id.is_none_or(|lane| self.keys.insert(lane)) {
            self.heads.push(self.items.len());
        }
        self.items.push_back(item);
        self.again.get_or_insert_with(|| Instant::now() + AGAIN);
    }

    /// Whether an older message of the same key is set aside.
    pub(super) fn is_before(&self, item: &Item) -> bool {
        !self.keys.is_empty() && item.lane_id.is_some_and(|lane| self.keys.contains(&lane))
    }

    /// Returns when the next check is due; never if no message is set aside.
    pub(super) async fn is_due(&self) {
        match self.again {
            Some(at) => tokio::time::sleep_until(at).await,
            None => std::future::pending().await,
        }
    }

    /// Returns one of the oldest messages, another one each time.
    pub(super) fn look(&mut self) -> Option<&Item> {
        self.turn = self.turn.wrapping_add(1);
        self.heads.get(self.turn % self.heads.len().max(1)).and_then(|head| self.items.get(*head))
    }

    /// Delays the next check. Called at the end of a check, which may be slow: new messages of the
    /// lane come before the next one.
    pub(super) fn rest(&mut self) {
        self.again = (!self.items.is_empty()).then(|| Instant::now() + AGAIN);
    }

    /// Removes and returns all messages, in order.
    pub(super) fn take(&mut self) -> Vec<Item> {
        let items = std::mem::take(&mut self.items);
        *self = Self { turn: self.turn, ..Self::default() };
        items.into()
    }
}
