//! On which partitions Kafka knows this session's producer, and so whether a row may be in flight
//! behind an earlier one of its key.
//!
//! Why: Kafka checks the order of a producer's batches only on partitions where it has stored one
//! of them. On any other partition it takes a batch with any sequence number. So if it refuses the
//! first batch, it takes the second one, and a later message of the key is in the topic without
//! the refused one.
//!
//! Promise: until Kafka has taken a row on the partition of a key, one row of that key is in
//! flight. Each wait proves a partition, so a topic waits at most as often as it has partitions.
//! No I/O, no clock.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

/// After this time a proof is asked for again. Kafka forgets a producer that has written nothing to
/// a partition for `producer.id.expiration.ms`, which is a day by default.
const PROOF_MAX: Duration = Duration::from_secs(600);
/// More keys are not remembered for a topic. A key that was forgotten waits once more.
const KEYS_MAX: usize = 65_536;

/// The partitions of all topics of a session.
#[derive(Debug, Default)]
pub(super) struct Opening {
    topics: HashMap<String, Partitions>,
    /// How many topics have partitions without a proof.
    incomplete: usize,
    /// Topics in which the first row of a key was settled: rows that wait may go on.
    opened: HashSet<String>,
    proofs_since: Option<Instant>,
}

#[derive(Debug, Default)]
struct Partitions {
    count: usize,
    proven: HashSet<i32>,
    /// Keys whose first row is in flight.
    first: HashSet<Vec<u8>>,
    /// Keys whose partition is proven.
    known: HashSet<Vec<u8>>,
}

impl Partitions {
    fn is_complete(&self) -> bool {
        self.proven.len() >= self.count
    }
}

impl Opening {
    /// Learns how many partitions a topic has.
    pub(super) fn learn(&mut self, topic: &str, count: usize) {
        let partitions = self.topics.entry(topic.to_owned()).or_default();
        partitions.count = partitions.count.max(count);
        self.count_incomplete();
    }

    /// Whether a row of this key may be sent now. A first row may; the next ones wait for it.
    pub(super) fn may_go(&mut self, topic: &str, key: &[u8]) -> bool {
        if self.incomplete == 0 {
            return true;
        }
        let Some(partitions) = self.topics.get_mut(topic) else { return true };
        if partitions.is_complete() || partitions.known.contains(key) {
            return true;
        }
        partitions.first.insert(key.to_vec())
    }

    /// Notes that a row was settled; `partition`: where Kafka has taken it.
    pub(super) fn settled(&mut self, topic: &str, key: Option<&[u8]>, partition: Option<i32>) {
        if self.incomplete == 0 {
            return;
        }
        let Some(partitions) = self.topics.get_mut(topic) else { return };
        if let Some(partition) = partition {
            partitions.proven.insert(partition);
            partitions.count = partitions.count.max(usize::try_from(partition).map_or(0, |at| at + 1));
        }
        if let Some(key) = key.and_then(|key| partitions.first.take(key)) {
            self.opened.insert(topic.to_owned());
            if partition.is_some() {
                if partitions.known.len() >= KEYS_MAX {
                    partitions.known.clear();
                }
                partitions.known.insert(key);
            }
        }
        if partitions.is_complete() {
            partitions.known = HashSet::new();
            partitions.first = HashSet::new();
            self.opened.insert(topic.to_owned());
            self.count_incomplete();
        }
    }

    /// Whether rows that wait may go on.
    pub(super) fn has_opened(&self) -> bool {
        !self.opened.is_empty()
    }

    /// Takes the topics whose rows may go on.
    pub(super) fn take_opened(&mut self) -> HashSet<String> {
        std::mem::take(&mut self.opened)
    }

    /// Gives back what `take_opened` gave.
    pub(super) fn open_again(&mut self, topics: impl Iterator<Item = String>) {
        self.opened.extend(topics);
    }

    /// Forgets proofs that are too old.
    pub(super) fn forget_old_proofs(&mut self, now: Instant) {
        let since = *self.proofs_since.get_or_insert(now);
        if now.saturating_duration_since(since) < PROOF_MAX {
            return;
        }
        self.proofs_since = Some(now);
        for partitions in self.topics.values_mut() {
            partitions.proven.clear();
            partitions.known.clear();
        }
        self.count_incomplete();
    }

    fn count_incomplete(&mut self) {
        self.incomplete = self.topics.values().filter(|partitions| !partitions.is_complete()).count();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opening(partitions: usize) -> Opening {
        let mut opening = Opening::default();
        opening.learn("t", partitions);
        opening
    }

    #[test]
    fn one_row_of_a_key_goes_until_its_partition_is_proven() {
        let mut opening = opening(2);
        assert!(opening.may_go("t", b"a"));
        assert!(!opening.may_go("t", b"a"));
        assert!(opening.may_go("t", b"b"), "another key");
        opening.settled("t", Some(b"a"), Some(0));
        assert_eq!(opening.take_opened().len(), 1);
        assert!(opening.may_go("t", b"a") && opening.may_go("t", b"a"));
        assert!(!opening.may_go("t", b"b"), "its partition may be the other one");
    }

    #[test]
    fn every_key_goes_once_all_partitions_are_proven() {
        let mut opening = opening(2);
        assert!(opening.may_go("t", b"a") && opening.may_go("t", b"b"));
        opening.settled("t", None, Some(0));
        assert!(!opening.has_opened());
        opening.settled("t", None, Some(1));
        assert_eq!(opening.take_opened().len(), 1);
        assert!(opening.may_go("t", b"a") && opening.may_go("t", b"a"));
    }

    #[test]
    fn a_refused_first_row_proves_nothing() {
        let mut opening = opening(1);
        assert!(opening.may_go("t", b"a"));
        opening.settled("t", Some(b"a"), None);
        assert_eq!(opening.take_opened().len(), 1, "what waits behind it hears of it");
        assert!(opening.may_go("t", b"a"));
        assert!(!opening.may_go("t", b"a"));
    }

    #[test]
    fn a_proof_is_asked_for_again_after_some_time() {
        let mut opening = opening(1);
        let now = Instant::now();
        opening.forget_old_proofs(now);
        assert!(opening.may_go("t", b"a"));
        opening.settled("t", Some(b"a"), Some(0));
        opening.forget_old_proofs(now + PROOF_MAX / 2);
        assert!(opening.may_go("t", b"a") && opening.may_go("t", b"a"));
        opening.forget_old_proofs(now + PROOF_MAX);
        assert!(opening.may_go("t", b"a"));
        assert!(!opening.may_go("t", b"a"));
    }

    #[test]
    fn a_partition_that_was_added_needs_a_proof_too() {
        let mut opening = opening(1);
        opening.settled("t", None, Some(0));
        opening.learn("t", 2);
        assert!(opening.may_go("t", b"a"));
        assert!(!opening.may_go("t", b"a"));
    }
}
