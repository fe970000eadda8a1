//! The embedded broker between processes: publishers and consumers that are killed or frozen in the
//! middle.
//!
//! The processes are this test executable again, running only `the_other_process`.
#![cfg(feature = "embedded")]
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, Permissions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use oncebox::BrokerError;
use oncebox::broker::embedded::{EmbeddedBroker, EmbeddedConfig};
use oncebox::broker::{Broker, Event, PartitionId, Subscriber, Subscription};
use oncebox::message::{Arrived, OutgoingMessage};
use uuid::Uuid;

const PATIENCE: Duration = Duration::from_secs(90);
/// Waited for after each kill, and longer than a busy machine gives a process no time.
const SESSION: Duration = Duration::from_secs(4);
const KEYS: usize = 8;

/// Another process, and the lines it says.
struct Other {
    child: Child,
    lines: Receiver<String>,
}

impl Other {
    fn start(directory: &Path, act: &[&str]) -> Self {
        Self::run(Command::new(std::env::current_exe().unwrap()), directory, act)
    }

    /// As `start`, in a process that obeys the modes of files, also where this one is root's.
    fn start_without_rights(directory: &Path, act: &[&str]) -> Self {
        let program = std::env::current_exe().unwrap();
        if std::fs::metadata("/proc/self").unwrap().uid() != 0 {
            return Self::run(Command::new(program), directory, act);
        }
        let mut command = Command::new("setpriv");
        command.arg("--bounding-set=-dac_override,-dac_read_search").arg(program);
        Self::run(command, directory, act)
    }

    fn run(mut command: Command, directory: &Path, act: &[&str]) -> Self {
        let mut child = command
            .args(["--exact", "the_other_process", "--nocapture", "--test-threads=1"])
            .env("ONCEBOX_TEST_DIRECTORY", directory)
            .env("ONCEBOX_TEST_ACT", act.join(" "))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Self { child, lines }
    }

    /// What it says next after this word.
    fn says(&self, word: &str) -> String {
        let until = Instant::now() + PATIENCE;
        loop {
            match self.lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    if let Some(rest) = line.strip_prefix(word) {
                        return rest.trim().to_owned();
                    }
                }
                Err(RecvTimeoutError::Timeout) => panic!("it never said `{word}`"),
                Err(RecvTimeoutError::Disconnected) => panic!("it ended without saying `{word}`"),
            }
        }
    }

    /// The last number it said after this word before it ended.
    fn said_last(&self, word: &str) -> Option<usize> {
        let mut last = None;
        while let Ok(line) = self.lines.recv_timeout(PATIENCE) {
            last = line.strip_prefix(word).map(|rest| rest.trim().parse().unwrap()).or(last);
        }
        last
    }

    fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
    }

    /// SIGKILL.
    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn ends(&mut self) {
        let until = Instant::now() + PATIENCE;
        loop {
            match self.child.try_wait().unwrap() {
                Some(status) => return assert!(status.success(), "{status}"),
                None => assert!(Instant::now() < until, "it does not end"),
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn config(directory: &Path) -> EmbeddedConfig {
    EmbeddedConfig { session_timeout: SESSION, ..EmbeddedConfig::new(directory.join("broker.db")) }
}

fn subscription() -> Subscription {
    Subscription::new("c", vec!["t".into()])
}

/// The acts of the other processes; as a test of its own it does nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_other_process() {
    let Ok(act) = std::env::var("ONCEBOX_TEST_ACT") else { return };
    let directory = PathBuf::from(std::env::var("ONCEBOX_TEST_DIRECTORY").unwrap());
    let broker = EmbeddedBroker::open(config(&directory)).await.unwrap();
    let act: Vec<&str> = act.split(' ').collect();
    println!();
    match act[..] {
        ["publish", name, from, to] => publish(&broker, name, from.parse().unwrap(), to.parse().unwrap()).await,
        ["consume"] => consume(&broker, &directory).await,
        ["hold"] => hold(&broker, &directory).await,
        ["read-only"] => read_only(&broker, &directory).await,
        _ => panic!("unknown act {act:?}"),
    }
}

/// Opens a session while the files can only be read, and another one when they can be written.
async fn read_only(broker: &EmbeddedBroker, directory: &Path) {
    let files = || ["", "-wal", "-shm"].map(|end| directory.join(format!("broker.db{end}")));
    let set_mode =
        |mode| files().iter().for_each(|file| std::fs::set_permissions(file, Permissions::from_mode(mode)).unwrap());
    set_mode(0o444);
    assert!(files().iter().all(|file| File::options().write(true).open(file).is_err()), "this process obeys no mode");
    let refused = broker.publisher().await.map(drop).unwrap_err();
    let is_away = matches!(&refused, BrokerError::Unavailable(why) if why.contains("can only be read"));
    assert!(is_away, "{refused}");
    set_mode(0o644);
    publish(broker, "later", 0, 3).await;
}

/// Publishes numbered rows of the publisher's own keys, and says how many from the first on are
/// proven.
async fn publish(broker: &EmbeddedBroker, name: &str, from: usize, to: usize) {
    let mut publisher = broker.publisher().await.unwrap();
    let mut settled = Vec::new();
    let mut unproven: BTreeSet<usize> = BTreeSet::new();
    let mut marked = from;
    for first in (from..to).step_by(50) {
        let numbers = first..to.min(first + 50);
        let row = |number: usize| OutgoingMessage {
            id: Uuid::now_v7(),
            topic: "t".to_owned(),
            key: Some(format!("{name}-{}", number % KEYS)),
            kind: "k".to_owned(),
            headers: Vec::new(),
            payload: number.to_string().into_bytes(),
            content_type: "text/plain".to_owned(),
            trace: None,
            created_at: chrono::Utc::now(),
        };
        unproven.extend(numbers.clone());
        publisher.send(numbers.map(|number| (number as u64, row(number))).collect()).await.unwrap();
        // Up to 500 in flight, as a relay has them.
        let bound = if first + 50 >= to { 0 } else { 500 };
        while unproven.len() > bound {
            publisher.settle(&mut settled).await.unwrap();
            for settled in settled.drain(..) {
                settled.outcome.unwrap();
                unproven.remove(&usize::try_from(settled.tag).unwrap());
            }
            // Marked one step late, as a relay's mark comes after the proof: a kill in between
            // makes it send rows again.
            let proven = unproven.first().copied().unwrap_or(first + 50).min(to);
            if proven > marked {
                println!("proven {marked}");
                marked = proven;
            }
        }
    }
    publisher.close().await;
}

/// Handles rows: writes them down, then acknowledges.
async fn consume(broker: &EmbeddedBroker, directory: &Path) {
    let mut handled = File::options().append(true).create(true).open(directory.join("handled")).unwrap();
    let mut subscriber = broker.subscriber(&subscription()).await.unwrap();
    let mut count = 0;
    loop {
        let event = match subscriber.next().await {
            Ok(event) => event,
            // On a slow machine its lease may be over.
            Err(error @ (BrokerError::Session(_) | BrokerError::Unavailable(_))) => {
                eprintln!("its session ended: {error}");
                subscriber = broker.subscriber(&subscription()).await.unwrap();
                continue;
            }
            Err(error) => panic!("{error}"),
        };
        match event {
            Event::Deliveries(deliveries) => {
                for (at, delivery) in deliveries.iter().enumerate() {
                    // Slower than reading, so that a kill finds rows that were read and not
                    // handled.
                    if at % 20 == 0 {
                        tokio::time::sleep(Duration::from_millis(1)).await;
                    }
                    let key = String::from_utf8(delivery.arrived.key.clone().unwrap()).unwrap();
                    let number = number(&delivery.arrived);
                    // One write, so that lines of several processes never mix.
                    handled.write_all(format!("{key} {number}\n").as_bytes()).unwrap();
                }
                for delivery in &deliveries {
                    subscriber.acknowledge(&delivery.source, delivery.sequence).await.unwrap();
                }
                count += deliveries.len();
                println!("handled {count}");
            }
            Event::Assigned(sources) => println!("assigned {}", sources.len()),
            Event::Revoked { sources, .. } => println!("revoked {}", sources.len()),
        }
    }
}

/// Reads 200 rows and acknowledges them only when told.
async fn hold(broker: &EmbeddedBroker, directory: &Path) {
    let mut subscriber = broker.subscriber(&subscription()).await.unwrap();
    let read = read(subscriber.as_mut(), 200).await;
    println!("read");
    while !directory.join("go").exists() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    for (source, through, _) in &read {
        subscriber.acknowledge(source, *through).await.unwrap();
    }
    loop {
        if let Event::Revoked { sources, lost, .. } = subscriber.next().await.unwrap() {
            println!("lost {} {lost}", sources.len());
        }
    }
}

fn number(arrived: &Arrived) -> usize {
    std::str::from_utf8(arrived.payload.as_deref().unwrap()).unwrap().parse().unwrap()
}

/// Reads so many different rows without acknowledging.
async fn read(subscriber: &mut dyn Subscriber, count: usize) -> Vec<(PartitionId, i64, usize)> {
    let mut read = Vec::new();
    while read.iter().map(|(_, _, number)| *number).collect::<BTreeSet<_>>().len() < count {
        let event = tokio::time::timeout(PATIENCE, subscriber.next()).await.expect("rows come").unwrap();
        if let Event::Deliveries(deliveries) = event {
            read.extend(deliveries.iter().map(|d| (d.source.clone(), d.sequence, number(&d.arrived))));
        }
    }
    read
}

/// First occurrences of every key ascend; gives all (key, number) that occurred.
fn assert_order<'a>(occurred: impl Iterator<Item = (&'a str, usize)>) -> BTreeSet<(String, usize)> {
    let mut highest: BTreeMap<String, usize> = BTreeMap::new();
    let mut seen = BTreeSet::new();
    for (key, number) in occurred {
        if seen.insert((key.to_owned(), number)) {
            let before = highest.insert(key.to_owned(), number);
            assert!(before.is_none_or(|before| before < number), "{key}: {number} came after {before:?}");
        }
    }
    seen
}

fn everything(rows: usize) -> BTreeSet<(String, usize)> {
    ["a", "b"].iter().flat_map(|name| (0..rows).map(move |n| (format!("{name}-{}", n % KEYS), n))).collect()
}

/// Two publishers and three consumers, one of each killed again and again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_that_are_killed_lose_nothing_and_keep_the_order_of_every_key() {
    const ROWS: usize = 6_000;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let mut consumers: Vec<Other> = (0..3).map(|_| Other::start(path, &["consume"])).collect();
    // Each has a share before there are rows.
    consumers.iter().for_each(|consumer| drop(consumer.says("assigned ")));
    let mut steady = Other::start(path, &["publish", "a", "0", &ROWS.to_string()]);
    let mut proven = 0;
    for kill_after in [500, 1_500, 3_500] {
        let mut publisher = Other::start(path, &["publish", "b", &proven.to_string(), &ROWS.to_string()]);
        loop {
            let now: usize = publisher.says("proven ").parse().unwrap();
            if now >= kill_after {
                proven = now;
                break;
            }
        }
        publisher.kill();
        // What it had said by then is proven; more may be in the log.
        proven = publisher.said_last("proven ").unwrap_or(proven).max(proven);
        assert!(proven < ROWS, "it was killed in the middle");
        let mut consumer = consumers.remove(0);
        consumer.says("handled ");
        consumer.kill();
        consumers.push(Other::start(path, &["consume"]));
    }
    let mut last = Other::start(path, &["publish", "b", &proven.to_string(), &ROWS.to_string()]);
    last.ends();
    steady.ends();

    let broker = EmbeddedBroker::open(config(path)).await.unwrap();
    let log = broker.read_all("t").await.unwrap();
    let mut next: BTreeMap<i32, i64> = BTreeMap::new();
    for arrived in &log {
        let next = next.entry(arrived.coordinates.partition).or_default();
        assert_eq!(arrived.coordinates.offset, *next, "offsets have no holes");
        *next += 1;
    }
    let keys: Vec<String> =
        log.iter().map(|arrived| String::from_utf8(arrived.key.clone().unwrap()).unwrap()).collect();
    let in_log = assert_order(keys.iter().map(String::as_str).zip(log.iter().map(number)));
    assert_eq!(in_log, everything(ROWS), "every row is in the log");
    assert!(log.len() > 2 * ROWS, "no row was sent anew: nothing is shown");
    eprintln!("{} rows in the log, {} sent anew after kills", log.len(), log.len() - 2 * ROWS);

    let until = Instant::now() + PATIENCE;
    let handled = loop {
        let handled = std::fs::read_to_string(path.join("handled")).unwrap_or_default();
        let whole = handled.rfind('\n').map_or("", |end| &handled[..end]).to_owned();
        let lines = whole.lines().map(|line| line.split_once(' ').unwrap());
        let seen = assert_order(lines.map(|(key, number)| (key, number.parse().unwrap())));
        if seen.len() == 2 * ROWS {
            break whole;
        }
        assert!(Instant::now() < until, "{} of {} rows were handled", seen.len(), 2 * ROWS);
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    eprintln!("{} deliveries were handled", handled.lines().count());
    assert!(consumers.iter_mut().all(|one| one.child.try_wait().unwrap().is_none()), "a consumer ended by itself");
}

/// SQLite opens a file for reading that it may not write, and such a connection never writes. Shown
/// to fail: with a session on that connection, which is blocked for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_that_was_read_only_when_a_session_began_is_written_by_the_next() {
    let directory = tempfile::tempdir().unwrap();
    let broker = EmbeddedBroker::open(config(directory.path())).await.unwrap();
    broker.declare(&["t".to_owned()]).await.unwrap();
    // Its connection keeps `-wal` and `-shm` there.
    let _publisher = broker.publisher().await.unwrap();
    Other::start_without_rights(directory.path(), &["read-only"]).ends();
    assert_eq!(broker.read_all("t").await.unwrap().len(), 3);
}

/// A process is frozen beyond its session, another one takes over; woken, it acknowledges and
/// changes nothing (G9).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g9_a_process_that_was_frozen_and_taken_over_changes_nothing_when_it_wakes() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let broker = EmbeddedBroker::open(config(path)).await.unwrap();
    Other::start(path, &["publish", "a", "0", "200"]).ends();
    let mut frozen = Other::start(path, &["hold"]);
    frozen.says("read");
    // Not inside its turn: nobody could work then (R28).
    let lock = File::open(path.join("broker.db.lock")).unwrap();
    loop {
        frozen.signal("-STOP");
        if lock.try_lock().is_ok() {
            lock.unlock().unwrap();
            break;
        }
        frozen.signal("-CONT");
        tokio::time::sleep(Duration::from_millis(7)).await;
    }

    let mut taker = broker.subscriber(&subscription()).await.unwrap();
    assert_eq!(read(taker.as_mut(), 200).await.len(), 200, "everything comes again to the one who takes over");
    std::fs::write(path.join("go"), "").unwrap();
    frozen.signal("-CONT");
    assert_eq!(frozen.says("lost "), "4 true");
    frozen.kill();
    taker.close().await;

    let mut third = broker.subscriber(&subscription()).await.unwrap();
    assert_eq!(read(third.as_mut(), 200).await.len(), 200, "nothing was acknowledged");
    third.close().await;
}
