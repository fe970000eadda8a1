//! Pure: no I/O, no clock.
//! What follows a transaction whose outcome is not known (O1, G12): that of a transactional
//! operation, or of the first phase of a phased one.
//!
//! There are two cases. The connection was lost during COMMIT. Or the proof that the transaction is
//! still the same failed before COMMIT, because a handler ended the transaction by raw SQL or
//! ignored an error that rolled it back. Then a new connection reads the record, for up to a second
//! (O29), and the result decides.
//!
//! Guarantees: "nothing happened" is answered only where it is proven. Where a retry finds out what
//! happened, the answer is 503. Otherwise the record becomes UNKNOWN, with an alarm. No retry
//! executes while an earlier effect may exist.
//!
//! Not here: the proof itself and the read (`store`).

use super::problem::Code;
use super::record::State;

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
    /// There is no committed record under the key but the one that this run began from.
    Nothing,
    /// There is a record of this run: it has its operation id, and is not the one that the run
    /// began from.
    Ours(State),
    /// There is a record of another run. It claimed the key after this run was rolled back.
    Anothers,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Aftermath {
    /// The run was committed: answer the stored outcome.
    Stored,
    /// Answer 503. A retry with the same key finds the outcome, or finds nothing and runs.
    CommitUnknown,
    /// Insert an UNKNOWN record, or make the one that the run began from UNKNOWN, if no other run
    /// has the key. Raise the alarm, answer 500.
    InsertUnknown,
    /// Change the committed claim to UNKNOWN, raise the alarm, answer 500.
    MarkUnknown,
    /// Raise the alarm and answer 500. The record is UNKNOWN already, or the key is another run's.
    Ended,
}

impl Doubt {
    pub(crate) fn after(self, look: Look) -> Aftermath {
        match (self, look) {
            (_, Look::Ours(State::InProgress)) => Aftermath::MarkUnknown,
            (_, Look::Ours(State::UnknownRequiresRecovery)) => Aftermath::Ended,
            // COMMIT arrived, or the handler ended the transaction after the outcome was written.
            // The outcome is committed.
            (_, Look::Ours(_)) => Aftermath::Stored,
            (Self::CommitLost, _) | (Self::TokenGone { nothing_ran_after: true }, _) => Aftermath::CommitUnknown,
            // This is also tried if the store did not answer: it changes no record of another run.
            (Self::TokenGone { nothing_ran_after: false }, Look::Nothing | Look::NoAnswer) => Aftermath::InsertUnknown,
            // The key belongs to another run, so only the alarm is left.
            (Self::TokenGone { nothing_ran_after: false }, Look::Anothers) => Aftermath::Ended,
        }
    }
}

impl Aftermath {
    /// The problem code of the answer; `None` if the stored outcome is answered.
    pub(crate) fn code(self) -> Option<Code> {
        match self {
            Self::Stored => None,
            Self::CommitUnknown => Some(Code::CommitUnknown),
            Self::InsertUnknown | Self::MarkUnknown | Self::Ended => Some(Code::TransactionEnded),
        }
    }

    /// Whether a person must look: a handler ended its transaction.
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
