//! Publishing: what is proven, what is refused, in which order it stands in the topic.

use crate::kit::*;
use oncebox::broker::Broker;

#[tokio::test]
async fn what_is_published_stands_in_the_topic_as_cloudevents() {
    let Some(kafka) = Kafka::with_topic("what_is_published_stands_in_the_topic_as_cloudevents", 1).await else {
        return;
    };
    let sent = message(&kafka.topic, Some("acc-7"), "hello");
    let receipts = publish_all(&kafka.broker(), vec![sent.clone()]).await;
    assert_eq!(receipts, [oncebox::broker::Receipt::Offset { partition: 0, offset: 0 }]);
    let found = kafka.broker().read_all(&kafka.topic).await.unwrap();
    assert_eq!(found.len(), 1);
    let found = &found[0];
    assert_eq!(found.id, Some(sent.id.to_string()));
    assert_eq!(found.kind.as_deref(), Some("test.made"));
    assert_eq!(found.source.as_deref(), Some("oncebox"));
    assert_eq!(found.time, Some(sent.created_at));
    assert_eq!(found.content_type.as_deref(), Some("text/plain"));
    assert_eq!(found.key.as_deref(), Some(b"acc-7".as_slice()));
    assert_eq!(found.payload.as_deref(), Some(b"hello".as_slice()));
    assert!(found.headers.contains(&("tenant".to_owned(), b"t1".to_vec())));
    assert!(found.headers.contains(&("ce_partitionkey".to_owned(), b"acc-7".to_vec())));
}
