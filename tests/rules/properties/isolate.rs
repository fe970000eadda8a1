//! Whose fault a session's end is, against the words of the rule (R16).

use std::collections::BTreeMap;

use crate::outbox::rules::isolate::Isolation;
use proptest::prelude::*;

#[derive(Debug, Clone)]
enum Step {
    /// A session ends at one of three rows.
    End(i64),
    /// A row is proven after all.
    Settled(i64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (0_i64..3).prop_map(Step::End),
        1 => (0_i64..3).prop_map(Step::Settled),
    ]
}

/// What the rule counts of one row.
#[derive(Debug, Default)]
struct Told {
    /// Sessions that ended at it among others.
    ends: u32,
    /// Sessions that it ended alone.
    ends_alone: u32,
}

proptest! {
    #![proptest_config(super::cases(3_000))]

    /// Shown by: ends among others that counted as ends alone.
    #[test]
    fn r16_a_row_is_dead_only_by_three_ends_alone(
        steps in prop::collection::vec(step(), 0..80),
    ) {
        let mut isolation = Isolation::default();
        let mut told: BTreeMap<i64, Told> = BTreeMap::new();
        for step in steps {
            match step {
                Step::Settled(row) => {
                    isolation.on_settled(row);
                    told.remove(&row);
                }
                Step::End(row) => {
                    let alone = isolation.alone() == Some(row);
                    let counts = told.entry(row).or_default();
                    counts.ends += u32::from(!alone);
                    counts.ends_alone += u32::from(alone);
                    prop_assert!(!alone || counts.ends >= 2, "isolated only after two ends at it");
                    let is_dead = alone && counts.ends_alone >= 3;
                    prop_assert_eq!(isolation.on_session_end(row), is_dead, "alone: {} {:?}", alone, counts);
                    if is_dead {
                        told.remove(&row);
                    }
                }
            }
            // The next session sends alone the first of those at which two have ended.
            let isolated = told.iter().find(|(_, counts)| counts.ends >= 2).map(|(row, _)| *row);
            prop_assert_eq!(isolation.alone(), isolated);
        }
    }
}
