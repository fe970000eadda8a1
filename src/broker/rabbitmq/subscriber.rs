//! The consuming side: queues, deliveries, acknowledgements, and an end after which the server
//! requeues everything in order.
//!
//! Guarantees: an acknowledgement is `multiple` up to what the runtime reported as committed, and
//! never beyond what was delivered (R29). A single delivery above that is acknowledged alone when
//! the runtime reports it as finished, so that the server's prefetch counts only unfinished ones. A
//! stream that ends, a channel or connection that closes, and a consumer that the server has
//! forgotten are errors of [`Subscriber::next`]. Dropping the subscriber cuts the socket before
//! anything else (R29). Unacknowledged deliveries are bounded by count, which the server applies,
//! and by bytes, which it cannot apply: above that bound the connection is cut, so that the server
//! takes the deliveries back in order, and the next subscriber asks for a smaller prefetch.
//!
//! Not here: bindings that are lost later (`bindings`), recovery (the runtime subscribes anew),
//! duplicates (the inbox).

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use futures_util::Stream;
use futures_util::future::BoxFuture;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions, QueueDeclareOptions};
use lapin::types::FieldTable;
use lapin::{Channel, Consumer};
use tokio_util::task::AbortOnDropHandle;

use super::bindings;
use super::config::Known;
use super::error::{streaming, within};
use super::repartition;
use super::socket::Link;
use super::topology::{QueueState, Topology};
use super::wire;
use crate::broker::{Delivery, Event, PartitionId, Subscriber, Subscription};
use crate::error::BrokerError;
use crate::task;

const DELIVERIES_MAX: usize = 500;
/// The shortest time between two questions of `caught_up` to the server.
const CAUGHT_UP_PAUSE: Duration = Duration::from_millis(100);

/// Tells channels apart, also those of later subscribers in the same process.
static GENERATION: AtomicU64 = AtomicU64::new(1);

/// What the server tells about each queue; `None` where it is gone.
type Found = Vec<Option<QueueState>>;

struct Source {
    id: PartitionId,
    channel: Channel,
    consumer: Consumer,
    /// The highest delivery tag received.
    delivered: u64,
    /// The tag up to which all are acknowledged.
    acknowledged: u64,
    /// Unacknowledged delivery tags, with the weight of each in bytes.
    in_flight: VecDeque<(u64, usize)>,
    /// Messages in the queue at the start, less those delivered; 0 once it was seen empty.
    expected: u64,
}

#[derive(Debug, Clone, Copy, Default)]
struct InFlight {
    rows: usize,
    bytes: usize,
}

/// The connection of one consumer, with a source for each of its queues.
pub(super) struct RabbitSubscriber {
    link: Arc<Link>,
    sources: Vec<Source>,
    config: Arc<Known>,
    consumer: String,
    /// Most unacknowledged deliveries of each queue.
    prefetch: u16,
    in_flight: InFlight,
    assigned: bool,
    paused: bool,
    waiting: VecDeque<Delivery>,
    /// The source that the next poll begins with, so that each source gets its turn.
    turn: usize,
    last_delivery: Instant,
    /// A look at quiet queues that waits for the server. It is kept here, because the runtime drops
    /// `next` more often than the server may answer.
    look: Option<BoxFuture<'static, Result<Found, BrokerError>>>,
    /// True if the last look at quiet queues found one that should have delivered.
    suspected: bool,
    last_look: Option<Instant>,
    bindings: Option<AbortOnDropHandle<()>>,
}

impl RabbitSubscriber {
    /// Declares and binds the queues, then starts consuming.
    pub(super) async fn open(
        config: &Arc<Known>,
        subscription: &Subscription,
        unlimited: bool,
    ) -> Result<Self, BrokerError> {
        let link = Link::open(config, &format!("oncebox consumer {}", subscription.consumer)).await?;
        // Made before its sources, so that its drop cuts the socket also where one of them fails.
        let mut subscriber = Self {
            link: Arc::new(link),
            sources: Vec::new(),
            config: Arc::clone(config),
            consumer: subscription.consumer.clone(),
            prefetch: 1,
            in_flight: InFlight::default(),
            assigned: false,
            paused: false,
            waiting: VecDeque::new(),
            turn: 0,
            last_delivery: Instant::now(),
            look: None,
            suspected: false,
            last_look: None,
            bindings: None,
        };
        let link = &subscriber.link;
        let mut queues = Vec::new();
        let mut topology = Topology::new(link, config);
        // The publisher declares a missing one in the same way, so that either may start first, and
        // other producers need no publisher of ours.
        topology.exchange().await?;
        for topic in &subscription.topics {
            queues.extend(repartition::admit(subscription, topic, unlimited, &mut topology).await?);
        }
        drop(topology);
        let share = (subscription.in_flight_max / queues.len().max(1)).max(1);
        let prefetch =
            config.bearable(&subscription.consumer, u16::try_from(share).unwrap_or(u16::MAX).min(config.prefetch));
        subscriber.prefetch = prefetch;
        for (queue, found) in queues {
            if let Some(why) = found.limit.fault(unlimited) {
                tracing::warn!(queue, why, "`oncebox doctor` says what to do");
            }
            let channel = link.channel().await?;
            let qos = channel.basic_qos(prefetch, BasicQosOptions::default());
            link.ask("basic.qos", qos).await?;
            let consume = channel.basic_consume(
                queue.as_str().into(),
                "".into(),
                BasicConsumeOptions::default(),
                FieldTable::default(),
            );
            let consumer = link.ask("basic.consume", consume).await?;
            let generation = GENERATION.fetch_add(1, Ordering::Relaxed);
            subscriber.sources.push(Source {
                id: PartitionId { place: Arc::from(queue), partition: 0, generation },
                channel,
                consumer,
                delivered: 0,
                acknowledged: 0,
                in_flight: VecDeque::new(),
                expected: u64::from(found.ready),
            });
        }
        let kept = bindings::keep(Arc::clone(link), Arc::clone(config), subscription.clone());
        subscriber.bindings = Some(AbortOnDropHandle::new(task::spawn(kept)));
        subscriber.last_delivery = Instant::now();
        Ok(subscriber)
    }

    /// Takes what has arrived, from all queues in turn, until `max` deliveries are waiting.
    fn take(&mut self, context: &mut Context<'_>, max: usize) -> Result<(), BrokerError> {
        let count = self.sources.len();
        for step in 0..count {
            let at = (self.turn + step) % count;
            while self.waiting.len() < max {
                let source = &mut self.sources[at];
                match Pin::new(&mut source.consumer).poll_next(context) {
                    Poll::Pending => break,
                    Poll::Ready(Some(Ok(delivery))) => {
                        let delivery = source.take(delivery);
                        self.in_flight.rows += 1;
                        self.in_flight.bytes += delivery.arrived.weight();
                        self.waiting.push_back(delivery);
                        self.check_bytes()?;
                    }
                    Poll::Ready(Some(Err(error))) => return Err(streaming(&error)),
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

    /// Checks the bound of bytes. One delivery of each queue is always allowed, however large: the
    /// server counts them by queue, and a prefetch of less than 1 has no limit.
    fn check_bytes(&self) -> Result<(), BrokerError> {
        let (InFlight { rows, bytes }, max) = (self.in_flight, self.config.in_flight_bytes_max);
        if bytes <= max || self.sources.iter().all(|source| source.in_flight.len() <= 1) {
            return Ok(());
        }
        let each = (rows / 2 / self.sources.len()).max(1);
        let prefetch = self.config.bear(&self.consumer, u16::try_from(each).unwrap_or(u16::MAX));
        Err(BrokerError::Session(format!(
            "{rows} deliveries that are not acknowledged have {bytes} bytes, more than `in_flight_bytes_max` ({max}): the \
             server takes them back and delivers {prefetch} at a time from each queue"
        )))
    }

    fn poll_deliveries(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BrokerError>> {
        // While paused, deliveries are still taken and kept, so that an end of the stream is
        // noticed.
        let max = if self.paused { usize::MAX } else { DELIVERIES_MAX };
        match self.take(context, max) {
            Ok(()) if self.paused || self.waiting.is_empty() => Poll::Pending,
            done => Poll::Ready(done),
        }
    }

    /// Checks whether the messages that were in the queues at the start are gone; another process
    /// may have got them. If a queue has no ready messages, they are all delivered. A second
    /// request on the same channel is answered after them, so that they have then arrived here.
    async fn look_at_what_is_left(&mut self) -> Result<(), BrokerError> {
        let link = &self.link;
        let mut left = Vec::with_capacity(self.sources.len());
        for source in &self.sources {
            if source.expected == 0 {
                left.push(false);
                continue;
            }
            let (name, passive) = (source.id.place.as_ref().into(), QueueDeclareOptions::default().passive());
            let asked = source.channel.queue_declare(name, passive, FieldTable::default());
            let empty = link.ask("queue.declare", asked).await?.message_count() == 0;
            if empty {
                let answered = source.channel.basic_qos(self.prefetch, BasicQosOptions::default());
                link.ask("basic.qos", answered).await?;
            }
            left.push(!empty);
        }
        self.take(&mut Context::from_waker(Waker::noop()), usize::MAX)?;
        for (source, left) in self.sources.iter_mut().zip(left) {
            if !left {
                source.expected = 0;
            }
        }
        Ok(())
    }

    /// Waits for deliveries, or for the end of a look at quiet queues, which is then returned.
    fn poll_arrived(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Found>, BrokerError>> {
        if let Poll::Ready(arrived) = self.poll_deliveries(context) {
            return Poll::Ready(arrived.map(|()| None));
        }
        match &mut self.look {
            Some(look) => look.as_mut().poll(context).map(|found| found.map(Some)),
            None => Poll::Pending,
        }
    }

    /// Asks, after a long silence, whether the server is there and still knows this consumer.
    fn look_at_quiet_queues(&mut self) {
        let places = self.sources.iter().map(|source| Arc::clone(&source.id.place)).collect();
        self.look = Some(Box::pin(ask(Arc::clone(&self.link), Arc::clone(&self.config), places)));
    }

    fn judge_quiet_queues(&mut self, found: Found) -> Result<(), BrokerError> {
        let mut stuck = None;
        for (source, found) in self.sources.iter().zip(found) {
            let place = &source.id.place;
            let found = found.ok_or_else(|| BrokerError::Destination(format!("queue `{place}` is gone")))?;
            if found.consumers == 0 {
                let why = format!("queue `{place}`: the server does not know this consumer any more");
                return Err(BrokerError::Session(why));
            }
            if found.consumers == 1 && found.ready > 0 && source.delivered == source.acknowledged {
                stuck = Some(format!("queue `{place}`: messages are ready and none is delivered"));
            }
        }
        // The first time it may be a message that has just come.
        match stuck {
            Some(why) if self.suspected => Err(BrokerError::Session(why)),
            found => {
                self.suspected = found.is_some();
                Ok(())
            }
        }
    }
}

impl Drop for RabbitSubscriber {
    /// Cuts the socket before the library's handles are dropped (R29).
    fn drop(&mut self) {
        self.link.cut();
    }
}

/// What the server tells about these queues, asked on a channel of its own.
async fn ask(link: Arc<Link>, config: Arc<Known>, places: Vec<Arc<str>>) -> Result<Found, BrokerError> {
    let mut topology = Topology::new(&link, &config);
    let mut found = Vec::with_capacity(places.len());
    for place in &places {
        found.push(topology.queue_as_it_stands(place).await?);
    }
    Ok(found)
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

    /// Removes one tag that is acknowledged alone; returns its weight if it was still there.
    fn give_up_one(&mut self, tag: u64) -> Option<usize> {
        let at = self.in_flight.binary_search_by_key(&tag, |(tag, _)| *tag).ok()?;
        self.in_flight.remove(at).map(|(_, weight)| weight)
    }

    /// Removes all tags up to this one, which are acknowledged. Returns their number and bytes, and
    /// the last of them: the server closes the channel for a tag that it does not know any more.
    fn give_up(&mut self, through: u64) -> (InFlight, Option<u64>) {
        self.acknowledged = through;
        let rows = self.in_flight.partition_point(|(tag, _)| *tag <= through);
        let (mut bytes, mut last) = (0, None);
        for (tag, weight) in self.in_flight.drain(..rows) {
            bytes += weight;
            last = Some(tag);
        }
        (InFlight { rows, bytes }, last)
    }

    /// Sends an acknowledgement; returns whether it was sent. A failure loses nothing: the inbox
    /// knows these messages, and `next` reports the end of the channel.
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
            return Ok(Event::Assigned(self.sources.iter().map(|source| source.id.clone()).collect()));
        }
        loop {
            let quiet = match self.look {
                // Each of its questions has a deadline.
                Some(_) => Duration::MAX,
                None => self.config.quiet_check.saturating_sub(self.last_delivery.elapsed()),
            };
            // Cancel safety: taken deliveries stay in `waiting` until they are returned, and a look
            // stays in `look` until it has ended.
            let arrived = std::future::poll_fn(|context| self.poll_arrived(context));
            match tokio::time::timeout(quiet, arrived).await {
                Ok(Ok(None)) => {
                    self.last_delivery = Instant::now();
                    (self.look, self.suspected) = (None, false);
                    let count = self.waiting.len().min(DELIVERIES_MAX);
                    return Ok(Event::Deliveries(self.waiting.drain(..count).collect()));
                }
                Ok(Ok(Some(found))) => {
                    self.look = None;
                    self.judge_quiet_queues(found)?;
                    self.last_delivery = Instant::now();
                }
                Ok(Err(error)) => {
                    // A look that has ended must not be polled again.
                    self.look = None;
                    return Err(error);
                }
                Err(_) if self.paused => self.last_delivery = Instant::now(),
                Err(_) => self.look_at_quiet_queues(),
            }
        }
    }

    async fn acknowledge(&mut self, source: &PartitionId, through: i64) -> Result<(), BrokerError> {
        let Some(source) = self.sources.iter_mut().find(|known| known.id == *source) else { return Ok(()) };
        let through = u64::try_from(through).unwrap_or(0);
        if through > source.delivered {
            return Err(BrokerError::Session(format!(
                "queue `{}`: tag {through} was never delivered, the last one is {}",
                source.id.place, source.delivered
            )));
        }
        if through <= source.acknowledged {
            return Ok(());
        }
        let (gone, last) = source.give_up(through);
        self.in_flight.rows -= gone.rows;
        self.in_flight.bytes -= gone.bytes;
        if let Some(last) = last {
            source.acknowledge(last, true, self.config.close_deadline).await;
        }
        Ok(())
    }

    async fn finished(&mut self, source: &PartitionId, sequences: &[i64]) {
        let Some(source) = self.sources.iter_mut().find(|known| known.id == *source) else { return };
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
        if self.sources.iter().any(|source| source.expected > 0)
            && self.last_look.is_none_or(|at| at.elapsed() >= CAUGHT_UP_PAUSE)
        {
            self.last_look = Some(Instant::now());
            self.look_at_what_is_left().await?;
        }
        Ok(self.waiting.is_empty() && self.sources.iter().all(|source| source.expected == 0))
    }

    async fn close(self: Box<Self>) {
        for source in &self.sources {
            // Any request with an answer: the answer shows that the server has processed the
            // acknowledgements before it on this channel.
            let answered = source.channel.basic_qos(self.prefetch, BasicQosOptions::default());
            let _ = within(self.config.close_deadline, "basic.qos", answered).await;
        }
        // `connection.close` would requeue prefetched messages out of order (R29).
        self.link.cut();
    }
}
