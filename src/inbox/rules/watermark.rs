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
//! * Memory is bounded: when the capacity is reached, the caller must pause the partition until the
//!   oldest delivery is finished.
//!
//! Not here: Kafka commits the offset *after* the mark, and RabbitMQ acknowledges `multiple` up to
//! it (`broker`).

use std::collections::VecDeque;
use std::fmt;

/// The deliveries of one partition, or of one channel, since it was assigned. Make a new one for a
/// new assignment.
#[derive(Debug)]
pub(crate) struct Watermark {
    capacity: usize,
    /// Deliveries above the mark in ascending order, each with whether it is finished. The first
    /// one is never finished.
    above: VecDeque<(i64, bool)>,
    mark: Option<i64>,
}

/// Why a delivery was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub(crate) enum WatermarkError {
    /// The number of deliveries above the mark has reached the capacity.
    Full,
    /// The number is not above the last one: the partition was seeked or reassigned.
    NotAscending {
        /// The last number taken.
        last: i64,
        /// The number that followed.
        next: i64,
    },
}

impl Watermark {
    /// A mark with room for this many deliveries above it.
    #[must_use]
    pub(crate) fn new(capacity: usize) -> Self {
        Self { capacity, above: VecDeque::new(), mark: None }
    }

    /// Records a delivery. Deliveries must come in ascending order.
    ///
    /// # Errors
    ///
    /// [`WatermarkError::Full`] until the oldest one is finished; after
    /// [`WatermarkError::NotAscending`] the caller must end the assignment.
    pub(crate) fn delivered(&mut self, sequence: i64) -> Result<(), WatermarkError> {
        if let Some(last) = self.last()
            && sequence <= last
        {
            return Err(WatermarkError::NotAscending { last, next: sequence });
        }
        if self.room() == 0 {
            return Err(WatermarkError::Full);
        }
        self.above.push_back((sequence, false));
        Ok(())
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
    #[must_use]
    pub(crate) fn committable(&self) -> Option<i64> {
        self.mark
    }

    /// How many deliveries stand above the mark, finished or not.
    #[must_use]
    pub(crate) fn above(&self) -> usize {
        self.above.len()
    }

    /// How many more deliveries fit.
    #[must_use]
    pub(crate) fn room(&self) -> usize {
        self.capacity.saturating_sub(self.above.len())
    }

    fn last(&self) -> Option<i64> {
        self.above.back().map(|&(number, _)| number).or(self.mark)
    }
}

impl fmt::Display for WatermarkError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => write!(f, "no room for another delivery until the oldest is finished"),
            Self::NotAscending { last, next } => write!(f, "delivery {next} came after {last}"),
        }
    }
}

impl std::error::Error for WatermarkError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unfinished_delivery_holds_the_mark_below_it() {
        let mut mark = Watermark::new(10);
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
        let mut mark = Watermark::new(10);
        assert_eq!(mark.delivered(1).and(mark.delivered(2)), Ok(()));
        assert!(mark.finished(2));
        assert!(!mark.finished(2));
        assert!(!mark.finished(7));
        assert_eq!(mark.committable(), None);
    }

    #[test]
    fn a_full_window_takes_nothing_until_the_oldest_is_finished() {
        let mut mark = Watermark::new(2);
        assert_eq!(mark.delivered(1).and(mark.delivered(2)), Ok(()));
        mark.finished(2);
        assert_eq!(mark.delivered(3), Err(WatermarkError::Full), "what is finished above a hole still takes room");
        mark.finished(1);
        assert_eq!(mark.delivered(3), Ok(()));
    }

    #[test]
    fn a_number_that_does_not_ascend_is_refused_also_when_all_are_finished() {
        let mut mark = Watermark::new(2);
        assert_eq!(mark.delivered(5), Ok(()));
        assert_eq!(mark.delivered(5), Err(WatermarkError::NotAscending { last: 5, next: 5 }));
        mark.finished(5);
        assert_eq!(mark.delivered(4), Err(WatermarkError::NotAscending { last: 5, next: 4 }));
    }
}
