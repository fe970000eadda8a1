//! Pure: no I/O, no clock.
//! The table of all problem codes that the engine answers, for HTTP, gRPC and the client (M36,
//! M120).
//!
//! Guarantees:
//!
//! * The name, status, `retryable` and `key_state` of a code are the same everywhere.
//! * `retryable` answers one question: may a request come again under the same key? It is true also
//!   where the body or its type must be corrected first, because nothing is stored of such a
//!   request. When to come again is another question: [`Code::pause`] answers it.
//! * `key_state` states only what was looked up. It is `spent` only where the outcome of this same
//!   command is known: a client that has lost an answer may end its operation at `spent`, and at no
//!   other problem (O26). So a mismatch says `not_said`: it must not show the state of another's
//!   record, and proves nothing about an earlier try.
//!
//! Not here: titles and links in a problem body (`http`), codes of an application such as
//! `INSUFFICIENT_FUNDS`, and the seconds of `Retry-After` ([`pace`](super::pace)).

use super::record::names;

/// What is known of a key when a problem is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KeyState {
    /// There is no record under the key.
    Free,
    /// The first request under the key still runs.
    InProgress,
    /// The outcome of this command is known and will not change.
    Spent,
    /// The record has expired.
    Expired,
    /// The record was not read, or nothing may be said about it.
    NotSaid,
    /// It is not known yet how the operation ended.
    Unknown,
}

/// A problem code: the field `code` of a problem body, and `reason` in gRPC's `ErrorInfo`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Code {
    /// The request has no key, and the operation requires one.
    KeyRequired,
    /// The key is malformed, is given twice, has no time where the route needs one, or its time
    /// lies in the future.
    KeyInvalid,
    /// There is no scope from verified authentication.
    ScopeRequired,
    /// The caller is not authenticated.
    Unauthenticated,
    /// The request is not valid for this operation.
    RequestInvalid,
    /// The operation does not accept this content type.
    UnsupportedMediaType,
    /// The body is longer than the limit.
    BodyTooLarge,
    /// The body did not arrive in time.
    BodyTooSlow,
    /// The request bodies fill the memory that they may use (`body_memory_max`, O29).
    BodyMemoryExceeded,
    /// The key was used with another command, or by another principal.
    KeyReused,
    /// The first request under the key still runs.
    InProgress,
    /// The outcome is being found out.
    RecoveryPending,
    /// The outcome is not known, and only an operator can find it out.
    OutcomeUnknown,
    /// The record of the key has expired, or is gone and the time in the key is too old.
    KeyExpired,
    /// The operation succeeded or failed for good, and its answer is not kept. Or the record has a
    /// fingerprint that is too old to be compared: then its `key_state` is `unknown`.
    ResultNotRetained,
    /// The outcome of the commit is not known. A retry finds it out.
    CommitUnknown,
    /// The operation may have run or still run, and its outcome could not be stored yet.
    ResultNotStored,
    /// The handler ended the operation's transaction by itself. This is a defect.
    TransactionEnded,
    /// This process cannot compare the fingerprint, or open the stored answer; another one must.
    FingerprintVersionUnknown,
    /// The store does not answer, takes no writes, or has no free connection. This request ran
    /// nothing. The code says nothing about an earlier request under the key.
    StoreUnavailable,
    /// The tenant has too many open operations, or too many bytes of stored answers.
    QuotaExceeded,
    /// The record of the key is kept in another region.
    WrongRegion,
    /// The operation's own code failed and was rolled back. The same key may run again (M36).
    OperationFailed,
}

mod grpc {
    pub(super) const INVALID_ARGUMENT: i32 = 3;
    pub(super) const PERMISSION_DENIED: i32 = 7;
    pub(super) const RESOURCE_EXHAUSTED: i32 = 8;
    pub(super) const FAILED_PRECONDITION: i32 = 9;
    pub(super) const ABORTED: i32 = 10;
    pub(super) const INTERNAL: i32 = 13;
    pub(super) const UNAVAILABLE: i32 = 14;
    pub(super) const UNAUTHENTICATED: i32 = 16;
}

struct Row {
    code: Code,
    name: &'static str,
    status: u16,
    grpc: i32,
    retryable: bool,
    key_state: KeyState,
    pause: Option<u32>,
}

const fn row(
    code: Code,
    name: &'static str,
    (status, grpc): (u16, i32),
    retryable: bool,
    key_state: KeyState,
    pause: Option<u32>,
) -> Row {
    Row { code, name, status, grpc, retryable, key_state, pause }
}

const TABLE: [Row; 23] = {
    use KeyState::{Expired, Free, InProgress, NotSaid, Spent, Unknown};
    use grpc::*;
    [
        row(Code::KeyRequired, "IDEMPOTENCY_KEY_REQUIRED", (400, INVALID_ARGUMENT), false, Free, None),
        row(Code::KeyInvalid, "IDEMPOTENCY_KEY_INVALID", (400, INVALID_ARGUMENT), false, Free, None),
        row(Code::ScopeRequired, "IDEMPOTENCY_SCOPE_REQUIRED", (403, PERMISSION_DENIED), true, NotSaid, None),
        row(Code::Unauthenticated, "UNAUTHENTICATED", (401, UNAUTHENTICATED), true, NotSaid, None),
        row(Code::RequestInvalid, "REQUEST_INVALID", (400, INVALID_ARGUMENT), true, NotSaid, None),
        row(Code::UnsupportedMediaType, "UNSUPPORTED_MEDIA_TYPE", (415, INVALID_ARGUMENT), true, NotSaid, None),
        row(Code::BodyTooLarge, "IDEMPOTENCY_BODY_TOO_LARGE", (413, INVALID_ARGUMENT), false, NotSaid, None),
        row(Code::BodyTooSlow, "IDEMPOTENCY_BODY_TOO_SLOW", (408, UNAVAILABLE), true, NotSaid, None),
        row(Code::BodyMemoryExceeded, "IDEMPOTENCY_BODY_MEMORY_EXCEEDED", (503, UNAVAILABLE), true, NotSaid, Some(1)),
        row(
            Code::KeyReused,
            "IDEMPOTENCY_KEY_REUSED_WITH_DIFFERENT_REQUEST",
            (422, FAILED_PRECONDITION),
            false,
            NotSaid,
            None,
        ),
        row(Code::InProgress, "IDEMPOTENCY_REQUEST_IN_PROGRESS", (409, ABORTED), true, InProgress, Some(1)),
        row(Code::RecoveryPending, "IDEMPOTENCY_RECOVERY_PENDING", (409, ABORTED), true, Unknown, Some(2)),
        row(Code::OutcomeUnknown, "IDEMPOTENCY_OUTCOME_UNKNOWN", (409, ABORTED), true, Unknown, Some(30)),
        row(Code::KeyExpired, "IDEMPOTENCY_KEY_EXPIRED", (409, FAILED_PRECONDITION), false, Expired, None),
        row(Code::ResultNotRetained, "IDEMPOTENT_RESULT_NOT_RETAINED", (409, FAILED_PRECONDITION), false, Spent, None),
        row(Code::CommitUnknown, "IDEMPOTENCY_COMMIT_UNKNOWN", (503, UNAVAILABLE), true, Unknown, Some(1)),
        row(Code::ResultNotStored, "IDEMPOTENCY_RESULT_NOT_STORED", (503, UNAVAILABLE), true, Unknown, Some(2)),
        row(Code::TransactionEnded, "IDEMPOTENCY_TRANSACTION_ENDED", (500, INTERNAL), false, Unknown, None),
        row(
            Code::FingerprintVersionUnknown,
            "IDEMPOTENCY_FINGERPRINT_VERSION_UNKNOWN",
            (503, UNAVAILABLE),
            true,
            Unknown,
            Some(5),
        ),
        row(Code::StoreUnavailable, "IDEMPOTENCY_STORE_UNAVAILABLE", (503, UNAVAILABLE), true, NotSaid, Some(2)),
        row(Code::QuotaExceeded, "IDEMPOTENCY_QUOTA_EXCEEDED", (429, RESOURCE_EXHAUSTED), true, NotSaid, Some(5)),
        row(Code::WrongRegion, "IDEMPOTENCY_WRONG_REGION", (421, FAILED_PRECONDITION), true, NotSaid, None),
        row(Code::OperationFailed, "OPERATION_FAILED", (500, INTERNAL), true, Free, None),
    ]
};

impl Code {
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        TABLE.iter().map(|row| row.code)
    }

    fn row(self) -> &'static Row {
        // The table has the order of the codes; a test checks this.
        &TABLE[self as usize]
    }

    /// The name of the code. It never changes.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        self.row().name
    }

    /// The HTTP status. A route may choose another one for [`Code::KeyReused`], and 202 for
    /// [`Code::RecoveryPending`].
    pub(crate) fn status(self) -> u16 {
        self.row().status
    }

    pub(crate) fn grpc(self) -> i32 {
        self.row().grpc
    }

    /// Whether a request may come again under the same key, where needed with a corrected body.
    #[must_use]
    pub fn retryable(self) -> bool {
        self.row().retryable
    }

    /// What is known of the key, unless the caller knows more.
    pub(crate) fn key_state(self) -> KeyState {
        self.row().key_state
    }

    /// The minimum wait in seconds; `None` if waiting does not help.
    pub(crate) fn pause(self) -> Option<u32> {
        self.row().pause
    }
}

impl KeyState {
    pub(crate) const ALL: [Self; 6] =
        [Self::Free, Self::InProgress, Self::Spent, Self::Expired, Self::NotSaid, Self::Unknown];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Free => "free",
            Self::InProgress => "in_progress",
            Self::Spent => "spent",
            Self::Expired => "expired",
            Self::NotSaid => "not_said",
            Self::Unknown => "unknown",
        }
    }

    /// Whether a client that has lost an answer may end its operation with this problem (O26).
    pub(crate) fn ends_the_operation(self) -> bool {
        self == Self::Spent
    }
}

names! {
    Code, "code", Code::all();
    KeyState, "state of a key", KeyState::ALL;
}

#[cfg(test)]
mod tests {
    use super::*;

    // The published table, code by code, which clients rely on. Shown by: changing one cell.
    #[test]
    fn m36_m120_every_code_has_the_status_and_the_answer_that_are_published() {
        let published = [
            ("IDEMPOTENCY_KEY_REQUIRED", 400, false),
            ("IDEMPOTENCY_KEY_INVALID", 400, false),
            ("IDEMPOTENCY_SCOPE_REQUIRED", 403, true),
            ("UNAUTHENTICATED", 401, true),
            ("REQUEST_INVALID", 400, true),
            ("UNSUPPORTED_MEDIA_TYPE", 415, true),
            ("IDEMPOTENCY_BODY_TOO_LARGE", 413, false),
            ("IDEMPOTENCY_BODY_TOO_SLOW", 408, true),
            ("IDEMPOTENCY_BODY_MEMORY_EXCEEDED", 503, true),
            ("IDEMPOTENCY_KEY_REUSED_WITH_DIFFERENT_REQUEST", 422, false),
            ("IDEMPOTENCY_REQUEST_IN_PROGRESS", 409, true),
            ("IDEMPOTENCY_RECOVERY_PENDING", 409, true),
            ("IDEMPOTENCY_OUTCOME_UNKNOWN", 409, true),
            ("IDEMPOTENCY_KEY_EXPIRED", 409, false),
            ("IDEMPOTENT_RESULT_NOT_RETAINED", 409, false),
            ("IDEMPOTENCY_COMMIT_UNKNOWN", 503, true),
            ("IDEMPOTENCY_RESULT_NOT_STORED", 503, true),
            ("IDEMPOTENCY_TRANSACTION_ENDED", 500, false),
            ("IDEMPOTENCY_FINGERPRINT_VERSION_UNKNOWN", 503, true),
            ("IDEMPOTENCY_STORE_UNAVAILABLE", 503, true),
            ("IDEMPOTENCY_QUOTA_EXCEEDED", 429, true),
            ("IDEMPOTENCY_WRONG_REGION", 421, true),
            ("OPERATION_FAILED", 500, true),
        ];
        let codes: Vec<_> = Code::all().map(|code| (code.as_str(), code.status(), code.retryable())).collect();
        assert_eq!(codes, published);
    }

    // Shown by: swapping two rows.
    #[test]
    fn the_table_stands_in_the_order_of_the_codes_and_names_are_read_back() {
        for (at, row) in TABLE.iter().enumerate() {
            assert_eq!(row.code as usize, at);
            assert_eq!(row.name.parse(), Ok(row.code));
            assert_eq!(row.key_state.as_str().parse(), Ok(row.key_state));
        }
        let why = "INSUFFICIENT_FUNDS".parse::<Code>().expect_err("an application's own").to_string();
        assert_eq!(why, "`INSUFFICIENT_FUNDS` is no code that this program knows");
    }

    // Shown by: `Spent` for a mismatch.
    #[test]
    fn o26_no_problem_ends_an_operation_but_a_known_outcome_of_the_same_command() {
        let ending: Vec<Code> = Code::all().filter(|code| code.key_state().ends_the_operation()).collect();
        assert_eq!(ending, [Code::ResultNotRetained]);
    }

    #[test]
    fn m60_what_may_pass_with_time_says_when_to_come_again_and_is_retryable() {
        for code in Code::all() {
            let passes = matches!(code.status(), 429 | 503) || code.status() == 409 && code.retryable();
            assert_eq!(code.pause().is_some(), passes, "{code}");
            assert!(code.pause().is_none_or(|seconds| (1..=30).contains(&seconds) && code.retryable()), "{code}");
        }
    }

    // The mapping from HTTP status to gRPC status, as it is published.
    #[test]
    fn m109_the_grpc_status_follows_from_the_code() {
        for code in Code::all() {
            let expected = match code.status() {
                400 | 413 | 415 => 3,
                401 => 16,
                403 => 7,
                429 => 8,
                500 => 13,
                408 | 503 => 14,
                409 if code.retryable() => 10,
                _ => 9,
            };
            assert_eq!(code.grpc(), expected, "{code}");
        }
    }
}
