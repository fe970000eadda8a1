//! What is stuck, and why: a part of `doctor`.
//!
//! Promise: this changes nothing, and every query is bounded.

use std::time::Duration;

use oncebox::app::AppError;
use oncebox::app::config::Settings;
use oncebox::store::{DeadFilter, DeadMessage, DeadState, Duties, Finding, Status, Store};
use oncebox::{SqlHandler, SqlSpec};

/// How long the database may take to prepare the statements of a handler. On a locked table this
/// waits, as handlers do.
const PREPARE_MAX: Duration = Duration::from_secs(3);

/// Returns what is stuck in the database: the relay, held and waiting messages, waits for locks.
pub(super) async fn look(store: &dyn Duties, status: &Status, older_than: Duration) -> Result<Vec<Finding>, AppError> {
    let is_old = |seconds: f64| seconds > older_than.as_secs_f64();
    let mut findings = vec![relay(status, is_old(status.oldest_pending_age_seconds))];
    if is_old(status.oldest_held_age_seconds)
        && let Some(first) = first(store, "outbox", vec![DeadState::Held]).await?
    {
        let detail = format!("{} held, {}", messages(status.held), oldest(&first, status.oldest_held_age_seconds));
        let remedy = format!("mend what its reason names; `oncebox dead show {}` shows it whole", first.number);
        findings.push(Finding::stuck("outbox: held", detail, remedy));
    }
    for consumer in &status.consumers {
        if is_old(consumer.oldest_waiting_age_seconds)
            && let Some(first) = first(store, &consumer.name, vec![DeadState::Waiting, DeadState::Held]).await?
        {
            let (waiting, held) = (messages(consumer.waiting), consumer.held);
            let seconds = consumer.oldest_waiting_age_seconds;
            let detail = format!("{waiting} waiting and {held} held, {}", oldest(&first, seconds));
            let remedy = format!("mend what its error names; `oncebox dead show {}` shows it whole", first.number);
            findings.push(Finding::stuck(format!("consumer {}: waiting", consumer.name), detail, remedy));
        }
    }
    for wait in store.lock_waits(older_than).await? {
        let holders = if wait.holders.is_empty() { "nobody that is shown".to_owned() } else { wait.holders.join("; ") };
        findings.push(Finding::stuck(
            format!("lock: connection {}", wait.connection),
            format!("waits for {:.0} s with `{}` for what is held by {holders}", wait.seconds, wait.statement),
            "end the transaction that holds the lock",
        ));
    }
    Ok(findings)
}

/// Whether a relay works on the pending messages.
fn relay(status: &Status, is_old: bool) -> Finding {
    let without_owner: Vec<String> =
        status.shards.iter().filter(|shard| shard.owner.is_none()).map(|shard| shard.shard.to_string()).collect();
    let owners: Vec<&str> = status.shards.iter().filter_map(|shard| shard.owner.as_deref()).collect();
    let who = match (without_owner.is_empty(), owners.is_empty()) {
        (true, _) => format!("owned by {}", owners.join(", ")),
        (false, true) => "no publisher owns it".to_owned(),
        (false, false) => format!("no publisher owns shard {}", without_owner.join(", ")),
    };
    let pending = messages(status.pending);
    if !is_old {
        return Finding::ok("outbox: publisher", format!("{who}; {pending} pending"));
    }
    let detail = format!("{who}; {pending} pending, the oldest for {:.0} s", status.oldest_pending_age_seconds);
    let remedy = match without_owner.is_empty() {
        true => "see the log and /readyz of the publisher, and what is said here of the broker",
        false => "start `publisher`",
    };
    Finding::stuck("outbox: publisher", detail, remedy)
}

/// The oldest message of a place in these states.
async fn first(store: &dyn Duties, place: &str, states: Vec<DeadState>) -> Result<Option<DeadMessage>, AppError> {
    let filter = DeadFilter { states, consumer: Some(place.to_owned()), limit: 1, ..DeadFilter::default() };
    Ok(store.dead(&filter).await?.into_iter().next())
}

fn oldest(message: &DeadMessage, seconds: f64) -> String {
    let DeadMessage { number, topic, reason, error, attempts, next_try, .. } = message;
    let error = error.as_deref().filter(|error| error != reason).map(|error| format!(": {error}")).unwrap_or_default();
    let tries = match attempts {
        0 => String::new(),
        1 => " after 1 try".to_owned(),
        more => format!(" after {more} tries"),
    };
    let next = next_try.map(|at| format!("; next try {}", at.format("%H:%M:%S"))).unwrap_or_default();
    format!("the oldest, {number} of topic {topic}, for {seconds:.0} s{tries}: {reason}{error}{next}")
}

fn messages(count: u64) -> String {
    if count == 1 { "1 message".to_owned() } else { format!("{count} messages") }
}

/// Whether the database can still prepare the sql handlers of the configuration.
pub(super) async fn handlers<S: Store>(store: &S, settings: &Settings) -> Vec<Finding> {
    let mut findings = Vec::new();
    for consumer in &settings.consumer {
        for on in consumer.on.iter().filter(|on| on.handler == "sql") {
            let kind = on.kind.as_deref().unwrap_or("every other kind");
            let name = format!("consumer {}: handler of {kind}", consumer.name);
            let prepared = tokio::time::timeout(PREPARE_MAX, SqlHandler::prepare(store, SqlSpec::from(on))).await;
            findings.push(match prepared {
                Ok(Ok(_)) => Finding::ok(name, "the database takes its statements"),
                Ok(Err(error)) => Finding::stuck(name, error.to_string(), "mend the table, or the statement"),
                Err(_) => Finding::stuck(
                    name,
                    format!(
                        "the database says nothing to its statements for {PREPARE_MAX:?}: a table of theirs is locked"
                    ),
                    "end the transaction that holds the lock",
                ),
            });
        }
    }
    findings
}
