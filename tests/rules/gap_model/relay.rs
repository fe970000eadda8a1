//! A simulated relay: sessions over one shard, whose every step can be the last.
//!
//! It has the real cursor and the real diversion; the rest is a model of `outbox::relay`. Each
//! statement and each answer is a step of its own, so that anything can happen between them, and an
//! answer can be lost. Simpler than the real one: a key stays diverted until its last held row has
//! left the table, and operators change the table themselves.

use std::collections::{BTreeMap, VecDeque};

use crate::outbox::rules::diversion::{Diversion, Diverted, DivertedRow};
use crate::outbox::rules::gaps::{Mark, ReadPlan};

use super::cursors::{Cursor, Ticket};
use super::mutant::Mutant;
use super::postgres::{Message, Snapshot, TableRow};
use super::world::World;

const WINDOW: usize = 6;
const STALE_AGE: u64 = 4;

/// A process: what it found out about rows outlives its sessions.
#[derive(Debug, Default)]
pub(crate) struct Process {
    pub(crate) shard: usize,
    pub(crate) session: Option<Session>,
    /// Rows that ended a session, and why (R16). Good as long as no other process owned the shard
    /// since.
    verdicts: BTreeMap<i64, Diverted>,
    last_epoch: u64,
}

#[derive(Debug)]
pub(crate) struct Session {
    epoch: u64,
    revision: u64,
    pub(crate) cursor: Cursor,
    diversion: Diversion,
    connection: usize,
    tokens: u64,
    batches: VecDeque<Batch>,
    read: Read,
    write: Option<Write>,
    listed: Option<Vec<u64>>,
    /// Nothing is heard of the read, the write, or the list of holders until then: a slow
    /// statement, a slow answer.
    ready_at: [u64; 3],
}

const READ: usize = 0;
const WRITE: usize = 1;
const LIST: usize = 2;

impl Session {
    /// Whether the next stage of a statement has come; now and then it takes long.
    fn is_ready(&mut self, what: usize, world: &mut World) -> bool {
        if world.pg.clock < self.ready_at[what] {
            return false;
        }
        if world.settings.slow > 0 && world.one_in(world.settings.slow) {
            self.ready_at[what] = world.pg.clock + world.random.u64(1..60);
            return false;
        }
        true
    }
}

/// Rows that were read, or are released, together.
#[derive(Debug)]
struct Batch {
    /// Its number at the cursor; none for held rows on their way back.
    number: Option<u64>,
    rows: Vec<Row>,
}

#[derive(Debug)]
struct Row {
    position: i64,
    message: usize,
    diverted: Option<Diverted>,
    token: Option<u64>,
    proven: bool,
}

#[derive(Debug)]
enum Read {
    None,
    Planned(ReadPlan),
    /// R4 taken out: the statement over the gaps has returned, the one over the tail has not begun.
    GapsOnly(ReadPlan, Answer),
    Answered(Answer),
}

#[derive(Debug)]
struct Answer {
    snapshot: Snapshot,
    rows: Vec<(i64, usize)>,
    limit_reached: bool,
}

/// A fenced transaction of the relay's own: a checkpoint, a mark, or both.
#[derive(Debug)]
struct Write {
    xid: u64,
    checkpoint: Option<Ticket>,
    /// How many batches it marks, and what it persists for the last that has a number.
    marks: Option<(usize, Option<Mark>)>,
    /// It has committed, and its answer is on the way.
    committed: bool,
}

impl Batch {
    fn is_settled(&self) -> bool {
        self.rows.iter().all(|row| row.proven || row.diverted.is_some())
    }
}

impl Row {
    fn diverted_as(&self, message: &Message, why: Diverted) -> DivertedRow {
        let (topic, key) = (message.topic.to_owned(), message.key.map(str::to_owned));
        DivertedRow { position: self.position, topic, key, why }
    }
}

impl Process {
    pub(crate) fn of(shard: usize) -> Self {
        Self { shard, ..Self::default() }
    }

    /// One step. Says whether it did anything.
    pub(crate) fn step(&mut self, world: &mut World) -> bool {
        if self.session.is_none() {
            return self.start(world);
        }
        if world.random.u32(0..1_000) < world.settings.session_ends {
            self.end(world, "crash or reset");
            return true;
        }
        // Of what can be done, something.
        (0..8).any(|_| match world.random.u8(0..8) {
            0..=2 => self.advance_read(world),
            3 => self.advance_write(world),
            4 => self.send(world),
            5 => self.take_proofs(world),
            6 => world.settings.lock_watch && self.watch_locks(world),
            _ => self.release(world),
        })
    }

    pub(crate) fn start(&mut self, world: &mut World) -> bool {
        let fence = world.pg.take_lease(self.shard);
        let row = world.pg.shards[self.shard].clone();
        if row.epoch != self.last_epoch + 1 {
            self.verdicts.clear();
        }
        self.last_epoch = row.epoch;
        let ours = |table_row: &TableRow| row.buckets.contains(&world.pg.messages[table_row.message].bucket);
        let table = world.pg.table.iter().filter(|(_, table_row)| ours(table_row));
        let diversion = Diversion::load(table.map(|(&position, table_row)| {
            let message = &world.pg.messages[table_row.message];
            let (topic, key) = (message.topic.to_owned(), message.key.map(str::to_owned));
            DivertedRow { position, topic, key, why: table_row.why }
        }));
        self.session = Some(Session {
            epoch: row.epoch,
            revision: row.revision,
            cursor: Cursor::start(&row, fence, world.settings.ranges_max, world.mutant),
            diversion,
            connection: world.broker.connect(),
            tokens: 0,
            batches: VecDeque::new(),
            read: Read::None,
            write: None,
            listed: None,
            ready_at: [0; 3],
        });
        world.stats.sessions += 1;
        let shard = self.shard;
        world.note(|| format!("lease of shard {shard}, fence {fence}, from {} {}", row.scanned_to, row.gaps));
        true
    }

    /// Memory is forgotten; what is in flight becomes a ghost.
    pub(crate) fn end(&mut self, world: &mut World, why: &str) {
        let Some(session) = self.session.take() else {
            return;
        };
        world.broker.drop_connection(session.connection);
        if let Some(write) = session.write.filter(|write| !write.committed) {
            world.pg.complete(write.xid);
        }
        world.stats.sessions_ended += 1;
        world.note(|| format!("session of epoch {} ends: {why}", session.epoch));
    }

    fn owns(&self, world: &World) -> bool {
        self.session.as_ref().is_some_and(|session| world.pg.is_owner(self.shard, session.epoch, session.revision))
    }

    /// Begins a read, lets the server run it, or takes its answer.
    pub(crate) fn advance_read(&mut self, world: &mut World) -> bool {
        self.sync_diversion(world);
        let shard = self.shard;
        let Some(session) = &mut self.session else {
            return false;
        };
        if !session.is_ready(READ, world) {
            return false;
        }
        session.read = match std::mem::replace(&mut session.read, Read::None) {
            Read::None if session.batches.len() >= WINDOW => return false,
            Read::None => Read::Planned(session.cursor.begin_read()),
            Read::Planned(plan) => {
                let apart = world.mutant == Some(Mutant::RecheckApart);
                let limit = session.cursor.row_limit(world.settings.rows);
                let tail = if apart { None } else { plan.tail_from };
                let answer = world.select(shard, &plan, tail, limit);
                if apart { Read::GapsOnly(plan, answer) } else { Read::Answered(answer) }
            }
            Read::GapsOnly(plan, mut gaps) => {
                let limit = session.cursor.row_limit(world.settings.rows).saturating_sub(gaps.rows.len());
                if !gaps.limit_reached {
                    let gapless = ReadPlan { ranges: Vec::new(), ..plan };
                    let tail = world.select(shard, &gapless, gapless.tail_from, limit);
                    gaps.rows.extend(tail.rows);
                    gaps.limit_reached = tail.limit_reached;
                }
                Read::Answered(gaps)
            }
            Read::Answered(answer) => {
                self.take_answer(world, answer);
                return true;
            }
        };
        true
    }

    fn take_answer(&mut self, world: &mut World, answer: Answer) {
        let Some(session) = &mut self.session else {
            return;
        };
        let positions: Vec<i64> = answer.rows.iter().map(|&(position, _)| position).collect();
        let read_before = session.cursor.open();
        let was_gap = |position: &i64| read_before.iter().any(|gap| (gap.from..gap.to).contains(position));
        let buckets = world.pg.shards[self.shard].buckets.clone();
        let mut ours = answer.rows.iter().filter(|(_, id)| buckets.contains(&world.pg.messages[*id].bucket));
        let passes = session.write.is_none() && ours.next().is_none();
        let outcome = session.cursor.on_read(answer.snapshot, &positions, answer.limit_reached, passes);
        world.stats.gap_rows += positions.iter().filter(|&position| was_gap(position)).count() as u64;
        world.stats.closed += outcome.closed.iter().map(|range| range.to.abs_diff(range.from)).sum::<u64>();
        world.note(|| format!("read {positions:?} at {:?}, closed {}", answer.snapshot, outcome.closed));
        if outcome.batch.is_none() {
            return;
        }
        if session.batches.iter().any(|batch| batch.number == outcome.batch) {
            return;
        }
        let mut rows = Vec::new();
        for (position, id) in answer.rows {
            let message = &world.pg.messages[id];
            if !buckets.contains(&message.bucket) {
                continue;
            }
            let mut row = Row { position, message: id, diverted: None, token: None, proven: false };
            if let Some(standing) = session.diversion.get(position) {
                // Read again below a position once marked: what was decided stays (R18).
                row.diverted = Some(standing.why);
                rows.push(row);
                continue;
            }
            if message.discarded {
                continue;
            }
            let decided = session.diversion.decide(message.topic, message.key);
            row.diverted = decided.or_else(|| self.verdicts.get(&position).copied());
            if let Some(why) = row.diverted
                && world.mutant != Some(Mutant::DivertByTableOnly)
            {
                session.diversion.divert(row.diverted_as(message, why));
            }
            rows.push(row);
        }
        session.batches.push_back(Batch { number: outcome.batch, rows });
    }

    /// Begins a checkpoint, a mark, or both in one transaction.
    pub(crate) fn begin_write(&mut self, world: &mut World) -> bool {
        let Some(session) = &mut self.session else {
            return false;
        };
        if session.write.is_some() {
            return false;
        }
        let settled = if world.mutant == Some(Mutant::MarkAnyProven) {
            session.batches.iter().rposition(Batch::is_settled).map_or(0, |index| index + 1)
        } else {
            session.batches.iter().take_while(|batch| batch.is_settled()).count()
        };
        let count = if settled > 0 { world.random.usize(0..=settled) } else { 0 };
        let through = session.batches.iter().take(count).filter_map(|batch| batch.number).next_back();
        let mark = through.and_then(|number| session.cursor.mark_through(number));
        let idle = if session.batches.is_empty() { session.cursor.mark_idle() } else { None };
        world.stats.idle_marks += u64::from(idle.is_some());
        let marks = (count > 0 || idle.is_some()).then(|| (count, mark.or(idle)));
        let checkpoint = session.cursor.needs_checkpoint().then(|| session.cursor.begin_checkpoint());
        if checkpoint.is_none() && marks.is_none() {
            return false;
        }
        session.write = Some(Write { xid: world.pg.assign_xid(), checkpoint, marks, committed: false });
        true
    }

    /// Commits what was begun, or takes the answer.
    pub(crate) fn advance_write(&mut self, world: &mut World) -> bool {
        let owns = self.owns(world);
        let shard = self.shard;
        let Some(session) = &mut self.session else {
            return false;
        };
        if session.write.is_none() {
            return self.begin_write(world);
        }
        if !session.is_ready(WRITE, world) {
            return false;
        }
        let Some(mut write) = session.write.take() else {
            return false;
        };
        if !write.committed {
            if !owns {
                session.write = Some(write);
                world.stats.fenced_out += 1;
                self.end(world, "fenced out");
                return true;
            }
            world.pg.shards[shard].revision += 1;
            if let Some((count, mark)) = &write.marks {
                for row in session.batches.iter().take(*count).flat_map(|batch| batch.rows.iter()) {
                    world.settle_in_table(row);
                }
                if let Some(mark) = mark {
                    world.pg.apply_mark(shard, mark);
                    world.stats.marks += 1;
                    world.stats.marks_of_several += u64::from(*count > 1);
                }
            }
            if world.mutant == Some(Mutant::PersistMemoryAtCheckpoint) && write.checkpoint.is_some() {
                let row = &mut world.pg.shards[shard];
                row.gaps = session.cursor.open().cut_at(row.scanned_to);
                world.pg.changed = true;
            }
            world.pg.complete(write.xid);
            world.pg.flush();
            world.note(|| format!("commit {write:?}"));
            write.committed = true;
            session.write = Some(write);
            return true;
        }
        session.revision += 1;
        if let Some(ticket) = write.checkpoint {
            session.cursor.on_checkpoint(ticket, write.xid, world.pg.clock);
        }
        if let Some((count, mark)) = write.marks {
            for batch in session.batches.drain(..count) {
                for row in batch.rows {
                    let message = &world.pg.messages[row.message];
                    match row.diverted {
                        Some(why) if world.mutant == Some(Mutant::DivertByTableOnly) => {
                            session.diversion.divert(row.diverted_as(message, why));
                        }
                        Some(_) => {
                            self.verdicts.remove(&row.position);
                        }
                        None if batch.number.is_none() => {
                            session.diversion.leave(row.position);
                        }
                        None => {}
                    }
                }
            }
            if let Some(mark) = mark {
                session.cursor.on_marked(&mark);
            }
        }
        true
    }

    /// Sends the next row, in the order of the window.
    pub(crate) fn send(&mut self, world: &mut World) -> bool {
        let Some(session) = &mut self.session else {
            return false;
        };
        let goes = |row: &Row| row.token.is_none() && row.diverted.is_none();
        let Some(batch) = session.batches.iter_mut().find(|batch| batch.rows.iter().any(goes)) else {
            return false;
        };
        let early = world.mutant == Some(Mutant::SendBeforeCheckpoint);
        if batch.number.is_some_and(|number| !early && !session.cursor.may_send(number)) {
            return false;
        }
        let Some(row) = batch.rows.iter_mut().find(|row| goes(row)) else {
            return false;
        };
        let message = &world.pg.messages[row.message];
        let (topic, key) = (message.topic, message.key);
        let refused = if message.poison {
            Some(Diverted::Dead)
        } else {
            world.broker.blocked.contains(topic).then_some(Diverted::Destination)
        };
        if let Some(why) = refused {
            let position = row.position;
            world.note(|| format!("row {position} refused: {why:?}"));
            if world.mutant == Some(Mutant::SkipAndGoOn) && batch.number.is_some() {
                row.diverted = Some(why);
                return true;
            }
            self.verdicts.insert(position, why);
            self.end(world, "refused");
            return true;
        }
        session.tokens += 1;
        row.token = Some(session.tokens);
        let (position, id) = (row.position, row.message);
        world.broker.send(session.connection, topic, key, (session.tokens, id));
        world.note(|| format!("sent row {position}, message {id} of {topic} {key:?}"));
        true
    }

    pub(crate) fn take_proofs(&mut self, world: &mut World) -> bool {
        let Some(session) = &mut self.session else {
            return false;
        };
        let confirmed = world.broker.take_confirmed(session.connection, &mut world.random);
        let rows = session.batches.iter_mut().flat_map(|batch| batch.rows.iter_mut());
        for row in rows.filter(|row| row.token.is_some_and(|token| confirmed.contains(&token))) {
            row.proven = true;
        }
        !confirmed.is_empty()
    }

    /// What operators did to the table is seen between two reads (R17).
    fn sync_diversion(&mut self, world: &World) {
        let Some(session) = &mut self.session else {
            return;
        };
        if !matches!(session.read, Read::None) {
            return;
        }
        let in_window = |position: i64| {
            let mut rows = session.batches.iter().flat_map(|batch| batch.rows.iter());
            rows.any(|row| row.position == position)
        };
        let known: Vec<DivertedRow> = session.diversion.rows().cloned().collect();
        for row in known {
            match world.pg.table.get(&row.position) {
                None if !in_window(row.position) => {
                    session.diversion.leave(row.position);
                }
                Some(table_row) if table_row.redriven && row.why == Diverted::Dead => {
                    session.diversion.divert(DivertedRow { why: Diverted::BehindDead, ..row });
                }
                _ => {}
            }
        }
    }

    /// Held rows go back, between two reads.
    pub(crate) fn release(&mut self, world: &mut World) -> bool {
        self.sync_diversion(world);
        let owns = self.owns(world);
        let Some(session) = &mut self.session else {
            return false;
        };
        let between_reads = matches!(session.read, Read::None);
        if session.batches.len() >= WINDOW || session.write.is_some() || !owns || !between_reads {
            return false;
        }
        let mut rows = Vec::new();
        let waiting = session.diversion.releasable(|topic| !world.broker.blocked.iter().any(|&name| name == topic));
        let sent = |position: i64| {
            let mut returning = session.batches.iter().filter(|batch| batch.number.is_none());
            returning.any(|batch| batch.rows.iter().any(|row| row.position == position))
        };
        let mut refused = None;
        for held in waiting.filter(|row| !sent(row.position)) {
            let Some(table_row) = world.pg.table.get_mut(&held.position) else {
                continue;
            };
            if let Some(why) = self.verdicts.remove(&held.position) {
                table_row.why = why;
                table_row.redriven = false;
                refused = Some(DivertedRow { why, ..held.clone() });
                break;
            }
            let (position, message) = (held.position, table_row.message);
            rows.push(Row { position, message, diverted: None, token: None, proven: false });
            if rows.len() >= world.settings.rows {
                break;
            }
        }
        if let Some(row) = refused {
            session.diversion.divert(row);
        }
        if rows.is_empty() {
            return false;
        }
        world.stats.released += rows.len() as u64;
        world.note(|| format!("release {rows:?}"));
        session.batches.push_back(Batch { number: None, rows });
        true
    }

    /// The early close of R6: list the holders, then look whether they are gone.
    fn watch_locks(&mut self, world: &mut World) -> bool {
        let Some(session) = &mut self.session else {
            return false;
        };
        if !session.is_ready(LIST, world) {
            return false;
        }
        if let Some(listed) = session.listed.take() {
            session.cursor.on_lock_holders(listed);
        } else if let Some(watched) = session.cursor.lock_watch() {
            let still = world.still_holding(&watched);
            world.stats.closed_by_locks += u64::from(still.is_empty());
            session.cursor.on_still_holding(&still);
        } else if session.cursor.begin_lock_watch(world.pg.clock, STALE_AGE) > 0 {
            session.listed = Some(world.lock_holders());
        } else {
            return false;
        }
        true
    }

    /// Whether nothing is left to do.
    pub(crate) fn is_idle(&self) -> bool {
        self.session.as_ref().is_some_and(|session| {
            let nothing_open = session.cursor.open().last().is_none() && session.cursor.mark_idle().is_none();
            session.batches.is_empty() && session.write.is_none() && session.diversion.is_empty() && nothing_open
        })
    }
}

impl World {
    /// The read of R2.2, in one snapshot.
    fn select(&mut self, shard: usize, plan: &ReadPlan, tail: Option<i64>, limit: usize) -> Answer {
        let mut ranges: Vec<std::ops::Range<i64>> = plan.ranges.iter().map(|range| range.from..range.to).collect();
        self.stats.reads_at_cap += u64::from(plan.tail_from.is_none());
        if let Some(from) = tail {
            let end = self.tail_end(shard);
            if from < end {
                ranges.push(from..end);
            }
        }
        let rows = self.pg.select(&ranges, limit);
        let limit_reached = rows.len() == limit;
        Answer { snapshot: self.pg.snapshot(), rows, limit_reached }
    }

    /// While shards are merged, the leading one reads no tail and the other no further than it
    /// (R18).
    fn tail_end(&self, shard: usize) -> i64 {
        let others = self.pg.shards.iter().enumerate().filter(|&(index, _)| index != shard);
        match others.map(|(_, other)| other.scanned_to).next() {
            Some(other) if self.merging => other + 1,
            _ => i64::MAX,
        }
    }

    /// In the marking transaction: a diverted row enters the table, a released one leaves it.
    fn settle_in_table(&mut self, row: &Row) {
        let Some(why) = row.diverted else {
            self.pg.table.remove(&row.position);
            return;
        };
        match why {
            Diverted::Dead => self.stats.dead += 1,
            Diverted::BehindDead | Diverted::Destination => self.stats.held += 1,
        }
        let table_row = TableRow { message: row.message, why, redriven: false };
        self.pg.table.entry(row.position).or_insert(table_row);
    }
}
