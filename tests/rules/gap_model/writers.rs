//! The applications: transactions that take an id, lock keys, enqueue, use savepoints, prepare, and
//! end at any time.

use super::mutant::Mutant;
use super::postgres::{Fate, Message, Postgres, Topic};
use super::world::{Settings, World};

#[derive(Debug, Default)]
pub(crate) struct Writer {
    backend: u64,
    /// The higher, the longer it stays open.
    patience: u32,
    pub(crate) xid: Option<u64>,
    sub_xids: Vec<u64>,
    pub(crate) messages: Vec<usize>,
    savepoint: Option<Savepoint>,
    /// It holds RowExclusiveLock on the outbox.
    holds_table: bool,
    keys: Vec<(Topic, &'static str)>,
    pub(crate) prepared: bool,
    /// R1 taken out: drawn, and not inserted yet.
    drawn: Option<(i64, u64)>,
}

#[derive(Debug, Clone, Copy)]
struct Savepoint {
    messages: usize,
    xid: Option<u64>,
    held_table: bool,
}

const TOPICS: [Topic; 2] = ["orders", "payments"];
const KEYS: [&str; 3] = ["a", "b", "c"];

impl World {
    /// One step of some writer.
    pub(crate) fn writer_step(&mut self) {
        let begins = self.writers.len() < self.settings.writers_max && self.one_in(2);
        if (begins || self.writers.is_empty()) && self.pg.messages.len() < self.settings.messages_max {
            self.next_backend += 1;
            let long = self.settings.long_writers && self.one_in(4);
            let patience = if long { 16 } else { self.random.u32(1..=3) };
            self.writers.push(Writer { backend: self.next_backend, patience, ..Writer::default() });
            return;
        }
        if self.writers.is_empty() {
            return;
        }
        // Often the same one as before: some transactions are quick.
        let same = self.random.u8(0..3) == 0 && self.last_writer < self.writers.len();
        let index = if same { self.last_writer } else { self.random.usize(0..self.writers.len()) };
        self.last_writer = index;
        let writer = &self.writers[index];
        if writer.prepared {
            if self.one_in(6) {
                self.end_writer(index);
            }
            return;
        }
        if writer.drawn.is_some() {
            return self.insert_drawn(index);
        }
        let patience = writer.patience;
        match self.random.u8(0..24) {
            0..=1 => self.give_id(index),
            2..=11 => self.enqueue(index),
            12 if self.settings.savepoints => self.set_savepoint(index),
            13 if self.settings.savepoints => self.roll_back_to_savepoint(index),
            14 if self.settings.prepared && writer.xid.is_some() => {
                self.writers[index].prepared = true;
                self.pg.flush();
            }
            _ if self.writers[index].messages.is_empty() && !self.one_in(4) => {}
            _ if self.one_in(patience) => self.end_writer(index),
            _ => {}
        }
    }

    fn give_id(&mut self, index: usize) {
        let writer = &mut self.writers[index];
        if writer.xid.is_none() {
            writer.xid = Some(self.pg.assign_xid());
        }
        if let Some(savepoint) = &mut writer.savepoint
            && savepoint.xid.is_none()
        {
            let xid = self.pg.assign_sub_xid();
            savepoint.xid = Some(xid);
            writer.sub_xids.push(xid);
        }
    }

    fn enqueue(&mut self, index: usize) {
        if self.pg.messages.len() >= self.settings.messages_max {
            return;
        }
        let topic = TOPICS[self.random.usize(0..self.settings.topics)];
        let key = KEYS[self.random.usize(0..self.settings.keys)];
        // Who would have to wait for a key enqueues without one meanwhile.
        let takes_key = !self.one_in(6) && (!self.settings.serialised || self.lock_key(index, (topic, key)));
        let key = takes_key.then_some(key);
        self.writers[index].holds_table = true;
        if self.mutant == Some(Mutant::PositionBeforeId) && self.writers[index].xid.is_none() {
            let position = self.pg.draw();
            self.writers[index].drawn = Some((position, self.pg.clock));
            return;
        }
        self.give_id(index);
        let rows = if self.one_in(4) { 2 } else { 1 };
        for _ in 0..rows {
            let position = self.pg.draw();
            self.insert(index, (topic, key), position, self.pg.clock);
        }
    }

    /// The row lock of the aggregate, held to the end.
    fn lock_key(&mut self, index: usize, key: (Topic, &'static str)) -> bool {
        if self.writers[index].keys.contains(&key) {
            return true;
        }
        let free = self.writers.iter().all(|writer| !writer.keys.contains(&key));
        if free {
            self.writers[index].keys.push(key);
        }
        free
    }

    fn insert_drawn(&mut self, index: usize) {
        if self.random.bool() {
            self.give_id(index);
            if let Some((position, at)) = self.writers[index].drawn.take() {
                self.insert(index, (TOPICS[0], None), position, at);
            }
        }
    }

    fn insert(&mut self, index: usize, at: (Topic, Option<&'static str>), position: i64, enqueued_at: u64) {
        let (topic, key) = at;
        let bucket = match key {
            Some(key) => key.as_bytes()[0] ^ topic.as_bytes()[0],
            None => self.random.u8(0..32),
        };
        let poison = self.settings.poison && self.random.u8(0..12) == 0;
        let fate = Fate::Open;
        let message = Message { topic, key, bucket, position, enqueued_at, fate, poison, discarded: false };
        let id = self.pg.insert(message);
        self.writers[index].messages.push(id);
        self.note(|| format!("writer {index} inserts {position}"));
    }

    fn set_savepoint(&mut self, index: usize) {
        let writer = &mut self.writers[index];
        let (messages, held_table) = (writer.messages.len(), writer.holds_table);
        writer.savepoint = Some(Savepoint { messages, xid: None, held_table });
    }

    fn roll_back_to_savepoint(&mut self, index: usize) {
        let writer = &mut self.writers[index];
        let Some(savepoint) = writer.savepoint.take() else {
            return;
        };
        let undone = writer.messages.split_off(savepoint.messages);
        writer.holds_table = savepoint.held_table;
        if let Some(xid) = savepoint.xid {
            self.pg.complete(xid);
        }
        self.pg.roll_back(&undone);
        self.stats.rolled_back += undone.len() as u64;
    }

    /// Commits or rolls back.
    pub(crate) fn end_writer(&mut self, index: usize) {
        let writer = self.writers.swap_remove(index);
        let commits = self.random.u8(0..4) > 0;
        self.note(|| format!("writer {index} ends, commits {commits} {:?}", writer.messages));
        if commits {
            self.pg.commit(&writer.messages);
        } else {
            self.pg.roll_back(&writer.messages);
            self.stats.rolled_back += writer.messages.len() as u64;
        }
        for xid in writer.sub_xids.into_iter().chain(writer.xid) {
            self.pg.complete(xid);
        }
        if commits && (!self.settings.asynchronous || self.one_in(8)) {
            self.pg.flush();
        }
    }

    /// Who holds a lock on the outbox: by transaction, or (R6 taken out) by backend.
    pub(crate) fn lock_holders(&self) -> Vec<u64> {
        let holders = self.writers.iter().filter(|writer| writer.holds_table && writer.xid.is_some());
        if self.mutant == Some(Mutant::HoldersByBackend) {
            holders.filter(|writer| !writer.prepared).map(|writer| writer.backend).collect()
        } else {
            holders.filter_map(|writer| writer.xid).collect()
        }
    }

    /// Which of these are still there.
    pub(crate) fn still_holding(&self, watched: &[u64]) -> Vec<u64> {
        let is_there = |id: u64| {
            if self.mutant == Some(Mutant::HoldersByBackend) {
                self.writers.iter().any(|writer| writer.backend == id && !writer.prepared)
            } else {
                self.pg.is_running(id)
            }
        };
        watched.iter().copied().filter(|&id| is_there(id)).collect()
    }

    /// The server crashes: transactions end, unless they are prepared.
    pub(crate) fn crash_server(&mut self) {
        self.stats.server_crashes += 1;
        self.writers.retain(|writer| writer.prepared);
        let prepared: Vec<(u64, &[usize])> =
            self.writers.iter().filter_map(|writer| writer.xid.map(|xid| (xid, writer.messages.as_slice()))).collect();
        self.stats.undone_by_crash += Postgres::crash(&mut self.pg, &prepared);
    }
}

impl Settings {
    /// A random part of the faults is switched off in each history, so that one does not hide
    /// another.
    pub(crate) fn random(random: &mut fastrand::Rng) -> Self {
        Self {
            steps: random.usize(200..1_000),
            writers_max: random.usize(2..=7),
            messages_max: random.usize(30..=100),
            topics: random.usize(1..=TOPICS.len()),
            keys: random.usize(1..=KEYS.len()),
            long_writers: random.u8(0..3) > 0,
            serialised: random.u8(0..4) > 0,
            savepoints: random.bool(),
            prepared: random.bool(),
            asynchronous: random.bool(),
            server_crashes: [0, 0, 2, 5][random.usize(0..4)],
            poison: random.u8(0..4) == 0,
            blocked: random.u8(0..4) == 0,
            splits: random.u8(0..4) == 0,
            lock_watch: random.bool(),
            slow: [0, 40, 20, 10][random.usize(0..4)],
            session_ends: [0, 1, 4, 12][random.usize(0..4)],
            processes: random.usize(1..=3),
            rows: [1, 2, 3, 5, 8, 20, 20, 20][random.usize(0..8)],
            ranges_max: if random.u8(0..6) == 0 { random.usize(2..=4) } else { 1_000 },
            chunk: random.i64(1..=4),
        }
    }
}
