//! The messages of the benchmarks, and clients that send them without oncebox.

use std::sync::Arc;
use std::time::Duration;

#[cfg(any(feature = "kafka", feature = "rabbitmq"))]
use futures_util::future::BoxFuture;
use uuid::Uuid;

use super::Load;
use super::yard::ACCOUNTS;
use crate::common::AnyBroker;
use crate::sending::{outgoing, send_all};
#[cfg(any(feature = "kafka", feature = "rabbitmq"))]
use oncebox::BrokerError;
use oncebox::app::AppError;
use oncebox::app::config::Settings;
use oncebox::message::{NewMessage, OutgoingMessage};

pub(super) const KIND: &str = "bench.row";

/// Makes messages: keys are random, payloads have one size and name an account.
#[derive(Debug, Clone)]
pub(super) struct Maker {
    topic: String,
    keys: u32,
    filler: String,
}

impl Maker {
    pub(super) fn new(topic: &str, load: Load) -> Self {
        Self { topic: topic.to_owned(), keys: load.keys, filler: "x".repeat(load.size) }
    }

    pub(super) fn message(&self) -> NewMessage {
        let key = fastrand::u32(..self.keys);
        NewMessage::text(&self.topic, KIND, self.payload(key)).with_key(format!("acc-{key}"))
    }

    /// Messages as a relay would have read them.
    pub(super) fn rows(&self, count: usize) -> Vec<OutgoingMessage> {
        (0..count).map(|_| outgoing(Uuid::now_v7(), self.message())).collect()
    }

    fn payload(&self, key: u32) -> String {
        let beginning = format!("{{\"account\":{},\"filler\":\"", i64::from(key) % ACCOUNTS);
        let filler = self.filler.get(..self.filler.len().saturating_sub(beginning.len() + 2)).unwrap_or_default();
        format!("{beginning}{filler}\"}}")
    }
}

/// The account that a payload names.
pub(super) fn account(payload: &[u8]) -> i64 {
    let digits = payload.iter().skip("{\"account\":".len()).take_while(|byte| byte.is_ascii_digit());
    digits.fold(0, |number, digit| number * 10 + i64::from(digit - b'0'))
}

/// Sends these messages, and waits for the last proof.
#[cfg(any(feature = "kafka", feature = "rabbitmq"))]
type SendAll = Box<dyn Fn(Arc<Vec<OutgoingMessage>>) -> BoxFuture<'static, Result<(), BrokerError>> + Send + Sync>;

/// A broker's client without oncebox.
pub(super) enum Raw {
    #[cfg(any(feature = "kafka", feature = "rabbitmq"))]
    Client(SendAll),
    /// The embedded broker has no other client: this uses its session without the relay.
    Own(AnyBroker),
}

impl Raw {
    pub(super) async fn open(settings: &Settings, broker: &AnyBroker, linger: Duration) -> Result<Self, AppError> {
        match broker.name() {
            #[cfg(feature = "kafka")]
            "kafka" => {
                let broker = oncebox::broker::kafka::KafkaBroker::new(settings.try_into()?)?;
                Ok(Self::Client(broker.raw(linger)?))
            }
            #[cfg(feature = "rabbitmq")]
            "rabbitmq" => {
                let broker = oncebox::broker::rabbitmq::RabbitBroker::new(settings.into())?;
                Ok(Self::Client(broker.raw().await?))
            }
            _ => {
                let _ = (settings, linger);
                Ok(Self::Own(Arc::clone(broker)))
            }
        }
    }

    /// Sends all messages as fast as the client can, and waits for the last proof.
    pub(super) async fn send_all(&self, messages: Arc<Vec<OutgoingMessage>>) -> Result<(), AppError> {
        match self {
            #[cfg(any(feature = "kafka", feature = "rabbitmq"))]
            Self::Client(send_all) => Ok(send_all(messages).await?),
            Self::Own(broker) => send_all(broker, &messages).await,
        }
    }

    pub(super) async fn send_one(&self, message: OutgoingMessage) -> Result<(), AppError> {
        self.send_all(Arc::new(vec![message])).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_payload_has_its_size_and_names_its_account() {
        let maker = Maker::new("t", Load { messages: 1, size: 300, keys: 70, rounds: 1 });
        for row in maker.rows(50) {
            assert_eq!(row.payload.len(), 300);
            assert_eq!(Some(format!("acc-{}", account(&row.payload))), row.key);
        }
        let small = Maker::new("t", Load { messages: 1, size: 1, keys: 1, rounds: 1 });
        assert_eq!(account(&small.rows(1)[0].payload), 0);
    }
}
