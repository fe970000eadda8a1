//! The low-water mark against a log: whatever order deliveries finish in, and however often the
//! partition changes hands.

use std::collections::BTreeSet;

use crate::inbox::rules::watermark::{NotAscending, Watermark};
use proptest::prelude::*;

#[derive(Debug, Clone)]
enum Step {
    /// The broker delivers the next record.
    Deliver,
    /// The one of those in flight that this number picks is committed.
    Finish(prop::sample::Index),
    /// The runtime tells the broker how far it is.
    Commit,
    /// The partition goes to another owner, who begins behind what was committed. What ran to its
    /// end stays done.
    Reassign,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => Just(Step::Deliver),
        4 => any::<prop::sample::Index>().prop_map(Step::Finish),
        2 => Just(Step::Commit),
        1 => Just(Step::Reassign),
    ]
}

proptest! {
    #![proptest_config(super::cases(1_000))]

    /// Shown by: a mark that moved to the number that was finished; one that moved a single step
    /// with each finish.
    #[test]
    fn g5_the_mark_never_passes_an_unfinished_offset_whoever_owns_the_partition(
        gaps in prop::collection::vec(1_i64..4, 1..60),
        steps in prop::collection::vec(step(), 0..200),
    ) {
        // Offsets have holes, as those of compacted topics have.
        let log: Vec<i64> = gaps.iter().scan(7, |at, gap| { *at += gap; Some(*at) }).collect();
        let (mut done, mut committed) = (BTreeSet::new(), None::<i64>);
        let (mut mark, mut next) = (Watermark::default(), 0);
        // Delivered in this assignment, and of those the unfinished ones.
        let (mut delivered, mut open) = (Vec::new(), BTreeSet::new());
        for step in steps {
            match step {
                Step::Deliver => {
                    let Some(&offset) = log.get(next) else { continue };
                    let above = delivered.iter().filter(|at| Some(**at) > mark.committable()).count();
                    prop_assert_eq!(mark.above(), above);
                    prop_assert_eq!(mark.delivered(offset), Ok(()));
                    next += 1;
                    delivered.push(offset);
                    open.insert(offset);
                    prop_assert_eq!(mark.delivered(offset), Err(NotAscending { last: offset, next: offset }));
                }
                Step::Finish(pick) => {
                    let Some(&offset) = open.iter().nth(pick.index(open.len().max(1))) else { continue };
                    prop_assert!(mark.finished(offset));
                    prop_assert!(!mark.finished(offset), "once");
                    open.remove(&offset);
                    done.insert(offset);
                }
                Step::Commit => committed = committed.max(mark.committable()),
                Step::Reassign => {
                    (mark, delivered, open) = (Watermark::default(), Vec::new(), BTreeSet::new());
                    next = log.iter().position(|offset| Some(*offset) > committed).unwrap_or(log.len());
                }
            }
            // The highest number such that everything delivered up to it is finished, and no number
            // above it.
            let contiguous = delivered.iter().copied().take_while(|offset| !open.contains(offset)).last();
            prop_assert_eq!(mark.committable(), contiguous);
            // What the broker forgets is done: nothing is lost, whoever comes next.
            let lost = log.iter().find(|offset| Some(**offset) <= committed && !done.contains(*offset));
            prop_assert_eq!(lost, None);
        }
    }
}
