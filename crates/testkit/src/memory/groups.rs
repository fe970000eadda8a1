//! Groups of the broker in memory: members, leases with epochs, committed offsets.

use std::collections::BTreeMap;

use super::topics::Topic;
use oncebox::adapter::{Seat, Share, share};

/// A partition of a topic.
pub(super) type Place = (String, i32);

/// The owner of a partition in a group, the epoch, and how far the group has handled it.
#[derive(Debug, Clone, Default)]
pub(super) struct Lease {
    pub(super) owner: Option<i64>,
    pub(super) epoch: u64,
    /// The next offset to be handled.
    pub(super) committed: i64,
}

impl Lease {
    /// Nobody owns the partition any more, and whoever did is fenced.
    fn end(&mut self) {
        self.owner = None;
        self.epoch += 1;
    }
}

/// One consumer group: its members, and the lease of each partition.
#[derive(Debug, Default)]
pub(super) struct Group {
    /// The topics of each member. Members are in the order in which they joined.
    members: BTreeMap<i64, Vec<String>>,
    leases: BTreeMap<Place, Lease>,
}

impl Group {
    pub(super) fn join(&mut self, member: i64, topics: Vec<String>) {
        self.members.insert(member, topics);
    }

    /// The topics of a member, where it is in the group.
    pub(super) fn topics_of(&self, member: i64) -> Option<&[String]> {
        self.members.get(&member).map(Vec::as_slice)
    }

    pub(super) fn committed(&self, topic: &str, partition: i32) -> i64 {
        self.leases.get(&(topic.to_owned(), partition)).map_or(0, |lease| lease.committed)
    }

    pub(super) fn lease(&self, place: &Place) -> Option<&Lease> {
        self.leases.get(place)
    }

    /// The partitions that a member must take and give up, and whether all will have a live owner.
    pub(super) fn share(&mut self, me: i64, topics: &BTreeMap<String, Topic>) -> (Vec<Place>, Vec<Place>, bool) {
        let read = self.members.values().flatten().cloned().collect::<std::collections::BTreeSet<_>>();
        let mut seats = Vec::new();
        let mut places = Vec::new();
        for (name, topic) in topics.iter().filter(|(name, _)| read.contains(*name)) {
            for number in (0_i32..).take(topic.partitions.len()) {
                let place = (name.clone(), number);
                let owner = self.leases.entry(place.clone()).or_default().owner;
                let partition_id = i64::try_from(places.len()).unwrap_or(i64::MAX);
                seats.push(Seat { topic_id: topic.id, partition_id, owner });
                places.push(place);
            }
        }
        let ids = |names: &Vec<String>| names.iter().filter_map(|name| Some(topics.get(name)?.id)).collect();
        let members: Vec<(i64, Vec<i64>)> = self.members.iter().map(|(id, names)| (*id, ids(names))).collect();
        let Share { take, give_up, complete } = share(me, &members, &seats);
        let at = |seats: Vec<i64>| {
            seats.into_iter().filter_map(|seat| places.get(usize::try_from(seat).ok()?).cloned()).collect()
        };
        (at(take), at(give_up), complete)
    }

    pub(super) fn take(&mut self, me: i64, place: &Place) -> Lease {
        let lease = self.leases.entry(place.clone()).or_default();
        lease.owner = Some(me);
        lease.epoch += 1;
        lease.clone()
    }

    /// Commits an offset where the epoch still holds.
    pub(super) fn commit(&mut self, me: i64, place: &Place, epoch: u64, next: i64) {
        if let Some(lease) = self.held(me, place, epoch) {
            lease.committed = lease.committed.max(next);
        }
    }

    pub(super) fn release(&mut self, me: i64, place: &Place, epoch: u64) {
        if let Some(lease) = self.held(me, place, epoch) {
            lease.end();
        }
    }

    fn held(&mut self, me: i64, place: &Place, epoch: u64) -> Option<&mut Lease> {
        self.leases.get_mut(place).filter(|lease| lease.owner == Some(me) && lease.epoch == epoch)
    }

    pub(super) fn leave(&mut self, me: i64) {
        self.members.remove(&me);
        self.leases.values_mut().filter(|lease| lease.owner == Some(me)).for_each(Lease::end);
    }

    pub(super) fn expire_leases(&mut self) {
        self.leases.values_mut().filter(|lease| lease.owner.is_some()).for_each(Lease::end);
    }
}
