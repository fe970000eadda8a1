//! Pure: no I/O, no clock.
//! What a client does after an attempt: send again, follow, end, or report that the outcome is
//! unknown (O26, O27, M110).
//!
//! Guarantees, tested for everything that an attempt can meet:
//!
//! * After one attempt of unknown outcome, only a 2xx from the requested URL, or an answer that
//!   calls the key `spent`, ends the operation. Any other answer leaves the outcome unknown,
//!   whatever it says of the second attempt. A 409 that says no more may mean that the first one
//!   still runs, so the request is sent again.
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

#[cfg(feature = "client")]
mod following;

#[cfg(feature = "client")]
pub(crate) use self::following::{AfterPoll, Polled, SendWindow, after_poll, pause};
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
        /// What its problem body, or the header `Idempotency-Key-State`, says of the key.
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
        // A server that only follows the draft of the header says by this status alone that the
        // request runs: the attempt in doubt may be the one that it means.
        Seen::Answer { status: 409, code: None, key_state: None } if doubt => Next::Again { doubt },
        // A newer server, which says this by a code that is not known here.
        Seen::Answer { code: None, key_state: Some(KeyState::InProgress | KeyState::Unknown), .. } => {
            Next::Again { doubt: true }
        }
        Seen::Answer { status, code, .. } => match says(status, code) {
            Says::Wait { ran_nothing } => Next::Again { doubt: doubt || !ran_nothing },
            Says::Nobody => Next::Unknown,
            Says::No if doubt => Next::Unknown,
            Says::No => Next::Done,
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
    /// The result of a unary gRPC call, by the number of its status. `reason` comes from
    /// `ErrorInfo`, `key_state` from there or from the metadata of a replayed answer. A deadline or
    /// a cancellation is mostly the client's own and says nothing about the server (O27).
    pub(crate) fn of_grpc(status: i32, reason: Option<Code>, key_state: Option<KeyState>) -> Self {
        let http = match status {
            0 => return Self::Success,
            3 => 400,
            5 => 404,
            7 => 403,
            8 => 429,
            // "Already exists" is a refusal; what runs is "aborted".
            6 | 9 => 422,
            12 => 405,
            16 => 401,
            // Cancelled, unknown, deadline, aborted, out of range (tonic's word for an answer that
            // is longer than its client takes), internal, unavailable, data loss, or a number that
            // is no status: only a reason from the server counts.
            _ => match reason {
                Some(code) => code.status(),
                // The stored refusal of a service that refuses by this status.
                None if key_state.is_some_and(KeyState::ends_the_operation) => 422,
                None => return Self::NoAnswer,
            },
        };
        Self::Answer { status: http, code: reason, key_state }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The codes which say that their request ran nothing, or was rolled back completely.
    const RAN_NOTHING: [Code; 5] = [
        Code::StoreUnavailable,
        Code::QuotaExceeded,
        Code::BodyTooSlow,
        Code::BodyMemoryExceeded,
        Code::OperationFailed,
    ];

    /// All results that an attempt can have.
    pub(super) fn everything() -> Vec<Seen> {
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
            if next == (Next::Again { doubt: false }) {
                assert!(code.is_some_and(|code| RAN_NOTHING.contains(&code)), "{seen:?}");
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
        for status in [400, 401, 402, 403, 404, 405, 410, 412, 413, 415, 421, 422, 431] {
            assert_eq!(after_attempt(answer(status, None), false), Next::Done, "{status}");
            assert_eq!(after_attempt(answer(status, None), true), Next::Unknown, "{status}");
        }
        assert_eq!(after_attempt(answer(409, None), false), Next::Done);
        assert_eq!(after_attempt(answer(409, None), true), again, "the attempt in doubt may still run");
        for code in Code::all() {
            let next = after_attempt(answer(code.status(), Some(code)), false);
            let expected = match code {
                code if RAN_NOTHING.contains(&code) => Next::Again { doubt: false },
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

    // Shown by: mapping 4 to 408 and ending there; hearing an unavailable server without a reason;
    // taking 11 for a refusal.
    #[test]
    fn o27_a_deadline_or_a_cancellation_says_nothing_of_the_server() {
        for status in [1, 2, 4, 10, 11, 13, 14, 15, 17, -1] {
            let seen = Seen::of_grpc(status, None, None);
            assert_eq!(seen, Seen::NoAnswer, "{status}");
            assert_eq!(after_attempt(seen, false), Next::Again { doubt: true });
            // The replayed refusal of a service that refuses by this status. Shown by: hearing a
            // reason only.
            assert_eq!(after_attempt(Seen::of_grpc(status, None, Some(KeyState::Spent)), true), Next::Done, "{status}");
        }
        assert_eq!(Seen::of_grpc(0, None, None), Seen::Success);
        for code in Code::all() {
            let seen = Seen::of_grpc(code.grpc(), Some(code), Some(code.key_state()));
            let by_http = Seen::Answer { status: code.status(), code: Some(code), key_state: Some(code.key_state()) };
            for doubt in [false, true] {
                assert_eq!(after_attempt(seen, doubt), after_attempt(by_http, doubt), "{code}");
            }
        }
        for status in [6, 7] {
            assert_eq!(after_attempt(Seen::of_grpc(status, None, None), false), Next::Done, "{status}");
            assert_eq!(after_attempt(Seen::of_grpc(status, None, None), true), Next::Unknown, "{status}");
        }
    }
}
