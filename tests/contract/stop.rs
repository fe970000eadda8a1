//! A graceful stop: what it prevents was no try (R26, G10).

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use oncebox::store::StoreOptions;
use oncebox::store::postgres::PostgresStore;
use oncebox::{Consumer, ConsumerOptions, HandlerError, Handlers, Relay, RelayOptions, RetryPolicy};
use oncebox_testkit::memory::MemoryBroker;
use tokio_util::sync::CancellationToken;

use super::kit::{
    Act, Behind, Does, SOON, Sql, World, behind_a_proxy, consumer_options, fails, on_mariadb, on_postgres,
    relay_options, sqlite,
};
use super::observed::Heard;
use super::proxy::{Failure, When};
use super::standstill::Standstill;
use super::support::eventually;

/// One more stop than a message has attempts, each in the middle of what the function does.
async fn stopped_again_and_again<S: Sql>(world: World<S>, act: fn() -> Act) {
    world.deliver_all(&["a1", "b1", "c1"]);
    // Two lanes: one message runs, and others wait until they may run alone. The grace leaves as
    // long to take tries back as the usual one does.
    let options = ConsumerOptions {
        lanes: 2,
        handler_timeout: Duration::from_secs(60),
        shutdown_grace: Duration::from_secs(8),
        retry: RetryPolicy { attempts_max: 2, ..consumer_options().retry },
        ..consumer_options()
    };
    for round in 1..=3 {
        world.left_open(0..1).await;
        let entered = Arc::new(AtomicU32::new(0));
        let count = Arc::clone(&entered);
        let consumer = world.consumer(
            options.clone(),
            Does(move |_: &str, _: &oncebox::Message| {
                count.fetch_add(1, Ordering::Relaxed);
                act()
            }),
        );
        eventually("a handler runs", SOON, || async { (entered.load(Ordering::Relaxed) > 0).then_some(()) }).await;
        assert!(!world.attempts().await.is_empty(), "round {round}: a try is counted before it runs");
        consumer.end().await;
        assert_eq!(world.attempts().await, Vec::<String>::new(), "round {round}");
        // All was handed back, so nothing is suspected any more.
        let state = world.store.texts(&format!("select state from {}assignment", S::PREFIX)).await;
        assert_eq!(state, ["closed"], "round {round}");
    }
    assert!(world.effects().await.is_empty() && world.dead().await.is_empty());
    let again = world.consumer(options, Does(|_: &str, _: &oncebox::Message| Act::Done));
    eventually("all ran", SOON, || async { (world.effects().await.len() == 3).then_some(()) }).await;
    assert!(world.attempts().await.is_empty());
    again.end().await;
}

fn hangs() -> Act {
    Act::Hang
}

fn deadlocks() -> Act {
    Act::Fail(HandlerError::transient("deadlock"))
}

/// Shown to fail on the code before: the tries that the end of the grace cut off stayed counted.
#[tokio::test]
async fn r26_a_stop_in_the_middle_of_a_try_burns_no_attempt_on_sqlite() {
    stopped_again_and_again(sqlite().await, hangs).await;
}

#[tokio::test]
async fn r26_a_stop_in_the_middle_of_a_try_burns_no_attempt_on_postgres() {
    on_postgres("r26_stop", |world| stopped_again_and_again(world, hangs)).await;
}

#[tokio::test]
async fn r26_a_stop_in_the_middle_of_a_try_burns_no_attempt_on_mariadb() {
    on_mariadb("r26_stop", |world| stopped_again_and_again(world, hangs)).await;
}

/// Shown to fail on the code before: a try that had failed transiently stayed counted when the
/// stop came.
#[tokio::test]
async fn r27_a_stop_between_transient_failures_burns_no_attempt() {
    stopped_again_and_again(sqlite().await, deadlocks).await;
}

/// Partitions, waiting messages and handlers at work, and a database that goes away before the
/// stop.
async fn stops_without_a_database<S: Sql>(behind: Behind<S>) {
    let Behind { direct, through, proxy } = behind;
    let broker = MemoryBroker::with_partitions(20);
    let (direct, through) = (direct.with_broker(broker.clone()), through.with_broker(broker));
    for failure in [Failure::Cut, Failure::Silence] {
        let mut options = ConsumerOptions { lanes: 2, shutdown_grace: Duration::from_secs(4), ..consumer_options() };
        options.retry.attempts_max = 100_000;
        let act = |name: &str, _: &oncebox::Message| if name.starts_with('a') { fails() } else { Act::Done };
        let consumer = through.consumer(options, Does(act));
        let before = direct.effects().await.len();
        direct.deliver_all(&["a1", "b1", "c1", "d1", "e1", "f1"]);
        eventually("it works", SOON, || async { (direct.effects().await.len() == before + 5).then_some(()) }).await;
        proxy.fails(failure);
        direct.deliver_all(&["b2", "c2", "d2"]);
        let (still, began) = (Standstill::watch(), Instant::now());
        consumer.end().await;
        let took = began.elapsed();
        assert!(took < still.allows(Duration::from_secs(6)), "{failure:?}: {took:?}");
        proxy.works();
        let again = through.consumer(consumer_options(), Does(|_: &str, _: &oncebox::Message| Act::Done));
        eventually("nothing is lost", SOON, || async { (direct.effects().await.len() == before + 9).then_some(()) })
            .await;
        again.end().await;
    }
}

behind_a_proxy! {
    /// Shown to fail: each of the partitions waited for the database, one after the other.
    a_stop_ends_within_its_grace_where_the_database_is_away: stops_without_a_database, StoreOptions::new("");
}

/// Its handler committed by itself and hangs when the grace of the stop ends: in a batch, or in a
/// retry. Shown to fail: the work was dropped, and nothing told of the message.
async fn stopped_behind_a_commit<S: Sql>(world: World<S>, fails_before: u32) {
    let tries = AtomicU32::new(0);
    world.deliver_all(&["a1"]);
    let act = move |_: &str, _: &oncebox::Message| match tries.fetch_add(1, Ordering::Relaxed) {
        n if n < fails_before => fails(),
        _ => Act::Then(S::COMMIT, Box::new(Act::Hang)),
    };
    let options = ConsumerOptions {
        handler_timeout: Duration::from_secs(60),
        shutdown_grace: Duration::from_secs(8),
        ..consumer_options()
    };
    let consumer = world.consumer(options, Does(act));
    world.until_effects(&["a1"]).await;
    consumer.end().await;
    let dead = world.dead().await;
    assert_eq!(dead.iter().map(|dead| dead.reason.as_str()).collect::<Vec<_>>(), ["transaction-ended"]);
}

#[tokio::test]
async fn r23_a_stop_behind_a_raw_commit_leaves_its_message_dead_and_not_lost_on_postgres() {
    for fails_before in [0, 2] {
        on_postgres("r23_stop", move |world| stopped_behind_a_commit(world, fails_before)).await;
    }
}

#[tokio::test]
async fn r23_a_stop_behind_a_raw_commit_leaves_its_message_dead_and_not_lost_on_mariadb() {
    for fails_before in [0, 2] {
        on_mariadb("r23_stop", move |world| stopped_behind_a_commit(world, fails_before)).await;
    }
}

/// The database falls silent behind such a commit. With a grace of 4 s the task is aborted before
/// the last answer is due. Shown by: a question without a bound; the task was aborted while it
/// asked, and nothing told of the message.
#[tokio::test]
async fn r23_a_stop_says_that_nobody_knows_how_a_transaction_ended() {
    for seconds in [10, 4] {
        let (heard, _hearing) = super::observed::hear();
        on_postgres("r23_silent_stop", move |world| unknown_at_a_stop(world, Duration::from_secs(seconds), heard))
            .await;
    }
}

async fn unknown_at_a_stop(world: World<PostgresStore>, shutdown_grace: Duration, heard: Heard) {
    let Behind { direct, through, proxy } = Behind::new(world, "sslmode=disable", StoreOptions::new("")).await;
    direct.deliver_all(&["a1"]);
    let options = ConsumerOptions { handler_timeout: Duration::from_secs(60), shutdown_grace, ..consumer_options() };
    let act = |_: &str, _: &oncebox::Message| Act::Then(PostgresStore::COMMIT, Box::new(Act::Hang));
    let consumer = through.consumer(options, Does(act));
    direct.until_effects(&["a1"]).await;
    let in_flight = || heard.metric("oncebox_consumer_in_flight", &[("consumer", "ledger")]) as u64;
    eventually("it is in flight", SOON, || async { (in_flight() == 1).then_some(()) }).await;
    proxy.fails(Failure::Silence);
    consumer.end().await;
    assert_eq!(in_flight(), 0);
    let told = || !heard.events("was not known when its task ended").is_empty();
    eventually("it is told", SOON, || async { told().then_some(()) }).await;
    proxy.works();
}

/// The connection that is to store a message of a batch falls silent. Shown by: telling of it only
/// after an error; the task was aborted while it waited.
#[tokio::test]
async fn r23_a_stop_tells_of_a_message_that_it_could_not_store_as_dead() {
    let (heard, _hearing) = super::observed::hear();
    on_postgres("r23_untold", |world| async move {
        let Behind { direct, through, proxy } = Behind::new(world, "sslmode=disable", StoreOptions::new("")).await;
        proxy.fail_at("", "insert into oncebox.waiting", 0, When::BeforeRequest, Failure::Silence);
        direct.deliver_all(&["a1"]);
        let act = |_: &str, _: &oncebox::Message| Act::RunAndFail(PostgresStore::COMMIT);
        let options = ConsumerOptions { shutdown_grace: Duration::from_secs(4), ..consumer_options() };
        let consumer = through.consumer(options, Does(act));
        eventually("it is silent", SOON, || async { proxy.has_failed().then_some(()) }).await;
        consumer.end().await;
        let told = || !heard.events("nothing else will tell of it").is_empty();
        eventually("it is told", SOON, || async { told().then_some(()) }).await;
    })
    .await;
}

/// The grace leaves as long for what runs as COMMIT takes, and what it says counts. Shown to fail:
/// it was dropped in the middle, and its message was not acknowledged.
#[tokio::test]
async fn a_commit_that_is_on_its_way_at_the_end_of_the_grace_is_waited_for_and_acknowledged() {
    on_postgres("stop_in_commit", |world| async move {
        world
            .run(
                "create function slows() returns trigger language plpgsql as
                 $$ begin perform pg_sleep(7); return null; end $$;
                 create constraint trigger slows after insert on effect deferrable initially deferred
                   for each row execute function slows()",
            )
            .await;
        let entered = Arc::new(AtomicU32::new(0));
        let count = Arc::clone(&entered);
        world.deliver_all(&["a1"]);
        let act = move |_: &str, _: &oncebox::Message| {
            count.fetch_add(1, Ordering::Relaxed);
            Act::Done
        };
        // What runs is dropped after six seconds, and all is over after ten and what COMMIT is
        // given behind that.
        let options = ConsumerOptions { shutdown_grace: Duration::from_secs(10), ..consumer_options() };
        let consumer = world.consumer(options, Does(act));
        eventually("it runs", SOON, || async { (entered.load(Ordering::Relaxed) > 0).then_some(()) }).await;
        consumer.end().await;
        assert_eq!(world.effects().await, ["a1"]);
        assert_eq!(world.broker.committed("ledger", "t", 0), 1);
    })
    .await;
}

// A relay with such a grace panicked at its stop, a consumer at its first message. Shown by: no
// check, in each of the two.
#[tokio::test]
async fn a_time_that_no_instant_reaches_is_refused_at_the_start() {
    let (world, stop) = (sqlite().await, CancellationToken::new());
    let broker = || Arc::new(world.broker.clone());
    let options = RelayOptions { shutdown_grace: Duration::MAX, ..relay_options() };
    let relay = Relay::new(world.store.clone(), broker(), options, world.health.clone());
    let ended = tokio::time::timeout(SOON, relay.run(stop.clone())).await.expect("it ends by itself");
    let error = ended.expect_err("it is refused").to_string();
    assert!(error.contains("`shutdown_grace` must be at most 100 years"), "{error}");
    let options = ConsumerOptions { handler_timeout: Duration::MAX, ..consumer_options() };
    let handlers = Handlers::all(Does(|_: &str, _: &oncebox::Message| Act::Done));
    let consumer = Consumer::new(world.store.clone(), broker(), handlers, options, world.health.clone());
    let ended = tokio::time::timeout(SOON, consumer.run(stop)).await.expect("it ends by itself");
    let error = ended.expect_err("it is refused").to_string();
    assert!(error.contains("consumer `ledger`: `handler_timeout` must be at most 100 years"), "{error}");
}
