//! Waits for what becomes of messages that were redriven: handled, sent, or failed again.

use std::collections::HashMap;
use std::time::Duration;

use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::{BATCH, State, states};
use oncebox::app::AppError;
use oncebox::store::{AuditEntry, DeadFilter, DeadMessage, DeadPlace, DeadState, Duties, OperatorAct};

/// How many acts on one message are searched for the one that discarded it, newest first.
const ACTS_MAX: usize = 100;

/// What is known of a message before it is redriven.
#[derive(Debug, Default)]
pub(super) struct Before {
    /// The id under which it is redriven.
    id: Uuid,
    last_try: Option<DateTime<Utc>>,
}

impl Before {
    pub(super) fn of(message: &DeadMessage, how: &OperatorAct) -> Self {
        let id = match how {
            OperatorAct::RedriveAs { id, .. } => *id,
            _ => message.message_id,
        };
        Self { id, last_try: message.history.last().map(|entry| entry.at) }
    }
}

/// What became of a message that was redriven.
pub(super) enum Became {
    /// It is gone from the list, because its consumer handled it.
    Handled,
    Sent,
    /// It is gone because this person discarded it meanwhile.
    Discarded(String),
    /// It is not known yet what became of it.
    Open,
    /// It failed again. It has this state now, and this error. Where it waits, it is tried again.
    Failed(DeadState, String),
}

impl Became {
    pub(super) fn is_well(&self) -> bool {
        matches!(self, Self::Handled | Self::Sent)
    }

    pub(super) fn has_failed(&self) -> bool {
        matches!(self, Self::Failed(..))
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
            Self::Discarded(by) => write!(f, "discarded meanwhile by {by}"),
            Self::Open => f.write_str("released, and not tried yet"),
            Self::Failed(state, error) => write!(f, "{} again: {error}", State::of(*state)),
        }
    }
}

/// Waits until each message is gone, or failed and has no next try, at most for `wait` and one last
/// look at each. It looks at a hundred messages at once. A failed try alone ends nothing: the first
/// ones follow each other quickly. `waited_for` has what is known of each before the redrive.
pub(super) async fn what_became(
    store: &dyn Duties,
    mut waited_for: HashMap<String, Before>,
    wait: Duration,
) -> Result<HashMap<String, Became>, AppError> {
    if wait.is_zero() {
        return Ok(waited_for.into_keys().map(|number| (number, Became::Open)).collect());
    }
    let until = tokio::time::Instant::now() + wait;
    let mut became = HashMap::new();
    loop {
        for some in waited_for.keys().cloned().collect::<Vec<_>>().chunks(BATCH) {
            let is_over = tokio::time::Instant::now() >= until;
            let mut messages = all_found(store, some.to_vec()).await?;
            // The list is read state by state: a message that dies between two of these reads is in
            // neither. So a message is gone only if a second look misses it too.
            let missed: Vec<_> = some.iter().filter(|number| !messages.contains_key(*number)).cloned().collect();
            if !missed.is_empty() {
                messages.extend(all_found(store, missed).await?);
            }
            for number in some {
                let Some(before) = waited_for.get(number) else { continue };
                let now = match messages.get(number) {
                    None => gone(store, number, before.id).await?,
                    Some(message) => failed_since(message, before.last_try)
                        .map_or(Became::Open, |error| Became::Failed(message.state, error)),
                };
                if is_over || !now.is_open() {
                    waited_for.remove(number);
                    became.insert(number.clone(), now);
                }
            }
        }
        if waited_for.is_empty() {
            return Ok(became);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Why a message is gone: somebody discarded it meanwhile, or it was sent or handled.
async fn gone(store: &dyn Duties, number: &str, id: Uuid) -> Result<Became, AppError> {
    let acts = store.audit(Some(id), ACTS_MAX).await?;
    // After `release` it was sent, although somebody asked to discard it.
    let is_end = |act: &AuditEntry| act.number == number && ["discard", "release"].contains(&act.act.as_str());
    Ok(match acts.into_iter().find(is_end) {
        Some(act) if act.act == "discard" => Became::Discarded(act.actor),
        _ if number.starts_with('o') => Became::Sent,
        _ => Became::Handled,
    })
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
