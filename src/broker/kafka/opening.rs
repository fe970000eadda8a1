//! On which partitions Kafka knows this session's producer, and so whether a row may be in flight
//! behind an earlier one.
//!
//! Why: Kafka checks the order of a producer's batches only on partitions where it has stored one
//! of them. On any other partition it takes a batch with any sequence number. So if it refuses the
//! first batch, it takes the second one, and a later message of the key is in the topic without
//! the refused one.
//!
//! Promise: until Kafka has taken a row on a partition, one row with a key is in flight there. No
//! I/O, no clock.
//!
//! Rows without a key do not wait, because they have no order. So Kafka may take a later one while
//! the client still has to send an earlier one again. The client then reports the earlier one as
//! delivered, but without an offset, and for `window` that is no proof.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

/// After this time a proof is asked for again. Kafka forgets a producer that has written nothing to
/// a partition for `producer.id.expiration.ms`, which is a day by default.
const PROOF_MAX: Duration = Duration::from_secs(600);

/// A topic and the number of a partition of it.
pub(super) type Place = (String, i32);

#[derive(Debug, Default)]
pub(super) struct Opening {
    topics: HashMap<String, Partitions>,
    /// How many topics have partitions without a proof.
    incomplete: usize,
    /// Partitions whose first row was settled: rows that wait for it may go on.
    opened: Vec<Place>,
    proofs_since: Option<Instant>,
    /// The lowest number of partitions of a topic; below it no row shows that one has grown.
    least: Option<usize>,
    /// Topics with a row on a partition beyond their number: the client learned of new ones.
    outgrown: HashSet<String>,
}

#[derive(Debug, Default)]
struct Partitions {
    count: usize,
    proven: HashSet<i32>,
    /// Partitions without a proof that have a row in flight.
    first: HashSet<i32>,
}

impl Partitions {
    fn is_complete(&self) -> bool {
        self.proven.len() >= self.count
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum May {
    Go,
    /// It may, as the first one of this partition: the next ones wait until it is settled.
    GoFirst(i32),
    /// It waits for the row that is in flight on this partition.
    Wait(i32),
}

impl Opening {
    /// Learns how many partitions a topic has. What is known of it is forgotten, because the topic
    /// may have been made anew.
    pub(super) fn learn(&mut self, topic: &str, count: usize) {
        let partitions = self.topics.entry(topic.to_owned()).or_default();
        self.incomplete -= usize::from(!partitions.is_complete());
        partitions.count = count;
        partitions.proven.clear();
        self.incomplete += usize::from(!partitions.is_complete());
        self.least = Some(self.least.map_or(count, |least| least.min(count)));
    }

    /// Takes the topics that have more partitions than was learned.
    pub(super) fn take_outgrown(&mut self) -> Vec<String> {
        self.outgrown.drain().collect()
    }

    pub(super) fn may_go(&mut self, topic: &str, key: &[u8]) -> May {
        if self.incomplete == 0 {
            return May::Go;
        }
        let Some(partitions) = self.topics.get_mut(topic).filter(|partitions| !partitions.is_complete()) else {
            return May::Go;
        };
        let partition = partition_of(key, partitions.count);
        if partitions.proven.contains(&partition) {
            May::Go
        } else if partitions.first.insert(partition) {
            May::GoFirst(partition)
        } else {
            May::Wait(partition)
        }
    }

    /// Notes that a row was settled. `first`: the partition that it was the first row of; `taken`:
    /// where Kafka has taken it.
    pub(super) fn settled(&mut self, topic: &str, first: Option<i32>, taken: Option<i32>) {
        let is_beyond = |count| taken.is_some_and(|taken| usize::try_from(taken).is_ok_and(|taken| taken >= count));
        if first.is_none() && self.incomplete == 0 && !self.least.is_some_and(is_beyond) {
            return;
        }
        let Some(partitions) = self.topics.get_mut(topic) else { return };
        if is_beyond(partitions.count) {
            self.outgrown.insert(topic.to_owned());
        }
        self.incomplete -= usize::from(!partitions.is_complete());
        // Partitions beyond those that are known prove nothing of these. While a first row is in
        // flight, only its own report proves: Kafka may have taken another row without it.
        let proves = |at: &i32| first == Some(*at) || !partitions.first.contains(at);
        partitions.proven.extend(taken.filter(|at| !is_beyond(partitions.count) && proves(at)));
        self.incomplete += usize::from(!partitions.is_complete());
        if let Some(partition) = first {
            partitions.first.remove(&partition);
            self.opened.push((topic.to_owned(), partition));
        }
    }

    pub(super) fn has_opened(&self) -> bool {
        !self.opened.is_empty()
    }

    pub(super) fn take_opened(&mut self) -> Vec<Place> {
        std::mem::take(&mut self.opened)
    }

    /// Gives back what `take_opened` gave, or opens places that wait.
    pub(super) fn open_again(&mut self, places: impl Iterator<Item = Place>) {
        self.opened.extend(places);
    }

    pub(super) fn partition_of(&self, topic: &str, key: &[u8]) -> Option<i32> {
        self.topics.get(topic).map(|partitions| partition_of(key, partitions.count))
    }

    pub(super) fn forget_old_proofs(&mut self, now: Instant) {
        let since = *self.proofs_since.get_or_insert(now);
        if now.saturating_duration_since(since) < PROOF_MAX {
            return;
        }
        self.proofs_since = Some(now);
        self.topics.values_mut().for_each(|partitions| partitions.proven.clear());
        self.incomplete = self.topics.values().filter(|partitions| !partitions.is_complete()).count();
    }
}

/// The partition of a key, as the partitioner `murmur2_random` and Kafka's own clients compute it.
fn partition_of(key: &[u8], count: usize) -> i32 {
    let positive = murmur2(key) & 0x7fff_ffff;
    i32::try_from(positive as usize % count.max(1)).unwrap_or(0)
}

/// Kafka's variant of Austin Appleby's MurmurHash2, with its seed.
fn murmur2(key: &[u8]) -> u32 {
    const FACTOR: u32 = 0x5bd1_e995;
    let (words, rest) = key.as_chunks::<4>();
    let length = u32::try_from(key.len()).unwrap_or(u32::MAX);
    let mut hash = words.iter().fold(0x9747_b28c ^ length, |hash, word| {
        let mixed = u32::from_le_bytes(*word).wrapping_mul(FACTOR);
        hash.wrapping_mul(FACTOR) ^ (mixed ^ (mixed >> 24)).wrapping_mul(FACTOR)
    });
    if !rest.is_empty() {
        let tail = rest.iter().rev().fold(0, |tail, byte| (tail << 8) | u32::from(*byte));
        hash = (hash ^ tail).wrapping_mul(FACTOR);
    }
    hash = (hash ^ (hash >> 13)).wrapping_mul(FACTOR);
    hash ^ (hash >> 15)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opening(partitions: usize) -> Opening {
        let mut opening = Opening::default();
        opening.learn("t", partitions);
        opening
    }

    /// Two keys of different partitions, of two.
    fn keys() -> [&'static [u8]; 2] {
        let of =
            |partition| [&b"a"[..], b"b", b"c", b"d", b"e"].into_iter().find(|key| partition_of(key, 2) == partition);
        [of(0), of(1)].map(|key| key.expect("one of five keys"))
    }

    #[test]
    fn one_row_of_a_partition_goes_until_it_is_proven_and_others_go_beside_it() {
        let (mut opening, [even, odd]) = (opening(2), keys());
        assert_eq!(opening.may_go("t", even), May::GoFirst(0));
        assert_eq!(opening.may_go("t", even), May::Wait(0));
        assert_eq!(opening.may_go("t", odd), May::GoFirst(1));
        opening.settled("t", Some(0), Some(0));
        assert_eq!(opening.take_opened(), [("t".to_owned(), 0)]);
        assert_eq!((opening.may_go("t", even), opening.may_go("t", even)), (May::Go, May::Go));
        assert_eq!(opening.may_go("t", odd), May::Wait(1));
        assert!(!opening.has_opened());
    }

    #[test]
    fn a_refused_first_row_proves_nothing() {
        let mut opening = opening(1);
        assert_eq!(opening.may_go("t", b"a"), May::GoFirst(0));
        opening.settled("t", Some(0), None);
        assert_eq!(opening.take_opened().len(), 1, "what waits behind it hears of it");
        assert_eq!(opening.may_go("t", b"a"), May::GoFirst(0));
        assert_eq!(opening.may_go("t", b"a"), May::Wait(0));
    }

    /// It fails where any row proves: the next row of the key then goes before the first one is
    /// stored.
    #[test]
    fn a_row_that_overtakes_the_first_one_proves_nothing() {
        let mut opening = opening(1);
        assert_eq!(opening.may_go("t", b"a"), May::GoFirst(0));
        opening.settled("t", None, Some(0));
        assert_eq!(opening.may_go("t", b"a"), May::Wait(0));
        opening.settled("t", Some(0), Some(0));
        assert_eq!(opening.may_go("t", b"a"), May::Go);
    }

    #[test]
    fn a_proof_is_asked_for_again_after_some_time_and_of_a_topic_that_was_asked_for_again() {
        let mut opening = opening(1);
        let now = Instant::now();
        opening.forget_old_proofs(now);
        opening.settled("t", None, Some(0));
        opening.forget_old_proofs(now + PROOF_MAX / 2);
        assert_eq!(opening.may_go("t", b"a"), May::Go);
        opening.forget_old_proofs(now + PROOF_MAX);
        assert_eq!(opening.may_go("t", b"a"), May::GoFirst(0));
        opening.settled("t", Some(0), Some(0));
        assert_eq!(opening.may_go("t", b"a"), May::Go);
        opening.learn("t", 1);
        assert_eq!(opening.may_go("t", b"a"), May::GoFirst(0));
    }

    #[test]
    fn a_row_beyond_the_last_partition_shows_that_the_topic_has_grown() {
        let mut opening = opening(2);
        opening.learn("wide", 9);
        for (topic, partition) in [("t", 0), ("t", 1), ("wide", 8)] {
            opening.settled(topic, None, Some(partition));
        }
        assert!(opening.take_outgrown().is_empty());
        opening.settled("t", None, Some(2));
        opening.settled("t", None, Some(3));
        assert_eq!(opening.take_outgrown(), ["t"]);
        assert!(opening.take_outgrown().is_empty());
        opening.learn("t", 4);
        opening.settled("t", None, Some(3));
        assert!(opening.take_outgrown().is_empty());
    }

    /// The vectors are those of Apache Kafka's own test of `Utils.murmur2`.
    #[test]
    fn a_key_is_hashed_as_kafka_does() {
        let vectors: [(&str, i32); 6] = [
            ("21", -973_932_308),
            ("foobar", -790_332_482),
            ("a-little-bit-long-string", -985_981_536),
            ("a-little-bit-longer-string", -1_486_304_829),
            ("lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58_897_971),
            ("abc", 479_470_107),
        ];
        for (key, hash) in vectors {
            assert_eq!(murmur2(key.as_bytes()).cast_signed(), hash, "{key}");
        }
    }
}
