//! What is remembered of a request (M29, M33, M34): the row that a store reads, without the
//! answer's body.
//!
//! Guarantees:
//!
//! * A state's text is the same in every store, and `EXPIRED` is never stored: it is derived from
//!   database time, and only for terminal states. IN_PROGRESS and UNKNOWN_REQUIRES_RECOVERY never
//!   expire (O3).
//! * A record says in which mode it was claimed, and that mode, not today's route, says what a
//!   stale one means (O2).
//! * A lease that ends later than now and its length was written before the clock went back: it
//!   counts as over (R22).
//!
//! Not here: how states may change ([`machine`](super::machine)), and the stored answer's headers
//! and body (`store`).

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use uuid::Uuid;

use super::fingerprint::Fingerprint;
use super::identity::{Identity, PrincipalMark};
use crate::policy::db_time::DbTime;
use crate::policy::lease::Lease;

/// What is known of an operation under its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum State {
    /// Claimed; no outcome yet.
    InProgress,
    /// It succeeded; the answer is replayed.
    Completed,
    /// It failed for good; the failure is replayed.
    FailedReplayable,
    /// It failed with no effect outstanding; the same key may run again.
    FailedRetryable,
    /// Nobody knows whether it happened. Found out by evidence, or said by an operator; never by
    /// time.
    UnknownRequiresRecovery,
    /// A terminal state whose time is over. Derived, never stored.
    Expired,
}

/// Who claimed it, and so what a claim without an outcome means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Claim, business rows and completion commit together. A committed IN_PROGRESS is an
    /// alarm.
    Transactional,
    /// A layer, and a handler that commits the completion in its own transaction: the only mode in
    /// which a stale claim proves that nothing happened.
    Bridged,
    /// A layer around any handler: a stale claim proves nothing.
    Edge,
    /// Phases with recovery points; a stale one is recovered.
    Phased,
}

/// A record as a store reads it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Tenant, operation and key as they are stored beside the digest; compared with the request's
    /// (O16).
    pub identity: Identity,
    /// The principal of the first request.
    pub principal: PrincipalMark,
    /// The command of the first request.
    pub fingerprint: Fingerprint,
    /// The mode it was claimed in.
    pub mode: Mode,
    /// Its state as it is stored: never [`State::Expired`].
    pub state: State,
    /// Raised by every change of owner; every fenced statement compares it.
    pub epoch: i64,
    /// The owner's lease. For [`Mode::Phased`] that of the operation row, which has the only one
    /// (O9), read in the same statement. Its length is stored beside its end, because a route's may
    /// change while claims live (R22). None if nobody owns it.
    pub lease: Option<Lease>,
    /// Raised when the key is used anew after its time was over (O4).
    pub generation: i64,
    /// The identity of this generation's run, from which every downstream identity is derived. It
    /// lives as long as the record.
    pub operation_id: Uuid,
    /// How often it was begun.
    pub attempts: u32,
    /// Recovery gave it to an operator (O9); only for [`Mode::Phased`].
    pub parked: bool,
    /// When it was claimed first.
    pub created_at: DbTime,
    /// When it entered a terminal state.
    pub outcome_at: Option<DbTime>,
    /// When that state's time is over. Set when the outcome is, and by nothing else.
    pub expires_at: Option<DbTime>,
    /// What is kept of the answer.
    pub answer: Option<StoredAnswer>,
}

/// What is kept of an answer, without the body's bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredAnswer {
    /// The HTTP status, or the code of gRPC.
    pub status: u16,
    /// The version of the schema that the body was written in (M66).
    pub schema_version: u32,
    /// What there is to replay.
    pub body: StoredBody,
}

/// What is kept of an answer's body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoredBody {
    /// Its bytes, to be replayed as they are.
    Kept,
    /// Nothing, for this reason. It is never run again to get one.
    Tombstone(Tombstone),
    /// Where the result is (M63).
    Reference(Resource),
}

/// Why a body was not kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tombstone {
    /// It was longer than the limit.
    Oversize,
    /// It was a stream.
    Stream,
    /// The route keeps none, because it would be a secret (M67).
    Withheld,
    /// Its time is over; the metadata lives longer (M99).
    Purged,
}

/// The resource that an operation made (M34).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resource {
    /// Its kind, such as `payment`.
    pub kind: String,
    /// The id of the resource among those of its kind.
    pub id: String,
    /// Its URL, for `Location`.
    pub location: Option<String>,
}

/// A stored text names no state, mode or tombstone.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is no {what} that this program knows")]
pub struct UnknownName {
    what: &'static str,
    text: String,
}

impl State {
    /// The states that are stored.
    pub const STORED: [Self; 5] = [
        Self::InProgress,
        Self::Completed,
        Self::FailedReplayable,
        Self::FailedRetryable,
        Self::UnknownRequiresRecovery,
    ];

    /// The name, as it is stored.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::InProgress => "IN_PROGRESS",
            Self::Completed => "COMPLETED",
            Self::FailedReplayable => "FAILED_REPLAYABLE",
            Self::FailedRetryable => "FAILED_RETRYABLE",
            Self::UnknownRequiresRecovery => "UNKNOWN_REQUIRES_RECOVERY",
            Self::Expired => "EXPIRED",
        }
    }

    /// Whether the outcome is known; only such a state expires, and only such a record is purged.
    #[must_use]
    pub fn is_terminal(self) -> bool {
        matches!(self, Self::Completed | Self::FailedReplayable | Self::FailedRetryable | Self::Expired)
    }
}

impl Mode {
    /// Every mode, in the order of declaration.
    pub const ALL: [Self; 4] = [Self::Transactional, Self::Bridged, Self::Edge, Self::Phased];

    /// The name, as it is stored and as the label `mode` of metrics has it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Transactional => "same_tx",
            Self::Bridged => "bridged",
            Self::Edge => "edge",
            Self::Phased => "phased",
        }
    }
}

impl Tombstone {
    /// Every reason, in the order of declaration.
    pub const ALL: [Self; 4] = [Self::Oversize, Self::Stream, Self::Withheld, Self::Purged];

    /// The name, as it is stored.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Oversize => "oversize",
            Self::Stream => "stream",
            Self::Withheld => "withheld",
            Self::Purged => "purged",
        }
    }
}

impl Record {
    /// The state at this moment: the stored one, or [`State::Expired`].
    #[must_use]
    pub fn state_at(&self, now: DbTime) -> State {
        let over = self.state.is_terminal() && self.expires_at.is_some_and(|at| at < now);
        if over { State::Expired } else { self.state }
    }

    /// What is left of the owner's lease; zero if it is over or there is none.
    #[must_use]
    pub fn lease_left(&self, now: DbTime) -> Duration {
        self.lease.map_or(Duration::ZERO, |lease| lease.remaining(now))
    }

    /// Whether somebody owns it now.
    #[must_use]
    pub fn is_owned(&self, now: DbTime) -> bool {
        self.lease.is_some_and(|lease| !lease.is_expired(now))
    }
}

macro_rules! names {
    ($($kind:ident, $what:literal, $all:expr;)*) => {
        $(
            impl fmt::Display for $kind {
                fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    f.write_str(self.as_str())
                }
            }

            impl FromStr for $kind {
                type Err = UnknownName;

                fn from_str(text: &str) -> Result<Self, UnknownName> {
                    let unknown = || UnknownName { what: $what, text: text.to_owned() };
                    $all.into_iter().find(|one| one.as_str() == text).ok_or_else(unknown)
                }
            }
        )*
    };
}

names! {
    State, "stored state", State::STORED;
    Mode, "mode", Mode::ALL;
    Tombstone, "reason for a missing body", Tombstone::ALL;
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A record of these parts, claimed at 0 s with a lease of 30 s, its outcome (if terminal) at
    /// 10 s for 100 s.
    pub(in crate::policy::operation) fn record(
        identity: Identity,
        principal: PrincipalMark,
        fingerprint: Fingerprint,
        mode: Mode,
        state: State,
    ) -> Record {
        let outcome_at = state.is_terminal().then(|| DbTime::from_millis(10_000));
        Record {
            identity,
            principal,
            fingerprint,
            mode,
            state,
            epoch: 1,
            lease: Some(Lease { until: at(30), length: Duration::from_secs(30) }),
            generation: 1,
            operation_id: Uuid::from_u128(7),
            attempts: 1,
            parked: false,
            created_at: DbTime::from_millis(0),
            outcome_at,
            expires_at: outcome_at.map(|at| at.after(Duration::from_secs(100))),
            answer: outcome_at.map(|_| StoredAnswer { status: 201, schema_version: 1, body: StoredBody::Kept }),
        }
    }

    pub(in crate::policy::operation) fn any_record(state: State) -> Record {
        let key = "9b2f0c64-1b5e-4f0e-8a3c-6f1d2e3a4b5c";
        let identity = Identity::from_stored(b"acme", b"create_payment", key.as_bytes()).expect("an identity");
        let principal = format!("sha256:{}", "0".repeat(64)).parse().expect("a mark");
        let fingerprint = format!("1:sha256:{}", "0".repeat(64)).parse().expect("a fingerprint");
        record(identity, principal, fingerprint, Mode::Edge, state)
    }

    fn at(seconds: i64) -> DbTime {
        DbTime::from_millis(seconds * 1_000)
    }

    // Shown by: `at <= now`; leaving `is_terminal` out.
    #[test]
    fn o3_only_a_terminal_state_expires_and_only_after_its_time() {
        for state in State::STORED {
            let mut record = any_record(state);
            record.expires_at = Some(at(110));
            let expected = if state.is_terminal() { State::Expired } else { state };
            assert_eq!(record.state_at(at(110)), state);
            assert_eq!(record.state_at(DbTime::from_micros(110_000_001)), expected);
            record.expires_at = None;
            assert_eq!(record.state_at(at(1_000_000_000)), state, "without a time it stays");
        }
    }

    #[test]
    fn m31_names_are_read_back_and_expired_is_never_stored() {
        for state in State::STORED {
            assert_eq!(state.to_string().parse(), Ok(state));
        }
        for mode in Mode::ALL {
            assert_eq!(mode.to_string().parse(), Ok(mode));
        }
        for tombstone in Tombstone::ALL {
            assert_eq!(tombstone.to_string().parse(), Ok(tombstone));
        }
        assert_eq!(
            State::Expired.as_str().parse::<State>().expect_err("never stored").to_string(),
            "`EXPIRED` is no stored state that this program knows"
        );
    }

    // Shown by: comparing the end of the lease with now and nothing else.
    #[test]
    fn r22_a_lease_written_before_the_clock_went_back_is_over() {
        let record = any_record(State::InProgress);
        assert!(record.is_owned(at(29)) && !record.is_owned(at(30)) && !record.is_owned(at(-1)));
        assert_eq!(record.lease_left(at(10)), Duration::from_secs(20));
        assert_eq!(record.lease_left(at(-1)), Duration::ZERO);
        assert!(!Record { lease: None, ..record }.is_owned(at(1)));
    }
}
