//! A model of a broker: per connection and key a queue from which it takes a prefix, and one log.
//!
//! A connection that was dropped lives on as a ghost: what was in flight may still land, or vanish
//! from any point on.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::postgres::Topic;

/// Messages without a key are each a queue of their own.
type Queue = (Topic, Result<&'static str, usize>);

#[derive(Debug, Default)]
pub(crate) struct Connection {
    alive: bool,
    queues: BTreeMap<Queue, VecDeque<(u64, usize)>>,
    /// Tokens of what was taken and confirmed, and not yet seen by the session.
    confirmed: Vec<u64>,
}

#[derive(Debug, Default)]
pub(crate) struct Broker {
    connections: Vec<Connection>,
    /// Messages in the order of their first occurrence.
    first: Vec<usize>,
    landed: BTreeSet<usize>,
    pub(crate) duplicates: u64,
    pub(crate) ghosts_landed: u64,
    /// Topics whose destination is blocked.
    pub(crate) blocked: BTreeSet<Topic>,
}

impl Broker {
    pub(crate) fn connect(&mut self) -> usize {
        self.connections.push(Connection { alive: true, ..Connection::default() });
        self.connections.len() - 1
    }

    pub(crate) fn drop_connection(&mut self, connection: usize) {
        self.connections[connection].alive = false;
    }

    pub(crate) fn send(&mut self, connection: usize, topic: Topic, key: Option<&'static str>, item: (u64, usize)) {
        let queue = (topic, key.ok_or(item.1));
        self.connections[connection].queues.entry(queue).or_default().push_back(item);
    }

    /// One message of a random queue lands; says whether there was any.
    pub(crate) fn land(&mut self, random: &mut fastrand::Rng) -> bool {
        let Some((connection, queue)) = self.random_queue(random) else {
            return false;
        };
        let connection = &mut self.connections[connection];
        let Some((token, message)) = connection.pop(queue) else {
            return false;
        };
        if connection.alive {
            connection.confirmed.push(token);
        } else {
            self.ghosts_landed += 1;
        }
        if self.landed.insert(message) {
            self.first.push(message);
        } else {
            self.duplicates += 1;
        }
        true
    }

    /// What is left of one queue of a ghost is never taken.
    pub(crate) fn vanish(&mut self, random: &mut fastrand::Rng) {
        if let Some((connection, queue)) = self.random_queue(random)
            && !self.connections[connection].alive
        {
            self.connections[connection].queues.remove(&queue);
        }
    }

    pub(crate) fn take_confirmed(&mut self, connection: usize, random: &mut fastrand::Rng) -> Vec<u64> {
        let confirmed = &mut self.connections[connection].confirmed;
        let count = random.usize(0..=confirmed.len());
        confirmed.drain(..count).collect()
    }

    pub(crate) fn has(&self, message: usize) -> bool {
        self.landed.contains(&message)
    }

    pub(crate) fn first_occurrences(&self) -> &[usize] {
        &self.first
    }

    fn random_queue(&self, random: &mut fastrand::Rng) -> Option<(usize, Queue)> {
        let all: Vec<(usize, Queue)> = self
            .connections
            .iter()
            .enumerate()
            .flat_map(|(index, connection)| connection.queues.keys().map(move |&queue| (index, queue)))
            .collect();
        random.choice(all)
    }
}

impl Connection {
    fn pop(&mut self, queue: Queue) -> Option<(u64, usize)> {
        let waiting = self.queues.get_mut(&queue)?;
        let item = waiting.pop_front();
        if waiting.is_empty() {
            self.queues.remove(&queue);
        }
        item
    }
}
