//! Pure: no I/O, no clock.
//! How long the inbox must remember message ids, and which unknown messages are too old or from the
//! future to be called new (R31).
//!
//! Guarantees:
//!
//! * A duplicate whose inbox row was purged is *too old*, never new (G8). A message is too old when
//!   its time is below what this consumer has purged: the row that could tell is gone. A consumer
//!   that never purged calls no message too old. A message without any time counts as new, because
//!   nothing tells how old it is.
//! * An id whose time lies beyond database time and skew is *from the future*. Its inbox row would
//!   outlive every purge bound.
//! * A horizon is refused, with its reason, when a duplicate can still come after it.
//!
//! Not here: the lookup in the inbox, which comes first (a known id is a duplicate, however old);
//! reading the time out of an id (`message`: only a canonical UUID v7 has one); and rows of
//! messages that are waiting or dead, which no purge removes (`store`).

#[cfg(feature = "consumer")]
mod sources;

use std::time::Duration;

#[cfg(feature = "consumer")]
pub(crate) use self::sources::{HorizonTooShort, Sources};
use crate::time::db_time::DbTime;

/// The time from which the age of a message is known, when the inbox does not know the message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Age {
    /// The time inside the id. The inbox row of such a message is purged when this time and its
    /// time of receipt are both below the purge bound.
    InId(DbTime),
    /// `ce_time`, or the broker's record time, for an id without a time. The inbox row of such a
    /// message is purged by its time of receipt.
    Stated(DbTime),
    /// There is no time: an old duplicate cannot be told from a new message, and runs again.
    /// `doctor` says so of each consumer with a horizon.
    Unknown,
}

/// What the consumer's database returned with the lookup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Rows below this time were purged for this consumer; `None` if it never purged.
    pub purged_below: Option<DbTime>,
    /// Database time, not later than the receipt of a row that is inserted after this read.
    pub now: DbTime,
    /// How far a clock may be off.
    pub id_skew: Duration,
}

/// How a message that the inbox does not know is treated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The message is new: its handler runs.
    GoOn,
    /// The message is dead: the row that could tell whether it is a duplicate was purged.
    TooOld,
    /// The message is dead: its time lies beyond database time and skew.
    FromTheFuture,
}

impl Verdict {
    /// The reason that is stored with a dead message; `None` for a new message.
    pub(crate) fn reason(self) -> Option<&'static str> {
        match self {
            Self::GoOn => None,
            Self::TooOld => Some("too-old"),
            Self::FromTheFuture => Some("from-the-future"),
        }
    }

    /// Whether this stored reason comes from a verdict of this module. The inbox row of such a
    /// message was removed.
    pub(crate) fn left_no_inbox_row(reason: &str) -> bool {
        [Self::TooOld, Self::FromTheFuture].iter().any(|verdict| verdict.reason() == Some(reason))
    }
}

/// Decides on a message that the inbox does not know.
#[must_use]
pub fn judge(age: Age, bounds: Bounds) -> Verdict {
    let (time, certain_from) = match age {
        Age::InId(time) => (time, bounds.purged_below),
        // Rows without a time in their id are purged by their time of receipt. A stated time may be
        // later than the receipt by up to the skew, so only times from the bound plus the skew on
        // are certain.
        Age::Stated(time) => (time, bounds.purged_below.map(|bound| bound.after(bounds.id_skew))),
        Age::Unknown => return Verdict::GoOn,
    };
    if time > bounds.now.after(bounds.id_skew) {
        Verdict::FromTheFuture
    } else if certain_from.is_some_and(|from| time < from) {
        Verdict::TooOld
    } else {
        Verdict::GoOn
    }
}

/// Decides whether a purge up to `below` may remove a row. Returns the bound that must be recorded
/// before the row is gone or in the same transaction, or `None` if the row must stay. The time in
/// the row's id, if there is one, and the time of receipt must both be below `below`. So a message
/// that is redriven long after its time is remembered for as long as any other.
///
/// The bound is just above the time of the row, not the bound of the whole purge. A consumer that
/// was away for longer than its horizon has purged nothing that came in the meantime, and must not
/// call it too old.
#[must_use]
pub(crate) fn purge_row(in_id: Option<DbTime>, received: DbTime, below: DbTime) -> Option<DbTime> {
    let is_past = received < below && in_id.is_none_or(|time| time < below);
    // In whole milliseconds, like the times in ids.
    is_past.then(|| DbTime::from_millis(in_id.unwrap_or(received).millis().saturating_add(1)))
}

/// Rows older than the returned time may be removed by a purge that begins now. The time is in
/// whole milliseconds, like the times in ids.
pub(crate) fn purge_bound(horizon: Duration, now: DbTime) -> DbTime {
    DbTime::from_millis(now.before(horizon).millis())
}

/// How long a topic keeps records that a consumer may read again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TopicRetention {
    /// The topic keeps a record at most this long.
    For(Duration),
    /// The topic has no limit in time, or is limited by size only.
    Unlimited,
    /// The topic keeps the last record of each key for ever.
    Compacted,
}

impl TopicRetention {
    /// The longer retention of two topics, because a duplicate may come from either.
    pub(crate) fn or_longer(self, other: Self) -> Self {
        match (self, other) {
            (Self::For(one), Self::For(other)) => Self::For(one.max(other)),
            (Self::For(_), limitless) | (limitless, _) => limitless,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SKEW: Duration = Duration::from_secs(60);

    fn at(seconds: i64) -> DbTime {
        DbTime::from_millis(seconds * 1_000)
    }

    fn bounds(purged_below: Option<DbTime>) -> Bounds {
        Bounds { purged_below, now: at(10_000), id_skew: SKEW }
    }

    #[test]
    fn r31_an_id_below_what_was_purged_is_too_old_and_one_at_the_bound_is_not() {
        let bounds = bounds(Some(at(5_000)));
        assert_eq!(judge(Age::InId(at(4_999)), bounds), Verdict::TooOld);
        assert_eq!(judge(Age::InId(at(5_000)), bounds), Verdict::GoOn);
    }

    #[test]
    fn r31_a_consumer_without_a_purge_calls_nothing_too_old() {
        for age in [Age::InId(at(-9_000)), Age::Stated(at(-9_000)), Age::Unknown] {
            assert_eq!(judge(age, bounds(None)), Verdict::GoOn);
        }
    }

    #[test]
    fn r31_a_time_beyond_database_time_and_skew_is_from_the_future() {
        for age in [Age::InId, Age::Stated] {
            assert_eq!(judge(age(at(10_060)), bounds(None)), Verdict::GoOn);
            assert_eq!(judge(age(DbTime { micros: at(10_060).micros + 1 }), bounds(None)), Verdict::FromTheFuture);
        }
    }

    #[test]
    fn g8_a_stated_time_is_trusted_only_up_to_the_skew() {
        // The message was received 60 s before the time that it states. So a purge below 5,000
        // removed its row although it states 5,059.
        let bounds = bounds(Some(at(5_000)));
        assert_eq!(judge(Age::Stated(at(5_059)), bounds), Verdict::TooOld);
        assert_eq!(judge(Age::Stated(at(5_060)), bounds), Verdict::GoOn);
    }

    #[test]
    fn r31_a_row_goes_when_its_id_and_its_receipt_are_past_and_leaves_a_bound_above_its_own_time() {
        let (early, bound, late) = (at(4_000), at(5_000), at(5_001));
        let own = |time: DbTime| Some(DbTime::from_millis(time.millis() + 1));
        assert_eq!(purge_row(Some(early), at(4_500), bound), own(early));
        assert_eq!(purge_row(None, early, bound), own(early));
        assert_eq!(purge_row(Some(early), late, bound), None, "it was redriven: a second copy is a duplicate");
        assert_eq!(purge_row(Some(late), early, bound), None, "its time has not passed");
        assert_eq!((purge_row(Some(bound), early, bound), purge_row(None, bound, bound)), (None, None));
        let last = DbTime { micros: bound.micros - 1 };
        assert_eq!(purge_row(None, last, bound), Some(bound), "never above that of the purge");
    }

    #[test]
    fn a_purge_begins_a_horizon_before_now() {
        let now = DbTime { micros: at(10_000).micros + 999 };
        assert_eq!(purge_bound(SKEW, now), at(9_940));
    }
}
