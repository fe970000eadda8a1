//! What an operator can see and do. The command line and users of the library call the same
//! implementation of each act.

#[cfg(feature = "operations")]
pub(crate) mod keys;

use std::fmt::Debug;
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use uuid::Uuid;

use crate::error::StoreError;
use crate::inbox::rules::horizon::Verdict;

/// The state of one shard.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct ShardStatus {
    /// The number of the shard, from 0.
    pub shard: i32,
    /// First and last bucket, both included. A bucket is a range of hashes of keys.
    pub buckets: (u8, u8),
    /// The cursor. Every committed row up to this position was stored by the broker, is dead or
    /// held, or was decided by an operator, unless its position is in an open gap.
    pub scanned_to: i64,
    /// Number of open gap ranges.
    pub gaps: u64,
    /// Raised by every new owner; a write under an older epoch changes nothing.
    pub epoch: i64,
    /// The owner; `None` if the lease has expired.
    pub owner: Option<String>,
    /// What is left of the lease, seconds.
    pub lease_seconds_left: f64,
    /// Seconds since the cursor was last written.
    pub cursor_age_seconds: f64,
}

/// The bound up to which rows of a kind are counted one by one, so that the cost of a status is
/// bounded.
pub(crate) const COUNTED_MAX: i64 = 10_000;

/// Everything that `oncebox status` and `/metrics` show of a database. A count of 10,000 means
/// 10,000 or more, so that the cost of a status is bounded; `pending` and `inbox_rows` are
/// estimates above that, on SQLite `inbox_rows` too ends at 10,000.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize)]
pub struct Status {
    /// The state of every shard of the outbox.
    pub shards: Vec<ShardStatus>,
    /// Rows that the broker has not yet stored, without held and dead ones.
    pub pending: u64,
    /// Age of the oldest of them, seconds.
    pub oldest_pending_age_seconds: f64,
    /// Held rows of the outbox ([`DeadState::Held`]).
    pub held: u64,
    /// How long ago the first of them was enqueued, seconds.
    pub oldest_held_age_seconds: f64,
    /// Dead outbox rows: messages that could not be sent.
    pub dead: u64,
    /// The state of each consumer.
    pub consumers: Vec<ConsumerStatus>,
    /// E-mails not yet sent, up to 10,000.
    pub emails_pending: u64,
    /// What waits for a person, or for a process that does not come.
    pub unattended: Unattended,
}

/// E-mails, operations and keys that wait for a person, or for a process that does not come. Each
/// number is counted among 10,000 rows at most, so that its cost is bounded. An age is 0 where
/// nothing waits.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize)]
pub struct Unattended {
    /// How long ago the oldest e-mail was queued that is due, or was tried in vain, seconds.
    pub oldest_email_age_seconds: f64,
    /// E-mails that failed for good, and that nobody queued again or deleted.
    pub emails_failed: u64,
    /// Operations in phases that are parked: they wait for a person.
    pub operations_parked: u64,
    /// How long ago the first of them was parked, seconds.
    pub oldest_parked_age_seconds: f64,
    /// Operations in phases that are due, and that no process drives.
    pub operations_undriven: u64,
    /// For how long the first of them has had no driver, seconds.
    pub oldest_undriven_age_seconds: f64,
    /// Keys whose outcome nobody knows, without those of operations in phases.
    pub keys_unknown: u64,
    /// How long ago the first of them was claimed, seconds.
    pub oldest_unknown_age_seconds: f64,
}

/// The state of one consumer.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize)]
pub struct ConsumerStatus {
    /// The name of the consumer, under which it registered.
    pub name: String,
    /// Messages that wait for a retry, or behind one.
    pub waiting: u64,
    /// Messages behind a dead one of their key. They are not counted in `waiting`.
    pub held: u64,
    /// How long ago the first message that waits or is held was stored, seconds.
    pub oldest_waiting_age_seconds: f64,
    /// Messages of the consumer that are stored as dead.
    pub dead: u64,
    /// Inbox rows of the consumer; above 10,000 an estimate, on SQLite 10,000.
    pub inbox_rows: u64,
    /// How many seconds ago one of its processes was last seen; each notes its presence every ten
    /// seconds.
    pub seen_seconds_ago: f64,
}

/// For each topic the index of its first row, in a list in position order; rows without a topic are
/// passed over. Rows that are held for their destination wait behind the first one of their topic.
pub(crate) fn firsts<'a>(topics: impl Iterator<Item = Option<&'a str>>) -> Vec<usize> {
    let mut seen = std::collections::HashSet::new();
    let is_first = |(at, topic): (usize, Option<&'a str>)| topic.filter(|topic| seen.insert(*topic)).map(|_| at);
    topics.enumerate().filter_map(is_first).collect()
}

/// The numbers of waiting and of held messages, from three counts: all rows in state `waiting`,
/// those of them that are held, and those with a due time. Each is counted up to [`COUNTED_MAX`].
/// If `all` has reached it, the number of waiting ones is a lower bound: at least those that have a
/// due time.
pub(crate) fn waiting_and_held(all: i64, held: i64, due: i64) -> (u64, u64) {
    let others = all - held;
    let waiting = if all < COUNTED_MAX { others } else { others.max(due) };
    (u64::try_from(waiting).unwrap_or(0), u64::try_from(held).unwrap_or(0))
}

/// Where a message is dead, held or waiting: in the outbox, or with a consumer.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeadPlace {
    /// Could not be sent: the outbox.
    Outbox,
    /// Could not be handled: this consumer.
    Consumer(String),
}

/// The state of a message that is not sent or not handled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DeadState {
    /// Refused because of the message itself, or given up after its last try.
    #[default]
    Dead,
    /// It waits for a dead message of its key, in the outbox also for a held one, or its topic
    /// cannot be sent to.
    Held,
    /// Only of a consumer: it is tried again when it is due, or waits for such a message of its
    /// key.
    Waiting,
}

impl DeadState {
    /// The reason of a message that is not dead and whose row stores none.
    pub(crate) fn reason_unless_stored(self, has_next_try: bool) -> &'static str {
        match (self, has_next_try) {
            (Self::Held, _) => "behind a dead message of its key",
            (_, true) => "retry",
            (_, false) => "behind a waiting message of its key",
        }
    }
}

/// Which dead, held or waiting messages an operator asks for; all conditions must be met.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeadFilter {
    /// Only in these states; empty means dead.
    pub states: Vec<DeadState>,
    /// Only messages with one of these numbers, as `dead list` shows them: `o17` (outbox position)
    /// or `c9` (consumer row); empty: any.
    pub numbers: Vec<String>,
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
    /// The states to search for.
    pub(crate) fn states(&self) -> &[DeadState] {
        if self.states.is_empty() { &[DeadState::Dead] } else { &self.states }
    }
}

/// The part of an error that a database keeps: at most its first 4,096 bytes, cut between
/// characters.
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
    /// Whether it is dead, held or waiting.
    pub state: DeadState,
    /// Where it is: in the outbox, or with a consumer.
    pub place: DeadPlace,
    /// The id under which it is published or deduplicated.
    pub message_id: Uuid,
    /// The id as its producer wrote it; `None` if that is the UUID `message_id`.
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
    /// When it became dead, or held in the outbox; for another message of a consumer, when it
    /// was stored.
    pub since: DateTime<Utc>,
    /// When it is tried next. None if it is dead, if it waits for an earlier message of its key, or
    /// if its topic cannot be sent to. The relay tries such a topic at the probe interval of the
    /// publisher, and one that does not answer ever more rarely, up to every 30 s. When that
    /// succeeds, it sends its messages.
    pub next_try: Option<DateTime<Utc>>,
    /// How many messages of its key stand behind it. For the first message of a topic that is held
    /// for its destination: how many of the topic are held behind it. Counted up to 10,000, which
    /// means 10,000 or more.
    pub behind: u64,
    /// The number of the dead message of its key that holds it; `None` where none does.
    pub held_by: Option<String>,
    /// The request of an operator that is not carried out yet.
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

/// An act of an operator on dead, held or waiting messages. Where a consumer's message is not dead,
/// [`Redrive`](Self::Redrive) and [`Discard`](Self::Discard) bury it first, in the same
/// transaction. Refused are a redrive of one that waits for an earlier message of its key, a new id
/// for one that is not dead, and every act on one that a process is handling now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OperatorAct {
    /// Send or handle it again, with the same id: inboxes still deduplicate.
    Redrive,
    /// Send or handle it again, edited or unchanged, under a new id. The old id goes into the
    /// header `oncebox-causation-id`.
    RedriveAs {
        /// The id that the message is sent or handled under from now on.
        id: Uuid,
        /// The new payload, where it is edited.
        payload: Option<Vec<u8>>,
    },
    /// No more tries: it is dead until another act.
    Bury,
    /// Delete it; the messages behind it are sent or handled.
    Discard,
}

impl OperatorAct {
    /// The name of the act in audit rows.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Redrive => "redrive",
            Self::RedriveAs { .. } => "redrive-as",
            Self::Bury => "bury",
            Self::Discard => "discard",
        }
    }

    /// Whether the message must be buried before this act, because it belongs to a consumer and is
    /// not dead. The act is refused where it has no meaning for a message in this state.
    pub(crate) fn buries(&self, message: &DeadMessage) -> Result<bool, StoreError> {
        let refused = |why: &str| Err(StoreError::Refused(format!("{}: {why}", message.number)));
        let is_dead = message.state == DeadState::Dead;
        match (&message.place, self) {
            (DeadPlace::Outbox, Self::Bury) => refused("only a message of a consumer is buried"),
            (DeadPlace::Outbox, Self::Discard) => Ok(false),
            (DeadPlace::Outbox, _) if !is_dead => match &message.held_by {
                Some(dead) => refused(&format!(
                    "it is held behind {dead}, the dead message of its key: act on that one; then it is sent by itself"
                )),
                None => refused(
                    "it is held: repair its topic, or act on the dead message of its key before it; then it is sent by itself",
                ),
            },
            (DeadPlace::Consumer(_), Self::Bury) if is_dead => refused("it is dead already"),
            (DeadPlace::Consumer(_), Self::Redrive) if !is_dead && message.next_try.is_none() => {
                match &message.held_by {
                    Some(dead) => refused(&format!(
                        "it waits for an earlier message of its key, {dead}, which is dead: redrive or discard that one"
                    )),
                    None => refused("it waits for an earlier message of its key, and is tried after that one"),
                }
            }
            (DeadPlace::Consumer(_), Self::RedriveAs { .. }) if !is_dead => {
                refused("only a dead message gets a new id; bury it first")
            }
            _ => Ok(!is_dead),
        }
    }

    /// The error for a message that cannot be buried now, because it runs or a copy of it is dead.
    pub(crate) fn runs_now(message: &DeadMessage) -> StoreError {
        StoreError::Refused(format!(
            "{}: a process is handling it now, or another copy of it is dead; look again with `oncebox dead list`",
            message.number
        ))
    }
}

/// The reason of a message that an operator buried.
pub(crate) const BURIED: &str = "buried";

/// The result of a redrive of a consumer's dead message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Redriven {
    /// It waits for its next try.
    Waits,
    /// Another copy of it was handled after this one was stored as dead: it is discarded.
    AlreadyHandled,
}

impl Redriven {
    /// The detail of the audit row: why the message was dead, and whether it was discarded.
    pub(crate) fn detail(self, reason: &str) -> String {
        match self {
            Self::Waits => reason.to_owned(),
            Self::AlreadyHandled => format!("{reason}; discarded: another copy was handled since"),
        }
    }
}

/// Decides what a redrive does. `stood` is about the inbox row of the id before the act inserted
/// one: none, or whether it has the same content as the message.
///
/// A message that died as too old or from the future has no inbox row; every other dead message has
/// its own.
pub(crate) fn redriven(dead: &DeadMessage, act: &OperatorAct, stood: Option<bool>) -> Result<Redriven, StoreError> {
    let is_renamed = matches!(act, OperatorAct::RedriveAs { .. });
    match stood {
        None => Ok(Redriven::Waits),
        Some(true) if !is_renamed => {
            let has_own_row = !Verdict::left_no_inbox_row(&dead.reason);
            Ok(if has_own_row { Redriven::Waits } else { Redriven::AlreadyHandled })
        }
        Some(_) => Err(StoreError::Refused(format!(
            "{}: the inbox has this message id already, so this message would be skipped; \
             choose another id by `--new-id`",
            dead.number
        ))),
    }
}

/// The result of an act.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct OperatorOutcome {
    /// Numbers of the messages that the act is for.
    pub numbers: Vec<String>,
    /// Those of them that a redrive discarded: another copy was handled since.
    pub already_handled: Vec<String>,
    /// True if this only reports what would be done.
    pub dry_run: bool,
}

impl OperatorOutcome {
    /// Adds the result for one message.
    pub(crate) fn add(&mut self, message: &DeadMessage, done: Redriven) {
        self.numbers.push(message.number.clone());
        if done == Redriven::AlreadyHandled {
            self.already_handled.push(message.number.clone());
        }
    }
}

/// Who acts, why, and within which limits. Every act writes an audit row, unless it only reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ActContext {
    /// The person or program that acts, for the audit row.
    pub actor: String,
    /// Why the act is done, for the audit row.
    pub reason: String,
    /// Only report what would be done.
    pub dry_run: bool,
    /// A row of the outbox that was enqueued longer ago is not redriven with its own id, because
    /// inboxes may have forgotten it. `None`: no limit.
    pub redrive_age_max: Option<Duration>,
}

/// A consumer that was seen within this time counts as present: a process of it runs, or may come
/// back by itself.
pub(crate) const CONSUMER_PRESENT: Duration = Duration::from_secs(300);

/// What a consumer had that is forgotten. Each is counted up to 10,000, which means 10,000 or more.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct Forgotten {
    /// Messages that waited, were held or dead.
    pub messages: u64,
    /// Rows that its inbox had.
    pub inbox_rows: u64,
}

impl Forgotten {
    /// The name that a consumer has while its rows are deleted. A process that starts with the old
    /// name meanwhile registers a new consumer.
    pub(crate) fn name(consumer: i32) -> String {
        format!("(forgotten {consumer})")
    }

    /// Refuses to forget a consumer while a process of it may run.
    pub(crate) fn check(name: &str, seen_seconds_ago: f64) -> Result<(), StoreError> {
        if seen_seconds_ago >= CONSUMER_PRESENT.as_secs_f64() {
            return Ok(());
        }
        Err(StoreError::Refused(format!(
            "consumer `{name}` was seen {seen_seconds_ago:.0} s ago; stop its processes, and try again when it was away for {}",
            humantime::format_duration(CONSUMER_PRESENT)
        )))
    }

    pub(crate) fn unknown(name: &str) -> StoreError {
        StoreError::Refused(format!(
            "there is no consumer `{name}`; `oncebox consumers list` shows those that are there"
        ))
    }
}

/// One act of an operator, as the audit shows it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct AuditEntry {
    /// When, by the database's clock.
    pub at: DateTime<Utc>,
    /// The person or program that acted.
    pub actor: String,
    /// The name of the act: `redrive`, `discard`, `release`, ...
    pub act: String,
    /// Why it was done, as the operator said it.
    pub reason: String,
    /// What the act was on: a topic, the outbox, a consumer, an operation.
    pub place: String,
    /// The number of the message, or the hash of the key; empty if the act was on neither.
    pub number: String,
    /// The id of the message or the operation; nil if the act was on neither.
    pub message_id: Uuid,
    /// Further details, such as the state before the act.
    pub detail: String,
}

/// A connection that waits for a lock.
#[derive(Debug, Clone, PartialEq)]
pub struct LockWait {
    /// Its id on the server.
    pub connection: String,
    /// The first 100 characters of the statement that waits. Values that stand in its text are
    /// shown; bound ones are not.
    pub statement: String,
    /// For how long, seconds.
    pub seconds: f64,
    /// The connections that hold the lock: number, name of the program, what it does. Empty where
    /// the server does not tell.
    pub holders: Vec<String>,
    /// For how long the oldest transaction of the holders has been open, seconds; `None` where the
    /// server does not tell. A handler gives up a wait after seconds and begins anew, so its own
    /// wait is never long.
    pub held_seconds: Option<f64>,
}

impl DeadMessage {
    /// The id as its producer wrote it; `None` if that is the UUID `id`.
    pub(crate) fn sent_id(id: Uuid, text: String) -> Option<String> {
        (text.parse() != Ok(id)).then_some(text)
    }
}

/// What an operator sees of a database, and the acts on it.
#[async_trait]
pub trait Operator: Debug + Send + Sync {
    /// The current state of shards, consumers, dead messages and e-mails.
    async fn status(&self) -> Result<Status, StoreError>;

    /// As [`Operator::status`], but with the inbox rows of an earlier status (0 for a consumer that
    /// is not in it) and what was unattended there, because to count them takes longer than all
    /// the rest.
    async fn status_since(&self, earlier: &Status) -> Result<Status, StoreError>;

    /// Connections that have waited for a lock for longer than this, as far as the server tells. It
    /// shows handlers that wait for a lock, which no table of oncebox does.
    async fn lock_waits(&self, longer_than: Duration) -> Result<Vec<LockWait>, StoreError>;

    /// The acts of operators, newest first; with an id only those on this message or operation.
    async fn audit(&self, id: Option<Uuid>, limit: usize) -> Result<Vec<AuditEntry>, StoreError>;

    /// Forgets a consumer that is gone: deletes its waiting, held and dead messages, its inbox and
    /// its name. A consumer that starts with the same name is a new one. With `dry_run` the rows
    /// are only counted.
    ///
    /// # Errors
    /// [`StoreError::Refused`] where the consumer is not known, or was seen within the last five
    /// minutes.
    async fn forget_consumer(&self, name: &str, context: &ActContext) -> Result<Forgotten, StoreError>;

    /// Messages that match the filter: those with the lowest numbers, sorted by the time at which
    /// they became dead or were stored. Of those that wait, the ones that are due first.
    async fn dead(&self, filter: &DeadFilter) -> Result<Vec<DeadMessage>, StoreError>;

    /// The numbers of all messages that match, oldest first, whatever the limit of the filter is.
    /// Messages with an open request of an operator are left out. With this list a caller acts on
    /// very many messages in batches, and not on those that arrive meanwhile.
    async fn dead_numbers(&self, filter: &DeadFilter) -> Result<Vec<String>, StoreError>;

    /// For each topic that cannot be sent to, the first message that the outbox holds for it; at
    /// most this many.
    async fn held_topics(&self, limit: usize) -> Result<Vec<DeadMessage>, StoreError>;

    /// Repairs positions that the relay would never read. If the sequence of the database is behind
    /// the cursor, it is set above it. Messages that the relay has passed get new positions, in
    /// order; on SQLite the cursor goes back to them. Some messages may be sent a second time, none
    /// is lost. Returns a sentence for each repair and writes an audit row; with `dry_run` nothing
    /// is written.
    async fn mend(&self, context: &ActContext) -> Result<Vec<String>, StoreError>;

    /// Acts on the messages that [`dead`](Self::dead) finds by this filter, with an audit row for
    /// each. For outbox rows it writes a request that the owner of the shard carries out. Consumer
    /// rows change at once (redrive: due now, or behind an earlier message of its key; discard:
    /// deleted, and the next message is due).
    ///
    /// # Errors
    /// [`StoreError::Refused`] if the act has no meaning for one of the messages in its state, or a
    /// process is handling it: then nothing is changed.
    async fn act(
        &self,
        filter: &DeadFilter,
        act: &OperatorAct,
        context: &ActContext,
    ) -> Result<OperatorOutcome, StoreError>;
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
