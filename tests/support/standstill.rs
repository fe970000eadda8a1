//! A machine that stands still or is too busy, as shared ones are: for bounds on time that must not
//! fail because of it.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What the machine took from this process: the longest stretch in which a thread that wants to run
/// got no time, and how long some task of the machine waited for a core or for the disk.
pub(crate) struct Standstill {
    ended: Arc<AtomicBool>,
    watching: Option<JoinHandle<Duration>>,
    pressure: Duration,
}

impl Standstill {
    /// Watches from now on.
    pub(crate) fn watch() -> Self {
        let ended = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&ended);
        let watching = Some(std::thread::spawn(move || {
            let (pause, mut longest) = (Duration::from_millis(1), Duration::ZERO);
            while !seen.load(Ordering::SeqCst) {
                let began = Instant::now();
                std::thread::sleep(pause);
                longest = longest.max(began.elapsed().saturating_sub(pause));
            }
            longest
        }));
        Self { ended, watching, pressure: pressure() }
    }

    /// The bound and what the machine took until now; of the waiting of others at most four times
    /// the bound. On a busy machine that is all of it: a test sees only what takes more than five
    /// times its bound.
    pub(crate) fn allows(self, bound: Duration) -> Duration {
        let (longest, pressure) = self.took();
        bound + longest.max(pressure.min(4 * bound))
    }

    /// The same where it is known how long the failure takes: never more than halfway from the
    /// bound to that, however busy the machine is.
    #[allow(dead_code, reason = "each test binary uses its part")]
    pub(crate) fn allows_below(self, bound: Duration, failure: Duration) -> Duration {
        let (longest, pressure) = self.took();
        bound + longest.max(pressure).min(failure.saturating_sub(bound) / 2)
    }

    /// The longest stretch, and what others waited for.
    fn took(mut self) -> (Duration, Duration) {
        self.ended.store(true, Ordering::SeqCst);
        let longest = self.watching.take().map_or(Duration::ZERO, |watching| watching.join().unwrap());
        (longest, pressure().saturating_sub(self.pressure))
    }
}

impl Drop for Standstill {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::SeqCst);
    }
}

/// How long some task has waited for a core or for the disk since the start of the machine. Zero
/// where the kernel does not count it.
fn pressure() -> Duration {
    let of = |resource: &str| {
        let text = std::fs::read_to_string(format!("/proc/pressure/{resource}")).unwrap_or_default();
        let total = text.lines().next().and_then(|some| some.rsplit_once("total=")?.1.trim().parse().ok());
        Duration::from_micros(total.unwrap_or(0))
    };
    of("cpu") + of("io")
}
