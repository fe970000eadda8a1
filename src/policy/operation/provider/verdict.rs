//! What one answer of a provider proves (O7).

use std::time::Duration;

/// How long to wait when a provider says "later" without saying when.
const PAUSE: Duration = Duration::from_secs(2);
/// The longest pause that a provider is granted: one that asks for years must not hide an operation
/// for years.
const PAUSE_MAX: Duration = Duration::from_secs(600);

/// What came back of a send, in the adapter's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// No connection: refused, name not found, TLS failed. Not a byte of the request left.
    NotConnected,
    /// The request could not be made, for a reason of ours that no wait mends by itself: no
    /// credentials for the place, a name that leads where nothing may be sent. Not a byte of it
    /// left; but other than a provider that is away it counts.
    NotMade,
    /// The connection ended, or the time was up.
    NoAnswer,
    /// The provider answered with an HTTP status.
    Status {
        /// The HTTP status of the answer.
        status: u16,
        /// Whether the adapter lists its code as a verdict on the operation, such as
        /// `card_declined`.
        listed: bool,
        /// Whether its code means "in progress".
        in_progress: bool,
        /// Whether it says that it replays a stored answer.
        replayed: bool,
        /// What it says of what was done.
        matches: Matches,
        /// The pause of its `Retry-After` header; none where it has no such header.
        retry_after: Option<Duration>,
    },
}

/// What came back of a query.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueryAnswer {
    /// It was found, and it is done.
    Done(Matches),
    /// It was found, and the provider lists it as refused for good.
    Refused,
    /// It was found, and it runs.
    Pending,
    /// It was not found.
    NotFound,
    /// The query itself failed.
    Failed,
}

/// Whether what a provider says it did is what we asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Matches {
    /// The amount is ours.
    pub amount: bool,
    /// The currency is ours.
    pub currency: bool,
    /// The reference is ours.
    pub reference: bool,
}

/// What an answer proves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// It happened as we asked.
    Succeeded,
    /// It was refused for good, and every later send of it will be.
    Failed,
    /// This send was refused, for a reason that may be another one next time. Proves a failure if
    /// no other send can have arrived, which is judged at the decision.
    Refused,
    /// This send did not leave us.
    NotSent,
    /// Nothing of this send; but an operator accepted that the next one may be its duplicate.
    Waived,
    /// Come again after this pause, under the same key.
    Wait(Duration),
    /// It happened, and not as we asked.
    Mismatch,
    /// A query did not find it.
    NotFound,
    /// The provider replayed a stored server error.
    StoredError,
    /// The answer proves nothing: the effect may have happened or not.
    Indefinite,
}

impl Matches {
    /// Amount, currency and reference are ours.
    pub const ALL: Self = Self { amount: true, currency: true, reference: true };
}

impl Answer {
    /// An answer of this status, with nothing else known of it.
    #[must_use]
    pub fn status(status: u16) -> Self {
        let matches = Matches::default();
        Self::Status { status, listed: false, in_progress: false, replayed: false, matches, retry_after: None }
    }

    /// What the answer to a send proves.
    #[must_use]
    pub fn verdict(self) -> Verdict {
        let (status, listed, in_progress, replayed, matches, retry_after) = match self {
            Self::NotConnected | Self::NotMade => return Verdict::NotSent,
            Self::NoAnswer => return Verdict::Indefinite,
            Self::Status { status, listed, in_progress, replayed, matches, retry_after } => {
                (status, listed, in_progress, replayed, matches, retry_after)
            }
        };
        let wait = Verdict::Wait(retry_after.unwrap_or(PAUSE).min(PAUSE_MAX));
        match status {
            _ if in_progress => wait,
            200..=299 if matches == Matches::ALL => Verdict::Succeeded,
            200..=299 => Verdict::Mismatch,
            400..=499 if listed => Verdict::Failed,
            409 | 425 | 429 => wait,
            408 => Verdict::Indefinite,
            400..=499 => Verdict::Refused,
            500..=599 if replayed => Verdict::StoredError,
            _ => Verdict::Indefinite,
        }
    }

    /// Whether the attempt counts: a provider that is away counts none (G10).
    #[must_use]
    pub fn counts(self) -> bool {
        self != Self::NotConnected
    }
}

impl Verdict {
    /// The word of its evidence row, which people and lists read; the table knows these and no
    /// other.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Succeeded => "success",
            Self::Failed => "failure",
            Self::Refused => "refused",
            Self::NotSent => "not-sent",
            Self::Waived => "waived",
            Self::Wait(_) => "wait",
            Self::Mismatch => "mismatch",
            Self::NotFound => "not-found",
            Self::StoredError => "stored-error",
            Self::Indefinite => "indefinite",
        }
    }

    /// The name, as the bytes of an evidence row have it; the pause of [`Verdict::Wait`] stands
    /// beside it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
            Self::Refused => "refused",
            Self::NotSent => "not_sent",
            Self::Waived => "waived",
            Self::Wait(_) => "wait",
            Self::Mismatch => "mismatch",
            Self::NotFound => "not_found",
            Self::StoredError => "stored_error",
            Self::Indefinite => "indefinite",
        }
    }

    /// The verdict of an evidence row; none if a newer program wrote it, which then must be left to
    /// that program.
    #[must_use]
    pub fn from_row(name: &str, pause: Duration) -> Option<Self> {
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
    /// What the answer to a query proves.
    #[must_use]
    pub fn verdict(self) -> Verdict {
        match self {
            Self::Done(Matches::ALL) => Verdict::Succeeded,
            Self::Done(_) => Verdict::Mismatch,
            Self::Refused => Verdict::Failed,
            Self::Pending => Verdict::Wait(PAUSE),
            Self::NotFound => Verdict::NotFound,
            Self::Failed => Verdict::Indefinite,
        }
    }
}
