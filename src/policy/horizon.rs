//! How long the inbox must remember, and what is too old or from the future to be judged by it (R31).
//!
//! Guarantees:
//!
//! * A duplicate whose inbox row was purged is *too old*, never new (G8): a time below what this consumer purged means
//!   that the answer is gone. A consumer that never purged calls nothing too old.
//! * An id from beyond the clock's skew is *from the future*: it would outlive every purge bound.
//! * A horizon within which a duplicate can still come is refused, and the reason is named.
//!
//! Not here: the lookup in the inbox, which comes first (a known id is a duplicate, however old), and reading the time
//! out of an id (`message`: only a canonical UUID v7 is timed).

use std::fmt;
use std::time::Duration;

use super::db_time::DbTime;

/// What tells the age of a message that the inbox does not know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Age {
    /// The time inside its id. Such rows are purged by this very time.
    InId(DbTime),
    /// `ce_time` or the broker's record time, for an id without time. Such rows are purged by the time of receipt.
    Stated(DbTime),
    /// Nothing: nothing can be promised, and `doctor` says so.
    Unknown,
}

/// What the consumer's database says at the lookup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Everything below it was purged for this consumer; `None` without a purge since its first start.
    pub purged_below: Option<DbTime>,
    /// Database time.
    pub now: DbTime,
    /// How far a clock may be off.
    pub id_skew: Duration,
}

/// What becomes of a message that the inbox does not know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It is new.
    GoOn,
    /// Dead: what could answer was purged.
    TooOld,
    /// Dead: its time lies beyond database time and skew.
    FromTheFuture,
}

/// The verdict on a message that the inbox does not know.
#[must_use]
pub fn judge(age: Age, bounds: Bounds) -> Verdict {
    let (time, certain_from) = match age {
        Age::InId(time) => (time, bounds.purged_below),
        // A stated time may run ahead of the time of receipt by the skew, and no more: else it is from the future.
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

/// How long inbox rows live.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Horizon {
    /// For ever. The default where a topic is compacted or unlimited.
    Never,
    /// For so long.
    After(Duration),
}

impl Horizon {
    /// The bound below which a purge that begins now may remove rows; `None` if it may remove none.
    #[must_use]
    pub fn purge_bound(self, now: DbTime) -> Option<DbTime> {
        match self {
            Self::Never => None,
            Self::After(age) => Some(now.before(age)),
        }
    }
}

/// How long a topic keeps what a consumer may read again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TopicRetention {
    /// At most so long.
    For(Duration),
    /// Without limit in time, or limited by size only.
    Unlimited,
    /// The last record of each key, for ever.
    Compacted,
}

/// Where a duplicate can still come from, and how late.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sources {
    /// The longest of the consumer's topics.
    pub topic: TopicRetention,
    /// Outbox rows that were proven can be sent again while they are kept.
    pub outbox: Duration,
    /// The age that a waiting message may reach.
    pub waiting: Duration,
    /// The age up to which a dead message may be redriven under its id.
    pub dead: Duration,
}

/// A horizon within which a duplicate can still come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HorizonTooShort {
    /// What was asked for.
    pub horizon: Duration,
    /// What it must exceed, or `None` if only [`Horizon::Never`] will do.
    pub needs: Option<Duration>,
    /// What asks for it.
    pub because: Because,
}

/// What keeps a duplicate for so long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Because {
    /// A topic keeps records for so long.
    TopicRetention,
    /// A topic keeps records without limit.
    TopicUnlimited,
    /// A topic keeps the last record of each key for ever.
    TopicCompacted,
    /// The outbox keeps proven rows for so long.
    OutboxRetention,
    /// Waiting messages may become so old.
    Waiting,
    /// Dead messages may become so old.
    Dead,
}

impl Sources {
    /// The horizon to take where none was asked for: never, or half as long again as the longest source.
    #[must_use]
    pub fn default_horizon(&self) -> Horizon {
        match self.longest() {
            (Some(age), _) => Horizon::After(age.saturating_add(age / 2).max(Duration::from_secs(1))),
            (None, _) => Horizon::Never,
        }
    }

    /// Whether a horizon exceeds every way in which a duplicate can come.
    ///
    /// # Errors
    ///
    /// The longest of those that it does not exceed.
    pub fn check(&self, horizon: Horizon) -> Result<(), HorizonTooShort> {
        let Horizon::After(horizon) = horizon else {
            return Ok(());
        };
        match self.longest() {
            (Some(needs), _) if horizon > needs => Ok(()),
            (needs, because) => Err(HorizonTooShort { horizon, needs, because }),
        }
    }

    fn longest(&self) -> (Option<Duration>, Because) {
        let topic = match self.topic {
            TopicRetention::Unlimited => return (None, Because::TopicUnlimited),
            TopicRetention::Compacted => return (None, Because::TopicCompacted),
            TopicRetention::For(age) => (age, Because::TopicRetention),
        };
        let others =
            [(self.outbox, Because::OutboxRetention), (self.waiting, Because::Waiting), (self.dead, Because::Dead)];
        let longer = |one: (Duration, Because), other: (Duration, Because)| {
            if other.0 > one.0 { other } else { one }
        };
        let (age, because) = others.into_iter().fold(topic, longer);
        (Some(age), because)
    }
}

impl fmt::Display for HorizonTooShort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.because {
            Because::TopicRetention => "a topic keeps records",
            Because::TopicUnlimited => "a topic keeps records without limit",
            Because::TopicCompacted => "a compacted topic keeps the last record of each key",
            Because::OutboxRetention => "the outbox keeps proven rows",
            Because::Waiting => "messages may wait for a retry",
            Because::Dead => "dead messages may be redriven",
        };
        write!(f, "the inbox horizon of {:?} is too short: {what}", self.horizon)?;
        match self.needs {
            Some(needs) => write!(f, " for {needs:?}; set a longer horizon"),
            None => write!(f, "; set `horizon = \"never\"`"),
        }
    }
}

impl std::error::Error for HorizonTooShort {}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(86_400);
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
            assert_eq!(judge(age(DbTime::from_micros(at(10_060).micros() + 1)), bounds(None)), Verdict::FromTheFuture);
        }
    }

    #[test]
    fn g8_a_stated_time_is_trusted_only_up_to_the_skew() {
        // Received 60 s before the time it states: its row went with a purge below 5,000 at a stated time of 5,059.
        let bounds = bounds(Some(at(5_000)));
        assert_eq!(judge(Age::Stated(at(5_059)), bounds), Verdict::TooOld);
        assert_eq!(judge(Age::Stated(at(5_060)), bounds), Verdict::GoOn);
    }

    #[test]
    fn r31_a_horizon_must_exceed_every_way_a_duplicate_can_come() {
        let sources = Sources { topic: TopicRetention::For(DAY * 7), outbox: DAY, waiting: DAY * 2, dead: DAY * 9 };
        let short = |horizon, because| Err(HorizonTooShort { horizon, needs: Some(DAY * 9), because });
        assert_eq!(sources.check(Horizon::After(DAY * 8)), short(DAY * 8, Because::Dead));
        assert_eq!(sources.check(Horizon::After(DAY * 9)), short(DAY * 9, Because::Dead), "it must exceed");
        assert_eq!(sources.check(Horizon::After(DAY * 10)), Ok(()));
        assert_eq!(sources.check(Horizon::Never), Ok(()));
        assert_eq!(sources.check(sources.default_horizon()), Ok(()));
        for (sources, because) in [
            (Sources { topic: TopicRetention::For(DAY * 30), ..sources }, Because::TopicRetention),
            (Sources { outbox: DAY * 30, ..sources }, Because::OutboxRetention),
            (Sources { waiting: DAY * 30, ..sources }, Because::Waiting),
        ] {
            assert_eq!(sources.check(Horizon::After(DAY * 20)).map_err(|error| error.because), Err(because));
        }
    }

    #[test]
    fn r31_never_is_the_only_horizon_and_the_default_where_a_topic_is_compacted_or_unlimited() {
        for (topic, because) in
            [(TopicRetention::Compacted, Because::TopicCompacted), (TopicRetention::Unlimited, Because::TopicUnlimited)]
        {
            let sources = Sources { topic, outbox: DAY, waiting: DAY, dead: DAY };
            let error = HorizonTooShort { horizon: DAY * 9_999, needs: None, because };
            assert_eq!(sources.check(Horizon::After(DAY * 9_999)), Err(error));
            assert!(error.to_string().contains("never"));
            assert_eq!(sources.check(Horizon::Never), Ok(()));
            assert_eq!(sources.default_horizon(), Horizon::Never);
        }
    }

    #[test]
    fn a_purge_begins_a_horizon_before_now_and_never_means_no_purge() {
        assert_eq!(Horizon::After(SKEW).purge_bound(at(10_000)), Some(at(9_940)));
        assert_eq!(Horizon::Never.purge_bound(at(10_000)), None);
    }
}
