//! Messages that are sent to a broker without a relay, for `demo` and `bench`.

use std::time::Duration;

use chrono::Utc;
use uuid::Uuid;

use super::common::AnyBroker;
use oncebox::BrokerError;
use oncebox::app::AppError;
use oncebox::message::{NewMessage, OutgoingMessage};

/// How many messages are handed over at once.
const BATCH: usize = 1_000;
/// How long to wait for a session, for room for a batch, for each next answer, and for the close.
const PATIENCE: Duration = Duration::from_secs(120);

/// A message as a relay would have read it from the outbox.
pub(super) fn outgoing(id: Uuid, message: NewMessage) -> OutgoingMessage {
    let NewMessage { topic, key, kind, headers, payload, content_type, .. } = message;
    let content_type = content_type.unwrap_or_default();
    OutgoingMessage { id, topic, key, kind, headers, payload, content_type, trace: None, created_at: Utc::now() }
}

/// Sends messages of one topic, and waits until the broker has each of them. Fails if the broker
/// refuses one, or is silent for too long.
pub(super) async fn send_all(broker: &AnyBroker, messages: &[OutgoingMessage]) -> Result<(), AppError> {
    send_within(broker, messages, PATIENCE).await
}

/// Does so, and waits at most `patience` for the session, for room for each batch, and for each
/// next answer.
async fn send_within(broker: &AnyBroker, messages: &[OutgoingMessage], patience: Duration) -> Result<(), AppError> {
    let opening = async {
        let mut publisher = broker.publisher().await?;
        if let Some(first) = messages.first() {
            publisher.topic(&first.topic).await?;
        }
        Ok::<_, BrokerError>(publisher)
    };
    let opened = tokio::time::timeout(patience, opening).await;
    let mut publisher =
        opened.map_err(|_| AppError::failed(format!("the broker opened no session within {patience:?}")))??;
    for (at, batch) in messages.chunks(BATCH).enumerate() {
        let batch = batch.iter().enumerate().map(|(n, message)| ((at * BATCH + n) as u64, message.clone()));
        let taken = tokio::time::timeout(patience, publisher.send(batch.collect())).await;
        taken.map_err(|_| AppError::failed(format!("the broker had no room for a message within {patience:?}")))??;
    }
    let mut settled = Vec::new();
    while settled.len() < messages.len() {
        let before = settled.len();
        let more = tokio::time::timeout(patience, publisher.settle(&mut settled)).await;
        more.map_err(|_| AppError::failed(format!("the broker answered no message within {patience:?}")))??;
        if settled.len() == before {
            return Err(AppError::failed("the broker's session ended before all messages were answered"));
        }
        if let Some(why) = settled[before..].iter().find_map(|one| one.outcome.as_ref().err()) {
            return Err(AppError::failed(format!("the broker refused a message: {why:?}")));
        }
    }
    // All is answered: a broker that does not close the session takes nothing back.
    let _closed = tokio::time::timeout(patience, publisher.close()).await;
    Ok(())
}

#[cfg(all(test, feature = "embedded"))]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use oncebox::app::config::{Secret, Settings};
    use oncebox::sqlx::{Connection, SqliteConnection, raw_sql};

    async fn broker(directory: &tempfile::TempDir) -> AnyBroker {
        let mut settings = Settings::default();
        settings.broker.url = Secret(format!("embedded://{}", file(directory)));
        let broker = oncebox::app::open_broker(&settings, None).await.unwrap();
        broker.declare(&["t".to_owned()]).await.unwrap();
        broker
    }

    fn file(directory: &tempfile::TempDir) -> String {
        directory.path().join("broker.db").display().to_string()
    }

    fn message(payload: &str) -> OutgoingMessage {
        outgoing(Uuid::now_v7(), NewMessage::text("t", "k", payload))
    }

    /// Shown to fail: by counting proven messages alone (the wait has no end).
    #[tokio::test]
    async fn a_message_that_the_broker_refuses_ends_the_wait_with_its_reason() {
        let directory = tempfile::tempdir().unwrap();
        let broker = broker(&directory).await;
        send_all(&broker, &[message("small"), message("small")]).await.unwrap();
        let refused = send_all(&broker, &[message("small"), message(&"x".repeat((64 << 20) + 1))]).await.unwrap_err();
        assert!(refused.message.contains("refused") && refused.message.contains("bytes"), "{refused}");
    }

    /// Another process has the turn at the file. Shown to fail: by an opening without a limit (it
    /// waited for as long as the broker itself does).
    #[tokio::test]
    async fn a_broker_that_opens_no_session_ends_the_wait_for_it() {
        let directory = tempfile::tempdir().unwrap();
        let broker = broker(&directory).await;
        let turn = std::fs::File::open(format!("{}.lock", file(&directory))).unwrap();
        let _turn = tokio::task::spawn_blocking(move || turn.lock().map(|()| turn)).await.unwrap().unwrap();
        let error = send_within(&broker, &[message("small")], Duration::from_millis(500)).await.unwrap_err();
        assert!(error.message.contains("opened no session"), "{error}");
    }

    /// The file is held, and the writer waits for it, so that what was sent keeps its room. Shown
    /// to fail: by a limit for the answers alone (the wait lasts as long as that of the writer).
    #[tokio::test]
    async fn a_broker_that_has_no_room_ends_the_wait_for_it() {
        let directory = tempfile::tempdir().unwrap();
        let broker = broker(&directory).await;
        let mut holder = SqliteConnection::connect(&file(&directory)).await.unwrap();
        raw_sql("begin immediate").execute(&mut holder).await.unwrap();
        let payload = "x".repeat(1 << 20);
        let messages: Vec<_> = (0..48).map(|_| message(&payload)).collect();
        // The patience is below the 800 ms after which this broker says that it is blocked, and
        // takes what it is sent. On a busy machine the opening may take longer: that tells nothing.
        let opened = async {
            loop {
                let error = send_within(&broker, &messages, Duration::from_millis(500)).await.unwrap_err();
                if !error.message.contains("opened no session") {
                    return error;
                }
            }
        };
        let error = tokio::time::timeout(Duration::from_secs(60), opened).await.unwrap();
        assert!(error.message.contains("no room"), "{error}");
        raw_sql("rollback").execute(&mut holder).await.unwrap();
    }
}
