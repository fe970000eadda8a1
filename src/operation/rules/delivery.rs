//! Pure: no I/O, no clock.
//! The state of something that is sent to others: an e-mail or a webhook (O28).
//!
//! Guarantees: `sent` and `refused` are used only for what is proven. When a try may have arrived,
//! the state holds the number of such tries and is never `refused` or `waiting`.
//!
//! Not here: what proves an outcome ([`provider`](super::provider)), and the senders (`email`,
//! `operation::phased`).

use std::fmt;

use super::provider::Settled;

/// The state of an e-mail or a webhook.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Delivery {
    /// It was certainly not sent yet, and will be tried.
    Waiting,
    /// This many tries may each have arrived. It will be tried again.
    PossiblySent(u32),
    /// The receiver took it, and that is proven.
    Sent,
    /// It was refused for good, and no try arrived.
    Refused,
    /// It was given up. A person may have it tried again, unless its operation has ended. This many
    /// tries may each have arrived.
    Dead(u32),
}

impl Delivery {
    /// The state, from what is proven, whether it was given up, and how many tries may have
    /// arrived.
    pub(crate) fn of(settled: Option<Settled>, given_up: bool, doubtful: u32) -> Self {
        match settled {
            Some(Settled::Succeeded) => Self::Sent,
            Some(Settled::Failed) => Self::Refused,
            None if given_up => Self::Dead(doubtful),
            None if doubtful > 0 => Self::PossiblySent(doubtful),
            None => Self::Waiting,
        }
    }

    /// Each state once, to show all labels.
    #[cfg(feature = "email")]
    pub(crate) const EACH: [Self; 5] = [Self::Waiting, Self::PossiblySent(0), Self::Sent, Self::Refused, Self::Dead(0)];

    /// How many tries may each have arrived, of what is neither sent nor refused.
    #[cfg(feature = "email")]
    pub(crate) fn doubtful(self) -> u32 {
        match self {
            Self::PossiblySent(count) | Self::Dead(count) => count,
            Self::Waiting | Self::Sent | Self::Refused => 0,
        }
    }

    /// The word without its number, for labels.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::PossiblySent(_) => "possibly-sent",
            Self::Sent => "sent",
            Self::Refused => "refused",
            Self::Dead(_) => "dead",
        }
    }
}

impl fmt::Display for Delivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let times = |count: u32| if count == 1 { "once".to_owned() } else { format!("{count} times") };
        match *self {
            Self::PossiblySent(count) => write!(f, "possibly sent {}", times(count)),
            Self::Dead(count) if count > 0 => write!(f, "dead, possibly sent {}", times(count)),
            other => f.write_str(other.word()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Shown by: calling a message that was given up refused; losing the number of a dead one.
    #[test]
    fn o28_what_may_have_arrived_is_said_with_its_number() {
        let of = |settled, given_up, doubtful| Delivery::of(settled, given_up, doubtful).to_string();
        assert_eq!(of(None, false, 0), "waiting");
        assert_eq!(of(None, false, 1), "possibly sent once");
        assert_eq!(of(None, false, 3), "possibly sent 3 times");
        assert_eq!(of(None, true, 0), "dead");
        assert_eq!(of(None, true, 2), "dead, possibly sent 2 times");
        for (given_up, doubtful) in [(false, 0), (true, 0), (false, 3), (true, 3)] {
            assert_eq!(of(Some(Settled::Succeeded), given_up, doubtful), "sent");
            assert_eq!(of(Some(Settled::Failed), given_up, doubtful), "refused");
        }
    }
}
