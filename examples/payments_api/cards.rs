//! The adapter of the card provider: what is sent, and how its answers are read (O5, O7).
//!
//! Listed as a verdict is one code: `card_declined`, which the provider answers to every later
//! request with the key too.

use std::time::Duration;

use oncebox::operation::phased::http::{CallOutcome, HttpCaller};
use oncebox::operation::phased::{Asked, Call, Prepare, Provider, Sent};
use oncebox::operation::provider::{Answer, Matches, QueryAnswer};
use oncebox::{HandlerError, async_trait};
use reqwest::{Method, Url};
use serde::{Deserialize, Serialize};

/// What is asked of the provider.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct CardCharge {
    pub(crate) amount_minor: i64,
    pub(crate) currency: String,
    pub(crate) reference: String,
}

#[derive(Debug, Deserialize)]
struct Coded {
    code: String,
}

#[derive(Debug, Deserialize)]
struct Found {
    charges: Vec<CardCharge>,
}

/// The provider at this URL.
#[derive(Debug)]
pub(crate) struct Cards {
    url: String,
    caller: HttpCaller,
    timeout: Duration,
}

impl Cards {
    pub(crate) fn new(url: &str, timeout: Duration) -> Result<Self, Box<dyn std::error::Error + Send + Sync>> {
        let url = url.trim_end_matches('/').to_owned();
        url.parse::<Url>()?;
        Ok(Self { url, caller: HttpCaller::new(timeout)?, timeout })
    }

    fn at(&self, path: &str) -> Result<Url, HandlerError> {
        Ok(format!("{}{path}", self.url).parse()?)
    }

    async fn call(
        &self,
        method: Method,
        path: &str,
        call: &Call<'_>,
        body: Vec<u8>,
    ) -> Result<CallOutcome, HandlerError> {
        let headers = [("idempotency-key", call.key), ("content-type", "application/json")];
        self.caller.call(method, self.at(path)?, &headers, body).await
    }
}

/// Whether it did what these bytes asked for.
fn matches(asked: &[u8], done: &CardCharge) -> Matches {
    serde_json::from_slice::<CardCharge>(asked).map_or_else(
        |_| Matches::default(),
        |asked| Matches {
            amount: asked.amount_minor == done.amount_minor,
            currency: asked.currency == done.currency,
            reference: asked.reference == done.reference,
        },
    )
}

#[async_trait]
impl Provider for Cards {
    fn name(&self) -> &'static str {
        "cards"
    }

    fn version(&self) -> u32 {
        1
    }

    fn timeout(&self) -> Duration {
        // A little more than the client's own, which knows more of what happened.
        self.timeout.mul_f64(1.1)
    }

    async fn send(&self, call: &Call<'_>) -> Sent {
        let response = match self.call(Method::POST, "/charges", call, call.bytes.to_vec()).await {
            Ok(CallOutcome::Answered(response)) => response,
            Ok(CallOutcome::NoAnswer(saw)) => return Sent { answer: Answer::NoAnswer, saw: saw.into_bytes() },
            Ok(CallOutcome::NotConnected(saw)) => return Sent { answer: Answer::NotConnected, saw: saw.into_bytes() },
            // The request cannot be built.
            Err(error) => return Sent { answer: Answer::NotMade, saw: error.to_string().into_bytes() },
        };
        let code = serde_json::from_slice::<Coded>(&response.body).map_or_else(|_| String::new(), |coded| coded.code);
        let done = serde_json::from_slice::<CardCharge>(&response.body);
        let answer = Answer::Status {
            status: response.status,
            listed: code == "card_declined",
            in_progress: code == "in_progress",
            replayed: false,
            matches: done.map_or_else(|_| Matches::default(), |done| matches(call.bytes, &done)),
            retry_after: response.retry_after(),
        };
        Sent { answer, saw: response.body }
    }

    async fn query(&self, call: &Call<'_>) -> Asked {
        let path = format!("/charges?key={}", call.key);
        let response = match self.call(Method::GET, &path, call, Vec::new()).await {
            Ok(CallOutcome::Answered(response)) => response,
            Ok(CallOutcome::NoAnswer(saw) | CallOutcome::NotConnected(saw)) => {
                return Asked { answer: QueryAnswer::Failed, status: None, saw: saw.into_bytes() };
            }
            Err(error) => {
                return Asked { answer: QueryAnswer::NotMade, status: None, saw: error.to_string().into_bytes() };
            }
        };
        let answer = match (response.status, serde_json::from_slice::<Found>(&response.body)) {
            (200, Ok(found)) => match found.charges.as_slice() {
                [] => QueryAnswer::NotFound,
                [one] => QueryAnswer::Done(matches(call.bytes, one)),
                // Two under one key: it happened, and not as we asked.
                _ => QueryAnswer::Done(Matches::default()),
            },
            _ => QueryAnswer::Failed,
        };
        Asked { answer, status: Some(response.status), saw: response.body }
    }
}

impl Prepare<CardCharge> for Cards {
    fn prepare(&self, request: &CardCharge, _key: &str) -> Result<Vec<u8>, HandlerError> {
        Ok(serde_json::to_vec(request)?)
    }
}
