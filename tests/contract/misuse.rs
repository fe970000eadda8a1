//! Handlers that do what they must not: swallow errors, panic, hang, end the transaction they were
//! given (R23).

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use oncebox::ConsumerOptions;

use oncebox::HandlerError;
use oncebox::store::postgres::PostgresStore;
use oncebox::store::{ActContext, Operator as _, OperatorAct};

use super::kit::{Act, Does, HANGS, SOON, Sql, World, consumer_options, on_mariadb, on_postgres, on_servers, sqlite};
use super::standstill::Standstill;

on_servers! {
    r23_a_raw_commit_in_a_retry_holds_the_key_of_its_message,
    r23_a_raw_commit_in_a_retry_leaves_its_message_dead_though_the_process_dies_then,
}

/// Delivers a1, b1, a2 in one batch; a1's handler misbehaves at its first try.
async fn once<S: Sql>(world: &World<S>, act: impl Fn() -> Act + Send + Sync + 'static) -> super::kit::Running {
    once_within(world, HANGS, act).await
}

/// The same with another time that a handler may run.
async fn once_within<S: Sql>(
    world: &World<S>,
    handler_timeout: Duration,
    act: impl Fn() -> Act + Send + Sync + 'static,
) -> super::kit::Running {
    let tries = AtomicU32::new(0);
    world.broker.faults().hold_deliveries(true);
    world.deliver_all(&["a1", "b1", "a2"]);
    let act = move |name: &str, _: &oncebox::Message| {
        if name == "a1" && tries.fetch_add(1, Ordering::Relaxed) == 0 { act() } else { Act::Done }
    };
    let consumer = world.consumer(ConsumerOptions { handler_timeout, ..consumer_options() }, Does(act));
    world.broker.faults().hold_deliveries(false);
    consumer
}

#[tokio::test]
async fn a_panic_and_a_handler_that_hangs_are_failures_like_any_other() {
    for hangs in [false, true] {
        let world = sqlite().await;
        let consumer = once(&world, move || if hangs { Act::Hang } else { Act::Panic }).await;
        // The lane does not wait for the one that hangs: what is of another key passes it.
        world.until_effects(if hangs { &["b1", "a1", "a2"] } else { &["a1", "b1", "a2"] }).await;
        assert!(world.dead().await.is_empty());
        consumer.end().await;
    }
}

/// With the defaults of a consumer, a handler that hangs gives back the write lock of the file
/// before others give up waiting for it. Shown by: the timeout of a server on every store.
#[tokio::test]
async fn r14_on_sqlite_a_handler_that_hangs_holds_the_write_lock_for_seconds_only() {
    let world = sqlite().await;
    let tries = AtomicU32::new(0);
    let began = Arc::new(OnceLock::new());
    let hung = Arc::clone(&began);
    let still = Standstill::watch();
    world.deliver_all(&["a1"]);
    let act = move |_: &str, _: &oncebox::Message| {
        if tries.fetch_add(1, Ordering::Relaxed) > 0 {
            return Act::Done;
        }
        hung.get_or_init(Instant::now);
        Act::Hang
    };
    let consumer = world.consumer(ConsumerOptions::new("ledger", vec!["t".into()]), Does(act));
    world.until_effects(&["a1"]).await;
    let took = began.get().unwrap().elapsed();
    assert!(took < still.allows_below(Duration::from_secs(6), Duration::from_secs(30)), "{took:?}");
    consumer.end().await;
}

/// What ended with the panic begins anew: the lane at once, the retrier when the lease of the
/// message has run out.
#[tokio::test]
async fn a_panic_that_ends_a_lane_or_the_retrier_is_noticed_and_the_message_handled() {
    for fails_before in [0, 2] {
        let world = sqlite().await;
        let tries = AtomicU32::new(0);
        let began = Arc::new(OnceLock::new());
        let bomb = Arc::clone(&began);
        world.deliver_all(&["a1", "b1", "a2"]);
        let act = move |name: &str, _: &oncebox::Message| match name {
            "a1" => match tries.fetch_add(1, Ordering::Relaxed) {
                n if n < fails_before => super::kit::fails(),
                n if n == fails_before => {
                    bomb.get_or_init(Instant::now);
                    Act::Bomb
                }
                _ => Act::Done,
            },
            _ => Act::Done,
        };
        let options = ConsumerOptions { handler_timeout: HANGS, ..consumer_options() };
        let still = Standstill::watch();
        let consumer = world.consumer(options, Does(act));
        let what = "the part is not ready, and says why";
        super::support::eventually(what, super::kit::SOON, || async { world.says("panicked").then_some(()) }).await;
        let took = began.get().unwrap().elapsed();
        assert!(took < still.allows(Duration::from_secs(1)), "at once: {took:?}");
        super::support::eventually("all ran", super::kit::SOON, || async {
            let seen = world.effects().await;
            ["a1", "b1", "a2"].iter().all(|name| seen.iter().filter(|one| one == name).count() == 1).then_some(())
        })
        .await;
        // A part that stays there and never beats is taken for one that hangs: `/livez` says 503.
        super::support::eventually("what runs again is no part of its own", super::kit::SOON, || async {
            (world.health.lines().len() == 1).then_some(())
        })
        .await;
        consumer.end().await;
    }
}

#[tokio::test]
async fn g4_an_error_that_the_handler_swallowed_commits_nothing_of_it_on_postgres() {
    on_postgres("g4_swallowed", |world| async move {
        // Alone in its batch: beside others, their statements would fail and give it away.
        let tries = AtomicU32::new(0);
        world.deliver_all(&["a1"]);
        let act = move |_: &str, _: &oncebox::Message| match tries.fetch_add(1, Ordering::Relaxed) {
            0 => Act::Swallow("select 1 / 0"),
            _ => Act::Done,
        };
        let consumer = world.consumer(consumer_options(), Does(act));
        world.until_effects(&["a1"]).await;
        assert!(world.dead().await.is_empty());
        consumer.end().await;
    })
    .await;
}

/// The handler of a1 ends its transaction so that nothing of it stays, and goes on. What the
/// handlers after it then write outside any transaction is beyond the promise; nothing is dead,
/// nothing is lost.
async fn all_run_again<S: Sql>(world: World<S>, ends: &'static str) {
    let consumer = once(&world, move || Act::Swallow(ends)).await;
    let seen = super::support::eventually("all ran", super::kit::SOON, || async {
        let seen = world.effects().await;
        ["a1", "b1", "a2"].iter().all(|name| seen.iter().any(|one| one == name)).then_some(seen)
    })
    .await;
    assert_eq!(seen.iter().filter(|name| *name == "a1").count(), 1, "{seen:?}");
    assert!(world.dead().await.is_empty());
    consumer.end().await;
}

#[tokio::test]
async fn r23_a_raw_rollback_runs_the_messages_again_and_loses_none() {
    on_postgres("r23_rollback", |world| all_run_again(world, "rollback")).await;
}

/// Shown by: a COMMIT that is not refused leaves all three dead.
#[tokio::test]
async fn r23_a_handler_that_swallows_the_refusal_of_its_commit_runs_again() {
    on_postgres("r23_swallowed", |world| all_run_again(world, "commit")).await;
}

/// Dead, loudly, and nothing that stood in the same transaction is taken for a duplicate.
async fn is_dead_as_ended<S: Sql>(world: &World<S>) {
    let dead = super::support::eventually("all dead", super::kit::SOON, || async {
        Some(world.dead().await).filter(|dead| dead.len() == 3)
    })
    .await;
    assert!(dead.iter().all(|dead| dead.reason == "transaction-ended"), "{dead:?}");
    let of_a: Vec<_> = dead.iter().filter(|dead| dead.key.as_deref() == Some("a")).map(|dead| &dead.payload).collect();
    assert_eq!(of_a, [b"a1", b"a2"], "in the key's order, so that redriven they run in it");
}

#[tokio::test]
async fn r23_a_raw_commit_is_dead_as_transaction_ended_on_postgres() {
    on_postgres("r23_commit", |world| async move {
        let consumer = once(&world, || Act::Swallow(PostgresStore::COMMIT)).await;
        is_dead_as_ended(&world).await;
        consumer.end().await;
    })
    .await;
}

/// PostgreSQL refuses such a commit, so it is a failure of its message and of no other. Before it
/// did, the whole batch was dead as `transaction-ended`.
#[tokio::test]
async fn r23_a_raw_commit_that_is_refused_fails_its_own_message_only() {
    for statement in ["commit", "insert into effect (text) values ('more'); end", "commit and chain"] {
        on_postgres("r23_refused", move |world| async move {
            world.broker.faults().hold_deliveries(true);
            world.deliver_all(&["a1", "b1", "c1", "a2"]);
            let act = move |name: &str, _: &oncebox::Message| match name {
                "a1" => Act::Run(statement),
                _ => Act::Done,
            };
            let consumer = world.consumer(consumer_options(), Does(act));
            world.broker.faults().hold_deliveries(false);
            world.until_consumer("dead after its attempts", |ledger| (ledger.dead, ledger.held) == (1, 1)).await;
            world.until_effects(&["b1", "c1"]).await;
            let dead = world.dead().await.remove(0);
            assert_eq!((dead.reason.as_str(), dead.payload.as_slice()), ("attempts", &b"a1"[..]));
            assert!(!dead.history.is_empty(), "the errors of its tries are kept");
            assert!(dead.history.iter().all(|one| one.error.contains("must not commit")), "{:?}", dead.history);
            consumer.end().await;
        })
        .await;
    }
}

/// Shown to fail on the code before: all three were acknowledged as duplicates, b1 and a2 without
/// ever having run.
#[tokio::test]
async fn r23_a_raw_commit_before_a_failure_is_dead_too_and_its_batch_is_not_lost() {
    on_postgres("r23_commit_and_fail", |world| async move {
        let consumer = once(&world, || Act::RunAndFail(PostgresStore::COMMIT)).await;
        is_dead_as_ended(&world).await;
        consumer.end().await;
    })
    .await;
}

const COMMIT_THEN_ABORT: &str = "close all; commit; begin; select 1 / 0";

/// Shown to fail on the code before: the aborted transaction hid the committed one, and all three
/// were acknowledged as duplicates.
#[tokio::test]
async fn r23_a_raw_commit_with_a_new_transaction_that_aborts_is_dead_too_and_its_batch_is_not_lost() {
    for swallows in [true, false] {
        on_postgres("r23_commit_begin_abort", move |world| async move {
            let act = move || match swallows {
                true => Act::Swallow(COMMIT_THEN_ABORT),
                false => Act::RunAndFail(COMMIT_THEN_ABORT),
            };
            let consumer = once(&world, act).await;
            is_dead_as_ended(&world).await;
            consumer.end().await;
        })
        .await;
    }
}

/// Nothing was committed: it is a failure like any other.
#[tokio::test]
async fn r23_a_raw_rollback_with_a_new_transaction_that_aborts_runs_again_and_each_effect_once() {
    on_postgres("r23_rollback_begin_abort", |world| async move {
        let consumer = once(&world, || Act::RunAndFail("rollback; begin; select 1 / 0")).await;
        world.until_effects(&["a1", "b1", "a2"]).await;
        assert!(world.dead().await.is_empty());
        consumer.end().await;
    })
    .await;
}

/// Shown to fail by deleting the row first: the handler committed the message away.
#[tokio::test]
async fn r23_a_raw_commit_with_a_new_transaction_that_aborts_in_a_retry_is_dead_and_not_lost() {
    on_postgres("r23_commit_begin_abort_in_retry", |world| async move {
        let tries = AtomicU32::new(0);
        world.deliver_all(&["a1", "a2"]);
        let act = move |name: &str, _: &oncebox::Message| match (name, tries.fetch_add(1, Ordering::Relaxed)) {
            ("a1", 0..2) => super::kit::fails(),
            ("a1", _) => Act::Swallow(COMMIT_THEN_ABORT),
            _ => Act::Done,
        };
        let consumer = world.consumer(consumer_options(), Does(act));
        world.until_consumer("dead", |ledger| ledger.dead == 1).await;
        assert_eq!(world.dead().await[0].reason, "transaction-ended");
        consumer.end().await;
    })
    .await;
}

/// Shown to fail by deleting the row first: the handler committed the message away.
#[tokio::test]
async fn r23_a_raw_commit_in_a_retry_that_fails_is_dead_and_not_lost() {
    on_postgres("r23_commit_in_retry", |world| async move {
        let tries = AtomicU32::new(0);
        world.deliver_all(&["a1", "a2"]);
        let act = move |name: &str, _: &oncebox::Message| match (name, tries.fetch_add(1, Ordering::Relaxed)) {
            ("a1", 0..2) => super::kit::fails(),
            ("a1", _) => Act::RunAndFail(PostgresStore::COMMIT),
            _ => Act::Done,
        };
        let consumer = world.consumer(consumer_options(), Does(act));
        world.until_consumer("dead", |ledger| ledger.dead == 1).await;
        assert_eq!(world.dead().await[0].reason, "transaction-ended");
        consumer.end().await;
    })
    .await;
}

/// What stands behind it stays there, and so does what comes meanwhile. Shown to fail: the next one
/// was due with the handler's commit, and the dead one was stored behind all of them.
async fn r23_a_raw_commit_in_a_retry_holds_the_key_of_its_message<S: Sql>(world: World<S>) {
    let tries = AtomicU32::new(0);
    world.deliver_all(&["a1", "a2", "a3"]);
    let act = move |name: &str, _: &oncebox::Message| match (name, tries.fetch_add(1, Ordering::Relaxed)) {
        ("a1", 0..2) => super::kit::fails(),
        ("a1", 2) => Act::RunAndFail(S::COMMIT),
        _ => Act::Done,
    };
    let consumer = world.consumer(consumer_options(), Does(act));
    world.until_consumer("dead, and two held", |ledger| (ledger.dead, ledger.held) == (1, 2)).await;
    let dead = world.dead().await.remove(0);
    assert_eq!((dead.reason.as_str(), dead.payload.as_slice(), dead.behind), ("transaction-ended", &b"a1"[..], 2));
    world.deliver_all(&["a4"]);
    world.until_consumer("the next one is held too", |ledger| (ledger.dead, ledger.held) == (1, 3)).await;
    assert_eq!(world.effects().await, ["a1"], "what its handler committed");
    world.act(OperatorAct::Discard).await;
    world.until_effects(&["a1", "a2", "a3", "a4"]).await;
    consumer.end().await;
}

/// The process dies after the handler's commit, before it stores anything else. Shown by: storing
/// the message as dead only afterwards (nothing told of it, and the next one of its key ran).
async fn r23_a_raw_commit_in_a_retry_leaves_its_message_dead_though_the_process_dies_then<S: Sql>(world: World<S>) {
    let tries = AtomicU32::new(0);
    world.deliver_all(&["a1", "a2"]);
    let act = move |name: &str, _: &oncebox::Message| match (name, tries.fetch_add(1, Ordering::Relaxed)) {
        ("a1", 0..2) => super::kit::fails(),
        ("a1", _) => Act::Then(S::COMMIT, Box::new(Act::Hang)),
        _ => Act::Done,
    };
    let options = ConsumerOptions { handler_timeout: SOON * 2, ..consumer_options() };
    let consumer = world.consumer(options, Does(act));
    world.until_consumer("dead while its handler hangs", |ledger| (ledger.dead, ledger.held) == (1, 1)).await;
    consumer.task.abort();
    assert!(consumer.task.await.unwrap_err().is_cancelled());
    let next = world.consumer(consumer_options(), Does(|_: &str, _: &oncebox::Message| Act::Done));
    world.deliver_all(&["a3", "b1"]);
    world.until_consumer("the next one is held too", |ledger| (ledger.dead, ledger.held) == (1, 2)).await;
    world.until_effects(&["a1", "b1"]).await;
    let dead = world.dead().await.remove(0);
    assert_eq!((dead.reason.as_str(), dead.payload.as_slice(), dead.behind), ("transaction-ended", &b"a1"[..], 2));
    assert!(dead.history.len() > 1, "the errors of its tries are kept: {:?}", dead.history);
    world.act(OperatorAct::Discard).await;
    world.until_effects(&["a1", "b1", "a2", "a3"]).await;
    next.end().await;
}

/// How a handler ends its transaction, and a statement that outlives its time.
#[derive(Clone, Copy)]
struct Ends {
    commit: &'static str,
    sleep: &'static str,
    /// The connections of this database in which that statement still runs.
    sleeping: &'static str,
}

/// What a handler runs into behind its commit: a transient failure, or the end of its own
/// time.
fn behind_a_commit(ends: Ends, transient: bool) -> Act {
    let then = match transient {
        true => Act::Fail(HandlerError::transient("deadlock detected")),
        false => Act::Swallow(ends.sleep),
    };
    Act::Then(ends.commit, Box::new(then))
}

/// In a batch: neither it nor those that stood beside it in the transaction are lost.
async fn in_a_batch<S: Sql>(world: World<S>, ends: Ends, transient: bool) {
    world.run("create table staging (a int)").await;
    // Time enough to see the statement run.
    let consumer = once_within(&world, 3 * HANGS, move || behind_a_commit(ends, transient)).await;
    if !transient {
        super::support::eventually("its statement runs", SOON, || async {
            (!world.store.texts(ends.sleeping).await.is_empty()).then_some(())
        })
        .await;
    }
    is_dead_as_ended(&world).await;
    super::support::eventually("no statement goes on without its handler", super::kit::SOON / 2, || async {
        world.store.texts(ends.sleeping).await.is_empty().then_some(())
    })
    .await;
    consumer.end().await;
}

/// In a retry: its row is dead with the commit.
async fn in_a_retry<S: Sql>(world: World<S>, ends: Ends, transient: bool) {
    world.run("create table staging (a int)").await;
    let tries = AtomicU32::new(0);
    world.deliver_all(&["a1", "a2"]);
    let act = move |name: &str, _: &oncebox::Message| match (name, tries.fetch_add(1, Ordering::Relaxed)) {
        ("a1", 0..2) => super::kit::fails(),
        ("a1", 2) => behind_a_commit(ends, transient),
        _ => Act::Done,
    };
    let options = ConsumerOptions { handler_timeout: HANGS, ..consumer_options() };
    let consumer = world.consumer(options, Does(act));
    world.until_consumer("dead", |ledger| ledger.dead == 1).await;
    assert_eq!(world.dead().await[0].reason, "transaction-ended");
    consumer.end().await;
}

const ON_POSTGRES: Ends = Ends {
    commit: PostgresStore::COMMIT,
    sleep: "select pg_sleep(60)",
    sleeping: "select query from pg_stat_activity
        where datname = current_database() and state = 'active' and query = 'select pg_sleep(60)'",
};
/// `truncate` commits by itself there, as DDL does.
const ON_MARIADB: Ends = Ends {
    commit: "truncate table staging",
    sleep: "select sleep(60)",
    sleeping: "select info from information_schema.processlist where db = database() and info = 'select sleep(60)'",
};

#[tokio::test]
async fn a_commit_of_the_handler_before_a_transient_failure_loses_no_message_of_the_batch() {
    on_postgres("commit_transient", |world| in_a_batch(world, ON_POSTGRES, true)).await;
    on_mariadb("commit_transient", |world| in_a_batch(world, ON_MARIADB, true)).await;
}

#[tokio::test]
async fn a_commit_of_the_handler_before_it_runs_out_of_time_loses_no_message_of_the_batch() {
    on_postgres("commit_late", |world| in_a_batch(world, ON_POSTGRES, false)).await;
    on_mariadb("commit_late", |world| in_a_batch(world, ON_MARIADB, false)).await;
}

#[tokio::test]
async fn a_commit_of_the_handler_in_a_retry_before_a_transient_failure_loses_no_message() {
    on_postgres("commit_transient_retry", |world| in_a_retry(world, ON_POSTGRES, true)).await;
    on_mariadb("commit_transient_retry", |world| in_a_retry(world, ON_MARIADB, true)).await;
}

#[tokio::test]
async fn a_commit_of_the_handler_in_a_retry_that_runs_out_of_time_loses_no_message() {
    on_postgres("commit_late_retry", |world| in_a_retry(world, ON_POSTGRES, false)).await;
    on_mariadb("commit_late_retry", |world| in_a_retry(world, ON_MARIADB, false)).await;
}

const DEFERRED: &str = "create table parent (id int primary key); \
    create table child (parent int references parent (id) deferrable initially deferred)";

async fn deferred<S: Sql>(world: World<S>) {
    world.run(DEFERRED).await;
    let bad = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&bad);
    world.deliver_all(&["a1", "b1", "a2"]);
    let act = move |name: &str, _: &oncebox::Message| {
        if name != "a1" {
            return Act::Done;
        }
        count.fetch_add(1, Ordering::Relaxed);
        Act::Swallow("insert into child values (7)")
    };
    let consumer = world.consumer(consumer_options(), Does(act));
    world.until_consumer("dead after its attempts", |ledger| (ledger.dead, ledger.held) == (1, 1)).await;
    world.until_effects(&["b1"]).await;
    assert_eq!(world.dead().await[0].reason, "attempts");
    // Its four tries, and two in which it was not yet known whose failure it was: three messages,
    // then two.
    assert_eq!(bad.load(Ordering::Relaxed), 6);
    consumer.end().await;
}

/// Shown to fail on the code before: the batch ran for ever, as if the database were away.
#[tokio::test]
async fn a_constraint_that_speaks_at_commit_is_a_failure_of_the_message_on_postgres() {
    on_postgres("deferred", deferred).await;
}

#[tokio::test]
async fn a_constraint_that_speaks_at_commit_is_a_failure_of_the_message_on_sqlite() {
    deferred(sqlite().await).await;
}

/// Its process runs on: frozen, or told to wait, for longer than five minutes. Shown to fail by
/// only saying it: each batch failed with an error that named a number, for ever.
#[tokio::test]
async fn a_consumer_that_an_operator_forgot_ends_and_the_next_start_begins_anew() {
    let world = sqlite().await;
    let running = world.consumer(consumer_options(), Does(|_: &str, _: &oncebox::Message| Act::Done));
    world.deliver_all(&["a1"]);
    world.until_effects(&["a1"]).await;
    world.run("update oncebox_consumer set seen_at = seen_at - 3600000").await;
    let context = ActContext { actor: "acc-7".into(), reason: "gone".into(), dry_run: false, redrive_age_max: None };
    world.store.forget_consumer("ledger", &context).await.unwrap();
    world.deliver_all(&["a2"]);
    let refused = running.ended().await.unwrap_err().to_string();
    assert!(refused.contains("an operator forgot"), "{refused}");
    let next = world.consumer(consumer_options(), Does(|_: &str, _: &oncebox::Message| Act::Done));
    world.until_effects(&["a1", "a2"]).await;
    next.end().await;
}

/// Shown to fail by changing its name alone: it ran on while its inbox was deleted, and beside the
/// next one of its name.
#[tokio::test]
async fn a_process_is_told_that_its_consumer_is_forgotten_while_its_inbox_is_still_there() {
    let world = sqlite().await;
    let running = world.consumer(consumer_options(), Does(|_: &str, _: &oncebox::Message| Act::Done));
    world.deliver_all(&["a1"]);
    world.until_effects(&["a1"]).await;
    world.run("update oncebox_consumer set seen_at = seen_at - 3600000").await;
    world
        .run("create trigger stays before delete on oncebox_inbox begin select raise(abort, 'it is broken off'); end")
        .await;
    let context = ActContext { actor: "acc-7".into(), reason: "gone".into(), dry_run: false, redrive_age_max: None };
    let broken_off = world.store.forget_consumer("ledger", &context).await.unwrap_err();
    assert!(broken_off.to_string().contains("it is broken off"), "{broken_off}");
    let refused = running.ended().await.unwrap_err().to_string();
    assert!(refused.contains("an operator forgot"), "{refused}");
    // The act goes on where it ended, at once: the process that was told is not seen.
    world.run("drop trigger stays").await;
    let left = world.store.status().await.unwrap().consumers.remove(0);
    assert_eq!((left.name.starts_with("(forgotten "), left.inbox_rows), (true, 1), "{}", left.name);
    assert_eq!(world.store.forget_consumer(&left.name, &context).await.unwrap().inbox_rows, 1);
    assert!(world.store.status().await.unwrap().consumers.is_empty());
}

/// What PostgreSQL itself says on this thread.
#[derive(Clone, Default)]
struct Notices(Arc<Mutex<Vec<String>>>);

impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Notices {
    fn on_event(&self, event: &tracing::Event<'_>, _: tracing_subscriber::layer::Context<'_, S>) {
        if event.metadata().target() == "sqlx::postgres::notice" {
            let mut said = String::new();
            event.record(&mut |field: &tracing::field::Field, value: &dyn std::fmt::Debug| {
                said.push_str(&format!("{field}={value:?} "));
            });
            self.0.lock().unwrap().push(said);
        }
    }
}

/// Shown by the last statement: a second end of one transaction is heard.
#[tokio::test]
async fn a_failed_handler_makes_postgres_warn_of_no_transaction_that_is_not_there() {
    use tracing_subscriber::layer::SubscriberExt;
    let notices = Notices::default();
    let _beside = tracing::Dispatch::new(tracing_subscriber::Registry::default());
    let _heard = tracing::subscriber::set_default(tracing_subscriber::Registry::default().with(notices.clone()));
    let said = move || notices.0.lock().unwrap().clone();
    on_postgres("no_notices", |world| async move {
        let tries = AtomicU32::new(0);
        world.deliver_all(&["a1", "b1", "a2"]);
        let act = move |name: &str, _: &oncebox::Message| match (name, tries.fetch_add(1, Ordering::Relaxed)) {
            ("a1", 0) => Act::Run("select 1 / 0"),
            ("a1", 1..4) => super::kit::fails(),
            _ => Act::Done,
        };
        let consumer = world.consumer(consumer_options(), Does(act));
        super::support::eventually("all ran", SOON, || async { (world.effects().await.len() == 3).then_some(()) })
            .await;
        consumer.end().await;
        let ends: Vec<_> = said().into_iter().filter(|said| said.contains("no transaction")).collect();
        assert!(ends.is_empty(), "{ends:?}");
        world.run("rollback").await;
        assert!(said().iter().any(|said| said.contains("no transaction")), "{:?}", said());
    })
    .await;
}
