//! How long the inbox remembers (R31, G8): a duplicate of what it has forgotten is dead as too old,
//! never run again.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use oncebox::store::{ConsumerSpec, OperatorAct};
use oncebox::{Consumer, ConsumerOptions, HandlerError, Handlers, TopicRetention};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::kit::{Act, Does, SOON, Sql, World, consumer_options, on_all, sqlite};
use super::support::eventually;

on_all! {
    g8_a_duplicate_after_its_inbox_row_was_purged_is_dead_as_too_old,
    r31_what_is_from_the_future_is_dead_holds_nothing_and_runs_once_when_redriven,
    r31_what_was_from_the_future_and_fails_later_holds_its_key_and_runs_when_redriven,
    r31_a_rule_that_is_accepted_while_a_process_waits_for_its_broker_stays,
}

fn done() -> Does<impl Fn(&str, &oncebox::Message) -> Act + Send + Sync> {
    Does(|_: &str, _: &oncebox::Message| Act::Done)
}

/// Remembers for two seconds, and looks all the time.
fn forgetful() -> ConsumerOptions {
    ConsumerOptions {
        horizon: Some(Duration::from_secs(2)),
        purge_every: Duration::from_millis(20),
        redrive_age_max: Duration::ZERO,
        ..consumer_options()
    }
}

/// An id of so many seconds from now.
fn id_at(seconds: i64) -> String {
    let at = uuid::Timestamp::now(uuid::NoContext).to_unix().0.checked_add_signed(seconds).unwrap();
    Uuid::new_v7(uuid::Timestamp::from_unix(uuid::NoContext, at, 0)).to_string()
}

async fn inbox_rows<S: Sql>(world: &World<S>) -> u64 {
    world.consumer_status().await.inbox_rows
}

/// The horizon must exceed what clocks may be off, and on PostgreSQL how long proven outbox rows
/// are kept.
async fn with_exact_clocks<S: Sql>(world: &World<S>) {
    world.run(&format!("update {}limits set value = 1 where name = 'id_skew_seconds'", S::PREFIX)).await;
    if S::NAME == "postgres" {
        world.run("update oncebox.setting set value = 0 where name = 'outbox_retention_seconds'").await;
    }
}

/// Shown by: without the verdict the duplicate ran a second time.
async fn g8_a_duplicate_after_its_inbox_row_was_purged_is_dead_as_too_old<S: Sql>(world: World<S>) {
    with_exact_clocks(&world).await;
    let id = id_at(-50);
    world.deliver(&id, "made", "a1");
    let consumer = world.consumer(forgetful(), done());
    world.until_effects(&["a1"]).await;
    eventually("purged", SOON, || async { (inbox_rows(&world).await == 0).then_some(()) }).await;
    // What is new of the key is not held by the verdict. It is older than the horizon, but nothing
    // of its age was forgotten.
    world.deliver(&id, "made", "a1");
    world.deliver(&id_at(-40), "made", "a2");
    world.until_effects(&["a1", "a2"]).await;
    let dead = world.dead().await;
    assert_eq!(dead.len(), 1, "{dead:?}");
    assert_eq!((dead[0].reason.as_str(), dead[0].payload.as_slice()), ("too-old", b"a1".as_slice()));
    // The operator's word that it was never handled: it runs, and then it is known.
    world.act(OperatorAct::Redrive).await;
    world.until_effects(&["a1", "a2", "a1"]).await;
    assert!(world.dead().await.is_empty());
    consumer.end().await;
}

/// Would fail if `None` were taken for a horizon of zero: the first rounds of the purge remove the
/// row, and the copy is dead as too old.
#[tokio::test]
async fn r31_an_inbox_without_a_horizon_forgets_nothing() {
    let world = sqlite().await;
    let id = id_at(-50);
    world.deliver(&id, "made", "a1");
    let consumer = world.consumer(ConsumerOptions { horizon: None, ..forgetful() }, done());
    world.until_effects(&["a1"]).await;
    // Many rounds of the purge.
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(inbox_rows(&world).await, 1);
    world.deliver(&id, "made", "a1");
    world.deliver(&id_at(-40), "made", "a2");
    world.until_effects(&["a1", "a2"]).await;
    assert!(world.dead().await.is_empty());
    consumer.end().await;
}

/// Shown by: without the verdict a2 and a3 ran at once.
async fn r31_what_is_from_the_future_is_dead_holds_nothing_and_runs_once_when_redriven<S: Sql>(world: World<S>) {
    let future = id_at(2 * 3_600);
    // Within the skew an id is as good as any; beyond it is dead, and holds nothing. A stated time
    // counts where the id has none.
    world.broker.faults().hold_deliveries(true);
    world.deliver(&id_at(1_800), "made", "a1");
    world.deliver(&future, "made", "a2");
    let headers = |time: &'static str| {
        [("ce_id", b"a text".as_slice()), ("ce_source", b"test"), ("ce_time", time.as_bytes()), ("ce_type", b"made")]
    };
    world.broker.append("t", Some(b"a"), &headers("2999-01-01T00:00:00Z"), Some(b"a3"));
    world.deliver_all(&["a4"]);
    let consumer = world.consumer(consumer_options(), done());
    world.broker.faults().hold_deliveries(false);
    world.until_effects(&["a1", "a4"]).await;
    let dead = world.dead().await;
    let shown: Vec<_> = dead.iter().map(|dead| (dead.reason.as_str(), dead.payload.as_slice())).collect();
    let from_the_future = "from-the-future";
    assert_eq!(shown, [(from_the_future, b"a2".as_slice()), (from_the_future, b"a3".as_slice())]);
    assert_eq!(inbox_rows(&world).await, 2, "a verdict leaves no inbox row");
    // The same delivery again is the same dead message.
    world.deliver(&future, "made", "a2");
    world.deliver_all(&["a5"]);
    world.until_effects(&["a1", "a4", "a5"]).await;
    assert_eq!(world.dead().await.len(), 2);
    world.act(OperatorAct::Redrive).await;
    world.until_effects(&["a1", "a4", "a5", "a2", "a3"]).await;
    // From now on a copy is a duplicate.
    world.deliver(&future, "made", "a2");
    world.deliver_all(&["a6"]);
    world.until_effects(&["a1", "a4", "a5", "a2", "a3", "a6"]).await;
    assert!(world.dead().await.is_empty());
    consumer.end().await;
}

/// A copy arrives when the time in its id has come, and its handler fails for good. Shown by: the
/// refused row stood for the failure, so a2 ran, and the redrive discarded a1 as handled.
async fn r31_what_was_from_the_future_and_fails_later_holds_its_key_and_runs_when_redriven<S: Sql>(world: World<S>) {
    let (future, tries) = (id_at(2 * 3_600), AtomicU32::new(0));
    let act = move |name: &str, _: &oncebox::Message| match name {
        "a1" if tries.fetch_add(1, Ordering::Relaxed) == 0 => Act::Fail(HandlerError::terminal("no")),
        _ => Act::Done,
    };
    world.deliver(&future, "made", "a1");
    let consumer = world.consumer(consumer_options(), Does(act));
    world.until_consumer("refused", |ledger| ledger.dead == 1).await;
    // As if two hours had passed.
    world.run(&format!("update {}limits set value = 10800 where name = 'id_skew_seconds'", S::PREFIX)).await;
    world.deliver(&future, "made", "a1");
    world.deliver_all(&["a2"]);
    world.until_consumer("dead by its failure", |ledger| (ledger.dead, ledger.held) == (1, 1)).await;
    let dead = world.dead().await.remove(0);
    assert_eq!((dead.reason.as_str(), dead.payload.as_slice()), ("terminal", b"a1".as_slice()));
    world.act(OperatorAct::Redrive).await;
    world.until_effects(&["a1", "a2"]).await;
    assert!(world.dead().await.is_empty());
    consumer.end().await;
}

/// The time that a message states for itself stays the same in every copy.
#[tokio::test]
async fn g8_an_id_without_time_is_judged_by_the_time_that_the_message_states() {
    let world = sqlite().await;
    with_exact_clocks(&world).await;
    let stated = (chrono::Utc::now() - chrono::Duration::hours(2)).to_rfc3339();
    let deliver = |name: &str| {
        let headers =
            [("ce_id", name.as_bytes()), ("ce_source", b"test"), ("ce_time", stated.as_bytes()), ("ce_type", b"made")];
        world.broker.append("t", Some(b"a"), &headers, Some(name.as_bytes()));
    };
    deliver("a1");
    let consumer = world.consumer(forgetful(), done());
    world.until_effects(&["a1"]).await;
    eventually("purged", SOON, || async { (inbox_rows(&world).await == 0).then_some(()) }).await;
    deliver("a1");
    let dead = eventually("dead", SOON, || async { world.dead().await.pop() }).await;
    assert_eq!(dead.reason, "too-old");
    assert_eq!(world.effects().await, ["a1"]);
    consumer.end().await;
}

/// The process asks its broker how long topics are kept. Shown by: accepting its own rule again
/// with each try: the other process, which was accepted last, lost its rule.
async fn r31_a_rule_that_is_accepted_while_a_process_waits_for_its_broker_stays<S: Sql>(world: World<S>) {
    world.broker.faults().away(Some("the cable"));
    let options = ConsumerOptions { accept_id_rule: true, ..forgetful() };
    let broker = std::sync::Arc::new(world.broker.clone());
    let consumer = Consumer::new(world.store.clone(), broker, Handlers::all(done()), options, world.health.clone());
    let run = tokio::spawn(async move { consumer.run(CancellationToken::new()).await });
    eventually("it waits for its broker", SOON, || async { world.says("the cable").then_some(()) }).await;
    let other = ConsumerSpec { name: "ledger".into(), id_rule: "coordinates@1".into(), accept: true };
    let consumer = world.store.register(&other).await.unwrap();
    let run = tokio::time::timeout(SOON, run).await.expect("it ends by itself").unwrap();
    let error = run.expect_err("it is refused").to_string();
    assert!(error.contains("`coordinates@1`") && error.contains("`envelope`"), "{error}");
    assert!(world.store.seen(consumer, "coordinates@1").await.unwrap(), "the rule stays");
}

/// Each source by itself is too long for a horizon of a minute.
#[tokio::test]
async fn r31_a_horizon_within_which_a_duplicate_can_still_come_is_refused_at_start() {
    let hour = Duration::from_secs(3_600);
    let minute = || ConsumerOptions { horizon: Some(Duration::from_secs(60)), ..forgetful() };
    let mut slow = minute();
    slow.retry.cap = hour;
    let cases = [
        (minute(), Some(TopicRetention::For(hour)), "a topic keeps records for so long that it must exceed 1h 1s"),
        (minute(), Some(TopicRetention::Unlimited), "horizon = \"never\""),
        (minute(), Some(TopicRetention::Compacted), "horizon = \"never\""),
        (
            ConsumerOptions { redrive_age_max: hour, ..minute() },
            None,
            "dead messages may be redriven for so long that it must exceed 1h 1s",
        ),
        (slow, None, "messages may wait for a retry for so long that it must exceed 4h 1s"),
    ];
    for (options, retention, says) in cases {
        let world = sqlite().await;
        with_exact_clocks(&world).await;
        world.deliver_all(&["a1"]);
        world.broker.faults().says_retention(retention);
        let broker = std::sync::Arc::new(world.broker.clone());
        let consumer = Consumer::new(world.store.clone(), broker, Handlers::all(done()), options, world.health.clone());
        let run = tokio::time::timeout(SOON, consumer.run(CancellationToken::new())).await;
        let error = run.expect("it ends by itself").expect_err("it is refused").to_string();
        assert!(error.contains(says) && error.contains("consumer `ledger`"), "{error}");
        assert!(world.effects().await.is_empty(), "nothing was handled");
    }
}

/// The topic was made with a longer retention while the consumer ran.
#[tokio::test]
async fn r31_nothing_is_purged_once_the_horizon_has_become_too_short() {
    let world = sqlite().await;
    with_exact_clocks(&world).await;
    let options = ConsumerOptions { purge_every: Duration::from_millis(500), ..forgetful() };
    world.broker.faults().says_retention(Some(TopicRetention::For(Duration::from_millis(1))));
    world.deliver(&id_at(-5), "made", "a1");
    // Said before there is anything to purge, whatever the test's own process is doing then.
    let broker = world.broker.clone();
    let lengthens = move |_: &str, _: &oncebox::Message| {
        broker.faults().says_retention(Some(TopicRetention::Unlimited));
        Act::Done
    };
    let consumer = world.consumer(options, Does(lengthens));
    world.until_effects(&["a1"]).await;
    // Longer than the horizon, and several rounds: that nothing happens cannot be waited for.
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_eq!(inbox_rows(&world).await, 1);
    world.broker.faults().says_retention(None);
    eventually("purged", SOON, || async { (inbox_rows(&world).await == 0).then_some(()) }).await;
    consumer.end().await;
}
