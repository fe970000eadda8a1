//! What can be set of a consumer; every bound has a name and a reason beside its default.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::message::IdRule;
use crate::policy::horizon::Horizon;
use crate::policy::retry::RetryPolicy;

/// What happens to later messages of a key behind a dead one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeadPolicy {
    /// They are held behind it until a person decides: order is kept.
    #[default]
    Hold,
    /// They go on without it.
    Skip,
}

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
    /// Its name: the inbox key, the Kafka group, part of the queue names.
    pub name: String,
    /// The topics that the consumer reads.
    pub topics: Vec<String>,
    /// Another group than its name.
    pub group: Option<String>,
    /// Queue names by topic.
    pub queues: BTreeMap<String, String>,
    /// Where the id stands.
    pub id_rule: IdRule,
    /// Part of the identity by coordinates: change it when a topic is made anew.
    pub id_epoch: String,
    /// Take another id rule than the one stored at the first start.
    pub accept_id_rule: bool,
    /// Lanes: each has its own transaction. 4 by default, about what one database connection pool
    /// serves well; 1 on SQLite.
    pub lanes: usize,
    /// Waiting keys that are tried at once, each in its own transaction, so that one whose handler
    /// hangs keeps no other waiting. 4 by default; 1 on SQLite.
    pub retriers: usize,
    /// Messages of one transaction at most. 100: beyond it the gain is small and a failure repeats
    /// more.
    pub batch_max: usize,
    /// Deliveries at most that run or wait for their turn: bounds memory, and how many are
    /// suspected of having killed their process. 2,000: enough for 20 full transactions.
    pub in_flight_max: usize,
    /// Deliveries at most that stand aside, because another process, frozen maybe, has the inbox
    /// row of theirs or of an older one of their key in an open transaction. More of them count
    /// against `in_flight_max`. 20,000: about what comes for its keys until the server ends that
    /// transaction.
    pub aside_max: usize,
    /// Deliveries at most that are not acknowledged, most of them finished behind one that is not:
    /// bounds what comes again after a crash, which the inbox knows. 200,000: each takes some
    /// bytes.
    pub unacknowledged_max: usize,
    /// Dead messages of this consumer at most. Where so many stand, nothing more is taken until an
    /// operator has made room, so that a stream of what can never be handled does not fill the
    /// database. 100,000: more than anybody looks through.
    pub dead_rows_max: usize,
    /// How long one handler may run. 30 s; 2 s on SQLite, where it runs inside the write lock.
    pub handler_timeout: Duration,
    /// When a failed message is tried again, and when it is dead.
    pub retry: RetryPolicy,
    /// What stands behind a dead message.
    pub dead: DeadPolicy,
    /// What happens to kinds without a handler.
    pub unhandled: Unhandled,
    /// How long the inbox remembers; a message older than what it has forgotten is dead as too old.
    /// For ever by default.
    pub horizon: Horizon,
    /// How often rows older than the horizon are looked for. 1 h: the inbox is larger by what comes
    /// in that time.
    pub purge_every: Duration,
    /// How old a dead message may be that is sent again under its own id: the publisher's setting
    /// of this name, which the horizon must exceed. 7 days.
    pub redrive_age_max: Duration,
    /// How long a revoked partition may drain.
    pub drain: Duration,
    /// How long a stop waits for what runs. 20 s, of which the last 4, or the second half if that
    /// is less, are there to drop what still runs and to take its counted tries back.
    pub shutdown_grace: Duration,
    /// End when nothing came for this long after having caught up.
    pub until_idle: Option<Duration>,
}

impl ConsumerOptions {
    /// Defaults around a name and topics.
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

    /// The id rule as it is stored at the first start; the epoch belongs to it where coordinates
    /// are the identity.
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
