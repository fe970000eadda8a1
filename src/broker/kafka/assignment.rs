//! The bookkeeping for the partitions of one group member: what was delivered, what is
//! acknowledged, what is committed. Pure: no I/O, no clock.
//!
//! Promises: an offset is committed only up to what was acknowledged for the assignment it was
//! delivered under. Deliveries in flight are counted exactly.

mod ends;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use crate::broker::PartitionId;

/// Topic, partition and the offset after the last acknowledged one.
pub(super) type Position = (Arc<str>, i32, i64);

type Place = (Arc<str>, i32);

/// The end of a partition that had no leader to ask when it began.
pub(super) const UNKNOWN_END: i64 = i64::MAX;

#[derive(Debug, Default)]
pub(super) struct Assignment {
    topics: HashMap<Arc<str>, BTreeMap<i32, Source>>,
    generations: u64,
    assigned_once: bool,
    rows: usize,
    bytes: usize,
    // How often an end was reported for a partition number at an offset. A report names no topic,
    // so that several topics share an entry. Kept while a partition of the number stands there, and
    // until all of them have ended.
    ends_seen: HashMap<(i32, i64), usize>,
}

/// A delivery that is not acknowledged.
#[derive(Debug)]
struct InFlight {
    offset: i64,
    /// Its size in bytes; 0 once it no longer counts.
    weight: usize,
    /// True while it counts against the bound of rows.
    counts: bool,
}

#[derive(Debug)]
struct Source {
    id: PartitionId,
    in_flight: VecDeque<InFlight>,
    /// The offset of the next delivery; `None` until `begin` has set the start.
    next: Option<i64>,
    /// The last delivery that the caller received; later ones are still on their way to the caller.
    handed: Option<i64>,
    acknowledged: Option<i64>,
    sent: Option<i64>,
    confirmed: Option<i64>,
    /// The end of the partition at the time of its start.
    end: Option<i64>,
    /// True once the broker reported that this end was reached.
    ended: bool,
    /// True where it had no leader when it began, or when that was asked last, and nothing was
    /// heard of it since.
    leaderless: bool,
    paused: bool,
    /// True where the caller handles nothing of it: it is paused, and it is waited for no more.
    refused: bool,
    /// Why its next record cannot be read: it is paused, and not read behind that record.
    unreadable: Option<String>,
}

impl Source {
    fn is_read(&self) -> bool {
        !self.refused && self.unreadable.is_none()
    }

    /// Whether everything that was there at its start was delivered.
    fn has_reached_end(&self) -> bool {
        self.ended || self.refused || self.end.zip(self.next).is_some_and(|(end, next)| next >= end)
    }

    fn is_handed_out(&self) -> bool {
        self.in_flight.back().is_none_or(|last| self.handed >= Some(last.offset))
    }
}

impl Assignment {
    fn source(&self, topic: &str, partition: i32) -> Option<&Source> {
        self.topics.get(topic)?.get(&partition)
    }

    fn source_mut(&mut self, topic: &str, partition: i32) -> Option<&mut Source> {
        self.topics.get_mut(topic)?.get_mut(&partition)
    }

    /// The source of this assignment; `None` once the assignment has ended.
    fn assigned(&mut self, id: &PartitionId) -> Option<&mut Source> {
        self.source_mut(&id.place, id.partition).filter(|source| source.id == *id)
    }

    fn sources(&self) -> impl Iterator<Item = &Source> {
        self.topics.values().flat_map(BTreeMap::values)
    }

    fn sources_mut(&mut self) -> impl Iterator<Item = &mut Source> {
        self.topics.values_mut().flat_map(BTreeMap::values_mut)
    }

    /// Whether a partition of this topic is assigned.
    pub(super) fn has_of(&self, topic: &str) -> bool {
        self.topics.get(topic).is_some_and(|partitions| !partitions.is_empty())
    }

    /// Takes partitions and gives each a generation of its own.
    pub(super) fn assign(&mut self, partitions: &[(String, i32)]) -> Vec<PartitionId> {
        self.assigned_once = true;
        self.remove(partitions);
        partitions
            .iter()
            .map(|(topic, partition)| {
                self.generations += 1;
                let place: Arc<str> = match self.topics.get_key_value(topic.as_str()) {
                    Some((place, _)) => Arc::clone(place),
                    None => topic.as_str().into(),
                };
                let id = PartitionId { place: Arc::clone(&place), partition: *partition, generation: self.generations };
                let source = Source {
                    id: id.clone(),
                    in_flight: VecDeque::new(),
                    next: None,
                    handed: None,
                    acknowledged: None,
                    sent: None,
                    confirmed: None,
                    end: None,
                    ended: false,
                    leaderless: false,
                    paused: false,
                    refused: false,
                    unreadable: None,
                };
                self.topics.entry(place).or_default().insert(*partition, source);
                id
            })
            .collect()
    }

    pub(super) fn ids(&self, partitions: &[(String, i32)]) -> Vec<PartitionId> {
        partitions.iter().filter_map(|(topic, partition)| Some(self.source(topic, *partition)?.id.clone())).collect()
    }

    pub(super) fn remove(&mut self, partitions: &[(String, i32)]) {
        for (topic, partition) in partitions {
            let Some(sources) = self.topics.get_mut(topic.as_str()) else { continue };
            let Some(source) = sources.remove(partition) else { continue };
            self.rows -= source.in_flight.iter().filter(|one| one.counts).count();
            self.bytes -= source.in_flight.iter().map(|one| one.weight).sum::<usize>();
        }
    }

    pub(super) fn clear(&mut self) {
        self.topics.clear();
        self.ends_seen.clear();
        (self.rows, self.bytes) = (0, 0);
    }

    /// Reads no more of this assignment, and counts nothing of it any more.
    pub(super) fn refuse(&mut self, id: &PartitionId) {
        let Some(source) = self.assigned(id) else { return };
        source.refused = true;
        let gone = std::mem::take(&mut source.in_flight);
        self.rows -= gone.iter().filter(|one| one.counts).count();
        self.bytes -= gone.iter().map(|one| one.weight).sum::<usize>();
    }

    /// Reads this partition no further, because its next record cannot be read. What was delivered
    /// of it before is acknowledged and counted as ever.
    pub(super) fn stop_before_next(&mut self, topic: &str, partition: i32, why: String) {
        if let Some(source) = self.source_mut(topic, partition) {
            source.unreadable = Some(why);
        }
    }

    /// How many partitions are not read further because of a record, one of them, and why.
    pub(super) fn unreadable(&self) -> Option<(usize, &PartitionId, &str)> {
        let mut stopped = self.sources().filter_map(|source| Some((&source.id, source.unreadable.as_deref()?)));
        let (id, why) = stopped.next()?;
        Some((1 + stopped.count(), id, why))
    }

    /// Where each partition with a leader goes on: those that are not refused, or only those that
    /// are not read further because of a record.
    pub(super) fn nexts(&self, only_unreadable: bool) -> Vec<Position> {
        let is_asked = |source: &&Source| {
            !source.refused && !source.leaderless && (!only_unreadable || source.unreadable.is_some())
        };
        let asked = self.sources().filter(is_asked);
        asked.filter_map(|source| Some((Arc::clone(&source.id.place), source.id.partition, source.next?))).collect()
    }

    /// Counts a delivery; `None` for a partition that this member does not own or does not read.
    pub(super) fn deliver(&mut self, topic: &str, partition: i32, offset: i64, weight: usize) -> Option<PartitionId> {
        let source = self.source_mut(topic, partition).filter(|source| source.is_read())?;
        source.in_flight.push_back(InFlight { offset, weight, counts: true });
        source.next = Some(offset + 1);
        source.leaderless = false;
        let id = source.id.clone();
        self.rows += 1;
        self.bytes += weight;
        Some(id)
    }

    /// Notes that the caller received a delivery. Does nothing for an assignment that has ended.
    pub(super) fn hand(&mut self, id: &PartitionId, offset: i64) {
        if let Some(source) = self.assigned(id) {
            source.handed = source.handed.max(Some(offset));
        }
    }

    /// Notes that everything of this assignment up to an offset is committed in the database.
    /// Returns false for an assignment that has ended.
    pub(super) fn acknowledge(&mut self, id: &PartitionId, through: i64) -> bool {
        let Some(source) = self.assigned(id) else {
            return false;
        };
        let mut gone = (0, 0);
        while let Some(one) = source.in_flight.pop_front_if(|one| one.offset <= through) {
            gone = (gone.0 + usize::from(one.counts), gone.1 + one.weight);
        }
        source.acknowledged = source.acknowledged.max(Some(through + 1));
        self.rows -= gone.0;
        self.bytes -= gone.1;
        true
    }

    /// Counts a delivery of this assignment no longer as a row. If it is finished, its bytes no
    /// longer count either.
    pub(super) fn spare(&mut self, id: &PartitionId, offset: i64, is_finished: bool) {
        let Some(source) = self.assigned(id) else { return };
        let Ok(at) = source.in_flight.binary_search_by_key(&offset, |one| one.offset) else { return };
        let Some(one) = source.in_flight.get_mut(at) else { return };
        let row = usize::from(std::mem::take(&mut one.counts));
        let bytes = if is_finished { std::mem::take(&mut one.weight) } else { 0 };
        self.rows -= row;
        self.bytes -= bytes;
    }

    /// Whether the bounds are reached. One delivery is always allowed.
    pub(super) fn is_full(&self, rows_max: usize, bytes_max: usize) -> bool {
        self.rows >= rows_max.max(1) || (self.bytes > 0 && self.bytes >= bytes_max)
    }

    /// What is acknowledged and not yet sent to the broker. From now on it counts as sent.
    pub(super) fn take_due(&mut self) -> Vec<Position> {
        let due = self.sources_mut().filter(|source| source.acknowledged > source.sent);
        due.filter_map(|source| {
            source.sent = source.acknowledged;
            Some((Arc::clone(&source.id.place), source.id.partition, source.acknowledged?))
        })
        .collect()
    }

    /// What is acknowledged and not known to be committed: of these partitions, or of all.
    pub(super) fn unconfirmed(&self, of: Option<&[(String, i32)]>) -> Vec<Position> {
        let is_asked = |source: &&Source| {
            let (place, partition) = (&*source.id.place, source.id.partition);
            of.is_none_or(|of| of.iter().any(|(topic, number)| topic == place && *number == partition))
        };
        self.sources()
            .filter(is_asked)
            .filter(|source| source.acknowledged > source.confirmed)
            .filter_map(|source| Some((Arc::clone(&source.id.place), source.id.partition, source.acknowledged?)))
            .collect()
    }

    /// Takes the broker's answer to a commit. What failed is due again.
    pub(super) fn committed(&mut self, topic: &str, partition: i32, offset: i64, done: bool) {
        let Some(source) = self.source_mut(topic, partition) else { return };
        if done {
            source.confirmed = source.confirmed.max(Some(offset));
        } else if source.sent == Some(offset) {
            source.sent = source.confirmed;
        }
    }

    /// The partitions that must be paused, and those that must be resumed, so that all of them are
    /// paused, or only those that are not read. From now on they count as changed.
    pub(super) fn take_to_pause(&mut self, all: bool) -> (Vec<Place>, Vec<Place>) {
        let (mut pause, mut resume) = (Vec::new(), Vec::new());
        for source in self.sources_mut().filter(|source| source.paused != (all || !source.is_read())) {
            source.paused = !source.paused;
            let changed = if source.paused { &mut pause } else { &mut resume };
            changed.push((Arc::clone(&source.id.place), source.id.partition));
        }
        (pause, resume)
    }

    pub(super) fn paused_of(&self, partitions: &[(String, i32)]) -> Vec<(Arc<str>, i32)> {
        let sources = partitions.iter().filter_map(|(topic, partition)| self.source(topic, *partition));
        sources
            .filter(|source| source.paused)
            .map(|source| (Arc::clone(&source.id.place), source.id.partition))
            .collect()
    }

    /// Sets where a partition begins, and its end as the broker told it, or `UNKNOWN_END`.
    pub(super) fn begin(&mut self, id: &PartitionId, at: i64, end: i64) {
        if let Some(source) = self.assigned(id) {
            source.next = Some(at);
            source.end = Some(end);
            source.leaderless = end == UNKNOWN_END;
        }
    }

    /// The partitions that have begun and are not refused.
    pub(super) fn begun(&self) -> Vec<PartitionId> {
        let begun = self.sources().filter(|source| source.next.is_some() && !source.refused);
        begun.map(|source| source.id.clone()).collect()
    }

    /// Notes of each of these partitions whether it has a leader, as the broker has told.
    pub(super) fn note_leaders(&mut self, asked: &[PartitionId], has_leader: impl Fn(&PartitionId) -> bool) {
        for id in asked {
            if let Some(source) = self.assigned(id) {
                source.leaderless = !has_leader(id);
            }
        }
    }

    /// How many partitions have no leader and are not heard of since that was found; one of them.
    pub(super) fn leaderless(&self) -> Option<(usize, &PartitionId)> {
        let mut leaderless = self.sources().filter(|source| source.leaderless && !source.refused);
        let first = leaderless.next()?;
        Some((1 + leaderless.count(), &first.id))
    }

    /// Where these partitions begin; `None` until `begin` was called for all that are still owned.
    pub(super) fn starts(&self, of: &[(String, i32)]) -> Option<Vec<Position>> {
        let sources = of.iter().filter_map(|(topic, partition)| self.source(topic, *partition));
        sources.map(|source| Some((Arc::clone(&source.id.place), source.id.partition, source.next?))).collect()
    }

    /// True where an assignment has come and this member owns no partition.
    pub(super) fn has_no_share(&self) -> bool {
        self.assigned_once && self.sources().next().is_none()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    pub(super) fn partitions(list: &[(&str, i32)]) -> Vec<(String, i32)> {
        list.iter().map(|(topic, partition)| ((*topic).to_owned(), *partition)).collect()
    }

    fn due(assignment: &mut Assignment) -> Vec<(String, i32, i64)> {
        assignment.take_due().into_iter().map(|(topic, partition, next)| (topic.to_string(), partition, next)).collect()
    }

    #[test]
    fn only_what_is_acknowledged_is_committed_and_only_once() {
        let mut all = Assignment::default();
        let ids = all.assign(&partitions(&[("t", 0), ("t", 1)]));
        for offset in [5, 6, 9] {
            all.deliver("t", 0, offset, 10).unwrap();
        }
        assert_eq!(due(&mut all), []);
        assert!(all.acknowledge(&ids[0], 6));
        assert_eq!(due(&mut all), [("t".to_owned(), 0, 7)]);
        assert_eq!(due(&mut all), []);
        assert!((all.rows, all.bytes) == (1, 10));
        all.acknowledge(&ids[0], 9);
        all.acknowledge(&ids[0], 7);
        assert_eq!(due(&mut all), [("t".to_owned(), 0, 10)], "an older acknowledgement does not go back");
    }

    #[test]
    fn a_commit_that_failed_is_due_again_and_a_confirmed_one_is_not() {
        let mut all = Assignment::default();
        let t0 = partitions(&[("t", 0)]);
        let ids = all.assign(&t0);
        all.acknowledge(&ids[0], 4);
        due(&mut all);
        all.committed("t", 0, 5, false);
        assert_eq!(due(&mut all), [("t".to_owned(), 0, 5)]);
        assert_eq!(all.unconfirmed(Some(&t0)).len(), 1);
        all.committed("t", 0, 5, true);
        assert_eq!(due(&mut all), []);
        assert_eq!(all.unconfirmed(None).len(), 0);
    }

    #[test]
    fn an_acknowledgement_of_a_past_assignment_changes_nothing() {
        let mut all = Assignment::default();
        let t0 = partitions(&[("t", 0)]);
        let old = all.assign(&t0);
        all.deliver("t", 0, 1, 10);
        all.remove(&t0);
        assert!(!all.acknowledge(&old[0], 1));
        let new = all.assign(&t0);
        assert_ne!(old, new);
        all.deliver("t", 0, 1, 10);
        assert!(!all.acknowledge(&old[0], 1));
        assert_eq!(due(&mut all), []);
        assert_eq!(all.rows, 1);
    }

    #[test]
    fn bounds_count_what_is_in_flight_and_let_one_through() {
        let mut all = Assignment::default();
        let t0 = partitions(&[("t", 0)]);
        let ids = all.assign(&t0);
        assert!(!all.is_full(1, 1));
        all.deliver("t", 0, 1, 100);
        assert!(all.is_full(1, 1_000) && all.is_full(10, 100) && !all.is_full(2, 101));
        all.acknowledge(&ids[0], 1);
        assert!(!all.is_full(1, 1));
        all.deliver("t", 0, 2, 100);
        all.remove(&t0);
        assert!((all.rows, all.bytes) == (0, 0));
        assert_eq!(all.deliver("t", 0, 3, 1), None, "not ours any more");
    }

    #[test]
    fn what_is_finished_above_an_unfinished_one_takes_no_room_and_what_is_set_aside_only_bytes() {
        let mut all = Assignment::default();
        let ids = all.assign(&partitions(&[("t", 0)]));
        for offset in [3, 5, 9] {
            all.deliver("t", 0, offset, 10).unwrap();
        }
        for _ in 0..2 {
            all.spare(&ids[0], 9, true);
            assert!((all.rows, all.bytes) == (2, 20));
        }
        all.spare(&ids[0], 5, false);
        assert!((all.rows, all.bytes) == (1, 20));
        all.spare(&ids[0], 3, false);
        assert!(all.is_full(1, 20), "what is set aside is still in memory");
        all.spare(&ids[0], 5, true);
        all.spare(&ids[0], 4, true);
        assert!((all.rows, all.bytes) == (0, 10));
        assert_eq!(due(&mut all), [], "nothing of it is committed");
        all.acknowledge(&ids[0], 9);
        assert!((all.rows, all.bytes) == (0, 0));
    }

    #[test]
    fn partitions_begin_when_that_is_said_of_all_that_are_still_ours() {
        let mut all = Assignment::default();
        let both = partitions(&[("t", 0), ("t", 1)]);
        let ids = all.assign(&both);
        all.begin(&ids[0], 7, 9);
        assert_eq!(all.starts(&both), None);
        all.begin(&ids[1], 0, 0);
        assert_eq!(all.starts(&both), Some(vec![("t".into(), 0, 7), ("t".into(), 1, 0)]));
        all.remove(&both[1..]);
        assert_eq!(all.starts(&both), Some(vec![("t".into(), 0, 7)]));
    }

    #[test]
    fn pausing_names_only_what_changes() {
        let mut all = Assignment::default();
        all.assign(&partitions(&[("t", 0)]));
        assert_eq!(all.take_to_pause(true).0.len(), 1);
        assert_eq!(all.take_to_pause(true).0.len(), 0);
        all.assign(&partitions(&[("t", 1)]));
        assert_eq!(all.take_to_pause(true), (vec![("t".into(), 1)], vec![]));
        assert_eq!(all.paused_of(&partitions(&[("t", 0), ("u", 0)])), [("t".into(), 0)]);
        let (pause, resume) = all.take_to_pause(false);
        assert_eq!((pause.len(), resume.len()), (0, 2));
    }

    #[test]
    fn a_refused_partition_is_paused_takes_no_room_and_is_waited_for_no_more() {
        let mut all = Assignment::default();
        let ids = all.assign(&partitions(&[("t", 0), ("t", 1)]));
        ids.iter().for_each(|id| all.begin(id, 0, 2));
        all.deliver("t", 0, 0, 10).unwrap();
        all.deliver("t", 1, 0, 10).unwrap();
        all.refuse(&ids[0]);
        assert_eq!(all.deliver("t", 0, 1, 10), None);
        assert!((all.rows, all.bytes) == (1, 10));
        assert_eq!(all.take_to_pause(false), (vec![("t".into(), 0)], vec![]));
        assert_eq!(all.take_to_pause(true), (vec![("t".into(), 1)], vec![]));
        assert_eq!(all.take_to_pause(false), (vec![], vec![("t".into(), 1)]), "the other one stays paused");
        all.deliver("t", 1, 1, 10).unwrap();
        assert!(!all.is_caught_up());
        all.hand(&ids[1], 1);
        assert!(all.is_caught_up());
        all.acknowledge(&ids[1], 1);
        assert!((all.rows, all.bytes) == (0, 0));
        assert_eq!(due(&mut all), [("t".to_owned(), 1, 2)]);
        let again = all.assign(&partitions(&[("t", 0)]));
        assert_eq!(all.deliver("t", 0, 0, 10), Some(again[0].clone()), "refused once, not for ever");
    }

    #[test]
    fn a_partition_that_loses_its_leader_is_named_until_it_has_one_or_is_heard_of() {
        let mut all = Assignment::default();
        let ids = all.assign(&partitions(&[("t", 0), ("t", 1), ("t", 2), ("u", 0)]));
        all.begin(&ids[0], 0, 0);
        all.begin(&ids[1], 0, 0);
        all.begin(&ids[2], 0, 0);
        all.refuse(&ids[2]);
        let asked = all.begun();
        assert_eq!(asked, ids[..2], "one is refused, and one has not begun");
        all.note_leaders(&asked, |id| id.partition == 0);
        assert_eq!(all.leaderless(), Some((1, &ids[1])));
        all.note_leaders(&asked, |_| true);
        assert_eq!(all.leaderless(), None);
        all.note_leaders(&asked, |_| false);
        assert_eq!(all.leaderless().map(|(count, _)| count), Some(2));
        all.deliver("t", 0, 0, 1);
        assert_eq!(all.leaderless(), Some((1, &ids[1])), "the other one is heard of");
        let again = all.assign(&partitions(&[("t", 1)]));
        all.note_leaders(&asked, |_| false);
        assert_eq!(all.leaderless(), Some((1, &ids[0])), "what was asked of an earlier assignment is over");
        assert!(!all.begun().contains(&again[0]));
    }

    /// Shown by: forgetting what is in flight, as for a refused partition (it was never committed).
    #[test]
    fn g2_a_partition_stops_before_a_record_that_cannot_be_read_and_what_came_before_is_committed() {
        let mut all = Assignment::default();
        let ids = all.assign(&partitions(&[("t", 0), ("t", 1)]));
        ids.iter().for_each(|id| all.begin(id, 5, 9));
        all.deliver("t", 0, 5, 10).unwrap();
        assert_eq!(all.unreadable(), None);
        all.stop_before_next("t", 0, "at offset 6".to_owned());
        assert_eq!(all.unreadable(), Some((1, &ids[0], "at offset 6")));
        assert_eq!((all.nexts(false).len(), all.nexts(true)), (2, vec![("t".into(), 0, 6)]));
        assert_eq!(all.deliver("t", 0, 7, 10), None, "it stands behind the record");
        assert_eq!(all.take_to_pause(false), (vec![("t".into(), 0)], vec![]));
        all.deliver("t", 1, 5, 10).unwrap();
        all.acknowledge(&ids[0], 5);
        assert_eq!(due(&mut all), [("t".to_owned(), 0, 6)]);
        assert!(!all.is_caught_up());
        all.assign(&partitions(&[("t", 0)]));
        assert_eq!(all.unreadable(), None, "a new assignment tries again");
    }
}
