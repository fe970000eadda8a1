//! A batch that fails, run again as a lane does it: a stack of parts, until every message has come
//! to its end (R27).

use std::ops::Range;

use crate::inbox::rules::split::{self, PAUSE_MAX, Part, TransientFault};
use proptest::prelude::*;

/// What a run of some messages comes to.
#[derive(Debug, Clone, Copy)]
enum Failure {
    /// The failing message is known.
    Blamed,
    /// It failed as a whole, as under a handler of batches.
    Unblamed,
}

#[derive(Debug, Default)]
struct Lane {
    /// Each message with whether it came to its end alone, in the order in which they did.
    ended: Vec<(usize, bool)>,
    runs: usize,
    fault: TransientFault,
}

impl Lane {
    fn run(&mut self, size: usize, bad: &[bool], failure: Failure, faults: &mut impl Iterator<Item = bool>) {
        let mut stack = vec![Part { messages: 0..size, alone: false }];
        while let Some(Part { messages, alone }) = stack.pop() {
            self.runs += 1;
            assert!(self.runs < 2_000, "it comes to an end");
            if faults.next().unwrap_or(false) {
                let again = self.fault.again(messages.clone(), messages.clone().next_back(), 1.0);
                assert!(again.pause <= PAUSE_MAX);
                covers(&messages, again.parts.iter().map(|part| part.messages.clone()));
                // What ran alone runs alone again.
                stack.extend(again.parts.into_iter().rev().map(|part| Part { alone: alone || part.alone, ..part }));
                continue;
            }
            self.fault.reset();
            assert!(!alone || messages.len() == 1, "alone is one");
            let first_bad = messages.clone().find(|index| bad[*index]);
            let plan = match (first_bad, failure) {
                (Some(_), _) if alone => {
                    self.ended.push((messages.start, true));
                    continue;
                }
                (Some(at), Failure::Blamed) => split::around(messages.clone(), at),
                (Some(_), Failure::Unblamed) => split::without_blame(messages.clone()),
                (None, _) => {
                    self.ended.extend(messages.map(|index| (index, alone)));
                    continue;
                }
            };
            covers(&messages, plan.iter().map(|part| part.messages.clone()));
            stack.extend(plan.into_iter().rev());
        }
    }
}

/// Parts are the whole, in its order, none of them empty.
fn covers(whole: &Range<usize>, parts: impl Iterator<Item = Range<usize>>) {
    let mut at = whole.start;
    for part in parts {
        assert!(part.start == at && part.end > at, "{part:?} in {whole:?}");
        at = part.end;
    }
    assert_eq!(at, whole.end);
}

proptest! {
    #![proptest_config(super::cases(2_000))]

    /// Shown by: a plan without the part after the failing message; one that began with the failing
    /// message; halves that shared a message; a batch that was never halved.
    #[test]
    fn r27_every_message_comes_to_its_end_once_in_order_and_each_failing_one_alone(
        bad in prop::collection::vec(prop::bool::weighted(0.15), 1..60),
        unblamed in any::<bool>(),
        faults in prop::collection::vec(prop::bool::weighted(0.3), 0..200),
    ) {
        let failure = if unblamed { Failure::Unblamed } else { Failure::Blamed };
        let mut lane = Lane::default();
        // Without faults nothing else runs alone. With them, who reports one may.
        let has_faults = faults.contains(&true);
        lane.run(bad.len(), &bad, failure, &mut faults.into_iter());
        let order: Vec<usize> = lane.ended.iter().map(|(index, _)| *index).collect();
        prop_assert_eq!(order, (0..bad.len()).collect::<Vec<_>>(), "each once, and a key is never reordered");
        for (index, alone) in lane.ended {
            prop_assert!(if has_faults { alone || !bad[index] } else { alone == bad[index] }, "message {}", index);
        }
    }

    /// One bad message of many is found in a few runs. Shown by: a failing message that did not run
    /// alone at once.
    #[test]
    fn one_failing_message_costs_few_runs_whoever_tells(size in 1_usize..200, at in any::<prop::sample::Index>(), unblamed in any::<bool>()) {
        let mut bad = vec![false; size];
        bad[at.index(size)] = true;
        let failure = if unblamed { Failure::Unblamed } else { Failure::Blamed };
        let mut lane = Lane::default();
        lane.run(size, &bad, failure, &mut std::iter::empty());
        let halvings = usize::BITS as usize - size.leading_zeros() as usize;
        prop_assert!(lane.runs <= if unblamed { 2 * halvings + 2 } else { 4 }, "{} runs of {}", lane.runs, size);
    }

    /// Whoever reports it, the largest part is at most half of what it was. Shown by: a batch that
    /// was never halved.
    #[test]
    fn r27_a_batch_with_transient_failures_becomes_small_and_its_pauses_stay_bounded(
        size in 1_usize..500,
        reports in prop::option::of(any::<prop::sample::Index>()),
        chance in any::<f64>(),
    ) {
        let (mut fault, mut batch, mut times) = (TransientFault::default(), 0..size, 0);
        while batch.len() > 1 {
            let of = reports.map(|index| batch.start + index.index(batch.len()));
            let again = fault.again(batch.clone(), of, chance);
            prop_assert!(again.pause <= PAUSE_MAX);
            let parts: Vec<_> = again.parts.iter().map(|part| part.messages.clone()).collect();
            covers(&batch, parts.iter().cloned());
            for part in &again.parts {
                prop_assert!(!part.alone || part.messages.len() == 1);
                prop_assert!(parts.len() == 1 || part.messages.len() <= batch.len().div_ceil(2));
            }
            batch = parts.into_iter().max_by_key(std::iter::ExactSizeIterator::len).expect("a part");
            times += 1;
            prop_assert!(times <= 30, "{} of {} after {} times", batch.len(), size, times);
        }
        let last = fault.again(batch.clone(), None, chance).parts;
        let is_whole = matches!(last.as_slice(), [Part { messages, .. }] if *messages == batch);
        prop_assert!(is_whole);
    }
}
