//! Cases of one subscriber: starting, redelivery, catching up, pausing, bounds.
//!
//! Shown to fail on adapters that commit what was read instead of what was acknowledged, forget
//! acknowledgements when they are closed, always answer `caught_up` with true, ignore `pause` or
//! the bound, or wait for something after they took an event from their channel.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use super::Fixture;
use super::harness::{Case, assert_exactly, assert_order, number, numbers, row, rows, subscription};
use oncebox::adapter::{Break, Position};
use oncebox::broker::{Broker, Delivery, Event, PartitionId, Subscription};
use oncebox::message::OutgoingMessage;

/// How long no event must come before a case concludes that none will.
const QUIET: Duration = Duration::from_millis(700);

/// The subscriber starts before anybody has declared the topic. It creates the topic itself, waits,
/// or ends and is subscribed again; then it gets what is published.
pub async fn publisher_and_subscriber_start_in_any_order(fixture: &dyn Fixture) {
    let case = Case::new(fixture).await;
    let topic = case.name("any-order");
    let consuming = tokio::spawn(consume_all(Arc::clone(&case.broker), subscription(&topic), 20));
    // Gives the subscriber time to act before the topic is declared.
    tokio::time::sleep(Duration::from_millis(300)).await;
    case.broker.declare(std::slice::from_ref(&topic)).await.expect("topics are declared");
    case.publish_once_it_is_there(rows(&topic, 3, 0, 20)).await;
    let got = case.within("everything to come", consuming).await.expect("the consumer");
    assert_eq!(got, (0..20).collect());
}

/// Consumes as the runtime does: when a subscriber ends, it subscribes again.
async fn consume_all(broker: Arc<dyn Broker>, subscription: Subscription, count: usize) -> BTreeSet<usize> {
    let mut got = BTreeSet::new();
    while got.len() < count {
        if let Ok(mut subscriber) = broker.subscriber(&subscription).await {
            while got.len() < count {
                match subscriber.next().await {
                    Ok(Event::Deliveries(deliveries)) => {
                        got.extend(deliveries.iter().map(|delivery| number(&delivery.arrived)));
                    }
                    Ok(_) => {}
                    Err(_) => break,
                }
            }
            subscriber.close().await;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    got
}

/// Nothing is acknowledged: after the subscriber is closed, everything comes again, in order for
/// every key.
pub async fn what_was_not_acknowledged_comes_again_to_a_new_subscriber(fixture: &dyn Fixture) {
    let case = Case::new(fixture).await;
    let (topic, subscription) = case.topic("again").await;
    case.publish(rows(&topic, 10, 0, 500)).await;
    for _ in 0..2 {
        let mut reader = case.reader(&subscription).await;
        reader.read(500, false).await;
        assert_exactly(reader.arrived(), 0..500);
        assert_order(reader.arrived());
        reader.close().await;
    }
}

/// A part of every source is acknowledged: after the subscriber is closed, exactly the rest comes.
pub async fn what_was_acknowledged_does_not_come_again_and_the_rest_does_in_order(fixture: &dyn Fixture) {
    let case = Case::new(fixture).await;
    let (topic, subscription) = case.topic("rest").await;
    case.publish(rows(&topic, 10, 0, 500)).await;
    let mut reader = case.reader(&subscription).await;
    reader.read(500, false).await;
    assert_exactly(reader.arrived(), 0..500);
    let handled = numbers(&reader.acknowledge_half().await);
    reader.close().await;

    let mut again = case.reader(&subscription).await;
    again.read(500 - handled.len(), true).await;
    assert_exactly(again.arrived(), (0..500).filter(|number| !handled.contains(number)));
    assert_order(again.arrived());
    again.close().await;

    let mut nothing = case.reader(&subscription).await;
    // Before its sources are assigned nothing comes in any case.
    nothing.assigned().await;
    nothing.catch_up().await;
    nothing.read_until_quiet(QUIET).await;
    assert_eq!(nothing.got.len(), 0, "all of it was acknowledged");
    nothing.close().await;
}

/// Two consumers of one topic: each gets every row.
pub async fn every_group_gets_everything(fixture: &dyn Fixture) {
    let case = Case::new(fixture).await;
    let (topic, first) = case.topic("groups").await;
    let second = subscription(&topic);
    case.prepare(&second).await;
    case.publish(rows(&topic, 5, 0, 200)).await;
    for subscription in [&first, &second] {
        let mut reader = case.reader(subscription).await;
        reader.read(200, true).await;
        assert_exactly(reader.arrived(), 0..200);
        reader.close().await;
    }
}

/// `caught_up` is false until sources are assigned and everything that they held was delivered,
/// then true. On an empty topic it is true once sources are assigned.
pub async fn caught_up_says_so_once_what_stood_there_was_delivered(fixture: &dyn Fixture) {
    let case = Case::new(fixture).await;
    let (topic, subscription) = case.topic("caught-up").await;
    let mut empty = case.reader(&subscription).await;
    empty.assigned().await;
    empty.catch_up().await;
    empty.close().await;

    case.publish(rows(&topic, 10, 0, 300)).await;
    let mut reader = case.reader(&subscription).await;
    reader.catch_up().await;
    assert_exactly(reader.arrived(), 0..300);
    reader.close().await;
}

/// A paused subscriber that is drained gets nothing. After it is resumed, everything comes.
pub async fn a_paused_subscriber_gets_nothing_more_until_it_goes_on(fixture: &dyn Fixture) {
    let case = Case::new(fixture).await;
    let (topic, subscription) = case.topic("paused").await;
    case.publish(rows(&topic, 5, 0, 50)).await;
    let mut reader = case.reader(&subscription).await;
    reader.read(50, true).await;
    reader.subscriber.pause(true);
    reader.read_until_quiet(QUIET).await;
    case.publish((50..150).map(|number| row(&topic, Some("key-0"), number)).collect()).await;
    assert_eq!(reader.read_until_quiet(QUIET).await, 0, "it is paused");
    reader.subscriber.pause(false);
    reader.read(150, true).await;
    assert_exactly(reader.arrived(), 0..150);
    assert_order(reader.arrived());
    reader.close().await;
}

/// The number of unacknowledged deliveries stays within `in_flight_max`; an acknowledgement makes
/// room.
pub async fn deliveries_that_are_not_acknowledged_stay_below_the_bound(fixture: &dyn Fixture) {
    let case = Case::new(fixture).await;
    let (topic, mut subscription) = case.topic("bound").await;
    subscription.in_flight_max = 40;
    case.publish(rows(&topic, 10, 0, 1_000)).await;
    let mut reader = case.reader(&subscription).await;
    reader.assigned().await;
    case.within("some rows", async {
        while reader.got.is_empty() {
            let event = reader.next().await;
            reader.take(event, false).await;
        }
    })
    .await;
    reader.read_until_quiet(QUIET).await;
    assert!(reader.got.len() <= 40, "{} deliveries are not acknowledged", reader.got.len());
    reader.acknowledge_all().await;
    reader.read(1_000, true).await;
    assert_exactly(reader.arrived(), 0..1_000);
    reader.close().await;
}

/// Finished deliveries behind an unfinished one make room at once, and a later acknowledgement
/// covers them. Shown by: `finished` that does nothing; reading stops at the bound.
pub async fn a_delivery_that_stays_unfinished_takes_only_its_own_room(fixture: &dyn Fixture) {
    let case = Case::new(fixture).await;
    let (topic, mut subscription) = case.topic("unfinished").await;
    subscription.in_flight_max = 40;
    case.publish(rows(&topic, 10, 0, 1_000)).await;
    let mut reader = case.reader(&subscription).await;
    reader.assigned().await;
    case.within("all the others", async {
        while numbers(reader.arrived()).len() < 1_000 {
            let event = reader.next().await;
            let is_first = reader.got.is_empty();
            let mut finished: HashMap<PartitionId, Vec<i64>> = HashMap::new();
            // The very first delivery stays unfinished.
            for new in reader.take(event, false).await.iter().skip(usize::from(is_first)) {
                finished.entry(new.source.clone()).or_default().push(new.sequence);
            }
            for (source, sequences) in finished {
                reader.subscriber.finished(&source, &sequences).await;
            }
        }
    })
    .await;
    reader.acknowledge_all().await;
    case.publish(rows(&topic, 10, 1_000, 100)).await;
    reader.read(1_100, true).await;
    assert_exactly(reader.arrived(), 0..1_100);
    assert_order(reader.arrived());
    reader.close().await;
    let mut nothing = case.reader(&subscription).await;
    nothing.assigned().await;
    nothing.catch_up().await;
    nothing.read_until_quiet(QUIET).await;
    assert_eq!(nothing.got.len(), 0, "the acknowledgement covers what was finished");
    nothing.close().await;
}

/// The bytes of unacknowledged deliveries stay within `in_flight_bytes_max`, plus the delivery that
/// reaches it, which may be larger than the whole bound. A broker that cannot bound bytes may end
/// the session instead and ask for fewer deliveries in the next one.
pub async fn deliveries_that_are_not_acknowledged_stay_below_the_bound_of_bytes(fixture: &dyn Fixture) {
    const MAX: usize = 20_000;
    let case = Case::new(fixture).await;
    let Some(broker) = fixture.with_bytes(MAX).await else { return };
    let (topic, subscription) = case.topic("bytes").await;
    let large = |number: usize| {
        let digits = if number == 30 { 3 * MAX } else { 2_000 };
        OutgoingMessage { payload: format!("{number:0>digits$}").into_bytes(), ..row(&topic, Some("k"), number) }
    };
    case.publish((0..60).map(large).collect()).await;
    let mut seen = BTreeSet::new();
    case.within("everything to come", async {
        let subscribe = || async { broker.subscriber(&subscription).await.expect("a subscriber") };
        let mut subscriber = subscribe().await;
        let mut in_flight: Vec<Delivery> = Vec::new();
        while seen.len() < 60 {
            match tokio::time::timeout(QUIET, subscriber.next()).await {
                Ok(Ok(Event::Deliveries(deliveries))) => in_flight.extend(deliveries),
                Ok(Ok(_)) => {}
                Ok(Err(_)) => {
                    in_flight.clear();
                    subscriber = subscribe().await;
                }
                // No more deliveries come, so the bound is reached.
                Err(_) => {
                    for delivery in in_flight.drain(..) {
                        subscriber.acknowledge(&delivery.source, delivery.sequence).await.expect("it is taken");
                        seen.insert(number(&delivery.arrived));
                    }
                }
            }
            let bytes = |delivery: &Delivery| delivery.arrived.payload.as_ref().map_or(0, Vec::len);
            let before_the_last: usize = in_flight.iter().rev().skip(1).map(bytes).sum();
            assert!(before_the_last < MAX, "{before_the_last} bytes, and one delivery more, are not acknowledged");
        }
        subscriber.close().await;
    })
    .await;
    assert_eq!(seen, (0..60).collect());
}

/// `next` is dropped many times; every delivery still comes, once and in order.
pub async fn next_may_be_dropped_at_any_point_and_no_event_is_lost(fixture: &dyn Fixture) {
    let case = Case::new(fixture).await;
    let (topic, subscription) = case.topic("next-dropped").await;
    case.publish(rows(&topic, 10, 0, 1_000)).await;
    let mut reader = case.reader(&subscription).await;
    case.within("everything to come", async {
        while numbers(reader.arrived()).len() < 1_000 {
            let event = tokio::select! {
                biased;
                event = reader.subscriber.next() => event.expect("the subscriber stands"),
                () = tokio::time::sleep(Duration::from_micros(300)) => continue,
            };
            reader.take(event, true).await;
        }
    })
    .await;
    assert_exactly(reader.arrived(), 0..1_000);
    assert_order(reader.arrived());
    reader.assert_sequences_ascend();
    reader.close().await;
}

/// The database was restored to an earlier state, or a commit of offsets was lost. Consuming begins
/// at the lower of the two positions, so what either does not know as done comes again.
pub async fn a_log_begins_at_the_lower_of_what_the_database_and_the_group_know(fixture: &dyn Fixture) {
    let case = Case::new(fixture).await;
    if !case.can.offsets {
        return;
    }
    let (topic, subscription) = case.topic("lower").await;
    case.publish(rows(&topic, 10, 0, 300)).await;
    let mut first = case.reader(&subscription).await;
    let begun = first.begin(|_| None).await;
    assert!(begun.iter().all(|begun| begun.start.because.is_none()), "{begun:?}");
    first.read(300, true).await;
    let mut ends: HashMap<i32, i64> = HashMap::new();
    for delivery in &first.got {
        let end = ends.entry(delivery.source.partition).or_default();
        *end = (delivery.sequence + 1).max(*end);
    }
    let topic_id = |partition| begun.iter().find(|begun| begun.source.partition == partition)?.topic_id.clone();
    let half = |partition| ends.get(&partition).map_or(0, |end| end / 2);
    let all: Vec<_> = first.got.iter().map(|delivery| (delivery.source.partition, delivery.sequence)).collect();
    first.close().await;

    let mut second = case.reader(&subscription).await;
    let remembered = |at: &PartitionId| Position { topic_id: topic_id(at.partition), next: half(at.partition) };
    second.begin(|source| Some(remembered(source))).await;
    let mut expected: Vec<_> = all.into_iter().filter(|(partition, offset)| *offset >= half(*partition)).collect();
    second.read(expected.len(), true).await;
    let mut came: Vec<_> = second.got.iter().map(|delivery| (delivery.source.partition, delivery.sequence)).collect();
    expected.sort_unstable();
    came.sort_unstable();
    assert_eq!(came, expected, "from where the database stands");
    second.assert_sequences_ascend();
    second.close().await;

    // The database remembers more than the group has committed.
    case.publish(rows(&topic, 10, 300, 100)).await;
    let mut third = case.reader(&subscription).await;
    third.begin(|source| Some(Position { next: half(source.partition) * 2 + 2, ..remembered(source) })).await;
    third.read(100, true).await;
    assert_exactly(third.arrived(), 300..400);
    third.close().await;
}

/// After a topic was deleted and created again, the group's offset, of the old topic, is ignored.
pub async fn a_topic_made_anew_is_consumed_from_its_beginning(fixture: &dyn Fixture) {
    let case = Case::new(fixture).await;
    if !case.can.offsets {
        return;
    }
    let (topic, subscription) = case.topic("anew").await;
    case.publish(rows(&topic, 10, 0, 100)).await;
    let mut first = case.reader(&subscription).await;
    let begun = first.begin(|_| None).await;
    let [id, ..] = begun.as_slice() else { panic!("nothing began") };
    assert!(id.topic_id.is_some() && begun.iter().all(|begun| begun.topic_id == id.topic_id), "{begun:?}");
    first.read(100, true).await;
    first.close().await;
    let mut second = case.reader(&subscription).await;
    let begun = second.begin(|_| Some(Position { topic_id: Some("another".to_owned()), next: 1 })).await;
    assert!(begun.iter().all(|begun| matches!(begun.start.because, Some(Break::MadeAnew { first: 0 }))), "{begun:?}");
    second.read(100, true).await;
    assert_exactly(second.arrived(), 0..100);
    second.close().await;
}

/// A source that the runtime refuses is read no further: its rows do not take the room of the
/// others, it counts as caught up, and its position stays. Shown by: `refuse` that does nothing;
/// nothing more comes of the others.
pub async fn a_refused_source_holds_only_itself(fixture: &dyn Fixture) {
    let case = Case::new(fixture).await;
    if !case.can.offsets {
        return;
    }
    let (topic, mut subscription) = case.topic("refused").await;
    subscription.in_flight_max = 40;
    case.publish(rows(&topic, 10, 0, 1_000)).await;
    let mut by_partition: HashMap<i32, BTreeSet<usize>> = HashMap::new();
    for arrived in case.broker.read_all(&topic).await.expect("what was published") {
        by_partition.entry(arrived.coordinates.partition).or_default().insert(number(&arrived));
    }
    let mut reader = case.reader(&subscription).await;
    reader.begin(|_| None).await;
    let size = |source: &&PartitionId| by_partition.get(&source.partition).map_or(0, BTreeSet::len);
    let refused = reader.sources.iter().max_by_key(size).cloned().expect("sources");
    let of_refused = by_partition.remove(&refused.partition).unwrap_or_default();
    let others: BTreeSet<usize> = by_partition.into_values().flatten().collect();
    assert!(of_refused.len() > 40 && others.len() > 40, "{} and {} rows", of_refused.len(), others.len());
    reader.subscriber.refuse(&refused);
    let mut seen = BTreeSet::new();
    case.within("all the others", async {
        while seen.len() < others.len() || !reader.subscriber.caught_up().await.expect("an answer") {
            // An adapter may learn that it has caught up only while its events are taken.
            let next = tokio::time::timeout(Duration::from_millis(50), reader.subscriber.next()).await;
            let Ok(event) = next else { continue };
            if let Event::Deliveries(deliveries) = event.expect("the subscriber stands") {
                // What was on its way before it was refused may still come.
                for delivery in deliveries.iter().filter(|delivery| delivery.source != refused) {
                    seen.insert(number(&delivery.arrived));
                    let taken = reader.subscriber.acknowledge(&delivery.source, delivery.sequence).await;
                    taken.expect("an acknowledgement is taken");
                }
            }
        }
    })
    .await;
    assert_eq!(seen, others);
    reader.close().await;
    let mut next_owner = case.reader(&subscription).await;
    next_owner.read(of_refused.len(), true).await;
    assert_exactly(next_owner.arrived(), of_refused.into_iter());
    next_owner.close().await;
}
