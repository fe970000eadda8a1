//! How long what is remembered, and when it may be forgotten (O3, O23, M97 to M101).
//!
//! Guarantees:
//!
//! * Every time counts from the outcome. An operation that was recovered on the third day is remembered from then.
//! * The body lives at most as long as the answer is replayed, and the metadata at least as long: so a late retry is
//!   seen as late, and another command under the key as another.
//! * Only a terminal record is ever purged, whatever its age (M100).
//! * A purge records a bound that lies above the time of every v7 key that it took, so that under `Reject` a late retry
//!   is recognised when nothing is left of its record. Without a purge, nothing is too old.
//!
//! Not here: the batches (`store`), and the verdict on a key's time, which is
//! [`horizon::judge`](crate::policy::horizon::judge).

use std::time::Duration;

use super::record::{Record, StoredBody};
use crate::policy::db_time::DbTime;
use crate::policy::horizon::{Age, Bounds, Verdict, judge};

/// Lifetimes of an operation's records, each from the outcome on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retention {
    /// How long an answer is replayed; it is published. Default 24 h.
    pub ttl: Duration,
    /// How long the answer's body is kept. Default as `ttl`.
    pub body: Duration,
    /// How long the metadata is kept. Default 7 days.
    pub metadata: Duration,
}

/// Lifetimes that contradict each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RetentionError {
    /// Nothing would ever be replayed.
    #[error("`ttl` must be longer than zero")]
    NoTtl,
    /// A body that nobody can get.
    #[error("`body` must not be longer than `ttl`: nothing is replayed after it")]
    BodyBeyondTtl,
    /// The record would go while its answer is promised.
    #[error("`metadata` must be at least as long as `ttl`")]
    MetadataBelowTtl,
}

/// What a cleaner may do with a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cleanup {
    /// Nothing.
    Keep,
    /// Take the body away and leave [`Tombstone::Purged`](super::record::Tombstone::Purged).
    DropBody,
    /// Take the record away, and raise the operation's purge bound in the same transaction.
    Purge,
}

impl Default for Retention {
    fn default() -> Self {
        let day = Duration::from_secs(86_400);
        Self { ttl: day, body: day, metadata: day * 7 }
    }
}

impl Retention {
    /// Checks the lifetimes.
    ///
    /// # Errors
    ///
    /// Those that contradict each other.
    pub fn validate(&self) -> Result<(), RetentionError> {
        if self.ttl.is_zero() {
            Err(RetentionError::NoTtl)
        } else if self.body > self.ttl {
            Err(RetentionError::BodyBeyondTtl)
        } else if self.metadata < self.ttl {
            Err(RetentionError::MetadataBelowTtl)
        } else {
            Ok(())
        }
    }

    /// What is written as `expires_at` with an outcome, of claim, body and operation alike (O3).
    #[must_use]
    pub fn expires_at(&self, outcome_at: DbTime) -> DbTime {
        outcome_at.after(self.ttl)
    }

    /// What a cleaner may do with a record now.
    #[must_use]
    pub fn cleanup(&self, record: &Record, now: DbTime) -> Cleanup {
        let (true, Some(outcome_at)) = (record.state.is_terminal(), record.outcome_at) else { return Cleanup::Keep };
        // What was promised when the outcome was written holds, also when the settings were shortened since.
        let promised = record.expires_at.is_none_or(|at| now <= at);
        let has_body = record.answer.as_ref().is_some_and(|answer| answer.body == StoredBody::Kept);
        if !promised && now > outcome_at.after(self.metadata) {
            Cleanup::Purge
        } else if has_body && now > outcome_at.after(self.body) {
            Cleanup::DropBody
        } else {
            Cleanup::Keep
        }
    }

    /// The time before which a record must have had its outcome to be purged now: the first condition of the batch.
    #[must_use]
    pub fn purge_outcomes_before(&self, now: DbTime) -> DbTime {
        now.before(self.metadata)
    }

    /// The bound that a purge records for its operation: every key whose time lies below it may have been purged. A key
    /// is at most `id_skew` younger than the claim of its record, and the claim is older than the outcome. A bound is
    /// never lowered.
    #[must_use]
    pub fn purge_bound(&self, recorded: Option<DbTime>, now: DbTime, id_skew: Duration) -> DbTime {
        let bound = self.purge_outcomes_before(now).after(id_skew);
        recorded.map_or(bound, |recorded| recorded.max(bound))
    }
}

/// What the time inside a key says, where there is no record of it (O23).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KeyAge {
    /// Nothing speaks against it.
    Fine,
    /// A record of it may have been purged: `IDEMPOTENCY_KEY_EXPIRED`.
    TooOld,
    /// Beyond database time and skew: `IDEMPOTENCY_KEY_INVALID`, naming the clock.
    FromTheFuture,
    /// It carries no time: nothing can be said.
    Untimed,
}

impl KeyAge {
    /// The age of a key whose record is not there.
    #[must_use]
    pub fn of(time: Option<DbTime>, bounds: Bounds) -> Self {
        let Some(time) = time else { return Self::Untimed };
        match judge(Age::InId(time), bounds) {
            Verdict::GoOn => Self::Fine,
            Verdict::TooOld => Self::TooOld,
            Verdict::FromTheFuture => Self::FromTheFuture,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::record::{Mode, State, StoredAnswer, tests::any_record};
    use super::*;

    const SKEW: Duration = Duration::from_secs(60);
    const RETENTION: Retention =
        Retention { ttl: Duration::from_secs(100), body: Duration::from_secs(50), metadata: Duration::from_secs(200) };

    fn at(seconds: i64) -> DbTime {
        DbTime::from_millis(seconds * 1_000)
    }

    /// A record whose outcome came at that second.
    fn ended(state: State, outcome: i64) -> Record {
        let outcome_at = Some(at(outcome));
        let answer = Some(StoredAnswer { status: 201, schema_version: 1, body: StoredBody::Kept });
        Record { outcome_at, expires_at: outcome_at.map(|at| RETENTION.expires_at(at)), answer, ..any_record(state) }
    }

    // Shown by: counting from `created_at`, which is 0 here.
    #[test]
    fn o3_every_lifetime_counts_from_the_outcome() {
        let recovered_on_day_three = ended(State::Completed, 259_200);
        let cleanup = |after: i64| RETENTION.cleanup(&recovered_on_day_three, at(259_200 + after));
        assert_eq!(recovered_on_day_three.state_at(at(259_300)), State::Completed);
        assert_eq!([0, 50, 51, 200, 201].map(cleanup).map(|cleanup| cleanup as u8), [0, 0, 1, 1, 2]);
        assert_eq!(cleanup(51), Cleanup::DropBody);
        assert_eq!(cleanup(201), Cleanup::Purge);
    }

    // Shown by: leaving `is_terminal` out (an IN_PROGRESS row that a bug gave an outcome time).
    #[test]
    fn m100_only_a_terminal_record_is_ever_cleaned_whatever_its_age() {
        for state in State::STORED {
            let purged = RETENTION.cleanup(&ended(state, 0), at(1_000_000_000)) == Cleanup::Purge;
            assert_eq!(purged, state.is_terminal(), "{state}");
        }
        let no_outcome = Record { outcome_at: None, ..ended(State::Completed, 0) };
        assert_eq!(RETENTION.cleanup(&no_outcome, at(1_000_000_000)), Cleanup::Keep);
    }

    // Shown by: purging by `metadata` alone.
    #[test]
    fn m98_a_time_that_was_promised_holds_when_the_settings_are_shortened() {
        let record = Record { expires_at: Some(at(1_000)), ..ended(State::Completed, 0) };
        assert_eq!(RETENTION.cleanup(&record, at(1_000)), Cleanup::DropBody);
        assert_eq!(RETENTION.cleanup(&record, at(1_001)), Cleanup::Purge);
    }

    // Shown by: dropping each comparison.
    #[test]
    fn m99_lifetimes_that_contradict_each_other_are_refused() {
        let second = Duration::from_secs(1);
        assert_eq!(Retention::default().validate(), Ok(()));
        assert_eq!(Retention { ttl: Duration::ZERO, ..RETENTION }.validate(), Err(RetentionError::NoTtl));
        let body = Retention { body: RETENTION.ttl + second, ..RETENTION };
        assert_eq!(body.validate(), Err(RetentionError::BodyBeyondTtl));
        let metadata = Retention { metadata: RETENTION.ttl - second, ..RETENTION };
        assert_eq!(metadata.validate(), Err(RetentionError::MetadataBelowTtl));
        assert_eq!(Retention { body: RETENTION.ttl, metadata: RETENTION.ttl, ..RETENTION }.validate(), Ok(()));
    }

    #[test]
    fn o23_without_a_purge_nothing_is_too_old_and_a_key_without_time_says_nothing() {
        let bounds = |purged_below| Bounds { purged_below, now: at(10_000), id_skew: SKEW };
        assert_eq!(KeyAge::of(Some(at(0)), bounds(None)), KeyAge::Fine);
        assert_eq!(KeyAge::of(Some(at(9)), bounds(Some(at(10)))), KeyAge::TooOld);
        assert_eq!(KeyAge::of(Some(at(10)), bounds(Some(at(10)))), KeyAge::Fine);
        assert_eq!(KeyAge::of(Some(at(10_061)), bounds(None)), KeyAge::FromTheFuture);
        assert_eq!(KeyAge::of(None, bounds(Some(at(10)))), KeyAge::Untimed);
        assert_eq!(RETENTION.purge_bound(Some(at(9_999)), at(10_000), SKEW), at(9_999), "a bound is never lowered");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        // The one thing that must never be: the record is gone, and the late retry of its key looks new. Shown by: a
        // bound without the skew; one that lies further back.
        #[test]
        fn o23_a_key_whose_record_was_purged_is_too_old_for_ever(
            claimed in 0_i64..1_000, ran in 0_i64..60, skewed in -60_i64..=60, waited in 195_i64..300,
            later in 0_i64..10_000,
        ) {
            let record = Record { mode: Mode::Phased, ..ended(State::Completed, claimed + ran) };
            let key_time = at(claimed + skewed);
            let now = at(claimed + ran + waited);
            if RETENTION.cleanup(&record, now) == Cleanup::Purge {
                prop_assert!(record.outcome_at < Some(RETENTION.purge_outcomes_before(now)));
                let bound = RETENTION.purge_bound(None, now, SKEW);
                let later = at(claimed + ran + waited + later);
                let bounds = Bounds { purged_below: Some(bound), now: later, id_skew: SKEW };
                prop_assert_eq!(KeyAge::of(Some(key_time), bounds), KeyAge::TooOld);
            }
        }
    }
}
