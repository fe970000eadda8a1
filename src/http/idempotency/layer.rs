//! Edge operations as a tower layer around any axum or tower handler.
//!
//! The layer suppresses concurrent duplicates and replays outcomes. If the process dies between the
//! effect of the handler and the outcome, the key becomes UNKNOWN, unless the handler ends with
//! [`Guard::commit_response`].

use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::Body;
use axum::extract::{OriginalUri, Request};
use axum::http::request::Parts;
use axum::http::{Method, header};
use axum::response::Response;
use futures_util::future::BoxFuture;
use tower_layer::Layer;
use tower_service::Service;

use super::intake::{
    content_type, invalid, key_in, multipart_refused, read_body, refused, scope_in, target_in, unread,
};
use super::outcome::ended;
use super::respond::respond;
use crate::error::Invalid;
use crate::operation::port::Keys;
use crate::operation::rules::raw::RawCommand;
use crate::operation::rules::{Code, Mode};
use crate::operation::{Asking, EdgeAnswer, Endpoint, Engine, Guard, Problem, Registered};

/// Protects one method of a route as one operation: `post(handler).route_layer(layer)`.
#[derive(Debug)]
pub struct IdempotencyLayer<S: Keys> {
    engine: Engine<S>,
    endpoint: Registered,
}

/// A service with the layer around it.
pub struct IdempotencyService<I, S: Keys> {
    inner: I,
    layer: IdempotencyLayer<S>,
}

impl<S: Keys> IdempotencyLayer<S> {
    /// Protects an operation of mode `edge` or `bridged`.
    ///
    /// # Errors
    /// As [`Engine::protect`](crate::operation::Core::protect); any other mode.
    pub fn new(engine: &Engine<S>, endpoint: Endpoint) -> Result<Self, Invalid> {
        let endpoint = endpoint.served_by("the layer", &[Mode::Edge, Mode::Bridged])?;
        Ok(Self { engine: engine.clone(), endpoint: engine.protect(endpoint)? })
    }
}

impl<I, S: Keys> Layer<I> for IdempotencyLayer<S> {
    type Service = IdempotencyService<I, S>;

    fn layer(&self, inner: I) -> Self::Service {
        IdempotencyService { inner, layer: self.clone() }
    }
}

impl<I, S> Service<Request> for IdempotencyService<I, S>
where
    I: Service<Request, Response = Response, Error = Infallible> + Clone + Send + 'static,
    I::Future: Send + 'static,
    S: Keys,
{
    type Response = Response;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Response, Infallible>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request) -> Self::Future {
        // `poll_ready` made this instance ready, so this one must be called, not its clone.
        let next = self.inner.clone();
        let inner = std::mem::replace(&mut self.inner, next);
        let layer = self.layer.clone();
        Box::pin(async move { Ok(serve(layer, inner, request).await) })
    }
}

async fn serve<I, S>(layer: IdempotencyLayer<S>, mut inner: I, request: Request) -> Response
where
    I: Service<Request, Response = Response, Error = Infallible> + Send + 'static,
    I::Future: Send + 'static,
    S: Keys,
{
    // These methods change nothing, so a key adds nothing (M6).
    if matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS) {
        return call(&mut inner, request).await;
    }
    let IdempotencyLayer { engine, endpoint } = layer;
    let (mut parts, body) = request.into_parts();
    let (key, scope) = (key_in(&parts.headers, endpoint.route().key_format), scope_in(&parts));
    let early = unread(&engine, &endpoint, scope.clone(), key.clone());
    if let Some(answered) = early.early() {
        return respond(answered);
    }
    if early.is_unkeyed() {
        return call(&mut inner, Request::from_parts(parts, body)).await;
    }
    let Some(tenant) = &scope else { return refused(&endpoint, &Problem::new(Code::ScopeRequired)) };
    if let Some(problem) = multipart_refused(&endpoint, &parts.headers) {
        return refused(&endpoint, &problem);
    }
    let (body, permit) = match read_body(&engine, &endpoint, &parts, tenant, body).await {
        Ok(intake) => intake,
        Err(problem) => return refused(&endpoint, &problem),
    };
    let command = match command(&endpoint, &mut parts, &body).await {
        Ok(command) => command,
        Err(error) => return refused(&endpoint, &invalid(error.to_string())),
    };
    let asking = Asking { scope, key, command: Arc::new(command) };
    let (kept_max, budget) = (endpoint.route().kept_body_max, endpoint.route().completion_budget);
    let run = move |guard: Option<Guard<S>>| async move {
        // Holds the memory permit until the handler is done.
        let _permit = permit;
        let mut request = Request::from_parts(parts, Body::from(body));
        if let Some(guard) = guard {
            request.extensions_mut().insert(guard.progress().clone());
            request.extensions_mut().insert(guard);
        }
        ended(call(&mut inner, request).await, kept_max, budget).await
    };
    match engine.execute_edge(&endpoint, asking, run).await {
        EdgeAnswer::Answered(answered) => respond(answered),
        EdgeAnswer::Ran { mut answer, retry_after } => {
            if let Some(seconds) = retry_after.filter(|_| !answer.headers().contains_key(header::RETRY_AFTER)) {
                answer.headers_mut().insert(header::RETRY_AFTER, seconds.into());
            }
            answer
        }
    }
}

async fn call<I>(inner: &mut I, request: Request) -> Response
where
    I: Service<Request, Response = Response, Error = Infallible>,
{
    match inner.call(request).await {
        Ok(response) => response,
        Err(never) => match never {},
    }
}

/// The raw request as a command, as the handler sees it (M23). The whole path counts, not only its
/// parameters: a router may distinguish two resources only by their paths, and in `nest_service`
/// and in a fallback it may give other parameters. So after a mount or an ingress prefix has
/// changed, a retry is another command: it gets 422, and nothing runs.
async fn command(endpoint: &Registered, parts: &mut Parts, body: &[u8]) -> Result<RawCommand, Invalid> {
    // Nested routers strip prefixes of `uri` (pitfall 24).
    let uri = parts.extensions.get::<OriginalUri>().map_or(&parts.uri, |original| &original.0);
    let place = [("@method", parts.method.as_str()), ("@path", uri.path())];
    let place = place.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let target = target_in(parts).await.under(place);
    let mut command = RawCommand::new(target).body(&content_type(&parts.headers), body)?;
    for (name, since) in endpoint.counted_headers() {
        for value in parts.headers.get_all(name) {
            command = command.header(since, name, value.as_bytes());
        }
    }
    Ok(command)
}

impl<S: Keys> Clone for IdempotencyLayer<S> {
    fn clone(&self) -> Self {
        Self { engine: self.engine.clone(), endpoint: self.endpoint.clone() }
    }
}

impl<I: Clone, S: Keys> Clone for IdempotencyService<I, S> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), layer: self.layer.clone() }
    }
}

impl<I, S: Keys> fmt::Debug for IdempotencyService<I, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyService").field("layer", &self.layer).finish_non_exhaustive()
    }
}
