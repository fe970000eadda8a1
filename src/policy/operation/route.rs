//! What the author of an operation chose (M4): every policy explicit, checked when the service
//! starts.
//!
//! Guarantees: choices that cannot keep the promise together are refused by name, before a request
//! is taken.
//!
//! Not here: the command's fingerprint ([`fingerprint`](super::fingerprint)), the strategies of
//! outside providers ([`provider`](super::provider)), and where a route's settings are read from.

use std::time::Duration;

use super::key::KeyFormat;
use super::record::Mode;
use super::retention::{Retention, RetentionError};

/// Whether a request must carry a key (M6, M12).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Requirement {
    /// A key in the header is ignored: GET, HEAD, OPTIONS, uploads.
    Off,
    /// A request without a key runs unprotected.
    Optional,
    /// A request without a key is refused.
    Required,
}

/// What a request gets while the first one runs (M43).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WhileRunning {
    /// The duplicate gets 409 with `Retry-After` at once.
    Conflict,
    /// 202 with the `Location` of the operation. Not for a transactional operation, whose running operation nobody
    /// else can see.
    Accepted,
    /// Wait up to [`Route::wait_max`], then replay, else 409.
    Wait,
}

/// What a request gets whose key's time is over (M98, O4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AfterExpiry {
    /// It is a new operation.
    ExecuteAsNew,
    /// 409 `IDEMPOTENCY_KEY_EXPIRED`, also when nothing is left of the record. Needs keys that
    /// carry their time.
    Reject,
}

/// What is replayed where the body was not kept (M62 to M64).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Replay {
    /// The first answer's bytes; without them 409 `IDEMPOTENT_RESULT_NOT_RETAINED`.
    Exact,
    /// 303 with the `Location` of the resource.
    Reference,
    /// The route builds the answer anew from the resource, without running the operation.
    Reconstruct,
}

/// What the author of an edge route says of a run whose end was not seen. (In the modes `same_tx`
/// and `bridged` all effects stand in the transaction; a phased operation declares a strategy per
/// effect.)
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Effects {
    /// It may have done anything.
    #[default]
    External,
    /// It may have done anything, and doing it twice does no harm: at-least-once.
    Repeatable,
}

/// The status of a mismatch; the code is the same (M27).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum MismatchStatus {
    /// 422, which generic clients do not retry.
    #[default]
    Unprocessable,
    /// Answer a mismatch with status 409.
    Conflict,
    /// Answer a mismatch with status 400.
    BadRequest,
}

/// What the store is that the route's records stand in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Durability {
    /// It remembers every outcome.
    Durable,
    /// It suppresses duplicates while one primary keeps its data (Redis, O25).
    Guard,
}

/// The policies of one operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// The mode of the operation: how its keys are claimed.
    pub mode: Mode,
    /// Whether a key is needed. Default required.
    pub requirement: Requirement,
    /// What a key looks like. Default opaque, for phased operations UUID v7.
    pub key_format: KeyFormat,
    /// What a duplicate gets while the first one runs. Default 409.
    pub while_running: WhileRunning,
    /// How long a duplicate waits at most, for [`WhileRunning::Wait`], and for its turn at a SQLite
    /// file (O18).
    pub wait_max: Duration,
    /// How many duplicates of one key wait in this process at most, for [`WhileRunning::Wait`]; the
    /// others are answered 409 at once. Default 64.
    pub waiters_max: u32,
    /// What a late retry gets. Default: rejected for phased operations, executed as new elsewhere.
    pub after_expiry: AfterExpiry,
    /// What is replayed without a body. Default 409.
    pub replay: Replay,
    /// What a lost run may have done. Default anything.
    pub effects: Effects,
    /// Whether the route can find out how a run ended (O11).
    pub reconciles: bool,
    /// The status of a mismatch.
    pub mismatch: MismatchStatus,
    /// How long a claim is owned without a heartbeat. Default 30 s.
    pub lease: Duration,
    /// The engine's own timeout of the handler; it replaces an inner one. Default 20 s.
    pub timeout: Duration,
    /// What is kept of the lease to write the outcome. Default 5 s.
    pub completion_budget: Duration,
    /// How long a key, its answer's body and its metadata live.
    pub retention: Retention,
    /// How far the clock of a key's maker may be ahead. Default 60 s.
    pub id_skew: Duration,
    /// Whether, on a route without `Idempotent<E>`, an untagged 400 and its like frees the key
    /// (O10). Only true of a handler that has done nothing when it answers so. Default no.
    pub release_untagged: bool,
}

/// Choices that cannot keep the promise together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RouteError {
    /// `while_running` is `Accepted` in mode `Transactional`, where nobody else sees a running operation.
    #[error("`while_running = accepted` needs an operation that others can see: not in mode same_tx")]
    AcceptedInTransactional,
    /// `after_expiry` is `Reject`, and the format of keys tells no time.
    #[error("`after_expiry = reject` needs `key_format = uuid_v7`: without a time a late retry looks like a new key")]
    RejectUntimed,
    /// O11: what may be run twice is declared for an edge route, and for a provider by its
    /// strategy.
    #[error("`effects = repeatable` is for mode edge only")]
    RepeatableElsewhere,
    /// `reconciles` is set, and the mode is not `Edge`: other modes have nothing to reconcile.
    #[error("`reconciles` is for mode edge only: a phased operation recovers, the others need none")]
    ReconcilesElsewhere,
    /// `timeout` and `completion_budget` together are not shorter than `lease`: a run would outlive
    /// its claim (pitfall 10).
    #[error("`timeout` and `completion_budget` must be shorter than `lease` together, or a run outlives its claim")]
    LeaseTooShort,
    /// A wait without an end.
    #[error("`wait_max` must be longer than zero, and `waiters_max` at least 1, for `while_running = wait`")]
    NoWait,
    /// The store forgets, so effects must be declared repeatable, in mode `Edge` (O25).
    #[error("a guard store forgets: it takes mode edge with `effects = repeatable` only")]
    GuardNeedsRepeatable,
    /// The lifetimes of `retention` contradict each other.
    #[error(transparent)]
    Retention(#[from] RetentionError),
}

impl MismatchStatus {
    /// The HTTP status: 422, 409 or 400.
    #[must_use]
    pub fn status(self) -> u16 {
        match self {
            Self::Unprocessable => 422,
            Self::Conflict => 409,
            Self::BadRequest => 400,
        }
    }
}

impl Route {
    /// The defaults of a mode.
    #[must_use]
    pub fn new(mode: Mode) -> Self {
        let phased = mode == Mode::Phased;
        Self {
            mode,
            requirement: Requirement::Required,
            key_format: if phased { KeyFormat::UuidV7 } else { KeyFormat::Opaque },
            while_running: WhileRunning::Conflict,
            wait_max: Duration::from_secs(5),
            waiters_max: 64,
            after_expiry: if phased { AfterExpiry::Reject } else { AfterExpiry::ExecuteAsNew },
            replay: Replay::Exact,
            effects: Effects::External,
            reconciles: false,
            mismatch: MismatchStatus::default(),
            lease: Duration::from_secs(30),
            timeout: Duration::from_secs(20),
            completion_budget: Duration::from_secs(5),
            retention: Retention::default(),
            id_skew: Duration::from_secs(60),
            release_untagged: false,
        }
    }

    /// Checks the choices against each other and against the store.
    ///
    /// # Errors
    ///
    /// The choices that cannot keep the promise together.
    pub fn validate(&self, store: Durability) -> Result<(), RouteError> {
        let refused = [
            (
                self.mode == Mode::Transactional && self.while_running == WhileRunning::Accepted,
                RouteError::AcceptedInTransactional,
            ),
            (
                self.after_expiry == AfterExpiry::Reject && self.key_format != KeyFormat::UuidV7,
                RouteError::RejectUntimed,
            ),
            (self.effects == Effects::Repeatable && self.mode != Mode::Edge, RouteError::RepeatableElsewhere),
            (self.reconciles && self.mode != Mode::Edge, RouteError::ReconcilesElsewhere),
            (self.timeout.saturating_add(self.completion_budget) >= self.lease, RouteError::LeaseTooShort),
            (
                self.while_running == WhileRunning::Wait && (self.wait_max.is_zero() || self.waiters_max == 0),
                RouteError::NoWait,
            ),
            (store == Durability::Guard && self.effects != Effects::Repeatable, RouteError::GuardNeedsRepeatable),
        ];
        if let Some((_, error)) = refused.into_iter().find(|(refused, _)| *refused) {
            return Err(error);
        }
        Ok(self.retention.validate()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(route: &Route) -> RouteError {
        route.validate(Durability::Durable).expect_err("refused")
    }

    #[test]
    fn o4_o24_the_defaults_of_every_mode_are_accepted() {
        for mode in Mode::ALL {
            let route = Route::new(mode);
            assert_eq!(route.validate(Durability::Durable), Ok(()), "{mode}");
            assert_eq!(route.after_expiry == AfterExpiry::Reject, mode == Mode::Phased);
            assert_eq!(route.key_format == KeyFormat::Opaque, mode != Mode::Phased);
            assert_eq!(route.mismatch.status(), 422);
        }
    }

    // Shown by: taking each line out of the list in turn.
    #[test]
    fn o11_o19_o23_o29_choices_that_break_the_promise_are_refused_by_name() {
        let (same_tx, edge, phased) =
            (Route::new(Mode::Transactional), Route::new(Mode::Edge), Route::new(Mode::Phased));
        let accepted = Route { while_running: WhileRunning::Accepted, ..same_tx };
        assert_eq!(refused(&accepted), RouteError::AcceptedInTransactional);
        for key_format in [KeyFormat::Opaque, KeyFormat::Uuid] {
            assert_eq!(refused(&Route { key_format, ..phased.clone() }), RouteError::RejectUntimed);
        }
        for mode in [Mode::Transactional, Mode::Bridged, Mode::Phased] {
            let route = Route { effects: Effects::Repeatable, ..Route::new(mode) };
            assert_eq!(refused(&route), RouteError::RepeatableElsewhere);
            assert_eq!(refused(&Route { reconciles: true, ..Route::new(mode) }), RouteError::ReconcilesElsewhere);
        }
        assert_eq!(refused(&Route { lease: Duration::from_secs(25), ..edge.clone() }), RouteError::LeaseTooShort);
        let wait = Route { while_running: WhileRunning::Wait, wait_max: Duration::ZERO, ..edge.clone() };
        assert_eq!(refused(&wait), RouteError::NoWait);
        let retention = Retention { ttl: Duration::ZERO, ..Retention::default() };
        assert_eq!(refused(&Route { retention, ..edge }), RouteError::Retention(RetentionError::NoTtl));
    }

    // Shown by: taking the last line out of the list.
    #[test]
    fn o25_a_guard_store_takes_repeatable_edge_routes_only() {
        for mode in Mode::ALL {
            let refused = Route::new(mode).validate(Durability::Guard);
            assert_eq!(refused, Err(RouteError::GuardNeedsRepeatable), "{mode}");
        }
        let repeatable = Route { effects: Effects::Repeatable, ..Route::new(Mode::Edge) };
        assert_eq!(repeatable.validate(Durability::Guard), Ok(()));
    }
}
