//! When a consumer says that it is ready: not before it has its share, and not while its deliveries
//! stand still.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use oncebox::observe::Health;
use oncebox::store::StoreOptions;
use oncebox::{ConsumerOptions, Message};
use oncebox_testkit::memory::MemoryBroker;
use uuid::Uuid;

use super::kit::{
    Act, Behind, Does, HANGS, SOON, Sql, World, behind_a_proxy, consumer_options, fails, on_mariadb, on_postgres,
    sqlite,
};
use super::proxy::Failure;
use super::standstill::Standstill;
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
    eventually("it is connected and has no share", SOON, || async { world.says("starting").then_some(()) }).await;
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

/// `a1` stays in hand, and no timer of ours is about it. Shown to fail: it was ready all the time.
#[tokio::test]
async fn a_consumer_whose_deliveries_all_stand_still_is_not_ready_until_one_is_done() {
    on_postgres("all_stand", |world| async move {
        let frozen = world.frozen(&["a1"]).await;
        let options = ConsumerOptions { handler_timeout: HANGS, ..consumer_options() };
        let consumer = world.consumer(options, Does(|_: &str, _: &Message| Act::Done));
        until_ready(&world, true).await;
        let says = || world.says("deliveries are in hand").then_some(());
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
        // Found open, so that it is looked at before it is waited for.
        world.left_open(0..1).await;
        let frozen = world.frozen(&["a1"]).await;
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

/// What another member is given while the first one's database is away was all that the first one's
/// lane had in hand.
async fn its_partition_goes<S: Sql>(behind: Behind<S>) {
    let Behind { direct, through, proxy } = behind;
    let broker = MemoryBroker::with_partitions(2);
    let (mut direct, through) = (direct.with_broker(broker.clone()), through.with_broker(broker));
    direct.health = Health::default();
    let options = consumer_options;
    let done = |_: &str, _: &Message| Act::Done;
    let first = through.consumer(options(), Does(done));
    until_ready(&through, true).await;
    // Whose keys are of the partition that the second one gets?
    let met = Arc::new(Mutex::new(BTreeSet::new()));
    let notes = Arc::clone(&met);
    let second = direct.consumer(
        options(),
        Does(move |name: &str, _: &Message| {
            notes.lock().unwrap().insert(name.to_owned());
            Act::Done
        }),
    );
    until_ready(&direct, true).await;
    direct.deliver_all(&["a1", "b1", "c1", "d1", "e1", "f1", "g1", "h1"]);
    eventually("all ran", SOON, || async { (direct.effects().await.len() == 8).then_some(()) }).await;
    let key = met.lock().unwrap().first().and_then(|name| name.chars().next()).expect("it has its share");
    second.end().await;
    direct.deliver_all(&[&format!("{key}2")]);
    eventually("the first has it", SOON, || async { (direct.effects().await.len() == 9).then_some(()) }).await;

    proxy.fails(Failure::Cut);
    direct.deliver_all(&[&format!("{key}3")]);
    let waits = || through.says("database (lane").then_some(());
    eventually("its lane waits for the database", SOON, || async { waits() }).await;
    let second = direct.consumer(options(), Does(done));
    eventually("the second has it", SOON, || async { (direct.effects().await.len() == 10).then_some(()) }).await;
    proxy.works();
    until_ready(&through, true).await;
    first.end().await;
    second.end().await;
}

/// A lane says that it waits after its fourth failure.
fn impatient() -> StoreOptions {
    StoreOptions { answer_timeout: Some(Duration::from_secs(2)), ..StoreOptions::new("") }
}

behind_a_proxy! {
    /// Shown by: a lane that sets the state of the whole consumer, and says no more that it is well
    /// when nothing is left for it to do.
    a_lane_whose_partition_went_during_an_outage_keeps_nobody_unready: its_partition_goes, impatient();
}

/// The database of the first member falls silent while it has nothing to do; a second one comes.
async fn idle_partitions_go<S: Sql>(behind: Behind<S>) {
    let Behind { direct, through, proxy } = behind;
    let broker = MemoryBroker::with_partitions(20);
    let (mut direct, through) = (direct.with_broker(broker.clone()), through.with_broker(broker));
    direct.health = Health::default();
    let first = through.consumer(consumer_options(), Does(|_: &str, _: &Message| Act::Done));
    until_ready(&through, true).await;
    proxy.fails(Failure::Silence);
    let (still, began) = (Standstill::watch(), Instant::now());
    let met = Arc::new(Mutex::new(BTreeSet::new()));
    let notes = Arc::clone(&met);
    let act = move |_: &str, message: &Message| {
        notes.lock().unwrap().insert(message.coordinates.partition);
        Act::Done
    };
    let second = direct.consumer(consumer_options(), Does(act));
    until_ready(&direct, true).await;
    for key in 0..200 {
        let (id, key) = (Uuid::now_v7().to_string(), key.to_string());
        let headers = [("ce_id", id.as_bytes()), ("ce_type", b"made".as_slice()), ("ce_source", b"test".as_slice())];
        direct.broker.append("t", Some(key.as_bytes()), &headers, Some(b"a1"));
    }
    eventually("half of them are the second one's", SOON, || async { (met.lock().unwrap().len() == 10).then_some(()) })
        .await;
    let took = began.elapsed();
    assert!(took < still.allows_below(Duration::from_secs(12), Duration::from_secs(30)), "{took:?}");
    assert!(!through.says("left to other processes"), "{:?}", through.health.lines());
    proxy.works();
    first.end().await;
    second.end().await;
}

behind_a_proxy! {
    /// Shown to fail: each partition waited for the database until that was given up, one after the
    /// other.
    partitions_without_work_are_given_up_though_the_database_is_silent:
        idle_partitions_go, StoreOptions::new("");
}

/// One message waits; then the table in which it does is not to be read for a while.
async fn cannot_lease<S: Sql>(world: World<S>) {
    let open = Arc::new(AtomicBool::new(false));
    let gate = Arc::clone(&open);
    let mut options = consumer_options();
    options.retry.attempts_max = 1_000_000;
    let act = move |_: &str, _: &Message| if gate.load(Ordering::Relaxed) { Act::Done } else { fails() };
    let consumer = world.consumer(options, Does(act));
    world.deliver_all(&["a1"]);
    world.until_consumer("it waits", |ledger| ledger.waiting == 1).await;
    until_ready(&world, true).await;
    world.run(&format!("alter table {0}waiting rename to {1}", S::PREFIX, AWAY)).await;
    let says = || world.says("are not tried again").then_some(());
    eventually("it says that they are not tried", SOON, || async { says() }).await;
    assert!(!world.health.is_ready());
    let (away, back) = if S::PREFIX.ends_with('.') { ("oncebox.", "waiting") } else { ("", "oncebox_waiting") };
    world.run(&format!("alter table {away}{AWAY} rename to {back}")).await;
    until_ready(&world, true).await;
    open.store(true, Ordering::Relaxed);
    world.until_effects(&["a1"]).await;
    until_ready(&world, true).await;
    consumer.end().await;
}

const AWAY: &str = "waiting_away";

/// Shown by: saying it in the log alone; it was ready all the time.
#[tokio::test]
async fn a_consumer_whose_waiting_messages_cannot_be_leased_is_not_ready_until_they_can_on_postgres() {
    on_postgres("cannot_lease", cannot_lease).await;
}

#[tokio::test]
async fn a_consumer_whose_waiting_messages_cannot_be_leased_is_not_ready_until_they_can_on_mariadb() {
    on_mariadb("cannot_lease", cannot_lease).await;
}
