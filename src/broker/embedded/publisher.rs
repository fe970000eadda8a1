//! Appending: a task writes the rows of a session, all that wait together in one transaction.
//!
//! Guarantees: a row is settled after the commit that contains it, which is on disk. Rows are
//! appended in the order in which they were sent, so that the log has a prefix of the session
//! (R15). When a row itself is refused, later rows of its key are not appended (`Refusal::Behind`)
//! until the runtime has received the refusal. While the file takes nothing (its disk is full,
//! another process holds it), the broker is blocked: the rows wait, and no message is at fault. A
//! session that has ended begins no append, even if its writer was waiting for the file then.
//!
//! No topic is ever missing: its first row creates it.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::time::Instant;

use super::log::{Log, LogConnection, WriteTx};
use super::record::{self, NewRecord, partition_hash, position};
use super::retention;
use super::topology::{self, Topic};
use crate::broker::{Publisher, Receipt, Refusal, Settled, TopicState};
use crate::error::BrokerError;
use crate::message::OutgoingMessage;
use crate::task;

/// Most rows of one transaction: the write lock is held for some 20 ms.
const ROWS_PER_COMMIT: usize = 5_000;
/// At so many bytes a transaction takes no other row.
const BYTES_PER_COMMIT: usize = 8 * 1024 * 1024;
/// Most bytes that may wait for the writer; `send` waits above it. While the file takes nothing it
/// does not, and the caller's own bound on what is in flight holds alone.
const BYTES_WAITING_MAX: usize = 32 * 1024 * 1024;
/// How often old rows are deleted, where the setting `retention` is on.
const TRIM_EVERY: Duration = Duration::from_secs(30);

/// How often a write is tried again while the file takes nothing.
const BLOCKED_RETRY: Duration = Duration::from_millis(250);
/// A longer wait for the file is shown: the broker is blocked. By default it is less than the
/// second after which the relay may call a topic silent.
const WAIT_SHOWN: Duration = Duration::from_millis(800);
/// How long the end of a session waits for a commit that is under way.
const CLOSE_DEADLINE: Duration = Duration::from_secs(2);

type Outcomes = Result<Vec<Settled>, BrokerError>;

/// One publishing session on the file. A task of its own writes the rows.
#[derive(Debug)]
pub(super) struct EmbeddedPublisher {
    rows: mpsc::UnboundedSender<Row>,
    settled: mpsc::UnboundedReceiver<Outcomes>,
    in_flight: usize,
    room: Arc<Semaphore>,
    /// Outcomes of rows that were refused without a write.
    refused: Vec<Settled>,
    /// (topic, key) of refused rows, until the runtime received the refusals.
    broken_keys: HashSet<(String, String)>,
    log: Arc<Log>,
    /// Why the file takes no rows at the moment; `None` while it takes them.
    blocked: watch::Receiver<Option<String>>,
    writer: tokio::task::JoinHandle<()>,
}

#[derive(Debug)]
struct Row {
    tag: u64,
    message: OutgoingMessage,
    /// `None` where it was sent while the file took nothing.
    _room: Option<OwnedSemaphorePermit>,
}

impl EmbeddedPublisher {
    pub(super) async fn open(log: Arc<Log>) -> Result<Self, BrokerError> {
        let (rows, waiting) = mpsc::unbounded_channel();
        let (answers, settled) = mpsc::unbounded_channel();
        let (blocks, blocked) = watch::channel(None);
        let writer = Writer::open(Arc::clone(&log), answers, blocks).await?;
        Ok(Self {
            rows,
            settled,
            in_flight: 0,
            room: Arc::new(Semaphore::new(BYTES_WAITING_MAX)),
            refused: Vec::new(),
            broken_keys: HashSet::new(),
            log,
            blocked,
            writer: task::spawn(writer.run(waiting)),
        })
    }

    fn refusal(&mut self, message: &OutgoingMessage) -> Option<Refusal> {
        let key = message.key.as_ref().map(|key| (message.topic.clone(), key.clone()));
        if key.as_ref().is_some_and(|key| self.broken_keys.contains(key)) {
            return Some(Refusal::Behind("an earlier row of its key was refused".to_owned()));
        }
        let headers: usize = message.headers.iter().map(|(name, value)| name.len() + value.len()).sum();
        let bytes = message.payload.len() + headers + message.key.as_ref().map_or(0, String::len);
        let max = self.log.config.message_bytes_max;
        if bytes <= max {
            return None;
        }
        self.broken_keys.extend(key);
        Some(Refusal::Message(format!(
            "the message has {bytes} bytes in key, headers and payload, at most {max} are taken"
        )))
    }
}

#[async_trait]
impl Publisher for EmbeddedPublisher {
    async fn topics(&mut self, topics: &[String]) -> Result<Vec<TopicState>, BrokerError> {
        Ok(vec![TopicState::Ready; topics.len()])
    }

    async fn send(&mut self, rows: Vec<(u64, OutgoingMessage)>) -> Result<(), BrokerError> {
        for (tag, message) in rows {
            if let Some(refusal) = self.refusal(&message) {
                self.refused.push(Settled { tag, outcome: Err(refusal) });
                continue;
            }
            let weight = u32::try_from(message.weight().min(BYTES_WAITING_MAX)).unwrap_or(u32::MAX);
            // While the file takes nothing, no room becomes free. Then `send` must not wait, so
            // that the runtime can ask why.
            let blocked = &mut self.blocked;
            let takes_nothing = async move { drop(blocked.wait_for(Option::is_some).await) };
            let room = tokio::select! {
                biased;
                room = Arc::clone(&self.room).acquire_many_owned(weight) => room.ok(),
                () = takes_nothing => None,
            };
            let row = Row { tag, message, _room: room };
            // Counted also where the writer has ended: then `settle` returns the reason.
            self.in_flight += 1;
            if self.rows.send(row).is_err() {
                break;
            }
        }
        Ok(())
    }

    async fn settle(&mut self, settled: &mut Vec<Settled>) -> Result<(), BrokerError> {
        if !self.refused.is_empty() {
            settled.append(&mut self.refused);
            // Rows that are sent after this were sent with the knowledge of the refusals.
            self.broken_keys.clear();
            return Ok(());
        }
        if self.in_flight == 0 {
            return Ok(());
        }
        let answer = self.settled.recv().await;
        let outcomes = answer.unwrap_or_else(|| Err(BrokerError::Session("the session has ended".to_owned())))?;
        self.in_flight = self.in_flight.saturating_sub(outcomes.len());
        settled.extend(outcomes);
        Ok(())
    }

    fn blocked(&self) -> Option<String> {
        self.blocked.borrow().clone()
    }

    async fn close(self: Box<Self>) {
        let Self { rows, settled, writer, .. } = *self;
        drop((rows, settled));
        if tokio::time::timeout(CLOSE_DEADLINE, writer).await.is_err() {
            tracing::warn!("the embedded publisher did not end in time; a commit of it may still end");
        }
    }
}

struct Writer {
    log: Arc<Log>,
    connection: LogConnection,
    topics: HashMap<String, Topic>,
    answers: mpsc::UnboundedSender<Outcomes>,
    blocks: watch::Sender<Option<String>>,
}

/// Rows that are ready to be written. After a failed write they can be written again.
struct Append {
    /// Tag, topic and hash of each record.
    places: Vec<(u64, String, u32)>,
    records: Vec<NewRecord>,
}

impl Writer {
    async fn open(
        log: Arc<Log>,
        answers: mpsc::UnboundedSender<Outcomes>,
        blocks: watch::Sender<Option<String>>,
    ) -> Result<Self, BrokerError> {
        let connection = log.connect().await?;
        Ok(Self { log, connection, topics: HashMap::new(), answers, blocks })
    }

    async fn run(mut self, mut waiting: mpsc::UnboundedReceiver<Row>) {
        let mut rows = Vec::new();
        let mut trim_at = Instant::now();
        loop {
            let first = tokio::select! {
                biased;
                row = waiting.recv() => match row {
                    Some(row) => row,
                    None => break,
                },
                () = tokio::time::sleep_until(trim_at), if self.log.config.retention.is_some() => {
                    trim_at = self.trim().await;
                    continue;
                }
            };
            let mut bytes = first.message.weight();
            rows.push(first);
            while rows.len() < ROWS_PER_COMMIT && bytes < BYTES_PER_COMMIT {
                let Ok(row) = waiting.try_recv() else { break };
                bytes += row.message.weight();
                rows.push(row);
            }
            // The session was dropped: the next session sends these rows again, so nothing more may
            // be written.
            if self.answers.is_closed() {
                break;
            }
            let outcomes = self.append_when_it_can(std::mem::take(&mut rows), &waiting).await;
            let over = outcomes.is_err();
            if self.answers.send(outcomes).is_err() || over {
                break;
            }
            // Also trims where rows never stop coming.
            if self.log.config.retention.is_some() && Instant::now() >= trim_at {
                trim_at = self.trim().await;
            }
        }
        if let Err(error) = self.connection.close().await {
            tracing::debug!(%error, "the broker file did not close cleanly");
        }
    }

    /// Deletes a batch of old rows. Returns when to do so again. An error does not end the session.
    async fn trim(&mut self) -> Instant {
        let Self { log, connection, blocks, .. } = self;
        let trimmed = async {
            let mut write = begin(log, connection, blocks).await?;
            let age = log.config.retention.unwrap_or(Duration::MAX);
            let rows = retention::trim(&mut write.tx, age).await;
            let rows = rows.map_err(|error| log.failed("delete old rows from", &error))?;
            log.commit(write).await.map(|()| rows)
        };
        match trimmed.await {
            Ok(0) => Instant::now() + TRIM_EVERY,
            // More may be left, but waiting rows go first.
            Ok(_) => Instant::now(),
            Err(error) => {
                tracing::warn!(%error, "old rows could not be deleted");
                Instant::now() + TRIM_EVERY
            }
        }
    }

    /// Appends rows. While the file takes nothing, tries again until the session ends.
    async fn append_when_it_can(&mut self, rows: Vec<Row>, waiting: &mpsc::UnboundedReceiver<Row>) -> Outcomes {
        // Encoded before the turn is taken, because other processes need the turn too.
        let mut append = Append { places: Vec::with_capacity(rows.len()), records: Vec::with_capacity(rows.len()) };
        for row in rows {
            append.places.push((row.tag, row.message.topic.clone(), partition_hash(&row.message)));
            append.records.push(NewRecord::of(row.message, &self.log.config.source));
        }
        loop {
            match self.append(&mut append).await {
                Err(BrokerError::Unavailable(why)) if !self.answers.is_closed() && !waiting.is_closed() => {
                    // Topics that the failed transaction created do not exist.
                    self.topics.clear();
                    self.blocks.send_replace(Some(why));
                    tokio::time::sleep(BLOCKED_RETRY).await;
                }
                outcomes => {
                    self.blocks.send_replace(None);
                    return outcomes;
                }
            }
        }
    }

    /// Appends rows in one transaction, in their order.
    async fn append(&mut self, Append { places, records }: &mut Append) -> Outcomes {
        let Self { log, connection, topics, answers, blocks } = self;
        let failed = |error: sqlx::Error| log.failed("append to", &error);
        let mut write = begin(log, connection, blocks).await?;
        // From here on the turn is ours. If this session has ended meanwhile, the next one may have
        // written these rows already, so it writes nothing.
        if answers.is_closed() {
            return Err(BrokerError::Session("the session has ended".to_owned()));
        }
        let mut settled = Vec::with_capacity(records.len());
        let mut partitions: HashMap<(&str, i64), Vec<usize>> = HashMap::new();
        for (index, (tag, topic, hash)) in places.iter().enumerate() {
            if !topics.contains_key(topic) {
                let made = topology::ensure(&mut write.tx, topic, log.config.partitions).await.map_err(failed)?;
                topics.insert(topic.clone(), made);
            }
            let ids = &topics[topic].partitions;
            let number = *hash as usize % ids.len();
            partitions.entry((topic.as_str(), ids[number])).or_default().push(index);
            let partition = i32::try_from(number).unwrap_or(i32::MAX);
            settled.push(Settled { tag: *tag, outcome: Ok(Receipt::Offset { partition, offset: 0 }) });
        }
        for ((topic, partition_id), indexes) in partitions {
            let rows = i64::try_from(indexes.len()).unwrap_or(i64::MAX);
            // The partition must be of the topic that this session knows: after a deletion its id
            // goes to the next topic that is made, also to one of the same name.
            let next: Option<i64> = sqlx::query_scalar(
                "update topic_partition set next_offset = next_offset + ? where partition_id = ? and topic_id = \
                   (select topic_id from topic where name = ? and topic_id || '-' || created_at = ?) returning next_offset",
            )
            .bind(rows)
            .bind(partition_id)
            .bind(topic)
            .bind(topics[topic].made.as_str())
            .fetch_optional(&mut *write.tx)
            .await
            .map_err(failed)?;
            let Some(next) = next else {
                return Err(BrokerError::Session(format!("topic `{topic}` was deleted; the session starts anew")));
            };
            for (at, index) in (next - rows..).zip(indexes) {
                records[index].position = position(partition_id, at);
                if let Ok(Receipt::Offset { offset, .. }) = &mut settled[index].outcome {
                    *offset = at;
                }
            }
        }
        record::insert(&mut write.tx, records, chrono::Utc::now().timestamp_millis()).await.map_err(failed)?;
        log.commit(write).await?;
        log.appended.send_modify(|count| *count += 1);
        Ok(settled)
    }
}

/// Begins a transaction. While it waits for long, the broker is blocked.
async fn begin<'c>(
    log: &Log,
    connection: &'c mut LogConnection,
    blocks: &watch::Sender<Option<String>>,
) -> Result<WriteTx<'c>, BrokerError> {
    let mut begun = std::pin::pin!(log.begin(connection));
    if let Ok(begun) = tokio::time::timeout(WAIT_SHOWN, begun.as_mut()).await {
        return begun;
    }
    let why = format!("the broker file `{}` is in use", log.config.path.display());
    // If a write has failed before, its reason is shown already, and it says more than this one.
    let is_ours = blocks.send_if_modified(|shown| {
        if shown.is_some() {
            return false;
        }
        *shown = Some(why);
        true
    });
    let begun = begun.await;
    if is_ours {
        blocks.send_replace(None);
    }
    begun
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::config::EmbeddedConfig;
    use super::*;

    /// A connection for offsets syncs less, and would pass every test that kills only processes.
    #[tokio::test]
    async fn a_commit_of_rows_is_synced() {
        let directory = tempfile::tempdir().unwrap();
        let log = Log::open(EmbeddedConfig::new(directory.path().join("broker.db"))).await.unwrap();
        let (answers, _settled) = mpsc::unbounded_channel();
        let mut writer = Writer::open(Arc::new(log), answers, watch::Sender::new(None)).await.unwrap();
        let synchronous = async |connection: &mut LogConnection| -> i64 {
            sqlx::query_scalar("pragma synchronous").fetch_one(&mut connection.sqlite).await.unwrap()
        };
        assert_eq!(synchronous(&mut writer.connection).await, 2, "FULL");
        let mut offsets = writer.log.connect_for_offsets().await.unwrap();
        assert_eq!(synchronous(&mut offsets).await, 1, "NORMAL");
    }

    /// As after a panic while old rows were deleted. Where only the rows that the writer took were
    /// counted, `settle` said that nothing was in flight.
    #[tokio::test]
    async fn a_row_for_a_writer_that_has_ended_ends_the_session() {
        let directory = tempfile::tempdir().unwrap();
        let log = Log::open(EmbeddedConfig::new(directory.path().join("broker.db"))).await.unwrap();
        let mut publisher = EmbeddedPublisher::open(Arc::new(log)).await.unwrap();
        publisher.writer.abort();
        (&mut publisher.writer).await.unwrap_err();
        publisher.send(vec![(1, OutgoingMessage::sample("t", None))]).await.unwrap();
        let ended = publisher.settle(&mut Vec::new()).await;
        assert!(matches!(ended, Err(BrokerError::Session(_))), "{ended:?}");
    }
}
