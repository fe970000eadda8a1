//! Partitions never stop the application, and nothing that is not proven is freed (R7, R8).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use oncebox::sqlx::{self, AssertSqlSafe, Connection, Executor};
use oncebox::store::{ConsumerSpec, Inbox, enqueue_all};

use crate::postgres::{Database, with_database};
use crate::relay::{NO_GAPS, Relay, SOON, message, put, scanned_to};

const RANGES: &str = "select count(*) from pg_partition_tree('oncebox.outbox') where isleaf";

/// Moves the end of the ranges near, so that a test meets it: one range up to a thousand, and the
/// DEFAULT partition.
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

/// Shown by beginning a range 200 positions above the last one whatever the rate, without the
/// second look under the lock: inserts that were on their way to DEFAULT fail with 23514.
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
        let began = Instant::now();
        let stands = "select exists (select 1 from oncebox.outbox_p1)";
        while database.value::<i64>(RANGES).await < 4
            || scanned_to(&database).await < 6_000
            || database.value::<bool>(stands).await
        {
            assert!(began.elapsed() < 2 * SOON, "no ranges were made and freed within {:?}", 2 * SOON);
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
        let before: i64 = database.value(RANGES).await;
        // A look within 200 ms of the first read does not know the rate yet, and makes nothing.
        tokio::time::sleep(Duration::from_millis(250)).await;
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
        let tidying = async {
            let began = Instant::now();
            relay.session.tidy().await.unwrap();
            began.elapsed()
        };
        let (longest, waited) = tokio::join!(writing, tidying);
        assert!(waited > Duration::from_millis(140), "it met no reader: {waited:?}");
        // Behind the reader it would be as long as the tidying waits; its own commit is as slow as
        // the disk.
        assert!(longest < Duration::from_secs(4), "a writer waited {longest:?} behind the reader");
        assert_eq!(database.value::<i64>(RANGES).await, before, "the reader is in the way");
        reading.rollback().await.unwrap();
        relay.drain_until(&database, &format!("select ({RANGES}) > {before}")).await;
    })
    .await;
}

/// A row of a page of its own each, nearly: tables grow large with few rows.
const SPARSE: &str = "alter table oncebox.outbox_default set (fillfactor = 10);
    alter table oncebox.inbox_timed_default set (fillfactor = 10)";

/// Shown by making ranges only beside a small DEFAULT partition, and by emptying it only as a
/// whole.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r8_a_large_default_partition_with_a_young_row_is_freed_and_ranges_are_made_beside_it() {
    let test = "r8_a_large_default_partition_with_a_young_row_is_freed_and_ranges_are_made_beside_it";
    with_database(test, |database| async move {
        ranges_end_soon(&database).await;
        database.run(SPARSE).await;
        let mut writer = database.connection().await;
        for from in (0..55_000).step_by(5_000) {
            let many = (from..from + 5_000).map(|n| message(&n.to_string())).collect();
            enqueue_all(&mut writer, many).await.unwrap();
        }
        let bytes: i64 = database.value("select pg_relation_size('oncebox.outbox_default')").await;
        assert!(bytes > 64 << 20, "{bytes}");
        // Its newest row is young, as under traffic it always is.
        database
            .run(
                "update oncebox.setting set value = 3600 where name = 'outbox_retention_seconds';
                 update oncebox.outbox set created_at = created_at - interval '2 hours' where position < 55000",
            )
            .await;
        let mut relay = Relay::of(&database.store).await;
        relay
            .drain_until(
                &database,
                "select (select count(*) from oncebox.outbox_default) = 1
                    and (select count(*) from pg_partition_tree('oncebox.outbox') where isleaf) > 2
                    and not exists (select 1 from pg_constraint where conname = 'outbox_default_ahead')",
            )
            .await;
        put(&mut writer, "last").await;
        relay.drain().await;
        assert_eq!(relay.sent.len(), 55_001, "none is lost, none is sent again");
    })
    .await;
}

/// Shown by waiting for TRUNCATE alone: a transaction that wrote there is in its way.
#[tokio::test]
async fn r8_old_rows_of_the_default_partition_go_though_a_writer_is_always_in_it() {
    with_database("r8_old_rows_of_the_default_partition_go_though_a_writer_is_always_in_it", |database| async move {
        ranges_end_soon(&database).await;
        let (mut writer, mut other) = (database.connection().await, database.connection().await);
        enqueue_all(&mut writer, (0..1_500).map(|n| message(&n.to_string())).collect()).await.unwrap();
        let mut open_tx = other.begin().await.unwrap();
        put(&mut open_tx, "late").await;
        let mut relay = Relay::of(&database.store).await;
        relay.drain_until(&database, "select not exists (select 1 from oncebox.outbox_default)").await;
        open_tx.commit().await.unwrap();
        relay.drain_until(&database, NO_GAPS).await;
        assert!(relay.sent.iter().any(|text| text == "late"), "what was not proven is not freed");
    })
    .await;
}

/// A consumer is registered: that makes ranges of its inbox, and drops those that are empty.
async fn register(database: &Database, name: &str) {
    let spec = ConsumerSpec { name: name.into(), id_rule: "envelope".into(), accept: false };
    database.store.register(&spec).await.unwrap();
}

/// It would refuse inserts once positions come to the ranges that it was for.
#[tokio::test]
async fn r8_a_check_that_a_process_left_on_the_default_partition_goes() {
    with_database("r8_a_check_that_a_process_left_on_the_default_partition_goes", |database| async move {
        for (table, check) in
            [("outbox", "position < 9000000 or position >= 9100000"), ("inbox_timed", "received_at is not null")]
        {
            let left = format!(
                "alter table oncebox.{table}_default add constraint {table}_default_ahead check ({check}) not valid"
            );
            database.run(&left).await;
        }
        register(&database, "c").await;
        let mut relay = Relay::of(&database.store).await;
        relay
            .drain_until(
                &database,
                "select not exists (select 1 from pg_constraint where conname like '%default_ahead')",
            )
            .await;
    })
    .await;
}

/// A partition of a million positions takes weeks to fill where a message comes every minute.
#[tokio::test]
async fn proven_rows_go_after_their_retention_though_their_partition_is_never_full() {
    with_database("proven_rows_go_after_their_retention_though_their_partition_is_never_full", |database| async move {
        let mut connection = database.connection().await;
        put(&mut connection, "a").await;
        put(&mut connection, "b").await;
        let mut relay = Relay::of(&database.store).await;
        relay.drain().await;
        database
            .run("update oncebox.outbox set created_at = created_at - interval '25 hours' where position = 1")
            .await;
        relay.drain_until(&database, "select count(*) = 1 from oncebox.outbox").await;
        assert_eq!(database.value::<i64>("select min(position) from oncebox.outbox").await, 2);
    })
    .await;
}

/// Each row of this partition takes a while to delete, as one with a large payload does.
async fn deletes_slowly(database: &Database, partition: &str, seconds: f32) {
    let slow = format!(
        "create function oncebox.slow() returns trigger language plpgsql as
           $$ begin perform pg_sleep({seconds}); return old; end $$;
         create trigger slow before delete on oncebox.{partition} for each row execute function oncebox.slow();
         update oncebox.setting set value = 0 where name = 'outbox_retention_seconds'"
    );
    database.run(&slow).await;
}

/// Shown by: pages of one size. The server cut each try short after five seconds, in which nothing
/// was sent, and no row ever went.
#[tokio::test]
async fn g11_proven_rows_go_in_smaller_pages_where_a_page_takes_too_long() {
    with_database("g11_proven_rows_go_in_smaller_pages_where_a_page_takes_too_long", |database| async move {
        let mut connection = database.connection().await;
        enqueue_all(&mut connection, (0..600).map(|n| message(&n.to_string())).collect()).await.unwrap();
        let mut relay = Relay::of(&database.store).await;
        relay.drain().await;
        deletes_slowly(&database, "outbox_p1", 0.01).await;
        relay.drain_until(&database, "select not exists (select 1 from oncebox.outbox)").await;
        assert_eq!(relay.sent.len(), 600);
    })
    .await;
}

/// Shown by: halving the page whatever failed. After a wait for the lock that another process had,
/// the three rows went one by one.
#[tokio::test]
async fn a_page_of_proven_rows_becomes_no_smaller_because_another_process_tidies() {
    with_database("a_page_of_proven_rows_becomes_no_smaller_because_another_process_tidies", |database| async move {
        let mut connection = database.connection().await;
        enqueue_all(&mut connection, ["a", "b", "c"].map(message).into()).await.unwrap();
        let mut relay = Relay::of(&database.store).await;
        relay.drain().await;
        database.run("update oncebox.setting set value = 0 where name = 'outbox_retention_seconds'").await;
        let mut other = connection.begin().await.unwrap();
        other.execute("select pg_advisory_xact_lock(x'6f6e636570617274'::bit(64)::bigint)").await.unwrap();
        let began = Instant::now();
        loop {
            let tried = Instant::now();
            relay.session.tidy().await.unwrap();
            // It waited for the lock.
            if tried.elapsed() > Duration::from_millis(140) {
                break;
            }
            assert!(began.elapsed() < SOON, "no page was tried within {SOON:?}");
        }
        other.rollback().await.unwrap();
        relay.drain_until(&database, "select count(*) < 3 from oncebox.outbox").await;
        assert_eq!(database.value::<i64>("select count(*) from oncebox.outbox").await, 0);
    })
    .await;
}

/// Shown by: dropping what was found empty without another look. A transaction that had drawn its
/// position long ago writes its row between the two.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r8_a_partition_that_got_a_row_after_it_was_found_empty_is_not_dropped() {
    with_database("r8_a_partition_that_got_a_row_after_it_was_found_empty_is_not_dropped", |database| async move {
        ranges_end_soon(&database).await;
        // The positions of forty small ranges are drawn, and have no row.
        database
            .run(
                "alter table oncebox.outbox detach partition oncebox.outbox_p1;
                 drop table oncebox.outbox_p1;
                 select oncebox.attach_outbox_range(1 + 10 * (i - 1), 1 + 10 * i, -1) from generate_series(1, 40) i;
                 select oncebox.attach_outbox_range(401, 100001, -1);
                 select setval('oncebox.outbox_position_seq', 400);
                 update oncebox.setting set value = 86400 where name = 'outbox_retention_seconds'",
            )
            .await;
        put(&mut database.connection().await, "a").await;
        let mut relay = Relay::of(&database.store).await;
        assert_eq!(relay.drain().await, ["a"]);
        assert_eq!(scanned_to(&database).await, 401);
        deletes_slowly(&database, "outbox_p401", 0.6).await;
        // While the page of proven rows is deleted, the empty ranges were looked at already.
        let late = async {
            let asleep = "select exists (select 1 from pg_stat_activity
                where wait_event = 'PgSleep' and datname = current_database())";
            let began = Instant::now();
            while !database.value::<bool>(asleep).await {
                assert!(began.elapsed() < SOON, "no page was deleted within {SOON:?}");
            }
            database
                .run(
                    "insert into oncebox.outbox (position, bucket, message_id, topic, kind, payload, content_type)
                     values (5, 0, gen_random_uuid(), 't', 'k', 'late', 'text/plain')",
                )
                .await;
        };
        let tidied =
            relay.drain_until(&database, "select not exists (select 1 from oncebox.outbox where position > 400)");
        tokio::join!(late, tidied);
        let left: i64 = database.value("select count(*) from oncebox.outbox where position = 5").await;
        assert_eq!(left, 1);
        // The others are dropped, by a session that has not failed to.
        drop(relay);
        let before: i64 = database.value(RANGES).await;
        let dropped = format!("select ({RANGES}) < {before}");
        Relay::of(&database.store).await.drain_until(&database, &dropped).await;
    })
    .await;
}

/// The hours of the day in ten days for whose ids the inbox has no range.
const AROUND: &str = "
select array(select extract(hour from at)::int from generate_series(
    date_trunc('day', now() at time zone 'UTC') + interval '10 days', date_trunc('day', now() at time zone 'UTC') + interval '10 days 23 hours',
    interval '1 hour') at
  where not exists (
    select 1 from pg_inherits i join pg_class c on c.oid = i.inhrelid
     cross join lateral regexp_match(pg_get_expr(c.relpartbound, c.oid), 'FROM \\(''([0-9a-f-]+)''\\) TO \\(''([0-9a-f-]+)''\\)') bound
     where i.inhparent = 'oncebox.inbox_timed'::regclass and bound is not null
       and oncebox.uuid_bound(at at time zone 'UTC') >= bound[1]::uuid and oncebox.uuid_bound(at at time zone 'UTC') < bound[2]::uuid))";

/// Shown by ending at the first range that DEFAULT has a row of: nothing above it is ever made.
#[tokio::test]
async fn r8_a_redriven_id_from_the_future_stops_no_inbox_range() {
    with_database("r8_a_redriven_id_from_the_future_stops_no_inbox_range", |database| async move {
        database
            .run(
                "update oncebox.setting set value = 14 where name = 'inbox_ranges_ahead';
                 insert into oncebox.consumer (name, id_rule) values ('ledger', 'envelope');
                 insert into oncebox.inbox_timed (message_id, content_hash, consumer_id)
                   select oncebox.uuid_bound(date_trunc('day', now() at time zone 'UTC') at time zone 'UTC' + interval '10 days 12 hours'),
                          gen_random_uuid(), consumer_id from oncebox.consumer",
            )
            .await;
        register(&database, "ledger").await;
        let above: i64 = database.value(
            "select count(*) from pg_tables where schemaname = 'oncebox'
                and tablename > 'inbox_timed_p' || to_char(now() at time zone 'UTC' + interval '11 days', 'YYYYMMDD') and tablename like 'inbox_timed_p2%'",
        ).await;
        assert!(above >= 3, "{above} ranges above the id");
        assert_eq!(database.value::<Vec<i32>>(AROUND).await, [12], "only its own second stands in DEFAULT");
    })
    .await;
}

/// Attached at once, as beside a small one, each range would be scanned for under a lock that holds
/// up every insert. One look then makes all missing ranges; in the background it makes one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r8_inbox_ranges_are_made_beside_a_large_default_partition() {
    with_database("r8_inbox_ranges_are_made_beside_a_large_default_partition", |database| async move {
        database.run(SPARSE).await;
        database
            .run(
                "update oncebox.setting set value = 12 where name = 'inbox_ranges_ahead';
                 insert into oncebox.consumer (name, id_rule) values ('ledger', 'envelope');
                 insert into oncebox.inbox_timed (message_id, content_hash, consumer_id)
                   select oncebox.uuid_bound(now() - interval '90 days' + n * interval '1 second'), gen_random_uuid(), consumer_id
                     from oncebox.consumer, generate_series(1, 120000) n",
            )
            .await;
        let bytes: i64 = database.value("select pg_relation_size('oncebox.inbox_timed_default')").await;
        assert!(bytes > 64 << 20, "{bytes}");
        let ranges = "select count(*) from pg_partition_tree('oncebox.inbox_timed') where isleaf";
        let before: i64 = database.value(ranges).await;
        register(&database, "ledger").await;
        let made = format!(
            "select ({ranges}) > {before} and not exists (select 1 from pg_constraint where conname = 'inbox_timed_default_ahead')"
        );
        let began = Instant::now();
        while !database.value::<bool>(&made).await {
            assert!(began.elapsed() < SOON, "no range was made within {SOON:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert_eq!(database.value::<i64>(ranges).await, before + 1);
    })
    .await;
}

/// A purge deletes row by row and leaves empty ranges. Ids of their time go to DEFAULT afterwards.
#[tokio::test]
async fn r8_an_inbox_range_that_is_past_and_empty_goes_whole() {
    with_database("r8_an_inbox_range_that_is_past_and_empty_goes_whole", |database| async move {
        database
            .run(
                "insert into oncebox.consumer (name, id_rule) values ('ledger', 'envelope');
                 select oncebox.attach_inbox_range(day, day + interval '1 day') from generate_series(
                   date_trunc('day', now() at time zone 'UTC') at time zone 'UTC' - interval '9 days',
                   date_trunc('day', now() at time zone 'UTC') at time zone 'UTC' - interval '8 days', interval '1 day') day;
                 insert into oncebox.inbox_timed (message_id, content_hash, consumer_id)
                   select oncebox.uuid_bound(now() - interval '9 days'), gen_random_uuid(), consumer_id from oncebox.consumer",
            )
            .await;
        let past = "select count(*) from pg_tables where schemaname = 'oncebox' and tablename like 'inbox_timed_p2%'
            and tablename < 'inbox_timed_p' || to_char(now() at time zone 'UTC' - interval '3 days', 'YYYYMMDD')";
        assert_eq!(database.value::<i64>(past).await, 2);
        register(&database, "ledger").await;
        assert_eq!(database.value::<i64>(past).await, 1, "the one that holds a row stays");
        assert_eq!(database.value::<i64>("select count(*) from oncebox.inbox").await, 1);
    })
    .await;
}
