//! The relay to a real RabbitMQ whose topics have no route or refuse: each holds itself alone.

use std::collections::BTreeSet;
use std::time::Duration;

use lapin::options::ExchangeDeleteOptions;
use lapin::types::AMQPValue;
use oncebox::RelayOptions;
use oncebox::broker::Broker;
use oncebox::broker::rabbitmq::{RabbitBroker, RabbitConfig};
use oncebox::store::Status;

use super::fixture::{Corner, SOON, in_order, numbers, receive};
use super::outbox::{Outbox, options};
use super::private::Private;
use super::proxy::{Failure, Proxy, When};

fn rows(topic: &str, numbers: std::ops::Range<u64>) -> Vec<(String, String, String)> {
    numbers.map(|n| (topic.to_owned(), format!("k{}", n % 3), n.to_string())).collect()
}

async fn log(corner: &Corner, queue: &str) -> Vec<(String, u64)> {
    let mut log = Vec::new();
    while let Some(taken) = corner.take(queue).await {
        log.push(taken);
    }
    log
}

/// The numbers that came, each once.
fn distinct(log: &[(String, u64)]) -> BTreeSet<u64> {
    log.iter().map(|(_, number)| *number).collect()
}

/// Shown to fail on the code before: each topic without a route cost a session, up to five seconds
/// apart, and everything that was taken came again with each.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g3_topics_without_a_route_are_held_together_and_released_when_they_have_one() {
    let Some(corner) = Corner::of("g3_topics_without_a_route").await else { return };
    let outbox = Outbox::new().await;
    let queue = corner.queue();
    corner.queue_of(&queue, &corner.topic, &[]).await;
    let unrouted: Vec<String> = (0..100).map(|n| format!("{}.none{n}", corner.topic)).collect();
    for (topic, n) in unrouted.iter().zip(0..) {
        outbox.enqueue(rows(topic, 0..2)).await;
        outbox.enqueue(rows(&corner.topic, n..n + 1)).await;
    }
    let relay = outbox.relay(corner.broker(), options());
    outbox.until("all are held, the others sent", |status| (status.held, status.pending) == (200, 0)).await;
    assert!(outbox.health.is_ready(), "{:?}", outbox.health.lines());
    let sent = log(&corner, &queue).await;
    assert!(in_order(&sent) && (100..=200).contains(&sent.len()), "{} for 100", sent.len());
    assert_eq!(distinct(&sent), (0..100).collect());
    let late = format!("{}.late", corner.topic);
    corner.queue_of(&late, &unrouted[7], &[]).await;
    outbox.until("the one with a route is released", |status| status.held == 198).await;
    let released = log(&corner, &late).await;
    assert_eq!(released.iter().map(|(_, number)| *number).collect::<Vec<_>>(), [0, 1]);
    relay.end().await;
    corner.clean(&[&queue, &late]).await;
}

/// Shown to fail: with bindings that only a start makes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r16_an_exchange_that_is_deleted_under_relay_and_consumer_comes_back_without_a_restart() {
    let Some(mut corner) = Corner::of("r16_an_exchange_that_is_deleted_under_relay").await else { return };
    corner.config.quiet_check = Duration::from_millis(200);
    let outbox = Outbox::new().await;
    let mut subscriber = corner.broker().subscriber(&corner.subscription()).await.unwrap();
    let relay = outbox.relay(corner.broker(), options());
    let mut log: Vec<(String, u64)> = Vec::new();
    for sent in [0..5, 5..10] {
        if sent.start > 0 {
            let exchange = corner.config.exchange.as_str().into();
            corner.channel.exchange_delete(exchange, ExchangeDeleteOptions::default()).await.unwrap();
        }
        outbox.enqueue(rows(&corner.topic, sent.clone())).await;
        // A session that ends may bring what it had sent once more.
        while !sent.clone().all(|number| log.iter().any(|(_, seen)| *seen == number)) {
            let deliveries = receive(&mut *subscriber, 1).await;
            let keys = deliveries.iter().map(|one| String::from_utf8(one.arrived.key.clone().unwrap()).unwrap());
            log.extend(keys.zip(numbers(&deliveries)));
        }
    }
    assert!(in_order(&log), "{log:?}");
    outbox.until("nothing is held or dead", |status| status.pending + status.held + status.dead == 0).await;
    relay.end().await;
    subscriber.close().await;
    corner.finish().await;
}

/// A queue that is full answers with a nack: its topic is held once a fresh session got the same,
/// and nobody else's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r16_a_queue_that_is_full_holds_its_topic_until_there_is_room() {
    let Some(corner) = Corner::of("r16_a_queue_that_is_full").await else { return };
    let outbox = Outbox::new().await;
    let (queue, full) = (corner.queue(), format!("{}.full", corner.topic));
    corner.queue_of(&queue, &corner.topic, &[]).await;
    let bounds =
        [("x-max-length", AMQPValue::LongInt(3)), ("x-overflow", AMQPValue::LongString("reject-publish".into()))];
    corner.queue_of(&full, &full, &bounds).await;
    let relay = outbox.relay(corner.broker(), options());
    outbox.enqueue(rows(&full, 0..9)).await;
    outbox.enqueue(rows(&corner.topic, 0..30)).await;
    let status = outbox.until("held, the others sent", |status| status.held > 0 && status.pending == 0).await;
    assert_eq!(status.dead, 0);
    let sent = log(&corner, &queue).await;
    assert!(in_order(&sent), "{sent:?}");
    assert_eq!(distinct(&sent), (0..30).collect());
    let mut seen = log(&corner, &full).await;
    let deadline = std::time::Instant::now() + SOON;
    while outbox.status().await.held > 0 {
        assert!(std::time::Instant::now() < deadline, "it stays held");
        seen.extend(log(&corner, &full).await);
    }
    seen.extend(log(&corner, &full).await);
    assert!(in_order(&seen), "{seen:?}");
    assert_eq!(distinct(&seen), (0..9).collect());
    relay.end().await;
    corner.clean(&[&queue, &full]).await;
}

/// Something between the relay and the server that cuts the connection at one message, without a
/// reply of the server. On the code before it counted as a server that is away, for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r16_a_message_at_which_each_connection_is_cut_is_found_out_and_holds_only_its_key() {
    let Some(corner) = Corner::of("r16_a_message_at_which_each_connection_is_cut").await else { return };
    let outbox = Outbox::new().await;
    let queue = corner.queue();
    corner.queue_of(&queue, &corner.topic, &[]).await;
    let proxy = Proxy::before_broker(&corner.config.url);
    proxy.fail_times_at(u32::MAX, "", "poison", When::BeforeRequest, Failure::Cut);
    outbox.enqueue(rows(&corner.topic, 0..20)).await;
    let bad = |payload: &str| (corner.topic.clone(), "bad".to_owned(), payload.to_owned());
    outbox.enqueue(vec![bad("poison"), bad("40")]).await;
    outbox.enqueue(rows(&corner.topic, 20..40)).await;
    let broker = RabbitBroker::new(RabbitConfig { url: proxy.url.clone(), ..corner.config.clone() }).unwrap();
    let relay = outbox.relay(broker, options());
    let found = |status: &Status| (status.dead, status.held, status.pending) == (1, 1, 0);
    outbox.until("it is dead, what follows it is held, the others are sent", found).await;
    let sent = log(&corner, &queue).await;
    assert!(in_order(&sent), "{sent:?}");
    assert_eq!(distinct(&sent), (0..40).collect());
    relay.end().await;
    corner.clean(&[&queue]).await;
}

/// On the code before reading paused until all of it was confirmed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g3_a_topic_that_gets_a_route_with_thousands_of_held_messages_delays_no_other() {
    let Some(corner) = Corner::of("g3_a_topic_that_gets_a_route").await else { return };
    let outbox = Outbox::new().await;
    let (queue, late) = (corner.queue(), format!("{}.late", corner.topic));
    corner.queue_of(&queue, &corner.topic, &[]).await;
    outbox.enqueue(rows(&late, 0..2_000)).await;
    let relay = outbox.relay(corner.broker(), options());
    outbox.until("held", |status| (status.held, status.pending) == (2_000, 0)).await;
    corner.queue_of(&late, &late, &[]).await;
    let beside = outbox.flowing(&corner.topic).await;
    assert!(beside >= 1, "none went beside them");
    let sent = log(&corner, &late).await;
    assert!(in_order(&sent) && sent.len() == 2_000, "{} of 2000", sent.len());
    assert_eq!(distinct(&sent), (0..2_000).collect());
    // Dead and redriven, they come once more.
    relay.end().await;
    outbox.enqueue(rows(&late, 2_000..4_000)).await;
    outbox.all_are_dead().await;
    outbox.redrive().await;
    let relay = outbox.relay(corner.broker(), options());
    let beside = outbox.flowing(&corner.topic).await;
    assert!(beside >= 1, "none went beside them");
    let sent = log(&corner, &late).await;
    assert!(in_order(&sent) && sent.len() == 2_000, "{} of 2000", sent.len());
    assert_eq!(distinct(&sent), (2_000..4_000).collect());
    relay.end().await;
    corner.clean(&[&queue, &late]).await;
}

/// A quorum queue whose process stands still neither confirms nor refuses, as one that has lost its
/// majority.
///
/// Shown by: judging silence by the last answer of any topic (the others would wait for this one
/// until the window is full, and for ever).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g3_a_queue_that_says_nothing_holds_its_topic_alone() {
    let Some(private) = Private::of("g3_a_queue_that_says_nothing") else { return };
    let _shared = private.peace.read().await;
    let corner = Corner::at(&private.url()).await;
    corner.broker().declare(&[]).await.unwrap();
    let outbox = Outbox::new().await;
    let (queue, silent) = (corner.queue(), format!("{}.silent", corner.topic));
    corner.queue_of(&queue, &corner.topic, &[]).await;
    corner.queue_of(&silent, &silent, &[("x-queue-type", AMQPValue::LongString("quorum".into()))]).await;
    let process = |act: &str| private.control(&["eval", &format!("ok = sys:{act}(whereis('%2F_{silent}')).")]);
    let relay = outbox.relay(corner.broker(), RelayOptions { publish_stall: Duration::from_secs(2), ..options() });
    outbox.enqueue(rows(&silent, 0..6)).await;
    outbox.until("sent while it answers", |status| status.pending == 0).await;
    assert!(process("suspend"));
    outbox.enqueue(rows(&silent, 6..12)).await;
    outbox.enqueue(rows(&corner.topic, 0..30)).await;
    let status = outbox.until("held, the others sent", |status| (status.held, status.pending) == (6, 0)).await;
    assert_eq!(status.dead, 0);
    // While its trials go on.
    for n in 30..50 {
        outbox.enqueue(rows(&corner.topic, n..n + 1)).await;
        outbox.until("it is sent", |status| status.pending == 0).await;
    }
    assert!(outbox.health.is_ready(), "{:?}", outbox.health.lines());
    outbox.enqueue(rows(&silent, 12..15)).await;
    outbox.until("behind them", |status| (status.held, status.pending, status.dead) == (9, 0, 0)).await;
    assert!(process("resume"));
    outbox.until("released by itself", |status| status.held + status.pending == 0).await;
    let (sent, released) = (log(&corner, &queue).await, log(&corner, &silent).await);
    for (log, count) in [(&sent, 50), (&released, 15)] {
        assert!(in_order(log), "{log:?}");
        assert_eq!(distinct(log), (0..count).collect(), "none is lost");
    }
    relay.end().await;
    corner.clean(&[&queue, &silent]).await;
}
