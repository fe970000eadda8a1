//! The engine of a process: its store, secrets and limits, what runs in it, and the operations it
//! protects.
//!
//! Promises: requests of one scope, operation and key run once, and get one answer (G13); one
//! engine is shared by all operations of a process, by cheap clones; what it starts is tracked, so that
//! [`Engine::drain`] can wait for it; a limit that is reached is answered, never waited for.
//!
//! Not here: what becomes of a request ([`Front`](super::Front)).

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::future::Future;
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::task::{JoinError, JoinHandle};
use tokio_util::task::TaskTracker;

use super::admission::{Admission, Place};
use super::codec::{self, Kept, SealError, Sealer};
use super::endpoint::{Endpoint, EndpointError, Registered};
use super::front::{Asking, Front};
use super::live::Live;
use super::memory::{BodyMemory, BodyPermit};
use super::quota::StoredQuota;
use super::reach::Reach;
use super::reply::Reply;
use super::running::Running;
use crate::error::StoreError;
use crate::observe::{self, Forgotten, Health};
use crate::policy::operation::pace::Usual;
use crate::policy::operation::route::Durability;
use crate::policy::operation::{Fingerprint, Identity, Keyring, Mode, OperationName, Record, Scope};
use crate::store::{Answer, KeptBody, Keys};

/// Where the keys of a scope are kept (M106).
type Home = Arc<dyn Fn(&Scope) -> Option<String> + Send + Sync>;

/// The operation engine on a store. Cheap to clone.
pub struct Engine<S: Keys> {
    core: Core,
    store: Arc<S>,
}

/// All of an [`Engine`] that is the same for any store: what operations without a transaction of the
/// application's need. Cheap to clone.
#[derive(Clone)]
pub struct Core {
    inner: Arc<Inner>,
}

struct Inner {
    store: Arc<dyn Keys>,
    keyring: Keyring,
    sealer: Sealer,
    running: Running,
    reach: Reach,
    admission: Admission,
    usual: Mutex<HashMap<OperationName, Usual>>,
    body_memory: BodyMemory,
    open_per_tenant_max: Option<u32>,
    stored_quota: Option<StoredQuota>,
    region: Option<(String, Home)>,
    live: Live,
    endpoints: Mutex<Vec<Registered>>,
    tasks: TaskTracker,
}

/// How an engine is made.
pub struct EngineBuilder<S: Keys> {
    store: S,
    keyring: Keyring,
    sealer: Sealer,
    body_memory_max: usize,
    body_memory_per_tenant_max: Option<usize>,
    open_per_tenant_max: Option<u32>,
    stored_bytes_per_tenant_max: Option<u64>,
    region: Option<(String, Home)>,
    health: Health,
}

impl<S: Keys> EngineBuilder<S> {
    /// The secrets of fingerprints and principals. Default: none, plain SHA-256, which can be
    /// guessed offline by who reads the database (pitfall 25).
    #[must_use]
    pub fn keyring(mut self, keyring: Keyring) -> Self {
        self.keyring = keyring;
        self
    }

    /// The keys of stored bodies and commands. Default: plain.
    #[must_use]
    pub fn sealer(mut self, sealer: Sealer) -> Self {
        self.sealer = sealer;
        self
    }

    /// How many bytes of request bodies may be in flight in this process. Default 64 MiB. Beyond:
    /// 503 `IDEMPOTENCY_BODY_MEMORY_EXCEEDED`.
    #[must_use]
    pub fn body_memory_max(mut self, bytes: usize) -> Self {
        self.body_memory_max = bytes;
        self
    }

    /// How many of them may be one tenant's. Default half of them all: who sends many at once, or
    /// slowly, leaves room for others.
    #[must_use]
    pub fn body_memory_per_tenant_max(mut self, bytes: usize) -> Self {
        self.body_memory_per_tenant_max = Some(bytes);
        self
    }

    /// How many operations of one tenant may run in this process at once, and as many may be
    /// committed without an outcome: running elsewhere, or unknown and not resolved (O11). Default:
    /// no bound. Beyond: 429 `IDEMPOTENCY_QUOTA_EXCEEDED`, and nothing is stored. Costs a count
    /// before each claim.
    #[must_use]
    pub fn open_per_tenant_max(mut self, operations: u32) -> Self {
        self.open_per_tenant_max = Some(operations);
        self
    }

    /// How many bytes the answers may take that are stored for one tenant: headers and body, as
    /// they stand in the database, until the end of the body's life. Default: no bound. Beyond: 429
    /// `IDEMPOTENCY_QUOTA_EXCEEDED` to what would run for the first time, and nothing is stored;
    /// what is stored is still replayed.
    ///
    /// The store is asked every five seconds, for a tenant that begins operations and in each
    /// process; where that takes longer than a quarter of a second, less often, so that it is at
    /// most a twentieth of the time. Between two looks the bound may be passed by what the tenant
    /// stores meanwhile, and by what runs already: it keeps a database from filling over hours, and
    /// how fast a tenant may be is the rate limit's to say. What is not counted: records without
    /// their body, which are small, and commands of phased operations, which
    /// [`Self::open_per_tenant_max`] bounds while they run.
    ///
    /// A guard does not count: [`Engine::protect`](Core::protect) refuses.
    #[must_use]
    pub fn stored_bytes_per_tenant_max(mut self, bytes: u64) -> Self {
        self.stored_bytes_per_tenant_max = Some(bytes);
        self
    }

    /// The region of this service, and where the keys of a scope are kept: a request for another
    /// region's is answered 421 with its name, never redirected (M106). `None`: at home everywhere.
    #[must_use]
    pub fn region(
        mut self,
        here: impl Into<String>,
        home: impl Fn(&Scope) -> Option<String> + Send + Sync + 'static,
    ) -> Self {
        self.region = Some((here.into(), Arc::new(home)));
        self
    }

    /// Where the engine shows whether its store is there, as the part `operations`: it asks four
    /// times a second, on a connection of its own, and `/readyz` waits for no database. Default:
    /// the log alone.
    #[must_use]
    pub fn health(mut self, health: Health) -> Self {
        self.health = health;
        self
    }

    /// Makes the engine; inside a Tokio runtime it begins at once to watch its store.
    #[must_use]
    pub fn build(self) -> Engine<S> {
        let admission = Admission::new(self.store.connections_max());
        let store = Arc::new(self.store);
        let core = Core {
            inner: Arc::new(Inner {
                store: Arc::clone(&store) as Arc<dyn Keys>,
                keyring: self.keyring,
                sealer: self.sealer,
                running: Running::default(),
                reach: Reach::new(self.health),
                admission,
                usual: Mutex::default(),
                body_memory: BodyMemory::new(self.body_memory_max, self.body_memory_per_tenant_max),
                open_per_tenant_max: self.open_per_tenant_max,
                stored_quota: self.stored_bytes_per_tenant_max.map(StoredQuota::new),
                region: self.region,
                live: Live::new(),
                endpoints: Mutex::default(),
                tasks: TaskTracker::new(),
            }),
        };
        core.reach();
        Engine { core, store }
    }
}

impl<S: Keys> Engine<S> {
    /// Begins to make an engine on this store.
    pub fn builder(store: S) -> EngineBuilder<S> {
        EngineBuilder {
            store,
            keyring: Keyring::plain(),
            sealer: Sealer::plain(),
            body_memory_max: 64 << 20,
            body_memory_per_tenant_max: None,
            open_per_tenant_max: None,
            stored_bytes_per_tenant_max: None,
            region: None,
            health: Health::default(),
        }
    }

    /// The store that holds the records of keys.
    #[must_use]
    pub fn store(&self) -> &Arc<S> {
        &self.store
    }

    /// The engine without the type of its store.
    pub(super) fn core(&self) -> &Core {
        &self.core
    }
}

impl<S: Keys> Deref for Engine<S> {
    type Target = Core;

    fn deref(&self) -> &Core {
        &self.core
    }
}

impl Core {
    /// Protects an operation. One that is served at two places is registered once, and cloned, or
    /// twice alike.
    ///
    /// # Errors
    /// Choices that cannot keep the promise together; a name that another operation of this engine
    /// has: they would share keys, and the lifetimes of one would hold for the other; a quota on
    /// stored bytes of a store that does not count them.
    pub fn protect(&self, endpoint: Endpoint) -> Result<Registered, EndpointError> {
        if self.inner.stored_quota.is_some() && self.inner.store.durability() == Durability::Guard {
            return Err(EndpointError::StoredBytes);
        }
        let registered = endpoint.register(self.inner.store.durability(), &self.inner.keyring)?;
        let mut endpoints = lock(&self.inner.endpoints);
        if !endpoints.iter().all(|there| there.goes_with(&registered)) {
            return Err(EndpointError::Twice(registered.operation().clone()));
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
        lock(&self.inner.endpoints).clone()
    }

    /// The store, as far as any store goes.
    pub(super) fn store(&self) -> &dyn Keys {
        self.inner.store.as_ref()
    }

    /// The keys of stored bytes: commands of phased operations are sealed with it too.
    #[must_use]
    pub fn sealer(&self) -> &Sealer {
        &self.inner.sealer
    }

    /// What becomes of a request: see [`Front`].
    #[must_use]
    pub fn front(&self, endpoint: &Registered, asking: Asking) -> Front {
        Front::new(self.clone(), endpoint.clone(), asking)
    }

    /// The memory of a tenant's request body: nothing yet. Let it grow as bytes come, and keep it
    /// as long as they are needed.
    #[must_use]
    pub fn body_memory(&self, tenant: &str) -> BodyPermit {
        self.inner.body_memory.of(tenant)
    }

    /// Runs work that must end even when nobody waits for it any more: a client's disconnect drops
    /// the request's future, not this (pitfall 2). [`Self::drain`] waits for it.
    pub fn spawn<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
        self.inner.tasks.spawn(work)
    }

    /// Runs a call of the application's own for as long as the store is there: with the database
    /// away it fails within two seconds, and stands in no line for a connection. It is dropped
    /// then: a write may have happened.
    ///
    /// # Errors
    /// What the call says; [`StoreError::Unavailable`] where the store is away, or goes away
    /// meanwhile.
    pub async fn while_there<T, E: Into<StoreError>>(
        &self,
        call: impl Future<Output = Result<T, E>>,
    ) -> Result<T, StoreError> {
        self.reach().within(async { call.await.map_err(Into::into) }).await
    }

    /// Waits until all that was started here has ended, at most this long; true if it has. Take no
    /// more requests before; give it less than the shortest lease, so that what does not end is not
    /// another's yet.
    pub async fn drain(&self, at_most: Duration) -> bool {
        self.inner.tasks.close();
        let ended = tokio::time::timeout(at_most, self.inner.tasks.wait()).await.is_ok();
        self.inner.tasks.reopen();
        ended
    }

    /// The answer as it is stored for a request: sanitised, perhaps compressed and encrypted. For
    /// what finishes a record by itself: a phased operation, and a guard.
    ///
    /// # Errors
    /// [`SealError`]; nothing is to be stored in plain instead.
    pub fn encode(
        &self,
        endpoint: &Registered,
        identity: &Identity,
        fingerprint: &Fingerprint,
        kept: &Kept,
    ) -> Result<Answer, SealError> {
        codec::encode(endpoint.endpoint(), &self.inner.sealer, identity, fingerprint, kept)
    }

    /// The stored answer of a record, whose body was read.
    ///
    /// # Errors
    /// [`SealError`].
    pub fn decode(&self, endpoint: &Registered, record: &Record, body: &KeptBody) -> Result<Reply, SealError> {
        let (status, version) =
            record.answer.as_ref().map_or((200, 1), |answer| (answer.status, answer.schema_version));
        let of = (&record.identity, &record.fingerprint);
        codec::decode(endpoint.endpoint(), &self.inner.sealer, of, (status, version), body)
    }

    /// Sets the gauges of M103: call it before metrics are shown, in each process. As
    /// [`Self::sweep`] it also writes down, now and then, which fingerprints this process reads and
    /// writes, for `oncebox doctor` (O21); where that fails, it says so in the log and goes on.
    ///
    /// # Errors
    /// What the store says; the gauges stay as they were.
    pub async fn measure(&self) -> Result<(), StoreError> {
        let stats = self.reach().within(self.inner.store.operation_stats()).await?;
        self.announce().await;
        // The claims of transactional operations are seen by nobody but the process that runs them (O19).
        let oldest = stats.oldest_in_progress.max(self.inner.running.oldest());
        observe::operations_stand(oldest, stats.unknown);
        Ok(())
    }

    /// Forgets what nobody was promised any more: bodies, then records of every protected
    /// operation, at most about `limit` of each, in bounded statements (M101). Gives how many. Call
    /// it now and then, in as many processes as you like.
    ///
    /// # Errors
    /// What the store says; what was forgotten before stays forgotten.
    pub async fn sweep(&self, limit: u32) -> Result<u64, StoreError> {
        self.announce().await;
        let mut forgotten = self.inner.store.expire_bodies(limit).await?;
        observe::forgotten(Forgotten::Bodies, forgotten);
        let mut swept = HashSet::new();
        for endpoint in self.protected().iter().filter(|endpoint| swept.insert(endpoint.operation().clone())) {
            let route = endpoint.route();
            let purged = self.inner.store.purge_keys(endpoint.operation(), &route.retention, route.id_skew, limit);
            let keys = purged.await?;
            observe::forgotten(Forgotten::Keys, keys);
            forgotten += keys;
        }
        Ok(forgotten)
    }

    /// Whether the store is there.
    pub(super) fn reach(&self) -> &Reach {
        self.inner.reach.attend(&self.inner.store);
        &self.inner.reach
    }

    /// A place as [`Self::place`] gives it, where one is free.
    pub(super) fn place_at_once(&self, operation: &OperationName) -> Option<Place> {
        self.inner.admission.at_once(operation)
    }

    /// A place for an operation that holds a connection while it runs; none: there is no room.
    pub(super) async fn place(&self, operation: &OperationName) -> Option<Place> {
        self.inner.admission.place(operation).await
    }

    /// Waits for a task that needs the store; none where that is away for longer than the task
    /// would need to say so. The task goes on.
    pub(super) async fn attended<T>(&self, mut task: JoinHandle<T>) -> Option<Result<T, JoinError>> {
        tokio::select! {
            biased;
            joined = &mut task => Some(joined),
            () = self.reach().lost() => None,
        }
    }

    async fn announce(&self) {
        let versions: Vec<_> = self.protected().iter().map(|one| one.fingerprinter().versions()).collect();
        self.inner.live.announce(self.store(), &versions).await;
    }

    /// Whether somebody waits for the end of all that was started here.
    pub(super) fn is_draining(&self) -> bool {
        self.inner.tasks.is_closed()
    }

    pub(super) fn running(&self) -> &Running {
        &self.inner.running
    }

    pub(super) fn keyring(&self) -> &Keyring {
        &self.inner.keyring
    }

    /// Whether this tenant has as much open as it may.
    pub(super) fn is_over_quota(&self, tenant: &str) -> bool {
        self.inner.open_per_tenant_max.is_some_and(|max| self.inner.running.of_tenant(tenant) >= max)
    }

    /// Whether something of a tenant is counted in the store before a claim.
    pub(super) fn has_quota(&self) -> bool {
        self.inner.open_per_tenant_max.is_some() || self.inner.stored_quota.is_some()
    }

    /// Whether it has as much committed without an outcome as it may.
    pub(super) async fn is_over_open_quota(&self, tenant: &str) -> Result<bool, StoreError> {
        match self.inner.open_per_tenant_max {
            Some(max) => Ok(self.inner.store.open_of_tenant(tenant).await? >= u64::from(max)),
            None => Ok(false),
        }
    }

    /// Whether it has as many bytes stored as it may.
    pub(super) async fn is_over_bytes(&self, tenant: &str) -> Result<bool, StoreError> {
        match &self.inner.stored_quota {
            Some(quota) => quota.is_reached(tenant, || self.inner.store.stored_of_tenant(tenant)).await,
            None => Ok(false),
        }
    }

    /// The home of a scope's keys, if it is not here.
    pub(super) fn home_elsewhere(&self, scope: &Scope) -> Option<String> {
        let (here, home) = self.inner.region.as_ref()?;
        home(scope).filter(|home| home != here)
    }

    pub(super) fn usual(&self, operation: &OperationName) -> Option<Duration> {
        lock(&self.inner.usual).get(operation).and_then(|usual| usual.duration())
    }

    pub(super) fn has_run(&self, operation: &OperationName, ran: Duration) {
        lock(&self.inner.usual).entry(operation.clone()).or_default().observe(ran);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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

impl<S: Keys> fmt::Debug for EngineBuilder<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineBuilder").field("store", &self.store).finish_non_exhaustive()
    }
}
