//! Turns at a database file, so that no process starves (R14).
//!
//! SQLite's busy handler sleeps and tries again, so whoever writes without a pause is always first: a writer and a relay got
//! one transaction each in 12 s beside two consumers. Here every oncebox process queues for a lock file beside the database
//! around each write transaction. Programs that know nothing of the lock file (the application itself) find room because the
//! holder rests for 120 ms, *while holding the turn*, once a second of uninterrupted work has passed; SQLite's busy handler
//! sleeps at most 100 ms between two tries.
//!
//! Guarantees: one turn at a time among all processes; a process that died has given its turn back (the kernel drops its
//! locks); nobody waits without end for a process that is frozen: [`Turns::take`] names it and gives up after 30 s.
//!
//! Not here: any promise about data. A turn is a courtesy; the write lock of SQLite decides.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::sync::oneshot;

/// After this much uninterrupted work the holder rests.
const REST_AFTER: Duration = Duration::from_secs(1);
/// How long it rests: longer than the longest sleep of SQLite's busy handler.
const REST: Duration = Duration::from_millis(120);
/// How long a turn is waited for, like `busy_timeout`.
const WAIT_MAX: Duration = Duration::from_secs(30);

/// The queue of one store for the turns at its file. Clones share it.
#[derive(Debug, Clone)]
pub(super) struct Turns {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    path: PathBuf,
    rest: Duration,
    wait_max: Duration,
    keeper: Mutex<Option<mpsc::Sender<Wanted>>>,
}

type Wanted = oneshot::Sender<io::Result<Turn>>;

/// The right to write. Given back when dropped.
#[derive(Debug)]
pub(super) struct Turn {
    /// Its end of life is the message: the keeper waits until this is dropped.
    _back: mpsc::Sender<()>,
}

impl Turns {
    /// Turns at a database file. The lock file `<database>.oncebox-lock` is made when the first turn is taken.
    pub(super) fn beside(database: &Path) -> Self {
        Self::with(database, REST, WAIT_MAX)
    }

    fn with(database: &Path, rest: Duration, wait_max: Duration) -> Self {
        let mut path = database.as_os_str().to_owned();
        path.push(".oncebox-lock");
        Self { shared: Arc::new(Shared { path: path.into(), rest, wait_max, keeper: Mutex::new(None) }) }
    }

    /// Waits for the turn.
    ///
    /// # Errors
    /// `TimedOut` after 30 s, naming the process that holds it; else what the file system says of the lock file.
    ///
    /// # Cancel safety
    /// A dropped call gives its place back.
    pub(super) async fn take(&self) -> io::Result<Turn> {
        let (wanted, given) = oneshot::channel();
        self.ask(wanted)?;
        match tokio::time::timeout(self.shared.wait_max, given).await {
            Ok(Ok(turn)) => turn,
            Ok(Err(_)) => Err(io::Error::other("the thread that keeps the turns ended")),
            Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, self.timed_out())),
        }
    }

    /// Who holds the turn now, if anybody: its process id, and for how long.
    pub(super) fn holder(&self) -> Option<(u32, Duration)> {
        let mut file = File::open(&self.shared.path).ok()?;
        // A process that died holding the turn left its stamp, but not its lock.
        if file.try_lock().is_ok() {
            let _ = file.unlock();
            return None;
        }
        let stamp = Stamp::read(&mut file);
        (stamp.pid != 0).then(|| (stamp.pid, Duration::from_millis(unix_millis().saturating_sub(stamp.taken))))
    }

    fn timed_out(&self) -> String {
        let path = self.shared.path.display();
        match self.holder() {
            Some((pid, since)) => format!(
                "process {pid} has held the turn of {path} for {} s; if it is frozen, continue or end it",
                since.as_secs()
            ),
            None => format!("no turn of {path} in {} s", self.shared.wait_max.as_secs()),
        }
    }

    /// Hands the request to the keeper, a thread of its own: waiting for a file lock blocks, and the end of a program must not
    /// wait for it as it does for tokio's blocking threads.
    fn ask(&self, wanted: Wanted) -> io::Result<()> {
        let mut keeper = self.shared.keeper.lock().unwrap_or_else(PoisonError::into_inner);
        if keeper.is_none() {
            let (requests, queue) = mpsc::channel();
            let mut keeping = Keeper { path: self.shared.path.clone(), rest: self.shared.rest, file: None };
            let work = move || queue.into_iter().for_each(|wanted| keeping.serve(wanted));
            std::thread::Builder::new().name("oncebox-turns".to_owned()).spawn(work)?;
            *keeper = Some(requests);
        }
        // A keeper that is gone drops the request, which the one who waits sees.
        keeper.as_ref().map(|keeper| keeper.send(wanted));
        Ok(())
    }
}

/// The thread that waits for the file lock, rests, and serves this store's requests in the order in which they came.
struct Keeper {
    path: PathBuf,
    rest: Duration,
    file: Option<File>,
}

impl Keeper {
    fn serve(&mut self, wanted: Wanted) {
        // Whoever asked may have gone away while others had their turns.
        if wanted.is_closed() {
            return;
        }
        if let Err(error) = self.open() {
            let _ = wanted.send(Err(error));
            return;
        }
        let Some(file) = self.file.as_mut() else { return };
        if let Err(error) = lock(file) {
            self.file = None;
            let _ = wanted.send(Err(error));
            return;
        }
        if wanted.is_closed() {
            let _ = file.unlock();
            return;
        }
        let mut stamp = Stamp::read(file);
        let idle = millis(unix_millis(), stamp.released);
        if idle >= self.rest || stamp.rested > unix_millis() {
            // Nobody worked for as long as a rest: the others have had their room. Or the clock went back: start anew.
            stamp.rested = unix_millis();
        } else if millis(unix_millis(), stamp.rested) >= REST_AFTER {
            std::thread::sleep(self.rest);
            stamp.rested = unix_millis();
        }
        stamp.pid = std::process::id();
        stamp.taken = unix_millis();
        stamp.write(file);
        let (back, given_back) = mpsc::channel();
        if wanted.send(Ok(Turn { _back: back })).is_ok() {
            let _ = given_back.recv();
        }
        stamp.pid = 0;
        stamp.released = unix_millis();
        stamp.write(file);
        if file.unlock().is_err() {
            self.file = None;
        }
    }

    fn open(&mut self) -> io::Result<()> {
        if self.file.is_none() {
            let mut options = File::options();
            let file = options.read(true).write(true).create(true).truncate(false).open(&self.path);
            let named = |error: io::Error| {
                io::Error::new(error.kind(), format!("the lock file {} cannot be opened: {error}", self.path.display()))
            };
            self.file = Some(file.map_err(named)?);
        }
        Ok(())
    }
}

fn lock(file: &File) -> io::Result<()> {
    loop {
        match file.lock() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            outcome => return outcome,
        }
    }
}

/// What stands in the lock file. All times in milliseconds since 1970; nothing but courtesy depends on them.
#[derive(Debug, Default)]
struct Stamp {
    /// When somebody rested last, or nobody worked.
    rested: u64,
    /// When the last turn ended.
    released: u64,
    /// When the present turn began.
    taken: u64,
    /// Who has the turn; 0: nobody.
    pid: u32,
}

impl Stamp {
    /// A file that is empty or not ours reads as zero.
    fn read(file: &mut File) -> Self {
        let mut text = String::new();
        let read = file.seek(SeekFrom::Start(0)).and_then(|_| file.take(128).read_to_string(&mut text));
        let numbers: Vec<u64> = text.split_whitespace().filter_map(|number| number.parse().ok()).collect();
        match (read, numbers.as_slice()) {
            (Ok(_), &[rested, released, taken, pid]) => {
                Self { rested, released, taken, pid: u32::try_from(pid).unwrap_or_default() }
            }
            _ => Self::default(),
        }
    }

    /// Not synced, and errors are no matter: the next holder rests once more than needed.
    fn write(&self, file: &mut File) {
        let Self { rested, released, taken, pid } = self;
        let text = format!("{rested:020} {released:020} {taken:020} {pid:010}\n");
        let _ = file.seek(SeekFrom::Start(0)).and_then(|_| file.write_all(text.as_bytes()));
    }
}

fn unix_millis() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

fn millis(later: u64, earlier: u64) -> Duration {
    Duration::from_millis(later.saturating_sub(earlier))
}

#[cfg(test)]
mod tests;
