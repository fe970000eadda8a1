//! Pure: no I/O, no clock.
//! Which rows go to the held table instead of the broker, so that no later row of a key or topic
//! overtakes a row that could not be sent (R17).
//!
//! Guarantees:
//!
//! * A key is diverted while a dead row of it under policy `hold`, or a held row of it, is in the
//!   table or in the window. A topic is diverted while a row held for its destination is there.
//!   Both are derived from the rows, so no flag can be left over.
//! * Rows are counted by position: a row that is diverted, loaded again or released counts once.
//! * A row behind a dead row is held *behind it* even when its topic is blocked too, or was blocked
//!   when the row was held. So the return of the destination does not release it, and it does not
//!   divert the topic, whose other keys go on.
//! * A row is *on its way back* when this session sent it, proved it or is to discard it, and it is
//!   still in the table. When all held rows of a key or topic are on their way back, the next row
//!   is sent after them: within a session the broker takes a prefix of what was sent (R15).
//!
//! A session loads the rows in the table, adds the rows that it diverts, and drops this state at
//! its end. *Key* means topic and key. A row without a key holds no other row. It is held for its
//! destination, or until it is sent alone.
//!
//! Not here: rows that are dead under policy `skip`, which hold no other row and are not passed to
//! this module, and the bound on held rows (`held_rows_max`), which is compared with
//! [`len`](Diversion::len).

use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Why a row is not sent to the broker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Diverted {
    /// It is dead, and its topic's policy is `hold`.
    Dead,
    /// It is held behind a dead row of its key, or it was redriven and waits for its turn.
    BehindDead,
    /// It is held because its destination is blocked.
    Destination,
}

/// A dead or held row, as it is loaded when a session starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DivertedRow {
    pub position: i64,
    pub topic: String,
    pub key: Option<String>,
    pub why: Diverted,
}

/// The diverted rows of one shard: those in the table and those in the window.
#[derive(Debug, Default)]
pub(crate) struct Diversion {
    rows: BTreeMap<i64, DivertedRow>,
    topics: HashMap<String, Topic>,
    /// The positions that are on their way back.
    on_way: BTreeSet<i64>,
}

#[derive(Debug, Default)]
struct Topic {
    /// The number of rows that are held for the destination.
    blocked: usize,
    /// How many of these are on their way back.
    on_way: usize,
    keys: HashMap<String, Key>,
}

/// The positions of one key's rows.
#[derive(Debug, Default)]
struct Key {
    dead: BTreeSet<i64>,
    behind_dead: BTreeSet<i64>,
    destination: BTreeSet<i64>,
    /// The number of rows on their way back, without dead ones.
    on_way: usize,
}

impl Key {
    fn of(&mut self, why: Diverted) -> &mut BTreeSet<i64> {
        match why {
            Diverted::Dead => &mut self.dead,
            Diverted::BehindDead => &mut self.behind_dead,
            Diverted::Destination => &mut self.destination,
        }
    }

    fn is_behind_dead(&self) -> bool {
        !self.dead.is_empty() || !self.behind_dead.is_empty()
    }

    fn is_empty(&self) -> bool {
        !self.is_behind_dead() && self.destination.is_empty()
    }

    /// Whether all rows of the key are on their way back.
    fn is_on_way(&self) -> bool {
        self.dead.is_empty() && self.on_way == self.behind_dead.len() + self.destination.len()
    }
}

impl Diversion {
    /// Builds the state from the rows in the table when a session starts.
    pub(crate) fn load(rows: impl IntoIterator<Item = DivertedRow>) -> Self {
        let mut diversion = Self::default();
        for row in rows {
            diversion.divert(row);
        }
        diversion
    }

    /// Why the next row of this topic and key must be held: behind a dead row, or for its
    /// destination. `None` if it may be sent.
    pub(crate) fn decide(&self, topic: &str, key: Option<&str>) -> Option<Diverted> {
        let topic = self.topics.get(topic)?;
        let of_key = key.and_then(|key| topic.keys.get(key)).filter(|key| !key.is_on_way());
        if of_key.is_some_and(Key::is_behind_dead) {
            Some(Diverted::BehindDead)
        } else {
            (of_key.is_some() || topic.blocked > topic.on_way).then_some(Diverted::Destination)
        }
    }

    fn key_of(&self, row: &DivertedRow) -> Option<&Key> {
        self.topics.get(&row.topic)?.keys.get(row.key.as_ref()?)
    }

    /// Adds a diverted row, or changes its reason: a held row is now dead, or a dead row was
    /// redriven and is held.
    pub(crate) fn divert(&mut self, row: DivertedRow) {
        self.leave(row.position);
        let topic = self.topics.entry(row.topic.clone()).or_default();
        topic.blocked += usize::from(row.why == Diverted::Destination);
        let mut behind = BTreeSet::new();
        if let Some(key) = &row.key {
            let key = topic.keys.entry(key.clone()).or_default();
            key.of(row.why).insert(row.position);
            if let Some(dead) = key.dead.first() {
                behind = key.destination.split_off(dead);
                key.behind_dead.extend(&behind);
            }
        }
        topic.blocked -= behind.len();
        topic.on_way -= behind.intersection(&self.on_way).count();
        self.rows.insert(row.position, row);
        for position in behind {
            self.rows.entry(position).and_modify(|row| row.why = Diverted::BehindDead);
        }
    }

    /// Records that a row is on its way back. Returns false if it already was.
    pub(crate) fn goes(&mut self, position: i64) -> bool {
        let is_new = self.on_way.insert(position);
        if is_new {
            self.count_on_way(position, |count| count + 1);
        }
        is_new
    }

    /// Records that a row is not on its way back any more and stays in the table.
    pub(crate) fn stays(&mut self, position: i64) {
        if self.on_way.remove(&position) {
            self.count_on_way(position, |count| count - 1);
        }
    }

    fn count_on_way(&mut self, position: i64, count: impl Fn(usize) -> usize) {
        let Some(row) = self.rows.get(&position).filter(|row| row.why != Diverted::Dead) else { return };
        let Some(topic) = self.topics.get_mut(&row.topic) else { return };
        if row.why == Diverted::Destination {
            topic.on_way = count(topic.on_way);
        }
        if let Some(key) = row.key.as_ref().and_then(|key| topic.keys.get_mut(key)) {
            key.on_way = count(key.on_way);
        }
    }

    pub(crate) fn is_on_way(&self, position: i64) -> bool {
        self.on_way.contains(&position)
    }

    pub(crate) fn on_way(&self) -> usize {
        self.on_way.len()
    }

    /// Removes a row that left the table: it was published and marked, was discarded, or is now
    /// dead under policy `skip`.
    pub(crate) fn leave(&mut self, position: i64) {
        self.stays(position);
        let Some(row) = self.rows.remove(&position) else { return };
        let Some(topic) = self.topics.get_mut(&row.topic) else { return };
        topic.blocked -= usize::from(row.why == Diverted::Destination);
        if let Some(key) = row.key
            && let Some(rows) = topic.keys.get_mut(&key)
        {
            rows.of(row.why).remove(&position);
            if rows.is_empty() {
                topic.keys.remove(&key);
            }
        }
        if topic.blocked == 0 && topic.keys.is_empty() {
            self.topics.remove(&row.topic);
        }
    }

    /// The rows that may be sent back to the broker, in the position order in which they must be
    /// published: those that are not dead, have no older dead row of their key, and whose topic
    /// `is_open`. A dead row that was redriven must first be diverted again as
    /// [`Diverted::BehindDead`].
    pub(crate) fn releasable<'a>(
        &'a self,
        is_open: impl Fn(&str) -> bool + 'a,
    ) -> impl Iterator<Item = &'a DivertedRow> {
        self.rows.values().filter(move |row| {
            let first_dead = self.key_of(row).and_then(|key| key.dead.first());
            let free = first_dead.is_none_or(|&dead| row.position < dead);
            row.why != Diverted::Dead && free && is_open(&row.topic)
        })
    }

    pub(crate) fn get(&self, position: i64) -> Option<&DivertedRow> {
        self.rows.get(&position)
    }

    /// Whether a row on its way back may still go: it is known and not dead, no older row of its
    /// key is dead, and the held row before it of its key is on its way back or gone.
    pub(crate) fn is_free(&self, position: i64) -> bool {
        let Some(row) = self.rows.get(&position).filter(|row| row.why != Diverted::Dead) else { return false };
        let Some(key) = self.key_of(row) else { return true };
        let held = [&key.behind_dead, &key.destination];
        let before = held.into_iter().filter_map(|rows| rows.range(..position).next_back()).max();
        key.dead.first().is_none_or(|&dead| position < dead) && before.is_none_or(|before| self.on_way.contains(before))
    }

    /// The topics that are diverted for their destination. The relay probes them.
    pub(crate) fn blocked_topics(&self) -> impl Iterator<Item = &str> {
        self.topics.iter().filter(|(_, topic)| topic.blocked > 0).map(|(name, _)| name.as_str())
    }

    /// Whether a row of this topic is held for its destination.
    pub(crate) fn blocks(&self, topic: &str) -> bool {
        self.topics.get(topic).is_some_and(|topic| topic.blocked > 0)
    }

    /// All diverted rows, in position order; the models compare them with what they know.
    #[cfg(test)]
    pub(crate) fn rows(&self) -> impl Iterator<Item = &DivertedRow> {
        self.rows.values()
    }

    pub(crate) fn len(&self) -> usize {
        self.rows.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(position: i64, topic: &str, key: Option<&str>, why: Diverted) -> DivertedRow {
        DivertedRow { position, topic: topic.into(), key: key.map(Into::into), why }
    }

    #[test]
    fn r17_a_dead_row_holds_its_own_key_and_nothing_else() {
        let diversion = Diversion::load([row(1, "payments", Some("a"), Diverted::Dead)]);
        assert_eq!(diversion.decide("payments", Some("a")), Some(Diverted::BehindDead));
        assert_eq!(diversion.decide("payments", Some("b")), None);
        assert_eq!(diversion.decide("payments", None), None);
        assert_eq!(diversion.decide("refunds", Some("a")), None, "a key means topic and key");
    }

    #[test]
    fn r17_a_key_stays_diverted_until_its_last_held_row_has_left() {
        let dead = row(1, "payments", Some("a"), Diverted::Dead);
        let held = row(2, "payments", Some("a"), Diverted::BehindDead);
        let mut diversion = Diversion::load([dead, held]);
        diversion.leave(1);
        assert_eq!(diversion.decide("payments", Some("a")), Some(Diverted::BehindDead));
        diversion.leave(2);
        assert_eq!(diversion.decide("payments", Some("a")), None);
        assert!(diversion.is_empty());
    }

    #[test]
    fn r17_a_topic_is_diverted_only_while_a_row_held_for_its_destination_stands() {
        let mut diversion = Diversion::load([row(5, "payments", None, Diverted::Destination)]);
        for key in [Some("a"), None] {
            assert_eq!(diversion.decide("payments", key), Some(Diverted::Destination));
        }
        assert_eq!(diversion.blocked_topics().collect::<Vec<_>>(), ["payments"]);
        diversion.leave(5);
        assert_eq!(diversion.decide("payments", None), None);
    }

    #[test]
    fn a_keyless_dead_row_holds_nothing() {
        let diversion = Diversion::load([row(5, "payments", None, Diverted::Dead)]);
        assert_eq!(diversion.decide("payments", None), None);
        assert_eq!(diversion.len(), 1);
    }

    #[test]
    fn a_row_behind_a_dead_one_is_not_released_by_the_return_of_its_destination() {
        let dead = row(1, "payments", Some("a"), Diverted::Dead);
        let blocked = row(2, "payments", Some("b"), Diverted::Destination);
        let mut diversion = Diversion::load([dead, blocked]);
        assert_eq!(diversion.decide("payments", Some("a")), Some(Diverted::BehindDead));
        assert_eq!(diversion.decide("payments", Some("b")), Some(Diverted::Destination));
        // When the blocked row is sent back, the broker refuses the row itself, so it is dead now.
        diversion.divert(row(3, "payments", Some("b"), Diverted::Destination));
        diversion.divert(row(2, "payments", Some("b"), Diverted::Dead));
        assert_eq!(diversion.decide("payments", Some("b")), Some(Diverted::BehindDead));
        assert_eq!(diversion.releasable(|_| true).count(), 0, "row 3 stands behind the dead one, whatever its reason");
    }

    /// Shown by: counting the row that stands behind the dead one as held for its destination. Each
    /// new row of the topic then goes through the table, until an operator acts.
    #[test]
    fn r17_a_row_that_turns_out_dead_leaves_the_other_keys_of_its_topic_alone() {
        let held = |position| row(position, "payments", Some("b"), Diverted::Destination);
        let mut diversion = Diversion::load([held(2), held(3), held(4)]);
        assert!(diversion.goes(2) && diversion.goes(3));
        diversion.divert(row(2, "payments", Some("b"), Diverted::Dead));
        assert_eq!(diversion.decide("payments", Some("a")), None);
        assert_eq!(diversion.decide("payments", Some("b")), Some(Diverted::BehindDead));
        assert_eq!(diversion.blocked_topics().count(), 0);
        diversion.stays(3);
        diversion.divert(held(3));
        assert!(!diversion.blocks("payments"), "it stands behind the dead one again");
        // The same after a start: the table has the reasons for which the rows were held.
        let dead = row(2, "payments", Some("b"), Diverted::Dead);
        let mut diversion = Diversion::load([dead, held(3)]);
        assert_eq!(diversion.decide("payments", None), None);
        diversion.leave(2);
        assert_eq!(diversion.decide("payments", Some("b")), Some(Diverted::BehindDead));
        assert_eq!(diversion.releasable(|_| true).map(|row| row.position).collect::<Vec<_>>(), [3]);
        diversion.leave(3);
        assert!(diversion.is_empty() && diversion.topics.is_empty());
    }

    #[test]
    fn r17_held_rows_go_back_in_position_order_up_to_the_next_dead_one_of_their_key() {
        let mut diversion = Diversion::load([
            row(1, "payments", Some("a"), Diverted::Dead),
            row(2, "payments", Some("a"), Diverted::BehindDead),
            row(3, "payments", Some("a"), Diverted::Dead),
            row(4, "payments", Some("a"), Diverted::BehindDead),
            row(5, "refunds", None, Diverted::Destination),
        ]);
        let positions = |diversion: &Diversion, open: &'static [&str]| -> Vec<i64> {
            diversion.releasable(move |topic| open.contains(&topic)).map(|row| row.position).collect()
        };
        assert!(positions(&diversion, &["payments"]).is_empty());
        diversion.divert(row(1, "payments", Some("a"), Diverted::BehindDead));
        assert_eq!(positions(&diversion, &["payments"]), [1, 2], "1 was redriven");
        assert_eq!(positions(&diversion, &["payments", "refunds"]), [1, 2, 5]);
        diversion.leave(3);
        assert_eq!(positions(&diversion, &["payments"]), [1, 2, 4], "3 was discarded");
    }

    #[test]
    fn the_next_row_follows_once_all_that_is_held_of_its_key_and_topic_is_on_its_way() {
        let mut diversion = Diversion::load([
            row(1, "payments", Some("a"), Diverted::Destination),
            row(2, "payments", Some("b"), Diverted::Destination),
            row(3, "refunds", Some("a"), Diverted::Dead),
            row(4, "refunds", Some("b"), Diverted::BehindDead),
        ]);
        assert!(diversion.goes(1) && !diversion.goes(1));
        assert_eq!(diversion.decide("payments", Some("a")), Some(Diverted::Destination), "2 is held still");
        diversion.goes(2);
        for key in [Some("a"), Some("c"), None] {
            assert_eq!(diversion.decide("payments", key), None);
        }
        diversion.stays(1);
        assert_eq!(diversion.decide("payments", Some("c")), Some(Diverted::Destination), "it was refused again");
        diversion.goes(3);
        assert_eq!(diversion.decide("refunds", Some("a")), Some(Diverted::BehindDead), "a dead one is only discarded");
        diversion.goes(4);
        assert_eq!(diversion.decide("refunds", Some("b")), None);
        diversion.divert(row(4, "refunds", Some("b"), Diverted::Dead));
        assert_eq!(diversion.decide("refunds", Some("b")), Some(Diverted::BehindDead));
        assert_eq!(diversion.on_way(), 2, "2 and 3");
        diversion.leave(2);
        assert!(!diversion.is_on_way(2) && diversion.is_on_way(3));
    }

    #[test]
    fn a_row_on_its_way_back_waits_for_the_one_before_it_that_was_refused_meanwhile() {
        let held = |position| row(position, "payments", Some("a"), Diverted::Destination);
        let mut diversion = Diversion::load([held(1), held(2), held(3)]);
        assert!((1..=3).all(|position| diversion.goes(position)));
        assert!((1..=3).all(|position| diversion.is_free(position)));
        diversion.divert(row(2, "payments", Some("a"), Diverted::BehindDead));
        assert!(diversion.is_free(2) && !diversion.is_free(3));
        diversion.leave(2);
        assert!(diversion.is_free(3));
    }

    #[test]
    fn loading_or_diverting_the_same_position_twice_counts_it_once() {
        let held = row(2, "payments", Some("a"), Diverted::Destination);
        let mut diversion = Diversion::load([held.clone(), held.clone()]);
        diversion.divert(held);
        assert_eq!(diversion.len(), 1);
        diversion.leave(2);
        assert_eq!(diversion.decide("payments", Some("a")), None);
    }
}
