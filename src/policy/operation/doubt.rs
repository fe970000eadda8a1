//! What follows a transaction whose outcome is not known (O1, G12): of a transactional operation, and of a later phase
//! of a phased one.
//!
//! Two doubts: the connection was lost while COMMIT was on its way; or the proof that it is still
//! the same transaction failed before COMMIT, because a handler ended it by raw SQL or swallowed an
//! error that rolled it back. A fresh connection looks (for up to a second, O29), and what it finds
//! decides.
//!
//! Guarantees: "nothing happened" is said only where it is proven; else the record becomes UNKNOWN,
//! with an alarm. No retry executes beside an effect that may be there.
//!
//! Not here: the proof itself and the look (`store`).

use super::problem::Code;
use super::record::State;

/// What is known of a later phase of an operation that did not move its operation on (O9). An error of
/// its transaction (its connection was lost, the server said nothing in time) proves nothing, and
/// neither does a process that died: the phase is begun anew, and finds [`Self::Marked`] or
/// [`Self::Unmarked`].
///
/// | known | the phase |
/// |---|---|
/// | undone | runs again |
/// | ended | goes to an operator |
/// | unmarked | runs again |
/// | marked | goes to an operator |
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Trace {
    /// Its transaction was rolled back, or the server proves that nothing of it was committed.
    Undone,
    /// The transaction that the phase began in is not there any more, and nothing proves that it
    /// committed nothing.
    Ended,
    /// Begun anew: every run before was rolled back.
    Unmarked,
    /// Begun anew: a run before was committed, and not by us, who move the operation on in the same
    /// commit.
    Marked,
}

impl Trace {
    /// Whether the phase may run again. Else only a person can say what it did.
    #[must_use]
    pub fn may_run_again(self) -> bool {
        matches!(self, Self::Undone | Self::Unmarked)
    }
}

/// Why a transaction's outcome is not known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Doubt {
    /// COMMIT was sent, the proof had held, and no answer came; or none came in time when it was
    /// asked for the proof that a handler which failed has not committed by itself.
    CommitLost,
    /// The token was gone before COMMIT.
    TokenGone {
        /// Whether it is proven that no statement ran after the lost transaction, so that nothing
        /// was autocommitted.
        nothing_ran_after: bool,
    },
}

/// What a fresh connection found under the key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Look {
    /// The store did not answer within the second.
    NoAnswer,
    /// There is no committed record under the key.
    Nothing,
    /// A record of this run, by operation id.
    Ours(State),
    /// A record of another run: this one rolled back, and another request has claimed since.
    Anothers,
}

/// What is done and answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Aftermath {
    /// It was committed: answer what is stored.
    Stored,
    /// Answer 503; the retry with the same key finds the outcome, or nothing and runs.
    CommitUnknown,
    /// Insert the record as UNKNOWN where there is none of this run, raise the alarm, answer 500.
    InsertUnknown,
    /// Make the committed claim UNKNOWN, raise the alarm, answer 500.
    MarkUnknown,
    /// The alarm and 500; the record says it already.
    Ended,
}

impl Doubt {
    /// What follows from what the look found.
    #[must_use]
    pub fn after(self, look: Look) -> Aftermath {
        match (self, look) {
            (_, Look::Ours(State::InProgress)) => Aftermath::MarkUnknown,
            (_, Look::Ours(State::UnknownRequiresRecovery)) => Aftermath::Ended,
            // COMMIT arrived, or a handler ended the transaction after the outcome was written: it
            // stands.
            (_, Look::Ours(_)) => Aftermath::Stored,
            (Self::CommitLost, _) | (Self::TokenGone { nothing_ran_after: true }, _) => Aftermath::CommitUnknown,
            // Where the store did not answer, the insert is tried all the same: it changes no
            // record that is there.
            (Self::TokenGone { nothing_ran_after: false }, Look::Nothing | Look::NoAnswer) => Aftermath::InsertUnknown,
            // The key is another run's: all that is left is to say it loudly.
            (Self::TokenGone { nothing_ran_after: false }, Look::Anothers) => Aftermath::Ended,
        }
    }
}

impl Aftermath {
    /// The problem that is answered; none where the stored answer is.
    #[must_use]
    pub fn code(self) -> Option<Code> {
        match self {
            Self::Stored => None,
            Self::CommitUnknown => Some(Code::CommitUnknown),
            Self::InsertUnknown | Self::MarkUnknown | Self::Ended => Some(Code::TransactionEnded),
        }
    }

    /// Whether a person must look: a handler ended its transaction.
    #[must_use]
    pub fn is_alarm(self) -> bool {
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

    // The whole table. Shown by: 503 where no record is found, whatever ran after (two effects on
    // PostgreSQL).
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

    // Shown by: letting a phase run again whose mark stands (its effect was there twice).
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
