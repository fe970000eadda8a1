//! Pure: no I/O, no clock.
//! The offset at which a consumer begins to read a partition.
//!
//! Promise: a partition never begins above the offset up to which the database knows that
//! everything is done, whatever offset the group has committed at the broker. A database that went
//! back (a standby that was promoted, a backup that was restored) lowers the start. It begins above
//! that offset only where the broker has deleted the records between, and this is reported. A topic
//! that was deleted and made again is read from its beginning, if ids of topics are known or the
//! position is beyond its end. Not here: reading the two positions (`store`, `broker`).

/// The position of a consumer in a partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Position {
    /// The topic's id, if the broker reports one. A topic that is made again has another id.
    pub topic_id: Option<String>,
    /// The next offset. Everything before it is done.
    pub next: i64,
}

/// What the broker reports of a partition that was assigned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BrokerOffsets {
    /// The id of the topic, if the broker reports one.
    pub topic_id: Option<String>,
    /// The offset that the group has committed.
    pub committed: Option<i64>,
    /// The first offset that the broker still has; 0 where it cannot be asked now.
    pub first: i64,
    /// The offset that the next record gets; the largest number where that cannot be asked now.
    pub end: i64,
}

/// Where to begin in a partition, and why not at the consumer's position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Start {
    /// The first offset to be delivered.
    pub at: i64,
    /// Why the consumer does not continue at its position; `None` if it does.
    pub because: Option<Break>,
}

/// Why a consumer does not continue at its position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Break {
    /// The topic was deleted and made again. The consumer begins at the first offset.
    MadeAnew {
        /// The first offset that the broker still has.
        first: i64,
    },
    /// The consumer's position is beyond the end. It begins at the first offset.
    BeyondEnd {
        /// The position of the consumer.
        stood: i64,
        /// Where the partition ends.
        end: i64,
    },
    /// The broker deleted records that were not done. The consumer begins at the first one left.
    Lost {
        /// The position of the consumer.
        stood: i64,
        /// The first offset that is left.
        first: i64,
    },
}

/// Decides where to begin. `remembered` is the position that the consumer's database holds.
#[must_use]
pub fn start(remembered: Option<&Position>, found: &BrokerOffsets) -> Start {
    let beginning = |because| Start { at: found.first, because };
    let known_id = remembered.and_then(|position| position.topic_id.as_ref());
    if let (Some(known), Some(id)) = (known_id, &found.topic_id)
        && known != id
    {
        return beginning(Some(Break::MadeAnew { first: found.first }));
    }
    let known = remembered.map(|position| position.next);
    // Up to here everything is done.
    let Some(done) = known.or(found.committed) else {
        return beginning(None);
    };
    // A broker that was restored from a copy has lost records and offsets alike, and gives the
    // offsets of the lost ones to others: so the position in the database alone is enough. The
    // committed offset is asked only where there is none: after a break it stays beyond the end
    // until something is acknowledged, and would tell the same break at each assignment.
    if done > found.end {
        return beginning(Some(Break::BeyondEnd { stood: done, end: found.end }));
    }
    if done < found.first {
        return beginning(Some(Break::Lost { stood: done, first: found.first }));
    }
    // The lower one. The committed offset is ahead when the database went back, and behind when a
    // commit of offsets was lost.
    Start { at: found.committed.map_or(done, |committed| committed.min(done)).max(found.first), because: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(committed: Option<i64>) -> BrokerOffsets {
        BrokerOffsets { topic_id: Some("a".to_owned()), committed, first: 10, end: 100 }
    }

    fn at(topic_id: Option<&str>, next: i64) -> Position {
        Position { topic_id: topic_id.map(str::to_owned), next }
    }

    #[test]
    fn the_lower_of_database_and_group_is_where_it_begins() {
        for (remembered, committed, expected) in [
            (None, None, 10),
            (None, Some(50), 50),
            (Some(at(Some("a"), 40)), None, 40),
            (Some(at(Some("a"), 40)), Some(50), 40),
            (Some(at(None, 60)), Some(50), 50),
            (Some(at(Some("a"), 100)), Some(100), 100),
            (None, Some(10), 10),
            // The records up to 60 are done, so those that the broker deleted are not lost.
            (Some(at(Some("a"), 60)), Some(5), 10),
        ] {
            let start = start(remembered.as_ref(), &found(committed));
            assert_eq!(start, Start { at: expected, because: None }, "{remembered:?} {committed:?}");
        }
    }

    #[test]
    fn a_topic_made_anew_begins_at_its_start_whatever_the_group_has_committed() {
        let begins = start(Some(&at(Some("b"), 50)), &found(Some(60)));
        assert_eq!(begins, Start { at: 10, because: Some(Break::MadeAnew { first: 10 }) });
    }

    #[test]
    fn what_was_deleted_before_it_was_read_and_what_is_beyond_the_end_are_told() {
        let lost = Some(Break::Lost { stood: 4, first: 10 });
        assert_eq!(start(Some(&at(Some("a"), 4)), &found(Some(20))), Start { at: 10, because: lost });
        assert_eq!(start(None, &found(Some(4))), Start { at: 10, because: lost });
        let beyond = Some(Break::BeyondEnd { stood: 101, end: 100 });
        assert_eq!(start(None, &found(Some(101))), Start { at: 10, because: beyond });
    }

    /// Shown by: comparing the lower position alone. Nothing was told, and with coordinates as ids
    /// the next records were taken for those that the broker has lost.
    #[test]
    fn g2_a_broker_that_went_back_with_its_offsets_is_told() {
        let beyond = Some(Break::BeyondEnd { stood: 101, end: 100 });
        for (remembered, committed) in [(101, 60), (101, 100), (101, 101)] {
            let begins = start(Some(&at(Some("a"), remembered)), &found(Some(committed)));
            assert_eq!(begins, Start { at: 10, because: beyond }, "{remembered} {committed}");
        }
    }

    /// Shown by: asking whether either position is beyond the end. Each assignment of a partition
    /// in which nothing was acknowledged since told the break again, and with coordinates as ids
    /// the partition was refused again after the new `id_epoch` was accepted.
    #[test]
    fn g2_a_break_that_was_told_is_not_told_again_for_the_old_offset_of_the_group() {
        for (topic_id, committed) in [("a", 101), ("old", 200)] {
            let found = found(Some(committed));
            let first = start(Some(&at(Some(topic_id), committed)), &found);
            assert!(first.because.is_some(), "{first:?}");
            let kept = at(found.topic_id.as_deref(), first.at);
            assert_eq!(start(Some(&kept), &found), Start { at: first.at, because: None });
        }
    }
}
