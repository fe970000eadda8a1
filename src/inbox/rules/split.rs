//! Pure: no I/O, no clock.
//! How a batch is run again after it was rolled back (R27).
//!
//! Guarantees:
//!
//! * The parts of a plan cover the batch once and in its order, so no part runs a later message of
//!   a key before an earlier one.
//! * The message that failed runs alone: no other shares its rollback, its retries or its attempts.
//! * A transient failure counts no attempt. The same batch is tried again, and is halved after
//!   every third failure, so that a batch which is too large to commit becomes small enough. If the
//!   handler of one message reported the failure, that message then runs alone. So a message whose
//!   own statement always fails this way is found after a few tries, whatever the size of the
//!   batch.
//!
//! Not here: which failure is transient (each adapter maps its own codes), and the retries of a
//! message that runs alone ([`retry`](crate::time::retry)).

use std::ops::Range;
use std::time::Duration;

use crate::time::retry::pause;

/// A part of a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Part {
    /// The indexes of the messages in the batch.
    pub messages: Range<usize>,
    /// Whether the part is one message that runs alone, under the retry policy.
    pub alone: bool,
}

/// The plan for a batch in which one message failed: the part before the message, the message
/// alone, the rest.
pub(crate) fn around(batch: Range<usize>, failed: usize) -> Vec<Part> {
    let together = |messages: Range<usize>| Part { messages, alone: false };
    let parts = [
        together(batch.start..failed),
        Part { messages: failed..failed + 1, alone: true },
        together(failed + 1..batch.end),
    ];
    parts.into_iter().filter(|part| !part.messages.is_empty()).collect()
}

/// The plan for a batch that failed as a whole, for example in a handler of batches or by a
/// constraint that is checked at COMMIT: two halves. Repeated, this finds the message that fails.
pub(crate) fn without_blame(batch: Range<usize>) -> Vec<Part> {
    let alone = batch.len() == 1;
    halves(batch).into_iter().map(|messages| Part { messages, alone }).collect()
}

/// Counts transient failures in a row, such as a deadlock, a lost connection, a full database.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct TransientFault {
    times: u32,
}

/// What to run after a transient failure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Again {
    /// The batch, or its parts, in order.
    pub parts: Vec<Part>,
    /// The pause before the first of them.
    pub pause: Duration,
}

/// The batch is halved each time this many more failures came in a row.
pub(crate) const TIMES_BEFORE_HALVING: u32 = 3;
/// The longest pause after the first failure. It doubles with each further failure.
pub(crate) const PAUSE_FIRST: Duration = Duration::from_millis(20);
/// The longest pause of all, so that work resumes within it after the cause has ended.
pub(crate) const PAUSE_MAX: Duration = Duration::from_secs(5);

impl TransientFault {
    /// The number of transient failures in a row.
    pub(crate) fn times(self) -> u32 {
        self.times
    }

    /// Sets the count to zero. Call this when a batch succeeded.
    pub(crate) fn reset(&mut self) {
        self.times = 0;
    }

    /// Counts a transient failure of one message, and returns the pause before its next try.
    /// `chance` is drawn from 0 to 1 and picks from half of the full pause to all of it.
    #[must_use]
    pub(crate) fn pause(&mut self, chance: f64) -> Duration {
        self.times = self.times.saturating_add(1);
        pause(PAUSE_FIRST, PAUSE_MAX, self.times, chance)
    }

    /// Counts a transient failure of this batch and returns what to run next. `of` is the message
    /// whose handler reported it, if one did. Halves do not reset the count, so pauses keep growing
    /// while the cause lasts.
    #[must_use]
    pub(crate) fn again(&mut self, batch: Range<usize>, of: Option<usize>, chance: f64) -> Again {
        let pause = self.pause(chance);
        let together = |messages: Range<usize>| Part { messages, alone: false };
        let parts = match of {
            _ if !self.times.is_multiple_of(TIMES_BEFORE_HALVING) => vec![together(batch)],
            Some(of) => {
                let (before, behind) = (halves(batch.start..of), halves(of + 1..batch.end));
                let it = Part { messages: of..of + 1, alone: true };
                before.into_iter().map(together).chain([it]).chain(behind.into_iter().map(together)).collect()
            }
            None => without_blame(batch),
        };
        Again { parts, pause }
    }
}

/// Two halves, the first not smaller than the second. A batch of one message stays whole.
fn halves(batch: Range<usize>) -> Vec<Range<usize>> {
    let middle = batch.start + batch.len().div_ceil(2);
    [batch.start..middle, middle..batch.end].into_iter().filter(|half| !half.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(parts: &[Part]) -> Vec<(usize, usize, bool)> {
        parts.iter().map(|part| (part.messages.start, part.messages.end, part.alone)).collect()
    }

    #[test]
    fn r27_the_part_before_runs_then_the_failed_message_alone_then_the_rest() {
        assert_eq!(shape(&around(0..5, 2)), [(0, 2, false), (2, 3, true), (3, 5, false)]);
        assert_eq!(shape(&around(0..5, 0)), [(0, 1, true), (1, 5, false)]);
        assert_eq!(shape(&around(3..5, 4)), [(3, 4, false), (4, 5, true)]);
        assert_eq!(shape(&around(0..1, 0)), [(0, 1, true)]);
    }

    #[test]
    fn a_batch_that_failed_as_a_whole_is_halved_down_to_one_message() {
        assert_eq!(shape(&without_blame(0..5)), [(0, 3, false), (3, 5, false)]);
        assert_eq!(shape(&without_blame(7..8)), [(7, 8, true)]);
        assert_eq!(shape(&without_blame(0..0)), []);
    }

    #[test]
    fn r27_a_transient_failure_is_tried_again_whole_and_halved_after_the_third_time() {
        let mut fault = TransientFault::default();
        for _ in 0..2 {
            assert_eq!(shape(&fault.again(0..5, None, 0.5).parts), [(0, 5, false)]);
        }
        assert_eq!(shape(&fault.again(0..5, None, 0.5).parts), [(0, 3, false), (3, 5, false)]);
        assert_eq!(shape(&fault.again(0..3, None, 0.5).parts), [(0, 3, false)], "each half has three times of its own");
        fault.reset();
        assert_eq!(fault.times(), 0);
        assert!(fault.again(0..3, None, 1.0).pause <= PAUSE_FIRST);
    }

    #[test]
    fn r27_the_message_that_reported_a_transient_failure_three_times_runs_alone_and_the_others_in_halves() {
        let third = |batch: Range<usize>, of| {
            let mut fault = TransientFault { times: 2 };
            shape(&fault.again(batch, of, 0.5).parts)
        };
        let together = |start, end| (start, end, false);
        assert_eq!(
            third(0..9, Some(4)),
            [together(0, 2), together(2, 4), (4, 5, true), together(5, 7), together(7, 9)]
        );
        assert_eq!(third(0..3, Some(0)), [(0, 1, true), together(1, 2), together(2, 3)]);
        assert_eq!(third(7..8, Some(7)), [(7, 8, true)]);
        assert_eq!(third(7..8, None), [(7, 8, true)], "one that is left runs alone as well");
    }

    #[test]
    fn one_message_that_fails_with_transient_errors_stays_one_and_its_pauses_stay_bounded() {
        let mut fault = TransientFault::default();
        let mut longest = Duration::ZERO;
        for _ in 0..100 {
            let again = fault.again(4..5, None, 1.0);
            assert!(again.pause >= longest && again.pause <= PAUSE_MAX);
            longest = again.pause;
            assert!(matches!(again.parts.as_slice(), [Part { messages, .. }] if *messages == (4..5)));
        }
        assert_eq!(longest, PAUSE_MAX);
    }
}
