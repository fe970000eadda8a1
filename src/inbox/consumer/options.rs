//! The settings of a consumer; every bound has a name and a reason beside its default.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::inbox::port::ConsumerSpec;
use crate::message::IdRule;
use crate::outbox::rules::policy::DeadPolicy;
use crate::time::bound;
use crate::time::retry::RetryPolicy;

/// What happens to a message whose kind no handler takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Unhandled {
    /// The message is acknowledged, and counted as unhandled.
    #[default]
    Acknowledge,
    /// The message is stored as dead.
    Dead,
}

/// Settings of a consumer.
#[derive(Debug, Clone)]
pub struct ConsumerOptions {
    /// The name of the consumer: key of its inbox, Kafka group, part of its queue names. Not
    /// `outbox`.
    pub name: String,
    /// The topics that the consumer reads.
    pub topics: Vec<String>,
    /// The group in Kafka, if it is not the name.
    pub group: Option<String>,
    /// The names of queues, by topic.
    pub queues: BTreeMap<String, String>,
    /// Where the id of a message is found.
    pub id_rule: IdRule,
    /// Part of the id by coordinates: change it when a topic is deleted and made anew.
    pub id_epoch: String,
    /// Accept an id rule that is not the one stored at the first start.
    pub accept_id_rule: bool,
    /// The number of lanes; each has its own transaction. Default 0: what the store takes, which is
    /// 4, about what one connection pool serves well, and 1 on SQLite, where more would only wait
    /// for each other.
    pub lanes: usize,
    /// How many waiting keys are tried at once, each in its own transaction, so that a handler that
    /// hangs does not delay other keys. Default 0: what the store takes, 4, and 1 on SQLite.
    pub retriers: usize,
    /// The largest number of messages in one transaction. Default 100: a larger one gains little,
    /// and a failure repeats more.
    pub batch_max: usize,
    /// The largest number of deliveries that run or wait for their turn. It bounds memory, and how
    /// many messages can be suspect. Default 2,000, which is 20 full transactions.
    pub in_flight_max: usize,
    /// The largest number of deliveries that are set aside because an open transaction of another
    /// process, perhaps frozen, has the inbox row of the delivery or of an older one of its key.
    /// More count against `in_flight_max`. Default 20,000, about what comes for such keys until the
    /// server ends that transaction.
    pub aside_max: usize,
    /// The largest number of deliveries that are not acknowledged; most of them finished behind one
    /// that did not. It bounds what comes again after a crash, which the inbox knows. Default
    /// 200,000; each takes some bytes.
    pub unacknowledged_max: usize,
    /// The largest number of dead messages of this consumer. At the limit no more messages are
    /// taken until an operator has made room, so that a stream of messages that can never be
    /// handled does not fill the database. Default 100,000, more than a person can look through.
    pub dead_rows_max: usize,
    /// The largest number of messages of this consumer that wait or are dead; each is stored whole.
    /// At the limit no more messages are taken until a tenth of them is gone, while what waits is
    /// tried on. So neither a dead message that holds a busy key nor a dependency that is away for
    /// hours moves the topic into the table while the broker shows no lag. Default 1,000,000: room
    /// for an outage of some hours, and 1 GB with messages of 1 KB. Dead messages count here too,
    /// so keep it above `dead_rows_max`.
    pub waiting_rows_max: usize,
    /// The longest time for one call of a handler. Default zero: what the store takes. It is 30 s,
    /// and 2 s on SQLite, where a handler holds the write lock of the whole file: a longer one is
    /// allowed there, and the log warns of it. On a server set the timeout of the store's options
    /// to the same.
    pub handler_timeout: Duration,
    /// When a failed message is tried again, and when it is dead.
    pub retry: RetryPolicy,
    /// What happens to the messages behind a dead one.
    pub dead: DeadPolicy,
    /// What happens to kinds without a handler.
    pub unhandled: Unhandled,
    /// How long the inbox remembers ids; `None`, the default: for ever. A message older than what
    /// was purged is dead as too old.
    pub horizon: Option<Duration>,
    /// The pause between two purges of rows older than the horizon. Default 1 h; the inbox is
    /// larger by the rows of that time.
    pub purge_every: Duration,
    /// How old a dead message may be that is redriven under its own id: the publisher's setting
    /// with this name, which the horizon must exceed. Default 7 days.
    pub redrive_age_max: Duration,
    /// How long a revoked partition may take to finish what runs. Default 10 s.
    pub drain: Duration,
    /// How long a stop waits for what runs. Default 20 s. The last 4 s (at most half) are used to
    /// drop what still runs and to take its counted tries back.
    pub shutdown_grace: Duration,
    /// End after nothing came for this long, once the consumer has caught up.
    pub until_idle: Option<Duration>,
}

impl ConsumerOptions {
    /// Default settings for this name and these topics.
    pub fn new(name: impl Into<String>, topics: Vec<String>) -> Self {
        Self {
            name: name.into(),
            topics,
            group: None,
            queues: BTreeMap::new(),
            id_rule: IdRule::Envelope,
            id_epoch: "1".to_owned(),
            accept_id_rule: false,
            lanes: 0,
            retriers: 0,
            batch_max: 100,
            in_flight_max: 2_000,
            aside_max: 20_000,
            unacknowledged_max: 200_000,
            dead_rows_max: 100_000,
            waiting_rows_max: 1_000_000,
            handler_timeout: Duration::ZERO,
            retry: RetryPolicy::default(),
            dead: DeadPolicy::Hold,
            unhandled: Unhandled::Acknowledge,
            horizon: None,
            purge_every: Duration::from_secs(3_600),
            redrive_age_max: Duration::from_secs(7 * 86_400),
            drain: Duration::from_secs(10),
            shutdown_grace: Duration::from_secs(20),
            until_idle: None,
        }
    }

    /// The id rule as it is stored at the first start; for ids by coordinates it includes the
    /// epoch.
    pub(crate) fn id_rule_text(&self) -> String {
        match self.id_rule {
            IdRule::Coordinates => format!("coordinates@{}", self.id_epoch),
            ref rule => rule.to_string(),
        }
    }

    /// How the consumer is registered.
    pub(super) fn spec(&self) -> ConsumerSpec {
        ConsumerSpec { name: self.name.clone(), id_rule: self.id_rule_text(), accept: self.accept_id_rule }
    }

    /// Fills in what is left to the store. A store with one writer runs one handler at a time,
    /// which keeps all others waiting (R14).
    pub(crate) fn of_store(mut self, has_one_writer: bool) -> Self {
        let (at_once, timeout) = if has_one_writer { (1, 2) } else { (4, 30) };
        for number in [&mut self.lanes, &mut self.retriers] {
            if *number == 0 {
                *number = at_once;
            }
        }
        if self.handler_timeout.is_zero() {
            self.handler_timeout = Duration::from_secs(timeout);
        }
        self
    }

    /// Refuses a time above 100 years, retries that cannot be, and the name `outbox`: it means the
    /// outbox wherever dead messages are counted or listed, so one of the two would hide those of
    /// the other.
    pub(crate) fn check(&self) -> Result<(), String> {
        if self.name == "outbox" {
            let why =
                "consumer `outbox`: this name means the outbox in `dead list` and in the metrics; choose another one";
            return Err(why.to_owned());
        }
        self.retry.validate().map_err(|why| format!("consumer `{}`: retry: {why}", self.name))?;
        let horizon = self.horizon.unwrap_or_default();
        bound::check([
            ("handler_timeout", self.handler_timeout),
            ("in_place_delay", self.retry.in_place_delay),
            ("base", self.retry.base),
            ("cap", self.retry.cap),
            ("horizon", horizon),
            ("purge_every", self.purge_every),
            ("redrive_age_max", self.redrive_age_max),
            ("drain", self.drain),
            ("shutdown_grace", self.shutdown_grace),
        ])
        .map_err(|error| format!("consumer `{}`: {error}", self.name))
    }

    /// Warns of what was set on purpose and keeps others waiting in a store with one writer.
    pub(super) fn warn_of_one_writer(&self) {
        let Self { name, lanes, retriers, handler_timeout, .. } = self;
        if *lanes > 1 || *retriers > 1 {
            tracing::warn!(consumer = %name, lanes, retriers, "this database has one writer: more than one lane or retrier only wait for each other");
        }
        if *handler_timeout > Duration::from_secs(2) {
            tracing::warn!(consumer = %name, ?handler_timeout, "this database has one writer: while a handler runs, nobody else writes");
        }
    }

    pub(super) fn holds(&self) -> bool {
        self.dead == DeadPolicy::Hold
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The gauge of its dead messages would be that of the outbox, and an alert would be silent.
    #[test]
    fn a_consumer_is_not_named_as_the_outbox_is_where_dead_messages_are_counted() {
        let named = |name: &str| ConsumerOptions::new(name, Vec::new()).check();
        assert!(named("outbox").is_err_and(|refused| refused.contains("choose another one")));
        assert!(named("outboxes").is_ok());
    }

    /// Shown by: checking a configuration only. Every suspect was dead without a run.
    #[test]
    fn a_policy_without_an_attempt_is_refused_also_where_the_options_are_made_in_rust() {
        let mut options = ConsumerOptions::new("ledger", Vec::new());
        options.retry.attempts_max = 0;
        assert!(options.check().is_err_and(|refused| refused.contains("consumer `ledger`: retry: `attempts_max`")));
    }

    /// Shown by: the defaults of a server on every store.
    #[test]
    fn r14_a_store_with_one_writer_gets_one_lane_and_short_handlers_unless_the_options_say_otherwise() {
        let of = |options: ConsumerOptions, has_one_writer| {
            let options = options.of_store(has_one_writer);
            (options.lanes, options.retriers, options.handler_timeout.as_secs())
        };
        let unset = ConsumerOptions::new("ledger", Vec::new());
        assert_eq!(of(unset.clone(), true), (1, 1, 2));
        assert_eq!(of(unset.clone(), false), (4, 4, 30));
        let set = ConsumerOptions { lanes: 2, retriers: 3, handler_timeout: Duration::from_secs(20), ..unset };
        assert_eq!(of(set.clone(), true), (2, 3, 20));
        assert_eq!(of(set, false), (2, 3, 20));
    }
}
