//! What must hold: the invariant of R2 after every step, and the contract (G1 to G3) of the whole
//! history.

use std::collections::BTreeMap;

use super::postgres::{Fate, Message};
use super::world::World;

/// How a history broke the contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// A committed position counts as scanned and is nowhere, or was never sent.
    Lost,
    /// B came before A although A had committed before B was enqueued.
    OutOfOrder,
    /// The broker has a message that never existed.
    Phantom,
    /// Nothing is lost, but the relay does not come to an end.
    Stuck,
}

#[derive(Debug, Clone)]
pub(crate) struct Violation {
    pub(crate) kind: Kind,
    pub(crate) what: String,
}

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}: {}", self.kind, self.what)
    }
}

fn violation(kind: Kind, what: String) -> Violation {
    Violation { kind, what }
}

impl World {
    /// R2: a committed position at or below `scanned_to` is proven, dead, held, discarded, or in
    /// the gaps.
    pub(crate) fn check_invariant(&mut self) -> Result<(), Violation> {
        if !std::mem::take(&mut self.pg.changed) {
            return Ok(());
        }
        for (index, shard) in self.pg.shards.iter().enumerate() {
            if let Some(last) = shard.gaps.last()
                && last > shard.scanned_to
            {
                return Err(violation(Kind::Lost, format!("shard {index}: gap {last} is above scanned_to")));
            }
            for (id, message) in self.committed() {
                let is_gap = shard.gaps.iter().any(|gap| (gap.from..gap.to).contains(&message.position));
                let scanned = message.position <= shard.scanned_to && !is_gap;
                if scanned && shard.buckets.contains(&message.bucket) && !self.is_accounted_for(id, message) {
                    let what = format!(
                        "shard {index} scanned to {} with gaps {} and forgot message {id}: {message:?}",
                        shard.scanned_to, shard.gaps
                    );
                    return Err(violation(Kind::Lost, what));
                }
            }
        }
        Ok(())
    }

    fn committed(&self) -> impl Iterator<Item = (usize, &Message)> {
        let all = self.pg.messages.iter().enumerate();
        all.filter(|(_, message)| matches!(message.fate, Fate::Committed { .. }))
    }

    fn is_accounted_for(&self, id: usize, message: &Message) -> bool {
        let in_table = || self.pg.table.get(&message.position).is_some_and(|row| row.message == id);
        self.broker.has(id) || message.discarded || in_table()
    }

    /// The broker's log against the truth: nothing that never existed, and causal order per key.
    pub(crate) fn check_log(&self) -> Result<(), Violation> {
        let mut place = BTreeMap::new();
        for (index, &id) in self.broker.first_occurrences().iter().enumerate() {
            place.insert(id, index);
            if self.pg.messages[id].fate == Fate::Gone {
                let what = format!("message {id} never existed: {:?}", self.pg.messages[id]);
                return Err(violation(Kind::Phantom, what));
            }
        }
        let keyed: Vec<(usize, &Message)> = self.committed().filter(|(_, message)| message.key.is_some()).collect();
        for &(first, a) in &keyed {
            let Fate::Committed { at, .. } = a.fate else {
                continue;
            };
            for &(second, b) in &keyed {
                let after = (a.topic, a.key) == (b.topic, b.key) && at < b.enqueued_at && !a.discarded;
                let Some(place_of_b) = place.get(&second).filter(|_| after) else {
                    continue;
                };
                if place.get(&first).is_none_or(|place_of_a| place_of_a > place_of_b) {
                    let what = format!("message {second} {b:?} came before message {first} {a:?}");
                    return Err(violation(Kind::OutOfOrder, what));
                }
            }
        }
        Ok(())
    }

    /// At the end, everything that committed was sent or given up by an operator.
    pub(crate) fn check_nothing_lost(&self) -> Result<(), Violation> {
        match self.committed().find(|(id, message)| !self.broker.has(*id) && !message.discarded) {
            Some((id, message)) => Err(violation(Kind::Lost, format!("message {id} was never sent: {message:?}"))),
            None => Ok(()),
        }
    }
}
