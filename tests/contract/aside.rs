//! A process that froze in the middle of its work holds up the keys of its own messages, and no
//! other.

use std::collections::BTreeSet;

use oncebox::ConsumerOptions;
use oncebox::store::{Proof, StoreOptions};
use oncebox_testkit::memory::MemoryBroker;
use uuid::Uuid;

use super::kit::{Act, Behind, Does, Sql, World, behind_a_proxy, consumer_options, on_mariadb, on_postgres};
use super::proxy::{Failure, When};

/// The frozen process has inserted the first message of five keys, and the next owner finds its
/// partition open. What the inbox does not know is suspect there: the owner asks whether it is free
/// before it runs it.
async fn the_other_keys_flow<S: Sql>(world: World<S>) {
    world.left_open(0..1).await;
    let keys = ["a", "b", "c", "d", "e"];
    let mut frozen = world.frozen(&["a1", "b1", "c1", "d1", "e1"]).await;
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
    world.left_open(0..2).await;
    let mut frozen = world.frozen(&["a00"]).await;
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

/// A look takes longer than the pause between two of them. Shown by: a pause that begins with the
/// look; the lane looked again and again, and took nothing new.
#[tokio::test]
async fn a_slow_look_at_what_stands_aside_keeps_no_new_message_from_its_lane() {
    on_postgres("slow_look_aside", |world| async move {
        world
            .run(
                "create table slow (n int);
                 create function slows() returns trigger language plpgsql security definer as
                 $$ begin if exists (select 1 from public.slow) then perform pg_sleep(0.4); end if; return null; end $$;
                 create trigger slows before insert on oncebox.inbox_timed for each statement execute function slows()",
            )
            .await;
        world.left_open(0..1).await;
        let frozen = world.frozen(&["a1"]).await;
        world.deliver_all(&["b1"]);
        let running = world.consumer(consumer_options(), Does(|_: &str, _: &oncebox::Message| Act::Done));
        // It came after `a1`, which is set aside by now.
        world.until_effects(&["b1"]).await;
        world.run("insert into slow values (1)").await;
        world.deliver_all(&["c1"]);
        world.until_effects(&["b1", "c1"]).await;
        frozen.rollback().await.unwrap();
        world.until_effects(&["b1", "c1", "a1"]).await;
        running.end().await;
    })
    .await;
}

/// The first question whether a suspect can run has no answer.
async fn a_suspect_is_asked_for_again<S: Sql>(behind: Behind<S>) {
    let Behind { direct, through, proxy } = behind;
    direct.left_open(0..1).await;
    let frozen = direct.frozen(&["a1"]).await;
    direct.deliver_all(&["b1"]);
    let (since, at) = match S::NAME {
        "postgres" => ("lock_timeout = '2ms'", "oncebox.admit"),
        _ => ("", "for update nowait"),
    };
    proxy.fail_at(since, at, 0, When::BeforeRequest, Failure::Cut);
    let mut options = consumer_options();
    // No try is to spare, so each suspect runs alone.
    options.retry.attempts_max = 1;
    let running = through.consumer(options, Does(|_: &str, _: &oncebox::Message| Act::Done));
    direct.until_effects(&["b1"]).await;
    assert!(proxy.has_failed());
    super::support::eventually("no try is counted", super::kit::SOON, || async {
        direct.attempts().await.is_empty().then_some(())
    })
    .await;
    frozen.rollback().await.unwrap();
    direct.until_effects(&["b1", "a1"]).await;
    running.end().await;
    through.store.close().await;
}

behind_a_proxy! {
    /// Shown by: running it where the question failed: it waited for the frozen process, and its
    /// lane with it.
    a_suspect_whose_row_could_not_be_looked_at_is_looked_at_again: a_suspect_is_asked_for_again, StoreOptions::new("");
}
