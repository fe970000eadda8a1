//! Takes events from the broker, and acknowledges up to low-water marks.
//!
//! Promise: only committed messages are acknowledged (G5). A message that is not finished, or is
//! set aside, does not stop the messages after it. A revoked partition starts nothing more,
//! finishes what runs, is acknowledged, and only then is given up. The broker is also polled while
//! handlers run, so heartbeats and rebalances never wait for handlers.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::{JoinError, JoinSet};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::item::{Done, End, Item, Source};
use super::positions::Told;
use super::{ConsumerOptions, Shared, lane, loss, positions};
use crate::broker::{Begun, Delivery, Event, PartitionId, Subscriber};
use crate::error::{BrokerError, RunEnd, StoreError};
use crate::inbox::port::{ConsumerId, Holding};
use crate::inbox::rules::position::Position;
use crate::inbox::rules::suspicion::Suspicion;
use crate::inbox::rules::watermark::Watermark;
use crate::observe::{self, PartState, Trouble};
use crate::task;

/// The last part of the grace, at most half of it: what still runs is dropped, and its tries are
/// taken back. A busy disk may need a second or two for that.
pub(super) const HAND_BACK: Duration = Duration::from_secs(4);

/// How long a partition that is given up waits until its row is closed. A database that works needs
/// far less. Where the row stays open, the next owner treats the first messages as suspect.
const CLOSE_MAX: Duration = Duration::from_secs(3);

/// The name of the trouble of a consumer that makes no progress.
const WORK: &str = "work";
/// The name of the trouble of partitions that must not be consumed.
const IDS: &str = "ids";

/// After how long without a finished message a consumer counts as standing still: two timeouts of a
/// handler, but not so short that a busy disk looks like a standstill, and not so long that nobody
/// would notice.
fn stands_after(handler_timeout: Duration) -> Duration {
    const LEAST: Duration = Duration::from_secs(5);
    const MOST: Duration = Duration::from_secs(300);
    (handler_timeout * 2).min(MOST).max(handler_timeout + LEAST)
}

/// How many deliveries count against `in_flight_max`.
fn in_flight(options: &ConsumerOptions, outstanding: usize, aside: usize) -> usize {
    outstanding.saturating_sub(aside.min(options.aside_max))
}

struct Assigned {
    source: Arc<Source>,
    /// The row of this assignment, and the id of its topic; `None` if the broker is not a log.
    row: Option<(Holding, Option<String>)>,
    mark: Watermark,
    /// Sequences that finished above the mark and were not reported to the subscriber.
    untold: Vec<i64>,
    /// The mark at the last tick of the timer.
    seen: Option<i64>,
    /// Deliveries for which there was no room; they go to the lanes in order when there is.
    backlog: VecDeque<Delivery>,
    acknowledged: Option<i64>,
    /// How many were given to lanes and not reported back.
    outstanding: usize,
    giving_up: Option<GivingUp>,
}

impl Assigned {
    /// How far the partition is done, as far as it was acknowledged.
    fn position(&self) -> Option<Position> {
        let (_, topic_id) = self.row.as_ref()?;
        Some(Position { topic_id: topic_id.clone(), next: self.acknowledged? + 1 })
    }
}

struct GivingUp {
    lost: bool,
    /// Dropping it lets the broker go on.
    guard: SyncSender<()>,
}

struct Intake<'a> {
    shared: &'a Arc<Shared>,
    consumer: ConsumerId,
    subscriber: Box<dyn Subscriber>,
    lanes: Vec<mpsc::UnboundedSender<Item>>,
    positions: mpsc::UnboundedSender<Told>,
    sources: HashMap<PartitionId, Assigned>,
    /// Closes the rows of partitions that are given up, all at once and beside everything else.
    closing: JoinSet<()>,
    /// The partitions that are assigned but not consumed, with the reason.
    refused: BTreeMap<PartitionId, String>,
    outstanding: usize,
    /// How many of the outstanding deliveries are set aside.
    aside: usize,
    paused: bool,
    active_at: Instant,
    /// Whether the broker has not yet said which partitions belong to this process.
    waits_for_share: bool,
    /// Since when deliveries are outstanding and none has finished.
    stands_since: Option<Instant>,
}

/// Nothing is in flight of a session that is over, also of one that is cut off.
struct Gauge<'a>(&'a Shared);

impl Drop for Gauge<'_> {
    fn drop(&mut self) {
        observe::in_flight(&self.0.options.name, 0);
    }
}

/// Serves one subscriber until the stop, idleness, or its error.
pub(super) async fn run(
    shared: &Arc<Shared>,
    consumer: ConsumerId,
    subscriber: Box<dyn Subscriber>,
    stop: &CancellationToken,
) -> Result<RunEnd, BrokerError> {
    let _gauge = Gauge(shared);
    let (done_sender, mut done) = mpsc::unbounded_channel();
    let (lanes_stop, abandon) = (CancellationToken::new(), CancellationToken::new());
    let mut tasks = JoinSet::new();
    let lanes = (0..shared.options.lanes)
        .map(|number| {
            // The channels are unbounded, but the intake sends at most `in_flight_max` plus
            // `aside_max` items.
            let (sender, receiver) = mpsc::unbounded_channel();
            let (done, stop, abandon) = (done_sender.clone(), lanes_stop.clone(), abandon.clone());
            tasks.spawn(task::boxed(lane::run(Arc::clone(shared), consumer, number, receiver, done, stop, abandon)));
            sender
        })
        .collect();
    drop(done_sender);
    let (positions, told) = mpsc::unbounded_channel();
    // Ends with this function. Positions that it has not written are written when a partition is
    // given up, or their messages come again.
    let mut keeper = JoinSet::new();
    keeper.spawn(task::boxed(positions::keep(Arc::clone(shared), consumer, told)));
    let mut intake = Intake {
        shared,
        consumer,
        subscriber,
        lanes,
        positions,
        sources: HashMap::new(),
        closing: JoinSet::new(),
        refused: BTreeMap::new(),
        outstanding: 0,
        aside: 0,
        paused: false,
        active_at: Instant::now(),
        waits_for_share: true,
        stands_since: None,
    };
    shared.health.set(&shared.part, PartState::Starting);
    let end = tokio::select! {
        end = intake.serve(&mut done, stop) => end,
        // A lane ends only by a panic while the intake runs; the messages that it had come again.
        Some(ended) = tasks.join_next() => {
            in_disorder(shared, "a lane ended unexpectedly; restarting all lanes", ended)
        }
        // This task does not end either while positions may be sent to it.
        Some(ended) = keeper.join_next() => {
            in_disorder(shared, "the keeper of positions ended unexpectedly; restarting", ended)
        }
    };
    let lane_is_gone = tasks.len() < shared.options.lanes;
    shared.health.trouble(&shared.part, "broker", None);
    shared.health.trouble(&shared.part, WORK, None);
    // Another process may get the refused partitions; this one shows them again if it does.
    shared.health.trouble(&shared.part, IDS, None);
    // Nothing more is started. What runs may finish within the grace, and is acknowledged if the
    // subscriber still works. Revoke first: a lane that the stop wakes from a pause leaves its
    // message, and must not start the next one of the key.
    for assigned in intake.sources.values() {
        assigned.source.revoke();
    }
    lanes_stop.cancel();
    intake.lanes.clear();
    // Nobody will report the items of a lane that is gone.
    let grace = if lane_is_gone { shared.options.shutdown_grace.min(HAND_BACK) } else { shared.options.shutdown_grace };
    let hand_back = HAND_BACK.min(grace / 2);
    if !intake.drain(&mut done, end.is_ok(), grace - hand_back).await {
        tracing::warn!(consumer = %shared.options.name, "handlers still ran at the end of the grace; their messages come again");
        abandon.cancel();
        if !intake.drain(&mut done, end.is_ok(), hand_back).await {
            tasks.abort_all();
        }
    }
    while tasks.join_next().await.is_some() {}
    if lane_is_gone {
        // The message that made it panic is found by its counts, like one that kills its process.
        shared.unspent.clear();
    }
    shared.health.clear_troubles(&shared.part, lane::DATABASE);
    intake.close(end.is_ok()).await;
    end
}

/// Ends the subscriber because a task ended that must not end.
fn in_disorder(shared: &Shared, what: &str, ended: Result<(), JoinError>) -> Result<RunEnd, BrokerError> {
    let why = ended.err().map_or_else(|| "it returned".to_owned(), |error| error.to_string());
    let why = format!("{what}: {why}");
    tracing::error!(consumer = %shared.options.name, "{why}");
    shared.health.set(&shared.part, PartState::Waiting(why.clone()));
    Err(BrokerError::Session(why))
}

impl Intake<'_> {
    async fn serve(
        &mut self,
        done: &mut mpsc::UnboundedReceiver<Done>,
        stop: &CancellationToken,
    ) -> Result<RunEnd, BrokerError> {
        let mut tick = tokio::time::interval(Duration::from_millis(50));
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            // Every branch is cancel safe: `next` by its contract, channel and timer by theirs.
            tokio::select! {
                biased;
                () = stop.cancelled() => return Ok(RunEnd::Stopped),
                Some(first) = done.recv() => {
                    let mut finished = vec![first];
                    while let Ok(next) = done.try_recv() {
                        finished.push(next);
                    }
                    self.finished(finished).await;
                    self.go_on()?;
                }
                event = self.subscriber.next() => {
                    self.event(event?).await?;
                    self.go_on()?;
                }
                _ = tick.tick() => {
                    if self.shared.is_forgotten.load(Ordering::Relaxed) {
                        return Err(BrokerError::Refused(format!(
                            "an operator forgot the consumer `{}` while this process ran, or a process with another id rule was \
                             accepted for it: start this one again with that rule; a forgotten consumer begins as a new one, and \
                             what comes again is handled again",
                            self.shared.options.name
                        )));
                    }
                    if let Some(why) = self.shared.silence.drives_away(self.shared.options.handler_timeout) {
                        tracing::warn!(consumer = %self.shared.options.name, "{why}");
                        return Err(BrokerError::Session(why));
                    }
                    self.shared.health.beat(&self.shared.part);
                    self.shared.health.trouble(&self.shared.part, "broker", self.subscriber.away().map(Trouble::Stops));
                    observe::in_flight(&self.shared.options.name, self.outstanding);
                    if self.waits_for_share && self.subscriber.has_no_share() {
                        self.has_its_share();
                    }
                    self.look_whether_it_stands();
                    self.tell_where_the_mark_stands().await;
                    self.go_on()?;
                    if self.is_idle().await? {
                        return Ok(RunEnd::Idle);
                    }
                }
            }
        }
    }

    async fn event(&mut self, event: Event) -> Result<(), BrokerError> {
        match event {
            Event::Assigned(sources) => {
                self.active_at = Instant::now();
                self.assign(sources).await?;
                self.has_its_share();
            }
            Event::Deliveries(deliveries) => self.deliveries(deliveries),
            Event::Revoked { sources, lost, done } => {
                // First all of them, so that none starts anything while another one is given up.
                for id in &sources {
                    self.revoke(id, lost, &done);
                }
                for id in &sources {
                    self.give_up_if_drained(id).await;
                }
            }
        }
        Ok(())
    }

    /// The broker has said which partitions belong to this process, even if none: it is ready.
    fn has_its_share(&mut self) {
        if std::mem::take(&mut self.waits_for_share) {
            self.shared.health.set(&self.shared.part, PartState::Ready);
        }
    }

    /// Shows a trouble if deliveries are outstanding and none of them finishes, whatever the cause.
    fn look_whether_it_stands(&mut self) {
        if self.outstanding == 0 {
            self.stands_since = None;
        }
        let limit = stands_after(self.shared.options.handler_timeout);
        let stands = self.stands_since.is_some_and(|since| since.elapsed() > limit);
        let why = || format!("deliveries are in hand, and none of them was handled or stored for {limit:?}");
        self.shared.health.trouble(&self.shared.part, WORK, stands.then(|| Trouble::Stops(why())));
    }

    /// Gives the lanes as many deliveries as there is room for, and pauses or resumes the broker.
    fn go_on(&mut self) -> Result<(), BrokerError> {
        let is_log = self.shared.broker.is_log();
        let in_flight_max = self.shared.options.in_flight_max.max(1);
        // Deliveries that finished above an unfinished one are not acknowledged: they count too.
        let above = self.sources.values().map(|assigned| assigned.mark.above()).sum();
        let mut room = self.shared.options.unacknowledged_max.max(1).saturating_sub(above);
        let is_full = self.shared.is_full.load(Ordering::Relaxed);
        let mut waits = is_full;
        for (id, assigned) in &mut self.sources {
            // An item that the mark does not know must not run: the mark would pass it.
            while !is_full && room > 0 && in_flight(&self.shared.options, self.outstanding, self.aside) < in_flight_max
            {
                let Some(delivery) = assigned.backlog.pop_front() else { break };
                assigned.mark.delivered(delivery.sequence).map_err(|error| {
                    BrokerError::Session(format!("{}, partition {}: {error}", id.place, id.partition))
                })?;
                room -= 1;
                let item = Item::identify(delivery, Arc::clone(&assigned.source), &self.shared.options, is_log);
                let lane = item.lane(self.lanes.len());
                if self.lanes[lane].send(item).is_ok() {
                    assigned.outstanding += 1;
                    self.outstanding += 1;
                    self.stands_since.get_or_insert_with(Instant::now);
                }
            }
            waits |= !assigned.backlog.is_empty();
        }
        let in_flight = in_flight(&self.shared.options, self.outstanding, self.aside);
        let pause = waits || room == 0 || in_flight >= in_flight_max;
        let resume = !waits && room > 0 && in_flight <= in_flight_max / 2;
        if pause != self.paused && (pause || resume) {
            self.paused = pause;
            self.subscriber.pause(pause);
        }
        Ok(())
    }

    fn has_backlog(&self) -> bool {
        self.sources.values().any(|assigned| !assigned.backlog.is_empty())
    }

    async fn assign(&mut self, sources: Vec<PartitionId>) -> Result<(), BrokerError> {
        if !self.shared.broker.is_log() {
            for id in sources {
                self.add(id, Suspicion::closed(), None);
            }
            return Ok(());
        }
        let name = &self.shared.options.name;
        let (mut remembered, mut opened) = (Vec::new(), HashMap::new());
        for id in sources {
            let holding = Holding { topic: Arc::clone(&id.place), partition: id.partition, owner: Uuid::now_v7() };
            // Without its position, a partition could skip records that a restored database does
            // not have.
            let row = self.shared.store.open_assignment(self.consumer, &holding).await.map_err(|error| {
                let (topic, partition) = (&id.place, id.partition);
                BrokerError::Unavailable(format!(
                    "the database does not tell where {topic}/{partition} stands: {error}"
                ))
            })?;
            remembered.push((id.clone(), row.position.clone()));
            opened.insert(id, (holding, row));
        }
        let mut positions = Vec::new();
        for begun in self.subscriber.begin(remembered).await? {
            let Some((holding, row)) = opened.remove(&begun.source) else { continue };
            if let Some(why) = loss::takes_records_for_others(&self.shared.options.id_rule, row.has_new_ids, &begun) {
                tracing::error!(consumer = %name, "{why}");
                // Its position stays unchanged, so that the next owner detects the problem too.
                self.subscriber.refuse(&begun.source);
                self.refused.insert(begun.source, why);
                continue;
            }
            let Begun { source, topic_id, start } = begun;
            if let Some(because) = start.because {
                let said = loss::tell(name, &source, because);
                let place = format!("{}/{}", source.place, source.partition);
                self.shared.health.trouble_of(&self.shared.part, "position", place, Some(Trouble::Shown(said)));
            }
            // The last owner did not end cleanly, so what it had in flight may have killed it
            // (R26).
            let found_open = || Suspicion::found_open(self.shared.options.in_flight_max);
            let suspicion = if row.was_open { found_open() } else { Suspicion::closed() };
            positions.push((holding.clone(), Position { topic_id: topic_id.clone(), next: start.at }));
            self.add(source, suspicion, Some((holding, topic_id)));
        }
        self.show_refused();
        // From now on the database knows the id of the topic, so the next owner also detects a
        // topic that was made anew. If another process has taken a row meanwhile, nothing is done
        // about it here: this process may be the one that lost the partition. The first position
        // that it stores decides.
        self.shared.store.keep_positions(self.consumer, &positions).await.map(drop).map_err(|error| {
            BrokerError::Unavailable(format!("the database does not take where partitions stand: {error}"))
        })
    }

    fn add(&mut self, id: PartitionId, suspicion: Suspicion, row: Option<(Holding, Option<String>)>) {
        tracing::info!(consumer = %self.shared.options.name, place = %id.place, partition = id.partition, suspicious = suspicion.is_active(), "assigned");
        let assigned = Assigned {
            source: Source::new(id.clone(), suspicion),
            row,
            mark: Watermark::default(),
            untold: Vec::new(),
            seen: None,
            backlog: VecDeque::new(),
            acknowledged: None,
            outstanding: 0,
            giving_up: None,
        };
        self.sources.insert(id, assigned);
    }

    fn deliveries(&mut self, deliveries: Vec<Delivery>) {
        self.active_at = Instant::now();
        for delivery in deliveries {
            if let Some(assigned) = self.sources.get_mut(&delivery.source).filter(|one| one.giving_up.is_none()) {
                assigned.backlog.push_back(delivery);
            }
        }
    }

    /// Shows the partitions whose deliveries are dropped: neither handled nor acknowledged.
    fn show_refused(&self) {
        let why = (!self.refused.is_empty()).then(|| self.refused.values().cloned().collect::<Vec<_>>().join("; "));
        self.shared.health.trouble(&self.shared.part, IDS, why.map(Trouble::Stops));
    }

    fn revoke(&mut self, id: &PartitionId, lost: bool, guard: &SyncSender<()>) {
        if self.refused.remove(id).is_some() {
            self.show_refused();
        }
        let Some(assigned) = self.sources.get_mut(id) else { return };
        assigned.source.revoke();
        assigned.backlog.clear();
        assigned.giving_up = Some(GivingUp { lost, guard: guard.clone() });
    }

    async fn give_up_if_drained(&mut self, id: &PartitionId) {
        let drained =
            self.sources.get(id).is_some_and(|assigned| assigned.giving_up.is_some() && assigned.outstanding == 0);
        if !drained {
            return;
        }
        self.acknowledge(id).await;
        tracing::info!(consumer = %self.shared.options.name, place = %id.place, partition = id.partition, "given up");
        if let Some(assigned) = self.sources.remove(id) {
            self.close_assignment(assigned);
        }
    }

    async fn finished(&mut self, finished: Vec<Done>) {
        self.active_at = Instant::now();
        let mut touched = Vec::new();
        if finished.iter().any(|done| done.end == End::Committed) {
            self.stands_since = Some(Instant::now());
            self.shared.has_heard();
        }
        for done in finished {
            if done.end == End::Aside {
                self.aside += 1;
                self.subscriber.set_aside(&done.source, done.sequence);
                continue;
            }
            self.is_back(&done);
            let Some(assigned) = self.sources.get_mut(&done.source) else { continue };
            assigned.outstanding = assigned.outstanding.saturating_sub(1);
            if done.end == End::Committed && assigned.mark.finished(done.sequence) {
                assigned.untold.push(done.sequence);
            }
            if touched.last() != Some(&done.source) && !touched.contains(&done.source) {
                touched.push(done.source);
            }
        }
        for id in touched {
            self.acknowledge(&id).await;
            self.give_up_if_drained(&id).await;
        }
        // Not at once: the mark soon covers most of them.
        let untold: usize = self.sources.values().map(|assigned| assigned.untold.len()).sum();
        if untold > self.shared.options.in_flight_max / 4 {
            self.tell_finished(|_| true).await;
        }
    }

    /// Counts a delivery that is in no lane any more.
    fn is_back(&mut self, done: &Done) {
        self.outstanding = self.outstanding.saturating_sub(1);
        self.aside = self.aside.saturating_sub(usize::from(done.was_aside));
    }

    /// Reports finished deliveries of each partition whose mark has not moved since the last tick:
    /// an unfinished delivery holds it.
    async fn tell_where_the_mark_stands(&mut self) {
        self.tell_finished(|assigned| assigned.seen == assigned.mark.committable()).await;
        for assigned in self.sources.values_mut() {
            assigned.seen = assigned.mark.committable();
        }
    }

    /// Reports deliveries that finished above the mark, so that the subscriber has room for others.
    async fn tell_finished(&mut self, of: impl Fn(&Assigned) -> bool) {
        for (id, assigned) in &mut self.sources {
            let is_lost = assigned.giving_up.as_ref().is_some_and(|giving_up| giving_up.lost);
            if !is_lost && !assigned.untold.is_empty() && of(assigned) {
                self.subscriber.finished(id, &std::mem::take(&mut assigned.untold)).await;
            }
        }
    }

    async fn acknowledge(&mut self, id: &PartitionId) {
        let Some(assigned) = self.sources.get_mut(id) else { return };
        if assigned.giving_up.as_ref().is_some_and(|giving_up| giving_up.lost) {
            return;
        }
        let Some(through) = assigned.mark.committable().filter(|mark| Some(*mark) != assigned.acknowledged) else {
            return;
        };
        assigned.acknowledged = Some(through);
        assigned.untold.retain(|sequence| *sequence > through);
        if let (Some((holding, _)), Some(position)) = (&assigned.row, assigned.position()) {
            // At the end no task writes positions any more; closing the assignment writes this one.
            let (source, holding) = (Arc::clone(&assigned.source), holding.clone());
            let _ended = self.positions.send(Told { source, holding, position });
        }
        if let Err(error) = self.subscriber.acknowledge(id, through).await {
            // Nothing is lost: the message comes again, and the inbox knows it.
            observe::acknowledge_failed(&self.shared.options.name);
            tracing::warn!(consumer = %self.shared.options.name, %error, "an acknowledgement did not arrive");
        }
    }

    /// Closes the row of a partition, in a task: a database that is away must not stop the polling
    /// of the broker, nor let one partition wait for another one.
    fn close_assignment(&mut self, assigned: Assigned) {
        while self.closing.try_join_next().is_some() {}
        let position = assigned.position();
        // The broker goes on when the row is closed, or at once if there is none.
        let (lost, guard) =
            assigned.giving_up.map_or((false, None), |giving_up| (giving_up.lost, Some(giving_up.guard)));
        let Some((holding, _)) = assigned.row else { return };
        let (shared, consumer) = (Arc::clone(self.shared), self.consumer);
        self.closing.spawn(task::boxed(async move {
            let closed = async {
                let is_closed = shared.store.close_assignment(consumer, &holding, position.as_ref()).await?;
                // Another process took the row. It may be the owner, but not if it closed the row.
                if let (false, false, Some(position)) = (is_closed, lost, &position)
                    && positions::take_back(&shared, consumer, &holding, position, false).await?
                {
                    shared.store.close_assignment(consumer, &holding, Some(position)).await?;
                }
                Ok::<_, StoreError>(())
            };
            let why = match tokio::time::timeout(CLOSE_MAX, closed).await {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(error.to_string()),
                Err(_) => Some(format!("the database did not answer within {CLOSE_MAX:?}")),
            };
            if let Some(why) = why {
                let (place, partition) = (&holding.topic, holding.partition);
                tracing::warn!(consumer = %shared.options.name, %place, partition, %why, "the row of a partition was not closed; its next owner treats its first messages as suspect");
            }
            drop(guard);
        }));
    }

    async fn is_idle(&mut self) -> Result<bool, BrokerError> {
        let Some(idle) = self.shared.options.until_idle else { return Ok(false) };
        if self.outstanding > 0 || self.has_backlog() || self.active_at.elapsed() < idle {
            return Ok(false);
        }
        if !self.subscriber.caught_up().await? {
            self.active_at = Instant::now();
            return Ok(false);
        }
        // All that can be done is done, but some partitions are refused.
        if let Some(why) = self.refused.values().next() {
            return Err(BrokerError::Refused(why.clone()));
        }
        // The due time is read first: what a retrier leases after that was due at this read.
        let due = self.shared.store.next_due(self.consumer, &self.shared.scope).await;
        let Ok(due) = due else { return Ok(false) };
        if self.shared.retrying.load(Ordering::Acquire) > 0 || due.is_some_and(|due| due.is_zero()) {
            self.active_at = Instant::now();
            return Ok(false);
        }
        Ok(true)
    }

    /// Waits for what runs, and acknowledges it if the subscriber is `alive`. Returns false if the
    /// grace ended first.
    async fn drain(&mut self, done: &mut mpsc::UnboundedReceiver<Done>, alive: bool, grace: Duration) -> bool {
        let grace = tokio::time::sleep(grace);
        tokio::pin!(grace);
        while self.outstanding > 0 {
            let next = tokio::select! {
                next = done.recv() => next,
                () = &mut grace => return false,
            };
            let Some(first) = next else { return true };
            if alive {
                self.finished(vec![first]).await;
            } else if first.end != End::Aside {
                self.is_back(&first);
            }
        }
        true
    }

    /// Ends all. If the subscriber is `alive`, what is done is acknowledged, and the partitions of
    /// which nothing runs are closed. After an error their rows stay open, as where a process died:
    /// the next owner counts the first tries before they are made.
    async fn close(mut self, alive: bool) {
        if alive {
            let ids: Vec<_> = self.sources.keys().cloned().collect();
            for id in &ids {
                self.acknowledge(id).await;
                if self.sources.get(id).is_some_and(|assigned| assigned.outstanding == 0)
                    && let Some(assigned) = self.sources.remove(id)
                {
                    self.close_assignment(assigned);
                }
            }
        }
        while self.closing.join_next().await.is_some() {}
        if alive {
            self.subscriber.close().await;
        }
    }
}
