//! Everything that outlives a relay's session, and what a history is made of.

use super::broker::Broker;
use super::mutant::Mutant;
use super::postgres::Postgres;
use super::writers::Writer;

/// What may happen in one history, and how often.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) steps: usize,
    pub(crate) writers_max: usize,
    pub(crate) messages_max: usize,
    pub(crate) topics: usize,
    pub(crate) keys: usize,
    /// Some transactions stay open for long. A long one hides what a short one shows (R3).
    pub(crate) long_writers: bool,
    /// Writers of a key take its row lock before they enqueue.
    pub(crate) serialised: bool,
    pub(crate) savepoints: bool,
    pub(crate) prepared: bool,
    pub(crate) asynchronous: bool,
    /// How often the server crashes, in a thousand actions.
    pub(crate) server_crashes: u32,
    pub(crate) poison: bool,
    pub(crate) blocked: bool,
    pub(crate) splits: bool,
    pub(crate) lock_watch: bool,
    /// How often a statement of the relay takes long: 0 never, else one in so many.
    pub(crate) slow: u32,
    /// How often sessions end for no reason, in a thousand steps.
    pub(crate) session_ends: u32,
    pub(crate) processes: usize,
    /// The LIMIT of a read.
    pub(crate) rows: usize,
    pub(crate) ranges_max: usize,
    /// How many positions the sequence logs ahead.
    pub(crate) chunk: i64,
}

/// What happened in it: a test that never meets a case proves nothing about it.
#[derive(Debug, Default, Clone)]
pub(crate) struct Stats {
    pub(crate) messages: u64,
    pub(crate) landed: u64,
    pub(crate) duplicates: u64,
    pub(crate) ghosts_landed: u64,
    pub(crate) rolled_back: u64,
    pub(crate) undone_by_crash: u64,
    pub(crate) server_crashes: u64,
    pub(crate) sessions: u64,
    pub(crate) sessions_ended: u64,
    pub(crate) fenced_out: u64,
    pub(crate) gap_rows: u64,
    pub(crate) closed: u64,
    pub(crate) closed_by_locks: u64,
    pub(crate) reads_at_cap: u64,
    pub(crate) marks: u64,
    pub(crate) marks_of_several: u64,
    pub(crate) idle_marks: u64,
    pub(crate) dead: u64,
    pub(crate) held: u64,
    pub(crate) released: u64,
    pub(crate) splits: u64,
    pub(crate) joins: u64,
}

pub(crate) struct World {
    pub(crate) random: fastrand::Rng,
    pub(crate) settings: Settings,
    pub(crate) mutant: Option<Mutant>,
    pub(crate) pg: Postgres,
    pub(crate) broker: Broker,
    pub(crate) writers: Vec<Writer>,
    pub(crate) next_backend: u64,
    pub(crate) last_writer: usize,
    /// Shards are being merged: the leading one pauses, the other reads up to it.
    pub(crate) merging: bool,
    pub(crate) stats: Stats,
    /// The events, kept only when a failed history is run again.
    pub(crate) trace: Option<Vec<String>>,
}

impl World {
    pub(crate) fn new(seed: u64, focus: Option<Mutant>, mutant: Option<Mutant>, traced: bool) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut settings = Settings::random(&mut random);
        if let Some(focus) = focus {
            focus.focus(&mut settings);
        }
        Self {
            pg: Postgres::new(settings.chunk),
            random,
            settings,
            mutant,
            broker: Broker::default(),
            writers: Vec::new(),
            next_backend: 0,
            last_writer: 0,
            merging: false,
            stats: Stats::default(),
            trace: traced.then(Vec::new),
        }
    }

    pub(crate) fn note(&mut self, event: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            trace.push(format!("{:4} {}", self.pg.clock, event()));
        }
    }

    /// One time in `n`.
    pub(crate) fn one_in(&mut self, n: u32) -> bool {
        self.random.u32(0..n) == 0
    }
}
