//! The lock `next`: who has it is the next to have a turn.
//!
//! The lock of the turn alone is unfair: the kernel wakes who waits, and whoever gave the turn back
//! has taken it again before that one runs (of three processes one had 2,427 turns in three
//! seconds, another 2). So whoever wants a turn first takes `next`, and gives it back once it has
//! the turn. Who comes from a turn finds `next` with the one that waits for its own, and stands
//! behind it. It is a file because `std` locks whole files only.
//!
//! Guarantees: it decides who comes first, never who may: beside a process that knows only the
//! turn, or after somebody deleted the file, turns are uneven and no more. Who has it and is frozen
//! keeps others for a second, and then makes them step aside for five milliseconds before each
//! turn.
//!
//! Not here: the turn (`flock`). Nobody waits for `next` who has a turn.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// For how long a take stands behind one that has `next` before it waits for the turn itself: that
/// one may be frozen.
pub(super) const BEHIND_MAX: Duration = Duration::from_secs(1);
/// How long a process whose `next` is away leaves the turn to others before it asks for it.
pub(super) const STEP_ASIDE: Duration = Duration::from_millis(5);

/// The way to `next` of one process.
#[derive(Debug)]
pub(super) struct Queue {
    /// Shared only with a thread that waits for the lock, and with the [`Next`] that this one gets.
    file: Arc<File>,
}

/// The right to the next turn. Given back when dropped, wherever that happens.
#[derive(Debug)]
pub(super) struct Next(Arc<File>);

/// What a take has of `next` while it waits for its turn, and drops when that has come: `next`
/// itself, or where it will arrive, so that somebody has it also while turns are long and takes
/// outlast [`BEHIND_MAX`].
pub(super) type Place = (Option<Next>, Option<mpsc::Receiver<Next>>);

impl Drop for Next {
    fn drop(&mut self) {
        unlock(&self.0);
    }
}

impl Queue {
    /// Opens the file of `next` beside that of the turn.
    pub(super) fn open(turn: &Path) -> io::Result<Self> {
        Ok(Self { file: Arc::new(open(&beside(turn))?) })
    }

    /// Whether a thread of ours still waits for `next`: a take has outlasted [`BEHIND_MAX`], or was
    /// given up.
    pub(super) fn is_next_away(&self) -> bool {
        Arc::strong_count(&self.file) > 1
    }

    /// Takes `next`, unless somebody has it. Not called while it is away.
    pub(super) fn try_take(&self) -> Option<Next> {
        self.file.try_lock().is_ok().then(|| Next(Arc::clone(&self.file)))
    }

    /// Waits for `next`, unless it is `here` or away, for at most [`BEHIND_MAX`]. Blocks the
    /// thread.
    pub(super) fn stand(&self, here: Option<Next>) -> Place {
        if here.is_some() || self.is_next_away() {
            return (here, None);
        }
        // Who took a free turn had it for microseconds only.
        if let Some(next) = self.try_take() {
            return (Some(next), None);
        }
        let (sender, coming) = mpsc::channel();
        let file = Arc::clone(&self.file);
        // A lock cannot be waited for with a limit, a thread can. Where none is to be had, or it
        // meets an error, this take goes without.
        let _ = std::thread::Builder::new().name("oncebox-next".to_owned()).spawn(move || {
            if lock(&file).is_ok() {
                // Where nobody wants it any more it is dropped, and given back.
                let _ = sender.send(Next(file));
            }
        });
        (coming.recv_timeout(BEHIND_MAX).ok(), Some(coming))
    }
}

/// Opens a file to lock, and makes it where it is missing.
pub(super) fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)
}

/// Waits for a lock, whatever signals come.
pub(super) fn lock(file: &File) -> io::Result<()> {
    loop {
        match file.lock() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

/// An error here leaves the lock to the kernel, which frees it with the last handle.
pub(super) fn unlock(file: &File) {
    if let Err(error) = file.unlock() {
        tracing::error!(%error, "a lock of turns could not be given back");
    }
}

/// The file of `next`.
pub(super) fn beside(turn: &Path) -> PathBuf {
    let mut name = turn.as_os_str().to_owned();
    name.push("-next");
    PathBuf::from(name)
}
