//! Scripted histories: who draws an id, a position, commits, aborts or prepares, and when.

use std::time::{Duration, Instant};

use oncebox::sqlx::{AssertSqlSafe, Connection, Executor};

use crate::postgres::{Server, on_server, with_database};
use crate::relay::{NO_GAPS, Relay, SOON, gaps, put, scanned_to};

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

/// Shown by taking `pg_snapshot_xmax` of the read as the fence instead of the checkpoint's own id:
/// the first message is lost.
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

/// Shown by leaving the watch over locks out: the gap stays open as long as the other transaction
/// runs.
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

/// Shown by listing the holders of locks by process: a prepared transaction has none, and its row
/// is lost.
#[tokio::test]
async fn r6_a_transaction_that_is_prepared_keeps_its_gap_open_until_it_ends() {
    let test = "r6_a_transaction_that_is_prepared_keeps_its_gap_open_until_it_ends";
    prepared(test, false).await;
}

/// Shown by watching what held the lock instead of its transaction id: PREPARE changes it, and the
/// row is lost.
#[tokio::test]
async fn r6_a_transaction_that_is_prepared_while_it_is_watched_keeps_its_gap_open_until_it_ends() {
    let test = "r6_a_transaction_that_is_prepared_while_it_is_watched_keeps_its_gap_open_until_it_ends";
    prepared(test, true).await;
}

/// A long transaction elsewhere keeps the fence open. A writer is prepared, at once or when its gap
/// is watched, and committed later.
async fn prepared(test: &str, watched: bool) {
    with_database(test, |database| async move {
        let (mut long, mut other) = (database.connection().await, database.connection().await);
        let mut long = long.begin().await.unwrap();
        long.execute("select pg_current_xact_id()").await.unwrap();
        let mut relay = Relay::of(&database.store).await;
        let mut writer = database.connection().await;
        writer.execute("begin").await.unwrap();
        put(&mut writer, "prepared").await;
        put(&mut other, "sent").await;
        assert_eq!(relay.drain().await, ["sent"]);
        let (began, mut writing, mut prepared) = (Instant::now(), Some(writer), None);
        let name = &database.name;
        // Four seconds more than a gap must be old to be watched and closed.
        while prepared.is_none_or(|at: Instant| at.elapsed() < Duration::from_secs(4)) {
            assert!(began.elapsed() < SOON, "the gap is never watched");
            assert_eq!(relay.drain().await, ["sent"]);
            assert_eq!(gaps(&database).await, "{[1,2)}", "prepared: {}", writing.is_none());
            let is_ready = !watched || format!("{:?}", relay.session).contains("Watching(");
            if is_ready && let Some(mut writer) = writing.take() {
                writer.execute(AssertSqlSafe(format!("prepare transaction '{name}'"))).await.unwrap();
                writer.close().await.unwrap();
                prepared = Some(Instant::now());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        other.execute(AssertSqlSafe(format!("commit prepared '{name}'"))).await.unwrap();
        assert_eq!(relay.drain().await, ["sent", "prepared"]);
        long.rollback().await.unwrap();
    })
    .await;
}
