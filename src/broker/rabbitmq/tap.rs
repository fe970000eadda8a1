//! Reads what was published, for `demo`, `bench` and tests: a tap is a queue of its own beside the
//! consumers' queues.
//!
//! Guarantees: a tap gets every message that is published after it was opened. Each `read` returns
//! all of them since then, in the order of the queue, also those that an earlier `read` returned.
//! The server deletes a tap queue that was not read for an hour; reading it is an error then. After
//! a `read` that failed or was dropped, a later one may return messages twice.

use std::collections::HashMap;

use futures_util::StreamExt;
use lapin::Channel;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use tokio::sync::Mutex;

use super::config::Known;
use super::error::{streaming, within};
use super::socket::Link;
use super::wire;
use crate::broker::Subscription;
use crate::error::BrokerError;
use crate::message::Arrived;

/// The server deletes a tap that is not read for this long.
const EXPIRES_MILLIS: i32 = 60 * 60 * 1_000;
const PREFETCH: u16 = 1_000;

#[derive(Debug, Default)]
pub(super) struct Taps(Mutex<HashMap<String, Tap>>);

#[derive(Debug)]
struct Tap {
    queue: String,
    collected: Vec<Arrived>,
}

impl Taps {
    /// Opens a tap for a topic, unless it has one, for the messages that are published from now on.
    pub(super) async fn open(&self, config: &Known, topic: &str) -> Result<(), BrokerError> {
        let mut taps = self.0.lock().await;
        if taps.contains_key(topic) {
            return Ok(());
        }
        let link = Link::open(config, "oncebox tap").await?;
        let channel = link.channel().await?;
        let queue = format!("oncebox.tap.{}", uuid::Uuid::now_v7());
        let mut arguments = FieldTable::default();
        arguments.insert("x-expires".into(), AMQPValue::LongInt(EXPIRES_MILLIS));
        let declare = channel.queue_declare(queue.as_str().into(), QueueDeclareOptions::durable(), arguments);
        link.ask("queue.declare", declare).await?;
        let bind = channel.queue_bind(
            queue.as_str().into(),
            config.exchange.as_str().into(),
            topic.into(),
            QueueBindOptions::default(),
            FieldTable::default(),
        );
        link.ask("queue.bind", bind).await?;
        link.close().await;
        taps.insert(topic.to_owned(), Tap { queue, collected: Vec::new() });
        Ok(())
    }

    /// Forgets the taps of these topics, and returns their queues.
    pub(super) async fn forget(&self, subscriptions: &[Subscription]) -> Vec<String> {
        let mut taps = self.0.lock().await;
        let topics = subscriptions.iter().flat_map(|subscription| &subscription.topics);
        topics.filter_map(|topic| taps.remove(topic)).map(|tap| tap.queue).collect()
    }

    /// Returns everything that the tap got since it was opened.
    pub(super) async fn read(&self, config: &Known, topic: &str) -> Result<Vec<Arrived>, BrokerError> {
        let mut taps = self.0.lock().await;
        let tap = taps.get_mut(topic).ok_or_else(|| {
            BrokerError::Refused(format!(
                "RabbitMQ keeps no old messages: open a tap of topic `{topic}` before they are published"
            ))
        })?;
        let link = Link::open(config, "oncebox tap").await?;
        loop {
            // A new channel each time: closing it puts deliveries after the counted ones back to
            // their place in the queue.
            let channel = link.channel().await?;
            let passive = QueueDeclareOptions::default().passive();
            let count = channel.queue_declare(tap.queue.as_str().into(), passive, FieldTable::default());
            let ready = link.ask("queue.declare", count).await?.message_count();
            if ready == 0 {
                break;
            }
            drain(&link, &channel, tap, ready).await?;
            within(config.close_deadline, "channel.close", channel.close(200, "OK".into())).await?;
        }
        link.close().await;
        Ok(tap.collected.clone())
    }
}

async fn drain(link: &Link, channel: &Channel, tap: &mut Tap, ready: u32) -> Result<(), BrokerError> {
    let qos = channel.basic_qos(PREFETCH, BasicQosOptions::default());
    link.ask("basic.qos", qos).await?;
    let options = BasicConsumeOptions { exclusive: true, ..BasicConsumeOptions::default() };
    let consume = channel.basic_consume(tap.queue.as_str().into(), "".into(), options, FieldTable::default());
    let mut consumer = link.ask("basic.consume", consume).await?;
    for count in 1..=ready {
        let delivery = tokio::time::timeout(link.connect_deadline, consumer.next()).await;
        let delivery = match delivery {
            Ok(Some(Ok(delivery))) => delivery,
            Ok(Some(Err(error))) => return Err(streaming(&error)),
            Ok(None) => return Err(BrokerError::Destination(format!("the tap queue `{}` was deleted", tap.queue))),
            Err(_) => {
                return Err(BrokerError::Unavailable(format!(
                    "the tap queue `{}` delivered nothing before the deadline",
                    tap.queue
                )));
            }
        };
        let tag = delivery.delivery_tag;
        tap.collected.push(wire::arrived(delivery, &tap.queue));
        // One condition for both cases: the server closes a channel on which a tag is acknowledged
        // twice.
        if count == ready || count.is_multiple_of(u32::from(PREFETCH) / 2) {
            let ack = channel.basic_ack(tag, BasicAckOptions { multiple: true });
            link.ask("basic.ack", ack).await?;
        }
    }
    let cancel = channel.basic_cancel(consumer.tag(), lapin::options::BasicCancelOptions::default());
    link.ask("basic.cancel", cancel).await?;
    Ok(())
}
