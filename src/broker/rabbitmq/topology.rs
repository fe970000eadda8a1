//! Declares exchange, queues and bindings; a repeated declaration changes nothing (R30).
//!
//! Guarantees: queues are durable quorum queues with a single active consumer from their first
//! declaration. An existing queue with other arguments is refused by the name of the argument,
//! except for the delivery limit, which cannot be changed afterwards and is accepted as it is.
//! Behind a hash exchange all queues are bound before the first message can reach it.
//!
//! Not here: policies, which an operator sets (`check` says which).

use lapin::options::{
    ExchangeBindOptions, ExchangeDeclareOptions, ExchangeDeleteOptions, QueueBindOptions, QueueDeclareOptions,
    QueueDeleteOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Channel, ExchangeKind};

use super::config::RabbitConfig;
use super::error::{ACCESS_REFUSED, COMMAND_INVALID, Fault, NOT_FOUND, PRECONDITION_FAILED, inequivalent};
use super::socket::Link;
use crate::broker::Subscription;
use crate::error::BrokerError;
use crate::message::wire;

/// The argument for how often a queue delivers a message before it drops it. Servers that have such
/// a limit by default get -1, which means no limit; older servers do not know that value.
const DELIVERY_LIMIT: &str = "x-delivery-limit";
/// The exchange type of the plugin `rabbitmq_consistent_hash_exchange`.
const CONSISTENT_HASH: &str = "x-consistent-hash";
/// The remedy where the plugin is missing.
pub(super) const ENABLE_PLUGIN: &str = "rabbitmq-plugins enable rabbitmq_consistent_hash_exchange";

#[derive(Debug, Clone)]
pub(super) struct QueueState {
    pub(super) ready: u32,
    pub(super) consumers: u32,
    pub(super) limit: Limit,
}

/// What the server tells of a queue's delivery limit.
#[derive(Debug, Clone, Copy)]
pub(super) enum Limit {
    /// It is the one that we ask for: none.
    AsAsked,
    /// It is another one: the number that the queue was declared with, or `None` where it was
    /// declared without a limit or the number is not known.
    Other(Option<i32>),
    /// Only a user with the right to declare the queue is told its arguments.
    Unknown,
}

impl Limit {
    /// Why the queue throws messages away, or may do so as far as AMQP shows; `None` where it does
    /// not. `by_default`: the server has a limit for queues that were declared without one.
    pub(super) fn fault(self, by_default: bool) -> Option<String> {
        match self {
            Self::Other(Some(limit)) if limit >= 0 => {
                Some(format!("its delivery limit is {limit}: a message that is delivered more often is thrown away"))
            }
            Self::Other(None) if by_default => Some(
                "it was declared without the delivery limit -1: unless a policy sets it, which AMQP does not show, a \
                 message that is delivered more often than the server's limit allows is thrown away"
                    .to_owned(),
            ),
            _ => None,
        }
    }
}

/// The names of the queues for [`Subscription::queue`]: one, or `partitions` of them behind the
/// hash exchange.
pub(super) fn queues(config: &RabbitConfig, queue: &str) -> Vec<String> {
    match config.partitions {
        1 => vec![queue.to_owned()],
        many => (0..many).map(|at| format!("{queue}.{at}")).collect(),
    }
}

pub(super) fn hash_exchange(queue: &str) -> String {
    format!("{queue}.hash")
}

/// Declares things on one connection. The server closes the channel of a refused declaration, so
/// the next request opens another channel.
#[derive(Debug)]
pub(super) struct Topology<'l> {
    pub(super) link: &'l Link,
    pub(super) config: &'l RabbitConfig,
    channel: Option<Channel>,
    /// False once the server did not allow this user to bind something.
    pub(super) may_bind: bool,
}

impl<'l> Topology<'l> {
    pub(super) fn new(link: &'l Link, config: &'l RabbitConfig) -> Self {
        Self { link, config, channel: None, may_bind: true }
    }

    pub(super) async fn channel(&mut self) -> Result<Channel, Fault> {
        match &self.channel {
            Some(channel) if channel.status().connected() => Ok(channel.clone()),
            _ => Ok(self.channel.insert(self.link.channel().await?).clone()),
        }
    }

    pub(super) async fn declare_exchange(
        &mut self,
        name: &str,
        kind: ExchangeKind,
        options: ExchangeDeclareOptions,
        arguments: FieldTable,
    ) -> Result<(), Fault> {
        let channel = self.channel().await?;
        self.link.ask("exchange.declare", channel.exchange_declare(name.into(), kind, options, arguments)).await
    }

    /// Whether an exchange of this name exists, of any kind.
    pub(super) async fn exchange_exists(&mut self, name: &str) -> Result<bool, Fault> {
        let passive = ExchangeDeclareOptions { passive: true, ..ExchangeDeclareOptions::default() };
        match self.declare_exchange(name, ExchangeKind::Topic, passive, FieldTable::default()).await {
            Ok(()) => Ok(true),
            Err(fault) if fault.code() == Some(NOT_FOUND) => Ok(false),
            Err(fault) => Err(fault),
        }
    }

    /// Declares the durable topic exchange of the publisher.
    pub(super) async fn exchange(&mut self) -> Result<(), BrokerError> {
        let config = self.config;
        let mut arguments = FieldTable::default();
        if let Some(alternate) = &config.alternate_exchange {
            arguments.insert("alternate-exchange".into(), AMQPValue::LongString(alternate.as_str().into()));
        }
        let declared = self.declare_exchange(&config.exchange, ExchangeKind::Topic, durable(), arguments).await;
        self.accept(declared, &config.exchange, "exchange").await
    }

    /// Declares the exchange if it does not exist; one that exists is taken as it is.
    pub(super) async fn exchange_where_missing(&mut self) -> Result<(), BrokerError> {
        if self.exchange_exists(&self.config.exchange).await? {
            return Ok(());
        }
        self.exchange().await
    }

    /// Accepts an existing object where this user has no right to declare it; refuses one with
    /// other properties by name.
    async fn accept(&mut self, declared: Result<(), Fault>, name: &str, what: &str) -> Result<(), BrokerError> {
        match declared {
            Err(fault) if fault.code() == Some(ACCESS_REFUSED) => {
                if self.exchange_exists(name).await? {
                    Ok(())
                } else {
                    Err(fault.into())
                }
            }
            Err(fault) if is_unknown_type(&fault) => Err(no_plugin(&fault.text())),
            Err(fault) if fault.code() == Some(PRECONDITION_FAILED) => Err(BrokerError::Refused(format!(
                "the {what} `{name}` is there with another `{}`: {}; delete it, or set the same here",
                inequivalent(&fault.text()).unwrap_or("property"),
                fault.text()
            ))),
            other => Ok(other?),
        }
    }

    /// Declares the queues of the configured number. Returns them in order.
    pub(super) async fn declare_queues(
        &mut self,
        queue: &str,
        unlimited: bool,
    ) -> Result<Vec<(String, QueueState)>, BrokerError> {
        let queues = queues(self.config, queue);
        let mut found = Vec::with_capacity(queues.len());
        for queue in queues {
            let state = self.queue(&queue, unlimited).await?;
            found.push((queue, state));
        }
        Ok(found)
    }

    /// Declares the queues of the configured number and binds them.
    pub(super) async fn bind_layout(
        &mut self,
        subscription: &Subscription,
        topic: &str,
        unlimited: bool,
    ) -> Result<Vec<(String, QueueState)>, BrokerError> {
        let found = self.declare_queues(&subscription.queue(topic), unlimited).await?;
        self.bind_queues(subscription, topic).await?;
        Ok(found)
    }

    /// Binds the queues of the configured number, which exist. A repeated call changes nothing.
    pub(super) async fn bind_queues(&mut self, subscription: &Subscription, topic: &str) -> Result<(), BrokerError> {
        let (config, queue) = (self.config, subscription.queue(topic));
        if config.partitions == 1 {
            return self.bind_queue(&queue, &config.exchange, topic).await;
        }
        let hash = hash_exchange(&queue);
        let declared = self.declare_exchange(&hash, hash_kind(), durable(), hash_arguments()).await;
        self.accept(declared, &hash, "hash exchange").await?;
        for queue in queues(config, &queue) {
            // The routing key of a binding to a hash exchange is a weight.
            self.bind_queue(&queue, &hash, "1").await?;
        }
        // Bound last: a message before that would be hashed over some queues only.
        let channel = self.channel().await?;
        let bound = channel.exchange_bind(
            hash.as_str().into(),
            config.exchange.as_str().into(),
            topic.into(),
            ExchangeBindOptions::default(),
            FieldTable::default(),
        );
        let bound = self.link.ask("exchange.bind", bound).await;
        self.accept_binding(bound, &hash, &config.exchange)
    }

    pub(super) async fn remove(&mut self, subscriptions: &[Subscription]) -> Result<(), BrokerError> {
        for subscription in subscriptions {
            for topic in &subscription.topics {
                let queue = subscription.queue(topic);
                for one in queues(self.config, &queue) {
                    self.delete_queue(&one).await?;
                }
                if self.config.partitions > 1 {
                    self.delete_exchange(&hash_exchange(&queue)).await?;
                }
            }
        }
        Ok(())
    }

    pub(super) async fn delete_queue(&mut self, name: &str) -> Result<(), Fault> {
        let channel = self.channel().await?;
        let gone = channel.queue_delete(name.into(), QueueDeleteOptions::default());
        self.link.ask("queue.delete", gone).await.map(drop)
    }

    pub(super) async fn delete_exchange(&mut self, name: &str) -> Result<(), Fault> {
        let channel = self.channel().await?;
        let gone = channel.exchange_delete(name.into(), ExchangeDeleteOptions::default());
        self.link.ask("exchange.delete", gone).await
    }

    /// Declares a quorum queue with a single active consumer, or accepts an existing one.
    pub(super) async fn queue(&mut self, name: &str, unlimited: bool) -> Result<QueueState, BrokerError> {
        let limit = unlimited.then_some(-1);
        let mut fault = match self.declare_queue(name, limit).await {
            Ok(found) => return Ok(found),
            Err(fault) => fault,
        };
        if differs_in_limit(&fault) {
            // The server names one argument at a time. A declaration with the existing limit shows
            // whether the limit was the only difference.
            let limit = current_limit(&fault.text());
            match self.declare_queue(name, limit).await {
                Ok(found) => return Ok(QueueState { limit: Limit::Other(limit), ..found }),
                Err(other) => fault = other,
            }
        }
        let (code, differs) = (fault.code(), differs_in_limit(&fault));
        if code == Some(ACCESS_REFUSED) || differs {
            let found = self.queue_as_it_stands(name).await?.ok_or(fault)?;
            return Ok(if differs { QueueState { limit: Limit::Other(None), ..found } } else { found });
        }
        if code == Some(PRECONDITION_FAILED) {
            return Err(BrokerError::Refused(format!(
                "the queue `{name}` is there with another `{}`: {}; delete it when it is empty, or give this consumer \
                 another queue",
                inequivalent(&fault.text()).unwrap_or("property"),
                fault.text()
            )));
        }
        Err(fault.into())
    }

    async fn declare_queue(&mut self, name: &str, limit: Option<i32>) -> Result<QueueState, Fault> {
        let mut arguments = FieldTable::default();
        arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
        arguments.insert("x-single-active-consumer".into(), AMQPValue::Boolean(true));
        if let Some(limit) = limit {
            arguments.insert(DELIVERY_LIMIT.into(), AMQPValue::LongInt(limit));
        }
        self.ask_queue(name, QueueDeclareOptions::durable(), arguments).await
    }

    /// What the server tells about a queue (passive declare); `None` where it does not exist.
    pub(super) async fn queue_as_it_stands(&mut self, name: &str) -> Result<Option<QueueState>, Fault> {
        match self.ask_queue(name, QueueDeclareOptions::default().passive(), FieldTable::default()).await {
            Ok(found) => Ok(Some(found)),
            Err(fault) if fault.code() == Some(NOT_FOUND) => Ok(None),
            Err(fault) => Err(fault),
        }
    }

    async fn ask_queue(
        &mut self,
        name: &str,
        options: QueueDeclareOptions,
        arguments: FieldTable,
    ) -> Result<QueueState, Fault> {
        let channel = self.channel().await?;
        let limit = if options.passive { Limit::Unknown } else { Limit::AsAsked };
        let declared = channel.queue_declare(name.into(), options, arguments);
        let queue = self.link.ask("queue.declare", declared).await?;
        let (ready, consumers) = (queue.message_count(), queue.consumer_count());
        Ok(QueueState { ready, consumers, limit })
    }

    async fn bind_queue(&mut self, queue: &str, exchange: &str, routing_key: &str) -> Result<(), BrokerError> {
        let channel = self.channel().await?;
        let bound = channel.queue_bind(
            queue.into(),
            exchange.into(),
            routing_key.into(),
            QueueBindOptions::default(),
            FieldTable::default(),
        );
        let bound = self.link.ask("queue.bind", bound).await;
        self.accept_binding(bound, queue, exchange)
    }

    fn accept_binding(&mut self, bound: Result<(), Fault>, to: &str, exchange: &str) -> Result<(), BrokerError> {
        match bound {
            Err(fault) if fault.code() == Some(ACCESS_REFUSED) => {
                // Without the right, what an operator bound is used; AMQP does not show it.
                self.may_bind = false;
                tracing::warn!(to, exchange, why = fault.text(), "no right to bind; taking the binding as it stands");
                Ok(())
            }
            Err(fault) if fault.code() == Some(NOT_FOUND) => Err(BrokerError::Destination(format!(
                "`{to}` cannot be bound to the exchange `{exchange}`: {}; was it deleted?",
                fault.text()
            ))),
            other => Ok(other?),
        }
    }

    /// Whether the plugin for hash exchanges is enabled: declares and deletes one.
    pub(super) async fn has_hash_plugin(&mut self) -> Result<bool, Fault> {
        let name = format!("oncebox.probe.{}", uuid::Uuid::now_v7());
        let fleeting = ExchangeDeclareOptions { auto_delete: true, ..ExchangeDeclareOptions::default() };
        match self.declare_exchange(&name, hash_kind(), fleeting, hash_arguments()).await {
            Ok(()) => {
                self.delete_exchange(&name).await?;
                Ok(true)
            }
            Err(fault) if is_unknown_type(&fault) => Ok(false),
            Err(fault) => Err(fault),
        }
    }
}

fn no_plugin(text: &str) -> BrokerError {
    BrokerError::Refused(format!(
        "partitions above 1 need the consistent-hash exchange, which the server does not know ({text}); run \
         `{ENABLE_PLUGIN}` on every node"
    ))
}

/// Whether the plugin of an exchange type is missing. The server answers 503 and closes the
/// connection before 4.0, and answers 406 since.
fn is_unknown_type(fault: &Fault) -> bool {
    fault.code() == Some(COMMAND_INVALID)
        || fault.code() == Some(PRECONDITION_FAILED) && fault.text().contains("unknown exchange type")
}

pub(super) fn durable() -> ExchangeDeclareOptions {
    ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() }
}

fn hash_kind() -> ExchangeKind {
    ExchangeKind::Custom(CONSISTENT_HASH.to_owned())
}

fn hash_arguments() -> FieldTable {
    let mut arguments = FieldTable::default();
    arguments.insert("hash-header".into(), AMQPValue::LongString(wire::ONCEBOX_HASH.into()));
    arguments
}

fn differs_in_limit(fault: &Fault) -> bool {
    fault.code() == Some(PRECONDITION_FAILED) && inequivalent(&fault.text()) == Some(DELIVERY_LIMIT)
}

/// Reads `.. but current is the value '5' of type 'signedint'`; `None` for `.. current is none`.
fn current_limit(text: &str) -> Option<i32> {
    let current = text.rsplit_once("current is the value '")?.1;
    current.split('\'').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r30_the_limit_a_queue_has_is_read_from_the_servers_words() {
        let text = "PRECONDITION_FAILED - inequivalent arg 'x-delivery-limit' for queue 'q' in vhost '/': received the \
                    value '-1' of type 'signedint' but current is ";
        assert_eq!(current_limit(&format!("{text}none")), None);
        assert_eq!(current_limit(&format!("{text}the value '5' of type 'signedint'")), Some(5));
    }

    #[test]
    fn r30_queue_names_are_those_of_the_interface() {
        let mut config = RabbitConfig::new("amqp://h");
        let queue = Subscription::new("ledger", vec!["payments".into()]).queue("payments");
        assert_eq!(queues(&config, &queue), ["payments.ledger"]);
        config.partitions = 2;
        assert_eq!(queues(&config, &queue), ["payments.ledger.0", "payments.ledger.1"]);
        assert_eq!(hash_exchange(&queue), "payments.ledger.hash");
    }
}
