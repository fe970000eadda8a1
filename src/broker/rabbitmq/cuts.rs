//! Counts connections that were cut in a row while the same message was unconfirmed.
//!
//! Why: a server or a proxy may reset the connection because of one message, without any reply.
//! That looks like an outage. Without this count the relay would send that message again for ever,
//! and the messages behind it would wait (R16: a message that ends the connection is found).
//!
//! Guarantees:
//!
//! * Only cuts in a row count: a streak. The caller ends the streak by [`Cuts::forget`] when the
//!   server cannot be reached, closes the connection with code 320 or falls silent. A cut with
//!   nothing unconfirmed ends it too, and so does the confirm of the last message that was
//!   unconfirmed at every cut of it, or a large number of confirms.
//! * Between two confirms there are at most two suspicions; each may name several messages. If
//!   every message fails, the network is the likely cause, not the messages.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

/// The cuts in a row with the same message unconfirmed, after which the message is suspected. Fewer
/// may be one outage: a load balancer that still accepts connections, or the nodes of a cluster
/// that restart in turn.
const CUTS_BEFORE_SUSPECT: u32 = 3;

/// The cuts in a row after which a new session publishes its first messages one at a time.
const CUTS_BEFORE_ONE_BY_ONE: u32 = CUTS_BEFORE_SUSPECT - 1;

/// A streak ends after so many confirms, which is many windows of a session: a cut that comes then
/// has nothing to do with the cuts before.
const CONFIRMS_END: u32 = 20_000;

/// The most suspicions between two confirms. Without this bound a network that cuts every
/// connection would make all messages dead, one after the other.
const SUSPECTS_MAX: usize = 2;

/// The present streak of cuts. All publishing sessions of a broker share it.
#[derive(Debug, Default)]
pub(super) struct Cuts {
    streak: Mutex<Streak>,
    /// False where a confirm changes nothing, so that it needs no lock.
    counts: AtomicBool,
}

#[derive(Debug, Default)]
struct Streak {
    cuts: u32,
    /// The confirms since the last of these cuts.
    confirms: u32,
    /// The ids of the messages that were unconfirmed at every one of these cuts.
    ids: HashSet<String>,
    /// The suspicions since the last confirm, each with the ids that it was about.
    suspects: Vec<HashSet<String>>,
}

impl Cuts {
    /// Counts a cut of a connection that had worked, while these messages were unconfirmed. Returns
    /// the number of cuts if one of the messages is suspected now. None if the cuts may be one
    /// outage, or if so much is suspected already that the network is the likely cause.
    pub(super) fn count(&self, mut ids: HashSet<String>) -> Option<u32> {
        let mut streak = self.streak.lock();
        self.counts.store(true, Ordering::Relaxed);
        let overlaps = !streak.ids.is_disjoint(&ids);
        if overlaps {
            ids.retain(|id| streak.ids.contains(id));
        }
        streak.cuts = if overlaps { streak.cuts + 1 } else { 1 };
        streak.ids = ids;
        streak.confirms = 0;
        if streak.cuts < CUTS_BEFORE_SUSPECT {
            return None;
        }
        let Streak { ids, suspects, cuts, .. } = &mut *streak;
        // What overlaps with an earlier suspicion is that suspicion.
        if suspects.iter().all(|suspect| suspect.is_disjoint(ids)) {
            if suspects.len() >= SUSPECTS_MAX {
                return None;
            }
            suspects.push(ids.clone());
        }
        Some(*cuts)
    }

    /// Ends the suspicions, because the confirm of this message shows that publishing works. The
    /// streak stays while another message may be its cause.
    pub(super) fn confirmed(&self, id: &str) {
        if !self.counts.load(Ordering::Relaxed) {
            return;
        }
        let mut streak = self.streak.lock();
        streak.suspects.clear();
        streak.ids.remove(id);
        streak.confirms += 1;
        // What is suspected may never be confirmed, because it is dead.
        if streak.ids.is_empty() || streak.confirms >= CONFIRMS_END {
            (streak.cuts, streak.ids) = (0, HashSet::new());
            self.counts.store(false, Ordering::Relaxed);
        }
    }

    /// Whether a new session should begin with one message at a time, so that the next cut shows
    /// which message it is.
    pub(super) fn wants_one_by_one(&self) -> bool {
        self.streak.lock().cuts >= CUTS_BEFORE_ONE_BY_ONE
    }

    /// Ends the streak: the server is away, or ended the connection for a reason of its own.
    /// The suspicions stay until a confirm.
    pub(super) fn forget(&self) {
        let mut streak = self.streak.lock();
        (streak.cuts, streak.ids) = (0, HashSet::new());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(ids: &[&str]) -> HashSet<String> {
        ids.iter().map(|id| (*id).to_owned()).collect()
    }

    #[test]
    fn r16_a_message_is_suspected_after_three_cuts_in_a_row_while_it_was_unconfirmed() {
        let cuts = Cuts::default();
        assert_eq!(cuts.count(ids(&["a", "b", "bad"])), None);
        assert!(!cuts.wants_one_by_one());
        assert_eq!(cuts.count(ids(&["b", "bad", "c"])), None);
        assert!(cuts.wants_one_by_one());
        assert_eq!(cuts.count(ids(&["bad", "d"])), Some(3));
        assert_eq!(cuts.count(ids(&["bad"])), Some(4));
        assert_eq!(cuts.count(ids(&["d"])), None, "d was not there each time");
        assert!(!cuts.wants_one_by_one());
    }

    /// It fails without the bound on suspicions: then all messages become dead, one by one.
    #[test]
    fn r16_where_nothing_is_confirmed_two_messages_are_suspected_and_no_third() {
        let cuts = Cuts::default();
        // Of nine cuts the first two suspect nothing.
        let suspected = |id: &str| (0..9).filter(|_| cuts.count(ids(&[id])).is_some()).count();
        assert_eq!([suspected("a"), suspected("b"), suspected("c"), suspected("d")], [7, 7, 0, 0]);
        cuts.forget();
        assert_eq!(suspected("e"), 0, "a server that was away proves nothing");
        cuts.confirmed("another");
        assert_eq!(suspected("f"), 7);
    }

    /// It fails where a confirm ends only the suspicions: then every later session begins with one
    /// message at a time.
    #[test]
    fn a_streak_of_cuts_ends_when_every_message_that_may_be_its_cause_is_confirmed() {
        let cuts = Cuts::default();
        for _ in 0..CUTS_BEFORE_ONE_BY_ONE {
            assert_eq!(cuts.count(ids(&["a", "b"])), None);
        }
        cuts.confirmed("another");
        cuts.confirmed("a");
        assert!(cuts.wants_one_by_one(), "it may be b");
        cuts.confirmed("b");
        assert!(!cuts.wants_one_by_one());
        assert_eq!(cuts.count(ids(&["b"])), None, "the first cut of a new streak");
        assert!(!cuts.wants_one_by_one());
        // A message that is dead is never confirmed.
        for _ in 0..CUTS_BEFORE_SUSPECT {
            cuts.count(ids(&["dead"]));
        }
        assert!(cuts.wants_one_by_one());
        (0..CONFIRMS_END).for_each(|_| cuts.confirmed("another"));
        assert!(!cuts.wants_one_by_one());
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
