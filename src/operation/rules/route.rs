//! Pure: no I/O, no clock.
//! The settings of one operation, chosen by the developer of the route (M4). Each is explicit and
//! is checked when the service starts.
//!
//! Guarantees: a combination of settings under which an operation could run twice, or be lost, is
//! refused, with the reason, before the first request is taken.
//!
//! Not here: the command's fingerprint ([`fingerprint`](super::fingerprint)), the strategies of
//! outside providers ([`provider`](super::provider)), and where a route's settings are read from.

use std::time::Duration;

use super::key::KeyFormat;
use super::record::Mode;
use super::retention::Retention;
use crate::error::Invalid;
use crate::time::bound;

/// Whether a request must carry a key (M6, M12).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Requirement {
    /// A key in the header is ignored. For GET, HEAD, OPTIONS and uploads.
    Off,
    /// A request without a key runs unprotected.
    Optional,
    /// A request without a key is refused.
    Required,
}

/// How a duplicate is answered while the first request runs (M43).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WhileRunning {
    /// The duplicate gets 409 with `Retry-After` at once.
    Conflict,
    /// 202 with the `Location` of the operation. For a phased operation only: a run of another mode
    /// has no operation that a client could ask for.
    Accepted,
    /// The duplicate waits up to [`Route::wait_max`] for the answer, and gets 409 after that.
    Wait,
}

/// How a request is answered whose record has expired (M98, O4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AfterExpiry {
    /// The request is a new operation.
    ExecuteAsNew,
    /// 409 `IDEMPOTENCY_KEY_EXPIRED`, also where no record is left and the time in the key is too
    /// old. Needs keys that carry their time ([`KeyFormat::UuidV7`]).
    Reject,
}

/// What a duplicate gets when the body of a success is not kept (M62 to M64). Without its body a
/// failure is always 409 `IDEMPOTENT_RESULT_NOT_RETAINED`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Replay {
    /// Only the first answer's bytes. Without them the answer is 409
    /// `IDEMPOTENT_RESULT_NOT_RETAINED`.
    Exact,
    /// 303 with the `Location` of the resource.
    Reference,
    /// The route builds the answer again from the resource, without running the operation.
    Reconstruct,
}

/// What the developer of an edge route declares about a run whose outcome is unknown, for example
/// after a crash. (In the modes `Transactional` and `Bridged` all effects are in the transaction; a
/// phased operation declares a strategy for each effect.)
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Effects {
    /// The run may have had any effect.
    #[default]
    External,
    /// The run may have had any effect, and a second run does no harm: at-least-once.
    Repeatable,
}

/// The HTTP status where a known key comes with another request. The error code in the body is the
/// same for each of them (M27).
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

/// What the store of the records guarantees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Durability {
    /// The store remembers every outcome until its retention ends.
    Durable,
    /// The store may lose records, for example when a primary of Redis fails (O25).
    Guard,
}

/// The settings of one operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// The mode of the operation: how its keys are claimed.
    pub mode: Mode,
    /// Whether a request needs a key. Default required.
    pub requirement: Requirement,
    /// The form of a key. Default opaque, for phased operations UUID v7.
    pub key_format: KeyFormat,
    /// How a duplicate is answered while the first request runs. Default 409.
    pub while_running: WhileRunning,
    /// How long a duplicate waits at most, for [`WhileRunning::Wait`]. Also how long a request
    /// waits for the write lock of a SQLite file (O18). Default 5 s.
    pub wait_max: Duration,
    /// How many duplicates of one key may wait in this process, for [`WhileRunning::Wait`]; further
    /// ones get 409 at once. Default 64.
    pub waiters_max: u32,
    /// How a retry is answered after its record expired. Default: executed as new, for phased
    /// operations rejected.
    pub after_expiry: AfterExpiry,
    /// What is replayed without a body. Default 409.
    pub replay: Replay,
    /// What a run whose outcome is unknown may have done. Default anything.
    pub effects: Effects,
    /// Whether the route has a function that finds out how a run ended (O11).
    pub reconciles: bool,
    /// The HTTP status of a mismatch. Default 422.
    pub mismatch: MismatchStatus,
    /// How long after its last heartbeat a claim still belongs to its run. Default 30 s.
    pub lease: Duration,
    /// The engine's timeout for the handler; a handler needs no timeout of its own. Default 20 s.
    pub timeout: Duration,
    /// The part of the lease that is reserved for writing the outcome. Default 5 s.
    pub completion_budget: Duration,
    /// How long the answer is replayed, and how long its body and its metadata are kept.
    pub retention: Retention,
    /// How far the clock of the client that makes keys may be ahead. Default 60 s.
    pub id_skew: Duration,
    /// Whether a status that refuses a request, such as 400, frees the key where no `Idempotent<E>`
    /// was reached: the handler has none, or another extractor or a middleware inside of the layer
    /// refused before it (O10). Set this only if nothing was done by then. Default no.
    pub release_untagged: bool,
    /// The longest request body, in bytes. Default 1 MiB.
    pub request_body_max: usize,
    /// How long a request body may take to arrive, from its head to its last byte. Default 10 s. A
    /// slower one gets 408 `IDEMPOTENCY_BODY_TOO_SLOW`.
    pub request_body_within: Duration,
    /// Whether the generic layer takes multipart bodies, which it refuses otherwise (415). They are
    /// compared byte for byte, so a client that draws a new boundary for a retry gets 422: set this
    /// only where clients send the same bytes again. Default no.
    pub takes_multipart: bool,
    /// The longest answer that is kept, in bytes. A longer one leaves a tombstone (pitfall 19).
    /// Default 256 KiB.
    pub kept_body_max: usize,
    /// The path at which clients read an operation; its id is appended: `/operations/`. Default
    /// none.
    pub operation_path: Option<String>,
    /// The version with which new fingerprints are written. Raise it when every process reads that
    /// version (O21). Default: the oldest version that is read, so that processes of the previous
    /// deploy can still answer.
    pub write_version: Option<u32>,
    /// Request headers that are a part of the command in the generic layer (M22), each with the
    /// version of the layer's fingerprint from which it counts; the first version is 1. Older
    /// stored fingerprints are compared without the header (M24). `Prefer` and `If-Match` always
    /// count. Default: no other. Transactional and phased operations refuse any: their command
    /// writes what belongs to it.
    pub counts_headers: Vec<(String, u32)>,
    /// Headers of answers that are kept beside those that always are. Default none.
    pub keeps_headers: Vec<String>,
    /// JSON pointers. The values that they name are replaced by `"[redacted]"` before an answer is
    /// kept (M67). Default none.
    pub redacts: Vec<String>,
    /// The version of the schema that answers are written in today (M66). Default 1.
    pub schema_version: u32,
}

impl MismatchStatus {
    pub(crate) fn status(self) -> u16 {
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
            request_body_max: 1 << 20,
            request_body_within: Duration::from_secs(10),
            takes_multipart: false,
            kept_body_max: 256 << 10,
            operation_path: None,
            write_version: None,
            counts_headers: Vec::new(),
            keeps_headers: Vec::new(),
            redacts: Vec::new(),
            schema_version: 1,
        }
    }

    /// Checks the settings against each other and against the store. The error says what the first
    /// contradiction is.
    pub(crate) fn validate(&self, store: Durability) -> Result<(), Invalid> {
        let checks = [
            (
                self.while_running == WhileRunning::Accepted && self.mode != Mode::Phased,
                "`while_running = accepted` is for mode phased only: a run of another mode has no operation to ask for",
            ),
            (
                self.after_expiry == AfterExpiry::Reject && self.key_format != KeyFormat::UuidV7,
                "`after_expiry = reject` needs `key_format = uuid_v7`: without a time a late retry looks like a new key",
            ),
            // A phased operation declares this in the strategy of an effect (O11).
            (
                self.effects == Effects::Repeatable && self.mode != Mode::Edge,
                "`effects = repeatable` is for mode edge only",
            ),
            (
                self.reconciles && self.mode != Mode::Edge,
                "`reconciles` is for mode edge only: a phased operation recovers, the others need none",
            ),
            (
                self.timeout.saturating_add(self.completion_budget) >= self.lease,
                "`timeout` and `completion_budget` must be shorter than `lease` together, or a run outlives its claim",
            ),
            (
                self.while_running == WhileRunning::Wait && (self.wait_max.is_zero() || self.waiters_max == 0),
                "`wait_max` must be longer than zero, and `waiters_max` at least 1, for `while_running = wait`",
            ),
            // A client would take a 202 without `Location` for the end of the operation.
            (
                self.operation_path.as_ref().is_some_and(|path| !path.bytes().all(|byte| byte.is_ascii_graphic())),
                "`operation_path` may have visible ASCII characters only: it stands in the header `Location`",
            ),
            (
                store == Durability::Guard && self.effects != Effects::Repeatable,
                "a guard store forgets: it takes mode edge with `effects = repeatable` only",
            ),
        ];
        if let Some((_, why)) = checks.into_iter().find(|(applies, _)| *applies) {
            return Err(Invalid::new(why));
        }
        if let Some(pointer) = self.redacts.iter().find(|pointer| !pointer.starts_with('/')) {
            return Err(Invalid::new(format!("`{pointer}` is no JSON pointer: it begins with `/`")));
        }
        self.retention.validate()?;
        // The checks above keep every other time shorter than one of these.
        bound::check([
            ("lease", self.lease),
            ("wait_max", self.wait_max),
            ("request_body_within", self.request_body_within),
            ("id_skew", self.id_skew),
            ("metadata", self.retention.metadata),
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(route: &Route) -> String {
        route.validate(Durability::Durable).expect_err("refused").to_string()
    }

    /// The values are those of docs/reference/settings.md and docs/concepts/operations.md. Shown to
    /// fail: with another value of each.
    #[test]
    fn o4_o24_the_defaults_of_every_mode_are_accepted() {
        let hours = |hours: u64| Duration::from_secs(hours * 3_600);
        for mode in Mode::ALL {
            let route = Route::new(mode);
            assert_eq!(route.validate(Durability::Durable), Ok(()), "{mode}");
            assert_eq!(route.after_expiry == AfterExpiry::Reject, mode == Mode::Phased);
            assert_eq!(route.key_format == KeyFormat::Opaque, mode != Mode::Phased);
            assert_eq!(route.mismatch.status(), 422);
            let (lease, run) = (route.lease.as_secs(), (route.timeout.as_secs(), route.completion_budget.as_secs()));
            assert_eq!((lease, run), (30, (20, 5)), "{mode}");
            let kept = Retention { ttl: hours(24), body: hours(24), metadata: hours(7 * 24) };
            assert_eq!(route.retention, kept, "{mode}");
            assert_eq!((route.wait_max.as_secs(), route.id_skew.as_secs()), (5, 60), "{mode}");
        }
    }

    // Shown by: taking out each of the checks but the last, in turn.
    #[test]
    fn o11_o19_o23_o29_choices_that_break_the_promise_are_refused_by_name() {
        let (edge, phased) = (Route::new(Mode::Edge), Route::new(Mode::Phased));
        let accepted = |mode| Route { while_running: WhileRunning::Accepted, ..Route::new(mode) };
        for mode in [Mode::Transactional, Mode::Bridged, Mode::Edge] {
            assert!(refused(&accepted(mode)).starts_with("`while_running = accepted`"), "{mode}");
        }
        assert_eq!(accepted(Mode::Phased).validate(Durability::Durable), Ok(()));
        for key_format in [KeyFormat::Opaque, KeyFormat::Uuid] {
            assert!(refused(&Route { key_format, ..phased.clone() }).starts_with("`after_expiry = reject`"));
        }
        for mode in [Mode::Transactional, Mode::Bridged, Mode::Phased] {
            let route = Route { effects: Effects::Repeatable, ..Route::new(mode) };
            assert!(refused(&route).starts_with("`effects = repeatable`"));
            assert!(refused(&Route { reconciles: true, ..Route::new(mode) }).starts_with("`reconciles`"));
        }
        let too_short = "`timeout` and `completion_budget`";
        assert!(refused(&Route { lease: Duration::from_secs(25), ..edge.clone() }).starts_with(too_short));
        let wait = Route { while_running: WhileRunning::Wait, wait_max: Duration::ZERO, ..edge.clone() };
        assert!(refused(&wait).starts_with("`wait_max`"));
        for path in ["/op\u{e9}rations/", "/operations /", "/operations/\r\n"] {
            let operation_path = Some(path.to_owned());
            let why = refused(&Route { operation_path, ..phased.clone() });
            assert!(why.starts_with("`operation_path`"), "{path:?}");
        }
        let retention = Retention { ttl: Duration::ZERO, ..Retention::default() };
        assert!(refused(&Route { retention, ..edge }).starts_with("`ttl`"));
    }

    // Beyond this, `Instant::now() + lease` panics at the first request. Shown by: taking out each
    // name, in turn.
    #[test]
    fn m4_a_time_that_no_instant_reaches_is_refused_by_name() {
        let (route, forever) = (Route::new(Mode::Edge), Duration::MAX);
        let retention = Retention { metadata: forever, ..Retention::default() };
        for (too_long, name) in [
            (Route { lease: forever, ..route.clone() }, "lease"),
            (Route { wait_max: forever, ..route.clone() }, "wait_max"),
            (Route { request_body_within: forever, ..route.clone() }, "request_body_within"),
            (Route { id_skew: forever, ..route.clone() }, "id_skew"),
            (Route { retention, ..route.clone() }, "metadata"),
        ] {
            assert_eq!(refused(&too_long), format!("`{name}` must be at most 100 years"));
        }
        let timeout = Route { timeout: forever, lease: forever, ..route };
        assert!(refused(&timeout).starts_with("`timeout`"), "the timeout is shorter than the lease");
    }

    // Shown by: taking out the last check.
    #[test]
    fn o25_a_guard_store_takes_repeatable_edge_routes_only() {
        for mode in Mode::ALL {
            let refused = Route::new(mode).validate(Durability::Guard).expect_err("refused").to_string();
            assert!(refused.starts_with("a guard store forgets"), "{mode}");
        }
        let repeatable = Route { effects: Effects::Repeatable, ..Route::new(Mode::Edge) };
        assert_eq!(repeatable.validate(Durability::Guard), Ok(()));
    }
}
