//! Counts connections that were cut in a row while the same message was unconfirmed.
//!
//! Why: a server or a proxy may reset the connection because of one message, without any reply.
//! That looks like an outage. Without this count the relay would send that message again for ever,
//! and the messages behind it would wait (R16: a message that ends the connection is found).
//!
//! Guarantees:
//!
//! * Only cuts in a row count: a streak. A cut extends the streak that has one of its unconfirmed
//!   messages. Several streaks are kept, because the sessions of several shards, and those that try
//!   held messages, know nothing of each other.
//! * The caller ends all streaks by [`Cuts::forget`] when the server cannot be reached, closes the
//!   connection with code 320 or falls silent; a cut with nothing unconfirmed ends all too. One
//!   ends by the confirm of the last message that was unconfirmed at every cut of it, or by a large
//!   number of confirms in sessions that began after its last cut.
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

/// The most streaks that are kept. Above it the one that was extended longest ago ends.
const STREAKS_MAX: usize = 64;

/// The most suspicions between two confirms. Without this bound a network that cuts every
/// connection would make all messages dead, one after the other.
const SUSPECTS_MAX: usize = 2;

/// The present streaks of cuts. All publishing sessions of a broker share them.
#[derive(Debug, Default)]
pub(super) struct Cuts {
    counted: Mutex<Counted>,
    /// False where a confirm changes nothing, so that it needs no lock.
    counts: AtomicBool,
}

#[derive(Debug, Default)]
struct Counted {
    /// The number of all cuts.
    cuts: u64,
    /// The one that was extended last is the last one.
    streaks: Vec<Streak>,
    /// The suspicions since the last confirm, each with the ids that it was about.
    suspects: Vec<HashSet<String>>,
}

#[derive(Debug)]
struct Streak {
    cuts: u32,
    /// The number of all cuts at the last one of these.
    last: u64,
    /// The confirms since then, in sessions that began since then.
    confirms: u32,
    /// The ids of the messages that were unconfirmed at every one of these cuts.
    ids: HashSet<String>,
}

impl Cuts {
    /// Notes that a session begins. Returns the number of cuts before it, and whether it should
    /// begin with one message at a time, so that the next cut shows which message it is.
    pub(super) fn begin(&self) -> (u64, bool) {
        let counted = self.counted.lock();
        (counted.cuts, counted.streaks.iter().any(|streak| streak.cuts >= CUTS_BEFORE_ONE_BY_ONE))
    }

    /// Counts a cut of a connection that had worked, while these messages were unconfirmed. Returns
    /// the number of cuts if one of the messages is suspected now. None if the cuts may be one
    /// outage, or if so much is suspected already that the network is the likely cause.
    pub(super) fn count(&self, mut ids: HashSet<String>) -> Option<u32> {
        let Counted { cuts: all, streaks, suspects } = &mut *self.counted.lock();
        *all += 1;
        if ids.is_empty() {
            streaks.clear();
            return None;
        }
        self.counts.store(true, Ordering::Relaxed);
        let mut cuts = 1;
        if let Some(at) = streaks.iter().position(|streak| !streak.ids.is_disjoint(&ids)) {
            let streak = streaks.remove(at);
            ids.retain(|id| streak.ids.contains(id));
            cuts += streak.cuts;
        } else if streaks.len() == STREAKS_MAX {
            streaks.remove(0);
        }
        streaks.push(Streak { cuts, last: *all, confirms: 0, ids: ids.clone() });
        if cuts < CUTS_BEFORE_SUSPECT {
            return None;
        }
        // What overlaps with an earlier suspicion is that suspicion.
        if suspects.iter().all(|suspect| suspect.is_disjoint(&ids)) {
            if suspects.len() >= SUSPECTS_MAX {
                return None;
            }
            suspects.push(ids);
        }
        Some(cuts)
    }

    /// Ends the suspicions, because the confirm of this message shows that publishing works. A
    /// streak stays while another message may be its cause. `before` is the number of cuts before
    /// the session of the confirm: sessions that were open at the last cut of a streak are of other
    /// shards, and their confirms do not tell that its cause is gone.
    pub(super) fn confirmed(&self, id: &str, before: u64) {
        if !self.counts.load(Ordering::Relaxed) {
            return;
        }
        let Counted { streaks, suspects, .. } = &mut *self.counted.lock();
        suspects.clear();
        streaks.retain_mut(|streak| {
            streak.ids.remove(id);
            streak.confirms += u32::from(before >= streak.last);
            // What is suspected may never be confirmed, because it is dead.
            !streak.ids.is_empty() && streak.confirms < CONFIRMS_END
        });
        if streaks.is_empty() {
            self.counts.store(false, Ordering::Relaxed);
        }
    }

    /// Ends the streaks: the server is away, or ended the connection for a reason of its own. The
    /// suspicions stay until a confirm.
    pub(super) fn forget(&self) {
        self.counted.lock().streaks.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(ids: &[&str]) -> HashSet<String> {
        ids.iter().map(|id| (*id).to_owned()).collect()
    }

    fn wants_one_by_one(cuts: &Cuts) -> bool {
        cuts.begin().1
    }

    /// A confirm in a session that has just begun.
    fn confirmed(cuts: &Cuts, id: &str) {
        cuts.confirmed(id, cuts.begin().0);
    }

    #[test]
    fn r16_a_message_is_suspected_after_three_cuts_in_a_row_while_it_was_unconfirmed() {
        let cuts = Cuts::default();
        assert_eq!(cuts.count(ids(&["a", "b", "bad"])), None);
        assert!(!wants_one_by_one(&cuts));
        assert_eq!(cuts.count(ids(&["b", "bad", "c"])), None);
        assert!(wants_one_by_one(&cuts));
        assert_eq!(cuts.count(ids(&["bad", "d"])), Some(3));
        assert_eq!(cuts.count(ids(&["bad"])), Some(4));
        assert_eq!(cuts.count(ids(&["d"])), None, "d was not there each time");
        assert_eq!(cuts.count(ids(&["bad"])), Some(5), "the cut at d may be one of another session");
        confirmed(&cuts, "bad");
        assert!(!wants_one_by_one(&cuts));
    }

    /// Shown by: one streak for all sessions, which cuts of the other shard end; and by counting
    /// the confirms of each session.
    #[test]
    fn r16_cuts_and_confirms_of_another_shard_do_not_end_a_streak() {
        let cuts = Cuts::default();
        let (other, _) = cuts.begin();
        for _ in 1..CUTS_BEFORE_SUSPECT {
            assert_eq!([cuts.count(ids(&["a", "b"])), cuts.count(ids(&["x", "y"]))], [None, None]);
            (0..CONFIRMS_END).for_each(|_| cuts.confirmed("another", other));
        }
        assert!(wants_one_by_one(&cuts));
        assert_eq!([cuts.count(ids(&["a"])), cuts.count(ids(&["x"]))], [Some(3), Some(3)]);
    }

    /// Shown by: keeping every streak.
    #[test]
    fn g11_of_many_streaks_the_one_that_was_extended_longest_ago_ends() {
        let cuts = Cuts::default();
        (0..STREAKS_MAX).for_each(|id| assert_eq!(cuts.count(ids(&[&id.to_string()])), None));
        assert_eq!(cuts.count(ids(&["0"])), None);
        assert_eq!(cuts.count(ids(&["another"])), None);
        assert_eq!(cuts.counted.lock().streaks.len(), STREAKS_MAX);
        assert_eq!(cuts.count(ids(&["0"])), Some(3));
        assert_eq!(cuts.count(ids(&["1"])), None);
        assert_eq!(cuts.count(ids(&["1"])), None, "the second cut of a new streak");
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
        confirmed(&cuts, "another");
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
        confirmed(&cuts, "another");
        confirmed(&cuts, "a");
        assert!(wants_one_by_one(&cuts), "it may be b");
        confirmed(&cuts, "b");
        assert!(!wants_one_by_one(&cuts));
        assert_eq!(cuts.count(ids(&["b"])), None, "the first cut of a new streak");
        assert!(!wants_one_by_one(&cuts));
        // A message that is dead is never confirmed.
        for _ in 0..CUTS_BEFORE_SUSPECT {
            cuts.count(ids(&["dead"]));
        }
        assert!(wants_one_by_one(&cuts));
        (0..CONFIRMS_END).for_each(|_| confirmed(&cuts, "another"));
        assert!(!wants_one_by_one(&cuts));
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
