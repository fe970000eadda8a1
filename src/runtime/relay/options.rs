//! What can be set of a relay; every bound has a name and a reason beside its default.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::runtime::DeadPolicy;

/// Settings of a relay.
#[derive(Debug, Clone)]
pub struct RelayOptions {
    /// The shard; 0 is the only one on MySQL and SQLite.
    pub shard: i32,
    /// Who owns the lease: host, process and a random part.
    pub owner: String,
    /// Length of the lease in database time. 10 s: a standby takes over within it, a short freeze
    /// does not lose it.
    pub lease: Duration,
    /// Rows of one read at most. 1,000: beyond it the gain is small and a mark comes later.
    pub batch_rows: usize,
    /// Bytes of one read at most, unless a single message is larger. 4 MiB: half a window, and a
    /// thousand messages of 4 KiB.
    pub read_bytes: usize,
    /// Rows from the oldest that is not proven to the last that was read, at most: bounds what a
    /// crash sends again.
    pub window_rows: usize,
    /// Bytes sent and not proven at most: bounds memory.
    pub window_bytes: usize,
    /// The shortest pause between reads that found nothing.
    pub poll_min: Duration,
    /// The longest pause between reads that found nothing: the delay of a message that comes after
    /// a quiet time.
    pub poll_max: Duration,
    /// Dead and held rows at most; beyond it the shard stops reading, visibly.
    pub held_rows_max: usize,
    /// What a message that cannot be sent does to its key.
    pub dead: DeadPolicy,
    /// The same for single topics.
    pub dead_topics: BTreeMap<String, DeadPolicy>,
    /// How long messages may go without an answer, unless the broker says that it is blocked; then
    /// their topics are held. Where they keep others waiting, a second is enough if what was sent
    /// later was answered, and five if nothing was.
    pub publish_stall: Duration,
    /// How often a blocked topic is tried, beside the session; one that says nothing ever more
    /// rarely, up to 30 s.
    pub probe: Duration,
    /// Declare a topic that is not there before its rows are held. What that makes is the broker's
    /// to say: on Kafka a topic.
    pub declare_topics: bool,
    /// How long a stop waits for what is in flight.
    pub shutdown_grace: Duration,
    /// End when the outbox is empty.
    pub until_empty: bool,
}

impl RelayOptions {
    /// Defaults around an owner.
    pub fn new(owner: impl Into<String>) -> Self {
        Self {
            shard: 0,
            owner: owner.into(),
            lease: Duration::from_secs(10),
            batch_rows: 1_000,
            read_bytes: 4 << 20,
            window_rows: 8_000,
            window_bytes: 8 * 1024 * 1024,
            poll_min: Duration::from_millis(2),
            poll_max: Duration::from_millis(50),
            held_rows_max: 100_000,
            dead: DeadPolicy::Hold,
            dead_topics: BTreeMap::new(),
            publish_stall: Duration::from_secs(30),
            probe: Duration::from_secs(2),
            declare_topics: false,
            shutdown_grace: Duration::from_secs(10),
            until_empty: false,
        }
    }

    pub(super) fn holds(&self, topic: &str) -> bool {
        *self.dead_topics.get(topic).unwrap_or(&self.dead) == DeadPolicy::Hold
    }
}
