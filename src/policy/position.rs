//! Where a consumer begins in a partition. Pure: no I/O, no clock.
//!
//! Promise: nothing is passed over that the database does not know as done, whatever the broker's
//! own note says. A database that went back (a standby that was promoted, a backup that was
//! restored) lowers the start; a topic that was made anew is read from its beginning; what the
//! broker has deleted before it was read is counted.

/// Where a consumer stands in a partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Position {
    /// Which topic of this name it is, where the broker tells: a topic made anew has another id.
    pub topic_id: Option<String>,
    /// The next offset: all before it is done.
    pub next: i64,
}

/// What the broker says of a partition that was assigned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Which topic of this name it is, where the broker tells.
    pub topic_id: Option<String>,
    /// What the group has committed.
    pub committed: Option<i64>,
    /// The first offset that is there.
    pub first: i64,
    /// The offset that the next record gets.
    pub end: i64,
}

/// Where a partition begins, and what is wrong with that.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Start {
    /// The first offset to be delivered.
    pub at: i64,
    /// Why it does not simply go on.
    pub because: Option<Break>,
}

/// Why a partition does not go on where its consumer stood.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Break {
    /// The topic was deleted and made anew: its beginning.
    MadeAnew {
        /// The first offset that is left: the broker has deleted what stood before it.
        first: i64,
    },
    /// The consumer stood beyond the end of the partition: its beginning.
    BeyondEnd {
        /// The offset at which the consumer stood.
        stood: i64,
        /// Where the partition ends.
        end: i64,
    },
    /// The broker has deleted records that were not done: the first one that is left.
    Lost {
        /// Where the consumer stood.
        stood: i64,
        /// The first offset that is left.
        first: i64,
    },
}

/// Where to begin, `remembered` being what the consumer's database knows.
#[must_use]
pub fn start(remembered: Option<&Position>, found: &Found) -> Start {
    let beginning = |because| Start { at: found.first, because };
    let known_id = remembered.and_then(|position| position.topic_id.as_ref());
    if let (Some(known), Some(id)) = (known_id, &found.topic_id)
        && known != id
    {
        return beginning(Some(Break::MadeAnew { first: found.first }));
    }
    // The group's note runs ahead where the database went back, and behind where a commit of
    // offsets got lost.
    let Some(stood) = remembered.map(|position| position.next).into_iter().chain(found.committed).min() else {
        return beginning(None);
    };
    if stood > found.end {
        return beginning(Some(Break::BeyondEnd { stood, end: found.end }));
    }
    if stood < found.first {
        return beginning(Some(Break::Lost { stood, first: found.first }));
    }
    Start { at: stood, because: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(committed: Option<i64>) -> Found {
        Found { topic_id: Some("a".to_owned()), committed, first: 10, end: 100 }
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
}
