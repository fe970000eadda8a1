//! A relay that has no room: in the bytes of its window, in the broker's client, in the rows of
//! a trial.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use oncebox::RelayOptions;
use oncebox::store::OperatorAct;
use oncebox_testkit::memory::{Fault, matching};

use super::kit::{SOON, Sql, message, relay_options, sqlite};
use super::support::eventually;

/// Shown to fail: only the number of released rows was bounded, and nine were sent.
#[tokio::test]
async fn g11_released_messages_keep_to_the_bytes_of_the_window() {
    let world = sqlite().await;
    let names: Vec<String> = (1..=40).map(|number| format!("a{number:01000}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let ids = world.enqueue("t", &names).await;
    world.broker.faults().on_publish(Fault::RefuseMessage("not yet".into()), matching::id(ids[0]));
    let relay = world.relay(relay_options());
    world.until_status("one is dead, the others behind it", |status| (status.dead, status.held) == (1, 39)).await;
    relay.end().await;
    world.broker.faults().clear_on_publish();
    world.broker.faults().hold_receipts(true);
    world.act(OperatorAct::Redrive).await;
    let relay = world.relay(RelayOptions { window_bytes: 2_000, read_bytes: 1, ..relay_options() });
    world.until_published("t", &names[..2]).await;
    let turns = world.broker.relay_turns();
    eventually("some turns more", SOON, || async {
        assert_eq!(world.published("t").await.len(), 2, "they have 2,000 bytes, and none is proven");
        (world.broker.relay_turns() >= turns + 20).then_some(())
    })
    .await;
    world.broker.faults().hold_receipts(false);
    world.until_published("t", &names).await;
    world.until_status("nothing is held", |status| status.dead + status.held + status.pending == 0).await;
    relay.end().await;
}

/// The client is full before any topic was silent for long. Shown to fail: no topic was held, and
/// each next session filled its client in the same way.
#[tokio::test]
async fn g3_a_client_that_stays_full_holds_the_topics_in_flight_and_the_others_come_back() {
    let world = sqlite().await;
    world.broker.faults().silent_topic("stuck", true);
    let relay = world.relay(RelayOptions { publish_stall: Duration::from_secs(2), ..relay_options() });
    world.store.enqueue_all(vec![message("stuck", "a1"), message("good", "b1")], true).await;
    world.until_published("good", &["b1"]).await;
    world.broker.faults().take_no_rows(true);
    world.enqueue("good", &["b2"]).await;
    // The mark of `b1` waits for the row before it, so it is held too.
    world.until_status("all are held", |status| (status.held, status.pending) == (3, 0)).await;
    world.broker.faults().take_no_rows(false);
    world.until_published("good", &["b1", "b2"]).await;
    world.until_status("one is held", |status| (status.held, status.pending) == (1, 0)).await;
    world.broker.faults().silent_topic("stuck", false);
    world.until_published("stuck", &["a1"]).await;
    relay.end().await;
}

/// Shown by: the reason of all of them for each.
#[tokio::test]
async fn each_of_several_topics_that_are_silent_is_held_with_a_reason_of_its_own() {
    let world = sqlite().await;
    let silent = ["s", "t"].map(|topic| {
        world.broker.faults().silent_topic(topic, true);
        message(topic, "a1")
    });
    world.store.enqueue_all([&silent[..], &[message("good", "a1")][..]].concat(), true).await;
    let relay = world.relay(relay_options());
    world.until_status("both are held", |status| (status.held, status.pending) == (2, 0)).await;
    let reasons = world.store.texts("select reason from oncebox_outbox_dead order by topic").await;
    let of = |topic: &str| format!("the broker has neither taken nor refused messages of topic `{topic}` for 1s");
    assert_eq!(reasons, ["s", "t"].map(of));
    relay.end().await;
}

/// Each trial reads the rows of all topics that are due, up to `read_bytes`: here one row. Shown to
/// fail: the topics without a row were due again together with the one that had it, and it came
/// first each time.
#[tokio::test]
async fn g3_a_topic_is_tried_although_the_rows_of_others_fill_each_trial() {
    let world = sqlite().await;
    let open = Arc::new(AtomicBool::new(false));
    let is_open = Arc::clone(&open);
    let refused = move |row: &oncebox::message::OutgoingMessage| row.topic != "t5" || !is_open.load(Ordering::SeqCst);
    world.broker.faults().on_publish(Fault::RefuseDestination("no route".into()), refused);
    for topic in 0..6 {
        world.enqueue(&format!("t{topic}"), &["a1"]).await;
    }
    let relay = world.relay(RelayOptions { read_bytes: 1, probe: Duration::from_secs(1), ..relay_options() });
    world.until_status("all are held", |status| (status.held, status.pending) == (6, 0)).await;
    open.store(true, Ordering::SeqCst);
    world.until_published("t5", &["a1"]).await;
    world.until_status("the others are held still", |status| (status.held, status.pending) == (5, 0)).await;
    relay.end().await;
}
