//! `POST /notes`: any handler behind the layer. Edge protection only: a process that dies between
//! the note and its outcome leaves a key whose outcome is unknown.

use axum::extract::{FromRequest, Path, Request, State};
use axum::http::StatusCode;
use axum::http::header::{CONTENT_TYPE, LOCATION};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use oncebox::http::idempotency::{IdempotencyScope, Idempotent, OutcomeTag, problem_response, read_json};
use oncebox::operation::{Code, Outcome, Problem};
use oncebox::sqlx;
use serde::{Deserialize, Serialize};

use crate::books::Books;
use crate::points::reach;
use crate::service::App;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewNote {
    text: Text,
}

/// What every database takes. It is refused here, while the key is free: after this the operation
/// has started.
#[derive(Debug, Deserialize)]
#[serde(try_from = "String")]
struct Text(String);

impl TryFrom<String> for Text {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        match text.len() {
            _ if text.contains('\0') => Err("a text has no NUL"),
            65_536.. => Err("a text has at most 65535 bytes"),
            _ => Ok(Self(text)),
        }
    }
}

#[derive(Debug, Serialize)]
struct Note {
    id: String,
    text: String,
}

/// A JSON body whose refusals have the form of all others.
pub(crate) struct Body<T>(pub(crate) T);

impl<T: serde::de::DeserializeOwned, St: Send + Sync> FromRequest<St> for Body<T> {
    type Rejection = Response;

    async fn from_request(request: Request, state: &St) -> Result<Self, Response> {
        let refuse = |code| problem_response(&Problem::new(code));
        let json = request.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or("");
        if !json.split(';').next().unwrap_or("").trim().eq_ignore_ascii_case("application/json") {
            return Err(refuse(Code::UnsupportedMediaType));
        }
        let bytes = axum::body::Bytes::from_request(request, state).await.map_err(|unread| {
            let is_too_long = unread.status() == StatusCode::PAYLOAD_TOO_LARGE;
            refuse(if is_too_long { Code::BodyTooLarge } else { Code::RequestInvalid })
        })?;
        read_json(&bytes).map(Self).map_err(|_| refuse(Code::RequestInvalid))
    }
}

pub(crate) async fn create<S: Books>(
    State(app): State<App<S>>,
    Extension(IdempotencyScope(scope)): Extension<IdempotencyScope>,
    Idempotent(Body(new)): Idempotent<Body<NewNote>>,
) -> Response {
    reach("note.claimed").await;
    let note = Note { id: format!("note_{}", uuid::Uuid::now_v7().simple()), text: new.text.0 };
    let added = app.store.add_note(scope.tenant(), &note.id, &note.text).await;
    reach("note.written").await;
    match added {
        Ok(()) => (StatusCode::CREATED, [(LOCATION, format!("/notes/{}", note.id))], Json(note)).into_response(),
        // No connection was to be had: nothing was written, and the key is free again.
        Err(error @ sqlx::Error::PoolTimedOut) => {
            (Extension(OutcomeTag(Outcome::DontStore(()))), crate::service::unread(&error)).into_response()
        }
        Err(error) => crate::service::unwritten(&error),
    }
}

pub(crate) async fn show<S: Books>(
    State(app): State<App<S>>,
    Extension(IdempotencyScope(scope)): Extension<IdempotencyScope>,
    Path(id): Path<String>,
) -> Response {
    match app.engine.while_there(app.store.note(scope.tenant(), &id)).await {
        Ok(Some(text)) => Json(Note { id, text }).into_response(),
        Ok(None) => StatusCode::NOT_FOUND.into_response(),
        Err(error) => crate::service::unread(&error),
    }
}
