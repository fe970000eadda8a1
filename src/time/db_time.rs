//! Pure: no I/O, no clock.
//! The time of the database's clock: microseconds since 1970, UTC.
//!
//! Guarantees:
//!
//! * Rules that compare times take this type, so a process's own clock cannot be used by mistake.
//! * Arithmetic saturates: a wrong clock leads to a wrong verdict, never to a panic.
//!
//! Not here: reading any clock (`store`).

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A moment in database time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DbTime {
    /// Microseconds since 1970, UTC.
    pub micros: i64,
}

impl DbTime {
    /// From milliseconds since 1970, UTC: the time inside a UUID v7.
    #[must_use]
    pub fn from_millis(millis: i64) -> Self {
        Self { micros: millis.saturating_mul(1_000) }
    }

    /// Whole milliseconds since 1970, UTC, rounded down.
    #[must_use]
    pub fn millis(self) -> i64 {
        self.micros.div_euclid(1_000)
    }

    /// This moment plus a duration.
    #[must_use]
    pub fn after(self, duration: Duration) -> Self {
        Self { micros: self.micros.saturating_add(micros_of(duration)) }
    }

    /// This moment minus a duration.
    #[must_use]
    pub fn before(self, duration: Duration) -> Self {
        Self { micros: self.micros.saturating_sub(micros_of(duration)) }
    }

    /// The time from this moment to `later`; zero if `later` is not later.
    #[must_use]
    pub fn until(self, later: Self) -> Duration {
        if later <= self { Duration::ZERO } else { Duration::from_micros(later.micros.abs_diff(self.micros)) }
    }
}

/// A duration in microseconds; the largest number where it is longer.
pub(crate) fn micros_of(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_while_that_does_not_fit_saturates() {
        let now = DbTime { micros: 5 };
        assert_eq!(now.after(Duration::MAX).micros, i64::MAX);
        assert_eq!(now.before(Duration::MAX).micros, 5 - i64::MAX);
        assert_eq!(DbTime::from_millis(i64::MAX).micros, i64::MAX);
        assert_eq!(DbTime { micros: i64::MIN }.until(DbTime { micros: i64::MAX }).as_micros(), u64::MAX.into());
    }

    #[test]
    fn milliseconds_round_down_on_both_sides_of_1970() {
        assert_eq!(DbTime { micros: 1_999 }.millis(), 1);
        assert_eq!(DbTime { micros: -1 }.millis(), -1);
    }

    #[test]
    fn nothing_is_left_until_a_moment_that_has_passed() {
        let (early, late) = (DbTime { micros: 10 }, DbTime { micros: 30 });
        assert_eq!(early.until(late), Duration::from_micros(20));
        assert_eq!(late.until(early), Duration::ZERO);
    }
}
