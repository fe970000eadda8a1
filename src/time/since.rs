//! How long ago a moment was, for times that another machine measures as well.

use std::time::{Duration, Instant, SystemTime};

/// A moment to measure from. It is for times that another machine measures as well, such as a lease
/// or a provider's memory of a key: a time that is too short would be acted on after its end there.
///
/// The monotonic clock stops while a machine is suspended, and the wall clock may be set back. The
/// longer time of the two is never too short, unless both happen.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Since {
    monotonic: Instant,
    wall: SystemTime,
}

impl Since {
    pub(crate) fn now() -> Self {
        Self { monotonic: Instant::now(), wall: SystemTime::now() }
    }

    /// How much time has passed, at most.
    pub(crate) fn elapsed(self) -> Duration {
        self.monotonic.elapsed().max(self.wall.elapsed().unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // A machine that was suspended, and one whose clock was set back. Shown by: the monotonic clock
    // alone, and the wall clock alone.
    #[test]
    fn the_time_since_a_moment_is_that_of_the_clock_that_went_further() {
        let (now, wall, hour) = (Instant::now(), SystemTime::now(), Duration::from_secs(3_600));
        assert!(Since { monotonic: now, wall: wall - hour }.elapsed() >= hour);
        let earlier = now.checked_sub(Duration::from_secs(1)).unwrap_or(now);
        assert!(Since { monotonic: earlier, wall: wall + hour }.elapsed() >= now.duration_since(earlier));
    }
}
