//! Describes a protected operation in an OpenAPI document (utoipa).
//!
//! Promise: the description is made from the endpoint itself, so it says nothing that the service
//! does not do.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use utoipa::openapi::extensions::Extensions;
use utoipa::openapi::path::Operation;
use utoipa::openapi::{RefOr, Response};

use super::discovery::iso_8601;
use crate::operation::Registered;
use crate::operation::rules::KeyFormat;
use crate::operation::rules::route::Requirement;

/// Adds the key's header parameter, the header of replays, the problem responses of the engine
/// (without 403, 408, 415, 421 and 500), and the extension `x-idempotency`. A response that has a
/// description keeps it.
///
/// # Errors
/// None in practice: utoipa would have to refuse a fragment that is fixed in this file.
pub fn describe(endpoint: &Registered, operation: &mut Operation) -> Result<(), serde_json::Error> {
    let route = endpoint.route();
    let parameter = serde_json::from_value(key_parameter(route.key_format, route.requirement))?;
    operation.parameters.get_or_insert_default().push(RefOr::T(parameter));
    let replayed = json!({
        "description": "`true`: the outcome of an earlier request with this key. It is for debugging: do not depend on it.",
        "schema": {"type": "boolean"},
    });
    for (status, response) in &mut operation.responses.responses {
        if let RefOr::T(response) = response
            && status.starts_with('2')
        {
            response.headers.insert("Idempotent-Replayed".to_owned(), serde_json::from_value(replayed.clone())?);
        }
    }
    let mismatch = route.mismatch.status().to_string();
    let mut problems = vec![
        ("400".to_owned(), "The key or the request is not valid, or the key is missing."),
        ("409".to_owned(), "The first request runs, or its outcome is not known or not kept."),
        ("413".to_owned(), "The body is too long."),
        (
            "429".to_owned(),
            "The quota is used up, of operations without an outcome or of stored bytes: nothing was done.",
        ),
        (mismatch, "The key was used with a different request."),
        ("503".to_owned(), "Nothing was done, or the outcome is found by the same request again."),
    ];
    if endpoint.can_be_asked_for() {
        problems.push(("202".to_owned(), "The operation goes on: see Location."));
    }
    // A route may use the status of another problem for a mismatch; then one description names
    // both.
    let mut described = BTreeMap::<String, String>::new();
    for (status, about) in problems {
        let said = described.entry(status).or_default();
        said.push_str(if said.is_empty() { "" } else { " " });
        said.push_str(about);
    }
    for (status, about) in described {
        let problem: Response = serde_json::from_value(problem(&about))?;
        operation.responses.responses.entry(status).or_insert(RefOr::T(problem));
    }
    let idempotency = json!({
        "operation": endpoint.operation().as_str(),
        "ttl": iso_8601(route.retention.ttl),
        "mode": route.mode.as_str(),
        "replay": format!("{:?}", route.replay).to_lowercase(),
        "mismatchStatus": route.mismatch.status(),
    });
    let extension = Extensions::builder().add("x-idempotency", idempotency).build();
    match &mut operation.extensions {
        Some(extensions) => extensions.merge(extension),
        none => *none = Some(extension),
    }
    Ok(())
}

fn key_parameter(format: KeyFormat, requirement: Requirement) -> Value {
    let schema = match format {
        KeyFormat::Opaque => {
            json!({"type": "string", "minLength": 16, "maxLength": 255, "pattern": "^[A-Za-z0-9_.:~-]{16,255}$"})
        }
        KeyFormat::Uuid | KeyFormat::UuidV7 => {
            json!({"type": "string", "format": "uuid", "minLength": 36, "maxLength": 36})
        }
    };
    json!({
        "name": "Idempotency-Key",
        "in": "header",
        "required": requirement == Requirement::Required,
        "description": "Made once for each operation by the client, and sent again with every retry of it.",
        "schema": schema,
    })
}

fn problem(about: &str) -> Value {
    json!({
        "description": about,
        "headers": {
            "Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}},
        },
        "content": {"application/problem+json": {"schema": {
            "type": "object",
            "required": ["type", "title", "status", "code", "retryable", "key_state"],
            "properties": {
                "type": {"type": "string"},
                "title": {"type": "string"},
                "status": {"type": "integer"},
                "detail": {"type": "string"},
                "instance": {"type": "string"},
                "code": {"type": "string"},
                "retryable": {"type": "boolean"},
                "retry_after_seconds": {"type": "integer"},
                "key_state": {"type": "string"},
                "operation_id": {"type": "string"},
                "documentation": {"type": "string"},
            },
        }}},
    })
}
