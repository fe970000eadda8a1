//! Progress of long commands, on stderr and only on a terminal.

use indicatif::{ProgressBar, ProgressStyle};

/// The progress of a benchmark, in rounds.
#[derive(Debug)]
pub(super) struct Rounds(ProgressBar);

impl Rounds {
    pub(super) fn start(what: &'static str, rounds: u32) -> Self {
        let bar = ProgressBar::new(u64::from(rounds));
        if let Ok(style) = ProgressStyle::with_template("{msg}: round {pos} of {len} done, {elapsed}") {
            bar.set_style(style);
        }
        bar.set_message(what);
        bar.enable_steady_tick(std::time::Duration::from_millis(500));
        Self(bar)
    }

    pub(super) fn next(&self) {
        self.0.inc(1);
    }
}

impl Drop for Rounds {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
