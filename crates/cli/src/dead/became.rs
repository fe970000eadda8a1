//! Waits for what becomes of messages that were redriven: handled, sent, or failed again.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use chrono::{DateTime, Utc};

use super::{BATCH, State, states};
use oncebox::app::AppError;
use oncebox::store::{DeadFilter, DeadMessage, DeadPlace, DeadState, Duties};

/// What became of a message that was redriven.
pub(super) enum Became {
    /// It is gone from the list, because its consumer handled it.
    Handled,
    Sent,
    /// It is not known yet what became of it.
    Open,
    /// It failed again. It has this state now, and this error. Where it waits, it is tried again.
    Failed(DeadState, String),
}

impl Became {
    pub(super) fn is_well(&self) -> bool {
        matches!(self, Self::Handled | Self::Sent)
    }

    /// Whether more time may still change it.
    pub(super) fn is_open(&self) -> bool {
        matches!(self, Self::Open | Self::Failed(DeadState::Waiting, _))
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

/// Waits until each message is gone, or failed and has no next try, at most for `wait` and one last
/// look at each. It looks at a hundred messages at once. A failed try alone ends nothing: the first
/// ones follow each other quickly. `last_tries` has the last try of each before the redrive.
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
        for some in last_tries.keys().cloned().collect::<Vec<_>>().chunks(BATCH) {
            let is_over = tokio::time::Instant::now() >= until;
            let mut messages = all_found(store, some.to_vec()).await?;
            // The list is read state by state: a message that dies between two of these reads is in
            // neither. So a message is gone only if a second look misses it too.
            let missed: Vec<_> = some.iter().filter(|number| !messages.contains_key(*number)).cloned().collect();
            if !missed.is_empty() {
                messages.extend(all_found(store, missed).await?);
            }
            for number in some {
                let now = match messages.get(number) {
                    None if number.starts_with('o') => Became::Sent,
                    None => Became::Handled,
                    Some(message) => {
                        let before = last_tries.get(number).copied().flatten();
                        failed_since(message, before).map_or(Became::Open, |error| Became::Failed(message.state, error))
                    }
                };
                if is_over || !now.is_open() {
                    last_tries.remove(number);
                    became.insert(number.clone(), now);
                }
            }
        }
        if last_tries.is_empty() {
            return Ok(became);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// The messages with these numbers, in any state.
async fn all_found(store: &dyn Duties, numbers: Vec<String>) -> Result<HashMap<String, DeadMessage>, AppError> {
    let filter = DeadFilter { states: states(None), limit: numbers.len(), numbers, ..DeadFilter::default() };
    Ok(store.dead(&filter).await?.into_iter().map(|message| (message.number.clone(), message)).collect())
}

/// The error of a try that failed after this last one; `None` where there was no such try. SQLite
/// keeps no history of the outbox. There the redrive left a request, and the relay takes it away
/// with the row, or with the state and the reason of a try that failed. A row that is only to be
/// sent alone has no reason.
fn failed_since(message: &DeadMessage, before: Option<DateTime<Utc>>) -> Option<String> {
    let tried = message.history.last().filter(|entry| before < Some(entry.at));
    let is_tried = message.place == DeadPlace::Outbox && message.requested.is_none();
    tried.map(|entry| entry.error.clone()).or_else(|| message.error.clone().filter(|_| is_tried))
}
