//! How long what is remembered, and when it may be forgotten (O3, O23, M97 to M101).
//!
//! Guarantees:
//!
//! * Every time counts from the outcome. An operation that was recovered on the third day is
//!   remembered from then.
//! * The body lives at most as long as the answer is replayed, and the metadata at least as long:
//!   so a late retry is seen as late, and another command under the key as another.
//!
//! Not here: what a purge takes, and the bound that it records (`store`, whose suite holds every
//! adapter to it), and the verdict on a key's time, which is
//! [`horizon::judge`](crate::policy::horizon::judge).

use std::time::Duration;

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
    use super::*;

    const SKEW: Duration = Duration::from_secs(60);
    const RETENTION: Retention =
        Retention { ttl: Duration::from_secs(100), body: Duration::from_secs(50), metadata: Duration::from_secs(200) };

    fn at(seconds: i64) -> DbTime {
        DbTime::from_millis(seconds * 1_000)
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
    }
}
