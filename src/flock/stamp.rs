//! The content of the lock file: which process has the turn, and for how long turns were held since
//! the file rested or was idle (R14).
//!
//! Guarantees: a file with any other content counts as a file without a turn so far.
//!
//! Not here: the rest itself (`flock`).

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::time::Duration;

/// How often a busy file rests.
const REST_EVERY: Duration = Duration::from_secs(1);
/// If the turn was held for at most one part in so many of the time, there is no rest.
const IDLE_ENOUGH: u32 = 4;

/// The content of the lock file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Stamp {
    /// The process that holds the turn, or held it last.
    pub(super) process: u32,
    /// When the file last rested, or was idle enough not to rest, in milliseconds since 1970.
    rested_at: u64,
    /// How long the turn was held since then, in microseconds.
    busy: u64,
}

impl Stamp {
    /// Counts a turn that ends now. Returns true where the file must rest.
    pub(super) fn give_back(&mut self, now: u64, held: Duration) -> bool {
        self.process = std::process::id();
        self.busy = self.busy.saturating_add(u64::try_from(held.as_micros()).unwrap_or(u64::MAX));
        let age = match now.checked_sub(self.rested_at) {
            Some(age) if self.rested_at > 0 => Duration::from_millis(age),
            // The first turn ever, or the clock was set back: begin to count at this time.
            _ => {
                *self = Self { rested_at: now, busy: 0, ..*self };
                return false;
            }
        };
        if age < REST_EVERY {
            return false;
        }
        let rest = Duration::from_micros(self.busy) > age / IDLE_ENOUGH;
        *self = Self { rested_at: now, busy: 0, ..*self };
        rest
    }

    pub(super) fn parse(text: &[u8]) -> Self {
        let text = String::from_utf8_lossy(text);
        let mut numbers = text.split_ascii_whitespace().map(str::parse::<u64>);
        let mut next = || numbers.next().and_then(Result::ok);
        // Any text that `write` does not produce counts as a file without a turn yet.
        match (next(), next(), next()) {
            (Some(process), Some(rested_at), Some(busy)) => {
                Self { process: u32::try_from(process).unwrap_or_default(), rested_at, busy }
            }
            _ => Self::default(),
        }
    }

    pub(super) fn read(file: &mut File) -> Self {
        let mut text = [0; 64];
        let read = file.rewind().and_then(|()| file.read(&mut text));
        read.map(|length| Self::parse(&text[..length])).unwrap_or_default()
    }

    /// Writes the stamp in a fixed width, so that it replaces any earlier one completely.
    pub(super) fn write(self, file: &mut File) {
        let text = format!("{:>10} {:>20} {:>20}\n", self.process, self.rested_at, self.busy);
        if let Err(error) = file.rewind().and_then(|()| file.write_all(text.as_bytes())) {
            tracing::warn!(%error, "the stamp of a turn could not be written");
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::fs::OpenOptions;

    use super::*;

    #[test]
    fn r14_a_busy_file_rests_once_a_second_and_an_idle_one_does_not() {
        let second = Duration::from_secs(1);
        let mut stamp = Stamp::default();
        assert!(!stamp.give_back(10_000, second), "the first turn starts the count");
        assert!(!stamp.give_back(10_400, second / 4), "the stamp is not a second old");
        assert!(stamp.give_back(11_000, second / 2), "busy for most of a second");
        assert!(!stamp.give_back(11_500, second / 2), "it has just rested");
        // Held for a hundredth of the time: programs without turns could get in.
        let mut stamp = Stamp { rested_at: 10_000, ..Stamp::default() };
        assert!(!stamp.give_back(20_000, second / 10));
        assert_eq!(stamp.rested_at, 20_000);
        // A clock that was set back begins the count again.
        assert!(!stamp.give_back(15_000, second));
        assert_eq!(stamp.rested_at, 15_000);
    }

    #[test]
    fn a_stamp_reads_back_as_it_was_written_and_anything_else_counts_as_none() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file.lock");
        let mut file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
        assert_eq!(Stamp::read(&mut file), Stamp::default());
        let stamp = Stamp { process: u32::MAX, rested_at: u64::MAX, busy: u64::MAX };
        stamp.write(&mut file);
        assert_eq!(Stamp::read(&mut file), stamp);
        let shorter = Stamp { process: 7, rested_at: 8, busy: 9 };
        shorter.write(&mut file);
        assert_eq!(Stamp::read(&mut file), shorter);
        for garbage in ["", "x", "1 2", "-1 2 3", "\u{0}"] {
            assert_eq!(Stamp::parse(garbage.as_bytes()), Stamp::default(), "{garbage}");
        }
    }
}
