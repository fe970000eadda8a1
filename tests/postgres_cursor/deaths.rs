//! A relay that dies at every step, and a server that is killed.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use oncebox::NewMessage;
use oncebox::sqlx::{self, Connection, Executor, PgConnection};
use oncebox::store::postgres::PostgresStore;
use oncebox::store::{Base, Mark, Schema, StoreOptions, enqueue};

use crate::postgres::{Database, Server, with_database, with_path};
use crate::relay::{NO_GAPS, Relay, gaps, open, payload, put, scanned_to};

/// Writers of a few keys, each serialised by its aggregate's row, with aborts, savepoints and
/// pauses; the number in the payload is the order of commits within the key.
async fn write_keys(database: Database, writers: usize, rounds: u32) {
    let mut tasks = Vec::new();
    for writer in 0..writers {
        let database = database.clone();
        tasks.push(tokio::spawn(async move {
            let mut random = fastrand::Rng::with_seed(writer as u64);
            let mut connection = database.connection().await;
            for _ in 0..rounds {
                let key = random.i32(0..4);
                let mut tx = connection.begin().await.unwrap();
                if random.bool() {
                    tx.execute("select pg_current_xact_id()").await.unwrap();
                }
                let number: i64 = sqlx::query_scalar("update aggregate set n = n + 1 where id = $1 returning n")
                    .bind(key)
                    .fetch_one(&mut *tx)
                    .await
                    .unwrap();
                let text = format!("{key}:{number}");
                let one = NewMessage::text("t", "k", text).with_key(key.to_string());
                if random.u8(..) < 40 {
                    let mut part = tx.begin().await.unwrap();
                    enqueue(&mut *part, one.clone()).await.unwrap();
                    part.rollback().await.unwrap();
                }
                enqueue(&mut *tx, one).await.unwrap();
                if random.u8(..) < 60 {
                    tokio::time::sleep(Duration::from_millis(random.u64(0..4))).await;
                }
                if random.u8(..) < 50 {
                    tx.rollback().await.unwrap();
                } else {
                    tx.commit().await.unwrap();
                }
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
}

/// First occurrences per key ascend without a hole, up to the committed number.
async fn check_keys(database: &Database, sent: &[String]) {
    let mut seen: HashMap<i32, i64> = HashMap::new();
    for one in sent {
        let (key, number) = one.split_once(':').unwrap();
        let (key, number): (i32, i64) = (key.parse().unwrap(), number.parse().unwrap());
        let last = seen.entry(key).or_default();
        assert!(number <= *last + 1, "key {key}: {number} came after {last}");
        *last = number.max(*last);
    }
    for key in 0..4 {
        let committed: i64 = database.value(&format!("select n from aggregate where id = {key}")).await;
        assert_eq!(seen.get(&key).copied().unwrap_or(0), committed, "key {key}");
    }
}

const AGGREGATES: &str = "create table aggregate (id int primary key, n bigint not null default 0);
  insert into aggregate (id) select generate_series(0, 3)";

#[tokio::test]
async fn g3_messages_of_one_key_are_sent_in_the_order_of_their_commits() {
    with_database("g3_messages_of_one_key_are_sent_in_the_order_of_their_commits", |database| async move {
        database.run(AGGREGATES).await;
        let writing = tokio::spawn(write_keys(database.clone(), 6, 60));
        let mut relay = Relay::of(&database.store).await;
        while !writing.is_finished() {
            relay.drain().await;
        }
        writing.await.unwrap();
        relay.drain_until(&database, NO_GAPS).await;
        let rows: i64 = database.value("select count(*) from oncebox.outbox").await;
        assert_eq!(relay.sent.len(), usize::try_from(rows).unwrap(), "each exactly once without a crash");
        check_keys(&database, &relay.sent).await;
    })
    .await;
}

/// Shown by persisting the gaps that memory has at the mark, without the rows at gaps that the
/// window still holds.
#[tokio::test]
async fn r2_a_row_at_a_gap_that_is_in_the_window_is_read_again_after_a_crash() {
    with_database("r2_a_row_at_a_gap_that_is_in_the_window_is_read_again_after_a_crash", |database| async move {
        let (mut one, mut two) = (database.connection().await, database.connection().await);
        let mut session = open(&database.store, "relay").await;
        let mut early = one.begin().await.unwrap();
        put(&mut early, "early position, late commit").await;
        put(&mut two, "late position, early commit").await;
        let oldest = session.read(10).await.unwrap();
        session.checkpoint(Mark::default()).await.unwrap();
        early.commit().await.unwrap();
        let newest = session.read(10).await.unwrap();
        session.checkpoint(Mark::default()).await.unwrap();
        assert_eq!((oldest.rows.len(), newest.rows.len(), newest.batch), (1, 1, oldest.batch + 1));
        session.checkpoint(Mark { through: Some(oldest.batch), ..Mark::default() }).await.unwrap();
        assert_eq!((scanned_to(&database).await, gaps(&database).await), (2, "{[1,2)}".to_owned()));
        drop(session);
        assert_eq!(Relay::of(&database.store).await.drain().await, ["early position, late commit"]);
    })
    .await;
}

#[tokio::test]
async fn r2_a_relay_that_dies_at_any_step_loses_nothing_and_reorders_nothing() {
    with_database("r2_a_relay_that_dies_at_any_step_loses_nothing_and_reorders_nothing", |database| async move {
        database.run(AGGREGATES).await;
        let writing = tokio::spawn(write_keys(database.clone(), 8, 150));
        let mut random = fastrand::Rng::with_seed(7);
        let mut sent = Vec::new();
        let (mut deaths, mut quiet) = (BTreeMap::<&str, u32>::new(), 0);
        while quiet < 3 {
            quiet = if writing.is_finished() { quiet + 1 } else { 0 };
            let mut session = open(&database.store, "relay").await;
            // Batches in the window, oldest first.
            let mut window = Vec::new();
            for _ in 0..random.u32(2..30) {
                let batch = session.read(random.usize(1..8)).await.unwrap();
                if quiet == 0 && random.u8(..) < 30 {
                    *deaths.entry("read").or_default() += 1;
                    break;
                }
                session.checkpoint(Mark::default()).await.unwrap();
                if quiet == 0 && random.u8(..) < 30 {
                    *deaths.entry("checkpoint").or_default() += 1;
                    break;
                }
                sent.extend(batch.rows.iter().map(payload));
                window.push(batch.batch);
                if quiet == 0 && random.u8(..) < 30 {
                    *deaths.entry("send").or_default() += 1;
                    break;
                }
                if random.bool() {
                    let upto = random.usize(1..=window.len());
                    let through = window.drain(..upto).next_back();
                    session.checkpoint(Mark { through, ..Mark::default() }).await.unwrap();
                    if quiet == 0 && random.u8(..) < 90 {
                        *deaths.entry("mark").or_default() += 1;
                        break;
                    }
                }
            }
            if quiet > 0 {
                let mut relay = Relay { session, sent: Vec::new() };
                relay.drain_until(&database, NO_GAPS).await;
                sent.append(&mut relay.sent);
            }
        }
        writing.await.unwrap();
        assert!(deaths.len() == 4, "every step was died at: {deaths:?}");
        check_keys(&database, &sent).await;
    })
    .await;
}

/// What is committed while the relay reads must survive a crash before it is sent.
///
/// Shown by answering the checkpoint before its commit (`synchronous_commit = off` in the session):
/// sent messages are gone.
#[tokio::test]
async fn r5_what_was_sent_survives_a_kill_of_the_server_although_its_writer_did_not_wait() {
    let test = "r5_what_was_sent_survives_a_kill_of_the_server_although_its_writer_did_not_wait";
    let Some(mut server) = Server::start(test, "wal_writer_delay = 10s\nwal_writer_flush_after = 0").await else {
        return;
    };
    let url = with_path(&server.url(), "postgres");
    let store = PostgresStore::connect(&StoreOptions::new(url.clone())).await.unwrap();
    store.migrate().await.unwrap();
    let mut writer = PgConnection::connect(&url).await.unwrap();
    writer.execute("set synchronous_commit = off").await.unwrap();
    let mut session = open(&store, "relay").await;
    let mut sent = Vec::new();
    for n in 0..20 {
        put(&mut writer, &n.to_string()).await;
        let batch = session.read(10).await.unwrap();
        // Nothing is sent before this commit, which takes the row of the writer to the disk too.
        session.checkpoint(Mark::default()).await.unwrap();
        sent.extend(batch.rows.iter().map(payload));
    }
    assert_eq!(sent.len(), 20);
    server.kill();
    drop((session, writer));
    server.run().await;
    let mut reader = PgConnection::connect(&url).await.unwrap();
    let there: Vec<String> =
        sqlx::query_scalar("select convert_from(payload, 'UTF8') from oncebox.outbox order by position")
            .fetch_all(&mut reader)
            .await
            .unwrap();
    assert_eq!(there, sent, "a message that was sent does not exist");
    store.close().await;
}
