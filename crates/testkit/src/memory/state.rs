//! The content of the broker in memory: topics, groups, faults. One lock protects it, and a counter
//! of changes lets sessions wait.

pub(super) mod faults;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use self::faults::Switches;
use super::groups::Group;
use super::topics::{Record, Topic, end};
use oncebox::adapter;
use oncebox::broker::Subscription;
use oncebox::message::{Arrived, Coordinates};

/// The broker, which its sessions share.
pub(super) struct BrokerState {
    state: Mutex<State>,
    /// Counts changes, so that a session waits for the next change after its look and misses none.
    changes: watch::Sender<u64>,
    /// How often publishing sessions were asked whether the broker is blocked.
    pub(super) turns: AtomicU64,
}

impl fmt::Debug for BrokerState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BrokerState").field("topics", &self.lock().topics.len()).finish_non_exhaustive()
    }
}

impl BrokerState {
    pub(super) fn new(partitions: usize) -> Self {
        let state = State {
            partitions,
            topics: BTreeMap::new(),
            groups: BTreeMap::new(),
            faults: Switches::default(),
            sessions: 0,
            ids: 0,
        };
        Self { state: Mutex::new(state), changes: watch::Sender::new(0), turns: AtomicU64::new(0) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn look<T>(&self, look: impl FnOnce(&State) -> T) -> T {
        look(&self.lock())
    }

    /// Changes the state and wakes all sessions that wait.
    pub(super) fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let answer = change(&mut self.lock());
        self.changes.send_modify(|count| *count += 1);
        answer
    }

    /// Changes the state and wakes no session. The caller wakes them if they must look.
    pub(super) fn look_and_change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        change(&mut self.lock())
    }

    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }
}

/// The whole content of the broker, behind one lock.
#[derive(Debug)]
pub(super) struct State {
    partitions: usize,
    pub(super) topics: BTreeMap<String, Topic>,
    pub(super) groups: BTreeMap<String, Group>,
    pub(super) faults: Switches,
    /// The number of sessions opened so far. A fault ends all sessions up to a number.
    pub(super) sessions: u64,
    /// The number of ids given so far, to members and topics.
    ids: i64,
}

impl State {
    pub(super) fn next_id(&mut self) -> i64 {
        self.ids += 1;
        self.ids
    }

    pub(super) fn ensure_topic(&mut self, name: &str) {
        if !self.topics.contains_key(name) {
            let topic = Topic::new(self.next_id(), self.partitions);
            self.topics.insert(name.to_owned(), topic);
        }
    }

    /// Deletes the topics and the group of a subscription.
    pub(super) fn remove(&mut self, subscription: &Subscription) {
        self.groups.remove(subscription.group());
        for topic in &subscription.topics {
            self.topics.remove(topic);
        }
    }

    /// Appends to the partition that the hash of `hashed` selects. Returns partition and offset.
    pub(super) fn append(&mut self, topic: &str, hashed: &[u8], record: Record) -> (i32, i64) {
        let Some(topic) = self.topics.get_mut(topic) else { return (0, 0) };
        topic.append(hashed, record)
    }

    pub(super) fn all(&self, topic: &str) -> Vec<Arrived> {
        let partitions = self.topics.get(topic).map(|topic| topic.partitions.len()).unwrap_or_default();
        (0_i32..).take(partitions).flat_map(|number| self.read(topic, number, 0, usize::MAX)).collect()
    }

    /// Reads a partition from an offset on.
    pub(super) fn read(&self, topic: &str, number: i32, from: i64, rows_max: usize) -> Vec<Arrived> {
        let records = self.partition(topic, number);
        let skip = usize::try_from(from).unwrap_or_default();
        let rows = (from..).zip(records.iter().skip(skip)).take(rows_max);
        rows.map(|(offset, record)| {
            let coordinates = Coordinates { place: topic.to_owned(), partition: number, offset };
            let Record { key, headers, payload, appended_at } = record.clone();
            adapter::arrive(key, headers, payload, Some(appended_at), coordinates)
        })
        .collect()
    }

    /// The offset that the next record of a partition gets.
    pub(super) fn end(&self, topic: &str, number: i32) -> i64 {
        end(self.partition(topic, number))
    }

    pub(super) fn committed(&self, group: &str, topic: &str, partition: i32) -> i64 {
        self.groups.get(group).map_or(0, |group| group.committed(topic, partition))
    }

    fn partition(&self, topic: &str, number: i32) -> &[Record] {
        self.topics.get(topic).map(|topic| topic.partition(number)).unwrap_or_default()
    }
}
