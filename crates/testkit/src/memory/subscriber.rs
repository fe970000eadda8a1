//! Consuming from memory: every event is computed from the shared state, so that nothing is lost
//! when `next` is dropped.
//!
//! A subscriber that is dropped leaves its group at once. Other members get its unacknowledged
//! deliveries.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::watch;
use tokio::time::Instant;

use super::groups::Place;
use super::state::{BrokerState, State};
use oncebox::adapter::{BrokerOffsets, Position, start};
use oncebox::broker::{Begun, Delivery, Event, PartitionId, Subscriber, Subscription};
use oncebox::error::BrokerError;

/// Most rows of one batch.
const BATCH_ROWS: usize = 100;
/// How often the guard of a revoked partition is checked.
const GUARD_EVERY: Duration = Duration::from_millis(1);

/// A partition that this member owns.
#[derive(Debug)]
struct Owned {
    id: PartitionId,
    epoch: u64,
    /// The next offset to be delivered.
    position: i64,
    acknowledged: i64,
    /// Deliveries that are not acknowledged and do not count as in flight any more.
    spared: BTreeSet<i64>,
    /// The end of the partition at its assignment.
    end: i64,
    is_refused: bool,
    leaving: Option<(Receiver<()>, Instant)>,
}

impl Owned {
    fn in_flight(&self) -> usize {
        if self.is_refused {
            return 0;
        }
        usize::try_from(self.position - self.acknowledged).unwrap_or_default().saturating_sub(self.spared.len())
    }
}

/// One member of a group.
#[derive(Debug)]
pub(super) struct MemorySubscriber {
    shared: Arc<BrokerState>,
    session: u64,
    member: i64,
    group: String,
    drain: Duration,
    in_flight_max: usize,
    changes: watch::Receiver<u64>,
    owned: BTreeMap<Place, Owned>,
    paused: bool,
    /// True where this member has no partition because live members own all of them.
    others_hold_all: bool,
    /// The partition that the next batch begins with, so that each gets its turn.
    turn: usize,
}

impl MemorySubscriber {
    pub(super) fn join(shared: Arc<BrokerState>, subscription: &Subscription) -> Result<Self, BrokerError> {
        let group = subscription.group().to_owned();
        let (session, member) = shared.change(|state| {
            state.faults.available()?;
            if !state.faults.topics_must_exist {
                subscription.topics.iter().for_each(|topic| state.ensure_topic(topic));
            }
            state.sessions += 1;
            let member = state.next_id();
            let mut topics = subscription.topics.clone();
            topics.sort();
            topics.dedup();
            state.groups.entry(group.clone()).or_default().join(member, topics);
            Ok::<_, BrokerError>((state.sessions, member))
        })?;
        Ok(Self {
            session,
            member,
            group,
            drain: subscription.drain,
            in_flight_max: subscription.in_flight_max.max(1),
            changes: shared.changes(),
            shared,
            owned: BTreeMap::new(),
            paused: false,
            others_hold_all: false,
            turn: 0,
        })
    }

    /// Computes the next event, if there is one. Also returns whether the state was changed, so
    /// that other members must look.
    fn look(&mut self, state: &mut State) -> Result<(Option<Event>, bool), BrokerError> {
        if state.faults.subscribers_ended >= self.session {
            state.faults.available()?;
            return Err(BrokerError::Session("the broker ended the subscription".to_owned()));
        }
        let mut changed = false;
        let State { groups, topics, .. } = state;
        let Some(group) = groups.get_mut(&self.group) else {
            return Err(BrokerError::Session("the group is gone".to_owned()));
        };

        let mut lost = Vec::new();
        self.owned.retain(|place, owned| {
            let kept =
                group.lease(place).is_some_and(|lease| lease.owner == Some(self.member) && lease.epoch == owned.epoch);
            if !kept {
                lost.push(owned.id.clone());
            }
            kept
        });
        if !lost.is_empty() {
            return Ok((Some(Event::Revoked { sources: lost, lost: true, done: sync_channel(0).0 }), changed));
        }

        let through: Vec<Place> = self
            .owned
            .iter()
            .filter(|(_, owned)| {
                owned.leaving.as_ref().is_some_and(|(done, until)| {
                    Instant::now() >= *until || matches!(done.try_recv(), Err(TryRecvError::Disconnected))
                })
            })
            .map(|(place, _)| place.clone())
            .collect();
        for place in through {
            if let Some(owned) = self.owned.remove(&place) {
                group.release(self.member, &place, owned.epoch);
                changed = true;
            }
        }

        let known = group.topics_of(self.member).is_some_and(|read| read.iter().all(|name| topics.contains_key(name)));
        let (take, give_up, complete) = group.share(self.member, topics);
        if !take.is_empty() {
            let leases: Vec<_> = take.into_iter().map(|place| (group.take(self.member, &place), place)).collect();
            let mut sources = Vec::new();
            for (lease, place) in leases {
                let end = state.end(&place.0, place.1);
                let id = PartitionId { place: place.0.as_str().into(), partition: place.1, generation: lease.epoch };
                sources.push(id.clone());
                let owned = Owned {
                    id,
                    epoch: lease.epoch,
                    position: lease.committed,
                    acknowledged: lease.committed,
                    spared: BTreeSet::new(),
                    end,
                    is_refused: false,
                    leaving: None,
                };
                self.owned.insert(place, owned);
            }
            return Ok((Some(Event::Assigned(sources)), true));
        }
        self.others_hold_all = self.owned.is_empty() && complete && known;
        let until = Instant::now() + self.drain;
        for place in give_up {
            let Some(owned) = self.owned.get_mut(&place).filter(|owned| owned.leaving.is_none()) else { continue };
            let (done, through) = sync_channel(0);
            owned.leaving = Some((through, until));
            return Ok((Some(Event::Revoked { sources: vec![owned.id.clone()], lost: false, done }), changed));
        }
        Ok((self.deliver(state), changed))
    }

    /// What this member owns of a source, unless it was assigned anew since.
    fn owned(&mut self, source: &PartitionId) -> Option<&mut Owned> {
        let place = (source.place.to_string(), source.partition);
        self.owned.get_mut(&place).filter(|owned| owned.id == *source)
    }

    fn deliver(&mut self, state: &State) -> Option<Event> {
        if self.paused || state.faults.deliveries_held {
            return None;
        }
        let in_flight = self.owned.values().map(Owned::in_flight).sum();
        let in_flight_max = if state.faults.in_flight_unbounded { usize::MAX } else { self.in_flight_max };
        let room = in_flight_max.saturating_sub(in_flight).min(BATCH_ROWS);
        if room == 0 {
            return None;
        }
        let count = self.owned.len();
        self.turn += 1;
        for index in 0..count {
            let (place, owned) = self.owned.iter_mut().nth((self.turn + index) % count)?;
            if owned.leaving.is_some() || owned.is_refused {
                continue;
            }
            let rows = state.read(&place.0, place.1, owned.position, room);
            let Some(last) = rows.last() else { continue };
            owned.position = last.coordinates.offset + 1;
            let deliveries = rows.into_iter().map(|arrived| Delivery {
                source: owned.id.clone(),
                sequence: arrived.coordinates.offset,
                redelivered: false,
                arrived,
            });
            return Some(Event::Deliveries(deliveries.collect()));
        }
        None
    }
}

#[async_trait]
impl Subscriber for MemorySubscriber {
    async fn next(&mut self) -> Result<Event, BrokerError> {
        loop {
            self.changes.mark_unchanged();
            let shared = Arc::clone(&self.shared);
            let (event, changed) = shared.look_and_change(|state| self.look(state))?;
            if changed {
                shared.change(|_| ());
            }
            if let Some(event) = event {
                return Ok(event);
            }
            let leaving = self.owned.values().any(|owned| owned.leaving.is_some());
            tokio::select! {
                _ = self.changes.changed() => {}
                () = tokio::time::sleep(GUARD_EVERY), if leaving => {}
            }
        }
    }

    async fn begin(&mut self, remembered: Vec<(PartitionId, Option<Position>)>) -> Result<Vec<Begun>, BrokerError> {
        let mut begun = Vec::new();
        for (source, position) in remembered {
            let place = (source.place.to_string(), source.partition);
            let Some(owned) = self.owned.get_mut(&place).filter(|owned| owned.id == source) else { continue };
            let (topic_id, first) = self.shared.look(|state| {
                let topic_id = state.topics.get(&place.0).map(|topic| topic.id.to_string());
                (topic_id, state.faults.deleted_below.min(owned.end))
            });
            let found = BrokerOffsets {
                topic_id: topic_id.clone(),
                committed: Some(owned.acknowledged),
                first,
                end: owned.end,
            };
            let start = start(position.as_ref(), &found);
            (owned.position, owned.acknowledged) = (start.at, start.at);
            begun.push(Begun { source, topic_id, start });
        }
        Ok(begun)
    }

    async fn acknowledge(&mut self, source: &PartitionId, through: i64) -> Result<(), BrokerError> {
        let Some(owned) = self.owned(source) else { return Ok(()) };
        owned.acknowledged = owned.acknowledged.max(through.saturating_add(1));
        owned.spared = owned.spared.split_off(&owned.acknowledged);
        let (place, epoch, next) = ((source.place.to_string(), source.partition), owned.epoch, owned.acknowledged);
        self.shared.change(|state| {
            if !state.faults.acknowledgements_lost
                && let Some(group) = state.groups.get_mut(&self.group)
            {
                group.commit(self.member, &place, epoch, next);
            }
        });
        Ok(())
    }

    async fn finished(&mut self, source: &PartitionId, sequences: &[i64]) {
        for sequence in sequences {
            self.set_aside(source, *sequence);
        }
    }

    fn set_aside(&mut self, source: &PartitionId, sequence: i64) {
        if let Some(owned) = self.owned(source)
            && (owned.acknowledged..owned.position).contains(&sequence)
        {
            owned.spared.insert(sequence);
        }
    }

    fn refuse(&mut self, source: &PartitionId) {
        if let Some(owned) = self.owned(source) {
            owned.is_refused = true;
        }
    }

    fn pause(&mut self, paused: bool) {
        self.paused = paused;
    }

    fn has_no_share(&self) -> bool {
        self.others_hold_all
    }

    async fn caught_up(&mut self) -> Result<bool, BrokerError> {
        if self.owned.is_empty() {
            return Ok(self.others_hold_all);
        }
        Ok(self.owned.values().all(|owned| owned.is_refused || owned.position >= owned.end))
    }

    async fn close(self: Box<Self>) {}
}

impl Drop for MemorySubscriber {
    fn drop(&mut self) {
        self.shared.change(|state| {
            if let Some(group) = state.groups.get_mut(&self.group) {
                group.leave(self.member);
            }
        });
    }
}
