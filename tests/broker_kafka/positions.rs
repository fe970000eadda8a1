//! Where a partition begins: topics made anew, records that the broker deleted, a broker that is
//! away.

use std::time::Duration;

use oncebox::adapter::{Break, Position};
use oncebox::broker::kafka::KafkaBroker;
use oncebox::broker::{Begun, Broker, Event, Subscriber, Subscription};
use rdkafka::admin::{AdminOptions, NewTopic, TopicReplication};
use rdkafka::mocking::MockCluster;
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::kit::*;

/// The first assignment, begun with what is remembered.
async fn begin(subscriber: &mut Box<dyn Subscriber>, remembered: Option<Position>) -> Vec<Begun> {
    let sources = assigned(subscriber).await;
    let remembered = sources.into_iter().map(|source| (source, remembered.clone())).collect();
    subscriber.begin(remembered).await.unwrap()
}

/// Runs a member until it is aborted; tells what it is assigned, loses and receives.
async fn consume(broker: KafkaBroker, subscription: Subscription, tell: mpsc::UnboundedSender<String>) {
    let mut subscriber = broker.subscriber(&subscription).await.unwrap();
    loop {
        let told = match subscriber.next().await {
            Ok(Event::Assigned(sources)) => {
                let number = sources.len();
                subscriber.begin(sources.into_iter().map(|source| (source, None)).collect()).await.unwrap();
                vec!["assigned".to_owned(); number]
            }
            Ok(Event::Revoked { sources, .. }) => vec!["revoked".to_owned(); sources.len()],
            Ok(Event::Deliveries(deliveries)) => texts(&deliveries),
            Err(_) => {
                subscriber = broker.subscriber(&subscription).await.unwrap();
                continue;
            }
        };
        told.into_iter().for_each(|told| drop(tell.send(told)));
    }
}

// Shown to fail: where a member that has nothing of the topic any more was dropped, and closed
// without `unsubscribe`. It did not leave the group, and the others waited for its session to end.
#[tokio::test]
async fn a_topic_made_anew_under_two_members_does_not_wait_for_a_session_to_end() {
    let name = "a_topic_made_anew_under_two_members_does_not_wait_for_a_session_to_end";
    let Some(mut kafka) = Kafka::with_topic(name, 2).await else { return };
    kafka.config.session_timeout = 4 * SOON;
    let (subscription, mut members) = (kafka.subscription(&unique("group")), JoinSet::new());
    let (tell, mut told) = mpsc::unbounded_channel();
    for _ in 0..2 {
        members.spawn(consume(kafka.broker(), subscription.clone(), tell.clone()));
    }
    let mut hear = async |word: &str, times: usize| {
        let mut left = times;
        while left > 0 {
            let heard = tokio::time::timeout(SOON, told.recv()).await;
            left -= usize::from(heard.unwrap_or_else(|_| panic!("{left} of {times} {word}")).unwrap() == word);
        }
    };
    hear("assigned", 2).await;
    for round in 0..3 {
        let admin = kafka.admin();
        admin.delete_topics(&[&kafka.topic], &AdminOptions::new()).await.unwrap();
        hear("revoked", 2).await;
        kafka.create(&kafka.topic, 2, &[]).await;
        hear("assigned", 2).await;
        let rows = (0..20).map(|n| message(&kafka.topic, Some(&format!("k{n}")), format!("round {round}")));
        publish_all(&kafka.broker(), rows.collect()).await;
        hear(&format!("round {round}"), 20).await;
    }
}

// Shown by not comparing topic ids: it went on at offset 200, and the first 200 records of the new
// topic were never delivered.
#[tokio::test]
async fn a_topic_made_anew_under_a_subscriber_is_delivered_from_its_beginning_in_order() {
    let name = "a_topic_made_anew_under_a_subscriber_is_delivered_from_its_beginning_in_order";
    let Some(kafka) = Kafka::with_topic(name, 1).await else { return };
    let rows = |word: &str, count: usize| -> Vec<_> {
        (0..count).map(|n| message(&kafka.topic, Some("k"), format!("{word} {n}"))).collect()
    };
    publish_all(&kafka.broker(), rows("old", 200)).await;
    let subscription = kafka.subscription(&unique("group"));
    let mut subscriber = kafka.broker().subscriber(&subscription).await.unwrap();
    let begun = begin(&mut subscriber, None).await;
    let old = Position { topic_id: begun[0].topic_id.clone(), next: 200 };
    assert!(old.topic_id.is_some() && begun[0].start.because.is_none(), "{begun:?}");
    let deliveries = receive(&mut subscriber, 200).await;
    acknowledge(&mut subscriber, &deliveries).await;

    let admin = kafka.admin();
    admin.delete_topics(&[&kafka.topic], &AdminOptions::new()).await.unwrap();
    eventually("the topic is made anew", SOON, || async {
        let anew = NewTopic::new(&kafka.topic, 1, TopicReplication::Fixed(1));
        let made = admin.create_topics([&anew], &AdminOptions::new()).await.unwrap();
        made.iter().all(Result::is_ok).then_some(())
    })
    .await;
    // More than before, so that the old offset is one of the new topic as well.
    let published = async {
        let all = rows("new", 250);
        for part in all.chunks(50) {
            publish_all(&kafka.broker(), part.to_vec()).await;
        }
    };
    let consumed = async {
        let (mut seen, mut anew) = (Vec::new(), false);
        while seen.len() < 250 {
            match tokio::time::timeout(SOON, subscriber.next()).await.expect("an event") {
                Ok(Event::Deliveries(deliveries)) => seen.extend(texts(&deliveries)),
                Ok(Event::Assigned(sources)) => {
                    let remembered = sources.into_iter().map(|source| (source, Some(old.clone()))).collect();
                    let begun = subscriber.begin(remembered).await.unwrap();
                    anew |= begun.iter().any(|begun| matches!(begun.start.because, Some(Break::MadeAnew { first: 0 })));
                }
                Ok(Event::Revoked { done, .. }) => drop(done),
                Err(_) => subscriber = kafka.broker().subscriber(&subscription).await.unwrap(),
            }
        }
        subscriber.close().await;
        (seen, anew)
    };
    let ((), (seen, anew)) = tokio::join!(published, consumed);
    assert!(anew, "it is said");
    assert_eq!(seen, (0..250).map(|n| format!("new {n}")).collect::<Vec<_>>());
}

#[tokio::test]
async fn records_that_the_broker_deleted_before_they_were_consumed_are_told() {
    let Some(kafka) = Kafka::with_topic("records_that_the_broker_deleted_before_they_were_consumed_are_told", 1).await
    else {
        return;
    };
    publish_all(&kafka.broker(), (0..50).map(|n| message(&kafka.topic, Some("k"), n.to_string())).collect()).await;
    let subscription = kafka.subscription(&unique("group"));
    let mut first = kafka.broker().subscriber(&subscription).await.unwrap();
    let deliveries = receive(&mut first, 50).await;
    acknowledge(&mut first, &deliveries[..20]).await;
    first.close().await;
    let mut until = TopicPartitionList::new();
    until.add_partition_offset(&kafka.topic, 0, Offset::Offset(40)).unwrap();
    kafka.admin().delete_records(&until, &AdminOptions::new()).await.unwrap();

    let mut second = kafka.broker().subscriber(&subscription).await.unwrap();
    let begun = begin(&mut second, None).await;
    assert_eq!(begun[0].start.because, Some(Break::Lost { stood: 20, first: 40 }));
    assert_eq!(texts(&receive(&mut second, 10).await)[0], "40");
    second.close().await;
}

#[tokio::test]
async fn a_subscriber_whose_broker_is_away_says_so_until_it_is_back() {
    let cluster = MockCluster::new(1).unwrap();
    cluster.create_topic("t", 1, 1).unwrap();
    let url = format!("kafka://{}", cluster.bootstrap_servers());
    let broker =
        oncebox::broker::kafka::KafkaBroker::new(oncebox::broker::kafka::KafkaConfig::from_url(&url).unwrap()).unwrap();
    let subscription = oncebox::broker::Subscription::new("g", vec!["t".into()]);
    let mut subscriber = broker.subscriber(&subscription).await.unwrap();
    begin(&mut subscriber, None).await;
    assert_eq!(subscriber.away(), None);
    cluster.broker_down(1).unwrap();
    eventually("it is away", SOON, || async { subscriber.away() }).await;
    cluster.broker_up(1).unwrap();
    eventually("it is back", SOON, || async { subscriber.away().is_none().then_some(()) }).await;
    subscriber.close().await;
}

/// Shown by: asking for the offsets of all partitions alone (nothing was read, however often the
/// member joined).
#[tokio::test]
async fn g6_a_partition_without_a_leader_stops_no_other_one() {
    let cluster = MockCluster::new(1).unwrap();
    cluster.create_topic("t", 2, 1).unwrap();
    let url = format!("kafka://{}", cluster.bootstrap_servers());
    let broker =
        oncebox::broker::kafka::KafkaBroker::new(oncebox::broker::kafka::KafkaConfig::from_url(&url).unwrap()).unwrap();
    let subscription = oncebox::broker::Subscription::new("g", vec!["t".into()]);
    let rows = || (0..20).map(|n| message("t", Some(format!("k{n}").as_str()), n.to_string())).collect::<Vec<_>>();
    publish_all(&broker, rows()).await;
    let mut before = broker.subscriber(&subscription).await.unwrap();
    let deliveries = receive(&mut before, 20).await;
    acknowledge(&mut before, &deliveries).await;
    before.close().await;
    let of_the_first = deliveries.iter().filter(|delivery| delivery.source.partition == 0).count();
    assert!((1..20).contains(&of_the_first), "{of_the_first} of 20");
    publish_all(&broker, rows()).await;
    cluster.partition_leader("t", 1, None).unwrap();
    let mut member = broker.subscriber(&subscription).await.unwrap();
    let read = receive(&mut member, of_the_first).await;
    assert!(read.iter().all(|delivery| delivery.source.partition == 0), "{read:?}");
    assert!(member.away().is_some_and(|why| why.contains("t/1")), "{:?}", member.away());
    cluster.partition_leader("t", 1, Some(1)).unwrap();
    assert_eq!(receive(&mut member, 20 - of_the_first).await.len(), 20 - of_the_first);
    assert_eq!(member.away(), None);
    // Shown by: an end that nothing reaches, so that `--until-idle` never ended.
    let caught_up = async {
        while !member.caught_up().await.unwrap() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(SOON, caught_up).await.unwrap();
    member.close().await;

    // Of a group that has acknowledged nothing it begins at the first record. Shown by: an error
    // for want of its offsets.
    cluster.partition_leader("t", 1, None).unwrap();
    let new_group = oncebox::broker::Subscription::new("new", vec!["t".into()]);
    let mut member = broker.subscriber(&new_group).await.unwrap();
    let read = receive(&mut member, 2 * of_the_first).await;
    assert!(read.iter().all(|delivery| delivery.source.partition == 0), "{read:?}");
    cluster.partition_leader("t", 1, Some(1)).unwrap();
    let read = receive(&mut member, 2 * (20 - of_the_first)).await;
    assert!(read.iter().all(|delivery| delivery.source.partition == 1), "{read:?}");
    member.close().await;
}
