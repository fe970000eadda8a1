//! Which deliveries are counted before they run, and which run alone, against the words of the rule
//! (R26).

use crate::inbox::rules::suspicion::{Facts, Run, Suspicion};
use proptest::prelude::*;

proptest! {
    #![proptest_config(super::cases(2_000))]

    /// Shown by: known deliveries that took from the count; a redelivered one that ran in the
    /// batch; one unknown more than may have been in flight.
    #[test]
    fn r26_counted_are_the_redelivered_and_the_first_unknown_ones_of_a_partition_that_was_not_closed(
        found_open in prop::option::of(0_usize..20),
        deliveries in prop::collection::vec((any::<bool>(), prop::bool::weighted(0.2), any::<bool>()), 0..60),
    ) {
        let mut suspicion = found_open.map_or_else(Suspicion::closed, Suspicion::found_open);
        let mut unknown = 0;
        for (known, redelivered, may_not_be_blamed) in deliveries {
            let among_first = !known && unknown < found_open.unwrap_or(0);
            let run = suspicion.judge(Facts { known, redelivered, may_not_be_blamed });
            let suspect = !known && (redelivered || among_first);
            let counted = if may_not_be_blamed { Run::Alone } else { Run::Counted };
            prop_assert_eq!(run, if suspect { counted } else { Run::InBatch });
            unknown += usize::from(!known);
            prop_assert_eq!(suspicion.is_active(), unknown < found_open.unwrap_or(0));
        }
    }
}
