//! What librdkafka reports outside of messages: errors of the whole client, log lines, and the
//! state of the connection that results from them.
//!
//! Promises: an error of authentication or of TLS is kept, with the broker's name and without
//! secrets, until the connection works again. An outage of all brokers and its end are logged once.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use parking_lot::Mutex;
use rdkafka::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::ConsumerContext;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::DeliveryResult;
use rdkafka::producer::ProducerContext;
use tokio::sync::watch;

use crate::error::BrokerError;

/// What one client has reported so far.
#[derive(Debug, Default)]
pub(super) struct Reports {
    state: Mutex<State>,
    /// True while something is wrong that `works` has to forget. Set only under the lock of
    /// `state`: a call of `works` that sees it then also sees what is wrong, and forgets it.
    trouble: AtomicBool,
    producer_id: watch::Sender<bool>,
}

#[derive(Debug, Default)]
struct State {
    unauthorised: Option<String>,
    /// Why a connection failed last.
    down: Option<String>,
    all_down: bool,
    last: Option<String>,
    /// The partition end that was reported last: rdkafka's error has only the partition.
    eof_offset: Option<i64>,
    topic_ids: HashMap<String, String>,
    /// Topics whose id changed.
    made_anew: Vec<String>,
    /// Since when a topic may not be read, and the broker's reason.
    denied: Option<(Instant, String)>,
}

impl Reports {
    /// Call it when the connection works: what was wrong with it before is forgotten.
    pub(super) fn works(&self) {
        if !self.trouble.load(Ordering::Relaxed) || !self.trouble.swap(false, Ordering::Relaxed) {
            return;
        }
        let mut state = self.state.lock();
        (state.unauthorised, state.down) = (None, None);
        if std::mem::take(&mut state.all_down) {
            tracing::info!("kafka is back");
        }
    }

    /// Why no broker can be reached; `None` while one may be reachable.
    pub(super) fn all_down(&self) -> Option<String> {
        let state = self.state.lock();
        state.all_down.then(|| state.down.clone().unwrap_or_else(|| "no broker can be reached".to_owned()))
    }

    /// The error of authentication or of TLS that was reported last.
    pub(super) fn unauthorised(&self) -> Option<BrokerError> {
        let reason = self.state.lock().unauthorised.clone()?;
        let is_untrusted = reason.contains(UNTRUSTED);
        Some(if is_untrusted { BrokerError::Untrusted(reason) } else { BrokerError::Unauthorised(reason) })
    }

    /// The error for a question that was not answered. It has the reason that librdkafka reported
    /// beside the answer, or `otherwise` where there is none.
    pub(super) fn explain(&self, question: &str, otherwise: &str) -> BrokerError {
        if let Some(error) = self.unauthorised() {
            return error;
        }
        let state = self.state.lock();
        BrokerError::Unavailable(format!("{question}: {}", state.down.as_deref().unwrap_or(otherwise)))
    }

    /// Takes the reason of the last error: the error that polling returns does not have it.
    pub(super) fn take_last(&self) -> Option<String> {
        self.state.lock().last.take()
    }

    pub(super) fn eof_offset(&self) -> i64 {
        self.state.lock().eof_offset.unwrap_or(-1)
    }

    pub(super) fn topic_id(&self, topic: &str) -> Option<String> {
        self.state.lock().topic_ids.get(topic).cloned()
    }

    /// Remembers the id of the topic that has this name, and notes a change of it.
    pub(super) fn set_topic_id(&self, topic: &str, id: &str) {
        let mut state = self.state.lock();
        let known = state.topic_ids.insert(topic.to_owned(), id.to_owned());
        if known.is_some_and(|known| known != id) {
            state.made_anew.push(topic.to_owned());
        }
    }

    /// Takes the topics that were deleted and made anew while this client knew them.
    pub(super) fn take_made_anew(&self) -> Vec<String> {
        std::mem::take(&mut self.state.lock().made_anew)
    }

    /// Notes that a topic may not be read. librdkafka tells neither which one nor when that ends.
    pub(super) fn deny(&self, reason: &str) {
        self.state.lock().denied.get_or_insert_with(|| (Instant::now(), reason.to_owned()));
    }

    pub(super) fn denied(&self) -> Option<(Instant, String)> {
        self.state.lock().denied.clone()
    }

    /// A receiver that becomes true when the idempotent producer has its id.
    pub(super) fn producer_id(&self) -> watch::Receiver<bool> {
        self.producer_id.subscribe()
    }

    /// Handles an error of the whole client.
    pub(super) fn error(&self, error: &KafkaError, reason: &str) {
        use RDKafkaErrorCode as Code;
        let mut state = self.state.lock();
        match error.rdkafka_error_code() {
            Some(Code::PartitionEOF) => {
                state.eof_offset = offset_of_end(reason);
                return;
            }
            code if is_refusal(code, reason) => {
                self.trouble.store(true, Ordering::Relaxed);
                tracing::error!(reason, "kafka refuses this client");
                state.unauthorised = Some(reason.to_owned());
            }
            Some(Code::AllBrokersDown) => {
                self.trouble.store(true, Ordering::Relaxed);
                if !std::mem::replace(&mut state.all_down, true) {
                    let reason = state.down.as_deref().unwrap_or(reason);
                    tracing::warn!(reason, "no kafka broker can be reached");
                }
            }
            Some(Code::BrokerTransportFailure | Code::Resolve | Code::OperationTimedOut | Code::RequestTimedOut) => {
                self.trouble.store(true, Ordering::Relaxed);
                tracing::debug!(reason, "connection to kafka");
                state.down = Some(reason.to_owned());
            }
            _ => tracing::debug!(%error, reason, "kafka client"),
        }
        state.last = Some(reason.to_owned());
    }

    pub(super) fn log(&self, level: RDKafkaLogLevel, facility: &str, line: &str) {
        match facility {
            "IDEMPSTATE" if line.ends_with("-> Assigned") => {
                self.producer_id.send_replace(true);
            }
            METADATA => {
                if let Some((topic, id)) = id_of_topic(line) {
                    self.set_topic_id(topic, id);
                } else if is_metadata(line) || is_connection(line) {
                    self.works();
                }
            }
            _ => {}
        }
        match level {
            // `FAIL` and `ERROR` repeat what librdkafka also reports to `error`, which sorts it.
            // `CONFWARN` tells mostly that a property does nothing for this kind of client.
            _ if matches!(facility, "FAIL" | "ERROR" | "CONFWARN") => tracing::debug!(facility, line, "librdkafka"),
            RDKafkaLogLevel::Notice | RDKafkaLogLevel::Info => tracing::debug!(facility, line, "librdkafka"),
            RDKafkaLogLevel::Debug => tracing::trace!(facility, line, "librdkafka"),
            _ => tracing::warn!(facility, line, "librdkafka"),
        }
    }
}

/// OpenSSL's words for a certificate that is not trusted.
const UNTRUSTED: &str = "certificate verify failed";

/// Whether the broker refuses this client, or this client refuses the broker's certificate.
fn is_refusal(code: Option<RDKafkaErrorCode>, reason: &str) -> bool {
    use RDKafkaErrorCode as Code;
    match code {
        Some(Code::Authentication | Code::SaslAuthenticationFailed | Code::SSL) => true,
        // librdkafka runs the steps of a handshake in three places, and only one of them reports
        // `SSL`. The others report a transport failure, which is also what a connection reports
        // that breaks while in use. So the text decides.
        Some(Code::BrokerTransportFailure) => reason.contains(UNTRUSTED),
        _ => false,
    }
}

/// The facility of log lines about metadata.
pub(super) const METADATA: &str = "METADATA";

/// Reads "[thrd:main]: Topic payments changed id from AAAAAAAAAAAAAAAAAAAAAA to
/// 6cKjKR1yTl6PgRTBI1vCDw"
pub(super) fn id_of_topic(line: &str) -> Option<(&str, &str)> {
    let (before, after) = line.split_once(" changed id from ")?;
    let (_, topic) = before.rsplit_once("Topic ")?;
    let (_, id) = after.split_once(" to ")?;
    // Brokers before 2.8 know no ids.
    (!id.trim_matches('A').is_empty()).then_some((topic, id))
}

/// Finds "[thrd:main]: b:9092/bootstrap: 3 brokers, 1 topics": a broker has just answered.
fn is_metadata(line: &str) -> bool {
    line.ends_with(" topics") && line.contains(" brokers, ")
}

/// Finds "[thrd:..]: Requesting metadata for 1/1 topics: connected", or the same question skipped
/// because it is "already being requested": a connection is open and authorised. A producer that
/// rests asks nothing else then.
fn is_connection(line: &str) -> bool {
    line.strip_suffix(": already being requested").unwrap_or(line).ends_with(": connected")
}

/// Reads "Fetch from broker 1 reached end of partition at offset 5 (HighwaterMark 5)"
fn offset_of_end(reason: &str) -> Option<i64> {
    let (_, rest) = reason.split_once("at offset ")?;
    rest.split(' ').next()?.parse().ok()
}

/// The context of a client that only asks questions and reads.
#[derive(Debug, Default)]
pub(super) struct AskContext {
    pub(super) reports: Arc<Reports>,
}

impl ClientContext for AskContext {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, line: &str) {
        self.reports.log(level, facility, line);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        self.reports.error(&error, reason);
    }
}

impl ConsumerContext for AskContext {}

impl ProducerContext for AskContext {
    type DeliveryOpaque = ();

    fn delivery(&self, _: &DeliveryResult<'_>, (): ()) {}
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_offset_of_an_end_is_read_from_the_reason() {
        let reports = Reports::default();
        let reason = "Fetch from broker 1 reached end of partition at offset 42 (HighwaterMark 43)";
        reports.error(&KafkaError::Global(RDKafkaErrorCode::PartitionEOF), reason);
        assert_eq!(reports.eof_offset(), 42);
    }

    #[test]
    fn a_topic_that_turned_into_another_of_its_name_is_told() {
        let reports = Reports::default();
        let log = |line: &str| reports.log(RDKafkaLogLevel::Debug, "METADATA", line);
        log("[thrd:main]: Topic a changed id from AAAAAAAAAAAAAAAAAAAAAA to 6cKjKR1yTl6PgRTBI1vCDw");
        log("[thrd:main]: Topic b changed id from AAAAAAAAAAAAAAAAAAAAAA to AAAAAAAAAAAAAAAAAAAAAA");
        assert_eq!(reports.topic_id("a").as_deref(), Some("6cKjKR1yTl6PgRTBI1vCDw"));
        assert_eq!(reports.topic_id("b"), None, "a broker without ids");
        // A partition that is assigned again is reported again with the same id.
        log("[thrd:main]: Topic a changed id from AAAAAAAAAAAAAAAAAAAAAA to 6cKjKR1yTl6PgRTBI1vCDw");
        assert!(reports.take_made_anew().is_empty());
        log("[thrd:main]: Topic a changed id from 6cKjKR1yTl6PgRTBI1vCDw to u3aJzq0uS9mY1oH5o8v3Vg");
        assert_eq!(reports.take_made_anew(), ["a"]);
    }

    #[test]
    fn kafka_is_back_when_a_broker_has_answered() {
        let reports = Reports::default();
        reports.error(&KafkaError::Global(RDKafkaErrorCode::AllBrokersDown), "1/1 brokers are down");
        reports.log(RDKafkaLogLevel::Debug, "METADATA", "[thrd:main]: Hinted cache of 1/1 topic(s) being queried");
        assert!(reports.all_down().is_some());
        reports.log(RDKafkaLogLevel::Debug, "METADATA", "[thrd:main]: b:1/1: 1 brokers, 1 topics");
        assert!(reports.all_down().is_none());
    }

    // Shown by: waiting for an answer with metadata: a publisher that rests got none for half a
    // minute after its connection was closed and opened again.
    #[test]
    fn kafka_is_back_when_a_connection_is_open() {
        for (line, is_back) in [
            ("[thrd:b:1/1]: Skipping metadata refresh of 1 topic(s): connected: already being requested", true),
            ("[thrd:b:1/1]: Requesting metadata for 1/1 topics: connected", true),
            ("[thrd:main]: Skipping metadata refresh of 1 topic(s): connected: no usable brokers", false),
            ("[thrd:main]: Requesting metadata for 1/1 topics: periodic topic and broker list refresh", false),
        ] {
            let reports = Reports::default();
            reports.error(&KafkaError::Global(RDKafkaErrorCode::AllBrokersDown), "1/1 brokers are down");
            reports.log(RDKafkaLogLevel::Debug, "METADATA", line);
            assert_eq!(reports.all_down().is_none(), is_back, "{line}");
        }
    }

    // Shown by: deciding by the code alone.
    #[test]
    fn a_refused_certificate_is_told_from_a_broken_connection_whatever_its_code() {
        let refused = "sasl_ssl://b:1/bootstrap: ../ssl/statem/statem_clnt.c:1889:tls_post_process_server_certificate \
                       error:0A000086:SSL routines::certificate verify failed (after 14ms in state SSL_HANDSHAKE)";
        for (code, reason, is_refused) in [
            (RDKafkaErrorCode::BrokerTransportFailure, refused, true),
            (RDKafkaErrorCode::SSL, "SSL handshake failed", true),
            (RDKafkaErrorCode::BrokerTransportFailure, "ssl://b:1: SSL routines::unexpected eof while reading", false),
        ] {
            let reports = Reports::default();
            reports.error(&KafkaError::Global(code), reason);
            let error = reports.unauthorised();
            assert_eq!(error.is_some(), is_refused, "{error:?}");
            let is_untrusted = matches!(error, Some(BrokerError::Untrusted(_)));
            assert_eq!(is_untrusted, reason == refused, "a handshake that broke may be of a broker that starts");
        }
    }

    #[test]
    fn a_refused_password_outweighs_the_broken_connection_that_follows() {
        let reports = Reports::default();
        let code = |code| KafkaError::Global(code);
        reports.error(&code(RDKafkaErrorCode::Authentication), "sasl_ssl://b:1: Authentication failed");
        reports.error(&code(RDKafkaErrorCode::BrokerTransportFailure), "b:1: Disconnected");
        reports.error(&code(RDKafkaErrorCode::AllBrokersDown), "1/1 brokers are down");
        let error = reports.explain("asked for metadata", "no answer");
        assert!(matches!(&error, BrokerError::Unauthorised(reason) if reason.contains("b:1")), "{error}");
        assert_eq!(reports.all_down().unwrap(), "b:1: Disconnected");
        reports.works();
        assert!(reports.all_down().is_none() && reports.unauthorised().is_none());
    }
}
