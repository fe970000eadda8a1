//! What a handler behind the layer extracts: a wrapper that reports when the operation starts, and
//! the guard.

use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::Response;
use sqlx::{Database, Transaction};

use super::outcome::reply_of;
use super::respond::reply_response;
use crate::operation::port::{Bridged, Operations};
use crate::operation::{Guard, GuardError, Progress};
use crate::store::base::Base;

/// Wraps the extractor of the body: `Idempotent<Json<NewNote>>`. If `E` refuses the request, the
/// operation has not started, so its 400 or 422 frees the key. After that the same status is an
/// outcome (O10).
///
/// What refuses earlier is not seen: another extractor (`Path`, `Query`, `TypedHeader`), which axum
/// runs before that of the body, or a middleware inside of the layer. Its refusal is kept as the
/// outcome of the key unless the route sets
/// [`Route::release_untagged`](crate::operation::Route::release_untagged).
#[derive(Debug, Clone, Copy)]
pub struct Idempotent<E>(pub E);

impl<St, E> FromRequest<St> for Idempotent<E>
where
    St: Send + Sync,
    E: FromRequest<St>,
{
    type Rejection = E::Rejection;

    async fn from_request(request: Request, state: &St) -> Result<Self, E::Rejection> {
        // Without the layer there is no progress to report.
        let progress = request.extensions().get::<Progress>().cloned();
        if let Some(progress) = &progress {
            progress.met_extractor();
        }
        let inner = E::from_request(request, state).await?;
        if let Some(progress) = progress {
            progress.started();
        }
        Ok(Self(inner))
    }
}

impl<S: Operations + Base<Db: Database<Connection: Bridged>>> Guard<S> {
    /// Commits the handler's transaction together with this response as its outcome, and returns
    /// the response. Its body must be complete: a stream is refused, and so is a body that fails or
    /// does not end within the route's completion budget, because the transaction is open
    /// meanwhile.
    ///
    /// # Errors
    /// As [`Guard::commit`]; [`GuardError::Unread`] for a body that cannot be read.
    pub async fn commit_response(
        &self,
        tx: Transaction<'_, S::Db>,
        response: Response,
    ) -> Result<Response, GuardError> {
        let reply = self.commit_read(tx, |within| reply_of(response, within)).await?;
        Ok(reply_response(reply, false))
    }
}

impl<S: Operations + Base, St: Send + Sync> FromRequestParts<St> for Guard<S> {
    type Rejection = (StatusCode, &'static str);

    async fn from_request_parts(parts: &mut Parts, _: &St) -> Result<Self, Self::Rejection> {
        let guard = parts.extensions.get::<Self>().cloned();
        let missing = "this handler needs the idempotency layer, and a request with a key";
        guard.ok_or((StatusCode::INTERNAL_SERVER_ERROR, missing))
    }
}
