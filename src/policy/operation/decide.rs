//! What becomes of a request: the whole decision table of the engine (O3, O4, O11, O15, O18 to O21,
//! O23, O29, M42).
//!
//! Guarantees, each walked over the whole space of facts by a test that also kills mutants of the
//! table:
//!
//! * The order of decision: principal, fingerprint version, fingerprint, state, and expiry only for
//!   terminal states (O3).
//! * Another command under the key executes nothing and replays nothing, in any state (M26, M27).
//!   Another principal gets the very same answer.
//! * A stale claim is executed again in two cases only: the mode `bridged`, and an edge route
//!   declared repeatable. A committed claim of a transactional operation is never taken over: it is an alarm.
//! * IN_PROGRESS and UNKNOWN never expire. What cannot be judged here (another's secret, a newer
//!   program, a store that is away) is answered with 503, and nothing runs (M60).
//!
//! An operation asks more than once (O15): with [`Found::NotAsked`] before it takes a connection; with
//! [`Found::Running`] from the map of what runs in its process; with what a plain read found; and,
//! when the lock or the insert was refused, with what a second read found, or [`Found::Busy`]. Only
//! the answer to a read may execute, and then by one fenced statement: insert-first for
//! [`Decision::Claim`], an UPDATE that compares the epoch for the others. Zero rows: read and ask
//! again.
//!
//! Not here: the statements (`store`), the answers' texts (`http`), and how a run ends
//! ([`classify`](super::classify)).

mod table;

use super::fingerprint::{Canonical, Fingerprint, Fingerprinter};
use super::identity::{Identity, PrincipalMark, Scope};
use super::problem::{Code, KeyState};
use super::record::{Record, StoredBody};
use super::retention::KeyAge;
use super::route::Route;
use crate::policy::db_time::DbTime;
use crate::policy::horizon::Bounds;

use self::table::{Asks, Body, Facts, Seen, judge};

/// What an operation is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Decision {
    /// Run without a key: the route has none, or none was sent and none is needed.
    PassThrough,
    /// A key is needed.
    KeyRequired,
    /// The key is malformed, or needs a time and has none.
    KeyInvalid,
    /// The key's time lies beyond database time and skew: the client's clock is wrong.
    KeyFromTheFuture,
    /// There is no scope from verified authentication.
    ScopeRequired,
    /// Another region keeps this key.
    WrongRegion,
    /// The store does not answer.
    StoreUnavailable,
    /// The record under the digest is of another identity: never to be touched. An alarm; answered
    /// as an unavailable store.
    WrongRecord,
    /// The tenant has too much running or unresolved.
    QuotaExceeded,
    /// Look: in the map of what runs here, then in the store.
    Look,
    /// Insert the record first; who inserted it executes.
    Claim,
    /// Answer with what is stored.
    Replay,
    /// Answer with 303 and the resource's location.
    ReplayReference,
    /// Let the route build the answer from the resource; nothing is run.
    Reconstruct,
    /// It happened, and the answer is not kept.
    NotRetained,
    /// The first request runs.
    InProgress(InProgress),
    /// Raise the epoch, then execute.
    TakeOver(TakeOver),
    /// Failed with no effect outstanding: raise epoch and attempts, then execute.
    Reclaim,
    /// Its time is over: raise epoch and generation, make a new operation id, then execute (O4).
    ExecuteAsNew,
    /// Its time is over, and the route wants a new key.
    Expired,
    /// Take recovery ownership of the operation and recover within the budget, else answer that
    /// recovery is pending.
    Recover,
    /// Somebody recovers the operation now; answer that recovery is pending.
    RecoveryPending,
    /// Wake the worker that reconciles this route; answer that recovery is pending.
    Reconcile,
    /// Write UNKNOWN by a fenced UPDATE that raises the epoch, then read and ask again.
    MarkUnknown(Lost),
    /// Nobody knows, and only an operator can say.
    UnknownOutcome,
    /// The key was used with another command: refuse the request.
    Mismatch,
    /// Another principal; answered exactly as a mismatch.
    PrincipalMismatch,
    /// Another process can judge the fingerprint or the principal.
    FingerprintUnreadable,
    /// Nobody can judge the fingerprint any more.
    FingerprintTooOld,
}

/// What a request gets while the first one runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum InProgress {
    /// Answer 409 at once.
    Conflict,
    /// 202 with the location of the operation.
    Accepted,
    /// Wait between reads, without a connection, up to the route's bound; then 409.
    Wait,
}

/// Why a claim without an outcome may be executed again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TakeOver {
    /// Had anything been done, the completion stood in the same transaction (O2).
    Bridged,
    /// The route's author declared it harmless (O11).
    Repeatable,
}

/// How a claim's outcome was lost sight of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Lost {
    /// A claim of a transactional operation is committed without its outcome: a handler ended the transaction. An
    /// alarm (O1).
    CommittedClaim,
    /// The lease of an edge claim is over (O11).
    StaleEdge,
}

/// What a request brings to the decision: a key that can be used, or why there is none.
#[derive(Clone, Copy)]
pub enum Asked<'a> {
    /// No key was sent.
    Keyless,
    /// A key was sent that is none ([`KeyError`](super::key::KeyError)).
    Malformed,
    /// A key was sent, and nobody was authenticated.
    Unscoped,
    /// A key was sent whose home is another region (M106).
    Elsewhere,
    /// A request under a key.
    Keyed(&'a Request<'a>),
}

/// A request under a key, its body read and validated.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    /// Who asks, from verified authentication.
    pub scope: &'a Scope,
    /// Tenant, operation and key.
    pub identity: &'a Identity,
    /// The command, for its fingerprint.
    pub command: &'a dyn Canonical,
    /// The fingerprints of the operation: what this process can read and write.
    pub fingerprinter: &'a Fingerprinter,
    /// Whether the tenant has too much running or unresolved to start more.
    pub over_quota: bool,
}

/// What is known of the key.
#[derive(Debug, Clone, Copy)]
pub enum Found<'a> {
    /// Nobody was asked yet.
    NotAsked,
    /// It runs in this process.
    Running {
        /// The principal of the one that runs.
        principal: &'a PrincipalMark,
        /// The fingerprint of the command that runs.
        fingerprint: &'a Fingerprint,
    },
    /// The store does not answer, or takes no writes.
    Unreachable,
    /// No committed record, and the lock or the insert was refused: an uncommitted claim (O19).
    Busy,
    /// No committed record. With database time and the operation's purge bound, read in the same
    /// statement; without them, a route that judges the age of keys goes no further.
    Nothing(Option<Bounds>),
    /// A committed record, with database time.
    Record(&'a Record, DbTime),
}

/// What becomes of a request.
#[must_use]
pub fn decide(route: &Route, asked: Asked<'_>, found: Found<'_>) -> Decision {
    judge(table::TABLE, &facts(route, asked, found))
}

/// What the table looks at. Columns that mean nothing here hold what is most careful.
fn facts(route: &Route, asked: Asked<'_>, found: Found<'_>) -> Facts {
    let (asks, request) = match asked {
        Asked::Keyless => (Asks::Keyless, None),
        Asked::Malformed => (Asks::Malformed, None),
        Asked::Unscoped => (Asks::Unscoped, None),
        Asked::Elsewhere => (Asks::Elsewhere, None),
        Asked::Keyed(request) => (Asks::Keyed, Some(request)),
    };
    let mut facts = Facts {
        requirement: route.requirement,
        asks,
        while_running: route.while_running,
        after_expiry: route.after_expiry,
        replay: route.replay,
        effects: route.effects,
        reconciles: route.reconciles,
        over_quota: request.is_none_or(|request| request.over_quota),
        ..Facts::CAREFUL
    };
    let Some(request) = request else { return facts };
    let compare = |facts: &mut Facts, principal: &PrincipalMark, fingerprint: &Fingerprint| {
        facts.principal = request.scope.compare(principal, request.fingerprinter.keyring());
        facts.fingerprint = request.fingerprinter.compare(fingerprint, request.command);
    };
    match found {
        Found::NotAsked => facts.seen = Seen::NotAsked,
        Found::Unreachable => facts.seen = Seen::Unreachable,
        Found::Busy => facts.seen = Seen::Busy,
        Found::Running { principal, fingerprint } => {
            facts.seen = Seen::Running;
            compare(&mut facts, principal, fingerprint);
        }
        Found::Nothing(bounds) => {
            facts.seen = Seen::Nothing;
            facts.age = bounds.map_or(KeyAge::Untimed, |bounds| KeyAge::of(request.identity.key().time(), bounds));
        }
        Found::Record(record, _) if record.identity != *request.identity => facts.seen = Seen::WrongRecord,
        Found::Record(record, now) => {
            facts.seen = Seen::Record;
            compare(&mut facts, &record.principal, &record.fingerprint);
            facts.state = record.state_at(now);
            facts.mode = record.mode;
            facts.owned = record.is_owned(now);
            facts.parked = record.parked;
            facts.body = match record.answer.as_ref().map(|answer| &answer.body) {
                Some(StoredBody::Kept) => Body::Kept,
                Some(StoredBody::Reference(_)) => Body::Reference,
                Some(StoredBody::Tombstone(_)) | None => Body::Gone,
            };
        }
    }
    facts
}

impl Decision {
    /// The problem that is answered, with what is known of the key; none where something is run,
    /// read or replayed.
    #[must_use]
    pub fn problem(self) -> Option<(Code, KeyState)> {
        let code = match self {
            Self::PassThrough
            | Self::Look
            | Self::Claim
            | Self::Replay
            | Self::ReplayReference
            | Self::Reconstruct
            | Self::TakeOver(_)
            | Self::Reclaim
            | Self::ExecuteAsNew => return None,
            Self::KeyRequired => Code::KeyRequired,
            Self::KeyInvalid | Self::KeyFromTheFuture => Code::KeyInvalid,
            Self::ScopeRequired => Code::ScopeRequired,
            Self::WrongRegion => Code::WrongRegion,
            Self::StoreUnavailable | Self::WrongRecord => Code::StoreUnavailable,
            Self::QuotaExceeded => Code::QuotaExceeded,
            Self::NotRetained => Code::ResultNotRetained,
            // Whether it succeeded cannot be said: it may even be unknown.
            Self::FingerprintTooOld => return Some((Code::ResultNotRetained, KeyState::Unknown)),
            Self::InProgress(_) => Code::InProgress,
            Self::Expired => Code::KeyExpired,
            Self::Recover | Self::RecoveryPending | Self::Reconcile => Code::RecoveryPending,
            Self::MarkUnknown(_) | Self::UnknownOutcome => Code::OutcomeUnknown,
            Self::Mismatch | Self::PrincipalMismatch => Code::KeyReused,
            Self::FingerprintUnreadable => Code::FingerprintVersionUnknown,
        };
        Some((code, code.key_state()))
    }
}

impl std::fmt::Debug for Request<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Request").field("identity", self.identity).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Asked<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Keyless => f.write_str("Keyless"),
            Self::Malformed => f.write_str("Malformed"),
            Self::Unscoped => f.write_str("Unscoped"),
            Self::Elsewhere => f.write_str("Elsewhere"),
            Self::Keyed(request) => f.debug_tuple("Keyed").field(request).finish(),
        }
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod walk;
