//! A destination that takes nothing holds its own topic, and nothing else; what stops the relay is
//! shown.

use std::sync::Arc;
use std::time::{Duration, Instant};

use oncebox::broker::Broker;
use oncebox::store::postgres::PostgresStore;
use oncebox::store::sqlite::SqliteStore;
use oncebox::store::{DeadFilter, DeadState, OperatorAct};
use oncebox::{BrokerError, RelayOptions, RunEnd};
use oncebox_testkit::memory::{Fault, matching};
use sqlx::{Postgres, Transaction};
use tokio::sync::Semaphore;

use super::kit::{SOON, Sql, World, first_occurrences, on_postgres, relay_options, sqlite};
use super::standstill::Standstill;
use super::support::eventually;
use super::troubled::{Creation, Troubled};

/// One message after the other to the topic `good`, while others stand: together they take seconds.
async fn good_ones(world: &World<SqliteStore>, count: usize) {
    let (still, began) = (Standstill::watch(), Instant::now());
    for number in 0..count {
        let name = format!("g{number}");
        world.enqueue("good", &[&name]).await;
        eventually("it is in the broker", SOON, || async {
            world.published("good").await.contains(&name).then_some(())
        })
        .await;
    }
    let took = began.elapsed();
    assert!(took < still.allows(Duration::from_secs(5)), "{took:?} for {count}");
}

/// Shown to fail on the code before: judged by the last answer of any row, the topic was never
/// noticed, and everything since its first row came a second time. The bound is exact: a read that
/// may begin in an almost full window sends up to nine rows more again.
#[tokio::test]
async fn g3_a_topic_that_neither_takes_nor_refuses_holds_itself_and_what_is_sent_again_is_bounded() {
    let world = sqlite().await;
    world.broker.faults().silent_topic("stuck", true);
    let options =
        || RelayOptions { window_rows: 40, batch_rows: 10, probe: Duration::from_millis(200), ..relay_options() };
    let relay = world.relay(options());
    world.enqueue("stuck", &["a1", "a2"]).await;
    // More than the window: the stuck row keeps them waiting until its topic is held.
    for portion in 0..12 {
        let names: Vec<String> = (0..10).map(|n| format!("b{}", portion * 10 + n)).collect();
        world.enqueue("good", &names.iter().map(String::as_str).collect::<Vec<_>>()).await;
    }
    eventually("all of the others", SOON, || async {
        (first_occurrences(world.published("good").await).len() == 120).then_some(())
    })
    .await;
    let sent = world.published("good").await.len();
    // Two rows of the window are those of the stuck topic.
    assert!(sent <= 120 + 38, "{sent} were sent for 120: more again than the window has");
    world.until_status("its own are held", |status| (status.held, status.dead, status.pending) == (2, 0, 0)).await;
    // From then on its trials delay nobody, and the relay is ready.
    good_ones(&world, 20).await;
    assert!(world.health.is_ready(), "{:?}", world.health.lines());
    assert_eq!(world.published("stuck").await, Vec::<String>::new());
    world.enqueue("stuck", &["a3"]).await;
    world.broker.faults().silent_topic("stuck", false);
    eventually("in order, once it answers", 2 * SOON, || async {
        (first_occurrences(world.published("stuck").await) == ["a1", "a2", "a3"]).then_some(())
    })
    .await;
    world.until_status("nothing is held", |status| status.held + status.pending == 0).await;
    relay.end().await;
}

/// Shown to fail on the code before: each refusal was a session of its own, and what was taken came
/// again with each.
#[tokio::test]
async fn g3_many_topics_that_refuse_cost_no_session_each_and_delay_nobody() {
    let world = sqlite().await;
    for topic in 0..60 {
        let topic = format!("bad{topic}");
        world.broker.faults().on_publish(Fault::RefuseDestination("no route".into()), matching::topic(topic.clone()));
        world.enqueue(&topic, &["a1", "b1"]).await;
        world.enqueue("good", &[&format!("a{topic}")]).await;
    }
    let before = world.status().await.shards[0].epoch;
    let relay = world.relay(relay_options());
    world.until_status("all are held", |status| (status.held, status.pending, status.dead) == (120, 0, 0)).await;
    assert_eq!(world.status().await.shards[0].epoch, before + 1, "one session found out all of them");
    assert_eq!(world.published("good").await.len(), 60, "nothing came twice");
    good_ones(&world, 10).await;
    assert!(world.health.is_ready(), "{:?}", world.health.lines());
    world.broker.faults().clear_on_publish();
    world.until_status("released by themselves", |status| status.held + status.pending == 0).await;
    for topic in 0..60 {
        let mut published = first_occurrences(world.published(&format!("bad{topic}")).await);
        published.sort();
        assert_eq!(published, ["a1", "b1"]);
    }
    relay.end().await;
}

/// Shown by: not looking at the task (the round is under way for ever, and the topics are blocked
/// until the session ends).
#[tokio::test]
async fn a_trial_that_ended_in_disorder_is_noticed_and_its_topics_are_tried_again() {
    let world = sqlite().await;
    world.broker.faults().missing_topic("t", true);
    // The second session is that of a trial.
    let disorder = |number: u32| {
        assert_ne!(number, 1, "the client is in disorder");
        Ok(())
    };
    let broker = Arc::new(Troubled { opening: disorder, ..Troubled::new(&world.broker) });
    let options = RelayOptions { probe: Duration::from_millis(100), ..relay_options() };
    let relay = world.relay_to(Arc::clone(&broker) as Arc<dyn Broker>, options);
    world.enqueue("t", &["a1", "a2"]).await;
    world.until_status("held", |status| status.held == 2).await;
    eventually("another session for trials", SOON, || async { (broker.asked_for() >= 3).then_some(()) }).await;
    let epoch = world.status().await.shards[0].epoch;
    world.broker.faults().missing_topic("t", false);
    world.until_published("t", &["a1", "a2"]).await;
    world.until_status("nothing is held", |status| status.held + status.pending == 0).await;
    assert_eq!(world.status().await.shards[0].epoch, epoch, "the session went on");
    relay.end().await;
}

/// A row of a blocked topic that ends each session it is tried in must not keep the other blocked
/// topics closed.
#[tokio::test]
async fn g3_a_row_that_ends_the_sessions_of_trials_is_found_out_and_closes_no_other_topic() {
    let world = sqlite().await;
    let faults = world.broker.faults();
    for topic in ["t", "u", "v"] {
        faults.missing_topic(topic, true);
    }
    let ids = world.enqueue("t", &["a1", "a2"]).await;
    world.enqueue("u", &["a1"]).await;
    world.enqueue("v", &["a1"]).await;
    let relay = world.relay(RelayOptions { probe: Duration::from_millis(100), ..relay_options() });
    world.until_status("held", |status| status.held == 4).await;
    faults.on_publish(Fault::BreakBefore, matching::id(ids[0]));
    for topic in ["t", "u", "v"] {
        faults.missing_topic(topic, false);
    }
    world.until_published("u", &["a1"]).await;
    world.until_published("v", &["a1"]).await;
    let late = 4 * SOON;
    eventually("it is dead, and holds its key", late, || async {
        let status = world.status().await;
        ((status.dead, status.held) == (1, 1)).then_some(())
    })
    .await;
    relay.end().await;
}

/// Shown to fail on the code before: the relay asked for the row without end, read nothing more,
/// and was ready.
#[tokio::test]
async fn a_held_row_that_was_deleted_by_hand_stops_nothing() {
    let world = sqlite().await;
    world.broker.faults().missing_topic("t", true);
    let relay = world.relay(RelayOptions { probe: Duration::from_millis(100), ..relay_options() });
    world.enqueue("t", &["a1", "a2"]).await;
    world.until_status("held", |status| status.held == 2).await;
    world.run("delete from oncebox_outbox_dead where position = (select min(position) from oncebox_outbox_dead)").await;
    world.broker.faults().missing_topic("t", false);
    world.until_published("t", &["a2"]).await;
    world.enqueue("t", &["a3"]).await;
    world.enqueue("u", &["b1"]).await;
    world.until_published("u", &["b1"]).await;
    world.until_published("t", &["a2", "a3"]).await;
    relay.end().await;
}

/// Shown to fail on the code before: ready as soon as the lease was taken, whatever came of it.
#[tokio::test]
async fn a_relay_whose_sessions_end_and_mark_nothing_is_not_ready_until_one_does() {
    let world = sqlite().await;
    world.broker.faults().on_publish(Fault::BreakBefore, matching::every(1));
    world.enqueue("t", &["a1"]).await;
    let relay = world.relay(relay_options());
    eventually("it says so", SOON, || async {
        let lines = world.health.lines();
        (!world.health.is_ready() && lines.iter().any(|line| line.contains("in a row ended and got nothing marked")))
            .then_some(())
    })
    .await;
    let epoch = world.status().await.shards[0].epoch;
    eventually("two more sessions", SOON, || async {
        // The relay runs on this thread: nothing of it goes by between two looks but a step.
        for _ in 0..100 {
            assert!(!world.health.is_ready(), "{:?}", world.health.lines());
            tokio::task::yield_now().await;
        }
        (world.status().await.shards[0].epoch >= epoch + 2).then_some(())
    })
    .await;
    world.broker.faults().clear_on_publish();
    world.until_status("all is marked", |status| status.pending + status.held == 0).await;
    world.enqueue("t", &["b1"]).await;
    eventually("ready again", SOON, || async { world.health.is_ready().then_some(()) }).await;
    relay.end().await;
}

/// On the code before it was ready, whatever became of the trials.
#[tokio::test]
async fn a_relay_all_of_whose_topics_are_blocked_is_not_ready_until_one_takes_messages() {
    let world = sqlite().await;
    for topic in ["t", "u"] {
        world.broker.faults().missing_topic(topic, true);
        world.enqueue(topic, &["a1"]).await;
    }
    let relay = world.relay(relay_options());
    let said = |world: &World<SqliteStore>| {
        let lines = world.health.lines();
        !world.health.is_ready() && lines.iter().any(|line| line.contains("no topic takes messages, 2 blocked"))
    };
    eventually("it says so", SOON, || async { said(&world).then_some(()) }).await;
    // One that works: the others are shown elsewhere, and the relay is at work.
    world.enqueue("good", &["a1"]).await;
    world.until_published("good", &["a1"]).await;
    eventually("ready again", SOON, || async { world.health.is_ready().then_some(()) }).await;
    good_ones(&world, 20).await;
    assert!(world.health.is_ready(), "{:?}", world.health.lines());
    relay.end().await;
    let relay = world.relay(relay_options());
    eventually("a new session knows of none that works", SOON, || async { said(&world).then_some(()) }).await;
    for topic in ["t", "u"] {
        world.broker.faults().missing_topic(topic, false);
    }
    world.until_status("all is sent", |status| status.held == 0).await;
    eventually("ready again", SOON, || async { world.health.is_ready().then_some(()) }).await;
    relay.end().await;
}

/// Shown to fail on the code before: a stop waited for the answer of the broker and then for that
/// of the database.
#[tokio::test]
async fn a_stop_ends_within_its_grace_although_the_broker_says_nothing() {
    let world = sqlite().await;
    world.broker.faults().silent_topic("t", true);
    let relay = world.relay(RelayOptions { shutdown_grace: Duration::from_secs(2), ..relay_options() });
    world.enqueue("t", &["a1"]).await;
    world.enqueue("u", &["a1"]).await;
    world.until_published("u", &["a1"]).await;
    let (still, began) = (Standstill::watch(), Instant::now());
    relay.end().await;
    let took = began.elapsed();
    assert!(took < still.allows(Duration::from_secs(4)), "{took:?}");
}

/// More gaps than may be open, with a committed message behind each, and the transaction that keeps
/// them open, with its process.
async fn many_gaps(world: &World<PostgresStore>) -> (Transaction<'static, Postgres>, i32) {
    let pool = sqlx::PgPool::connect(&world.url).await.unwrap();
    let mut holder = pool.begin().await.unwrap();
    let pid: i32 = sqlx::query_scalar("select pg_backend_pid()").fetch_one(&mut *holder).await.unwrap();
    let enqueue = "select oncebox.enqueue('t', 'made', 'h'::text, key => 'h')";
    sqlx::raw_sql(enqueue).execute(&mut *holder).await.unwrap();
    // A position that nobody fills, and a committed message, some thousand times.
    sqlx::raw_sql(
        "do $$ begin
           perform set_config('synchronous_commit', 'off', false);
           for i in 1..4500 loop
             perform nextval('oncebox.outbox_position_seq');
             perform oncebox.enqueue('t', 'made', ('m' || i)::text, key => i::text);
             commit;
           end loop;
         end $$",
    )
    .execute(&pool)
    .await
    .unwrap();
    (holder, pid)
}

/// Shown to fail on the code before: at the bound nothing was read, and nothing said so.
#[tokio::test]
async fn r9_as_many_open_gaps_as_may_be_are_shown_with_who_holds_them_and_end_with_it() {
    on_postgres("r9_as_many_open_gaps_as_may_be", |world| async move {
        let (holder, pid) = many_gaps(&world).await;
        let relay = world.relay(relay_options());
        eventually("shown, with the process", 3 * SOON, || async {
            let said = world.health.lines().into_iter().find(|line| line.contains("gaps are open, and no more may be"));
            said.filter(|line| line.contains(&format!("process {pid}")) && !world.health.is_ready())
        })
        .await;
        assert!(world.status().await.pending > 0, "nothing waits behind the bound: nothing is shown");
        holder.rollback().await.unwrap();
        world.until_status("everything is read", |status| status.pending == 0).await;
        eventually("ready again", 3 * SOON, || async { world.health.is_ready().then_some(()) }).await;
        assert_eq!(first_occurrences(world.published("t").await).len(), 4_500);
        relay.end().await;
    })
    .await;
}

/// Shown by: taking a read of the gaps alone for one that found nothing (the relay said that the
/// outbox was empty, with rows unread).
#[tokio::test]
async fn g2_a_relay_until_empty_does_not_end_at_the_bound_of_gaps_with_messages_unread() {
    on_postgres("g2_a_relay_until_empty_at_the_bound", |world| async move {
        let (holder, _) = many_gaps(&world).await;
        let relay = world.relay(RelayOptions { until_empty: true, ..relay_options() });
        eventually("at the bound", 3 * SOON, || async { world.says("no more may be").then_some(()) }).await;
        assert!(!relay.task.is_finished(), "{:?}", world.status().await);
        holder.rollback().await.unwrap();
        let ended = tokio::time::timeout(3 * SOON, relay.task).await.expect("it ends in time").unwrap();
        assert_eq!(ended.unwrap(), RunEnd::Idle);
        assert_eq!(world.status().await.pending, 0);
        assert_eq!(first_occurrences(world.published("t").await).len(), 4_500);
    })
    .await;
}

/// Shown by: keeping the trouble (a standby says for ever that gaps are open, which only their
/// owner can see).
#[tokio::test]
async fn a_relay_that_stands_by_does_not_show_the_gaps_that_it_saw_as_owner() {
    on_postgres("a_relay_that_stands_by_does_not_show_gaps", |world| async move {
        let (holder, _) = many_gaps(&world).await;
        let broker = Arc::new(Troubled { gate: Semaphore::new(1), ..Troubled::new(&world.broker) });
        // The test waits for its end. A lease that ends before the gaps are shown takes the only
        // session with it.
        let options = RelayOptions { lease: Duration::from_secs(10), ..relay_options() };
        let relay = world.relay_to(Arc::clone(&broker) as Arc<dyn Broker>, options);
        eventually("shown by the owner", 3 * SOON, || async { world.says("gaps are open").then_some(()) }).await;
        // Its session ends, and another owner comes before its next one.
        world.broker.faults().drop_publishers();
        let other = world.other_owner().await;
        broker.gate.add_permits(1);
        eventually("it stands by and shows none", SOON, || async {
            (world.says("standing by") && !world.says("gaps are open")).then_some(())
        })
        .await;
        relay.end().await;
        drop(other);
        holder.rollback().await.unwrap();
    })
    .await;
}

/// Shown by: asking for the lease without showing it (it was `starting` for half a minute).
#[tokio::test]
async fn a_relay_that_waits_for_a_lease_row_that_is_locked_says_so() {
    on_postgres("a_relay_that_waits_for_a_lease_row", |world| async move {
        let mut holder = sqlx::PgPool::connect(&world.url).await.unwrap().begin().await.unwrap();
        sqlx::query("select shard_id from oncebox.shard for update").execute(&mut *holder).await.unwrap();
        let relay = world.relay(relay_options());
        eventually("shown", SOON, || async { world.says("waits for the lease row of shard 0").then_some(()) }).await;
        assert!(!world.health.is_ready(), "{:?}", world.health.lines());
        holder.rollback().await.unwrap();
        eventually("ready", SOON, || async { world.health.is_ready().then_some(()) }).await;
        relay.end().await;
    })
    .await;
}

/// Each mark of proven messages fails with this code; the database can be reached and read.
async fn no_mark_is_made(world: &World<PostgresStore>, errcode: &str) {
    let no_room = format!(
        "create function no_room() returns trigger language plpgsql as $$
           begin raise exception 'there is no room left' using errcode = '{errcode}'; end $$;
         create trigger no_room before update on oncebox.shard for each row
           when (new.scanned_to <> old.scanned_to) execute function no_room()"
    );
    world.run(&no_room).await;
}

/// What passes by itself: the disk is full.
async fn no_room_for_marks(world: &World<PostgresStore>) {
    no_mark_is_made(world, "53100").await;
}

/// Lets marks be made again, and waits until all is marked and the relay shows ready.
async fn marks_are_made_again(world: &World<PostgresStore>) {
    world.run("drop trigger no_room on oncebox.shard").await;
    world.until_status("all is marked", |status| status.pending == 0).await;
    eventually("ready again", SOON, || async { world.health.is_ready().then_some(()) }).await;
}

/// Shown by: ready as soon as a read succeeds (it was ready from there until the next mark).
#[tokio::test]
async fn a_mark_that_is_refused_is_shown_until_one_is_made() {
    on_postgres("a_mark_that_is_refused", |world| async move {
        no_mark_is_made(&world, "P0001").await;
        world.enqueue("t", &["a1"]).await;
        // Between the read of a session and its mark there is time to see what is shown.
        let relay = world.relay(RelayOptions { mark_after: Duration::from_secs(2), ..relay_options() });
        eventually("shown", SOON, || async { world.says("there is no room left").then_some(()) }).await;
        let sent = world.published("t").await.len();
        eventually("two more sessions", SOON, || async {
            assert!(!world.health.is_ready(), "{:?}", world.health.lines());
            (world.published("t").await.len() >= sent + 2).then_some(())
        })
        .await;
        marks_are_made_again(&world).await;
        relay.end().await;
    })
    .await;
}

/// Shown by: not counting what ends a session for the database (the relay was ready, and said
/// nothing, while each session ended at its mark).
#[tokio::test]
async fn marks_that_fail_again_and_again_are_shown_with_their_cause_until_one_is_made() {
    on_postgres("marks_that_fail_again_and_again", |world| async move {
        no_room_for_marks(&world).await;
        world.enqueue("t", &["a1"]).await;
        let relay = world.relay(relay_options());
        eventually("shown", SOON, || async {
            let lines = world.health.lines();
            let said = |line: &String| line.contains("got nothing marked") && line.contains("there is no room left");
            (!world.health.is_ready() && lines.iter().any(said)).then_some(())
        })
        .await;
        marks_are_made_again(&world).await;
        relay.end().await;
    })
    .await;
}

/// Shown by: ready as soon as the broker is blocked no more, whatever else the health had to say
/// (it was ready until the next mark failed).
#[tokio::test]
async fn marks_that_fail_are_shown_until_one_is_made_also_where_another_wait_ends() {
    on_postgres("marks_that_fail_where_another_wait_ends", |world| async move {
        no_room_for_marks(&world).await;
        world.enqueue("t", &["a1"]).await;
        let relay = world.relay(RelayOptions { mark_after: Duration::from_secs(2), ..relay_options() });
        eventually("shown", SOON, || async { world.says("got nothing marked").then_some(()) }).await;
        world.broker.faults().block(Some("memory alarm"));
        eventually("the broker is blocked", SOON, || async { world.says("memory alarm").then_some(()) }).await;
        world.broker.faults().block(None);
        eventually("the next mark fails", SOON, || async {
            assert!(!world.health.is_ready(), "{:?}", world.health.lines());
            world.says("got nothing marked").then_some(())
        })
        .await;
        world.run("drop trigger no_room on oncebox.shard").await;
        eventually("ready again", SOON, || async { world.health.is_ready().then_some(()) }).await;
        relay.end().await;
    })
    .await;
}

/// Shown by: a session that ends for it (each next one was ready until its own tidy failed); a next
/// try that does nothing, and so counts as one that succeeded.
#[tokio::test]
async fn an_outbox_that_cannot_be_tidied_is_shown_until_it_is_and_ends_no_session() {
    on_postgres("an_outbox_that_cannot_be_tidied", |world| async move {
        world
            .run(
                "alter function oncebox.attach_outbox_range(bigint, bigint, bigint) rename to hidden;
                 update oncebox.setting set value = 20 where name = 'outbox_ranges_ahead'",
            )
            .await;
        let relay = world.relay(relay_options());
        eventually("shown", SOON, || async { world.says("could not be tidied").then_some(()) }).await;
        let (began, epoch) = (Instant::now(), world.status().await.shards[0].epoch);
        // Long enough for two more tries.
        eventually("not ready all the time", SOON, || async {
            assert!(!world.health.is_ready(), "{:?}", world.health.lines());
            (began.elapsed() > Duration::from_secs(12)).then_some(())
        })
        .await;
        world.enqueue("t", &["a1"]).await;
        world.until_published("t", &["a1"]).await;
        assert_eq!(world.status().await.shards[0].epoch, epoch, "no session ended");
        world.run("alter function oncebox.hidden(bigint, bigint, bigint) rename to attach_outbox_range").await;
        eventually("ready again", SOON, || async { world.health.is_ready().then_some(()) }).await;
        relay.end().await;
    })
    .await;
}

/// Shown by: a session that ends for each failure that is no refusal (each next one ended in the
/// same way, and no topic got anything).
#[tokio::test]
async fn g3_a_topic_that_cannot_be_made_for_whatever_reason_holds_itself_and_says_why() {
    let world = sqlite().await;
    world.broker.faults().topics_must_exist(true);
    let broker = Troubled { creation: Creation::Fails, ..Troubled::new(&world.broker) };
    let relay = world.relay_to(Arc::new(broker), RelayOptions { declare_topics: true, ..relay_options() });
    world.enqueue("stuck", &["a1"]).await;
    world.enqueue("good", &["a1", "b1"]).await;
    world.until_published("good", &["a1", "b1"]).await;
    world.until_status("its own are held", |status| (status.held, status.dead, status.pending) == (1, 0, 0)).await;
    let reasons = world.store.texts("select reason from oncebox_outbox_dead").await;
    assert!(reasons[0].contains("no room for topics"), "{reasons:?}");
    good_ones(&world, 10).await;
    eventually("ready", SOON, || async { world.health.is_ready().then_some(()) }).await;
    relay.end().await;
}

/// Shown by: always asking for all silent topics together (the other one was never asked for
/// alone).
#[tokio::test]
async fn g3_a_topic_whose_making_never_ends_keeps_no_other_blocked_topic_closed() {
    let world = sqlite().await;
    for topic in ["stuck", "other"] {
        world.broker.faults().missing_topic(topic, true);
        world.enqueue(topic, &["a1"]).await;
    }
    let broker = Troubled { creation: Creation::Hangs, ..Troubled::new(&world.broker) };
    let relay = world.relay_to(Arc::new(broker), RelayOptions { declare_topics: true, ..relay_options() });
    world.until_status("held", |status| status.held == 2).await;
    world.broker.faults().missing_topic("other", false);
    eventually("the other one is open", 2 * SOON, || async {
        (first_occurrences(world.published("other").await) == ["a1"]).then_some(())
    })
    .await;
    relay.end().await;
}

/// Shown by: storing only what a trial with a row said, and only once (the next row said what was
/// no longer true, or nothing of the cause).
#[tokio::test]
async fn the_first_held_message_of_a_topic_says_what_the_last_trial_was_told() {
    let world = sqlite().await;
    let faults = world.broker.faults();
    let first_says = async |words: &str| {
        eventually(words, SOON, || async {
            let reasons = world.store.texts("select reason from oncebox_outbox_dead order by position").await;
            reasons.first().is_some_and(|reason| reason.contains(words)).then_some(())
        })
        .await;
    };
    faults.missing_topic("t", true);
    world.enqueue("t", &["a1", "a2"]).await;
    let relay = world.relay(relay_options());
    world.until_status("held", |status| status.held == 2).await;
    first_says("unknown topic").await;
    faults.on_publish(Fault::RefuseDestination("access denied".into()), matching::topic("t"));
    faults.missing_topic("t", false);
    first_says("access denied").await;
    let first = world.store.texts("select 'o' || min(position) from oncebox_outbox_dead").await;
    let first = DeadFilter { states: vec![DeadState::Held], numbers: first, ..DeadFilter::default() };
    world.act_on(&first, OperatorAct::Discard).await;
    world.until_status("the first one is gone", |status| status.held == 1).await;
    first_says("access denied").await;
    // Nothing is sent to find this out.
    faults.missing_topic("t", true);
    first_says("unknown topic").await;
    relay.end().await;
}

/// Shown by: dropping the error of a trial that could not be made.
#[tokio::test]
async fn why_a_trial_cannot_be_made_is_stored_with_its_topic() {
    let world = sqlite().await;
    world.broker.faults().missing_topic("t", true);
    let opening = |number: u32| match number {
        0 => Ok(()),
        _ => Err(BrokerError::Unauthorised("this account may open one session".to_owned())),
    };
    let broker = Troubled { opening, ..Troubled::new(&world.broker) };
    let relay = world.relay_to(Arc::new(broker), relay_options());
    world.enqueue("t", &["a1"]).await;
    eventually("the cause", SOON, || async {
        let reasons = world.store.texts("select reason from oncebox_outbox_dead").await;
        reasons.first().is_some_and(|reason| reason.contains("one session")).then_some(())
    })
    .await;
    relay.end().await;
}

/// Shown by: taking it for a topic that neither takes nor refuses (it said so, and was tried ever
/// more rarely).
#[tokio::test]
async fn a_trial_while_the_broker_is_blocked_says_so_and_calls_no_topic_silent() {
    let world = sqlite().await;
    let faults = world.broker.faults();
    faults.missing_topic("t", true);
    world.enqueue("t", &["a1"]).await;
    let relay = world.relay(relay_options());
    world.until_status("held", |status| status.held == 1).await;
    faults.block(Some("memory alarm"));
    faults.missing_topic("t", false);
    eventually("the cause", SOON, || async {
        let reasons = world.store.texts("select reason from oncebox_outbox_dead").await;
        assert!(!reasons.iter().any(|reason| reason.contains("neither taken nor refused")), "{reasons:?}");
        reasons.first().is_some_and(|reason| reason.contains("memory alarm")).then_some(())
    })
    .await;
    faults.block(None);
    world.until_published("t", &["a1"]).await;
    world.until_status("nothing is held", |status| status.held + status.pending == 0).await;
    relay.end().await;
}

/// Shown by: taking it for a broker that does not say whether the topic is there.
#[tokio::test]
async fn a_trial_that_gets_no_answer_while_the_broker_is_blocked_calls_no_topic_silent() {
    let world = sqlite().await;
    world.broker.faults().missing_topic("stuck", true);
    world.enqueue("stuck", &["a1"]).await;
    let broker = Troubled { creation: Creation::Hangs, ..Troubled::new(&world.broker) };
    let relay = world.relay_to(Arc::new(broker), RelayOptions { declare_topics: true, ..relay_options() });
    world.until_status("held", |status| status.held == 1).await;
    world.broker.faults().block(Some("memory alarm"));
    eventually("the cause", SOON, || async {
        let reasons = world.store.texts("select reason from oncebox_outbox_dead").await;
        assert!(!reasons.iter().any(|reason| reason.contains("does not say")), "{reasons:?}");
        reasons.first().is_some_and(|reason| reason.contains("memory alarm")).then_some(())
    })
    .await;
    relay.end().await;
}
