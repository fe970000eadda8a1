//! The gap cursor against the real thing: scripted histories of transactions, a relay that dies at every step, and a server
//! that is killed.
#![cfg(feature = "postgres")]
#![allow(clippy::unwrap_used)]

#[path = "support/postgres.rs"]
mod postgres;
mod support;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use oncebox::sqlx::PgConnection;
use oncebox::sqlx::{AssertSqlSafe, Connection, Executor};
use oncebox::store::postgres::{PostgresSession, PostgresStore};
use oncebox::store::{
    Base, LeaseAnswer, LeaseRequest, Mark, Outbox, OutboxRow, RelaySession, Schema, Severity, enqueue, enqueue_all,
};
use oncebox::{NewMessage, StoreError};
use postgres::{Database, Server, on_server, with_database};

const SOON: Duration = Duration::from_secs(30);

/// A relay without a broker: what it sends is noted.
struct Relay {
    session: PostgresSession,
    sent: Vec<String>,
}

impl Relay {
    async fn of(store: &PostgresStore) -> Self {
        Self { session: open(store, "relay").await, sent: Vec::new() }
    }

    /// Reads, claims, sends and marks until a read gives nothing more.
    async fn drain(&mut self) -> &[String] {
        loop {
            let batch = self.session.read(500).await.unwrap();
            self.session.claim(Mark::default()).await.unwrap();
            self.sent.extend(batch.rows.iter().map(payload));
            let mark = Mark { through: Some(batch.batch), ..Mark::default() };
            self.session.claim(mark).await.unwrap();
            if batch.rows.is_empty() && !batch.more {
                return &self.sent;
            }
        }
    }
}

const NO_GAPS: &str = "select isempty(gaps) from oncebox.shard";

impl Relay {
    /// Drains and tidies until a query is true.
    async fn drain_until(&mut self, database: &Database, query: &str) {
        let began = Instant::now();
        while !database.value::<bool>(query).await {
            assert!(began.elapsed() < SOON, "not within {SOON:?}: {query}");
            self.drain().await;
            self.session.tidy().await.unwrap();
        }
    }
}

fn payload(row: &OutboxRow) -> String {
    String::from_utf8(row.message.payload.clone()).unwrap()
}

fn request(owner: &str) -> LeaseRequest {
    LeaseRequest { shard: 0, owner: owner.to_owned(), length: Duration::from_secs(10) }
}

async fn open(store: &PostgresStore, owner: &str) -> PostgresSession {
    match store.open(&request(owner)).await.unwrap() {
        LeaseAnswer::Taken(session) => session,
        other => panic!("the lease was not given: {other:?}"),
    }
}

fn message(text: &str) -> NewMessage {
    NewMessage::text("payments", "k", text).with_key("acc-7")
}

async fn put(connection: &mut PgConnection, text: &str) {
    enqueue(connection, message(text)).await.unwrap();
}

async fn gaps(database: &Database) -> String {
    database.value("select gaps::text from oncebox.shard").await
}

async fn scanned_to(database: &Database) -> i64 {
    database.value("select scanned_to from oncebox.shard").await
}

#[tokio::test]
async fn r2_a_row_that_commits_late_is_sent_at_its_gap() {
    with_database("r2_a_row_that_commits_late_is_sent_at_its_gap", |database| async move {
        let (mut one, mut two) = (database.connection().await, database.connection().await);
        let mut relay = Relay::of(&database.store).await;
        let mut early = one.begin().await.unwrap();
        put(&mut early, "early position, late commit").await;
        put(&mut two, "late position, early commit").await;
        assert_eq!(relay.drain().await, ["late position, early commit"]);
        assert_eq!((scanned_to(&database).await, gaps(&database).await), (2, "{[1,2)}".to_owned()));
        early.commit().await.unwrap();
        assert_eq!(relay.drain().await, ["late position, early commit", "early position, late commit"]);
        assert_eq!((scanned_to(&database).await, gaps(&database).await), (2, "{}".to_owned()));
    })
    .await;
}

/// Shown by taking `pg_snapshot_xmax` of the read as the fence instead of the claim's own id: the first message is lost.
#[tokio::test]
async fn r3_an_early_id_with_a_late_position_closes_no_gap_of_a_running_writer() {
    let test = "r3_an_early_id_with_a_late_position_closes_no_gap_of_a_running_writer";
    // A server of its own: any long transaction on a shared one would hide the fault.
    let Some(server) = Server::start(test, "fsync = off").await else { return };
    on_server(&server.url(), |database| async move {
        let (mut one, mut two) = (database.connection().await, database.connection().await);
        let mut relay = Relay::of(&database.store).await;
        let mut late = two.begin().await.unwrap();
        late.execute("select pg_current_xact_id()").await.unwrap();
        let mut early = one.begin().await.unwrap();
        put(&mut early, "position 1").await;
        put(&mut late, "position 2").await;
        late.commit().await.unwrap();
        for _ in 0..5 {
            assert_eq!(relay.drain().await, ["position 2"]);
            assert_eq!(gaps(&database).await, "{[1,2)}");
        }
        early.commit().await.unwrap();
        assert_eq!(relay.drain().await, ["position 2", "position 1"]);
        assert_eq!(gaps(&database).await, "{}");
    })
    .await;
}

#[tokio::test]
async fn r2_positions_of_aborted_transactions_and_savepoints_close_by_themselves() {
    with_database("r2_positions_of_aborted_transactions_and_savepoints_close_by_themselves", |database| async move {
        let mut one = database.connection().await;
        let mut relay = Relay::of(&database.store).await;
        let mut aborted = one.begin().await.unwrap();
        put(&mut aborted, "never").await;
        aborted.rollback().await.unwrap();
        let mut whole = one.begin().await.unwrap();
        put(&mut whole, "before").await;
        let mut part = whole.begin().await.unwrap();
        put(&mut part, "never either").await;
        part.rollback().await.unwrap();
        put(&mut whole, "after").await;
        whole.commit().await.unwrap();
        assert_eq!(relay.drain().await, ["before", "after"]);
        relay.drain_until(&database, NO_GAPS).await;
        assert_eq!(scanned_to(&database).await, 4);
        assert_eq!(relay.sent, ["before", "after"]);
    })
    .await;
}

#[tokio::test]
async fn a_long_transaction_elsewhere_stalls_nothing() {
    with_database("a_long_transaction_elsewhere_stalls_nothing", |database| async move {
        let (mut long, mut one) = (database.connection().await, database.connection().await);
        let mut long = long.begin().await.unwrap();
        long.execute("select pg_current_xact_id()").await.unwrap();
        let mut relay = Relay::of(&database.store).await;
        for n in 0..20 {
            put(&mut one, &n.to_string()).await;
            assert_eq!(relay.drain().await.last().unwrap(), &n.to_string());
        }
        assert_eq!(scanned_to(&database).await, 20);
        long.rollback().await.unwrap();
    })
    .await;
}

/// Shown by leaving the watch over locks out: the gap stays open as long as the other transaction runs.
#[tokio::test]
async fn r6_a_gap_of_an_aborted_transaction_closes_although_a_long_one_runs_elsewhere() {
    with_database(
        "r6_a_gap_of_an_aborted_transaction_closes_although_a_long_one_runs_elsewhere",
        |database| async move {
            let (mut long, mut one) = (database.connection().await, database.connection().await);
            let mut long = long.begin().await.unwrap();
            long.execute("select pg_current_xact_id()").await.unwrap();
            let mut relay = Relay::of(&database.store).await;
            let mut aborted = one.begin().await.unwrap();
            put(&mut aborted, "never").await;
            aborted.rollback().await.unwrap();
            put(&mut one, "sent").await;
            assert_eq!(relay.drain().await, ["sent"]);
            assert_eq!(gaps(&database).await, "{[1,2)}");
            relay.drain_until(&database, NO_GAPS).await;
            long.rollback().await.unwrap();
        },
    )
    .await;
}

/// Shown by watching virtual transactions or processes instead of transaction ids: PREPARE changes them and the row is lost.
#[tokio::test]
async fn r6_a_prepared_transaction_keeps_its_gap_open_until_it_ends() {
    with_database("r6_a_prepared_transaction_keeps_its_gap_open_until_it_ends", |database| async move {
        let (mut long, mut other) = (database.connection().await, database.connection().await);
        let mut long = long.begin().await.unwrap();
        long.execute("select pg_current_xact_id()").await.unwrap();
        let mut relay = Relay::of(&database.store).await;
        // Prepared while the locks are watched: first an ordinary transaction, then none that any backend has.
        let mut writer = database.connection().await;
        writer.execute("begin").await.unwrap();
        put(&mut writer, "prepared").await;
        put(&mut other, "sent").await;
        assert_eq!(relay.drain().await, ["sent"]);
        let watched = Instant::now() + Duration::from_secs(4);
        let mut prepared = false;
        let name = &database.name;
        while Instant::now() < watched {
            assert_eq!(relay.drain().await, ["sent"]);
            assert_eq!(gaps(&database).await, "{[1,2)}", "prepared: {prepared}");
            if !prepared && Instant::now() + Duration::from_millis(1_500) > watched {
                writer.execute(AssertSqlSafe(format!("prepare transaction '{name}'"))).await.unwrap();
                prepared = true;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        other.execute(AssertSqlSafe(format!("commit prepared '{name}'"))).await.unwrap();
        assert_eq!(relay.drain().await, ["sent", "prepared"]);
        long.rollback().await.unwrap();
    })
    .await;
}

/// Writers of a few keys, each serialised by its aggregate's row, with aborts, savepoints and pauses; the number in the payload
/// is the order of commits within the key.
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
                let number: i64 =
                    oncebox::sqlx::query_scalar("update aggregate set n = n + 1 where id = $1 returning n")
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

/// Shown by persisting the gaps that memory has at the mark, without the rows at gaps that the window still holds.
#[tokio::test]
async fn r2_a_row_at_a_gap_that_is_in_the_window_is_read_again_after_a_crash() {
    with_database("r2_a_row_at_a_gap_that_is_in_the_window_is_read_again_after_a_crash", |database| async move {
        let (mut one, mut two) = (database.connection().await, database.connection().await);
        let mut session = open(&database.store, "relay").await;
        let mut early = one.begin().await.unwrap();
        put(&mut early, "early position, late commit").await;
        put(&mut two, "late position, early commit").await;
        let oldest = session.read(10).await.unwrap();
        session.claim(Mark::default()).await.unwrap();
        early.commit().await.unwrap();
        let newest = session.read(10).await.unwrap();
        session.claim(Mark::default()).await.unwrap();
        assert_eq!((oldest.rows.len(), newest.rows.len(), newest.batch), (1, 1, oldest.batch + 1));
        session.claim(Mark { through: Some(oldest.batch), ..Mark::default() }).await.unwrap();
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
                let Ok(batch) = session.read(random.usize(1..8)).await else { panic!("read") };
                if quiet == 0 && random.u8(..) < 30 {
                    *deaths.entry("read").or_default() += 1;
                    break;
                }
                session.claim(Mark::default()).await.unwrap();
                if quiet == 0 && random.u8(..) < 30 {
                    *deaths.entry("claim").or_default() += 1;
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
                    session.claim(Mark { through, ..Mark::default() }).await.unwrap();
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

#[tokio::test]
async fn g9_an_owner_whose_lease_was_taken_changes_nothing() {
    with_database("g9_an_owner_whose_lease_was_taken_changes_nothing", |database| async move {
        let mut connection = database.connection().await;
        put(&mut connection, "a").await;
        let mut first = open(&database.store, "first").await;
        let batch = first.read(10).await.unwrap();
        first.claim(Mark::default()).await.unwrap();
        match database.store.open(&request("second")).await.unwrap() {
            LeaseAnswer::HeldBy { owner, left } => {
                assert_eq!(owner, "first");
                assert!(left <= Duration::from_secs(10) && left > Duration::from_secs(5));
            }
            other => panic!("given away: {other:?}"),
        }
        database.run("update oncebox.shard set lease_until = clock_timestamp() - interval '1 second'").await;
        let second = open(&database.store, "second").await;
        assert!(second.epoch() > first.epoch());
        let late = first.claim(Mark { through: Some(batch.batch), ..Mark::default() }).await;
        assert!(matches!(late, Err(StoreError::Fenced(_))), "{late:?}");
        assert!(matches!(first.read(10).await, Err(StoreError::Fenced(_))));
        assert_eq!(scanned_to(&database).await, 0);
        assert!(matches!(first.release().await, Err(StoreError::Fenced(_))));
        second.release().await.unwrap();
        let owners: i64 = database.value("select count(*) from oncebox.shard where owner is not null").await;
        assert_eq!(owners, 0);
    })
    .await;
}

#[tokio::test]
async fn r22_a_lease_that_ends_later_than_its_own_length_counts_as_expired() {
    with_database("r22_a_lease_that_ends_later_than_its_own_length_counts_as_expired", |database| async move {
        drop(open(&database.store, "from a clock that ran ahead").await);
        database.run("update oncebox.shard set lease_until = clock_timestamp() + interval '1 hour'").await;
        open(&database.store, "another").await;
    })
    .await;
}

#[tokio::test]
async fn r7_a_sequence_behind_the_cursor_is_loud_and_nothing_is_sent() {
    with_database("r7_a_sequence_behind_the_cursor_is_loud_and_nothing_is_sent", |database| async move {
        let mut connection = database.connection().await;
        for text in ["a", "b", "c"] {
            put(&mut connection, text).await;
        }
        let mut relay = Relay::of(&database.store).await;
        assert_eq!(relay.drain().await.len(), 3);
        database.run("select setval('oncebox.outbox_position_seq', 1)").await;
        let error = relay.session.read(10).await.unwrap_err().to_string();
        assert!(error.contains("sequence behind cursor"), "{error}");
        let findings = database.store.check().await.unwrap();
        let cursor = findings.iter().find(|finding| finding.name == "cursor").unwrap();
        assert_eq!(cursor.severity, Severity::Refused, "{cursor:?}");
    })
    .await;
}

#[tokio::test]
async fn r1_a_sequence_with_a_cache_is_refused() {
    with_database("r1_a_sequence_with_a_cache_is_refused", |database| async move {
        let refused = |findings: Vec<oncebox::store::Finding>| {
            let refused = findings.into_iter().filter(|finding| finding.severity == Severity::Refused);
            refused.map(|finding| finding.name).collect::<Vec<_>>()
        };
        assert_eq!(refused(database.store.check().await.unwrap()), Vec::<String>::new());
        for (breaks, mends, name) in [
            (
                "alter sequence oncebox.outbox_position_seq cache 50",
                "alter sequence oncebox.outbox_position_seq cache 1",
                "outbox sequence",
            ),
            (
                "alter sequence oncebox.outbox_position_seq owned by oncebox.outbox.position",
                "alter sequence oncebox.outbox_position_seq owned by none",
                "outbox sequence",
            ),
            (
                "alter table oncebox.outbox alter written_by drop default",
                "alter table oncebox.outbox alter written_by set default pg_current_xact_id()",
                "outbox columns",
            ),
            (
                "alter table oncebox.outbox_p1000001 disable trigger refuse_truncate",
                "alter table oncebox.outbox_p1000001 enable trigger refuse_truncate",
                "truncate",
            ),
            (
                "grant insert on oncebox.outbox to oncebox_app",
                "revoke insert on oncebox.outbox from oncebox_app",
                "privileges",
            ),
            (
                "grant execute on function oncebox.enqueue(text, text, json, text, jsonb, text, uuid) to public",
                "revoke execute on function oncebox.enqueue(text, text, json, text, jsonb, text, uuid) from public",
                "doors",
            ),
        ] {
            database.run(breaks).await;
            assert_eq!(refused(database.store.check().await.unwrap()), [name], "{breaks}");
            database.run(mends).await;
        }
        assert_eq!(refused(database.store.check().await.unwrap()), Vec::<String>::new());
    })
    .await;
}

#[tokio::test]
async fn r7_truncate_is_refused_while_unproven_rows_stand() {
    with_database("r7_truncate_is_refused_while_unproven_rows_stand", |database| async move {
        let (mut one, mut two) = (database.connection().await, database.connection().await);
        let tables = ["oncebox.outbox", "oncebox.outbox_p1", "only oncebox.outbox_p1"];
        let refused = |error: oncebox::sqlx::Error| error.to_string().contains("not proven");
        put(&mut one, "a").await;
        for table in tables {
            let error = two.execute(AssertSqlSafe(format!("truncate {table}"))).await.unwrap_err();
            assert!(refused(error), "{table}");
        }
        let mut open_tx = one.begin().await.unwrap();
        put(&mut open_tx, "late").await;
        put(&mut two, "c").await;
        let mut relay = Relay::of(&database.store).await;
        assert_eq!(relay.drain().await, ["a", "c"]);
        open_tx.commit().await.unwrap();
        // The cursor has passed it, its gap has not closed.
        for table in tables {
            let error = two.execute(AssertSqlSafe(format!("truncate {table}"))).await.unwrap_err();
            assert!(refused(error), "{table}");
        }
        assert_eq!(relay.drain().await, ["a", "c", "late"]);
        two.execute("truncate oncebox.outbox_p1").await.unwrap();
        let left: i64 = database.value("select count(*) from oncebox.outbox").await;
        assert_eq!(left, 0);
    })
    .await;
}

/// What is committed while the relay reads must survive a crash before it is sent.
///
/// Shown by answering the claim before its commit (`synchronous_commit = off` in the session): sent messages are gone.
#[tokio::test]
async fn r5_what_was_sent_survives_a_kill_of_the_server_although_its_writer_did_not_wait() {
    let test = "r5_what_was_sent_survives_a_kill_of_the_server_although_its_writer_did_not_wait";
    let Some(mut server) = Server::start(test, "wal_writer_delay = 10s\nwal_writer_flush_after = 0").await else {
        return;
    };
    let url = postgres::with_path(&server.url(), "postgres");
    let store = PostgresStore::connect(&oncebox::store::StoreOptions::new(url.clone())).await.unwrap();
    store.migrate().await.unwrap();
    let mut writer = PgConnection::connect(&url).await.unwrap();
    writer.execute("set synchronous_commit = off").await.unwrap();
    let mut session = open(&store, "relay").await;
    let mut sent = Vec::new();
    for n in 0..20 {
        put(&mut writer, &n.to_string()).await;
        let batch = session.read(10).await.unwrap();
        // Written after the claim's snapshot, before its commit: not sent, so it may be lost.
        session.claim(Mark::default()).await.unwrap();
        sent.extend(batch.rows.iter().map(payload));
    }
    assert_eq!(sent.len(), 20);
    server.kill();
    drop((session, writer));
    server.run().await;
    let mut reader = PgConnection::connect(&url).await.unwrap();
    let there: Vec<String> =
        oncebox::sqlx::query_scalar("select convert_from(payload, 'UTF8') from oncebox.outbox order by position")
            .fetch_all(&mut reader)
            .await
            .unwrap();
    assert_eq!(there, sent, "a message that was sent does not exist");
    store.close().await;
}

/// Moves the end of the ranges near, so that a test meets it: one range up to a thousand, and the DEFAULT partition.
async fn ranges_end_soon(database: &Database) {
    database
        .run(
            "do $$ declare one text; begin
               for one in select relid::text from pg_partition_tree('oncebox.outbox') where isleaf and relid::text <> 'oncebox.outbox_default' loop
                 execute 'alter table oncebox.outbox detach partition ' || one;
                 execute 'drop table ' || one;
               end loop;
             end $$;
             select oncebox.attach_outbox_range(1, 1001, -1);
             update oncebox.setting set value = 200 where name = 'outbox_range_rows';
             update oncebox.setting set value = 0 where name = 'outbox_retention_seconds'",
        )
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r8_no_insert_fails_while_partitions_are_made_and_freed() {
    with_database("r8_no_insert_fails_while_partitions_are_made_and_freed", |database| async move {
        ranges_end_soon(&database).await;
        let stop = Arc::new(AtomicBool::new(false));
        let mut writers = Vec::new();
        for writer in 0..4 {
            let (database, stop) = (database.clone(), stop.clone());
            writers.push(tokio::spawn(async move {
                let mut connection = database.connection().await;
                let mut written = 0;
                while !stop.load(Ordering::Relaxed) {
                    let many = (0..20).map(|n| message(&format!("{writer}-{n}"))).collect();
                    // Any error fails the test: nothing here may be refused.
                    enqueue_all(&mut connection, many).await.unwrap();
                    written += 20;
                }
                written
            }));
        }
        let mut relay = Relay::of(&database.store).await;
        let ranges = "select count(*) from pg_partition_tree('oncebox.outbox') where isleaf";
        let began = Instant::now();
        while began.elapsed() < SOON && (scanned_to(&database).await < 6_000 || database.value::<i64>(ranges).await < 4)
        {
            relay.drain().await;
            relay.session.tidy().await.unwrap();
        }
        stop.store(true, Ordering::Relaxed);
        let mut written = 0;
        for writer in writers {
            written += writer.await.unwrap();
        }
        relay.drain().await;
        assert_eq!(relay.sent.len(), written);
        assert!(database.value::<i64>(ranges).await >= 4, "ranges were made");
        relay.drain_until(&database, "select not exists (select 1 from oncebox.outbox_p1)").await;
        assert_eq!(
            database
                .value::<i64>(
                    "select count(*) from oncebox.outbox where position > (select scanned_to from oncebox.shard)"
                )
                .await,
            0
        );
    })
    .await;
}

#[tokio::test]
async fn r8_an_open_reader_delays_new_partitions_and_no_writer() {
    with_database("r8_an_open_reader_delays_new_partitions_and_no_writer", |database| async move {
        ranges_end_soon(&database).await;
        let (mut reader, mut writer) = (database.connection().await, database.connection().await);
        let many = (0..700).map(|n| message(&n.to_string())).collect();
        enqueue_all(&mut writer, many).await.unwrap();
        let mut relay = Relay::of(&database.store).await;
        relay.drain().await;
        let mut reading = reader.begin().await.unwrap();
        reading.execute("select count(*) from oncebox.outbox").await.unwrap();
        let ranges = "select count(*) from pg_partition_tree('oncebox.outbox') where isleaf";
        let before: i64 = database.value(ranges).await;
        let writing = async {
            let mut longest = Duration::ZERO;
            for n in 0..50 {
                let began = Instant::now();
                put(&mut writer, &n.to_string()).await;
                longest = longest.max(began.elapsed());
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            longest
        };
        let (longest, tidied) = tokio::join!(writing, async { relay.session.tidy().await });
        tidied.unwrap();
        assert!(longest < Duration::from_millis(1_000), "a writer waited {longest:?} behind the reader");
        assert_eq!(database.value::<i64>(ranges).await, before, "the reader is in the way");
        reading.rollback().await.unwrap();
        relay.drain_until(&database, &format!("select ({ranges}) > {before}")).await;
    })
    .await;
}
