//! A message that waits for something (a lock, a slow statement) keeps its own key waiting and no
//! other: while it is tried, and while it cannot be tried with success (G6, R26, R27).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use oncebox::store::{DeadFilter, DeadMessage, DeadState};
use oncebox::{ConsumerOptions, HandlerError, Message};

use super::kit::{
    Act, Does, HANGS, SOON, Sql, World, consumer_options, fails, on_mariadb, on_postgres, on_servers, sqlite,
};
use super::standstill::Standstill;
use super::support::eventually;

on_servers! {
    g6_a_waiting_message_that_hangs_in_its_handler_stops_no_other_key,
}

/// Waits in its handler as long as a handler may, tried by a retrier.
///
/// Shown to fail: what had failed before ran with nothing else of the process beside it, and one
/// retrier ran one after the other.
async fn g6_a_waiting_message_that_hangs_in_its_handler_stops_no_other_key<S: Sql>(world: World<S>) {
    let (tries, hangs) = (AtomicU32::new(0), Arc::new(AtomicBool::new(false)));
    let (others, entered) = (AtomicU32::new(0), Arc::clone(&hangs));
    let act = move |name: &str, _: &Message| match name {
        "a1" if tries.fetch_add(1, Ordering::Relaxed) >= 2 => {
            entered.store(true, Ordering::Relaxed);
            Act::Hang
        }
        "a1" => fails(),
        // As often as it fails in its lane: a retrier has it then.
        "w1" if others.fetch_add(1, Ordering::Relaxed) < 2 => fails(),
        _ => Act::Done,
    };
    // It hangs for longer than the others are waited for.
    let (handler_timeout, shutdown_grace) = (SOON * 2, Duration::from_secs(1));
    let options = ConsumerOptions { handler_timeout, shutdown_grace, ..consumer_options() };
    let consumer = world.consumer(options, Does(act));
    world.deliver_all(&["a1"]);
    eventually("it hangs", SOON, || async { hangs.load(Ordering::Relaxed).then_some(()) }).await;
    world.deliver_all(&["b1", "w1", "b2", "c1"]);
    eventually("the others ran", SOON, || async { (world.effects().await.len() == 4).then_some(()) }).await;
    consumer.end().await;
}

/// Shown to fail: it was tried again in place, and held its lane for as long once more.
#[tokio::test]
async fn a_message_whose_handler_ran_out_of_its_time_waits_at_once_and_its_lane_goes_on() {
    let world = sqlite().await;
    let calls = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&calls);
    let act = move |name: &str, _: &Message| match name {
        "a1" => {
            count.fetch_add(1, Ordering::Relaxed);
            Act::Hang
        }
        _ => Act::Done,
    };
    let mut options = ConsumerOptions { handler_timeout: HANGS, ..consumer_options() };
    options.retry.in_place = 5;
    (options.retry.base, options.retry.cap) = (Duration::from_secs(3_600), Duration::from_secs(3_600));
    let consumer = world.consumer(options, Does(act));
    world.deliver_all(&["a1", "b1", "a2"]);
    world.until_effects(&["b1"]).await;
    world.until_consumer("both of the key wait", |ledger| ledger.waiting == 2).await;
    assert_eq!(calls.load(Ordering::Relaxed), 1);
    let waiting = waiting(&world).await;
    assert_eq!(waiting[0].attempts, 1, "the try counts");
    consumer.end().await;
}

async fn waiting<S: Sql>(world: &World<S>) -> Vec<DeadMessage> {
    let filter = DeadFilter { states: vec![DeadState::Waiting], ..DeadFilter::default() };
    world.store.dead(&filter).await.unwrap()
}

/// A connection that has locked the row of `place`, for as long as it lives.
pub(crate) async fn held_row<S: Sql>(world: &World<S>) -> sqlx::pool::PoolConnection<S::Db> {
    world.run("create table place (n int primary key)").await;
    world.run("insert into place values (1)").await;
    let mut holder = world.store.pool().acquire().await.unwrap();
    // Each database knows some of them: nobody is to end its transaction meanwhile.
    let settings =
        ["set idle_in_transaction_session_timeout = 0", "set idle_transaction_timeout = 0", "set wait_timeout = 600"];
    for setting in settings {
        let _unknown = S::run(&mut holder, setting).await;
    }
    S::run(&mut holder, "begin").await.unwrap();
    S::run(&mut holder, "select n from place where n = 1 for update").await.unwrap();
    holder
}

/// The same, and its statement waits: well below the handler's time the database gives up.
async fn waits_for_a_lock<S: Sql>(world: World<S>, code: &'static str) {
    let mut holder = held_row(&world).await;
    let act = |name: &str, _: &Message| match name {
        "m1" => Act::Run("select n from place where n = 1 for update"),
        _ => Act::Done,
    };
    let consumer = world.consumer(consumer_options(), Does(act));
    let (still, began) = (Standstill::watch(), Instant::now());
    world.deliver_all(&["m1", "m2", "a1"]);
    world.until_effects(&["a1"]).await;
    let took = began.elapsed();
    assert!(took < still.allows(consumer_options().handler_timeout / 2), "{took:?}");
    let waits = waiting(&world).await;
    assert_eq!(waits.iter().map(|one| one.attempts).collect::<Vec<_>>(), [0, 0], "{waits:?}");
    assert!(waits[0].error.as_ref().is_some_and(|error| error.contains(code)), "{waits:?}");
    S::run(&mut holder, "rollback").await.unwrap();
    // The numbers of effects are drawn when they are made: a try of m1 may have drawn its own and
    // waited for the lock before a1 came.
    eventually("all are handled", SOON, || async { (world.effects().await.len() == 3).then_some(()) }).await;
    let effects = world.effects().await;
    let of_m: Vec<_> = effects.iter().filter(|name| name.starts_with('m')).collect();
    assert!(of_m == ["m1", "m2"] && effects.iter().any(|name| name == "a1"), "{effects:?}");
    consumer.end().await;
}

/// Shown to fail: the handler ran out of its time, each time longer than the lock was waited for,
/// and a try was counted.
#[tokio::test]
async fn r27_a_message_that_waits_for_somebody_elses_lock_counts_no_try_on_postgres() {
    on_postgres("waits_for_a_lock", |world| waits_for_a_lock(world, "55P03")).await;
}

#[tokio::test]
async fn r27_a_message_that_waits_for_somebody_elses_lock_counts_no_try_on_mariadb() {
    on_mariadb("waits_for_a_lock", |world| waits_for_a_lock(world, "1205")).await;
}

/// One message needs a row that somebody has locked, for a long time.
async fn meets_a_lock<S: Sql>(world: World<S>, code: &'static str) {
    let mut holder = held_row(&world).await;
    let calls = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&calls);
    let act = move |name: &str, _: &Message| match name {
        "m1" => {
            count.fetch_add(1, Ordering::Relaxed);
            Act::Run("select n from place where n = 1 for update nowait")
        }
        _ => Act::Done,
    };
    let mut options = consumer_options();
    options.retry.attempts_max = 2;
    // In the middle of a batch of one lane.
    world.broker.faults().hold_deliveries(true);
    let before: Vec<String> = (10..50).map(|number| format!("b{number}")).collect();
    let behind: Vec<String> = (50..90).map(|number| format!("c{number}")).collect();
    let names = |names: &[String]| names.iter().map(String::from).collect::<Vec<_>>();
    let mut all = names(&before);
    all.extend(["m1".to_owned(), "m2".to_owned()]);
    all.extend(names(&behind));
    world.deliver_all(&all.iter().map(String::as_str).collect::<Vec<_>>());
    let consumer = world.consumer(options, Does(act));
    world.broker.faults().hold_deliveries(false);
    let others: Vec<&str> = before.iter().chain(&behind).map(String::as_str).collect();
    world.until_effects(&others).await;
    world.until_consumer("it waits, and its key behind it", |ledger| ledger.waiting == 2).await;
    // Far more often than it has attempts.
    eventually("tried again and again", SOON, || async { (calls.load(Ordering::Relaxed) > 20).then_some(()) }).await;
    world.deliver_all(&["d1"]);
    eventually("others flow", SOON, || async { world.effects().await.contains(&"d1".to_owned()).then_some(()) }).await;
    let waits = waiting(&world).await;
    let head = &waits[0];
    assert_eq!((head.attempts, waits.len()), (0, 2), "{waits:?}");
    assert!(head.error.as_ref().is_some_and(|error| error.contains(code)), "{head:?}");
    assert!(head.next_try.is_some() && world.dead().await.is_empty());
    assert!(world.health.is_ready(), "{:?}", world.health.lines());
    S::run(&mut holder, "rollback").await.unwrap();
    let last = eventually("its key goes on", SOON, || async {
        let effects = world.effects().await;
        effects.contains(&"m2".to_owned()).then_some(effects)
    })
    .await;
    assert_eq!(last[last.len() - 2..], ["m1", "m2"]);
    consumer.end().await;
}

/// Shown to fail: its lane tried it for ever, and nothing behind it ran.
#[tokio::test]
async fn r27_a_message_that_meets_a_lock_at_every_try_waits_uncounted_and_seen_behind_its_own_key_on_postgres() {
    on_postgres("meets_a_lock", |world| meets_a_lock(world, "55P03")).await;
}

#[tokio::test]
async fn r27_a_message_that_meets_a_lock_at_every_try_waits_uncounted_and_seen_behind_its_own_key_on_mariadb() {
    on_mariadb("meets_a_lock", |world| meets_a_lock(world, "1205")).await;
}

/// What a database says that asks to try again, or that is on its way down, said for one message
/// only. The other keys flow, and the pauses between its tries grow.
#[tokio::test]
async fn r27_a_message_whose_statement_always_raises_a_transient_code_stops_no_partition() {
    const RAISES: [&str; 5] = [
        "do $$ begin raise exception 'no' using errcode = '40001'; end $$",
        "do $$ begin raise exception 'no' using errcode = '40P01'; end $$",
        "do $$ begin raise exception 'no' using errcode = '25006'; end $$",
        "do $$ begin raise exception 'no' using errcode = '57P03'; end $$",
        "do $$ begin raise exception 'no' using errcode = '57P01'; end $$",
    ];
    on_postgres("raises_transient", |world| async move {
        let act = |name: &str, _: &Message| match name.strip_prefix(['m', 'n', 'o', 'p', 'q']) {
            Some(number) => Act::Run(RAISES[number.parse::<usize>().unwrap()]),
            None => Act::Done,
        };
        let mut options = consumer_options();
        (options.retry.base, options.retry.cap) = (Duration::from_millis(200), Duration::from_secs(3_600));
        let consumer = world.consumer(options, Does(act));
        world.deliver_all(&["m0", "b1", "n1", "b2", "o2", "b3", "p3", "b4", "q4", "b5"]);
        world.until_effects(&["b1", "b2", "b3", "b4", "b5"]).await;
        let waits = eventually("each waits, tried more than once", SOON, || async {
            Some(waiting(&world).await)
                .filter(|waits| waits.len() == 5 && waits.iter().all(|one| one.history.len() > 6))
        })
        .await;
        assert!(waits.iter().all(|one| one.attempts == 0), "{waits:?}");
        for one in &waits {
            // What a busy machine takes is not in it.
            let pause = one.next_try.unwrap() - one.history.last().unwrap().at;
            assert!(pause >= chrono::Duration::milliseconds(600), "the pauses grow: {pause:?} in {one:?}");
        }
        consumer.end().await;
    })
    .await;
}

/// A database that is read-only for everybody burns no attempt and stores nothing: the lanes wait.
#[tokio::test]
async fn r27_a_database_that_is_read_only_for_everybody_is_waited_for_and_nothing_is_stored() {
    on_postgres("read_only_for_all", |world| async move {
        let consumer = world.consumer(consumer_options(), Does(|_: &str, _: &Message| Act::Done));
        world.deliver_all(&["a1"]);
        world.until_effects(&["a1"]).await;
        world
            .run(
                "create function refuses() returns trigger language plpgsql as
                 $$ begin raise exception 'cannot execute INSERT in a read-only transaction' using errcode = '25006'; end $$;
                 create trigger refuses before insert on oncebox.inbox_timed for each statement execute function refuses()",
            )
            .await;
        world.deliver_all(&["a2", "b1"]);
        eventually("it says so", SOON, || async { world.says("read-only").then_some(()) }).await;
        // Long enough for three tries alone.
        tokio::time::timeout(Duration::from_secs(4), async {
            loop {
                assert_eq!(world.consumer_status().await.waiting, 0);
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        })
        .await
        .unwrap_err();
        world.run("drop trigger refuses on oncebox.inbox_timed").await;
        world.until_effects(&["a1", "a2", "b1"]).await;
        assert!(world.store.texts("select attempts::text from oncebox.attempt").await.is_empty());
        consumer.end().await;
    })
    .await;
}

/// As on a full disk of SQLite: every statement works, and no COMMIT does. Shown by: rolling back
/// the transaction that is to prove that the database works. Then the message was to be stored as
/// waiting, and was not tried again.
#[tokio::test]
async fn r27_a_database_that_commits_for_nobody_is_waited_for_and_nothing_is_stored() {
    let (heard, _hearing) = super::observed::hear();
    let world = sqlite().await;
    // Refused at COMMIT only, and also where the row of the inbox is gone by then.
    let full = "create table room (id integer primary key);
        create table taken (id references room deferrable initially deferred);
        create trigger takes after insert on oncebox_inbox begin insert into taken values (1); end";
    world.run(full).await;
    let tries = Arc::new(AtomicU32::new(0));
    let is_full = Arc::new(AtomicBool::new(true));
    let (count, fails) = (Arc::clone(&tries), Arc::clone(&is_full));
    let act = move |_: &str, _: &Message| {
        count.fetch_add(1, Ordering::Relaxed);
        let error = || HandlerError::transient("database or disk is full");
        if fails.load(Ordering::Relaxed) { Act::Fail(error()) } else { Act::Done }
    };
    world.deliver_all(&["a1"]);
    let consumer = world.consumer(consumer_options(), Does(act));
    // Three times in its batch, and three times alone would have been the end of it.
    eventually("it is tried on", SOON, || async { (tries.load(Ordering::Relaxed) > 7).then_some(()) }).await;
    world.run("insert into room values (1)").await;
    is_full.store(false, Ordering::Relaxed);
    world.until_effects(&["a1"]).await;
    consumer.end().await;
    let counted = |outcome| heard.metric("oncebox_deliveries_total", &[("consumer", "ledger"), ("outcome", outcome)]);
    let counted = [counted("processed"), counted("retried")].map(|count| count as u64);
    assert_eq!((counted, world.consumer_status().await.waiting), ([1, 0], 0));
}
