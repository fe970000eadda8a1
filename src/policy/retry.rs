//! When a failed message is tried again, and when it is dead.
//!
//! Guarantees:
//!
//! * A few quick tries in place, then durable waits that grow and never exceed the cap, then dead.
//! * Every wait is bounded, whatever the settings, the attempt number, or what a handler asks for.
//! * The same arguments give the same answer: chance is an argument.
//!
//! Not here: storing a waiting message (`store`), failures that are nobody's and count no attempt ([`split`]), and a
//! terminal failure, which is dead without asking.
//!
//! [`split`]: super::split

use std::fmt;
use std::time::Duration;

/// The schedule of a consumer's retries.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RetryPolicy {
    /// Tries in place after the first failure, before the message is stored as waiting. Default 2.
    pub in_place: u32,
    /// The pause before each of them; they hold their lane. Default 50 ms.
    pub in_place_delay: Duration,
    /// Attempts in all, the first included; after the last the message is dead. Default 20, which with the other
    /// defaults is about an hour and a half.
    pub max_attempts: u32,
    /// The first durable wait. Default 1 s.
    pub base: Duration,
    /// No durable wait is longer, also none that a handler asks for. Default 10 min.
    pub cap: Duration,
    /// Each durable wait is so many times the one before. Default 2.
    pub multiplier: f64,
    /// The share of a wait that chance may take away, 0 to 1, so that what failed together does not come back
    /// together. Default 0.2.
    pub jitter: f64,
}

/// What happens to a message that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// Try again here after this pause.
    InPlace(Duration),
    /// Store it as waiting, due after this time.
    Wait(Duration),
    /// It had its last attempt.
    Dead,
}

/// Why a schedule cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RetryPolicyError {
    /// `max_attempts` is 0.
    NoAttempt,
    /// `base` is zero: waits would never grow.
    NoBase,
    /// `cap` is less than `base`.
    CapBelowBase,
    /// `multiplier` is not a number of at least 1.
    Multiplier,
    /// `jitter` is not a number from 0 to 1.
    Jitter,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            in_place: 2,
            in_place_delay: Duration::from_millis(50),
            max_attempts: 20,
            base: Duration::from_secs(1),
            cap: Duration::from_secs(600),
            multiplier: 2.0,
            jitter: 0.2,
        }
    }
}

impl RetryPolicy {
    /// What follows a failure, where `failed` attempts have failed, this one included, and `chance` is drawn from
    /// 0 to 1.
    #[must_use]
    pub fn next(&self, failed: u32, chance: f64) -> Decision {
        if failed >= self.max_attempts {
            Decision::Dead
        } else if failed <= self.in_place {
            Decision::InPlace(self.in_place_delay)
        } else {
            Decision::Wait(self.wait(failed - self.in_place, chance))
        }
    }

    /// What follows when the handler asked to be retried after a time: its time, up to the cap. The attempt counts,
    /// because one that did not would never end.
    #[must_use]
    pub fn next_after(&self, failed: u32, asked: Duration) -> Decision {
        if failed >= self.max_attempts { Decision::Dead } else { Decision::Wait(asked.min(self.cap)) }
    }

    /// The wait number `n`, counted from 1.
    fn wait(&self, n: u32, chance: f64) -> Duration {
        let exponent = i32::try_from(n.saturating_sub(1)).unwrap_or(i32::MAX);
        let cap = self.cap.as_secs_f64();
        let full = self.base.as_secs_f64() * self.multiplier.max(1.0).powi(exponent);
        let off = fraction(self.jitter) * fraction(chance);
        Duration::try_from_secs_f64(full.min(cap) * (1.0 - off)).map_or(self.cap, |wait| wait.min(self.cap))
    }

    /// Checks the settings.
    ///
    /// # Errors
    ///
    /// The setting that cannot be used.
    pub fn validate(&self) -> Result<(), RetryPolicyError> {
        if self.max_attempts == 0 {
            Err(RetryPolicyError::NoAttempt)
        } else if self.base.is_zero() {
            Err(RetryPolicyError::NoBase)
        } else if self.cap < self.base {
            Err(RetryPolicyError::CapBelowBase)
        } else if !(self.multiplier >= 1.0 && self.multiplier.is_finite()) {
            Err(RetryPolicyError::Multiplier)
        } else if !(0.0..=1.0).contains(&self.jitter) {
            Err(RetryPolicyError::Jitter)
        } else {
            Ok(())
        }
    }
}

/// A draw or a share as a number from 0 to 1, also when it is none.
pub(super) fn fraction(share: f64) -> f64 {
    if share.is_nan() { 0.0 } else { share.clamp(0.0, 1.0) }
}

impl fmt::Display for RetryPolicyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoAttempt => "`max_attempts` must be at least 1",
            Self::NoBase => "`base` must be longer than zero",
            Self::CapBelowBase => "`cap` must be at least as long as `base`",
            Self::Multiplier => "`multiplier` must be at least 1",
            Self::Jitter => "`jitter` must be from 0 to 1",
        })
    }
}

impl std::error::Error for RetryPolicyError {}

#[cfg(test)]
mod tests {
    use super::*;

    const STEADY: RetryPolicy = RetryPolicy {
        in_place: 2,
        in_place_delay: Duration::from_millis(50),
        max_attempts: 7,
        base: Duration::from_secs(1),
        cap: Duration::from_secs(5),
        multiplier: 2.0,
        jitter: 0.0,
    };

    #[test]
    fn quick_tries_come_first_then_growing_waits_up_to_the_cap_then_death() {
        let decisions: Vec<Decision> = (1..=8).map(|failed| STEADY.next(failed, 0.5)).collect();
        let in_place = Decision::InPlace(Duration::from_millis(50));
        let wait = |seconds| Decision::Wait(Duration::from_secs(seconds));
        let expected = [in_place, in_place, wait(1), wait(2), wait(4), wait(5), Decision::Dead, Decision::Dead];
        assert_eq!(decisions, expected);
    }

    #[test]
    fn chance_only_shortens_a_wait_and_never_beyond_the_jitter() {
        let policy = RetryPolicy { jitter: 0.25, ..STEADY };
        assert_eq!(policy.next(4, 0.0), Decision::Wait(Duration::from_secs(2)));
        assert_eq!(policy.next(4, 1.0), Decision::Wait(Duration::from_millis(1_500)));
        assert_eq!(policy.next(4, f64::NAN), Decision::Wait(Duration::from_secs(2)), "a broken draw does no harm");
    }

    #[test]
    fn a_handler_that_asks_for_a_time_gets_it_up_to_the_cap_and_the_attempt_counts() {
        let asked = Duration::from_secs(3);
        assert_eq!(STEADY.next_after(1, asked), Decision::Wait(asked));
        assert_eq!(STEADY.next_after(6, Duration::MAX), Decision::Wait(Duration::from_secs(5)));
        assert_eq!(STEADY.next_after(7, asked), Decision::Dead);
    }

    #[test]
    fn the_default_is_usable_and_each_broken_setting_is_named() {
        let good = RetryPolicy::default();
        assert_eq!(good.validate(), Ok(()));
        for (bad, error) in [
            (RetryPolicy { max_attempts: 0, ..good }, RetryPolicyError::NoAttempt),
            (RetryPolicy { base: Duration::ZERO, ..good }, RetryPolicyError::NoBase),
            (RetryPolicy { cap: Duration::from_millis(999), ..good }, RetryPolicyError::CapBelowBase),
            (RetryPolicy { multiplier: 0.5, ..good }, RetryPolicyError::Multiplier),
            (RetryPolicy { multiplier: f64::NAN, ..good }, RetryPolicyError::Multiplier),
            (RetryPolicy { multiplier: f64::INFINITY, ..good }, RetryPolicyError::Multiplier),
            (RetryPolicy { jitter: -0.1, ..good }, RetryPolicyError::Jitter),
            (RetryPolicy { jitter: f64::NAN, ..good }, RetryPolicyError::Jitter),
        ] {
            assert_eq!(bad.validate(), Err(error));
        }
    }
}
