//! What the tests of this adapter share: a broker on the real Kafka, messages, and readers with a
//! deadline.

use std::collections::BTreeSet;
use std::time::Duration;

use chrono::{DateTime, Utc};
use oncebox::broker::kafka::{KafkaBroker, KafkaConfig};
use oncebox::broker::{
    Broker, Delivery, Event, PartitionId, Publisher, Receipt, Settled, Subscriber, Subscription, TopicState,
};
use oncebox::message::OutgoingMessage;
use rdkafka::ClientConfig;
use rdkafka::admin::{
    AdminClient, AdminOptions, AlterConfig, NewPartitions, NewTopic, ResourceSpecifier, TopicReplication,
};
use rdkafka::client::DefaultClientContext;
use tokio::time::timeout;

pub(crate) use crate::support::{eventually, service, unique};

/// Nothing here may take longer, on a machine that is busy with other tests.
pub(crate) const SOON: Duration = Duration::from_secs(60);

/// A real Kafka with a topic of its own, which goes when the test ends.
pub(crate) struct Kafka {
    pub(crate) config: KafkaConfig,
    pub(crate) topic: String,
    // A set: librdkafka's delete of a name given twice crashes rdkafka 0.39.
    topics: std::sync::Mutex<BTreeSet<String>>,
}

impl Kafka {
    /// Nothing where the service is missing.
    pub(crate) async fn with_topic(test: &str, partitions: i32) -> Option<Self> {
        let kafka = Self::without_topic(test)?;
        kafka.create(&kafka.topic, partitions, &[]).await;
        Some(kafka)
    }

    /// The topic's name is chosen, but it does not exist.
    pub(crate) fn without_topic(test: &str) -> Option<Self> {
        let url = service(test, "ONCEBOX_TEST_KAFKA")?;
        let mut config = KafkaConfig::from_url(&url).unwrap();
        config.session_timeout = Duration::from_secs(6);
        config.partitions = 3;
        config.replication = 1;
        let topic = unique("kafka");
        Some(Self { config, topics: std::sync::Mutex::new([topic.clone()].into()), topic })
    }

    pub(crate) fn broker(&self) -> KafkaBroker {
        KafkaBroker::new(self.config.clone()).unwrap()
    }

    pub(crate) fn servers(&self) -> String {
        self.config.servers.join(",")
    }

    /// Takes note of a topic that is to go when the test ends.
    pub(crate) fn note(&self, topic: &str) -> String {
        self.topics.lock().unwrap().insert(topic.to_owned());
        topic.to_owned()
    }

    /// Creates a topic with settings, by rdkafka's own client.
    pub(crate) async fn create(&self, topic: &str, partitions: i32, settings: &[(&str, &str)]) {
        self.note(topic);
        let new =
            settings.iter().fold(NewTopic::new(topic, partitions, TopicReplication::Fixed(1)), |new, (name, value)| {
                new.set(name, value)
            });
        let results = self.admin().create_topics([&new], &AdminOptions::new()).await.unwrap();
        assert!(results.iter().all(Result::is_ok), "{results:?}");
        self.has_leaders(topic, partitions).await;
    }

    /// The controller knows a change; the broker hears of it a moment later.
    async fn has_leaders(&self, topic: &str, partitions: i32) {
        let admin = self.admin();
        eventually("the topic is there", SOON, || async {
            let metadata = admin.inner().fetch_metadata(Some(topic), Duration::from_secs(5)).ok()?;
            let found = metadata.topics().iter().find(|found| found.name() == topic)?;
            let led = found.partitions().iter().filter(|partition| partition.leader() >= 0).count();
            (led == usize::try_from(partitions).unwrap()).then_some(())
        })
        .await;
    }

    /// Changes a setting of a topic, and waits until the broker has heard of it.
    pub(crate) async fn set(&self, topic: &str, name: &str, value: &str) {
        let admin = self.admin();
        let change = AlterConfig::new(ResourceSpecifier::Topic(topic)).set(name, value);
        let results = admin.alter_configs([&change], &AdminOptions::new()).await.unwrap();
        assert!(results.iter().all(Result::is_ok), "{results:?}");
        eventually("the broker has the setting", SOON, || async {
            let asked = [&ResourceSpecifier::Topic(topic)];
            let told = admin.describe_configs(asked, &AdminOptions::new()).await.ok()?;
            let entry = told.first()?.as_ref().ok()?.get(name)?.value.clone();
            (entry.as_deref() == Some(value)).then_some(())
        })
        .await;
    }

    /// Gives a topic more partitions.
    pub(crate) async fn grow(&self, topic: &str, partitions: i32) {
        let more = NewPartitions::new(topic, usize::try_from(partitions).unwrap());
        let results = self.admin().create_partitions([&more], &AdminOptions::new()).await.unwrap();
        assert!(results.iter().all(Result::is_ok), "{results:?}");
        self.has_leaders(topic, partitions).await;
    }

    pub(crate) fn admin(&self) -> AdminClient<DefaultClientContext> {
        ClientConfig::new().set("bootstrap.servers", self.servers()).create().unwrap()
    }

    pub(crate) fn subscription(&self, group: &str) -> Subscription {
        Subscription::new(group, vec![self.topic.clone()])
    }
}

impl Drop for Kafka {
    fn drop(&mut self) {
        let (admin, topics) = (self.admin(), std::mem::take(&mut *self.topics.lock().unwrap()));
        let delete = async move {
            let names: Vec<&str> = topics.iter().map(String::as_str).collect();
            drop(admin.delete_topics(&names, &AdminOptions::new()).await);
        };
        std::thread::spawn(move || {
            tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(delete);
        })
        .join()
        .unwrap();
    }
}

/// A message with a key and a payload that tell it apart.
pub(crate) fn message(topic: &str, key: Option<&str>, payload: impl Into<Vec<u8>>) -> OutgoingMessage {
    OutgoingMessage {
        id: uuid::Uuid::now_v7(),
        topic: topic.to_owned(),
        key: key.map(str::to_owned),
        kind: "test.made".to_owned(),
        headers: vec![("tenant".to_owned(), "t1".to_owned())],
        payload: payload.into(),
        content_type: "text/plain".to_owned(),
        trace: None,
        created_at: now(),
    }
}

/// The time with the precision of the wire.
pub(crate) fn now() -> DateTime<Utc> {
    DateTime::from_timestamp_micros(Utc::now().timestamp_micros()).unwrap()
}

/// Sends rows and gives their outcomes by tag.
pub(crate) async fn publish(publisher: &mut Box<dyn Publisher>, rows: Vec<OutgoingMessage>) -> Vec<Settled> {
    let count = rows.len();
    let rows = rows.into_iter().zip(0..).map(|(row, tag)| (tag, row)).collect();
    publisher.send(rows).await.unwrap();
    let mut settled = outcomes(publisher, count).await;
    settled.sort_by_key(|row| row.tag);
    settled
}

/// Waits for so many outcomes.
pub(crate) async fn outcomes(publisher: &mut Box<dyn Publisher>, count: usize) -> Vec<Settled> {
    let mut settled = Vec::new();
    let all = async {
        while settled.len() < count {
            publisher.settle(&mut settled).await.unwrap();
        }
    };
    timeout(SOON, all).await.expect("outcomes");
    settled
}

/// A session that has seen that its topic takes messages.
pub(crate) async fn ready(broker: &KafkaBroker, topic: &str) -> Box<dyn Publisher> {
    let mut publisher = broker.publisher().await.unwrap();
    assert_eq!(publisher.topic(topic).await.unwrap(), TopicState::Ready);
    publisher
}

/// What stands in a topic, as text.
pub(crate) async fn payloads(broker: &KafkaBroker, topic: &str) -> Vec<String> {
    let all = broker.read_all(topic).await.unwrap();
    all.into_iter().map(|arrived| String::from_utf8(arrived.payload.unwrap()).unwrap()).collect()
}

/// Publishes and insists that all were taken.
pub(crate) async fn publish_all(broker: &KafkaBroker, rows: Vec<OutgoingMessage>) -> Vec<Receipt> {
    let mut publisher = broker.publisher().await.unwrap();
    let settled = publish(&mut publisher, rows).await;
    publisher.close().await;
    settled.into_iter().map(|row| row.outcome.unwrap()).collect()
}

/// The next event, within the deadline.
pub(crate) async fn next(subscriber: &mut Box<dyn Subscriber>) -> Event {
    timeout(SOON, subscriber.next()).await.expect("an event").unwrap()
}

/// The sources of the first assignment.
pub(crate) async fn assigned(subscriber: &mut Box<dyn Subscriber>) -> Vec<PartitionId> {
    match next(subscriber).await {
        Event::Assigned(sources) => sources,
        other => panic!("{other:?}"),
    }
}

/// Receives until so many deliveries came.
pub(crate) async fn receive(subscriber: &mut Box<dyn Subscriber>, count: usize) -> Vec<Delivery> {
    let mut received = Vec::new();
    while received.len() < count {
        if let Event::Deliveries(deliveries) = next(subscriber).await {
            received.extend(deliveries);
        }
    }
    received
}

/// Acknowledges each source up to its last delivery.
pub(crate) async fn acknowledge(subscriber: &mut Box<dyn Subscriber>, deliveries: &[Delivery]) {
    for delivery in deliveries {
        subscriber.acknowledge(&delivery.source, delivery.sequence).await.unwrap();
    }
}

/// Payloads as text.
pub(crate) fn texts(deliveries: &[Delivery]) -> Vec<String> {
    deliveries
        .iter()
        .map(|delivery| String::from_utf8(delivery.arrived.payload.clone().unwrap_or_default()).unwrap())
        .collect()
}
