//! Webhooks as phased operations: durable, signed, and sent again under one id (O28).
//!
//! By the contract with the receiver (Standard Webhooks) the strategy is [`Strategy::Key`]: a
//! receiver remembers a `webhook-id` for the window's retention and takes it once:
//!
//! * `webhook-id`, `Idempotency-Key` and the bytes of the body are committed before the first send
//!   and are the same in every send. Timestamp and signature are made for each send.
//! * A 2xx ends the operation. A 4xx, other than 408, 409, 425 and 429, is a refusal if it answers
//!   the only send that can have arrived. Redirects are not followed. All other answers, redirects
//!   among them, are tried again while the window is open and attempts are left; the window begins
//!   when the webhook is accepted. After that it is dead, which an operator sees as parked.
//! * An endpoint that cannot be reached (name not found, refused, TLS failed) is tried again, and
//!   no attempt is counted. As long as no send can have arrived, the window does not end that.
//! * An endpoint that keeps failing gets no requests for a while; no attempt is counted.
//! * Endpoints at private addresses are refused when the webhook is accepted, unless their host is
//!   allowed. If a name resolves to a private address, or the process that sends does not allow the
//!   host, nothing is sent. This is no refusal, because the next resolution or another process may
//!   differ, but it counts as an attempt.
//! * The number of requests to one endpoint at a time, and of failing endpoints that are
//!   remembered, is bounded.
//!
//! [`Webhooks::flow`] is an operation of its own; its key is the id of the event. In another flow,
//! `Effect::new("notify", webhooks, strategy)` sends one beside other effects.
//!
//! Not here: which events a receiver wants, and the storage of its secret.

mod address;
mod sign;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use async_trait::async_trait;
use parking_lot::Mutex;
use reqwest::header::HeaderValue;
use reqwest::{Method, Url};
use serde::{Deserialize, Serialize};

pub use self::sign::WebhookSecret;

use self::address::{Addresses, Barred, Public};
use super::flow::Flow;
use super::http::{CallOutcome, HttpCaller};
use super::provider::{Call, Prepare, Provider, Sent};
use super::sending;
use crate::error::{HandlerError, Invalid};
use crate::operation::Endpoint;
use crate::operation::rules::provider::{Answer, KeyWindow, Strategy};
use crate::operation::rules::{FingerprintWriter, IdempotentCommand, Mode, Route};
use crate::store::base::Base;
use crate::time::breaker::{Breaker, BreakerOptions};

/// The largest number of bytes of a receiver's answer that are kept as evidence.
const SAW_MAX: usize = 512;
const RESOLVING: Duration = Duration::from_secs(2);
/// The largest number of endpoints that are remembered because they fail or have requests under
/// way.
const ENDPOINTS_MAX: usize = 4_096;

/// Returns the secrets that sign for an endpoint: all of them, so that a receiver can change from
/// one to the next.
type Secrets = Arc<dyn Fn(&Url) -> Vec<WebhookSecret> + Send + Sync>;

/// The command to send one webhook.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SendWebhook {
    /// The URL of the endpoint: `https`, or `http` if the host is allowed.
    pub url: String,
    /// The type of the body.
    pub content_type: String,
    /// The body, which is sent unchanged.
    pub body: String,
}

impl std::fmt::Debug for SendWebhook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SendWebhook({} bytes of {})", self.body.len(), self.content_type)
    }
}

impl IdempotentCommand for SendWebhook {
    const OPERATION: &'static str = "send_webhook";
    const VERSION: u32 = 1;

    fn fingerprint(&self, _version: u32, writer: &mut FingerprintWriter) {
        writer.field("url", self.url.as_str());
        writer.field("contentType", self.content_type.as_str());
        writer.field("body", self.body.as_str());
    }
}

/// Settings of the sender.
#[derive(Debug, Clone)]
pub struct WebhookOptions {
    /// How long a receiver may take to answer. Default 10 s.
    pub timeout: Duration,
    /// Hosts that may have private addresses and may be called by `http`, written as a URL has them
    /// after parsing: in lower case, IPv6 in brackets. Default: none.
    pub allowed_hosts: BTreeSet<String>,
    /// After how many failures in a row an endpoint gets no requests, and for how long. Default 5,
    /// and 30 s.
    pub breaker: BreakerOptions,
    /// How many requests this process may send to one endpoint at a time, so that a slow endpoint
    /// leaves room for others. Default 4.
    pub in_flight_max: u32,
}

impl Default for WebhookOptions {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(10),
            allowed_hosts: BTreeSet::new(),
            breaker: BreakerOptions { failures: 5, open: Duration::from_secs(30) },
            in_flight_max: 4,
        }
    }
}

/// Sends webhooks: a provider of phased operations. Clones share connections and breakers.
#[derive(Clone)]
pub struct Webhooks {
    caller: HttpCaller,
    addresses: Arc<Addresses>,
    secrets: Secrets,
    options: WebhookOptions,
    endpoints: Arc<Mutex<HashMap<String, Endpoints>>>,
    began: Instant,
}

impl std::fmt::Debug for Webhooks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Webhooks").field("options", &self.options).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct Endpoints {
    breaker: Breaker,
    in_flight: u32,
}

/// The destination; it is stored before the body in the same bytes.
#[derive(Serialize, Deserialize)]
struct Envelope {
    url: String,
    content_type: String,
}

impl Webhooks {
    /// A sender that signs with the secrets that `secrets` returns for an endpoint. If it returns
    /// none, nothing is sent.
    ///
    /// # Errors
    /// TLS cannot be set up.
    pub fn new(
        options: WebhookOptions,
        secrets: impl Fn(&Url) -> Vec<WebhookSecret> + Send + Sync + 'static,
    ) -> Result<Self, reqwest::Error> {
        let addresses = Arc::new(Addresses { allowed_hosts: options.allowed_hosts.clone() });
        let builder = reqwest::Client::builder().dns_resolver(Public(Arc::clone(&addresses)));
        Ok(Self {
            caller: HttpCaller::over(builder, options.timeout)?,
            addresses,
            secrets: Arc::new(secrets),
            options,
            endpoints: Arc::default(),
            began: Instant::now(),
        })
    }

    /// The flow of the operation that sends one webhook; `window` is the window of the receivers.
    ///
    /// # Errors
    /// Nothing can be sent again in that window, or its `max_in_flight` is shorter than
    /// [`Provider::timeout`] of this sender.
    pub fn flow<S: Base>(self, window: KeyWindow) -> Result<Flow<S>, Invalid> {
        sending::flow::<S, SendWebhook, _>("webhook", self, Strategy::Key(window), "WEBHOOK_REFUSED")
    }

    /// The endpoint of that operation; its keys are UUIDs v7, such as the ids of messages.
    #[must_use]
    pub fn endpoint() -> Endpoint {
        Endpoint::typed::<SendWebhook>(Route::new(Mode::Phased))
    }

    /// Takes a place at the endpoint; the error says why there is none.
    fn admit(&self, origin: &str) -> Result<(), String> {
        let now = self.began.elapsed();
        let mut endpoints = self.endpoints.lock();
        if endpoints.len() >= ENDPOINTS_MAX && !endpoints.contains_key(origin) {
            endpoints.retain(|_, one| one.in_flight > 0 || one.breaker.is_open(now));
            if endpoints.len() >= ENDPOINTS_MAX {
                return Err(format!("{ENDPOINTS_MAX} other endpoints fail or are busy"));
            }
        }
        let fresh = || Endpoints { breaker: Breaker::new(self.options.breaker), in_flight: 0 };
        let endpoint = endpoints.entry(origin.to_owned()).or_insert_with(fresh);
        if endpoint.in_flight >= self.options.in_flight_max.max(1) {
            return Err(format!("the endpoint has {} requests under way", endpoint.in_flight));
        }
        let left = endpoint.breaker.admit(now);
        left.map_err(|left| format!("the endpoint is left alone for {left:?} after failures in a row"))?;
        endpoint.in_flight += 1;
        Ok(())
    }

    /// Returns the place and records whether the request went well; `None`: not known.
    fn leave(&self, origin: &str, well: Option<bool>) {
        let mut endpoints = self.endpoints.lock();
        let Some(endpoint) = endpoints.get_mut(origin) else { return };
        endpoint.in_flight = endpoint.in_flight.saturating_sub(1);
        if let Some(well) = well {
            endpoint.breaker.ended(well, self.began.elapsed());
        }
        if endpoint.in_flight == 0 && endpoint.breaker == Breaker::new(self.options.breaker) {
            endpoints.remove(origin);
        }
    }
}

/// A place at an endpoint. It is also returned if the request is dropped.
struct Place<'a> {
    webhooks: &'a Webhooks,
    origin: &'a str,
    well: Option<bool>,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.webhooks.leave(self.origin, self.well);
    }
}

#[async_trait]
impl Provider for Webhooks {
    fn name(&self) -> &'static str {
        "webhook"
    }

    fn version(&self) -> u32 {
        1
    }

    fn timeout(&self) -> Duration {
        // Longer than the limits inside `send`, whose errors say more about what happened.
        self.options.timeout.saturating_add(RESOLVING + Duration::from_millis(500))
    }

    async fn send(&self, call: &Call<'_>) -> Sent {
        let not_sent = |why: String| Sent { answer: Answer::NotConnected, saw: why.into_bytes() };
        let not_made = |why: String| Sent { answer: Answer::NotMade, saw: why.into_bytes() };
        let (envelope, body) = match sending::opened::<Envelope>(call.bytes) {
            Ok(parts) => parts,
            Err(error) => return not_made(error.message),
        };
        let url = match Url::parse(&envelope.url) {
            Ok(url) => url,
            Err(error) => return not_made(error.to_string()),
        };
        if let Err(error) = self.addresses.permits(&url) {
            // The process that took the webhook allowed this host, and this one does not. No
            // receiver has refused anything.
            return not_made(format!("this process does not allow the endpoint, see `allowed_hosts`: {error}"));
        }
        match tokio::time::timeout(RESOLVING, self.addresses.resolves(&url)).await {
            Err(_) => return not_sent("the host's name was not resolved in time".to_owned()),
            Ok(Err(error @ Barred::Unresolved(_))) => return not_sent(error.to_string()),
            // This is one answer of one resolver; the next may differ.
            Ok(Err(error)) => return not_made(error.to_string()),
            Ok(Ok(())) => {}
        }
        let secrets = (self.secrets)(&url);
        if secrets.is_empty() {
            return not_made("no secret is known for the endpoint".to_owned());
        }
        let origin = url.origin().ascii_serialization();
        if let Err(why) = self.admit(&origin) {
            return not_sent(why);
        }
        let mut place = Place { webhooks: self, origin: &origin, well: None };
        let id = call.key;
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let timestamp = since.as_secs().to_string();
        let signature = sign::signatures(&secrets, id, &timestamp, body);
        let headers = [
            ("content-type", envelope.content_type.as_str()),
            ("idempotency-key", id),
            ("webhook-id", id),
            ("webhook-timestamp", timestamp.as_str()),
            ("webhook-signature", signature.as_str()),
        ];
        // A receiver answers by its status. Its body may be a long page, or never end.
        let called = self.caller.send((Method::POST, url), &headers, body.to_vec(), Some(SAW_MAX)).await;
        let (sent, well) = match called {
            Ok(CallOutcome::Answered(response)) => {
                let well = matches!(response.status, 200..=299 | 400..=499);
                (Sent { answer: sending::uncompared(response.answer()), saw: response.body }, well)
            }
            Ok(CallOutcome::NoAnswer(saw)) => (Sent { answer: Answer::NoAnswer, saw: saw.into_bytes() }, false),
            Ok(CallOutcome::NotConnected(saw)) => (not_sent(saw), false),
            // The fault is not the endpoint's.
            Err(error) => (not_made(error.to_string()), true),
        };
        place.well = Some(well);
        sent
    }
}

impl Prepare<SendWebhook> for Webhooks {
    fn prepare(&self, request: &SendWebhook, _key: &str) -> Result<Vec<u8>, HandlerError> {
        let url = Url::parse(&request.url).map_err(HandlerError::terminal)?;
        self.addresses.permits(&url).map_err(HandlerError::terminal)?;
        HeaderValue::from_str(&request.content_type).map_err(|_| {
            HandlerError::terminal(format!("the content type {:?} cannot stand in a header", request.content_type))
        })?;
        let envelope = Envelope { url: request.url.clone(), content_type: request.content_type.clone() };
        sending::packed(&envelope, request.body.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn webhooks(in_flight_max: u32) -> Webhooks {
        let options = WebhookOptions { in_flight_max, ..WebhookOptions::default() };
        Webhooks::new(options, |_| Vec::new()).expect("TLS")
    }

    // No lease has room for it, so the registration refuses it by name. Shown by: `+` (it panics).
    #[test]
    fn a_timeout_of_any_length_can_be_asked_for() {
        let options = WebhookOptions { timeout: Duration::MAX, ..WebhookOptions::default() };
        assert_eq!(Webhooks::new(options, |_| Vec::new()).expect("TLS").timeout(), Duration::MAX);
    }

    // A deploy in which one process does not allow the host yet. Shown by: a 421 in its place,
    // which is the refusal of a receiver and ended the webhook for good.
    #[tokio::test]
    async fn o28_a_host_that_only_this_process_does_not_allow_refuses_no_webhook() {
        let allows = WebhookOptions { allowed_hosts: ["127.0.0.1".to_owned()].into(), ..WebhookOptions::default() };
        let other = Webhooks::new(allows, |_| Vec::new()).expect("TLS");
        let (url, content_type) = ("http://127.0.0.1:9/hook".to_owned(), "text/plain".to_owned());
        let bytes = other.prepare(&SendWebhook { url, content_type, body: String::new() }, "op_7").expect("bytes");
        let call = Call { key: "op_7", bytes: &bytes, version: 1, send: 2 };
        let sent = webhooks(1).send(&call).await;
        assert_eq!(sent.answer, Answer::NotMade, "{}", String::from_utf8_lossy(&sent.saw));
    }

    // Shown by: a map that only grows (tenants give URLs, such as `*.evil.example`).
    #[test]
    fn endpoints_that_are_remembered_are_bounded_and_a_healthy_one_is_forgotten() {
        let webhooks = webhooks(1);
        let count = || webhooks.endpoints.lock().len();
        for number in 0..2 * ENDPOINTS_MAX {
            let origin = format!("https://{number}.example");
            assert_eq!(webhooks.admit(&origin), Ok(()));
            webhooks.leave(&origin, Some(false));
            assert!(count() <= ENDPOINTS_MAX);
        }
        let before = count();
        webhooks.admit("https://healthy.example").expect("let in");
        webhooks.leave("https://healthy.example", Some(true));
        assert!(count() <= before);
        // All of them are busy: one more endpoint is neither remembered nor called.
        let webhooks = self::webhooks(1);
        for number in 0..ENDPOINTS_MAX {
            webhooks.admit(&format!("https://{number}.example")).expect("let in");
        }
        assert!(webhooks.admit("https://one-more.example").is_err());
        webhooks.leave("https://0.example", Some(true));
        assert_eq!(webhooks.admit("https://one-more.example"), Ok(()));
    }

    // Shown by: no limit: one slow receiver takes all places of a worker.
    #[test]
    fn one_endpoint_has_so_many_requests_at_once_and_others_have_their_own() {
        let webhooks = webhooks(2);
        for expected in [true, true, false] {
            assert_eq!(webhooks.admit("https://slow.example").is_ok(), expected);
        }
        assert_eq!(webhooks.admit("https://other.example"), Ok(()));
        // Dropped without a result, as by a timeout.
        drop(Place { webhooks: &webhooks, origin: "https://slow.example", well: None });
        assert_eq!(webhooks.admit("https://slow.example"), Ok(()));
    }
}
