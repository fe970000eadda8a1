//! Schedules of retries: bounded, growing, never early.

use std::time::Duration;

use crate::time::retry::{ATTEMPTS, Asked, Decision, RetryPolicy, TERMINAL, pause};
use proptest::prelude::*;

fn policy() -> impl Strategy<Value = RetryPolicy> {
    let millis = |range: std::ops::Range<u64>| range.prop_map(Duration::from_millis);
    (0_u32..6, millis(0..2_000), 1_u32..40, millis(1..60_000), millis(0..3_600_000), 1.0_f64..8.0, 0.0_f64..=1.0)
        .prop_map(|(in_place, in_place_delay, attempts_max, base, more, multiplier, jitter)| RetryPolicy {
            in_place,
            in_place_delay,
            attempts_max,
            base,
            cap: base + more,
            multiplier,
            jitter,
        })
}

/// A draw: mostly from 0 to 1, sometimes a broken one.
fn chance() -> impl Strategy<Value = f64> {
    prop_oneof![8 => 0.0_f64..=1.0, 1 => any::<f64>(), 1 => Just(f64::NAN)]
}

fn wait_of(decision: Decision) -> Duration {
    match decision {
        Decision::InPlace(wait) | Decision::Wait(wait) => wait,
        Decision::Dead(_) => Duration::ZERO,
    }
}

proptest! {
    #![proptest_config(super::cases(2_000))]

    /// Shown by: one attempt more; waits up to twice the cap; jitter that lengthened; jitter twice
    /// what is set.
    #[test]
    fn a_schedule_ends_after_its_attempts_and_every_wait_is_within_its_jitter_and_the_cap(
        policy in policy(),
        chances in prop::collection::vec(chance(), 42),
    ) {
        prop_assert_eq!(policy.validate(), Ok(()));
        let (mut spent, mut full, mut failed) = (Duration::ZERO, policy.base.as_secs_f64(), 0);
        loop {
            failed += 1;
            prop_assert!(policy.allows(failed), "an attempt that was promised may begin");
            let decision = policy.next(failed, Asked::Nothing, chances[failed as usize]);
            spent += wait_of(decision);
            let late = policy.next(failed, Asked::NotInPlace, chances[failed as usize]);
            prop_assert!(!matches!(late, Decision::InPlace(_)), "its lane would stand once more");
            match decision {
                Decision::Dead(death) => {
                    prop_assert_eq!((death, failed), (ATTEMPTS, policy.attempts_max));
                    break;
                }
                Decision::InPlace(wait) => {
                    prop_assert!(failed <= policy.in_place);
                    prop_assert_eq!(wait, policy.in_place_delay);
                }
                Decision::Wait(wait) => {
                    prop_assert!(failed > policy.in_place);
                    let whole = full.min(policy.cap.as_secs_f64());
                    let wait = wait.as_secs_f64();
                    // Never before its time less the jitter, never after it. A nanosecond for the
                    // arithmetic.
                    prop_assert!(wait <= whole + 1e-9 && wait >= whole * (1.0 - policy.jitter) - 1e-9, "{} of {}", wait, whole);
                    full *= policy.multiplier;
                }
            }
        }
        prop_assert!(spent <= policy.longest(), "{:?} of {:?}", spent, policy.longest());
        prop_assert!(!policy.allows(failed + 1));
        // And it stays dead, however it is asked.
        for asked in [Asked::Nothing, Asked::NotInPlace, Asked::After(Duration::ZERO), Asked::NoRetry] {
            prop_assert!(matches!(policy.next(failed + 1, asked, chances[0]), Decision::Dead(_)));
        }
    }

    /// Shown by: a multiplier that divided.
    #[test]
    fn waits_grow_with_the_attempts_where_chance_is_the_same(policy in policy(), chance in chance()) {
        let waits = (policy.in_place + 1..policy.attempts_max).map(|failed| wait_of(policy.next(failed, Asked::Nothing, chance)));
        let waits: Vec<Duration> = waits.collect();
        prop_assert!(waits.is_sorted(), "{:?}", waits);
    }

    /// Shown by: a time that was asked for and given without the cap.
    #[test]
    fn a_time_that_a_handler_asks_for_is_kept_up_to_the_cap_and_counts(
        policy in policy(),
        failed in 1_u32..45,
        asked in 0_u64..10_000_000,
        chance in chance(),
    ) {
        let asked = Duration::from_millis(asked);
        let decision = policy.next(failed, Asked::After(asked), chance);
        let spent = Decision::Dead(ATTEMPTS);
        let expected = if failed >= policy.attempts_max { spent } else { Decision::Wait(asked.min(policy.cap)) };
        prop_assert_eq!(decision, expected);
        prop_assert_eq!(policy.next(failed, Asked::NoRetry, chance), Decision::Dead(TERMINAL));
    }

    /// Shown by: a pause that began at its whole.
    #[test]
    fn pauses_are_between_half_and_all_of_what_doubles_up_to_the_longest(
        first in 1_u64..10_000,
        longest in 1_u64..1_000_000,
        failures in 1_u32..80,
        chance in chance(),
    ) {
        let (first, longest) = (Duration::from_millis(first), Duration::from_millis(longest));
        let whole = first.checked_mul(1_u32.checked_shl(failures - 1).unwrap_or(u32::MAX)).unwrap_or(longest).min(longest);
        let pause = pause(first, longest, failures, chance);
        prop_assert!(pause <= whole && pause * 2 + Duration::from_nanos(2) >= whole, "{:?} of {:?}", pause, whole);
    }
}
