//! What the file promises: settings, the relay's checkpoints, positions, and a file that is not
//! made by accident.

use std::time::Duration;

use oncebox::StoreError;
use oncebox::message::NewMessage;
use oncebox::store::sqlite::SqliteStore;
use oncebox::store::{Base, LeaseAnswer, LeaseRequest, Mark, Outbox, Schema, SchemaState, Severity, StoreOptions};
use oncebox_testkit::store::{Fixture, Trial};
use sqlx::query_scalar;

use crate::fixture::SqliteFile;

fn request() -> LeaseRequest {
    LeaseRequest { shard: 0, owner: "a".into(), length: Duration::from_secs(60), read_bytes: 4 << 20 }
}

/// Every commit is synced: WAL with `synchronous = FULL`, on every connection.
#[tokio::test]
async fn every_connection_writes_ahead_and_syncs() {
    let trial = Trial::<SqliteFile>::start("settings").await.unwrap();
    let mut connections = Vec::new();
    for _ in 0..3 {
        let mut connection = trial.store.pool().acquire().await.unwrap();
        let mode: String = query_scalar("pragma journal_mode").fetch_one(&mut *connection).await.unwrap();
        let synchronous: i64 = query_scalar("pragma synchronous").fetch_one(&mut *connection).await.unwrap();
        let busy: i64 = query_scalar("pragma busy_timeout").fetch_one(&mut *connection).await.unwrap();
        assert_eq!((mode.as_str(), synchronous), ("wal", 2));
        assert!(busy >= 30_000, "{busy}");
        connections.push(connection);
    }
}

/// Such a task can spin without end (`bounded::rest`). Shown by: `max_lifetime` as sqlx has it.
#[tokio::test]
async fn the_pool_starts_no_task_of_sqlx() {
    let trial = Trial::<SqliteFile>::start("no_task").await.unwrap();
    let options = trial.store.pool().options();
    let (lifetime, idle) = (options.get_max_lifetime(), options.get_idle_timeout());
    assert_eq!((lifetime, idle, options.get_min_connections()), (None, None, 0));
}

/// R5: what is about to be published is on disk, even if its writer did not sync. SQLite syncs the
/// whole log with a commit of its own, so the checkpoint must be one, also with nothing to mark.
///
/// Shown to fail: with a checkpoint that returns at once for an empty mark.
#[tokio::test]
async fn r5_every_checkpoint_is_a_commit_of_its_own_after_the_read() {
    let trial = Trial::<SqliteFile>::start("checkpoints").await.unwrap();
    trial.enqueue(vec![NewMessage::text("t", "k", "1")]).await;
    let LeaseAnswer::Taken(mut session) = trial.store.open(&request()).await.unwrap() else { panic!() };
    let log = trial.fixture.path().with_extension("db-wal");
    for _ in 0..3 {
        session.read(10).await.unwrap();
        let revision = "select revision from oncebox_shard";
        let before: i64 = query_scalar(revision).fetch_one(trial.store.pool()).await.unwrap();
        let length = std::fs::metadata(&log).unwrap().len();
        session.checkpoint(Mark::default()).await.unwrap();
        let after: i64 = query_scalar(revision).fetch_one(trial.store.pool()).await.unwrap();
        assert_eq!(after, before + 1);
        assert!(std::fs::metadata(&log).unwrap().len() > length, "the checkpoint wrote nothing to the log");
    }
}

/// A position is one that no row had before, also after the table was emptied.
#[tokio::test]
async fn positions_are_never_used_twice() {
    let trial = Trial::<SqliteFile>::start("positions").await.unwrap();
    let LeaseAnswer::Taken(mut session) = trial.store.open(&request()).await.unwrap() else { panic!() };
    let mut last = 0;
    for _ in 0..3 {
        trial.enqueue(vec![NewMessage::text("t", "k", "1")]).await;
        let batch = session.read(10).await.unwrap();
        assert!(batch.rows[0].position > last);
        last = batch.rows[0].position;
        session.checkpoint(Mark { through: Some(batch.batch), ..Mark::default() }).await.unwrap();
        assert_eq!(trial.number("select count(*) from oncebox_outbox").await, 0);
    }
}

/// A read is bounded in bytes too.
#[tokio::test]
async fn g11_a_read_of_large_messages_ends_early() {
    let trial = Trial::<SqliteFile>::start("large").await.unwrap();
    let large = |number: u8| NewMessage::bytes("t", "k", vec![number; 800_000]);
    for numbers in [0..8, 8..16, 16..24, 24..30] {
        trial.enqueue(numbers.map(large).collect()).await;
    }
    let LeaseAnswer::Taken(mut session) = trial.store.open(&request()).await.unwrap() else { panic!() };
    let mut seen = Vec::new();
    loop {
        let batch = session.read(500).await.unwrap();
        let bytes: usize = batch.rows.iter().map(|row| row.message.payload.len()).sum();
        // The last message may pass the bound.
        assert!(bytes < (4 << 20) + 800_000, "{bytes}");
        seen.extend(batch.rows.iter().map(|row| row.message.payload[0]));
        session.checkpoint(Mark::default()).await.unwrap();
        if !batch.more {
            break;
        }
    }
    assert_eq!(seen, (0..30).collect::<Vec<u8>>());
}

/// Only `migrate up` makes a file.
#[tokio::test]
async fn a_missing_file_is_a_missing_schema_and_stays_missing() {
    let fixture = SqliteFile::empty().await.unwrap();
    let store = SqliteStore::connect(&StoreOptions::new(fixture.url())).await.unwrap();
    assert_eq!(store.schema().await.unwrap(), SchemaState::Missing);
    assert!(matches!(store.migrate().await, Err(StoreError::SchemaMissing(_))));
    let findings = store.check().await.unwrap();
    assert_eq!((findings.len(), findings[0].severity), (1, Severity::Refused));
    assert!(matches!(store.open(&request()).await, Err(StoreError::SchemaMissing(_))));
    assert_eq!(std::fs::read_dir(fixture.path().parent().unwrap()).unwrap().count(), 0, "not even a lock file");
    let created = fixture.connect().await;
    created.migrate().await.unwrap();
    assert!(matches!(store.schema().await.unwrap(), SchemaState::Current(_)), "and it is found when it is there");
}

/// As by who restores a copy and forgets a process. Shown by: no look at the path (the mark stood
/// in a file that nobody can open, and the session went on).
#[tokio::test]
async fn g2_nothing_is_written_to_a_file_that_was_replaced() {
    let trial = Trial::<SqliteFile>::start("replaced").await.unwrap();
    trial.enqueue(vec![NewMessage::bytes("t", "k", vec![1])]).await;
    let LeaseAnswer::Taken(mut session) = trial.store.open(&request()).await.unwrap() else { panic!() };
    assert_eq!(session.read(10).await.unwrap().rows.len(), 1);
    let path = trial.fixture.path();
    let old = path.with_extension("old");
    std::fs::rename(&path, &old).unwrap();
    std::fs::copy(&old, &path).unwrap();
    let marked = session.checkpoint(Mark { through: Some(1), ..Mark::default() }).await;
    let opened = trial.store.open(&request()).await.map(drop);
    for answer in [marked, opened] {
        let is_told =
            matches!(&answer, Err(error) if error.is_transient() && error.to_string().contains("restart the process"));
        assert!(is_told, "{answer:?}");
    }
}

/// The store of an application that has tables of its own and no oncebox yet.
#[tokio::test]
async fn an_applications_database_is_not_touched_by_looking() {
    let fixture = SqliteFile::empty().await.unwrap();
    let application = fixture.connect().await;
    sqlx::query("create table payment (id)").execute(application.pool()).await.unwrap();
    assert_eq!(application.schema().await.unwrap(), SchemaState::Missing);
    let tables: Vec<String> =
        query_scalar("select name from sqlite_schema").fetch_all(application.pool()).await.unwrap();
    assert_eq!(tables, ["payment"]);
}

#[tokio::test]
async fn urls_that_cannot_keep_the_promise_are_refused() {
    for url in [
        "sqlite::memory:",
        "sqlite://:memory:",
        "sqlite://file.db?mode=memory",
        "sqlite://file.db?mode=ro",
        "sqlite://file.db?cache=shared",
        "sqlite://file.db?immutable=true",
        "sqlite://",
        "sqlite:///",
        "sqlite://file.db?nonsense=1",
    ] {
        let answer = SqliteStore::connect(&StoreOptions::new(url)).await;
        assert!(matches!(answer, Err(StoreError::Refused(_))), "{url}: {answer:?}");
    }
}

/// A migration is one transaction: a failure leaves nothing behind, and the next try finds a clean
/// place.
#[tokio::test]
async fn a_migration_that_fails_leaves_nothing() {
    let fixture = SqliteFile::empty().await.unwrap();
    let store = fixture.connect().await;
    sqlx::query("create table oncebox_email (mine)").execute(store.pool()).await.unwrap();
    assert!(store.migrate().await.is_err());
    assert_eq!(store.schema().await.unwrap(), SchemaState::Missing);
    sqlx::query("drop table oncebox_email").execute(store.pool()).await.unwrap();
    assert_eq!(store.migrate().await.unwrap().len(), store.applied().await.unwrap().len());
}

/// A text that changed under its version is not what this program was tested with.
#[tokio::test]
async fn a_migration_that_was_changed_after_it_was_applied_is_refused() {
    let trial = Trial::<SqliteFile>::start("changed migration").await.unwrap();
    trial.run("update oncebox_migration set checksum = x'00' where version = 2").await;
    assert!(matches!(trial.store.migrate().await, Err(StoreError::Refused(why)) if why.contains("migration 2")));
}

/// SQLite keeps no comments of its own, so they stand in the text that `migrate print` shows.
#[test]
fn every_table_and_column_is_commented() {
    let script = SqliteStore::script();
    let (_, migrations) = script.split_once("\n-- 1 ").unwrap();
    let (mut inside, mut columns) = (false, 0);
    for line in migrations.lines() {
        let trimmed = line.trim();
        if line.starts_with("create table") {
            inside = true;
        } else if line.starts_with(')') {
            inside = false;
        } else if inside && line.starts_with("    ") && !line.starts_with("     ") {
            let is_constraint = trimmed.starts_with("check") || trimmed.starts_with("primary key");
            assert!(is_constraint || trimmed.contains("-- "), "no comment: {line}");
            columns += 1;
        }
    }
    assert!(columns > 100, "only {columns} columns were found");
    for (number, line) in migrations.lines().enumerate() {
        if line.starts_with("create ") {
            let above = migrations.lines().nth(number - 1).unwrap();
            assert!(above.starts_with("-- "), "no comment above: {line}");
        }
    }
}
