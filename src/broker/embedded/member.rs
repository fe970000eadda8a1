//! The task of one group member: it renews the leases, shares partitions with the other members,
//! reads ahead and commits offsets.
//!
//! Guarantees: reading goes on while a transaction waits for its turn. At most `in_flight_max` rows
//! are in flight (rows set aside do not count), at most two batches of them queued, and their bytes
//! stay below `in_flight_bytes_max` plus the row that reaches it. A partition that must be given up
//! is read no further; its lease is released when the runtime has finished or `drain` is over, in
//! the transaction that commits its last offsets.
//!
//! Polling is adaptive, every 2 to 20 ms, and costs one pragma where nothing changed.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::group::{self, Fenced, GroupState, Membership};
use super::log::{Log, LogConnection};
use super::record::{self, Range};
use super::talk::{MemberState, Said, Told};
use super::topology::{self, Topic};
use crate::broker::{Delivery, Event, PartitionId, Subscription};
use crate::error::BrokerError;
use crate::inbox::rules::position::BrokerOffsets;
use crate::task;

/// Most rows of one batch.
const BATCH_ROWS: usize = 500;
/// Most bytes of one batch.
const BATCH_BYTES: usize = 4 * 1024 * 1024;
const BATCHES_QUEUED: usize = 2;
const POLL_MIN: Duration = Duration::from_millis(2);
const POLL_MAX: Duration = Duration::from_millis(20);

#[derive(Debug)]
struct Owned {
    id: PartitionId,
    epoch: i64,
    /// True once `begin` has set where it begins; false again for one that is refused.
    begun: bool,
    /// The next offset to be read.
    position: i64,
    /// The next offset to be written, as it was seen last.
    end: i64,
    /// The next offset to be handled, as the runtime reported it.
    acknowledged: i64,
    /// The next offset to be handled, as the file has it.
    committed: i64,
    /// Rows that were read and are neither finished nor acknowledged, by offset.
    in_flight: VecDeque<Unfinished>,
    /// Set while it is given up: the end of the runtime's guard, and how long to wait for it.
    leaving: Option<(Receiver<()>, Instant)>,
}

/// What one write transaction of a member must do.
#[derive(Debug, Default)]
struct Order {
    fenced: Vec<Fenced>,
    heartbeat: bool,
    leave: bool,
}

#[derive(Debug)]
struct Written {
    order: Order,
    /// The answer to a heartbeat.
    state: Option<GroupState>,
}

#[derive(Debug)]
struct Unfinished {
    offset: i64,
    weight: usize,
    is_aside: bool,
}

impl Owned {
    fn handled(&mut self, next: i64) {
        self.acknowledged = self.acknowledged.max(next.min(self.position));
        while self.in_flight.pop_front_if(|row| row.offset < self.acknowledged).is_some() {}
    }

    /// Counts a row no longer as in flight. A row set aside is still in memory: its bytes count.
    fn no_longer_in_flight(&mut self, offset: i64, is_aside: bool) {
        let Ok(place) = self.in_flight.binary_search_by_key(&offset, |row| row.offset) else { return };
        if is_aside {
            self.in_flight[place].is_aside = true;
        } else {
            self.in_flight.remove(place);
        }
    }
}

type Finished = (LogConnection, Result<Written, BrokerError>);

pub(super) struct Member {
    log: Arc<Log>,
    group: String,
    /// Topic and partition number, by the partition's id.
    places: HashMap<i64, (Topic, i32)>,
    in_flight_max: usize,
    drain: Duration,
    me: Membership,
    owned: BTreeMap<i64, Owned>,
    reader: LogConnection,
    writer: Option<LogConnection>,
    writing: Option<JoinHandle<Finished>>,
    shared: Arc<MemberState>,
    events: mpsc::UnboundedSender<Told>,
    appended: watch::Receiver<u64>,
    /// The group's generation at this member's last heartbeat.
    generation: i64,
    /// Whether a heartbeat is due at once: at the start, and when the generation has changed.
    heartbeat_now: bool,
    heartbeat_at: Instant,
    committed_at: Instant,
    /// The value of `pragma data_version` at the last poll.
    seen: Option<i64>,
    poll_at: Instant,
    poll_after: Duration,
    /// The partition that the next batch begins with, so that each gets its turn.
    first: i64,
}

impl Member {
    /// The number of unfinished rows that are not set aside, and the bytes of all unfinished rows.
    fn in_flight(&self) -> (usize, usize) {
        let in_flight = self.owned.values().flat_map(|owned| &owned.in_flight);
        in_flight.fold((0, 0), |(rows, weight), row| (rows + usize::from(!row.is_aside), weight + row.weight))
    }

    pub(super) async fn join(
        log: Arc<Log>,
        subscription: &Subscription,
        shared: Arc<MemberState>,
        events: mpsc::UnboundedSender<Told>,
    ) -> Result<Self, BrokerError> {
        let reader = log.connect_for_offsets().await?;
        let mut writer = log.connect_for_offsets().await?;
        let failed = |error: sqlx::Error| log.failed("join a group in", &error);
        let mut write = log.begin(&mut writer).await?;
        let mut topics: Vec<Topic> = Vec::new();
        for name in &subscription.topics {
            if topics.iter().all(|topic| *topic.name != **name) {
                topics.push(topology::ensure(&mut write.tx, name, log.config.partitions).await.map_err(failed)?);
            }
        }
        let session = log.config.session_timeout;
        let me = group::join(&mut write.tx, subscription.group(), &topics, session).await.map_err(failed)?;
        log.commit(write).await?;

        let places = topics
            .iter()
            .flat_map(|topic| (0_i32..).zip(&topic.partitions).map(move |(number, id)| (*id, (topic.clone(), number))))
            .collect();
        let now = Instant::now();
        Ok(Self {
            group: subscription.group().to_owned(),
            places,
            in_flight_max: subscription.in_flight_max.max(1),
            drain: subscription.drain,
            me,
            owned: BTreeMap::new(),
            reader,
            writer: Some(writer),
            writing: None,
            shared,
            events,
            appended: log.appended.subscribe(),
            generation: 0,
            heartbeat_now: true,
            heartbeat_at: now,
            committed_at: now,
            seen: None,
            poll_at: now,
            poll_after: POLL_MIN,
            first: 0,
            log,
        })
    }

    pub(super) async fn run(mut self) {
        if let Err(error) = self.work().await {
            // The lease ends without us, and the runtime subscribes again.
            let _ = self.events.send(Err(error));
            return;
        }
        if let Err(error) = self.leave().await {
            tracing::warn!(%error, "a member could not leave its group; its lease will end");
        }
    }

    async fn work(&mut self) -> Result<(), BrokerError> {
        while !self.events.is_closed() {
            if self.writing.as_ref().is_some_and(JoinHandle::is_finished) {
                self.finish_writing().await?;
            }
            // Asked before acknowledgements are noted, because the runtime acknowledges first and
            // drops the guard after it: so no acknowledgement is missed.
            let finished_leaving = self.finished_leaving();
            self.note_what_is_said();
            self.write(&finished_leaving);
            if Instant::now() >= self.poll_at {
                self.poll().await?;
            }
            if self.fetch().await? {
                self.poll_after = POLL_MIN;
                continue;
            }
            self.wait().await?;
        }
        Ok(())
    }

    async fn wait(&mut self) -> Result<(), BrokerError> {
        let until = self.next_deadline();
        let Self { writing, shared, events, appended, poll_at, .. } = self;
        let written = async {
            match writing {
                Some(writing) => writing.await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            finished = written => {
                self.writing = None;
                return self.written(finished);
            }
            () = shared.woken() => {}
            () = events.closed() => {}
            Ok(()) = appended.changed() => *poll_at = Instant::now(),
            () = tokio::time::sleep_until(until) => {}
        }
        Ok(())
    }

    async fn finish_writing(&mut self) -> Result<(), BrokerError> {
        match self.writing.take() {
            Some(writing) => self.written(writing.await),
            None => Ok(()),
        }
    }

    fn next_deadline(&self) -> Instant {
        let mut until = self.poll_at;
        if self.writing.is_none() {
            until = until.min(self.heartbeat_at);
            if self.owned.values().any(|owned| owned.acknowledged > owned.committed) {
                until = until.min(self.committed_at + self.log.config.acknowledge_interval);
            }
            if self.owned.values().any(|owned| owned.leaving.is_some()) {
                until = until.min(Instant::now() + POLL_MIN);
            }
        }
        until
    }

    /// Notes what the runtime said. A source of an earlier assignment is not found: what is said of
    /// it is ignored (G9).
    fn note_what_is_said(&mut self) {
        let Said { begun, acknowledged, no_longer_in_flight } = self.shared.take_said();
        for (id, at) in begun {
            if let Some(owned) = self.source(&id) {
                owned.begun = at.is_some();
                owned.position = at.unwrap_or(owned.position);
                owned.acknowledged = at.unwrap_or(owned.acknowledged);
                owned.in_flight.clear();
            }
        }
        for (id, next) in acknowledged {
            if let Some(owned) = self.source(&id) {
                owned.handled(next);
            }
        }
        for (id, offset, is_aside) in no_longer_in_flight {
            if let Some(owned) = self.source(&id) {
                owned.no_longer_in_flight(offset, is_aside);
            }
        }
    }

    fn source(&mut self, id: &PartitionId) -> Option<&mut Owned> {
        self.owned.values_mut().find(|owned| owned.id == *id)
    }

    /// Partitions that are given up and that the runtime has finished with, or had its time for.
    fn finished_leaving(&self) -> Vec<i64> {
        let now = Instant::now();
        let finished = |owned: &Owned| {
            owned.leaving.as_ref().is_some_and(|(done, until)| {
                now >= *until || matches!(done.try_recv(), Err(TryRecvError::Disconnected))
            })
        };
        self.owned.iter().filter(|(_, owned)| finished(owned)).map(|(partition_id, _)| *partition_id).collect()
    }

    /// Starts a write transaction where one is due and none is running.
    fn write(&mut self, finished_leaving: &[i64]) {
        let now = Instant::now();
        let due = now >= self.committed_at + self.log.config.acknowledge_interval;
        let heartbeat = self.heartbeat_now || now >= self.heartbeat_at;
        let mut order = Order { heartbeat, ..Order::default() };
        for (partition_id, owned) in &self.owned {
            let release = finished_leaving.contains(partition_id);
            let commit = owned.acknowledged > owned.committed && (due || heartbeat || release);
            if commit || release {
                order.fenced.push(Fenced {
                    partition_id: *partition_id,
                    epoch: owned.epoch,
                    committed: commit.then_some(owned.acknowledged),
                    release,
                });
            }
        }
        if order.heartbeat || !order.fenced.is_empty() {
            self.start(order);
        }
    }

    fn start(&mut self, order: Order) {
        let Some(mut connection) = self.writer.take() else { return };
        let now = Instant::now();
        if order.heartbeat {
            self.heartbeat_at = now + self.log.config.heartbeat();
            self.heartbeat_now = false;
        }
        self.committed_at = now;
        let (log, me) = (Arc::clone(&self.log), self.me.clone());
        // In a task of its own, so that it is not cancelled, and reading goes on meanwhile.
        self.writing = Some(task::spawn(async move {
            let written = write(&log, &mut connection, &me, order).await;
            (connection, written)
        }));
    }

    fn written(&mut self, finished: Result<Finished, tokio::task::JoinError>) -> Result<(), BrokerError> {
        let ended = |error: tokio::task::JoinError| BrokerError::Session(format!("a transaction ended early: {error}"));
        let (connection, written) = finished.map_err(ended)?;
        self.writer = Some(connection);
        let Written { order, state } = written?;
        if order.heartbeat && state.is_none() {
            self.lose(|_| true);
            return Err(BrokerError::Session(format!(
                "a member of group `{}` was removed because its lease was over, or a topic that it reads was deleted; it \
                 joins anew",
                self.group
            )));
        }
        for Fenced { partition_id, epoch, committed, release } in order.fenced {
            let Some(owned) = self.owned.get_mut(&partition_id).filter(|owned| owned.epoch == epoch) else { continue };
            owned.committed = committed.unwrap_or(owned.committed).max(owned.committed);
            if release {
                self.owned.remove(&partition_id);
            }
        }
        if let Some(state) = state {
            self.apply(&state);
        }
        Ok(())
    }

    /// Takes over the leases that this member has in the group, and starts to give up the surplus.
    fn apply(&mut self, state: &GroupState) {
        self.generation = state.generation;
        let leases: HashMap<i64, i64> = state.leases.iter().map(|l| (l.partition_id, l.epoch)).collect();
        self.lose(|owned| leases.get(&owned.0) != Some(&owned.1));
        let (mut assigned, mut offsets) = (Vec::new(), Vec::new());
        for lease in &state.leases {
            let Some((topic, number)) = self.places.get(&lease.partition_id) else { continue };
            if self.owned.contains_key(&lease.partition_id) {
                continue;
            }
            let generation = u64::try_from(lease.epoch).unwrap_or_default();
            let id = PartitionId { place: Arc::clone(&topic.name), partition: *number, generation };
            offsets.push(BrokerOffsets {
                topic_id: Some(topic.made.clone()),
                committed: Some(lease.committed),
                first: lease.first,
                end: lease.end,
            });
            assigned.push(id.clone());
            self.owned.insert(
                lease.partition_id,
                Owned {
                    id,
                    epoch: lease.epoch,
                    begun: false,
                    position: lease.committed,
                    end: lease.end,
                    acknowledged: lease.committed,
                    committed: lease.committed,
                    in_flight: VecDeque::new(),
                    leaving: None,
                },
            );
        }
        if !assigned.is_empty() {
            self.tell(Event::Assigned(assigned), offsets);
        }

        let until = Instant::now() + self.drain;
        for partition_id in &state.give_up {
            let Some(owned) = self.owned.get_mut(partition_id).filter(|owned| owned.leaving.is_none()) else {
                continue;
            };
            let (guard, done) = sync_channel(0);
            owned.leaving = Some((done, until));
            let sources = vec![owned.id.clone()];
            self.tell(Event::Revoked { sources, lost: false, done: guard }, Vec::new());
        }
        let idle = self.owned.is_empty() && state.complete;
        self.shared.note_that_others_hold_all(idle);
    }

    /// Forgets at once partitions whose leases this member no longer has.
    fn lose(&mut self, lost: impl Fn((i64, i64)) -> bool) {
        let mut sources = Vec::new();
        self.owned.retain(|partition_id, owned| {
            let lost = lost((*partition_id, owned.epoch));
            // A partition that is being given up was reported as revoked before.
            if lost && owned.leaving.is_none() {
                sources.push(owned.id.clone());
            }
            !lost
        });
        if !sources.is_empty() {
            tracing::warn!(group = %self.group, partitions = sources.len(), "leases of partitions were lost");
            self.tell(Event::Revoked { sources, lost: true, done: sync_channel(0).0 }, Vec::new());
        }
    }

    /// Checks whether the group changed and whether rows came; costs one pragma where nothing did.
    async fn poll(&mut self) -> Result<(), BrokerError> {
        let failed = |error: sqlx::Error| self.log.failed("read", &error);
        let version: i64 =
            sqlx::query_scalar("pragma data_version").fetch_one(&mut self.reader.sqlite).await.map_err(failed)?;
        let changed = self.seen.replace(version) != Some(version);
        if changed {
            let (generation, leases) = group::look(&mut self.reader.sqlite, &self.me).await.map_err(failed)?;
            let leases: HashMap<i64, _> = leases.into_iter().map(|lease| (lease.partition_id, lease)).collect();
            self.lose(|(partition_id, epoch)| leases.get(&partition_id).is_none_or(|lease| lease.epoch != epoch));
            for (partition_id, owned) in &mut self.owned {
                if let Some(lease) = leases.get(partition_id) {
                    owned.end = owned.end.max(lease.end);
                }
            }
            self.heartbeat_now |= generation != self.generation;
        }
        self.poll_after = if changed { POLL_MIN } else { (self.poll_after * 3 / 2).min(POLL_MAX) };
        self.poll_at = Instant::now() + self.poll_after;
        Ok(())
    }

    /// Reads a batch where there is room for one. Returns true where it sent one to the subscriber.
    async fn fetch(&mut self) -> Result<bool, BrokerError> {
        if !self.shared.takes_a_batch(BATCHES_QUEUED) {
            return Ok(false);
        }
        let (rows, weight) = self.in_flight();
        let mut room = self.in_flight_max.saturating_sub(rows).min(BATCH_ROWS);
        let bytes_max = self.log.config.in_flight_bytes_max.saturating_sub(weight).min(BATCH_BYTES);
        let mut bytes = 0;
        let mut deliveries = Vec::new();
        let turn: Vec<i64> =
            self.owned.range(self.first..).chain(self.owned.range(..self.first)).map(|(id, _)| *id).collect();
        for partition_id in turn {
            if room == 0 || bytes >= bytes_max {
                break;
            }
            let Self { owned, reader, log, .. } = self;
            let Some(owned) = owned.get_mut(&partition_id) else { continue };
            if !owned.begun || owned.leaving.is_some() || owned.position >= owned.end {
                continue;
            }
            let range = Range {
                topic: &owned.id.place,
                partition_id,
                number: owned.id.partition,
                from: owned.position,
                to: owned.end,
            };
            let rows = record::read(&mut reader.sqlite, range, room, bytes_max - bytes)
                .await
                .map_err(|error| log.failed("read", &error))?;
            let next = rows.last().map_or(owned.position, |last| last.coordinates.offset + 1);
            // Offsets have no holes. Rows are missing where the file was restored: the group then
            // reads old offsets again, and retention may have deleted their rows. The next session
            // reports that.
            if rows.is_empty() || usize::try_from(next - owned.position) != Ok(rows.len()) {
                let (place, number, position) = (&owned.id.place, owned.id.partition, owned.position);
                let gone = format!("rows of `{place}`, partition {number}, from offset {position} on are gone");
                return Err(BrokerError::Session(gone));
            }
            owned.position = next;
            room -= rows.len();
            let read = rows.iter().map(|row| Unfinished {
                offset: row.coordinates.offset,
                weight: row.weight(),
                is_aside: false,
            });
            owned.in_flight.extend(read.inspect(|row| bytes += row.weight));
            self.first = partition_id + 1;
            deliveries.extend(rows.into_iter().map(|arrived| Delivery {
                source: owned.id.clone(),
                sequence: arrived.coordinates.offset,
                redelivered: false,
                arrived,
            }));
        }
        if deliveries.is_empty() {
            return Ok(false);
        }
        self.shared.queued_batch();
        self.tell(Event::Deliveries(deliveries), Vec::new());
        Ok(true)
    }

    fn tell(&self, event: Event, offsets: Vec<BrokerOffsets>) {
        // Sending fails only where the subscriber was dropped: then the loop ends.
        let _ = self.events.send(Ok((event, offsets)));
    }

    async fn leave(mut self) -> Result<(), BrokerError> {
        self.finish_writing().await?;
        self.note_what_is_said();
        let fenced = self.owned.iter().map(|(partition_id, owned)| Fenced {
            partition_id: *partition_id,
            epoch: owned.epoch,
            committed: Some(owned.acknowledged),
            release: true,
        });
        let order = Order { fenced: fenced.collect(), leave: true, heartbeat: false };
        self.start(order);
        self.finish_writing().await?;
        let failed = |error: sqlx::Error| self.log.failed("close", &error);
        self.reader.close().await.map_err(failed)?;
        match self.writer {
            Some(writer) => writer.close().await.map_err(failed),
            None => Ok(()),
        }
    }
}

/// One write transaction. It commits offsets and releases leases. Then it sends a heartbeat, or
/// leaves the group. A heartbeat without an answer leaves it too.
async fn write(
    log: &Log,
    connection: &mut LogConnection,
    me: &Membership,
    order: Order,
) -> Result<Written, BrokerError> {
    let failed = |error: sqlx::Error| log.failed("commit offsets to", &error);
    let mut write = log.begin(connection).await?;
    group::settle(&mut write.tx, me, &order.fenced).await.map_err(failed)?;
    let mut written = Written { order, state: None };
    if written.order.heartbeat {
        written.state = group::heartbeat(&mut write.tx, me).await.map_err(failed)?;
    }
    if written.order.leave || written.order.heartbeat && written.state.is_none() {
        group::leave(&mut write.tx, me).await.map_err(failed)?;
    }
    log.commit(write).await?;
    Ok(written)
}
