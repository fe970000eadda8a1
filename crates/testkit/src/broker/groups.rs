//! Cases of several subscribers in one group: sharing, taking over, handing over, fencing.
//!
//! Shown to fail on adapters that hand over from what was read instead of what was acknowledged,
//! repeat what was acknowledged, or revoke a source twice.

use std::collections::BTreeSet;
use std::time::Duration;

use super::Fixture;
use super::harness::{Case, Reader, assert_order, number, numbers, rows};
use oncebox::broker::{Event, PartitionId};
use oncebox::message::Arrived;

/// What two readers handled, in order.
#[derive(Default)]
struct Handled(Vec<Arrived>);

impl Handled {
    /// Waits a moment for an event of a reader; handles and acknowledges its deliveries.
    async fn step(&mut self, reader: &mut Reader) {
        let Ok(event) = tokio::time::timeout(Duration::from_millis(10), reader.subscriber.next()).await else { return };
        let new = reader.take(event.expect("the subscriber stands"), true).await;
        self.0.extend(new.iter().map(|delivery| delivery.arrived.clone()));
    }
}

/// A second subscriber joins while rows are published: nothing is lost, the order of every key
/// holds over both, and where the broker shares, both work.
pub async fn two_subscribers_share_without_loss_and_keep_the_order_of_every_key(fixture: &dyn Fixture) {
    let case = Case::new(fixture).await;
    let (topic, subscription) = case.topic("share").await;
    let mut handled = Handled::default();
    let mut published = 1_000;
    case.publish(rows(&topic, 20, 0, published)).await;
    let mut first = case.reader(&subscription).await;
    case.within("the first to work", async {
        while handled.0.len() < 300 {
            handled.step(&mut first).await;
        }
    })
    .await;
    let mut second = case.reader(&subscription).await;
    let shares = case.can.shares;
    case.within("both to work and everything to be handled", async {
        loop {
            handled.step(&mut first).await;
            handled.step(&mut second).await;
            let both = !shares || (!first.sources.is_empty() && !second.sources.is_empty());
            let all = numbers(&handled.0).len() == published;
            if all && both && published >= 3_000 {
                break;
            }
            // More rows are published while they share, and after.
            if all && (published < 2_000 || both) {
                case.publish(rows(&topic, 20, published, 1_000)).await;
                published += 1_000;
            }
        }
    })
    .await;
    assert_order(&handled.0);
    if shares {
        let places = |reader: &Reader| -> BTreeSet<i32> { reader.sources.iter().map(|s| s.partition).collect() };
        assert!(places(&first).is_disjoint(&places(&second)), "no partition is on two of them");
        assert!(second.got.len() > 100, "the second one works too");
    }
    first.close().await;
    second.close().await;
}

/// The first subscriber is dropped with unacknowledged deliveries; the second gets them, in order.
pub async fn a_subscriber_that_is_dropped_without_close_is_taken_over_in_order(fixture: &dyn Fixture) {
    let case = Case::new(fixture).await;
    let (topic, subscription) = case.topic("takeover").await;
    case.publish(rows(&topic, 20, 0, 1_000)).await;
    let mut first = case.reader(&subscription).await;
    first.read(400, false).await;
    let mut handled = first.acknowledge_half().await;
    let mut second = case.reader(&subscription).await;
    drop(first);
    let mut seen = numbers(&handled);
    case.within("the second to take over", async {
        while seen.len() < 1_000 {
            let event = second.next().await;
            for delivery in second.take(event, true).await {
                seen.insert(number(&delivery.arrived));
                handled.push(delivery.arrived.clone());
            }
        }
    })
    .await;
    assert_order(&handled);
    second.close().await;
}

/// The first subscriber acknowledges its deliveries and is closed; the second goes on there.
pub async fn a_subscriber_that_is_closed_hands_over_in_order_without_repeating(fixture: &dyn Fixture) {
    let case = Case::new(fixture).await;
    let (topic, mut subscription) = case.topic("hand-over").await;
    subscription.in_flight_max = 100;
    case.publish(rows(&topic, 20, 0, 1_000)).await;
    let mut first = case.reader(&subscription).await;
    first.read(150, true).await;
    // A standby subscriber, where the broker has one, connects before the hand-over.
    let standby = if case.can.shares { None } else { Some(case.reader(&subscription).await) };
    let handled: Vec<Arrived> = first.arrived().cloned().collect();
    let done = numbers(&handled);
    first.close().await;
    let mut second = match standby {
        Some(reader) => reader,
        None => case.reader(&subscription).await,
    };
    second.read(1_000 - done.len(), true).await;
    let again: Vec<usize> = second.arrived().map(number).filter(|number| done.contains(number)).collect();
    assert!(again.is_empty(), "{} rows that were acknowledged came again: {again:?}", again.len());
    assert_order(handled.iter().chain(second.arrived()));
    second.close().await;
}

/// A subscriber acknowledges a source that it has given up: that changes nothing (G9).
pub async fn g9_a_revoked_subscriber_acknowledges_nothing(fixture: &dyn Fixture) {
    let case = Case::new(fixture).await;
    if !case.can.shares {
        return;
    }
    let (topic, subscription) = case.topic("fenced").await;
    case.publish(rows(&topic, 20, 0, 500)).await;
    let mut first = case.reader(&subscription).await;
    first.read(500, false).await;

    // The second one joins. The sources that the first gives up are acknowledged only afterwards.
    let mut second = case.reader(&subscription).await;
    let mut given_up: Vec<PartitionId> = Vec::new();
    let with_second = |given_up: &[PartitionId], second: &Reader| {
        let there = |source: &PartitionId| second.sources.iter().any(|other| other.partition == source.partition);
        !given_up.is_empty() && given_up.iter().all(there)
    };
    case.within("the second to get a share", async {
        while !with_second(&given_up, &second) {
            if let Ok(event) = tokio::time::timeout(Duration::from_millis(10), first.subscriber.next()).await {
                let event = event.expect("the subscriber stands");
                if let Event::Revoked { sources, .. } = &event {
                    given_up.extend(sources.clone());
                }
                first.take(event, false).await;
            }
            if let Ok(event) = tokio::time::timeout(Duration::from_millis(10), second.subscriber.next()).await {
                second.take(event.expect("the subscriber stands"), false).await;
            }
        }
    })
    .await;
    let mut too_late = 0;
    for source in &given_up {
        let last = first.got.iter().filter(|d| d.source == *source).map(|d| d.sequence).max();
        if let Some(last) = last {
            // It may return an error or not: it is too late in any case.
            let _ = first.subscriber.acknowledge(source, last).await;
            too_late += 1;
        }
    }
    assert!(too_late > 0, "no delivery came of a source that was given up");
    first.close().await;
    second.close().await;

    let mut third = case.reader(&subscription).await;
    third.read(500, true).await;
    assert_eq!(numbers(third.arrived()).len(), 500);
    third.close().await;
}
