//! Another number of queues: refused as it is, changed by steps that lose nothing and keep the
//! order of every key.

use std::time::Duration;

use lapin::options::{ExchangeDeleteOptions, QueueDeleteOptions};
use oncebox::broker::rabbitmq::{RabbitBroker, RabbitConfig, Repartition};
use oncebox::broker::{Broker, Subscriber};
use oncebox::error::BrokerError;

use crate::fixture::{Corner, SOON, first_occurrences, message, number, numbered, publish, receive};

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
        let found = findings.iter().find(|one| one.refused && one.detail.contains("nobody reads them"));
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
    assert_eq!(corner.take(&left).await, Some(("k".into(), 7)));
    clean(&corner).await;
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
        let done = tokio::time::timeout(SOON, async {
            while let Repartition::Draining { ready, .. } = new.repartition(&subscription, &corner.topic).await.unwrap()
            {
                if ready > 0 {
                    let mut reader = old.subscriber(&subscription).await.unwrap();
                    read(&mut *reader, 1, &mut log).await;
                    reader.close().await;
                }
            }
        });
        done.await.expect("the old queues are read empty and deleted");
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
