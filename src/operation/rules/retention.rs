//! Pure: no I/O, no clock.
//! How long records and bodies are kept, and when they may be forgotten (O3, O23, M97 to M101).
//!
//! Guarantees:
//!
//! * Every lifetime counts from the outcome. An operation that was recovered on the third day is
//!   kept from that day on.
//! * The body lives at most as long as the answer is replayed, and the metadata at least as long.
//!   So a late retry is recognised as late, and another command under the key as another one.
//!
//! Not here: which rows a purge removes and the bound that it records (`store`, where a suite
//! checks every adapter), and the verdict on a key's time,
//! [`horizon::judge`](crate::inbox::rules::horizon::judge).

use std::time::Duration;

use crate::error::Invalid;
use crate::inbox::rules::horizon::{Age, Bounds, Verdict, judge};
use crate::time::db_time::DbTime;

/// Lifetimes of an operation's records, counted from the outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retention {
    /// How long an answer is replayed. This time is published. Default 24 h.
    pub ttl: Duration,
    /// How long the answer's body is kept. Default 24 h, as `ttl`.
    pub body: Duration,
    /// How long the metadata is kept. Default 7 days.
    pub metadata: Duration,
}

impl Default for Retention {
    fn default() -> Self {
        let day = Duration::from_secs(86_400);
        Self { ttl: day, body: day, metadata: day * 7 }
    }
}

impl Retention {
    /// Refuses lifetimes that contradict each other.
    pub(crate) fn validate(&self) -> Result<(), Invalid> {
        if self.ttl.is_zero() {
            Err(Invalid::new("`ttl` must be longer than zero"))
        } else if self.body > self.ttl {
            Err(Invalid::new("`body` must not be longer than `ttl`: nothing is replayed after it"))
        } else if self.metadata < self.ttl {
            Err(Invalid::new("`metadata` must be at least as long as `ttl`"))
        } else {
            Ok(())
        }
    }
}

/// What the time inside a key means when there is no record of it (O23).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KeyAge {
    /// The key may be used.
    Fine,
    /// A record of the key may have been purged: `IDEMPOTENCY_KEY_EXPIRED`.
    TooOld,
    /// The time lies beyond database time and skew: `IDEMPOTENCY_KEY_INVALID`.
    FromTheFuture,
    /// The key carries no time, so its age is not known.
    Untimed,
}

impl KeyAge {
    /// Judges the time of a key that has no record.
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
    use super::super::record::tests::at;
    use super::*;

    const SKEW: Duration = Duration::from_secs(60);
    const RETENTION: Retention =
        Retention { ttl: Duration::from_secs(100), body: Duration::from_secs(50), metadata: Duration::from_secs(200) };

    // Shown by: dropping each comparison.
    #[test]
    fn m99_lifetimes_that_contradict_each_other_are_refused() {
        let second = Duration::from_secs(1);
        assert_eq!(Retention::default().validate(), Ok(()));
        for (retention, name) in [
            (Retention { ttl: Duration::ZERO, ..RETENTION }, "`ttl`"),
            (Retention { body: RETENTION.ttl + second, ..RETENTION }, "`body`"),
            (Retention { metadata: RETENTION.ttl - second, ..RETENTION }, "`metadata`"),
        ] {
            let why = retention.validate().expect_err(name).to_string();
            assert!(why.starts_with(name), "{why}");
        }
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
