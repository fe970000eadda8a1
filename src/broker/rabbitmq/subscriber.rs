//! The consuming side: queues, deliveries, acknowledgements, and an end that hands nothing back out
//! of order.
//!
//! Guarantees: acknowledgements are `multiple` up to what the runtime said is committed, never
//! beyond what was delivered (R29), and single where it said so of one above that, so that the
//! server's prefetch counts only what is unfinished; a stream that ends, a channel or connection
//! that closes, and a consumer that the server has forgotten are errors of [`Subscriber::next`];
//! dropping this in any way cuts the socket before anything else (R29). Deliveries that are not yet
//! acknowledged are bounded by count, which the server keeps, and by bytes, which it does not:
//! where they grow beyond, the connection is cut, so that the server takes them back in their
//! order, and the next one asks for fewer at a time.
//!
//! Not here: recovery (the runtime subscribes anew), dedupe (the inbox).

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use futures::Stream;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions, QueueDeclareOptions};
use lapin::types::FieldTable;
use lapin::{Channel, Consumer};

use super::config::RabbitConfig;
use super::error::{classify, within};
use super::socket::Link;
use super::topology::Topology;
use super::wire;
use crate::broker::{Delivery, Event, PartitionId, Subscriber, Subscription};
use crate::error::BrokerError;

/// Deliveries in one event.
const DELIVERIES_MAX: usize = 500;
/// How often at most `caught_up` asks the server.
const CAUGHT_UP_PAUSE: Duration = Duration::from_millis(100);

/// Tells channels apart, also of subscribers that follow one another in one process.
static GENERATION: AtomicU64 = AtomicU64::new(1);

/// One queue on its channel.
struct Source {
    id: PartitionId,
    channel: Channel,
    consumer: Consumer,
    prefetch: u16,
    /// The highest tag handed out, and the highest acknowledged.
    delivered: u64,
    acknowledged: u64,
    /// Tags that are not yet acknowledged, and what each weighs.
    in_flight: VecDeque<(u64, usize)>,
    /// Messages that stood in the queue when we came, less those taken; none once the queue was
    /// seen empty.
    expected: u64,
}

/// Deliveries that are not yet acknowledged.
#[derive(Debug, Clone, Copy, Default)]
struct InFlight {
    rows: usize,
    bytes: usize,
}

impl InFlight {
    /// One delivery is always allowed, else a large one would never be handled.
    fn is_bearable(self, config: &RabbitConfig, consumer: &str, queues: usize) -> Result<(), BrokerError> {
        let Self { rows, bytes } = self;
        if bytes <= config.in_flight_bytes_max || rows <= 1 {
            return Ok(());
        }
        let each = (rows / 2 / queues).max(1);
        let prefetch = config.bear(consumer, u16::try_from(each).unwrap_or(u16::MAX));
        Err(BrokerError::Session(format!(
            "{rows} deliveries that are not acknowledged have {bytes} bytes, more than `in_flight_bytes_max` ({}): the server takes \
             them back and delivers {prefetch} at a time",
            config.in_flight_bytes_max
        )))
    }
}

/// Everything that must outlive the socket: the socket is cut first, then the handles are dropped
/// (R29).
struct Guard {
    link: Link,
    sources: Vec<Source>,
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.link.cut();
    }
}

/// The connection of one consumer, with a source for each of its queues.
pub(super) struct RabbitSubscriber {
    guard: Guard,
    config: RabbitConfig,
    consumer: String,
    in_flight: InFlight,
    assigned: bool,
    paused: bool,
    waiting: VecDeque<Delivery>,
    /// Where the next look begins, so that no queue starves.
    turn: usize,
    last_delivery: Instant,
    /// The last look at quiet queues found one that should have delivered.
    suspected: bool,
    last_look: Option<Instant>,
}

impl RabbitSubscriber {
    /// Declares queues and bindings, then consumes.
    pub(super) async fn open(
        config: &RabbitConfig,
        subscription: &Subscription,
        unlimited: bool,
    ) -> Result<Self, BrokerError> {
        let link = Link::open(config, &format!("oncebox consumer {}", subscription.consumer)).await?;
        let mut guard = Guard { link, sources: Vec::new() };
        let mut queues = Vec::new();
        let mut topology = Topology::new(&guard.link, config);
        // As the publisher does, so that either may start first, and producers of others need no
        // publisher of ours.
        topology.exchange(config).await?;
        for topic in &subscription.topics {
            queues.extend(topology.subscribe(config, subscription, topic, unlimited).await?);
        }
        drop(topology);
        let share = (subscription.in_flight_max / queues.len().max(1)).max(1);
        let prefetch =
            config.bearable(&subscription.consumer, u16::try_from(share).unwrap_or(u16::MAX).min(config.prefetch));
        for (queue, found) in queues {
            let channel = guard.link.channel().await?;
            let qos = channel.basic_qos(prefetch, BasicQosOptions::default());
            within(config.connect_deadline, "basic.qos", qos).await?;
            let consume = channel.basic_consume(
                queue.name.as_str().into(),
                "".into(),
                BasicConsumeOptions::default(),
                FieldTable::default(),
            );
            let consumer = within(config.connect_deadline, "basic.consume", consume).await?;
            let generation = GENERATION.fetch_add(1, Ordering::Relaxed);
            guard.sources.push(Source {
                id: PartitionId { place: Arc::from(queue.name), partition: 0, generation },
                channel,
                consumer,
                prefetch,
                delivered: 0,
                acknowledged: 0,
                in_flight: VecDeque::new(),
                expected: u64::from(found.ready),
            });
        }
        Ok(Self {
            guard,
            config: config.clone(),
            consumer: subscription.consumer.clone(),
            in_flight: InFlight::default(),
            assigned: false,
            paused: false,
            waiting: VecDeque::new(),
            turn: 0,
            last_delivery: Instant::now(),
            suspected: false,
            last_look: None,
        })
    }

    /// Takes what has arrived, from all queues in turn, until so many wait.
    fn take(&mut self, context: &mut Context<'_>, max: usize) -> Result<(), BrokerError> {
        let count = self.guard.sources.len();
        for step in 0..count {
            let source = &mut self.guard.sources[(self.turn + step) % count];
            while self.waiting.len() < max {
                match Pin::new(&mut source.consumer).poll_next(context) {
                    Poll::Pending => break,
                    Poll::Ready(Some(Ok(delivery))) => {
                        let delivery = source.take(delivery);
                        self.in_flight.rows += 1;
                        self.in_flight.bytes += delivery.arrived.weight();
                        self.waiting.push_back(delivery);
                        self.in_flight.is_bearable(&self.config, &self.consumer, count)?;
                    }
                    Poll::Ready(Some(Err(error))) => return Err(classify(&error)),
                    Poll::Ready(None) => {
                        return Err(BrokerError::Destination(format!(
                            "the server cancelled the consumer of queue `{}`; was the queue deleted?",
                            source.id.place
                        )));
                    }
                }
            }
        }
        self.turn = (self.turn + 1) % count.max(1);
        Ok(())
    }

    fn poll_deliveries(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BrokerError>> {
        // While paused, what the prefetch lets through is kept here, so that an end of the stream
        // is still seen.
        let max = if self.paused { usize::MAX } else { DELIVERIES_MAX };
        match self.take(context, max) {
            Ok(()) if self.paused || self.waiting.is_empty() => Poll::Pending,
            done => Poll::Ready(done),
        }
    }

    /// Messages that stood in a queue when we came may have gone to another process. An empty queue
    /// says that nothing is left that we do not have, or that is on its way to us: the second
    /// answer on the same channel comes after it.
    async fn look_at_what_is_left(&mut self) -> Result<(), BrokerError> {
        let deadline = self.config.connect_deadline;
        let mut left = Vec::with_capacity(self.guard.sources.len());
        for source in &self.guard.sources {
            if source.expected == 0 {
                left.push(false);
                continue;
            }
            let (name, passive) = (source.id.place.as_ref().into(), QueueDeclareOptions::default().passive());
            let asked = source.channel.queue_declare(name, passive, FieldTable::default());
            let empty = within(deadline, "queue.declare", asked).await?.message_count() == 0;
            if empty {
                let answered = source.channel.basic_qos(source.prefetch, BasicQosOptions::default());
                within(deadline, "basic.qos", answered).await?;
            }
            left.push(!empty);
        }
        self.take(&mut Context::from_waker(Waker::noop()), usize::MAX)?;
        for (source, left) in self.guard.sources.iter_mut().zip(left) {
            if !left {
                source.expected = 0;
            }
        }
        Ok(())
    }

    /// Nothing came for long: is the server there, and does it still know us as a consumer?
    async fn look_at_quiet_queues(&mut self) -> Result<(), BrokerError> {
        let mut topology = Topology::new(&self.guard.link, &self.config);
        let mut stuck = None;
        for source in &self.guard.sources {
            let place = &source.id.place;
            let found = topology.queue_as_it_stands(place).await?;
            let found = found.ok_or_else(|| BrokerError::Destination(format!("queue `{place}` is gone")))?;
            if found.consumers == 0 {
                let why = format!("queue `{place}`: the server does not know this consumer any more");
                return Err(BrokerError::Session(why));
            }
            if found.consumers == 1 && found.ready > 0 && source.delivered == source.acknowledged {
                stuck = Some(format!("queue `{place}`: messages are ready and none is delivered"));
            }
        }
        // Once may be a message that came this moment.
        match stuck {
            Some(why) if self.suspected => Err(BrokerError::Session(why)),
            found => {
                self.suspected = found.is_some();
                Ok(())
            }
        }
    }
}

impl Source {
    fn take(&mut self, delivery: lapin::message::Delivery) -> Delivery {
        self.delivered = delivery.delivery_tag;
        self.expected = self.expected.saturating_sub(1);
        let tag = delivery.delivery_tag;
        let delivery = Delivery {
            source: self.id.clone(),
            sequence: i64::try_from(tag).unwrap_or(i64::MAX),
            redelivered: delivery.redelivered,
            arrived: wire::arrived(delivery, &self.id.place),
        };
        self.in_flight.push_back((tag, delivery.arrived.weight()));
        delivery
    }

    /// The highest tag up to this one that the server still counts: it closes the channel over one
    /// that it does not know any more.
    fn last_counted(&self, through: u64) -> Option<u64> {
        let after = self.in_flight.partition_point(|(tag, _)| *tag <= through);
        self.in_flight.range(..after).next_back().map(|(tag, _)| *tag)
    }

    /// This tag alone is acknowledged; gives its weight, where the server still counts it.
    fn give_up_one(&mut self, tag: u64) -> Option<usize> {
        let at = self.in_flight.binary_search_by_key(&tag, |(tag, _)| *tag).ok()?;
        self.in_flight.remove(at).map(|(_, weight)| weight)
    }

    /// Everything through this tag is acknowledged; gives what that was.
    fn give_up(&mut self, through: u64) -> InFlight {
        self.acknowledged = through;
        let rows = self.in_flight.partition_point(|(tag, _)| *tag <= through);
        InFlight { rows, bytes: self.in_flight.drain(..rows).map(|(_, weight)| weight).sum() }
    }
}

impl Source {
    /// Whether it was sent. Not sent is no loss: the inbox knows these messages. The end of the
    /// channel comes from `next`.
    async fn acknowledge(&self, tag: u64, multiple: bool, deadline: Duration) -> bool {
        let ack = self.channel.basic_ack(tag, BasicAckOptions { multiple });
        let sent = within(deadline, "basic.ack", ack).await;
        if let Err(fault) = &sent {
            tracing::debug!(queue = &*self.id.place, why = fault.text(), "an acknowledgement was not sent");
        }
        sent.is_ok()
    }
}

#[async_trait]
impl Subscriber for RabbitSubscriber {
    async fn next(&mut self) -> Result<Event, BrokerError> {
        if !self.assigned {
            self.assigned = true;
            return Ok(Event::Assigned(self.guard.sources.iter().map(|source| source.id.clone()).collect()));
        }
        loop {
            let quiet = self.config.quiet_check.saturating_sub(self.last_delivery.elapsed());
            // Cancel safety: deliveries that were taken stand in `waiting` until they are returned.
            let arrived = std::future::poll_fn(|context| self.poll_deliveries(context));
            match tokio::time::timeout(quiet, arrived).await {
                Ok(Ok(())) => {
                    self.last_delivery = Instant::now();
                    self.suspected = false;
                    let count = self.waiting.len().min(DELIVERIES_MAX);
                    return Ok(Event::Deliveries(self.waiting.drain(..count).collect()));
                }
                Ok(Err(error)) => return Err(error),
                Err(_) => {
                    if !self.paused {
                        self.look_at_quiet_queues().await?;
                    }
                    self.last_delivery = Instant::now();
                }
            }
        }
    }

    async fn acknowledge(&mut self, source: &PartitionId, through: i64) -> Result<(), BrokerError> {
        let Some(source) = self.guard.sources.iter_mut().find(|known| known.id == *source) else { return Ok(()) };
        let through = u64::try_from(through).unwrap_or(0);
        if through > source.delivered {
            return Err(BrokerError::Session(format!(
                "queue `{}`: tag {through} was never delivered, the last one is {}",
                source.id.place, source.delivered
            )));
        }
        // The server closes the channel over a tag that it does not know any more.
        if through <= source.acknowledged {
            return Ok(());
        }
        let last = source.last_counted(through);
        let gone = source.give_up(through);
        self.in_flight.rows -= gone.rows;
        self.in_flight.bytes -= gone.bytes;
        if let Some(last) = last {
            source.acknowledge(last, true, self.config.close_deadline).await;
        }
        Ok(())
    }

    async fn finished(&mut self, source: &PartitionId, sequences: &[i64]) {
        let Some(source) = self.guard.sources.iter_mut().find(|known| known.id == *source) else { return };
        for tag in sequences.iter().filter_map(|sequence| u64::try_from(*sequence).ok()) {
            let Some(weight) = source.give_up_one(tag) else { continue };
            self.in_flight.rows -= 1;
            self.in_flight.bytes -= weight;
            if !source.acknowledge(tag, false, self.config.close_deadline).await {
                return;
            }
        }
    }

    fn pause(&mut self, paused: bool) {
        self.paused = paused;
    }

    async fn caught_up(&mut self) -> Result<bool, BrokerError> {
        if !self.assigned {
            return Ok(false);
        }
        if self.guard.sources.iter().any(|source| source.expected > 0)
            && self.last_look.is_none_or(|at| at.elapsed() >= CAUGHT_UP_PAUSE)
        {
            self.last_look = Some(Instant::now());
            self.look_at_what_is_left().await?;
        }
        Ok(self.waiting.is_empty() && self.guard.sources.iter().all(|source| source.expected == 0))
    }

    async fn close(self: Box<Self>) {
        for source in &self.guard.sources {
            // Any call with an answer: the server has then seen the acknowledgements before it on
            // this channel.
            let answered = source.channel.basic_qos(source.prefetch, BasicQosOptions::default());
            let _ = within(self.config.close_deadline, "basic.qos", answered).await;
        }
        // Not `connection.close`: prefetched messages would go back out of order (R29).
        self.guard.link.cut();
    }
}
