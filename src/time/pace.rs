//! Waiting between attempts inside a process: bounded, with jitter, and ended at once by a stop.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::time::retry::pause;

/// A backoff that doubles after each failure and starts over after a success.
#[derive(Debug, Clone)]
pub struct Pace {
    first: Duration,
    longest: Duration,
    failures: u32,
}

impl Pace {
    /// A backoff from `first`, doubling up to `longest`.
    #[must_use]
    pub fn new(first: Duration, longest: Duration) -> Self {
        Self { first, longest, failures: 0 }
    }

    /// Records a success: the next wait is the first one again.
    pub fn worked(&mut self) {
        self.failures = 0;
    }

    /// Returns the next wait, with jitter between half and all of it.
    pub(crate) fn next_wait(&mut self) -> Duration {
        self.failures = self.failures.saturating_add(1);
        pause(self.first, self.longest, self.failures, fastrand::f64())
    }

    /// Waits for the next wait. Returns false if the stop came first.
    pub async fn wait(&mut self, stop: &CancellationToken) -> bool {
        sleep_unless(stop, self.next_wait()).await
    }
}

/// The longest pause of [`rest_after`]. What was slow once may be fast again, and a part of the
/// health must beat well within the 120 s after which its process counts as stuck.
const REST_MAX: Duration = Duration::from_secs(60);

/// The pause after one run of work that is done again and again and `took` so long: fifty times as
/// long, so that it takes a fiftieth of the time. After a failure only as long as the run, because
/// the server may have been away. At most a minute, but never less than `least`.
pub(crate) fn rest_after<T, E>(end: &Result<T, E>, took: Duration, least: Duration) -> Duration {
    let times = if end.is_ok() { 50 } else { 1 };
    least.max((times * took).min(REST_MAX))
}

/// Does one page of the work after the other, until one has fewer rows than a full one, or until
/// `goes_on` says no. Returns how many rows the pages had. `goes_on` makes the pause between two
/// pages, in which others have their turn.
pub(crate) async fn in_pages<P, G, E>(full: u64, page: impl Fn() -> P, goes_on: impl Fn() -> G) -> Result<u64, E>
where
    P: Future<Output = Result<u64, E>>,
    G: Future<Output = bool>,
{
    let mut all = 0;
    loop {
        let rows = page().await?;
        all += rows;
        if rows < full || !goes_on().await {
            return Ok(all);
        }
    }
}

/// Sleeps for this time. Returns false if the stop came first.
pub async fn sleep_unless(stop: &CancellationToken, time: Duration) -> bool {
    stop.run_until_cancelled(tokio::time::sleep(time)).await.is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pace_slows_to_its_bound_and_starts_over() {
        let mut pace = Pace::new(Duration::from_millis(100), Duration::from_secs(2));
        assert!(pace.next_wait() <= Duration::from_millis(100));
        for _ in 0..40 {
            let wait = pace.next_wait();
            assert!(wait <= Duration::from_secs(2) && wait >= Duration::from_millis(50), "{wait:?}");
        }
        assert_eq!(pace.failures, 41);
        pace.worked();
        assert!(pace.next_wait() <= Duration::from_millis(100));
    }

    // Shown by: a rest without a bound, and one that takes a failure for slow work. Either lasted
    // 25 minutes.
    #[test]
    fn a_rest_is_short_after_a_failure_and_bounded_after_slow_work() {
        let (worked, failed) = (Ok::<(), ()>(()), Err::<(), ()>(()));
        let (took, least) = (Duration::from_secs(30), Duration::from_secs(2));
        assert_eq!(rest_after(&worked, took / 1_000, least), least);
        assert_eq!(rest_after(&worked, took / 100, least), took / 2, "a fiftieth of the time");
        assert_eq!(rest_after(&worked, took, least), REST_MAX);
        assert_eq!(rest_after(&failed, took, least), took, "30 s, and not 25 minutes");
        assert_eq!(rest_after(&failed, took / 100, least), least);
        assert_eq!(rest_after(&failed, 10 * took, least), Duration::from_secs(60), "at most, after a failure too");
    }
}
