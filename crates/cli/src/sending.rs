//! Messages that are sent to a broker without a relay, for `demo` and `bench`.

use std::time::Duration;

use chrono::Utc;
use uuid::Uuid;

use oncebox::app::{AnyBroker, AppError};
use oncebox::message::{NewMessage, OutgoingMessage};

/// How many messages are handed over at once.
const TOGETHER: usize = 1_000;
/// How long the broker may leave all messages unanswered.
const PATIENCE: Duration = Duration::from_secs(120);

/// A message as a relay would have read it from the outbox.
pub(super) fn outgoing(id: Uuid, message: NewMessage) -> OutgoingMessage {
    let NewMessage { topic, key, kind, headers, payload, content_type, .. } = message;
    let content_type = content_type.unwrap_or_default();
    OutgoingMessage { id, topic, key, kind, headers, payload, content_type, trace: None, created_at: Utc::now() }
}

/// Sends messages of one topic, and waits until the broker has each of them.
///
/// # Errors
/// The broker refused one, or was silent for too long.
pub(super) async fn send_all(broker: &AnyBroker, messages: &[OutgoingMessage]) -> Result<(), AppError> {
    let mut publisher = broker.publisher().await?;
    if let Some(first) = messages.first() {
        publisher.topic(&first.topic).await?;
    }
    for (at, some) in messages.chunks(TOGETHER).enumerate() {
        let rows = some.iter().enumerate().map(|(n, row)| ((at * TOGETHER + n) as u64, row.clone()));
        publisher.send(rows.collect()).await?;
    }
    let mut settled = Vec::new();
    while settled.len() < messages.len() {
        let before = settled.len();
        let more = tokio::time::timeout(PATIENCE, publisher.settle(&mut settled)).await;
        more.map_err(|_| AppError::failed(format!("the broker said nothing of a message within {PATIENCE:?}")))??;
        if settled.len() == before {
            return Err(AppError::failed("the broker's session ended before all messages were sent"));
        }
    }
    publisher.close().await;
    match settled.into_iter().find_map(|one| one.outcome.err()) {
        Some(why) => Err(AppError::failed(format!("the broker refused a message: {why:?}"))),
        None => Ok(()),
    }
}

#[cfg(all(test, feature = "embedded"))]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use oncebox::app::config::{Secret, Settings};

    /// Shown to fail: by counting proven messages alone (the wait has no end).
    #[tokio::test]
    async fn a_message_that_the_broker_refuses_ends_the_wait_with_its_reason() {
        let directory = tempfile::tempdir().unwrap();
        let mut settings = Settings::default();
        settings.broker.url = Secret(format!("embedded://{}", directory.path().join("broker.db").display()));
        let broker = oncebox::app::open_broker(&settings).await.unwrap();
        broker.declare(&["t".to_owned()]).await.unwrap();
        let message = |payload: &str| outgoing(Uuid::now_v7(), NewMessage::text("t", "k", payload));
        send_all(&broker, &[message("small"), message("small")]).await.unwrap();
        let refused = send_all(&broker, &[message("small"), message(&"x".repeat((64 << 20) + 1))]).await.unwrap_err();
        assert!(refused.message.contains("refused") && refused.message.contains("bytes"), "{refused}");
    }
}
