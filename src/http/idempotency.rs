//! `Idempotency-Key` for axum and tower services (M108): the answers of the engine as HTTP.
//!
//! Order of layers, from outside to inside, and why:
//!
//! ```text
//! request id, trace -> CORS -> compression -> rate limit -> authentication -> [idempotency] -> handler
//! ```
//!
//! * Authentication is outside, and puts [`IdempotencyScope`] into the request's extensions. So a
//!   refused login, a rate limit or a preflight makes no record, and a revoked principal gets no
//!   replay. A header is never used instead.
//! * Compression is outside, so that stored bodies are plain. CORS is outside, so that no origin is
//!   stored. CORS exposes `Idempotent-Replayed`, `Idempotency-Key-State`, `Retry-After` and
//!   `Location`, and allows `Idempotency-Key`.
//! * [`IdempotencyLayer`] is put on a method, `post(handler).route_layer(layer)`, so that 404 and
//!   405 claim nothing. `route_layer` of a whole router also covers its 405 answers for other
//!   methods, and each would become the outcome of its key. A timeout layer inside is useless: the
//!   engine's own timeout answers 409 and does not drop the handler.
//!
//! Two ways to use it: [`TypedOperation`] (claim, effects and answer in one commit) and
//! [`IdempotencyLayer`] (edge protection for any handler).

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
