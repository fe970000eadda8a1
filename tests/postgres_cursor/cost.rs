//! What a relayed row costs the database.

use oncebox::NewMessage;
use oncebox::sqlx::Executor;
use oncebox::store::{Mark, RelaySession, enqueue_all};

use crate::postgres::{Server, on_server};
use crate::relay::open;
use crate::support::eventually;

/// Only the row of the shard is written, and it stays in its page. Shown by dropping its fillfactor (updates leave the page and
/// the index is written too), and by marking rows in the outbox itself.
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
            session.claim(std::mem::take(&mut mark)).await.unwrap();
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
