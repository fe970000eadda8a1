//! Pure: no I/O, no clock.
//! Which deliveries run with their attempt counted first, and which of them alone, so that the
//! attempts of a message that kills its process are counted (R26).
//!
//! Guarantees:
//!
//! * The normal path writes nothing per message: attempts are counted first only under suspicion.
//! * A message that kills the process comes again as one of the first `in_flight_max` deliveries
//!   that the inbox does not know, in a partition that was not closed cleanly, or with the
//!   redelivered flag. So it is counted from its second delivery on, and it is dead after
//!   `attempts_max` + 1 kills. One exception takes one more: see [`Suspicion::found_open`].
//! * After one death suspects run in batches, and one transaction counts their attempts: most of
//!   them only happened to be in flight. A message that was counted and comes again was in flight
//!   at a second death too. It runs alone, so that no other message is counted for its fault.
//!
//! Not here: the attempt rows and the assignment rows (`store`), and a message whose try failed,
//! which also runs alone ([`split`](super::split)). RabbitMQ has the redelivered flag and no
//! assignment row; Kafka and the embedded broker have the row and no flag.

/// What is known of a delivery before its handler runs. The inbox was asked before.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Facts {
    /// The inbox knows it. It is a duplicate, and no handler runs for it.
    pub known: bool,
    /// The broker says that it was delivered before.
    pub redelivered: bool,
    /// An attempt of it was counted already, or the retry policy allows only one attempt. It runs
    /// alone then, so that no death that another message caused is counted for it.
    pub may_not_be_blamed: bool,
}

/// How a delivery runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Run {
    /// In a batch with other messages of its lane.
    InBatch,
    /// In a batch of its lane, after its attempt was counted in a transaction of its own.
    Counted,
    /// In a transaction without others, after its attempt was counted in a transaction of its own.
    /// For its first second no other message of the process's consumers runs.
    Alone,
}

/// The suspicion against one partition since it was assigned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Suspicion {
    /// How many more deliveries are suspected, of those that the inbox does not know.
    unknown_left: usize,
}

impl Suspicion {
    /// No suspicion: the last owner closed the assignment cleanly, or there is no assignment row.
    pub(crate) fn closed() -> Self {
        Self { unknown_left: 0 }
    }

    /// The assignment row was found open: an owner died. At most `max_in_flight` deliveries that
    /// the inbox does not know were running or queued then. Messages that were set aside had not
    /// run. If they come first now, they are suspected instead of the killer behind them. It is
    /// counted after the next death, because the messages before it in its lane are done by then.
    pub(crate) fn found_open(max_in_flight: usize) -> Self {
        Self { unknown_left: max_in_flight }
    }

    /// Decides how this delivery runs. Call this once for each delivery: a suspected one lowers the
    /// number of deliveries that are still suspected.
    pub(crate) fn judge(&mut self, facts: Facts) -> Run {
        let among_first = !facts.known && self.unknown_left > 0;
        self.unknown_left -= usize::from(among_first);
        match !facts.known && (facts.redelivered || among_first) {
            false => Run::InBatch,
            true if facts.may_not_be_blamed => Run::Alone,
            true => Run::Counted,
        }
    }

    /// Whether further deliveries that the inbox does not know are suspected.
    pub(crate) fn is_active(self) -> bool {
        self.unknown_left > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEW: Facts = Facts { known: false, redelivered: false, may_not_be_blamed: false };

    #[test]
    fn r26_in_a_closed_partition_only_a_redelivered_message_is_counted() {
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
        let counted = Facts { may_not_be_blamed: true, ..NEW };
        assert_eq!(suspicion.judge(counted), Run::Alone);
        assert_eq!(suspicion.judge(Facts { redelivered: true, ..counted }), Run::Alone);
        assert_eq!(suspicion.judge(counted), Run::InBatch, "not suspected");
    }

    #[test]
    fn r26_a_duplicate_is_never_counted_because_no_handler_runs() {
        let mut suspicion = Suspicion::found_open(1);
        assert_eq!(suspicion.judge(Facts { known: true, redelivered: true, may_not_be_blamed: true }), Run::InBatch);
        assert!(suspicion.is_active(), "and it takes nothing from the count");
    }
}
