//! Pure: no I/O, no clock.
//! Whether one message is the reason that a relay's sessions end (R16).
//!
//! Guarantees:
//!
//! * A message for which the broker reports no error is dead only when it was sent alone and ended
//!   three sessions, and a probe on a fresh session succeeded between them.
//! * A failure whose cause is known (the message, its destination, or a broker that is away) is not
//!   reported to this module and counts nothing.
//!
//! ```text
//!           ended twice at one row              proven, dead or diverted
//!  window ------------------------> alone(row) -------------------------> window
//! ```
//!
//! Not here: messages that the broker refuses, the probe itself, and the pause between sessions
//! (`outbox::relay`). Nothing is persisted: a new process suspects no row.

use std::collections::BTreeMap;

/// After this many ends of sessions at one row that is not settled, the row is sent alone.
const ENDS_BEFORE_ALONE: u32 = 2;
/// After this many ends of sessions at one row that was sent alone, with a successful probe between
/// them, the row is dead.
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
    /// Whether a probe succeeded since the last session that ended at this row alone.
    probed: bool,
}

impl Isolation {
    /// The row that is sent with nothing else in flight, after everything before it is proven: of
    /// several rows to isolate the first one. `None` in the usual mode, with many rows in flight.
    pub(crate) fn alone(&self) -> Option<i64> {
        self.suspects.iter().find(|(_, suspect)| suspect.is_isolated()).map(|(position, _)| *position)
    }

    /// Whether a probe must succeed on a fresh session before the row is sent alone again.
    pub(crate) fn needs_probe(&self) -> bool {
        let isolated = self.suspects.values().find(|suspect| suspect.is_isolated());
        isolated.is_some_and(|suspect| suspect.ends_alone > 0 && !suspect.probed)
    }

    /// A probe on a fresh session succeeded: Kafka knows a leader for the row's topic; RabbitMQ
    /// opened a channel and declared the exchange passively.
    pub(crate) fn on_probe_succeeded(&mut self) {
        if let Some(suspect) = self.suspects.values_mut().find(|suspect| suspect.is_isolated()) {
            suspect.probed = true;
        }
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
        if alone {
            suspect.ended_alone();
        } else {
            suspect.ends = suspect.ends.saturating_add(1);
        }
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

    fn ended_alone(&mut self) {
        // Without a successful probe between them, two ends may be one outage.
        if self.ends_alone == 0 || self.probed {
            self.ends_alone += 1;
            self.probed = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROW: i64 = 40;

    fn isolated() -> Isolation {
        let mut isolation = Isolation::default();
        assert!(!isolation.on_session_end(ROW) && !isolation.on_session_end(ROW));
        assert_eq!(isolation.alone(), Some(ROW));
        isolation
    }

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
    fn r16_three_ends_alone_with_a_successful_probe_between_make_it_dead() {
        let mut isolation = isolated();
        assert!(!isolation.needs_probe(), "the first try alone needs none");
        assert!(!isolation.on_session_end(ROW));
        assert!(isolation.needs_probe());
        isolation.on_probe_succeeded();
        assert!(!isolation.on_session_end(ROW));
        isolation.on_probe_succeeded();
        assert!(isolation.on_session_end(ROW));
    }

    #[test]
    fn r16_ends_alone_without_a_probe_between_are_an_outage_and_never_make_it_dead() {
        let mut isolation = isolated();
        for _ in 0..50 {
            assert!(!isolation.on_session_end(ROW));
        }
    }
}
