//! Handlers that take the new messages of a batch at once: once each, in the key's order, and one
//! that fails is found.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncebox::store::postgres::PostgresStore;
use oncebox::{ConsumerOptions, Handlers};
use uuid::Uuid;

use super::beside::held_row;
use super::kit::{
    Act, Does, DoesAll, HANGS, SOON, Sql, World, consumer_options, fails, on_mariadb, on_postgres, sqlite,
};
use super::support::eventually;

/// `a100`, `b101`, ... of five keys.
fn names(count: usize) -> Vec<String> {
    (100..100 + count).map(|number| format!("{}{number}", ["a", "b", "c", "d", "e"][number % 5])).collect()
}

fn of_key<'a>(names: &'a [String], key: &str) -> Vec<&'a str> {
    names.iter().map(String::as_str).filter(|name| name.starts_with(key)).collect()
}

/// The sets that a handler was called with.
type Seen = Arc<Mutex<Vec<Vec<String>>>>;

fn note(seen: &Seen, names: &[&str]) {
    seen.lock().unwrap().push(names.iter().map(|name| (*name).to_owned()).collect());
}

async fn commits_once<S: Sql>(world: World<S>) {
    let (names, seen) = (names(60), Seen::default());
    let refs: Vec<&str> = names.iter().map(String::as_str).collect();
    world.broker.faults().hold_deliveries(true);
    // Each twice, under one id: in one batch, and from one batch to the next.
    let ids: Vec<String> = names.iter().map(|_| Uuid::now_v7().to_string()).collect();
    for (id, name) in ids.iter().zip(&refs).chain(ids.iter().zip(&refs)) {
        world.deliver(id, "made", name);
    }
    let sets = Arc::clone(&seen);
    let handler = DoesAll(move |names: &[&str]| {
        note(&sets, names);
        Act::Done
    });
    let consumer = world.consumer_of(consumer_options(), Handlers::new().on_batch("made", handler));
    world.broker.faults().hold_deliveries(false);
    eventually("acknowledged", SOON, || async { (world.broker.committed("ledger", "t", 0) == 120).then_some(()) })
        .await;
    assert_eq!(world.effects().await, names, "each once, in the order of delivery");
    let seen = seen.lock().unwrap().clone();
    assert!(seen.iter().any(|set| set.len() > 10), "in sets: {seen:?}");
    assert_eq!(seen.concat(), names, "and a handler never sees what is known");
    consumer.end().await;
}

#[tokio::test]
async fn g4_effects_of_a_set_commit_once_on_sqlite() {
    commits_once(sqlite().await).await;
}

#[tokio::test]
async fn g4_effects_of_a_set_commit_once_on_postgres() {
    on_postgres("g4_sets", commits_once).await;
}

#[tokio::test]
async fn g4_effects_of_a_set_commit_once_on_mariadb() {
    on_mariadb("g4_sets", commits_once).await;
}

async fn isolates<S: Sql>(world: World<S>) {
    let (names, seen) = (names(60), Seen::default());
    let poison = "c127";
    world.broker.faults().hold_deliveries(true);
    world.deliver_all(&names.iter().map(String::as_str).collect::<Vec<_>>());
    let sets = Arc::clone(&seen);
    let handler = DoesAll(move |names: &[&str]| {
        note(&sets, names);
        if names.contains(&poison) { fails() } else { Act::Done }
    });
    let consumer = world.consumer_of(consumer_options(), Handlers::new().on_batch("made", handler));
    world.broker.faults().hold_deliveries(false);
    let held = of_key(&names, "c").iter().filter(|name| **name > poison).count() as u64;
    world.until_consumer("dead and held", |ledger| (ledger.dead, ledger.held) == (1, held)).await;
    eventually("acknowledged", SOON, || async { (world.broker.committed("ledger", "t", 0) == 60).then_some(()) }).await;
    let dead = world.dead().await;
    assert_eq!((dead[0].reason.as_str(), dead[0].payload.as_slice()), ("attempts", poison.as_bytes()));
    assert_eq!(dead[0].attempts, 4, "as many tries as a message that fails alone");
    let effects = world.effects().await;
    for key in ["a", "b", "c", "d", "e"] {
        let expected = of_key(&names, key).into_iter().filter(|name| key != "c" || *name < poison).collect::<Vec<_>>();
        assert_eq!(of_key(&effects, key), expected, "each once, in the key's order");
    }
    // 60, 30, 15, 8, 4, 2, 1 and what is left over at each halving; then alone.
    let calls = seen.lock().unwrap().len();
    assert!(calls <= 24, "{calls} calls: {:?}", seen.lock().unwrap());
    consumer.end().await;
}

/// Shown by: with the first of a set to blame, messages that nothing was wrong with were dead.
#[tokio::test]
async fn the_one_message_of_a_set_that_fails_is_found_and_nothing_else_suffers_on_sqlite() {
    isolates(sqlite().await).await;
}

#[tokio::test]
async fn the_one_message_of_a_set_that_fails_is_found_and_nothing_else_suffers_on_postgres() {
    on_postgres("sets_isolate", isolates).await;
}

#[tokio::test]
async fn the_one_message_of_a_set_that_fails_is_found_and_nothing_else_suffers_on_mariadb() {
    on_mariadb("sets_isolate", isolates).await;
}

/// Kinds take turns within a key: two in sets, one message by message. Shown by: without closing a
/// set before a message of its key goes elsewhere, single ones passed those in sets.
#[tokio::test]
async fn g6_a_key_keeps_its_order_over_handlers_of_sets_and_of_single_messages() {
    let world = sqlite().await;
    let names = names(90);
    world.broker.faults().hold_deliveries(true);
    for (number, name) in names.iter().enumerate() {
        world.deliver(&Uuid::now_v7().to_string(), ["first", "second", "single"][number / 4 % 3], name);
    }
    let tries = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&tries);
    let handlers = Handlers::new()
        .on_batch("first", DoesAll(|_: &[&str]| Act::Done))
        .on("single", Does(|_: &str, _: &oncebox::Message| Act::Done))
        // And it stays so through a failure.
        .otherwise_batch(DoesAll(move |names: &[&str]| {
            if names.contains(&"b131") && count.fetch_add(1, Ordering::Relaxed) < 8 { fails() } else { Act::Done }
        }));
    let mut options = consumer_options();
    options.retry.attempts_max = 20;
    let consumer = world.consumer_of(options, handlers);
    world.broker.faults().hold_deliveries(false);
    eventually("all", SOON, || async { (world.effects().await.len() == 90).then_some(()) }).await;
    let effects = world.effects().await;
    for key in ["a", "b", "c", "d", "e"] {
        assert_eq!(of_key(&effects, key), of_key(&names, key));
    }
    assert!(world.dead().await.is_empty());
    let tries = tries.load(Ordering::Relaxed);
    assert!(tries > 8, "it failed as often as it was told, and was tried once more: {tries}");
    consumer.end().await;
}

#[tokio::test]
async fn a_panic_and_a_handler_of_sets_that_hangs_are_failures_like_any_other() {
    for hangs in [false, true] {
        let world = sqlite().await;
        let names = names(10);
        world.broker.faults().hold_deliveries(true);
        world.deliver_all(&names.iter().map(String::as_str).collect::<Vec<_>>());
        let tries = AtomicU32::new(0);
        // In the whole, in a half, and alone.
        let handler =
            DoesAll(move |names: &[&str]| match names.contains(&"c102") && tries.fetch_add(1, Ordering::Relaxed) < 6 {
                true if hangs => Act::Hang,
                true => Act::Panic,
                false => Act::Done,
            });
        let mut options = ConsumerOptions { handler_timeout: HANGS, ..consumer_options() };
        // More than it is told to fail: on a busy machine another try may run out of its time.
        options.retry.attempts_max = 20;
        let consumer = world.consumer_of(options, Handlers::new().otherwise_batch(handler));
        world.broker.faults().hold_deliveries(false);
        eventually("all", SOON, || async { (world.effects().await.len() == 10).then_some(()) }).await;
        let effects = world.effects().await;
        for key in ["a", "b", "c", "d", "e"] {
            assert_eq!(of_key(&effects, key), of_key(&names, key));
        }
        assert!(world.dead().await.is_empty());
        consumer.end().await;
    }
}

/// The proof before COMMIT holds for sets too.
#[tokio::test]
async fn r23_an_error_that_a_handler_of_sets_swallowed_commits_nothing_of_it_on_postgres() {
    on_postgres("r23_sets_swallowed", |world| async move {
        let names = names(10);
        world.broker.faults().hold_deliveries(true);
        world.deliver_all(&names.iter().map(String::as_str).collect::<Vec<_>>());
        let tries = AtomicU32::new(0);
        let handler = DoesAll(move |names: &[&str]| {
            let swallows = names.contains(&"c102") && tries.fetch_add(1, Ordering::Relaxed) < 5;
            if swallows { Act::Swallow("select 1 / 0") } else { Act::Done }
        });
        let consumer = world.consumer_of(consumer_options(), Handlers::new().otherwise_batch(handler));
        world.broker.faults().hold_deliveries(false);
        eventually("all", SOON, || async { (world.effects().await.len() >= 10).then_some(()) }).await;
        let mut effects = world.effects().await;
        effects.sort_by_key(|name| name[1..].to_owned());
        assert_eq!(effects, names, "each once");
        consumer.end().await;
    })
    .await;
}

#[tokio::test]
async fn r23_a_raw_commit_in_a_handler_of_sets_leaves_all_of_the_set_dead_and_none_lost() {
    on_postgres("r23_sets_commit", |world| async move {
        let names = names(10);
        world.broker.faults().hold_deliveries(true);
        world.deliver_all(&names.iter().map(String::as_str).collect::<Vec<_>>());
        let tries = AtomicU32::new(0);
        let handler = DoesAll(move |_: &[&str]| match tries.fetch_add(1, Ordering::Relaxed) {
            0 => Act::RunAndFail(PostgresStore::COMMIT),
            _ => Act::Done,
        });
        let consumer = world.consumer_of(consumer_options(), Handlers::new().otherwise_batch(handler));
        world.broker.faults().hold_deliveries(false);
        let set = world.until_consumer("all accounted for", |ledger| ledger.dead == 10).await;
        assert_eq!(set.waiting, 0, "{set:?}");
        let dead = world.dead().await;
        assert!(dead.iter().all(|dead| dead.reason == "transaction-ended"), "{dead:?}");
        consumer.end().await;
    })
    .await;
}

/// All of a set wait for one row that somebody has locked; each of them has a key of its own. Shown
/// by: halving down to each of them, which are 103 waits.
#[tokio::test]
async fn r27_a_row_for_which_all_of_a_set_wait_costs_its_lane_a_few_waits_and_no_try() {
    on_postgres("sets_hot_row", |world| async move {
        let mut holder = held_row(&world).await;
        let calls = Arc::new(AtomicU32::new(0));
        let count = Arc::clone(&calls);
        let act = move |_: &[&str]| {
            count.fetch_add(1, Ordering::Relaxed);
            Act::Run("set local lock_timeout = '50ms'; select n from place where n = 1 for update")
        };
        let mut options = consumer_options();
        (options.retry.base, options.retry.cap) = (Duration::from_secs(3_600), Duration::from_secs(3_600));
        let names: Vec<String> = ('a'..='z').chain('A'..='Z').map(|key| format!("{key}1")).collect();
        world.broker.faults().hold_deliveries(true);
        world.deliver_all(&names.iter().map(String::as_str).collect::<Vec<_>>());
        let consumer = world.consumer_of(options, Handlers::new().otherwise_batch(DoesAll(act)));
        world.broker.faults().hold_deliveries(false);
        world.until_consumer("all wait", |ledger| ledger.waiting == 52).await;
        let calls = calls.load(Ordering::Relaxed);
        assert!(calls <= 30, "{calls} waits");
        let tries = world.store.texts("select attempts::text from oncebox.waiting").await;
        assert!(tries.iter().all(|tries| tries == "0"), "{tries:?}");
        consumer.end().await;
        <PostgresStore as Sql>::run(&mut holder, "rollback").await.unwrap();
    })
    .await;
}
