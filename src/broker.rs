//! The traits that a broker adapter implements, for publishing and for consuming.
//!
//! One adapter, one folder, the same file names in each: `config`, `publisher`, `subscriber` and
//! `topology`. The suite in `oncebox-testkit` defines how an adapter behaves; every adapter must
//! pass it.
//!
//! Guarantees: a row is settled only when the broker has confirmed or refused it. Within a session
//! the broker takes the messages of a key in order and without gaps, until it refuses one; it gets
//! later ones only after the runtime has received that refusal (R15). An acknowledgement is sent
//! only for deliveries that the runtime reported as committed.
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
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use async_trait::async_trait;
#[cfg(any(feature = "kafka", feature = "rabbitmq"))]
use futures_util::future::BoxFuture;

use crate::error::BrokerError;
use crate::inbox::rules::horizon::TopicRetention;
use crate::inbox::rules::position::{Position, Start};
use crate::message::{Arrived, OutgoingMessage};
use crate::observe::Finding;

/// Whether the relay can send to a topic. It asks before it sends anything to the topic (R19).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TopicState {
    /// The topic exists and can be sent to, as far as the broker shows it.
    Ready,
    /// The topic cannot be sent to, for this reason. The relay holds its rows back.
    NotReady(String),
}

/// Why a message is not confirmed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// The broker refused the message (too large, invalid), or the batch that it was in. Only if it
    /// was sent alone is it certain that the refusal is about this message. Later messages of its
    /// key that are not sent yet get `Behind`.
    Message(String),
    /// The message was not sent, because an earlier message of its key was refused. Messages that
    /// the runtime sends after it received this outcome are sent normally.
    Behind(String),
    /// The broker refused the destination: unknown topic, no route, access denied. That says
    /// nothing against the message. Messages of this topic that are not sent yet are not sent until
    /// the runtime has received this outcome and, on Kafka, has asked for the topic
    /// again ([`Publisher::topics`]). Other topics are not concerned.
    Destination(String),
    /// Any other failure, also a nack. The broker may have taken the message; the session must end.
    Session(String),
}

/// The broker's result for one row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settled {
    /// The tag that [`Publisher::send`] was given for the row.
    pub tag: u64,
    /// Where the message went, or why it is not confirmed.
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
    /// RabbitMQ confirmed the message and did not return it as unroutable.
    Confirm,
}

/// A configured broker. Cheap to hold; it opens publishing sessions and subscribers.
#[async_trait]
pub trait Broker: Debug + Send + Sync {
    /// `kafka`, `rabbitmq`, `embedded` or `memory`, for metric labels and messages.
    fn name(&self) -> &'static str;

    /// True for a log (Kafka, embedded): topic, partition and offset always mean the same message.
    /// False for a queue (RabbitMQ), which itself marks what it delivers again.
    fn is_log(&self) -> bool {
        true
    }

    /// Opens a new publishing session. It is warmed up, so that the first message does not wait.
    async fn publisher(&self) -> Result<Box<dyn Publisher>, BrokerError>;

    /// The topics or queues of this broker that have the messages of a subscription.
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

    /// Creates what publishing needs: the exchange on RabbitMQ, topics where `create_topics` is on.
    async fn declare(&self, topics: &[String]) -> Result<(), BrokerError>;

    /// Looks for settings and states that break or weaken what is promised about delivery.
    async fn check(&self, subscriptions: &[Subscription]) -> Result<Vec<Finding>, BrokerError>;

    /// Reads every message that a topic holds now, from the beginning, without a group and without
    /// acknowledging: for `demo`, `bench` and tests. RabbitMQ has no such read: it returns what a
    /// tap queue collected since [`Broker::tap`]. An adapter may refuse this, and `remove`.
    async fn read_all(&self, topic: &str) -> Result<Vec<Arrived>, BrokerError> {
        Err(BrokerError::Refused(format!("topic `{topic}`: {} has no read of a whole topic", self.name())))
    }

    /// Makes sure that [`Broker::read_all`] will return what is published from now on. It makes a
    /// tap queue on RabbitMQ and does nothing on the others.
    async fn tap(&self, _topic: &str) -> Result<(), BrokerError> {
        Ok(())
    }

    /// Deletes the topics, queues and groups of these subscriptions with all their messages: for
    /// `demo`, `bench` and tests, which made them. One that does not exist is no error.
    async fn remove(&self, _subscriptions: &[Subscription]) -> Result<(), BrokerError> {
        Err(BrokerError::Refused(format!("{} deletes no topics", self.name())))
    }
}

/// A broker's client without a session, for `bench`: sends these messages, and waits until each has
/// arrived.
#[cfg(any(feature = "kafka", feature = "rabbitmq"))]
type Raw = Box<dyn Fn(Arc<Vec<OutgoingMessage>>) -> BoxFuture<'static, Result<(), BrokerError>> + Send + Sync>;

/// The pause between two looks at a group or queue that has members and messages. It is many times
/// longer than a working consumer needs to make progress.
pub(crate) const BETWEEN_LOOKS: Duration = Duration::from_secs(2);

/// The remedy where messages make no progress although a consumer is connected.
pub(crate) const STANDS_STILL: &str =
    "see `/readyz` and the log of the consumer's processes: is the database away, is there a lock, is a handler slow?";

/// One publishing session. Any error ends it: drop it, open a new one and start again from the
/// first row that is not confirmed.
#[async_trait]
pub trait Publisher: Send {
    /// Returns the state of each of these topics, in the order of the names (no name twice), and
    /// lets a topic be sent to again whose refusal the runtime has received.
    ///
    /// States are cached: a topic that is known to be ready costs nothing; the broker is asked
    /// again about the others, in one request where it allows that. It ends within a deadline of
    /// its own: the relay keeps its lease as long as it waits.
    async fn topics(&mut self, topics: &[String]) -> Result<Vec<TopicState>, BrokerError>;

    /// The state of one topic, as [`topics`](Self::topics) tells it.
    async fn topic(&mut self, topic: &str) -> Result<TopicState, BrokerError> {
        let states = self.topics(&[topic.to_owned()]).await?;
        states
            .into_iter()
            .next()
            .ok_or_else(|| BrokerError::Session(format!("the adapter returned no state of topic `{topic}`")))
    }

    /// Hands rows over in order, each with a tag that ascends within the session. Returns when the
    /// client has buffered all of them; waits only while its buffer is full.
    ///
    /// # Cancel safety
    /// Not cancel safe: when this future is dropped, drop the session too.
    async fn send(&mut self, rows: Vec<(u64, OutgoingMessage)>) -> Result<(), BrokerError>;

    /// Waits until the broker confirmed or refused at least one row, and appends these outcomes.
    /// Returns without outcomes if nothing is in flight.
    ///
    /// # Cancel safety
    /// Safe: no outcome is lost when the future is dropped.
    async fn settle(&mut self, settled: &mut Vec<Settled>) -> Result<(), BrokerError>;

    /// Why the broker accepts no messages for now (for example a memory alarm), which is no
    /// failure; `None` if it accepts them.
    fn blocked(&self) -> Option<String> {
        None
    }

    /// Ends the session, within a deadline of its own. Rows without an outcome stay unconfirmed.
    async fn close(self: Box<Self>);
}

/// What a consumer subscribes to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subscription {
    /// The consumer's name; on Kafka and embedded also that of the group, unless `group` is set.
    pub consumer: String,
    /// The topics that the consumer reads.
    pub topics: Vec<String>,
    /// The name of the group, where it is not the consumer's.
    pub group: Option<String>,
    /// Queue names by topic, where they are not `<topic>.<consumer>`.
    pub queues: BTreeMap<String, String>,
    /// The adapter stops reading at so many deliveries that are neither acknowledged nor
    /// [`finished`](Subscriber::finished) nor, on a log, [set aside](Subscriber::set_aside). It may
    /// have a bound in bytes too.
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
    /// These sources belong to this subscriber from now on.
    Assigned(Vec<PartitionId>),
    /// Deliveries; those of one source are in its order.
    Deliveries(Vec<Delivery>),
    /// The broker takes these sources away, usually for another process of the consumer. The
    /// runtime starts nothing more of them, finishes what runs, acknowledges it, and then drops
    /// `done`.
    Revoked {
        /// The sources that this subscriber loses.
        sources: Vec<PartitionId>,
        /// True if another process has them already: nothing can be acknowledged.
        lost: bool,
        /// The runtime drops it, with its clones, when it has finished, and sends nothing. The
        /// adapter waits on the receiver, at most the drain time, until it says that it is
        /// disconnected; where sources are lost, nobody waits.
        done: SyncSender<()>,
    },
}

/// Where a source of a log begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Begun {
    /// The source that began.
    pub source: PartitionId,
    /// The broker's id of the topic, if it tells it. It changes when the topic is made anew.
    pub topic_id: Option<String>,
    /// Where reading begins, and why, if that is not the position that was remembered.
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
    /// not called before the following `next` begins at the group's offset. A queue returns
    /// nothing.
    async fn begin(&mut self, _remembered: Vec<(PartitionId, Option<Position>)>) -> Result<Vec<Begun>, BrokerError> {
        Ok(Vec::new())
    }

    /// Why nothing is delivered for now, or nothing of a topic or a partition: the broker cannot be
    /// reached, or does not let it be read. `None` if all is well.
    fn away(&self) -> Option<String> {
        None
    }

    /// Says that all deliveries of this source up to and including `through` are committed.
    ///
    /// # Errors
    /// The caller may log it and continue: the broker delivers again, and the inbox knows the
    /// message. Errors that end the subscriber come from `next`.
    async fn acknowledge(&mut self, source: &PartitionId, through: i64) -> Result<(), BrokerError>;

    /// Says that these deliveries are committed while an older one of their source is not, so that
    /// [`acknowledge`](Self::acknowledge) cannot cover them yet. From now on they count neither as
    /// deliveries nor as bytes in flight. The runtime calls this when it has many of them, or when
    /// the older one has held them for a while.
    async fn finished(&mut self, _source: &PartitionId, _sequences: &[i64]) {}

    /// Says that this delivery waits for a transaction of another process. It no longer counts
    /// against `in_flight_max` (on RabbitMQ it does, because the prefetch counts it); its bytes
    /// still count.
    fn set_aside(&mut self, _source: &PartitionId, _sequence: i64) {}

    /// Says that the runtime handles nothing of this source, which has just begun and stays
    /// assigned: the adapter reads no more of it, nothing of it takes room, and it counts as caught
    /// up. Deliveries that are on their way may still arrive. An adapter of a log must do this, or
    /// the source stops all others once a bound is reached. Queues never get this call.
    fn refuse(&mut self, _source: &PartitionId) {}

    /// True if the group has more members than partitions, and this one got none.
    fn has_no_share(&self) -> bool {
        false
    }

    /// Stops or restarts asking the broker for messages. `next` must still be called, for
    /// heartbeats and rebalances.
    fn pause(&mut self, paused: bool);

    /// True once sources were assigned and each has delivered what it held then, or if this member
    /// got none.
    async fn caught_up(&mut self) -> Result<bool, BrokerError>;

    /// A planned end: waits, within a deadline of its own, until acknowledgements have arrived.
    /// Deliveries without one go back to the broker in their order (R29).
    async fn close(self: Box<Self>);
}
