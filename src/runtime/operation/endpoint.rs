//! A protected operation as its author declared it: route, fingerprints, what is kept of its
//! answers.
//!
//! Promise: what cannot keep the promise together is refused when it is registered, before a
//! request is taken (M4).
//!
//! Not here: the requests ([`Front`](super::Front)), and what a transport adds (`http`).

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::future::BoxFuture;
use uuid::Uuid;

use super::codec::Keeping;
use super::reply::Reply;
use crate::error::HandlerError;
use crate::observe::{self, Noted};
use crate::policy::operation::fingerprint::FingerprinterError;
use crate::policy::operation::identity::IdentityError;
use crate::policy::operation::raw::RawCommand;
use crate::policy::operation::route::{Durability, Replay, Requirement, RouteError, WhileRunning};
use crate::policy::operation::{
    Code, Fingerprint, Fingerprinter, IdempotentCommand, Keyring, Mode, OperationName, Record, Route,
};

/// Builds an answer anew from what the operation made.
pub(super) type Rebuild = Arc<dyn Fn(Record) -> BoxFuture<'static, Result<Reply, HandlerError>> + Send + Sync>;
/// Finds out how a run ended whose end was not seen.
pub(super) type Reconcile =
    Arc<dyn Fn(Reconciling) -> BoxFuture<'static, Result<Reconciled, HandlerError>> + Send + Sync>;
/// Turns an answer of one schema version into the next.
pub(super) type Upcast = Arc<dyn Fn(Reply) -> Reply + Send + Sync>;

/// A run whose end was not seen (O11).
#[derive(Debug, Clone)]
pub struct Reconciling {
    /// The tenant of the request; empty for the public scope.
    pub tenant: String,
    /// The command, as its fingerprint.
    pub command: Fingerprint,
    /// The identity of the run, which the handler was given too.
    pub operation_id: Uuid,
}

/// What was found out about it.
#[derive(Debug, Clone)]
pub enum Reconciled {
    /// It happened; this is its answer.
    Completed(Reply),
    /// It was refused for good; this is its answer.
    Failed(Reply),
    /// It did not happen: the key is free again.
    NotHappened,
    /// Nobody can say yet.
    Unknown,
}

/// A protected operation as it is declared, before an engine registers it.
pub struct Endpoint {
    route: Route,
    /// The type of the command, where there is one.
    command: Option<&'static str>,
    readable: std::ops::RangeInclusive<u32>,
    write_version: Option<u32>,
    operation: Result<OperationName, IdentityError>,
    pub(super) keeping: Keeping,
    pub(super) schema_version: u32,
    pub(super) upcasts: BTreeMap<u32, Upcast>,
    pub(super) rebuild: Option<Rebuild>,
    pub(super) reconcile: Option<Reconcile>,
    /// With the version of the fingerprint from which each counts.
    counted_headers: Vec<(String, u32)>,
    request_body_max: usize,
    request_body_within: Duration,
    operation_path: Option<String>,
    place: Option<(String, String)>,
}

/// Why an operation cannot be protected so.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EndpointError {
    /// The name of the operation cannot be used.
    #[error(transparent)]
    Name(#[from] IdentityError),
    /// The policies of the route contradict each other.
    #[error(transparent)]
    Route(#[from] RouteError),
    /// The fingerprints of the operation cannot be written as its settings say.
    #[error(transparent)]
    Fingerprints(#[from] FingerprinterError),
    /// A header that is never replayed.
    #[error("the header `{0}` is never stored: it belongs to one answer, one connection or one caller")]
    Header(String),
    /// A header that is no part of a command.
    #[error("the header `{0}` is no part of a command: it changes from one try to the next")]
    Counted(String),
    /// Not a JSON pointer.
    #[error("`{0}` is no JSON pointer: it begins with `/`")]
    Pointer(String),
    /// A typed operation claims each request; one without a key gets the server's.
    #[error("`requirement = off` is for the layer: a typed operation takes `optional`")]
    Off,
    /// The route builds answers anew, and nothing was given that can.
    #[error("`replay = reconstruct` needs `rebuilt_by`, and only it")]
    Rebuild,
    /// The route reconciles, and nothing was given that can.
    #[error("`reconciles` needs `reconciled_by`, and only it")]
    Reconcile,
    /// A duplicate is sent to the operation, and no path says where that is.
    #[error("`while_running = accepted` needs `operation_path`")]
    OperationPath,
    /// The store does not count what it keeps for a tenant.
    #[error("`stored_bytes_per_tenant_max` needs a store that counts the bytes of a tenant: a guard does not")]
    StoredBytes,
    /// Another operation has the name.
    #[error(
        "`{0}` is protected already, and otherwise: operations with one name share their keys, so each needs a name of its own; \
         one that is served at two places is registered once, or twice alike"
    )]
    Twice(OperationName),
}

impl Endpoint {
    /// An operation with a typed command, whose name and versions come from `C`.
    #[must_use]
    pub fn typed<C: IdempotentCommand>(route: Route) -> Self {
        let command = Some(std::any::type_name::<C>());
        Self { command, ..Self::new(C::OPERATION, C::OLDEST..=C::VERSION, route) }
    }

    /// An operation of which only the raw request is known: the generic layer (M18).
    #[must_use]
    pub fn raw(operation: &str, route: Route) -> Self {
        Self::new(operation, 1..=1, route)
    }

    fn new(operation: &str, readable: std::ops::RangeInclusive<u32>, route: Route) -> Self {
        Self {
            route,
            command: None,
            readable,
            write_version: None,
            operation: operation.parse(),
            keeping: Keeping::default(),
            schema_version: 1,
            upcasts: BTreeMap::new(),
            rebuild: None,
            reconcile: None,
            counted_headers: vec![("prefer".to_owned(), 1), ("if-match".to_owned(), 1)],
            request_body_max: 1 << 20,
            request_body_within: Duration::from_secs(10),
            operation_path: None,
            place: None,
        }
    }

    /// The version that new fingerprints are written with; raised when every process reads it
    /// (O21). Default the oldest that is read: a deploy that raises the newest one leaves the
    /// processes before it able to answer.
    #[must_use]
    pub fn write_version(mut self, version: u32) -> Self {
        self.write_version = Some(version);
        self
    }

    /// Counts this request header as a part of the command, in the generic layer (M22). `Prefer`
    /// and `If-Match` always are. For a route that is served already:
    /// [`Self::counts_header_since`].
    #[must_use]
    pub fn counts_header(self, name: &str) -> Self {
        self.counts_header_since(1, name)
    }

    /// The same from this version of the layer's fingerprint on, which begins with 1: what was
    /// stored before is compared without it, and [`Self::write_version`] says when it counts, after
    /// every process knows it (O21, M24).
    #[must_use]
    pub fn counts_header_since(mut self, version: u32, name: &str) -> Self {
        self.counted_headers.push((name.to_ascii_lowercase(), version));
        if self.command.is_none() {
            self.readable = *self.readable.start()..=version.max(*self.readable.end());
        }
        self
    }

    /// The longest request body, in bytes. Default 1 MiB.
    #[must_use]
    pub fn request_body_max(mut self, bytes: usize) -> Self {
        self.request_body_max = bytes;
        self
    }

    /// How long a request body may take to come, from its head to its last byte. Default 10 s.
    /// Beyond: 408 `IDEMPOTENCY_BODY_TOO_SLOW`.
    #[must_use]
    pub fn request_body_within(mut self, time: Duration) -> Self {
        self.request_body_within = time;
        self
    }

    /// The longest answer that is kept, in bytes; a longer one leaves a tombstone (pitfall 19).
    /// Default 256 KiB.
    #[must_use]
    pub fn kept_body_max(mut self, bytes: usize) -> Self {
        self.keeping.body_max = bytes;
        self
    }

    /// Keeps this header of answers too.
    #[must_use]
    pub fn keeps_header(mut self, name: &str) -> Self {
        self.keeping.headers.push(name.to_ascii_lowercase());
        self
    }

    /// Puts `"[redacted]"` for what this JSON pointer names, before an answer is kept (M67).
    #[must_use]
    pub fn redacts(mut self, pointer: &str) -> Self {
        self.keeping.redact.push(pointer.to_owned());
        self
    }

    /// The version of the schema that answers are written in today (M66). Default 1.
    #[must_use]
    pub fn schema_version(mut self, version: u32) -> Self {
        self.schema_version = version;
        self
    }

    /// How an answer of version `from` becomes one of the next version. Without it, the stored
    /// bytes are replayed as they are.
    #[must_use]
    pub fn upcast(mut self, from: u32, change: impl Fn(Reply) -> Reply + Send + Sync + 'static) -> Self {
        self.upcasts.insert(from, Arc::new(change));
        self
    }

    /// Builds the answer anew where the body is not kept ([`Replay::Reconstruct`]); nothing may be
    /// changed by it.
    #[must_use]
    pub fn rebuilt_by(
        mut self,
        build: impl Fn(Record) -> BoxFuture<'static, Result<Reply, HandlerError>> + Send + Sync + 'static,
    ) -> Self {
        self.rebuild = Some(Arc::new(build));
        self
    }

    /// Finds out how a run of mode `edge` ended whose end was not seen (O11).
    #[must_use]
    pub fn reconciled_by(
        mut self,
        ask: impl Fn(Reconciling) -> BoxFuture<'static, Result<Reconciled, HandlerError>> + Send + Sync + 'static,
    ) -> Self {
        self.reconcile = Some(Arc::new(ask));
        self
    }

    /// Where an operation is read: `/operations/` and its id behind it.
    #[must_use]
    pub fn operation_path(mut self, prefix: &str) -> Self {
        self.operation_path = Some(prefix.to_owned());
        self
    }

    /// Method and path under which it is published (`/.well-known/idempotency`).
    #[must_use]
    pub fn served_at(mut self, method: &str, path: &str) -> Self {
        self.place = Some((method.to_owned(), path.to_owned()));
        self
    }

    /// Whether it says the same of its operation; where that is served is beside it. What cannot be
    /// compared is the same only where it is not given.
    fn is_the_same(&self, other: &Self) -> bool {
        let comparable = |one: &Self| one.upcasts.is_empty() && one.rebuild.is_none() && one.reconcile.is_none();
        comparable(self)
            && comparable(other)
            && self.route == other.route
            && self.command == other.command
            && self.readable == other.readable
            && self.write_version == other.write_version
            && self.keeping == other.keeping
            && self.schema_version == other.schema_version
            && self.counted_headers == other.counted_headers
            && self.request_body_max == other.request_body_max
            && self.request_body_within == other.request_body_within
            && self.operation_path == other.operation_path
    }

    pub(super) fn register(self, durability: Durability, keyring: &Keyring) -> Result<Registered, EndpointError> {
        self.route.validate(durability)?;
        self.keeping.validate()?;
        if let Some((name, _)) = self.counted_headers.iter().find(|(name, _)| !RawCommand::may_list(name)) {
            return Err(EndpointError::Counted(name.clone()));
        }
        if self.route.requirement == Requirement::Off && self.route.mode == Mode::Transactional {
            return Err(EndpointError::Off);
        }
        if (self.route.replay == Replay::Reconstruct) != self.rebuild.is_some() {
            return Err(EndpointError::Rebuild);
        }
        if self.route.reconciles != self.reconcile.is_some() {
            return Err(EndpointError::Reconcile);
        }
        if self.route.while_running == WhileRunning::Accepted && self.operation_path.is_none() {
            return Err(EndpointError::OperationPath);
        }
        let operation = self.operation.clone()?;
        let fingerprinter = Fingerprinter::new(operation, self.readable.clone(), self.write_version, keyring.clone())?;
        Ok(Registered(Arc::new(Parts { endpoint: self, fingerprinter, last_was_new: AtomicBool::new(false) })))
    }
}

/// A protected operation of an engine. Cheap to clone.
#[derive(Clone)]
pub struct Registered(Arc<Parts>);

struct Parts {
    endpoint: Endpoint,
    fingerprinter: Fingerprinter,
    /// Whether the last request that was looked for had no record: see [`Registered::saw`].
    last_was_new: AtomicBool,
}

impl Registered {
    /// The policies that the author chose.
    #[must_use]
    pub fn route(&self) -> &Route {
        &self.0.endpoint.route
    }

    /// The name under which the operation is registered.
    #[must_use]
    pub fn operation(&self) -> &OperationName {
        self.0.fingerprinter.operation()
    }

    /// What makes and compares the fingerprints of its commands.
    #[must_use]
    pub fn fingerprinter(&self) -> &Fingerprinter {
        &self.0.fingerprinter
    }

    /// The longest request body, in bytes.
    #[must_use]
    pub fn request_body_max(&self) -> usize {
        self.0.endpoint.request_body_max
    }

    /// How long a request body may take to come.
    #[must_use]
    pub fn request_body_within(&self) -> Duration {
        self.0.endpoint.request_body_within
    }

    /// The request headers that belong to the command, in lower case, each with the version of the
    /// fingerprint from which it counts.
    #[must_use]
    pub fn counted_headers(&self) -> &[(String, u32)] {
        &self.0.endpoint.counted_headers
    }

    /// Method and path, where it was said.
    #[must_use]
    pub fn place(&self) -> Option<(&str, &str)> {
        self.0.endpoint.place.as_ref().map(|(method, path)| (method.as_str(), path.as_str()))
    }

    /// The URL of an operation, where a path was given.
    #[must_use]
    pub fn location_of(&self, operation_id: Uuid) -> Option<String> {
        self.0.endpoint.operation_path.as_ref().map(|prefix| format!("{prefix}{operation_id}"))
    }

    /// The longest answer that is kept, in bytes.
    #[must_use]
    pub fn kept_body_max(&self) -> usize {
        self.0.endpoint.keeping.body_max
    }

    /// Counts a request that is refused with this code by itself, before it has asked what
    /// becomes of its key: a body that is too long, or no command.
    pub fn refused(&self, code: Code) {
        observe::noted(self.operation().as_str(), "", Noted::Rejected(code.as_str()));
    }

    /// Whether the other one may stand beside it: another operation, or the same one once more.
    pub(super) fn goes_with(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
            || self.operation() != other.operation()
            || self.endpoint().is_the_same(other.endpoint())
    }

    pub(super) fn endpoint(&self) -> &Endpoint {
        &self.0.endpoint
    }

    /// Notes whether a request was a first one. Requests of one kind come in a row, so the next is
    /// probably the same; nothing is decided by it but in how many steps the store is asked.
    pub(super) fn saw(&self, new: bool) {
        // Only written where it changes: it is read by every request of every thread.
        if self.last_was_new() != new {
            self.0.last_was_new.store(new, Ordering::Relaxed);
        }
    }

    pub(super) fn last_was_new(&self) -> bool {
        self.0.last_was_new.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint")
            .field("operation", &self.operation)
            .field("route", &self.route)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Registered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Registered").field(&self.operation().as_str()).finish()
    }
}
