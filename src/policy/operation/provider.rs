//! An outside provider: what its answer proves, and what to do next (O5 to O8, M78 to M82).
//!
//! Guarantees, each held by a model of random histories (lost requests and answers, late arrivals,
//! crashes, lost leases):
//!
//! * A send is repeated only while the provider still knows our key, and the key and bytes of an
//!   effect never change.
//! * "Not found" proves nothing: a request may be on its way. Only what was found decides.
//! * A failure is believed only as a listed verdict on the operation, or as the answer to the only
//!   send that can have arrived: judged when it is decided, because another process may have begun
//!   a send since the answer came. All else stays unknown, and what no rule can find out goes to an
//!   operator, whatever the number of attempts.
//! * An operator who accepts a duplicate lets a send go out once more. That proves nothing of the
//!   sends before it: they may have arrived, and a refusal of a later one does not say that they
//!   did not.
//!
//! What the store must keep to: the begin of every send is committed, fenced by the epoch, before
//! it starts, so that a crash cannot forget one; evidence is appended by anybody at any time;
//! [`Strategy::next`] is asked in the transaction that decides, with the evidence read there (O8).
//!
//! Not here: the calls and their timeouts (`runtime`), an adapter's list of verdicts, and the rows
//! (`store`).

mod verdict;

use std::collections::BTreeSet;
use std::time::Duration;

use crate::policy::db_time::DbTime;

pub use self::verdict::{Answer, Matches, QueryAnswer, Verdict};

/// So many replays of a stored server error end the resends: the provider will say nothing else
/// (O7).
pub const STORED_ERRORS_MAX: usize = 3;

/// What a provider offers to find out whether an effect happened; declared per effect (O6).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Strategy {
    /// It keeps our key and answers a second send as the first.
    Key(Window),
    /// It can be asked for the effect by our reference.
    Query,
    /// It keeps our key, and can be asked for the effect too.
    KeyAndQuery(Window),
    /// Neither: what is not certain goes to an operator. A declared gap (M82).
    None,
    /// Its author declared that doing it twice does no harm: at-least-once.
    Repeatable,
}

/// For how long a send may be repeated under its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// How long the provider keeps a key from its first use.
    pub retention: Duration,
    /// The longest time from our decision to send until the provider has taken the request, however
    /// late.
    pub max_in_flight: Duration,
}

/// A window within which nothing can be repeated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("`max_in_flight` ({}) must be shorter than the provider's `retention` of keys ({})",
    humantime::format_duration(*max_in_flight), humantime::format_duration(*retention))]
pub struct WindowError {
    /// How long the provider keeps our key.
    pub retention: Duration,
    /// The window's longest flight.
    pub max_in_flight: Duration,
}

/// What is committed of an effect's sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sends {
    /// Database time of the intent, committed before the first send.
    pub first_sent_at: Option<DbTime>,
    /// Sends begun by anybody.
    pub begun: u32,
}

/// A row of evidence: what one answer proves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Proof {
    /// The send that it answers, counted from 1; none for a query.
    pub send: Option<u32>,
    /// What the answer proves of the effect.
    pub verdict: Verdict,
    /// Database time of the row.
    pub at: DbTime,
}

/// What the evidence rows of an effect come to; made by [`Evidence::of`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Evidence {
    succeeded: bool,
    /// A query found that it was refused for good, or a person says that it failed.
    failed: bool,
    /// The sends that were refused for good.
    declined: BTreeSet<u32>,
    /// The sends that were refused, for good or not.
    refused: BTreeSet<u32>,
    mismatch: bool,
    wait_until: Option<DbTime>,
    not_found: bool,
    stored_errors: BTreeSet<u32>,
    /// The sends that did not leave us. A row that was written twice counts once, here and in all
    /// sets of sends.
    not_sent: BTreeSet<u32>,
    /// The sends that may have arrived, and that an operator lets be repeated all the same.
    waived: BTreeSet<u32>,
}

/// What is proven of an effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Settled {
    /// It happened, once, as we asked.
    Succeeded,
    /// It did not happen and will not.
    Failed,
}

/// What to do next with an effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// It is proven: go on with the flow.
    Settle(Settled),
    /// Send for the first time, or after sends that are proven not to have left us.
    Send,
    /// Send the same bytes under the same key again.
    Resend,
    /// Ask the provider whether the effect happened.
    Query,
    /// The provider asked for a pause.
    Wait {
        /// Database time before which nothing is sent or asked.
        until: DbTime,
    },
    /// Give it to an operator, for this reason.
    Operator(Gap),
}

/// Why only a person can find out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Gap {
    /// The provider offers neither key nor query.
    NoMeans,
    /// The provider may have forgotten our key, and offers no query.
    WindowOver,
    /// It was asked and not found, which proves nothing.
    NotFound,
    /// The provider replays a stored error, and offers no query.
    StoredError,
    /// It happened otherwise than we asked, or the evidence contradicts itself
    /// (`provider-mismatch`).
    Mismatch,
    /// A send was refused that repeats, by an operator's leave, one that may have arrived.
    DuplicateRefused,
    /// The attempts are used up (O9). UNKNOWN stays UNKNOWN.
    Attempts,
}

impl Window {
    /// Checks the window.
    ///
    /// # Errors
    ///
    /// Nothing could ever be repeated in it.
    pub fn validate(self) -> Result<(), WindowError> {
        let Self { retention, max_in_flight } = self;
        if max_in_flight < retention { Ok(()) } else { Err(WindowError { retention, max_in_flight }) }
    }

    /// Whether a send that is decided now arrives while the provider knows the key. A first send
    /// that lies in the future by more than a flight was written before the clock went back (R22):
    /// nobody knows how long ago it was.
    #[must_use]
    pub fn is_open(self, first_sent_at: DbTime, now: DbTime) -> bool {
        let end = first_sent_at.after(self.retention).before(self.max_in_flight);
        first_sent_at <= now.after(self.max_in_flight) && now < end
    }
}

impl Evidence {
    /// What the rows of an effect come to.
    #[must_use]
    pub fn of(rows: impl IntoIterator<Item = Proof>) -> Self {
        let mut evidence = Self::default();
        for Proof { send, verdict, at } in rows {
            match verdict {
                Verdict::Succeeded => evidence.succeeded = true,
                Verdict::Failed => {
                    evidence.failed |= send.is_none();
                    evidence.declined.extend(send);
                    evidence.refused.extend(send);
                }
                Verdict::Refused => evidence.refused.extend(send),
                Verdict::Mismatch => evidence.mismatch = true,
                Verdict::NotSent => evidence.not_sent.extend(send),
                Verdict::Waived => evidence.waived.extend(send),
                Verdict::Wait(pause) => evidence.wait_until = Some(at.after(pause)).max(evidence.wait_until),
                Verdict::NotFound => evidence.not_found = true,
                Verdict::StoredError => evidence.stored_errors.extend(send),
                Verdict::Indefinite => {}
            }
        }
        evidence
    }

    /// The number of the only send that may have arrived.
    fn only_send(&self, sends: Sends) -> Option<u32> {
        let mut doubtful = (1..=sends.begun).filter(|send| !self.not_sent.contains(send));
        doubtful.next().filter(|_| doubtful.next().is_none())
    }

    /// Whether another send is no duplicate of one before it, or a duplicate that an operator
    /// accepted.
    fn is_free(&self, sends: Sends) -> bool {
        (1..=sends.begun).all(|send| self.not_sent.contains(&send) || self.waived.contains(&send))
    }

    /// Whether an operator let a send be repeated that may have arrived.
    fn is_waived(&self) -> bool {
        !self.waived.is_subset(&self.not_sent)
    }

    /// Whether it is said to have failed. That a duplicate was declined says nothing of the send
    /// that it repeats.
    fn is_failed(&self) -> bool {
        self.failed || !self.declined.is_empty() && !self.is_waived()
    }

    /// What is proven now; none also if the evidence contradicts itself.
    #[must_use]
    pub fn settled(&self, sends: Sends) -> Option<Settled> {
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

    /// Whether it contradicts an outcome that was decided: an alarm, and nothing is rewritten (O8).
    #[must_use]
    pub fn contradicts(&self, decided: Settled) -> bool {
        self.mismatch || if decided == Settled::Succeeded { self.is_failed() } else { self.succeeded }
    }
}

impl Strategy {
    /// Within which a send may be repeated; none where that is not by a key.
    #[must_use]
    pub fn window(self) -> Option<Window> {
        match self {
            Self::Key(window) | Self::KeyAndQuery(window) => Some(window),
            Self::Query | Self::None | Self::Repeatable => None,
        }
    }

    /// What to do next with an effect, from what is committed and nothing else.
    #[must_use]
    pub fn next(self, sends: Sends, evidence: &Evidence, now: DbTime) -> Step {
        if evidence.mismatch || evidence.succeeded && evidence.is_failed() {
            return Step::Operator(Gap::Mismatch);
        }
        if let Some(settled) = evidence.settled(sends) {
            return Step::Settle(settled);
        }
        if let Some(until) = evidence.wait_until.filter(|&until| until > now && self != Self::None) {
            return Step::Wait { until };
        }
        if evidence.is_free(sends) {
            return Step::Send;
        }
        if evidence.is_waived() && !evidence.refused.is_subset(&evidence.waived) {
            return Step::Operator(Gap::DuplicateRefused);
        }
        let is_open = |window: Window| sends.first_sent_at.is_some_and(|first| window.is_open(first, now));
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
    /// The step, or the operator where the attempts are used up. What is proven is settled whatever
    /// their number, what never left us and a pause that was asked for leave nothing to find out,
    /// and nothing unknown ever turns into a failure (O9).
    #[must_use]
    pub fn within(self, attempts: u32, max_attempts: u32) -> Self {
        match self {
            Self::Settle(_) | Self::Operator(_) | Self::Send | Self::Wait { .. } => self,
            _ if attempts >= max_attempts => Self::Operator(Gap::Attempts),
            _ => self,
        }
    }
}

/// Whether a call may start: its timeout must fit into what is left of the lease by the process's
/// own monotonic clock, so that no call begins whose owner is another already (O5).
#[must_use]
pub fn may_start(timeout: Duration, lease_left: Duration) -> bool {
    timeout <= lease_left
}

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
