//! Confirms, returns, nacks: what a publishing session believes (R16, R20, R21).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use lapin::ExchangeKind;
use lapin::options::{
    BasicAckOptions, BasicCancelOptions, BasicConsumeOptions, BasicQosOptions, ExchangeDeclareOptions,
    ExchangeDeleteOptions, QueueBindOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use oncebox::broker::{Broker, Publisher, Receipt, Refusal, TopicState};

use crate::fixture::{Corner, SOON, first_occurrences, in_order, message, numbered, read, send_all};

/// A queue that nacks when it is full.
fn small(length: i32) -> [(&'static str, AMQPValue); 3] {
    [
        ("x-queue-type", AMQPValue::LongString("quorum".into())),
        ("x-max-length", AMQPValue::LongInt(length)),
        ("x-overflow", AMQPValue::LongString("reject-publish".into())),
    ]
}

/// What a relay does: sessions that start at the first unproven row, until all are proven. Answers
/// with what the queue took, in its order, and how many sessions a nack has ended.
async fn relay_through_a_full_queue(corner: &Corner, keys: u64, count: u64) -> (Vec<(String, u64)>, usize) {
    let queue = corner.queue();
    let stop = AtomicBool::new(false);
    // Slow enough that the queue is full again and again, fast enough that it has room again and
    // again.
    corner.channel.basic_qos(5, BasicQosOptions::default()).await.unwrap();
    let options = BasicConsumeOptions::default();
    let consumer = corner.channel.basic_consume(queue.as_str().into(), "".into(), options, FieldTable::default());
    let mut consumer = consumer.await.unwrap();
    let drain = async {
        let (mut log, mut arrived, mut quiet) = (Vec::new(), BTreeSet::new(), 0);
        loop {
            match tokio::time::timeout(Duration::from_millis(200), consumer.next()).await {
                Ok(Some(delivery)) => {
                    let delivery = delivery.unwrap();
                    delivery.ack(BasicAckOptions::default()).await.unwrap();
                    log.push(read(&delivery));
                    arrived.extend(log.last().cloned());
                    quiet = 0;
                }
                Ok(None) => panic!("the consumer was cancelled"),
                // What is proven arrives, however long the server takes.
                Err(_) if stop.load(Ordering::Relaxed) && (arrived.len() as u64 == count || quiet > 100) => break,
                Err(_) => quiet += 1,
            }
        }
        corner.channel.basic_cancel(consumer.tag(), BasicCancelOptions::default()).await.unwrap();
        log
    };
    let relay = async {
        let broker = corner.broker();
        let mut unproven: BTreeMap<_, _> = numbered(&corner.topic, keys, count).into_iter().collect();
        let (mut nacked, start) = (0, Instant::now());
        while !unproven.is_empty() {
            assert!(start.elapsed() < 3 * SOON, "{} rows are not proven", unproven.len());
            let mut publisher = broker.publisher().await.unwrap();
            publisher.send(unproven.clone().into_iter().collect()).await.unwrap();
            let mut ended = false;
            while !ended && !unproven.is_empty() {
                let mut settled = Vec::new();
                let answer = tokio::time::timeout(SOON, publisher.settle(&mut settled)).await;
                ended = answer.expect("outcomes, or an end").is_err();
                for one in settled {
                    match one.outcome {
                        Ok(_) => drop(unproven.remove(&one.tag)),
                        Err(Refusal::Session(_)) => nacked += 1,
                        Err(other) => panic!("{other:?}"),
                    }
                }
            }
            publisher.close().await;
        }
        stop.store(true, Ordering::Relaxed);
        nacked
    };
    tokio::join!(drain, relay)
}

// Shown to fail: with `Lanes::add` putting every row into `ready` (what `pipeline_per_key` does)
// the order breaks, as the next test asserts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r20_nacks_do_not_reorder_a_key() {
    let Some(corner) = Corner::of("r20_nacks_do_not_reorder_a_key").await else { return };
    corner.queue_of(&corner.queue(), &corner.topic, &small(20)).await;
    let (log, nacked) = relay_through_a_full_queue(&corner, 200, 2_000).await;
    assert!(nacked > 0, "the queue was never full: nothing is shown");
    let by_key = first_occurrences(&log);
    assert_eq!(by_key.values().map(Vec::len).sum::<usize>(), 2_000, "all arrived");
    assert!(in_order(&log), "{by_key:?}");
    corner.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r20_given_up_by_name_a_nack_reorders() {
    let Some(mut corner) = Corner::of("r20_given_up_by_name_a_nack_reorders").await else { return };
    // A control of the test above: that a window without the rule is reordered. Seen on 3.10 in the
    // first round. There a full queue takes one message for each that leaves it; RabbitMQ 4.0.5
    // stayed in one state, full or not, for longer than a window lasts, ten rounds long: nothing of
    // a window was taken after something of it was refused. The rule stands there all the same: the
    // state does change, and it may change in the middle of a window.
    let server = corner.broker().check(&[]).await.unwrap().remove(0).detail;
    if !server.starts_with("RabbitMQ 3.") {
        eprintln!("NOT SHOWN: r20_given_up_by_name_a_nack_reorders (seen on RabbitMQ 3 only, and this is {server})");
        corner.clean(&[]).await;
        return;
    }
    corner.config.pipeline_per_key = true;
    corner.queue_of(&corner.queue(), &corner.topic, &small(20)).await;
    let mut reordered = false;
    // The first round shows it on a quiet machine; on a busy one the queue may drain in step with
    // the window for many rounds.
    for _ in 0..60 {
        let (log, _) = relay_through_a_full_queue(&corner, 6, 2_000).await;
        reordered |= !in_order(&log);
        if reordered {
            break;
        }
    }
    assert!(reordered, "sixty rounds on a full queue kept the order: then R20 would cost for nothing");
    corner.finish().await;
}

// Shown to fail: settling by the confirm that a return came on gave wrong tags at once; settling by
// the returned id, but believing each confirm as it comes (`collect` with one confirm at a time,
// `believe` without `lane.returned.is_empty() || lane.in_flight == 0`), failed 3 times of 3.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r21_exactly_the_unroutable_ones_are_refused_when_a_third_is() {
    let Some(corner) = Corner::of("r21_exactly_the_unroutable_ones_are_refused").await else { return };
    let queue = corner.queue();
    corner.queue_of(&queue, &format!("{}.yes.*", corner.topic), &[]).await;
    let count = 30_000;
    // A topic of its own for each, so that no refusal holds others back and the channels are full
    // of both kinds.
    let rows: Vec<_> = (0..count)
        .map(|tag| {
            let way = if tag % 3 == 0 { "no" } else { "yes" };
            (tag, message(&format!("{}.{way}.{tag}", corner.topic), None, tag))
        })
        .collect();
    let mut publisher = corner.broker().publisher().await.unwrap();
    let settled = send_all(&mut *publisher, rows).await;
    let refused: BTreeSet<u64> = settled
        .iter()
        .filter(|one| match &one.outcome {
            Ok(_) => false,
            Err(Refusal::Destination(why)) => why.contains("NO_ROUTE"),
            other => panic!("{other:?}"),
        })
        .map(|one| one.tag)
        .collect();
    assert_eq!(settled.len() as u64, count);
    assert_eq!(refused, (0..count).filter(|tag| tag % 3 == 0).collect());
    publisher.close().await;
    corner.clean(&[&queue]).await;
}

#[tokio::test]
async fn a_topic_without_a_route_is_refused_whole_and_taken_once_it_is_bound() {
    let Some(mut corner) = Corner::of("a_topic_without_a_route").await else { return };
    // Until then it is not ready, however long it takes to hear of the refusals.
    corner.config.route_retry = Duration::from_secs(5);
    let queue = corner.queue();
    let mut publisher = corner.broker().publisher().await.unwrap();
    assert_eq!(publisher.topic(&corner.topic).await.unwrap(), TopicState::Ready, "routes cannot be seen in advance");
    let settled = send_all(&mut *publisher, numbered(&corner.topic, 1, 50)).await;
    for one in &settled {
        let Err(Refusal::Destination(why)) = &one.outcome else { panic!("{one:?}") };
        assert!(why.contains(&corner.topic) && why.contains("bind a queue"), "{why}");
    }
    let TopicState::NotReady(why) = publisher.topic(&corner.topic).await.unwrap() else { panic!("just refused") };
    assert!(why.contains("no queue is bound"), "{why}");
    corner.queue_of(&queue, &corner.topic, &[]).await;
    let ready =
        async |publisher: &mut dyn Publisher| publisher.topic(&corner.topic).await.unwrap() == TopicState::Ready;
    let start = Instant::now();
    while !ready(&mut *publisher).await {
        assert!(start.elapsed() < SOON);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let settled = send_all(&mut *publisher, numbered(&corner.topic, 1, 50)).await;
    assert!(settled.iter().all(|one| one.outcome.is_ok()), "{settled:?}");
    let mut log = Vec::new();
    while let Some(one) = corner.take(&queue).await {
        log.push(one);
    }
    assert!(log.len() == 50 && in_order(&log), "nothing of the refused ones slipped through: {log:?}");
    publisher.close().await;
    corner.clean(&[&queue]).await;
}

// Shown to fail: without `Confirms::refused` the second half of the key is published while its
// first row is refused.
#[tokio::test]
async fn rows_sent_before_the_refusal_was_heard_are_refused_too() {
    let Some(mut corner) = Corner::of("rows_sent_before_the_refusal_was_heard").await else { return };
    // The refusal is seen below, however long nobody looks.
    corner.config.route_retry = SOON;
    let queue = corner.queue();
    let mut publisher = corner.broker().publisher().await.unwrap();
    publisher.send(vec![(0, message(&corner.topic, Some("k"), 0))]).await.unwrap();
    // The refusal has come, and nobody has asked for it: `topic` is the way to see that without
    // taking it.
    let start = Instant::now();
    while publisher.topic(&corner.topic).await.unwrap() == TopicState::Ready {
        assert!(start.elapsed() < SOON);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    corner.queue_of(&queue, &corner.topic, &[]).await;
    let settled = send_all(&mut *publisher, vec![(1, message(&corner.topic, Some("k"), 1))]).await;
    let outcomes: Vec<_> = settled.iter().map(|one| (one.tag, one.outcome.is_ok())).collect();
    assert!(outcomes.starts_with(&[(0, false)]), "{outcomes:?}");
    let mut rest = settled;
    while rest.len() < 2 {
        tokio::time::timeout(SOON, publisher.settle(&mut rest)).await.expect("outcomes").unwrap();
    }
    assert!(rest.iter().all(|one| matches!(one.outcome, Err(Refusal::Destination(_)))), "{rest:?}");
    assert_eq!(corner.take(&queue).await, None);
    // Now it was heard: the runtime may send them again.
    let settled = send_all(&mut *publisher, vec![(2, message(&corner.topic, Some("k"), 0))]).await;
    assert_eq!(settled[0].outcome, Ok(Receipt::Confirm));
    publisher.close().await;
    corner.clean(&[&queue]).await;
}

#[tokio::test]
async fn r16_an_exchange_that_is_not_there_is_declared_and_one_that_vanishes_is_a_blocked_destination() {
    let Some(corner) = Corner::bare("r16_an_exchange_that_is_not_there").await else { return };
    let broker = corner.broker();
    let queue = corner.queue();
    let mut publisher = broker.publisher().await.unwrap();
    assert_eq!(publisher.topic(&corner.topic).await.unwrap(), TopicState::Ready);
    let exchange = corner.config.exchange.as_str().into();
    let (kind, passive) = (ExchangeKind::Topic, ExchangeDeclareOptions { passive: true, ..Default::default() });
    let looked = corner.channel.exchange_declare(exchange, kind, passive, FieldTable::default()).await;
    looked.expect("the publisher declared it");
    broker.declare(&[]).await.unwrap();
    broker.declare(&[]).await.unwrap();
    assert_eq!(publisher.topic(&corner.topic).await.unwrap(), TopicState::Ready);
    corner.queue_of(&queue, &corner.topic, &[]).await;
    assert!(send_all(&mut *publisher, numbered(&corner.topic, 2, 4)).await.iter().all(|one| one.outcome.is_ok()));
    // It vanishes under the session: the rows are refused for their destination, then the session
    // is over.
    let (exchange, gone) = (corner.config.exchange.as_str().into(), ExchangeDeleteOptions::default());
    corner.channel.exchange_delete(exchange, gone).await.unwrap();
    let settled = send_all(&mut *publisher, vec![(9, message(&corner.topic, None, 9))]).await;
    assert!(matches!(&settled[0].outcome, Err(Refusal::Destination(why)) if why.contains("NOT_FOUND")), "{settled:?}");
    let mut none = Vec::new();
    publisher.settle(&mut none).await.expect_err("the channel is closed");
    publisher.send(vec![(10, message(&corner.topic, None, 10))]).await.expect_err("the session is over");
    publisher.close().await;
    // The next session declares it again.
    let mut publisher = broker.publisher().await.unwrap();
    assert_eq!(publisher.topic(&corner.topic).await.unwrap(), TopicState::Ready);
    let settled = send_all(&mut *publisher, vec![(11, message(&corner.topic, None, 11))]).await;
    assert!(matches!(&settled[0].outcome, Err(Refusal::Destination(why)) if why.contains("NO_ROUTE")), "{settled:?}");
    publisher.close().await;
    corner.clean(&[&queue]).await;
}

#[tokio::test]
async fn an_exchange_of_another_kind_is_refused_by_name() {
    let Some(corner) = Corner::bare("an_exchange_of_another_kind").await else { return };
    let exchange = corner.config.exchange.as_str();
    let durable = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
    let fanout = ExchangeKind::Fanout;
    corner.channel.exchange_declare(exchange.into(), fanout, durable, FieldTable::default()).await.unwrap();
    let error = corner.broker().declare(&[]).await.unwrap_err().to_string();
    assert!(error.contains(exchange) && error.contains("`type`"), "{error}");
    corner.clean(&[]).await;
}

#[tokio::test]
async fn what_an_alternate_exchange_takes_is_published() {
    let Some(mut corner) = Corner::bare("what_an_alternate_exchange_takes").await else { return };
    let alternate = format!("{}-rest", corner.config.exchange);
    let durable = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
    let fanout = ExchangeKind::Fanout;
    corner.channel.exchange_declare(alternate.as_str().into(), fanout, durable, FieldTable::default()).await.unwrap();
    corner.config.alternate_exchange = Some(alternate.clone());
    corner.broker().declare(&[]).await.unwrap();
    let queue = format!("{}-rest", corner.topic);
    corner.queue_of(&queue, "unused", &[]).await;
    let bind = QueueBindOptions::default();
    let bound = corner.channel.queue_bind(
        queue.as_str().into(),
        alternate.as_str().into(),
        "".into(),
        bind,
        FieldTable::default(),
    );
    bound.await.unwrap();
    let mut publisher = corner.broker().publisher().await.unwrap();
    let settled = send_all(&mut *publisher, vec![(0, message(&corner.topic, Some("k"), 7))]).await;
    assert_eq!(settled[0].outcome, Ok(Receipt::Confirm));
    assert_eq!(corner.take(&queue).await, Some(("k".into(), 7)));
    publisher.close().await;
    let gone = ExchangeDeleteOptions::default();
    corner.channel.exchange_delete(alternate.as_str().into(), gone).await.unwrap();
    corner.clean(&[&queue]).await;
}

#[tokio::test]
async fn a_message_that_amqp_cannot_carry_is_refused_for_what_it_is() {
    let Some(corner) = Corner::of("a_message_that_amqp_cannot_carry").await else { return };
    let queue = corner.queue();
    corner.queue_of(&queue, &corner.topic, &[]).await;
    let mut publisher = corner.broker().publisher().await.unwrap();
    let mut bad = message(&corner.topic, Some("bad"), 1);
    bad.kind = "k".repeat(300);
    let rows =
        vec![(0, message(&corner.topic, Some("a"), 0)), (1, bad.clone()), (2, message(&corner.topic, Some("b"), 2))];
    for one in send_all(&mut *publisher, rows).await {
        match one.tag {
            1 => assert!(matches!(&one.outcome, Err(Refusal::Message(why)) if why.contains("255")), "{one:?}"),
            _ => assert_eq!(one.outcome, Ok(Receipt::Confirm)),
        }
    }
    // What stands behind it of its key does not go, until the refusal is known; all else does.
    let rows = vec![(3, bad), (4, message(&corner.topic, Some("bad"), 4)), (5, message(&corner.topic, Some("a"), 5))];
    for one in send_all(&mut *publisher, rows).await {
        match one.tag {
            3 => assert!(matches!(one.outcome, Err(Refusal::Message(_))), "{one:?}"),
            4 => assert!(matches!(one.outcome, Err(Refusal::Behind(_))), "{one:?}"),
            _ => assert_eq!(one.outcome, Ok(Receipt::Confirm)),
        }
    }
    let settled = send_all(&mut *publisher, vec![(6, message(&corner.topic, Some("bad"), 6))]).await;
    assert_eq!(settled[0].outcome, Ok(Receipt::Confirm));
    publisher.close().await;
    corner.clean(&[&queue]).await;
}
