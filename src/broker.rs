//! The traits that a broker adapter implements, for publishing and for consuming.
//!
//! One adapter, one folder, the same file names in each: `config`, `publisher`, `subscriber` (and
//! `topology` where the broker has one). The suite in `oncebox-testkit` is the executable
//! definition and runs on any adapter.
//!
//! Guarantees: a row is settled only by the broker's own proof. Within a session the broker takes,
//! for each key, a prefix of what was sent (R15). An acknowledgement is sent only for deliveries
//! that the runtime reported as committed.
//!
//! Not here: SQL of the outbox or inbox, decisions about refusals (`outbox::rules`), retries across
//! sessions (`outbox::relay`, `inbox::consumer`).

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
use crate::inbox::rules::horizon::TopicRetention;
use crate::inbox::rules::position::{Position, Start};
use crate::message::{Arrived, OutgoingMessage};

/// Whether a topic can be sent to. The relay asks before it sends anything to the topic (R19).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TopicState {
    /// The topic exists and can be sent to, as far as the broker shows it.
    Ready,
    /// The topic cannot be sent to. Its rows are diverted, and this is the reason.
    NotReady(String),
}

/// Why the broker did not take a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// The broker refuses the message itself (too large, invalid), or it refuses a batch because of
    /// another message in it: only a refusal of a message that was sent alone is certain. Later
    /// messages of its key that are not on their way yet are not sent: each gets `Behind`.
    Message(String),
    /// The message was not sent, because an earlier message of its key was refused. Messages that
    /// the runtime sends after it received this outcome are sent normally.
    Behind(String),
    /// The broker refuses the destination: unknown topic, no route, access denied. It says nothing
    /// against the message. Messages of this topic that are not on their way yet are not sent until
    /// the runtime received this outcome. Other topics go on.
    Destination(String),
    /// Any other failure, also a nack. What happened is not known, so the session must end.
    Session(String),
}

/// The broker's result for one row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settled {
    /// The tag that [`Publisher::send`] was given for the row.
    pub tag: u64,
    /// Where the message went, or why the broker did not take it.
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

/// A configured broker. Cheap to hold; it opens publishing sessions and subscribers.
#[async_trait]
pub trait Broker: Debug + Send + Sync {
    /// `kafka`, `rabbitmq`, `embedded` or `memory`, for metric labels and messages.
    fn name(&self) -> &'static str;

    /// True for a log, whose coordinates never change their meaning (Kafka, embedded). False for a
    /// queue (RabbitMQ), which itself marks what it delivers again.
    fn is_log(&self) -> bool {
        true
    }

    /// Opens a new publishing session. It is warmed up, so that the first message does not wait.
    async fn publisher(&self) -> Result<Box<dyn Publisher>, BrokerError>;

    /// The topics or queues of this broker in which the messages of a subscription are.
    fn places(&self, subscription: &Subscription) -> Vec<String> {
        subscription.topics.clone()
    }

    /// Joins the consumer group, or the queues, of a subscription.
    async fn subscriber(&self, subscription: &Subscription) -> Result<Box<dyn Subscriber>, BrokerError>;

    /// The longest time for which any of these topics keeps messages that a consumer may read
    /// again. `None` where the broker does not tell, or where none of the topics exists yet.
    async fn retention(&self, _topics: &[String]) -> Result<Option<TopicRetention>, BrokerError> {
        Ok(None)
    }

    /// Creates what belongs to the publisher's side: the exchange on RabbitMQ, and topics where
    /// `create_topics` is on.
    async fn declare(&self, topics: &[String]) -> Result<(), BrokerError>;

    /// Examines the broker for anything that breaks or weakens a promise. Each [`BrokerFinding`]
    /// has a name, what was found, and the remedy where one is needed.
    async fn check(&self, subscriptions: &[Subscription]) -> Result<Vec<BrokerFinding>, BrokerError>;

    /// Reads every message that a topic holds now, from the beginning, without a group and without
    /// acknowledging: for `demo`, `bench` and tests. RabbitMQ has no such read: it returns what a
    /// tap queue collected since [`Broker::tap`].
    async fn read_all(&self, topic: &str) -> Result<Vec<Arrived>, BrokerError>;

    /// Makes sure that [`Broker::read_all`] will return what is published from now on. It makes a
    /// tap queue on RabbitMQ and does nothing on the others.
    async fn tap(&self, topic: &str) -> Result<(), BrokerError>;

    /// Deletes the topics, queues and groups of these subscriptions with all their messages: for
    /// `demo`, `bench` and tests, which made them. One that does not exist is no error.
    async fn remove(&self, subscriptions: &[Subscription]) -> Result<(), BrokerError>;
}

/// One answer of [`Broker::check`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BrokerFinding {
    /// What was examined: a broker, topic, group or queue.
    pub name: String,
    /// True where a promise is broken; false where all is well or a promise is only weaker.
    pub refused: bool,
    /// True where messages are not read by anyone, or are not making progress.
    pub stuck: bool,
    /// What was found, in words for the operator.
    pub detail: String,
    /// What the operator should do; `None` where nothing is to be done.
    pub remedy: Option<String>,
}

/// The pause between two looks at a group or queue that has members and messages. It is many times
/// longer than a working consumer needs to make progress.
#[cfg(any(feature = "kafka", feature = "rabbitmq", feature = "embedded"))]
pub(crate) const BETWEEN_LOOKS: std::time::Duration = std::time::Duration::from_secs(2);

/// The remedy where messages make no progress although a consumer is connected.
#[cfg(any(feature = "kafka", feature = "rabbitmq", feature = "embedded"))]
pub(crate) const STANDS_STILL: &str =
    "see `/readyz` and the log of its processes: the database, a lock, or a slow handler";

/// One publishing session. Any error ends it: drop it, open a new one and start again from the
/// first row that is not proven.
#[async_trait]
pub trait Publisher: Send {
    /// The state of each of these topics, in the order of the names; no name may be given twice.
    /// States are cached: a topic that is known to be ready costs nothing; the broker is asked
    /// again about the others, in one request where it allows that. If a topic was refused in this
    /// session and the runtime received that outcome, asking for the topic lifts the block:
    /// messages that are handed over from now on are sent.
    async fn topics(&mut self, topics: &[String]) -> Result<Vec<TopicState>, BrokerError>;

    /// The state of one topic, as [`topics`](Self::topics) tells it.
    async fn topic(&mut self, topic: &str) -> Result<TopicState, BrokerError> {
        let states = self.topics(&[topic.to_owned()]).await?;
        states.into_iter().next().ok_or_else(|| BrokerError::Session(format!("nothing is known of topic `{topic}`")))
    }

    /// Hands rows over in order, each with a tag that ascends within the session. Returns when the
    /// client holds all of them; waits only while a bound of the client is reached.
    ///
    /// # Cancel safety
    /// Not cancel safe: when this future is dropped, drop the session too.
    async fn send(&mut self, rows: Vec<(u64, OutgoingMessage)>) -> Result<(), BrokerError>;

    /// Waits until the broker confirmed or refused at least one row, and appends these outcomes.
    /// Returns without outcomes where nothing is in flight.
    ///
    /// # Cancel safety
    /// Safe: no outcome is lost when the future is dropped.
    async fn settle(&mut self, settled: &mut Vec<Settled>) -> Result<(), BrokerError>;

    /// Why the broker accepts no messages for now (a memory alarm). This is no failure.
    fn blocked(&self) -> Option<String> {
        None
    }

    /// Ends the session, within a deadline of its own.
    async fn close(self: Box<Self>);
}

/// What a consumer subscribes to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subscription {
    /// The consumer's name: the group on Kafka and embedded.
    pub consumer: String,
    /// The topics that the consumer reads.
    pub topics: Vec<String>,
    /// The name of the group, where it is not the consumer's.
    pub group: Option<String>,
    /// Queue names by topic, where they are not `<topic>.<consumer>`.
    pub queues: BTreeMap<String, String>,
    /// Upper bound of deliveries that are neither acknowledged nor
    /// [`finished`](Subscriber::finished) nor [set aside](Subscriber::set_aside).
    pub in_flight_max: usize,
    /// How long the runtime may take to finish the work of a revoked partition.
    pub drain: Duration,
}

impl Subscription {
    /// The defaults for a consumer and its topics.
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

    /// The name of the queue that holds the topic's messages for this consumer (RabbitMQ).
    #[must_use]
    pub fn queue(&self, topic: &str) -> String {
        self.queues.get(topic).cloned().unwrap_or_else(|| format!("{topic}.{}", self.consumer))
    }
}

/// One assignment of one ordered source: a partition of a topic, or a queue on one channel.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PartitionId {
    /// The topic, or the queue on RabbitMQ.
    pub place: Arc<str>,
    /// The number of the partition; 0 on RabbitMQ.
    pub partition: i32,
    /// Tells apart several assignments of the same partition in one process.
    pub generation: u64,
}

/// One message that the broker delivered, and where it came from.
#[derive(Debug)]
pub struct Delivery {
    /// The assignment that it was delivered under.
    pub source: PartitionId,
    /// The offset, or the delivery tag on RabbitMQ; it ascends within a source.
    pub sequence: i64,
    /// True where the broker says that it delivered this message before (RabbitMQ).
    pub redelivered: bool,
    /// The message itself, as the adapter took it from the broker.
    pub arrived: Arrived,
}

/// What a subscriber reports to the runtime.
#[derive(Debug)]
pub enum Event {
    /// These sources belong to this consumer from now on.
    Assigned(Vec<PartitionId>),
    /// Deliveries; those of one source are in its order.
    Deliveries(Vec<Delivery>),
    /// These sources go to another consumer. The runtime starts nothing more of them, finishes what
    /// runs, acknowledges it, and then drops `done`.
    Revoked {
        /// The sources that this consumer loses.
        sources: Vec<PartitionId>,
        /// True where the broker gave them to another consumer already: nothing can be
        /// acknowledged.
        lost: bool,
        /// The runtime drops it when it has finished; the adapter waits at most the drain time.
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
    /// A guard, and the receiver to wait on: `recv_timeout` ends when the guard is dropped.
    #[must_use]
    pub fn pair() -> (Self, std::sync::mpsc::Receiver<()>) {
        let (sender, receiver) = std::sync::mpsc::sync_channel(1);
        (Self { _sender: Some(sender), _shared: None }, receiver)
    }

    /// A guard that no adapter waits for.
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

/// Where a source of a log begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Begun {
    /// The source that began.
    pub source: PartitionId,
    /// The id of the topic that now has this name, where the broker tells it.
    pub topic_id: Option<String>,
    /// The first position, and the reason where it is not the position that was remembered.
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

    /// Decides where sources that were just assigned begin (`inbox::rules::position`), and returns
    /// it. `remembered` is what the consumer's database knows of each. A source for which this is
    /// not called before the following `next` begins at the group's offset. Empty for a queue.
    async fn begin(&mut self, _remembered: Vec<(PartitionId, Option<Position>)>) -> Result<Vec<Begun>, BrokerError> {
        Ok(Vec::new())
    }

    /// Why nothing is delivered for now: the broker is away and the client waits for it.
    fn away(&self) -> Option<String> {
        None
    }

    /// Says that all deliveries of this source up to and including `through` are committed.
    ///
    /// # Errors
    /// An acknowledgement that does not arrive loses nothing: the delivery comes again, and the
    /// inbox knows it. Errors that end the subscriber come from `next`.
    async fn acknowledge(&mut self, source: &PartitionId, through: i64) -> Result<(), BrokerError>;

    /// Says that these deliveries are committed while an older one of their source is not, so that
    /// [`acknowledge`](Self::acknowledge) cannot cover them yet. From now on they count neither as
    /// deliveries nor as bytes in flight. The runtime calls this only when room is needed.
    async fn finished(&mut self, _source: &PartitionId, _sequences: &[i64]) {}

    /// Says that this delivery waits for a transaction of another process. It no longer counts
    /// against `in_flight_max`; its bytes still count.
    fn set_aside(&mut self, _source: &PartitionId, _sequence: i64) {}

    /// Says that the runtime handles nothing of this source, which has just begun and stays
    /// assigned: from now on it is not read, nothing of it takes room, and it counts as caught up.
    /// Deliveries that are on their way may still come. An adapter of a log must do this, or the
    /// source stops all others once the bounds are reached; of a queue nothing is refused.
    fn refuse(&mut self, _source: &PartitionId) {}

    /// True where the group has assigned nothing to this member, for want of partitions.
    fn has_no_share(&self) -> bool {
        false
    }

    /// Stops or restarts asking the broker for messages. `next` must still be called, for
    /// heartbeats and rebalances.
    fn pause(&mut self, paused: bool);

    /// True once sources were assigned and each has delivered what it held then.
    async fn caught_up(&mut self) -> Result<bool, BrokerError>;

    /// A planned end: when it returns, acknowledgements have arrived. Nothing goes back to the
    /// broker out of order (R29).
    async fn close(self: Box<Self>);
}
