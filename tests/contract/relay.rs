//! The relay: what reaches the broker, in which order, and what it does while it cannot.

use std::sync::Arc;
use std::time::{Duration, Instant};

use oncebox::broker::Broker;
use oncebox::broker::embedded::{EmbeddedBroker, EmbeddedConfig};
use oncebox::store::sqlite::SqliteStore;
use oncebox::store::{LeaseAnswer, LeaseRequest, Mark, Outbox};
use oncebox::{RelayOptions, RunEnd, StoreError};
use oncebox_testkit::memory::{Fault, matching};

use sqlx::Connection;
use sqlx::sqlite::SqliteConnection;
use tokio::sync::Semaphore;

use super::kit::Sql;
use super::kit::{SOON, World, first_occurrences, message, relay_options, sqlite};
use super::standstill::Standstill;
use super::support::eventually;
use super::troubled::Troubled;

#[tokio::test]
async fn g1_a_message_exists_exactly_when_its_transaction_committed() {
    let world = sqlite().await;
    world.store.enqueue_all(vec![message("t", "a1")], false).await;
    world.enqueue("t", &["a2"]).await;
    let relay = world.relay(RelayOptions { until_empty: true, ..relay_options() });
    assert_eq!(relay.ended().await.unwrap(), RunEnd::Idle);
    assert_eq!(world.published("t").await, ["a2"]);
}

#[tokio::test]
async fn g2_every_committed_message_reaches_the_broker_whatever_sessions_do() {
    let world = sqlite().await;
    let names: Vec<String> = (0..60).map(|n| format!("{}{n}", ["a", "b", "c"][n % 3])).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let faults = world.broker.faults();
    faults.on_publish(Fault::BreakAfter, matching::nth(7));
    faults.on_publish(Fault::BreakBefore, matching::nth(30));
    faults.on_publish(Fault::AppendTwice, matching::every(11));
    world.enqueue("t", &names).await;
    let relay = world.relay(RelayOptions { batch_rows: 10, ..relay_options() });
    world.until_published("t", &names).await;
    world.until_status("all is marked", |status| status.pending == 0 && status.dead == 0 && status.held == 0).await;
    relay.end().await;
}

#[tokio::test]
async fn g3_r15_a_refusal_that_puts_the_session_in_doubt_drops_it_whole_and_keeps_first_occurrences_in_order() {
    let world = sqlite().await;
    world.broker.faults().on_publish(Fault::RefuseSession("out of order".into()), matching::nth(3));
    world.enqueue("t", &["a1", "a2", "a3", "a4", "b1", "a5"]).await;
    let before = world.status().await.shards[0].epoch;
    let relay = world.relay(relay_options());
    eventually("all are there", SOON, || async {
        Some(first_occurrences(world.published("t").await)).filter(|seen| seen.len() == 6)
    })
    .await;
    let of_a: Vec<String> =
        first_occurrences(world.published("t").await).into_iter().filter(|name| name.starts_with('a')).collect();
    assert_eq!(of_a, ["a1", "a2", "a3", "a4", "a5"]);
    let status = world.until_status("nothing is dead", |status| status.pending == 0 && status.dead == 0).await;
    // The broker in memory takes nothing of a key behind a refusal, so order alone shows nothing.
    assert_eq!(status.shards[0].epoch, before + 2, "the session in doubt ended, and the next one did not");
    relay.end().await;
}

#[tokio::test]
async fn g10_a_broker_that_is_away_burns_nothing_and_the_relay_resumes_by_itself() {
    let world = sqlite().await;
    let relay = world.relay(relay_options());
    world.enqueue("t", &["a1"]).await;
    world.until_published("t", &["a1"]).await;
    world.broker.faults().away(Some("the cable"));
    world.enqueue("t", &["a2", "a3"]).await;
    eventually("the state is visible", SOON, || async { world.says("the cable").then_some(()) }).await;
    let status = world.status().await;
    assert_eq!((status.pending, status.dead, status.held), (2, 0, 0));
    world.broker.faults().away(None);
    world.until_published("t", &["a1", "a2", "a3"]).await;
    eventually("ready again", SOON, || async { world.health.is_ready().then_some(()) }).await;
    relay.end().await;
}

#[tokio::test]
async fn a_broker_that_was_blocked_is_shown_and_then_shown_no_more() {
    let world = sqlite().await;
    let relay = world.relay(relay_options());
    world.enqueue("t", &["a0"]).await;
    world.until_published("t", &["a0"]).await;
    world.broker.faults().block(Some("memory alarm"));
    world.enqueue("t", &["a1"]).await;
    eventually("shown as blocked", SOON, || async { world.says("memory alarm").then_some(()) }).await;
    world.broker.faults().block(None);
    world.until_published("t", &["a0", "a1"]).await;
    eventually("ready again", SOON, || async { world.health.is_ready().then_some(()) }).await;
    relay.end().await;
}

/// Shown to fail: without a message on its way nothing was shown, however long the broker was away.
#[tokio::test]
async fn a_broker_that_stays_blocked_is_shown_also_while_there_is_nothing_to_send() {
    let world = sqlite().await;
    let relay = world.relay(relay_options());
    eventually("ready", SOON, || async { world.health.is_ready().then_some(()) }).await;
    world.broker.faults().block(Some("no broker can be reached"));
    let says = || world.says("the broker is blocked: no broker can be reached").then_some(());
    eventually("shown as blocked", SOON, || async { says() }).await;
    assert!(!world.health.is_ready(), "{:?}", world.health.lines());
    world.broker.faults().block(None);
    eventually("ready again", SOON, || async { world.health.is_ready().then_some(()) }).await;
    relay.end().await;
}

/// Shown to fail: it stayed ready until the broker's client gave up, ten seconds for each host.
#[tokio::test]
async fn a_broker_that_opens_no_session_after_a_doubt_and_says_nothing_is_shown() {
    let world = sqlite().await;
    let broker = Arc::new(Troubled { gate: Semaphore::new(1), ..Troubled::new(&world.broker) });
    let relay = world.relay_to(Arc::clone(&broker) as Arc<dyn Broker>, relay_options());
    world.enqueue("t", &["a1"]).await;
    world.until_published("t", &["a1"]).await;
    eventually("ready", SOON, || async { world.health.is_ready().then_some(()) }).await;
    world.broker.faults().on_publish(Fault::BreakBefore, matching::times(1, matching::topic("t")));
    world.enqueue("t", &["a2"]).await;
    let says = || world.says("waits for the broker: it does not answer").then_some(());
    eventually("it says so", SOON, || async { says() }).await;
    assert!(!world.health.is_ready(), "{:?}", world.health.lines());
    broker.gate.add_permits(1_000);
    world.until_published("t", &["a1", "a2"]).await;
    eventually("ready again", SOON, || async { world.health.is_ready().then_some(()) }).await;
    relay.end().await;
}

/// A full disk of the broker's file, which here is a file that another process does not let go.
/// Shown to fail on the code before: the first message was tried alone three times and was dead.
#[tokio::test]
async fn a_broker_file_that_takes_nothing_for_now_makes_no_message_dead_and_holds_no_key() {
    let world = sqlite().await;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("broker.db");
    let mut config = EmbeddedConfig::new(&file);
    config.busy_timeout = Duration::from_millis(50);
    let broker = EmbeddedBroker::open(config).await.unwrap();
    let relay = world.relay_to(Arc::new(broker.clone()), relay_options());
    world.enqueue("t", &["a1"]).await;
    world.until_status("a1 is there", |status| status.pending == 0).await;
    let mut holder = SqliteConnection::connect(file.to_str().unwrap()).await.unwrap();
    let began = std::time::Instant::now();
    sqlx::raw_sql("begin immediate").execute(&mut holder).await.unwrap();
    world.enqueue("t", &["a2", "b1"]).await;
    eventually("shown as blocked", SOON, || async { world.says("blocked").then_some(()) }).await;
    // Longer than it took to find the message guilty.
    let seen = eventually("some seconds of it", SOON, || async {
        (began.elapsed() > Duration::from_secs(6)).then(|| world.health.lines())
    })
    .await;
    assert!(!world.health.is_ready(), "{seen:?}");
    sqlx::raw_sql("rollback").execute(&mut holder).await.unwrap();
    let status = world.until_status("all is there", |status| status.pending == 0).await;
    assert_eq!((status.dead, status.held), (0, 0));
    let all = broker.read_all("t").await.unwrap();
    let all: Vec<_> = all.into_iter().map(|arrived| String::from_utf8(arrived.payload.unwrap()).unwrap()).collect();
    assert_eq!(first_occurrences(all.into_iter().filter(|name| name.starts_with('a')).collect()), ["a1", "a2"]);
    eventually("ready again", SOON, || async { world.health.is_ready().then_some(()) }).await;
    relay.end().await;
}

#[tokio::test]
async fn g9_a_process_that_lost_its_lease_changes_nothing_and_a_standby_takes_over_within_the_lease() {
    let world = sqlite().await;
    world.enqueue("t", &["a1", "a2"]).await;
    // The test waits for its end, which a slow machine must not reach before the checkpoint.
    let request =
        LeaseRequest { shard: 0, owner: "zombie".into(), length: Duration::from_secs(10), read_bytes: 4 << 20 };
    let LeaseAnswer::Taken(mut zombie) = world.store.open(&request).await.unwrap() else { panic!("it is free") };
    let read = zombie.read(10).await.unwrap();
    assert_eq!(read.rows.len(), 2);
    zombie.checkpoint(Mark::default()).await.unwrap();
    let (still, began) = (Standstill::watch(), Instant::now());
    let relay = world.relay(relay_options());
    // The zombie says nothing more; the standby needs no longer than its lease.
    world.until_published("t", &["a1", "a2"]).await;
    let took = began.elapsed();
    assert!(took < still.allows(Duration::from_secs(13)), "{took:?}");
    world.until_status("marked", |status| status.pending == 0).await;
    let before = world.status().await.shards[0].epoch;
    let mark = Mark { through: Some(read.batch), ..Mark::default() };
    let answer = zombie.checkpoint(mark).await;
    assert!(matches!(answer, Err(StoreError::Fenced(_))), "{answer:?}");
    assert!(zombie.read(10).await.is_err());
    assert_eq!(world.status().await.shards[0].epoch, before);
    world.enqueue("t", &["a3"]).await;
    world.until_published("t", &["a1", "a2", "a3"]).await;
    relay.end().await;
}

/// Shown by: no renewal while rows are handed over (the other one took the lease, and would have
/// waited for the same broker).
#[tokio::test]
async fn g9_a_client_that_takes_no_rows_costs_the_relay_no_lease() {
    let world = sqlite().await;
    world.broker.faults().take_no_rows(true);
    let lease = Duration::from_secs(6);
    let relay = world.relay(RelayOptions { lease, ..relay_options() });
    world.enqueue("t", &["a1"]).await;
    eventually("it waits", SOON, || async { world.says("client does not answer").then_some(()) }).await;
    nobody_else_gets_the_lease(&world, lease).await;
    world.broker.faults().take_no_rows(false);
    world.until_published("t", &["a1"]).await;
    world.until_status("marked", |status| status.pending == 0).await;
    relay.end().await;
}

/// Shown by: no renewal while a stop waits (the other one took the lease, and would have sent the
/// row again).
#[tokio::test]
async fn g9_a_stop_that_waits_for_the_broker_keeps_the_lease_until_its_mark_is_made() {
    let world = sqlite().await;
    world.broker.faults().hold_receipts(true);
    let lease = Duration::from_secs(6);
    let relay = world.relay(RelayOptions { lease, shutdown_grace: SOON, ..relay_options() });
    world.enqueue("t", &["a1"]).await;
    world.until_published("t", &["a1"]).await;
    relay.stop.cancel();
    nobody_else_gets_the_lease(&world, lease).await;
    world.broker.faults().hold_receipts(false);
    relay.end().await;
    let status = world.status().await;
    assert_eq!((status.pending, status.shards[0].owner.as_ref()), (0, None));
}

/// Asks for the lease for longer than it lasts.
async fn nobody_else_gets_the_lease(world: &World<SqliteStore>, lease: Duration) {
    let began = std::time::Instant::now();
    let other = LeaseRequest { shard: 0, owner: "other".into(), length: lease, read_bytes: 4 << 20 };
    eventually("more than a lease is over", SOON, || async {
        let answer = world.store.open(&other).await.unwrap();
        assert!(matches!(answer, LeaseAnswer::HeldBy { .. }), "{answer:?}");
        (began.elapsed() > lease * 3 / 2).then_some(())
    })
    .await;
}

/// Shown to fail: without the mark of a stop both rows were still pending.
#[tokio::test]
async fn a_stop_marks_what_was_proven_and_gives_the_lease_back() {
    let world = sqlite().await;
    let relay = world.relay(relay_options());
    world.broker.faults().hold_receipts(true);
    world.enqueue("t", &["a1", "a2"]).await;
    world.until_published("t", &["a1", "a2"]).await;
    relay.stop.cancel();
    world.broker.faults().hold_receipts(false);
    relay.end().await;
    let status = world.status().await;
    assert_eq!((status.pending, status.shards[0].owner.as_ref()), (0, None));
}

/// Shown by: a pause of at least 50 ms and at most a quarter of the lease (the relay panicked).
#[tokio::test]
async fn a_relay_with_a_very_short_lease_stands_by() {
    let world = sqlite().await;
    let other = world.other_owner().await;
    let relay = world.relay(RelayOptions { lease: Duration::from_millis(100), ..relay_options() });
    eventually("it stands by", SOON, || async { world.says("standing by").then_some(()) }).await;
    relay.end().await;
    other.release().await.unwrap();
}
