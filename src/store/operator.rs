//! Duty: what an operator sees and does. One implementation of each act; command line, dashboard
//! and library call it.

use std::future::Future;
use std::time::Duration;

use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::Base;
use crate::error::StoreError;
use crate::policy::horizon::Verdict;

/// One shard as it stands.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct ShardStatus {
    /// The number of the shard, from 0.
    pub shard: i32,
    /// First and last bucket.
    pub buckets: (u8, u8),
    /// The cursor: every committed position up to here is proven, dead, held or decided, or
    /// stands in an open gap.
    pub scanned_to: i64,
    /// Number of open gap ranges.
    pub gaps: u64,
    /// Raised by every new owner; a write under an older epoch changes nothing.
    pub epoch: i64,
    /// Owner, where the lease is held.
    pub owner: Option<String>,
    /// What is left of the lease, seconds.
    pub lease_seconds_left: f64,
    /// Seconds since the cursor was last written.
    pub cursor_age_seconds: f64,
}

/// So many rows of a kind are counted one by one, so that a look costs the same however many there
/// are.
pub(super) const COUNTED_MAX: i64 = 10_000;

/// Everything that `oncebox status` and `/metrics` show of a database. Each number is counted up to
/// 10,000, which then means that or more; `pending` and `inbox_rows` are estimated beyond.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize)]
pub struct Status {
    /// Every shard of the outbox, as it stands.
    pub shards: Vec<ShardStatus>,
    /// Rows not yet proven, diverted rows not counted.
    pub pending: u64,
    /// Age of the oldest of them, seconds.
    pub oldest_pending_age_seconds: f64,
    /// Outbox rows held behind a dead one, or because their destination is blocked.
    pub held: u64,
    /// How long ago the first of them was enqueued, seconds.
    pub oldest_held_age_seconds: f64,
    /// Dead outbox rows: messages that could not be sent.
    pub dead: u64,
    /// Per consumer: name, waiting, dead, inbox rows (an estimate on large tables).
    pub consumers: Vec<ConsumerStatus>,
    /// E-mails not yet sent.
    pub emails_pending: u64,
}

/// One consumer as it stands.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize)]
pub struct ConsumerStatus {
    /// The name of the consumer, under which it registered.
    pub name: String,
    /// Messages that wait for a retry, or behind one.
    pub waiting: u64,
    /// Waiting messages that stand behind a dead one.
    pub held: u64,
    /// How long ago the first of all these was stored, seconds.
    pub oldest_waiting_age_seconds: f64,
    /// Messages of the consumer that are stored as dead.
    pub dead: u64,
    /// Inbox rows of the consumer; above 10,000 an estimate, on SQLite 10,000.
    pub inbox_rows: u64,
    /// When one of its processes was last there, in seconds before now; it says so every ten
    /// seconds.
    pub seen_seconds_ago: f64,
}

/// The first rows of each topic, by their places in a list that is in position order: what is held
/// for its destination stands behind the first of it.
#[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
pub(super) fn firsts<'a>(topics: impl Iterator<Item = Option<&'a str>>) -> Vec<usize> {
    let mut seen = std::collections::HashSet::new();
    let is_first = |(at, topic): (usize, Option<&'a str>)| topic.filter(|topic| seen.insert(*topic)).map(|_| at);
    topics.enumerate().filter_map(is_first).collect()
}

/// What waits and what is held, from how many stand, how many of them are held and how many are due
/// some time, each counted up to [`COUNTED_MAX`].
pub(super) fn waiting_and_held(stand: i64, held: i64, due: i64) -> (u64, u64) {
    let others = stand - held;
    let waiting = if stand < COUNTED_MAX { others } else { others.max(due) };
    (u64::try_from(waiting).unwrap_or(0), u64::try_from(held).unwrap_or(0))
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

/// Why a message is not sent or not handled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DeadState {
    /// Refused for what it is, or given up after its last try.
    #[default]
    Dead,
    /// Stands behind a dead one, or its destination takes nothing; in the outbox also behind a held
    /// one.
    Held,
    /// A consumer's: tried again when it is due, or stands behind one that is.
    Waiting,
}

impl DeadState {
    /// The reason of a consumer's message that is not dead, which has none of its own.
    pub(crate) fn reason_of_consumer(self, has_next_try: bool) -> &'static str {
        match (self, has_next_try) {
            (Self::Held, _) => "stands behind a dead one of its key",
            (_, true) => "retry",
            (_, false) => "stands behind a waiting one of its key",
        }
    }
}

/// Which messages that could not be sent or handled.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeadFilter {
    /// Only in these states; empty: dead ones.
    pub states: Vec<DeadState>,
    /// Only this one, by the number that `dead list` shows: `o17` (outbox position) or `c9`
    /// (consumer row).
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

impl DeadFilter {
    /// The states that are looked for.
    pub(crate) fn states(&self) -> &[DeadState] {
        if self.states.is_empty() { &[DeadState::Dead] } else { &self.states }
    }
}

/// The part of an error that a database keeps: its first 4,096 bytes.
#[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
pub(crate) fn kept_error(error: &str) -> &str {
    &error[..error.floor_char_boundary(4_096)]
}

/// One error of a message's history, of which the newest 50 are kept.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct HistoryEntry {
    /// When, by the database's clock.
    pub at: DateTime<Utc>,
    /// The number of the failed try.
    pub attempt: u32,
    /// The error of that try.
    pub error: String,
}

/// A message that is dead, held or waiting.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct DeadMessage {
    /// `o<position>` for the outbox, `c<sequence>` for a consumer: what `dead list` shows.
    pub number: String,
    /// Which of the three.
    pub state: DeadState,
    /// On which side it stands: in the outbox, or with a consumer.
    pub place: DeadPlace,
    /// The id under which it is published or deduplicated.
    pub message_id: Uuid,
    /// The id as its producer sent it, where it is written in another way.
    pub sent_id: Option<String>,
    /// The topic that the message belongs to.
    pub topic: String,
    /// Key, as text where it is UTF-8.
    pub key: Option<String>,
    /// What happened, for example `payment.created`; empty where the message has none.
    pub kind: String,
    /// Why it is dead, held or waiting, in a few words.
    pub reason: String,
    /// The last error that is stored of it; `None` where there is none.
    pub error: Option<String>,
    /// Tries that were counted so far.
    pub attempts: u32,
    /// When it became what it is.
    pub dead_at: DateTime<Utc>,
    /// When it is tried next; a held one goes on with what holds it, and one that is held for its
    /// destination when a trial of its topic succeeds: one is made after 30 s, or after the
    /// publisher's probe interval where that is longer.
    pub next_try: Option<DateTime<Utc>>,
    /// How many stand behind it, of its key; behind the first that is held for its destination, how
    /// many of its topic are held. Counted up to 10,000, which then means that or more.
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
    /// The media type of the payload; `None` where the message names none.
    pub content_type: Option<String>,
}

/// What an operator does with messages that could not be sent or handled. One of a consumer that
/// waits or is held is buried first, in the same transaction, and then treated as a dead one; one
/// that a process handles at this moment is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OperatorAct {
    /// Again, with the same id: inboxes still deduplicate.
    Redrive,
    /// Again, edited or unchanged, under a new id; the old one becomes the causation id header
    /// `oncebox`-side.
    RedriveAs {
        /// The id that the message is sent or handled under from now on.
        id: Uuid,
        /// The new payload, where it is edited.
        payload: Option<Vec<u8>>,
    },
    /// No more tries: dead, until something else is done with it.
    Bury,
    /// Forgotten; what stands behind goes on.
    Discard,
}

impl OperatorAct {
    /// As audit rows name it.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Redrive => "redrive",
            Self::RedriveAs { .. } => "redrive-as",
            Self::Bury => "bury",
            Self::Discard => "discard",
        }
    }

    /// Whether the message has to be buried before this act: it is a consumer's, and not dead.
    ///
    /// # Errors
    /// [`StoreError::Refused`] where the act has no meaning for the message as it stands.
    pub(super) fn buries(&self, message: &DeadMessage) -> Result<bool, StoreError> {
        let refused = |why: &str| Err(StoreError::Refused(format!("{}: {why}", message.number)));
        let is_dead = message.state == DeadState::Dead;
        match (&message.place, self) {
            (DeadPlace::Outbox, Self::Bury) => refused("only a message of a consumer is buried"),
            (DeadPlace::Outbox, Self::Discard) => Ok(false),
            (DeadPlace::Outbox, _) if !is_dead => refused(
                "it is held, and goes on by itself with what holds it; mend that, or act on the dead message before it",
            ),
            (DeadPlace::Consumer(_), Self::Bury) if is_dead => refused("it is dead already"),
            (DeadPlace::Consumer(_), Self::Redrive) if !is_dead && message.next_try.is_none() => {
                refused("it stands behind another message of its key, and goes on with that one")
            }
            (DeadPlace::Consumer(_), Self::RedriveAs { .. }) if !is_dead => {
                refused("only a dead message gets a new id; bury it first")
            }
            _ => Ok(!is_dead),
        }
    }

    /// A message that cannot be buried now.
    pub(super) fn runs_now(message: &DeadMessage) -> StoreError {
        StoreError::Refused(format!(
            "{}: a process handles it at this moment, or another copy of it is dead; look again with `oncebox dead list`",
            message.number
        ))
    }
}

/// The reason of a message that an operator buried.
pub(super) const BURIED: &str = "buried";

/// What becomes of a consumer's dead message that an operator sends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Redriven {
    /// It is no longer dead: it waits for its next try.
    Waits,
    /// Another copy of it was handled after this one was stored as dead: it is discarded.
    AlreadyHandled,
}

impl Redriven {
    /// What an audit row says beside the act: what the message was dead for.
    pub(super) fn detail(self, reason: &str) -> String {
        match self {
            Self::Waits => reason.to_owned(),
            Self::AlreadyHandled => format!("{reason}; discarded: another copy was handled since"),
        }
    }
}

/// Decides from the inbox row that stood before the act inserted one: none, or whether its content
/// is that of the message.
///
/// A verdict on the age of an id leaves no inbox row; every other dead message has its own.
pub(super) fn redriven(dead: &DeadMessage, act: &OperatorAct, stood: Option<bool>) -> Result<Redriven, StoreError> {
    let is_renamed = matches!(act, OperatorAct::RedriveAs { .. });
    match stood {
        None => Ok(Redriven::Waits),
        Some(true) if !is_renamed => {
            let has_own_row = !Verdict::left_no_inbox_row(&dead.reason);
            Ok(if has_own_row { Redriven::Waits } else { Redriven::AlreadyHandled })
        }
        Some(_) => Err(StoreError::Refused(format!(
            "{}: the inbox has this message id already, from another message, so this one would never run under it; \
             choose another id by `--new-id`",
            dead.number
        ))),
    }
}

/// What an act did.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct OperatorOutcome {
    /// Numbers of the messages concerned.
    pub numbers: Vec<String>,
    /// Those of them that a redrive discarded: another copy was handled since.
    pub already_handled: Vec<String>,
    /// True where nothing was written.
    pub dry_run: bool,
}

impl OperatorOutcome {
    /// Notes what became of one message.
    pub(super) fn add(&mut self, message: &DeadMessage, done: Redriven) {
        self.numbers.push(message.number.clone());
        if done == Redriven::AlreadyHandled {
            self.already_handled.push(message.number.clone());
        }
    }
}

/// Who acts, why, and within which bounds. Every act writes an audit row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ActContext {
    /// The person or program that acts, for the audit row.
    pub actor: String,
    /// Why the act is done, for the audit row.
    pub reason: String,
    /// Only say what would be done.
    pub dry_run: bool,
    /// Longest age of a dead outbox row that may be redriven with its own id.
    pub redrive_age_max: Option<Duration>,
}

/// A consumer was seen within this time: a process of it is there, or may come back by itself.
pub const CONSUMER_PRESENT: Duration = Duration::from_secs(300);

/// What a consumer left behind that is forgotten with it.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct Forgotten {
    /// Messages that waited, were held or dead.
    pub messages: u64,
    /// Rows that its inbox had.
    pub inbox_rows: u64,
}

impl Forgotten {
    /// The name of a consumer that is being forgotten: whoever starts under its old name is a new
    /// one.
    pub(super) fn name(consumer: i32) -> String {
        format!("(forgotten {consumer})")
    }

    /// Refused while a process of the consumer may be there.
    pub(super) fn check(name: &str, seen_seconds_ago: f64) -> Result<(), StoreError> {
        if seen_seconds_ago >= CONSUMER_PRESENT.as_secs_f64() {
            return Ok(());
        }
        Err(StoreError::Refused(format!(
            "a process of consumer `{name}` was there {seen_seconds_ago:.0} s ago; stop it, and come back when it was gone for {}",
            humantime::format_duration(CONSUMER_PRESENT)
        )))
    }

    pub(super) fn unknown(name: &str) -> StoreError {
        StoreError::Refused(format!("there is no consumer `{name}`; `oncebox consumers list` shows them"))
    }
}

/// What a person did.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct AuditEntry {
    /// When, by the database's clock.
    pub at: DateTime<Utc>,
    /// The person or program that acted.
    pub actor: String,
    /// What: `redrive`, `discard`, `release`, ...
    pub act: String,
    /// Why it was done, as the operator said it.
    pub reason: String,
    /// Of what: a topic, the outbox, a consumer, an operation.
    pub place: String,
    /// The number that a list showed, or the hash of a key; empty where neither was named.
    pub number: String,
    /// The message or the operation; nil where the act was on neither.
    pub message_id: Uuid,
    /// What else is known of it.
    pub detail: String,
}

/// A connection that waits for a lock.
#[derive(Debug, Clone, PartialEq)]
pub struct LockWait {
    /// Its number on the server.
    pub connection: String,
    /// What it runs, without values.
    pub statement: String,
    /// For how long, seconds.
    pub seconds: f64,
    /// Who holds the lock, as far as the server tells: number, name of the program, what it does.
    pub holders: Vec<String>,
}

impl DeadMessage {
    /// The id of a message as text, where it is not the one that we give it.
    pub(crate) fn sent_id(id: Uuid, text: String) -> Option<String> {
        (text.parse() != Ok(id)).then_some(text)
    }
}

/// Duty: what an operator sees of a database, and the acts on it.
pub trait Operator: Base {
    /// How shards, consumers, dead messages and e-mails stand now.
    fn status(&self) -> impl Future<Output = Result<Status, StoreError>> + Send;

    /// Connections to this database that wait for a lock for so long, as far as the server tells: a
    /// handler that hangs in one is in no table.
    fn lock_waits(&self, longer_than: Duration) -> impl Future<Output = Result<Vec<LockWait>, StoreError>> + Send;

    /// What operators did, newest first; with an id, to this message or operation alone.
    fn audit(&self, id: Option<Uuid>, limit: usize)
    -> impl Future<Output = Result<Vec<AuditEntry>, StoreError>> + Send;

    /// Forgets a consumer that is gone: its waiting, held and dead messages, what its inbox
    /// remembers, its name. One that starts under its name is a new one. With `dry_run` it is only
    /// counted.
    ///
    /// # Errors
    /// [`StoreError::Refused`] where it is not known, or a process of it was there within
    /// [`CONSUMER_PRESENT`].
    fn forget_consumer(
        &self,
        name: &str,
        context: &ActContext,
    ) -> impl Future<Output = Result<Forgotten, StoreError>> + Send;

    /// Messages that could not be sent or handled, oldest first.
    fn dead(&self, filter: &DeadFilter) -> impl Future<Output = Result<Vec<DeadMessage>, StoreError>> + Send;

    /// Mends positions that the relay would never read: a sequence that stands behind the cursor is
    /// set above it, and messages that took a position which the relay has passed come before it
    /// again, in their order. What was sent may be sent again, nothing is lost. Gives a sentence
    /// for each thing that was mended, and leaves an audit row; with `dry_run` nothing is written.
    fn mend(&self, context: &ActContext) -> impl Future<Output = Result<Vec<String>, StoreError>> + Send;

    /// Acts on the dead messages of a filter, writes an audit row for each. On outbox rows it
    /// writes a request that the owner of the shard carries out; consumer rows change at once
    /// (redrive: due now; discard: gone, next one due).
    fn act(
        &self,
        filter: &DeadFilter,
        act: &OperatorAct,
        context: &ActContext,
    ) -> impl Future<Output = Result<OperatorOutcome, StoreError>> + Send;
}

#[cfg(all(test, feature = "sqlite"))]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_cut_between_characters() {
        let error = format!("a{}", "ä".repeat(4_096));
        assert_eq!(kept_error(&error).len(), 4_095);
        assert_eq!(kept_error("short"), "short");
    }
}
