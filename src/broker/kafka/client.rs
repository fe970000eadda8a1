//! The settings of each kind of librdkafka client: producer, consumer, reader, asker.
//!
//! Promise: the settings that the promises depend on are set here, and no property can change them
//! (`properties` refuses it).

use std::time::Duration;

use rdkafka::ClientConfig;
use rdkafka::config::RDKafkaLogLevel;

use super::config::KafkaConfig;
use super::properties;

pub(super) const OPEN_DEADLINE: Duration = Duration::from_secs(10);
pub(super) const ASK_DEADLINE: Duration = Duration::from_secs(5);

// librdkafka's queue is twice as large as our own bound. The publisher waits at our bound, because
// a full queue is an error in librdkafka.
const QUEUE_ROWS_MIN: usize = 1_000;

/// The sizes that a producer needs for its topics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sizes {
    /// The largest message that any of the topics takes.
    pub(super) message_max: usize,
    /// The largest batch that all of the topics take.
    pub(super) batch_max: usize,
}

impl Sizes {
    /// True where a producer made for `self` is also right for `other`.
    pub(super) fn covers(self, other: Self) -> bool {
        self.message_max >= other.message_max && self.batch_max <= other.batch_max
    }
}

fn common(config: &KafkaConfig) -> ClientConfig {
    let mut settings = ClientConfig::new();
    // Level `debug` passes only the contexts that `debug` below names; `context` filters them.
    settings.set_log_level(RDKafkaLogLevel::Debug);
    settings
        .set("bootstrap.servers", config.bootstrap())
        .set("client.id", &config.client_id)
        .set("allow.auto.create.topics", "false")
        .set("socket.keepalive.enable", "true")
        // A broker that is frozen keeps its sockets open: with the default of 60 s, requests hung
        // for more than 30 s.
        .set("socket.timeout.ms", "10000")
        .set("socket.connection.setup.timeout.ms", "10000")
        .set("reconnect.backoff.ms", "50")
        .set("reconnect.backoff.max.ms", "2000");
    let protocol = match (config.tls, config.user.is_some()) {
        (false, false) => "plaintext",
        (true, false) => "ssl",
        (false, true) => "sasl_plaintext",
        (true, true) => "sasl_ssl",
    };
    settings.set("security.protocol", protocol);
    if config.tls {
        settings.set("enable.ssl.certificate.verification", "true");
        settings.set("ssl.endpoint.identification.algorithm", "https");
        if let Some(file) = &config.ca_file {
            settings.set("ssl.ca.location", file.to_string_lossy());
        }
    }
    if let Some(user) = &config.user {
        settings.set("sasl.mechanisms", config.sasl_mechanism.name());
        settings.set("sasl.username", user);
        settings.set("sasl.password", config.password.as_deref().unwrap_or_default());
    }
    settings
}

fn with_properties(config: &KafkaConfig, mut settings: ClientConfig) -> ClientConfig {
    for (name, value) in &config.properties {
        settings.set(properties::canonical(name), value);
    }
    settings
}

/// A producer for questions only: it sends nothing.
pub(super) fn asker(config: &KafkaConfig) -> ClientConfig {
    with_properties(config, common(config))
}

pub(super) fn topic_asker(config: &KafkaConfig) -> ClientConfig {
    with_debug(asker(config), "metadata")
}

pub(super) fn producer(config: &KafkaConfig, sizes: Sizes) -> ClientConfig {
    let mut settings = common(config);
    let rows = config.publish_rows_max.saturating_mul(2).max(QUEUE_ROWS_MIN);
    let kbytes = (config.publish_bytes_max / 1024).saturating_mul(2).max(1024);
    settings
        .set("enable.idempotence", "true")
        // Without it the client goes on after a message that the broker refused, and later messages
        // of its key overtake it.
        .set("enable.gapless.guarantee", "true")
        .set("acks", "all")
        // A finite timeout reorders messages across retries: m0, m2, m1 (shown).
        .set("message.timeout.ms", "0")
        .set("max.in.flight", "5")
        .set("partitioner", "murmur2_random")
        .set("linger.ms", (config.linger.as_secs_f64() * 1e3).to_string())
        .set("queue.buffering.max.messages", rows.min(10_000_000).to_string())
        .set("queue.buffering.max.kbytes", kbytes.min(2_000_000).to_string())
        .set("message.max.bytes", sizes.message_max.to_string())
        // A broker that vanished without a word is noticed by a question, also while nothing is
        // sent. With the default of five minutes the publisher would be ready until then.
        .set("topic.metadata.refresh.interval.ms", "30000");
    let mut settings = with_properties(config, settings);
    // A batch must fit into the smallest topic: otherwise the broker refuses good messages with the
    // large one. A message that is larger than a batch is sent alone, so that it alone is judged.
    let batch = settings.get("batch.size").and_then(|size| size.parse().ok()).unwrap_or(sizes.batch_max);
    settings.set("batch.size", batch.min(sizes.batch_max).to_string());
    // Only these logs show that the idempotent producer has its id (without the id the first
    // message waits 0.5 s), and that a broker answers again while nothing is sent.
    with_debug(settings, "eos,metadata")
}

/// Turns on one more context of librdkafka's log. `context.rs` reads what only the log tells.
fn with_debug(mut settings: ClientConfig, context: &str) -> ClientConfig {
    let debug = settings.get("debug").map_or_else(|| context.to_owned(), |contexts| format!("{contexts},{context}"));
    settings.set("debug", debug);
    settings
}

fn consumer_common(config: &KafkaConfig, group: &str) -> ClientConfig {
    let mut settings = common(config);
    settings
        .set("group.id", group)
        .set("enable.auto.commit", "false")
        .set("enable.auto.offset.store", "false")
        .set("auto.offset.reset", "earliest")
        .set("isolation.level", "read_committed")
        .set("check.crcs", "true")
        .set("enable.partition.eof", "true")
        // For low latency: a partition just assigned or resumed waits for the fetch in flight.
        .set("fetch.wait.max.ms", "100")
        .set("fetch.error.backoff.ms", "200")
        // With the default of 1,000 a full queue stalls the consumer for a second each time (55k
        // messages instead of 1.5M a second).
        .set("fetch.queue.backoff.ms", "5")
        .set("queued.min.messages", "20000")
        .set("queued.max.messages.kbytes", "16384");
    settings
}

pub(super) fn member(config: &KafkaConfig, group: &str) -> ClientConfig {
    let mut settings = consumer_common(config, group);
    let session = config.session_timeout.as_millis().max(1);
    settings
        .set("partition.assignment.strategy", "cooperative-sticky")
        .set("session.timeout.ms", session.to_string())
        .set("heartbeat.interval.ms", (session / 3).clamp(1, 3_000).to_string())
        // Short, so that a topic that is created later is found soon.
        .set("topic.metadata.refresh.interval.ms", "2000");
    let mut settings = with_properties(config, settings);
    // The start of each partition is given explicitly. An offset that no longer exists ends the
    // session, and the next session reports what was lost.
    settings.set("auto.offset.reset", "error");
    // Only this log shows the ids of topics, and that the broker answers.
    with_debug(settings, "metadata")
}

/// A client that asks for the offsets of a group and does not join it.
pub(super) fn group_reader(config: &KafkaConfig, group: &str) -> ClientConfig {
    with_properties(config, consumer_common(config, group))
}

/// A reader that joins no group. librdkafka needs a group name, but nothing is committed to it.
pub(super) fn reader(config: &KafkaConfig) -> ClientConfig {
    let group = format!("oncebox-reader-{}", uuid::Uuid::now_v7());
    group_reader(config, &group)
}

/// A reader of the next record of each of its partitions alone.
pub(super) fn next_reader(config: &KafkaConfig) -> ClientConfig {
    let mut settings = reader(config);
    settings
        // Each partition has a queue of its own here, and each queue would be filled: with many
        // partitions that are behind, more than the memory holds.
        .set("queued.min.messages", "1")
        // A partition with nothing to read must say so within the patience of the search, also
        // where the broker may wait longer for a member.
        .set("fetch.min.bytes", "1")
        .set("fetch.wait.max.ms", "100");
    settings
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// Shown by: the settings of a member. A search then takes 16 MB for each partition that is
    /// behind, and ends without an answer where an empty partition may be silent for longer.
    #[test]
    fn a_reader_of_next_records_answers_soon_and_fetches_little_ahead_whatever_a_member_may_do() {
        let mut config = KafkaConfig::from_url("kafka://b:1").unwrap();
        for (name, value) in
            [("fetch.wait.max.ms", "9000"), ("fetch.min.bytes", "1000000"), ("queued.min.messages", "100000")]
        {
            config.properties.insert(name.to_owned(), value.to_owned());
            assert_eq!(member(&config, "g").get(name), Some(value));
        }
        let settings = next_reader(&config);
        for (name, value) in [("fetch.wait.max.ms", "100"), ("fetch.min.bytes", "1"), ("queued.min.messages", "1")] {
            assert_eq!(settings.get(name), Some(value), "{name}");
        }
        settings.create_native_config().unwrap();
    }
}
