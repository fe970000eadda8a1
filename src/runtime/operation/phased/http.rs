//! An HTTP client for adapters of providers: it says what is certain of a failed call (O7), and
//! does nothing twice.
//!
//! Promises: redirects and retries of the client library are off; [`Outcome::NotConnected`] only
//! where no connection came to be (name not found, refused, TLS failed); an answer is read to a
//! bound; proxies of the environment are not used, because one that refuses a connection says
//! nothing of the provider.
//!
//! Not here: what an answer proves: an adapter reads status and body.

use std::time::Duration;

use reqwest::header::{HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use reqwest::{Method, Url, redirect};

use crate::policy::operation::pace::asked_to_wait;
use crate::policy::operation::provider::Answer;

/// The longest answer that is read, in bytes.
const ANSWER_MAX: usize = 64 << 10;

/// A client for one provider. Cheap to clone.
#[derive(Debug, Clone)]
pub struct HttpCaller {
    client: reqwest::Client,
}

/// What came of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// No connection came to be: not a byte of the request left.
    NotConnected(String),
    /// It ended without a whole answer: anything may have happened.
    NoAnswer(String),
    /// The provider answered; the answer is whole.
    Answered(Response),
}

/// An answer that was read whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Response {
    /// The HTTP status of the answer.
    pub status: u16,
    /// The headers of the answer.
    pub headers: HeaderMap,
    /// The bytes of the body, at most 64 KiB.
    pub body: Vec<u8>,
}

/// A header that cannot be sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the header `{0}` cannot be sent")]
pub struct BadHeader(String);

impl HttpCaller {
    /// A client whose calls take at most `timeout`, of which a third may go into connecting.
    ///
    /// # Errors
    /// TLS cannot be set up.
    pub fn new(timeout: Duration) -> Result<Self, reqwest::Error> {
        Self::over(reqwest::Client::builder(), timeout)
    }

    /// The same over settings of a builder's: certificates, name resolution.
    ///
    /// # Errors
    /// They cannot be used.
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
    /// A header cannot be sent: nothing left.
    ///
    /// # Cancel safety
    /// Dropped, the outcome is unknown.
    pub async fn call(
        &self,
        method: Method,
        url: Url,
        headers: &[(&str, &str)],
        body: Vec<u8>,
    ) -> Result<Outcome, BadHeader> {
        let mut sent = HeaderMap::new();
        for (name, value) in headers {
            let bad = || BadHeader((*name).to_owned());
            let name = HeaderName::from_bytes(name.as_bytes()).map_err(|_| bad())?;
            sent.append(name, HeaderValue::from_str(value).map_err(|_| bad())?);
        }
        let mut response = match self.client.request(method, url).headers(sent).body(body).send().await {
            Ok(response) => response,
            Err(error) => return Ok(lost(&error)),
        };
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        let mut body = Vec::new();
        loop {
            match response.chunk().await {
                Ok(Some(chunk)) if body.len() + chunk.len() <= ANSWER_MAX => body.extend_from_slice(&chunk),
                Ok(Some(_)) => return Ok(Outcome::NoAnswer("the answer is too long".to_owned())),
                Ok(None) => return Ok(Outcome::Answered(Response { status, headers, body })),
                // The status alone decides nothing: what was done stands in the body.
                Err(error) => return Ok(Outcome::NoAnswer(chain(&error))),
            }
        }
    }
}

impl Response {
    /// Its `Retry-After`, in seconds or as a date.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        asked_to_wait(self.headers.get(RETRY_AFTER)?.to_str().ok()?, std::time::SystemTime::now())
    }

    /// The answer with nothing known of it but status and `Retry-After`.
    #[must_use]
    pub fn answer(&self) -> Answer {
        match Answer::status(self.status) {
            Answer::Status { status, listed, in_progress, replayed, matches, .. } => {
                Answer::Status { status, listed, in_progress, replayed, matches, retry_after: self.retry_after() }
            }
            other => other,
        }
    }
}

/// What is certain of a call that failed.
fn lost(error: &reqwest::Error) -> Outcome {
    // reqwest says so of errors while the connection is made, and of no others: its connector's
    // timeout is one of them.
    if error.is_connect() || error.is_builder() {
        return Outcome::NotConnected(chain(error));
    }
    Outcome::NoAnswer(chain(error))
}

/// An error with its causes, without its URL.
fn chain(error: &reqwest::Error) -> String {
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
