//! A process that froze in the middle of its work holds up the keys of its own messages, and no
//! other.

use std::collections::BTreeSet;

use oncebox::ConsumerOptions;
use oncebox::message::MessageId;
use oncebox::store::{ConsumerSpec, Holding, InboxEntry, Proof};
use oncebox_testkit::memory::MemoryBroker;
use uuid::Uuid;

use super::kit::{Act, Does, Sql, World, consumer_options, on_mariadb, on_postgres};

/// The frozen process has inserted the first message of five keys, and its partition is found open
/// by the next owner: each message that this one does not know runs alone in it.
async fn the_other_keys_flow<S: Sql>(world: World<S>) {
    let spec = ConsumerSpec { name: "ledger".into(), id_rule: "envelope".into(), accept: false };
    let consumer = world.store.register(&spec).await.unwrap();
    let holding = Holding { topic: "t".into(), partition: 0, owner: Uuid::now_v7() };
    world.store.open_assignment(consumer, &holding).await.unwrap();
    let keys = ["a", "b", "c", "d", "e"];
    let mut entries = Vec::new();
    for key in keys {
        let id = Uuid::now_v7();
        entries.push(InboxEntry { id: MessageId::from_uuid(id), hash: [1; 16] });
        world.deliver(&id.to_string(), "made", &format!("{key}1"));
    }
    let mut frozen = world.store.begin(consumer).await.unwrap();
    frozen.admit(&entries).await.unwrap();
    let later: Vec<String> = keys.iter().map(|key| format!("{key}2")).collect();
    let others: Vec<String> = (1..=4).flat_map(|n| ('f'..='o').map(move |key| format!("{key}{n}"))).collect();
    for name in later.iter().chain(&others) {
        world.deliver(&Uuid::now_v7().to_string(), "made", name);
    }
    let running = world.consumer(consumer_options(), Does(|_: &str, _: &oncebox::Message| Act::Done));
    let names: Vec<&str> = others.iter().map(String::as_str).collect();
    world.until_effects(&names).await;
    // Its server ends it only seconds after the handler timeout: nobody has waited for that.
    assert_eq!(frozen.prove().await.unwrap(), Proof::Same);
    frozen.rollback().await.unwrap();
    let all = names.len() + 2 * keys.len();
    let effects = super::support::eventually("all effects", super::kit::SOON, || async {
        Some(world.effects().await).filter(|effects| effects.len() == all)
    })
    .await;
    for key in keys {
        let of_key: Vec<_> = effects.iter().filter(|name| name.starts_with(key)).collect();
        assert_eq!(of_key, [&format!("{key}1"), &format!("{key}2")], "in the key's order");
    }
    running.end().await;
}

#[tokio::test]
async fn a_process_that_froze_inside_its_transaction_stops_no_other_key_on_postgres() {
    on_postgres("frozen_peer", the_other_keys_flow).await;
}

#[tokio::test]
async fn a_process_that_froze_inside_its_transaction_stops_no_other_key_on_mariadb() {
    on_mariadb("frozen_peer", the_other_keys_flow).await;
}

/// Twenty may be in flight. The frozen process has the first message of one key, of which sixty
/// follow, among four hundred of other keys in two partitions.
async fn the_other_keys_flow_however_many_come<S: Sql>(world: World<S>) {
    let world = world.with_broker(MemoryBroker::with_partitions(2));
    let spec = ConsumerSpec { name: "ledger".into(), id_rule: "envelope".into(), accept: false };
    let consumer = world.store.register(&spec).await.unwrap();
    for partition in 0..2 {
        let holding = Holding { topic: "t".into(), partition, owner: Uuid::now_v7() };
        world.store.open_assignment(consumer, &holding).await.unwrap();
    }
    let id = Uuid::now_v7();
    let mut frozen = world.store.begin(consumer).await.unwrap();
    frozen.admit(&[InboxEntry { id: MessageId::from_uuid(id), hash: [1; 16] }]).await.unwrap();
    world.deliver(&id.to_string(), "made", "a00");
    let mut others = BTreeSet::new();
    for number in 1..=400_u32 {
        let key = char::from_u32(u32::from(b'b') + number % 20).unwrap();
        let name = format!("{key}{number:03}");
        world.deliver_all(&[&name]);
        others.insert(name);
        if number <= 60 {
            world.deliver_all(&[&format!("a{number:02}")]);
        }
    }
    let options = ConsumerOptions { in_flight_max: 20, lanes: 2, ..consumer_options() };
    let running = world.consumer(options, Does(|_: &str, _: &oncebox::Message| Act::Done));
    super::support::eventually("the other keys", super::kit::SOON, || async {
        (world.effects().await.into_iter().collect::<BTreeSet<_>>() == others).then_some(())
    })
    .await;
    assert_eq!(frozen.prove().await.unwrap(), Proof::Same, "nobody has waited for its end");
    frozen.rollback().await.unwrap();
    let all = others.len() + 61;
    let effects = super::support::eventually("all effects", super::kit::SOON, || async {
        Some(world.effects().await).filter(|effects| effects.len() == all)
    })
    .await;
    let of_key: Vec<_> = effects.into_iter().filter(|name| name.starts_with('a')).collect();
    assert_eq!(of_key, (0..=60).map(|number| format!("a{number:02}")).collect::<Vec<_>>(), "in the key's order");
    running.end().await;
}

/// Shown by: counting what is finished behind an unfinished delivery, or what stands aside, against
/// `in_flight_max`: everything stops after twenty. Shown to fail: one that stands behind the frozen
/// one of its key was looked at as if it could be free, and the lane waited for the lock.
#[tokio::test]
async fn a_frozen_peer_stops_no_other_key_however_many_come_on_postgres() {
    on_postgres("frozen_peer_many", the_other_keys_flow_however_many_come).await;
}

#[tokio::test]
async fn a_frozen_peer_stops_no_other_key_however_many_come_on_mariadb() {
    on_mariadb("frozen_peer_many", the_other_keys_flow_however_many_come).await;
}
