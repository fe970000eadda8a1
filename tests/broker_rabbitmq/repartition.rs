//! Another number of queues: refused as it is, changed by steps that lose nothing and keep the
//! order of every key.

use std::time::Duration;

use lapin::Channel;
use lapin::options::{ExchangeDeclareOptions, ExchangeDeleteOptions, QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::FieldTable;
use oncebox::broker::rabbitmq::{RabbitBroker, RabbitConfig, Repartition};
use oncebox::broker::{Broker, Refusal, Subscriber, Subscription};
use oncebox::error::BrokerError;
use oncebox::observe::Severity;

use crate::fixture::{
    Corner, SOON, first_occurrences, message, number, numbered, publish, receive, send_all, send_until_taken,
};
use crate::support::eventually;

fn with(corner: &Corner, partitions: u32) -> RabbitBroker {
    RabbitBroker::new(RabbitConfig { partitions, ..corner.config.clone() }).unwrap()
}

/// Takes steps until so much is left: the server notices a moment late that a consumer's connection
/// is gone, and may have lost its last acknowledgements with it, so that more may be ready.
async fn until(broker: &RabbitBroker, corner: &Corner, old: usize, least: u64, readers: u64) {
    let reached = tokio::time::timeout(SOON, async {
        loop {
            match broker.repartition(&corner.subscription(), &corner.topic).await.unwrap() {
                Repartition::Draining { from, ready, consumers }
                    if from == old && ready >= least && consumers == readers =>
                {
                    return;
                }
                _ => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    });
    reached.await.unwrap_or_else(|_| panic!("never {least} ready in {old} queues with {readers} consumers"));
}

async fn clean(corner: &Corner) {
    let hash = format!("{}.hash", corner.queue());
    corner.channel.exchange_delete(hash.as_str().into(), ExchangeDeleteOptions::default()).await.unwrap();
    let mut queues = vec![corner.queue()];
    queues.extend((0..4).map(|at| format!("{}.{at}", corner.queue())));
    corner.clean(&queues.iter().map(String::as_str).collect::<Vec<_>>()).await;
}

/// Acknowledges so many deliveries and writes them down; what came with them goes back when the
/// subscriber ends.
async fn read(subscriber: &mut dyn Subscriber, count: usize, log: &mut Vec<(String, u64)>) {
    for delivery in receive(subscriber, count).await.into_iter().take(count) {
        let key = String::from_utf8(delivery.arrived.key.clone().unwrap()).unwrap();
        log.push((key, number(delivery.arrived.payload.as_deref().unwrap())));
        subscriber.acknowledge(&delivery.source, delivery.sequence).await.unwrap();
    }
}

/// Takes steps until the change is done. Consumers of the old number read what came back to the old
/// queues.
async fn finish(new: &RabbitBroker, old: &RabbitBroker, corner: &Corner, log: &mut Vec<(String, u64)>) {
    let subscription = corner.subscription();
    let done = tokio::time::timeout(SOON, async {
        while let Repartition::Draining { ready, .. } = new.repartition(&subscription, &corner.topic).await.unwrap() {
            if ready > 0 {
                let mut reader = old.subscriber(&subscription).await.unwrap();
                read(&mut *reader, 1, log).await;
                reader.close().await;
            }
        }
    });
    done.await.expect("the old queues are read empty and deleted");
}

#[tokio::test]
async fn a_consumer_of_another_number_of_queues_is_refused_and_told_what_to_do() {
    for (first, then) in [(1, 2), (2, 1), (2, 4), (4, 2)] {
        let Some(corner) = Corner::of("a_consumer_of_another_number_of_queues_is_refused").await else { return };
        let subscription = corner.subscription();
        with(&corner, first).subscriber(&subscription).await.unwrap().close().await;
        publish(&with(&corner, first), numbered(&corner.topic, 5, 20)).await;
        let error = with(&corner, then).subscriber(&subscription).await.map(drop).unwrap_err();
        let said = format!("partitions = {then}");
        assert!(
            matches!(&error, BrokerError::Refused(why)
                if why.contains("20 ready") && why.contains(&said) && why.contains("oncebox queues repartition")),
            "{first} to {then}: {error}"
        );
        let findings = with(&corner, then).check(std::slice::from_ref(&subscription)).await.unwrap();
        let found =
            findings.iter().find(|one| one.severity == Severity::Refused && one.detail.contains("nobody reads them"));
        assert!(found.is_some_and(|one| one.detail.contains("20 ready")), "{first} to {then}: {findings:?}");
        // The old number goes on as before.
        let mut same = with(&corner, first).subscriber(&subscription).await.unwrap();
        read(&mut *same, 20, &mut Vec::new()).await;
        same.close().await;
        clean(&corner).await;
    }
}

#[tokio::test]
async fn a_start_that_was_broken_off_between_its_queues_is_no_other_number() {
    let Some(corner) = Corner::of("a_start_that_was_broken_off_between_its_queues").await else { return };
    let quorum = [
        ("x-queue-type", lapin::types::AMQPValue::LongString("quorum".into())),
        ("x-single-active-consumer", lapin::types::AMQPValue::Boolean(true)),
    ];
    corner.queue_of(&format!("{}.0", corner.queue()), "nothing", &quorum).await;
    with(&corner, 4).subscriber(&corner.subscription()).await.unwrap().close().await;
    clean(&corner).await;
}

/// It fails where the number of queues alone is looked at: the queue that is left is then deleted
/// while messages come into it.
#[tokio::test]
async fn of_several_queues_one_that_is_left_is_not_taken_for_the_only_queue_and_deleted() {
    let Some(corner) = Corner::of("of_several_queues_one_that_is_left").await else { return };
    let (broker, subscription) = (with(&corner, 2), corner.subscription());
    broker.subscriber(&subscription).await.unwrap().close().await;
    let [left, gone] = [0, 1].map(|at| format!("{}.{at}", corner.queue()));
    corner.channel.queue_delete(gone.as_str().into(), QueueDeleteOptions::default()).await.unwrap();
    let refused = broker.repartition(&subscription, &corner.topic).await.unwrap_err().to_string();
    assert!(refused.contains("go to partitions = 1 first"), "{refused}");
    publish(&broker, vec![(0, message(&corner.topic, Some("k"), 7))]).await;
    eventually("the queue that is left has the message", SOON, || async {
        let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        let queue = corner.channel.queue_declare(left.as_str().into(), passive, FieldTable::default());
        (queue.await.unwrap().message_count() == 1).then_some(())
    })
    .await;
    clean(&corner).await;
}

/// It fails where the marker has the number of what is left: the second step takes that for a
/// change to another number, and a consumer with one queue reads the new one first.
#[tokio::test]
async fn of_several_queues_one_that_is_left_is_read_before_the_one_queue_that_follows() {
    let Some(corner) = Corner::of("of_several_queues_one_that_is_left_is_read_before").await else { return };
    let (old, new, subscription) = (with(&corner, 2), with(&corner, 1), corner.subscription());
    old.subscriber(&subscription).await.unwrap().close().await;
    let gone = format!("{}.1", corner.queue());
    corner.channel.queue_delete(gone.as_str().into(), QueueDeleteOptions::default()).await.unwrap();
    publish(&old, vec![(0, message(&corner.topic, Some("k"), 7))]).await;
    until(&new, &corner, 2, 1, 0).await;
    publish(&new, vec![(0, message(&corner.topic, Some("k"), 8))]).await;
    until(&new, &corner, 2, 1, 0).await;
    new.subscriber(&subscription).await.map(drop).expect_err("before the old queue is empty");
    let mut log = Vec::new();
    let mut reader = old.subscriber(&subscription).await.unwrap();
    read(&mut *reader, 1, &mut log).await;
    reader.close().await;
    finish(&new, &old, &corner, &mut log).await;
    let mut reader = new.subscriber(&subscription).await.unwrap();
    read(&mut *reader, 1, &mut log).await;
    reader.close().await;
    assert_eq!(first_occurrences(&log)["k"], [7, 8]);
    clean(&corner).await;
}

/// It fails where a marker alone says that its queues are drained: the way back is refused for
/// ever, and a consumer of the old number makes a queue that gets nothing.
#[tokio::test]
async fn a_marker_that_a_broken_off_change_left_behind_does_not_stop_the_way_back() {
    let Some(corner) = Corner::of("a_marker_that_a_broken_off_change_left_behind").await else { return };
    let (one, two, subscription) = (with(&corner, 1), with(&corner, 2), corner.subscription());
    two.subscriber(&subscription).await.unwrap().close().await;
    let marker = format!("{}.draining.1", corner.queue());
    let (kind, options) =
        (lapin::ExchangeKind::Fanout, ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() });
    corner.channel.exchange_declare(marker.as_str().into(), kind, options, FieldTable::default()).await.unwrap();
    one.subscriber(&subscription).await.map(drop).expect_err("nothing of its number is drained");
    finish(&one, &two, &corner, &mut Vec::new()).await;
    one.subscriber(&subscription).await.unwrap().close().await;
    finish(&two, &one, &corner, &mut Vec::new()).await;
    two.subscriber(&subscription).await.unwrap().close().await;
    clean(&corner).await;
}

/// It fails where the first queue goes first, or the marker last: later steps do not see what is
/// left, and messages are hashed to queues that nobody reads.
#[tokio::test]
async fn a_change_that_is_broken_off_while_it_deletes_leaves_nothing_behind_once_it_is_done() {
    // Where the change was quicker than the look, nothing was broken off: again, on other queues.
    for _ in 0..20 {
        let Some(corner) = Corner::of("a_change_that_is_broken_off_while_it_deletes").await else { return };
        if is_broken_off_and_done(&corner).await {
            return;
        }
    }
    panic!("it was never broken off: nothing is shown");
}

/// Whether the first try was broken off while it deleted.
async fn is_broken_off_and_done(corner: &Corner) -> bool {
    let (one, four, subscription) = (with(corner, 1), with(corner, 4), corner.subscription());
    four.subscriber(&subscription).await.unwrap().close().await;
    let queue = |at: u32| format!("{}.{at}", corner.queue());
    let (first, last) = (queue(0), queue(3));
    let begins_to_delete = async {
        let channel = corner.connection.create_channel().await.unwrap();
        while is_queue(&channel, &first).await && is_queue(&channel, &last).await {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let mut log = Vec::new();
    let was_broken_off = tokio::select! {
        () = begins_to_delete => true,
        () = finish(&one, &four, corner, &mut log) => false,
    };
    finish(&one, &four, corner, &mut log).await;
    for at in 0..4 {
        let channel = corner.connection.create_channel().await.unwrap();
        assert!(!is_queue(&channel, &queue(at)).await, "queue {at} is left");
    }
    for rest in ["hash", "draining.4"] {
        let channel = corner.connection.create_channel().await.unwrap();
        let exchange = format!("{}.{rest}", corner.queue());
        let passive = ExchangeDeclareOptions { passive: true, ..ExchangeDeclareOptions::default() };
        let (kind, table) = (lapin::ExchangeKind::Fanout, FieldTable::default());
        let answer = channel.exchange_declare(exchange.as_str().into(), kind, passive, table).await;
        assert!(answer.is_err(), "the exchange {rest} is left");
    }
    clean(corner).await;
    was_broken_off
}

/// Shown to fail: with the old queues bound again by the consumer that reads them empty.
#[tokio::test]
async fn a_consumer_whose_queues_are_drained_binds_its_other_queues_again_and_not_these() {
    let Some(mut corner) = Corner::of("a_consumer_whose_queues_are_drained").await else { return };
    corner.config.quiet_check = Duration::from_millis(100);
    let (old, new, other) = (with(&corner, 1), with(&corner, 2), format!("{}.other", corner.topic));
    // They are bound in this order.
    let both = Subscription::new("ledger", vec![corner.topic.clone(), other.clone()]);
    let reader = old.subscriber(&both).await.unwrap();
    until(&new, &corner, 1, 0, 1).await;
    let exchange = corner.config.exchange.as_str().into();
    corner.channel.exchange_delete(exchange, ExchangeDeleteOptions::default()).await.unwrap();
    old.declare(&[]).await.unwrap();
    let mut publisher = old.publisher().await.unwrap();
    send_until_taken(&mut *publisher, &other).await;
    let settled = send_all(&mut *publisher, vec![(1, message(&corner.topic, None, 1))]).await;
    assert!(matches!(&settled[0].outcome, Err(Refusal::Destination(why)) if why.contains("NO_ROUTE")), "{settled:?}");
    publisher.close().await;
    reader.close().await;
    finish(&new, &old, &corner, &mut Vec::new()).await;
    old.remove(&[Subscription::new("ledger", vec![other])]).await.unwrap();
    clean(&corner).await;
}

/// Whether the server has this queue. Where it has not, it closes the channel.
async fn is_queue(channel: &Channel, name: &str) -> bool {
    let passive = QueueDeclareOptions::default().passive();
    channel.queue_declare(name.into(), passive, FieldTable::default()).await.is_ok()
}

#[tokio::test]
async fn changing_the_number_of_queues_keeps_every_message_and_the_order_of_every_key() {
    let Some(corner) = Corner::of("changing_the_number_of_queues_keeps_every_message").await else { return };
    let subscription = corner.subscription();
    let mut log = Vec::new();
    let mut next = 0;
    let mut more = |count: u64| {
        let rows = (next..next + count).map(|at| (at, message(&corner.topic, Some(&format!("k{}", at % 7)), at)));
        next += count;
        rows.collect::<Vec<_>>()
    };
    with(&corner, 1).subscriber(&subscription).await.unwrap().close().await;
    publish(&with(&corner, 1), more(100)).await;
    for (from, to) in [(1, 4), (4, 1)] {
        let (old, new) = (with(&corner, from), with(&corner, to));
        until(&new, &corner, from as usize, 100, 0).await;
        // What comes now stands behind, in the new queues only, and nobody reads it yet.
        publish(&old, more(50)).await;
        until(&new, &corner, from as usize, 100, 0).await;
        new.subscriber(&subscription).await.map(drop).expect_err("before the old queues are empty");
        let back = old.repartition(&subscription, &corner.topic).await.unwrap_err().to_string();
        assert!(back.contains("finish that first"), "{back}");
        // The old number may start again in the middle, and binds nothing.
        let mut reader = old.subscriber(&subscription).await.unwrap();
        read(&mut *reader, 60, &mut log).await;
        reader.close().await;
        let mut reader = old.subscriber(&subscription).await.unwrap();
        publish(&old, more(50)).await;
        read(&mut *reader, 40, &mut log).await;
        until(&new, &corner, from as usize, 0, u64::from(from)).await;
        reader.close().await;
        finish(&new, &old, &corner, &mut log).await;
        // A backlog for the way back.
        let mut reader = new.subscriber(&subscription).await.unwrap();
        read(&mut *reader, 100, &mut log).await;
        reader.close().await;
        if to != 1 {
            publish(&new, more(100)).await;
        }
        old.subscriber(&subscription).await.map(drop).expect_err("the old number, afterwards");
    }
    let seen = first_occurrences(&log);
    assert_eq!(seen.values().map(Vec::len).sum::<usize>(), next as usize, "every message came");
    assert!(seen.values().all(|numbers| numbers.is_sorted()), "{seen:?}");
    clean(&corner).await;
}
