//! Waits for what becomes of messages that were redriven: handled, sent, or failed again.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use chrono::{DateTime, Utc};

use super::{State, found};
use oncebox::app::AppError;
use oncebox::store::{DeadState, Duties};

/// What became of a message that was redriven.
pub(super) enum Became {
    /// It is gone from the list, because its consumer handled it.
    Handled,
    Sent,
    /// It is not known yet what became of it.
    Open,
    /// It failed again. It has this state now, and this error.
    Failed(DeadState, String),
}

impl Became {
    pub(super) fn is_well(&self) -> bool {
        matches!(self, Self::Handled | Self::Sent)
    }
}

impl std::fmt::Display for Became {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Handled => f.write_str("handled"),
            Self::Sent => f.write_str("sent"),
            Self::Open => f.write_str("released, and not tried yet"),
            Self::Failed(state, error) => write!(f, "{} again: {error}", State::of(*state)),
        }
    }
}

/// Waits until each message is gone or was tried again, at most for `wait`. `last_tries` has the
/// last try of each before the redrive.
pub(super) async fn what_became(
    store: &dyn Duties,
    mut last_tries: HashMap<String, Option<DateTime<Utc>>>,
    wait: Duration,
) -> Result<BTreeMap<String, Became>, AppError> {
    if wait.is_zero() {
        return Ok(last_tries.into_keys().map(|number| (number, Became::Open)).collect());
    }
    let until = tokio::time::Instant::now() + wait;
    let mut became = BTreeMap::new();
    loop {
        let is_over = tokio::time::Instant::now() >= until;
        for number in last_tries.keys().cloned().collect::<Vec<_>>() {
            // The list is read state by state: a message that dies between two of these reads is in
            // neither. So a message is gone only if a second look misses it too.
            let message = match found(store, &number).await? {
                None => found(store, &number).await?,
                message => message,
            };
            let now = match message {
                None if number.starts_with('o') => Became::Sent,
                None => Became::Handled,
                Some(message) => match message.history.last() {
                    Some(entry) if last_tries.get(&number).is_some_and(|before| *before < Some(entry.at)) => {
                        Became::Failed(message.state, entry.error.clone())
                    }
                    _ if is_over => Became::Open,
                    _ => continue,
                },
            };
            last_tries.remove(&number);
            became.insert(number, now);
        }
        if last_tries.is_empty() {
            return Ok(became);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
