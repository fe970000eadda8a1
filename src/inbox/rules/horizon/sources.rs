//! Pure: no I/O, no clock.
//! How late a duplicate can come, and so which horizon is long enough (R31).

use std::fmt;
use std::time::Duration;

use humantime::format_duration;

use super::TopicRetention;

/// The sources of duplicates, and how late a duplicate can come from each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sources {
    /// The longest retention of the consumer's topics; `None` if the broker does not report it.
    pub topic: Option<TopicRetention>,
    /// How long the outbox keeps proven rows. They can be sent again while they are kept.
    pub outbox: Duration,
    /// The maximum age of a waiting message.
    pub waiting: Duration,
    /// The maximum age at which a dead message may be redriven under its id.
    pub dead: Duration,
    /// How far a clock may be off. A time that a message states is believed only up to this.
    pub skew: Duration,
}

/// A horizon after which a duplicate can still come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HorizonTooShort {
    /// The horizon that was set.
    horizon: Duration,
    /// The duration that the horizon must exceed, with the skew included; `None` if only an inbox
    /// that never forgets is enough.
    needs: Option<Duration>,
    /// What can deliver a duplicate so late, in words.
    because: &'static str,
}

const TOPIC: &str = "a topic keeps records";
const UNLIMITED: &str = "a topic keeps records without limit";
const COMPACTED: &str = "a compacted topic keeps the last record of each key";
const OUTBOX: &str = "the outbox keeps proven rows";
const WAITING: &str = "messages may wait for a retry";
const DEAD: &str = "dead messages may be redriven";

impl Sources {
    /// Checks that a horizon is longer than any duplicate can take to come, plus the skew of
    /// clocks. The error names the source with the longest time.
    pub(crate) fn check(&self, horizon: Duration) -> Result<(), HorizonTooShort> {
        match self.longest() {
            (Some(needs), _) if horizon > needs => Ok(()),
            (needs, because) => Err(HorizonTooShort { horizon, needs, because }),
        }
    }

    fn longest(&self) -> (Option<Duration>, &'static str) {
        let topic = match self.topic {
            Some(TopicRetention::Unlimited) => return (None, UNLIMITED),
            Some(TopicRetention::Compacted) => return (None, COMPACTED),
            Some(TopicRetention::For(age)) => (age, TOPIC),
            None => (Duration::ZERO, TOPIC),
        };
        let others = [(self.outbox, OUTBOX), (self.waiting, WAITING), (self.dead, DEAD)];
        let (age, because) = others.into_iter().fold(topic, |one, other| if other.0 > one.0 { other } else { one });
        (Some(age.saturating_add(self.skew)), because)
    }
}

impl fmt::Display for HorizonTooShort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the inbox horizon of {} is too short: {}", format_duration(self.horizon), self.because)?;
        match self.needs {
            Some(needs) => {
                let needs = format_duration(needs);
                write!(f, " for so long that it must exceed {needs}; set a longer horizon, or `never`")
            }
            None => write!(f, "; set `horizon = \"never\"`"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(86_400);
    const SKEW: Duration = Duration::from_secs(60);

    #[test]
    fn r31_a_horizon_must_exceed_every_way_a_duplicate_can_come() {
        let sources = Sources {
            topic: Some(TopicRetention::For(DAY * 7)),
            outbox: DAY,
            waiting: DAY * 2,
            dead: DAY * 9,
            skew: SKEW,
        };
        let needs = DAY * 9 + SKEW;
        let short = |horizon, because| Err(HorizonTooShort { horizon, needs: Some(needs), because });
        assert_eq!(sources.check(DAY * 8), short(DAY * 8, DEAD));
        assert_eq!(sources.check(needs), short(needs, DEAD), "it must exceed");
        assert_eq!(sources.check(DAY * 10), Ok(()));
        for (sources, because) in [
            (Sources { topic: Some(TopicRetention::For(DAY * 30)), ..sources }, TOPIC),
            (Sources { outbox: DAY * 30, ..sources }, OUTBOX),
            (Sources { waiting: DAY * 30, ..sources }, WAITING),
        ] {
            assert_eq!(sources.check(DAY * 20).map_err(|error| error.because), Err(because));
        }
    }

    #[test]
    fn r31_never_is_the_only_horizon_where_a_topic_is_compacted_or_unlimited() {
        for (topic, because) in [(TopicRetention::Compacted, COMPACTED), (TopicRetention::Unlimited, UNLIMITED)] {
            let either = topic.or_longer(TopicRetention::For(DAY));
            assert_eq!(either, TopicRetention::For(DAY).or_longer(topic));
            let sources = Sources { topic: Some(either), outbox: DAY, waiting: DAY, dead: DAY, skew: SKEW };
            let error = HorizonTooShort { horizon: DAY * 9_999, needs: None, because };
            assert_eq!(sources.check(DAY * 9_999), Err(error));
            assert!(error.to_string().contains("never"));
        }
    }
}
