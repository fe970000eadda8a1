//! Duty: what an operator sees and does. One implementation of each act; command line, dashboard and library call it.

use std::future::Future;
use std::time::Duration;

use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::Base;
use crate::error::StoreError;

/// One shard as it stands.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct ShardStatus {
    /// The shard.
    pub shard: i32,
    /// First and last bucket.
    pub buckets: (u8, u8),
    /// The cursor.
    pub scanned_to: i64,
    /// Number of open gap ranges.
    pub gaps: u64,
    /// Epoch.
    pub epoch: i64,
    /// Owner, where the lease is held.
    pub owner: Option<String>,
    /// What is left of the lease, seconds.
    pub lease_seconds_left: f64,
    /// Seconds since the cursor was last written.
    pub cursor_age_seconds: f64,
}

/// Everything `oncebox status` and `/metrics` show of a database.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize)]
pub struct Status {
    /// Shards.
    pub shards: Vec<ShardStatus>,
    /// Rows not yet proven, diverted rows not counted (an estimate above 100,000).
    pub pending: u64,
    /// Age of the oldest of them, seconds.
    pub oldest_pending_age_seconds: f64,
    /// Held outbox rows.
    pub held: u64,
    /// Dead outbox rows.
    pub dead: u64,
    /// Per consumer: name, waiting, dead, inbox rows (an estimate on large tables).
    pub consumers: Vec<ConsumerStatus>,
    /// E-mails not yet sent.
    pub emails_pending: u64,
}

/// One consumer as it stands.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct ConsumerStatus {
    /// Name.
    pub name: String,
    /// Messages that wait for a retry, or behind one.
    pub waiting: u64,
    /// Waiting messages that stand behind a dead one.
    pub held: u64,
    /// Dead messages.
    pub dead: u64,
    /// Inbox rows.
    pub inbox_rows: u64,
}

/// On which side a message is dead.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeadPlace {
    /// Could not be sent: the outbox.
    Outbox,
    /// Could not be handled: this consumer.
    Consumer(String),
}

/// Which dead messages.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeadFilter {
    /// Only this one, by the number that `dead list` shows: `o17` (outbox position) or `c9` (consumer row).
    pub number: Option<String>,
    /// Only with this message id.
    pub message_id: Option<Uuid>,
    /// Only of this topic.
    pub topic: Option<String>,
    /// Only of this key.
    pub key: Option<String>,
    /// Only of this consumer (`outbox` for the outbox).
    pub consumer: Option<String>,
    /// Only with this reason.
    pub reason: Option<String>,
    /// At most this many; 0 is 100.
    pub limit: usize,
}

/// One error of a dead message's history.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct HistoryEntry {
    /// When, by the database's clock.
    pub at: DateTime<Utc>,
    /// Which try.
    pub attempt: u32,
    /// What it said.
    pub error: String,
}

/// A dead message.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct DeadMessage {
    /// `o<position>` or `c<sequence>`.
    pub number: String,
    /// Where.
    pub place: DeadPlace,
    /// Message id.
    pub message_id: Uuid,
    /// Topic.
    pub topic: String,
    /// Key, as text where it is UTF-8.
    pub key: Option<String>,
    /// Kind.
    pub kind: String,
    /// Reason.
    pub reason: String,
    /// Last error.
    pub error: Option<String>,
    /// Tries.
    pub attempts: u32,
    /// When it became dead.
    pub dead_at: DateTime<Utc>,
    /// How many stand behind it.
    pub behind: u64,
    /// What was requested and not yet done.
    pub requested: Option<String>,
    /// Error history, oldest first.
    pub history: Vec<HistoryEntry>,
    /// Headers, shown by `dead show`.
    pub headers: Vec<(String, String)>,
    /// Payload bytes, shown by `dead show`.
    #[serde(skip)]
    pub payload: Vec<u8>,
    /// Content type.
    pub content_type: Option<String>,
}

/// What an operator does with dead messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OperatorAct {
    /// Again, with the same id: inboxes still deduplicate.
    Redrive,
    /// Again, edited or unchanged, under a new id; the old one becomes the causation id header `oncebox`-side.
    RedriveAs {
        /// The new id.
        id: Uuid,
        /// The new payload, where it is edited.
        payload: Option<Vec<u8>>,
    },
    /// Forgotten; what stands behind goes on.
    Discard,
}

/// What an act did.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct OperatorOutcome {
    /// Numbers of the messages concerned.
    pub numbers: Vec<String>,
    /// True where nothing was written.
    pub dry_run: bool,
}

/// Who acts, why, and within which bounds. Every act writes an audit row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ActContext {
    /// Who.
    pub actor: String,
    /// Why.
    pub reason: String,
    /// Only say what would be done.
    pub dry_run: bool,
    /// Longest age of a dead outbox row that may be redriven with its own id.
    pub redrive_age_max: Option<Duration>,
}

/// Duty: operating.
pub trait Operator: Base {
    /// How things stand.
    fn status(&self) -> impl Future<Output = Result<Status, StoreError>> + Send;

    /// Dead messages, oldest first.
    fn dead(&self, filter: &DeadFilter) -> impl Future<Output = Result<Vec<DeadMessage>, StoreError>> + Send;

    /// Acts on the dead messages of a filter, writes an audit row for each. On outbox rows it writes a request that the
    /// owner of the shard carries out; consumer rows change at once (redrive: due now; discard: gone, next one due).
    fn act(
        &self,
        filter: &DeadFilter,
        act: &OperatorAct,
        context: &ActContext,
    ) -> impl Future<Output = Result<OperatorOutcome, StoreError>> + Send;
}
