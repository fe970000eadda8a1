//! Pure: no I/O, no clock.
//! Whether one message is the reason that a relay's sessions end (R16).
//!
//! Guarantees:
//!
//! * A message for which the broker reports no error is dead only when it was sent alone and ended
//!   three sessions, in each of which the broker first said that the topic can be sent to.
//! * A failure whose cause is known (the message, its destination, or a broker that is away) is not
//!   reported to this module and counts nothing.
//!
//! ```text
//!           ended twice at one row              proven, dead or diverted
//!  window ------------------------> alone(row) -------------------------> window
//! ```
//!
//! Not here: messages that the broker refuses, the question for the topic before its rows are sent
//! (R19), and the pause between sessions (`outbox::relay`). Nothing is persisted: a new process
//! suspects no row.

use std::collections::BTreeMap;

/// After this many ends of sessions at one row that is not settled, the row is sent alone.
const ENDS_BEFORE_ALONE: u32 = 2;
/// After this many ends of sessions at one row that was sent alone, the row is dead.
pub(crate) const ENDS_ALONE_BEFORE_DEAD: u32 = 3;
/// The maximum number of suspected rows. Beyond it the highest position is forgotten; sessions will
/// end at it again after the lower ones are settled.
const SUSPECTS_MAX: usize = 1_024;

/// The state that is kept between the sessions of one shard.
#[derive(Debug, Clone, Default)]
pub(crate) struct Isolation {
    /// The positions at which sessions ended, until they are settled. There can be several, because
    /// two bad rows may end sessions in turn.
    suspects: BTreeMap<i64, Suspect>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Suspect {
    /// Sessions that ended at this row in the usual mode.
    ends: u32,
    /// Sessions that ended while this row was sent alone.
    ends_alone: u32,
}

impl Isolation {
    /// The row that is sent with nothing else in flight, after everything before it is proven: of
    /// several rows to isolate the first one. `None` in the usual mode, with many rows in flight.
    pub(crate) fn alone(&self) -> Option<i64> {
        self.suspects.iter().find(|(_, suspect)| suspect.is_isolated()).map(|(position, _)| *position)
    }

    /// The row is proven, dead, diverted or gone.
    pub(crate) fn on_settled(&mut self, position: i64) {
        self.suspects.remove(&position);
    }

    /// Records that a session ended without a known cause. `position` is the first row that was
    /// sent and not proven. Returns true if that row is dead.
    pub(crate) fn on_session_end(&mut self, position: i64) -> bool {
        let alone = self.alone() == Some(position);
        let suspect = self.suspects.entry(position).or_default();
        let ends = if alone { &mut suspect.ends_alone } else { &mut suspect.ends };
        *ends = ends.saturating_add(1);
        let is_dead = suspect.ends_alone >= ENDS_ALONE_BEFORE_DEAD;
        if is_dead {
            self.suspects.remove(&position);
        }
        if self.suspects.len() > SUSPECTS_MAX {
            self.suspects.pop_last();
        }
        is_dead
    }
}

impl Suspect {
    fn is_isolated(&self) -> bool {
        self.ends >= ENDS_BEFORE_ALONE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROW: i64 = 40;

    #[test]
    fn r16_a_session_that_ends_twice_at_the_same_row_isolates_it() {
        let mut isolation = Isolation::default();
        assert!(!isolation.on_session_end(ROW) && !isolation.on_session_end(41));
        assert_eq!(isolation.alone(), None);
        assert!(!isolation.on_session_end(ROW));
        assert_eq!(isolation.alone(), Some(ROW));
        isolation.on_settled(ROW);
        assert_eq!(isolation.alone(), None);
    }

    #[test]
    fn two_bad_rows_that_end_sessions_by_turns_are_both_isolated_the_first_one_first() {
        let mut isolation = Isolation::default();
        for position in [41, ROW, 41, ROW] {
            isolation.on_session_end(position);
        }
        assert_eq!(isolation.alone(), Some(ROW));
        for _ in 0..10 {
            assert!(!isolation.on_session_end(41), "it was not alone");
        }
        isolation.on_settled(ROW);
        assert_eq!(isolation.alone(), Some(41));
        isolation.on_settled(41);
        assert_eq!(isolation.alone(), None);
    }

    #[test]
    fn a_row_that_was_settled_is_suspected_no_more() {
        let mut isolation = Isolation::default();
        isolation.on_session_end(ROW);
        isolation.on_settled(ROW);
        isolation.on_session_end(ROW);
        assert_eq!(isolation.alone(), None);
    }

    #[test]
    fn the_number_of_suspects_is_bounded() {
        let mut isolation = Isolation::default();
        for position in 0..10_000 {
            isolation.on_session_end(position);
        }
        assert_eq!(isolation.suspects.len(), SUSPECTS_MAX);
        isolation.on_session_end(0);
        assert_eq!(isolation.alone(), Some(0));
    }

    #[test]
    fn r16_three_ends_alone_make_it_dead() {
        let mut isolation = Isolation::default();
        let mut dead_after = |ends: usize| (0..ends).map(|_| isolation.on_session_end(ROW)).collect::<Vec<_>>();
        assert_eq!(dead_after(5), [false, false, false, false, true]);
    }
}
