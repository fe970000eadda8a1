//! What is acknowledged, up to where, and in which bounds: the low-water mark of a source as the
//! consumer keeps it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use oncebox::store::postgres::PostgresStore;
use oncebox::store::sqlite::SqliteStore;
use oncebox::store::{Holding, Inbox, OperatorAct};
use oncebox::{ConsumerOptions, HandlerError, RunEnd};
use oncebox_testkit::memory::MemoryBroker;
use uuid::Uuid;

use super::kit::{Act, Does, SOON, Sql, World, consumer_options, fails, on_postgres, sqlite};
use super::support::eventually;

/// Waits until the health names this setting as a limit that is reached, or does not.
async fn until_health(world: &World<SqliteStore>, names: &str, wanted: bool) {
    eventually("the health says so", SOON, || async {
        (format!("{:?}", world.health.lines()).contains(names) == wanted).then_some(())
    })
    .await;
}

/// Shown by: what the mark had no room for was left out, as a full mark was answered before, and
/// never ran; no bound on what stands above the marks.
#[tokio::test]
async fn g5_what_comes_while_an_older_one_is_unfinished_waits_for_room_and_none_of_it_is_passed_over() {
    let world = sqlite().await;
    let open = Arc::new(AtomicBool::new(false));
    let gate = Arc::clone(&open);
    let act = move |name: &str, _: &oncebox::Message| match name {
        "a1" if !gate.load(Ordering::Relaxed) => fails(),
        _ => Act::Done,
    };
    // Two lanes, so that others flow past a1, which stays where it is; and a broker that heeds no
    // bound.
    world.broker.faults().deliver_without_bound(true);
    let mut options = ConsumerOptions { lanes: 2, unacknowledged_max: 10, ..consumer_options() };
    options.retry.in_place = u32::MAX;
    options.retry.attempts_max = u32::MAX;
    let names: Vec<String> = (100..200).map(|number| format!("{}{number}", ["b", "c", "d", "e"][number % 4])).collect();
    world.broker.faults().hold_deliveries(true);
    world.deliver_all(&["a1"]);
    world.deliver_all(&names.iter().map(String::as_str).collect::<Vec<_>>());
    let consumer =
        world.consumer(ConsumerOptions { until_idle: Some(Duration::from_millis(200)), ..options }, Does(act));
    world.broker.faults().hold_deliveries(false);
    // Long enough for all of them: that the rest does not run cannot be waited for.
    let began = Instant::now();
    eventually("others flowed", SOON, || async {
        let handled = world.effects().await;
        assert!(handled.len() < 10, "taken and not acknowledged: `unacknowledged_max` at most: {handled:?}");
        (!handled.is_empty() && began.elapsed() > Duration::from_secs(1)).then_some(())
    })
    .await;
    assert_eq!(world.broker.committed("ledger", "t", 0), 0, "a1 is not finished");
    open.store(true, Ordering::Relaxed);
    assert_eq!(consumer.ended().await.unwrap(), RunEnd::Idle);
    let mut effects = world.effects().await;
    effects.sort();
    let mut expected = names.clone();
    expected.push("a1".into());
    expected.sort();
    assert_eq!(effects, expected);
    assert_eq!(world.broker.committed("ledger", "t", 0), 101);
}

/// A stream of what can never be handled does not fill the database. Shown by taking on: the ledger
/// met the later message.
#[tokio::test]
async fn g11_at_dead_rows_max_nothing_more_is_taken_visibly_and_nothing_is_lost() {
    let world = sqlite().await;
    let met = Arc::new(AtomicBool::new(false));
    let third = Arc::clone(&met);
    let act = move |name: &str, _: &oncebox::Message| {
        third.fetch_or(name == "c1", Ordering::Relaxed);
        Act::Fail(HandlerError::terminal("never"))
    };
    world.deliver_all(&["a1", "b1"]);
    let consumer = world.consumer(ConsumerOptions { dead_rows_max: 2, ..consumer_options() }, Does(act));
    until_health(&world, "dead_rows_max", true).await;
    world.deliver_all(&["c1"]);
    // Another consumer has it: it was there to be taken.
    let other = ConsumerOptions { name: "other".into(), group: None, ..consumer_options() };
    let other = world.consumer(other, Does(|_: &str, _: &oncebox::Message| Act::Done));
    world.until_effects(&["a1", "b1", "c1"]).await;
    assert!(!met.load(Ordering::Relaxed), "the ledger takes nothing more");
    world.act(OperatorAct::Discard).await;
    eventually("the third is met", SOON, || async { met.load(Ordering::Relaxed).then_some(()) }).await;
    until_health(&world, "dead_rows_max", false).await;
    world.until_status("it is dead", |status| status.consumers.iter().any(|one| one.dead == 1)).await;
    let dead = world.dead().await;
    assert_eq!(dead.iter().map(|dead| dead.payload.as_slice()).collect::<Vec<_>>(), [b"c1"]);
    consumer.end().await;
    other.end().await;
}

/// Handlers that fail for hours do not move the topic into the table. Shown by counting dead
/// messages only: the ledger met the later message.
#[tokio::test]
async fn g11_at_waiting_rows_max_nothing_more_is_taken_visibly_and_what_waits_is_tried_on() {
    let world = sqlite().await;
    let (works, met) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let (gate, later) = (Arc::clone(&works), Arc::clone(&met));
    let act = move |name: &str, _: &oncebox::Message| {
        later.fetch_or(name == "b1", Ordering::Relaxed);
        if gate.load(Ordering::Relaxed) { Act::Done } else { fails() }
    };
    let mut options = ConsumerOptions { waiting_rows_max: 3, ..consumer_options() };
    options.retry.attempts_max = u32::MAX;
    world.deliver_all(&["a1", "a2", "a3"]);
    let consumer = world.consumer(options, Does(act));
    until_health(&world, "waiting_rows_max", true).await;
    world.deliver_all(&["b1"]);
    // Another consumer has it: it was there to be taken.
    let other = ConsumerOptions { name: "other".into(), group: None, ..consumer_options() };
    let other = world.consumer(other, Does(|_: &str, _: &oncebox::Message| Act::Done));
    world.until_effects(&["a1", "a2", "a3", "b1"]).await;
    assert!(!met.load(Ordering::Relaxed), "the ledger takes nothing more");
    works.store(true, Ordering::Relaxed);
    world.until_effects(&["a1", "a2", "a3", "b1", "a1", "a2", "a3", "b1"]).await;
    until_health(&world, "waiting_rows_max", false).await;
    consumer.end().await;
    other.end().await;
}

/// A second member comes while a handler of the first one runs. Returns how long after that it runs
/// the first message of the partition that it gets.
async fn comes_while_one_runs(world: World<PostgresStore>, drain: Duration, then: fn() -> Act) -> Duration {
    let world = world.with_broker(MemoryBroker::with_partitions(2));
    world.deliver_all(&["a1", "b1", "c1", "d1", "e1", "f1", "g1", "h1"]);
    let grace = Duration::from_secs(1);
    let options = || ConsumerOptions { drain, shutdown_grace: grace, batch_max: 1, ..consumer_options() };
    let began = Arc::new(OnceLock::new());
    let runs = Arc::clone(&began);
    let first = move |_: &str, _: &oncebox::Message| if runs.set(Instant::now()).is_ok() { then() } else { Act::Done };
    let first = world.consumer(options(), Does(first));
    eventually("a handler runs", SOON, || async { began.get().copied() }).await;
    let ran = Arc::new(OnceLock::new());
    let runs = Arc::clone(&ran);
    let act = move |_: &str, _: &oncebox::Message| {
        runs.get_or_init(Instant::now);
        Act::Done
    };
    let second = world.consumer(options(), Does(act));
    let ran = eventually("the second one runs something", SOON, || async { ran.get().copied() }).await;
    let ran = ran - *began.get().unwrap();
    second.end().await;
    first.end().await;
    ran
}

/// Shown to fail: without the runtime's hold on what the broker waits for, it came at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partition_that_goes_to_another_member_waits_for_the_handler_that_runs_also_if_it_panics() {
    on_postgres("a_partition_that_goes_waits_for_the_handler", |world| async {
        let panics = || Act::Then("select pg_sleep(3)", Box::new(Act::Panic));
        let ran = comes_while_one_runs(world, SOON, panics).await;
        assert!(ran >= Duration::from_secs(3) && ran < SOON / 2, "{ran:?}");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partition_that_goes_to_another_member_waits_for_its_handler_no_longer_than_it_may_drain() {
    on_postgres("a_partition_that_goes_waits_no_longer", |world| async {
        let drain = Duration::from_secs(2);
        let ran = comes_while_one_runs(world, drain, || Act::Hang).await;
        assert!(ran >= drain && ran < consumer_options().handler_timeout, "{ran:?}");
    })
    .await;
}

/// Waits until the row of partition 0 says this: its state, and the next offset.
async fn until_row(world: &World<SqliteStore>, row: &str) {
    eventually(&format!("the row is {row}"), SOON, || async {
        let rows = world.store.texts("select state || ' ' || coalesce(next_offset, '-') from oncebox_assignment").await;
        (rows == [row]).then_some(())
    })
    .await;
}

/// A process that was frozen while it opened its rows goes on, and takes those of partitions that
/// it has lost. Shown by ignoring that no row was changed: the owner never stored its position
/// again.
#[tokio::test]
async fn r26_an_owner_whose_row_a_thawed_process_took_stores_its_position_on() {
    let (heard, _hearing) = super::observed::hear();
    let world = sqlite().await;
    let consumer = world.consumer(consumer_options(), Does(|_: &str, _: &oncebox::Message| Act::Done));
    world.deliver_all(&["a1"]);
    until_row(&world, "open 1").await;
    let id = world.registered().await;
    let thawed = Holding { topic: "t".into(), partition: 0, owner: Uuid::now_v7() };
    assert!(world.store.open_assignment(id, &thawed).await.unwrap().was_open, "by its owner");
    world.deliver_all(&["a2"]);
    world.until_effects(&["a1", "a2"]).await;
    // It hears that it has lost the partition, and closes the row.
    assert!(world.store.close_assignment(id, &thawed, None).await.unwrap(), "it had the row until now");
    until_row(&world, "open 2").await;
    // The same between the last position and a clean stop.
    world.deliver_all(&["a3"]);
    world.until_effects(&["a1", "a2", "a3"]).await;
    world.store.open_assignment(id, &thawed).await.unwrap();
    world.store.close_assignment(id, &thawed, None).await.unwrap();
    consumer.end().await;
    until_row(&world, "closed 3").await;
    let warned = |said: &&super::observed::Said| said.level == tracing::Level::WARN;
    let warned: Vec<_> = heard.said().iter().filter(warned).map(|said| said.fields["message"].clone()).collect();
    let tells = warned.iter().filter(|text| text.contains("had taken the row of a partition"));
    assert_eq!(tells.count(), 2, "once each time: {warned:?}");
}
