//! `Idempotency-Key` for axum and tower services (M108): the answers of the engine as HTTP.
//!
//! Order of layers, from outside to inside, and why:
//!
//! ```text
//! request id, trace -> CORS -> compression -> rate limit -> authentication -> [idempotency] -> handler
//! ```
//!
//! * Authentication is outside, and puts [`IdempotencyScope`] into the request's extensions, so a
//!   revoked principal gets no replay. No header can set the scope. What is refused outside, by a
//!   login, a rate limit or a preflight, makes no record.
//! * Compression is outside, so that stored bodies are plain. CORS is outside, so that no origin is
//!   stored. Let CORS expose `Idempotent-Replayed`, `Idempotency-Key-State`, `Retry-After` and
//!   `Location`, and allow `Idempotency-Key`.
//! * [`IdempotencyLayer`] is put on a method, `post(handler).route_layer(layer)`, so that 404 and
//!   405 claim nothing. `route_layer` of a whole router also covers its 405 answers for other
//!   methods, and each would become the outcome of its key. Put no timeout layer inside: it
//!   drops the handler half way. The engine's own timeout answers 409, and the handler runs on.
//!
//! Two ways to use it: [`TypedOperation`] (claim, writes and answer in one commit) and
//! [`IdempotencyLayer`] (edge protection for any handler). Calls of a provider: `PhasedEngine`.

mod discovery;
mod extract;
mod intake;
mod layer;
mod objects;
#[cfg(feature = "openapi")]
mod openapi;
mod outcome;
mod respond;
mod typed;

pub use self::{
    discovery::well_known,
    extract::Idempotent,
    intake::IdempotencyScope,
    layer::{IdempotencyLayer, IdempotencyService},
    objects::read_json,
    outcome::OutcomeTag,
    respond::{problem_response, respond},
    typed::{JsonCommand, Scoped, Taken, TypedOperation},
};
#[cfg(feature = "openapi")]
pub use openapi::describe;
