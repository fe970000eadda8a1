//! A topic that gets more partitions while a publisher knows it.

use oncebox::broker::kafka::KafkaBroker;
use oncebox::broker::{Broker, Publisher, Receipt, TopicState};
use rdkafka::admin::{AdminOptions, NewTopic, TopicReplication};

use crate::kit::*;
use crate::observed::{Heard, hear};
use crate::support::eventually;

/// The warnings about growth: topic, and the numbers of partitions before and now.
fn told(heard: &Heard) -> Vec<[String; 3]> {
    let growth = heard.said().into_iter().filter(|said| said.is_event && said.fields.contains_key("before"));
    growth.map(|said| ["topic", "before", "now"].map(|name| said.fields[name].clone())).collect()
}

async fn send(publisher: &mut Box<dyn Publisher>, topic: &str) -> Vec<i32> {
    let rows = (0..20).map(|n| message(topic, Some(&format!("k{n}")), "x")).collect();
    let partition = |outcome| match outcome {
        Ok(Receipt::Offset { partition, .. }) => partition,
        other => panic!("{other:?}"),
    };
    publish(publisher, rows).await.into_iter().map(|row| partition(row.outcome)).collect()
}

/// On the code before nobody heard of it: later messages of a key went to another partition, and
/// nothing said why they were handled first.
#[tokio::test]
async fn a_topic_that_gets_partitions_is_told_once_between_sessions_and_within_one() {
    let Some(mut kafka) = Kafka::with_topic("a_topic_that_gets_partitions_is_told_once", 1).await else { return };
    // So that the client of a session hears of new partitions within the test.
    kafka.config.properties.insert("topic.metadata.refresh.interval.ms".to_owned(), "200".to_owned());
    let (heard, _hearing) = hear();
    let (broker, topic) = (kafka.broker(), kafka.topic.clone());
    let told_of = |list: &[(u32, u32)]| -> Vec<[String; 3]> {
        list.iter().map(|(before, now)| [topic.clone(), before.to_string(), now.to_string()]).collect()
    };
    let mut publisher = broker.publisher().await.unwrap();
    send(&mut publisher, &topic).await;
    publisher.close().await;
    kafka.grow(&topic, 3).await;
    assert_eq!(told(&heard), told_of(&[]));

    let mut publisher = broker.publisher().await.unwrap();
    send(&mut publisher, &topic).await;
    assert_eq!(told(&heard), told_of(&[(1, 3)]));
    kafka.grow(&topic, 9).await;
    let start = std::time::Instant::now();
    while send(&mut publisher, &topic).await.into_iter().all(|partition| partition < 3) {
        assert!(start.elapsed() < SOON, "the client never hears of the new partitions");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    for _ in 0..2 {
        send(&mut publisher, &topic).await;
        assert_eq!(told(&heard), told_of(&[(1, 3), (3, 9)]));
        publisher.close().await;
        publisher = broker.publisher().await.unwrap();
    }
    publisher.close().await;
    assert_eq!(heard.metric("oncebox_order_incidents_total", &[("broker", "kafka")]) as u64, 2);
}

/// A session that sends one row, whatever becomes of it.
async fn send_one(broker: &KafkaBroker, topic: &str) {
    let Ok(mut publisher) = broker.publisher().await else { return };
    let is_ready = matches!(publisher.topic(topic).await, Ok(TopicState::Ready));
    if is_ready && publisher.send(vec![(0, message(topic, Some("k"), "x"))]).await.is_ok() {
        let _ = tokio::time::timeout(SOON, publisher.settle(&mut Vec::new())).await;
    }
    publisher.close().await;
}

/// What was sent before is gone, and nothing else says so. The new topic has fewer partitions than
/// the old one had, and gets more.
#[tokio::test]
async fn r19_a_topic_that_is_made_anew_is_an_order_incident_and_its_growth_is_told() {
    let name = "r19_a_topic_that_is_made_anew_is_an_order_incident_and_its_growth_is_told";
    let Some(kafka) = Kafka::with_topic(name, 3).await else { return };
    let (heard, _hearing) = hear();
    let (broker, topic, admin) = (kafka.broker(), kafka.topic.clone(), kafka.admin());
    let incidents = || heard.metric("oncebox_order_incidents_total", &[("broker", "kafka")]) as u64;
    let mut publisher = ready(&broker, &topic).await;
    send(&mut publisher, &topic).await;
    publisher.close().await;
    admin.delete_topics(&[&topic], &AdminOptions::new()).await.unwrap();
    eventually("the topic is made anew", SOON, || async {
        let anew = NewTopic::new(&topic, 1, TopicReplication::Fixed(1));
        let made = admin.create_topics([&anew], &AdminOptions::new()).await.unwrap();
        made.iter().all(Result::is_ok).then_some(())
    })
    .await;
    eventually("it is told", SOON, || async {
        send_one(&broker, &topic).await;
        (incidents() == 1).then_some(())
    })
    .await;
    assert_eq!(told(&heard), [[""; 3]; 0], "it has not grown");
    kafka.grow(&topic, 2).await;
    eventually("its growth is told", SOON, || async {
        send_one(&broker, &topic).await;
        (!told(&heard).is_empty()).then_some(())
    })
    .await;
    assert_eq!(told(&heard), [[topic.as_str(), "1", "2"]]);
    assert_eq!(incidents(), 2);
}
