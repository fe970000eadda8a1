//! Pure: no I/O, no clock.
//! When a failed message is tried again, and when it is dead.
//!
//! Guarantees:
//!
//! * A message gets a few quick tries in place, then durable waits up to a maximum, then it is
//!   dead.
//! * Every wait is bounded, whatever the settings, the attempt number, or what a handler asks for.
//! * The same arguments give the same answer: chance is an argument.
//!
//! Not here: storing a waiting message (`store`), and transient failures (`inbox::rules::split`),
//! which count no attempt.

use std::time::Duration;

use crate::error::Invalid;

/// The schedule of a consumer's retries.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RetryPolicy {
    /// Tries in place after the first failure, before the message is stored as waiting. Default 2.
    pub in_place: u32,
    /// The pause before each try in place. Its lane waits meanwhile. Default 50 ms.
    pub in_place_delay: Duration,
    /// The number of attempts, the first included. After the last one the message is dead. Default
    /// 20, which with the other defaults takes about an hour and a half.
    pub attempts_max: u32,
    /// The first durable wait. Default 1 s.
    pub base: Duration,
    /// The longest durable wait, also for a wait that a handler asks for. Default 10 min.
    pub cap: Duration,
    /// Each durable wait of the schedule is the one before times this factor. After a timeout of
    /// the handler, which is not tried in place, the first waits are all `base`. Default 2.
    pub multiplier: f64,
    /// The share of a wait, 0 to 1, that chance may take away, so that messages which failed
    /// together are not tried again together. Default 0.2.
    pub jitter: f64,
}

/// What happens to a message that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Decision {
    /// Try again in place after this pause.
    InPlace(Duration),
    /// Store it as waiting, due after this time.
    Wait(Duration),
    /// There is no further try: the message is dead, for this reason.
    Dead(&'static str),
}

/// The reason of a message whose handler said that no retry can help.
pub(crate) const TERMINAL: &str = "terminal";
/// The reason of a message whose last attempt has failed.
pub(crate) const ATTEMPTS: &str = "attempts";

/// What a failed try asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Asked {
    /// Nothing: the schedule decides.
    Nothing,
    /// Try again after this time.
    After(Duration),
    /// Do not try again in place: the try took as long as it may, and the messages behind it shall
    /// not wait for another one.
    NotInPlace,
    /// Do not try again at all.
    NoRetry,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            in_place: 2,
            in_place_delay: Duration::from_millis(50),
            attempts_max: 20,
            base: Duration::from_secs(1),
            cap: Duration::from_secs(600),
            multiplier: 2.0,
            jitter: 0.2,
        }
    }
}

impl RetryPolicy {
    /// Decides what follows a failure. `failed` is the number of attempts that failed, this one
    /// included; `chance` is drawn from 0 to 1. A time that a handler asks for is granted up to
    /// `cap`, and the attempt counts. Otherwise such a message could be tried for ever.
    pub(crate) fn next(&self, failed: u32, asked: Asked, chance: f64) -> Decision {
        match asked {
            Asked::NoRetry => Decision::Dead(TERMINAL),
            _ if failed >= self.attempts_max => Decision::Dead(ATTEMPTS),
            Asked::After(asked) => Decision::Wait(asked.min(self.cap)),
            Asked::Nothing if failed <= self.in_place => Decision::InPlace(self.in_place_delay),
            Asked::Nothing | Asked::NotInPlace => {
                Decision::Wait(self.wait(failed.saturating_sub(self.in_place).max(1), chance))
            }
        }
    }

    /// Whether the attempt of this number, counted from 1, may begin. A number above the last one
    /// occurs when every attempt ended with the death of its process.
    pub(crate) fn allows(&self, attempt: u32) -> bool {
        attempt <= self.attempts_max
    }

    /// The longest that all waits together can take, whatever handlers ask for. The time of the
    /// handlers is not included.
    pub(crate) fn longest(&self) -> Duration {
        self.cap.max(self.in_place_delay).saturating_mul(self.attempts_max)
    }

    /// The durable wait number `n`, counted from 1; `chance` is drawn from 0 to 1.
    pub(crate) fn wait(&self, n: u32, chance: f64) -> Duration {
        let exponent = i32::try_from(n.saturating_sub(1)).unwrap_or(i32::MAX);
        let cap = self.cap.as_secs_f64();
        let full = self.base.as_secs_f64() * self.multiplier.max(1.0).powi(exponent);
        let off = fraction(self.jitter) * fraction(chance);
        Duration::try_from_secs_f64(full.min(cap) * (1.0 - off)).map_or(self.cap, |wait| wait.min(self.cap))
    }

    /// Checks the settings. The error names one that cannot be used.
    pub(crate) fn validate(&self) -> Result<(), Invalid> {
        let refused = |why: &'static str| Err(Invalid::new(why));
        if self.attempts_max == 0 {
            refused("`attempts_max` must be at least 1")
        } else if self.base.is_zero() {
            refused("`base` must be longer than zero")
        } else if self.cap < self.base {
            refused("`cap` must be at least as long as `base`")
        } else if !(self.multiplier >= 1.0 && self.multiplier.is_finite()) {
            refused("`multiplier` must be at least 1, and finite")
        } else if !(0.0..=1.0).contains(&self.jitter) {
            refused("`jitter` must be from 0 to 1")
        } else {
            Ok(())
        }
    }
}

/// The pause after this many failures in a row: `first`, doubled with each failure, up to
/// `longest`. `chance` is drawn from 0 to 1 and picks from half of that to all of it, so that
/// callers which failed together do not try again together.
#[must_use]
pub(crate) fn pause(first: Duration, longest: Duration, failures: u32, chance: f64) -> Duration {
    let doubled = 1_u32.checked_shl(failures.saturating_sub(1)).unwrap_or(u32::MAX);
    first.saturating_mul(doubled).min(longest).mul_f64(0.5 + 0.5 * fraction(chance))
}

/// The number clamped to 0 to 1; 0 for NaN.
fn fraction(share: f64) -> f64 {
    if share.is_nan() { 0.0 } else { share.clamp(0.0, 1.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEADY: RetryPolicy = RetryPolicy {
        in_place: 2,
        in_place_delay: Duration::from_millis(50),
        attempts_max: 7,
        base: Duration::from_secs(1),
        cap: Duration::from_secs(5),
        multiplier: 2.0,
        jitter: 0.0,
    };

    #[test]
    fn quick_tries_come_first_then_growing_waits_up_to_the_cap_then_death() {
        let decisions: Vec<Decision> = (1..=8).map(|failed| STEADY.next(failed, Asked::Nothing, 0.5)).collect();
        let in_place = Decision::InPlace(Duration::from_millis(50));
        let wait = |seconds| Decision::Wait(Duration::from_secs(seconds));
        let dead = Decision::Dead(ATTEMPTS);
        assert_eq!(decisions, [in_place, in_place, wait(1), wait(2), wait(4), wait(5), dead, dead]);
        assert!(STEADY.allows(7) && !STEADY.allows(8));
    }

    #[test]
    fn chance_only_shortens_a_wait_and_never_beyond_the_jitter() {
        let policy = RetryPolicy { jitter: 0.25, ..STEADY };
        assert_eq!(policy.next(4, Asked::Nothing, 0.0), Decision::Wait(Duration::from_secs(2)));
        assert_eq!(policy.next(4, Asked::Nothing, 1.0), Decision::Wait(Duration::from_millis(1_500)));
        let broken = policy.next(4, Asked::Nothing, f64::NAN);
        assert_eq!(broken, Decision::Wait(Duration::from_secs(2)), "a broken draw does no harm");
    }

    #[test]
    fn a_handler_that_asks_for_a_time_gets_it_up_to_the_cap_and_the_attempt_counts() {
        let asked = Duration::from_secs(3);
        assert_eq!(STEADY.next(1, Asked::After(asked), 0.5), Decision::Wait(asked));
        assert_eq!(STEADY.next(6, Asked::After(Duration::MAX), 0.5), Decision::Wait(Duration::from_secs(5)));
        assert_eq!(STEADY.next(7, Asked::After(asked), 0.5), Decision::Dead(ATTEMPTS));
    }

    #[test]
    fn a_handler_that_says_terminal_has_no_second_try() {
        assert_eq!(STEADY.next(1, Asked::NoRetry, 0.5), Decision::Dead(TERMINAL));
        assert_eq!(STEADY.next(7, Asked::NoRetry, 0.5), Decision::Dead(TERMINAL));
    }

    #[test]
    fn pauses_double_from_half_of_the_first_to_the_longest() {
        let (first, longest) = (Duration::from_millis(20), Duration::from_secs(5));
        let at = |failures, chance| pause(first, longest, failures, chance);
        assert_eq!((at(1, 0.0), at(1, 1.0)), (first / 2, first));
        assert_eq!(at(4, 1.0), first * 8);
        assert_eq!((at(u32::MAX, 1.0), at(0, 1.0)), (longest, first));
        assert!(at(3, f64::NAN) <= first * 4, "a broken draw does no harm");
    }

    #[test]
    fn the_default_is_usable_and_each_broken_setting_is_named() {
        let good = RetryPolicy::default();
        assert_eq!(good.validate(), Ok(()));
        for (bad, name) in [
            (RetryPolicy { attempts_max: 0, ..good }, "`attempts_max`"),
            (RetryPolicy { base: Duration::ZERO, ..good }, "`base`"),
            (RetryPolicy { cap: Duration::from_millis(999), ..good }, "`cap`"),
            (RetryPolicy { multiplier: 0.5, ..good }, "`multiplier`"),
            (RetryPolicy { multiplier: f64::NAN, ..good }, "`multiplier`"),
            (RetryPolicy { multiplier: f64::INFINITY, ..good }, "`multiplier`"),
            (RetryPolicy { jitter: -0.1, ..good }, "`jitter`"),
            (RetryPolicy { jitter: f64::NAN, ..good }, "`jitter`"),
        ] {
            let why = bad.validate().expect_err(name).to_string();
            assert!(why.starts_with(name), "{why}");
        }
    }
}
