//! What a relayed row costs the database.

use oncebox::NewMessage;
use oncebox::sqlx::Executor;
use oncebox::store::{Mark, enqueue_all};

use crate::postgres::{Server, on_server};
use crate::relay::open;
use crate::support::eventually;

/// Only the row of the shard is written, and it stays in its page. Shown by marking rows in the
/// outbox itself: 700 bytes a row.
#[tokio::test]
async fn a_relayed_row_costs_next_to_no_wal_and_leaves_next_to_no_dead_tuple() {
    let test = "a_relayed_row_costs_next_to_no_wal_and_leaves_next_to_no_dead_tuple";
    // A server of its own: on a shared one the others write WAL too.
    let settings = "fsync = off\nautovacuum = off\ncheckpoint_timeout = 1h\nwal_level = replica";
    let Some(server) = Server::start(test, settings).await else { return };
    on_server(&server.url(), |database| async move {
        const ROWS: i32 = 50_000;
        let mut connection = database.connection().await;
        for n in 0..ROWS / 1_000 {
            let one = |i: i32| NewMessage::text("t", "k", "x".repeat(100)).with_key((n * i % 100).to_string());
            enqueue_all(&mut connection, (0..1_000).map(one).collect()).await.unwrap();
        }
        for settle in ["vacuum (analyze) oncebox.outbox", "checkpoint"] {
            connection.execute(settle).await.unwrap();
        }
        let mut session = open(&database.store, "relay").await;
        let before: String = database.value("select pg_current_wal_lsn()::text").await;
        let (mut read, mut mark) = (0, Mark::default());
        loop {
            let batch = session.read(1_000).await.unwrap();
            session.checkpoint(std::mem::take(&mut mark)).await.unwrap();
            mark = Mark { through: Some(batch.batch), ..Mark::default() };
            read += batch.rows.len();
            if batch.rows.is_empty() {
                break;
            }
        }
        assert_eq!(read, usize::try_from(ROWS).unwrap());
        let written: f64 =
            database.value(&format!("select pg_wal_lsn_diff(pg_current_wal_lsn(), '{before}')::float8")).await;
        let rows = f64::from(ROWS);
        assert!(written / rows <= 20.0, "{} bytes of WAL a row", written / rows);
        let updates = "select n_tup_upd from pg_stat_user_tables where relid = 'oncebox.shard'::regclass";
        drop(session);
        eventually("the statistics", std::time::Duration::from_secs(30), || async {
            (database.value::<i64>(updates).await >= i64::from(ROWS) / 1_000).then_some(())
        })
        .await;
        let in_page: bool = database
            .value("select n_tup_upd = n_tup_hot_upd from pg_stat_user_tables where relid = 'oncebox.shard'::regclass")
            .await;
        assert!(in_page, "an update of the shard left its page");
        let dead: i64 = database.value("select sum(n_dead_tup)::bigint from pg_stat_user_tables").await;
        assert!(f64::from(i32::try_from(dead).unwrap()) / rows <= 0.01, "{dead} dead tuples");
    })
    .await;
}

/// The plans are those that the server says of the relay's own read.
/// Shown to fail: with an `order by` on the outer query of the read (a Sort appears).
#[tokio::test]
async fn r9_the_read_is_ordered_index_scans_and_no_sort() {
    let test = "r9_the_read_is_ordered_index_scans_and_no_sort";
    let settings = "fsync = off\nshared_preload_libraries = 'auto_explain'\nauto_explain.log_min_duration = 0\n\
                    auto_explain.log_analyze = on\nauto_explain.log_timing = off";
    let Some(server) = Server::start(test, settings).await else { return };
    on_server(&server.url(), |database| async move {
        // Rows on both sides of a bound between partitions, with holes.
        database
            .run(
                "select setval('oncebox.outbox_position_seq', 999000);
                 insert into oncebox.outbox (bucket, message_id, topic, kind, payload, content_type)
                 select i % 256, gen_random_uuid(), 't', 'k', repeat('x', 300)::bytea, 'c' from generate_series(1, 3000) i;
                 delete from oncebox.outbox where position % 10 = 0;
                 analyze oncebox.outbox;
                 update oncebox.shard set scanned_to = 1000099,
                   gaps = '{[999010,999011),[999020,999021),[1000010,1000011)}'",
            )
            .await;
        for last in [255, 127] {
            database.run(&format!("update oncebox.shard set bucket_to = {last}")).await;
            let mut session = open(&database.store, &format!("up to {last}")).await;
            assert!(!session.read(100).await.unwrap().rows.is_empty());
            session.release().await.unwrap();
            let log: String = database.value("select pg_read_file(current_setting('data_directory') || '/../log')").await;
            let is_read = |plan: &&str| plan.contains("Index Scan using outbox_p");
            let plan = log.split("Query Text:").filter(is_read).last().expect("a plan of the read");
            let nodes: Vec<&str> = plan.lines().map(|line| line.trim_start_matches(['\t', ' ', '-', '>'])).collect();
            for node in &nodes {
                assert!(!node.starts_with("Sort  (") && !node.starts_with("Incremental Sort  ("), "{plan}");
                assert!(!node.starts_with("Seq Scan on outbox") || node.contains("outbox_position_seq"), "{plan}");
            }
            let scans = nodes.iter().filter(|node| node.starts_with("Index Scan using outbox_p"));
            let read = scans.filter_map(|scan| {
                let rows = scan.split("actual rows=").nth(1)?.split([' ', '.']).next()?;
                rows.parse::<u32>().ok()
            });
            // Of 1,700 rows in the tail no more are read than the limit lets through.
            assert!(read.max().expect("index scans") <= 100, "{plan}");
        }
    })
    .await;
}
