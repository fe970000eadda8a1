//! A typed operation as a route: reads and validates a request, runs it once per key, and answers.
//!
//! ```
//! # #[cfg(feature = "sqlite")]
//! # mod on_sqlite {
//! # use axum::{Router, extract::Request, routing::post};
//! # use oncebox::error::Invalid;
//! # use oncebox::http::idempotency::{JsonCommand, TypedOperation};
//! # use oncebox::operation::{Endpoint, Engine, FingerprintWriter, IdempotentCommand};
//! # use oncebox::operation::{Mode, Outcome, Reply, Route};
//! # use oncebox::store::sqlite::SqliteStore;
//! # #[derive(serde::Deserialize)]
//! # #[serde(deny_unknown_fields)]
//! # struct Pay { amount: i64 }
//! # impl JsonCommand for Pay {}
//! # impl IdempotentCommand for Pay {
//! #     const OPERATION: &'static str = "pay";
//! #     const VERSION: u32 = 1;
//! #     fn fingerprint(&self, _: u32, writer: &mut FingerprintWriter) { writer.field("amount", &self.amount); }
//! # }
//! fn routes(engine: &Engine<SqliteStore>) -> Result<Router, Invalid> {
//!     let typed = TypedOperation::<_, Pay>::new(engine, Endpoint::typed::<Pay>(Route::new(Mode::Transactional)))?;
//!     let pay = move |request: Request| {
//!         let typed = typed.clone();
//!         async move {
//!             typed.serve(request, |asked, mut tx| Box::pin(async move {
//!                 oncebox::sqlx::query("insert into payment (tenant, amount) values (?, ?)")
//!                     .bind(asked.scope.tenant().to_owned()).bind(asked.command.amount)
//!                     .execute(tx.connection()).await?;
//!                 Ok(Outcome::Completed(Reply::json(201, &asked.command.amount)?))
//!             })).await
//!         }
//!     };
//!     Ok(Router::new().route("/payments", post(pay)))
//! }
//! # }
//! ```
//!
//! Not here: authentication, which must put [`IdempotencyScope`](super::IdempotencyScope) into the
//! request first.

use std::fmt;
use std::marker::PhantomData;

use axum::extract::Request;
use axum::response::Response;
use futures_util::future::BoxFuture;
use serde::de::DeserializeOwned;

use super::intake::{content_type, invalid, key_in, read_body, refused, scope_in, target_in, unread};
use super::objects::read_json;
use super::respond::respond;
use crate::error::{HandlerError, Invalid};
use crate::operation::port::{Keys, Operations};
use crate::operation::rules::raw::{Target, essence, is_json};
use crate::operation::rules::{Canonical, Code, FingerprintWriter, IdempotentCommand, Mode, Outcome, Scope};
use crate::operation::{BodyPermit, EffectTx, Endpoint, Engine, KeyGiven, Problem, Registered, Reply};
use crate::store::base::Base;

/// A command that is read from a JSON body. Derive `Deserialize` with `deny_unknown_fields`,
/// because an ignored member would not be a part of the command (M21). The derive refuses repeated
/// members. A struct is read only from an object, although the derive alone would accept an array
/// of its fields.
pub trait JsonCommand: IdempotentCommand + DeserializeOwned + Send + Sync + 'static {
    /// Checks the command. Its defaults are filled in before, because a default counts like a value
    /// that the client gave (M20).
    ///
    /// # Errors
    /// What is wrong, without values of the request.
    fn check(&self) -> Result<(), String> {
        Ok(())
    }
}

/// A command together with its sender.
#[derive(Debug, Clone)]
pub struct Scoped<C> {
    /// The sender: tenant and principal, from verified authentication.
    pub scope: Scope,
    /// The command, as it was read from the request.
    pub command: C,
}

/// A command, its sender and its key. A service that runs the operation itself gets them from
/// [`TypedOperation::read`].
#[derive(Debug)]
pub struct Taken<C> {
    /// The command, with the scope of its sender.
    pub scoped: Scoped<C>,
    /// The key of the request, or that it has none.
    pub key: KeyGiven,
    /// The memory permit of the body: keep it as long as the command.
    pub permit: BodyPermit,
    target: Target,
}

/// The command of [`TypedOperation::serve`]: a handler may be a closure that has read the path and
/// the query, so both count beside what the body says (M23).
impl<C: Canonical> Canonical for Taken<C> {
    fn write_canonical(&self, version: u32, writer: &mut FingerprintWriter) {
        self.scoped.command.write_canonical(version, writer);
        self.target.write_beside(writer);
    }
}

/// One typed operation, transactional or phased. Cheap to clone.
pub struct TypedOperation<S: Keys, C> {
    engine: Engine<S>,
    endpoint: Registered,
    command: PhantomData<fn() -> C>,
}

impl<S: Keys, C: JsonCommand> TypedOperation<S, C> {
    /// Registers a transactional operation with the engine.
    ///
    /// # Errors
    /// As [`Engine::protect`](crate::operation::Core::protect); any mode but `Transactional`.
    pub fn new(engine: &Engine<S>, endpoint: Endpoint) -> Result<Self, Invalid> {
        Self::registered(engine, endpoint.served_by("a typed operation", &[Mode::Transactional])?)
    }

    /// Registers a phased operation, whose requests [`Self::read`] reads and a
    /// [`PhasedEngine`](crate::operation::phased::PhasedEngine) runs. It is not for
    /// [`Self::serve`].
    ///
    /// # Errors
    /// As [`Engine::protect`](crate::operation::Core::protect); any mode but `Phased`.
    pub fn phased(engine: &Engine<S>, endpoint: Endpoint) -> Result<Self, Invalid> {
        Self::registered(engine, endpoint.served_by("a typed operation in phases", &[Mode::Phased])?)
    }

    fn registered(engine: &Engine<S>, endpoint: Endpoint) -> Result<Self, Invalid> {
        Ok(Self { engine: engine.clone(), endpoint: engine.protect(endpoint)?, command: PhantomData })
    }

    /// The registered operation that this serves.
    #[must_use]
    pub fn endpoint(&self) -> &Registered {
        &self.endpoint
    }

    /// Reads key, scope, body and command from a request. A request that is refused here makes no
    /// record.
    ///
    /// The path parameters and the query are part of the fingerprint where the whole [`Taken`] is
    /// the command, as in [`Self::serve`]. A phased operation runs `taken.scoped.command` alone,
    /// and its phases see nothing else. Write what they need of the path into the command and its
    /// fingerprint.
    ///
    /// # Errors
    /// The response to give to the client.
    pub async fn read(&self, request: Request) -> Result<Taken<C>, Box<Response>> {
        let refuse = |problem: &Problem| Box::new(refused(&self.endpoint, problem));
        let (mut parts, body) = request.into_parts();
        let key = key_in(&parts.headers, self.endpoint.route().key_format);
        let scope = scope_in(&parts);
        if let Some(answered) = unread(&self.engine, &self.endpoint, scope.clone(), key.clone()).early() {
            return Err(Box::new(respond(answered)));
        }
        let Some(scope) = scope else { return Err(refuse(&Problem::new(Code::ScopeRequired))) };
        if !is_json(&essence(&content_type(&parts.headers))) {
            return Err(refuse(&Problem::new(Code::UnsupportedMediaType)));
        }
        let intake = read_body(&self.engine, &self.endpoint, &parts, &scope, body).await;
        let (body, permit) = intake.map_err(|problem| refuse(&problem))?;
        let command: C = read_json(&body).map_err(|error| refuse(&invalid(what_is_wrong(&error))))?;
        command.check().map_err(|wrong| refuse(&invalid(wrong)))?;
        Ok(Taken { scoped: Scoped { scope, command }, key, permit, target: target_in(&mut parts).await })
    }
}

impl<S: Operations + Base, C: JsonCommand> TypedOperation<S, C> {
    /// Serves a request of a transactional operation; see [`Engine::execute_transactional`].
    ///
    /// The path parameters and the query belong to the command: the same key and body for another
    /// resource get 422. The rest of the path does not, so an operation may be mounted twice.
    pub async fn serve<F>(&self, request: Request, handler: F) -> Response
    where
        F: for<'t> Fn(&'t Scoped<C>, EffectTx<'t, S>) -> BoxFuture<'t, Result<Outcome<Reply>, HandlerError>>
            + Send
            + Sync
            + 'static,
    {
        let taken = match self.read(request).await {
            Ok(taken) => taken,
            Err(response) => return *response,
        };
        let (scope, key) = (Some(taken.scoped.scope.clone()), taken.key.clone());
        // The whole `Taken` is the command: it holds the memory permit, which must live as long as
        // the run.
        let run = self
            .engine
            .execute_transactional(&self.endpoint, scope, key, taken, move |taken, tx| handler(&taken.scoped, tx));
        respond(run.await)
    }
}

/// Says where the body is not a valid command, and at which member, without its values.
fn what_is_wrong(error: &serde_json::Error) -> String {
    if let Some(member) = member_of(&error.to_string()) {
        return format!("the body: {member}, at line {} column {}", error.line(), error.column());
    }
    let what = match error.classify() {
        serde_json::error::Category::Data => "is JSON, but not what this operation takes",
        serde_json::error::Category::Eof => "ends early",
        serde_json::error::Category::Syntax | serde_json::error::Category::Io => "is no JSON",
    };
    format!("the body {what}, at line {} column {}", error.line(), error.column())
}

/// The part of an error of serde that says which member is unknown, missing or repeated. It has the
/// member's name and no value.
fn member_of(message: &str) -> Option<String> {
    ["unknown field", "missing field", "duplicate field"].into_iter().find_map(|what| {
        let name = message.strip_prefix(what)?.strip_prefix(" `")?.split('`').next()?;
        let plain = name.len() <= 64 && name.bytes().all(|byte| byte.is_ascii_graphic());
        plain.then(|| format!("{what} `{name}`"))
    })
}

impl<S: Keys, C> Clone for TypedOperation<S, C> {
    fn clone(&self) -> Self {
        Self { engine: self.engine.clone(), endpoint: self.endpoint.clone(), command: PhantomData }
    }
}

impl<S: Keys, C> fmt::Debug for TypedOperation<S, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TypedOperation").field("endpoint", &self.endpoint).finish_non_exhaustive()
    }
}
