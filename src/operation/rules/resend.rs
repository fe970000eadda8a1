//! Pure: no I/O, no clock.
//! What a client does after an attempt: send again, follow, end, or report that the outcome is
//! unknown (O26, O27, M110).
//!
//! Guarantees, tested for everything that an attempt can meet:
//!
//! * After one attempt of unknown outcome, only a 2xx from the requested URL, or a problem whose
//!   `key_state` is `spent`, ends the operation. Any other answer leaves the outcome unknown,
//!   whatever it says of the second attempt.
//! * A redirect, or a 2xx from another URL, never ends it: a proxy may have turned a POST into a
//!   GET.
//! * An attempt that never reached the server leaves no outcome unknown.
//! * Nothing here makes a key: an operation keeps its one key for ever.
//!
//! For clients of one's own: [`after_attempt`] is the rule of `client`, also for gRPC.
//!
//! Chance and time are arguments. Not here: sockets, headers and clocks (`client`), the server's
//! decisions (`decide`), and providers that oncebox calls itself
//! ([`provider`](super::provider)).

use std::time::Duration;

use super::problem::{Code, KeyState};

/// The result of one attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Seen {
    /// There was no connection: refused, no such host, no TLS. Nothing was sent.
    NotSent,
    /// The request was sent, perhaps in part, and no complete answer came: reset, timeout, a body
    /// that was cut off.
    NoAnswer,
    /// The answer has a status from 300 to 399; the redirect is not followed.
    Redirected,
    /// The answer comes from another URL than the requested one.
    Elsewhere,
    /// A 2xx that is the result.
    Success,
    /// A 202 with a `Location` on the requested origin.
    Accepted,
    /// A 202 with a `Location` on another origin.
    AcceptedElsewhere,
    /// An answer of any other status.
    Answer {
        /// The HTTP status of the answer.
        status: u16,
        /// The code of its problem body, if it is a code of the engine.
        code: Option<Code>,
        /// What its problem body says of the key.
        key_state: Option<KeyState>,
    },
}

/// What the client does after an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Next {
    /// The answer is the end of the operation.
    Done,
    /// Send the same bytes under the same key again, after a pause.
    Again {
        /// Whether the outcome of an attempt is unknown from now on.
        doubt: bool,
    },
    /// Ask the `Location` for the outcome, after a pause. The outcome is unknown from now on.
    Follow,
    /// The outcome is not known, and another send does not help now. New credentials may help.
    Unknown,
}

/// Decides what follows an attempt. `doubt` says that the outcome of an earlier attempt is unknown.
/// A client that finds the operation in its journal begins with `doubt`.
#[must_use]
pub fn after_attempt(seen: Seen, doubt: bool) -> Next {
    match seen {
        Seen::NotSent => Next::Again { doubt },
        Seen::NoAnswer | Seen::Redirected | Seen::Elsewhere | Seen::AcceptedElsewhere => Next::Again { doubt: true },
        Seen::Success => Next::Done,
        Seen::Accepted => Next::Follow,
        Seen::Answer { key_state: Some(state), .. } if state.ends_the_operation() => Next::Done,
        Seen::Answer { status, code, .. } => match says(status, code) {
            Says::Wait { ran_nothing } => Next::Again { doubt: doubt || !ran_nothing },
            Says::Nobody => Next::Unknown,
            Says::No if doubt => Next::Unknown,
            Says::No => Next::Done,
        },
    }
}

/// The answer of the operation's own URL to a question for the outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Polled {
    /// `pending` or `unknown`, or a 202.
    Pending,
    /// `succeeded` or `failed`, with the result.
    Ended,
    /// The operation ended without a kept result, or the answer does not have the form of oncebox.
    Unclear,
    /// A result that any attempt can have.
    Met(Seen),
}

/// What the client does after a question for the outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum AfterPoll {
    /// The result is the end of the operation.
    Done,
    /// Ask again, after a pause.
    Ask,
    /// Send the operation again, after a pause. Its answer is replayed.
    Resend,
    /// The outcome is not known; also if the operation is not found (O26).
    Unknown,
}

/// What the client does after a question for the outcome.
#[must_use]
pub(crate) fn after_poll(polled: Polled) -> AfterPoll {
    match polled {
        Polled::Ended => AfterPoll::Done,
        Polled::Pending => AfterPoll::Ask,
        Polled::Unclear => AfterPoll::Resend,
        Polled::Met(seen) => match seen {
            Seen::NotSent | Seen::NoAnswer | Seen::Accepted | Seen::AcceptedElsewhere => AfterPoll::Ask,
            Seen::Redirected | Seen::Elsewhere | Seen::Success => AfterPoll::Resend,
            Seen::Answer { status, code, .. } => match says(status, code) {
                Says::Wait { .. } => AfterPoll::Ask,
                Says::Nobody | Says::No => AfterPoll::Unknown,
            },
        },
    }
}

/// What an answer without success says about its own attempt.
enum Says {
    /// The request may be sent again after a pause.
    Wait {
        /// Whether this attempt certainly ran nothing or was rolled back completely. This says
        /// nothing about another process that sent the same key before; a client that continues
        /// such an operation begins with `doubt`.
        ran_nothing: bool,
    },
    /// The request is refused, and would be refused again.
    No,
    /// There was an error that no retry mends, and the outcome is not known.
    Nobody,
}

fn says(status: u16, code: Option<Code>) -> Says {
    match code {
        // The request was refused before the operation was looked at, or by its store; or it ran
        // and was rolled back completely.
        Some(
            Code::StoreUnavailable
            | Code::QuotaExceeded
            | Code::BodyTooSlow
            | Code::BodyMemoryExceeded
            | Code::OperationFailed,
        ) => Says::Wait { ran_nothing: true },
        Some(
            Code::InProgress
            | Code::RecoveryPending
            | Code::OutcomeUnknown
            | Code::CommitUnknown
            | Code::ResultNotStored
            | Code::FingerprintVersionUnknown,
        ) => Says::Wait { ran_nothing: false },
        Some(Code::TransactionEnded) => Says::Nobody,
        Some(_) if (400..500).contains(&status) => Says::No,
        None | Some(_) => match status {
            408 | 425 | 429 => Says::Wait { ran_nothing: false },
            400..=499 => Says::No,
            _ => Says::Wait { ran_nothing: false },
        },
    }
}

impl Seen {
    /// The result of a unary gRPC call, by the number of its status. `reason` and `key_state` come
    /// from `ErrorInfo`. A deadline or a cancellation is mostly the client's own and says nothing
    /// about the server (O27).
    #[must_use]
    pub(crate) fn of_grpc(status: i32, reason: Option<Code>, key_state: Option<KeyState>) -> Self {
        let http = match status {
            0 => return Self::Success,
            3 | 11 => 400,
            5 => 404,
            6 => 409,
            7 => 403,
            8 => 429,
            9 => 422,
            12 => 405,
            16 => 401,
            // Cancelled, unknown, deadline, aborted, internal, unavailable, data loss, or a number
            // that is no status: only a reason from the server counts.
            _ if reason.is_none() => return Self::NoAnswer,
            _ => reason.map_or(503, Code::status),
        };
        Self::Answer { status: http, code: reason, key_state }
    }
}

/// A pause between zero and the backoff's limit, drawn by `chance` (0 to 1): full jitter, so that
/// clients which failed together do not try again together. `failed` counts the failed attempts,
/// from 1.
#[must_use]
pub(crate) fn pause(failed: u32, base: Duration, cap: Duration, chance: f64) -> Duration {
    let doubled = base.saturating_mul(1_u32.checked_shl(failed.saturating_sub(1)).unwrap_or(u32::MAX));
    let chance = if chance.is_nan() { 1.0 } else { chance.clamp(0.0, 1.0) };
    doubled.min(cap).mul_f64(chance)
}

/// The time during which an operation may be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SendWindow {
    /// The longest time of this call.
    pub total: Duration,
    /// The time for which the server remembers a key at least, counted from the first send. After
    /// it the same key might run again.
    pub lifetime: Duration,
    /// The longest time of one attempt.
    pub attempt: Duration,
}

impl SendWindow {
    /// Whether an attempt may begin after this pause. `lasted` is the time of the call so far,
    /// `age` the time since the first send. The attempt must also end, by its own limit, while the
    /// server still remembers the key.
    #[must_use]
    pub(crate) fn allows(&self, pause: Duration, lasted: Duration, age: Duration) -> bool {
        let begins = lasted.saturating_add(pause);
        begins < self.total && age.saturating_add(pause).saturating_add(self.attempt) <= self.lifetime
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All results that an attempt can have.
    fn everything() -> Vec<Seen> {
        let mut all = vec![
            Seen::NotSent,
            Seen::NoAnswer,
            Seen::Redirected,
            Seen::Elsewhere,
            Seen::Success,
            Seen::Accepted,
            Seen::AcceptedElsewhere,
        ];
        let states: Vec<_> = KeyState::ALL.into_iter().map(Some).chain([None]).collect();
        let codes: Vec<_> = Code::all().map(Some).chain([None]).collect();
        for status in 400..=600 {
            for &code in &codes {
                all.extend(states.iter().map(|&key_state| Seen::Answer { status, code, key_state }));
            }
        }
        all
    }

    fn is_spent(seen: Seen) -> bool {
        matches!(seen, Seen::Answer { key_state: Some(KeyState::Spent), .. })
    }

    // Shown by: ending at every answer below 500; at a redirect; at an answer from elsewhere;
    // dropping `if doubt`.
    #[test]
    fn o26_in_doubt_only_a_2xx_or_a_spent_key_ends_the_operation() {
        for seen in everything() {
            let next = after_attempt(seen, true);
            let ends = seen == Seen::Success || is_spent(seen);
            assert_eq!(next == Next::Done, ends, "{seen:?}: {next:?}");
            assert_ne!(next, Next::Again { doubt: false }, "doubt never ends by trying: {seen:?}");
        }
    }

    // Shown by: giving a 500 to the application; taking 503 of a proxy for the engine's.
    #[test]
    fn o26_without_doubt_an_answer_ends_it_only_where_it_is_one() {
        for seen in everything() {
            let next = after_attempt(seen, false);
            let Seen::Answer { status, code, .. } = seen else {
                let expected = match seen {
                    Seen::NotSent => Next::Again { doubt: false },
                    Seen::Success => Next::Done,
                    Seen::Accepted => Next::Follow,
                    _ => Next::Again { doubt: true },
                };
                assert_eq!(next, expected, "{seen:?}");
                continue;
            };
            if is_spent(seen) {
                assert_eq!(next, Next::Done, "{seen:?}");
            } else if status >= 500 {
                assert_ne!(next, Next::Done, "nobody knows what a {status} did: {seen:?}");
            }
            // An answer that leaves no doubt says that the attempt did nothing, so an attempt that
            // may have run must never get such an answer.
            let sure = [
                Code::StoreUnavailable,
                Code::QuotaExceeded,
                Code::BodyTooSlow,
                Code::BodyMemoryExceeded,
                Code::OperationFailed,
            ];
            if next == (Next::Again { doubt: false }) {
                assert!(code.is_some_and(|code| sure.contains(&code)), "{seen:?}");
            }
        }
    }

    // The statuses one by one, as the client's documentation lists them. Shown by: changing one.
    #[test]
    fn m110_what_is_tried_again_is_listed() {
        let answer = |status, code| Seen::Answer { status, code, key_state: code.map(Code::key_state) };
        let again = Next::Again { doubt: true };
        for status in [408, 425, 429, 500, 501, 502, 503, 504, 599] {
            assert_eq!(after_attempt(answer(status, None), false), again, "{status}");
        }
        for status in [400, 401, 402, 403, 404, 405, 409, 410, 412, 413, 415, 421, 422, 431] {
            assert_eq!(after_attempt(answer(status, None), false), Next::Done, "{status}");
            assert_eq!(after_attempt(answer(status, None), true), Next::Unknown, "{status}");
        }
        for code in Code::all() {
            let next = after_attempt(answer(code.status(), Some(code)), false);
            let expected = match code {
                Code::StoreUnavailable
                | Code::QuotaExceeded
                | Code::BodyTooSlow
                | Code::BodyMemoryExceeded
                | Code::OperationFailed => Next::Again { doubt: false },
                Code::InProgress
                | Code::RecoveryPending
                | Code::OutcomeUnknown
                | Code::CommitUnknown
                | Code::ResultNotStored
                | Code::FingerprintVersionUnknown => again,
                Code::TransactionEnded => Next::Unknown,
                _ => Next::Done,
            };
            assert_eq!(next, expected, "{code}");
            // Only what the server calls retryable is sent again.
            assert!(code.retryable() || !matches!(next, Next::Again { .. }), "{code}");
        }
        assert_eq!(after_attempt(answer(409, Some(Code::ResultNotRetained)), true), Next::Done, "its key is spent");
        assert_eq!(after_attempt(answer(409, Some(Code::KeyExpired)), true), Next::Unknown);
        assert_eq!(after_attempt(answer(422, Some(Code::KeyReused)), true), Next::Unknown);
    }

    // Shown by: ending at 404; asking for ever where a 401 is answered.
    #[test]
    fn o26_the_question_for_the_outcome_ends_at_the_outcome_only() {
        assert_eq!(after_poll(Polled::Ended), AfterPoll::Done);
        assert_eq!(after_poll(Polled::Pending), AfterPoll::Ask);
        assert_eq!(after_poll(Polled::Unclear), AfterPoll::Resend);
        for seen in everything() {
            let next = after_poll(Polled::Met(seen));
            assert_ne!(next, AfterPoll::Done, "{seen:?}");
            if let Seen::Answer { status: status @ (401 | 403 | 404 | 410), code: None, .. } = seen {
                assert_eq!(next, AfterPoll::Unknown, "{status}");
            }
        }
    }

    // Shown by: mapping 4 to 408 and ending there; hearing an unavailable server without a reason.
    #[test]
    fn o27_a_deadline_or_a_cancellation_says_nothing_of_the_server() {
        for status in [1, 2, 4, 10, 13, 14, 15, 17, -1] {
            let seen = Seen::of_grpc(status, None, None);
            assert_eq!(seen, Seen::NoAnswer, "{status}");
            assert_eq!(after_attempt(seen, false), Next::Again { doubt: true });
        }
        assert_eq!(Seen::of_grpc(0, None, None), Seen::Success);
        for code in Code::all() {
            let seen = Seen::of_grpc(code.grpc(), Some(code), Some(code.key_state()));
            let by_http = Seen::Answer { status: code.status(), code: Some(code), key_state: Some(code.key_state()) };
            for doubt in [false, true] {
                assert_eq!(after_attempt(seen, doubt), after_attempt(by_http, doubt), "{code}");
            }
        }
        assert_eq!(after_attempt(Seen::of_grpc(7, None, None), false), Next::Done);
        assert_eq!(after_attempt(Seen::of_grpc(7, None, None), true), Next::Unknown);
    }

    // Shown by: half jitter; counting from 2; no cap.
    #[test]
    fn m110_pauses_grow_to_the_cap_and_chance_takes_any_part_of_them() {
        let (base, cap) = (Duration::from_millis(100), Duration::from_secs(20));
        let at = |failed, chance| pause(failed, base, cap, chance);
        assert_eq!([1, 2, 3, 8].map(|failed| at(failed, 1.0).as_millis()), [100, 200, 400, 12_800]);
        for failed in [9, 32, 33, u32::MAX] {
            assert_eq!(at(failed, 1.0), cap);
            assert_eq!(at(failed, 0.0), Duration::ZERO);
            assert_eq!(at(failed, 0.5), cap / 2);
        }
        for chance in [f64::NAN, f64::INFINITY, -1.0, 7.0] {
            assert!(at(5, chance) <= cap);
        }
    }

    // Shown by: leaving the attempt's own length out; comparing with `total` only.
    #[test]
    fn m110_no_attempt_begins_that_might_arrive_when_the_key_is_forgotten() {
        let second = Duration::from_secs(1);
        let window = SendWindow { total: second * 60, lifetime: second * 100, attempt: second * 10 };
        assert!(window.allows(second, second * 58, second * 58));
        assert!(!window.allows(second, second * 59, second * 59), "the call is over");
        assert!(window.allows(Duration::ZERO, Duration::ZERO, second * 90), "found in the journal");
        assert!(!window.allows(Duration::ZERO, Duration::ZERO, second * 91), "it might arrive too late");
        assert!(!window.allows(Duration::MAX, Duration::ZERO, Duration::ZERO));
    }
}
