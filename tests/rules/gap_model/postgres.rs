//! A model of what a PostgreSQL server promises and does not: ids, snapshots, the sequence, the log
//! that a crash cuts.
//!
//! * A snapshot sees exactly what had committed; `xmin` is the oldest running id, `xmax` one past
//!   the highest completed.
//! * A commit without synchronous flush is visible at once and durable with the next flush. A crash
//!   undoes the rest, and may hand out again the positions and the ids that were not flushed.
//! * A prepared transaction survives everything.

use std::collections::{BTreeMap, BTreeSet};

use crate::outbox::rules::diversion::Diverted;
use crate::outbox::rules::gaps::{GapSet, Mark};

pub(crate) type Topic = &'static str;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    Open,
    Committed { at: u64, durable: bool },
    Gone,
}

#[derive(Debug, Clone)]
pub(crate) struct Message {
    pub(crate) topic: Topic,
    pub(crate) key: Option<&'static str>,
    pub(crate) bucket: u8,
    pub(crate) position: i64,
    pub(crate) enqueued_at: u64,
    pub(crate) fate: Fate,
    /// The broker refuses it for what it is.
    pub(crate) poison: bool,
    /// An operator gave it up.
    pub(crate) discarded: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Snapshot {
    pub(crate) xmin: u64,
    pub(crate) xmax: u64,
}

/// The row of a shard.
#[derive(Debug, Clone)]
pub(crate) struct Shard {
    pub(crate) buckets: std::ops::RangeInclusive<u8>,
    pub(crate) scanned_to: i64,
    pub(crate) gaps: GapSet,
    pub(crate) epoch: u64,
    pub(crate) revision: u64,
}

/// A row of the table of dead and held messages.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TableRow {
    pub(crate) message: usize,
    pub(crate) why: Diverted,
    pub(crate) redriven: bool,
}

#[derive(Debug)]
pub(crate) struct Postgres {
    pub(crate) clock: u64,
    next_xid: u64,
    latest_completed: u64,
    running: BTreeSet<u64>,
    sequence: i64,
    /// The sequence writes ahead what it will hand out, so many at a time.
    logged: i64,
    chunk: i64,
    flushed: (i64, u64),
    pub(crate) messages: Vec<Message>,
    rows: BTreeMap<i64, usize>,
    pub(crate) shards: Vec<Shard>,
    pub(crate) table: BTreeMap<i64, TableRow>,
    /// A commit, a crash or a mark happened since the invariant was checked last.
    pub(crate) changed: bool,
}

impl Postgres {
    pub(crate) fn new(chunk: i64) -> Self {
        let shard = Shard { buckets: 0..=u8::MAX, scanned_to: 0, gaps: GapSet::new(), epoch: 0, revision: 0 };
        Self {
            clock: 0,
            next_xid: 100,
            latest_completed: 99,
            running: BTreeSet::new(),
            sequence: 0,
            logged: 0,
            chunk,
            flushed: (0, 100),
            messages: Vec::new(),
            rows: BTreeMap::new(),
            shards: vec![shard],
            table: BTreeMap::new(),
            changed: false,
        }
    }

    pub(crate) fn assign_xid(&mut self) -> u64 {
        let xid = self.assign_sub_xid();
        self.running.insert(xid);
        xid
    }

    /// A subtransaction's id is above its parent's, so only the parent matters for `xmin`.
    pub(crate) fn assign_sub_xid(&mut self) -> u64 {
        self.next_xid += 1;
        self.next_xid - 1
    }

    pub(crate) fn complete(&mut self, xid: u64) {
        self.running.remove(&xid);
        self.latest_completed = self.latest_completed.max(xid);
    }

    pub(crate) fn is_running(&self, xid: u64) -> bool {
        self.running.contains(&xid)
    }

    pub(crate) fn draw(&mut self) -> i64 {
        self.sequence += 1;
        if self.sequence > self.logged {
            self.logged = self.sequence + self.chunk - 1;
        }
        self.sequence
    }

    pub(crate) fn insert(&mut self, message: Message) -> usize {
        let id = self.messages.len();
        let other = self.rows.insert(message.position, id);
        assert!(other.is_none(), "a position was drawn twice: {message:?}");
        self.messages.push(message);
        id
    }

    pub(crate) fn commit(&mut self, messages: &[usize]) {
        for &id in messages {
            self.messages[id].fate = Fate::Committed { at: self.clock, durable: false };
        }
        self.changed = true;
    }

    pub(crate) fn roll_back(&mut self, messages: &[usize]) {
        for &id in messages {
            self.messages[id].fate = Fate::Gone;
            self.rows.remove(&self.messages[id].position);
        }
    }

    /// What every synchronous commit does.
    pub(crate) fn flush(&mut self) {
        self.flushed = (self.logged, self.next_xid);
        for message in &mut self.messages {
            if let Fate::Committed { durable, .. } = &mut message.fate {
                *durable = true;
            }
        }
    }

    /// The server dies and comes back. `prepared` are the transactions that survive, with their
    /// messages. Gives the number of committed messages that are undone.
    pub(crate) fn crash(&mut self, prepared: &[(u64, &[usize])]) -> u64 {
        let kept: BTreeSet<usize> = prepared.iter().flat_map(|(_, ids)| ids.iter().copied()).collect();
        let undone: Vec<usize> = (0..self.messages.len())
            .filter(|id| match self.messages[*id].fate {
                Fate::Open => !kept.contains(id),
                Fate::Committed { durable, .. } => !durable,
                Fate::Gone => false,
            })
            .collect();
        let committed = |id: &&usize| matches!(self.messages[**id].fate, Fate::Committed { .. });
        let count = undone.iter().filter(committed).count();
        self.roll_back(&undone);
        (self.sequence, self.next_xid) = self.flushed;
        self.logged = self.sequence;
        self.running = prepared.iter().map(|&(xid, _)| xid).collect();
        self.latest_completed = self.next_xid - 1;
        self.changed = true;
        count as u64
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        let xmax = self.latest_completed + 1;
        let xmin = self.running.first().map_or(xmax, |&oldest| oldest.min(xmax));
        Snapshot { xmin, xmax }
    }

    /// The committed rows in these ranges, at most `limit`, in position order.
    pub(crate) fn select(&self, ranges: &[std::ops::Range<i64>], limit: usize) -> Vec<(i64, usize)> {
        let rows = ranges.iter().flat_map(|range| self.rows.range(range.clone()));
        let committed = rows.filter(|(_, id)| matches!(self.messages[**id].fate, Fate::Committed { .. }));
        committed.take(limit).map(|(&position, &id)| (position, id)).collect()
    }

    /// The lease: a synchronous transaction that raises the epoch. Gives its id.
    pub(crate) fn take_lease(&mut self, shard: usize) -> u64 {
        let xid = self.assign_xid();
        self.shards[shard].epoch += 1;
        self.complete(xid);
        self.flush();
        xid
    }

    /// Whether the row of this shard is still as its owner left it.
    pub(crate) fn is_owner(&self, shard: usize, epoch: u64, revision: u64) -> bool {
        self.shards.get(shard).is_some_and(|row| (row.epoch, row.revision) == (epoch, revision))
    }

    pub(crate) fn apply_mark(&mut self, shard: usize, mark: &Mark) {
        let row = &mut self.shards[shard];
        row.scanned_to = mark.scanned_to;
        row.gaps = mark.gaps.clone();
        self.changed = true;
    }
}
