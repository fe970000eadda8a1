//! One random history: writers, relays, operators, crashes; then everything heals and the relay
//! must come to an end.

use std::collections::BTreeSet;

use crate::outbox::rules::diversion::Diverted;
use crate::outbox::rules::gaps::GapSet;

use super::checks::{Kind, Violation};
use super::mutant::Mutant;
use super::postgres::Shard;
use super::relay::Process;
use super::world::{Stats, World};

/// No history needs more rounds to come to an end.
const DRAIN_ROUNDS: usize = 2_000;

pub(crate) struct History {
    seed: u64,
    world: World,
    processes: Vec<Process>,
    phase: Phase,
}

/// Told where a history ends in a panic.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("it is the history of seed {}", self.0);
        }
    }
}

/// Who acts how often for a while. A weight of 0 is a pause: a slow statement, a stopped process, a
/// quiet hour.
#[derive(Default)]
struct Phase {
    left: usize,
    writers: u32,
    broker: u8,
    relays: Vec<u32>,
    /// How many steps a relay makes at once.
    burst: usize,
}

impl Phase {
    /// Few act at a time, so that everybody is stopped between any two steps while others go far.
    fn random(random: &mut fastrand::Rng, processes: usize) -> Self {
        let relays: Vec<u32> = (0..processes).map(|_| u32::from(random.u8(0..2) == 0)).collect();
        let writers = u32::from(random.u8(0..2) == 0 || relays.iter().all(|&weight| weight == 0));
        Self { left: random.usize(1..40), burst: random.usize(1..=8), broker: random.u8(0..3), writers, relays }
    }
}

/// Runs the history of this seed: with everything random, or focused on where the rule of a mutant
/// matters; with all rules, or with the one of the mutant taken out.
pub(crate) fn run(seed: u64, focus: Option<Mutant>, mutant: Option<Mutant>) -> Result<Stats, Violation> {
    History::new(seed, focus, mutant, false).run()
}

/// Runs it again and gives its events.
pub(crate) fn trace(seed: u64, focus: Option<Mutant>, mutant: Option<Mutant>) -> String {
    let mut history = History::new(seed, focus, mutant, true);
    let settings = format!("{:?}", history.world.settings);
    let end = history.play().err().map_or_else(|| "no violation".to_owned(), |violation| format!("{violation:?}"));
    let events = history.world.trace.unwrap_or_default().join("\n");
    format!("seed {seed}\n{settings}\n{events}\n{end}")
}

impl History {
    fn new(seed: u64, focus: Option<Mutant>, mutant: Option<Mutant>, traced: bool) -> Self {
        let world = World::new(seed, focus, mutant, traced);
        let processes = (0..world.settings.processes).map(|_| Process::default()).collect();
        Self { seed, world, processes, phase: Phase::default() }
    }

    fn run(mut self) -> Result<Stats, Violation> {
        let _told = Seed(self.seed);
        self.play()?;
        let stats = &mut self.world.stats;
        stats.messages = self.world.pg.messages.len() as u64;
        stats.landed = self.world.broker.first_occurrences().len() as u64;
        stats.duplicates = self.world.broker.duplicates;
        stats.ghosts_landed = self.world.broker.ghosts_landed;
        Ok(stats.clone())
    }

    fn play(&mut self) -> Result<(), Violation> {
        for _ in 0..self.world.settings.steps {
            self.world.pg.clock += 1;
            self.step();
            self.world.check_invariant()?;
        }
        self.world.check_log()?;
        self.heal();
        self.drain()?;
        self.world.check_log()?;
        self.world.check_nothing_lost()
    }

    /// One action of a writer, a relay, the broker, an operator, or fate.
    fn step(&mut self) {
        if self.phase.left == 0 {
            self.phase = Phase::random(&mut self.world.random, self.processes.len());
        }
        self.phase.left -= 1;
        let random = &mut self.world.random;
        if random.u32(0..1_000) < self.world.settings.server_crashes {
            return self.crash_server();
        }
        if random.u8(0..32) == 0 {
            return self.fate();
        }
        if random.u8(0..2) < self.phase.broker {
            for _ in 0..random.usize(0..4) {
                self.world.broker.land(random);
            }
        }
        let mut actor = random.u32(0..self.phase.writers + self.phase.relays.iter().sum::<u32>());
        if actor < self.phase.writers {
            return self.world.writer_step();
        }
        actor -= self.phase.writers;
        for index in 0..self.processes.len() {
            let weight = self.phase.relays[index];
            if actor < weight {
                return self.relay_step(index);
            }
            actor -= weight;
        }
    }

    fn fate(&mut self) {
        match self.world.random.u8(0..8) {
            0 => {
                let world = &mut self.world;
                world.broker.vanish(&mut world.random);
            }
            1 if self.world.settings.blocked => self.block_or_open(),
            2..=3 => self.operate(),
            4..=7 if self.world.settings.splits => self.split_or_join(),
            _ => {}
        }
    }

    fn relay_step(&mut self, index: usize) {
        // Where there are more shards than processes, they take turns.
        let shards = self.world.pg.shards.len();
        let turn = if self.processes.len() < shards { self.world.pg.clock as usize / 100 } else { 0 };
        let shard = (index + turn) % shards;
        if self.processes[index].shard != shard {
            self.processes[index].end(&mut self.world, "another shard");
            self.processes[index].shard = shard;
        }
        if self.processes[index].session.is_none() {
            // The lease of an owner that makes no steps runs out; another one is stolen seldom.
            let others = self.processes.iter().zip(&self.phase.relays).enumerate();
            let owners = others
                .filter(|(other, (process, _))| *other != index && process.shard == shard && process.session.is_some());
            let patience = owners.map(|(_, (_, &weight))| if weight == 0 { 30 } else { 200 }).max();
            if patience.is_some_and(|patience| !self.world.one_in(patience)) {
                return;
            }
        }
        for _ in 0..self.phase.burst {
            self.processes[index].step(&mut self.world);
            if self.processes[index].session.is_none() {
                break;
            }
        }
    }

    fn block_or_open(&mut self) {
        let topic = if self.world.random.bool() { "orders" } else { "payments" };
        if !self.world.broker.blocked.remove(topic) {
            self.world.broker.blocked.insert(topic);
        }
    }

    /// An operator mends and redrives a dead message, or discards it.
    fn operate(&mut self) {
        let dead = self.world.pg.table.iter().filter(|(_, row)| row.why == Diverted::Dead);
        let Some(position) = self.world.random.choice(dead.map(|(&position, _)| position).collect::<Vec<_>>()) else {
            return;
        };
        if self.world.random.bool() {
            self.redrive(position);
        } else if let Some(row) = self.world.pg.table.remove(&position) {
            self.world.pg.messages[row.message].discarded = true;
            self.world.note(|| format!("row {position} discarded"));
        }
    }

    fn redrive(&mut self, position: i64) {
        if let Some(row) = self.world.pg.table.get_mut(&position) {
            row.redriven = true;
            self.world.pg.messages[row.message].poison = false;
            self.world.note(|| format!("row {position} redriven"));
        }
    }

    /// R18: a shard is split by copying its row, and joined when both have scanned to the same
    /// place.
    fn split_or_join(&mut self) {
        let epoch = self.world.pg.shards.iter().map(|shard| shard.epoch).max().unwrap_or(0) + 1;
        if let [one, other] = self.world.pg.shards.as_slice() {
            if !self.world.merging {
                self.world.merging = true;
                return;
            }
            let same = one.scanned_to == other.scanned_to;
            let joined = same.then(|| one.gaps.iter().chain(other.gaps.iter()).collect::<GapSet>());
            let positions = |gaps: &GapSet| gaps.iter().flat_map(|range| range.from..range.to).collect::<BTreeSet<_>>();
            let both = || &positions(&one.gaps) & &positions(&other.gaps);
            let intersection = || both().into_iter().map(crate::outbox::rules::gaps::Range::one).collect::<GapSet>();
            let mutated = self.world.mutant == Some(Mutant::JoinByIntersection);
            let Some(gaps) = joined.map(|union| if mutated { intersection() } else { union }) else {
                return;
            };
            let (scanned_to, buckets) = (one.scanned_to, 0..=u8::MAX);
            self.world.pg.shards = vec![Shard { buckets, scanned_to, gaps, epoch, revision: 0 }];
            self.world.merging = false;
            self.world.stats.joins += 1;
        } else {
            let mut high = self.world.pg.shards[0].clone();
            let at = self.world.random.u8(10..22);
            high.epoch = epoch;
            let mut low = high.clone();
            (low.buckets, high.buckets) = (0..=at, at + 1..=u8::MAX);
            self.world.pg.shards = vec![low, high];
            self.world.stats.splits += 1;
        }
        self.world.pg.changed = true;
        let shards = self.world.pg.shards.len();
        self.world.note(|| format!("{shards} shards"));
    }

    fn crash_server(&mut self) {
        for process in &mut self.processes {
            process.end(&mut self.world, "the server crashed");
        }
        self.world.crash_server();
        self.world.note(|| "the server crashed".to_owned());
    }

    /// Every fault ends, every transaction too.
    fn heal(&mut self) {
        self.world.note(|| "everything heals".to_owned());
        while !self.world.writers.is_empty() {
            self.world.pg.clock += 1;
            self.world.end_writer(0);
        }
        self.world.broker.blocked.clear();
        self.world.settings.session_ends = 0;
        self.world.settings.slow = 0;
        for message in &mut self.world.pg.messages {
            message.poison = false;
        }
        for process in &mut self.processes {
            process.end(&mut self.world, "the last fault");
        }
        self.world.merging = false;
    }

    /// One relay for each shard goes on until nothing is left.
    fn drain(&mut self) -> Result<(), Violation> {
        for shard in 0..self.world.pg.shards.len() {
            let mut process = Process::of(shard);
            process.start(&mut self.world);
            // Every round is a whole read; the last ones must find nothing.
            let (mut rounds, mut idle) = (0, 0);
            while idle < 3 {
                idle = if process.is_idle() { idle + 1 } else { 0 };
                rounds += 1;
                self.world.pg.clock += 1;
                let dead: Vec<i64> = self.world.pg.table.keys().copied().collect();
                for position in dead {
                    self.redrive(position);
                }
                let world = &mut self.world;
                while world.broker.land(&mut world.random) {}
                for _ in 0..3 {
                    process.advance_read(world);
                }
                process.release(world);
                process.advance_write(world);
                while process.send(world) {}
                process.take_proofs(world);
                world.check_invariant()?;
                if rounds > DRAIN_ROUNDS {
                    world.check_nothing_lost()?;
                    return Err(Violation { kind: Kind::Stuck, what: format!("{process:?}") });
                }
            }
        }
        Ok(())
    }
}
