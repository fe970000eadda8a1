//! The settings of a consumer; every bound has a name and a reason beside its default.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::inbox::rules::horizon::Horizon;
use crate::message::IdRule;
use crate::outbox::rules::diversion::DeadPolicy;
use crate::time::retry::RetryPolicy;

/// What happens to a message whose kind no handler takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
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
    /// The name of the consumer: key of its inbox, Kafka group, part of its queue names.
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
    /// The number of lanes; each has its own transaction. Default 4, about what one connection pool
    /// serves well; 1 on SQLite.
    pub lanes: usize,
    /// How many waiting keys are tried at once, each in its own transaction, so that a handler that
    /// hangs does not delay other keys. Default 4; 1 on SQLite.
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
    /// The longest time for one handler. Default 30 s; 2 s on SQLite, where it holds the write
    /// lock.
    pub handler_timeout: Duration,
    /// When a failed message is tried again, and when it is dead.
    pub retry: RetryPolicy,
    /// What happens to the messages behind a dead one.
    pub dead: DeadPolicy,
    /// What happens to kinds without a handler.
    pub unhandled: Unhandled,
    /// How long the inbox remembers ids. A message older than what was purged is dead as too old.
    /// Default: for ever.
    pub horizon: Horizon,
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
            lanes: 4,
            retriers: 4,
            batch_max: 100,
            in_flight_max: 2_000,
            aside_max: 20_000,
            unacknowledged_max: 200_000,
            dead_rows_max: 100_000,
            handler_timeout: Duration::from_secs(30),
            retry: RetryPolicy::default(),
            dead: DeadPolicy::Hold,
            unhandled: Unhandled::Acknowledge,
            horizon: Horizon::Never,
            purge_every: Duration::from_secs(3_600),
            redrive_age_max: Duration::from_secs(7 * 86_400),
            drain: Duration::from_secs(10),
            shutdown_grace: Duration::from_secs(20),
            until_idle: None,
        }
    }

    /// The id rule as it is stored at the first start; for ids by coordinates it includes the
    /// epoch.
    #[must_use]
    pub fn id_rule_text(&self) -> String {
        match self.id_rule {
            IdRule::Coordinates => format!("coordinates@{}", self.id_epoch),
            ref rule => rule.to_string(),
        }
    }

    pub(super) fn holds(&self) -> bool {
        self.dead == DeadPolicy::Hold
    }
}
