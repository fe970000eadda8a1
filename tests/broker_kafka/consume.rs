//! Consuming: groups, rebalances, acknowledgements.

use crate::kit::*;
use oncebox::broker::Broker;

#[tokio::test]
async fn what_is_acknowledged_does_not_come_again_and_the_rest_does() {
    let Some(kafka) = Kafka::with_topic("what_is_acknowledged_does_not_come_again_and_the_rest_does", 1).await else {
        return;
    };
    let rows = (0..10).map(|n| message(&kafka.topic, Some("k"), n.to_string())).collect();
    publish_all(&kafka.broker(), rows).await;
    let subscription = kafka.subscription(&unique("group"));
    let mut first = kafka.broker().subscriber(&subscription).await.unwrap();
    assert_eq!(assigned(&mut first).await.len(), 1);
    let deliveries = receive(&mut first, 10).await;
    acknowledge(&mut first, &deliveries[..6]).await;
    first.close().await;
    let mut second = kafka.broker().subscriber(&subscription).await.unwrap();
    let rest = receive(&mut second, 4).await;
    assert_eq!(texts(&rest), ["6", "7", "8", "9"]);
    second.close().await;
}
