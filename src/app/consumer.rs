//! Consumers as a process: those in the configuration, with handlers from the configuration or in
//! Rust.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::beside::Beside;
use super::config::{ConsumerSettings, Settings};
use super::connect::{AnyBroker, Wait, open_broker, open_store_with};
use super::exit::AppError;
use super::publisher::{close, ready};
use crate::broker::{Broker, Subscription};
use crate::error::LimitError;
use crate::inbox::consumer::{Consumer, ConsumerOptions, Handlers, check_start};
use crate::inbox::sql_handler::{SqlHandler, SqlSpec};
use crate::message::limits::Limits;
use crate::observe::Health;
use crate::store::base::StoreOptions;
use crate::store::{Duties, Store};
use crate::task;

type ByName<S> = BTreeMap<String, Handlers<S>>;

/// Handlers in Rust, by consumer. A consumer of the configuration that is not named here uses the
/// handlers in the configuration.
#[derive(Debug)]
pub struct HandlersByConsumer<S: Store>(Vec<(ConsumerSettings, Handlers<S>)>);

impl<S: Store> HandlersByConsumer<S> {
    /// An empty set: it has handlers for no consumer yet.
    #[must_use]
    pub fn new() -> Self {
        Self(Vec::new())
    }

    /// Adds a consumer. The name is the inbox key and, unless `group` or `queues` is set, the Kafka
    /// group and part of the queue names, so it must not change later. If the configuration has a
    /// `[[consumer]]` with this name, its topics and settings are used; otherwise the consumer
    /// reads `topics` with the defaults.
    #[must_use]
    pub fn consumer<T: Into<String>>(
        mut self,
        name: &str,
        topics: impl IntoIterator<Item = T>,
        handlers: Handlers<S>,
    ) -> Self {
        let topics = topics.into_iter().map(Into::into).collect();
        self.0.push((ConsumerSettings::new(name, topics), handlers));
        self
    }

    /// The consumers to run, those of the configuration first, and the handlers in Rust by name.
    fn merged(self, configured: &[ConsumerSettings]) -> Result<(Vec<ConsumerSettings>, ByName<S>), AppError> {
        let mut consumers = configured.to_vec();
        let mut by_name = ByName::new();
        for (default, handlers) in self.0 {
            if by_name.insert(default.name.clone(), handlers).is_some() {
                let name = default.name;
                return Err(AppError::usage(format!("there are handlers for the consumer `{name}` twice")));
            }
            if !consumers.iter().any(|consumer| consumer.name == default.name) {
                consumers.push(default);
            }
        }
        Ok((consumers, by_name))
    }
}

impl<S: Store> Default for HandlersByConsumer<S> {
    fn default() -> Self {
        Self::new()
    }
}

/// Refuses consumers that would take each other's messages: two of one name, two of one group
/// (Kafka and embedded) that share a topic, and two of one queue (RabbitMQ). A queue has one topic
/// too: `oncebox queues repartition` moves one topic and deletes its old queue, with what came of
/// the other topic. The error has their names, and what they share.
fn require_apart(consumers: &[ConsumerSettings], broker_url: &str) -> Result<(), AppError> {
    let has_queues = broker_url.starts_with("amqp");
    let (mut names, mut taken) = (BTreeSet::new(), BTreeMap::new());
    for consumer in consumers {
        let (name, subscription) = (&consumer.name, Subscription::from(consumer));
        if !names.insert(name) {
            return Err(AppError::usage(format!(
                "two [[consumer]] have the name `{name}`; a name is one consumer with one set of topics: \
                 give one of them another name, or list the topics and handlers of both under one"
            )));
        }
        // A topic that stands there twice is refused by `ConsumerSettings::options`.
        for topic in consumer.topics.iter().collect::<BTreeSet<_>>() {
            let (place, setting) = if has_queues {
                (format!("queue `{}`", subscription.queue(topic)), "queues")
            } else {
                (format!("topic `{topic}` in the group `{}`", subscription.group()), "group")
            };
            let Some(other) = taken.insert(place.clone(), name) else { continue };
            let what = if other == name {
                format!(
                    "consumer `{name}` would read two topics from the {place}, and a change of the number of queues moves only one"
                )
            } else {
                format!(
                    "consumers `{other}` and `{name}` would read the {place}, and each message reaches only one of the two"
                )
            };
            return Err(AppError::usage(format!("{what}: give one of them another `{setting}`")));
        }
    }
    Ok(())
}

/// Refuses a topic that cannot exist: Kafka and the outbox do not take its name, so no message
/// would ever come. On RabbitMQ others may publish under any routing key.
fn require_possible(consumers: &[ConsumerSettings], broker_url: &str) -> Result<(), AppError> {
    if broker_url.starts_with("amqp") {
        return Ok(());
    }
    let limits = Limits::default();
    let topics = consumers.iter().flat_map(|consumer| consumer.topics.iter().map(|topic| (&consumer.name, topic)));
    // A topic without a name is refused by `ConsumerSettings::options`.
    for (name, topic) in topics.filter(|(_, topic)| !topic.is_empty()) {
        let refused =
            |error: LimitError| AppError::usage(format!("consumer `{name}`: topics: `{topic}`: {}", error.detail));
        limits.check_topic(topic).map_err(refused)?;
    }
    Ok(())
}

/// The options of a consumer, with those that other sections set.
fn options_of(
    settings: &Settings,
    consumer: &ConsumerSettings,
    has_one_writer: bool,
) -> Result<ConsumerOptions, String> {
    let mut options = consumer.options(has_one_writer, settings.shutdown_grace)?;
    options.redrive_age_max = settings.publisher.redrive_age_max;
    Ok(options)
}

impl Settings {
    /// Finds the consumers that would not start on this database and broker, although their
    /// settings can be used: the name of each, and why. Changes nothing, and passes over what is
    /// away.
    pub async fn refused_starts(&self, store: &dyn Duties, broker: &dyn Broker) -> Vec<(String, String)> {
        let mut refused = Vec::new();
        for consumer in &self.consumer {
            let Ok(options) = options_of(self, consumer, false) else { continue };
            if let Err(error) = check_start(store, broker, &options).await {
                refused.push((consumer.name.clone(), error.to_string()));
            }
        }
        refused
    }

    /// Finds settings with which a program would not start: for each the program, the part of its
    /// settings, and why. Names of handlers are checked when a consumer starts.
    #[must_use]
    pub fn mistakes(&self) -> Vec<(&'static str, String, String)> {
        let mut found = Vec::new();
        let of_publisher = self.publisher.options(String::new(), self.shutdown_grace).err();
        found.extend(of_publisher.map(|why| ("publisher", "publisher: settings".to_owned(), why)));
        for consumer in &self.consumer {
            let of_consumer = options_of(self, consumer, false).err();
            found.extend(of_consumer.map(|why| ("consumer", format!("consumer {}: settings", consumer.name), why)));
        }
        let shared = require_apart(&self.consumer, &self.broker.url.0).err();
        let impossible = require_possible(&self.consumer, &self.broker.url.0).err();
        let of_all = shared.into_iter().chain(impossible);
        found.extend(of_all.map(|error| ("consumer", "consumers: settings".to_owned(), error.message)));
        found
    }
}

/// Runs consumers with handlers in Rust until the stop. The database URL must name their store.
pub async fn run_consumers_with<S: Store>(
    settings: &Settings,
    handlers: HandlersByConsumer<S>,
    health: Health,
    stop: CancellationToken,
) -> Result<(), AppError> {
    Run { settings, until_idle: None, accept_id_rule: false, health, stop }.with(handlers).await
}

/// One run of the consumers of a process.
#[derive(Debug)]
pub(super) struct Run<'a> {
    pub(super) settings: &'a Settings,
    /// A consumer ends after nothing came to it for this long, once it has caught up.
    pub(super) until_idle: Option<Duration>,
    /// Accept an id rule that is not the one that a consumer started with.
    pub(super) accept_id_rule: bool,
    pub(super) health: Health,
    pub(super) stop: CancellationToken,
}

impl Run<'_> {
    /// With the handlers of the configuration alone, on the store that it names.
    pub(super) async fn configured(self) -> Result<(), AppError> {
        crate::with_store_type!(&self.settings.database.url.0, |S| self.with::<S>(HandlersByConsumer::new()).await)
    }

    pub(super) async fn with<S: Store>(self, handlers: HandlersByConsumer<S>) -> Result<(), AppError> {
        let (consumers, mut handlers) = handlers.merged(&self.settings.consumer)?;
        if consumers.is_empty() {
            return Err(AppError::usage(
                "no consumer is configured\nhint: add [[consumer]] to the configuration file; `oncebox config template` shows one",
            ));
        }
        require_apart(&consumers, &self.settings.broker.url.0)?;
        require_possible(&consumers, &self.settings.broker.url.0)?;
        let mut options = Vec::new();
        for consumer in &consumers {
            let mut one = options_of(self.settings, consumer, S::HAS_ONE_WRITER).map_err(AppError::usage)?;
            one.until_idle = self.until_idle;
            one.accept_id_rule = self.accept_id_rule;
            options.push((consumer, one));
        }
        let waits = Some((&self.stop, &self.health));
        let broker = open_broker(self.settings, waits).await?;
        let connections: usize = options.iter().map(|(_, options)| options.lanes + options.retriers + 1).sum();
        let timeout = options.iter().map(|(_, options)| options.handler_timeout).max().unwrap_or_default();
        let with_lanes = |store: &mut StoreOptions| {
            // Each lane and retrier keeps one connection; counting attempts takes another.
            store.connections_max = store.connections_max.max(u32::try_from(connections).unwrap_or(u32::MAX));
            store.handler_timeout = timeout;
        };
        let store: S = open_store_with(self.settings, with_lanes, waits).await?;
        ready(&store, self.settings, waits).await?;
        let duties = store.clone().into_duties();
        let (mut ready_to_run, solo) = (Vec::new(), Arc::default());
        for (settings, options) in options {
            let handlers = match handlers.remove(&settings.name) {
                Some(handlers) => handlers,
                None => self.handlers_of::<S>(&store, settings).await?,
            };
            ready_to_run.push(Consumer::beside(
                Arc::clone(&solo),
                store.clone(),
                AnyBroker::clone(&broker),
                handlers,
                options,
                self.health.clone(),
            ));
        }
        // None runs before all are made: an error above ends this call, and would cut them off.
        let all = self.stop.child_token();
        let mut running = JoinSet::new();
        for consumer in ready_to_run {
            let stop = all.clone();
            running.spawn(task::boxed(async move { consumer.run(stop).await }));
        }
        let mut beside = Beside::start(Arc::clone(&duties), &broker, self.settings, &all);
        let mut outcome = Ok(());
        while let Some(ended) = beside.next_end(&mut running, "a consumer").await {
            if let Err(error) = ended {
                beside.ends_with(&mut outcome, error);
            }
        }
        outcome = beside.end(outcome).await;
        if outcome.is_ok() && self.until_idle.is_some() && !self.stop.is_cancelled() {
            // Consumers of other processes are in the same database.
            let is_own = |name: &str| consumers.iter().any(|one| one.name == name);
            for consumer in duties.status().await?.consumers {
                if is_own(&consumer.name) && consumer.waiting + consumer.dead > 0 {
                    tracing::warn!(consumer = %consumer.name, waiting = consumer.waiting, dead = consumer.dead, "idle, but messages wait or are dead; see `oncebox dead list`");
                }
            }
        }
        close(&store).await;
        outcome
    }

    /// The handlers of the configuration. Waits for a database that went away meanwhile.
    async fn handlers_of<S: Store>(&self, store: &S, settings: &ConsumerSettings) -> Result<Handlers<S>, AppError> {
        let mut handlers = Handlers::new();
        if settings.on.is_empty() {
            return Err(AppError::usage(format!(
                "consumer `{}` has no [[consumer.on]] and no handler in Rust",
                settings.name
            )));
        }
        let mut wait = Wait::new("database", Some((&self.stop, &self.health)));
        for on in &settings.on {
            if on.handler != "sql" {
                return Err(AppError::usage(format!(
                    "consumer `{}`: unknown handler `{}`; known is `sql`",
                    settings.name, on.handler
                )));
            }
            let spec = SqlSpec::from(on);
            let handler = loop {
                match wait.answer("a handler is prepared", SqlHandler::prepare(store, spec.clone())).await? {
                    Ok(handler) => break handler,
                    Err(error) if error.is_transient() => wait.on(&error.to_string()).await?,
                    Err(error) => {
                        let of =
                            on.kind.as_ref().map_or_else(|| "every other kind".to_owned(), |kind| format!("`{kind}`"));
                        let (name, what) = (&settings.name, "the sql handler of");
                        let said = format!("consumer `{name}`, {what} {of}: {error}");
                        // Otherwise the statement is wrong.
                        let is_refused = error.is_for_a_person();
                        return Err(if is_refused { AppError::not_ready(said) } else { AppError::usage(said) });
                    }
                }
            };
            handlers = match &on.kind {
                Some(kind) if handler.gains_by_sets() => handlers.on_batch(kind.clone(), handler),
                Some(kind) => handlers.on(kind.clone(), handler),
                None if handler.gains_by_sets() => handlers.otherwise_batch(handler),
                None => handlers.otherwise(handler),
            };
        }
        Ok(handlers)
    }
}

#[cfg(all(test, feature = "sqlite"))]
mod tests {
    use super::*;
    use crate::store::sqlite::SqliteStore;

    fn handlers(names: [&str; 2]) -> HandlersByConsumer<SqliteStore> {
        let add = |all: HandlersByConsumer<_>, name| all.consumer(name, ["payments"], Handlers::new());
        names.into_iter().fold(HandlersByConsumer::new(), add)
    }

    #[test]
    fn the_configuration_decides_over_the_topics_of_handlers_and_its_other_consumers_stay() {
        let configured = [("ledger", "bookings"), ("audit", "payments")]
            .map(|(name, topic)| ConsumerSettings::new(name, vec![topic.to_owned()]));
        let (consumers, by_name) = handlers(["ledger", "emails"]).merged(&configured).expect("each name stands once");
        let seen: Vec<_> = consumers.iter().map(|one| (one.name.as_str(), one.topics[0].as_str())).collect();
        assert_eq!(seen, [("ledger", "bookings"), ("audit", "payments"), ("emails", "payments")]);
        assert_eq!(by_name.into_keys().collect::<Vec<_>>(), ["emails", "ledger"]);
    }

    #[test]
    fn two_consumers_of_one_name_are_refused_by_name() {
        let configured = ["payments", "refunds"].map(|topic| ConsumerSettings::new("ledger", vec![topic.to_owned()]));
        let refused = require_apart(&configured, "kafka://a:1").expect_err("each would take the other's messages");
        assert!(refused.message.contains("`ledger`"), "{refused}");
    }

    #[test]
    fn handlers_for_one_consumer_twice_are_refused_by_name() {
        let refused = handlers(["ledger", "ledger"]).merged(&[]).expect_err("one would be left out silently");
        assert!(refused.message.contains("`ledger`"), "{refused}");
    }

    #[test]
    fn two_consumers_that_would_take_each_others_messages_are_refused_with_their_names() {
        let one = |name: &str, topic: &str| ConsumerSettings::new(name, vec![topic.to_owned()]);
        let grouped = |name, topic| ConsumerSettings { group: Some("g".to_owned()), ..one(name, topic) };
        // The names of both queues are made to `a.b.c`.
        let alike = [one("c", "a.b"), one("b.c", "a")];
        let [ledger, emails] = [grouped("ledger", "payments"), grouped("emails", "payments")];
        let (kafka, rabbitmq) = ("kafka://a:1", "amqps://a/%2f");
        let refused = |consumers: &[ConsumerSettings], url| {
            let error = require_apart(consumers, url).expect_err("a message would reach one of them only");
            error.message
        };
        let of_group = refused(&[ledger.clone(), emails.clone()], kafka);
        assert!(["`ledger`", "`emails`", "`g`", "`payments`"].iter().all(|word| of_group.contains(word)), "{of_group}");
        let of_queue = refused(&alike, rabbitmq);
        assert!(["`c`", "`b.c`", "`a.b.c`"].iter().all(|word| of_queue.contains(word)), "{of_queue}");
        assert!(require_apart(&alike, kafka).is_ok(), "their groups differ");
        assert!(require_apart(&[ledger.clone(), emails], rabbitmq).is_ok(), "their queues differ");
        assert!(
            require_apart(&[ledger, grouped("audit", "refunds")], "embedded://file").is_ok(),
            "they share no topic"
        );
        let queues = ["payments", "refunds"].map(|topic| (topic.to_owned(), "q".to_owned()));
        let topics = queues.clone().map(|(topic, _)| topic).into();
        let of_one = ConsumerSettings { queues: queues.into(), ..ConsumerSettings::new("ledger", topics) };
        let of_queue = refused(std::slice::from_ref(&of_one), rabbitmq);
        assert!(["`ledger`", "two topics", "`q`"].iter().all(|word| of_queue.contains(word)), "{of_queue}");
        assert!(require_apart(&[of_one], kafka).is_ok(), "there are no queues");
    }
}
