//! What is stuck, for `status` and `doctor`, and why, for `doctor`.
//!
//! Promise: this changes nothing, and every query is bounded.

use std::time::Duration;

use super::consumers::{is_absent, seen};
use super::dead::found;
use oncebox::app::AppError;
use oncebox::app::config::Settings;
use oncebox::store::{
    ConsumerStatus, DeadFilter, DeadMessage, DeadPlace, DeadState, Duties, Finding, LockWait, ShardStatus, Status,
    Store,
};
use oncebox::{SqlHandler, SqlSpec, StoreError};

/// How long the database may take to prepare the statements of a handler. On a locked table this
/// waits, as handlers do.
const PREPARE_MAX: Duration = Duration::from_secs(3);
/// A shorter wait for a lock is nothing to speak of. A longer one is shown, however old what is
/// stuck must be: a handler gives up a wait after 5 s, and begins a new one.
const LOCK_WAIT_MIN: Duration = Duration::from_secs(1);
/// The buckets that the shards of an outbox must have: each one once.
const BUCKETS: std::ops::RangeInclusive<u8> = 0..=u8::MAX;

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
    /// E-mails, operations or keys have waited for too long.
    Unattended(Unattended),
}

/// What waits for a person, or for a process that does not come.
pub(super) struct Unattended {
    /// What `doctor` calls its row.
    name: &'static str,
    /// How many, and for how long the oldest has waited.
    pub(super) detail: String,
    remedy: &'static str,
}

/// What has waited for too long, of all that the database counts as unattended.
fn unattended(status: &Status, is_old: impl Fn(f64) -> bool) -> Vec<Unattended> {
    let waits = &status.unattended;
    let kinds = [
        (
            ("e-mails: to send", status.emails_pending, waits.oldest_email_age_seconds),
            ("e-mail to send", "e-mails to send"),
            "start `oncebox sender`; if one runs, its log and /readyz say what the mail server answers",
        ),
        (
            ("operations: parked", waits.operations_parked, waits.oldest_parked_age_seconds),
            ("operation parked", "operations parked"),
            "`oncebox operations list --parked` says why; find out what happened, then `oncebox operations resolve` or `retry`",
        ),
        (
            ("operations: recovery", waits.operations_undriven, waits.oldest_undriven_age_seconds),
            ("operation due without a driver", "operations due without a driver"),
            "start a recovery worker that has their flows and versions; `oncebox operations list` shows them",
        ),
        (
            ("keys: unknown", waits.keys_unknown, waits.oldest_unknown_age_seconds),
            ("key of unknown outcome", "keys of unknown outcome"),
            "`oncebox keys list --state unknown` shows them; find out what happened, then `oncebox keys resolve`",
        ),
    ];
    let old = kinds.into_iter().filter(|((_, _, age), ..)| is_old(*age));
    let said = |((name, count, age), (one, many), remedy): ((_, u64, f64), (&str, &str), _)| {
        let detail = match count {
            1 => format!("1 {one} for {age:.0} s"),
            _ => format!("{count} {many}, the oldest for {age:.0} s"),
        };
        Unattended { name, detail, remedy }
    };
    old.map(said).collect()
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
    stuck.extend(unattended(status, is_old).into_iter().map(Stuck::Unattended));
    stuck
}

/// Adds what is stuck in the database: the relay, held and waiting messages, consumers without a
/// process, what is unattended, waits for locks.
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
    findings.push(buckets(status));
    for one in stuck {
        match one {
            Stuck::Outbox { is_old, without_owner } => findings.push(relay(status, is_old, &without_owner)),
            Stuck::Held => findings.extend(held(store, status).await?),
            Stuck::Waiting(consumer) => findings.extend(waiting(store, consumer).await?),
            Stuck::Absent(consumer) => findings.push(absent(consumer)),
            Stuck::Unattended(Unattended { name, detail, remedy }) => {
                findings.push(Finding::stuck(name, detail, remedy));
            }
        }
    }
    if let failed @ 1.. = status.unattended.emails_failed {
        let detail =
            if failed == 1 { "1 e-mail failed for good".into() } else { format!("{failed} e-mails failed for good") };
        let remedy = "the column `error` of the table of e-mails says why: queue them again, or delete their rows";
        findings.push(Finding::warning("e-mails: failed", detail, remedy));
    }
    let waits = store.lock_waits(LOCK_WAIT_MIN.min(older_than)).await?;
    findings.extend(waits.iter().map(|wait| lock(wait, older_than)));
    Ok(())
}

/// The finding for a connection that waits for a lock. It is only a warning where neither the wait
/// nor the transaction of its holder is that old.
fn lock(wait: &LockWait, older_than: Duration) -> Finding {
    let name = format!("lock: connection {}", wait.connection);
    let held = wait.held_seconds.map(|seconds| format!(", for {seconds:.0} s")).unwrap_or_default();
    let holders = holders(wait);
    let detail =
        format!("waits for {:.0} s with `{}` for what is held by {holders}{held}", wait.seconds, wait.statement);
    let remedy = "end the transaction that holds the lock";
    match wait.seconds.max(wait.held_seconds.unwrap_or(0.0)) > older_than.as_secs_f64() {
        true => Finding::stuck(name, detail, remedy),
        false => Finding::warning(name, detail, remedy),
    }
}

fn holders(wait: &LockWait) -> String {
    if wait.holders.is_empty() { "nobody that is shown".to_owned() } else { wait.holders.join("; ") }
}

/// Whether each bucket belongs to exactly one shard. Of a bucket without a shard nobody reads the
/// messages; of one with two, both relays send them.
fn buckets(status: &Status) -> Finding {
    let owners = |bucket: u8| {
        let has = |shard: &&ShardStatus| (shard.buckets.0..=shard.buckets.1).contains(&bucket);
        status.shards.iter().filter(has).count()
    };
    let with = |is_meant: fn(usize) -> bool| {
        let mut ranges: Vec<(u8, u8)> = Vec::new();
        for bucket in BUCKETS.filter(|bucket| is_meant(owners(*bucket))) {
            match ranges.last_mut() {
                Some(last) if last.1.checked_add(1) == Some(bucket) => last.1 = bucket,
                _ => ranges.push((bucket, bucket)),
            }
        }
        ranges.into_iter().map(|(from, to)| format!("{from}-{to}")).collect::<Vec<_>>().join(", ")
    };
    let name = "outbox: buckets";
    let without = Some(with(|count| count == 0)).filter(|ranges| !ranges.is_empty());
    let twice = Some(with(|count| count > 1)).filter(|ranges| !ranges.is_empty());
    if without.is_none() && twice.is_none() {
        return Finding::ok(name, "each of them belongs to one shard");
    }
    let without = without.map(|ranges| format!("no shard has buckets {ranges}: nobody sends their messages"));
    let twice = twice.map(|ranges| format!("several shards have buckets {ranges}: their messages are sent twice"));
    let remedy = "stop all publishers, and change the table of shards so that each bucket belongs to one";
    Finding::refused(name, without.into_iter().chain(twice).collect::<Vec<_>>().join("; "), remedy)
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

/// The findings for waiting and for held messages of a consumer, which have causes of their own;
/// none where they have gone meanwhile.
async fn waiting(store: &dyn Duties, consumer: &ConsumerStatus) -> Result<Vec<Finding>, AppError> {
    let mut findings = Vec::new();
    let (waiting, held) = (consumer.waiting, consumer.held);
    for (state, word, count) in [(DeadState::Waiting, "waiting", waiting), (DeadState::Held, "held", held)] {
        let Some(first) = first(store, &consumer.name, vec![state]).await? else { continue };
        let cause = Cause::of(store, &first).await?;
        // Held messages are found in order. Of those that wait, the one that is due first is found.
        // The age is that of both states together.
        let is_oldest = waiting + held == 1 || waiting == 0 && state == DeadState::Held;
        let oldest = oldest(&first, consumer.oldest_waiting_age_seconds, is_oldest);
        let of_both = if waiting > 0 && held > 0 { "of waiting and held " } else { "" };
        let detail = format!("{} {word}, {of_both}{oldest}{}", messages(count), cause.detail);
        let remedy = match is_absent(consumer) {
            true => format!("start a process of the consumer; {}", cause.remedy),
            false => cause.remedy,
        };
        findings.push(Finding::stuck(format!("consumer {}: {word}", consumer.name), detail, remedy));
    }
    Ok(findings)
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
pub(super) async fn handlers<S: Store>(store: &S, duties: &dyn Duties, settings: &Settings) -> Vec<Finding> {
    let mut findings = Vec::new();
    for consumer in &settings.consumer {
        for on in consumer.on.iter().filter(|on| on.handler == "sql") {
            let kind = on.kind.as_deref().unwrap_or("every other kind");
            let name = format!("consumer {}: handler of {kind}", consumer.name);
            let mut preparing = std::pin::pin!(SqlHandler::prepare(store, SqlSpec::from(on)));
            findings.push(match tokio::time::timeout(PREPARE_MAX, &mut preparing).await {
                Ok(Ok(_)) => Finding::ok(name, "the database takes its statements"),
                Ok(Err(error @ StoreError::Refused(_))) => {
                    Finding::stuck(name, error.to_string(), "mend the table, or the statement")
                }
                Ok(Err(error)) => Finding::stuck(name, error.to_string(), "try again; see the error"),
                // It still waits on the server, which tells who holds the lock.
                Err(_) => Finding::stuck(
                    name,
                    format!(
                        "the database says nothing to its statements for {PREPARE_MAX:?}: a table of theirs is locked{}",
                        holders_of(duties, &on.sql).await
                    ),
                    "end the transaction that holds the lock",
                ),
            });
        }
    }
    findings
}

/// Who holds the lock that one of these statements waits for now, as the end of a sentence; empty
/// where the database does not tell.
async fn holders_of(duties: &dyn Duties, statements: &[String]) -> String {
    let Ok(Ok(waits)) = tokio::time::timeout(PREPARE_MAX, duties.lock_waits(LOCK_WAIT_MIN)).await else {
        return String::new();
    };
    // Up to its first parameter a statement is sent as it is written.
    let is_of = |wait: &LockWait, statement: &String| {
        let (sent, written) = (wait.statement.trim(), statement.trim().split(':').next().unwrap_or_default());
        !sent.is_empty() && (sent.starts_with(written) || written.starts_with(sent))
    };
    let mut told = waits.iter().filter(|wait| !wait.holders.is_empty());
    let wait = told.find(|wait| statements.iter().any(|statement| is_of(wait, statement)));
    wait.map(|wait| format!(", by {}", holders(wait))).unwrap_or_default()
}
