//! A fair lock for processes that write to one SQLite database: a file beside the database. One
//! process writes at a time, and none waits for ever (R14).
//!
//! SQLite's own busy handler is unfair: in a test with two consumers, a writer and a relay, the
//! writer and the relay got one transaction each in twelve seconds. So every process of oncebox
//! takes a turn around each write transaction.
//!
//! Other programs take no turns. So that they can write too, the lock pauses: once a second, if it
//! was busy for more than a quarter of that time, the holder keeps its turn for 120 ms after its
//! transaction. The lock file stores how busy it was (`stamp`).
//!
//! Whoever locks a second file, `<lock file>-next`, gets the next turn (`next`). Clones of one
//! [`Turn`] get turns in the order of their requests.
//!
//! Guarantees: one turn at a time, over all processes and within each. When a process dies, the
//! kernel releases its locks. A process that is frozen while it waits delays the others for a
//! second once, and then by five milliseconds a turn. Waiting blocks no executor thread: where
//! another process has the turn, a thread waits. After `patience` it ends with an error that names
//! the last process known to have had the turn.
//!
//! Beside it: which file a path names (`file_id`), and whether SQLite may write it (`read_only`).
//!
//! Not here: the work in a turn. A process frozen inside its turn keeps it until it ends (R28).

mod file_id;
mod next;
mod read_only;
mod stamp;

use std::fs::{File, TryLockError};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tokio::sync::{Mutex, OwnedMutexGuard, oneshot};

pub(crate) use self::file_id::FileId;
use self::next::{Queue, STEP_ASIDE};
pub(crate) use self::read_only::is_read_only;
use self::stamp::Stamp;

use crate::task;

/// How long a busy file rests while the turn is still held.
const REST: Duration = Duration::from_millis(120);

/// The lock of one database. Clones share one queue.
#[derive(Debug, Clone)]
pub(crate) struct Turn {
    path: PathBuf,
    files: Arc<Mutex<Files>>,
}

/// The two open lock files of a [`Turn`] and its clones.
#[derive(Debug)]
struct Files {
    turn: File,
    queue: Queue,
}

/// A turn. Dropping it releases the turn: at once, or after a pause if one is due.
#[derive(Debug)]
pub(crate) struct Held {
    lock: Option<Lock>,
    since: Instant,
}

/// The lock itself. Dropping it releases the lock, on any thread.
#[derive(Debug)]
struct Lock(OwnedMutexGuard<Files>);

impl Drop for Lock {
    fn drop(&mut self) {
        next::unlock(&self.0.turn);
    }
}

impl Turn {
    /// Opens the lock file, and `<path>-next` beside it. Creates them where they are missing.
    pub(crate) fn open(path: impl Into<PathBuf>) -> io::Result<Self> {
        let path = path.into();
        let files = Files { turn: next::open(&path)?, queue: Queue::open(&path)? };
        Ok(Self { path, files: Arc::new(Mutex::new(files)) })
    }

    /// Waits for a turn for at most `patience`.
    ///
    /// # Errors
    /// `TimedOut`, with the process that had the turn last, or an I/O error of the lock files.
    ///
    /// # Cancel safety
    /// Safe: if the future is dropped, its thread may wait on, and releases the turn as soon as it
    /// gets it. Until then other takes of this [`Turn`] wait behind it.
    pub(crate) async fn take(&self, patience: Duration) -> io::Result<Held> {
        let taken = tokio::time::timeout(patience, async {
            let files = Arc::clone(&self.files).lock_owned().await;
            // An earlier take of ours may still wait to be next. The process that is next gets a
            // moment to run; if it does not, it is frozen, and we go past it.
            if files.queue.is_next_away() {
                tokio::time::sleep(STEP_ASIDE).await;
            }
            let away = files.queue.is_next_away();
            let next = if away { None } else { files.queue.try_take() };
            // Ask for the turn only if we are next, or if the process that is next does not run.
            // Otherwise the turn may be free only because that process has not woken up yet.
            if away || next.is_some() {
                match files.turn.try_lock() {
                    Ok(()) => {
                        drop(next);
                        return Ok(Held::new(files));
                    }
                    Err(TryLockError::WouldBlock) => {}
                    Err(TryLockError::Error(error)) => return Err(error),
                }
            }
            // A thread of its own: a blocking task would delay the end of the runtime for as long
            // as the other process holds the turn.
            let (sender, receiver) = oneshot::channel();
            std::thread::Builder::new().name("oncebox-turn".to_owned()).spawn(move || {
                let place = files.queue.stand(next);
                if sender.is_closed() {
                    return;
                }
                let locked = next::lock(&files.turn);
                drop(place);
                // If the future was dropped, sending fails, and the turn is released.
                let _ = sender.send(locked.map(|()| Held::new(files)));
            })?;
            receiver.await.unwrap_or_else(|_| Err(io::Error::other("the thread that waited for a turn panicked")))
        });
        match taken.await {
            Ok(held) => held,
            Err(_) => {
                let holder = match self.holder() {
                    0 => String::new(),
                    process => format!("; process {process} had it last"),
                };
                let why = format!("no turn at `{}` within {patience:?}{holder}", self.path.display());
                Err(io::Error::new(io::ErrorKind::TimedOut, why))
            }
        }
    }

    /// The id of the process that holds the turn, or held it last; 0 if the file does not say.
    pub(crate) fn holder(&self) -> u32 {
        std::fs::read(&self.path).map(|text| Stamp::parse(&text)).unwrap_or_default().process
    }
}

impl Held {
    fn new(files: OwnedMutexGuard<Files>) -> Self {
        let mut lock = Lock(files);
        let mut stamp = Stamp::read(&mut lock.0.turn);
        if stamp.process != std::process::id() {
            stamp.process = std::process::id();
            stamp.write(&mut lock.0.turn);
        }
        Self { lock: Some(lock), since: Instant::now() }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let Some(mut lock) = self.lock.take() else { return };
        let mut stamp = Stamp::read(&mut lock.0.turn);
        let rest = stamp.give_back(now_millis(), self.since.elapsed());
        stamp.write(&mut lock.0.turn);
        if rest && let Ok(runtime) = tokio::runtime::Handle::try_current() {
            // The caller continues, as its transaction is over. Only the turn is kept longer.
            runtime.spawn(task::boxed(async move {
                tokio::time::sleep(REST).await;
                drop(lock);
            }));
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::{BufRead, BufReader, Lines};
    use std::path::Path;
    use std::process::{Child, ChildStdout, Command, Stdio};
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    /// Another process: this test executable, started again with only `the_other_process`, which
    /// does what `act` says.
    struct Other {
        child: Child,
        lines: Lines<BufReader<ChildStdout>>,
    }

    impl Other {
        fn start(act: &str, file: &Path) -> Self {
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "flock::tests::the_other_process", "--nocapture", "--test-threads=1"])
                .env("ONCEBOX_FLOCK_ACT", act)
                .env("ONCEBOX_FLOCK_FILE", file)
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let lines = BufReader::new(child.stdout.take().unwrap()).lines();
            Self { child, lines }
        }

        /// Reads its output up to a line with this word; returns the rest of the line.
        fn says(&mut self, word: &str) -> String {
            loop {
                let line = self.lines.next().expect("the other process says something").unwrap();
                if let Some((_, rest)) = line.split_once(word) {
                    return rest.trim().to_owned();
                }
            }
        }

        /// Stops the process, and waits until each of its threads has stopped.
        #[cfg(target_os = "linux")]
        async fn freeze(&self) {
            self.signal("-STOP");
            let until = Instant::now() + PATIENCE;
            while !self.threads().iter().all(|state| state == "T") {
                assert!(Instant::now() < until, "{:?} do not stop", self.threads());
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }

        /// The states of its threads, from the kernel.
        #[cfg(target_os = "linux")]
        fn threads(&self) -> Vec<String> {
            let tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
            // A thread that has ended since the listing is left out.
            let texts = tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("stat")).ok());
            texts.map(|text| text.rsplit_once(") ").unwrap().1[..1].to_owned()).collect()
        }

        #[cfg(target_os = "linux")]
        fn signal(&self, name: &str) {
            let status = Command::new("kill").args([name, &self.child.id().to_string()]).status();
            assert!(status.unwrap().success());
        }

        fn kill(&mut self) {
            self.child.kill().unwrap();
            self.child.wait().unwrap();
        }
    }

    impl Drop for Other {
        fn drop(&mut self) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }

    #[tokio::test]
    async fn the_other_process() {
        let Ok(act) = std::env::var("ONCEBOX_FLOCK_ACT") else { return };
        let path = PathBuf::from(std::env::var("ONCEBOX_FLOCK_FILE").unwrap());
        let turn = Turn::open(&path).unwrap();
        match act.as_str() {
            "hold" => {
                let _held = turn.take(PATIENCE).await.unwrap();
                println!("\nholding");
                tokio::time::sleep(Duration::from_secs(60)).await;
            }
            "wait" => {
                println!("\nasking");
                drop(turn.take(3 * PATIENCE).await.unwrap());
                println!("\nhad it");
            }
            "count" => {
                let counter = path.with_extension("count");
                for _ in 0..200 {
                    let _held = turn.take(PATIENCE).await.unwrap();
                    let count: u32 = std::fs::read_to_string(&counter).unwrap().parse().unwrap();
                    tokio::task::yield_now().await;
                    std::fs::write(&counter, (count + 1).to_string()).unwrap();
                }
                println!("\ncounted");
            }
            "contend" => {
                println!("\nready");
                let mut turns = 0;
                let start = path.with_extension("start");
                while !start.exists() {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                let until = Instant::now() + Duration::from_secs(3);
                while Instant::now() < until {
                    let held = turn.take(PATIENCE).await.unwrap();
                    std::thread::sleep(Duration::from_millis(1));
                    drop(held);
                    turns += 1;
                }
                println!("\nturns {turns}");
            }
            other => panic!("unknown act {other}"),
        }
    }

    fn lock_file() -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file.lock");
        (directory, path)
    }

    async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
        let until = Instant::now() + PATIENCE;
        while !is_so() {
            assert!(Instant::now() < until, "{what}");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Whether a process or thread holds the lock of `next`.
    fn is_next_taken(path: &Path) -> bool {
        File::open(next::beside(path)).unwrap().try_lock().is_err()
    }

    // Shown by taking the lock out of `take`: 600 turns were counted as fewer.
    #[test]
    fn r14_one_turn_at_a_time_over_processes() {
        let (_directory, path) = lock_file();
        std::fs::write(path.with_extension("count"), "0").unwrap();
        let mut others: Vec<Other> = (0..3).map(|_| Other::start("count", &path)).collect();
        for other in &mut others {
            other.says("counted");
        }
        assert_eq!(std::fs::read_to_string(path.with_extension("count")).unwrap(), "600");
    }

    // Shown by taking turns without `next`, on a busy machine: unfair in 12 of 30 runs, in the
    // worst one 1, 15 and 2,086 turns. With `next`, the most were at most 1.3 times the fewest.
    #[test]
    fn r14_no_process_starves_beside_others_that_want_every_turn() {
        let (_directory, path) = lock_file();
        let mut others: Vec<Other> = (0..3).map(|_| Other::start("contend", &path)).collect();
        for other in &mut others {
            other.says("ready");
        }
        std::fs::write(path.with_extension("start"), "").unwrap();
        let turns: Vec<u32> = others.iter_mut().map(|other| other.says("turns").parse().unwrap()).collect();
        let (least, most) = (turns.iter().min().unwrap(), turns.iter().max().unwrap());
        println!("turns: {turns:?}");
        assert!(least * 20 >= *most, "turns are not fair: {turns:?}");
    }

    // Shown by leaving out the rest: the longest wait took nearly the whole test, instead of 1.0 s.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn r14_a_program_that_knows_nothing_of_turns_gets_in_beside_writers_that_never_pause() {
        use sqlx::{ConnectOptions, Executor};

        let (directory, path) = lock_file();
        let options = sqlx::sqlite::SqliteConnectOptions::new()
            .filename(directory.path().join("file.db"))
            .create_if_missing(true)
            .journal_mode(sqlx::sqlite::SqliteJournalMode::Wal)
            // This test is about turns, not about the disk.
            .synchronous(sqlx::sqlite::SqliteSynchronous::Off)
            .busy_timeout(Duration::from_secs(30));
        let mut outside = options.connect().await.unwrap();
        outside.execute("create table t (n integer)").await.unwrap();
        let until = Instant::now() + Duration::from_secs(12);
        let mut writers = Vec::new();
        for _ in 0..3 {
            let (turn, mut writer) = (Turn::open(&path).unwrap(), options.connect().await.unwrap());
            writers.push(tokio::spawn(async move {
                while Instant::now() < until {
                    let _held = turn.take(PATIENCE).await.unwrap();
                    writer.execute("begin immediate; insert into t values (1)").await.unwrap();
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    writer.execute("commit").await.unwrap();
                }
            }));
        }
        let mut written = 0;
        let mut longest = Duration::ZERO;
        while Instant::now() < until {
            let begun = Instant::now();
            outside.execute("insert into t values (2)").await.unwrap();
            longest = longest.max(begun.elapsed());
            written += 1;
        }
        for writer in writers {
            writer.await.unwrap();
        }
        println!("{written} transactions from outside, the longest took {longest:?}");
        assert!(longest < Duration::from_secs(6), "a transaction from outside took {longest:?}");
    }

    #[tokio::test]
    async fn a_turn_that_does_not_come_names_its_holder_and_comes_when_that_process_is_killed() {
        let (_directory, path) = lock_file();
        let mut other = Other::start("hold", &path);
        other.says("holding");
        let turn = Turn::open(&path).unwrap();
        let error = turn.take(Duration::from_millis(200)).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(error.to_string().contains(&format!("process {}", other.child.id())), "{error}");
        other.kill();
        let _held = turn.take(PATIENCE).await.unwrap();
        assert_eq!(turn.holder(), std::process::id());
    }

    // Shown by asking for the turn although another one was next: overtaken in all 20 rounds.
    #[tokio::test]
    async fn r14_who_gave_a_turn_back_stands_behind_who_waits_for_it() {
        let (_directory, path) = lock_file();
        let (here, there) = (Turn::open(&path).unwrap(), Turn::open(&path).unwrap());
        let (rounds, mut overtaken) = (20, 0);
        for _ in 0..rounds {
            let held = here.take(PATIENCE).await.unwrap();
            let had_it = Arc::new(AtomicBool::new(false));
            let (waiting, has_it) = (there.clone(), Arc::clone(&had_it));
            let waiter = tokio::spawn(async move {
                let _held = waiting.take(PATIENCE).await.unwrap();
                has_it.store(true, Ordering::SeqCst);
            });
            until("the other one waits", || is_next_taken(&path)).await;
            drop(held);
            let held = here.take(PATIENCE).await.unwrap();
            overtaken += u32::from(!had_it.load(Ordering::SeqCst));
            drop(held);
            waiter.await.unwrap();
        }
        // A waiter may be overtaken where its thread does not run for a second.
        assert!(overtaken <= rounds / 4, "overtaken in {overtaken} of {rounds} rounds");
    }

    // Shown by a thread that gives up its place when it begins to wait for the turn: `next` was
    // free then.
    #[tokio::test]
    async fn r14_who_stood_behind_for_more_than_a_second_keeps_its_place() {
        let (_directory, path) = lock_file();
        let [here, first, second] = [(); 3].map(|()| Turn::open(&path).unwrap());
        for _ in 0..5 {
            let held = here.take(PATIENCE).await.unwrap();
            let (one, other) = (first.clone(), second.clone());
            let mut before = tokio::spawn(async move { one.take(PATIENCE).await.unwrap() });
            until("the first one waits", || is_next_taken(&path)).await;
            let mut behind = tokio::spawn(async move { other.take(PATIENCE).await.unwrap() });
            // There is no condition to wait for: the second one must wait longer than this.
            tokio::time::sleep(next::BEHIND_MAX * 3 / 2).await;
            drop(held);
            // Both wait for the turn by now, and the kernel wakes both.
            let held = tokio::select! {
                held = &mut before => held.unwrap(),
                overtook = &mut behind => {
                    drop(overtook.unwrap());
                    drop(before.await.unwrap());
                    let is_back = || second.files.try_lock().is_ok_and(|files| !files.queue.is_next_away());
                    until("the queue is as before", is_back).await;
                    continue;
                }
            };
            until("the second one has `next`", || is_next_taken(&path)).await;
            for _ in 0..20 {
                assert!(is_next_taken(&path), "nobody has `next`, though somebody waits");
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            drop(held);
            drop(behind.await.unwrap());
            until("`next` is given back", || !is_next_taken(&path)).await;
            return;
        }
        panic!("who stood behind came first, five times out of five");
    }

    // Shown by waiting for `next` without a limit: no turn came, although none was held.
    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn r28_a_process_that_froze_while_it_waited_keeps_nobody_from_a_turn() {
        let (_directory, path) = lock_file();
        let turn = Turn::open(&path).unwrap();
        for thawed in [true, false] {
            let held = turn.take(PATIENCE).await.unwrap();
            let mut other = Other::start("wait", &path);
            other.says("asking");
            until("the other process waits", || is_next_taken(&path)).await;
            other.freeze().await;
            drop(held);
            for _ in 0..20 {
                drop(turn.take(PATIENCE).await.unwrap());
            }
            assert!(is_next_taken(&path), "it still has `next`");
            if thawed {
                other.signal("-CONT");
                other.says("had it");
            } else {
                other.kill();
            }
            until("what it had is given back", || !is_next_taken(&path)).await;
            until("the queue is as before", || turn.files.try_lock().is_ok_and(|files| !files.queue.is_next_away()))
                .await;
        }
    }

    // Shown by a turn that keeps `next`, and by a thread that waits on without its caller.
    #[tokio::test]
    async fn a_turn_that_nobody_waits_for_any_more_is_given_back_and_the_place_in_the_queue_with_it() {
        let (_directory, path) = lock_file();
        let [here, first, second] = [(); 3].map(|()| Turn::open(&path).unwrap());
        let held = here.take(PATIENCE).await.unwrap();
        // The first one has `next`, the second one is behind it.
        first.take(Duration::from_millis(50)).await.unwrap_err();
        second.take(Duration::from_millis(50)).await.unwrap_err();
        until("who stands behind gives up without a turn", || second.files.try_lock().is_ok()).await;
        drop(held);
        // The thread that waits gets the turn, finds its caller gone, and releases both.
        for turn in [&here, &first, &second] {
            drop(turn.take(PATIENCE).await.unwrap());
        }
        until("`next` is given back", || !is_next_taken(&path)).await;
    }

    #[tokio::test]
    async fn a_program_that_knows_only_the_turn_has_it_alone_too() {
        let (_directory, path) = lock_file();
        let turn = Turn::open(&path).unwrap();
        let earlier = File::open(&path).unwrap();
        let held = turn.take(PATIENCE).await.unwrap();
        assert!(earlier.try_lock().is_err(), "two have the turn");
        drop(held);
        earlier.lock().unwrap();
        turn.take(Duration::from_millis(50)).await.unwrap_err();
        // Also with a new file for `next`.
        std::fs::remove_file(next::beside(&path)).unwrap();
        let other = Turn::open(&path).unwrap();
        other.take(Duration::from_millis(50)).await.unwrap_err();
        earlier.unlock().unwrap();
        let held = turn.take(PATIENCE).await.unwrap();
        other.take(Duration::from_millis(50)).await.unwrap_err();
        drop(held);
        other.take(PATIENCE).await.unwrap();
    }
}
