//! The AMQP client alone: it publishes the properties and headers of a row. `bench` compares
//! oncebox with it.
//!
//! Promise: one connection, one confirm channel, a sliding window of confirms. It keeps no order; a
//! return or a nack ends it with an error.

use std::sync::Arc;

use futures_util::stream::{FuturesUnordered, StreamExt};
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::{Channel, Confirmation};

use super::config::Known;
use super::error::classify;
use super::socket::Link;
use super::{RabbitBroker, wire};
use crate::broker::Raw;
use crate::error::BrokerError;
use crate::message::OutgoingMessage;

/// The most publishes that are not confirmed at a time.
const WINDOW: usize = 1_000;

/// A publisher without any of oncebox's guarantees.
struct RawPublisher {
    channel: Channel,
    _link: Link,
    config: Arc<Known>,
}

impl RabbitBroker {
    /// A connection without any of oncebox's guarantees, for `bench`. The function that it returns
    /// publishes messages, and waits until all are confirmed.
    ///
    /// # Errors
    /// The same errors as those of a session. The function gives the first nack or return, or the
    /// error that closed the channel.
    pub async fn raw(&self) -> Result<Raw, BrokerError> {
        let link = Link::open(&self.config, "oncebox bench").await?;
        let channel = link.channel().await?;
        link.ask("confirm.select", channel.confirm_select(ConfirmSelectOptions::default())).await?;
        let raw = Arc::new(RawPublisher { channel, _link: link, config: Arc::clone(&self.config) });
        Ok(Box::new(move |messages| {
            let raw = Arc::clone(&raw);
            Box::pin(async move { raw.send_all(&messages).await })
        }))
    }
}

impl RawPublisher {
    async fn send_all(&self, messages: &[OutgoingMessage]) -> Result<(), BrokerError> {
        let mut unconfirmed = FuturesUnordered::new();
        for message in messages {
            if unconfirmed.len() >= WINDOW
                && let Some(confirmed) = unconfirmed.next().await
            {
                believe(confirmed)?;
            }
            let properties = wire::properties(message, &self.config.source).map_err(BrokerError::Refused)?;
            let (exchange, topic) = (self.config.exchange.as_str().into(), message.topic.as_str().into());
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
