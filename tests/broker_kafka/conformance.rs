//! The suite that defines a broker, on the real Kafka.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use oncebox::broker::Broker;
use oncebox::broker::kafka::{KafkaBroker, KafkaConfig};
use oncebox_testkit::broker::{Capabilities, Fixture};

use crate::kit::Kafka;

#[async_trait]
impl Fixture for Kafka {
    fn capabilities(&self) -> Capabilities {
        Capabilities { patience: Duration::from_secs(90), ..Capabilities::log() }
    }

    async fn broker(&self) -> Arc<dyn Broker> {
        Arc::new(Kafka::broker(self))
    }

    async fn with_bytes(&self, in_flight_bytes_max: usize) -> Option<Arc<dyn Broker>> {
        Some(Arc::new(KafkaBroker::new(KafkaConfig { in_flight_bytes_max, ..self.config.clone() }).unwrap()))
    }

    // Noted, so that it goes when the case ends.
    fn topic(&self, label: &str) -> String {
        self.note(&format!("{}-{label}", self.topic))
    }
}

async fn fixture(case: &str) -> Option<Kafka> {
    let mut kafka = Kafka::without_topic(case)?;
    kafka.config.create_topics = true;
    Some(kafka)
}

oncebox_testkit::broker_conformance!(fixture);
