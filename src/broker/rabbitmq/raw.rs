//! The AMQP client alone: it publishes the properties and headers of a row. `bench` compares
//! oncebox with it.
//!
//! Promise: one connection, one confirm channel, a sliding window of confirms. It keeps no order; a
//! return or a nack ends it with an error.

use futures_util::stream::{FuturesUnordered, StreamExt};
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::{Channel, Confirmation};

use super::config::{Known, RabbitConfig};
use super::error::classify;
use super::socket::Link;
use super::wire;
use crate::error::BrokerError;
use crate::message::OutgoingMessage;

/// A publisher without any of oncebox's guarantees.
#[derive(Debug)]
pub struct RawPublisher {
    channel: Channel,
    _link: Link,
    exchange: String,
    source: String,
    window: usize,
}

impl RawPublisher {
    /// Connects. At most `window` publishes are unconfirmed at a time.
    ///
    /// # Errors
    /// The same errors as the adapter's own sessions.
    pub async fn open(config: &RabbitConfig, window: usize) -> Result<Self, BrokerError> {
        let link = Link::open(&Known::new(config.clone()), "oncebox bench").await?;
        let channel = link.channel().await?;
        link.ask("confirm.select", channel.confirm_select(ConfirmSelectOptions::default())).await?;
        Ok(Self {
            channel,
            _link: link,
            exchange: config.exchange.clone(),
            source: config.source.clone(),
            window: window.max(1),
        })
    }

    /// Publishes all messages, and waits until all are confirmed.
    ///
    /// # Errors
    /// The first nack or return, or the error that closed the channel.
    pub async fn send_all(&self, messages: &[OutgoingMessage]) -> Result<(), BrokerError> {
        let mut unconfirmed = FuturesUnordered::new();
        for message in messages {
            if unconfirmed.len() >= self.window
                && let Some(confirmed) = unconfirmed.next().await
            {
                believe(confirmed)?;
            }
            let properties = wire::properties(message, &self.source).map_err(BrokerError::Refused)?;
            let (exchange, topic) = (self.exchange.as_str().into(), message.topic.as_str().into());
            let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
            let published = self.channel.basic_publish(exchange, topic, options, &message.payload, properties);
            unconfirmed.push(published.await.map_err(|error| classify(&error))?);
        }
        while let Some(confirmed) = unconfirmed.next().await {
            believe(confirmed)?;
        }
        Ok(())
    }
}

fn believe(confirmed: lapin::Result<Confirmation>) -> Result<(), BrokerError> {
    match confirmed.map_err(|error| classify(&error))? {
        Confirmation::Ack(None) => Ok(()),
        other => Err(BrokerError::Session(format!("the raw publisher got {other:?}"))),
    }
}
