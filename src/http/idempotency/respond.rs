//! The answers of the engine as HTTP: problem details (RFC 9457), replays, `Retry-After`.
//!
//! Promise: a problem never repeats the key, the tenant, or any value of the first request. A
//! replay has the stored bytes, status and allow-listed headers.

use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::Response;
use serde::Serialize;
use uuid::Uuid;

use crate::operation::rules::Code;
use crate::operation::rules::problem::KeyState;
use crate::operation::rules::record::Resource;
use crate::operation::{Answered, Problem, Reply};

/// Marks an answer as the outcome of an earlier request. It is for debugging; clients do not depend
/// on it (M65).
const REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");
/// The state of the key, sent with a replayed answer.
const KEY_STATE: HeaderName = HeaderName::from_static("idempotency-key-state");
const HOME_REGION: HeaderName = HeaderName::from_static("idempotency-home-region");
/// The page of the repository that has a section for every code.
const DOCUMENTATION: &str = "docs/reference/problems.md";

#[derive(Serialize)]
struct Body9457<'a> {
    r#type: String,
    title: &'static str,
    status: u16,
    #[serde(skip_serializing_if = "Option::is_none")]
    detail: Option<&'a str>,
    instance: String,
    code: &'static str,
    retryable: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    retry_after_seconds: Option<u32>,
    key_state: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    operation_id: Option<Uuid>,
    #[serde(skip_serializing_if = "Option::is_none")]
    resource: Option<&'a Resource>,
    documentation: String,
}

/// Turns the answer of the engine into a response.
#[must_use]
pub fn respond(answered: Answered) -> Response {
    match answered {
        Answered::Reply { reply, replayed } => reply_response(reply, replayed),
        Answered::Problem(problem) => problem_response(&problem),
    }
}

pub(super) fn reply_response(reply: Reply, replayed: bool) -> Response {
    let status = StatusCode::from_u16(reply.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    // Responses with these statuses have no body, whatever was stored.
    let bare = status == StatusCode::NO_CONTENT || status == StatusCode::NOT_MODIFIED;
    let mut response = Response::new(if bare { Body::empty() } else { Body::from(reply.body) });
    *response.status_mut() = status;
    for (name, value) in reply.headers {
        if let (Ok(name), Ok(value)) = (HeaderName::try_from(name), HeaderValue::from_bytes(&value)) {
            response.headers_mut().append(name, value);
        }
    }
    if replayed {
        response.headers_mut().insert(REPLAYED, HeaderValue::from_static("true"));
        // A refusal of the application has no `key_state` in its body. A client in doubt must still
        // learn that this is the outcome (O26).
        response.headers_mut().insert(KEY_STATE, HeaderValue::from_static(KeyState::Spent.as_str()));
    }
    response
}

/// Turns a problem into a response.
#[must_use]
pub fn problem_response(problem: &Problem) -> Response {
    let code = problem.code;
    let body = Body9457 {
        r#type: urn(code),
        title: title(code),
        status: problem.status,
        detail: problem.detail.as_deref(),
        instance: format!("urn:uuid:{}", Uuid::now_v7()),
        code: code.as_str(),
        retryable: code.retryable(),
        retry_after_seconds: problem.retry_after,
        key_state: problem.key_state.as_str(),
        operation_id: problem.operation_id,
        resource: problem.resource.as_ref(),
        documentation: format!("{DOCUMENTATION}#{}", code.as_str().to_ascii_lowercase()),
    };
    let mut response = Response::new(Body::from(serde_json::to_vec(&body).unwrap_or_default()));
    *response.status_mut() = StatusCode::from_u16(problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    let mut put = |name: HeaderName, value: String| {
        if let Ok(value) = HeaderValue::try_from(value) {
            headers.insert(name, value);
        }
    };
    if let Some(seconds) = problem.retry_after {
        put(header::RETRY_AFTER, seconds.to_string());
    }
    if let Some(location) = &problem.location {
        put(header::LOCATION, location.clone());
    }
    if let Some(home) = &problem.home_region {
        put(HOME_REGION, home.clone());
    }
    match code {
        Code::KeyRequired | Code::KeyInvalid => put(header::LINK, format!("<{}>; rel=\"describedby\"", urn(code))),
        // This is the outcome of the first request, without its body.
        Code::ResultNotRetained if problem.key_state == KeyState::Spent => put(REPLAYED, "true".to_owned()),
        Code::Unauthenticated => put(header::WWW_AUTHENTICATE, "Bearer".to_owned()),
        _ => {}
    }
    response
}

fn urn(code: Code) -> String {
    format!("urn:oncebox:problem:{}", code.as_str().to_ascii_lowercase().replace('_', "-"))
}

fn title(code: Code) -> &'static str {
    match code {
        Code::KeyRequired => "This operation needs an Idempotency-Key",
        Code::KeyInvalid => "The Idempotency-Key is not valid",
        Code::ScopeRequired => "The caller has no scope",
        Code::Unauthenticated => "Not authenticated",
        Code::RequestInvalid => "The request is not valid",
        Code::UnsupportedMediaType => "This content type is not taken here",
        Code::BodyTooLarge => "The body is too long",
        Code::BodyTooSlow => "The body came too slowly",
        Code::BodyMemoryExceeded => "Too many bodies at once",
        Code::KeyReused => "The Idempotency-Key was used with a different request",
        Code::InProgress => "The first request with this key is still running",
        Code::RecoveryPending => "What happened is being found out",
        Code::OutcomeUnknown => "It is not known what happened",
        Code::KeyExpired => "The Idempotency-Key has expired",
        Code::ResultNotRetained => "The answer of the first request is not kept",
        Code::CommitUnknown => "The outcome is not known yet: send the same request again",
        Code::ResultNotStored => "The outcome could not be stored yet: send the same request again",
        Code::TransactionEnded => "The operation broke its transaction",
        Code::FingerprintVersionUnknown => "Another process must answer this",
        Code::StoreUnavailable => "The memory of operations is not available: this request did nothing",
        Code::QuotaExceeded => "The quota is used up",
        Code::WrongRegion => "This key is kept in another region",
        Code::OperationFailed => "The operation failed, and nothing of it was kept",
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    async fn json(response: Response) -> serde_json::Value {
        let bytes = axum::body::to_bytes(response.into_body(), 1 << 20).await.unwrap();
        serde_json::from_slice(&bytes).unwrap()
    }

    // Shown by: leaving a member out; `Retry-After` without its member.
    #[tokio::test]
    async fn every_problem_has_the_members_of_rfc_9457_and_ours() {
        for code in Code::all() {
            let problem = Problem { operation_id: Some(Uuid::nil()), ..Problem::new(code) };
            let response = problem_response(&problem);
            assert_eq!(response.status().as_u16(), code.status());
            assert_eq!(response.headers()["content-type"], "application/problem+json");
            let after =
                response.headers().get("retry-after").map(|value| value.to_str().unwrap().parse::<u32>().unwrap());
            assert_eq!(after, code.pause());
            let body = json(response).await;
            assert_eq!(body["code"], code.as_str());
            assert_eq!(body["retryable"], code.retryable());
            assert_eq!(body["key_state"], code.key_state().as_str());
            assert_eq!(body["status"], code.status());
            assert_eq!(
                body.get("retry_after_seconds").and_then(serde_json::Value::as_u64),
                code.pause().map(u64::from)
            );
            for member in ["type", "title", "instance", "operation_id", "documentation"] {
                assert!(body[member].is_string(), "{member}");
            }
        }
    }

    // Shown by: leaving a code out of the page; a status on it that is another one.
    #[tokio::test]
    async fn every_code_has_its_section_on_the_page_that_its_problem_names() {
        let page =
            std::fs::read_to_string(std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(DOCUMENTATION)).unwrap();
        let sections: Vec<&str> = page.split("\n### ").skip(1).collect();
        assert_eq!(sections.len(), Code::all().count(), "a section for each code, and no other");
        for (code, section) in Code::all().zip(sections) {
            let said = json(problem_response(&Problem::new(code))).await;
            let (path, anchor) = said["documentation"].as_str().unwrap().split_once('#').unwrap();
            let (heading, text) = section.split_once("\n\n").unwrap();
            // GitHub makes the anchor of a heading by lower case.
            assert_eq!((path, anchor), (DOCUMENTATION, heading.to_lowercase().as_str()));
            let retryable = if code.retryable() { "retryable" } else { "not retryable" };
            let pause = code.pause().map(|seconds| format!(", come again after {seconds} s")).unwrap_or_default();
            let (grpc, facts) =
                (format!(" ({});", code.grpc()), format!("; {retryable}{pause}; key state `{}`.\n", code.key_state()));
            assert!(text.starts_with(&format!("HTTP {}, gRPC ", code.status())), "{section}");
            assert!(text.contains(&grpc) && text.contains(&facts), "{section}");
        }
    }

    // Shown by: `insert` in place of `append`. Shown to fail: without 304 among those that have no
    // body.
    #[tokio::test]
    async fn m62_a_replay_has_repeated_headers_and_its_own_mark() {
        let reply = Reply::new(201).header("link", "</a>").header("link", "</b>").header("location", "/notes/1");
        let response = reply_response(Reply { body: b"{}".to_vec(), ..reply.clone() }, true);
        assert_eq!(response.headers().get_all("link").iter().count(), 2);
        assert_eq!(response.headers()["idempotent-replayed"], "true");
        assert_eq!(response.headers()["idempotency-key-state"], "spent");
        assert_eq!(response.status(), 201);
        let first = reply_response(reply.clone(), false);
        assert!(!first.headers().contains_key("idempotent-replayed"));
        assert!(!first.headers().contains_key("idempotency-key-state"));
        for status in [204, 304] {
            let empty = reply_response(Reply { status, body: b"x".to_vec(), ..reply.clone() }, true);
            assert_eq!(empty.status(), status);
            assert!(axum::body::to_bytes(empty.into_body(), 9).await.unwrap().is_empty(), "{status}");
        }
    }
}
