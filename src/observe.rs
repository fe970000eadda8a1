//! All metric names, the state from which `/livez` and `/readyz` answer, and what checks find.
//!
//! Promise: no code outside this module writes a metric name. The tables here are those of
//! `docs/reference/metrics.md`, and a test compares the two. Labels are few and bounded: never a
//! key, an id or an error text. Not here: exporting metrics (`app`).

mod finding;
mod health;
#[cfg(feature = "operations")]
mod operations;
mod record;
#[cfg(feature = "metrics")]
mod table;

use std::time::Duration;

pub use self::{
    finding::{Finding, Severity},
    health::Health,
};
#[cfg(any(feature = "consumer", feature = "operations", feature = "relay"))]
pub(crate) use health::{PartState, Trouble};
#[cfg(feature = "operations")]
pub(crate) use operations::{Forgotten, Noted, forgotten, noted, operation_starts, operations_stand};
use record::{counter, gauge, histogram, metrics_table};
#[cfg(feature = "metrics")]
use table::Metric;

metrics_table! {
    PUBLISHED "oncebox_published_total" Counter Count "broker" "messages that the broker has proven to have";
    PUBLISH_FAILURES "oncebox_publish_failures_total" Counter Count "broker,class" "refusals: of a message, a destination, or a whole session";
    SESSIONS "oncebox_relay_sessions_total" Counter Count "broker" "relay sessions begun; one that keeps rising means doubt after doubt";
    DOUBTS "oncebox_relay_doubts_total" Counter Count "broker" "relay sessions that ended in doubt: what they had not marked was sent again";
    OLDEST_PENDING "oncebox_oldest_pending_age_seconds" Gauge Seconds "" "the alert: how long the oldest unproven message has waited";
    PENDING "oncebox_pending_messages" Gauge Count "" "messages not yet proven by the broker";
    HELD "oncebox_held_messages" Gauge Count "" "messages that stand behind a dead one, or whose destination is blocked";
    OLDEST_HELD "oncebox_oldest_held_age_seconds" Gauge Seconds "" "the alert: how long ago the oldest held message was enqueued";
    DEAD "oncebox_dead_messages" Gauge Count "place" "messages that could not be sent (place `outbox`) or handled (place is the consumer)";
    WAITING "oncebox_waiting_messages" Gauge Count "consumer" "messages that wait for a retry, or behind one";
    CONSUMER_HELD "oncebox_consumer_held_messages" Gauge Count "consumer" "messages that stand behind a dead one of their key";
    OLDEST_WAITING "oncebox_oldest_waiting_age_seconds" Gauge Seconds "consumer" "the alert: how long the oldest of the waiting and held messages has waited";
    STATUS_AGE "oncebox_status_age_seconds" Gauge Seconds "" "the alert: how long ago the tables were read that the gauges of messages, consumers and shards speak of";
    CURSOR_AGE "oncebox_relay_cursor_age_seconds" Gauge Seconds "shard" "time since the relay last wrote its cursor";
    GAPS "oncebox_relay_gaps" Gauge Count "shard" "open gaps: positions that may still appear";
    LEASES_LOST "oncebox_leases_lost_total" Counter Count "" "leases that relays lost: a frozen process, two with one name, or a failover of the database";
    ORDER_INCIDENTS "oncebox_order_incidents_total" Counter Count "broker" "messages of a key that were taken although an earlier one was refused, and topics of Kafka that got more partitions or were made anew";
    DELIVERIES "oncebox_deliveries_total" Counter Count "consumer,outcome" "deliveries by outcome: processed, duplicate, retried, dead, mismatch, unhandled";
    HANDLER_SECONDS "oncebox_handler_duration_seconds" Histogram Seconds "consumer" "time in handlers, one message or one set";
    INBOX_ROWS "oncebox_inbox_rows" Gauge Count "consumer" "inbox rows: what retention must keep bounded";
    INBOX_PURGED "oncebox_inbox_purged_total" Counter Count "consumer" "inbox rows that were older than the horizon and are gone";
    IN_FLIGHT "oncebox_consumer_in_flight" Gauge Count "consumer" "deliveries that run, wait for their turn or are set aside";
    ACK_FAILURES "oncebox_acknowledge_failures_total" Counter Count "consumer" "acknowledgements that did not arrive: redelivery follows, the inbox knows";
    LOST_RECORDS "oncebox_lost_records_total" Counter Count "topic" "the alert: records that the broker deleted before a consumer got them: their effects are missing";
    EMAILS "oncebox_emails_total" Counter Count "outcome" "tries of e-mails by what the e-mail was then: sent, refused, possibly-sent, waiting, dead";
    EMAILS_PENDING "oncebox_emails_pending" Gauge Count "" "e-mails not yet sent";
    BUILD_INFO "oncebox_build_info" Gauge Count "version,program" "1, with the version of the program";
}

/// Why a publish failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FailureClass {
    /// The broker refused this message for its content.
    Message,
    /// The destination, for example an unknown topic, a missing route or a denied access.
    Destination,
    /// Any other failure: the session ends and sends again what is not marked.
    Session,
}

impl FailureClass {
    fn label(self) -> &'static str {
        match self {
            Self::Message => "message",
            Self::Destination => "destination",
            Self::Session => "session",
        }
    }
}

/// How a delivery ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum DeliveryOutcome {
    /// The handler's effects are committed.
    Processed,
    /// The inbox knew the message: a duplicate.
    Duplicate,
    /// The handler failed, and the message is tried again.
    Retried,
    /// The message is stored as dead, until an operator acts on it.
    Dead,
    /// The id is known with another content hash: an alarm.
    Mismatch,
    /// No handler is registered for the message's kind.
    Unhandled,
}

impl DeliveryOutcome {
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Processed => "processed",
            Self::Duplicate => "duplicate",
            Self::Retried => "retried",
            Self::Dead => "dead",
            Self::Mismatch => "mismatch",
            Self::Unhandled => "unhandled",
        }
    }
}

/// Every metric of the programs.
#[cfg(feature = "metrics")]
fn metrics() -> impl Iterator<Item = &'static Metric> {
    let all = METRICS.iter();
    #[cfg(feature = "operations")]
    let all = all.chain(operations::METRICS);
    all
}

/// Describes all metrics to the recorder. Call this once after the recorder is installed.
pub fn describe(program: &'static str) {
    #[cfg(feature = "metrics")]
    metrics().for_each(table::describe);
    gauge!(BUILD_INFO, "version" => env!("CARGO_PKG_VERSION"), "program" => program).set(1.0);
    counter!(LEASES_LOST).increment(0);
}

/// Sets the counters of what a broker took and refused to 0 before the first message, so that they
/// have a rate from then.
pub(crate) fn relay_starts(broker: &'static str) {
    counter!(PUBLISHED, "broker" => broker).increment(0);
    for class in [FailureClass::Message, FailureClass::Destination, FailureClass::Session] {
        counter!(PUBLISH_FAILURES, "broker" => broker, "class" => class.label()).increment(0);
    }
}

pub(crate) fn published(broker: &'static str, count: u64) {
    counter!(PUBLISHED, "broker" => broker).increment(count);
}

pub(crate) fn publish_failed(broker: &'static str, class: FailureClass) {
    counter!(PUBLISH_FAILURES, "broker" => broker, "class" => class.label()).increment(1);
}

pub(crate) fn session_began(broker: &'static str) {
    counter!(SESSIONS, "broker" => broker).increment(1);
}

/// Counts a relay session that ended in doubt: rows that it had not marked are sent again.
pub(crate) fn session_doubted(broker: &'static str) {
    counter!(DOUBTS, "broker" => broker).increment(1);
}

pub(crate) fn lease_lost() {
    counter!(LEASES_LOST).increment(1);
}

/// Counts that the broker took a later message of a key and refused an earlier one, or that a topic
/// got more partitions.
pub(crate) fn order_incident(broker: &'static str) {
    counter!(ORDER_INCIDENTS, "broker" => broker).increment(1);
}

/// The values of the outbox gauges, as `oncebox status` shows them.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct OutboxGauges {
    pub pending: u64,
    pub oldest_pending_age_seconds: f64,
    pub held: u64,
    pub oldest_held_age_seconds: f64,
    pub dead: u64,
    pub emails_pending: u64,
}

pub(crate) fn outbox_stands(gauges: OutboxGauges) {
    gauge!(PENDING).set(gauges.pending as f64);
    gauge!(OLDEST_PENDING).set(gauges.oldest_pending_age_seconds);
    gauge!(HELD).set(gauges.held as f64);
    gauge!(OLDEST_HELD).set(gauges.oldest_held_age_seconds);
    gauge!(DEAD, "place" => "outbox").set(gauges.dead as f64);
    gauge!(EMAILS_PENDING).set(gauges.emails_pending as f64);
}

/// Sets the age of the last read of the tables, on which the other gauges are based.
pub(crate) fn status_stands(age: Duration) {
    gauge!(STATUS_AGE).set(age.as_secs_f64());
}

pub(crate) fn shard_stands(shard: i32, gaps: u64, cursor_age_seconds: f64) {
    gauge!(GAPS, "shard" => shard.to_string()).set(gaps as f64);
    gauge!(CURSOR_AGE, "shard" => shard.to_string()).set(cursor_age_seconds);
}

/// The values of a consumer's gauges, as `oncebox status` shows them.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ConsumerGauges {
    pub waiting: u64,
    pub held: u64,
    pub oldest_waiting_age_seconds: f64,
    pub dead: u64,
    pub inbox_rows: u64,
}

pub(crate) fn consumer_stands(consumer: &str, gauges: ConsumerGauges) {
    gauge!(WAITING, "consumer" => consumer.to_owned()).set(gauges.waiting as f64);
    gauge!(CONSUMER_HELD, "consumer" => consumer.to_owned()).set(gauges.held as f64);
    gauge!(OLDEST_WAITING, "consumer" => consumer.to_owned()).set(gauges.oldest_waiting_age_seconds);
    gauge!(DEAD, "place" => consumer.to_owned()).set(gauges.dead as f64);
    gauge!(INBOX_ROWS, "consumer" => consumer.to_owned()).set(gauges.inbox_rows as f64);
}

/// Sets the counters of a consumer, except failed acknowledgements, to 0 before the first delivery.
pub(crate) fn consumer_starts(consumer: &str, topics: &[String]) {
    use DeliveryOutcome::{Dead, Duplicate, Mismatch, Processed, Retried, Unhandled};
    for outcome in [Processed, Duplicate, Retried, Dead, Mismatch, Unhandled] {
        delivered(consumer, outcome, 0);
    }
    purged(consumer, 0);
    for topic in topics {
        lost_records(topic, 0);
    }
}

pub(crate) fn purged(consumer: &str, rows: u64) {
    counter!(INBOX_PURGED, "consumer" => consumer.to_owned()).increment(rows);
}

pub(crate) fn delivered(consumer: &str, outcome: DeliveryOutcome, count: u64) {
    counter!(DELIVERIES, "consumer" => consumer.to_owned(), "outcome" => outcome.label()).increment(count);
}

pub(crate) fn handled(consumer: &str, took: Duration) {
    histogram!(HANDLER_SECONDS, "consumer" => consumer.to_owned()).record(took.as_secs_f64());
}

pub(crate) fn in_flight(consumer: &str, count: usize) {
    gauge!(IN_FLIGHT, "consumer" => consumer.to_owned()).set(count as f64);
}

pub(crate) fn acknowledge_failed(consumer: &str) {
    counter!(ACK_FAILURES, "consumer" => consumer.to_owned()).increment(1);
}

/// Counts records that the broker deleted before they were consumed.
pub(crate) fn lost_records(topic: &str, count: u64) {
    counter!(LOST_RECORDS, "topic" => topic.to_owned()).increment(count);
}

/// Counts tries of e-mails under the word of their resulting state. A sender begins with 0 of each,
/// so that they have a rate from its first e-mail.
pub(crate) fn emails(outcome: &'static str, count: u64) {
    counter!(EMAILS, "outcome" => outcome).increment(count);
}

#[cfg(all(test, feature = "metrics", feature = "operations"))]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::table::Kind;
    use super::*;

    #[test]
    fn the_documented_table_is_the_code() {
        let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/reference/metrics.md");
        let text = std::fs::read_to_string(file).unwrap();
        let rows = text.lines().filter(|line| line.starts_with("| `")).count();
        assert_eq!(rows, metrics().count());
        for metric in metrics() {
            let line = format!("| `{}` | {} |", metric.name, format!("{:?}", metric.kind).to_lowercase());
            assert!(text.contains(&line) && text.contains(metric.about), "{line}");
        }
    }

    fn is_of_a_name(c: char) -> bool {
        c.is_ascii_alphanumeric() || c == '_'
    }

    /// The name at the beginning of a text.
    fn name_of(text: &str) -> &str {
        text.split(|c: char| !is_of_a_name(c)).next().unwrap()
    }

    /// The metric that a name in an expression stands for; a histogram has several.
    fn metric_of(name: &str) -> Option<&'static Metric> {
        metrics().find(|metric| match name.strip_prefix(metric.name) {
            Some(part) if metric.kind == Kind::Histogram => ["_bucket", "_count", "_sum"].contains(&part),
            part => part == Some(""),
        })
    }

    /// The anchor of a heading, as GitHub makes it.
    fn anchor(heading: &str) -> String {
        let words = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = words.chars().filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    }

    /// Shown by: a metric, a label or a section that is not there; no rule for a metric that is
    /// said to be the alert; an alarm that a new process cannot raise before its first scrape.
    #[test]
    fn each_alert_names_metrics_and_labels_that_are_there_and_a_section_that_says_what_to_do() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        let read = |file: &str| std::fs::read_to_string(root.join(file)).unwrap();
        let (rules, page) = (read("deploy/prometheus.rules.yml"), read("docs/guides/alerts.md"));
        let lines: Vec<&str> = rules.lines().map(|line| line.trim_start().trim_start_matches("- ")).collect();
        let values = |key: &str| lines.iter().filter_map(|line| line.strip_prefix(key)).collect::<Vec<_>>();
        let (alerts, expressions) = (values("alert: "), values("expr: "));
        let (severities, summaries, runbooks) = (values("severity: "), values("summary: "), values("runbook: "));
        let counts = [expressions.len(), severities.len(), summaries.len(), runbooks.len()];
        assert!(alerts.len() > 10 && counts == [alerts.len(); 4], "each has one of each: {counts:?}");
        let headings: Vec<String> = page.lines().filter(|line| line.starts_with("##")).map(anchor).collect();
        let mut asked_for = Vec::new();
        for (at, alert) in alerts.iter().enumerate() {
            let expression = expressions[at];
            // Prometheus adds the first two; the third one is of buckets.
            let mut labels = vec!["instance", "job", "le"];
            for (from, _) in expression.match_indices("oncebox_") {
                let name = name_of(&expression[from..]);
                let metric = metric_of(name).unwrap_or_else(|| panic!("{alert}: there is no metric {name}"));
                let own: Vec<&str> = metric.labels.split(',').collect();
                let matchers =
                    expression[from + name.len()..].strip_prefix('{').and_then(|rest| rest.split('}').next());
                for matcher in matchers.into_iter().flat_map(|all| all.split(',')) {
                    let label = name_of(matcher.trim_start());
                    assert!(own.contains(&label), "{alert}: {name} has no label {label}");
                }
                labels.extend(own);
                asked_for.push(metric.name);
            }
            for grouping in ["by (", "on (", "without ("] {
                for list in expression.split(grouping).skip(1) {
                    for label in list.split(')').next().unwrap().split(',').map(str::trim) {
                        assert!(labels.contains(&label), "{alert}: no metric in it has the label {label}");
                    }
                }
            }
            let is_of_one_event = severities[at] == "critical" && expression.contains("increase(");
            assert!(!is_of_one_event || expression.contains(" unless "), "{alert}: silent before the first scrape");
            let section = runbooks[at].strip_prefix("docs/guides/alerts.md#").unwrap_or_default();
            assert!(headings.iter().any(|heading| heading == section), "{alert}: no section `{section}`");
        }
        for metric in metrics().filter(|metric| metric.about.starts_with("the alert")) {
            assert!(asked_for.contains(&metric.name), "no rule asks for {}", metric.name);
        }
    }
}
