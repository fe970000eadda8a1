//! The settings of a relay; a bound has its reason beside its default.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::error::StoreError;
use crate::outbox::rules::policy::DeadPolicy;
use crate::time::bound;

/// Settings of a relay.
#[derive(Debug, Clone)]
pub struct RelayOptions {
    /// The number of the shard; 0 is the only one on MySQL and SQLite.
    pub shard: i32,
    /// The name of the lease's owner: host, process and a random part.
    pub owner: String,
    /// The length of the lease, in the time of the database. Default 10 s: a standby takes over
    /// within that time, and a short freeze does not lose the lease.
    pub lease: Duration,
    /// Most rows of one read. Default 4,000, half a window: what is handed over at once fills the
    /// batches of Kafka's client, and with 1,000 Kafka took a third more of its CPU for a row.
    pub batch_rows: usize,
    /// A read ends with the message that reaches so many bytes. Default 4 MiB: half a window, and
    /// four thousand messages of 1 KiB.
    pub read_bytes: usize,
    /// Most rows from the oldest unproven one to the last one that was read. It bounds what a crash
    /// repeats.
    pub window_rows: usize,
    /// While so many bytes are sent and not proven, nothing more is read. It bounds memory.
    pub window_bytes: usize,
    /// The shortest pause between reads that found nothing.
    pub poll_min: Duration,
    /// The longest pause between reads that found nothing. It delays a message after a quiet time.
    pub poll_max: Duration,
    /// How long the mark of proven rows waits for a checkpoint of later rows to carry it. Default
    /// 20 ms: after a crash the rows of this time are sent again.
    pub mark_after: Duration,
    /// Most held rows of the shard, with the dead ones that hold rows. At this number the shard
    /// stops reading, and shows that it does.
    pub held_rows_max: usize,
    /// Most dead messages in the outbox, of all shards. At this number no shard reads, and each
    /// shows it, until an operator has made room. So a stream of messages that the broker refuses
    /// does not fill the database under policy `skip`, which holds none of them. Default 100,000,
    /// more than a person can look through.
    pub dead_rows_max: usize,
    /// What a dead message does to later messages of its key.
    pub dead: DeadPolicy,
    /// Exceptions to `dead`, by topic.
    pub dead_topics: BTreeMap<String, DeadPolicy>,
    /// How long messages may stay unanswered before their topics are held, unless the broker says
    /// that it is blocked. Where they keep other rows waiting, the time is shorter: one second if
    /// rows sent later were answered or the message was sent alone, else five seconds.
    pub publish_stall: Duration,
    /// How often a blocked topic is tried, beside the session. A topic that does not answer is
    /// tried ever more rarely, up to every 30 s.
    pub probe: Duration,
    /// Whether a missing topic is declared before its rows are held. The broker decides what that
    /// creates: on Kafka a topic.
    pub declare_topics: bool,
    /// How long a stop waits for rows in flight.
    pub shutdown_grace: Duration,
    /// Whether the relay ends when the outbox is empty. Before, it tries each topic that took
    /// nothing once, and sends what was held for the ones that take messages again.
    pub until_empty: bool,
}

impl RelayOptions {
    /// The default settings for an owner.
    pub fn new(owner: impl Into<String>) -> Self {
        Self {
            shard: 0,
            owner: owner.into(),
            lease: Duration::from_secs(10),
            batch_rows: 4_000,
            read_bytes: 4 << 20,
            window_rows: 8_000,
            window_bytes: 8 * 1024 * 1024,
            poll_min: Duration::from_millis(2),
            poll_max: Duration::from_millis(50),
            mark_after: Duration::from_millis(20),
            held_rows_max: 100_000,
            dead_rows_max: 100_000,
            dead: DeadPolicy::Hold,
            dead_topics: BTreeMap::new(),
            publish_stall: Duration::from_secs(30),
            probe: Duration::from_secs(2),
            declare_topics: false,
            shutdown_grace: Duration::from_secs(10),
            until_empty: false,
        }
    }

    /// Refuses a time that no instant reaches.
    pub(super) fn check(&self) -> Result<(), StoreError> {
        bound::check([
            ("lease", self.lease),
            ("poll_min", self.poll_min),
            ("poll_max", self.poll_max),
            ("mark_after", self.mark_after),
            ("publish_stall", self.publish_stall),
            ("probe", self.probe),
            ("shutdown_grace", self.shutdown_grace),
        ])
        .map_err(|error| StoreError::Refused(error.to_string()))
    }

    pub(super) fn holds(&self, topic: &str) -> bool {
        *self.dead_topics.get(topic).unwrap_or(&self.dead) == DeadPolicy::Hold
    }
}
