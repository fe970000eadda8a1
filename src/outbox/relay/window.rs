//! The rows that were read and are not marked yet: batches as read, rows to be sent, rows as sent.
//!
//! Promise: a mark covers only the oldest batches, each with all its rows proven or diverted. Tags
//! ascend by one. The rows since the oldest unmarked one are counted, to bound what a crash sends
//! again.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Duration;

use uuid::Uuid;

use crate::message::OutgoingMessage;
use crate::outbox::port::{Diversion, Mark};

/// How many keys are remembered with the time of their last settled row. Above it all are
/// forgotten, and the rows in flight count from the time they were sent.
const TURNS_MAX: usize = 20_000;
/// How many rows one mark discards. An operator may discard all rows at once, and the transaction
/// of a mark must end before its statements time out and before the lease does.
const DISCARDED_MAX: usize = 1_000;

/// Rows that were read together.
#[derive(Debug)]
struct Batch {
    rows: usize,
    /// Rows that are neither proven nor diverted.
    left: usize,
    /// What its mark writes. `through`: the store's number of the batch; `None` for released rows.
    mark: Mark,
}

impl Batch {
    /// True where the batch had rows or a decision, so that it is worth a write.
    fn matters(&self) -> bool {
        self.rows > 0 || self.mark.moves_rows()
    }
}

/// A row that was read and is not sent yet. A checkpoint has followed the read of a new one.
#[derive(Debug)]
pub(super) struct Unsent {
    pub(super) position: i64,
    pub(super) batch: u64,
    pub(super) message: OutgoingMessage,
    /// True where the row comes from the dead and held table.
    pub(super) is_release: bool,
    /// True where the row must be in flight alone.
    pub(super) alone: bool,
}

#[derive(Debug, Clone)]
pub(super) struct Sent {
    pub(super) position: i64,
    /// The message id, for the log.
    pub(super) id: Uuid,
    pub(super) batch: u64,
    topic: u32,
    pub(super) key: Option<Box<str>>,
    weight: usize,
    /// When it was sent, by the session's own clock.
    at: Duration,
    /// True where the row came from the dead and held table.
    pub(super) is_release: bool,
    settled: bool,
    proven: bool,
}

/// Numbers for topics, so that a row in flight needs only four bytes for its topic.
#[derive(Debug, Default)]
struct Topics {
    numbers: HashMap<String, u32>,
    names: Vec<String>,
}

impl Topics {
    fn number(&mut self, name: &str) -> u32 {
        if let Some(number) = self.numbers.get(name) {
            return *number;
        }
        let number = u32::try_from(self.names.len()).unwrap_or(u32::MAX);
        self.numbers.insert(name.to_owned(), number);
        self.names.push(name.to_owned());
        number
    }

    fn name(&self, number: u32) -> &str {
        self.names.get(number as usize).map_or("", String::as_str)
    }
}

/// The rows in flight and the unmarked batches of one session.
#[derive(Debug, Default)]
pub(super) struct Window {
    batches: VecDeque<Batch>,
    first_batch: u64,
    sent: VecDeque<Sent>,
    first_tag: u64,
    topics: Topics,
    settled_at: HashMap<(u32, Box<str>), Duration>,
    in_flight: usize,
    span: usize,
    bytes: usize,
}

impl Window {
    /// Opens a batch of so many rows. Returns its number in this window.
    pub(super) fn open(&mut self, through: Option<u64>, rows: usize) -> u64 {
        // While a broker is blocked, reads without rows go on. One batch stands for all of them, so
        // that the window stays bounded (G11).
        if rows == 0
            && through.is_some()
            && let Some(last) = self.batches.back_mut()
            && !last.matters()
            && last.mark.through.is_some()
        {
            last.mark.through = through;
            return self.first_batch + self.batches.len() as u64 - 1;
        }
        let number = self.first_batch + self.batches.len() as u64;
        self.batches.push_back(Batch { rows, left: rows, mark: Mark { through, ..Mark::default() } });
        self.span += rows;
        number
    }

    fn batch(&mut self, number: u64) -> Option<&mut Batch> {
        let index = usize::try_from(number.checked_sub(self.first_batch)?).ok()?;
        self.batches.get_mut(index)
    }

    /// Adds a row that is sent now. Returns its tag.
    pub(super) fn send(&mut self, row: &Unsent, at: Duration) -> u64 {
        let tag = self.first_tag + self.sent.len() as u64;
        let (topic, weight) = (self.topics.number(&row.message.topic), row.message.weight());
        self.in_flight += 1;
        self.bytes += weight;
        self.sent.push_back(Sent {
            position: row.position,
            id: row.message.id,
            batch: row.batch,
            topic,
            key: row.message.key.as_deref().map(Into::into),
            weight,
            at,
            is_release: row.is_release,
            settled: false,
            proven: false,
        });
        tag
    }

    /// The row of a tag; `None` unless it is in flight.
    pub(super) fn get(&self, tag: u64) -> Option<&Sent> {
        let index = usize::try_from(tag.checked_sub(self.first_tag)?).ok()?;
        self.sent.get(index).filter(|sent| !sent.settled)
    }

    pub(super) fn topic(&self, sent: &Sent) -> &str {
        self.topics.name(sent.topic)
    }

    pub(super) fn prove(&mut self, tag: u64) {
        let Some((number, position, is_release)) = self.leave_flight(tag, true) else { return };
        self.row_done(number, |mark| {
            if is_release {
                mark.released.push(position);
            }
        });
    }

    /// Takes a refused row out of flight, on which `divert`, `change` or `leave` then decides.
    pub(super) fn refuse(&mut self, tag: u64) -> Option<Sent> {
        let sent = self.get(tag)?.clone();
        self.leave_flight(tag, false)?;
        Some(sent)
    }

    /// Returns the batch, the position, and whether it was released from the table.
    fn leave_flight(&mut self, tag: u64, proven: bool) -> Option<(u64, i64, bool)> {
        let index = usize::try_from(tag.checked_sub(self.first_tag)?).ok()?;
        let sent = self.sent.get_mut(index).filter(|sent| !sent.settled)?;
        (sent.settled, sent.proven) = (true, proven);
        let left = (sent.batch, sent.position, sent.is_release);
        self.in_flight -= 1;
        self.bytes -= sent.weight;
        while self.sent.front().is_some_and(|sent| sent.settled) {
            self.sent.pop_front();
            self.first_tag += 1;
        }
        Some(left)
    }

    /// Notes that a row of this batch is done with, and what the mark says of it.
    fn row_done(&mut self, number: u64, say: impl FnOnce(&mut Mark)) {
        if let Some(batch) = self.batch(number) {
            batch.left = batch.left.saturating_sub(1);
            say(&mut batch.mark);
        }
    }

    /// Notes that a row of this batch goes to the dead and held table.
    pub(super) fn divert(&mut self, number: u64, position: i64, diversion: Diversion) {
        self.row_done(number, |mark| mark.diverted.push((position, diversion)));
    }

    /// Notes that a row of the dead and held table stays there, with another reason.
    pub(super) fn change(&mut self, number: u64, position: i64, diversion: Diversion) {
        self.row_done(number, |mark| mark.changed.push((position, diversion)));
    }

    /// Notes that a row of the dead and held table stays there unchanged.
    pub(super) fn leave(&mut self, number: u64) {
        self.row_done(number, |_| {});
    }

    /// Discards a dead or held row with the next mark.
    pub(super) fn discard(&mut self, position: i64) {
        self.decided(|mark| mark.discarded.push(position));
    }

    /// Notes that a trial has proven a row of the dead and held table: the next mark removes it.
    pub(super) fn proven_beside(&mut self, position: i64) {
        self.decided(|mark| mark.released.push(position));
    }

    /// Notes that a row of the dead and held table stays there after a trial, with another reason.
    pub(super) fn changed_beside(&mut self, position: i64, diversion: Diversion) {
        self.decided(|mark| mark.changed.push((position, diversion)));
    }

    fn decided(&mut self, decide: impl FnOnce(&mut Mark)) {
        let mut mark = Mark::default();
        decide(&mut mark);
        self.batches.push_back(Batch { rows: 0, left: 0, mark });
    }

    /// Takes the oldest batches that are done, as one mark; empty where the oldest is not done. Of
    /// many discards it takes the first ones.
    pub(super) fn take_done(&mut self) -> Mark {
        let mut mark = Mark::default();
        while mark.discarded.len() < DISCARDED_MAX && self.batches.front().is_some_and(|batch| batch.left == 0) {
            let Some(Batch { rows, mark: next, .. }) = self.batches.pop_front() else { break };
            self.first_batch += 1;
            self.span -= rows;
            mark.through = next.through.or(mark.through);
            mark.diverted.extend(next.diverted);
            mark.released.extend(next.released);
            mark.changed.extend(next.changed);
            mark.discarded.extend(next.discarded);
        }
        // A trial may refuse a row again before its first change is marked. A store changes each
        // row of a mark once.
        let mut later = HashSet::new();
        mark.changed.reverse();
        mark.changed.retain(|(position, _)| later.insert(*position));
        mark.changed.reverse();
        mark
    }

    /// The number of rows that are sent and not settled.
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// The rows of unmarked batches: most of what a crash sends again.
    pub(super) fn span(&self) -> usize {
        self.span
    }

    /// The bytes of rows that are sent and not settled.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// True where no batch with rows or a decision waits for a mark.
    pub(super) fn is_empty(&self) -> bool {
        !self.batches.iter().any(Batch::matters)
    }

    /// True where the oldest batches are done and their mark would write something.
    pub(super) fn has_something_done(&self) -> bool {
        self.batches.iter().take_while(|batch| batch.left == 0).any(Batch::matters)
    }

    /// True where the mark of the oldest batches that are done would say more than that rows are
    /// proven: a row diverted, released, changed or discarded.
    pub(super) fn has_decision_done(&self) -> bool {
        self.batches.iter().take_while(|batch| batch.left == 0).any(|batch| batch.mark.moves_rows())
    }

    /// True where every row of the window is proven, and nothing else waits for a mark.
    pub(super) fn is_proven(&self) -> bool {
        self.batches.iter().all(|batch| batch.left == 0 && !batch.mark.moves_rows())
    }

    /// The position of the first row that is sent and not settled.
    pub(super) fn first_unproven(&self) -> Option<i64> {
        self.sent.iter().find(|sent| !sent.settled).map(|sent| sent.position)
    }

    /// The message ids of proven rows of the same key that were sent after this one: if this row is
    /// refused, they are an order incident.
    pub(super) fn proven_after(&self, tag: u64) -> Vec<Uuid> {
        let Some(row) = self.get(tag).filter(|row| row.key.is_some()) else { return Vec::new() };
        let from = usize::try_from(tag + 1 - self.first_tag).unwrap_or(usize::MAX);
        let later = self.sent.iter().skip(from).filter(|sent| sent.proven);
        later.filter(|sent| (sent.topic, &sent.key) == (row.topic, &row.key)).map(|sent| sent.id).collect()
    }

    /// The topics and keys, among these, of which a row is in flight: the broker may still take it.
    pub(super) fn in_flight_of(&self, keys: &HashSet<(String, Option<String>)>) -> HashSet<(String, Option<String>)> {
        let of = |sent: &Sent| (self.topic(sent).to_owned(), sent.key.as_deref().map(str::to_owned));
        let keyed = self.sent.iter().filter(|sent| !sent.settled && sent.key.is_some() && !keys.is_empty());
        keyed.map(of).filter(|of| keys.contains(of)).collect()
    }

    /// How long the oldest row has been in flight.
    pub(super) fn oldest(&self, now: Duration) -> Option<Duration> {
        // The first row is never a settled one.
        self.sent.front().map(|sent| now.saturating_sub(sent.at))
    }

    /// Whether the broker has settled a row that was sent after one that is still in flight.
    pub(super) fn is_overtaken(&self) -> bool {
        self.in_flight < self.sent.len()
    }

    /// How long each topic has been silent: the time since its oldest row in flight was sent. With
    /// `in_turn` the broker has only one row of a key at a time, so a row's time begins when the
    /// one before it was settled.
    pub(super) fn silence(&self, now: Duration, in_turn: bool) -> Vec<(String, Duration)> {
        let mut keys = HashSet::new();
        let mut topics: HashMap<u32, Duration> = HashMap::new();
        for sent in self.sent.iter().filter(|sent| !sent.settled) {
            let mut since = sent.at;
            if in_turn && let Some(key) = &sent.key {
                if !keys.insert((sent.topic, key)) {
                    continue;
                }
                let before = self.settled_at.get(&(sent.topic, key.clone()));
                since = before.map_or(since, |before| since.max(*before));
            }
            let silent = topics.entry(sent.topic).or_default();
            *silent = (*silent).max(now.saturating_sub(since));
        }
        topics.into_iter().map(|(topic, silent)| (self.topics.name(topic).to_owned(), silent)).collect()
    }

    /// Notes when a row of a key was settled, for [`Window::silence`] with `in_turn`.
    pub(super) fn turns(&mut self, tag: u64, now: Duration) {
        if self.settled_at.len() > TURNS_MAX {
            self.settled_at.clear();
        }
        if let Some(sent) = self.get(tag)
            && let Some(key) = sent.key.clone()
        {
            self.settled_at.insert((sent.topic, key), now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn send(window: &mut Window, position: i64, batch: u64, topic: &str, is_release: bool) -> u64 {
        let message = OutgoingMessage::sample(topic, Some("a"));
        let row = Unsent { position, batch, message, is_release, alone: false };
        window.send(&row, Duration::from_secs(position.unsigned_abs()))
    }

    #[test]
    fn a_mark_covers_only_the_oldest_batches_that_are_done() {
        let mut window = Window::default();
        let first = window.open(Some(1), 2);
        let second = window.open(Some(2), 1);
        let tags = [(1, first), (2, first), (3, second)].map(|(at, batch)| send(&mut window, at, batch, "t", false));
        window.prove(tags[2]);
        assert!(window.take_done().is_empty(), "the oldest batch is not proven");
        window.prove(tags[0]);
        window.divert(first, 2, Diversion::HeldBehind);
        window.refuse(tags[1]);
        assert_eq!(window.span(), 3);
        let mark = window.take_done();
        assert_eq!(mark.through, Some(2));
        assert_eq!(mark.diverted, vec![(2, Diversion::HeldBehind)]);
        assert!(window.is_empty() && window.in_flight() == 0 && window.bytes() == 0 && window.span() == 0);
    }

    #[test]
    fn a_refusal_after_a_later_row_of_the_key_was_taken_is_seen() {
        let mut window = Window::default();
        let batch = window.open(Some(1), 3);
        let [a, other, b] =
            [(1, "t"), (2, "u"), (3, "t")].map(|(at, topic)| send(&mut window, at, batch, topic, false));
        let keys = |topic: &str| HashSet::from([(topic.to_owned(), Some("a".to_owned()))]);
        assert!(window.proven_after(a).is_empty() && window.in_flight_of(&keys("t")) == keys("t"));
        window.prove(other);
        assert!(window.in_flight_of(&keys("u")).is_empty() && window.in_flight_of(&HashSet::new()).is_empty());
        let id = window.get(b).expect("it is in flight").id;
        window.prove(b);
        assert_eq!(window.proven_after(a), vec![id]);
        assert_eq!(window.first_unproven(), Some(1));
    }

    /// Shown by: judging by the last answer for any row. Then no topic was silent while another
    /// one's rows were proven.
    #[test]
    fn a_topic_is_silent_by_its_oldest_row_whatever_others_say() {
        let mut window = Window::default();
        let batch = window.open(Some(1), 4);
        let [bad, good, _, _] = [(1, "bad"), (2, "good"), (3, "bad"), (4, "good")]
            .map(|(at, topic)| send(&mut window, at, batch, topic, false));
        assert!(!window.is_overtaken());
        window.prove(good);
        assert!(window.is_overtaken());
        let (now, second) = (Duration::from_secs(5), Duration::from_secs(1));
        let silence = |window: &Window, in_turn| {
            let mut silence = window.silence(now, in_turn);
            silence.sort();
            silence
        };
        let both = |bad, good| vec![("bad".to_owned(), bad * second), ("good".to_owned(), good * second)];
        assert_eq!(silence(&window, false), both(4, 1));
        assert_eq!(window.oldest(now), Some(4 * second));
        // One row of a key at a time: the time of the second begins when the first was settled.
        assert_eq!(silence(&window, true), both(4, 1));
        window.turns(bad, 4 * second);
        window.prove(bad);
        assert_eq!(silence(&window, false), both(2, 1));
        assert_eq!(silence(&window, true), both(1, 1));
    }

    #[test]
    fn g11_reads_that_find_nothing_take_no_room_however_many() {
        let mut window = Window::default();
        let first = window.open(Some(1), 1);
        let tag = send(&mut window, 1, first, "t", false);
        for read in 2..1_000 {
            window.open(Some(read), 0);
        }
        assert_eq!(window.batches.len(), 2);
        let last = window.open(Some(1_000), 1);
        window.prove(tag);
        assert_eq!(window.take_done().through, Some(999));
        let tag = send(&mut window, 2, last, "t", false);
        window.prove(tag);
        assert_eq!(window.take_done().through, Some(1_000));
    }

    #[test]
    fn a_window_is_proven_once_no_row_and_no_decision_waits() {
        let mut window = Window::default();
        let batch = window.open(Some(1), 2);
        let tag = send(&mut window, 1, batch, "t", false);
        window.prove(tag);
        assert!(!window.is_proven() && !window.has_decision_done(), "a row is left");
        window.divert(batch, 2, Diversion::HeldBehind);
        assert!(!window.is_proven() && window.has_decision_done());
        window.take_done();
        assert!(window.is_proven() && !window.has_decision_done());
    }

    #[test]
    fn a_batch_of_rows_on_their_way_back_moves_no_cursor() {
        let mut window = Window::default();
        let batch = window.open(None, 1);
        let tag = send(&mut window, 9, batch, "t", true);
        window.prove(tag);
        window.proven_beside(10);
        window.changed_beside(11, Diversion::HeldBehind);
        window.discard(12);
        let mark = window.take_done();
        assert_eq!((mark.through, mark.released, mark.discarded), (None, vec![9, 10], vec![12]));
        assert_eq!(mark.changed, vec![(11, Diversion::HeldBehind)]);
    }

    // Shown by: a mark that takes all of them.
    #[test]
    fn g11_a_mark_discards_a_bounded_number_of_rows_and_the_next_one_goes_on() {
        let mut window = Window::default();
        let positions: Vec<i64> = (1..).take(DISCARDED_MAX + 2).collect();
        positions.iter().for_each(|position| window.discard(*position));
        assert_eq!(window.take_done().discarded, positions[..DISCARDED_MAX]);
        assert!(window.has_decision_done(), "the next mark is due at once");
        assert_eq!(window.take_done().discarded, positions[DISCARDED_MAX..]);
        assert!(window.is_empty());
    }

    #[test]
    fn a_row_that_is_refused_twice_before_a_mark_is_changed_once_to_what_was_said_last() {
        let mut window = Window::default();
        let silent = window.open(Some(1), 1);
        let tag = send(&mut window, 1, silent, "s", false);
        let released = window.open(None, 2);
        let blocked = |reason: &str| Diversion::HeldDestination { reason: reason.to_owned() };
        window.change(released, 8, blocked("no route"));
        window.change(released, 9, Diversion::HeldBehind);
        window.changed_beside(8, blocked("denied"));
        assert!(window.take_done().is_empty(), "a row before them is not proven");
        window.prove(tag);
        assert_eq!(window.take_done().changed, vec![(9, Diversion::HeldBehind), (8, blocked("denied"))]);
    }
}
