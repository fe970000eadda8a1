//! Operations over gRPC: typed operations for unary calls of tonic services (M109).
//!
//! An interceptor of tonic sees no message, so the call is made inside the method, around its work:
//!
//! ```
//! # use oncebox::grpc::{KeyField, idempotent_unary, reply};
//! # use oncebox::operation::{Engine, IdempotentCommand, Outcome, Registered};
//! # use oncebox::store::{Base, Operations};
//! # use prost::Message;
//! # use tonic::{Request, Response, Status};
//! # struct Payments<S: Operations + Base> { engine: Engine<S>, create_payment: Registered }
//! # impl<S: Operations + Base> Payments<S> {
//! # async fn method<CreatePayment, Payment>(&self, request: Request<CreatePayment>) -> Result<Response<Payment>, Status>
//! # where CreatePayment: Message + IdempotentCommand + KeyField + 'static, Payment: Message + Default {
//! // async fn create_payment(&self, request: Request<CreatePayment>) -> Result<Response<Payment>, Status> {
//! idempotent_unary(&self.engine, &self.create_payment, request, |command: &CreatePayment, mut tx| {
//!     Box::pin(async move {
//!         let _rows = tx.connection(); // what is written through it commits with the key and the answer
//!         Ok(Outcome::Completed(reply(&Payment::default())))
//!     })
//! })
//! .await
//! # }
//! # }
//! ```
//!
//! Promises:
//!
//! * The key comes from the metadata `idempotency-key`, or from a field of the message
//!   ([`KeyField`]). If both are given they must be equal, else the answer is `INVALID_ARGUMENT`.
//!   The sender comes from the request's extensions, where an interceptor that verified it put a
//!   [`Scope`], never from metadata.
//! * A repeated call gets the stored status, message, details and metadata, and
//!   `idempotent-replayed: true`. With a refusal it gets `idempotency-key-state: spent` too.
//! * A call whose deadline has passed, or that was cancelled, continues in its own task, and the
//!   next call finds its outcome (O27).
//! * Problems carry an `ErrorInfo` (reason: the code; domain `oncebox`; `key_state`, `retryable`)
//!   and, if waiting helps, a `RetryInfo`. Where the answer is not kept, a `ResourceInfo` or the
//!   `location` in the metadata says what was made.
//!
//! A message is stored as its bytes and decoded into the current type: fields that this program
//! does not know are not replayed.
//!
//! Not here: streams (they are never replayed), and the engine
//! ([`operation`](crate::operation)).

mod key;
mod status;

use futures_util::future::BoxFuture;
use prost::Message;
use tonic::{Request, Response, Status};

pub use self::{
    key::KeyField,
    status::{refusal, reply, seen},
};

use crate::error::{HandlerError, Invalid};
use crate::operation::port::{Keys, Operations};
use crate::operation::rules::{Canonical, Code, FingerprintWriter, IdempotentCommand, Mode, Outcome, Scope};
use crate::operation::{Answered, BodyPermit, EffectTx, Endpoint, Engine, Problem, Registered, Reply};
use crate::store::base::Base;

/// A message with the memory permit of its bytes: a run that goes on after its call was dropped
/// holds both.
struct Held<M> {
    message: M,
    _permit: BodyPermit,
}

impl<M: IdempotentCommand> Canonical for Held<M> {
    fn write_canonical(&self, version: u32, writer: &mut FingerprintWriter) {
        self.message.fingerprint(version, writer);
    }
}

/// Registers the operation of a unary call with the engine.
///
/// # Errors
/// As [`Engine::protect`](crate::operation::Core::protect); a mode other than transactional.
pub fn protect<S: Keys>(engine: &Engine<S>, endpoint: Endpoint) -> Result<Registered, Invalid> {
    engine.protect(endpoint.served_by("a unary call", &[Mode::Transactional])?)
}

/// Runs a unary call once for its key, as a transactional operation, and answers repeated calls.
/// `endpoint` comes from [`protect`]. `handler` is that of [`Engine::execute_transactional`]; it
/// makes its answers with [`reply`] and [`refusal`].
///
/// # Errors
/// The status to answer: the operation's own refusal, first or replayed, or a problem.
///
/// # Cancel safety
/// If the future is dropped, the operation continues, and a call with the same key finds its
/// outcome.
pub async fn idempotent_unary<S, M, R, F>(
    engine: &Engine<S>,
    endpoint: &Registered,
    request: Request<M>,
    handler: F,
) -> Result<Response<R>, Status>
where
    S: Operations + Base,
    M: Message + IdempotentCommand + KeyField + 'static,
    R: Message + Default,
    F: for<'t> Fn(&'t M, EffectTx<'t, S>) -> BoxFuture<'t, Result<Outcome<Reply>, HandlerError>>
        + Send
        + Sync
        + 'static,
{
    let mode = endpoint.route().mode;
    if mode != Mode::Transactional {
        // A problem of the engine would ask the client to come again for ever.
        let wrong =
            format!("the operation `{}` is of mode {mode}: register it with `grpc::protect`", endpoint.operation());
        tracing::error!("{wrong}");
        return Err(Status::internal(wrong));
    }
    let given = key::given(request.metadata(), request.get_ref().key_field(), endpoint.route().key_format);
    // A refusal here is counted like a refusal of the engine.
    let refused = |problem: &Problem| {
        endpoint.refused(problem.code);
        status::of_problem(problem)
    };
    let given = given.map_err(|problem| refused(&problem))?;
    let scope = request.extensions().get::<Scope>().cloned();
    let bytes = request.get_ref().encoded_len();
    if bytes > endpoint.route().request_body_max {
        return Err(refused(&Problem::new(Code::BodyTooLarge)));
    }
    let mut permit = engine.body_memory(scope.as_ref().map_or("", Scope::tenant));
    if !permit.grow(bytes) {
        return Err(refused(&Problem::new(Code::BodyMemoryExceeded)));
    }
    let held = Held { message: request.into_inner(), _permit: permit };
    let run = engine.execute_transactional(endpoint, scope, given, held, move |held, tx| handler(&held.message, tx));
    match run.await {
        Answered::Reply { reply, replayed } => status::of_reply(&reply, replayed),
        Answered::Problem(problem) => Err(status::of_problem(&problem)),
    }
}
