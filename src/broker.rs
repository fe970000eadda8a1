//! How bytes leave and arrive: the traits that a broker adapter fulfils.
//!
//! One adapter, one folder, the same file names in each: `config`, `publisher`, `subscriber` (and
//! `topology` where the broker has one). The suite in `oncebox-testkit` is the executable
//! definition and runs on any adapter.
//!
//! Guarantees: a row is settled only by the broker's own proof; within a session the broker takes a
//! prefix of what was sent per key (R15); acknowledgements never run ahead of what the runtime said
//! is committed.
//!
//! Not here: SQL of the outbox or inbox, decisions on refusals (room `policy`), retries over
//! sessions (room `runtime`).

#[cfg(feature = "embedded")]
pub mod embedded;
pub(crate) mod envelope;
#[cfg(feature = "kafka")]
pub mod kafka;
#[cfg(feature = "rabbitmq")]
pub mod rabbitmq;
pub(crate) mod share;

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::error::BrokerError;
use crate::message::{Arrived, OutgoingMessage};
use crate::policy::horizon::TopicRetention;
use crate::policy::position::{Position, Start};

/// What is known of a topic before anything is produced to it (R19).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TopicState {
    /// It is there, as far as the broker lets one see.
    Ready,
    /// It is not: rows of it are diverted with this reason.
    NotReady(String),
}

/// Why the broker did not take a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// For what this message is: too large, invalid; or for what another is that went with it, so
    /// only alone it is sure. Nothing of its key that was handed over with it and is not on its way
    /// is sent (`Behind`).
    Message(String),
    /// It was not sent, for an earlier message of its key was refused. What is handed over once the
    /// runtime has taken this outcome is meant.
    Behind(String),
    /// For where it goes: unknown topic, no route, denied. Never the message's fault. Nothing of
    /// the topic that was not on its way by then is sent until the runtime has taken this outcome;
    /// rows of other topics go on.
    Destination(String),
    /// Anything else, a nack too: the session is in doubt.
    Session(String),
}

/// The broker's word on one row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settled {
    /// The tag it was sent with.
    pub tag: u64,
    /// Where it went, or why not.
    pub outcome: Result<Receipt, Refusal>,
}

/// Where a message went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Receipt {
    /// In a log: partition and offset of the record.
    Offset {
        /// The partition that the record was appended to, from 0.
        partition: i32,
        /// The position of the record in its partition.
        offset: i64,
    },
    /// A publisher confirm without a return.
    Confirm,
}

/// A broker as configured; cheap, makes sessions.
#[async_trait]
pub trait Broker: Debug + Send + Sync {
    /// `kafka`, `rabbitmq`, `embedded` or `memory`, for labels and messages.
    fn name(&self) -> &'static str;

    /// True for a log whose coordinates mean the same for ever (Kafka, embedded); false for a queue
    /// (RabbitMQ), which says itself what it delivers again.
    fn is_log(&self) -> bool {
        true
    }

    /// Opens a fresh publishing session, warmed so that the first message does not wait.
    async fn publisher(&self) -> Result<Box<dyn Publisher>, BrokerError>;

    /// Where the messages of a subscription stand in this broker: in its topics, or in its queues.
    fn places(&self, subscription: &Subscription) -> Vec<String> {
        subscription.topics.clone()
    }

    /// Joins as a consumer.
    async fn subscriber(&self, subscription: &Subscription) -> Result<Box<dyn Subscriber>, BrokerError>;

    /// How long these topics keep what a consumer may read again, the longest of them; none where
    /// the broker does not tell, or none of them is there yet.
    async fn retention(&self, _topics: &[String]) -> Result<Option<TopicRetention>, BrokerError> {
        Ok(None)
    }

    /// Declares what the publisher's side owns: the exchange on RabbitMQ, topics where
    /// `create_topics` is on.
    async fn declare(&self, topics: &[String]) -> Result<(), BrokerError>;

    /// Looks for what breaks or weakens a promise: each answer is (name, severity as in `Finding`,
    /// detail, remedy).
    async fn check(&self, subscriptions: &[Subscription]) -> Result<Vec<BrokerFinding>, BrokerError>;

    /// Reads every message that a topic holds now, from the beginning, without a group and without
    /// acknowledging: for `demo`, `bench` and tests. RabbitMQ has no such read: it answers with
    /// what a tap queue collected since [`Broker::tap`].
    async fn read_all(&self, topic: &str) -> Result<Vec<Arrived>, BrokerError>;

    /// Makes sure that [`Broker::read_all`] will see what is published from now on (a tap queue on
    /// RabbitMQ, else nothing).
    async fn tap(&self, topic: &str) -> Result<(), BrokerError>;

    /// Takes topics, queues and groups of these subscriptions away, with everything in them: for
    /// `demo`, `bench` and tests, which made them. What is not there is no error.
    async fn remove(&self, subscriptions: &[Subscription]) -> Result<(), BrokerError>;
}

/// One answer of [`Broker::check`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BrokerFinding {
    /// What was looked at.
    pub name: String,
    /// True where a promise is broken, false where all is well or only weaker.
    pub refused: bool,
    /// True where messages stand that nobody reads, or with which nobody gets on.
    pub stuck: bool,
    /// What was found, in words for the operator.
    pub detail: String,
    /// What the operator should do; `None` where nothing is to be done.
    pub remedy: Option<String>,
}

/// Between two looks at a group or queue that has members and messages: many times what one at work
/// needs to get on.
#[cfg(any(feature = "kafka", feature = "rabbitmq", feature = "embedded"))]
pub(crate) const BETWEEN_LOOKS: std::time::Duration = std::time::Duration::from_secs(2);

/// What to do where messages stand though somebody is there to handle them.
#[cfg(any(feature = "kafka", feature = "rabbitmq", feature = "embedded"))]
pub(crate) const STANDS_STILL: &str =
    "see `/readyz` and the log of its processes: the database, a lock, or a slow handler";

/// One publishing session. Any error ends it: drop it and start again from the first row that is
/// not proven.
#[async_trait]
pub trait Publisher: Send {
    /// Whether topics are there, each named once, in their order. Cached; asks the broker again
    /// about those that were not there. Cheap for topics known to be ready, and one request for
    /// many where the broker can tell. Where a topic was refused in this session and the runtime
    /// took that outcome, asking for it again means that what is sent to it from now on is meant.
    async fn topics(&mut self, topics: &[String]) -> Result<Vec<TopicState>, BrokerError>;

    /// The same for one.
    async fn topic(&mut self, topic: &str) -> Result<TopicState, BrokerError> {
        let states = self.topics(&[topic.to_owned()]).await?;
        states.into_iter().next().ok_or_else(|| BrokerError::Session(format!("nothing is known of topic `{topic}`")))
    }

    /// Hands rows over, in order, each with a tag that ascends within the session. Returns when the
    /// client holds them all; waits only where a bound of the client is reached.
    ///
    /// # Cancel safety
    /// None: drop the session with it.
    async fn send(&mut self, rows: Vec<(u64, OutgoingMessage)>) -> Result<(), BrokerError>;

    /// Waits until the broker said something, and appends it. Returns without outcomes where
    /// nothing is in flight.
    ///
    /// # Cancel safety
    /// Safe: no outcome is lost when dropped.
    async fn settle(&mut self, settled: &mut Vec<Settled>) -> Result<(), BrokerError>;

    /// Why the broker takes nothing for now (a memory alarm), which is no failure.
    fn blocked(&self) -> Option<String> {
        None
    }

    /// Ends the session within a deadline.
    async fn close(self: Box<Self>);
}

/// What a consumer subscribes to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subscription {
    /// The consumer's name: the group on Kafka and embedded.
    pub consumer: String,
    /// The topics that the consumer reads.
    pub topics: Vec<String>,
    /// Another group name than the consumer's.
    pub group: Option<String>,
    /// Queue names by topic, where not `<topic>.<consumer>`.
    pub queues: BTreeMap<String, String>,
    /// Upper bound of deliveries that are neither acknowledged nor
    /// [`finished`](Subscriber::finished) nor [set aside](Subscriber::set_aside).
    pub in_flight_max: usize,
    /// How long a revoked partition may drain.
    pub drain: Duration,
}

impl Subscription {
    /// Defaults around a consumer and its topics.
    pub fn new(consumer: impl Into<String>, topics: Vec<String>) -> Self {
        Self {
            consumer: consumer.into(),
            topics,
            group: None,
            queues: BTreeMap::new(),
            in_flight_max: 2_000,
            drain: Duration::from_secs(10),
        }
    }

    /// The name of the consumer group: `group`, or the consumer's name where that is `None`.
    #[must_use]
    pub fn group(&self) -> &str {
        self.group.as_deref().unwrap_or(&self.consumer)
    }

    /// The queue of a topic.
    #[must_use]
    pub fn queue(&self, topic: &str) -> String {
        self.queues.get(topic).cloned().unwrap_or_else(|| format!("{topic}.{}", self.consumer))
    }
}

/// One assignment of one ordered source: a partition of a topic, or a queue on one channel.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PartitionId {
    /// Topic, or queue on RabbitMQ.
    pub place: Arc<str>,
    /// Partition; 0 on RabbitMQ.
    pub partition: i32,
    /// Distinguishes assignments of the same partition in one process.
    pub generation: u64,
}

/// One message that the broker delivered, and where it came from.
#[derive(Debug)]
pub struct Delivery {
    /// Where it came from.
    pub source: PartitionId,
    /// Offset, or delivery tag: ascends within a source.
    pub sequence: i64,
    /// The broker says that it was delivered before (RabbitMQ).
    pub redelivered: bool,
    /// The message itself, as the adapter took it from the broker.
    pub arrived: Arrived,
}

/// What a subscriber tells the runtime.
#[derive(Debug)]
pub enum Event {
    /// These sources are ours from now on.
    Assigned(Vec<PartitionId>),
    /// Deliveries, in the order of their sources.
    Deliveries(Vec<Delivery>),
    /// These sources are to be given up: start nothing more of them, finish what runs, acknowledge,
    /// then drop `done`.
    Revoked {
        /// The sources that this consumer loses.
        sources: Vec<PartitionId>,
        /// True where the broker has given them to somebody else already: nothing can be
        /// acknowledged.
        lost: bool,
        /// Dropped when the runtime is through; the adapter waits for it at most the drain time.
        done: RevokeGuard,
    },
}

/// Tells the adapter, when dropped, that the runtime is done with revoked sources.
#[derive(Debug)]
pub struct RevokeGuard {
    _sender: Option<std::sync::mpsc::SyncSender<()>>,
    _shared: Option<Arc<RevokeGuard>>,
}

impl RevokeGuard {
    /// A guard and the side that waits for it: `recv_timeout` ends when the guard is dropped.
    #[must_use]
    pub fn pair() -> (Self, std::sync::mpsc::Receiver<()>) {
        let (sender, receiver) = std::sync::mpsc::sync_channel(1);
        (Self { _sender: Some(sender), _shared: None }, receiver)
    }

    /// A guard nobody waits for.
    #[must_use]
    pub fn idle() -> Self {
        Self { _sender: None, _shared: None }
    }

    /// One share of a guard: the guard is dropped with its last share.
    #[must_use]
    pub fn shared(guard: Arc<Self>) -> Self {
        Self { _sender: None, _shared: Some(guard) }
    }
}

/// How a source of a log began.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Begun {
    /// The source that began.
    pub source: PartitionId,
    /// Which topic of this name it is, where the broker tells.
    pub topic_id: Option<String>,
    /// Where it begins, and why not where it stood.
    pub start: Start,
}

/// A consumer's connection to the broker.
#[async_trait]
pub trait Subscriber: Send {
    /// Waits for the next event.
    ///
    /// # Errors
    /// Any error ends this subscriber: drop it (deliveries that were not acknowledged come again)
    /// and subscribe anew.
    ///
    /// # Cancel safety
    /// Safe: no event is lost when dropped.
    async fn next(&mut self) -> Result<Event, BrokerError>;

    /// Where sources that were just assigned begin (`policy::position`); `remembered` is what the
    /// consumer's database knows of each. A source for which it is not called before the following
    /// `next` begins where the group stands. A queue has no positions: its answer is empty.
    async fn begin(&mut self, _remembered: Vec<(PartitionId, Option<Position>)>) -> Result<Vec<Begun>, BrokerError> {
        Ok(Vec::new())
    }

    /// Why nothing comes for now, where the broker is away and the client waits for it.
    fn away(&self) -> Option<String> {
        None
    }

    /// All deliveries of this source up to and including `through` are committed.
    ///
    /// # Errors
    /// An acknowledgement that did not arrive is no loss: the inbox knows the message. Errors that
    /// end the subscriber come from `next`.
    async fn acknowledge(&mut self, source: &PartitionId, through: i64) -> Result<(), BrokerError>;

    /// These deliveries are committed, and an older one of their source is not, so that
    /// [`acknowledge`](Self::acknowledge) cannot tell of them yet. From now on they count neither
    /// as deliveries nor as bytes in flight. The runtime says so where room is needed, not each
    /// time.
    async fn finished(&mut self, _source: &PartitionId, _sequences: &[i64]) {}

    /// This delivery waits for a transaction of another process. It counts no more against
    /// `in_flight_max`; its bytes still count.
    fn set_aside(&mut self, _source: &PartitionId, _sequence: i64) {}

    /// True where the group has said what this member has, and it is nothing: there are more
    /// members than partitions.
    fn has_no_share(&self) -> bool {
        false
    }

    /// Asks the broker for nothing more for now; `next` must still be called (heartbeats,
    /// rebalances).
    fn pause(&mut self, paused: bool);

    /// True once assigned and once every source has delivered what stood in it when it was
    /// assigned.
    async fn caught_up(&mut self) -> Result<bool, BrokerError>;

    /// A planned end: acknowledgements have arrived when it returns; nothing is handed back out of
    /// order (R29).
    async fn close(self: Box<Self>);
}
