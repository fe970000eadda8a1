//! Pure: no I/O, no clock.
//! What follows a transaction whose outcome is not known (O1, G12): the transaction of a
//! transactional operation, or of a later phase of a phased one.
//!
//! There are two cases. The connection was lost during COMMIT. Or the proof that the transaction is
//! still the same failed before COMMIT, because a handler ended the transaction by raw SQL or
//! ignored an error that rolled it back. Then a new connection reads the record, for up to a second
//! (O29), and the result decides.
//!
//! Guarantees: "nothing happened" is answered only where it is proven. Otherwise the record becomes
//! UNKNOWN, with an alarm. No retry executes while an earlier effect may exist.
//!
//! Not here: the proof itself and the read (`store`).

use super::problem::Code;
use super::record::State;

/// What is known of a later phase that did not move its operation on (O9). An error of its
/// transaction (a lost connection, no answer in time) proves nothing, and neither does the death of
/// its process. In these cases the phase is begun again, and finds [`Self::Marked`] or
/// [`Self::Unmarked`].
///
/// | known | the phase |
/// |---|---|
/// | undone | runs again |
/// | ended | goes to an operator |
/// | unmarked | runs again |
/// | marked | goes to an operator |
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Trace {
    /// The transaction was rolled back, or the server proves that nothing of it was committed.
    Undone,
    /// The phase's transaction is gone, and nothing proves that it committed nothing.
    Ended,
    /// The phase was begun again: all earlier runs were rolled back.
    Unmarked,
    /// The phase was begun again: an earlier run was committed by the handler. The engine moves the
    /// operation on in the same commit, and that did not happen.
    Marked,
}

impl Trace {
    /// Whether the phase may run again. If not, only a person can find out what it did.
    #[must_use]
    pub(crate) fn may_run_again(self) -> bool {
        matches!(self, Self::Undone | Self::Unmarked)
    }
}

/// Why a transaction's outcome is not known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Doubt {
    /// COMMIT was sent after the proof had held, and no answer came. Or the handler failed, and the
    /// check that it has not committed by itself got no answer in time.
    CommitLost,
    /// The transaction's token was gone before COMMIT.
    TokenGone {
        /// Whether it is proven that no statement ran after the lost transaction, so that nothing
        /// was autocommitted.
        nothing_ran_after: bool,
    },
}

/// What a new connection found under the key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Look {
    /// The store did not answer within a second.
    NoAnswer,
    /// There is no committed record under the key.
    Nothing,
    /// There is a record of this run: it has its operation id.
    Ours(State),
    /// There is a record of another run. It claimed the key after this run was rolled back.
    Anothers,
}

/// What the engine does, and what it answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Aftermath {
    /// The run was committed: answer the stored outcome.
    Stored,
    /// Answer 503. A retry with the same key finds the outcome, or finds nothing and runs.
    CommitUnknown,
    /// Insert an UNKNOWN record if there is none of this run, raise the alarm, answer 500.
    InsertUnknown,
    /// Change the committed claim to UNKNOWN, raise the alarm, answer 500.
    MarkUnknown,
    /// Raise the alarm and answer 500. The record is UNKNOWN already, or the key is another run's.
    Ended,
}

impl Doubt {
    /// Decides what follows from what the new connection found.
    #[must_use]
    pub(crate) fn after(self, look: Look) -> Aftermath {
        match (self, look) {
            (_, Look::Ours(State::InProgress)) => Aftermath::MarkUnknown,
            (_, Look::Ours(State::UnknownRequiresRecovery)) => Aftermath::Ended,
            // COMMIT arrived, or the handler ended the transaction after the outcome was written.
            // The outcome is committed.
            (_, Look::Ours(_)) => Aftermath::Stored,
            (Self::CommitLost, _) | (Self::TokenGone { nothing_ran_after: true }, _) => Aftermath::CommitUnknown,
            // The insert is also tried if the store did not answer: it changes no record.
            (Self::TokenGone { nothing_ran_after: false }, Look::Nothing | Look::NoAnswer) => Aftermath::InsertUnknown,
            // The key belongs to another run, so only the alarm is left.
            (Self::TokenGone { nothing_ran_after: false }, Look::Anothers) => Aftermath::Ended,
        }
    }
}

impl Aftermath {
    /// The problem code of the answer; `None` if the stored outcome is answered.
    #[must_use]
    pub(crate) fn code(self) -> Option<Code> {
        match self {
            Self::Stored => None,
            Self::CommitUnknown => Some(Code::CommitUnknown),
            Self::InsertUnknown | Self::MarkUnknown | Self::Ended => Some(Code::TransactionEnded),
        }
    }

    /// Whether a person must look: a handler ended its transaction.
    #[must_use]
    pub(crate) fn is_alarm(self) -> bool {
        self.code() == Some(Code::TransactionEnded)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GONE: Doubt = Doubt::TokenGone { nothing_ran_after: false };
    const PROVEN: Doubt = Doubt::TokenGone { nothing_ran_after: true };
    const LOOKS: [Look; 8] = [
        Look::NoAnswer,
        Look::Nothing,
        Look::Anothers,
        Look::Ours(State::InProgress),
        Look::Ours(State::Completed),
        Look::Ours(State::FailedReplayable),
        Look::Ours(State::FailedRetryable),
        Look::Ours(State::UnknownRequiresRecovery),
    ];

    // The whole table. Shown by: 503 where no record is found, whatever ran after the lost
    // transaction (two effects on PostgreSQL).
    #[test]
    fn o1_what_follows_a_doubt_for_every_look() {
        use Aftermath::{CommitUnknown, Ended, InsertUnknown, MarkUnknown, Stored};
        for (doubt, expected) in [
            (
                Doubt::CommitLost,
                [CommitUnknown, CommitUnknown, CommitUnknown, MarkUnknown, Stored, Stored, Stored, Ended],
            ),
            (PROVEN, [CommitUnknown, CommitUnknown, CommitUnknown, MarkUnknown, Stored, Stored, Stored, Ended]),
            (GONE, [InsertUnknown, InsertUnknown, Ended, MarkUnknown, Stored, Stored, Stored, Ended]),
        ] {
            assert_eq!(LOOKS.map(|look| doubt.after(look)), expected, "{doubt:?}");
        }
    }

    // Shown by: running a phase again although its mark exists (its effect was there twice).
    #[test]
    fn o9_a_later_phase_runs_again_as_the_table_says_for_every_trace() {
        let all = [
            ("undone", Trace::Undone),
            ("ended", Trace::Ended),
            ("unmarked", Trace::Unmarked),
            ("marked", Trace::Marked),
        ];
        let lines = include_str!("doubt.rs").lines().skip_while(|line| !line.starts_with("/// | known |")).skip(2);
        let rows: Vec<&str> = lines.take_while(|line| line.starts_with("/// |")).collect();
        assert_eq!(rows.len(), all.len());
        for (row, (name, trace)) in rows.iter().zip(all) {
            let follows = if trace.may_run_again() { "runs again" } else { "goes to an operator" };
            assert_eq!(*row, format!("/// | {name} | {follows} |"));
        }
    }

    #[test]
    fn o1_a_retry_is_invited_only_where_nothing_may_have_been_done_beside_the_record() {
        for look in LOOKS {
            assert!(GONE.after(look).code().is_none_or(|code| !code.retryable()), "{look:?}");
            for doubt in [Doubt::CommitLost, PROVEN, GONE] {
                let aftermath = doubt.after(look);
                assert_eq!(aftermath.is_alarm(), aftermath.code().is_some_and(|code| code.status() == 500));
            }
        }
    }
}
