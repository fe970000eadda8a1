//! Partitions never stop the application, and nothing that is not proven is freed (R7, R8).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use oncebox::sqlx::{self, AssertSqlSafe, Connection, Executor};
use oncebox::store::{RelaySession, enqueue_all};

use crate::postgres::{Database, with_database};
use crate::relay::{Relay, SOON, message, put, scanned_to};

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

#[tokio::test]
async fn r7_truncate_is_refused_while_unproven_rows_stand() {
    with_database("r7_truncate_is_refused_while_unproven_rows_stand", |database| async move {
        let (mut one, mut two) = (database.connection().await, database.connection().await);
        let tables = ["oncebox.outbox", "oncebox.outbox_p1", "only oncebox.outbox_p1"];
        let refused = |error: sqlx::Error| error.to_string().contains("not proven");
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

/// Shown by beginning a range 200 positions above the last one whatever the rate, without the second look under the lock: inserts
/// that were on their way to DEFAULT fail with 23514.
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
        while database.value::<i64>(ranges).await < 4 || scanned_to(&database).await < 6_000 {
            assert!(began.elapsed() < 2 * SOON, "no ranges were made within {:?}", 2 * SOON);
            relay.step().await;
            relay.session.tidy().await.unwrap();
        }
        stop.store(true, Ordering::Relaxed);
        let mut written = 0;
        for writer in writers {
            written += writer.await.unwrap();
        }
        relay.drain().await;
        assert_eq!(relay.sent.len(), written);
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
        // Behind the reader it would be as long as the tidying waits; its own commit is as slow as the disk.
        assert!(longest < Duration::from_secs(4), "a writer waited {longest:?} behind the reader");
        assert_eq!(database.value::<i64>(ranges).await, before, "the reader is in the way");
        reading.rollback().await.unwrap();
        relay.drain_until(&database, &format!("select ({ranges}) > {before}")).await;
    })
    .await;
}
