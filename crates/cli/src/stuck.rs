//! What is stuck, for `status` and `doctor`, and why, for `doctor`.
//!
//! Promise: this changes nothing, and every query is bounded.

use std::time::Duration;

use super::consumers::{is_absent, seen};
use super::dead::found;
use oncebox::app::AppError;
use oncebox::app::config::Settings;
use oncebox::store::{ConsumerStatus, DeadFilter, DeadMessage, DeadPlace, DeadState, Duties, Finding, Status, Store};
use oncebox::{SqlHandler, SqlSpec, StoreError};

/// How long the database may take to prepare the statements of a handler. On a locked table this
/// waits, as handlers do.
const PREPARE_MAX: Duration = Duration::from_secs(3);

/// One thing that the counts of the database alone show to be stuck.
pub(super) enum Stuck<'a> {
    /// Messages are pending for too long, or shards have no publisher, or both.
    Outbox {
        /// Whether the oldest pending message is too old.
        is_old: bool,
        /// The shards that no publisher owns, as a list; empty where each has one.
        without_owner: String,
    },
    /// The outbox holds messages for too long.
    Held,
    /// Messages of this consumer wait or are held for too long.
    Waiting(&'a ConsumerStatus),
    /// No process of this consumer runs.
    Absent(&'a ConsumerStatus),
}

/// What is stuck by these counts, for `status` and `doctor`: what is older than this, and shards
/// and consumers without a process.
pub(super) fn stuck_by(status: &Status, older_than: Duration) -> Vec<Stuck<'_>> {
    let is_old = |seconds: f64| seconds > older_than.as_secs_f64();
    let mut stuck = Vec::new();
    let without_owner = status.shards.iter().filter(|shard| shard.owner.is_none());
    let without_owner = without_owner.map(|shard| shard.shard.to_string()).collect::<Vec<_>>().join(", ");
    let is_pending_old = is_old(status.oldest_pending_age_seconds);
    if is_pending_old || !without_owner.is_empty() {
        stuck.push(Stuck::Outbox { is_old: is_pending_old, without_owner });
    }
    if is_old(status.oldest_held_age_seconds) {
        stuck.push(Stuck::Held);
    }
    for consumer in &status.consumers {
        if is_old(consumer.oldest_waiting_age_seconds) {
            stuck.push(Stuck::Waiting(consumer));
        }
        if is_absent(consumer) {
            stuck.push(Stuck::Absent(consumer));
        }
    }
    stuck
}

/// Adds what is stuck in the database: the relay, held and waiting messages, consumers without a
/// process, waits for locks.
pub(super) async fn look(
    store: &dyn Duties,
    status: &Status,
    older_than: Duration,
    findings: &mut Vec<Finding>,
) -> Result<(), AppError> {
    let stuck = stuck_by(status, older_than);
    if !matches!(stuck.first(), Some(Stuck::Outbox { .. })) {
        let pending = messages(status.pending);
        findings.push(Finding::ok("outbox: publisher", format!("owned by {}; {pending} pending", owners(status))));
    }
    for one in &stuck {
        findings.extend(match one {
            Stuck::Outbox { is_old, without_owner } => Some(relay(status, *is_old, without_owner)),
            Stuck::Held => held(store, status).await?,
            Stuck::Waiting(consumer) => waiting(store, consumer).await?,
            Stuck::Absent(consumer) => Some(absent(consumer)),
        });
    }
    for wait in store.lock_waits(older_than).await? {
        let holders = if wait.holders.is_empty() { "nobody that is shown".to_owned() } else { wait.holders.join("; ") };
        findings.push(Finding::stuck(
            format!("lock: connection {}", wait.connection),
            format!("waits for {:.0} s with `{}` for what is held by {holders}", wait.seconds, wait.statement),
            "end the transaction that holds the lock",
        ));
    }
    Ok(())
}

fn owners(status: &Status) -> String {
    let owners: Vec<&str> = status.shards.iter().filter_map(|shard| shard.owner.as_deref()).collect();
    owners.join(", ")
}

/// What to do where a shard has no owner.
const START: &str = "start `publisher`; if one runs, its /readyz says what it waits for: another session may have \
                     locked the row of its lease in the table of shards";

/// Why nobody works on the pending messages. A warning where none of them is too old.
fn relay(status: &Status, is_old: bool, without_owner: &str) -> Finding {
    let owners = owners(status);
    let (who, remedy) = match (without_owner.is_empty(), owners.is_empty()) {
        (true, _) => (
            format!("owned by {owners}"),
            "see the log and /readyz of the publisher, and what is said here of the broker",
        ),
        (false, true) => ("no publisher owns it".to_owned(), START),
        (false, false) => (format!("no publisher owns shard {without_owner}"), START),
    };
    let pending = messages(status.pending);
    match is_old {
        true => {
            let seconds = status.oldest_pending_age_seconds;
            let detail = format!("{who}; {pending} pending, the oldest for {seconds:.0} s");
            Finding::stuck("outbox: publisher", detail, remedy)
        }
        false => Finding::warning("outbox: publisher", format!("{who}; {pending} pending"), remedy),
    }
}

/// The finding for held messages of the outbox; none where they have gone meanwhile.
async fn held(store: &dyn Duties, status: &Status) -> Result<Option<Finding>, AppError> {
    let Some(first) = first(store, "outbox", vec![DeadState::Held]).await? else { return Ok(None) };
    let cause = Cause::of(store, &first).await?;
    let oldest = oldest(&first, status.oldest_held_age_seconds, true);
    let detail = format!("{} held, {oldest}{}", messages(status.held), cause.detail);
    Ok(Some(Finding::stuck("outbox: held", detail, cause.remedy)))
}

/// The finding for waiting messages of a consumer; none where they have gone meanwhile.
async fn waiting(store: &dyn Duties, consumer: &ConsumerStatus) -> Result<Option<Finding>, AppError> {
    let first = first(store, &consumer.name, vec![DeadState::Waiting, DeadState::Held]).await?;
    let Some(first) = first else { return Ok(None) };
    let (waiting, held) = (messages(consumer.waiting), consumer.held);
    let cause = Cause::of(store, &first).await?;
    // Held messages are found in order. Of those that wait, the one that is due first is found.
    let is_oldest = match first.state {
        DeadState::Held => consumer.waiting == 0,
        _ => consumer.waiting + held == 1,
    };
    let oldest = oldest(&first, consumer.oldest_waiting_age_seconds, is_oldest);
    let detail = format!("{waiting} waiting and {held} held, {oldest}{}", cause.detail);
    let remedy = match is_absent(consumer) {
        true => format!("start a process of the consumer; {}", cause.remedy),
        false => cause.remedy,
    };
    Ok(Some(Finding::stuck(format!("consumer {}: waiting", consumer.name), detail, remedy)))
}

/// The finding for a consumer without a process. A warning where it has no waiting or held message.
fn absent(consumer: &ConsumerStatus) -> Finding {
    let name = format!("consumer {}: process", consumer.name);
    let detail = format!("no process of it runs, the last was there {}", seen(consumer));
    let remedy = format!("start it; if it is not wanted any more, `oncebox consumers forget {}`", consumer.name);
    match consumer.waiting + consumer.held {
        0 => Finding::warning(name, detail, remedy),
        _ => Finding::stuck(name, detail, remedy),
    }
}

/// The first message of a place in these states: of those that wait, the one that is due first.
async fn first(store: &dyn Duties, place: &str, states: Vec<DeadState>) -> Result<Option<DeadMessage>, AppError> {
    let filter = DeadFilter { states, consumer: Some(place.to_owned()), limit: 1, ..DeadFilter::default() };
    Ok(store.dead(&filter).await?.into_iter().next())
}

/// What a message waits for: its own error, or the dead message of its key that holds it.
struct Cause {
    /// The dead message and its error, to be said after the message itself; may be empty.
    detail: String,
    remedy: String,
}

impl Cause {
    async fn of(store: &dyn Duties, message: &DeadMessage) -> Result<Self, AppError> {
        let Some(holder) = &message.held_by else {
            let number = &message.number;
            let names = if message.place == DeadPlace::Outbox { "reason" } else { "error" };
            let remedy = format!("mend what its {names} names; `oncebox dead show {number}` shows it whole");
            return Ok(Self { detail: String::new(), remedy });
        };
        let dead = found(store, holder).await?;
        let error = dead.map(|dead| format!(": {}", dead.error.unwrap_or(dead.reason))).unwrap_or_default();
        let remedy = format!(
            "mend what the error of {holder} names, then redrive or discard {holder}; `oncebox dead show {holder}` shows it whole"
        );
        Ok(Self { detail: format!(", {holder}{error}"), remedy })
    }
}

/// Says how old the oldest message is, and names this one: the oldest, or another one.
fn oldest(message: &DeadMessage, seconds: f64, is_oldest: bool) -> String {
    let DeadMessage { number, topic, reason, error, attempts, next_try, .. } = message;
    let error = error.as_deref().filter(|error| error != reason).map(|error| format!(": {error}")).unwrap_or_default();
    let tries = match attempts {
        0 => String::new(),
        1 => " after 1 try".to_owned(),
        more => format!(" after {more} tries"),
    };
    let next = next_try.map(|at| format!("; next try {}", at.format("%Y-%m-%d %H:%M:%SZ"))).unwrap_or_default();
    let which = match (is_oldest, message.state) {
        (true, _) => format!("the oldest, {number} of topic {topic}, for {seconds:.0} s"),
        (false, DeadState::Held) => format!("the oldest for {seconds:.0} s; held first: {number} of topic {topic}"),
        (false, _) => format!("the oldest for {seconds:.0} s; due first: {number} of topic {topic}"),
    };
    format!("{which}{tries}: {reason}{error}{next}")
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
                Ok(Err(error @ StoreError::Refused(_))) => {
                    Finding::stuck(name, error.to_string(), "mend the table, or the statement")
                }
                Ok(Err(error)) => Finding::stuck(name, error.to_string(), "try again; see the error"),
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
