//! `PUT /accounts/ID`: naturally idempotent, so it needs no key (M5).

use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use oncebox::http::idempotency::{IdempotencyScope, problem_response};
use oncebox::operation::{Code, Problem};
use serde::Deserialize;
use serde_json::json;

use crate::books::Books;
use crate::notes::Body;
use crate::service::App;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct NewBalance {
    balance_minor: i64,
}

pub(crate) async fn put<S: Books>(
    State(app): State<App<S>>,
    Extension(IdempotencyScope(scope)): Extension<IdempotencyScope>,
    Path(id): Path<String>,
    Body(NewBalance { balance_minor }): Body<NewBalance>,
) -> Response {
    if !(1..=64).contains(&id.chars().count()) {
        return problem_response(&Problem::new(Code::RequestInvalid));
    }
    match app.engine.while_there(app.store.put_account(scope.tenant(), &id, balance_minor)).await {
        Ok(()) => Json(json!({"id": id, "balanceMinor": balance_minor})).into_response(),
        Err(error) => crate::service::unwritten(&error),
    }
}
