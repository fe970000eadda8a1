//! Reads everything that a topic holds, outside of any group: for `demo`, `bench` and tests.
//!
//! Promises: it joins no group, commits nothing and acknowledges nothing. Each partition is read up
//! to the first end that the broker reports.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::config::FromClientConfigAndContext;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::KafkaError;
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

use super::config::KafkaConfig;
use super::context::AskContext;
use super::{blocking, client, properties, topology, wire};
use crate::broker::TopicState;
use crate::error::BrokerError;
use crate::message::Arrived;

// If nothing new comes for so long, reading fails as if the broker were away.
const PATIENCE: Duration = Duration::from_secs(30);

/// Every message of a topic, ordered by partition and offset.
pub(super) async fn read_all(config: &Arc<KafkaConfig>, topic: &str) -> Result<Vec<Arrived>, BrokerError> {
    let (config, topic) = (Arc::clone(config), topic.to_owned());
    blocking::run(move || read(&config, &topic)).await
}

fn read(config: &KafkaConfig, topic: &str) -> Result<Vec<Arrived>, BrokerError> {
    let context = AskContext::default();
    let reports = Arc::clone(&context.reports);
    let consumer = BaseConsumer::from_config_and_context(&client::reader(config), context)
        .map_err(|error| properties::refused(&error))?;
    let serve = || drop(consumer.poll(blocking::SERVE));
    blocking::reach(consumer.client(), &reports, serve)?;
    let metadata = blocking::metadata(consumer.client(), &reports, Some(topic), serve)?;
    let described = topology::find(&metadata, topic);
    if let TopicState::NotReady(reason) = topology::state(described) {
        return Err(BrokerError::Destination(format!("kafka topic `{topic}`: {reason}")));
    }
    let partitions = described.map_or(&[][..], |topic| topic.partitions());
    let mut open: BTreeSet<i32> = partitions.iter().map(|partition| partition.id()).collect();
    let mut list = TopicPartitionList::with_capacity(open.len());
    for partition in &open {
        list.add_partition_offset(topic, *partition, Offset::Beginning)
            .map_err(|error| BrokerError::Session(error.to_string()))?;
    }
    consumer.assign(&list).map_err(|error| BrokerError::Session(format!("reading kafka topic `{topic}`: {error}")))?;
    let mut found = Vec::new();
    let mut heard = Instant::now();
    while !open.is_empty() {
        match consumer.poll(Duration::from_millis(100)) {
            Some(Ok(record)) => {
                heard = Instant::now();
                let arrived = wire::arrived(&record);
                // Messages after the first reported end are left out.
                if open.contains(&arrived.coordinates.partition) {
                    found.push(arrived);
                }
            }
            Some(Err(KafkaError::PartitionEOF(partition))) => {
                heard = Instant::now();
                open.remove(&partition);
            }
            Some(Err(error)) => tracing::debug!(%error, topic, "reading a kafka topic"),
            None if heard.elapsed() >= PATIENCE => {
                return Err(reports.explain(&format!("reading kafka topic `{topic}`"), "nothing came for 30 s"));
            }
            None => {}
        }
    }
    found.sort_by_key(|arrived: &Arrived| (arrived.coordinates.partition, arrived.coordinates.offset));
    Ok(found)
}
