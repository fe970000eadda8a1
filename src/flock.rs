//! Turns at a file between processes: a lock file beside a SQLite database (R14).
//!
//! SQLite's own busy handler is unfair: beside two consumers a writer and a relay got one transaction each in twelve seconds.
//! So every process of oncebox takes a turn around each write transaction. Programs that know nothing of turns get in because
//! a busy file rests: when the stamp in the lock file is a second old, the holder keeps the turn for 120 ms after its
//! transaction. A file that stood idle for most of that second has let them in already and needs no rest.
//!
//! Guarantees: one turn at a time, over all processes and within one; a process that dies gives its turn back (the kernel
//! does); waiting never blocks an executor thread, and ends with an error that names the process that holds the turn.
//!
//! Not here: what is done in a turn. A process that is frozen inside its turn holds it (R28): only its end frees it.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tokio::sync::{Mutex, OwnedMutexGuard, oneshot};

/// How often a busy file rests.
const REST_EVERY: Duration = Duration::from_secs(1);
/// How long it rests, with the turn held.
const REST: Duration = Duration::from_millis(120);
/// A file that was held for less than one part in so many needs no rest.
const IDLE_ENOUGH: u32 = 4;

/// The turns at one file. Clones share the queue within the process.
#[derive(Debug, Clone)]
pub(crate) struct Turn {
    path: PathBuf,
    file: Arc<Mutex<File>>,
}

/// A turn. Given back when dropped, after the rest where one is due.
#[derive(Debug)]
pub(crate) struct Held {
    file: Option<OwnedMutexGuard<File>>,
    since: Instant,
}

/// What stands in the lock file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Stamp {
    /// Who holds the turn, or held it last.
    process: u32,
    /// When the file last rested, in milliseconds since 1970.
    rested_at: u64,
    /// For how long it was held since, in microseconds.
    busy: u64,
}

impl Turn {
    /// Opens the lock file, and makes it where it is missing.
    pub(crate) fn open(path: impl Into<PathBuf>) -> io::Result<Self> {
        let path = path.into();
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path)?;
        Ok(Self { path, file: Arc::new(Mutex::new(file)) })
    }

    /// Waits for a turn, at most as long as `patience`.
    ///
    /// # Errors
    /// `TimedOut`, naming the process that holds the turn, and whatever the lock file says.
    ///
    /// # Cancel safety
    /// Safe: a turn that comes after nobody waits for it is given back at once.
    pub(crate) async fn take(&self, patience: Duration) -> io::Result<Held> {
        let taken = tokio::time::timeout(patience, async {
            let file = Arc::clone(&self.file).lock_owned().await;
            match file.try_lock() {
                Ok(()) => return Ok(Held::new(file)),
                Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(error)) => return Err(error),
            }
            // A thread of its own, not the runtime's pool: a runtime that ends would wait for it, for as long as the other
            // process likes.
            let (sender, receiver) = oneshot::channel();
            std::thread::Builder::new().name("oncebox-turn".to_owned()).spawn(move || {
                let locked = loop {
                    match file.lock() {
                        Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                        other => break other,
                    }
                };
                // Where nobody waits any more, the answer is dropped, and the turn with it.
                let _ = sender.send(locked.map(|()| Held::new(file)));
            })?;
            receiver.await.unwrap_or_else(|_| Err(io::Error::other("the thread that waits for a turn ended")))
        });
        match taken.await {
            Ok(held) => held,
            Err(_) => Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!(
                    "no turn at `{}` within {} s; process {} holds it",
                    self.path.display(),
                    patience.as_secs(),
                    self.holder()
                ),
            )),
        }
    }

    /// Who holds the turn, or held it last.
    pub(crate) fn holder(&self) -> u32 {
        std::fs::read(&self.path).map(|text| Stamp::parse(&text)).unwrap_or_default().process
    }
}

impl Held {
    fn new(mut file: OwnedMutexGuard<File>) -> Self {
        let mut stamp = Stamp::read(&mut file);
        if stamp.process != std::process::id() {
            stamp.process = std::process::id();
            stamp.write(&mut file);
        }
        Self { file: Some(file), since: Instant::now() }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let Some(mut file) = self.file.take() else { return };
        let mut stamp = Stamp::read(&mut file);
        let rest = stamp.give_back(now_millis(), self.since.elapsed());
        stamp.write(&mut file);
        match tokio::runtime::Handle::try_current() {
            // The transaction is over and its caller goes on; only the turn is kept.
            Ok(runtime) if rest => {
                runtime.spawn(async move {
                    tokio::time::sleep(REST).await;
                    unlock(&file);
                });
            }
            _ => unlock(&file),
        }
    }
}

/// An error here leaves the lock to the kernel, which frees it with the last handle.
fn unlock(file: &File) {
    if let Err(error) = file.unlock() {
        tracing::error!(%error, "a turn could not be given back");
    }
}

impl Stamp {
    /// Counts a turn that ends now; true where the file is to rest.
    fn give_back(&mut self, now: u64, held: Duration) -> bool {
        self.process = std::process::id();
        self.busy = self.busy.saturating_add(u64::try_from(held.as_micros()).unwrap_or(u64::MAX));
        let age = match now.checked_sub(self.rested_at) {
            Some(age) if self.rested_at > 0 => Duration::from_millis(age),
            // The first turn ever, or the clock went back: count anew from here.
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

    fn parse(text: &[u8]) -> Self {
        let text = String::from_utf8_lossy(text);
        let mut numbers = text.split_ascii_whitespace().map(str::parse::<u64>);
        let mut next = || numbers.next().and_then(Result::ok);
        // Anything else than what was written below counts as the first turn ever.
        match (next(), next(), next()) {
            (Some(process), Some(rested_at), Some(busy)) => {
                Self { process: u32::try_from(process).unwrap_or_default(), rested_at, busy }
            }
            _ => Self::default(),
        }
    }

    fn read(file: &mut File) -> Self {
        let mut text = [0; 64];
        let read = file.rewind().and_then(|()| file.read(&mut text));
        read.map(|length| Self::parse(&text[..length])).unwrap_or_default()
    }

    /// Fixed width, so that a shorter stamp covers a longer one.
    fn write(self, file: &mut File) {
        let text = format!("{:>10} {:>20} {:>20}\n", self.process, self.rested_at, self.busy);
        if let Err(error) = file.rewind().and_then(|()| file.write_all(text.as_bytes())) {
            tracing::warn!(%error, "the stamp of a turn could not be written");
        }
    }
}

fn now_millis() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .ok()
        .and_then(|since| u64::try_from(since.as_millis()).ok())
        .unwrap_or_default()
}
