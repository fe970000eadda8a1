//! The thread that polls a group member, and the rebalance callbacks that librdkafka calls on this
//! thread.
//!
//! Promises: polling stops for at most a second while handlers are slow; then partitions are paused
//! and polling goes on, so that a slow handler does not cost the membership. Partitions that are
//! revoked are drained up to a deadline, then what was acknowledged is committed, then they are
//! given up. Partitions that were already lost are not committed.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use rdkafka::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer, ConsumerContext};
use rdkafka::error::{KafkaError, KafkaResult, RDKafkaErrorCode};
use rdkafka::message::Message;
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use rdkafka::types::RDKafkaRespErr;
use tokio::sync::mpsc::UnboundedSender;

use super::assignment::{Assignment, Position};
use super::blocking;
use super::config::KafkaConfig;
use super::context::Reports;
use super::{unreadable, wire};
use crate::broker::{Delivery, Event};
use crate::error::BrokerError;

const POLL: Duration = Duration::from_millis(100);
const POLL_PAUSED: Duration = Duration::from_millis(10);
/// How long one wait for room, starts or a drain lasts before the thread looks again.
const BRIEF: Duration = Duration::from_millis(100);
/// How long polling may stop for want of room; then partitions are paused. It is far below
/// `max.poll.interval.ms`, after which librdkafka leaves the group. A pause discards what was
/// fetched ahead, so pausing at once would make a slow consumer fetch everything several times.
const STILL: Duration = Duration::from_secs(1);
const COMMIT_EVERY: Duration = Duration::from_millis(200);
/// How long a commit is retried while the group rebalances.
const COMMIT_PATIENCE: Duration = Duration::from_secs(3);
const COMMIT_AGAIN: Duration = Duration::from_millis(50);
const BATCH_ROWS: usize = 500;
const SAY_AGAIN: Duration = Duration::from_secs(30);
/// How long the topics that may be read are read beside one that may not. Then the member joins
/// anew, which shows whether it still may not. That is done rarely: each time the group rebalances,
/// and what is in hand comes again. librdkafka itself reads the topic as soon as it may; until the
/// member joins anew, `away` still reports it.
const ASK_DENIED_AGAIN: Duration = Duration::from_secs(300);
/// How often it is tried whether a record that cannot be read is away or can be read by now.
const TRY_UNREADABLE_AGAIN: Duration = Duration::from_secs(60);

/// The state that the thread, librdkafka's callbacks and the async side share.
pub(super) struct PollerState {
    assignment: Mutex<Assignment>,
    acknowledged: Condvar,
    // Converted and not handed over yet. Only the thread uses it, and its callbacks.
    pending: Mutex<Vec<Delivery>>,
    events: UnboundedSender<Result<Event, BrokerError>>,
    closing: AtomicBool,
    paused: AtomicBool,
    rows_max: usize,
    bytes_max: usize,
    drain: Duration,
    said: Mutex<HashMap<String, Instant>>,
    pub(super) reports: Reports,
}

impl PollerState {
    pub(super) fn new(
        events: UnboundedSender<Result<Event, BrokerError>>,
        rows_max: usize,
        bytes_max: usize,
        drain: Duration,
    ) -> Self {
        Self {
            assignment: Mutex::default(),
            acknowledged: Condvar::new(),
            pending: Mutex::default(),
            events,
            closing: AtomicBool::new(false),
            paused: AtomicBool::new(false),
            rows_max: rows_max.max(1),
            bytes_max,
            drain,
            said: Mutex::default(),
            reports: Reports::default(),
        }
    }

    /// The bookkeeping. The lock is held only for moments.
    pub(super) fn assignment(&self) -> MutexGuard<'_, Assignment> {
        self.assignment.lock()
    }

    /// Wakes the thread, because there may be room, or starts, or a new pause.
    pub(super) fn wake(&self) {
        self.acknowledged.notify_one();
    }

    /// Asks the polling thread to end; does not wait for it.
    pub(super) fn close(&self) {
        self.closing.store(true, Ordering::Relaxed);
        self.wake();
    }

    pub(super) fn pause(&self, paused: bool) {
        {
            // Held, so that the thread cannot check the flag before the change and wait after it.
            let _assignment = self.assignment();
            self.paused.store(paused, Ordering::Relaxed);
        }
        self.wake();
    }

    /// Waits until `begin` has set where these partitions begin. Returns nothing where the
    /// subscriber closes first.
    fn wait_for_starts(&self, partitions: &[(String, i32)]) -> Vec<Position> {
        let mut assignment = self.assignment();
        while !self.is_closing() {
            if let Some(starts) = assignment.starts(partitions) {
                return starts;
            }
            self.acknowledged.wait_for(&mut assignment, BRIEF);
        }
        Vec::new()
    }

    /// Waits for room, for at most `BRIEF`.
    fn wait_for_room(&self) {
        let crowded = |assignment: &mut Assignment| self.is_crowded(assignment, 1) && !self.is_closing();
        self.acknowledged.wait_while_for(&mut self.assignment(), crowded, BRIEF);
    }

    /// Whether 1/`part` of the bounds is in flight, or the runtime has paused.
    fn is_crowded(&self, assignment: &Assignment, part: usize) -> bool {
        self.paused.load(Ordering::Relaxed) || assignment.is_full((self.rows_max / part).max(1), self.bytes_max / part)
    }

    fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Relaxed)
    }

    fn pending(&self) -> MutexGuard<'_, Vec<Delivery>> {
        self.pending.lock()
    }

    /// What is acknowledged and not known to be committed: of these partitions, or of all.
    fn unconfirmed(&self, of: Option<&[(String, i32)]>) -> Vec<Position> {
        self.assignment().unconfirmed(of)
    }

    pub(super) fn tell(&self, event: Result<Event, BrokerError>) {
        // Sending fails only when the subscriber was dropped: then the thread is about to end.
        let _nobody = self.events.send(event);
    }

    /// Logs an error that passes by itself, each reason at most once in `SAY_AGAIN`.
    fn say(&self, reason: &str) {
        let mut said = self.said.lock();
        let now = Instant::now();
        if said.get(reason).is_none_or(|last| now.duration_since(*last) >= SAY_AGAIN) {
            tracing::warn!(reason, "kafka consumer: it goes on by itself");
            if said.len() > 1_000 {
                said.clear();
            }
            said.insert(reason.to_owned(), now);
        }
    }

    fn hand_over(&self) {
        let deliveries = std::mem::take(&mut *self.pending());
        if !deliveries.is_empty() {
            self.tell(Ok(Event::Deliveries(deliveries)));
        }
    }
}

/// The callbacks that librdkafka calls on the polling thread.
pub(super) struct MemberContext(pub(super) Arc<PollerState>);

impl ClientContext for MemberContext {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, line: &str) {
        self.0.reports.log(level, facility, line);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        self.0.reports.error(&error, reason);
    }
}

impl ConsumerContext for MemberContext {
    fn rebalance(&self, consumer: &BaseConsumer<Self>, what: RDKafkaRespErr, list: &mut TopicPartitionList) {
        // Incremental, because `properties` allows cooperative assignment only.
        let done = match what {
            RDKafkaRespErr::RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS => {
                self.assign(list).and_then(|()| consumer.incremental_assign(list))
            }
            _ => {
                self.revoke(consumer, &partitions(list));
                consumer.incremental_unassign(list)
            }
        };
        if let Err(error) = done {
            self.0.tell(Err(BrokerError::Session(format!("kafka rebalance: {error}"))));
        }
    }

    fn commit_callback(&self, result: KafkaResult<()>, offsets: &TopicPartitionList) {
        match &result {
            Ok(()) => self.0.reports.works(),
            // Mostly a rebalance. What was not committed is delivered again, and the inbox knows
            // it.
            Err(error) => tracing::debug!(%error, "kafka offsets were not committed"),
        }
        let mut assignment = self.0.assignment();
        for element in offsets.elements() {
            if let Offset::Offset(offset) = element.offset() {
                let done = result.is_ok() && element.error().is_ok();
                assignment.committed(element.topic(), element.partition(), offset, done);
            }
        }
    }
}

impl MemberContext {
    /// Takes partitions, and sets in the list where each begins.
    fn assign(&self, list: &mut TopicPartitionList) -> KafkaResult<()> {
        let assigned = partitions(list);
        let sources = self.0.assignment().assign(&assigned);
        tracing::debug!(partitions = sources.len(), "kafka partitions assigned");
        self.0.hand_over();
        if sources.is_empty() {
            return Ok(());
        }
        self.0.tell(Ok(Event::Assigned(sources)));
        for (topic, partition, at) in self.0.wait_for_starts(&assigned) {
            list.set_partition_offset(&topic, partition, Offset::Offset(at))?;
        }
        Ok(())
    }

    fn revoke(&self, consumer: &BaseConsumer<Self>, revoked: &[(String, i32)]) {
        let shared = &self.0;
        let lost = consumer.assignment_lost();
        let sources = shared.assignment().ids(revoked);
        // librdkafka remembers that a partition is paused, even if the partition comes back later.
        let paused = shared.assignment().paused_of(revoked);
        if !paused.is_empty()
            && let Err(error) = consumer.resume(&list(&paused))
        {
            tracing::warn!(%error, "kafka partitions that go away could not be resumed");
        }
        shared.pending().retain(|delivery| !sources.contains(&delivery.source));
        shared.hand_over();
        tracing::debug!(partitions = sources.len(), lost, "kafka partitions revoked");
        if lost {
            // Other members may own them already: a commit would be refused, or accepted and wrong.
            shared.assignment().remove(revoked);
            if !sources.is_empty() {
                shared.tell(Ok(Event::Revoked { sources, lost, done: sync_channel(0).0 }));
            }
            return;
        }
        if !sources.is_empty() && !shared.is_closing() {
            let (done, wait) = sync_channel(0);
            shared.tell(Ok(Event::Revoked { sources, lost, done }));
            let deadline = Instant::now() + shared.drain;
            // The guard sends nothing; its drop ends the wait. A subscriber that is closing need
            // not drain.
            while let Err(RecvTimeoutError::Timeout) = wait.recv_timeout(BRIEF) {
                if Instant::now() >= deadline {
                    tracing::warn!(
                        "revoked kafka partitions were not drained in time: what is unfinished comes again at their next owner"
                    );
                    break;
                }
                if shared.is_closing() {
                    break;
                }
            }
        }
        commit_now(consumer, shared, Some(revoked), || std::thread::sleep(COMMIT_AGAIN));
        shared.assignment().remove(revoked);
    }
}

fn partitions(list: &TopicPartitionList) -> Vec<(String, i32)> {
    list.elements().iter().map(|element| (element.topic().to_owned(), element.partition())).collect()
}

fn list(partitions: &[(Arc<str>, i32)]) -> TopicPartitionList {
    let mut list = TopicPartitionList::with_capacity(partitions.len());
    for (topic, partition) in partitions {
        list.add_partition(topic, *partition);
    }
    list
}

fn offsets(positions: &[Position]) -> KafkaResult<TopicPartitionList> {
    let mut list = TopicPartitionList::with_capacity(positions.len());
    for (topic, partition, next) in positions {
        list.add_partition_offset(topic, *partition, Offset::Offset(*next))?;
    }
    Ok(list)
}

/// Commits what is acknowledged: of these partitions, or of all. While the group rebalances it
/// pauses and tries again, because the same commit is accepted afterwards.
fn commit_now(
    consumer: &BaseConsumer<MemberContext>,
    shared: &PollerState,
    of: Option<&[(String, i32)]>,
    pause: impl Fn(),
) {
    use RDKafkaErrorCode as Code;
    let end = Instant::now() + COMMIT_PATIENCE;
    loop {
        let positions = shared.unconfirmed(of);
        if positions.is_empty() {
            return;
        }
        let Err(error) = offsets(&positions).and_then(|list| consumer.commit(&list, CommitMode::Sync)) else {
            let mut assignment = shared.assignment();
            for (topic, partition, next) in &positions {
                assignment.committed(topic, *partition, *next, true);
            }
            return;
        };
        tracing::debug!(%error, "kafka offsets were not committed");
        let code = error.rdkafka_error_code();
        // After another error the next owner gets duplicates, which the inbox knows.
        if !matches!(code, Some(Code::RebalanceInProgress | Code::IllegalGeneration)) || Instant::now() >= end {
            return;
        }
        pause();
    }
}

/// Polls until the subscriber closes, then leaves the group.
pub(super) fn run(consumer: Arc<BaseConsumer<MemberContext>>, shared: &PollerState, config: &KafkaConfig) {
    let mut crowded_since = None;
    let mut stops_unreadable = true;
    let mut tried_at = Instant::now();
    let mut committed_at = Instant::now();
    while !shared.is_closing() {
        if committed_at.elapsed() >= COMMIT_EVERY {
            committed_at = Instant::now();
            commit_due(&consumer, shared);
            if let Some((since, why)) = shared.reports.denied()
                && since.elapsed() >= ASK_DENIED_AGAIN
            {
                shared.tell(Err(BrokerError::Destination(format!("a kafka topic may not be read: {why}"))));
                break;
            }
            if tried_at.elapsed() >= TRY_UNREADABLE_AGAIN {
                tried_at = Instant::now();
                // The client may stand behind the record. So the member joins anew.
                if let Some(reason) = unreadable_is_over(config, shared) {
                    shared.tell(Err(BrokerError::Session(reason)));
                    break;
                }
            }
        }
        let paused = match pressure(shared, &mut crowded_since) {
            Pressure::Still => {
                shared.hand_over();
                shared.wait_for_room();
                continue;
            }
            Pressure::Paused => true,
            Pressure::No => false,
        };
        apply_pause(&consumer, shared, paused);
        let wait = if !shared.pending().is_empty() {
            Duration::ZERO
        } else if paused {
            POLL_PAUSED
        } else {
            POLL
        };
        let polled = consumer.poll(wait);
        // A member that owns nothing of it has nothing to end. librdkafka lets it rejoin, and where
        // its partitions begin is then asked with the new id. To drop it in the middle of that
        // would leave its place in the group to the session's timeout.
        let made_anew = shared.reports.take_made_anew();
        if let Some(topic) = made_anew.into_iter().find(|topic| shared.assignment().has_of(topic)) {
            // What is acknowledged belongs to the topic that is gone.
            shared.assignment().clear();
            shared.tell(Err(BrokerError::Session(format!("the kafka topic `{topic}` was deleted and made anew"))));
            break;
        }
        match polled {
            Some(Ok(record)) => {
                take(shared, &record);
                if shared.pending().len() >= BATCH_ROWS {
                    shared.hand_over();
                }
            }
            Some(Err(KafkaError::PartitionEOF(partition))) => {
                shared.assignment().end_reached(partition, shared.reports.eof_offset());
            }
            // Where the partition is not known, the client may give the error again and again until
            // the subscriber closes. One search and one end are enough.
            Some(Err(error)) if unreadable::is_meant(&error) => {
                stops_unreadable = stops_unreadable && stop_unreadable(config, shared, &error);
            }
            Some(Err(error)) => trouble(shared, &error),
            None => shared.hand_over(),
        }
        if let (Some(error), Some(_)) = (shared.reports.unauthorised(), shared.reports.all_down()) {
            shared.tell(Err(error));
            break;
        }
    }
    // Nobody reads this session's events any more: no callback may wait for their reader.
    shared.close();
    // Polls, so that a rebalance can finish. What is delivered meanwhile comes again to the next
    // owner.
    commit_now(&consumer, shared, None, || drop(consumer.poll(COMMIT_AGAIN)));
    // Closing alone does not leave the group where nothing is assigned: the broker would keep the
    // place of this member until its session's timeout, and the next rebalance would wait for it.
    consumer.unsubscribe();
    // Leaving the group calls `revoke` on this thread, or on the one that still asks a question and
    // so holds the last reference.
    drop(consumer);
}

/// Handles reports from before the thread runs: an error that is not taken here is lost.
pub(super) fn serve(consumer: &BaseConsumer<MemberContext>, shared: &PollerState) {
    let end = Instant::now() + blocking::SERVE;
    while Instant::now() < end {
        if let Some(Err(error)) = consumer.poll(blocking::SERVE) {
            trouble(shared, &error);
        }
    }
}

/// What the thread does about a lack of room.
enum Pressure {
    /// There is room: poll for more messages.
    No,
    /// Stop polling for a moment: most often there is room soon.
    Still,
    /// Poll with all partitions paused, so that rebalances go on and the membership is kept.
    Paused,
}

fn pressure(shared: &PollerState, since: &mut Option<Instant>) -> Pressure {
    let paused = since.is_some_and(|since| since.elapsed() >= STILL);
    // Paused partitions are resumed only when half of the bounds is free.
    if !shared.is_crowded(&shared.assignment(), if paused { 2 } else { 1 }) {
        *since = None;
        return Pressure::No;
    }
    since.get_or_insert_with(Instant::now);
    if paused { Pressure::Paused } else { Pressure::Still }
}

fn apply_pause(consumer: &BaseConsumer<MemberContext>, shared: &PollerState, paused: bool) {
    let (pause, resume) = shared.assignment().take_to_pause(paused);
    let paused = if pause.is_empty() { Ok(()) } else { consumer.pause(&list(&pause)) };
    let resumed = if resume.is_empty() { Ok(()) } else { consumer.resume(&list(&resume)) };
    if let Err(error) = paused.and(resumed) {
        tracing::warn!(%error, ?pause, ?resume, "kafka partitions could not be paused or resumed");
    }
}

fn take(shared: &PollerState, record: &rdkafka::message::BorrowedMessage<'_>) {
    let arrived = wire::arrived(record);
    let weight = arrived.weight();
    let source = shared.assignment().deliver(record.topic(), record.partition(), record.offset(), weight);
    // The partition is not ours any more: its new owner gets the record.
    if let Some(source) = source {
        shared.pending().push(Delivery { source, sequence: record.offset(), redelivered: false, arrived });
    }
}

fn commit_due(consumer: &BaseConsumer<MemberContext>, shared: &PollerState) {
    let due = shared.assignment().take_due();
    if due.is_empty() {
        return;
    }
    if let Err(error) = offsets(&due).and_then(|list| consumer.commit(&list, CommitMode::Async)) {
        tracing::debug!(%error, "kafka offsets were not committed");
        for (topic, partition, next) in due {
            shared.assignment().committed(&topic, partition, next, false);
        }
    }
}

/// Stops the partition that this error is about, before its next record. The client may leave that
/// record out and go on behind it, or ask for it again for ever. So the subscriber ends where the
/// partition is not found. Returns false then.
fn stop_unreadable(config: &KafkaConfig, shared: &PollerState, error: &KafkaError) -> bool {
    let reason = shared.reports.take_last().unwrap_or_else(|| error.to_string());
    // The search takes a while, and what was read before is good.
    shared.hand_over();
    let nexts = shared.assignment().nexts(false);
    let found = unreadable::find(config, &nexts, || shared.is_closing()).unwrap_or_default();
    if shared.is_closing() {
        return true;
    }
    // Another partition with such a record does not explain this error.
    if !found.iter().any(|(_, why)| *why == reason) {
        tracing::error!(reason, "a kafka record cannot be read, and its partition is not known");
        shared.tell(Err(BrokerError::Session(format!(
            "a kafka record cannot be read: {reason}; nothing behind it in its partition is consumed before it can be \
             read or is deleted"
        ))));
        return false;
    }
    for ((topic, partition, _), reason) in found {
        tracing::error!(topic = &*topic, partition, reason, "a kafka record cannot be read: its partition stands");
        shared.assignment().stop_before_next(&topic, partition, reason);
    }
    true
}

/// Why the partitions that stand at such a record should be tried again; `None` while all of them
/// still do, or where that is not known.
fn unreadable_is_over(config: &KafkaConfig, shared: &PollerState) -> Option<String> {
    let stopped = shared.assignment().nexts(true);
    if stopped.is_empty() {
        return None;
    }
    shared.hand_over();
    let found = unreadable::find(config, &stopped, || shared.is_closing())?;
    let (topic, partition, _) = stopped.iter().find(|one| !found.iter().any(|(still, _)| still == *one))?;
    Some(format!("a record of {topic}/{partition} that could not be read can be read now, or is deleted"))
}

/// Handles an error that polling returned. Most pass by themselves; some end the subscriber.
fn trouble(shared: &PollerState, error: &KafkaError) {
    use RDKafkaErrorCode as Code;
    let reason = shared.reports.take_last().unwrap_or_else(|| error.to_string());
    let end = match error.rdkafka_error_code() {
        _ if matches!(error, KafkaError::MessageConsumptionFatal(_)) => BrokerError::Session(reason.clone()),
        Some(Code::GroupAuthorizationFailed) => BrokerError::Destination(format!("kafka group: {reason}")),
        Some(Code::InvalidSessionTimeout) => {
            BrokerError::Refused(format!("`session_timeout` is not within what the kafka broker allows: {reason}"))
        }
        Some(Code::InconsistentGroupProtocol) => BrokerError::Refused(format!(
            "the kafka group has members of another kind (another program, or another assignment strategy): {reason}"
        )),
        Some(Code::AutoOffsetReset | Code::LogTruncation) => {
            BrokerError::Session(format!("what follows in a kafka partition is not there any more: {reason}"))
        }
        Some(Code::TopicAuthorizationFailed) => {
            tracing::error!(reason, "a kafka topic may not be read");
            shared.reports.deny(&reason);
            return;
        }
        // `Reports` logs these.
        Some(
            Code::AllBrokersDown
            | Code::BrokerTransportFailure
            | Code::Resolve
            | Code::OperationTimedOut
            | Code::Authentication
            | Code::SSL,
        ) => return,
        _ => {
            shared.say(&reason);
            return;
        }
    };
    tracing::error!(reason, "the kafka consumer ends");
    shared.tell(Err(end));
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// Shown by: only logging these errors. The subscriber then gets what stands behind the record,
    /// or nothing more of its partition, and looks well.
    #[test]
    fn g2_a_record_that_cannot_be_read_ends_the_subscriber_where_its_partition_is_not_known() {
        use RDKafkaErrorCode as Code;
        let config = KafkaConfig::from_url("kafka://b:1").unwrap();
        for code in [Code::BadMessage, Code::BadCompression, Code::NotImplemented] {
            let (sender, mut events) = tokio::sync::mpsc::unbounded_channel();
            let shared = PollerState::new(sender, 10, 1_000, Duration::ZERO);
            let error = KafkaError::MessageConsumption(code);
            assert!(unreadable::is_meant(&error), "{code}");
            shared.reports.error(&error, "MessageSet at offset 5 is damaged");
            assert!(!stop_unreadable(&config, &shared, &error), "{code}");
            let told = events.try_recv();
            let is_told = matches!(&told, Ok(Err(BrokerError::Session(why))) if why.contains("at offset 5"));
            assert!(is_told, "{code}: {told:?}");
        }
    }
}
