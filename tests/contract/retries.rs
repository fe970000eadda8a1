//! Messages that wait: a key is drained in batches and in order, a try is counted when its turn
//! comes, and a handler that kills the process costs nobody but its own message a try (R25, R26).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use oncebox::store::sqlite::SqliteStore;
use oncebox::store::{Base as _, InboxEntry, ParkAs, Parked, StoreOptions};
use oncebox::{ConsumerOptions, HandlerError, Handlers, RunEnd};

use super::kit::{Act, Does, DoesAll, SOON, Sql, World, consumer_options, fails, on_all, on_postgres, sqlite};
use super::standstill::Standstill;
use super::support::{eventually, in_a_process};

on_all! {
    r25_a_key_that_once_failed_is_drained_in_batches,
    g6_a_failure_in_a_batch_of_waiting_messages_counts_for_its_message_alone_and_reorders_nothing,
}

const DATABASE: &str = "ONCEBOX_CONTRACT_RETRIES_DATABASE";
const KILLER: &str = "ONCEBOX_CONTRACT_RETRIES_KILLER";

/// The child: nothing is delivered, all waits in the database.
#[tokio::test]
async fn a_child_whose_waiting_message_aborts() {
    let (Ok(url), Ok(killer)) = (std::env::var(DATABASE), std::env::var(KILLER)) else { return };
    let store = SqliteStore::connect(&StoreOptions::new(url)).await.unwrap();
    let world = World::with(store);
    let mut options = ConsumerOptions { until_idle: Some(Duration::from_millis(100)), ..consumer_options() };
    options.retry.attempts_max = 3;
    let aborts = move |name: &str, _: &oncebox::Message| if name == killer { std::process::abort() } else { Act::Done };
    assert_eq!(world.consumer(options, Does(aborts)).ended().await.unwrap(), RunEnd::Idle);
}

/// Messages that wait, by name: due where they are the first of their key.
async fn waiting<S: Sql>(world: &World<S>, names: &[&str], tries: u32) {
    let consumer = world.registered().await;
    world.deliver_all(names);
    let arrived = oncebox::broker::Broker::read_all(&world.broker, "t").await.unwrap();
    let mut keys = std::collections::HashSet::new();
    for arrived in arrived {
        let message = oncebox::Message::identify(arrived, &oncebox::message::IdRule::Envelope, "1", true).0;
        let park_as = if keys.insert(message.key.clone()) { ParkAs::Due(Duration::ZERO) } else { ParkAs::Behind };
        let mut tx = world.store.begin(consumer).await.unwrap();
        tx.admit(&[InboxEntry { id: message.id, hash: message.content_hash() }]).await.unwrap();
        tx.park(&[Parked { message, park_as, attempts: tries, error: None }]).await.unwrap();
        tx.commit().await.unwrap();
    }
}

/// Starts the child until it ends by itself; the number of times it was killed, and after each the
/// tries of those that wait.
async fn killed(world: &World<SqliteStore>, killer: &str) -> Vec<Vec<String>> {
    let mut kills = Vec::new();
    loop {
        let variables = [(DATABASE, world.url.as_str()), (KILLER, killer)];
        let (is_well, said) = in_a_process("retries::a_child_whose_waiting_message_aborts", &variables).await;
        if is_well {
            return kills;
        }
        let tries = "select cast(payload as text) || ' ' || attempts from oncebox_waiting order by sequence";
        kills.push(world.store.texts(tries).await);
        assert!(kills.len() < 9, "it kills without end: {kills:?}; {said}");
        // The claim of the dead process runs out.
        world.run("update oncebox_waiting set due_at = 0 where lease is not null").await;
    }
}

/// Shown to fail: a try was counted for all eight heads that were claimed, and those behind the
/// killer were dead before it.
#[tokio::test]
async fn r26_a_waiting_message_that_kills_its_process_costs_the_heads_of_other_keys_no_attempt() {
    let world = sqlite().await;
    waiting(&world, &["a1", "b1", "c1", "d1", "e1", "f1", "g1", "h1"], 1).await;
    let kills = killed(&world, "a1").await;
    let of_killer: Vec<&str> = kills.iter().flatten().map(String::as_str).filter(|row| row.starts_with("a1")).collect();
    assert_eq!(
        of_killer,
        ["a1 1", "a1 2", "a1 3"],
        "the first kill is not counted, and two of three attempts were left"
    );
    let others: Vec<&String> = kills.iter().flatten().filter(|row| !row.starts_with("a1")).collect();
    assert!(!others.is_empty() && others.iter().all(|row| row.ends_with(" 1")), "{kills:?}");
    let mut effects = world.effects().await;
    effects.sort();
    assert_eq!(effects, ["b1", "c1", "d1", "e1", "f1", "g1", "h1"]);
    let dead = world.dead().await;
    assert_eq!((dead.len(), dead[0].reason.as_str(), dead[0].attempts), (1, "attempts", 3));
}

/// One of a batch: after the first kill each of that batch runs alone, and only the killer is
/// counted for the next ones.
#[tokio::test]
async fn r26_a_killer_among_waiting_messages_that_were_never_tried_is_dead_after_one_kill_more_than_attempts() {
    let world = sqlite().await;
    waiting(&world, &["a1", "a2", "a3", "a4", "b1"], 0).await;
    let kills = killed(&world, "a3").await;
    assert_eq!(kills.len(), 4, "{kills:?}");
    assert_eq!(kills[0], ["a1 0", "a2 0", "a3 0", "a4 0", "b1 0"], "nothing is counted before there is a suspicion");
    assert_eq!(kills[3].iter().filter(|tries| tries.as_str() == "a3 3").count(), 1, "{kills:?}");
    let mut effects = world.effects().await;
    effects.sort();
    assert_eq!(effects, ["a1", "a2", "b1"], "a4 is held behind the dead one");
    assert_eq!(world.dead().await[0].payload, b"a3");
}

/// An outage that is over, for one key: its messages leave as they came, many in a transaction.
///
/// Shown to fail: each message was a transaction of its own.
async fn r25_a_key_that_once_failed_is_drained_in_batches<S: Sql>(world: World<S>) {
    const COUNT: usize = 300;
    let names: Vec<String> = (0..COUNT).map(|number| format!("a{number:03}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let (open, calls) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU32::new(0)));
    let (gate, count) = (Arc::clone(&open), Arc::clone(&calls));
    let act = move |_: &[&str]| {
        count.fetch_add(1, Ordering::Relaxed);
        if gate.load(Ordering::Relaxed) { Act::Done } else { fails() }
    };
    let mut options = consumer_options();
    options.retry.attempts_max = 100_000;
    world.deliver_all(&names);
    let consumer = world.consumer_of(options, Handlers::new().otherwise_batch(DoesAll(act)));
    world.until_consumer("all wait", |ledger| ledger.waiting == COUNT as u64).await;
    calls.store(0, Ordering::Relaxed);
    open.store(true, Ordering::Relaxed);
    eventually("all ran", SOON, || async { (world.effects().await.len() == COUNT).then_some(()) }).await;
    assert_eq!(world.effects().await, names, "in order, each once");
    let calls = calls.load(Ordering::Relaxed);
    assert!(calls <= 10, "{calls} calls of a handler that takes a hundred messages at once");
    world.until_consumer("nothing waits", |ledger| ledger.waiting == 0).await;
    consumer.end().await;
}

/// New messages of the key come all the time, and it is caught up with all the same, without a
/// pause between two batches.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r25_a_key_that_is_drained_while_more_of_it_comes_does_not_wait_for_a_sweep() {
    on_postgres("r25_inflow", |world| async move {
        // The first one of each round fails, so that the others of the round come behind it.
        let act = |name: &str, message: &oncebox::Message| {
            if name.ends_with("00") && message.attempt < 3 { fails() } else { Act::Done }
        };
        let consumer = world.consumer(consumer_options(), Does(act));
        let (still, began, mut names) = (Standstill::watch(), Instant::now(), Vec::new());
        for round in 10..22 {
            for number in 0..50 {
                let name = format!("a{round}{number:02}");
                world.deliver_all(&[name.as_str()]);
                names.push(name);
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            world.until_effects(&names.iter().map(String::as_str).collect::<Vec<_>>()).await;
        }
        // What stood behind a head that had gone waited for the next sweep: five seconds, in nearly
        // each round.
        let took = began.elapsed();
        assert!(took < still.allows_below(Duration::from_secs(12), Duration::from_secs(50)), "{took:?}");
        world.until_consumer("nothing waits", |ledger| ledger.waiting == 0).await;
        consumer.end().await;
    })
    .await;
}

/// One in the middle of a batch fails: what stood before it is done, it alone is counted, the rest
/// waits for it.
async fn g6_a_failure_in_a_batch_of_waiting_messages_counts_for_its_message_alone_and_reorders_nothing<S: Sql>(
    world: World<S>,
) {
    let names: Vec<String> = (10..30).map(|number| format!("a{number}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    waiting(&world, &names, 0).await;
    let seen: Arc<std::sync::Mutex<Vec<(String, u32)>>> = Arc::default();
    let log = Arc::clone(&seen);
    let act = move |name: &str, message: &oncebox::Message| {
        log.lock().unwrap().push((name.to_owned(), message.attempt));
        match name {
            "a15" if message.attempt < 3 => fails(),
            "a20" if message.attempt < 2 => Act::Fail(HandlerError::retry_after("busy", Duration::from_millis(10))),
            _ => Act::Done,
        }
    };
    let options = ConsumerOptions { topics: vec!["t".into()], group: Some("late".into()), ..consumer_options() };
    let consumer = world.consumer(options, Does(act));
    world.until_effects(&names).await;
    world.until_consumer("nothing waits", |ledger| ledger.waiting + ledger.dead == 0).await;
    consumer.end().await;
    let attempts = |name: &str| {
        let mut attempts: Vec<u32> =
            seen.lock().unwrap().iter().filter(|(of, _)| of == name).map(|(_, attempt)| *attempt).collect();
        attempts.dedup();
        attempts
    };
    for name in names {
        let wanted = match name {
            "a15" => vec![1, 2, 3],
            "a20" => vec![1, 2],
            _ => vec![1],
        };
        assert_eq!(attempts(name), wanted, "{name}");
    }
}

/// Shown to fail: the stop waited for the handler, up to its timeout.
#[tokio::test]
async fn a_stop_ends_within_its_grace_though_a_waiting_message_hangs_in_its_handler() {
    let world = sqlite().await;
    waiting(&world, &["a1"], 1).await;
    let entered = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&entered);
    let act = move |_: &str, _: &oncebox::Message| {
        flag.store(true, Ordering::Relaxed);
        Act::Hang
    };
    let options = ConsumerOptions {
        handler_timeout: Duration::from_secs(60),
        shutdown_grace: Duration::from_secs(4),
        group: Some("late".into()),
        ..consumer_options()
    };
    let consumer = world.consumer(options, Does(act));
    eventually("it hangs", SOON, || async { entered.load(Ordering::Relaxed).then_some(()) }).await;
    let (still, began) = (Standstill::watch(), Instant::now());
    consumer.end().await;
    let took = began.elapsed();
    assert!(took < still.allows(Duration::from_secs(6)), "{took:?}");
    let row = world.store.texts("select attempts || ' ' || (lease is null) from oncebox_waiting").await;
    assert_eq!(row, ["1 1"], "given back, and the try that the stop prevented is not counted");
}

/// The server gives numbers of rows that are taken, as one that was filled by logical replication
/// does. Shown by: ignoring every conflict; the message had its inbox row and stood nowhere.
#[tokio::test]
async fn a_message_whose_number_among_those_that_wait_is_taken_is_not_lost() {
    on_postgres("taken_number", |world| async move {
        let mut options = consumer_options();
        (options.retry.base, options.retry.cap) = (Duration::from_secs(3_600), Duration::from_secs(3_600));
        let consumer = world.consumer(options, Does(|_: &str, _: &oncebox::Message| fails()));
        world.deliver_all(&["a1"]);
        world.until_consumer("it waits", |ledger| ledger.waiting == 1).await;
        let number = "pg_get_serial_sequence('oncebox.waiting', 'sequence')";
        world.run(&format!("select setval({number}, min(sequence), false) from oncebox.waiting")).await;
        world.deliver_all(&["b1"]);
        world.until_consumer("both wait", |ledger| ledger.waiting == 2).await;
        consumer.end().await;
    })
    .await;
}
