//! Database and broker do not agree on what is done: an asynchronous standby was promoted, or a
//! backup restored; a topic was made anew; the broker deleted what was not consumed yet.

use std::time::Duration;

use oncebox::broker::{Broker as _, Subscription};
use oncebox::message::IdRule;
use oncebox::{ConsumerOptions, RunEnd};

use super::kit::{Act, Does, SOON, Sql, World, consumer_options, on_mariadb, on_postgres, sqlite};
use super::support::eventually;

async fn consume_all<S: Sql>(world: &World<S>) {
    let options = ConsumerOptions { until_idle: Some(Duration::from_millis(100)), ..consumer_options() };
    let done = |_: &str, _: &oncebox::Message| Act::Done;
    assert_eq!(world.consumer(options, Does(done)).ended().await.unwrap(), RunEnd::Idle);
}

/// What a consumer writes with its effects, in this database.
fn tables<S: Sql>() -> Vec<String> {
    let inbox: &[&str] = if S::NAME == "postgres" { &["inbox_timed", "inbox_untimed"] } else { &["inbox"] };
    let ours = inbox.iter().chain(&["assignment"]).map(|table| format!("{}{table}", S::PREFIX));
    ours.chain(["effect".to_owned()]).collect()
}

async fn went_back<S: Sql>(world: World<S>) {
    world.deliver_all(&["a1", "b1", "c1"]);
    consume_all(&world).await;
    let tables = tables::<S>();
    for (number, table) in tables.iter().enumerate() {
        world.run(&format!("create table copy_{number} as select * from {table}")).await;
    }
    world.deliver_all(&["a2", "b2", "c2"]);
    consume_all(&world).await;
    assert_eq!(world.effects().await, ["a1", "b1", "c1", "a2", "b2", "c2"]);
    for (number, table) in tables.iter().enumerate() {
        world.run(&format!("delete from {table}")).await;
        world.run(&format!("insert into {table} select * from copy_{number}")).await;
    }
    assert_eq!(world.effects().await, ["a1", "b1", "c1"]);
    assert_eq!(world.broker.committed("ledger", "t", 0), 6, "the broker has all of them as done");

    world.deliver_all(&["a3"]);
    consume_all(&world).await;
    assert_eq!(world.effects().await, ["a1", "b1", "c1", "a2", "b2", "c2", "a3"]);
}

// Shown to fail by beginning where the group stands: a2, b2 and c2 were missing for good.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn effects_that_a_failover_undid_are_made_again_on_sqlite() {
    went_back(sqlite().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn effects_that_a_failover_undid_are_made_again_on_postgres() {
    on_postgres("effects_that_a_failover_undid_are_made_again", went_back).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn effects_that_a_failover_undid_are_made_again_on_mariadb() {
    on_mariadb("effects_that_a_failover_undid_are_made_again", went_back).await;
}

// Shown to fail by beginning where the group stands: the first three of the new topic were missing
// for good.
#[tokio::test]
async fn a_topic_made_anew_is_consumed_whole_and_that_is_shown() {
    let world = sqlite().await;
    world.deliver_all(&["a1", "b1", "c1"]);
    consume_all(&world).await;
    // The topic alone goes: what the group has committed stands.
    world.broker.remove(&[Subscription::new("nobody", vec!["t".into()])]).await.unwrap();
    world.deliver_all(&["a2", "b2", "c2", "a3"]);
    assert_eq!(world.broker.committed("ledger", "t", 0), 3);
    consume_all(&world).await;
    assert_eq!(world.effects().await, ["a1", "b1", "c1", "a2", "b2", "c2", "a3"]);
    let lines = world.health.lines();
    assert!(lines.iter().any(|line| line.contains("t/0 was deleted and made anew")), "{lines:?}");
    assert!(world.health.is_ready(), "the work goes on: {lines:?}");
    consume_all(&world).await;
    assert_eq!(world.effects().await.len(), 7, "the second time it goes on where it stood");
}

#[tokio::test]
async fn records_that_are_gone_before_they_were_consumed_are_counted_and_shown() {
    let (heard, _hearing) = super::observed::hear();
    let world = sqlite().await;
    world.deliver_all(&["a1", "b1", "c1"]);
    consume_all(&world).await;
    world.deliver_all(&["a2", "b2", "c2"]);
    world.broker.faults().delete_below(5);
    consume_all(&world).await;
    assert_eq!(world.effects().await, ["a1", "b1", "c1", "c2"]);
    let lost = || heard.metric("oncebox_lost_records_total", &[("topic", "t")]) as u64;
    assert_eq!(lost(), 2);
    let lines = world.health.lines();
    assert!(lines.iter().any(|line| line.contains("t/0") && line.contains("offsets 3 to 5")), "{lines:?}");
    assert!(world.health.is_ready(), "the work goes on: {lines:?}");
    consume_all(&world).await;
    assert_eq!(lost(), 2, "each of them once");
}

// Shown to fail by consuming it: the inbox knows the offsets, so the first three records of the new
// topic had no effect.
#[tokio::test]
async fn a_topic_made_anew_whose_offsets_are_the_ids_is_not_consumed_until_its_epoch_changed() {
    let world = sqlite().await;
    let options = |epoch: &str| ConsumerOptions {
        id_rule: IdRule::Coordinates,
        id_epoch: epoch.to_owned(),
        accept_id_rule: true,
        until_idle: Some(Duration::from_millis(100)),
        ..consumer_options()
    };
    let done = |_: &str, _: &oncebox::Message| Act::Done;
    let consumed = async |epoch: &str| world.consumer(options(epoch), Does(done)).ended().await;
    world.deliver_all(&["a1", "b1", "c1"]);
    assert_eq!(consumed("1").await.unwrap(), RunEnd::Idle);
    world.broker.remove(&[Subscription::new("nobody", vec!["t".into()])]).await.unwrap();
    world.deliver_all(&["a2", "b2", "c2", "a3"]);
    for _ in 0..2 {
        let refused = consumed("1").await.expect_err("by each start").to_string();
        assert!(refused.contains("id_epoch"), "{refused}");
        assert_eq!(world.effects().await, ["a1", "b1", "c1"]);
    }
    // One that goes on shows it, and is not ready.
    let running = world.consumer(ConsumerOptions { until_idle: None, ..options("1") }, Does(done));
    eventually("it says so", SOON, || async {
        let lines = world.health.lines();
        let said = lines.iter().any(|line| line.contains("t/0 is not consumed") && line.contains("id_epoch"));
        (said && !world.health.is_ready()).then_some(())
    })
    .await;
    running.end().await;
    assert_eq!(consumed("2").await.unwrap(), RunEnd::Idle);
    assert_eq!(world.effects().await, ["a1", "b1", "c1", "a2", "b2", "c2", "a3"]);
    assert_eq!(consumed("2").await.unwrap(), RunEnd::Idle);
    assert_eq!(world.effects().await.len(), 7, "the second time it goes on where it stood");
}

/// Deliveries of the refused partition were dropped, and counted as in flight for ever: at
/// `in_flight_max` the other topic stopped too.
#[tokio::test]
async fn a_refused_partition_holds_only_itself_and_is_named() {
    let world = sqlite().await;
    let options = || ConsumerOptions {
        id_rule: IdRule::Coordinates,
        topics: vec!["t".into(), "u".into()],
        in_flight_max: 4,
        ..consumer_options()
    };
    let done = |_: &str, _: &oncebox::Message| Act::Done;
    let beside = |names: &[&str]| {
        for name in names {
            world.broker.append("u", Some(b"k"), &[("ce_type", b"made".as_slice())], Some(name.as_bytes()));
        }
    };
    world.deliver_all(&["a1"]);
    beside(&["u1"]);
    let consumer = world.consumer(options(), Does(done));
    eventually("both are handled", SOON, || async { (world.effects().await.len() == 2).then_some(()) }).await;
    consumer.end().await;
    world.run("delete from effect").await;
    world.broker.remove(&[Subscription::new("nobody", vec!["t".into()])]).await.unwrap();
    world.deliver_all(&["a2"; 20]);
    let names: Vec<String> = (2..12).map(|number| format!("u{number}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    beside(&names[..5]);
    let consumer = world.consumer(options(), Does(done));
    world.until_effects(&names[..5]).await;
    beside(&names[5..]);
    world.until_effects(&names).await;
    let lines = world.health.lines();
    assert!(lines.iter().any(|line| line.contains("t/0 is not consumed")), "{lines:?}");
    assert!(!world.health.is_ready(), "{lines:?}");
    consumer.end().await;
}

/// When the session ends, another process may get the partition. Shown by: showing it until this
/// one has partitions again.
#[tokio::test]
async fn a_refused_partition_is_shown_only_while_it_is_assigned() {
    let world = sqlite().await;
    let options = || ConsumerOptions { id_rule: IdRule::Coordinates, ..consumer_options() };
    let done = |_: &str, _: &oncebox::Message| Act::Done;
    world.deliver_all(&["a1"]);
    let consumer = world.consumer(options(), Does(done));
    world.until_effects(&["a1"]).await;
    consumer.end().await;
    world.broker.remove(&[Subscription::new("nobody", vec!["t".into()])]).await.unwrap();
    world.deliver_all(&["a2"]);
    let consumer = world.consumer(options(), Does(done));
    for is_away in [false, true, false] {
        world.broker.faults().away(is_away.then_some("the broker is away"));
        eventually("it is shown, or not", SOON, || async {
            let is_shown = world.says("t/0 is not consumed");
            (is_shown != is_away).then_some(())
        })
        .await;
    }
    consumer.end().await;
}

#[tokio::test]
async fn of_a_topic_made_anew_what_the_broker_deleted_before_it_was_consumed_is_counted() {
    let (heard, _hearing) = super::observed::hear();
    let world = sqlite().await;
    world.deliver_all(&["a1"]);
    consume_all(&world).await;
    world.broker.remove(&[Subscription::new("nobody", vec!["t".into()])]).await.unwrap();
    world.deliver_all(&["a2", "b2", "c2"]);
    world.broker.faults().delete_below(2);
    consume_all(&world).await;
    assert_eq!(world.effects().await, ["a1", "c2"]);
    assert_eq!(heard.metric("oncebox_lost_records_total", &[("topic", "t")]) as u64, 2);
}
