//! Several processes at one file: turns that come back from the dead, and programs in other
//! languages.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use oncebox::message::{MessageId, NewMessage};
use oncebox::store::sqlite::SqliteStore;
use oncebox::store::{Base, Inbox, InboxEntry, Schema, Severity, StoreOptions};
use oncebox_testkit::store::Trial;

use crate::fixture::SqliteFile;

const CHILD: &str = "ONCEBOX_TEST_CHILD_OF";
const READ_ONLY: &str = "ONCEBOX_TEST_READ_ONLY_IN";

/// Not a test of its own: what the next one runs as another process. It holds the turn and the
/// write lock until it is killed.
#[tokio::test]
async fn a_child_that_holds_the_turn() {
    let Ok(url) = std::env::var(CHILD) else { return };
    let store = SqliteStore::connect(&StoreOptions::new(url)).await.unwrap();
    let consumer = store.register(&spec("c")).await.unwrap();
    let mut tx = store.begin(consumer).await.unwrap();
    tx.admit(&[InboxEntry { id: MessageId::new(), hash: [1; 16] }]).await.unwrap();
    sqlx::query("insert into effect values ('child', '')")
        .execute(tx.connection::<sqlx::SqliteConnection>().unwrap())
        .await
        .unwrap();
    println!("holding");
    std::future::pending::<()>().await;
}

fn spec(name: &str) -> oncebox::store::ConsumerSpec {
    oncebox::store::ConsumerSpec { name: name.into(), id_rule: "envelope".into(), accept: false }
}

/// Gone with the test, however that ends: it would hold the turn for ever.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The kernel gives its locks back, SQLite its transaction.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r14_a_process_that_is_killed_gives_its_turn_back() {
    let trial = Trial::<SqliteFile>::start("killed").await.unwrap();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "processes::a_child_that_holds_the_turn", "--nocapture"])
        .env(CHILD, trial.fixture.url())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn();
    let mut child = Killed(child.unwrap());
    let mut lines = BufReader::new(child.0.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("holding")), "the child never held the turn");
    let consumer = {
        let (store, pid) = (trial.store.clone(), child.0.id());
        let waiting = tokio::spawn(async move { store.register(&spec("waits")).await });
        // The check names who holds the turn once that has lasted for long; here it only must not
        // wait for it.
        oncebox::store::Schema::check(&trial.store).await.unwrap();
        // Who waits for the turn is the next one, and has the lock of that place.
        let next = trial.fixture.path().with_file_name("test.db.oncebox-lock-next");
        let began = Instant::now();
        while File::open(&next).is_ok_and(|next| next.try_lock().is_ok()) {
            assert!(began.elapsed() < Duration::from_secs(20), "nobody waits for the turn");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert!(!waiting.is_finished(), "process {pid} holds the turn");
        drop(child);
        let killed = Instant::now();
        let consumer = waiting.await.unwrap().unwrap();
        // Who waits for a lock that nobody gives back waits for 30 seconds.
        assert!(killed.elapsed() < Duration::from_secs(25), "{:?}", killed.elapsed());
        consumer
    };
    assert_eq!(trial.effects("child").await, 0);
    trial.store.begin(consumer).await.unwrap().commit().await.unwrap();
}

/// Not a test of its own: what the next one runs as a process that obeys the modes of files.
#[tokio::test]
async fn a_child_whose_file_is_read_only_at_first() {
    let Ok(directory) = std::env::var(READ_ONLY) else { return };
    let files = || std::fs::read_dir(&directory).unwrap().map(|file| file.unwrap().path());
    let set_mode = |mode: u32| {
        files().for_each(|file| std::fs::set_permissions(file, PermissionsExt::from_mode(mode)).unwrap());
    };
    set_mode(0o444);
    assert!(files().all(|file| File::options().write(true).open(file).is_err()), "this process obeys no mode");
    let url = format!("sqlite://{directory}/test.db");
    let store = SqliteStore::connect(&StoreOptions::new(url)).await.unwrap();
    // Several connections at once, as the parts of a program open them.
    let looks = (0..4).map(|_| async { store.schema().await?.require() });
    for looked in futures_util::future::join_all(looks).await {
        looked.unwrap();
    }
    let refused = store.register(&spec("early")).await.unwrap_err();
    assert!(refused.is_transient() && refused.to_string().contains("test.db.oncebox-lock`"), "{refused}");
    let findings = store.check().await.unwrap();
    let turn = findings.iter().find(|finding| finding.name == "turn").unwrap();
    let hint = turn.remedy.as_deref().unwrap_or_default();
    assert!(turn.severity == Severity::Refused && hint.contains("the owner and the rights"), "{turn:?}");
    set_mode(0o644);
    let began = Instant::now();
    while let Err(error) = store.register(&spec("later")).await {
        // Connections close in tasks of their own, and a program tries again after a pause, too.
        assert!(error.is_transient() && began.elapsed() < Duration::from_secs(20), "{error}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// A program that was started while the disk could not be written goes on when it can be. Shown to
/// fail: without the change of state in `connect`, by which such a connection is used only once; a
/// check that takes a lock file it may not open for one that another process holds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_that_was_read_only_at_the_start_is_written_later() {
    let trial = Trial::<SqliteFile>::start("read_only").await.unwrap();
    trial.store.register(&spec("before")).await.unwrap();
    // As a process leaves them that is killed: with a log that was not copied into the file.
    let directory = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(trial.fixture.path().parent().unwrap()).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), directory.path().join(file.file_name())).unwrap();
    }
    let left = |end: &str| directory.path().join(format!("test.db{end}")).exists();
    assert!(["", "-wal", "-shm", ".oncebox-lock"].into_iter().all(left), "a file is missing");
    // Root obeys modes only without these capabilities.
    let is_root = std::fs::metadata("/proc/self").unwrap().uid() == 0;
    let program = std::env::current_exe().unwrap();
    let mut child = match is_root {
        true => {
            let mut child = Command::new("setpriv");
            child.arg("--bounding-set=-dac_override,-dac_read_search").arg(program);
            child
        }
        false => Command::new(program),
    };
    let child = child.args(["--exact", "processes::a_child_whose_file_is_read_only_at_first", "--nocapture"]);
    let done = child.env(READ_ONLY, directory.path()).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    assert!(String::from_utf8_lossy(&done.stdout).contains("1 passed"), "the child ran no test: {done:?}");
}

/// The turn is no part of the promise: a program without it is only less polite.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn applications_without_turns_write_beside_busy_stores() {
    let trial = Trial::<SqliteFile>::start("beside").await.unwrap();
    // Two seconds, and as long as a slow disk needs until all have written a few times.
    const ENOUGH: u32 = 6;
    let began = Instant::now();
    let (stop, counts) = (Arc::new(AtomicBool::new(false)), Arc::new([AtomicU32::new(0), AtomicU32::new(0)]));
    let mut busy = tokio::task::JoinSet::new();
    for (at, name) in ["a", "b"].into_iter().enumerate() {
        let (stop, counts) = (Arc::clone(&stop), Arc::clone(&counts));
        let store = SqliteStore::connect(&StoreOptions::new(trial.fixture.url())).await.unwrap();
        let consumer = store.register(&spec(name)).await.unwrap();
        busy.spawn(async move {
            while !stop.load(Ordering::Relaxed) {
                let mut tx = store.begin(consumer).await.unwrap();
                tx.admit(&[InboxEntry { id: MessageId::new(), hash: [1; 16] }]).await.unwrap();
                tx.prove().await.unwrap();
                tx.commit().await.unwrap();
                counts[at].fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    let mut written = 0;
    let all_wrote = |written: u32| written >= ENOUGH && counts.iter().all(|one| one.load(Ordering::Relaxed) >= ENOUGH);
    while began.elapsed() < Duration::from_secs(2) || !all_wrote(written) {
        assert!(began.elapsed() < Duration::from_secs(90), "{written} and {counts:?}: somebody never gets a turn");
        let asked = Instant::now();
        trial.enqueue(vec![NewMessage::text("t", "k", "1")]).await;
        // Without its turn kept free for it, one waited for twelve seconds.
        assert!(asked.elapsed() < Duration::from_secs(10), "it waited for {:?}", asked.elapsed());
        written += 1;
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    stop.store(true, Ordering::Relaxed);
    busy.join_all().await;
    let rows: u32 =
        sqlx::query_scalar("select count(*) from oncebox_outbox").fetch_one(trial.store.pool()).await.unwrap();
    assert_eq!(rows, written);
}

/// The door works from any client of SQLite 3.38 or later, here its command line.
#[tokio::test]
async fn another_program_enqueues_by_a_plain_insert() {
    let trial = Trial::<SqliteFile>::start("another program").await.unwrap();
    let run = |sql: &str| Command::new("sqlite3").arg(trial.fixture.path()).arg(sql).output();
    if run("select 1").is_err() {
        assert!(std::env::var("ONCEBOX_TEST_STRICT").as_deref() != Ok("1"), "this test needs the program sqlite3");
        eprintln!("SKIPPED: another_program_enqueues_by_a_plain_insert (no program sqlite3)");
        return;
    }
    let good = "insert into oncebox_outbox (topic, key, kind, payload, headers) \
                values ('payments', 'ä😀', 'payment.created', '{}', '{\"tenant\":\"t1\"}')";
    let output = run(good).unwrap();
    assert!(output.status.success(), "{output:?}");
    let output = run("insert or ignore into oncebox_outbox (topic, key, kind, payload) values ('a b', 'k', 'k', '')");
    assert!(String::from_utf8_lossy(&output.unwrap().stderr).contains("oncebox: limit topic: "));
    let request = oncebox::store::LeaseRequest {
        shard: 0,
        owner: "a".into(),
        length: Duration::from_secs(60),
        read_bytes: 4 << 20,
    };
    let answer = oncebox::store::Outbox::open(&trial.store, &request).await.unwrap();
    let oncebox::store::LeaseAnswer::Taken(mut session) = answer else { panic!() };
    let rows = session.read(10).await.unwrap().rows;
    assert_eq!(rows.len(), 1);
    assert_eq!(rows[0].message.key.as_deref(), Some("ä😀"));
    assert_eq!(rows[0].message.headers, [("tenant".to_owned(), "t1".to_owned())]);
}
