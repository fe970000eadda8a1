//! A topic that gets more partitions while a publisher knows it.

use oncebox::broker::{Broker, Publisher, Receipt};

use crate::kit::*;
use crate::observed::{Heard, hear};

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
