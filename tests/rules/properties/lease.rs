//! One lease, several who want it, a database clock that may go back, and processes that freeze
//! (R7, G9, R22). On PostgreSQL a statement decides who takes the lease; `postgres_cursor` has it.

use std::time::Duration;

use crate::time::db_time::DbTime;
use crate::time::lease::{Fence, Lease};
use proptest::prelude::*;

#[derive(Debug, Clone)]
enum Step {
    /// The database's clock goes on, or back.
    Clock(i64),
    /// Somebody asks for the lease.
    Take(usize),
    /// Somebody writes, and so renews, believing that it is the owner.
    Write(usize),
}

const LENGTH: Duration = Duration::from_millis(1_000);

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0_i64..600).prop_map(Step::Clock),
        1 => (-5_000_i64..0).prop_map(Step::Clock),
        4 => (0_usize..3).prop_map(Step::Take),
        6 => (0_usize..3).prop_map(Step::Write),
    ]
}

proptest! {
    #![proptest_config(super::cases(3_000))]

    /// Shown by: a lease that lasted, after the clock went back, until the clock had caught up.
    #[test]
    fn r22_a_lease_has_one_owner_and_none_longer_than_its_length(steps in prop::collection::vec(step(), 0..120)) {
        let mut now = DbTime::from_millis(1_000_000);
        let mut lease: Option<(usize, Lease)> = None;
        let mut row = Fence { epoch: 0, revision: 0 };
        // What each of them wrote last, if it ever was the owner.
        let mut mine: [Option<Fence>; 3] = [None; 3];
        for step in steps {
            match step {
                Step::Clock(millis) => now = DbTime::from_millis(now.millis() + millis),
                Step::Take(who) => {
                    // Free, or ended, or from before the clock went back: as the rule says it.
                    let may = lease.is_none_or(|(owner, lease)| {
                        owner == who || lease.until <= now || lease.until > now.after(LENGTH)
                    });
                    let takes = lease.is_none_or(|(owner, lease)| owner == who || lease.is_expired(now));
                    prop_assert_eq!(takes, may);
                    if let Some((_, lease)) = lease {
                        let left = lease.remaining(now);
                        prop_assert_eq!(left.is_zero(), lease.is_expired(now));
                        prop_assert!(left <= LENGTH, "nobody waits for longer than its length");
                    }
                    if takes {
                        row = Fence { epoch: row.epoch + 1, revision: row.revision + 1 };
                        (lease, mine[who]) = (Some((who, Lease { until: now.after(LENGTH), length: LENGTH })), Some(row));
                    }
                }
                Step::Write(who) => {
                    let Some(fence) = mine[who] else { continue };
                    let stands = fence.check(row).is_ok();
                    let owner = lease.map(|(owner, _)| owner);
                    prop_assert_eq!(stands, owner == Some(who), "who wrote last is the owner, and nobody else");
                    if stands {
                        row.revision += 1;
                        (lease, mine[who]) = (Some((who, Lease { until: now.after(LENGTH), length: LENGTH })), Some(row));
                    } else {
                        // Its session has ended, whatever it believes.
                        mine[who] = None;
                    }
                }
            }
        }
    }

    /// Shown by: a fence that compared epochs only; one that ended a session only for a higher
    /// epoch.
    #[test]
    fn r7_only_the_row_as_it_was_left_lets_a_session_go_on(epoch in 0_i64..4, revision in 0_i64..4, other in (0_i64..4, 0_i64..4)) {
        let mine = Fence { epoch, revision };
        let seen = Fence { epoch: other.0, revision: other.1 };
        prop_assert_eq!(mine.check(seen).is_ok(), mine == seen);
    }
}
