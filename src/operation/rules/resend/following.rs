//! Pure: no I/O, no clock.
//! What the client of this library does beside the rule of every client: it asks for the outcome,
//! pauses, and ends before the server forgets the key (O26, M110).

use std::time::Duration;

use super::{Says, Seen, says};

/// The answer of the operation's own URL to a question for the outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Polled {
    /// `pending` or `unknown`, or a 202.
    Pending,
    /// `succeeded` or `failed`, with the result.
    Ended,
    /// The operation ended without a kept result, or the answer does not have the form of oncebox.
    Unclear,
    /// Anything else, judged as for a send.
    Met(Seen),
}

/// What the client does after a question for the outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum AfterPoll {
    Done,
    Ask,
    /// Send it again, after a pause: its answer is the stored one, or that it still runs.
    Resend,
    /// The outcome is not known; also if the operation is not found (O26).
    Unknown,
}

/// What the client does after a question for the outcome.
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

/// A pause between zero and the backoff's limit, drawn by `chance` (0 to 1): full jitter, so that
/// clients which failed together do not try again together. `failed` counts the failed attempts,
/// from 1.
pub(crate) fn pause(failed: u32, base: Duration, cap: Duration, chance: f64) -> Duration {
    let doubled = base.saturating_mul(1_u32.checked_shl(failed.saturating_sub(1)).unwrap_or(u32::MAX));
    let chance = if chance.is_nan() { 1.0 } else { chance.clamp(0.0, 1.0) };
    doubled.min(cap).mul_f64(chance)
}

/// The time during which an operation may be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SendWindow {
    /// The time of this call after which no attempt begins.
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
    pub(crate) fn allows(&self, pause: Duration, lasted: Duration, age: Duration) -> bool {
        let begins = lasted.saturating_add(pause);
        begins < self.total && age.saturating_add(pause).saturating_add(self.attempt) <= self.lifetime
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::everything;
    use super::*;

    // Shown by: taking 404 for an outcome; asking for ever where a 401 is answered.
    #[test]
    fn o26_only_an_outcome_that_is_known_is_done() {
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
