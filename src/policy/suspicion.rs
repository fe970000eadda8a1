//! Which deliveries run with their try counted first, and which of them alone, so that a killer is
//! counted (R26).
//!
//! Guarantees:
//!
//! * The good path writes nothing per message: without a reason for suspicion, nothing is counted.
//! * A message that kills the process is met again as one of the first `max_in_flight` unknown
//!   deliveries of a partition that was not closed cleanly, or with the redelivered flag. So it is
//!   counted from its second delivery on, and a killer is dead after N + 1 kills.
//! * After one death suspects run in batches, their tries counted in one transaction: nearly all of
//!   them only happened to be in flight. What was counted and comes once more was there at a second
//!   death: it runs alone, so that from then on nobody is counted for another's fault.
//!
//! Not here: the attempt rows and the assignment rows (`store`), and a message whose try failed,
//! which runs alone too ([`split`](super::split)). RabbitMQ has the redelivered flag and no
//! assignment row; Kafka and the embedded broker have the row and no flag.

/// What is known of a delivery when it is about to be handled. The inbox was asked before.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Facts {
    /// The inbox knew it: a duplicate, for which no handler runs.
    pub known: bool,
    /// The broker says that it was delivered before.
    pub redelivered: bool,
    /// A try of it was counted, or a message has only one: it cannot be counted for what another
    /// one did.
    pub has_none_to_spare: bool,
}

/// How a delivery runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Run {
    /// With the others of its lane.
    InBatch,
    /// With the others of its lane, after its first try was counted in a transaction of its own.
    Counted,
    /// Alone in the process, after its attempt was written in a transaction of its own.
    Alone,
}

/// The suspicion against one partition since it was assigned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Suspicion {
    /// How many more deliveries that the inbox does not know are suspected.
    unknown_left: usize,
}

impl Suspicion {
    /// The last owner closed the assignment cleanly, or there is no assignment row.
    #[must_use]
    pub fn closed() -> Self {
        Self { unknown_left: 0 }
    }

    /// The assignment row was found open: an owner died, with at most `max_in_flight` deliveries
    /// that ran or waited for their turn and that the inbox does not know. Those that stood aside
    /// did not run; where they come first now, a killer behind them is counted one death later,
    /// because those before it in its lane are done by then.
    #[must_use]
    pub fn found_open(max_in_flight: usize) -> Self {
        Self { unknown_left: max_in_flight }
    }

    /// How this delivery runs. What is suspected is taken from the count: it is asked about once.
    pub fn judge(&mut self, facts: Facts) -> Run {
        let among_first = !facts.known && self.unknown_left > 0;
        self.unknown_left -= usize::from(among_first);
        match !facts.known && (facts.redelivered || among_first) {
            false => Run::InBatch,
            true if facts.has_none_to_spare => Run::Alone,
            true => Run::Counted,
        }
    }

    /// Whether unknown deliveries are still suspected.
    #[must_use]
    pub fn is_active(self) -> bool {
        self.unknown_left > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEW: Facts = Facts { known: false, redelivered: false, has_none_to_spare: false };

    #[test]
    fn r26_without_suspicion_nothing_is_counted() {
        let mut suspicion = Suspicion::closed();
        for _ in 0..100 {
            assert_eq!(suspicion.judge(NEW), Run::InBatch);
        }
        assert_eq!(suspicion.judge(Facts { redelivered: true, ..NEW }), Run::Counted);
        assert_eq!(suspicion.judge(NEW), Run::InBatch);
    }

    #[test]
    fn r26_the_first_deliveries_that_the_inbox_did_not_know_are_counted_and_known_ones_do_not_take_from_them() {
        let mut suspicion = Suspicion::found_open(2);
        let known = Facts { known: true, ..NEW };
        for _ in 0..50 {
            assert_eq!(suspicion.judge(known), Run::InBatch);
        }
        assert_eq!(suspicion.judge(NEW), Run::Counted);
        assert_eq!(suspicion.judge(known), Run::InBatch);
        assert!(suspicion.is_active());
        assert_eq!(suspicion.judge(NEW), Run::Counted);
        assert!(!suspicion.is_active());
        assert_eq!(suspicion.judge(NEW), Run::InBatch);
    }

    #[test]
    fn r26_what_was_counted_before_runs_alone() {
        let mut suspicion = Suspicion::found_open(1);
        let counted = Facts { has_none_to_spare: true, ..NEW };
        assert_eq!(suspicion.judge(counted), Run::Alone);
        assert_eq!(suspicion.judge(Facts { redelivered: true, ..counted }), Run::Alone);
        assert_eq!(suspicion.judge(counted), Run::InBatch, "not suspected");
    }

    #[test]
    fn r26_a_duplicate_is_never_counted_because_no_handler_runs() {
        let mut suspicion = Suspicion::found_open(1);
        assert_eq!(suspicion.judge(Facts { known: true, redelivered: true, has_none_to_spare: true }), Run::InBatch);
        assert!(suspicion.is_active(), "and it takes nothing from the count");
    }
}
