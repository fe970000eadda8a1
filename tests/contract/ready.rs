//! When a consumer says that it is ready: not before it has its share, and not while its deliveries
//! stand still.

use std::time::{Duration, Instant};

use oncebox::Message;
use oncebox::message::MessageId;
use oncebox::observe::Health;
use oncebox::runtime::ConsumerOptions;
use oncebox::store::postgres::PostgresStore;
use oncebox::store::{ConsumerSpec, Holding, Inbox, InboxEntry, InboxTx};
use uuid::Uuid;

use super::kit::{Act, Does, HANGS, SOON, Sql, World, consumer_options, on_postgres, sqlite};
use super::support::eventually;

async fn until_ready<S: Sql>(world: &World<S>, ready: bool) {
    eventually(&format!("ready: {ready}"), SOON, || async { (world.health.is_ready() == ready).then_some(()) }).await;
}

/// Shown to fail: it was ready as soon as it was connected.
#[tokio::test]
async fn a_consumer_is_ready_once_the_group_has_said_what_is_its_own_though_it_be_nothing() {
    let world = sqlite().await;
    world.broker.faults().topics_must_exist(true);
    let first = world.consumer(consumer_options(), Does(|_: &str, _: &Message| Act::Done));
    eventually("it is connected and has no share", SOON, || async {
        world.health.lines().iter().any(|line| line.contains("starting")).then_some(())
    })
    .await;
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(1) {
        assert!(!world.health.is_ready(), "{:?}", world.health.lines());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    world.deliver_all(&["a1"]);
    world.until_effects(&["a1"]).await;
    until_ready(&world, true).await;
    // The topic has one partition, and the first has it.
    let mut second = world.clone();
    second.health = Health::default();
    let idle = second.consumer(consumer_options(), Does(|_: &str, _: &Message| Act::Done));
    until_ready(&second, true).await;
    first.end().await;
    idle.end().await;
}

/// Somebody else's open transaction has the inbox row of `a1`: it stays in hand, and no timer of
/// ours is about it.
async fn frozen(world: &World<PostgresStore>) -> Box<dyn InboxTx> {
    let spec = ConsumerSpec { name: "ledger".into(), id_rule: "envelope".into(), accept: false };
    let consumer = world.store.register(&spec).await.unwrap();
    let id = Uuid::now_v7();
    let mut frozen = world.store.begin(consumer).await.unwrap();
    frozen.admit(&[InboxEntry { id: MessageId::from_uuid(id), hash: [1; 16] }]).await.unwrap();
    world.deliver(&id.to_string(), "made", "a1");
    frozen
}

/// Shown to fail: it was ready all the time.
#[tokio::test]
async fn a_consumer_whose_deliveries_all_stand_still_is_not_ready_until_one_is_done() {
    on_postgres("all_stand", |world| async move {
        let frozen = frozen(&world).await;
        let options = ConsumerOptions { handler_timeout: HANGS, ..consumer_options() };
        let consumer = world.consumer(options, Does(|_: &str, _: &Message| Act::Done));
        until_ready(&world, true).await;
        let says = || world.health.lines().iter().any(|line| line.contains("deliveries are in hand")).then_some(());
        eventually("it says that they stand", SOON, || async { says() }).await;
        assert!(!world.health.is_ready());
        frozen.rollback().await.unwrap();
        world.until_effects(&["a1"]).await;
        until_ready(&world, true).await;
        consumer.end().await;
    })
    .await;
}

/// One key stands for longer than that, while others move: it is not the consumer that stands.
#[tokio::test]
async fn a_consumer_of_which_one_key_stands_among_others_that_move_stays_ready() {
    on_postgres("one_key_stands", |world| async move {
        let holding = Holding { topic: "t".into(), partition: 0, owner: Uuid::now_v7() };
        let frozen = frozen(&world).await;
        // Found open, so that it is looked at before it is waited for.
        let spec = ConsumerSpec { name: "ledger".into(), id_rule: "envelope".into(), accept: false };
        let consumer = world.store.register(&spec).await.unwrap();
        world.store.open_assignment(consumer, &holding).await.unwrap();
        let options = ConsumerOptions { handler_timeout: HANGS, ..consumer_options() };
        let consumer = world.consumer(options, Does(|_: &str, _: &Message| Act::Done));
        until_ready(&world, true).await;
        let began = Instant::now();
        let mut number = 0;
        while began.elapsed() < 5 * HANGS {
            number += 1;
            world.deliver_all(&[&format!("b{number}")]);
            eventually("others move", SOON, || async { (world.effects().await.len() == number).then_some(()) }).await;
            assert!(world.health.is_ready(), "{:?}", world.health.lines());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        frozen.rollback().await.unwrap();
        consumer.end().await;
    })
    .await;
}
