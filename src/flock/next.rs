//! The lock `next`: the process that holds it gets the next turn.
//!
//! The lock of the turn alone is unfair: the kernel wakes a waiting process, but the process that
//! has just released the turn takes it again before the other one runs (of three processes one had
//! 2,427 turns in three seconds, another 2). So a process that wants a turn takes `next` first, and
//! releases it once it has the turn. A process that comes from a turn finds `next` taken by the one
//! that waits, and queues behind it. It is a file because `std` locks only whole files.
//!
//! Guarantees: `next` decides only the order of turns, never the right to one. Beside a process
//! that takes turns without it, or after the file was deleted, turns are unfair, and nothing worse
//! happens. A process that is frozen while it holds `next` delays the others for a second; after
//! that they wait five milliseconds before each turn.
//!
//! Not here: the turn itself (`flock`). A process that has the turn never waits for `next`.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// How long a take waits for `next` before it waits for the turn itself: the process that holds
/// `next` may be frozen.
pub(super) const BEHIND_MAX: Duration = Duration::from_secs(1);
/// While [`Queue::is_next_away`], a take lets other processes go first for so long.
pub(super) const STEP_ASIDE: Duration = Duration::from_millis(5);

/// The access of one [`Turn`](super::Turn) and its clones to `next`.
#[derive(Debug)]
pub(super) struct Queue {
    /// Shared only with a thread that waits for the lock, and with a [`Next`].
    file: Arc<File>,
}

/// The right to the next turn. Dropping it releases `next`, on any thread.
#[derive(Debug)]
pub(super) struct Next(Arc<File>);

/// What a take holds of `next` until its turn has come: `next` itself, or the receiver that it will
/// arrive in. The receiver keeps the place in the queue also where turns are so long that a take
/// waits longer than [`BEHIND_MAX`].
pub(super) type Place = (Option<Next>, Option<mpsc::Receiver<Next>>);

impl Drop for Next {
    fn drop(&mut self) {
        unlock(&self.0);
    }
}

impl Queue {
    /// Opens the file of `next`, beside the file of the turn.
    pub(super) fn open(turn: &Path) -> io::Result<Self> {
        Ok(Self { file: Arc::new(open(&beside(turn))?) })
    }

    /// Whether a thread of an earlier take still waits for `next` or holds it: that take waited
    /// longer than [`BEHIND_MAX`], or was dropped.
    pub(super) fn is_next_away(&self) -> bool {
        Arc::strong_count(&self.file) > 1
    }

    /// Takes `next` if it is free. Not called while `is_next_away`.
    pub(super) fn try_take(&self) -> Option<Next> {
        self.file.try_lock().is_ok().then(|| Next(Arc::clone(&self.file)))
    }

    /// Waits for `next` for at most [`BEHIND_MAX`], unless the take has it already (`here`) or
    /// [`Self::is_next_away`]. Blocks the thread.
    pub(super) fn stand(&self, here: Option<Next>) -> Place {
        if here.is_some() || self.is_next_away() {
            return (here, None);
        }
        // The holder may have had it for microseconds only, to take a free turn.
        if let Some(next) = self.try_take() {
            return (Some(next), None);
        }
        let (sender, coming) = mpsc::channel();
        let file = Arc::clone(&self.file);
        // Waiting for a lock has no time limit, waiting for a thread has. If the thread cannot be
        // started or gets an error, this take goes on without `next`.
        let _ = std::thread::Builder::new().name("oncebox-next".to_owned()).spawn(move || {
            if lock(&file).is_ok() {
                // If the take has ended, sending fails: `next` is dropped and so released.
                let _ = sender.send(Next(file));
            }
        });
        (coming.recv_timeout(BEHIND_MAX).ok(), Some(coming))
    }
}

/// Opens a file that is used as a lock. Creates it where it is missing.
pub(super) fn open(path: &Path) -> io::Result<File> {
    let opened = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
    opened.map_err(|error| {
        let why = format!("the lock file `{}` cannot be opened: {error}", path.display());
        io::Error::new(error.kind(), why)
    })
}

/// Waits for a lock, and goes on waiting after a signal.
pub(super) fn lock(file: &File) -> io::Result<()> {
    loop {
        match file.lock() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

/// Releases a lock. After an error the kernel releases it with the last handle.
pub(super) fn unlock(file: &File) {
    if let Err(error) = file.unlock() {
        tracing::error!(%error, "a lock of turns could not be given back");
    }
}

/// The path of the file of `next`.
pub(super) fn beside(turn: &Path) -> PathBuf {
    let mut name = turn.as_os_str().to_owned();
    name.push("-next");
    PathBuf::from(name)
}
