//! A client whose requests can be sent again safely: one key for one operation, the same bytes each
//! time (O26, O27, M110).
//!
//! ```no_run
//! use oncebox::client::{Client, ClientOptions, Request};
//!
//! # async fn pay() -> Result<(), Box<dyn std::error::Error>> {
//! let client = Client::new(ClientOptions::default())?;
//! let request = Request::json("https://api.example.com/payments", &serde_json::json!({"amountMinor": 100}))?;
//! let answer = client.send(&request).await?; // or OutcomeUnknown, with the key under which to ask again
//! assert_eq!(answer.status, 201);
//! # Ok(())
//! # }
//! ```
//!
//! Promises:
//!
//! * A key is made once, or given by the caller. A request never gets a second key.
//! * Every attempt sends the same bytes. With a [`KeyJournal`], key, method, URL and body are on
//!   the disk before the first attempt, so a program that restarts continues under the same key.
//!   Where the journal keeps digests only, the caller gives the body again.
//! * One table decides what ends an operation (`resend`). After an attempt whose outcome is
//!   unknown, only a 2xx or a spent key ends it; otherwise the end is
//!   [`ClientError::OutcomeUnknown`]. A [`Request`] and its clones remember such an attempt from
//!   one call to the next.
//! * Redirects are not followed: a 302 would turn a POST into a GET, and a 307 would carry key and
//!   body to another origin.
//! * No attempt begins that might arrive after the server has forgotten the key.

mod advertised;
mod answer;
mod journal;
mod middleware;
mod request;
mod sending;

use std::sync::Arc;
use std::time::Duration;

use reqwest::header::HeaderMap;

pub use self::{
    answer::Answer,
    journal::{Bodies, JournalError, KeyJournal, Pending},
    request::Request,
};

use self::middleware::Resend;
use self::sending::{ClientState, Direct};
use crate::operation::rules::Key;
use crate::time::breaker::BreakerOptions;

/// Settings of a client.
#[derive(Debug, Clone)]
pub struct ClientOptions {
    /// The time limit of one attempt, including the body of its answer. Connecting may take a third
    /// of it: what was not connected by then was not sent, and nothing is unknown. Default 30 s.
    pub attempt_timeout: Duration,
    /// The time limit of a call of [`Client::send`]: after it no attempt begins, so that a call
    /// lasts at most one attempt longer. Default 5 min.
    pub total: Duration,
    /// How long the server keeps a key at least, counted from the first send; see
    /// [`Client::as_advertised`]. The default of 24 h is a guess about the server.
    pub lifetime: Duration,
    /// The upper bound of the first pause; the bound doubles each time. Default 200 ms.
    pub backoff: Duration,
    /// The upper bound of the client's own pauses; a server may ask for more. Default 20 s.
    pub backoff_max: Duration,
    /// The longest body of an answer, in bytes; a longer answer counts as none. Default 16 MiB.
    pub answer_bytes_max: usize,
    /// Sends nothing to an origin for a while after failures in a row. Default: no breaker.
    pub breaker: Option<BreakerOptions>,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            attempt_timeout: Duration::from_secs(30),
            total: Duration::from_secs(300),
            lifetime: Duration::from_secs(86_400),
            backoff: Duration::from_millis(200),
            backoff_max: Duration::from_secs(20),
            answer_bytes_max: 16 << 20,
            breaker: None,
        }
    }
}

/// Why a call has no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The operation may have happened. Ask again under this key and no other: with
    /// [`Client::resume`] or with the same [`Request`].
    #[error("the outcome under the key #{} is unknown: {cause}", key.short_hash())]
    OutcomeUnknown {
        /// The key of the operation, the same for every later attempt.
        key: Key,
        /// Why no more is known.
        cause: Cause,
    },
    /// No attempt with this [`Request`] or a clone of it executed anything. The key stays the key
    /// of this operation. This error says nothing about what another process, or another
    /// [`Request`] with this key, has sent.
    #[error("nothing was done under the key #{}: {cause}", key.short_hash())]
    NotSent {
        /// The key of the operation, the same for every later attempt.
        key: Key,
        /// Why this call stopped before anything ran.
        cause: Cause,
    },
    /// The journal could not be written or read, or it refuses the request. This call sent nothing.
    #[error("the journal of keys: {0}")]
    Journal(#[from] JournalError),
    /// The request cannot be sent, or cannot be sent again.
    #[error("the request cannot be used: {0}")]
    Request(String),
}

impl ClientError {
    /// The request cannot be sent, for the reason that this error gives.
    fn unusable(error: impl std::fmt::Display) -> Self {
        Self::Request(error.to_string())
    }
}

/// Why a client stopped asking.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Cause {
    /// The answer says nothing about an earlier attempt.
    #[error("the answer {status}{} does not say what became of the operation", code.as_ref().map(|code| format!(" {code}")).unwrap_or_default())]
    Answer {
        /// The HTTP status of that answer.
        status: u16,
        /// The code of its problem body.
        code: Option<String>,
    },
    /// The server had accepted the operation and does not find it now.
    #[error("the server does not find the operation that it had accepted")]
    OperationNotFound,
    /// The time limit of the call is over.
    #[error("out of time; at last: {last}")]
    OutOfTime {
        /// The result of the last attempt.
        last: String,
    },
    /// The server may have forgotten the key, so another attempt might execute a second time.
    #[error("the server may have forgotten the key; at last: {last}")]
    KeyForgotten {
        /// The result of the last attempt.
        last: String,
    },
}

/// Sends operations. Clones share the connections, the journal and the breakers.
#[derive(Debug, Clone)]
pub struct Client {
    http: reqwest::Client,
    shared: Arc<ClientState>,
}

impl Client {
    /// A client with its own connections.
    ///
    /// # Errors
    /// [`ClientError::Request`]: TLS cannot be set up.
    pub fn new(options: ClientOptions) -> Result<Self, ClientError> {
        Self::over(reqwest::Client::builder(), options)
    }

    /// A client with your own settings: proxies, certificates, default headers. Redirects and
    /// retries of reqwest are always switched off.
    ///
    /// # Errors
    /// [`ClientError::Request`]: the settings cannot be used.
    pub fn over(builder: reqwest::ClientBuilder, options: ClientOptions) -> Result<Self, ClientError> {
        let builder = builder.redirect(reqwest::redirect::Policy::none()).retry(reqwest::retry::never());
        let http = builder.connect_timeout(options.attempt_timeout / 3).build().map_err(ClientError::unusable)?;
        Ok(Self { http, shared: Arc::new(ClientState::new(options, None)) })
    }

    /// The same client with a journal.
    #[must_use]
    pub fn with_journal(self, journal: KeyJournal) -> Self {
        let shared = ClientState::new(self.shared.options.clone(), Some(journal));
        Self { http: self.http, shared: Arc::new(shared) }
    }

    /// Sends an operation until its outcome is known or the time is over.
    ///
    /// # Errors
    /// [`ClientError::OutcomeUnknown`]: the operation may have happened. After
    /// [`ClientError::NotSent`] it did not. The other errors come before this call's first attempt.
    ///
    /// # Cancel safety
    /// If the future is dropped, the operation may have happened; the journal keeps the key. The
    /// same request may be sent again.
    pub async fn send(&self, request: &Request) -> Result<Answer, ClientError> {
        self.shared.send(&mut Direct(&self.http), request, None).await
    }

    /// Continues an operation of the journal: the same key and bytes, with these headers (such as
    /// fresh credentials) beside the stored ones. If the journal keeps digests only, `body` is
    /// needed and must have the same bytes.
    ///
    /// # Errors
    /// As [`Client::send`]; [`JournalError::OtherBody`] if the bytes are not those sent first.
    ///
    /// # Cancel safety
    /// As [`Client::send`].
    pub async fn resume(
        &self,
        pending: &Pending,
        body: Option<Vec<u8>>,
        headers: &HeaderMap,
    ) -> Result<Answer, ClientError> {
        let request = pending.request(body, headers)?;
        self.shared.send(&mut Direct(&self.http), &request, Some(pending.first_sent_at)).await
    }

    /// Removes the key from the journal, because the application has the result. Without a journal
    /// it does nothing.
    ///
    /// # Errors
    /// The journal could not be written; [`KeyJournal::pending`] may return the operation again.
    pub async fn acknowledge(&self, key: &Key) -> Result<(), ClientError> {
        match &self.shared.journal {
            Some(journal) => Ok(journal.acknowledge(key).await?),
            None => Ok(()),
        }
    }

    /// The same client, with the [`ClientOptions::lifetime`] that the server of this URL publishes:
    /// the shortest one at `/.well-known/idempotency`. Where the document names no operation, that
    /// of this client stays.
    ///
    /// # Errors
    /// [`ClientError::Request`]: within [`ClientOptions::attempt_timeout`] the server gave no such
    /// document, or one that cannot be read.
    pub async fn as_advertised(&self, url: &str) -> Result<Self, ClientError> {
        let mut options = self.shared.options.clone();
        if let Some(shortest) = advertised::ask(&self.http, url, options.attempt_timeout).await? {
            options.lifetime = shortest;
        }
        let shared = ClientState::new(options, self.shared.journal.clone());
        Ok(Self { http: self.http.clone(), shared: Arc::new(shared) })
    }

    /// The same rules as a middleware of `reqwest-middleware`, with this client's settings, journal
    /// and breakers. A response has its [`Key`] as an extension: give it to [`Self::acknowledge`].
    /// The middleware's errors hold a [`ClientError`].
    #[must_use]
    pub fn middleware(&self) -> impl reqwest_middleware::Middleware + Clone + std::fmt::Debug + use<> {
        Resend(Arc::clone(&self.shared))
    }

    /// The HTTP client below, without redirects and retries: put the middleware on this one.
    #[must_use]
    pub fn reqwest(&self) -> reqwest::Client {
        self.http.clone()
    }
}
