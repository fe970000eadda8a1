//! From one process to the next: nothing is handed back out of order (R29), and acknowledgements
//! arrive.
//!
//! Without the guard (`shut_down` and `cut` taken out of the three Drops and of `close`) the `r29`
//! tests fail in their first round: the standby gets 30, 31, 32 .. first, and what was held
//! comes after.

use std::collections::BTreeSet;

use futures_util::FutureExt;
use oncebox::broker::{Broker, Delivery, Event, Subscriber};

use crate::fixture::{Corner, SOON, message, numbered, numbers, publish, receive};
use crate::reach::authority;
use crate::support::service;

const ROUNDS: usize = 6;
/// What the active consumer holds, and what stands in the queue in all: the rest is what overtakes
/// when it is cancelled.
const HELD: usize = 30;
const ALL: usize = 90;

/// An active consumer that holds deliveries, and a standby on the same queue.
async fn active_and_standby(corner: &Corner) -> (Box<dyn Subscriber>, Box<dyn Subscriber>, Vec<Delivery>) {
    let broker = corner.broker();
    let mut subscription = corner.subscription();
    subscription.in_flight_max = HELD;
    let mut active = broker.subscriber(&subscription).await.unwrap();
    publish(&broker, numbered(&corner.topic, 1, ALL as u64)).await;
    let held = receive(&mut *active, HELD).await;
    assert!(held.len() == HELD && held.iter().all(|delivery| !delivery.redelivered));
    let standby = broker.subscriber(&corner.subscription()).await.unwrap();
    (active, standby, held)
}

async fn takes_over_in_order(standby: &mut dyn Subscriber) {
    let deliveries = receive(standby, ALL).await;
    assert_eq!(numbers(&deliveries), (0..ALL as u64).collect::<Vec<_>>(), "R29: handed back out of order");
    let redelivered = deliveries.iter().filter(|delivery| delivery.redelivered).count();
    assert_eq!(redelivered, HELD, "the server says which were delivered before");
    let last = deliveries.last().unwrap();
    standby.acknowledge(&last.source, last.sequence).await.unwrap();
}

/// The active consumer goes, and the standby takes over.
async fn hands_back_in_order(test: &str, goes: impl AsyncFn(Box<dyn Subscriber>)) {
    let Some(corner) = Corner::of(test).await else { return };
    hands_back_in_order_in(&corner, goes).await;
}

async fn hands_back_in_order_in(corner: &Corner, goes: impl AsyncFn(Box<dyn Subscriber>)) {
    for _ in 0..ROUNDS {
        let (active, mut standby, _) = active_and_standby(corner).await;
        goes(active).await;
        takes_over_in_order(&mut *standby).await;
        standby.close().await;
    }
    corner.finish().await;
}

#[tokio::test]
async fn r29_a_dropped_subscriber_hands_back_in_order() {
    hands_back_in_order("r29_a_dropped_subscriber", async |active| drop(active)).await;
}

// What is cut is the socket below TLS.
#[tokio::test]
async fn r29_over_tls_a_dropped_subscriber_hands_back_in_order() {
    let test = "r29_over_tls_a_dropped_subscriber";
    let (Some(url), Some(mut corner)) = (service(test, "ONCEBOX_TEST_RABBITMQ_TLS"), Corner::of(test).await) else {
        return;
    };
    corner.config.url = url;
    corner.config.ca_file = authority("ONCEBOX_TEST_CA");
    hands_back_in_order_in(&corner, async |active| drop(active)).await;
}

#[tokio::test]
async fn r29_an_aborted_task_hands_back_in_order() {
    let is_aborted = async |mut active: Box<dyn Subscriber>| {
        let task = tokio::spawn(async move {
            loop {
                active.next().await.unwrap();
            }
        });
        tokio::task::yield_now().await;
        task.abort();
    };
    hands_back_in_order("r29_an_aborted_task", is_aborted).await;
}

#[tokio::test]
async fn r29_a_panic_hands_back_in_order() {
    let panics = async |active: Box<dyn Subscriber>| {
        let task = tokio::spawn(async move {
            let _active = active;
            // Not `panic!`, which the compiler would see through.
            assert!(std::hint::black_box(false), "on purpose");
        });
        task.await.unwrap_err();
    };
    hands_back_in_order("r29_a_panic", panics).await;
}

#[tokio::test]
async fn r29_after_a_planned_end_the_standby_gets_only_what_was_not_acknowledged_and_in_order() {
    let Some(corner) = Corner::of("r29_after_a_planned_end").await else { return };
    for _ in 0..ROUNDS {
        let (mut active, mut standby, held) = active_and_standby(&corner).await;
        active.acknowledge(&held[9].source, held[9].sequence).await.unwrap();
        active.close().await;
        let deliveries = receive(&mut *standby, ALL - 10).await;
        assert_eq!(numbers(&deliveries), (10..ALL as u64).collect::<Vec<_>>());
        let last = deliveries.last().unwrap();
        standby.acknowledge(&last.source, last.sequence).await.unwrap();
        standby.close().await;
    }
    corner.finish().await;
}

#[tokio::test]
async fn acknowledgements_are_cumulative_and_told_twice_or_too_far_do_no_harm() {
    let Some(corner) = Corner::of("acknowledgements_are_cumulative").await else { return };
    let broker = corner.broker();
    let mut subscriber = broker.subscriber(&corner.subscription()).await.unwrap();
    publish(&broker, numbered(&corner.topic, 1, 20)).await;
    let deliveries = receive(&mut *subscriber, 20).await;
    let source = deliveries[0].source.clone();
    subscriber.acknowledge(&source, deliveries[11].sequence).await.unwrap();
    subscriber.acknowledge(&source, deliveries[11].sequence).await.unwrap();
    subscriber.acknowledge(&source, deliveries[3].sequence).await.unwrap();
    let error = subscriber.acknowledge(&source, deliveries[19].sequence + 1).await.unwrap_err().to_string();
    assert!(error.contains(&corner.queue()), "{error}");
    // The channel is alive: the server has seen no tag that it does not know.
    publish(&broker, vec![(0, message(&corner.topic, None, 99))]).await;
    assert_eq!(numbers(&receive(&mut *subscriber, 1).await), [99]);
    subscriber.close().await;
    let mut again = broker.subscriber(&corner.subscription()).await.unwrap();
    assert!(again.next().now_or_never().is_some(), "its source is assigned at once");
    let rest = receive(&mut *again, 9).await;
    assert_eq!(numbers(&rest), [12, 13, 14, 15, 16, 17, 18, 19, 99]);
    assert_ne!(rest[0].source, source, "another channel is another generation");
    again.close().await;
    corner.finish().await;
}

#[tokio::test]
async fn caught_up_counts_what_stood_there_and_a_standby_sees_an_empty_queue() {
    let Some(corner) = Corner::of("caught_up_counts_what_stood_there").await else { return };
    let broker = corner.broker();
    let first = broker.subscriber(&corner.subscription()).await.unwrap();
    first.close().await;
    publish(&broker, numbered(&corner.topic, 3, 40)).await;
    let mut subscription = corner.subscription();
    subscription.in_flight_max = 15;
    let mut active = broker.subscriber(&subscription).await.unwrap();
    assert!(!active.caught_up().await.unwrap(), "not assigned yet");
    let mut standby = broker.subscriber(&subscription).await.unwrap();
    let Event::Assigned(sources) = standby.next().await.unwrap() else { panic!("assigned first") };
    assert_eq!(sources.len(), 1);
    assert!(!standby.caught_up().await.unwrap(), "messages stand in the queue");
    let mut numbers_seen = BTreeSet::new();
    while numbers_seen.len() < 40 {
        for delivery in receive(&mut *active, 1).await {
            numbers_seen.extend(numbers(std::slice::from_ref(&delivery)));
            active.acknowledge(&delivery.source, delivery.sequence).await.unwrap();
        }
    }
    assert!(active.caught_up().await.unwrap());
    let start = std::time::Instant::now();
    while !standby.caught_up().await.unwrap() {
        assert!(start.elapsed() < SOON, "the standby never saw the queue empty");
    }
    active.close().await;
    standby.close().await;
    corner.finish().await;
}
