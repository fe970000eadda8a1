//! Pure: no I/O, no clock.
//! How a run ended, decided by what is certain and not only by the status code (O10, O12, O13, M69
//! to M77).
//!
//! Guarantees:
//!
//! * A run that may have had an effect and whose end was not seen becomes UNKNOWN. "Retryable" is
//!   written only where no effect can be outstanding: the handler says so, its transaction is known
//!   to be rolled back, or (mode bridged) the operation's own code did not begin.
//! * A request that was refused before the operation began frees its key, so a typing error does
//!   not block the key for a day.
//! * A rate limit or a timeout is never stored as an answer to replay, unless the author said so by
//!   a tag. A missing login is stored only if the operation had begun or may have begun.
//! * After a guard has committed, the outcome is what it stored, whatever inner layers answer (O2).
//! * In mode bridged only the guard's commit is a success. A run that reports success without it
//!   may have committed by itself. So may a run that may have begun, did not ask the guard to
//!   commit, and panicked or answered a status such as 500. Both become UNKNOWN. Otherwise it would
//!   stay hidden that such a route executes twice when its process is killed.
//!
//! Not here: commits whose outcome is unknown ([`doubt`](super::doubt)), phases
//! ([`flow`](super::flow)), and what is kept of an answer.

use super::record::{Mode, State};
use super::route::Route;

/// What a handler reports about its run, with the answer. Typed handlers return it; others may
/// attach it to their answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome<R> {
    /// The effect happened. The value is the answer.
    Completed(R),
    /// A business rule refused the request, and nothing happened.
    Rejected {
        /// The answer that tells the client of the refusal.
        answer: R,
        /// Whether the refusal holds for this key for ever (`INSUFFICIENT_FUNDS`), or for this try.
        binding: bool,
    },
    /// Nothing happened, and no effect is outstanding. The same key may run again.
    Retryable(R),
    /// It is not known whether the effect happened. Recovery or an operator must find out.
    Unknown(R),
    /// Nothing happened, and nothing must be stored.
    DontStore(R),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Untagged {
    Status(u16),
    Failed,
}

/// What is known of the run besides its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    pub mode: Mode,
    pub reached: Reached,
    /// The route's setting [`Route::release_untagged`].
    pub release_untagged: bool,
}

/// How far a run came.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Reached {
    /// The code was called and reached no `Idempotent<E>`, so it is not known whether the request
    /// was let in.
    Called,
    /// The code was called, and the `started` flag is not set: no extractor let the request in.
    NotStarted,
    /// The code was called, and the guard's `started` flag is set.
    Started,
    /// The guard was asked to commit, and rolled everything back.
    Undone,
    CommitUnknown,
    Committed,
}

/// What the engine does with the record, by one statement that compares the epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Settle {
    /// Write this state with the answer. In a transactional operation, a binding rejection first
    /// rolls back to the savepoint.
    Finish(State),
    /// Delete the record; in a transactional operation, roll everything back.
    Release,
    /// The outcome is stored already: answer it.
    Stored,
    /// Write nothing. The lease ends, and the next request finds the outcome or takes over.
    Leave,
}

impl<R> Outcome<R> {
    /// The answer without the handler's report.
    pub(crate) fn into_answer(self) -> R {
        match self {
            Self::Completed(answer)
            | Self::Rejected { answer, .. }
            | Self::Retryable(answer)
            | Self::Unknown(answer)
            | Self::DontStore(answer) => answer,
        }
    }

    /// Decides what is done with the record after a run that ended with a tag.
    pub(crate) fn settle(&self, run: Run) -> Settle {
        if let Some(settled) = run.settled() {
            return settled;
        }
        match self {
            Self::Completed(_) => Settle::Finish(run.success()),
            Self::Rejected { binding: true, .. } => Settle::Finish(State::FailedReplayable),
            Self::Unknown(_) => Settle::Finish(State::UnknownRequiresRecovery),
            // A transactional operation that was rolled back leaves no row to mark (O29).
            Self::Retryable(_) if run.mode != Mode::Transactional => Settle::Finish(State::FailedRetryable),
            Self::Rejected { binding: false, .. } | Self::Retryable(_) | Self::DontStore(_) => Settle::Release,
        }
    }
}

impl Run {
    pub(crate) fn of(route: &Route, reached: Reached) -> Self {
        Self { mode: route.mode, reached, release_untagged: route.release_untagged }
    }

    /// The decision that does not depend on the answer, if there is one.
    fn settled(self) -> Option<Settle> {
        match self.reached {
            Reached::Committed => Some(Settle::Stored),
            Reached::CommitUnknown => Some(Settle::Leave),
            Reached::Called | Reached::NotStarted | Reached::Started | Reached::Undone => None,
        }
    }

    /// Decides what is done with the record after a run that ended without a tag.
    pub(crate) fn settle(self, end: Untagged) -> Settle {
        if let Some(settled) = self.settled() {
            return settled;
        }
        match end {
            Untagged::Status(200..=399) => Settle::Finish(self.success()),
            // They refuse a request for its form or its caller, before the operation begins.
            Untagged::Status(400 | 401 | 403 | 405 | 406 | 411 | 413 | 414 | 415 | 417 | 422 | 426 | 428 | 431)
                if self.frees_refusals() =>
            {
                Settle::Release
            }
            Untagged::Status(408 | 425 | 429) => self.lost(),
            Untagged::Status(400..=499) => Settle::Finish(State::FailedReplayable),
            Untagged::Status(_) | Untagged::Failed => self.lost(),
        }
    }

    fn frees_refusals(self) -> bool {
        match self.reached {
            Reached::NotStarted => true,
            Reached::Called => self.release_untagged,
            _ => false,
        }
    }

    /// The state after a success that the guard did not commit.
    fn success(self) -> State {
        if self.mode == Mode::Bridged { State::UnknownRequiresRecovery } else { State::Completed }
    }

    /// Decides what is done when the end was not seen. If all effects are in a transaction that is
    /// known to be rolled back, or the operation's own code did not begin, nothing happened.
    fn lost(self) -> Settle {
        match (self.mode, self.reached) {
            (Mode::Transactional, _) => Settle::Release,
            (Mode::Bridged, Reached::Undone | Reached::NotStarted) => Settle::Finish(State::FailedRetryable),
            (Mode::Bridged | Mode::Edge | Mode::Phased, _) => Settle::Finish(State::UnknownRequiresRecovery),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REACHED: [Reached; 3] = [Reached::Called, Reached::NotStarted, Reached::Started];
    /// The statuses of refusals (O10): without a tag they free the key as long as no extractor has
    /// let the request in.
    const REFUSALS: [u16; 14] = [400, 401, 403, 405, 406, 411, 413, 414, 415, 417, 422, 426, 428, 431];
    const UNKNOWN: Settle = Settle::Finish(State::UnknownRequiresRecovery);
    const FAILURE: Settle = Settle::Finish(State::FailedReplayable);

    fn run(mode: Mode, reached: Reached) -> Run {
        Run { mode, reached, release_untagged: false }
    }

    // Shown by: releasing 429 (it was in the list of a published middleware); 501 and 505; 408.
    #[test]
    fn o10_what_was_called_and_not_seen_to_end_is_unknown() {
        for reached in REACHED {
            for release_untagged in [true, false] {
                for mode in [Mode::Edge, Mode::Phased] {
                    let run = Run { release_untagged, ..run(mode, reached) };
                    let ends =
                        (500..=599).chain([0, 100, 101, 199, 408, 425, 429, 600, u16::MAX]).map(Untagged::Status);
                    for end in ends.chain([Untagged::Failed]) {
                        assert_eq!(run.settle(end), UNKNOWN, "{end:?} {run:?}");
                    }
                }
            }
        }
    }

    // Shown by: releasing whatever the flag says; never releasing.
    #[test]
    fn o10_m70_m72_a_refusal_frees_the_key_only_before_the_operation_has_started() {
        for status in 400..=499 {
            let settle = |reached, release_untagged| {
                Run { release_untagged, ..run(Mode::Edge, reached) }.settle(Untagged::Status(status))
            };
            if [408, 425, 429].contains(&status) {
                continue;
            }
            let freed = if REFUSALS.contains(&status) { Settle::Release } else { FAILURE };
            assert_eq!(settle(Reached::NotStarted, false), freed, "{status}");
            assert_eq!(settle(Reached::Called, true), freed, "{status}");
            assert_eq!(settle(Reached::Called, false), FAILURE, "{status}");
            assert_eq!(settle(Reached::Started, true), FAILURE, "{status}");
        }
    }

    // Shown by: treating `Rejected` without looking at `binding`; FAILED_RETRYABLE in a
    // transactional operation.
    #[test]
    fn m71_m76_a_tag_says_what_is_certain() {
        let settle = |outcome: &Outcome<()>, mode| outcome.settle(run(mode, Reached::Started));
        for mode in Mode::ALL {
            let success = if mode == Mode::Bridged { UNKNOWN } else { Settle::Finish(State::Completed) };
            assert_eq!(settle(&Outcome::Completed(()), mode), success, "a bridged success is what its guard commits");
            assert_eq!(settle(&Outcome::Rejected { answer: (), binding: true }, mode), FAILURE);
            assert_eq!(settle(&Outcome::Rejected { answer: (), binding: false }, mode), Settle::Release);
            assert_eq!(settle(&Outcome::Unknown(()), mode), UNKNOWN);
            assert_eq!(settle(&Outcome::DontStore(()), mode), Settle::Release);
            let retryable =
                if mode == Mode::Transactional { Settle::Release } else { Settle::Finish(State::FailedRetryable) };
            assert_eq!(settle(&Outcome::Retryable(()), mode), retryable);
        }
    }

    // Shown by: UNKNOWN in mode bridged where the guard has rolled back (a burnt key, M75);
    // FAILED_RETRYABLE in mode edge.
    #[test]
    fn m74_m75_a_failure_is_retryable_only_where_its_transaction_is_known_to_have_rolled_back() {
        for reached in REACHED {
            for end in [Untagged::Status(500), Untagged::Status(503), Untagged::Status(408), Untagged::Failed] {
                assert_eq!(run(Mode::Transactional, reached).settle(end), Settle::Release, "no row is left (O29)");
                let bridged =
                    if reached == Reached::NotStarted { Settle::Finish(State::FailedRetryable) } else { UNKNOWN };
                assert_eq!(run(Mode::Bridged, reached).settle(end), bridged, "{reached:?}");
                let undone = run(Mode::Bridged, Reached::Undone).settle(end);
                assert_eq!(undone, Settle::Finish(State::FailedRetryable));
                assert_eq!(run(Mode::Edge, reached).settle(end), UNKNOWN);
            }
        }
    }

    // Shown by: asking the answer before the guard.
    #[test]
    fn o2_once_the_guard_has_committed_its_outcome_stands_whatever_is_answered() {
        for (reached, settled) in [(Reached::Committed, Settle::Stored), (Reached::CommitUnknown, Settle::Leave)] {
            for mode in Mode::ALL {
                for status in 0..=600 {
                    assert_eq!(run(mode, reached).settle(Untagged::Status(status)), settled);
                }
                assert_eq!(run(mode, reached).settle(Untagged::Failed), settled);
                assert_eq!(Outcome::DontStore(()).settle(run(mode, reached)), settled);
                assert_eq!(Outcome::Retryable(()).settle(run(mode, reached)), settled);
            }
        }
    }
}
