//! When an outside place is left alone for a while: a breaker that opens after failures in a row.
//!
//! Guarantees: while it is open nothing is let through; when its time is over exactly one trial is,
//! until that one ended; a success closes it. It keeps no clock: time is given, counted from any
//! fixed point.
//!
//! Not here: what counts as a failure, and what to do meanwhile (`client`, `runtime`).

use std::time::Duration;

/// When it opens, and for how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BreakerOptions {
    /// Failures in a row that open it. Default 5.
    pub failures: u32,
    /// How long it stays open before a trial. Default 10 s.
    pub open: Duration,
}

impl Default for BreakerOptions {
    fn default() -> Self {
        Self { failures: 5, open: Duration::from_secs(10) }
    }
}

/// A breaker of one place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Breaker {
    options: BreakerOptions,
    failed: u32,
    /// When the next trial may be.
    shut_until: Option<Duration>,
}

impl Breaker {
    /// A closed breaker, which lets every attempt through.
    #[must_use]
    pub fn new(options: BreakerOptions) -> Self {
        Self { options, failed: 0, shut_until: None }
    }

    /// Lets an attempt through, or says how long to wait. What is let through is to be told of by
    /// [`Breaker::ended`]; one that never is counts as failed when the open time has passed again.
    ///
    /// # Errors
    /// How long nothing is let through.
    pub fn admit(&mut self, now: Duration) -> Result<(), Duration> {
        match self.shut_until {
            Some(until) if now < until => Err(until - now),
            Some(_) => {
                // This one is the trial; others wait for what comes of it.
                self.shut_until = Some(now.saturating_add(self.options.open));
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Whether nothing is let through now.
    #[must_use]
    pub fn is_open(&self, now: Duration) -> bool {
        self.shut_until.is_some_and(|until| now < until)
    }

    /// How an attempt ended.
    pub fn ended(&mut self, well: bool, now: Duration) {
        if well {
            (self.failed, self.shut_until) = (0, None);
            return;
        }
        self.failed = self.failed.saturating_add(1);
        if self.failed >= self.options.failures.max(1) {
            self.shut_until = Some(now.saturating_add(self.options.open));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    // Shown by: opening one failure later; letting two trials through; not closing on success.
    #[test]
    fn it_opens_after_failures_in_a_row_and_lets_one_trial_through() {
        let mut breaker = Breaker::new(BreakerOptions { failures: 3, open: SECOND * 10 });
        for _ in 0..2 {
            assert_eq!(breaker.admit(SECOND), Ok(()));
            breaker.ended(false, SECOND);
        }
        breaker.ended(true, SECOND);
        for _ in 0..3 {
            assert_eq!(breaker.admit(SECOND), Ok(()), "a success begins the count anew");
            breaker.ended(false, SECOND);
        }
        assert_eq!(breaker.admit(SECOND * 4), Err(SECOND * 7));
        assert_eq!(breaker.admit(SECOND * 11), Ok(()));
        assert_eq!(breaker.admit(SECOND * 11), Err(SECOND * 10), "one trial at a time");
        breaker.ended(false, SECOND * 12);
        assert_eq!(breaker.admit(SECOND * 13), Err(SECOND * 9));
        assert_eq!(breaker.admit(SECOND * 22), Ok(()));
        breaker.ended(true, SECOND * 22);
        assert_eq!(breaker.admit(SECOND * 22), Ok(()));
        assert_eq!(breaker.admit(SECOND * 22), Ok(()));
    }
}
