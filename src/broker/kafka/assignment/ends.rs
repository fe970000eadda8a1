//! Which partitions have delivered what they held when they began. Pure: no I/O, no clock.
//!
//! rdkafka's report of an end names a partition by its number and no topic, so that the report may
//! be of any topic that has a partition of this number.

use super::{Assignment, Source, UNKNOWN_END};

impl Assignment {
    /// Notes a report that a partition of this number reached its end at this offset. Where the
    /// last offsets of a partition hold no message (aborted, compacted, markers), only such a
    /// report shows its end: one that no other partition of the number, standing there, explains.
    pub(in crate::broker::kafka) fn end_reached(&mut self, partition: i32, offset: i64) {
        if self.have_ended(partition) {
            return;
        }
        let of_number = |source: &&Source| source.id.partition == partition;
        let next: Vec<i64> = self.sources().filter(of_number).filter_map(|source| source.next).collect();
        let times = self.ends_seen.entry((partition, offset)).or_default();
        *times += 1;
        let standing = next.iter().filter(|next| **next == offset).count();
        let (is_unexplained, all_reported) = (*times > standing, *times >= standing);
        for source in self.sources_mut().filter(|source| source.id.partition == partition) {
            let shown = match (source.end, source.next) {
                // Any end that it reaches is at or behind the one that it had when it began.
                (Some(UNKNOWN_END), Some(next)) => {
                    (is_unexplained && offset >= next) || (all_reported && offset == next)
                }
                (Some(end), _) => is_unexplained && offset >= end,
                (None, _) => false,
            };
            source.leaderless &= !shown;
            source.ended |= shown || source.has_reached_end();
        }
        // A report of a partition that went on since says nothing about another one. So there are
        // no more entries than partitions, however long one of them takes to reach its end.
        let have_ended = self.have_ended(partition);
        self.ends_seen.retain(|(number, at), _| *number != partition || (!have_ended && next.contains(at)));
    }

    fn have_ended(&self, partition: i32) -> bool {
        self.sources().all(|source| source.id.partition != partition || source.ended || source.refused)
    }

    /// True where an assignment has come and the caller has received everything that was in each
    /// partition when its end was asked.
    pub(in crate::broker::kafka) fn is_caught_up(&self) -> bool {
        self.assigned_once && self.sources().all(|source| source.has_reached_end() && source.is_handed_out())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::tests::partitions;
    use super::*;

    // Shown by: not asking whether the caller received them (a run until idle ended before the last
    // ones).
    #[test]
    fn caught_up_means_the_end_that_was_seen() {
        let mut all = Assignment::default();
        assert!(!all.is_caught_up() && !all.has_no_share(), "not assigned yet");
        all.assign(&[]);
        assert!(all.is_caught_up() && all.has_no_share(), "a member without partitions");
        let ids = all.assign(&partitions(&[("t", 0)]));
        assert!(!all.is_caught_up());
        all.begin(&ids[0], 0, 2);
        all.deliver("t", 0, 0, 1);
        assert!(!all.is_caught_up());
        all.deliver("t", 0, 1, 1);
        all.hand(&ids[0], 0);
        assert!(!all.is_caught_up(), "the last one is still on its way to the caller");
        all.hand(&ids[0], 1);
        assert!(all.is_caught_up());
    }

    #[test]
    fn an_end_without_messages_before_it_is_taken_from_the_report() {
        let mut all = Assignment::default();
        let ids = all.assign(&partitions(&[("a", 0), ("b", 0)]));
        all.begin(&ids[0], 10, 10);
        all.begin(&ids[1], 3, 10);
        all.end_reached(0, 10);
        assert!(!all.is_caught_up(), "the report is explained by topic a");
        all.end_reached(0, 10);
        assert!(all.is_caught_up(), "one of the two reports is of topic b");
    }

    /// Shown by: taking the unknown end for an offset. Nothing reached it, also with a leader.
    #[test]
    fn g6_a_partition_that_began_without_a_leader_is_away_until_it_is_heard_of_and_reaches_its_end() {
        let mut all = Assignment::default();
        let ids = all.assign(&partitions(&[("a", 0), ("b", 0), ("a", 1)]));
        all.begin(&ids[0], 4, UNKNOWN_END);
        all.begin(&ids[1], 4, 4);
        all.begin(&ids[2], 4, UNKNOWN_END);
        assert_eq!(all.leaderless(), Some((2, &ids[0])));
        all.end_reached(0, 4);
        assert_eq!(all.leaderless(), Some((2, &ids[0])), "the report is explained by topic b");
        all.end_reached(0, 4);
        assert_eq!(all.leaderless(), Some((1, &ids[2])), "one of the two reports is of topic a");
        all.deliver("a", 1, 4, 1);
        all.hand(&ids[2], 4);
        assert!(all.leaderless().is_none() && !all.is_caught_up());
        all.end_reached(1, 5);
        assert!(all.is_caught_up());
    }

    // While the process lives, an end is reported after each row that arrives.
    #[test]
    fn ends_are_kept_only_until_every_partition_has_reached_its_own() {
        let mut all = Assignment::default();
        let ids = all.assign(&partitions(&[("a", 0), ("b", 0), ("a", 1)]));
        all.begin(&ids[0], 0, 0);
        all.begin(&ids[1], 3, 10);
        all.begin(&ids[2], 0, 0);
        all.end_reached(0, 0);
        all.end_reached(1, 0);
        assert_eq!(all.ends_seen.len(), 1, "b has not reached its end");
        all.end_reached(0, 10);
        assert_eq!(all.ends_seen.len(), 0);
        for offset in 0..1_000 {
            all.deliver("a", 0, offset, 1).unwrap();
            all.end_reached(0, offset + 1);
        }
        assert_eq!(all.ends_seen.len(), 0);
        assert!(all.source("b", 0).unwrap().has_reached_end());
        all.assign(&partitions(&[("b", 0)]));
        assert!(!all.source("b", 0).unwrap().has_reached_end(), "a new assignment has its own end");
    }

    // Shown by: keeping every report until all have ended (1,001 entries), and by judging old
    // reports again (the backlog counted as read once the other topic went on from its end).
    #[test]
    fn ends_of_a_topic_that_is_caught_up_neither_pile_up_nor_end_the_backlog_of_another() {
        let mut all = Assignment::default();
        let ids = all.assign(&partitions(&[("a", 0), ("b", 0)]));
        all.begin(&ids[0], 0, 500);
        all.begin(&ids[1], 0, 0);
        all.end_reached(0, 0);
        for offset in 0..1_000 {
            all.deliver("b", 0, offset, 1).unwrap();
            all.end_reached(0, offset + 1);
            assert!(all.ends_seen.len() <= 2, "{} entries", all.ends_seen.len());
            assert!(!all.source("a", 0).unwrap().has_reached_end(), "b is at {offset}");
        }
        all.end_reached(0, 700);
        assert!(all.source("a", 0).unwrap().has_reached_end(), "no other partition stands at 700");
        assert_eq!(all.ends_seen.len(), 0);
    }
}
