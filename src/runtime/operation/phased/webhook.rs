//! Webhooks as operations in phases: durable, signed, repeated under one id (O28).
//!
//! By contract with the receiver (Standard Webhooks) the strategy is [`Strategy::Key`]: a receiver keeps `webhook-id` for the
//! window's retention, and takes it once. So:
//!
//! * `webhook-id`, `Idempotency-Key` and the body's bytes are committed before the first send and are the same in each; timestamp
//!   and signature are made anew for each.
//! * A 2xx is the end. A 4xx to the only send that can have arrived is a refusal. Redirects are not followed and are failures. All
//!   else is tried again with the backoff of [`DriveSettings`](super::DriveSettings), while the window is open; then it is dead,
//!   which an operator sees as parked.
//! * An endpoint that keeps failing is left alone for a while, without an attempt being counted.
//! * Endpoints at private addresses are refused, by address and by what a name resolves to, unless their host is allowed.
//!
//! [`Webhooks::flow`] is an operation of its own: give the event's id as its key, and it is sent once however often it is asked
//! for. In a flow of one's own, `Effect::new("notify", webhooks, strategy)` sends one beside other effects.
//!
//! Not here: which events a receiver wants, and where its secret is kept.

mod address;
mod sign;

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use async_trait::async_trait;
use reqwest::{Method, Url};
use serde::{Deserialize, Serialize};

pub use self::sign::{BadSecret, WebhookSecret};
pub use super::sending::delivery;

use self::address::{Addresses, Public};
use super::flow::{Flow, FlowError};
use super::http::{HttpCaller, Outcome};
use super::identity::ProviderKey;
use super::provider::{Call, Prepare, Provider, Sent};
use super::sending;
use crate::error::HandlerError;
use crate::policy::breaker::{Breaker, BreakerOptions};
use crate::policy::operation::provider::{Answer, Matches, Strategy, Window};
use crate::policy::operation::{FingerprintWriter, IdempotentCommand, Mode, Route};
use crate::runtime::operation::Endpoint;
use crate::store::Phases;

/// So much of a receiver's answer is kept as evidence, in bytes.
const SAW_MAX: usize = 512;
/// How long a name may take to be resolved.
const RESOLVING: Duration = Duration::from_secs(2);

/// Which secrets sign for an endpoint: all of them, so that a receiver can change from one to the next.
type Secrets = Arc<dyn Fn(&Url) -> Vec<WebhookSecret> + Send + Sync>;

/// A webhook to be sent once.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SendWebhook {
    /// Where to: `https`, or `http` where the host is allowed.
    pub url: String,
    /// The type of the body.
    pub content_type: String,
    /// The body, sent as it is.
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
    /// How long a receiver may take. Default 10 s.
    pub timeout: Duration,
    /// Hosts that may be at private addresses, and may be spoken to by `http`. Default none.
    pub allowed_hosts: BTreeSet<String>,
    /// When an endpoint is left alone.
    pub breaker: BreakerOptions,
}

impl Default for WebhookOptions {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(10),
            allowed_hosts: BTreeSet::new(),
            breaker: BreakerOptions { failures: 5, open: Duration::from_secs(30) },
        }
    }
}

/// The sender of webhooks: a provider of phased operations. Clones share connections and breakers.
#[derive(Clone)]
pub struct Webhooks {
    caller: HttpCaller,
    addresses: Arc<Addresses>,
    secrets: Secrets,
    options: WebhookOptions,
    breakers: Arc<Mutex<HashMap<String, Breaker>>>,
    began: Instant,
}

impl std::fmt::Debug for Webhooks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Webhooks").field("options", &self.options).finish_non_exhaustive()
    }
}

/// Where to, as it stands before the body in the stored bytes.
#[derive(Serialize, Deserialize)]
struct Envelope {
    url: String,
    content_type: String,
}

impl Webhooks {
    /// A sender that signs with what `secrets` gives for an endpoint; where that is nothing, nothing is sent.
    ///
    /// # Errors
    /// TLS cannot be set up.
    pub fn new(
        options: WebhookOptions,
        secrets: impl Fn(&Url) -> Vec<WebhookSecret> + Send + Sync + 'static,
    ) -> Result<Self, reqwest::Error> {
        let addresses = Arc::new(Addresses::new(options.allowed_hosts.clone()));
        let builder = reqwest::Client::builder().dns_resolver(Public(Arc::clone(&addresses)));
        Ok(Self {
            caller: HttpCaller::over(builder, options.timeout)?,
            addresses,
            secrets: Arc::new(secrets),
            options,
            breakers: Arc::default(),
            began: Instant::now(),
        })
    }

    /// The operation that sends one webhook, with the receivers' window.
    ///
    /// # Errors
    /// Nothing can be repeated in that window.
    pub fn flow<S: Phases>(self, window: Window) -> Result<Flow<S>, FlowError> {
        sending::flow::<S, SendWebhook, _>("webhook", self, Strategy::Key(window), "WEBHOOK_REFUSED")
    }

    /// The endpoint of that operation; its keys are UUIDs v7, such as the ids of messages.
    #[must_use]
    pub fn endpoint() -> Endpoint {
        Endpoint::typed::<SendWebhook>(Route::new(Mode::Phased))
    }

    async fn post(&self, call: &Call<'_>) -> Sent {
        let not_sent = |why: String| Sent { answer: Answer::NotConnected, saw: why.into_bytes() };
        let (envelope, body) = match sending::opened::<Envelope>(call.bytes) {
            Ok(parts) => parts,
            Err(error) => return not_sent(error.message().to_owned()),
        };
        let url = match Url::parse(&envelope.url) {
            Ok(url) => url,
            Err(error) => return not_sent(error.to_string()),
        };
        match tokio::time::timeout(RESOLVING, self.addresses.check(&url)).await {
            Err(_) => return not_sent("the host's name was not resolved in time".to_owned()),
            Ok(Err(error)) if error.is_refusal() => {
                // Ours to refuse, as a receiver that is not the one that was asked would: not a verdict on earlier sends.
                return Sent { answer: Answer::status(421), saw: error.to_string().into_bytes() };
            }
            Ok(Err(error)) => return not_sent(error.to_string()),
            Ok(Ok(())) => {}
        }
        let secrets = (self.secrets)(&url);
        if secrets.is_empty() {
            return not_sent("no secret is known for the endpoint".to_owned());
        }
        let origin = url.origin().ascii_serialization();
        if let Err(left) = self.admit(&origin) {
            return not_sent(format!("the endpoint is left alone for {left:?} after failures in a row"));
        }
        let id = call.key.as_str();
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
        let (sent, well) = match self.caller.call(Method::POST, url, &headers, body.to_vec()).await {
            Ok(Outcome::Answered(response)) => {
                let well = matches!(response.status, 200..=299 | 400..=499);
                let mut answer = response.answer();
                if let Answer::Status { matches, .. } = &mut answer {
                    // A receiver that takes it says no more than 2xx.
                    *matches = Matches::ALL;
                }
                let mut saw = response.body;
                saw.truncate(SAW_MAX);
                (Sent { answer, saw }, well)
            }
            Ok(Outcome::NoAnswer(saw)) => (Sent { answer: Answer::NoAnswer, saw: saw.into_bytes() }, false),
            Ok(Outcome::NotConnected(saw)) => (not_sent(saw), false),
            // Nothing is wrong with the endpoint.
            Err(error) => (not_sent(error.to_string()), true),
        };
        self.tell(&origin, well);
        sent
    }

    fn admit(&self, origin: &str) -> Result<(), Duration> {
        let mut breakers = self.breakers.lock().unwrap_or_else(PoisonError::into_inner);
        let breaker = breakers.entry(origin.to_owned()).or_insert_with(|| Breaker::new(self.options.breaker));
        breaker.admit(self.began.elapsed())
    }

    fn tell(&self, origin: &str, well: bool) {
        let mut breakers = self.breakers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(breaker) = breakers.get_mut(origin) {
            breaker.ended(well, self.began.elapsed());
        }
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
        // Longer than what is bounded inside, which knows more of what happened.
        self.options.timeout + RESOLVING + Duration::from_millis(500)
    }

    async fn send(&self, call: &Call<'_>) -> Sent {
        self.post(call).await
    }
}

impl Prepare<SendWebhook> for Webhooks {
    fn prepare(&self, request: &SendWebhook, _key: &ProviderKey) -> Result<Vec<u8>, HandlerError> {
        let url = Url::parse(&request.url).map_err(HandlerError::terminal)?;
        self.addresses.permits(&url).map_err(HandlerError::terminal)?;
        let envelope = Envelope { url: request.url.clone(), content_type: request.content_type.clone() };
        sending::packed(&envelope, request.body.as_bytes())
    }
}
