//! Which settings of librdkafka a user may set, and the reason for each that is refused.
//!
//! Promise: a property is refused by name, with the reason and before any connection, if it would
//! break a promise of this project, if another setting would silently override it, or if librdkafka
//! does not know it. Two are accepted and changed: `auto.offset.reset` for a member of a group, and
//! a `batch.size` above what the brokers take.

use std::collections::BTreeMap;

use rdkafka::ClientConfig;
use rdkafka::error::KafkaError;

use crate::error::BrokerError;

/// The longest time in milliseconds that the client may keep a message back.
pub(super) const LINGER_MAX_MS: u16 = 500;
/// The reason: after a second the relay takes the silence for the broker's.
pub(super) const LINGER_WHY: &str =
    "a message that the client keeps longer is taken for one that the broker does not answer";

/// Other names of a property, with the one we use. librdkafka takes the last one that it gets, and
/// rdkafka passes them in random order.
const ALIASES: &[(&str, &str)] = &[
    ("request.required.acks", "acks"),
    ("max.in.flight.requests.per.connection", "max.in.flight"),
    ("delivery.timeout.ms", "message.timeout.ms"),
    ("retries", "message.send.max.retries"),
    ("queue.buffering.max.ms", "linger.ms"),
    ("compression.codec", "compression.type"),
    ("metadata.broker.list", "bootstrap.servers"),
    ("sasl.mechanism", "sasl.mechanisms"),
    ("max.partition.fetch.bytes", "fetch.message.max.bytes"),
    ("auto.commit.enable", "enable.auto.commit"),
];

enum Rule {
    /// Only these values are allowed; the case of letters does not matter.
    Only(&'static [&'static str]),
    /// A number between these two, both included.
    Between(i64, i64),
    /// No value is allowed.
    Never,
}

use Rule::{Between, Never, Only};

const TRUE: Rule = Only(&["true", "t", "1"]);
const FALSE: Rule = Only(&["false", "f", "0"]);

const RULES: &[(&str, Rule, &str)] = &[
    // Order and completeness of what is published.
    ("enable.idempotence", TRUE, "without it a retry reorders messages of a key"),
    ("acks", Only(&["all", "-1"]), "less than all replicas in sync would make a delivery report no proof"),
    ("message.timeout.ms", Only(&["0"]), "a message that times out is overtaken by later ones of its key"),
    ("message.send.max.retries", Never, "a message that runs out of retries is overtaken by later ones of its key"),
    ("max.in.flight", Between(1, 5), "with more than 5 requests in flight the broker cannot keep their order"),
    (
        "partitioner",
        Only(&["murmur2_random"]),
        "another partitioner sends a key to another partition than Kafka's own clients do",
    ),
    ("linger.ms", Between(0, LINGER_MAX_MS as i64), LINGER_WHY),
    ("queuing.strategy", Only(&["fifo"]), "it reorders messages"),
    (
        "enable.gapless.guarantee",
        TRUE,
        "without it the client goes on behind a message that was refused, and later ones of its key overtake it",
    ),
    ("delivery.report.only.error", FALSE, "a message is proven by its delivery report only"),
    ("allow.auto.create.topics", FALSE, "topics are created with `create_topics` only, or by you"),
    ("transactional.id", Never, "effects commit in the database; Kafka transactions are not used"),
    ("transaction.timeout.ms", Never, "Kafka transactions are not used"),
    ("test.mock.num.brokers", Never, "a mock broker loses everything when the program ends"),
    // Nothing is acknowledged or skipped without the inbox.
    ("enable.auto.commit", FALSE, "an offset is committed only after the database commit"),
    ("enable.auto.offset.store", FALSE, "an offset is stored only after the database commit"),
    ("offset.store.method", Only(&["broker"]), "offsets are kept by the broker"),
    (
        "auto.offset.reset",
        Only(&["earliest", "smallest", "beginning"]),
        "a group without an offset begins with the oldest message (the inbox knows what was handled); `latest` skips messages",
    ),
    ("isolation.level", Only(&["read_committed"]), "messages of aborted transactions must not be handled"),
    (
        "topic.metadata.refresh.interval.ms",
        Between(1, 30_000),
        "a topic that was deleted and made anew, or got partitions, would not be noticed in time",
    ),
    ("check.crcs", TRUE, "a message damaged on its way must not be handled"),
    ("enable.partition.eof", TRUE, "the end of a partition is how `--until-idle` knows that it caught up"),
    (
        "partition.assignment.strategy",
        Only(&["cooperative-sticky"]),
        "another strategy takes all partitions away at each rebalance",
    ),
    ("group.protocol", Only(&["classic"]), "the consumer is built on the classic protocol"),
    ("group.protocol.type", Only(&["consumer"]), "it is a consumer"),
    ("group.remote.assignor", Never, "it belongs to another group protocol"),
    ("group.instance.id", Never, "a static member keeps its partitions after it died"),
    // Security.
    (
        "enable.ssl.certificate.verification",
        TRUE,
        "the broker's certificate is always verified; name its CA with `ca_file`",
    ),
    ("ssl.endpoint.identification.algorithm", Only(&["https"]), "the broker's host name is always verified"),
    ("enable.sasl.oauthbearer.unsecure.jwt", FALSE, "anybody can make an unsigned token"),
    // Properties that our own settings would override.
    ("bootstrap.servers", Never, "name the servers in `[broker] url`"),
    ("security.protocol", Never, "the scheme of `[broker] url` decides: `kafka://` or `kafkas://` (TLS)"),
    ("sasl.username", Never, "name the user in `[broker] url`, or by `[broker.kafka] username`"),
    ("sasl.password", Never, "give the password in `[broker] url`, or by `[broker.kafka] password`"),
    ("sasl.mechanisms", Never, "use `[broker.kafka] sasl_mechanism`"),
    ("ssl.ca.location", Never, "use `[broker] ca_file`"),
    ("client.id", Never, "it is `KafkaConfig::client_id`, which only a program in Rust sets"),
    ("group.id", Never, "the group is the consumer's name, or its setting `group`"),
    ("session.timeout.ms", Never, "use `[broker.kafka] session_timeout`"),
    (
        "queue.buffering.max.messages",
        Never,
        "it follows from `KafkaConfig::publish_rows_max`, which only a program in Rust sets",
    ),
    (
        "queue.buffering.max.kbytes",
        Never,
        "it follows from `KafkaConfig::publish_bytes_max`, which only a program in Rust sets",
    ),
    ("statistics.interval.ms", Never, "nothing reads librdkafka's statistics; the metrics are oncebox's own"),
    ("log_level", Never, "the log filter decides what is logged"),
    ("log.queue", Never, "logs are read from it"),
];

/// The name that we use for a property with several names.
pub(super) fn canonical(name: &str) -> &str {
    ALIASES.iter().find(|(alias, _)| *alias == name).map_or(name, |(_, name)| name)
}

fn is_secret(name: &str) -> bool {
    ["password", "secret", "pem", "jaas", "sasl.oauthbearer.config"].iter().any(|part| name.contains(part))
}

/// Refuses the first property that may not be passed through.
pub(super) fn check(properties: &BTreeMap<String, String>) -> Result<(), BrokerError> {
    let mut seen: BTreeMap<&str, &str> = BTreeMap::new();
    for (name, value) in properties {
        let shown = if is_secret(name) { "***" } else { value };
        let no = |why: &str| {
            Err(BrokerError::Refused(format!("`[broker.kafka.properties]` \"{name}\" = \"{shown}\": {why}")))
        };
        let one_name = canonical(name);
        if let Some(other) = seen.insert(one_name, name) {
            return no(&format!("\"{other}\" is another name of the same property, give one of them"));
        }
        if let Some((_, rule, why)) = RULES.iter().find(|(known, _, _)| *known == one_name)
            && !rule.allows(value)
        {
            return no(why);
        }
        let mut alone = ClientConfig::new();
        alone.set(name.as_str(), value.as_str());
        if let Err(error) = alone.create_native_config() {
            return no(&reason(&error));
        }
    }
    Ok(())
}

impl Rule {
    fn allows(&self, value: &str) -> bool {
        match self {
            Only(values) => values.iter().any(|allowed| allowed.eq_ignore_ascii_case(value)),
            Between(low, high) => value.parse().is_ok_and(|number: f64| (*low as f64..=*high as f64).contains(&number)),
            Never => false,
        }
    }
}

/// The error for a client that librdkafka does not make with these settings.
pub(super) fn refused(error: &KafkaError) -> BrokerError {
    BrokerError::Refused(format!("kafka settings: {}", reason(error)))
}

/// librdkafka's reason for refusing a configuration, without the value, which may be a secret.
fn reason(error: &KafkaError) -> String {
    match error {
        KafkaError::ClientConfig(_, description, _, _) => format!("librdkafka says: {description}"),
        KafkaError::ClientCreation(description) => format!("librdkafka says: {description}"),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn check_one(name: &str, value: &str) -> Result<(), BrokerError> {
        check(&BTreeMap::from([(name.to_owned(), value.to_owned())]))
    }

    #[test]
    fn a_property_that_breaks_a_promise_is_refused_by_name_with_the_reason() {
        for (name, value, why) in [
            ("enable.idempotence", "false", "reorders"),
            ("acks", "1", "no proof"),
            ("acks", "0", "no proof"),
            ("request.required.acks", "1", "no proof"),
            ("message.timeout.ms", "30000", "overtaken"),
            ("delivery.timeout.ms", "30000", "overtaken"),
            ("retries", "3", "overtaken"),
            ("message.send.max.retries", "0", "overtaken"),
            ("max.in.flight", "6", "order"),
            ("max.in.flight.requests.per.connection", "1000000", "order"),
            ("max.in.flight", "many", "order"),
            ("partitioner", "consistent_random", "another partition"),
            ("linger.ms", "1000", "does not answer"),
            ("queue.buffering.max.ms", "501", "does not answer"),
            ("queuing.strategy", "lifo", "reorders"),
            ("enable.gapless.guarantee", "false", "overtake"),
            ("delivery.report.only.error", "true", "delivery report"),
            ("allow.auto.create.topics", "true", "create_topics"),
            ("transactional.id", "x", "not used"),
            ("transaction.timeout.ms", "1000", "not used"),
            ("test.mock.num.brokers", "1", "loses everything"),
            ("enable.auto.commit", "true", "after the database commit"),
            ("auto.commit.enable", "true", "after the database commit"),
            ("enable.auto.offset.store", "true", "after the database commit"),
            ("offset.store.method", "file", "by the broker"),
            ("auto.offset.reset", "latest", "skips messages"),
            ("auto.offset.reset", "error", "skips messages"),
            ("isolation.level", "read_uncommitted", "aborted"),
            ("check.crcs", "false", "damaged"),
            ("enable.partition.eof", "false", "until-idle"),
            ("partition.assignment.strategy", "range", "rebalance"),
            ("group.protocol", "consumer", "classic"),
            ("group.instance.id", "a", "after it died"),
            ("group.id", "a", "setting `group`"),
            ("enable.ssl.certificate.verification", "false", "`ca_file`"),
            ("ssl.endpoint.identification.algorithm", "none", "host name"),
            ("enable.sasl.oauthbearer.unsecure.jwt", "true", "unsigned"),
            ("bootstrap.servers", "a:1", "`[broker] url`"),
            ("metadata.broker.list", "a:1", "`[broker] url`"),
            ("security.protocol", "plaintext", "scheme"),
            ("sasl.username", "a", "`[broker] url`"),
            ("sasl.mechanism", "PLAIN", "sasl_mechanism"),
            ("ssl.ca.location", "a", "ca_file"),
            ("client.id", "a", "client_id"),
            ("session.timeout.ms", "1", "session_timeout"),
            ("queue.buffering.max.messages", "1", "publish_rows_max"),
            ("queue.buffering.max.kbytes", "1", "publish_bytes_max"),
            ("statistics.interval.ms", "1000", "statistics"),
            ("log_level", "7", "log filter"),
            ("no.such.property", "1", "No such configuration property"),
            ("socket.timeout.ms", "soon", "librdkafka says"),
            ("fetch.min.bytes", "-1", "librdkafka says"),
        ] {
            let text = check_one(name, value).unwrap_err().to_string();
            assert!(text.contains(name) && text.contains(value) && text.contains(why), "{name}: {text}");
        }
    }

    #[test]
    fn a_property_that_keeps_the_promises_passes() {
        for (name, value) in [
            ("enable.idempotence", "true"),
            ("enable.gapless.guarantee", "true"),
            ("acks", "ALL"),
            ("message.timeout.ms", "0"),
            ("max.in.flight", "1"),
            ("linger.ms", "5"),
            ("auto.offset.reset", "earliest"),
            ("compression.type", "lz4"),
            ("socket.timeout.ms", "20000"),
            ("client.rack", "a"),
            ("max.poll.interval.ms", "600000"),
            ("debug", "broker"),
        ] {
            check_one(name, value).unwrap();
        }
    }

    #[test]
    fn two_names_of_one_property_are_refused() {
        let both = [("acks", "all"), ("request.required.acks", "-1")];
        let both = both.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        assert!(check(&both).unwrap_err().to_string().contains("another name"));
    }

    #[test]
    fn a_secret_is_not_shown_when_it_is_refused() {
        let text = check_one("sasl.password", "s3cret").unwrap_err().to_string();
        assert!(!text.contains("s3cret"), "{text}");
    }
}
