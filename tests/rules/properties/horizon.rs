//! An inbox that forgets: whatever is purged, and whenever its duplicate comes, it is never called
//! new (R31, G8).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::inbox::rules::horizon::{Age, Bounds, Verdict, judge, purge_bound, purge_row};
use crate::time::db_time::DbTime;
use proptest::prelude::*;
use proptest::sample::Index;

#[derive(Debug, Clone)]
enum Step {
    /// Database time goes on.
    Clock(u64),
    /// A message is enqueued, its time so far from now; the row of its receipt comes so much later
    /// than the clock was asked.
    New { of: Kind, off: i64, late: u64 },
    /// One that was enqueued is delivered: for the first time, or again.
    Deliver { which: Index, late: u64 },
    /// A purge, which may end in the middle.
    Purge { steps: usize },
    /// An operator has one that is too old handled: it has a row from then on.
    Redrive(Index),
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    Timed,
    Stated,
}

fn step() -> impl Strategy<Value = Step> {
    let kind = prop_oneof![Just(Kind::Timed), Just(Kind::Stated)];
    // Up to beyond the skew to both sides.
    let new = (kind, -30_000_000_i64..3_000_000, 0_u64..2_000).prop_map(|(of, off, late)| Step::New { of, off, late });
    prop_oneof![
        4 => (1_u64..4_000_000).prop_map(Step::Clock),
        4 => new,
        6 => (any::<Index>(), 0_u64..2_000).prop_map(|(which, late)| Step::Deliver { which, late }),
        3 => (0_usize..40).prop_map(|steps| Step::Purge { steps }),
        1 => any::<Index>().prop_map(Step::Redrive),
    ]
}

/// The time of a message, or the reason why it has one.
fn age(kind: Kind, time: DbTime) -> Age {
    match kind {
        // Ids have whole milliseconds.
        Kind::Timed => Age::InId(DbTime::from_millis(time.millis())),
        Kind::Stated => Age::Stated(time),
    }
}

struct Inbox {
    now: DbTime,
    horizon: Duration,
    skew: Duration,
    messages: Vec<Age>,
    /// Message and time of receipt.
    rows: BTreeMap<usize, DbTime>,
    purged_below: Option<DbTime>,
    handled: BTreeSet<usize>,
    too_old: BTreeSet<usize>,
}

impl Inbox {
    /// The runtime inserts the row, and reads after it what the verdict needs. Here both are one
    /// step: no purge comes between. `late` is how much later the row was received than the clock
    /// of the verdict was read.
    fn deliver(&mut self, message: usize, late: u64) {
        if self.rows.contains_key(&message) {
            return;
        }
        let received = self.now.after(Duration::from_micros(late));
        let bounds = Bounds { purged_below: self.purged_below, now: self.now, id_skew: self.skew };
        match judge(self.messages[message], bounds) {
            Verdict::GoOn => {
                assert!(self.handled.insert(message), "{:?} ran twice: {bounds:?}", self.messages[message]);
                self.rows.insert(message, received);
            }
            Verdict::TooOld => {
                assert!(self.purged_below.is_some(), "nothing is too old before the first purge");
                self.too_old.insert(message);
            }
            Verdict::FromTheFuture => {}
        }
        self.now = received;
    }

    fn purge(&mut self, steps: usize) {
        let below = purge_bound(self.horizon, self.now);
        for (message, received) in self.rows.clone().into_iter().take(steps) {
            let in_id = match self.messages[message] {
                Age::InId(time) => Some(time),
                _ => None,
            };
            if let Some(bound) = purge_row(in_id, received, below) {
                assert!(bound <= below, "a bound is never beyond the horizon");
                self.purged_below = self.purged_below.max(Some(bound));
                self.rows.remove(&message);
            }
        }
    }
}

proptest! {
    #![proptest_config(super::cases(1_500))]

    /// Shown by: a stated time that was believed without the skew; a purge that judged timed ids by
    /// their receipt alone; a bound that was the row's own time and not above it.
    #[test]
    fn g8_what_was_purged_is_never_called_new(
        horizon in 1_u64..20_000_000,
        skew in 0_u64..2_000_000,
        steps in prop::collection::vec(step(), 0..150),
    ) {
        let mut inbox = Inbox {
            now: DbTime { micros: 1_000_000_000_000_123 },
            horizon: Duration::from_micros(horizon),
            skew: Duration::from_micros(skew),
            messages: Vec::new(),
            rows: BTreeMap::new(),
            purged_below: None,
            handled: BTreeSet::new(),
            too_old: BTreeSet::new(),
        };
        for step in steps {
            let picked = |which: Index| (!inbox.messages.is_empty()).then(|| which.index(inbox.messages.len()));
            match step {
                Step::Clock(micros) => inbox.now = inbox.now.after(Duration::from_micros(micros)),
                Step::New { of, off, late } => {
                    let time = DbTime { micros: inbox.now.micros + off };
                    inbox.messages.push(age(of, time));
                    inbox.deliver(inbox.messages.len() - 1, late);
                }
                Step::Deliver { which, late } => {
                    if let Some(message) = picked(which) {
                        inbox.deliver(message, late);
                    }
                }
                Step::Purge { steps } => inbox.purge(steps),
                Step::Redrive(which) => {
                    // The operator's word that it was never handled.
                    let Some(message) = picked(which).filter(|message| inbox.too_old.remove(message)) else { continue };
                    inbox.handled.insert(message);
                    inbox.rows.entry(message).or_insert(inbox.now);
                }
            }
        }
    }

    /// Shown by: a bound that was that of the purge, not that of the rows it took.
    #[test]
    fn what_came_after_everything_that_was_purged_is_not_too_old(
        purged in prop::collection::vec((any::<bool>(), 0_i64..1_000_000), 0..20),
        skew in 0_u64..100_000,
        timed in any::<bool>(),
        later in 0_u64..1_000_000,
    ) {
        let mut bound = None;
        for (is_timed, micros) in &purged {
            let time = DbTime { micros: *micros };
            let in_id = is_timed.then(|| DbTime::from_millis(time.millis()));
            bound = bound.max(purge_row(in_id, time, DbTime { micros: 2_000_000 }));
        }
        let last = purged.iter().map(|(_, micros)| *micros).max().unwrap_or(0);
        let skew = Duration::from_micros(skew);
        // The next whole millisecond, and for a stated time the skew, are what a bound may cost.
        let time = DbTime { micros: last }.after(Duration::from_millis(1) + skew + Duration::from_micros(later));
        let now = DbTime { micros: 10_000_000 };
        let age = if timed { Age::InId(time) } else { Age::Stated(time) };
        prop_assert_eq!(judge(age, Bounds { purged_below: bound, now, id_skew: skew }), Verdict::GoOn);
    }
}
