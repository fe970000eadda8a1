//! Progress of long commands, on stderr: of benchmarks only on a terminal.

use std::ops::Range;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use oncebox::app::say;

/// The least time between two lines about an act, and the time between two redraws of a bar.
const BETWEEN_LINES: Duration = Duration::from_millis(500);
/// The most names of what was acted on that a person is shown.
const SHOWN_MAX: usize = 100;

/// The progress of an act on more than one batch, a line at most twice a second and at the end.
#[derive(Debug)]
pub(super) struct Batches {
    what: &'static str,
    done: usize,
    of: usize,
    batch: usize,
    said: Option<Instant>,
}

impl Batches {
    pub(super) fn new(what: &'static str, of: usize, batch: usize) -> Self {
        Self { what, done: 0, of, batch, said: None }
    }

    /// So many more are done.
    pub(super) fn next(&mut self, more: usize) {
        self.done += more;
        let is_time = self.done >= self.of || self.said.is_none_or(|said| said.elapsed() >= BETWEEN_LINES);
        if self.of > self.batch && is_time {
            say("INFO", &format!("{} {} of {}", self.what, self.done, self.of));
            self.said = Some(Instant::now());
        }
    }
}

/// What was acted on, for a person: the first hundred, and how many more.
pub(super) fn shown(names: &[String]) -> String {
    let mut shown: String = names.iter().take(SHOWN_MAX).map(|name| format!(" {name}")).collect();
    if names.len() > SHOWN_MAX {
        shown += &format!(" and {} more", names.len() - SHOWN_MAX);
    }
    shown
}

/// The rounds of a benchmark, counted from 0, with their progress.
#[derive(Debug)]
pub(super) struct Rounds {
    bar: ProgressBar,
    left: Range<u32>,
}

impl Rounds {
    pub(super) fn start(what: &'static str, rounds: u32) -> Self {
        let bar = ProgressBar::new(u64::from(rounds));
        if let Ok(style) = ProgressStyle::with_template("{msg}: round {pos} of {len} done, {elapsed}") {
            bar.set_style(style);
        }
        bar.set_message(what);
        bar.enable_steady_tick(BETWEEN_LINES);
        Self { bar, left: 0..rounds }
    }
}

impl Iterator for Rounds {
    type Item = u32;

    fn next(&mut self) -> Option<u32> {
        // Where a round begins, those before it are done.
        self.bar.set_position(u64::from(self.left.start));
        self.left.next()
    }
}

impl Drop for Rounds {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
