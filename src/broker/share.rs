//! Which partitions a member takes and which it gives up: a function of the live members and the
//! owners of partitions. Every member computes the same quotas.
//!
//! Guarantees: the quotas of a topic's members add up to its partitions, so that every partition
//! gets an owner. A member gives up only what is above its quota; the other partitions are read
//! without a break. The partitions that cannot be divided evenly go to different members for
//! different topics.

use std::collections::HashSet;

/// One partition of one topic, with its owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seat {
    /// The topic that it is of.
    pub topic_id: i64,
    /// The partition, among those of all topics.
    pub partition_id: i64,
    /// The member that owns it, live or not.
    pub owner: Option<i64>,
}

/// The partitions that a member must take and give up.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Share {
    /// Free partitions that it takes.
    pub take: Vec<i64>,
    /// Partitions that it owns beyond its quota.
    pub give_up: Vec<i64>,
    /// Every partition of its topics has a live owner once `take` is taken.
    pub complete: bool,
}

/// The share of `me`. `members` are the live ones with the topics they read, in the order in which
/// they joined; `seats` are those of all topics, by partition.
pub fn share(me: i64, members: &[(i64, Vec<i64>)], seats: &[Seat]) -> Share {
    let alive: HashSet<i64> = members.iter().map(|(member, _)| *member).collect();
    let Some((_, topics)) = members.iter().find(|(member, _)| *member == me) else { return Share::default() };
    let mut share = Share { complete: true, ..Share::default() };
    for topic_id in topics {
        let readers: Vec<i64> =
            members.iter().filter(|(_, topics)| topics.contains(topic_id)).map(|(member, _)| *member).collect();
        let rank = readers.iter().position(|member| *member == me).unwrap_or_default();
        let of_topic: Vec<&Seat> = seats.iter().filter(|seat| seat.topic_id == *topic_id).collect();
        let quota = quota(of_topic.len(), readers.len(), rank, *topic_id);
        let mine: Vec<i64> = of_topic.iter().filter(|seat| seat.owner == Some(me)).map(|s| s.partition_id).collect();
        let free: Vec<i64> = of_topic
            .iter()
            .filter(|seat| seat.owner.is_none_or(|owner| !alive.contains(&owner)))
            .map(|seat| seat.partition_id)
            .collect();
        if mine.len() > quota {
            share.give_up.extend(&mine[quota..]);
        }
        let take = quota.saturating_sub(mine.len()).min(free.len());
        share.complete &= take == free.len();
        share.take.extend(&free[..take]);
    }
    share
}

/// How many of a topic's partitions the reader of this rank gets. If the number cannot be divided
/// evenly, some readers get one more; which ones depends on the topic.
fn quota(partitions: usize, readers: usize, rank: usize, topic_id: i64) -> usize {
    let turned = (rank + usize::try_from(topic_id).unwrap_or_default() % readers) % readers;
    partitions / readers + usize::from(turned < partitions % readers)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    /// Applies the shares of all members in turn until nothing changes; returns the rounds.
    fn settle(members: &[(i64, Vec<i64>)], seats: &mut [Seat]) -> usize {
        for round in 1..20 {
            let mut changed = false;
            for (me, _) in members {
                let share = share(*me, members, seats);
                for seat in seats.iter_mut() {
                    if share.take.contains(&seat.partition_id) {
                        (seat.owner, changed) = (Some(*me), true);
                    }
                    if share.give_up.contains(&seat.partition_id) {
                        (seat.owner, changed) = (None, true);
                    }
                }
            }
            if !changed {
                return round;
            }
        }
        panic!("the members never agree: {seats:?}");
    }

    fn seats_of(topics: &[(i64, i64)]) -> Vec<Seat> {
        let of_topic = |(topic_id, partitions): &(i64, i64)| {
            let topic_id = *topic_id;
            (0..*partitions).map(move |n| Seat { topic_id, partition_id: topic_id * 100 + n, owner: None })
        };
        topics.iter().flat_map(of_topic).collect()
    }

    proptest! {
        #[test]
        fn every_partition_finds_one_owner_and_loads_differ_by_at_most_one(
            partitions in 1_i64..9, readers in 1_usize..7, owners in proptest::collection::vec(0_i64..9, 9),
        ) {
            let members: Vec<(i64, Vec<i64>)> = (1..=i64::try_from(readers).unwrap()).map(|m| (m, vec![1])).collect();
            let mut seats = seats_of(&[(1, partitions)]);
            // Any start: owned by live members, by a dead one (member 8), or free.
            for (seat, owner) in seats.iter_mut().zip(owners) {
                seat.owner = Some(owner).filter(|owner| *owner > 0);
            }
            settle(&members, &mut seats);
            let count = |member: i64| seats.iter().filter(|seat| seat.owner == Some(member)).count();
            let counts: Vec<usize> = members.iter().map(|(member, _)| count(*member)).collect();
            prop_assert_eq!(counts.iter().sum::<usize>(), seats.len());
            prop_assert!(counts.iter().max().unwrap() - counts.iter().min().unwrap() <= 1);
        }
    }

    #[test]
    fn a_newcomer_takes_nothing_from_a_live_member_and_the_others_keep_what_is_within_their_quota() {
        let mut seats = seats_of(&[(1, 4)]);
        settle(&[(1, vec![1])], &mut seats);
        let both = [(1, vec![1]), (2, vec![1])];
        let newcomer = share(2, &both, &seats);
        assert_eq!((newcomer.take.len(), newcomer.give_up.len()), (0, 0));
        assert!(newcomer.complete, "others hold them all");
        assert_eq!(share(1, &both, &seats).give_up.len(), 2);
    }

    #[test]
    fn topics_of_one_partition_are_spread_over_the_members() {
        let mut seats = seats_of(&[(1, 1), (2, 1), (3, 1), (4, 1)]);
        let topics = vec![1, 2, 3, 4];
        settle(&[(1, topics.clone()), (2, topics)], &mut seats);
        assert_eq!(seats.iter().filter(|seat| seat.owner == Some(1)).count(), 2, "{seats:?}");
    }

    #[test]
    fn a_member_gets_only_partitions_of_topics_it_reads() {
        let mut seats = seats_of(&[(1, 2), (2, 2)]);
        let members = [(1, vec![1]), (2, vec![1, 2])];
        settle(&members, &mut seats);
        assert!(seats.iter().filter(|seat| seat.topic_id == 2).all(|seat| seat.owner == Some(2)), "{seats:?}");
        assert_eq!(seats.iter().filter(|seat| seat.owner == Some(1)).count(), 1, "{seats:?}");
    }
}
