//! A handler that kills its process (R26): a process of its own, this same program.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use oncebox::app::config::{ConsumerSettings, Secret, Settings};
use oncebox::app::{HandlersByConsumer, run_consumers_with};
use oncebox::broker::Broker;
use oncebox::broker::embedded::{EmbeddedBroker, EmbeddedConfig};
use oncebox::store::postgres::PostgresStore;
use oncebox::store::sqlite::SqliteStore;
use oncebox::store::{Base as _, StoreOptions};
use oncebox::{ConsumerOptions, HandlerError, HandlerTx, Handlers, Message, MessageHandler, RelayOptions, async_trait};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::kit::{Act, Does, DoesAll, SOON, Sql, World, consumer_options, on_all, on_postgres, relay_options, sqlite};
use super::support::{deaths_of, eventually};

on_all! {
    r26_what_a_dead_process_had_in_flight_runs_in_batches,
}

const DATABASE: &str = "ONCEBOX_CONTRACT_KILL_DATABASE";
const IDS: [Uuid; 3] = [
    Uuid::from_u128(0x0193_0000_0000_7000_8000_0000_0000_0001),
    Uuid::from_u128(0x0193_0000_0000_7000_8000_0000_0000_0002),
    Uuid::from_u128(0x0193_0000_0000_7000_8000_0000_0000_0003),
];

/// The child: the broker delivers the same messages at each start, as one does whose
/// acknowledgements never came.
#[tokio::test]
async fn a_child_whose_handler_aborts() {
    let Ok(url) = std::env::var(DATABASE) else { return };
    let store = SqliteStore::connect(&StoreOptions::new(url)).await.unwrap();
    let world = World::with(store);
    for (id, name) in IDS.iter().zip(["b1", "a1", "a2"]) {
        world.deliver(&id.to_string(), "made", name);
    }
    let mut options = ConsumerOptions { until_idle: Some(Duration::from_millis(100)), ..consumer_options() };
    options.retry.attempts_max = 2;
    let aborts = |name: &str, _: &oncebox::Message| if name == "a1" { std::process::abort() } else { Act::Done };
    world.consumer(options, Does(aborts)).ended().await.unwrap();
}

/// Shown to fail: with an open assignment taken for a clean end it killed without end.
#[tokio::test]
async fn r26_a_handler_that_kills_the_process_is_dead_after_one_kill_more_than_it_has_attempts() {
    let world = sqlite().await;
    let database = (DATABASE.to_owned(), world.url.clone());
    let (kills, said) = deaths_of("kills::a_child_whose_handler_aborts", vec![database]).await;
    assert_eq!(kills, 3, "{said}");
    // The first kill took the batch of b1 with it; then b1 ran, once, and a2 stands behind the dead
    // one.
    assert_eq!(world.effects().await, ["b1"]);
    let ledger = world.consumer_status().await;
    assert_eq!((ledger.dead, ledger.held), (1, 1));
    assert_eq!(world.dead().await[0].reason, "attempts");
}

/// The last owner of the partition died. What it had in flight is suspected, and handled nearly as
/// fast as ever.
///
/// Shown to fail: each of them ran alone, its try counted in a transaction of its own.
async fn r26_what_a_dead_process_had_in_flight_runs_in_batches<S: Sql>(world: World<S>) {
    const COUNT: usize = 1_000;
    world.left_open(0..1).await;
    let names: Vec<String> = (0..COUNT).map(|number| format!("{}{number:04}", ["a", "b", "c"][number % 3])).collect();
    world.broker.faults().hold_deliveries(true);
    world.deliver_all(&names.iter().map(String::as_str).collect::<Vec<_>>());
    let calls = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&calls);
    let act = move |_: &[&str]| {
        count.fetch_add(1, Ordering::Relaxed);
        Act::Done
    };
    let consumer = world.consumer_of(consumer_options(), Handlers::new().otherwise_batch(DoesAll(act)));
    world.broker.faults().hold_deliveries(false);
    eventually("all ran", SOON, || async { (world.effects().await.len() == COUNT).then_some(()) }).await;
    consumer.end().await;
    let calls = calls.load(Ordering::Relaxed);
    assert!(calls <= 30, "{calls} calls of a handler that takes a hundred messages at once");
    assert_eq!(world.attempts().await, Vec::<String>::new());
}

/// The handler of two consumers of one process: that of `u1` waits a while for that of `a1`.
#[derive(Debug, Clone, Default)]
struct Meets {
    entered: Arc<AtomicBool>,
    has_met: Arc<AtomicBool>,
    other: Arc<Notify>,
    done: Arc<AtomicU32>,
}

#[async_trait]
impl MessageHandler<PostgresStore> for Meets {
    async fn handle(&self, message: &Message, _: &mut HandlerTx<'_, PostgresStore>) -> Result<(), HandlerError> {
        if message.topic == "u" {
            self.entered.store(true, Ordering::Release);
            let met = tokio::time::timeout(Duration::from_secs(20), self.other.notified()).await;
            self.has_met.store(met.is_ok(), Ordering::Release);
        } else {
            self.other.notify_one();
        }
        self.done.fetch_add(1, Ordering::Release);
        Ok(())
    }
}

async fn sends(world: &World<PostgresStore>, broker: &Arc<dyn Broker>, topic: &str, name: &str) {
    world.enqueue(topic, &[name]).await;
    let options = RelayOptions { until_empty: true, ..relay_options() };
    world.relay_to(Arc::clone(broker), options).ended().await.unwrap();
}

/// What kills the process may be in any of its consumers, so a suspect of one waits for all.
#[tokio::test]
async fn r26_a_suspect_message_runs_beside_no_message_of_another_consumer_of_its_process() {
    on_postgres("r26_two_consumers", |world| async move {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("broker.db");
        let broker: Arc<dyn Broker> = Arc::new(EmbeddedBroker::open(EmbeddedConfig::new(&file)).await.unwrap());
        broker.declare(&["t".to_owned(), "u".to_owned()]).await.unwrap();
        world.left_open(0..4).await;
        let mut ledger = ConsumerSettings::new("ledger", vec!["t".to_owned()]);
        // No try is to spare, so each suspect runs alone.
        ledger.retry.attempts_max = 1;
        let mut settings = Settings { consumer: vec![ledger], ..Settings::default() };
        settings.database.url = Secret(world.url.clone());
        settings.broker.url = Secret(format!("embedded://{}", file.display()));
        let both = Meets::default();
        let handlers = HandlersByConsumer::new().consumer("ledger", ["t"], Handlers::all(both.clone())).consumer(
            "other",
            ["u"],
            Handlers::all(both.clone()),
        );
        let (stop, health) = (CancellationToken::new(), world.health.clone());
        let token = stop.clone();
        let running = tokio::spawn(async move { run_consumers_with(&settings, handlers, health, token).await });
        sends(&world, &broker, "u", "u1").await;
        eventually("the other one runs", SOON, || async { both.entered.load(Ordering::Acquire).then_some(()) }).await;
        sends(&world, &broker, "t", "a1").await;
        assert_eq!(both.done.load(Ordering::Acquire), 0, "the broker has it while the other one still runs");
        let is_done = || async { (both.done.load(Ordering::Acquire) == 2).then_some(()) };
        eventually("both are handled", SOON, is_done).await;
        assert!(!both.has_met.load(Ordering::Acquire), "the suspect ran beside the other one");
        stop.cancel();
        running.await.unwrap().unwrap();
    })
    .await;
}
