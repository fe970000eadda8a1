//! The rows of a session that are not published yet: one unconfirmed publish per key (R20), and
//! each key always on the same channel.
//!
//! Guarantees: rows of one key are published in the order in which they came, each only after the
//! one before it is settled. Rows without a key never wait. With `pipeline` (without R20) no row
//! waits, but a key still keeps its channel and its order.
//!
//! Pure: no I/O, no clock.

use std::collections::{HashMap, VecDeque};

use crate::message::{OutgoingMessage, lane_id};

/// Identifies a pair of topic and key.
pub(super) type LaneId = [u8; 16];

/// A row with the channel that will publish it.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) tag: u64,
    pub(super) lane: Option<LaneId>,
    pub(super) channel: usize,
    pub(super) message: OutgoingMessage,
}

#[derive(Debug)]
pub(super) struct Lanes {
    pipeline: bool,
    /// By channel: rows that may be published now.
    ready: Vec<VecDeque<Row>>,
    /// A key is in here while one of its rows is ready or in flight; the value has its later rows.
    lanes: HashMap<LaneId, VecDeque<Row>>,
    /// Rows not yet published, by topic.
    topics: HashMap<String, usize>,
}

impl Lanes {
    pub(super) fn new(channels: usize, pipeline: bool) -> Self {
        let ready = (0..channels).map(|_| VecDeque::new()).collect();
        Self { pipeline, ready, lanes: HashMap::new(), topics: HashMap::new() }
    }

    pub(super) fn add(&mut self, tag: u64, message: OutgoingMessage) {
        let lane = message.key.as_deref().map(|key| lane_id(&message.topic, key.as_bytes()));
        // The last bytes of an id are random; the first ones of a UUID v7 are a time.
        let spread = lane.unwrap_or_else(|| message.id.into_bytes());
        let channel = usize::from(u16::from_be_bytes([spread[14], spread[15]])) % self.ready.len();
        *self.topics.entry(message.topic.clone()).or_default() += 1;
        let row = Row { tag, lane, channel, message };
        match lane.filter(|_| !self.pipeline) {
            None => self.ready[channel].push_back(row),
            Some(lane) => match self.lanes.get_mut(&lane) {
                Some(waiting) => waiting.push_back(row),
                None => {
                    self.lanes.insert(lane, VecDeque::new());
                    self.ready[channel].push_back(row);
                }
            },
        }
    }

    /// Takes the next row for a channel. It counts as in flight until [`Lanes::settled`].
    pub(super) fn next(&mut self, channel: usize) -> Option<Row> {
        let row = self.ready[channel].pop_front()?;
        self.leaves(&row.message.topic);
        Some(row)
    }

    /// Takes the row that came first of all that may be published now.
    pub(super) fn next_in_order(&mut self) -> Option<Row> {
        let rows = self.ready.iter().enumerate();
        let rows =
            rows.flat_map(|(channel, rows)| rows.iter().enumerate().map(move |(at, row)| (row.tag, channel, at)));
        let (_, channel, at) = rows.min()?;
        let row = self.ready[channel].remove(at)?;
        self.leaves(&row.message.topic);
        Some(row)
    }

    /// Notes that the row of this key that was in flight is settled. The next one becomes ready.
    pub(super) fn settled(&mut self, lane: Option<LaneId>) {
        let Some(lane) = lane.filter(|_| !self.pipeline) else { return };
        match self.lanes.get_mut(&lane).and_then(VecDeque::pop_front) {
            Some(row) => self.ready[row.channel].push_back(row),
            None => {
                self.lanes.remove(&lane);
            }
        }
    }

    /// Removes all rows of a key that are not published, and returns them in order.
    pub(super) fn take_key(&mut self, lane: LaneId) -> Vec<Row> {
        let mut taken = Vec::new();
        for ready in &mut self.ready {
            let (of_key, others) = std::mem::take(ready).into_iter().partition(|row| row.lane == Some(lane));
            *ready = others;
            taken.extend::<VecDeque<Row>>(of_key);
        }
        taken.extend(self.lanes.remove(&lane).unwrap_or_default());
        for row in &taken {
            self.leaves(&row.message.topic);
        }
        taken.sort_unstable_by_key(|row| row.tag);
        taken
    }

    /// Removes all rows of a topic that are not published, and returns them in order.
    pub(super) fn take_topic(&mut self, topic: &str) -> Vec<Row> {
        if !self.topics.contains_key(topic) {
            return Vec::new();
        }
        let mut taken = Vec::new();
        for ready in &mut self.ready {
            for row in std::mem::take(ready) {
                if row.message.topic == topic { taken.push(row) } else { ready.push_back(row) }
            }
        }
        // A key whose first row was ready is removed. One with a row in flight stays, alone.
        for lane in taken.iter().filter_map(|row| row.lane).collect::<Vec<_>>() {
            taken.extend(self.lanes.remove(&lane).unwrap_or_default());
        }
        for waiting in self.lanes.values_mut() {
            if waiting.front().is_some_and(|row| row.message.topic == topic) {
                taken.extend(std::mem::take(waiting));
            }
        }
        self.topics.remove(topic);
        taken.sort_unstable_by_key(|row| row.tag);
        taken
    }

    fn leaves(&mut self, topic: &str) {
        if let Some(count) = self.topics.get_mut(topic) {
            *count -= 1;
            if *count == 0 {
                self.topics.remove(topic);
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn drain(lanes: &mut Lanes) -> Vec<Row> {
        let mut rows: Vec<Row> =
            (0..lanes.ready.len()).flat_map(|c| std::iter::from_fn(|| lanes.next(c)).collect::<Vec<_>>()).collect();
        rows.sort_unstable_by_key(|row| row.tag);
        rows
    }

    fn tags(rows: &[Row]) -> Vec<u64> {
        rows.iter().map(|row| row.tag).collect()
    }

    #[test]
    fn r20_of_one_key_only_one_row_is_out_and_keyless_rows_never_wait() {
        let mut lanes = Lanes::new(3, false);
        for (tag, key) in [(1, Some("a")), (2, Some("a")), (3, None), (4, Some("b")), (5, None), (6, Some("a"))] {
            lanes.add(tag, OutgoingMessage::sample("t", key));
        }
        let first = drain(&mut lanes);
        assert_eq!(tags(&first), [1, 3, 4, 5]);
        lanes.settled(first[0].lane);
        let second = drain(&mut lanes);
        assert_eq!(tags(&second), [2]);
        assert_eq!(second[0].channel, first[0].channel, "a key keeps its channel");
        lanes.settled(second[0].lane);
        assert_eq!(tags(&drain(&mut lanes)), [6]);
    }

    #[test]
    fn in_order_each_row_comes_after_all_that_came_before_it() {
        let mut lanes = Lanes::new(3, false);
        for (tag, key) in (1..).zip([Some("a"), None, Some("a"), Some("b"), None, Some("a")]) {
            lanes.add(tag, OutgoingMessage::sample("t", key));
        }
        let in_order = std::iter::from_fn(|| {
            let row = lanes.next_in_order()?;
            lanes.settled(row.lane);
            Some(row.tag)
        });
        assert_eq!(in_order.collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6]);
        assert!(lanes.topics.is_empty());
    }

    #[test]
    fn r20_the_same_key_of_another_topic_is_another_key() {
        let mut lanes = Lanes::new(1, false);
        lanes.add(1, OutgoingMessage::sample("t", Some("a")));
        lanes.add(2, OutgoingMessage::sample("u", Some("a")));
        assert_eq!(tags(&drain(&mut lanes)), [1, 2]);
    }

    #[test]
    fn r20_given_up_lets_a_key_run_ahead_on_one_channel() {
        let mut lanes = Lanes::new(4, true);
        for tag in 1..=3 {
            lanes.add(tag, OutgoingMessage::sample("t", Some("a")));
        }
        let rows = drain(&mut lanes);
        assert_eq!(tags(&rows), [1, 2, 3]);
        assert!(rows.iter().all(|row| row.channel == rows[0].channel));
    }

    #[test]
    fn a_key_is_taken_out_whole_and_others_stay() {
        for pipeline in [false, true] {
            let mut lanes = Lanes::new(2, pipeline);
            for (tag, key) in [(1, Some("a")), (2, Some("a")), (3, Some("b")), (4, None), (5, Some("a"))] {
                lanes.add(tag, OutgoingMessage::sample("t", key));
            }
            let lane = lane_id("t", b"a");
            let channel = lanes.ready.iter().position(|ready| ready.iter().any(|row| row.lane == Some(lane))).unwrap();
            while lanes.next(channel).unwrap().tag != 1 {}
            assert_eq!(tags(&lanes.take_key(lane)), [2, 5]);
            lanes.add(6, OutgoingMessage::sample("t", Some("a")));
            assert!(tags(&drain(&mut lanes)).contains(&6), "what comes later goes");
            assert!(lanes.topics.is_empty());
        }
    }

    #[test]
    fn a_topic_is_taken_out_whole_and_others_stay() {
        let mut lanes = Lanes::new(2, false);
        for (tag, topic, key) in [
            (1, "t", Some("a")),
            (2, "t", Some("a")),
            (3, "u", Some("a")),
            (4, "t", None),
            (5, "t", Some("b")),
            (6, "t", Some("b")),
        ] {
            lanes.add(tag, OutgoingMessage::sample(topic, key));
        }
        let in_flight = (0..2)
            .find_map(|channel| {
                lanes.ready[channel].front().is_some_and(|row| row.tag == 1).then(|| lanes.next(channel).unwrap())
            })
            .unwrap();
        assert_eq!(tags(&lanes.take_topic("t")), [2, 4, 5, 6]);
        assert!(lanes.take_topic("t").is_empty());
        lanes.settled(in_flight.lane);
        assert_eq!(tags(&drain(&mut lanes)), [3]);
        lanes.add(7, OutgoingMessage::sample("t", Some("b")));
        assert_eq!(tags(&drain(&mut lanes)), [7], "nothing of the key is left that it would wait for");
    }
}
