//! Pure: no I/O, no clock.
//! The record of a request as a store reads it, without the answer's body (M29, M33, M34).
//!
//! Guarantees:
//!
//! * A state has the same text in every store. `EXPIRED` is never stored: it is computed from
//!   database time, and only for terminal states. IN_PROGRESS and UNKNOWN_REQUIRES_RECOVERY never
//!   expire (O3).
//! * A record holds the mode in which it was claimed. That mode, not the route's current mode,
//!   decides what a stale record means (O2).
//! * A lease that ends later than now plus its length was written before the clock went back, and
//!   counts as over (R22).
//!
//! Not here: how states may change (the suite of stores has the table of all changes), and the
//! stored answer's headers and body (`store`).

use std::time::Duration;

use serde::Serialize;
use uuid::Uuid;

use super::fingerprint::Fingerprint;
use super::identity::{Identity, PrincipalMark};
use crate::time::db_time::DbTime;
use crate::time::lease::Lease;

/// What is known of an operation under its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum State {
    /// Claimed; no outcome yet.
    InProgress,
    /// It succeeded, and the answer is replayed.
    Completed,
    /// It failed for good, and the failure is replayed.
    FailedReplayable,
    /// It failed without an effect outstanding, and the same key may run again.
    FailedRetryable,
    /// It is not known whether it happened. Evidence or an operator settles this, time never does.
    UnknownRequiresRecovery,
    /// A terminal state after its lifetime. Computed, never stored.
    Expired,
}

/// The mode of the claim. It decides what a claim without an outcome means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Claim, business rows and completion commit together. A committed IN_PROGRESS is an alarm.
    Transactional,
    /// A layer, and a handler that commits the completion in its own transaction. Only in this mode
    /// a stale claim proves that nothing happened.
    Bridged,
    /// A layer around any handler: a stale claim proves nothing.
    Edge,
    /// Phases with recovery points. A stale claim is recovered.
    Phased,
}

/// A record as a store reads it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Tenant, operation and key as stored, to be compared with those of the request (O16).
    pub identity: Identity,
    /// The principal of the first request.
    pub principal: PrincipalMark,
    /// The command of the first request.
    pub fingerprint: Fingerprint,
    /// The mode in which it was claimed.
    pub mode: Mode,
    /// The stored state, never [`State::Expired`].
    pub state: State,
    /// The number that every change of owner raises. Every fenced statement compares it.
    pub epoch: i64,
    /// The owner's lease; `None` if there is no owner. For [`Mode::Phased`] the lease of the
    /// operation row, the only one (O9), read in the same statement. Its length is stored with its
    /// end, because a route's setting may change while claims exist (R22).
    pub lease: Option<Lease>,
    /// The number that is raised when the key is used again after its record expired (O4).
    pub generation: i64,
    /// The id of this generation's run. Every identity that is sent to others is derived from it.
    /// It lives as long as the record.
    pub operation_id: Uuid,
    /// How often a run was begun.
    pub attempts: u32,
    /// Whether recovery handed it to an operator (O9); only for [`Mode::Phased`].
    pub parked: bool,
    /// When it was claimed first, or first since it last had an outcome.
    pub created_at: DbTime,
    /// When it entered a terminal state.
    pub outcome_at: Option<DbTime>,
    /// When the record expires. It is set together with the outcome, and at no other time.
    pub expires_at: Option<DbTime>,
    /// What is kept of the answer.
    pub answer: Option<StoredAnswer>,
    /// The code of a failure, if it has one.
    pub error_code: Option<String>,
}

/// What is kept of an answer, without the body's bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredAnswer {
    /// The HTTP status, or the code of gRPC.
    pub status: u16,
    /// The version of the schema that the body was written in (M66).
    pub schema_version: u32,
    /// What is kept of the body.
    pub body: StoredBody,
    /// Until when the body is or was kept; `None` if it never was.
    pub body_until: Option<DbTime>,
    /// The resource that holds the result, where one is known (M34). It outlives the body.
    pub resource: Option<Resource>,
}

/// What is kept of an answer's body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoredBody {
    /// The bytes are kept and replayed as they are.
    Kept,
    /// Nothing is kept, for this reason. The operation is never run again to get a body.
    Tombstone(Tombstone),
    /// Only the resource that holds the result (M63).
    Reference,
}

/// Why a body was not kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tombstone {
    /// The body was longer than the limit.
    Oversize,
    /// The body was a stream.
    Stream,
    /// The route stores no body, because it would contain a secret (M67).
    Withheld,
    /// The body's lifetime is over; the metadata lives longer (M99).
    Purged,
}

/// The resource that an operation made (M34).
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Resource {
    /// Its kind, such as `payment`.
    pub kind: String,
    /// The id of the resource among those of its kind.
    pub id: String,
    /// Its URL, for `Location`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub location: Option<String>,
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

    /// Whether the outcome is known. Only such a state expires, and only such a record is purged.
    #[must_use]
    pub fn is_terminal(self) -> bool {
        matches!(self, Self::Completed | Self::FailedReplayable | Self::FailedRetryable | Self::Expired)
    }
}

impl Mode {
    pub(crate) const ALL: [Self; 4] = [Self::Transactional, Self::Bridged, Self::Edge, Self::Phased];

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
    pub(crate) const ALL: [Self; 4] = [Self::Oversize, Self::Stream, Self::Withheld, Self::Purged];

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

    /// The time until the owner's lease ends; zero if the record has no owner now.
    #[must_use]
    pub fn lease_left(&self, now: DbTime) -> Duration {
        self.lease.map_or(Duration::ZERO, |lease| lease.remaining(now))
    }
}

/// The text of each of these types is its `as_str`, and is read back. A text that is no name may
/// come from a newer program.
macro_rules! names {
    ($($kind:ident, $what:literal, $all:expr;)*) => {
        $(
            impl std::fmt::Display for $kind {
                fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                    f.write_str(self.as_str())
                }
            }

            impl std::str::FromStr for $kind {
                type Err = crate::error::Invalid;

                fn from_str(text: &str) -> Result<Self, crate::error::Invalid> {
                    $all.into_iter().find(|one| one.as_str() == text).ok_or_else(|| {
                        crate::error::Invalid::new(format!("`{text}` is no {} that this program knows", $what))
                    })
                }
            }
        )*
    };
}

pub(super) use names;

names! {
    State, "stored state", State::STORED;
    Mode, "mode", Mode::ALL;
    Tombstone, "reason for a missing body", Tombstone::ALL;
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A record of these parts, claimed at 0 s with a lease of 30 s. A terminal one has its outcome
    /// at 10 s and lives 100 s from then.
    pub(in crate::operation::rules) fn record(
        identity: Identity,
        principal: PrincipalMark,
        fingerprint: Fingerprint,
        mode: Mode,
        state: State,
    ) -> Record {
        let outcome_at = state.is_terminal().then(|| at(10));
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
            created_at: at(0),
            outcome_at,
            expires_at: outcome_at.map(|at| at.after(Duration::from_secs(100))),
            answer: outcome_at.map(|_| answer(StoredBody::Kept, None)),
            error_code: None,
        }
    }

    pub(in crate::operation::rules) fn answer(body: StoredBody, resource: Option<Resource>) -> StoredAnswer {
        StoredAnswer { status: 201, schema_version: 1, body, body_until: None, resource }
    }

    fn any_record(state: State) -> Record {
        let key = "9b2f0c64-1b5e-4f0e-8a3c-6f1d2e3a4b5c";
        let identity = Identity::from_stored(b"acme", b"create_payment", key.as_bytes()).expect("an identity");
        let principal = format!("sha256:{}", "0".repeat(64)).parse().expect("a mark");
        let fingerprint = format!("1:sha256:{}", "0".repeat(64)).parse().expect("a fingerprint");
        record(identity, principal, fingerprint, Mode::Edge, state)
    }

    pub(in crate::operation::rules) fn at(seconds: i64) -> DbTime {
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
            assert_eq!(record.state_at(DbTime { micros: 110_000_001 }), expected);
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
        assert!(
            !record.lease_left(at(29)).is_zero()
                && record.lease_left(at(30)).is_zero()
                && record.lease_left(at(-1)).is_zero()
        );
        assert_eq!(record.lease_left(at(10)), Duration::from_secs(20));
        assert_eq!(record.lease_left(at(-1)), Duration::ZERO);
        assert!(Record { lease: None, ..record }.lease_left(at(1)).is_zero());
    }
}
