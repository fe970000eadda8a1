//! Decides what may run at the same time in the consumers that one process runs: everything, except
//! that a suspect message runs alone (R26). A process dies as a whole, so a message of one consumer
//! must not be counted for what kills it in another one.
//!
//! Promise: suspects that wait for their turns keep others from starting for at most a fifth of the
//! time in all, so a handler that hangs stops only its own lane. One suspect at a time stands in
//! line. It gets its turn once it has stood there as long as the slowest transaction takes, and the
//! next one begins with the time that this took.

use std::pin::pin;
use std::time::Duration;

use tokio::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
use tokio::time::Instant;

/// How long a suspect stands in line at least. The time doubles with each attempt.
const IN_LINE: Duration = Duration::from_millis(100);
/// How long nobody stands in line then, as a multiple of the time in line. A suspect that got its
/// turn sooner than [`IN_LINE`] has held up nobody, and the next one follows at once.
const OUT_OF_LINE: u32 = 4;
/// The longest time in line, even if a transaction may run for longer.
const IN_LINE_MAX: Duration = Duration::from_secs(300);

/// How long a suspect runs alone: what kills a process mostly does so at once. After that others
/// start beside it, because a handler that hangs would stop them for its whole timeout.
const ALONE_MAX: Duration = Duration::from_secs(1);

/// Who runs in a process, and the suspect that stands in line.
#[derive(Debug, Default)]
pub(crate) struct Solo {
    /// All that runs together holds it for reading, a suspect holds it for writing.
    running: RwLock<()>,
    /// The suspect that stands in line, or runs, holds it.
    line: Mutex<Line>,
}

#[derive(Debug, Default)]
struct Line {
    /// How long the next suspect stands in line at first.
    time: Duration,
    /// Until then nobody stands in line.
    rests_until: Option<Instant>,
}

impl Solo {
    /// Runs together with others until the guard is dropped. Waits for a suspect that runs alone or
    /// is next in line.
    ///
    /// Cancel safe.
    pub(super) async fn together(&self) -> RwLockReadGuard<'_, ()> {
        self.running.read().await
    }

    /// Returns the turn of a suspect; waits until nothing else runs.
    ///
    /// Cancel safe.
    pub(super) async fn alone(&self) -> Alone<'_> {
        let mut line = self.line.lock().await;
        loop {
            if let Some(until) = line.rests_until {
                tokio::time::sleep_until(until).await;
            }
            let (began, time) = (Instant::now(), line.time.clamp(IN_LINE, IN_LINE_MAX));
            // While it stands in line, nothing else can start; dropping the request lets others
            // pass.
            let turn = tokio::time::timeout(time, self.running.write()).await;
            let stood = began.elapsed();
            line.time = stood * 2;
            line.rests_until = (stood >= IN_LINE).then(|| Instant::now() + stood * OUT_OF_LINE);
            if let Ok(running) = turn {
                return Alone { running, _line: line };
            }
        }
    }
}

/// Nothing else of the process runs while this exists.
pub(super) struct Alone<'a> {
    running: RwLockWriteGuard<'a, ()>,
    _line: MutexGuard<'a, Line>,
}

impl Alone<'_> {
    /// Runs the work alone for its first second, and then beside others, but never beside another
    /// suspect.
    pub(super) async fn run<T>(self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        if let Ok(done) = tokio::time::timeout(ALONE_MAX, &mut work).await {
            return done;
        }
        let Self { running, _line } = self;
        let _together = RwLockWriteGuard::downgrade(running);
        work.await
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    /// Shown to fail: with `running.write().await` alone nothing begins until the hanging one ends;
    /// where each of them stood in line by itself, the others began half as often.
    #[tokio::test(start_paused = true)]
    async fn those_that_wait_to_run_alone_behind_one_that_hangs_hold_up_the_others_a_fifth_of_the_time() {
        let solo = Arc::new(Solo::default());
        let hangs = solo.together().await;
        let begun = Arc::new(AtomicU32::new(0));
        let others = tokio::spawn({
            let (solo, begun) = (Arc::clone(&solo), Arc::clone(&begun));
            async move {
                loop {
                    let _together = solo.together().await;
                    begun.fetch_add(1, Ordering::Relaxed);
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            }
        });
        let suspects = [0, 3, 6].map(|after| {
            let solo = Arc::clone(&solo);
            tokio::spawn(async move {
                tokio::time::sleep(Duration::from_secs(after)).await;
                let _alone = solo.alone().await;
            })
        });
        tokio::time::sleep(Duration::from_secs(30)).await;
        let share = f64::from(begun.load(Ordering::Relaxed)) / 3_000.0;
        assert!((0.7..0.95).contains(&share), "{share}");
        assert!(suspects.iter().all(|suspect| !suspect.is_finished()), "one ran beside the one that hangs");
        drop(hangs);
        for suspect in suspects {
            tokio::time::timeout(Duration::from_secs(60), suspect).await.expect("its turn came").expect("no panic");
        }
        others.abort();
    }

    /// Shown to fail: without the downgrade nothing begins until it ends.
    #[tokio::test(start_paused = true)]
    async fn one_that_hangs_while_it_runs_alone_is_joined_by_the_others_and_by_no_other_suspect() {
        let solo = Arc::new(Solo::default());
        let hangs = tokio::spawn({
            let solo = Arc::clone(&solo);
            async move { solo.alone().await.run(tokio::time::sleep(Duration::from_secs(30))).await }
        });
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert!(tokio::time::timeout(Duration::from_millis(100), solo.together()).await.is_err(), "it runs alone");
        let _together =
            tokio::time::timeout(Duration::from_secs(1), solo.together()).await.expect("the others go on beside it");
        assert!(tokio::time::timeout(Duration::from_secs(10), solo.alone()).await.is_err(), "one after the other");
        hangs.abort();
    }

    /// Each of the others is slow, and one of them runs at any time. Shown by: a time in line that
    /// began with 100 ms for each; the second turn took as long as the first.
    #[tokio::test(start_paused = true)]
    async fn what_waits_to_run_alone_gets_its_turn_among_slow_ones_and_the_next_one_sooner() {
        let solo = Arc::new(Solo::default());
        let slow: Vec<_> = (0..4_u64)
            .map(|at| {
                let solo = Arc::clone(&solo);
                tokio::spawn(async move {
                    tokio::time::sleep(Duration::from_secs(at)).await;
                    loop {
                        let _together = solo.together().await;
                        tokio::time::sleep(Duration::from_millis(5_000 - 300 * at)).await;
                    }
                })
            })
            .collect();
        tokio::time::sleep(Duration::from_secs(10)).await;
        drop(tokio::time::timeout(Duration::from_secs(120), solo.alone()).await.expect("its turn came"));
        // The first one stood in line for less than 5 s; then nobody does, for four times as long.
        drop(tokio::time::timeout(Duration::from_secs(30), solo.alone()).await.expect("the next one's turn came"));
        slow.iter().for_each(tokio::task::JoinHandle::abort);
    }
}
