//! An exchange of its own per test, the server's view through the client library, and messages to
//! send.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use lapin::options::{
    BasicGetOptions, ExchangeDeleteOptions, QueueBindOptions, QueueDeclareOptions, QueueDeleteOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Channel, Connection, ConnectionProperties};
use oncebox::broker::rabbitmq::{RabbitBroker, RabbitConfig};
use oncebox::broker::{Broker, Delivery, Event, Publisher, Settled, Subscriber, Subscription};
use oncebox::message::OutgoingMessage;
use uuid::Uuid;

use crate::support;

pub(crate) const SOON: Duration = Duration::from_secs(60);

/// A private corner of the shared server.
pub(crate) struct Corner {
    pub(crate) config: RabbitConfig,
    pub(crate) topic: String,
    pub(crate) connection: Connection,
    pub(crate) channel: Channel,
}

impl Corner {
    /// Connects and declares the exchange; nothing where there is no server to test with.
    pub(crate) async fn of(test: &str) -> Option<Self> {
        let corner = Self::bare(test).await?;
        corner.broker().declare(&[]).await.unwrap();
        Some(corner)
    }

    /// The same without the exchange.
    pub(crate) async fn bare(test: &str) -> Option<Self> {
        Some(Self::at(&support::service(test, "ONCEBOX_TEST_RABBITMQ")?).await)
    }

    /// A corner of the server at this URL, without the exchange.
    pub(crate) async fn at(url: &str) -> Self {
        let mut config = RabbitConfig::new(url);
        config.exchange = support::unique("ob-test");
        let connection = Connection::connect(url, ConnectionProperties::default()).await.unwrap();
        let channel = connection.create_channel().await.unwrap();
        Self { config, topic: support::unique("t"), connection, channel }
    }

    pub(crate) fn broker(&self) -> RabbitBroker {
        RabbitBroker::new(self.config.clone()).unwrap()
    }

    pub(crate) fn subscription(&self) -> Subscription {
        Subscription::new("ledger", vec![self.topic.clone()])
    }

    pub(crate) fn queue(&self) -> String {
        format!("{}.ledger", self.topic)
    }

    /// A durable queue with these arguments, bound to the exchange under a routing key.
    pub(crate) async fn queue_of(&self, name: &str, routing_key: &str, arguments: &[(&str, AMQPValue)]) {
        let mut table = FieldTable::default();
        for (name, value) in arguments {
            table.insert((*name).into(), value.clone());
        }
        self.channel.queue_declare(name.into(), QueueDeclareOptions::durable(), table).await.unwrap();
        let exchange = self.config.exchange.as_str().into();
        let bind = QueueBindOptions::default();
        self.channel.queue_bind(name.into(), exchange, routing_key.into(), bind, FieldTable::default()).await.unwrap();
    }

    /// Takes the first message of a queue for good: its key and its number.
    pub(crate) async fn take(&self, queue: &str) -> Option<(String, u64)> {
        let got = self.channel.basic_get(queue.into(), BasicGetOptions { no_ack: true }).await.unwrap()?;
        Some(read(&got))
    }

    /// Removes the queue of the subscription, and the exchange.
    pub(crate) async fn finish(&self) {
        self.clean(&[&self.queue()]).await;
    }

    pub(crate) async fn clean(&self, queues: &[&str]) {
        let channel = self.connection.create_channel().await.unwrap();
        for queue in queues {
            channel.queue_delete((*queue).into(), QueueDeleteOptions::default()).await.unwrap();
        }
        let exchange = self.config.exchange.as_str().into();
        channel.exchange_delete(exchange, ExchangeDeleteOptions::default()).await.unwrap();
    }
}

/// The key and the number of a message as it lies in a queue.
pub(crate) fn read(delivery: &lapin::message::Delivery) -> (String, u64) {
    let headers = delivery.properties.headers().clone().unwrap_or_default();
    let key = match headers.inner().get("cloudEvents_partitionkey") {
        Some(AMQPValue::LongString(key)) => key.to_string(),
        _ => String::new(),
    };
    (key, number(&delivery.data))
}

/// The number that stands in a payload.
pub(crate) fn number(payload: &[u8]) -> u64 {
    std::str::from_utf8(payload).unwrap().parse().unwrap()
}

pub(crate) fn message(topic: &str, key: Option<&str>, number: u64) -> OutgoingMessage {
    OutgoingMessage {
        id: Uuid::now_v7(),
        topic: topic.into(),
        key: key.map(Into::into),
        kind: "payment.created".into(),
        headers: vec![("tenant".into(), "t1".into())],
        payload: number.to_string().into_bytes(),
        content_type: "application/json".into(),
        trace: None,
        created_at: chrono::Utc::now(),
    }
}

/// Numbered messages of a topic, their keys in turn; the number is the tag.
pub(crate) fn numbered(topic: &str, keys: u64, count: u64) -> Vec<(u64, OutgoingMessage)> {
    (0..count).map(|tag| (tag, message(topic, Some(&format!("k{}", tag % keys)), tag))).collect()
}

/// Sends and waits until every row is settled.
pub(crate) async fn send_all(publisher: &mut dyn Publisher, rows: Vec<(u64, OutgoingMessage)>) -> Vec<Settled> {
    let count = rows.len();
    publisher.send(rows).await.unwrap();
    let mut settled = Vec::new();
    while settled.len() < count {
        tokio::time::timeout(SOON, publisher.settle(&mut settled)).await.expect("outcomes").unwrap();
    }
    settled
}

/// Sends a message of a topic again and again, until a queue takes it.
pub(crate) async fn send_until_taken(publisher: &mut dyn Publisher, topic: &str) {
    let start = Instant::now();
    while send_all(publisher, vec![(0, message(topic, None, 0))]).await[0].outcome.is_err() {
        assert!(start.elapsed() < SOON, "no queue is bound for topic {topic}");
    }
}

/// Publishes numbered messages that must all be taken.
pub(crate) async fn publish(broker: &RabbitBroker, rows: Vec<(u64, OutgoingMessage)>) {
    let mut publisher = broker.publisher().await.unwrap();
    for settled in send_all(&mut *publisher, rows).await {
        settled.outcome.unwrap();
    }
    publisher.close().await;
}

/// The deliveries of a subscriber, until there are so many.
pub(crate) async fn receive(subscriber: &mut dyn Subscriber, count: usize) -> Vec<Delivery> {
    let mut all = Vec::new();
    while all.len() < count {
        match tokio::time::timeout(SOON, subscriber.next()).await.expect("deliveries").unwrap() {
            Event::Deliveries(deliveries) => all.extend(deliveries),
            Event::Assigned(_) => {}
            Event::Revoked { .. } => panic!("RabbitMQ revokes nothing"),
        }
    }
    all
}

/// The numbers in the payloads.
pub(crate) fn numbers(deliveries: &[Delivery]) -> Vec<u64> {
    deliveries.iter().map(|delivery| number(delivery.arrived.payload.as_deref().unwrap())).collect()
}

/// The numbers of each key in the order of their first occurrence.
pub(crate) fn first_occurrences(log: &[(String, u64)]) -> HashMap<String, Vec<u64>> {
    let mut by_key: HashMap<String, Vec<u64>> = HashMap::new();
    for (key, number) in log {
        let numbers = by_key.entry(key.clone()).or_default();
        if !numbers.contains(number) {
            numbers.push(*number);
        }
    }
    by_key
}

/// Whether every key's first occurrences ascend.
pub(crate) fn in_order(log: &[(String, u64)]) -> bool {
    first_occurrences(log).values().all(|numbers| numbers.is_sorted())
}
