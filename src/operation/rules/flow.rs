//! Pure: no I/O, no clock.
//! The stages of a phased operation (O9, O13, M32).
//!
//! The recovery points of a flow (`LOCAL_PAYMENT_CREATED`, `PROVIDER_REQUEST_SENT`,
//! `PROVIDER_CONFIRMED`) have names that its author gives. Each point belongs to one of these
//! stages, and the stage decides what a retry or the recovery worker does:
//!
//! | stage | what is durable | a retry or the worker |
//! |---|---|---|
//! | RECEIVED | nothing: claim, command, operation and first phase commit together | claims; a committed one is parked |
//! | LOCAL | rows of ours, no intent | runs the phase |
//! | OUTSTANDING | an intent: a provider may have been asked | asks [`provider`](super::provider), never with a new identity |
//! | SETTLED | what the provider did, proven | runs the next phase, forward only |
//! | SUCCEEDED | the outcome | replays |
//! | FAILED | the outcome | replays |
//! | UNKNOWN | the intents and the evidence | as OUTSTANDING, or as SETTLED if all effects are settled; then an operator |
//!
//! Not here: how a phase may end, which the types of its author say (the phased engine), and the
//! fenced UPDATE from point to point (`store`).

use super::record::{State, names};

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

impl Stage {
    pub(crate) const ALL: [Self; 7] =
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
}

names! {
    Stage, "stage of an operation", Stage::ALL;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn m32_the_record_has_an_outcome_exactly_when_the_operation_has() {
        for stage in Stage::ALL {
            let known = matches!(stage, Stage::Succeeded | Stage::Failed);
            assert_eq!(stage.record().is_terminal(), known);
            assert_eq!(stage.public() == "pending", stage.record() == State::InProgress);
        }
    }

    /// A client sees four words. Shown to fail: with any stage under another word.
    #[test]
    fn m121_a_client_sees_no_stage_of_an_open_operation() {
        let words = ["pending", "pending", "pending", "pending", "succeeded", "failed", "unknown"];
        assert_eq!(Stage::ALL.map(Stage::public), words);
    }
}
