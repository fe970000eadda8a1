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
            // No answer would ever be replayed.
            Err(Invalid::new("`ttl` must be longer than zero"))
        } else if self.body > self.ttl {
            Err(Invalid::new("`body` must not be longer than `ttl`: nothing is replayed after it"))
        } else if self.metadata < self.ttl {
            // The record would be deleted while its answer must still be replayed.
            Err(Invalid::new("`metadata` must be at least as long as `ttl`"))
        } else {
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
