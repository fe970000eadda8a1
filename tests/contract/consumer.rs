//! The consumer: each effect once, in the key's order, and what becomes of messages that fail.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use oncebox::store::OperatorAct;
use oncebox::{
    ConsumerOptions, DeadPolicy, HandlerError, HandlerTx, Handlers, Message, MessageHandler, RunEnd, Unhandled,
    async_trait,
};
use tokio::sync::Semaphore;
use uuid::Uuid;

use super::kit::{Act, Does, SOON, Sql, World, consumer_options, fails, on_all, on_mariadb, on_postgres, sqlite};
use super::support::eventually;

on_all! {
    a_waiting_message_stays_until_a_process_runs_that_has_a_handler_for_its_kind,
}

/// Writes its effect and waits until the test lets it go on.
#[derive(Debug, Clone)]
struct Gated {
    entered: Arc<AtomicU32>,
    gate: Arc<Semaphore>,
}

#[async_trait]
impl<S: Sql> MessageHandler<S> for Gated {
    async fn handle(&self, message: &Message, tx: &mut HandlerTx<'_, S>) -> Result<(), HandlerError> {
        let name = String::from_utf8(message.payload.clone()).unwrap();
        S::run(tx.connection(), &format!("insert into effect (text) values ('{name}')")).await?;
        self.entered.fetch_add(1, Ordering::Relaxed);
        drop(self.gate.acquire().await.unwrap());
        Ok(())
    }
}

/// `waits` lists the connections of this database that wait for another one, where it is known how.
async fn concurrent_duplicates<S: Sql>(world: World<S>, waits: Option<&'static str>) {
    let names: Vec<String> = (10..40).map(|n| format!("{}{n}", ["a", "b", "c"][n % 3])).collect();
    let mut names: Vec<&str> = names.iter().map(String::as_str).collect();
    world.broker.faults().hold_deliveries(true);
    world.deliver_all(&names);
    // One name, two groups: both get every message at the same moment, as after a rebalance that
    // one did not hear of.
    let handler = Gated { entered: Arc::default(), gate: Arc::new(Semaphore::new(0)) };
    let member = |group: &str| {
        let options = ConsumerOptions { group: Some(group.into()), handler_timeout: SOON * 2, ..consumer_options() };
        world.consumer(options, handler.clone())
    };
    let (one, two) = (member("one"), member("two"));
    eventually("both are there", SOON, || async { (world.consumer_status().await.name == "ledger").then_some(()) })
        .await;
    world.broker.faults().hold_deliveries(false);
    let entered = || handler.entered.load(Ordering::Relaxed);
    eventually("one of them is at work", SOON, || async { (entered() > 0).then_some(()) }).await;
    if let Some(waits) = waits {
        eventually("the other one meets its open transaction", SOON, || async {
            (!world.store.texts(waits).await.is_empty()).then_some(())
        })
        .await;
    }
    handler.gate.add_permits(100);
    let until_through = async |group: &str, count: i64| {
        eventually(group, SOON, || async { (world.broker.committed(group, "t", 0) == count).then_some(()) }).await;
    };
    until_through("one", 30).await;
    until_through("two", 30).await;
    assert_eq!(entered(), 30, "no handler saw what the other one did");
    // The leases end, but all is committed: nothing comes again, also not before a new one. To a
    // group that comes later all of it comes once more.
    world.broker.faults().expire_leases("one");
    world.deliver_all(&["d99"]);
    names.push("d99");
    let three = member("three");
    for group in ["one", "two", "three"] {
        until_through(group, 31).await;
    }
    for member in [one, two, three] {
        member.end().await;
    }
    let mut effects = world.effects().await;
    for key in ["a", "b", "c"] {
        let of_key = |name: &&str| name.starts_with(key);
        let seen: Vec<&str> = effects.iter().map(String::as_str).filter(of_key).collect();
        assert_eq!(seen, names.iter().copied().filter(of_key).collect::<Vec<_>>(), "G6: in the key's order");
    }
    effects.sort();
    let mut expected = names.clone();
    expected.sort_unstable();
    assert_eq!(effects, expected, "no unique constraint on the table: each effect once");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g4_effects_commit_exactly_once_under_concurrent_duplicates_on_sqlite() {
    concurrent_duplicates(sqlite().await, None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g4_effects_commit_exactly_once_under_concurrent_duplicates_on_postgres() {
    let waits = "select 'x' from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'";
    on_postgres("g4_concurrent_duplicates", |world| concurrent_duplicates(world, Some(waits))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g4_effects_commit_exactly_once_under_concurrent_duplicates_on_mariadb() {
    on_mariadb("g4_concurrent_duplicates", |world| concurrent_duplicates(world, None)).await;
}

/// Shown to fail: reported as committed after a failed try in place, offsets were acknowledged
/// without an effect.
#[tokio::test]
async fn g5_nothing_is_acknowledged_before_the_commit_returned() {
    let world = sqlite().await;
    let open = Arc::new(AtomicBool::new(false));
    let gate = Arc::clone(&open);
    world.deliver_all(&["a1", "a2"]);
    let act = move |_: &str, _: &oncebox::Message| if gate.load(Ordering::Relaxed) { Act::Done } else { fails() };
    let mut options = consumer_options();
    // Every try stays in place: nothing is stored, so nothing may be acknowledged.
    options.retry.in_place = 1_000_000;
    options.retry.attempts_max = 1_000_000;
    let consumer = world.consumer(options, Does(act));
    eventually("it was tried a few times", SOON, || async {
        (world.store.texts("select cast(attempts as text) from oncebox_attempt").await.first()?.parse::<u32>().ok()?
            > 3)
        .then_some(())
    })
    .await;
    assert_eq!(world.broker.committed("ledger", "t", 0), 0);
    open.store(true, Ordering::Relaxed);
    world.until_effects(&["a1", "a2"]).await;
    eventually("acknowledged", SOON, || async { (world.broker.committed("ledger", "t", 0) == 2).then_some(()) }).await;
    consumer.end().await;
}

/// Shown to fail: without the look at blocked keys a3 ran before a2.
#[tokio::test]
async fn g6_effects_of_a_key_keep_their_order_while_one_of_its_messages_waits_and_other_keys_flow() {
    let world = sqlite().await;
    let open = Arc::new(AtomicBool::new(false));
    let gate = Arc::clone(&open);
    let act = move |name: &str, _: &oncebox::Message| {
        if name == "a2" && !gate.load(Ordering::Relaxed) { fails() } else { Act::Done }
    };
    world.broker.faults().hold_deliveries(true);
    world.deliver_all(&["a1", "b1", "a2", "b2", "a3", "c1"]);
    let mut options = consumer_options();
    options.retry.attempts_max = 1_000;
    let consumer = world.consumer(options, Does(act));
    world.broker.faults().hold_deliveries(false);
    world.until_effects(&["a1", "b1", "b2", "c1"]).await;
    world.until_consumer("a2 waits, a3 behind it", |ledger| (ledger.waiting, ledger.dead) == (2, 0)).await;
    world.deliver_all(&["a4", "b3"]);
    world.until_effects(&["a1", "b1", "b2", "c1", "b3"]).await;
    open.store(true, Ordering::Relaxed);
    world.until_effects(&["a1", "b1", "b2", "c1", "b3", "a2", "a3", "a4"]).await;
    world.until_consumer("nothing waits", |ledger| ledger.waiting == 0).await;
    consumer.end().await;
}

#[tokio::test]
async fn a_message_is_dead_after_its_last_attempt_holds_its_key_and_redriven_runs_first() {
    let world = sqlite().await;
    let (tries, open) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(false)));
    let (count, gate) = (Arc::clone(&tries), Arc::clone(&open));
    let act = move |name: &str, _: &oncebox::Message| {
        if name != "a1" || gate.load(Ordering::Relaxed) {
            return Act::Done;
        }
        count.fetch_add(1, Ordering::Relaxed);
        fails()
    };
    world.deliver_all(&["a1", "a2", "b1", "a3"]);
    let consumer = world.consumer(consumer_options(), Does(act));
    world.until_consumer("a1 dead, two held", |ledger| (ledger.dead, ledger.held) == (1, 2)).await;
    assert_eq!(tries.load(Ordering::Relaxed), 4, "`attempts_max` tries, no more and no less");
    world.until_effects(&["b1"]).await;
    let dead = world.dead().await;
    assert_eq!((dead[0].reason.as_str(), dead[0].attempts), ("attempts", 4));
    assert!(dead[0].history.len() == 4 && dead[0].error.as_deref().unwrap().contains("not today"), "{dead:?}");
    open.store(true, Ordering::Relaxed);
    world.act(OperatorAct::Redrive).await;
    world.until_effects(&["b1", "a1", "a2", "a3"]).await;
    world.until_consumer("nothing left", |ledger| ledger.dead + ledger.waiting == 0).await;
    consumer.end().await;
}

#[tokio::test]
async fn a_discarded_message_is_gone_and_what_stood_behind_it_runs() {
    let world = sqlite().await;
    world.deliver_all(&["a1", "a2"]);
    let terminal = |name: &str, _: &oncebox::Message| {
        if name == "a1" { Act::Fail(HandlerError::terminal("never")) } else { Act::Done }
    };
    let consumer = world.consumer(consumer_options(), Does(terminal));
    world.until_consumer("dead at once", |ledger| (ledger.dead, ledger.held) == (1, 1)).await;
    let dead = world.dead().await;
    assert_eq!((dead[0].reason.as_str(), dead[0].attempts), ("terminal", 1));
    world.act(OperatorAct::Discard).await;
    world.until_effects(&["a2"]).await;
    world.until_consumer("nothing left", |ledger| ledger.dead + ledger.waiting == 0).await;
    consumer.end().await;
}

#[tokio::test]
async fn under_policy_skip_later_messages_of_the_key_go_on_without_the_dead_one() {
    let world = sqlite().await;
    world.deliver_all(&["a1", "a2"]);
    let act = |name: &str, _: &oncebox::Message| if name == "a1" { fails() } else { Act::Done };
    let options = ConsumerOptions { dead: DeadPolicy::Skip, ..consumer_options() };
    let consumer = world.consumer(options, Does(act));
    world.until_effects(&["a2"]).await;
    world.until_consumer("one dead", |ledger| (ledger.dead, ledger.waiting) == (1, 0)).await;
    consumer.end().await;
}

/// Shown to fail: without the comparison of hashes nothing was dead.
#[tokio::test]
async fn g7_the_same_id_with_different_content_is_dead_and_the_first_stays() {
    let world = sqlite().await;
    let (one, two) = (Uuid::now_v7().to_string(), Uuid::now_v7().to_string());
    // Inside one batch, and from one batch to the next.
    world.broker.faults().hold_deliveries(true);
    world.deliver(&one, "made", "a1");
    world.deliver(&one, "made", "a2");
    world.deliver(&two, "made", "b1");
    let consumer = world.consumer(consumer_options(), Does(|_: &str, _: &oncebox::Message| Act::Done));
    world.broker.faults().hold_deliveries(false);
    world.until_effects(&["a1", "b1"]).await;
    world.deliver(&two, "made", "b2");
    world.deliver_all(&["a3", "b3"]);
    // A verdict holds nothing.
    world.until_effects(&["a1", "b1", "a3", "b3"]).await;
    let dead = world.dead().await;
    let shown: Vec<_> = dead.iter().map(|dead| (dead.reason.as_str(), dead.payload.as_slice())).collect();
    assert_eq!(shown, [("id-reused", b"a2".as_slice()), ("id-reused", b"b2".as_slice())]);
    consumer.end().await;
}

/// Shown to fail: counted like any other failure, the message was dead.
#[tokio::test]
async fn r27_a_transient_failure_counts_no_attempt() {
    let world = sqlite().await;
    let tries = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&tries);
    // Twice as often as it may fail: in the batch, alone after a failure, and from the waiting
    // table.
    let act = move |name: &str, _: &oncebox::Message| match (name, count.fetch_add(1, Ordering::Relaxed)) {
        ("a1", 3 | 8) => fails(),
        ("a1", 0..12) => Act::Fail(HandlerError::transient("deadlock")),
        _ => Act::Done,
    };
    let mut options = consumer_options();
    options.retry.attempts_max = 3;
    world.deliver_all(&["a1", "a2"]);
    let consumer = world.consumer(options, Does(act));
    world.until_effects(&["a1", "a2"]).await;
    assert!(world.dead().await.is_empty());
    consumer.end().await;
}

#[tokio::test]
async fn a_handler_that_asks_to_be_tried_later_is_and_the_attempt_counts() {
    let world = sqlite().await;
    let later = Duration::from_secs(2);
    let tries: Arc<Mutex<Vec<(Instant, u32)>>> = Arc::default();
    let seen = Arc::clone(&tries);
    let act = move |_: &str, message: &oncebox::Message| {
        seen.lock().unwrap().push((Instant::now(), message.attempt));
        if message.attempt < 3 { Act::Fail(HandlerError::retry_after("busy", later)) } else { Act::Done }
    };
    world.deliver_all(&["a1"]);
    let mut options = consumer_options();
    options.retry.cap = Duration::from_secs(5);
    let consumer = world.consumer(options, Does(act));
    world.until_effects(&["a1"]).await;
    let tries = tries.lock().unwrap().clone();
    assert_eq!(tries.iter().map(|(_, attempt)| *attempt).collect::<Vec<_>>(), [1, 2, 3]);
    // The database counts milliseconds.
    let waited = |pair: &[(Instant, u32)]| pair[1].0 - pair[0].0 + Duration::from_millis(2) >= later;
    assert!(tries.windows(2).all(waited), "{tries:?}");
    consumer.end().await;
}

#[tokio::test]
async fn unhandled_kinds_are_acknowledged_or_dead_as_the_setting_says() {
    for unhandled in [Unhandled::Acknowledge, Unhandled::Dead] {
        let world = sqlite().await;
        world.deliver(&Uuid::now_v7().to_string(), "other", "a1");
        world.deliver_all(&["a2"]);
        let handlers = Handlers::new().on("made", Does(|_: &str, _: &oncebox::Message| Act::Done));
        let consumer = world.consumer_of(ConsumerOptions { unhandled, ..consumer_options() }, handlers);
        world.until_effects(&["a2"]).await;
        let reasons: Vec<String> = world.dead().await.into_iter().map(|dead| dead.reason).collect();
        assert_eq!(reasons, if unhandled == Unhandled::Dead { vec!["unhandled"] } else { vec![] });
        eventually("acknowledged", SOON, || async { (world.broker.committed("ledger", "t", 0) == 2).then_some(()) })
            .await;
        consumer.end().await;
    }
}

/// Two versions of one consumer side by side: the new one stored what only it can handle.
///
/// Shown to fail: the old version acknowledged it as unhandled, and it was gone.
async fn a_waiting_message_stays_until_a_process_runs_that_has_a_handler_for_its_kind<S: Sql>(world: World<S>) {
    let open = Arc::new(AtomicBool::new(false));
    let gate = Arc::clone(&open);
    let act = move |_: &str, _: &oncebox::Message| if gate.load(Ordering::Relaxed) { Act::Done } else { fails() };
    let mut options = consumer_options();
    options.retry.attempts_max = 1_000;
    world.deliver(&Uuid::now_v7().to_string(), "new", "a1");
    // Behind it stands one that both versions take, and one that neither does: that one waits for
    // nothing.
    world.deliver(&Uuid::now_v7().to_string(), "made", "a2");
    world.deliver(&Uuid::now_v7().to_string(), "other", "a3");
    let handlers = Handlers::new().on("new", Does(act.clone())).on("made", Does(act));
    let new = world.consumer_of(options.clone(), handlers);
    world.until_consumer("two wait", |ledger| ledger.waiting == 2).await;
    eventually("all are acknowledged", SOON, || async {
        (world.broker.committed("ledger", "t", 0) == 3).then_some(())
    })
    .await;
    new.end().await;
    open.store(true, Ordering::Relaxed);
    let done = || Does(|_: &str, _: &oncebox::Message| Act::Done);
    let idle = ConsumerOptions { until_idle: Some(Duration::from_millis(300)), ..options.clone() };
    let old = world.consumer_of(idle, Handlers::new().on("made", done()));
    assert_eq!(old.ended().await.unwrap(), RunEnd::Idle, "what is not for it does not keep it");
    assert_eq!(world.consumer_status().await.waiting, 2, "what the old version does not know stays");
    assert!(world.effects().await.is_empty() && world.dead().await.is_empty());
    let new = world.consumer_of(options, Handlers::new().on("new", done()).on("made", done()));
    world.until_effects(&["a1", "a2"]).await;
    new.end().await;
}

#[tokio::test]
async fn a_message_without_a_usable_id_is_dead_with_that_reason_and_the_consumer_goes_on() {
    let world = sqlite().await;
    world.broker.append("t", Some(b"a"), &[], Some(b"a1"));
    world.broker.append("t", Some(b"\xff\0"), &[("ce_type", b"\0")], None);
    world.deliver_all(&["a2"]);
    let consumer = world.consumer(consumer_options(), Does(|_: &str, _: &oncebox::Message| Act::Done));
    world.until_effects(&["a2"]).await;
    let dead = world.dead().await;
    assert!(dead.len() == 2 && dead.iter().all(|dead| dead.reason == "no-usable-id"), "{dead:?}");
    consumer.end().await;
}

#[tokio::test]
async fn a_stop_in_the_middle_hands_back_what_was_not_done_and_nothing_is_lost_or_doubled() {
    let world = sqlite().await;
    let open = Arc::new(AtomicBool::new(false));
    let gate = Arc::clone(&open);
    let mut options = consumer_options();
    options.retry.in_place = 3;
    (options.retry.in_place_delay, options.shutdown_grace) = (SOON * 2, SOON * 2);
    let act = move |name: &str, _: &oncebox::Message| {
        if name == "a2" && !gate.load(Ordering::Relaxed) { fails() } else { Act::Done }
    };
    world.deliver_all(&["a1", "a2", "a3", "b1"]);
    let consumer = world.consumer(options.clone(), Does(act));
    eventually("a2 failed", SOON, || async {
        world.store.texts("select cast(attempts as text) from oncebox_attempt").await.first().map(|_| ())
    })
    .await;
    // It waits neither for the pause of a try in place nor for the end of its grace.
    consumer.end().await;
    assert!(world.broker.committed("ledger", "t", 0) <= 1);
    open.store(true, Ordering::Relaxed);
    let options = ConsumerOptions { until_idle: Some(Duration::from_millis(200)), ..options };
    let again = world.consumer(options, Does(|_: &str, _: &oncebox::Message| Act::Done));
    assert_eq!(again.ended().await.unwrap(), RunEnd::Idle);
    assert_eq!(world.effects().await, ["a1", "a2", "a3", "b1"]);
    assert_eq!(world.broker.committed("ledger", "t", 0), 4);
}

#[tokio::test]
async fn g10_a_broker_that_goes_away_loses_nothing_and_doubles_nothing() {
    let world = sqlite().await;
    let consumer = world.consumer(consumer_options(), Does(|_: &str, _: &oncebox::Message| Act::Done));
    world.broker.faults().lose_acknowledgements(true);
    world.deliver_all(&["a1", "a2"]);
    world.until_effects(&["a1", "a2"]).await;
    world.broker.faults().away(Some("the cable"));
    eventually("the state is visible", SOON, || async { (!world.health.is_ready()).then_some(()) }).await;
    world.broker.faults().lose_acknowledgements(false);
    world.broker.faults().away(None);
    world.deliver_all(&["a3"]);
    world.until_effects(&["a1", "a2", "a3"]).await;
    assert!(world.dead().await.is_empty());
    consumer.end().await;
}
