//! Pure: no I/O, no clock.
//! The decisions about a request, and the problem code that each is answered with.

use super::super::problem::{Code, KeyState};
use super::super::route::WhileRunning;

/// What an operation must do with a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Decision {
    /// Run without protection: the route has keys off, or optional and the request has none.
    PassThrough,
    KeyRequired,
    /// The key is malformed, or it has no time and the route needs one.
    KeyInvalid,
    /// The key's time lies beyond database time and skew: the client's clock is wrong.
    KeyFromTheFuture,
    /// There is no scope from verified authentication.
    ScopeRequired,
    /// The record of this key is kept in another region.
    WrongRegion,
    StoreUnavailable,
    /// The record under this digest has another identity, so it must not be changed. This is an
    /// alarm, answered like an unavailable store.
    WrongRecord,
    /// As many operations of the tenant run in this process as may. The engine also uses this
    /// when the store has too many operations without an outcome, or too many bytes of answers,
    /// of the tenant.
    QuotaExceeded,
    /// Look for the key in the map of what runs in this process, then in the store.
    Look,
    /// Insert the record. The process whose insert succeeds executes.
    Claim,
    Replay,
    /// Answer with 303 and the resource's location.
    ReplayReference,
    /// Let the route build the answer from the resource. Nothing is executed.
    Reconstruct,
    NotRetained,
    /// The first request under this key still runs. Answer 409 at once, or 202 with the location of
    /// the operation; or wait without a connection and read again, up to the route's limit.
    InProgress(WhileRunning),
    /// Raise the epoch, then execute.
    TakeOver(TakeOver),
    /// The last run failed without an effect outstanding: raise epoch and attempts, then execute.
    Reclaim,
    /// The record has expired: raise epoch and generation, make a new id, then execute (O4).
    ExecuteAsNew,
    /// The route wants a new key: the record has expired, or is gone and the time in the key is
    /// below the purge bound.
    Expired,
    /// Take the operation's lease and recover it within the time budget. If that takes longer,
    /// answer that recovery is pending.
    Recover,
    /// Another process recovers the operation now. Answer that recovery is pending.
    RecoveryPending,
    /// Wake the worker that reconciles this route; answer that recovery is pending.
    Reconcile,
    /// Write UNKNOWN by a fenced UPDATE that raises the epoch, then read and ask again.
    MarkUnknown(Lost),
    /// The outcome is not known, and only an operator can find it out.
    UnknownOutcome,
    /// The key was used with another command: refuse the request.
    Mismatch,
    /// The key was used by another principal. The answer is the same as for a mismatch.
    PrincipalMismatch,
    /// This process cannot judge the fingerprint or the principal; another one can.
    FingerprintUnreadable,
    /// No process can judge the fingerprint any more.
    FingerprintTooOld,
}

/// Why a claim without an outcome may be executed again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum TakeOver {
    /// The effect and the outcome commit together, so without an outcome nothing was done (O2).
    Bridged,
    /// The route's author declared that a second run does no harm (O11).
    Repeatable,
}

/// Why the outcome of a claim is unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Lost {
    /// A claim of a transactional operation was committed without its outcome, because a handler
    /// ended the transaction. This is an alarm (O1).
    CommittedClaim,
    /// The lease of an edge claim has ended (O11).
    StaleEdge,
}

impl Decision {
    /// The problem code of the answer, with what is known of the key. `None` if the decision leads
    /// to a run, a read or a replay.
    pub(crate) fn problem(self) -> Option<(Code, KeyState)> {
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
