//! The suite that defines a broker, on the real RabbitMQ.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use oncebox::broker::rabbitmq::{RabbitBroker, RabbitConfig};
use oncebox::broker::{Broker, Publisher, Subscriber, Subscription};
use oncebox::error::BrokerError;
use oncebox::message::Arrived;
use oncebox::observe::Finding;
use oncebox_testkit::broker::{Capabilities, Fixture};

use crate::fixture::Corner;

/// The adapter, and a note of every queue that it makes, so that they can be deleted.
#[derive(Debug)]
struct Noted {
    broker: RabbitBroker,
    queues: Mutex<BTreeSet<String>>,
}

#[async_trait]
impl Broker for Noted {
    fn name(&self) -> &'static str {
        self.broker.name()
    }

    fn is_log(&self) -> bool {
        self.broker.is_log()
    }

    fn places(&self, subscription: &Subscription) -> Vec<String> {
        self.broker.places(subscription)
    }

    async fn publisher(&self) -> Result<Box<dyn Publisher>, BrokerError> {
        self.broker.publisher().await
    }

    async fn subscriber(&self, subscription: &Subscription) -> Result<Box<dyn Subscriber>, BrokerError> {
        let queues: Vec<String> = subscription.topics.iter().map(|topic| subscription.queue(topic)).collect();
        self.queues.lock().unwrap().extend(queues);
        self.broker.subscriber(subscription).await
    }

    async fn declare(&self, topics: &[String]) -> Result<(), BrokerError> {
        self.broker.declare(topics).await
    }

    async fn check(&self, subscriptions: &[Subscription]) -> Result<Vec<Finding>, BrokerError> {
        self.broker.check(subscriptions).await
    }

    async fn read_all(&self, topic: &str) -> Result<Vec<Arrived>, BrokerError> {
        self.broker.read_all(topic).await
    }

    async fn tap(&self, topic: &str) -> Result<(), BrokerError> {
        self.broker.tap(topic).await
    }

    async fn remove(&self, subscriptions: &[Subscription]) -> Result<(), BrokerError> {
        self.broker.remove(subscriptions).await
    }
}

struct Rabbit {
    corner: Corner,
    broker: Arc<Noted>,
}

#[async_trait]
impl Fixture for Rabbit {
    fn capabilities(&self) -> Capabilities {
        Capabilities { patience: Duration::from_secs(90), ..Capabilities::queue() }
    }

    async fn broker(&self) -> Arc<dyn Broker> {
        Arc::clone(&self.broker) as Arc<dyn Broker>
    }

    async fn with_bytes(&self, in_flight_bytes_max: usize) -> Option<Arc<dyn Broker>> {
        let config = RabbitConfig { in_flight_bytes_max, ..self.corner.config.clone() };
        Some(Arc::new(RabbitBroker::new(config).unwrap()))
    }

    async fn finish(&self) {
        let queues: Vec<String> = self.broker.queues.lock().unwrap().iter().cloned().collect();
        self.corner.clean(&queues.iter().map(String::as_str).collect::<Vec<_>>()).await;
    }
}

async fn fixture(case: &str) -> Option<Rabbit> {
    let corner = Corner::bare(case).await?;
    let broker = Arc::new(Noted { broker: corner.broker(), queues: Mutex::default() });
    Some(Rabbit { corner, broker })
}

oncebox_testkit::broker_conformance!(fixture);
