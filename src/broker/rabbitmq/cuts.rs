//! Whether the same message was on its way each time that a connection was cut.
//!
//! Why: a server or a proxy that resets the connection because of one message sends no reply, and
//! the end looks like that of a server that is away. If no message were suspected, the sessions at
//! that message would never end (R16).
//!
//! Guarantees: a server that cannot be reached, that closes the connection itself or falls silent,
//! and a connection that is cut with nothing on its way, begin the count anew. Where no message at
//! all is confirmed, at most two are suspected: then not the messages are at fault but the way.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// After so many cuts in a row at the same message the server counts as reachable, and the session
/// as ended by what was sent. Fewer may be one outage: a load balancer that still accepts, or the
/// nodes of a cluster that are restarted in turn.
const CUTS_BEFORE_SUSPECT: u32 = 3;

/// After so many, and while nobody knows at which message, a session begins carefully.
const CUTS_BEFORE_CARE: u32 = CUTS_BEFORE_SUSPECT - 1;

/// So many messages are suspected in a row without a confirm in between. A path that cuts each
/// connection at whatever is published would otherwise make one message after the other dead.
const SUSPECTS_MAX: usize = 2;

/// The cuts in a row; all publishing sessions of a broker share them.
#[derive(Debug, Default)]
pub(super) struct Cuts(Mutex<Row>);

#[derive(Debug, Default)]
struct Row {
    times: u32,
    /// The ids of the messages that had no confirm at each of them.
    ids: HashSet<String>,
    /// What was suspected since the last confirm: for each suspicion, the ids at that time.
    suspects: Vec<HashSet<String>>,
}

impl Cuts {
    fn row(&self) -> MutexGuard<'_, Row> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a cut of a connection that had worked, while these messages had no confirm. Returns
    /// the number of cuts where they are too many for an outage.
    pub(super) fn count(&self, mut ids: HashSet<String>) -> Option<u32> {
        let mut row = self.row();
        let again = !row.ids.is_disjoint(&ids);
        if again {
            ids.retain(|id| row.ids.contains(id));
        }
        row.times = if again { row.times + 1 } else { 1 };
        row.ids = ids;
        if !again || row.times < CUTS_BEFORE_SUSPECT {
            return None;
        }
        let Row { ids, suspects, times } = &mut *row;
        if suspects.iter().all(|suspect| suspect.is_disjoint(ids)) {
            if suspects.len() >= SUSPECTS_MAX {
                return None;
            }
            suspects.push(ids.clone());
        }
        Some(*times)
    }

    /// A message was confirmed: publishing works.
    pub(super) fn confirmed(&self) {
        self.row().suspects.clear();
    }

    /// Whether a new session is to publish one row after the other at first, so that a cut shows
    /// the message.
    pub(super) fn ask_for_care(&self) -> bool {
        self.row().times >= CUTS_BEFORE_CARE
    }

    /// Begins anew: the server is away, or ended the connection for a reason of its own. What was
    /// suspected stays so until a confirm.
    pub(super) fn forget(&self) {
        let mut row = self.row();
        (row.times, row.ids) = (0, HashSet::new());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(ids: &[&str]) -> HashSet<String> {
        ids.iter().map(|id| (*id).to_owned()).collect()
    }

    #[test]
    fn r16_only_cuts_in_a_row_with_the_same_message_on_its_way_suspect_what_was_sent() {
        let cuts = Cuts::default();
        assert_eq!(cuts.count(ids(&["a", "b", "bad"])), None);
        assert!(!cuts.ask_for_care());
        assert_eq!(cuts.count(ids(&["b", "bad", "c"])), None);
        assert!(cuts.ask_for_care());
        assert_eq!(cuts.count(ids(&["bad", "d"])), Some(3));
        assert_eq!(cuts.count(ids(&["bad"])), Some(4));
        assert_eq!(cuts.count(ids(&["d"])), None, "d was not there each time");
        assert!(!cuts.ask_for_care());
    }

    /// Shown by: no bound on suspects: on a path that cuts each publish all messages become dead.
    #[test]
    fn r16_where_nothing_is_confirmed_two_messages_are_suspected_and_no_third() {
        let cuts = Cuts::default();
        let suspected = |id: &str| (0..9).filter(|_| cuts.count(ids(&[id])).is_some()).count();
        assert_eq!([suspected("a"), suspected("b"), suspected("c"), suspected("d")], [7, 7, 0, 0]);
        cuts.forget();
        assert_eq!(suspected("e"), 0, "a server that was away proves nothing");
        cuts.confirmed();
        assert_eq!(suspected("f"), 7);
    }

    #[test]
    fn r16_a_server_that_is_away_in_between_or_a_cut_with_nothing_on_its_way_begins_anew() {
        let cuts = Cuts::default();
        for _ in 0..50 {
            assert_eq!(cuts.count(ids(&["a"])), None);
            assert_eq!(cuts.count(ids(&["a"])), None);
            cuts.forget();
            assert_eq!(cuts.count(ids(&["a"])), None);
            assert_eq!(cuts.count(ids(&["a"])), None);
            assert_eq!(cuts.count(ids(&[])), None);
        }
    }
}
