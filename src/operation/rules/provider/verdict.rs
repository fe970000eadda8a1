//! Pure: no I/O, no clock.
//! What one answer of a provider proves (O7). Promise: an answer that is not clear proves nothing.
//! Not here: what all answers to an effect prove together ([`Evidence`](super::Evidence)).

use std::time::Duration;

/// The wait when a provider asks for one without giving its length, and when a query finds the
/// effect still under way.
const PAUSE: Duration = Duration::from_secs(2);
/// The longest pause that a provider is granted. A longer request must not hide an operation.
pub(super) const PAUSE_MAX: Duration = Duration::from_secs(600);

/// The answer to a send, as the adapter reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// The provider certainly took nothing, and that may pass by waiting: no connection (refused,
    /// name not found, TLS failed).
    NotConnected,
    /// The request could not be made for a reason on our side that does not pass by waiting: no
    /// credentials for the provider, or a host name that leads to a forbidden address. The provider
    /// took nothing. Unlike a provider that is away, this counts as an attempt.
    NotMade,
    /// The connection ended or the timeout passed before an answer came.
    NoAnswer,
    /// The provider answered with an HTTP status.
    Status {
        /// The HTTP status of the answer.
        status: u16,
        /// Whether the adapter lists its code as a verdict, such as `card_declined`.
        listed: bool,
        /// Whether its code means "in progress".
        in_progress: bool,
        /// Whether the provider marks the answer as a replay of a stored one.
        replayed: bool,
        /// Whether the reported effect is the one that we asked for.
        matches: Matches,
        /// The pause of its `Retry-After` header; `None` without the header.
        retry_after: Option<Duration>,
    },
}

/// The answer to a query.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueryAnswer {
    /// The effect was found, and it is done.
    Done(Matches),
    /// The effect was found, and the provider lists it as refused for good.
    Refused,
    /// The effect was found, and it is still under way.
    Pending,
    /// The effect was not found.
    NotFound,
    /// The query itself failed, or got no answer.
    Failed,
    /// The query could not be made, and waiting does not change that: the provider has no query, or
    /// the request cannot be built. Where only a query can help, this counts as an attempt.
    NotMade,
}

/// Whether the effect that a provider reports is the one that we asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Matches {
    /// The amount is the one that we sent.
    pub amount: bool,
    /// The currency is the one that we sent.
    pub currency: bool,
    /// The reference is the one that we sent.
    pub reference: bool,
}

/// What an answer proves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// The effect happened as we asked.
    Succeeded,
    /// The effect was refused for good, and every later send will be refused too.
    Failed,
    /// This send was refused for a reason that may not apply to the next one. This proves a failure
    /// only if no other send can have arrived, which is judged at the decision.
    Refused,
    /// This send did not leave this process.
    NotSent,
    /// This proves nothing. An operator accepted that the next send may be a duplicate of it.
    Waived,
    /// Try again after this pause, under the same key.
    Wait(Duration),
    /// The effect happened, but not as we asked.
    Mismatch,
    /// A query did not find the effect.
    NotFound,
    /// The provider replayed a stored server error.
    StoredError,
    /// The answer proves nothing: the effect may have happened or not.
    Indefinite,
}

impl Matches {
    /// Amount, currency and reference are those that we sent.
    pub const ALL: Self = Self { amount: true, currency: true, reference: true };
}

impl Answer {
    /// An answer with this status and no further facts.
    #[must_use]
    pub fn status(status: u16) -> Self {
        let matches = Matches::default();
        Self::Status { status, listed: false, in_progress: false, replayed: false, matches, retry_after: None }
    }

    pub(crate) fn verdict(self) -> Verdict {
        let wait = |asked: Option<Duration>| Verdict::Wait(asked.unwrap_or(PAUSE).min(PAUSE_MAX));
        match self {
            Self::NotConnected | Self::NotMade => Verdict::NotSent,
            Self::NoAnswer => Verdict::Indefinite,
            Self::Status { in_progress: true, retry_after, .. } => wait(retry_after),
            Self::Status { status: 200..=299, matches: Matches::ALL, .. } => Verdict::Succeeded,
            Self::Status { status: 200..=299, .. } => Verdict::Mismatch,
            Self::Status { status: 400..=499, listed: true, .. } => Verdict::Failed,
            Self::Status { status: 409 | 425 | 429, retry_after, .. } => wait(retry_after),
            Self::Status { status: 408, .. } => Verdict::Indefinite,
            Self::Status { status: 400..=499, .. } => Verdict::Refused,
            Self::Status { status: 500..=599, replayed: true, .. } => Verdict::StoredError,
            Self::Status { .. } => Verdict::Indefinite,
        }
    }

    /// Whether the attempt counts. No attempt counts while a provider is away (G10).
    pub(crate) fn counts(self) -> bool {
        self != Self::NotConnected
    }
}

impl Verdict {
    /// The word of the evidence row, for people and lists. The table allows only these words.
    #[must_use]
    pub fn word(self) -> &'static str {
        self.word_and_name().0
    }

    /// The name in the bytes of an evidence row, beside which [`Verdict::Wait`] has its pause.
    pub(crate) fn name(self) -> &'static str {
        self.word_and_name().1
    }

    fn word_and_name(self) -> (&'static str, &'static str) {
        match self {
            Self::Succeeded => ("success", "succeeded"),
            Self::Failed => ("failure", "failed"),
            Self::Refused => ("refused", "refused"),
            Self::NotSent => ("not-sent", "not_sent"),
            Self::Waived => ("waived", "waived"),
            Self::Wait(_) => ("wait", "wait"),
            Self::Mismatch => ("mismatch", "mismatch"),
            Self::NotFound => ("not-found", "not_found"),
            Self::StoredError => ("stored-error", "stored_error"),
            Self::Indefinite => ("indefinite", "indefinite"),
        }
    }

    /// Reads the verdict of an evidence row. `None` if a newer program wrote it; then only such a
    /// program may go on with the effect.
    pub(crate) fn from_row(name: &str, pause: Duration) -> Option<Self> {
        let all = [
            Self::Succeeded,
            Self::Failed,
            Self::Refused,
            Self::NotSent,
            Self::Waived,
            Self::Wait(pause),
            Self::Mismatch,
            Self::NotFound,
            Self::StoredError,
            Self::Indefinite,
        ];
        all.into_iter().find(|verdict| verdict.name() == name)
    }
}

impl QueryAnswer {
    pub(crate) fn verdict(self) -> Verdict {
        match self {
            Self::Done(Matches::ALL) => Verdict::Succeeded,
            Self::Done(_) => Verdict::Mismatch,
            Self::Refused => Verdict::Failed,
            Self::Pending => Verdict::Wait(PAUSE),
            Self::NotFound => Verdict::NotFound,
            Self::Failed | Self::NotMade => Verdict::Indefinite,
        }
    }
}
