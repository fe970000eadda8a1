//! An operation to send: method, URL, headers, bytes and key, which stay the same in all attempts.
//!
//! Promise: the key is made once, with the request. A clone is the same operation, and knows what
//! the other clones sent.
//!
//! Credentials may be changed between calls, like any other header.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use reqwest::{Method, Url};
use serde::Serialize;

use super::ClientError;
use crate::operation::rules::Key;
use crate::operation::rules::key::KeyFormat;
use crate::time::since::Since;

pub(super) const KEY_HEADER: HeaderName = HeaderName::from_static("idempotency-key");

/// An operation that is to happen once, sent in one or more attempts.
#[derive(Clone)]
pub struct Request {
    pub(super) method: Method,
    pub(super) url: Url,
    pub(super) headers: HeaderMap,
    pub(super) body: Vec<u8>,
    pub(super) key: Key,
    /// Shared by all clones: each call knows what the others may have executed, before it and at
    /// the same time.
    pub(super) attempts: Arc<Mutex<Attempts>>,
}

/// The attempts with a request and its clones that may have executed the operation.
#[derive(Debug, Default)]
pub(super) struct Attempts {
    count: u32,
    since: Option<Since>,
    /// Whether the entry in the journal is that of this request.
    pub(super) journalled: bool,
}

/// Without query, header values and body: they may hold credentials and data of people.
impl std::fmt::Debug for Request {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (method, url, bytes) = (&self.method, shown(self.url.as_str()), self.body.len());
        write!(f, "Request({:?}, {method} {url}, {bytes} bytes)", self.key)
    }
}

/// A URL as logs may show it: without its query, in which credentials may stand.
pub(super) fn shown(url: &str) -> &str {
    url.split(['?', '#']).next().unwrap_or_default()
}

/// Refuses a URL that cannot be sent: another scheme than `http` and `https`, or a user and
/// password, which reqwest leaves out of a request that is built like ours.
pub(super) fn check_url(url: &Url) -> Result<(), ClientError> {
    if !matches!(url.scheme(), "http" | "https") {
        return Err(ClientError::Request(format!("the scheme `{}` is not sent; use `http` or `https`", url.scheme())));
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err(ClientError::Request(
            "a user and password in the URL are not sent: give them in the header `authorization`".to_owned(),
        ));
    }
    Ok(())
}

/// Makes a new key: a UUID v7, whose time lets a server recognise a late retry.
pub(super) fn new_key() -> Result<Key, ClientError> {
    parse(&uuid::Uuid::now_v7().to_string())
}

pub(super) fn parse(key: &str) -> Result<Key, ClientError> {
    Key::parse(key.as_bytes(), KeyFormat::Opaque).map_err(ClientError::unusable)
}

impl Request {
    /// An operation under a new key.
    ///
    /// # Errors
    /// [`ClientError::Request`]: the method cannot be used; the URL is not one of `http` or
    /// `https`, or has a user or password in it.
    pub fn new(method: &str, url: &str, body: impl Into<Vec<u8>>) -> Result<Self, ClientError> {
        let request = Self::with_any_url(method, url, body.into())?;
        check_url(&request.url)?;
        Ok(request)
    }

    /// As [`Self::new`], with a URL that may have a user in it: the journal of an earlier version
    /// may hold such an operation, whose outcome could not be found out otherwise.
    pub(super) fn with_any_url(method: &str, url: &str, body: Vec<u8>) -> Result<Self, ClientError> {
        Ok(Self {
            method: Method::from_bytes(method.as_bytes()).map_err(ClientError::unusable)?,
            url: Url::parse(url).map_err(ClientError::unusable)?,
            headers: HeaderMap::new(),
            body,
            key: new_key()?,
            attempts: Arc::default(),
        })
    }

    /// A POST of JSON under a new key.
    ///
    /// # Errors
    /// [`ClientError::Request`]: the URL cannot be used, or the value has no JSON form.
    pub fn json(url: &str, value: &impl Serialize) -> Result<Self, ClientError> {
        let body = serde_json::to_vec(value).map_err(ClientError::unusable)?;
        Self::new("POST", url, body)?.with_header("content-type", "application/json")
    }

    /// The same request under the caller's own key. A caller that stores this key with its work can
    /// also retry after a restart.
    ///
    /// # Errors
    /// [`ClientError::Request`]: the key is not valid (16 to 255 characters of `[A-Za-z0-9_.:~-]`).
    pub fn with_key(self, key: &str) -> Result<Self, ClientError> {
        Ok(Self { key: parse(key)?, attempts: Arc::default(), ..self })
    }

    /// Sets a header and replaces others of its name. Use [`Self::with_key`] for the key.
    ///
    /// # Errors
    /// [`ClientError::Request`]: the header is not valid, or is that of the key.
    pub fn with_header(mut self, name: &str, value: &str) -> Result<Self, ClientError> {
        let name = HeaderName::from_bytes(name.as_bytes()).map_err(ClientError::unusable)?;
        if name == KEY_HEADER {
            return Err(ClientError::Request("a key is given by `with_key`".to_owned()));
        }
        let mut value = HeaderValue::from_str(value).map_err(ClientError::unusable)?;
        value.set_sensitive(is_credential(name.as_str()));
        self.headers.insert(name, value);
        Ok(self)
    }

    /// The idempotency key, the same for every attempt and every clone.
    #[must_use]
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// How long ago the first attempt began that may have executed this operation. `None`: no
    /// attempt with this request or a clone of it has.
    pub(super) fn in_doubt_for(&self) -> Option<Duration> {
        self.attempts.lock().since.map(Since::elapsed)
    }

    /// Notes that an attempt begins. Where its call is dropped, it counts as one that executed.
    pub(super) fn attempt_begins(&self) {
        let mut attempts = self.attempts.lock();
        attempts.count = attempts.count.saturating_add(1);
        attempts.since.get_or_insert_with(Since::now);
    }

    /// Notes that an attempt ended and certainly executed nothing.
    pub(super) fn attempt_ran_nothing(&self) {
        let mut attempts = self.attempts.lock();
        attempts.count = attempts.count.saturating_sub(1);
        if attempts.count == 0 {
            attempts.since = None;
        }
    }

    /// Builds the HTTP request of one attempt: the same bytes and the same key each time.
    pub(super) fn attempt(&self) -> Result<reqwest::Request, ClientError> {
        let mut request = reqwest::Request::new(self.method.clone(), self.url.clone());
        *request.headers_mut() = self.headers.clone();
        let key = HeaderValue::from_str(self.key.as_str()).map_err(ClientError::unusable)?;
        request.headers_mut().insert(KEY_HEADER, key);
        *request.body_mut() = Some(self.body.clone().into());
        Ok(request)
    }

    /// A GET for the outcome at the operation's own URL: with the credentials of the request, and
    /// without the headers about its content.
    pub(super) fn question(&self, place: Url) -> reqwest::Request {
        let mut request = reqwest::Request::new(Method::GET, place);
        *request.headers_mut() = self.headers.clone();
        for name in ["content-type", "content-length", "content-encoding", "if-match", "if-none-match", "prefer"] {
            request.headers_mut().remove(name);
        }
        request
    }
}

/// Whether a header or parameter of this name is a credential, judged by the words of its name. A
/// credential is never stored in plain.
pub(super) fn is_credential(name: &str) -> bool {
    let is_word = |word: &str| {
        matches!(word, "auth" | "authorization" | "authentication" | "token" | "jwt" | "bearer" | "secret" | "password")
            || matches!(word, "passwd" | "cookie" | "credential" | "credentials" | "signature" | "sig" | "session")
            || word == "apikey"
    };
    let names_a_key = |word: &str| matches!(word, "api" | "access" | "private" | "secret" | "subscription");
    let name = name.to_ascii_lowercase();
    let words: Vec<&str> = name.split(['-', '_', '.']).collect();
    name == "key"
        || words.iter().any(|&word| is_word(word))
        || words.windows(2).any(|pair| pair[1] == "key" && names_a_key(pair[0]))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{Request, is_credential};

    // Shown by: deriving Debug.
    #[test]
    fn o27_a_request_shows_no_credential_and_no_body() {
        let request = Request::new("POST", "https://a.example/x?access_token=sk_live_7", *b"{\"card\":4242}").unwrap();
        let shown = format!("{:?}", request.with_header("x-note", "sk_live_8").unwrap());
        assert!(shown.contains("POST https://a.example/x, 13 bytes"), "{shown}");
        assert!(!shown.contains("sk_live") && !shown.contains("4242"), "{shown}");
    }

    // Shown by: taking every URL. One that cannot be sent was tried until the time was over, and a
    // user without a password stood in the journal in clear.
    #[test]
    fn o27_a_url_that_cannot_be_sent_as_it_stands_is_refused() {
        for url in
            ["ftp://a.example/x", "mailto:a@a.example", "https://u:p@a.example/x", "https://sk_live_7@a.example/x"]
        {
            let refused = Request::new("POST", url, *b"{}").map(|request| request.url);
            assert!(refused.is_err_and(|error| !error.to_string().contains("sk_live")), "{url}");
        }
        assert!(Request::new("POST", "http://127.0.0.1:8080/x", *b"{}").is_ok());
    }

    #[test]
    fn o27_a_credential_is_known_by_the_words_of_its_name() {
        let credentials = "authorization Proxy-Authorization cookie x-api-key api-key apikey x-auth-token
            x-amz-security-token X-Amz-Signature ocp-apim-subscription-key access_token sig key";
        for name in credentials.split_whitespace() {
            assert!(is_credential(name), "{name}");
        }
        for name in ["content-type", "prefer", "if-match", "x-author", "idempotency-key", "x-api-version", "page"] {
            assert!(!is_credential(name), "{name}");
        }
    }
}
