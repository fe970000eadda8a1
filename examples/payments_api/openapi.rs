//! `GET /openapi.json`: what the service takes and answers.
//!
//! What an `Idempotency-Key` adds is made from the endpoints themselves; the rest is written here.
//! A test drives the service with it.

use oncebox::http::idempotency::describe;
use oncebox::operation::Engine;
use oncebox::store::Keys;
use serde_json::{Value, json};
use utoipa::openapi::path::Operation;

/// The document.
pub(crate) fn document<S: Keys>(engine: &Engine<S>) -> Result<Value, serde_json::Error> {
    let mut paths = paths();
    for endpoint in engine.protected() {
        let Some((method, path)) = endpoint.place() else { continue };
        let place = &mut paths[path][method.to_lowercase()];
        let mut operation: Operation = serde_json::from_value(place.take())?;
        describe(&endpoint, &mut operation)?;
        *place = serde_json::to_value(operation)?;
    }
    Ok(json!({
        "openapi": "3.1.0",
        "info": {"title": "payments", "version": env!("CARGO_PKG_VERSION")},
        "components": {"securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
        "paths": paths,
    }))
}

fn paths() -> Value {
    let bearer = json!([{"bearer": []}]);
    let id = json!([{"name": "id", "in": "path", "required": true, "schema": {"type": "string"}}]);
    let named = json!([{"name": "id", "in": "path", "required": true, "schema": text()}]);
    let reads = |shown: Value| {
        let responses = json!({
            "200": shown,
            "401": problem("Not authenticated."),
            "404": {"description": "Not there."},
            "503": problem("The database does not answer."),
        });
        json!({"get": {"security": bearer, "parameters": id, "responses": responses}})
    };
    let open =
        |media: &str| json!({"get": {"responses": {"200": {"description": "As it is.", "content": {media: {}}}}}});
    let text_plain = "text/plain; charset=utf-8";
    let payment = shown("The payment.", &["id", "status", "accountId", "amountMinor", "currency", "merchantReference"]);
    let note = shown("The note.", &["id", "text"]);
    let refusals = json!({
        "200": shown("The payment of this order, made under another key.", &["id", "duplicate_of"]),
        "201": payment,
        "401": problem("Not authenticated."),
        "415": problem("The body is not JSON."),
    });
    let with = |more: Value| {
        let mut responses = refusals.clone();
        for (status, response) in more.as_object().into_iter().flatten() {
            responses[status] = response.clone();
        }
        responses
    };
    let pays = with(json!({"402": problem("Insufficient funds.")}));
    let charges = with(json!({
        // Also the service's own answer for an order that is being charged under another key, which
        // is no problem.
        "202": {"description": "It goes on: see Location.", "content": {}},
        "402": problem("The provider declined."),
    }));
    let new_payment = json!({
        "type": "object",
        "additionalProperties": false,
        "required": ["accountId", "amountMinor", "currency", "merchantReference"],
        "properties": {
            "accountId": text(),
            "amountMinor": {"type": "integer", "minimum": 1, "maximum": i64::MAX},
            "currency": {"type": "string", "pattern": "^[A-Z]{3}$"},
            "merchantReference": text(),
            "channel": text(),
        },
    });
    let new_note = json!({
        "type": "object",
        "additionalProperties": false,
        "required": ["text"],
        "properties": {"text": {"type": "string", "pattern": "^[^\\u0000]*$"}},
    });
    let new_balance = json!({
        "type": "object",
        "additionalProperties": false,
        "required": ["balanceMinor"],
        "properties": {"balanceMinor": {"type": "integer", "minimum": i64::MIN, "maximum": i64::MAX}},
    });
    json!({
        "/payments": {"post": {"security": bearer, "requestBody": body(&new_payment), "responses": pays}},
        "/payments/{id}": reads(payment.clone()),
        "/charges": {"post": {"security": bearer, "requestBody": body(&new_payment), "responses": charges}},
        "/operations/{id}": reads(shown("Where it stands.", &["id", "status", "result"])),
        "/notes": {"post": {
            "security": bearer,
            "requestBody": body(&new_note),
            "responses": {
                "201": note.clone(),
                "401": problem("Not authenticated."),
                "415": problem("The body is not JSON."),
            },
        }},
        "/notes/{id}": reads(note),
        "/accounts/{id}": {"put": {
            "security": bearer,
            "parameters": named,
            "requestBody": body(&new_balance),
            "responses": {
                "200": shown("The account.", &["id", "balanceMinor"]),
                "400": problem("The request is not valid."),
                "401": problem("Not authenticated."),
                "413": problem("The body is too long."),
                "415": problem("The body is not JSON."),
                "503": problem("Whether it was written is not known: send it again."),
            },
        }},
        "/.well-known/idempotency": open("application/json"),
        "/openapi.json": open("application/json"),
        "/livez": open(text_plain),
        "/readyz": open(text_plain),
        "/metrics": open("text/plain; version=0.0.4; charset=utf-8"),
    })
}

fn text() -> Value {
    json!({"type": "string", "minLength": 1, "maxLength": 64, "pattern": "^[^\\u0000]{1,64}$"})
}

fn body(schema: &Value) -> Value {
    json!({"required": true, "content": {"application/json": {"schema": schema}}})
}

fn shown(description: &str, required: &[&str]) -> Value {
    let schema = json!({"type": "object", "required": required});
    json!({"description": description, "content": {"application/json": {"schema": schema}}})
}

fn problem(description: &str) -> Value {
    let required = ["type", "title", "status", "code", "retryable", "key_state"];
    let schema = json!({"type": "object", "required": required});
    json!({"description": description, "content": {"application/problem+json": {"schema": schema}}})
}
