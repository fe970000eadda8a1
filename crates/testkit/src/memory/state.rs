//! The content of the broker in memory: topics, partitions, records. One lock protects it, and a
//! counter of changes lets sessions wait.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, MutexGuard, PoisonError};

use chrono::{DateTime, Utc};
use sha2::{Digest, Sha256};
use tokio::sync::watch;

use super::faults::Switches;
use super::groups::Group;
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

/// One record of a partition.
#[derive(Debug, Clone)]
pub(super) struct Record {
    pub(super) key: Option<Vec<u8>>,
    pub(super) headers: Vec<(String, Vec<u8>)>,
    pub(super) payload: Option<Vec<u8>>,
    pub(super) appended_at: DateTime<Utc>,
}

/// A topic: its id, which also decides how shares are spread, and its partitions.
#[derive(Debug)]
pub(super) struct Topic {
    pub(super) id: i64,
    pub(super) partitions: Vec<Vec<Record>>,
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
            let topic = Topic { id: self.next_id(), partitions: vec![Vec::new(); self.partitions] };
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
        let digest = Sha256::digest(hashed);
        let number = usize::from(u16::from_be_bytes([digest[0], digest[1]])) % topic.partitions.len();
        let partition = &mut topic.partitions[number];
        partition.push(record);
        (i32::try_from(number).unwrap_or(i32::MAX), end(partition) - 1)
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
        let partitions = self.topics.get(topic).map(|topic| topic.partitions.as_slice()).unwrap_or_default();
        usize::try_from(number).ok().and_then(|number| partitions.get(number)).map(Vec::as_slice).unwrap_or_default()
    }
}

fn end(partition: &[Record]) -> i64 {
    i64::try_from(partition.len()).unwrap_or(i64::MAX)
}
