//! Consuming: groups, acknowledgements, bounds, the end that was seen.

use std::time::{Duration, Instant};

use crate::kit::*;
use oncebox::broker::{Broker, Subscriber};
use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{BaseProducer, BaseRecord, Producer};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

#[tokio::test]
async fn acknowledgements_are_committed_while_the_subscriber_runs() {
    let Some(kafka) = Kafka::with_topic("acknowledgements_are_committed_while_the_subscriber_runs", 1).await else {
        return;
    };
    publish_all(&kafka.broker(), (0..3).map(|n| message(&kafka.topic, None, n.to_string())).collect()).await;
    let group = unique("group");
    let mut subscriber = kafka.broker().subscriber(&kafka.subscription(&group)).await.unwrap();
    let deliveries = receive(&mut subscriber, 3).await;
    assert_eq!(committed(&kafka, &group), None, "nothing is committed that was not acknowledged");
    acknowledge(&mut subscriber, &deliveries[..2]).await;
    eventually("the commit", SOON, || async { (committed(&kafka, &group) == Some(2)).then_some(()) }).await;
    acknowledge(&mut subscriber, &deliveries).await;
    eventually("the commit", SOON, || async { (committed(&kafka, &group) == Some(3)).then_some(()) }).await;
    subscriber.close().await;
}

/// What the group has committed for partition 0, asked by rdkafka's own consumer.
fn committed(kafka: &Kafka, group: &str) -> Option<i64> {
    let mut settings = ClientConfig::new();
    settings.set("bootstrap.servers", kafka.servers()).set("group.id", group);
    let consumer: BaseConsumer = settings.create().unwrap();
    let mut list = TopicPartitionList::new();
    list.add_partition(&kafka.topic, 0);
    let found = consumer.committed_offsets(list, SOON).unwrap();
    match found.find_partition(&kafka.topic, 0)?.offset() {
        Offset::Offset(offset) => Some(offset),
        _ => None,
    }
}

// Shown: with `poll` left out while partitions are paused, the member is thrown out after 6 s and
// everything comes again.
#[tokio::test]
async fn a_slow_handler_does_not_cost_the_membership() {
    let Some(mut kafka) = Kafka::with_topic("a_slow_handler_does_not_cost_the_membership", 1).await else { return };
    kafka.config.properties.insert("max.poll.interval.ms".into(), "6000".into());
    publish_all(&kafka.broker(), (0..30).map(|n| message(&kafka.topic, Some("k"), n.to_string())).collect()).await;
    let mut subscription = kafka.subscription(&unique("group"));
    subscription.in_flight_max = 5;
    let mut subscriber = kafka.broker().subscriber(&subscription).await.unwrap();
    let slow = receive(&mut subscriber, 5).await;
    // Longer than the session and than the longest time between polls.
    let event = tokio::time::timeout(Duration::from_secs(9), subscriber.next()).await;
    assert!(event.is_err(), "{event:?}");
    acknowledge(&mut subscriber, &slow).await;
    let next = receive(&mut subscriber, 5).await;
    assert_eq!(texts(&next)[0], "5");
    subscriber.close().await;
}

#[tokio::test]
async fn caught_up_means_that_everything_was_delivered_that_stood_there() {
    let Some(kafka) = Kafka::with_topic("caught_up_means_that_everything_was_delivered_that_stood_there", 2).await
    else {
        return;
    };
    publish_all(&kafka.broker(), (0..50).map(|n| message(&kafka.topic, Some(&n.to_string()), "x")).collect()).await;
    let mut subscription = kafka.subscription(&unique("group"));
    subscription.in_flight_max = 20;
    let mut first = kafka.broker().subscriber(&subscription).await.unwrap();
    assert!(!first.caught_up().await.unwrap(), "not assigned yet");
    let mut count = 0;
    while count < 50 {
        assert!(!first.caught_up().await.unwrap(), "{count} of 50");
        let deliveries = receive(&mut first, 1).await;
        count += deliveries.len();
        acknowledge(&mut first, &deliveries).await;
    }
    assert!(caught_up_soon(&mut first).await);
    first.close().await;
    // A second time nothing is left to deliver.
    let mut second = kafka.broker().subscriber(&subscription).await.unwrap();
    assert!(caught_up_soon(&mut second).await);
    second.close().await;
}

async fn caught_up_soon(subscriber: &mut Box<dyn Subscriber>) -> bool {
    let start = Instant::now();
    while start.elapsed() < SOON {
        if subscriber.caught_up().await.unwrap() {
            return true;
        }
        drop(tokio::time::timeout(Duration::from_millis(20), subscriber.next()).await);
    }
    false
}

#[tokio::test]
async fn a_member_without_partitions_has_caught_up_once_it_is_in_the_group() {
    let Some(mut kafka) =
        Kafka::with_topic("a_member_without_partitions_has_caught_up_once_it_is_in_the_group", 1).await
    else {
        return;
    };
    // So the broker removes no member by itself.
    kafka.config.session_timeout = 4 * SOON;
    let group = unique("group");
    let subscription = kafka.subscription(&group);
    let mut first = kafka.broker().subscriber(&subscription).await.unwrap();
    assigned(&mut first).await;
    let mut second = kafka.broker().subscriber(&subscription).await.unwrap();
    let both = async { tokio::join!(caught_up_soon(&mut first), caught_up_soon(&mut second)) };
    assert_eq!(both.await, (true, true));
    // Shown by: closing a member without partitions as librdkafka does, which does not leave
    // the group.
    second.close().await;
    eventually("it has left the group", SOON, || async {
        let groups = kafka.admin().inner().fetch_group_list(Some(&group), Duration::from_secs(5)).ok()?;
        groups.groups().first().is_some_and(|found| found.members().len() == 1).then_some(())
    })
    .await;
    first.close().await;
}

// The end of such a partition holds no message: markers of transactions, and messages that were
// aborted.
#[tokio::test]
async fn transactions_of_others_neither_show_what_was_aborted_nor_hide_the_end() {
    let Some(kafka) =
        Kafka::with_topic("transactions_of_others_neither_show_what_was_aborted_nor_hide_the_end", 1).await
    else {
        return;
    };
    let (servers, topic) = (kafka.servers(), kafka.topic.clone());
    let produce = move || {
        let mut settings = ClientConfig::new();
        settings.set("bootstrap.servers", servers).set("transactional.id", unique("tx"));
        let producer: BaseProducer = settings.create().unwrap();
        producer.init_transactions(SOON).unwrap();
        for (payload, commit) in [("committed", true), ("aborted", false)] {
            producer.begin_transaction().unwrap();
            producer.send(BaseRecord::<(), str>::to(&topic).payload(payload)).map_err(|(error, _)| error).unwrap();
            if commit {
                producer.commit_transaction(SOON).unwrap();
            } else {
                producer.flush(SOON).unwrap();
                producer.abort_transaction(SOON).unwrap();
            }
        }
    };
    tokio::task::spawn_blocking(produce).await.unwrap();
    let mut subscriber = kafka.broker().subscriber(&kafka.subscription(&unique("group"))).await.unwrap();
    let deliveries = receive(&mut subscriber, 1).await;
    assert_eq!(texts(&deliveries), ["committed"]);
    assert!(caught_up_soon(&mut subscriber).await);
    subscriber.close().await;
    assert_eq!(kafka.broker().read_all(&kafka.topic).await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_topic_that_is_made_later_is_found() {
    let Some(kafka) = Kafka::without_topic("a_topic_that_is_made_later_is_found") else { return };
    let mut subscriber = kafka.broker().subscriber(&kafka.subscription(&unique("group"))).await.unwrap();
    let early = tokio::time::timeout(Duration::from_secs(1), subscriber.next()).await;
    assert!(!matches!(early, Ok(Err(_))), "waiting is no error: {early:?}");
    kafka.create(&kafka.topic, 1, &[]).await;
    publish_all(&kafka.broker(), vec![message(&kafka.topic, None, "x")]).await;
    assert_eq!(texts(&receive(&mut subscriber, 1).await), ["x"]);
    subscriber.close().await;
}

#[tokio::test]
async fn a_subscriber_creates_its_topics_where_that_was_asked_for() {
    let Some(mut kafka) = Kafka::without_topic("a_subscriber_creates_its_topics_where_that_was_asked_for") else {
        return;
    };
    kafka.config.create_topics = true;
    let mut subscriber = kafka.broker().subscriber(&kafka.subscription(&unique("group"))).await.unwrap();
    assert_eq!(assigned(&mut subscriber).await.len(), 3);
    subscriber.close().await;
}

#[tokio::test]
async fn messages_of_others_arrive_as_they_are() {
    let Some(kafka) = Kafka::with_topic("messages_of_others_arrive_as_they_are", 1).await else { return };
    let producer: BaseProducer = ClientConfig::new().set("bootstrap.servers", kafka.servers()).create().unwrap();
    let headers = OwnedHeaders::new()
        .insert(Header { key: "ce_id", value: Some("e-1") })
        .insert(Header::<&str> { key: "no-value", value: None })
        .insert(Header { key: "CE_Type", value: Some("made") })
        .insert(Header { key: "bytes", value: Some(&[0_u8, 255][..]) });
    let key = [0_u8, 159, 146, 150];
    let record = BaseRecord::<[u8], str>::to(&kafka.topic).key(&key).payload("x").headers(headers).timestamp(1_000);
    producer.send(record).map_err(|(error, _)| error).unwrap();
    let tombstone = BaseRecord::<str, ()> { payload: None, ..BaseRecord::to(&kafka.topic) }.key("k");
    producer.send(tombstone).map_err(|(error, _)| error).unwrap();
    producer.flush(SOON).unwrap();
    let mut subscriber = kafka.broker().subscriber(&kafka.subscription(&unique("group"))).await.unwrap();
    let deliveries = receive(&mut subscriber, 2).await;
    let first = &deliveries[0].arrived;
    assert_eq!(first.id.as_deref(), Some("e-1"));
    assert_eq!(first.kind.as_deref(), Some("made"));
    assert_eq!(first.key.as_deref(), Some(key.as_slice()));
    assert_eq!(first.time.unwrap().timestamp_millis(), 1_000, "the record's own time");
    let names: Vec<_> = first.headers.iter().map(|(name, value)| (name.as_str(), value.as_slice())).collect();
    let expected: [(&str, &[u8]); 4] =
        [("ce_id", b"e-1"), ("no-value", b""), ("CE_Type", b"made"), ("bytes", &[0, 255])];
    assert_eq!(names, expected);
    assert_eq!(first.coordinates.to_string(), format!("{}/0@0", kafka.topic));
    let second = &deliveries[1].arrived;
    assert!(second.payload.is_none() && second.id.is_none() && second.time.is_some());
    subscriber.close().await;
}
