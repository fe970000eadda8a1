//! A machine that stands still, as busy ones do: how long, for bounds on time that must not fail
//! because of it.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long this process was given no time at a stretch, as a thread sees it that wants to run all
/// the time.
pub(crate) struct Standstill(Arc<AtomicBool>, JoinHandle<Duration>);

impl Standstill {
    /// Watches from now on.
    pub(crate) fn watch() -> Self {
        let ended = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&ended);
        let watching = std::thread::spawn(move || {
            let (pause, mut longest) = (Duration::from_millis(1), Duration::ZERO);
            while !seen.load(Ordering::SeqCst) {
                let began = Instant::now();
                std::thread::sleep(pause);
                longest = longest.max(began.elapsed().saturating_sub(pause));
            }
            longest
        });
        Self(ended, watching)
    }

    /// The longest stretch until now.
    pub(crate) fn longest(self) -> Duration {
        self.0.store(true, Ordering::SeqCst);
        self.1.join().unwrap()
    }
}
