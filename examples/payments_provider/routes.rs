//! What it serves.

use std::sync::Arc;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{RawQuery, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde_json::{Value, json};

use crate::charges::{End, Provider};
use crate::faults::{Fault, Order};
use crate::ledger::{Charge, Request};

pub(crate) fn routes(provider: Arc<Provider>) -> Router {
    Router::new()
        .route("/charges", post(charge).get(find))
        .route("/charges/count", get(count))
        .route("/admin/faults", post(order).delete(clear))
        .with_state(provider)
}

fn answer(status: u16, body: &Value) -> Response {
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    (status, [(header::CONTENT_TYPE, "application/json")], body.to_string()).into_response()
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

async fn charge(State(provider): State<Arc<Provider>>, headers: HeaderMap, body: Bytes) -> Response {
    let Some(key) = text(&headers, "idempotency-key").filter(|key| !key.is_empty()) else {
        return answer(400, &json!({ "code": "key_required" }));
    };
    let request: Request = match serde_json::from_slice(&body) {
        Ok(request) => request,
        Err(error) => return answer(400, &json!({ "code": "invalid", "detail": error.to_string() })),
    };
    let faults = provider.faults.take(text(&headers, "provider-fault"), |fault| fault != Fault::NoQuery);
    // In a task of its own: a client that goes away does not end it.
    match tokio::spawn(provider.charge(key.to_owned(), request, faults)).await {
        Ok(End::Answer(status, body)) => answer(status, &body),
        // The unwinding takes the connection down, without a word.
        Ok(End::Drop) | Err(_) => std::panic::resume_unwind(Box::new("the connection is dropped")),
    }
}

async fn find(State(provider): State<Arc<Provider>>, headers: HeaderMap, RawQuery(query): RawQuery) -> Response {
    if !provider.faults.take(text(&headers, "provider-fault"), |fault| fault == Fault::NoQuery).is_empty() {
        return answer(404, &json!({ "code": "not_found" }));
    }
    let query = query.unwrap_or_default();
    let key = url::form_urlencoded::parse(query.as_bytes()).find(|(name, _)| name == "key");
    let Some((_, key)) = key else { return answer(400, &json!({ "code": "key_required" })) };
    let charges: Vec<Charge> = provider.ledger().charges(&key).cloned().collect();
    answer(200, &json!({ "charges": charges }))
}

async fn count(State(provider): State<Arc<Provider>>) -> Response {
    let (count, keys) = provider.ledger().count();
    answer(200, &json!({ "count": count, "keys": keys }))
}

async fn order(State(provider): State<Arc<Provider>>, body: Bytes) -> Response {
    match serde_json::from_slice::<Order>(&body) {
        Ok(order) => {
            provider.faults.order(&order);
            StatusCode::NO_CONTENT.into_response()
        }
        Err(error) => answer(400, &json!({ "code": "invalid", "detail": error.to_string() })),
    }
}

async fn clear(State(provider): State<Arc<Provider>>) -> Response {
    provider.faults.clear();
    StatusCode::NO_CONTENT.into_response()
}
