//! Reads from a request: the key header, the scope that authentication set, what its target says,
//! and the body within its limits.
//!
//! Promises: a body that is too long is refused before reading if its length is given, else at the
//! limit. Memory is counted as bytes arrive, for the tenant and in total (O29). A body that is too
//! slow, has trailers or ends early is refused. A scope never comes from a header.

use std::borrow::Cow;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::rejection::RawPathParamsRejection;
use axum::extract::{FromRequestParts, RawPathParams};
use axum::http::request::Parts;
use axum::http::{HeaderMap, header};
use axum::response::Response;
use http_body_util::BodyExt;

use super::respond::problem_response;
use crate::operation::rules::raw::{Target, essence};
use crate::operation::rules::{Code, Key, KeyFormat, Scope};
use crate::operation::{Asking, BodyPermit, Core, Front, KeyGiven, NoCommand, Problem, Registered};

/// The scope of a request. Only verified authentication may put it into the request's extensions
/// (pitfall 15).
#[derive(Debug, Clone)]
pub struct IdempotencyScope(pub Scope);

pub(super) fn key_in(headers: &HeaderMap, format: KeyFormat) -> KeyGiven {
    let lines: Vec<&[u8]> = headers.get_all("idempotency-key").iter().map(|value| value.as_bytes()).collect();
    match Key::from_header(&lines, format) {
        Ok(None) => KeyGiven::Missing,
        Ok(Some(key)) => KeyGiven::Given(key),
        Err(error) => KeyGiven::Malformed(error),
    }
}

pub(super) fn scope_in(parts: &Parts) -> Option<Scope> {
    parts.extensions.get::<IdempotencyScope>().map(|scope| scope.0.clone())
}

/// The path parameters and the query of a request, as its handler sees them (M23).
pub(super) async fn target_in(parts: &mut Parts) -> Target {
    let mut path = Vec::new();
    match RawPathParams::from_request_parts(parts, &()).await {
        Ok(params) => path.extend(params.iter().map(|(name, value)| (name.to_owned(), value.to_owned()))),
        // A handler may read the bytes of a path that are no UTF-8.
        Err(RawPathParamsRejection::InvalidUtf8InPathParam(_)) => {
            path.push(("@path".to_owned(), parts.uri.path().to_owned()));
        }
        Err(_) => {}
    }
    let raw = parts.uri.query().unwrap_or("");
    let query = url::form_urlencoded::parse(raw.as_bytes());
    let query: Vec<_> = query.map(|(name, value)| (name.into_owned(), value.into_owned())).collect();
    // Bytes that are no UTF-8 were replaced, so two queries that differ may read the same.
    let is_replaced = |text: &str| text.contains(char::REPLACEMENT_CHARACTER);
    if query.iter().any(|(name, value)| is_replaced(name) || is_replaced(value)) {
        path.push(("@query".to_owned(), raw.to_owned()));
    }
    Target::new(path, query)
}

/// The front of a request whose body was not read, for what is decided before it is read.
pub(super) fn unread(engine: &Core, endpoint: &Registered, scope: Option<Scope>, key: KeyGiven) -> Front {
    engine.front(endpoint, Asking { scope, key, command: Arc::new(NoCommand) })
}

/// Reads the body within the limits of the operation. Keep the permit as long as the bytes.
///
/// # Errors
/// The problem to answer with: 413 (too long), 503 (no memory is free for it), 408 (too slow), or
/// 400 (it ended early, or has trailers).
pub(super) async fn read_body(
    engine: &Core,
    endpoint: &Registered,
    parts: &Parts,
    scope: &Scope,
    mut body: Body,
) -> Result<(Vec<u8>, BodyPermit), Box<Problem>> {
    let max = endpoint.route().request_body_max;
    let said = parts.headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if said.is_some_and(|said| said > max as u64) {
        return Err(Box::new(Problem::new(Code::BodyTooLarge)));
    }
    let mut permit = engine.body_memory(scope.tenant());
    let mut bytes = Vec::new();
    let until = tokio::time::Instant::now() + endpoint.route().request_body_within;
    loop {
        let frame = match tokio::time::timeout_at(until, body.frame()).await {
            Ok(Some(Ok(frame))) => frame,
            Ok(Some(Err(_))) => return Err(invalid("the body ended early")),
            Ok(None) => break,
            Err(_) => return Err(Box::new(Problem::new(Code::BodyTooSlow))),
        };
        match frame.into_data() {
            Ok(data) if bytes.len() + data.len() > max => return Err(Box::new(Problem::new(Code::BodyTooLarge))),
            Ok(data) if !permit.grow(data.len()) => return Err(Box::new(Problem::new(Code::BodyMemoryExceeded))),
            Ok(data) => bytes.extend_from_slice(&data),
            Err(frame) => {
                if frame.into_trailers().is_ok_and(|trailers| !trailers.is_empty()) {
                    return Err(invalid("trailers are not taken: they would be no part of the command"));
                }
            }
        }
    }
    Ok((bytes, permit))
}

/// The answer to a request that is refused before the engine is asked. It is counted like a refusal
/// of the engine.
pub(super) fn refused(endpoint: &Registered, problem: &Problem) -> Response {
    endpoint.refused(problem.code);
    problem_response(problem)
}

/// A problem `REQUEST_INVALID` with its reason. The text must not repeat values of the request.
pub(super) fn invalid(detail: impl Into<String>) -> Box<Problem> {
    Box::new(Problem { detail: Some(detail.into()), ..Problem::new(Code::RequestInvalid) })
}

/// The content type of a request; empty where there is none.
pub(super) fn content_type(headers: &HeaderMap) -> Cow<'_, str> {
    String::from_utf8_lossy(headers.get(header::CONTENT_TYPE).map_or(&b""[..], |value| value.as_bytes()))
}

/// The problem for a multipart body, which the layer would compare byte for byte: a client that
/// draws a new boundary for its retry would get 422.
pub(super) fn multipart_refused(endpoint: &Registered, headers: &HeaderMap) -> Option<Problem> {
    if endpoint.route().takes_multipart || !essence(&content_type(headers)).starts_with("multipart/") {
        return None;
    }
    let detail = "this operation takes no multipart body: its boundary changes from one try to the next".to_owned();
    Some(Problem { detail: Some(detail), ..Problem::new(Code::UnsupportedMediaType) })
}
