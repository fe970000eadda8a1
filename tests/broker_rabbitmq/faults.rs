//! Alarms, timeouts, refusals and deaths of the server, on a RabbitMQ of our own.

use std::time::{Duration, Instant};

use oncebox::broker::{Broker, Event, Publisher, Receipt, Refusal, Settled, Subscriber, TopicState};
use oncebox::error::BrokerError;
use oncebox::observe::Severity;

use crate::fixture::{Corner, SOON, message, numbered, numbers, publish, receive, send_all, send_until_taken};
use crate::private::Private;
use crate::support::eventually;

async fn corner(private: &Private) -> Corner {
    let corner = Corner::at(&private.url()).await;
    corner.broker().declare(&[]).await.unwrap();
    corner
}

/// A memory alarm. Its end is the end of the test at the latest, since others share the server.
struct Alarm<'a>(&'a Private);

impl<'a> Alarm<'a> {
    fn raise(private: &'a Private) -> Self {
        let alarm = Self(private);
        assert!(private.control(&["set_vm_memory_high_watermark", "0.00001"]));
        alarm
    }
}

impl Drop for Alarm<'_> {
    fn drop(&mut self) {
        let is_over = self.0.control(&["set_vm_memory_high_watermark", "absolute", "1GB"]);
        assert!(is_over || std::thread::panicking(), "the alarm stays");
    }
}

async fn settle_all(publisher: &mut dyn Publisher, settled: &mut Vec<Settled>, count: usize) {
    while settled.len() < count {
        tokio::time::timeout(SOON, publisher.settle(settled)).await.expect("outcomes").unwrap();
    }
}

#[tokio::test]
async fn c5_a_memory_alarm_means_blocked_fails_nothing_and_work_goes_on_after_it() {
    let Some(private) = Private::of("c5_a_memory_alarm_means_blocked") else { return };
    let _alone = private.peace.write().await;
    let mut corner = corner(&private).await;
    // Two of them are shorter than the alarm will last: no heartbeat may end the session. On a
    // machine that is busy with other tests the server sends none for four seconds.
    corner.config.heartbeat = Duration::from_secs(4);
    corner.config.route_retry = Duration::from_millis(1);
    let broker = corner.broker();
    broker.subscriber(&corner.subscription()).await.unwrap().close().await;
    let mut publisher = broker.publisher().await.unwrap();
    // As the relay does, it asks for the topic before it sends.
    assert_eq!(publisher.topic(&corner.topic).await.unwrap(), TopicState::Ready);
    assert!(send_all(&mut *publisher, numbered(&corner.topic, 2, 10)).await.iter().all(|one| one.outcome.is_ok()));
    let unrouted = format!("{}-unrouted", corner.topic);
    assert!(send_all(&mut *publisher, vec![(10, message(&unrouted, None, 10))]).await[0].outcome.is_err());
    assert_eq!(publisher.blocked(), None);
    let alarm = Alarm::raise(&private);
    publisher.send((10..400).map(|n| (n + 1, message(&corner.topic, Some("k"), n))).collect()).await.unwrap();
    let mut settled = Vec::new();
    let (start, mut blocked_since) = (Instant::now(), None);
    while blocked_since.is_none_or(|since: Instant| since.elapsed() < Duration::from_secs(12)) {
        assert!(start.elapsed() < 2 * SOON, "the alarm was never told");
        let waited = tokio::time::timeout(Duration::from_millis(100), publisher.settle(&mut settled)).await;
        waited.unwrap_or(Ok(())).expect("blocked is no failure");
        if let Some(why) = publisher.blocked() {
            assert!(why.contains("memory"), "{why}");
            blocked_since.get_or_insert_with(Instant::now);
        }
    }
    assert!(settled.len() < 390, "nothing was held back: nothing is shown");
    // The server answers no question on this connection, so none is asked.
    let asked = tokio::time::timeout(Duration::from_secs(5), publisher.topic(&unrouted)).await;
    assert_eq!(asked.expect("nothing waits for the server").unwrap(), TopicState::Ready);
    let mut other = broker.publisher().await.unwrap();
    assert_eq!(other.topic(&corner.topic).await.unwrap(), TopicState::Ready, "it has published nothing yet");
    other.send(vec![(0, message(&unrouted, None, 0))]).await.unwrap();
    eventually("it is blocked too", SOON, async || other.blocked()).await;
    tokio::time::timeout(Duration::from_secs(4), other.close()).await.expect("a close waits for no answer");
    // Consuming goes on meanwhile.
    let mut subscriber = broker.subscriber(&corner.subscription()).await.unwrap();
    let mut deliveries = receive(&mut *subscriber, 10).await;
    subscriber.acknowledge(&deliveries[9].source, deliveries[9].sequence).await.unwrap();
    // Some may have got in before the alarm. This server lets nobody hold them for long.
    deliveries.truncate(10);
    subscriber.close().await;
    drop(alarm);
    settle_all(&mut *publisher, &mut settled, 390).await;
    assert!(settled.iter().all(|one| one.outcome == Ok(Receipt::Confirm)), "{settled:?}");
    assert_eq!(publisher.blocked(), None);
    let mut subscriber = broker.subscriber(&corner.subscription()).await.unwrap();
    while deliveries.len() < 400 {
        let more = receive(&mut *subscriber, 1).await;
        let last = more.last().unwrap();
        subscriber.acknowledge(&last.source, last.sequence).await.unwrap();
        deliveries.extend(more);
    }
    assert_eq!(numbers(&deliveries), (0..400).collect::<Vec<_>>());
    publisher.close().await;
    subscriber.close().await;
}

/// The client cannot answer the close there, and tells of no end before the server cuts the
/// connection. Shown by: not looking at the connection of a server that is blocked.
#[tokio::test]
async fn a_session_that_is_blocked_ends_where_the_server_closes_its_connection() {
    let Some(private) = Private::of("a_session_that_is_blocked_ends_where_the_server_closes") else { return };
    let _alone = private.peace.write().await;
    let mut corner = corner(&private).await;
    // With a heartbeat so long the server waits 30 s for the answer before it cuts the connection.
    corner.config.heartbeat = Duration::from_secs(600);
    corner.config.close_deadline = Duration::from_millis(300);
    let broker = corner.broker();
    broker.subscriber(&corner.subscription()).await.unwrap().close().await;
    let mut publisher = broker.publisher().await.unwrap();
    assert_eq!(publisher.topic(&corner.topic).await.unwrap(), TopicState::Ready);
    let alarm = Alarm::raise(&private);
    // Of one key, so that all that was published is on its way and nothing waits in the client.
    publisher.send((0..400).map(|n| (n, message(&corner.topic, Some("k"), n))).collect()).await.unwrap();
    eventually("it is blocked", SOON, async || publisher.blocked()).await;
    assert!(private.control(&["close_all_connections", "a test"]));
    let (closed, mut settled) = (Instant::now(), Vec::new());
    let error = loop {
        assert!(closed.elapsed() < SOON, "it has no end");
        assert!(settled.len() < 400, "nothing was held back: nothing is shown");
        let waited = tokio::time::timeout(Duration::from_millis(100), publisher.settle(&mut settled)).await;
        if let Ok(Err(error)) = waited {
            break error;
        }
    };
    let took = closed.elapsed();
    publisher.close().await;
    drop(alarm);
    assert!(matches!(error, BrokerError::Unavailable(_)), "{error}");
    assert!(took < Duration::from_secs(20), "{took:?}");
}

#[tokio::test]
async fn d8_a_channel_closed_by_the_consumer_timeout_is_told_and_a_new_subscriber_works() {
    let Some(private) = Private::of("d8_a_channel_closed_by_the_consumer_timeout") else { return };
    let _shared = private.peace.read().await;
    let corner = corner(&private).await;
    let broker = corner.broker();
    let mut subscriber = broker.subscriber(&corner.subscription()).await.unwrap();
    publish(&broker, numbered(&corner.topic, 1, 5)).await;
    let held = receive(&mut *subscriber, 5).await;
    let error = tokio::time::timeout(3 * SOON, subscriber.next()).await.expect("the timeout").unwrap_err();
    let text = error.to_string();
    assert!(text.contains("timed out") || text.contains("timeout"), "{text}");
    // Too late to be told to the server, and no loss: the inbox knows these messages.
    subscriber.acknowledge(&held[4].source, held[4].sequence).await.unwrap();
    subscriber.close().await;
    let mut again = broker.subscriber(&corner.subscription()).await.unwrap();
    let deliveries = receive(&mut *again, 5).await;
    assert_eq!(numbers(&deliveries), [0, 1, 2, 3, 4]);
    assert!(deliveries.iter().all(|delivery| delivery.redelivered));
    again.acknowledge(&deliveries[4].source, deliveries[4].sequence).await.unwrap();
    again.close().await;
}

#[tokio::test]
async fn c4_a_message_too_large_is_the_messages_fault_only_when_it_was_alone() {
    let Some(private) = Private::of("c4_a_message_too_large") else { return };
    let _shared = private.peace.read().await;
    let corner = corner(&private).await;
    corner.queue_of(&corner.queue(), &corner.topic, &[]).await;
    let mut large = message(&corner.topic, Some("large"), 0);
    large.payload = vec![b'x'; 300_000];
    let broker = corner.broker();
    let mut publisher = broker.publisher().await.unwrap();
    let settled = send_all(&mut *publisher, vec![(0, large.clone())]).await;
    let Err(Refusal::Message(why)) = &settled[0].outcome else { panic!("{settled:?}") };
    assert!(why.contains("size"), "{why}");
    publisher.settle(&mut Vec::new()).await.expect_err("its channel is closed");
    publisher.close().await;
    // Among others nobody knows which one it was: the session ends, and the runtime sends them one
    // by one.
    let mut publisher = broker.publisher().await.unwrap();
    let mut rows = numbered(&corner.topic, 300, 300);
    rows.push((300, large));
    rows.extend((301..600).map(|tag| (tag, message(&corner.topic, None, tag))));
    publisher.send(rows).await.unwrap();
    let mut settled = Vec::new();
    let ended = async { while publisher.settle(&mut settled).await.is_ok() {} };
    tokio::time::timeout(SOON, ended).await.expect("the session ends");
    assert!(settled.len() < 600, "all were settled beside it");
    assert!(settled.iter().all(|one| one.outcome == Ok(Receipt::Confirm) && one.tag != 300), "{settled:?}");
    publisher.close().await;
}

#[tokio::test]
async fn r30_without_the_plugin_partitions_are_refused_with_the_command_that_enables_it() {
    let Some(private) = Private::of("r30_without_the_plugin") else { return };
    let _shared = private.peace.read().await;
    let mut corner = corner(&private).await;
    corner.config.partitions = 3;
    let broker = corner.broker();
    let error = broker.subscriber(&corner.subscription()).await.map(drop).unwrap_err();
    let command = "rabbitmq-plugins enable rabbitmq_consistent_hash_exchange";
    assert!(matches!(&error, BrokerError::Refused(why) if why.contains(command)), "{error}");
    let findings = broker.check(&[corner.subscription()]).await.unwrap();
    let found = findings.iter().find(|one| one.name.contains("consistent-hash")).unwrap();
    assert!(found.severity == Severity::Refused && found.remedy.as_deref() == Some(command), "{found:?}");
}

/// A corner as another user sees it, who may configure, write and read what these patterns say.
async fn as_user(private: &Private, owner: &Corner, name: &str, rights: [&str; 3]) -> Corner {
    assert!(private.control(&["add_user", name, "secret"]));
    assert!(private.control(&["set_permissions", name, rights[0], rights[1], rights[2]]));
    let mut corner = Corner::at(&private.url().replace("guest:guest", &format!("{name}:secret"))).await;
    corner.config.exchange.clone_from(&owner.config.exchange);
    corner.topic.clone_from(&owner.topic);
    corner
}

#[tokio::test]
async fn s5_least_rights_are_enough_and_a_right_that_is_missing_blocks_only_its_destination() {
    let Some(private) = Private::of("s5_least_rights_are_enough") else { return };
    let _shared = private.peace.read().await;
    let owner = corner(&private).await;
    owner.broker().subscriber(&owner.subscription()).await.unwrap().close().await;
    let (exchange, topic) = (owner.config.exchange.as_str(), owner.topic.as_str());

    // May write to the exchange, to one topic only, and configure nothing.
    let writer = as_user(&private, &owner, &format!("w{topic}"), ["^$", &format!("^{exchange}$"), "^$"]).await;
    let rights = ["set_topic_permissions", &format!("w{topic}"), exchange, &format!("^{topic}$"), ".*"];
    assert!(private.control(&rights));
    writer.broker().declare(&[]).await.expect("the exchange is there");
    let mut publisher = writer.broker().publisher().await.unwrap();
    assert_eq!(publisher.topic(topic).await.unwrap(), TopicState::Ready);
    assert!(send_all(&mut *publisher, numbered(topic, 1, 3)).await.iter().all(|one| one.outcome.is_ok()));
    let mut rows = numbered(topic, 20, 20);
    rows.push((20, message(&format!("{topic}-denied"), None, 20)));
    publisher.send(rows).await.unwrap();
    let mut settled = Vec::new();
    let ended = async { while publisher.settle(&mut settled).await.is_ok() {} };
    tokio::time::timeout(SOON, ended).await.expect("the session ends");
    let refused: Vec<_> = settled.iter().filter(|one| one.outcome.is_err()).collect();
    let why = format!("topic '{topic}-denied'");
    assert!(
        matches!(refused[..], [Settled { tag: 20, outcome: Err(Refusal::Destination(text)) }] if text.contains(&why)),
        "{settled:?}"
    );
    publisher.close().await;

    // May read the queue, and neither configure nor bind.
    let reader = as_user(&private, &owner, &format!("r{topic}"), ["^$", "^$", &format!("^{}$", owner.queue())]).await;
    let mut subscriber = reader.broker().subscriber(&reader.subscription()).await.unwrap();
    let deliveries = receive(&mut *subscriber, 3).await;
    assert_eq!(numbers(&deliveries)[..3], [0, 1, 2]);
    subscriber.close().await;
    let mut publisher = reader.broker().publisher().await.unwrap();
    let settled = send_all(&mut *publisher, vec![(0, message(topic, None, 0))]).await;
    assert!(
        matches!(&settled[0].outcome, Err(Refusal::Destination(why)) if why.contains("ACCESS_REFUSED")),
        "{settled:?}"
    );
    publisher.close().await;
}

/// Shown to fail: with a consumer that ends where it may not declare the exchange again.
#[tokio::test]
async fn s5_who_may_not_declare_an_exchange_that_was_deleted_says_so_and_goes_on_once_it_is_there() {
    let Some(private) = Private::of("s5_who_may_not_declare_an_exchange") else { return };
    let _shared = private.peace.read().await;
    let owner = corner(&private).await;
    owner.broker().subscriber(&owner.subscription()).await.unwrap().close().await;
    let both = format!("^({}|{})$", owner.config.exchange, owner.queue());
    let name = format!("b{}", owner.topic);
    let mut user = as_user(&private, &owner, &name, ["^$", &both, &both]).await;
    user.config.quiet_check = Duration::from_millis(50);
    let mut subscriber = user.broker().subscriber(&user.subscription()).await.unwrap();
    assert!(matches!(subscriber.next().await, Ok(Event::Assigned(_))));
    owner.clean(&[]).await;
    let mut publisher = user.broker().publisher().await.unwrap();
    let TopicState::NotReady(why) = publisher.topic(&owner.topic).await.unwrap() else { panic!("no exchange") };
    assert!(why.contains(&owner.config.exchange) && why.contains("ACCESS_REFUSED"), "{why}");
    // The server logs each refusal: one at the consumer's start, one to the publisher, then those
    // of the consumer that runs.
    let refused = || private.logged(&["exchange.declare", &format!("refused for user '{name}'")]);
    eventually("the consumer is refused", SOON, async || (refused() > 2).then_some(())).await;
    owner.broker().declare(&[]).await.unwrap();
    send_until_taken(&mut *publisher, &owner.topic).await;
    assert_eq!(numbers(&receive(&mut *subscriber, 1).await), [0]);
    publisher.close().await;
    subscriber.close().await;
}

/// Shown by: taking an unknown limit for a known one (from 4.0 the queue was refused as limited,
/// before 4.0 it was called a quorum queue whatever it is).
#[tokio::test]
async fn r30_a_user_who_may_not_declare_a_queue_is_told_that_its_arguments_are_not_known() {
    let Some(private) = Private::of("r30_a_user_who_may_not_declare_a_queue") else { return };
    let _shared = private.peace.read().await;
    let owner = corner(&private).await;
    owner.queue_of(&owner.queue(), &owner.topic, &[]).await;
    let name = format!("d{}", owner.topic);
    let reader = as_user(&private, &owner, &name, ["^$", "^$", ".*"]).await;
    let looked = async || {
        let findings = reader.broker().check(&[reader.subscription()]).await.unwrap();
        findings.into_iter().find(|one| one.name.ends_with(&owner.queue())).unwrap()
    };
    let found = looked().await;
    assert!(found.severity == Severity::Warning && found.detail.contains("not known"), "{found:?}");
    assert!(found.remedy.is_some(), "{found:?}");
    publish(&owner.broker(), numbered(&owner.topic, 1, 1)).await;
    assert_eq!(looked().await.severity, Severity::Stuck, "nobody reads it, whatever it is");
    assert!(private.control(&["set_permissions", &name, ".*", ".*", ".*"]));
    let found = looked().await;
    assert!(found.severity == Severity::Refused && found.detail.contains("is there with another"), "{found:?}");
}

#[tokio::test]
async fn a_killed_server_ends_both_sides_and_what_was_confirmed_is_there_after_its_restart() {
    let Some(private) = Private::of("a_killed_server_ends_both_sides") else { return };
    let _alone = private.peace.write().await;
    let corner = corner(&private).await;
    let broker = corner.broker();
    broker.subscriber(&corner.subscription()).await.unwrap().close().await;
    // A clean stop first: RabbitMQ 3.10 forgets which member of a quorum queue it is when it is
    // killed in the first seconds of the queue's life, and that queue never finds a leader again.
    assert!(private.control(&["stop_app"]) && private.control(&["start_app"]));
    let mut subscriber: Box<dyn Subscriber> = broker.subscriber(&corner.subscription()).await.unwrap();
    let mut publisher = broker.publisher().await.unwrap();
    let mut proven: Vec<u64> = Vec::new();
    publisher.send(numbered(&corner.topic, 1, 10_000)).await.unwrap();
    let mut settled = Vec::new();
    publisher.settle(&mut settled).await.unwrap();
    private.kill();
    let error = loop {
        match tokio::time::timeout(SOON, publisher.settle(&mut settled)).await.expect("an end") {
            Ok(()) => assert!(settled.len() < 10_000, "all were proven before the kill: nothing is shown"),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, BrokerError::Unavailable(_)), "{error}");
    proven.extend(settled.iter().filter(|one| one.outcome.is_ok()).map(|one| one.tag));
    let error = loop {
        match tokio::time::timeout(SOON, subscriber.next()).await.expect("an end") {
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert!(matches!(error, BrokerError::Unavailable(_)), "{error}");
    publisher.close().await;
    subscriber.close().await;
    let error = broker.publisher().await.map(drop).unwrap_err();
    assert!(matches!(error, BrokerError::Unavailable(_)), "{error}");
    private.start();
    // The queue is there before its leader is: consuming may be unanswered for a while.
    let subscribed = async || broker.subscriber(&corner.subscription()).await.ok();
    let mut again = eventually("a subscriber", 3 * SOON, subscribed).await;
    let seen = numbers(&receive(&mut *again, proven.len()).await);
    assert!(
        proven.iter().all(|tag| seen.contains(tag)),
        "a confirmed message is gone: {} of {}",
        seen.len(),
        proven.len()
    );
    assert!(seen.is_sorted(), "of one key, what was taken is a prefix in order");
    again.close().await;
}
