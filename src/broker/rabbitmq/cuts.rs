//! Whether the same message was on its way each time that a connection was cut.
//!
//! Why: a server or a proxy that resets the connection because of one message sends no reply, and
//! the end looks like that of a server that is away. If no message were suspected, the sessions at
//! that message would never end (R16).
//!
//! Guarantees: a server that cannot be reached, that closes the connection itself or falls silent,
//! and a connection that is cut with nothing on its way, begin the count anew.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// After so many cuts in a row at the same message the server counts as reachable, and the session
/// as ended by what was sent. Fewer may be one outage: a load balancer that still accepts, or the
/// nodes of a cluster that are restarted in turn.
const CUTS_BEFORE_SUSPECT: u32 = 3;

/// After so many, and while nobody knows at which message, a session begins carefully.
const CUTS_BEFORE_CARE: u32 = CUTS_BEFORE_SUSPECT - 1;

/// The cuts in a row; all publishing sessions of a broker share them.
#[derive(Debug, Default)]
pub(super) struct Cuts(Mutex<Row>);

#[derive(Debug, Default)]
struct Row {
    times: u32,
    /// The ids of the messages that had no confirm at each of them.
    ids: HashSet<String>,
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
        *row = Row { times: if again { row.times + 1 } else { 1 }, ids };
        (again && row.times >= CUTS_BEFORE_SUSPECT).then_some(row.times)
    }

    /// Whether a new session is to publish one row after the other at first, so that a cut shows
    /// the message.
    pub(super) fn ask_for_care(&self) -> bool {
        self.row().times >= CUTS_BEFORE_CARE
    }

    /// Begins anew: the server is away, or ended the connection for a reason of its own.
    pub(super) fn forget(&self) {
        *self.row() = Row::default();
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
