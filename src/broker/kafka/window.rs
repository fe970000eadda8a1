//! The rows that a publishing session holds until the broker has proven them: the bounds, and how
//! delivery reports get to the relay.
//!
//! Promises: rows and bytes in the client are bounded; at a bound the sender waits, until there is
//! room or the session ends. No outcome is lost, even if the future that waits for it is dropped. A
//! report that proves nothing settles no row: the next session sends the row again. After a
//! refusal no later row of that key or topic is sent until the relay received that outcome (R15).

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use rdkafka::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use rdkafka::message::{DeliveryResult, Message};
use rdkafka::producer::ProducerContext;
use tokio::sync::Notify;

use super::context::{METADATA, Reports, id_of_topic};
use super::errors;
use super::opening::{May, Opening, Place};
use super::topology::TopicLimits;
use crate::broker::{Receipt, Refusal, Settled};

/// Rows between `send` and `settle`.
#[derive(Debug)]
pub(super) struct PublishWindow {
    rows_max: usize,
    bytes_max: usize,
    /// A row of at most so many bytes may share a batch with others.
    batch_max: usize,
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    // The client carries the number of a row's slot; that needs no allocation per row.
    slots: Vec<Slot>,
    free: Vec<usize>,
    rows: usize,
    bytes: usize,
    settled: Vec<Settled>,
    /// How often the relay took outcomes. It knows of a refusal whose number is lower.
    handovers: u64,
    /// Keys of refused messages, each with `handovers` at its last refusal.
    refused_keys: HashMap<(String, Vec<u8>), u64>,
    /// Refused topics, each with `handovers` at its last refusal, and the reason.
    refused_topics: HashMap<String, (u64, String)>,
    /// Topics that refused a message, perhaps as too large: their limits are asked for again.
    too_small: Vec<String>,
    /// A topic that refused a batch as too large.
    refused_batch: Option<String>,
    /// True where a report came that may name the cause, since the session was last seen to work.
    has_refused: bool,
    /// Set where a refusal may be due to this session's batch size, or where a report of success
    /// proves nothing. Then the session must end.
    stale: Option<String>,
    opening: Opening,
    waiting: Option<Wait>,
}

/// What is kept of a row in flight.
#[derive(Debug, Clone, Copy)]
struct Slot {
    tag: u64,
    weight: usize,
    /// The partition that it is the first row of (`opening`).
    first_of: Option<i32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wait {
    Room,
    Outcome,
}

impl PublishWindow {
    pub(super) fn new(rows_max: usize, bytes_max: usize, batch_max: usize) -> Self {
        Self { rows_max, bytes_max, batch_max, state: Mutex::default(), changed: Notify::new() }
    }

    /// Returns a slot for a row, or `None` where a bound is reached. One row is always allowed.
    pub(super) fn reserve(&self, tag: u64, weight: usize) -> Option<usize> {
        let mut state = self.state.lock();
        if state.rows > 0 && (state.rows >= self.rows_max || state.bytes.saturating_add(weight) > self.bytes_max) {
            if state.opening.has_opened() {
                // Rows that wait in the window may go on, which makes room.
                self.changed.notify_one();
            } else {
                state.waiting = Some(Wait::Room);
            }
            return None;
        }
        state.rows += 1;
        state.bytes += weight;
        let row = Slot { tag, weight, first_of: None };
        Some(match state.free.pop() {
            Some(slot) => {
                state.slots[slot] = row;
                slot
            }
            None => {
                state.slots.push(row);
                state.slots.len() - 1
            }
        })
    }

    /// Waits for room, an outcome or an error. The caller checks which.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }

    pub(super) fn wake(&self) {
        self.changed.notify_one();
    }

    /// Why a row may not be sent: an earlier row of its topic or key was refused. Else `None`.
    pub(super) fn stands_behind(&self, topic: &str, key: Option<&[u8]>) -> Option<Refusal> {
        let state = self.state.lock();
        if state.refused_keys.is_empty() && state.refused_topics.is_empty() {
            return None;
        }
        if let Some((_, reason)) = state.refused_topics.get(topic) {
            return Some(Refusal::Destination(reason.clone()));
        }
        let behind_key = key.is_some_and(|key| state.refused_keys.contains_key(&(topic.to_owned(), key.to_vec())));
        behind_key.then(|| {
            Refusal::Behind(format!("not sent to kafka topic `{topic}`: an earlier message of its key was refused"))
        })
    }

    pub(super) fn learn_partitions(&self, topic: &str, count: usize) {
        self.state.lock().opening.learn(topic, count);
    }

    /// The partition whose first row a row must wait for; `None` where it may be sent.
    pub(super) fn waits_for(&self, slot: usize, topic: &str, key: &[u8]) -> Option<i32> {
        let mut state = self.state.lock();
        if state.slots.get(slot).is_none_or(|slot| slot.first_of.is_some()) {
            return None;
        }
        match state.opening.may_go(topic, key) {
            May::Go => None,
            May::GoFirst(partition) => {
                state.slots[slot].first_of = Some(partition);
                None
            }
            May::Wait(partition) => Some(partition),
        }
    }

    pub(super) fn partition_of(&self, topic: &str, key: &[u8]) -> Option<i32> {
        self.state.lock().opening.partition_of(topic, key)
    }

    pub(super) fn take_opened(&self) -> Vec<Place> {
        self.state.lock().opening.take_opened()
    }

    /// Lets the rows that wait for these partitions be looked at again.
    pub(super) fn open_again(&self, places: impl Iterator<Item = Place>) {
        self.state.lock().opening.open_again(places);
    }

    /// Asks to be woken by the next outcome. Returns false where rows may go on already.
    pub(super) fn wakes_when_opened(&self) -> bool {
        let mut state = self.state.lock();
        let opened = state.opening.has_opened();
        if !opened {
            state.waiting = Some(Wait::Outcome);
        }
        !opened
    }

    /// Forgets refused keys of which the relay knows, and refused topics once every row is settled
    /// and every outcome was taken. Called at the start of `send`: rows that come now were sent
    /// with that knowledge.
    pub(super) fn forget_what_is_known(&self) {
        let mut state = self.state.lock();
        state.opening.forget_old_proofs(Instant::now());
        let now = state.handovers;
        state.refused_keys.retain(|_, refused| *refused == now);
        if state.rows == 0 && state.settled.is_empty() {
            state.refused_topics.clear();
        }
    }

    /// Lifts the refusal of these topics, where the relay has taken it: a relay that asks again
    /// wants to send to them.
    pub(super) fn forgive_topics(&self, topics: &[String]) {
        let mut state = self.state.lock();
        let now = state.handovers;
        state.refused_topics.retain(|topic, (refused, _)| *refused == now || !topics.contains(topic));
    }

    /// The topics that must be seen in the metadata again before their next row: they refused a row
    /// as a destination or as too large, or have more partitions than was learned.
    pub(super) fn changed_topics(&self) -> Vec<String> {
        let mut state = self.state.lock();
        let mut topics = std::mem::take(&mut state.too_small);
        topics.extend(state.opening.take_outgrown());
        topics.extend(state.refused_topics.keys().cloned());
        topics
    }

    /// Takes the topic that refused a batch as too large.
    pub(super) fn take_refused_batch(&self) -> Option<String> {
        self.state.lock().refused_batch.take()
    }

    /// Whether a row was refused since `forget_refusal`.
    pub(super) fn has_refused(&self) -> bool {
        self.state.lock().has_refused
    }

    /// Forgets that a row was refused: the session goes on in spite of it.
    pub(super) fn forget_refusal(&self) {
        self.state.lock().has_refused = false;
    }

    pub(super) fn stale(&self) -> Option<String> {
        self.state.lock().stale.clone()
    }

    /// Handles a row that was refused as too large. If the row may have shared a batch, the topic's
    /// limit may have been lowered and the batch was too large, not the row: returns true, and the
    /// session ends. A row that was alone was itself refused: returns false.
    fn is_stale(&self, topic: &str, bytes: usize) -> bool {
        let mut state = self.state.lock();
        if state.rows <= 1 || bytes > self.batch_max {
            return false;
        }
        state.stale = Some(format!("kafka topic `{topic}` takes smaller batches than before"));
        state.too_small.push(topic.to_owned());
        state.refused_batch = Some(topic.to_owned());
        state.has_refused = true;
        drop(state);
        self.changed.notify_one();
        true
    }

    /// Handles a report of success. Without a proof the row stays unsettled and the session ends,
    /// so that the next one sends the row again. Once the session is in doubt, no report of success
    /// is a proof: where Kafka gives no offset for a batch, librdkafka counts the offsets of its
    /// rows up from -1.
    fn delivered(&self, slot: usize, topic: &str, key: Option<&[u8]>, partition: i32, offset: i64) {
        let mut state = self.state.lock();
        if let Some(receipt) = receipt(partition, offset).filter(|_| state.stale.is_none()) {
            self.settle_in(&mut state, slot, topic, key, Ok(receipt));
            return;
        }
        let why = || format!("kafka topic `{topic}`: a message was reported as delivered without an offset");
        state.stale.get_or_insert_with(why);
        // No later report explains more, so nobody waits for one.
        state.has_refused = true;
        drop(state);
        self.changed.notify_one();
    }

    /// Settles a row that never got a slot.
    pub(super) fn settle_unsent(&self, tag: u64, refusal: Refusal) {
        let mut state = self.state.lock();
        state.settled.push(Settled { tag, outcome: Err(refusal) });
        self.tell(&mut state);
    }

    /// Settles a row whose topic cannot be used, and refuses the rows of the topic that follow.
    pub(super) fn refuse_topic(&self, tag: u64, topic: &str, reason: String) {
        self.state.lock().refuse_topic(topic, &reason);
        self.settle_unsent(tag, Refusal::Destination(reason));
    }

    /// Settles a row that is refused before it is sent, because of its own content, and holds back
    /// the rows of its key that follow.
    pub(super) fn refuse_message(&self, tag: u64, topic: &str, key: Option<&[u8]>, reason: String) {
        self.state.lock().refuse_message(topic, key);
        self.settle_unsent(tag, Refusal::Message(reason));
    }

    /// Settles a row that has a slot.
    pub(super) fn settle(&self, slot: usize, topic: &str, key: Option<&[u8]>, outcome: Result<Receipt, Refusal>) {
        self.settle_in(&mut self.state.lock(), slot, topic, key, outcome);
    }

    fn settle_in(
        &self,
        state: &mut State,
        slot: usize,
        topic: &str,
        key: Option<&[u8]>,
        outcome: Result<Receipt, Refusal>,
    ) {
        let Some(Slot { tag, weight, first_of }) = state.slots.get(slot).copied() else { return };
        state.free.push(slot);
        state.rows = state.rows.saturating_sub(1);
        state.bytes = state.bytes.saturating_sub(weight);
        state.has_refused |= outcome.is_err();
        let partition = match &outcome {
            Ok(Receipt::Offset { partition, .. }) => Some(*partition),
            _ => None,
        };
        state.opening.settled(topic, first_of, partition);
        match &outcome {
            Err(Refusal::Destination(reason)) => state.refuse_topic(topic, reason),
            Err(Refusal::Message(_)) => state.refuse_message(topic, key),
            Err(Refusal::Session(_)) => state.refuse_key(topic, key),
            Ok(_) | Err(Refusal::Behind(_)) => {}
        }
        state.settled.push(Settled { tag, outcome });
        self.tell(state);
    }

    fn tell(&self, state: &mut State) {
        let now = match state.waiting {
            None => false,
            Some(_) if state.opening.has_opened() => true,
            Some(Wait::Outcome) => true,
            // Wakes the sender only when a quarter of the window is free, not for each row.
            Some(Wait::Room) => {
                state.rows == 0
                    || (state.rows <= self.rows_max - self.rows_max / 4
                        && state.bytes <= self.bytes_max - self.bytes_max / 4)
            }
        };
        if now {
            state.waiting = None;
            self.changed.notify_one();
        }
    }

    /// Moves the outcomes into `settled`. Returns true if there were any, or no row is in flight.
    pub(super) fn take(&self, settled: &mut Vec<Settled>) -> bool {
        let mut state = self.state.lock();
        if state.settled.is_empty() {
            state.waiting = Some(Wait::Outcome);
            return state.rows == 0;
        }
        state.handovers += 1;
        if settled.is_empty() {
            std::mem::swap(settled, &mut state.settled);
        } else {
            settled.append(&mut state.settled);
        }
        true
    }

    /// True where no row ever had a slot (slots are used again and never removed), and no outcome
    /// waits for the relay.
    pub(super) fn is_unused(&self) -> bool {
        let state = self.state.lock();
        state.slots.is_empty() && state.settled.is_empty()
    }
}

impl State {
    fn refuse_message(&mut self, topic: &str, key: Option<&[u8]>) {
        if !self.too_small.iter().any(|known| known == topic) {
            self.too_small.push(topic.to_owned());
        }
        self.refuse_key(topic, key);
    }

    fn refuse_key(&mut self, topic: &str, key: Option<&[u8]>) {
        if let Some(key) = key {
            self.refused_keys.insert((topic.to_owned(), key.to_vec()), self.handovers);
        }
    }

    fn refuse_topic(&mut self, topic: &str, reason: &str) {
        self.refused_topics.insert(topic.to_owned(), (self.handovers, reason.to_owned()));
    }
}

/// What a report of success proves. When Kafka takes a batch, librdkafka also reports the earlier
/// rows that it still had to send again as delivered, without asking Kafka. They may not be stored,
/// if Kafka did not know the producer on that partition. Such a report has no offset. One that has
/// none for another reason, such as a batch that Kafka has twice, is sent again, which is harmless.
fn receipt(partition: i32, offset: i64) -> Option<Receipt> {
    (offset >= 0).then_some(Receipt::Offset { partition, offset })
}

/// The callbacks that librdkafka calls on the thread that polls the producer.
#[derive(Debug)]
pub(super) struct PublishContext {
    pub(super) window: Arc<PublishWindow>,
    pub(super) reports: Arc<Reports>,
    pub(super) limits: Arc<TopicLimits>,
}

impl ClientContext for PublishContext {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, line: &str) {
        if facility == METADATA
            && let Some((topic, id)) = id_of_topic(line)
        {
            self.limits.saw_id(topic, id);
        }
        self.reports.log(level, facility, line);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        self.reports.error(&error, reason);
        self.window.wake();
    }
}

impl ProducerContext for PublishContext {
    type DeliveryOpaque = usize;

    fn delivery(&self, result: &DeliveryResult<'_>, slot: usize) {
        match result {
            Ok(record) => {
                self.reports.works();
                self.window.delivered(slot, record.topic(), record.key(), record.partition(), record.offset());
            }
            // Purged with the session, whose end is reported elsewhere.
            Err((KafkaError::MessageProduction(Code::Fatal | Code::PurgeQueue | Code::PurgeInflight), _)) => {}
            Err((error, record)) => {
                let topic = record.topic();
                let bytes = record.payload().map_or(0, <[u8]>::len) + record.key().map_or(0, <[u8]>::len);
                let is_size = error.rdkafka_error_code() == Some(Code::MessageSizeTooLarge);
                if is_size && self.window.is_stale(topic, bytes) {
                    return;
                }
                self.window.settle(slot, topic, record.key(), Err(errors::refusal(topic, error)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::time::Duration;

    const OK: Result<Receipt, Refusal> = Ok(Receipt::Confirm);

    fn refused() -> Result<Receipt, Refusal> {
        Err(Refusal::Message("too large".into()))
    }

    #[test]
    fn rows_and_bytes_are_bounded_but_one_row_always_fits() {
        let window = PublishWindow::new(2, 100, 10);
        let large = window.reserve(1, 1_000).unwrap();
        assert_eq!(window.reserve(2, 1), None);
        window.settle(large, "t", None, OK);
        let first = window.reserve(3, 50).unwrap();
        let second = window.reserve(4, 50).unwrap();
        assert_eq!(window.reserve(5, 0), None);
        window.settle(second, "t", None, OK);
        assert_eq!(window.reserve(6, 51), None);
        window.settle(first, "t", None, OK);
        assert!(window.reserve(7, 51).is_some());
        let mut settled = Vec::new();
        window.take(&mut settled);
        assert_eq!(settled.iter().map(|row| row.tag).collect::<Vec<_>>(), [1, 4, 3]);
        assert_eq!(window.state.lock().rows, 1);
    }

    #[test]
    fn r15_nothing_is_sent_behind_a_refusal_until_its_outcome_was_seen() {
        let window = PublishWindow::new(10, 1_000, 10);
        let slots = [window.reserve(1, 1).unwrap(), window.reserve(2, 1).unwrap()];
        window.settle(slots[0], "t", Some(b"a"), refused());
        assert!(window.stands_behind("t", Some(b"a")).is_some());
        assert!(window.stands_behind("t", Some(b"b")).is_none());
        assert!(window.stands_behind("u", Some(b"a")).is_none());
        assert!(window.stands_behind("t", None).is_none());
        window.forget_what_is_known();
        assert!(window.stands_behind("t", Some(b"a")).is_some(), "the relay has not seen it");
        window.take(&mut Vec::new());
        assert!(window.stands_behind("t", Some(b"a")).is_some(), "not while rows are handed over");
        window.forget_what_is_known();
        assert!(window.stands_behind("t", Some(b"a")).is_none());
        window.settle(slots[1], "t", Some(b"b"), refused());
        window.forget_what_is_known();
        assert!(window.stands_behind("t", Some(b"b")).is_some());
    }

    #[test]
    fn a_refused_topic_holds_all_its_keys() {
        let window = PublishWindow::new(10, 1_000, 10);
        let slot = window.reserve(1, 1).unwrap();
        window.settle(slot, "t", Some(b"a"), Err(Refusal::Destination("gone".into())));
        for key in [None, Some(b"z".as_slice())] {
            assert_eq!(window.stands_behind("t", key), Some(Refusal::Destination("gone".into())));
        }
        assert_eq!(window.stands_behind("u", None), None);
        assert_eq!(window.changed_topics(), ["t"]);
    }

    /// It fails where one flag serves all keys: the key stays refused as long as others are.
    #[test]
    fn r15_what_the_relay_knows_of_is_told_key_by_key_and_a_later_refusal_is_not_known() {
        let window = PublishWindow::new(10, 1_000, 10);
        let slots = [1, 2, 3].map(|tag| window.reserve(tag, 1).unwrap());
        window.settle(slots[0], "t", Some(b"a"), refused());
        window.settle(slots[1], "t", None, Err(Refusal::Destination("gone".into())));
        window.take(&mut Vec::new());
        window.settle(slots[2], "t", Some(b"b"), refused());
        window.refuse_topic(4, "t", "still gone".into());
        window.forget_what_is_known();
        window.forgive_topics(&["t".to_owned()]);
        assert_eq!(window.stands_behind("t", Some(b"a")), Some(Refusal::Destination("still gone".into())));
        window.take(&mut Vec::new());
        window.forgive_topics(&["t".to_owned()]);
        assert!(window.stands_behind("t", Some(b"a")).is_none());
        assert!(window.stands_behind("t", Some(b"b")).is_some(), "nothing was sent with that knowledge yet");
    }

    /// Shown by: forgetting refused topics only when nothing is in flight. A topic that worked
    /// again was then refused for as long as other topics had rows in flight.
    #[test]
    fn a_refused_topic_is_forgiven_when_it_is_asked_for_after_its_refusal_was_taken() {
        let window = PublishWindow::new(10, 1_000, 10);
        let [slot, _other] = [1, 2].map(|tag| window.reserve(tag, 1).unwrap());
        window.settle(slot, "t", Some(b"a"), Err(Refusal::Destination("gone".into())));
        window.forgive_topics(&["t".to_owned()]);
        assert!(window.stands_behind("t", None).is_some(), "nobody knows of it yet");
        window.take(&mut Vec::new());
        assert!(window.stands_behind("t", None).is_some(), "nobody asked for it");
        window.forgive_topics(&["t".to_owned()]);
        assert!(window.stands_behind("t", None).is_none());
    }

    /// It fails where every report of success is believed: the row is then lost.
    #[test]
    fn g2_a_row_that_was_reported_as_delivered_without_an_offset_is_not_proven_and_ends_the_session() {
        let window = PublishWindow::new(10, 1_000, 10);
        let [stored, doubtful, counted] = [1, 2, 3].map(|tag| window.reserve(tag, 1).unwrap());
        // `RD_KAFKA_OFFSET_INVALID`, and what Kafka answers where it knows no offset.
        for offset in [-1_001, -1] {
            assert_eq!(receipt(0, offset), None);
        }
        window.delivered(stored, "t", None, 0, 7);
        window.delivered(doubtful, "t", None, 0, -1);
        assert!(window.stale().is_some_and(|why| why.contains("`t`")));
        // The next one of the same batch.
        window.delivered(counted, "t", None, 0, 0);
        let mut settled = Vec::new();
        assert!(window.take(&mut settled));
        assert_eq!(settled.iter().map(|row| row.tag).collect::<Vec<_>>(), [1]);
        assert_eq!(settled[0].outcome, Ok(Receipt::Offset { partition: 0, offset: 7 }));
        assert_eq!(window.state.lock().rows, 2, "the next session sends the others again");
    }

    #[tokio::test]
    async fn an_outcome_is_not_lost_when_the_one_who_waits_is_dropped() {
        let window = Arc::new(PublishWindow::new(10, 1_000, 10));
        let slot = window.reserve(1, 1).unwrap();
        let mut settled = Vec::new();
        assert!(!window.take(&mut settled));
        let dropped = tokio::time::timeout(Duration::from_millis(5), window.changed()).await;
        assert!(dropped.is_err());
        window.settle(slot, "t", None, OK);
        assert!(window.take(&mut settled));
        assert_eq!(settled.len(), 1);
        tokio::time::timeout(Duration::from_secs(5), window.changed()).await.unwrap();
    }
}
