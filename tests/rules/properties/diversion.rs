//! Who is held, against a list of rows that is looked through anew for every question (R17).
//!
//! Rows that are read, and held ones that go back, are handed to the broker one by one, and it
//! answers later: meanwhile others are read, refused and released.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::outbox::rules::diversion::{Diversion, Diverted, DivertedRow};
use proptest::prelude::*;
use proptest::sample::Index;

#[derive(Debug, Clone)]
enum Step {
    /// The reader meets the next row: a topic, a key or none, and whether the broker would refuse
    /// it for what it is.
    Read(usize, Option<usize>, bool),
    /// A destination is blocked, or open again.
    Block(usize, bool),
    /// An operator has a dead row sent again, mended or as it is.
    Redrive(Index, bool),
    /// An operator has a dead row forgotten.
    Discard(Index),
    /// So many of the held rows go back.
    Go(usize),
    /// The relay hands over so many of those that it has.
    Send(usize),
    /// The broker answers for so many.
    Answer(usize),
    /// A session ends: everything in memory is forgotten, and loaded again.
    Restart,
}

const TOPICS: [&str; 2] = ["payments", "refunds"];
const KEYS: [&str; 2] = ["a", "b"];

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0_usize..2, prop::option::weighted(0.8, 0_usize..2), prop::bool::weighted(0.2)).prop_map(|(t, k, bad)| Step::Read(t, k, bad)),
        1 => (0_usize..2, any::<bool>()).prop_map(|(topic, blocked)| Step::Block(topic, blocked)),
        2 => (any::<Index>(), any::<bool>()).prop_map(|(pick, mended)| Step::Redrive(pick, mended)),
        1 => any::<Index>().prop_map(Step::Discard),
        3 => (1_usize..5).prop_map(Step::Go),
        6 => (1_usize..5).prop_map(Step::Send),
        6 => (1_usize..5).prop_map(Step::Answer),
        1 => Just(Step::Restart),
    ]
}

/// A shard: what stands in its table, what the broker has, and what is true of both.
#[derive(Default)]
struct Shard {
    diversion: Diversion,
    table: BTreeMap<i64, DivertedRow>,
    /// The rows of which the database says that they are held for their destination.
    for_destination: BTreeSet<i64>,
    bad: BTreeSet<i64>,
    blocked: BTreeSet<String>,
    /// What the relay has and has not handed over, and what the broker has not answered for.
    unsent: VecDeque<DivertedRow>,
    flight: VecDeque<DivertedRow>,
    published: Vec<DivertedRow>,
    discarded: usize,
    position: i64,
}

impl Shard {
    fn of_key<'a>(&'a self, topic: &'a str, key: Option<&'a str>) -> impl Iterator<Item = &'a DivertedRow> {
        self.table.values().filter(move |row| key.is_some() && row.topic == topic && row.key.as_deref() == key)
    }

    /// The rule, as it is written: what is on its way back holds nobody, for the broker gets
    /// it first.
    fn expected(&self, topic: &str, key: Option<&str>) -> Option<Diverted> {
        let back: BTreeSet<i64> = self.unsent.iter().chain(&self.flight).map(|row| row.position).collect();
        let stays = |row: &&DivertedRow| !back.contains(&row.position);
        let mut of_topic = self.table.values().filter(stays).filter(|row| row.topic == topic);
        let is_blocked = of_topic.any(|row| row.why == Diverted::Destination);
        let stands = self.of_key(topic, key).any(|row| stays(&row));
        if stands && self.of_key(topic, key).any(|row| row.why != Diverted::Destination) {
            Some(Diverted::BehindDead)
        } else if is_blocked || stands {
            Some(Diverted::Destination)
        } else {
            None
        }
    }

    fn divert(&mut self, row: DivertedRow) {
        if row.why == Diverted::Destination {
            self.for_destination.insert(row.position);
        } else {
            self.for_destination.remove(&row.position);
        }
        self.table.insert(row.position, row.clone());
        self.stand_behind();
        self.diversion.divert(row);
    }

    /// What stands behind a dead row of its key is held behind it, whatever it was held for.
    fn stand_behind(&mut self) {
        let dead: Vec<_> = self.table.values().filter(|row| row.why == Diverted::Dead).cloned().collect();
        for row in self.table.values_mut().filter(|row| row.why == Diverted::Destination && row.key.is_some()) {
            let is_before =
                |dead: &DivertedRow| dead.topic == row.topic && dead.key == row.key && dead.position < row.position;
            if dead.iter().any(is_before) {
                row.why = Diverted::BehindDead;
            }
        }
    }

    fn leave(&mut self, position: i64) {
        self.diversion.leave(position);
        self.table.remove(&position);
        self.for_destination.remove(&position);
    }

    /// Loads what the database has: the reasons for which the rows were held.
    fn restart(&mut self) {
        for position in &self.for_destination {
            self.table.entry(*position).and_modify(|row| row.why = Diverted::Destination);
        }
        self.diversion = Diversion::load(self.table.values().rev().cloned());
        self.stand_behind();
        // What was read and is not in the table is read again.
        let again = self.unsent.drain(..).chain(self.flight.drain(..));
        let mut again: Vec<_> = again.filter(|row| !self.table.contains_key(&row.position)).collect();
        again.sort_by_key(|row| row.position);
        self.unsent.extend(again);
    }

    /// Hands over the next row, if it may go by now.
    fn hand_over(&mut self) {
        let Some(row) = self.unsent.pop_front() else { return };
        if self.table.contains_key(&row.position) {
            // One that was refused in between holds those behind it, and so does its topic.
            if self.diversion.is_free(row.position) && !self.blocked.contains(&row.topic) {
                self.flight.push_back(row);
            } else {
                self.diversion.stays(row.position);
            }
            return;
        }
        let (topic, key) = (row.topic.as_str(), row.key.as_deref());
        let way = self.diversion.decide(topic, key);
        assert_eq!(way, self.expected(topic, key), "{topic} {key:?}: {:?} in flight {:?}", self.table, self.flight);
        match way {
            None => self.flight.push_back(row),
            Some(why) => self.divert(DivertedRow { why, ..row }),
        }
    }

    /// The broker takes the first row, or refuses it: it stays, or comes, into the table. Where a
    /// later one of its key is with the broker, the session ends.
    fn answer(&mut self) {
        let Some(row) = self.flight.pop_front() else { return };
        let refused = if self.blocked.contains(&row.topic) {
            Some(Diverted::Destination)
        } else {
            self.bad.contains(&row.position).then_some(Diverted::Dead)
        };
        if let Some(why) = refused {
            let of_key = |later: &DivertedRow| row.key.is_some() && later.topic == row.topic && later.key == row.key;
            let ends = self.flight.iter().any(of_key);
            self.diversion.stays(row.position);
            self.divert(DivertedRow { why, ..row });
            if ends {
                self.restart();
            }
        } else {
            let older = self.of_key(&row.topic, row.key.as_deref()).find(|other| other.position < row.position);
            assert_eq!(older, None, "{row:?} overtakes a row of its key");
            if self.table.contains_key(&row.position) {
                self.leave(row.position);
            }
            self.published.push(row);
        }
    }

    fn dead(&self, pick: Index) -> Option<DivertedRow> {
        let dead: Vec<_> = self.table.values().filter(|row| row.why == Diverted::Dead).collect();
        (!dead.is_empty()).then(|| dead[pick.index(dead.len())].clone())
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Read(topic, key, bad) => {
                self.position += 1;
                let (topic, key) = (TOPICS[*topic], key.map(|key| KEYS[key]));
                if *bad {
                    self.bad.insert(self.position);
                }
                self.unsent.push_back(DivertedRow {
                    position: self.position,
                    topic: topic.to_owned(),
                    key: key.map(str::to_owned),
                    // Until it is known.
                    why: Diverted::Dead,
                });
            }
            Step::Block(topic, true) => drop(self.blocked.insert(TOPICS[*topic].to_owned())),
            Step::Block(topic, false) => drop(self.blocked.remove(TOPICS[*topic])),
            Step::Redrive(pick, mended) => {
                let Some(row) = self.dead(*pick) else { return };
                if *mended {
                    self.bad.remove(&row.position);
                }
                self.divert(DivertedRow { why: Diverted::BehindDead, ..row });
            }
            Step::Discard(pick) => {
                let Some(row) = self.dead(*pick) else { return };
                self.discarded += 1;
                self.leave(row.position);
            }
            Step::Go(count) => self.go(*count),
            Step::Send(count) => (0..*count).for_each(|_| self.hand_over()),
            Step::Answer(count) => (0..*count).for_each(|_| self.answer()),
            Step::Restart => self.restart(),
        }
        assert_eq!(self.diversion.len(), self.table.len());
        assert!(self.diversion.rows().eq(self.table.values()), "rows by position, each once");
    }

    /// Only where nothing is left to hand over: what was read is before it otherwise.
    fn go(&mut self, count: usize) {
        if !self.unsent.is_empty() {
            return;
        }
        let is_open = |topic: &str| !self.blocked.contains(topic);
        let stays = |row: &&DivertedRow| !self.diversion.is_on_way(row.position);
        let back: Vec<_> = self.diversion.releasable(is_open).filter(stays).take(count).cloned().collect();
        for row in back {
            assert!(self.diversion.goes(row.position));
            self.unsent.push_back(row);
        }
    }

    /// All that the relay has goes to the broker, and is answered for.
    fn settle(&mut self) {
        while !(self.unsent.is_empty() && self.flight.is_empty()) {
            self.hand_over();
            self.answer();
        }
    }
}

proptest! {
    #![proptest_config(super::cases(800))]

    /// Shown by: a key that was free again with its first row that left; one whose held rows did
    /// not count without a dead one; a topic that stayed blocked after its last row had left; rows
    /// that came back from behind a dead one; a row on its way back that held those behind it, and
    /// one that no longer did after it was refused.
    #[test]
    fn r17_a_key_is_diverted_exactly_while_a_row_of_it_stands_and_is_never_overtaken(
        steps in prop::collection::vec(step(), 0..150),
    ) {
        let mut shard = Shard::default();
        for step in &steps {
            shard.step(step);
        }
        // Once everything is mended and open, all of it finds its way, in order, and nothing is
        // left behind.
        shard.blocked.clear();
        shard.settle();
        // Each round finds at least one more of those that the broker refuses.
        for _ in 0..=shard.table.len() {
            while let Some(row) = shard.table.values().find(|row| row.why == Diverted::Dead).cloned() {
                shard.bad.remove(&row.position);
                shard.divert(DivertedRow { why: Diverted::BehindDead, ..row });
            }
            shard.go(usize::MAX);
            shard.settle();
        }
        prop_assert!(shard.diversion.is_empty(), "{:?}", shard.table);
        let all = usize::try_from(shard.position).unwrap();
        prop_assert_eq!(shard.published.len() + shard.discarded, all, "each is published once, or forgotten");
        for topic in TOPICS {
            for key in KEYS {
                let of_key = |row: &&DivertedRow| row.topic == topic && row.key.as_deref() == Some(key);
                let published = shard.published.iter().filter(of_key).map(|row| row.position);
                prop_assert!(published.is_sorted(), "in the order of the key");
            }
        }
    }
}
