//! Pure: no I/O, no clock.
//! A circuit breaker: it opens after failures in a row and stops calls to one service for a while.
//!
//! Guarantees: while the breaker is open it admits no attempt. When the open time is over it admits
//! one trial, and no other attempt until that trial ended or the open time has passed again. A
//! success closes it. It reads no clock: the caller passes the time since any fixed point.
//!
//! Not here: what counts as a failure, and what a caller does while it is open (`client`, and the
//! webhooks of `operation`).

use std::time::Duration;

/// When the breaker opens, and for how long.
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

/// The circuit breaker of one service.
#[cfg(feature = "client")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Breaker {
    options: BreakerOptions,
    failed: u32,
    /// When the next trial may begin; `None` while the breaker is closed.
    shut_until: Option<Duration>,
}

#[cfg(feature = "client")]
impl Breaker {
    /// A closed breaker, which lets every attempt through.
    pub(crate) fn new(options: BreakerOptions) -> Self {
        Self { options, failed: 0, shut_until: None }
    }

    /// Admits an attempt or refuses it. After an admitted attempt call [`Breaker::ended`]. A trial
    /// for which that call never comes counts as failed when the open time has passed again. The
    /// error is the time after which an attempt may be admitted.
    pub(crate) fn admit(&mut self, now: Duration) -> Result<(), Duration> {
        match self.shut_until {
            Some(until) if now < until => Err(until - now),
            Some(_) => {
                // This attempt is the trial. Others are refused until it ended.
                self.shut_until = Some(now.saturating_add(self.options.open));
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Whether attempts are refused now.
    pub(crate) fn is_open(&self, now: Duration) -> bool {
        self.shut_until.is_some_and(|until| now < until)
    }

    /// Records how an attempt ended: `well` is true for a success.
    pub(crate) fn ended(&mut self, well: bool, now: Duration) {
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

#[cfg(all(test, feature = "client"))]
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
