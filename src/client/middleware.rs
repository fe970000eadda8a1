//! The rules of the client as a middleware of `reqwest-middleware`.
//!
//! Promise: the promises of [`Client::send`](super::Client::send) hold for every POST and PATCH,
//! and for every other request with an `Idempotency-Key`. GET, HEAD and OPTIONS pass through.
//!
//! The middleware cannot switch off the redirects of the client below: put it on
//! [`Client::reqwest`](super::Client::reqwest), or on a client without redirects. With redirects,
//! an answer from another URL still ends nothing, but the key has been sent there. Put no
//! middleware below it that sends again by itself: it hides an attempt of unknown outcome behind
//! the last one.
//!
//! The timeout of a request (`RequestBuilder::timeout`) is not used: an attempt has the client's
//! `attempt_timeout`, and a call its `total`.

use std::sync::Arc;

use http::Extensions;
use reqwest::{Method, ResponseBuilderExt};
use reqwest_middleware::{Error, Middleware, Next};

use super::ClientError;
use super::request::{KEY_HEADER, Request, check_url, new_key, parse};
use super::sending::{ClientState, Transport};

#[derive(Debug, Clone)]
pub(super) struct Resend(pub(super) Arc<ClientState>);

/// The rest of the middleware chain, called once for each attempt.
struct Chain<'a, 'e> {
    next: Next<'a>,
    extensions: &'e mut Extensions,
}

impl Transport for Chain<'_, '_> {
    async fn call(&mut self, request: reqwest::Request) -> Result<reqwest::Response, Error> {
        // Each attempt has its own extensions, so that one attempt leaves nothing for the next.
        let mut extensions = self.extensions.clone();
        self.next.clone().run(request, &mut extensions).await
    }
}

/// Makes a request of the client's own. It fails, before anything is sent, where the body is a
/// stream, or where the key or the URL cannot be used.
fn operation(request: &reqwest::Request) -> Result<Request, ClientError> {
    let body = match request.body() {
        None => Vec::new(),
        Some(body) => body
            .as_bytes()
            .ok_or_else(|| ClientError::Request("a streamed body cannot be sent twice".to_owned()))?
            .to_vec(),
    };
    let mut headers = request.headers().clone();
    let key = match headers.remove(KEY_HEADER) {
        Some(key) => parse(key.to_str().map_err(ClientError::unusable)?)?,
        None => new_key()?,
    };
    check_url(request.url())?;
    let (method, url) = (request.method().clone(), request.url().clone());
    Ok(Request { method, url, headers, body, key, attempts: Arc::default() })
}

#[async_trait::async_trait]
impl Middleware for Resend {
    async fn handle(
        &self,
        request: reqwest::Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> Result<reqwest::Response, Error> {
        let keyed = request.headers().contains_key(KEY_HEADER);
        let mutates = matches!(*request.method(), Method::POST | Method::PATCH);
        let safe = matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS);
        if safe || !(keyed || mutates) {
            return next.run(request, extensions).await;
        }
        let operation = operation(&request).map_err(Error::middleware)?;
        let mut chain = Chain { next, extensions };
        let answer = self.0.send(&mut chain, &operation, None).await.map_err(Error::middleware)?;
        let mut response = http::Response::builder().status(answer.status).url(operation.url);
        if let Some(headers) = response.headers_mut() {
            *headers = answer.headers;
        }
        let response = response.extension(answer.key).body(answer.body);
        Ok(response.map_err(Error::middleware)?.into())
    }
}
