//! The engine of a process: its store, secrets, limits and runs, and the operations that it
//! protects.
//!
//! Promises: requests with the same scope, operation and key run once and get one answer (G13).
//! Work that the engine starts is tracked, so that [`Engine::drain`] can wait for it. A request
//! that meets a full limit is refused at once; only for a connection it may wait a second.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::task::{JoinError, JoinHandle};
use tokio_util::task::TaskTracker;

use super::admission::Admission;
use super::codec::{self, Kept, SealError, Sealer};
use super::endpoint::{Endpoint, Registered};
use super::live::Live;
use super::memory::{BodyMemory, BodyPermit};
use super::quota::StoredQuota;
use super::reach::Reach;
use super::reply::Reply;
use super::running::Running;
use crate::error::{Invalid, StoreError};
use crate::observe::{self, Health};
use crate::operation::port::{Answer, KeptBody, Keys};
use crate::operation::rules::pace;
use crate::operation::rules::route::Durability;
use crate::operation::rules::{Fingerprint, Identity, Keyring, Mode, OperationName, Record, Scope};
use crate::task;

/// Returns the region that keeps the keys of a scope (M106).
type Home = Arc<dyn Fn(&Scope) -> Option<String> + Send + Sync>;

/// The operation engine on one store. Cheap to clone.
pub struct Engine<S: Keys> {
    pub(super) core: Core,
    store: Arc<S>,
}

/// The part of an [`Engine`] that does not depend on the type of its store. It is enough for
/// operations that do not use the application's transaction. Cheap to clone.
#[derive(Clone)]
pub struct Core {
    pub(super) inner: Arc<Inner>,
}

pub(super) struct Inner {
    store: Arc<dyn Keys>,
    pub(super) keyring: Keyring,
    /// The cipher of stored bytes. It also seals the commands of phased operations.
    pub(super) sealer: Sealer,
    pub(super) running: Running,
    reach: Reach,
    pub(super) admission: Admission,
    usual: Mutex<HashMap<OperationName, Duration>>,
    body_memory: BodyMemory,
    pub(super) open_per_tenant_max: Option<u32>,
    stored_quota: Option<StoredQuota>,
    region: Option<(String, Home)>,
    pub(super) driving: DriveSettings,
    live: Live,
    endpoints: Mutex<Vec<Registered>>,
    tasks: TaskTracker,
}

/// The settings of an [`Engine`].
#[derive(Clone)]
pub struct EngineOptions {
    /// The secrets for the fingerprints of commands and principals. Default: none. The fingerprints
    /// are then plain SHA-256, and someone who can read the database can guess commands offline
    /// (pitfall 25).
    pub keyring: Keyring,
    /// The encryption keys for stored bodies and commands. Default: stored in plain.
    pub sealer: Sealer,
    /// How many bytes of request bodies this process may hold at once. Default 64 MiB. A request
    /// beyond it gets 503 `IDEMPOTENCY_BODY_MEMORY_EXCEEDED`.
    pub body_memory_max: usize,
    /// How many bytes of [`Self::body_memory_max`] one tenant may hold. Default: half, so that a
    /// tenant that sends many or slow requests leaves room for others.
    pub body_memory_per_tenant_max: Option<usize>,
    /// How many operations of one tenant may run in this process at once. The same number may be
    /// committed without an outcome in the store (O11): running, in any process, or unknown and not
    /// resolved. Default: no limit. A request beyond it gets 429 `IDEMPOTENCY_QUOTA_EXCEEDED`, and
    /// nothing is stored. The count in the store, one before each claim, locks nothing: requests
    /// that come at once may exceed the limit, by at most as much again for each process.
    pub open_per_tenant_max: Option<u32>,
    /// How many bytes the stored answers of one tenant may take, as they stand in the database.
    /// Default: no limit. Beyond it, what would run for the first time gets 429
    /// `IDEMPOTENCY_QUOTA_EXCEEDED`, and nothing is stored; stored answers are still replayed. Each
    /// process asks the store at most every five seconds for a tenant, so the limit keeps a
    /// database from filling over hours; use a rate limit against fast clients. A body counts until
    /// its lifetime ends. Records without a body and the commands of phased operations, which
    /// [`Self::open_per_tenant_max`] limits, do not count. With a guard store, which does not count
    /// bytes, [`Engine::protect`](Core::protect) returns an error.
    pub stored_bytes_per_tenant_max: Option<u64>,
    /// The region of this service, and a function that returns the region that keeps the keys of a
    /// scope; `None`: every region may serve them. A request whose keys another region keeps gets
    /// 421 with that region's name, never a redirect (M106). Default: every region serves every
    /// key.
    pub region: Option<(String, Home)>,
    /// Where the engine reports whether its store answers, as the part `operations`. A task of its
    /// own asks the store, so `/readyz` waits for no database. Default: the log only.
    pub health: Health,
    /// How phased operations are driven.
    pub driving: DriveSettings,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            keyring: Keyring::plain(),
            sealer: Sealer::default(),
            body_memory_max: 64 << 20,
            body_memory_per_tenant_max: None,
            open_per_tenant_max: None,
            stored_bytes_per_tenant_max: None,
            region: None,
            health: Health::default(),
            driving: DriveSettings::default(),
        }
    }
}

/// Settings of the drivers of operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DriveSettings {
    /// After how many attempts in vain an operation is parked (O9). Default 100: more than an hour.
    pub attempts_max: u32,
    /// After how many calls that prove nothing a drive releases its operation. Default 3.
    pub calls_per_drive: u32,
    /// The longest pause that a provider may ask for while the driver waits. For a longer one the
    /// driver releases the operation. Default 2.5 s.
    pub wait_max: Duration,
    /// The pause after the first attempt in vain; it doubles each time. Default 1 s.
    pub backoff_first: Duration,
    /// The longest pause until an operation is due again. Default 1 min.
    pub backoff_max: Duration,
    /// How long to retry storing proof that the database refuses, before the operation is parked
    /// with that proof as the reason. A database that is away does not count: the driver waits for
    /// it until a stop. Default 20 s.
    pub refused_max: Duration,
    /// How long a stopped driver tries to store each thing that it still has to say (what a
    /// provider said, where it leaves the operation), while the database is away. What is not
    /// stored then is lost: the send counts as one that may have arrived. Default 10 s.
    pub shutdown_grace: Duration,
}

impl Default for DriveSettings {
    fn default() -> Self {
        Self {
            attempts_max: 100,
            calls_per_drive: 3,
            wait_max: Duration::from_millis(2_500),
            backoff_first: Duration::from_secs(1),
            backoff_max: Duration::from_secs(60),
            refused_max: Duration::from_secs(20),
            shutdown_grace: Duration::from_secs(10),
        }
    }
}

impl<S: Keys> Engine<S> {
    /// An engine on this store. Inside a Tokio runtime it begins at once to watch its store.
    #[must_use]
    pub fn new(store: S, options: EngineOptions) -> Self {
        let admission = Admission::new(store.connections_max());
        let store = Arc::new(store);
        let core = Core {
            inner: Arc::new(Inner {
                store: Arc::clone(&store) as Arc<dyn Keys>,
                keyring: options.keyring,
                sealer: options.sealer,
                running: Running::default(),
                reach: Reach::new(options.health),
                admission,
                usual: Mutex::default(),
                body_memory: BodyMemory::new(options.body_memory_max, options.body_memory_per_tenant_max),
                open_per_tenant_max: options.open_per_tenant_max,
                stored_quota: options.stored_bytes_per_tenant_max.map(StoredQuota::new),
                region: options.region,
                driving: options.driving,
                live: Live::new(),
                endpoints: Mutex::default(),
                tasks: TaskTracker::new(),
            }),
        };
        core.reach();
        Self { core, store }
    }

    /// The store that holds the records of keys.
    #[must_use]
    pub fn store(&self) -> &Arc<S> {
        &self.store
    }
}

impl<S: Keys> Deref for Engine<S> {
    type Target = Core;

    fn deref(&self) -> &Core {
        &self.core
    }
}

impl Core {
    /// Registers an operation, and returns the handle that requests use. For an operation that is
    /// served at two paths, register once and clone the handle, or register the same endpoint
    /// twice.
    ///
    /// # Errors
    /// Settings of the endpoint that contradict each other; a name that another operation of this
    /// engine has (the two would share keys, and the lifetimes of one would apply to the other); a
    /// limit on stored bytes with a store that does not count them.
    pub fn protect(&self, endpoint: Endpoint) -> Result<Registered, Invalid> {
        if self.inner.stored_quota.is_some() && self.inner.store.durability() == Durability::Guard {
            return Err(Invalid::new(
                "`stored_bytes_per_tenant_max` needs a store that counts the bytes of a tenant: a guard does not",
            ));
        }
        let registered = endpoint.register(self.inner.store.durability(), &self.inner.keyring)?;
        let mut endpoints = self.inner.endpoints.lock();
        if !endpoints.iter().all(|there| there.goes_with(&registered)) {
            return Err(Invalid::new(format!(
                "`{}` is protected already, and otherwise: operations with one name share their keys, so each needs a \
                 name of its own; one that is served at two places is registered once, or twice alike",
                registered.operation()
            )));
        }
        endpoints.push(registered.clone());
        drop(endpoints);
        if registered.route().mode != Mode::Edge {
            self.inner.admission.shared_by(registered.operation());
        }
        observe::operation_starts(registered.operation().as_str(), registered.route().mode.as_str());
        Ok(registered)
    }

    /// The operations that are protected, in the order of their registration.
    #[must_use]
    pub fn protected(&self) -> Vec<Registered> {
        self.inner.endpoints.lock().clone()
    }

    pub(super) fn store(&self) -> &dyn Keys {
        self.inner.store.as_ref()
    }

    /// Returns a permit for the request body of a tenant; it holds no bytes yet. Call
    /// [`BodyPermit::grow`] as bytes arrive, and keep the permit as long as the bytes are needed.
    #[must_use]
    pub fn body_memory(&self, tenant: &str) -> BodyPermit {
        self.inner.body_memory.of(tenant)
    }

    /// Runs work that must finish even when nobody waits for it any more. When a client
    /// disconnects, the future of its request is dropped; this task is not (pitfall 2).
    /// [`Self::drain`] waits for the task.
    pub(crate) fn spawn<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
        self.inner.tasks.spawn(task::boxed(work))
    }

    /// Runs a database call of the application as long as the store answers. When the database is
    /// away, the call fails within two seconds instead of waiting for a connection. The call's
    /// future is dropped then; a write may have happened.
    ///
    /// # Errors
    /// The error of the call; [`StoreError::Unavailable`] if the store is away, or goes away before
    /// the call ends.
    pub async fn while_there<T, E: Into<StoreError>>(
        &self,
        call: impl Future<Output = Result<T, E>>,
    ) -> Result<T, StoreError> {
        self.reach().within(async { call.await.map_err(Into::into) }).await
    }

    /// Waits at most this long until all tasks that were started here have ended; returns whether
    /// they have. Stop taking requests first. Leases of these tasks are renewed meanwhile.
    pub async fn drain(&self, at_most: Duration) -> bool {
        self.inner.tasks.close();
        let ended = tokio::time::timeout(at_most, self.inner.tasks.wait()).await.is_ok();
        self.inner.tasks.reopen();
        ended
    }

    /// Encodes an answer for storage: filtered, and compressed and encrypted where that is set.
    /// Where it fails, do not store the answer in plain instead.
    pub(crate) fn encode(
        &self,
        endpoint: &Registered,
        identity: &Identity,
        fingerprint: &Fingerprint,
        kept: &Kept,
    ) -> Result<Answer, SealError> {
        codec::encode(endpoint.endpoint(), &self.inner.sealer, identity, fingerprint, kept)
    }

    /// Decodes the stored answer of a record. The caller has read `body`.
    ///
    /// # Errors
    /// [`SealError`].
    pub fn decode(&self, endpoint: &Registered, record: &Record, body: &KeptBody) -> Result<Reply, SealError> {
        let (status, version) =
            record.answer.as_ref().map_or((200, 1), |answer| (answer.status, answer.schema_version));
        let of = (&record.identity, &record.fingerprint);
        codec::decode(endpoint.endpoint(), &self.inner.sealer, of, (status, version), body)
    }

    /// Sets the gauges of what is open and unknown (M103). Call it in each process before metrics
    /// are shown. Like [`Self::sweep`], it also records which fingerprint versions this process
    /// reads and writes, for `oncebox doctor` (O21); if that fails, only the log says so.
    ///
    /// # Errors
    /// The error of the store; the gauges keep their values.
    pub async fn measure(&self) -> Result<(), StoreError> {
        let stats = self.reach().within(self.inner.store.operation_stats()).await?;
        self.announce().await;
        // The store cannot see the uncommitted claims of transactional operations; only the process
        // that runs them can (O19).
        let oldest = stats.oldest_in_progress.max(self.inner.running.oldest());
        observe::operations_stand(oldest, stats.unknown);
        Ok(())
    }

    /// What is known of the store. Starts the task that watches it, if it does not run yet.
    pub(super) fn reach(&self) -> &Reach {
        self.inner.reach.attend(&self.inner.store);
        &self.inner.reach
    }

    /// Waits for a task that needs the store. Returns `None` when the store is away for so long
    /// that waiting is useless (see [`Reach::lost`]). The task continues in both cases.
    pub(super) async fn attended<T>(&self, mut task: JoinHandle<T>) -> Option<Result<T, JoinError>> {
        tokio::select! {
            biased;
            joined = &mut task => Some(joined),
            () = self.reach().lost() => None,
        }
    }

    /// Writes down from time to time which fingerprint versions this process reads and writes.
    pub(super) async fn announce(&self) {
        let versions: Vec<_> = self.protected().iter().map(|one| one.fingerprinter().versions()).collect();
        self.inner.live.announce(self.store(), &versions).await;
    }

    pub(super) fn is_draining(&self) -> bool {
        self.inner.tasks.is_closed()
    }

    /// Whether as many operations of this tenant run in this process as are allowed. Only the entry
    /// in the map of runs decides: this says it before the store is asked.
    pub(super) fn is_over_quota(&self, tenant: &str) -> bool {
        self.inner.open_per_tenant_max.is_some_and(|max| self.inner.running.of_tenant(tenant) >= max)
    }

    /// Whether a limit for tenants must be checked in the store before a claim.
    pub(super) fn has_quota(&self) -> bool {
        self.inner.open_per_tenant_max.is_some() || self.inner.stored_quota.is_some()
    }

    /// Whether the tenant has as many committed records without an outcome as are allowed.
    pub(super) async fn is_over_open_quota(&self, tenant: &str) -> Result<bool, StoreError> {
        match self.inner.open_per_tenant_max {
            Some(max) => Ok(self.inner.store.open_of_tenant(tenant).await? >= u64::from(max)),
            None => Ok(false),
        }
    }

    pub(super) async fn is_over_bytes(&self, tenant: &str) -> Result<bool, StoreError> {
        match &self.inner.stored_quota {
            Some(quota) => quota.is_reached(tenant, || self.inner.store.stored_of_tenant(tenant)).await,
            None => Ok(false),
        }
    }

    /// The region that keeps the keys of this scope, if it is not this one.
    pub(super) fn home_elsewhere(&self, scope: &Scope) -> Option<String> {
        let (here, home) = self.inner.region.as_ref()?;
        home(scope).filter(|home| home != here)
    }

    pub(super) fn usual(&self, operation: &OperationName) -> Option<Duration> {
        self.inner.usual.lock().get(operation).copied()
    }

    pub(super) fn has_run(&self, operation: &OperationName, ran: Duration) {
        let mut all = self.inner.usual.lock();
        let usual = pace::usual(all.get(operation).copied(), ran);
        all.insert(operation.clone(), usual);
    }
}

impl<S: Keys> Clone for Engine<S> {
    fn clone(&self) -> Self {
        Self { core: self.core.clone(), store: Arc::clone(&self.store) }
    }
}

impl<S: Keys> fmt::Debug for Engine<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("store", &self.store).finish_non_exhaustive()
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core").field("store", &self.inner.store).finish_non_exhaustive()
    }
}

// Secrets are not shown, and a function has nothing to show.
impl fmt::Debug for EngineOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineOptions").finish_non_exhaustive()
    }
}
