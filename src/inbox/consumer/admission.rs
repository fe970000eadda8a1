//! Decides about each delivery before a handler runs: new, duplicate, out of time, or behind its
//! key.
//!
//! Promise: the insert decides which messages are new (R24); a statement after it decides which are
//! blocked or too old. A message that is out of time leaves no inbox row (R31).

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

use super::item::Item;
use crate::error::StoreError;
use crate::inbox::port::{InboxEntry, InboxTx, Standing, time_in_id};
use crate::inbox::rules::horizon::{Age, Bounds, judge};
use crate::message::{Message, MessageId};
use crate::time::db_time::DbTime;

/// The verdict of the inbox on one item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    /// The id is new, and no older message of the key blocks it.
    New,
    /// The id is new, and an older message of its key waits or is dead and holds the key.
    Behind,
    /// The message was handled or is stored.
    Duplicate,
    /// The id is known with other content (G7).
    Mismatch,
    /// The message is dead for this reason: too old, or from the future. Its inbox row is removed.
    OutOfTime(&'static str),
}

/// Inserts the ids first. If a batch has an id twice, the first delivery counts, and the hashes are
/// compared in memory (R32).
pub(super) async fn admit(tx: &mut dyn InboxTx, items: &[Item]) -> Result<Vec<Fate>, StoreError> {
    // By id: the index of the item that counts, and that of its entry.
    let mut winners: HashMap<MessageId, (usize, usize)> = HashMap::with_capacity(items.len());
    let mut entries = Vec::with_capacity(items.len());
    for (index, item) in items.iter().enumerate() {
        if let Entry::Vacant(vacant) = winners.entry(item.message.id) {
            vacant.insert((index, entries.len()));
            entries.push(InboxEntry { id: item.message.id, hash: item.hash });
        }
    }
    let lanes: HashSet<_> = items.iter().filter_map(|item| item.lane_id).collect();
    let (known, standing) = tx.admit_and_look(&entries, &lanes.into_iter().collect::<Vec<_>>()).await?;
    if known.len() != entries.len() {
        return Err(StoreError::Corrupt(format!("the inbox answered {} of {} ids", known.len(), entries.len())));
    }
    let fate = |(index, item): (usize, &Item)| {
        let (winner, entry) = winners[&item.message.id];
        let standing = match known[entry] {
            Some(hash) => hash,
            None if winner == index => return Fate::New,
            None => items[winner].hash,
        };
        if standing == item.hash { Fate::Duplicate } else { Fate::Mismatch }
    };
    let mut fates: Vec<Fate> = items.iter().enumerate().map(fate).collect();
    if let Some(standing) = standing {
        look_around(tx, items, &standing, &mut fates).await?;
    }
    Ok(fates)
}

/// Finds the new items that are behind their key, and those that are out of time.
async fn look_around(
    tx: &mut dyn InboxTx,
    items: &[Item],
    standing: &Standing,
    fates: &mut [Fate],
) -> Result<(), StoreError> {
    let mut out_of_time = HashMap::new();
    for index in (0..items.len()).filter(|index| fates[*index] == Fate::New).collect::<Vec<_>>() {
        let item = &items[index];
        if let Some(reason) = verdict(item, standing.bounds) {
            out_of_time.insert(item.message.id, reason);
        } else if item.lane_id.is_some_and(|lane| standing.blocked.contains(&lane)) {
            fates[index] = Fate::Behind;
        }
    }
    if out_of_time.is_empty() {
        return Ok(());
    }
    let ids: Vec<MessageId> = out_of_time.keys().copied().collect();
    tx.forget(&ids).await?;
    for (item, fate) in items.iter().zip(fates) {
        // A copy with other content in the same batch is out of time too: the row that it could be
        // compared with is removed.
        if let Some(reason) = out_of_time.get(&item.message.id).filter(|_| *fate != Fate::Duplicate) {
            *fate = Fate::OutOfTime(reason);
        }
    }
    Ok(())
}

/// The reason why a new item is out of time, if it is. An item without an id has no time.
fn verdict(item: &Item, bounds: Bounds) -> Option<&'static str> {
    if item.unusable.is_some() { None } else { judge(age(&item.message), bounds).reason() }
}

fn age(message: &Message) -> Age {
    match (time_in_id(message.id), message.time) {
        (Some(time), _) => Age::InId(time),
        (None, Some(time)) => Age::Stated(DbTime { micros: time.timestamp_micros() }),
        (None, None) => Age::Unknown,
    }
}
