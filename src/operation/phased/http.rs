//! An HTTP client for adapters of providers. It reports what is certain about a failed call (O7),
//! and never sends twice.
//!
//! Promises: redirects and retries of the client library are off. [`CallOutcome::NotConnected`] is
//! returned only if no byte of the request was sent (name not found, refused, TLS failed). An
//! answer is read up to a limit. Proxies of the environment are not used, because a proxy that
//! refuses a connection proves nothing about the provider.
//!
//! Not here: what an answer proves; an adapter reads status and body.

use std::time::Duration;

use reqwest::header::{HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use reqwest::{Method, Url, redirect};

use crate::error::HandlerError;
use crate::operation::rules::pace::asked_to_wait;
use crate::operation::rules::provider::Answer;

const ANSWER_MAX: usize = 64 << 10;

/// A client for one provider. Cheap to clone.
#[derive(Debug, Clone)]
pub struct HttpCaller {
    client: reqwest::Client,
}

/// The result of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CallOutcome {
    /// No connection was made: not one byte of the request was sent.
    NotConnected(String),
    /// The call ended without a complete answer: the effect may have happened.
    NoAnswer(String),
    /// The provider answered, and the answer was read as far as it is asked for.
    Answered(Response),
}

/// An answer, read completely or, for a webhook, up to a limit.
#[derive(Clone, PartialEq, Eq)]
pub struct Response {
    /// The HTTP status of the answer.
    pub status: u16,
    /// The headers of the answer.
    pub headers: HeaderMap,
    /// The bytes of the body, at most 64 KiB.
    pub body: Vec<u8>,
}

/// Without header values and body, which may hold data of people.
impl std::fmt::Debug for Response {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Response")
            .field("status", &self.status)
            .field("bytes", &self.body.len())
            .finish_non_exhaustive()
    }
}

impl HttpCaller {
    /// A client whose calls take at most `timeout`, of which connecting may take a third.
    ///
    /// # Errors
    /// TLS cannot be set up.
    pub fn new(timeout: Duration) -> Result<Self, reqwest::Error> {
        Self::over(reqwest::Client::builder(), timeout)
    }

    /// As [`Self::new`], with the settings of a builder, such as certificates or name resolution.
    ///
    /// # Errors
    /// The settings cannot be used.
    pub fn over(builder: reqwest::ClientBuilder, timeout: Duration) -> Result<Self, reqwest::Error> {
        let client = builder
            .redirect(redirect::Policy::none())
            .retry(reqwest::retry::never())
            .no_proxy()
            .connect_timeout(timeout / 3)
            .timeout(timeout)
            .build()?;
        Ok(Self { client })
    }

    /// Sends these bytes once.
    ///
    /// # Errors
    /// A header cannot be sent; no byte was sent.
    ///
    /// # Cancel safety
    /// If the future is dropped, the outcome is unknown.
    pub async fn call(
        &self,
        method: Method,
        url: Url,
        headers: &[(&str, &str)],
        body: Vec<u8>,
    ) -> Result<CallOutcome, HandlerError> {
        self.send((method, url), headers, body, None).await
    }

    /// As [`Self::call`]. With `saw_max` the status is the whole answer: only so many bytes of the
    /// body are read, and it may break off.
    pub(super) async fn send(
        &self,
        (method, url): (Method, Url),
        headers: &[(&str, &str)],
        body: Vec<u8>,
        saw_max: Option<usize>,
    ) -> Result<CallOutcome, HandlerError> {
        let mut sent = HeaderMap::new();
        for (name, value) in headers {
            let bad = || HandlerError::terminal(format_args!("the header `{name}` cannot be sent"));
            let name = HeaderName::from_bytes(name.as_bytes()).map_err(|_| bad())?;
            sent.append(name, HeaderValue::from_str(value).map_err(|_| bad())?);
        }
        let answered = self.client.request(method, url).headers(sent).body(body).send().await;
        let mut response = match answered {
            Ok(response) => response,
            Err(error) if was_not_sent(&error) => return Ok(CallOutcome::NotConnected(causes(&error))),
            Err(error) => return Ok(CallOutcome::NoAnswer(causes(&error))),
        };
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        let body = match saw_max {
            Some(max) => Ok(beginning_of(&mut response, max).await),
            None => body_of(&mut response, ANSWER_MAX).await,
        };
        Ok(match body {
            Ok(body) => CallOutcome::Answered(Response { status, headers, body }),
            // The status alone decides nothing: the body says what was done.
            Err(why) => CallOutcome::NoAnswer(why),
        })
    }
}

impl Response {
    /// The pause that `Retry-After` asks for, given in seconds or as a date.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        asked_to_wait(self.headers.get(RETRY_AFTER)?.to_str().ok()?, std::time::SystemTime::now())
    }

    /// The answer with only the status and `Retry-After` filled in.
    #[must_use]
    pub fn answer(&self) -> Answer {
        let mut answer = Answer::status(self.status);
        if let Answer::Status { retry_after, .. } = &mut answer {
            *retry_after = self.retry_after();
        }
        answer
    }
}

/// Reads the body of an answer to its end; the error says why that failed.
pub(crate) async fn body_of(response: &mut reqwest::Response, max: usize) -> Result<Vec<u8>, String> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(|error| causes(&error))? {
        if body.len() + chunk.len() > max {
            return Err(format!("the answer is longer than {max} bytes"));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

/// Reads at most so many bytes of a body, up to its end or its failure.
async fn beginning_of(response: &mut reqwest::Response, max: usize) -> Vec<u8> {
    let mut body = Vec::new();
    while body.len() < max
        && let Ok(Some(chunk)) = response.chunk().await
    {
        body.extend_from_slice(&chunk);
    }
    body.truncate(max);
    body
}

/// Whether not one byte of the request was sent: reqwest says so only of errors while the
/// connection is made, which include the timeout of its connector.
pub(crate) fn was_not_sent(error: &reqwest::Error) -> bool {
    error.is_connect() || error.is_builder()
}

/// The causes of an error, without its URL, which may hold secrets.
pub(crate) fn causes(error: &reqwest::Error) -> String {
    let mut text = String::from("the call failed");
    let mut cause = std::error::Error::source(error);
    while let Some(one) = cause {
        text.push_str(": ");
        text.push_str(&one.to_string());
        cause = one.source();
    }
    text
}

#[cfg(test)]
mod tests;
