//! A protected operation as its author declares it: route, fingerprints, and which parts of its
//! answers are kept.
//!
//! Promise: settings that cannot keep the promises together are refused at registration, before the
//! first request (M4).

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::future::BoxFuture;
use uuid::Uuid;

use super::codec::headers;
use super::reply::Reply;
use crate::error::{HandlerError, Invalid};
use crate::observe::{self, Noted};
use crate::operation::rules::raw::RawCommand;
use crate::operation::rules::route::{Durability, Replay, Requirement, WhileRunning};
use crate::operation::rules::{Code, Fingerprinter, IdempotentCommand, Keyring, Mode, OperationName, Record, Route};

/// The request headers that are a part of every command of the layer (M22).
const ALWAYS_COUNTED: [(&str, u32); 2] = [("prefer", 1), ("if-match", 1)];

pub(super) type Rebuild = Arc<dyn Fn(Record) -> BoxFuture<'static, Result<Reply, HandlerError>> + Send + Sync>;
pub(super) type Reconcile = Arc<dyn Fn(Record) -> BoxFuture<'static, Result<Reconciled, HandlerError>> + Send + Sync>;
pub(super) type Upcast = Arc<dyn Fn(Reply) -> Reply + Send + Sync>;

/// The result of a reconciliation.
#[derive(Debug, Clone)]
pub enum Reconciled {
    /// The effect happened; this is its answer.
    Completed(Reply),
    /// The operation was refused for good; this is its answer.
    Failed(Reply),
    /// The effect did not happen: the key becomes free again.
    NotHappened,
    /// The outcome cannot be found out yet.
    Unknown,
}

/// A protected operation as it is declared, before an engine registers it.
pub struct Endpoint {
    pub(super) route: Route,
    /// The type of the command; `None` for a raw operation.
    command: Option<&'static str>,
    readable: std::ops::RangeInclusive<u32>,
    operation: Result<OperationName, Invalid>,
    pub(super) upcasts: BTreeMap<u32, Upcast>,
    pub(super) rebuild: Option<Rebuild>,
    pub(super) reconcile: Option<Reconcile>,
    place: Option<(String, String)>,
}

impl Endpoint {
    /// An operation with a typed command, whose name and versions come from `C`.
    #[must_use]
    pub fn typed<C: IdempotentCommand>(route: Route) -> Self {
        let command = Some(std::any::type_name::<C>());
        Self { command, ..Self::new(C::OPERATION, C::OLDEST..=C::VERSION, route) }
    }

    /// An operation of which only the raw request is known, as in the generic layer (M18).
    #[must_use]
    pub fn raw(operation: &str, route: Route) -> Self {
        let newest = route.counts_headers.iter().map(|(_, since)| *since).max();
        Self::new(operation, 1..=newest.unwrap_or(1).max(1), route)
    }

    fn new(operation: &str, readable: std::ops::RangeInclusive<u32>, mut route: Route) -> Self {
        for name in &mut route.keeps_headers {
            name.make_ascii_lowercase();
        }
        for (name, _) in &mut route.counts_headers {
            name.make_ascii_lowercase();
        }
        Self {
            command: None,
            readable,
            operation: operation.parse(),
            upcasts: BTreeMap::new(),
            rebuild: None,
            reconcile: None,
            place: None,
            route,
        }
    }

    /// Gives the function that turns an answer of version `from` into one of the next version.
    /// Without it, the stored bytes are replayed as they are.
    #[must_use]
    pub fn upcast(mut self, from: u32, change: impl Fn(Reply) -> Reply + Send + Sync + 'static) -> Self {
        self.upcasts.insert(from, Arc::new(change));
        self
    }

    /// Gives the function that builds the answer again where the body is not kept
    /// ([`Replay::Reconstruct`]). The function must not change anything.
    #[must_use]
    pub fn rebuilt_by(
        mut self,
        build: impl Fn(Record) -> BoxFuture<'static, Result<Reply, HandlerError>> + Send + Sync + 'static,
    ) -> Self {
        self.rebuild = Some(Arc::new(build));
        self
    }

    /// Gives the function that finds out the outcome of an edge run whose end was not recorded
    /// (O11), from its record: the handler was given the same `operation_id`.
    #[must_use]
    pub fn reconciled_by(
        mut self,
        ask: impl Fn(Record) -> BoxFuture<'static, Result<Reconciled, HandlerError>> + Send + Sync + 'static,
    ) -> Self {
        self.reconcile = Some(Arc::new(ask));
        self
    }

    /// The method and path under which the operation is published (`/.well-known/idempotency`).
    #[must_use]
    pub fn served_at(mut self, method: &str, path: &str) -> Self {
        self.place = Some((method.to_owned(), path.to_owned()));
        self
    }

    /// Whether both declare the same, apart from where they are served. Functions cannot be
    /// compared, so an endpoint that has one equals no other.
    fn is_the_same(&self, other: &Self) -> bool {
        let comparable = |one: &Self| one.upcasts.is_empty() && one.rebuild.is_none() && one.reconcile.is_none();
        comparable(self)
            && comparable(other)
            && self.route == other.route
            && self.command == other.command
            && self.readable == other.readable
    }

    /// Refuses an operation of a mode that `door` does not serve: all its requests would get 503
    /// (M4). `door` names the caller in the error: the layer, for example.
    #[cfg(any(feature = "http", feature = "grpc"))]
    pub(crate) fn served_by(self, door: &'static str, modes: &[Mode]) -> Result<Self, Invalid> {
        let mode = self.route.mode;
        if modes.contains(&mode) {
            return Ok(self);
        }
        let takes = modes.iter().map(ToString::to_string).collect::<Vec<_>>().join(" or ");
        let operation = self.operation?;
        Err(Invalid::new(format!("the operation `{operation}` is of mode {mode}, and {door} takes mode {takes}")))
    }

    pub(super) fn register(self, durability: Durability, keyring: &Keyring) -> Result<Registered, Invalid> {
        let route = &self.route;
        route.validate(durability)?;
        if let Some(name) = route.keeps_headers.iter().find(|name| headers::is_never(name)) {
            let why = "is never stored: it belongs to one answer, one connection or one caller";
            return Err(Invalid::new(format!("the header `{name}` {why}")));
        }
        if let Some((name, _)) = route.counts_headers.iter().find(|(name, _)| !RawCommand::may_list(name)) {
            let why = "is no part of a command: it changes from one try to the next";
            return Err(Invalid::new(format!("the header `{name}` {why}")));
        }
        // A typed operation claims every request; for a request without a key it makes one.
        let is_typed = matches!(route.mode, Mode::Transactional | Mode::Phased);
        if route.requirement == Requirement::Off && is_typed {
            return Err(Invalid::new("`requirement = off` is for the layer: a typed operation takes `optional`"));
        }
        if is_typed && !route.counts_headers.is_empty() {
            return Err(Invalid::new("`counts_headers` is for the layer: a typed command writes what belongs to it"));
        }
        if (route.replay == Replay::Reconstruct) != self.rebuild.is_some() {
            return Err(Invalid::new("`replay = reconstruct` needs `rebuilt_by`, and only it"));
        }
        if route.reconciles != self.reconcile.is_some() {
            return Err(Invalid::new("`reconciles` needs `reconciled_by`, and only it"));
        }
        if route.while_running == WhileRunning::Accepted && route.operation_path.is_none() {
            return Err(Invalid::new("`while_running = accepted` needs `operation_path`"));
        }
        let operation = self.operation.clone()?;
        let fingerprinter = Fingerprinter::new(operation, self.readable.clone(), route.write_version, keyring.clone())?;
        Ok(Registered(Arc::new(Parts { endpoint: self, fingerprinter, last_was_new: AtomicBool::new(false) })))
    }
}

/// A protected operation of an engine. Cheap to clone.
#[derive(Clone)]
pub struct Registered(Arc<Parts>);

struct Parts {
    endpoint: Endpoint,
    fingerprinter: Fingerprinter,
    /// Whether the last request that was looked up had no record; see [`Registered::saw`].
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

    pub(super) fn fingerprinter(&self) -> &Fingerprinter {
        &self.0.fingerprinter
    }

    /// The request headers that belong to the command, in lower case, each with the version of the
    /// fingerprint from which it counts.
    pub(crate) fn counted_headers(&self) -> impl Iterator<Item = (&str, u32)> {
        let listed = self.route().counts_headers.iter().map(|(name, since)| (name.as_str(), *since));
        ALWAYS_COUNTED.into_iter().chain(listed)
    }

    /// The method and path where it is served, if given.
    #[must_use]
    pub fn place(&self) -> Option<(&str, &str)> {
        self.0.endpoint.place.as_ref().map(|(method, path)| (method.as_str(), path.as_str()))
    }

    /// Whether a client can ask for an operation at its location while it is not finished, so that
    /// 202 may be answered: only a phased operation is stored as one.
    pub(crate) fn can_be_asked_for(&self) -> bool {
        self.route().mode == Mode::Phased && self.route().operation_path.is_some()
    }

    pub(crate) fn location_of(&self, operation_id: Uuid) -> Option<String> {
        self.0.endpoint.route.operation_path.as_ref().map(|prefix| format!("{prefix}{operation_id}"))
    }

    /// Counts a request that the caller refuses with this code before it takes a turn of its
    /// [`Front`](super::Front): a body that is too long, or not a command.
    pub(crate) fn refused(&self, code: Code) {
        observe::noted(self.operation().as_str(), "", Noted::Rejected(code.as_str()));
    }

    /// Whether both may be registered in one engine: they are different operations, or declare the
    /// same.
    pub(super) fn goes_with(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
            || self.operation() != other.operation()
            || self.endpoint().is_the_same(other.endpoint())
    }

    pub(super) fn endpoint(&self) -> &Endpoint {
        &self.0.endpoint
    }

    /// Records whether a request was the first with its key. First requests often come in a row, so
    /// the next request is probably one too. This only decides in how many steps the store is
    /// asked.
    pub(super) fn saw(&self, new: bool) {
        // Written only when it changes, because every request on every thread reads it.
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
