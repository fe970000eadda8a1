//! Pure: no I/O, no clock.
//! The stages of a phased operation, and how a phase may end in each (O9, O13, M32).
//!
//! The recovery points of a flow (`LOCAL_PAYMENT_CREATED`, `PROVIDER_REQUEST_SENT`,
//! `PROVIDER_CONFIRMED`) have names that its author gives. Each point belongs to one of these
//! stages, and the stage decides what a retry or the recovery worker does:
//!
//! | stage | what is durable | a retry or the worker |
//! |---|---|---|
//! | RECEIVED | nothing: claim, command, operation and first phase commit together | claims |
//! | LOCAL | rows of ours, no intent | runs the phase |
//! | OUTSTANDING | an intent: a provider may have been asked | asks [`provider`](super::provider), never with a new identity |
//! | SETTLED | what the provider did, proven | runs the next phase, forward only |
//! | SUCCEEDED | the outcome | replays |
//! | FAILED | the outcome | replays |
//! | UNKNOWN | the intents and the evidence | as OUTSTANDING; then an operator |
//!
//! The stage to which each end of a phase leads. A test reads this table and compares it with
//! [`Stage::after`]. SUCCEEDED and FAILED are final and have no column.
//!
//! | end | RECEIVED | LOCAL | OUTSTANDING | SETTLED | UNKNOWN |
//! |---|---|---|---|---|---|
//! | recovery-point | LOCAL | LOCAL | - | SETTLED | - |
//! | intent | OUTSTANDING | OUTSTANDING | - | OUTSTANDING | - |
//! | settle | - | - | SETTLED | - | SETTLED |
//! | compensate | - | - | - | OUTSTANDING | - |
//! | succeed | SUCCEEDED | SUCCEEDED | SUCCEEDED | SUCCEEDED | SUCCEEDED |
//! | fail-proven | - | - | FAILED | FAILED | FAILED |
//! | rejected | FAILED | FAILED | - | - | - |
//! | retryable | RECEIVED | LOCAL | - | - | - |
//! | dont-store | RECEIVED | - | - | - | - |
//! | lost | RECEIVED | LOCAL | UNKNOWN | UNKNOWN | UNKNOWN |
//!
//! Guarantees: after an intent is committed, no phase can end as if nothing had happened. A
//! rejection, "retryable" and "do not store" are not allowed there, an error or a panic leads to
//! UNKNOWN, and a failure needs proof (O13). Before an intent, a lost phase was rolled back and
//! runs again.
//!
//! Not here: the types that keep a wrong end from compiling (the phased engine), and the fenced
//! UPDATE from point to point (`store`).

use super::record::State;

/// The stage of a phased operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stage {
    /// The first phase runs, and nothing is committed.
    Received,
    /// Our own rows are committed, and no intent.
    Local,
    /// An intent is committed: a provider may have been asked.
    Outstanding,
    /// What the provider did is proven.
    Settled,
    /// The operation is over, and it succeeded.
    Succeeded,
    /// The operation is over, and it failed.
    Failed,
    /// It is not known whether the effect happened: recovery or an operator must find out.
    Unknown,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum PhaseEnd {
    RecoveryPoint,
    /// An intent to call a provider is committed, with the exact bytes (O5).
    Intent,
    /// The evidence proves what a provider did (O7).
    Settle,
    /// An intent to undo a settled effect is committed. Undoing is an effect with its own identity.
    Compensate,
    /// The operation succeeded, proven if a provider was asked.
    Succeed,
    /// The operation failed, and the proof is committed: a verdict of a provider (O7), or a
    /// compensation that settled.
    FailProven,
    /// A business rule refused the operation before an intent was committed.
    Rejected,
    /// Nothing happened in this phase; it may run again.
    Retryable,
    /// Nothing happened, and nothing must be stored.
    DontStore,
    /// An error, a panic, or evidence that proves nothing.
    Lost,
}

impl Stage {
    /// Every stage, in the order of declaration.
    pub const ALL: [Self; 7] =
        [Self::Received, Self::Local, Self::Outstanding, Self::Settled, Self::Succeeded, Self::Failed, Self::Unknown];

    /// The stage as it is stored.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Received => "RECEIVED",
            Self::Local => "LOCAL",
            Self::Outstanding => "OUTSTANDING",
            Self::Settled => "SETTLED",
            Self::Succeeded => "SUCCEEDED",
            Self::Failed => "FAILED",
            Self::Unknown => "UNKNOWN",
        }
    }

    /// The word that a client sees at the operation's resource, which hides some stages (M121).
    #[must_use]
    pub fn public(self) -> &'static str {
        match self {
            Self::Received | Self::Local | Self::Outstanding | Self::Settled => "pending",
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
            Self::Unknown => "unknown",
        }
    }

    /// The state of the idempotency record while the operation is in this stage. It is written in
    /// the same transaction.
    #[must_use]
    pub fn record(self) -> State {
        match self {
            Self::Received | Self::Local | Self::Outstanding | Self::Settled => State::InProgress,
            Self::Succeeded => State::Completed,
            Self::Failed => State::FailedReplayable,
            Self::Unknown => State::UnknownRequiresRecovery,
        }
    }

    /// Whether a provider may have been asked. Such an operation cannot be released or run again
    /// from its start (O11, O13).
    pub(crate) fn has_intents(self) -> bool {
        !matches!(self, Self::Received | Self::Local)
    }

    /// The stage after a phase with this end; `None` if a phase of this stage must not end so.
    pub(crate) fn after(self, end: PhaseEnd) -> Option<Self> {
        match (self, end) {
            (Self::Succeeded | Self::Failed, _) => None,
            (_, PhaseEnd::Succeed) => Some(Self::Succeeded),
            (Self::Received | Self::Local, PhaseEnd::RecoveryPoint) => Some(Self::Local),
            (Self::Settled, PhaseEnd::RecoveryPoint) | (Self::Outstanding | Self::Unknown, PhaseEnd::Settle) => {
                Some(Self::Settled)
            }
            (Self::Received | Self::Local | Self::Settled, PhaseEnd::Intent)
            | (Self::Settled, PhaseEnd::Compensate) => Some(Self::Outstanding),
            (Self::Received | Self::Local, PhaseEnd::Rejected)
            | (Self::Outstanding | Self::Settled | Self::Unknown, PhaseEnd::FailProven) => Some(Self::Failed),
            (Self::Received | Self::Local, PhaseEnd::Retryable | PhaseEnd::Lost)
            | (Self::Received, PhaseEnd::DontStore) => Some(self),
            (_, PhaseEnd::Lost) => Some(Self::Unknown),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENDS: [(&str, PhaseEnd); 10] = [
        ("recovery-point", PhaseEnd::RecoveryPoint),
        ("intent", PhaseEnd::Intent),
        ("settle", PhaseEnd::Settle),
        ("compensate", PhaseEnd::Compensate),
        ("succeed", PhaseEnd::Succeed),
        ("fail-proven", PhaseEnd::FailProven),
        ("rejected", PhaseEnd::Rejected),
        ("retryable", PhaseEnd::Retryable),
        ("dont-store", PhaseEnd::DontStore),
        ("lost", PhaseEnd::Lost),
    ];

    // Shown by: letting OUTSTANDING end as retryable; letting a lost phase of SETTLED stay; a word
    // out of the table.
    #[test]
    fn m32_the_stages_are_those_that_are_drawn_for_every_pair() {
        let drawn: Vec<Vec<&str>> = include_str!("flow.rs")
            .lines()
            .skip_while(|line| !line.starts_with("//! | end |"))
            .take_while(|line| line.starts_with("//! |"))
            .map(|line| line["//! | ".len()..].trim_end_matches(" |").split(" | ").collect())
            .collect();
        assert_eq!(drawn.len(), 2 + ENDS.len());
        let columns: Vec<Stage> = drawn[0][1..]
            .iter()
            .map(|name| Stage::ALL.into_iter().find(|stage| stage.as_str() == *name).expect(name))
            .collect();
        for (row, (name, end)) in drawn[2..].iter().zip(ENDS) {
            assert_eq!(row[0], name);
            for stage in Stage::ALL {
                let cell = columns.iter().position(|column| *column == stage).map_or("-", |column| row[column + 1]);
                assert_eq!(stage.after(end).map_or("-", Stage::as_str), cell, "{stage:?} {end:?}");
            }
        }
    }

    // Shown by: `Rejected` at OUTSTANDING leading to FAILED.
    #[test]
    fn o13_after_an_intent_no_phase_ends_as_if_nothing_had_happened() {
        for stage in Stage::ALL.into_iter().filter(|stage| stage.has_intents()) {
            for (_, end) in ENDS {
                let next = stage.after(end);
                assert!(next.is_none_or(Stage::has_intents), "{stage:?} {end:?}");
                if matches!(end, PhaseEnd::Rejected | PhaseEnd::Retryable | PhaseEnd::DontStore) {
                    assert_eq!(next, None, "{stage:?} {end:?}");
                }
                assert!(next != Some(Stage::Failed) || end == PhaseEnd::FailProven, "{stage:?} {end:?}");
            }
        }
    }

    #[test]
    fn m32_the_record_has_an_outcome_exactly_when_the_operation_has() {
        for stage in Stage::ALL {
            let known = matches!(stage, Stage::Succeeded | Stage::Failed);
            assert_eq!(stage.record().is_terminal(), known);
            assert_eq!(stage.public() == "pending", stage.record() == State::InProgress);
        }
    }
}
