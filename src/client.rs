//! Requests that can be sent again: one key for one operation, the same bytes each time (O26, O27,
//! M110).
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
//! * A key is made once, or given by the caller. Whatever happens, no second one is made for the
//!   same request.
//! * Every attempt sends the same bytes. With a [`KeyJournal`] key, method, URL and body are on the
//!   disk before the first one, so a process that dies goes on under the same key.
//! * What ends an operation is decided in one table ([`resend`](crate::policy::operation::resend)).
//!   Where the outcome of one attempt is not known, nothing but a 2xx or a spent key does; the end
//!   is then [`ClientError::OutcomeUnknown`].
//! * Redirects are not followed: a 302 turns a POST into a GET, and a 307 carries key and body to
//!   another origin.
//! * No attempt begins that might arrive when the server has forgotten the key.
//!
//! | module | for |
//! |---|---|
//! | [`Client`], [`Request`], [`Answer`] | sending |
//! | [`Resend`] | the same as a middleware of `reqwest-middleware` |
//! | [`KeyJournal`] | keys that outlive the process |
//! | [`Advertised`] | what a server says of its keys |
//!
//! Not here: the server's side ([`runtime::operation`](crate::runtime::operation)).

mod advertised;
mod answer;
mod journal;
mod middleware;
mod request;
mod sending;

use std::sync::Arc;
use std::time::Duration;

use reqwest::header::HeaderMap;

pub use advertised::{Advertised, AdvertisedOperation};
pub use answer::Answer;
#[cfg(feature = "encrypt")]
pub use journal::JournalCipher;
pub use journal::{Bodies, JournalError, KeyJournal, Pending, PendingBody};
pub use middleware::{Resend, SentUnder};
pub use request::Request;

use self::sending::{Direct, Shared};
use crate::policy::breaker::BreakerOptions;
use crate::policy::operation::Key;

/// Settings of a client.
#[derive(Debug, Clone)]
pub struct ClientOptions {
    /// How long one attempt may take, its answer's body included. Default 30 s.
    pub attempt_timeout: Duration,
    /// How long [`Client::send`] may take in all. Default 5 min.
    pub total: Duration,
    /// How long the server remembers a key at least, counted from the first send; see
    /// [`Advertised`]. Default 24 h, which is a guess about the server.
    pub lifetime: Duration,
    /// The bound of the first pause; each is up to twice the one before. Default 200 ms.
    pub backoff: Duration,
    /// No pause of the client's own is longer. A server may ask for more. Default 20 s.
    pub backoff_max: Duration,
    /// The longest body of an answer, in bytes; a longer one is as good as none. Default 16 MiB.
    pub answer_bytes_max: usize,
    /// Leaves an origin alone for a while after failures in a row. Default none.
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

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// It may have happened. Ask again under this key, and under no other: by [`Client::resume`] or
    /// with the same [`Request`].
    #[error("the outcome under the key #{} is unknown: {cause}", key.short_hash())]
    OutcomeUnknown {
        /// The key of the operation, the same for every later attempt.
        key: Key,
        /// Why nothing more is known.
        cause: Cause,
    },
    /// None of this call's attempts ran anything. The key stays that of this operation; where
    /// another process sent it before, this says nothing of that.
    #[error("nothing was done by this call under the key #{}: {cause}", key.short_hash())]
    NotSent {
        /// The key of the operation, the same for every later attempt.
        key: Key,
        /// Why this call stopped before anything ran.
        cause: Cause,
    },
    /// The journal could not be written or read; then nothing is sent.
    #[error("the journal of keys: {0}")]
    Journal(#[from] JournalError),
    /// The request cannot be sent again, or not at all.
    #[error("the request cannot be used: {0}")]
    Request(String),
}

/// Why a client stopped asking.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Cause {
    /// An answer that says nothing of an earlier attempt.
    #[error("the answer {status}{} does not say what became of the operation", code.as_ref().map(|code| format!(" {code}")).unwrap_or_default())]
    Answer {
        /// The HTTP status of that answer.
        status: u16,
        /// The code of its problem body.
        code: Option<String>,
    },
    /// The server that had accepted the operation does not find it.
    #[error("the server does not find the operation that it had accepted")]
    OperationNotFound,
    /// The time of the call is over.
    #[error("out of time; at last: {last}")]
    OutOfTime {
        /// What the last attempt met.
        last: String,
    },
    /// The server may have forgotten the key: sent again, it might run a second time.
    #[error("the server may have forgotten the key; at last: {last}")]
    KeyForgotten {
        /// What the last attempt met.
        last: String,
    },
}

/// Sends operations. Clones share the connections, the journal and the breakers.
#[derive(Debug, Clone)]
pub struct Client {
    http: reqwest::Client,
    shared: Arc<Shared>,
}

impl Client {
    /// A client with connections of its own.
    ///
    /// # Errors
    /// [`ClientError::Request`]: TLS cannot be set up.
    pub fn new(options: ClientOptions) -> Result<Self, ClientError> {
        Self::over(reqwest::Client::builder(), options)
    }

    /// A client over settings of one's own: proxies, certificates, default headers. Redirects and
    /// retries of reqwest are switched off whatever they say.
    ///
    /// # Errors
    /// [`ClientError::Request`]: the settings cannot be used.
    pub fn over(builder: reqwest::ClientBuilder, options: ClientOptions) -> Result<Self, ClientError> {
        let builder = builder.redirect(reqwest::redirect::Policy::none()).retry(reqwest::retry::never());
        let http = builder.connect_timeout(options.attempt_timeout).build();
        let http = http.map_err(|error| ClientError::Request(error.to_string()))?;
        Ok(Self { http, shared: Arc::new(Shared::new(options, None)) })
    }

    /// The same client with a journal.
    #[must_use]
    pub fn with_journal(self, journal: KeyJournal) -> Self {
        let shared = Shared::new(self.shared.options.clone(), Some(journal));
        Self { http: self.http, shared: Arc::new(shared) }
    }

    /// The same client, with the shortest lifetime that a server advertises for its keys.
    #[must_use]
    pub fn within(self, advertised: &Advertised) -> Self {
        let mut options = self.shared.options.clone();
        options.lifetime = advertised.shortest().unwrap_or(options.lifetime);
        Self { http: self.http, shared: Arc::new(Shared::new(options, self.shared.journal.clone())) }
    }

    /// Sends an operation until its end is known or the time is over.
    ///
    /// # Errors
    /// [`ClientError::OutcomeUnknown`]: it may have happened. Any other error: it did not, unless
    /// an earlier call with the same request says otherwise.
    ///
    /// # Cancel safety
    /// Dropped, it may have happened; the journal keeps the key. The same request may be sent
    /// again.
    pub async fn send(&self, request: &Request) -> Result<Answer, ClientError> {
        self.shared.send(&mut Direct(&self.http), request).await
    }

    /// Goes on with an operation of the journal: the same key and bytes, with these headers (fresh
    /// credentials) beside the stored ones. `body` is needed where the journal keeps digests only,
    /// and must be the same bytes.
    ///
    /// # Errors
    /// As [`Client::send`]; [`JournalError::OtherBody`] where the bytes are not those of the first
    /// send.
    ///
    /// # Cancel safety
    /// As [`Client::send`].
    pub async fn resume(
        &self,
        pending: &Pending,
        body: Option<Vec<u8>>,
        headers: &HeaderMap,
    ) -> Result<Answer, ClientError> {
        self.send(&pending.request(body, headers)?).await
    }

    /// Says that the application has the result: the journal forgets the key. Without a journal
    /// nothing is to be said.
    ///
    /// # Errors
    /// The journal could not be written; then the operation is found again.
    pub async fn acknowledge(&self, key: &Key) -> Result<(), ClientError> {
        match &self.shared.journal {
            Some(journal) => Ok(journal.acknowledge(key).await?),
            None => Ok(()),
        }
    }

    /// What a server publishes of its keys, at `/.well-known/idempotency` of this URL's origin.
    ///
    /// # Errors
    /// [`ClientError::Request`]: it publishes nothing that can be read.
    pub async fn advertised(&self, url: &str) -> Result<Advertised, ClientError> {
        advertised::ask(&self.http, url, self.shared.options.attempt_timeout).await
    }

    /// The same rules as a middleware of `reqwest-middleware`, with this client's settings, journal
    /// and breakers.
    #[must_use]
    pub fn middleware(&self) -> Resend {
        Resend::new(Arc::clone(&self.shared))
    }

    /// The client below, with redirects and retries switched off: what to put the middleware on.
    #[must_use]
    pub fn reqwest(&self) -> reqwest::Client {
        self.http.clone()
    }
}
