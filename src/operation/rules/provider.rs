//! Pure: no I/O, no clock.
//! An outside provider: what its answers prove, and what to do next with an effect (O5 to O8, M78
//! to M82).
//!
//! Guarantees, tested for every strategy but [`Strategy::Repeatable`] by a model with random
//! histories (lost requests and answers, late arrivals, crashes, lost leases):
//!
//! * A send that may have arrived is repeated only while the provider still knows our key, or if
//!   the effect is declared repeatable, or if an operator accepts a duplicate. The key and bytes of
//!   an effect never change.
//! * "Not found" proves nothing: a request may still be under way. A query decides only where it
//!   finds the effect.
//! * A failure is believed only as a listed verdict on the operation, or as the answer to the only
//!   send that can have arrived. The latter is judged at the decision, because another process may
//!   have begun a send after the answer came. In every other case the outcome stays unknown. When
//!   no rule can find it out, it goes to an operator, whatever the number of attempts.
//! * An operator who accepts a duplicate allows one more send. That proves nothing about earlier
//!   sends: they may have arrived, and a refusal of a later send does not say that they did not.
//!
//! What the store must do: commit the begin of every send, fenced by the epoch, before the send
//! starts, so that a crash cannot lose it; let any process append evidence at any time; call
//! `Strategy::next` in the transaction that decides, with the evidence that was read there (O8).
//!
//! Not here: the calls and their timeouts (`operation::phased`), an adapter's list of verdicts, and
//! the rows (`store`).

mod verdict;

use std::collections::BTreeSet;
use std::time::Duration;

use self::verdict::PAUSE_MAX;
use crate::error::Invalid;
use crate::time::db_time::DbTime;

pub use self::verdict::{Answer, Matches, QueryAnswer, Verdict};

/// After this many sends that got a stored server error, sends under the key stop: the provider
/// will not answer anything else (O7).
const STORED_ERRORS_MAX: usize = 3;

/// How a provider lets us find out whether an effect happened, declared per effect (O6).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Strategy {
    /// The provider keeps our key and answers a second send like the first.
    Key(KeyWindow),
    /// The provider can be asked for the effect by our reference.
    Query,
    /// The provider keeps our key, and can also be asked for the effect.
    KeyAndQuery(KeyWindow),
    /// The provider offers neither. An uncertain outcome goes to an operator (M82).
    None,
    /// The author declared that a second effect does no harm: at-least-once.
    Repeatable,
}

/// The time during which a send may be repeated under its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyWindow {
    /// How long the provider keeps a key from its first use.
    pub retention: Duration,
    /// The longest time from our decision to send until the provider has taken the request.
    pub max_in_flight: Duration,
}

/// What is committed about the sends of an effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Sends {
    /// Database time of the intent, committed before the first send.
    pub first_sent_at: Option<DbTime>,
    /// The number of sends that any process has begun and not taken back.
    pub begun: u32,
}

/// A row of evidence: what one answer proves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Proof {
    /// The send that was answered, counted from 1; `None` for a query.
    pub send: Option<u32>,
    /// What the answer proves of the effect.
    pub verdict: Verdict,
    /// Database time of the row.
    pub at: DbTime,
}

/// The summary of the evidence rows of an effect, made by [`Evidence::of`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Evidence {
    succeeded: bool,
    /// A query found that the effect was refused for good, or a person reported that it failed.
    failed: bool,
    /// The same, since an operator accepted a duplicate last.
    failed_since: bool,
    /// The sends that were refused for good.
    declined: BTreeSet<u32>,
    /// The sends that were refused, for good or not.
    refused: BTreeSet<u32>,
    mismatch: bool,
    /// The ends of the pauses that the provider asked for.
    pauses: BTreeSet<DbTime>,
    not_found: bool,
    stored_errors: BTreeSet<u32>,
    /// The sends that did not leave this process. A row that was written twice counts once, here
    /// and in all sets of sends.
    not_sent: BTreeSet<u32>,
    /// The sends that may have arrived, and for which an operator accepted a duplicate.
    waived: BTreeSet<u32>,
}

/// What is proven of an effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Settled {
    /// The effect happened once, as we asked.
    Succeeded,
    /// The effect did not happen and will not.
    Failed,
}

impl Settled {
    /// The word in the table of intents.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    Settle(Settled),
    /// Send for the first time, or after sends that did not leave us or for which an operator
    /// accepted a duplicate.
    Send,
    /// Send the same bytes under the same key again.
    Resend,
    Query,
    /// The provider asked for a pause.
    Wait {
        /// Database time before which nothing is sent or asked.
        until: DbTime,
    },
    /// Park the operation for an operator, for this reason.
    Operator(Gap),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Gap {
    /// The provider offers neither key nor query.
    NoMeans,
    /// The provider may have forgotten our key, and offers no query.
    WindowOver,
    /// A query did not find the effect, which proves nothing.
    NotFound,
    /// The provider replays a stored error, and offers no query.
    StoredError,
    /// The effect happened differently from what we asked, or the evidence contradicts itself
    /// (`provider-mismatch`).
    Mismatch,
    /// An operator accepted a duplicate of a send, and the duplicate was refused, or a query says
    /// that the effect was.
    DuplicateRefused,
    /// The attempts are used up (O9). UNKNOWN stays UNKNOWN.
    Attempts,
}

impl Gap {
    /// The reason of parking, as an operator reads it.
    pub(crate) fn reason(self) -> &'static str {
        match self {
            Self::NoMeans => "provider-without-key-or-query",
            Self::WindowOver => "provider-may-have-forgotten-the-key",
            Self::NotFound => "provider-did-not-find-it",
            Self::StoredError => "provider-replays-an-error",
            Self::Mismatch => "provider-mismatch",
            Self::DuplicateRefused => "accepted-duplicate-was-refused",
            Self::Attempts => "attempts-used-up",
        }
    }
}

impl KeyWindow {
    /// Refuses a window in which no send could be repeated.
    pub(crate) fn validate(self) -> Result<(), Invalid> {
        if self.max_in_flight < self.retention {
            return Ok(());
        }
        let [retention, in_flight] = [self.retention, self.max_in_flight].map(humantime::format_duration);
        Err(Invalid::new(format!(
            "`max_in_flight` ({in_flight}) must be shorter than the provider's `retention` of keys ({retention})"
        )))
    }

    /// Whether a send that is decided now arrives while the provider knows the key. A first send
    /// that lies in the future by more than `max_in_flight` was written before the clock went back,
    /// so its age is not known (R22).
    pub(crate) fn is_open(self, first_sent_at: DbTime, now: DbTime) -> bool {
        let end = first_sent_at.after(self.retention).before(self.max_in_flight);
        first_sent_at <= now.after(self.max_in_flight) && now < end
    }
}

impl Evidence {
    /// Makes the summary of the evidence rows of an effect, oldest first.
    #[must_use]
    pub fn of(rows: impl IntoIterator<Item = Proof>) -> Self {
        let mut evidence = Self::default();
        for Proof { send, verdict, at } in rows {
            match verdict {
                Verdict::Succeeded => evidence.succeeded = true,
                Verdict::Failed => {
                    evidence.failed |= send.is_none();
                    evidence.failed_since |= send.is_none();
                    evidence.declined.extend(send);
                    evidence.refused.extend(send);
                }
                Verdict::Refused => evidence.refused.extend(send),
                Verdict::Mismatch => evidence.mismatch = true,
                Verdict::NotSent => evidence.not_sent.extend(send),
                // What was asked before says nothing of the send that was allowed.
                Verdict::Waived => {
                    evidence.waived.extend(send);
                    (evidence.failed_since, evidence.not_found) = (false, false);
                }
                Verdict::Wait(pause) => evidence.pauses.extend([at.after(pause)]),
                Verdict::NotFound => evidence.not_found = true,
                Verdict::StoredError => evidence.stored_errors.extend(send),
                Verdict::Indefinite => {}
            }
        }
        evidence
    }

    /// The number of the only send that may have arrived; `None` if there are none or several.
    fn only_send(&self, sends: Sends) -> Option<u32> {
        let mut doubtful = (1..=sends.begun).filter(|send| !self.not_sent.contains(send));
        doubtful.next().filter(|_| doubtful.next().is_none())
    }

    /// Whether another send duplicates no earlier one, or only with an operator's consent.
    fn is_free(&self, sends: Sends) -> bool {
        (1..=sends.begun).all(|send| self.not_sent.contains(&send) || self.waived.contains(&send))
    }

    /// Until when the provider asked us to wait; `None` if that is over. A pause that ends later
    /// than any pause can was written before the clock went back, and is over (R22). It does not
    /// hide a pause that was asked for since.
    fn asks_to_wait(&self, now: DbTime) -> Option<DbTime> {
        let last = self.pauses.range(..=now.after(PAUSE_MAX)).next_back().copied();
        last.filter(|&until| until > now)
    }

    /// Whether an operator accepted a duplicate of a send that may have arrived.
    fn is_waived(&self) -> bool {
        !self.waived.is_subset(&self.not_sent)
    }

    /// Whether the evidence reports a failure. A refused duplicate does not count: it says nothing
    /// about the send that it repeats.
    fn is_failed(&self) -> bool {
        self.failed || !self.declined.is_empty() && !self.is_waived()
    }

    /// The proven outcome; `None` if there is none or the evidence contradicts itself.
    pub(crate) fn settled(&self, sends: Sends) -> Option<Settled> {
        match (self.succeeded, self.is_failed()) {
            _ if self.mismatch => None,
            (true, false) => Some(Settled::Succeeded),
            (false, true) if !self.is_waived() => Some(Settled::Failed),
            (false, _) if self.only_send(sends).is_some_and(|only| self.refused.contains(&only)) => {
                Some(Settled::Failed)
            }
            _ => None,
        }
    }

    /// Whether the evidence contradicts an outcome that was decided. This is an alarm; the outcome
    /// is not rewritten (O8).
    #[must_use]
    pub fn contradicts(&self, decided: Settled) -> bool {
        self.mismatch || if decided == Settled::Succeeded { self.is_failed() } else { self.succeeded }
    }
}

impl Strategy {
    /// The window in which a send may be repeated; `None` if the strategy uses no key.
    pub(crate) fn window(self) -> Option<KeyWindow> {
        match self {
            Self::Key(window) | Self::KeyAndQuery(window) => Some(window),
            Self::Query | Self::None | Self::Repeatable => None,
        }
    }

    /// Decides the next step for an effect, only from what is committed.
    pub(crate) fn next(self, sends: Sends, evidence: &Evidence, now: DbTime) -> Step {
        if evidence.mismatch || evidence.succeeded && evidence.is_failed() {
            return Step::Operator(Gap::Mismatch);
        }
        if let Some(settled) = evidence.settled(sends) {
            return Step::Settle(settled);
        }
        if let Some(until) = evidence.asks_to_wait(now).filter(|_| self != Self::None) {
            return Step::Wait { until };
        }
        if evidence.is_free(sends) {
            return Step::Send;
        }
        if evidence.is_waived() && (evidence.failed_since || !evidence.refused.is_subset(&evidence.waived)) {
            return Step::Operator(Gap::DuplicateRefused);
        }
        let is_open = |window: KeyWindow| sends.first_sent_at.is_some_and(|first| window.is_open(first, now));
        let stuck = evidence.stored_errors.len() >= STORED_ERRORS_MAX;
        match self {
            Self::Repeatable => Step::Resend,
            Self::Key(window) | Self::KeyAndQuery(window) if is_open(window) && !stuck => Step::Resend,
            Self::Query | Self::KeyAndQuery(_) if evidence.not_found => Step::Operator(Gap::NotFound),
            Self::Query | Self::KeyAndQuery(_) => Step::Query,
            Self::Key(_) if stuck => Step::Operator(Gap::StoredError),
            Self::Key(_) => Step::Operator(Gap::WindowOver),
            Self::None => Step::Operator(Gap::NoMeans),
        }
    }
}

impl Step {
    /// Returns this step, or [`Step::Operator`] if the attempts are used up. A proven outcome, a
    /// pause that the provider asked for and [`Step::Send`] do not depend on the number of
    /// attempts. An unknown outcome never becomes a failure (O9).
    pub(crate) fn within(self, attempts: u32, attempts_max: u32) -> Self {
        match self {
            Self::Settle(_) | Self::Operator(_) | Self::Send | Self::Wait { .. } => self,
            _ if attempts >= attempts_max => Self::Operator(Gap::Attempts),
            _ => self,
        }
    }
}

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
