//! Pure: no I/O, no clock. Decides whether the lease of a shard or of an operation's key has
//! expired, and whether a relay session still owns its shard.
//!
//! Guarantees:
//!
//! * Only database time decides whether a lease has expired. A lease that ends later than now plus
//!   its length was written before the clock went back, and counts as expired. Otherwise nobody
//!   could take it until the clock has caught up (R22).
//! * A session has ended when the epoch or the revision in the row is not the one that it wrote
//!   last, whatever the lease says (R7). Who takes the lease raises the epoch; each write of the
//!   owner raises the revision.
//!
//! Not here: writing the row, and comparing the epoch in every fenced statement (`store`). A lease
//! only decides which process may try; the epoch decides whose write takes effect.

use std::time::Duration;

use super::db_time::DbTime;

/// A lease as the row in the database has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lease {
    /// Database time at which the lease ends.
    pub until: DbTime,
    /// How long it was granted for.
    pub length: Duration,
}

impl Lease {
    /// Whether another owner may take the lease: it has ended, or more than its length is left.
    pub(crate) fn is_expired(self, now: DbTime) -> bool {
        self.until <= now || self.until > now.after(self.length)
    }

    /// The time after which the owner renews the lease: a third of its length, so that one renewal
    /// may fail and the next still comes in time. The owner may measure it with its own clock,
    /// because it only decides when to ask.
    pub(crate) fn renewed_after(length: Duration) -> Duration {
        length / 3
    }

    /// The time until the lease ends; zero if it is expired.
    pub(crate) fn remaining(self, now: DbTime) -> Duration {
        if self.is_expired(now) { Duration::ZERO } else { now.until(self.until) }
    }
}

/// Epoch and revision as a session wrote them last. Each write of the session compares them with
/// the row, so that a former owner changes nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Fence {
    /// Raised each time that the lease is taken, also by the same owner.
    pub(crate) epoch: i64,
    /// Raised by each write of the owner.
    pub(crate) revision: i64,
}

impl Fence {
    /// Compares the values in the row with those that this session wrote last. Where they differ,
    /// the lease was taken again, or a failover lost a write: the session ends. The text of the
    /// error is for people.
    pub(crate) fn check(self, seen: Self) -> Result<(), String> {
        let (Self { epoch, revision }, mine) = (seen, self);
        if epoch > mine.epoch {
            let mine = mine.epoch;
            Err(format!("the lease was taken over: the row has epoch {epoch}, this session has {mine}"))
        } else if seen != mine {
            Err(format!(
                "the row of the lease has epoch {epoch} revision {revision}, this session wrote epoch {} revision {}",
                mine.epoch, mine.revision
            ))
        } else {
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LENGTH: Duration = Duration::from_secs(10);

    fn at(seconds: i64) -> DbTime {
        DbTime::from_millis(seconds * 1_000)
    }

    #[test]
    fn a_lease_is_owned_until_its_end_and_expired_from_it_on() {
        let lease = Lease { until: at(110), length: LENGTH };
        assert!(!lease.is_expired(at(100)));
        assert!(!lease.is_expired(DbTime { micros: at(110).micros - 1 }));
        assert!(lease.is_expired(at(110)));
    }

    #[test]
    fn r22_a_lease_that_ends_later_than_now_plus_its_length_counts_as_expired() {
        let lease = Lease { until: at(110), length: LENGTH };
        assert!(!lease.is_expired(at(100)), "the clock has not moved");
        assert!(lease.is_expired(DbTime { micros: at(100).micros - 1 }), "the clock went back");
        assert!(lease.is_expired(at(-5_000)));
        assert_eq!(lease.remaining(at(-5_000)), Duration::ZERO);
    }

    #[test]
    fn one_renewal_may_fail() {
        let granted = Lease { until: at(110), length: LENGTH };
        assert!(!granted.is_expired(at(100).after(Lease::renewed_after(LENGTH) * 2)));
    }

    #[test]
    fn r7_a_session_ends_when_the_row_is_not_as_it_left_it() {
        let mine = Fence { epoch: 7, revision: 3 };
        assert_eq!(mine.check(mine), Ok(()));
        let seen = Fence { epoch: 8, revision: 0 };
        let why = mine.check(seen).expect_err("taken over");
        assert_eq!(why, "the lease was taken over: the row has epoch 8, this session has 7");
        for seen in [Fence { epoch: 7, revision: 2 }, Fence { epoch: 7, revision: 4 }, Fence { epoch: 6, revision: 3 }]
        {
            let why = mine.check(seen).expect_err("not as it was left");
            let Fence { epoch, revision } = seen;
            assert_eq!(
                why,
                format!(
                    "the row of the lease has epoch {epoch} revision {revision}, this session wrote epoch 7 revision 3"
                )
            );
        }
    }
}
