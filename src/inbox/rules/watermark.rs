//! Pure: no I/O, no clock.
//! The low-water mark of finished deliveries of one partition: the number up to which a consumer
//! may commit offsets or acknowledge.
//!
//! Guarantees:
//!
//! * [`committable`](Watermark::committable) is always below the oldest delivery that is not
//!   finished. So nothing is acknowledged before its commit in the database returned (G5).
//! * Sequence numbers may start at any number and have holes; only delivered numbers count. Offsets
//!   of compacted or transactional Kafka topics have holes, RabbitMQ's delivery tags have none.
//!
//! Not here: the bound on what stands above the mark (`consumer::intake`, for all partitions
//! together). Kafka commits the offset *after* the mark, and RabbitMQ acknowledges `multiple` up to
//! it (`broker`).

use std::collections::VecDeque;

/// The deliveries of one partition, or of one channel, since it was assigned. Make a new one for a
/// new assignment.
#[derive(Debug, Default)]
pub(crate) struct Watermark {
    /// Deliveries above the mark in ascending order, each with whether it is finished. The first
    /// one is never finished.
    above: VecDeque<(i64, bool)>,
    mark: Option<i64>,
}

/// The number of a delivery is not above the last one: the partition was seeked or reassigned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("delivery {next} came after {last}")]
pub(crate) struct NotAscending {
    pub(crate) last: i64,
    pub(crate) next: i64,
}

impl Watermark {
    /// Records a delivery. After an error the caller must end the assignment.
    pub(crate) fn delivered(&mut self, next: i64) -> Result<(), NotAscending> {
        match self.above.back().map(|&(number, _)| number).or(self.mark) {
            Some(last) if next <= last => Err(NotAscending { last, next }),
            _ => {
                self.above.push_back((next, false));
                Ok(())
            }
        }
    }

    /// Records that a delivery is finished, that is, its transaction committed. Returns false if
    /// the delivery was unknown or finished before.
    pub(crate) fn finished(&mut self, sequence: i64) -> bool {
        let Ok(index) = self.above.binary_search_by_key(&sequence, |&(number, _)| number) else {
            return false;
        };
        if std::mem::replace(&mut self.above[index].1, true) {
            return false;
        }
        while let Some((number, _)) = self.above.pop_front_if(|&mut (_, finished)| finished) {
            self.mark = Some(number);
        }
        true
    }

    /// The highest number up to which all deliveries are finished; `None` until there is one.
    pub(crate) fn committable(&self) -> Option<i64> {
        self.mark
    }

    /// How many deliveries stand above the mark, finished or not.
    pub(crate) fn above(&self) -> usize {
        self.above.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unfinished_delivery_holds_the_mark_below_it() {
        let mut mark = Watermark::default();
        for offset in [3, 5, 9] {
            assert_eq!(mark.delivered(offset), Ok(()));
        }
        assert!(mark.finished(9));
        assert!(mark.finished(5));
        assert_eq!(mark.committable(), None);
        assert!(mark.finished(3));
        assert_eq!(mark.committable(), Some(9));
    }

    #[test]
    fn finishing_twice_or_what_was_never_delivered_changes_nothing() {
        let mut mark = Watermark::default();
        assert_eq!(mark.delivered(1).and(mark.delivered(2)), Ok(()));
        assert!(mark.finished(2));
        assert!(!mark.finished(2));
        assert!(!mark.finished(7));
        assert_eq!(mark.committable(), None);
    }

    #[test]
    fn what_is_finished_above_a_hole_still_takes_room() {
        let mut mark = Watermark::default();
        assert_eq!(mark.delivered(1).and(mark.delivered(2)), Ok(()));
        mark.finished(2);
        assert_eq!(mark.above(), 2);
        mark.finished(1);
        assert_eq!(mark.above(), 0);
    }

    #[test]
    fn a_number_that_does_not_ascend_is_refused_also_when_all_are_finished() {
        let mut mark = Watermark::default();
        assert_eq!(mark.delivered(5), Ok(()));
        assert_eq!(mark.delivered(5), Err(NotAscending { last: 5, next: 5 }));
        mark.finished(5);
        assert_eq!(mark.delivered(4), Err(NotAscending { last: 5, next: 4 }));
    }
}
