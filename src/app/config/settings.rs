//! Every setting of the programs. One of a consumer that is not set gets the default of
//! `ConsumerOptions`. The reasons for the defaults are in the options of the runtime.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::values::{Secret, byte_size, span, span_if_set, span_or_never};
use crate::broker::Subscription;
use crate::inbox::consumer::{ConsumerOptions, Unhandled};
use crate::inbox::sql_handler::SqlSpec;
use crate::outbox::relay::RelayOptions;
use crate::outbox::rules::policy::DeadPolicy;
use crate::store::base::StoreOptions;
use crate::time::retry::RetryPolicy;

/// All settings of the programs, as one configuration file holds them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// The section `[database]`: where the outbox, the inbox and the operations are stored.
    pub database: DatabaseSettings,
    /// The section `[broker]`: where messages are published to and consumed from.
    pub broker: BrokerSettings,
    /// The section `[publisher]`: the relay from the outbox to the broker.
    pub publisher: PublisherSettings,
    /// The consumers of the `consumer` program.
    pub consumer: Vec<ConsumerSettings>,
    /// The section `[email]`: how the sender delivers queued e-mails.
    pub email: EmailSettings,
    /// The section `[http]`: the address that serves `/livez`, `/readyz` and `/metrics`.
    pub http: HttpSettings,
    /// The section `[log]`: the format of log lines, and which are written.
    pub log: LogSettings,
    /// How long a stop waits for running work.
    #[serde(with = "span")]
    pub shutdown_grace: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            database: DatabaseSettings::default(),
            broker: BrokerSettings::default(),
            publisher: PublisherSettings::default(),
            consumer: Vec::new(),
            email: EmailSettings::default(),
            http: HttpSettings::default(),
            log: LogSettings::default(),
            shutdown_grace: Duration::from_secs(20),
        }
    }
}

/// The section `[database]` of the configuration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DatabaseSettings {
    /// `postgres://`, `mysql://` or `sqlite://FILE`.
    pub url: Secret,
    /// The largest number of connections of the pool; a consumer process raises it to what its
    /// lanes and retriers need.
    pub connections_max: u32,
    /// How long the server may be silent in the middle of a statement before the connection is
    /// dropped.
    #[serde(with = "span_if_set")]
    pub answer_timeout: Option<Duration>,
    /// A PEM file with the certificate authorities that verify the server.
    pub ca_file: Option<PathBuf>,
}

impl Default for DatabaseSettings {
    fn default() -> Self {
        Self { url: Secret("sqlite://oncebox.db".into()), connections_max: 12, answer_timeout: None, ca_file: None }
    }
}

impl DatabaseSettings {
    /// The options of the store for these settings; an error names the setting and says why.
    pub(crate) fn options(&self) -> Result<StoreOptions, String> {
        if self.connections_max == 0 {
            return Err("database.connections_max: at least 1, or no statement ever gets a connection".into());
        }
        if self.answer_timeout.is_some_and(|timeout| timeout < Duration::from_secs(1)) {
            return Err("database.answer_timeout: at least 1s, or a busy server is taken for a silent one".into());
        }
        Ok(StoreOptions {
            connections_max: self.connections_max,
            answer_timeout: self.answer_timeout,
            ca_file: self.ca_file.clone(),
            ..StoreOptions::new(self.url.0.clone())
        })
    }
}

/// The section `[broker]` of the configuration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct BrokerSettings {
    /// `kafka://`, `kafkas://`, `amqp://`, `amqps://` or `embedded://FILE`. The default is taken
    /// only beside a SQLite file: with a database server the broker must be named.
    pub url: Secret,
    /// A PEM file with the certificate authorities that verify the server.
    pub ca_file: Option<PathBuf>,
    /// The largest number of bytes of a consumer's deliveries that are not acknowledged. One
    /// delivery is always allowed.
    #[serde(with = "byte_size")]
    pub in_flight_bytes_max: usize,
    /// Settings that only a Kafka broker uses.
    pub kafka: KafkaSettings,
    /// Settings that only a RabbitMQ broker uses.
    pub rabbitmq: RabbitSettings,
    /// Settings that only the embedded broker uses.
    pub embedded: EmbeddedSettings,
}

impl Default for BrokerSettings {
    fn default() -> Self {
        Self {
            url: Secret("embedded://oncebox-broker.db".into()),
            ca_file: None,
            in_flight_bytes_max: 64 << 20,
            kafka: KafkaSettings::default(),
            rabbitmq: RabbitSettings::default(),
            embedded: EmbeddedSettings::default(),
        }
    }
}

/// The section `[broker.kafka]` of the configuration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct KafkaSettings {
    /// Whether to create topics that do not exist.
    pub create_topics: bool,
    /// The number of partitions of created topics.
    pub partitions: i32,
    /// The number of replicas of created topics.
    pub replication: i32,
    /// `PLAIN`, `SCRAM-SHA-256` or `SCRAM-SHA-512`; the user is given in the URL or here.
    pub sasl_mechanism: Option<String>,
    /// The SASL user, if it is not in the URL.
    pub username: Option<String>,
    /// The SASL password, if it is not in the URL.
    pub password: Option<Secret>,
    /// How long a consumer may be silent before its partitions go to another consumer.
    #[serde(with = "span")]
    pub session_timeout: Duration,
    /// Settings that are passed to librdkafka. The program names one that would break a guarantee,
    /// and does not start.
    pub properties: BTreeMap<String, String>,
}

impl Default for KafkaSettings {
    fn default() -> Self {
        Self {
            create_topics: false,
            partitions: 6,
            replication: 1,
            sasl_mechanism: None,
            username: None,
            password: None,
            session_timeout: Duration::from_secs(45),
            properties: BTreeMap::new(),
        }
    }
}

/// The section `[broker.rabbitmq]` of the configuration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RabbitSettings {
    /// The name of the exchange, which is durable and of type topic.
    pub exchange: String,
    /// The exchange for unroutable messages, set on `exchange` when that is made.
    pub alternate_exchange: Option<String>,
    /// If true, several publishes of a key may be unconfirmed at a time: faster for few keys, but a
    /// nack may reorder a key.
    pub pipeline_per_key: bool,
    /// Queues for each topic and consumer; more than one are behind a consistent-hash exchange.
    pub partitions: u32,
}

impl Default for RabbitSettings {
    fn default() -> Self {
        Self { exchange: "oncebox".into(), alternate_exchange: None, pipeline_per_key: false, partitions: 1 }
    }
}

/// The section `[broker.embedded]` of the configuration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EmbeddedSettings {
    /// The number of partitions of a topic, fixed when the topic is made.
    pub partitions: i32,
    /// How long a consumer may be silent before its partitions go to another consumer.
    #[serde(with = "span")]
    pub session_timeout: Duration,
    /// The age from which a message is deleted, once every consumer has handled it.
    #[serde(with = "span_or_never")]
    pub retention: Option<Duration>,
}

impl Default for EmbeddedSettings {
    fn default() -> Self {
        Self { partitions: 4, session_timeout: Duration::from_secs(6), retention: None }
    }
}

/// The section `[publisher]` of the configuration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PublisherSettings {
    /// `ce_source` of every message: 1 to 255 bytes of printable ASCII.
    pub source: String,
    /// The length of the lease of a shard.
    #[serde(with = "span")]
    pub lease: Duration,
    /// The largest number of rows in one read.
    pub batch_rows: usize,
    /// The largest number of bytes in one read, unless a single message is larger.
    #[serde(with = "byte_size")]
    pub read_bytes: usize,
    /// The largest number of rows in the window, from the oldest that is not proven to the last
    /// read.
    pub window_rows: usize,
    /// The largest number of bytes that are sent and not proven.
    #[serde(with = "byte_size")]
    pub window_bytes: usize,
    /// The longest pause between reads that found nothing.
    #[serde(with = "span")]
    pub poll_max: Duration,
    /// The largest number of held rows of a shard, with the dead ones that hold them; at the limit
    /// reading stops, and the health says so.
    pub held_rows_max: usize,
    /// The largest number of dead messages in the outbox, under any policy; at the limit reading
    /// stops, and the health says so.
    pub dead_rows_max: usize,
    /// What a message that cannot be sent does to its key.
    pub dead: DeadPolicy,
    /// The same choice for single topics.
    pub dead_topics: BTreeMap<String, DeadPolicy>,
    /// How long messages may stay unanswered before their topics are held; shorter where they keep
    /// others waiting.
    #[serde(with = "span")]
    pub publish_stall: Duration,
    /// The pause between two trials of a blocked topic; one that does not answer is tried ever
    /// more rarely.
    #[serde(with = "span")]
    pub probe: Duration,
    /// Dead messages of the outbox that were enqueued longer ago need a new id to be redriven.
    #[serde(with = "span")]
    pub redrive_age_max: Duration,
}

impl Default for PublisherSettings {
    fn default() -> Self {
        let options = RelayOptions::new("");
        Self {
            source: "oncebox".into(),
            lease: options.lease,
            batch_rows: options.batch_rows,
            read_bytes: options.read_bytes,
            window_rows: options.window_rows,
            window_bytes: options.window_bytes,
            poll_max: options.poll_max,
            held_rows_max: options.held_rows_max,
            dead_rows_max: options.dead_rows_max,
            dead: DeadPolicy::Hold,
            dead_topics: BTreeMap::new(),
            publish_stall: options.publish_stall,
            probe: options.probe,
            redrive_age_max: Duration::from_secs(7 * 24 * 3600),
        }
    }
}

/// How the table `[consumer.retry]` of a consumer is written; what it does not name cannot be set.
#[derive(Serialize, Deserialize)]
#[serde(remote = "RetryPolicy", deny_unknown_fields, default = "RetryPolicy::default")]
struct RetryTable {
    in_place: u32,
    #[serde(with = "span")]
    in_place_delay: Duration,
    attempts_max: u32,
    #[serde(with = "span")]
    base: Duration,
    #[serde(with = "span")]
    cap: Duration,
    #[serde(skip)]
    multiplier: f64,
    #[serde(skip)]
    jitter: f64,
}

/// One `[[consumer]]` of the configuration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConsumerSettings {
    /// The name of the consumer: inbox key, Kafka group, part of the queue names.
    pub name: String,
    /// The topics that the consumer reads.
    pub topics: Vec<String>,
    /// The group in Kafka and in the embedded broker, if it is not the name.
    pub group: Option<String>,
    /// The names of queues by topic, if they are not `<topic>.<name>`.
    #[serde(default)]
    pub queues: BTreeMap<String, String>,
    /// Where the message id is: `envelope`, `header:NAME`, `payload:/POINTER`, `coordinates`.
    #[serde(default = "envelope")]
    pub id: String,
    /// A part of the id with `id = "coordinates"`: change it when a topic is deleted and made anew.
    #[serde(default = "first_epoch")]
    pub id_epoch: String,
    /// The number of lanes; on SQLite always one.
    pub lanes: Option<usize>,
    /// How many waiting keys are tried at once; on SQLite always one.
    pub retriers: Option<usize>,
    /// The largest number of messages in one transaction.
    pub batch_max: Option<usize>,
    /// The largest number of deliveries that run or wait for their turn.
    pub in_flight_max: Option<usize>,
    /// The largest number of deliveries that are set aside behind another process's open
    /// transaction; more count as in flight.
    pub aside_max: Option<usize>,
    /// The largest number of deliveries that are not acknowledged. Most of them are finished and
    /// stand behind one that is not.
    pub unacknowledged_max: Option<usize>,
    /// The largest number of dead messages; at the limit no more messages are taken.
    pub dead_rows_max: Option<usize>,
    /// The largest number of messages that wait or are dead; at the limit no more messages are
    /// taken. Default 1,000,000, or `dead_rows_max` where that is more.
    pub waiting_rows_max: Option<usize>,
    /// The longest time for one handler. Default 30s, on SQLite 2s.
    #[serde(default, with = "span_if_set")]
    pub handler_timeout: Option<Duration>,
    /// What happens to the messages behind a dead one.
    #[serde(default)]
    pub dead: DeadPolicy,
    /// What happens to kinds without a handler.
    #[serde(default)]
    pub unhandled: Unhandled,
    /// How long the inbox remembers ids: a duration, or `never` to forget nothing.
    #[serde(default, with = "span_or_never")]
    pub horizon: Option<Duration>,
    /// How long a revoked partition may take to finish what runs.
    #[serde(default, with = "span_if_set")]
    pub drain: Option<Duration>,
    /// When a failed message is tried again, and when it is dead.
    #[serde(default, with = "RetryTable")]
    pub retry: RetryPolicy,
    /// The handlers of this consumer, each for one kind or for all other kinds.
    #[serde(default)]
    pub on: Vec<OnSettings>,
}

/// The first item that equals an earlier one.
fn again<T: PartialEq>(items: &[T]) -> Option<&T> {
    items.iter().enumerate().find(|(at, item)| items[..*at].contains(item)).map(|(_, item)| item)
}

fn envelope() -> String {
    "envelope".into()
}

fn first_epoch() -> String {
    "1".into()
}

/// One `[[consumer.on]]`: a handler of a consumer, and the kind that it takes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OnSettings {
    /// The kind of messages; absent: every kind that has no handler of its own.
    pub kind: Option<String>,
    /// The type of the handler; only `sql` is known.
    pub handler: String,
    /// The statements of the sql handler.
    #[serde(default)]
    pub sql: Vec<String>,
    /// The parameters: JSON pointers, or `@id`, `@key`, `@kind`, `@topic`, `@time`, `@payload`,
    /// `@header:NAME`.
    #[serde(default)]
    pub params: BTreeMap<String, String>,
    /// Parameters that are null if their source is missing.
    #[serde(default)]
    pub optional: Vec<String>,
}

/// The subscription of the consumer, for commands that read the state of the broker.
impl From<&ConsumerSettings> for Subscription {
    fn from(consumer: &ConsumerSettings) -> Self {
        Self {
            group: consumer.group.clone(),
            queues: consumer.queues.clone(),
            ..Self::new(consumer.name.clone(), consumer.topics.clone())
        }
    }
}

/// The options of the sql handler.
impl From<&OnSettings> for SqlSpec {
    fn from(on: &OnSettings) -> Self {
        Self { statements: on.sql.clone(), params: on.params.clone(), optional: on.optional.clone() }
    }
}

impl ConsumerSettings {
    /// Default settings for this name and these topics.
    #[must_use]
    pub fn new(name: &str, topics: Vec<String>) -> Self {
        Self {
            name: name.to_owned(),
            topics,
            group: None,
            queues: BTreeMap::new(),
            id: envelope(),
            id_epoch: first_epoch(),
            lanes: None,
            retriers: None,
            batch_max: None,
            in_flight_max: None,
            aside_max: None,
            unacknowledged_max: None,
            dead_rows_max: None,
            waiting_rows_max: None,
            handler_timeout: None,
            dead: DeadPolicy::default(),
            unhandled: Unhandled::default(),
            horizon: None,
            drain: None,
            retry: RetryPolicy::default(),
            on: Vec::new(),
        }
    }

    /// The options of the consumer for the runtime, on a store with one writer or with many; an
    /// error names the setting and says why.
    pub(crate) fn options(&self, has_one_writer: bool, shutdown_grace: Duration) -> Result<ConsumerOptions, String> {
        let mut options = ConsumerOptions::new(self.name.clone(), self.topics.clone());
        let bad = |what: &str, why: &str| format!("consumer `{}`: {what}: {why}", self.name);
        if self.name.is_empty() || self.name.len() > 128 {
            return Err(bad("name", "1 to 128 bytes are allowed"));
        }
        if self.topics.is_empty() {
            return Err(bad("topics", "name at least one topic"));
        }
        if let Some(twice) = again(&self.topics) {
            return Err(bad("topics", &format!("`{twice}` stands there twice")));
        }
        // RabbitMQ makes a new queue each time that one without a name is declared, and Kafka takes
        // no group without one: the consumer would try for ever.
        if self.topics.iter().chain(self.queues.values()).chain(&self.group).any(String::is_empty) {
            return Err(bad("topics, queues, group", "a name has at least one character"));
        }
        if let Some(topic) = self.queues.keys().find(|topic| !self.topics.contains(topic)) {
            return Err(bad("queues", &format!("`{topic}` is none of its topics: {}", self.topics.join(", "))));
        }
        let kinds: Vec<_> = self.on.iter().map(|on| on.kind.as_deref()).collect();
        if let Some(kind) = again(&kinds) {
            let kind = kind.map_or_else(|| "every other kind".to_owned(), |kind| format!("`{kind}`"));
            let why = "has two handlers, and only the first would run: write the statements of both into one `sql`";
            return Err(bad("on", &format!("{kind} {why}")));
        }
        if self.handler_timeout.is_some_and(|timeout| timeout.is_zero()) {
            return Err(bad("handler_timeout", "more than 0s, or no handler has time to run"));
        }
        options.id_rule = self.id.parse().map_err(|why: String| bad("id", &why))?;
        options.id_epoch.clone_from(&self.id_epoch);
        options.group.clone_from(&self.group);
        options.queues.clone_from(&self.queues);
        for (what, number, most, option) in [
            ("lanes", self.lanes, 64, &mut options.lanes),
            ("retriers", self.retriers, 64, &mut options.retriers),
            ("batch_max", self.batch_max, 10_000, &mut options.batch_max),
            ("in_flight_max", self.in_flight_max, usize::MAX, &mut options.in_flight_max),
            ("unacknowledged_max", self.unacknowledged_max, usize::MAX, &mut options.unacknowledged_max),
        ] {
            let Some(number) = number else { continue };
            if number == 0 || number > most {
                let most = if most == usize::MAX { "or more".to_owned() } else { format!("to {most}") };
                return Err(bad(what, &format!("1 {most} is allowed, not {number}")));
            }
            *option = number;
        }
        options.aside_max = self.aside_max.unwrap_or(options.aside_max);
        if self.dead_rows_max == Some(0) {
            return Err(bad("dead_rows_max", "more than 0, or nothing is read"));
        }
        options.dead_rows_max = self.dead_rows_max.unwrap_or(options.dead_rows_max);
        options.waiting_rows_max = match self.waiting_rows_max {
            Some(waiting_rows_max) if waiting_rows_max < options.dead_rows_max => {
                let least = options.dead_rows_max;
                return Err(bad(
                    "waiting_rows_max",
                    &format!("at least dead_rows_max ({least}): it counts dead messages too"),
                ));
            }
            Some(waiting_rows_max) => waiting_rows_max,
            None => options.waiting_rows_max.max(options.dead_rows_max),
        };
        if has_one_writer {
            // More would only wait for each other (R14).
            (options.lanes, options.retriers) = (1, 1);
        }
        options.handler_timeout = self.handler_timeout.unwrap_or(options.handler_timeout);
        options.drain = self.drain.unwrap_or(options.drain);
        options.dead = self.dead;
        options.unhandled = self.unhandled;
        options.horizon = self.horizon;
        options.shutdown_grace = shutdown_grace;
        options.retry = self.retry;
        options.check()?;
        Ok(options.of_store(has_one_writer))
    }
}

/// The section `[email]` of the configuration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EmailSettings {
    /// The address in the `From` header of every e-mail.
    pub from: String,
    /// The directory for `.eml` files if no SMTP server is set.
    pub directory: PathBuf,
    /// `smtp://` or `smtps://` with user, password and host; absent: `.eml` files.
    pub smtp_url: Option<Secret>,
    /// How many attempts one e-mail gets before it is failed.
    pub attempts_max: u32,
    /// How long recipient, subject, body and error of an e-mail are kept after it was sent.
    #[serde(with = "span")]
    pub content_kept: Duration,
    /// How long the row with the unique key is kept after the e-mail was sent.
    #[serde(with = "span_or_never")]
    pub keys_kept: Option<Duration>,
}

impl Default for EmailSettings {
    fn default() -> Self {
        Self {
            from: "oncebox@localhost.localdomain".into(),
            directory: PathBuf::from("emails"),
            smtp_url: None,
            attempts_max: 20,
            content_kept: Duration::from_secs(7 * 24 * 3600),
            keys_kept: None,
        }
    }
}

/// The section `[http]` of the configuration.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HttpSettings {
    /// The address for `/livez`, `/readyz` and `/metrics`; absent: not served.
    #[serde(with = "super::values::address_if_set")]
    pub listen: Option<std::net::SocketAddr>,
}

/// The section `[log]` of the configuration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LogSettings {
    /// The form of log lines: `text` or `json`.
    pub format: crate::app::LogFormat,
    /// The filter of log lines, as in `RUST_LOG`.
    pub filter: String,
}

impl Default for LogSettings {
    fn default() -> Self {
        Self { format: crate::app::LogFormat::Text, filter: "info".into() }
    }
}

impl PublisherSettings {
    /// The options of the relay for the runtime; an error names the setting and says why.
    pub(crate) fn options(&self, owner: String, shutdown_grace: Duration) -> Result<RelayOptions, String> {
        crate::message::limits::check_printable("publisher.source", &self.source, 255)
            .map_err(|error| error.to_string())?;
        if self.lease < Duration::from_secs(1) {
            return Err("publisher.lease: at least 1s, or a short pause loses it".into());
        }
        let numbers = [
            ("batch_rows", self.batch_rows),
            ("read_bytes", self.read_bytes),
            ("window_rows", self.window_rows),
            ("window_bytes", self.window_bytes),
            ("held_rows_max", self.held_rows_max),
            ("dead_rows_max", self.dead_rows_max),
        ];
        if let Some((name, _)) = numbers.iter().find(|(_, number)| *number == 0) {
            return Err(format!("publisher.{name}: more than 0, or nothing is read"));
        }
        if self.batch_rows > 10_000 {
            return Err(format!("publisher.batch_rows: 1 to 10000 is allowed, not {}", self.batch_rows));
        }
        let times = [
            ("poll_max", self.poll_max, "the database is asked without a pause"),
            ("publish_stall", self.publish_stall, "every topic is held before the broker can answer"),
            ("probe", self.probe, "a blocked topic is tried without a pause"),
        ];
        if let Some((name, _, otherwise)) = times.iter().find(|(_, time, _)| time.is_zero()) {
            return Err(format!("publisher.{name}: more than 0s, or {otherwise}"));
        }
        Ok(RelayOptions {
            lease: self.lease,
            batch_rows: self.batch_rows,
            read_bytes: self.read_bytes,
            window_rows: self.window_rows,
            window_bytes: self.window_bytes,
            poll_max: self.poll_max,
            held_rows_max: self.held_rows_max,
            dead_rows_max: self.dead_rows_max,
            dead: self.dead,
            dead_topics: self.dead_topics.clone(),
            publish_stall: self.publish_stall,
            probe: self.probe,
            shutdown_grace,
            ..RelayOptions::new(owner)
        })
    }
}
